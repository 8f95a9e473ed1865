"""Waves: phases that do not depend on each other run between the same two barriers.

Every phase is as early as it may be, but for those that nothing waits for, such as a counter's next value: where such
a phase keeps little alive meanwhile, it goes beside a far longer one, which it does not stretch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wpk.scheduler.cost import phase_seconds
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.program import Role
from wpk.scheduler.target import Target

LITTLE = 1024  # bytes of temporaries a session that a phase may keep alive by running later
LONGER = 16  # times what moves into a wave that the wave lasts: a wrong estimate of that does no harm either


def assign_waves(phases: Sequence[Phase]) -> tuple[int, ...]:
    """The earliest wave of each phase: one after the last of those it must follow."""
    waves: list[int] = []
    for phase in phases:
        waves.append(1 + max((waves[i] for i in phase.after), default=-1))
    return tuple(waves)


def use_slack(lowered: Lowered, waves: Sequence[int], slots: int, target: Target) -> tuple[int, ...]:
    """The waves after phases that may wait have gone beside longer ones; there are as many waves as before."""
    seconds = [_alone(phase, slots, target) for phase in lowered.phases]
    patient = {phase.index for phase in lowered.phases if _keeps_little(phase, lowered)}
    return move_beside(lowered.phases, waves, seconds, patient)


def move_beside(
    phases: Sequence[Phase], waves: Sequence[int], seconds: Sequence[float], patient: Collection[int]
) -> tuple[int, ...]:
    """Move `patient` phases, and only those, within their slack: between what they follow and what must follow them.

    Each takes the earliest wave that lasts LONGER times as long as it and all that has moved there before, so that
    what follows it keeps a choice. Where no wave does, it stays as early as it may be.
    """
    count = max(waves, default=-1) + 1
    latest = [count - 1] * len(phases)
    for phase in reversed(phases):
        bound = latest[phase.index] if phase.index in patient else waves[phase.index]
        for before in phase.after:
            latest[before] = min(latest[before], bound - 1)
    moving = {i for i in patient if latest[i] > waves[i]}
    lasts, moved = [0.0] * count, [0.0] * count
    for phase in phases:
        if phase.index not in moving:
            lasts[waves[phase.index]] = max(lasts[waves[phase.index]], seconds[phase.index])
    found = list(waves)
    for phase in phases:
        index = phase.index
        if index in moving:
            first = 1 + max((found[i] for i in phase.after), default=-1)
            choices = range(first, latest[index] + 1)
            found[index] = next((w for w in choices if lasts[w] >= LONGER * (moved[w] + seconds[index])), first)
            moved[found[index]] += seconds[index]
    return tuple(found)


def _alone(phase: Phase, slots: int, target: Target) -> float:
    """Seconds of the busiest block of a phase that has the machine to itself."""
    seconds, units = phase_seconds(phase, slots, target), slots * phase.parts
    blocks = max(1, min(target.blocks, units, int(seconds / target.least_task_s)))
    return seconds / units * -(-units // blocks)


def _keeps_little(phase: Phase, lowered: Lowered) -> bool:
    """Whether few bytes of temporaries stay alive until the phase runs."""
    held = zip(phase.inputs, phase.types, strict=True)
    temporary = (type.bytes for ref, type in held if lowered.storages[ref.storage].role is Role.TEMPORARY)
    return sum(temporary) <= LITTLE
