"""Files as a pull reports them and as they should still be; and what is said where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from wpk.ir.errors import OfflineError, WeightsError
from wpk.ir.progress import Progress
from wpk.registry.storage import sha256_file
from wpk.zoo.sources import AnySource, PathSource

FILES = "files.json"  # beside a wheel's files: what was pulled


class PulledFile(TypedDict):
    """One file as `wpk zoo pull` reports it. bytes: its size. sha256: 64 hex digits."""

    name: str
    bytes: int
    sha256: str


def pulled_file(name: str, path: Path, progress: Progress) -> PulledFile:
    """A file hashed, `name` being what the report calls it."""
    size = path.stat().st_size
    progress(f"checking {name}", 0, size)
    digest = sha256_file(path)
    progress(f"checking {name}", size, size)
    return {"name": name, "bytes": size, "sha256": digest}


def as_file(value: Any) -> PulledFile:
    """A record of JSON; raises KeyError, TypeError or ValueError where it is none."""
    return {"name": str(value["name"]), "bytes": int(value["bytes"]), "sha256": str(value["sha256"])}


def wrong_sizes(folder: Path, files: Sequence[PulledFile] | None = None) -> list[tuple[str, int, int | None]]:
    """(name, size wanted, size found or None) of each file that is not as its record says."""
    if files is None:
        try:
            files = [as_file(file) for file in json.loads((folder / FILES).read_text(encoding="utf-8"))]
        except (OSError, ValueError, KeyError, TypeError):
            return [(FILES, 0, None)]
    wrong: list[tuple[str, int, int | None]] = []
    for file in files:
        path = folder / file["name"]
        found = path.stat().st_size if path.is_file() else None
        if found != file["bytes"]:
            wrong.append((file["name"], file["bytes"], found))
    return wrong


def require_sizes(source: AnySource, folder: Path, wrong: Sequence[tuple[str, int, int | None]]) -> None:
    """Raise WeightsError where `wrong_sizes` found something: nothing here at all, or damaged."""
    if not wrong:
        return
    if not folder.is_dir() or all(found is None for _, _, found in wrong):
        raise not_here(source)
    raise WeightsError(
        f"weights of {source} are damaged in {folder}",
        wanted=", ".join(f"{name} {wanted} bytes" for name, wanted, _ in wrong),
        found=", ".join(f"{name} {'absent' if found is None else f'{found} bytes'}" for name, _, found in wrong),
        hint="`wpk zoo pull` fetches them again",
    )


def not_here(source: AnySource) -> WeightsError:
    hint = "check the path in the spec" if isinstance(source, PathSource) else "fetch them with `wpk zoo pull`"
    return WeightsError(f"weights of {source} are not here", wanted="a complete copy", found="none", hint=hint)


def offline(what: object) -> OfflineError:
    return OfflineError(
        f"{what} is not here, and fetching is switched off",
        wanted="a complete copy",
        found="none",
        hint="unset WPK_OFFLINE and HF_HUB_OFFLINE, or copy the files into $WPK_HOME",
    )


def path_files(source: PathSource) -> list[Path]:
    """The one path of a source, or the aliased files below it; they may be absent."""
    root = Path(source.path).expanduser()
    return [root / path for path in source.aliases.values()] or [root]


def tree(path: Path) -> list[Path]:
    """The file itself, or the files directly in a folder; WeightsError where there is neither."""
    if not path.exists():
        hint = "check the path in the spec"
        raise WeightsError(f"{path} does not exist", wanted="a file or folder of weights", found="nothing", hint=hint)
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def last_words(output: str) -> str:
    """What a failed command said last, without credentials that addresses may carry."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR")] or lines
    return re.sub(r"//[^/\s@]+@", "//***@", " | ".join(said[-3:]))[-600:] or "nothing said"
