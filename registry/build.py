"""Building profiles: spec -> graph -> program -> store, once for each identity."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wpk import ir, scheduler, zoo
from wpk.ir.errors import CapacityError, WpkError
from wpk.ir.graph import Graph
from wpk.kernel.bodies import compile_kernel
from wpk.kernel.cpu import LOOPS
from wpk.kernel.cubin import build_cubin, can_build
from wpk.kernel.driver import find_device
from wpk.kernel.packing import build_packing
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection
from wpk.registry.models import find_model
from wpk.registry.prefill import prefill_programs
from wpk.registry.profile import SCHEMA, Manifest, OperatorUse, ProfileStore, incompatibilities
from wpk.registry.settings import Settings, settings
from wpk.registry.storage import locked, sha256_bytes
from wpk.scheduler.compile import MAX_CAPACITY, Compiled, compile_graph, lower_beat
from wpk.scheduler.target import Target, find_target, target_of_device
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec

Show = Callable[[str, object], None]
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True)
class Built:
    """A profile in the store; `cached` when it was there already. build_s: seconds of this call.

    note: what is still to be built where the profile is loaded, for people; None where nothing is.
    """

    manifest: Manifest
    path: Path
    cached: bool
    build_s: float
    note: str | None = None


def build(
    model: str | ModelSpec,
    *,
    capacity: int,
    context: int | None = None,
    target: str = "auto",
    force: bool = False,
    machine_code: bool = True,
    where: Settings | None = None,
    show: Show | None = None,
) -> Built:
    """Compile a model for a capacity and keep the profile, and the kernel's machine code in the cache.

    context: steps of history that caches have room for; None takes the spec's. target: a name of
    `wpk.scheduler.target`, or "auto" for what this machine has. force: build even if it is there. machine_code: False
    leaves the kernel to whoever loads the profile.
    """
    started = time.monotonic()
    where = where or settings()
    spec = find_model(model, where) if isinstance(model, str) else model
    _check_capacity(spec.name, capacity)
    chosen = find_target(default_target() if target == "auto" else target)
    context = spec.context if context is None else context
    _check_context(spec.name, context, capacity)
    graph = build_graph(spec, context=context)
    spec_sha = sha256_bytes(spec.model_dump_json().encode())
    library = Selection(spec.operators, LIBRARY)
    identity = _identity(graph, library, spec, spec_sha, capacity, context, chosen)
    store = ProfileStore(where)
    folder = store.folder / identity
    found = None if force else _usable(store, identity)  # without the lock: reading needs no right to write
    cached = found is not None
    if found is None:
        # One build an identity, however many processes ask: the others wait here and find it done.
        with locked(folder.with_name(f"{identity}.build")):
            found = None if force else _usable(store, identity)
            cached = found is not None
            if found is None:
                steps = spec.clock.steps_per_beat
                _check_memory(spec.name, graph, library, chosen, capacity, steps)
                options = {} if show is None else {"show": show}
                compiled = compile_graph(graph, library, chosen, capacity=capacity, steps=steps, **options)
                found = _manifest(identity, spec, spec_sha, context, chosen, compiled)
                folder = store.write(found, compiled.program.to_bytes(), str(compiled.load), replace=True)
    wanted = machine_code and not (cached and chosen.kind == "cpu")  # which compiles what is lacking as it starts
    note = build_machine_code(found, chosen, where.kernels) if wanted else None
    if wanted and note is None:
        own = [f"{use.name}@{use.version}" for use in found.operators]
        for prefill in prefill_programs(spec, context, chosen, own):
            build_operators(prefill.program.operators, 1, chosen, where.kernels)
    return Built(found, folder, cached, time.monotonic() - started, note)


def build_machine_code(manifest: Manifest, target: Target, cache: Path) -> str | None:
    """Everything that loading a profile would compile, into the cache; a note where that cannot be done here."""
    if target.kind == "cuda" and not can_build():
        return "The GPU's kernel is not built here: that takes numba-cuda and ptxas (pip install 'wpk[cu13]')."
    build_operators([f"{use.name}@{use.version}" for use in manifest.operators], manifest.capacity, target, cache)
    return None


def build_operators(operators: Sequence[str], slots: int, target: Target, cache: Path) -> None:
    """The machine code that runs these operators (`name@version`) for a program of so many slots, into the cache."""
    if target.kind == "cpu":
        compile_kernel(operators, LOOPS, cache)
    else:
        build_cubin(operators, cache, slots=slots)
        build_packing(cache)


def _usable(store: ProfileStore, identity: str) -> Manifest | None:
    """The manifest of a profile that is there and runs here; None where it is to be built."""
    entry = store.get(identity)
    if entry is not None and entry.error is not None:
        raise entry.error  # damaged, and not by us, who publish whole folders: the user should know
    if entry is None or entry.manifest is None or list(incompatibilities(entry.manifest)):
        return None
    return entry.manifest


def default_target() -> str:
    """The target that "auto" means on this machine: its GPU's, where a kernel for it can be built, else the CPU."""
    if not can_build():
        return "cpu"
    try:
        device = find_device()
    except WpkError:
        return "cpu"
    target = target_of_device(device.name, device.multiprocessors)
    return "cpu" if target is None else target.name


def unused_gpu() -> str | None:
    """Name of a GPU that "auto" passes over only because no kernel for it can be built here; None: there is none."""
    if can_build():
        return None
    try:
        device = find_device()
    except WpkError:
        return None
    return None if target_of_device(device.name, device.multiprocessors) is None else device.name


def _manifest(
    identity: str, spec: ModelSpec, spec_sha: str, context: int, target: Target, compiled: Compiled
) -> Manifest:
    program = compiled.program
    uses = [name.partition("@") for name in program.operators]
    return Manifest(
        id=identity, model=spec.name, model_version=spec.version, spec_sha256=spec_sha, capacity=program.slots,
        context=context, target=target.name, steps_per_beat=program.steps,
        period_ms=spec.clock.step_ms * spec.clock.steps_per_beat, compiler=compiler_version(),
        operators=tuple(
            OperatorUse(name=n, version=int(v), digest=LIBRARY.digest(n, int(v), target.kind)) for n, _, v in uses
        ),
        program_sha256=program.sha256, load_sha256=sha256_bytes(str(compiled.load).encode()),
        arenas=program.arena_bytes(), phases=len(program.payloads), waves=program.waves,
        floor_ms=compiled.floor.floor_ms, predicted_ms=compiled.predicted_ms, floor=compiled.floor,
    )  # fmt: skip


def _identity(
    graph: Graph, library: Selection, spec: ModelSpec, spec_sha: str, capacity: int, context: int, target: Target
) -> str:  # fmt: skip
    """MODEL-capN-ctxT-TARGET-DIGEST8: the digest covers all that decides what the profile does."""
    phases = lower_beat(graph, library, target, spec.clock.steps_per_beat, capacity=capacity).phases
    used = {(p.operator.name, p.operator.version) for p in phases}
    parts = [str(SCHEMA), spec_sha, str(graph), target.model_dump_json(), compiler_version()]
    parts += [LIBRARY.digest(name, version, target.kind) for name, version in sorted(used)]
    parts += [str(capacity), str(context), str(spec.clock.steps_per_beat)]
    digest = sha256_bytes("\0".join(parts).encode())[:8]
    return f"{spec.name}-cap{capacity}-ctx{context}-{target.name}-{digest}"


@functools.cache
def compiler_version() -> str:
    """Version of the passes: a digest of their sources, so that a changed compiler never reuses an old profile."""
    found = hashlib.sha256()
    for package in (ir, scheduler, zoo):
        for folder in package.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _check_capacity(model: str, capacity: int) -> None:
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= MAX_CAPACITY:
        raise CapacityError(
            f"{model}: capacity {capacity} cannot be had", capacity=capacity, wanted=f"1 to {MAX_CAPACITY}",
            found=capacity, hint="--cap is the number of sessions that run at once.",
        )  # fmt: skip


def _check_context(model: str, context: int, capacity: int) -> None:
    if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= MAX_CONTEXT:
        raise CapacityError(
            f"{model}: context {context} cannot be had", capacity=capacity, wanted=f"1 to {MAX_CONTEXT} steps",
            found=context, hint="--context is the number of steps of history that a session has room for.",
        )  # fmt: skip


def _check_memory(model: str, graph: Graph, library: Selection, target: Target, capacity: int, steps: int) -> None:
    """Refuse before the work what could not be loaded after it; sizes come from a program of one session."""
    room = target.memory_bytes or host_memory()
    weights, *others = compile_graph(graph, library, target, capacity=1, steps=steps).program.arenas
    needed = weights + capacity * sum(others)
    if needed > room:
        fits = max(0, (room - weights) // sum(others))
        wanted = f"at most {fits} sessions ({room / 1e9:.1f} GB)"
        large = f"One session takes {(weights + sum(others)) / 1e9:.1f} GB: choose a target with more memory."
        raise CapacityError(
            f"{model}: {capacity} sessions do not fit into memory", capacity=capacity, wanted=wanted,
            found=f"{needed / 1e9:.1f} GB", hint="Lower --cap or --context." if fits else large,
        )  # fmt: skip


def host_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or less where a container says so."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(path.read_text()))
    return min(limits)
