"""A step of a model in PyTorch, as a careful user would write it, from the dimensions of its spec.

Weights are random bf16, state lies in static buffers and is updated in place, so that the step can be captured into a
CUDA graph. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from wpk.ir.errors import UsageError
from wpk.zoo.component import Component
from wpk.zoo.components.nemotron_h import NemotronH
from wpk.zoo.spec import ModelSpec

Tensor = Any  # torch brings no types that mypy follows
Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Block = dict[str, Tensor]
SCALE = 0.02  # deviation of random weights


@dataclass(frozen=True)
class TorchStep:
    """x [sessions, width] is what the step reads; `run` advances every session and gives the outputs.

    weight_bytes: read by a step. state_bytes: read and written by a step of all sessions. parameters: numbers in the
    weights that a step reads.
    """

    x: Tensor
    run: Callable[[], tuple[Tensor, ...]]
    weight_bytes: int
    state_bytes: int
    parameters: int


def as_is(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """No compilation."""
    return function


def torch_step(
    spec: ModelSpec, *, sessions: int, history: int, device: str, compile: Compile = as_is
) -> TorchStep:  # fmt: skip
    """The model's step for so many sessions, each with `history` rows in its caches.

    compile: applied to the function of every kind of block. UsageError where the model has a component that is not
    written in PyTorch here.
    """
    kinds = [component.kind for component in spec.components]
    written = [component for component in spec.components if component.kind in WRITTEN]
    if len(kinds) != 1 or not written:
        raise UsageError(
            f"no baseline of {spec.name} in PyTorch is written", wanted=f"one component of kind {' or '.join(WRITTEN)}",
            found=", ".join(kinds), hint="write its step in zoo/baselines/torch_step.py",
        )  # fmt: skip
    with torch.no_grad():
        return WRITTEN[kinds[0]](spec, written[0], sessions, history, device, compile)


# --- nemotron_h ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """What the blocks read of the component's dimensions: numbers, which PyTorch's compiler takes as constants."""

    sessions: int
    heads: int  # of Mamba-2
    width: int  # of one of them
    state: int
    groups: int  # of heads that read the same B and C
    query_heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


class Hybrid:
    """One step of a hybrid of Mamba-2, attention and feed-forward blocks for a cohort.

    Weights and state are made here and never again. tokens: whether a step reads tokens instead of embeddings.
    """

    def __init__(
        self, component: NemotronH, sessions: int, history: int, device: str, compile: Compile, *, tokens: bool
    ) -> None:  # fmt: skip
        c = component
        self.component, self.history, self._device = c, history, device
        self.sizes = Sizes(
            sessions, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size, c.n_groups, c.num_attention_heads,
            c.num_key_value_heads, c.head_dim, c.layer_norm_epsilon,
        )  # fmt: skip
        self.table = self._random(c.vocab_size, c.hidden_size) if tokens else None
        self.x = (
            torch.zeros(sessions, device=device, dtype=torch.int64)
            if tokens
            else self._random(sessions, c.hidden_size, scale=0.1)
        )
        makers = {"M": self._mamba, "-": self._mlp, "*": self._attention}
        functions = {letter: compile(function) for letter, function in BLOCKS.items()}
        self.blocks: list[tuple[Callable[..., Tensor], Block, Block]] = []  # function, weights, state
        for letter in c.layers:
            weights, state = makers[letter]()
            self.blocks.append((functions[letter], weights | {"norm": self._ones(c.hidden_size)}, state))
        self.norm = self._ones(c.hidden_size)
        self.heads = [self._random(c.vocab_size, c.hidden_size) for _ in c.heads]

    def __call__(self) -> tuple[Tensor, ...]:
        """Of every head the largest logit's index [sessions], then the logits where the model gives them.

        State moves on by a step.
        """
        x = self.x if self.table is None else F.embedding(self.x, self.table)
        for function, weights, state in self.blocks:
            x = function(self.sizes, x, weights, state)
        x = normed(x, self.norm, self.sizes.eps)
        logits = tuple(F.linear(x, head) for head in self.heads)
        return (*(each.argmax(-1) for each in logits), *(logits if self.component.logits else ()))

    def weights(self) -> list[Tensor]:
        """Every weight that a step reads; of a table of embeddings it reads next to nothing."""
        return [w for _, weights, _ in self.blocks for w in weights.values()] + [self.norm, *self.heads]

    def state_bytes(self) -> int:
        """Read and written by a step: recurrent state both ways, caches read, and a row of each written."""
        moved = 0
        for _, _, state in self.blocks:
            for name, tensor in state.items():
                size = tensor.numel() * tensor.element_size()
                moved += size + size // self.history if name in ("keys", "values") else 2 * size
        return moved

    # --- weights and state --------------------------------------------------------------------------------------
    def _random(self, *shape: int, scale: float = SCALE) -> Tensor:
        return torch.randn(*shape, device=self._device, dtype=torch.bfloat16) * scale

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(*shape, device=self._device, dtype=torch.bfloat16)

    def _zeros(self, *shape: int, dtype: Any) -> Tensor:
        return torch.zeros(self.sizes.sessions, *shape, device=self._device, dtype=dtype)

    def _mamba(self) -> tuple[Block, Block]:
        s, hidden, taps = self.sizes, self.component.hidden_size, self.component.conv_kernel
        weights = {
            "in": self._random(s.inner + s.channels + s.heads, hidden),
            "taps": self._random(s.channels, taps), "tap_bias": self._random(s.channels),
            "dt_bias": torch.rand(s.heads, device=self._device),
            "decay": -torch.rand(s.heads, device=self._device) - 0.5,
            "skip": torch.ones(s.heads, device=self._device),
            "gated_norm": self._ones(s.inner), "out": self._random(hidden, s.inner),
        }  # fmt: skip
        state = {
            "ssm": self._zeros(s.heads, s.width, s.state, dtype=torch.float32),
            "window": self._zeros(s.channels, taps - 1, dtype=torch.bfloat16),
        }
        return weights, state

    def _mlp(self) -> tuple[Block, Block]:
        hidden, between = self.component.hidden_size, self.component.intermediate_size
        return {"up": self._random(between, hidden), "down": self._random(hidden, between)}, {}

    def _attention(self) -> tuple[Block, Block]:
        s, hidden = self.sizes, self.component.hidden_size
        weights = {
            "qkv": self._random((s.query_heads + 2 * s.kv_heads) * s.head_dim, hidden),
            "out": self._random(hidden, s.query_heads * s.head_dim),
        }
        shape = (s.sessions, s.kv_heads, self.history, s.head_dim)
        return weights, {name: self._random(*shape, scale=1.0) for name in ("keys", "values")}


# x [sessions, hidden] bf16, weights, state -> x; state is changed in place.
def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm with statistics in f32."""
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def mamba(s: Sizes, x: Tensor, w: Block, state: Block) -> Tensor:
    n = s.sessions
    gate, new, dt = F.linear(normed(x, w["norm"], s.eps), w["in"]).split([s.inner, s.channels, s.heads], -1)
    window = torch.cat([state["window"], new.unsqueeze(-1)], -1)
    state["window"].copy_(window[:, :, 1:])
    mixed = F.silu((window * w["taps"]).sum(-1) + w["tap_bias"]).float()
    xs, b, c = mixed.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
    xs, b, c = xs.view(n, s.heads, s.width), by_head(s, b), by_head(s, c)
    dt = F.softplus(dt.float() + w["dt_bias"])
    decay = torch.exp(dt * w["decay"])
    ssm = state["ssm"] * decay[:, :, None, None] + (dt[:, :, None] * xs)[..., None] * b[:, :, None, :]
    state["ssm"].copy_(ssm)
    y = (ssm * c[:, :, None, :]).sum(-1) + w["skip"][:, None] * xs
    y = (y.reshape(n, s.inner) * F.silu(gate.float())).view(n, s.groups, s.inner // s.groups)
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + s.eps)
    return x + F.linear(y.view(n, s.inner).to(x.dtype) * w["gated_norm"], w["out"])


def by_head(s: Sizes, v: Tensor) -> Tensor:
    """B or C of every group [sessions, groups * state], for each of its heads: [sessions, heads, state]."""
    v = v.view(s.sessions, s.groups, 1, s.state).expand(s.sessions, s.groups, s.heads // s.groups, s.state)
    return v.reshape(s.sessions, s.heads, s.state)


def mlp(s: Sizes, x: Tensor, w: Block, state: Block) -> Tensor:
    up = F.relu(F.linear(normed(x, w["norm"], s.eps), w["up"]))
    return x + F.linear(up * up, w["down"])


def attention(s: Sizes, x: Tensor, w: Block, state: Block) -> Tensor:
    n, kv = s.sessions, s.kv_heads * s.head_dim
    q, k, v = F.linear(normed(x, w["norm"], s.eps), w["qkv"]).split([s.query_heads * s.head_dim, kv, kv], -1)
    state["keys"][:, :, -1].copy_(k.view(n, s.kv_heads, s.head_dim))
    state["values"][:, :, -1].copy_(v.view(n, s.kv_heads, s.head_dim))
    q = q.view(n, s.query_heads, 1, s.head_dim)
    y = F.scaled_dot_product_attention(q, state["keys"], state["values"], enable_gqa=True)
    return x + F.linear(y.reshape(n, s.query_heads * s.head_dim), w["out"])


BLOCKS: dict[str, Callable[..., Tensor]] = {"M": mamba, "-": mlp, "*": attention}


def _nemotron_h(
    spec: ModelSpec, component: Component, sessions: int, history: int, device: str, compile: Compile
) -> TorchStep:  # fmt: skip
    assert isinstance(component, NemotronH)
    tokens = any(not port.type.dtype.is_float for port in spec.ports.inputs.values())
    model = Hybrid(component, sessions, history, device, compile, tokens=tokens)
    weights = model.weights()
    return TorchStep(
        model.x, model, weight_bytes=sum(w.numel() * w.element_size() for w in weights),
        state_bytes=model.state_bytes(), parameters=sum(w.numel() for w in weights),
    )  # fmt: skip


WRITTEN = {"nemotron_h": _nemotron_h}
"""Kind of component -> its step."""
