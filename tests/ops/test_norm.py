"""Normalisations against their meanings and PyTorch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, check_body, compare, execute, meaning, random_inputs, value
from wpk.ir.errors import GraphError
from wpk.ir.types import DType, bf16, f32
from wpk.ops.operator import LIBRARY, make
from wpk.ops.payload import encode_parameter

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


# --- before and after products in bf16 ----------------------------------------------------------------------------
@FEW
@given(st.sampled_from([1, 3, 128, 129, 300, 512]), st.integers(0, 3), st.sampled_from([0.0, 1.0]), slot_counts, seeds)
def test_rms_norm_terms(d, partials, offset, slots, seed):
    types = [f32(d), f32(d), *([f32(partials, d)] if partials else [])]
    app = application("rms_norm_terms", *types, weights=[False, True, False][: len(types)], offset=offset)
    inputs = random_inputs(app, slots, seed)
    found, wanted = check_body(app, inputs, slots), meaning(app, inputs, slots)
    exact = [i for i, t in enumerate(app.results) if t.dtype is DType.F32]
    only = dataclasses.replace(app, results=tuple(app.results[i] for i in exact))
    compare(only, [found[i] for i in exact], [wanted[i] for i in exact], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value(found[1], app.results[1]), wanted[1], rtol=2**-7, atol=1e-6)


def test_rms_norm_terms_add_partial_sums_in_their_order():
    app = application("rms_norm_terms", f32(3), f32(3), f32(2, 3))
    x, partials = np.full((1, 3), 1e8, np.float32), np.array([[[3.0] * 3, [-1e8] * 3]], np.float32)
    total, scaled, squares = execute(app, [x, np.ones(3, np.float32), partials], 1)
    assert (total == 0.0).all() and not scaled.any() and squares[0, 0] == 0.0, "1e8 + 3 is 1e8 in f32"


@pytest.mark.parametrize("d", [256, 200])
def test_terms_before_a_product_are_the_norm_before_it(d):
    rng = np.random.default_rng(0)
    x, weight, matrix = rng.standard_normal(d), rng.standard_normal(d), rng.standard_normal((16, d))
    total, scaled, squares = make(LIBRARY.get("rms_norm_terms"), {}).meaning(x, weight)
    scale = 1 / np.sqrt(squares.sum() / d + 1e-5)
    wanted = matrix @ make(LIBRARY.get("rms_norm"), {"eps": 1e-5}).meaning(x, weight)
    np.testing.assert_array_equal(total, x)
    np.testing.assert_allclose(matrix @ scaled * scale, wanted, atol=2**-8 * np.sqrt(d) * 3)


@FEW
@given(st.sampled_from([(1, 5), (2, 6), (8, 64), (3, 585)]), st.sampled_from(["f32", "bf16"]), slot_counts, seeds)
def test_gated_rms_norm(sizes, out, slots, seed):
    groups, d = sizes
    attrs = {"groups": groups, "eps": 1e-5, "out": out}
    d = groups * (d // groups)
    app = application("gated_rms_norm", f32(d), f32(d), f32(d), **attrs)
    check(app, slots=slots, seed=seed, **({"rtol": 8e-3} if out == "bf16" else {"rtol": 1e-5, "atol": 1e-5}))


@pytest.mark.parametrize(
    "name,types,attrs,wanted",
    [
        ("gated_rms_norm", [f32(6)] * 3, {"groups": 4}, "groups; wanted a divisor of 6; found 4"),
        ("gated_rms_norm", [f32(6)] * 3, {"out": "f16"}, r"out; wanted f32 \| bf16; found f16"),
        ("gated_rms_norm", [f32(6), f32(5), f32(6)], {}, "operand 'gate' does not fit"),
        ("rms_norm_terms", [f32(6), f32(6), f32(2, 5)], {}, "operand 'partials' does not fit"),
        ("rms_norm_terms", [bf16(6), f32(6)], {}, "operand 'x' has the wrong dtype"),
    ],
)
def test_what_surrounds_a_product_says_what_was_wanted(name, types, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        application(name, *types, **attrs)


def test_terms_that_a_body_could_not_execute_are_refused():
    terms, gated = LIBRARY.get("rms_norm_terms"), LIBRARY.get("gated_rms_norm")
    eps, negative = encode_parameter(1e-5), encode_parameter(-1.0)
    all_there, bare = (True,) * 6, (True, True, False, True, True, True)
    assert terms.legal((300, 2, 0, *[0] * 6), 6, all_there) is None
    assert terms.legal((300, 0, 0, *[0] * 6), 6, bare) is None
    for words, present in (
        ((0, 2, 0), all_there), ((-1, 2, 0), all_there), ((300, 0, 0), all_there), ((300, -2, 0), all_there),
        ((300, 2, 0), bare), ((300, 2, encode_parameter(float("nan"))), all_there), ((300, 2, 0), all_there[:5]),
    ):  # fmt: skip
        assert terms.legal((*words, *[0] * 6), len(present), present), words
    assert gated.legal((12, 4, eps, 1, *[0] * 5), 4, (True,) * 4) is None
    broken = [(12, 5, eps, 1), (12, 0, eps, 1), (0, 1, eps, 0), (12, -4, eps, 1), (12, 4, eps, 2), (12, 4, negative, 1)]
    for words in broken:
        assert gated.legal((*words, *[0] * 5), 4, (True,) * 4), words
