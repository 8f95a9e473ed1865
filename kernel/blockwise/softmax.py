"""What bodies of attention share: each warp's online softmax over its rows, brought together for a head."""

from __future__ import annotations

from typing import Any

import numpy as np

from wpk.kernel import ptx
from wpk.kernel.cuda_library import device
from wpk.kernel.layout import THREADS, WARPS, WORKSPACE_BYTES, Shape

i32, i64, f32 = np.int32, np.int64, np.float32
LOG2E = 1.4426950408889634
ROWS = 3  # that a warp has under way at a time
VERY_LOW = -1.0e30
# In the workspace: peak and total of each warp and head, [WARPS][heads][2]; then the sums, [WARPS][heads][width].
MOST_HEADS = 32
SUMS = 8 * WARPS * MOST_HEADS
SUMS_BYTES = WORKSPACE_BYTES - SUMS


@device
def add_up_scores(scores, lane, member, lanes):
    """Bring each row's score, of which every lane of a head has a share, to the head's first lane."""
    for o in (16, 8, 4, 2, 1):
        if i32(o) < lanes:
            for r in range(ROWS):
                other = ptx.shuffle(scores[r], i32(lane + i32(o)))
                scores[r] += other if i32(member + i32(o)) < lanes else f32(0.0)


def make_weigh(held: int) -> Any:
    """A device function: ROWS rows, from `row` on, into a lane's `held` sums; the new peak and total of its head.

    values: f32 [ROWS * held]. first_lane: the head's, which has the scores. Rows after `last` do not count.
    """

    @device
    def weigh(scores, values, sums, peak, total, row, last, first_lane):
        top = peak
        for r in range(ROWS):
            score = ptx.shuffle(scores[r], first_lane)
            scores[r] = score if i32(row + i32(r)) <= last else f32(VERY_LOW)
            top = ptx.maximum(top, scores[r])
        decay = ptx.exp2(peak - top)
        total *= decay
        for i in range(held):
            sums[i] *= decay
        for r in range(ROWS):
            weight = ptx.exp2(scores[r] - top) if i32(row + i32(r)) <= last else f32(0.0)
            total += weight
            for i in range(held):
                sums[i] = ptx.fma(weight, values[held * r + i], sums[i])
        return top, total

    return weigh


def make_merge(shape: Shape) -> Any:
    workspace = shape.workspace

    @device
    def merge(width, out, count, at_once, base):
        """Results of `count` heads, at the address `out`, of what the warps left of `at_once` in the workspace."""
        terms, sums = i32(base + i32(workspace)), i32(base + i32(workspace + SUMS))
        unit = i32(ptx.thread_index())
        while unit < i32(count * width):
            place = ptx.quotient(unit, width)
            column = i32(unit - place * width)
            peak = f32(VERY_LOW)
            for warp in range(WARPS):
                peak = ptx.maximum(peak, ptx.shared_load(i32(terms + i32(i32(warp) * at_once + place) * i32(8))))
            total, value = f32(0.0), f32(0.0)
            for warp in range(WARPS):
                row = i32(i32(warp) * at_once + place)
                at = i32(terms + row * i32(8))
                weight = ptx.exp2(ptx.shared_load(at) - peak)
                total = ptx.fma(ptx.shared_load(i32(at + i32(4))), weight, total)
                value = ptx.fma(ptx.shared_load(i32(sums + i32(row * width + column) * i32(4))), weight, value)
            ptx.store_1(out + 4 * i64(unit), value * ptx.reciprocal(total))
            unit = i32(unit + i32(THREADS))

    return merge
