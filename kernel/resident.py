"""The resident kernel: launched once, one block a multiprocessor, it runs a program beat after beat.

    block 0's producer waits for the host's input epoch                              } barrier
    all: inputs into device memory; block 0: the masks                               } barrier
    where there are slots to reset, all: the initial image into their state          } barrier
    all: the tasks of wave 0                                                         } barrier
    ...                                                                              } barrier
    block 0: outputs into host memory, time stamps, the output epoch

Every block takes part in every barrier: one counter that only grows, so a late block can't take a stale value for a
new one. One thread a block, the producer, polls it; the consumers wait in shared memory until the producer opens the
next wave. While it waits, the producer fills the ring with what later waves stream (`wpk.kernel.streamed`). The
counter also carries the end: `STOPPED` is a bit far above any count, set by whoever ends the kernel, and every wait
sees it at its next look. Waits within a beat are bounded by a budget of time; the wait for the next beat is bounded by
the host's heartbeat. Memory that blocks pass to each other is ordered by the counter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.control import END_NS, INPUT_EPOCH, OUTPUT_EPOCH, POISON, STALLED, START_NS
from wpk.kernel.cuda_library import _view_i64, block_body, device, shared_base, switch, word
from wpk.kernel.exchange import copy_masks, deliver_outputs, fetch_inputs, index_of_thread, reset_slots
from wpk.kernel.layout import (
    ACTIVE,
    AGENDA,
    AGENDA_BYTES,
    ARRIVED,
    BARRIERS,
    BUDGET_NS,
    BUFFER,
    CONTROL_PAGE,
    COUNTER,
    COUNTS,
    DONE,
    EMPTY,
    ENDED,
    FETCHED,
    FIRSTS,
    FULL,
    HEARTBEAT,
    HEARTBEAT_NS,
    KEPT_ORDERS,
    LATE_BLOCK,
    LOST,
    OPENED,
    ORDER_BYTES,
    ORDER_PART_HI,
    ORDER_PART_LO,
    ORDER_SLOT_HI,
    ORDER_SLOT_LO,
    ORDERS,
    SCRATCH,
    SCRATCH_BYTES,
    SEEN,
    SLOTS,
    STAMP,
    STAMPS,
    STARTED,
    STOPPED,
    STREAMED,
    SYNC,
    THREADS,
    TRACE,
    WAITING,
    WARPS,
    WATCH,
    WAVES,
    WORK,
    Shape,
)  # fmt: skip
from wpk.kernel.streamed.bodies import make_consume
from wpk.kernel.streamed.producer import BOTH, make_stream_wave, start_beat, start_kernel
from wpk.kernel.streamed.ring import NO_ITEMS, await_stage, mark

i32 = np.int32
START, INPUT_WAVE, RESET_WAVE = -3, -2, -1  # what comes before wave 0 of a beat
POISON_STALLED = 3
LOOK_AT_HOST = 32  # barriers between two looks of block 0 at the host's poison word, a microsecond each
SPINS = 32  # polls of the counter between two readings of the clock, about 20 us
SIGNATURE = types.void(types.int64)


@device
def index_of_block():
    return np.int64(ptx.block_index())


# --- the end ------------------------------------------------------------------------------------------------------
@device
def stop(context):
    """Every wait of every block ends at its next look."""
    ptx.or_release_gpu(word(context, SYNC) + COUNTER, STOPPED)


@device
def report_stall(context, target, wave):
    """Tell the host which wave and which block: the first that has not arrived."""
    late, arrived = 0, word(context, SYNC) + ARRIVED
    for block in range(np.int64(ptx.block_count())):
        if ptx.load_relaxed_gpu(arrived + 8 * block) < target:
            late = block
            break
    ptx.store_relaxed_sys_32(word(context, WATCH) + LATE_BLOCK, np.int32(late + 1))
    ptx.store_relaxed_sys_32(word(context, CONTROL_PAGE) + STALLED, np.int32(wave + 1))
    ptx.fence_sys()
    ptx.store_relaxed_sys_32(word(context, CONTROL_PAGE) + POISON, np.int32(POISON_STALLED))
    stop(context)


# --- waits of the producer ----------------------------------------------------------------------------------------
@device
def await_host(context, seen):
    """The next input epoch; 0 when the kernel is to end: poisoned, or the host has not stirred for too long."""
    control, watch = word(context, CONTROL_PAGE), word(context, WATCH)
    spins, pulse, since = 0, np.int64(-1), np.int64(0)
    while True:
        epoch = ptx.load_acquire_sys(control + INPUT_EPOCH)
        if epoch != seen:
            return epoch
        spins += 1
        if spins % 16 == 0:
            if ptx.load_relaxed_sys_32(control + POISON) != 0:
                return np.int64(0)
            if spins % 256 == 0:
                now, found = ptx.global_timer(), ptx.load_relaxed_sys(watch + HEARTBEAT)
                if found != pulse:
                    pulse, since = found, now
                elif now - since > word(context, HEARTBEAT_NS):
                    ptx.store_relaxed_sys_32(watch + LOST, np.int32(1))
                    ptx.store_relaxed_sys_32(control + POISON, np.int32(POISON_STALLED))
                    return np.int64(0)


@device
def arrive_alone(context, target):
    """The producer's own arrival at a barrier that no consumer has work before."""
    sync = word(context, SYNC)
    ptx.add_release_gpu(sync + COUNTER, 1)
    ptx.store_relaxed_gpu(sync + ARRIVED + 8 * index_of_block(), target)


@device
def await_blocks(context, target, wave, idle, look):
    """Wait until the counter has reached `target`; 1 when the kernel is to end.

    idle: only block 0 bounds the wait. look: see meanwhile whether the host has poisoned the kernel.
    """
    counter, poison = word(context, SYNC) + COUNTER, word(context, CONTROL_PAGE) + POISON
    seen = np.int32(0)
    if look:
        seen = ptx.load_relaxed_sys_32(poison)  # under way while this thread waits
    spins, since = 0, np.int64(0)
    value = ptx.load_acquire_gpu(counter)
    while value < target:
        spins += 1
        if spins % SPINS == 0 and not idle:
            now = ptx.global_timer()
            if since == 0:
                since = now
            elif now - since > word(context, BUDGET_NS):
                report_stall(context, target, wave)
                return np.int32(1)
            if ptx.block_index() == 0:
                seen |= ptx.load_relaxed_sys_32(poison)
                if seen != 0:
                    break
        value = ptx.load_acquire_gpu(counter)
    if seen != 0:
        stop(context)
        return np.int32(1)
    return np.int32(1) if value >= STOPPED else np.int32(0)


@device
def open_wave(base):
    """Let the block's consumers go on."""
    ptx.mbarrier_arrive(i32(base + i32(OPENED)))


@device
def end_consumers(base):
    """Let them go on to the end: every wait of theirs looks at this word."""
    ptx.shared_store_32(i32(base + i32(ENDED)), i32(1))
    open_wave(base)


@device
def fetch_orders(context, base, wave, ran):
    """The block's orders of a wave into the half of the buffer that is free; `ran` counts the waves of all beats."""
    row = word(context, AGENDA) + AGENDA_BYTES * (word(context, WAVES) * index_of_block() + wave)
    first, many = ptx.load_constant(row), ptx.load_constant(row + 8)
    warm, size = ptx.load_constant(row + 16), i32(ptx.load_constant(row + 24))
    ptx.prefetch_line(row + AGENDA_BYTES)
    half = i32(ran & 1)
    count = i32(many)
    ptx.shared_store_32(i32(base + i32(COUNTS) + half * i32(4)), count)
    ptx.shared_store_32(i32(base + i32(FIRSTS) + half * i32(4)), i32(first))
    barrier = i32(base + i32(FETCHED) + half * i32(8))
    # A half without orders completes its phase as well: consumers count waves.
    kept = i32(min(count, i32(KEPT_ORDERS)) * i32(ORDER_BYTES))
    ptx.mbarrier_expect(barrier, kept)
    if count > 0:
        place = i32(base + i32(BUFFER) + half * i32(KEPT_ORDERS * ORDER_BYTES))
        ptx.bulk_load(place, word(context, ORDERS) + ORDER_BYTES * first, kept, barrier)
    if size > 0:
        ptx.prefetch_l2(warm, size)  # small weights, past which the large ones flow


# --- the consumers' side ------------------------------------------------------------------------------------------
@device
def arrive(context, base, target):
    """What this block wrote before, all blocks may read once the wave after it is open."""
    ptx.barrier()
    if ptx.thread_index() == 0:
        ptx.shared_store_32(i32(base + i32(WAITING)), i32(target))
        sync = word(context, SYNC)
        ptx.add_release_gpu(sync + COUNTER, 1)
        ptx.store_relaxed_gpu(sync + ARRIVED + 8 * index_of_block(), target)  # for the watchdog; nothing waits for it


@device
def await_open(base, parity):
    """Wait until the producer opens the next wave; true when the kernel is to end."""
    while ptx.mbarrier_try(i32(base + i32(OPENED)), parity) == 0:
        if ptx.shared_load_32(i32(base + i32(ENDED))) != 0:
            break
    return ptx.shared_load_32(i32(base + i32(ENDED))) != 0


# --- a beat -------------------------------------------------------------------------------------------------------
def make_wave(operators: Sequence[str], shape: Shape) -> Any:
    """The device function that runs a block's tasks of a wave, for these operators in the order of their opcodes.

    It takes and returns the consumers' place in the ring.
    """
    names = [name.partition("@")[0] for name in operators]
    plain = {c: block_body(n, shape) for c, n in enumerate(operators) if names[c] not in STREAMED}
    arguments = "record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch"
    dispatch = switch("dispatch", plain, arguments)
    consume = make_consume(names, shape)

    @device
    def run_order(record, context, scratch, base, ring):
        live, code = word(context, ACTIVE), np.int64(ptx.load_order_32(record)) & 0xFFFF
        slot_lo = np.int64(ptx.load_order_32(record + ORDER_SLOT_LO))
        slot_hi = np.int64(ptx.load_order_32(record + ORDER_SLOT_HI))
        part_lo = np.int64(ptx.load_order_32(record + ORDER_PART_LO))
        part_hi = np.int64(ptx.load_order_32(record + ORDER_PART_HI))
        dispatch(code, record, 0, slot_lo, slot_hi, part_lo, part_hi, live, scratch)
        slots = word(context, SLOTS)
        return consume(code, record, 0, slot_lo, slot_hi, part_lo, part_hi, live, slots, base, ring)

    @device
    def run_wave(context, half, fetched, scratch, base, ring):
        """half: of the buffer that holds this wave's first orders. fetched: parity of its barrier's phase."""
        count = np.int64(ptx.shared_load_32(i32(base + i32(COUNTS) + half * i32(4))))
        kept = i32(base + i32(BUFFER) + half * i32(KEPT_ORDERS * ORDER_BYTES))
        first = word(context, ORDERS) + ORDER_BYTES * np.int64(
            ptx.shared_load_32(i32(base + i32(FIRSTS) + half * i32(4)))
        )
        if count > 0:
            await_stage(base, i32(i32(FETCHED) + half * i32(8)), fetched)
        for index in range(count):
            record = first + ORDER_BYTES * index
            if index < KEPT_ORDERS:
                record = ptx.generic_of_shared(i32(kept + i32(ORDER_BYTES) * i32(index)))
            ring = run_order(ptx.renewed(record), context, scratch, base, ring)
        return ring

    return run_wave


@device
def start_stamps(context, wave, base):
    """Where the moments of this wave are to go, for `mark`."""
    if ptx.thread_index() == 0:
        place = word(context, TRACE)
        if place != 0:
            place += 8 * STAMPS * (wave * np.int64(ptx.block_count()) + index_of_block())
        ptx.shared_store_32(i32(base + i32(STAMP)), i32(place))
        ptx.shared_store_32(i32(base + i32(STAMP + 4)), i32(place >> 32))


def make_consumer(operators: Sequence[str], shape: Shape) -> Any:
    """What the consumer threads of a block do."""
    run_wave = make_wave(operators, shape)

    @device
    def consumer(context, base):
        block, blocks, thread = index_of_block(), np.int64(ptx.block_count()), index_of_thread()
        scratch = word(context, SCRATCH) + (block * THREADS + thread) * word(context, SCRATCH_BYTES)
        # Work that all blocks share is dealt out by warps, so that little work is spread over many blocks.
        everyone, all_threads = ((thread >> 5) * blocks + block) * 32 + (thread & 31), blocks * THREADS
        control, waves = word(context, CONTROL_PAGE), word(context, WAVES)
        target, ring, parity = np.int64(0), np.int64(NO_ITEMS), i32(0)
        ran = np.int64(0)  # waves of all beats
        while True:
            target += blocks
            ended = await_open(base, parity)
            parity = i32(parity ^ i32(1))
            if ended:
                return
            started = ptx.global_timer()
            if block == 0:
                copy_masks(context)
            fetch_inputs(context, everyone, all_threads)
            target += blocks
            arrive(context, base, target)
            ended = await_open(base, parity)
            parity = i32(parity ^ i32(1))
            if ended:
                return
            work = _view_i64(word(context, SYNC) + WORK, 1)[0]
            if work & 2 != 0:
                reset_slots(context, everyone, all_threads)
                target += blocks
                arrive(context, base, target)
                ended = await_open(base, parity)
                parity = i32(parity ^ i32(1))
                if ended:
                    return
            if work & 1 == 0:
                ran += 1
            else:
                for wave in range(waves):
                    start_stamps(context, wave, base)
                    mark(base, STARTED)
                    ring = run_wave(context, i32(ran & 1), i32((ran >> 1) & 1), scratch, base, ring)
                    ran += 1
                    mark(base, DONE)
                    target += blocks
                    arrive(context, base, target)
                    ended = await_open(base, parity)
                    parity = i32(parity ^ i32(1))
                    if ended:
                        return
            if block == 0:
                if work & 1 != 0:
                    deliver_outputs(context, thread, THREADS)
                ptx.barrier()
                if thread == 0:
                    ptx.store_relaxed_sys(control + START_NS, started)
                    ptx.store_relaxed_sys(control + END_NS, ptx.global_timer())
                    low = np.int64(ptx.shared_load_32(i32(base + i32(SEEN))))
                    high = np.int64(ptx.shared_load_32(i32(base + i32(SEEN + 4))))
                    ptx.store_release_sys(control + OUTPUT_EPOCH, (low & 0xFFFFFFFF) | high << 32)

    return consumer


def make_producer_loop(shape: Shape) -> Any:
    """What the producer thread of a block does."""
    streams = shape.ring_bytes > 0
    stream_wave = make_stream_wave(fetch_orders)

    @device
    def producer(context, base):
        block, blocks = index_of_block(), np.int64(ptx.block_count())
        waves = word(context, WAVES)
        target, seen, ran, work = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        # In shared memory: they are indexed, and local memory would be evicted by what streams past.
        cursors = cuda.shared.array(BOTH, types.int64)
        start_kernel(cursors)
        policy = ptx.evict_first()
        while True:
            if block == 0:
                seen = await_host(context, seen)
                if seen == 0:
                    stop(context)
                    end_consumers(base)
                    return
                ptx.shared_store_32(i32(base + i32(SEEN)), i32(seen))
                ptx.shared_store_32(i32(base + i32(SEEN + 4)), i32(seen >> 32))
            arrive_alone(context, target + blocks)
            wave = np.int64(START)
            while wave < waves:
                # Up to the barrier at the end of `wave`.
                target += blocks
                if streams and wave >= 0:
                    stream_wave(context, cursors, wave, base, policy, target, ran)
                look = block == 0 and wave % LOOK_AT_HOST == LOOK_AT_HOST - 1
                idle = wave == START and block != 0
                if await_blocks(context, target, max(wave, np.int64(0)), idle, look) != 0:
                    end_consumers(base)
                    return
                open_wave(base)
                if wave == INPUT_WAVE:
                    work = ptx.load_relaxed_gpu(word(context, SYNC) + WORK)
                wave += 1
                if wave == RESET_WAVE and work & 2 == 0:
                    wave = np.int64(0)
                if wave == 0:
                    if work & 1 == 0:
                        ran += 1  # wave 0's orders were fetched for nothing
                        break
                    if streams:
                        start_beat(context, cursors, block)
                if streams:
                    ptx.fence_async()
                if wave == INPUT_WAVE:
                    fetch_orders(context, base, np.int64(0), ran)
                elif wave >= 0 and wave < waves:
                    ran += 1
                    if not streams and wave + 1 < waves:
                        fetch_orders(context, base, wave + 1, ran)

    return producer


def make_kernel(operators: Sequence[str], shape: Shape) -> Callable[..., None]:
    """The kernel specialised to a program's operator table; its one argument is the address of the context."""
    consumer, producer = make_consumer(operators, shape), make_producer_loop(shape)
    barriers = BARRIERS if shape.ring_bytes else 0

    def resident(context):
        thread, base = ptx.thread_index(), shared_base()
        if thread == 0:
            for i in range(barriers):
                ptx.mbarrier_init(i32(base + i32(FULL + 8 * i)), i32(1))
                ptx.mbarrier_init(i32(base + i32(EMPTY + 8 * i)), i32(WARPS))
            ptx.mbarrier_init(i32(base + i32(OPENED)), i32(1))
            for half in range(2):
                ptx.mbarrier_init(i32(base + i32(FETCHED + 8 * half)), i32(1))
            ptx.shared_store_32(i32(base + i32(ENDED)), i32(0))
            ptx.fence_async()
        ptx.block_barrier()
        if thread >= THREADS:
            if thread == THREADS:
                producer(context, base)
        else:
            consumer(context, base)

    return resident
