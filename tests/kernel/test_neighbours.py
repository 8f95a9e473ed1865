"""Who else is on the GPU: read from samples of what the driver's tools say, and what a load makes of it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from wpk.ir.errors import TargetError
from wpk.kernel import neighbours
from wpk.kernel.driver import Device
from wpk.kernel.neighbours import Neighbours, Process, find_neighbours, parse_processes, require_alone, sift

GIB = 1 << 30
DEVICE = Device(0, "NVIDIA H200", 132, (9, 0))
OWN = os.getpid()


# --- what the tools print -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("4242, 1024, /usr/bin/python3", Process(4242, "/usr/bin/python3", GIB)),
        ("4242, 1024, python serve.py --sizes 1, 2", Process(4242, "python serve.py --sizes 1, 2", GIB)),
        ("7, [N/A], [Not Found]", Process(7, "Not Found", None)),
        ("7, [Not Supported], ", Process(7, "a process", None)),
        ("7", Process(7, "a process", None)),
    ],
)
def test_a_row_is_a_process(line: str, wanted: Process) -> None:
    assert parse_processes([line]) == [wanted]


def test_a_message_in_place_of_a_row_is_not_a_process() -> None:
    with pytest.raises(ValueError, match="Insufficient Permissions"):
        parse_processes(["[Insufficient Permissions], [Insufficient Permissions], x"])


def test_this_process_is_no_neighbour_but_its_memory_is_explained() -> None:
    own, other = Process(OWN, "python", 30 * GIB), Process(OWN + 1, "python", 2 * GIB)
    assert sift([own], 30 * GIB + 5) == Neighbours((), 5)
    assert sift([own, other], 40 * GIB) == Neighbours((other,), 8 * GIB)
    assert sift([], None) == Neighbours()


def test_memory_that_nobody_in_sight_holds_is_a_hint() -> None:
    assert not sift([], GIB).there
    hidden = sift([], 20 * GIB)
    assert hidden.there and "20.0 GiB held by no process in sight" in str(hidden)


def test_where_a_process_does_not_tell_its_memory_nothing_is_said_of_the_rest() -> None:
    assert sift([Process(OWN + 1, "x", None)], 20 * GIB).unseen == 0


# --- asking -------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, apps: str, used: str, code: int = 0) -> None:
    """An nvidia-smi that says this."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f'#!/bin/sh\ncase "$*" in *compute-apps*) printf "{apps}";; *) printf "{used}";; esac\nexit {code}')
    path.chmod(0o755)
    monkeypatch.setattr(neighbours.shutil, "which", lambda name: str(path))


def test_nvidia_smi_is_asked_where_nvml_is_not_there(
    no_nvml: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    tool(monkeypatch, tmp_path, f"{OWN}, 512, python\\n{OWN + 1}, 1024, other\\n", "4608\\n")
    assert find_neighbours("0000:19:00.0") == Neighbours((Process(OWN + 1, "other", GIB),), 3 * GIB)
    tool(monkeypatch, tmp_path, "", "4\\n")
    assert str(find_neighbours("0")) == "no other process"


@pytest.mark.parametrize(
    ("apps", "code", "says"),
    [("[Insufficient Permissions], x, y\\n", 0, "Insufficient"), ("No devices were found\\n", 6, "No devices")],
)
def test_a_tool_that_does_not_tell(
    apps: str, code: int, says: str, no_nvml: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    tool(monkeypatch, tmp_path, apps, "", code)
    found = find_neighbours("0")
    assert not found.there and str(found).startswith("not known: nvidia-smi") and says in str(found)


def test_no_tool_is_not_known(no_nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours.shutil, "which", lambda name: None)
    assert "nvidia-smi is not there" in str(find_neighbours("0"))


class Nvml(SimpleNamespace):
    """What is asked of pynvml. running: (pid, name or None, bytes or None)."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByPciBusId(self, name: str) -> str:
        return name

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        self.asked = handle
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, _, memory in self.running]

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=self.used)

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        name = next(name for known, name, _ in self.running if known == pid)
        if name is None:
            raise RuntimeError("not found")
        return name.encode()


@pytest.mark.parametrize(("gpu", "asked"), [("1", 1), ("0000:19:00.0", "0000:19:00.0")])
def test_nvml_is_asked_first(gpu: str, asked: object, monkeypatch: pytest.MonkeyPatch) -> None:
    running = [(OWN, "python", GIB), (OWN + 1, "train", GIB), (OWN + 2, None, GIB)]
    nvml = Nvml(running=running, used=3 * GIB)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = find_neighbours(gpu)
    assert found == Neighbours((Process(OWN + 1, "train", GIB), Process(OWN + 2, "a process", GIB)), 0)
    assert (nvml.asked, nvml.open) == (asked, False)


# --- what comes of it ---------------------------------------------------------------------------------------------
OTHER = Neighbours((Process(4242, "train.py", 2 * GIB),))


def told(monkeypatch: pytest.MonkeyPatch, found: Neighbours, exclusive: bool) -> list[str]:
    monkeypatch.setattr(neighbours, "bus_id", lambda device: "0000:19:00.0")
    monkeypatch.setattr(neighbours, "find_neighbours", lambda gpu: found)
    said: list[str] = []
    require_alone(DEVICE, exclusive=exclusive, notice=said.append)
    return said


def test_a_neighbour_is_told_with_cause_and_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = told(monkeypatch, OTHER, exclusive=False)
    assert "train.py (pid 4242, 2.0 GiB)" in said and "slower" in said and "CUDA_VISIBLE_DEVICES" in said


@pytest.mark.parametrize("found", [Neighbours(), Neighbours(unknown="no tool")])
def test_nothing_is_said_where_nobody_is_seen(found: Neighbours, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, found, exclusive=False) == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (OTHER, "found train.py (pid 4242, 2.0 GiB)"),
        (Neighbours(unseen=20 * GIB), "found 20.0 GiB held by no process in sight"),
        (Neighbours(unknown="no tool"), "found not known: no tool. Install nvidia-ml-py"),
    ],
)
def test_exclusive_refuses_neighbours_and_doubt(found: Neighbours, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError) as caught:
        told(monkeypatch, found, exclusive=True)
    assert "wanted no other process on the GPU" in str(caught.value) and says in str(caught.value)


def test_exclusive_is_silent_where_nobody_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, Neighbours(), exclusive=True) == []
