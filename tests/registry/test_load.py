"""`load` on a GPU, mostly as far as that goes without one: who else is there, and what is passed on to the kernel."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.kernel.machine import model
from wpk import registry
from wpk.ir.errors import TargetError, UsageError
from wpk.kernel import neighbours
from wpk.kernel.driver import Device, find_device
from wpk.kernel.layout import DONE, STAMPS, STARTED
from wpk.kernel.neighbours import Neighbours, Process, find_neighbours
from wpk.registry.settings import Settings
from wpk.runtime.trace import trace_events

SPEC = model()
TRAINING = Neighbours((Process(4242, "train.py"),))


class Begun(Exception):
    """All checks are passed: the kernel would start now."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that others may use, and what its kernel was to be started with."""
    module, asked = sys.modules["wpk.registry.load"], {"found": Neighbours()}

    def start(*_: object, **options: object) -> None:
        asked.update(options)
        raise Begun

    monkeypatch.setattr(module, "find_device", lambda: Device(0, "NVIDIA H200", 132, (9, 0)))
    monkeypatch.setattr(module, "build_machine_code", lambda *_: None)
    monkeypatch.setattr(module, "start_on_gpu", start)
    monkeypatch.setattr(neighbours, "bus_id", lambda device: "0000:19:00.0")
    monkeypatch.setattr(neighbours, "find_neighbours", lambda gpu: asked["found"])
    return asked


def load(where: Settings, **options: Any) -> None:
    with pytest.raises(Begun):
        registry.load(SPEC, capacity=2, target="h200", where=where, **options)


@pytest.mark.parametrize("trace", [False, True])
def test_the_kernel_is_told_whether_to_record(trace: bool, gpu: dict[str, Any], shared: Settings) -> None:
    load(shared, trace=trace, exclusive=True)
    assert gpu["trace"] is trace


def test_who_else_is_on_the_gpu_is_said_before_the_kernel_starts(gpu: dict[str, Any], shared: Settings) -> None:
    gpu["found"], said = TRAINING, []
    load(shared, notice=said.append)
    assert len(said) == 1 and "train.py (pid 4242)" in said[0]
    with pytest.warns(RuntimeWarning, match=r"train\.py") as caught:
        load(shared)
    assert caught[0].filename == __file__


def test_exclusive_use_is_refused_beside_others(gpu: dict[str, Any], shared: Settings) -> None:
    gpu["found"] = TRAINING
    with pytest.raises(TargetError, match=r"wanted no other process on the GPU; found train\.py \(pid 4242\)"):
        registry.load(SPEC, capacity=2, target="h200", where=shared, exclusive=True)
    assert "trace" not in gpu


def test_a_cpu_records_no_trace_and_has_no_neighbours(shared: Settings) -> None:
    with pytest.raises(TargetError, match="only GPU kernels record traces"):
        registry.load(SPEC, capacity=2, target="cpu", where=shared, trace=True)
    cohort = registry.load(SPEC, capacity=2, target="cpu", where=shared, exclusive=True)
    with cohort, pytest.raises(TargetError, match="only GPU kernels record traces"):
        cohort.trace()


@pytest.mark.parametrize(
    ("built", "name", "told"),
    [(False, "NVIDIA H200", True), (True, "NVIDIA H200", False), (False, "another GPU", False), (False, None, False)],
)
def test_a_gpu_that_is_left_idle_is_told_of(
    built: bool, name: str | None, told: bool, shared: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> Device:
        if name is None:
            raise TargetError("no GPU", wanted="GPU 0", found="no driver")
        return Device(0, name, 132, (9, 0))

    module, said = sys.modules["wpk.registry.build"], []
    monkeypatch.setattr(module, "can_build", lambda: built)
    monkeypatch.setattr(module, "find_device", find)
    monkeypatch.setattr(module, "default_target", lambda: "cpu")
    registry.load(SPEC, capacity=2, where=shared, notice=said.append).close()
    assert [text.partition(" is left idle")[0] for text in said] == ["NVIDIA H200"] * told
    registry.load(SPEC, capacity=2, target="cpu", where=shared, notice=said.append).close()
    assert len(said) == told  # who asks for the CPU is told nothing


def test_a_trace_is_what_the_kernel_recorded(shared: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording:
        moments = np.ones((3, 2, STAMPS), np.int64)

        def trace(self) -> Any:
            return self.moments

    kernel = Recording()
    with registry.load(SPEC, capacity=2, target="cpu", where=shared) as cohort:
        with monkeypatch.context() as patch:
            patch.setattr(cohort, "_kernel", kernel)
            assert cohort.trace() is kernel.moments
            kernel.moments = kernel.moments[:0]
            with pytest.raises(UsageError, match="trace=True"):
                cohort.trace()
        assert cohort.program.slots == 2


# --- on a GPU -----------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_a_trace_holds_the_last_beat_and_nothing_else(shared: Settings) -> None:
    with registry.load(SPEC, capacity=2, where=shared, trace=True) as cohort:
        assert cohort.profile.target != "cpu"
        cohort.join()
        cohort.beat()
        before = cohort.trace()
        cohort.beat()
        moments, span = cohort.trace(), 1e6 * cohort.last_ms
        events = trace_events(cohort.program, moments, "small")
        tasks = {(int(task["wave"]), int(task["block"])) for task in cohort.program.tasks}
    started, done = moments[..., STARTED], moments[..., DONE]
    assert started.min() >= before[..., DONE].max() and (done >= started).all()
    assert (np.diff(started, axis=0) >= 0).all() and (started[1:] >= done[:-1]).all()
    assert done.max() - started.min() <= span + 10_000  # the clock may tick in microseconds
    waves = [event for event in events if event["ph"] == "X" and "operators" in event["args"]]
    assert len(waves) == len(tasks)


OCCUPY = """
import sys
from wpk.kernel.driver import Gpu, find_device
gpu = Gpu(find_device())
gpu.allocate(3 << 30)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_another_process_on_the_gpu_is_seen(shared: Settings) -> None:
    alone = find_neighbours(neighbours.bus_id(find_device()))
    if alone.unknown is not None or alone.there:  # in a container, earlier tests of this process look like others
        pytest.skip(str(alone))
    command = [sys.executable, "-c", OCCUPY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "there\n"
        said: list[str] = []
        with registry.load(SPEC, capacity=2, where=shared, notice=said.append) as cohort:
            cohort.beat()
        assert len(said) == 1 and "GiB" in said[0]
        with pytest.raises(TargetError, match="wanted no other process on the GPU"):
            registry.load(SPEC, capacity=2, where=shared, exclusive=True)
        other.communicate("")
    registry.load(SPEC, capacity=2, where=shared, exclusive=True).close()
