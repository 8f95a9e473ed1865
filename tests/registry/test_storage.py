"""Storage: a published thing is whole or absent, whoever asks, dies or runs out of disk."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from wpk.ir.errors import StoreError, WeightsError
from wpk.registry import storage
from wpk.registry.storage import locked, publish_file, publish_folder, replace_file, sha256_bytes, sha256_file


def visible(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def put(text: str, calls: list[str] | None = None) -> Any:
    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "text").write_text(text)
        if calls is not None:
            calls.append(text)

    return write


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A second process; it says "ready" when it is where the test wants it."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    search = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": search})


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


# --- hashes


def test_hashes_are_sha256(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(data)
    assert sha256_file(tmp_path / "file") == sha256_bytes(data) == hashlib.sha256(data).hexdigest()


def test_hashing_what_is_not_there_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nothing-here does not exist"):
        sha256_file(tmp_path / "nothing-here")


# --- publishing


def test_a_folder_appears_whole_with_nothing_beside_it(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b" / "key"
    assert publish_folder(final, put("one")) is True
    assert (final / "deep" / "text").read_text() == "one"
    assert visible(final.parent) == ["key"]


def test_a_published_folder_is_not_written_again(tmp_path: Path) -> None:
    calls: list[str] = []
    assert publish_folder(tmp_path / "key", put("one", calls)) is True
    assert publish_folder(tmp_path / "key", put("two", calls)) is False
    assert calls == ["one"]


def test_a_broken_folder_is_exchanged(tmp_path: Path) -> None:
    final = tmp_path / "key"
    publish_folder(final, put("broken"))

    def valid(folder: Path) -> bool:
        return (folder / "deep" / "text").read_text() == "good"

    assert publish_folder(final, put("good"), valid=valid) is True
    assert publish_folder(final, put("never"), valid=valid) is False
    assert (final / "deep" / "text").read_text() == "good"
    assert visible(tmp_path) == ["key"]


def test_replace_exchanges_whatever_is_there(tmp_path: Path) -> None:
    publish_folder(tmp_path / "key", put("one"))
    assert publish_folder(tmp_path / "key", put("two"), replace=True) is True
    assert (tmp_path / "key" / "deep" / "text").read_text() == "two"
    assert publish_file(tmp_path / "file", lambda stream: stream.write(b"1")) is True
    assert publish_file(tmp_path / "file", lambda stream: stream.write(b"2")) is False
    assert publish_file(tmp_path / "file", lambda stream: stream.write(b"3"), replace=True) is True
    assert (tmp_path / "file").read_bytes() == b"3"


@pytest.mark.parametrize("error", [WeightsError("bad"), ValueError("bad"), KeyboardInterrupt(), ConnectionError("net")])
def test_a_failing_writer_leaves_nothing_and_its_error_comes_through(tmp_path: Path, error: BaseException) -> None:
    def folder_writer(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    def file_writer(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise error

    with pytest.raises(type(error)):
        publish_folder(tmp_path / "folder", folder_writer)
    with pytest.raises(type(error)):
        publish_file(tmp_path / "file", file_writer)
    with pytest.raises(type(error)):
        replace_file(tmp_path / "plain", file_writer)
    assert visible(tmp_path) == []


def test_a_failing_rewrite_keeps_what_was_there(tmp_path: Path) -> None:
    publish_folder(tmp_path / "key", put("old"))

    def fail(folder: Path) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        publish_folder(tmp_path / "key", fail, replace=True)
    assert (tmp_path / "key" / "deep" / "text").read_text() == "old"


def test_replace_file_leaves_no_lock_beside_a_users_file(tmp_path: Path) -> None:
    replace_file(tmp_path / "out.wav", lambda stream: stream.write(b"x"))
    replace_file(tmp_path / "out.wav", lambda stream: stream.write(b"y"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.wav"]
    assert (tmp_path / "out.wav").read_bytes() == b"y"


# --- several at once

_PUBLISH = """
    import sys, time
    from pathlib import Path
    from wpk.registry.storage import publish_folder

    def write(folder):
        with open(sys.argv[2], "a") as log:
            log.write("x")
        for index in range(20):
            (folder / f"part{index}").write_text("whole")
            time.sleep(0.01)

    print("ready", flush=True)
    publish_folder(Path(sys.argv[1]), write)
    assert len(list(Path(sys.argv[1]).iterdir())) == 20
"""


def test_of_many_processes_one_writes_and_all_find_it(tmp_path: Path) -> None:
    final, log = tmp_path / "key", tmp_path / "log"
    processes = [python(_PUBLISH, str(final), str(log)) for _ in range(4)]
    while any(process.poll() is None for process in processes):
        if final.exists():  # never seen half-made
            assert len(list(final.iterdir())) == 20
    assert [process.returncode for process in processes] == [0] * 4
    assert log.read_text() == "x"
    assert visible(tmp_path) == ["key", "log"]


def test_of_many_threads_one_writes(tmp_path: Path) -> None:
    calls: list[str] = []
    threads = [threading.Thread(target=publish_folder, args=(tmp_path / "key", put("x", calls))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["x"]


def test_a_held_key_times_out_by_name_and_other_keys_are_free(tmp_path: Path) -> None:
    holder = python(
        """
        import sys, time
        from pathlib import Path
        from wpk.registry.storage import locked
        with locked(Path(sys.argv[1])):
            print("ready", flush=True)
            time.sleep(60)
        """,
        str(tmp_path / "key"),
    )
    try:
        wait_for(holder, "ready")
        with pytest.raises(StoreError, match=r"key is in use by another process") as caught:
            publish_folder(tmp_path / "key", put("x"), timeout=0.1)
        assert caught.value.wanted == "its lock within 0.1 s" and caught.value.hint
        publish_folder(tmp_path / "other", put("x"), timeout=0.1)
    finally:
        holder.kill()
        holder.wait()
    assert publish_folder(tmp_path / "key", put("x"), timeout=5) is True  # its death freed the key


def test_a_thread_that_asks_twice_is_refused_rather_than_hung(tmp_path: Path) -> None:
    with locked(tmp_path / "key"), pytest.raises(StoreError), locked(tmp_path / "key", timeout=0.1):
        pass


# --- killed half-way

_HANG = """
    import sys, time
    from pathlib import Path
    from wpk.registry.storage import publish_folder

    def write(folder):
        (folder / "half").write_text("half")
        print("ready", flush=True)
        time.sleep(60)

    publish_folder(Path(sys.argv[1]), write)
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Any:
    process = python(_HANG, str(tmp_path / "key"))
    wait_for(process, "ready")
    yield process
    process.kill()
    process.wait()


def test_a_killed_writer_publishes_nothing_and_is_swept(tmp_path: Path, hanging: Any) -> None:
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert not (tmp_path / "key").exists()
    assert len(visible(tmp_path)) == 1
    removed = storage.sweep_temporaries(tmp_path)
    assert len(removed) == 1 and removed[0].startswith(".wpk-tmp.key.")
    assert visible(tmp_path) == []


def test_the_next_writer_of_a_key_clears_what_a_killed_one_left(tmp_path: Path, hanging: Any) -> None:
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert publish_folder(tmp_path / "key", put("whole")) is True
    assert visible(tmp_path) == ["key"]


def test_sweeping_spares_a_writer_that_lives(tmp_path: Path, hanging: Any) -> None:
    assert storage.sweep_temporaries(tmp_path) == []
    assert len(visible(tmp_path)) == 1


def test_sweeping_spares_everything_else(tmp_path: Path) -> None:
    publish_folder(tmp_path / "key", put("x"))
    for name in (".hidden", "wpk-tmp.key.1", ".wpk-tmp.", ".wpk-part.out.1"):
        (tmp_path / name).touch()
    before = visible(tmp_path)
    assert storage.sweep_temporaries(tmp_path) == []
    assert visible(tmp_path) == before
    assert storage.sweep_temporaries(tmp_path / "absent") == []


# --- a disk that says no


@pytest.mark.parametrize(
    ("code", "says"),
    [(errno.ENOSPC, "full"), (errno.EROFS, "read-only"), (errno.EACCES, "accessed"), (errno.EDQUOT, "quota")],
)
@pytest.mark.parametrize("where", ["replace", "fsync", "mkdir"])
def test_the_folder_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str, where: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    target = tmp_path / "store" / "key"
    if where == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setattr(os, where, refuse)
    for publish in (partial(publish_folder, target, put_flat), partial(publish_file, target, put_bytes)):
        with pytest.raises(StoreError, match=says) as caught:
            publish()
        assert str(target.parent) in caught.value.message
        assert caught.value.hint and "$WPK_HOME" in caught.value.hint
        assert caught.value.wanted and caught.value.found
    monkeypatch.undo()
    assert not target.exists()
    assert not target.parent.exists() or visible(target.parent) == []


def put_flat(folder: Path) -> None:
    (folder / "file").write_text("x")


def put_bytes(stream: BinaryIO) -> None:
    stream.write(b"x")


def test_a_disk_full_inside_the_writer_is_a_store_error(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match="is full"):
        publish_folder(tmp_path / "key", fill)
    assert visible(tmp_path) == []


def test_a_file_where_the_store_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    with pytest.raises(StoreError, match=r"home.* is not a folder") as caught:
        publish_folder(tmp_path / "home" / "weights" / "key", put("x"))
    assert caught.value.hint


def test_a_file_in_the_place_of_a_key_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("precious")
    with pytest.raises(StoreError, match="key is in the way") as caught:
        publish_folder(tmp_path / "key", put("x"))
    assert caught.value.wanted == "a folder" and caught.value.found == "a file"
    assert (tmp_path / "key").read_text() == "precious"


def test_reading_a_published_folder_needs_no_lock(tmp_path: Path) -> None:
    publish_folder(tmp_path / "key", put("x"))
    with locked(tmp_path / "key"):
        start = time.monotonic()
        assert publish_folder(tmp_path / "key", put("y")) is False
        assert time.monotonic() - start < 1
