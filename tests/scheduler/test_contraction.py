"""Contraction: what must follow what while nodes become one, how long the longest chain is, and in which order."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from wpk.scheduler.contraction import Contraction

Before = list[list[int]]


def ladder() -> Contraction:
    """Two steps of a, b, c: 0 -> 1 -> 2 and 3 -> 4 -> 5."""
    return Contraction([[], [0], [1], [], [3], [4]], [1] * 6)


def test_copies_of_two_steps_become_one_after_the_other() -> None:
    graph = ladder()
    for pair in ((0, 3), (1, 4), (2, 5)):
        assert graph.apart(*pair) and graph.longer(pair) == 0
        graph.join(pair)
    assert list(graph.order()) == [(0, 3), (1, 4), (2, 5)]


def test_of_two_pairs_that_cross_only_one_becomes_one() -> None:
    crossing = [[], [], [1], [0]]  # a0 = 0, b0 = 1, a1 = 2 after b0, b1 = 3 after a0
    graph = Contraction(crossing, [1] * 4)
    assert graph.apart(0, 2) and graph.apart(1, 3)
    graph.join((0, 2))
    assert graph.leads(1, 3) and not graph.apart(1, 3)
    assert list(graph.order()) == [(1,), (0, 2), (3,)]


def test_a_path_through_what_became_one_counts() -> None:
    graph = Contraction([[], [0], [], [2]], [1] * 4)
    assert graph.apart(0, 3) and graph.apart(1, 2)
    graph.join((0, 2))
    assert not graph.apart(0, 3) and not graph.apart(2, 1) and graph.apart(1, 3)


def test_a_chain_grows_by_what_waits_for_the_other() -> None:
    late = Contraction([[], [0], [1], [], [3], [4]], [1] * 6)
    assert late.longer((0, 4)) == 1 and late.longer((0, 5)) == 2 and late.longer((2, 3)) == 2
    late.join((0, 4))
    assert late.longer((1, 5)) == 0  # the chain is four already: 3, 0 with 4, 1, 2


def test_what_costs_nothing_makes_no_chain_longer() -> None:
    views = Contraction([[], [0], [1], []], [1, 0, 1, 1])
    assert views.leads(0, 1) and views.leads(1, 2) and views.longer((2, 3)) == 0 and views.longer((0, 3)) == 0


def test_a_chain_inside_becomes_one_with_what_is_inside() -> None:
    graph = Contraction([[], [0], [0, 1], [2]], [1] * 4)
    assert graph.longer((0, 1, 2)) == 0
    graph.join((0, 1, 2))
    assert list(graph.order()) == [(0, 1, 2), (3,)]


@st.composite
def acyclic(draw: DrawFn) -> Before:
    count = draw(st.integers(2, 12))
    return [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(count)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(acyclic(), st.randoms(use_true_random=False))
def test_whatever_becomes_one_the_order_keeps_every_dependence(before: Before, random: object) -> None:
    graph, name = Contraction(before, [1] * len(before)), list(range(len(before)))
    pairs = list(itertools.combinations(range(len(before)), 2))
    random.shuffle(pairs)  # type: ignore[attr-defined]
    joined = set()
    for a, b in pairs:
        edges = {(name[i], name[j]) for j, some in enumerate(before) for i in some}
        assert graph.leads(a, b) == _reaches(edges, name[a], name[b])
        if not {a, b} & joined and graph.apart(a, b):
            graph.join((a, b))
            joined |= {a, b}
            name[b] = a
    place = {i: at for at, members in enumerate(graph.order()) for i in members}
    assert sorted(place) == list(range(len(before)))
    assert all(place[i] < place[j] for j, some in enumerate(before) for i in some)


def _reaches(edges: set[tuple[int, int]], a: int, b: int) -> bool:
    found = {a}
    while more := {j for i, j in edges if i in found} - found:
        found |= more
    return b in found and a != b
