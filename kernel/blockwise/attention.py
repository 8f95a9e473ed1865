"""Attention of one query over a cache in f32: a few lanes a head, all warps of the block a share of its rows.

The cache is read once and nothing else takes time, so that what counts is bytes under way: a warp has the keys and
values of ROWS rows of all its heads under way, 16 bytes a load. The block's warps take turns with groups of ROWS rows
from row 0 on, and each keeps sums of its own (Milakov & Gimelshein 2018), which are added in the order of the warps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.blockwise.partials import warp_sum
from wpk.kernel.blockwise.softmax import (
    LOG2E,
    ROWS,
    SUMS,
    SUMS_BYTES,
    VERY_LOW,
    add_up_scores,
    make_merge,
    make_weigh,
)
from wpk.kernel.cuda_library import address, device, is_live, parameter, parameter_f32, shared_base, stride
from wpk.kernel.layout import WARPS, Shape

i32, i64, f32 = np.int32, np.int64, np.float32
PIECES = 3  # of four elements, of a row of a head, that a lane has
HELD = 4 * PIECES  # elements of a lane
BATCH = ROWS * HELD
MOST_WIDTH = 32 * HELD  # of a head: all lanes of a warp
assert 4 * WARPS * MOST_WIDTH <= SUMS_BYTES


def make_attention(shape: Shape) -> Any:
    """The device function of `attention@1`."""
    workspace, merge, weigh = shape.workspace, make_merge(shape), make_weigh(HELD)

    @device
    def aligned(record, slot):
        """Can rows of heads be read 16 bytes at a time?"""
        width, out_width = parameter(record, 1), parameter(record, 4)
        bits = 4 * (width | out_width)
        for operand in range(3):
            bits |= address(record, 0, operand, slot) | stride(record, operand)
        return bits & 15 == 0

    @device
    def attend(record, slot_lo, slot_hi, part_lo, part_hi, live):
        width, out_width = i32(parameter(record, 1)), i32(parameter(record, 4))
        rows, groups = i32(parameter(record, 2)), i32(parameter(record, 3))
        shared_by = ptx.quotient(i32(parameter(record, 0)), groups)  # query heads of a group
        factor = parameter_f32(record, 5) * f32(LOG2E)
        head_lo, head_hi = i32(i32(part_lo) * shared_by), i32(i32(part_hi) * shared_by)
        base, policy = shared_base(), ptx.evict_first()
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        lanes = ptx.quotient(i32(max(width, out_width) + i32(HELD - 1)), i32(HELD))  # of a head
        at_once = ptx.quotient(i32(32), lanes)  # heads of a warp
        place = ptx.quotient(lane, lanes)
        member = i32(lane - place * lanes)
        key_pitch, value_pitch = i32(i32(4) * i32(groups * width)), i32(i32(4) * i32(groups * out_width))
        nothing = ptx.float_of_bits(i32(base >> i32(24)))  # 0, which ptxas cannot know
        query = cuda.local.array(HELD, types.float32)
        sums = cuda.local.array(HELD, types.float32)
        keys = cuda.local.array(BATCH, types.float32)
        values = cuda.local.array(BATCH, types.float32)
        scores = cuda.local.array(ROWS, types.float32)
        key = cuda.local.array(PIECES, types.int64)  # addresses of a lane's pieces of row 0
        value = cuda.local.array(PIECES, types.int64)
        for slot in range(slot_lo, slot_hi):
            if not is_live(live, slot):
                continue
            last = min(max(ptx.load_l2_32(address(record, 0, 3, slot)), i32(0)), i32(rows - i32(1)))
            first = head_lo
            while first < head_hi:
                # Lanes without a head do as the last one does.
                head = min(i32(first + place), i32(head_hi - i32(1)))
                group = i64(ptx.quotient(head, shared_by))
                own = address(record, 0, 0, slot) + 4 * i64(head) * i64(width)
                for m in range(PIECES):
                    column = i32(i32(4) * i32(member + lanes * i32(m)))
                    weight = factor if column < width else f32(0.0)
                    # Lanes beyond a head's end read its end again.
                    at = i64(i32(i32(4) * min(column, i32(width - i32(4)))))
                    a, b, c, d = ptx.load_l2_4(own + at)
                    key[m] = ptx.renewed(address(record, 0, 1, slot) + 4 * group * i64(width) + at)
                    at = i64(i32(i32(4) * min(column, i32(out_width - i32(4)))))
                    value[m] = ptx.renewed(address(record, 0, 2, slot) + 4 * group * i64(out_width) + at)
                    query[4 * m], query[4 * m + 1] = a * weight, b * weight
                    query[4 * m + 2], query[4 * m + 3] = c * weight, d * weight
                for i in range(HELD):
                    sums[i] = f32(0.0)
                peak, total = f32(VERY_LOW), f32(0.0)
                row = i32(warp * i32(ROWS))
                while row <= last:
                    for r in range(ROWS):
                        here = min(i32(row + i32(r)), last)
                        for m in range(PIECES):
                            o = HELD * r + 4 * m
                            a, b, c, d = ptx.load_l2_4_once(ptx.advanced(here, key_pitch, key[m]), policy)
                            keys[o], keys[o + 1], keys[o + 2], keys[o + 3] = a, b, c, d
                    for r in range(ROWS):
                        here = min(i32(row + i32(r)), last)
                        for m in range(PIECES):
                            o = HELD * r + 4 * m
                            a, b, c, d = ptx.load_l2_4_once(ptx.advanced(here, value_pitch, value[m]), policy)
                            values[o], values[o + 1], values[o + 2], values[o + 3] = a, b, c, d
                    # ptxas would wait for keys before it issues the loads of values, if it could begin the sums.
                    ptx.warp_barrier()
                    start = ptx.shuffle(nothing, lane)
                    for r in range(ROWS):
                        score = start
                        for i in range(HELD):
                            score = ptx.fma(query[i], keys[HELD * r + i], score)
                        scores[r] = score
                    add_up_scores(scores, lane, member, lanes)
                    peak, total = weigh(scores, values, sums, peak, total, row, last, i32(place * lanes))
                    row = i32(row + i32(WARPS * ROWS))
                ptx.barrier()  # the workspace is free
                if place < at_once:
                    own_row = i32(warp * at_once + place)
                    if member == 0:
                        ptx.shared_store_2(i32(base + i32(workspace) + own_row * i32(8)), peak, total)
                    for m in range(PIECES):
                        column = i32(i32(4) * i32(member + lanes * i32(m)))
                        if column < out_width:
                            to = i32(base + i32(workspace + SUMS) + i32(own_row * out_width + column) * i32(4))
                            ptx.shared_store_4(to, sums[4 * m], sums[4 * m + 1], sums[4 * m + 2], sums[4 * m + 3])
                ptx.barrier()
                out = address(record, 0, 4, slot) + 4 * i64(first) * i64(out_width)
                merge(out_width, out, min(at_once, i32(head_hi - first)), at_once, base)
                first = i32(first + at_once)

    @device
    def attention(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if aligned(record, slot_lo) and max(parameter(record, 1), parameter(record, 4)) <= MOST_WIDTH:
            attend(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            attend_any(record, slot_lo, slot_hi, part_lo, part_hi, live)

    return attention


@device
def attend_any(record, slot_lo, slot_hi, part_lo, part_hi, live):
    """Heads of any width at any address: a warp a head, row after row, its sums in the result's place."""
    width, out_width = i32(parameter(record, 1)), i32(parameter(record, 4))
    rows, groups = i32(parameter(record, 2)), i32(parameter(record, 3))
    shared_by = ptx.quotient(i32(parameter(record, 0)), groups)
    factor = parameter_f32(record, 5) * f32(LOG2E)
    head_lo, head_hi = i32(i32(part_lo) * shared_by), i32(i32(part_hi) * shared_by)
    thread = i32(ptx.thread_index())
    warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
    for slot in range(slot_lo, slot_hi):
        if not is_live(live, slot):
            continue
        last = min(max(ptx.load_l2_32(address(record, 0, 3, slot)), i32(0)), i32(rows - i32(1)))
        head = i32(head_lo + warp)
        while head < head_hi:
            group = i64(ptx.quotient(head, shared_by))
            query = address(record, 0, 0, slot) + 4 * i64(head) * i64(width)
            out = address(record, 0, 4, slot) + 4 * i64(head) * i64(out_width)
            peak, total = f32(VERY_LOW), f32(0.0)
            row = i32(0)
            while row <= last:
                at = i64(row) * i64(groups) + group
                key = address(record, 0, 1, slot) + 4 * at * i64(width)
                value = address(record, 0, 2, slot) + 4 * at * i64(out_width)
                score = f32(0.0)
                column = lane
                while column < width:
                    score = ptx.fma(ptx.load_l2(query + 4 * i64(column)), ptx.load_l2(key + 4 * i64(column)), score)
                    column = i32(column + i32(32))
                score = warp_sum(score) * factor
                top = ptx.maximum(peak, score)
                decay, weight = ptx.exp2(peak - top), ptx.exp2(score - top)
                total = ptx.fma(total, decay, weight)
                peak = top
                column = lane
                while column < out_width:
                    at = out + 4 * i64(column)
                    kept = ptx.load_l2(at) * decay if row > 0 else f32(0.0)
                    ptx.store_1(at, ptx.fma(weight, ptx.load_l2(value + 4 * i64(column)), kept))
                    column = i32(column + i32(32))
                row = i32(row + i32(1))
            share = ptx.reciprocal(total)
            column = lane
            while column < out_width:
                ptx.store_1(out + 4 * i64(column), ptx.load_l2(out + 4 * i64(column)) * share)
                column = i32(column + i32(32))
            head = i32(head + i32(WARPS))
