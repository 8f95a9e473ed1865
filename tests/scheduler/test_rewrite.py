"""Passes over graphs: what they make of one, what they leave alone, and that none changes what a graph means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import CONTEXT, SELECTION, Meant, agree, builder, graphs, weights_of
from wpk.ir.check import check_graph
from wpk.ir.errors import GraphError
from wpk.ir.graph import Graph, GraphBuilder, Library, Node, StateKind, Value
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import boolean, f32
from wpk.ops import LIBRARY
from wpk.ops.linear import RESIDUAL
from wpk.ops.simd import ACTIVATIONS
from wpk.scheduler.fuse import fuse
from wpk.scheduler.rewrite import expand, prune, unroll
from wpk.scheduler.views import view_start

few = settings(max_examples=40, deadline=None, derandomize=True)


def session_ops(graph: Graph) -> list[str]:
    """Operators of a step in order, weight-level ones left out."""
    return [n.op for n in graph.nodes if not n.weight]


def only(graph: Graph, op: str) -> Node:
    (node,) = [n for n in graph.nodes if n.op == op]
    return node


def fused(build: Callable[[GraphBuilder], object]) -> Graph:
    """What fusing makes of a graph, which must mean what it meant."""
    g = builder()
    build(g)
    graph = g.build()
    made = fuse(expand(graph, SELECTION), SELECTION)
    weights = weights_of(graph)
    agree(graph, Meant(made, weights), Meant(graph, weights), beats=3)
    return made


def dense(g: GraphBuilder, x: Value, n: int = 6, **attrs: str) -> Value:
    return g.op("linear", x, g.weight("w", f32(n, x.type.shape[-1])), **attrs)  # type: ignore[no-any-return]


# --- expand -------------------------------------------------------------------------------------------------------
def test_expand_leaves_only_what_a_body_runs_and_views() -> None:
    g = builder()
    x, h, c = g.input("x", f32(6)), g.register("h", f32(6)), g.register("c", f32(6))
    weights = [g.weight(n, f32(24, 6)) for n in ("w_ih", "w_hh")]
    for name, value in zip("hc", g.op("lstm", x, h, c, *weights), strict=True):
        g.update(name, value)
    g.output("y", dense(g, h))
    made = expand(g.build(), SELECTION)
    assert session_ops(made) == ["matmul", "reshape", "lstm_cell", "matmul", "reshape"]
    check_graph(made, SELECTION)


@few
@given(graphs())
def test_every_session_node_is_a_view_or_has_a_body(graph: Graph) -> None:
    for node in expand(graph, SELECTION).nodes:
        if not node.weight and view_start(node) is None:
            assert LIBRARY.body(node.op, node.version, "cpu") is not None, node.op


def test_what_is_made_carries_the_label_of_what_it_came_from() -> None:
    g = builder()
    x = g.input("x", f32(6))
    with g.scope("encoder"), g.scope("0"):
        h = dense(g, x)
    with g.scope("head"):
        g.output("y", g.op("relu", h))
    made = expand(g.build(), SELECTION)
    assert {(n.op, n.label) for n in made.nodes} == {
        ("pack_panels", "encoder.0"), ("matmul", "encoder.0"), ("reshape", "encoder.0"), ("relu", "head"),
    }  # fmt: skip
    together = fuse(made, SELECTION)
    assert {(n.op, n.label) for n in together.nodes} == {
        ("pack_panels", "encoder.0"), ("matmul", "encoder.0"), ("reshape", "head"),
    }  # fmt: skip
    beat = unroll(together, SELECTION, 2)
    assert sorted(n.label for n in beat.nodes if n.op == "matmul") == ["encoder.0", "encoder.0"]


def test_a_weight_that_is_packed_twice_is_packed_once() -> None:
    def build(g: GraphBuilder) -> None:
        g.output("y", dense(g, g.input("x", f32(6))))
        g.output("z", dense(g, g.input("v", f32(6))))

    assert [n.op for n in fused(build).nodes].count("pack_panels") == 1


def test_weights_that_only_print_alike_are_not_taken_for_one() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(2))
        for name, zero in (("y", 0.0), ("z", -0.0)):
            g.output(name, g.op("div", x, g.op("full", shape=(2,), value=zero)))

    g = builder()
    build(g)
    assert [n.op for n in expand(g.build(), SELECTION).nodes].count("full") == 2


# --- fuse ---------------------------------------------------------------------------------------------------------
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


# --- unroll -------------------------------------------------------------------------------------------------------
def _register(g: GraphBuilder) -> None:
    x, h = g.input("x", f32(6)), g.register("h", f32(6), g.weight("h0", f32(6)))
    g.update("h", g.op("tanh", g.op("add", x, h)))
    g.output("y", h)


def _swapped(g: GraphBuilder) -> None:
    a, b = g.register("a", f32(6), g.weight("a0", f32(6))), g.register("b", f32(6))
    g.update("a", b)
    g.update("b", a)
    g.output("y", g.op("add", a, g.input("x", f32(6))))


def _ring(rows: int, come: int) -> Callable[[GraphBuilder], None]:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(come, 6))
        g.output("y", g.op("concat", g.ring("r", rows, f32(6), g.weight("r0", f32(rows, 6))), x, axis=0))
        g.update("r", x)

    build.__name__ = f"ring of {rows}, {come} come"
    return build


def _cache(g: GraphBuilder) -> None:
    x, cache = g.input("x", f32(1, 6)), g.cache("c", f32(1, 6))
    before = g.op("attention", x, cache, cache, g.position(), scale=1.0)
    cache = g.append("c", x)
    g.output("y", g.op("add", before, g.op("attention", x, cache, cache, g.position(), scale=1.0)))
    g.output("c", cache)


def _position(g: GraphBuilder) -> None:
    g.input("x", f32(6))
    g.output("y", g.position())
    g.output("next", g.op("increment", g.position(), by=1))


def _loop(g: GraphBuilder) -> None:
    """Adds x as long as the sum stays small, at most three times."""
    x = g.input("x", f32(1))

    def body(i: int, carried: tuple[Value, ...]) -> tuple[tuple[Value, ...], Value]:
        (total,) = carried
        small = g.op("less", total, g.op("constant", shape=(1,), values=(0.5,)))
        return (g.op("add", total, x),), g.op("reshape", small, shape=())

    g.output("y", *g.loop(3, [x], body))
    assert boolean() == g.op("less", g.position(), g.position()).type


UNROLLED = [
    _register, _swapped, *(_ring(n, k) for n in (1, 2, 3) for k in (1, 2, 3)), _cache, _position, _loop
]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("build", UNROLLED, ids=lambda f: f.__name__.strip("_"))
def test_a_beat_means_its_steps_one_after_the_other(build: Callable[[GraphBuilder], None], steps: int) -> None:
    g = builder()
    build(g)
    graph = g.build()
    beat, weights = unroll(graph, SELECTION, steps), weights_of(graph)
    check_graph(beat, SELECTION)
    assert [p.name for p in beat.inputs] == [f"{p.name}@{s}" for s in range(steps) for p in graph.inputs]
    assert [p.name for p in beat.outputs] == [f"{p.name}@{s}" for s in range(steps) for p in graph.outputs]
    agree(graph, Meant(beat, weights, 1, steps, unrolled=True), Meant(graph, weights, 1, steps), steps=steps)


def test_in_a_beat_rings_are_shifted_and_caches_stay_caches() -> None:
    g = builder()
    _cache(g)
    rows = g.input("rows", f32(2, 6))
    g.ring("history", 3, f32(6))
    g.update("history", rows)
    beat = unroll(g.build(), SELECTION, 2)
    assert {s.name: s.kind for s in beat.states} == {
        "c": StateKind.CACHE, "position": StateKind.REGISTER, "history": StateKind.REGISTER,
    }  # fmt: skip
    assert [n.label for n in beat.nodes if n.op == "ring_shift"] == ["history", "history"]
    assert beat.states[0].value.type.shape[0] == CONTEXT


def test_weights_are_made_once_however_many_steps_a_beat_has() -> None:
    g = builder()
    g.output("y", dense(g, g.input("x", f32(6))))
    beat = unroll(expand(g.build(), SELECTION), SELECTION, 3)
    assert [n.op for n in beat.nodes if n.weight] == ["pack_panels"]


# --- prune --------------------------------------------------------------------------------------------------------
def test_prune_drops_what_nobody_needs_and_keeps_the_interface() -> None:
    g = builder()
    x, unused = g.input("x", f32(6)), g.input("unused", f32(6))
    w, idle = g.weight("w", f32(6)), g.weight("idle", f32(6))
    g.op("relu", unused)
    g.op("neg", g.op("abs", idle))
    g.register("r", f32(6), g.op("add", w, w))
    g.update("r", g.op("tanh", x))
    g.output("y", g.op("neg", x))
    graph = g.build()
    made = prune(graph, SELECTION)
    assert [n.op for n in made.nodes] == ["add", "tanh", "neg"]  # initial image, update, output
    assert (made.inputs, made.weights, made.states, made.outputs) == (
        graph.inputs, graph.weights, graph.states, graph.outputs,
    )  # fmt: skip


def test_a_node_with_one_result_in_use_stays_whole() -> None:
    g = builder()
    h, _ = g.op("lstm_cell", g.input("x", f32(24)), g.input("c", f32(6)))
    g.output("h", h)
    assert len(only(prune(g.build(), SELECTION), "lstm_cell").outputs) == 2


# --- all of them --------------------------------------------------------------------------------------------------
Pass = Callable[[Graph, Library], Graph]
PASSES: dict[str, Pass] = {"expand": expand, "fuse": fuse, "prune": prune}


@few
@given(graphs(), st.integers(1, 3))
def test_no_pass_changes_what_a_graph_means(graph: Graph, steps: int) -> None:
    note(print_graph(graph))
    weights = weights_of(graph)
    made = graph
    for name, run in PASSES.items():
        made = run(made, SELECTION)
        check_graph(made, SELECTION)
        assert parse_graph(print_graph(made)) == made, name
    agree(graph, Meant(made, weights, 1, steps), Meant(graph, weights, 1, steps), steps=steps, beats=3)
    beat = unroll(made, SELECTION, steps)
    check_graph(beat, SELECTION)
    agree(graph, Meant(beat, weights, 1, steps, unrolled=True), Meant(graph, weights, 1, steps), steps=steps, beats=3)


@few
@given(graphs())
def test_a_pass_finds_nothing_more_to_do_in_what_it_made(graph: Graph) -> None:
    expanded = expand(graph, SELECTION)
    assert session_ops(expand(expanded, SELECTION)) == session_ops(expanded)
    pruned = prune(expanded, SELECTION)
    assert prune(pruned, SELECTION) == pruned


def test_an_output_that_is_a_weight_is_refused_where_it_is_declared() -> None:
    g = builder()
    with pytest.raises(GraphError, match="does not depend on the session"):
        g.output("y", g.weight("w", f32(6)))
