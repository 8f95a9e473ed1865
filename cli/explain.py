"""A profile as a person reads it: its phases, waves and arenas, decoded from the program's bytes.

What the bytes don't say (shapes and FLOPs) comes from compiling the model once more in memory, and is left out where
that no longer gives this program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wpk.bench.floor import lowered_beat
from wpk.cli.output import Block, Fields, Output, Table, refuse, size
from wpk.ir.errors import WpkError
from wpk.ops import LIBRARY
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK, Arena
from wpk.registry import Manifest, ProfileStore, find_model
from wpk.scheduler.phases import Phase
from wpk.scheduler.program import DTYPES, NONE, Program, Role


def explain(out: Output, prefix: str, chosen: int | None) -> None:
    """Show a profile, or one of its phases."""
    profile = ProfileStore().read(prefix)
    manifest, program = profile.manifest, profile.program
    rows = phase_rows(program, recompiled(manifest, program))
    if chosen is not None and not 0 <= chosen < len(rows):
        refuse(f"{manifest.id} has no phase {chosen}", wanted=f"0 to {len(rows) - 1}", found=chosen)
    shown = rows if chosen is None else [rows[chosen] | {"operands": operands(program, chosen)}]
    arenas = program.arena_bytes()
    fields = {"id": manifest.id, "waves": program.waves, "arenas": arenas, "phases": shown}
    out.result(
        fields, names=[manifest.id], blocks=_one(shown[0]) if chosen is not None else _all(manifest, rows, arenas)
    )


def phase_rows(program: Program, phases: Sequence[Phase] | None) -> list[dict[str, Any]]:
    """One row a phase, in the order of the payloads.

    shape: of its first result, one session's. bytes: touched in a
    beat by all sessions, weights once. flops: likewise; None where unknown.
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


def recompiled(manifest: Manifest, program: Program) -> Sequence[Phase] | None:
    """The phases of the same model compiled now; None where they are no longer this program's."""
    try:
        phases = lowered_beat(find_model(manifest.model), manifest.context).phases
    except WpkError:
        return None
    made = [(f"{p.operator.name}@{p.operator.version}", p.label) for p in phases]
    held = [(program.operators[p["opcode"]], label) for p, label in zip(program.payloads, program.labels, strict=True)]
    return phases if made == held else None


def _elements(program: Program, index: int) -> list[int]:
    """Elements of the first result, where its shape is not known."""
    payload = program.payloads[index]
    name, _, version = program.operators[payload["opcode"]].partition("@")
    written = LIBRARY.get(name, int(version)).writes(int(payload["operands"]))
    value = program.values[program.uses[index, written[0]]["value"]]
    return [int(value["size"]) // DTYPES[value["dtype"]].bytes]


def _touched(program: Program, index: int) -> int:
    payload = program.payloads[index]
    name, _, version = program.operators[payload["opcode"]].partition("@")
    count = int(payload["operands"])
    extents = LIBRARY.get(name, int(version)).extents([int(p) for p in payload["parameter"]], count)
    total = 0
    for reference, touched in zip(payload["reference"][:count].tolist(), extents[:count], strict=True):
        if reference != ABSENT:
            total += touched * (1 if reference >> ARENA_SHIFT == Arena.WEIGHTS else program.slots)
    return total


def _all(manifest: Manifest, rows: Sequence[dict[str, Any]], arenas: dict[str, int]) -> list[Block]:
    phases = [
        (r["index"], r["wave"], f"{r['op']}@{r['version']}", _shape(r["shape"]), size(r["bytes"]), r["flops"],
         r["blocks"], r["label"])
        for r in rows
    ]  # fmt: skip
    return [
        Table(("phase", "wave", "operator", "shape", "touches", "FLOPs", "blocks", "made by"), phases),
        Fields({name: size(count) for name, count in arenas.items()}, title="arenas"),
        f"{len(rows)} phases in {manifest.waves} waves, for {manifest.capacity} sessions on {manifest.target}",
    ]


def _one(row: dict[str, Any]) -> list[Block]:
    columns = ("operand", "value", "role", "arena", "offset", "stride", "live")
    plain = {k: v for k, v in row.items() if k != "operands"} | {"shape": _shape(row["shape"])}
    rows = [[o[c] for c in columns[:-1]] + [_life(o["live"])] for o in row["operands"]]
    return [Fields(plain), Table(columns, rows, title="operands")]


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _life(live: Sequence[int | None]) -> str:
    first, last = live
    return f"{'before' if first is None else first}..{'after' if last is None else last}"
