"""Products of f32 that may be TF32: which go to tensor cores, what stays, and that they give what f32 gives, nearly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import SELECTION, Weights, agree, builder, compiled, executed
from tests.zoo.specs import chain, small
from wpk.ir.graph import Graph, GraphBuilder, Node, Value
from wpk.ir.types import f32
from wpk.ops.legal import first_broken
from wpk.ops.tf32 import frame_tiles, product_rules, unit_slots
from wpk.scheduler.compile import lower_beat
from wpk.scheduler.fuse import fuse
from wpk.scheduler.phases import Lowered
from wpk.scheduler.rewrite import expand
from wpk.scheduler.target import find_target
from wpk.scheduler.tensor_cores import shares_of, use_tensor_cores, why_not
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec

H200 = find_target("h200")
Build = Callable[[GraphBuilder], Value]
CLOSE = 2e-3  # of the largest number


def made(build: Build, products: str = "tf32") -> Graph:
    g = builder()
    with g.products(products):
        g.output("y", build(g))
    return g.build()


def dense(g: GraphBuilder, frames: int, k: int, n: int, *, bias: bool = True, activation: str = "none") -> Value:
    x = g.input("x", f32(frames, k))
    biases = [g.weight("b", f32(n))] if bias else []
    return g.op("linear", x, g.weight("w", f32(n, k)), *biases, activation=activation)  # type: ignore[no-any-return]


def residual(g: GraphBuilder) -> Value:
    x = g.input("x", f32(3, 24))
    return g.op("add", x, g.op("linear", g.op("tanh", x), g.weight("w", f32(24, 24))))  # type: ignore[no-any-return]


def convolution(g: GraphBuilder, c: int = 4, pad: int = 0, **attrs: int) -> Value:
    x = g.op("tanh", g.input("x", f32(40, c)))
    w, b = g.weight("w", f32(16, c, 3)), g.weight("b", f32(16))
    return g.op("conv1d", x, w, b, pad_left=pad, activation="silu", **attrs)  # type: ignore[no-any-return]


def windows(g: GraphBuilder) -> Value:
    """A causal convolution: its history is concatenated in front."""
    ring = g.ring("past", 2, f32(8))
    x = g.input("x", f32(8))
    row = g.op("reshape", x, shape=(1, 8))
    g.update("past", row)
    all = g.op("concat", ring, row, axis=0)
    return g.op("conv1d", all, g.weight("w", f32(16, 8, 3)), activation="relu")  # type: ignore[no-any-return]


def recurrent(g: GraphBuilder) -> Value:
    h, c = g.register("h", f32(12)), g.register("c", f32(12))
    names = (("w_ih", 48, 20), ("w_hh", 48, 12), ("b_ih", 48), ("b_hh", 48))
    weights = [g.weight(name, f32(*shape)) for name, *shape in names]
    h, c = g.op("lstm", g.input("x", f32(20)), h, c, *weights)
    g.update("h", h)
    g.update("c", c)
    return h


def gates(g: GraphBuilder, linear_before_reset: bool) -> Value:
    h = g.register("h", f32(8))
    weights = [g.weight(name, f32(*shape)) for name, *shape in (("w_ih", 24, 8), ("w_hh", 24, 8))]
    new = g.op("gru", g.input("x", f32(8)), h, *weights, linear_before_reset=linear_before_reset)
    g.update("h", new)
    return new  # type: ignore[no-any-return]


TAKEN: dict[str, tuple[Build, int]] = {  # what it is, and how many products it makes
    "a frame": (lambda g: dense(g, 1, 100, 40), 1),
    "two frames": (lambda g: dense(g, 2, 100, 40, activation="gelu"), 1),
    "as many frames as a tile has rows, nearly": (lambda g: dense(g, 63, 36, 24), 1),
    "many more": (lambda g: dense(g, 441, 12, 16, bias=False, activation="relu2"), 1),
    "a residual": (residual, 1),
    "a convolution": (convolution, 1),
    "a strided one": (lambda g: convolution(g, stride=2), 1),
    "a dilated one": (lambda g: convolution(g, dilation=3), 3),
    "a causal one": (windows, 1),
    "gates of an LSTM": (recurrent, 2),
    "gates of a GRU": (lambda g: gates(g, True), 2),
    "rows that are no multiple of eight": (lambda g: dense(g, 1, 36, 9, activation="tanh"), 1),
    "one row": (lambda g: dense(g, 1, 36, 1, bias=False), 1),
    "a view at 16 bytes": (
        lambda g: g.op(
            "linear", g.op("slice", g.input("x", f32(44)), axis=0, start=4, stop=40), g.weight("w", f32(8, 36))
        ), 1,
    ),
}  # fmt: skip
LEFT: dict[str, tuple[Build, str]] = {
    "several frames of rows that are no multiple of eight": (lambda g: dense(g, 2, 36, 9), "a multiple of 8 rows"),
    "frames at odd places": (lambda g: dense(g, 2, 37, 8), "a step in multiples of 4"),
    "zeros before x": (lambda g: convolution(g, pad=1), "no zeros before x"),
    "zeros after x": (lambda g: convolution(g, pad_right=1), "whole windows of x"),
    "a view at 4 bytes": (
        lambda g: g.op(
            "linear", g.op("slice", g.input("x", f32(37)), axis=0, start=1, stop=37), g.weight("w", f32(8, 36))
        ),
        "x at a multiple of 16 bytes",
    ),
    "an activation over two operands": (lambda g: gates(g, False), "no activation with a second operand"),
}  # fmt: skip


def lowered(graph: Graph, *, steps: int = 1, target: str = "h200", capacity: int | None = None) -> Lowered:
    return lower_beat(graph, SELECTION, find_target(target), steps, capacity=capacity)


def products(low: Lowered) -> list[str]:
    return [p.operator.name for p in low.phases if p.operator.name in ("matmul", "tf32_matmul")]


def weights_of(graph: Graph) -> Weights:
    rng = np.random.default_rng(0)
    return {
        p.name: rng.standard_normal(p.value.type.shape) / np.sqrt(np.prod(p.value.type.shape[1:]))
        for p in graph.weights
    }


# --- what goes and what stays -------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", TAKEN)
def test_a_product_goes_to_tensor_cores(what: str) -> None:
    build, count = TAKEN[what]
    assert products(lowered(made(build))) == ["tf32_matmul"] * count
    for kept in (lowered(made(build, "f32")), lowered(made(build), target="cpu")):
        assert products(kept) and set(products(kept)) == {"matmul"}


@pytest.mark.parametrize("what", LEFT)
def test_what_does_not_suit_stays(what: str) -> None:
    build, wanted = LEFT[what]
    graph = fuse(expand(made(build), SELECTION), SELECTION)
    nodes = [node for node in graph.nodes if node.op == "matmul"]
    assert wanted in {why_not(node, graph.producers()) for node in nodes}
    assert products(lowered(made(build))).count("matmul") >= 1


def test_products_of_weights_are_made_at_load_as_ever() -> None:
    def build(g: GraphBuilder) -> Value:
        made = g.op("linear", g.weight("a", f32(1, 8)), g.weight("w", f32(8, 8)))
        return g.op("add", g.input("x", f32(1, 8)), made)  # type: ignore[no-any-return]

    assert products(lowered(made(build))) == []


@pytest.mark.parametrize("slots", [1, 3, 66])
@pytest.mark.parametrize("what", TAKEN)
def test_it_gives_what_f32_gives_nearly(what: str, slots: int) -> None:
    graph = made(TAKEN[what][0])
    weights = weights_of(graph)
    found, wanted = (executed(graph, weights, slots, 2, target) for target in ("h200", "cpu"))
    assert any(name.startswith("tf32_matmul@") for name in found.kernel.program.operators)
    agree(graph, found, wanted, slots=slots, steps=2, beats=2, tolerance=CLOSE)


UPSAMPLER = {"kind": "convnext_upsampler", "channels": [24, 16, 8], "rates": [3, 2, 4], "blocks": 1}


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda precision: ModelSpec.from_data(small(precision=precision)), {"lstm", "head"}),
        (
            lambda precision: chain([UPSAMPLER], {"latent": "f32[24]"}, "f32[24,8]", precision=precision),
            {"convnext_upsampler"},
        ),
    ],
)
def test_a_model_under_tf32_gives_what_it_gives_in_f32_nearly(
    make: Callable[[dict[str, str]], ModelSpec], taken: set[str]
) -> None:
    """On the same CPU kernel: the program for a GPU against that of the f32 model for a CPU."""
    graphs = {policy: build_graph(make({"policy": policy})) for policy in ("f32", "tf32")}
    phases = lowered(graphs["tf32"], steps=2).phases
    assert {p.label.partition(".")[0] for p in phases if p.operator.name == "tf32_matmul"} == taken
    weights = weights_of(graphs["f32"])
    found, wanted = executed(graphs["tf32"], weights, 5, 2, "h200"), executed(graphs["f32"], weights, 5, 2)
    agree(graphs["f32"], found, wanted, slots=5, steps=2, beats=2, tolerance=CLOSE)


@pytest.mark.parametrize("what", TAKEN)
def test_a_program_for_a_cpu_is_the_same_bytes(what: str) -> None:
    one, other = (compiled(made(TAKEN[what][0], p), capacity=3, steps=2).program.to_bytes() for p in ("f32", "tf32"))
    assert one == other


# --- weights ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["a frame", "gates of an LSTM", "one row"])
def test_weights_are_packed_once_for_all_steps(what: str) -> None:
    build, count = TAKEN[what]
    one, two = (lowered(made(build), steps=steps) for steps in (1, 2))
    for low in (one, two):
        assert [node.op for node in low.load.nodes].count("pack_tf32_tiles") == count
        assert not any(node.op == "pack_panels" for node in low.load.nodes)


def node_of(graph: Graph) -> Node:
    (node,) = (n for n in graph.nodes if n.op == "tf32_matmul")
    return node


@pytest.mark.parametrize(("capacity", "rows"), [(None, 64), (1, 64), (64, 64), (65, 128), (300, 128)])
def test_rows_of_a_tile_follow_the_sessions(capacity: int | None, rows: int) -> None:
    graph = fuse(expand(made(lambda g: dense(g, 2, 64, 64)), SELECTION), SELECTION)
    assert node_of(use_tensor_cores(graph, SELECTION, H200, capacity)).attributes["rows"] == rows


def test_products_that_read_the_same_share_the_blocks() -> None:
    def build(count: int) -> Build:
        def gated(g: GraphBuilder) -> Value:
            x = g.input("x", f32(2, 1152))
            made = [g.op("linear", x, g.weight(f"w{i}", f32(1152, 1152))) for i in range(count)]
            for value in made[1:]:
                made[0] = g.op("mul", made[0], value)
            return made[0]

        return gated

    found = {}
    for count in (1, 3):
        low = lowered(made(build(count)), capacity=56)
        found[count] = [p.operator.shares for p in low.phases if p.operator.name == "tf32_matmul"]  # type: ignore[attr-defined]
    assert found[1] == [48] and len(set(found[3])) == 1 and len(found[3]) == 3
    assert 2 * sum(found[3]) <= H200.blocks < 2 * 48 * 3  # two tiles of 28 sessions


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 800), st.integers(1, 900), st.integers(1, 300), st.sampled_from((64, 128)), st.floats(1, 132))
def test_every_cut_can_be_packed(groups: int, frames: int, slots: int, rows: int, blocks: float) -> None:
    n = 8 * groups
    shares = shares_of(n, frames, slots, rows, blocks)
    assert first_broken(*product_rules(n, 32, shares, frames, 32, 32 * frames)) is None


@pytest.mark.parametrize(
    ("n", "frames", "shares"),
    [
        (1152, 2, 48),  # two tiles: 24 rows are the fewest of 132 blocks
        (4608, 2, 64),  # 128 units of 72 rows
        (384, 441, 3),  # 392 tiles: the fewest shares
        (2560, 1, 107),
        (64, 1, 8),
    ],
)
def test_the_shares_of_real_matrices_for_56_sessions(n: int, frames: int, shares: int) -> None:
    assert shares_of(n, frames, 56, 64, 132) == shares
    units = shares * frame_tiles(frames, 64) * -(-56 // unit_slots(frames, 64))
    assert units <= 132 or units >= 8 * 132  # a wave of its own, or so many that the last one hardly counts
