"""`wpk bench`: measurements, each kept as one JSON file."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wpk.cli.output import Block, Fields, JsonFlag, Output, QuietFlag, Table
from wpk.cli.profile import Context, Model, Target
from wpk.cli.run import Exclusive, Trace
from wpk.ir.errors import UsageError, WpkError

app = typer.Typer(help="Measure.", no_args_is_help=True)

Caps = Annotated[
    str, typer.Option("--cap", metavar="N[,N...]", help="Sessions that run at once; several are measured in turn.")
]
At = Annotated[int | None, typer.Option("--at", metavar="STEP", help="Step of history that sessions start at.")]
Beats = Annotated[int | None, typer.Option("--beats", metavar="N", help="Beats to measure.")]
WarmUp = Annotated[int | None, typer.Option("--warmup", metavar="N", help="Beats before them that don't count.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="PATH", help="Folder or new .json file; bench/results by default.")
]
Commit = Annotated[
    str | None, typer.Option("--commit", metavar="ID", help="Of this code, where it runs outside its checkout.")
]
Forms = Annotated[
    str | None,
    typer.Option("--forms", metavar="NAMES", help="Of eager,graph,compiled_graph (GPU) and eager,compiled (CPU)."),
]
Point = tuple[dict[str, Any], list[Path], dict[str, object]]  # record, files, and what a person is told


@app.command("beat")
def beat(
    model: Model,
    cap: Caps,
    context: Context = None,
    target: Target = "auto",
    at: At = None,
    beats: Beats = None,
    warmup: WarmUp = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time to measure each side for, without --beats.")
    ] = 5.0,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of either side; all processors by default.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUNTIME", help="Measure the original in turns: onnxruntime, or none."),
    ] = "auto",
    with_baseline: Annotated[
        bool, typer.Option("--with-baseline", help="Then the same step in PyTorch on the same machine.")
    ] = False,
    trace: Trace = None,
    exclusive: Exclusive = False,
    commit: Commit = None,
    out: Out = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """A beat of a full cohort on random inputs, beside the floor and, where they are known, baselines."""
    from wpk.bench.beat import WARM_UP, bench_beat
    from wpk.bench.torch_baseline import bench_baseline, require_torch
    from wpk.zoo.baselines import BASELINES

    sink = Output(json, quiet)
    if baseline == "auto":
        known = BASELINES.get(model)
        baseline = known.runtime if known else None
        if baseline and importlib.util.find_spec(baseline) is None:
            sink.note(f"measured without the baseline: {baseline} is not installed (pip install 'wpk[bench]')")
            baseline = None
    elif baseline == "none":
        baseline = None
    if with_baseline:
        require_torch()
    capacities = capacities_of(cap, out)
    if trace is not None and len(capacities) > 1:
        raise UsageError("--trace for several capacities", wanted="one capacity", found=cap)

    def point(capacity: int) -> Point:
        with sink.progress() as report:
            record, path = bench_beat(
                model, capacity=capacity, context=context, target=target, seconds=seconds, beats=beats,
                warm_up=WARM_UP if warmup is None else warmup, at=at, threads=threads, baseline=baseline,
                command=command_line(), commit=commit, out=out, report=report, trace=trace, exclusive=exclusive,
                notice=sink.note,
            )  # fmt: skip
            if not with_baseline:
                return record, [path], _told_beat(record)
            try:
                theirs, kept = bench_baseline(
                    model, capacity=capacity, context=context, at=record["floor_measured"]["history"] - 1,
                    device="cpu" if record["target"] == "cpu" else "cuda", command=command_line(), commit=commit,
                    beside=(record, path), out=out, report=report,
                )  # fmt: skip
            except WpkError:
                sink.note(f"the beat without its baseline is kept in {path}")
                raise
        both = _told_beat(record) | _told_forms(theirs) | {"ratio": f"{theirs['ratio']:.3g} of the best form's p50"}
        return record | {"torch": theirs | {"results": str(kept)}}, [path, kept], both

    _measure(sink, model, capacities, point)


@app.command("baseline")
def baseline(
    model: Model,
    cap: Caps,
    context: Context = None,
    at: At = None,
    beats: Beats = None,
    warmup: WarmUp = None,
    forms: Forms = None,
    device: Annotated[str, typer.Option("--device", help="cuda, cpu, or auto for what this machine has.")] = "auto",
    commit: Commit = None,
    out: Out = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """A step of the same shapes in PyTorch: eager, as a CUDA graph, and as a CUDA graph of compiled code."""
    from wpk.bench.torch_baseline import BEATS, WARM_UP, bench_baseline

    sink = Output(json, quiet)

    def point(capacity: int) -> Point:
        with sink.progress() as report:
            record, path = bench_baseline(
                model, capacity=capacity, context=context, at=at, beats=BEATS if beats is None else beats,
                warm_up=WARM_UP if warmup is None else warmup, forms=forms.split(",") if forms else None,
                device=device, command=command_line(), commit=commit, out=out, report=report,
            )  # fmt: skip
        return record, [path], _told_forms(record)

    _measure(sink, model, capacities_of(cap, out), point)


def _measure(sink: Output, model: str, capacities: Sequence[int], point: Callable[[int], Point]) -> None:
    """Every capacity in turn; one that fails does not keep the others from being measured."""
    if len(capacities) == 1:
        record, paths, told = point(capacities[0])
        title = f"{model}, {capacities[0]} sessions"
        blocks: list[Block] = [Fields(told, title=title), *(f"kept in {path}" for path in paths)]
        sink.result(record | {"results": str(paths[0])}, names=[str(p) for p in paths], blocks=blocks)
        return
    points: list[dict[str, Any]] = []
    names, rows = [], []
    for capacity in capacities:
        try:
            record, paths, told = point(capacity)
        except UsageError:
            raise
        except WpkError as error:
            points.append({"capacity": capacity, "error": error.as_dict()})
            rows.append([capacity, f"failed: {error.message}"])
            sink.note(f"{capacity} sessions: {error}")
            continue
        points.append(record | {"results": str(paths[0])})
        names += [str(path) for path in paths]
        rows.append([capacity, "  ".join(f"{name} {value}" for name, value in told.items())])
    sink.result({"points": points}, names=names, blocks=[Table(("sessions", "measured"), rows, title=model)])
    sink.verdict(all("error" not in found for found in points))


def capacities_of(text: str, out: Path | None) -> list[int]:
    """The numbers of --cap; several need a folder for their records."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError("--cap", wanted="a number, or several with commas between", found=text) from None
    if len(found) > 1 and out is not None and out.suffix == ".json":
        raise UsageError("--out for several capacities", wanted="a folder", found=out)
    return found


def command_line() -> str:
    """What was typed, for the record."""
    return shlex.join(["wpk", *sys.argv[1:]])


def _told_beat(record: dict[str, Any]) -> dict[str, object]:
    measured = record["floor_measured"]
    shown: dict[str, object] = {
        "profile": record["profile"],
        "beats": f"{record['beats']}, of which late {record['late']}",
        "beat": times(record["beat_ms"]),
        "kernel": times(record["kernel_ms"]),
        "period": f"{record['period_ms']:g} ms",
        "floor": f"{measured['floor_ms']:.4g} ms; the kernel takes {record['above_floor']:.3g} times that",
    }
    if "history" in record:
        shown["history"] = f"sessions start at step {record['history']['position']}"
    if "trace" in record:
        shown["trace"] = f"{record['trace']}; open it in https://ui.perfetto.dev. Beats took longer for it"
    if "baseline" in record:
        shown[record["baseline"]["runtime"]] = times(record["baseline"]["beat_ms"])
        shown["ratio"] = f"{record['ratio']:.3g} of the baseline's p50"
    return shown


def _told_forms(record: dict[str, Any]) -> dict[str, object]:
    shown: dict[str, object] = {
        f"PyTorch {name}": f"failed: {form['error']['message']}" if "error" in form else times(form["kernel_ms"])
        for name, form in record["forms"].items()
    }
    if "floor_ms" in record:
        shown["PyTorch's floor"] = f"{record['floor_ms']:.4g} ms; the best takes {record['above_floor']:.3g} times that"
    return shown


def times(found: dict[str, float]) -> str:
    """Figures of durations as a person reads them."""
    return f"p50 {found['p50']:.3f}  p99 {found['p99']:.3f}  max {found['max']:.3f} ms"
