"""Attention that knows how far back a row is: Transformer-XL, Dai et al. 2019, over the last rows of a stream.

The rows are kept where they were written: row n of the stream lies at n mod T (`remainder` and `cache_append` put it
there), so that a step moves one row and not all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32
from wpk.ops.legal import FINITE, common, first_broken
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter, parameter_f32
from wpk.ops.scalars import reciprocal
from wpk.ops.vector import dot

ROWS = 32  # rows whose scores are normalised together


@operator("sinusoids", version=1)
class Sinusoids(Operator):
    """What stands for the positions 0 .. rows - 1, a weight [rows, width]: sines and cosines in turn.

    [p, 2 i] = sin(p / base^(2 i / width)), [p, 2 i + 1] = the cosine. Vaswani et al. 2017, section 3.5.
    """

    rows: int = attr()
    width: int = attr()
    base: float = attr(10000.0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.rows < 1 or self.width < 2 or self.width % 2 or not self.base > 0.0:
            raise GraphError("sinusoids: sizes", wanted="rows >= 1, an even width >= 2, base > 0", found=self)
        return (f32(self.rows, self.width),)

    def meaning(self) -> Array:
        angles = np.outer(np.arange(self.rows), self.base ** (-np.arange(0, self.width, 2) / self.width))
        return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(self.rows, self.width)

    def cost(self, *types: Type) -> Cost:
        return Cost({})


@operator("relative_attention", version=1)
class RelativeAttention(Operator):
    """One query over the last rows of a stream: y[h] = sum_j softmax_j(scale (q[0] . k_j + q[1] . p_j)) v_j at head h.

    j is how many rows back: 0 is row `position`, the newest, and j ends at T - 1 or at the stream's first row. query
    [2, h, d] f32 (the content's and the position's: q + u and q + v of Dai et al. 2019, section 3.3), rows
    [T, 2, h, d] f32 (keys, then values; row n of the stream at n mod T), distances [T, h, d] f32 (p, a weight),
    position i32 scalar; those below 0 are taken for 0 -> [h, d]. The softmax is the online one (Milakov & Gimelshein
    2018), 32 rows at a time from the oldest on.
    """

    query = operand("2 h d", weight=False)
    rows = operand("t 2 h d", weight=False)
    distances = operand("t h d", weight=True)
    position = operand("", dtypes=DType.I32, weight=False)
    scale: float = attr()
    semantic_parameters: ClassVar = {3: FINITE}
    state_operands: ClassVar[tuple[int, ...]] = (1,)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (f32(dims["h"], dims["d"]),)

    def meaning(self, query: Array, rows: Array, distances: Array, position: Array) -> Array:
        newest = max(int(position), 0)
        back = np.arange(min(newest + 1, len(rows)))
        keys, values = rows[(newest - back) % len(rows)].transpose(1, 0, 2, 3)
        scores = np.einsum("hd,jhd->jh", query[0], keys) + np.einsum("hd,jhd->jh", query[1], distances[back])
        weights = np.exp(self.scale * scores - (self.scale * scores).max(0))
        return np.asarray(np.einsum("jh,jhd->hd", weights / weights.sum(0), values))

    def cost(self, *types: Type) -> Cost:
        query, rows, distances = types[:3]
        flops = 6 * distances.size
        activations = query.bytes + query.bytes // 2
        return Cost({"f32": flops}, weight_bytes=distances.bytes, state_bytes=rows.bytes, activation_bytes=activations)

    def parts(self, *types: Type) -> int:
        return types[0].shape[1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*types[2].shape, float(self.scale))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, h, d = parameters[:3]
        return (8 * h * d, 8 * t * h * d, 4 * t * h * d, 4, 4 * h * d)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=4))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        d = parameters[2]
        return Extent(4 * d * lo, 4 * d * (hi - lo))


@body(RelativeAttention)
def relative_attention_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    t, h, d, scale = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter_f32(record, 3)
    scores, distances = view_f32(scratch, ROWS), address(record, arenas, 2, 0)
    for slot in range(slot_lo, slot_hi):
        newest = max(np.int64(operand_i32(record, arenas, 3, slot, 1)[0]), np.int64(0))
        held = min(newest + 1, t)
        last = newest - newest // t * t  # where the newest row lies
        for head in range(part_lo, part_hi):
            content = address(record, arenas, 0, slot) + 4 * head * d
            rows = address(record, arenas, 1, slot) + 4 * head * d
            y = address(record, arenas, 4, slot) + 4 * head * d
            sums = view_f32(y, d)
            for i in range(d):
                sums[i] = np.float32(0.0)
            peak, total = np.float32(-3.4e38), np.float32(0.0)
            for first in range(0, held, ROWS):
                count = min(ROWS, held - first)
                before = peak
                for row in range(count):
                    back = held - 1 - first - row
                    at = last - back if back <= last else last - back + t
                    score = dot(content, rows + 8 * at * h * d, d)
                    score += dot(content + 4 * h * d, distances + 4 * (back * h + head) * d, d)
                    scores[row] = score * scale
                    peak = max(peak, scores[row])
                decay = math32.exp(before - peak)
                total *= decay
                for i in range(d):
                    sums[i] *= decay
                for row in range(count):
                    back = held - 1 - first - row
                    at = last - back if back <= last else last - back + t
                    weight, value = math32.exp(scores[row] - peak), view_f32(rows + 4 * (2 * at + 1) * h * d, d)
                    total += weight
                    for i in range(d):
                        sums[i] += weight * value[i]
            share = reciprocal(total)  # of 0, too: a division of Python's would stop there
            for i in range(d):
                sums[i] *= share
