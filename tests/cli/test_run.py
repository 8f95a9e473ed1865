"""`wpk run`: recordings in, outputs by task; every bad recording refused by name before anything is built."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from safetensors.numpy import save_file

from tests.cli.harness import SPEC, Wav, Wpk, files
from wpk import registry
from wpk.cli.run import spread
from wpk.kernel.layout import STAMPS
from wpk.runtime import samples


def test_each_recording_is_a_session_of_its_own_length(wpk: Wpk, tiny: str, wav: Wav) -> None:
    a, b = wav("a.wav", 0.1), wav("b.wav", 0.255)
    found = wpk("run", tiny, "--wav", a, "--wav", b, "--json").json
    assert found["profile"].startswith("tiny-cap2-ctx1-cpu-")
    assert found["beats"] == 26
    assert 0 <= found["late"] <= 26
    assert 0 < found["beat_ms"]["p50"] <= found["beat_ms"]["p99"] <= found["beat_ms"]["max"]
    first, second = found["sessions"]
    assert (first["input"], second["input"]) == (str(a), str(b))
    assert (len(first["outputs"]["speech"]), len(second["outputs"]["speech"])) == (10, 26)
    assert all(0 < p < 1 for p in second["outputs"]["speech"])
    assert all(0 <= start < end <= 0.255 for start, end in second["outputs"]["segments"])


def test_a_session_does_not_feel_the_others(wpk: Wpk, tiny: str, wav: Wav) -> None:
    paths = [wav(f"{'x' * n}.wav", 0.03 * n) for n in (1, 2, 3)]
    together = wpk("run", tiny, "--wav", *paths, "--cap", 7, "--json").json["sessions"]
    alone = [wpk("run", tiny, "--wav", path, "--json").json["sessions"][0] for path in paths]
    assert [s["outputs"] for s in together] == [s["outputs"] for s in alone]


def test_one_option_takes_several_files_after_the_model(wpk: Wpk, tiny: str, wav: Wav) -> None:
    paths = [wav(f"{name}.wav", 0.02) for name in "abc"]
    found = wpk("run", tiny, "--wav", paths[0], paths[1], "--json", "--wav", paths[2]).json
    assert [s["input"] for s in found["sessions"]] == [str(path) for path in paths]


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("m --wav a b --cap 2", "m --wav a --wav b --cap 2"),
        ("m --wav a --cap 2 b", "m --wav a --cap 2 b"),
        ("--wav a m", "--wav a m"),
        ("m --json --wav a b c", "m --json --wav a --wav b --wav c"),
        ("m --wav a -q", "m --wav a -q"),
        ("m n --wav a", "m n --wav a"),
        ("", ""),
    ],
)
def test_spreading_an_option(words: str, meaning: str) -> None:
    assert spread(words.split(), "--wav") == meaning.split()


def test_realtime_paces_the_beats(wpk: Wpk, tiny: str, wav: Wav) -> None:
    path = wav("a.wav", 0.5)
    assert wpk("run", tiny, "--wav", path).code == 0
    start = time.monotonic()
    found = wpk("run", tiny, "--wav", path, "--realtime", "--json").json
    assert time.monotonic() - start >= 0.49
    assert found["beats"] == 50
    assert found["realtime"] is True


def test_audio_out_is_written_whole_under_distinct_names(wpk: Wpk, echo: str, wav: Wav, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [wav("a.wav", 0.055), wav("other/a.wav", 0.03)]
    found = wpk("run", echo, "--wav", *paths, "--out", "made", "--json").json
    outputs = [session["outputs"] for session in found["sessions"]]
    assert [Path(o["wav"]).name for o in outputs] == ["a.echo.wav", "a.echo-2.wav"]
    assert [o["latency_s"] for o in outputs] == [40 / 16000] * 2
    audio, rate = soundfile.read(outputs[0]["wav"])
    assert rate == 16000
    assert len(audio) == 7 * 160  # a step more than were fed, for the latency
    assert np.abs(audio).max() > 0
    assert files(tmp_path / "made") == ["a.echo-2.wav", "a.echo.wav"]


def test_text_for_people_and_names_for_scripts(wpk: Wpk, tiny: str, wav: Wav) -> None:
    path = wav("a.wav", 0.1, rate=8000)
    text = wpk("run", tiny, "--wav", path).out
    assert "a.wav" in text
    assert "8000 Hz resampled to 16000 Hz" in text
    assert "beats" in text
    assert wpk("run", tiny, "--wav", path, "-q").out.startswith("tiny-cap1-")


# --- traces


def test_a_trace_is_written_where_it_was_asked_for(
    wpk: Wpk, tiny: str, wav: Wav, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    really = registry.load

    def load(*words: Any, trace: bool, **options: Any) -> registry.Cohort:
        asked.update(options, trace=trace)
        return really(*words, **options)

    def moments(cohort: registry.Cohort) -> np.ndarray:
        waves, blocks = cohort.program.waves, cohort.program.blocks
        return np.arange(1, 1 + waves * blocks * STAMPS, dtype=np.int64).reshape(waves, blocks, STAMPS)

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry.Cohort, "trace", moments)
    words = ("run", tiny, "--wav", wav("a.wav", 0.02), "--trace", "made/t.json")
    found = wpk(*words, "--exclusive", "--json").json
    assert (asked["trace"], asked["exclusive"], found["trace"]) == (True, True, "made/t.json")
    events = json.loads((tmp_path / "made" / "t.json").read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "tiny"}
    assert any(e["ph"] == "X" and "head" in e["name"] for e in events)
    assert "ui.perfetto.dev" in wpk(*words).out


def test_a_cpu_records_no_trace(wpk: Wpk, tiny: str, wav: Wav, tmp_path: Path) -> None:
    words = ("run", tiny, "--wav", wav("a.wav", 0.02), "--target", "cpu")
    said = wpk(*words, "--trace", "t.json", "--json")
    assert (said.code, said.error["type"]) == (1, "TargetError")
    assert said.error["message"] == "only GPU kernels record traces"
    assert not (tmp_path / "t.json").exists()
    assert wpk(*words, "--exclusive").code == 0


# --- recordings


@pytest.mark.parametrize(
    ("form", "converted"),
    [
        ({"subtype": "PCM_U8"}, 0),
        ({"subtype": "PCM_24"}, 0),
        ({"subtype": "FLOAT"}, 0),
        ({"channels": 2}, 1),
        ({"rate": 44100}, 1),
        ({"rate": 44100, "channels": 2, "subtype": "PCM_24"}, 2),
    ],
)
def test_what_can_be_converted_is(wpk: Wpk, tiny: str, wav: Wav, form: dict[str, object], converted: int) -> None:
    (session,) = wpk("run", tiny, "--wav", wav("a.wav", 0.1, **form), "--json").json["sessions"]
    assert len(session["outputs"]["speech"]) == 10
    assert len(session["converted"]) == converted


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    soundfile.write(path, np.zeros(1600), 16000)
    path.write_bytes(path.read_bytes()[:1000])


def no_frames(path: Path) -> None:
    soundfile.write(path, np.zeros(0), 16000)


def no_audio(path: Path) -> None:
    path.write_text("this is no audio\n" * 100)


def folder(path: Path) -> None:
    path.mkdir()


def not_finite(path: Path) -> None:
    soundfile.write(path, np.array([0.0, np.nan] * 100), 16000, subtype="FLOAT")


def absent(path: Path) -> None:
    pass


@pytest.mark.parametrize("make", [empty, truncated, no_frames, no_audio, folder, not_finite, absent])
def test_a_bad_recording_is_refused_by_name_before_anything_is_built(
    wpk: Wpk, tiny: str, wav: Wav, store: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    before = files(store)
    make(tmp_path / "bad.wav")
    said = wpk("run", tiny, "--wav", wav("good.wav"), "--wav", tmp_path / "bad.wav", "--json")
    assert said.code == 1
    assert said.error["type"] == "AudioError"
    assert "bad.wav" in said.error["message"]
    assert files(store) == before


# --- wrong use


def test_nothing_to_run_on_is_wrong_use(wpk: Wpk, tiny: str) -> None:
    said = wpk("run", tiny, "--json")
    assert said.code == 2
    assert "--sample" in said.error["wanted"]


def test_more_recordings_than_capacity(wpk: Wpk, tiny: str, wav: Wav, store: Path) -> None:
    before = files(store)
    said = wpk("run", tiny, "--wav", wav("a.wav"), wav("b.wav"), wav("c.wav"), "--cap", 2, "--json")
    assert said.code == 1
    assert said.error["type"] == "CapacityError"
    assert "--cap 3" in said.error["hint"]
    assert files(store) == before


@pytest.mark.parametrize("capacity", [0, -1])
def test_no_capacity_is_wrong_use(wpk: Wpk, tiny: str, wav: Wav, capacity: int) -> None:
    said = wpk("run", tiny, "--wav", wav("a.wav"), "--cap", capacity, "--json")
    assert said.code == 2
    assert said.error["type"] == "CapacityError"


def test_an_unknown_model_is_answered_with_close_names(wpk: Wpk, tiny: str, wav: Wav) -> None:
    said = wpk("run", "tinny", "--wav", wav("a.wav"), "--json")
    assert said.code == 1
    assert said.error["type"] == "UnknownModelError"
    assert "'tiny'" in said.error["hint"]


def test_a_model_that_no_recording_can_feed_is_refused(wpk: Wpk, tmp_path: Path, wav: Wav) -> None:
    text = SPEC.replace(
        'audio: {type: "f32[160]", kind: audio, sample_rate: 16000}', 'x: {type: "f32[160]", kind: features}'
    )
    (tmp_path / "s.yaml").write_text(text)
    assert wpk("zoo", "add", "s.yaml").code == 0
    said = wpk("run", "tiny", "--wav", wav("a.wav"), "--json")
    assert said.code == 1
    assert said.error["found"] == "x: features"


# --- fetching


def test_samples_without_a_network(wpk: Wpk, tiny: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = files(store)
    said = wpk("run", tiny, "--sample", "--json")
    assert said.code == 1
    assert said.error["type"] == "OfflineError"
    assert files(store) == before


def test_weights_without_a_network(wpk: Wpk, wav: Wav, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WPK_OFFLINE", "1")
    builtin = wpk("zoo", "list", "-q").out.split()[0]
    said = wpk("run", builtin, "--wav", wav("a.wav"), "--json")
    assert said.code == 1
    assert said.error["type"] == "OfflineError"
    assert files(store) == []


def test_samples_are_recordings_like_others(wpk: Wpk, tiny: str, wav: Wav, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [wav("s.wav", 0.02), wav("tt.wav", 0.03)]
    monkeypatch.setattr(samples, "sample_recordings", lambda where: paths)
    found = wpk("run", tiny, "--wav", wav("own.wav", 0.01), "--sample", "--json").json
    assert [Path(s["input"]).name for s in found["sessions"]] == ["own.wav", "s.wav", "tt.wav"]


def test_other_weights_can_be_given(wpk: Wpk, tiny: str, wav: Wav, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"head.weight": np.zeros((1, 160), np.float32), "head.bias": np.zeros(1, np.float32)}, path)
    found = wpk("run", tiny, "--wav", wav("a.wav", 0.02), "--weights", path, "--json").json
    assert found["sessions"][0]["outputs"]["speech"] == [0.5, 0.5]
    save_file({"head.weight": np.zeros((1, 161), np.float32)}, path)
    said = wpk("run", tiny, "--wav", wav("a.wav", 0.02), "--weights", path, "--json")
    assert said.code == 1
    assert said.error["type"] == "WeightsError"
    assert "head.bias" in said.error["message"]
