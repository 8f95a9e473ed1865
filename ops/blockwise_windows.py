"""Bodies for a GPU target of operators that move, add or convolve rows: a thread a result, neighbours side by side.

As in `wpk.ops.blockwise`; every result is computed as the CPU's body does, so that the bits are the same.
"""

from __future__ import annotations

import math

import numpy as np

from wpk.ops import math32
from wpk.ops.blockwise import activate, copy_words, divided, is_live, thread_count, thread_index, wait
from wpk.ops.codebooks import COLUMNS, EmbeddingSum
from wpk.ops.conv2d import Conv2dWindow
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_i32
from wpk.ops.operator import body
from wpk.ops.overlap import BLOCK as SAMPLES
from wpk.ops.overlap import OverlapAddFrames
from wpk.ops.payload import address, operand_f32, operand_i32, parameter, parameter_f32, present
from wpk.ops.rope import Rope, _within_a_turn
from wpk.ops.spectral import Magnitude
from wpk.ops.streaming import BLOCK, CacheAppend, DepthwiseWindow, RingShift

LEAST_COLUMNS = 32  # of a ring whose columns threads move; narrower ones are moved as one run of memory


@body(CacheAppend, targets=("cuda",))
def cache_append_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    rows, size = parameter(record, 0), parameter(record, 1)
    for slot in range(slot_lo, slot_hi):
        position = np.int64(operand_i32(record, arenas, 2, slot, 1)[0])
        if is_live(live, slot) and 0 <= position < rows:
            copy_words(address(record, arenas, 3, slot) + 4 * position * size, address(record, arenas, 1, slot), size)


@body(RingShift, targets=("cuda",))
def ring_shift_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    n, k, row = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    kept = max(0, n - k)
    new = n - kept  # rows taken from those that came, the last ones
    lo, hi = part_lo * BLOCK, min(part_hi * BLOCK, row)
    columns = hi - lo
    if kept == 0 or columns >= LEAST_COLUMNS or columns < row:
        # A thread a column, or an element where none is kept: what one moves no other reads.
        deep = 1 if kept == 0 else n
        wide = divided(n, deep) * columns
        for unit in range(thread_index(), (slot_hi - slot_lo) * wide, thread_count()):
            turn = divided(unit, wide)
            at = unit - turn * wide
            first = divided(at, columns)
            column, slot = lo + at - first * columns, slot_lo + turn
            if is_live(live, slot):
                ring, rows = (
                    operand_i32(record, arenas, 0, slot, n * row),
                    operand_i32(record, arenas, 1, slot, k * row),
                )
                out = operand_i32(record, arenas, 2, slot, n * row)
                for i in range(first, min(first + deep, kept), 4):
                    # Four at a time, read before they are written: what is read lies behind.
                    a, b = ring[(i + k) * row + column], ring[min(i + 1 + k, n - 1) * row + column]
                    c = ring[min(i + 2 + k, n - 1) * row + column]
                    d = ring[min(i + 3 + k, n - 1) * row + column]
                    out[i * row + column] = a
                    if i + 1 < kept:
                        out[(i + 1) * row + column] = b
                    if i + 2 < kept:
                        out[(i + 2) * row + column] = c
                    if i + 3 < kept:
                        out[(i + 3) * row + column] = d
                for i in range(max(first, kept), first + deep):
                    out[i * row + column] = rows[(k - n + i) * row + column]
    else:
        for slot in range(slot_lo, slot_hi):
            ring, rows = address(record, arenas, 0, slot), address(record, arenas, 1, slot) + 4 * (k - new) * row
            out = address(record, arenas, 2, slot)
            old, target = view_i32(ring + 4 * k * row, kept * row), view_i32(out, kept * row)
            alive = is_live(live, slot)
            for first in range(0, kept * row, thread_count()):  # all threads together: they wait for each other
                at = first + thread_index()
                word = old[min(at, kept * row - 1)]
                wait()
                if alive and at < kept * row:
                    target[at] = word
            wait()
            if alive:
                copy_words(out + 4 * kept * row, rows, new * row)


@body(DepthwiseWindow, targets=("cuda",))
def depthwise_window_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    c, taps, frames = parameter(record, 1), parameter(record, 2), parameter(record, 3)
    stride, dilation, activation = parameter(record, 4), parameter(record, 5), parameter(record, 6)
    weight, bias = view_f32(address(record, arenas, 1, 0), taps * c), view_f32(address(record, arenas, 2, 0), c)
    t = parameter(record, 0)
    lo, hi = part_lo * BLOCK, min(part_hi * BLOCK, c)
    columns = hi - lo
    for unit in range(thread_index(), (slot_hi - slot_lo) * frames * columns, thread_count()):
        row = divided(unit, columns)
        turn = divided(row, frames)
        column, frame, slot = lo + unit - row * columns, row - turn * frames, slot_lo + turn
        if is_live(live, slot):
            x = operand_f32(record, arenas, 0, slot, t * c)
            total = bias[column]
            for tap in range(taps):
                total += x[(frame * stride + tap * dilation) * c + column] * weight[tap * c + column]
            operand_f32(record, arenas, 3, slot, frames * c)[frame * c + column] = activate(total, activation)


@body(EmbeddingSum, targets=("cuda",))
def embedding_sum_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    v, d, k, first = parameter(record, 1), parameter(record, 2), parameter(record, 3), parameter(record, 4)
    table, start = address(record, arenas, 1, 0), part_lo * COLUMNS
    count = min(part_hi * COLUMNS, d) - start
    for unit in range(thread_index(), (slot_hi - slot_lo) * count, thread_count()):
        turn = divided(unit, count)
        column, slot = start + unit - turn * count, slot_lo + turn
        if is_live(live, slot):
            index, total = operand_i32(record, arenas, 0, slot, k), F(0.0)
            for j in range(k):
                row = np.int64(index[j])
                if 0 <= row < v:
                    total += view_f32(table + 4 * (((first + j) * v + row) * d + column), 1)[0]
            operand_f32(record, arenas, 2, slot, d)[column] = total


@body(OverlapAddFrames, targets=("cuda",))
def overlap_add_frames_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    t, n, hop, trim = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    samples, start = (t - 1) * hop + n - 2 * trim, part_lo * SAMPLES
    count = min(part_hi * SAMPLES, samples) - start
    for unit in range(thread_index(), (slot_hi - slot_lo) * count, thread_count()):
        turn = divided(unit, count)
        sample, slot = start + unit - turn * count, slot_lo + turn
        if is_live(live, slot):
            x, total = operand_f32(record, arenas, 0, slot, t * n), F(0.0)
            at = sample + trim  # in the sum of all frames
            for frame in range(divided(max(0, at - n + hop), hop), min(t - 1, divided(at, hop)) + 1):
                total += x[frame * n + at - frame * hop]
            operand_f32(record, arenas, 1, slot, samples)[sample] = total


@body(Conv2dWindow, targets=("cuda",))
def conv2d_window_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    t, f, c = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    n, groups, taps = parameter(record, 3), parameter(record, 4), parameter(record, 5)
    a, b, columns = taps & 0xFFFF, taps >> 16, parameter(record, 6) >> 16
    steps, activation = parameter(record, 7), parameter(record, 8)
    step_t, step_f, pad_t, pad_f = steps & 0xFF, steps >> 8 & 0xFF, steps >> 16 & 0xFF, steps >> 24 & 0xFF
    read, made = divided(c, groups), divided(n, groups)  # channels of a group
    weight, bias = address(record, arenas, 1, 0), view_f32(address(record, arenas, 2, 0), n)
    points = part_hi - part_lo
    for unit in range(thread_index(), (slot_hi - slot_lo) * points * n, thread_count()):
        at = divided(unit, n)
        turn = divided(at, points)
        channel, point, slot = unit - at * n, part_lo + at - turn * points, slot_lo + turn
        if is_live(live, slot):
            first = np.int64(0)
            if present(record, 3):
                first = min(max(np.int64(operand_i32(record, arenas, 3, slot, 1)[0]), np.int64(0)), t)
            line = divided(point, columns)
            top, left = line * step_t - pad_t, (point - line * columns) * step_f - pad_f
            a_lo, a_hi = max(np.int64(0), first - top), min(a, t - top)
            b_lo, b_hi = max(0, -left), min(b, f - left)
            source = address(record, arenas, 0, slot) + 4 * divided(channel, made) * read
            total = bias[channel]
            for row in range(a_lo, a_hi):
                for column in range(b_lo, b_hi):
                    x = view_f32(source + 4 * ((top + row) * f + left + column) * c, read)
                    filters = view_f32(weight + 4 * ((row * b + column) * read * n + channel), read * n)
                    for k in range(read):
                        total += x[k] * filters[k * n]
            y = view_f32(address(record, arenas, 4, slot) + 4 * (point * n + channel), 1)
            y[0] = activate(total, activation)


@body(Rope, targets=("cuda",))
def rope_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    d, offset = parameter(record, 1), parameter(record, 2)
    ratio = np.float64(parameter_f32(record, 3)) + np.float64(parameter_f32(record, 4))
    half, heads = d >> 1, part_hi - part_lo
    for unit in range(thread_index(), (slot_hi - slot_lo) * heads * half, thread_count()):
        at = divided(unit, half)
        turn = divided(at, heads)
        i, head, slot = unit - at * half, part_lo + at - turn * heads, slot_lo + turn
        if is_live(live, slot):
            x = view_f32(address(record, arenas, 0, slot) + 4 * head * d, d)
            y = view_f32(address(record, arenas, 2, slot) + 4 * head * d, d)
            a, b = x[i], x[half + i]
            position = np.float64(np.int64(operand_i32(record, arenas, 1, slot, 1)[0]) + offset)
            frequency = np.float64(1.0)
            for _ in range(i):
                frequency *= ratio
            angle = _within_a_turn(position * frequency)
            cosine, sine = math32.cos(angle), math32.sin(angle)
            y[i] = a * cosine - b * sine
            y[half + i] = b * cosine + a * sine


@body(Magnitude, targets=("cuda",))
def magnitude_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    frames, bins, power = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    eps, taken = parameter_f32(record, 3), part_hi - part_lo
    for unit in range(thread_index(), (slot_hi - slot_lo) * taken * bins, thread_count()):
        at = divided(unit, bins)
        turn = divided(at, taken)
        k, frame, slot = unit - at * bins, part_lo + at - turn * taken, slot_lo + turn
        if is_live(live, slot):
            x = operand_f32(record, arenas, 0, slot, 2 * frames * bins)
            re, im = x[2 * frame * bins + k], x[(2 * frame + 1) * bins + k]
            total = re * re + im * im + eps
            if power == 1:
                total = F(math.sqrt(total))
            operand_f32(record, arenas, 1, slot, frames * bins)[frame * bins + k] = total
