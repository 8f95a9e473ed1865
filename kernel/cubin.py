"""The resident kernel as machine code, built on any machine and kept on disk by the digest of what it is made of.

numba-cuda makes PTX of the kernel for a set of operators, `ptxas` (from the wheel nvidia-cuda-nvcc, or CUDA's own)
makes a cubin of that; neither needs a GPU. The cache is ours because numba's has no lock between processes. NVVM may
not fuse multiply and add (`fma=False`): the arithmetic must be the CPU kernel's; products that are to be fused say so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock

from wpk.ir.errors import KernelError
from wpk.kernel.layout import BLOCK_THREADS, Shape, shape_of
from wpk.ops.operator import LIBRARY

ARCH = "sm_90a"  # the architecture-specific target: wgmma and bulk tensor copies need the suffix
CAPABILITY = (9, 0)
ENTRY = "wpk_resident"


@dataclass(frozen=True)
class Cubin:
    """A kernel and what `ptxas` says of it. cached: it was there already; build_s: seconds of making it."""

    path: Path
    key: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    build_s: float
    cached: bool = False

    @property
    def image(self) -> bytes:
        return self.path.read_bytes()


def build_cubin(operators: Sequence[str], folder: Path | None, slots: int = 1) -> Cubin:
    """The kernel for these operators (`name@version`, in the order of the opcodes), from the cache or built now.

    folder: the cache; None, or one that cannot be written, builds into a temporary folder that the process keeps.
    slots: of the program; where operators are streamed, more than 64 need another kernel.
    """
    shape, names = shape_of(operators, slots), list(operators)
    key = cubin_key(names, shape)
    return build_cubin_of(key, lambda: kernel_ptx(names, shape), folder, operators=names, sessions=shape.sessions)


def build_cubin_of(key: str, make_ptx: Callable[[], str], folder: Path | None, **note: object) -> Cubin:
    """Machine code by its key (`key_of`): from the cache, or of the PTX that is made now. note: more for its record.

    Where nothing can be built, what other compilers made of the same sources is taken.
    """
    place = _prepare(folder)
    with FileLock(place / f"{key}.lock") if folder else nullcontext():
        found = _read(place, key)
        return found or _build(make_ptx, place, key, note)


def cubin_key(operators: Sequence[str], shape: Shape) -> str:
    """Digest of all that decides the machine code of the resident kernel."""
    from wpk.kernel import control, layout
    from wpk.scheduler import program

    parts = [f"{name}:{_digest(name)}" for name in operators] + [repr(shape)]
    parts += [inspect.getsource(module) for module in (control, layout, program)]
    here = Path(__file__).parent
    inner = (f"{folder}/{p.stem}" for folder in ("streamed", "blockwise") for p in sorted((here / folder).glob("*.py")))
    return key_of(("ptx", "cuda_library", "exchange", "resident", *inner), parts)


def key_of(files: Sequence[str], parts: Sequence[str] = ()) -> str:
    """SOURCES-TOOLS: digest of parts, sources of files of this folder and architecture; digest of the compilers."""
    here = Path(__file__).parent
    made_of = [*parts, *((here / f"{name}.py").read_text() for name in (*files, "cubin")), ARCH]
    tools = [*(_version(package) for package in ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm")), ptxas_version()]
    sources, compilers = (hashlib.sha256("\0".join(p).encode()).hexdigest() for p in (made_of, tools))
    return f"{sources[:24]}-{compilers[:8]}"


# --- building -----------------------------------------------------------------------------------------------------
def _build(make_ptx: Callable[[], str], place: Path, key: str, note: Mapping[str, object]) -> Cubin:
    started = time.monotonic()
    text = make_ptx()
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        made = Path(scratch) / f"{key}.cubin"
        report = assemble(text, made)
        cubin = Cubin(place / made.name, key, *read_report(report), build_s=round(time.monotonic() - started, 3))
        record = {k: v for k, v in asdict(cubin).items() if k not in ("path", "cached")}
        record |= {**note, "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
        beside = made.with_suffix(".json")
        beside.write_text(json.dumps(record, indent=1, sort_keys=True))
        made.replace(cubin.path)
        beside.replace(cubin.path.with_suffix(".json"))  # last: without it the cubin does not count
    return cubin


def kernel_ptx(operators: Sequence[str], shape: Shape) -> str:
    """PTX of the resident kernel for these operators."""
    require_numba_cuda()
    with without_device():
        from wpk.kernel.resident import SIGNATURE, make_kernel

        return compile_ptx(make_kernel(operators, shape), SIGNATURE, ENTRY)


def compile_ptx(function: Any, signature: Any, entry: str) -> str:
    """PTX of a Python function as a kernel of that name: BLOCK_THREADS threads a block, a block a multiprocessor."""
    from numba.cuda import compiler
    from numba.cuda.cudadrv import nvvm

    with without_device():
        options = {"opt": 3, "fma": False}
        result = compiler.compile_cuda(
            function,
            signature.return_type,
            signature.args,
            nvvm_options=options,
            cc=CAPABILITY,
        )
        library, name = result.library, result.fndesc.llvm_func_name
        kernel = library.get_function(name)
        library._entry_name = name
        compiler.kernel_fixup(kernel, False)
        nvvm.set_launch_bounds(kernel, (BLOCK_THREADS, 1))
        text = library.get_asm_str(cc=CAPABILITY)
    return re.sub(r"(\.target sm_90)\b(?!a)", r"\1a", text.replace(name, entry))


@contextmanager
def without_device() -> Iterator[None]:
    """numba-cuda asks the GPU for its capability even where it only compiles: here it is told ours."""
    from numba.cuda import compiler, dispatcher

    kept = compiler.get_current_device, dispatcher.get_current_device
    compiler.get_current_device = dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)
    try:
        yield
    finally:
        compiler.get_current_device, dispatcher.get_current_device = kept


def assemble(text: str, target: Path) -> str:
    """PTX into a cubin; what ptxas says of it."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise KernelError(
            "ptxas is not installed", wanted="the wheel nvidia-cuda-nvcc, or CUDA's bin folder on PATH",
            found="neither", hint="pip install nvidia-cuda-nvcc",
        )  # fmt: skip
    source = target.with_suffix(".ptx")
    source.write_text(text)
    done = subprocess.run(
        [ptxas, f"-arch={ARCH}", "-v", "--warn-on-spills", str(source), "-o", str(target)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise KernelError("ptxas refused the kernel's PTX", wanted=f"code for {ARCH}", found=done.stderr[-1000:])
    return done.stderr


def read_report(report: str) -> tuple[int, int, int]:
    """Registers of a thread, and bytes of stack and of spilled registers (stores and loads), of `ptxas -v`."""

    def most(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, report)), default=0)

    stack, registers = most(r"(\d+) bytes stack frame"), most(r"Used (\d+) registers")
    return registers, stack, most(r"(\d+) bytes spill stores") + most(r"(\d+) bytes spill loads")


# --- tools --------------------------------------------------------------------------------------------------------
def find_ptxas() -> str | None:
    """ptxas of the wheel, else of PATH."""
    for folder in sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*/bin"), reverse=True):
        if (folder / "ptxas").exists():
            return str(folder / "ptxas")
    return shutil.which("ptxas")


@cache
def ptxas_version() -> str:
    ptxas = find_ptxas()
    return subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout.strip() if ptxas else "none"


def can_build() -> bool:
    """Whether kernels for a GPU can be built here: numba-cuda is installed, and ptxas."""
    return importlib.util.find_spec("numba_cuda") is not None and find_ptxas() is not None


def require_numba_cuda() -> None:
    if importlib.util.find_spec("numba_cuda") is None:
        raise KernelError(
            "kernels for a GPU cannot be built here", wanted="numba-cuda", found="not installed",
            hint="pip install 'wpk[cu13]'",
        )  # fmt: skip


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} none"


def _digest(name: str) -> str:
    operator, _, version = name.partition("@")
    return LIBRARY.digest(operator, int(version))


# --- the cache ----------------------------------------------------------------------------------------------------
_fallback: list[tempfile.TemporaryDirectory[str]] = []


def _prepare(folder: Path | None) -> Path:
    if folder is not None:
        place = folder / "cuda"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError:
            pass
    if not _fallback:
        _fallback.append(tempfile.TemporaryDirectory(prefix="wpk-kernels-"))
    return Path(_fallback[0].name)


def _read(place: Path, key: str) -> Cubin | None:
    """The cubin of that key, or where nothing can be built of its sources; None where there is no sound one."""
    keys = [key]
    if not can_build():
        keys += sorted(p.stem for p in place.glob(f"{key.partition('-')[0]}-*.json"))
    return next((found for found in (_read_one(place, key) for key in keys) if found), None)


def _read_one(place: Path, key: str) -> Cubin | None:
    path = place / f"{key}.cubin"
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            return None
        names = ("registers", "stack_bytes", "spill_bytes", "build_s")
        return Cubin(path, key, **{name: record[name] for name in names}, cached=True)
    except (OSError, ValueError, KeyError):
        return None
