"""Small integer programs, one a session: decisions that would be dozens of phases as operators of their own.

A program is straight-line code for a register machine: a table of instructions that are executed in order, once, with
no jumps. So its time is bounded by construction, and a table is data: the same one runs on every target and in Python
(`execute`). `wpk.ops.rules` writes the table from a rule in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, i32
from wpk.ops import math32, scalars
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.math32 import INT
from wpk.ops.memory import view_i32
from wpk.ops.operator import Array, Cost, Dims, Operator, attr, body, operand, operator
from wpk.ops.payload import operand_i32, parameter
from wpk.ops.scalars import Scalar, scalar

WIDTH = 5  # words of an instruction: opcode, destination, then a, b and c
REGISTERS = 1024  # most that a program may have: 4 KiB of scratch
INPUTS = 5  # operands beside the code


# --- instructions: functions of (a, b), or of (immediate, a, b, c), i32 ----------------------------------------------
@scalar
def _const(immediate, a, b, c):
    return immediate


@scalar
def _mov(immediate, a, b, c):
    return a


@scalar
def _not(immediate, a, b, c):
    return INT(a == INT(0))


@scalar
def _select(immediate, a, b, c):
    return math32.select(a != INT(0), b, c)


@scalar
def _not_equal(a, b):
    return a != b


@scalar
def _and(a, b):
    return a & b


@scalar
def _or(a, b):
    return a | b


@scalar
def _floor_divide(a, b):
    quotient = INT(np.int64(a) // np.int64(math32.select(b == INT(0), INT(1), b)))
    return math32.select(b == INT(0), INT(0), quotient)


# name, function, the same on Python's integers (before wrapping)
INSTRUCTIONS: tuple[tuple[str, Scalar, Callable[[int, int, int, int], int]], ...] = (
    ("const", _const, lambda immediate, a, b, c: immediate),
    ("mov", _mov, lambda immediate, a, b, c: a),
    ("add", scalars.add, lambda immediate, a, b, c: a + b),
    ("sub", scalars.sub, lambda immediate, a, b, c: a - b),
    ("mul", scalars.mul, lambda immediate, a, b, c: a * b),
    ("floor_divide", _floor_divide, lambda immediate, a, b, c: a // b if b else 0),
    ("minimum", scalars.minimum, lambda immediate, a, b, c: min(a, b)),
    ("maximum", scalars.maximum, lambda immediate, a, b, c: max(a, b)),
    ("less", scalars.less, lambda immediate, a, b, c: int(a < b)),
    ("less_equal", scalars.less_equal, lambda immediate, a, b, c: int(a <= b)),
    ("equal", scalars.equal, lambda immediate, a, b, c: int(a == b)),
    ("not_equal", _not_equal, lambda immediate, a, b, c: int(a != b)),
    ("and", _and, lambda immediate, a, b, c: a & b),
    ("or", _or, lambda immediate, a, b, c: a | b),
    ("not", _not, lambda immediate, a, b, c: int(a == 0)),
    ("select", _select, lambda immediate, a, b, c: b if a else c),
)
OPCODES = {name: opcode for opcode, (name, _, _) in enumerate(INSTRUCTIONS)}


def _or_else(opcode: int, function: Scalar, rest: Scalar) -> Scalar:
    @scalar
    def step(found, immediate, a, b, c):
        if found <= opcode:
            return function(immediate, a, b, c)
        return rest(found, immediate, a, b, c)

    @scalar
    def step_of_two(found, immediate, a, b, c):
        if found <= opcode:
            return INT(function(a, b))  # wraps
        return rest(found, immediate, a, b, c)

    return step_of_two if function.__code__.co_argcount == 2 else step


assert INSTRUCTIONS[-1][1] is _select


@scalar
def _beyond(found, immediate, a, b, c):
    return _select(immediate, a, b, c)


def _chain() -> Scalar:
    """(opcode, immediate, a, b, c) -> what that row of the table makes; opcodes beyond either end are the row there."""
    step: Scalar = _beyond
    for opcode, (_, function, _) in reversed(list(enumerate(INSTRUCTIONS[:-1]))):
        step = _or_else(opcode, function, step)
    return step


perform = _chain()


def execute(code: Sequence[Sequence[int]], inputs: Sequence[int], registers: int) -> list[int]:
    """The registers after a program, by Python's integers: the meaning of the table."""
    file = [*(_wrapped(int(v)) for v in inputs), *[0] * (registers - len(inputs))]
    for opcode, destination, a, b, c in code:
        _, _, function = INSTRUCTIONS[_clipped(opcode, len(INSTRUCTIONS))]
        values = (file[_clipped(r, registers)] for r in (a, b, c))
        file[_clipped(destination, registers)] = _wrapped(function(a, *values))
    return file


def _wrapped(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _clipped(index: int, size: int) -> int:
    return min(max(index, 0), size - 1)


@operator("scalar_program", version=1)
class ScalarProgram(Operator):
    """Straight-line code over i32 registers: code [n, 5] i32, a weight; x up to five of any shape i32; y [outputs].

    Registers 0, 1, ... hold the elements of all x in order at first, the others 0; after the last instruction y is
    what the last `outputs` of them hold. A row of the code is opcode, destination, a, b, c: the destination becomes
    `INSTRUCTIONS[opcode]` of the registers a, b and c; `const` takes the word a itself. i32 wraps; comparisons and
    `not` give 0 or 1, `and` and `or` work on bits, `select` is b where a is not 0 else c, and `floor_divide` rounds
    down and gives 0 for a divisor of 0. Opcodes and registers are clipped to those there are: any table is safe.
    """

    code = operand("n 5", dtypes=DType.I32, weight=True)
    x = operand("...", dtypes=DType.I32, weight=False, variadic=True)
    registers: int = attr()
    outputs: int = attr()
    semantic_parameters: ClassVar = {1: range(1, REGISTERS + 1)}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        sizes = _sizes(list(dims.types.values()))
        if not 1 <= len(sizes) <= INPUTS:
            raise GraphError("scalar_program: inputs", wanted=f"1 to {INPUTS}", found=len(sizes))
        least = max(sum(sizes), self.outputs)
        if self.outputs < 1 or not least <= self.registers <= REGISTERS:
            wanted = f"outputs >= 1 and {least} to {REGISTERS} registers"
            raise GraphError("scalar_program: registers", wanted=wanted, found=f"{self.outputs}, {self.registers}")
        return (i32(self.outputs),)

    def meaning(self, code: Array, *x: Array) -> Array:
        inputs = [int(v) for array in x for v in np.reshape(array, -1)]
        made = execute(code.astype(np.int64).tolist(), inputs, self.registers)
        return np.array(made[self.registers - self.outputs :], np.int64)

    def cost(self, *types: Type) -> Cost:
        moved = sum(t.bytes for t in types[1:]) + 4 * self.outputs
        return Cost({}, weight_bytes=types[0].bytes, activation_bytes=moved)

    def places(self, count: int) -> tuple[int, ...]:
        return (*range(count), 1 + INPUTS)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Instructions, registers, outputs, then the size of each input, 0 where there is none."""
        sizes = _sizes(types)
        return (types[0].shape[0], self.registers, self.outputs, *sizes, *[0] * (INPUTS - len(sizes)))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        count, _, outputs, *sizes = parameters[: 3 + INPUTS]
        return (4 * WIDTH * count, *(4 * size for size in sizes), 4 * outputs)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        _, registers, outputs, *sizes = parameters[: 3 + INPUTS]
        there = [size > 0 for size in sizes]
        return first_broken(
            *common(
                cls, parameters, present, words=3 + INPUTS, sizes=3, operands=2 + INPUTS, optional=range(2, 1 + INPUTS)
            ),
            ("sizes of inputs >= 0", min(sizes) >= 0),
            ("the inputs that have a size, the first ones", list(present[1:-1]) == there == sorted(there)[::-1]),
            ("registers for all inputs and outputs", max(sum(sizes), outputs) <= registers),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.I32,) * len(given)


def _sizes(types: Sequence[Type]) -> list[int]:
    """Elements of each input; the first type is the code's."""
    return [t.size for t in types[1:]]


@scalar
def _register(index, registers):
    return min(max(np.int64(index), 0), registers - 1)


@body(ScalarProgram)
def scalar_program_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    count, registers, outputs = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    code = operand_i32(record, arenas, 0, 0, WIDTH * count)
    file = view_i32(scratch, registers)
    for slot in range(slot_lo, slot_hi):
        filled = 0
        for k in range(INPUTS):
            size = parameter(record, 3 + k)
            if size > 0:
                x = operand_i32(record, arenas, 1 + k, slot, size)
                for i in range(size):
                    file[filled + i] = x[i]
                filled += size
        for i in range(filled, registers):
            file[i] = 0
        for i in range(0, WIDTH * count, WIDTH):
            a = file[_register(code[i + 2], registers)]
            b = file[_register(code[i + 3], registers)]
            c = file[_register(code[i + 4], registers)]
            file[_register(code[i + 1], registers)] = perform(code[i], code[i + 2], a, b, c)
        y = operand_i32(record, arenas, 1 + INPUTS, slot, outputs)
        for i in range(outputs):
            y[i] = file[registers - outputs + i]
