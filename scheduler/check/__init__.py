"""The static checks of a program: what its bytes alone let one prove before any kernel may run them.

Nothing of the compiler's own structures is used. Payloads, tasks and tables are decoded again; which bytes a phase
touches is derived from its payload's parameters through the operator class (`legal`, `extents`, `part_writes`).

What a program must obey, one check a line, in `CHECKS`:

    decoding     the bytes are a program of this format, and the only ones that say it
    structure    every index and range is inside its table; every wave has tasks; tasks are sorted by (wave, block)
    tiling       the tasks of a phase cover its slots x parts once, in one wave
    operators    every opcode is a known operator, with operands and parameters that its body can run safely (`legal`)
    parts        the parts of a phase write disjoint bytes, together the whole result
    references   an operand is the value that `uses` names, and has its size and the dtype that is read or written
    bounds       values lie inside their arenas, state inside its session's slab, all on cache lines
    isolation    the bytes of one slot are no other slot's
    aliasing     values that are live in one wave share no byte
    lifetimes    `first` and `last` are the waves of the first write and the last use
    definition   what is read was written whole in earlier waves, once, or rewritten in place by leave of the operator
    order        phases that touch the same bytes, one writing, run in the order of the payload table
    hazards      inside a wave no byte is written by one phase or slot and touched by another
    state        a state is written whole, once a beat, or in place once a step
    ports        every input and output has its port, one a step

The payload table is the sequential meaning of the program: run one payload after the other and you have the beat.
`order` proves that the waves keep that meaning, also where storage is overwritten in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from wpk.ir.errors import ProgramError
from wpk.ops.operator import LIBRARY, OperatorLibrary
from wpk.scheduler.check import dataflow, operands, storage, structure
from wpk.scheduler.check.facts import Facts
from wpk.scheduler.program import Program

SHOWN = 3  # failures that a check reports


@dataclass(frozen=True, slots=True)
class Check:
    """One check's verdict; `detail` names the first failures."""

    name: str
    ok: bool
    detail: str = ""


def check_program(data: bytes | Program, library: OperatorLibrary = LIBRARY) -> list[Check]:
    """Run every check; garbage makes checks fail, never raises."""
    try:
        data = data.to_bytes() if isinstance(data, Program) else bytes(data)
        program = Program.from_bytes(data)
        canonical = program.to_bytes() == data
    except Exception as error:  # whatever the bytes broke, they are no program
        return [Check("decoding", False, f"{type(error).__name__}: {error}"), *_skipped(CHECKS, "decoding")]
    if not canonical:
        detail = "the bytes are not what this program encodes to: a reserved field is set, or a string table is odd"
        return [Check("decoding", False, detail), *_skipped(CHECKS, "decoding")]
    facts, found = Facts(program, library), [Check("decoding", True)]
    for i, row in enumerate(CHECKS):
        try:
            failures = list(islice(row.failures(facts), SHOWN))
        except Exception as error:
            failures = [f"cannot be decided: {type(error).__name__}: {error}"]
        found.append(Check(row.name, not failures, "; ".join(failures)))
        if failures and row.gate:
            return [*found, *_skipped(CHECKS[i + 1 :], row.name)]
    return found


def verify_program(data: bytes | Program, library: OperatorLibrary = LIBRARY) -> None:
    """Raise a `ProgramError` that names the failed checks and their first culprits."""
    failed = [c for c in check_program(data, library) if not c.ok and not c.detail.startswith(_SKIPPED)]
    if failed:
        raise ProgramError(
            f"a program fails its static checks: {', '.join(c.name for c in failed)}",
            wanted="every check to pass",
            found=" | ".join(f"{c.name}: {c.detail}" for c in failed[:SHOWN]),
            hint="Rebuild the profile; where a fresh build fails, the compiler is at fault and this is a bug report.",
        )


_SKIPPED = "not examined"


def _skipped(rows: Sequence[Row], why: str) -> list[Check]:
    return [Check(r.name, False, f"{_SKIPPED}: {why} failed") for r in rows]


@dataclass(frozen=True)
class Row:
    """A check of the table; where a gate fails, what follows cannot be examined."""

    name: str
    failures: Callable[[Facts], Iterator[str]]
    gate: bool = False


CHECKS = (
    Row("structure", structure.structure, gate=True),
    Row("tiling", structure.tiling, gate=True),
    Row("operators", operands.operators, gate=True),
    Row("parts", operands.parts),
    Row("references", operands.references),
    Row("bounds", storage.bounds),
    Row("isolation", storage.isolation),
    Row("aliasing", storage.aliasing),
    Row("lifetimes", dataflow.lifetimes),
    Row("definition", dataflow.definition),
    Row("order", dataflow.order),
    Row("hazards", dataflow.hazards),
    Row("state", dataflow.state),
    Row("ports", structure.ports),
)
