"""Recurrent layers, one or several; their state goes from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import Component, Count, Size, after_step, as_rows, component, concat, expect_rank, reshape
from wpk.zoo.tensors import Tensors


class _Recurrent(Component):
    """Base: [k] -> [units], or a sequence [t, k] -> [t, units], through `layers` layers.

    bias: "both" (LAYER.b_ih and LAYER.b_hh), "one" (LAYER.bias) or "none". gates: the order of the blocks of rows in
    the weights. start_step: the first step that counts; earlier ones leave the state as it is.
    Parameters LAYER.w_ih [gates * units, k], LAYER.w_hh [gates * units, units], layers counted from 0.
    """

    units: Size
    layers: Size = 1
    start_step: Count = 0

    def _run(
        self, g: GraphBuilder, x: Value, layer: int, states: tuple[str, ...], cell: Callable[..., tuple[Value, ...]]
    ) -> Value:
        """Frames one after the other through one layer; cell(frame, *state) -> state, the output first."""
        initial = tuple(g.register(self.state(f"{layer}.{name}"), f32(self.units)) for name in states)
        state, rows = initial, as_rows(g, x)
        outputs = []
        for t in range(rows.type.shape[0]):
            row = x if len(x.type.shape) == 1 else g.op("slice", rows, axis=0, start=t, stop=t + 1)
            state = cell(reshape(g, row, (rows.type.shape[1],)), *state)
            outputs.append(reshape(g, state[0], (1, self.units)))
        for name, new, old in zip(states, state, initial, strict=True):
            g.update(self.state(f"{layer}.{name}"), after_step(g, self.start_step, new, old))
        return state[0] if len(x.type.shape) == 1 else concat(g, outputs, axis=0)

    def _weights(self, tensors: Tensors, layer: int, gates: int, inputs: int, bias: str) -> tuple[Value, ...]:
        rows = gates * self.units
        names = {"both": ("b_ih", "b_hh"), "one": ("bias",), "none": ()}[bias]
        matrices = (("w_ih", f32(rows, inputs)), ("w_hh", f32(rows, self.units)))
        return tuple(
            tensors.get(f"{layer}.{name}", type) for name, type in (*matrices, *((name, f32(rows)) for name in names))
        )


@component("lstm")
class Lstm(_Recurrent):
    """LSTM layers. gates: an order of i, f, g (or c), o: "ifgo" is PyTorch's and Keras', "iofc" ONNX's."""

    gates: str = "ifgo"
    bias: Literal["both", "one", "none"] = "both"

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("lstm", x, 1, 2)
        for layer in range(self.layers):
            weights = self._weights(tensors, layer, 4, x.type.shape[-1], self.bias)

            def cell(row: Value, h: Value, c: Value, weights: tuple[Value, ...] = weights) -> tuple[Value, ...]:
                return g.op("lstm", row, h, c, *weights, gates=self.gates)  # type: ignore[no-any-return]

            x = self._run(g, x, layer, ("h", "c"), cell)
        return x


@component("gru")
class Gru(_Recurrent):
    """GRU layers. gates: an order of r, z, n (or h): "rzn" is PyTorch's, "zrh" ONNX's.

    linear_before_reset: the reset gate is applied after the recurrent product (PyTorch always, ONNX as its attribute
    says).
    """

    gates: str = "rzn"
    bias: Literal["both", "none"] = "both"
    linear_before_reset: bool = True

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("gru", x, 1, 2)
        for layer in range(self.layers):
            weights = self._weights(tensors, layer, 3, x.type.shape[-1], self.bias)

            def cell(row: Value, h: Value, weights: tuple[Value, ...] = weights) -> tuple[Value, ...]:
                after = self.linear_before_reset
                return (g.op("gru", row, h, *weights, gates=self.gates, linear_before_reset=after),)

            x = self._run(g, x, layer, ("h",), cell)
        return x
