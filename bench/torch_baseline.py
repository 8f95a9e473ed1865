"""`wpk bench baseline`: a step of the same shapes in PyTorch: eager, in a CUDA graph, and compiled in a CUDA graph.

It runs in a process of its own, so that nothing of it stays on the GPU when it is over. Beats are taken as those of
`wpk bench beat` are: the kernels' time by the GPU's events, and the whole call with the inputs' way to the device and
the outputs' way back.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wpk.bench.floor import beat_floor
from wpk.bench.gpus import gpus
from wpk.bench.machine import describe_machine, own_commit
from wpk.bench.records import described_error, keep
from wpk.bench.times import figures
from wpk.ir.errors import KernelError, UsageError
from wpk.ir.progress import Progress, silent
from wpk.registry import find_model
from wpk.scheduler.target import target_of_device
from wpk.zoo.spec import ModelSpec

FORMS = {"cuda": ("eager", "graph", "compiled_graph"), "cpu": ("eager", "compiled")}
"""Kind of device -> how a step is run there; a CPU has no graphs."""
BEATS, WARM_UP = 200, 10


def bench_baseline(
    model: str,
    *,
    capacity: int,
    context: int | None = None,
    at: int | None = None,
    beats: int = BEATS,
    warm_up: int = WARM_UP,
    forms: Sequence[str] | None = None,
    device: str = "auto",
    command: str | None = None,
    commit: str | None = None,
    beside: tuple[dict[str, Any], Path] | None = None,
    out: Path | None = None,
    report: Progress = silent,
) -> tuple[dict[str, Any], Path]:
    """Measure a model's step in PyTorch for `capacity` sessions; the record and the file that keeps it.

    context: steps of history; None takes the spec's. at: the step of history at which they are; None takes the last
    of the context. forms: of `FORMS`; None takes all that the device has, on a CPU `eager` alone. device: cuda, cpu,
    or auto. beside: a record of `wpk bench beat` from the same run, and where it is kept; its ratio to the best form is
    told. command and commit: as for `bench_beat`. An attempt that fails is kept too, and its error
    raised; so is a form that fails beside others.
    """
    spec = find_model(model)
    steps = spec.context if context is None else context
    if steps < 1:
        raise UsageError("steps of history", wanted="at least 1", found=steps)
    at = steps - 1 if at is None else at
    if not 0 <= at < steps:
        raise UsageError("steps of history to be at", wanted=f"0 to {steps - 1}, within the context", found=at)
    if capacity < 1 or beats < 1 or warm_up < 0:
        raise UsageError(
            "sessions, beats and beats that warm up", wanted="at least 1, 1 and 0", found=(capacity, beats, warm_up)
        )
    require_torch()
    record: dict[str, Any] = {
        "kind": "baseline", "runtime": "torch", "model": model, "capacity": capacity, "context": steps,
        "history": {"position": at, "computed": False}, "warm_up": warm_up, "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit or own_commit(),
        "machine": describe_machine("torch", "triton"),
    }  # fmt: skip
    try:
        report(f"{model} in PyTorch", 0, 0)
        record |= _in_own_process(spec, capacity, at + 1, beats, warm_up, forms, device)
        _compare(record, model, capacity, at + 1)
        if "best" not in record:
            first = next(iter(record["forms"].values()))["error"]
            raise KernelError(
                "no form of the baseline ran", wanted=" or ".join(record["forms"]), found=first["message"],
                hint="The record tells what became of each form.",
            )  # fmt: skip
        if beside is not None:
            ours, theirs = beside[0], record["forms"][record["best"]]
            steps = ours["steps_per_beat"]  # a form makes one step
            record["beside"] = {"results": str(beside[1]), "beat_ms": ours["beat_ms"], "kernel_ms": ours["kernel_ms"]}
            record["ratio"] = ours["kernel_ms"]["p50"] / (steps * theirs["kernel_ms"]["p50"])
    except BaseException as error:  # an interrupt too
        record["error"] = described_error(error)
        keep(record, f"baseline-{model}-cap{capacity}", out)
        raise
    return record, keep(record, f"baseline-{model}-cap{capacity}", out)


def require_torch() -> None:
    """UsageError where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "this baseline needs PyTorch", wanted="torch", found="not installed",
            hint="pip install 'wpk[oracle]', or leave the baseline out",
        )  # fmt: skip


def _in_own_process(spec: ModelSpec, *rest: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(_measure_text, spec.to_json(), *rest).result()
    except BrokenProcessPool:
        raise KernelError(
            "the baseline's process ended without a word", wanted="figures", found="nothing",
            hint="Was it out of memory? Lower --cap or --context.",
        ) from None  # fmt: skip


def _measure_text(spec: str, *rest: Any) -> dict[str, Any]:
    return measure(ModelSpec.from_json(spec), *rest)


def _compare(record: dict[str, Any], model: str, capacity: int, history: int) -> None:
    """The best form, and the floor of the same beat where the device is a target."""
    ran = {name: form["kernel_ms"]["p50"] for name, form in record["forms"].items() if "error" not in form}
    if not ran:
        return
    record["best"] = min(ran, key=lambda name: ran[name])
    device = record["device"]
    target = target_of_device(device["name"], device["multiprocessors"]) if device["kind"] == "cuda" else None
    if target is not None:
        # The spec's steps of a beat follow each other; the baseline makes one.
        found = beat_floor(model, capacity=capacity, context=history, target=target.name, steps=1)
        record |= {"floor_ms": found.floor_ms, "floor": found.model_dump(), "target": target.name}
        record["above_floor"] = ran[record["best"]] / found.floor_ms


# --- in the process of its own ------------------------------------------------------------------------------------
def measure(
    spec: ModelSpec, sessions: int, history: int, beats: int, warm_up: int, forms: Sequence[str] | None, device: str
) -> dict[str, Any]:
    """Durations of every form: {"device", "forms": {name: figures or error}, "weight_bytes", "state_bytes"}."""
    import torch

    from wpk.zoo.baselines.torch_step import as_is, torch_step

    there = torch.cuda.is_available()
    kind = ("cuda" if there else "cpu") if device == "auto" else device
    if kind not in FORMS or (kind == "cuda" and not there):
        raise UsageError("a device for PyTorch", wanted="cuda or cpu, of those that are here", found=device)
    chosen = tuple(forms or (FORMS["cuda"] if kind == "cuda" else ("eager",)))
    unknown = [form for form in chosen if form not in FORMS[kind]]
    if unknown:
        raise UsageError(f"a form of the baseline on {kind}", wanted=", ".join(FORMS[kind]), found=", ".join(unknown))
    torch.manual_seed(0)
    found: dict[str, Any] = {"device": _described(torch, kind), "beats": beats, "forms": {}}
    with torch.no_grad():
        for name in chosen:
            begun = time.perf_counter()
            try:
                compile = (lambda f: torch.compile(f, dynamic=False)) if "compiled" in name else as_is
                step = torch_step(spec, sessions=sessions, history=history, device=kind, compile=compile)
                found |= {
                    "weight_bytes": step.weight_bytes,
                    "state_bytes": step.state_bytes,
                    "parameters": step.parameters,
                }
                run = _captured(torch, step.run) if "graph" in name else step.run
                side = (_on_gpu if kind == "cuda" else _on_cpu)(torch, step.x, run)
                for _ in range(warm_up):
                    side()
                prepare_s = time.perf_counter() - begun
                times = [side() for _ in range(beats)]
            except UsageError:
                raise
            except Exception as error:  # whatever the compiler, the capture or the allocator raises
                found["forms"][name] = {"error": described_error(error)}
            else:
                calls, kernels = zip(*times, strict=True)
                found["forms"][name] = {
                    "beat_ms": figures(calls), "kernel_ms": figures(kernels), "prepare_s": prepare_s
                }  # fmt: skip
            step = run = side = None  # type: ignore[assignment]  # the next form wants the memory
            if kind == "cuda":
                torch.cuda.empty_cache()
        if kind == "cuda":
            found["gpus"] = gpus()
    return found


def _described(torch: Any, kind: str) -> dict[str, Any]:
    if kind == "cpu":
        return {"kind": kind, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": kind, "name": properties.name, "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def _captured(torch: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as a CUDA graph; its outputs are the same tensors every time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def _on_gpu(torch: Any, x: Any, run: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    """A beat whose (whole call, kernels) in ms are told."""
    given = x.cpu().pin_memory()
    taken = [torch.empty(y.shape, dtype=y.dtype).pin_memory() for y in run()]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()

    def beat() -> tuple[float, float]:
        begun = time.perf_counter()
        x.copy_(given, non_blocking=True)
        start.record()
        outputs = run()
        end.record()
        for host, output in zip(taken, outputs, strict=True):
            host.copy_(output, non_blocking=True)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun), start.elapsed_time(end)

    return beat


def _on_cpu(torch: Any, x: Any, run: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    given = x.clone()

    def beat() -> tuple[float, float]:
        begun = time.perf_counter()
        x.copy_(given)
        started = time.perf_counter()
        run()
        ended = time.perf_counter()
        return 1e3 * (ended - begun), 1e3 * (ended - started)

    return beat
