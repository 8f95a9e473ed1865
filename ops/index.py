"""Rows by index. An index outside the table takes its nearest row: nothing outside an operand is ever read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import FLOATS, DType, Type
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter
from wpk.ops.scalars import bf16_value
from wpk.ops.shape import WORDS

COLUMNS = 64  # of a part of `embedding`


class Lookup(Operator):
    """Base. Parameters: rows of the table, words of a row, number of indices."""

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=3))

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({}, activation_bytes=2 * y.bytes)


@operator("gather", version=1)
class Gather(Lookup):
    """y[i] = x[indices[i]]: x [r, ...] f32, i32 or bool; indices [k] i32; y [k, ...]. Indices are clipped to 0..r-1."""

    x = operand("...", dtypes=WORDS)
    indices = operand("k", dtypes=DType.I32)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        if not x.shape:
            raise GraphError("gather: operand 'x' has the wrong rank", wanted="[r, ...]", found=x)
        return (Type(x.dtype, (dims["k"], *x.shape[1:])),)

    def meaning(self, x: Array, indices: Array) -> Array:
        return x[np.clip(indices.astype(np.int64), 0, len(x) - 1)]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        rows = types[0].shape[0]
        return (rows, types[0].size // rows, types[1].size)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, width, count = parameters[:3]
        return (4 * rows * width, 4 * count, 4 * count * width)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (*given[:2], given[0])


@body(Gather)
def gather_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    rows, width, count = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    for slot in range(slot_lo, slot_hi):
        x, indices = operand_i32(record, arenas, 0, slot, rows * width), operand_i32(record, arenas, 1, slot, count)
        y = operand_i32(record, arenas, 2, slot, count * width)
        for k in range(count):
            row = min(max(indices[k], 0), rows - 1)
            for i in range(width):
                y[k * width + i] = x[row * width + i]


@operator("embedding", version=1)
class Embedding(Lookup):
    """y = table[index]: index [] or [t] i32; table [v, d] f32 or bf16, a weight; y [d] or [t, d] f32.

    Indices are clipped to 0..v-1. Parts are columns; a fourth parameter is 1 where the table is bf16.
    """

    index = operand("...", dtypes=DType.I32)
    table = operand("v d", dtypes=FLOATS, weight=True)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        index = dims.like("index")
        if len(index.shape) > 1:
            raise GraphError("embedding: operand 'index' has the wrong rank", wanted="[] or [t]", found=index)
        return (Type(DType.F32, (*index.shape, dims["d"])),)

    def meaning(self, index: Array, table: Array) -> Array:
        return table[np.clip(np.asarray(index).astype(np.int64), 0, len(table) - 1)]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*types[1].shape, types[0].size, int(types[1].dtype is DType.BF16))

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({}, activation_bytes=y.bytes, gathered_bytes=y.size * types[1].dtype.bytes)

    def parts(self, *types: Type) -> int:
        return -(-types[1].shape[1] // COLUMNS)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, width, count, narrow = parameters[:4]
        return (4 * count, (2 if narrow else 4) * rows * width, 4 * count * width)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        narrow = ("a bf16 table or not", parameters[3] in (0, 1))
        return first_broken(*common(cls, parameters, present, words=4, sizes=3), narrow)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.I32, DType.BF16 if parameters[3] else DType.F32, DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        _, width, count = parameters[:3]
        return Extent.columns(width, COLUMNS, lo, hi, rows=count)


@body(Embedding)
def embedding_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    rows, width, count = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    narrow, table = parameter(record, 3) != 0, address(record, arenas, 1, 0)
    first = part_lo * COLUMNS
    columns = min(part_hi * COLUMNS, width) - first
    for slot in range(slot_lo, slot_hi):
        index = operand_i32(record, arenas, 0, slot, count)
        for k in range(count):
            row = np.int64(min(max(index[k], 0), rows - 1))
            y = view_f32(address(record, arenas, 2, slot) + 4 * (k * width + first), columns)
            if narrow:
                rounded = view_u16(table + 2 * (row * width + first), columns)
                for i in range(columns):
                    y[i] = bf16_value(rounded[i])
            else:
                same = view_f32(table + 4 * (row * width + first), columns)
                for i in range(columns):
                    y[i] = same[i]
