"""`wpk bench density`: whether a capacity stays on schedule, or which is the highest that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from wpk.cli.bench import At, Commit, capacities_of, command_line, times
from wpk.cli.output import Block, Fields, JsonFlag, Output, QuietFlag, Table, refuse
from wpk.cli.profile import Context, Model, Target
from wpk.cli.run import Exclusive
from wpk.ir.errors import UsageError, WpkError

Measure = Callable[..., dict[str, Any]]
Seconds = float | None


def density(
    model: Model,
    cap: Annotated[
        str | None, typer.Option("--cap", metavar="N[,N...]", help="Live sessions; several are measured in turn.")
    ] = None,
    search: Annotated[
        str | None, typer.Option("--search", metavar="LO:HI", help="Find the highest capacity that holds instead.")
    ] = None,
    runs: Annotated[int | None, typer.Option("--runs", metavar="N", help="Runs of a point; 3 by default.")] = None,
    lead: Annotated[Seconds, typer.Option("--lead", metavar="S", help="Before what is scored; 40 by default.")] = None,
    score: Annotated[Seconds, typer.Option("--score", metavar="S", help="Scored; 80 by default.")] = None,
    tail: Annotated[Seconds, typer.Option("--tail", metavar="S", help="After it; 8 by default.")] = None,
    context: Context = None,
    target: Target = "auto",
    at: At = None,
    feed: Annotated[
        str, typer.Option("--input", metavar="KIND", help="What sessions hear: noise or speech.")
    ] = "noise",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of a CPU's kernel; all processors by default.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Trace a few beats before the runs: times by operator (GPU)."),
    ] = None,
    exclusive: Exclusive = False,
    commit: Commit = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where records go; bench/results by default.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Live sessions on the model's clock: a capacity holds when no beat is late in three runs one after the other."""
    from wpk.bench.density import bench_density
    from wpk.bench.protocol import LEAD_S, RUNS, SCORE_S, TAIL_S, Protocol

    sink = Output(json, quiet)
    if (cap is None) == (search is None):
        refuse("what to measure", wanted="--cap or --search", found="neither" if cap is None else "both")
    protocol = Protocol(
        LEAD_S if lead is None else lead, SCORE_S if score is None else score, TAIL_S if tail is None else tail,
        RUNS if runs is None else runs,
    )  # fmt: skip
    paths: list[Path] = []

    def measure(capacity: int, wanted: Protocol, purpose: str) -> dict[str, Any]:
        before = len(paths)
        try:
            return point(capacity, wanted, purpose)
        except WpkError:
            if paths[before:]:
                sink.note(f"the attempt that failed is kept in {paths[-1]}")
            raise

    def point(capacity: int, wanted: Protocol, purpose: str) -> dict[str, Any]:
        return bench_density(
            model, capacity=capacity, protocol=wanted, purpose=purpose, context=context, target=target, at=at,
            feed=feed, threads=threads, trace=trace if purpose == "point" else None, command=command_line(),
            commit=commit, out=out, kept=paths.append, report=lambda what, *_: sink.step(what), exclusive=exclusive,
            notice=sink.note,
        )  # fmt: skip

    if search is not None:
        if trace is not None:
            refuse("--trace with --search", wanted="--trace with --cap", found="both")
        fields = _search(sink, model, search, protocol, measure)
    else:
        capacities = capacities_of(cap or "", None)
        if trace is not None and len(capacities) > 1:
            refuse("--trace for several capacities", wanted="one capacity", found=cap)
        if len(capacities) == 1:
            points = [measure(capacities[0], protocol, "point")]
        else:
            points = [_attempt(sink, capacity, lambda c: measure(c, protocol, "point")) for capacity in capacities]
        fields = {"points": points, "held": all(point["held"] for point in points)}
    fields = {"model": model} | fields | {"results": [str(path) for path in paths]}
    sink.result(fields, names=fields["results"], blocks=_blocks(fields))
    sink.verdict(fields["held"])


def _search(sink: Output, model: str, text: str, protocol: Any, measure: Measure) -> dict[str, Any]:
    """Every point that was tried, and the highest capacity that holds."""
    from wpk.bench.search import highest, parsed_range, probe_protocol
    from wpk.registry import find_model

    lo, hi = parsed_range(text)
    short = probe_protocol(protocol, find_model(model).clock)
    points: list[dict[str, Any]] = []

    def holds(wanted: Any, purpose: str) -> Callable[[int], bool]:
        def tried(capacity: int) -> bool:
            point = _attempt(sink, capacity, lambda c: measure(c, wanted, purpose)) | {"purpose": purpose}
            sink.step(f"{capacity} sessions: {_verdict(point)}")
            points.append(point)
            return bool(point["held"])

        return tried

    found = highest(lo, hi, holds(short, "search"), holds(protocol, "confirm"))
    return {"search": {"from": lo, "to": hi, "found": found}, "points": points, "held": found is not None}


def _attempt(sink: Output, capacity: int, point: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """A point among several: one that fails does not keep the others from being measured, and did not hold."""
    try:
        return point(capacity)
    except UsageError:
        raise
    except WpkError as error:
        sink.note(f"{capacity} sessions: {error}")
        return {"capacity": capacity, "held": False, "error": error.as_dict()}


def _blocks(fields: dict[str, Any]) -> list[Block]:
    points = fields["points"]
    if len(points) == 1 and "search" not in fields:
        point = points[0]
        title = f"{fields['model']}, {point['capacity']} sessions"
        return [Fields(_told(point), title=title), *(f"kept in {path}" for path in fields["results"])]
    rows = [_row(point) for point in points]
    blocks: list[Block] = [
        Table(
            ("sessions", "verdict", "runs", "late", "beat p50", "p99", "max", "headroom"), rows, title=fields["model"]
        )
    ]
    if "search" in fields:
        asked = fields["search"]
        said = f"no capacity of {asked['from']}..{asked['to']} holds"
        blocks.append(said if asked["found"] is None else f"the highest that holds: {asked['found']} sessions")
    return blocks


def _told(point: dict[str, Any]) -> dict[str, object]:
    first = point["runs"][0]
    floor = first["floor_measured"]["floor_ms"]
    shown: dict[str, object] = {"verdict": _verdict(point), "profile": first["profile"]}
    if point["shortened"]:
        shown["protocol"] = "shortened: " + "; ".join(point["shortened"])
    for run in point["runs"]:
        late = f"{run['late']} of {run['beats']} late"
        cause = f" (kernel {run['late_by']['kernel']}, host {run['late_by']['host']})" if run["late"] else ""
        shown |= {
            f"run {run['point']['run']}": f"{late}{cause}, headroom {run['headroom']:.1%}",
            f"run {run['point']['run']} beat": times(run["beat_ms"]),
            f"run {run['point']['run']} kernel": times(run["kernel_ms"]),
            f"run {run['point']['run']} start": times(run["start_late_ms"]) + " after its schedule",
        }
    worst = max(point["runs"], key=lambda run: run["kernel_ms"]["p50"])
    gap = f"{worst['above_floor']:.3g} times that, {worst['gap_ms']:.4g} ms more"
    shown |= {"period": f"{first['period_ms']:g} ms", "floor": f"{floor:.4g} ms; the kernel takes {gap}"}
    for row in first["by_class"]:
        if row.get("measured_ms", 0.0) >= floor / 100 or row["floor_ms"] >= floor / 100:
            took = f"{row['measured_ms']:.4g} ms, floor " if "measured_ms" in row else "floor "
            shown[f"  {row['operator']}"] = f"{took}{row['floor_ms']:.4g} ms, {row['phases']} phases"
    if "history" in first:
        shown["history"] = f"sessions start at step {first['history']['position']}"
    return shown


def _row(point: dict[str, Any]) -> tuple[object, ...]:
    if "error" in point:
        return point["capacity"], f"failed: {point['error']['message']}", None, None, None, None, None, None
    runs = point["runs"]
    beat = [max(run["beat_ms"][name] for run in runs) for name in ("p50", "p99", "max")]
    headroom = f"{min(run['headroom'] for run in runs):.1%}"
    return point["capacity"], _verdict(point), len(runs), point["late"], *(f"{ms:.3f}" for ms in beat), headroom


def _verdict(point: dict[str, Any]) -> str:
    if "error" in point:
        return "failed"
    said = "holds" if point["held"] else "does not hold"
    return said + (", by a shortened protocol" if point["protocol"] != "full" else "")
