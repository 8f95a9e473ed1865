"""Waves: phases that do not depend on each other run between the same two barriers."""

from __future__ import annotations

from collections.abc import Sequence

from wpk.scheduler.phases import Phase


def assign_waves(phases: Sequence[Phase]) -> tuple[int, ...]:
    """The earliest wave of each phase: one after the last of those it must follow."""
    waves: list[int] = []
    for phase in phases:
        waves.append(1 + max((waves[i] for i in phase.after), default=-1))
    return tuple(waves)
