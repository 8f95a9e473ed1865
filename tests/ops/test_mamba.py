"""One step of Mamba-2: the split of its projection and its recurrence, against their meaning and the published form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import Application, application, check, check_refused, execute, random_inputs, stored, value
from wpk.ir.errors import GraphError
from wpk.ir.types import Type, bf16, f32
from wpk.ops.operator import Array
from wpk.ops.tiles import packed_tiles

SEEDS = st.integers(0, 99)
SLOTS = st.sampled_from([1, 3])
BLOCKS = st.integers(1, 5)


def split(inner: int, channels: int, heads: int) -> Application:
    constants = f32(5 * channels + 3 * heads)
    return application("mamba2_split", f32(inner + channels + heads), bf16(3, channels), constants)


def on_grid(x: Array) -> Array:
    """f32 that bf16 holds: what rounds to it then rounds alike in float32 and float64."""
    return value(stored(x, bf16(*x.shape)), bf16(*x.shape)).astype(np.float32)


# --- mamba2_split -------------------------------------------------------------------------------------------------
@settings(max_examples=15, deadline=None)
@given(BLOCKS, BLOCKS, BLOCKS, SLOTS, SEEDS, st.sampled_from([0.1, 1.0, 12.0]))
def test_mamba2_split(inner: int, channels: int, heads: int, slots: int, seed: int, scale: float) -> None:
    app = split(8 * inner, 8 * channels, 8 * heads)
    p, ring, constants = random_inputs(app, slots, seed, scale)
    check(app, [on_grid(p), ring, -np.abs(constants)], slots, rtol=2e-5, atol=2e-5 * scale**2)


def test_mamba2_split_step_after_step_is_a_causal_convolution_over_four_steps() -> None:
    app = split(8, 16, 8)
    rng = np.random.default_rng(0)
    _, ring, constants = random_inputs(app, 2)
    ring = np.zeros_like(ring)
    rows = on_grid(rng.standard_normal((9, 2, 32)).astype(np.float32))
    taps, offset = constants[:64].reshape(4, 16).astype(np.float64), constants[64:80].astype(np.float64)
    padded = np.concatenate([np.zeros((3, 2, 16)), rows[:, :, 8:24]])
    for t in range(9):
        mixed, ring = check(app, [rows[t], ring, constants], 2, rtol=2e-5, atol=2e-5)
        wanted = offset + np.einsum("jsc,jc->sc", padded[t : t + 4], taps)
        np.testing.assert_allclose(mixed[:, 8:24], wanted / (1 + np.exp(-wanted)), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(value(ring, bf16(3, 16)), padded[t + 1 : t + 4].transpose(1, 0, 2))


def test_mamba2_split_says_step_size_decay_and_skip_of_each_head() -> None:
    """softplus is linear above 20, as PyTorch's is."""
    app = split(8, 8, 8)
    p, ring, constants = random_inputs(app, 1)
    raw = np.array([-60.0, -20.0, -1.0, 0.0, 1.0, 19.5, 20.5, 90.0], np.float32)
    p[0, 16:] = raw
    dt_bias, a, skip = np.zeros(8, np.float32), -np.linspace(0.01, 16, 8).astype(np.float32), np.arange(8, dtype="f4")
    constants[40:] = np.concatenate([dt_bias, a, skip])
    mixed, _ = check(app, [on_grid(p), ring, constants], 1, rtol=2e-5, atol=2e-5)
    by_head = mixed[0, 16:].reshape(8, 4).T
    np.testing.assert_allclose(by_head[0], np.logaddexp(0.0, raw.astype(np.float64)), rtol=1e-5)
    np.testing.assert_array_equal(by_head[0, 6:], raw[6:])
    np.testing.assert_allclose(by_head[1], np.exp(by_head[0].astype(np.float64) * a), rtol=2e-5, atol=1e-38)
    np.testing.assert_array_equal(by_head[2], skip)
    np.testing.assert_array_equal(by_head[3], 0.0)


@pytest.mark.parametrize(
    ("n", "ring", "constants"),
    [
        (24, bf16(3, 8), f32(65)),  # 25 constants of heads are no whole heads
        (24, bf16(3, 8), f32(88)),  # nothing left for z
        (25, bf16(3, 8), f32(64)),
        (24, bf16(3, 4), f32(44)),
        (24, bf16(2, 8), f32(64)),
        (24, f32(3, 8), f32(64)),
    ],
)  # fmt: skip
def test_mamba2_split_refuses_operands_that_contradict_each_other(n: int, ring: Type, constants: Type) -> None:
    application("mamba2_split", f32(24), bf16(3, 8), f32(64))
    with pytest.raises(GraphError):
        application("mamba2_split", f32(n), ring, constants)


# --- mamba2_projection --------------------------------------------------------------------------------------------
def projection(inner: int, channels: int, heads: int, k: int, shares: int, eps: float = 1e-5) -> Application:
    n = inner + channels + heads
    return application(
        "mamba2_projection", bf16(k), bf16(n * (-(-k // 64) * 64)), f32(-(-k // 128)),
        f32(5 * channels + 3 * heads), bf16(3, channels), n=n, k=k, shares=shares, eps=eps,
    )  # fmt: skip


def projection_inputs(app: Application, slots: int, seed: int) -> list[Array]:
    """A weight in tiles, and the sums of squares of another vector of that length."""
    op: Any = app.op
    x, _, squares, constants, ring = random_inputs(app, slots, seed)
    weight = np.random.default_rng(seed).standard_normal((op.n, op.k)) / np.sqrt(op.k)
    tiles = packed_tiles(stored(weight, bf16(op.n, op.k)), op.shares)
    return [x, tiles, squares**2 * min(128, op.k), -np.abs(constants), ring]


@settings(max_examples=15, deadline=None)
@given(BLOCKS, BLOCKS, BLOCKS, st.integers(1, 300), st.integers(1, 6), SLOTS, SEEDS)
def test_mamba2_projection_is_the_split_of_the_product(
    inner: int, channels: int, heads: int, k: int, shares: int, slots: int, seed: int
) -> None:
    """Near the meaning, from which rounding to bf16 may part it, and in every bit what the two operators make."""
    app = projection(8 * inner, 8 * channels, 8 * heads, k, min(shares, inner + channels + heads))
    x, tiles, squares, constants, ring = inputs = projection_inputs(app, slots, seed)
    found = check(app, inputs, slots, rtol=2.0**-7, atol=0.05)
    op: Any = app.op
    product = application(
        "tiled_matmul",
        *app.inputs[:3],
        weights=[False, True, False],
        n=op.n,
        k=k,
        shares=op.shares,
        eps=op.eps,
        roles=2,
    )
    (p,) = execute(product, [x, tiles, squares], slots)
    after = execute(split(8 * inner, 8 * channels, 8 * heads), [p, ring, constants], slots)
    for fused, unfused in zip(found, after, strict=True):
        np.testing.assert_array_equal(fused, unfused)


def test_mamba2_projection_step_after_step_carries_its_ring() -> None:
    app = projection(16, 24, 8, 130, 3)
    inputs = projection_inputs(app, 2, 0)
    inputs[4] = np.zeros_like(inputs[4])
    for seed in range(1, 6):
        inputs[0] = random_inputs(app, 2, seed)[0]
        before = inputs[4]
        _, inputs[4] = check(app, inputs, 2, rtol=2.0**-7, atol=0.05)
        np.testing.assert_array_equal(inputs[4][:, :2], before[:, 1:])


@pytest.mark.parametrize("changes", [
    {"n": 56}, {"k": 129}, {"k": 120}, {"shares": 0}, {"shares": 7}, {"eps": -1.0}, {"eps": float("nan")},
])  # fmt: skip
def test_mamba2_projection_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    app = projection(16, 24, 8, 64, 3)
    with pytest.raises(GraphError):
        application("mamba2_projection", *app.inputs, **{"n": 48, "k": 64, "shares": 3, "eps": 0.0} | changes)


# --- mamba2_step --------------------------------------------------------------------------------------------------
def step(heads: int, rows: int, groups: int) -> Application:
    mixed = 2 * heads * rows + 256 * groups + 4 * heads
    return application("mamba2_step", f32(mixed), f32(heads, rows, 128))


def step_inputs(app: Application, slots: int, seed: int) -> list[Array]:
    """Decays within (0, 1), as the split makes them."""
    mixed, state = random_inputs(app, slots, seed)
    heads = app.inputs[1].shape[0]
    by_head = mixed[:, -4 * heads :].reshape(slots, heads, 4)
    by_head[:, :, 0] = np.abs(by_head[:, :, 0])
    by_head[:, :, 1] = np.exp(-np.abs(by_head[:, :, 1]))
    return [mixed, state]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16, 24, 56, 64, 80]), SLOTS, SEEDS)
def test_mamba2_step(groups: int, per_group: int, rows: int, slots: int, seed: int) -> None:
    app = step(groups * per_group, rows, groups)
    check(app, step_inputs(app, slots, seed), slots, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("rows", "part"), [(8, 8), (40, 40), (48, 24), (56, 8), (64, 32), (80, 40), (128, 32)])
def test_a_part_of_the_state_has_at_most_40_rows_of_one_head(rows: int, part: int) -> None:
    app = step(2, rows, 1)
    assert app.op.parameters(*app.inputs) == (2, rows, 1, part)
    assert app.op.parts(*app.inputs) == 2 * rows // part


def test_mamba2_step_after_step_is_the_sum_of_decayed_outer_products() -> None:
    """The recurrence unrolled: S_t = sum_s (prod of later decays) dt_s x_s B_s^T."""
    heads, rows, groups, steps = 4, 8, 2, 6
    app = step(heads, rows, groups)
    (state,) = random_inputs(app, 1)[1:]
    state = np.zeros_like(state)
    mixed = np.stack([step_inputs(app, 1, seed)[0] for seed in range(steps)])
    at = np.cumsum([heads * rows, heads * rows, 128 * groups, 128 * groups])
    _, x, b, c, by_head = (a[:, 0] for a in np.split(mixed.astype(np.float64), at, axis=2))
    x, by_head = x.reshape(steps, heads, rows), by_head.reshape(steps, heads, 4)
    b, c = (np.repeat(v.reshape(steps, groups, 128), heads // groups, axis=1) for v in (b, c))
    for t in range(steps):
        y, state = check(app, [mixed[t], state], 1, rtol=1e-5, atol=5e-5)
        wanted = by_head[t, :, 2, None] * x[t]
        for s in range(t + 1):
            weight = by_head[s, :, 0] * np.prod(by_head[s + 1 : t + 1, :, 1], axis=0)
            wanted += (weight * np.einsum("hn,hn->h", b[s], c[t]))[:, None] * x[s]
        np.testing.assert_allclose(y[0].reshape(heads, rows), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mixed", "state"), [
    (2 * 16 + 256 + 8, (2, 8, 64)), (2 * 14 + 256 + 8, (2, 7, 128)), (2 * 16 + 200 + 8, (2, 8, 128)),
    (2 * 16 + 8, (2, 8, 128)), (2 * 24 + 2 * 256 + 12, (3, 8, 128)),
])  # fmt: skip
def test_mamba2_step_refuses_other_states(mixed: int, state: tuple[int, ...]) -> None:
    with pytest.raises(GraphError):
        application("mamba2_step", f32(mixed), f32(*state))


# --- what payloads may say ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "sound", "wrong"), [
    ("mamba2_split", (8, 16, 8), [(0, 16, 8), (8, 12, 8), (8, 16, 4), (-8, 16, 8), (8, 16, 8, 1)]),
    ("mamba2_projection", (32, 130, 2, 8, 16, 8, 2), [
        (40, 130, 2, 8, 16, 8, 2), (32, 130, 5, 8, 16, 8, 2), (32, 130, 0, 8, 16, 8, 2), (32, 0, 2, 8, 16, 8, 2),
        (32, 130, 2, 8, 20, 4, 2), (32, 130, 2, 8, 16, 8, 3), (32, 130, 2, 8, 16, 8, 2, -1), (32, 130, 2, 0, 24, 8, 2),
        (1488, 130, 8, 8, 1472, 8, 2), (32, 130, 2, 8, 16, 8, 2, 0, 1),
    ]),
    ("mamba2_step", (4, 80, 2, 40), [
        (4, 80, 3, 40), (4, 80, 2, 80), (4, 80, 2, 32), (4, 80, 2, 0), (4, 80, 0, 40), (4, 80, 2, -8), (4, 80, -2, 40),
        (4, 44, 2, 40),
    ]),
])  # fmt: skip
def test_hostile_payloads_are_refused(name: str, sound: tuple[int, ...], wrong: list[tuple[int, ...]]) -> None:
    check_refused(name, sound, wrong)
