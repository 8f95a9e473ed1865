"""The producer's half of streamed operators: which bytes an item is, and who waits for what.

One thread a block walks the list of the block's streamed tasks with two cursors. The early cursor runs ahead, over
waves that are not open yet, as far as the ring has free stages: weights wait for nothing, state for the wave that
wrote it last. The late cursor follows in the wave that is open and adds what that wave reads. Both see the same items
in the same order as the consumers: units (parts of slots), each of one or more stages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wpk.kernel import layout, ptx
from wpk.kernel.cuda_library import address, constant_32, device, is_live, outlined, parameter, stride, word
from wpk.kernel.layout import (
    CHUNK_BYTES,
    EMPTY,
    ENDED,
    FULL,
    ORDER_BYTES,
    ORDER_MAP,
    ORDER_PART_HI,
    ORDER_PART_LO,
    ORDER_SLOT_HI,
    ORDER_SLOT_LO,
    ORDER_WINDOW,
    RING,
    STAMP,
    STREAM_BYTES,
    TILE_ROWS,
    WINDOW_BYTES,
    Shape,
)

i32, i64 = np.int32, np.int64
STATE_ROW = 512  # bytes of a row of 128 f32
CACHE_ROWS = 8  # rows of a cache in a stage
STATE_KIND, CACHE_KIND = 4, 5  # after the kinds of `product`
# Words of a cursor. An entry has units (a part of a product, a slot of a state, a slot's part of a cache), a unit has
# items AT to END, one a stage.
(
    ENTRY, LAST, WAVE, AFTER, OPEN, KIND, RECORD, SLOT_LO, SLOT_HI, PART_LO, PART_HI, SLOT, PART, AT, END, SOURCE, STEP,
    BYTES, EXTRA, ITEM, STAGE, PHASE, CHUNKS, ROW,
    BOX,
) = range(25)  # fmt: skip
CURSOR_WORDS = 25
NEVER = 1 << 30  # a wave after all


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
def window_box(sessions, most):
    """Sessions of a box of windows (`wpk.kernel.plan.window_sessions`)."""
    boxes = (sessions + most - 1) // most
    return (sessions + boxes - 1) // boxes


def make_producer(shape: Shape, kind_of: Any, part_range: Any, tile_address: Any, window_items: Any) -> Any:
    """The device functions (start_beat, fill_ahead, serve_wave).

    kind_of: opcode -> kind of `product`, STATE_KIND or CACHE_KIND. The others: of a product's part.
    """
    stages, stage_bytes, sessions = max(shape.stages, 1), shape.stage_bytes, shape.sessions
    tile_bytes, most_windows = TILE_ROWS * CHUNK_BYTES, max(shape.window_sessions, 1)

    @outlined
    def read_header(context, cursor):
        """The wave of the cursor's entry and the wave whose end its early bytes wait for."""
        cursor[OPEN] = 0
        if cursor[ENTRY] >= cursor[LAST]:
            cursor[WAVE] = NEVER
            cursor[AFTER] = NEVER
        else:
            row = word(context, layout.STREAMS) + STREAM_BYTES * cursor[ENTRY]
            cursor[WAVE] = constant_32(row + 4)
            cursor[AFTER] = constant_32(row + 8)

    @outlined
    def begin_unit(context, cursor):
        """The items of a unit; none for a vacant slot."""
        record, slot, part, kind = cursor[RECORD], cursor[SLOT], cursor[PART], cursor[KIND]
        cursor[AT] = 0
        if kind < STATE_KIND:
            first, groups, start, chunks, _ = part_range(kind, record, part)
            cursor[AT], cursor[CHUNKS] = i64(start), i64(start + chunks)
            # After the chunks, the convolution's windows of the part's rows.
            windows = window_items(kind, record, first, groups, cursor[SLOT_HI] - cursor[SLOT_LO], cursor[BOX])
            cursor[END], cursor[ROW] = cursor[CHUNKS] + windows, i64(first) * 8
            cursor[STEP] = i64(groups) * 1024
            cursor[SOURCE] = tile_address(kind, record, part)
        elif not is_live(word(context, layout.ACTIVE), slot):
            cursor[END] = 0
        elif kind == STATE_KIND:
            cursor[AT], cursor[END] = cursor[PART_LO], cursor[PART_HI]
            cursor[STEP] = parameter(record, 3) * STATE_ROW
            cursor[SOURCE] = address(record, 0, 1, slot) + cursor[AT] * cursor[STEP]
        else:
            first, end, _ = cache_range(record, slot, part)
            cursor[AT], cursor[END] = first, end

    @outlined
    def settle(context, cursor):
        """Move on to the next unit that has items; to the next entry's header where there is none."""
        while cursor[AT] >= cursor[END]:
            cursor[PART] += 1
            if cursor[PART] >= cursor[PART_HI] or cursor[KIND] == STATE_KIND:
                cursor[PART] = cursor[PART_LO]
                cursor[SLOT] += 1
                if cursor[SLOT] >= cursor[SLOT_HI] or cursor[KIND] < STATE_KIND:
                    cursor[ENTRY] += 1
                    read_header(context, cursor)
                    return
            begin_unit(context, cursor)

    @outlined
    def open_entry(context, cursor):
        """Decode the entry that the header was read of; the cursor is at its first item, or at the next header."""
        row = word(context, layout.STREAMS) + STREAM_BYTES * cursor[ENTRY]
        orders = word(context, layout.ORDERS)
        record = orders + ORDER_BYTES * constant_32(row)
        ptx.prefetch_l2(orders + ORDER_BYTES * constant_32(row + 12), i32(ORDER_BYTES))
        cursor[RECORD] = record
        kind = i64(kind_of(i64(ptx.load_order_32(record)) & 0xFFFF))
        cursor[KIND] = kind
        cursor[SLOT_LO] = i64(ptx.load_order_32(record + ORDER_SLOT_LO))
        cursor[SLOT_HI] = i64(ptx.load_order_32(record + ORDER_SLOT_HI))
        cursor[PART_LO] = i64(ptx.load_order_32(record + ORDER_PART_LO))
        cursor[PART_HI] = i64(ptx.load_order_32(record + ORDER_PART_HI))
        cursor[SLOT], cursor[PART], cursor[OPEN] = cursor[SLOT_LO], cursor[PART_LO], 1
        if kind < STATE_KIND:
            most = min(word(context, layout.SLOTS), i64(sessions))
            cursor[BYTES] = most * CHUNK_BYTES
            cursor[BOX] = window_box(most, most_windows)
            cursor[EXTRA] = ptx.load_order(record + ORDER_MAP)
        elif kind == STATE_KIND:
            cursor[BYTES] = parameter(record, 3) * 4 + 1024 + 16
        else:
            cursor[BYTES] = 2 * parameter(record, 1) * parameter(record, 2) * CACHE_ROWS * 2
            cursor[EXTRA] = ptx.load_order(record + ORDER_MAP)
        begin_unit(context, cursor)
        settle(context, cursor)

    @device
    def tap_bytes(cursor):
        """Bytes of one tap of the part's channels."""
        inner, channels = parameter(cursor[RECORD], 3), parameter(cursor[RECORD], 4)
        first = max(cursor[ROW] - inner, i64(0))
        return i32(4 * (min(cursor[ROW] + (cursor[STEP] >> 7) - inner, channels) - first))

    @outlined
    def copy_window(cursor, place, full):
        """The convolution's older rows of some sessions, and the taps of the part's channels."""
        record = cursor[RECORD]
        inner, channels = parameter(record, 3), parameter(record, 4)
        box = i32(cursor[BOX])
        window = i32(cursor[AT] - cursor[CHUNKS])
        ptx.tensor_load_3(
            place, ptx.load_order(record + ORDER_WINDOW), i32(cursor[ROW] - inner), i32(0),
            i32(i32(cursor[SLOT_LO]) + window * box), full,
        )  # fmt: skip
        size = tap_bytes(cursor)
        first = max(cursor[ROW] - inner, i64(0))
        source = address(record, 0, 3, i64(0)) + 4 * first
        target = i32(i32(place + box * i32(WINDOW_BYTES)) + i32(4 * (first - (cursor[ROW] - inner))))
        for tap in range(5):
            ptx.bulk_load(i32(target + i32(tap * 4 * TILE_ROWS)), source + 4 * channels * tap, size, full)

    @device
    def copy_early(cursor, place, full, policy):
        """Announce all bytes of the item, and copy those that wait for nothing."""
        kind = cursor[KIND]
        if kind < STATE_KIND:
            if cursor[AT] < cursor[CHUNKS]:
                ptx.mbarrier_expect(full, i32(cursor[STEP] + cursor[BYTES]))
                ptx.bulk_load_hinted(place, cursor[SOURCE], i32(cursor[STEP]), full, policy)
            else:
                ptx.mbarrier_expect(full, i32(i32(cursor[BOX]) * i32(WINDOW_BYTES) + i32(5) * tap_bytes(cursor)))
        elif kind == STATE_KIND:
            ptx.mbarrier_expect(full, i32(cursor[STEP] + cursor[BYTES]))
            ptx.bulk_load(place, cursor[SOURCE], i32(cursor[STEP]), full)
        else:
            ptx.mbarrier_expect(full, i32(cursor[BYTES]))

    @device
    def copy_late(cursor, place, full):
        """Copy what the open wave's predecessors have written."""
        kind, record = cursor[KIND], cursor[RECORD]
        if kind < STATE_KIND:
            if cursor[AT] < cursor[CHUNKS]:
                ptx.tensor_load_2(
                    i32(place + i32(tile_bytes)), cursor[EXTRA], i32(cursor[AT] * 64), i32(cursor[SLOT_LO]), full
                )
            else:
                copy_window(cursor, place, full)
        elif kind == STATE_KIND:
            heads, width, groups, rows = (
                i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2)),
                i32(parameter(record, 3)),
            )  # fmt: skip
            inner = i32(heads * width)
            first = i32(i32(cursor[AT]) * rows)
            head = i32(first // width)
            group = i32(head // i32(heads // groups))
            inputs = address(record, 0, 0, cursor[SLOT]) + 4 * i64(inner)
            after = i32(place + i32(rows * i32(STATE_ROW)))
            b = inputs + 4 * i64(inner + i32(128) * group)
            ptx.bulk_load(after, b, i32(512), full)
            ptx.bulk_load(i32(after + i32(512)), b + i64(i32(512) * groups), i32(512), full)
            terms = inputs + 4 * i64(i32(inner + i32(256) * groups) + i32(4) * head)
            ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
            ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * i64(first), i32(i32(4) * rows), full)
        else:
            halves = parameter(record, 2) // 64
            box = i32(2 * parameter(record, 1) * CACHE_ROWS * 128)
            for half in range(halves):
                ptx.tensor_load_4(
                    i32(place + i32(half) * box), cursor[EXTRA], i32(half * 64), i32(cursor[AT] * CACHE_ROWS), i32(0),
                    i32(cursor[SLOT]), full,
                )  # fmt: skip

    @device
    def next_item(cursor):
        cursor[AT] += 1
        cursor[SOURCE] += cursor[STEP]
        cursor[ITEM] += 1
        cursor[STAGE] += 1
        if cursor[STAGE] == stages:
            cursor[STAGE] = 0
            cursor[PHASE] ^= 1

    @device
    def stage_of(cursor, base):
        """The item's place, the barrier that counts its bytes, and the one that says that the stage is free."""
        stage = i32(cursor[STAGE])
        place = i32(base + i32(RING) + stage * i32(stage_bytes))
        return place, i32(base + i32(FULL) + stage * i32(8)), i32(i32(EMPTY) + stage * i32(8))

    @device
    def fill_ahead(context, early, late, wave, base, policy):
        """Issue early bytes of waves to come while stages are free; `wave` is open.

        1 when a stage that becomes free may be worth another look, 0 when there is nothing to issue before `wave` ends.
        """
        while early[AFTER] < wave:
            if early[OPEN] == 0:
                open_entry(context, early)
                if late[OPEN] == 0 and late[ITEM] == early[ITEM]:
                    # The late cursor waits for this entry: spare it the decoding once the wave is open.
                    for i in range(CURSOR_WORDS):
                        late[i] = early[i]
                continue
            place, full, empty = stage_of(early, base)
            if ptx.mbarrier_test(i32(base + empty), i32(early[PHASE] ^ 1)) == 0:
                return i32(1)
            copy_early(early, place, full, policy)
            next_item(early)
            settle(context, early)
        return i32(0)

    @device
    def serve_chunks(cursor, base, policy):
        """The rest of a product's part but for windows. Nothing is read from memory here: it paces the stream."""
        source, step, map_of = cursor[SOURCE], cursor[STEP], cursor[EXTRA]
        size, column = i32(step), i32(cursor[AT] * 64)
        both, session = i32(i32(step) + i32(cursor[BYTES])), i32(cursor[SLOT_LO])
        count = i32(cursor[CHUNKS] - cursor[AT])
        stage, phase = i32(cursor[STAGE]), i32(cursor[PHASE] ^ 1)
        for _ in range(count):
            await_stage(base, i32(i32(EMPTY) + stage * i32(8)), phase)
            full = i32(base + i32(FULL) + stage * i32(8))
            place = i32(base + i32(RING) + stage * i32(stage_bytes))
            ptx.mbarrier_expect(full, both)
            ptx.bulk_load_hinted(place, source, size, full, policy)
            ptx.tensor_load_2(i32(place + i32(tile_bytes)), map_of, column, session, full)
            source += step
            column = i32(column + i32(64))
            stage = i32(stage + i32(1))
            if stage == i32(stages):
                stage = i32(0)
                phase = i32(phase ^ i32(1))
        cursor[AT] = cursor[CHUNKS]
        cursor[SOURCE] = source
        cursor[ITEM] += i64(count)
        cursor[STAGE], cursor[PHASE] = i64(stage), i64(phase ^ i32(1))

    @device
    def serve_states(context, cursor, base):
        """The rest of an entry of state: all its slots."""
        record = cursor[RECORD]
        heads, width, groups, rows = (
            i32(parameter(record, 0)), i32(parameter(record, 1)), i32(parameter(record, 2)), i32(parameter(record, 3)),
        )  # fmt: skip
        inner, shared_by = i32(heads * width), i32(heads // groups)
        mixed, mixed_step = address(record, 0, 0, i64(0)) + 4 * i64(inner), stride(record, 0)
        state, state_step = address(record, 0, 1, i64(0)), stride(record, 1)
        active = word(context, layout.ACTIVE)
        size = i32(rows * i32(STATE_ROW))
        both, own = i32(size + i32(cursor[BYTES])), i32(i32(4) * rows)
        stage, phase, items = i32(cursor[STAGE]), i32(cursor[PHASE] ^ 1), i64(0)
        slot, part = i32(cursor[SLOT]), i32(cursor[AT])
        part_lo, part_hi, slot_hi = i32(cursor[PART_LO]), i32(cursor[PART_HI]), i32(cursor[SLOT_HI])
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
                    await_stage(base, i32(i32(EMPTY) + stage * i32(8)), phase)
                    full = i32(base + i32(FULL) + stage * i32(8))
                    place = i32(base + i32(RING) + stage * i32(stage_bytes))
                    after = i32(place + size)
                    ptx.mbarrier_expect(full, both)
                    ptx.bulk_load(place, source + i64(part) * i64(size), size, full)
                    ptx.bulk_load(after, b, i32(512), full)
                    ptx.bulk_load(i32(after + i32(512)), b + i64(i32(512) * groups), i32(512), full)
                    ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
                    ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * i64(first), own, full)
                    items += 1
                    stage = i32(stage + i32(1))
                    if stage == i32(stages):
                        stage = i32(0)
                        phase = i32(phase ^ i32(1))
                    part = i32(part + i32(1))
            part = part_lo
            slot = i32(slot + i32(1))
            if (slot & i32(63)) == 0 and slot < slot_hi:
                live = ptx.load_relaxed_gpu(active + 8 * i64(slot >> i32(6)))
        cursor[AT], cursor[SLOT] = cursor[END], i64(slot_hi - i32(1))
        cursor[ITEM] += items
        cursor[STAGE], cursor[PHASE] = i64(stage), i64(phase ^ i32(1))

    @device
    def serve_wave(context, early, late, wave, base, policy):
        """All items of the wave that has opened: the late bytes of those that are under way, then the rest."""
        while late[WAVE] == wave:
            if late[OPEN] == 0:
                open_entry(context, late)
                continue
            while late[ITEM] < early[ITEM] and late[AT] < late[END]:
                place, full, _ = stage_of(late, base)
                copy_late(late, place, full)
                next_item(late)
            if late[AT] < late[END]:
                # Caught up: the rest goes out whole, and both cursors end behind it.
                if late[KIND] == STATE_KIND:
                    serve_states(context, late, base)
                elif late[KIND] < STATE_KIND:
                    serve_chunks(late, base, policy)
                while late[AT] < late[END]:
                    place, full, empty = stage_of(late, base)
                    await_stage(base, empty, i32(late[PHASE] ^ 1))
                    copy_early(late, place, full, policy)
                    copy_late(late, place, full)
                    next_item(late)
                settle(context, late)
                for i in range(CURSOR_WORDS):
                    early[i] = late[i]
            else:
                settle(context, late)

    @device
    def start_beat(context, cursor, block):
        """Back to the first entry; the count of items goes on."""
        starts = word(context, layout.STREAM_STARTS) + 4 * block
        cursor[ENTRY], cursor[LAST] = constant_32(starts), constant_32(starts + 4)
        read_header(context, cursor)

    return start_beat, fill_ahead, serve_wave
