"""Convolutions whose filters are one channel wide: all that a few results of a thread need is loaded at once.

A result is summed up as the CPU's body does it, tap after tap from the bias, so that the bits are the same. Filters of
more taps, strides over time and wider channels are left to `wpk.ops.blockwise_windows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.blockwise.elementwise import picked
from wpk.kernel.cuda_library import activate_code, address, device, is_live, parameter, present, rebind
from wpk.kernel.layout import THREADS, Shape
from wpk.ops.blockwise_windows import conv2d_window_block, depthwise_window_block
from wpk.ops.streaming import BLOCK

i32, i64, f32 = np.int32, np.int64, np.float32
TAPS = 9  # of a filter
FRAMES = 8  # of a column that a thread has
REACH = FRAMES + TAPS - 1


def make_depthwise_window(shape: Shape) -> Any:
    any_sizes = device(rebind(depthwise_window_block))

    @device
    def convolve(record, slot_lo, slot_hi, part_lo, part_hi, live):
        rows, columns, taps = i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2))
        frames, activation = i32(parameter(record, 3)), parameter(record, 6)
        lo = i32(i32(part_lo) * i32(BLOCK))
        own = i32(min(i32(i32(part_hi) * i32(BLOCK)), columns) - lo)
        runs = ptx.quotient(i32(frames + i32(FRAMES - 1)), i32(FRAMES))
        x = cuda.local.array(REACH, types.float32)
        w = cuda.local.array(TAPS, types.float32)
        totals = cuda.local.array(FRAMES, types.float32)
        units = i32(i32(i32(slot_hi - slot_lo) * runs) * own)
        unit = i32(ptx.thread_index())
        while unit < units:
            line = ptx.quotient(unit, own)
            turn = ptx.quotient(line, runs)
            column, slot = i64(i32(lo + i32(unit - line * own))), slot_lo + i64(turn)
            frame = i32(i32(line - turn * runs) * i32(FRAMES))
            source = address(record, 0, 0, slot) + 4 * column
            for i in range(REACH):
                at = min(i32(frame + i32(i)), i32(rows - i32(1)))
                x[i] = ptx.load_l2(ptx.advanced(at, i32(i32(4) * columns), source))
            filters = address(record, 0, 1, i64(0)) + 4 * column
            for tap in range(TAPS):
                at = min(i32(tap), i32(taps - i32(1)))
                w[tap] = ptx.load_constant_f32(ptx.advanced(at, i32(i32(4) * columns), filters))
            bias = ptx.load_constant_f32(address(record, 0, 2, i64(0)) + 4 * column)
            out = address(record, 0, 3, slot) + 4 * column
            for i in range(FRAMES):
                totals[i] = bias
                for tap in range(TAPS):
                    if i32(tap) < taps:
                        totals[i] += x[i + tap] * w[tap]
            for i in range(ptx.renewed_32(i32(FRAMES))):  # one copy of the activations
                here = i32(frame + i32(i))
                if here < frames and is_live(live, slot):
                    low = picked(i, totals[0], totals[1], totals[2], totals[3])
                    high = picked(i - FRAMES // 2, totals[4], totals[5], totals[6], totals[7])
                    total = high if i >= FRAMES // 2 else low
                    ptx.store_1(ptx.advanced(here, i32(i32(4) * columns), out), activate_code(activation, total))
            unit = i32(unit + i32(THREADS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if parameter(record, 2) <= TAPS and parameter(record, 4) == 1 and parameter(record, 5) == 1:
            convolve(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            any_sizes(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body


def make_conv2d_window(shape: Shape) -> Any:
    any_sizes = device(rebind(conv2d_window_block))

    @device
    def convolve(record, slot_lo, slot_hi, part_lo, part_hi, live):
        rows, width, channels = i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2))
        n, groups, taps = i32(parameter(record, 3)), i32(parameter(record, 4)), i32(parameter(record, 5))
        high, wide = i32(taps & i32(0xFFFF)), i32(taps >> i32(16))
        columns, steps = i32(i32(parameter(record, 6)) >> i32(16)), i32(parameter(record, 7))
        step_t, step_f = i32(steps & i32(0xFF)), i32(i32(steps >> i32(8)) & i32(0xFF))
        pad_t, pad_f = i32(i32(steps >> i32(16)) & i32(0xFF)), i32(i32(steps >> i32(24)) & i32(0xFF))
        activation, made = parameter(record, 8), ptx.quotient(n, groups)
        points = i32(part_hi - part_lo)
        x = cuda.local.array(TAPS, types.float32)
        w = cuda.local.array(TAPS, types.float32)
        units = i32(i32(i32(slot_hi - slot_lo) * points) * n)
        unit = i32(ptx.thread_index())
        while unit < units:
            at = ptx.quotient(unit, n)
            turn = ptx.quotient(at, points)
            channel, slot = i32(unit - at * n), slot_lo + i64(turn)
            point = i32(i32(part_lo) + i32(at - turn * points))
            first = i32(0)
            if present(record, 3):
                first = ptx.load_l2_32(address(record, 0, 3, slot))
            line = ptx.quotient(point, columns)
            top, left = i32(line * step_t - pad_t), i32(i32(point - line * columns) * step_f - pad_f)
            source = address(record, 0, 0, slot) + 4 * i64(ptx.quotient(channel, made))
            inside = i32(0)  # a bit a tap
            for tap in range(TAPS):
                row = ptx.quotient(i32(tap), wide)
                column = i32(i32(tap) - row * wide)
                x[tap], w[tap] = f32(0.0), f32(0.0)
                if row < high:
                    w[tap] = ptx.load_constant_f32(address(record, 0, 1, i64(0)) + 4 * i64(i32(i32(tap) * n + channel)))
                    row, column = i32(top + row), i32(left + column)
                    if row >= max(first, i32(0)) and row < rows and column >= 0 and column < width:
                        x[tap] = ptx.load_l2(ptx.advanced(i32(row * width + column), i32(i32(4) * channels), source))
                        inside = i32(inside | i32(1 << tap))
            total = ptx.load_constant_f32(address(record, 0, 2, i64(0)) + 4 * i64(channel))
            for tap in range(TAPS):
                if i32(inside & i32(1 << tap)) != 0:
                    total += x[tap] * w[tap]
            if is_live(live, slot):
                y = address(record, 0, 4, slot) + 4 * (i64(point) * i64(n) + i64(channel))
                ptx.store_1(y, activate_code(activation, total))
            unit = i32(unit + i32(THREADS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        taps = parameter(record, 5)
        if (taps & 0xFFFF) * (taps >> 16) <= TAPS and parameter(record, 2) == parameter(record, 4):
            convolve(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            any_sizes(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body
