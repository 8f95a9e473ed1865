"""The highest capacity that holds, by bisection: cheap probes find it, whole runs confirm it."""

from __future__ import annotations

from collections.abc import Callable

from wpk.bench.protocol import TAIL_SAMPLES, Protocol
from wpk.ir.errors import UsageError
from wpk.zoo.ports import Clock

PROBE_LEAD_S, PROBE_SCORE_S = 4.0, 16.0
Holds = Callable[[int], bool]


def highest(lo: int, hi: int, probe: Holds, confirm: Holds) -> int | None:
    """The highest of `lo`..`hi` that holds, where what is above one that does not hold doesn't either; None: none.

    probe: a capacity that passes may hold. confirm: whether it does. One that passed and was not confirmed counts as
    one that does not hold, and the search goes on below it.
    """
    failed, passed = hi + 1, [lo - 1]
    while True:
        while failed - passed[-1] > 1:
            middle = (failed + passed[-1]) // 2
            if probe(middle):
                passed.append(middle)
            else:
                failed = middle
        best = passed.pop()
        if best < lo or confirm(best):
            return best if best >= lo else None
        failed = best


def probe_protocol(whole: Protocol, clock: Clock) -> Protocol:
    """One short run, at least `TAIL_SAMPLES` beats of it scored where the whole protocol has them."""
    period_s = clock.step_ms * clock.steps_per_beat / 1e3
    score = max(PROBE_SCORE_S, TAIL_SAMPLES * period_s)
    return Protocol(min(whole.lead_s, PROBE_LEAD_S), min(whole.score_s, score), 0.0, 1)


def parsed_range(text: str) -> tuple[int, int]:
    """LO:HI as two numbers; UsageError where it is not that."""
    lo, colon, hi = text.partition(":")
    try:
        found = int(lo), int(hi)
    except ValueError:
        found = (0, 0)
    if not colon or not 1 <= found[0] <= found[1]:
        raise UsageError("--search", wanted="LO:HI, capacities from 1 on, such as 8:64", found=text)
    return found
