"""`wpk bench beat`: how long a beat of a full cohort takes, beside a baseline in the same process.

Both sides get noise. They take turns in rounds, each with a few beats that warm it up and don't count, and a rest in
between in which the other's threads go to sleep. Times are of the whole call: input given, outputs there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.bench.machine import commit, describe_machine
from wpk.bench.onnx import OnnxBaseline
from wpk.bench.records import keep
from wpk.ir.errors import UsageError, WpkError
from wpk.ir.progress import Progress, silent
from wpk.kernel.cpu import available_cpus
from wpk.registry import Cohort, find_model, load
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.runtime.play import audio_input, percentiles
from wpk.zoo.baselines import BASELINES, Baseline
from wpk.zoo.spec import ModelSpec

ROUNDS = 8
WARM_UP = 5  # beats at the start of a round
LEAST_BEATS = 10  # of a round, however slow they are
REST_S = 0.05
FRAMES = 16  # of noise per session, used in turn


def bench_beat(
    model: str,
    *,
    capacity: int,
    context: int | None = None,
    target: str = "auto",
    seconds: float = 5.0,
    threads: int | None = None,
    baseline: str | None = None,
    out: Path | None = None,
    report: Progress = silent,
) -> tuple[dict[str, Any], Path]:
    """Measure a full cohort for `seconds`, and the baseline for as long; the record and the file that keeps it.

    threads: of either side, the caller's included; None takes all processors. baseline: a runtime that the zoo
    describes for this model, or None. An attempt that fails is kept too, and its error raised.
    """
    if not 0 < seconds <= 3600:
        raise UsageError("a time to measure for", wanted="more than 0 and at most 3600 s", found=seconds)
    if threads is not None and threads < 1:
        raise UsageError("a number of threads", wanted="at least 1", found=threads)
    find_model(model)  # a mistyped name is no attempt
    described = None if baseline is None else chosen_baseline(model, baseline)
    threads = threads or available_cpus()
    record: dict[str, Any] = {
        "kind": "beat", "model": model, "capacity": capacity, "threads": threads, "seconds": seconds,
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
        "machine": describe_machine("onnxruntime"),
    }  # fmt: skip
    try:
        with load(model, capacity=capacity, context=context, target=target, threads=threads) as cohort:
            _measure(record, cohort, described, seconds, threads, report)
    except WpkError as error:
        record["error"] = error.as_dict()
        keep(record, f"beat-{model}-cap{capacity}", out)
        raise
    return record, keep(record, f"beat-{model}-cap{capacity}", out)


def chosen_baseline(model: str, runtime: str) -> Baseline:
    """The zoo's baseline of a model in that runtime; UsageError where there is none."""
    found = BASELINES.get(model)
    if found is None or found.runtime != runtime:
        raise UsageError(
            f"no baseline of {model} in {runtime!r} is known", wanted=found.runtime if found else "no baseline",
            found=runtime, hint="leave --baseline out, or describe one in zoo/baselines.py",
        )  # fmt: skip
    return found


def _measure(
    record: dict[str, Any], cohort: Cohort, baseline: Baseline | None, seconds: float, threads: int, report: Progress
) -> None:
    record |= {
        "profile": cohort.profile.id, "context": cohort.profile.context, "target": cohort.profile.target,
        "period_ms": cohort.profile.period_ms, "floor_ms": cohort.profile.floor_ms,
        "floor": cohort.profile.floor.model_dump(), "predicted_ms": cohort.profile.predicted_ms,
    }  # fmt: skip
    sides = {"wpk": _beats(cohort)}
    if baseline is not None:
        files = original_files(cohort.spec)
        other = OnnxBaseline(baseline, files, sessions=cohort.capacity, threads=threads)
        sides["baseline"] = functools.partial(other.advance, cohort.spec.clock.steps_per_beat)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS):
        for name, side in sides.items():
            report(f"round {turn + 1} of {ROUNDS}: {name}", turn, ROUNDS)
            found[name] += _round(side, seconds / ROUNDS)
    ours = np.array(found["wpk"])
    stats = cohort.stats
    record |= {
        "beats": len(ours), "beat_ms": percentiles(ours), "late": int((ours > cohort.profile.period_ms).sum()),
        "kernel_ms": {"p50": stats.p50, "p99": stats.p99, "max": stats.max},
    }  # fmt: skip
    if baseline is not None:
        theirs = percentiles(np.array(found["baseline"]))
        record["baseline"] = {
            "runtime": baseline.runtime, "source": str(cohort.spec.weights), "batched": baseline.batched,
            "beats": len(found["baseline"]), "beat_ms": theirs,
        }  # fmt: skip
        record["ratio"] = record["beat_ms"]["p50"] / theirs["p50"]


def original_files(spec: ModelSpec) -> dict[str, Path]:
    """Alias -> file of a model's weights as they were published; loading the model has fetched them."""
    return WeightsStore(settings()).paths(spec.weights)


def _beats(cohort: Cohort) -> Callable[[], object]:
    """A beat of the full cohort on noise; another frame each time."""
    clock, port = cohort.spec.clock, audio_input(cohort.spec)
    length = clock.samples_per_step * clock.steps_per_beat
    sessions = [cohort.join() for _ in range(cohort.capacity)]
    noise = _noise((FRAMES, len(sessions), length))
    inputs = [{s: {port: row} for s, row in zip(sessions, frame, strict=True)} for frame in noise]
    turn = iter(range(1 << 62))
    return lambda: cohort.beat(inputs[next(turn) % FRAMES])


def _noise(shape: tuple[int, ...]) -> NDArray[np.float32]:
    return (0.1 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


def _round(side: Callable[[], object], seconds: float) -> list[float]:
    """Durations in ms of the beats that fit into a round, warm-up left out."""
    time.sleep(REST_S)
    for _ in range(WARM_UP):
        side()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < LEAST_BEATS or time.perf_counter() < end:
        start = time.perf_counter()
        side()
        found.append(1e3 * (time.perf_counter() - start))
    return found
