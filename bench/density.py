"""`wpk bench density`: does a capacity stay on schedule, with no late beat in several runs one after the other?

Every slot is taken by a session, and beats are paced by the model's clock (`wpk.bench.protocol`). The profile is loaded
once for all runs of a point; for each run the sessions join anew. A run is an attempt with a record of its own.
"""

from __future__ import annotations

import functools
import gc
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from wpk.bench.classes import by_class, times_by_class
from wpk.bench.feed import FEEDS, Frame, frames
from wpk.bench.floor import measured_floor
from wpk.bench.gpus import gpus
from wpk.bench.history import start_at
from wpk.bench.machine import GPU_PACKAGES, describe_machine, own_commit
from wpk.bench.protocol import DELIVERED, MOMENTS, Beats, Moments, Protocol, scored, timeline
from wpk.bench.records import described_error, keep
from wpk.ir.errors import UsageError
from wpk.ir.progress import Progress, silent
from wpk.kernel.cpu import available_cpus
from wpk.registry import Cohort, find_model, load
from wpk.registry.load import warn
from wpk.runtime.play import NANOSECONDS, Schedule
from wpk.runtime.trace import trace_events, write_trace
from wpk.scheduler.program import Program
from wpk.scheduler.target import find_target

SPIN_S = 0.0005  # before a beat is due, the host no longer sleeps
TRACED_WARM_UP, TRACED = 5, 9  # beats
Kept = Callable[[Path], None]


def bench_density(
    model: str,
    *,
    capacity: int,
    protocol: Protocol | None = None,
    purpose: str = "point",
    context: int | None = None,
    target: str = "auto",
    at: int | None = None,
    feed: str = "noise",
    threads: int | None = None,
    trace: Path | None = None,
    command: str | None = None,
    commit: str | None = None,
    out: Path | None = None,
    kept: Kept = lambda path: None,
    report: Progress = silent,
    exclusive: bool = False,
    notice: Callable[[str], None] = warn,
) -> dict[str, Any]:
    """Measure a point: {"capacity", "held", "protocol", "shortened", "late", "runs": records, "results": paths}.

    protocol: None takes the whole one. purpose: kept in the records. at: steps of history with which sessions start
    (`wpk.bench.history`). feed: of `wpk.bench.feed.FEEDS`. trace: a file; before the runs a few beats of a GPU are
    traced, their times by operator go into every record, the last beat's trace into the file. kept: told of every
    record's file. The rest is as for `bench_beat`. An attempt that fails is kept without figures, ends the point, and
    its error is raised.
    """
    protocol = protocol or Protocol()
    spec = find_model(model)  # a mistyped name is no attempt
    steps = spec.context if context is None else context
    if at is not None and not 0 <= at < steps:
        raise UsageError("steps of history to start with", wanted=f"0 to {steps - 1}, within the context", found=at)
    if threads is not None and threads < 1:
        raise UsageError("a number of threads", wanted="at least 1", found=threads)
    if feed not in FEEDS:
        raise UsageError("what sessions are fed", wanted=" or ".join(FEEDS), found=feed)
    if out is not None and out.suffix == ".json":
        raise UsageError("--out for several runs", wanted="a folder", found=out)
    beats = protocol.beats(spec.clock)
    middle = (at or 0) + beats.middle * spec.clock.steps_per_beat
    point: dict[str, Any] = {
        "kind": "density", "model": model, "capacity": capacity, **protocol.fields(beats),
        "point": {"id": uuid.uuid4().hex[:12], "purpose": purpose, "runs": protocol.runs},
        "threads": threads or available_cpus(), "feed": feed, "command": command, "commit": commit or own_commit(),
    }  # fmt: skip
    if at is not None:
        point["history"] = {"position": at, "computed": False}
    record = _begun(point, 1)

    def noticed(text: str) -> None:
        point.setdefault("notices", []).append(text)
        notice(text)

    options: dict[str, Any] = {
        "capacity": capacity, "context": context, "target": target, "threads": point["threads"], "exclusive": exclusive,
    }  # fmt: skip
    done: list[dict[str, Any]] = []
    paths: list[Path] = []
    try:
        measured: Sequence[dict[str, float]] = ()
        if trace is not None:
            report(f"{model}, {capacity} sessions: traced beats", 0, 0)
            measured = _traced(model, trace, min(middle, steps - 1), feed, options, noticed)
            point["trace"] = {"file": str(trace), "beats": len(measured)}
        report(f"{model}, {capacity} sessions: loading", 0, 0)
        start = time.perf_counter()
        prepare = None if at is None else functools.partial(start_at, position=at)
        with load(model, **options, prepare=prepare, notice=noticed) as cohort:
            point["load_s"] = time.perf_counter() - start
            point |= _described(cohort, middle, measured)
            for run in range(protocol.runs):
                record = _begun(point, run + 1)
                told = f"{model}, {capacity} sessions: run {run + 1} of {protocol.runs}"
                report(f"{told}, {beats.total * cohort.profile.period_ms / 1e3:.0f} s", run, protocol.runs)
                _run(record, cohort, beats, feed)
                paths.append(keep(record, _name(record), out))
                kept(paths[-1])
                done.append(record)
    except BaseException as error:  # an interrupt too
        if not any(record is other for other in done):
            failed = point | record | {"error": described_error(error)}
            kept(keep(failed, _name(failed), out))
        raise
    return judged(done, paths)


def judged(records: Sequence[dict[str, Any]], paths: Sequence[Path]) -> dict[str, Any]:
    """A point of its runs: it held where none of them has a late beat."""
    first = records[0]
    runs = [{name: value for name, value in record.items() if name != "timeline"} for record in records]
    return {
        "capacity": first["capacity"], "held": all(record["held"] for record in records),
        "protocol": first["protocol"], "shortened": first["shortened"],
        "beats": sum(record["beats"] for record in records), "late": sum(record["late"] for record in records),
        "session_beats": sum(record["session_beats"] for record in records),
        "runs": [run | {"results": str(path)} for run, path in zip(runs, paths, strict=True)],
        "results": [str(path) for path in paths],
    }  # fmt: skip


def sleep_until_due(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Sleep for most of the time that is left, and not at all when that is short: a sleep may end late."""
    if seconds > SPIN_S:
        sleep(seconds - SPIN_S)


def play_beats(cohort: Cohort, inputs: Sequence[Frame], schedule: Schedule, moments: Moments) -> None:
    """As many beats as there are rows, each at its moment; what became of them is written into the rows."""
    for beat in range(len(moments)):
        schedule.start()
        cohort.beat(inputs[beat % len(inputs)])
        schedule.finish()
        due, begun, end = schedule.moments
        moments[beat] = (due, begun, *cohort.last_span, end)


def _begun(point: dict[str, Any], run: int) -> dict[str, Any]:
    """The record of one attempt, with what there is to say before it."""
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    place = point["point"] | {"run": run}
    return point | {"point": place, "started": started, "machine": describe_machine(*GPU_PACKAGES)}


def _described(cohort: Cohort, middle: int, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The profile, and the floor of the beat in the middle of the scored ones; by operator, too."""
    profile = cohort.profile
    where: dict[str, Any] = {"capacity": profile.capacity, "target": profile.target}
    floor = measured_floor(
        profile.model, **where, context=profile.context, whole_ms=profile.floor_ms, position=middle
    )  # fmt: skip
    return {
        "profile": profile.id, "context": profile.context, "target": profile.target, "period_ms": profile.period_ms,
        "steps_per_beat": profile.steps_per_beat, "phases": profile.phases, "waves": profile.waves,
        "program_sha256": profile.program_sha256, "floor_ms": profile.floor_ms, "floor": profile.floor.model_dump(),
        "predicted_ms": profile.predicted_ms, "floor_measured": floor,
        "by_class": by_class(profile.model, **where, history=floor["history"], measured=measured),
    }  # fmt: skip


def _run(record: dict[str, Any], cohort: Cohort, beats: Beats, feed: str) -> None:
    """One run of sessions that have just joined, into its record; where it breaks off, what was made until then."""
    clock = cohort.spec.clock
    length = clock.samples_per_step * clock.steps_per_beat
    moments = np.zeros((beats.total, len(MOMENTS)), np.int64)
    sessions = [cohort.join(seed=number) for number in range(cohort.capacity)]
    try:
        inputs = frames(cohort.spec, sessions, feed)
        with _settled_memory():
            play_beats(cohort, inputs, Schedule(length, clock.sample_rate, paced=True, sleep=sleep_until_due), moments)
    finally:
        record["beats_made"] = int(np.count_nonzero(moments[:, DELIVERED]))
        record["timeline"] = timeline(moments)
        for session in sessions:
            cohort.leave(session)
    if find_target(cohort.profile.target).kind == "cuda":
        record["gpus"] = gpus()  # while the kernel is resident: the clocks that it ran at
    found = scored(moments, beats, length * NANOSECONDS // clock.sample_rate)
    kernel, floor = found["kernel_ms"]["p50"], record["floor_measured"]["floor_ms"]
    record |= found | {
        "duration_s": float(moments[-1, DELIVERED] - moments[0, 0]) / 1e9,
        "session_beats": beats.score * cohort.capacity, "above_floor": kernel / floor, "gap_ms": kernel - floor,
    }  # fmt: skip


def _traced(
    model: str, file: Path, position: int, feed: str, options: dict[str, Any], notice: Callable[[str], None]
) -> list[dict[str, float]]:
    """Times by operator of some beats at that step of history, in a cohort of their own: recording takes time."""

    def prepare(program: Program, image: Any) -> None:
        with suppress(UsageError):  # a beat that does not depend on the history
            start_at(program, image, position)

    with load(model, **options, prepare=prepare, trace=True, notice=notice) as cohort:
        inputs = frames(cohort.spec, [cohort.join(seed=number) for number in range(cohort.capacity)], feed)
        found = []
        for beat in range(TRACED_WARM_UP + TRACED):
            cohort.beat(inputs[beat % len(inputs)])
            if beat >= TRACED_WARM_UP:
                found.append(times_by_class(cohort.program, cohort.trace()))
        write_trace(file, trace_events(cohort.program, cohort.trace(), model))
    return [times for times in found if times]


@contextmanager
def _settled_memory() -> Iterator[None]:
    """What is in memory by now is not searched for garbage again: that takes long, and would come in mid-run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _name(record: dict[str, Any]) -> str:
    return f"density-{record['model']}-cap{record['capacity']}"
