"""Attention over a bf16 cache: rows into it, ranges of rows read apart, and their merge, against meaning and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import (
    Application,
    application,
    check,
    check_refused,
    execute,
    meaning,
    random_inputs,
    stored,
    value,
)
from wpk.ir.errors import GraphError
from wpk.ir.types import Type, bf16, f32, i32
from wpk.ops.operator import Array
from wpk.ops.tiles import packed_tiles

SEEDS = st.integers(0, 99)
SLOTS = st.sampled_from([1, 3])
GROUPS = st.integers(1, 8)  # query heads a key head


def positions(rows: int, slots: int, seed: int) -> Array:
    """Where sessions stand: at the start, in the middle, at the last row, beyond it, and before it all."""
    chosen = np.array([0, rows // 2, rows - 1, rows, -1, 2**31 - 1, -(2**31)])
    return stored(np.random.default_rng(seed).permutation(chosen)[:slots], i32())


# --- qkv_split ----------------------------------------------------------------------------------------------------
def split(heads: int, groups: int, width: int, rows: int, scale: float = 0.25) -> Application:
    n = (heads + 2 * groups) * width
    return application("qkv_split", f32(n), bf16(rows, 2, groups, width), i32(), scale=scale)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), GROUPS, st.sampled_from([4, 8, 24]), st.integers(1, 9), SLOTS, SEEDS)
def test_qkv_split(groups: int, per_group: int, width: int, rows: int, slots: int, seed: int) -> None:
    width = 8 if groups * width % 8 else width
    app = split(groups * per_group, groups, width, rows)
    p, cache, _ = random_inputs(app, slots, seed)
    where = positions(rows, slots, seed)
    q, after = check(app, [p, cache, where], slots, rtol=0, atol=0)
    for slot, position in enumerate(where):
        inside = 0 <= position < rows
        changed = np.flatnonzero((after[slot] != cache[slot]).any((1, 2, 3)))
        assert changed.tolist() == ([position] if inside else [])
        if inside:
            np.testing.assert_array_equal(
                after[slot, position].reshape(-1), stored(p[slot, q.shape[1] :], bf16(2 * groups * width))
            )


@pytest.mark.parametrize(("n", "cache", "position"), [
    (40, bf16(4, 2, 1, 7), i32()), (16, bf16(4, 2, 1, 8), i32()), (40, bf16(4, 1, 1, 8), i32()),
    (56, bf16(4, 2, 2, 8), i32()), (40, bf16(4, 2, 8), i32()), (40, f32(4, 2, 1, 8), i32()),
    (12, bf16(4, 2, 1, 4), i32()), (16, bf16(4, 2, 1, 4), i32()), (40, bf16(4, 2, 1, 8), f32()),
])  # fmt: skip
def test_qkv_split_refuses_rows_that_are_no_heads(n: int, cache: Type, position: Type) -> None:
    application("qkv_split", f32(40), bf16(4, 2, 1, 8), i32())
    with pytest.raises(GraphError):
        application("qkv_split", f32(n), cache, position)


# --- qkv_projection -----------------------------------------------------------------------------------------------
def projection(heads: int, groups: int, width: int, rows: int, k: int, shares: int) -> Application:
    n = (heads + 2 * groups) * width
    return application(
        "qkv_projection", bf16(k), bf16(n * (-(-k // 64) * 64)), f32(-(-k // 128)), bf16(rows, 2, groups, width), i32(),
        n=n, k=k, shares=shares, eps=1e-5, scale=0.25,
    )  # fmt: skip


def projection_inputs(app: Application, slots: int, seed: int) -> list[Array]:
    """A weight in tiles, and the sums of squares of another vector of that length."""
    op: Any = app.op
    x, _, squares, cache, _ = random_inputs(app, slots, seed)
    weight = np.random.default_rng(seed).standard_normal((op.n, op.k)) / np.sqrt(op.k)
    tiles = packed_tiles(stored(weight, bf16(op.n, op.k)), op.shares)
    return [x, tiles, squares**2 * min(128, op.k), cache, positions(cache.shape[1], slots, seed)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 2), GROUPS, st.integers(1, 9), st.integers(1, 300), st.integers(1, 6), SLOTS, SEEDS)
def test_qkv_projection_is_the_split_of_the_product(
    groups: int, per_group: int, rows: int, k: int, shares: int, slots: int, seed: int
) -> None:
    """Near the meaning, from which rounding to bf16 may part it, and in every bit what the two operators make."""
    shares = min(shares, (per_group + 2) * groups)
    app = projection(groups * per_group, groups, 8, rows, k, shares)
    x, tiles, squares, cache, where = inputs = projection_inputs(app, slots, seed)
    found = check(app, inputs, slots, rtol=2.0**-7, atol=1e-5)
    op: Any = app.op
    product = application(
        "tiled_matmul", *app.inputs[:3], weights=[False, True, False], n=op.n, k=k, shares=shares, eps=op.eps, roles=2
    )
    (p,) = execute(product, [x, tiles, squares], slots)
    after = execute(split(groups * per_group, groups, 8, rows), [p, cache, where], slots)
    for fused, unfused in zip(found, after, strict=True):
        np.testing.assert_array_equal(fused, unfused)


def test_shares_of_queries_write_no_byte_of_the_cache_and_shares_of_keys_none_of_the_query() -> None:
    app = projection(6, 1, 8, 5, 64, 8)
    parameters = [int(p) for p in app.op.parameters(*app.inputs)[:7]] + [0, 0]
    writes = [[app.cls.part_writes(parameters, place, share, share + 1) for place in (5, 6)] for share in range(8)]
    assert [query == () for query, _ in writes] == [False] * 6 + [True] * 2
    assert [row == () for _, row in writes] == [True] * 6 + [False] * 2
    check(app, projection_inputs(app, 3, 0), 3, rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("changes", [
    {"n": 72}, {"k": 65}, {"shares": 0}, {"shares": 9}, {"eps": -1.0}, {"eps": float("inf")},
])  # fmt: skip
def test_qkv_projection_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    app = projection(6, 1, 8, 5, 64, 8)
    with pytest.raises(GraphError):
        application("qkv_projection", *app.inputs, **{"n": 64, "k": 64, "shares": 8, "eps": 0.0} | changes)


# --- kv_attention -------------------------------------------------------------------------------------------------
def attention(heads: int, groups: int, width: int, rows: int, name: str = "kv_attention", **attrs: Any) -> Application:
    return application(name, bf16(heads * width), bf16(rows, 2, groups, width), i32(), heads=heads, **attrs)


def attention_inputs(app: Application, slots: int, seed: int) -> list[Array]:
    q, cache, _ = random_inputs(app, slots, seed)
    scaled = value(q, app.inputs[0]) / np.sqrt(app.inputs[1].shape[3])
    return [stored(scaled, bf16(*scaled.shape)), cache, positions(app.inputs[1].shape[0], slots, seed)]


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3), GROUPS, st.integers(1, 40), st.integers(1, 150), st.integers(0, 9),
    st.sampled_from(["f32", "bf16"]), SLOTS, SEEDS,
)  # fmt: skip
def test_kv_attention(
    groups: int, per_group: int, width: int, rows: int, splits: int, out: str, slots: int, seed: int
) -> None:
    app = attention(groups * per_group, groups, width, rows, out=out, splits=splits)
    tolerance = 2e-5 if out == "f32" else 2.0**-8
    check(app, attention_inputs(app, slots, seed), slots, rtol=tolerance, atol=tolerance)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), GROUPS, st.integers(1, 40), st.integers(1, 150), st.integers(1, 20), SLOTS, SEEDS)
def test_attention_parts(
    groups: int, per_group: int, width: int, rows: int, splits: int, slots: int, seed: int
) -> None:  # fmt: skip
    app = attention(groups * per_group, groups, width, rows, "attention_parts", splits=splits)
    check(app, attention_inputs(app, slots, seed), slots, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("rows", "position", "splits", "wanted"), [
    (64, 0, 3, [0, 0, 1]), (64, 16, 3, [8, 8, 1]), (64, 63, 3, [16, 24, 24]), (64, 99, 2, [32, 32]), (9, 8, 1, [9]),
])  # fmt: skip
def test_ranges_start_at_units_of_rows_and_end_with_the_session(
    rows: int, position: int, splits: int, wanted: list[int]
) -> None:
    """A query of zeros gives every row the score 0: the totals count the rows."""
    app = attention(2, 1, 4, rows, "attention_parts", splits=splits)
    inputs = [np.zeros((1, 8), np.uint16), random_inputs(app, 1)[1], stored([position], i32())]
    (parts,) = check(app, inputs, 1, rtol=1e-6, atol=1e-6)
    assert parts[0, :, 0, -1].tolist() == wanted
    for count, part in zip(wanted, parts[0], strict=True):
        np.testing.assert_array_equal(part[:, -2], 0.0 if count else np.float32(-1e30))


def test_a_result_is_the_same_however_many_ranges_it_is_made_of() -> None:
    found = []
    for splits in (1, 2, 5, 30):
        app = attention(6, 2, 16, 100, splits=splits)
        inputs = attention_inputs(app, 3, 4)
        inputs[2] = stored([1, 63, 99], i32())
        found.append(check(app, inputs, 3, rtol=2e-5, atol=2e-5)[0])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-5, atol=1e-6)


def test_no_row_beyond_the_position_is_read() -> None:
    app = attention(4, 2, 8, 70, splits=3)
    q, cache, _ = attention_inputs(app, 4, 0)
    where = stored([0, 31, 32, 68], i32())
    (wanted,) = check(app, [q, cache, where], 4, rtol=2e-5, atol=2e-5)
    for slot, last in enumerate(where):
        cache[slot, last + 1 :] = 0x7FC0
    (found,) = check(app, [q, cache, where], 4, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(found, wanted)


def test_scores_beyond_the_exponential_are_survived() -> None:
    app = attention(2, 1, 4, 40, splits=2)
    q, cache, _ = random_inputs(app, 1, scale=60.0)
    check(app, [q, cache, stored([39], i32())], 1, rtol=1e-3, atol=1e-3)


@pytest.mark.oracle
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (10, 2), (8, 1)])
def test_kv_attention_is_that_of_torch(heads: int, groups: int) -> None:
    torch = pytest.importorskip("torch")
    app = attention(heads, groups, 16, 30, splits=2)
    inputs = [*random_inputs(app, 1)[:2], stored([19], i32())]
    q, cache = (torch.from_numpy(value(a[0], t)) for a, t in zip(inputs[:2], app.inputs[:2], strict=True))
    k, v = cache[:20, 0].transpose(0, 1)[None], cache[:20, 1].transpose(0, 1)[None]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.reshape(heads, 16)[None, :, None], k, v, scale=1.0, enable_gqa=True
    )
    np.testing.assert_allclose(meaning(app, inputs, 1)[0][0], theirs.reshape(-1).numpy(), atol=1e-12)


@pytest.mark.parametrize("attrs", [
    {"heads": 3}, {"heads": 0}, {"heads": 5}, {"heads": 4, "out": "i32"}, {"heads": 4, "splits": -1},
])  # fmt: skip
def test_kv_attention_refuses_heads_that_do_not_fit(attrs: dict[str, Any]) -> None:
    application("kv_attention", bf16(32), bf16(4, 2, 2, 8), i32(), heads=4)
    with pytest.raises(GraphError):
        application("kv_attention", bf16(32), bf16(4, 2, 2, 8), i32(), **attrs)


# --- what payloads may say ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "sound", "wrong"), [
    ("qkv_split", (4, 2, 8, 5), [
        (3, 2, 8, 5), (1, 1, 7, 5), (6, 1, 4, 5), (4, 0, 8, 5), (4, 2, 8, 0), (0, 2, 8, 5),
        (4, 2, 8, 5, 0x7FC00000), (4, -2, 8, 5), (4, 2, 8, 5, 0, 1),
    ]),
    ("qkv_projection", (130, 2, 4, 2, 8, 5, 2), [
        (130, 2, 3, 2, 8, 5, 2), (130, 9, 4, 2, 8, 5, 2), (130, 0, 4, 2, 8, 5, 2), (0, 2, 4, 2, 8, 5, 2),
        (130, 2, 4, 2, 8, 0, 2), (130, 2, 4, 2, 8, 5, 3), (130, 2, 4, 2, 8, 5, 2, -1), (130, 2, 1, 1, 7, 5, 2),
        (130, 2, 2, 1, 4, 5, 2),
        (130, 2, 4, 2, 8, 5, 2, 0, 0x7FC00000), (130, 2, 100, 2, 8, 5, 2), (130, 2, 4, -2, 8, 5, 2),
    ]),
    ("attention_parts", (4, 2, 8, 5, 3), [
        (3, 2, 8, 5, 3), (4, 0, 8, 5, 3), (4, 2, 8, 5, 0), (4, 2, 8, 0, 3), (4, 2, 1 << 20, 5, 3), (4000, 1, 8, 5, 3),
        (4, 2, 8, 5, 3, 1), (-4, -2, 8, 5, 3),
    ]),
    ("attention_merge", (4, 8, 3, 1), [(4, 8, 3, 2), (4, 8, 3, -1), (4, 8, 0, 1), (0, 8, 3, 1), (4, 8, 3, 1, 1)]),
])  # fmt: skip
def test_hostile_payloads_are_refused(name: str, sound: tuple[int, ...], wrong: list[tuple[int, ...]]) -> None:
    check_refused(name, sound, wrong)
