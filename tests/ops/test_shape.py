"""Layout operators and constants: exact copies, whatever the bits mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, meaning
from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16, f32, i32
from wpk.ops.operator import LIBRARY, make
from wpk.ops.shape import collapse

FEW = settings(max_examples=30, deadline=None)
kinds = st.sampled_from([DType.F32, DType.I32, DType.BOOL])
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
slot_counts = st.sampled_from([1, 3, 7])


def exact(app, slots, seed=0):
    return check(app, slots=slots, seed=seed, rtol=0, atol=0)


@FEW
@given(shapes, kinds, slot_counts, st.data())
def test_slice(shape, kind, slots, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    start = data.draw(st.integers(0, shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, shape[axis]))
    app = application("slice", Type(kind, shape), axis=axis, start=start, stop=stop)
    exact(app, slots)
    offset = app.op.view(*app.inputs)
    assert (offset is None) == (math.prod(shape[: axis % len(shape)]) > 1)
    if offset is not None:
        x = np.arange(math.prod(shape)).reshape(shape)
        taken = x.ravel()[offset // 4 : offset // 4 + app.results[0].size]
        np.testing.assert_array_equal(taken, app.op.meaning(x).ravel())


@FEW
@given(shapes, kinds, slot_counts, st.data())
def test_concat(shape, kind, slots, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=6))
    at = axis % len(shape)
    app = application("concat", *(Type(kind, (*shape[:at], n, *shape[at + 1 :])) for n in sizes), axis=axis)
    assert app.results[0].shape[at] == sum(sizes)
    exact(app, slots)


@FEW
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), slot_counts, st.booleans())
def test_bf16_is_moved_by_words(outer, a, b, slots, cut):
    app = application("concat", bf16(outer, 2 * a), bf16(outer, 2 * b), axis=1)
    exact(app, slots)
    app = application("slice", bf16(outer, 2 * (a + b)), axis=-1, start=2 * a if cut else 0, stop=2 * (a + b))
    exact(app, slots)
    assert (app.op.view(*app.inputs) is None) == (outer > 1)
    exact(application("copy", bf16(outer, 2 * a)), slots)
    exact(application("copy", bf16(300, 2)), slots)
    assert application("reshape", bf16(outer, 2 * a), shape=(2, outer * a)).op.view(bf16(outer, 2 * a)) == 0


@pytest.mark.parametrize(
    "name,type,attrs",
    [
        ("copy", bf16(3), {}),
        ("slice", bf16(2, 6), {"axis": 1, "start": 1, "stop": 3}),
        ("slice", bf16(2, 6), {"axis": 1, "start": 2, "stop": 5}),
        ("slice", bf16(2, 5), {"axis": 1, "start": 0, "stop": 2}),
        ("slice", bf16(6), {"axis": 0, "start": 1, "stop": 4}),
    ],
)
def test_half_a_word_of_a_session_cannot_be_moved(name, type, attrs):
    app = application(name, type, **attrs)
    assert app.op.view(type) is None
    with pytest.raises(GraphError, match=r"a word is cut; wanted an even number of bf16 elements"):
        app.op.parameters(type)


def test_weights_in_bf16_are_cut_anywhere():
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    cut = application("slice", bf16(2, 6), weights=[True], axis=1, start=1, stop=4)
    assert cut.results == (bf16(2, 3),)
    np.testing.assert_array_equal(cut.op.meaning(x), x[:, 1:4])


def test_concat_of_a_weight_and_a_session_value():
    exact(application("concat", f32(2, 3), f32(4, 3), axis=0, weights=[True, False]), 3)


@FEW
@given(shapes, kinds, slot_counts, st.data())
def test_transpose(shape, kind, slots, data):
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    app = application("transpose", Type(kind, shape), axes=axes)
    exact(app, slots)
    if app.op.view(*app.inputs) is not None:
        x = np.arange(math.prod(shape)).reshape(shape)
        np.testing.assert_array_equal(app.op.meaning(x).ravel(), x.ravel())


def test_transpose_joins_axes_that_move_together():
    assert collapse((2, 3, 4, 5, 6), (2, 3, 4, 0, 1)) == ([120, 6], [1, 120])
    exact(application("transpose", f32(2, 3, 4, 5, 6), axes=(2, 3, 4, 0, 1)), 1)
    with pytest.raises(GraphError, match="too many axes that move apart; wanted <= 4"):
        application("transpose", f32(2, 2, 2, 2, 2), axes=(4, 3, 2, 1, 0))


@FEW
@given(shapes, kinds, slot_counts, st.sampled_from(["zeros", "edge", "reflect"]), st.data())
def test_pad(shape, kind, slots, mode, data):
    most = shape[0] - 1 if mode == "reflect" else 7
    before, after = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
    exact(application("pad", Type(kind, shape), before=before, after=after, mode=mode), slots)


@FEW
@given(shapes, kinds, slot_counts)
def test_copy(shape, kind, slots):
    exact(application("copy", Type(kind, shape)), slots)


def test_copies_keep_every_bit():
    """NaN payloads, signed zeros and denormals are words like all others."""
    words = np.array([[0x7FC00001, 0x7F800001, -1, -(2**31), 1, 0]], np.int32)
    whole = {"axis": 0, "start": 0, "stop": 6}
    for name, attrs in (("copy", {}), ("transpose", {"axes": (0,)}), ("pad", {}), ("slice", whole)):
        (y,) = check(application(name, i32(6), **attrs), [words], slots=1)
        np.testing.assert_array_equal(y, words)


def test_reshape_is_a_view():
    app = application("reshape", bf16(3, 4), shape=(2, 6))
    assert app.op.view(*app.inputs) == 0 and app.results == (bf16(2, 6),)
    x = np.arange(12).reshape(1, 3, 4).astype(np.uint16)
    np.testing.assert_array_equal(meaning(app, [x], 1)[0].ravel() != 0, x.ravel() != 0)


@FEW
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), slot_counts)
def test_max_pool1d(t, c, window, stride, slots):
    if window <= t:
        exact(application("max_pool1d", f32(t, c), window=window, stride=stride), slots)


def test_max_pool1d_hands_nan_on():
    x = np.array([[[1], [np.nan], [3], [4], [-np.inf]]], np.float32)
    (y,) = check(application("max_pool1d", f32(5, 1), window=2), [x], slots=1)
    assert np.isnan(y[0, :2]).all() and y[0, 2:, 0].tolist() == [4, 4]


@pytest.mark.oracle
def test_meanings_agree_with_torch():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    x = np.random.default_rng(0).standard_normal((9, 4))
    by_channel = torch.from_numpy(x.T[None].copy())

    def meaning_of(name, **attrs):
        return make(LIBRARY.get(name), attrs).meaning(x)

    pooled = functional.max_pool1d(by_channel, 3, 2)[0].numpy().T
    np.testing.assert_array_equal(meaning_of("max_pool1d", window=3, stride=2), pooled)
    for ours, theirs in (("zeros", "constant"), ("edge", "replicate"), ("reflect", "reflect")):
        padded = functional.pad(by_channel, (3, 2), mode=theirs)[0].numpy().T
        np.testing.assert_array_equal(meaning_of("pad", before=3, after=2, mode=ours), padded)


# --- constants ----------------------------------------------------------------------------------------------------
def test_constants():
    app = application("constant", shape=(2, 3), values=(1, 2, 3, 4, 5, 6.5))
    assert app.results == (f32(2, 3),)
    np.testing.assert_array_equal(app.op.meaning(), [[1, 2, 3], [4, 5, 6.5]])
    app = application("constant", shape=(), values=(7,), dtype="i32")
    assert app.results == (i32(),) and app.op.meaning() == 7 and app.op.meaning().dtype.kind == "i"
    app = application("full", shape=(4,), value=2)
    np.testing.assert_array_equal(app.op.meaning(), [2.0] * 4)


@pytest.mark.parametrize(
    "name,types,attrs,wanted",
    [
        ("reshape", [f32(3, 4)], {"shape": (5, 2)}, r"wanted a shape of 12 elements for f32\[3,4\]; found \(5, 2\)"),
        ("slice", [f32(3, 4)], {"axis": 1, "start": 2, "stop": 2}, r"wanted 0 <= start < stop <= 4 .*; found 2, 2"),
        ("slice", [f32(3, 4)], {"axis": 2, "start": 0, "stop": 1}, r"wanted -2 <= axis < 2 for f32\[3,4\]; found 2"),
        ("transpose", [bf16(3, 2)], {"axes": (1, 0)}, r"wrong dtype; wanted bool\|f32\|i32; found bf16"),
        ("concat", [f32(3)], {"axis": 0}, "wrong number of operands; wanted 2 to 6; found 1"),
        ("concat", [f32(3)] * 7, {"axis": 0}, "wrong number of operands; wanted 2 to 6; found 7"),
        ("concat", [f32(3, 4), f32(3, 5)], {"axis": 0}, r"wanted like f32\[3,4\]; found f32\[3,5\]"),
        ("concat", [f32(3), i32(3)], {"axis": 0}, r"wanted like f32\[3\]; found i32\[3\]"),
        ("concat", [f32(3, 4), f32(3)], {"axis": 1}, r"wanted like f32\[3,4\]; found f32\[3\]"),
        ("transpose", [f32(3, 4)], {"axes": (0, 0)}, r"wanted a permutation of 0..1 .*; found \(0, 0\)"),
        ("pad", [f32(3)], {"before": 3, "mode": "reflect"}, r"wanted 0 <= rows <= 2 for f32\[3\]; found 3, 0"),
        ("pad", [f32(3)], {"mode": "wrap"}, r"wanted zeros \| edge \| reflect; found wrap"),
        ("pad", [f32()], {}, r"wanted \[t, ...\]; found f32\[\]"),
        ("max_pool1d", [f32(3, 4)], {"window": 4}, r"wanted >= 4; found f32\[3,4\]"),
        ("constant", [], {"shape": (3,), "values": (1.0,)}, r"wanted 3 for f32\[3\]; found 1"),
        ("full", [], {"shape": (3,), "value": 1.0, "dtype": "f64"}, r"wanted f32 \| i32 \| bool; found f64"),
    ],
)
def test_errors_say_what_was_wanted_and_found(name, types, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        application(name, *types, **attrs)
