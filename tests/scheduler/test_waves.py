"""Waves: as early as the dependences allow, and no earlier."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, graphs, lowered_beat
from wpk.ir.types import f32
from wpk.scheduler.phases import Phase
from wpk.scheduler.waves import assign_waves


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
