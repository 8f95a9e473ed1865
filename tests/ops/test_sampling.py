"""Nucleus masking against its meaning, at ties and extremes, and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, check_body, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.ops.operator import LIBRARY, make
from wpk.ops.payload import encode_parameter

FEW = settings(max_examples=12, deadline=None)


def clear(x, p):
    """Whether no partial mass is so near 1 - p that the rounding of exp could turn it."""
    e = np.sort(np.exp(x - x.max(-1, keepdims=True)), -1)
    return np.abs(np.cumsum(e, -1) / e.sum(-1, keepdims=True) - (1 - p)).min() > 1e-5


@FEW
@given(
    st.sampled_from([(1,), (2,), (9,), (5, 64), (1024,)]), st.sampled_from([0.95, 0.5, 0.01, 1.0]),
    st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 999),
)  # fmt: skip
def test_top_p(shape, p, scale, seed):
    app = application("top_p", f32(*shape), p=p)
    inputs = random_inputs(app, 3, seed, scale)
    if p == 1.0 or clear(inputs[0].astype(float), p):
        check(app, inputs, 3, rtol=0, atol=0)


@pytest.mark.parametrize(
    "row,p,kept",
    [
        ([0, 0, 0, 0], 0.5, [2, 3]), ([0, 0, 0, 0], 0.4, [2, 3]), ([0, 0, 0, 0], 1e-6, [3]),
        ([0, 0, 0, 0], 1.0, [0, 1, 2, 3]),
        ([3, 0.0, -0.0, 3], 0.49, [0, 3]), ([3, 0.0, -0.0, 3], 0.4, [3]),
        ([-0.0, 0.0, -9, 0.0], 0.9, [0, 1, 3]), ([-5, -50, -5], 0.4, [2]),
        ([-3e38, 3e38, 0], 0.9, [1]), ([-math.inf, 1, -math.inf], 0.9, [1]), ([1e-40, -1e-40, 0], 0.6, [0, 2]),
    ],
)  # fmt: skip
def test_ties_are_dropped_from_the_front_and_one_always_stays(row, p, kept):
    (y,) = check(application("top_p", f32(len(row)), p=p), [np.array([row], np.float32)], 1, rtol=0, atol=0)
    assert np.flatnonzero(y[0] > -math.inf).tolist() == kept


def test_numbers_that_are_none_do_no_harm():
    rows = [[math.nan, 1, 2], [math.inf, 1, math.inf], [math.nan] * 3, [-math.inf] * 3, [2, math.nan, 1]]
    check_body(application("top_p", f32(3), p=0.9), [np.array(rows, np.float32)], len(rows))


def test_p_is_a_probability():
    for p in (0.0, 1.5, -1.0):
        with pytest.raises(GraphError, match="wanted 0 < p <= 1"):
            application("top_p", f32(3), p=p)
    words = (1, 3, encode_parameter(1.5), 0, 0, 0, 0, 0, 0)
    assert "within what it may be" in str(LIBRARY.get("top_p").legal(words, 2, (True, True)))


@pytest.mark.oracle
def test_it_is_what_transformers_drops():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    x = np.random.default_rng(0).standard_normal((20, 50)) * 2
    for p in (0.95, 0.5):
        wanted = transformers.TopPLogitsWarper(p)(None, torch.tensor(x)).numpy()
        np.testing.assert_array_equal(make(LIBRARY.get("top_p"), {"p": p}).meaning(x), wanted)
