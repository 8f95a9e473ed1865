"""CPU bodies, compiled: one machine-code function an operator, kept on disk by the digest of the sources.

numba's own file cache is keyed by the source file of each function alone; the digest in the folder's name covers the
helpers that a body inlines, and a lock keeps two processes from compiling the same thing at once.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numba
from filelock import FileLock
from numba import cfunc, njit, types

from wpk.ir.errors import KernelError, WpkError
from wpk.ops.operator import LIBRARY

SIGNATURE = types.void(*[types.int64] * 7)
ERROR_MODEL = "numpy"  # IEEE 754: a division by zero that raised would leave the task's later slots undone
_compiled: dict[tuple[str, str], Any] = {}  # keeps machine code alive for the process


def source_digest() -> str:
    """Digest of everything that compiled code depends on: all operators, the kernel, and the compiler's versions."""
    from wpk.kernel import atomics, control, cpu
    from wpk.scheduler import program

    parts = [f"{cls.name}@{cls.version}:{LIBRARY.digest(cls.name, cls.version, 'cpu')}" for cls in LIBRARY]
    parts += [inspect.getsource(module) for module in (atomics, control, cpu, program)]
    parts += [inspect.getsource(_compile_body), inspect.getsource(_compile_loop), ERROR_MODEL, numba.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compile_kernel(
    operators: Iterable[str], loops: Mapping[Callable[..., Any], types.Type], cache: Path | None
) -> tuple[list[int], list[Any]]:
    """Addresses of the bodies of `name@version` operators, in their order, and the compiled loops.

    loops: function -> signature, compiled to run without the interpreter lock. cache: folder for machine code; None,
    or a folder that cannot be written, compiles in memory only.
    """
    folder = _prepare(cache)
    lock = FileLock(folder / "lock") if folder else nullcontext()
    key = str(folder or "")
    names = list(operators)

    def compiled(cached: bool) -> tuple[list[Any], list[Any]]:
        bodies = [_once((key, name), partial(_compile_body, name, cached)) for name in names]
        return bodies, [
            _once((key, loop.__qualname__), partial(_compile_loop, loop, signature, cached))
            for loop, signature in loops.items()
        ]

    with lock:
        try:
            addresses, dispatchers = compiled(folder is not None)
        except WpkError:
            raise
        except Exception:
            # numba does not say what is wrong with a damaged cache file, it just fails: make it anew.
            if folder is None:
                raise
            for stale in [*folder.glob("*/*.nbi"), *folder.glob("*/*.nbc")]:
                stale.unlink(missing_ok=True)
            addresses, dispatchers = compiled(True)
    return [int(a.address) for a in addresses], dispatchers


def _prepare(cache: Path | None) -> Path | None:
    """Point numba's cache at our folder; None where it can't be written."""
    if cache is None:
        return None
    folder = Path(os.path.realpath(cache)) / "cpu" / source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError:
        return None
    numba.config.CACHE_DIR = str(folder)
    return folder


def _once(key: tuple[str, str], make: Callable[[], Any]) -> Any:
    if key not in _compiled:
        _compiled[key] = make()
    return _compiled[key]


def _compile_body(name: str, cached: bool) -> Any:
    operator, _, version = name.partition("@")
    body = LIBRARY.body(operator, int(version), "cpu")
    if body is None:
        raise KernelError(
            f"operator {name} has no CPU body", wanted="a body for cpu", found=LIBRARY.targets(operator, int(version))
        )
    return cfunc(SIGNATURE, nopython=True, cache=cached, error_model=ERROR_MODEL)(body.function)


def _compile_loop(function: Callable[..., Any], signature: types.Type, cached: bool) -> Any:
    dispatcher = njit(nogil=True, cache=cached, error_model=ERROR_MODEL)(function)
    dispatcher.compile(signature.args)
    return dispatcher
