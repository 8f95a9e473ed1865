"""Filter banks over spectra, as weights: apply them with `linear`. Every bank is [bands, bins] f32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import Type, f32
from wpk.ops.operator import Array, Dims, Operator, attr, operator

_SLANEY_STEP = 200.0 / 3.0  # Hz a mel below the corner
_SLANEY_CORNER = 1000.0
_SLANEY_RATIO = np.log(6.4) / 27.0  # 27 logarithmic steps to 6.4 kHz


def _slaney_mel(hz: Array) -> Array:
    above = np.log(np.maximum(hz, _SLANEY_CORNER) / _SLANEY_CORNER) / _SLANEY_RATIO
    return np.where(hz < _SLANEY_CORNER, hz / _SLANEY_STEP, _SLANEY_CORNER / _SLANEY_STEP + above)


def _slaney_hz(mel: Array) -> Array:
    corner = _SLANEY_CORNER / _SLANEY_STEP
    above = _SLANEY_CORNER * np.exp(_SLANEY_RATIO * (np.maximum(mel, corner) - corner))
    return np.where(mel < corner, mel * _SLANEY_STEP, above)


# Name of a scale -> (Hz to mel, mel to Hz).
SCALES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "htk": (lambda hz: 2595.0 * np.log10(1.0 + hz / 700.0), lambda mel: 700.0 * (10.0 ** (mel / 2595.0) - 1.0)),
    "slaney": (_slaney_mel, _slaney_hz),
}


@operator("mel_filterbank", version=1)
class MelFilterbank(Operator):
    """Triangles with corners equally spaced in mel, linear in Hz: [n_mels, n_fft // 2 + 1].

    scale: htk (2595 log10(1 + f / 700); torchaudio's default) or slaney (linear to 1 kHz, then logarithmic; Slaney
    1998, Auditory Toolbox; librosa's default). norm: none (peaks of 1) or slaney (area of 1 in Hz: 2 / width).
    f_max 0 is the Nyquist frequency.
    """

    sample_rate: int = attr()
    n_fft: int = attr()
    n_mels: int = attr()
    f_min: float = attr(0.0)
    f_max: float = attr(0.0)
    scale: str = attr("htk")
    norm: str = attr("none")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.scale not in SCALES or self.norm not in ("none", "slaney"):
            raise GraphError("mel_filterbank: scale and norm", wanted="htk | slaney, none | slaney", found=self)
        if min(self.sample_rate, self.n_fft, self.n_mels) < 1:
            raise GraphError("mel_filterbank: sample_rate, n_fft and n_mels", wanted=">= 1", found=self)
        if not 0.0 <= self.f_min < self._top <= self.sample_rate / 2:
            raise GraphError("mel_filterbank: range", wanted="0 <= f_min < f_max <= sample_rate / 2", found=self)
        return (f32(self.n_mels, self.n_fft // 2 + 1),)

    def meaning(self) -> Array:
        to_mel, to_hz = SCALES[self.scale]
        ends = to_mel(np.array([self.f_min, self._top]))
        corners = to_hz(np.linspace(ends[0], ends[1], self.n_mels + 2))
        hz = np.arange(self.n_fft // 2 + 1) * (self.sample_rate / self.n_fft)
        low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
        bank = np.maximum(0.0, np.minimum((hz - low) / (centre - low), (high - hz) / (high - centre)))
        return np.asarray(bank * (2.0 / (high - low)) if self.norm == "slaney" else bank)

    @property
    def _top(self) -> float:
        return self.f_max or self.sample_rate / 2


@operator("logarithmic_filterbank", version=1)
class LogarithmicFilterbank(Operator):
    """Triangles between neighbouring bins of a logarithmic scale, as madmom's LogarithmicFilterbank: [bands, bins].

    Centres are f_reference 2^(i / bands_per_octave) within [f_min, f_max], each moved to the nearest bin; bin k stands
    for k sample_rate / (2 bins) Hz (madmom's rule, whatever the transform's length was). `unique` drops repeated
    bins; kept, three equal ones make a band of one bin. A triangle rises from its left neighbour (0) to its centre (1)
    and falls to 0 at its right neighbour.
    norm: sum (each band sums to 1) or none.
    """

    sample_rate: int = attr()
    bins: int = attr()
    bands_per_octave: int = attr()
    f_min: float = attr()
    f_max: float = attr()
    f_reference: float = attr(440.0)
    norm: str = attr("sum")
    unique: bool = attr(True)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.norm not in ("none", "sum"):
            raise GraphError("logarithmic_filterbank: norm", wanted="none | sum", found=self.norm)
        if min(self.sample_rate, self.bands_per_octave) < 1 or self.bins < 2:
            raise GraphError("logarithmic_filterbank: sizes", wanted="positive, bins >= 2", found=self)
        if not 0.0 < self.f_min < self.f_max or self.f_reference <= 0.0:
            raise GraphError("logarithmic_filterbank: range", wanted="0 < f_min < f_max, f_reference > 0", found=self)
        corners = self._corners()
        if corners.size < 3:
            raise GraphError("logarithmic_filterbank: no band in the range", wanted=">= 3 bins", found=corners.size)
        if ((corners[1:-1] == corners[2:]) & (corners[2:] - corners[:-2] >= 2)).any():
            raise GraphError("logarithmic_filterbank: a band without a peak", wanted="unique bins", found=self)
        return (f32(corners.size - 2, self.bins),)

    def meaning(self) -> Array:
        corners = self._corners()
        bank = np.zeros((corners.size - 2, self.bins))
        for band, (start, centre, stop) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
            if stop - start < 2:  # repeated bins: a band of one bin
                centre, stop = start, start + 1
            bank[band, start:centre] = np.arange(centre - start) / max(1, centre - start)
            bank[band, centre:stop] = 1.0 - np.arange(stop - centre) / (stop - centre)
        return bank / bank.sum(1, keepdims=True) if self.norm == "sum" else bank

    def _corners(self) -> Array:
        per_octave = self.bands_per_octave
        low = np.floor(np.log2(self.f_min / self.f_reference) * per_octave)
        high = np.ceil(np.log2(self.f_max / self.f_reference) * per_octave)
        hz = self.f_reference * 2.0 ** (np.arange(low, high) / per_octave)
        hz = hz[(hz >= self.f_min) & (hz <= self.f_max)]
        bin_hz = np.arange(self.bins) * (self.sample_rate / (2 * self.bins))
        right = np.clip(np.searchsorted(bin_hz, hz), 1, self.bins - 1)
        nearest = right - (hz - bin_hz[right - 1] < bin_hz[right] - hz)
        return np.unique(nearest) if self.unique else nearest
