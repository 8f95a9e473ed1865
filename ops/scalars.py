"""The scalar functions of the element-wise operators, and their meanings in float64.

Each function is plain IEEE arithmetic without a branch (see `math32`), written once for every target; the makers of
`elementwise` put loops around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from wpk.ops import math32
from wpk.ops.math32 import INT, F
from wpk.ops.operator import Array

Scalar = Callable[..., Any]
scalar: Callable[[Scalar], Scalar] = math32._pinned  # compiled into its caller, IEEE, no check of divisors


# --- scalar functions ---------------------------------------------------------------------------------------------
@scalar
def neg(x):
    return -x


@scalar
def absolute(x):
    return math32.from_bits(INT(math32.bits_of(x) & INT(0x7FFFFFFF)))


@scalar
def square(x):
    return x * x


@scalar
def sqrt(x):
    return F(math.sqrt(x))  # one correctly rounded instruction on every target


@scalar
def reciprocal(x):
    return F(1.0) / x


@scalar
def sign(x):
    y = math32.select(x > F(0.0), F(1.0), x)
    return math32.select(x < F(0.0), F(-1.0), y)  # zero and NaN are their own sign


@scalar
def clamp(x, lo, hi):
    y = math32.select(x < lo, lo, x)
    return math32.select(y > hi, hi, y)


@scalar
def affine(x, scale, offset):
    return x * scale + offset


@scalar
def leaky_relu(x, slope, unused):
    return math32.select(x < F(0.0), x * slope, x)


@scalar
def add(a, b):
    return a + b


@scalar
def sub(a, b):
    return a - b


@scalar
def mul(a, b):
    return a * b


@scalar
def div(a, b):
    return a / b


@scalar
def minimum(a, b):
    return math32.select((a < b) | (a != a), a, b)


@scalar
def maximum(a, b):
    return math32.select((a > b) | (a != a), a, b)


@scalar
def less(a, b):
    return INT(a < b)


@scalar
def less_equal(a, b):
    return INT(a <= b)


@scalar
def greater(a, b):
    return INT(a > b)


@scalar
def greater_equal(a, b):
    return INT(a >= b)


@scalar
def equal(a, b):
    return INT(a == b)


@scalar
def logical_and(a, b):
    return INT((a != INT(0)) & (b != INT(0)))


@scalar
def logical_or(a, b):
    return INT((a != INT(0)) | (b != INT(0)))


@scalar
def logical_not(x, unused):
    return INT(x == INT(0))


@scalar
def increment(x, by):
    return INT(x + by)


@scalar
def remainder(x, by):
    """x mod by for by >= 1, from 0 to by - 1: numba's % is Python's on every target."""
    return INT(x % by)


@scalar
def bf16_bits(x):
    """The upper 16 bits, rounded to nearest even; NaN stays a (quiet) NaN."""
    bits = math32.bits_of(x)
    rounded = INT((np.int64(bits) + 0x7FFF + ((np.int64(bits) >> 16) & 1)) >> 16)
    return np.uint16(math32.select(x != x, INT((bits >> INT(16)) | INT(0x40)), rounded) & 0xFFFF)


@scalar
def bf16_value(bits):
    return math32.from_bits(INT(INT(bits) << INT(16)))


@scalar
def to_int(x):
    """Toward zero, saturating; NaN is 0."""
    safe = math32.select((x > F(-2147483648.0)) & (x < F(2147483648.0)), x, F(0.0))
    y = math32.select(x >= F(2147483648.0), INT(2147483647), INT(safe))
    return math32.select(x <= F(-2147483648.0), INT(-2147483648), y)


@scalar
def modulo(i, size):
    """i mod size for positive integers."""
    return i % size


# --- meanings in float64 ------------------------------------------------------------------------------------------
_erf = np.vectorize(math.erf, otypes=[np.float64])


def identity64(x: Array) -> Array:
    return x


def reciprocal64(x: Array) -> Array:
    return 1.0 / x


def sigmoid64(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def relu64(x: Array) -> Array:
    return np.maximum(x, 0.0)


def relu2_64(x: Array) -> Array:
    return np.maximum(x, 0.0) ** 2


def silu64(x: Array) -> Array:
    return x * sigmoid64(x)


def gelu64(x: Array) -> Array:
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def gelu_tanh64(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def softplus64(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def clamp64(x: Array, lo: float, hi: float) -> Array:
    return np.clip(x, np.float32(lo), np.float32(hi))


def affine64(x: Array, scale: float, offset: float) -> Array:
    return x * scale + offset


def leaky_relu64(x: Array, slope: float) -> Array:
    return np.where(x < 0, x * slope, x)


ACTIVATION_MEANING: dict[str, Callable[[Array], Array]] = {
    "none": identity64,
    "relu": relu64,
    "relu2": relu2_64,
    "silu": silu64,
    "gelu": gelu64,
    "gelu_tanh": gelu_tanh64,
    "sigmoid": sigmoid64,
    "tanh": np.tanh,
    "softplus": softplus64,
}
