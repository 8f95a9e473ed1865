"""Windows over a stream of samples or feature frames: history kept between steps, padding inside a step."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import Type, f32
from wpk.zoo.component import Component, Count, Size, component, expect_rank
from wpk.zoo.tensors import Tensors


@component("audio_window")
class AudioWindow(Component):
    """The newest samples with those before them: [samples] -> [pad_left + history + samples + pad_right].

    history: samples of earlier steps kept in front, zeros at first. length: take that many, the oldest, of history
    and step together (the newest ones then wait in the history: a window that lags). pad: how the sides are
    filled, zeros, reflect (the edge sample not repeated) or edge.
    """

    history: Count = 0
    length: Size | None = None
    pad: Literal["zeros", "reflect", "edge"] = "zeros"
    pad_left: Count = 0
    pad_right: Count = 0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("audio_window", x, 1)
        window = x
        if self.history:
            kept = g.ring(self.state("history"), self.history, Type(x.type.dtype))
            g.update(self.state("history"), x)
            window = g.op("concat", kept, x, axis=0)
        if self.length is not None and self.length != window.type.size:
            window = g.op("slice", window, axis=0, start=0, stop=self.length)
        if self.pad_left or self.pad_right:
            window = g.op("pad", window, before=self.pad_left, after=self.pad_right, mode=self.pad)
        return window


@component("delay")
class Delay(Component):
    """What came `steps` steps ago; zeros until then. Any float shape."""

    steps: Size = 1

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        ring = g.ring(self.state("past"), self.steps, x.type)
        g.update(self.state("past"), g.op("reshape", x, shape=(1, *x.type.shape)))
        oldest = g.op("slice", ring, axis=0, start=0, stop=1)
        return g.op("reshape", oldest, shape=x.type.shape)  # type: ignore[no-any-return]


@component("frame_window")
class FrameWindow(Component):
    """The last `frames` frames, oldest first: [channels] or [n, channels] -> [frames, channels]; zeros at first."""

    frames: Size

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("frame_window", x, 1, 2)
        rows = x if len(x.type.shape) == 2 else g.op("reshape", x, shape=(1, *x.type.shape))
        count, channels = rows.type.shape
        if count > self.frames:
            raise GraphError("frame_window is shorter than a step", wanted=f"frames >= {count}", found=self.frames)
        if count == self.frames:
            return rows
        kept = g.ring(self.state("frames"), self.frames - count, f32(channels))
        g.update(self.state("frames"), rows)
        return g.op("concat", kept, rows, axis=0)  # type: ignore[no-any-return]


@component("pad")
class Pad(Component):
    """Rows added inside the step: [t, ...] -> [left + t + right, ...]; at least one of both."""

    left: Count = 0
    right: Count = 0
    mode: Literal["zeros", "reflect", "edge"] = "zeros"

    @model_validator(mode="after")
    def _pads(self) -> Pad:
        if not (self.left or self.right):
            raise ValueError("wanted left or right above 0, found neither")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("pad", inputs[0], before=self.left, after=self.right, mode=self.mode)  # type: ignore[no-any-return]
