"""Weights from model repositories, fetched with huggingface_hub into a cache of ours."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpk.ir.errors import DownloadError
from wpk.ir.progress import Progress
from wpk.registry.formats import open_folder
from wpk.registry.settings import Settings
from wpk.registry.storage import DISK_ERRORS, publish_file, sha256_bytes, store_errors
from wpk.registry.weights.files import PulledFile, as_file, last_words, offline, pulled_file
from wpk.zoo.sources import HfSource


@dataclass(frozen=True)
class HfRecord:
    """The snapshot folder in the hub cache, and what a pull found in it."""

    folder: Path
    files: list[PulledFile]


def _record_path(source: HfSource, settings: Settings) -> Path:
    chosen = sha256_bytes(json.dumps([source.files, source.aliases], sort_keys=True).encode())[:8]
    name = f"{source.repo}@{source.revision}".replace("/", "--")
    return settings.weights / "hf-files" / f"{name}-{chosen}.json"


def hf_record(source: HfSource, settings: Settings) -> HfRecord | None:
    """What the last pull of this selection found; None where there was none."""
    try:
        value = json.loads(_record_path(source, settings).read_text(encoding="utf-8"))
        return HfRecord(Path(value["folder"]), [as_file(file) for file in value["files"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def pull_hf(source: HfSource, settings: Settings, progress: Progress) -> list[PulledFile]:
    """Fetch what the cache lacks, hash and record it; `WeightsStore.pull` says what is raised."""
    folder = _snapshot(source, settings, progress)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    wanted = _patterns(source)
    names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    for pattern in (*source.files, *source.aliases.values()):
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            found = ", ".join(names) or "nothing"
            raise DownloadError(f"{source} has no file {pattern}", wanted=pattern, found=found)
    files = []
    for name in names:
        file = pulled_file(name, folder / name, progress)
        # The cache keeps large files under their SHA-256: the hash that the hub promised.
        promised = (folder / name).resolve().name
        if re.fullmatch(r"[0-9a-f]{64}", promised) and promised != file["sha256"]:
            raise DownloadError(
                f"{name} of {source} is not what the hub promised",
                wanted=promised,
                found=file["sha256"],
                hint=f"remove {(folder / name).resolve()} and pull again",
            )
        files.append(file)
    if not source.aliases:
        open_folder(folder, [folder / name for name in names])  # every shard that an index lists is there
    text = json.dumps({"folder": str(folder), "files": files}, indent=1) + "\n"
    publish_file(_record_path(source, settings), lambda stream: stream.write(text.encode()), replace=True)
    return files


def _snapshot(source: HfSource, settings: Settings, progress: Progress) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    ours = settings.weights / "hf"

    def snapshot(cache: Path | None, local: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                source.repo,
                revision=source.revision,
                cache_dir=cache,
                allow_patterns=_patterns(source),
                local_files_only=local,
                tqdm_class=_bar(progress),
            )
        )

    if settings.offline:
        for cache in (ours, None):  # ours, then the one that the user shares between tools
            try:
                return snapshot(cache, local=True)
            except (LocalEntryNotFoundError, OSError):  # absent or incomplete in this one
                continue
        raise offline(source)
    progress(f"fetching {source}", 0, 0)
    hints: list[tuple[type[Exception], str]] = [
        (GatedRepoError, "accept the model's terms on its page, then log in with `hf auth login`"),
        (RepositoryNotFoundError, "check the name; if it is private, log in with `hf auth login`"),
        (RevisionNotFoundError, "check the revision"),
        (LocalEntryNotFoundError, "check the network"),
    ]
    try:
        return snapshot(ours, local=False)
    except Exception as error:  # the hub's own errors, its HTTP library's, and the system's
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            with store_errors(ours):
                raise
        hint = next((hint for kind, hint in hints if isinstance(error, kind)), "check the network and try again")
        raise DownloadError(f"{source} could not be fetched", found=last_words(str(error)), hint=hint) from error


def _patterns(source: HfSource) -> list[str]:
    patterns = [*source.files, *source.aliases.values()]
    # An index without its shards is of no use, nor are shards without their index.
    return patterns + [f"{pattern}.index.json" for pattern in source.files if pattern.endswith(".safetensors")]


def _bar(progress: Progress) -> type[Any]:
    """A tqdm class that draws nothing and tells `progress` instead."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = options.get("unit") == "B"
            self._what = str(options.get("desc") or "fetching")
            options.pop("name", None)  # huggingface_hub's own option
            super().__init__(*args, **(options | {"disable": True}))
            self.total = options.get("total")

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._bytes:
                progress(self._what, int(self.n), int(self.total or 0))
            return None

    return Bar
