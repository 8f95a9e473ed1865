"""The static checks of a program: what its bytes alone let one prove before any kernel may run them.

Nothing of the compiler's own structures is used. Payloads, tasks and tables are decoded again; which bytes a phase
touches is derived from its payload's parameters through the operator class (`extents`, `part_writes`, `writes`).

What a program must obey, one check a line, in `CHECKS`:

    decoding     the bytes are a program of this format, and the only ones that say it
    structure    every index and range is inside its table; every wave has tasks; tasks are sorted by (wave, block)
    tiling       the tasks of a phase cover its slots x parts once, in one wave
    operators    every opcode is a known operator, with the operands and sizes that it needs
    parts        the parts of a phase write disjoint bytes, together the whole result
    references   an operand is the value that `uses` names, and has its dtype and size
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
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import ProgramError
from wpk.ops.operator import LIBRARY, Extent, Operator, OperatorLibrary
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK, OPERANDS, Arena
from wpk.scheduler.program import ALIGN, DTYPES, NONE, TASK, Direction, Program, Role

ARENA_OF = {
    Role.WEIGHT: Arena.WEIGHTS,
    Role.STATE: Arena.STATE,
    Role.INPUT: Arena.IO,
    Role.OUTPUT: Arena.IO,
    Role.TEMPORARY: Arena.ACTIVATIONS,
}
BEFORE = (Role.WEIGHT, Role.STATE, Role.INPUT)  # there before the beat
LIMIT = 1 << 40  # bytes of all arenas
MOST_WAVES = 1 << 22
MOST_RUNS = 1 << 22  # runs of bytes that one phase's parts may write
MOST_INTERVALS = 1 << 21  # that `hazards` sorts at once
SHOWN = 3  # failures that a check reports
INPLACE, ALIAS = 1, 2  # how a result may share the storage of an operand
ACCESS = np.dtype(
    [
        ("payload", "<i8"),
        ("operand", "<i8"),
        ("wave", "<i8"),
        ("value", "<i8"),
        ("arena", "<i8"),
        ("offset", "<i8"),  # of slot 0, in its arena
        ("stride", "<i8"),
        ("start", "<i8"),  # of its value
        ("length", "<i8"),
        ("write", "?"),
        ("shared", "u1"),  # INPLACE or ALIAS where this operand and a result are the same bytes by declaration
    ]
)


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


class Facts:
    """What is derived from a program once and used by several checks."""

    def __init__(self, program: Program, library: OperatorLibrary) -> None:
        self.program, self.library = program, library

    @cached_property
    def classes(self) -> list[type[Operator]]:
        """The operator of each opcode; raises where one is unknown."""
        return [self.library.get(n, int(v)) for n, _, v in (o.rpartition("@") for o in self.program.operators)]

    @cached_property
    def waves(self) -> NDArray[np.int64]:
        """The wave of each payload."""
        waves = np.zeros(len(self.program.payloads), np.int64)
        waves[self.program.tasks["payload"]] = self.program.tasks["wave"]
        return waves

    @cached_property
    def parameters(self) -> list[tuple[int, ...]]:
        return [tuple(p) for p in self.program.payloads["parameter"].tolist()]

    @cached_property
    def extents(self) -> list[tuple[int, ...]]:
        """Bytes of each operand of each payload, by its parameters."""
        known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        found = []
        records = zip(
            self.program.payloads["opcode"].tolist(), self.program.payloads["operands"].tolist(), self.parameters,
            strict=True,
        )  # fmt: skip
        for key in records:
            if key not in known:
                opcode, operands, parameters = key
                known[key] = tuple(int(e) for e in self.classes[opcode].extents(parameters, operands))
            found.append(known[key])
        return found

    @cached_property
    def accesses(self) -> NDArray[Any]:
        """Every operand of every payload as slot 0's bytes, in the order of the payload table."""
        program, rows = self.program, []
        offsets = program.values["offset"].tolist()
        columns = zip(
            program.payloads["opcode"].tolist(), program.payloads["operands"].tolist(),
            program.payloads["reference"].tolist(), program.payloads["stride"].tolist(),
            program.uses["value"].tolist(), self.waves.tolist(), self.extents, strict=True,
        )  # fmt: skip
        for index, (opcode, operands, reference, stride, value, wave, extent) in enumerate(columns):
            cls = self.classes[opcode]
            writes = cls.writes(operands)
            shared = _shared(cls, writes, reference, stride, extent)
            for i in range(operands):
                if reference[i] == ABSENT:
                    continue
                offset = reference[i] & OFFSET_MASK
                start = offset - offsets[value[i]] if value[i] < len(offsets) else 0
                rows.append(
                    (index, i, wave, value[i], reference[i] >> ARENA_SHIFT, offset, stride[i], start, extent[i],
                     i in writes, shared.get(i, 0))
                )  # fmt: skip
        return np.array(rows, ACCESS)

    @cached_property
    def by_value(self) -> dict[int, NDArray[Any]]:
        """The accesses of each value, in the order of the payload table."""
        order = np.argsort(self.accesses["value"], kind="stable")
        rows = self.accesses[order]
        if not len(rows):
            return {}
        cuts = np.flatnonzero(np.diff(rows["value"])) + 1
        return {int(group["value"][0]): group for group in np.split(rows, cuts)}

    def phase(self, payload: Any) -> str:
        """A phase as people know it."""
        record = self.program.payloads[payload]
        return f"wave {self.waves[payload]}, phase {payload} {self.program.labels[payload]!r} ({self._name(record)})"

    def _name(self, record: Any) -> str:
        opcode = int(record["opcode"])
        return self.program.operators[opcode] if opcode < len(self.program.operators) else f"opcode {opcode}"

    def value(self, index: Any) -> str:
        return f"value {index} {self.program.value_names[index]!r}"


def _shared(
    cls: type[Operator], writes: Sequence[int], reference: Sequence[int], stride: Sequence[int], extent: Sequence[int]
) -> dict[int, int]:
    """Operands, both ends, whose sharing of storage the operator declares and the payload makes use of."""
    found: dict[int, int] = {}
    for kind, declared in ((INPLACE, cls.inplace), (ALIAS, cls.alias)):
        for result, operand in declared.items():
            written = writes[result]
            same = reference[written] == reference[operand] and stride[written] == stride[operand]
            if same and extent[written] == extent[operand]:
                found[written] = found[operand] = kind
    return found


# --- the shape of the program -------------------------------------------------------------------------------------
def structure(facts: Facts) -> Iterator[str]:
    """Every index and range is inside its table."""
    p = facts.program
    tasks, values, ports = p.tasks, p.values, p.ports
    for what, names, table in (
        ("labels", p.labels, p.payloads), ("value names", p.value_names, values), ("port names", p.port_names, ports),
    ):  # fmt: skip
        if len(names) != len(table):
            yield f"{len(names)} {what} for {len(table)} entries"
    named = list(zip(values["role"].tolist(), p.value_names, strict=False))
    if len(set(named)) != len(named) or len(set(p.operators)) != len(p.operators):
        yield "the name of an operator, or of a value among those of its role, occurs twice"
    for what, number, most in (
        ("slots", p.slots, 1 << 16), ("blocks", p.blocks, 1 << 20), ("steps", p.steps, 1 << 20),
        ("waves", p.waves, MOST_WAVES),
    ):  # fmt: skip
        if not 1 <= number <= most:
            yield f"{number} {what}"
    if sum(p.arenas) > LIMIT or any(a % ALIGN for a in p.arenas):
        yield f"arenas of {p.arenas} bytes: wanted multiples of {ALIGN}, together at most {LIMIT}"
    for name in ("offset", "size", "stride"):
        for i in np.flatnonzero(values[name] > LIMIT):
            yield f"{facts.value(i)}: {name} {values[name][i]}"
    for i in np.flatnonzero((values["size"] == 0) | (values["role"] >= len(Role)) | (values["dtype"] >= len(DTYPES))):
        yield f"{facts.value(i)}: size {values['size'][i]}, role {values['role'][i]}, dtype {values['dtype'][i]}"
    if len(p.payloads) == 0 or (p.payloads["opcode"] >= len(p.operators)).any():
        yield f"opcodes {sorted(set(p.payloads['opcode'].tolist()))} in a table of {len(p.operators)} operators"
    elif len(np.unique(p.payloads["opcode"])) != len(p.operators):
        yield "an operator of the table is used by no payload"
    for i in np.flatnonzero((p.payloads["operands"] > OPERANDS) | (p.payloads["parts"] == 0)):
        yield f"payload {i}: {p.payloads['operands'][i]} operands, {p.payloads['parts'][i]} parts"
    for i in np.flatnonzero(tasks["payload"] >= len(p.payloads)):
        yield f"task {i} is of payload {tasks['payload'][i]} of {len(p.payloads)}"
        return
    parts = p.payloads["parts"][tasks["payload"]] if len(tasks) else np.zeros(0, np.uint32)
    bad = (tasks["slot_lo"] >= tasks["slot_hi"]) | (tasks["slot_hi"] > p.slots)
    bad |= (tasks["part_lo"] >= tasks["part_hi"]) | (tasks["part_hi"] > parts)
    bad |= (tasks["block"] >= p.blocks) | (tasks["wave"] >= p.waves) | (tasks["reserved"] != 0)
    for i in np.flatnonzero(bad):
        yield f"task {i} is out of range: {dict(zip(TASK.names or (), tasks[i].tolist(), strict=True))}"
    key = tasks["wave"].astype(np.int64) * (1 << 32) + tasks["block"]
    for i in np.flatnonzero(np.diff(key) < 0):
        yield f"task {i + 1} is not in the order of (wave, block)"
    empty = np.setdiff1d(np.arange(min(p.waves, len(tasks) + 1)), tasks["wave"])
    if len(empty) or p.waves > len(tasks):
        yield f"wave {empty[0] if len(empty) else p.waves - 1} has no task"
    if any(len(np.flatnonzero(values[n])) for n in ("reserved", "pad", "spare")) or ports["reserved"].any():
        yield "a reserved field of a value or port is set"


def tiling(facts: Facts) -> Iterator[str]:
    """The tasks of a payload cover its rectangle of slots x parts exactly once, in one wave.

    Accepted are ranges of slots each cut into ranges of parts, or ranges of parts each cut into ranges of slots.
    """
    p = facts.program
    tasks = p.tasks.astype([(n, "<i8") for n in TASK.names or ()])
    for i in np.setdiff1d(np.arange(len(p.payloads)), tasks["payload"]):
        yield f"payload {i} {p.labels[i]!r} has no task"
    for i in np.flatnonzero(facts.waves[tasks["payload"]] != tasks["wave"]):
        yield f"{facts.phase(tasks['payload'][i])} also has a task in wave {tasks['wave'][i]}"
    parts = p.payloads["parts"].astype(np.int64)
    slots = np.full(len(parts), p.slots, np.int64)
    bad = ~(_tiled(tasks, ("slot", slots), ("part", parts)) | _tiled(tasks, ("part", parts), ("slot", slots)))
    for i in np.flatnonzero(bad):
        rows = tasks[tasks["payload"] == i]
        shown = ", ".join(f"{r['slot_lo']}:{r['slot_hi']} x {r['part_lo']}:{r['part_hi']}" for r in rows[:4])
        yield f"{facts.phase(i)}: tasks {shown} do not cover {p.slots} slots x {parts[i]} parts once"


def _tiled(
    tasks: NDArray[Any], outer: tuple[str, NDArray[np.int64]], inner: tuple[str, NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Per payload: whether its tasks are ranges of `outer` one after the other, each cut into ranges of `inner`."""
    (a, a_size), (b, b_size) = outer, inner
    good = np.zeros(len(a_size), bool)
    if not len(tasks):
        return good
    t = tasks[np.lexsort((tasks[f"{b}_lo"], tasks[f"{a}_hi"], tasks[f"{a}_lo"], tasks["payload"]))]
    new = np.r_[True, t["payload"][1:] != t["payload"][:-1]]
    group = new | np.r_[True, (t[f"{a}_lo"][1:] != t[f"{a}_lo"][:-1]) | (t[f"{a}_hi"][1:] != t[f"{a}_hi"][:-1])]
    ends, final = np.r_[group[1:], True], np.r_[new[1:], True]
    before_a, before_b = np.r_[0, t[f"{a}_hi"][:-1]], np.r_[0, t[f"{b}_hi"][:-1]]
    ok = t[f"{b}_lo"] == np.where(group, 0, before_b)
    ok &= ~ends | (t[f"{b}_hi"] == b_size[t["payload"]])
    ok &= ~group | (t[f"{a}_lo"] == np.where(new, 0, before_a))
    ok &= ~final | (t[f"{a}_hi"] == a_size[t["payload"]])
    good[t["payload"]] = True
    good[t["payload"][~ok]] = False
    return good


def operators(facts: Facts) -> Iterator[str]:
    """Every operator is known, has the operands that it cannot do without, and sizes that make sense."""
    for name in facts.program.operators:
        base, at, version = name.rpartition("@")
        if not at or not version.isdigit() or int(version) not in facts.library.versions(base):
            yield f"operator {name!r} is not in the library"
            return
    for i, record in enumerate(facts.program.payloads):
        cls, operands = facts.classes[record["opcode"]], int(record["operands"])
        required = sum(not (o.optional or o.variadic) for o in cls.operands)
        if operands < required + cls.result_count:
            yield f"{facts.phase(i)}: {operands} operands, wanted at least {required + cls.result_count}"
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


def _or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """What an operator's formula gives, or None where these parameters break it."""
    try:
        return function(*arguments)
    except Exception:
        return None


def parts(facts: Facts) -> Iterator[str]:
    """Parts that run apart write apart, and nothing of a result is left out."""
    program = facts.program
    cuts: list[dict[int, list[tuple[int, int]]]] = [{} for _ in program.payloads]
    columns = (program.tasks[name].tolist() for name in ("payload", "slot_lo", "part_lo", "part_hi"))
    for payload, slot, lo, hi in zip(*columns, strict=True):
        cuts[payload].setdefault(slot, []).append((lo, hi))
    known: dict[tuple[Any, ...], str] = {}
    for i, record in enumerate(program.payloads):
        cls, count = facts.classes[record["opcode"]], int(record["parts"])
        for cut in {tuple(sorted(ranges)) for ranges in cuts[i].values()}:
            for j in cls.writes(int(record["operands"])):
                key = (cls, facts.parameters[i], j, count, cut)
                if key not in known:
                    aliased = j - int(record["operands"]) + cls.result_count in cls.alias
                    known[key] = _uncovered(cls, facts.parameters[i], j, count, cut, facts.extents[i][j], aliased)
                if known[key]:
                    yield f"{facts.phase(i)}: operand {j}: {known[key]}"


def _uncovered(
    cls: type[Operator], parameters: tuple[int, ...], operand: int, count: int, cut: Sequence[tuple[int, int]],
    length: int, aliased: bool,
) -> str:  # fmt: skip
    """What is wrong with the bytes that these ranges of parts write of a result, or nothing."""
    ends = [(0, 1), (count - 1, count)]
    pieces = [cls.part_writes(parameters, operand, lo, hi) for lo, hi in (*ends, *cut)]
    if any(piece is None for piece in pieces):
        return "" if count == 1 else f"{count} parts, each of which writes the whole result"
    runs: list[Extent] = [piece for piece in pieces if piece is not None]
    for (lo, hi), run in zip((*ends, *cut), runs, strict=True):
        inside = run.length > 0 and run.rows >= 1 and run.offset >= 0 and run.end <= length
        if not inside or (run.rows > 1 and run.pitch < run.length):
            return f"parts {lo}:{hi} of {count} write {run} of {length} bytes"
    runs = runs[2:]
    shape = {(r.rows, r.pitch) for r in runs}
    if len(shape) == 1 and runs[0].rows > 1:
        rows, pitch = shape.pop()
        intervals, whole = [(r.offset, r.offset + r.length) for r in runs], pitch
        if rows * pitch != length and not aliased:
            return f"{rows} rows of {pitch} bytes are not {length}"
    elif sum(r.rows for r in runs) > MOST_RUNS:
        return f"more than {MOST_RUNS} runs of bytes"
    else:
        intervals = [(r.offset + k * r.pitch, r.offset + k * r.pitch + r.length) for r in runs for k in range(r.rows)]
        whole = length
    at = 0
    for lo, hi in sorted(intervals):
        if lo < at:
            return f"bytes {lo}:{min(at, hi)} are written by two parts"
        if lo > at and not aliased:
            return f"bytes {at}:{lo} are written by no part"
        at = hi
    return "" if at == whole or aliased else f"bytes {at}:{whole} are written by no part"


# --- what the operands are ----------------------------------------------------------------------------------------
def references(facts: Facts) -> Iterator[str]:
    """Every operand of a payload is the value, at the place, that `uses` names."""
    program = facts.program
    values = {name: program.values[name].tolist() for name in ("arena", "role", "dtype", "offset", "size", "stride")}
    for i, record in enumerate(program.payloads):
        cls, operands, extents = facts.classes[record["opcode"]], int(record["operands"]), facts.extents[i]
        writes = cls.writes(operands)
        stride, reference = record["stride"].tolist(), record["reference"].tolist()
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


# --- where the values lie -----------------------------------------------------------------------------------------
def bounds(facts: Facts) -> Iterator[str]:
    """Values are inside their arenas and on cache lines; state is inside the slab of its session."""
    p = facts.program
    state = p.values["stride"][p.values["role"] == Role.STATE]
    if len(np.unique(state)) > 1:
        yield f"states have different strides: {sorted(set(state.tolist()))}; wanted one slab a session"
    for i, row in enumerate(p.values):
        arena, role = int(row["arena"]), Role(int(row["role"]))
        offset, size, stride = int(row["offset"]), int(row["size"]), int(row["stride"])
        if arena != ARENA_OF[role]:
            yield f"{facts.value(i)}: a {role.name.lower()} in arena {arena}, wanted {ARENA_OF[role].name.lower()}"
            continue
        if offset % ALIGN or stride % ALIGN or size % DTYPES[row["dtype"]].bytes:
            yield f"{facts.value(i)}: offset {offset}, stride {stride}, size {size} are not aligned"
        if offset + (p.slots - 1) * stride + size > p.arenas[arena]:
            yield (
                f"{facts.value(i)}: slot {p.slots - 1} ends at byte {offset + (p.slots - 1) * stride + size} "
                f"of {p.arenas[arena]} in {ARENA_OF[role].name.lower()}"
            )
        if role is Role.STATE and offset + size > stride:
            yield f"{facts.value(i)}: bytes {offset}:{offset + size} leave the session's slab of {stride}"


def isolation(facts: Facts) -> Iterator[str]:
    """A slot's bytes of a value are no other slot's, and a task of a slot stays within them."""
    values, slots = facts.program.values, facts.program.slots
    weight = values["role"] == Role.WEIGHT
    for i in np.flatnonzero(weight & (values["stride"] != 0)):
        yield f"{facts.value(i)}: a weight has stride {values['stride'][i]}"
    for i in np.flatnonzero(~weight & (values["stride"] < values["size"])):
        yield f"{facts.value(i)}: slots are {values['stride'][i]} bytes apart and {values['size'][i]} long"
    rows = facts.accesses
    at = np.minimum(rows["value"], len(values) - 1)
    offset, size = values["offset"].astype(np.int64)[at], values["size"].astype(np.int64)[at]
    bad = (rows["offset"] < offset) | (rows["offset"] + rows["length"] > offset + size)
    bad |= (rows["stride"] != values["stride"].astype(np.int64)[at]) | (rows["arena"] != values["arena"][at])
    bad |= ~weight[at] & (rows["stride"] < rows["length"]) & (slots > 1)
    for row in rows[bad]:
        lo, slot = row["offset"], slots - 1
        yield (
            f"{facts.phase(row['payload'])}: operand {row['operand']}: slot {slot} touches bytes "
            f"{lo + slot * row['stride']}:{lo + slot * row['stride'] + row['length']} outside of its own"
        )


def aliasing(facts: Facts) -> Iterator[str]:
    """No two values that are live in one wave have a byte in common.

    An arena is laid out session by session (one stride, which all values of a session fit into) or value by value
    (each value's slots in one stretch of its own); either way one sweep over one axis of bytes decides.
    """
    p = facts.program
    for arena in Arena:
        index = np.flatnonzero(p.values["arena"] == arena)
        rows = p.values[index]
        lo, hi = rows["offset"].astype(np.int64), (rows["offset"] + rows["size"]).astype(np.int64)
        stride = rows["stride"].astype(np.int64)
        if len(rows) and not (len(np.unique(stride)) == 1 and (hi <= stride).all()):
            hi = hi + (p.slots - 1) * stride
        temporary = rows["role"] == Role.TEMPORARY
        first = np.where(temporary, rows["first"], 0).astype(np.int64)
        last = np.where(temporary, rows["last"], NONE).astype(np.int64)
        for a, b, at in _overlaps(lo, hi, first, last):
            yield (
                f"{facts.value(index[a])} and {facts.value(index[b])} are both live in wave {first[b]} "
                f"at byte {at} of {arena.name.lower()}"
            )


def _overlaps(
    lo: NDArray[np.int64], hi: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """(earlier, later, byte) of ranges that overlap in bytes and in waves."""
    edges = np.unique(np.r_[lo, hi])
    until, owner = np.full(len(edges), -1, np.int64), np.zeros(len(edges), np.int64)
    left, right = np.searchsorted(edges, lo), np.searchsorted(edges, hi)
    for i in np.argsort(first, kind="stable"):
        cells = slice(left[i], right[i])
        taken = np.flatnonzero(until[cells] >= first[i])
        if len(taken):
            yield int(owner[cells][taken[0]]), int(i), int(edges[cells][taken[0]])
        until[cells], owner[cells] = last[i], i


# --- when they are touched ----------------------------------------------------------------------------------------
def lifetimes(facts: Facts) -> Iterator[str]:
    """`first` is the wave of the first write, `last` that of the last use; NONE beyond the beat."""
    for i, row in enumerate(facts.program.values):
        role, rows = Role(int(row["role"])), facts.by_value.get(i)
        if rows is None and role in (Role.WEIGHT, Role.TEMPORARY):
            yield f"{facts.value(i)} is used by no phase"
            continue
        written = rows["wave"][rows["write"]] if rows is not None else np.zeros(0, np.int64)
        first = NONE if role in BEFORE or not len(written) else int(written.min())
        last = int(rows["wave"].max()) if rows is not None and role is Role.TEMPORARY else NONE
        if (row["first"], row["last"]) != (first, last):
            yield (
                f"{facts.value(i)} of role {role.name.lower()} is live in waves {_span(row['first'], row['last'])}, "
                f"its uses say {_span(first, last)}"
            )


def _span(first: int, last: int) -> str:
    return f"{'-' if first == NONE else first}..{'-' if last == NONE else last}"


def definition(facts: Facts) -> Iterator[str]:
    """Temporaries and outputs: written whole and once, read only what earlier waves wrote."""
    roles, sizes = facts.program.values["role"].tolist(), facts.program.values["size"].tolist()
    for i, (role, size) in enumerate(zip(roles, sizes, strict=True)):
        if role in BEFORE:
            continue
        rows = facts.by_value.get(i, np.zeros(0, ACCESS))
        columns = (rows[n].tolist() for n in ("wave", "write", "start", "length", "shared", "payload"))
        written: list[tuple[int, int]] = []  # by earlier waves; sorted, disjoint
        fresh: list[tuple[int, int]] = []  # by this wave
        now = -1
        for wave, write, lo, length, shared, payload in sorted(zip(*columns, strict=True)):
            if wave != now:
                written, fresh, now = _merged([*written, *fresh]), [], wave
            hole = _hole(written, lo, lo + length)
            if not write and hole is not None:
                yield f"{facts.phase(payload)} reads {facts.value(i)} bytes {hole}:{lo + length} before they are there"
            if write:
                fresh.append((lo, lo + length))
                if not shared and any(a < lo + length and lo < b for a, b in written):
                    yield f"{facts.phase(payload)} writes {facts.value(i)} a second time, not in place"
        hole = _hole(_merged([*written, *fresh]), 0, size)
        if hole is not None:
            yield f"{facts.value(i)}: bytes {hole}:{size} are never written"


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(intervals):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _hole(merged: Sequence[tuple[int, int]], lo: int, hi: int) -> int | None:
    """The first byte of [lo, hi) that is in none of the intervals."""
    for a, b in merged:
        if a <= lo < b:
            return None if hi <= b else b
    return lo


def order(facts: Facts) -> Iterator[str]:
    """The waves keep the order of the payload table wherever two phases touch the same bytes and one writes."""
    for i, rows in facts.by_value.items():
        lo, hi = rows["start"], rows["start"] + rows["length"]
        for k in np.flatnonzero(rows["write"]):
            meet = (lo < hi[k]) & (lo[k] < hi) & (rows["payload"] != rows["payload"][k])
            sooner, later = rows["payload"] < rows["payload"][k], rows["payload"] > rows["payload"][k]
            wrong = meet & ((sooner & (rows["wave"] >= rows["wave"][k])) | (later & (rows["wave"] <= rows["wave"][k])))
            for other in np.flatnonzero(wrong):
                a, b = sorted((int(rows["payload"][k]), int(rows["payload"][other])))
                yield f"{facts.phase(b)} does not wait for {facts.phase(a)}: both touch {facts.value(i)}"


def hazards(facts: Facts) -> Iterator[str]:
    """Inside a wave no byte is written by one phase or slot and touched by another.

    Every slot's bytes of every operand, as the payloads have them, sorted on one axis of (wave, arena, byte). An
    operand that a result may overwrite in place is not counted: a part touches the same elements of both.
    """
    p, rows = facts.program, facts.accesses
    rows = rows[(rows["arena"] != Arena.WEIGHTS) & ~((rows["shared"] > 0) & ~rows["write"])]
    for row in facts.accesses[facts.accesses["write"] & (facts.accesses["arena"] == Arena.WEIGHTS)]:
        yield f"{facts.phase(row['payload'])} writes to the weights"
    if not len(rows):
        return
    rows = rows[np.argsort(rows["wave"], kind="stable")]
    chunk = np.arange(len(rows)) * p.slots // MOST_INTERVALS
    starts = np.flatnonzero(np.diff(rows["wave"], prepend=-1))  # chunks are cut between waves
    cuts = starts[np.flatnonzero(np.diff(chunk[starts]) > 0) + 1]
    for some in np.split(rows, cuts):
        yield from _meetings(facts, some)


def _meetings(facts: Facts, rows: NDArray[Any]) -> Iterator[str]:
    """Accesses of one wave that share a byte, one of them writing."""
    p = facts.program
    base = np.cumsum([0, *p.arenas])[rows["arena"]] + rows["offset"] + rows["wave"] * (LIMIT << 1)
    lo = (base[:, None] + rows["stride"][:, None] * np.arange(p.slots)).reshape(-1)
    row_of = np.repeat(np.arange(len(rows)), p.slots)
    rank = np.argsort(lo, kind="stable")
    lo, row_of = lo[rank], row_of[rank]
    hi, write = lo + rows["length"][row_of], rows["write"][row_of]
    touched = np.maximum.accumulate(hi)[:-1]
    written = np.maximum.accumulate(np.where(write, hi, -1))[:-1]
    clash = (written > lo[1:]) | (write[1:] & (touched > lo[1:]))
    for k in np.flatnonzero(clash) + 1:
        near = slice(max(0, k - 4096), k)
        other = np.flatnonzero((hi[near] > lo[k]) & (write[near] | write[k]))
        culprit = rows[row_of[near][other[0]]] if len(other) else rows[row_of[k]]
        a, slot, arena = rows[row_of[k]], int(rank[k] % p.slots), Arena(int(rows[row_of[k]]["arena"])).name.lower()
        at = a["offset"] + slot * a["stride"]
        yield (
            f"{facts.phase(a['payload'])} operand {a['operand']} slot {slot} and {facts.phase(culprit['payload'])} "
            f"operand {culprit['operand']} meet in bytes {at}:{at + a['length']} of {arena}"
        )


def state(facts: Facts) -> Iterator[str]:
    """A state is overwritten whole and once a beat, or updated in place by its operator at most once a step."""
    p = facts.program
    for i in np.flatnonzero(p.values["role"] == Role.STATE):
        rows = facts.by_value.get(int(i))
        writes = rows[rows["write"]] if rows is not None else np.zeros(0, ACCESS)
        if not len(writes):
            continue
        spans = sorted(zip(writes["start"].tolist(), (writes["start"] + writes["length"]).tolist(), strict=True))
        hole = _hole(_merged(spans), 0, int(p.values["size"][i]))
        if hole is not None:
            yield f"{facts.value(int(i))}: bytes {hole}:{p.values['size'][i]} keep the last beat's content"
        appended = writes["shared"] == ALIAS
        if appended.any() and (not appended.all() or len(writes) > p.steps):
            yield f"{facts.value(int(i))} is written {len(writes)} times in a beat of {p.steps} steps"
        if not appended.any() and any(a[1] > b[0] for a, b in pairwise(spans)):
            yield f"{facts.value(int(i))} is overwritten twice, last by {facts.phase(writes['payload'][-1])}"


def ports(facts: Facts) -> Iterator[str]:
    """Every input and output value is one port's, and every port has one value a step."""
    p = facts.program
    held: dict[int, int] = {}
    steps: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, row in zip(p.port_names, p.ports, strict=True):
        value, direction, step = int(row["value"]), int(row["direction"]), int(row["step"])
        if value >= len(p.values) or direction not in tuple(Direction) or step >= p.steps:
            yield f"port {name!r}: value {value}, direction {direction}, step {step} of {p.steps}"
            continue
        role = Role.INPUT if direction == Direction.INPUT else Role.OUTPUT
        if p.values["role"][value] != role:
            yield f"port {name!r}: {facts.value(value)} is no {role.name.lower()}"
        if p.value_names[value] != f"{name}@{step}":
            yield f"port {name!r} of step {step} is {facts.value(value)}"
        held[value] = held.get(value, 0) + 1
        steps.setdefault((name, direction), []).append((step, value))
    for i in np.flatnonzero(np.isin(p.values["role"], (Role.INPUT, Role.OUTPUT))):
        if held.get(int(i), 0) != 1:
            yield f"{facts.value(int(i))} has {held.get(int(i), 0)} ports"
    for (name, _), found in steps.items():
        if sorted(s for s, _ in found) != list(range(p.steps)):
            yield f"port {name!r} has the steps {sorted(s for s, _ in found)} of {p.steps}"
        if len({(int(p.values["size"][v]), int(p.values["dtype"][v])) for _, v in found}) > 1:
            yield f"port {name!r} changes its type from step to step"


@dataclass(frozen=True)
class Row:
    """A check of the table; where a gate fails, what follows cannot be examined."""

    name: str
    failures: Callable[[Facts], Iterator[str]]
    gate: bool = False


CHECKS = (
    Row("structure", structure, gate=True),
    Row("tiling", tiling, gate=True),
    Row("operators", operators, gate=True),
    Row("parts", parts),
    Row("references", references),
    Row("bounds", bounds),
    Row("isolation", isolation),
    Row("aliasing", aliasing),
    Row("lifetimes", lifetimes),
    Row("definition", definition),
    Row("order", order),
    Row("hazards", hazards),
    Row("state", state),
    Row("ports", ports),
)
