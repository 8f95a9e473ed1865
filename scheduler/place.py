"""Placement: the share of each phase that each block of the target runs.

A phase with weights is cut by parts (rows of the weight) first, so that each block streams its own rows once for
all sessions; any other phase by sessions. A share shorter than the target's least task is not worth a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpk.scheduler.cost import phase_seconds
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.program import Role
from wpk.scheduler.target import Target

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Task:
    """What a block does in a wave: a rectangle of a phase's slots x parts."""

    phase: int
    wave: int
    block: int
    slots: Range
    parts: Range


def place(lowered: Lowered, waves: Sequence[int], slots: int, target: Target) -> tuple[Task, ...]:
    """Tasks sorted by wave, block and phase; the least loaded block takes the next largest share."""
    tasks: list[Task] = []
    members: list[list[Phase]] = [[] for _ in range(max(waves, default=-1) + 1)]
    for phase in lowered.phases:
        members[waves[phase.index]].append(phase)
    for wave, phases in enumerate(members):
        load = [0.0] * target.blocks
        shares = []
        for phase in phases:
            pieces = split(phase, slots, target, _has_weights(phase, lowered))
            seconds = phase_seconds(phase, slots, target) / len(pieces)
            shares += [(seconds, phase.index, s, p) for s, p in pieces]
        for seconds, index, slot_range, part_range in sorted(shares, key=lambda s: (-s[0], *s[1:])):
            block = load.index(min(load))
            load[block] += seconds
            tasks.append(Task(index, wave, block, slot_range, part_range))
    return tuple(sorted(tasks, key=lambda t: (t.wave, t.block, t.phase, t.slots, t.parts)))


def predicted_seconds(lowered: Lowered, tasks: Sequence[Task], slots: int, target: Target) -> float:
    """The cost model's time of a beat: in each wave the busiest block, then a barrier."""
    seconds = [phase_seconds(phase, slots, target) / (slots * phase.parts) for phase in lowered.phases]
    load: dict[int, dict[int, float]] = {}
    for task in tasks:
        share = (task.slots[1] - task.slots[0]) * (task.parts[1] - task.parts[0]) * seconds[task.phase]
        blocks = load.setdefault(task.wave, {})
        blocks[task.block] = blocks.get(task.block, 0.0) + share
    return sum(max(blocks.values()) + target.barrier_s for blocks in load.values())


def split(phase: Phase, slots: int, target: Target, weights: bool) -> list[tuple[Range, Range]]:
    """(slots, parts) rectangles that cover a phase, at most one a block."""
    worth = int(phase_seconds(phase, slots, target) / target.least_task_s)
    wanted = max(1, min(target.blocks, worth))
    if weights:
        by_part = min(phase.parts, wanted)
        by_slot = min(slots, wanted // by_part)
    else:
        by_slot = min(slots, wanted)
        by_part = min(phase.parts, wanted // by_slot)
    return [(s, p) for p in _cut(phase.parts, by_part) for s in _cut(slots, by_slot)]


def _cut(size: int, pieces: int) -> list[Range]:
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]


def _has_weights(phase: Phase, lowered: Lowered) -> bool:
    return any(lowered.storages[r.storage].role is Role.WEIGHT for r in phase.inputs)
