"""`wpk bench report`: every attempt in a table, points as their runs show them, and figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from wpk.bench import figures
from wpk.bench.report import density_points, markdown, read_attempts, series
from wpk.ir.errors import UsageError

TIMES = {"p50": 4.0, "p90": 4.5, "p99": 5.0, "p99.9": 6.0, "max": 7.0, "max_beat": 3, "jitter": 1.0}
ERROR = {"type": "KernelError", "message": "it | stalled\nin wave 3", "wanted": None, "found": None, "hint": None}


def run(point: str, number: int, *, capacity: int = 8, runs: int = 3, late: int = 0, **more: Any) -> dict[str, Any]:
    """The record of a run of density; longer beats with more sessions."""
    beat = {name: value * capacity / 8 for name, value in TIMES.items()}
    return {
        "kind": "density", "model": "m", "target": "cpu", "capacity": capacity, "context": 9, "period_ms": 10.0,
        "protocol": "full", "point": {"id": point, "run": number, "runs": runs, "purpose": "point"},
        "started": f"2030-01-01T00:00:{number:02}", "machine": {"cpu": "a CPU"}, "threads": 2, "beats": 500,
        "late": late, "held": late == 0, "session_beats": 500 * capacity, "headroom": 1 - beat["p99"] / 10,
        "above_floor": 3.0, "floor_ms": 1.0, "floor_measured": {"history": 1, "floor_ms": 1.0}, "beat_ms": beat,
        "kernel_ms": beat,
    } | more  # fmt: skip


def failed(point: str, number: int) -> dict[str, Any]:
    gone = (
        "beats",
        "late",
        "held",
        "session_beats",
        "headroom",
        "above_floor",
        "beat_ms",
        "kernel_ms",
        "floor_measured",
    )
    return {name: value for name, value in run(point, number).items() if name not in gone} | {"error": ERROR}


def written(folder: Path, *records: dict[str, Any]) -> Path:
    for index, record in enumerate(records):
        (folder / f"r{index:02}.json").write_text(json.dumps(record))
    return folder


def test_a_point_holds_when_all_its_runs_are_there_and_none_has_a_late_beat(tmp_path: Path) -> None:
    records = [run("a", n) for n in (1, 2, 3)]
    records += [run("b", 1), run("b", 2, late=1), run("b", 3)]
    records += [run("c", 1), run("c", 2)]
    records += [run("d", 1), failed("d", 2)]
    points = density_points(read_attempts([written(tmp_path, *records)]))
    verdicts = {point["records"][0]["point"]["id"]: point["verdict"] for point in points}
    assert verdicts == {"a": "holds", "b": "does not hold", "c": "incomplete", "d": "failed"}


def test_every_attempt_has_its_row_failures_and_broken_files_too(tmp_path: Path) -> None:
    written(tmp_path, run("a", 1, runs=1), failed("b", 1))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    forms = {"eager": {"beat_ms": TIMES, "kernel_ms": TIMES}}
    record = {"kind": "baseline", "model": "m", "best": "eager", "forms": forms}
    (tmp_path / "baseline.json").write_text(json.dumps(record))
    attempts = read_attempts([tmp_path])
    text = markdown(attempts, ["one.png"])
    rows = {line.split("|")[-2].strip(): line for line in text.splitlines() if line.endswith(".json |")}
    assert set(rows) == {"r00.json", "r01.json", "broken.json", "other.json", "baseline.json"}
    assert "5 attempts, 3 of them failed" in text and "![one](one.png)" in text
    assert "| on schedule |" in rows["r00.json"] and "| 1 of 1 |" in rows["r00.json"]
    assert r"failed: KernelError: it \| stalled in wave 3" in rows["r01.json"]
    assert "cannot be read" in rows["broken.json"] and "no record" in rows["other.json"]
    assert "best: eager" in rows["baseline.json"] and "| 4 | 5 | 7 | 4 |" in rows["baseline.json"]
    columns = {line.count("|") - line.count(r"\|") for line in rows.values()}
    assert len(columns) == 1


def test_points_that_were_searched_or_shortened_say_so(tmp_path: Path) -> None:
    record = run("a", 1, runs=1, late=2, protocol="shortened")
    record["point"]["purpose"] = "search"
    attempts = read_attempts([written(tmp_path, record)])
    text = markdown(attempts)
    assert "| 2 of 500 | 4000 | 4 | 5 | 7 | 50.0% | 3 | shortened (search) | does not hold |" in text
    assert "2 late, shortened" in text


def test_what_differs_in_sessions_alone_is_one_series(tmp_path: Path) -> None:
    records = [run("a", 1, capacity=8), run("b", 1, capacity=16), run("c", 1, capacity=2), failed("d", 1)]
    records += [run("e", 1, capacity=8, beat_ms=TIMES | {"p99": 9.0})]
    records += [run("f", 1, capacity=8, beat_ms=TIMES | {"p99": 90.0}, protocol="shortened")]
    records += [run("g", 1, history={"position": 5}), run("h", 1, machine={"cpu": "another"}), run("i", 1, context=7)]
    found = series(read_attempts([written(tmp_path, *records)]))
    assert [one.name for one in found] == ["density-m-cpu", *(f"density-m-cpu-{n}" for n in (2, 3, 4))]
    assert [len(one.attempts) for one in found] == [5, 1, 1, 1]
    assert found[0].worst("p99") == ([2, 8, 16], [1.25, 9.0, 10.0])  # whole runs are believed, not the shortened
    assert found[0].worst("floor")[1] == [1.0] * 3
    assert "another" in {one.title.split(": ")[1].split(",")[0] for one in found}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_figure_is_drawn_the_same_again(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "in").mkdir()
    records = [run(f"{n}", 1, capacity=n, late=n > 16) for n in (1, 8, 64)]
    (one,) = series(read_attempts([written(tmp_path / "in", *records)]))
    paths = [tmp_path / "out" / f"{n}.{suffix}" for n in (1, 2)]
    for path in paths:
        figures.draw(one, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_without_matplotlib_the_mend_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *_: object) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        figures.require_matplotlib()
    assert "pip install 'wpk[bench]'" in str(caught.value.hint)


def test_every_record_that_is_kept_here_can_be_reported_and_drawn() -> None:
    kept = read_attempts([Path(__file__).parents[2] / "bench" / "results"])
    assert len(kept) > 3 and not [attempt.problem for attempt in kept if attempt.problem]
    assert any(measured.ms["floor"] > 0 for one in series(kept) for measured in one.attempts)
    assert all(str(attempt.path.name) in markdown(kept) for attempt in kept)


@pytest.mark.parametrize("record", [{"kind": "density"}, {"kind": "beat", "model": "m"}])
def test_a_record_that_lacks_something_is_told_and_not_drawn(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record))
    (attempt,) = read_attempts([tmp_path])
    assert attempt.record is None and "lacks" in str(attempt.problem)
    assert series([attempt]) == [] and density_points([attempt]) == []
    assert "lacks" in markdown([attempt])


def test_nothing_to_report_on_is_wrong_use(tmp_path: Path) -> None:
    for places in ([tmp_path], [tmp_path / "nowhere"], []):
        with pytest.raises(UsageError):
            read_attempts(places)
