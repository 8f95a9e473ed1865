"""The sink: one JSON object or names or text on stdout, errors in four parts, exit codes, no traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wpk.cli.output import (
    Fields,
    InternalError,
    Output,
    Table,
    error_text,
    exit_code,
    guard,
    size,
    to_json,
    write,
)
from wpk.ir.errors import CapacityError, UnknownModelError, UsageError, WpkError
from wpk.ir.types import DType

TABLE = Table(("name", "count", "note"), [("a", 1234, None), ("long name", 5, "x")])


def test_a_table_is_aligned_columns_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result({}, blocks=[TABLE, Fields({"key": 1.23456, "longer": True}, title="fields"), "done"])
    assert capsys.readouterr().out.splitlines() == [
        "name       count  note",
        "a          1,234  -",
        "long name      5  x",
        "",
        "fields",
        "key     1.235",
        "longer  yes",
        "done",
    ]


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json=True, quiet=True).result({"a": 1}, names=["n"], blocks=[TABLE])
    out = capsys.readouterr()
    assert json.loads(out.out) == {"a": 1} and out.out.count("\n") == 1 and out.err == ""


def test_quiet_is_names_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output(quiet=True).result({"a": 1}, names=["one", "two"], blocks=[TABLE])
    assert capsys.readouterr().out == "one\ntwo\n"


def test_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result({}, blocks=[Table(("a",), [], empty="nothing yet")])
    assert capsys.readouterr().out == "nothing yet\n"


def test_json_takes_numpy_paths_enums_and_never_writes_nan() -> None:
    value = {
        "array": np.array([[1.5, np.nan]], np.float32),
        "count": np.int64(7),
        "path": Path("x/y"),
        "kind": DType.F32,
        "inf": float("inf"),
        "set": frozenset({1}),
        "text": "\u00e9\ud800",
        7: None,
    }
    assert json.loads(to_json(value)) == {
        "array": [[1.5, None]],
        "count": 7,
        "path": "x/y",
        "kind": "f32",
        "inf": None,
        "set": [1],
        "text": "\u00e9\ud800",
        "7": None,
    }
    with pytest.raises(TypeError, match="object has no JSON form"):
        to_json({"a": object()})


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        write(stream, "na\u00efve \udc80\n")
    assert (tmp_path / "out").read_text() == "na\\xefve \\udc80\n"


def test_an_error_is_cause_wanted_found_mend() -> None:
    error = WpkError("the cause\n  more", wanted="this", found="that\nand that", hint="do so")
    assert error_text(error) == (
        "error: the cause\n  more\n  wanted  this\n  found   that\n          and that\n  mend    do so\n"
    )
    assert error_text(WpkError("bare")) == "error: bare\n"


def test_exit_codes() -> None:
    assert exit_code(UsageError("x")) == 2
    assert exit_code(CapacityError("x", capacity=0)) == 2
    assert exit_code(CapacityError("x", capacity=10**9)) == 1
    assert exit_code(UnknownModelError("x")) == 1
    assert exit_code(InternalError("x")) == 1


def failing(error: BaseException) -> Any:
    def command() -> None:
        raise error

    return command


def test_an_error_goes_to_stderr_and_with_json_to_stdout_too(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnknownModelError("no model 'x'", wanted="a", found="x", hint="h")
    assert guard(failing(error), json=False) == 1
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("error: no model 'x'\n  wanted  a\n")
    assert guard(failing(error), json=True) == 1
    out = capsys.readouterr()
    assert json.loads(out.out) == {
        "error": {"type": "UnknownModelError", "message": "no model 'x'", "wanted": "a", "found": "x", "hint": "h"}
    }
    assert out.err.startswith("error: no model 'x'")


def test_the_unforeseen_is_typed_and_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WPK_DEBUG", raising=False)
    assert guard(failing(ZeroDivisionError("by zero")), json=True) == 1
    out = capsys.readouterr()
    found = json.loads(out.out)["error"]
    assert found["type"] == "InternalError" and found["found"] == "ZeroDivisionError: by zero"
    assert "Traceback" not in out.err and "WPK_DEBUG" in out.err


def test_wpk_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WPK_DEBUG", "1")
    assert guard(failing(ZeroDivisionError("by zero")), json=False) == 1
    assert "Traceback" in capsys.readouterr().err


def test_memory_that_runs_out_is_said_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(failing(MemoryError()), json=False) == 1
    assert "lower --cap" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(failing(KeyboardInterrupt()), json=True) == 130
    out = capsys.readouterr()
    assert json.loads(out.out)["error"]["type"] == "InterruptedRun" and "Traceback" not in out.err


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress() as report:
        report("x", 1, 2)
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")


def test_tables_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    Output().result({}, blocks=[TABLE])
    assert "\u2500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (10**10, "9.3 GiB"), (10**16, "9094.9 TiB")]
)
def test_sizes_read_well(count: int, text: str) -> None:
    assert size(count) == text


# --- the operating system's errors, and streams that are closed ---------------------------------------------------
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, "PermissionError"), (errno.EISDIR, "IsADirectoryError"), (errno.ENOTDIR, "NotADirectoryError"),
     (errno.ENAMETOOLONG, "OSError"), (errno.ENOSPC, "OSError"), (errno.EXDEV, "OSError")],
)  # fmt: skip
def test_errors_of_the_disk_name_the_path_and_a_mend(
    number: int, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guard(failing(OSError(number, os.strerror(number), "/some/where")), json=True) == 1
    found = json.loads(capsys.readouterr().out)["error"]
    assert found["type"] == "StoreError" and "/some/where" in found["message"]
    assert found["found"] == f"{kind}: {os.strerror(number)}" and found["wanted"] and found["hint"]


class Full(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


def test_a_closed_stdout_ends_with_1_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, Full(errno.ENOSPC)):
        monkeypatch.setattr(sys, "stdout", stream)
        assert guard(lambda: Output().result({}, blocks=[TABLE]), json=False) == 1
        said = sys.stderr.getvalue() if isinstance(sys.stderr, io.StringIO) else capsys.readouterr().err
        assert said.startswith("error: stdout cannot be written") and "Traceback" not in said
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    assert guard(lambda: Output().result({}, blocks=[TABLE]), json=False) == 1
    assert capsys.readouterr().err == ""


def test_the_json_error_comes_whatever_becomes_of_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (None, Full(errno.ENOSPC), Full(errno.EPIPE)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert guard(failing(UnknownModelError("no model 'x'")), json=True) == 1
        assert json.loads(capsys.readouterr().out)["error"]["type"] == "UnknownModelError"
