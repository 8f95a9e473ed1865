"""One query over a bf16 cache of keys and values, its rows in several parts.

`kv_attention` becomes `attention_parts`, which reads ranges of rows apart from each other, and `attention_merge`: the
split softmax of Flash-Decoding (Dao et al. 2023), exact because partial sums carry their own maximum and total.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numba.extending import register_jitable

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32, scalars
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.kv import whole_heads
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter
from wpk.ops.vector import dot

UNIT = 8  # cache rows: ranges of `attention_parts` start at multiples of it, and are normalised so many at a time
SCRATCH = 65536  # bytes that a body is given
EMPTY = -1e30  # the maximum of no scores
OUT = {"f32": 0, "bf16": 1}
_OUT_DTYPES = (DType.F32, DType.BF16)


@operator("kv_attention", version=1)
class KvAttention(Operator):
    """One query over rows 0..position of a cache: y[h] = sum_t softmax_t(q[h] . k[t, g]) v[t, g].

    q bf16[H d], the scale of the scores in it; cache bf16[T, 2, G, d], keys then values; position i32 scalar, clipped
    to [0, T). Query head h reads key head h // (H / G) (grouped-query attention, Ainslie et al. 2023). Result [H d] of
    dtype `out`. splits: ranges of rows that are read apart, 0 leaves it to the expansion; a GPU's suit its blocks.
    """

    q = operand("q", dtypes=DType.BF16, weight=False)
    cache = operand("t 2 g d", dtypes=DType.BF16, weight=False)
    position = operand("", dtypes=DType.I32)
    heads: int = attr()
    out: str = attr("f32")
    splits: int = attr(0)
    state_operands: ClassVar[tuple[int, ...]] = (1,)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_heads(self.name, self.heads, dims)
        if self.splits < 0:
            raise GraphError(f"{self.name}: splits", wanted=">= 0", found=self.splits)
        return (Type(_out_dtype(self.name, self.out), (dims["q"],)),)

    def meaning(self, q: Array, cache: Array, position: Array) -> Array:
        rows = int(np.clip(position, 0, len(cache) - 1)) + 1
        queries, keys, values = _by_head(q, cache, self.heads)
        y = _merge64(_part64(queries, keys[:rows], values[:rows])[None])
        return rounded_to_bf16(y) if self.out == "bf16" else y

    def cost(self, *types: Type) -> Cost:
        q, cache, _ = types
        (y,) = self.infer(types)
        return Cost(_attention_flops(q, cache), state_bytes=cache.bytes, activation_bytes=q.bytes + y.bytes)

    def expand(self, g: GraphBuilder, q: Value, cache: Value, position: Value) -> Value:
        splits = self.splits or min(8, -(-cache.type.shape[0] // 256))
        parts = g.op("attention_parts", q, cache, position, heads=self.heads, splits=splits)
        return g.op("attention_merge", parts, out=self.out)


@operator("attention_parts", version=1)
class AttentionParts(Operator):
    """Ranges of rows of `kv_attention`, each by itself -> f32[splits, H, d + 2].

    Of len = clip(position, 0, T - 1) + 1 rows in U = ceil(len / 8) units, range s has rows
    [8 (U s // P), min(len, 8 (U (s + 1) // P))). A head's d + 2 values: sum of exp(score - m) v, then m, the largest
    score, and the sum of exp(score - m). Of no rows: zeros, -1e30, 0.
    """

    q = operand("q", dtypes=DType.BF16, weight=False)
    cache = operand("t 2 g d", dtypes=DType.BF16, weight=False)
    position = operand("", dtypes=DType.I32)
    heads: int = attr()
    splits: int = attr()
    state_operands: ClassVar[tuple[int, ...]] = (1,)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_heads(self.name, self.heads, dims)
        if self.splits < 1:
            raise GraphError(f"{self.name}: splits", wanted=">= 1", found=self.splits)
        return (f32(self.splits, self.heads, dims["d"] + 2),)

    def meaning(self, q: Array, cache: Array, position: Array) -> Array:
        rows = int(np.clip(position, 0, len(cache) - 1)) + 1
        units = -(-rows // UNIT)
        ends = [min(rows, UNIT * (units * s // self.splits)) for s in range(self.splits + 1)]
        queries, keys, values = _by_head(q, cache, self.heads)
        return np.stack([_part64(queries, keys[lo:hi], values[lo:hi]) for lo, hi in pairwise(ends)])

    def cost(self, *types: Type) -> Cost:
        q, cache, _ = types
        (parts,) = self.infer(types)
        return Cost(_attention_flops(q, cache), state_bytes=cache.bytes, activation_bytes=q.bytes + parts.bytes)

    def parts(self, *types: Type) -> int:
        return self.splits

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        rows, _, groups, width = types[1].shape
        return (self.heads, groups, width, rows, self.splits)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        heads, groups, width, rows, splits = parameters[:5]
        return (2 * heads * width, 2 * rows * 2 * groups * width, 4, 4 * splits * heads * (width + 2))

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        heads, groups, width = parameters[:3]
        return first_broken(
            *common(cls, parameters, present, words=5),
            whole_heads(heads, groups),
            ("query heads a key head that scratch has room for", _scratch(heads, groups, width) <= SCRATCH),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.BF16, DType.BF16, DType.I32, DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        part = 4 * parameters[0] * (parameters[2] + 2)
        return Extent(part * lo, part * (hi - lo))


@body(AttentionParts)
def attention_parts_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    heads, groups, width = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    rows, splits = parameter(record, 3), parameter(record, 4)
    group, row_bytes = heads // groups, 4 * groups * width
    pitch = 4 * (width + 2)
    queries = scratch  # [group, width] f32; a row of keys or values; results [group, width + 2]; scores [group, UNIT]
    line = queries + 4 * group * width
    sums = line + 4 * width
    scores = view_f32(sums + group * pitch, group * UNIT)
    for slot in range(slot_lo, slot_hi):
        q, cache = address(record, arenas, 0, slot), address(record, arenas, 1, slot)
        length = min(max(np.int64(operand_i32(record, arenas, 2, slot, 1)[0]), 0), rows - 1) + 1
        units = (length + UNIT - 1) // UNIT
        for part in range(part_lo, part_hi):
            lo, hi = UNIT * (units * part // splits), min(length, UNIT * (units * (part + 1) // splits))
            out = address(record, arenas, 3, slot) + part * heads * pitch
            for kv_head in range(groups):
                first_head = kv_head * group
                widen(q + 2 * first_head * width, queries, group * width)
                for head in range(group):
                    clear(sums + head * pitch, width)
                keys = cache + 2 * kv_head * width
                values = keys + 2 * groups * width
                for first in range(lo, hi, UNIT):
                    count = min(UNIT, hi - first)
                    for row in range(count):  # all heads at each row: a key is read once
                        widen(keys + (first + row) * row_bytes, line, width)
                        for head in range(group):
                            scores[head * UNIT + row] = dot(queries + 4 * head * width, line, width)
                    for head in range(group):
                        weigh(sums + head * pitch, width, scores[head * UNIT : head * UNIT + count])
                    for row in range(count):
                        widen(values + (first + row) * row_bytes, line, width)
                        for head in range(group):
                            accumulate(sums + head * pitch, line, width, scores[head * UNIT + row])
                found = view_f32(sums, group * (width + 2))
                results = view_f32(out + first_head * pitch, group * (width + 2))
                for i in range(group * (width + 2)):
                    results[i] = found[i]


@register_jitable
def widen(source, target, size):
    """bf16 at one byte address as f32 at another."""
    bits, out = view_u16(source, size), view_f32(target, size)
    for i in range(size):
        out[i] = scalars.bf16_value(bits[i])


@register_jitable
def clear(sums, width):
    """What a head has before its first row: zeros, the maximum of no scores, zero."""
    values = view_f32(sums, width + 2)
    for i in range(width):
        values[i] = F(0.0)
    values[width], values[width + 1] = F(EMPTY), F(0.0)


@register_jitable
def weigh(sums, width, scores):
    """Turn scores into exp(score - m), m the largest so far, and bring what a head has summed up to that m."""
    values = view_f32(sums, width + 2)
    peak = values[width]
    for row in range(len(scores)):
        peak = max(peak, scores[row])
    decay = math32.exp(values[width] - peak)
    total = values[width + 1] * decay
    for row in range(len(scores)):
        scores[row] = math32.exp(scores[row] - peak)
        total += scores[row]
    values[width], values[width + 1] = peak, total
    for i in range(width):
        values[i] *= decay


@register_jitable
def accumulate(sums, line, width, weight):
    """Add a row of values, times its weight."""
    values, row = view_f32(sums, width), view_f32(line, width)
    for i in range(width):
        values[i] += weight * row[i]


@operator("attention_merge", version=1)
class AttentionMerge(Operator):
    """The ranges of `attention_parts`, f32[splits, H, d + 2], as one: [H d] of dtype `out`.

    y[h] = sum_s exp(m_s - m) v_s / sum_s exp(m_s - m) l_s with m the largest m_s.
    """

    partials = operand("p h e", weight=False)
    out: str = attr("f32")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["e"] < 3:
            raise GraphError(f"{self.name}: values of a head", wanted=">= 3", found=dims["e"])
        return (Type(_out_dtype(self.name, self.out), (dims["h"] * (dims["e"] - 2),)),)

    def meaning(self, partials: Array) -> Array:
        y = _merge64(partials)
        return rounded_to_bf16(y) if self.out == "bf16" else y

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({"f32": 2 * types[0].size}, activation_bytes=types[0].bytes + y.bytes)

    def parts(self, *types: Type) -> int:
        return types[0].shape[1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        splits, heads, width = types[0].shape
        return (heads, width - 2, splits, OUT[self.out])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        heads, width, splits, out = parameters[:4]
        return (4 * splits * heads * (width + 2), _OUT_DTYPES[out].bytes * heads * width)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(
            *common(cls, parameters, present, words=4, sizes=3), ("a dtype of the result", parameters[3] in (0, 1))
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, _OUT_DTYPES[parameters[3]])

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        head = _OUT_DTYPES[parameters[3]].bytes * parameters[1]
        return Extent(head * lo, head * (hi - lo))


@body(AttentionMerge)
def attention_merge_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    heads, width, splits, out = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    pitch = heads * (width + 2)
    for slot in range(slot_lo, slot_hi):
        parts = view_f32(address(record, arenas, 0, slot), splits * pitch)
        y = address(record, arenas, 1, slot)
        y_f32, y_u16 = view_f32(y, heads * width), view_u16(y, heads * width)
        for head in range(part_lo, part_hi):
            first = head * (width + 2)
            peak = F(EMPTY)
            for s in range(splits):
                peak = max(peak, parts[s * pitch + first + width])
            total = F(0.0)
            for s in range(splits):
                place = s * pitch + first + width
                total += math32.exp(parts[place] - peak) * parts[place + 1]
            for i in range(width):
                value = F(0.0)
                for s in range(splits):
                    place = s * pitch + first
                    value += math32.exp(parts[place + width] - peak) * parts[place + i]
                value = scalars.div(value, total)
                if out == 0:
                    y_f32[head * width + i] = value
                else:
                    y_u16[head * width + i] = scalars.bf16_bits(value)


def _check_heads(name: str, heads: int, dims: Dims) -> None:
    groups, width = dims["g"], dims["d"]
    if heads < 1 or heads % groups or dims["q"] != heads * width:
        wanted = f"a multiple of {groups}, so that q has {width} values a head"
        raise GraphError(f"{name}: {heads} query heads", wanted=wanted, found=dims["q"])
    if _scratch(heads, groups, width) > SCRATCH:
        room = (SCRATCH // 4 - width) // (2 * width + 2 + UNIT)
        raise GraphError(f"{name}: query heads a key head", wanted=f"at most {room}", found=heads // groups)


def _scratch(heads: int, groups: int, width: int) -> int:
    """Bytes of scratch of `attention_parts`: of a key head the queries, results and scores; a row of the cache."""
    group = heads // max(groups, 1)
    return 4 * (width + group * (2 * width + 2 + UNIT))


def _out_dtype(name: str, out: str) -> DType:
    if out not in OUT:
        raise GraphError(f"{name}: dtype of the result", wanted=" | ".join(OUT), found=out)
    return _OUT_DTYPES[OUT[out]]


def _attention_flops(q: Type, cache: Type) -> dict[str, int]:
    return {"bf16": 4 * cache.shape[0] * q.size}


def _by_head(q: Array, cache: Array, heads: int) -> tuple[Array, Array, Array]:
    """Queries [H, d], keys and values [T, H, d]."""
    repeated = np.repeat(cache, heads // cache.shape[2], axis=2)
    return q.reshape(heads, -1), repeated[:, 0], repeated[:, 1]


def _part64(queries: Array, keys: Array, values: Array) -> Array:
    """[H, d + 2]: sums of these rows, their largest scores and totals."""
    heads, width = queries.shape
    if not len(keys):
        return np.concatenate([np.zeros((heads, width)), np.tile([EMPTY, 0.0], (heads, 1))], axis=1)
    scores = np.einsum("hd,thd->th", queries, keys)
    peak = scores.max(0)
    weights = np.exp(scores - peak)
    sums = np.einsum("th,thd->hd", weights, values)
    return np.concatenate([sums, peak[:, None], weights.sum(0)[:, None]], axis=1)


def _merge64(parts: Array) -> Array:
    """[H d] out of [splits, H, d + 2]."""
    sums, peaks, totals = parts[:, :, :-2], parts[:, :, -2], parts[:, :, -1]
    weights = np.exp(peaks - np.maximum(peaks.max(0), EMPTY))
    return np.asarray((weights[:, :, None] * sums).sum(0) / (weights * totals).sum(0)[:, None]).reshape(-1)
