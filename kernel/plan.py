"""What a launch derives from a program: each block's tasks, what its producer streams, and tensor maps.

All of it follows from the program's bytes, so that a profile holds nothing that only one kind of kernel understands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import ProgramError, TargetError
from wpk.ir.types import DType
from wpk.kernel.frames import Frames
from wpk.kernel.layout import (
    CACHE_ROWS,
    CHUNK_BYTES,
    KINDS,
    MAP_BYTES,
    ORDER_ADDRESSES,
    ORDER_BYTES,
    ORDER_MAP,
    ORDER_PART_HI,
    ORDER_SLOT_LO,
    ORDER_STAGE_BYTES,
    ORDER_WINDOW,
    PRODUCTS,
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
    STATE_ROW,
    STREAM_WORDS,
    STREAMED,
    TAP_BYTES,
    TILE_ROWS,
    WARPS,
    WINDOW_BYTES,
    Shape,
    Stages,
)
from wpk.ops.attention import ATTENTION_ROWS
from wpk.ops.operator import LIBRARY
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK, PAYLOAD, Arena
from wpk.ops.tiles import GROUP, chunks_of
from wpk.scheduler.program import Direction, Program

WEIGHTS_ONLY = -1  # early bytes that wait for no wave
SMALL_WEIGHT = 1 << 20  # bytes of a weight that is read as a whole by every block, not streamed
CHUNK_TILE = GROUP * CHUNK_BYTES  # bytes of a group of rows in a chunk
BOX_COLUMNS = 64  # bf16 of a 128-byte row of a tensor map's box


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy brings; the innermost dimension first."""

    payload: int
    which: int  # 0: of the payload, 1: of its window
    arena: int
    offset: int  # bytes into the arena
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    swizzled: bool
    dtype: DType = DType.BF16


def operator_names(program: Program) -> list[str]:
    """The operator of each payload, without its version."""
    return [program.operators[int(p["opcode"])].partition("@")[0] for p in program.payloads]


# --- what the bodies for a GPU can take -------------------------------------------------------------------------------
Rule = tuple[str, Callable[[Sequence[int]], bool]]
# The checks of a program (`Operator.legal`) hold for every target; these are of registers and stages on a GPU.
LIMITS: Mapping[str, tuple[Rule, ...]] = {
    "attention_parts": (
        ("at most 8 key heads", lambda p: p[1] <= WARPS),
        ("at most 8 query heads a key head", lambda p: p[0] // max(p[1], 1) <= 8),
        ("heads of 64 or 128", lambda p: p[2] in (64, 128)),
    ),
    "attention_merge": (("heads of at most 128", lambda p: p[1] <= 128),),
    "gated_rms_norm": (("groups of at most 1280, in fours", lambda p: p[0] // p[1] <= 1280 and p[0] // p[1] % 4 == 0),),
    "rms_norm_terms": (("rows in fours", lambda p: p[0] % 4 == 0),),
}


def require_sizes(program: Program, shape: Shape) -> None:
    """Refuse a program whose sizes the GPU's bodies cannot take: `TargetError`."""
    names = operator_names(program)
    for name, record, label in zip(names, program.payloads, program.labels, strict=True):
        values = [int(v) for v in record["parameter"]]
        for wanted, holds in LIMITS.get(name, ()):
            if not holds(values):
                raise TargetError(
                    f"{label}: {name} of these sizes does not run on a GPU", wanted=wanted, found=values,
                    hint="Load the profile with target='cpu'.",
                )  # fmt: skip
        if name == "tf32_matmul" and values[7] > shape.sessions:
            raise ProgramError(
                f"{label}: a tile of frames", wanted=f"at most {shape.sessions} rows", found=values[7],
                hint="Rebuild the profile.",
            )  # fmt: skip
    held = program.tasks["slot_hi"].astype(np.int64) - program.tasks["slot_lo"]
    for task in np.flatnonzero(held > shape.sessions):
        payload = int(program.tasks["payload"][task])
        if names[payload] in PRODUCTS and names[payload] != "tf32_matmul":
            raise ProgramError(
                f"{program.labels[payload]}: a task of a product", wanted=f"at most {shape.sessions} slots",
                found=int(held[task]), hint="Rebuild the profile.",
            )  # fmt: skip


# --- tasks --------------------------------------------------------------------------------------------------------
def task_table(program: Program) -> NDArray[Any]:
    """Tasks sorted by block and wave."""
    return program.tasks[np.lexsort((program.tasks["wave"], program.tasks["block"]))]


def product_shape(name: str, parameters: Sequence[int]) -> tuple[int, int, int, int]:
    """Rows, columns, row shares and column shares of a product's weights, from its payload."""
    if name == "qkv_projection":
        depth, shares, heads, groups, width = parameters[:5]
        return (heads + 2 * groups) * width, depth, shares, 1
    n, k, shares, splits = parameters[:4]
    return n, k, shares, max(1, splits) if name == "tiled_matmul" else 1


def stages_of(program: Program, shape: Shape) -> dict[int, Stages]:
    """Payload -> how it divides the ring; for those that are streamed."""
    found = {}
    for payload, name in enumerate(operator_names(program)):
        values = [int(v) for v in program.payloads[payload]["parameter"]]
        if name in PRODUCTS:
            n, _, shares, _ = product_shape(name, values)
            rows = min(program.slots, shape.sessions)
            if name == "tf32_matmul":
                _, frames, sessions = Frames.of(values).box(program.slots)
                rows = frames * sessions
            size = -(-(n // GROUP) // shares) * CHUNK_TILE + activation_bytes(rows)
            if name == "mamba2_projection":
                size = _with_windows(size, min(program.slots, shape.sessions), shape)
        elif name == "mamba2_step":
            size = values[3] * STATE_ROW + _state_terms(values[3])
        elif name == "attention_parts":
            size = 2 * values[1] * values[2] * CACHE_ROWS * 2
        else:
            continue
        found[payload] = shape.stages(size)
    return found


def _with_windows(size: int, sessions: int, shape: Shape) -> int:
    """Bytes of stages of at least that size that hold the windows of all sessions at once, beside the taps in each."""
    size = max(size, TAP_BYTES + WINDOW_BYTES)
    while True:
        stages = shape.stages(size)
        if -(-sessions // ((stages.size - TAP_BYTES) // WINDOW_BYTES)) <= stages.count:
            return size
        size = stages.size + 1


def activation_bytes(rows: int) -> int:
    """Of a stage, for the sessions or frames of a product's tile: whole groups of 8 rows."""
    return -(-rows * CHUNK_BYTES // STAGE_UNIT) * STAGE_UNIT


def _state_terms(rows: int) -> int:
    """Bytes that come with a tile of state: x, B and C, the step's terms."""
    return 4 * rows + 2 * STATE_ROW + 16


def order_table(
    program: Program, tasks: NDArray[Any], shape: Shape, arenas: Sequence[int], maps: int
) -> NDArray[np.uint8]:  # fmt: skip
    """[tasks, ORDER_BYTES]: each task's payload with the addresses that it means. arenas, maps: on the device."""
    payloads = program.payloads
    references = payloads["reference"]
    bases = np.array([*arenas, 0], np.uint64)[np.minimum(references >> ARENA_SHIFT, len(arenas))]
    addresses = np.where(references == ABSENT, 0, bases + (references & OFFSET_MASK)).astype(np.uint64)
    orders = np.zeros((len(tasks), ORDER_BYTES), np.uint8)
    index = tasks["payload"]
    orders[:, : PAYLOAD.itemsize] = np.frombuffer(payloads.tobytes(), np.uint8).reshape(-1, PAYLOAD.itemsize)[index]
    orders[:, ORDER_ADDRESSES:ORDER_MAP] = _bytes_of(addresses[index])
    for which, place in enumerate((ORDER_MAP, ORDER_WINDOW)):
        where = (maps + MAP_BYTES * (2 * index.astype(np.uint64) + which)).astype(np.uint64)
        orders[:, place : place + 8] = _bytes_of(where[:, None])
    ranges = np.stack([tasks[n] for n in ("slot_lo", "slot_hi", "part_lo", "part_hi")], axis=1).astype(np.int32)
    orders[:, ORDER_SLOT_LO : ORDER_PART_HI + 4] = _bytes_of(ranges)
    stages = np.zeros((len(payloads), 2), np.int32)
    for payload, given in stages_of(program, shape).items():
        stages[payload] = given.size, given.count
    orders[:, ORDER_STAGE_BYTES : ORDER_STAGE_BYTES + 8] = _bytes_of(stages[index])
    return orders


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, words] as [n, bytes], for no rows as well."""
    return np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint8).reshape(
        len(rows), rows.shape[1] * rows.itemsize
    )


def agenda_table(program: Program, tasks: NDArray[Any], weights: int) -> NDArray[np.int64]:
    """[blocks, waves, 4]: first order of each wave, how many, and the block's piece of what is to be in L2.

    Small weights would be evicted by the large ones that stream past; each block brings 1 / blocks of them.
    """
    waves, blocks = max(program.waves, 1), program.blocks
    keys = tasks["block"].astype(np.int64) * waves + tasks["wave"]
    edges = np.searchsorted(keys, np.arange(blocks * waves + 1)).astype(np.int64)
    table = np.zeros((blocks, waves, 4), np.int64)
    table[:, :, 0], table[:, :, 1] = edges[:-1].reshape(blocks, waves), np.diff(edges).reshape(blocks, waves)
    for wave, (address, size) in enumerate(warm_table(program, weights)):
        piece = -(-(int(size) // blocks + 1) // 16) * 16
        starts = np.minimum(np.arange(blocks) * piece, int(size))
        table[:, wave, 2] = address + starts
        table[:, wave, 3] = np.minimum(piece, int(size) - starts)
    return table


def stream_table(
    program: Program, tasks: NDArray[Any], shape: Shape, arenas: Sequence[int], maps: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Each block's streamed tasks as `wpk.kernel.layout` has them, and its first entry. arenas, maps: addresses."""
    names = operator_names(program)
    before, stages = _early_waves(program, names), stages_of(program, shape)
    rows: list[NDArray[np.int64]] = []
    owners: list[NDArray[np.int64]] = []
    order = np.argsort(tasks["payload"], kind="stable")
    edges = np.searchsorted(tasks["payload"][order], np.arange(len(names) + 1))
    for payload, name in enumerate(names):
        if name not in STREAMED or payload not in before:  # not streamed, or without tasks
            continue
        mine = order[edges[payload] : edges[payload + 1]]
        some = _product_entries if name in PRODUCTS else _other_entries
        if name == "tf32_matmul":
            some = _frame_entries
        entries = some(program, payload, name, tasks[mine], mine, shape, arenas, stages[payload])
        entries[:, S_AFTER] = before[payload]
        entries[:, S_KIND] |= stages[payload].count << 8 | stages[payload].size << 16
        entries[:, S_MAP] = maps + MAP_BYTES * 2 * payload
        rows.append(entries)
        owners.append(tasks["block"][entries[:, S_RECORD]].astype(np.int64))
    table = np.concatenate([np.zeros((0, STREAM_WORDS), np.int64), *rows])
    blocks = np.concatenate([np.zeros(0, np.int64), *owners])
    table = table[np.lexsort((table[:, S_SLOT_LO], table[:, S_PART_LO], table[:, S_RECORD], blocks))]
    return table, np.searchsorted(np.sort(blocks), np.arange(program.blocks + 1)).astype(np.int32)


def _entries(tasks: NDArray[Any], orders: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
    made = np.zeros((len(tasks), STREAM_WORDS), np.int64)
    made[:, S_RECORD], made[:, S_KIND], made[:, S_WAVE] = orders, kind, tasks["wave"]
    for word, name in ((S_SLOT_LO, "slot_lo"), (S_SLOT_HI, "slot_hi"), (S_PART_LO, "part_lo"), (S_PART_HI, "part_hi")):
        made[:, word] = tasks[name]
    return made


def _place(program: Program, payload: int, operand: int, arenas: Sequence[int]) -> int:
    """Address of slot 0's operand."""
    reference = int(program.payloads[payload]["reference"][operand])
    return arenas[reference >> ARENA_SHIFT] + (reference & OFFSET_MASK)


def _product_entries(
    program: Program, payload: int, name: str, tasks: NDArray[Any], orders: NDArray[np.int64], shape: Shape,
    arenas: Sequence[int], stages: Stages,
) -> NDArray[np.int64]:  # fmt: skip
    """An entry a part: which tiles it reads, and the windows of its rows."""
    parts = (tasks["part_hi"] - tasks["part_lo"]).astype(np.int64)
    which = np.repeat(np.arange(len(tasks)), parts)
    made = _entries(tasks[which], orders[which], KINDS[name])
    first_of = np.cumsum(parts) - parts
    part = made[:, S_PART_LO] + np.arange(len(which)) - first_of[which]
    made[:, S_PART_LO], made[:, S_PART_HI] = part, part + 1
    n, k, shares, splits = product_shape(name, [int(v) for v in program.payloads[payload]["parameter"]])
    groups, chunks = n // GROUP, chunks_of(k)
    share, split = part // splits, part % splits
    first, last = groups * share // shares, groups * (share + 1) // shares
    start, stop = chunks * split // splits, chunks * (split + 1) // splits
    made[:, S_STEP] = (last - first) * CHUNK_TILE
    made[:, S_SOURCE] = _place(program, payload, 1, arenas) + CHUNK_TILE * (first * chunks + (last - first) * start)
    made[:, S_AT], made[:, S_CHUNKS], made[:, S_ROW] = start, stop, GROUP * first
    sessions = min(program.slots, shape.sessions)
    made[:, S_BYTES] = sessions * CHUNK_BYTES
    if name == "mamba2_projection":
        inner, channels = (int(v) for v in program.payloads[payload]["parameter"][3:5])
        box = window_sessions(sessions, stages)
        held = -(-(made[:, S_SLOT_HI] - made[:, S_SLOT_LO]) // box)
        made[:, S_WINDOWS] = np.where((GROUP * last > inner) & (GROUP * first < inner + channels), held, 0)
    return made


def _frame_entries(
    program: Program, payload: int, name: str, tasks: NDArray[Any], orders: NDArray[np.int64], shape: Shape,
    arenas: Sequence[int], stages: Stages,
) -> NDArray[np.int64]:  # fmt: skip
    """An entry a unit of `tf32_matmul`: a part of as many sessions as a tile holds."""
    product = Frames.of(program.payloads[payload]["parameter"])
    task, part, slot = product.units(tasks)
    made = _entries(tasks[task], orders[task], KINDS[name])
    _, frames, sessions = product.box(program.slots)
    made[:, S_SLOT_LO], made[:, S_SLOT_HI] = slot, np.minimum(slot + sessions, made[:, S_SLOT_HI])
    made[:, S_PART_LO], made[:, S_PART_HI] = part, part + 1
    first, last, made[:, S_ROW] = product.ranges(part)
    made[:, S_STEP], made[:, S_CHUNKS] = (last - first) * CHUNK_TILE, product.chunks
    made[:, S_SOURCE] = _place(program, payload, 1, arenas) + CHUNK_TILE * product.chunks * first
    made[:, S_BYTES] = frames * sessions * CHUNK_BYTES
    return made


def _other_entries(
    program: Program, payload: int, name: str, tasks: NDArray[Any], orders: NDArray[np.int64], shape: Shape,
    arenas: Sequence[int], stages: Stages,
) -> NDArray[np.int64]:  # fmt: skip
    """An entry a task: tiles of state, or rows of a cache, of its slots."""
    made = _entries(tasks, orders, KINDS[name])
    values = [int(v) for v in program.payloads[payload]["parameter"]]
    if name == "mamba2_step":
        rows = values[3]
        made[:, S_STEP], made[:, S_SOURCE] = rows * STATE_ROW, _place(program, payload, 1, arenas)
        made[:, S_BYTES] = _state_terms(rows)
    else:
        _, groups, width = values[:3]
        made[:, S_BYTES] = 2 * groups * width * CACHE_ROWS * 2
    return made


def _early_waves(program: Program, names: Sequence[str]) -> dict[int, int]:
    """Payload -> the last wave before its own that writes what it streams early."""
    wave_of = _waves(program)
    writers = _writers(program)
    found: dict[int, int] = {}
    for index, wave in wave_of.items():
        name = names[index]
        if name in PRODUCTS:
            found[index] = WEIGHTS_ONLY
        elif name == "mamba2_step":
            state = int(program.uses[index]["value"][1])
            found[index] = max((w for w in writers.get(state, ()) if w < wave), default=WEIGHTS_ONLY)
        elif name == "attention_parts":
            found[index] = wave - 1  # which rows it reads, the wave before may have decided
    return found


def _waves(program: Program) -> dict[int, int]:
    """Payload -> its wave; for those that have tasks."""
    return dict(zip(program.tasks["payload"].tolist(), program.tasks["wave"].tolist(), strict=True))


def _writers(program: Program) -> dict[int, list[int]]:
    """Value -> the waves that write it."""
    found: dict[int, list[int]] = {}
    for index, wave in sorted(_waves(program).items()):
        record, use = program.payloads[index], program.uses[index]
        name, _, version = program.operators[int(record["opcode"])].partition("@")
        operands = int(record["operands"])
        for place in LIBRARY.get(name, int(version)).writes(operands):
            if int(record["reference"][place]) != ABSENT:
                found.setdefault(int(use["value"][place]), []).append(wave)
    return found


def warm_table(program: Program, weights: int) -> NDArray[np.int64]:
    """[waves, 2]: the largest small weight that a wave reads, address and bytes. weights: address of the arena."""
    table = np.zeros((max(program.waves, 1), 2), np.int64)
    waves = _waves(program)
    for index, wave in waves.items():
        record = program.payloads[index]
        for place in range(int(record["operands"])):
            reference, size = int(record["reference"][place]), int(program.uses[index]["size"][place])
            if reference != ABSENT and reference >> ARENA_SHIFT == Arena.WEIGHTS and size <= SMALL_WEIGHT:
                row = table[wave]
                if size // 16 * 16 > row[1]:
                    row[:] = weights + (reference & OFFSET_MASK), size // 16 * 16
    return table


# --- tensor maps --------------------------------------------------------------------------------------------------
def tensor_maps(program: Program, shape: Shape) -> list[TensorMap]:
    """The maps of the payloads whose operands are copied box by box."""
    made, stages = [], stages_of(program, shape)
    for index, name in enumerate(operator_names(program)):
        values = [int(v) for v in program.payloads[index]["parameter"]]
        if name == "tf32_matmul":
            product = Frames.of(values)
            windows, steps, tile = (product.k, product.frames), (4 * product.step,), product.box(program.slots)
            made.append(_map(program, index, 0, windows, steps, tile, dtype=DType.F32))
        elif name in PRODUCTS:
            depth = values[0] if name == "qkv_projection" else values[1]
            rows = min(program.slots, shape.sessions)
            made.append(_map(program, index, 0, (depth,), (), (BOX_COLUMNS, rows)))
        if name == "mamba2_projection":
            channels = values[4]
            box = (TILE_ROWS, 3, window_sessions(min(program.slots, shape.sessions), stages[index]))
            made.append(_map(program, index, 4, (channels, 3), (2 * channels,), box, which=1))
        elif name == "attention_parts":
            _, groups, width, rows = values[:4]
            sizes, strides = (width, rows, 2 * groups), (4 * groups * width, 2 * width)
            made.append(_map(program, index, 1, sizes, strides, (BOX_COLUMNS, CACHE_ROWS, 2 * groups, 1)))
    return made


def window_sessions(sessions: int, stages: Stages) -> int:
    """Sessions of each of the boxes that bring the windows of a tile's sessions, beside the taps."""
    most = (stages.size - TAP_BYTES) // WINDOW_BYTES
    return -(-sessions // -(-sessions // most))


def _map(
    program: Program, index: int, place: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
    which: int = 0, dtype: DType = DType.BF16,
) -> TensorMap:  # fmt: skip
    """A map whose outermost dimension is the slots. A window's box is read in rows, not in swizzled tiles."""
    record = program.payloads[index]
    packed, stride = int(record["reference"][place]), int(record["stride"][place])
    offset = packed & OFFSET_MASK
    if offset % 16 or stride % 16 or any(s % 16 for s in strides):
        raise ProgramError(
            f"{program.labels[index]}: an operand that the copy engine cannot address", wanted="multiples of 16 bytes",
            found=f"offset {offset}, strides {(*strides, stride)}",
        )  # fmt: skip
    arena = packed >> ARENA_SHIFT
    return TensorMap(index, which, arena, offset, (*sizes, program.slots), (*strides, stride), box, which == 0, dtype)


# --- inputs, outputs, scratch -------------------------------------------------------------------------------------
def transfers(program: Program, direction: Direction) -> NDArray[np.int64]:
    """Offset and stride of every value of the ports of one direction."""
    indices = sorted({index for values in program.named_ports(direction).values() for index in values})
    rows = [(int(program.values[i]["offset"]), int(program.values[i]["stride"])) for i in indices]
    return np.array(rows, np.int64).reshape(-1, 2)


def scratch_bytes(program: Program, least: int) -> int:
    """Scratch of one thread: what the most demanding phase needs for one part of one slot."""
    needs = [least]
    for record, name in zip(program.payloads, operator_names(program), strict=True):
        if name == "attention":
            heads, groups = int(record["parameter"][0]), int(record["parameter"][3])
            needs.append(4 * (heads // groups) * (ATTENTION_ROWS + 2))
        if name == "scalar_program":
            needs.append(4 * int(record["parameter"][1]))  # its registers
    return -(-max(needs) // 64) * 64
