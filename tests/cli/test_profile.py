"""`wpk profile` and `wpk floor`: built once, found by prefix, verified, explained, removed; refused by name."""

from __future__ import annotations

import errno
import importlib
import json
from pathlib import Path

import pytest

from tests.cli.harness import Wav, Wpk, files
from wpk.registry import storage

ID = "tiny-cap2-ctx1-cpu-"


@pytest.fixture
def built(wpk: Wpk, tiny: str) -> str:
    """The id of a profile that has just been built."""
    said = wpk("profile", "build", tiny, "--cap", 2, "-q")
    assert said.code == 0, said.err
    return said.out.strip()


def test_build_says_what_it_made_and_finds_it_the_second_time(wpk: Wpk, tiny: str) -> None:
    first = wpk("profile", "build", tiny, "--cap", 2, "--json").json
    assert first["id"].startswith(ID)
    assert (first["model"], first["capacity"], first["context"], first["target"]) == (tiny, 2, 1, "cpu")
    assert first["cached"] is False
    assert first["build_s"] > 0
    assert first["phases"] >= first["waves"] >= 1
    assert len(first["program_sha256"]) == 64
    assert set(first["arenas"]) == {"weights", "state", "activations", "io"}
    assert first["floor_ms"] > 0
    assert first["predicted_ms"] > 0
    assert Path(first["path"]).is_dir()
    second = wpk("profile", "build", tiny, "--cap", 2, "--json").json
    assert second["cached"] is True
    again = wpk("profile", "build", tiny, "--cap", 2, "--force", "--json").json
    assert again["cached"] is False
    assert first["program_sha256"] == second["program_sha256"] == again["program_sha256"]


def test_list_and_show(wpk: Wpk, built: str) -> None:
    (row,) = wpk("profile", "list", "--json").json["profiles"]
    assert row["id"] == built
    assert row["broken"] is None
    assert wpk("profile", "list", "-q").out == f"{built}\n"
    found = wpk("profile", "show", "tiny-cap2", "--json").json
    assert found["id"] == built
    assert found["operators"][0]["digest"]
    assert "1 in 1 waves" in wpk("profile", "show", built).out


def test_an_empty_store_says_how_to_fill_it(wpk: Wpk) -> None:
    assert wpk("profile", "list", "--json").json == {"profiles": []}
    assert "wpk profile build" in wpk("profile", "list").out


def test_a_prefix_must_name_one_profile(wpk: Wpk, built: str) -> None:
    assert wpk("profile", "build", "tiny", "--cap", 3).code == 0
    said = wpk("profile", "show", "tiny-cap", "--json")
    assert said.code == 1
    assert built in said.error["found"]
    assert wpk("profile", "show", "nothing", "--json").error["type"] == "ProfileError"


def test_verify_passes_and_finds_a_flipped_byte(wpk: Wpk, built: str, store: Path) -> None:
    said = wpk("profile", "verify", built, "--json")
    assert said.code == 0
    assert said.json["ok"] is True
    assert {"name", "ok", "detail"} == set(said.json["checks"][0])
    program = store / "cache" / "profiles" / built / "program.bin"
    data = bytearray(program.read_bytes())
    data[len(data) // 2] ^= 1
    program.write_bytes(data)
    said = wpk("profile", "verify", built, "--json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert any(not check["ok"] for check in said.json["checks"])
    assert wpk("profile", "verify", built, "-q").out == ""


def test_a_flipped_byte_is_refused_by_run(wpk: Wpk, built: str, store: Path, wav: Wav) -> None:
    program = store / "cache" / "profiles" / built / "program.bin"
    program.write_bytes(program.read_bytes()[:-1] + b"?")
    said = wpk("run", "tiny", "--wav", wav("a.wav"), "--cap", 2, "--json")
    assert said.code == 1
    assert said.error["type"] == "ProfileError"
    assert "program.bin" in said.error["message"]
    assert "--force" in said.error["hint"]


def test_explain_decodes_every_phase(wpk: Wpk, built: str) -> None:
    found = wpk("profile", "explain", built, "--json").json
    assert found["phases"]
    for index, phase in enumerate(found["phases"]):
        assert phase["index"] == index
        assert {"index", "wave", "op", "version", "shape", "bytes", "flops", "blocks"} <= set(phase)
    product = next(phase for phase in found["phases"] if phase["op"] == "matmul")
    assert product["shape"] == [1, 1]
    assert product["flops"] >= 2 * 2 * 160
    assert product["bytes"] >= 160 * 4 * 3
    text = wpk("profile", "explain", built).out
    assert "matmul@1" in text
    assert "weights" in text


def test_explain_one_phase_shows_its_operands(wpk: Wpk, built: str) -> None:
    (phase,) = wpk("profile", "explain", built, "--phase", 0, "--json").json["phases"]
    assert {"value", "arena", "offset", "stride", "live"} <= set(phase["operands"][0])
    assert "operands" in wpk("profile", "explain", built, "--phase", 0).out
    said = wpk("profile", "explain", built, "--phase", 99, "--json")
    assert said.code == 2
    assert said.error["type"] == "UsageError"


def test_explain_leaves_out_flops_where_the_model_is_gone(wpk: Wpk, built: str) -> None:
    assert wpk("zoo", "rm", "tiny").code == 0
    phases = wpk("profile", "explain", built, "--json").json["phases"]
    assert [phase["flops"] for phase in phases] == [None] * len(phases)
    assert all(phase["shape"] for phase in phases)


def test_rm_and_prune(wpk: Wpk, built: str, store: Path) -> None:
    (store / "cache" / "profiles" / built / "manifest.json").write_text("{")
    assert wpk("profile", "build", "tiny", "--cap", 3).code == 0
    rows = {row["id"]: row["broken"] for row in wpk("profile", "list", "--json").json["profiles"]}
    assert rows[built]
    assert wpk("profile", "show", built, "--json").json["broken"]
    assert "manifest" in wpk("profile", "show", built).out
    assert wpk("profile", "prune", "--json").json["removed"] == [built]
    (left,) = wpk("profile", "list", "-q").out.split()
    assert wpk("profile", "rm", left, "--json").json["removed"] == [left]
    assert wpk("profile", "list", "-q").out == ""
    assert wpk("profile", "rm", left).code == 1


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_that_can_never_be_had_is_wrong_use(wpk: Wpk, tiny: str, store: Path, capacity: int) -> None:
    said = wpk("profile", "build", tiny, "--cap", capacity, "--json")
    assert said.code == 2
    assert said.error["type"] == "CapacityError"
    assert said.error["found"] == str(capacity)
    assert not (store / "cache" / "profiles").exists()
    assert wpk("floor", tiny, "--cap", capacity, "--json").error["type"] == "CapacityError"


def test_a_capacity_beyond_memory_says_how_many_fit(
    wpk: Wpk, tiny: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("wpk.registry.build"), "host_memory", lambda: 1 << 20)
    said = wpk("profile", "build", tiny, "--cap", 60000, "--json")
    assert said.code == 1
    assert said.error["type"] == "CapacityError"
    assert "at most" in said.error["wanted"]
    assert "profiles" not in " ".join(files(store))
    assert wpk("profile", "build", tiny, "--cap", 10**9, "--json").code == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_is_full_or_read_only_is_named_and_nothing_is_left(
    wpk: Wpk, tiny: str, store: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def broken(path: Path) -> None:
        raise OSError(number, "no", str(path))

    monkeypatch.setattr(storage, "_sync", broken)
    said = wpk("profile", "build", tiny, "--cap", 2, "--json")
    assert said.code == 1
    assert said.error["type"] == "StoreError"
    assert "WPK_HOME" in said.error["hint"]
    assert not any("profiles" in name for name in files(store))


def test_a_cache_that_is_no_folder_is_named(wpk: Wpk, tiny: str, store: Path) -> None:
    (store / "cache" / "profiles").write_text("in the way")
    said = wpk("profile", "build", tiny, "--cap", 2, "--json")
    assert said.code == 1
    assert said.error["type"] == "StoreError"


def test_unknown_targets_and_contexts(wpk: Wpk, tiny: str) -> None:
    said = wpk("profile", "build", tiny, "--cap", 2, "--target", "abacus", "--json")
    assert said.code == 1
    assert said.error["type"] == "TargetError"
    assert "cpu" in said.error["wanted"]
    assert wpk("profile", "build", tiny, "--cap", 2, "--context", 0, "--json").error["type"] == "CapacityError"


def test_a_gpu_profile_can_be_built_here_but_not_run(wpk: Wpk, tiny: str, wav: Wav) -> None:
    found = wpk("profile", "build", tiny, "--cap", 2, "--target", "h200", "--json").json
    assert found["target"] == "h200"
    said = wpk("run", tiny, "--wav", wav("a.wav"), "--target", "h200", "--json")
    assert said.code == 1
    assert said.error["type"] == "TargetError"


# --- floor


def test_floor_has_the_fields_of_the_contract(wpk: Wpk, tiny: str) -> None:
    found = wpk("floor", tiny, "--cap", 64, "--json").json
    assert found["floor_ms"] == max(found["compute_ms"], found["bandwidth_ms"], found["path_ms"]) > 0
    assert set(found["bytes"]) == {"weights", "state", "total"}
    assert set(found["flops"]) == {"bf16", "tf32", "fp32"}
    assert found["flops"]["fp32"] >= 64 * 320
    assert found["gpu"] == "h200"
    assert "floor" in wpk("floor", tiny, "--cap", 64).out


def test_floor_of_another_machine(wpk: Wpk, tiny: str) -> None:
    here = wpk("floor", tiny, "--cap", 64, "--gpu", "cpu", "--json").json
    assert here["compute_ms"] > wpk("floor", tiny, "--cap", 64, "--gpu", "h100-sxm", "--json").json["compute_ms"]
    assert wpk("floor", tiny, "--cap", 64, "--gpu", "x", "--json").error["type"] == "TargetError"


def test_json_round_trips_through_a_parser(wpk: Wpk, built: str) -> None:
    for command in (("list",), ("show", built), ("verify", built), ("explain", built)):
        said = wpk("profile", *command, "--json")
        assert json.loads(said.out) == said.json
