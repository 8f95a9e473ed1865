"""A recurrent state, a window and bf16 caches that operators keep in place: compiled, checked, run for some beats."""

from __future__ import annotations

import pytest

from tests.scheduler.graphs import SELECTION, Executed, Meant, agree, builder, weights_of
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.types import bf16, f32
from wpk.scheduler.check import check_program
from wpk.scheduler.compile import compile_graph
from wpk.scheduler.target import TARGETS

FINE = TARGETS["cpu"].model_copy(update={"name": "fine", "least_task_s": 1e-15})  # a task for every part and slot
K = 72
MAMBA_EPS, ATTENTION_EPS = 0.01, 1.0  # what keeps states and scores of random weights within bounds
SQUARES = 2  # bit of the role of sums of squares


def normalised(g: GraphBuilder, name: str) -> tuple[Value, Value]:
    """x in bf16 and what its product is divided by: here one number a session and step."""
    x = g.input(name, f32(K))
    return g.op("cast", x, dtype="bf16"), g.op("square", g.input(f"{name}.length", f32(1)))


def mamba(g: GraphBuilder, name: str, *, fused: bool) -> None:
    heads = 8
    inner, channels = heads * 8, heads * 8 + 2 * 128
    n = inner + channels + heads
    x, squares = normalised(g, name)
    tiles = g.op("pack_tiles", g.weight(f"{name}.w", bf16(n, K)), shares=5)
    constants = g.weight(f"{name}.constants", f32(5 * channels + 3 * heads))
    ring, state = g.register(f"{name}.ring", bf16(3, channels)), g.register(f"{name}.state", f32(heads, 8, 128))
    if fused:
        mixed, window = g.op("mamba2_projection", x, tiles, squares, constants, ring, n=n, k=K, shares=5, eps=MAMBA_EPS)
    else:
        p = g.op("tiled_matmul", x, tiles, squares, n=n, k=K, shares=5, eps=MAMBA_EPS, roles=SQUARES)
        mixed, window = g.op("mamba2_split", p, ring, constants)
    y, following = g.op("mamba2_step", mixed, state)
    g.update(f"{name}.ring", window)
    g.update(f"{name}.state", following)
    g.output(f"{name}.y", y)


def attention(g: GraphBuilder, name: str, *, fused: bool, out: str = "f32") -> None:
    heads, groups, width = 6, 2, 12
    n = (heads + 2 * groups) * width
    x, squares = normalised(g, name)
    tiles = g.op("pack_tiles", g.weight(f"{name}.w", bf16(n, K)), shares=4)
    cache, scale = g.cache(f"{name}.cache", bf16(2, groups, width)), width**-0.5
    if fused:
        q, rows = g.op(
            "qkv_projection", x, tiles, squares, cache, g.position(), n=n, k=K, shares=4, eps=ATTENTION_EPS, scale=scale
        )  # fmt: skip
    else:
        p = g.op("tiled_matmul", x, tiles, squares, n=n, k=K, shares=4, eps=ATTENTION_EPS, roles=SQUARES)
        q, rows = g.op("qkv_split", p, cache, g.position(), scale=scale)
    g.replace(f"{name}.cache", rows)
    y = g.op("kv_attention", q, rows, g.position(), heads=heads, splits=2, out=out)
    g.output(f"{name}.y", g.op("cast", y, dtype="f32") if out == "bf16" else y)


def both(name: str, *, fused: bool) -> Graph:
    g = builder(name, context=11)
    mamba(g, "m", fused=fused)
    attention(g, "a", fused=fused)
    attention(g, "b", fused=fused, out="bf16")
    return g.build()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("slots", "steps"), [(1, 1), (3, 1), (2, 3)])
def test_state_in_place_is_the_meaning_beat_after_beat(fused: bool, slots: int, steps: int) -> None:
    """Fourteen steps, so that sessions also run beyond their cache."""
    graph = both("fused" if fused else "unfused", fused=fused)
    weights = weights_of(graph)
    made = compile_graph(graph, SELECTION, FINE, capacity=slots, steps=steps)
    assert [c for c in check_program(made.program) if not c.ok] == []
    beats = -(-14 // steps)
    agree(
        graph, Executed(made, weights), Meant(graph, weights, slots, steps), slots=slots, steps=steps, beats=beats,
        tolerance=1e-2,
    )  # fmt: skip


def test_no_state_is_copied() -> None:
    """All of them, the state, the ring and both caches, are written where they lie."""
    made = compile_graph(both("g", fused=True), SELECTION, FINE, capacity=2, steps=2)
    assert not [label for label in made.program.labels if label.endswith(".commit") and "position" not in label]
