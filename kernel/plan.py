"""What a launch derives from a program: each block's tasks, what its producer streams, and tensor maps.

All of it follows from the program's bytes, so that a profile holds nothing that only one kind of kernel understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import ProgramError
from wpk.kernel.layout import PRODUCTS, STREAMED, Shape
from wpk.ops.attention import ATTENTION_ROWS
from wpk.ops.operator import LIBRARY
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK
from wpk.scheduler.program import Direction, Program

CACHE_ROWS = 8  # of a stage; as in wpk.kernel.streamed.ring
WEIGHTS_ONLY = -1  # early bytes that wait for no wave
BOX_COLUMNS = 64  # bf16 of a 128-byte row of a tensor map's box


@dataclass(frozen=True)
class TensorMap:
    """A tensor of bf16 in global memory and the box that one copy brings; the innermost dimension first."""

    payload: int
    arena: int
    offset: int  # bytes into the arena
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]


def operator_names(program: Program) -> list[str]:
    """The operator of each payload, without its version."""
    return [program.operators[int(p["opcode"])].partition("@")[0] for p in program.payloads]


# --- tasks --------------------------------------------------------------------------------------------------------
def task_table(program: Program) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Tasks sorted by block and wave, and [blocks, waves + 2]: each block's first task of each wave, then its end."""
    tasks = program.tasks[np.lexsort((program.tasks["wave"], program.tasks["block"]))]
    keys = tasks["block"].astype(np.int64) * (program.waves + 1) + tasks["wave"]
    wanted = np.arange(program.blocks)[:, None] * (program.waves + 1) + np.arange(program.waves + 2)[None, :]
    return tasks, np.searchsorted(keys, wanted).astype(np.int32)


def stream_table(program: Program, tasks: NDArray[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """For each block the streamed ones of its tasks: [entries, 4] (task, wave, wave before its early bytes, 0).

    The early bytes of an entry may be copied once the wave after that one is open.
    """
    names = operator_names(program)
    streamed = np.array([name in STREAMED for name in names], bool)
    chosen = np.flatnonzero(streamed[tasks["payload"]]) if len(names) else np.zeros(0, np.int64)
    rows = np.zeros((len(chosen), 4), np.int32)
    rows[:, 0], rows[:, 1] = chosen, tasks["wave"][chosen]
    before = _early_waves(program, names)
    rows[:, 2] = [before[int(p)] for p in tasks["payload"][chosen]]
    starts = np.searchsorted(tasks["block"][chosen], np.arange(program.blocks + 1)).astype(np.int32)
    return rows, starts


def _early_waves(program: Program, names: Sequence[str]) -> dict[int, int]:
    """Payload -> the last wave before its own that writes what it streams early."""
    wave_of = _waves(program)
    writers = _accesses(program, written=True)
    found: dict[int, int] = {}
    for index, name in enumerate(names):
        if name in PRODUCTS:
            found[index] = WEIGHTS_ONLY
        elif name == "mamba2_step":
            state = int(program.uses[index]["value"][1])
            found[index] = max((w for w in writers.get(state, ()) if w < wave_of[index]), default=WEIGHTS_ONLY)
        elif name == "attention_parts":
            found[index] = wave_of[index] - 1  # which rows it reads, the wave before may have decided
    return found


def _waves(program: Program) -> dict[int, int]:
    """Payload -> its wave."""
    return dict(zip(program.tasks["payload"].tolist(), program.tasks["wave"].tolist(), strict=True))


def _accesses(program: Program, *, written: bool) -> dict[int, list[int]]:
    """Value -> the waves that write (or read) it."""
    waves, found = _waves(program), {}  # type: dict[int, int], dict[int, list[int]]
    for index, (record, use) in enumerate(zip(program.payloads, program.uses, strict=True)):
        name, _, version = program.operators[int(record["opcode"])].partition("@")
        operands = int(record["operands"])
        outputs = set(LIBRARY.get(name, int(version)).writes(operands))
        for place in range(operands):
            if int(record["reference"][place]) != ABSENT and (place in outputs) == written:
                found.setdefault(int(use["value"][place]), []).append(waves[index])
    return found


def fence_table(program: Program) -> NDArray[np.int32]:
    """[waves]: 1 where the threads must order what they wrote with the copy engine, at the end of a wave.

    What a wave writes and a later wave's copies read needs one such wave between; as few waves as will do, each as
    late as it can be. Across beats the barrier after the inputs serves.
    """
    reads: dict[int, list[int]] = {}
    waves = _waves(program)
    for index, name in enumerate(operator_names(program)):
        for place in {"mamba2_step": (0, 1), "attention_parts": (1,)}.get(name, (0,) if name in PRODUCTS else ()):
            reads.setdefault(int(program.uses[index]["value"][place]), []).append(waves[index])
    spans = []
    for value, written in _accesses(program, written=True).items():
        for wave in written:
            later = [r for r in reads.get(value, ()) if r > wave]
            spans += [(min(later) - 1, wave)] if later else []
    fences = np.zeros(max(program.waves, 1), np.int32)
    last = -1
    for end, start in sorted(spans):
        if last < start:
            fences[end], last = 1, end
    return fences


# --- tensor maps --------------------------------------------------------------------------------------------------
def tensor_maps(program: Program, shape: Shape) -> list[TensorMap]:
    """The maps of the payloads whose operands are copied box by box."""
    made = []
    for index, name in enumerate(operator_names(program)):
        record = program.payloads[index]
        values = [int(v) for v in record["parameter"]]
        if name in PRODUCTS:
            depth = values[0] if name == "qkv_projection" else values[1]
            made.append(
                _map(program, index, 0, (depth,), (), (BOX_COLUMNS,), min(program.slots, shape.sessions))
            )  # fmt: skip
        elif name == "attention_parts":
            _, groups, width, rows = values[:4]
            made.append(
                _map(
                    program, index, 1, (width, rows, 2 * groups), (4 * groups * width, 2 * width),
                    (BOX_COLUMNS, CACHE_ROWS, 2 * groups), 1,
                )
            )  # fmt: skip
    return made


def _map(
    program: Program, index: int, place: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...],
    slots: int,
) -> TensorMap:  # fmt: skip
    """A map whose outermost dimension is the slots."""
    record = program.payloads[index]
    packed, stride = int(record["reference"][place]), int(record["stride"][place])
    offset = packed & OFFSET_MASK
    if offset % 16 or stride % 16:
        raise ProgramError(
            f"{program.labels[index]}: an operand that the copy engine cannot address", wanted="multiples of 16 bytes",
            found=f"offset {offset}, stride {stride}",
        )  # fmt: skip
    return TensorMap(
        index, packed >> ARENA_SHIFT, offset, (*sizes, program.slots), (*strides, stride), (*box, slots)
    )


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
    return -(-max(needs) // 64) * 64
