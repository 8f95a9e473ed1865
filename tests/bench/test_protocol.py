"""The protocol's arithmetic: which beats are scored, which are late, and through whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wpk.bench.protocol import MOMENTS, Beats, Moments, Protocol, scored, timeline
from wpk.ir.errors import UsageError
from wpk.zoo.ports import Clock

MS = 1_000_000


def clock(step: int, rate: int, steps: int = 1) -> Clock:
    return Clock(sample_rate=rate, samples_per_step=step, steps_per_beat=steps)


def played(*beats: tuple[float, float], period_ms: float = 10.0) -> Moments:
    """Beats of (kernel, host) ms on a schedule; half of the host's time comes before the kernel."""
    free, rows = 0.0, []
    for index, (kernel, host) in enumerate(beats):
        due = index * period_ms
        begun = max(due, free)
        free = begun + kernel + host
        rows.append((due, begun, begun + host / 2, begun + host / 2 + kernel, free))
    return np.round(np.array(rows) * MS).astype(np.int64) + 5


@pytest.mark.parametrize(
    ("model_clock", "counts"),
    [
        (clock(1280, 16000, 2), (250, 500, 50)),
        (clock(512, 16000), (1250, 2500, 250)),
        (clock(441, 22050), (2000, 4000, 400)),
        (clock(48000, 16000), (14, 27, 3)),  # 3 s: what is begun counts whole
    ],
)
def test_seconds_become_beats_of_the_models_clock(model_clock: Clock, counts: tuple[int, int, int]) -> None:
    found = Protocol().beats(model_clock)
    assert (found.lead, found.score, found.tail) == counts
    assert found.total == sum(counts)
    assert found.lead < found.middle < found.lead + found.score


def test_seconds_are_the_decimals_that_were_given() -> None:
    assert vars(Protocol(0.1, 0.3, 0.7).beats(clock(160, 16000))) == {"lead": 10, "score": 30, "tail": 70}
    assert Protocol(0, 0.001, 0).beats(clock(160, 16000)).total == 1


def test_what_falls_short_of_the_whole_protocol_is_named() -> None:
    assert Protocol().fields(Protocol().beats(clock(1280, 16000, 2)))["protocol"] == "full"
    assert Protocol(41, 100, 8, 4).shortened(Beats(1, 200, 1)) == []
    short = Protocol(1, 2, 3, 1)
    fields = short.fields(short.beats(clock(1600, 16000)))
    assert fields["protocol"] == "shortened"
    assert (fields["lead_s"], fields["score_s"], fields["tail_s"], fields["tail_samples"]) == (1, 2, 3, 20)
    assert fields["parts"] == {"lead": 10, "score": 20, "tail": 30}
    assert [reason.split()[0] for reason in fields["shortened"]] == ["lead", "score", "tail", "1", "20"]


def test_a_slow_clock_has_too_few_tail_samples() -> None:
    slow = clock(16000, 16000)
    assert Protocol().shortened(Protocol().beats(slow)) == ["80 scored beats, fewer than 100"]
    assert Protocol(score_s=100).shortened(Protocol(score_s=100).beats(slow)) == []


@pytest.mark.parametrize("parts", [(-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, math.nan, 1), (math.inf, 1, 1, 1), (1, 1, 1, 0)])
def test_protocols_that_cannot_be(parts: tuple[float, float, float, int]) -> None:
    with pytest.raises(UsageError):
        Protocol(*parts)


def test_times_are_those_of_the_scored_beats() -> None:
    moments = played((9, 0), (2, 1), (3, 1), (4, 1), (9, 0))
    found = scored(moments, Beats(1, 3, 1), 10 * MS)
    assert (found["beats"], found["on_time"], found["late"], found["held"]) == (3, 3, 0, True)
    assert found["kernel_ms"]["p50"] == pytest.approx(3)
    assert found["beat_ms"]["max"] == found["delivered_ms"]["max"] == pytest.approx(5)
    assert found["beat_ms"]["max_beat"] == 3  # of the run
    assert found["kernel_ms"]["jitter"] == found["kernel_ms"]["p99"] - found["kernel_ms"]["p50"] > 0
    assert found["start_late_ms"]["max"] == 0
    assert found["headroom"] == pytest.approx(1 - found["beat_ms"]["p99"] / 10)


def test_late_is_later_than_one_period_after_the_schedule() -> None:
    on_time = scored(played((10, 0), (1, 0)), Beats(0, 2, 0), 10 * MS)
    assert on_time["held"]
    late = scored(played((10, 0.001), (1, 0)), Beats(0, 2, 0), 10 * MS)
    assert (late["late"], late["late_beats"], late["held"]) == (1, [0], False)
    assert late["start_late_ms"]["max"] == pytest.approx(0.001)


def test_late_beats_are_counted_from_the_runs_first_and_those_that_do_not_count_apart() -> None:
    moments = played((25, 0), (1, 0), (1, 0), (1, 0), (12, 0), (1, 0), (11, 0), (1, 0))
    found = scored(moments, Beats(3, 3, 2), 10 * MS)
    assert (found["late"], found["late_beats"]) == (1, [4])
    assert found["late_outside"] == {"lead": 2, "tail": 1}


def test_the_first_hundred_late_beats_are_named_and_all_counted() -> None:
    found = scored(played(*[(11, 0)] * 130), Beats(0, 130, 0), 10 * MS)
    assert found["late"] == 130 and found["late_beats"] == list(range(100)) and found["on_time"] == 0
    assert found["late_causes"] == ["kernel"] * 100 and found["late_by"] == {"kernel": 130, "host": 0}


@pytest.mark.parametrize(
    ("beats", "causes"),
    [
        ([(25, 0), (4, 0), (1, 0)], ["kernel", "kernel"]),  # the second is late through the first
        ([(1, 22), (4, 0), (1, 0)], ["host", "host"]),
        ([(9, 2)], ["host"]),  # the kernel alone would have made it
        ([(11, 0), (6, 3.5)], ["kernel", "host"]),
    ],
)
def test_the_kernel_is_to_blame_where_its_own_times_make_a_beat_late(
    beats: list[tuple[float, float]], causes: list[str]
) -> None:
    found = scored(played(*beats), Beats(0, len(beats), 0), 10 * MS)
    assert found["late_causes"] == causes
    assert found["late_by"] == {who: causes.count(who) for who in ("kernel", "host")}


def test_a_timeline_is_of_the_beats_that_were_made() -> None:
    moments = np.zeros((4, len(MOMENTS)), np.int64)
    moments[:2] = played((2, 1), (3, 0))
    assert timeline(moments) == {
        "scheduled": [0, 10_000], "published": [0, 10_000], "kernel_start": [500, 10_000],
        "kernel_end": [2500, 13_000], "delivered": [3000, 13_000],
    }  # fmt: skip
    assert timeline(np.zeros((4, len(MOMENTS)), np.int64)) == {name: [] for name in MOMENTS}
