"""Products by tensor cores, each with the epilogue of its operator.

Sessions are the rows (m) of the instruction, rows of the weight its columns (n): a stage holds up to 176 weight rows x
64 columns (`TILE_ROWS`, packed by `wpk.ops.tiles`) and the sessions' activations of these 64 columns. With at most 64
sessions the two warpgroups of a block share the weight rows; with more they share the sessions. Results go through
shared memory to the epilogue, where a thread has 8 rows of one session: wide loads and stores, and a rolled loop.
All this is of bf16; in `tf32_matmul` frames of sessions take the place of sessions (`wpk.kernel.streamed.frames`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.blockwise.partials import better
from wpk.kernel.cuda_library import address, device, parameter, parameter_f32, present
from wpk.kernel.layout import (
    ARGMAX,
    CHUNK_BYTES,
    FACTORS,
    MAMBA2,
    MATMUL,
    QKV,
    RING,
    STREAMED_OUT,
    STREAMING,
    TF32,
    TF32_COLUMNS,
    THREADS,
    TILE_ROWS,
    WINDOW_BYTES,
    Shape,
)
from wpk.kernel.streamed.epilogues import (
    GROUP,
    bias_and_activation,
    finish_mamba2,
    finish_qkv,
    store_frame,
    store_matmul,
)
from wpk.kernel.streamed.frames import (
    DESCRIPTOR,
    boxed_frames,
    frame_pieces,
    frame_range,
    make_multiply_frames,
    unit_sessions,
)
from wpk.kernel.streamed.ring import (
    activation_bytes,
    await_stage,
    empty_barrier,
    full_barrier,
    left_at,
    mark,
    next_place,
    ring_end,
    stage_after,
    stage_bytes,
    turn_of,
    window_box,
)

i32, i64, f32 = np.int32, np.int64, np.float32
FACTORS_AT = 8  # chunk of a phase during which the norms' factors are computed
HALF = TILE_ROWS // 2


# --- what the payload says ----------------------------------------------------------------------------------------
@device
def product_shape(kind, record):
    """Groups of 8 rows, chunks, row shares, column shares; of `tf32_matmul` pieces of the frames instead of these."""
    if kind == TF32:
        chunks = i32(i32(parameter(record, 1) + (TF32_COLUMNS - 1)) >> i32(5))
        return i32(parameter(record, 0) >> 3), chunks, i32(parameter(record, 2)), frame_pieces(record)
    if kind == QKV:
        rows = (parameter(record, 2) + 2 * parameter(record, 3)) * parameter(record, 4)
        return i32(rows >> 3), i32((parameter(record, 0) + 63) >> 6), i32(parameter(record, 1)), i32(1)
    splits = i32(1)
    if kind == MATMUL:
        splits = i32(max(i64(1), parameter(record, 3)))
    return (
        i32(parameter(record, 0) >> 3), i32((parameter(record, 1) + 63) >> 6), i32(parameter(record, 2)), splits,
    )  # fmt: skip


@device
def part_range(kind, record, part):
    """First group, groups, first chunk, chunks and column share, or piece of the frames, of a part."""
    groups, chunks, shares, splits = product_shape(kind, record)
    share = ptx.quotient(i32(part), splits)
    split = i32(i32(part) - share * splits)
    first = ptx.quotient(i32(groups * share), shares)
    last = ptx.quotient(i32(groups * i32(share + i32(1))), shares)
    start = ptx.quotient(i32(chunks * split), splits)
    stop = ptx.quotient(i32(chunks * i32(split + i32(1))), splits)
    if kind == TF32:
        start, stop = i32(0), chunks
    return first, i32(last - first), start, i32(stop - start), split


@device
def window_items(kind, record, first, groups, slots, sessions):
    """Stages that bring the convolution's windows of a part's rows, `sessions` in each; 0 where it has no such rows."""
    if kind != MAMBA2:
        return i64(0)
    inner, channels = i32(parameter(record, 3)), i32(parameter(record, 4))
    row = i32(first * i32(GROUP))
    if i32(row + groups * i32(GROUP)) <= inner or row >= i32(inner + channels):
        return i64(0)
    return i64(ptx.quotient(i32(i32(slots) + i32(sessions - 1)), i32(sessions)))


@device
def norm_terms(kind, record):
    """Operand of the sums of squares, how many there are (0: no norm), width of the normed row, epsilon."""
    if kind == MATMUL:
        count = parameter(record, 6)
        if not present(record, 3):
            count = i64(0)
        return 3, count, parameter(record, 1), parameter_f32(record, 7)
    if kind == MAMBA2:
        return 2, parameter(record, 6), parameter(record, 1), parameter_f32(record, 7)
    if kind == QKV:
        return 2, parameter(record, 6), parameter(record, 0), parameter_f32(record, 7)
    count = parameter(record, 3)
    if kind == TF32 or not present(record, 2):
        count = i64(0)
    return 2, count, parameter(record, 1), parameter_f32(record, 4)


# --- norms --------------------------------------------------------------------------------------------------------
@device
def write_factors(operand, count, width, epsilon, record, arenas, slot_lo, slots, base, rounds):
    """1 / sqrt(mean square + epsilon) of every session, by four threads each, into shared memory."""
    thread = i32(ptx.thread_index())
    for r in range(rounds):
        session = i64((thread + i32(r * THREADS)) >> i32(2))
        held = min(session, slots - 1)
        row = address(record, arenas, operand, slot_lo + held)
        total = f32(0.0)
        for first in range(0, count, 16):
            for e in range(4):
                at = first + 4 * e + i64(thread & i32(3))
                square = ptx.load_l2(row + 4 * min(at, count - 1))
                total += square if at < count else f32(0.0)
        total += ptx.shuffle_xor(total, i32(1))
        total += ptx.shuffle_xor(total, i32(2))
        if (thread & i32(3)) == 0 and session < slots:
            ptx.shared_store(
                i32(base + i32(FACTORS) + i32(session) * i32(4)), ptx.inverse_root(total / f32(width) + epsilon)
            )


# --- the consumer -------------------------------------------------------------------------------------------------
def make_stage_results(count: int, first: int, pitch: int) -> Any:
    """A device function that puts `count` accumulators from `first` on into shared memory, scaled, 8 columns apart.

    Written out as text: a rolled loop would keep the accumulators in local memory.
    """
    lines = ["def stage_results(accumulators, place, factor_low, factor_high):"]
    for j in range(count // 4):
        a = first + 4 * j
        lines += [
            f"    store(i32(place + {32 * j}), accumulators[{a}] * factor_low, accumulators[{a + 1}] * factor_low)",
            f"    store(i32(place + {8 * pitch + 32 * j}), accumulators[{a + 2}] * factor_high, "
            f"accumulators[{a + 3}] * factor_high)",
        ]
    space: dict[str, Any] = {"store": ptx.shared_store_2, "i32": i32}
    exec("\n".join(lines), space)
    return device(space["stage_results"])


def make_best_of(count: int) -> Any:
    """A device function: the largest accumulator of each of a thread's two sessions, and its row; lowest row first."""
    lines = ["def best_of(accumulators, factor_low, factor_high, row, rows):", "    b0 = b1 = f32(-3.4e38)"]
    lines += ["    i0 = i1 = row"]  # of nothing but NaN the first row wins
    for j in range(count // 4):
        lines += [f"    if i32({8 * j}) < rows:"]
        for e in range(4):
            which, factor = e // 2, ("factor_low", "factor_high")[e // 2]
            lines += [
                f"        x = accumulators[{4 * j + e}] * {factor}",
                f"        if x > b{which}:",
                f"            b{which} = x",
                f"            i{which} = i32(row + i32({8 * j + e % 2}))",
            ]
    lines += ["    return b0, i0, b1, i1"]
    space: dict[str, Any] = {"i32": i32, "f32": f32}
    exec("\n".join(lines), space)
    return device(space["best_of"])


def make_consume(shape: Shape, kinds: frozenset[int]) -> Any:
    """The device function that computes a task of a product, for the kinds that a program has."""
    wide = shape.sessions == 128
    columns = TILE_ROWS if wide else HALF  # of one wgmma
    count = columns // 2
    wgmma, zeros = ptx.make_wgmma(columns), ptx.make_zeros(count)
    pitch = 4 * shape.staged_columns  # bytes from session to session in the staging memory
    rounds = 2 if wide else 1
    per_round = count // rounds
    stage_low = make_stage_results(per_round, 0, pitch)
    stage_high = make_stage_results(per_round, per_round if wide else 0, pitch)
    best_of = make_best_of(count)
    staging = shape.staging
    factor_rounds = shape.sessions * 4 // THREADS
    sessions = shape.sessions
    has_matmul, has_mamba2, has_qkv, has_argmax, has_tf32 = (k in kinds for k in (MATMUL, MAMBA2, QKV, ARGMAX, TF32))
    multiply_frames = make_multiply_frames(shape)

    @device
    def finish(
        kind,
        record,
        arenas,
        slot_lo,
        first,
        start,
        groups,
        split,
        sessions,
        windows,
        box,
        size,
        end,
        thread,
        base,
        policy,
    ):
        """The epilogue of the staged results of `sessions`; windows: address of the first `box` of their windows.

        Of `tf32_matmul`, sessions are frames of the sessions from slot_lo on, and split is the piece of the frames.
        """
        v = cuda.local.array(GROUP, types.float32)
        frames_of = has_tf32 and kind == TF32
        first_frame, frames = i32(0), i32(1)
        if frames_of:
            first_frame, frames = frame_range(record, i32(split))
        ring = i32(base + i32(RING))
        for unit in range(thread, i32(sessions * groups), i32(THREADS)):
            session = ptx.quotient(i32(unit), groups)
            column = i32(i32(unit) - session * groups)
            at = i32(base + i32(staging) + session * i32(pitch) + column * i32(32))
            left, right = ptx.shared_load_4(at), ptx.shared_load_4(i32(at + i32(16)))
            for e in range(4):
                v[e] = left[e]
                v[4 + e] = right[e]
            group = i32(column + (start >> i32(3)))
            row = i64(i32(i32(first + group) * i32(GROUP)))
            slot = slot_lo + i64(session)
            if has_mamba2 and kind == MAMBA2:
                turn = ptx.quotient(session, box)
                window = i32(windows + turn * size)
                if window >= end:
                    window = i32(window - end + ring)
                window = i32(window + i32(session - turn * box) * i32(WINDOW_BYTES) + group * i32(2 * GROUP))
                taps = i32(windows + box * i32(WINDOW_BYTES) + group * i32(4 * GROUP))
                finish_mamba2(record, arenas, slot, row, window, taps, v, policy)
            elif has_qkv and kind == QKV:
                finish_qkv(record, arenas, slot, row, v, policy)
            elif has_matmul or has_tf32:
                code = parameter(record, 6) if frames_of else parameter(record, 4)
                bias_and_activation(record, arenas, row, code, v, at)
                if frames_of:
                    own = ptx.quotient(session, frames)
                    frame = i64(i32(first_frame + session - own * frames))
                    store_frame(record, arenas, slot_lo + i64(own), frame, row, v)
                elif has_matmul:
                    store_matmul(record, arenas, slot, row, split, v, policy)

    @device
    def consume(kind, record, arenas, slot_lo, slot_hi, part_lo, part_hi, all_slots, base, ring):
        """`ring`: the consumers' place in it; the new one is returned."""
        slots = slot_hi - slot_lo
        operand, squares, width, epsilon = norm_terms(kind, record)
        thread = i32(ptx.thread_index())
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        group = i32(warp >> i32(2))  # warpgroup
        # Sessions of this thread's accumulators.
        low = i32((warp & i32(3)) * i32(16) + (lane >> i32(2)))
        if wide:
            low = i32(low + group * i32(64))
        high = i32(low + i32(8))
        pair = i32((lane & i32(3)) * i32(2))
        factor_low, factor_high = f32(1.0), f32(1.0)
        fresh = squares > 0
        boxed = i32(min(all_slots, sessions))  # rows of the activations' box
        if has_tf32 and kind == TF32:
            boxed = boxed_frames(record, i32(all_slots))
        item, place, size, end = i32(ring), next_place(ring, base), stage_bytes(ring), ring_end(record, base)
        b_offset = i32(0) if wide else i32(group * i32(HALF * CHUNK_BYTES))
        a_offset = i32(size - activation_bytes(boxed)) + (i32(group * i32(64 * CHUNK_BYTES)) if wide else i32(0))
        policy = ptx.evict_last()
        # Sessions that are multiplied together: all of the task, but for `tf32_matmul`.
        each, tiles = i32(slots), i32(1)
        if has_tf32 and kind == TF32:
            each = unit_sessions(record)
            tiles = ptx.quotient(i32(i32(slots) + each - i32(1)), each)
        for unit in range(i32(i32(part_hi - part_lo) * tiles)):
            part = part_lo + i64(ptx.quotient(i32(unit), tiles))
            first, groups, _, chunks, split = part_range(kind, record, part)
            rows = i32(groups * i32(GROUP))
            accumulators = zeros()
            # First slot, and how many sessions, or frames, the epilogue has.
            own_lo, held = slot_lo, i32(slots)
            if has_tf32 and kind == TF32:
                skipped = i32(i32(i32(unit) - ptx.quotient(i32(unit), tiles) * tiles) * each)
                own_lo = slot_lo + i64(skipped)
                held = i32(min(i32(i32(slots) - skipped), each) * frame_range(record, split)[1])
                needed = i32(group * i32(64)) < held if wide else i32(group * i32(HALF)) < rows
                accumulators, item, place = multiply_frames(
                    accumulators, chunks, item, place, size, end, needed, a_offset, b_offset, lane, base
                )  # fmt: skip
            else:
                # Away from the start of the phase: the ring is full then, and whoever waits stops the stream.
                mid = min(chunks - 1, FACTORS_AT)
                for chunk in range(chunks):
                    await_stage(base, full_barrier(item), turn_of(item))
                    if chunk == 0:
                        mark(base, STREAMING)
                    if fresh and chunk == mid:
                        write_factors(
                            operand, squares, width, epsilon, record, arenas, slot_lo, slots, base, factor_rounds
                        )  # fmt: skip
                    accumulators = wgmma(
                        accumulators,
                        i64(DESCRIPTOR) | i64(i32(place + a_offset) >> i32(4)),
                        i64(DESCRIPTOR) | i64(i32(place + b_offset) >> i32(4)),
                    )
                    if lane == 0:
                        ptx.mbarrier_arrive(i32(base + empty_barrier(item)))
                    item = i32(item + i32(1))
                    place = stage_after(place, size, end, base)
            mark(base, STREAMED_OUT)
            windows, box = i64(0), i32(1)
            if has_mamba2:
                box = window_box(boxed, size)
                windows = window_items(kind, record, first, groups, slots, box)
            if fresh:
                fresh = False
                ptx.barrier()
                factor_low = ptx.shared_load(i32(base + i32(FACTORS) + low * i32(4)))
                factor_high = ptx.shared_load(i32(base + i32(FACTORS) + high * i32(4)))
            if has_argmax and kind == ARGMAX:
                start = i32(0) if wide else i32(group * i32(HALF))
                b0, i0, b1, i1 = best_of(
                    accumulators, factor_low, factor_high, i32(first * i32(GROUP) + start + pair), i32(rows - start)
                )
                for o in (1, 2):
                    v, i = ptx.shuffle_xor(b0, i32(o)), ptx.shuffle_xor_32(i0, i32(o))
                    if better(b0, i0, v, i):
                        b0, i0 = v, i
                    v, i = ptx.shuffle_xor(b1, i32(o)), ptx.shuffle_xor_32(i1, i32(o))
                    if better(b1, i1, v, i):
                        b1, i1 = v, i
                # The two warpgroups have other rows of the same sessions, or other sessions.
                found = i32(base + i32(staging))
                ptx.barrier()
                if pair == 0:
                    column = i32(0) if wide else group
                    at = i32(found + (low * i32(2) + column) * i32(8))
                    ptx.shared_store_2(at, b0, ptx.float_of_bits(i0))
                    at = i32(found + (high * i32(2) + column) * i32(8))
                    ptx.shared_store_2(at, b1, ptx.float_of_bits(i1))
                ptx.barrier()
                if i64(thread) < slots:
                    at = i32(found + thread * i32(16))
                    v, i = ptx.shared_load(at), ptx.shared_load_32(i32(at + i32(4)))
                    if not wide:
                        w, k = ptx.shared_load(i32(at + i32(8))), ptx.shared_load_32(i32(at + i32(12)))
                        if better(v, i, w, k):
                            v, i = w, k
                    candidates = address(record, arenas, 3, slot_lo + i64(thread))
                    ptx.store_2x32(candidates + 8 * part, ptx.bits_of_float(v), i)
            else:
                for r in range(rounds):
                    ptx.barrier()  # the staging memory is free again
                    start = i32(r * HALF)
                    if wide:
                        out = i32(base + i32(staging) + low * i32(pitch) + pair * i32(4))
                        if r == 0:
                            stage_low(accumulators, out, factor_low, factor_high)
                        else:
                            stage_high(accumulators, out, factor_low, factor_high)
                    else:
                        out = i32(base + i32(staging) + low * i32(pitch) + (group * i32(HALF) + pair) * i32(4))
                        stage_low(accumulators, out, factor_low, factor_high)
                    ptx.barrier()
                    here = i32(groups)
                    if wide:
                        here = i32(min(max(i32(groups - i32(r * HALF // GROUP)), i32(0)), i32(HALF // GROUP)))
                    if r == 0:
                        for turn in range(windows):
                            await_stage(base, full_barrier(i32(item + i32(turn))), turn_of(i32(item + i32(turn))))
                    finish(
                        kind, record, arenas, own_lo, first, i32(start), here, i64(split), held, place, box, size, end,
                        thread, base, policy,
                    )  # fmt: skip
                if windows > 0:
                    ptx.warp_barrier()
                    for turn in range(windows):
                        if lane == 0:
                            ptx.mbarrier_arrive(i32(base + empty_barrier(i32(item + i32(turn)))))
                        place = stage_after(place, size, end, base)
                    item = i32(item + i32(windows))
        return left_at(ring, item, place, base)

    return consume
