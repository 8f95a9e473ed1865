"""A session's vector times rows of a table in f32: a warp four rows at a time, the vector in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import address, device, is_live, parameter, shared_base, threads_body
from wpk.kernel.layout import REDUCTION, THREADS, WARPS, WORKSPACE_BYTES, Shape
from wpk.ops.codebooks import ROWS as ROWS_OF_A_PART

i32, i64, f32 = np.int32, np.int64, np.float32
ROWS = 4  # of the table that a warp has under way,
PIECES = 4  # of each so many times 128 columns
SPAN = 128 * PIECES
HELD = 4 * ROWS * PIECES
MOST_WIDTH = WORKSPACE_BYTES // 4 // SPAN * SPAN  # of a vector
HUGE = 3.4028235e38


@device
def suits(width, bits):
    """Can rows of that width, at addresses that have these bits, be read 16 bytes at a time from a kept vector?"""
    return width <= MOST_WIDTH and ((4 * width) | bits) & 15 == 0


@device
def keep_vector(source, width, kept):
    """A vector into shared memory, followed by zeros up to a whole span; all threads of the block."""
    at = i32(ptx.thread_index())
    padded = i32(i32(width + i32(SPAN - 1)) & i32(~(SPAN - 1)))
    while at < padded:
        x = f32(0.0)
        if at < width:
            x = ptx.load_l2(source + 4 * i64(at))
        ptx.shared_store(i32(kept + at * i32(4)), x)
        at = i32(at + i32(THREADS))


@device
def dot_rows(table, row, last, width, kept, sums):
    """sums[r] = table[row + r] . kept for ROWS rows in every lane of a warp; beyond row `last` the last one again."""
    lane = i32(ptx.thread_index() & i32(31))
    x = cuda.local.array(HELD, types.float32)
    for r in range(ROWS):
        sums[r] = f32(0.0)
    first = i32(0)
    while first < width:
        for p in range(PIECES):
            column = i32(first + i32(128 * p))
            if column < width:
                # Beyond the end of a row its end again, times zeros.
                at = min(i32(column + lane * i32(4)), i32(width - i32(4)))
                for r in range(ROWS):
                    here = min(i32(row + i32(r)), last)
                    o = 4 * (PIECES * r + p)
                    a, b, c, d = ptx.load_constant_4(table + 4 * (i64(here) * i64(width) + i64(at)))
                    x[o], x[o + 1], x[o + 2], x[o + 3] = a, b, c, d
        for p in range(PIECES):
            column = i32(first + i32(128 * p))
            if column < width:
                a, b, c, d = ptx.shared_load_4(i32(kept + i32(column + lane * i32(4)) * i32(4)))
                for r in range(ROWS):
                    o = 4 * (PIECES * r + p)
                    total = ptx.fma(x[o], a, sums[r])
                    total = ptx.fma(x[o + 1], b, total)
                    total = ptx.fma(x[o + 2], c, total)
                    sums[r] = ptx.fma(x[o + 3], d, total)
        first = i32(first + i32(SPAN))
    for o in (16, 8, 4, 2, 1):
        for r in range(ROWS):
            sums[r] += ptx.shuffle_xor(sums[r], i32(o))


def make_selected_linear(shape: Shape) -> Any:
    workspace, by_threads = shape.workspace, threads_body("selected_linear", 1)

    @device
    def multiply(record, slot_lo, slot_hi, part_lo, part_hi, live):
        matrices, n, width = parameter(record, 0), i32(parameter(record, 1)), i32(parameter(record, 2))
        kept = i32(shared_base() + i32(workspace))
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        row_lo = i32(i32(part_lo) * i32(ROWS_OF_A_PART))
        last = i32(min(i32(i32(part_hi) * i32(ROWS_OF_A_PART)), n) - i32(1))
        sums = cuda.local.array(ROWS, types.float32)
        for slot in range(slot_lo, slot_hi):
            if not is_live(live, slot):
                continue
            index = min(max(i64(ptx.load_l2_32(address(record, 0, 2, slot))), i64(0)), matrices - 1)
            table = address(record, 0, 1, i64(0)) + 4 * index * i64(n) * i64(width)
            ptx.barrier()  # the vector's place is free
            keep_vector(address(record, 0, 0, slot), width, kept)
            ptx.barrier()
            row = i32(row_lo + warp * i32(ROWS))
            while row <= last:
                dot_rows(table, row, last, width, kept, sums)
                for r in range(ROWS):
                    if lane == i32(r) and i32(row + i32(r)) <= last:
                        ptx.store_1(address(record, 0, 3, slot) + 4 * i64(i32(row + i32(r))), sums[r])
                row = i32(row + i32(WARPS * ROWS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if suits(parameter(record, 2), address(record, 0, 1, i64(0))):
            multiply(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body


def make_residual_quantise(shape: Shape) -> Any:
    """The rest of a session's vector stays in shared memory from book to book."""
    workspace, by_threads = shape.workspace, threads_body("residual_quantise", 1)

    @device
    def nearest(books, squares, rows, width, kept, found):
        """The row of a book that is nearest to the kept vector, the first of equals; in every thread of the block."""
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        sums = cuda.local.array(ROWS, types.float32)
        least, code = f32(np.inf), i32(0)
        row = i32(warp * i32(ROWS))
        while row < rows:
            square = ptx.load_constant_f32(squares + 4 * i64(min(i32(row + i32(lane & i32(3))), i32(rows - i32(1)))))
            dot_rows(books, row, i32(rows - i32(1)), width, kept, sums)
            for r in range(ROWS):
                distance = ptx.shuffle(square, i32(r)) - f32(2.0) * sums[r]
                if i32(row + i32(r)) < rows and distance < least:
                    least, code = distance, i32(row + i32(r))
            row = i32(row + i32(WARPS * ROWS))
        if lane == 0:
            ptx.shared_store_2(i32(found + warp * i32(8)), least, ptx.float_of_bits(code))
        ptx.barrier()
        least, code = f32(np.inf), i32(0)
        for other in range(WARPS):
            at = i32(found + i32(8 * other))
            distance, row = ptx.shared_load(at), ptx.shared_load_32(i32(at + i32(4)))
            if distance < least or (distance == least and row < code):
                least, code = distance, row
        return code

    @device
    def quantise(record, slot_lo, slot_hi, live):
        rows, width = i32(parameter(record, 1)), i32(parameter(record, 2))
        count, first = parameter(record, 3), parameter(record, 4)
        base = shared_base()
        kept, found = i32(base + i32(workspace)), i32(base + i32(REDUCTION))
        thread = i32(ptx.thread_index())
        for slot in range(slot_lo, slot_hi):
            if not is_live(live, slot):
                continue
            codes, rest = address(record, 0, 3, slot), address(record, 0, 4, slot)
            ptx.barrier()  # the vector's place is free
            keep_vector(address(record, 0, 0, slot), width, kept)
            ptx.barrier()
            for j in range(count):
                start = (first + j) * i64(rows)
                books = address(record, 0, 1, i64(0)) + 4 * start * i64(width)
                code = nearest(books, address(record, 0, 2, i64(0)) + 4 * start, rows, width, kept, found)
                at = thread
                while at < width:
                    place = i32(kept + at * i32(4))
                    chosen = ptx.load_constant_f32(books + 4 * (i64(code) * i64(width) + i64(at)))
                    ptx.shared_store(place, ptx.shared_load(place) - chosen)
                    at = i32(at + i32(THREADS))
                if thread == 0:
                    ptx.store_32(codes + 4 * j, code)
                ptx.barrier()  # the rest is there, and what was found has been read
            at = thread
            while at < width:
                ptx.store_1(rest + 4 * i64(at), ptx.shared_load(i32(kept + at * i32(4))))
                at = i32(at + i32(THREADS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if suits(parameter(record, 2), address(record, 0, 1, i64(0))):
            quantise(record, slot_lo, slot_hi, live)
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body
