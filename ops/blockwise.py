"""Bodies for a GPU target that a whole block of threads runs together, where one thread a part would be too slow.

Signature: (record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch). All threads of the block call the body
with the same arguments and share the work among themselves; `live` is the address of the mask of slots that hold a
session, and slots that do not are skipped. Nothing here imports numba-cuda: the first functions below are names that
the kernel replaces by what the GPU has (`wpk.kernel.cuda_library`), and on a CPU they mean a block of one thread.
"""

from __future__ import annotations

import numpy as np

from wpk.ops.math32 import INT
from wpk.ops.memory import view_i32, view_i64
from wpk.ops.operator import body
from wpk.ops.payload import address, operand_i32, parameter
from wpk.ops.shape import Concat, Pad, Slice, Transpose

RUN = 512  # words of a run of memory that a whole block copies


# --- what a body may ask of its block -----------------------------------------------------------------------------
def thread_index() -> int:
    """Of this thread in its block."""
    return 0


def thread_count() -> int:
    """Threads of the block."""
    return 1


def activate(x: np.float32, code: int) -> np.float32:
    """x through the activation with this code of `wpk.ops.simd.ACTIVATIONS`."""
    raise NotImplementedError


def divided(a: int, b: int) -> int:
    """a // b of numbers from 0 to 2^31 - 1: a GPU divides those of 64 bits slowly."""
    return a // b


def wait() -> None:
    """All threads of the block meet; what they wrote before, they see after it."""


def copy_words(target: int, source: int, words: int) -> None:
    """Copy so many words of four bytes between two addresses, of memory apart, by all threads of the block."""
    out, values = view_i32(target, words), view_i32(source, words)
    for i in range(words):
        out[i] = values[i]


def is_live(live, slot):
    """Does the slot hold a session?"""
    return (view_i64(live, (slot >> 6) + 1)[slot >> 6] >> (slot & 63)) & 1 != 0


# --- bodies -------------------------------------------------------------------------------------------------------
@body(Slice, targets=("cuda",))
def slice_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    outer, row, start, taken = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    words = outer * taken
    for unit in range(thread_index(), (slot_hi - slot_lo) * words, thread_count()):
        turn = divided(unit, words)
        slot, at = slot_lo + turn, unit - turn * words
        if is_live(live, slot):
            x, y = operand_i32(record, arenas, 0, slot, outer * row), operand_i32(record, arenas, 1, slot, words)
            line = divided(at, taken)
            y[at] = x[line * row + start + at - line * taken]


@body(Concat, targets=("cuda",))
def concat_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    outer, count = parameter(record, 0), parameter(record, 1)
    row = 0
    for k in range(count):
        row += parameter(record, 2 + k)
    start = 0
    for k in range(count):
        width = parameter(record, 2 + k)
        words = outer * width
        if width >= RUN:
            for slot in range(slot_lo, slot_hi):
                if is_live(live, slot):
                    x, y = address(record, arenas, k, slot), address(record, arenas, count, slot) + 4 * start
                    for line in range(outer):
                        copy_words(y + 4 * line * row, x + 4 * line * width, width)
        else:
            for unit in range(thread_index(), (slot_hi - slot_lo) * words, thread_count()):
                turn = divided(unit, words)
                slot, at = slot_lo + turn, unit - turn * words
                if is_live(live, slot):
                    x, y = (
                        operand_i32(record, arenas, k, slot, words),
                        operand_i32(record, arenas, count, slot, outer * row),
                    )
                    line = divided(at, width)
                    y[line * row + start + at - line * width] = x[at]
        start += width


@body(Transpose, targets=("cuda",))
def transpose_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    d0, d1, d2, d3 = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    s0, s1, s2, s3 = parameter(record, 4), parameter(record, 5), parameter(record, 6), parameter(record, 7)
    words = d0 * d1 * d2 * d3
    for unit in range(thread_index(), (slot_hi - slot_lo) * words, thread_count()):
        turn = divided(unit, words)
        slot, at = slot_lo + turn, unit - turn * words
        if is_live(live, slot):
            x, y = operand_i32(record, arenas, 0, slot, words), operand_i32(record, arenas, 1, slot, words)
            line = divided(at, d3)
            plane = divided(line, d2)
            cube = divided(plane, d1)
            m, k, j = at - line * d3, line - plane * d2, plane - cube * d1
            y[at] = x[cube * s0 + j * s1 + k * s2 + m * s3]


@body(Pad, targets=("cuda",))
def pad_block(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
    t, inner, before, after = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    mode = parameter(record, 4)
    words = (before + t + after) * inner
    for unit in range(thread_index(), (slot_hi - slot_lo) * words, thread_count()):
        turn = divided(unit, words)
        slot, at = slot_lo + turn, unit - turn * words
        if is_live(live, slot):
            line = divided(at, inner)
            source = line - before
            if mode == 2:
                source = -source if source < 0 else source
                source = 2 * (t - 1) - source if source >= t else source
            if mode == 1:
                source = min(max(source, 0), t - 1)
            x = view_i32(address(record, arenas, 0, slot), t * inner)
            y = view_i32(address(record, arenas, 1, slot), words)
            inside = 0 <= source < t
            y[at] = x[source * inner + at - line * inner] if inside else INT(0)
