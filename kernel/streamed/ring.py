"""The ring in shared memory through which streamed operands go: where an item lies, and who waits for what.

Items are numbered through all beats; item i is announced by barriers i % BARRIERS. A *run* is a stretch of items for
which the ring is divided alike. Within a run an item takes the stage after the one before it, round and round; a run
starts with the first stage that begins behind the last item of the run before. So producer and consumers find the same
place without telling each other, and an item waits for little that was announced shortly before it.
"""

from __future__ import annotations

import numpy as np

from wpk.kernel import ptx
from wpk.kernel.cuda_library import address, device, parameter
from wpk.kernel.layout import (
    BARRIERS,
    CACHE_ROWS,
    CHUNK_BYTES,
    EMPTY,
    ENDED,
    FULL,
    ORDER_STAGE_BYTES,
    ORDER_STAGES,
    RING,
    STAGE_UNIT,
    STAMP,
    TAP_BYTES,
    WINDOW_BYTES,
)

i32, i64 = np.int32, np.int64
CACHE_SHIFT = CACHE_ROWS.bit_length() - 1
assert CACHE_ROWS == 1 << CACHE_SHIFT
TURN = BARRIERS.bit_length() - 1  # an item's number >> TURN: how often its barriers were used before
assert BARRIERS == 1 << TURN
# The consumers' place in the ring, one number: items so far, offset of the next one and size of a stage in units.
NO_ITEMS = 1 << 48


@device
def full_barrier(item):
    """Offset of the barrier that says that an item's bytes are there."""
    return i32(i32(FULL) + ((item & i32(BARRIERS - 1)) << i32(3)))


@device
def empty_barrier(item):
    """Offset of the barrier that says that the consumers have used an item."""
    return i32(i32(EMPTY) + ((item & i32(BARRIERS - 1)) << i32(3)))


@device
def turn_of(item):
    """Parity of the phase of an item's barriers."""
    return i32((item >> i32(TURN)) & i32(1))


@device
def start_of_run(offset, size, count):
    """Offset of the first item of a run of `count` stages of `size`, behind that of the run before; all in units."""
    first = i32(ptx.quotient(i32(offset + size - i32(1)), size) * size)
    return first if i32(first + size) <= i32(count * size) else i32(0)


@device
def latest_blocking(item, run, offset, size, count, old_run, old_size, old_count, old_place):
    """Number of the latest item that must be used before `item`: for its barriers, and for where it lies."""
    if item - run >= count:
        return i32(item - count)
    # The first round of a run: what the run before has left in this place, or else all that was before that run.
    low = ptx.quotient(offset, old_size)
    high = min(ptx.quotient(i32(offset + size - i32(1)), old_size), i32(old_count - i32(1)))
    latest = max(old_run - 1, item - BARRIERS)
    if low < old_count:
        newest = min(high, i32(old_place - i32(1))) if low < old_place else i32(high - old_count)
        latest = max(latest, run + i64(i32(newest - old_place)))
    return i32(latest)


@device
def enter(place, record):
    """The consumers' place, in the division of the ring that an order asks for."""
    size = i32(ptx.load_order_32(record + ORDER_STAGE_BYTES) >> i32(10))
    if i64(size) != place >> 48:
        count = ptx.load_order_32(record + ORDER_STAGES)
        offset = start_of_run(i32((place >> 32) & 0xFFFF), size, count)
        place = (place & 0xFFFFFFFF) | i64(offset) << 32 | i64(size) << 48
    return place


@device
def next_place(place, base):
    """Address of the next item."""
    return i32(base + i32(RING) + (i32((place >> 32) & 0xFFFF) << i32(10)))


@device
def stage_bytes(place):
    return i32(i32(place >> 48) << i32(10))


@device
def left_at(place, item, address, base):
    """The consumers' place, in the same division, when `item` is the next one and lies at that address."""
    offset = i64(i32(address - base - i32(RING)) >> i32(10))
    return place >> 48 << 48 | offset << 32 | (i64(item) & 0xFFFFFFFF)  # numbers of items may wrap


@device
def ring_end(record, base):
    """Address of the end of the ring as an order divides it."""
    size, count = ptx.load_order_32(record + ORDER_STAGE_BYTES), ptx.load_order_32(record + ORDER_STAGES)
    return i32(base + i32(RING) + size * count)


@device
def stage_after(place, size, end, base):
    """Address of the stage after this one, of `size` bytes, in a ring that ends at `end`."""
    following = i32(place + size)
    return i32(base + i32(RING)) if following == end else following


@device
def await_stage(base, barrier, parity):
    """Wait until a barrier of the ring has left the phase of that parity, or the kernel ends."""
    while ptx.mbarrier_try(i32(base + barrier), parity) == 0:
        if ptx.shared_load_32(i32(base + i32(ENDED))) != 0:
            break


@device
def mark(base, which):
    """One of the moments of a wave, where somebody wants to know; all threads may call it."""
    if ptx.thread_index() == 0:
        low = i64(ptx.shared_load_32(i32(base + i32(STAMP)))) & 0xFFFFFFFF
        place = low | i64(ptx.shared_load_32(i32(base + i32(STAMP + 4)))) << 32
        if place != 0:
            ptx.store_relaxed_gpu(place + 8 * which, ptx.global_timer())


@device
def cache_range(record, slot, part):
    """First and end group of CACHE_ROWS rows, and the rows in use, of a part of `attention_parts`."""
    rows = parameter(record, 3)
    position = i64(ptx.load_l2_32(address(record, 0, 2, slot)))
    used = min(max(position, i64(0)), rows - 1) + 1
    groups, splits = i32(i32(used + CACHE_ROWS - 1) >> i32(CACHE_SHIFT)), i32(parameter(record, 4))
    first, end = ptx.quotient(i32(groups * i32(part)), splits), ptx.quotient(i32(groups * i32(part + 1)), splits)
    return i64(first), i64(end), used


@device
def window_box(sessions, size):
    """Sessions of a box of windows (`wpk.kernel.plan.window_sessions`) in stages of `size` bytes."""
    most = ptx.quotient(i32(size - i32(TAP_BYTES)), i32(WINDOW_BYTES))
    boxes = ptx.quotient(i32(sessions + most - i32(1)), most)
    return ptx.quotient(i32(sessions + boxes - i32(1)), boxes)


@device
def activation_bytes(sessions):
    """Bytes of a stage, at its end, for the sessions of a product's tile (`wpk.kernel.plan.activation_bytes`)."""
    return i32(i32(sessions * i32(CHUNK_BYTES) + i32(STAGE_UNIT - 1)) & i32(-STAGE_UNIT))
