"""Slot invariance of the real models on real recordings: a session's outputs are the same bits in any company."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.originals import speech
from wpk import registry
from wpk.registry import Cohort

pytestmark = [pytest.mark.network, pytest.mark.slow]
MODELS = ["silero-vad", "flashvad", "dtln", "beatnet"]
SECONDS = 2
Frames = npt.NDArray[np.float32]


@functools.cache
def frames(model: str, index: int) -> Frames:
    """2 s of a recording from its second half second on, [beats, samples of a beat]."""
    clock = registry.find_model(model).clock
    samples, rate = clock.samples_per_step * clock.steps_per_beat, clock.sample_rate
    beats = SECONDS * rate // samples
    return speech(index, rate)[rate // 2 :][: beats * samples].reshape(beats, samples)


def bits(outputs: dict[str, npt.NDArray[Any]]) -> bytes:
    return b"".join(outputs[port].tobytes() for port in sorted(outputs))


def heard(cohort: Cohort, audio: Frames) -> list[bytes]:
    """What one more session of the cohort gets, the others being silent."""
    session = cohort.join()
    made = [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio]
    cohort.leave(session)
    return made


@pytest.fixture(scope="module")
def alone(home: object) -> Any:
    """Outputs of each recording in slot 0 of a cohort of one, on one thread."""

    @functools.cache
    def of(model: str, index: int) -> list[bytes]:
        with registry.load(model, capacity=1, target="cpu", threads=1) as cohort:
            return heard(cohort, frames(model, index))

    return of


@pytest.mark.parametrize("model", MODELS)
def test_the_outputs_are_worth_comparing(model: str, alone: Any) -> None:
    one, other = alone(model, 1), alone(model, 2)
    assert len(set(one)) > 0.9 * len(one) and sum(a == b for a, b in zip(one, other, strict=True)) < 0.1 * len(one)


@pytest.mark.parametrize("model", MODELS)
def test_slot_0_alone_among_64(model: str, alone: Any) -> None:
    with registry.load(model, capacity=64, target="cpu") as cohort:
        assert heard(cohort, frames(model, 1)) == alone(model, 1)
        assert heard(cohort, frames(model, 2)) == alone(model, 2)  # and again, where another session has been


@pytest.mark.parametrize("model", MODELS)
def test_slot_37_of_64_with_others_joining_and_leaving_around_it(model: str, alone: Any) -> None:
    audio, wanted = frames(model, 1), alone(model, 1)
    rng = np.random.default_rng(3)
    with registry.load(model, capacity=64, target="cpu") as cohort:
        others = [cohort.join() for _ in range(37)]
        session = cohort.join()
        assert session.slot == 37
        for beat, frame in enumerate(audio):
            for _ in range(int(rng.integers(0, 8))):
                if others and rng.random() < 0.45:
                    cohort.leave(others.pop(int(rng.integers(len(others)))))
                elif cohort.free:
                    others.append(cohort.join())
            inputs = {session: {"audio": frame}}
            for other in others:  # silence, another recording, noise, or values that no recording has
                kind = rng.integers(4)
                if kind:
                    scale = {1: 0.0, 2: 1.0, 3: 10.0 ** int(rng.integers(-30, 10))}[int(kind)]
                    noise = rng.standard_normal(frame.size).astype(np.float32) * np.float32(scale)
                    inputs[other] = {"audio": noise if kind > 1 else frames(model, 2)[beat]}
            assert bits(cohort.beat(inputs)[session]) == wanted[beat], f"beat {beat}"


@pytest.mark.parametrize("model", MODELS)
def test_every_session_of_a_full_cohort_gets_what_it_gets_alone(model: str, alone: Any) -> None:
    both = [alone(model, 1), alone(model, 2)]
    with registry.load(model, capacity=7, target="cpu") as cohort:
        sessions = [cohort.join() for _ in range(7)]
        for beat in range(len(both[0])):
            given = {s: {"audio": frames(model, 1 + s.slot % 2)[beat]} for s in sessions}
            outputs = cohort.beat(given)
            assert [bits(outputs[s]) for s in sessions] == [both[s.slot % 2][beat] for s in sessions]
