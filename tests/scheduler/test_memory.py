"""Arenas: nothing that is live together overlaps, what is dead is used again, and a session's state is one slab."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any, cast

from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, graphs, lowered_beat
from wpk.ir.graph import Graph
from wpk.ir.text import print_graph
from wpk.ir.types import f32
from wpk.ops.payload import Arena
from wpk.scheduler.memory import Layout, Placed, align, lifetimes, plan
from wpk.scheduler.phases import Lowered, Phase, Ref, Storage
from wpk.scheduler.program import ALIGN, NONE, Role
from wpk.scheduler.waves import assign_waves

Life = tuple[int, int, int]  # first wave, last wave, bytes


def temporaries(lives: Sequence[Life]) -> tuple[Lowered, list[int]]:
    """A program that writes each temporary in its first wave and reads it in its last."""
    storages = tuple(Storage(i, f"t{i}", Role.TEMPORARY, f32(size // 4)) for i, (_, _, size) in enumerate(lives))
    waves = range(1 + max(last for _, last, _ in lives))
    phases = []
    for wave in waves:
        read = tuple(Ref(i) for i, (_, last, _) in enumerate(lives) if last == wave)
        written = tuple(Ref(i) for i, (first, _, _) in enumerate(lives) if first == wave)
        phases.append(Phase(wave, cast(Any, None), (), read, written, ""))
    return Lowered(tuple(phases), storages, (), (), Graph("load")), list(waves)


def laid_out(lives: Sequence[Life], slots: int = 1) -> Layout:
    lowered, waves = temporaries(lives)
    return plan(lowered, waves, slots)


def clashes(placed: Sequence[Placed], sizes: Sequence[int], slots: int) -> list[tuple[int, int]]:
    """Pairs that share bytes of an arena while both are live."""
    found = []
    for (i, a), (j, b) in combinations(enumerate(placed), 2):
        apart = (a.last != NONE and a.last < b.first != NONE) or (b.last != NONE and b.last < a.first != NONE)
        if a.arena != b.arena or apart:
            continue
        for x in range(slots):
            for y in range(slots):
                lo, hi = a.offset + x * a.stride, b.offset + y * b.stride
                if lo < hi + sizes[j] and hi < lo + sizes[i]:
                    found.append((i, j))
    return found


def most_live(lives: Sequence[Life], slots: int = 1) -> int:
    """Bytes live in the fullest wave: no layout needs less."""
    waves = range(1 + max(last for _, last, _ in lives))
    return max(sum(align(size) * slots for first, last, size in lives if first <= w <= last) for w in waves)


def best(lives: Sequence[Life]) -> int:
    """The smallest arena that first fit reaches in any order; there is an order in which it is optimal."""
    sizes = []
    for order in permutations(lives):
        blocks: list[tuple[int, int, int, int]] = []
        for first, last, size in order:
            busy = sorted(b[2:] for b in blocks if b[0] <= last and first <= b[1])
            at = 0
            for lo, hi in busy:
                if lo - at >= align(size):
                    break
                at = max(at, hi)
            blocks.append((first, last, at, at + align(size)))
        sizes.append(max(hi for _, _, _, hi in blocks))
    return min(sizes)


lives_strategy = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from((4, 100, 192, 256, 320, 1000))).map(
        lambda t: (t[0], t[0] + t[1], t[2])
    ),
    min_size=1, max_size=9,
)  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lives_strategy, st.integers(1, 3))
def test_no_two_live_temporaries_overlap(lives: list[Life], slots: int) -> None:
    layout = laid_out(lives, slots)
    assert clashes(layout.placed, [size for _, _, size in lives], slots) == []
    total = layout.arenas[Arena.ACTIVATIONS]
    assert most_live(lives, slots) <= total <= sum(align(size) * slots for _, _, size in lives)
    for home, (first, last, size) in zip(layout.placed, lives, strict=True):
        assert (home.first, home.last) == (first, last) and home.offset % ALIGN == home.stride % ALIGN == 0
        assert home.stride >= size and home.offset + home.stride * slots <= total


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lives_strategy.filter(lambda lives: len(lives) <= 6))
def test_a_layout_is_not_far_from_the_best_there_is(lives: list[Life]) -> None:
    total, least = laid_out(lives).arenas[Arena.ACTIVATIONS], best(lives)
    assert most_live(lives) <= least <= total <= 1.25 * least


def test_a_chain_needs_two_buffers_however_long_it_is() -> None:
    assert laid_out([(i, i + 1, 640) for i in range(20)], slots=3).arenas[Arena.ACTIVATIONS] == 2 * 3 * 640


def test_small_ones_go_into_the_gaps_between_large_ones() -> None:
    lives = [(0, 1, 1024), (1, 2, 1024), (0, 0, 512), (2, 3, 512), (3, 3, 512)]
    assert laid_out(lives).arenas[Arena.ACTIVATIONS] == 2048


def test_a_gap_that_is_too_small_is_passed_over() -> None:
    """The gap of 64 bytes where the second one was shorter than the first that lay there."""
    lives = [(0, 1, 320), (2, 4, 256), (1, 3, 256), (3, 4, 192)]
    assert clashes(laid_out(lives).placed, [size for _, _, size in lives], 1) == []


def test_a_wave_is_no_time_to_change_hands() -> None:
    """What is read last in a wave and what is written first in it must not share bytes: blocks run apart."""
    a, b = laid_out([(0, 1, 64), (1, 2, 64)]).placed
    assert a.offset != b.offset


def test_state_is_one_slab_a_session_and_weights_have_no_sessions() -> None:
    g = builder()
    x = g.input("x", f32(6))
    for name, size in (("a", 6), ("b", 100), ("c", 1)):
        g.register(name, f32(size))
        g.update(name, g.op("add", g.input(f"to_{name}", f32(size)), g.weight(f"w_{name}", f32(size))))
    g.output("y", x)
    lowered = lowered_beat(g.build())
    layout = plan(lowered, assign_waves(lowered.phases), 5)
    placed = {s.name: layout.placed[s.index] for s in lowered.storages}
    slab = 64 + 448 + 64
    # Small states lie together.
    assert [(placed[n].offset, placed[n].stride) for n in "cab"] == [(0, slab), (64, slab), (128, slab)]
    assert layout.arenas[Arena.STATE] == 5 * slab
    assert [(placed[f"w_{n}"].offset, placed[f"w_{n}"].stride) for n in "abc"] == [(0, 0), (64, 0), (512, 0)]
    assert layout.arenas[Arena.WEIGHTS] == slab  # the same sizes, once
    assert (placed["x@0"].stride, placed["to_b@0"].stride) == (64, 448)


def test_lifetimes_are_from_the_first_write_to_the_last_use() -> None:
    lowered, waves = temporaries([(0, 2, 4), (1, 1, 4)])
    assert lifetimes(lowered.phases, waves, 2) == [(0, 2), (1, 1)]
    assert lifetimes((), (), 1) == [(NONE, NONE)]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(graphs(), st.integers(1, 3), st.sampled_from((1, 2, 5)))
def test_layouts_of_graphs_are_sound(graph: Graph, steps: int, slots: int) -> None:
    note(print_graph(graph))
    lowered = lowered_beat(graph, steps)
    layout = plan(lowered, assign_waves(lowered.phases), slots)
    assert clashes(layout.placed, [s.type.bytes for s in lowered.storages], slots) == []
    assert all(size % ALIGN == 0 for size in layout.arenas)
    for storage, home in zip(lowered.storages, layout.placed, strict=True):
        assert home.offset % ALIGN == 0
        assert home.offset + (slots - 1) * home.stride + storage.type.bytes <= layout.arenas[home.arena]
