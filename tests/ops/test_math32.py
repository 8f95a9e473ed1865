"""Scalar float32 functions: close to the float64 meaning, and the same bits wherever the element sits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

from wpk.ops import math32

erf64 = np.vectorize(math.erf, otypes=[np.float64])
sigmoid64 = lambda x: np.exp(-np.logaddexp(0.0, -x))  # noqa: E731

FLOAT64_MEANING = {
    "exp": np.exp,
    "log": np.log,
    "sigmoid": sigmoid64,
    "tanh": np.tanh,
    "erf": erf64,
    "silu": lambda x: x * sigmoid64(x),
    "gelu": lambda x: 0.5 * x * (1 + erf64(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.logaddexp(0.0, x),
    "relu": lambda x: np.maximum(x, 0.0),
    "sin": np.sin,
    "cos": np.cos,
}


def _loop(function, fastmath=False):
    @njit(fastmath=fastmath)
    def loop(x, y):
        for i in range(x.shape[0]):
            y[i] = function(x[i])

    def apply(x):
        y = np.empty_like(x)
        loop(x, y)
        return y

    apply.dispatcher = loop
    return apply


LOOPS = {name: _loop(getattr(math32, name)) for name in FLOAT64_MEANING}


def _grid(low, high, count=1_000_003):
    return np.linspace(low, high, count).astype(np.float32)


def _all_exponents():
    """Every binade of the positive floats, denormals included, 4096 mantissas each."""
    return np.arange(1, 0x7F800000, 2048, dtype=np.int32).view(np.float32)


def _signed_exponents():
    x = _all_exponents()
    return np.concatenate([x, -x])


RELATIVE = [
    ("exp", _grid(-87.3, 88.7), 1.5e-7),
    ("log", _all_exponents(), 3e-7),
    ("log", _grid(0.5, 2.0), 3e-7),
    ("tanh", _signed_exponents(), 3e-7),
    ("tanh", _grid(-10, 10), 3e-7),
    ("sigmoid", _grid(-87, 100), 3e-7),
    ("sigmoid", _grid(-1, 1), 3e-7),
    ("silu", _grid(-80, 100), 4e-7),
    ("softplus", _grid(-80, 100), 3e-7),
    ("relu", _grid(-5, 5), 0.0),
]

ABSOLUTE = [
    ("erf", _grid(-6, 6), 1.2e-7),
    ("erf", _signed_exponents(), 1.2e-7),
    ("sin", _grid(-1e4, 1e4), 2e-7),
    ("cos", _grid(-1e4, 1e4), 2e-7),
    ("sin", _grid(-4, 4), 2e-7),
    ("cos", _grid(-4, 4), 2e-7),
]

GELU = [(name, _grid(-10, 10), 5e-7) for name in ("gelu", "gelu_tanh")]


@pytest.mark.parametrize("name,x,bound", RELATIVE)
def test_relative_error_against_float64(name, x, bound):
    wanted = FLOAT64_MEANING[name](x.astype(np.float64))
    normal = np.abs(wanted) > 1.2e-38
    error = np.abs(LOOPS[name](x) - wanted)[normal] / np.abs(wanted[normal])
    assert error.max() <= bound


@pytest.mark.parametrize("name,x,bound", ABSOLUTE)
def test_absolute_error_against_float64(name, x, bound):
    assert np.abs(LOOPS[name](x) - FLOAT64_MEANING[name](x.astype(np.float64))).max() <= bound


@pytest.mark.parametrize("name,x,bound", GELU)
def test_gelu_error_is_small_beside_its_argument(name, x, bound):
    error = np.abs(LOOPS[name](x) - FLOAT64_MEANING[name](x.astype(np.float64)))
    assert (error / np.maximum(1.0, np.abs(x))).max() <= bound


def test_limits():
    inf, nan = np.inf, np.nan
    cases = {
        "exp": [(89.5, inf), (1e30, inf), (inf, inf), (-104.5, 0.0), (-inf, 0.0), (0.0, 1.0)],
        "log": [(0.0, -inf), (-0.0, -inf), (-1.0, nan), (-inf, nan), (inf, inf), (1.0, 0.0)],
        "sigmoid": [(inf, 1.0), (-inf, 0.0), (0.0, 0.5), (-200.0, 0.0), (200.0, 1.0)],
        "tanh": [(inf, 1.0), (-inf, -1.0), (0.0, 0.0), (50.0, 1.0)],
        "erf": [(inf, 1.0), (-inf, -1.0), (0.0, 0.0)],
        "softplus": [(inf, inf), (-inf, 0.0), (1000.0, 1000.0)],
        "relu": [(-1.0, 0.0), (2.0, 2.0), (inf, inf)],
        "sin": [(0.0, 0.0)],
        "cos": [(0.0, 1.0)],
    }
    for name, pairs in cases.items():
        x, wanted = np.array(pairs, np.float32).T.copy()
        np.testing.assert_allclose(LOOPS[name](x), wanted, rtol=1.2e-7, atol=0, err_msg=name)


def test_exp_is_right_among_the_denormals():
    x = _grid(-103.5, -87.3, 10_007)
    smallest = np.float64(np.float32(1e-45))
    assert np.abs(LOOPS["exp"](x) - np.exp(x.astype(np.float64))).max() <= 2 * smallest


@pytest.mark.parametrize("name", FLOAT64_MEANING)
def test_nan_propagates(name):
    assert np.isnan(LOOPS[name](np.full(19, np.nan, np.float32))).all()


@pytest.mark.parametrize("name", FLOAT64_MEANING)
def test_bits_do_not_depend_on_position_or_length(name):
    rng = np.random.default_rng(7)
    x = np.concatenate([rng.normal(size=40) * 3, rng.uniform(-100, 100, 31), [0.0, -0.0, 1e-40, 88.9]])
    x = x.astype(np.float32)
    alone = np.concatenate([LOOPS[name](x[i : i + 1]) for i in range(x.size)])
    for length in range(1, x.size + 1):
        for start in {0, 1, 5, x.size - length} & set(range(x.size - length + 1)):
            got = LOOPS[name](x[start : start + length].copy())
            np.testing.assert_array_equal(got.view(np.int32), alone[start : start + length].view(np.int32))


@pytest.mark.parametrize("name", FLOAT64_MEANING)
def test_a_callers_fastmath_does_not_reach_in(name):
    rng = np.random.default_rng(8)
    x = (rng.normal(size=1003) * 5).astype(np.float32)
    if name == "log":
        x = np.abs(x)
    fast = _loop(getattr(math32, name), fastmath=True)
    np.testing.assert_array_equal(fast(x).view(np.int32), LOOPS[name](x).view(np.int32))


@pytest.mark.parametrize("name", FLOAT64_MEANING)
def test_loops_vectorise_and_call_no_library(name):
    apply = LOOPS[name]
    apply(np.zeros(4, np.float32))
    for text in apply.dispatcher.inspect_llvm().values():
        assert " x float>" in text, "the loop is scalar"
        assert f"@{name}f" not in text and f"@llvm.{name}" not in text
