"""The producer's half of streamed operators: which bytes an item is, and who waits for what.

One thread a block walks the list of the block's streamed tasks with two cursors. The early cursor runs ahead, over
waves that are not open yet, as far as the ring has free stages: weights wait for nothing, state for the wave that
wrote it last. The late cursor follows in the wave that is open and adds what that wave reads. Both see the same items
in the same order as the consumers: units (parts of slots), each of one or more stages.

Items are numbered through all beats; item i is announced by barriers i % BARRIERS. A *run* is a stretch of items for
which the ring is divided alike. Within a run an item takes the stage after the one before it, round and round; a run
starts with the first stage that begins behind the last item of the run before. So producer and consumers find the same
place without telling each other, and an item waits for little that was announced shortly before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wpk.kernel import layout, ptx
from wpk.kernel.cuda_library import address, constant_32, device, is_live, parameter, stride, word
from wpk.kernel.layout import (
    BARRIERS,
    CACHE_KIND,
    CACHE_ROWS,
    CHUNK_BYTES,
    EMPTY,
    ENDED,
    FULL,
    ORDER_BYTES,
    ORDER_STAGE_BYTES,
    ORDER_STAGES,
    ORDER_WINDOW,
    RING,
    S_AFTER,
    S_AT,
    S_BYTES,
    S_CHUNKS,
    S_KIND,
    S_MAP,
    S_PART_HI,
    S_PART_LO,
    S_RECORD,
    S_ROW,
    S_SLOT_HI,
    S_SLOT_LO,
    S_SOURCE,
    S_STEP,
    S_WAVE,
    S_WINDOWS,
    STAGE_UNIT,
    STAMP,
    STATE_KIND,
    STATE_ROW,
    STREAM_BYTES,
    TAP_BYTES,
    TF32,
    TF32_COLUMNS,
    TILE_ROWS,
    WAITING,
    WINDOW_BYTES,
    Shape,
)

i32, i64 = np.int32, np.int64
# Words of a cursor. An entry has units (a part of a product, a slot of a state, a slot's part of a cache), a unit has
# items AT to END, one a stage. Of the run: SIZE of its stages and OFFSET of the next item, in units, COUNT of stages,
# number of its first item (RUN); the same of the run before, of which PLACE is the stage after its last item.
(
    ENTRY, LAST, WAVE, AFTER, OPEN, KIND, RECORD, SLOT_LO, SLOT_HI, PART_LO, PART_HI, SLOT, PART, AT, END, SOURCE, STEP,
    BYTES, MAP, ITEM, CHUNKS, ROW, SIZE, COUNT, OFFSET, RUN, OLD_SIZE, OLD_COUNT, OLD_PLACE, OLD_RUN,
) = range(30)  # fmt: skip
CURSOR_WORDS = 30
EARLY, LATE = 0, CURSOR_WORDS  # where each cursor is in the array of both
BOTH = 2 * CURSOR_WORDS
NEVER = 1 << 30  # a wave after all
PATIENCE = 1 << 14  # looks at the block's own consumers before the bounded wait for all blocks
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
    first = i32(i32(i32(offset + size - i32(1)) // size) * size)
    return first if i32(first + size) <= i32(count * size) else i32(0)


@device
def latest_blocking(item, run, offset, size, count, old_run, old_size, old_count, old_place):
    """Number of the latest item that must be used before `item`: for its barriers, and for where it lies."""
    if item - run >= count:
        return i32(item - count)
    # The first round of a run: what the run before has left in this place, or else all that was before that run.
    low = i32(offset // old_size)
    high = min(i32(i32(offset + size - i32(1)) // old_size), i32(old_count - i32(1)))
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
    groups, splits = i32((used + CACHE_ROWS - 1) // CACHE_ROWS), i32(parameter(record, 4))
    return i64(i32(groups * i32(part)) // splits), i64(i32(groups * i32(part + 1)) // splits), used


@device
def window_box(sessions, size):
    """Sessions of a box of windows (`wpk.kernel.plan.window_sessions`) in stages of `size` bytes."""
    most = i32(i32(size - i32(TAP_BYTES)) // i32(WINDOW_BYTES))
    boxes = i32(i32(sessions + most - i32(1)) // most)
    return i32(i32(sessions + boxes - i32(1)) // boxes)


@device
def activation_bytes(sessions):
    """Bytes of a stage, at its end, for the sessions of a product's tile (`wpk.kernel.plan.activation_bytes`)."""
    return i32(i32(sessions * i32(CHUNK_BYTES) + i32(STAGE_UNIT - 1)) & i32(-STAGE_UNIT))


def make_producer(shape: Shape, fetch_orders: Any) -> Any:
    """The device functions (start_kernel, start_beat, stream_wave).

    fetch_orders: what brings the orders of a wave into shared memory. Every function below is called in one place
    alone, as far as it can be: LLVM copies what it calls, and the kernel must fit the instruction cache.
    """

    @device
    def read_header(context, c, o):
        """The wave of the cursor's entry and the wave whose end its early bytes wait for."""
        c[o + OPEN], c[o + WAVE], c[o + AFTER] = 0, NEVER, NEVER
        if c[o + ENTRY] < c[o + LAST]:
            row = word(context, layout.STREAMS) + STREAM_BYTES * c[o + ENTRY]
            c[o + WAVE], c[o + AFTER] = ptx.load_constant(row + 8 * S_WAVE), ptx.load_constant(row + 8 * S_AFTER)

    @device
    def open_entry(context, c, o):
        """The entry that the header was read of, and its first unit; all of it in one line of memory."""
        row = word(context, layout.STREAMS) + STREAM_BYTES * c[o + ENTRY]
        ptx.prefetch_line(row + 2 * STREAM_BYTES)
        record, kind = ptx.load_constant(row + 8 * S_RECORD), ptx.load_constant(row + 8 * S_KIND)
        slot_lo, slot_hi = ptx.load_constant(row + 8 * S_SLOT_LO), ptx.load_constant(row + 8 * S_SLOT_HI)
        part_lo, part_hi = ptx.load_constant(row + 8 * S_PART_LO), ptx.load_constant(row + 8 * S_PART_HI)
        source, step = ptx.load_constant(row + 8 * S_SOURCE), ptx.load_constant(row + 8 * S_STEP)
        size, map_of = ptx.load_constant(row + 8 * S_BYTES), ptx.load_constant(row + 8 * S_MAP)
        at, chunks = ptx.load_constant(row + 8 * S_AT), ptx.load_constant(row + 8 * S_CHUNKS)
        windows, first = ptx.load_constant(row + 8 * S_WINDOWS), ptx.load_constant(row + 8 * S_ROW)
        c[o + OPEN], c[o + KIND], c[o + RECORD] = 1, kind & 0xFF, word(context, layout.ORDERS) + ORDER_BYTES * record
        c[o + SLOT_LO], c[o + SLOT_HI], c[o + PART_LO], c[o + PART_HI] = slot_lo, slot_hi, part_lo, part_hi
        c[o + SLOT], c[o + PART], c[o + SOURCE], c[o + STEP] = slot_lo, part_lo, source, step
        c[o + BYTES], c[o + MAP], c[o + CHUNKS], c[o + ROW] = size, map_of, chunks, first
        c[o + AT], c[o + END] = at, chunks + windows
        size, count = i32(kind >> 26), i32((kind >> 8) & 0xFF)
        if i64(size) != c[o + SIZE]:
            c[o + OLD_SIZE], c[o + OLD_COUNT], c[o + OLD_RUN] = c[o + SIZE], c[o + COUNT], c[o + RUN]
            c[o + OLD_PLACE] = i64(i32(c[o + OFFSET]) // i32(c[o + SIZE]))
            c[o + RUN], c[o + SIZE], c[o + COUNT] = c[o + ITEM], i64(size), i64(count)
            c[o + OFFSET] = i64(start_of_run(i32(c[o + OFFSET]), size, count))

    @device
    def blocking(c, o):
        """Number of the latest item that must be used before the next one may be written where it belongs."""
        return latest_blocking(
            c[o + ITEM], c[o + RUN], i32(c[o + OFFSET]), i32(c[o + SIZE]), c[o + COUNT], c[o + OLD_RUN],
            i32(c[o + OLD_SIZE]), i32(c[o + OLD_COUNT]), i32(c[o + OLD_PLACE]),
        )  # fmt: skip

    @device
    def next_item(c, o):
        c[o + AT] += 1
        c[o + SOURCE] += c[o + STEP]
        c[o + ITEM] += 1
        c[o + OFFSET] += c[o + SIZE]
        if c[o + OFFSET] == c[o + COUNT] * c[o + SIZE]:
            c[o + OFFSET] = 0

    @device
    def next_unit(c, o):
        """On to the unit after this one; true where the entry has none."""
        c[o + PART] += 1
        if c[o + PART] < c[o + PART_HI] and c[o + KIND] == CACHE_KIND:
            return False
        c[o + PART] = c[o + PART_LO]
        c[o + SLOT] += 1
        return c[o + SLOT] >= c[o + SLOT_HI] or c[o + KIND] < STATE_KIND

    @device
    def advance(context, c, o):
        """The cursor to the next unit, or to the next entry's header; the unit may have no items."""
        ended = False
        if c[o + OPEN] == 0:
            open_entry(context, c, o)
        else:
            ended = next_unit(c, o)
        if ended:
            c[o + ENTRY] += 1
            read_header(context, c, o)
        elif c[o + KIND] >= STATE_KIND:
            record, slot = c[o + RECORD], c[o + SLOT]
            c[o + AT], c[o + END] = 0, 0
            if is_live(word(context, layout.ACTIVE), slot):
                if c[o + KIND] == STATE_KIND:
                    c[o + AT], c[o + END] = c[o + PART_LO], c[o + PART_HI]
                    c[o + SOURCE] = address(record, 0, 1, slot) + c[o + AT] * c[o + STEP]
                else:
                    first, end, _ = cache_range(record, slot, c[o + PART])
                    c[o + AT], c[o + END] = first, end

    @device
    def tap_bytes(c, o):
        """Bytes of one tap of the part's channels."""
        inner, channels = parameter(c[o + RECORD], 3), parameter(c[o + RECORD], 4)
        first = max(c[o + ROW] - inner, i64(0))
        return i32(4 * (min(c[o + ROW] + (c[o + STEP] >> 7) - inner, channels) - first))

    @device
    def copy_window(c, o, place, full):
        """The convolution's older rows of some sessions, and the taps of the part's channels."""
        record = c[o + RECORD]
        inner, channels = parameter(record, 3), parameter(record, 4)
        box = window_box(i32(c[o + BYTES] // CHUNK_BYTES), i32(c[o + SIZE] * STAGE_UNIT))
        window = i32(c[o + AT] - c[o + CHUNKS])
        ptx.tensor_load_3(
            place, ptx.load_order(record + ORDER_WINDOW), i32(c[o + ROW] - inner), i32(0),
            i32(i32(c[o + SLOT_LO]) + window * box), full,
        )  # fmt: skip
        size = tap_bytes(c, o)
        first = max(c[o + ROW] - inner, i64(0))
        source = address(record, 0, 3, i64(0)) + 4 * first
        target = i32(i32(place + box * i32(WINDOW_BYTES)) + i32(4 * (first - (c[o + ROW] - inner))))
        for tap in range(5):
            ptx.bulk_load(i32(target + i32(tap * 4 * TILE_ROWS)), source + 4 * channels * tap, size, full)

    @device
    def copy_state_terms(c, o, place, full):
        """B, C, the step's terms and x of one tile of state."""
        record = c[o + RECORD]
        heads, width, groups, rows = (
            i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2)), i32(parameter(record, 3)),
        )  # fmt: skip
        inner = i32(heads * width)
        first = i32(i32(c[o + AT]) * rows)
        head = i32(first // width)
        inputs = address(record, 0, 0, c[o + SLOT]) + 4 * i64(inner)
        after = i32(place + i32(rows * i32(STATE_ROW)))
        b = inputs + 4 * i64(inner + i32(128) * i32(head // i32(heads // groups)))
        ptx.bulk_load(after, b, i32(512), full)
        ptx.bulk_load(i32(after + i32(512)), b + i64(i32(512) * groups), i32(512), full)
        terms = inputs + 4 * i64(i32(inner + i32(256) * groups) + i32(4) * head)
        ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
        ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * i64(first), i32(i32(4) * rows), full)

    @device
    def copy_cache(c, o, place, full):
        """Eight rows of keys and values of all groups."""
        record = c[o + RECORD]
        box = i32(2 * parameter(record, 1) * CACHE_ROWS * 128)
        for half in range(parameter(record, 2) // 64):
            ptx.tensor_load_4(
                i32(place + i32(half) * box), c[o + MAP], i32(half * 64), i32(c[o + AT] * CACHE_ROWS), i32(0),
                i32(c[o + SLOT]), full,
            )  # fmt: skip

    @device
    def copy_item(c, o, base, early, late, policy):
        """One item: announce its bytes and copy those that wait for nothing; copy what the wave before has written."""
        kind = c[o + KIND]
        full = i32(base + full_barrier(i32(c[o + ITEM])))
        place = i32(base + i32(RING) + i32(c[o + OFFSET] * STAGE_UNIT))
        chunk = kind < STATE_KIND and c[o + AT] < c[o + CHUNKS]
        if early:
            size = i32(c[o + BYTES])
            if chunk or kind == STATE_KIND:
                size = i32(size + i32(c[o + STEP]))
            elif kind < STATE_KIND:
                box = window_box(i32(c[o + BYTES] // CHUNK_BYTES), i32(c[o + SIZE] * STAGE_UNIT))
                size = i32(box * i32(WINDOW_BYTES) + i32(5) * tap_bytes(c, o))
            ptx.mbarrier_expect(full, size)
            if chunk and kind == TF32:
                ptx.bulk_load(place, c[o + SOURCE], i32(c[o + STEP]), full)
            elif chunk:
                ptx.bulk_load_hinted(place, c[o + SOURCE], i32(c[o + STEP]), full, policy)
            elif kind == STATE_KIND:
                ptx.bulk_load(place, c[o + SOURCE], i32(c[o + STEP]), full)
        if late:
            if chunk:
                late_place = i32(
                    place + i32(c[o + SIZE] * STAGE_UNIT) - activation_bytes(i32(c[o + BYTES] // CHUNK_BYTES))
                )
                session = i32(c[o + SLOT_LO])
                if kind == TF32:
                    at = i32(c[o + AT] * TF32_COLUMNS)
                    ptx.tensor_load_3(late_place, c[o + MAP], at, i32(c[o + ROW]), session, full)
                else:
                    ptx.tensor_load_2(late_place, c[o + MAP], i32(c[o + AT] * 64), session, full)
            elif kind < STATE_KIND:
                copy_window(c, o, place, full)
            elif kind == STATE_KIND:
                copy_state_terms(c, o, place, full)
            else:
                copy_cache(c, o, place, full)
        next_item(c, o)

    @device
    def stream_chunks(c, o, base, policy):
        """The rest of a product's part but for windows. Nothing is read from memory here: it paces the stream.

        Twice the same loop, so that the one that reads the most weights has nothing in it that it does not need. What
        `tf32_matmul` reads, it or another block reads again: it stays in L2.
        """
        source, step, map_of = c[o + SOURCE], c[o + STEP], c[o + MAP]
        size, column = i32(step), i32(c[o + AT] * 64)
        both, session = i32(size + i32(c[o + BYTES])), i32(c[o + SLOT_LO])
        count = i32(c[o + CHUNKS] - c[o + AT])
        item, stages, pitch = i32(c[o + ITEM]), i32(c[o + COUNT]), i32(c[o + SIZE] * STAGE_UNIT)
        late = i32(pitch - activation_bytes(i32(c[o + BYTES] // CHUNK_BYTES)))
        ring = i32(base + i32(RING))
        place, end = i32(ring + i32(c[o + OFFSET] * STAGE_UNIT)), i32(ring + stages * pitch)
        if c[o + KIND] == TF32:
            column, frame = i32(c[o + AT] * TF32_COLUMNS), i32(c[o + ROW])
            for _ in range(count):
                used = i32(item - stages)
                await_stage(base, empty_barrier(used), turn_of(used))
                full = i32(base + full_barrier(item))
                ptx.mbarrier_expect(full, both)
                ptx.bulk_load(place, source, size, full)
                ptx.tensor_load_3(i32(place + late), map_of, column, frame, session, full)
                source += step
                column = i32(column + i32(TF32_COLUMNS))
                item = i32(item + i32(1))
                place = i32(place + pitch)
                if place == end:
                    place = ring
        else:
            for _ in range(count):
                used = i32(item - stages)
                await_stage(base, empty_barrier(used), turn_of(used))
                full = i32(base + full_barrier(item))
                ptx.mbarrier_expect(full, both)
                ptx.bulk_load_hinted(place, source, size, full, policy)
                ptx.tensor_load_2(i32(place + late), map_of, column, session, full)
                source += step
                column = i32(column + i32(64))
                item = i32(item + i32(1))
                place = i32(place + pitch)
                if place == end:
                    place = ring
        c[o + AT] = c[o + CHUNKS]
        c[o + ITEM] += i64(count)
        c[o + OFFSET] = i64(i32(place - ring) >> i32(10))

    @device
    def stream_states(context, c, o, base):
        """The rest of an entry of state: all its slots."""
        record = c[o + RECORD]
        heads, width, groups, rows = (
            i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2)), i32(parameter(record, 3)),
        )  # fmt: skip
        inner, shared_by = i32(heads * width), i32(heads // groups)
        mixed, mixed_step = address(record, 0, 0, i64(0)) + 4 * i64(inner), stride(record, 0)
        state, state_step = address(record, 0, 1, i64(0)), stride(record, 1)
        active = word(context, layout.ACTIVE)
        size = i32(rows * i32(STATE_ROW))
        both, own = i32(size + i32(c[o + BYTES])), i32(i32(4) * rows)
        item, stages, pitch = i32(c[o + ITEM]), i32(c[o + COUNT]), i32(c[o + SIZE] * STAGE_UNIT)
        ring = i32(base + i32(RING))
        place, end = i32(ring + i32(c[o + OFFSET] * STAGE_UNIT)), i32(ring + stages * pitch)
        slot, part = i32(c[o + SLOT]), i32(c[o + AT])
        part_lo, part_hi, slot_hi = i32(c[o + PART_LO]), i32(c[o + PART_HI]), i32(c[o + SLOT_HI])
        live = ptx.load_relaxed_gpu(active + 8 * i64(slot >> i32(6)))
        while slot < slot_hi:
            if (live >> i64(slot & i32(63))) & 1 != 0:
                inputs = mixed + i64(slot) * mixed_step
                source = state + i64(slot) * state_step
                while part < part_hi:
                    first = i32(part * rows)
                    head = i32(first // width)
                    b = inputs + 4 * i64(inner + i32(128) * i32(head // shared_by))
                    terms = inputs + 4 * i64(i32(inner + i32(256) * groups) + i32(4) * head)
                    used = i32(item - stages)
                    await_stage(base, empty_barrier(used), turn_of(used))
                    full = i32(base + full_barrier(item))
                    after = i32(place + size)
                    ptx.mbarrier_expect(full, both)
                    ptx.bulk_load(place, source + i64(part) * i64(size), size, full)
                    ptx.bulk_load(after, b, i32(512), full)
                    ptx.bulk_load(i32(after + i32(512)), b + i64(i32(512) * groups), i32(512), full)
                    ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
                    ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * i64(first), own, full)
                    item = i32(item + i32(1))
                    place = i32(place + pitch)
                    if place == end:
                        place = ring
                    part = i32(part + i32(1))
            part = part_lo
            slot = i32(slot + i32(1))
            if (slot & i32(63)) == 0 and slot < slot_hi:
                live = ptx.load_relaxed_gpu(active + 8 * i64(slot >> i32(6)))
        c[o + AT], c[o + SLOT] = c[o + END], i64(slot_hi - i32(1))
        c[o + ITEM] += i64(i32(item - i32(c[o + ITEM])))
        c[o + OFFSET] = i64(i32(place - ring) >> i32(10))

    @device
    def stream_wave(context, c, wave, base, policy, target, ran):
        """All items of the wave that is open, then early bytes of waves to come while the block's consumers work.

        In between the orders of the next wave; `ran` counts the waves of all beats. Returns when there is nothing left
        to issue before the next wave.
        """
        looks, fetched, settled = 0, False, False
        while True:
            turn = -1  # the cursor that is to move on
            if c[LATE + WAVE] == wave:
                if c[LATE + OPEN] == 0 or c[LATE + AT] >= c[LATE + END]:
                    turn = LATE
                else:
                    caught_up = c[LATE + ITEM] == c[EARLY + ITEM]
                    steady = caught_up and c[LATE + ITEM] - c[LATE + RUN] >= c[LATE + COUNT]
                    if steady and c[LATE + KIND] == STATE_KIND:
                        stream_states(context, c, LATE, base)
                    elif steady and c[LATE + KIND] < STATE_KIND and c[LATE + AT] < c[LATE + CHUNKS]:
                        stream_chunks(c, LATE, base, policy)
                    else:
                        if caught_up:
                            used = blocking(c, LATE)
                            await_stage(base, empty_barrier(used), turn_of(used))
                        copy_item(c, LATE, base, caught_up, True, policy)
                    if caught_up:
                        for i in range(CURSOR_WORDS):
                            c[EARLY + i] = c[LATE + i]
            elif not fetched:
                fetched = True
                if wave + 1 < word(context, layout.WAVES):
                    fetch_orders(context, base, wave + 1, ran)
            elif c[EARLY + AFTER] >= wave:
                return
            elif c[EARLY + OPEN] == 0 or c[EARLY + AT] >= c[EARLY + END]:
                turn = EARLY
            else:
                used = blocking(c, EARLY)
                if ptx.mbarrier_test(i32(base + empty_barrier(used)), turn_of(used)) != 0:
                    copy_item(c, EARLY, base, True, False, policy)
                elif ptx.shared_load_32(i32(base + i32(WAITING))) == i32(target):
                    # The block's consumers are done: they will free no more stages before the next wave.
                    if settled:
                        return
                    settled = True
                else:
                    # As long as they work, a look at the counter would only empty the first cache under them.
                    looks += 1
                    if looks > PATIENCE:
                        return
            if turn >= 0:
                waits = c[LATE + OPEN] == 0 and c[LATE + ITEM] == c[EARLY + ITEM]
                advance(context, c, turn)
                if turn == EARLY and waits and c[LATE + ENTRY] == c[EARLY + ENTRY]:
                    # The late cursor waits for this entry: spare it the decoding once the wave is open.
                    for i in range(CURSOR_WORDS):
                        c[LATE + i] = c[EARLY + i]

    @device
    def start_kernel(c):
        """Both cursors before the first item of all."""
        for i in range(BOTH):
            c[i] = 0
        c[EARLY + SIZE], c[EARLY + COUNT], c[LATE + SIZE], c[LATE + COUNT] = 1, 1, 1, 1

    @device
    def start_beat(context, c, block):
        """Both cursors at the block's first entry; the count of items goes on."""
        starts = word(context, layout.STREAM_STARTS) + 4 * block
        c[EARLY + ENTRY], c[EARLY + LAST] = constant_32(starts), constant_32(starts + 4)
        read_header(context, c, EARLY)
        for i in range(CURSOR_WORDS):
            c[LATE + i] = c[EARLY + i]

    return start_kernel, start_beat, stream_wave
