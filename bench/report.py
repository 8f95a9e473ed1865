"""`wpk bench report`: records of measurements as tables in Markdown, and as what figures are drawn from.

Nothing is left out: every attempt has its row, failed ones and files that cannot be read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wpk.ir.errors import UsageError
from wpk.registry.storage import store_errors

Record = dict[str, Any]


@dataclass(frozen=True)
class Attempt:
    """A file and its record; or why it has none."""

    path: Path
    record: Record | None
    problem: str | None = None

    @property
    def failed(self) -> bool:
        return self.record is None or "error" in self.record


@dataclass(frozen=True)
class Measured:
    """One attempt in a figure: ms by name (`p50`, `p99`, `kernel`, `floor`)."""

    sessions: int
    ms: dict[str, float]
    late: int
    full: bool


@dataclass(frozen=True)
class Series:
    """Attempts that differ in their number of sessions alone, by that number."""

    name: str
    title: str
    period_ms: float
    attempts: tuple[Measured, ...]

    def worst(self, name: str) -> tuple[list[int], list[float]]:
        """Sessions, and the longest time of the attempts with so many: of whole ones where there are any."""
        found: dict[int, float] = {}
        for sessions in sorted({attempt.sessions for attempt in self.attempts}):
            own = [attempt for attempt in self.attempts if attempt.sessions == sessions]
            chosen = [attempt for attempt in own if attempt.full] or own
            found[sessions] = max(attempt.ms[name] for attempt in chosen)
        return list(found), list(found.values())


_DRAWN = (
    "model", "target", "capacity", "context", "period_ms", "machine", "threads", "beat_ms", "kernel_ms", "floor_ms",
    "late",
)  # fmt: skip
NEEDED = {"beat": _DRAWN, "density": (*_DRAWN, "held", "beats", "session_beats", "headroom", "above_floor")}


def read_attempts(places: Iterable[Path]) -> list[Attempt]:
    """Every .json file of these files and folders, by the moment at which its attempt began."""
    files: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            with store_errors(place):
                files |= dict.fromkeys(sorted(place.glob("*.json")))
        elif place.is_file():
            files[place] = None
        else:
            raise UsageError(
                f"{place} is not there", wanted="records of measurements, or a folder of them", found="nothing",
                hint="`wpk bench beat` and `wpk bench density` make some.",
            )  # fmt: skip
    if not files:
        raise UsageError("there is nothing to report on", wanted="at least one record", found="no .json file")
    return sorted((_read(path) for path in files), key=lambda a: ((a.record or {}).get("started") or "", a.path))


def _read(path: Path) -> Attempt:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Attempt(path, None, f"cannot be read: {error}")
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return Attempt(path, None, "no record of a measurement")
    lacking = [] if "error" in record else [name for name in NEEDED.get(record["kind"], ()) if name not in record]
    if record["kind"] == "density" and not isinstance(record.get("point"), dict):
        lacking.append("point")
    return Attempt(path, None, f"lacks {', '.join(lacking)}") if lacking else Attempt(path, record)


# --- points of density ----------------------------------------------------------------------------------------------
def density_points(attempts: Sequence[Attempt]) -> list[Record]:
    """Points of density as their runs' records show them: {"verdict", "records"} and what the runs share.

    A point holds when as many runs as it was to have are there, and no beat of any is late.
    """
    runs: dict[str, list[Record]] = {}
    for attempt in attempts:
        if attempt.record is not None and attempt.record["kind"] == "density":
            runs.setdefault(attempt.record["point"]["id"], []).append(attempt.record)
    found = []
    for records in runs.values():
        first = records[0]
        if any("error" in record for record in records):
            verdict = "failed"
        elif not all(record["held"] for record in records):
            verdict = "does not hold"
        else:
            verdict = "holds" if len(records) >= first["point"]["runs"] else "incomplete"
        shared = ("model", "target", "capacity", "context", "protocol", "period_ms", "history")
        point = {name: first.get(name) for name in shared}
        found.append(point | {"verdict": verdict, "records": records, "purpose": first["point"]["purpose"]})
    return found


def _point_row(point: Record) -> list[object]:
    done = [record for record in point["records"] if "error" not in record]
    history = (point["history"] or {}).get("position")
    protocol = point["protocol"] + (" (search)" if point["purpose"] == "search" else "")
    row = [point["model"], point["target"], point["capacity"], point["context"], history, len(point["records"])]
    if not done:
        return [*row, *[None] * 7, protocol, point["verdict"]]
    worst = max(done, key=lambda record: record["beat_ms"]["p99"])
    return [
        *row, f"{sum(r['late'] for r in done)} of {sum(r['beats'] for r in done)}",
        sum(r["session_beats"] for r in done), _ms(worst["beat_ms"]["p50"]), _ms(worst["beat_ms"]["p99"]),
        _ms(max(r["beat_ms"]["max"] for r in done)), f"{min(r['headroom'] for r in done):.1%}",
        f"{max(r['above_floor'] for r in done):.3g}", protocol, point["verdict"],
    ]  # fmt: skip


# --- tables ---------------------------------------------------------------------------------------------------------
def markdown(attempts: Sequence[Attempt], figures: Sequence[str] = ()) -> str:
    """The whole report; figures: files beside it that it shows."""
    points = density_points(attempts)
    parts = ["# Measurements", *(f"![{Path(name).stem}]({name})" for name in figures)]
    if points:
        heads = (
            "model", "target", "sessions", "context", "history", "runs", "late", "session beats", "p50 ms", "p99 ms",
            "max ms", "headroom", "x floor", "protocol", "verdict",
        )  # fmt: skip
        note = "Times are those of the run with the greatest p99; headroom is 1 - p99 / period, of the worst run."
        parts += ["## Density", note, _table(heads, [_point_row(point) for point in points])]
    heads = (
        "started", "kind", "model", "target", "sessions", "run", "beats", "late", "p50 ms", "p99 ms", "max ms",
        "kernel p50", "floor ms", "outcome", "file",
    )  # fmt: skip
    failed = sum(attempt.failed for attempt in attempts)
    told = f"{len(attempts)} attempts, {failed} of them failed."
    parts += ["## Every attempt", told, _table(heads, [_attempt_row(attempt) for attempt in attempts])]
    return "\n\n".join(parts) + "\n"


def _attempt_row(attempt: Attempt) -> list[object]:
    record = attempt.record or {}
    run = record.get("point", {}).get("run")
    place = f"{run} of {record['point']['runs']}" if run else None
    row = [record.get(name) for name in ("started", "kind", "model", "target", "capacity")]
    beat, kernel, floor = (record.get(name, {}) for name in ("beat_ms", "kernel_ms", "floor_measured"))
    if record.get("kind") == "baseline" and "best" in record:
        beat, kernel = (record["forms"][record["best"]][name] for name in ("beat_ms", "kernel_ms"))
    times = [beat.get("p50"), beat.get("p99"), beat.get("max"), kernel.get("p50"), floor.get("floor_ms")]
    return [
        *row, place, record.get("beats"), record.get("late"), *map(_ms, times), _outcome(attempt), attempt.path.name
    ]  # fmt: skip


def _outcome(attempt: Attempt) -> str:
    if attempt.record is None:
        return attempt.problem or "cannot be read"
    if "error" in attempt.record:
        error = attempt.record["error"]
        return ": ".join(filter(None, ("failed", error["type"], error["message"])))
    if attempt.record["kind"] == "baseline":
        return f"best: {attempt.record.get('best')}"
    late = attempt.record.get("late")
    said = "on schedule" if late == 0 else f"{late} late"
    return said + (", shortened" if attempt.record.get("protocol") == "shortened" else "")


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def line(cells: Iterable[object]) -> str:
        texts = ("" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
        return "| " + " | ".join(texts) + " |"

    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


# --- figures --------------------------------------------------------------------------------------------------------
def series(attempts: Sequence[Attempt]) -> list[Series]:
    """What there is to draw: beats and density against sessions, apart by model, machine, context and history."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for attempt in attempts:
        record = attempt.record
        if record is not None and not attempt.failed and record["kind"] in ("beat", "density"):
            history = record.get("history", {}).get("position")
            key = (record["kind"], record["model"], record["target"], record["context"], history, _device(record))
            groups.setdefault((*key, record["period_ms"]), []).append(record)
    found, names = [], set[str]()
    for (kind, model, target, context, history, device, period), records in groups.items():
        name, number = f"{kind}-{model}-{target}", 1
        while name in names:
            number += 1
            name = f"{kind}-{model}-{target}-{number}"
        names.add(name)
        told = f"context {context}" + ("" if history is None else f", from step {history}")
        measured = tuple(
            sorted((_measured(record) for record in records), key=lambda one: (one.sessions, one.ms["p99"]))
        )
        found.append(Series(name, f"{model}, {kind}: {device}, {told}", period, measured))
    return found


def _measured(record: Record) -> Measured:
    ms = {
        "p50": record["beat_ms"]["p50"], "p99": record["beat_ms"]["p99"], "kernel": record["kernel_ms"]["p50"],
        "floor": record.get("floor_measured", {}).get("floor_ms", record["floor_ms"]),
    }  # fmt: skip
    return Measured(record["capacity"], ms, record["late"], record.get("protocol") != "shortened")


def _device(record: Record) -> str:
    gpus = record.get("gpus") or [{}]
    return str(gpus[0].get("name") or f"{record['machine']['cpu']}, {record['threads']} threads")
