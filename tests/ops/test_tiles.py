"""Products with bf16 weights in tiles: the order of tiles, the product in all its roles, and who may be given what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, execute, random_inputs, stored, value
from wpk.ir.errors import GraphError
from wpk.ir.types import bf16, f32
from wpk.kernel.tile_order import tile_offset
from wpk.ops import tiles
from wpk.ops.operator import LIBRARY, make
from wpk.ops.payload import encode_parameter
from wpk.ops.simd import ACTIVATIONS
from wpk.ops.tiles import BIAS, SQUARES

FEW = settings(max_examples=12, deadline=None)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ROUNDED = {"rtol": 8e-3, "atol": 1e-4}  # a sum in f32 may round to the next bf16
# n, k, shares, splits: one share and many, groups that do not divide, chunks that do not, one group in all
CUTS = [
    (8, 64, 1, 0),
    (8, 7, 1, 1),
    (176, 100, 1, 0),
    (80, 130, 3, 0),
    (360, 200, 7, 3),
    (64, 448, 8, 7),
    (24, 321, 2, 2),
]


def matrix(n, k, seed=0):
    """Stored bf16 [n, k]."""
    return stored(np.random.default_rng(seed).standard_normal((n, k)), bf16(n, k))


# --- the order ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n,k,shares,splits", CUTS)
def test_an_element_lies_where_the_order_says_and_zeros_beyond_k(n, k, shares, splits):
    weight = matrix(n, k)
    packed = tiles.packed_tiles(weight, shares, splits)
    assert packed.dtype == np.uint16 and packed.nbytes == tiles.tile_bytes(n, k)
    at = np.array([[tile_offset(n, k, shares, max(splits, 1), r, c) // 2 for c in range(k)] for r in range(n)])
    assert len(np.unique(at)) == n * k
    np.testing.assert_array_equal(packed[at], weight)
    rest = np.ones(packed.size, bool)
    rest[at] = False
    assert not packed[rest].any()
    np.testing.assert_array_equal(tiles.unpacked_tiles(packed, n, k, shares, splits), weight)


def test_packing_moves_values_of_any_dtype():
    weight = value(matrix(40, 70), bf16(40, 70))
    pack = make(LIBRARY.get("pack_tiles"), {"shares": 2, "splits": 2})
    for dtype in (np.float64, np.float32):
        packed = pack.meaning(weight.astype(dtype))
        assert packed.dtype == dtype and packed.shape == pack.infer([bf16(40, 70)])[0].shape
        np.testing.assert_array_equal(stored(packed, bf16()), pack.meaning(stored(weight, bf16())))


@FEW
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 9))
def test_parts_cover_the_rows_in_order(groups, shares, splits):
    if shares <= groups <= 22 * shares:
        ranges = [tiles.part_rows(8 * groups, shares, splits, p) for p in range(shares * max(splits, 1))]
        assert all(hi - lo in (8 * (groups // shares), 8 * -(-groups // shares)) for lo, hi in ranges)
        assert sorted({r for lo, hi in ranges for r in range(lo, hi)}) == list(range(8 * groups))


# --- the product --------------------------------------------------------------------------------------------------
def product(n, k, shares=1, splits=0, roles=0, **attrs):
    """An application of `tiled_matmul`, and a maker of its inputs from a plain matrix."""
    types, weights = [bf16(k), bf16(tiles.tile_bytes(n, k) // 2)], [False, True]
    for bit, extra, is_weight in ((BIAS, f32(n), True), (SQUARES, f32(tiles.squares_of(k)), False)):
        if roles & bit:
            types.append(extra)
            weights.append(is_weight)
    named = {"n": n, "k": k, "shares": shares, "splits": splits, "roles": roles, **attrs}
    app = application("tiled_matmul", *types, weights=weights, **named)

    def inputs(slots, seed=0):
        made = random_inputs(app, slots, seed)
        made[1] = tiles.packed_tiles(matrix(n, k, seed), shares, splits)
        if roles & SQUARES:
            made[-1] = np.abs(made[-1]) + np.float32(k)
        return made

    return app, inputs


@pytest.mark.parametrize("n,k,shares,splits", CUTS)
def test_tiled_matmul_in_every_cut(n, k, shares, splits):
    app, inputs = product(n, k, shares, splits)
    (found,) = check(app, inputs(3), 3, **CLOSE)
    x, weight = value(inputs(3)[0], bf16(3, k)), value(matrix(n, k), bf16(n, k))
    total = found.astype(np.float64).sum(1) if splits else found
    np.testing.assert_allclose(total, x @ weight.T, **CLOSE)  # and not only what the operator says it means


@pytest.mark.parametrize("roles", [0, BIAS, SQUARES, BIAS | SQUARES])
@pytest.mark.parametrize("out", ["f32", "bf16"])
def test_tiled_matmul_in_all_its_roles(roles, out):
    app, inputs = product(40, 131, 2, roles=roles, out=out, activation="silu", eps=1e-5)
    for slots in (1, 4):
        check(app, inputs(slots), slots, **(ROUNDED if out == "bf16" else CLOSE))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_tiled_matmul_activates(activation):
    app, inputs = product(16, 64, roles=BIAS, activation=activation)
    check(app, inputs(2), 2, rtol=2e-4, atol=2e-4)


def test_splits_may_be_scaled():
    app, inputs = product(32, 300, 2, 3, SQUARES, eps=0.5)
    check(app, inputs(3), 3, **CLOSE)


@FEW
@given(st.integers(1, 200), st.integers(1, 3), st.integers(0, 1), st.integers(0, 99))
def test_a_sessions_bits_do_not_depend_on_its_company(k, shares, splits, seed):
    app, inputs = product(24, k, shares, splits, 0 if splits else BIAS)
    arrays = inputs(5, seed)
    (together,) = execute(app, arrays, 5)
    for slot in range(5):
        alone = [a if weight else a[slot : slot + 1] for a, weight in zip(arrays, app.weights, strict=True)]
        np.testing.assert_array_equal(execute(app, alone, 1)[0][0], together[slot])


def test_what_lies_beyond_x_does_not_reach_the_sums():
    """The last chunk is padded: operands are surrounded by NaN in the harness."""
    app, inputs = product(8, 65)
    assert np.isfinite(execute(app, inputs(2), 2)[0]).all()


def test_cost_counts_weights_once_in_bf16():
    app, _ = product(40, 131, 2, roles=BIAS | SQUARES, out="bf16")
    cost = app.op.cost(*app.inputs)
    assert cost.flops == {"bf16": 2 * 40 * 131} and cost.weight_bytes == 2 * 40 * 131 + 4 * 40
    assert cost.activation_bytes == 2 * 131 + 4 * 2 + 2 * 40


@pytest.mark.parametrize(
    "types,attrs,wanted",
    [
        ([bf16(64), bf16(12 * 64)], {"n": 12, "k": 64}, "a multiple of 8 rows"),
        ([bf16(64), bf16(16 * 64)], {"n": 16, "k": 64, "shares": 3}, "a group of rows for each share"),
        ([bf16(64), bf16(184 * 64)], {"n": 184, "k": 64}, "at most 176 rows a share"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "splits": 2}, "a chunk of 64 elements for each split"),
        ([bf16(65), bf16(8 * 64)], {"n": 8, "k": 64}, r"operand 'x' does not fit; wanted bf16\[64\]"),
        ([bf16(64), bf16(8 * 65)], {"n": 8, "k": 64}, r"operand 'tiles'; wanted bf16\[512\]"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "activation": "swish"}, "activation; wanted none"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "out": "f16"}, r"out; wanted f32 \| bf16"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "splits": 1, "out": "bf16"}, "no bias, activation or rounding"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "roles": BIAS}, "those of roles 1; found 0"),
        ([bf16(64), bf16(8 * 64), f32(2)], {"n": 8, "k": 64, "roles": SQUARES}, r"squares; wanted f32\[1\]"),
        ([bf16(64), bf16(8 * 64)], {"n": 8, "k": 64, "eps": -1.0}, "eps; wanted >= 0"),
    ],
)
def test_errors_say_what_was_wanted_and_found(types, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        application("tiled_matmul", *types, **attrs)


def test_what_a_body_could_not_execute_is_refused():
    """n, k, shares, splits, activation, out, numbers of squares, eps; x, tiles, bias, squares, y."""
    cls = LIBRARY.get("tiled_matmul")
    sound, there = (24, 130, 2, 0, 1, 1, 2, 1e-5, 0), (True,) * 5
    split = (24, 130, 2, 3, 0, 0, 2, 1e-5, 0)
    bare = (True, True, False, True, True)

    def legal(words, present=there):
        return cls.legal([encode_parameter(w) for w in words], len(present), present)

    assert legal(sound) is None and legal(split, bare) is None
    changes = [
        (0, 0), (0, -8), (0, 12), (0, 360), (1, 0), (1, -64), (1, 300), (2, 0), (2, 4), (2, -1), (3, -1), (3, 1),
        (4, 99), (4, -1), (5, 2), (5, -1), (6, 0), (6, 3), (6, -1), (7, -1.0), (7, float("nan")), (8, 1),
    ]  # fmt: skip
    for at, word in changes:
        assert legal((*sound[:at], word, *sound[at + 1 :])), f"parameter {at} = {word}"
    for at, word in ((3, 4), (4, 1), (5, 1), (6, 0), (0, 1 << 30), (1, 1 << 30)):
        assert legal((*split[:at], word, *split[at + 1 :]), bare), f"parameter {at} = {word}"
    assert legal(split), "a bias of splits"
    assert legal(sound, bare[:4]) and legal(sound, (*there, True)) and legal(sound, (True, True, True, False, True))
