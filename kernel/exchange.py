"""What passes between host and kernel around a beat: masks, initial images, inputs and outputs."""

from __future__ import annotations

import numpy as np

from wpk.kernel import ptx
from wpk.kernel.control import CONTROL
from wpk.kernel.cuda_library import _view_i64, device, word
from wpk.kernel.layout import (
    ACTIVE,
    CONTROL_PAGE,
    COPY_BYTES,
    HOST_IO,
    IMAGE,
    INPUT_COUNT,
    INPUTS,
    IO,
    MASK_WORDS,
    OUTPUT_COUNT,
    OUTPUTS,
    RESET,
    SLAB,
    SLOTS,
    STATE,
    SYNC,
    THREADS,
    TRANSFER_BYTES,
    WORK,
)

MASKS = CONTROL.itemsize


@device
def index_of_thread():
    return np.int64(ptx.thread_index())


@device
def copy_masks(context):
    """Block 0: the host's masks into device memory, and whether any slot is live or to be reset."""
    masks = word(context, CONTROL_PAGE) + MASKS
    words = word(context, MASK_WORDS)
    active, reset = np.int32(0), np.int32(0)
    for i in range(index_of_thread(), words, THREADS):
        live, renewed = ptx.load_relaxed_sys(masks + 8 * i), ptx.load_relaxed_sys(masks + 8 * (words + i))
        _view_i64(word(context, ACTIVE) + 8 * i, 1)[0] = live
        _view_i64(word(context, RESET) + 8 * i, 1)[0] = renewed
        active |= np.int32(live != 0)
        reset |= np.int32(renewed != 0)
    anyone, renew = ptx.barrier_or(active), ptx.barrier_or(reset)
    if ptx.thread_index() == 0:
        _view_i64(word(context, SYNC) + WORK, 1)[0] = np.int64(anyone) | np.int64(renew) << 1


@device
def holds(mask, slot):
    return (_view_i64(mask + 8 * (slot >> 6), 1)[0] >> (slot & 63)) & 1 != 0


@device
def reset_slots(context, thread, threads):
    """The initial image into the state of every slot of the reset mask."""
    slab, image, state = word(context, SLAB), word(context, IMAGE), word(context, STATE)
    pieces = slab // 8
    for slot in range(word(context, SLOTS)):
        if holds(word(context, RESET), slot):
            source, target = _view_i64(image, pieces), _view_i64(state + slot * slab, pieces)
            for i in range(thread, pieces, threads):
                target[i] = source[i]


@device
def fetch_inputs(context, thread, threads):
    """The rows of every input port from host memory; those of slots without a session do no harm."""
    table, host, own = word(context, INPUTS), word(context, HOST_IO), word(context, IO)
    for port in range(word(context, INPUT_COUNT)):
        offset, stride = transfer_row(table, port)
        for at in range(thread * COPY_BYTES, word(context, SLOTS) * stride, threads * COPY_BYTES):
            ptx.copy_16(own + offset + at, host + offset + at)


@device
def deliver_outputs(context, thread, threads):
    """The rows of every output port, of live slots alone, into host memory."""
    table, host, own = word(context, OUTPUTS), word(context, HOST_IO), word(context, IO)
    for port in range(word(context, OUTPUT_COUNT)):
        offset, stride = transfer_row(table, port)
        for at in range(thread * COPY_BYTES, word(context, SLOTS) * stride, threads * COPY_BYTES):
            if holds(word(context, ACTIVE), at // stride):
                ptx.copy_16(host + offset + at, own + offset + at)


@device
def transfer_row(table, port):
    row = table + TRANSFER_BYTES * port
    return ptx.load_constant(row), ptx.load_constant(row + 8)
