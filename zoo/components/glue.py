"""What holds components together: shapes, element-wise functions, combinations of several inputs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.zoo.component import Built, Component, Count, Size, component, concat, expect_rank, reshape
from wpk.zoo.tensors import Tensors

_Sizes = Annotated[tuple[Size, ...], Field(min_length=1, max_length=8)]
Function = Literal[
    "abs", "cos", "exp", "gelu", "gelu_tanh", "neg", "reciprocal", "relu", "relu2", "sigmoid", "sign", "silu", "sin",
    "softplus", "sqrt", "square", "tanh",
]  # fmt: skip


@component("activation")
class Activation(Component):
    """A function of every element, any shape."""

    function: Function

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op(self.function, inputs[0])  # type: ignore[no-any-return]


@component("affine")
class Affine(Component):
    """x * scale + offset, any shape."""

    scale: float = 1.0
    offset: float = 0.0

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("affine", inputs[0], scale=self.scale, offset=self.offset)  # type: ignore[no-any-return]


@component("clamp")
class Clamp(Component):
    """min(max(x, lo), hi), any shape."""

    lo: float
    hi: float

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("clamp", inputs[0], lo=self.lo, hi=self.hi)  # type: ignore[no-any-return]


@component("softmax")
class Softmax(Component):
    """Over the last axis; log: its logarithm."""

    log: bool = False

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("log_softmax" if self.log else "softmax", inputs[0])  # type: ignore[no-any-return]


@component("reduce")
class Reduce(Component):
    """Over the last axis, which goes (a vector becomes [1]): [..., d] -> [...]."""

    function: Literal["mean", "sum", "max", "min"]

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        y: Value = g.op(self.function, inputs[0])
        return y if y.type.shape else reshape(g, y, (1,))


@component("combine")
class Combine(Component):
    """Two or more inputs element by element, from the left; a shape that is the suffix of the other is repeated.

    mul of a spectrum [2, bins] with a mask [bins] masks it; add makes a residual connection.
    """

    ARITY: ClassVar[tuple[int, int]] = (2, 64)

    function: Literal["add", "sub", "mul", "div", "minimum", "maximum"]

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        total, *rest = inputs
        for value in rest:
            total = g.op(self.function, total, value)
        return total


@component("concat")
class Concat(Component):
    """Inputs one after the other along an axis, the last one where it is not given."""

    ARITY: ClassVar[tuple[int, int]] = (2, 64)

    axis: Count | None = None

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        axis = len(inputs[0].type.shape) - 1 if self.axis is None else self.axis
        if axis < 0:
            expect_rank("concat", inputs[0], 1)
        return concat(g, list(inputs), axis)


@component("split")
class Split(Component):
    """Pieces of the last axis; outputs are named by their place: NAME.0, NAME.1, ..."""

    sizes: _Sizes

    def outputs(self) -> tuple[str, ...]:
        return tuple(str(i) for i in range(len(self.sizes)))

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        (x,) = inputs
        if not x.type.shape or sum(self.sizes) != x.type.shape[-1]:
            raise GraphError("split: sizes", wanted=f"a sum of {x.type.shape[-1:]}", found=list(self.sizes))
        axis, pieces, start = len(x.type.shape) - 1, {}, 0
        for name, size in zip(self.outputs(), self.sizes, strict=True):
            pieces[name] = g.op("slice", x, axis=axis, start=start, stop=start + size)
            start += size
        return pieces


@component("slice")
class Slice(Component):
    """Elements [start, stop) of an axis, the last one where it is not given."""

    start: Count
    stop: Size
    axis: Count | None = None

    @model_validator(mode="after")
    def _takes_something(self) -> Slice:
        if self.start >= self.stop:
            raise ValueError(f"wanted start < stop, found {self.start}, {self.stop}")
        return self

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        axis = len(x.type.shape) - 1 if self.axis is None else self.axis
        return g.op("slice", x, axis=axis, start=self.start, stop=self.stop)  # type: ignore[no-any-return]


@component("reshape")
class Reshape(Component):
    """The same elements in the same order in another shape."""

    shape: _Sizes

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return reshape(g, inputs[0], self.shape)


@component("transpose")
class Transpose(Component):
    """Axes in another order, as NumPy's."""

    axes: Annotated[tuple[Count, ...], Field(min_length=1)]

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        return g.op("transpose", inputs[0], axes=self.axes)  # type: ignore[no-any-return]


@component("flatten")
class Flatten(Component):
    """A vector of all elements. order: time, frame after frame as they lie; channels, channel after channel."""

    order: Literal["time", "channels"] = "time"

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Value:
        (x,) = inputs
        if self.order == "channels":
            expect_rank("flatten by channels", x, 2)
            x = g.op("transpose", x, axes=(1, 0))
        return reshape(g, x, (x.type.size,))
