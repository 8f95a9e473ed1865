"""A model's beat as phases, compiled in memory alone: neither weights nor a profile are needed."""

from __future__ import annotations

from collections.abc import Sequence

from wpk.ir.errors import WpkError
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection
from wpk.registry.models import find_model
from wpk.registry.profile import Manifest
from wpk.scheduler.compile import lower_beat
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.program import Program
from wpk.scheduler.target import Target, find_target
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec


def lowered_beat(spec: ModelSpec, target: Target, context: int | None = None, capacity: int | None = None) -> Lowered:
    """One beat's phases, as that target runs them; with a capacity, cut for that many sessions."""
    graph = build_graph(spec, context=spec.context if context is None else context)
    library = Selection(spec.operators, LIBRARY)
    return lower_beat(graph, library, target, spec.clock.steps_per_beat, capacity=capacity)


def recompiled(manifest: Manifest, program: Program) -> Sequence[Phase] | None:
    """The phases of the same model compiled now; None where they are no longer this program's."""
    try:
        spec, target = find_model(manifest.model), find_target(manifest.target)
        phases = lowered_beat(spec, target, manifest.context, manifest.capacity).phases
    except WpkError:
        return None
    made = [(f"{p.operator.name}@{p.operator.version}", p.label) for p in phases]
    held = [(program.operators[p["opcode"]], label) for p, label in zip(program.payloads, program.labels, strict=True)]
    return phases if made == held else None
