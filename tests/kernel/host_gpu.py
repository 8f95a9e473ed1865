"""A stand-in for `wpk.kernel.driver.Gpu`: its memory is the host's, its kernel compiled for the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import njit

from wpk.kernel.arenas import DeviceArenas
from wpk.kernel.control import aligned_bytes
from wpk.kernel.driver import Device
from wpk.kernel.packing import PARAMETERS, Packer, pack

pack_on_host = njit(pack, error_model="numpy")


class HostGpu:
    """What `DeviceArenas` and `Packer` ask of a GPU. free_bytes: of its memory. launches: arguments by name."""

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.device = Device(0, "a GPU in host memory", 2, (9, 0))
        self.free_bytes, self.kept, self.mapped, self.modules, self.launches = free_bytes, {}, set(), [], []
        self.closed = False

    def memory(self) -> tuple[int, int]:
        return self.free_bytes, 1 << 40

    def allocate(self, size: int) -> int:
        memory = aligned_bytes(max(size, 256))
        self.kept[int(memory.ctypes.data)] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        del self.kept[address]

    def write(self, address: int, data: np.ndarray) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    send = write

    def read(self, address: int, size: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(address, size), np.uint8)

    def map(self, address: int, size: int) -> int:
        self.mapped.add(address)
        return address

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def module(self, image: bytes) -> str:
        self.modules.append("module")
        return "module"

    def function(self, module: str, entry: str) -> str:
        return entry

    def drop(self, module: str) -> None:
        self.modules.remove(module)

    def start(self, function: str, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
        self.launches.append(dict(zip(PARAMETERS, arguments, strict=True)))
        for first in range(3):  # three threads, whatever was asked for
            pack_on_host(first, 3, *arguments)

    def mark(self) -> object:
        return object()

    def await_mark(self, event: object) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class NoCubin:
    image = b""


def device_arenas(program: Any, gpu: Any = None) -> DeviceArenas:
    return DeviceArenas(program, gpu or HostGpu())  # type: ignore[arg-type]


def packer(gpu: Any, marks: int, staging_bytes: int = 4096) -> Packer:
    """With small pieces, so that little data takes many."""
    return Packer(gpu, NoCubin(), marks, staging_bytes)  # type: ignore[arg-type]
