"""A profile as a person reads it: its phases, waves and arenas, decoded from the program's bytes.

What the bytes don't say (shapes and FLOPs) comes from compiling the model once more in memory, and is left out where
that no longer gives this program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wpk.cli.output import Block, Fields, Output, Table, refuse, size
from wpk.registry import Manifest, ProfileStore
from wpk.registry.lowering import recompiled
from wpk.scheduler.explain import operands, phase_rows


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
