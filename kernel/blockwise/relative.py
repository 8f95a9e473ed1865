"""Attention that knows how far back a row is: a few lanes a head, all warps of the block a share of a stream's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.blockwise.softmax import (
    LOG2E,
    MOST_HEADS,
    ROWS,
    SUMS,
    SUMS_BYTES,
    VERY_LOW,
    add_up_scores,
    make_merge,
    make_weigh,
)
from wpk.kernel.cuda_library import (
    address,
    device,
    is_live,
    parameter,
    parameter_f32,
    shared_base,
    stride,
    threads_body,
)
from wpk.kernel.layout import WARPS, Shape

i32, i64, f32 = np.int32, np.int64, np.float32
BATCH = 4 * ROWS
MOST_WIDTH = 128  # of a head: four elements a lane


def make_relative_attention(shape: Shape) -> Any:
    workspace, merge, weigh = shape.workspace, make_merge(shape), make_weigh(4)
    by_threads = threads_body("relative_attention", 1)

    @device
    def attend(record, slot_lo, slot_hi, part_lo, part_hi, live):
        rows, heads, width = i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2))
        factor = parameter_f32(record, 3) * f32(LOG2E)
        base = shared_base()
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        lanes = i32(width >> i32(2))  # of a head
        at_once = ptx.quotient(i32(32), lanes)  # heads of a warp
        place = ptx.quotient(lane, lanes)
        member = i32(lane - place * lanes)
        # Heads whose sums the workspace has room for.
        kept = min(i32(MOST_HEADS), ptx.quotient(i32(SUMS_BYTES), i32(width * i32(4 * WARPS))))
        pitch = i32(i32(4) * i32(heads * width))  # bytes of all heads
        content = cuda.local.array(4, types.float32)
        where = cuda.local.array(4, types.float32)
        sums = cuda.local.array(4, types.float32)
        keys = cuda.local.array(BATCH, types.float32)
        positions = cuda.local.array(BATCH, types.float32)
        values = cuda.local.array(BATCH, types.float32)
        scores = cuda.local.array(ROWS, types.float32)
        nothing = ptx.float_of_bits(i32(base >> i32(24)))  # 0, which ptxas cannot know
        for slot in range(slot_lo, slot_hi):
            if not is_live(live, slot):
                continue
            newest = max(ptx.load_l2_32(address(record, 0, 3, slot)), i32(0))
            held = min(newest, i32(rows - i32(1)))  # rows but the newest
            latest = i32(newest - ptx.quotient(newest, rows) * rows)  # where that one lies
            some = i32(part_lo)
            while some < i32(part_hi):
                count = min(kept, i32(i32(part_hi) - some))
                ptx.barrier()  # the workspace is free
                first = i32(0)
                while first < count:
                    # Lanes without a head do as the last one does.
                    head = min(i32(first + place), i32(count - i32(1)))
                    own = i64(i32(i32(4) * i32(i32(some + head) * width + i32(4) * member)))  # bytes from head 0
                    query = address(record, 0, 0, slot) + own
                    a, b, c, d = ptx.load_l2_4(query)
                    content[0], content[1], content[2], content[3] = a * factor, b * factor, c * factor, d * factor
                    a, b, c, d = ptx.load_l2_4(query + i64(pitch))
                    where[0], where[1], where[2], where[3] = a * factor, b * factor, c * factor, d * factor
                    stream, table = address(record, 0, 1, slot) + own, address(record, 0, 2, i64(0)) + own
                    for i in range(4):
                        sums[i] = f32(0.0)
                    peak, total = f32(VERY_LOW), f32(0.0)
                    row = i32(warp * i32(ROWS))  # from the oldest on
                    while row <= held:
                        for r in range(ROWS):
                            back = i32(held - min(i32(row + i32(r)), held))
                            at = i32(latest - back)
                            at = i32(i32(2) * (i32(at + rows) if at < 0 else at))
                            o = 4 * r
                            a, b, c, d = ptx.load_l2_4(ptx.advanced(at, pitch, stream))
                            keys[o], keys[o + 1], keys[o + 2], keys[o + 3] = a, b, c, d
                            a, b, c, d = ptx.load_l2_4(ptx.advanced(i32(at + i32(1)), pitch, stream))
                            values[o], values[o + 1], values[o + 2], values[o + 3] = a, b, c, d
                            a, b, c, d = ptx.load_constant_4(ptx.advanced(back, pitch, table))
                            positions[o], positions[o + 1], positions[o + 2], positions[o + 3] = a, b, c, d
                        # ptxas would wait for keys before it issues other loads, if it could begin the sums.
                        ptx.warp_barrier()
                        start = ptx.shuffle(nothing, lane)
                        for r in range(ROWS):
                            score = start
                            for i in range(4):
                                score = ptx.fma(content[i], keys[4 * r + i], score)
                                score = ptx.fma(where[i], positions[4 * r + i], score)
                            scores[r] = score
                        add_up_scores(scores, lane, member, lanes)
                        peak, total = weigh(scores, values, sums, peak, total, row, held, i32(place * lanes))
                        row = i32(row + i32(WARPS * ROWS))
                    if place < at_once and i32(first + place) < count:
                        own_row = i32(i32(warp * count) + i32(first + place))
                        if member == 0:
                            ptx.shared_store_2(i32(base + i32(workspace) + own_row * i32(8)), peak, total)
                        to = i32(base + i32(workspace + SUMS) + i32(own_row * width + i32(4) * member) * i32(4))
                        ptx.shared_store_4(to, sums[0], sums[1], sums[2], sums[3])
                    first = i32(first + at_once)
                ptx.barrier()
                out = address(record, 0, 4, slot) + 4 * i64(some) * i64(width)
                merge(width, out, count, count, base)
                some = i32(some + count)

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        width = parameter(record, 2)
        bits = (4 * width) | address(record, 0, 0, slot_lo) | address(record, 0, 1, slot_lo)
        bits |= address(record, 0, 2, i64(0)) | stride(record, 0) | stride(record, 1)
        if bits & 15 == 0 and width <= MOST_WIDTH:
            attend(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body
