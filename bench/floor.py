"""The floor of a model's beat, from its graph alone: neither weights nor a profile are needed."""

from __future__ import annotations

from typing import Any

from wpk.ir.errors import CapacityError
from wpk.registry import find_model
from wpk.registry.lowering import lowered_beat
from wpk.scheduler.compile import MAX_CAPACITY
from wpk.scheduler.cost import Floor, Share, shares
from wpk.scheduler.cost import floor as floor_of
from wpk.scheduler.phases import Lowered
from wpk.scheduler.target import Target, find_target
from wpk.scheduler.waves import assign_waves


def beat_floor(
    model: str, *, capacity: int, context: int | None = None, target: str, steps: int | None = None
) -> Floor:  # fmt: skip
    """The least time of one beat of `capacity` sessions on a target, however much memory that takes.

    context: rows that caches hold and a beat reads; None takes the spec's. steps: of a beat; None takes the spec's.
    """
    lowered, machine = _lowered(model, capacity, context, target, steps)
    waves = max(assign_waves(lowered.phases)) + 1
    return floor_of(lowered.phases, lowered.storages, capacity, waves, machine)


def measured_floor(
    model: str, *, capacity: int, context: int, target: str, whole_ms: float, position: int
) -> dict[str, Any]:  # fmt: skip
    """The floor of the beat that was at that step of history in a measurement: {"history", "floor_ms"}.

    A cache is read as far as it is filled. whole_ms: the floor with the profile's context filled.
    """
    if position + 1 >= context:
        return {"history": context, "floor_ms": whole_ms}
    found = beat_floor(model, capacity=capacity, context=position + 1, target=target)
    return {"history": position + 1, "floor_ms": found.floor_ms}


def beat_shares(model: str, *, capacity: int, context: int | None = None, target: str) -> list[Share]:
    """What each operator has in it."""
    lowered, machine = _lowered(model, capacity, context, target, None)
    return shares(lowered.phases, lowered.storages, capacity, machine)


def _lowered(
    model: str, capacity: int, context: int | None, target: str, steps: int | None
) -> tuple[Lowered, Target]:  # fmt: skip
    if not 1 <= capacity <= MAX_CAPACITY:
        raise CapacityError(
            f"{model}: capacity {capacity} cannot be had", capacity=capacity, wanted=f"1 to {MAX_CAPACITY}",
            found=capacity,
        )  # fmt: skip
    machine, spec = find_target(target), find_model(model)
    if steps is not None:
        spec = spec.model_copy(update={"clock": spec.clock.model_copy(update={"steps_per_beat": steps})})
    return lowered_beat(spec, machine, context, capacity), machine
