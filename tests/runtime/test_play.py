"""Recordings through a cohort: each at its own length, on an absolute schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bench.paced import Clock
from wpk.ir.errors import CapacityError, SessionError, SpecError, UsageError
from wpk.registry.models import find_model
from wpk.runtime.play import Recording, Schedule, audio_input, check_context, play

RATE, STEP = 1000, 10  # 10 ms steps


def spec(steps_per_beat: int = 1, kind: str = "audio", delay: int | None = None, reply_s: float = 0.0) -> Any:
    """delay: samples that the port `echo` of audio lies behind, where there is one."""
    outputs = {"sum": SimpleNamespace(kind="features", latency_samples=25)}
    if delay is not None:
        outputs["echo"] = SimpleNamespace(kind="audio", latency_samples=delay)
    return SimpleNamespace(
        name="fake",
        clock=SimpleNamespace(sample_rate=RATE, samples_per_step=STEP, steps_per_beat=steps_per_beat),
        ports=SimpleNamespace(inputs={"audio": SimpleNamespace(kind=kind)}, outputs=outputs),
        reply_s=reply_s,
    )


class Fake:
    """A cohort whose output of a step is the sum of its samples, and with `delay` its input again, so many samples
    later; remembers who was in each beat.
    """

    def __init__(
        self, capacity: int, steps_per_beat: int = 1, fail_at: int | None = None, delay: int | None = None
    ) -> None:
        self.capacity, self.spec, self.delay = capacity, spec(steps_per_beat, delay=delay), delay
        self.heard: dict[int, Any] = {}
        self.sessions: list[int] = []
        self.seeds: list[int] = []
        self.beats: list[list[int]] = []
        self._next, self._fail_at = 0, fail_at

    @property
    def free(self) -> int:
        return self.capacity - len(self.sessions)

    def join(self, *, seed: int = 0) -> int:
        self._next += 1
        self.seeds.append(seed)
        self.sessions.append(self._next)
        return self._next

    def leave(self, session: int) -> None:
        self.sessions.remove(session)

    def beat(self, inputs: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        if len(self.beats) == self._fail_at:
            raise RuntimeError("stalled")
        assert sorted(inputs) == sorted(self.sessions)
        self.beats.append(list(self.sessions))
        sums = {s: ports["audio"].reshape(-1, STEP).sum(axis=1) for s, ports in inputs.items()}
        found = {s: {"sum": value} for s, value in sums.items()}
        if self.delay is not None:
            for s, ports in inputs.items():
                line = np.concatenate((self.heard.get(s, np.zeros(self.delay, np.float32)), ports["audio"]))
                count = len(ports["audio"])
                found[s]["echo"], self.heard[s] = line[:count].reshape(-1, STEP), line[count:]
        return found


def recording(length: int, value: float = 1.0) -> Recording:
    return Recording(f"{length}.wav", np.full(length, value, np.float32))


def test_each_recording_has_its_own_length_and_leaves_at_its_end() -> None:
    cohort: Any = Fake(3)
    playback = play(cohort, [recording(25), recording(10), recording(41)])
    assert [len(beat) for beat in cohort.beats] == [3, 2, 2, 1, 1]
    assert cohort.sessions == []
    assert [p.steps for p in playback.played] == [3, 1, 5]
    assert [p.recording.name for p in playback.played] == ["25.wav", "10.wav", "41.wav"]
    assert playback.beats == 5 and set(playback.beat_ms) == {"p50", "p99", "max"}


def test_the_last_step_is_padded_with_silence() -> None:
    cohort: Any = Fake(1)
    (played,) = play(cohort, [recording(25)]).played
    assert played.outputs["sum"].tolist() == [[10.0], [10.0], [5.0]]


def test_steps_that_took_only_padding_are_dropped() -> None:
    cohort: Any = Fake(2, steps_per_beat=4)
    playback = play(cohort, [recording(45), recording(80)])
    assert playback.beats == 2
    assert [p.outputs["sum"].ravel().tolist() for p in playback.played] == [[10, 10, 10, 10, 5], [10] * 8]


@pytest.mark.parametrize("steps_per_beat", [1, 4])
@pytest.mark.parametrize("delay", [0, 1, 10, 24])
@pytest.mark.parametrize("length", [5, 30, 41])
def test_the_end_of_a_recording_comes_out_whatever_the_latency(length: int, delay: int, steps_per_beat: int) -> None:
    samples = np.arange(1, length + 1, dtype=np.float32)
    cohort: Any = Fake(2, steps_per_beat, delay=delay)
    played, _ = play(cohort, [Recording("a.wav", samples), recording(90)]).played
    echo, steps, tail = played.outputs["echo"].ravel(), -(-length // STEP), -(-delay // STEP)
    assert len(echo) == (steps + tail) * STEP
    assert np.array_equal(echo[delay : delay + length], samples)
    assert not echo[:delay].any() and not echo[delay + length :].any()
    assert played.steps == len(played.outputs["sum"]) == steps  # other kinds end with the recording


def test_a_recording_stays_for_its_tail_and_no_longer() -> None:
    cohort: Any = Fake(2, delay=24)
    playback = play(cohort, [recording(20), recording(40)])
    assert [len(beat) for beat in cohort.beats] == [2] * 5 + [1] * 2
    assert playback.beats == 7 and cohort.sessions == []


def test_more_recordings_than_slots_name_both_numbers_and_the_option() -> None:
    cohort: Any = Fake(2)
    with pytest.raises(CapacityError, match="3 recordings") as caught:
        play(cohort, [recording(10)] * 3)
    assert caught.value.capacity == 2 and "--cap 3" in str(caught.value.hint)
    assert cohort.beats == [] and cohort.sessions == []


def test_nothing_to_play_is_wrong_use() -> None:
    cohort: Any = Fake(1)
    with pytest.raises(UsageError):
        play(cohort, [])


def test_a_failing_beat_leaves_no_session_behind() -> None:
    cohort: Any = Fake(2, fail_at=1)
    with pytest.raises(RuntimeError, match="stalled"):
        play(cohort, [recording(30), recording(30)])
    assert cohort.sessions == []


def test_a_model_that_answers_is_fed_silence_while_it_may() -> None:
    cohort: Any = Fake(1)
    cohort.spec = spec(reply_s=0.045)  # five steps
    (one,) = play(cohort, [recording(20)]).played
    assert one.outputs["sum"].ravel().tolist() == [10, 10, 0, 0, 0, 0, 0] and one.steps == 2


def test_every_recording_has_the_same_seed() -> None:
    cohort: Any = Fake(2)
    play(cohort, [recording(30), recording(10)], seed=9)
    assert cohort.seeds == [9, 9]


def test_progress_counts_beats() -> None:
    told: list[tuple[int, int]] = []
    cohort: Any = Fake(1)
    play(cohort, [recording(30)], progress=lambda beat, beats: told.append((beat, beats)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_recording_longer_than_the_context_is_refused_where_there_are_caches() -> None:
    talking, listening = find_model("voicechat-tiny"), find_model("silero-vad")
    minute = Recording("minute.wav", np.zeros(16000 * 60, np.float32))
    with pytest.raises(CapacityError, match="more steps than the context has room for") as refused:
        check_context(talking, 750, [minute])
    assert "--context 776" in str(refused.value.hint)  # 750, 25 of the answer, 1 of the latency
    check_context(talking, 776, [minute])
    check_context(listening, 1, [minute])  # no caches


def test_a_model_without_one_audio_input_is_refused_by_its_ports() -> None:
    with pytest.raises(SpecError, match="recordings") as caught:
        audio_input(spec(kind="tokens"))
    assert caught.value.found == "audio: tokens"


def served(work_ms: list[float], *, paced: bool) -> tuple[list[float], int]:
    """Start times in ms after the origin, and late beats, of a schedule of 10 ms periods."""
    clock = Clock()
    schedule = Schedule(STEP, RATE, paced=paced, clock=clock, sleep=clock.sleep)
    starts = []
    for ms in work_ms:
        schedule.start()
        starts.append((clock.now - 1_000_000_007) / 1e6)
        clock.work(ms)
        assert schedule.finish() == pytest.approx(ms)
    return starts, schedule.late


def test_paced_beats_start_on_the_grid() -> None:
    assert served([1, 2, 9, 1], paced=True) == ([0, 10, 20, 30], 0)


def test_a_late_beat_moves_its_followers_but_not_the_grid() -> None:
    starts, late = served([1, 25, 1, 1, 1], paced=True)
    assert starts == [0, 10, 35, 36, 40]
    assert late == 2  # the slow one, and the one that was due at 20 and served at 36


def test_a_beat_has_the_moments_at_which_it_was_due_started_and_served() -> None:
    clock = Clock()
    schedule = Schedule(STEP, RATE, paced=True, clock=clock, sleep=clock.sleep)
    found = []
    for ms in (12.0, 1.0):
        schedule.start()
        clock.work(ms)
        schedule.finish()
        found.append([(moment - 1_000_000_007) / 1e6 for moment in schedule.moments])
    assert found == [[0, 0, 12], [10, 12, 13]]


def test_without_pacing_beats_follow_one_another_and_slow_ones_are_late() -> None:
    assert served([1, 12, 3], paced=False) == ([0, 1, 13], 1)


def test_periods_that_are_no_whole_nanoseconds_do_not_drift() -> None:
    clock = Clock()
    schedule = Schedule(441, 22_050 * 7, paced=True, clock=clock, sleep=clock.sleep)
    for _ in range(7001):
        schedule.start()
    assert clock.now - 1_000_000_007 == 7000 * 441 * 10**9 // (22_050 * 7) == 20_000_000_000


def test_outputs_that_are_not_finite_name_recording_port_and_first_step() -> None:
    loud = recording(45)
    loud.samples[20:] = np.inf
    cohort: Any = Fake(2, delay=0)
    with pytest.raises(SessionError, match=r"'sum' for 45\.wav .* first at step 2\. .* far outside -1\.\.1"):
        play(cohort, [recording(80), loud])
    assert cohort.sessions == [] and len(cohort.beats) == 8
