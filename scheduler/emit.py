"""The last pass: payloads, tasks and tables as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wpk.ir.errors import CompileError
from wpk.ops.payload import ABSENT, OPERANDS, PAYLOAD, Reference, encode_parameter
from wpk.scheduler.memory import Layout
from wpk.scheduler.phases import Lowered
from wpk.scheduler.place import Task
from wpk.scheduler.program import DTYPES, NONE, PORT, TASK, USE, VALUE, Direction, Program


def emit(lowered: Lowered, layout: Layout, tasks: Sequence[Task], slots: int, blocks: int, steps: int) -> Program:
    """Encode a placed and laid-out schedule."""
    names = sorted({f"{p.operator.name}@{p.operator.version}" for p in lowered.phases})
    opcodes = {name: i for i, name in enumerate(names)}
    payloads = np.zeros(len(lowered.phases), PAYLOAD)
    payloads["reference"] = ABSENT
    uses = np.zeros((len(lowered.phases), OPERANDS), USE)
    uses["value"] = NONE
    for phase, record, use in zip(lowered.phases, payloads, uses, strict=True):
        record["opcode"] = opcodes[f"{phase.operator.name}@{phase.operator.version}"]
        record["parts"] = phase.parts
        record["operands"] = 1 + max(place for place, _, _ in phase.places)
        if record["operands"] > OPERANDS:
            raise CompileError(
                f"{phase.label}: {phase.operator.name} has too many operands",
                wanted=f"<= {OPERANDS}", found=int(record["operands"]),
            )  # fmt: skip
        for place, ref, size in phase.places:
            home = layout.placed[ref.storage]
            if home.stride >= 1 << 32:
                raise CompileError(f"{phase.label}: a slot's stride", wanted="< 4 GiB", found=f"{home.stride} bytes")
            if max(ref.start, size) >= 1 << 32:
                raise CompileError(f"{phase.label}: one operand of a session", wanted="< 4 GiB", found=f"{size} bytes")
            record["reference"][place] = Reference(home.arena, home.offset + ref.start, home.stride).packed
            record["stride"][place] = home.stride
            use[place] = (ref.storage, ref.start, size)
        parameters = [encode_parameter(p) for p in phase.parameters]
        record["parameter"][: len(parameters)] = parameters
    rows = np.zeros(len(tasks), TASK)
    for row, task in zip(rows, tasks, strict=True):
        row["payload"], row["wave"], row["block"] = task.phase, task.wave, task.block
        row["slot_lo"], row["slot_hi"] = task.slots
        row["part_lo"], row["part_hi"] = task.parts
    values = np.zeros(len(lowered.storages), VALUE)
    for value, storage, home in zip(values, lowered.storages, layout.placed, strict=True):
        value["arena"], value["role"], value["dtype"] = home.arena, storage.role, DTYPES.index(storage.type.dtype)
        value["first"], value["last"] = home.first, home.last
        value["offset"], value["size"], value["stride"] = home.offset, storage.type.bytes, home.stride
    ports, port_names = _ports(lowered)
    return Program(
        slots=slots, blocks=blocks, waves=1 + max((t.wave for t in tasks), default=-1), steps=steps,
        arenas=layout.arenas, payloads=payloads, tasks=rows, values=values, uses=uses, ports=ports,
        operators=tuple(names), value_names=tuple(s.name for s in lowered.storages), port_names=port_names,
        labels=tuple(p.label for p in lowered.phases),
    )  # fmt: skip


def _ports(lowered: Lowered) -> tuple[np.ndarray, tuple[str, ...]]:
    found = [(n, r, Direction.INPUT) for n, r in lowered.inputs] + [
        (n, r, Direction.OUTPUT) for n, r in lowered.outputs
    ]
    ports = np.zeros(len(found), PORT)
    names = []
    for row, (name, ref, direction) in zip(ports, found, strict=True):
        base, _, step = name.rpartition("@")
        names.append(base)
        row["value"], row["direction"], row["step"] = ref.storage, direction, int(step)
    return ports, tuple(names)
