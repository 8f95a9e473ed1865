"""Where a program's four arenas live, and how bytes get there: host memory for the CPU, the device's for a GPU.

Both kinds are zeroed when they are made, take what a loader makes by `write`, and give the arena of inputs and outputs
as host memory by `arenas[Arena.IO]`. On a GPU neither weights nor state ever exist in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import CapacityError, ProgramError
from wpk.kernel.control import aligned_bytes
from wpk.kernel.driver import Gpu
from wpk.ops.payload import Arena
from wpk.scheduler.program import Program

Bytes = NDArray[np.uint8]
ROOM = 1 << 28  # bytes of a device that a kernel needs beside its arenas: tables, scratch, machine code


def no_room(program: Program, wanted: str, found: str) -> CapacityError:
    return CapacityError(
        f"{program.slots} sessions do not fit into memory", capacity=program.slots, wanted=wanted, found=found,
        hint="Lower --cap or --context.",
    )  # fmt: skip


class HostArenas(list[Bytes]):
    """The arenas as arrays in host memory, in the order of `Arena`."""

    def __init__(self, program: Program) -> None:
        try:
            super().__init__(aligned_bytes(program.arenas[arena]) for arena in Arena)
        except MemoryError:
            raise no_room(program, f"{sum(program.arenas) / 1e9:.1f} GB", "an allocation that failed") from None

    def write(self, arena: Arena, offset: int, data: Bytes) -> None:
        """Bytes into an arena."""
        self[arena][offset : offset + data.size] = data


class DeviceArenas:
    """The arenas in a GPU's memory; that of inputs and outputs in host memory as well.

    addresses: of the four arenas on the device. Whoever makes them closes `gpu`, or hands them to a `CudaKernel`,
    which does. Raises `CapacityError` where the device has too little memory.
    """

    def __init__(self, program: Program, gpu: Gpu, io: Bytes | None = None) -> None:
        self.program, self.gpu = program, gpu
        free, total = gpu.memory()
        needed = sum(program.arenas) + program.arenas[Arena.STATE] // program.slots + ROOM
        if needed > free:
            raise no_room(
                program, f"{needed / 1e9:.1f} GB of the GPU's memory",
                f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free on {gpu.device.name}",
            )  # fmt: skip
        self.io = aligned_bytes(program.arenas[Arena.IO]) if io is None else io
        self.addresses = [gpu.allocate(program.arenas[arena]) for arena in Arena]

    @classmethod
    def holding(cls, program: Program, gpu: Gpu, arenas: Sequence[Bytes]) -> DeviceArenas:
        """Copies of arenas in host memory, whose inputs and outputs stay where they are."""
        wanted = [program.arenas[a] for a in Arena]
        if any(len(memory) < size for memory, size in zip(arenas, wanted, strict=True)):
            raise ProgramError("arenas do not fit the program", wanted=wanted, found=[len(a) for a in arenas])
        made = cls(program, gpu, arenas[Arena.IO])
        for arena in Arena:
            made.write(arena, 0, arenas[arena][: program.arenas[arena]])
        return made

    def write(self, arena: Arena, offset: int, data: Bytes) -> None:
        """Bytes into an arena on the device."""
        if data.size:
            self.gpu.write(self.addresses[arena] + offset, np.ascontiguousarray(data))

    def __getitem__(self, arena: Arena) -> Bytes:
        """The arena of inputs and outputs as the host sees it; of any other a copy, between beats."""
        if arena is Arena.IO:
            return self.io
        return self.gpu.read(self.addresses[arena], self.program.arenas[arena])

    def close(self) -> None:
        """Give everything back, with the device's context; idempotent."""
        self.gpu.close()
