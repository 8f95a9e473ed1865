"""Gemma-3 layers (Gemma Team 2025) for one position of several rows, each with keys and values of its own."""

from __future__ import annotations

from dataclasses import dataclass

from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import reshape
from wpk.zoo.tensors import Tensors


def rms_norm(g: GraphBuilder, x: Value, tensors: Tensors, name: str, eps: float) -> Value:
    """RMSNorm that multiplies by 1 + weight, as Gemma's do."""
    weight = tensors.get(f"{name}.weight", f32(x.type.shape[-1]))
    return g.op("rms_norm", x, weight, eps=eps, offset=1.0)  # type: ignore[no-any-return]


def product(g: GraphBuilder, x: Value, tensors: Tensors, name: str, rows: int, activation: str = "none") -> Value:
    """x W^T with the parameter NAME.weight [rows, width of x]."""
    weight = tensors.get(f"{name}.weight", f32(rows, x.type.shape[-1]))
    return g.op("linear", x, weight, activation=activation)  # type: ignore[no-any-return]


def gated_feed_forward(g: GraphBuilder, x: Value, tensors: Tensors, name: str, inner: int) -> Value:
    """down(gelu_tanh(gate x) * up x); parameters NAME.gate_proj, NAME.up_proj, NAME.down_proj."""
    gate = product(g, x, tensors, f"{name}.gate_proj", inner, "gelu_tanh")
    up = product(g, x, tensors, f"{name}.up_proj", inner)
    return product(g, g.op("mul", gate, up), tensors, f"{name}.down_proj", x.type.shape[-1])


@dataclass(frozen=True)
class Backbone:
    """The decoder: [rows, hidden] -> [rows, hidden], normalised at the end.

    component: whose caches and position they are. thetas: rotary base of each layer.
    """

    component: str
    layers: int
    heads: int
    head_dim: int
    inner: int
    eps: float
    scale: float
    thetas: tuple[float, ...]

    def build(self, g: GraphBuilder, x: Value, tensors: Tensors) -> Value:
        for i in range(self.layers):
            layer = f"backbone.layers.{i}"
            with g.scope(layer):
                y = self._attention(g, self._norm(g, x, tensors, f"{layer}.input_layernorm"), tensors, i)
                x = g.op("add", x, self._norm(g, y, tensors, f"{layer}.post_attention_layernorm"))
                y = self._norm(g, x, tensors, f"{layer}.pre_feedforward_layernorm")
                y = gated_feed_forward(g, y, tensors, f"{layer}.mlp", self.inner)
                x = g.op("add", x, self._norm(g, y, tensors, f"{layer}.post_feedforward_layernorm"))
        return self._norm(g, x, tensors, "backbone.norm")

    def _norm(self, g: GraphBuilder, x: Value, tensors: Tensors, name: str) -> Value:
        return rms_norm(g, x, tensors, name, self.eps)

    def _attention(self, g: GraphBuilder, x: Value, tensors: Tensors, index: int) -> Value:
        """Rows do not see each other: their heads are as many heads of one query, each with a key head of its own."""
        layer = f"backbone.layers.{index}"
        rows, width = x.type.shape
        by_head = (rows * self.heads, self.head_dim)
        q, k, v = (
            reshape(g, product(g, x, tensors, f"{layer}.self_attn.{p}_proj", self.heads * self.head_dim), by_head)
            for p in "qkv"
        )
        position, theta = g.position(self.component), self.thetas[index]
        q, k = (
            g.op("rope", self._norm(g, y, tensors, f"{layer}.self_attn.{p}_norm"), position, theta=theta)
            for y, p in ((q, "q"), (k, "k"))
        )
        kept = []
        for name, row in ((f"{self.component}.{layer}.k", k), (f"{self.component}.{layer}.v", v)):
            g.cache(name, f32(*by_head))
            kept.append(g.append(name, row, self.component))
        y = g.op("attention", q, *kept, position, scale=self.scale)
        y = reshape(g, y, (rows, self.heads * self.head_dim))
        return product(g, y, tensors, f"{layer}.self_attn.o_proj", width)
