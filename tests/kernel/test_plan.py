"""What a launch derives from a program, on small programs of which one can see what must come out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from wpk.ir.errors import ProgramError, TargetError
from wpk.ir.types import DType
from wpk.kernel import layout
from wpk.kernel.layout import (
    CACHE_KIND,
    MAMBA2,
    MAP_BYTES,
    MATMUL,
    ORDER_BYTES,
    PRODUCTS,
    QKV,
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
    STATE_KIND,
    STREAM_WORDS,
    TF32,
    Shape,
    Stages,
)
from wpk.kernel.plan import (
    WEIGHTS_ONLY,
    TensorMap,
    agenda_table,
    order_table,
    require_sizes,
    stages_of,
    stream_table,
    task_table,
    tensor_maps,
    warm_table,
    window_sessions,
)
from wpk.kernel.tile_order import CHUNK, tile_offset, tiled_bytes
from wpk.ops.payload import ABSENT, OPERANDS, PAYLOAD, Arena, Reference
from wpk.scheduler.program import ARENA_OF, NONE, PORT, TASK, USE, VALUE, Program, Role

SLOTS, BLOCKS = 4, 2
SHAPE = Shape(64)
BASES = (1 << 40, 2 << 40, 3 << 40, 4 << 40)  # of the arenas on a device
MAPS = 5 << 40

Chore = tuple[int, int, int, int, int]  # block, slots from, to, parts from, to


class Sketch:
    """A program written down value by value and phase by phase."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.slots, self.sizes = slots, dict.fromkeys(Arena, 0)
        self.values: list[tuple[Any, ...]] = []
        self.names: list[str] = []
        self.payloads: list[Any] = []
        self.uses: list[Any] = []
        self.tasks: list[tuple[int, ...]] = []
        self.operators: list[str] = []

    def value(self, name: str, role: Role, size: int) -> int:
        """A value of so many bytes a slot, in its arena behind those before it; every slot's on cache lines."""
        arena, stride = ARENA_OF[role], -(-size // 64) * 64
        offset = self.sizes[arena]
        self.sizes[arena] += stride * (1 if role is Role.WEIGHT else self.slots)
        self.values.append((arena, role, 0, 0, NONE, NONE, 0, offset, size, 0 if role is Role.WEIGHT else stride, 0))
        self.names.append(name)
        return len(self.values) - 1

    def phase(
        self, wave: int, name: str, operands: Sequence[int | None], parameters: Sequence[int], *chores: Chore
    ) -> None:
        """A payload over these values, in their order; None: absent."""
        operator = f"{name}@1"
        if operator not in self.operators:
            self.operators.append(operator)
        record, use = np.zeros((), PAYLOAD), np.zeros(OPERANDS, USE)
        record["opcode"], record["operands"] = self.operators.index(operator), len(operands)
        record["reference"] = ABSENT
        use["value"] = NONE
        for place, index in enumerate(operands):
            if index is not None:
                arena, _, _, _, _, _, _, offset, size, stride, _ = self.values[index]
                record["reference"][place] = Reference(arena, offset, stride).packed
                record["stride"][place] = stride
                use[place] = index, 0, size
        record["parameter"][: len(parameters)] = parameters
        payload = len(self.payloads)
        self.payloads.append(record)
        self.uses.append(use)
        self.tasks += [(payload, wave, *chore, 0) for chore in chores or [(0, 0, self.slots, 0, 1)]]

    def program(self) -> Program:
        tasks = np.array(sorted(self.tasks, key=lambda t: (t[1], t[2])), TASK)
        return Program(
            self.slots, BLOCKS, int(tasks["wave"].max()) + 1, 1, tuple(self.sizes.values()),  # type: ignore[arg-type]
            np.array(self.payloads, PAYLOAD), tasks, np.array(self.values, VALUE), np.array(self.uses, USE),
            np.zeros(0, PORT), tuple(self.operators), tuple(self.names), (),
            tuple(f"phase {i}" for i in range(len(self.payloads))),
        )  # fmt: skip


def hybrid(slots: int = SLOTS) -> Program:
    """Two Mamba-2 steps and an attention, as far as the plan looks: 8 waves.

    wave 0  norm of x into h                       block 0
    wave 1  projection of h: mixed, ring           blocks 0 and 1
    wave 2  step of the state by mixed: y          block 1
    wave 3  projection of y: q, cache              blocks 0 and 1
    wave 4  attention of q over the cache: sums    blocks 0 and 1
    wave 5  merge of the sums: z                   block 0
    wave 6  product of z: out; norm of x into h    blocks 0 and 1
    wave 7  step of the state by mixed again: y    block 0, its upper two slots block 1
    """
    s = Sketch(slots)
    tiles = s.value("tiles", Role.WEIGHT, 4096)
    constants = s.value("constants", Role.WEIGHT, 200)
    norm = s.value("norm", Role.WEIGHT, 400)
    state, ring, cache = (
        s.value(name, Role.STATE, size) for name, size in (("state", 16384), ("ring", 1920), ("cache", 8192))
    )
    position = s.value("position", Role.STATE, 4)
    x, h, squares, mixed, y, q, sums, z, out = (
        s.value(name, Role.TEMPORARY, size)
        for name, size in (
            ("x", 400), ("h", 200), ("squares", 4), ("mixed", 1600), ("y", 256), ("q", 256), ("sums", 2112), ("z", 256),
            ("out", 384),
        )
    )  # fmt: skip
    for wave in (0, 6):
        s.phase(wave, "rms_norm_terms", [x, norm, None, x, h, squares], [100, 0])
    every = slots
    projection = [352, 100, 2, 32, 320, 8, 1]
    ring_in = [h, tiles, squares, constants, ring, mixed, ring]
    s.phase(1, "mamba2_projection", ring_in, projection, (0, 0, every, 0, 1), (1, 0, every, 1, 2))
    s.phase(2, "mamba2_step", [mixed, state, y, state], [8, 32, 1, 32], (1, 0, every, 0, 8))
    s.phase(
        3, "qkv_projection", [y, tiles, None, cache, position, q, cache], [64, 2, 2, 1, 64, 16],
        (0, 0, every, 0, 1), (1, 0, every, 1, 2),
    )  # fmt: skip
    s.phase(
        4, "attention_parts", [q, cache, position, sums], [2, 1, 64, 16, 2], (0, 0, every, 0, 1), (1, 0, every, 1, 2)
    )
    s.phase(5, "attention_merge", [sums, z], [2, 64, 2, 1])
    s.phase(6, "tiled_matmul", [z, tiles, None, None, out], [96, 64, 2, 0], (0, 0, every, 0, 1), (1, 0, every, 1, 2))
    s.phase(7, "mamba2_step", [mixed, state, y, state], [8, 32, 1, 32], (0, 0, 2, 0, 8), (1, 2, every, 0, 8))
    return s.program()


# Payloads in the order of `hybrid`.
NORM, NORM_AGAIN, MAMBA, STEP, HEADS, PARTS, MERGE, PRODUCT, STEP_AGAIN = range(9)


def word(row: Any, at: int) -> int:
    """The 64-bit word of an order at a byte."""
    return int(row[at : at + 8].view(np.uint64)[0])


# --- what the bodies for a GPU can take -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("payload", "parameters", "wanted"),
    [
        (PARTS, (18, 9, 64), "at most 8 key heads"),
        (PARTS, (18, 2, 64), "at most 8 query heads a key head"),
        (PARTS, (2, 1, 80), "heads of 64 or 128"),
        (MERGE, (2, 256), "heads of at most 128"),
        (NORM, (102,), "rows in fours"),
    ],
)
def test_sizes_that_no_body_for_a_gpu_takes_are_refused(payload: int, parameters: tuple[int, ...], wanted: str) -> None:
    program = hybrid()
    require_sizes(program, Shape(64))
    payloads = program.payloads.copy()
    payloads["parameter"][payload, : len(parameters)] = parameters
    with pytest.raises(TargetError, match=f"phase {payload}: .* does not run on a GPU") as refused:
        require_sizes(dataclasses.replace(program, payloads=payloads), Shape(64))
    assert refused.value.wanted == wanted and "cpu" in (refused.value.hint or "")


def test_a_product_s_task_has_no_more_slots_than_a_tile() -> None:
    require_sizes(hybrid(128), Shape(128))
    for slots, shape in ((129, Shape(128)), (65, Shape(64))):
        with pytest.raises(ProgramError, match="a task of a product") as refused:
            require_sizes(hybrid(slots), shape)
        assert refused.value.found == str(slots)


# --- tasks --------------------------------------------------------------------------------------------------------
def test_tasks_are_sorted_by_block_and_then_by_wave() -> None:
    tasks = task_table(hybrid())
    first = [NORM, MAMBA, HEADS, PARTS, MERGE, NORM_AGAIN, PRODUCT, STEP_AGAIN]
    second = [MAMBA, STEP, HEADS, PARTS, PRODUCT, STEP_AGAIN]
    assert tasks["payload"].tolist() == first + second
    assert tasks["block"].tolist() == [0] * len(first) + [1] * len(second)


def test_the_agenda_says_where_a_block_s_orders_of_a_wave_are() -> None:
    program = hybrid()
    agenda = agenda_table(program, task_table(program), BASES[Arena.WEIGHTS])
    assert agenda[:, :, :2].tolist() == [
        # wave 0, 1, ...: first order, orders
        [[0, 1], [1, 1], [2, 0], [2, 1], [3, 1], [4, 1], [5, 2], [7, 1]],
        [[8, 0], [8, 1], [9, 1], [10, 1], [11, 1], [12, 0], [12, 1], [13, 1]],
    ]


def test_a_block_without_tasks_has_none_in_any_wave() -> None:
    program = dataclasses.replace(hybrid(), blocks=4)
    agenda = agenda_table(program, task_table(program), BASES[Arena.WEIGHTS])
    assert agenda.shape == (4, 8, 4)
    assert (agenda[2:, :, 0] == 14).all() and not agenda[2:, :, 1].any()


def test_an_order_holds_a_payload_the_addresses_that_it_means_and_a_task_s_ranges() -> None:
    program = hybrid()
    tasks = task_table(program)
    orders = order_table(program, tasks, Shape(64), BASES, MAPS)
    assert orders.shape == (14, ORDER_BYTES) and orders.dtype == np.uint8
    for row, task in zip(orders, tasks, strict=True):
        assert row[:128].tobytes() == program.payloads[task["payload"]].tobytes()
    addresses = [word(orders[1], layout.ORDER_ADDRESSES + 8 * i) for i in range(OPERANDS)]  # of MAMBA, block 0
    weights, states, temporaries = BASES[Arena.WEIGHTS], BASES[Arena.STATE], BASES[Arena.ACTIVATIONS]
    # Values lie one behind the other: four slots of x are 4 * 448 bytes, of h 4 * 256, of squares 4 * 64.
    ring = states + 4 * 16384
    assert addresses == [
        temporaries + 1792,
        weights,
        temporaries + 2816,
        weights + 4096,
        ring,
        temporaries + 3072,
        ring,
    ]
    assert [word(orders[1], at) for at in (layout.ORDER_MAP, layout.ORDER_WINDOW)] == [
        MAPS + 2 * MAP_BYTES * MAMBA, MAPS + 2 * MAP_BYTES * MAMBA + MAP_BYTES,
    ]  # fmt: skip
    ranges = [
        orders[:, at : at + 4].view(np.int32).reshape(-1)
        for at in (layout.ORDER_SLOT_LO, layout.ORDER_SLOT_HI, layout.ORDER_PART_LO, layout.ORDER_PART_HI)
    ]
    assert [r[7] for r in ranges] == [0, 2, 0, 8] and [r[13] for r in ranges] == [2, 4, 0, 8]  # both of STEP_AGAIN
    assert [r[8] for r in ranges] == [0, 4, 1, 2]  # MAMBA, block 1
    assert word(orders[2], layout.ORDER_ADDRESSES + 16) == 0  # absent: the squares of HEADS
    assert not any(word(row, layout.ORDER_ADDRESSES + 48) for row in orders[[0, 3, 4, 5, 6, 7]])  # no seventh operand


# --- what is streamed ---------------------------------------------------------------------------------------------
def streamed(program: Program, shape: Shape = SHAPE) -> tuple[Any, Any]:
    """The table, with kinds by themselves, and the first entries; every entry divides the ring as its order does."""
    tasks = task_table(program)
    streams, starts = stream_table(program, tasks, shape, BASES, MAPS)
    orders = order_table(program, tasks, shape, BASES, MAPS)
    for entry in streams:
        at = layout.ORDER_STAGE_BYTES
        division = orders[entry[S_RECORD], at : at + 8].view(np.int32).tolist()
        assert division == [entry[S_KIND] >> 16, entry[S_KIND] >> 8 & 0xFF]
    streams[:, S_KIND] &= 0xFF
    return streams, starts


@pytest.mark.parametrize("shape", [Shape(64), Shape(128)])
def test_a_stage_holds_an_item_of_its_payload(shape: Shape) -> None:
    program = hybrid()
    stages = stages_of(program, shape)
    streams, _ = streamed(program, shape)
    for entry in streams:
        division = stages[int(task_table(program)[entry[S_RECORD]]["payload"])]
        assert division.size % layout.STAGE_UNIT == 0 and 1 <= division.count <= layout.BARRIERS
        assert division.size * division.count <= shape.ring_bytes
        assert entry[S_STEP] + entry[S_BYTES] <= division.size
    assert sorted(stages) == [MAMBA, STEP, HEADS, PARTS, PRODUCT, STEP_AGAIN]


@pytest.mark.parametrize(("slots", "sessions"), [(1, 64), (56, 64), (65, 128), (112, 128), (128, 128)])
@pytest.mark.parametrize("rows", [8, 64, 176])
def test_all_windows_of_a_part_fit_into_the_ring_at_once(slots: int, sessions: int, rows: int) -> None:
    s = Sketch(slots)
    x, tiles, y = (
        s.value(v, r, size)
        for v, r, size in (("x", Role.TEMPORARY, 128), ("w", Role.WEIGHT, 128 * rows), ("y", Role.TEMPORARY, 4 * rows))
    )
    ring = s.value("ring", Role.STATE, 6 * rows)
    s.phase(0, "mamba2_projection", [x, tiles, None, None, ring, y, ring], [rows, 64, 1, 0, rows, 8, 0])
    (division,) = stages_of(s.program(), Shape(sessions)).values()
    each = window_sessions(slots, division)
    assert -(-slots // each) <= division.count and layout.TAP_BYTES + each * layout.WINDOW_BYTES <= division.size


def test_a_block_streams_its_streamed_tasks_in_their_order() -> None:
    streams, starts = streamed(hybrid())
    assert starts.tolist() == [0, 5, 11] and streams.shape == (11, STREAM_WORDS)
    assert streams[:, [S_RECORD, S_KIND, S_WAVE, S_AFTER]].tolist() == [
        # order, its kind, its wave, the wave that its early bytes wait for
        [1, MAMBA2, 1, WEIGHTS_ONLY], [2, QKV, 3, WEIGHTS_ONLY], [3, CACHE_KIND, 4, 3], [6, MATMUL, 6, WEIGHTS_ONLY],
        [7, STATE_KIND, 7, 2],
        [8, MAMBA2, 1, WEIGHTS_ONLY], [9, STATE_KIND, 2, WEIGHTS_ONLY], [10, QKV, 3, WEIGHTS_ONLY],
        [11, CACHE_KIND, 4, 3], [12, MATMUL, 6, WEIGHTS_ONLY], [13, STATE_KIND, 7, 2],
    ]  # fmt: skip
    payloads = [MAMBA, HEADS, PARTS, PRODUCT, STEP_AGAIN, MAMBA, STEP, HEADS, PARTS, PRODUCT, STEP_AGAIN]
    assert streams[:, S_MAP].tolist() == [MAPS + 2 * MAP_BYTES * payload for payload in payloads]
    assert streams[:, [S_SLOT_LO, S_SLOT_HI, S_PART_LO, S_PART_HI]].tolist() == [
        [0, 4, 0, 1], [0, 4, 0, 1], [0, 4, 0, 1], [0, 4, 0, 1], [0, 2, 0, 8],
        [0, 4, 1, 2], [0, 4, 0, 8], [0, 4, 1, 2], [0, 4, 1, 2], [0, 4, 1, 2], [2, 4, 0, 8],
    ]  # fmt: skip


def test_an_entry_says_which_bytes_are_streamed() -> None:
    streams, _ = streamed(hybrid())
    tiles, state = BASES[Arena.WEIGHTS], BASES[Arena.STATE]
    activations = 4 * 128  # a chunk's row of each of four sessions
    step = 4 * 32 + 2 * 512 + 16  # x of 32 rows, B and C, the step's terms
    cache = 2 * 64 * 8 * 2  # keys and values of 64 numbers, 8 rows
    products = streams[:, [S_SOURCE, S_STEP, S_AT, S_CHUNKS, S_ROW, S_WINDOWS, S_BYTES]].tolist()
    assert products[:5] == [
        # first byte, bytes of a chunk, first chunk, end, first row, boxes of windows, late bytes of an item
        [tiles, 22 * 1024, 0, 2, 0, 1, activations],
        [tiles, 16 * 1024, 0, 1, 0, 0, activations],
        [0, 0, 0, 0, 0, 0, cache],
        [tiles, 6 * 1024, 0, 1, 0, 0, activations],
        [state, 32 * 512, 0, 0, 0, 0, step],
    ]
    assert products[5:] == [
        [tiles + 44 * 1024, 22 * 1024, 0, 2, 176, 1, activations],
        [state, 32 * 512, 0, 0, 0, 0, step],
        [tiles + 16 * 1024, 16 * 1024, 0, 1, 128, 0, activations],
        [0, 0, 0, 0, 0, 0, cache],
        [tiles + 6 * 1024, 6 * 1024, 0, 1, 48, 0, activations],
        [state, 32 * 512, 0, 0, 0, 0, step],
    ]


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in ("qkv_projection", "tf32_matmul")])
@pytest.mark.parametrize(("n", "k", "shares", "splits"), [(352, 100, 2, 0), (360, 640, 5, 3), (8, 64, 1, 1)])
def test_a_product_s_entries_are_its_tiles(name: str, n: int, k: int, shares: int, splits: int) -> None:
    """Against the order of tiles, element by element: an entry a part, in the order of the parts, without gaps."""
    ways = max(1, splits) if name == "tiled_matmul" else 1
    parts = shares * ways
    s = Sketch()
    x, tiles, y = (
        s.value(v, r, size)
        for v, r, size in (
            ("x", Role.TEMPORARY, 2 * k), ("w", Role.WEIGHT, tiled_bytes(n, k)), ("y", Role.TEMPORARY, 4 * n * ways)
        )
    )  # fmt: skip
    ring = s.value("ring", Role.STATE, 6 * n)
    parameters = [n, k, shares, *((8, n - 16, 8, 0) if name == "mamba2_projection" else (splits,))]
    s.phase(0, name, [x, tiles, None, None, ring, y, ring], parameters, (0, 0, SLOTS, 0, parts))
    streams, starts = streamed(s.program())
    assert starts.tolist() == [0, parts, parts] and streams[:, S_PART_LO].tolist() == list(range(parts))
    for entry in streams:
        at = tile_offset(n, k, shares, ways, int(entry[S_ROW]), CHUNK * int(entry[S_AT]))
        assert entry[S_SOURCE] == BASES[Arena.WEIGHTS] + at
    sizes = (streams[:, S_CHUNKS] - streams[:, S_AT]) * streams[:, S_STEP]
    assert (streams[:-1, S_SOURCE] + sizes[:-1] == streams[1:, S_SOURCE]).all() and sizes.sum() == tiled_bytes(n, k)
    # Windows go with the parts that have rows of the convolution: all but the first 8 and the last 8.
    last = streams[:, S_ROW] + streams[:, S_STEP] // 128
    inside = (last > 8) & (streams[:, S_ROW] < n - 8) & (name == "mamba2_projection")
    assert (streams[:, S_WINDOWS] == inside).all()


# Slots, frames, rows of a tile: one frame; sessions that fill a tile, nearly, and not; pieces of frames, even and not.
FRAMES = [
    (4, 1, 64), (64, 1, 64), (70, 1, 128), (5, 21, 64), (7, 9, 64), (70, 3, 128), (4, 63, 64), (4, 64, 64), (4, 65, 64),
    (70, 128, 128), (70, 441, 128), (1, 441, 64),
]  # fmt: skip


def frames_of(slots: int, frames: int, rows: int, n: int, k: int, step: int, shares: int) -> tuple[Program, list[Any]]:
    """A product of frames after another operator, and for each entry of its stream what must be in it.

    Block 0 has the lower slots of all parts, block 1 the upper slots in two tasks: the later parts first.
    """
    s = Sketch(slots)
    s.value("before", Role.WEIGHT, 512)
    x, tiles, y = (
        s.value(name, role, size)
        for name, role, size in (
            ("x", Role.TEMPORARY, 4 * ((frames - 1) * step + k)), ("w", Role.WEIGHT, 4 * n * (-(-k // 32)) * 32),
            ("y", Role.TEMPORARY, 4 * frames * n),
        )
    )  # fmt: skip
    pieces = -(-frames // rows)
    parts, middle = shares * pieces, (slots + 1) // 2
    chores = [(0, 0, middle, 0, parts)]
    if slots > 1:
        chores += [(1, middle, slots, 1, parts)] if parts > 1 else []
        chores += [(1, middle, slots, 0, 1)]
    parameters = [n, k, shares, frames, step, (frames - 1) * step + k, 0, rows, 0]
    s.phase(0, "tf32_matmul", [x, tiles, None, None, y], parameters, *chores)
    each, wanted, source = max(1, rows // frames), [], BASES[Arena.WEIGHTS] + 512
    box = max(frames * (p + 1) // pieces - frames * p // pieces for p in range(pieces)) * min(each, slots)
    for order, (_, slot_lo, slot_hi, part_lo, part_hi) in enumerate(chores):
        for part in range(part_lo, part_hi):
            share, piece = divmod(part, pieces)
            lo, hi = (n // 8 * s // shares for s in (share, share + 1))
            for first in range(slot_lo, slot_hi, each):
                wanted.append(
                    {
                        S_RECORD: order, S_KIND: TF32, S_WAVE: 0, S_AFTER: WEIGHTS_ONLY, S_MAP: MAPS,
                        S_SLOT_LO: first, S_SLOT_HI: min(first + each, slot_hi), S_PART_LO: part, S_PART_HI: part + 1,
                        S_SOURCE: source + 8 * lo * -(-k // 32) * 128, S_STEP: 8 * (hi - lo) * 128, S_BYTES: 128 * box,
                        S_AT: 0, S_CHUNKS: -(-k // 32), S_WINDOWS: 0, S_ROW: frames * piece // pieces,
                    }
                )  # fmt: skip
    return s.program(), [[entry[w] for w in range(STREAM_WORDS)] for entry in wanted]


@pytest.mark.parametrize(("slots", "frames", "rows"), FRAMES)
@pytest.mark.parametrize(("n", "k", "step", "shares"), [(8, 4, 4, 1), (360, 100, 32, 5)])
def test_a_product_of_frames_has_an_entry_for_each_part_of_the_sessions_of_a_tile(
    slots: int, frames: int, rows: int, n: int, k: int, step: int, shares: int
) -> None:
    program, wanted = frames_of(slots, frames, rows, n, k, step, shares)
    shape = Shape(rows)
    require_sizes(program, shape)
    streams, starts = streamed(program, shape)
    assert streams.tolist() == wanted
    assert starts.tolist() == [0, sum(entry[S_RECORD] == 0 for entry in wanted), len(wanted)]
    # Every row of the weight is multiplied with every frame of every session once.
    seen = np.zeros((slots, frames, n // 8), int)
    pieces = -(-frames // rows)
    for entry in wanted:
        lo = (entry[S_SOURCE] - wanted[0][S_SOURCE]) // (1024 * entry[S_CHUNKS])
        end = frames * (entry[S_PART_LO] % pieces + 1) // pieces
        assert (entry[S_SLOT_HI] - entry[S_SLOT_LO]) * (end - entry[S_ROW]) <= rows
        seen[entry[S_SLOT_LO] : entry[S_SLOT_HI], entry[S_ROW] : end, lo : lo + entry[S_STEP] // 1024] += 1
    assert (seen == 1).all()


def test_a_tile_of_frames_has_no_more_rows_than_the_kernel_s() -> None:
    program, _ = frames_of(4, 3, 128, 16, 40, 8, 1)
    require_sizes(program, Shape(128))
    with pytest.raises(ProgramError, match="phase 0: a tile of frames") as refused:
        require_sizes(program, Shape(64))
    assert (refused.value.wanted, refused.value.found) == ("at most 64 rows", "128")


def test_a_task_of_frames_may_have_any_slots() -> None:
    program, _ = frames_of(1000, 1, 128, 16, 40, 8, 1)
    require_sizes(program, Shape(128))


def test_a_program_that_streams_nothing_has_no_entries() -> None:
    s = Sketch()
    x, norm, h, squares = (
        s.value(n, r, 400)
        for n, r in (("x", Role.TEMPORARY), ("w", Role.WEIGHT), ("h", Role.TEMPORARY), ("s", Role.TEMPORARY))
    )
    s.phase(0, "rms_norm_terms", [x, norm, None, x, h, squares], [100, 0])
    program = s.program()
    streams, starts = streamed(program)
    assert streams.shape == (0, STREAM_WORDS) and starts.tolist() == [0, 0, 0]
    assert tensor_maps(program, Shape(0)) == []


def test_a_program_without_tasks_has_tables_too() -> None:
    program = hybrid()
    program = dataclasses.replace(program, tasks=program.tasks[:0])
    tasks = task_table(program)
    assert order_table(program, tasks, Shape(64), BASES, MAPS).shape == (0, ORDER_BYTES)
    assert not agenda_table(program, tasks, BASES[Arena.WEIGHTS]).any()
    streams, starts = streamed(program)
    assert streams.shape == (0, STREAM_WORDS) and starts.tolist() == [0, 0, 0]


# --- weights that are warmed ----------------------------------------------------------------------------------------
def test_the_largest_small_weight_of_a_wave_is_warmed() -> None:
    weights = BASES[Arena.WEIGHTS]
    norm, tiles = [weights + 4096 + 256, 400], [weights, 4096]
    none = [0, 0]
    # Whole pieces of 16 bytes; in wave 6 the tiles are larger than the norm's weight.
    assert warm_table(hybrid(), weights).tolist() == [norm, tiles, none, tiles, none, none, tiles, none]


@pytest.mark.parametrize("blocks", [2, 5, 132])
def test_every_block_warms_a_piece_and_all_of_them_the_whole(blocks: int) -> None:
    program = dataclasses.replace(hybrid(), blocks=blocks)
    agenda = agenda_table(program, task_table(program), BASES[Arena.WEIGHTS])
    for wave, (address, size) in enumerate(warm_table(program, BASES[Arena.WEIGHTS]).tolist()):
        pieces = agenda[:, wave, 2:]
        assert (pieces[:-1].sum(1) == pieces[1:, 0]).all() or not size
        assert (pieces[0, 0], pieces[-1].sum(), pieces[:, 1].sum()) == (address, address + size, size)
        assert not (pieces[:, 1] % 16).any()


# --- tensor maps ------------------------------------------------------------------------------------------------------
def test_activations_caches_and_windows_have_maps() -> None:
    made = {(m.payload, m.which): m for m in tensor_maps(hybrid(), Shape(64))}
    act, state = Arena.ACTIVATIONS, Arena.STATE
    ring, cache = 4 * 16384, 4 * (16384 + 1920)
    y = 4 * (448 + 256 + 64 + 1600)
    z = y + 4 * (256 + 256 + 2112)
    assert made == {
        # x [slots, k] of a product: 64 columns of all slots
        (MAMBA, 0): TensorMap(MAMBA, 0, act, 4 * 448, (100, 4), (256,), (64, 4), True),
        (HEADS, 0): TensorMap(HEADS, 0, act, y, (64, 4), (256,), (64, 4), True),
        (PRODUCT, 0): TensorMap(PRODUCT, 0, act, z, (64, 4), (256,), (64, 4), True),
        # ring [slots, 3, channels]: the channels of a part
        (MAMBA, 1): TensorMap(MAMBA, 1, state, ring, (320, 3, 4), (640, 1920), (176, 3, 4), False),
        # cache [slots, 2 groups, rows, width]: keys and values of 8 rows
        (PARTS, 0): TensorMap(PARTS, 0, state, cache, (64, 16, 2, 4), (256, 128, 8192), (64, 8, 2, 1), True),
    }


@pytest.mark.parametrize(("slots", "sessions", "rows"), [(1, 64, 1), (64, 64, 64), (65, 128, 65), (130, 128, 128)])
def test_a_box_of_activations_has_the_sessions_of_a_tile(slots: int, sessions: int, rows: int) -> None:
    made = {(m.payload, m.which): m for m in tensor_maps(hybrid(slots), Shape(sessions))}
    assert made[PRODUCT, 0].box == (64, rows) and made[PRODUCT, 0].sizes == (64, slots)
    assert made[PARTS, 0].box == (64, 8, 2, 1)


@pytest.mark.parametrize(("slots", "frames", "rows"), FRAMES)
def test_a_box_of_frames_is_a_tile_of_overlapping_windows(slots: int, frames: int, rows: int) -> None:
    k, step = 100, 32
    program, wanted = frames_of(slots, frames, rows, 16, k, step, 1)
    (made,) = tensor_maps(program, Shape(rows))
    columns, some, sessions = made.box
    pitch = -(-4 * ((frames - 1) * step + k) // 64) * 64
    assert made == TensorMap(
        0, 0, Arena.ACTIVATIONS, 0, (k, frames, slots), (4 * step, pitch), made.box, True, DType.F32
    )  # fmt: skip
    assert columns == 32 and some * sessions <= rows and 128 * some * sessions == wanted[0][S_BYTES]
    assert (some == frames) if frames <= rows else sessions == 1
    assert sessions == min(slots, max(1, rows // frames))


@pytest.mark.parametrize("size", [5, 12, 29, 36])
def test_boxes_of_windows_cover_a_tile_and_fit_a_stage(size: int) -> None:
    stages = Stages(1024 * size, 4)
    fitting = (stages.size - layout.TAP_BYTES) // layout.WINDOW_BYTES
    for sessions in range(1, 129):
        each = window_sessions(sessions, stages)
        boxes = -(-sessions // each)
        assert 1 <= each <= fitting and each * (boxes - 1) < sessions
        assert boxes == -(-sessions // fitting)  # no more boxes than there must be


@pytest.mark.parametrize(("field", "amount"), [("reference", 8), ("stride", 4)])
def test_an_operand_that_no_box_can_start_at_is_refused(field: str, amount: int) -> None:
    program = hybrid()
    payloads = program.payloads.copy()
    payloads[field][PRODUCT, 0] += amount
    with pytest.raises(ProgramError, match=f"phase {PRODUCT}: an operand that the copy engine cannot address"):
        tensor_maps(dataclasses.replace(program, payloads=payloads), Shape(64))
