"""Merging: which copies of the steps of a beat become one, that no bit changes, and that it is worth it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.scheduler.graphs import (
    MATRIX,
    ROWS,
    SELECTION,
    VECTOR,
    WIDE,
    Executed,
    Machine,
    Meant,
    Pool,
    _cached,
    _product,
    agree,
    builder,
    graphs,
    session_ops,
    told,
    weights_of,
)
from tests.zoo.specs import chain
from wpk.ir.check import check_graph
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.text import print_graph
from wpk.ir.types import f32
from wpk.kernel.control import set_bit
from wpk.ops.linear import RESIDUAL
from wpk.scheduler import compile as compiler
from wpk.scheduler import cost
from wpk.scheduler.compile import compile_graph, lower_beat
from wpk.scheduler.explain import phase_rows
from wpk.scheduler.fuse import fuse
from wpk.scheduler.memory import plan
from wpk.scheduler.merge import merge
from wpk.scheduler.rewrite import expand, unroll
from wpk.scheduler.target import Target, find_target
from wpk.scheduler.waves import assign_waves
from wpk.zoo.build import build_graph

ROOT = Path(__file__).parents[2]
CPU = find_target("cpu")
WILLING = CPU.model_copy(update={"barrier_s": 0.0, "bandwidth": 1.0})  # barriers cost nothing: whatever may merge does
C = 8  # channels: a multiple of four, so that rows may be written side by side

Build = Callable[[GraphBuilder], object]


def made(build: Build) -> Graph:
    g = builder()
    build(g)
    return g.build()


def beat_of(graph: Graph, steps: int) -> Graph:
    return unroll(fuse(expand(graph, SELECTION), SELECTION), SELECTION, steps)


def merged(build: Build, steps: int = 2, target: Target = WILLING, capacity: int | None = None) -> Graph:
    found = merge(beat_of(made(build), steps), SELECTION, target, capacity)
    check_graph(found, SELECTION)
    return found


def count(graph: Graph, op: str) -> int:
    return session_ops(graph).count(op)


def linear(g: GraphBuilder, name: str, x: Value, n: int = C, **attrs: Any) -> Value:
    weight, bias = g.weight(name, f32(n, x.type.shape[-1])), g.weight(f"{name}.bias", f32(n))
    return g.op("linear", x, weight, bias, **attrs)  # type: ignore[no-any-return]


@contextmanager
def unmerged() -> Iterator[None]:
    """The compiler without the pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "merge", lambda graph, *_: graph)
        yield


# --- running ------------------------------------------------------------------------------------------------------
def bits(graph: Graph, steps: int, target: Target, slots: int = 3, beats: int = 12) -> list[bytes]:
    """What the CPU kernel gives every session that is there, beat after beat, while sessions join and leave."""
    run = Executed(compile_graph(graph, SELECTION, target, capacity=slots, steps=steps), weights_of(graph))
    rng, there, found = np.random.default_rng(3), set(range(slots)), []
    try:
        for beat in range(beats):
            slot = int(rng.integers(slots))
            if beat % 3 == 1 and slot in there:
                set_bit(run.kernel.control.active, slot, False)
                there.remove(slot)
            elif beat % 3 == 2 and slot not in there:
                run.kernel.reset(slot)
                set_bit(run.kernel.control.active, slot, True)
                there.add(slot)
            inputs = {p.name: rng.uniform(-1, 1, (steps, slots, *p.value.type.shape)) for p in graph.inputs}
            outputs = run.beat(inputs)
            found += [outputs[name][:, s].tobytes() for name in sorted(outputs) for s in sorted(there)]
    finally:
        run.kernel.close()
    return found


def keeps_its_bits(graph: Graph, steps: int, target: Target = WILLING) -> None:
    found = bits(graph, steps, target)
    with unmerged():
        assert bits(graph, steps, target) == found
    assert len(set(found)) > len(found) // 2  # the outputs are no constants


# --- what merges --------------------------------------------------------------------------------------------------
def _two_layers(g: GraphBuilder) -> None:
    h = g.op("linear", g.input("x", f32(4)), g.weight("a", f32(4, 4)), activation="relu")
    g.output("y", g.op("linear", g.op("tanh", h), g.weight("b", f32(4, 4))))


BEFORE = """\
graph "g" {
  input %4: f32[4] "x@0"
  input %10: f32[4] "x@1"
  weight %0: f32[4,4] "a"
  weight %1: f32[4,4] "b"
  %2: f32[1,4,16] = pack_panels@1(%0)
  %3: f32[1,4,16] = pack_panels@1(%1)
  %5: f32[1,4] = matmul@1(%4, %2) {activation="relu", frames=1, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %6: f32[4] = reshape@1(%5) {shape=(4,)}
  %7: f32[4] = tanh@1(%6)
  %8: f32[1,4] = matmul@1(%7, %3) {activation="none", frames=1, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %9: f32[4] = reshape@1(%8) {shape=(4,)}
  %11: f32[1,4] = matmul@1(%10, %2) {activation="relu", frames=1, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %12: f32[4] = reshape@1(%11) {shape=(4,)}
  %13: f32[4] = tanh@1(%12)
  %14: f32[1,4] = matmul@1(%13, %3) {activation="none", frames=1, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %15: f32[4] = reshape@1(%14) {shape=(4,)}
  output %9 "y@0"
  output %15 "y@1"
}
"""
AFTER = """\
graph "g" {
  input %4: f32[4] "x@0"
  input %5: f32[4] "x@1"
  weight %0: f32[4,4] "a"
  weight %1: f32[4,4] "b"
  %2: f32[1,4,16] = pack_panels@1(%0)
  %3: f32[1,4,16] = pack_panels@1(%1)
  %6: f32[8] = concat@1(%4, %5) {axis=0}
  %7: f32[2,4] = reshape@1(%6) {shape=(2, 4)}
  %8: f32[2,4] = matmul@1(%7, %2) {activation="relu", frames=2, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %13: f32[2,4] = tanh@1(%8)
  %18: f32[2,4] = matmul@1(%13, %3) {activation="none", frames=2, k=4, n=4, pad=0, products="f32", roles=0, step=4}
  %19: f32[1,4] = slice@1(%18) {axis=0, start=0, stop=1}
  %20: f32[1,4] = slice@1(%18) {axis=0, start=1, stop=2}
  %21: f32[4] = reshape@1(%19) {shape=(4,)}
  %22: f32[4] = reshape@1(%20) {shape=(4,)}
  output %21 "y@0"
  output %22 "y@1"
}
"""


def test_two_layers_before_and_after() -> None:
    beat = beat_of(made(_two_layers), 2)
    assert print_graph(beat) == BEFORE
    assert print_graph(merge(beat, SELECTION, WILLING)) == AFTER


def convolutions(blocks: int = 2, taps: int = 3, frames: int = 2) -> Build:
    """Blocks as ConvNeXt has them, over frames with history: Liu et al. 2022, section 2.4."""

    def build(g: GraphBuilder) -> None:
        x = linear(g, "in", g.input("x", f32(frames, C)))
        for i in range(blocks):
            history = g.ring(f"{i}.history", taps - 1, f32(C))
            g.update(f"{i}.history", x)
            weights = g.weight(f"{i}.depthwise", f32(C, taps)), g.weight(f"{i}.depthwise.bias", f32(C))
            y = g.op("depthwise_conv1d", g.op("concat", history, x, axis=0), *weights)
            y = g.op("layer_norm", y, g.weight(f"{i}.norm", f32(C)), g.weight(f"{i}.norm.bias", f32(C)))
            y = linear(g, f"{i}.up", y, 4 * C, activation="gelu")
            x = g.op("add", x, linear(g, f"{i}.down", y))
        g.output("y", x)

    return build


@pytest.mark.parametrize("steps", [2, 3])
def test_a_causal_network_reads_every_weight_once_a_beat(steps: int) -> None:
    build = convolutions()
    one, beat = beat_of(made(build), 1), merged(build, steps)
    for op in ("matmul", "depthwise_window", "layer_norm"):
        assert count(beat, op) == count(one, op) > 0
    assert "ring_shift" not in session_ops(beat)
    assert all(n.attributes["frames"] == 2 * steps for n in beat.nodes if n.op == "matmul")
    keeps_its_bits(made(build), steps)


def test_the_phases_of_a_causal_network() -> None:
    graph = made(convolutions(blocks=1))
    assert told(lower_beat(graph, SELECTION, WILLING, 2)) == [
        "concat x@0 x@1 -> t0",
        "matmul t0 %10 in.bias -> t1",
        "concat 0.history t1 -> t2",
        "depthwise_window t2 %11 0.depthwise.bias -> t3",
        "layer_norm t3 0.norm 0.norm.bias -> t4",
        "matmul t4 %12 0.up.bias -> t5",
        "matmul t5 %13 0.down.bias t1 -> t6",
        "copy t6 -> y@0",
        "copy t6+64 -> y@1",
        "copy t2+128 -> 0.history",
    ]


def test_a_history_longer_than_the_rows_that_come_and_more_steps_than_operands() -> None:
    for taps, frames, steps in ((6, 1, 2), (2, 3, 2), (5, 1, 8)):
        build = convolutions(1, taps, frames)
        beat = merged(build, steps)
        inputs = 1 if steps < 6 else 3
        assert count(beat, "depthwise_window") == 1 and count(beat, "concat") == inputs + 1
        keeps_its_bits(made(build), steps)


def _recurrent(g: GraphBuilder) -> None:
    h = g.register("h", f32(C))
    h = g.op("tanh", g.op("add", linear(g, "w", h), g.input("x", f32(C))))
    g.update("h", h)
    g.output("y", h)


def _fed_back(g: GraphBuilder) -> None:
    """The rows that come depend on what the step before saw in its window; a chain beside it is longer than both."""
    z = g.register("z", f32(1, C))
    for _ in range(9):
        z = g.op("tanh", z)
    g.update("z", z)
    ring, last = g.ring("ring", 2, f32(C)), g.register("last", f32(1, C))
    rows = g.op("add", g.input("x", f32(1, C)), last)
    g.update("ring", rows)
    seen = g.op("depthwise_conv1d", g.op("concat", ring, rows, axis=0), g.weight("w", f32(C, 3)))
    y = linear(g, "out", seen)
    g.update("last", y)
    g.output("y", y)


@pytest.mark.parametrize("build", [_recurrent, _fed_back], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("steps", [2, 3])
def test_what_needs_the_step_before_stays_as_it_is(build: Build, steps: int) -> None:
    beat = beat_of(made(build), steps)
    assert merge(beat, SELECTION, WILLING) is beat


def _mixed(g: GraphBuilder) -> None:
    """An encoder, a recurrence and a head."""
    x = linear(g, "encoder", g.input("x", f32(C)), activation="relu")
    h = g.register("h", f32(C))
    h = g.op("tanh", g.op("add", linear(g, "recurrence", h), x))
    g.update("h", h)
    g.output("y", linear(g, "head", h, 2 * C))


def test_of_a_mixed_graph_the_part_without_a_loop_merges() -> None:
    beat = merged(_mixed, 3)
    frames = [n.attributes["frames"] for n in beat.nodes if n.op == "matmul"]
    assert sorted(frames) == [1, 1, 1, 3, 3]
    keeps_its_bits(made(_mixed), 3)


def _crossed(g: GraphBuilder) -> None:
    """Each of two layers needs what the other one gave a step before."""
    a, b = g.register("a", f32(C)), g.register("b", f32(C))
    x = g.input("x", f32(C))
    following = linear(g, "A", g.op("add", x, b)), linear(g, "B", g.op("sub", x, a))
    g.update("a", following[0])
    g.update("b", following[1])
    g.output("y", g.op("add", *following))


def test_of_two_that_cross_one_merges() -> None:
    """A of step 0 goes into B of step 1 and B of step 0 into A of step 1: to merge both would be a cycle."""
    assert count(merged(_crossed), "matmul") == 3
    keeps_its_bits(made(_crossed), 2)
    keeps_its_bits(made(_crossed), 4)


def _two_weights_in_many_places(g: GraphBuilder) -> None:
    """Once some uses of a weight are merged, others that were apart before follow each other."""
    w, v = (g.weight(name, f32(C, C)) for name in "wv")
    a, b, c = (g.input(name, f32(C)) for name in "abc")
    first, early = g.op("linear", a, w), g.op("linear", b, v)
    outputs = {
        "x": g.op("linear", first, v), "y": g.op("linear", g.op("linear", c, v), w), "z": g.op("linear", early, v),
    }  # fmt: skip
    for name, value in outputs.items():
        g.output(name, value)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_merged_may_bring_a_path_between_those_that_are_left(steps: int) -> None:
    assert session_ops(merged(_two_weights_in_many_places, steps))  # and comes to an end
    keeps_its_bits(made(_two_weights_in_many_places), steps)


def _window_with_rows_to_spare(g: GraphBuilder) -> None:
    x = g.input("x", f32(2, C))
    window = g.op("concat", g.ring("past", 5, f32(C)), x, axis=0)
    g.update("past", x)
    y = g.op("depthwise_conv1d", window, g.weight("taps", f32(C, 3)), stride=6)
    g.output("y", linear(g, "out", g.op("reshape", y, shape=(C,))))


def test_windows_with_rows_to_spare_stay_apart() -> None:
    keeps_its_bits(made(_window_with_rows_to_spare), 2)


def _attention(g: GraphBuilder) -> None:
    """Each step's attention reads the cache before the next step's row is in it."""
    x = linear(g, "in", g.input("x", f32(C)))
    q, k, v = (g.op("reshape", linear(g, name, x), shape=(1, C)) for name in "qkv")
    keys, values = (g.cache(name, f32(1, C)) for name in ("keys", "values"))
    before = g.op("attention", q, keys, values, g.position(), scale=0.3)
    keys, values = g.append("keys", k), g.append("values", v)
    after = g.op("attention", q, keys, values, g.position(), scale=0.3)
    seen = g.op("reshape", g.op("add", before, after), shape=(C,))
    g.output("y", g.op("add", x, linear(g, "out", seen)))


def _late_query(g: GraphBuilder) -> None:
    """The merged queries wait for the last step's; the rows of the cache would be there before."""
    q = linear(g, "q", g.op("tanh", g.input("x", f32(1, C))))
    cache = g.cache("cache", f32(1, C))
    before = g.op("attention", q, cache, cache, g.position(), scale=0.3)
    g.append("cache", g.input("row", f32(1, C)))
    g.output("y", linear(g, "out", before))


def test_the_old_content_of_a_cache_is_read_before_a_row_is_appended() -> None:
    assert count(merged(_late_query, 3), "matmul") == 2
    keeps_its_bits(made(_late_query), 3)


@pytest.mark.parametrize("steps", [2, 3])
def test_products_beside_a_cache_merge_and_the_cache_is_appended_to_step_by_step(steps: int) -> None:
    beat = merged(_attention, steps)
    assert count(beat, "matmul") == 5 and count(beat, "cache_append") == 2 * steps
    keeps_its_bits(made(_attention), steps)


def _two_steps_back(g: GraphBuilder) -> None:
    """A layer is fed by what it gave two steps before."""
    last, before = g.register("last", f32(C)), g.register("before", f32(C))
    y = linear(g, "layer", g.op("add", g.input("x", f32(C)), before), activation="tanh")
    g.update("last", y)
    g.update("before", last)
    g.output("y", y)


def test_of_four_steps_those_merge_that_do_not_wait_for_each_other() -> None:
    beat = merged(_two_steps_back, 4)
    assert [n.attributes["frames"] for n in beat.nodes if n.op == "matmul"] == [2, 2]
    keeps_its_bits(made(_two_steps_back), 4)


def _snake(g: GraphBuilder) -> None:
    """x + sin^2(a x) / a between two layers: Ziyin et al. 2020, eq. 3."""
    x = linear(g, "in", g.input("x", f32(3, C)), 100)
    a, b = g.weight("a", f32(100)), g.weight("b", f32(100))
    x = g.op("add", x, g.op("mul", g.op("square", g.op("sin", g.op("mul", x, a))), b))
    g.output("y", linear(g, "out", g.op("clamp", x, lo=-0.5, hi=0.5)))


def test_what_is_element_by_element_between_merged_products_merges_too() -> None:
    one, beat = beat_of(made(_snake), 1), merged(_snake, 3)
    ops = ("matmul", "mul", "sin", "square", "add", "clamp")
    assert [count(beat, op) for op in ops] == [count(one, op) for op in ops] == [2, 2, 1, 1, 1, 1]
    assert count(beat, "concat") == 1  # of the inputs
    keeps_its_bits(made(_snake), 3)


def test_what_is_element_by_element_is_in_no_product_s_way() -> None:
    """The squares come first and could merge, but the layer needs the step before's square, and they its result."""

    def build(g: GraphBuilder) -> None:
        squared, last = g.register("squared", f32(C)), g.register("last", f32(C))
        square = g.op("square", g.op("abs", last))
        y = linear(g, "layer", g.op("add", g.input("x", f32(C)), squared), activation="tanh")
        g.update("squared", g.op("neg", square))
        g.update("last", y)
        g.output("y", g.op("mul", y, y))

    beat = merged(build)
    assert (count(beat, "matmul"), count(beat, "square")) == (1, 2)
    keeps_its_bits(made(build), 2)


# --- what does not, and why ---------------------------------------------------------------------------------------
def _padded(g: GraphBuilder) -> None:
    g.output("y", g.op("conv1d", g.input("x", f32(4, C)), g.weight("w", f32(C, C, 3)), pad_left=2))


def _overlapping(g: GraphBuilder) -> None:
    g.output("y", g.op("conv1d", g.input("x", f32(4, C)), g.weight("w", f32(C, C, 3))))


def _two_operands(g: GraphBuilder) -> None:
    h, c = g.register("h", f32(C)), g.register("c", f32(C))
    weights = [g.weight(name, f32(4 * C, C)) for name in ("ih", "hh")]
    g.output("y", g.op("lstm", g.input("x", f32(C)), h, c, *weights)[0])
    g.update("h", h)
    g.update("c", c)


def _weight_added(g: GraphBuilder) -> None:
    weights = g.op("pack_panels", g.weight("w", f32(C, C))), g.weight("r", f32(1, C))
    g.output(
        "y",
        g.op(
            "matmul", g.input("x", f32(C)), *weights, n=C, k=C, frames=1, step=C, pad=0, products="f32", roles=RESIDUAL
        ),
    )


def _no_weights(g: GraphBuilder) -> None:
    g.output("y", g.op("tanh", g.input("x", f32(C))))


APART = (_padded, _overlapping, _two_operands, _weight_added, _no_weights)


@pytest.mark.parametrize("build", APART, ids=lambda f: f.__name__.strip("_"))
def test_what_takes_no_rows_is_left_alone(build: Build) -> None:
    beat = beat_of(made(build), 2)
    assert merge(beat, SELECTION, WILLING) is beat


def test_a_convolution_merges_where_its_windows_are_of_one_value() -> None:
    def build(stride: int, dilation: int) -> Build:
        def causal(g: GraphBuilder) -> None:
            x, reach = g.input("x", f32(2 * stride, C)), 2 * dilation + 1
            ring = g.ring("ring", reach - stride, f32(C))
            g.update("ring", x)
            rows = g.op("concat", ring, x, axis=0)
            g.output("y", g.op("conv1d", rows, g.weight("w", f32(C, C, 3)), stride=stride, dilation=dilation))

        return causal

    for stride, dilation in ((1, 1), (2, 1), (1, 2)):
        beat = merged(build(stride, dilation), 3)
        assert count(beat, "matmul") == count(beat_of(made(build(stride, dilation)), 1), "matmul")
        keeps_its_bits(made(build(stride, dilation)), 3)


def test_one_frame_of_several_rows_a_step() -> None:
    """The copies' windows are two rows apart, whatever the stride of a single frame."""

    def build(g: GraphBuilder) -> None:
        x, ring = g.input("x", f32(2, C)), g.ring("ring", 3, f32(C))
        g.update("ring", x)
        rows = g.op("concat", ring, x, axis=0)
        y = g.op("depthwise_conv1d", rows, g.weight("d", f32(C, 5)))
        g.output("y", g.op("add", y, g.op("conv1d", rows, g.weight("w", f32(C, C, 5)))))

    beat = merged(build, 3)
    assert [n.attributes["stride"] for n in beat.nodes if n.op == "depthwise_window"] == [2]
    assert [n.attributes["step"] for n in beat.nodes if n.op == "matmul"] == [2 * C]
    keeps_its_bits(made(build), 3)


def test_windows_stay_apart_where_a_recurrence_would_wait_for_all_of_them() -> None:
    def build(g: GraphBuilder) -> None:
        h, z = g.register("h", f32(1, C)), g.register("z", f32(1, C))
        h = g.op("tanh", g.op("add", h, g.input("x", f32(1, C))))
        g.update("h", h)
        ring = g.ring("ring", 2, f32(C))
        g.update("ring", h)
        seen = g.op("depthwise_conv1d", g.op("concat", ring, h, axis=0), g.weight("w", f32(C, 3)))
        z = g.op("tanh", g.op("add", z, seen))
        g.update("z", z)
        g.output("y", z)

    assert count(merged(build, 4), "ring_shift") > 0
    keeps_its_bits(made(build), 4)


def test_rows_are_copied_only_for_more_bytes_of_weights() -> None:
    """Inputs of the model lie apart: 2 steps of 2 rows of 8 to copy, 16 times 8 weights and 8 of bias to save."""
    build = convolutions(blocks=0)
    weights, rows = 4 * (16 * C + C), 2 * 2 * 4 * C
    fits = weights // (2 * 2 * rows)  # the rows that come and those that are given are read and written
    assert fits == 1
    assert count(merged(build, capacity=fits), "matmul") == 1
    assert count(merged(build, capacity=fits + 1), "matmul") == 2
    barrier = WILLING.model_copy(update={"barrier_s": 1.001 * weights})
    assert count(merged(build, target=barrier), "matmul") == 2


def test_no_chain_becomes_longer_than_it_is_worth() -> None:
    """Two recurrences, a layer between them: merged, it would wait for the first to go through all steps."""

    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(C))
        for name in ("first", "second"):
            h = g.register(name, f32(C))
            x = g.op("tanh", g.op("add", linear(g, name, h), x))
            g.update(name, x)
            x = linear(g, f"{name}.out", g.op("neg", x), activation="relu")
        g.output("y", x)

    free, dear = (WILLING.model_copy(update={"barrier_s": s}) for s in (0.0, 1e9))
    assert count(merged(build, 3, free), "matmul") < count(merged(build, 3, dear), "matmul") == 12
    keeps_its_bits(made(build), 3, free)


# --- random graphs ------------------------------------------------------------------------------------------------
def _normed(p: Pool) -> None:
    p.add(p.op("layer_norm", p.pick(VECTOR, MATRIX), p.weight(6), eps=0.5))


def _window(p: Pool) -> None:
    """A causal filter or product over rows with history, some of which may be fed back."""
    name = f"ring{len(p.g._states)}"
    taps, rows = p.draw(st.integers(2, 4)), p.pick(MATRIX)
    window = p.op("concat", p.g.ring(name, taps - 1, VECTOR), rows, axis=0)
    p.g.update(name, rows)
    if p.draw(st.booleans()):
        p.add(p.op("depthwise_conv1d", window, p.weight(6, taps)))
    else:
        p.add(p.op("conv1d", window, p.weight(6, 6, taps)))


STACKED = (*ROWS, _product, _product, _product, _normed, _window, _window)


@st.composite
def stacks(draw: DrawFn) -> Graph:
    """Mostly products and windows, some of them in loops through registers."""
    g = builder("stack")
    p = Pool(draw, g)
    p.add(g.input("x", VECTOR), g.input("m", MATRIX), g.input("wide", WIDE))
    registers = [f"r{i}" for i in range(draw(st.integers(0, 2)))]
    p.add(*(g.register(name, MATRIX) for name in registers))
    for _ in range(draw(st.integers(2, 10))):
        draw(st.sampled_from(STACKED))(p)
    if draw(st.booleans()):
        _cached(p)
    for name in registers:
        g.update(name, p.op("tanh", p.pick(MATRIX)))
    for i in range(draw(st.integers(1, 3))):
        g.output(f"y{i}", p.pick(VECTOR, MATRIX, WIDE))
    return g.build()


def runs_as_it_means(graph: Graph, steps: int) -> bool:
    """By the meaning of its phases; whether anything was merged."""
    weights, slots = weights_of(graph), 2
    lowered = lower_beat(graph, SELECTION, WILLING, steps)
    waves = assign_waves(lowered.phases)
    machine = Machine(lowered, waves, plan(lowered, waves, slots), weights, slots)
    agree(graph, machine, Meant(graph, weights, slots, steps), slots=slots, steps=steps, beats=3)
    compile_graph(graph, SELECTION, WILLING, capacity=slots, steps=steps)  # which checks the program's bytes
    beat = beat_of(graph, steps)
    return merge(beat, SELECTION, WILLING) is not beat


def test_random_graphs_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wpk.scheduler.joins.PART_ALIGN", 4)  # rows of random graphs are of six numbers
    monkeypatch.setattr("wpk.scheduler.merge.PART_ALIGN", 4)
    merges = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.one_of(graphs(), stacks(), stacks()), st.integers(2, 4))
    def run(graph: Graph, steps: int) -> None:
        note(print_graph(graph))
        merges.append(runs_as_it_means(graph, steps))

    run()
    assert sum(merges) > len(merges) // 3


# --- the compiler -------------------------------------------------------------------------------------------------
def test_the_pass_is_shown_where_a_beat_has_several_steps() -> None:
    for steps in (1, 2):
        shown: list[str] = []
        lower_beat(made(_two_layers), SELECTION, CPU, steps, lambda name, _: shown.append(name))  # noqa: B023
        assert ("merge" in shown) == (steps > 1)


def test_merged_phases_are_explained() -> None:
    graph = made(convolutions(blocks=1))
    program = compile_graph(graph, SELECTION, WILLING, capacity=2, steps=2).program
    rows = phase_rows(program, lower_beat(graph, SELECTION, WILLING, 2, capacity=2).phases)
    found = [(row["op"], row["shape"]) for row in rows if row["op"] in ("matmul", "layer_norm", "depthwise_window")]
    assert found == [
        ("matmul", [4, C]), ("depthwise_window", [4, C]), ("layer_norm", [4, C]), ("matmul", [4, 4 * C]),
        ("matmul", [4, C]),
    ]  # fmt: skip


def test_weights_that_the_chip_does_not_hold_count_once_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ON_CHIP_BYTES", 1)
    graph = made(convolutions())

    def weights(steps: int) -> int:
        return compile_graph(graph, SELECTION, WILLING, capacity=2, steps=steps).floor.bytes["weights"]

    once = weights(1)
    assert weights(2) == weights(3) == once
    with unmerged():
        assert weights(3) == 3 * once


def test_a_model_of_components_gives_the_same_bits() -> None:
    spec = chain(
        [
            {"kind": "conv1d", "channels": 8, "taps": 5, "stride": 2, "causal": True, "activation": "silu"},
            {"kind": "separable_blocks", "dilations": [1, 2], "taps": 3},
            {"kind": "dense", "name": "head", "units": 3},
        ],
        {"x": "f32[4,4]"}, "f32[2,3]",
    )  # fmt: skip
    graph = build_graph(spec, context=1)
    beat = merge(beat_of(graph, 2), SELECTION, WILLING)
    assert count(beat, "matmul") == count(beat_of(graph, 1), "matmul") == 4
    keeps_its_bits(graph, 2)


def test_the_same_beat_gives_the_same_bytes_in_every_process() -> None:
    script = """
from tests.scheduler.test_merge import SELECTION, WILLING, compile_graph, convolutions, made
print(compile_graph(made(convolutions()), SELECTION, WILLING, capacity=3, steps=3).program.sha256)
"""
    env = dict(os.environ, PYTHONHASHSEED="2026")
    found = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=env, text=True)
    made_here = compile_graph(made(convolutions()), SELECTION, WILLING, capacity=3, steps=3).program
    assert found.strip() == made_here.sha256
