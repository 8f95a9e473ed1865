"""Views and overwriting: which values of a graph are the same bytes, as the operators declare it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from wpk.ir.graph import Attribute, Graph, Node, Value
from wpk.ops.operator import LIBRARY, Operator, make


def operator_of(node: Node) -> Operator:
    """The operator of a node, with its attributes."""
    cls = LIBRARY.get(node.op, node.version)
    return _made(cls, node.attrs, repr(node.attrs))  # type: ignore[arg-type]  # mypy: a class is no Hashable


@functools.lru_cache(maxsize=4096)
def _made(cls: type[Operator], attrs: tuple[tuple[str, Attribute], ...], text: str) -> Operator:
    """text: tells apart attributes that are equal and not the same, such as 0.0 and -0.0."""
    return make(cls, dict(attrs))


def view_start(node: Node) -> int | None:
    """Bytes into its first input at which a view's result lies; None where the node is no view."""
    return operator_of(node).view(*(v.type for v in node.inputs))


def viewed(value: Value, producers: Mapping[int, Node]) -> Value:
    """The value whose bytes this one shows: itself, or what it is a view of."""
    while (node := producers.get(value.id)) is not None and view_start(node) is not None:
        value = node.inputs[0]
    return value


def overwritten_values(graph: Graph) -> frozenset[int]:
    """Ids of the values whose bytes a later value takes over, such as a cache to which a row is appended."""
    producers = graph.producers()
    taken = ((node, operand) for node in graph.nodes for operand in operator_of(node).alias.values())
    return frozenset(viewed(node.inputs[operand], producers).id for node, operand in taken)


def dependences(graph: Graph, nodes: Sequence[Node]) -> list[list[int]]:
    """What each of these nodes, all of the graph's that are no weights, must follow; by their positions.

    It follows who makes what it reads and, where it overwrites a value, who reads what was there.
    """
    producers, position = graph.producers(), {v.id: i for i, node in enumerate(nodes) for v in node.outputs}
    before = [[position[v.id] for v in node.inputs if v.id in position] for node in nodes]
    reading: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for operand in operator_of(node).alias.values():
            before[i] += reading.get(viewed(node.inputs[operand], producers).id, [])
        for value in node.inputs:
            reading.setdefault(viewed(value, producers).id, []).append(i)
    return before
