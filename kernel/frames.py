"""The units of `tf32_matmul` on a GPU: which part of which sessions a block multiplies at a time (`wpk.ops.tf32`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.kernel.layout import TF32_COLUMNS
from wpk.ops.tf32 import frame_tiles, unit_slots
from wpk.ops.tiles import GROUP

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Frames:
    """A product by its payload: W [n, k] in `shares`, `frames` windows `step` numbers apart, `rows` of them a tile."""

    n: int
    k: int
    shares: int
    frames: int
    step: int
    rows: int

    @classmethod
    def of(cls, parameters: Sequence[int]) -> Frames:
        n, k, shares, frames, step, _, _, rows = (int(v) for v in parameters[:8])
        return cls(n, k, shares, frames, step, rows)

    @property
    def chunks(self) -> int:
        return -(-self.k // TF32_COLUMNS)

    def box(self, slots: int) -> tuple[int, int, int]:
        """Columns, frames and sessions that one copy brings into a tile; what lies outside of x is zero."""
        pieces = frame_tiles(self.frames, self.rows)
        return TF32_COLUMNS, -(-self.frames // pieces), min(unit_slots(self.frames, self.rows), slots)

    def units(self, tasks: NDArray[Any]) -> tuple[Numbers, Numbers, Numbers]:
        """Of each unit its task, its part and its first slot: part by part, tile by tile of a task's sessions."""
        each = unit_slots(self.frames, self.rows)
        tiles = -(-(tasks["slot_hi"] - tasks["slot_lo"]).astype(np.int64) // each)
        count = tiles * (tasks["part_hi"] - tasks["part_lo"])
        task = np.repeat(np.arange(len(tasks)), count)
        unit = np.arange(len(task)) - (np.cumsum(count) - count)[task]
        return task, tasks["part_lo"][task] + unit // tiles[task], tasks["slot_lo"][task] + unit % tiles[task] * each

    def ranges(self, part: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Of each part its groups of rows, first and end, and its first frame."""
        pieces = frame_tiles(self.frames, self.rows)
        share, piece, groups = part // pieces, part % pieces, self.n // GROUP
        return groups * share // self.shares, groups * (share + 1) // self.shares, self.frames * piece // pieces
