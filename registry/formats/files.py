"""What the readers share: opening a file, and saying what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from wpk.ir.errors import WeightsError

DAMAGED = "the file is damaged or incomplete: fetch it again"
MAX_HEADER = 256 << 20  # bytes of JSON or pickle; the largest published models stay far below


def readable(path: Path) -> IO[bytes]:
    """The file, open for reading; WeightsError says why where it is none that can be read."""
    if not path.exists():
        raise WeightsError(f"{path} does not exist", wanted="a weights file", found="nothing")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device"
        raise WeightsError(f"{path} is no file", wanted="a weights file", found=kind)
    try:
        return open(path, "rb")
    except OSError as error:
        raise WeightsError(f"{path} cannot be read", found=error.strerror) from error


def first_line(error: BaseException) -> str:
    """An error of other people's code in one short line, for `found`."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
