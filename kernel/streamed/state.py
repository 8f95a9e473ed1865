"""Mamba-2's state update: rows of the state through the ring, updated, written back, and read by C."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import address, device, parameter, stride
from wpk.kernel.layout import STATE_ROW
from wpk.kernel.streamed.ring import (
    await_stage,
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
MOST_ROWS = 5  # of a warp: a part has at most 40 rows
HELD = 4 * MOST_ROWS


def make_consume() -> Any:
    """The device function that advances a task's parts of `mamba2_step`.

    A stage: rows of 128 f32, then B and C (512 bytes each), (dt, decay, D, 0), and x of the rows. A warp has every
    row's 128 values, four a lane, of rows / 8 rows.
    """

    @device
    def consume(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, base, ring):
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        rows = i32(parameter(record, 3))
        own = i32(rows >> i32(3))  # rows of a warp
        item, place, pitch, end = i32(ring), next_place(ring, base), stage_bytes(ring), ring_end(record, base)
        # Lanes 0, 8, 16, 24 end with the sums of rows 0 .. 3, lane 1 with that of row 4.
        upper, middle = (lane & i32(16)) != 0, (lane & i32(8)) != 0
        mine = i32(((lane >> i32(4)) & i32(1)) * i32(2) + ((lane >> i32(3)) & i32(1)))
        last = lane == 1
        if last:
            mine = i32(4)
        writes = (last or (lane & i32(7)) == 0) and mine < own
        held = cuda.local.array(HELD, types.float32)
        scaled = cuda.local.array(MOST_ROWS, types.float32)
        y = cuda.local.array(MOST_ROWS, types.float32)
        states, state_step = address(record, arenas, 1, i64(0)), stride(record, 1)
        results, result_step = address(record, arenas, 2, i64(0)), stride(record, 2)
        occupied = ptx.load_relaxed_gpu(live + 8 * (slot_lo >> 6))
        for slot in range(slot_lo, slot_hi):
            if slot & 63 == 0:
                occupied = ptx.load_relaxed_gpu(live + 8 * (slot >> 6))
            if (occupied >> (slot & 63)) & 1 == 0:
                continue
            state = states + slot * state_step
            out = results + slot * result_step
            for part in range(part_lo, part_hi):
                await_stage(base, full_barrier(item), turn_of(item))
                after = i32(place + rows * i32(STATE_ROW))
                b = ptx.shared_load_4(i32(after + lane * i32(16)))
                c = ptx.shared_load_4(i32(after + i32(512) + lane * i32(16)))
                terms = ptx.shared_load_4(i32(after + i32(1024)))
                x = i32(after + i32(1040) + warp * own * i32(4))
                source = i32(place + warp * own * i32(STATE_ROW) + lane * i32(16))
                own_x = ptx.shared_load(i32(x + min(mine, i32(own - i32(1))) * i32(4)))
                for r in range(MOST_ROWS):
                    at = min(i32(r), i32(own - i32(1)))
                    values = ptx.shared_load_4(i32(source + at * i32(STATE_ROW)))
                    for e in range(4):
                        held[4 * r + e] = values[e]
                    scaled[r] = ptx.shared_load(i32(x + at * i32(4))) * terms[0]
                ptx.warp_barrier()
                if lane == 0:
                    ptx.mbarrier_arrive(i32(base + empty_barrier(item)))
                target = (
                    state + i64(part) * i64(rows * i32(STATE_ROW)) + i64(warp * own * i32(STATE_ROW) + lane * i32(16))
                )
                for r in range(MOST_ROWS):
                    z0 = ptx.fma(scaled[r], b[0], held[4 * r] * terms[1])
                    z1 = ptx.fma(scaled[r], b[1], held[4 * r + 1] * terms[1])
                    z2 = ptx.fma(scaled[r], b[2], held[4 * r + 2] * terms[1])
                    z3 = ptx.fma(scaled[r], b[3], held[4 * r + 3] * terms[1])
                    if i32(r) < own:
                        ptx.store_4(target + r * STATE_ROW, z0, z1, z2, z3)
                    y[r] = ptx.fma(z0, c[0], ptx.fma(z1, c[1], ptx.fma(z2, c[2], z3 * c[3])))
                # Eleven shuffles for five rows: each step halves the rows that a lane still sums.
                for r in range(2):
                    y[r] = (y[r + 2] if upper else y[r]) + ptx.shuffle_xor(y[r] if upper else y[r + 2], i32(16))
                fifth = y[4] + ptx.shuffle_xor(y[4], i32(16))
                total = (y[1] if middle else y[0]) + ptx.shuffle_xor(y[0] if middle else y[1], i32(8))
                fifth += ptx.shuffle_xor(fifth, i32(8))
                for o in (4, 2, 1):
                    total += ptx.shuffle_xor(total, i32(o))
                    fifth += ptx.shuffle_xor(fifth, i32(o))
                if writes:
                    row = i64(part) * i64(rows) + i64(warp * own + mine)
                    ptx.store_1(out + 4 * row, (fifth if last else total) + terms[2] * own_x)
                item = i32(item + i32(1))
                place = stage_after(place, pitch, end, base)
        return left_at(ring, item, place, base)

    return consume
