"""The element-wise family: one scalar function each, in loops that all share.

Operands of different size broadcast by suffix: [t, c] with [c] or with a scalar, either way round; leading ones of
the smaller shape don't count. The bodies come from one of the makers below, so that a row of a table is all that an
operator needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type
from wpk.ops import math32, scalars
from wpk.ops.legal import FINITE, NUMBERS, DTypes, common, first_broken
from wpk.ops.memory import view_f32, view_i32
from wpk.ops.operator import LIBRARY, Array, Body, Dims, Extent, Operator, attr, operand, operator
from wpk.ops.payload import address, decode_float, parameter, parameter_f32
from wpk.ops.scalars import Scalar

CHUNK = 256  # elements of a part
WORDS = frozenset({DType.F32, DType.I32})


# --- what the family shares ---------------------------------------------------------------------------------------
def broadcast(name: str, a: Type, b: Type) -> tuple[int, ...]:
    """The shape of a and b together where one is a suffix of the other."""
    small, large = sorted((a.shape, b.shape), key=lambda s: (math.prod(s), len(s)))
    core = small[next((i for i, d in enumerate(small) if d != 1), len(small)) :]
    if core and large[len(large) - len(core) :] != core:
        wanted = "equal shapes, or one the suffix of the other (like [t, c] with [c])"
        raise GraphError(f"{name}: operands do not broadcast", wanted=wanted, found=f"{a} and {b}")
    return tuple(np.broadcast_shapes(small, large))


class Elementwise(Operator):
    """Base: parts are chunks of the result; parameter 0 is the result's element count."""

    inplace: ClassVar = {0: 0}

    def parts(self, *types: Type) -> int:
        return -(-self.infer(types)[0].size // CHUNK)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent.columns(parameters[0], CHUNK, lo, hi)


class Unary(Elementwise):
    """Base of y = f(x, first two attributes); f32, any shape."""

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (dims.like("x"),)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size,)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (4 * parameters[0],) * 2

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=1 + len(cls.semantic_parameters)))


class Binary(Elementwise):
    """Base of y = f(a, b) with suffix broadcast. Parameters: result, a and b elements, 1 for i32 operands."""

    def results(self, dims: Dims) -> tuple[Type, ...]:
        a, b = dims.like("a"), dims.like("b")
        if a.dtype != b.dtype:
            raise GraphError(f"{self.name}: operands of one dtype", wanted=f"b {a.dtype.value}", found=b)
        return (Type(self.result_dtype(a.dtype), broadcast(self.name, a, b)),)

    @classmethod
    def result_dtype(cls, operands: DType) -> DType:
        return operands

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        (y,) = self.infer(types)
        return (y.size, types[0].size, types[1].size, int(types[0].dtype is not DType.F32))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (4 * parameters[1], 4 * parameters[2], 4 * parameters[0])

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        y, a, b, integers = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=4, sizes=3),
            ("the larger operand to be as large as the result", y == max(a, b)),
            ("the smaller operand to divide the larger", max(a, b) % max(min(a, b), 1) == 0),
            ("integers 0 or 1", integers in (0, 1)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        one = given[0]
        if one is None or (parameters[3] != 0) != (one is not DType.F32):
            one = DType.I32 if parameters[3] else DType.F32
        return (one, one, cls.result_dtype(one))


# --- bodies -------------------------------------------------------------------------------------------------------
# Views start where the chunk does, so that loops count from 0: an index that might be negative costs LLVM the vector.
def unary_body(function: Scalar) -> Callable[..., None]:
    def unary_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        start = part_lo * CHUNK
        count = min(part_hi * CHUNK, parameter(record, 0)) - start
        for slot in range(slot_lo, slot_hi):
            x = view_f32(address(record, arenas, 0, slot) + 4 * start, count)
            y = view_f32(address(record, arenas, 1, slot) + 4 * start, count)
            for i in range(count):
                y[i] = function(x[i])

    return unary_body


def unary_body_with_attributes(function: Scalar) -> Callable[..., None]:
    def unary_body_with_attributes(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        start = part_lo * CHUNK
        count = min(part_hi * CHUNK, parameter(record, 0)) - start
        p, q = parameter_f32(record, 1), parameter_f32(record, 2)
        for slot in range(slot_lo, slot_hi):
            x = view_f32(address(record, arenas, 0, slot) + 4 * start, count)
            y = view_f32(address(record, arenas, 1, slot) + 4 * start, count)
            for i in range(count):
                y[i] = function(x[i], p, q)

    return unary_body_with_attributes


def binary_body(function: Scalar, operands: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., None]:
    """For operands of one dtype. Equal sizes get a loop that vectorises; broadcasts step with two wrapping counters."""

    def binary_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        size_a, size_b = parameter(record, 1), parameter(record, 2)
        start = part_lo * CHUNK
        count = min(part_hi * CHUNK, parameter(record, 0)) - start
        for slot in range(slot_lo, slot_hi):
            a_at, b_at = address(record, arenas, 0, slot), address(record, arenas, 1, slot)
            y = result(address(record, arenas, 2, slot) + 4 * start, count)
            if size_a == size_b:
                a, b = operands(a_at + 4 * start, count), operands(b_at + 4 * start, count)
                for i in range(count):
                    y[i] = function(a[i], b[i])
            else:
                a, b = operands(a_at, size_a), operands(b_at, size_b)
                at_a, at_b = scalars.modulo(start, size_a), scalars.modulo(start, size_b)
                for i in range(count):
                    y[i] = function(a[at_a], b[at_b])
                    at_a = at_a + 1 if at_a + 1 < size_a else 0
                    at_b = at_b + 1 if at_b + 1 < size_b else 0

    return binary_body


def binary_body_of_words(function: Scalar, result: Callable[..., Any]) -> Callable[..., None]:
    """For f32 operands, or i32 ones where parameter 3 says so; those take the slow loop, being few."""

    def binary_body_of_words(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        size_a, size_b, integers = parameter(record, 1), parameter(record, 2), parameter(record, 3) != 0
        start = part_lo * CHUNK
        count = min(part_hi * CHUNK, parameter(record, 0)) - start
        for slot in range(slot_lo, slot_hi):
            a_at, b_at = address(record, arenas, 0, slot), address(record, arenas, 1, slot)
            y_at = address(record, arenas, 2, slot) + 4 * start
            y, y_words = result(y_at, count), view_i32(y_at, count)
            if size_a == size_b and not integers:
                a, b = view_f32(a_at + 4 * start, count), view_f32(b_at + 4 * start, count)
                for i in range(count):
                    y[i] = function(a[i], b[i])
            else:
                a, b = view_f32(a_at, size_a), view_f32(b_at, size_b)
                a_words, b_words = view_i32(a_at, size_a), view_i32(b_at, size_b)
                at_a, at_b = scalars.modulo(start, size_a), scalars.modulo(start, size_b)
                for i in range(count):
                    if integers:
                        y_words[i] = function(a_words[at_a], b_words[at_b])
                    else:
                        y[i] = function(a[at_a], b[at_b])
                    at_a = at_a + 1 if at_a + 1 < size_a else 0
                    at_b = at_b + 1 if at_b + 1 < size_b else 0

    return binary_body_of_words


# --- tables -------------------------------------------------------------------------------------------------------
# name, scalar function, meaning, what it is
UNARY: tuple[tuple[str, Scalar, Callable[[Array], Array], str], ...] = (
    ("neg", scalars.neg, np.negative, "-x"),
    ("abs", scalars.absolute, np.abs, "|x|"),
    ("square", scalars.square, np.square, "x^2"),
    ("sqrt", scalars.sqrt, np.sqrt, "square root; NaN below 0"),
    ("reciprocal", scalars.reciprocal, scalars.reciprocal64, "1 / x"),
    ("exp", math32.exp, np.exp, "e^x"),
    ("log", math32.log, np.log, "natural logarithm; -infinity at 0, NaN below"),
    ("sigmoid", math32.sigmoid, scalars.sigmoid64, "1 / (1 + e^-x)"),
    ("tanh", math32.tanh, np.tanh, "hyperbolic tangent"),
    ("relu", math32.relu, scalars.relu64, "max(x, 0)"),
    ("relu2", math32.relu2, scalars.relu2_64, "max(x, 0)^2, So et al. 2021 (Primer)"),
    ("silu", math32.silu, scalars.silu64, "x sigmoid(x), Hendrycks & Gimpel 2016"),
    ("gelu", math32.gelu, scalars.gelu64, "x/2 (1 + erf(x / sqrt 2)), Hendrycks & Gimpel 2016"),
    ("gelu_tanh", math32.gelu_tanh, scalars.gelu_tanh64, "the tanh approximation of gelu"),
    ("softplus", math32.softplus, scalars.softplus64, "log(1 + e^x)"),
    ("sin", math32.sin, np.sin, "sine of radians; |x| < 1e4"),
    ("cos", math32.cos, np.cos, "cosine of radians; |x| < 1e4"),
    ("sign", scalars.sign, np.sign, "-1, 0 or 1"),
)

# name, scalar function, meaning, dtypes, dtype of the result (None: the operands'), what it is
BINARY: tuple[tuple[str, Scalar, Callable[[Array, Array], Array], frozenset[DType], DType | None, str], ...] = (
    ("add", scalars.add, np.add, WORDS, None, "a + b; i32 wraps"),
    ("sub", scalars.sub, np.subtract, WORDS, None, "a - b; i32 wraps"),
    ("mul", scalars.mul, np.multiply, WORDS, None, "a * b; i32 wraps"),
    ("div", scalars.div, np.true_divide, frozenset({DType.F32}), None, "a / b, IEEE 754"),
    ("minimum", scalars.minimum, np.minimum, WORDS, None, "the lesser; NaN where either is"),
    ("maximum", scalars.maximum, np.maximum, WORDS, None, "the greater; NaN where either is"),
    ("less", scalars.less, np.less, WORDS, DType.BOOL, "a < b"),
    ("less_equal", scalars.less_equal, np.less_equal, WORDS, DType.BOOL, "a <= b"),
    ("greater", scalars.greater, np.greater, WORDS, DType.BOOL, "a > b"),
    ("greater_equal", scalars.greater_equal, np.greater_equal, WORDS, DType.BOOL, "a >= b"),
    ("equal", scalars.equal, np.equal, WORDS, DType.BOOL, "a = b"),
    ("logical_and", scalars.logical_and, np.logical_and, frozenset({DType.BOOL}), None, "a and b"),
    ("logical_or", scalars.logical_or, np.logical_or, frozenset({DType.BOOL}), None, "a or b"),
)


def _declare_unary(name: str, function: Scalar, mean: Callable[[Array], Array], what: str) -> None:
    @operator(name, version=1)
    class UnaryOperator(Unary):
        x = operand("...")

        def meaning(self, x: Array) -> Array:
            return mean(x)

    UnaryOperator.__doc__ = f"{what}; f32, element by element."
    LIBRARY.add_body(UnaryOperator, Body(unary_body(function), frozenset({"cpu"})))


def _declare_binary(
    name: str,
    function: Scalar,
    mean: Callable[[Array, Array], Array],
    kinds: frozenset[DType],
    made: DType | None,
    what: str,
) -> None:
    @operator(name, version=1)
    class BinaryOperator(Binary):
        a = operand("...", dtypes=kinds)
        b = operand("...", dtypes=kinds)

        @classmethod
        def result_dtype(cls, operands: DType) -> DType:
            return operands if made is None else made

        def meaning(self, a: Array, b: Array) -> Array:
            return mean(a, b)

    BinaryOperator.__doc__ = f"{what}; {' or '.join(sorted(k.value for k in kinds))}, suffix broadcast."
    result = view_f32 if made is None and DType.F32 in kinds else view_i32
    if kinds == WORDS:
        made_body = binary_body_of_words(function, result)
    else:
        made_body = binary_body(function, view_f32 if DType.F32 in kinds else view_i32, result)
    LIBRARY.add_body(BinaryOperator, Body(made_body, frozenset({"cpu"})))


for _row in UNARY:
    _declare_unary(*_row)
for _binary_row in BINARY:
    _declare_binary(*_binary_row)


# --- with attributes ----------------------------------------------------------------------------------------------
@operator("clamp", version=1)
class Clamp(Unary):
    """min(max(x, lo), hi), f32; NaN stays NaN."""

    x = operand("...")
    lo: float = attr()
    hi: float = attr()
    semantic_parameters: ClassVar = {1: NUMBERS, 2: NUMBERS}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if not self.lo <= self.hi:
            raise GraphError("clamp: bounds", wanted="lo <= hi", found=f"{self.lo}, {self.hi}")
        return (dims.like("x"),)

    def meaning(self, x: Array) -> Array:
        return scalars.clamp64(x, self.lo, self.hi)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.lo, self.hi)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        bounds = decode_float(parameters[1]) <= decode_float(parameters[2])
        return first_broken(*common(cls, parameters, present, words=3), ("lo <= hi", bounds))


@operator("affine", version=1)
class Affine(Unary):
    """x * scale + offset, f32."""

    x = operand("...")
    scale: float = attr(1.0)
    offset: float = attr(0.0)
    semantic_parameters: ClassVar = {1: FINITE, 2: FINITE}

    def meaning(self, x: Array) -> Array:
        return scalars.affine64(x, self.scale, self.offset)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.scale, self.offset)


@operator("leaky_relu", version=1)
class LeakyRelu(Unary):
    """x where x >= 0, slope * x below, f32. Maas et al. 2013."""

    x = operand("...")
    slope: float = attr(0.01)
    semantic_parameters: ClassVar = {1: FINITE}

    def meaning(self, x: Array) -> Array:
        return scalars.leaky_relu64(x, self.slope)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.slope, 0.0)


for _operator, _function in ((Clamp, scalars.clamp), (Affine, scalars.affine), (LeakyRelu, scalars.leaky_relu)):
    LIBRARY.add_body(_operator, Body(unary_body_with_attributes(_function), frozenset({"cpu"})))
