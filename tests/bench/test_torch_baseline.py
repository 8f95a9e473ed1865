"""`wpk bench baseline`: a step of the same shapes in PyTorch, measured in forms, failures kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from wpk.bench import torch_baseline
from wpk.bench.floor import beat_floor
from wpk.bench.torch_baseline import bench_baseline, measure
from wpk.ir.errors import KernelError, UnknownModelError, UsageError
from wpk.registry import find_model
from wpk.zoo.build import expected_tensors, parameter_count

HYBRID, OTHER = "nemotron-h-tiny", "silero-vad"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_baseline, "_in_own_process", measure)


def test_the_step_has_the_models_shapes() -> None:
    pytest.importorskip("torch")
    from wpk.zoo.baselines.torch_step import torch_step

    spec = find_model(HYBRID)
    step = torch_step(spec, sessions=3, history=50, device="cpu")
    table = expected_tensors(spec)["backbone.embeddings.weight"].size
    assert step.parameters == parameter_count(spec) - table
    bytes_of = beat_floor(HYBRID, capacity=3, context=50, target="cpu").bytes
    assert step.weight_bytes == pytest.approx(bytes_of["weights"], rel=0.02)  # norms are bf16 here, f32 there
    assert step.state_bytes == pytest.approx(bytes_of["state"], rel=0.02)
    (tokens,) = step.run()
    assert tokens.shape == (3,)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 512


def test_a_steps_state_moves_on_in_place() -> None:
    torch = pytest.importorskip("torch")
    from wpk.zoo.baselines.torch_step import Hybrid, torch_step

    step = torch_step(find_model(HYBRID), sessions=2, history=5, device="cpu")
    assert isinstance(step.run, Hybrid)
    with torch.no_grad():
        state = step.run.blocks[0][2]
        places = {name: tensor.data_ptr() for name, tensor in state.items()}
        step.run()
        first = {name: tensor.clone() for name, tensor in state.items()}
        step.run()
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == places
    assert (first["window"][:, :, 1:] == state["window"][:, :, :-1]).all()
    assert (first["ssm"] != 0).any()
    assert (first["ssm"] != state["ssm"]).any()


@pytest.mark.usefixtures("in_this_process")
def test_a_record_has_figures_of_every_form() -> None:
    beside: Any = {"steps_per_beat": 1, "beat_ms": {"p50": 1.0}, "kernel_ms": {"p50": 0.5}}
    record, path = bench_baseline(
        HYBRID, capacity=2, context=20, beats=4, warm_up=1, command="wpk", beside=(beside, Path("ours.json"))
    )
    assert path.parent == Path("bench", "results")
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert (record["capacity"], record["context"], record["history"]["position"]) == (2, 20, 19)
    assert record["device"]["kind"] == "cpu"
    assert list(record["forms"]) == [record["best"]] == ["eager"]
    times = record["forms"]["eager"]["kernel_ms"]
    assert 0 < times["p50"] <= times["p99.9"] <= times["max"]
    assert record["beside"]["results"] == "ours.json"
    assert record["ratio"] == 0.5 / times["p50"]
    assert record["machine"]["packages"]["torch"]


@pytest.mark.usefixtures("in_this_process")
def test_a_form_that_fails_is_kept_beside_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    record, _ = bench_baseline(HYBRID, capacity=1, context=4, beats=2, warm_up=0, forms=("compiled", "eager"))
    assert record["best"] == "eager"
    assert record["forms"]["compiled"]["error"]["message"] == "no compiler here"
    with pytest.raises(KernelError, match="no form of the baseline ran") as raised:
        bench_baseline(HYBRID, capacity=1, context=4, beats=2, warm_up=0, forms=("compiled",), out=Path("failed"))
    assert raised.value.found == "no compiler here"
    (kept,) = Path("failed").iterdir()
    assert json.loads(kept.read_text())["error"]["type"] == "KernelError"


def test_it_runs_in_a_process_of_its_own() -> None:
    pytest.importorskip("torch")
    record, _ = bench_baseline(HYBRID, capacity=1, context=4, beats=2, warm_up=0)
    assert record["forms"]["eager"]["beat_ms"]["p50"] > 0
    with pytest.raises(UsageError, match="in PyTorch is written"):
        bench_baseline(OTHER, capacity=1, beats=2)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    "wrong",
    [{"capacity": 0}, {"beats": 0}, {"warm_up": -1}, {"context": 0}, {"context": 4, "at": 4}, {"forms": ("graph",)},
     {"device": "tpu"}],
)  # fmt: skip
def test_wrong_use(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bench_baseline(HYBRID, **{"capacity": 1, "beats": 1, "warm_up": 0} | wrong)


def test_an_unknown_model_and_a_missing_package_are_no_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownModelError):
        bench_baseline("nobody", capacity=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs PyTorch") as raised:
        bench_baseline(HYBRID, capacity=1)
    assert "pip install" in str(raised.value.hint)
    assert not Path("bench").exists()
