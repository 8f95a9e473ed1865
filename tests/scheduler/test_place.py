"""Placement: every phase covered once, no share too small to be worth a block, no block far busier than the others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, graphs, lowered_beat
from wpk.ir.errors import TargetError
from wpk.ir.graph import Graph
from wpk.ir.text import print_graph
from wpk.ir.types import f32
from wpk.scheduler.cost import phase_seconds
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.place import Task, place, predicted_seconds, split
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


def test_a_phase_with_weights_is_cut_by_parts_and_any_other_by_sessions() -> None:
    lowered, target = weighty(n=16 * 132 * 2, k=1024), find_target("h200")
    tasks = placed(lowered, 200, target)
    product, other = (p.index for p in lowered.phases)
    assert lowered.phases[product].operator.name == "matmul"
    assert rectangles(tasks, product) == [((0, 200), (2 * b, 2 * b + 2)) for b in range(132)]
    assert len(rectangles(tasks, other)) > 1
    assert {parts for _, parts in rectangles(tasks, other)} == {(0, lowered.phases[other].parts)}


def test_a_product_of_few_rows_is_cut_by_sessions_too() -> None:
    lowered, target = weighty(n=32, k=4096), find_target("h200")
    cuts = rectangles(placed(lowered, 1000, target), 0)
    assert {parts for _, parts in cuts} == {(0, 1), (1, 2)}
    assert len(cuts) > 2 and {s for s, _ in cuts} == {s for s, parts in cuts if parts == (0, 1)}


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
