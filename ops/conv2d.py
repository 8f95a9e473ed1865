"""Convolution over two axes, such as time and frequency, with the channels last.

A word of the payload holds several small numbers (`_packed`): a phase has nine words and this operator more sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numba import njit

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import DType, Type, f32
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter, present
from wpk.ops.scalars import ACTIVATION_MEANING
from wpk.ops.simd import ACTIVATIONS, activate_in_place

MOST = 127  # of a stride or of what is padded in front
MOST_SIZE = (1 << 15) - 1  # of taps and of what comes out, along an axis
CHANNELS_AT_ONCE = 64  # output channels: what a GPU's thread has scratch for


class _Steps:
    """Words of four bytes: the strides of both axes, from 1 on, then what is padded in front of each."""

    def __contains__(self, word: int, /) -> bool:
        stride_t, stride_f, pad_t, pad_f = (word >> at & 0xFF for at in (0, 8, 16, 24))
        return word > 0 and min(stride_t, stride_f) >= 1 and max(stride_t, stride_f, pad_t, pad_f) <= MOST


class Convolution2d(Operator):
    """Base: what the two forms share. The filter's axes are the last two, or the first two of one that is packed."""

    stride: tuple[int, ...]
    pad_before: tuple[int, ...]
    pad_after: tuple[int, ...]
    groups: int
    activation: str

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.activation not in ACTIVATIONS:
            raise GraphError(f"{self.name}: activation", wanted=" | ".join(ACTIVATIONS), found=self.activation)
        steps = (self.stride, self.pad_before, self.pad_after)
        if any(len(each) != 2 for each in steps) or min(self.stride) < 1 or min(*self.pad_before, *self.pad_after) < 0:
            wanted = "two numbers each, strides >= 1, padding >= 0"
            raise GraphError(f"{self.name}: stride and padding", wanted=wanted, found=self)
        if max(*self.stride, *self.pad_before) > MOST:
            raise GraphError(f"{self.name}: stride and padding", wanted=f"at most {MOST}", found=self)
        c, n, inner = dims["c"], dims["n"], dims["i"]
        if self.groups < 1 or c % self.groups or n % self.groups or c // self.groups != inner:
            wanted = f"groups that divide {c} and {n} channels, and weights of {c} / groups"
            raise GraphError(f"{self.name}: groups", wanted=wanted, found=f"{self.groups} groups, weights of {inner}")
        sizes = [
            (dims[axis] + before + after - dims[taps]) // step + 1
            for axis, taps, before, after, step in zip(
                "tf", "ab", self.pad_before, self.pad_after, self.stride, strict=True
            )
        ]
        if min(sizes) < 1 or max(*sizes, dims["a"], dims["b"]) > MOST_SIZE:
            wanted = f"1 to {MOST_SIZE} results along each axis"
            raise GraphError(f"{self.name}: sizes", wanted=wanted, found=f"{sizes} for {dims.like('x')}")
        return (f32(*sizes, n),)

    def convolved(self, x: Array, by_tap: Array, bias: Array | float, start: Array | int) -> Array:
        """by_tap [a, b, i, n]."""
        taps = by_tap.shape[:2]
        kept = np.where(np.arange(len(x))[:, None, None] < start, 0.0, x)
        padded = np.pad(kept, (*zip(self.pad_before, self.pad_after, strict=True), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=(0, 1))
        windows = windows[:: self.stride[0], :: self.stride[1]]
        grouped = windows.reshape(*windows.shape[:2], self.groups, -1, *taps)
        filters = by_tap.reshape(*by_tap.shape[:3], self.groups, -1)
        y = np.einsum("tfgiab,abign->tfgn", grouped, filters)
        return ACTIVATION_MEANING[self.activation](y.reshape(*y.shape[:2], -1) + bias)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        per_result = types[1].size // y.shape[-1]
        weights = sum(t.bytes for t in types[1:3])
        return Cost({"f32": 2 * y.size * per_result}, weight_bytes=weights, activation_bytes=types[0].bytes + y.bytes)


@operator("conv2d", version=1)
class Conv2d(Convolution2d):
    """Cross-correlation over two axes: y[t, f, n] = act(sum W[n, i, a, b] x[t s0 + a - p0, f s1 + b - p1, i] + b[n]).

    x [t, f, c] f32, zeros outside; weight [n, c / groups, a, b] (PyTorch's order), bias [n]; y [t', f', n]. stride,
    pad_before, pad_after: a number for each of the two axes, t' = (t + before + after - a) // stride + 1. groups:
    as PyTorch's, c of them is one filter a channel (depthwise). start, i32 scalar: rows of x before that one are read
    as zeros, whatever they hold: what is before the beginning of a stream is padding. Filters of one tap are `linear`.
    """

    x = operand("t f c", weight=False)
    weight = operand("n i a b", weight=True)
    bias = operand("n", weight=True, optional=True)
    start = operand("", dtypes=DType.I32, weight=False, optional=True)
    stride: tuple[int, ...] = attr((1, 1))
    pad_before: tuple[int, ...] = attr((0, 0))
    pad_after: tuple[int, ...] = attr((0, 0))
    groups: int = attr(1)
    activation: str = attr("none")

    def meaning(self, x: Array, weight: Array, bias: Array | float = 0.0, start: Array | int = 0) -> Array:
        return self.convolved(x, weight.transpose(2, 3, 1, 0), bias, start)

    def expand(self, g: GraphBuilder, x: Value, weight: Value, *rest: Value) -> Value:
        by_tap = g.op("transpose", weight, axes=(2, 3, 1, 0))
        rest = rest or (g.op("full", shape=weight.type.shape[:1], value=0.0),)
        return g.op(
            "conv2d_window", x, by_tap, *rest, stride=self.stride, pad_before=self.pad_before,
            pad_after=self.pad_after, groups=self.groups, activation=self.activation,
        )  # fmt: skip


@operator("conv2d_window", version=1)
class Conv2dWindow(Convolution2d):
    """`conv2d` with its weight by tap: x [t, f, c], weight [a, b, c / groups, n], bias [n], start i32 -> [t', f', n].

    Sums start from the bias and run over the taps in order, and at each tap over the channels that are read. Parts
    are the points (t', f').
    """

    x = operand("t f c", weight=False)
    weight = operand("a b i n", weight=True)
    bias = operand("n", weight=True)
    start = operand("", dtypes=DType.I32, weight=False, optional=True)
    stride: tuple[int, ...] = attr((1, 1))
    pad_before: tuple[int, ...] = attr((0, 0))
    pad_after: tuple[int, ...] = attr((0, 0))
    groups: int = attr(1)
    activation: str = attr("none")
    # Windows are clipped to x: with other strides or another padding they are but other windows.
    semantic_parameters: ClassVar = {7: _Steps(), 8: range(len(ACTIVATIONS))}

    def meaning(self, x: Array, weight: Array, bias: Array, start: Array | int = 0) -> Array:
        return self.convolved(x, weight, bias, start)

    def parts(self, *types: Type) -> int:
        t, f, _ = self.infer(types)[0].shape
        return t * f

    def places(self, count: int) -> tuple[int, ...]:
        return (*range(count), 4)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        y, (a, b, _, n) = self.infer(types)[0], types[1].shape
        steps = _packed(self.stride[0], self.stride[1], 8) | _packed(self.pad_before[0], self.pad_before[1], 8) << 16
        made = _packed(y.shape[0], y.shape[1], 16)
        return (*types[0].shape, n, self.groups, _packed(a, b, 16), made, steps, ACTIVATIONS[self.activation])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, f, c, n, groups, taps, made = parameters[:7]
        (a, b), (rows, columns) = _unpacked(taps), _unpacked(made)
        return (4 * t * f * c, 4 * a * b * (c // max(groups, 1)) * n, 4 * n, 4, 4 * rows * columns * n)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        _, _, c, n, groups, taps, made = parameters[:7]
        return first_broken(
            *common(cls, parameters, present, words=9),
            ("groups to divide the channels", c % max(groups, 1) == 0 and n % max(groups, 1) == 0),
            ("taps along both axes", min(_unpacked(taps)) >= 1),
            ("results along both axes", min(_unpacked(made)) >= 1),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, DType.F32, DType.F32, DType.I32, DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        n = parameters[3]
        return Extent(4 * n * lo, 4 * n * (hi - lo))


@body(Conv2dWindow)
def conv2d_window_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    t, f, c = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    n, groups, taps = parameter(record, 3), parameter(record, 4), parameter(record, 5)
    a, b, columns = taps & 0xFFFF, taps >> 16, parameter(record, 6) >> 16
    steps, activation = parameter(record, 7), parameter(record, 8)
    step_t, step_f, pad_t, pad_f = steps & 0xFF, steps >> 8 & 0xFF, steps >> 16 & 0xFF, steps >> 24 & 0xFF
    read, made = c // groups, n // groups  # channels of a group
    depthwise = read == 1 and made == 1
    blocks = 1 if depthwise else groups  # a depthwise filter reads the channels that it makes: all groups together
    width = n // blocks
    weight, bias = address(record, arenas, 1, 0), address(record, arenas, 2, 0)
    for slot in range(slot_lo, slot_hi):
        x, y = address(record, arenas, 0, slot), address(record, arenas, 4, slot)
        first = np.int64(0)
        if present(record, 3):
            first = min(max(np.int64(operand_i32(record, arenas, 3, slot, 1)[0]), np.int64(0)), t)
        for point in range(part_lo, part_hi):
            line = point // columns
            top, left = line * step_t - pad_t, (point - line * columns) * step_f - pad_f
            a_lo, a_hi = max(np.int64(0), first - top), min(a, t - top)
            b_lo, b_hi = max(0, -left), min(b, f - left)
            for block in range(blocks):
                for channel in range(block * width, (block + 1) * width, CHANNELS_AT_ONCE):
                    count = min(CHANNELS_AT_ONCE, (block + 1) * width - channel)
                    total, offset = view_f32(scratch, count), view_f32(bias + 4 * channel, count)
                    for j in range(count):
                        total[j] = offset[j]
                    for row in range(a_lo, a_hi):
                        for column in range(b_lo, b_hi):
                            source = x + 4 * ((top + row) * f + left + column) * c
                            filters = weight + 4 * ((row * b + column) * read * n + channel)
                            if depthwise:
                                _add_products(scratch, source + 4 * channel, filters, count)
                            else:
                                values = view_f32(source + 4 * block * read, read)
                                for k in range(read):
                                    _add_scaled(scratch, values[k], filters + 4 * k * n, count)
                    if activation != 0:
                        activate_in_place(scratch, count, activation)
                    out = view_f32(y + 4 * (point * n + channel), count)
                    for j in range(count):
                        out[j] = total[j]


@njit
def _add_products(target, a, b, size):
    """target += a b, element by element, at byte addresses."""
    total, x, factor = view_f32(target, size), view_f32(a, size), view_f32(b, size)
    for j in range(size):
        total[j] += x[j] * factor[j]


@njit
def _add_scaled(target, x, b, size):
    """target += x b at byte addresses, x being one number."""
    total, factor = view_f32(target, size), view_f32(b, size)
    for j in range(size):
        total[j] += x * factor[j]


def _packed(first: int, second: int, bits: int) -> int:
    return first | second << bits


def _unpacked(word: int) -> tuple[int, int]:
    """The two sizes of a word; 0 and below where there are none."""
    return word & 0xFFFF, word >> 16
