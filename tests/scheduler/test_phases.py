"""From a graph to phases: what costs one, where states live, and what may not be written over what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import Meant, agree, builder, compiled, graphs, lowered_beat, machine, told, weights_of
from wpk.ir.errors import CompileError, GraphError
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import bf16, boolean, f32, i32
from wpk.scheduler.phases import Phase
from wpk.scheduler.program import Role

Build = Callable[[GraphBuilder], object]


def made(build: Build) -> Graph:
    g = builder()
    build(g)
    return g.build()


def phases(build: Build, steps: int = 1) -> list[str]:
    """The phases of a graph, which run as the graph means, for two sessions and one to three steps a beat."""
    graph = made(build)
    weights = weights_of(graph)
    for n in (1, 2, 3):
        agree(graph, machine(graph, weights, 2, n), Meant(graph, weights, 2, n), slots=2, steps=n)
        compiled(graph, capacity=2, steps=n)
    return told(lowered_beat(graph, steps))


# --- views --------------------------------------------------------------------------------------------------------
def test_a_view_is_no_phase() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(2, 6))
        row = g.op("slice", x, axis=0, start=1, stop=2)
        g.output("y", g.op("tanh", g.op("slice", g.op("reshape", row, shape=(6,)), axis=0, start=2, stop=5)))

    assert phases(build) == ["tanh x@0+32 -> y@0"]


def test_a_transpose_that_moves_only_sizes_of_one_is_a_view() -> None:
    def build(g: GraphBuilder) -> None:
        turned = g.op("transpose", g.input("x", f32(1, 6)), axes=(1, 0))
        g.output("y", g.op("tanh", turned))

    assert phases(build) == ["tanh x@0 -> y@0"]


def test_a_slice_across_rows_is_a_phase() -> None:
    def build(g: GraphBuilder) -> None:
        g.output("y", g.op("slice", g.input("x", f32(2, 6)), axis=1, start=0, stop=3))

    assert phases(build) == ["slice x@0 -> y@0"]


def test_what_is_shown_through_a_view_is_written_into_the_output() -> None:
    def build(g: GraphBuilder) -> None:
        g.output("y", g.op("reshape", g.op("tanh", g.input("x", f32(2, 6))), shape=(12,)))

    assert phases(build) == ["tanh x@0 -> y@0"]


# --- outputs ------------------------------------------------------------------------------------------------------
def test_an_input_that_is_an_output_is_copied() -> None:
    assert phases(lambda g: g.output("x", g.input("x", f32(6)))) == ["copy x@0 -> x@0"]


def test_two_outputs_of_one_value() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32(2, 6))
        y = g.op("tanh", x)
        g.output("a", y)
        g.output("b", g.op("reshape", y, shape=(12,)))
        g.output("part", g.op("slice", y, axis=0, start=1, stop=2))

    assert phases(build) == ["tanh x@0 -> a@0", "copy a@0 -> b@0", "copy a@0+24 -> part@0"]


def test_an_output_that_is_a_weight_is_refused() -> None:
    text = 'graph "g" {\n  weight %0: f32[6] "w"\n  output %0 "y"\n}\n'
    with pytest.raises(GraphError, match="output 'y' does not depend on the session"):
        compiled(parse_graph(text))


def test_a_graph_that_does_nothing_is_refused() -> None:
    with pytest.raises(GraphError, match="a graph that does nothing"):
        compiled(parse_graph('graph "g" {\n  input %0: f32[6] "x"\n}\n'))


def test_unused_inputs_weights_and_results_do_no_harm() -> None:
    def build(g: GraphBuilder) -> None:
        g.input("unused", f32(6))
        g.weight("idle", f32(6))
        h, _ = g.op("lstm_cell", g.input("gates", f32(24)), g.input("c", f32(6)))
        g.output("h", h)

    assert phases(build) == ["lstm_cell gates@0 c@0 -> h@0 t0"]


def test_a_graph_without_inputs() -> None:
    assert phases(lambda g: g.output("y", g.position())) == ["copy position -> y@0", "increment position -> position"]


# --- states -------------------------------------------------------------------------------------------------------
def _counter(g: GraphBuilder) -> None:
    g.update("r", g.op("add", g.register("r", f32(6)), g.input("x", f32(6))))
    g.output("y", g.op("tanh", g.input("v", f32(6))))


def _read_later(g: GraphBuilder) -> None:
    r = g.register("r", f32(6))
    g.update("r", g.op("add", r, g.input("x", f32(6))))
    g.output("y", g.op("tanh", r))


def _read_later_through_a_view(g: GraphBuilder) -> None:
    r = g.register("r", f32(2, 6))
    row = g.op("slice", r, axis=0, start=1, stop=2)
    g.update("r", g.op("add", r, g.input("x", f32(2, 6))))
    g.output("y", g.op("tanh", row))


def _old_content_shown(g: GraphBuilder) -> None:
    r = g.register("r", f32(6))
    g.output("y", r)
    g.update("r", g.op("add", r, g.input("x", f32(6))))


def _old_content_shown_late(g: GraphBuilder) -> None:
    """A view made after the update, of what was before it."""
    r = g.register("r", f32(2, 6))
    g.update("r", g.op("add", r, g.input("x", f32(2, 6))))
    g.output("y", g.op("reshape", r, shape=(12,)))


def _shown_after(g: GraphBuilder) -> None:
    r = g.op("add", g.register("r", f32(6)), g.input("x", f32(6)))
    g.update("r", r)
    g.output("y", r)


def _second_operand(g: GraphBuilder) -> None:
    """Overwriting is allowed over the first operand alone."""
    r = g.register("r", f32(6))
    g.update("r", g.op("sub", g.input("x", f32(6)), r))
    g.output("y", g.op("tanh", g.input("v", f32(6))))


def _both_operands(g: GraphBuilder) -> None:
    r = g.register("r", f32(6), g.weight("w", f32(6)))
    g.update("r", g.op("mul", r, r))
    g.output("y", g.op("tanh", g.input("x", f32(6))))


def _broadcast_of_itself(g: GraphBuilder) -> None:
    """The first element of the state, added everywhere, would be overwritten while it is still read."""
    r = g.register("r", f32(600), g.weight("w", f32(600)))
    first = g.op("reshape", g.op("slice", r, axis=0, start=0, stop=1), shape=())
    g.output("y", r)
    g.update("r", g.op("add", first, g.input("x", f32(600))))


def _moved_within_itself(g: GraphBuilder) -> None:
    """A ring that takes in its own oldest row."""
    ring = g.ring("r", 3, f32(6), g.weight("w", f32(3, 6)))
    g.output("y", g.op("add", ring, g.input("x", f32(6))))
    g.update("r", g.op("slice", ring, axis=0, start=0, stop=1))


def _swap(g: GraphBuilder) -> None:
    a, b = g.register("a", f32(6), g.weight("w", f32(6))), g.register("b", f32(6))
    g.output("y", g.op("add", a, g.input("x", f32(6))))
    g.update("a", b)
    g.update("b", a)


def _delay(g: GraphBuilder) -> None:
    a, b = g.register("a", f32(6)), g.register("b", f32(6))
    g.output("y", b)
    g.update("a", g.input("x", f32(6)))
    g.update("b", a)


def _one_value_two_states(g: GraphBuilder) -> None:
    a, b = g.register("a", f32(6)), g.register("b", f32(6))
    g.output("y", b)
    new = g.op("add", a, g.input("x", f32(6)))
    g.update("a", new)
    g.update("b", new)


def _two_results_two_states(g: GraphBuilder) -> None:
    h, c = g.register("h", f32(6)), g.register("c", f32(6))
    g.output("y", h)
    for name, value in zip("hc", g.op("lstm_cell", g.input("x", f32(24)), c), strict=True):
        g.update(name, value)


def _two_results_crossed(g: GraphBuilder) -> None:
    """h becomes what is c by the operator, and c what is h: the cell may not go where it is read as c."""
    h, c = g.register("h", f32(6)), g.register("c", f32(6))
    g.output("y", h)
    for name, value in zip("ch", g.op("lstm_cell", g.input("x", f32(24)), c), strict=True):
        g.update(name, value)


def _frozen(g: GraphBuilder) -> None:
    r = g.register("r", f32(6), g.weight("w", f32(6)))
    g.output("y", g.op("add", r, g.input("x", f32(6))))
    g.update("r", r)


def _from_a_weight(g: GraphBuilder) -> None:
    r = g.register("r", f32(6))
    g.output("y", g.op("add", r, g.input("x", f32(6))))
    g.update("r", g.op("neg", g.weight("w", f32(6))))


def _from_an_input(g: GraphBuilder) -> None:
    r, x = g.register("r", f32(6)), g.input("x", f32(6))
    g.output("y", g.op("add", r, x))
    g.update("r", x)


def _part_of_another(g: GraphBuilder) -> None:
    a, b = g.register("a", f32(2, 6)), g.register("b", f32(6))
    g.output("y", b)
    g.update("a", g.op("add", a, g.input("x", f32(2, 6))))
    g.update("b", g.op("reshape", g.op("slice", a, axis=0, start=1, stop=2), shape=(6,)))


def _ring(g: GraphBuilder) -> None:
    x = g.input("x", f32(1, 6))
    g.output("y", g.op("concat", g.ring("r", 2, f32(6)), x, axis=0))
    g.update("r", x)


def _cache(g: GraphBuilder) -> None:
    x, cache = g.input("x", f32(1, 6)), g.cache("c", f32(1, 6))
    before = g.op("attention", x, cache, cache, g.position(), scale=1.0)
    cache = g.append("c", x)
    g.output("y", g.op("add", before, g.op("attention", x, cache, cache, g.position(), scale=1.0)))


def _cache_shown(g: GraphBuilder) -> None:
    g.output("old", g.cache("c", f32(6)))
    g.output("new", g.append("c", g.input("x", f32(6))))


STATES: dict[Build, list[str]] = {
    _counter: ["add r x@0 -> r", "tanh v@0 -> y@0"],
    _read_later: ["add r x@0 -> t0", "tanh r -> y@0", "copy t0 -> r"],
    _read_later_through_a_view: ["add r x@0 -> t0", "tanh r+24 -> y@0", "copy t0 -> r"],
    _old_content_shown: ["copy r -> y@0", "add r x@0 -> r"],
    _old_content_shown_late: ["add r x@0 -> t0", "copy r -> y@0", "copy t0 -> r"],
    _shown_after: ["add r x@0 -> y@0", "copy y@0 -> r"],
    _second_operand: ["sub x@0 r -> t0", "tanh v@0 -> y@0", "copy t0 -> r"],
    _both_operands: ["mul r r -> t0", "tanh x@0 -> y@0", "copy t0 -> r"],
    _broadcast_of_itself: ["copy r -> y@0", "add r x@0 -> t0", "copy t0 -> r"],
    _moved_within_itself: ["add r x@0 -> y@0", "ring_shift r r -> t0", "copy t0 -> r"],
    _swap: ["add a x@0 -> y@0", "copy b -> t0", "copy a -> t1", "copy t0 -> a", "copy t1 -> b"],
    _delay: ["copy b -> y@0", "copy a -> t0", "copy x@0 -> a", "copy t0 -> b"],
    _one_value_two_states: ["copy b -> y@0", "add a x@0 -> a", "copy a -> b"],
    _two_results_two_states: ["copy h -> y@0", "lstm_cell x@0 c -> h c"],
    _two_results_crossed: ["copy h -> y@0", "lstm_cell x@0 c -> t0 h", "copy t0 -> c"],
    _frozen: ["add r x@0 -> y@0"],
    _from_a_weight: ["add r x@0 -> y@0", "copy %1 -> r"],
    _from_an_input: ["add r x@0 -> y@0", "copy x@0 -> r"],
    _part_of_another: ["copy b -> y@0", "add a x@0 -> t0", "copy a+24 -> t1", "copy t0 -> a", "copy t1 -> b"],
    _ring: ["concat r x@0 -> y@0", "ring_shift r x@0 -> r"],
    _cache: [
        "increment position -> t0", "attention x@0 c c position -> t1", "cache_append c x@0 position -> c",
        "attention x@0 c c position -> t2", "add t1 t2 -> y@0", "copy t0 -> position",
    ],
    _cache_shown: [
        "copy c -> old@0", "increment position -> t0", "cache_append c x@0 position -> c", "copy c -> new@0",
        "copy t0 -> position",
    ],
}  # fmt: skip


@pytest.mark.parametrize("build", STATES, ids=lambda f: f.__name__.strip("_"))
def test_states_are_written_in_place_only_where_nobody_reads_the_old_content(build: Build) -> None:
    assert phases(build) == STATES[build]


def test_every_step_of_a_beat_reads_what_the_one_before_it_left() -> None:
    assert phases(_counter, 2) == [
        "add r x@0 -> t0", "tanh v@0 -> y@0", "add t0 x@1 -> r", "tanh v@1 -> y@1",
    ]  # fmt: skip
    assert phases(_swap, 2) == ["add a x@0 -> y@0", "add b x@1 -> y@1"]
    assert [p for p in phases(_cache, 2) if p.startswith("cache_append")] == [
        "cache_append c x@0 position -> c", "cache_append c x@1 t0 -> c",
    ]  # fmt: skip


def test_initial_images_are_made_by_the_load_graph() -> None:
    def build(g: GraphBuilder) -> None:
        w = g.weight("w", f32(6))
        r = g.register("r", f32(6), g.op("neg", w))
        g.update("r", g.op("add", r, g.op("add", g.input("x", f32(6)), g.op("abs", w))))
        g.output("y", r)

    phases(build)
    lowered = lowered_beat(made(build))
    names = {s.index: s for s in lowered.storages if s.role is Role.WEIGHT}
    assert {p.name for p in lowered.load.outputs} == {"initial:r", *(f"value:{i}" for i in names)}
    assert sorted(n.op for n in lowered.load.nodes) == ["abs", "neg"]
    assert [p.name for p in lowered.load.weights] == ["w"]


def test_a_loop_stops_for_each_session_where_its_own_predicate_says() -> None:
    def build(g: GraphBuilder) -> None:
        x = g.input("x", f32())
        half = g.op("constant", shape=(), values=(0.5,))

        def body(i: int, carried: tuple[Value, ...]) -> tuple[tuple[Value, ...], Value]:
            return (g.op("add", carried[0], x),), g.op("less", carried[0], half)

        (total,) = g.loop(4, [g.register("total", f32())], body)
        g.update("total", total)
        g.output("y", total)

    phases(build)


# --- overwriting --------------------------------------------------------------------------------------------------
def _read_after_append(g: GraphBuilder) -> None:
    cache = g.cache("c", f32(6))
    g.append("c", g.input("x", f32(6)))
    g.output("y", g.op("tanh", cache))


def _view_read_after_append(g: GraphBuilder) -> None:
    rows = g.op("reshape", g.cache("c", f32(6)), shape=(24,))
    g.append("c", g.input("x", f32(6)))
    g.output("y", g.op("tanh", rows))


def _read_after_append_to_a_view(g: GraphBuilder) -> None:
    flat = g.register("r", f32(24))
    rows = g.op("cache_append", g.op("reshape", flat, shape=(4, 6)), g.input("x", f32(6)), g.position())
    g.update("r", g.op("reshape", rows, shape=(24,)))
    g.output("y", g.op("tanh", flat))


def _shown_after_append(g: GraphBuilder) -> None:
    cache = g.cache("c", f32(6))
    g.append("c", g.input("x", f32(6)))
    g.output("y", g.op("slice", cache, axis=0, start=0, stop=1))


def _kept_after_append(g: GraphBuilder) -> None:
    cache, r = g.cache("c", f32(6)), g.register("r", f32(4, 6))
    g.append("c", g.input("x", f32(6)))
    g.update("r", cache)
    g.output("y", r)


def _append_not_kept(g: GraphBuilder) -> None:
    """The state is to stay as it was, but its own storage has the row in it."""
    r = g.register("r", f32(4, 6))
    g.output("y", g.op("cache_append", r, g.input("x", f32(6)), g.position()))
    g.update("r", r)


def _appended_to_a_part(g: GraphBuilder) -> None:
    r = g.register("r", f32(4, 6))
    two = g.op("slice", r, axis=0, start=0, stop=2)
    g.output("y", g.op("cache_append", two, g.input("x", f32(6)), g.position()))
    g.update("r", g.op("tanh", r))


MISUSES = (
    _read_after_append, _view_read_after_append, _read_after_append_to_a_view, _shown_after_append,
    _kept_after_append, _append_not_kept, _appended_to_a_part,
)  # fmt: skip


@pytest.mark.parametrize("build", MISUSES, ids=lambda f: f.__name__.strip("_"))
def test_old_content_of_a_cache_is_not_read_after_the_append(build: Build) -> None:
    with pytest.raises(CompileError, match="after it was overwritten in place") as error:
        compiled(made(build))
    assert error.value.found == "cache_append"


def test_an_append_does_not_overwrite_an_input() -> None:
    def build(g: GraphBuilder) -> None:
        rows = g.input("rows", f32(4, 6))
        g.output("y", g.op("cache_append", rows, g.input("x", f32(6)), g.position()))

    with pytest.raises(CompileError, match="overwrites its operand"):
        compiled(made(build))


def test_an_append_to_what_is_shown_leaves_the_output_alone() -> None:
    def build(g: GraphBuilder) -> None:
        rows = g.op("tanh", g.input("rows", f32(4, 6)))
        g.output("rows", rows)
        g.output("y", g.op("cache_append", rows, g.input("x", f32(6)), g.position()))

    assert phases(build)[:2] == ["tanh rows@0 -> t0", "copy t0 -> rows@0"]


def test_types_of_four_bytes_are_copied_and_kept() -> None:
    def build(g: GraphBuilder) -> None:
        flag, count = g.input("flag", boolean(3)), g.input("count", i32(2))
        g.output("flag", g.register("was", boolean(3)))
        g.output("count", g.register("old", i32(2)))
        g.update("was", flag)
        g.update("old", count)

    phases(build)


# --- random graphs ------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None, derandomize=True)
@given(graphs(), st.integers(1, 3))
def test_phases_mean_what_the_graph_means(graph: Graph, steps: int) -> None:
    """In arenas with storage reused, and with the phases of a wave in reverse: so waves and layout too."""
    note(print_graph(graph))
    weights = weights_of(graph)
    agree(graph, machine(graph, weights, 2, steps), Meant(graph, weights, 2, steps), slots=2, steps=steps, beats=4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(graphs())
def test_a_phase_waits_for_all_that_it_shares_bytes_with(graph: Graph) -> None:
    note(print_graph(graph))
    lowered = lowered_beat(graph, 2)
    before: list[set[int]] = []
    for phase in lowered.phases:
        assert all(i < phase.index for i in phase.after)
        before.append(set(phase.after).union(*(before[i] for i in phase.after)))
        for other in lowered.phases[: phase.index]:
            (read, mine), (seen, theirs) = spans(phase), spans(other)
            if meet(mine, theirs + seen) or meet(read, theirs):
                assert other.index in before[phase.index], (told(lowered), phase.index, other.index)


Span = tuple[int, int, int]  # storage, first byte, end


def spans(phase: Phase) -> tuple[list[Span], list[Span]]:
    """What a phase reads and what it writes."""
    found = [(ref.storage, ref.start, ref.start + size) for _, ref, size in phase.places]
    return found[: len(phase.inputs)], found[len(phase.inputs) :]


def meet(some: list[Span], others: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in some for b in others)


# --- state at hand ------------------------------------------------------------------------------------------------
def test_recurrences_and_attention_stream_state_and_rows_of_caches_touch_it() -> None:
    g = builder()
    rows = g.input("rows", f32(64))
    query, cache = g.op("qkv_split", rows, g.cache("kv", bf16(2, 1, 16)), g.position(), scale=0.25)
    g.replace("kv", cache)
    g.output("y", g.op("kv_attention", query, cache, g.position(), heads=2))
    found = {p.operator.name: p.touches_state for p in lowered_beat(g.build()).phases}
    assert found == {
        "qkv_split": True, "attention_parts": False, "attention_merge": False, "increment": True, "copy": True
    }  # fmt: skip
