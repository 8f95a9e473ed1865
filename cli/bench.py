"""`wpk bench`: measurements, each kept as one JSON file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from wpk.cli.output import Fields, JsonFlag, Output, QuietFlag
from wpk.cli.profile import Cap, Context, Model, Target

app = typer.Typer(help="Measure.", no_args_is_help=True)


@app.command("beat")
def beat(
    model: Model,
    cap: Cap,
    context: Context = None,
    target: Target = "auto",
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="Time to measure each side for.")] = 5.0,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads of either side; all processors by default.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", metavar="RUNTIME", help="Measure the original in turns: onnxruntime, or none."),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Folder or new .json file; bench/results by default.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """A beat of a full cohort on random audio, beside the model's original in its own runtime where that is known."""
    from wpk.bench.beat import bench_beat
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
    with sink.progress() as report:
        record, path = bench_beat(
            model, capacity=cap, context=context, target=target, seconds=seconds, threads=threads,
            baseline=baseline, out=out, report=report,
        )  # fmt: skip
    shown: dict[str, object] = {
        "profile": record["profile"],
        "beat": _times(record["beat_ms"]),
        "kernel": _times(record["kernel_ms"]),
        "period": f"{record['period_ms']:g} ms",
        "floor": f"{record['floor_ms']:.4g} ms",
    }
    if "baseline" in record:
        shown[record["baseline"]["runtime"]] = _times(record["baseline"]["beat_ms"])
        shown["ratio"] = f"{record['ratio']:.3g} of the baseline's p50"
    title = f"{model}, {cap} sessions, {record['threads']} threads, {record['beats']} beats"
    sink.result(
        record | {"results": str(path)}, names=[str(path)], blocks=[Fields(shown, title=title), f"kept in {path}"]
    )


def _times(found: dict[str, float]) -> str:
    return f"p50 {found['p50']:.3f}  p99 {found['p99']:.3f}  max {found['max']:.3f} ms"
