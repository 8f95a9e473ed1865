"""Logarithmic mel spectra of a stream, a step's columns at a time: the front end of streaming recognisers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import Type, f32
from wpk.zoo.component import Component, Size, after_step, component, expect_rank, reshape
from wpk.zoo.tensors import Tensors


@component("log_mel")
class LogMel(Component):
    """ln(mel power + offset) of the columns that a step completes: [samples] -> [samples / hop_length, n_mels].

    As NeMo's AudioToMelSpectrogramPreprocessor without normalisation and dither. Column j is the spectrum of the
    samples around j hop_length, after y[t] = x[t] - preemphasis x[t - 1], under a window of win_length in the middle
    of n_fft points; step n gives the columns m (n - 1) + 1 to m n with m = samples / hop_length, counted from the
    start of the stream. So the newest column ends win_length / 2 samples into the step, and the rest of the step
    waits: of all schedules that give column 0 in step 0 the one that waits longest, which is that of the models.

    Before the stream there is silence: samples there are zeros (the padding of newer NeMo; older mirrors the first
    256 samples, which changes columns 0 and 1). Columns that would lie before column 0 do not exist; in step 0 they
    are rows of zeros, which is what streaming encoders are given before the first column.

    Parameters window [win_length] and fb [1, n_mels, n_fft / 2 + 1], the mel filters.
    """

    n_fft: Size = 512
    win_length: Size = 400
    hop_length: Size = 160
    n_mels: Size = 128
    preemphasis: Annotated[float, Field(ge=0.0, le=1.0)] = 0.97
    offset: Annotated[float, Field(gt=0.0)] = 2.0**-24

    @model_validator(mode="after")
    def _windows(self) -> LogMel:
        if self.win_length % 2 or self.n_fft % 2 or self.win_length > self.n_fft:
            found = f"{self.win_length} and {self.n_fft}"
            raise ValueError(f"wanted an even win_length of at most n_fft, which is even, found {found}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("log_mel", x, 1)
        columns, ahead = x.type.size // self.hop_length, self.win_length // 2
        if x.type.size % self.hop_length or ahead > x.type.size:
            wanted = f"a multiple of {self.hop_length} samples, at least {ahead}"
            raise GraphError("log_mel: samples of a step", wanted=wanted, found=x.type)
        samples = self._emphasised(g, x, (columns - 1) * self.hop_length + ahead, ahead)
        # The window is in the middle of n_fft points: a frame that starts with it has the same power.
        window = tensors.get("window", f32(self.win_length))
        spectra = g.op("stft", samples, window, hop=self.hop_length, n_fft=self.n_fft)
        bins = self.n_fft // 2 + 1
        filters = reshape(g, tensors.get("fb", f32(1, self.n_mels, bins)), (self.n_mels, bins))
        # No power is negative; filters that were made from a seed may give one, of which there is no logarithm.
        mel = g.op("linear", g.op("magnitude", spectra, power=2), filters, activation="relu")
        made = g.op("log", g.op("affine", mel, offset=self.offset))
        if columns == 1:
            return made  # type: ignore[no-any-return]
        newest = g.op("slice", made, axis=0, start=columns - 1, stop=columns)
        return after_step(g, 1, made, g.op("pad", newest, before=columns - 1))

    def _emphasised(self, g: GraphBuilder, x: Value, before: int, ahead: int) -> Value:
        """`before` samples of earlier steps and the first `ahead` of this one, each less a share of the one before."""
        past = g.ring(self.state("samples"), before + 1, Type(x.type.dtype))
        g.update(self.state("samples"), x)
        window = g.op("concat", past, g.op("slice", x, axis=0, start=0, stop=ahead), axis=0)
        size = window.type.size
        later = g.op("slice", window, axis=0, start=1, stop=size)
        if not self.preemphasis:
            return later  # type: ignore[no-any-return]
        earlier = g.op("slice", window, axis=0, start=0, stop=size - 1)
        return g.op("add", later, g.op("affine", earlier, scale=-self.preemphasis))  # type: ignore[no-any-return]
