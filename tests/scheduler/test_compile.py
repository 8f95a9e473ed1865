"""End to end: graphs compiled and executed, against what they mean in float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, note, settings

from tests.scheduler.graphs import SELECTION, Meant, agree, builder, compiled, executed, graphs, weights_of
from tests.scheduler.test_phases import STATES, Build, made
from wpk.ir.errors import CapacityError, GraphError
from wpk.ir.graph import Graph
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import f32
from wpk.scheduler.compile import MAX_CAPACITY, compile_graph
from wpk.scheduler.target import find_target

F32 = 2e-5  # of the largest output


def runs_as_it_means(graph: Graph, capacity: int, steps: int, target: str, beats: int = 6) -> None:
    weights = weights_of(graph)
    found, wanted = executed(graph, weights, capacity, steps, target), Meant(graph, weights, capacity, steps)
    try:
        agree(graph, found, wanted, slots=capacity, steps=steps, beats=beats, tolerance=F32)
    finally:
        found.kernel.close()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(graphs())
def test_random_graphs_run_as_they_mean(graph: Graph) -> None:
    note(print_graph(graph))
    for target in ("cpu", "h200"):
        for capacity in (1, 3):
            for steps in (1, 2):
                runs_as_it_means(graph, capacity, steps, target)


@pytest.mark.parametrize("build", STATES, ids=lambda f: f.__name__.strip("_"))
def test_states_run_as_they_mean(build: Build) -> None:
    for steps in (1, 2):
        runs_as_it_means(made(build), 3, steps, "h200")


def test_passes_are_shown_in_their_order() -> None:
    g = builder()
    g.output("y", g.op("tanh", g.input("x", f32(6))))
    shown: dict[str, Any] = {}
    compile_graph(g.build(), SELECTION, find_target("cpu"), capacity=2, show=lambda n, r: shown.update({n: r}))
    assert list(shown) == ["expand", "fuse", "own_rows", "unroll", "lower", "waves", "memory", "place", "emit"]
    assert print_graph(shown["fuse"]) and shown["emit"].slots == 2


@pytest.mark.parametrize("capacity", [0, -1, MAX_CAPACITY + 1])
def test_a_capacity_that_cannot_be_had_is_refused(capacity: int) -> None:
    g = builder()
    g.output("y", g.op("tanh", g.input("x", f32(6))))
    with pytest.raises(CapacityError) as error:
        compiled(g.build(), capacity=capacity)
    assert error.value.capacity == capacity


def test_a_graph_that_breaks_a_rule_is_refused_before_anything_is_compiled() -> None:
    text = 'graph "g" {\n  input %0: f32[6] "x"\n  %1: f32[5] = tanh@1(%0)\n  output %1 "y"\n}\n'
    with pytest.raises(GraphError, match="types follow"):
        compiled(parse_graph(text))
