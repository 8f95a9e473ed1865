"""Building: what can be had is built once, what cannot is refused by name before anything is written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.specs import SMALL, small
from wpk import registry
from wpk.ir.errors import CapacityError, CompileError, ProfileError, StoreError, TargetError, UnknownModelError
from wpk.kernel.driver import Device
from wpk.kernel.packing import build_packing
from wpk.registry import ProfileStore
from wpk.registry.settings import Settings
from wpk.zoo.spec import ModelSpec

builder = sys.modules["wpk.registry.build"]  # `wpk.registry.build` is the function
SPEC = ModelSpec.from_yaml(SMALL)


def build(model: ModelSpec | str, **options: Any) -> Any:
    """A build that leaves the GPU's kernel out: it takes long, and is the same for all of these."""
    return registry.build(model, **({"machine_code": False} | options))


def entries(where: Settings) -> list[str]:
    return sorted(p.name for p in where.profiles.glob("[!.]*"))


# --- capacity and context -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("capacity", [0, -1, True, False, 1.0, 1.5, "8", None, 65537, 10**9])
@pytest.mark.parametrize("start", [registry.build, registry.load])
def test_a_capacity_that_is_none_is_refused(start: Any, capacity: Any, where: Settings) -> None:
    with pytest.raises(CapacityError, match=f"small: capacity {capacity} cannot be had") as caught:
        start(SPEC, capacity=capacity, target="cpu", where=where)
    assert caught.value.wanted == "1 to 65536" and caught.value.found in (str(capacity), None)
    assert caught.value.capacity is capacity and "--cap" in str(caught.value.hint)
    assert not where.cache.exists()


@pytest.mark.parametrize("context", [0, -1, True, 1.5, "8", 10**9])
def test_a_context_that_is_none_is_refused(context: Any, where: Settings) -> None:
    with pytest.raises(CapacityError, match=f"small: context {context} cannot be had") as caught:
        build(SPEC, capacity=2, context=context, target="cpu", where=where)
    assert caught.value.wanted and "--context" in str(caught.value.hint)
    assert entries(where) == []


def test_sessions_beyond_memory_are_refused_with_a_number_that_fits(
    where: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "host_memory", lambda: 300_000)
    with pytest.raises(CapacityError, match="small: 1000 sessions do not fit into memory") as caught:
        build(SPEC, capacity=1000, target="cpu", where=where)
    assert entries(where) == [] and caught.value.capacity == 1000 and "--cap" in str(caught.value.hint)
    fits = int(str(caught.value.wanted).removeprefix("at most ").split()[0])
    assert 1 < fits < 1000
    made = build(SPEC, capacity=fits, target="cpu", where=where).manifest
    assert sum(made.arenas.values()) <= 300_000
    with pytest.raises(CapacityError, match=f"{fits + 1} sessions") as caught:
        build(SPEC, capacity=fits + 1, target="cpu", where=where)
    assert f"at most {fits} sessions" in str(caught.value.wanted)
    assert entries(where) == [made.id]


def test_a_model_whose_weights_alone_do_not_fit_says_that_no_session_does(
    where: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "host_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="at most 0 sessions") as refused:
        build(SPEC, capacity=1, target="cpu", where=where)
    assert "a target with more memory" in str(refused.value.hint)  # fewer sessions would not help


def test_a_device_has_its_own_memory(where: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "host_memory", lambda: 1000)
    assert build(SPEC, capacity=2, target="h200", where=where).manifest.target == "h200"


def test_the_memory_of_one_session_counts_for_all(where: Settings) -> None:
    """What `_check_memory` extrapolates is what a program of that capacity takes, to the byte."""
    one, many = (build(SPEC, capacity=n, target="h200", where=where).manifest.arenas for n in (1, 57))
    assert many == {arena: size * (1 if arena == "weights" else 57) for arena, size in one.items()}


# --- machine code -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not builder.can_build(), reason="numba-cuda or ptxas is not installed")
def test_a_build_for_a_gpu_leaves_nothing_to_compile(where: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], int]] = []
    monkeypatch.setattr(builder, "build_cubin", lambda operators, cache, slots: asked.append((tuple(operators), slots)))
    made = build(SPEC, capacity=2, target="h200", machine_code=True, where=where)
    again = build(SPEC, capacity=2, target="h200", machine_code=True, where=where)  # the cache may have been emptied
    assert made.note is again.note is None and again.cached
    assert asked == [(ProfileStore(where).read(made.manifest.id).program.operators, 2)] * 2
    assert build_packing(where.kernels).cached


def test_a_build_without_compilers_says_what_is_left_to_do(where: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "can_build", lambda: False)
    made = build(SPEC, capacity=2, target="h200", machine_code=True, where=where)
    assert "numba-cuda" in str(made.note)
    assert entries(where) == [made.manifest.id]


# --- identity and cache -------------------------------------------------------------------------------------------
def test_the_second_build_finds_the_first(where: Settings) -> None:
    first = build(SPEC, capacity=3, target="h200", where=where)
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in first.path.iterdir()}
    second = build(SPEC, capacity=3, target="h200", where=where)
    assert (first.cached, second.cached) == (False, True)
    assert second.manifest == first.manifest and second.path == first.path
    assert {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in first.path.iterdir()} == before
    assert entries(where) == [first.manifest.id]


def test_force_builds_again_and_gives_the_same_program(where: Settings) -> None:
    first = build(SPEC, capacity=3, target="h200", where=where)
    before = {p.name: p.read_bytes() for p in first.path.iterdir()}
    again = build(SPEC, capacity=3, target="h200", force=True, where=where)
    assert not again.cached and again.path == first.path
    assert again.manifest.program_sha256 == first.manifest.program_sha256
    for name in ("program.bin", "load.ir"):
        assert (again.path / name).read_bytes() == before[name]
    assert entries(where) == [first.manifest.id]


def test_a_damaged_profile_is_refused_until_it_is_forced(where: Settings) -> None:
    path = build(SPEC, capacity=3, target="h200", where=where).path
    (path / "manifest.json").write_text("{}")
    with pytest.raises(ProfileError, match=path.name) as caught:
        build(SPEC, capacity=3, target="h200", where=where)
    assert "--force" in str(caught.value.hint)
    assert not build(SPEC, capacity=3, target="h200", force=True, where=where).cached
    assert all(check.ok for check in ProfileStore(where).verify(path.name))


def test_an_id_says_what_a_profile_is_of(where: Settings) -> None:
    made = build(SPEC, capacity=12, context=7, target="h100-sxm", where=where)
    assert re.fullmatch(r"small-cap12-ctx7-h100-sxm-[0-9a-f]{8}", made.manifest.id)
    m = made.manifest
    assert (m.model, m.model_version, m.capacity, m.context, m.target, m.steps_per_beat) == (
        "small", 1, 12, 7, "h100-sxm", 1,
    )  # fmt: skip
    assert m.period_ms == 10.0 and m.phases and m.waves and m.floor_ms > 0 and m.predicted_ms > 0
    assert set(m.arenas) == {"weights", "state", "activations", "io"}
    assert made.path == where.profiles / m.id


@pytest.mark.parametrize(
    "changes",
    [
        {"description": "the same with other words"},
        {"version": 2},
        {"weights": {"synthetic": 8}},
        {"clock": {"sample_rate": 8000, "samples_per_step": 80, "steps_per_beat": 2}},
        {"precision": {"policy": "tf32"}},
        {"precision": {"components": {"head": "tf32"}}},
    ],
)
def test_another_spec_is_another_profile(changes: dict[str, Any], where: Settings) -> None:
    made = [build(s, capacity=2, target="h200", where=where) for s in (SPEC, ModelSpec.from_data(small(**changes)))]
    assert not made[1].cached and len({m.manifest.id for m in made}) == len(entries(where)) == 2


def test_anything_else_that_decides_the_program_is_in_the_id(where: Settings) -> None:
    plain: dict[str, Any] = {"capacity": 2, "context": 1, "target": "h200"}
    every = [plain, *(plain | change for change in ({"capacity": 3}, {"context": 2}, {"target": "h100-sxm"}))]
    made = [build(SPEC, **options, where=where).manifest.id for options in every]
    assert len(set(made)) == 4 and len({id[-8:] for id in made}) == 4


@pytest.mark.parametrize(
    ("name", "multiprocessors", "wanted"),
    [("NVIDIA H200", 132, "h200"), ("NVIDIA H100 80GB HBM3", 132, "h100-sxm"), ("NVIDIA H200", 66, "cpu"),
     ("NVIDIA L4", 58, "cpu"), (None, 0, "cpu")],
)  # fmt: skip
def test_auto_is_the_gpu_that_a_target_describes_else_the_cpu(
    name: str | None, multiprocessors: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> Device:
        if name is None:
            raise TargetError("no GPU that this process may use", wanted="GPU 0", found="no driver")
        return Device(0, name, multiprocessors, (9, 0))

    module = sys.modules["wpk.registry.build"]
    monkeypatch.setattr(module, "find_device", found)
    monkeypatch.setattr(module, "can_build", lambda: True)
    assert module.default_target() == wanted
    monkeypatch.setattr(module, "can_build", lambda: False)
    assert module.default_target() == "cpu"


def test_context_is_the_specs_unless_it_is_given(where: Settings) -> None:
    spec = ModelSpec.from_data(small(context=40))
    assert build(spec, capacity=2, target="h200", where=where).manifest.context == 40
    assert build(spec, capacity=2, target="h200", context=9, where=where).manifest.context == 9


def test_auto_is_a_target_that_this_machine_can_run(where: Settings) -> None:
    with registry.load(SPEC, capacity=2, where=where) as cohort:
        assert cohort.profile.target in ("cpu", "h200", "h100-sxm")
    assert "auto" not in cohort.profile.id


# --- what cannot be built -----------------------------------------------------------------------------------------
def test_an_unknown_target_is_refused_with_the_known_ones(where: Settings) -> None:
    with pytest.raises(TargetError, match="no target 'tpu'; wanted cpu"):
        build(SPEC, capacity=2, target="tpu", where=where)
    assert entries(where) == []


def test_an_unknown_model_is_refused(where: Settings) -> None:
    for start in (registry.build, registry.load):
        with pytest.raises(UnknownModelError, match="sliero-vad"):
            start("sliero-vad", capacity=2, where=where)


def test_a_program_that_fails_its_checks_is_not_written(where: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise CompileError("planted", wanted="a", found="b")

    monkeypatch.setattr(builder, "compile_graph", refuse)
    with pytest.raises(CompileError, match="planted"):
        build(SPEC, capacity=2, target="h200", where=where)
    assert entries(where) == []


def test_a_file_where_the_store_should_be_is_named(where: Settings) -> None:
    where.cache.parent.mkdir(exist_ok=True)
    where.cache.write_text("in the way")
    with pytest.raises(StoreError) as caught:
        build(SPEC, capacity=2, target="h200", where=where)
    assert "WPK_HOME" in str(caught.value.hint) and where.cache.read_text() == "in the way"


def test_a_cpu_profile_brings_its_kernels(where: Settings) -> None:
    build(SPEC, capacity=2, target="cpu", where=where)
    folders = list(Path(where.kernels, "cpu").iterdir())
    assert folders and any(folder.rglob("*.nbc") for folder in folders)
