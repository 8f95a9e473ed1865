"""Spectra and what is made of them: transforms, magnitudes, filter banks, synthesis by overlapping frames."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import Built, Component, Size, component, expect_rank
from wpk.zoo.tensors import Tensors

_Hertz = Annotated[float, Field(ge=0.0)]


@component("spectrum")
class Spectrum(Component):
    """The real DFT. Without hop: one frame [l] (or many [..., l]) -> [..., 2, bins]. With hop: frames of `length`
    samples (n_fft where it is not given) out of [samples] -> [frames, 2, bins].

    n_fft: points; shorter frames are zero-padded at their end; l where it is not given. window: a name of the
    operator `window`, none where it is not given. bins: the first ones, all (n_fft // 2 + 1) where it is not given.
    """

    n_fft: Size | None = None
    window: str | None = None
    hop: Size | None = None
    length: Size | None = None
    bins: Size | None = None

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        if not x.type.shape:
            expect_rank("spectrum", x, 1)
        length = x.type.shape[-1] if self.hop is None else self.length or self.n_fft
        if length is None:
            raise GraphError("spectrum with a hop needs its frames' length", wanted="n_fft or length", found="neither")
        bins = self.bins or 0
        if self.hop is not None:
            expect_rank("spectrum with a hop", x, 1)
            window = g.op("window", kind=self.window or "ones", length=length)
            return g.op("stft", x, window, hop=self.hop, n_fft=self.n_fft or length, bins=bins)  # type: ignore[no-any-return]
        windows = () if self.window is None else (g.op("window", kind=self.window, length=length),)
        return g.op("rdft", x, *windows, n_fft=self.n_fft or length, bins=bins)  # type: ignore[no-any-return]


@component("inverse_spectrum")
class InverseSpectrum(Component):
    """The inverse real DFT, times a window where one is named: [..., 2, bins] -> [..., n_fft]."""

    n_fft: Size
    window: str | None = None

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        windows = () if self.window is None else (g.op("window", kind=self.window, length=self.n_fft),)
        return g.op("irdft", inputs[0], *windows, n=self.n_fft)  # type: ignore[no-any-return]


@component("magnitude")
class Magnitude(Component):
    """(re^2 + im^2 + eps)^(power / 2): [..., 2, bins] -> [..., bins]. power 1 is the magnitude, 2 the power."""

    power: Literal[1, 2] = 1
    eps: Annotated[float, Field(ge=0.0)] = 0.0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("magnitude", inputs[0], power=self.power, eps=self.eps)  # type: ignore[no-any-return]


class _Bank(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MelBank(_Bank):
    """Triangles equally spaced in mel; f_max 0 is half the sample rate. n_fft: 2 (bins - 1) where it is not given."""

    kind: Literal["mel"]
    sample_rate: Size
    bands: Size
    n_fft: Size | None = None
    f_min: _Hertz = 0.0
    f_max: _Hertz = 0.0
    scale: Literal["htk", "slaney"] = "htk"
    norm: Literal["none", "slaney"] = "none"

    def weight(self, g: GraphBuilder, bins: int, tensors: Tensors) -> Value:
        return g.op(  # type: ignore[no-any-return]
            "mel_filterbank", sample_rate=self.sample_rate, n_fft=self.n_fft or 2 * (bins - 1), n_mels=self.bands,
            f_min=self.f_min, f_max=self.f_max, scale=self.scale, norm=self.norm,
        )  # fmt: skip


class LogarithmicBank(_Bank):
    """Triangles between neighbouring bins of a logarithmic scale (madmom's); the number of bands follows."""

    kind: Literal["logarithmic"]
    sample_rate: Size
    bands_per_octave: Size
    f_min: _Hertz
    f_max: _Hertz
    f_reference: _Hertz = 440.0
    norm: Literal["none", "sum"] = "sum"

    def weight(self, g: GraphBuilder, bins: int, tensors: Tensors) -> Value:
        return g.op(  # type: ignore[no-any-return]
            "logarithmic_filterbank", sample_rate=self.sample_rate, bins=bins, bands_per_octave=self.bands_per_octave,
            f_min=self.f_min, f_max=self.f_max, f_reference=self.f_reference, norm=self.norm,
        )  # fmt: skip


class LearnedBank(_Bank):
    """A matrix of the checkpoint, parameter `weight` [bands, bins]."""

    kind: Literal["learned"]
    bands: Size

    def weight(self, g: GraphBuilder, bins: int, tensors: Tensors) -> Value:
        return tensors.get("weight", f32(self.bands, bins))


Bank = Annotated[MelBank | LogarithmicBank | LearnedBank, Field(discriminator="kind")]


@component("filterbank")
class Filterbank(Component):
    """Bands out of bins: [..., bins] -> [..., bands]."""

    bank: Bank

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        if not x.type.shape:
            expect_rank("filterbank", x, 1)
        return g.op("linear", x, self.bank.weight(g, x.type.shape[-1], tensors))  # type: ignore[no-any-return]


@component("overlap_add")
class OverlapAdd(Component):
    """Synthesis by overlapping frames: [n] -> the `hop` samples that no later frame adds to."""

    hop: Size

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        (x,) = inputs
        expect_rank("overlap_add", x, 1)
        buffer = g.register(self.state("buffer"), x.type)
        following, out = g.op("overlap_add", buffer, x, hop=self.hop)
        g.update(self.state("buffer"), following)
        return out  # type: ignore[no-any-return]
