"""Element-wise operators on what isn't a float, or need not be: integers, flags, choices and casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, boolean
from wpk.ops import math32, scalars
from wpk.ops.elementwise import CHUNK, WORDS, Elementwise, Unary
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.legal import ANY_I32, POSITIVE, DTypes, common, first_broken, moved
from wpk.ops.math32 import INT, F
from wpk.ops.memory import view_f32, view_i32, view_u16
from wpk.ops.operator import LIBRARY, Array, Body, Dims, Extent, attr, body, operand, operator
from wpk.ops.payload import address, parameter
from wpk.ops.scalars import Scalar


def unary_word_body(function: Scalar) -> Callable[..., None]:
    """y = function(x, parameter 1) over 32-bit words."""

    def unary_word_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        start, p = part_lo * CHUNK, parameter(record, 1)
        count = min(part_hi * CHUNK, parameter(record, 0)) - start
        for slot in range(slot_lo, slot_hi):
            x = view_i32(address(record, arenas, 0, slot) + 4 * start, count)
            y = view_i32(address(record, arenas, 1, slot) + 4 * start, count)
            for i in range(count):
                y[i] = function(x[i], p)

    return unary_word_body


@operator("increment", version=1)
class Increment(Unary):
    """x + by, i32; wraps."""

    x = operand("...", dtypes=DType.I32)
    by: int = attr(1)
    semantic_parameters: ClassVar = {1: ANY_I32}

    def meaning(self, x: Array) -> Array:
        return x + self.by

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.by)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0,))


@operator("remainder", version=1)
class Remainder(Unary):
    """x mod by, i32, from 0 to by - 1 whatever the sign of x: Python's and NumPy's remainder; by >= 1."""

    x = operand("...", dtypes=DType.I32)
    by: int = attr()
    semantic_parameters: ClassVar = {1: POSITIVE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.by not in POSITIVE:
            raise GraphError("remainder: by", wanted="1 to 2^31 - 1", found=self.by)
        return (dims.like("x"),)

    def meaning(self, x: Array) -> Array:
        return x % self.by

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.by)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0,))


@operator("logical_not", version=1)
class LogicalNot(Unary):
    """not x, bool."""

    x = operand("...", dtypes=DType.BOOL)

    def meaning(self, x: Array) -> Array:
        return np.logical_not(x)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0,))


for _words, _function in (
    (Increment, scalars.increment), (Remainder, scalars.remainder), (LogicalNot, scalars.logical_not)
):  # fmt: skip
    LIBRARY.add_body(_words, Body(unary_word_body(_function), frozenset({"cpu"})))


@operator("select", version=1)
class Select(Elementwise):
    """a where condition else b. condition bool, a scalar or of the shape of a; a and b of one type, f32, i32 or bool.

    The chosen bits are copied, whatever they mean: a NaN that is not chosen does no harm.
    """

    condition = operand("...", dtypes=DType.BOOL)
    a = operand("...", dtypes=WORDS | {DType.BOOL})
    b = operand("...", dtypes=WORDS | {DType.BOOL})
    inplace: ClassVar = {0: 1}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        condition, a, b = dims.like("condition"), dims.like("a"), dims.like("b")
        if a != b:
            raise GraphError("select: both choices of one type", wanted=a, found=b)
        if condition.shape not in ((), a.shape):
            raise GraphError("select: condition", wanted=f"{boolean()} or {boolean(*a.shape)}", found=condition)
        return (a,)

    def meaning(self, condition: Array, a: Array, b: Array) -> Array:
        return np.where(condition, a, b)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[1].size, types[0].size)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, conditions = parameters[:2]
        return (4 * conditions, 4 * n, 4 * n, 4 * n)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        n, conditions = parameters[:2]
        return first_broken(
            *common(cls, parameters, present, words=2),
            ("one condition, or one an element", conditions in (1, n)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (1, 2))


@body(Select)
def select_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    conditions = parameter(record, 1)
    start = part_lo * CHUNK
    count = min(part_hi * CHUNK, parameter(record, 0)) - start
    first = start if conditions > 1 else 0
    step = 1 if conditions > 1 else 0
    for slot in range(slot_lo, slot_hi):
        condition = view_i32(address(record, arenas, 0, slot) + 4 * first, count)
        a = view_i32(address(record, arenas, 1, slot) + 4 * start, count)
        b = view_i32(address(record, arenas, 2, slot) + 4 * start, count)
        y = view_i32(address(record, arenas, 3, slot) + 4 * start, count)
        for i in range(count):
            y[i] = math32.select(condition[i * step] != INT(0), a[i], b[i])


CAST_CODES = {"f32": 0, "bf16": 1, "i32": 2, "bool": 3}
_CAST_BYTES = (4, 2, 4, 4)


@operator("cast", version=1)
class Cast(Elementwise):
    """x in another dtype. To bf16: nearest even. Float to i32: toward zero, saturating, NaN is 0. To bool: x != 0."""

    x = operand("...", dtypes=frozenset(DType))
    dtype: str = attr()
    inplace: ClassVar = {}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.dtype not in CAST_CODES:
            raise GraphError("cast: dtype", wanted=" | ".join(CAST_CODES), found=self.dtype)
        return (Type(DType(self.dtype), dims.like("x").shape),)

    def meaning(self, x: Array) -> Array:
        if self.dtype == "bool":
            return x != 0
        if self.dtype == "i32":
            if x.dtype.kind != "f":
                return x.astype(np.int64)
            return np.clip(np.trunc(np.nan_to_num(x, nan=0.0)), -(2.0**31), 2.0**31 - 1).astype(np.int64)
        if self.dtype == "bf16":
            return rounded_to_bf16(x)
        return x.astype(np.float64)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, CAST_CODES[types[0].dtype.value], CAST_CODES[self.dtype])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, source, target = parameters[:3]
        return (n * _CAST_BYTES[source], n * _CAST_BYTES[target])

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        codes = set(parameters[1:3]) <= set(CAST_CODES.values())
        return first_broken(*common(cls, parameters, present, words=3, sizes=1), ("codes of dtypes", codes))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        names = {code: DType(name) for name, code in CAST_CODES.items()}
        return (names[parameters[1]], names[parameters[2]])

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent.columns(parameters[0], CHUNK, lo, hi, width=_CAST_BYTES[parameters[2]])


@body(Cast)
def cast_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, source, target = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    for slot in range(slot_lo, slot_hi):
        x, y = address(record, arenas, 0, slot), address(record, arenas, 1, slot)
        x_f32, x_u16, x_i32 = view_f32(x, n), view_u16(x, n), view_i32(x, n)
        y_f32, y_u16, y_i32 = view_f32(y, n), view_u16(y, n), view_i32(y, n)
        for i in range(part_lo * CHUNK, min(part_hi * CHUNK, n)):
            whole, real = INT(0), F(0.0)  # the value as an integer where the source is one, and as a float
            if source == 0:
                real = x_f32[i]
            elif source == 1:
                real = scalars.bf16_value(x_u16[i])
            else:
                whole = x_i32[i]
                real = F(whole)
            if target == 0:
                y_f32[i] = real
            elif target == 1:
                y_u16[i] = scalars.bf16_bits(real)
            elif target == 2:
                y_i32[i] = whole if source > 1 else scalars.to_int(real)
            else:
                y_i32[i] = INT(real != F(0.0))
