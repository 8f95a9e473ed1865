"""Overlap-add, depthwise convolution, rings, caches and attention: against their meaning, and against torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import Application, application, check, execute, random_inputs, stored
from wpk.ir.errors import GraphError
from wpk.ir.types import Type, boolean, f32, i32
from wpk.ops.operator import Array

SLOTS = st.sampled_from([1, 3, 7])
SEEDS = st.integers(0, 99)
LEADS: list[tuple[int, ...]] = [(), (1,), (5,), (64,), (65,), (3, 50), (200,)]


# --- overlap_add --------------------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 300), SLOTS, SEEDS)
def test_overlap_add(n: int, slots: int, seed: int) -> None:
    check(application("overlap_add", f32(n), f32(n), hop=seed % n + 1), slots=slots, seed=seed)


def test_overlap_add_moves_more_than_scratch_holds() -> None:
    check(application("overlap_add", f32(9000), f32(9000), hop=130), slots=1)


def test_overlap_add_of_a_stream_is_the_sum_of_the_shifted_frames() -> None:
    frames = np.random.default_rng(0).standard_normal((6, 1, 12)).astype(np.float32)
    app = application("overlap_add", f32(12), f32(12), hop=5)
    whole, buffer, out = np.zeros(12 + 5 * 5), np.zeros((1, 12), np.float32), []
    for t, frame in enumerate(frames):
        whole[5 * t : 5 * t + 12] += frame[0]
        buffer, emitted = check(app, [buffer, frame], slots=1)
        out.append(emitted[0])
    np.testing.assert_allclose(np.concatenate(out), whole[:30], atol=1e-6)


# --- depthwise convolution ----------------------------------------------------------------------------------------
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 140), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 12), st.booleans(),
    st.sampled_from(["none", "relu", "silu", "gelu"]), SLOTS, SEEDS,
)  # fmt: skip
def test_depthwise_conv1d(
    channels: int,
    taps: int,
    stride: int,
    dilation: int,
    more: int,
    biased: bool,
    activation: str,
    slots: int,
    seed: int,
) -> None:
    t = (taps - 1) * dilation + 1 + more
    operands = [f32(t, channels), f32(channels, taps), *([f32(channels)] if biased else [])]
    app = application("depthwise_conv1d", *operands, stride=stride, dilation=dilation, activation=activation)
    check(app, slots=slots, seed=seed, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("taps", "stride", "dilation"), [(1, 1, 1), (3, 1, 8), (31, 1, 1), (5, 2, 3)])
def test_depthwise_conv1d_is_that_of_torch(taps: int, stride: int, dilation: int) -> None:
    torch = pytest.importorskip("torch")
    app = application("depthwise_conv1d", f32(50, 6), f32(6, taps), f32(6), stride=stride, dilation=dilation)
    x, w, b = (a.astype(np.float64) for a in random_inputs(app, 1))
    by_channel, filters, offset = (torch.from_numpy(a) for a in (x[0].T.copy()[None], w[:, None].copy(), b))
    theirs = torch.nn.functional.conv1d(by_channel, filters, offset, stride, 0, dilation, groups=6)[0].numpy().T
    np.testing.assert_allclose(np.asarray(app.op.meaning(x[0], w, b)), theirs, atol=1e-12)


def test_depthwise_conv1d_step_by_step_is_the_whole_convolution() -> None:
    """A ring of the last 4 frames in front of each new one, as a stream runs it."""
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 3), (3, 5), (3,)))
    (whole,) = check(
        application("depthwise_conv1d", f32(13, 3), f32(3, 5), f32(3)), [np.pad(x, ((4, 0), (0, 0)))[None], w, b], 1
    )
    ring = np.zeros((1, 4, 3), np.float32)
    for t in range(9):
        window = np.concatenate([ring, x[None, t : t + 1]], axis=1)
        (y,) = check(application("depthwise_conv1d", f32(5, 3), f32(3, 5), f32(3)), [window, w, b], 1)
        np.testing.assert_array_equal(y[0, 0], whole[0, t])
        (ring,) = check(application("ring_shift", f32(4, 3), f32(1, 3)), [ring, x[None, t : t + 1]], 1)


# --- rings --------------------------------------------------------------------------------------------------------
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 12), st.sampled_from(LEADS), st.sampled_from([f32, i32, boolean]), SLOTS, SEEDS
)
def test_ring_shift(n: int, k: int, row: tuple[int, ...], kind: Callable[..., Type], slots: int, seed: int) -> None:
    check(application("ring_shift", kind(n, *row), kind(k, *row)), slots=slots, seed=seed)


def test_ring_shift_moves_more_than_scratch_holds() -> None:
    check(application("ring_shift", f32(13000), f32(441)), slots=1)
    check(application("ring_shift", f32(70, 160), f32(2, 160)), slots=1)


# --- caches -------------------------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 9), st.sampled_from(LEADS), st.sampled_from([f32, i32, boolean]), SLOTS, SEEDS)
def test_cache_append(rows: int, row: tuple[int, ...], kind: Callable[..., Type], slots: int, seed: int) -> None:
    app = application("cache_append", kind(rows, *row), kind(*row), i32())
    cache, new, _ = random_inputs(app, slots, seed)
    position = stored(np.random.default_rng(seed).integers(-1, rows + 1, slots), i32())
    check(app, [cache, new, position], slots=slots)


@pytest.mark.parametrize("position", [-(2**31), -1, 4, 2**31 - 1])
def test_a_position_outside_the_cache_writes_nothing(position: int) -> None:
    app = application("cache_append", f32(4, 3), f32(3), i32())
    cache, row, _ = random_inputs(app, 1)
    (after,) = check(app, [cache, row, stored([position], i32())], slots=1)
    np.testing.assert_array_equal(after, cache)


# --- attention ----------------------------------------------------------------------------------------------------
def attention_inputs(
    app: Application, slots: int, seed: int, positions: Array | None = None, scale: float = 1.0
) -> list[Array]:
    q, k, v, _ = random_inputs(app, slots, seed, scale)
    rows = app.inputs[1].shape[0]
    chosen = np.random.default_rng(seed).integers(0, rows, slots) if positions is None else positions
    return [q, k, v, stored(chosen, i32())]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 150),
    st.sampled_from([0.01, 1.0, 30.0]), SLOTS, SEEDS,
)  # fmt: skip
def test_attention(kv_heads: int, group: int, d: int, e: int, rows: int, scale: float, slots: int, seed: int) -> None:
    app = application(
        "attention", f32(kv_heads * group, d), f32(rows, kv_heads, d), f32(rows, kv_heads, e), i32(), scale=d**-0.5
    )
    check(app, attention_inputs(app, slots, seed, scale=scale), slots=slots, rtol=2e-4, atol=2e-5 * scale**2)


def test_attention_reads_no_row_beyond_the_position() -> None:
    app = application("attention", f32(4, 8), f32(70, 2, 8), f32(70, 2, 8), i32(), scale=0.3)
    q, k, v, position = attention_inputs(app, 4, 0, np.array([0, 31, 32, 68]))
    (wanted,) = check(app, [q, k, v, position], slots=4, rtol=1e-5, atol=1e-5)
    for slot, last in enumerate(position):
        k[slot, last + 1 :], v[slot, last + 1 :] = np.nan, np.inf
    (found,) = check(app, [q, k, v, position], slots=4, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found[0], np.repeat(v[0, 0], 2, axis=0))  # one row: the value itself


def test_attention_clips_positions_into_the_cache() -> None:
    app = application("attention", f32(2, 4), f32(5, 1, 4), f32(5, 1, 4), i32(), scale=0.5)
    inside, outside = (attention_inputs(app, 2, 0, np.array(p)) for p in ([0, 4], [-(2**31), 2**31 - 1]))
    outside[:3] = [np.stack([a[0], a[1]]) for a in inside[:3]]
    np.testing.assert_array_equal(check(app, inside, slots=2)[0], check(app, outside, slots=2)[0])


def test_attention_survives_scores_beyond_the_exponential() -> None:
    app = application("attention", f32(2, 4), f32(40, 1, 4), f32(40, 1, 4), i32(), scale=1.0)
    inputs = attention_inputs(app, 1, 0, np.array([39]))
    inputs[0] *= np.float32(1e4)
    check(app, inputs, slots=1, rtol=1e-4, atol=1e-4)


def test_attention_with_nothing_to_divide_by_leaves_later_sessions_alone() -> None:
    app = application("attention", f32(2, 4), f32(5, 1, 4), f32(5, 1, 4), i32(), scale=1.0)
    q, k, v, position = attention_inputs(app, 2, 0, np.array([4, 4]))
    wanted = execute(app, [q[1:], k[1:], v[1:], position[1:]], 1)[0][0]
    q[0], k[0] = 3e38, -3e38  # every score is minus infinity
    found = execute(app, [q, k, v, position], 2)[0]
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1], wanted)


@pytest.mark.oracle
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (10, 2), (6, 1)])
def test_attention_is_that_of_torch(heads: int, kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    app = application("attention", f32(heads, 16), f32(30, kv_heads, 16), f32(30, kv_heads, 16), i32(), scale=0.2)
    q, k, v, _ = random_inputs(app, 1)
    q, k, v = (torch.from_numpy(a[0].astype(np.float64)) for a in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None], k[:20].transpose(0, 1)[None], v[:20].transpose(0, 1)[None], scale=0.2, enable_gqa=True
    )[0, :, 0]  # fmt: skip
    ours = np.asarray(app.op.meaning(q.numpy(), k.numpy(), v.numpy(), np.int64(19)))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: application("overlap_add", f32(8), f32(8), hop=9), "hop"),
        (lambda: application("overlap_add", f32(8), f32(7), hop=2), "frame"),
        (lambda: application("depthwise_conv1d", f32(4, 2), f32(2, 5)), "reaches"),
        (lambda: application("depthwise_conv1d", f32(4, 2), f32(3, 2)), "weight"),
        (lambda: application("depthwise_conv1d", f32(4, 2), f32(2, 2), dilation=0), "dilation"),
        (lambda: application("depthwise_conv1d", f32(4, 2), f32(2, 2), activation="swish"), "activation"),
        (lambda: application("ring_shift", f32(4, 2), f32(1, 3)), "fit the ring"),
        (lambda: application("ring_shift", f32(4, 2), i32(1, 2)), "fit the ring"),
        (lambda: application("ring_shift", f32(4), f32()), "fit the ring"),
        (lambda: application("cache_append", f32(4, 2), f32(3), i32()), "row"),
        (lambda: application("cache_append", f32(4, 2), f32(2), f32()), "position"),
        (lambda: application("attention", f32(5, 8), f32(9, 2, 8), f32(9, 2, 8), i32(), scale=1.0), "heads"),
        (lambda: application("attention", f32(482, 1), f32(9, 2, 1), f32(9, 2, 1), i32(), scale=1.0), "at most 481"),
        (lambda: application("attention", f32(4, 8), f32(9, 2, 7), f32(9, 2, 7), i32(), scale=1.0), "'k'"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        wrong()
