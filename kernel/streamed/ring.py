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
from wpk.kernel.cuda_library import address, constant_32, device, is_live, parameter, word
from wpk.kernel.layout import EMPTY, ENDED, FULL, MAP_BYTES, RING, STREAM_BYTES, TILE_ROWS, Shape

i32, i64 = np.int32, np.int64
STATE_ROW = 512  # bytes of a row of 128 f32
CACHE_ROWS = 8  # rows of a cache in a stage
STATE_KIND, CACHE_KIND = 4, 5  # after the kinds of `product`
# Words of a cursor.
(
    ENTRY, LAST, KIND, RECORD, MAP, SLOT_LO, SLOT_HI, PART_LO, PART_HI, SLOT, PART, AT, END, WAVE, AFTER, SOURCE, STEP,
    ITEM, OPEN,
) = range(19)  # fmt: skip
CURSOR_WORDS = 20
NEVER = 1 << 30  # a wave after all


@device
def await_stage(base, barrier, parity):
    """Wait until a barrier of the ring has left the phase of that parity, or the kernel ends."""
    while ptx.mbarrier_try(i32(base + barrier), parity) == 0:
        if ptx.shared_load_32(i32(base + i32(ENDED))) != 0:
            break


@device
def cache_range(record, arenas, slot, part):
    """First and end group of CACHE_ROWS rows, and the rows in use, of a part of `attention_parts`."""
    rows = parameter(record, 3)
    position = i64(ptx.load_l2_32(address(record, arenas, 2, slot)))
    used = min(max(position, i64(0)), rows - 1) + 1
    groups, splits = (used + CACHE_ROWS - 1) // CACHE_ROWS, parameter(record, 4)
    return groups * part // splits, groups * (part + 1) // splits, used


def make_producer(shape: Shape, kind_of: Any, part_range: Any, tile_address: Any) -> Any:
    """The device functions (start_beat, fill_ahead, serve_wave).

    kind_of: opcode -> kind of `product`, STATE_KIND or CACHE_KIND. part_range, tile_address: of a product's part.
    """
    stages, stage_bytes, sessions = max(shape.stages, 1), shape.stage_bytes, shape.sessions

    @device
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

    @device
    def begin_unit(context, cursor):
        """The stages of a slot's part; none for a vacant slot."""
        record, arenas, slot, part = cursor[RECORD], word(context, layout.ARENAS), cursor[SLOT], cursor[PART]
        kind = cursor[KIND]
        cursor[AT] = 0
        if kind < STATE_KIND:
            _, groups, start, chunks, _ = part_range(kind, record, part)
            cursor[AT], cursor[END] = i64(start), i64(start + chunks)
            cursor[STEP] = i64(groups) * 1024
            cursor[SOURCE] = tile_address(kind, record, arenas, part)
        elif not is_live(word(context, layout.ACTIVE), slot):
            cursor[END] = 0
        elif kind == STATE_KIND:
            cursor[END] = 1
            cursor[STEP] = parameter(record, 3) * STATE_ROW
            cursor[SOURCE] = address(record, arenas, 1, slot) + part * cursor[STEP]
        else:
            first, end, _ = cache_range(record, arenas, slot, part)
            cursor[AT], cursor[END] = first, end

    @device
    def settle(context, cursor):
        """Move on to the next unit that has stages; the next entry's header where there is none."""
        while cursor[AT] >= cursor[END]:
            cursor[PART] += 1
            if cursor[PART] >= cursor[PART_HI]:
                cursor[PART] = cursor[PART_LO]
                cursor[SLOT] += 1
                if cursor[SLOT] >= cursor[SLOT_HI] or cursor[KIND] < STATE_KIND:
                    cursor[ENTRY] += 1
                    read_header(context, cursor)
                    return
            begin_unit(context, cursor)

    @device
    def open_entry(context, cursor):
        """Decode the entry that the header was read of; the cursor is at its first item, or at the next header."""
        index = constant_32(word(context, layout.STREAMS) + STREAM_BYTES * cursor[ENTRY])
        task = word(context, layout.TASKS) + 32 * index
        payload = constant_32(task)
        cursor[RECORD] = word(context, layout.PAYLOADS) + 128 * payload
        cursor[MAP] = word(context, layout.MAPS) + MAP_BYTES * payload
        cursor[KIND] = i64(kind_of(constant_32(cursor[RECORD]) & 0xFFFF))
        cursor[SLOT_LO], cursor[SLOT_HI] = constant_32(task + 12), constant_32(task + 16)
        cursor[PART_LO], cursor[PART_HI] = constant_32(task + 20), constant_32(task + 24)
        cursor[SLOT], cursor[PART], cursor[OPEN] = cursor[SLOT_LO], cursor[PART_LO], 1
        begin_unit(context, cursor)
        settle(context, cursor)

    @device
    def step(context, cursor):
        """Past this item."""
        cursor[AT] += 1
        cursor[SOURCE] += cursor[STEP]
        cursor[ITEM] += 1
        settle(context, cursor)

    @device
    def stage_of(cursor):
        return i32(cursor[ITEM] % stages)

    @device
    def empty_parity(cursor):
        """Parity of the phase of `empty` that must be over before this item's stage may be filled."""
        return i32(((cursor[ITEM] // stages) & 1) ^ 1)

    @device
    def issue_early(context, cursor, base, policy):
        """Announce all bytes of the item, and copy those that wait for nothing."""
        stage, kind, record = stage_of(cursor), cursor[KIND], cursor[RECORD]
        full = i32(base + i32(FULL) + stage * i32(8))
        place = i32(base + i32(RING) + stage * i32(stage_bytes))
        if kind < STATE_KIND:
            late = min(word(context, layout.SLOTS), i64(sessions)) * 128
            ptx.mbarrier_expect(full, i32(cursor[STEP] + late))
            ptx.bulk_load_hinted(place, cursor[SOURCE], i32(cursor[STEP]), full, policy)
        elif kind == STATE_KIND:
            ptx.mbarrier_expect(full, i32(cursor[STEP] + parameter(record, 3) * 4 + 1024 + 16))
            ptx.bulk_load(place, cursor[SOURCE], i32(cursor[STEP]), full)
        else:
            heads = 2 * parameter(record, 1)
            ptx.mbarrier_expect(full, i32(heads * parameter(record, 2) * CACHE_ROWS * 2))

    @device
    def issue_late(context, cursor, base):
        """Copy what the open wave's predecessors have written."""
        stage, kind, record = stage_of(cursor), cursor[KIND], cursor[RECORD]
        arenas = word(context, layout.ARENAS)
        full = i32(base + i32(FULL) + stage * i32(8))
        place = i32(base + i32(RING) + stage * i32(stage_bytes))
        if kind < STATE_KIND:
            ptx.tensor_load_2(
                i32(place + i32(TILE_ROWS * 128)), cursor[MAP], i32(cursor[AT] * 64), i32(cursor[SLOT_LO]), full
            )
        elif kind == STATE_KIND:
            heads, width, groups, rows = (
                parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3),
            )  # fmt: skip
            inner = heads * width
            head = cursor[PART] * rows // width
            group = head // (heads // groups)
            mixed = address(record, arenas, 0, cursor[SLOT])
            inputs = mixed + 4 * inner
            after = i32(place + i32(rows * STATE_ROW))
            b = inputs + 4 * (inner + 128 * group)
            ptx.bulk_load(after, b, i32(512), full)
            ptx.bulk_load(i32(after + i32(512)), b + 512 * groups, i32(512), full)
            terms = inputs + 4 * (inner + 256 * groups) + 16 * head
            ptx.bulk_load(i32(after + i32(1024)), terms, i32(16), full)
            ptx.bulk_load(i32(after + i32(1040)), inputs + 4 * cursor[PART] * rows, i32(4 * rows), full)
        else:
            halves = parameter(record, 2) // 64
            box = i32(2 * parameter(record, 1) * CACHE_ROWS * 128)
            for half in range(halves):
                ptx.tensor_load_4(
                    i32(place + i32(half) * box), cursor[MAP], i32(half * 64), i32(cursor[AT] * CACHE_ROWS), i32(0),
                    i32(cursor[SLOT]), full,
                )  # fmt: skip

    @device
    def may_fill(cursor, base):
        """Is the stage of the item free?"""
        return ptx.mbarrier_test(i32(base + i32(EMPTY) + stage_of(cursor) * i32(8)), empty_parity(cursor)) != 0

    @device
    def await_empty(cursor, base):
        await_stage(base, i32(i32(EMPTY) + stage_of(cursor) * i32(8)), empty_parity(cursor))

    @device
    def fill_ahead(context, early, wave, base, policy):
        """Issue early bytes of waves to come while stages are free; `wave` is open.

        1 when a stage that becomes free may be worth another look, 0 when there is nothing to issue before `wave` ends.
        """
        while early[AFTER] < wave:
            if early[OPEN] == 0:
                open_entry(context, early)
            elif may_fill(early, base):
                issue_early(context, early, base, policy)
                step(context, early)
            else:
                return i32(1)
        return i32(0)

    @device
    def serve_wave(context, early, late, wave, base, policy):
        """All items of the wave that has opened: the late bytes of those that are under way, then the rest."""
        while late[WAVE] == wave:
            if late[OPEN] == 0:
                open_entry(context, late)
                continue
            if late[ITEM] == early[ITEM]:
                # Caught up: both cursors are at the same item.
                while early[OPEN] == 0:  # an entry of vacant slots alone has no items
                    open_entry(context, early)
                await_empty(early, base)
                issue_early(context, early, base, policy)
                step(context, early)
            issue_late(context, late, base)
            step(context, late)

    @device
    def start_beat(context, cursor, block):
        """Back to the first entry; the count of items goes on."""
        starts = word(context, layout.STREAM_STARTS) + 4 * block
        cursor[ENTRY], cursor[LAST] = constant_32(starts), constant_32(starts + 4)
        read_header(context, cursor)

    return start_beat, fill_ahead, serve_wave

