"""What the resident kernel is told and where its shared words lie; read by host and kernel, no numba-cuda needed.

The *context* is an array of 64-bit words in device memory that is constant during a launch; its address is the
kernel's one argument. The *sync* page (device memory) holds what blocks share, the *watch* page (host memory, mapped)
what host and kernel tell each other beside the control record. Words that different parties write are on cache lines
of their own.
"""

from __future__ import annotations

THREADS = 256  # of a block
LINE = 128  # bytes, the GPU's cache line
SCRATCH_WORDS = 64  # of a thread's scratch that a body which moves memory through it may take at a time

CONTEXT = (
    "control_page",  # addresses as the GPU sees them; host memory is mapped
    "watch",
    "sync",
    "payloads",
    "tasks",  # sorted by block and wave
    "starts",  # i32 [blocks][waves + 2]: a block's first task of each wave, its end, and a word that is never used
    "arenas",  # table of four addresses
    "state",
    "io",
    "host_io",  # the same arena in host memory
    "image",
    "active",  # the masks' copies in device memory
    "reset",
    "inputs",  # tables of transfers: offset, stride of every port's value
    "outputs",
    "scratch",
    "scratch_bytes",  # of a thread
    "input_count",
    "output_count",
    "slots",
    "mask_words",
    "slab",  # bytes of a slot's state
    "waves",
    "budget_ns",  # the longest wait within a beat
    "heartbeat_ns",  # the longest that the host may not stir
)
(
    CONTROL_PAGE, WATCH, SYNC, PAYLOADS, TASKS, STARTS, ARENAS, STATE, IO, HOST_IO, IMAGE, ACTIVE, RESET, INPUTS,
    OUTPUTS, SCRATCH, SCRATCH_BYTES, INPUT_COUNT, OUTPUT_COUNT, SLOTS, MASK_WORDS, SLAB, WAVES, BUDGET_NS,
    HEARTBEAT_NS,
) = range(len(CONTEXT))  # fmt: skip

# Sync page.
COUNTER = 0  # arrivals at all barriers so far, or with the bit STOPPED
WORK = LINE  # of the present beat: bit 0 a slot is live, bit 1 a slot is to be reset
ARRIVED = 2 * LINE  # for each block, the counter's value that its last barrier waits for
STOPPED = 1 << 62

# Watch page.
HEARTBEAT = 0  # u64, a counter that the host keeps moving
LATE_BLOCK = LINE  # u32, 1 + block that a stalled wait missed
LOST = LINE + 4  # u32, 1: the heartbeat stopped, so the kernel did
WATCH_BYTES = 2 * LINE

TRANSFER_BYTES = 16  # a row of a table of transfers
COPY_BYTES = 16  # moved at a time between host and device memory


def sync_bytes(blocks: int) -> int:
    return ARRIVED + 8 * blocks
