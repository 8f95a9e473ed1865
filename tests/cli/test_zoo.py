"""`wpk zoo`: specs in and out, weights pulled and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.harness import SPEC, Wpk, files


def row(wpk: Wpk, name: str) -> Any:
    return next(r for r in wpk("zoo", "list", "--json").json["models"] if r["name"] == name)


def test_list_names_every_model_with_the_fields_of_the_contract(wpk: Wpk, tiny: str) -> None:
    found = row(wpk, tiny)
    assert found["version"] == 3
    assert found["task"] == "vad"
    assert found["licence"] == "MIT, weights CC0-1.0"
    assert found["step_ms"] == 10
    assert found["parameters"] == 161
    assert found["weights"] == {"source": "synthetic:7", "present": True}
    names = wpk("zoo", "list", "-q").out.split()
    assert names[-1] == tiny
    assert len(names) == len(set(names)) >= 5
    assert "tiny" in wpk("zoo", "list").out


def test_show_resolves_the_spec(wpk: Wpk, tiny: str) -> None:
    found = wpk("zoo", "show", tiny, "--json").json
    assert found["spec"]["name"] == tiny
    assert [t["shape"] for t in found["tensors"]] == [[1, 160], [1]]
    assert found["parameters"] == 161
    assert found["state_bytes_per_session"] == {"fixed": 0, "per_step": 0}
    assert found["ports"]["outputs"]["speech"]["type"] == "f32[1]"
    (linear,) = [o for o in found["operators"] if o["name"] == "linear"]
    assert linear["version"] == 1
    assert len(linear["digest"]) == 64
    text = wpk("zoo", "show", tiny).out
    assert "f32[1,160]" in text
    assert "10 ms a step" in text


@pytest.mark.parametrize("command", [("zoo", "show"), ("zoo", "pull"), ("zoo", "check"), ("zoo", "rm")])
def test_an_unknown_model_is_answered_with_close_names(wpk: Wpk, tiny: str, command: tuple[str, ...]) -> None:
    said = wpk(*command, "tinny", "--json")
    assert said.code == 1
    assert said.error["type"] == "UnknownModelError"
    if command != ("zoo", "rm"):
        assert "'tiny'" in said.error["hint"]


def test_add_takes_a_name_and_says_where_it_is(wpk: Wpk, store: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SPEC)
    found = wpk("zoo", "add", "s.yaml", "--name", "other", "--json").json
    assert (found["name"], found["version"], found["warnings"]) == ("other", 3, [])
    assert Path(found["path"]).is_dir()
    assert row(wpk, "other")["parameters"] == 161


def test_what_is_wrong_with_a_spec_is_told_at_once_and_nothing_is_kept(wpk: Wpk, store: Path, tmp_path: Path) -> None:
    before = files(store)
    (tmp_path / "s.yaml").write_text(SPEC.replace("units: 1", "unit: 1").replace("version: 3", "version: x"))
    said = wpk("zoo", "add", "s.yaml", "--json")
    assert said.code == 1
    assert said.error["type"] == "SpecError"
    assert "version" in said.error["message"]
    assert "unit" in said.error["message"]
    assert files(store) == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("units: 1,", "units: 2,"), "SpecError"),
        (("clock:", 'operators: {linear: ">=99"}\nclock:'), "OperatorError"),
        (("name: head, ", "name: head, input: [head], "), "SpecError"),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused(
    wpk: Wpk, store: Path, tmp_path: Path, change: tuple[str, str], error: str
) -> None:
    (tmp_path / "s.yaml").write_text(SPEC.replace(*change))
    said = wpk("zoo", "add", "s.yaml", "--json")
    assert said.code == 1
    assert said.error["type"] == error
    assert files(store) == []


def test_other_sources_are_refused_by_what_is_supported(wpk: Wpk) -> None:
    said = wpk("zoo", "add", "hf:org/name@main", "--json")
    assert said.code == 2
    assert said.error["type"] == "UsageError"
    assert "folder" in said.error["wanted"]


def test_python_needs_trust(wpk: Wpk, store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "spec.yaml").write_text(SPEC.replace("kind: dense, name: head", "kind: mine, name: head"))
    (folder / "components.py").write_text(
        "from wpk.zoo.component import component\nfrom wpk.zoo.components.dense import Dense\n"
        f"open({str(tmp_path / 'ran')!r}, 'w')\n\n\n@component('mine')\nclass Mine(Dense):\n    pass\n"
    )
    said = wpk("zoo", "add", folder, "--json")
    assert said.code == 1
    assert said.error["type"] == "UntrustedSourceError"
    assert not (tmp_path / "ran").exists()
    assert files(store) == []
    assert wpk("zoo", "add", folder, "--trust", "--json").json["name"] == "tiny"


def test_warnings_are_in_json_and_on_stderr(wpk: Wpk, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SPEC.replace("{synthetic: 7}", "{path: w.safetensors}"))
    said = wpk("zoo", "add", "s.yaml", "--json")
    (warning,) = said.json["warnings"]
    assert "w.safetensors" in warning
    assert said.err == f"note: {warning}\n"


def test_a_broken_addition_is_shown_as_broken_and_hides_nothing(wpk: Wpk, store: Path, tiny: str) -> None:
    (store / "zoo" / tiny / "spec.yaml").write_text("name: [\n")
    found = row(wpk, tiny)
    assert "no YAML" in found["broken"]
    assert found["version"] is None
    assert "no YAML" in wpk("zoo", "list").out
    assert len(wpk("zoo", "list", "-q").out.split()) >= 5
    assert wpk("zoo", "show", tiny).code == 1
    assert wpk("zoo", "rm", tiny).code == 0


def test_rm_forgets_what_was_added_and_nothing_else(wpk: Wpk, tiny: str) -> None:
    builtin = wpk("zoo", "list", "-q").out.split()[0]
    said = wpk("zoo", "rm", builtin, "--json")
    assert said.code == 1
    assert "Built-in" in said.error["hint"]
    assert wpk("zoo", "rm", tiny, "--json").json["removed"] == tiny
    assert tiny not in wpk("zoo", "list", "-q").out.split()


# --- weights


def test_pull_without_a_network_says_so_and_leaves_nothing(
    wpk: Wpk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WPK_OFFLINE", "1")
    builtin = wpk("zoo", "list", "-q").out.split()[0]
    said = wpk("zoo", "pull", builtin, "--json")
    assert said.code == 1
    assert said.error["type"] == "OfflineError"
    assert "WPK_OFFLINE" in said.error["hint"]
    assert files(store) == []


def test_pull_lists_files_with_size_and_hash(wpk: Wpk, tmp_path: Path) -> None:
    with_weights(wpk, tmp_path, {"head.weight": (1, 160), "head.bias": (1,)})
    (file,) = wpk("zoo", "pull", "tiny", "--json").json["files"]
    assert file["name"] == "w.safetensors"
    assert file["bytes"] == (tmp_path / "w.safetensors").stat().st_size
    assert len(file["sha256"]) == 64


def with_weights(wpk: Wpk, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "w.safetensors")
    (folder / "s.yaml").write_text(SPEC.replace("{synthetic: 7}", "{path: w.safetensors}"))
    assert wpk("zoo", "add", folder / "s.yaml").code == 0


def test_check_passes_where_the_tensors_fit(wpk: Wpk, tmp_path: Path) -> None:
    with_weights(wpk, tmp_path, {"head.weight": (1, 160), "head.bias": (1,)})
    found = wpk("zoo", "check", "tiny", "--json").json
    assert found["ok"] is True
    assert (found["expected"], found["found"], found["values"]) == (2, 2, 161)
    assert wpk("zoo", "check", "tiny", "-q").out == "tiny\n"


def test_check_lists_everything_that_differs_and_fails(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    shapes = {"head.weight": (2, 160), "other.weight": (4, 4)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "x.safetensors")
    said = wpk("zoo", "check", tiny, "--weights", "x.safetensors", "--json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert said.json["missing"] == ["head.bias"]
    assert said.json["extra"] == ["other.weight"]
    assert said.json["misshapen"] == [{"name": "head.weight", "wanted": [1, 160], "found": [2, 160]}]
    text = wpk("zoo", "check", tiny, "--weights", "x.safetensors").out
    assert "misshapen head.weight: wanted [1, 160], found [2, 160]" in text


def test_check_of_absent_weights_names_them(wpk: Wpk, tiny: str) -> None:
    said = wpk("zoo", "check", tiny, "--weights", "nowhere.safetensors", "--json")
    assert said.code == 1
    assert said.error["type"] == "WeightsError"
    assert "nowhere" in said.error["message"] + str(said.error["found"]) + str(said.error["wanted"])


# --- made-up weights


def test_synthesize_writes_a_checkpoint_that_check_accepts(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    made = wpk("zoo", "synthesize", tiny, "--out", "made.safetensors", "--json").json
    assert made == {
        "name": tiny, "seed": 7, "file": "made.safetensors", "tensors": 2, "values": 161,
        "bytes": (tmp_path / "made.safetensors").stat().st_size,
    }  # fmt: skip
    checked = wpk("zoo", "check", tiny, "--weights", "made.safetensors", "--json")
    assert checked.code == 0 and checked.json["ok"] is True
    assert wpk("zoo", "synthesize", tiny, "--out", "b.safetensors", "--seed", 8, "-q").out == "b.safetensors\n"
    assert (tmp_path / "b.safetensors").read_bytes() != (tmp_path / "made.safetensors").read_bytes()
    assert "2 tensors, 161 values" in wpk("zoo", "synthesize", tiny, "--out", "c.safetensors").out


def test_synthesize_replaces_a_file_only_by_force(wpk: Wpk, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"mine")
    said = wpk("zoo", "synthesize", tiny, "--out", "w.safetensors", "--json")
    assert (said.code, said.error["type"]) == (1, "StoreError")
    assert "--force" in said.error["hint"]
    assert (tmp_path / "w.safetensors").read_bytes() == b"mine"
    assert wpk("zoo", "synthesize", tiny, "--out", "w.safetensors", "--force").code == 0


@pytest.mark.parametrize(
    ("words", "code", "type"),
    [
        (("tinny", "--out", "w.safetensors"), 1, "UnknownModelError"),
        (("tiny", "--out", "w.pt"), 2, "UsageError"),
        (("tiny", "--out", "w.safetensors", "--seed", "-1"), 2, "UsageError"),
        (("tiny",), 2, "UsageError"),
    ],
)
def test_synthesize_refuses_by_type(wpk: Wpk, tiny: str, words: tuple[str, ...], code: int, type: str) -> None:
    said = wpk("zoo", "synthesize", *words, "--json")
    assert (said.code, said.error["type"]) == (code, type)
