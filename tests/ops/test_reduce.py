"""Reductions and softmax against their meanings and PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check
from wpk.ir.errors import GraphError
from wpk.ir.types import f32, i32
from wpk.ops.operator import LIBRARY, make

FEW = settings(max_examples=12, deadline=None)
shapes = st.tuples(st.sampled_from([(), (1,), (5,), (2, 3)]), st.sampled_from([1, 2, 7, 8, 9, 16, 63, 500])).map(
    lambda pair: (*pair[0], pair[1])
)
slot_counts = st.sampled_from([1, 3, 7])
NAMES = ["sum", "mean", "max", "min", "argmax", "softmax", "log_softmax"]


@pytest.mark.parametrize("name", NAMES)
def test_bodies_mean_what_they_say(name):
    @FEW
    @given(shapes, slot_counts, st.sampled_from([1e-3, 1.0, 50.0]), st.integers(0, 999))
    def holds(shape, slots, scale, seed):
        # A sum's error is that of its largest partial sum; log_softmax's that of the largest logit.
        atol = 2e-6 * scale * math.sqrt(shape[-1]) + 1e-6
        check(application(name, f32(*shape)), slots=slots, scale=scale, seed=seed, rtol=2e-5, atol=atol)

    holds()


@pytest.mark.parametrize("name,kept", [(n, "softmax" in n) for n in NAMES])
def test_the_last_axis_goes_or_stays(name, kept):
    assert application(name, f32(2, 3, 5)).results[0].shape == ((2, 3, 5) if kept else (2, 3))
    assert application(name, f32(5)).results[0].shape == ((5,) if kept else ())
    assert (application(name, f32(5)).results[0].dtype.value == "i32") == (name == "argmax")
    with pytest.raises(GraphError, match="wrong dtype; wanted f32; found i32"):
        application(name, i32(5))


@pytest.mark.parametrize("name", ["max", "min", "argmax"])
@pytest.mark.parametrize(
    "row",
    [
        [1, 3, 3, 2], [-1, -3, -3, -2], [0.0, -0.0, 0.0, -0.0], [math.inf, 1, math.inf, 2], [-math.inf] * 4,
        [1, math.nan, 5, math.nan], [math.nan, 1, 2, 3], [3e38, -3e38, 1, 0],
    ],
)  # fmt: skip
def test_extremes(name, row):
    check(application(name, f32(4)), [np.array([row], np.float32)], slots=1, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("row", [[1e4, 0, -1e4], [3e38, 0, 0], [-math.inf, 0, 1], [-1e30, -1e30, -1e30], [7, 7, 7]])
def test_softmax_of_large_logits(name, row):
    check(application(name, f32(3)), [np.array([row], np.float32)], slots=1, rtol=1e-6)


def test_a_long_sum_stays_accurate():
    x = np.full((1, 40000), 0.1, np.float32)
    (y,) = check(application("sum", f32(40000)), [x], slots=1, rtol=1e-5)
    assert abs(float(y[0]) - 4000) < 0.05


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_meanings_agree_with_torch(name):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((4, 3, 17)) * 5
    oracle = {"max": torch.amax, "min": torch.amin}.get(name, getattr(torch, name))
    wanted = oracle(torch.from_numpy(x), dim=-1).numpy()
    np.testing.assert_allclose(make(LIBRARY.get(name), {}).meaning(x), wanted, rtol=1e-12)
