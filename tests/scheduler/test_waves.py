"""Waves: as early as the dependences allow, but for what may wait beside something longer."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, compiled, graphs, lowered_beat, tiled
from wpk.ir.text import print_graph
from wpk.ir.types import f32
from wpk.scheduler.phases import Phase
from wpk.scheduler.target import TARGETS, find_target
from wpk.scheduler.waves import LONGER, assign_waves, move_beside, use_slack


def phases(*after: set[int]) -> list[Phase]:
    """Phases of which nothing but their dependences is known."""
    return [Phase(i, cast(Any, None), (), (), (), "", frozenset(a)) for i, a in enumerate(after)]


def test_nothing_needs_no_wave() -> None:
    assert assign_waves([]) == ()


def test_what_is_independent_shares_a_wave_and_what_follows_comes_next() -> None:
    assert assign_waves(phases(set(), set(), {0}, {0, 1}, {2, 3}, set())) == (0, 0, 1, 1, 2, 0)


def test_a_phase_waits_for_the_last_of_its_own() -> None:
    assert assign_waves(phases(set(), {0}, {1}, {0, 2}, {0})) == (0, 1, 2, 3, 1)


@st.composite
def dependences(draw: st.DrawFn) -> list[set[int]]:
    count = draw(st.integers(0, 12))
    return [set(draw(st.lists(st.integers(0, i - 1), max_size=3))) if i else set() for i in range(count)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dependences())
def test_a_wave_is_the_longest_chain_that_leads_to_it(after: list[set[int]]) -> None:
    def chain(i: int) -> int:
        return 1 + max(map(chain, after[i]), default=-1)

    assert assign_waves(phases(*after)) == tuple(map(chain, range(len(after))))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(graphs())
def test_no_wave_is_empty(graph: Any) -> None:
    waves = assign_waves(lowered_beat(graph).phases)
    assert set(waves) == set(range(max(waves) + 1))


def test_independent_chains_share_waves() -> None:
    g = builder()
    for chain in ("a", "b", "c"):
        value = g.input(chain, f32(6))
        for op in ("tanh", "relu", "neg"):
            value = g.op(op, value)
        g.output(chain, value)
    assert sorted(assign_waves(lowered_beat(g.build()).phases)) == [0] * 3 + [1] * 3 + [2] * 3


# --- slack --------------------------------------------------------------------------------------------------------
CHAIN: list[set[int]] = [set(), {0}, {1}, {2}, {3}]  # phases 0 to 4, each after the one before


def moved(after: list[set[int]], seconds: list[float], patient: set[int]) -> tuple[int, ...]:
    some = phases(*after)
    return move_beside(some, assign_waves(some), seconds, patient)


def test_what_nothing_waits_for_goes_beside_the_first_wave_that_is_far_longer() -> None:
    lengths = [1.0, 15.0, 16.0, 99.0, 1.0]
    assert moved([*CHAIN, set()], [*lengths, 1.0], {5}) == (0, 1, 2, 3, 4, 2)
    assert moved([*CHAIN, {2}], [*lengths, 1.0], {5}) == (0, 1, 2, 3, 4, 3)  # after what it follows
    assert moved([*CHAIN, set()], [*lengths, 2.0], {5}) == (0, 1, 2, 3, 4, 3)
    assert moved([*CHAIN, set()], [*lengths, 9.0], {5}) == (0, 1, 2, 3, 4, 0)  # nowhere: as early as may be
    assert moved([*CHAIN, set()], [*lengths, 1.0], set()) == (0, 1, 2, 3, 4, 0)


def test_a_wave_takes_in_no_more_than_it_hides() -> None:
    lengths = [1.0, 32.0, 99.0, 1.0, 1.0]
    found = moved([*CHAIN, set(), set(), set()], [*lengths, 1.0, 1.0, 1.0], {5, 6, 7})
    assert found == (0, 1, 2, 3, 4, 1, 1, 2)


def test_what_follows_a_phase_that_moves_keeps_its_place_or_moves_behind_it() -> None:
    lengths = [1.0, 1.0, 40.0, 40.0, 1.0]
    assert moved([*CHAIN, set(), {5}], [*lengths, 1.0, 1.0], {5, 6}) == (0, 1, 2, 3, 4, 2, 3)
    assert moved([*CHAIN, set(), {5}], [*lengths, 1.0, 1.0], {5}) == (0, 1, 2, 3, 4, 0, 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dependences(), st.data())
def test_moving_keeps_every_dependence_every_wave_and_whatever_is_not_patient(
    after: list[set[int]], data: st.DataObject
) -> None:
    some = phases(*after)
    seconds = data.draw(st.lists(st.sampled_from((0.1, 1.0, 40.0)), min_size=len(some), max_size=len(some)))
    patient = data.draw(st.sets(st.integers(0, max(0, len(some) - 1))).map(lambda s: s & set(range(len(some)))))
    early = assign_waves(some)
    found = move_beside(some, early, seconds, patient)
    assert all(found[i] < found[phase.index] for phase in some for i in phase.after)
    assert set(found) == set(early)
    assert all(w >= e for w, e in zip(found, early, strict=True))
    for i in range(len(some)):
        if found[i] != early[i]:
            beside = [seconds[j] for j in range(len(some)) if found[j] == found[i] and j != i]
            assert i in patient and max(beside) >= LONGER * seconds[i]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from((1, 56)), st.sampled_from(sorted(TARGETS)))
def test_programs_whose_phases_moved_pass_their_checks(graph: Any, slots: int, target: str) -> None:
    note(print_graph(graph))
    lowered = lowered_beat(graph, 2, target)
    early = assign_waves(lowered.phases)
    assert set(use_slack(lowered, early, slots, find_target(target))) == set(early)
    assert compiled(graph, capacity=slots, steps=2, target=target).program.waves == len(set(early))


def test_the_next_position_is_made_and_kept_beside_products() -> None:
    g = builder()
    x = g.op("add", g.input("x", f32(8448)), g.op("cast", g.position(), dtype="f32"))
    for i in range(3):
        x = g.op("tanh", tiled(g, x, 8448, f"w{i}"))
    g.output("y", x)
    lowered, target = lowered_beat(g.build(), target="h200"), find_target("h200")
    early = assign_waves(lowered.phases)
    names = [phase.operator.name for phase in lowered.phases]
    found = use_slack(lowered, early, 56, target)
    products = [w for name, w in zip(names, found, strict=True) if name == "tiled_matmul"]
    increment = names.index("increment")
    assert lowered.phases[increment].touches_state
    assert found[increment] in products
    assert all(found[i] == early[i] or i == increment or names[i] == "copy" for i in range(len(names)))
