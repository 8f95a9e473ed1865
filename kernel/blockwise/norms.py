"""Layer norm and RMS norm of rows in f32: a tile of rows in shared memory, their sums in the order of the CPU's.

`wpk.ops.reduce` sums 512 elements at a time in eight chains. Here a team of eight lanes has such a block, a lane a
chain; all teams of a tile work at once, so that a norm takes the time of a few chains, whatever there is of it.
"""

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
    present,
    shared_base,
    stride,
    threads_body,
    translate,
)
from wpk.kernel.layout import REDUCTION, THREADS, WORKSPACE_BYTES, Shape
from wpk.ops import norm, reduce

i32, i64, f32 = np.int32, np.int64, np.float32
CHAINS = 8  # of a block of a sum
BLOCK = reduce.BLOCK
TEAMS = THREADS // CHAINS
ROOM = WORKSPACE_BYTES // 4  # f32 of a tile
MOST_WIDTH = ROOM // (BLOCK + CHAINS) * BLOCK  # of a row
AT_ONCE = 4  # loads that a thread has under way
HELD = 4 * AT_ONCE
STEPS = 16  # of a chain, whose loads are issued together
# In the words of REDUCTION: a sum a team, another, then mean and factor of a row.
SQUARES, STATISTICS = 4 * TEAMS, 8 * TEAMS
inverse_root_of_mean = translate(norm._rsqrt_of_mean)


def make_layer_norm(shape: Shape) -> Any:
    return _make_norm(shape, "layer_norm", 3)


def make_rms_norm(shape: Shape) -> Any:
    return _make_norm(shape, "rms_norm", 2)


@device
def place_of(element):
    """Of a row's element, in words: blocks lie on other banks."""
    return i32(element + i32(element >> i32(9)) * i32(CHAINS))


@device
def row_of(unit, rows):
    """(slot, row) of a unit of a task, from its first ones."""
    slot = ptx.quotient(unit, rows)
    return i64(slot), i64(i32(unit - slot * rows))


@device
def team_sum(total, rest, remainder, last, lane):
    """The sum of a block of eight chains: a tree, then what is left over of the row's last block, in order."""
    total += ptx.shuffle_xor(total, i32(4))
    total += ptx.shuffle_xor(total, i32(2))
    total += ptx.shuffle_xor(total, i32(1))
    left = f32(0.0)
    for r in range(i64(remainder)):
        term = ptx.shuffle(rest, i32(i32(lane & i32(24)) + i32(r)))
        if last:
            left += term
    return total + left


def _make_norm(shape: Shape, name: str, result: int) -> Any:
    """result: the operand that is written. With `layer_norm` the mean is taken off, and there may be a bias."""
    workspace, centred = shape.workspace, name == "layer_norm"
    by_threads = threads_body(name, 1)

    @device
    def load_tile(record, slot_lo, part_lo, first, count, rows, width, pitch, tile):
        """Rows into the tile, `pitch` words a row."""
        thread, pieces = i32(ptx.thread_index()), i32(width >> i32(2))
        units = i32(count * pieces)
        held = cuda.local.array(HELD, types.float32)
        unit = thread
        while unit < units:
            for k in range(AT_ONCE):
                other = min(i32(unit + i32(k * THREADS)), i32(units - i32(1)))
                r = ptx.quotient(other, pieces)
                slot, row = row_of(i32(first + r), rows)
                column = i32(i32(other - r * pieces) * i32(4))
                at = address(record, 0, 0, slot_lo + slot) + 4 * ((part_lo + row) * i64(width) + i64(column))
                held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3] = ptx.load_l2_4(at)
            for k in range(AT_ONCE):
                other = i32(unit + i32(k * THREADS))
                if other < units:
                    r = ptx.quotient(other, pieces)
                    column = i32(i32(other - r * pieces) * i32(4))
                    at = i32(tile + i32(r * pitch + place_of(column)) * i32(4))
                    ptx.shared_store_4(at, held[4 * k], held[4 * k + 1], held[4 * k + 2], held[4 * k + 3])
            unit = i32(unit + i32(AT_ONCE * THREADS))

    @device
    def load_tile_unaligned(record, slot_lo, part_lo, first, count, rows, width, pitch, tile):
        unit, units = i32(ptx.thread_index()), i32(count * width)
        while unit < units:
            r = ptx.quotient(unit, width)
            slot, row = row_of(i32(first + r), rows)
            column = i32(unit - r * width)
            x = ptx.load_l2(address(record, 0, 0, slot_lo + slot) + 4 * ((part_lo + row) * i64(width) + i64(column)))
            ptx.shared_store(i32(tile + i32(r * pitch + place_of(column)) * i32(4)), x)
            unit = i32(unit + i32(THREADS))

    @device
    def chain(at, steps, remainder, last, lane, shift, squared):
        """A team's sum of x, or of the squares of x - shift; `at`: in shared memory, this lane's first element."""
        total, rest = f32(0.0), f32(0.0)
        x = cuda.local.array(STEPS, types.float32)
        step = i32(0)
        while step < i32(steps & i32(~(STEPS - 1))):
            for k in range(STEPS):
                x[k] = ptx.shared_load(i32(at + i32(32) * i32(step + i32(k))))
            for k in range(STEPS):
                total += (x[k] - shift) * (x[k] - shift) if squared else x[k]
            step = i32(step + i32(STEPS))
        while step < steps:
            one = ptx.shared_load(i32(at + i32(32) * step))
            total += (one - shift) * (one - shift) if squared else one
            step = i32(step + i32(1))
        if last and i32(lane & i32(7)) < remainder:
            one = ptx.shared_load(i32(at + i32(32) * steps))
            rest = (one - shift) * (one - shift) if squared else one
        return team_sum(total, rest, remainder, last, lane)

    @device
    def total_of(sums, row, blocks):
        """The sum over a row of its blocks' sums."""
        total = f32(0.0)
        for block in range(i64(blocks)):
            total += ptx.shared_load(i32(sums + i32(row * blocks + i32(block)) * i32(4)))
        return total

    @device
    def load_affine(record, operand, slot, column):
        """An element of the weight or of the bias; they may be a session's own."""
        if stride(record, operand) == 0:
            return ptx.load_constant_f32(address(record, 0, operand, i64(0)) + 4 * column)
        return ptx.load_l2(address(record, 0, operand, slot) + 4 * column)

    @device
    def load_weights(record, slot_lo, first, unit, units, rows, weights, biases):
        """Weight and bias of the elements unit, unit + THREADS, ... of a tile."""
        width, has_bias = i32(parameter(record, 1)), centred and present(record, 2)
        for k in range(AT_ONCE):
            other = min(i32(unit + i32(k * THREADS)), i32(units - i32(1)))
            r = ptx.quotient(other, width)
            column, slot = i64(i32(other - r * width)), slot_lo + i64(ptx.quotient(i32(first + r), rows))
            weights[k] = load_affine(record, 1, slot, column)
            if has_bias:
                biases[k] = load_affine(record, 2, slot, column)

    @device
    def finish(record, slot_lo, part_lo, first, unit, units, rows, pitch, tile, statistics, live, weights, biases):
        """The affine map of the elements unit, unit + THREADS, ... of a tile."""
        width, has_bias, offset = i32(parameter(record, 1)), centred and present(record, 2), f32(0.0)
        if not centred:
            offset = parameter_f32(record, 3)
        for k in range(AT_ONCE):
            other = i32(unit + i32(k * THREADS))
            if other < units:
                r = ptx.quotient(other, width)
                slot, row = row_of(i32(first + r), rows)
                column = i32(other - r * width)
                x = ptx.shared_load(i32(tile + i32(r * pitch + place_of(column)) * i32(4)))
                mean = ptx.shared_load(i32(statistics + r * i32(8)))
                factor = ptx.shared_load(i32(statistics + r * i32(8) + i32(4)))
                y = (x - mean) * factor * weights[k] if centred else x * factor * (offset + weights[k])
                if has_bias:
                    y += biases[k]
                if is_live(live, slot_lo + slot):
                    at = address(record, 0, result, slot_lo + slot)
                    ptx.store_1(at + 4 * ((part_lo + row) * i64(width) + i64(column)), y)

    @device
    def norm_rows(record, slot_lo, slot_hi, part_lo, part_hi, live):
        width, epsilon = i32(parameter(record, 1)), parameter_f32(record, 2)
        base = shared_base()
        tile, sums = i32(base + i32(workspace)), i32(base + i32(REDUCTION))
        squares, statistics = i32(sums + i32(SQUARES)), i32(sums + i32(STATISTICS))
        thread = i32(ptx.thread_index())
        lane, team = i32(thread & i32(31)), i32(thread >> i32(3))
        blocks = i32(i32(width + i32(BLOCK - 1)) >> i32(9))
        # Words of a row; the first banks of neighbouring teams are eight apart.
        pitch = i32(blocks * i32(BLOCK + CHAINS))
        if blocks == 1:
            pitch = i32(i32(i32(width + i32(31)) & i32(~31)) + i32(CHAINS))
        most = min(ptx.quotient(i32(TEAMS), blocks), ptx.quotient(i32(ROOM), pitch))  # rows of a tile
        own_row = ptx.quotient(team, blocks)
        own_block = i32(team - own_row * blocks)
        last = own_block == i32(blocks - i32(1))
        size = min(i32(BLOCK), i32(width - own_block * i32(BLOCK)))  # elements of this team's block
        steps, remainder = i32(size >> i32(3)), i32(width & i32(7))
        aligned = (width & i32(3)) == 0 and (address(record, 0, 0, slot_lo) | stride(record, 0)) & 15 == 0
        rows = i32(part_hi - part_lo)
        units = i32(i32(slot_hi - slot_lo) * rows)
        weights = cuda.local.array(AT_ONCE, types.float32)
        biases = cuda.local.array(AT_ONCE, types.float32)
        first = i32(0)
        while first < units:
            count = min(most, i32(units - first))
            elements = i32(count * width)
            # Needed last, but under way from now on.
            load_weights(record, slot_lo, first, thread, elements, rows, weights, biases)
            ptx.barrier()  # the tile is free
            if aligned:
                load_tile(record, slot_lo, part_lo, first, count, rows, width, pitch, tile)
            else:
                load_tile_unaligned(record, slot_lo, part_lo, first, count, rows, width, pitch, tile)
            ptx.barrier()
            # Teams without a row do as the first row's do.
            works = own_row < count
            own = own_row if works else i32(0)
            at = i32(tile + i32(own * pitch + own_block * i32(BLOCK + CHAINS) + i32(lane & i32(7))) * i32(4))
            mean = f32(0.0)
            if centred:
                total = chain(at, steps, remainder, last, lane, f32(0.0), False)
                if works and i32(lane & i32(7)) == 0:
                    ptx.shared_store(i32(sums + team * i32(4)), total)
                ptx.barrier()
                mean = total_of(sums, own, blocks) / f32(width)
            total = chain(at, steps, remainder, last, lane, mean, True)
            if works and i32(lane & i32(7)) == 0:
                ptx.shared_store(i32(squares + team * i32(4)), total)
            ptx.barrier()
            if works and own_block == 0 and i32(lane & i32(7)) == 0:
                factor = inverse_root_of_mean(total_of(squares, own, blocks), i64(width), epsilon)
                ptx.shared_store_2(i32(statistics + own * i32(8)), mean, factor)
            ptx.barrier()
            unit = thread
            while unit < elements:
                finish(
                    record, slot_lo, part_lo, first, unit, elements, rows, pitch, tile, statistics, live,
                    weights, biases,
                )  # fmt: skip
                unit = i32(unit + i32(AT_ONCE * THREADS))
                load_weights(record, slot_lo, first, unit, elements, rows, weights, biases)
            first = i32(first + count)

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if parameter(record, 1) <= MOST_WIDTH:
            norm_rows(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body
