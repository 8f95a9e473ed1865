"""A program decoded from its bytes: what each phase runs, when, on what and where that lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wpk.ops import LIBRARY
from wpk.ops.operator import Operator
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK, Arena
from wpk.scheduler.phases import Phase
from wpk.scheduler.program import DTYPES, NONE, Program, Role


def phase_rows(program: Program, phases: Sequence[Phase] | None) -> list[dict[str, Any]]:
    """One row a phase, in the order of the payloads.

    phases: those that the program was emitted from, where they are known. shape: of its first result, one session's.
    bytes: touched in a beat by all sessions, weights once. flops: likewise; None where unknown.
    """
    rows = []
    for index, payload in enumerate(program.payloads):
        name, _, version = program.operators[payload["opcode"]].partition("@")
        tasks = program.tasks[program.tasks["payload"] == index]
        phase = phases[index] if phases else None
        flops = sum(phase.operator.cost(*phase.types).flops.values()) * program.slots if phase else None
        rows.append(
            {
                "index": index,
                "wave": int(tasks["wave"][0]),
                "op": name,
                "version": int(version),
                "label": program.labels[index],
                "shape": list(phase.operator.infer(phase.types)[0].shape) if phase else _elements(program, index),
                "bytes": _touched(program, index),
                "flops": flops,
                "blocks": len(np.unique(tasks["block"])),
                "parts": int(payload["parts"]),
            }
        )
    return rows


def operands(program: Program, index: int) -> list[dict[str, Any]]:
    """The operands of one phase: the value that each refers to, and where it lies."""
    payload, found = program.payloads[index], []
    for operand in range(int(payload["operands"])):
        reference = int(payload["reference"][operand])
        if reference == ABSENT:
            continue
        value = int(program.uses[index, operand]["value"])
        entry = program.values[value]
        first, last = int(entry["first"]), int(entry["last"])
        found.append(
            {
                "operand": operand,
                "value": program.value_names[value],
                "role": Role(entry["role"]).name.lower(),
                "arena": Arena(reference >> ARENA_SHIFT).name.lower(),
                "offset": reference & OFFSET_MASK,
                "stride": int(payload["stride"][operand]),
                "live": [None if first == NONE else first, None if last == NONE else last],
            }
        )
    return found


def _elements(program: Program, index: int) -> list[int]:
    """Elements of the first result, where its shape is not known."""
    written = _operator(program, index).writes(int(program.payloads[index]["operands"]))
    value = program.values[program.uses[index, written[0]]["value"]]
    return [int(value["size"]) // DTYPES[value["dtype"]].bytes]


def _touched(program: Program, index: int) -> int:
    payload = program.payloads[index]
    count = int(payload["operands"])
    extents = _operator(program, index).extents([int(p) for p in payload["parameter"]], count)
    total = 0
    for reference, touched in zip(payload["reference"][:count].tolist(), extents[:count], strict=True):
        if reference != ABSENT:
            total += touched * (1 if reference >> ARENA_SHIFT == Arena.WEIGHTS else program.slots)
    return total


def _operator(program: Program, index: int) -> type[Operator]:
    """The operator that a phase runs."""
    name, _, version = program.operators[program.payloads[index]["opcode"]].partition("@")
    return LIBRARY.get(name, int(version))
