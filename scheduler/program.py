"""The program: the bytes that every kernel executes, and the tables that let them be checked.

    header    128 bytes: magic, format, sizes, arena sizes, section lengths
    payloads  128 bytes each (`wpk.ops.payload`)
    tasks      32 bytes each: which block runs which part of which payload for which slots, in which wave
    values     48 bytes each: every range of memory that means something, and the waves in which it is live
    uses       84 bytes a payload: for each operand, the value that it refers to, the byte at which it starts, its bytes
    ports      16 bytes each: which values are the inputs and outputs
    strings   operator table, value names, port names, labels of payloads; one JSON object, sorted keys

All little endian. Tasks are sorted by (wave, block); phases of one wave do not depend on each other, and a grid
barrier separates waves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import ProgramError
from wpk.ir.types import DType
from wpk.ops.payload import OPERANDS, PAYLOAD, Arena

MAGIC = b"WPKPROG1"
FORMAT = 1
NONE = 0xFFFFFFFF  # no value, no wave
ALIGN = 64  # bytes; every value starts on a cache line

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("slots", "<u4"),
        ("blocks", "<u4"),
        ("waves", "<u4"),
        ("steps", "<u4"),
        ("reserved", "<u4"),
        ("arenas", "<u8", 4),
        ("payloads", "<u4"),
        ("tasks", "<u4"),
        ("values", "<u4"),
        ("ports", "<u4"),
        ("strings", "<u4"),
        ("padding", "<u4", 11),
    ]
)
TASK = np.dtype(
    [
        ("payload", "<u4"),
        ("wave", "<u4"),
        ("block", "<u4"),
        ("slot_lo", "<u4"),
        ("slot_hi", "<u4"),
        ("part_lo", "<u4"),
        ("part_hi", "<u4"),
        ("reserved", "<u4"),
    ]
)
VALUE = np.dtype(
    [
        ("arena", "u1"),
        ("role", "u1"),
        ("dtype", "u1"),
        ("reserved", "u1"),
        ("first", "<u4"),  # wave of the first write; NONE: there before the beat
        ("last", "<u4"),  # wave of the last use; NONE: still needed after the beat
        ("pad", "<u4"),
        ("offset", "<u8"),  # of slot 0, in its arena
        ("size", "<u8"),  # bytes of one session
        ("stride", "<u8"),  # bytes from slot to slot; 0 for weights
        ("spare", "<u8"),
    ]
)
USE = np.dtype([("value", "<u4"), ("start", "<u4"), ("size", "<u4")])  # bytes of the value that the operand is
PORT = np.dtype([("value", "<u4"), ("direction", "<u4"), ("step", "<u4"), ("reserved", "<u4")])
assert (HEADER.itemsize, TASK.itemsize, VALUE.itemsize, PORT.itemsize) == (128, 32, 48, 16)
DTYPES = (DType.F32, DType.BF16, DType.I32, DType.BOOL)


class Role(IntEnum):
    """What a value is for."""

    WEIGHT = 0
    STATE = 1
    INPUT = 2
    OUTPUT = 3
    TEMPORARY = 4


ARENA_OF = {
    Role.WEIGHT: Arena.WEIGHTS,
    Role.STATE: Arena.STATE,
    Role.INPUT: Arena.IO,
    Role.OUTPUT: Arena.IO,
    Role.TEMPORARY: Arena.ACTIVATIONS,
}


class Direction(IntEnum):
    INPUT = 0
    OUTPUT = 1


@dataclass(frozen=True)
class Program:
    """A decoded program; `to_bytes` and `from_bytes` are exact inverses."""

    slots: int
    blocks: int
    waves: int
    steps: int
    arenas: tuple[int, int, int, int]  # bytes, in the order of `Arena`
    payloads: NDArray[Any]
    tasks: NDArray[Any]
    values: NDArray[Any]
    uses: NDArray[Any]  # [payloads, OPERANDS] of USE
    ports: NDArray[Any]
    operators: tuple[str, ...]  # opcode -> "name@version"
    value_names: tuple[str, ...]
    port_names: tuple[str, ...]
    labels: tuple[str, ...]  # one a payload

    def to_bytes(self) -> bytes:
        strings = json.dumps(
            {
                "labels": self.labels,
                "operators": self.operators,
                "ports": self.port_names,
                "values": self.value_names,
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
        header = np.zeros(1, HEADER)
        header["magic"], header["format"] = MAGIC, FORMAT
        header["slots"], header["blocks"], header["waves"] = self.slots, self.blocks, self.waves
        header["steps"], header["arenas"] = self.steps, self.arenas
        header["payloads"], header["tasks"] = len(self.payloads), len(self.tasks)
        header["values"], header["ports"], header["strings"] = len(self.values), len(self.ports), len(strings)
        sections = (header, self.payloads, self.tasks, self.values, self.uses, self.ports)
        return b"".join(s.tobytes() for s in sections) + strings

    @staticmethod
    def from_bytes(data: bytes) -> Program:
        """Decode; `ProgramError` where the bytes are no program of this format."""
        if len(data) < HEADER.itemsize:
            raise ProgramError("a program is cut short", wanted=f">= {HEADER.itemsize} bytes", found=len(data))
        header = np.frombuffer(data, HEADER, 1)[0]
        if bytes(header["magic"]) != MAGIC:
            raise ProgramError("not a program", wanted=MAGIC, found=bytes(header["magic"]))
        if header["format"] != FORMAT:
            raise ProgramError(
                "a program of another format", wanted=FORMAT, found=int(header["format"]), hint="Rebuild the profile."
            )
        counts = {k: int(header[k]) for k in ("payloads", "tasks", "values", "ports", "strings")}
        plan = (
            (PAYLOAD, counts["payloads"]),
            (TASK, counts["tasks"]),
            (VALUE, counts["values"]),
            (USE, counts["payloads"] * OPERANDS),
            (PORT, counts["ports"]),
        )
        expected = HEADER.itemsize + sum(d.itemsize * n for d, n in plan) + counts["strings"]
        if expected != len(data):
            raise ProgramError("a program's sections do not fill it", wanted=f"{expected} bytes", found=len(data))
        at, sections = HEADER.itemsize, []
        for dtype, count in plan:
            sections.append(np.frombuffer(data, dtype, count, at))
            at += dtype.itemsize * count
        try:
            strings = json.loads(data[at:])
            tables = [tuple(map(str, strings[k])) for k in ("operators", "values", "ports", "labels")]
        except (ValueError, KeyError, TypeError) as error:
            raise ProgramError("a program's string table is broken", wanted="JSON", found=error) from None
        payloads, tasks, values, uses, ports = sections
        return Program(
            int(header["slots"]), int(header["blocks"]), int(header["waves"]), int(header["steps"]),
            tuple(int(a) for a in header["arenas"]),  # type: ignore[arg-type]
            payloads, tasks, values, uses.reshape(-1, OPERANDS), ports, *tables,
        )  # fmt: skip

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def arena_bytes(self) -> dict[str, int]:
        """Bytes by arena, under the names of the command line."""
        return {arena.name.lower(): self.arenas[arena] for arena in Arena}

    def with_operators(self, table: Sequence[str]) -> Program:
        """The same program with the opcodes of a table that holds all its operators.

        Programs of one table can share a kernel's machine code.
        """
        codes = np.array([list(table).index(name) for name in self.operators], np.uint16)
        payloads = self.payloads.copy()
        payloads["opcode"] = codes[payloads["opcode"]]
        return replace(self, payloads=payloads, operators=tuple(table))

    def named_ports(self, direction: Direction) -> dict[str, list[int]]:
        """Port name -> its values, one a step of the beat, in order."""
        found: dict[str, list[tuple[int, int]]] = {}
        for name, port in zip(self.port_names, self.ports, strict=True):
            if port["direction"] == direction:
                found.setdefault(name, []).append((int(port["step"]), int(port["value"])))
        return {name: [value for _, value in sorted(steps)] for name, steps in found.items()}
