"""The control page: the 64-byte record that host and kernel share, followed by the slot masks.

    byte  0  u64  input_epoch   the host publishes a beat by raising it
          8  u64  output_epoch  the kernel answers with the same number
         16  u64  start_ns      when the kernel took the beat up, monotonic clock
         24  u64  end_ns        when it finished
         32  u32  poison        0: run; any other value stops the kernel at its next wait
         36  u32  slots
         40  u32  mask_words    u64 words in each mask
         44  u32  stalled       1 + wave in which a bounded wait ran out; 0: none
         48  u64  steps         steps made since the launch
         56  u64  reserved

Two masks follow, `mask_words` words each: `active` (the slots that hold a session) and `reset` (the slots whose state
is replaced by the initial image before the next beat; the CPU kernel's host copies at once instead). Epochs only grow,
so a stale value is never taken for a new one. Host writes: input_epoch, poison, masks; the rest is the kernel's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTROL = np.dtype(
    [
        ("input_epoch", "<u8"),
        ("output_epoch", "<u8"),
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("poison", "<u4"),
        ("slots", "<u4"),
        ("mask_words", "<u4"),
        ("stalled", "<u4"),
        ("steps", "<u8"),
        ("reserved", "<u8"),
    ]
)
assert CONTROL.itemsize == 64
INPUT_EPOCH, OUTPUT_EPOCH, START_NS, END_NS, POISON, STALLED = (
    int(CONTROL.fields[name][1])  # type: ignore[index]
    for name in ("input_epoch", "output_epoch", "start_ns", "end_ns", "poison", "stalled")
)


class Poison(IntEnum):
    """Why a kernel was stopped."""

    NONE = 0
    STOP = 1  # an orderly end
    HOST = 2  # the host asked, in mid-beat
    STALLED = 3  # a bounded wait ran out


class ControlPage:
    """The record and masks in one cache-aligned piece of memory."""

    def __init__(self, slots: int) -> None:
        words = -(-slots // 64)
        self._memory = aligned_bytes(CONTROL.itemsize + 16 * words)
        self.record: NDArray[Any] = self._memory[: CONTROL.itemsize].view(CONTROL)
        masks = self._memory[CONTROL.itemsize :].view("<u8")
        self.active: NDArray[np.uint64] = masks[:words]
        self.reset: NDArray[np.uint64] = masks[words : 2 * words]
        self.record["slots"], self.record["mask_words"] = slots, words

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def __getitem__(self, name: str) -> int:
        return int(self.record[name][0])

    def __setitem__(self, name: str, value: int) -> None:
        self.record[name][0] = value


def set_bit(mask: NDArray[np.uint64], slot: int, on: bool) -> None:
    """Set or clear a slot's bit in a mask."""
    bit = np.uint64(1 << (slot % 64))
    mask[slot // 64] = (mask[slot // 64] | bit) if on else (mask[slot // 64] & ~bit)


def get_bit(mask: NDArray[np.uint64], slot: int) -> bool:
    return bool((int(mask[slot // 64]) >> (slot % 64)) & 1)


def aligned_bytes(size: int, alignment: int = 4096) -> NDArray[np.uint8]:
    """Zeroed bytes whose address is a multiple of `alignment`."""
    raw = np.zeros(max(size, 1) + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + max(size, 1)]
