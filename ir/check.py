"""Rules that every graph obeys, as a table: name, what holds, and how a breach is told.

A `GraphBuilder` cannot break them; a graph that comes from text, or from a pass, is checked with `check_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wpk.ir.errors import GraphError
from wpk.ir.graph import Graph, Library, StateKind

Breach = tuple[str, object, object]  # message, wanted, found
Rule = Callable[[Graph, Library], Iterator[Breach]]


def _defined_once(graph: Graph, library: Library) -> Iterator[Breach]:
    seen: set[int] = set()
    leaves = [p.value for p in (*graph.inputs, *graph.weights)] + [s.value for s in graph.states]
    for value in (*leaves, *(v for n in graph.nodes for v in n.outputs)):
        if value.id in seen:
            yield f"{value} is defined twice", "one definition", "two"
        seen.add(value.id)


def _defined_before_use(graph: Graph, library: Library) -> Iterator[Breach]:
    known = {p.value.id for p in (*graph.inputs, *graph.weights)} | {s.value.id for s in graph.states}
    later = {v.id for n in graph.nodes for v in n.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            if value.id not in known:
                cause = "depends on itself or on a later node" if value.id in later else "reads an undefined value"
                yield f"{node.op}@{node.version} {cause}", "a value that is already defined", value
        known |= {v.id for v in node.outputs}
    for port in graph.outputs:
        if port.value.id not in known:
            yield f"output {port.name!r} is undefined", "a defined value", port.value


def _names_unique(graph: Graph, library: Library) -> Iterator[Breach]:
    tables = {
        "input": [p.name for p in graph.inputs],
        "weight": [p.name for p in graph.weights],
        "state": [s.name for s in graph.states],
        "output": [p.name for p in graph.outputs],
    }
    for what, names in tables.items():
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{what} {name!r} is declared twice", "distinct names", name


def _types_follow(graph: Graph, library: Library) -> Iterator[Breach]:
    for node in graph.nodes:
        operator = library.resolve(node.op, node.version)
        try:
            operator.check_weights([v.weight for v in node.inputs])
            types = operator.infer([v.type for v in node.inputs], node.attributes)
        except GraphError as error:
            yield error.message, error.wanted, error.found
            continue
        found = tuple(v.type for v in node.outputs)
        if types != found:
            yield f"{node.op}@{node.version} at {node.outputs[0]}: results", _names(types), _names(found)


def _states_updated(graph: Graph, library: Library) -> Iterator[Breach]:
    for state in graph.states:
        held, update = state.value.type, state.update
        if update is None:
            yield f"state {state.name!r} is never updated", "an update", "none"
        elif state.kind is StateKind.RING:
            if update.type.dtype != held.dtype or update.type.shape[1:] != held.shape[1:]:
                yield f"update of ring {state.name!r}", f"rows of {held}", update.type
        elif update.type != held:
            yield f"update of {state.kind.value} {state.name!r}", held, update.type
        if state.initial is not None and (not state.initial.weight or state.initial.type != held):
            yield f"initial image of state {state.name!r}", f"a weight {held}", state.initial.type


RULES: dict[str, Rule] = {
    "defined once": _defined_once,
    "defined before use": _defined_before_use,
    "names unique": _names_unique,
    "types follow from the operators": _types_follow,
    "states updated": _states_updated,
}


def check_graph(graph: Graph, library: Library) -> None:
    """Raise `GraphError` with the first breach."""
    for name, rule in RULES.items():
        for message, wanted, found in rule(graph, library):
            raise GraphError(f"{graph.name}: {message} (rule: {name})", wanted=wanted, found=found)


def _names(types: tuple[object, ...]) -> str:
    return ", ".join(map(str, types))
