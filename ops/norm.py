"""Normalisations: statistics of a row in f32, then an affine map. Variances take two passes: the mean first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import Type
from wpk.ops.legal import FINITE, NOT_NEGATIVE, POSITIVE, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, parameter, parameter_f32, present
from wpk.ops.reduce import KeptRows, mean_of, sum_of_squares
from wpk.ops.scalars import scalar


@scalar
def _rsqrt_of_mean(total, n, eps):
    """1 / sqrt(total / n + eps)."""
    return F(1.0) / F(math.sqrt(total / F(n) + eps))


class Norm(KeptRows):
    """Base: payload operands x, weight, bias (or absent), y."""

    eps: float

    def cost(self, *types: Type) -> Cost:
        weights = sum(t.bytes for t in types[1:])
        return Cost({"f32": 7 * types[0].size}, weight_bytes=weights, activation_bytes=2 * types[0].bytes)

    def places(self, count: int) -> tuple[int, ...]:
        return (*range(count), 3)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, d = parameters[:2]
        return (4 * rows * d, 4 * d, 4 * d, 4 * rows * d)


@operator("layer_norm", version=1)
class LayerNorm(Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis. Ba et al. 2016, eq. 3-4.

    x [..., d] f32, weight [d], bias [d] optional; var is the biased one.
    """

    x = operand("... d")
    weight = operand("d")
    bias = operand("d", optional=True)
    eps: float = attr(1e-5)
    semantic_parameters: ClassVar = {2: NOT_NEGATIVE}

    def meaning(self, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.eps) * weight + bias

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*super().parameters(*types), self.eps)


@body(LayerNorm)
def layer_norm_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, eps = parameter(record, 1), parameter_f32(record, 2)
    has_bias = present(record, 2)
    for slot in range(slot_lo, slot_hi):
        weight = operand_f32(record, arenas, 1, slot, d)
        bias = operand_f32(record, arenas, 2 if has_bias else 1, slot, d)
        for row in range(part_lo, part_hi):
            x_at = address(record, arenas, 0, slot) + 4 * row * d
            x, y = view_f32(x_at, d), view_f32(address(record, arenas, 3, slot) + 4 * row * d, d)
            mean = mean_of(x_at, d)
            scale = _rsqrt_of_mean(sum_of_squares(x_at, d, mean), d, eps)
            for i in range(d):
                y[i] = (x[i] - mean) * scale * weight[i]
            if has_bias:
                for i in range(d):
                    y[i] += bias[i]


@operator("rms_norm", version=1)
class RmsNorm(KeptRows):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis. Zhang & Sennrich 2019, eq. 4.

    x [..., d] f32, weight [d]. offset 1 serves models that store weight - 1 (Gemma).
    """

    x = operand("... d")
    weight = operand("d")
    eps: float = attr(1e-5)
    offset: float = attr(0.0)
    semantic_parameters: ClassVar = {2: NOT_NEGATIVE, 3: FINITE}

    def meaning(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps) * (self.offset + weight)

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 4 * types[0].size}, weight_bytes=types[1].bytes, activation_bytes=2 * types[0].bytes)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*super().parameters(*types), self.eps, self.offset)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, d = parameters[:2]
        return (4 * rows * d, 4 * d, 4 * rows * d)


@body(RmsNorm)
def rms_norm_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, eps, offset = parameter(record, 1), parameter_f32(record, 2), parameter_f32(record, 3)
    for slot in range(slot_lo, slot_hi):
        weight = operand_f32(record, arenas, 1, slot, d)
        for row in range(part_lo, part_hi):
            x_at = address(record, arenas, 0, slot) + 4 * row * d
            x, y = view_f32(x_at, d), view_f32(address(record, arenas, 2, slot) + 4 * row * d, d)
            scale = _rsqrt_of_mean(sum_of_squares(x_at, d, F(0.0)), d, eps)
            for i in range(d):
                y[i] = x[i] * scale * (offset + weight[i])


@operator("group_norm", version=1)
class GroupNorm(Norm):
    """y = (x - mean_g) / sqrt(var_g + eps) * weight + bias, g being a channel's group. Wu & He 2018, eq. 1-6.

    x [c] or [t, c] f32, weight [c], bias [c]. Each frame has its own statistics, taken over the c / groups channels
    of a group and not over time: that is what a stream can compute, and what PyTorch's GroupNorm gives for [n, c]
    input. Models trained with statistics over time too are not this operator.
    """

    x = operand("... c")
    weight = operand("c")
    bias = operand("c")
    groups: int = attr()
    eps: float = attr(1e-5)
    semantic_parameters: ClassVar = {2: POSITIVE, 3: NOT_NEGATIVE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        if len(x.shape) > 2:
            raise GraphError("group_norm: operand 'x' has the wrong rank", wanted="[c] or [t, c]", found=x)
        if self.groups < 1 or dims["c"] % self.groups:
            raise GraphError("group_norm: groups", wanted=f"a divisor of {dims['c']} channels", found=self.groups)
        return (x,)

    def meaning(self, x: Array, weight: Array, bias: Array) -> Array:
        grouped = x.reshape(*x.shape[:-1], self.groups, -1)
        centred = grouped - grouped.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.eps)
        return scaled.reshape(x.shape) * weight + bias

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*super().parameters(*types), self.groups, self.eps)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        _, c, groups = parameters[:3]
        return first_broken(
            *common(cls, parameters, present, words=4),
            ("groups to divide the channels", c % max(groups, 1) == 0),
        )


@body(GroupNorm)
def group_norm_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    c, groups, eps = parameter(record, 1), parameter(record, 2), parameter_f32(record, 3)
    size = c // groups
    for slot in range(slot_lo, slot_hi):
        for group in range(part_lo * groups, part_hi * groups):
            x_at = address(record, arenas, 0, slot) + 4 * group * size
            first = 4 * (group % groups) * size
            weight = view_f32(address(record, arenas, 1, slot) + first, size)
            bias = view_f32(address(record, arenas, 2, slot) + first, size)
            x, y = view_f32(x_at, size), view_f32(address(record, arenas, 3, slot) + 4 * group * size, size)
            mean = mean_of(x_at, size)
            scale = _rsqrt_of_mean(sum_of_squares(x_at, size, mean), size, eps)
            for i in range(size):
                y[i] = (x[i] - mean) * scale * weight[i] + bias[i]
