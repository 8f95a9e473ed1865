"""Views and overwriting: which values of a graph are the same bytes, as the operators declare it."""

from __future__ import annotations

from collections.abc import Mapping

from wpk.ir.graph import Graph, Node, Value
from wpk.ops.operator import LIBRARY, Operator, make


def operator_of(node: Node) -> Operator:
    """The operator of a node, with its attributes."""
    return make(LIBRARY.get(node.op, node.version), node.attributes)


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
