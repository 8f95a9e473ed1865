"""What the resident kernel is told and where its shared words lie; read by host and kernel, no numba-cuda needed.

The *context* is an array of 64-bit words in device memory that is constant during a launch; its address is the
kernel's one argument. The *sync* page (device memory) holds what blocks share, the *watch* page (host memory, mapped)
what host and kernel tell each other beside the control record. Words that different parties write are on cache lines
of their own.

A block has THREADS consumer threads, which run the bodies, and one warp more, whose first thread is the *producer*: it
waits for the other blocks and for the host, and streams what streamed operators read through a ring in shared memory
(`Shape`). Each payload divides the ring into stages of its own size (`Stages`), so that as many bytes as there is room
for are under way whatever an item has: memory under load answers after two to three microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpk.ops.tiles import tile_sessions

THREADS = 256  # of a block, that run bodies
BLOCK_THREADS = THREADS + 32  # with the producer's warp
WARPS = THREADS // 32
LINE = 128  # bytes, the GPU's cache line
SCRATCH_WORDS = 64  # of a thread's scratch that a body which moves memory through it may take at a time

CONTEXT = (
    "control_page",  # addresses as the GPU sees them; host memory is mapped
    "watch",
    "sync",
    "orders",  # a record for each task, sorted by block and wave: see below
    "agenda",  # i64 [blocks][waves][4]: first order, orders, and a piece of the wave's small weights: address, bytes
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
    "streams",  # i64 [entries][STREAM_WORDS], block by block: what the producer streams, see below
    "stream_starts",  # i32 [blocks + 1]: a block's first entry
    "trace",  # i64 [waves][blocks][STAMPS]: moments of each wave of the last beat, ns; or 0
)
(
    CONTROL_PAGE, WATCH, SYNC, ORDERS, AGENDA, STATE, IO, HOST_IO, IMAGE, ACTIVE, RESET, INPUTS,
    OUTPUTS, SCRATCH, SCRATCH_BYTES, INPUT_COUNT, OUTPUT_COUNT, SLOTS, MASK_WORDS, SLAB, WAVES, BUDGET_NS,
    HEARTBEAT_NS, STREAMS, STREAM_STARTS, TRACE,
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
MAP_BYTES = 128
AGENDA_BYTES = 32

# An entry of the streams: a streamed task, or one unit of a product (a part; of `tf32_matmul` a part of the sessions
# of one tile), decoded as far as the program's bytes allow.
STREAM_WORDS = 16
STREAM_BYTES = 8 * STREAM_WORDS
(
    S_WAVE,  # that it belongs to
    S_AFTER,  # the wave whose end its early bytes wait for; -1: none
    S_KIND,  # and the division of the ring: kind | stages << 8 | bytes of a stage << 16
    S_RECORD,  # index of its order
    S_SLOT_LO,
    S_SLOT_HI,
    S_PART_LO,
    S_PART_HI,
    S_SOURCE,  # address of its first tile, or of slot 0's state
    S_STEP,  # bytes from item to item
    S_BYTES,  # late bytes of an item
    S_MAP,  # address of the tensor map
    S_AT,  # a product's first chunk,
    S_CHUNKS,  # the end of its chunks,
    S_WINDOWS,  # the items of windows after them,
    S_ROW,  # and the first row of the weight; of `tf32_matmul` the first frame
) = range(STREAM_WORDS)

# An order: a task with all that its body needs, so that nothing has to be looked up elsewhere.
ORDER_BYTES = 256
# The payload's 128 bytes come first; then the addresses of slot 0 of its operands, and of its tensor map.
ORDER_ADDRESSES, ORDER_MAP, ORDER_WINDOW = 128, 184, 208  # the window's map: of the convolution's ring
ORDER_SLOT_LO, ORDER_SLOT_HI, ORDER_PART_LO, ORDER_PART_HI = 192, 196, 200, 204  # i32
ORDER_STAGE_BYTES, ORDER_STAGES = 216, 220  # i32, the payload's division of the ring; 0 where it is not streamed


# Moments of a wave in a block: it opened, the first streamed bytes were there, the last were used, all was done.
STARTED, STREAMING, STREAMED_OUT, DONE = range(4)
STAMPS = 4


def sync_bytes(blocks: int) -> int:
    return ARRIVED + 8 * blocks


# --- shared memory ------------------------------------------------------------------------------------------------
PRODUCTS = ("tiled_matmul", "mamba2_projection", "qkv_projection", "argmax_projection", "tf32_matmul")
STREAMED = (*PRODUCTS, "mamba2_step", "attention_parts")  # operators whose operands go through the ring
KINDS = {name: kind for kind, name in enumerate(STREAMED)}
MATMUL, MAMBA2, QKV, ARGMAX, TF32, STATE_KIND, CACHE_KIND = range(7)
STATE_ROW = 512  # bytes of a row of 128 f32
CACHE_ROWS = 8  # rows of a cache in a stage
SHARED_LIMIT = 227 * 1024  # bytes that a block may have on compute capability 9.0
OWN_BYTES = 1024  # of them, for what the kernel itself declares: the producer's cursors
TILE_ROWS = 176  # rows of a weight in a stage, at most: 22 groups of 8
CHUNK_BYTES = 128  # of a row in a stage: 64 columns of bf16, or
TF32_COLUMNS = CHUNK_BYTES // 4  # of f32, of which tensor cores take the upper 19 bits
WINDOW_BYTES = 3 * TILE_ROWS * 2  # of a session
TAP_BYTES = 5 * TILE_ROWS * 4  # four taps and the bias of a convolution, f32
STAGE_UNIT = 1024  # bytes; a stage is a multiple: swizzles count rows from such an address
BARRIERS = 16  # of each kind, for items in turn: the most stages of any division

# From the start of shared memory, which is aligned to 1024 bytes.
FULL, EMPTY = 0, 128  # an mbarrier of 8 bytes for each stage
OPENED, ENDED = 256, 264  # the mbarrier that tells consumers that a wave may start; not 0: the kernel ends
SEEN = 272  # u64, block 0: the epoch of this beat
COUNTS = 288  # i32 [2]: orders of the wave, in the half of the buffer that its parity says
FIRSTS = 296  # i32 [2]: index of the first of them
FETCHED = 304  # two mbarriers: that half of the buffer is there
REDUCTION = 512  # 512 bytes for sums over a block
FACTORS = 1024  # f32 of each session of a product's tile
WAITING = 328  # u32: the low half of the counter's value that the block's consumers wait for
STAMP = 320  # u64: where the moments of the present wave go; or 0
BUFFER = 2048  # the next waves' orders, two halves
KEPT_ORDERS = 2  # of a wave; what more there are is read from global memory
WORKSPACE_BYTES = 40 * 1024  # for bodies, at `Shape.workspace`
RING = BUFFER + 2 * KEPT_ORDERS * ORDER_BYTES


@dataclass(frozen=True)
class Stages:
    """A division of the ring: bytes of a stage, a multiple of `STAGE_UNIT`, and how many there are."""

    size: int
    count: int


@dataclass(frozen=True)
class Shape:
    """How a kernel uses its shared memory. sessions: of a product's tile, 64 or 128; 0 where nothing is streamed.

    The rows of a tile of `tf32_matmul` are as many, but frames of sessions.
    """

    sessions: int

    @property
    def staged_columns(self) -> int:
        """Results of a session that are staged at a time, with room that keeps rows on different banks.

        A warp stores eight sessions at once: four of them lie side by side where this is 8 or 24 modulo 32.
        """
        return TILE_ROWS + 8 if self.sessions == 64 else TILE_ROWS // 2

    @property
    def staging_bytes(self) -> int:
        """Where a product's results lie between the tensor cores and the epilogue."""
        return self.sessions * self.staged_columns * 4

    @property
    def ring_bytes(self) -> int:
        if not self.sessions:
            return 0
        room = SHARED_LIMIT - 1024 - OWN_BYTES - RING - self.staging_bytes  # 1024: to align it all
        return room // STAGE_UNIT * STAGE_UNIT

    def stages(self, size: int) -> Stages:
        """The ring divided for items of at most so many bytes."""
        whole = -(-size // STAGE_UNIT) * STAGE_UNIT
        return Stages(whole, min(BARRIERS, self.ring_bytes // whole))

    @property
    def staging(self) -> int:
        return RING + self.ring_bytes

    @property
    def workspace(self) -> int:
        """Where the threads of a block keep WORKSPACE_BYTES of what they work at together, in any body but a product.

        Nothing stays there from body to body: whoever writes first waits for the block's threads before.
        """
        return self.staging

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory to ask for: always more than half of what there is, so that no two blocks share."""
        return max(120 * 1024, 1024 + self.staging + self.staging_bytes)


PLAIN = Shape(0)  # of kernels that stream nothing


def shape_of(operators: Sequence[str], slots: int) -> Shape:
    """The shape for a program's operators (`name@version`) and slots."""
    streamed = any(name.partition("@")[0] in STREAMED for name in operators)
    return Shape(tile_sessions(slots) if streamed else 0)
