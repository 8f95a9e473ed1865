"""`wpk bench density`: runs of a full cohort on the model's clock, each an attempt with a record of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bench.paced import Bench
from tests.bench.paced import bench as bench
from wpk.bench import density
from wpk.bench.density import bench_density
from wpk.bench.feed import MOST_FRAMES, frames
from wpk.bench.protocol import Protocol
from wpk.ir.errors import KernelError, TargetError, UsageError
from wpk.zoo.ports import Clock, InputPort

SHORT = Protocol(0.1, 0.5, 0.05, 3)  # 10, 50 and 5 beats
CLAIMS = {"held", "late", "on_time", "late_beats", "beat_ms", "kernel_ms", "headroom", "above_floor"}


def kept(folder: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(path.read_text()) for path in folder.iterdir()), key=lambda r: r["point"]["run"])


def test_a_whole_point_is_three_runs_of_the_whole_protocol(bench: Bench, tmp_path: Path) -> None:
    point = bench_density("small", capacity=3, command="wpk bench density", out=tmp_path / "out")
    records = kept(tmp_path / "out")
    assert [Path(path).parent for path in point["results"]] == [tmp_path / "out"] * 3
    assert [r["point"]["run"] for r in records] == [1, 2, 3] and len({r["point"]["id"] for r in records}) == 1
    assert point["held"] and point["protocol"] == "full" and (point["beats"], point["late"]) == (24_000, 0)
    assert point["session_beats"] == 3 * 24_000
    for record in records:
        assert record["protocol"] == "full" and record["held"] and record["tail_samples"] == 8000
        assert record["parts"] == {"lead": 4000, "score": 8000, "tail": 800} and record["beats_made"] == 12_800
        assert record["kernel_ms"]["p50"] == pytest.approx(4) and record["beat_ms"]["p99.9"] == pytest.approx(5)
        assert record["headroom"] == pytest.approx(0.5) and record["start_late_ms"]["max"] == 0
        assert record["above_floor"] == pytest.approx(8) and record["gap_ms"] == pytest.approx(3.5)
        assert record["duration_s"] == pytest.approx(127.995)
        assert len(record["timeline"]["delivered"]) == 12_800 and record["timeline"]["scheduled"][-1] == 127_990_000
        assert {"commit", "machine", "profile", "program_sha256", "started", "command"} <= set(record)
    ((cohort, _),) = bench.loaded  # loaded once, joined anew
    assert cohort.seeds == [0, 1, 2] * 3


def test_a_shortened_protocol_is_marked(bench: Bench, tmp_path: Path) -> None:
    point = bench_density("small", capacity=1, protocol=Protocol(0.1, 0.5, 0.05, 1), out=tmp_path / "out")
    (record,) = kept(tmp_path / "out")
    assert record["protocol"] == point["protocol"] == "shortened"
    assert record["shortened"] == point["shortened"] and len(point["shortened"]) == 5
    assert record["floor_measured"]["history"] == 10 + 25 + 1  # of the beat in the middle of the scored ones
    assert "timeline" not in point["runs"][0]


def test_one_late_beat_in_one_run_and_the_point_does_not_hold(bench: Bench, tmp_path: Path) -> None:
    slow = 65 + 12  # of all beats: the second run's twelfth, the second that is scored
    bench.work = lambda _, beat: (4.0, 9.0) if beat == slow else (4.0, 1.0)
    point = bench_density("small", capacity=2, protocol=SHORT, out=tmp_path / "out")
    assert not point["held"] and point["late"] == 1 and len(point["results"]) == 3
    assert [run["late"] for run in point["runs"]] == [0, 1, 0]
    late = point["runs"][1]
    assert late["late_beats"] == [12] and late["late_by"] == {"kernel": 0, "host": 1}
    assert late["beat_ms"]["max_beat"] == 12 and late["beat_ms"]["max"] == pytest.approx(13)


def test_a_late_beat_that_leads_in_is_told_and_does_not_count(bench: Bench, tmp_path: Path) -> None:
    bench.work = lambda _, beat: (14.0, 0.0) if beat == 3 else (4.0, 1.0)
    point = bench_density("small", capacity=2, protocol=SHORT, out=tmp_path / "out")
    assert point["held"] and point["runs"][0]["late_outside"] == {"lead": 1, "tail": 0}


def test_a_crash_in_mid_run_is_kept_with_its_error_and_claims_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.fail_at = 65 + 30
    paths: list[Path] = []
    with pytest.raises(KernelError, match="stalled"):
        bench_density("small", capacity=2, protocol=SHORT, out=tmp_path / "out", kept=paths.append)
    done, failed = kept(tmp_path / "out")
    assert done["held"] and "error" not in done
    assert failed["error"]["type"] == "KernelError" and failed["point"]["run"] == 2
    assert failed["beats_made"] == 30 == len(failed["timeline"]["delivered"])
    assert not CLAIMS & set(failed)
    assert failed["profile"] == done["profile"] and failed["point"]["id"] == done["point"]["id"]
    assert len(paths) == 2


def test_a_point_that_cannot_be_loaded_is_an_attempt(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, notice: Any, **__: object) -> None:
        notice("somebody else is there")
        raise TargetError("not alone")

    monkeypatch.setattr(density, "load", refused)
    with pytest.raises(TargetError):
        bench_density("small", capacity=2, out=tmp_path / "out", notice=lambda _: None)
    (record,) = kept(tmp_path / "out")
    assert record["error"]["type"] == "TargetError" and record["notices"] == ["somebody else is there"]
    assert not CLAIMS & set(record)


def test_a_start_in_mid_history_is_marked(bench: Bench, tmp_path: Path) -> None:
    bench_density("small", capacity=1, protocol=SHORT, context=100, at=7, out=tmp_path / "out")
    assert [r["history"] for r in kept(tmp_path / "out")] == [{"position": 7, "computed": False}] * 3
    ((_, options),) = bench.loaded
    assert options["prepare"].keywords == {"position": 7}
    assert kept(tmp_path / "out")[0]["floor_measured"]["history"] == 7 + 36


def test_traced_beats_come_before_the_runs_in_a_cohort_of_their_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, traced = bench.load, []

    def traceable(*words: Any, **options: Any) -> Any:
        cohort: Any = load(*words, **options)
        if options.get("trace"):
            cohort.program, cohort.trace = None, lambda: len(traced)
            cohort.leave_all = cohort.sessions.clear
            traced.append(cohort)
        return cohort

    monkeypatch.setattr(density, "load", traceable)
    monkeypatch.setattr(density, "times_by_class", lambda program, moments: {"linear": 1.0})
    monkeypatch.setattr(density, "trace_events", lambda *_: [])
    monkeypatch.setattr(density, "write_trace", lambda path, events: (traced[0].leave_all(), path.write_text("{}")))
    bench_density("small", capacity=2, protocol=SHORT, trace=tmp_path / "t.json", out=tmp_path / "out")
    assert [options.get("trace", False) for _, options in bench.loaded] == [True, False]
    assert (tmp_path / "t.json").exists()
    for record in kept(tmp_path / "out"):
        assert record["trace"] == {"file": str(tmp_path / "t.json"), "beats": density.TRACED}
        assert {row["seen"] for row in record["by_class"]} == {density.TRACED}


@pytest.mark.parametrize(
    "wrong", [{"at": -1}, {"at": 10**6}, {"threads": 0}, {"feed": "silence"}, {"out": Path("one.json")}]
)
def test_wrong_use_is_no_attempt(bench: Bench, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bench_density("small", capacity=2, **wrong)
    assert list(tmp_path.iterdir()) == [] and bench.loaded == []


def test_the_last_moments_before_a_beat_are_not_slept_through() -> None:
    asked: list[float] = []
    density_sleep = density.sleep_until_due
    density_sleep(0.02, asked.append)
    density_sleep(density.SPIN_S / 2, asked.append)
    assert asked == [pytest.approx(0.02 - density.SPIN_S)]


# --- what sessions are fed
INPUTS = {
    "audio": {"type": "f32[80]", "kind": "audio", "sample_rate": 8000},
    "word": {"type": "i32[3]", "kind": "tokens"},
    "seed": {"type": "i32[2]", "kind": "seed"},
}


def test_speech_has_pauses_and_goes_on_from_frame_to_frame() -> None:
    ports = SimpleNamespace(inputs={name: InputPort.model_validate(port) for name, port in INPUTS.items()})
    clock = Clock(sample_rate=8000, samples_per_step=80, steps_per_beat=2)
    spec: Any = SimpleNamespace(clock=clock, ports=ports)
    sessions: list[Any] = ["a", "b"]
    made = frames(spec, sessions, "speech")
    assert len(made) == 200 <= MOST_FRAMES and list(made[0]) == sessions
    assert list(made[0]["a"]) == ["audio", "word"]  # a seed is not given with a step
    assert made[0]["a"]["audio"].shape == (160,) and made[0]["a"]["audio"].dtype == np.float32
    assert made[0]["a"]["word"].size == 6 and made[0]["a"]["word"].dtype == np.int32
    whole = np.concatenate([frame["b"]["audio"] for frame in made])
    silent = np.mean(whole == 0)
    assert 0.2 < silent < 0.3  # half a second of two
    assert np.flatnonzero(np.diff((whole == 0).astype(int))).size <= 6  # in a few pieces, not scattered
    assert not np.array_equal(made[0]["a"]["audio"], made[0]["b"]["audio"])
    assert len(frames(spec, sessions)) == 16
