"""Joins: a `concat` along the leading axis costs nothing where its operands are written side by side at once.

A value's home is then a part of the storage of the joined result. That takes that all operands are computed, each by
a phase that may write anywhere, and are joined in no other place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wpk.ir.graph import Graph, Node, Value
from wpk.scheduler.views import operator_of, overwritten_values, view_start

PART_ALIGN = 16  # bytes: what a GPU's copy engine can address


@dataclass(frozen=True, slots=True)
class Part:
    """Where a value is written: `start` bytes into a joined result."""

    whole: Value
    start: int


class Joins:
    """Which results of a graph are joined without a phase, and the part of each value that is written into one."""

    def __init__(self, graph: Graph, homes: Mapping[int, tuple[str, str]]) -> None:
        """homes: value id -> (kind, name) of the port or state that it is written into."""
        self._producers, self._homes, self._overwritten = graph.producers(), homes, overwritten_values(graph)
        self.parts: dict[int, Part] = {}
        self.results: set[int] = set()
        for node in graph.nodes:
            if node.op == "concat" and not node.weight:
                self._join(node)

    def source(self, value: Value, taken: Collection[int] = ()) -> Value | None:
        """The value of the same bytes that can be written into a part; None where there is none.

        taken: ids of values that are to have another home.
        """
        while (node := self._producers.get(value.id)) is not None and view_start(node) is not None:
            if node.inputs[0].type.bytes != value.type.bytes:
                return None
            value = node.inputs[0]
        if node is None or node.weight or value.id in self._overwritten:
            return None
        if value.id in self.parts or value.id in self._homes or value.id in taken:
            return None
        return None if node.outputs.index(value) in operator_of(node).alias else value

    def _join(self, node: Node) -> None:
        (whole,) = node.outputs
        axis = int(node.attributes["axis"]) % len(whole.type.shape)  # type: ignore[arg-type]
        shown = self._homes.get(whole.id, ("output", ""))[0] == "output"
        if math.prod(whole.type.shape[:axis]) != 1 or whole.id in self._overwritten or not shown:
            return
        start, parts = 0, dict[int, Part]()
        for value in node.inputs:
            source = self.source(value, parts)
            if source is None or start % PART_ALIGN:
                return
            parts[source.id] = Part(whole, start)
            start += value.type.bytes
        self.parts |= parts
        self.results.add(whole.id)
