"""Matrix products, normalisation and activations over the last axis."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import ActivationName, Component, Size, component, expect_rank
from wpk.zoo.tensors import Tensors

_Eps = Annotated[float, Field(gt=0.0, le=1.0)]


@component("dense")
class Dense(Component):
    """act(x W^T + b): [..., k] -> [..., units]. Parameters weight [units, k], bias [units]."""

    units: Size
    bias: bool = True
    activation: ActivationName = "none"

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        if not x.type.shape:
            expect_rank("dense", x, 1)
        weight = tensors.get("weight", f32(self.units, x.type.shape[-1]))
        bias = (tensors.get("bias", f32(self.units)),) if self.bias else ()
        return g.op("linear", x, weight, *bias, activation=self.activation)  # type: ignore[no-any-return]


@component("layer_norm")
class LayerNorm(Component):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; biased variance. Parameters weight, bias [d]."""

    eps: _Eps = 1e-5
    bias: bool = True

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        width = f32(*x.type.shape[-1:])
        bias = (tensors.get("bias", width),) if self.bias else ()
        return g.op("layer_norm", x, tensors.get("weight", width), *bias, eps=self.eps)  # type: ignore[no-any-return]


@component("rms_norm")
class RmsNorm(Component):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis. Parameter weight [d]."""

    eps: _Eps = 1e-5
    offset: float = 0.0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        weight = tensors.get("weight", f32(*x.type.shape[-1:]))
        return g.op("rms_norm", x, weight, eps=self.eps, offset=self.offset)  # type: ignore[no-any-return]


@component("group_norm")
class GroupNorm(Component):
    """Normalisation of each frame in groups of channels: [c] or [t, c]. Parameters weight, bias [c]."""

    groups: Size
    eps: _Eps = 1e-5

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        width = f32(*x.type.shape[-1:])
        weight, bias = tensors.get("weight", width), tensors.get("bias", width)
        return g.op("group_norm", x, weight, bias, groups=self.groups, eps=self.eps)  # type: ignore[no-any-return]


@component("embedding")
class Embedding(Component):
    """A row of a table for each index: i32 [] or [t] -> [units] or [t, units]. Parameter weight [entries, units]."""

    entries: Size
    units: Size

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("embedding", inputs[0], tensors.get("weight", f32(self.entries, self.units)))  # type: ignore[no-any-return]
