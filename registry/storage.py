"""Files and folders that appear whole or not at all: the one hash, the one lock, the one way to publish.

A published thing has a *key*: its final path. Beside it lie, while needed,

    .KEY.lock                 the lock of the key; the operating system frees it when its holder dies
    .wpk-tmp.KEY.RANDOM       a thing being written under that lock; never read by anyone else

So a temporary whose key lock is free has no living writer, whatever its age or process id, and may be swept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from wpk.ir.errors import StoreError

LOCK_TIMEOUT_S = 900.0
_TEMPORARY = ".wpk-tmp."
_UNLOCKED_TEMPORARY = ".wpk-part."  # replace_file's: no lock tells whether its writer lives, so never swept

_SPACE = "free some space, or set $WPK_HOME to a folder on another disk"
_WRITABLE = "set $WPK_HOME to a folder that you can write"
_IN_THE_WAY = "a file is where a folder should be: move it away, or set $WPK_HOME to another folder"
_HINTS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("is full", _SPACE),
    errno.EDQUOT: ("is over its quota", _SPACE),
    errno.EROFS: ("is read-only", _WRITABLE),
    errno.EACCES: ("may not be accessed", _WRITABLE),
    errno.EPERM: ("may not be changed", _WRITABLE),
    errno.ENOTDIR: ("is not a folder", _IN_THE_WAY),
    errno.EEXIST: ("is not a folder", _IN_THE_WAY),
    errno.EISDIR: ("has a folder where a file should be", "move the folder away"),
    errno.ENAMETOOLONG: ("cannot hold so long a name", "choose a shorter name, or a shorter $WPK_HOME"),
}

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
"""What an OSError of other people's code says about the disk for certain, rather than about a network or a file."""


def sha256_bytes(data: bytes | bytearray | memoryview) -> str:
    """SHA-256 as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces. Raises StoreError where it cannot be read."""
    with store_errors(path), open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def store_errors(place: Path, *, every: bool = True) -> Iterator[None]:
    """Turn OSError inside into StoreError that names `place` and says how to mend it.

    every=False translates only what is certainly about the disk (full, read-only, no permission, ...): for code
    of others, whose OSError may as well be a network's.
    """
    try:
        yield
    except OSError as error:
        known = _HINTS.get(error.errno or 0)
        if not every and (known is None or error.errno not in DISK_ERRORS):
            raise
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"{error.filename or place} does not exist", wanted="a file or folder") from error
        state, hint = known or ("cannot be used", "check the disk, or set $WPK_HOME to another folder")
        wanted = "a place to read and write"
        raise StoreError(f"{place} {state}", wanted=wanted, found=str(error), hint=hint) from error


@contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the key `path` against every other thread and process; the lock file is `.NAME.lock` beside it.

    timeout: seconds to wait; 0 tries once. Raises StoreError on timeout and where the lock cannot be made.
    Not re-entrant: the same thread asking twice for one key is refused.
    """
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(_lock_path(path), timeout=timeout)
        try:
            lock.acquire()
        except Timeout as error:
            raise StoreError(
                f"{path} is in use by another process",
                wanted=f"its lock within {timeout:g} s",
                found="still held",
                hint="wait for the other process, or stop it",
            ) from error
        except RuntimeError as error:  # filelock saw that this very thread holds it
            raise StoreError(f"{path} is already locked by this thread", found=str(error)) from error
    try:
        yield
    finally:
        lock.release()


def publish_folder(
    final: Path,
    writer: Callable[[Path], object],
    *,
    valid: Callable[[Path], bool] | None = None,
    replace: bool = False,
    timeout: float = LOCK_TIMEOUT_S,
) -> bool:
    """Make the folder `final` with what `writer(temporary_folder)` puts in, all of it or nothing.

    The writer runs under the key's lock, at most once however many processes ask; who waited finds the folder
    there. An existing folder stays as it is, unless replace=True or `valid(final)` says that it is broken; then it
    is exchanged (for an instant, readers without the lock find neither). Returns whether the writer ran.
    Raises StoreError (full, read-only, no permission, lock timeout), and what the writer raises.
    """

    def make(temporary: Path) -> None:
        temporary.mkdir()
        writer(temporary)

    return _publish(final, make, Path.is_dir, valid, replace, timeout)


def publish_file(
    final: Path,
    writer: Callable[[BinaryIO], object],
    *,
    valid: Callable[[Path], bool] | None = None,
    replace: bool = False,
    timeout: float = LOCK_TIMEOUT_S,
) -> bool:
    """Like publish_folder, for one file; an existing file is exchanged without a gap."""

    def make(temporary: Path) -> None:
        with open(temporary, "xb") as stream:
            writer(stream)

    return _publish(final, make, Path.is_file, valid, replace, timeout)


def withdraw_folder(final: Path) -> None:
    """Remove a published folder: gone at once, even if the removal itself is killed half-way."""
    with locked(final), store_errors(final.parent):
        os.replace(final, final.with_name(f"{_TEMPORARY}{final.name}.{secrets.token_hex(4)}"))
        _sweep_key(final)


def replace_file(path: Path, writer: Callable[[BinaryIO], object]) -> None:
    """Write a file of the user's own, whole or not at all, without a lock (and so without a lock file beside it)."""
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_UNLOCKED_TEMPORARY}{path.name}.{secrets.token_hex(4)}")
    try:
        with store_errors(path.parent, every=False):
            with open(temporary, "xb") as stream:
                writer(stream)
            _sync(temporary)
            os.replace(temporary, path)
    finally:
        _remove(temporary)


def sweep_temporaries(folder: Path) -> list[str]:
    """Remove what killed processes left half-written in `folder` (not below it); returns the names removed.

    A temporary whose writer still runs is left alone: its key is locked.
    """
    removed = []
    for key in sorted({_key_of(entry) for entry in _temporaries(folder)}):
        try:
            with locked(folder / key, timeout=0):
                removed += _sweep_key(folder / key)
        except StoreError:
            continue  # being written now, or not ours to remove
    return removed


def _publish(
    final: Path,
    make: Callable[[Path], object],
    exists: Callable[[Path], bool],
    valid: Callable[[Path], bool] | None,
    replace: bool,
    timeout: float,
) -> bool:
    def done() -> bool:
        return not replace and exists(final) and (valid is None or valid(final))

    if done():  # without the lock: a published thing never changes, and reading needs no right to write
        return False
    with locked(final, timeout):
        if done():
            return False
        with store_errors(final.parent):
            _sweep_key(final)
            if final.exists() and not exists(final):
                raise StoreError(
                    f"{final} is in the way",
                    wanted="a folder" if final.is_file() else "a file",
                    found="a file" if final.is_file() else "a folder",
                    hint="move it away",
                )
        temporary = final.with_name(f"{_TEMPORARY}{final.name}.{secrets.token_hex(4)}")
        try:
            with store_errors(final.parent, every=False):
                make(temporary)
                _sync(temporary)
                if final.is_dir():
                    # rename cannot replace a folder that is not empty; what moves aside is swept if we die here
                    os.replace(final, final.with_name(f"{_TEMPORARY}{final.name}.{secrets.token_hex(4)}"))
                os.replace(temporary, final)
                _sync_folder(final.parent)
        finally:
            _sweep_key(final)
    return True


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _temporaries(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [entry for entry in entries if entry.name.startswith(_TEMPORARY) and _key_of(entry)]


def _key_of(temporary: Path) -> str:
    return temporary.name.removeprefix(_TEMPORARY).rpartition(".")[0]


def _sweep_key(final: Path) -> list[str]:
    """Remove the temporaries of one key; the caller holds its lock."""
    stale = [entry for entry in _temporaries(final.parent) if _key_of(entry) == final.name]
    for entry in stale:
        _remove(entry)
    return [entry.name for entry in stale]


def _remove(path: Path) -> None:
    # Best effort: it runs while another error may be on its way up, which must not be hidden.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync(path: Path) -> None:
    """Bring a file, or a folder with all it holds, to the disk: else the rename may outlive the bytes."""
    if path.is_dir():
        for folder, _, names in os.walk(path):
            for name in names:
                _sync_file(Path(folder, name))
            _sync_folder(Path(folder))
    else:
        _sync_file(path)


def _sync_file(path: Path) -> None:
    # Windows syncs only what is open for writing; elsewhere a writer may have left a file without write permission.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # a folder has no handle to sync there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
