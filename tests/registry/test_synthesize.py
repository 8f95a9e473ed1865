"""Checkpoints of made-up weights: what is in them, that they load as their source does, in little memory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.zoo.specs import chain, small
from wpk import registry
from wpk.ir.errors import StoreError, UsageError
from wpk.ir.types import DType, boolean, f32, i32
from wpk.ops.evaluate import bf16_bits, stored
from wpk.registry.build import build
from wpk.registry.formats import open_path
from wpk.registry.loading import fill_arenas
from wpk.registry.profile import ProfileStore
from wpk.registry.settings import Settings
from wpk.registry.weights import WeightsStore, check_inventory, synthesize
from wpk.registry.weights.synthesize import synthetic_source
from wpk.registry.weights.synthetic import PIECE, SyntheticSet
from wpk.zoo.build import expected_tensors
from wpk.zoo.sources import SyntheticSource
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]


def vad(**changes: Any) -> ModelSpec:
    return ModelSpec.from_data(small(**changes))


def hybrid() -> ModelSpec:
    """Matrices of bf16 and vectors of f32, one of an odd number of values."""
    part = {
        "kind": "nemotron_h", "layers": "M*-", "vocab_size": 24, "hidden_size": 40, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 1, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    return chain([part], {"x": "i32[]"}, "i32[]", precision={"policy": "bf16"}, weights={"synthetic": 5, "gain": 0.5})


# --- what is written ----------------------------------------------------------------------------------------------
def test_every_tensor_has_the_expected_name_shape_dtype_and_values(tmp_path: Path) -> None:
    spec = hybrid()
    made = synthesize.synthesize(spec, tmp_path / "new" / "w.safetensors")
    expected, found = expected_tensors(spec), open_path(made.file)
    assert list(found.tensors) != [] and check_inventory({n: t.shape for n, t in expected.items()}, found).ok
    assert (made.tensors, made.seed) == (len(expected), 5)
    assert made.values == sum(type.size for type in expected.values())
    assert made.bytes == made.file.stat().st_size
    source = SyntheticSet({n: t.shape for n, t in expected.items()}, SyntheticSource(synthetic=5, gain=0.5))
    for name, type in expected.items():
        wanted = source.read(name)
        if type.dtype is DType.BF16:
            assert found.tensors[name].dtype == "bfloat16"
            wanted = bf16_bits(wanted)
        else:
            assert found.tensors[name].dtype == "float32"
        np.testing.assert_array_equal(found.read_raw(name), wanted)
    assert {type.dtype for type in expected.values()} == {DType.F32, DType.BF16}


@pytest.mark.oracle
def test_tensors_that_are_known_and_unused_are_written_too(tmp_path: Path) -> None:
    spec = vad(unused_tensors={"training.{0..1}.w": "f32[2,3]"})
    made = synthesize.synthesize(spec, tmp_path / "w.safetensors")
    assert set(open_path(made.file).tensors) == {*expected_tensors(spec), "training.0.w", "training.1.w"}


def test_the_reference_library_reads_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    spec = vad()
    made = synthesize.synthesize(spec, tmp_path / "w.safetensors", seed=3)
    theirs = safetensors.load_file(made.file)
    expected = expected_tensors(spec)
    assert {name: array.shape for name, array in theirs.items()} == {n: t.shape for n, t in expected.items()}
    source = SyntheticSet({n: t.shape for n, t in expected.items()}, SyntheticSource(synthetic=3))
    for name, array in theirs.items():
        np.testing.assert_array_equal(array, source.read(name))


def test_values_are_aligned_to_their_dtype_without_gaps(tmp_path: Path) -> None:
    raw = synthesize.synthesize(hybrid(), tmp_path / "w.safetensors").file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    end = 0
    for entry in entries.values():
        start, stop = entry["data_offsets"]
        assert start == end and (8 + length + start) % {"F32": 4, "BF16": 2}[entry["dtype"]] == 0
        end = stop
    assert 8 + length + end == len(raw)


def test_the_seed_decides_and_is_the_specs_own_unless_it_is_given(tmp_path: Path) -> None:
    def bytes_of(name: str, spec: ModelSpec, seed: int | None = None) -> bytes:
        return synthesize.synthesize(spec, tmp_path / f"{name}.safetensors", seed=seed).file.read_bytes()

    own = bytes_of("own", vad())
    assert own == bytes_of("seven", vad(), 7) != bytes_of("eight", vad(), 8)
    fetched = vad(weights={"path": "elsewhere.safetensors"})
    assert bytes_of("fetched", fetched) == bytes_of("zero", vad(), 0)
    assert synthetic_source(hybrid(), 9) == SyntheticSource(synthetic=9, gain=0.5)


def test_integers_and_flags_are_what_an_arena_would_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"flags": boolean(5), "ids": i32(40), "vector": f32(3)}
    monkeypatch.setattr(synthesize, "expected_tensors", lambda spec: types)
    found = open_path(synthesize.synthesize(vad(), tmp_path / "w.safetensors").file)
    source = SyntheticSet({n: t.shape for n, t in types.items()}, SyntheticSource(synthetic=7))
    for name, type in types.items():
        np.testing.assert_array_equal(stored(found.read(name), type.dtype), stored(source.read(name), type.dtype))
    assert {name: info.dtype for name, info in found.tensors.items()} == {
        "flags": "bool", "ids": "int32", "vector": "float32",
    }  # fmt: skip
    assert set(found.read("ids")) == {0, 1}


# --- loaded -------------------------------------------------------------------------------------------------------
def played(spec: ModelSpec, where: Settings, weights: Path | None = None) -> bytes:
    given = np.random.default_rng(0).standard_normal((4, 30)).astype(np.float32)
    with registry.load(spec, capacity=1, target="cpu", threads=1, weights=weights, where=where) as cohort:
        session = cohort.join()
        return b"".join(cohort.beat({session: {"x": x}})[session]["y"].tobytes() for x in given)


def test_a_model_gives_the_same_bits_from_the_file_as_from_the_source(where: Settings, tmp_path: Path) -> None:
    layers = [{"kind": "dense", "name": f"layer{i}", "units": 20, "activation": "tanh"} for i in range(2)]
    spec = chain(layers, {"x": "f32[30]"}, "f32[20]")
    file = synthesize.synthesize(spec, tmp_path / "w.safetensors").file
    assert played(spec, where, file) == played(spec, where)
    other = synthesize.synthesize(spec, tmp_path / "other.safetensors", seed=8).file
    assert played(spec, where, other) != played(spec, where)


def test_arenas_of_bf16_weights_are_the_same_bytes(where: Settings, tmp_path: Path) -> None:
    spec = hybrid()
    file = synthesize.synthesize(spec, tmp_path / "w.safetensors").file
    profile = ProfileStore(where).read(
        build(spec, capacity=1, target="cpu", machine_code=False, where=where).manifest.id
    )
    expected = {name: type.shape for name, type in expected_tensors(spec).items()}
    (ours, image), (theirs, other) = (
        fill_arenas(profile.program, profile.load, tensors)
        for tensors in (open_path(file), WeightsStore(where).open(spec.weights, expected))
    )
    np.testing.assert_array_equal(image, other)
    assert [a.tobytes() for a in ours] == [a.tobytes() for a in theirs]
    assert any(a.any() for a in ours)


def test_memory_stays_small_however_large_the_tensors(tmp_path: Path) -> None:
    spec = chain([{"kind": "dense", "units": 4096}], {"x": "f32[2048]"}, "f32[4096]")
    tracemalloc.start()
    try:
        made = synthesize.synthesize(spec, tmp_path / "w.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.bytes > 32 << 20 and made.values > 30 * PIECE
    assert peak < 12 << 20


# --- refusals -----------------------------------------------------------------------------------------------------
def test_an_existing_file_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(StoreError, match=r"exists.*a file of 4 bytes.*--force"):
        synthesize.synthesize(vad(), file)
    assert file.read_bytes() == b"mine"
    assert synthesize.synthesize(vad(), file, replace=True).bytes == file.stat().st_size
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(StoreError, match="a folder"):
        synthesize.synthesize(vad(), tmp_path / "folder.safetensors", replace=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.safetensors", "w.safetensors"]


def test_a_name_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ends in \.safetensors; found w\.bin"):
        synthesize.synthesize(vad(), tmp_path / "w.bin")


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(1 << 30, (1 << 30) - 100, 100)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"too full; wanted \d+ bytes; found 100 bytes free"):
        synthesize.synthesize(vad(), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthesize, "_stored", full)
    with pytest.raises(StoreError, match="is full"):
        synthesize.synthesize(vad(), tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []
