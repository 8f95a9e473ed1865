"""Normalisations: statistics of a row in f32, then an affine map. Variances take two passes: the mean first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16, f32
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.legal import FINITE, NOT_NEGATIVE, POSITIVE, DTypes, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, parameter, parameter_f32, present
from wpk.ops.reduce import KeptRows, mean_of, sum_of_squares
from wpk.ops.scalars import bf16_bits, scalar
from wpk.ops.tiles import OUT_CODES, SQUARES_BLOCK, squares_of


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


@operator("rms_norm_terms", version=1)
class RmsNormTerms(Operator):
    """What a product needs of RMSNorm before it, and the residual stream: both halves of `rms_norm` that are cheap.

    x [d] f32, weight [d] f32, partials [q, d] f32 optional -> sum [d] f32 = x + partials[0] + partials[1] + ...,
    scaled [d] bf16 = sum * (offset + weight), squares [ceil(d / 128)] f32 = the sum of sum^2 over each 128 elements.
    `tiled_matmul` of `scaled` with `squares` is then the product of the norm, Zhang & Sennrich 2019, eq. 4.
    """

    x = operand("d", weight=False)
    weight = operand("d", weight=True)
    partials = operand("q d", weight=False, optional=True)
    offset: float = attr(0.0)
    result_count: ClassVar[int] = 3
    inplace: ClassVar = {0: 0}
    semantic_parameters: ClassVar = {2: FINITE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        d = dims["d"]
        return (f32(d), bf16(d), f32(squares_of(d)))

    def meaning(self, x: Array, weight: Array, partials: Array | None = None) -> tuple[Array, Array, Array]:
        total = x if partials is None else x + partials.sum(axis=0)
        squares = np.add.reduceat(total**2, np.arange(0, len(total), SQUARES_BLOCK))
        return total, rounded_to_bf16(total * (self.offset + weight)), squares

    def cost(self, *types: Type) -> Cost:
        read = sum(t.bytes for t in (types[0], *types[2:]))
        made = sum(t.bytes for t in self.infer(types))
        flops = 4 * types[0].size + sum(t.size for t in types[2:])
        return Cost({"f32": flops}, weight_bytes=types[1].bytes, activation_bytes=read + made)

    def parts(self, *types: Type) -> int:
        return squares_of(types[0].size)

    def places(self, count: int) -> tuple[int, ...]:
        return (*range(count), 3, 4, 5)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, types[2].shape[0] if len(types) > 2 else 0, self.offset)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        d, q = parameters[:2]
        return (4 * d, 4 * d, 4 * q * d, 4 * d, 2 * d, 4 * squares_of(d))

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        q, added = parameters[1], len(present) > 2 and present[2]
        return first_broken(
            *common(cls, parameters, present, words=3, sizes=1),
            ("as many partial sums as are counted", q >= 1 if added else q == 0),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (*[DType.F32] * 4, DType.BF16, DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        if operand == 5:
            return Extent(4 * lo, 4 * (hi - lo))
        return Extent.columns(parameters[0], SQUARES_BLOCK, lo, hi, width=2 if operand == 4 else 4)


@body(RmsNormTerms)
def rms_norm_terms_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, q, offset = parameter(record, 0), parameter(record, 1), parameter_f32(record, 2)
    for slot in range(slot_lo, slot_hi):
        for part in range(part_lo, part_hi):
            first = part * SQUARES_BLOCK
            count = min(SQUARES_BLOCK, d - first)
            x = view_f32(address(record, arenas, 0, slot) + 4 * first, count)
            weight = view_f32(address(record, arenas, 1, 0) + 4 * first, count)
            total = view_f32(address(record, arenas, 3, slot) + 4 * first, count)
            scaled = view_u16(address(record, arenas, 4, slot) + 2 * first, count)
            for i in range(count):
                total[i] = x[i]
            for k in range(q):
                partial = view_f32(address(record, arenas, 2, slot) + 4 * (k * d + first), count)
                for i in range(count):
                    total[i] += partial[i]
            for i in range(count):
                scaled[i] = bf16_bits(total[i] * (offset + weight[i]))
            squares = view_f32(address(record, arenas, 5, slot) + 4 * part, 1)
            squares[0] = sum_of_squares(address(record, arenas, 3, slot) + 4 * first, count, F(0.0))


@operator("gated_rms_norm", version=1)
class GatedRmsNorm(Operator):
    """y = v / sqrt(mean_g(v^2) + eps) * weight with v = x gate, g being an element's group. Dao & Gu 2024 (Mamba-2).

    x, gate, weight [d] f32; the mean is over the d / groups elements of a group. y [d] of dtype `out`, f32 or bf16.
    """

    x = operand("d", weight=False)
    gate = operand("d", weight=False)
    weight = operand("d", weight=True)
    groups: int = attr(1)
    eps: float = attr(1e-5)
    out: str = attr("f32")
    inplace: ClassVar = {0: 0}
    semantic_parameters: ClassVar = {2: NOT_NEGATIVE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.groups < 1 or dims["d"] % self.groups:
            raise GraphError("gated_rms_norm: groups", wanted=f"a divisor of {dims['d']}", found=self.groups)
        if self.out not in OUT_CODES:
            raise GraphError("gated_rms_norm: out", wanted=" | ".join(OUT_CODES), found=self.out)
        return (Type(DType(self.out), (dims["d"],)),)

    def meaning(self, x: Array, gate: Array, weight: Array) -> Array:
        gated = (x * gate).reshape(self.groups, -1)
        y = (gated / np.sqrt((gated**2).mean(axis=1, keepdims=True) + self.eps)).reshape(-1) * weight
        return rounded_to_bf16(y) if self.out == "bf16" else y

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        moved = types[0].bytes + types[1].bytes + y.bytes
        return Cost({"f32": 5 * y.size}, weight_bytes=types[2].bytes, activation_bytes=moved)

    def parts(self, *types: Type) -> int:
        return self.groups

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.groups, self.eps, OUT_CODES[self.out])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        d, out = parameters[0], parameters[3]
        return (4 * d, 4 * d, 4 * d, 2 * d if out else 4 * d)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        d, groups, _, out = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=4, sizes=2),
            ("groups to divide the elements", d % max(groups, 1) == 0),
            ("a code of a dtype", out in OUT_CODES.values()),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, DType.F32, DType.F32, DType.BF16 if parameters[3] else DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        d, groups, _, out = parameters[:4]
        size = (2 if out else 4) * (d // groups)
        return Extent(lo * size, (hi - lo) * size)


GATED_AT_ONCE = 64  # elements: what a GPU's thread has scratch for


@body(GatedRmsNorm)
def gated_rms_norm_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, groups, eps = parameter(record, 0), parameter(record, 1), parameter_f32(record, 2)
    rounds = parameter(record, 3) != 0
    size = d // groups
    for slot in range(slot_lo, slot_hi):
        for group in range(part_lo, part_hi):
            first = 4 * group * size
            x = view_f32(address(record, arenas, 0, slot) + first, size)
            gate = view_f32(address(record, arenas, 1, slot) + first, size)
            weight = view_f32(address(record, arenas, 2, 0) + first, size)
            total = F(0.0)
            for block in range(0, size, GATED_AT_ONCE):
                count = min(GATED_AT_ONCE, size - block)
                gated = view_f32(scratch, count)
                for i in range(count):
                    gated[i] = x[block + i] * gate[block + i]
                total += sum_of_squares(scratch, count, F(0.0))
            scale = _rsqrt_of_mean(total, size, eps)
            if rounds:
                rounded = view_u16(address(record, arenas, 3, slot) + first // 2, size)
                for i in range(size):
                    rounded[i] = bf16_bits(x[i] * gate[i] * scale * weight[i])
            else:
                y = view_f32(address(record, arenas, 3, slot) + first, size)
                for i in range(size):
                    y[i] = x[i] * gate[i] * scale * weight[i]
