"""Convolutions over time-major sequences [frames, channels]: inside one step, or causal with history between steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import ActivationName, Component, Count, Size, as_rows, component, expect_rank, reshape
from wpk.zoo.tensors import Tensors

_Eps = Annotated[float, Field(gt=0.0, le=1.0)]


def _signal(g: GraphBuilder, what: str, x: Value) -> Value:
    """[t, c]; a vector [n] is a signal of n frames and one channel."""
    expect_rank(what, x, 1, 2)
    return x if len(x.type.shape) == 2 else reshape(g, x, (x.type.size, 1))


def _with_history(g: GraphBuilder, state: str, x: Value, rows: int) -> Value:
    """`rows` frames of earlier steps in front of x; zeros at first."""
    if rows == 0:
        return x
    kept = g.ring(state, rows, f32(x.type.shape[1]))
    g.update(state, x)
    return g.op("concat", kept, x, axis=0)  # type: ignore[no-any-return]


@component("conv1d")
class Conv1d(Component):
    """Convolution over time: [t, c] (or a vector, as one channel) -> [frames, channels].

    pad_left, pad_right: zeros inside the step. dilation: frames between taps. causal: the last
    (taps - 1) * dilation + 1 - stride frames of earlier steps come in front instead, so that steps join without a
    seam; t must be a multiple of the stride. Parameters weight
    [channels, c, taps] (PyTorch's order), bias [channels].
    """

    channels: Size
    taps: Size
    stride: Size = 1
    dilation: Size = 1
    pad_left: Count = 0
    pad_right: Count = 0
    causal: bool = False
    bias: bool = True
    activation: ActivationName = "none"

    @model_validator(mode="after")
    def _one_way_to_begin(self) -> Conv1d:
        if self.causal and (self.pad_left or self.pad_right or self._reach < self.stride):
            raise ValueError("causal: wanted no padding and a reach of at least the stride, found otherwise")
        return self

    @property
    def _reach(self) -> int:
        """Frames from the first tap to the last."""
        return (self.taps - 1) * self.dilation + 1

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        x = _signal(g, "conv1d", inputs[0])
        if self.causal:
            if x.type.shape[0] % self.stride:
                wanted = f"a multiple of {self.stride} frames"
                raise GraphError("causal conv1d: frames of a step", wanted=wanted, found=x.type)
            x = _with_history(g, self.state("history"), x, self._reach - self.stride)
        weight = tensors.get("weight", f32(self.channels, x.type.shape[1], self.taps))
        bias = (tensors.get("bias", f32(self.channels)),) if self.bias else ()
        return g.op(  # type: ignore[no-any-return]
            "conv1d", x, weight, *bias, stride=self.stride, dilation=self.dilation,
            pad_left=self.pad_left, pad_right=self.pad_right, activation=self.activation,
        )  # fmt: skip


@component("conv_stack")
class ConvStack(Component):
    """Convolutions one after the other inside the step, all of one size: [t, c] -> [frames, channels[-1]].

    channels: of each layer. strides: of each layer, all 1 where not given. padding: zeros on both sides of each.
    Parameters LAYER.weight [channels, c, taps], LAYER.bias, layers counted from 0.
    """

    channels: Annotated[tuple[Size, ...], Field(min_length=1)]
    taps: Size
    strides: tuple[Size, ...] | None = None
    padding: Count = 0
    bias: bool = True
    activation: ActivationName = "none"

    @model_validator(mode="after")
    def _one_stride_a_layer(self) -> ConvStack:
        if self.strides is not None and len(self.strides) != len(self.channels):
            raise ValueError(f"strides: wanted {len(self.channels)}, one a layer, found {len(self.strides)}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        x = _signal(g, "conv_stack", inputs[0])
        strides = self.strides or (1,) * len(self.channels)
        for layer, (channels, stride) in enumerate(zip(self.channels, strides, strict=True)):
            weight = tensors.get(f"{layer}.weight", f32(channels, x.type.shape[1], self.taps))
            bias = (tensors.get(f"{layer}.bias", f32(channels)),) if self.bias else ()
            x = g.op(
                "conv1d", x, weight, *bias, stride=stride, pad_left=self.padding, pad_right=self.padding,
                activation=self.activation,
            )  # fmt: skip
        return x


@component("depthwise_conv1d")
class DepthwiseConv1d(Component):
    """One causal filter a channel: [c] or [t, c] -> the same shape. Parameters weight [c, taps], bias [c]."""

    taps: Size
    dilation: Size = 1
    bias: bool = True
    activation: ActivationName = "none"

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("depthwise_conv1d", x, 1, 2)
        rows = _with_history(g, self.state("history"), as_rows(g, x), (self.taps - 1) * self.dilation)
        channels = x.type.shape[-1]
        bias = (tensors.get("bias", f32(channels)),) if self.bias else ()
        weight = tensors.get("weight", f32(channels, self.taps))
        y = g.op("depthwise_conv1d", rows, weight, *bias, dilation=self.dilation, activation=self.activation)
        return reshape(g, y, x.type.shape)


@component("separable_blocks")
class SeparableBlocks(Component):
    """Causal residual blocks, x + act(norm(pointwise(depthwise(x)))): [c] or [t, c] -> the same shape.

    A block a dilation; the depthwise filter of `taps` sees the block's input of earlier steps (zeros at first).
    Parameters BLOCK.depthwise.weight [c, taps], BLOCK.depthwise.bias [c], BLOCK.pointwise.weight [c, c],
    BLOCK.pointwise.bias [c], BLOCK.norm.weight [c], BLOCK.norm.bias [c], blocks counted from 0.
    """

    dilations: Annotated[tuple[Size, ...], Field(min_length=1)]
    taps: Size
    depthwise_bias: bool = False
    pointwise_bias: bool = True
    norm_eps: _Eps = 1e-5
    activation: ActivationName = "silu"

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        expect_rank("separable_blocks", inputs[0], 1, 2)
        x = as_rows(g, inputs[0])
        channels = x.type.shape[1]
        vector = f32(channels)
        for block, dilation in enumerate(self.dilations):
            window = _with_history(g, self.state(f"{block}.history"), x, (self.taps - 1) * dilation)
            bias = (tensors.get(f"{block}.depthwise.bias", vector),) if self.depthwise_bias else ()
            depthwise = tensors.get(f"{block}.depthwise.weight", f32(channels, self.taps))
            y = g.op("depthwise_conv1d", window, depthwise, *bias, dilation=dilation)
            bias = (tensors.get(f"{block}.pointwise.bias", vector),) if self.pointwise_bias else ()
            y = g.op("linear", y, tensors.get(f"{block}.pointwise.weight", f32(channels, channels)), *bias)
            norm = (tensors.get(f"{block}.norm.weight", vector), tensors.get(f"{block}.norm.bias", vector))
            y = g.op("layer_norm", y, *norm, eps=self.norm_eps)
            y = y if self.activation == "none" else g.op(self.activation, y)
            x = g.op("add", x, y)
        return reshape(g, x, inputs[0].type.shape)


@component("max_pool1d")
class MaxPool1d(Component):
    """The greatest of `window` frames a channel, no padding: [t, c] (or a vector, as one channel) -> [frames, c].

    stride: the window's where it is not given.
    """

    window: Size
    stride: Size | None = None

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        x = _signal(g, "max_pool1d", inputs[0])
        return g.op("max_pool1d", x, window=self.window, stride=self.stride or self.window)  # type: ignore[no-any-return]
