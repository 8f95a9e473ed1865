"""`wpk bench beat`: how long a beat of a full cohort takes, beside the floor and a baseline.

Inputs are noise. Two times are taken of each beat: the kernel's, by its own stamps, and that of the whole call, from
the input given to the outputs there. An original in its own runtime runs in the same process: the sides take turns in
rounds, each with a few beats that warm it up and don't count, and a rest in between in which the other's threads go to
sleep.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wpk.bench.feed import frames
from wpk.bench.floor import measured_floor
from wpk.bench.gpus import gpus
from wpk.bench.history import start_at
from wpk.bench.machine import GPU_PACKAGES, describe_machine, own_commit
from wpk.bench.onnx import OnnxBaseline
from wpk.bench.records import described_error, keep
from wpk.bench.times import figures
from wpk.ir.errors import UsageError
from wpk.ir.progress import Progress, silent
from wpk.kernel.cpu import available_cpus
from wpk.registry import Cohort, find_model, load
from wpk.registry.load import warn
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.runtime.trace import trace_events, write_trace
from wpk.scheduler.target import find_target
from wpk.zoo.baselines import BASELINES, Baseline
from wpk.zoo.spec import ModelSpec

ROUNDS = 8
WARM_UP = 5  # beats at the start of a round
LEAST_BEATS = 10  # of a round, however slow they are
REST_S = 0.05
Side = Callable[[], float | None]  # a beat; the kernel's time in ms where the side has a kernel


def bench_beat(
    model: str,
    *,
    capacity: int,
    context: int | None = None,
    target: str = "auto",
    seconds: float = 5.0,
    beats: int | None = None,
    warm_up: int = WARM_UP,
    at: int | None = None,
    threads: int | None = None,
    baseline: str | None = None,
    command: str | None = None,
    commit: str | None = None,
    out: Path | None = None,
    report: Progress = silent,
    trace: Path | None = None,
    exclusive: bool = False,
    notice: Callable[[str], None] = warn,
) -> tuple[dict[str, Any], Path]:
    """Measure a full cohort for `seconds`, and the baseline for as long; the record and the file that keeps it.

    beats: measure so many instead, each side in one go. warm_up: beats before them that don't count. at: steps of
    history with which sessions start (`wpk.bench.history`). threads: of a CPU's kernel and of the baseline, the
    caller's included; None takes all processors. baseline: a runtime that the zoo describes for this model, or None.
    command: kept in the record; so is commit, where the code does not run from its checkout. trace: where the last
    beat's trace goes; recording takes time of every beat. exclusive, notice: as for `load`; what is noticed is kept. An
    attempt that fails is kept too, and its error raised.
    """
    if not 0 < seconds <= 3600:
        raise UsageError("a time to measure for", wanted="more than 0 and at most 3600 s", found=seconds)
    if beats is not None and beats < 1:
        raise UsageError("a number of beats", wanted="at least 1", found=beats)
    if warm_up < 0:
        raise UsageError("a number of beats that warm up", wanted="at least 0", found=warm_up)
    if threads is not None and threads < 1:
        raise UsageError("a number of threads", wanted="at least 1", found=threads)
    spec = find_model(model)  # a mistyped name is no attempt
    steps = spec.context if context is None else context
    if at is not None and not 0 <= at < steps:
        raise UsageError("steps of history to start with", wanted=f"0 to {steps - 1}, within the context", found=at)
    described = None if baseline is None else chosen_baseline(model, baseline)
    threads = threads or available_cpus()
    record: dict[str, Any] = {
        "kind": "beat", "model": model, "capacity": capacity, "threads": threads, "seconds": seconds,
        "warm_up": warm_up, "command": command, "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or own_commit(), "machine": describe_machine("onnxruntime", *GPU_PACKAGES),
    }  # fmt: skip
    prepare = None
    if at is not None:
        record["history"] = {"position": at, "computed": False}
        prepare = functools.partial(start_at, position=at)

    def noticed(text: str) -> None:
        record.setdefault("notices", []).append(text)
        notice(text)

    try:
        begun = time.perf_counter()
        with load(
            model, capacity=capacity, context=context, target=target, threads=threads, prepare=prepare,
            trace=trace is not None, exclusive=exclusive, notice=noticed,
        ) as cohort:  # fmt: skip
            record["load_s"] = time.perf_counter() - begun
            _measure(record, cohort, described, beats, threads, report)
            if find_target(cohort.profile.target).kind == "cuda":
                record["gpus"] = gpus()  # while the kernel is resident: the clocks that it ran at
            if trace is not None:
                write_trace(trace, trace_events(cohort.program, cohort.trace(), model))
                record["trace"] = str(trace)
        _compare(record)
    except BaseException as error:  # an interrupt too
        record["error"] = described_error(error)
        keep(record, f"beat-{model}-cap{capacity}", out)
        raise
    return record, keep(record, f"beat-{model}-cap{capacity}", out)


def chosen_baseline(model: str, runtime: str) -> Baseline:
    """The zoo's baseline of a model in that runtime; UsageError where there is none."""
    found = BASELINES.get(model)
    if found is None or found.runtime != runtime:
        raise UsageError(
            f"no baseline of {model} in {runtime!r} is known", wanted=found.runtime if found else "no baseline",
            found=runtime, hint="leave --baseline out, or describe one in zoo/baselines",
        )  # fmt: skip
    return found


def _measure(
    record: dict[str, Any], cohort: Cohort, baseline: Baseline | None, beats: int | None, threads: int, report: Progress
) -> None:
    profile = cohort.profile
    record |= {
        "profile": profile.id, "context": profile.context, "target": profile.target, "period_ms": profile.period_ms,
        "steps_per_beat": profile.steps_per_beat, "phases": profile.phases, "waves": profile.waves,
        "program_sha256": profile.program_sha256, "floor_ms": profile.floor_ms, "floor": profile.floor.model_dump(),
        "predicted_ms": profile.predicted_ms,
    }  # fmt: skip
    sides: dict[str, Side] = {"wpk": _beats(cohort)}
    if baseline is not None:
        files = original_files(cohort.spec)
        other = OnnxBaseline(baseline, files, sessions=cohort.capacity, threads=threads)
        sides["baseline"] = functools.partial(other.advance, cohort.spec.clock.steps_per_beat)
    rounds = ROUNDS if beats is None and len(sides) > 1 else 1
    calls: dict[str, list[float]] = {name: [] for name in sides}
    kernel: list[float] = []
    for turn in range(rounds):
        for name, side in sides.items():
            told = f"round {turn + 1} of {rounds}: {name}" if rounds > 1 else name
            step = functools.partial(report, told)
            for call_ms, kernel_ms in _round(side, record["seconds"] / rounds, beats, record["warm_up"], step):
                calls[name].append(call_ms)
                kernel += [] if kernel_ms is None else [kernel_ms]
    late = sum(ms > profile.period_ms for ms in calls["wpk"])
    record |= {
        "beats": len(calls["wpk"]), "beat_ms": figures(calls["wpk"]), "kernel_ms": figures(kernel), "late": late,
        "late_beats": [i for i, ms in enumerate(calls["wpk"]) if ms > profile.period_ms][:100],
    }  # fmt: skip
    if baseline is not None:
        theirs = figures(calls["baseline"])
        record["baseline"] = {
            "runtime": baseline.runtime, "source": str(cohort.spec.weights), "batched": baseline.batched,
            "beats": len(calls["baseline"]), "beat_ms": theirs,
        }  # fmt: skip
        record["ratio"] = record["beat_ms"]["p50"] / theirs["p50"]


def _compare(record: dict[str, Any]) -> None:
    """The floor of the beat in the middle of what was measured, and how far above it the kernel stayed."""
    first = record.get("history", {}).get("position", 0)
    middle = first + (record["warm_up"] + record["beats"] // 2) * record["steps_per_beat"]
    record["floor_measured"] = measured_floor(
        record["model"], capacity=record["capacity"], context=record["context"], target=record["target"],
        whole_ms=record["floor_ms"], position=middle,
    )  # fmt: skip
    record["above_floor"] = record["kernel_ms"]["p50"] / record["floor_measured"]["floor_ms"]


def original_files(spec: ModelSpec) -> dict[str, Path]:
    """Alias -> file of a model's weights as they were published; loading the model has fetched them."""
    return WeightsStore(settings()).paths(spec.weights)


def _beats(cohort: Cohort) -> Side:
    """A beat of the full cohort on noise; another frame each time."""
    sessions = [cohort.join(seed=number) for number in range(cohort.capacity)]
    turns = itertools.cycle(frames(cohort.spec, sessions))

    def beat() -> float:
        cohort.beat(next(turns))
        return cohort.last_ms

    return beat


def _round(
    side: Side, seconds: float, beats: int | None, warm_up: int, report: Callable[[int, int], None]
) -> list[tuple[float, float | None]]:  # fmt: skip
    """(whole call, kernel) in ms of a number of beats, or of those that fit into the time; warm-up left out."""
    time.sleep(REST_S)
    for _ in range(warm_up):
        side()
    found: list[tuple[float, float | None]] = []
    end = time.perf_counter() + seconds
    while len(found) < beats if beats else len(found) < LEAST_BEATS or time.perf_counter() < end:
        if len(found) % 64 == 0:
            report(len(found), beats or 0)
        start = time.perf_counter()
        kernel_ms = side()
        found.append((1e3 * (time.perf_counter() - start), kernel_ms))
    return found
