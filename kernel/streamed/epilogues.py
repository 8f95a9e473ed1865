"""What becomes of a product's results: the epilogues, eight results of rows row .. row + 7 of one session at a time.

Eight neighbouring rows are 16 or 32 bytes of whatever is written, and lie in one part of the result: every operator
that is the epilogue of a product has boundaries at multiples of 8.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cuda_library import activate_code, address, device, parameter, parameter_f32, present
from wpk.kernel.layout import TILE_ROWS
from wpk.ops.simd import ACTIVATIONS

i32, i64, f32 = np.int32, np.int64, np.float32
GROUP = 8  # rows of a weight that one thread's epilogue has
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
BF16_OUT = 1
TAP_PITCH = 4 * TILE_ROWS  # bytes between taps in a stage
RELU2 = ACTIVATIONS["relu2"]


@device
def silu(x):
    return x * ptx.reciprocal(f32(1.0) + ptx.exp2(-x * f32(LOG2E)))


@device
def store_8(place, v, policy):
    ptx.store_4_kept(place, v[0], v[1], v[2], v[3], policy)
    ptx.store_4_kept(place + 16, v[4], v[5], v[6], v[7], policy)


@device
def store_8_bf16(place, v, policy):
    ptx.store_4x32_kept(
        place, ptx.pack_bf16(v[0], v[1]), ptx.pack_bf16(v[2], v[3]), ptx.pack_bf16(v[4], v[5]),
        ptx.pack_bf16(v[6], v[7]), policy,
    )  # fmt: skip


@device
def bias_and_activation(record, arenas, row, code, v, staged):
    """Of `tiled_matmul` and `tf32_matmul`. code: the activation. staged: where the eight lie in shared memory."""
    if present(record, 2):
        bias = address(record, arenas, 2, i64(0)) + 4 * row
        for e in range(GROUP):
            v[e] += ptx.load_constant_f32(bias + 4 * e)
    if code == RELU2:
        for e in range(GROUP):
            positive = ptx.maximum(v[e], f32(0.0))
            v[e] = positive * positive
    elif code != 0:
        # One copy of the activations' code: through shared memory, because registers have no index.
        for e in range(GROUP):
            ptx.shared_store(i32(staged + i32(4 * e)), v[e])
        for e in range(ptx.renewed_32(i32(GROUP))):
            at = i32(staged + i32(4) * i32(e))
            ptx.shared_store(at, activate_code(code, ptx.shared_load(at)))
        for e in range(GROUP):
            v[e] = ptx.shared_load(i32(staged + i32(4 * e)))


@device
def store_matmul(record, arenas, slot, row, split, v, policy):
    """The results, or the partial sums of a column share."""
    place, rows = address(record, arenas, 4, slot), parameter(record, 0)
    if parameter(record, 5) == BF16_OUT:
        store_8_bf16(place + 2 * row, v, policy)
    else:
        store_8(place + 4 * (split * rows + row), v, policy)


@device
def store_frame(record, arenas, slot, frame, row, v):
    """A frame's results, plus the residual. Neither is small enough to be kept before all else."""
    at = 4 * (frame * parameter(record, 0) + row)
    if present(record, 3):
        residual = address(record, arenas, 3, slot) + at
        a, b, c, d = ptx.load_l2_4(residual)
        e, f, g, h = ptx.load_l2_4(residual + 16)
        v[0] += a
        v[1] += b
        v[2] += c
        v[3] += d
        v[4] += e
        v[5] += f
        v[6] += g
        v[7] += h
    place = address(record, arenas, 4, slot) + at
    ptx.store_4(place, v[0], v[1], v[2], v[3])
    ptx.store_4(place + 16, v[4], v[5], v[6], v[7])


@device
def finish_mamba2(record, arenas, slot, row, window, taps, v, policy):
    """Rows are z | x B C | dt: silu(z); the convolution's window and SiLU; dt, decay and D of each head.

    window: the three older rows of these channels in shared memory; taps: their taps and bias there.
    """
    inner, channels, heads = parameter(record, 3), parameter(record, 4), parameter(record, 5)
    mixed = address(record, arenas, 5, slot)
    constants = address(record, arenas, 3, i64(0))
    channel = row - inner
    if row < inner:
        for e in range(GROUP):
            v[e] = silu(v[e])
        store_8(mixed + 4 * row, v, policy)
    elif channel < channels:
        ring = address(record, arenas, 4, slot) + 2 * channel
        kept = cuda.local.array(4, types.int32)
        oldest = ptx.shared_load_4x32(window)
        middle = ptx.shared_load_4x32(i32(window + i32(2 * TILE_ROWS)))
        newest = ptx.shared_load_4x32(i32(window + i32(4 * TILE_ROWS)))
        for e in range(4):
            kept[e] = ptx.pack_bf16(v[2 * e], v[2 * e + 1])
        ptx.store_4x32_kept(ring, middle[0], middle[1], middle[2], middle[3], policy)
        ptx.store_4x32_kept(ring + 2 * channels, newest[0], newest[1], newest[2], newest[3], policy)
        ptx.store_4x32_kept(ring + 4 * channels, kept[0], kept[1], kept[2], kept[3], policy)
        for half in range(2):
            t0 = ptx.shared_load_4(i32(taps + i32(16 * half)))
            t1 = ptx.shared_load_4(i32(taps + i32(TAP_PITCH + 16 * half)))
            t2 = ptx.shared_load_4(i32(taps + i32(2 * TAP_PITCH + 16 * half)))
            t3 = ptx.shared_load_4(i32(taps + i32(3 * TAP_PITCH + 16 * half)))
            bias = ptx.shared_load_4(i32(taps + i32(4 * TAP_PITCH + 16 * half)))
            for e in range(2):
                at = 2 * half + e
                low = ptx.fma(ptx.low_bf16(oldest[at]), t0[2 * e], bias[2 * e])
                low = ptx.fma(ptx.low_bf16(middle[at]), t1[2 * e], low)
                low = ptx.fma(ptx.low_bf16(newest[at]), t2[2 * e], low)
                v[2 * at] = silu(ptx.fma(ptx.low_bf16(kept[at]), t3[2 * e], low))
                high = ptx.fma(ptx.high_bf16(oldest[at]), t0[2 * e + 1], bias[2 * e + 1])
                high = ptx.fma(ptx.high_bf16(middle[at]), t1[2 * e + 1], high)
                high = ptx.fma(ptx.high_bf16(newest[at]), t2[2 * e + 1], high)
                v[2 * at + 1] = silu(ptx.fma(ptx.high_bf16(kept[at]), t3[2 * e + 1], high))
        store_8(mixed + 4 * row, v, policy)
    else:
        head = channel - channels
        terms = constants + 4 * (5 * channels + head)
        out = mixed + 4 * (inner + channels + 4 * head)
        bias = cuda.local.array(GROUP, types.float32)
        rate = cuda.local.array(GROUP, types.float32)
        skip = cuda.local.array(GROUP, types.float32)
        for half in range(2):  # wide loads, all under way at once: one block has all heads, and all wait for it
            at = terms + 16 * half
            for values, place in ((bias, at), (rate, at + 4 * heads), (skip, at + 8 * heads)):
                a, b, c, d = ptx.load_constant_4(place)
                values[4 * half], values[4 * half + 1], values[4 * half + 2], values[4 * half + 3] = a, b, c, d
        for e in range(GROUP):
            x = v[e] + bias[e]
            step = x
            if x < f32(20.0):
                step = ptx.log2(f32(1.0) + ptx.exp2(x * f32(LOG2E))) * f32(LN2)
            ptx.store_4_kept(out + 16 * e, step, ptx.exp2(step * rate[e] * f32(LOG2E)), skip[e], f32(0.0), policy)


@device
def finish_qkv(record, arenas, slot, row, v, policy):
    """Rows are q | k | v: q scaled; k and v into the row of the cache at the session's position."""
    heads, groups, width = parameter(record, 2), parameter(record, 3), parameter(record, 4)
    queries = heads * width
    if row < queries:
        scale = parameter_f32(record, 8)
        for e in range(GROUP):
            v[e] *= scale
        store_8_bf16(address(record, arenas, 5, slot) + 2 * row, v, policy)
    else:
        position = i64(ptx.load_l2_32(address(record, arenas, 4, slot)))
        if position >= 0 and position < parameter(record, 5):
            cache = address(record, arenas, 3, slot)
            store_8_bf16(cache + 2 * (position * 2 * groups * width + row - queries), v, policy)
