"""The machine that a measurement was made on, as the record of it says."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from wpk.kernel.cpu import available_cpus

GPU_PACKAGES = ("numba-cuda", "cuda-bindings", "nvidia-cuda-nvcc")


def describe_machine(*packages: str) -> dict[str, Any]:
    """CPU, cores, Python, and versions of numba, numpy and the named packages (None: not installed)."""
    return {
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "cores_of_machine": os.cpu_count(),
        "features": [name for name in ("avx512f", "avx2", "fma", "neon") if name in cpu_features()],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "packages": {name: _version(name) for name in ("numba", "numpy", *packages)},
    }


def cpu_model() -> str:
    """The processor as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """What the compiler may use of this processor, by LLVM's names."""
    import llvmlite.binding as llvm

    try:
        return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    except RuntimeError:  # LLVM does not know this processor
        return frozenset()


def own_commit() -> str | None:
    """The commit of the checkout that this code runs from, with `+` where it has changes; None where unknown."""
    here = Path(__file__).resolve().parent.parent
    try:
        top, head, changes = (_git(here, *words) for words in _QUESTIONS)
    except (OSError, subprocess.SubprocessError):
        return None
    if Path(top.strip()).resolve() != here:  # installed below someone else's checkout
        return None
    return head.strip() + ("+" if changes.strip() else "")


_QUESTIONS = (("rev-parse", "--show-toplevel"), ("rev-parse", "HEAD"), ("status", "--porcelain"))


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
