"""Probabilities into segments and peaks, and outputs by task."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from wpk.ir.errors import SpecError
from wpk.runtime.outputs import distinct, hysteresis, pick_peaks, session_outputs, speech_segments, summary
from wpk.runtime.play import Played, Recording
from wpk.zoo.events import SegmentEvents
from wpk.zoo.spec import ModelSpec

HEAD = """\
name: m
version: 1
task: {task}
description: For tests.
licence: {{code: MIT, weights: MIT}}
weights: {{synthetic: 1}}
clock: {{sample_rate: 1000, samples_per_step: 100}}
ports:
  inputs: {{audio: {{type: "f32[100]", kind: audio, sample_rate: 1000}}}}
  outputs: {{out: {{{port}, from: head}}}}
components:
  - {{kind: dense, name: head, units: {units}}}
"""


def spec(task: str, port: str, units: int, events: str = "") -> ModelSpec:
    return ModelSpec.from_yaml(HEAD.format(task=task, port=port, units=units) + events)


def played(values: Any, length: int | None = None, name: str = "a.wav") -> Played:
    rows = np.asarray(values, np.float32)
    rows = rows.reshape(len(rows), -1)
    samples = np.zeros(100 * len(rows) if length is None else length, np.float32)
    return Played(Recording(name, samples), len(rows), {"out": rows})


# --- segments


@pytest.mark.parametrize(
    ("values", "ranges"),
    [
        ("", []),
        ("000", []),
        ("999", [(0, 3)]),
        ("0990", [(1, 3)]),
        ("09590", [(1, 4)]),  # between the thresholds what is open stays open
        ("0590", [(2, 3)]),  # and what is closed stays closed
        ("9090", [(0, 1), (2, 3)]),
    ],
)
def test_hysteresis(values: str, ranges: list[tuple[int, int]]) -> None:
    assert hysteresis(np.array([int(v) / 10 for v in values]), 0.8, 0.4, 1, 1) == ranges


def test_hysteresis_counts_consecutive_steps_and_starts_at_the_first() -> None:
    values = np.array([9, 0, 9, 9, 9, 0, 9, 0, 0, 0, 9]) / 10
    assert hysteresis(values, 0.8, 0.4, 3, 2) == [(2, 7)]
    assert hysteresis(values, 0.8, 0.4, 1, 4) == [(0, 11)]


def segments(values: str, **parameters: float) -> list[tuple[float, float]]:
    events = SegmentEvents(port="out", onset=0.8, offset=0.4, **parameters)  # type: ignore[arg-type]
    found = speech_segments(np.array([int(v) / 10 for v in values]), events, 0.1, 0.1 * len(values) - 0.05)
    return [(round(start, 6), round(end, 6)) for start, end in found]


def test_segments_are_seconds_inside_the_recording() -> None:
    assert segments("0990099") == [(0.1, 0.3), (0.5, 0.65)]


def test_short_silence_is_closed_before_short_speech_is_dropped() -> None:
    assert segments("909000900", min_silence_s=0.15) == [(0.0, 0.3), (0.6, 0.7)]
    assert segments("909000900", min_silence_s=0.15, min_speech_s=0.2) == [(0.0, 0.3)]
    assert segments("909000900", min_speech_s=0.2) == []


def test_padding_stays_inside_and_merges_what_meets() -> None:
    assert segments("9000900", pad_s=0.1) == [(0.0, 0.2), (0.3, 0.6)]
    assert segments("9009000", pad_s=0.1) == [(0.0, 0.5)]


# --- peaks


@pytest.mark.parametrize(
    ("values", "gap", "peaks"),
    [
        ("", 1, []),
        ("0", 1, []),
        ("9", 1, [0]),
        ("01910", 1, [2]),
        ("0959590", 1, [1, 3, 5]),
        ("0859490", 3, [3]),  # the highest rules out its neighbours, the earlier of equal ones first
        ("0959590", 2, [1, 3, 5]),
        ("0959590", 3, [1, 5]),
        ("0779770", 1, [3]),
        ("0770", 1, [1]),  # a plateau counts once, at its start
        ("0778", 1, [3]),
        ("9001", 1, [0]),
    ],
)
def test_peaks(values: str, gap: int, peaks: list[int]) -> None:
    assert pick_peaks(np.array([int(v) / 10 for v in values]), 0.5, gap) == peaks


def test_peaks_before_the_start_step_mean_nothing() -> None:
    assert pick_peaks(np.array([0.9, 0, 0, 0.8, 0]), 0.5, 10, start_step=1) == [3]


def test_close_peaks_keep_their_distance_whatever_the_noise() -> None:
    activation = np.random.default_rng(0).random(500)
    peaks = np.array(pick_peaks(activation, 0.3, 7))
    assert np.diff(peaks).min() >= 7
    assert (activation[peaks] >= 0.3).all()


# --- tasks


def test_vad_gives_probabilities_and_segments() -> None:
    model = spec("vad", 'type: "f32[1]", kind: probability', 1, "events: {kind: segments, port: out}\n")
    (found,) = session_outputs(model, [played([0, 1, 1, 0], 350)], Path())
    assert found["speech"] == [0, 1, 1, 0]
    assert found["segments"] == [[0.1, pytest.approx(0.3)]]
    assert summary(found) == "0.20 s of speech: 0.10-0.30"
    assert summary({"segments": [], "speech": []}) == "no speech"


def test_audio_is_written_as_it_comes(tmp_path: Path) -> None:
    model = spec("denoise", 'type: "f32[100]", kind: audio, sample_rate: 1000, latency_samples: 50', 100)
    rows = np.linspace(-1.5, 1.5, 300, dtype=np.float32).reshape(3, 100)
    names = ["x/a.wav", "y/a.flac", "b.wav"]
    found = session_outputs(model, [played(rows, name=name) for name in names], tmp_path / "new")
    assert [Path(f["wav"]).name for f in found] == ["a.m.wav", "a.m-2.wav", "b.m.wav"]
    assert found[0]["latency_s"] == 0.05
    audio, rate = soundfile.read(found[0]["wav"], dtype="float32")
    assert rate == 1000
    assert np.array_equal(audio, rows.ravel())  # exactly, and not clipped
    assert "50 ms behind" in summary(found[0])


def test_a_recording_is_never_overwritten_by_what_is_made_of_another(tmp_path: Path) -> None:
    model = spec("denoise", 'type: "f32[100]", kind: audio, sample_rate: 1000', 100)
    given = [tmp_path / "a.wav", tmp_path / "a.m.wav"]
    for path in given:
        path.write_bytes(b"a recording")
    found = session_outputs(model, [played(np.zeros((2, 100)), name=str(path)) for path in given], tmp_path)
    assert [Path(f["wav"]).name for f in found] == ["a.m-2.wav", "a.m.m.wav"]
    assert all(path.read_bytes() == b"a recording" for path in given)


def test_beats_hold_all_peaks_and_downbeats_those_named_so() -> None:
    labels = "labels: [beat, downbeat, neither]"
    events = (
        "events: {kind: peaks, port: out, labels: [beat, downbeat], threshold: 0.5, min_distance_s: 0.2, "
        "offset_s: -0.02}\n"
    )
    model = spec("beat", f'type: "f32[3]", kind: probability, {labels}', 3, events)
    rows = [[0.1, 0.6, 0.3], [0, 0, 1], [0, 0, 1], [0.7, 0.1, 0.2], [0, 0, 1], [0.1, 0.8, 0.1]]
    (found,) = session_outputs(model, [played(rows)], Path())
    assert found["beats"] == pytest.approx([0.0, 0.28, 0.48])  # the offset does not reach before the start
    assert found["downbeats"] == pytest.approx([0.0, 0.48])
    assert np.allclose(found["activations"], rows)
    assert summary(found) == "3 beats, 2 downbeats"


WORDS = 'vocabulary: {pieces: ["\u2581he", "l", "lo", "\u2581you", "x"], silent: [4]}'


def test_recognised_text_grows_with_the_steps_that_spell_something() -> None:
    model = spec("asr", f'type: "i32[2]", kind: tokens, {WORDS}', 1)
    rows = np.array([[0, 1], [4, 4], [2, 4], [4, 99], [-1, 3]], np.int32)
    one = played(np.zeros(len(rows)))
    (found,) = session_outputs(model, [dataclasses.replace(one, outputs={"out": rows})], Path())
    assert found["text"] == "hello you"
    assert found["partials"] == [[0.1, "hel"], [0.3, "hello"], [0.5, "hello you"]]
    assert summary(found) == "text: 'hello you'"
    silent = dataclasses.replace(one, outputs={"out": rows[1:2]})
    assert session_outputs(model, [silent], Path()) == [{"text": "", "partials": []}]


def test_a_conversation_is_what_was_said_and_heard(tmp_path: Path) -> None:
    text = HEAD.format(task="voice", port='type: "f32[100]", kind: audio, sample_rate: 1000', units=100)
    more = f'text: {{type: "i32[]", kind: tokens, from: head, {WORDS}}}'
    model = ModelSpec.from_yaml(text.replace("outputs: {out", f"outputs: {{{more}, out"))
    one = played(np.zeros((2, 100)))
    one = dataclasses.replace(one, outputs=one.outputs | {"text": np.array([[3], [2]], np.int32)})
    (found,) = session_outputs(model, [one], tmp_path)
    assert found == {"text": "youlo", "wav": str(tmp_path / "a.m.wav"), "latency_s": 0.0}
    assert summary(found).startswith("text: 'youlo', ")


def test_only_tokens_have_a_vocabulary() -> None:
    with pytest.raises(SpecError, match="what has a vocabulary are tokens"):
        spec("asr", f'type: "f32[1]", kind: features, {WORDS}', 1)


def test_a_task_without_a_rule_gives_its_ports() -> None:
    model = spec("asr", 'type: "f32[2]", kind: features', 2)
    assert session_outputs(model, [played([[1, 2], [3, 4]])], Path()) == [{"out": [[1, 2], [3, 4]]}]


@pytest.mark.parametrize("task", ["vad", "beat"])
def test_a_spec_that_does_not_say_what_outputs_mean_is_refused(task: str) -> None:
    model = spec(task, 'type: "f32[1]", kind: probability', 1)
    with pytest.raises(SpecError, match=task):
        session_outputs(model, [played([0, 1])], Path())


def test_a_denoiser_without_audio_out_is_refused() -> None:
    model = spec("denoise", 'type: "f32[1]", kind: probability', 1)
    with pytest.raises(SpecError, match="denoise"):
        session_outputs(model, [played([0, 1])], Path())


def test_names_become_distinct() -> None:
    assert distinct(["a", "b", "a", "a-2", "a"]) == ["a", "b", "a-2", "a-2-2", "a-3"]
