"""Matrix products, normalisation and activations over the last axis."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32, i32
from wpk.zoo.component import ActivationName, Component, Size, component, expect_rank
from wpk.zoo.tensors import Tensors

_Eps = Annotated[float, Field(gt=0.0, le=1.0)]
_Scale = Annotated[float, Field(ge=-1e6, le=1e6)]


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
    """A row of a table for each index: i32 [] or [t] -> [units] or [t, units].

    Parameter weight [entries, units], stored as the precision policy says.
    """

    entries: Size
    units: Size

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("embedding", inputs[0], tensors.matrix("weight", self.entries, self.units))  # type: ignore[no-any-return]


@component("token_fusion")
class TokenFusion(Component):
    """Features and the embeddings of tokens in one sum: f32[units] and i32[] a scale -> f32[units].

    The first input are the features; each further one is a token, whose row of the table is multiplied by its scale.
    The sum runs from the left, in f32.
    Parameter weight [entries, units], stored as the precision policy says; all tokens share it.
    """

    ARITY: ClassVar[tuple[int, int]] = (2, 64)

    entries: Size
    units: Size
    scales: Annotated[tuple[_Scale, ...], Field(min_length=1, max_length=63)]

    @model_validator(mode="after")
    def _scales_every_token(self) -> TokenFusion:
        tokens = len(self.references or ()) - 1
        if tokens != len(self.scales):
            raise ValueError(f"wanted features and {len(self.scales)} tokens as `input`, found {tokens + 1} inputs")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        total, *tokens = inputs
        if total.type != f32(self.units):
            raise GraphError("token_fusion: features", wanted=f32(self.units), found=total.type)
        table = tensors.matrix("weight", self.entries, self.units)
        for token, scale in zip(tokens, self.scales, strict=True):
            if token.type != i32():
                raise GraphError("token_fusion: a token", wanted=i32(), found=token.type)
            row = g.op("embedding", token, table)
            total = g.op("add", total, row if scale == 1.0 else g.op("affine", row, scale=scale))
        return total
