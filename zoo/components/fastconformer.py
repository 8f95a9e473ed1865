"""FastConformer, an encoder of streaming recognisers, one output frame a step.

Rekesh et al. 2023 (the encoder), Noroozi et al. 2024 (its caches), Gulati et al. 2020 (the layers).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import DType, f32
from wpk.zoo.component import Built, Component, Count, Size, component, reshape
from wpk.zoo.tensors import Tensors

TAPS = 3  # of the subsampling, along both axes; it strides by 2


@component("fastconformer")
class FastConformer(Component):
    """A causal encoder without look-ahead: the step's feature columns [subsampling_factor, features] -> [d_model].

    In step n they are columns s (n - 1) + 1 to s n of the stream (s = subsampling_factor; `log_mel`),
    and outputs: encoded [d_model], frame n; projected [projection] with `projection`.

    A frame takes log2 s stages of convolutions that stride by 2, causal with 2 zeros before and 1 after (dw_striding),
    then `layers` of half a feed-forward, attention over the last `left_context` frames and itself with relative
    positions (Dai et al. 2019), a convolution over the last `conv_kernel_size` frames, half a feed-forward and a norm.

    Frame n sees columns s n - 2 (s - 1) to s n; `start` says what stands for those before column 0. `columns`, as
    NeMo's cache-aware streaming: frame 0 has zeros in front of every convolution, and frame 1 columns of zeros, so
    that what the first convolutions make of them, their biases, goes on into the next. `padding`, as NeMo's and
    transformers' encoders on a whole recording: zeros in front of every convolution in frame 1 too. From frame 2 on
    all convolutions see columns alone, and frames differ in what they see of frame 1. With s = 4 both are the same.

    Parameters by their published names, encoder.pre_encode.*, encoder.layers.*, proj.*; what is called batch_norm is
    a layer norm. The layers' matrices are stored as the precision policy says; the subsampling (its products may be
    TF32 under tf32 and bf16), what is kept and all sums are f32. Keys and values are kept projected, and the projected
    positions are computed when weights are loaded.
    """

    layers: Size
    d_model: Size
    heads: Size
    ff_expansion_factor: Size = 4
    conv_kernel_size: Size = 9
    left_context: Count = 70
    subsampling_factor: Literal[4, 8] = 8
    subsampling_conv_channels: Size = 256
    projection: Size | None = None
    start: Literal["columns", "padding"] = "columns"
    layer_norm_eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-5

    @model_validator(mode="after")
    def _divisible(self) -> FastConformer:
        if self.d_model % self.heads or self.d_model % 2:
            found = f"{self.d_model} and {self.heads}"
            raise ValueError(f"wanted an even d_model that is a multiple of heads, found {found}")
        return self

    def outputs(self) -> tuple[str, ...]:
        return ("encoded",) if self.projection is None else ("encoded", "projected")

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        with g.products("f32" if tensors.policy == "f32" else "tf32"):
            x = self._subsampled(g, inputs[0], tensors)
        rows = self.left_context + 1
        newest = g.op("remainder", g.position(), by=rows)
        positions = g.op("sinusoids", rows=rows, width=self.d_model)
        for i in range(self.layers):
            name = f"encoder.layers.{i}"
            with g.scope(name):
                x = g.op("add", x, self._feed_forward(g, x, tensors, name, 1))
                x = g.op("add", x, self._attention(g, x, tensors, name, newest, positions))
                x = g.op("add", x, self._convolution(g, x, tensors, name))
                x = g.op("add", x, self._feed_forward(g, x, tensors, name, 2))
                x = self._norm(g, x, tensors, f"{name}.norm_out")
        if self.projection is None:
            return x
        with g.scope("proj"):
            weight = tensors.matrix("proj.weight", self.projection, self.d_model)
            bias = tensors.get("proj.bias", f32(self.projection))
            return {"encoded": x, "projected": g.op("linear", x, weight, bias)}

    # --- subsampling ----------------------------------------------------------------------------------------------
    def _subsampled(self, g: GraphBuilder, x: Value, tensors: Tensors) -> Value:
        """The newest frame of each stage and what it is made of: of s = 8, 15 columns, 7 rows, 3 rows, 1 row."""
        factor, channels, pre = self.subsampling_factor, self.subsampling_conv_channels, "encoder.pre_encode"
        if len(x.type.shape) != 2 or x.type != f32(factor, x.type.shape[-1]):
            raise GraphError("the input of an encoder", wanted=f"f32[{factor},features]", found=x.type)
        past = g.ring(self.state("columns"), factor - 1, f32(x.type.shape[1]))
        g.update(self.state("columns"), x)
        x = g.op("concat", past, x, axis=0)
        x = reshape(g, x, (*x.type.shape, 1))
        with g.scope(pre):
            for stage in range(factor.bit_length() - 1):
                first = stage == 0
                x = self._strided(g, x, tensors, f"{pre}.conv.{3 * stage - (0 if first else 1)}", first)
                if not first:
                    name = f"{pre}.conv.{3 * stage}"
                    pointwise = tensors.get(f"{name}.weight", f32(channels, channels, 1, 1))
                    bias = tensors.get(f"{name}.bias", f32(channels))
                    x = g.op("linear", x, reshape(g, pointwise, (channels, channels)), bias, activation="relu")
            # Published for [channels, features] in a row; a row here is [features, channels].
            features = x.type.shape[1]
            weight = tensors.get(f"{pre}.out.weight", f32(self.d_model, channels * features))
            weight = g.op("transpose", reshape(g, weight, (self.d_model, channels, features)), axes=(0, 2, 1))
            weight = reshape(g, weight, (self.d_model, features * channels))
            bias = tensors.get(f"{pre}.out.bias", f32(self.d_model))
            return g.op("linear", reshape(g, x, (features * channels,)), weight, bias)  # type: ignore[no-any-return]

    def _strided(self, g: GraphBuilder, x: Value, tensors: Tensors, name: str, first: bool) -> Value:
        channels = self.subsampling_conv_channels
        weight = tensors.get(f"{name}.weight", f32(channels, 1, TAPS, TAPS))
        bias = tensors.get(f"{name}.bias", f32(channels))
        start = () if first else (self._rows_before_the_stream(g, x.type.shape[0]),)
        return g.op(  # type: ignore[no-any-return]
            "conv2d", x, weight, bias, *start, stride=(2, 2), pad_before=(0, TAPS - 1), pad_after=(0, 1),
            groups=1 if first else channels, activation="relu" if first else "none",
        )  # fmt: skip

    def _rows_before_the_stream(self, g: GraphBuilder, rows: int) -> Value:
        """How many of the newest `rows` of a stage are none: it makes (rows + 1) / 2 a step, after the first one."""
        missing = [rows - 1, 0]
        if self.start == "padding":
            missing = [max(0, rows - 1 - (rows + 1) // 2 * step) for step in range(3)]
        table = g.op("constant", shape=(len(missing),), values=tuple(map(float, missing)), dtype="i32")
        found = g.op("gather", table, reshape(g, g.position(), (1,)))  # of later steps: the last one
        return reshape(g, found, ())

    # --- layers ---------------------------------------------------------------------------------------------------
    def _norm(self, g: GraphBuilder, x: Value, tensors: Tensors, name: str) -> Value:
        weight, bias = tensors.get(f"{name}.weight", f32(self.d_model)), tensors.get(f"{name}.bias", f32(self.d_model))
        return g.op("layer_norm", x, weight, bias, eps=self.layer_norm_eps)  # type: ignore[no-any-return]

    def _feed_forward(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str, number: int) -> Value:
        name, units = f"{layer}.feed_forward{number}", self.ff_expansion_factor * self.d_model
        x = self._norm(g, x, tensors, f"{layer}.norm_feed_forward{number}")
        x = g.op("linear", x, tensors.matrix(f"{name}.linear1.weight", units, self.d_model), activation="silu")
        # Half of it is added: halving the weight is exact, in bf16 too, and the sum can be the product's own.
        weight = tensors.matrix(f"{name}.linear2.weight", self.d_model, units)
        return g.op("linear", x, _halved(g, weight))  # type: ignore[no-any-return]

    def _attention(
        self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str, newest: Value, positions: Value
    ) -> Value:
        d, heads, width, rows = self.d_model, self.heads, self.d_model // self.heads, self.left_context + 1
        name, kept = f"{layer}.self_attn", self.state(f"{layer}.kv")
        x = self._norm(g, x, tensors, f"{layer}.norm_self_att")
        q, k, v = (tensors.matrix(f"{name}.linear_{letter}.weight", d, d) for letter in "qkv")
        p = tensors.get(f"{name}.linear_pos.weight", f32(d, d))
        made = g.op("linear", x, g.op("concat", q, k, v, axis=0))
        query = reshape(g, g.op("slice", made, axis=0, start=0, stop=d), (heads, width))
        row = reshape(g, g.op("slice", made, axis=0, start=d, stop=3 * d), (2, heads, width))
        biases = [tensors.get(f"{name}.pos_bias_{letter}", f32(heads, width)) for letter in "uv"]
        query = g.op("add", reshape(g, g.op("concat", *biases, axis=0), (2, heads, width)), query)
        held = g.op("cache_append", g.register(kept, f32(rows, 2, heads, width)), row, newest)
        g.update(kept, held)
        distances = reshape(g, g.op("linear", positions, p), (rows, heads, width))
        y = g.op("relative_attention", query, held, distances, g.position(), scale=1 / math.sqrt(width))
        out = tensors.matrix(f"{name}.linear_out.weight", d, d)
        return g.op("linear", reshape(g, y, (d,)), out)  # type: ignore[no-any-return]

    def _convolution(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str) -> Value:
        d, taps, name = self.d_model, self.conv_kernel_size, f"{layer}.conv"
        x = self._norm(g, x, tensors, f"{layer}.norm_conv")
        x = g.op("linear", x, reshape(g, tensors.matrix(f"{name}.pointwise_conv1.weight", 2 * d, d, 1), (2 * d, d)))
        gate = g.op("sigmoid", g.op("slice", x, axis=0, start=d, stop=2 * d))
        x = reshape(g, g.op("mul", g.op("slice", x, axis=0, start=0, stop=d), gate), (1, d))
        if taps > 1:
            past = g.ring(self.state(f"{layer}.conv"), taps - 1, f32(d))
            g.update(self.state(f"{layer}.conv"), x)
            x = g.op("concat", past, x, axis=0)
        filters = reshape(g, tensors.get(f"{name}.depthwise_conv.weight", f32(d, 1, taps)), (d, taps))
        x = reshape(g, g.op("depthwise_conv1d", x, filters), (d,))
        x = g.op("silu", self._norm(g, x, tensors, f"{name}.batch_norm"))
        return g.op("linear", x, reshape(g, tensors.matrix(f"{name}.pointwise_conv2.weight", d, d, 1), (d, d)))  # type: ignore[no-any-return]


def _halved(g: GraphBuilder, weight: Value) -> Value:
    if weight.type.dtype is DType.F32:
        return g.op("affine", weight, scale=0.5)  # type: ignore[no-any-return]
    return g.op("cast", g.op("affine", g.op("cast", weight, dtype="f32"), scale=0.5), dtype="bf16")  # type: ignore[no-any-return]
