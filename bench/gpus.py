"""The GPUs of this machine as a record of a measurement names them: driver, clocks, power, temperature."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from typing import Any

TIMEOUT_S = 20
ASKED = {
    "name": "name", "driver": "driver_version", "sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem",
    "max_sm_mhz": "clocks.max.sm", "max_memory_mhz": "clocks.max.mem", "power_w": "power.draw",
    "power_limit_w": "power.limit", "temperature_c": "temperature.gpu", "memory_mib": "memory.total",
}  # fmt: skip
"""Field of a record -> what nvidia-smi calls it."""


def gpus() -> list[dict[str, Any]]:
    """Every GPU that the driver shows, as it is now; fields that it does not tell are None."""
    try:
        return _by_nvml()
    except Exception:  # no such package, no driver's library, or one that does not answer
        return _by_nvidia_smi()


def _by_nvml() -> list[dict[str, Any]]:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return [_device(nvml, nvml.nvmlDeviceGetHandleByIndex(i), driver) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, handle: Any, driver: str) -> dict[str, Any]:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        except nvml.NVMLError:  # not every GPU tells everything, least of all a part of one
            return None

    def scaled(value: float | None, by: float) -> float | None:
        return None if value is None else value / by

    memory = ask("MemoryInfo")
    return {
        "name": _text(ask("Name")),
        "driver": driver,
        "sm_mhz": ask("ClockInfo", nvml.NVML_CLOCK_SM),
        "memory_mhz": ask("ClockInfo", nvml.NVML_CLOCK_MEM),
        "max_sm_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
        "max_memory_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_MEM),
        "power_w": scaled(ask("PowerUsage"), 1000),
        "power_limit_w": scaled(ask("EnforcedPowerLimit"), 1000),
        "temperature_c": ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
        "memory_mib": None if memory is None else memory.total >> 20,
    }


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _by_nvidia_smi() -> list[dict[str, Any]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_csv(done.stdout)


def parse_csv(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi as records; a number where a cell is one."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [
        {name: cell if name in ("name", "driver") else _number(cell) for name, cell in zip(ASKED, row, strict=True)}
        for row in rows
        if len(row) == len(ASKED)
    ]


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
