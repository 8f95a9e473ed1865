"""Decoders of neural audio codecs: codes to a latent, the latent to frames, frames to samples.

The three stages of a residual-quantised codec whose decoder ends in a spectrum (Siuzdak 2023, "Vocos", arXiv
2306.00814) instead of a last transposed convolution.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32, i32
from wpk.zoo.component import Component, Count, Size, as_rows, component, concat, expect_rank, reshape
from wpk.zoo.tensors import Tensors

_Eps = Annotated[float, Field(gt=0.0, le=1.0)]
_Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=16)]


@component("rvq_embedding")
class RvqEmbedding(Component):
    """The sum of one row of each codebook: i32[codebooks] -> f32[codebook_dim]. Zeghidour et al. 2021, section III-C.

    silence_codes: one a codebook, what stands for a code of codebook_size or above (control codes of a language model,
    say); where it is not given such a code means the last row. Negative codes mean row 0. Parameters BOOK
    [codebook_size, codebook_dim], books counted from 0.
    """

    codebooks: Size
    codebook_size: Size
    codebook_dim: Size
    silence_codes: tuple[Count, ...] | None = None

    @model_validator(mode="after")
    def _one_silence_a_codebook(self) -> RvqEmbedding:
        silence = self.silence_codes
        if silence is not None and (len(silence) != self.codebooks or max(silence) >= self.codebook_size):
            wanted = f"{self.codebooks} silence_codes below {self.codebook_size}"
            raise ValueError(f"wanted {wanted}, found {list(silence)}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (codes,) = inputs
        if codes.type != i32(self.codebooks):
            raise GraphError("the codes of rvq_embedding", wanted=i32(self.codebooks), found=codes.type)
        books = [tensors.get(str(book), f32(self.codebook_size, self.codebook_dim)) for book in range(self.codebooks)]
        if self.silence_codes is not None:
            beyond = g.op("greater_equal", codes, self._constant(g, (self.codebook_size,) * self.codebooks))
            codes = g.op("select", beyond, self._constant(g, self.silence_codes), codes)
        codes = g.op("maximum", codes, g.op("full", shape=(), value=0, dtype="i32"))
        codes = g.op("minimum", codes, g.op("full", shape=(), value=self.codebook_size - 1, dtype="i32"))
        shape = (1, self.codebook_size, self.codebook_dim)
        stacked = concat(g, [reshape(g, book, shape) for book in books], axis=0)
        return g.op("embedding_sum", codes, stacked)  # type: ignore[no-any-return]

    def _constant(self, g: GraphBuilder, values: tuple[int, ...]) -> Value:
        return g.op("constant", shape=(len(values),), values=values, dtype="i32")  # type: ignore[no-any-return]


@component("convnext_upsampler")
class ConvNextUpsampler(Component):
    """Causal ConvNeXt stages, each after a transposed convolution: [c] or [t, c] -> [t * product(rates), channels[-1]].

    A stage multiplies the frames by its rate with a transposed convolution whose kernel is its stride (so that frames
    do not overlap), without a bias, then runs `blocks` blocks (Liu et al. 2022, "A ConvNet for the 2020s", in one
    dimension): x + W2 gelu(W1 layer_norm(depthwise(x))), the inner layer `expansion` times as wide. The depthwise
    filter of `taps` sees the last taps - 1 frames of the block's input of earlier steps, zeros at first.

    Parameters as of one list of layers, counted from 0 over transposed convolutions and blocks: layers.L.weight
    [c, channels, rate] (PyTorch's order), or layers.L.dwconv.weight [c, 1, taps], layers.L.norm.weight [c],
    layers.L.pwconv1.weight [expansion * c, c, 1], layers.L.pwconv2.weight [c, expansion * c, 1] with a bias each.
    State a session: for each block a ring f32[taps - 1, c].
    """

    channels: _Sizes
    rates: _Sizes
    blocks: Size
    taps: Annotated[int, Field(strict=True, ge=2, le=1 << 12)] = 7
    expansion: Size = 4
    norm_eps: _Eps = 1e-6

    @model_validator(mode="after")
    def _one_rate_a_stage(self) -> ConvNextUpsampler:
        if len(self.rates) != len(self.channels):
            raise ValueError(f"rates: wanted {len(self.channels)}, one a stage, found {len(self.rates)}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        expect_rank("convnext_upsampler", inputs[0], 1, 2)
        x, layer = as_rows(g, inputs[0]), 0
        for channels, rate in zip(self.channels, self.rates, strict=True):
            x = self._upsampled(g, x, tensors, f"layers.{layer}", channels, rate)
            for block in range(layer + 1, layer + 1 + self.blocks):
                x = self._block(g, x, tensors, f"layers.{block}")
            layer += 1 + self.blocks
        return x

    def _upsampled(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str, channels: int, rate: int) -> Value:
        """A frame gives `rate` frames and no other one adds to them: one product, its rows by frame, then channel."""
        frames, width = x.type.shape
        weight = tensors.get(f"{layer}.weight", f32(width, channels, rate))
        with g.scope(layer):
            rows = reshape(g, g.op("transpose", weight, axes=(2, 1, 0)), (rate * channels, width))
            return reshape(g, g.op("linear", x, rows), (frames * rate, channels))

    def _block(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str) -> Value:
        c, history = x.type.shape[1], self.state(f"{layer}.history")
        filters = reshape(g, tensors.get(f"{layer}.dwconv.weight", f32(c, 1, self.taps)), (c, self.taps))
        norm = (tensors.get(f"{layer}.norm.weight", f32(c)), tensors.get(f"{layer}.norm.bias", f32(c)))
        with g.scope(layer):
            window = g.op("concat", g.ring(history, self.taps - 1, f32(c)), x, axis=0)
            g.update(history, x)
            y = g.op("depthwise_conv1d", window, filters, tensors.get(f"{layer}.dwconv.bias", f32(c)))
            y = g.op("layer_norm", y, *norm, eps=self.norm_eps)
            y = self._pointwise(g, y, tensors, f"{layer}.pwconv1", self.expansion * c, activation="gelu")
            return g.op("add", x, self._pointwise(g, y, tensors, f"{layer}.pwconv2", c))  # type: ignore[no-any-return]

    def _pointwise(
        self, g: GraphBuilder, x: Value, tensors: Tensors, name: str, width: int, activation: str = "none"
    ) -> Value:
        c = x.type.shape[1]
        weight = reshape(g, tensors.get(f"{name}.weight", f32(width, c, 1)), (width, c))
        bias = tensors.get(f"{name}.bias", f32(width))
        return g.op("linear", x, weight, bias, activation=activation)  # type: ignore[no-any-return]


@component("istft_head")
class IstftHead(Component):
    """Samples out of frames by way of a spectrum: [c] or [t, c] -> [t * hop], n_fft / 2 samples late.

    A matrix weight [n_fft + 2, c, 1] (a convolution of one tap) without a bias gives each frame log-magnitudes m, then
    phases p, of n_fft / 2 + 1 bins: M = limit * exp(-softplus(ln limit - m)), which is e^m that levels off at `limit`;
    spectrum M (cos p + i sin p), the first and the last bin M cos p alone. Its inverse DFT v is clamped to [-w, w]
    with the periodic Hann window w, multiplied by w, overlap-added, and divided by the overlap-added w^2.

    The sum is that of torch.istft; the first n_fft / 2 samples are what it would give if zero spectra came before the
    stream, and they lag as said because the reference decoder leaves half a hop more than it must to either side.
    State a session: a ring f32[n_fft / hop, n_fft] of windowed frames.
    """

    n_fft: Size
    hop: Size
    limit: Annotated[float, Field(gt=0.0, le=1e6)] = 100.0

    @model_validator(mode="after")
    def _frames_cover_every_sample(self) -> IstftHead:
        if self.n_fft % self.hop or self.n_fft < 2 * self.hop or self.hop % 2:
            raise ValueError(f"wanted an even hop, n_fft 2, 3, ... times as much, found {self.hop} and {self.n_fft}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        expect_rank("istft_head", inputs[0], 1, 2)
        x = as_rows(g, inputs[0])
        spectra = self._spectra(g, x, tensors)
        window = g.op("window", kind="hann_periodic", length=self.n_fft)
        frames = g.op("maximum", g.op("irdft", spectra, n=self.n_fft), g.op("neg", window))
        frames = g.op("mul", g.op("minimum", frames, window), self._synthesis_window(g, window))
        history = self.state("history")
        whole = g.op("concat", g.ring(history, self.n_fft // self.hop, f32(self.n_fft)), frames, axis=0)
        g.update(history, frames)
        return g.op("overlap_add_frames", whole, hop=self.hop, trim=self.n_fft - self.hop // 2)  # type: ignore[no-any-return]

    def _spectra(self, g: GraphBuilder, x: Value, tensors: Tensors) -> Value:
        """[t, 2, bins]. exp(-softplus(a - m)) is sigmoid(m - a); `irdft` ignores the outer bins' imaginary parts."""
        frames, channels = x.type.shape
        bins = self.n_fft // 2 + 1
        weight = reshape(g, tensors.get("weight", f32(2 * bins, channels, 1)), (2 * bins, channels))
        of_magnitude = g.op("slice", weight, axis=0, start=0, stop=bins)
        of_phase = g.op("slice", weight, axis=0, start=bins, stop=2 * bins)
        below_limit = g.op("full", shape=(bins,), value=-math.log(self.limit))
        magnitude = g.op("linear", x, of_magnitude, below_limit, activation="sigmoid")
        magnitude = g.op("affine", magnitude, scale=self.limit)
        phase = g.op("linear", x, of_phase)
        parts = [g.op("mul", magnitude, g.op(function, phase)) for function in ("cos", "sin")]
        return reshape(g, g.op("concat", *parts, axis=1), (frames, 2, bins))

    def _synthesis_window(self, g: GraphBuilder, window: Value) -> Value:
        """w over the overlap-added w^2, which has the period of a hop."""
        by_hop = reshape(g, window, (self.n_fft // self.hop, self.hop))
        envelope = g.op("sum", g.op("transpose", g.op("square", by_hop), axes=(1, 0)))
        return reshape(g, g.op("div", by_hop, envelope), (self.n_fft,))
