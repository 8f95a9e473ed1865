"""Folding: what goes into a product and what must not, and that a graph means the same before and after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.scheduler.graphs import SELECTION, Meant, agree, builder, dense, fused, only, session_ops, tiled, weights_of
from wpk.ir.check import check_graph
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.text import print_graph
from wpk.ir.types import bf16, f32
from wpk.ops import LIBRARY
from wpk.ops.linear import RESIDUAL
from wpk.ops.simd import ACTIVATIONS
from wpk.ops.tiles import BIAS, SQUARES
from wpk.scheduler.fuse import fuse
from wpk.scheduler.ownership import own_rows
from wpk.scheduler.rewrite import expand
from wpk.scheduler.target import find_target

BF16 = 0.03  # what roundings in other places may change, relative to the greatest output


# --- matmul -------------------------------------------------------------------------------------------------------
PLAIN_ACTIVATIONS = [n for n in ACTIVATIONS if LIBRARY.versions(n)]


@pytest.mark.parametrize("name", PLAIN_ACTIVATIONS)
def test_an_activation_is_folded_into_the_product(name: str) -> None:
    made = fused(lambda g: g.output("y", g.op(name, dense(g, g.input("x", f32(2, 6))))))
    product = only(made, "matmul")
    if product.attributes["activation"] == "none":  # one with attributes of its own
        assert only(made, name).attrs
    else:
        assert product.attributes["activation"] == name and name not in session_ops(made)


def test_most_activations_fold() -> None:
    assert {"relu", "tanh", "sigmoid"} <= set(PLAIN_ACTIVATIONS)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_residual_is_folded_whichever_side_it_is_on(swapped: bool) -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(6))
        pair = (dense(g, x), x)
        g.output("y", g.op("add", *(pair[::-1] if swapped else pair)))

    made = fused(build)
    assert session_ops(made) == ["matmul", "reshape"]
    assert only(made, "matmul").attributes["roles"] == RESIDUAL


def test_an_activation_and_then_a_residual_are_folded_together() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(6))
        g.output("y", g.op("add", x, g.op("relu", dense(g, x))))

    made = fused(build)
    assert session_ops(made) == ["matmul", "reshape"]
    assert only(made, "matmul").attributes["activation"] == "relu"


def test_of_two_products_that_are_added_one_takes_the_other() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(6))
        g.output("y", g.op("add", dense(g, x), dense(g, g.op("tanh", x))))

    made = fused(build)
    assert "add" not in session_ops(made) and session_ops(made).count("matmul") == 2


def test_a_reshape_in_between_is_looked_through() -> None:
    def build(g: GraphBuilder) -> None:
        flat = g.op("reshape", dense(g, g.input("x", f32(2, 6))), shape=(12,))
        g.output("y", g.op("add", g.op("relu", flat), g.input("v", f32(12))))

    assert session_ops(fused(build)) == ["matmul", "reshape"]


def _read_twice(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(6)))
    g.output("y", g.op("mul", g.op("relu", h), h))


def _product_read_twice(g: GraphBuilder) -> None:
    """A convolution is a product without a view behind it."""
    h = g.op("conv1d", g.input("x", f32(3, 6)), g.weight("w", f32(6, 6, 2)))
    g.output("y", g.op("mul", g.op("relu", h), h))


def _product_seen_twice(g: GraphBuilder) -> None:
    h = g.op("conv1d", g.input("x", f32(3, 6)), g.weight("w", f32(6, 6, 2)))
    g.output("y", g.op("relu", g.op("reshape", h, shape=(12,))))
    g.output("z", g.op("abs", g.op("reshape", h, shape=(6, 2))))


def _view_read_twice(g: GraphBuilder) -> None:
    flat = g.op("reshape", dense(g, g.input("x", f32(2, 6))), shape=(12,))
    g.output("y", g.op("mul", g.op("relu", flat), flat))


def _view_shown(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(2, 6)))
    g.output("h", g.op("reshape", h, shape=(12,)))
    g.output("y", g.op("relu", h))


def _shown(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(6)))
    g.output("h", h)
    g.output("y", g.op("relu", h))


def _kept(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(6)))
    g.register("r", f32(6))
    g.update("r", h)
    g.output("y", g.op("relu", h))


def _ring_rows(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(2, 6)))
    g.ring("r", 3, f32(6))
    g.update("r", h)
    g.output("y", g.op("relu", h))


def _sliced(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(2, 6)))
    g.output("y", g.op("relu", g.op("slice", h, axis=0, start=0, stop=1)))


def _activated_already(g: GraphBuilder) -> None:
    g.output("y", g.op("relu", dense(g, g.input("x", f32(6)), activation="tanh")))


def _has_attributes(g: GraphBuilder) -> None:
    g.output("y", g.op("leaky_relu", dense(g, g.input("x", f32(6))), slope=0.3))


def _after_the_residual(g: GraphBuilder) -> None:
    x = g.input("x", f32(6))
    g.output("y", g.op("relu", g.op("add", dense(g, x), x)))


def _cache_passes(g: GraphBuilder) -> None:
    x, cache = g.input("x", f32(6)), g.cache("c", f32(6))
    h = dense(g, g.op("reshape", cache, shape=(2, 2, 6)))
    g.append("c", x)
    g.output("y", g.op("relu", h))


def _view_passes(g: GraphBuilder) -> None:
    """Product and append each see the state through a view of their own."""
    x, flat = g.input("x", f32(6)), g.register("r", f32(24))
    seen, taken = (g.op("reshape", flat, shape=(4, 6)) for _ in range(2))
    h = dense(g, seen)
    g.update("r", g.op("reshape", g.op("cache_append", taken, x, g.position()), shape=(24,)))
    g.output("y", g.op("relu", h))


def _broadcast(g: GraphBuilder) -> None:
    g.output("y", g.op("add", dense(g, g.input("x", f32(2, 6))), g.input("v", f32(6))))


def _broadcast_product(g: GraphBuilder) -> None:
    g.output("y", g.op("add", dense(g, g.input("v", f32(6))), g.input("x", f32(2, 6))))


def _weight_added(g: GraphBuilder) -> None:
    g.output("y", g.op("add", dense(g, g.input("x", f32(6))), g.weight("r", f32(6))))


def _doubled(g: GraphBuilder) -> None:
    h = dense(g, g.input("x", f32(6)))
    g.output("y", g.op("add", h, h))


def _residual_shown(g: GraphBuilder) -> None:
    x = g.input("x", f32(6))
    h = dense(g, x)
    g.output("h", h)
    g.output("y", g.op("add", h, x))


def _second_residual(g: GraphBuilder) -> None:
    x = g.input("x", f32(6))
    g.output("y", g.op("add", g.op("add", dense(g, x), x), g.op("tanh", x)))


def _cache_passes_residual(g: GraphBuilder) -> None:
    x, cache = g.input("x", f32(6)), g.cache("c", f32(6))
    h = dense(g, cache)
    g.output("y", g.op("add", h, g.op("abs", g.append("c", x))))


UNFUSED: dict[Callable[[GraphBuilder], None], str] = {
    _read_twice: "relu", _product_read_twice: "relu", _product_seen_twice: "relu", _view_read_twice: "relu",
    _view_shown: "relu", _shown: "relu", _kept: "relu", _ring_rows: "relu", _sliced: "relu",
    _activated_already: "relu", _has_attributes: "leaky_relu", _after_the_residual: "relu", _cache_passes: "relu",
    _view_passes: "relu", _broadcast: "add", _broadcast_product: "add", _weight_added: "add", _doubled: "add",
    _residual_shown: "add", _second_residual: "add", _cache_passes_residual: "add",
}  # fmt: skip


@pytest.mark.parametrize("build", UNFUSED, ids=lambda f: f.__name__.strip("_"))
def test_what_must_not_fuse_does_not(build: Callable[[GraphBuilder], None]) -> None:
    assert session_ops(fused(build)).count(UNFUSED[build]) == 1


@pytest.mark.parametrize("build", [_second_residual, _after_the_residual])
def test_a_product_that_has_its_residual_takes_in_nothing_more(build: Callable[[GraphBuilder], None]) -> None:
    made = fused(build)
    assert session_ops(fuse(made, SELECTION)) == session_ops(made)


# --- tiled products -----------------------------------------------------------------------------------------------
def norm(g: GraphBuilder, x: Value, name: str = "norm", **attrs: float) -> Value:
    return g.op("rms_norm", x, g.weight(name, f32(x.type.shape[-1])), **attrs)  # type: ignore[no-any-return]


def rounded(build: Callable[[GraphBuilder], object]) -> Graph:
    return fused(build, BF16)


def outline(graph: Graph) -> list[str]:
    """A step's nodes as `results = operator operands`, weights by name, without attributes."""
    names = {p.value.id: p.name for p in (*graph.inputs, *graph.weights)} | {s.value.id: s.name for s in graph.states}
    for node in (n for n in graph.nodes if n.weight):
        names[node.outputs[0].id] = names[node.inputs[0].id]
    lines = []
    for number, node in enumerate(n for n in graph.nodes if not n.weight):
        for value, letter in zip(node.outputs, "abc", strict=False):
            names[value.id] = f"{number}{letter if len(node.outputs) > 1 else ''}"
        lines.append(
            f"{names[node.outputs[0].id].rstrip('abc')} = {node.op} {' '.join(names[v.id] for v in node.inputs)}"
        )
    return lines + [f"{p.name} = {names[p.value.id]}" for p in graph.outputs]


def _hybrid(g: GraphBuilder) -> None:
    """A Mamba-2 block, an attention block, a feed-forward block and a head."""
    x = g.input("x", f32(128))
    inner, channels, heads = 64, 64 + 256, 8
    window, state = g.register("conv", bf16(3, channels)), g.register("ssm", f32(heads, 8, 128))
    rows = tiled(g, norm(g, x, "norm0"), inner + channels + heads, "in_proj")
    mixed, window = g.op("mamba2_split", rows, window, g.weight("constants", f32(5 * channels + 3 * heads)))
    y, state = g.op("mamba2_step", mixed, state)
    gate = g.op("slice", mixed, axis=0, start=0, stop=inner)
    y = g.op("gated_rms_norm", y, gate, g.weight("gated", f32(inner)), groups=2)
    g.update("conv", window)
    g.update("ssm", state)
    x = g.op("add", x, tiled(g, y, 128, "out_proj"))
    rows = tiled(g, norm(g, x, "norm1"), 128, "qkv")
    query, cache = g.op("qkv_split", rows, g.cache("kv", bf16(2, 2, 16)), g.position(), scale=0.25)
    g.replace("kv", cache)
    x = g.op("add", x, tiled(g, g.op("kv_attention", query, cache, g.position(), heads=4), 128, "o_proj"))
    h = g.op("relu2", tiled(g, norm(g, x, "norm2"), 256, "up"))
    x = g.op("add", x, tiled(g, h, 128, "down"))
    g.output("token", g.op("argmax", tiled(g, norm(g, x, "norm_f"), 512, "head")))


def test_a_hybrid_model_becomes_a_phase_a_product_and_one_between_any_two() -> None:
    """The whole of what folding is for: read it."""
    g = builder()
    _hybrid(g)
    assert outline(fuse(expand(g.build(), SELECTION), SELECTION)) == [
        "0 = rms_norm_terms x norm0",  # 0a: the residual stream, 0b: x * weight in bf16, 0c: sums of squares
        "1 = mamba2_projection 0b in_proj 0c constants conv",
        "2 = mamba2_step 1a ssm",
        "3 = slice 1a",
        "4 = gated_rms_norm 2a 3 gated",
        "5 = tiled_matmul 4 out_proj",
        "6 = rms_norm_terms x norm1 5",
        "7 = increment position",
        "8 = qkv_projection 6b qkv 6c kv position",
        "9 = attention_parts 8a 8b position",
        "10 = attention_merge 9",
        "11 = tiled_matmul 10 o_proj",
        "12 = rms_norm_terms 6a norm2 11",
        "13 = tiled_matmul 12b up 12c",
        "14 = tiled_matmul 13 down",
        "15 = rms_norm_terms 12a norm_f 14",
        "16 = argmax_projection 15b head 15c",
        "17 = argmax_merge 16",
        "token = 17",
    ]


def test_the_text_of_a_folded_block() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(64))
        h = g.op("relu2", tiled(g, norm(g, x, "norm", eps=1e-6), 72, "up"))
        x = g.op("add", x, tiled(g, h, 64, "down"))
        g.output("y", x)
        g.output("z", tiled(g, norm(g, x, "norm_f", eps=1e-5), 8, "head"))

    assert print_graph(rounded(build)).splitlines()[1:-1] == [
        '  input %8: f32[64] "x"',
        '  weight %0: f32[64] "norm"',
        '  weight %1: bf16[72,64] "up"',
        '  weight %2: bf16[64,72] "down"',
        '  weight %3: f32[64] "norm_f"',
        '  weight %4: bf16[8,64] "head"',
        "  %5: bf16[4608] = pack_tiles@1(%1) {shares=1, splits=0}",
        "  %6: bf16[8192] = pack_tiles@1(%2) {shares=1, splits=0}",
        "  %7: bf16[512] = pack_tiles@1(%4) {shares=1, splits=0}",
        "  %9: f32[64], %10: bf16[64], %11: f32[1] = rms_norm_terms@1(%8, %0) {offset=0.0}",
        '  %12: bf16[72] = tiled_matmul@1(%10, %5, %11) {activation="relu2", eps=1e-06, k=64, n=72, out="bf16", '
        "roles=2, shares=1, splits=0}",
        '  %13: f32[1,64] = tiled_matmul@1(%12, %6) {activation="none", eps=0.0, k=72, n=64, out="f32", roles=0, '
        "shares=1, splits=1}",
        "  %14: f32[64], %15: bf16[64], %16: f32[1] = rms_norm_terms@1(%8, %3, %13) {offset=0.0}",
        '  %17: f32[8] = tiled_matmul@1(%15, %7, %16) {activation="none", eps=1e-05, k=64, n=8, out="f32", roles=2, '
        "shares=1, splits=0}",
        '  output %14 "y"',
        '  output %17 "z"',
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_an_activation_goes_into_a_tiled_product(bias: bool) -> None:
    def build(g: GraphBuilder) -> None:
        x = g.op("cast", g.input("x", f32(64)), dtype="bf16")
        tiles = g.op("pack_tiles", g.weight("w", bf16(16, 64)))
        extra = [g.weight("b", f32(16))] if bias else []
        y = g.op("tiled_matmul", x, tiles, *extra, n=16, k=64, roles=BIAS if bias else 0)
        g.output("y", g.op("silu", y))

    made = rounded(build)
    assert (
        session_ops(made) == ["cast", "tiled_matmul"] and only(made, "tiled_matmul").attributes["activation"] == "silu"
    )


def test_views_of_all_the_bytes_are_looked_through() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(1, 64))
        h = g.op("reshape", norm(g, x), shape=(64,))
        h = g.op("relu", g.op("reshape", tiled(g, h, 16, "up"), shape=(2, 8)))
        h = g.op("reshape", g.op("cast", h, dtype="bf16"), shape=(16,))
        y = g.op("reshape", tiled(g, h, 64, "down", cast=False), shape=(1, 64))
        g.output("z", tiled(g, g.op("reshape", norm(g, g.op("add", x, y), "norm_f"), shape=(64,)), 8, "head"))

    made = rounded(build)
    assert [op for op in session_ops(made) if op != "reshape"] == [
        "rms_norm_terms", "tiled_matmul", "tiled_matmul", "rms_norm_terms", "tiled_matmul",
    ]  # fmt: skip
    assert [n.attributes["splits"] for n in made.nodes if n.op == "tiled_matmul"] == [0, 1, 0]


def test_a_norm_may_feed_several_products_and_a_sum_several_norms() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(64))
        x = g.op("add", tiled(g, x, 64, "first"), x)
        one, other = norm(g, x, "one"), norm(g, x, "other", offset=1.0)
        g.output("a", tiled(g, one, 8, "a"))
        g.output("b", tiled(g, one, 8, "b"))
        g.output("c", tiled(g, other, 8, "c"))

    made = rounded(build)
    assert session_ops(made) == ["cast", "tiled_matmul", *["rms_norm_terms"] * 2, *["tiled_matmul"] * 3]
    first, second = (n for n in made.nodes if n.op == "rms_norm_terms")
    assert len(first.inputs) == 3 and second.inputs[0] is first.outputs[0] and len(second.inputs) == 2
    assert second.attributes["offset"] == 1.0


def test_partial_sums_of_a_product_after_a_norm_are_scaled_too() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(64))
        x = g.op("add", x, tiled(g, norm(g, x, "one", offset=1.0), 64, "w"))
        g.output("y", x)
        g.output("z", tiled(g, norm(g, x, "other"), 8, "head"))

    first, _ = (n for n in rounded(build).nodes if n.op == "tiled_matmul")
    assert first.attributes["splits"] == 1 and first.attributes["roles"] == SQUARES


def test_a_sum_that_is_shown_or_kept_still_folds() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.op("add", g.register("r", f32(64)), tiled(g, g.input("x", f32(64)), 64, "first"))
        g.update("r", x)
        g.output("sum", x)
        g.output("y", tiled(g, norm(g, x), 8, "head"))

    assert session_ops(rounded(build)) == ["cast", "tiled_matmul", "rms_norm_terms", "tiled_matmul"]


# --- what keeps its place -----------------------------------------------------------------------------------------
def _normed_for_others(g: GraphBuilder) -> None:
    h = norm(g, g.input("x", f32(64)))
    g.output("h", h)
    g.output("y", tiled(g, h, 8))


def _normed_and_added(g: GraphBuilder) -> None:
    h = norm(g, g.input("x", f32(64)))
    g.output("y", g.op("add", h, tiled(g, h, 64)))


def _half_of_a_norm(g: GraphBuilder) -> None:
    h = norm(g, g.input("x", f32(64)))
    g.output("y", tiled(g, g.op("slice", h, axis=0, start=0, stop=32), 8))


def _norm_of_rows(g: GraphBuilder) -> None:
    """Each row has its own statistics."""
    h = norm(g, g.input("x", f32(2, 32)))
    g.output("y", tiled(g, g.op("reshape", h, shape=(64,)), 8))


def _rounded_norm_shown(g: GraphBuilder) -> None:
    h = g.op("cast", norm(g, g.input("x", f32(64))), dtype="bf16")
    g.output("h", g.op("cast", h, dtype="f32"))
    g.output("y", tiled(g, h, 8, cast=False))


def _normed_in_f32(g: GraphBuilder) -> None:
    h = norm(g, g.input("x", f32(64)))
    g.output("y", tiled(g, h, 8))
    g.output("z", g.op("tanh", h))


KEPT_NORMS = [
    _normed_for_others, _normed_and_added, _half_of_a_norm, _norm_of_rows, _rounded_norm_shown, _normed_in_f32,
]  # fmt: skip


@pytest.mark.parametrize("build", KEPT_NORMS, ids=lambda f: f.__name__.strip("_"))
def test_a_norm_that_others_read_stays(build: Callable[[GraphBuilder], None]) -> None:
    ops = session_ops(rounded(build))
    assert ops.count("rms_norm") == 1 and "rms_norm_terms" not in ops


def _product_with_bias(g: GraphBuilder) -> Value:
    x = g.op("cast", g.input("x", f32(64)), dtype="bf16")
    tiles = g.op("pack_tiles", g.weight("w", bf16(64, 64)))
    return g.op("tiled_matmul", x, tiles, g.weight("b", f32(64)), n=64, k=64, roles=BIAS)  # type: ignore[no-any-return]


def _activated_product(g: GraphBuilder) -> Value:
    return g.op("relu", tiled(g, g.input("x", f32(64)), 64))  # type: ignore[no-any-return]


def _product_read_twice_tiled(g: GraphBuilder) -> Value:
    y = tiled(g, g.input("x", f32(64)), 64)
    g.output("other", g.op("tanh", y))
    return y


@pytest.mark.parametrize("addend", [_product_with_bias, _activated_product, _product_read_twice_tiled])
def test_a_product_that_cannot_give_partial_sums_is_added_by_itself(addend: Callable[[GraphBuilder], Value]) -> None:
    def build(g: GraphBuilder) -> None:
        y = addend(g)
        g.output("y", tiled(g, norm(g, g.op("add", g.input("v", f32(64)), y)), 8, "head"))

    ops = session_ops(rounded(build))
    assert ops.count("add") == 1 and ops.count("rms_norm_terms") == 1


def test_a_sum_before_anything_but_a_norm_is_an_addition() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(64))
        g.output("y", g.op("add", x, tiled(g, x, 64)))

    assert session_ops(rounded(build)) == ["cast", "tiled_matmul", "add"]


def test_a_product_of_what_is_overwritten_before_its_epilogue_stays_where_it_is() -> None:
    def build(g: GraphBuilder) -> None:
        cache = g.cache("kv", bf16(2, 2, 16))
        before = tiled(g, g.op("reshape", cache, shape=(256,)), 8, "w", cast=False)
        rows = tiled(g, g.input("x", f32(64)), 128, "qkv")
        query, cache = g.op("qkv_split", rows, cache, g.position(), scale=0.25)
        g.replace("kv", cache)
        g.output("q", g.op("cast", query, dtype="f32"))
        g.output("y", g.op("relu", before))

    assert "relu" in session_ops(rounded(build))


def test_half_of_a_product_is_not_what_an_epilogue_is_for() -> None:
    def build(g: GraphBuilder) -> None:
        y = tiled(g, g.input("x", f32(64)), 16)
        g.output("y", g.op("relu", g.op("slice", y, axis=0, start=8, stop=16)))

    assert only(rounded(build), "relu") and only(rounded(build), "tiled_matmul").attributes["activation"] == "none"


def test_a_product_without_statistics_keeps_its_epilogue_apart() -> None:
    """The operators that are product and epilogue take sums of squares."""

    def build(g: GraphBuilder) -> None:
        rows = tiled(g, g.input("x", f32(64)), 128, "qkv")
        query, cache = g.op("qkv_split", rows, g.cache("kv", bf16(2, 2, 16)), g.position(), scale=0.25)
        g.replace("kv", cache)
        g.output("y", g.op("cast", query, dtype="f32"))

    assert {"tiled_matmul", "qkv_split"} <= set(session_ops(rounded(build)))


@pytest.mark.parametrize(
    ("readers", "out"), [(("bf16",), "bf16"), (("bf16", "bf16"), "bf16"), (("bf16", "f32"), "f32")]
)
def test_a_result_is_bf16_where_everybody_rounds_it(readers: tuple[str, ...], out: str) -> None:
    def build(g: GraphBuilder) -> None:
        y = g.op("gated_rms_norm", g.input("x", f32(64)), g.input("v", f32(64)), g.weight("w", f32(64)), groups=2)
        for i, dtype in enumerate(readers):
            made = tiled(g, y, 8, f"w{i}") if dtype == "bf16" else g.op("tanh", y)
            g.output(f"y{i}", made)

    made = rounded(build)
    assert only(made, "gated_rms_norm").attributes["out"] == out
    assert ("cast" in session_ops(made)) == (out == "f32")


def test_the_greatest_of_a_matrix_s_rows_is_no_greatest_of_a_product() -> None:
    def build(g: GraphBuilder) -> None:
        y = tiled(g, norm(g, g.input("x", f32(64))), 16)
        g.output("y", g.op("argmax", g.op("reshape", y, shape=(2, 8))))

    assert "argmax" in session_ops(rounded(build))


def test_logits_that_are_shown_are_written() -> None:
    def build(g: GraphBuilder) -> None:
        y = tiled(g, norm(g, g.input("x", f32(64))), 16)
        g.output("token", g.op("argmax", y))
        g.output("logits", y)

    made = rounded(build)
    assert "argmax" in session_ops(made) and only(made, "tiled_matmul").attributes["roles"] == SQUARES


def test_folding_finds_nothing_more_to_do_in_what_it_made() -> None:
    g = builder()
    _hybrid(g)
    made = fuse(expand(g.build(), SELECTION), SELECTION)
    assert outline(fuse(made, SELECTION)) == outline(made)


# --- any graph ----------------------------------------------------------------------------------------------------
def _step(draw: DrawFn, g: GraphBuilder, known: list[Value]) -> Value:
    """One more vector f32[64] out of those that there are, recent ones as likely as all older ones together."""

    def pick() -> Value:
        return known[-1] if draw(st.booleans()) else draw(st.sampled_from(known))

    name = f"w{draw(st.integers(0, 2))}"

    def normed(x: Value) -> Value:
        return g.op("rms_norm", x, g.weight(f"norm {name}", f32(64)), offset=1.0)  # type: ignore[no-any-return]

    match draw(st.sampled_from(("product", "norm", "block", "block", "add", "relu", "gate", "view"))):
        case "product":
            return tiled(g, pick(), 64, name)
        case "norm":
            return normed(pick())
        case "block":
            x = pick()
            y = tiled(g, normed(x) if draw(st.booleans()) else x, 64, name)
            y = g.op("relu", y) if draw(st.integers(0, 2)) == 0 else y
            return g.op("add", x if draw(st.booleans()) else pick(), y)  # type: ignore[no-any-return]
        case "add":
            return g.op("add", pick(), pick())  # type: ignore[no-any-return]
        case "relu":
            return g.op("relu", pick())  # type: ignore[no-any-return]
        case "gate":
            weight = g.weight(f"norm {name}", f32(64))
            return g.op("gated_rms_norm", pick(), pick(), weight, groups=4, eps=0.1)  # type: ignore[no-any-return]
        case _:
            return g.op("reshape", g.op("reshape", pick(), shape=(4, 16)), shape=(64,))  # type: ignore[no-any-return]


@st.composite
def vectors(draw: DrawFn) -> Graph:
    """A graph of products in bf16, norms and sums over one kind of vector, kept and shown anywhere."""
    g = builder("random")
    known: list[Value] = [g.input("x", f32(64)), g.register("r", f32(64))]
    for _ in range(draw(st.integers(2, 12))):
        known.append(_step(draw, g, known))
    g.update("r", draw(st.sampled_from(known)))
    head = g.op("rms_norm", known[-1], g.weight("norm head", f32(64)), offset=1.0)
    g.output("head", tiled(g, head, 64, "head"))
    for i in range(draw(st.integers(0, 2))):
        g.output(f"y{i}", draw(st.sampled_from(known)))
    return g.build()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(vectors())
def test_folding_and_ownership_change_no_meaning(graph: Graph) -> None:
    note(print_graph(graph))
    weights = weights_of(graph)
    folded = fuse(graph, SELECTION)
    check_graph(folded, SELECTION)
    agree(graph, Meant(folded, weights), Meant(graph, weights), beats=3, tolerance=0.1)
    for target in ("cpu", "h200"):
        owned = own_rows(folded, SELECTION, find_target(target))
        check_graph(owned, SELECTION)
        agree(graph, Meant(owned, weights), Meant(folded, weights), beats=3)
