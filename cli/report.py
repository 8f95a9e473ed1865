"""`wpk bench report`: what records of measurements say, as tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wpk.cli.output import Block, JsonFlag, Output, QuietFlag, Table, refuse


def report(
    records: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]", help="Records, or folders of them; bench/results by default."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report goes.")] = Path("bench", "report"),
    format: Annotated[str, typer.Option("--format", help="Of figures: png or svg.")] = "png",
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw, with matplotlib.")] = True,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Tables of every attempt, failed ones too, and figures of time against sessions. Older reports are replaced."""
    from wpk.bench.figures import FORMATS, draw, require_matplotlib
    from wpk.bench.records import FOLDER
    from wpk.bench.report import density_points, markdown, read_attempts, series
    from wpk.registry.storage import store_errors

    if format not in FORMATS:
        refuse("--format", wanted=" or ".join(FORMATS), found=format)
    if figures:
        require_matplotlib()
    attempts = read_attempts(records or [FOLDER])
    drawn: list[Path] = []
    for one in series(attempts) if figures else ():
        drawn.append(out / f"{one.name}.{format}")
        draw(one, drawn[-1])
    table = out / "report.md"
    with store_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        table.write_text(markdown(attempts, [path.name for path in drawn]), encoding="utf-8")
    points = density_points(attempts)
    failed = [str(attempt.path) for attempt in attempts if attempt.failed]
    paths = [str(path) for path in (table, *drawn)]
    fields = {
        "attempts": len(attempts),
        "failed": failed,
        "points": [
            {name: point[name] for name in ("model", "target", "capacity", "protocol", "purpose", "verdict")}
            for point in points
        ],
        "report": paths[0],
        "figures": paths[1:],
    }
    rows = [[p["model"], p["target"], p["capacity"], p["protocol"], p["verdict"]] for p in points]
    blocks: list[Block] = [f"{len(attempts)} attempts, {len(failed)} of them failed"]
    if rows:
        blocks.append(Table(("model", "target", "sessions", "protocol", "verdict"), rows, title="Density"))
    blocks += [f"written to {path}" for path in paths]
    Output(json, quiet).result(fields, names=paths, blocks=blocks)
