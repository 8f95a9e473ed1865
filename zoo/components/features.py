"""Features of a frame or spectrum that are not learned: levels, flatness, zero crossings, logarithms, differences."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.zoo.component import Component, Count, after_step, component, expect_rank
from wpk.zoo.tensors import Tensors

_LARGEST = 3.4028234663852886e38  # of float32: a clamp with no upper bound
_Floor = Annotated[float, Field(gt=0.0)]
_BASES = {"e": 1.0, "2": 1.0 / math.log(2.0), "10": 1.0 / math.log(10.0)}


def _floored(g: GraphBuilder, x: Value, floor: float) -> Value:
    return g.op("clamp", x, lo=floor, hi=_LARGEST)  # type: ignore[no-any-return]


def _number(g: GraphBuilder, scalar: Value) -> Value:
    return g.op("reshape", scalar, shape=(1,))  # type: ignore[no-any-return]


@component("log")
class Log(Component):
    """scale * log_base(max(x + offset, floor)), any shape. base: e, 2 or 10."""

    base: Literal["e", "2", "10"] = "e"
    offset: float = 0.0
    floor: _Floor | None = None
    scale: float = 1.0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        if self.offset:
            x = g.op("affine", x, offset=self.offset)
        if self.floor is not None:
            x = _floored(g, x, self.floor)
        y = g.op("log", x)
        scale = self.scale * _BASES[self.base]
        return y if scale == 1.0 else g.op("affine", y, scale=scale)  # type: ignore[no-any-return]


@component("center")
class Center(Component):
    """x - mean(x) over a vector."""

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("center", x, 1)
        return g.op("sub", x, g.op("mean", x))  # type: ignore[no-any-return]


@component("log_rms")
class LogRms(Component):
    """The level of a frame, ln sqrt(max(mean(x^2), floor)): [samples] -> [1]."""

    floor: _Floor = 1e-10

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("log_rms", x, 1)
        power = _floored(g, g.op("mean", g.op("square", x)), self.floor)
        return _number(g, g.op("affine", g.op("log", power), scale=0.5))


@component("spectral_flatness")
class SpectralFlatness(Component):
    """ln of geometric over arithmetic mean of a power spectrum: [bins] -> [1], 0 for white, negative for tonal.

    ln max(exp(mean ln max(p, floor)) / max(mean p, floor), floor). Gray & Markel 1974.
    """

    floor: _Floor = 1e-10

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("spectral_flatness", x, 1)
        geometric = g.op("exp", g.op("mean", g.op("log", _floored(g, x, self.floor))))
        ratio = g.op("div", geometric, _floored(g, g.op("mean", x), self.floor))
        return _number(g, g.op("log", _floored(g, ratio, self.floor)))


@component("zero_crossing_rate")
class ZeroCrossingRate(Component):
    """The share of neighbouring samples with opposite signs, zeros being of neither: [samples] -> [1]."""

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        expect_rank("zero_crossing_rate", x, 1)
        size = x.type.size
        later = g.op("slice", x, axis=0, start=1, stop=size)
        earlier = g.op("slice", x, axis=0, start=0, stop=size - 1)
        crossed = g.op("less", g.op("mul", later, earlier), g.op("full", shape=(), value=0.0))
        return _number(g, g.op("mean", g.op("cast", crossed, dtype="f32")))


@component("difference")
class Difference(Component):
    """x minus the x of the step before, any shape; rectified: what is negative becomes 0.

    initial: every value of what came before the first step; with rectify, a large one such as 1e30 makes the first
    difference 0. start_step: the first step that counts; earlier ones are not remembered.
    """

    rectify: bool = False
    initial: float = 0.0
    start_step: Count = 0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        initial = g.op("full", shape=x.type.shape, value=self.initial) if self.initial else None
        previous = g.register(self.state("previous"), f32(*x.type.shape), initial)
        g.update(self.state("previous"), after_step(g, self.start_step, x, previous))
        y = g.op("sub", x, previous)
        return g.op("relu", y) if self.rectify else y  # type: ignore[no-any-return]
