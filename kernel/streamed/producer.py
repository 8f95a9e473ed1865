"""The producer's half of streamed operators: which bytes an item is, and when they are fetched.

One thread a block walks the list of the block's streamed tasks with two cursors. The early cursor runs ahead, over
waves that are not open yet, as far as the ring has free stages: weights wait for nothing, state for the wave that
wrote it last. The late cursor follows in the wave that is open and adds what that wave reads. Both see the same items
in the same order as the consumers: units (parts of slots), each of one or more stages.

Cursors are in shared memory, but while items are issued one after the other all of it is in registers: a late opening
of a wave, or the first items of one that come slowly, cost all blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wpk.kernel import layout, ptx
from wpk.kernel.cuda_library import address, constant_32, device, is_live, parameter, stride, word
from wpk.kernel.layout import (
    CACHE_KIND,
    CACHE_ROWS,
    CHUNK_BYTES,
    COUNTER,
    ENDED,
    ORDER_BYTES,
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
    STATE_KIND,
    STATE_ROW,
    STOPPED,
    STREAM_BYTES,
    TF32,
    TF32_COLUMNS,
    TILE_ROWS,
    WAITING,
    WINDOW_BYTES,
)
from wpk.kernel.streamed.ring import (
    activation_bytes,
    cache_range,
    empty_barrier,
    full_barrier,
    latest_blocking,
    stage_after,
    start_of_run,
    turn_of,
    window_box,
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
SPINS = 64  # tries of a barrier between two looks at the counter
PATIENCE = 1 << 14  # looks at the block's own consumers before the bounded wait for all blocks


# --- from entry to entry, from unit to unit ---------------------------------------------------------------------------
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
    late_bytes, map_of = ptx.load_constant(row + 8 * S_BYTES), ptx.load_constant(row + 8 * S_MAP)
    at, chunks = ptx.load_constant(row + 8 * S_AT), ptx.load_constant(row + 8 * S_CHUNKS)
    windows, first = ptx.load_constant(row + 8 * S_WINDOWS), ptx.load_constant(row + 8 * S_ROW)
    c[o + OPEN], c[o + KIND], c[o + RECORD] = 1, kind & 0xFF, word(context, layout.ORDERS) + ORDER_BYTES * record
    c[o + SLOT_LO], c[o + SLOT_HI], c[o + PART_LO], c[o + PART_HI] = slot_lo, slot_hi, part_lo, part_hi
    c[o + SLOT], c[o + PART], c[o + SOURCE], c[o + STEP] = slot_lo, part_lo, source, step
    c[o + BYTES], c[o + MAP], c[o + CHUNKS], c[o + ROW] = late_bytes, map_of, chunks, first
    c[o + AT], c[o + END] = at, chunks + windows
    size, count = i32(kind >> 26), i32((kind >> 8) & 0xFF)
    if i64(size) != c[o + SIZE]:
        c[o + OLD_SIZE], c[o + OLD_COUNT], c[o + OLD_RUN] = c[o + SIZE], c[o + COUNT], c[o + RUN]
        c[o + OLD_PLACE] = i64(ptx.quotient(i32(c[o + OFFSET]), i32(c[o + SIZE])))
        c[o + RUN], c[o + SIZE], c[o + COUNT] = c[o + ITEM], i64(size), i64(count)
        c[o + OFFSET] = i64(start_of_run(i32(c[o + OFFSET]), size, count))


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
            else:
                first, end, _ = cache_range(record, slot, c[o + PART])
                c[o + AT], c[o + END] = first, end


# --- items ----------------------------------------------------------------------------------------------------------
# Of each function below: `have`, how many of the next items the early cursor has announced, with their early bytes.
# patient: this is the late cursor, which waits for stages and brings the late bytes; the early one stops where the
# next stage is not free.
@device
def await_free(context, base, used):
    """Wait until an item is used: true. Or until the kernel ends: by this block's word, or the counter of all blocks.

    The other blocks' waits are bounded, and tell the host of the one that is late; this one must hear of it.
    """
    spins = 0
    while ptx.mbarrier_try(i32(base + empty_barrier(used)), turn_of(used)) == 0:
        spins += 1
        if spins % SPINS == 0 and ptx.load_relaxed_gpu(word(context, layout.SYNC) + COUNTER) >= STOPPED:
            ptx.shared_store_32(i32(base + i32(ENDED)), i32(1))
        if ptx.shared_load_32(i32(base + i32(ENDED))) != 0:
            return False
    return True


@device
def may_write(context, c, o, base, item, offset, patient):
    """Is what lies where the item belongs used? The patient wait until it is, or hear no because the kernel ends."""
    stages = c[o + COUNT]
    if item - c[o + RUN] >= stages:
        used = i32(item - stages)
    else:
        used = latest_blocking(
            item, c[o + RUN], offset, i32(c[o + SIZE]), stages, c[o + OLD_RUN], i32(c[o + OLD_SIZE]),
            i32(c[o + OLD_COUNT]), i32(c[o + OLD_PLACE]),
        )  # fmt: skip
    if patient:
        return await_free(context, base, used)
    return ptx.mbarrier_test(i32(base + empty_barrier(used)), turn_of(used)) != 0


@device
def places(c, o, base):
    """Start of the ring, address of the next item, end of the ring, bytes of a stage."""
    ring, size = i32(base + i32(RING)), i32(c[o + SIZE] * STAGE_UNIT)
    return ring, i32(ring + i32(c[o + OFFSET] * STAGE_UNIT)), i32(ring + i32(c[o + COUNT]) * size), size


@device
def offset_of(place, ring):
    """In units."""
    return i32(i32(place - ring) >> i32(10))


@device
def stream_chunks(context, c, o, base, policy, have, patient):
    """A product's part but for windows: tiles of the weight early, sessions' or frames' values late.

    What `tf32_matmul` reads, it or another block reads again: it stays in L2.
    """
    source, step, map_of = c[o + SOURCE], c[o + STEP], c[o + MAP]
    size, session, frame = i32(step), i32(c[o + SLOT_LO]), i32(c[o + ROW])
    both = i32(size + i32(c[o + BYTES]))
    tf32 = c[o + KIND] == TF32
    width = i32(TF32_COLUMNS) if tf32 else i32(64)
    column, left = i32(i32(c[o + AT]) * width), i32(c[o + CHUNKS] - c[o + AT])
    ring, place, end, pitch = places(c, o, base)
    late = i32(pitch - activation_bytes(i32(c[o + BYTES] // CHUNK_BYTES)))
    item = c[o + ITEM]
    while left > 0:
        full = i32(base + full_barrier(i32(item)))
        if have > 0:
            have -= 1
        elif may_write(context, c, o, base, item, offset_of(place, ring), patient):
            ptx.mbarrier_expect(full, both)
            if tf32:
                ptx.bulk_load(place, source, size, full)
            else:
                ptx.bulk_load_hinted(place, source, size, full, policy)
        else:
            break
        if patient:
            if tf32:
                ptx.tensor_load_3(i32(place + late), map_of, column, frame, session, full)
            else:
                ptx.tensor_load_2(i32(place + late), map_of, column, session, full)
        source += step
        column = i32(column + width)
        item += 1
        place = stage_after(place, pitch, end, base)
        left = i32(left - i32(1))
    c[o + SOURCE], c[o + AT], c[o + ITEM] = source, c[o + CHUNKS] - i64(left), item
    c[o + OFFSET] = i64(offset_of(place, ring))


@device
def stream_windows(context, c, o, base, have, patient):
    """The convolution's older rows of some sessions each, and the taps of the part's channels; all of it late."""
    record, window_map = c[o + RECORD], ptx.load_order(c[o + RECORD] + ORDER_WINDOW)
    inner, channels = parameter(record, 3), parameter(record, 4)
    ring, place, end, pitch = places(c, o, base)
    box = window_box(i32(c[o + BYTES] // CHUNK_BYTES), pitch)
    taps = i32(box * i32(WINDOW_BYTES))
    channel = c[o + ROW] - inner  # of the part's first row; below 0 where that one is none
    first = max(channel, i64(0))
    size = i32(4 * (min(channel + (c[o + STEP] >> 7), channels) - first))  # of one tap of the part's channels
    source = address(record, 0, 3, i64(0)) + 4 * first
    skipped = i32(4 * (first - channel))
    item, at = c[o + ITEM], c[o + AT]
    session = i32(i32(c[o + SLOT_LO]) + i32(at - c[o + CHUNKS]) * box)
    while at < c[o + END]:
        full = i32(base + full_barrier(i32(item)))
        if have > 0:
            have -= 1
        elif may_write(context, c, o, base, item, offset_of(place, ring), patient):
            ptx.mbarrier_expect(full, i32(taps + i32(5) * size))
        else:
            break
        if patient:
            ptx.tensor_load_3(place, window_map, i32(channel), i32(0), session, full)
            target = i32(place + taps + skipped)
            for tap in range(5):
                ptx.bulk_load(i32(target + i32(tap * 4 * TILE_ROWS)), source + 4 * channels * tap, size, full)
        session = i32(session + box)
        at += 1
        item += 1
        place = stage_after(place, pitch, end, base)
    c[o + AT], c[o + ITEM], c[o + OFFSET] = at, item, i64(offset_of(place, ring))


@device
def stream_states(context, c, o, base, have, patient):
    """The rest of an entry of state, all its slots: tiles of state early; B, C, the step's terms and x late."""
    record = c[o + RECORD]
    heads, width, groups, rows = (
        i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2)), i32(parameter(record, 3)),
    )  # fmt: skip
    inner, shared_by = i32(heads * width), ptx.quotient(heads, groups)
    mixed, mixed_step = address(record, 0, 0, i64(0)) + 4 * i64(inner), stride(record, 0)
    state, state_step = address(record, 0, 1, i64(0)), stride(record, 1)
    active = word(context, layout.ACTIVE)
    size = i32(rows * i32(STATE_ROW))
    both, own = i32(size + i32(c[o + BYTES])), i32(i32(4) * rows)
    ring, place, end, pitch = places(c, o, base)
    item, slot, part = c[o + ITEM], i32(c[o + SLOT]), i32(c[o + AT])
    part_lo, part_hi, slot_hi = i32(c[o + PART_LO]), i32(c[o + PART_HI]), i32(c[o + SLOT_HI])
    live = ptx.load_relaxed_gpu(active + 8 * i64(slot >> i32(6)))
    going = True
    while going and slot < slot_hi:
        if (live >> i64(slot & i32(63))) & 1 != 0:
            inputs = mixed + i64(slot) * mixed_step
            source = state + i64(slot) * state_step
            while part < part_hi:
                full = i32(base + full_barrier(i32(item)))
                if have > 0:
                    have -= 1
                elif may_write(context, c, o, base, item, offset_of(place, ring), patient):
                    ptx.mbarrier_expect(full, both)
                    ptx.bulk_load(place, source + i64(part) * i64(size), size, full)
                else:
                    going = False
                    break
                if patient:
                    first = i32(part * rows)
                    head = ptx.quotient(first, width)
                    after = i32(place + size)
                    b = inputs + 4 * i64(inner + i32(128) * ptx.quotient(head, shared_by))
                    terms = inputs + 4 * i64(i32(inner + i32(256) * groups) + i32(4) * head)
                    ptx.bulk_load(after, b, i32(512), full)
                    ptx.bulk_load(i32(after + i32(512)), b + i64(i32(512) * groups), i32(512), full)
                    ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
                    ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * i64(first), own, full)
                item += 1
                place = stage_after(place, pitch, end, base)
                part = i32(part + i32(1))
        if going:
            part = part_lo
            slot = i32(slot + i32(1))
            if (slot & i32(63)) == 0 and slot < slot_hi:
                live = ptx.load_relaxed_gpu(active + 8 * i64(slot >> i32(6)))
    c[o + END] = i64(part_hi)
    c[o + AT], c[o + SLOT] = i64(part_hi), i64(slot_hi - i32(1))
    if not going:
        c[o + AT], c[o + SLOT] = i64(part), i64(slot)
    c[o + ITEM], c[o + OFFSET] = item, i64(offset_of(place, ring))


@device
def stream_cache(context, c, o, base, have, patient):
    """A part of a session's cache, eight rows of keys and values of all groups an item; all of it late."""
    record, map_of, slot = c[o + RECORD], c[o + MAP], i32(c[o + SLOT])
    box, halves = i32(2 * parameter(record, 1) * CACHE_ROWS * 128), parameter(record, 2) >> 6
    ring, place, end, pitch = places(c, o, base)
    item, at, size = c[o + ITEM], c[o + AT], i32(c[o + BYTES])
    while at < c[o + END]:
        full = i32(base + full_barrier(i32(item)))
        if have > 0:
            have -= 1
        elif may_write(context, c, o, base, item, offset_of(place, ring), patient):
            ptx.mbarrier_expect(full, size)
        else:
            break
        if patient:
            for half in range(halves):
                ptx.tensor_load_4(
                    i32(place + i32(half) * box), map_of, i32(half * 64), i32(at * CACHE_ROWS), i32(0), slot, full
                )  # fmt: skip
        at += 1
        item += 1
        place = stage_after(place, pitch, end, base)
    c[o + AT], c[o + ITEM], c[o + OFFSET] = at, item, i64(offset_of(place, ring))


# --- waves ------------------------------------------------------------------------------------------------------------
@device
def start_kernel(c):
    """Both cursors before the first item of all."""
    for i in range(BOTH):
        c[i] = 0
    c[EARLY + SIZE], c[EARLY + COUNT], c[LATE + SIZE], c[LATE + COUNT] = 1, 1, 1, 1


@device
def copy_cursor(c, source, target):
    for i in range(CURSOR_WORDS):
        c[target + i] = c[source + i]


@device
def start_beat(context, c, block):
    """Both cursors at the block's first entry; the count of items goes on."""
    starts = word(context, layout.STREAM_STARTS) + 4 * block
    c[EARLY + ENTRY], c[EARLY + LAST] = constant_32(starts), constant_32(starts + 4)
    read_header(context, c, EARLY)
    copy_cursor(c, EARLY, LATE)


def make_stream_wave(fetch_orders: Any) -> Any:
    """The device function that streams what a wave reads, and early bytes of waves to come.

    fetch_orders: what brings the orders of a wave into shared memory. Every function that issues items is called in
    one place alone: LLVM copies what it calls, and the kernel must fit the instruction cache.
    """

    @device
    def stream_wave(context, c, wave, base, policy, target, ran):
        """All items of the wave that is open, then early bytes of waves to come while the block's consumers work.

        In between the orders of the next wave; `ran` counts the waves of all beats. Returns when there is nothing left
        to issue before the next wave.
        """
        looks, fetched, settled = 0, False, False
        while True:
            late = c[LATE + WAVE] == wave
            if not late:
                if not fetched:
                    fetched = True
                    if wave + 1 < word(context, layout.WAVES):
                        fetch_orders(context, base, wave + 1, ran)
                if c[EARLY + AFTER] >= wave:
                    return
            o = LATE if late else EARLY
            if c[o + OPEN] == 0 or c[o + AT] >= c[o + END]:
                waits = c[LATE + OPEN] == 0 and c[LATE + ITEM] == c[EARLY + ITEM]
                advance(context, c, o)
                if not late and waits and c[LATE + ENTRY] == c[EARLY + ENTRY]:
                    # The late cursor waits for this entry: spare it the decoding once the wave is open.
                    copy_cursor(c, EARLY, LATE)
                continue
            have, before, kind = c[EARLY + ITEM] - c[LATE + ITEM] if late else 0, c[o + ITEM], c[o + KIND]
            if kind == STATE_KIND:
                stream_states(context, c, o, base, have, late)
            elif kind == CACHE_KIND:
                stream_cache(context, c, o, base, have, late)
            elif c[o + AT] < c[o + CHUNKS]:
                stream_chunks(context, c, o, base, policy, have, late)
            else:
                stream_windows(context, c, o, base, have, late)
            if late:
                if ptx.shared_load_32(i32(base + i32(ENDED))) != 0:
                    return
                if c[LATE + ITEM] > c[EARLY + ITEM]:
                    copy_cursor(c, LATE, EARLY)
            elif c[EARLY + ITEM] == before:
                # No stage was free. As long as the consumers work, a look at the counter would only empty the first
                # cache under them; once they are done they free no more before the next wave.
                if ptx.shared_load_32(i32(base + i32(WAITING))) == i32(target):
                    if settled:
                        return
                    settled = True
                else:
                    looks += 1
                    if looks > PATIENCE:
                        return

    return stream_wave
