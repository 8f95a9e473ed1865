"""What streams need: overlap-add, depthwise convolution over a window, rings, caches.

Bodies that may run in place go through scratch: memory that overlaps keeps LLVM from vectorising a direct loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numba import njit

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import DType, Type, f32
from wpk.ops.legal import POSITIVE, DTypes, common, first_broken, moved
from wpk.ops.memory import view_f32, view_i32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, operand_i32, parameter
from wpk.ops.scalars import ACTIVATION_MEANING
from wpk.ops.simd import ACTIVATIONS, activate_in_place
from wpk.ops.vector import CHUNK, move

WORDS = frozenset({DType.F32, DType.I32, DType.BOOL})  # dtypes of four bytes
BLOCK = 64  # columns of a part


@operator("overlap_add", version=1)
class OverlapAdd(Operator):
    """Synthesis by overlapping frames: sum = buffer + frame; out = sum[:hop], new buffer = sum[hop:] and zeros.

    buffer [n], frame [n] f32, 1 <= hop <= n -> (new buffer [n], out [hop]). What comes out is complete.
    """

    buffer = operand("n", weight=False)
    frame = operand("n")
    hop: int = attr()
    result_count: ClassVar[int] = 2
    inplace: ClassVar[Mapping[int, int]] = {0: 0}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if not 1 <= self.hop <= dims["n"]:
            raise GraphError("overlap_add: hop", wanted=f"1 to {dims['n']}", found=self.hop)
        return (f32(dims["n"]), f32(self.hop))

    def meaning(self, buffer: Array, frame: Array) -> tuple[Array, Array]:
        total = buffer + frame
        return np.concatenate([total[self.hop :], np.zeros(self.hop)]), total[: self.hop]

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": types[0].size}, activation_bytes=3 * types[0].bytes + 4 * self.hop)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].size, self.hop)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, hop = parameters[:2]
        return (4 * n, 4 * n, 4 * n, 4 * hop)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=2), ("hop <= n", parameters[1] <= parameters[0]))


@body(OverlapAdd)
def overlap_add_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, hop = parameter(record, 0), parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        buffer, frame = address(record, arenas, 0, slot), address(record, arenas, 1, slot)
        following = operand_f32(record, arenas, 2, slot, n)
        _add(address(record, arenas, 3, slot), buffer, frame, hop)
        for first in range(hop, n, CHUNK):  # ascending: a write never meets a later read
            count = min(CHUNK, n - first)
            _add(scratch, buffer + 4 * first, frame + 4 * first, count)
            moved, out = view_f32(scratch, count), view_f32(address(record, arenas, 2, slot) + 4 * (first - hop), count)
            for i in range(count):
                out[i] = moved[i]
        for i in range(n - hop, n):
            following[i] = np.float32(0.0)


@njit
def _add(target, a, b, size):
    """target = a + b at byte addresses."""
    x, y, out = view_f32(a, size), view_f32(b, size), view_f32(target, size)
    for i in range(size):
        out[i] = x[i] + y[i]


@operator("depthwise_conv1d", version=1)
class DepthwiseConv1d(Operator):
    """One filter a channel, no padding: y[t, c] = act(sum_i weight[c, i] x[t stride + i dilation, c] + bias[c]).

    x [t, c] f32, weight [c, taps] (PyTorch's [c, 1, taps] without its middle axis), bias [c]; y [frames, c] with
    frames = (t - (taps - 1) dilation - 1) // stride + 1. A stream's history is concatenated in front by the caller.
    """

    x = operand("t c", weight=False)
    weight = operand("c i", weight=True)
    bias = operand("c", weight=True, optional=True)
    stride: int = attr(1)
    dilation: int = attr(1)
    activation: str = attr("none")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (f32(_frames(self, dims["t"], dims["i"]), dims["c"]),)

    def meaning(self, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        reach = (weight.shape[1] - 1) * self.dilation + 1
        windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=0)[:: self.stride, :, :: self.dilation]
        return ACTIVATION_MEANING[self.activation](np.einsum("tci,ci->tc", windows, weight) + bias)

    def cost(self, *types: Type) -> Cost:
        return _depthwise_cost(self.infer(types)[0], types, types[1].shape[1])

    def expand(self, g: GraphBuilder, x: Value, weight: Value, *bias: Value) -> Value:
        channels = weight.type.shape[0]
        by_time = g.op("transpose", weight, axes=(1, 0))
        offset = bias[0] if bias else g.op("full", shape=(channels,), value=0.0)
        return g.op(
            "depthwise_window", x, by_time, offset,
            stride=self.stride, dilation=self.dilation, activation=self.activation,
        )  # fmt: skip


@operator("depthwise_window", version=1)
class DepthwiseWindow(Operator):
    """`depthwise_conv1d` with its weight by time: x [t, c], weight [taps, c], bias [c] -> [frames, c].

    Sums start from the bias and run over the taps in order.
    """

    x = operand("t c", weight=False)
    weight = operand("i c", weight=True)
    bias = operand("c", weight=True)
    stride: int = attr(1)
    dilation: int = attr(1)
    activation: str = attr("none")
    semantic_parameters: ClassVar = {4: POSITIVE, 5: POSITIVE, 6: range(len(ACTIVATIONS))}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (f32(_frames(self, dims["t"], dims["i"]), dims["c"]),)

    def meaning(self, x: Array, weight: Array, bias: Array) -> Array:
        reach = (weight.shape[0] - 1) * self.dilation + 1
        windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=0)[:: self.stride, :, :: self.dilation]
        return ACTIVATION_MEANING[self.activation](np.einsum("tci,ic->tc", windows, weight) + bias)

    def cost(self, *types: Type) -> Cost:
        return _depthwise_cost(self.infer(types)[0], types, types[1].shape[0])

    def parts(self, *types: Type) -> int:
        return -(-types[0].shape[1] // BLOCK)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        (t, c), taps = types[0].shape, types[1].shape[0]
        frames = _frames(self, t, taps)
        return (t, c, taps, frames, self.stride, self.dilation, ACTIVATIONS[self.activation])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, c, taps, frames = parameters[:4]
        return (4 * t * c, 4 * taps * c, 4 * c, 4 * frames * c)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        t, _, taps, frames, stride, dilation = parameters[:6]
        fit = (t - (taps - 1) * dilation - 1) // max(stride, 1) + 1
        return first_broken(*common(cls, parameters, present, words=7), ("frames that the filter fits", frames == fit))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        _, c, _, frames = parameters[:4]
        return Extent.columns(c, BLOCK, lo, hi, rows=frames)


@body(DepthwiseWindow)
def depthwise_window_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    c, taps, frames = parameter(record, 1), parameter(record, 2), parameter(record, 3)
    stride, dilation, activation = parameter(record, 4), parameter(record, 5), parameter(record, 6)
    weight, bias = address(record, arenas, 1, 0), address(record, arenas, 2, 0)
    lo, hi = part_lo * BLOCK, min(part_hi * BLOCK, c)
    for slot in range(slot_lo, slot_hi):
        x, y = address(record, arenas, 0, slot), address(record, arenas, 3, slot)
        for frame in range(frames):
            for first in range(lo, hi, CHUNK):
                count = min(CHUNK, hi - first)
                total, offset = view_f32(scratch, count), view_f32(bias + 4 * first, count)
                for j in range(count):
                    total[j] = offset[j]
                for tap in range(taps):
                    row = view_f32(x + 4 * ((frame * stride + tap * dilation) * c + first), count)
                    factor = view_f32(weight + 4 * (tap * c + first), count)
                    for j in range(count):
                        total[j] += row[j] * factor[j]
                if activation != 0:
                    activate_in_place(scratch, count, activation)
                out = view_f32(y + 4 * (frame * c + first), count)
                for j in range(count):
                    out[j] = total[j]


@operator("ring_shift", version=1)
class RingShift(Operator):
    """The last n rows of a ring and the rows that came: ring [n, ...], rows [k, ...] -> [n, ...], oldest first.

    f32, i32 or bool. May run in place of the ring; row i then takes what row i + k held.
    """

    ring = operand("...", dtypes=WORDS, weight=False)
    rows = operand("...", dtypes=WORDS)
    inplace: ClassVar[Mapping[int, int]] = {0: 0}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        ring, rows = dims.like("ring"), dims.like("rows")
        if not ring.shape or not rows.shape or rows != Type(ring.dtype, (rows.shape[0], *ring.shape[1:])):
            wanted = f"{ring.dtype.value}[k,{','.join(map(str, ring.shape[1:]))}]"
            raise GraphError("ring_shift: rows do not fit the ring", wanted=wanted, found=rows)
        return (ring,)

    def meaning(self, ring: Array, rows: Array) -> Array:
        return np.concatenate([ring, rows])[rows.shape[0] :]

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 0}, state_bytes=2 * types[0].bytes, activation_bytes=types[1].bytes)

    def parts(self, *types: Type) -> int:
        return -(-(types[0].size // types[0].shape[0]) // BLOCK)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        n, k = types[0].shape[0], types[1].shape[0]
        return (n, k, types[0].size // n)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, k, row = parameters[:3]
        return (4 * n * row, 4 * k * row, 4 * n * row)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=3))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0, 1))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        n, _, row = parameters[:3]
        return Extent.columns(row, BLOCK, lo, hi, rows=n)


@body(RingShift)
def ring_shift_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, k, row = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    kept = max(0, n - k)
    new = n - kept  # rows taken from those that came, the last ones
    lo, hi = part_lo * BLOCK, min(part_hi * BLOCK, row)
    for slot in range(slot_lo, slot_hi):
        ring, rows = address(record, arenas, 0, slot), address(record, arenas, 1, slot) + 4 * (k - new) * row
        out = address(record, arenas, 2, slot)
        if hi - lo == row:  # whole rows: two runs of memory
            move(out, ring + 4 * k * row, kept * row, scratch)
            move(out + 4 * kept * row, rows, new * row, scratch)
        else:  # parts are columns, so that what one part moves no other part reads
            for i in range(kept):
                move(out + 4 * (i * row + lo), ring + 4 * ((i + k) * row + lo), hi - lo, scratch)
            for i in range(new):
                move(out + 4 * ((kept + i) * row + lo), rows + 4 * (i * row + lo), hi - lo, scratch)


@operator("cache_append", version=1)
class CacheAppend(Operator):
    """cache [T, ...] with row [...] written at the session's position; the result is the cache's own storage.

    f32, i32 or bool; position i32 scalar. A position outside [0, T) writes nothing.
    """

    cache = operand("...", dtypes=WORDS, weight=False)
    row = operand("...", dtypes=WORDS)
    position = operand("", dtypes=DType.I32)
    state_operands: ClassVar[tuple[int, ...]] = (0,)
    alias: ClassVar[Mapping[int, int]] = {0: 0}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        cache, row = dims.like("cache"), dims.like("row")
        if not cache.shape or row != Type(cache.dtype, cache.shape[1:]):
            raise GraphError("cache_append: row", wanted=Type(cache.dtype, cache.shape[1:]), found=row)
        return (cache,)

    def meaning(self, cache: Array, row: Array, position: Array) -> Array:
        appended = np.array(cache)
        if 0 <= position < len(cache):
            appended[int(position)] = row
        return appended

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 0}, state_bytes=types[1].bytes, activation_bytes=types[1].bytes)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[0].shape[0], types[1].size)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        rows, row = parameters[:2]
        return (4 * rows * row, 4 * row, 4, 4 * rows * row)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=2))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return moved(given, (0, 1))


@body(CacheAppend)
def cache_append_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    rows, size = parameter(record, 0), parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        position = np.int64(operand_i32(record, arenas, 2, slot, 1)[0])
        if 0 <= position < rows:
            row = operand_i32(record, arenas, 1, slot, size)
            place = view_i32(address(record, arenas, 3, slot) + 4 * position * size, size)
            for i in range(size):
                place[i] = row[i]


def _frames(op: DepthwiseConv1d | DepthwiseWindow, t: int, taps: int) -> int:
    if op.activation not in ACTIVATIONS:
        raise GraphError(f"{op.name}: activation", wanted=" | ".join(ACTIVATIONS), found=op.activation)
    if op.stride < 1 or op.dilation < 1:
        raise GraphError(f"{op.name}: stride and dilation", wanted=">= 1", found=op)
    reach = (taps - 1) * op.dilation + 1
    if t < reach:
        raise GraphError(f"{op.name}: fewer frames than the filter reaches", wanted=f">= {reach}", found=t)
    return (t - reach) // op.stride + 1


def _depthwise_cost(y: Type, types: Sequence[Type], taps: int) -> Cost:
    weights = sum(t.bytes for t in types[1:])
    return Cost({"f32": 2 * y.size * taps}, weight_bytes=weights, activation_bytes=types[0].bytes + y.bytes)
