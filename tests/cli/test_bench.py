"""`wpk bench beat` from the command line: the record on stdout, the file that keeps it, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.harness import Wpk, files
from wpk.bench import beat, torch_baseline


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beat, "REST_S", 0.0)


def test_the_record_is_the_result_and_is_kept(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    found = wpk("bench", "beat", tiny, "--cap", 2, "--seconds", "0.05", "--json").json
    path = Path(found.pop("results"))
    assert path.parent == Path("bench", "results")
    assert json.loads((tmp_path / path).read_text()) == found
    assert found["capacity"] == 2
    figures = {"p50", "p90", "p99", "p99.9", "max", "max_beat", "jitter"}
    assert set(found["beat_ms"]) == set(found["kernel_ms"]) == figures
    assert found["command"].split()[0] == "wpk"


def test_out_is_a_folder_or_a_new_file(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    words = ("bench", "beat", tiny, "--cap", 2, "--seconds", "0.05", "--out")
    assert wpk(*words, "there/r.json", "-q").out == "there/r.json\n"
    said = wpk(*words, "there/r.json", "--json")
    assert said.code == 1
    assert said.error["type"] == "StoreError"
    assert "kept in other" in wpk(*words, "other").out
    assert files(tmp_path / "there") == ["r.json"]


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (("--cap", 0), 2),
        (("--cap", 2, "--seconds", 0), 2),
        (("--cap", "2,two"), 2),
        (("--cap", "1,2", "--out", "one.json"), 2),
        (("--cap", "1,2", "--trace", "t.json"), 2),
        (("--cap", 2, "--trace", "t.json", "--target", "cpu"), 1),
        (("--cap", 2, "--threads", 0), 2),
        (("--cap", 2, "--beats", 0), 2),
        (("--cap", 2, "--warmup", -1), 2),
        (("--cap", 2, "--at", 1), 2),
        (("--cap", 2, "--at", 0), 2),
        (("--cap", 2, "--baseline", "abacus"), 2),
        (("--cap", 2, "--target", "abacus"), 1),
    ],
)
def test_wrong_use(wpk: Wpk, tiny: str, option: tuple[object, ...], code: int) -> None:
    said = wpk("bench", "beat", tiny, *option, "--json")
    assert said.code == code
    assert said.error["message"]


def test_several_capacities_are_measured_in_turn_and_each_is_kept(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    words = ("bench", "beat", tiny, "--cap", "1,3,2", "--beats", 12, "--warmup", 2)
    points = wpk(*words, "--json").json["points"]
    assert [(point["capacity"], point["beats"]) for point in points] == [(1, 12), (3, 12), (2, 12)]
    assert len({point["results"] for point in points}) == 3
    assert wpk(*words, "--out", "there", "-q").out.count("there/beat-tiny-cap") == 3
    assert "sessions" in wpk(*words, "--out", "there").out


def test_one_capacity_that_fails_does_not_keep_the_others_from_being_measured(wpk: Wpk, tiny: str) -> None:
    said = wpk("bench", "beat", tiny, "--cap", "1,99999999", "--beats", 3, "--json")
    assert said.code == 1
    done, failed = said.json["points"]
    assert done["beats"] == 3
    assert failed["error"]["type"] == "CapacityError"


def test_a_baseline_can_be_left_out_or_be_unknown(wpk: Wpk, tiny: str) -> None:
    said = wpk("bench", "beat", tiny, "--cap", 2, "--seconds", "0.05", "--baseline", "none", "--json")
    assert "baseline" not in said.json
    said = wpk("bench", "beat", tiny, "--cap", 2, "--baseline", "onnxruntime", "--json")
    assert said.code == 2
    assert "no baseline" in said.error["message"]


# --- PyTorch
TIMES = {"p50": 2.0, "p99": 3.0, "p99.9": 3.0, "max": 4.0, "max_beat": 1}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """PyTorch's figures, without PyTorch; what was asked for is noted."""
    asked: list[tuple[object, ...]] = []
    eager = {"beat_ms": TIMES, "kernel_ms": TIMES, "prepare_s": 0.1}
    other = {"error": {"type": "RuntimeError", "message": "no compiler", "wanted": None, "found": None, "hint": None}}

    def found(spec: object, *rest: object) -> dict[str, object]:
        asked.append(rest)
        return {"device": {"kind": "cpu", "threads": 1}, "beats": 5, "forms": {"eager": eager, "compiled": other}}

    monkeypatch.setattr(torch_baseline, "_in_own_process", found)
    monkeypatch.setattr(torch_baseline, "require_torch", lambda: None)
    return asked


def test_a_baseline_alone(wpk: Wpk, tiny: str, tmp_path: Path, measured: list[tuple[object, ...]]) -> None:
    words = ("bench", "baseline", tiny, "--cap", "2", "--context", 9, "--at", 3, "--beats", 5, "--warmup", 1)
    found = wpk(*words, "--forms", "eager,compiled", "--device", "cpu", "--json").json
    assert measured == [(2, 4, 5, 1, ["eager", "compiled"], "cpu")]
    assert json.loads((tmp_path / found.pop("results")).read_text()) == found
    assert found["best"] == "eager"
    told = wpk(*words).out
    assert "PyTorch eager" in told
    assert "failed: no compiler" in told


def test_a_beat_and_then_its_baseline(wpk: Wpk, tiny: str, measured: list[tuple[object, ...]]) -> None:
    found = wpk("bench", "beat", tiny, "--cap", "2", "--beats", 5, "--target", "cpu", "--with-baseline", "--json").json
    assert measured[0][:2] == (2, 1)
    assert measured[0][-1] == "cpu"
    assert found["torch"]["beside"]["results"] == found["results"] != found["torch"]["results"]
    assert found["torch"]["ratio"] == found["kernel_ms"]["p50"] / 2.0
    assert found["torch"]["command"] == found["command"]


def test_a_baseline_that_fails_leaves_the_beat(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    words = ("bench", "beat", tiny, "--cap", "2", "--beats", 5, "--target", "cpu", "--with-baseline")
    said = wpk(*words, "--out", "kept")
    assert said.code == 2
    assert "no baseline of tiny in PyTorch is written" in said.err
    assert "the beat without its baseline is kept" in said.err
    assert sorted(name.partition("-")[0] for name in files(tmp_path / "kept")) == ["baseline", "beat"]
