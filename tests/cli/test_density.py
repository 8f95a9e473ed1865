"""`wpk bench density` and `wpk bench report` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.paced import Bench
from tests.bench.paced import bench as bench
from tests.cli.harness import Wpk, files
from wpk.bench import density
from wpk.ir.errors import CapacityError

SHORT = ("--lead", "0.1", "--score", "0.5", "--tail", "0.05")


def test_a_real_cohort_on_its_clock(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    words = ("bench", "density", tiny, "--cap", 2, *SHORT, "--runs", 2, "--input", "speech", "--threads", 1, "--json")
    said = wpk(*words)
    (point,) = said.json["points"]
    assert said.code == (0 if point["held"] else 1) and said.json["held"] == point["held"]
    assert len(said.json["results"]) == 2
    for run in point["runs"]:
        kept = json.loads((tmp_path / run["results"]).read_text())
        assert kept == {n: v for n, v in run.items() if n != "results"} | {"timeline": kept["timeline"]}
        assert kept["beats_made"] == 10 + 50 + 5 and kept["duration_s"] >= 0.64
        assert kept["kernel_ms"]["p50"] <= kept["beat_ms"]["p50"] <= kept["delivered_ms"]["p50"]
        moments = kept["timeline"]
        assert moments["scheduled"] == list(range(0, 650_000, 10_000))
        for first, then in zip(list(moments)[:-1], list(moments)[1:], strict=True):
            assert all(a <= b for a, b in zip(moments[first], moments[then], strict=True))
        assert kept["command"].split()[0] == "wpk" and kept["feed"] == "speech"


def test_a_capacity_that_holds(wpk: Wpk, bench: Bench) -> None:
    said = wpk("bench", "density", "small", "--cap", 3, "--out", "there")
    assert said.code == 0
    assert "holds\n" in said.out and "0 of 8000 late" in said.out and said.out.count("kept in there/density-") == 3


def test_one_late_beat_ends_in_exit_code_1(wpk: Wpk, bench: Bench, tmp_path: Path) -> None:
    bench.work = lambda _, beat: (13.0, 0.0) if beat == 30 else (4.0, 1.0)
    said = wpk("bench", "density", "small", "--cap", 3, *SHORT, "--json")
    assert said.code == 1 and not said.json["held"]
    assert [run["late_beats"] for run in said.json["points"][0]["runs"]] == [[30], [], []]
    assert len(files(tmp_path / "bench" / "results")) == 3
    told = wpk("bench", "density", "small", "--cap", 3, *SHORT).out
    assert "does not hold, by a shortened protocol" in told and "(kernel 1, host 0)" in told


def test_a_crash_is_told_and_kept(wpk: Wpk, bench: Bench, tmp_path: Path) -> None:
    bench.fail_at = 3
    said = wpk("bench", "density", "small", "--cap", 3, *SHORT)
    assert said.code == 1 and "it stalled" in said.err and "is kept in bench/results/density-small" in said.err
    several = wpk("bench", "density", "small", "--cap", "3,4", *SHORT, "--json")
    assert several.code == 1
    assert [point["error"]["type"] for point in several.json["points"]] == ["KernelError"] * 2
    assert len(several.json["results"]) == 2 and len(files(tmp_path / "bench" / "results")) == 3


def test_several_capacities_are_judged_apart(wpk: Wpk, bench: Bench) -> None:
    bench.work = lambda capacity, _: (0.99 * capacity, 0.0)
    said = wpk("bench", "density", "small", "--cap", "4,12", *SHORT, "--json")
    assert said.code == 1 and [p["held"] for p in said.json["points"]] == [True, False]
    assert "sessions" in wpk("bench", "density", "small", "--cap", "4,8", *SHORT).out


def test_a_search_finds_the_highest_that_holds_and_confirms_it(wpk: Wpk, bench: Bench) -> None:
    bench.work = lambda capacity, _: (0.99 * capacity, 0.0)  # ten hold
    found = wpk("bench", "density", "small", "--search", "1:32", "--json").json
    assert found["search"] == {"from": 1, "to": 32, "found": 10} and found["held"]
    *probes, last = found["points"]
    assert {p["purpose"] for p in probes} == {"search"} and {p["protocol"] for p in probes} == {"shortened"}
    assert all(p["held"] == (p["capacity"] <= 10) for p in probes) and len(probes) <= 6
    assert (last["capacity"], last["purpose"], last["protocol"], len(last["runs"])) == (10, "confirm", "full", 3)
    assert len(found["results"]) == len(probes) + 3
    none = wpk("bench", "density", "small", "--search", "11:32", *SHORT)
    assert none.code == 1 and "no capacity of 11..32 holds" in none.out


def test_a_capacity_that_cannot_be_loaded_does_not_hold(
    wpk: Wpk, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: str, *, capacity: int, **options: object) -> object:
        if capacity > 5:
            raise CapacityError("too little memory", capacity=capacity)
        return bench.load(model, capacity=capacity, **options)

    monkeypatch.setattr(density, "load", load)
    found = wpk("bench", "density", "small", "--search", "1:8", *SHORT, "--json").json
    assert found["search"]["found"] == 5
    tried = [(p["capacity"], p["held"], "error" in p) for p in found["points"]]
    assert tried == [(4, True, False), (6, False, True), (5, True, False), (5, True, False)]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--cap", 2, "--search", "1:4"),
        ("--cap", "2,x"),
        ("--search", "4:1"),
        ("--cap", 2, "--runs", 0),
        ("--cap", 2, "--score", 0),
        ("--cap", 2, "--lead", -1),
        ("--cap", 2, "--input", "silence"),
        ("--cap", 2, "--out", "one.json"),
        ("--cap", "1,2", "--trace", "t.json"),
        ("--search", "1:4", "--trace", "t.json"),
        ("--cap", 2, "--at", 100_000),
    ],
)
def test_wrong_use(wpk: Wpk, bench: Bench, words: tuple[object, ...], tmp_path: Path) -> None:
    said = wpk("bench", "density", "small", *words, "--json")
    assert said.code == 2 and said.error["message"]
    assert not (tmp_path / "bench").exists()


def test_a_report_of_what_was_measured(wpk: Wpk, bench: Bench, tmp_path: Path) -> None:
    wpk("bench", "density", "small", "--cap", "4,12", *SHORT)
    bench.fail_at = 3
    wpk("bench", "density", "small", "--cap", "5", *SHORT)
    found = wpk("bench", "report", "--no-figures", "--json").json
    assert found["attempts"] == 7 and len(found["failed"]) == 1 and found["figures"] == []
    assert [p["verdict"] for p in found["points"]] == ["holds", "holds", "failed"]
    text = (tmp_path / found["report"]).read_text()
    assert "failed: KernelError: it stalled" in text and text.count("on schedule, shortened") == 6
    assert "7 attempts, 1 of them failed" in wpk("bench", "report", "bench/results", "--no-figures").out


def test_a_report_with_figures(wpk: Wpk, bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wpk("bench", "density", "small", "--cap", "4,12", *SHORT)
    said = wpk("bench", "report", "bench/results", "--out", "told", "--format", "svg", "-q")
    assert said.out.split() == ["told/report.md", "told/density-small-cpu.svg"]
    assert files(tmp_path / "told") == ["density-small-cpu.svg", "report.md"]
    assert "(density-small-cpu.svg)" in (tmp_path / "told" / "report.md").read_text()


def test_a_report_is_asked_for_wrongly(wpk: Wpk) -> None:
    for words in ((), ("nowhere",), ("--format", "gif")):
        said = wpk("bench", "report", "--no-figures", *words, "--json")
        assert said.code == 2 and said.error["message"]
