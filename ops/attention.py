"""Attention of one query over a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numba import njit

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32
from wpk.ops.legal import FINITE, common, first_broken
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter, parameter_f32
from wpk.ops.vector import dot

SCRATCH = 65536  # bytes that a body is given
ATTENTION_ROWS = 32  # cache rows whose scores are normalised together
ATTENTION_HEADS = SCRATCH // 4 // (ATTENTION_ROWS + 2)  # query heads whose scores scratch has room for


@operator("attention", version=1)
class Attention(Operator):
    """One query over rows 0..position of a cache: y[h] = sum_t softmax_t(scale q[h] . k[t, g]) v[t, g].

    q [h, d], k [T, g, d], v [T, g, e] f32, position i32 scalar -> [h, e]; h is a multiple of g, and query head i reads
    head i // (h / g) (grouped-query attention, Ainslie et al. 2023; g = h is plain multi-head). Positions are
    clipped to [0, T). The softmax is the online one (Milakov & Gimelshein 2018), 32 rows at a time from row 0.
    """

    q = operand("h d", weight=False)
    k = operand("t g d", weight=False)
    v = operand("t g e", weight=False)
    position = operand("", dtypes=DType.I32)
    scale: float = attr()
    semantic_parameters: ClassVar = {5: FINITE}
    state_operands: ClassVar[tuple[int, ...]] = (1, 2)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["h"] % dims["g"]:
            raise GraphError("attention: query heads", wanted=f"a multiple of {dims['g']}", found=dims["h"])
        if dims["h"] > ATTENTION_HEADS:
            raise GraphError("attention: query heads", wanted=f"at most {ATTENTION_HEADS}", found=dims["h"])
        return (f32(dims["h"], dims["e"]),)

    def meaning(self, q: Array, k: Array, v: Array, position: Array) -> Array:
        rows = int(np.clip(position, 0, len(k) - 1)) + 1
        group = q.shape[0] // k.shape[1]
        keys, values = (np.repeat(cache[:rows], group, axis=1) for cache in (k, v))
        scores = np.einsum("hd,thd->th", q, keys) * self.scale
        weights = np.exp(scores - scores.max(0))
        return np.asarray(np.einsum("th,the->he", weights / weights.sum(0), values))

    def cost(self, *types: Type) -> Cost:
        q, k, v = types[:3]
        flops = 2 * k.shape[0] * q.shape[0] * (k.shape[2] + v.shape[2])
        activations = q.bytes + 4 * q.shape[0] * v.shape[2]
        return Cost({"f32": flops}, state_bytes=k.bytes + v.bytes, activation_bytes=activations)

    def parts(self, *types: Type) -> int:
        return types[1].shape[1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        (h, d), (t, g, _), e = types[0].shape, types[1].shape, types[2].shape[2]
        return (h, d, t, g, e, float(self.scale))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        h, d, t, g, e = parameters[:5]
        return (4 * h * d, 4 * t * g * d, 4 * t * g * e, 4, 4 * h * e)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        h, _, _, g = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=6),
            ("query heads that scratch has room for", h <= ATTENTION_HEADS),
            ("groups to divide the query heads", h % max(g, 1) == 0),
        )

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        h, _, _, g, e = parameters[:5]
        per_part = 4 * (h // g) * e
        return Extent(lo * per_part, (hi - lo) * per_part)


@body(Attention)
def attention_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    h, d, t = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    g, e, scale = parameter(record, 3), parameter(record, 4), parameter_f32(record, 5)
    group = h // g
    heads = (part_hi - part_lo) * group
    scores = view_f32(scratch, heads * ATTENTION_ROWS)
    peaks = view_f32(scratch + 4 * heads * ATTENTION_ROWS, heads)
    totals = view_f32(scratch + 4 * heads * (ATTENTION_ROWS + 1), heads)
    for slot in range(slot_lo, slot_hi):
        q, y = address(record, arenas, 0, slot), address(record, arenas, 4, slot) + 4 * part_lo * group * e
        k, v = address(record, arenas, 1, slot), address(record, arenas, 2, slot)
        rows = min(max(np.int64(operand_i32(record, arenas, 3, slot, 1)[0]), 0), t - 1) + 1
        for head in range(heads):
            peaks[head], totals[head] = np.float32(-3.4e38), np.float32(0.0)
        out = view_f32(y, heads * e)
        for j in range(heads * e):
            out[j] = np.float32(0.0)
        for first in range(0, rows, ATTENTION_ROWS):
            count = min(ATTENTION_ROWS, rows - first)
            for row in range(count):  # all heads at each row: the cache is read once, in order
                for part in range(part_lo, part_hi):
                    key = k + 4 * ((first + row) * g + part) * d
                    for head in range(part * group, (part + 1) * group):
                        at = (head - part_lo * group) * ATTENTION_ROWS + row
                        scores[at] = dot(q + 4 * head * d, key, d) * scale
            for head in range(heads):
                mine, peak = scores[head * ATTENTION_ROWS : head * ATTENTION_ROWS + count], peaks[head]
                for row in range(count):
                    peak = max(peak, mine[row])
                for row in range(count):
                    mine[row] = math32.exp(mine[row] - peak)
                decay = math32.exp(peaks[head] - peak)
                total = totals[head] * decay
                for row in range(count):
                    total += mine[row]
                peaks[head], totals[head] = peak, total
                _scale(y + 4 * head * e, e, decay)
            for row in range(count):
                for part in range(part_hi - part_lo):
                    value = view_f32(v + 4 * ((first + row) * g + part_lo + part) * e, e)
                    for head in range(part * group, (part + 1) * group):
                        weight, sums = scores[head * ATTENTION_ROWS + row], view_f32(y + 4 * head * e, e)
                        for j in range(e):
                            sums[j] += weight * value[j]
        for head in range(heads):
            _scale(y + 4 * head * e, e, np.float32(1.0) / totals[head])


@njit
def _scale(values, size, factor):
    """Multiply `size` float32 at a byte address."""
    out = view_f32(values, size)
    for i in range(size):
        out[i] *= factor
