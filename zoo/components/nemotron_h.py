"""Hybrids of Mamba-2, attention and plain feed-forward layers: Nemotron-H (NVIDIA 2025, arXiv 2504.03624)."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import bf16, f32, i32
from wpk.zoo.component import Built, Component, Size, component, reshape
from wpk.zoo.tensors import Policy, Tensors

_Pattern = Annotated[str, StringConstraints(pattern=r"^[M*-]+$", max_length=1024)]
_Head = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]
_Eps = Annotated[float, Field(gt=0.0, le=1.0)]

TAPS, STATE = 4, 128  # of the convolution; columns of a head's state: what the operators are written for


@component("nemotron_h")
class NemotronH(Component):
    """One token through the backbone and its heads: an embedding f32[hidden_size], or a token i32[] -> a token a head.

    layers: a letter a block, `M` Mamba-2, `*` attention, `-` feed-forward (config.json's hybrid_override_pattern). The
    other dimensions are called as in config.json. Every block adds mixer(RMSNorm(x)) to the residual stream x, which
    stays f32. Mamba-2 (Dao & Gu 2024): the input projection's rows are gate, x | B | C and time steps; the gate is
    applied before an RMSNorm over `n_groups` groups. Attention is grouped-query and has no positional encoding. The
    feed-forward is relu(x W_up)^2 W_down. No layer has a bias but the convolution.

    heads: each a matrix HEAD.weight [vocab_size, hidden_size] on the normalised last x; outputs HEAD, the greatest
    logit's index i32[], and with `logits` HEAD_logits f32[vocab_size].

    Parameters as published, under backbone. and the heads' names; `backbone.embeddings.weight` only where the input is
    a token. Matrices are stored as bf16, everything else as f32. State a session: for each Mamba-2 layer a register
    f32[mamba_num_heads, mamba_head_dim, 128] and one bf16[3, channels] of the convolution, for each attention layer a
    cache bf16[2, num_key_value_heads, head_dim] a step.
    """

    POLICIES: ClassVar[tuple[Policy, ...]] = ("bf16",)

    layers: _Pattern
    vocab_size: Size
    hidden_size: Size
    mamba_num_heads: Size
    mamba_head_dim: Size
    n_groups: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    ssm_state_size: Size = STATE
    conv_kernel: Size = TAPS
    layer_norm_epsilon: _Eps = 1e-5
    heads: Annotated[tuple[_Head, ...], Field(min_length=1, max_length=16)] = ("lm_head",)
    logits: bool = False

    @model_validator(mode="after")
    def _fits_the_operators(self) -> NemotronH:
        for field, wanted in (("ssm_state_size", STATE), ("conv_kernel", TAPS)):
            if getattr(self, field) != wanted:
                raise ValueError(f"wanted {field} {wanted}, found {getattr(self, field)}")
        eights = ("hidden_size", "vocab_size", "mamba_num_heads", "mamba_head_dim", "intermediate_size")
        for field, unit in (*((field, 8) for field in eights), ("head_dim", 16)):
            if getattr(self, field) % unit:
                raise ValueError(f"wanted {field} a multiple of {unit}, found {getattr(self, field)}")
        for part, whole in (("n_groups", "mamba_num_heads"), ("num_key_value_heads", "num_attention_heads")):
            if getattr(self, whole) % getattr(self, part):
                found = f"{getattr(self, part)} and {getattr(self, whole)}"
                raise ValueError(f"wanted {part} that divides {whole}, found {found}")
        if len(set(self.heads)) != len(self.heads):
            raise ValueError(f"wanted heads of different names, found {list(self.heads)}")
        return self

    def outputs(self) -> tuple[str, ...]:
        return (*self.heads, *(f"{head}_logits" for head in self.heads if self.logits))

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        x = self._embedded(g, inputs[0], tensors)
        mixers = {"M": self._mamba2, "*": self._attention, "-": self._feed_forward}
        for i, letter in enumerate(self.layers):
            layer = f"backbone.layers.{i}"
            with g.scope(layer):
                x = g.op("add", x, mixers[letter](g, self._norm(g, x, tensors, f"{layer}.norm"), tensors, layer))
        x = self._norm(g, x, tensors, "backbone.norm_f")
        tokens, logits = {}, {}
        for head in self.heads:
            with g.scope(head):
                scores = self._product(g, x, tensors, head, self.vocab_size)
                tokens[head], logits[f"{head}_logits"] = g.op("argmax", scores), scores
        return tokens | (logits if self.logits else {})

    def _embedded(self, g: GraphBuilder, given: Value, tensors: Tensors) -> Value:
        if given.type == i32():
            table = tensors.get("backbone.embeddings.weight", bf16(self.vocab_size, self.hidden_size))
            return g.op("embedding", given, table)  # type: ignore[no-any-return]
        if given.type != f32(self.hidden_size):
            raise GraphError("the input of a backbone", wanted=f"{f32(self.hidden_size)} or {i32()}", found=given.type)
        return given

    def _norm(self, g: GraphBuilder, x: Value, tensors: Tensors, name: str) -> Value:
        weight = tensors.get(f"{name}.weight", f32(self.hidden_size))
        return g.op("rms_norm", x, weight, eps=self.layer_norm_epsilon)  # type: ignore[no-any-return]

    def _product(self, g: GraphBuilder, x: Value, tensors: Tensors, name: str, rows: int) -> Value:
        return g.op("linear", x, tensors.get(f"{name}.weight", bf16(rows, x.type.size)))  # type: ignore[no-any-return]

    # --- mixers ---------------------------------------------------------------------------------------------------
    def _mamba2(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str) -> Value:
        heads, inner = self.mamba_num_heads, self.mamba_num_heads * self.mamba_head_dim
        channels = inner + 2 * self.n_groups * STATE
        mixer = f"{layer}.mixer"
        window = g.register(self.state(f"{layer}.conv"), bf16(TAPS - 1, channels))
        state = g.register(self.state(f"{layer}.ssm"), f32(heads, self.mamba_head_dim, STATE))
        rows = self._product(g, x, tensors, f"{mixer}.in_proj", inner + channels + heads)
        mixed, window = g.op("mamba2_split", rows, window, self._constants(g, tensors, mixer, channels))
        y, state = g.op("mamba2_step", mixed, state)
        g.update(self.state(f"{layer}.conv"), window)
        g.update(self.state(f"{layer}.ssm"), state)
        gate = g.op("slice", mixed, axis=0, start=0, stop=inner)
        weight, eps = tensors.get(f"{mixer}.norm.weight", f32(inner)), self.layer_norm_epsilon
        y = g.op("gated_rms_norm", y, gate, weight, groups=self.n_groups, eps=eps)
        return self._product(g, y, tensors, f"{mixer}.out_proj", self.hidden_size)

    def _constants(self, g: GraphBuilder, tensors: Tensors, mixer: str, channels: int) -> Value:
        """What `mamba2_split` wants: the taps, oldest first, then the convolution's bias, dt's bias, A and D."""
        each = f32(self.mamba_num_heads)
        by_channel = tensors.get(f"{mixer}.conv1d.weight", f32(channels, 1, TAPS))
        taps = g.op("transpose", reshape(g, by_channel, (channels, TAPS)), axes=(1, 0))
        a = g.op("neg", g.op("exp", tensors.get(f"{mixer}.A_log", each)))
        return g.op(  # type: ignore[no-any-return]
            "concat", reshape(g, taps, (TAPS * channels,)), tensors.get(f"{mixer}.conv1d.bias", f32(channels)),
            tensors.get(f"{mixer}.dt_bias", each), a, tensors.get(f"{mixer}.D", each), axis=0,
        )  # fmt: skip

    def _attention(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str) -> Value:
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        name, mixer = self.state(f"{layer}.kv"), f"{layer}.mixer"
        cache = g.cache(name, bf16(2, groups, width))
        counts = {"q": heads, "k": groups, "v": groups}
        matrices = [tensors.get(f"{mixer}.{p}_proj.weight", bf16(c * width, x.type.size)) for p, c in counts.items()]
        rows = g.op("linear", x, g.op("concat", *matrices, axis=0))
        query, cache = g.op("qkv_split", rows, cache, g.position(self.name), scale=1 / math.sqrt(width))
        g.replace(name, cache)
        y = g.op("kv_attention", query, cache, g.position(self.name), heads=heads)
        return self._product(g, y, tensors, f"{mixer}.o_proj", self.hidden_size)

    def _feed_forward(self, g: GraphBuilder, x: Value, tensors: Tensors, layer: str) -> Value:
        mixer = f"{layer}.mixer"
        h = g.op("relu2", self._product(g, x, tensors, f"{mixer}.up_proj", self.intermediate_size))
        return self._product(g, h, tensors, f"{mixer}.down_proj", self.hidden_size)
