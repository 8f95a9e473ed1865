"""Products of f32 weights by tensor cores as TF32, of frames: where `tf32_matmul` differs from the other products.

The rows of its tile are frames of sessions: all frames of as many sessions as there is room for, one session's after
the other's, or a piece of one session's frames (`wpk.ops.tf32`). A *unit* is a part of the sessions of one tile. A
stage holds up to 176 weight rows x 32 columns and the tile's windows of these columns, each row 128 bytes as in the
other products, so that all but the instruction is theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wpk.kernel import ptx
from wpk.kernel.cuda_library import device, parameter
from wpk.kernel.layout import STREAMING, TILE_ROWS, Shape
from wpk.kernel.streamed.ring import await_stage, empty_barrier, full_barrier, mark, stage_after, turn_of

i32, i64 = np.int32, np.int64
# A descriptor's constant part: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)


@device
def frame_pieces(record):
    """Into how many pieces a session's frames are cut."""
    frames, rows = i32(parameter(record, 3)), i32(parameter(record, 7))
    return ptx.quotient(i32(frames + rows - i32(1)), rows)


@device
def frame_range(record, piece):
    """First frame and frames of a piece."""
    frames, pieces = i32(parameter(record, 3)), frame_pieces(record)
    first = ptx.quotient(i32(frames * piece), pieces)
    last = ptx.quotient(i32(frames * i32(piece + i32(1))), pieces)
    return first, i32(last - first)


@device
def unit_sessions(record):
    """Sessions of a unit, where there are so many."""
    return max(ptx.quotient(i32(parameter(record, 7)), i32(parameter(record, 3))), i32(1))


@device
def boxed_frames(record, slots):
    """Rows of a stage's windows: the frames of a piece, of as many sessions as a unit may have."""
    frames, pieces = i32(parameter(record, 3)), frame_pieces(record)
    return i32(ptx.quotient(i32(frames + pieces - i32(1)), pieces) * min(unit_sessions(record), slots))


def make_multiply_frames(shape: Shape) -> Any:
    """The device function that adds the chunks of a unit to its accumulators.

    item, place: of its first chunk. size, end: of a stage, and of the ring. needed: whether this warpgroup has rows of
    the tile, and of the weight; the same for all its threads. a_offset, b_offset: of its rows in a stage. It frees the
    stages as it goes; the item and the place after its last chunk are returned beside the accumulators.
    """
    wgmma = ptx.make_wgmma(TILE_ROWS if shape.sessions == 128 else TILE_ROWS // 2, "tf32")

    @device
    def multiply_frames(accumulators, chunks, item, place, size, end, needed, a_offset, b_offset, lane, base):
        for chunk in range(chunks):
            await_stage(base, full_barrier(item), turn_of(item))
            if chunk == 0:
                mark(base, STREAMING)
            if needed:
                accumulators = wgmma(
                    accumulators,
                    i64(DESCRIPTOR) | i64(i32(place + a_offset) >> i32(4)),
                    i64(DESCRIPTOR) | i64(i32(place + b_offset) >> i32(4)),
                )
            if lane == 0:
                ptx.mbarrier_arrive(i32(base + empty_barrier(item)))
            item = i32(item + i32(1))
            place = stage_after(place, size, end, base)
        return accumulators, item, place

    return multiply_frames
