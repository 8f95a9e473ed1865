"""The highest capacity that holds, by few probes, and never one that whole runs did not confirm."""

from __future__ import annotations

import math

import pytest

from wpk.bench.protocol import TAIL_SAMPLES, Protocol
from wpk.bench.search import highest, parsed_range, probe_protocol
from wpk.ir.errors import UsageError
from wpk.zoo.ports import Clock


@pytest.mark.parametrize(("lo", "hi"), [(1, 1), (1, 20), (7, 12)])
def test_the_highest_that_holds_is_found_wherever_it_is(lo: int, hi: int) -> None:
    for limit in range(lo - 1, hi + 2):
        asked: list[int] = []

        def probe(capacity: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(capacity)
            return capacity <= limit

        found = highest(lo, hi, probe, lambda capacity, limit=limit: capacity <= limit)
        assert found == (None if limit < lo else min(limit, hi))
        assert len(asked) == len(set(asked)) <= math.log2(hi - lo + 1) + 1.01
        assert all(lo <= capacity <= hi for capacity in asked)


@pytest.mark.parametrize("truth", range(0, 17))
def test_what_short_runs_let_pass_and_whole_ones_do_not_is_not_found(truth: int) -> None:
    probed: list[int] = []
    confirmed: list[int] = []

    def probe(capacity: int) -> bool:
        probed.append(capacity)
        return capacity <= 9

    def confirm(capacity: int) -> bool:
        confirmed.append(capacity)
        return capacity <= truth

    assert highest(1, 16, probe, confirm) == (min(truth, 9) or None)
    assert confirmed == list(range(9, max(min(truth, 9), 1) - 1, -1))
    assert len(probed) == len(set(probed))


def test_probes_are_short_and_have_enough_samples() -> None:
    for clock in (Clock(sample_rate=16000, samples_per_step=n) for n in (160, 2560, 8000)):
        short = probe_protocol(Protocol(), clock)
        assert short.runs == 1 and short.tail_s == 0
        assert TAIL_SAMPLES <= short.beats(clock).score < Protocol().beats(clock).score
        assert short.shortened(short.beats(clock))
    given = probe_protocol(Protocol(0.5, 1.0, 0.0), Clock(sample_rate=16000, samples_per_step=160))
    assert (given.lead_s, given.score_s) == (0.5, 1.0)


def test_ranges() -> None:
    assert parsed_range("8:64") == (8, 64) and parsed_range("3:3") == (3, 3)
    for text in ("8", "8:", ":8", "9:8", "0:4", "a:b", "1:2:3"):
        with pytest.raises(UsageError, match="--search"):
            parsed_range(text)
