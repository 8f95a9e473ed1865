"""Rows into a bf16 cache of keys and values, over which `kv_attention` attends.

A projection makes rows q | k | v. `qkv_split` scales and rounds the query and writes keys and values at the session's
position; `qkv_projection` is the same with the product in front of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numba.extending import register_jitable

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16
from wpk.ops import scalars
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.legal import FINITE, NOT_NEGATIVE, DTypes, common, first_broken
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter, parameter_f32
from wpk.ops.tiles import (
    TILE_SLOTS,
    check_product,
    inverse_rms,
    part_rows,
    parts_rows,
    product64,
    product_cost,
    scale_rows,
    squares_of,
    tile_bytes,
    tile_rows,
    tile_rules,
)

BLOCK = 8  # rows of the projection that a part of `qkv_split` has


# --- sizes --------------------------------------------------------------------------------------------------------
def qkv_sizes(name: str, n: int, cache: Type) -> tuple[int, int, int, int]:
    """Query heads, key heads, values of a head and rows of the cache (H, G, d, T) of a projection of n rows."""
    if len(cache.shape) != 4 or cache.shape[1] != 2:
        raise GraphError(f"{name}: cache", wanted="bf16[rows,2,heads,values]", found=cache)
    rows, _, groups, width = cache.shape
    heads, left = divmod(n - 2 * groups * width, width)
    sound = (whole_heads(heads, groups), blocks_of_rows(heads, groups, width))
    if left or heads < 1 or first_broken(*sound):
        wanted = f"(heads + 2 * {groups}) * {width}, heads a multiple of {groups}, {groups} * {width} one of {BLOCK}"
        raise GraphError(f"{name}: rows of q | k | v", wanted=wanted, found=n)
    return heads, groups, width, rows


def qkv_writes(sizes: Sequence[int], cache: bool, lo: int, hi: int) -> Extent | tuple[()]:
    """Bytes of the query, or of the cache, that rows [lo, hi) of the projection may write."""
    heads, groups, width, rows = sizes
    query, row = heads * width, 2 * groups * width
    if not cache:
        return Extent(2 * lo, 2 * (min(hi, query) - lo)) if lo < query else ()
    first, last = max(0, lo - query), hi - query  # in which row of the cache, the position says
    return Extent(2 * first, 2 * (last - first), rows, 2 * row) if first < last else ()


def whole_heads(heads: int, groups: int) -> tuple[str, bool]:
    """The rule that every key head has as many query heads."""
    return "key heads to divide the query heads", heads % max(groups, 1) == 0


def blocks_of_rows(heads: int, groups: int, width: int) -> tuple[str, bool]:
    """The rule that q, k and v are whole blocks of rows: what finishes a block of a product knows one of the three."""
    return f"rows of q, k and v that are multiples of {BLOCK}", heads * width % BLOCK == groups * width % BLOCK == 0


def qkv64(p: Array, cache: Array, position: Array, scale: float) -> tuple[Array, Array]:
    """The meaning of `qkv_split`: (q, the cache after the step)."""
    row = cache[0].size
    following = np.array(cache)
    if 0 <= position < len(cache):
        following[int(position)] = rounded_to_bf16(p[p.size - row :]).reshape(cache.shape[1:])
    return rounded_to_bf16(p[: p.size - row] * scale), following


# --- what the bodies share ----------------------------------------------------------------------------------------
@register_jitable
def qkv_rows(p, lo, hi, query, row, scale, q, cache, position, rows):
    """What rows [lo, hi) of a projection become. Byte addresses: p of row lo, f32; q and cache whole, bf16.

    query: values of q; row: values of a row of the cache, of which there are `rows`.
    """
    values, scaled = view_f32(p, hi - lo), view_u16(q, query)
    for i in range(lo, min(hi, query)):
        scaled[i] = scalars.bf16_bits(values[i - lo] * scale)
    if 0 <= position < rows:
        place = view_u16(cache + 2 * position * row, row)
        for i in range(max(lo, query), hi):
            place[i - query] = scalars.bf16_bits(values[i - lo])


# --- rows into the cache ------------------------------------------------------------------------------------------
@operator("qkv_split", version=1)
class QkvSplit(Operator):
    """The query and the cache with one row more, out of a projection: (q bf16[H d], the cache, in place).

    p f32[(H + 2 G) d], rows q [H, d] | k [G, d] | v [G, d], each a multiple of 8. cache bf16[T, 2, G, d]: keys, then
    values, of each position. position i32 scalar: k and v become that row; outside [0, T) nothing is written.
    q = bf16(scale * p): the scale of the scores is in the query already.
    """

    p = operand("n", weight=False)
    cache = operand("...", dtypes=DType.BF16, weight=False)
    position = operand("", dtypes=DType.I32)
    scale: float = attr(1.0)
    semantic_parameters: ClassVar = {4: FINITE}
    result_count: ClassVar[int] = 2
    fused: ClassVar[str | None] = "qkv_projection"
    state_operands: ClassVar[tuple[int, ...]] = (1,)
    alias: ClassVar[Mapping[int, int]] = {1: 1}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        heads, _, width, _ = qkv_sizes(self.name, dims["n"], dims.like("cache"))
        return (bf16(heads * width), dims.like("cache"))

    def meaning(self, p: Array, cache: Array, position: Array) -> tuple[Array, Array]:
        return qkv64(p, cache, position, self.scale)

    def cost(self, *types: Type) -> Cost:
        p, cache, position = types
        row = cache.bytes // cache.shape[0]
        q, _ = self.infer(types)
        activations = p.bytes + q.bytes + position.bytes
        return Cost({"f32": q.size}, state_bytes=row, activation_bytes=activations)

    def parts(self, *types: Type) -> int:
        return types[0].size // BLOCK

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*qkv_sizes(self.name, types[0].size, types[1]), float(self.scale))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        heads, groups, width, rows = parameters[:4]
        cache = 2 * rows * 2 * groups * width
        return (4 * (heads + 2 * groups) * width, cache, 4, 2 * heads * width, cache)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        heads, groups, width = parameters[:3]
        return first_broken(
            *common(cls, parameters, present, words=5),
            whole_heads(heads, groups),
            blocks_of_rows(heads, groups, width),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, DType.BF16, DType.I32, DType.BF16, DType.BF16)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | tuple[()]:
        return qkv_writes(parameters[:4], operand == 4, BLOCK * lo, BLOCK * hi)


@body(QkvSplit)
def qkv_split_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    heads, groups, width = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    rows, scale = parameter(record, 3), parameter_f32(record, 4)
    query, row = heads * width, 2 * groups * width
    lo, hi = part_lo * BLOCK, part_hi * BLOCK
    for slot in range(slot_lo, slot_hi):
        p, q = address(record, arenas, 0, slot) + 4 * lo, address(record, arenas, 3, slot)
        cache = address(record, arenas, 4, slot)
        position = np.int64(operand_i32(record, arenas, 2, slot, 1)[0])
        qkv_rows(p, lo, hi, query, row, scale, q, cache, position, rows)


@operator("qkv_projection", version=1)
class QkvProjection(Operator):
    """`qkv_split` of a product with tiles: (q bf16[H d], the cache, in place).

    x [k] bf16, tiles bf16 of W [n, k] by `pack_tiles` with the same shares, n = (H + 2 G) d, squares f32
    [ceil(k / 128)], of which p = W x / sqrt(sum(squares) / k + eps); cache and position as those of `qkv_split`.
    """

    x = operand("k", dtypes=DType.BF16, weight=False)
    tiles = operand("t", dtypes=DType.BF16, weight=True)
    squares = operand("s", weight=False)
    cache = operand("...", dtypes=DType.BF16, weight=False)
    position = operand("", dtypes=DType.I32)
    n: int = attr()
    k: int = attr()
    shares: int = attr(1)
    eps: float = attr(0.0)
    scale: float = attr(1.0)
    semantic_parameters: ClassVar = {7: NOT_NEGATIVE, 8: FINITE}
    task_slots: ClassVar[int] = TILE_SLOTS
    result_count: ClassVar[int] = 2
    state_operands: ClassVar[tuple[int, ...]] = (3,)
    alias: ClassVar[Mapping[int, int]] = {1: 3}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_product(self.name, dims, self.n, self.k, self.shares, self.eps)
        heads, _, width, _ = qkv_sizes(self.name, self.n, dims.like("cache"))
        return (bf16(heads * width), dims.like("cache"))

    def meaning(
        self, x: Array, tiles: Array, squares: Array, cache: Array, position: Array
    ) -> tuple[Array, Array]:  # fmt: skip
        p = product64(x, tiles, squares, self.n, self.k, self.shares, self.eps)
        return qkv64(p, cache, position, self.scale)

    def cost(self, *types: Type) -> Cost:
        x, _, squares, cache, position = types
        q, _ = self.infer(types)
        product = product_cost(self.n, self.k, (x, squares, position), (q,))
        flops = {**product.flops, "f32": q.size}
        return dataclasses.replace(product, flops=flops, state_bytes=cache.bytes // cache.shape[0])

    def parts(self, *types: Type) -> int:
        return self.shares

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        sizes = qkv_sizes(self.name, self.n, types[3])
        return (self.k, self.shares, *sizes, squares_of(self.k), float(self.eps), float(self.scale))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        k, _, heads, groups, width, rows, squares = parameters[:7]
        cache = 2 * rows * 2 * groups * width
        tiles = tile_bytes((heads + 2 * groups) * width, k)
        return (2 * k, tiles, 4 * squares, cache, 4, 2 * heads * width, cache)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        k, shares, heads, groups, width, _, squares = parameters[:7]
        return first_broken(
            *common(cls, parameters, present, words=9),
            *tile_rules((heads + 2 * groups) * width, k, shares, 0),
            whole_heads(heads, groups),
            blocks_of_rows(heads, groups, width),
            ("the sums of squares of k elements", squares == squares_of(k)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.BF16, DType.BF16, DType.F32, DType.BF16, DType.I32, DType.BF16, DType.BF16)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | tuple[()]:
        _, shares, heads, groups, width = parameters[:5]
        n = (heads + 2 * groups) * width
        first, last = parts_rows(n, shares, 0, lo, hi)
        return qkv_writes(parameters[2:6], operand == 6, first, last)


@body(QkvProjection)
def qkv_projection_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    k, shares = parameter(record, 0), parameter(record, 1)
    heads, groups, width = parameter(record, 2), parameter(record, 3), parameter(record, 4)
    rows, squares = parameter(record, 5), parameter(record, 6)
    eps, scale = parameter_f32(record, 7), parameter_f32(record, 8)
    query, row = heads * width, 2 * groups * width
    n, tiles = query + row, address(record, arenas, 1, 0)
    for part in range(part_lo, part_hi):
        lo, hi = part_rows(n, shares, 0, part)
        for slot in range(slot_lo, slot_hi):
            tile_rows(tiles, n, k, shares, 0, part, address(record, arenas, 0, slot), scratch)
            scale_rows(scratch, hi - lo, inverse_rms(address(record, arenas, 2, slot), squares, k, eps))
            q, cache = address(record, arenas, 5, slot), address(record, arenas, 6, slot)
            position = np.int64(operand_i32(record, arenas, 4, slot, 1)[0])
            qkv_rows(scratch, lo, hi, query, row, scale, q, cache, position, rows)
