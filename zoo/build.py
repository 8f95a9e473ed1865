"""From a spec to one step's graph, and what can be read off it: expected tensors, sizes of parameters and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, TypedDict

from wpk.ir.errors import GraphError, SpecError
from wpk.ir.graph import POSITION, Graph, GraphBuilder, StateKind, Value
from wpk.ir.types import INTEGERS, Type
from wpk.ops import LIBRARY
from wpk.ops.operator import OperatorLibrary
from wpk.ops.requirements import Selection
from wpk.zoo.component import Component
from wpk.zoo.ports import Feedback, OutputPort
from wpk.zoo.problems import Location, Problem, close_hint, spec_error
from wpk.zoo.spec import ModelSpec
from wpk.zoo.tensors import TensorMap, Tensors
from wpk.zoo.wiring import read_by


class StateBytes(TypedDict):
    """Bytes of a session's state: what it always holds, and what every step of context adds (caches)."""

    fixed: int
    per_step: int


def build_graph(spec: ModelSpec, *, context: int = 1, library: OperatorLibrary = LIBRARY) -> Graph:
    """One step of the model for one session; caches have room for `context` steps, and for those of a prefill.

    Raises SpecError where components and ports do not fit together or `tensors` names what is not there,
    OperatorError where the library lacks an operator version that the spec asks for.
    """
    g = GraphBuilder(spec.name, Selection(spec.operators, library), context, spec.behind)
    mapping = TensorMap(spec.tensors)
    values = {name: g.input(name, port.type) for name, port in spec.ports.inputs.items()}
    values |= {name: _before(g, name, entry) for name, entry in spec.feedback.items()}
    _build_components(g, spec, (), spec.components, tuple(spec.ports.inputs), values, mapping)
    problems = []
    for name, port in spec.ports.outputs.items():
        problem = _misfit(("ports", "outputs", name), port, values[port.source])
        if problem:
            problems.append(problem)
        else:
            g.output(name, values[port.source])
    for name, entry in spec.feedback.items():
        problem = _misfit(("feedback", name), entry, values[entry.source])
        if problem:
            problems.append(problem)
        else:
            g.update(_state(name), values[entry.source])
    for path in _unused(spec, mapping):
        hint = close_hint(path, mapping.parameters)
        wanted = ", ".join(mapping.parameters) or "no parameters"
        problems.append(Problem(("tensors", path), "no component has this parameter", wanted, hint=hint))
    if problems:
        raise spec_error(f"spec {spec.name!r}", problems)
    return g.build()


def build_prefill(spec: ModelSpec, name: str, *, context: int = 1, library: OperatorLibrary = LIBRARY) -> Graph:
    """One step of a prefill of the model: no outputs, and the states of its components under the model's names.

    Its inputs are those of the prefill. context: as for `build_graph`, which must be asked for the same.
    """
    prefill = spec.prefill[name]
    g = GraphBuilder(f"{spec.name}.{name}", Selection(spec.operators, library), context, spec.behind)
    values = {given: g.input(given, one.type) for given, one in prefill.inputs.items()}
    where = ("prefill", name)
    _build_components(g, spec, where, prefill.components, tuple(prefill.inputs), values, TensorMap(spec.tensors))
    graph = g.build()
    if any(state.name == POSITION for state in graph.states):
        problem = Problem(
            (*where, "components"), "a component counts the steps of the session, which has not begun",
            "components that count their own steps, or none", POSITION,
        )  # fmt: skip
        raise spec_error(f"spec {spec.name!r}", [problem])
    return graph


def _unused(spec: ModelSpec, mapping: TensorMap) -> list[str]:
    """Entries of the mapping that no component reads; those for components of a prefill alone are passed over."""
    own = {part.name for part in spec.components}
    others = {part.name for one in spec.prefill.values() for part in one.components} - own
    return [path for path in mapping.unused if path.partition(".")[0] not in others]


def _build_components(
    g: GraphBuilder, spec: ModelSpec, where: Location, components: Sequence[Component], inputs: Sequence[str],
    values: dict[str, Value], mapping: TensorMap,
) -> None:  # fmt: skip
    """Add components in their order; `values` are those that references find, and gain what the components give."""
    for index, component in enumerate(components):
        given = tuple(values[reference] for reference in read_by(components, index, inputs))
        place = ".".join((*map(str, where), f"components[{index}]"))
        values |= _build_component(g, spec, place, component, given, mapping)


def _state(feedback: str) -> str:
    return f"feedback.{feedback}"


def _before(g: GraphBuilder, name: str, entry: Feedback) -> Value:
    """What a component gave in the step before."""
    dtype = entry.type.dtype
    value = int(entry.initial) if dtype in INTEGERS else entry.initial
    initial = g.op("full", shape=entry.type.shape, value=value, dtype=dtype.value) if value else None
    return g.register(_state(name), entry.type, initial)


def _misfit(place: tuple[str, ...], port: OutputPort | Feedback, made: Value) -> Problem | None:
    """What is wrong where a port or feedback takes this value."""
    if made.type != port.type:
        return Problem((*place, "type"), f"{port.source!r} gives another type", str(made.type), str(port.type))
    if made.weight:
        what = f"{port.source!r} does not depend on the input"
        return Problem((*place, "from"), what, "a session's value", "a weight")
    return None


def _build_component(
    g: GraphBuilder, spec: ModelSpec, place: str, component: Component, inputs: tuple[Value, ...], mapping: TensorMap
) -> dict[str, Value]:
    """The component's outputs under "NAME" and "NAME.OUTPUT"."""
    try:
        policy = spec.policy_of(component)
        with g.scope(component.name), g.products("tf32" if policy == "tf32" else "f32"):
            built = component.build(g, inputs, Tensors(g, component.name, mapping, policy))
    except GraphError as error:
        where = f"{place}: {error.message.removeprefix(f'{g.name}: ')}"
        raise SpecError(
            f"spec {spec.name!r}: {where}", wanted=error.wanted, found=error.found, hint=error.hint
        ) from error
    names = component.outputs()
    outputs: Mapping[str, Value] = built if isinstance(built, dict) else {names[0]: built}
    if tuple(outputs) != names:
        _broken(spec, place, component, ", ".join(names), ", ".join(outputs))
    return {component.name: outputs[names[0]]} | {f"{component.name}.{name}": v for name, v in outputs.items()}


def _broken(spec: ModelSpec, place: str, component: Component, wanted: str, found: str) -> NoReturn:
    message = f"spec {spec.name!r}: {place}: kind {component.kind!r} does not keep its word: outputs"
    raise SpecError(message, wanted=wanted, found=found)


def expected_tensors(spec: ModelSpec, library: OperatorLibrary = LIBRARY) -> dict[str, Type]:
    """Every tensor that the checkpoint must hold, by its name there, with the type as stored."""
    graphs = [
        build_graph(spec, library=library),
        *(build_prefill(spec, name, library=library) for name in spec.prefill),
    ]
    wanted = [(port.name, port.value.type) for graph in graphs for port in graph.weights]
    wanted += [
        (given.tensor, Type(given.type.dtype, given.shape or (prefill.steps, *given.type.shape)))
        for prefill in spec.prefill.values()
        for given in prefill.inputs.values()
        if given.tensor
    ]
    found: dict[str, Type] = {}
    for name, type in wanted:
        if found.setdefault(name, type) != type:
            what = f"spec {spec.name!r}: tensor {name!r} is read as two types"
            raise SpecError(what, wanted=found[name], found=type, hint="A prefill reads what the model does.")
    both = sorted(found.keys() & spec.unused.keys())
    if both:
        what = f"spec {spec.name!r}: unused_tensors: the model reads {', '.join(both[:3])}"
        raise SpecError(what, wanted="tensors that it does not read", found=f"{len(both)} that it does")
    return found


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
