"""The meaning of a graph: nodes evaluated in NumPy, float64, one session.

Used to make weights when a profile is loaded (nodes that depend on weights alone) and as the reference that programs
are tested against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from wpk.ir.graph import Graph, Node, StateKind
from wpk.ir.types import DType
from wpk.ops.operator import LIBRARY, Array, make


def evaluate(nodes: Iterable[Node], values: dict[int, Array]) -> dict[int, Array]:
    """Add every node's results to `values` (value id -> array); returns it.

    Arithmetic is float64 whatever the arrays are; what only moves values keeps their dtype.
    """
    for node in nodes:
        operator = make(LIBRARY.get(node.op, node.version), node.attributes)
        inputs = [values[v.id] for v in node.inputs]
        if not operator.layout_only:
            inputs = [a.astype(np.float64) if a.dtype == np.float32 else a for a in inputs]
        result = operator.meaning(*inputs)
        results = result if isinstance(result, tuple) else (result,)
        for value, array in zip(node.outputs, results, strict=True):
            values[value.id] = np.asarray(array).reshape(value.type.shape)
    return values


def stored(array: Array, dtype: DType) -> Array:
    """An array as the bits that a value of that dtype is stored in."""
    if dtype is DType.BF16:
        return bf16_bits(array)
    return np.ascontiguousarray(array, dtype.numpy)


def bf16_bits(array: Array) -> Array:
    """bf16 as uint16: float32 rounded to nearest even on the 16 bits that are dropped; NaN stays a (quiet) NaN."""
    array = np.asarray(array, np.float32)
    bits = array.view(np.uint32)
    with np.errstate(over="ignore"):  # only NaN wraps, and is replaced
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def rounded_to_bf16(array: Array) -> Array:
    """The values that bf16 stores for these, as float64."""
    return (bf16_bits(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Reference:
    """A graph run step by step by its meaning: what every kernel is compared with."""

    def __init__(self, graph: Graph, weights: Mapping[str, Array]) -> None:
        self.graph = graph
        values = {p.value.id: np.asarray(weights[p.name], np.float64) for p in graph.weights}
        self.constants = evaluate((n for n in graph.nodes if n.weight), values)
        self.state = {
            s.name: np.zeros(s.value.type.shape) if s.initial is None else self.constants[s.initial.id]
            for s in graph.states
        }

    def step(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Advance one step; inputs and outputs by port name."""
        values = dict(self.constants)
        values |= {p.value.id: np.asarray(inputs[p.name]).reshape(p.value.type.shape) for p in self.graph.inputs}
        values |= {s.value.id: self.state[s.name] for s in self.graph.states}
        evaluate((n for n in self.graph.nodes if not n.weight), values)
        following = {}
        for state in self.graph.states:
            assert state.update is not None
            new = values[state.update.id]
            if state.kind is StateKind.RING:
                rows = state.value.type.shape[0]
                new = np.concatenate([self.state[state.name], new])[-rows:]
            following[state.name] = new
        self.state = following
        return {p.name: values[p.value.id] for p in self.graph.outputs}
