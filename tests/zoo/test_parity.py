"""Whole recordings through live sessions of one cohort, frame by frame, against the original files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from typer.testing import CliRunner

from tests import oracles
from tests.originals import FLASHVAD_FRONT_END, Audio, drums, originals, speech
from wpk import registry
from wpk.cli.main import app

pytestmark = [pytest.mark.oracle, pytest.mark.network]
TOLERANCE = 1e-4


def play(model: str, recordings: list[Audio], capacity: int | None = None) -> list[dict[str, npt.NDArray[np.float32]]]:
    """Every recording in a session of its own, at its own length; outputs [steps, values] by port."""
    made: list[dict[str, list[npt.NDArray[np.float32]]]] = [{} for _ in recordings]
    with registry.load(model, capacity=capacity or len(recordings)) as cohort:
        steps = [oracles.split_steps(r, cohort.spec.clock.samples_per_step) for r in recordings]
        live = {i: cohort.join() for i in range(len(recordings))}
        for beat in range(max(map(len, steps))):
            for i in [i for i in live if beat >= len(steps[i])]:
                cohort.leave(live.pop(i))
            outputs = cohort.beat({session: {"audio": steps[i][beat]} for i, session in live.items()})
            for i, session in live.items():
                for port, values in outputs[session].items():
                    made[i].setdefault(port, []).append(values)
    return [{port: np.stack(rows) for port, rows in one.items()} for one in made]


def weights(model: str) -> list[Path]:
    return list(originals(registry.find_model(model)).values())


def test_silero_vad_equals_onnxruntime_frame_by_frame():
    recordings = [speech(i) for i in range(3)]
    (file,) = weights("silero-vad")
    for audio, made in zip(recordings, play("silero-vad", recordings), strict=True):
        wanted = oracles.silero(file, audio)
        assert wanted.max() > 0.9 and wanted.min() < 0.1
        np.testing.assert_allclose(made["speech"][:, 0], wanted, rtol=0, atol=TOLERANCE)


def test_the_command_line_gives_onnxruntime_s_probabilities(tmp_path: Path):
    recordings = {tmp_path / f"{name}.wav": speech(i) for i, name in enumerate("ab")}
    for path, audio in recordings.items():
        soundfile.write(path, audio, 16000, subtype="FLOAT")
    words = [word for path in recordings for word in ("--wav", str(path))]
    said = CliRunner().invoke(app, ["run", "silero-vad", *words, "--json"])
    assert said.exit_code == 0, said.output
    sessions = json.loads(said.stdout)["sessions"]
    assert [session["input"] for session in sessions] == list(map(str, recordings))
    (file,) = weights("silero-vad")
    for audio, session in zip(recordings.values(), sessions, strict=True):
        made = np.array(session["outputs"]["speech"])
        np.testing.assert_allclose(made, oracles.silero(file, audio), rtol=0, atol=TOLERANCE)


def test_flashvad_equals_onnxruntime_frame_by_frame():
    recordings = [speech(i) for i in range(3)]
    (file,) = weights("flashvad")
    package = next(iter(originals(FLASHVAD_FRONT_END).values())).parent.parent
    for audio, made in zip(recordings, play("flashvad", recordings), strict=True):
        wanted = oracles.flashvad(file, audio, package)
        assert wanted.max() > 0.9 and wanted.min() < 0.1
        np.testing.assert_allclose(made["speech"][:, 0], wanted, rtol=0, atol=TOLERANCE)


def test_dtln_gives_onnxruntime_s_waveform_and_its_gain():
    clean = [speech(i)[:48000] for i in range(2)]
    rng = np.random.default_rng(0)
    noisy = []
    for audio in clean:
        noise = rng.standard_normal(audio.size).astype(np.float32)
        noisy.append(audio + noise * (np.linalg.norm(audio) / np.linalg.norm(noise)))  # 0 dB
    model_1, model_2 = weights("dtln")
    delay = 384
    for reference, audio, made in zip(clean, noisy, play("dtln", noisy), strict=True):
        ours = made["audio"].reshape(-1)[: audio.size]
        theirs = oracles.dtln(model_1, model_2, audio)[: audio.size]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())
        gains = [oracles.si_snr(reference[:-delay], wave[delay:]) for wave in (ours, theirs)]
        assert gains[1] > 5.0
        assert abs(gains[0] - gains[1]) < 0.1


def test_beatnet_equals_its_published_arithmetic():
    audio = drums()
    (file,) = weights("beatnet")
    (made,) = play("beatnet", [audio])
    published = oracles.beatnet(file, audio, alignment="published")
    steps = min(len(made["beats"]) - 1, len(published))
    assert steps > 400
    # Step n of ours is the package's frame n - 1.
    np.testing.assert_allclose(made["beats"][1 : steps + 1], published[:steps], rtol=0, atol=TOLERANCE)
    assert (published[:, :2].max(axis=1) > 0.5).sum() > 10


@pytest.mark.parametrize("model", ["silero-vad", "flashvad", "dtln", "beatnet"])
@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_any_capacity_gives_the_same_outputs(model, capacity):
    audio = drums()[:22050] if model == "beatnet" else speech(1)[:8000]
    (alone,) = play(model, [audio])
    (among,) = play(model, [audio], capacity)
    for port, values in alone.items():
        np.testing.assert_array_equal(among[port], values)
