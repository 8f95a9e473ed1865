"""Tables that a session's own indices choose from: sums of rows, whole matrices, and residual vector quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32, i32
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter
from wpk.ops.vector import dot

COLUMNS = 64  # of a part of `embedding_sum`
ROWS = 16  # of a part of `selected_linear`


@operator("embedding_sum", version=1)
class EmbeddingSum(Operator):
    """y = sum over j of table[first + j, index[j]], j = 0, 1, ...: index [k] i32, table [m, v, d] f32; y [d].

    An index outside 0..v-1 adds nothing: the mask of what is not known yet. One row of each of k books is what a
    residual quantiser's codes stand for (see `residual_quantise`).
    """

    index = operand("k", dtypes=DType.I32)
    table = operand("m v d", weight=True)
    first: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_books(self.name, self.first, dims["k"], dims["m"])
        return (f32(dims["d"]),)

    def meaning(self, index: Array, table: Array) -> Array:
        total = np.zeros(table.shape[2])
        for j, i in enumerate(np.asarray(index, np.int64).tolist()):
            if 0 <= i < table.shape[1]:
                total += table[self.first + j, i]
        return total

    def cost(self, *types: Type) -> Cost:
        moved = types[0].size * types[1].shape[2]
        (y,) = self.infer(types)
        return Cost({"f32": moved}, activation_bytes=types[0].bytes + y.bytes, gathered_bytes=4 * moved)

    def parts(self, *types: Type) -> int:
        return -(-types[1].shape[2] // COLUMNS)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Books, rows of one, numbers of a row, indices, first book."""
        return (*types[1].shape, types[0].size, self.first)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        m, v, d, k = parameters[:4]
        return (4 * k, 4 * m * v * d, 4 * d)

    semantic_parameters: ClassVar = {4: range(1 << 31)}

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        m, _, _, k, first = parameters[:5]
        return first_broken(*common(cls, parameters, present, words=5), ("books that there are", first + k <= m))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        return Extent.columns(parameters[2], COLUMNS, lo, hi)


@body(EmbeddingSum)
def embedding_sum_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    v, d, k, first = parameter(record, 1), parameter(record, 2), parameter(record, 3), parameter(record, 4)
    table, start = address(record, arenas, 1, 0), part_lo * COLUMNS
    count = min(part_hi * COLUMNS, d) - start
    for slot in range(slot_lo, slot_hi):
        index = operand_i32(record, arenas, 0, slot, k)
        y = view_f32(address(record, arenas, 2, slot) + 4 * start, count)
        for i in range(count):
            y[i] = F(0.0)
        for j in range(k):
            row = np.int64(index[j])
            if 0 <= row < v:
                values = view_f32(table + 4 * (((first + j) * v + row) * d + start), count)
                for i in range(count):
                    y[i] += values[i]


@operator("selected_linear", version=1)
class SelectedLinear(Operator):
    """y = table[index] x: x [k] f32, table [v, n, k] f32, index i32 scalar, clipped to 0..v-1; y [n].

    The product with one expert's matrix (Shazeer et al. 2017), no gate and no bias; only that matrix is read.
    """

    x = operand("k", weight=False)
    table = operand("v n k", weight=True)
    index = operand("", dtypes=DType.I32)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (f32(dims["n"]),)

    def meaning(self, x: Array, table: Array, index: Array) -> Array:
        return np.asarray(table[int(np.clip(index, 0, len(table) - 1))] @ x)

    def cost(self, *types: Type) -> Cost:
        _, n, k = types[1].shape
        return Cost({"f32": 2 * n * k}, activation_bytes=4 * (n + k), gathered_bytes=4 * n * k)

    def parts(self, *types: Type) -> int:
        return -(-types[1].shape[1] // ROWS)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return types[1].shape

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        v, n, k = parameters[:3]
        return (4 * k, 4 * v * n * k, 4, 4 * n)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=3))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent:
        return Extent.columns(parameters[1], ROWS, lo, hi)


@body(SelectedLinear)
def selected_linear_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    v, n, k = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    table, start = address(record, arenas, 1, 0), part_lo * ROWS
    count = min(part_hi * ROWS, n) - start
    for slot in range(slot_lo, slot_hi):
        x = address(record, arenas, 0, slot)
        index = min(max(np.int64(operand_i32(record, arenas, 2, slot, 1)[0]), 0), v - 1)
        y = view_f32(address(record, arenas, 3, slot) + 4 * start, count)
        for i in range(count):
            y[i] = dot(table + 4 * (index * n + start + i) * k, x, k)


@operator("residual_quantise", version=1)
class ResidualQuantise(Operator):
    """The nearest row of each book in turn, each taken from what the ones before leave of z. Zeghidour et al. 2021.

    z [d] f32, books [m, v, d] f32, squares [m, v] f32: the rows' sums of squares. With r = z, for each book b = first,
    first + 1, ...: code = argmin over i of squares[b, i] - 2 r . books[b, i], the first of equals, and
    r -= books[b, code]. Gives the codes [count] i32 and what is left of z, r [d] f32.
    """

    z = operand("d", weight=False)
    books = operand("m v d", weight=True)
    squares = operand("m v", weight=True)
    count: int = attr()
    first: int = attr(0)
    result_count: ClassVar[int] = 2
    semantic_parameters: ClassVar = {4: range(1 << 31)}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_books(self.name, self.first, self.count, dims["m"])
        return (i32(self.count), f32(dims["d"]))

    def meaning(self, z: Array, books: Array, squares: Array) -> tuple[Array, Array]:
        codes, rest = np.zeros(self.count, np.int64), np.array(z)
        for j in range(self.count):
            rows = books[self.first + j]
            codes[j] = np.argmin(squares[self.first + j] - 2.0 * rows @ rest)
            rest -= rows[codes[j]]
        return codes, rest

    def cost(self, *types: Type) -> Cost:
        _, v, d = types[1].shape
        searched = 4 * self.count * v * (d + 1)
        return Cost({"f32": 2 * self.count * v * d}, weight_bytes=searched, activation_bytes=8 * d + 4 * self.count)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Books, rows of one, numbers of a row, codes, first book."""
        return (*types[1].shape, self.count, self.first)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        m, v, d, count = parameters[:4]
        return (4 * d, 4 * m * v * d, 4 * m * v, 4 * count, 4 * d)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        m, _, _, count, first = parameters[:5]
        return first_broken(*common(cls, parameters, present, words=5), ("books that there are", first + count <= m))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (*given[:3], DType.I32, DType.F32)


@body(ResidualQuantise)
def residual_quantise_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    v, d, count, first = parameter(record, 1), parameter(record, 2), parameter(record, 3), parameter(record, 4)
    books, norms = address(record, arenas, 1, 0), address(record, arenas, 2, 0)
    for slot in range(slot_lo, slot_hi):
        z, rest_at = view_f32(address(record, arenas, 0, slot), d), address(record, arenas, 4, slot)
        codes, rest = operand_i32(record, arenas, 3, slot, count), view_f32(rest_at, d)
        for i in range(d):
            rest[i] = z[i]
        for j in range(count):
            rows = books + 4 * (first + j) * v * d
            squares = view_f32(norms + 4 * (first + j) * v, v)
            least, code = F(np.inf), 0
            for row in range(v):
                distance = squares[row] - F(2.0) * dot(rest_at, rows + 4 * row * d, d)
                if distance < least:
                    least, code = distance, row
            codes[j] = code
            chosen = view_f32(rows + 4 * code * d, d)
            for i in range(d):
                rest[i] -= chosen[i]


def _check_books(name: str, first: int, count: int, books: int) -> None:
    if first < 0 or count < 1 or first + count > books:
        wanted = f"0 <= first, 1 <= count, first + count <= {books}"
        raise GraphError(f"{name}: books", wanted=wanted, found=f"first {first}, count {count}")
