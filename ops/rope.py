"""Rotary position embedding: pairs of a head's numbers turned by an angle that grows with the position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type
from wpk.ops import math32
from wpk.ops.legal import ANY_I32, FINITE, Floats, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter, parameter_f32
from wpk.ops.scalars import scalar

TWO_PI = 6.283185307179586
ONE_TURN = 1.0 / TWO_PI
ROUND = 1.5 * 2.0**52  # adding it to a float64 leaves the nearest integer


@operator("rope", version=1)
class Rope(Operator):
    """Rotary position embedding, the two halves of a head being the pairs. Su et al. 2021, eq. 34.

    x [..., h, d] f32 with d even, position i32 scalar; y like x. With angles a_i = (position + offset) theta^(-2i / d)
    for i < d / 2: y_i = x_i cos a_i - x_(i + d/2) sin a_i, y_(i + d/2) = x_(i + d/2) cos a_i + x_i sin a_i ("rotate
    half", as GPT-NeoX and after it Llama and Gemma lay heads out). Angles are float64 until they are within a turn.
    """

    x = operand("... h d")
    position = operand("", dtypes=DType.I32)
    theta: float = attr(10000.0)
    offset: int = attr(0)
    inplace: ClassVar = {0: 0}
    semantic_parameters: ClassVar = {2: ANY_I32, 3: Floats(0.0, 1.0), 4: FINITE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["d"] % 2:
            raise GraphError("rope: numbers of a head", wanted="an even number", found=dims["d"])
        if not self.theta >= 1.0:
            raise GraphError("rope: theta", wanted=">= 1", found=self.theta)
        return (dims.like("x"),)

    def meaning(self, x: Array, position: Array) -> Array:
        half = x.shape[-1] // 2
        angles = (np.asarray(position, np.int64) + self.offset) * self.theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 3 * types[0].size}, activation_bytes=2 * types[0].bytes)

    def parts(self, *types: Type) -> int:
        return types[0].size // types[0].shape[-1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Heads, numbers of one, offset, and theta^(-2 / d) as a float32 and what that leaves."""
        d = types[0].shape[-1]
        ratio = self.theta ** (-2.0 / d)
        high = float(np.float32(ratio))
        return (types[0].size // d, d, self.offset, high, ratio - high)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        heads, d = parameters[:2]
        return (4 * heads * d, 4, 4 * heads * d)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        even = ("an even number of a head's numbers", parameters[1] % 2 == 0)
        return first_broken(*common(cls, parameters, present, words=5), even)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent(4 * lo * parameters[1], 4 * (hi - lo) * parameters[1])


@scalar
def _within_a_turn(angle):
    """A float64 angle less its whole turns, as float32 in [-pi, pi]."""
    turns = (angle * ONE_TURN + ROUND) - ROUND
    return F(angle - turns * TWO_PI)


@body(Rope)
def rope_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d, offset = parameter(record, 1), parameter(record, 2)
    ratio = np.float64(parameter_f32(record, 3)) + np.float64(parameter_f32(record, 4))
    half, heads = d // 2, part_hi - part_lo
    for slot in range(slot_lo, slot_hi):
        x = view_f32(address(record, arenas, 0, slot) + 4 * part_lo * d, heads * d)
        y = view_f32(address(record, arenas, 2, slot) + 4 * part_lo * d, heads * d)
        position = np.float64(np.int64(operand_i32(record, arenas, 1, slot, 1)[0]) + offset)
        frequency = np.float64(1.0)
        for i in range(half):
            angle = _within_a_turn(position * frequency)
            cosine, sine = math32.cos(angle), math32.sin(angle)
            for head in range(heads):
                a, b = x[head * d + i], x[head * d + half + i]
                y[head * d + i] = a * cosine - b * sine
                y[head * d + half + i] = b * cosine + a * sine
            frequency *= ratio
