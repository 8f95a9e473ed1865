"""The floor of a model's beat, from its graph alone: neither weights nor a profile are needed."""

from __future__ import annotations

from wpk.ir.errors import CapacityError
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection
from wpk.registry import find_model
from wpk.scheduler.compile import MAX_CAPACITY, lower_beat
from wpk.scheduler.cost import Floor
from wpk.scheduler.cost import floor as floor_of
from wpk.scheduler.phases import Lowered
from wpk.scheduler.target import find_target
from wpk.scheduler.waves import assign_waves
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec


def beat_floor(model: str, *, capacity: int, context: int | None = None, target: str) -> Floor:
    """The least time of one beat of `capacity` sessions on a target, however much memory that takes."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise CapacityError(
            f"{model}: capacity {capacity} cannot be had", capacity=capacity, wanted=f"1 to {MAX_CAPACITY}",
            found=capacity,
        )  # fmt: skip
    machine = find_target(target)
    lowered = lowered_beat(find_model(model), context)
    waves = max(assign_waves(lowered.phases)) + 1
    return floor_of(lowered.phases, lowered.storages, capacity, waves, machine)


def lowered_beat(spec: ModelSpec, context: int | None = None) -> Lowered:
    """One beat's phases, as every target runs them."""
    graph = build_graph(spec, context=spec.context if context is None else context)
    return lower_beat(graph, Selection(spec.operators, LIBRARY), spec.clock.steps_per_beat)
