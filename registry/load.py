"""`load`: from a model's name to a cohort that beats."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wpk.ir.errors import TargetError, UsageError
from wpk.ir.graph import Graph
from wpk.kernel.arenas import DeviceArenas
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cuda import CudaKernel, require_fit
from wpk.kernel.driver import Device, Gpu, find_device
from wpk.kernel.neighbours import Notice, require_alone
from wpk.kernel.packing import Packer, build_packing
from wpk.registry.build import build, build_machine_code, unused_gpu
from wpk.registry.cohort import Cohort
from wpk.registry.formats import TensorSet
from wpk.registry.loading import Bytes, fill, fill_arenas
from wpk.registry.models import find_model
from wpk.registry.prefill import put_states, run_prefills
from wpk.registry.profile import ProfileStore
from wpk.registry.settings import Settings, settings
from wpk.registry.weights import WeightsStore
from wpk.scheduler.program import Program
from wpk.scheduler.target import find_target
from wpk.zoo.sources import PathSource
from wpk.zoo.spec import ModelSpec

Prepare = Callable[[Program, Bytes], None]


def warn(text: str) -> None:
    """What a user should know, as a Python warning."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)  # where `load` was called


def load(
    model: str | ModelSpec,
    *,
    capacity: int,
    context: int | None = None,
    target: str = "auto",
    weights: str | Path | None = None,
    threads: int | None = None,
    where: Settings | None = None,
    prepare: Prepare | None = None,
    trace: bool = False,
    exclusive: bool = False,
    notice: Notice = warn,
) -> Cohort:
    """Load a model for `capacity` sessions: build its profile if need be, fetch its weights, start its kernel.

    context: steps of history; None takes the spec's. target: "auto" takes what this machine has. weights: a file or
    folder instead of the spec's source. threads: CPU threads, the caller's included; None takes all processors.
    prepare(program, image): may change the initial image of one slot's state before the kernel starts. trace: record
    the moments of every beat (`Cohort.trace`; GPUs alone). exclusive: refuse a GPU that other processes use, too
    (`TargetError`); else `notice` is told of them. The cohort is a context manager.
    """
    where = where or settings()
    if not isinstance(model, str | ModelSpec):
        raise UsageError("a model to load", wanted="its name or a ModelSpec", found=type(model).__name__)
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise UsageError("a number of threads", wanted="an int of at least 1", found=repr(threads))
    spec = find_model(model, where) if isinstance(model, str) else model
    # The kernel is compiled below, on a machine that can run it.
    built = build(spec, capacity=capacity, context=context, target=target, machine_code=False, where=where)
    chosen = find_target(built.manifest.target)
    device = find_device() if chosen.kind == "cuda" else None  # refuse before the weights are fetched
    if target == "auto" and device is None and (unused := unused_gpu()) is not None:
        notice(
            f"{unused} is left idle and the CPU taken: no kernel for that GPU can be built here, which takes "
            "numba-cuda and ptxas. pip install 'wpk[cu13]', or load with target='h200' what was built elsewhere."
        )
    if trace and device is None:
        raise TargetError(
            "only GPU kernels record traces", wanted="a GPU target", found=chosen.name,
            hint="Load it without a trace, or with target='h200' on a machine with that GPU.",
        )  # fmt: skip
    profile = ProfileStore(where).read(built.manifest.id)
    if device is not None:  # before the weights as well: what may be refused, and what takes long
        require_fit(device, profile.program)
        require_alone(device, exclusive=exclusive, notice=notice)
        build_machine_code(profile.manifest, chosen, where.kernels)
    tensors = open_weights(spec, weights, where)

    def start(program: Program, load: Graph, prepare: Prepare | None = None) -> CpuKernel | CudaKernel:
        if device is not None:
            return start_on_gpu(program, load, tensors, device, where.kernels, prepare, trace=trace)
        arenas, image = fill_arenas(program, load, tensors)
        if prepare is not None:
            prepare(program, image)
        return CpuKernel(program, arenas, image, threads=threads, cache=where.kernels)

    states = run_prefills(spec, profile.manifest.context, chosen, profile.program.operators, tensors, start)

    def prepared(program: Program, image: Bytes) -> None:
        put_states(program, image, states)
        if prepare is not None:
            prepare(program, image)

    return Cohort(spec, profile.manifest, start(profile.program, profile.load, prepared))


def start_on_gpu(
    program: Program,
    load: Graph,
    tensors: TensorSet,
    device: Device,
    cache: Path | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> CudaKernel:
    """A program resident on a GPU, its weights made in the GPU's memory.

    prepare: as for `load`. options: of `CudaKernel`.

    `CapacityError` where the GPU has too little memory.
    """
    gpu = Gpu(device)
    try:
        arenas = DeviceArenas(program, gpu)
        image = fill(program, load, tensors, arenas, lambda marks: Packer(gpu, build_packing(cache), marks))
        if prepare is not None:
            prepare(program, image)
        return CudaKernel(program, arenas, image, cache=cache, **options)
    except BaseException:
        gpu.close()
        raise


def open_weights(spec: ModelSpec, weights: str | Path | None, where: Settings) -> TensorSet:
    """The model's tensors, pulled if they are not here; missing and misshapen ones are told all at once."""
    source = spec.weights if weights is None else PathSource(path=str(weights))
    store = WeightsStore(where)
    if not store.present(source):
        store.pull(source)
    tensors, inventory = store.open_model(spec, source)
    inventory.require(spec.name)
    return tensors
