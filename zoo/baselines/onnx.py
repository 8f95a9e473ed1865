"""How models' published weights files run in their own runtime.

A baseline names the networks of a step, by the aliases of the spec's weights files, and where each of their inputs
comes from. Only the networks are run: what the original does around them on the host (features, transforms,
overlap-add) is left out, in the baseline's favour.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = int | Literal["batch"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Feed(_Data):
    """One input of a network; exactly one of the first three says where its values come from.

    random: the shape of fresh noise. state: the shape of zeros, replaced after each run by the output `next`.
    constant: a scalar. "batch" in a shape is the number of sessions.
    """

    random: tuple[Size, ...] | None = None
    state: tuple[Size, ...] | None = None
    constant: float | None = None
    next: str | None = None
    dtype: Literal["float32", "int64"] = "float32"

    @model_validator(mode="after")
    def _one_kind(self) -> Feed:
        given = [name for name in ("random", "state", "constant") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"wanted exactly one of random, state, constant; found {', '.join(given) or 'none'}")
        if (self.state is None) != (self.next is None):
            raise ValueError("a state names the output that replaces it as `next`, nothing else does")
        return self


class Network(_Data):
    """One file, by its alias in the spec's weights source, and all its inputs by name."""

    file: str
    inputs: dict[str, Feed] = Field(min_length=1)


class Baseline(_Data):
    """networks run one after the other for a step; batched: one run for all sessions, else one a session."""

    runtime: Literal["onnxruntime"]
    networks: tuple[Network, ...] = Field(min_length=1)
    batched: bool = True


def _random(*shape: Size) -> Feed:
    return Feed(random=shape)


def _state(*shape: Size, next: str) -> Feed:
    return Feed(state=shape, next=next)


BASELINES: dict[str, Baseline] = {
    "silero-vad": Baseline(
        runtime="onnxruntime",
        networks=(
            Network(
                file="silero_vad",
                inputs={
                    "input": _random("batch", 576),
                    "state": _state(2, "batch", 128, next="stateN"),
                    "sr": Feed(constant=16000, dtype="int64"),
                },
            ),
        ),
    ),
    "flashvad": Baseline(
        runtime="onnxruntime",
        networks=(
            Network(
                file="flashvad-stream",
                inputs={
                    "feature": _random("batch", 1, 43),
                    "recurrent": _state(1, "batch", 64, next="next_recurrent"),
                    "cache_0": _state("batch", 64, 2, next="next_cache_0"),
                    "cache_1": _state("batch", 64, 4, next="next_cache_1"),
                    "cache_2": _state("batch", 64, 8, next="next_cache_2"),
                    "cache_3": _state("batch", 64, 16, next="next_cache_3"),
                },
            ),
        ),
    ),
    "dtln": Baseline(
        runtime="onnxruntime",
        batched=False,
        networks=(
            Network(
                file="model_1",
                inputs={
                    "input_2": _random(1, 1, 257),
                    "input_3": _state(1, 2, 128, 2, next="tf_op_layer_stack_2"),
                },
            ),
            Network(
                file="model_2",
                inputs={
                    "input_4": _random(1, 1, 512),
                    "input_5": _state(1, 2, 128, 2, next="tf_op_layer_stack_5"),
                },
            ),
        ),
    ),
}
"""By model; a model without an entry has no known baseline."""
