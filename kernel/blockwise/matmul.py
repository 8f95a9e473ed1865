"""Products in f32 on the multiply-add units: tiles of 64 rows by a panel of 16 columns, four rows of a column a thread.

The order of every sum is that of `wpk.ops.simd`: one chain of fused multiply-adds over k, ascending, from 0. A tile of
x and one of the weight are in shared memory, 64 of k at a time; the next ones are under way meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.blockwise.elementwise import picked
from wpk.kernel.cuda_library import activate_code, address, device, is_live, parameter, present, shared_base
from wpk.kernel.layout import THREADS, WORKSPACE_BYTES, Shape
from wpk.ops.simd import PANEL

i32, i64, f32 = np.int32, np.int64, np.float32
TILE = 64  # rows
DEPTH = 64  # of k in shared memory
PITCH = 4 * (DEPTH + 4)  # bytes from row to row, and from column to column of the weight: on other banks
OWN = 4  # rows of a thread
LOADS = TILE * DEPTH // THREADS  # of x that a thread has under way
STEP = THREADS // DEPTH  # rows from one of them to the next
UNROLL = 2  # of k, times four: loads from shared memory that are issued together
OPERANDS, VALUES = 4 * OWN * UNROLL, 4 * UNROLL
FAR = 1 << 30  # a window that begins there has nothing of x
# In the workspace: x, the weight, of each row the addresses of its window and second operand, and the window's start.
WEIGHT = TILE * PITCH
WINDOWS = WEIGHT + PANEL * PITCH
STARTS = WINDOWS + 16 * TILE
assert STARTS + 4 * TILE <= WORKSPACE_BYTES
assert OWN * PANEL * TILE // OWN == 4 * THREADS and PANEL == 16


def make_matmul(shape: Shape) -> Any:
    workspace = shape.workspace

    @device
    def row_of(unit, frames):
        """(slot, frame) of a row of a task, from its first slot."""
        slot = ptx.quotient(unit, frames)
        return i64(slot), i64(i32(unit - slot * frames))

    @device
    def place_rows(record, slot_lo, first, rows, tile):
        """Where the windows of a tile's rows are, into shared memory."""
        at = i32(ptx.thread_index())
        frames, step, pad = i32(parameter(record, 0)), parameter(record, 2), parameter(record, 3)
        if at < TILE:
            slot, frame = row_of(min(i32(first + at), i32(rows - i32(1))), frames)
            start = max(min(frame * step - pad, i64(FAR)), i64(-FAR))
            place = i32(tile + i32(WINDOWS) + at * i32(16))
            ptx.shared_store_64(place, address(record, 0, 0, slot_lo + slot))
            second = i64(0)
            if present(record, 3):
                second = address(record, 0, 3, slot_lo + slot)
            ptx.shared_store_64(i32(place + i32(8)), second)
            ptx.shared_store_32(i32(tile + i32(STARTS) + at * i32(4)), i32(start))

    @device
    def load_tile(record, panel, k, count, tile, x, w):
        """This thread's part of DEPTH of x and of the weight from `k` on; 0 where there is none."""
        depth, size = i32(parameter(record, 1)), i32(parameter(record, 4))
        whole = i32(depth + i32(parameter(record, 5)))
        thread = i32(ptx.thread_index())
        own = i32(k + i32(thread & i32(DEPTH - 1)))
        second = own >= depth
        for i in range(LOADS):
            row = i32(i32(thread >> i32(6)) + i32(STEP * i))
            x[i] = f32(0.0)
            if row < count and own < whole:
                place = i32(tile + i32(WINDOWS) + row * i32(16) + (i32(8) if second else i32(0)))
                at = i32(ptx.shared_load_32(i32(tile + i32(STARTS) + row * i32(4))) + own)
                at = i32(own - depth) if second else at
                if second or (at >= 0 and at < size):
                    x[i] = ptx.load_l2(ptx.advanced(at, i32(4), ptx.shared_load_64(place)))
        start = (i64(panel) * i64(whole) + i64(min(i32(k + i32(thread >> i32(2))), i32(whole - i32(1))))) * (4 * PANEL)
        a, b, c, d = ptx.load_constant_4(address(record, 0, 1, i64(0)) + start + 16 * i64(thread & i32(3)))
        w[0], w[1], w[2], w[3] = a, b, c, d

    @device
    def store_tile(tile, x, w):
        thread = i32(ptx.thread_index())
        at = i32(tile + i32(thread >> i32(6)) * i32(PITCH) + i32(thread & i32(DEPTH - 1)) * i32(4))
        for i in range(LOADS):
            ptx.shared_store(i32(at + i32(STEP * i * PITCH)), x[i])
        at = i32(tile + i32(WEIGHT) + i32(thread & i32(3)) * i32(4 * PITCH) + i32(thread >> i32(2)) * i32(4))
        for i in range(4):
            ptx.shared_store(i32(at + i32(i * PITCH)), w[i])

    @device
    def multiply(x_at, w_at, depth, totals):
        """totals[r] += x[r] . w, `depth` of k, a multiple of four times UNROLL or what zeros make one."""
        x = cuda.local.array(OPERANDS, types.float32)
        w = cuda.local.array(VALUES, types.float32)
        k = i32(0)
        while k < depth:
            at = i32(k * i32(4))
            for u in range(UNROLL):
                a, b, c, d = ptx.shared_load_4(i32(w_at + at + i32(16 * u)))
                w[4 * u], w[4 * u + 1], w[4 * u + 2], w[4 * u + 3] = a, b, c, d
                for r in range(OWN):
                    a, b, c, d = ptx.shared_load_4(i32(x_at + at + i32(r * PITCH + 16 * u)))
                    o = 4 * (OWN * u + r)
                    x[o], x[o + 1], x[o + 2], x[o + 3] = a, b, c, d
            for u in range(UNROLL):
                for i in range(4):
                    for r in range(OWN):
                        totals[r] = ptx.fma(x[4 * (OWN * u + r) + i], w[4 * u + i], totals[r])
            k = i32(k + i32(4 * UNROLL))

    @device
    def finish(record, slot_lo, row, rows, column, live, totals):
        """Bias, activation and residual of the thread's results."""
        frames, n, activation = i32(parameter(record, 0)), parameter(record, 6), parameter(record, 7)
        offset = f32(0.0)
        if present(record, 2):
            offset = ptx.load_constant_f32(address(record, 0, 2, i64(0)) + 4 * column)
        for r in range(ptx.renewed_32(i32(OWN))):  # one copy of the activations
            if i32(row + i32(r)) < rows:
                slot, frame = row_of(i32(row + i32(r)), frames)
                if is_live(live, slot_lo + slot):
                    at = 4 * (frame * n + column)
                    y = activate_code(activation, picked(r, totals[0], totals[1], totals[2], totals[3]) + offset)
                    if present(record, 4):
                        y += ptx.load_l2(address(record, 0, 4, slot_lo + slot) + at)
                    ptx.store_1(address(record, 0, 5, slot_lo + slot) + at, y)

    @device
    def matmul(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        whole = i32(i32(parameter(record, 1)) + i32(parameter(record, 5)))
        rows = i32(i32(slot_hi - slot_lo) * i32(parameter(record, 0)))
        tile = i32(shared_base() + i32(workspace))
        thread = i32(ptx.thread_index())
        own_column, own_row = i32(thread & i32(PANEL - 1)), i32(i32(thread >> i32(4)) * i32(OWN))
        x_at = i32(tile + own_row * i32(PITCH))
        w_at = i32(tile + i32(WEIGHT) + own_column * i32(PITCH))
        x = cuda.local.array(LOADS, types.float32)
        w = cuda.local.array(4, types.float32)
        totals = cuda.local.array(OWN, types.float32)
        first = i32(0)
        while first < rows:
            count = min(i32(TILE), i32(rows - first))
            ptx.barrier()  # the workspace is free
            place_rows(record, slot_lo, first, rows, tile)
            ptx.barrier()
            panel = i32(part_lo)
            while panel < i32(part_hi):
                for r in range(OWN):
                    totals[r] = f32(0.0)
                load_tile(record, panel, i32(0), count, tile, x, w)
                k = i32(0)
                while k < whole:
                    ptx.barrier()  # what was there has been used
                    store_tile(tile, x, w)
                    ptx.barrier()
                    if i32(k + i32(DEPTH)) < whole:
                        load_tile(record, panel, i32(k + i32(DEPTH)), count, tile, x, w)
                    if own_row < count:
                        multiply(x_at, w_at, min(i32(DEPTH), i32(whole - k)), totals)
                    k = i32(k + i32(DEPTH))
                column = i32(panel * i32(PANEL) + own_column)
                if column < i32(parameter(record, 6)):
                    finish(record, slot_lo, i32(first + own_row), rows, i64(column), live, totals)
                panel = i32(panel + i32(1))
            first = i32(first + i32(TILE))

    return matmul
