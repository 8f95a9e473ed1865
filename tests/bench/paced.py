"""A cohort that is no cohort: it answers by a clock that moves when it works, so that runs take no time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.zoo.specs import small
from wpk import registry
from wpk.bench import density
from wpk.ir.errors import KernelError
from wpk.runtime.play import Schedule
from wpk.scheduler.cost import Floor
from wpk.zoo.spec import ModelSpec

PERIOD_MS = 10.0
FLOOR = Floor(compute_ms=0.1, bandwidth_ms=0.5, path_ms=0.2, floor_ms=0.5, bytes={"weights": 1}, flops={"bf16": 1})
Work = Callable[[int, int], tuple[float, float]]  # capacity, beat since the load -> ms of the kernel and of the host


class Clock:
    """Nanoseconds that move when someone sleeps or works."""

    def __init__(self) -> None:
        self.now = 1_000_000_007

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(1, round(seconds * 1e9))

    def work(self, ms: float) -> None:
        self.now += round(ms * 1e6)


class Fake:
    """A loaded cohort. Every beat takes what `work` says, or fails at beat `fail_at`."""

    def __init__(self, capacity: int, clock: Clock, work: Work, fail_at: int | None) -> None:
        self.capacity, self._clock, self._work, self._fail_at = capacity, clock, work, fail_at
        self.spec = ModelSpec.from_data(small())
        self.profile = SimpleNamespace(
            id=f"small-cap{capacity}", model="small", capacity=capacity, context=100, target="cpu", period_ms=PERIOD_MS,
            steps_per_beat=1, phases=3, waves=2, program_sha256="0", floor_ms=0.5, floor=FLOOR, predicted_ms=0.7,
        )  # fmt: skip
        self.sessions: list[Any] = []
        self.seeds: list[int] = []
        self.beats = 0
        self.last_span = (0, 0)

    def join(self, *, seed: int = 0) -> Any:
        self.seeds.append(seed)
        self.sessions.append(object())
        return self.sessions[-1]

    def leave(self, session: Any) -> None:
        self.sessions.remove(session)

    def beat(self, inputs: dict[Any, dict[str, Any]]) -> None:
        if self.beats == self._fail_at:
            raise KernelError("it stalled", wanted="an answer", found="none")
        assert list(inputs) == self.sessions and len(self.sessions) == self.capacity
        kernel, host = self._work(self.capacity, self.beats)
        begun = self._clock.now
        self._clock.sleep(kernel / 1e3)
        self.last_span = (begun, self._clock.now)
        self._clock.sleep(host / 1e3 + 1e-9)
        self.beats += 1

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.sessions == []


class Bench:
    """What is found in place of models and cohorts; `loaded` are the cohorts, with the options that they got."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.work: Work = lambda capacity, beat: (4.0, 1.0)
        self.fail_at: int | None = None
        self.loaded: list[tuple[Fake, dict[str, Any]]] = []

    def load(self, model: str, *, capacity: int, **options: Any) -> Fake:
        self.loaded.append((Fake(capacity, self.clock, self.work, self.fail_at), options))
        return self.loaded[-1][0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Any model is a small one with a period of 10 ms, and time is the fake clock's."""
    made = Bench()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(density, "load", made.load)
    for module in (density, registry):
        monkeypatch.setattr(module, "find_model", lambda _: ModelSpec.from_data(small()))
    monkeypatch.setattr(density, "own_commit", lambda: "a commit")
    monkeypatch.setattr(density, "_settled_memory", contextlib.nullcontext)
    monkeypatch.setattr(density, "Schedule", functools.partial(Schedule, clock=made.clock))
    monkeypatch.setattr(density, "sleep_until_due", made.clock.sleep)
    monkeypatch.setattr(
        density, "measured_floor", lambda *_, position, **__: {"history": position + 1, "floor_ms": 0.5}
    )
    rows = [{"operator": "linear", "phases": 2, "floor_ms": 0.4}, {"operator": "tanh", "phases": 1, "floor_ms": 0.0}]
    monkeypatch.setattr(
        density, "by_class", lambda *_, **named: [row | {"seen": len(named["measured"])} for row in rows]
    )
    return made
