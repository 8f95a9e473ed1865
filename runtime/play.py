"""Recordings played through live sessions of a cohort: one session each, at its own length.

Every recording joins before the first beat and leaves after the beat that took its last sample, or gave it back: a
model with audio out is fed silence until that has come through its latency, and one that answers for as long as its
spec says. What is missing of the last beat is silence too. So a beat serves the recordings that are still running, and
outputs belong to whole steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import CapacityError, SessionError, SpecError, UsageError
from wpk.zoo.build import build_graph, state_bytes

if TYPE_CHECKING:
    from wpk.registry.cohort import Cohort, Session
    from wpk.zoo.spec import ModelSpec

Array = NDArray[Any]
Samples = NDArray[np.float32]
NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Recording:
    """samples: float32 [n], mono, at the sample rate of the model's audio input."""

    name: str
    samples: Samples


@dataclass(frozen=True)
class Played:
    """What a session gave for its recording.

    steps: those that took at least one sample of it. outputs: for each port [steps, values per step]; ports of audio
    go on for the further steps that their latency takes, and all of a model that answers while it may.
    """

    recording: Recording
    steps: int
    outputs: dict[str, Array]


@dataclass(frozen=True)
class Playback:
    """played: in the order of the recordings. durations_ms: [beats], from the call of a beat to its outputs.

    late: beats that were not served within a period of their schedule. Without pacing, a beat is scheduled when it
    is called.
    """

    played: tuple[Played, ...]
    durations_ms: NDArray[np.float64]
    late: int

    @property
    def beats(self) -> int:
        return len(self.durations_ms)

    @property
    def beat_ms(self) -> dict[str, float]:
        """p50, p99 and max of the beats' durations in ms."""
        return percentiles(self.durations_ms)


class Schedule:
    """Absolute deadlines from one origin: beat k is due at origin + k periods, however late earlier ones were.

    A period is `samples` at `sample_rate`, kept as a fraction, so that rounding never adds up. clock: monotonic
    time in ns.
    """

    def __init__(
        self, samples: int, sample_rate: int, *, paced: bool,
        clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._samples, self._rate, self._paced = samples, sample_rate, paced
        self._clock, self._sleep = clock, sleep
        self._origin = clock()
        self._beat = -1
        self._start = self._due = self._end = self._origin
        self.late = 0

    def start(self) -> None:
        """Wait until the next beat is due; at once where nothing is paced or it is overdue."""
        self._beat += 1
        if self._paced:
            self._due = self._at(self._beat)
            while (left := self._due - self._clock()) > 0:
                self._sleep(left / NANOSECONDS)
        self._start = self._clock()
        if not self._paced:
            self._due = self._start

    def finish(self) -> float:
        """The beat is served: its duration in ms, and late beats counted."""
        self._end = self._clock()
        self.late += self._end > self._due + self._at(1) - self._origin
        return (self._end - self._start) / 1e6

    @property
    def moments(self) -> tuple[int, int, int]:
        """When the latest beat was due, started and served: ns of the clock."""
        return self._due, self._start, self._end

    def _at(self, beat: int) -> int:
        return self._origin + beat * self._samples * NANOSECONDS // self._rate


def play(
    cohort: Cohort,
    recordings: Sequence[Recording],
    *,
    realtime: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda beat, beats: None,
) -> Playback:
    """Play all recordings at once; realtime paces the beats by the model's clock, else they follow one another.

    seed: of every session's random numbers, so that a recording's outputs do not depend on which others there are.
    progress(beats done, beats in all). Raises CapacityError where there are more recordings than free slots,
    and SessionError after playing where an output is not finite.
    """
    if not recordings:
        raise UsageError("there is nothing to play", wanted="at least one recording", found="none")
    check_capacity(cohort.free, len(recordings))
    clock, port = cohort.spec.clock, audio_input(cohort.spec)
    length = clock.samples_per_step * clock.steps_per_beat
    steps = [_pieces(len(r.samples), clock.samples_per_step) for r in recordings]
    tails = tail_steps(cohort.spec)
    beats = [_pieces(count + max(tails.values()), clock.steps_per_beat) for count in steps]
    collected: list[list[dict[str, Array]]] = [[] for _ in recordings]
    live: dict[int, Session] = {}
    durations = np.zeros(max(beats))
    try:
        for index in range(len(recordings)):
            live[index] = cohort.join(seed=seed)
        schedule = Schedule(length, clock.sample_rate, paced=realtime)
        for beat in range(len(durations)):
            inputs = {s: {port: _frame(recordings[i].samples, beat, length)} for i, s in live.items()}
            schedule.start()
            outputs = cohort.beat(inputs)
            durations[beat] = schedule.finish()
            for index, session in live.items():
                collected[index].append(outputs[session])
            for index in [i for i in live if beats[i] == beat + 1]:
                cohort.leave(live.pop(index))
            progress(beat + 1, len(durations))
    finally:
        for session in live.values():
            cohort.leave(session)
    played = tuple(
        Played(recording, count, _by_step(found, clock.steps_per_beat, count, tails))
        for recording, found, count in zip(recordings, collected, steps, strict=True)
    )
    _require_finite(played)
    return Playback(played, durations, schedule.late)


def check_capacity(capacity: int, recordings: int) -> None:
    """`CapacityError` where the recordings need more sessions than there are."""
    if recordings > capacity >= 1:
        raise CapacityError(
            f"{recordings} recordings need {recordings} sessions at once", capacity=capacity,
            wanted=f"at most {capacity} recordings, the capacity", found=recordings,
            hint=f"give --cap {recordings} or more, or fewer recordings",
        )  # fmt: skip


def check_context(spec: ModelSpec, context: int, recordings: Sequence[Recording]) -> None:
    """`CapacityError` where a recording and its answer take more steps than the model's caches have room for.

    What comes after the last row would not be kept, and the model would go on without it.
    """
    if not state_bytes(build_graph(spec))["per_step"]:
        return
    tail = max(tail_steps(spec).values())
    steps = max(_pieces(len(one.samples), spec.clock.samples_per_step) for one in recordings) + tail
    if steps > context:
        raise CapacityError(
            f"{spec.name}: a recording takes more steps than the context has room for", capacity=context,
            wanted=f"at most {context} steps, {tail} of them for the answer", found=f"{steps} steps",
            hint=f"Give --context {steps} or more.",
        )  # fmt: skip


def audio_input(spec: ModelSpec) -> str:
    """The name of the model's one input port beside seeds, which must take audio."""
    kinds = {name: port.kind for name, port in spec.ports.inputs.items() if port.kind != "seed"}
    if list(kinds.values()) != ["audio"]:
        raise SpecError(
            f"{spec.name} cannot be fed from recordings alone", wanted="one input port, of kind audio",
            found=", ".join(f"{name}: {kind}" for name, kind in kinds.items()) or "no input ports",
        )  # fmt: skip
    return next(iter(kinds))


def tail_steps(spec: ModelSpec) -> dict[str, int]:
    """Output port -> steps after the end of a recording in which the rest of it still comes out."""
    clock = spec.clock
    reply = math.ceil(spec.reply_s * clock.sample_rate / clock.samples_per_step)
    latencies = {n: port.latency_samples if port.kind == "audio" else 0 for n, port in spec.ports.outputs.items()}
    return {name: reply + -(-samples // clock.samples_per_step) for name, samples in latencies.items()}


def percentiles(durations_ms: NDArray[np.float64]) -> dict[str, float]:
    """p50, p99 and max of durations in ms; at least one is needed."""
    p50, p99 = np.percentile(durations_ms, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": float(durations_ms.max())}


def _pieces(count: int, length: int) -> int:
    """How many pieces of `length` that many samples or steps fill or begin; at least one."""
    return max(1, -(-count // length))


def _frame(samples: Samples, beat: int, length: int) -> Samples:
    """Samples [length] of one beat, with silence behind the end."""
    frame = samples[beat * length : (beat + 1) * length]
    return frame if len(frame) == length else np.pad(frame, (0, length - len(frame)))


def _require_finite(played: Sequence[Played]) -> None:
    for one in played:
        for port, values in one.outputs.items():
            bad: NDArray[np.bool_] = np.any(~np.isfinite(values), axis=1)
            if bad.any():
                raise SessionError(
                    f"the output {port!r} for {one.recording.name} is not finite",
                    wanted="finite numbers",
                    found=f"{bad.sum()} of {len(bad)} steps with NaN or infinity, the first at step {bad.argmax()}",
                    hint="the recording may hold values far outside -1..1",
                )


def _by_step(
    beats: Sequence[dict[str, Array]], steps_per_beat: int, steps: int, tails: Mapping[str, int]
) -> dict[str, Array]:
    """[steps and the port's tail, values] of each port; what the last beats gave beyond that is dropped."""
    return {
        name: np.concatenate([found[name].reshape(steps_per_beat, -1) for found in beats])[: steps + tails[name]]
        for name in beats[0]
    }
