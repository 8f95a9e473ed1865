"""Passes over graphs: what they make of one, what they leave alone, and that none changes what a graph means."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import (
    CONTEXT,
    SELECTION,
    Meant,
    agree,
    builder,
    dense,
    fused,
    graphs,
    only,
    session_ops,
    weights_of,
)
from wpk.ir.check import check_graph
from wpk.ir.errors import GraphError
from wpk.ir.graph import Graph, GraphBuilder, Library, StateKind, Value
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import boolean, f32
from wpk.ops import LIBRARY
from wpk.scheduler.fuse import fuse
from wpk.scheduler.rewrite import expand, prune, unroll
from wpk.scheduler.views import view_start

few = settings(max_examples=40, deadline=None, derandomize=True)


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
