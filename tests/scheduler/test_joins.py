"""Joins: what is concatenated of values that were written side by side is no phase, and where it must be one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.scheduler.graphs import compiled, lowered_beat
from tests.scheduler.test_phases import Build, made, phases
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.scheduler.check import check_program
from wpk.scheduler.program import Role


def _rows(g: GraphBuilder, count: int = 2, width: int = 4) -> list[Value]:
    """Of as many inputs: rows that a phase computes."""
    return [g.op("tanh", g.input(name, f32(1, width))) for name in "abcdef"[:count]]


def _joined(g: GraphBuilder) -> None:
    g.output("y", g.op("abs", g.op("concat", *_rows(g), axis=0)))


def _joined_into_an_output(g: GraphBuilder) -> None:
    g.output("y", g.op("concat", *_rows(g), axis=0))


def _joined_through_views(g: GraphBuilder) -> None:
    a, b = (g.op("reshape", row, shape=(4,)) for row in _rows(g))
    g.output("y", g.op("abs", g.op("concat", a, b, axis=0)))


def _joined_and_read_alone(g: GraphBuilder) -> None:
    a, b = _rows(g)
    g.output("y", g.op("abs", g.op("concat", a, b, axis=0)))
    g.output("z", g.op("neg", b))


def _joined_in_a_join(g: GraphBuilder) -> None:
    a, b, c = _rows(g, 3)
    g.output("y", g.op("abs", g.op("concat", c, g.op("concat", a, b, axis=0), axis=0)))


def _joined_along_an_axis_of_one(g: GraphBuilder) -> None:
    g.output("y", g.op("abs", g.op("concat", *_rows(g), axis=-1)))


JOINED = {
    _joined: ["tanh a@0 -> t0", "tanh b@0 -> t0+16", "abs t0 -> y@0"],
    _joined_into_an_output: ["tanh a@0 -> y@0", "tanh b@0 -> y@0+16"],
    _joined_through_views: ["tanh a@0 -> t0", "tanh b@0 -> t0+16", "abs t0 -> y@0"],
    _joined_and_read_alone: ["tanh a@0 -> t0", "tanh b@0 -> t0+16", "abs t0 -> y@0", "neg t0+16 -> z@0"],
    _joined_in_a_join: ["tanh a@0 -> t0+16", "tanh b@0 -> t0+32", "tanh c@0 -> t0", "abs t0 -> y@0"],
    _joined_along_an_axis_of_one: ["tanh a@0 -> t0", "tanh b@0 -> t0+16", "abs t0 -> y@0"],
}  # fmt: skip


@pytest.mark.parametrize("build", JOINED, ids=lambda f: f.__name__.strip("_"))
def test_values_that_are_concatenated_are_written_side_by_side(build: Build) -> None:
    assert phases(build) == JOINED[build]


def _of_an_input(g: GraphBuilder) -> None:
    g.output("y", g.op("concat", g.op("tanh", g.input("a", f32(1, 4))), g.input("b", f32(1, 4)), axis=0))


def _of_a_state(g: GraphBuilder) -> None:
    (row,) = _rows(g, 1)
    ring = g.ring("r", 2, f32(4))
    g.update("r", row)
    g.output("y", g.op("concat", ring, row, axis=0))


def _twice_the_same(g: GraphBuilder) -> None:
    (row,) = _rows(g, 1)
    g.output("y", g.op("concat", row, row, axis=0))


def _an_output_too(g: GraphBuilder) -> None:
    a, b = _rows(g)
    g.output("a", a)
    g.output("y", g.op("concat", a, b, axis=0))


def _what_a_state_becomes(g: GraphBuilder) -> None:
    a, b = _rows(g)
    g.register("r", f32(1, 4))
    g.update("r", a)
    g.output("y", g.op("concat", a, b, axis=0))


def _into_a_state(g: GraphBuilder) -> None:
    """A part would be there before the old content has been read."""
    a, b = _rows(g)
    r = g.register("r", f32(2, 4))
    g.update("r", g.op("concat", a, g.op("add", b, g.op("slice", r, axis=0, start=0, stop=1)), axis=0))
    g.output("y", g.op("abs", r))


def _part_of_a_value(g: GraphBuilder) -> None:
    a, b = _rows(g, 2, 8)
    g.output("y", g.op("concat", g.op("slice", a, axis=1, start=0, stop=4), b, axis=1))


def _appended_to(g: GraphBuilder) -> None:
    a, b = _rows(g)
    rows = g.op("cache_append", a, g.op("reshape", g.input("x", f32(1, 4)), shape=(4,)), g.position())
    g.output("y", g.op("concat", rows, b, axis=0))


def _appended_to_later(g: GraphBuilder) -> None:
    a, b = _rows(g)
    g.output("y", g.op("abs", g.op("concat", a, b, axis=0)))
    row = g.op("reshape", g.input("x", f32(1, 4)), shape=(4,))
    g.output("z", g.op("cache_append", a, row, g.position()))


def _off_the_lines(g: GraphBuilder) -> None:
    """24 bytes are not where a copy engine can begin."""
    g.output("y", g.op("abs", g.op("concat", *_rows(g, 2, 6), axis=0)))


def _between(g: GraphBuilder) -> None:
    a, b = (g.op("tanh", g.input(name, f32(2, 4))) for name in "ab")
    g.output("y", g.op("concat", a, b, axis=1))


COPIED = (
    _of_an_input, _of_a_state, _twice_the_same, _an_output_too, _what_a_state_becomes, _into_a_state,
    _part_of_a_value, _appended_to, _appended_to_later, _off_the_lines, _between,
)  # fmt: skip


@pytest.mark.parametrize("build", COPIED, ids=lambda f: f.__name__.strip("_"))
def test_what_cannot_be_written_there_is_copied(build: Build) -> None:
    assert sum(phase.startswith("concat") for phase in phases(build)) == 1


def test_of_two_concatenations_of_a_value_one_takes_it() -> None:
    def build(g: GraphBuilder) -> None:
        a, b, c = _rows(g, 3)
        g.output("y", g.op("abs", g.op("concat", a, b, axis=0)))
        g.output("z", g.op("abs", g.op("concat", b, c, axis=0)))

    assert phases(build)[:4] == ["tanh a@0 -> t0", "tanh b@0 -> t0+16", "tanh c@0 -> t1", "abs t0 -> y@0"]


def test_who_reads_a_part_waits_for_its_writer_alone_and_who_reads_all_for_all() -> None:
    *writers, _, alone = lowered_beat(made(_joined_and_read_alone)).phases
    both = next(p for p in lowered_beat(made(_joined_and_read_alone)).phases if p.operator.name == "abs")
    assert [p.after for p in writers[:2]] == [frozenset(), frozenset()]
    assert (both.after, alone.after) == ({0, 1}, {1})


def test_a_part_that_is_not_written_fails_the_checks() -> None:
    program = compiled(made(_joined), capacity=2).program
    broken = np.flatnonzero(program.uses[1]["start"] == 16)
    assert len(broken) == 1 and all(check.ok for check in check_program(program))
    program.payloads["reference"][1, broken] -= 16
    program.uses[1]["start"][broken] = 0
    failed = {check.name for check in check_program(program) if not check.ok}
    assert {"definition", "hazards"} <= failed


def test_an_output_that_is_joined_has_no_storage_beside_it() -> None:
    roles = [s.role for s in lowered_beat(made(_joined_into_an_output)).storages]
    assert roles == [Role.INPUT, Role.INPUT, Role.OUTPUT]
