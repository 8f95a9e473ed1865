"""Products in TF32: the numbers, the order of tiles, the product in all its roles, and who may be given what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, execute, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.kernel.tile_order import tile_offset
from wpk.ops import tf32
from wpk.ops.operator import LIBRARY, make
from wpk.ops.simd import ACTIVATIONS
from wpk.ops.tf32 import BIAS, RESIDUAL
from wpk.ops.tiles import packed_tiles, tile_sessions, unpacked_tiles

FEW = settings(max_examples=12, deadline=None)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# n, k, shares: one share and many, groups that do not divide, chunks that do not, runs of k of which there are several
CUTS = [(8, 32, 1), (8, 7, 1), (176, 100, 1), (80, 130, 3), (360, 200, 7), (64, 448, 8), (24, 321, 2)]
# frames, step of windows of 70, rows: one, two sessions a tile, a tile's, one more, many tiles of uneven length
FRAMES = [(1, 72, 64), (2, 72, 64), (31, 4, 64), (63, 8, 64), (64, 8, 64), (65, 72, 64), (65, 72, 128), (441, 12, 64)]


def matrix(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


# --- the numbers --------------------------------------------------------------------------------------------------
def test_rounding_leaves_ten_bits_and_cutting_drops_the_others():
    values = np.array([1.0, 1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-11, 1 + 3 * 2**-11, 0.0, -0.0, 3e-39], np.float32)
    rounded, cut = tf32.rounded_to_tf32(values), tf32.cut_to_tf32(values)
    step = 2.0**-10
    np.testing.assert_array_equal(rounded[:7], [1, 1 + step, 1, -1 - step, 1 + 2 * step, 0, 0])
    np.testing.assert_array_equal(cut[:7], [1, 1, 1, -1, 1 + step, 0, 0])
    for array in (rounded, cut):
        assert array.dtype == np.float32 and not (array.view(np.uint32) & 0x1FFF).any()
    assert np.signbit(rounded[6]) and np.isnan(tf32.rounded_to_tf32(np.array([np.nan]))[0])


@FEW
@given(st.integers(0, 2**32 - 1))
def test_rounding_is_to_the_nearest(seed):
    values = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    rounded = tf32.rounded_to_tf32(values).astype(np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(values))) - 10)
    assert (np.abs(rounded - values) <= spacing / 2).all()


# --- the order ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n,k,shares", CUTS)
def test_an_element_lies_where_the_order_says_and_zeros_beyond_k(n, k, shares):
    weight = tf32.rounded_to_tf32(matrix(n, k))
    packed = make(LIBRARY.get("pack_tf32_tiles"), {"shares": shares}).meaning(weight)
    assert packed.dtype == np.float32 and packed.nbytes == tf32.tile_bytes(n, k)
    at = np.array([[tile_offset(n, k, shares, 1, r, c, 4) // 4 for c in range(k)] for r in range(n)])
    assert len(np.unique(at)) == n * k
    np.testing.assert_array_equal(packed[at], weight)
    rest = np.ones(packed.size, bool)
    rest[at] = False
    assert not packed[rest].any()
    np.testing.assert_array_equal(unpacked_tiles(packed, n, k, shares, depth=tf32.DEPTH), weight)


def test_packing_rounds():
    weight = matrix(16, 40)
    pack = make(LIBRARY.get("pack_tf32_tiles"), {})
    assert pack.infer([f32(16, 40)]) == (f32(16 * 64),)
    for given_as in (weight, weight.astype(np.float64)):
        found = unpacked_tiles(pack.meaning(given_as), 16, 40, 1, depth=tf32.DEPTH)
        np.testing.assert_array_equal(found, tf32.rounded_to_tf32(weight))


def test_a_tile_has_room_for_64_or_128_rows():
    assert [tile_sessions(n) for n in (1, 56, 64, 65, 112, 1000)] == [64, 64, 64, 128, 128, 128]


# --- the product --------------------------------------------------------------------------------------------------
def product(n, k, shares=1, frames=1, step=None, rows=64, roles=0, more=0, **attrs):
    """An application of `tf32_matmul`, and a maker of its inputs from a plain matrix. more: numbers of x behind."""
    step = step or -(-k // 4) * 4
    types, weights = [f32((frames - 1) * step + k + more), f32(tf32.tile_bytes(n, k) // 4)], [False, True]
    for bit, extra, is_weight in ((BIAS, f32(n), True), (RESIDUAL, f32(frames, n), False)):
        if roles & bit:
            types.append(extra)
            weights.append(is_weight)
    named = {"n": n, "k": k, "shares": shares, "frames": frames, "step": step, "rows": rows, "roles": roles, **attrs}
    app = application("tf32_matmul", *types, weights=weights, **named)

    def inputs(slots, seed=0):
        made = random_inputs(app, slots, seed)
        made[1] = packed_tiles(tf32.rounded_to_tf32(matrix(n, k, seed)), shares, depth=tf32.DEPTH)
        return made

    return app, inputs


@pytest.mark.parametrize("n,k,shares", CUTS)
def test_tf32_matmul_in_every_cut(n, k, shares):
    app, inputs = product(n, k, shares)
    (found,) = check(app, inputs(3), 3, **CLOSE)
    x = tf32.cut_to_tf32(inputs(3)[0]).astype(np.float64)
    weight = tf32.rounded_to_tf32(matrix(n, k)).astype(np.float64)
    np.testing.assert_allclose(found[:, 0], x @ weight.T, **CLOSE)  # and not only what the operator says it means


@pytest.mark.parametrize("frames,step,rows", FRAMES)
def test_tf32_matmul_of_any_number_of_frames(frames, step, rows):
    app, inputs = product(40, 70, 2, frames, step, rows, BIAS | RESIDUAL, more=9)
    assert app.op.parts(*app.inputs) == 2 * -(-frames // rows)
    check(app, inputs(2), 2, **CLOSE)


@pytest.mark.parametrize("roles", [0, BIAS, RESIDUAL, BIAS | RESIDUAL])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_tf32_matmul_in_all_its_roles(roles, activation):
    app, inputs = product(40, 131, 2, frames=3, roles=roles, activation=activation)
    for slots in (1, 4):
        check(app, inputs(slots), slots, **CLOSE)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_tf32_matmul_activates(activation):
    app, inputs = product(16, 64, roles=BIAS, activation=activation)
    check(app, inputs(2), 2, rtol=2e-4, atol=2e-4)


@FEW
@given(st.integers(1, 300), st.integers(1, 3), st.integers(1, 70), st.integers(0, 99))
def test_a_sessions_bits_do_not_depend_on_its_company(k, shares, frames, seed):
    app, inputs = product(24, k, shares, frames, roles=BIAS)
    arrays = inputs(5, seed)
    (together,) = execute(app, arrays, 5)
    for slot in range(5):
        alone = [a if weight else a[slot : slot + 1] for a, weight in zip(arrays, app.weights, strict=True)]
        np.testing.assert_array_equal(execute(app, alone, 1)[0][0], together[slot])


@FEW
@given(st.integers(1, 200), st.integers(1, 130), st.integers(0, 99))
def test_bits_do_not_depend_on_shares_or_rows(k, frames, seed):
    found = []
    for shares, rows in ((1, 64), (3, 128)):
        app, inputs = product(24, k, shares, frames, rows=rows)
        found.append(execute(app, inputs(2, seed), 2)[0])
    np.testing.assert_array_equal(*found)


def test_bits_that_tf32_has_not_change_nothing():
    app, inputs = product(40, 131, 2)
    arrays = inputs(2)
    wanted = execute(app, arrays, 2)[0]
    arrays[0] = (arrays[0].view(np.uint32) | 0x1ABC).view(np.float32)
    arrays[1] = (arrays[1].view(np.uint32) | 0x0F0F).view(np.float32)
    np.testing.assert_array_equal(execute(app, arrays, 2)[0], wanted)


def test_what_lies_beyond_x_does_not_reach_the_sums():
    """The last chunk is padded: operands are surrounded by NaN in the harness."""
    app, inputs = product(8, 65)
    assert np.isfinite(execute(app, inputs(2), 2)[0]).all()


def test_cost_counts_products_in_tf32_and_weights_once():
    app, _ = product(40, 131, 2, frames=3, roles=BIAS | RESIDUAL)
    cost = app.op.cost(*app.inputs)
    assert cost.flops == {"tf32": 2 * 3 * 40 * 131} and cost.weight_bytes == 4 * 40 * 131 + 4 * 40
    assert cost.activation_bytes == 4 * (2 * 132 + 131) + 2 * 4 * 3 * 40


def test_a_piece_of_work_is_a_tile_of_whole_sessions_or_of_ones_frames():
    grains = {frames: product(8, 8, frames=frames)[0].op.slot_grain() for frames in (1, 2, 3, 18, 63, 65, 441)}
    assert grains == {1: 64, 2: 32, 3: 21, 18: 3, 63: 1, 65: 1, 441: 1}
    assert application("matmul", f32(8), f32(1, 8, 16), n=8, k=8, frames=1, step=8, pad=0).op.slot_grain() is None


@pytest.mark.parametrize(
    "types,attrs,wanted",
    [
        ([f32(64), f32(12 * 64)], {"n": 12, "k": 64}, "a multiple of 8 rows"),
        ([f32(64), f32(16 * 64)], {"n": 16, "k": 64, "shares": 3}, "a group of rows for each share"),
        ([f32(64), f32(184 * 64)], {"n": 184, "k": 64}, "at most 176 rows a share"),
        ([f32(200), f32(8 * 64)], {"n": 8, "k": 64, "frames": 3, "step": 66}, "a step in multiples of 4"),
        ([f32(191), f32(8 * 64)], {"n": 8, "k": 64, "frames": 3, "step": 64}, "whole windows of x"),
        ([f32(64), f32(8 * 64)], {"n": 8, "k": 64, "rows": 65}, r"rows; wanted 64 \| 128; found 65"),
        ([f32(64), f32(8 * 65)], {"n": 8, "k": 64}, r"operand 'tiles'; wanted f32\[512\]"),
        ([f32(64), f32(8 * 64)], {"n": 8, "k": 64, "activation": "swish"}, "activation; wanted none"),
        ([f32(64), f32(8 * 64)], {"n": 8, "k": 64, "roles": BIAS}, "those of roles 1; found 0"),
        ([f32(64), f32(8 * 64), f32(9)], {"n": 8, "k": 64, "roles": RESIDUAL}, "residual; wanted 8 numbers"),
    ],
)
def test_errors_say_what_was_wanted_and_found(types, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        application("tf32_matmul", *types, **attrs)


def test_what_a_body_could_not_execute_is_refused():
    """n, k, shares, frames, step, numbers of x, activation, rows, roles; x, tiles, bias, residual, y."""
    cls = LIBRARY.get("tf32_matmul")
    sound, there = (24, 130, 2, 3, 12, 154, 1, 64, BIAS | RESIDUAL), (True,) * 5

    def legal(words, present=there):
        return cls.legal(words, len(present), present)

    assert legal(sound) is None
    assert legal((*sound[:8], 0), (True, True, False, False, True)) is None
    changes = [
        (0, 0), (0, -8), (0, 12), (0, 360), (1, 0), (1, -64), (1, 131), (2, 0), (2, 4), (2, -1), (3, 0), (3, 4),
        (4, 0), (4, 10), (4, 16), (4, -4), (5, 153), (5, 0), (6, 99), (6, -1), (7, 0), (7, 65), (8, 0), (8, 1), (8, 7),
    ]  # fmt: skip
    for at, word in changes:
        assert legal((*sound[:at], word, *sound[at + 1 :])), f"parameter {at} = {word}"
    assert legal(sound, there[:4]) and legal(sound, (*there, True)) and legal(sound, (True, False, True, True, True))
    assert legal(sound, (True, True, False, True, True)) and legal(sound, (True, True, True, False, True))
