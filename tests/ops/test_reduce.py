"""Reductions and softmax against their meanings and PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, check_body, meaning, random_inputs, stored, value
from wpk.ir.errors import GraphError
from wpk.ir.types import bf16, f32, i32
from wpk.ops.operator import LIBRARY, make
from wpk.ops.payload import encode_parameter
from wpk.ops.tiles import packed_tiles, part_rows, squares_of, tile_bytes

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


# --- argmax of a tiled product ------------------------------------------------------------------------------------
def projection(n, k, shares, scaled=True):
    types = [bf16(k), bf16(tile_bytes(n, k) // 2), *([f32(squares_of(k))] if scaled else [])]
    return application("argmax_projection", *types, n=n, k=k, shares=shares, eps=1e-5)


def rows_of(weight):
    """Float values [n, k] as they are stored in bf16."""
    return stored(weight, bf16(*weight.shape))


@pytest.mark.parametrize("n,k,shares", [(8, 64, 1), (8, 7, 1), (80, 130, 3), (360, 200, 7), (184, 65, 23)])
@pytest.mark.parametrize("scaled", [True, False])
def test_argmax_of_a_tiled_product(n, k, shares, scaled):
    app, slots = projection(n, k, shares, scaled), 3
    inputs = random_inputs(app, slots)
    weight = rows_of(np.random.default_rng(1).standard_normal((n, k)))
    inputs[1] = packed_tiles(weight, shares)
    if scaled:
        inputs[2] = np.abs(inputs[2])
    (found,) = check_body(app, inputs, slots)
    logits = value(inputs[0], bf16(slots, k)) @ value(weight, bf16(n, k)).T
    if scaled:
        logits /= np.sqrt(inputs[2].astype(np.float64).sum(1, keepdims=True) / k + 1e-5)
    for slot in range(slots):
        for share in range(shares):
            lo, hi = part_rows(n, shares, 0, share)
            row = found[slot, share, 1].view(np.int32)
            assert row == lo + np.argmax(logits[slot, lo:hi])
            np.testing.assert_allclose(found[slot, share, 0], logits[slot, row], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[..., 1], meaning(app, inputs, slots)[0][..., 1].astype(np.float32))
    (place,) = check(application("argmax_merge", f32(shares, 2)), [found], slots)
    np.testing.assert_array_equal(place, np.argmax(logits, axis=1))


def test_the_first_of_equal_rows_wins_and_a_nan_never_does():
    n, k, shares = 32, 64, 2
    app = projection(n, k, shares, scaled=False)
    for better, row in (((5, 20), 5), ((9, 7, 31), 7), ((31,), 31)):
        weight = np.zeros((n, k))
        weight[list(better)] = 1.0
        weight[[0, 17]] = np.nan
        tiles = packed_tiles(rows_of(weight), shares)
        (found,) = check_body(app, [stored(np.ones((1, k)), bf16()), tiles], 1)
        (place,) = check(application("argmax_merge", f32(shares, 2)), [found], 1)
        assert place.tolist() == [row]
    nothing = packed_tiles(rows_of(np.full((n, k), np.nan)), shares)
    (found,) = check_body(app, [stored(np.ones((1, k)), bf16()), nothing], 1)
    assert found[0, :, 0].tolist() == [-np.inf] * 2 and found[0, :, 1].view(np.int32).tolist() == [0, 16]
    assert check(application("argmax_merge", f32(shares, 2)), [found], 1)[0].tolist() == [0]


def test_projections_that_cannot_be_packed_or_run_are_refused():
    with pytest.raises(GraphError, match="argmax_projection: a matrix that cannot be packed; wanted at most 176 rows"):
        projection(184, 64, 1)
    with pytest.raises(GraphError, match=r"argmax_projection: sums of squares; wanted f32\[1\]; found f32\[2\]"):
        application("argmax_projection", bf16(64), bf16(8 * 64), f32(2), n=8, k=64)
    cls, eps, there = LIBRARY.get("argmax_projection"), encode_parameter(1e-5), (True,) * 4
    assert cls.legal((24, 130, 2, 2, eps, 0, 0, 0, 0), 4, there) is None
    for words in (
        (12, 130, 2, 2, eps), (24, 130, 4, 2, eps), (24, 130, 0, 2, eps), (24, 130, 2, 1, eps), (24, 130, 2, 0, eps),
        (360, 130, 2, 2, eps), (24, 0, 2, 0, eps), (24, 130, 2, 2, encode_parameter(-1.0)),
    ):  # fmt: skip
        assert cls.legal((*words, 0, 0, 0, 0), 4, there), words
    assert LIBRARY.get("argmax_merge").legal((0, *[0] * 8), 2, (True, True))


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_meanings_agree_with_torch(name):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((4, 3, 17)) * 5
    oracle = {"max": torch.amax, "min": torch.amin}.get(name, getattr(torch, name))
    wanted = oracle(torch.from_numpy(x), dim=-1).numpy()
    np.testing.assert_allclose(make(LIBRARY.get(name), {}).meaning(x), wanted, rtol=1e-12)
