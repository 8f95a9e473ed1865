"""Checks of payloads against the operators that they run: operands, the bytes of parts, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wpk.ops.operator import Extent, Operator
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK
from wpk.scheduler.check.facts import LIMIT, Facts
from wpk.scheduler.program import DTYPES, NONE, Role

MOST_RUNS = 1 << 22  # runs of bytes that one phase's parts may write


def operators(facts: Facts) -> Iterator[str]:
    """Every operator is known and has operands, parameters and sizes that its body can execute safely."""
    for name in facts.program.operators:
        base, at, version = name.rpartition("@")
        if not at or not version.isdigit() or int(version) not in facts.library.versions(base):
            yield f"operator {name!r} is not in the library"
            return
    known: dict[tuple[Any, ...], str | None] = {}
    for i, record in enumerate(facts.program.payloads):
        cls, operands = facts.classes[record["opcode"]], int(record["operands"])
        required = sum(not (o.optional or o.variadic) for o in cls.operands)
        if operands < required + cls.result_count:
            yield f"{facts.phase(i)}: {operands} operands, wanted at least {required + cls.result_count}"
            continue
        present = tuple(reference != ABSENT for reference in record["reference"][:operands].tolist())
        key = (cls, facts.parameters[i], present)
        if key not in known:
            known[key] = _illegal(*key)
        if known[key] is not None:
            yield f"{facts.phase(i)}: parameters {facts.parameters[i]}: wanted {known[key]}"
            continue
        extents = _or_none(cls.extents, facts.parameters[i], operands)
        if extents is None or len(extents) < operands:
            yield f"{facts.phase(i)}: parameters {facts.parameters[i]} give no sizes for {operands} operands"
            continue
        for j in (*range(required), *cls.writes(operands)):
            if record["reference"][j] == ABSENT:
                yield f"{facts.phase(i)}: operand {j} is absent"
        for j in range(operands):
            if record["reference"][j] != ABSENT and not 0 < extents[j] <= LIMIT:
                yield f"{facts.phase(i)}: operand {j} would be {extents[j]} bytes"


def _illegal(cls: type[Operator], parameters: tuple[int, ...], present: tuple[bool, ...]) -> str | None:
    """What a payload wants before its body may run, or None."""
    try:
        return cls.legal(parameters, len(present), present)
    except Exception as error:
        return f"what can be decided ({type(error).__name__}: {error})"


def _or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """What an operator's formula gives, or None where these parameters break it."""
    try:
        return function(*arguments)
    except Exception:
        return None


def parts(facts: Facts) -> Iterator[str]:
    """Parts that run apart write apart, and nothing of a result is left out."""
    program = facts.program
    known: dict[tuple[Any, ...], str] = {}
    for i, record in enumerate(program.payloads):
        cls, count = facts.classes[record["opcode"]], int(record["parts"])
        for cut in {tuple(ranges) for _, _, ranges in facts.bands(i)}:
            for j in cls.writes(int(record["operands"])):
                key = (cls, facts.parameters[i], j, count, cut)
                if key not in known:
                    known[key] = _uncovered(cls, facts.parameters[i], j, count, cut, facts.extents[i][j])
                if known[key]:
                    yield f"{facts.phase(i)}: operand {j}: {known[key]}"


def _uncovered(
    cls: type[Operator], parameters: tuple[int, ...], operand: int, count: int, cut: Sequence[tuple[int, int]],
    length: int,
) -> str:  # fmt: skip
    """What is wrong with the bytes that these ranges of parts write of a result, or nothing."""
    ends = [(0, 1), (count - 1, count)]
    pieces = [cls.part_writes(parameters, operand, lo, hi) for lo, hi in (*ends, *cut)]
    if any(piece is None for piece in pieces):
        return "" if count == 1 else f"{count} parts, each of which writes the whole result"
    by_range: list[Sequence[Extent]] = [(p,) if isinstance(p, Extent) else p for p in pieces if p is not None]
    for (lo, hi), several in zip((*ends, *cut), by_range, strict=True):
        for run in several:
            inside = run.length > 0 and run.rows >= 1 and run.offset >= 0 and run.end <= length
            if not inside or (run.rows > 1 and run.pitch < run.length):
                return f"parts {lo}:{hi} of {count} write {run} of {length} bytes"
    runs = [run for several in by_range[2:] for run in several]
    shape = {(r.rows, r.pitch) for r in runs}
    if len(shape) == 1 and runs[0].rows > 1 and runs[0].rows * runs[0].pitch == length:
        intervals, whole = [(r.offset, r.offset + r.length) for r in runs], runs[0].pitch
    elif sum(r.rows for r in runs) > MOST_RUNS:
        return f"more than {MOST_RUNS} runs of bytes"
    else:
        intervals = [(r.offset + k * r.pitch, r.offset + k * r.pitch + r.length) for r in runs for k in range(r.rows)]
        whole = length
    at = 0
    for lo, hi in sorted(intervals):
        if lo < at:
            return f"bytes {lo}:{min(at, hi)} are written by two parts"
        if lo > at:
            return f"bytes {at}:{lo} are written by no part"
        at = hi
    return "" if at == whole else f"bytes {at}:{whole} are written by no part"


def references(facts: Facts) -> Iterator[str]:
    """Every operand of a payload is the value, at the place, that `uses` names."""
    program = facts.program
    values = {name: program.values[name].tolist() for name in ("arena", "role", "dtype", "offset", "size", "stride")}
    for i, record in enumerate(program.payloads):
        cls, operands, extents = facts.classes[record["opcode"]], int(record["operands"]), facts.extents[i]
        writes = cls.writes(operands)
        stride, reference = record["stride"].tolist(), record["reference"].tolist()
        dtypes = tuple(
            DTYPES[values["dtype"][v]] if v < len(program.values) else None
            for v in program.uses["value"][i, :operands].tolist()
        )
        wanted_dtypes = cls.operand_dtypes(facts.parameters[i], dtypes)
        for result, operand in cls.alias.items():
            if reference[writes[result]] != reference[operand] or extents[writes[result]] != extents[operand]:
                yield f"{facts.phase(i)}: operand {writes[result]} is not the storage of operand {operand}"
        for j, use in enumerate(program.uses[i].tolist()):
            value, start = use[0], use[1]
            place = f"operand {j}"
            if j >= operands or reference[j] == ABSENT or value == NONE:
                if (reference[j], stride[j], value, sum(use[1:])) != (ABSENT, 0, NONE, 0):
                    yield f"{facts.phase(i)}: {place} is there in one of payload and uses only"
                continue
            if value >= len(program.values):
                yield f"{facts.phase(i)}: {place} uses value {value} of {len(program.values)}"
                continue
            place = f"{place}, {facts.value(value)}"
            wanted = (values["arena"][value], values["offset"][value] + start, values["stride"][value])
            found = (reference[j] >> ARENA_SHIFT, reference[j] & OFFSET_MASK, stride[j])
            if wanted != found:
                yield f"{facts.phase(i)}: {place}: (arena, offset, stride) wanted {wanted}, found {found}"
            if start + extents[j] > values["size"][value]:
                yield f"{facts.phase(i)}: {place}: bytes {start}:{start + extents[j]} of {values['size'][value]}"
            dtype, role = DTYPES[values["dtype"][value]], Role(values["role"][value])
            whole = values["size"][value] if role is Role.WEIGHT else use[2]
            if whole != extents[j] or (role is Role.WEIGHT and start != 0):
                yield f"{facts.phase(i)}: {place}: wanted {whole} bytes, the parameters say {extents[j]}"
            if start % dtype.bytes or extents[j] % dtype.bytes:
                yield f"{facts.phase(i)}: {place}: bytes {start}:{start + extents[j]} cut a {dtype.value}"
            if dtype is not wanted_dtypes[j]:
                yield f"{facts.phase(i)}: {place} is {dtype.value}, the operator wants {wanted_dtypes[j]}"
            if j in writes:
                if role in (Role.WEIGHT, Role.INPUT):
                    yield f"{facts.phase(i)}: {place}: writes a value of role {role.name.lower()}"
            elif not _fits(cls, j, dtype, role):
                yield f"{facts.phase(i)}: {place}: {role.name.lower()} {dtype.value} is not what the operator takes"


def _fits(cls: type[Operator], operand: int, dtype: Any, role: Role) -> bool:
    """Whether an input takes this dtype and role; those that may be left out are not told apart by their place."""
    required = [o for o in cls.operands if not (o.optional or o.variadic)]
    if operand < len(required):
        one = required[operand]
        return dtype in one.dtypes and one.weight in (None, role is Role.WEIGHT)
    return any(dtype in o.dtypes for o in cls.operands if o.optional or o.variadic)
