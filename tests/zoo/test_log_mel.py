"""The log-mel front end, step by step on the CPU kernel, against torch and `transformers` on the whole recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.zoo.specs import chain, run
from wpk import registry
from wpk.ir.errors import SpecError
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
SAMPLES = 20 * 1280


def recordings() -> dict[str, Array]:
    """Noise; a sweep from 50 Hz to 7.5 kHz over a floor of noise, which no recording is without; silence."""
    rng, n = np.random.default_rng(2), SAMPLES
    t = np.arange(n) / 16000
    sweep = 0.4 * np.sin(2 * np.pi * (50 * t + (7450 / 2) * t**2 / t[-1]))
    return {
        "noise": (0.1 * rng.standard_normal(n)).astype(np.float32),
        "sweep": (sweep + 1e-3 * rng.standard_normal(n)).astype(np.float32),
        "silence": np.zeros(n, np.float32),
    }


def front_end(samples: int = 1280, **changes: Any) -> ModelSpec:
    part = {"kind": "log_mel", **changes}
    return chain([part], {"audio": f"f32[{samples}]"}, f"f32[{samples // 160},128]", tensors={"log_mel.*": "*"})


def played(spec: ModelSpec, folder: Path, where: Settings, audio: Array) -> Array:
    """[steps, columns, mels]"""
    samples = spec.ports.inputs["audio"].type.size
    with registry.load(spec, capacity=1, target="cpu", threads=1, weights=folder, where=where) as cohort:
        session = cohort.join()
        made = [cohort.beat({session: {"audio": x}})[session]["y"] for x in audio.reshape(-1, samples)]
    return np.stack(made).reshape(len(made), -1, 128)


@pytest.fixture(scope="module")
def extractor(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Array, Array, Path]:
    """The feature extractor of `transformers`, its window and filters, and a folder with both under their names."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("filters")
    theirs = transformers.NemotronAsrStreamingFeatureExtractor(feature_size=128)
    window, filters = torch.hann_window(400, periodic=False).numpy(), theirs.mel_filters.numpy()
    save_file({"window": window, "fb": filters[None]}, folder / "model.safetensors")
    return theirs, window, filters, folder


def exact(audio: Array, window: Array, filters: Array) -> Array:
    """[columns, mels] of a recording at once by torch in float64."""
    import torch

    x = torch.from_numpy(audio.astype(np.float64))
    emphasised = torch.cat([x[:1], x[1:] - 0.97 * x[:-1]])
    spectra = torch.stft(
        emphasised, 512, 160, 400, torch.from_numpy(window).double(), pad_mode="constant", return_complex=True
    )
    return np.asarray(torch.log(torch.from_numpy(filters).double() @ spectra.abs() ** 2 + 2**-24).T)


@pytest.mark.oracle
@pytest.mark.parametrize("samples", [1280, 320])
def test_every_column_is_that_of_the_whole_recording(samples: int, extractor: Any, shared: Settings) -> None:
    """torch's in float64; of noise that of transformers, too: its float32 is not exact where a sweep is quiet."""
    theirs, window, filters, folder = extractor
    columns = samples // 160
    for name, audio in recordings().items():
        made = played(front_end(samples), folder, shared, audio)
        assert (made[0, :-1] == 0).all()  # there are no columns before column 0
        found = made.reshape(-1, 128)[columns - 1 :]
        assert len(found) == (len(made) - 1) * columns + 1
        wanted = exact(audio, window, filters)[: len(found)]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=name)
        if name != "sweep":
            other = theirs(audio, sampling_rate=16000).input_features[0].numpy()[: len(found)]
            np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_front_end_may_give_a_column_a_step_and_leave_the_signal_as_it_is() -> None:
    """A column is there once half its window is: with steps of a hop, a window of two hops is the longest."""
    spec = front_end(160, win_length=320, preemphasis=0.0)
    rng, audio = np.random.default_rng(4), np.random.default_rng(5).standard_normal((6, 160))
    weights = {"window": rng.standard_normal(320), "fb": rng.random((1, 128, 257))}
    found = np.stack(run(spec, *audio, weights=weights))
    padded = np.concatenate([np.zeros(160), audio.reshape(-1)])
    frames = [np.fft.rfft(padded[160 * n : 160 * n + 320] * weights["window"], 512) for n in range(6)]
    wanted = [np.log(weights["fb"][0] @ np.abs(f) ** 2 + 2**-24) for f in frames]
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-9)


@pytest.mark.parametrize(
    ("samples", "change", "said"),
    [
        (1280, {"win_length": 401}, "an even win_length"),
        (1280, {"win_length": 514}, "at most n_fft"),
        (160, {}, "a multiple of 160 samples, at least 200"),
    ],
)
def test_a_front_end_that_cannot_be_built_is_refused(samples: int, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_graph(front_end(samples, **change))
    assert said in str(refused.value)
