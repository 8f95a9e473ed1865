"""Rules over integers, written once in Python: they run on Python's integers, and become a `scalar_program`.

    def toggle(held, token):
        held.on = where(token == 7, 1 - held.on, held.on)
        return {"on": held.on}

    program = record(toggle, state=("on",), inputs=("token",))
    outputs, following = program.apply(g, state, token)

A rule is a function of its state (attributes, which it replaces) and inputs, and returns its outputs by name. It may
use + - * // & |, comparisons, and the functions of this file; a Python `if` cannot depend on a session's number (it
raises), `where` takes its place. Python's integers do not wrap, registers do: a rule keeps its numbers within an i32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import Type, i32
from wpk.ops.scalar_program import OPCODES, REGISTERS, WIDTH

Integer = Any  # an int, a bool, or a Symbol
Rule = Callable[..., Mapping[str, Integer]]
_Instruction = tuple[str, tuple[int, ...]]  # name; the immediate of `const`, else the values that it takes


@dataclass(frozen=True)
class Program:
    """A recorded rule. code: rows as `scalar_program` wants them; the state is its first input and its last outputs."""

    state: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    code: tuple[tuple[int, ...], ...]
    registers: int

    def apply(self, g: GraphBuilder, *values: Value) -> tuple[dict[str, Value], Value | None]:
        """Its outputs, i32 scalars by name, and the state after it.

        values: the state i32[n], if it has one, then the inputs; a vector holds several of `inputs`.
        """
        words = tuple(word for row in self.code for word in row)
        code = g.op("constant", shape=(len(self.code), WIDTH), values=words, dtype="i32")
        count = len(self.outputs) + len(self.state)
        made = g.op("scalar_program", code, *values, registers=self.registers, outputs=count)
        found = {}
        for i, name in enumerate(self.outputs):
            found[name] = g.op("reshape", g.op("slice", made, axis=0, start=i, stop=i + 1), shape=())
        if not self.state:
            return found, None
        return found, g.op("slice", made, axis=0, start=len(self.outputs), stop=count)

    def initial(self, g: GraphBuilder, **values: int) -> Value:
        """The image of a state with these values, 0 where none is given."""
        image = tuple(values.get(name, 0) for name in self.state)
        return g.op("constant", shape=(len(image),), values=image, dtype="i32")

    @property
    def type(self) -> Type:
        """The type of its state."""
        return i32(len(self.state))


def record(rule: Rule, state: Sequence[str], inputs: Sequence[str]) -> Program:
    """The rule as a program. Raises GraphError where it is none."""
    trace = _Trace(len(state) + len(inputs))
    given = [Symbol(trace, i) for i in range(trace.given)]
    held = SimpleNamespace(**dict(zip(state, given, strict=False)))
    outputs = dict(rule(held, *given[len(state) :]))
    if not (outputs or state):
        raise GraphError("a rule's results", wanted="at least one", found="none")
    if set(vars(held)) != set(state):
        raise GraphError("a rule's state", wanted=f"just {', '.join(state)}", found=", ".join(vars(held)) or "nothing")
    results = [trace.number(v) for v in (*outputs.values(), *(getattr(held, name) for name in state))]
    code, registers = trace.compiled(results)
    return Program(tuple(state), tuple(inputs), tuple(outputs), code, registers)


# --- functions of a rule --------------------------------------------------------------------------------------------
def where(condition: Integer, a: Integer, b: Integer) -> Integer:
    """a where the condition is not 0, else b."""
    if isinstance(condition, Symbol):
        return condition.trace.emit("select", condition, a, b)
    return a if condition else b


def minimum(a: Integer, b: Integer) -> Integer:
    """The lesser."""
    return _of_two("minimum", min, a, b)


def maximum(a: Integer, b: Integer) -> Integer:
    """The greater."""
    return _of_two("maximum", max, a, b)


def logical_not(x: Integer) -> Integer:
    """1 where x is 0, else 0. (`~` would be the complement of its bits.)"""
    return x.trace.emit("not", x) if isinstance(x, Symbol) else int(x == 0)


def _of_two(name: str, plain: Callable[[Any, Any], Any], a: Integer, b: Integer) -> Integer:
    symbol = next((v for v in (a, b) if isinstance(v, Symbol)), None)
    return plain(a, b) if symbol is None else symbol.trace.emit(name, a, b)


def _infix(name: str, *, reflected: bool = False) -> Callable[[Symbol, Integer], Symbol]:
    def method(self: Symbol, other: Integer) -> Symbol:
        return self.trace.emit(name, *((other, self) if reflected else (self, other)))

    return method


class Symbol:
    """An integer that will be in a register when the program runs."""

    __slots__ = ("_number", "trace")
    __hash__ = None  # type: ignore[assignment]  # `==` makes a symbol, so that it is no key

    def __init__(self, trace: _Trace, number: int) -> None:
        self.trace, self._number = trace, number

    __add__, __radd__ = _infix("add"), _infix("add")
    __sub__, __rsub__ = _infix("sub"), _infix("sub", reflected=True)
    __mul__, __rmul__ = _infix("mul"), _infix("mul")
    __floordiv__, __rfloordiv__ = _infix("floor_divide"), _infix("floor_divide", reflected=True)
    __and__, __rand__ = _infix("and"), _infix("and")
    __or__, __ror__ = _infix("or"), _infix("or")
    __lt__, __gt__ = _infix("less"), _infix("less", reflected=True)
    __le__, __ge__ = _infix("less_equal"), _infix("less_equal", reflected=True)
    __eq__, __ne__ = _infix("equal"), _infix("not_equal")  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise GraphError(
            "a rule cannot branch on a session's number", wanted="where(condition, a, b), a & b, a | b",
            found="if, and, or, not, min or max",
        )  # fmt: skip


# --- recording ------------------------------------------------------------------------------------------------------
class _Trace:
    """Values in single assignment: the first `given` are inputs, the others instructions; equal ones are one."""

    def __init__(self, given: int) -> None:
        self.given = given
        self._instructions: list[_Instruction] = []
        self._made: dict[_Instruction, int] = {}

    def emit(self, name: str, *operands: Integer) -> Symbol:
        return Symbol(self, self._value((name, tuple(self.number(v) for v in operands))))

    def number(self, value: Integer) -> int:
        """Which value this is; a constant becomes one."""
        if isinstance(value, Symbol):
            if value.trace is not self:
                raise GraphError("a rule's number", wanted="one of this rule", found="one of another")
            return value._number
        try:
            word = operator.index(value)
        except TypeError:
            raise GraphError("a rule's number", wanted="an integer", found=repr(value)) from None
        if not -(1 << 31) <= word < 1 << 31:
            raise GraphError("a rule's constant", wanted="an i32", found=word)
        return self._value(("const", (word,)))

    def _value(self, instruction: _Instruction) -> int:
        if instruction not in self._made:
            self._made[instruction] = self.given + len(self._instructions)
            self._instructions.append(instruction)
        return self._made[instruction]

    def compiled(self, results: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Rows of code that leave these values in the last registers, and how many registers that takes.

        Inputs come first, then intermediate values, then results: none is ever overwritten by another.
        """
        needed = set(results)
        for number in range(self.given + len(self._instructions) - 1, self.given - 1, -1):
            name, operands = self._instructions[number - self.given]
            needed |= set(operands) if number in needed and name != "const" else set()
        kept = [n for n in range(self.given, self.given + len(self._instructions)) if n in needed]
        inner = [n for n in kept if n not in results]
        first = self.given + len(inner)
        register = {n: n for n in range(self.given)} | {n: self.given + i for i, n in enumerate(inner)}
        register |= {n: first + results.index(n) for n in kept if n not in register}
        rows = [self._row(n, register) for n in kept]
        for i, n in enumerate(results):
            if register[n] != first + i:
                rows.append((OPCODES["mov"], first + i, register[n], 0, 0))
        registers = first + len(results)
        if registers > REGISTERS:
            raise GraphError("a rule is too long", wanted=f"at most {REGISTERS} registers", found=registers)
        return tuple(rows), registers

    def _row(self, number: int, register: Mapping[int, int]) -> tuple[int, ...]:
        name, operands = self._instructions[number - self.given]
        words = operands if name == "const" else tuple(register[n] for n in operands)
        return (OPCODES[name], register[number], *words, *[0] * (WIDTH - 2 - len(words)))
