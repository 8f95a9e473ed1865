"""Where measurements are kept: one JSON file an attempt, failures included, nothing ever overwritten."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from wpk.ir.errors import StoreError, WpkError
from wpk.registry.storage import store_errors

FOLDER = Path("bench", "results")


def keep(record: dict[str, Any], name: str, out: Path | None = None) -> Path:
    """Write a record as NAME-TIME.json in a folder, `bench/results` of the present folder by default; its path.

    out: another folder, or a file that ends in .json and must not exist yet.
    """
    text = _NUMBERS.sub(_in_one_line, json.dumps(record, indent=1, allow_nan=False)) + "\n"
    if out is not None and out.suffix == ".json":
        return _create(out, text, again=False)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder = FOLDER if out is None else out
    for attempt in count(1):
        path = folder / f"{name}-{moment}{'' if attempt == 1 else f'-{attempt}'}.json"
        try:
            return _create(path, text, again=True)
        except FileExistsError:
            continue
    raise AssertionError


_NUMBERS = re.compile(r"\[\n\s*[-+.\de,\s]+\]")  # no string holds a line's end


def _in_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")


def described_error(error: BaseException) -> dict[str, str | None]:
    """What a record says of the error that ended an attempt."""
    if isinstance(error, WpkError):
        return error.as_dict()
    return {"type": type(error).__name__, "message": str(error), "wanted": None, "found": None, "hint": None}


def _create(path: Path, text: str, *, again: bool) -> Path:
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        if again:
            raise
        raise StoreError(
            f"{path} exists, and results are never overwritten",
            wanted="a new file",
            found="an old one",
            hint="choose another --out",
        ) from None
    except OSError as error:
        with store_errors(path.parent):
            raise error
    return path
