"""Other processes on a GPU. A resident kernel takes every multiprocessor; beside somebody else it is slowed.

NVML is asked (pynvml, of the package nvidia-ml-py) or else `nvidia-smi`. In a container neither may show processes that
run outside it: memory that no process in sight holds is then the only hint of them.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wpk.ir.errors import TargetError
from wpk.kernel.driver import Device, call

TIMEOUT_S = 20.0  # of nvidia-smi, which takes seconds where the driver is not kept loaded
NOTICED = 1 << 30  # bytes that nobody in sight holds; below, the driver's own
PROCESSES = "pid,used_memory,process_name"  # the name last: it may have commas
MEND = "End it, choose another GPU with CUDA_VISIBLE_DEVICES, or expect slower beats that jitter."
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Process:
    """memory: bytes of the GPU's that it holds; None where that is not told."""

    pid: int
    name: str
    memory: int | None = None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{'' if self.memory is None else f', {self.memory / 2**30:.1f} GiB'})"


@dataclass(frozen=True)
class Neighbours:
    """processes: those with a context on the GPU, this one left out. unseen: bytes that no process in sight holds.

    unknown: why none of it could be found out; None where it could.
    """

    processes: tuple[Process, ...] = ()
    unseen: int = 0
    unknown: str | None = None

    @property
    def there(self) -> bool:
        """Is somebody else there, as far as can be seen?"""
        return bool(self.processes) or self.unseen > NOTICED

    def __str__(self) -> str:
        if self.unknown is not None:
            return f"not known: {self.unknown}"
        said = [str(process) for process in self.processes]
        if self.unseen > NOTICED:
            said.append(f"{self.unseen / 2**30:.1f} GiB held by no process in sight (outside this container?)")
        return "; ".join(said) or "no other process"


def require_alone(device: Device, *, exclusive: bool, notice: Notice) -> None:
    """Say through `notice` who else uses the GPU; exclusive: refuse then, and where it can't be known (TargetError)."""
    found = find_neighbours(bus_id(device))
    if exclusive and (found.there or found.unknown is not None):
        lacking = "Install nvidia-ml-py or nvidia-smi, or load without `exclusive`."
        raise TargetError(
            f"GPU {device.ordinal} ({device.name}) is not this process's alone", wanted="no other process on the GPU",
            found=found, hint=lacking if found.unknown is not None else MEND,
        )  # fmt: skip
    if found.there:
        notice(f"GPU {device.ordinal} ({device.name}) is shared, and beats will be slower and jitter: {found}. {MEND}")


def bus_id(device: Device) -> str:
    """DOMAIN:BUS:DEVICE.FUNCTION: what NVML and CUDA both know a GPU by; their ordinals may differ."""
    name: bytes = call("cuDeviceGetPCIBusId", 32, call("cuDeviceGet", device.ordinal))
    return name.split(b"\0")[0].decode()


def find_neighbours(gpu: str) -> Neighbours:
    """Who else is on a GPU. gpu: its PCI bus id, or its index in the driver's own order."""
    try:
        return sift(*_ask_nvml(gpu))
    except Exception:  # no such package, no driver's library, or no permission
        pass
    listed, used = (
        nvidia_smi("-i", gpu, f"--query-{what}", "--format=csv,noheader,nounits")
        for what in (f"compute-apps={PROCESSES}", "gpu=memory.used")
    )
    if isinstance(listed, str):
        return Neighbours(unknown=listed)
    try:
        processes = parse_processes(listed)
    except ValueError as error:
        return Neighbours(unknown=f"nvidia-smi says {error}")
    return sift(processes, None if isinstance(used, str) else _mebibytes(used[0] if used else ""))


def sift(processes: Sequence[Process], used: int | None) -> Neighbours:
    """All processes on a GPU without this one. used: bytes of the GPU's memory that are taken; None: not told."""
    unseen = 0
    if used is not None and all(process.memory is not None for process in processes):
        unseen = max(0, used - sum(process.memory or 0 for process in processes))
    return Neighbours(tuple(process for process in processes if process.pid != os.getpid()), unseen)


def parse_processes(lines: Sequence[str]) -> list[Process]:
    """Rows of PROCESSES as `nvidia-smi` prints them, memory in MiB; ValueError with the row that is none."""
    found = []
    for line in lines:
        pid, memory, name = (cell.strip() for cell in (*line.split(",", 2), "", "")[:3])
        if not pid.isdecimal():  # a message in its place: no permission, not supported
            raise ValueError(line.strip())
        found.append(Process(int(pid), name.strip("[]") or "a process", _mebibytes(memory)))
    return found


def nvidia_smi(*options: str) -> list[str] | str:
    """Lines that the driver's tool prints, or one that says why there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no NVIDIA driver: nvidia-smi is not there"
    try:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        return f"nvidia-smi failed: {said[0] if said else f'exit code {done.returncode}'}"
    return [line for line in done.stdout.splitlines() if line.strip()]


def _ask_nvml(gpu: str) -> tuple[list[Process], int]:
    """Every process with a compute context, and the memory that is taken; raises where NVML does not tell."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else nvml.nvmlDeviceGetHandleByPciBusId(gpu)
        )
        processes = [
            Process(process.pid, _process_name(nvml, process.pid), process.usedGpuMemory)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
        # The first version of this question counts what the driver keeps for itself as used.
        version = getattr(nvml, "nvmlMemory_v2", None)
        return processes, int(nvml.nvmlDeviceGetMemoryInfo(handle, *([] if version is None else [version])).used)
    finally:
        nvml.nvmlShutdown()


def _process_name(nvml: Any, pid: int) -> str:
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:  # of another user, or outside this container
        return "a process"
    return str(name.decode(errors="replace") if isinstance(name, bytes) else name)


def _mebibytes(cell: str) -> int | None:
    """MiB as bytes; None for what is no number, such as `[N/A]`."""
    return int(cell) << 20 if cell.strip().isdecimal() else None
