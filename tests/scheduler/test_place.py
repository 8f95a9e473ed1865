"""Placement: every phase covered once, no share too small to be worth a block, no block far busier than the others."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, graphs, lowered_beat
from wpk.ir.errors import TargetError
from wpk.ir.graph import Graph
from wpk.ir.text import print_graph
from wpk.ir.types import bf16, f32
from wpk.scheduler.cost import phase_seconds
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.place import EVEN, Task, _pieces, _runs, _sweep, place, predicted_seconds, split
from wpk.scheduler.program import Role
from wpk.scheduler.target import TARGETS, Target, find_target
from wpk.scheduler.waves import assign_waves

targets = st.sampled_from(sorted(TARGETS)).map(find_target)


def weighty(n: int, k: int) -> Lowered:
    """One linear layer, and one phase without weights."""
    g = builder()
    g.output("y", g.op("linear", g.input("x", f32(k)), g.weight("w", f32(n, k))))
    g.output("z", g.op("tanh", g.input("v", f32(n))))
    return lowered_beat(g.build())


def placed(lowered: Lowered, slots: int, target: Target) -> tuple[Task, ...]:
    return place(lowered, assign_waves(lowered.phases), slots, target)


def rectangles(tasks: tuple[Task, ...], phase: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(t.slots, t.parts) for t in tasks if t.phase == phase]


def seconds(task: Task, phase: Phase, slots: int, target: Target) -> float:
    area = (task.slots[1] - task.slots[0]) * (task.parts[1] - task.parts[0])
    return phase_seconds(phase, slots, target) * area / (slots * phase.parts)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from((1, 3, 64, 1000)), targets)
def test_every_slot_and_part_of_a_phase_is_run_once_in_its_wave(graph: Graph, slots: int, target: Target) -> None:
    note(print_graph(graph))
    lowered = lowered_beat(graph)
    waves = assign_waves(lowered.phases)
    tasks = place(lowered, waves, slots, target)
    assert list(tasks) == sorted(tasks, key=lambda t: (t.wave, t.block))
    for phase in lowered.phases:
        found: Counter[tuple[int, int]] = Counter()
        for task in (t for t in tasks if t.phase == phase.index):
            assert task.wave == waves[phase.index] and 0 <= task.block < target.blocks
            found.update((s, p) for s in range(*task.slots) for p in range(*task.parts))
        assert found == Counter({(s, p): 1 for s in range(slots) for p in range(phase.parts)})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from((1, 3, 64, 1000)), targets)
def test_no_block_has_more_than_its_share_and_one_task(graph: Graph, slots: int, target: Target) -> None:
    """Graham's bound of list scheduling, with slack for pieces that are not all of one size."""
    lowered = lowered_beat(graph)
    waves = assign_waves(lowered.phases)
    tasks = place(lowered, waves, slots, target)
    for wave in range(max(waves) + 1):
        load: Counter[int] = Counter()
        sizes = []
        for task in (t for t in tasks if t.wave == wave):
            sizes.append(seconds(task, lowered.phases[task.phase], slots, target))
            load[task.block] += sizes[-1]  # type: ignore[assignment]
        assert max(load.values()) <= 1.5 * (sum(sizes) / target.blocks + max(sizes))


def test_where_sessions_count_weights_are_cut_by_parts_and_anything_else_by_sessions() -> None:
    lowered, target = weighty(n=16 * 132 * 2, k=1024), find_target("cpu")
    tasks = placed(lowered, 200, target)
    product, other = (p.index for p in lowered.phases)
    assert lowered.phases[product].operator.name == "matmul" and target.cut == "slots"
    assert rectangles(tasks, product) == [((0, 200), (33 * b, 33 * b + 33)) for b in range(8)]
    assert rectangles(tasks, other) == [((25 * b, 25 * b + 25), (0, 17)) for b in range(8)]


def test_where_sessions_count_a_product_of_few_rows_is_cut_by_them_too() -> None:
    lowered, target = weighty(n=32, k=4096), find_target("cpu")
    cuts = rectangles(placed(lowered, 1000, target), 0)
    assert sorted(cuts) == [((250 * s, 250 * s + 250), (p, p + 1)) for s in range(4) for p in range(2)]


def test_where_any_share_will_do_weights_are_cut_by_parts_and_small_phases_into_an_even_grid() -> None:
    lowered, target = weighty(n=16 * 132 * 2, k=1024), find_target("h200")
    tasks = placed(lowered, 200, target)
    product, other = (p.index for p in lowered.phases)
    assert target.cut == "units"
    assert rectangles(tasks, product) == [((0, 200), (2 * b, 2 * b + 2)) for b in range(132)]
    # 17 parts and 200 slots: 7 x 17 pieces of at most 29, where 132 pieces would be 25.8 on average.
    areas = [(s[1] - s[0]) * (p[1] - p[0]) for s, p in rectangles(tasks, other)]
    assert (len(areas), max(areas), sum(areas)) == (7 * 17, 29, 200 * 17)


def test_a_product_of_more_sessions_than_a_body_takes_is_several_rectangles_on_the_same_blocks() -> None:
    g = builder()
    x, tiles = g.input("x", bf16(1024)), g.weight("w", bf16(132 * 8 * 1024))
    g.output("y", g.op("tiled_matmul", x, tiles, n=132 * 8, k=1024, shares=132))
    lowered = lowered_beat(g.build())
    product = next(p for p in lowered.phases if p.operator.name == "tiled_matmul")
    assert product.operator.task_slots == 128
    tasks = [t for t in placed(lowered, 200, find_target("h200")) if t.phase == product.index]
    assert len({t.block for t in tasks}) == 132
    for block in range(132):
        mine = [t for t in tasks if t.block == block]
        assert [t.slots for t in mine] == [(0, 100), (100, 200)] and len({t.parts for t in mine}) == 1


def test_a_product_of_tiles_is_cut_by_its_parts_however_few_weights_there_are() -> None:
    g = builder()
    g.output("y", g.op("tiled_matmul", g.input("x", bf16(64)), g.weight("w", bf16(32 * 64)), n=32, k=64, shares=4))
    tasks = placed(lowered_beat(g.build()), 112, find_target("h200"))
    assert {slots for slots, _ in rectangles(tasks, 0)} == {(0, 112)}
    assert sorted(p for _, parts in rectangles(tasks, 0) for p in range(*parts)) == [0, 1, 2, 3]


def test_blocks_without_rows_of_a_weight_take_sessions_where_there_is_more_to_compute_than_to_read() -> None:
    g = builder()
    g.output("y", g.op("linear", g.input("x", f32(1024)), g.weight("w", f32(512, 1024))))  # 32 parts for 132 blocks
    lowered, target = lowered_beat(g.build()), find_target("h200")
    assert {slots for slots, _ in rectangles(placed(lowered, 8, target), 0)} == {(0, 8)}  # bound by the weights
    tasks = placed(lowered, 112, target)
    assert {slots for slots, _ in rectangles(tasks, 0)} == {(0, 28), (28, 56), (56, 84), (84, 112)}
    assert len({task.block for task in tasks}) == 128


@pytest.mark.parametrize("slots", [7, 56, 112])
def test_what_is_mostly_state_is_swept_slot_by_slot_by_all_blocks(slots: int) -> None:
    g = builder()
    heads, rows = 128, 80  # 256 parts of 40 rows
    state = g.register("state", f32(heads, rows, 128))
    y, following = g.op("mamba2_step", g.input("mixed", f32(2 * heads * rows + 256 + 4 * heads)), state)
    g.update("state", following)
    g.output("y", y)
    lowered, target = lowered_beat(g.build()), find_target("h200")
    step = next(p for p in lowered.phases if p.operator.name == "mamba2_step")
    work: Counter[int] = Counter()
    reached: dict[int, set[int]] = {}
    for task in placed(lowered, slots, target):
        if task.phase == step.index:
            work[task.block] += (task.slots[1] - task.slots[0]) * (task.parts[1] - task.parts[0])  # type: ignore[assignment]
            for slot in range(*task.slots):
                reached.setdefault(slot, set()).add(task.block)
    assert sum(work.values()) == slots * step.parts
    assert max(work.values()) <= -(-slots * step.parts // target.blocks) * EVEN
    if slots > 7:
        assert all(len(blocks) == target.blocks for blocks in reached.values())


@given(st.integers(1, 200), st.integers(1, 130), st.integers(1, 140))
def test_a_sweep_covers_all_once_in_the_order_of_the_shares_and_is_even(parts: int, slots: int, shares: int) -> None:
    made = _sweep(parts, slots, shares)
    if not made:
        return  # it would not have been even
    assert len(made) == shares and all(1 <= len(share) <= 3 for share in made)
    sizes = [sum((s[1] - s[0]) * (p[1] - p[0]) for s, p in share) for share in made]
    assert sum(sizes) == slots * parts and max(sizes) <= -(-slots * parts // shares) * EVEN
    for slot in {s for share in made for slots_of, _ in share for s in slots_of} - {slots}:
        ranges = [p for share in made for s, p in share if s[0] <= slot < s[1]]  # of each share, neighbours in order
        assert ranges[0][0] == 0 and ranges[-1][1] == parts
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 140))
def test_runs_cover_all_once_and_differ_by_one_at_most(parts: int, slots: int, shares: int) -> None:
    made = _runs(parts, slots, shares)
    found = Counter((s, p) for share in made for rows, columns in share for s in range(*rows) for p in range(*columns))
    assert found == Counter(itertools.product(range(slots), range(parts)))
    sizes = [sum((s[1] - s[0]) * (p[1] - p[0]) for s, p in share) for share in made]
    assert max(sizes) - min(sizes) <= 1 and all(len(share) <= 3 for share in made)


@given(st.integers(1, 60), st.integers(1, 300), st.integers(1, 64), st.integers(1, 140))
def test_pieces_of_work_are_not_cut_and_shared_out_evenly(parts: int, slots: int, grain: int, wanted: int) -> None:
    made = _pieces(parts, slots, grain, wanted)
    found = Counter((s, p) for share in made for rows, columns in share for s in range(*rows) for p in range(*columns))
    assert found == Counter(itertools.product(range(slots), range(parts)))
    assert all(lo % grain == 0 and (hi % grain == 0 or hi == slots) for share in made for (lo, hi), _ in share)
    sizes = [sum(-(-(s[1] - s[0]) // grain) * (p[1] - p[0]) for s, p in share) for share in made]
    assert len(made) == min(wanted, parts * -(-slots // grain))
    assert max(sizes) - min(sizes) <= 1 and all(len(share) <= 3 for share in made)


@pytest.mark.parametrize("name", TARGETS)
def test_a_share_is_worth_a_block(name: str) -> None:
    target = find_target(name)
    for n, k in ((16, 16), (256, 64), (4096, 1024)):
        lowered = weighty(n, k)
        for slots in (1, 7, 300):
            for phase in lowered.phases:
                weights = any(lowered.storages[r.storage].role is Role.WEIGHT for r in phase.inputs)
                pieces = split(phase, slots, target, weights)
                assert 1 <= len(pieces) <= target.blocks
                if len(pieces) > 1:
                    assert phase_seconds(phase, slots, target) / len(pieces) >= target.least_task_s


def test_a_tiny_phase_is_one_task() -> None:
    tasks = placed(weighty(6, 6), 1, find_target("h200"))
    assert [len(rectangles(tasks, i)) for i in (0, 1)] == [1, 1]
    assert len({t.block for t in tasks}) == 2  # but not both on one block


def test_the_prediction_is_the_busiest_block_of_each_wave_and_its_barrier() -> None:
    lowered, target = weighty(6, 6), find_target("cpu")
    tasks = placed(lowered, 2, target)
    longest = max(phase_seconds(p, 2, target) for p in lowered.phases)
    assert predicted_seconds(lowered, tasks, 2, target) == pytest.approx(longest + target.barrier_s)


def test_an_unknown_target_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match="no target 'toaster'") as error:
        find_target("toaster")
    assert "h200" in str(error.value.wanted)
