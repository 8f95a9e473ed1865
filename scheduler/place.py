"""Placement: the share of each phase that each block of the target runs.

A phase that is mostly weights is cut by parts (rows of the weight), so that each block streams its own rows once for
all sessions; where it has fewer parts than there are blocks and computes for longer than it reads, several blocks take
a part for some of the sessions each. What takes many sessions in one piece of work (`Operator.slot_grain`) is cut into
equal runs of such pieces, part after part. What is mostly state is cut into equal runs of parts, slot after slot;
anything else into a grid of slots and parts, or, on targets whose bodies take many sessions at once, by sessions. A
share shorter than the target's least task is not worth a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpk.ops.operator import Operator
from wpk.scheduler.cost import is_compute_bound, phase_seconds
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.program import Role
from wpk.scheduler.target import Target

Range = tuple[int, int]
Rectangle = tuple[Range, Range]  # slots, parts
EVEN = 1.02  # how much more than its share the busiest block of a sweep may have


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
            shares += [(seconds, phase.index, piece) for piece in pieces]
        for seconds, index, piece in sorted(shares, key=lambda s: (-s[0], *s[1:])):
            block = load.index(min(load))
            load[block] += seconds
            tasks += [Task(index, wave, block, slot_range, part_range) for slot_range, part_range in piece]
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


def split(phase: Phase, slots: int, target: Target, weights: bool) -> list[list[Rectangle]]:
    """A phase as shares, at most one a block, each of one or a few (slots, parts) rectangles."""
    worth = int(phase_seconds(phase, slots, target) / target.least_task_s)
    wanted = max(1, min(target.blocks, worth))
    most = phase.operator.task_slots
    if target.cut == "slots":
        by_part, by_slot = _by_slots(phase.parts, slots, wanted, weights)
        return [[r] for r in _grid(phase.parts, slots, by_part, max(by_slot, -(-slots // most)))]
    grain = phase.operator.slot_grain()
    if grain is not None:
        return _pieces(phase.parts, slots, grain, wanted)
    cost = phase.operator.cost(*phase.types)
    tiled = most < Operator.task_slots  # its body streams weights, however few
    if tiled or cost.weight_bytes > slots * (cost.activation_bytes + cost.state_bytes):
        by_part = min(phase.parts, wanted)
        if not tiled and 2 * by_part <= wanted and is_compute_bound(phase, slots, target):
            # Blocks that would have no rows of the weight take sessions instead.
            return [[r] for r in _grid(phase.parts, slots, by_part, min(slots, wanted // by_part))]
        # Every block streams its own rows of the weight, once for each tile of sessions.
        tiles = -(-slots // most)
        return [[(s, p) for s in _cut(slots, tiles)] for p in _cut(phase.parts, by_part)]
    if cost.state_bytes > cost.activation_bytes:
        return _sweep(phase.parts, slots, wanted) or _runs(phase.parts, slots, wanted)
    return [[r] for r in _grid(phase.parts, slots, *_even_grid(phase.parts, slots, wanted))]


def _by_slots(parts: int, slots: int, wanted: int, weights: bool) -> tuple[int, int]:
    """Cuts of (parts, slots) that keep a body's sessions together."""
    if weights:
        by_part = min(parts, wanted)
        return by_part, min(slots, wanted // by_part)
    by_slot = min(slots, wanted)
    return min(parts, wanted // by_slot), by_slot


def _even_grid(parts: int, slots: int, wanted: int) -> tuple[int, int]:
    """Cuts of (parts, slots) whose largest rectangle is least; of equal ones that with the fewest."""
    choices = ((p, min(slots, wanted // p)) for p in range(1, min(parts, wanted) + 1))
    return min(choices, key=lambda c: (-(-parts // c[0]) * -(-slots // c[1]), c[0] * c[1]))


def _grid(parts: int, slots: int, by_part: int, by_slot: int) -> list[Rectangle]:
    return [(s, p) for p in _cut(parts, by_part) for s in _cut(slots, by_slot)]


def _sweep(parts: int, slots: int, shares: int) -> list[list[Rectangle]]:
    """Every share takes neighbouring parts of every slot, so that all blocks are in one slot's state at a time.

    Where the parts don't divide evenly, a few shares at a time have one more, or one less, and take turns: for each
    group of slots others do. A share has at most three rectangles. Empty where that does not make the shares even.
    """
    least, more = divmod(parts, shares)
    if more == 0:
        return [[((0, slots), p)] for p in _cut(parts, shares)]
    odd, size, usual = (more, least + 1, least) if 2 * more <= shares else (shares - more, least, least + 1)
    groups = -(-shares // odd)
    if slots < groups or usual == 0 or size == 0:
        return []
    made: list[list[Rectangle]] = [[] for _ in range(shares)]
    for group, some in enumerate(_cut(slots, groups)):
        first = min(group * odd, shares - odd)  # the last group's turn overlaps the one before
        at = 0
        for share in range(shares):
            end = at + (size if first <= share < first + odd else usual)
            last = made[share][-1] if made[share] else None
            if last is not None and last[1] == (at, end):
                made[share][-1] = ((last[0][0], some[1]), last[1])
            else:
                made[share].append((some, (at, end)))
            at = end
    busiest = max(sum((s[1] - s[0]) * (p[1] - p[0]) for s, p in share) for share in made)
    return made if busiest <= -(-slots * parts // shares) * EVEN else []


def _runs(parts: int, slots: int, wanted: int) -> list[list[Rectangle]]:
    """Equal runs of the parts of one slot after the other: each the end of a slot, whole slots, the start of one."""
    shares = []
    for first, end in _cut(slots * parts, wanted):
        share: list[Rectangle] = []
        while first < end:
            slot, part = divmod(first, parts)
            if part or end - first < parts:
                stop = min(parts, part + end - first)
                share.append(((slot, slot + 1), (part, stop)))
                first += stop - part
            else:
                whole = (end - first) // parts
                share.append(((slot, slot + whole), (0, parts)))
                first += whole * parts
        shares.append(share)
    return [share for share in shares if share]


def _pieces(parts: int, slots: int, grain: int, wanted: int) -> list[list[Rectangle]]:
    """Equal runs of pieces of work, each a part for `grain` sessions, or fewer at the end; part after part."""
    tiles = -(-slots // grain)
    return [
        [((lo * grain, min(hi * grain, slots)), some) for some, (lo, hi) in share]
        for share in _runs(tiles, parts, min(wanted, tiles * parts))
    ]


def _cut(size: int, pieces: int) -> list[Range]:
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]


def _has_weights(phase: Phase, lowered: Lowered) -> bool:
    return any(lowered.storages[r.storage].role is Role.WEIGHT for r in phase.inputs)
