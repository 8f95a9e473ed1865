"""What stands between logits and a choice."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import Type
from wpk.ops import math32
from wpk.ops.legal import Floats
from wpk.ops.math32 import INT, F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, attr, body, operand, operator
from wpk.ops.payload import address, parameter, parameter_f32
from wpk.ops.reduce import KeptRows, max_of
from wpk.ops.scalars import scalar

ORDERED_BITS = 32  # halvings that find one float32 among all


@operator("top_p", version=1)
class TopP(KeptRows):
    """Nucleus masking: the logits of the most probable entries, -infinity for the rest. Holtzman et al. 2020.

    x [..., d] f32; y like x. Entries in ascending order, equals by their place: those up to which the probabilities add
    up to 1 - p or less are dropped; the last one, the greatest, is always kept. (What Hugging Face's TopPLogitsWarper
    drops.) 0 < p <= 1.
    """

    x = operand("... d")
    p: float = attr()
    inplace: ClassVar = {}
    semantic_parameters: ClassVar = {2: Floats(0.0, 1.0)}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if not 0.0 < self.p <= 1.0:
            raise GraphError("top_p: p", wanted="0 < p <= 1", found=self.p)
        return (dims.like("x"),)

    def meaning(self, x: Array) -> Array:
        order = np.argsort(x, axis=-1, kind="stable")
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        mass = np.cumsum(np.take_along_axis(e, order, -1), axis=-1)
        dropped = mass <= (1.0 - self.p) * mass[..., -1:]
        dropped[..., -1] = False
        y = np.array(x)
        np.put_along_axis(y, order, np.where(dropped, -np.inf, np.take_along_axis(x, order, -1)), -1)
        return y

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": ORDERED_BITS * types[0].size}, activation_bytes=2 * types[0].bytes)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*super().parameters(*types), 1.0 - self.p)


@scalar
def ordered(x):
    """An int32 that orders as the float32 does; both zeros are one."""
    bits = math32.bits_of(x + F(0.0))
    return math32.select(bits < INT(0), INT(bits ^ INT(0x7FFFFFFF)), bits)


@scalar
def _mass_up_to(x_at, e_at, d, bound):
    """Sum of e over the entries of x whose order is at most `bound`. More entries never make it less: the terms are
    added in one order, and rounding is monotone."""
    x, e = view_f32(x_at, d), view_f32(e_at, d)
    total = np.float64(0.0)
    for i in range(d):
        if np.int64(ordered(x[i])) <= bound:
            total += np.float64(e[i])
    return total


@body(TopP)
def top_p_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, share = parameter(record, 1), np.float64(parameter_f32(record, 2))
    for slot in range(slot_lo, slot_hi):
        for row in range(part_lo, part_hi):
            x_at, y_at = address(record, arenas, 0, slot) + 4 * row * d, address(record, arenas, 1, slot) + 4 * row * d
            x, y = view_f32(x_at, d), view_f32(y_at, d)
            top = max_of(x_at, d)
            least, most = np.int64(ordered(x[0])), np.int64(ordered(x[0]))
            for i in range(d):
                y[i] = math32.exp(x[i] - top)  # y holds the masses until it holds the result
                least, most = min(least, np.int64(ordered(x[i]))), max(most, np.int64(ordered(x[i])))
            limit = share * _mass_up_to(x_at, y_at, d, most)
            # The least value up to which there is more than the limit; no sorting, so no bound on d.
            low, high = least - 1, most
            while high - low > 1:
                middle = (low + high) >> 1
                if _mass_up_to(x_at, y_at, d, middle) > limit:
                    high = middle
                else:
                    low = middle
            mass = _mass_up_to(x_at, y_at, d, high - 1)
            last, kept = 0, 0
            for i in range(d):
                order = np.int64(ordered(x[i]))
                stays = order > high
                if order == high:
                    mass += np.float64(y[i])
                    stays = mass > limit
                    last = i
                if stays:
                    kept += 1
                y[i] = x[i] if stays else F(-np.inf)
            if kept == 0:
                y[last] = x[last]
