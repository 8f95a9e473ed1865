"""Normalisations against their meanings and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.ops.operator import LIBRARY, make

FEW = settings(max_examples=12, deadline=None)
leading = st.sampled_from([(), (1,), (5,), (2, 3)])
widths = st.sampled_from([2, 3, 8, 31, 64, 257])
slot_counts = st.sampled_from([1, 3, 7])
seeds = st.integers(0, 999)


@FEW
@given(leading, widths, slot_counts, st.booleans(), st.sampled_from([0.1, 1.0, 100.0]), seeds)
def test_layer_norm(lead, d, slots, with_bias, scale, seed):
    weights = [f32(d)] * (2 if with_bias else 1)
    app = application("layer_norm", f32(*lead, d), *weights, weights=[False] + [True] * len(weights), eps=1e-3)
    check(app, slots=slots, seed=seed, scale=scale, rtol=1e-5, atol=2e-5 * scale)


@FEW
@given(leading, widths, slot_counts, st.sampled_from([0.0, 1.0]), st.sampled_from([0.1, 1.0, 100.0]), seeds)
def test_rms_norm(lead, d, slots, offset, scale, seed):
    app = application("rms_norm", f32(*lead, d), f32(d), weights=[False, True], eps=1e-6, offset=offset)
    check(app, slots=slots, seed=seed, scale=scale, rtol=1e-5, atol=1e-6)


@FEW
@given(st.sampled_from([(), (1,), (5,)]), st.sampled_from([(1, 6), (2, 6), (4, 64), (3, 27)]), slot_counts, seeds)
def test_group_norm(lead, sizes, slots, seed):
    groups, c = sizes
    app = application("group_norm", f32(*lead, c), f32(c), f32(c), weights=[False, True, True], groups=groups, eps=1e-3)
    check(app, slots=slots, seed=seed, rtol=1e-5, atol=2e-5)


def test_a_large_mean_does_not_spoil_the_variance():
    x = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32) + 1000
    app = application("layer_norm", f32(64), f32(64), weights=[False, True])
    check(app, [x, np.ones(64, np.float32)], slots=1, atol=5e-4)


def test_a_constant_row_becomes_the_bias():
    app = application("layer_norm", f32(2, 8), f32(8), f32(8))
    x, one, bias = np.full((1, 2, 8), 3, np.float32), np.ones((1, 8), np.float32), np.arange(8, dtype=np.float32)[None]
    (y,) = check(app, [x, one, bias], slots=1)
    np.testing.assert_array_equal(y[0], np.stack([bias[0], bias[0]]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(GraphError, match=r"operand 'weight' does not fit; wanted d = 8 in \[d\]; found f32\[7\]"):
        application("rms_norm", f32(3, 8), f32(7))
    with pytest.raises(GraphError, match="groups; wanted a divisor of 8 channels; found 3"):
        application("group_norm", f32(8), f32(8), f32(8), groups=3)
    with pytest.raises(GraphError, match=r"wanted \[c\] or \[t, c\]; found f32\[2,3,8\]"):
        application("group_norm", f32(2, 3, 8), f32(8), f32(8), groups=2)


@pytest.mark.oracle
def test_meanings_agree_with_torch():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((5, 24)), rng.standard_normal(24), rng.standard_normal(24)
    tx, tw, tb = (torch.from_numpy(a) for a in (x, weight, bias))

    def meaning(name, *arrays, **attrs):
        return make(LIBRARY.get(name), attrs).meaning(*arrays)

    close = dict(rtol=1e-12, atol=1e-12)
    layer = functional.layer_norm(tx, (24,), tw, tb, 1e-5).numpy()
    np.testing.assert_allclose(meaning("layer_norm", x, weight, bias, eps=1e-5), layer, **close)
    rms = functional.rms_norm(tx, (24,), tw, 1e-6).numpy()
    np.testing.assert_allclose(meaning("rms_norm", x, weight, eps=1e-6), rms, **close)
    np.testing.assert_allclose(meaning("rms_norm", x, weight - 1, eps=1e-6, offset=1.0), rms, **close)
    group = functional.group_norm(tx, 4, tw, tb, 1e-5).numpy()  # [n, c]: n frames, each on its own
    np.testing.assert_allclose(meaning("group_norm", x, weight, bias, groups=4, eps=1e-5), group, **close)
