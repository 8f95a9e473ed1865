"""Figures of measurements, drawn with matplotlib (the extra `bench`)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from wpk.bench.report import Series
from wpk.ir.errors import UsageError
from wpk.registry.storage import store_errors

FORMATS = ("png", "svg")
LINES = {
    "p99": ("p99 of the whole beat", "-", "tab:blue"),
    "p50": ("p50 of the whole beat", "-", "tab:cyan"),
    "kernel": ("p50 of the kernel", ":", "tab:purple"),
    "floor": ("floor", "--", "tab:gray"),
}  # fmt: skip
WIDE = 30.0  # the greatest over the least, from which on an axis is logarithmic


def require_matplotlib() -> Any:
    """matplotlib, set to draw into files; UsageError where it is not installed."""
    try:
        found = importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError(
            "figures need the package matplotlib", wanted="matplotlib", found="not installed",
            hint="pip install 'wpk[bench]', or give --no-figures for the tables alone",
        ) from error  # fmt: skip
    found.use("Agg")
    found.rcParams["svg.hashsalt"] = "wpk"  # the same records give the same file
    return found


def draw(series: Series, path: Path) -> None:
    """Sessions against time: a line through the worst attempt of each number, a mark for every attempt.

    Filled: the whole protocol; hollow: a shortened one; a cross: with late beats.
    """
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, (label, style, colour) in LINES.items():
        axes.plot(*series.worst(name), style, color=colour, label=label)
    for name in ("p50", "p99"):
        for one in series.attempts:
            colour = LINES[name][2]
            axes.plot(one.sessions, one.ms[name], "o", color=colour, mfc=colour if one.full else "none", ms=4)
    late = [one for one in series.attempts if one.late]
    if late:
        axes.plot(
            [o.sessions for o in late], [o.ms["p99"] for o in late], "x", color="tab:red", label="with late beats"
        )
    axes.axhline(series.period_ms, color="black", linewidth=1, label=f"period, {series.period_ms:g} ms")
    if series.period_ms > WIDE * min(min(one.ms.values()) for one in series.attempts):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if series.attempts[-1].sessions > WIDE * series.attempts[0].sessions:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(series.title, fontsize="medium")
    axes.set_xlabel("sessions")
    axes.set_ylabel("ms a beat")
    axes.legend(fontsize="small")
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
