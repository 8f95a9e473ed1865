"""What sessions are fed in a measurement, made before its clock starts: noise, or noise in the rhythm of speech."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.registry import Session
from wpk.zoo.ports import InputPort
from wpk.zoo.spec import ModelSpec

Array = NDArray[Any]
Frame = dict[Session, dict[str, Array]]  # the inputs of one beat
FEEDS = ("noise", "speech")
FRAMES = 16  # of noise per session, used in turn
SPEECH_S = 4.0  # of speech per session, over and over
MOST_FRAMES = 256
TOKENS = 16  # inputs of whole numbers are below this
DEVIATION = 0.1
SYLLABLE_HZ, PHRASE_S, SPOKEN_S = 4.0, 2.0, 1.5
CORNER_HZ = 500.0  # above it the spectrum of speech falls by 6 dB an octave


def frames(spec: ModelSpec, sessions: Sequence[Session], feed: str = "noise") -> list[Frame]:
    """Inputs of some beats, to be used in turn; of `FEEDS`. "speech" is for audio, other ports get noise."""
    clock = spec.clock
    period_s = clock.step_ms * clock.steps_per_beat / 1e3
    count = FRAMES if feed == "noise" else min(max(math.ceil(SPEECH_S / period_s), 1), MOST_FRAMES)
    rng = np.random.default_rng(0)
    ports: dict[str, Array] = {}
    for name, port in spec.ports.inputs.items():
        if port.kind == "audio" and feed == "speech":
            length = clock.steps_per_beat * port.type.size
            audio = speech_like(rng, port.sample_rate or clock.sample_rate, len(sessions), count * length)
            ports[name] = np.ascontiguousarray(audio.reshape(len(sessions), count, length).swapaxes(0, 1))
        elif port.kind != "seed":
            ports[name] = noise(port, rng, count, len(sessions), clock.steps_per_beat)
    return [
        {session: {name: rows[frame, i] for name, rows in ports.items()} for i, session in enumerate(sessions)}
        for frame in range(count)
    ]


def noise(port: InputPort, rng: np.random.Generator, *lead: int) -> Array:
    """Random values for a port, [..., values of a step]: normal with a deviation of 0.1, or small whole numbers."""
    shape = (*lead, port.type.size)
    if port.type.dtype.is_float:
        return (DEVIATION * rng.standard_normal(shape)).astype(np.float32)
    return rng.integers(0, TOKENS, shape, np.int32)


def speech_like(rng: np.random.Generator, rate: int, sessions: int, count: int) -> NDArray[np.float32]:
    """[sessions, count] samples: noise of a falling spectrum, four syllables a second, a pause after each phrase.

    Every session is at another place of its phrase.
    """
    spectrum = np.fft.rfft(rng.standard_normal((sessions, count)))
    spectrum /= np.hypot(1.0, np.fft.rfftfreq(count, 1 / rate) / CORNER_HZ)
    sound = np.fft.irfft(spectrum, count)
    sound *= DEVIATION / max(float(sound.std()), 1e-9)
    moments = np.arange(count) / rate + rng.uniform(0, PHRASE_S, (sessions, 1))
    loudness = np.sin(np.pi * SYLLABLE_HZ * moments) ** 2 * (moments % PHRASE_S < SPOKEN_S)
    found: NDArray[np.float32] = (sound * loudness).astype(np.float32)
    return found
