"""`load` on a GPU, as far as that goes without one: who else is there, and what is passed on to the kernel."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.kernel.machine import model
from wpk import registry
from wpk.ir.errors import TargetError, UsageError
from wpk.kernel import neighbours
from wpk.kernel.driver import Device
from wpk.kernel.layout import STAMPS
from wpk.kernel.neighbours import Neighbours, Process
from wpk.registry.settings import Settings

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
