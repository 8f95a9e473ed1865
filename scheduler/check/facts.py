"""What is derived from a program once and used by several checks: operators, byte ranges, waves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ops.operator import Operator, OperatorLibrary
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK
from wpk.scheduler.program import Program

LIMIT = 1 << 40  # bytes of all arenas
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


class Facts:
    """What is derived from a program once and used by several checks."""

    def __init__(self, program: Program, library: OperatorLibrary) -> None:
        self.program, self.library = program, library

    @cached_property
    def _tasks(self) -> list[list[tuple[int, int, int, int]]]:
        """Each payload's tasks: slot_lo, slot_hi, part_lo, part_hi."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in self.program.payloads]
        names = ("payload", "slot_lo", "slot_hi", "part_lo", "part_hi")
        for payload, *task in zip(*(self.program.tasks[name].tolist() for name in names), strict=True):
            found[payload].append((task[0], task[1], task[2], task[3]))
        return found

    def bands(self, payload: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Ranges of slots within which a payload's tasks don't change, each with its sorted ranges of parts."""
        tasks = self._tasks[payload]
        edges = sorted({edge for lo, hi, _, _ in tasks for edge in (lo, hi)})
        return [
            (first, end, sorted((a, b) for lo, hi, a, b in tasks if lo <= first and end <= hi))
            for first, end in pairwise(edges)
        ]

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
