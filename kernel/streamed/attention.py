"""Attention of one query over a range of cache rows: a warp a group of heads, online softmax, tensor cores.

A stage holds 8 rows of the cache, keys and values of all groups, as boxes of 64 columns: [box][2 groups][8 rows][64]
in 128-byte swizzle by row. Warp g takes keys g and values g. Scores are [heads of the group, 8 rows]; their weights
are at once the right operand of values^T x weights^T, so nothing moves between lanes but the row maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import address, device, is_live, parameter, parameter_f32  # noqa: F401
from wpk.kernel.layout import CACHE_ROWS
from wpk.kernel.streamed.ring import (
    await_stage,
    cache_range,
    empty_barrier,
    full_barrier,
    left_at,
    next_place,
    ring_end,
    stage_after,
    stage_bytes,
    turn_of,
)

i32, i64, f32 = np.int32, np.int64, np.float32
LOG2E = 1.4426950408889634
VERY_LOW = -1.0e30
MOST_WIDTH = 128  # of a head
STEPS = TILES = MOST_WIDTH // 16
QUERIES, SUMS = 2 * STEPS, 4 * TILES  # registers


def make_consume() -> Any:
    """The device function that computes a task's parts of `attention_parts`."""

    @device
    def consume(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, base, ring):
        heads, groups, width = i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2))
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        shared_by = ptx.quotient(heads, groups)  # query heads of a group
        item, start, size, ending = i32(ring), next_place(ring, base), stage_bytes(ring), ring_end(record, base)
        works = warp < groups
        head = i32(lane >> i32(2))  # of the group: this lane's row of the scores
        pair = i32((lane & i32(3)) * i32(2))
        counts = works and head < shared_by
        row, matrix = i32(lane & i32(7)), i32(lane >> i32(3))
        box = i32(i32(2) * groups * i32(CACHE_ROWS * 128))
        queries = cuda.local.array(QUERIES, types.int32)
        sums = cuda.local.array(SUMS, types.float32)
        for slot in range(slot_lo, slot_hi):
            if not is_live(live, slot):
                continue
            for part in range(part_lo, part_hi):
                first, end, used = cache_range(record, slot, i64(part))
                place = address(record, arenas, 0, slot)
                own = place + 2 * i64((warp * shared_by + head) * width + pair)
                for s in range(STEPS):
                    held = counts and i32(16 * s) < width
                    at = own + 32 * s if held else place
                    low, high = ptx.load_l2_32(at), ptx.load_l2_32(at + 16)
                    queries[2 * s] = low if held else i32(0)
                    queries[2 * s + 1] = high if held else i32(0)
                peak, total = f32(VERY_LOW), f32(0.0)
                for i in range(SUMS):
                    sums[i] = f32(0.0)
                for group in range(first, end):
                    await_stage(base, full_barrier(item), turn_of(item))
                    if works:
                        keys = i32(start + (warp * i32(CACHE_ROWS) + row) * i32(128))
                        s0, s1, s2, s3 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
                        for s in range(0, STEPS, 2):  # 32 columns: four 8 x 8 tiles
                            if i32(16 * s) < width:
                                column = i32(i32(2 * s) + matrix)  # pieces of 8 columns
                                at = i32(keys + (column >> i32(3)) * box + (((column & i32(7)) ^ row) << i32(4)))
                                k0, k1, k2, k3 = ptx.matrix_load_4(at)
                                s0, s1, s2, s3 = ptx.multiply_16x8x16(
                                    queries[2 * s], i32(0), queries[2 * s + 1], i32(0), k0, k1, s0, s1, s2, s3
                                )
                                s0, s1, s2, s3 = ptx.multiply_16x8x16(
                                    queries[2 * s + 2], i32(0), queries[2 * s + 3], i32(0), k2, k3, s0, s1, s2, s3
                                )
                        # Scores of rows pair and pair + 1 of this stage, in units of log2.
                        s0, s1 = s0 * f32(LOG2E), s1 * f32(LOG2E)
                        at_row = i64(group) * CACHE_ROWS + i64(pair)
                        in_low, in_high = at_row < used, at_row + 1 < used
                        s0 = s0 if in_low else f32(VERY_LOW)
                        s1 = s1 if in_high else f32(VERY_LOW)
                        top = ptx.maximum(s0, s1)
                        top = ptx.maximum(top, ptx.shuffle_xor(top, i32(1)))
                        top = ptx.maximum(top, ptx.shuffle_xor(top, i32(2)))
                        top = ptx.maximum(top, peak)
                        decay = ptx.exp2(peak - top)
                        peak = top
                        w0 = ptx.exp2(s0 - top) if in_low else f32(0.0)
                        w1 = ptx.exp2(s1 - top) if in_high else f32(0.0)
                        total = total * decay + (w0 + w1)
                        weights = ptx.pack_bf16(w0, w1)
                        # The sums' columns are heads: bring each head's decay to the lanes that have it.
                        even = ptx.shuffle(decay, i32(pair * i32(4)))
                        odd = ptx.shuffle(decay, i32(pair * i32(4) + i32(4)))
                        values = i32(start + ((groups + warp) * i32(CACHE_ROWS) + row) * i32(128))
                        for t in range(0, TILES, 2):
                            if i32(16 * t) < width:
                                column = i32(i32(2 * t) + matrix)
                                at = i32(values + (column >> i32(3)) * box + (((column & i32(7)) ^ row) << i32(4)))
                                v0, v1, v2, v3 = ptx.matrix_load_4_transposed(at)
                                o = 4 * t
                                a, b, c, d = ptx.multiply_16x8x8(
                                    v0, v1, weights, sums[o] * even, sums[o + 1] * odd, sums[o + 2] * even,
                                    sums[o + 3] * odd,
                                )  # fmt: skip
                                sums[o], sums[o + 1], sums[o + 2], sums[o + 3] = a, b, c, d
                                o = 4 * t + 4
                                a, b, c, d = ptx.multiply_16x8x8(
                                    v2, v3, weights, sums[o] * even, sums[o + 1] * odd, sums[o + 2] * even,
                                    sums[o + 3] * odd,
                                )  # fmt: skip
                                sums[o], sums[o + 1], sums[o + 2], sums[o + 3] = a, b, c, d
                    ptx.warp_barrier()
                    if lane == 0:
                        ptx.mbarrier_arrive(i32(base + empty_barrier(item)))
                    item = i32(item + i32(1))
                    start = stage_after(start, size, ending, base)
                total += ptx.shuffle_xor(total, i32(1))
                total += ptx.shuffle_xor(total, i32(2))
                pitch = i64(width + i32(2)) * 4
                out = address(record, arenas, 3, slot) + i64(part) * i64(heads) * pitch
                out += i64(warp * shared_by) * pitch
                if counts and pair == 0:
                    # Peaks are handed on in units of the natural logarithm.
                    ptx.store_1(out + i64(head) * pitch + 4 * i64(width), peak * f32(0.6931471805599453))
                    ptx.store_1(out + i64(head) * pitch + 4 * i64(width) + 4, total)
                if works:
                    for t in range(TILES):
                        if i32(16 * t) < width:
                            for e in range(4):
                                column = i32(i32(16 * t + 8 * (e // 2)) + (lane >> i32(2)))
                                to = i32(pair + i32(e % 2))
                                if to < shared_by:
                                    ptx.store_1(out + i64(to) * pitch + 4 * i64(column), sums[4 * t + e])
        return left_at(ring, item, start, base)

    return consume
