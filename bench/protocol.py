"""The protocol of density: how long a run is, which of its beats count, and what its moments come to.

A run is paced by the model's own clock on one absolute chain of deadlines. Its first beats lead in and its last ones
tail off; those between are scored. Nothing is left out of the scored part: a beat that the host delayed is as late as
one that the kernel delayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.bench.times import figures
from wpk.ir.errors import UsageError
from wpk.zoo.ports import Clock

LEAD_S, SCORE_S, TAIL_S, RUNS = 40.0, 80.0, 8.0, 3
TAIL_SAMPLES = 100  # scored beats of a session, at least: p99.9 and max are read from the slowest of them
LONGEST_S = 24 * 3600.0
KEPT_LATE = 100  # late beats that a record names

MOMENTS = ("scheduled", "published", "kernel_start", "kernel_end", "delivered")
SCHEDULED, PUBLISHED, KERNEL_START, KERNEL_END, DELIVERED = range(len(MOMENTS))
Moments = NDArray[np.int64]  # [beats, len(MOMENTS)], ns of one clock; zeros where a beat was not made


@dataclass(frozen=True)
class Beats:
    """How many beats of a run lead in, are scored, and tail off. They are counted from 0, the first that leads in."""

    lead: int
    score: int
    tail: int

    @property
    def total(self) -> int:
        return self.lead + self.score + self.tail

    @property
    def middle(self) -> int:
        """The beat in the middle of the scored ones."""
        return self.lead + self.score // 2


@dataclass(frozen=True)
class Protocol:
    """Seconds of a run that lead in, are scored and tail off; and how many runs follow each other."""

    lead_s: float = LEAD_S
    score_s: float = SCORE_S
    tail_s: float = TAIL_S
    runs: int = RUNS

    def __post_init__(self) -> None:
        for name, seconds, least in (
            ("lead", self.lead_s, ">="),
            ("score", self.score_s, ">"),
            ("tail", self.tail_s, ">="),
        ):
            fits = seconds > 0 if least == ">" else seconds >= 0
            if not (fits and seconds <= LONGEST_S):  # NaN neither
                raise UsageError(f"--{name}", wanted=f"{least} 0 and at most {LONGEST_S:g} s", found=seconds)
        if self.runs < 1:
            raise UsageError("--runs", wanted="at least 1", found=self.runs)

    def beats(self, clock: Clock) -> Beats:
        """The beats that these seconds take; one that is begun counts whole."""
        period = Fraction(clock.samples_per_step * clock.steps_per_beat, clock.sample_rate)
        return Beats(
            *(math.ceil(Fraction(repr(s)) / period) for s in map(float, (self.lead_s, self.score_s, self.tail_s)))
        )

    def shortened(self, beats: Beats) -> list[str]:
        """In what this falls short of the whole protocol; empty: in nothing."""
        parts = (("lead", self.lead_s, LEAD_S), ("score", self.score_s, SCORE_S), ("tail", self.tail_s, TAIL_S))
        found = [f"{name} {given:g} s instead of {whole:g} s" for name, given, whole in parts if given < whole]
        if self.runs < RUNS:
            found.append(f"{self.runs} of {RUNS} runs")
        if beats.score < TAIL_SAMPLES:
            found.append(f"{beats.score} scored beats, fewer than {TAIL_SAMPLES}")
        return found

    def fields(self, beats: Beats) -> dict[str, Any]:
        """What a record says of it."""
        short = self.shortened(beats)
        return {
            "protocol": "shortened" if short else "full", "shortened": short, "lead_s": self.lead_s,
            "score_s": self.score_s, "tail_s": self.tail_s, "parts": vars(beats) | {},
            "tail_samples": beats.score,
        }  # fmt: skip


def scored(moments: Moments, beats: Beats, period_ns: int) -> dict[str, Any]:
    """What a whole run comes to: times of the scored beats, and which were late.

    A beat is late when it was delivered more than a period after it was scheduled. It is the kernel's doing where the
    kernel's own times, one after the other on the same schedule, make it late without any help; else the host's.
    """
    late = moments[:, DELIVERED] - moments[:, SCHEDULED] > period_ns
    by_kernel = late & kernel_late(moments, period_ns)
    part = slice(beats.lead, beats.lead + beats.score)
    indices = np.flatnonzero(late[part]) + beats.lead
    found = {
        "beat_ms": _figures(moments, part, PUBLISHED, DELIVERED),
        "kernel_ms": _figures(moments, part, KERNEL_START, KERNEL_END),
        "start_late_ms": _figures(moments, part, SCHEDULED, PUBLISHED),
        "delivered_ms": _figures(moments, part, SCHEDULED, DELIVERED),
    }
    return {
        "beats": beats.score, "on_time": beats.score - len(indices), "late": len(indices), "held": not len(indices),
        "late_beats": indices[:KEPT_LATE].tolist(),
        "late_causes": ["kernel" if by_kernel[i] else "host" for i in indices[:KEPT_LATE]],
        "late_by": {"kernel": int(by_kernel[part].sum()), "host": int((late & ~by_kernel)[part].sum())},
        "late_outside": {"lead": int(late[: beats.lead].sum()), "tail": int(late[part.stop :].sum())},
        **found, "headroom": 1 - found["beat_ms"]["p99"] / (period_ns / 1e6),
    }  # fmt: skip


def kernel_late(moments: Moments, period_ns: int) -> NDArray[np.bool_]:
    """Beats that would be late if the host took no time: each starts when it is due and the one before has ended."""
    found = np.zeros(len(moments), np.bool_)
    free = 0
    for beat, (due, _, start, end, _) in enumerate(moments.tolist()):
        free = max(due, free) + end - start
        found[beat] = free - due > period_ns
    return found


def timeline(moments: Moments) -> dict[str, list[int]]:
    """The moments of every beat that was made, in whole microseconds since the first was scheduled."""
    made = moments[moments[:, DELIVERED] > 0]
    if not len(made):
        return {name: [] for name in MOMENTS}
    since = (made - made[0, SCHEDULED]) // 1000
    return {name: since[:, column].tolist() for column, name in enumerate(MOMENTS)}


def _figures(moments: Moments, part: slice, since: int, until: int) -> dict[str, Any]:
    """Figures of a duration in ms; `max_beat` is counted like all beats of the run."""
    found = figures((moments[part, until] - moments[part, since]) / 1e6)
    return found | {"max_beat": found["max_beat"] + part.start}
