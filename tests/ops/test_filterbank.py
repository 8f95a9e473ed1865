"""Filter banks against published implementations: torchaudio, FlashVAD's and BeatNet's front ends, librosa's values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import beatnet_filterbank
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.ops.filterbank import SCALES
from wpk.ops.operator import LIBRARY, Array, make

BEATNET = {"sample_rate": 22050, "bins": 705, "bands_per_octave": 24, "f_min": 30.0, "f_max": 17000.0}


def bank(name: str, **attrs: object) -> Array:
    op = make(LIBRARY.get(name), attrs)
    (wanted,) = op.infer([])
    made = np.asarray(op.meaning())
    assert wanted == f32(*made.shape)
    return made


@pytest.mark.parametrize(
    ("scale", "hz", "mel"),
    [
        ("htk", 1000.0, 999.985537),
        ("htk", 0.0, 0.0),
        ("slaney", 60.0, 0.9),
        ("slaney", 1000.0, 15.0),
        ("slaney", 6400.0, 42.0),
    ],
)
def test_mel_scales_at_published_points(scale: str, hz: float, mel: float) -> None:
    """60 Hz is 0.9 in librosa's documentation; 6.4 kHz is 27 steps above the corner by definition."""
    to_mel, to_hz = SCALES[scale]
    assert float(to_mel(np.array(hz))) == pytest.approx(mel, abs=1e-5)
    assert float(to_hz(np.array(mel))) == pytest.approx(hz, abs=1e-3)


@pytest.mark.parametrize("scale", SCALES)
def test_bands_tile_the_range(scale: str) -> None:
    made = bank("mel_filterbank", sample_rate=16000, n_fft=4096, n_mels=40, f_min=50.0, f_max=7600.0, scale=scale)
    hz = np.arange(2049) * 16000 / 4096
    peaks = hz[made.argmax(1)]
    assert (made >= 0).all() and (made <= 1).all() and (np.diff(peaks) > 0).all()
    assert not made[:, (hz <= 50.0) | (hz >= 7600.0)].any()
    inside = (hz >= peaks[0]) & (hz <= peaks[-1])
    np.testing.assert_allclose(made.sum(0)[inside], 1.0, atol=0.1)


def test_slaney_norm_gives_each_band_an_area_of_one() -> None:
    made = bank("mel_filterbank", sample_rate=16000, n_fft=65536, n_mels=20, scale="slaney", norm="slaney")
    np.testing.assert_allclose(made.sum(1) * 16000 / 65536, 1.0, rtol=1e-3)


@pytest.mark.oracle
@pytest.mark.parametrize("scale", ["htk", "slaney"])
@pytest.mark.parametrize("norm", ["none", "slaney"])
@pytest.mark.parametrize(
    ("rate", "n_fft", "n_mels", "f_min", "f_max"),
    [(16000, 400, 80, 0, 8000), (16000, 512, 128, 0, 8000), (22050, 1024, 40, 50, 7600)],
)
def test_mel_banks_are_those_of_torchaudio(
    scale: str, norm: str, rate: int, n_fft: int, n_mels: int, f_min: int, f_max: int
) -> None:
    torchaudio = pytest.importorskip("torchaudio", exc_type=(ImportError, OSError))
    theirs = torchaudio.functional.melscale_fbanks(
        n_fft // 2 + 1, f_min, f_max, n_mels, rate, norm=None if norm == "none" else norm, mel_scale=scale
    ).numpy().T  # fmt: skip
    ours = bank(
        "mel_filterbank", sample_rate=rate, n_fft=n_fft, n_mels=n_mels, f_min=f_min, f_max=f_max, scale=scale, norm=norm
    )
    np.testing.assert_allclose(ours, theirs, atol=5e-5 if norm == "none" else 1e-6)  # theirs is float32


def test_mel_bank_values_from_torchaudio() -> None:
    """The same, for runs without it: column sums weighted by the band, and two entries (torchaudio 2.11)."""
    ours = bank("mel_filterbank", sample_rate=16000, n_fft=400, n_mels=80, scale="slaney", norm="slaney")
    assert float(ours.sum()) == pytest.approx(TORCHAUDIO["sum"], rel=1e-5)
    assert float(ours[3] @ np.arange(201)) == pytest.approx(TORCHAUDIO["row3"], rel=1e-4)
    assert float(ours[60] @ np.arange(201)) == pytest.approx(TORCHAUDIO["row60"], rel=1e-4)


TORCHAUDIO = {"sum": 1.9990241, "row3": 0.09347791, "row60": 2.3303177}


def test_the_default_range_ends_at_nyquist() -> None:
    made = bank("mel_filterbank", sample_rate=8000, n_fft=256, n_mels=10)
    np.testing.assert_array_equal(made, bank("mel_filterbank", sample_rate=8000, n_fft=256, n_mels=10, f_max=4000.0))


def test_the_logarithmic_bank_is_that_of_beatnet() -> None:
    """`beatnet_filterbank` is madmom 0.16.1's algorithm, in float32, transposed."""
    np.testing.assert_allclose(bank("logarithmic_filterbank", **BEATNET), beatnet_filterbank().T, atol=1e-7)


def test_logarithmic_bands_sum_to_one_or_peak_at_one() -> None:
    np.testing.assert_allclose(bank("logarithmic_filterbank", **BEATNET).sum(1), 1.0)
    np.testing.assert_allclose(bank("logarithmic_filterbank", **BEATNET, norm="none").max(1), 1.0)


def test_repeated_bins_are_kept_on_request() -> None:
    """madmom makes 217 bands here too; where repeated bins leave a band without a peak, both refuse."""
    fine = {
        "sample_rate": 44100,
        "bins": 1024,
        "bands_per_octave": 24,
        "f_min": 30.0,
        "f_max": 17000.0,
        "unique": False,
    }
    made = bank("logarithmic_filterbank", **fine, norm="none")
    assert made.shape == (217, 1024) and (made.max(1) == 1.0).all()
    with pytest.raises(GraphError, match="peak"):
        bank("logarithmic_filterbank", **BEATNET, unique=False)


@pytest.mark.parametrize(
    "attrs",
    [
        {"scale": "bark"}, {"norm": "area"}, {"n_mels": 0}, {"f_min": 9000.0}, {"f_min": 4000.0, "f_max": 3000.0},
        {"f_max": 8001.0}, {"f_min": -1.0},
    ],
)  # fmt: skip
def test_impossible_mel_banks_are_refused(attrs: dict[str, object]) -> None:
    with pytest.raises(GraphError, match="mel_filterbank"):
        bank("mel_filterbank", **{"sample_rate": 16000, "n_fft": 512, "n_mels": 40, **attrs})


@pytest.mark.parametrize("attrs", [{"norm": "slaney"}, {"f_min": 0.0}, {"f_max": 20.0}, {"bins": 1}, {"f_max": 31.0}])
def test_impossible_logarithmic_banks_are_refused(attrs: dict[str, object]) -> None:
    with pytest.raises(GraphError, match="logarithmic_filterbank"):
        bank("logarithmic_filterbank", **{**BEATNET, **attrs})
