"""The command line as a whole: usage errors, help, version, signals, pipes, and what starting it costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import Wav, Wpk

MODULE = (sys.executable, "-m", "wpk.cli.main")


def environment() -> dict[str, str]:
    """This process's, with the packages that it finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def child(*words: object) -> subprocess.Popen[str]:
    """The command line as a process of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*MODULE, *map(str, words)], stdout=pipe, stderr=pipe, text=True, env=environment())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nothing"], "nothing"),
        (["zoo", "nothing"], "nothing"),
        (["zoo", "show"], "NAME"),
        (["zoo", "list", "extra"], "extra"),
        (["zoo", "list", "--nothing"], "--nothing"),
        (["profile", "build", "m"], "--cap"),
        (["profile", "build", "m", "--cap", "many"], "--cap"),
        (["run", "m", "--cap"], "--cap"),
        (["bench", "beat", "m", "--cap", "1", "--seconds", "-"], "--seconds"),
    ],
)
def test_wrong_use_is_a_typed_error_with_code_2(wpk: Wpk, words: list[str], named: str) -> None:
    said = wpk(*words, "--json")
    assert said.code == 2
    assert said.error["type"] == "UsageError"
    assert named in said.error["message"]
    assert said.error["wanted"].startswith("wpk ")
    assert "--help" in said.error["hint"]
    plain = wpk(*words)
    assert plain.code == 2
    assert plain.out == ""


def test_a_mistyped_command_is_answered_with_close_ones(wpk: Wpk) -> None:
    assert "'profile'" in wpk("profil", "--json").error["message"]


@pytest.mark.parametrize("words", [[], ["zoo"], ["profile"], ["bench"]])
def test_a_group_alone_shows_its_help_and_is_wrong_use(wpk: Wpk, words: list[str]) -> None:
    said = wpk(*words)
    assert said.code == 2
    assert "Usage" in said.out + said.err
    assert "error" not in said.err


@pytest.mark.parametrize("words", [["-h"], ["zoo", "--help"], ["run", "--help"], ["bench", "beat", "-h"]])
def test_help(wpk: Wpk, words: list[str]) -> None:
    said = wpk(*words)
    assert said.code == 0
    assert "Usage" in said.out


def test_version(wpk: Wpk) -> None:
    said = wpk("--version")
    assert said.code == 0
    assert said.out.startswith("wpk ")


def test_every_command_takes_json_and_quiet(wpk: Wpk) -> None:
    import typer.main

    from wpk.cli.main import app

    def leaves(command: Any) -> list[Any]:
        inner = getattr(command, "commands", None)
        return [command] if inner is None else [leaf for one in inner.values() for leaf in leaves(one)]

    found = leaves(typer.main.get_command(app))
    assert len(found) >= 19
    for command in found:
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--json", "-q"} <= options, command.name


def test_ops_list_and_show(wpk: Wpk) -> None:
    rows = wpk("ops", "list", "--json").json["operators"]
    assert {"name", "version", "digest", "targets"} == set(rows[0])
    linear = next(row for row in rows if row["name"] == "linear")
    (shown,) = wpk("ops", "show", f"linear@{linear['version']}", "--json").json["operators"]
    assert shown["digest"] == linear["digest"]
    assert shown["operands"]
    assert wpk("ops", "show", "linear", "-q").out == "linear@1\n"
    assert "linear@1" in wpk("ops", "show", "linear").out
    assert "linear" in wpk("ops", "list").out


@pytest.mark.parametrize(("name", "code"), [("linea", 1), ("linear@99", 1), ("linear@x", 2)])
def test_ops_show_refuses_what_is_not_there(wpk: Wpk, name: str, code: int) -> None:
    said = wpk("ops", "show", name, "--json")
    assert said.code == code
    assert said.error["type"] == ("UsageError" if code == 2 else "OperatorError")


def test_the_unforeseen_is_an_internal_error(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("wpk.zoo.catalog.Catalog.list", broken)
    said = wpk("zoo", "list", "--json")
    assert said.code == 1
    assert said.error["type"] == "InternalError"
    assert "a defect" in said.error["found"]


# --- as a process


def test_help_does_not_wait_for_a_compiler(store: Path) -> None:
    code = "import sys, wpk.cli.main; print([m for m in ('numba', 'onnx', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_says_the_same(store: Path) -> None:
    process = child("zoo", "show", "nobody", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert json.loads(out)["error"]["type"] == "UnknownModelError"
    assert err.startswith("error: ")


def test_a_reader_that_leaves_is_no_traceback(store: Path) -> None:
    process = child("ops", "list")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 1
    assert err == ""


PLAYING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from wpk.runtime import play
start = play.Schedule.start
play.Schedule.start = lambda self: (print("beat", file=sys.stderr, flush=True), start(self))
from wpk.cli.main import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to a child there")
def test_ctrl_c_ends_a_run_with_130(tiny: str, wav: Wav) -> None:
    words = ["run", tiny, "--wav", str(wav("long.wav", 60)), "--realtime", "--json"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PLAYING, *words]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment())
    assert process.stderr is not None
    assert process.stderr.readline() == "beat\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["error"]["type"] == "InterruptedRun"
    assert "Traceback" not in err
