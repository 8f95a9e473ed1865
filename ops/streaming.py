"""What streams need: overlap-add, depthwise convolution over a window, rings, caches, attention over a cache.

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
from wpk.ops import math32
from wpk.ops.memory import view_f32, view_i32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, operand_i32, parameter, parameter_f32
from wpk.ops.scalars import ACTIVATION_MEANING
from wpk.ops.simd import ACTIVATIONS, activate_in_place
from wpk.ops.vector import CHUNK, dot, move

WORDS = frozenset({DType.F32, DType.I32, DType.BOOL})  # dtypes of four bytes
BLOCK = 64  # columns of a part
SCRATCH = 65536  # bytes that a body is given
ATTENTION_ROWS = 32  # cache rows whose scores are normalised together
ATTENTION_HEADS = SCRATCH // 4 // (ATTENTION_ROWS + 2)  # query heads whose scores scratch has room for


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


@operator("attention", version=1)
class Attention(Operator):
    """One query over rows 0..position of a cache: y[h] = sum_t softmax_t(scale q[h] . k[t, g]) v[t, g].

    q [h, d], k [T, g, d], v [T, g, e] f32, position i32 scalar -> [h, e]; h is a multiple of g, and query head i reads
    head i // (h / g) (grouped-query attention, Ainslie et al. 2023; g = h is plain multi-head). Positions are
    clipped to [0, T). The softmax is the online one (Milakov & Gimelshein 2018), 32 rows at a time from row 0.
    """

    q = operand("h d", weight=False)
    k = operand("t g d", weight=False)
    v = operand("t g e", weight=False)
    position = operand("", dtypes=DType.I32)
    scale: float = attr()
    state_operands: ClassVar[tuple[int, ...]] = (1, 2)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["h"] % dims["g"]:
            raise GraphError("attention: query heads", wanted=f"a multiple of {dims['g']}", found=dims["h"])
        if dims["h"] > ATTENTION_HEADS:
            raise GraphError("attention: query heads", wanted=f"at most {ATTENTION_HEADS}", found=dims["h"])
        return (f32(dims["h"], dims["e"]),)

    def meaning(self, q: Array, k: Array, v: Array, position: Array) -> Array:
        rows = int(np.clip(position, 0, len(k) - 1)) + 1
        group = q.shape[0] // k.shape[1]
        keys, values = (np.repeat(cache[:rows], group, axis=1) for cache in (k, v))
        scores = np.einsum("hd,thd->th", q, keys) * self.scale
        weights = np.exp(scores - scores.max(0))
        return np.asarray(np.einsum("th,the->he", weights / weights.sum(0), values))

    def cost(self, *types: Type) -> Cost:
        q, k, v = types[:3]
        flops = 2 * k.shape[0] * q.shape[0] * (k.shape[2] + v.shape[2])
        activations = q.bytes + 4 * q.shape[0] * v.shape[2]
        return Cost({"f32": flops}, state_bytes=k.bytes + v.bytes, activation_bytes=activations)

    def parts(self, *types: Type) -> int:
        return types[1].shape[1]

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        (h, d), (t, g, _), e = types[0].shape, types[1].shape, types[2].shape[2]
        return (h, d, t, g, e, float(self.scale))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        h, d, t, g, e = parameters[:5]
        return (4 * h * d, 4 * t * g * d, 4 * t * g * e, 4, 4 * h * e)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        h, _, _, g, e = parameters[:5]
        per_part = 4 * (h // g) * e
        return Extent(lo * per_part, (hi - lo) * per_part)


@body(Attention)
def attention_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    h, d, t = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    g, e, scale = parameter(record, 3), parameter(record, 4), parameter_f32(record, 5)
    group = h // g
    heads = (part_hi - part_lo) * group
    scores = view_f32(scratch, heads * ATTENTION_ROWS)
    peaks = view_f32(scratch + 4 * heads * ATTENTION_ROWS, heads)
    totals = view_f32(scratch + 4 * heads * (ATTENTION_ROWS + 1), heads)
    for slot in range(slot_lo, slot_hi):
        q, y = address(record, arenas, 0, slot), address(record, arenas, 4, slot) + 4 * part_lo * group * e
        k, v = address(record, arenas, 1, slot), address(record, arenas, 2, slot)
        rows = min(max(np.int64(operand_i32(record, arenas, 3, slot, 1)[0]), 0), t - 1) + 1
        for head in range(heads):
            peaks[head], totals[head] = np.float32(-3.4e38), np.float32(0.0)
        out = view_f32(y, heads * e)
        for j in range(heads * e):
            out[j] = np.float32(0.0)
        for first in range(0, rows, ATTENTION_ROWS):
            count = min(ATTENTION_ROWS, rows - first)
            for row in range(count):  # all heads at each row: the cache is read once, in order
                for part in range(part_lo, part_hi):
                    key = k + 4 * ((first + row) * g + part) * d
                    for head in range(part * group, (part + 1) * group):
                        at = (head - part_lo * group) * ATTENTION_ROWS + row
                        scores[at] = dot(q + 4 * head * d, key, d) * scale
            for head in range(heads):
                mine, peak = scores[head * ATTENTION_ROWS : head * ATTENTION_ROWS + count], peaks[head]
                for row in range(count):
                    peak = max(peak, mine[row])
                for row in range(count):
                    mine[row] = math32.exp(mine[row] - peak)
                decay = math32.exp(peaks[head] - peak)
                total = totals[head] * decay
                for row in range(count):
                    total += mine[row]
                peaks[head], totals[head] = peak, total
                _scale(y + 4 * head * e, e, decay)
            for row in range(count):
                for part in range(part_hi - part_lo):
                    value = view_f32(v + 4 * ((first + row) * g + part_lo + part) * e, e)
                    for head in range(part * group, (part + 1) * group):
                        weight, sums = scores[head * ATTENTION_ROWS + row], view_f32(y + 4 * head * e, e)
                        for j in range(e):
                            sums[j] += weight * value[j]
        for head in range(heads):
            _scale(y + 4 * head * e, e, np.float32(1.0) / totals[head])


@njit
def _scale(values, size, factor):
    """Multiply `size` float32 at a byte address."""
    out = view_f32(values, size)
    for i in range(size):
        out[i] *= factor


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
