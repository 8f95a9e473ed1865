"""Choices among the elements of a row: the greatest, a warp a row; and those of the greatest mass, a block a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import (
    address,
    device,
    is_live,
    parameter,
    parameter_f32,
    shared_base,
    threads_body,
    translate,
)
from wpk.kernel.layout import REDUCTION, THREADS, WARPS, WORKSPACE_BYTES, Shape
from wpk.ops import math32, sampling

i32, i64, f32, f64 = np.int32, np.int64, np.float32, np.float64
AT_ONCE = 16  # elements that a lane has under way
LEAST, MOST = -(1 << 31), (1 << 31) - 1
HALF = 20  # bits of each half of a mass
UNIT = float(1 << (2 * HALF))  # the mass of the greatest element
WORDS = 3  # of an element in the workspace: its order, and both halves of its mass
MOST_WIDTH = WORKSPACE_BYTES // 4 // WORDS
assert MOST_WIDTH // THREADS + 1 < 1 << (31 - HALF - 5)  # a warp's sum of halves is an i32
ordered, exp = translate(sampling.ordered), translate(math32.exp)


def make_argmax(shape: Shape) -> Any:
    @device
    def argmax(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        width, rows = i32(parameter(record, 1)), i32(part_hi - part_lo)
        thread = i32(ptx.thread_index())
        lane = i32(thread & i32(31))
        unit, units = i32(thread >> i32(5)), i32(i32(slot_hi - slot_lo) * rows)
        held = cuda.local.array(AT_ONCE, types.float32)
        while unit < units:
            turn = ptx.quotient(unit, rows)
            slot, row = slot_lo + i64(turn), part_lo + i64(i32(unit - turn * rows))
            x = address(record, 0, 0, slot) + 4 * row * i64(width)
            best, place = i32(LEAST), i32(MOST)
            first = lane
            while first < width:
                for k in range(AT_ONCE):
                    held[k] = ptx.load_l2(x + 4 * i64(min(i32(first + i32(32 * k)), i32(width - i32(1)))))
                for k in range(AT_ONCE):
                    # Elements of equal order: the first. What is beyond the end is the last element once more.
                    order = i32(MOST) if held[k] != held[k] else ordered(held[k])
                    if order > best or place == i32(MOST):
                        best, place = order, min(i32(first + i32(32 * k)), i32(width - i32(1)))
                first = i32(first + i32(32 * AT_ONCE))
            greatest = ptx.warp_max(best)
            place = ptx.warp_min(place if best == greatest else i32(MOST))
            if lane == 0 and is_live(live, slot):
                ptx.store_32(address(record, 0, 1, slot) + 4 * row, place)
            unit = i32(unit + i32(WARPS))

    return argmax


def make_top_p(shape: Shape) -> Any:
    """Masses are whole numbers of 2^-40 of the greatest one: their sum has the same bits in any order."""
    workspace, by_threads = shape.workspace, threads_body("top_p", 1)

    @device
    def sum_of_block(low, high, place):
        """Sum of high 2^HALF + low over the block's threads, as f64, by way of 64 bytes at `place`; one barrier."""
        thread = i32(ptx.thread_index())
        low, high = ptx.warp_add(low), ptx.warp_add(high)
        if i32(thread & i32(31)) == 0:
            at = i32(place + i32(thread >> i32(5)) * i32(8))
            ptx.shared_store_32(at, low)
            ptx.shared_store_32(i32(at + i32(4)), high)
        ptx.barrier()
        total = i64(0)
        for warp in range(WARPS):
            at = i32(place + i32(8 * warp))
            total += i64(ptx.shared_load_32(at)) + (i64(ptx.shared_load_32(i32(at + i32(4)))) << HALF)
        return f64(total)

    @device
    def mass_up_to(bound, width, kept, place):
        """Mass of the row's elements whose order is at most `bound`."""
        low, high = i32(0), i32(0)
        at = i32(ptx.thread_index())
        while at < width:
            element = i32(kept + at * i32(4 * WORDS))
            if i64(ptx.shared_load_32(element)) <= bound:
                low = i32(low + ptx.shared_load_32(i32(element + i32(4))))
                high = i32(high + ptx.shared_load_32(i32(element + i32(8))))
            at = i32(at + i32(THREADS))
        return sum_of_block(low, high, place)

    @device
    def keep_row(x, width, kept, place):
        """Orders and masses of a row into the workspace; the least and the greatest order."""
        thread = i32(ptx.thread_index())
        least, most = i32(MOST), i32(LEAST)
        at = thread
        while at < width:
            order = ordered(ptx.load_l2(x + 4 * i64(at)))
            ptx.shared_store_32(i32(kept + at * i32(4 * WORDS)), order)
            least, most = min(least, order), max(most, order)
            at = i32(at + i32(THREADS))
        least, most = ptx.warp_min(least), ptx.warp_max(most)
        if i32(thread & i32(31)) == 0:
            pair = i32(place + i32(thread >> i32(5)) * i32(8))
            ptx.shared_store_32(pair, least)
            ptx.shared_store_32(i32(pair + i32(4)), most)
        ptx.barrier()
        for warp in range(WARPS):
            pair = i32(place + i32(8 * warp))
            least = min(least, ptx.shared_load_32(pair))
            most = max(most, ptx.shared_load_32(i32(pair + i32(4))))
        top = value_of(most)
        at = thread
        while at < width:
            element = i32(kept + at * i32(4 * WORDS))
            mass = i64(f64(exp(value_of(ptx.shared_load_32(element)) - top)) * f64(UNIT))
            ptx.shared_store_32(i32(element + i32(4)), i32(mass & ((1 << HALF) - 1)))
            ptx.shared_store_32(i32(element + i32(8)), i32(mass >> HALF))
            at = i32(at + i32(THREADS))
        ptx.barrier()
        return least, most

    @device
    def choose(record, slot, row, kept, places):
        """One row: what is not among the greatest becomes -infinity."""
        width, share = i32(parameter(record, 1)), f64(parameter_f32(record, 2))
        start = 4 * row * i64(width)
        x, y = address(record, 0, 0, slot) + start, address(record, 0, 1, slot) + start
        least, most = keep_row(x, width, kept, places)
        # Sums alternate between two places, so that one barrier each is enough.
        turn = i32(1)
        limit = share * mass_up_to(i64(most), width, kept, i32(places + i32(64)))
        low, high = i64(least) - 1, i64(most)
        while high - low > 1:
            middle = (low + high) >> 1
            turn = i32(turn ^ i32(1))
            if mass_up_to(middle, width, kept, i32(places + turn * i32(64))) > limit:
                high = middle
            else:
                low = middle
        turn = i32(turn ^ i32(1))
        below = mass_up_to(high - 1, width, kept, i32(places + turn * i32(64)))
        equal, above = i32(0), i32(0)
        at = i32(ptx.thread_index())
        while at < width:
            order = i64(ptx.shared_load_32(i32(kept + at * i32(4 * WORDS))))
            equal = i32(equal + (i32(1) if order == high else i32(0)))
            above = i32(above + (i32(1) if order > high else i32(0)))
            at = i32(at + i32(THREADS))
        turn = i32(turn ^ i32(1))
        counted = i64(sum_of_block(equal, above, i32(places + turn * i32(64))))
        equals, aboves = counted & ((1 << HALF) - 1), counted >> HALF
        at = i32(ptx.thread_index())
        while at < width:
            element = i32(kept + at * i32(4 * WORDS))
            order = i64(ptx.shared_load_32(element))
            stays = order > high
            if order == high:
                rank = i64(1)  # of this element among its equals
                if equals > 1:
                    for other in range(i64(at)):
                        if i64(ptx.shared_load_32(i32(kept + i32(other) * i32(4 * WORDS)))) == high:
                            rank += 1
                mass = i64(ptx.shared_load_32(i32(element + i32(4))))
                mass += i64(ptx.shared_load_32(i32(element + i32(8)))) << HALF
                stays = below + f64(rank * mass) > limit or (aboves == 0 and rank == equals)
            value = ptx.load_l2(x + 4 * i64(at))
            ptx.store_1(y + 4 * i64(at), value if stays else f32(-np.inf))
            at = i32(at + i32(THREADS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if parameter(record, 1) <= MOST_WIDTH:
            base = shared_base()
            for slot in range(slot_lo, slot_hi):
                if is_live(live, slot):
                    for row in range(part_lo, part_hi):
                        ptx.barrier()  # the workspace is free
                        choose(record, slot, row, i32(base + i32(workspace)), i32(base + i32(REDUCTION)))
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body


@device
def value_of(order):
    """The f32 of an order."""
    return ptx.float_of_bits(i32(order ^ i32(MOST)) if order < 0 else order)
