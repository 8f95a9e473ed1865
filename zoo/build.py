"""From a spec to one step's graph, and what can be read off it: expected tensors, sizes of parameters and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, TypedDict

from wpk.ir.errors import GraphError, SpecError
from wpk.ir.graph import Graph, GraphBuilder, StateKind, Value
from wpk.ir.types import Type
from wpk.ops import LIBRARY
from wpk.ops.operator import OperatorLibrary
from wpk.ops.requirements import Selection
from wpk.zoo.component import Component
from wpk.zoo.problems import Problem, close_hint, spec_error
from wpk.zoo.spec import ModelSpec
from wpk.zoo.tensors import TensorMap, Tensors
from wpk.zoo.wiring import read_by


class StateBytes(TypedDict):
    """Bytes of a session's state: what it always holds, and what every step of context adds (caches)."""

    fixed: int
    per_step: int


def build_graph(spec: ModelSpec, *, context: int = 1, library: OperatorLibrary = LIBRARY) -> Graph:
    """One step of the model for one session; caches have room for `context` steps.

    Raises SpecError where components and ports do not fit together or `tensors` names what is not there,
    OperatorError where the library lacks an operator version that the spec asks for.
    """
    g = GraphBuilder(spec.name, Selection(spec.operators, library), context)
    mapping = TensorMap(spec.tensors)
    values = {name: g.input(name, port.type) for name, port in spec.ports.inputs.items()}
    for index, component in enumerate(spec.components):
        references = read_by(spec.components, index, tuple(spec.ports.inputs))
        inputs = tuple(values[reference] for reference in references)
        values |= _build_component(g, spec, index, component, inputs, mapping)
    problems = []
    for name, port in spec.ports.outputs.items():
        made = values[port.source]
        if made.type != port.type:
            place = ("ports", "outputs", name, "type")
            problems.append(Problem(place, f"{port.source!r} gives another type", str(made.type), str(port.type)))
        elif made.weight:
            place = ("ports", "outputs", name, "from")
            problems.append(
                Problem(place, f"{port.source!r} does not depend on the input", "a session's value", "a weight")
            )
        else:
            g.output(name, made)
    for path in mapping.unused:
        hint = close_hint(path, mapping.parameters)
        wanted = ", ".join(mapping.parameters) or "no parameters"
        problems.append(Problem(("tensors", path), "no component has this parameter", wanted, hint=hint))
    if problems:
        raise spec_error(f"spec {spec.name!r}", problems)
    return g.build()


def _build_component(
    g: GraphBuilder, spec: ModelSpec, index: int, component: Component, inputs: tuple[Value, ...], mapping: TensorMap
) -> dict[str, Value]:
    """The component's outputs under "NAME" and "NAME.OUTPUT"."""
    try:
        with g.scope(component.name):
            built = component.build(g, inputs, Tensors(g, component.name, mapping))
    except GraphError as error:
        where = f"components[{index}]: {error.message.removeprefix(f'{g.name}: ')}"
        raise SpecError(
            f"spec {spec.name!r}: {where}", wanted=error.wanted, found=error.found, hint=error.hint
        ) from error
    names = component.outputs()
    outputs: Mapping[str, Value] = built if isinstance(built, dict) else {names[0]: built}
    if tuple(outputs) != names:
        _broken(spec, index, component, ", ".join(names), ", ".join(outputs))
    return {component.name: outputs[names[0]]} | {f"{component.name}.{name}": v for name, v in outputs.items()}


def _broken(spec: ModelSpec, index: int, component: Component, wanted: str, found: str) -> NoReturn:
    message = f"spec {spec.name!r}: components[{index}]: kind {component.kind!r} does not keep its word: outputs"
    raise SpecError(message, wanted=wanted, found=found)


def expected_tensors(spec: ModelSpec, library: OperatorLibrary = LIBRARY) -> dict[str, Type]:
    """Every tensor that the checkpoint must hold, by its name there, with the type as stored."""
    return {port.name: port.value.type for port in build_graph(spec, library=library).weights}


def parameter_count(spec: ModelSpec) -> int:
    """Numbers in all tensors of the checkpoint."""
    return sum(type.size for type in expected_tensors(spec).values())


def state_bytes(graph: Graph) -> StateBytes:
    """The state of one session, from a graph built with any context."""
    sizes = StateBytes(fixed=0, per_step=0)
    for state in graph.states:
        if state.kind is StateKind.CACHE:
            sizes["per_step"] += state.value.type.bytes // state.value.type.shape[0]
        else:
            sizes["fixed"] += state.value.type.bytes
    return sizes
