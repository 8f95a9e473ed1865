"""Reductions over the last axis, and softmax.

A sum goes through blocks of 512 elements: eight partial sums in f32, element i of a block going to partial i mod 8,
joined in one fixed tree; then over the blocks in order. The same order on every target and for every batch, a loop
of eight independent chains, and an error that hardly grows with the length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from wpk.ir.types import DType, Type, f32, i32
from wpk.ops import math32
from wpk.ops.legal import NOT_NEGATIVE, DTypes, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_i32
from wpk.ops.operator import LIBRARY, Array, Body, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, operand_i32, parameter, parameter_f32
from wpk.ops.scalars import Scalar, maximum, minimum, scalar
from wpk.ops.tiles import (
    TILE_SLOTS,
    check_eps,
    check_operands,
    check_squares,
    check_tiles,
    inverse_rms,
    part_rows,
    product64,
    product_cost,
    scale_rows,
    squares_of,
    tile_bytes,
    tile_rows,
    tile_rules,
)

BLOCK = 512  # elements


# --- what bodies do with a row, given by its address and length ---------------------------------------------------
def _lane_sum(term: Scalar) -> Scalar:
    """A function (address, n, shift) -> sum of term(x[i], shift) for i < n."""

    @scalar
    def lane_sum(address, n, shift):
        total = F(0.0)
        for block in range(0, n, BLOCK):
            stop = min(block + BLOCK, n)
            whole = stop - (stop - block) % 8
            s0, s1, s2, s3 = F(0.0), F(0.0), F(0.0), F(0.0)
            s4, s5, s6, s7 = F(0.0), F(0.0), F(0.0), F(0.0)
            for i in range(block, whole, 8):
                x = view_f32(address + 4 * i, 8)
                s0 += term(x[0], shift)
                s1 += term(x[1], shift)
                s2 += term(x[2], shift)
                s3 += term(x[3], shift)
                s4 += term(x[4], shift)
                s5 += term(x[5], shift)
                s6 += term(x[6], shift)
                s7 += term(x[7], shift)
            rest = F(0.0)
            for i in range(whole, stop):
                rest += term(view_f32(address + 4 * i, 1)[0], shift)
            total += (((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))) + rest
        return total

    return lane_sum


@scalar
def _itself(x, shift):
    return x


@scalar
def _squared_distance(x, shift):
    return (x - shift) * (x - shift)


sum_of = _lane_sum(_itself)
sum_of_squares = _lane_sum(_squared_distance)  # of x - shift


@scalar
def total_of(address, n):
    return sum_of(address, n, F(0.0))


@scalar
def mean_of(address, n):
    return sum_of(address, n, F(0.0)) / F(n)


@scalar
def max_of(address, n):
    x = view_f32(address, n)
    best = x[0]
    for i in range(1, n):
        best = maximum(best, x[i])
    return best


@scalar
def min_of(address, n):
    x = view_f32(address, n)
    best = x[0]
    for i in range(1, n):
        best = minimum(best, x[i])
    return best


@scalar
def quotient(a, b):
    return a / b


# --- reductions ---------------------------------------------------------------------------------------------------
class Rows(Operator):
    """Base: x [..., d] f32; parts are rows; parameters rows, d; one result a row."""

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (Type(self.result_dtype(), dims.like("x").shape[:-1]),)

    @classmethod
    def result_dtype(cls) -> DType:
        return DType.F32

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({"f32": types[0].size}, activation_bytes=types[0].bytes + y.bytes)

    def parts(self, *types: Type) -> int:
        return types[0].size // types[0].shape[-1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        d = types[0].shape[-1]
        return (types[0].size // d, d)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, d = parameters[:2]
        return (4 * rows * d, 4 * rows)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=2 + len(cls.semantic_parameters)))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (*given[:-1], cls.result_dtype())

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent(4 * lo, 4 * (hi - lo))


class KeptRows(Rows):
    """Base: the same with a result of the shape of x."""

    inplace: ClassVar = {0: 0}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (dims.like("x"),)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (4 * parameters[0] * parameters[1],) * 2

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent(4 * lo * parameters[1], 4 * (hi - lo) * parameters[1])


def reduce_body(function: Scalar) -> Callable[..., None]:
    def reduce_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        rows, d = parameter(record, 0), parameter(record, 1)
        for slot in range(slot_lo, slot_hi):
            x = address(record, arenas, 0, slot)
            y = operand_f32(record, arenas, 1, slot, rows)
            for row in range(part_lo, part_hi):
                y[row] = function(x + 4 * row * d, d)

    return reduce_body


# name, function of (address, n), meaning, what it is
REDUCTIONS: tuple[tuple[str, Scalar, Callable[..., Any], str], ...] = (
    ("sum", total_of, np.sum, "sum"),
    ("mean", mean_of, np.mean, "arithmetic mean"),
    ("max", max_of, np.max, "greatest element; NaN where one is"),
    ("min", min_of, np.min, "least element; NaN where one is"),
)


def _declare_reduction(name: str, function: Scalar, mean: Callable[..., Any], what: str) -> None:
    @operator(name, version=1)
    class Reduction(Rows):
        x = operand("... d")

        def meaning(self, x: Array) -> Array:
            return mean(x, axis=-1)

    Reduction.__doc__ = f"{what} over the last axis: x [..., d] f32; y [...]."
    LIBRARY.add_body(Reduction, Body(reduce_body(function), frozenset({"cpu"})))


for _row in REDUCTIONS:
    _declare_reduction(*_row)


@operator("argmax", version=1)
class ArgMax(Rows):
    """Index of the first greatest element of the last axis: x [..., d] f32; y [...] i32. A NaN is the greatest."""

    x = operand("... d")

    @classmethod
    def result_dtype(cls) -> DType:
        return DType.I32

    def meaning(self, x: Array) -> Array:
        return np.argmax(x, axis=-1)


@body(ArgMax)
def argmax_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    rows, d = parameter(record, 0), parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        y = operand_i32(record, arenas, 1, slot, rows)
        for row in range(part_lo, part_hi):
            x = view_f32(address(record, arenas, 0, slot) + 4 * row * d, d)
            best, place = x[0], 0
            for i in range(1, d):
                if x[i] > best or (x[i] != x[i] and best == best):
                    best, place = x[i], i
            y[row] = place


@operator("argmax_projection", version=1)
class ArgMaxProjection(Operator):
    """The greatest of the rows of W x, and which row it is, for each share of a packed W: `argmax` of a tiled product.

    x [k] bf16, tiles bf16 of W [n, k], squares f32 [ceil(k / 128)] optional, as of `tiled_matmul`; y [shares, 2] f32:
    the value, and the row's number as the bits of an i32. The first of equals is taken; a NaN never wins.
    """

    x = operand("k", dtypes=DType.BF16, weight=False)
    tiles = operand("t", dtypes=DType.BF16, weight=True)
    squares = operand("s", weight=False, optional=True)
    n: int = attr()
    k: int = attr()
    shares: int = attr(1)
    eps: float = attr(0.0)
    semantic_parameters: ClassVar = {4: NOT_NEGATIVE}
    task_slots: ClassVar[int] = TILE_SLOTS

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_tiles(self.name, self.n, self.k, self.shares)
        check_operands(self.name, dims, self.n, self.k)
        check_eps(self.name, self.eps)
        if "squares" in dims.types:
            check_squares(self.name, dims.like("squares"), self.k)
        return (f32(self.shares, 2),)

    def meaning(self, x: Array, tiles: Array, squares: Array | None = None) -> Array:
        y = product64(x, tiles, squares, self.n, self.k, self.shares, self.eps)
        y = np.where(np.isnan(y), -np.inf, y)
        found = np.empty((self.shares, 2))
        for share in range(self.shares):
            lo, hi = part_rows(self.n, self.shares, 0, share)
            place = lo + np.argmax(y[lo:hi])
            found[share] = y[place], place.astype(np.int32).view(np.float32)
        return found

    def cost(self, *types: Type) -> Cost:
        return product_cost(self.n, self.k, (types[0], *types[2:]), self.infer(types))

    def parts(self, *types: Type) -> int:
        return self.shares

    def places(self, count: int) -> tuple[int, ...]:
        return (*range(count), 3)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (self.n, self.k, self.shares, types[2].size if len(types) > 2 else 0, self.eps)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, k, shares, squares = parameters[:4]
        return (2 * k, tile_bytes(n, k), 4 * squares, 8 * shares)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        n, k, shares, squares = parameters[:4]
        scaled = len(present) > 2 and present[2]
        return first_broken(
            *common(cls, parameters, present, words=5, sizes=3),
            *tile_rules(n, k, shares, 0),
            ("sums of squares where they are counted", squares == (squares_of(k) if scaled else 0)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.BF16, DType.BF16, DType.F32, DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        return Extent(8 * lo, 8 * (hi - lo))


@body(ArgMaxProjection)
def argmax_projection_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, k, shares, squares = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    tiles, eps = address(record, arenas, 1, 0), parameter_f32(record, 4)
    for part in range(part_lo, part_hi):
        lo, hi = part_rows(n, shares, 0, part)
        for slot in range(slot_lo, slot_hi):
            tile_rows(tiles, n, k, shares, 0, part, address(record, arenas, 0, slot), scratch)
            if squares > 0:
                scale_rows(scratch, hi - lo, inverse_rms(address(record, arenas, 2, slot), squares, k, eps))
            values = view_f32(scratch, hi - lo)
            best, place = F(-np.inf), lo
            for i in range(hi - lo):
                if values[i] > best:
                    best, place = values[i], lo + i
            y = address(record, arenas, 3, slot) + 8 * part
            view_f32(y, 1)[0] = best
            view_i32(y + 4, 1)[0] = place


@operator("argmax_merge", version=1)
class ArgMaxMerge(Operator):
    """The row of the greatest of the candidates [r, 2] f32 that `argmax_projection` gives: i32. First of equals."""

    candidates = operand("r 2", weight=False)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (i32(),)

    def meaning(self, candidates: Array) -> Array:
        values = np.where(np.isnan(candidates[:, 0]), -np.inf, candidates[:, 0])
        return candidates[np.argmax(values), 1].astype(np.float32).view(np.int32)

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": types[0].shape[0]}, activation_bytes=types[0].bytes + 4)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].shape[0],)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (8 * parameters[0], 4)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=1))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, DType.I32)


@body(ArgMaxMerge)
def argmax_merge_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    count = parameter(record, 0)
    for slot in range(slot_lo, slot_hi):
        values = operand_f32(record, arenas, 0, slot, 2 * count)
        places = operand_i32(record, arenas, 0, slot, 2 * count)
        best, place = F(-np.inf), places[1]
        for r in range(count):
            if values[2 * r] > best:
                best, place = values[2 * r], places[2 * r + 1]
        operand_i32(record, arenas, 1, slot, 1)[0] = place


# --- softmax ------------------------------------------------------------------------------------------------------
@operator("softmax", version=1)
class Softmax(KeptRows):
    """e^(x - max) / sum e^(x - max) over the last axis: x [..., d] f32; y like x."""

    x = operand("... d")

    def meaning(self, x: Array) -> Array:
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)


@body(Softmax)
def softmax_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d = parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        for row in range(part_lo, part_hi):
            x_at, y_at = address(record, arenas, 0, slot) + 4 * row * d, address(record, arenas, 1, slot) + 4 * row * d
            x, y = view_f32(x_at, d), view_f32(y_at, d)
            top = max_of(x_at, d)
            for i in range(d):
                y[i] = math32.exp(x[i] - top)
            scale = quotient(F(1.0), total_of(y_at, d))
            for i in range(d):
                y[i] = y[i] * scale


@operator("log_softmax", version=1)
class LogSoftmax(KeptRows):
    """x - max - log sum e^(x - max) over the last axis: x [..., d] f32; y like x."""

    x = operand("... d")

    def meaning(self, x: Array) -> Array:
        shifted = x - x.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@scalar
def _exp_of_distance(x, shift):
    return math32.exp(x - shift)


sum_of_exp = _lane_sum(_exp_of_distance)  # of x - shift


@body(LogSoftmax)
def log_softmax_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d = parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        for row in range(part_lo, part_hi):
            x_at = address(record, arenas, 0, slot) + 4 * row * d
            x, y = view_f32(x_at, d), view_f32(address(record, arenas, 1, slot) + 4 * row * d, d)
            top = max_of(x_at, d)
            offset = math32.log(sum_of_exp(x_at, d, top))
            for i in range(d):
                y[i] = (x[i] - top) - offset
