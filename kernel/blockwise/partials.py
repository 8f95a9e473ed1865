"""The small operators between streamed ones: norms and merges of what parts have left, a warp or two a unit.

They have the signature of `wpk.ops.blockwise`. What other blocks wrote is read past the first cache, loads of a unit
are issued together before any is used: these phases are nothing but latency.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import address, device, parameter, parameter_f32, shared_base
from wpk.kernel.layout import REDUCTION, THREADS, WARPS

i32, i64, f32 = np.int32, np.int64, np.float32
SPAN = 128  # elements of a sum of squares, four a lane
AT_ONCE = 2  # units whose loads a warp has under way: all that it has with 56 sessions
PARTIALS = 4  # partial sums of a unit whose loads are under way
HELD, SUMS = 4 * AT_ONCE, 4 * PARTIALS * AT_ONCE
PIECES = 5  # of four elements that a thread of `gated_rms_norm` keeps: groups of up to 64 * 4 * PIECES elements
KEPT = 4 * PIECES
COLUMNS = 4  # of a head that a lane of `attention_merge` has: heads of up to 128
VALUES, TERMS = PARTIALS * COLUMNS, 2 * PARTIALS
BF16_OUT = 1
LOG2E = 1.4426950408889634


@device
def warp_sum(x):
    for o in (16, 8, 4, 2, 1):
        x += ptx.shuffle_xor(x, i32(o))
    return x


@device
def better(value, index, other_value, other_index):
    """Whether another candidate wins: the larger, of equal ones that of the lower index; NaN never."""
    return other_value > value or (other_value == value and other_index < index)


@device
def rms_norm_terms(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    """A warp a span of 128 elements: the residual plus the partial sums, weighted bf16, the sum of squares."""
    size, count, offset = parameter(record, 0), parameter(record, 1), parameter_f32(record, 2)
    thread = i64(ptx.thread_index())
    warp, lane = thread >> 5, thread & 31
    spans = part_hi - part_lo
    units = (slot_hi - slot_lo) * spans
    x = cuda.local.array(HELD, types.float32)
    w = cuda.local.array(HELD, types.float32)
    sums = cuda.local.array(SUMS, types.float32)
    place = cuda.local.array(AT_ONCE, types.int64)  # of the row in bytes from the operand of slot_lo
    weight = address(record, arenas, 1, i64(0))
    for first in range(warp, units, WARPS * AT_ONCE):
        for j in range(AT_ONCE):
            unit = min(first + j * WARPS, units - 1)
            row = i64(ptx.quotient(i32(unit), i32(spans)))
            slot, span = slot_lo + row, part_lo + unit - row * spans
            at = 4 * min(span * SPAN + 4 * lane, size - 4)
            place[j] = at
            a, b, c, d = ptx.load_l2_4(address(record, arenas, 0, slot) + at)
            x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3] = a, b, c, d
            a, b, c, d = ptx.load_constant_4(weight + at)
            w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3] = a, b, c, d
        for q in range(0, count, PARTIALS):
            # All loads first: each waits as long as all of them.
            for j in range(AT_ONCE):
                unit = min(first + j * WARPS, units - 1)
                partial = address(record, arenas, 2, slot_lo + i64(ptx.quotient(i32(unit), i32(spans)))) + place[j]
                for k in range(PARTIALS):
                    at = partial + 4 * min(q + k, count - 1) * size
                    a, b, c, d = ptx.load_l2_4(at)
                    o = 4 * (PARTIALS * j + k)
                    sums[o], sums[o + 1], sums[o + 2], sums[o + 3] = a, b, c, d
            for k in range(PARTIALS):
                if q + k < count:
                    for j in range(AT_ONCE):
                        o = 4 * (PARTIALS * j + k)
                        x[4 * j] += sums[o]
                        x[4 * j + 1] += sums[o + 1]
                        x[4 * j + 2] += sums[o + 2]
                        x[4 * j + 3] += sums[o + 3]
        for j in range(AT_ONCE):
            unit = first + j * WARPS
            if unit < units:
                row = i64(ptx.quotient(i32(unit), i32(spans)))
                slot, span = slot_lo + row, part_lo + unit - row * spans
                a, b, c, d = x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]
                inside = span * SPAN + 4 * lane < size
                square = (a * a + b * b) + (c * c + d * d) if inside else f32(0.0)
                total = warp_sum(square)
                if inside:
                    ptx.store_4(address(record, arenas, 3, slot) + place[j], a, b, c, d)
                    u, v = (w[4 * j] + offset) * a, (w[4 * j + 1] + offset) * b
                    y, z = (w[4 * j + 2] + offset) * c, (w[4 * j + 3] + offset) * d
                    scaled = address(record, arenas, 4, slot) + (place[j] >> 1)
                    ptx.store_2x32(scaled, ptx.pack_bf16(u, v), ptx.pack_bf16(y, z))
                if lane == 0:
                    ptx.store_1(address(record, arenas, 5, slot) + 4 * span, total)


@device
def gated_rms_norm(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    """Two warps a group of channels, which keep its values in registers."""
    size, groups, epsilon, out = (
        parameter(record, 0), parameter(record, 1), parameter_f32(record, 2), parameter(record, 3),
    )  # fmt: skip
    width = i64(ptx.quotient(i32(size), i32(groups)))
    base = shared_base()
    thread = i64(ptx.thread_index())
    warp, team = thread >> 5, thread >> 6
    member = thread & 63
    spans = part_hi - part_lo
    units = (slot_hi - slot_lo) * spans
    weight = address(record, arenas, 2, i64(0))
    v = cuda.local.array(KEPT, types.float32)
    w = cuda.local.array(KEPT, types.float32)
    for first in range(0, units, WARPS // 2):
        unit = min(first + team, units - 1)
        row = i64(ptx.quotient(i32(unit), i32(spans)))
        slot, group = slot_lo + row, part_lo + unit - row * spans
        start = 4 * group * width
        y, gate = address(record, arenas, 0, slot) + start, address(record, arenas, 1, slot) + start
        for j in range(PIECES):
            at = 4 * min(4 * (member + 64 * j), width - 4)
            a, b, c, d = ptx.load_l2_4(y + at)
            v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3] = a, b, c, d
        for j in range(PIECES):
            at = 4 * min(4 * (member + 64 * j), width - 4)
            a, b, c, d = ptx.load_l2_4(gate + at)
            v[4 * j] *= a
            v[4 * j + 1] *= b
            v[4 * j + 2] *= c
            v[4 * j + 3] *= d
            a, b, c, d = ptx.load_constant_4(weight + start + at)
            w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3] = a, b, c, d
        square = f32(0.0)
        for j in range(PIECES):
            if 4 * (member + 64 * j) < width:
                square += (v[4 * j] * v[4 * j] + v[4 * j + 1] * v[4 * j + 1]) + (
                    v[4 * j + 2] * v[4 * j + 2] + v[4 * j + 3] * v[4 * j + 3]
                )
        square = warp_sum(square)
        if thread & 31 == 0:
            ptx.shared_store(i32(base + i32(REDUCTION) + i32(warp) * i32(4)), square)
        ptx.barrier_named(i32(2 + team), i32(64))
        halves = i32(base + i32(REDUCTION) + i32(team) * i32(8))
        square = ptx.shared_load(halves) + ptx.shared_load(i32(halves + i32(4)))
        factor = ptx.inverse_root(square / f32(width) + epsilon)
        if first + team < units:
            place = address(record, arenas, 3, slot)
            for j in range(PIECES):
                at = 4 * (member + 64 * j)
                if at < width:
                    a, b = v[4 * j] * factor * w[4 * j], v[4 * j + 1] * factor * w[4 * j + 1]
                    c, d = v[4 * j + 2] * factor * w[4 * j + 2], v[4 * j + 3] * factor * w[4 * j + 3]
                    if out == BF16_OUT:
                        ptx.store_2x32(place + (start >> 1) + 2 * at, ptx.pack_bf16(a, b), ptx.pack_bf16(c, d))
                    else:
                        ptx.store_4(place + start + 4 * at, a, b, c, d)
        ptx.barrier_named(i32(2 + team), i32(64))


@device
def attention_merge(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    """A warp a head: the parts weighted by their peaks, divided by the total."""
    heads, width, splits, out = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    thread = i64(ptx.thread_index())
    warp, lane = thread >> 5, thread & 31
    spans = part_hi - part_lo
    pitch = 4 * (width + 2)
    step = heads * pitch
    values = cuda.local.array(VALUES, types.float32)
    terms = cuda.local.array(TERMS, types.float32)
    sums = cuda.local.array(COLUMNS, types.float32)
    for unit in range(warp, (slot_hi - slot_lo) * spans, WARPS):
        row = i64(ptx.quotient(i32(unit), i32(spans)))
        slot, head = slot_lo + row, part_lo + unit - row * spans
        parts = address(record, arenas, 0, slot) + head * pitch
        place = address(record, arenas, 1, slot)
        peak, total = f32(-3.0e38), f32(0.0)
        for e in range(COLUMNS):
            sums[e] = f32(0.0)
        for first in range(0, splits, PARTIALS):
            for k in range(PARTIALS):
                part = parts + min(first + k, splits - 1) * step
                terms[2 * k], terms[2 * k + 1] = ptx.load_l2(part + 4 * width), ptx.load_l2(part + 4 * width + 4)
                for e in range(COLUMNS):
                    values[COLUMNS * k + e] = ptx.load_l2(part + 4 * min(lane + 32 * e, width - 1))
            for k in range(PARTIALS):
                if first + k < splits:
                    top = ptx.maximum(peak, terms[2 * k])
                    old, new = ptx.exp2((peak - top) * f32(LOG2E)), ptx.exp2((terms[2 * k] - top) * f32(LOG2E))
                    total = total * old + terms[2 * k + 1] * new
                    for e in range(COLUMNS):
                        sums[e] = sums[e] * old + values[COLUMNS * k + e] * new
                    peak = top
        for e in range(COLUMNS):
            column = lane + 32 * e
            if column < width:
                value = sums[e] / total
                if out == BF16_OUT:
                    ptx.store_u16(place + 2 * (head * width + column), ptx.pack_bf16(value, f32(0.0)))
                else:
                    ptx.store_1(place + 4 * (head * width + column), value)


@device
def argmax_merge(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    """The whole block a session: the largest candidate, the lowest index where values tie."""
    count = parameter(record, 0)
    base = shared_base()
    thread = i32(ptx.thread_index())
    warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
    for slot in range(slot_lo, slot_hi):
        candidates = address(record, arenas, 0, slot)
        value, index = f32(-3.4e38), i32(2147483647)
        for first in range(0, count, THREADS):
            at = candidates + 8 * min(first + i64(thread), count - 1)
            v, i = ptx.load_l2(at), ptx.load_l2_32(at + 4)
            if better(value, index, v, i):
                value, index = v, i
        for o in (16, 8, 4, 2, 1):
            v, i = ptx.shuffle_xor(value, i32(o)), ptx.shuffle_xor_32(index, i32(o))
            if better(value, index, v, i):
                value, index = v, i
        if lane == 0:
            ptx.shared_store_2(i32(base + i32(REDUCTION) + warp * i32(8)), value, ptx.float_of_bits(index))
        ptx.barrier()
        if thread == 0:
            for other in range(1, WARPS):
                at = i32(base + i32(REDUCTION) + i32(8 * other))
                v, i = ptx.shared_load(at), ptx.shared_load_32(i32(at + i32(4)))
                if better(value, index, v, i):
                    value, index = v, i
            ptx.store_32(address(record, arenas, 1, slot), index)
        ptx.barrier()
