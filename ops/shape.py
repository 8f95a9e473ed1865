"""Layout: views, copies, padding and pooling. What is moved are 32-bit words, whatever they mean.

Two bf16 are a word: those of a session are moved where they begin and end with one. Weights move in any way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import ANY, DType, Type, f32
from wpk.ops.elementwise import CHUNK, Unary
from wpk.ops.legal import POSITIVE, DTypes, common, first_broken, is_permutation, moved
from wpk.ops.math32 import INT
from wpk.ops.operator import LIBRARY, Array, Body, Cost, Dims, Operator, attr, body, operand, operator
from wpk.ops.payload import operand_f32, operand_i32, parameter
from wpk.ops.scalars import maximum, scalar
from wpk.ops.words import unary_word_body

WORDS = ANY - {DType.BF16}
CONCAT_LIMIT = 6


def words_of(name: str, elements: int, dtype: DType) -> int:
    """How many words so many elements are; `GraphError` where they are not whole ones."""
    words, rest = divmod(elements * dtype.bytes, 4)
    if rest:
        raise GraphError(f"{name}: a word is cut", wanted=f"an even number of {dtype.value} elements", found=elements)
    return words


def axis_of(name: str, axis: int, type: Type) -> int:
    """The axis counted from the front; negative ones count from the back."""
    rank = len(type.shape)
    if not -rank <= axis < rank:
        raise GraphError(f"{name}: axis", wanted=f"{-rank} <= axis < {rank} for {type}", found=axis)
    return axis % rank


class Layout(Operator):
    """Base: no arithmetic, only moves."""

    layout_only = True

    def cost(self, *types: Type) -> Cost:
        return Cost({}, activation_bytes=sum(t.bytes for t in (*types, *self.infer(types))))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, range(len(given) - 1))


@operator("reshape", version=1)
class Reshape(Layout):
    """The same elements in the same order under another shape. Any dtype. A view: nothing is executed."""

    x = operand("...", dtypes=ANY)
    shape: tuple[int, ...] = attr()

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        if not isinstance(self.shape, tuple) or math.prod(self.shape) != x.size:
            raise GraphError("reshape: shape", wanted=f"a shape of {x.size} elements for {x}", found=self.shape)
        return (Type(x.dtype, self.shape),)

    def meaning(self, x: Array) -> Array:
        return np.reshape(x, self.shape)

    def cost(self, *types: Type) -> Cost:
        return Cost({})

    def view(self, *types: Type) -> int | None:
        return 0


@operator("slice", version=1)
class Slice(Layout):
    """x[start:stop] along one axis. Any dtype. A view where all axes before it have size 1."""

    x = operand("...", dtypes=ANY)
    axis: int = attr()
    start: int = attr()
    stop: int = attr()
    semantic_parameters: ClassVar = {2: range(1 << 31)}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        axis = axis_of("slice", self.axis, x)
        if not 0 <= self.start < self.stop <= x.shape[axis]:
            wanted = f"0 <= start < stop <= {x.shape[axis]} for axis {axis} of {x}"
            raise GraphError("slice: bounds", wanted=wanted, found=f"{self.start}, {self.stop}")
        return (Type(x.dtype, (*x.shape[:axis], self.stop - self.start, *x.shape[axis + 1 :])),)

    def meaning(self, x: Array) -> Array:
        return np.moveaxis(np.moveaxis(x, self.axis, 0)[self.start : self.stop], 0, self.axis)

    def view(self, *types: Type) -> int | None:
        outer, _, start, _ = self._elements(types[0])
        offset = types[0].dtype.bytes * start
        return offset if outer == 1 and offset % 4 == 0 else None

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """outer, words of a source row, first word taken of it, words taken."""
        outer, *elements = self._elements(types[0])
        return (outer, *(words_of("slice", e, types[0].dtype) for e in elements))

    def _elements(self, x: Type) -> tuple[int, int, int, int]:
        axis = axis_of("slice", self.axis, x)
        inner = math.prod(x.shape[axis + 1 :])
        taken = (self.stop - self.start) * inner
        return (math.prod(x.shape[:axis]), x.shape[axis] * inner, self.start * inner, taken)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        outer, row, start, taken = parameters[:4]
        if not 0 <= start <= row - taken:
            raise GraphError("slice: words taken of a row", wanted=f"within {row}", found=f"{start}:{start + taken}")
        return (4 * outer * row, 4 * outer * taken)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        _, row, start, taken = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=4),
            ("words taken of a row", 1 <= taken <= row - start),
        )


@body(Slice)
def slice_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    outer, row, start, taken = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    for slot in range(slot_lo, slot_hi):
        x = operand_i32(record, arenas, 0, slot, outer * row)
        y = operand_i32(record, arenas, 1, slot, outer * taken)
        for o in range(outer):
            for i in range(taken):
                y[o * taken + i] = x[o * row + start + i]


@operator("concat", version=1)
class Concat(Layout):
    """Two to six operands of one dtype, any, one after the other along an axis; their other sizes agree."""

    x = operand("...", dtypes=ANY, variadic=True)
    axis: int = attr()

    def results(self, dims: Dims) -> tuple[Type, ...]:
        types = list(dims.types.values())
        if not 2 <= len(types) <= CONCAT_LIMIT:
            raise GraphError("concat: wrong number of operands", wanted=f"2 to {CONCAT_LIMIT}", found=len(types))
        first = types[0]
        axis = axis_of("concat", self.axis, first)
        for t in types[1:]:
            wanted = Type(first.dtype, (*first.shape[:axis], *t.shape[axis : axis + 1], *first.shape[axis + 1 :]))
            if t != wanted or len(t.shape) != len(first.shape):
                raise GraphError(f"concat: operands differ outside axis {axis}", wanted=f"like {first}", found=t)
        total = sum(t.shape[axis] for t in types)
        return (Type(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :])),)

    def meaning(self, *x: Array) -> Array:
        return np.concatenate(x, axis=self.axis)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """outer, number of operands, words of a row of each."""
        outer = math.prod(types[0].shape[: axis_of("concat", self.axis, types[0])])
        return (outer, len(types), *(words_of("concat", t.size // outer, t.dtype) for t in types))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        outer, count = parameters[:2]
        widths = parameters[2 : 2 + count]
        return (*(4 * outer * w for w in widths), 4 * outer * sum(widths))

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        count = parameters[1]
        return first_broken(
            *common(cls, parameters, present, words=2 + count, operands=count + 1, optional=()),
            ("two operands or more, up to six", 2 <= count <= CONCAT_LIMIT),
        )


@body(Concat)
def concat_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    outer, count = parameter(record, 0), parameter(record, 1)
    row = 0
    for k in range(count):
        row += parameter(record, 2 + k)
    for slot in range(slot_lo, slot_hi):
        y = operand_i32(record, arenas, count, slot, outer * row)
        start = 0
        for k in range(count):
            width = parameter(record, 2 + k)
            x = operand_i32(record, arenas, k, slot, outer * width)
            for o in range(outer):
                for i in range(width):
                    y[o * row + start + i] = x[o * width + i]
            start += width


def collapse(shape: Sequence[int], axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Result sizes and source strides (in elements) of a transpose, with axes that move together joined."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in ((shape[a], strides[a]) for a in axes if shape[a] != 1):
        if steps and steps[-1] == size * step:
            sizes[-1], steps[-1] = sizes[-1] * size, step
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps


@operator("transpose", version=1)
class Transpose(Layout):
    """y.shape[i] = x.shape[axes[i]]; NumPy's order. f32, i32 or bool; up to four groups of axes that move apart."""

    x = operand("...", dtypes=WORDS)
    axes: tuple[int, ...] = attr()

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        if not isinstance(self.axes, tuple) or sorted(self.axes) != list(range(len(x.shape))):
            wanted = f"a permutation of 0..{len(x.shape) - 1} for {x}"
            raise GraphError("transpose: axes", wanted=wanted, found=self.axes)
        if len(collapse(x.shape, self.axes)[0]) > 4:
            raise GraphError("transpose: too many axes that move apart", wanted="<= 4", found=f"{x}, {self.axes}")
        return (Type(x.dtype, tuple(x.shape[a] for a in self.axes)),)

    def meaning(self, x: Array) -> Array:
        return np.transpose(x, self.axes)

    def view(self, *types: Type) -> int | None:
        return 0 if len(collapse(types[0].shape, self.axes)[0]) <= 1 else None

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Four result sizes, then the four source strides, in elements."""
        sizes, steps = collapse(types[0].shape, self.axes)
        fill = 4 - len(sizes)
        return (*[1] * fill, *sizes, *[0] * fill, *steps)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (4 * math.prod(parameters[:4]),) * 2

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        dense = is_permutation(parameters[:4], parameters[4:8])
        return first_broken(*common(cls, parameters, present, words=8, sizes=4), ("strides of a transpose", dense))


@body(Transpose)
def transpose_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    d0, d1, d2, d3 = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    s0, s1, s2, s3 = parameter(record, 4), parameter(record, 5), parameter(record, 6), parameter(record, 7)
    n = d0 * d1 * d2 * d3
    for slot in range(slot_lo, slot_hi):
        x, y = operand_i32(record, arenas, 0, slot, n), operand_i32(record, arenas, 1, slot, n)
        at = 0
        for i in range(d0):
            for j in range(d1):
                for k in range(d2):
                    source = i * s0 + j * s1 + k * s2
                    for m in range(d3):
                        y[at + m] = x[source + m * s3]
                    at += d3


PAD_MODES = {"zeros": 0, "edge": 1, "reflect": 2}


@operator("pad", version=1)
class Pad(Layout):
    """`before` and `after` rows around x along the leading axis. x [t, ...] f32, i32 or bool; y [before+t+after, ...].

    mode zeros; edge repeats the outermost row; reflect mirrors without repeating it (as numpy.pad and torch's pad),
    so that it needs more rows than it adds.
    """

    x = operand("...", dtypes=WORDS)
    before: int = attr(0)
    after: int = attr(0)
    mode: str = attr("zeros")
    semantic_parameters: ClassVar = {4: range(3)}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        x = dims.like("x")
        if not x.shape:
            raise GraphError("pad: operand 'x' has the wrong rank", wanted="[t, ...]", found=x)
        if self.mode not in PAD_MODES:
            raise GraphError("pad: mode", wanted=" | ".join(PAD_MODES), found=self.mode)
        most = x.shape[0] - 1 if self.mode == "reflect" else max(self.before, self.after)
        if not (0 <= self.before <= most and 0 <= self.after <= most):
            limit = f"0 <= rows <= {most}" if self.mode == "reflect" else "rows >= 0"
            raise GraphError("pad: rows", wanted=f"{limit} for {x}", found=f"{self.before}, {self.after}")
        return (Type(x.dtype, (self.before + x.shape[0] + self.after, *x.shape[1:])),)

    def meaning(self, x: Array) -> Array:
        mode = {"zeros": "constant", "edge": "edge", "reflect": "reflect"}[self.mode]
        return np.pad(x, ((self.before, self.after), *[(0, 0)] * (x.ndim - 1)), mode=mode)  # type: ignore[call-overload]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        t = types[0].shape[0]
        return (t, types[0].size // t, self.before, self.after, PAD_MODES[self.mode])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, inner, before, after = parameters[:4]
        return (4 * t * inner, 4 * (before + t + after) * inner)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        t, _, before, after, mode = parameters[:5]
        return first_broken(
            *common(cls, parameters, present, words=5, sizes=2),
            ("before, after >= 0", min(before, after) >= 0),
            ("more rows than are mirrored", mode != PAD_MODES["reflect"] or max(before, after) < t),
        )


@body(Pad)
def pad_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    t, inner, before, after = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    mode = parameter(record, 4)
    rows = before + t + after
    for slot in range(slot_lo, slot_hi):
        x, y = operand_i32(record, arenas, 0, slot, t * inner), operand_i32(record, arenas, 1, slot, rows * inner)
        for row in range(rows):
            source = row - before
            if mode == 2:
                source = -source if source < 0 else source
                source = 2 * (t - 1) - source if source >= t else source
            if mode == 1:
                source = min(max(source, 0), t - 1)
            inside = 0 <= source < t
            for i in range(inner):
                y[row * inner + i] = x[source * inner + i] if inside else INT(0)


@operator("copy", version=1)
class Copy(Unary):
    """The same value in storage of its own. Any dtype."""

    x = operand("...", dtypes=ANY)
    inplace: ClassVar = {}

    def meaning(self, x: Array) -> Array:
        return x

    def cost(self, *types: Type) -> Cost:
        return Cost({}, activation_bytes=2 * types[0].bytes)

    def parts(self, *types: Type) -> int:
        return -(-types[0].bytes // (4 * CHUNK))

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (words_of("copy", types[0].size, types[0].dtype),)

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0,))


@scalar
def same(x, unused):
    return x


LIBRARY.add_body(Copy, Body(unary_word_body(same), frozenset({"cpu"})))


@operator("max_pool1d", version=1)
class MaxPool1d(Operator):
    """y[t] = max of x[t*stride : t*stride + window] per channel, no padding. x [t, c] f32; y [frames, c].

    frames = (t - window) // stride + 1, as PyTorch's MaxPool1d; time is the leading axis here.
    """

    x = operand("t c")
    window: int = attr()
    stride: int = attr(1)
    semantic_parameters: ClassVar = {2: POSITIVE, 3: POSITIVE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.window < 1 or self.stride < 1:
            raise GraphError("max_pool1d: window and stride", wanted=">= 1", found=f"{self.window}, {self.stride}")
        if dims["t"] < self.window:
            wanted = f">= {self.window}"
            raise GraphError("max_pool1d: fewer frames than the window", wanted=wanted, found=dims.like("x"))
        return (f32((dims["t"] - self.window) // self.stride + 1, dims["c"]),)

    def meaning(self, x: Array) -> Array:
        windows = np.lib.stride_tricks.sliding_window_view(x, self.window, axis=0)[:: self.stride]
        return windows.max(axis=-1)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({"f32": y.size * self.window}, activation_bytes=types[0].bytes + y.bytes)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*types[0].shape, self.window, self.stride)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, c, window, stride = parameters[:4]
        return (4 * t * c, 4 * ((t - window) // stride + 1) * c)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        window = ("as many frames as the window", parameters[2] <= parameters[0])
        return first_broken(*common(cls, parameters, present, words=4), window)


@body(MaxPool1d)
def max_pool1d_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    t, c, window, stride = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    frames = (t - window) // stride + 1
    for slot in range(slot_lo, slot_hi):
        x, y = operand_f32(record, arenas, 0, slot, t * c), operand_f32(record, arenas, 1, slot, frames * c)
        for frame in range(frames):
            source, target = frame * stride * c, frame * c
            for i in range(c):
                y[target + i] = x[source + i]
            for w in range(1, window):
                for i in range(c):
                    y[target + i] = maximum(y[target + i], x[source + w * c + i])
