"""Formats: the same tensors out of every file, as the libraries that wrote them see them; nothing in a file runs."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wpk.ir.errors import WeightsError
from wpk.registry.formats import (
    MergedSet,
    OnnxFile,
    SafetensorsFile,
    TorchFile,
    open_file,
    open_folder,
    open_path,
)
from wpk.registry.formats.tensors import bfloat16_to_float32

RNG = np.random.default_rng(7)
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "norm.weight": RNG.standard_normal(8).astype(np.float32),
    "linear.weight": RNG.standard_normal((3, 8)).astype(np.float16),
    "codes": RNG.integers(-9, 9, (2, 3, 4)),
    "quantised": RNG.integers(0, 255, (5,), dtype=np.uint8),
    "mask": np.array([True, False]),
    "scalar": np.array(2.5, np.float64),
    "empty": np.zeros((0, 4), np.float32),
}


def same(found: Any, wanted: dict[str, np.ndarray[Any, Any]]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        read = found.read(name)
        assert found.tensors[name].shape == value.shape and found.tensors[name].dtype == value.dtype.name
        assert read.dtype == value.dtype and read.shape == value.shape
        np.testing.assert_array_equal(read, value)


# --- safetensors


def test_safetensors_reads_what_the_library_wrote(tmp_path: Path) -> None:
    numpy_format = pytest.importorskip("safetensors.numpy")
    numpy_format.save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "np"})
    same(open_file(tmp_path / "a.safetensors"), TENSORS)


def test_bfloat16_comes_as_the_exact_float32(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    save_raw(tmp_path / "a.safetensors", {"w": ("BF16", bits)})
    found = SafetensorsFile(tmp_path / "a.safetensors")
    assert found.tensors["w"].dtype == "bfloat16" and found.tensors["w"].shape == (256, 256)
    np.testing.assert_array_equal(found.read_raw("w"), bits)
    read = found.read("w")
    assert read.dtype == np.float32
    ml_dtypes = pytest.importorskip("ml_dtypes")
    np.testing.assert_array_equal(read, bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_float8_is_listed_and_given_as_bits(tmp_path: Path) -> None:
    save_raw(tmp_path / "a.safetensors", {"w": ("F8_E4M3", np.arange(4, dtype=np.uint8))})
    found = SafetensorsFile(tmp_path / "a.safetensors")
    assert found.tensors["w"].dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(found.read_raw("w"), np.arange(4))
    with pytest.raises(WeightsError, match="float8"):
        found.read("w")


def test_opening_reads_the_header_alone(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 32], "data_offsets": [0, 4 << 32]}}).encode()
    with open(tmp_path / "huge.safetensors", "wb") as stream:  # 16 GiB, all hole
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + (4 << 32))
    found = SafetensorsFile(tmp_path / "huge.safetensors")
    assert found.tensors["w"].size == 1 << 32
    assert found.read("w")[-1] == 0  # mapped, not loaded


def test_data_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    values = np.arange(5, dtype=np.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * (1 - len(header) % 4 + 4)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "a.safetensors").read("w"), values)


def save_raw(path: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
    entries, data = {}, b""
    for name, (dtype, value) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_every_truncation_of_safetensors_is_refused(tmp_path: Path) -> None:
    save_raw(tmp_path / "a.safetensors", {"w": ("F32", np.ones(3, np.float32))})
    whole = (tmp_path / "a.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.safetensors"):
            SafetensorsFile(tmp_path / "cut.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},  # too few bytes for the shape
        {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]},  # beyond the file
        {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3.0], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [12, 0]},
        {"dtype": "F31", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": 3, "data_offsets": [0, 12]},
        {"shape": [3], "data_offsets": [0, 12]},
        [],
        None,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(WeightsError, match=r"a\.safetensors") as caught:
        SafetensorsFile(tmp_path / "a.safetensors")
    assert caught.value.wanted


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["safetensors", "onnx", "pt"])
def test_damaged_bytes_give_values_or_a_weights_error(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = bytearray(_sample(kind, folder))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = folder / f"damaged.{kind}"
    path.write_bytes(whole)
    try:
        found = open_file(path)
        for name in found:
            if found.tensors[name].size < 1 << 20:
                found.read_raw(name)
    except WeightsError:
        pass


def _sample(kind: str, folder: Path) -> bytes:
    if kind == "safetensors":
        save_raw(folder / "a.safetensors", {"w": ("F32", np.ones((2, 3), np.float32)), "v": ("I64", np.arange(3))})
        return (folder / "a.safetensors").read_bytes()
    if kind == "pt":
        save_torch(folder / "a.pt", {"w": np.ones((2, 3), np.float32)})
        return (folder / "a.pt").read_bytes()
    pytest.importorskip("onnx")
    return bytes(onnx_model(if_branches=True).SerializeToString())


# --- ONNX


def onnx_model(*, if_branches: bool = False, same_names: bool = False) -> Any:
    """A model with weights in initializers, in Constant nodes, and in the branches of an If."""
    onnx = pytest.importorskip("onnx")
    helper, from_array, kind = onnx.helper, onnx.numpy_helper.from_array, onnx.TensorProto

    def constant(name: str, value: np.ndarray[Any, Any]) -> Any:
        return helper.make_node("Constant", [], [name], value=from_array(value))

    def branch(label: str, scale: float) -> Any:
        name = "weight" if same_names else f"{label}_weight"
        return helper.make_graph(
            [constant(name, np.full((2, 2), scale, np.float32)), helper.make_node("MatMul", ["x", name], [label])],
            label,
            [],
            [helper.make_tensor_value_info(label, kind.FLOAT, [2, 2])],
        )

    nodes = [
        constant("basis", np.arange(6, dtype=np.float32).reshape(2, 3)),
        helper.make_node("Constant", [], ["axes"], value_ints=[0, 1]),
        helper.make_node("Constant", [], ["eps"], value_float=1e-5),
        helper.make_node("MatMul", ["x", "linear.weight"], ["y"]),
    ]
    if if_branches:
        nodes.append(
            helper.make_node("If", ["flag"], ["z"], then_branch=branch("then", 2.0), else_branch=branch("other", 3.0))
        )
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", kind.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("y", kind.FLOAT, [2, 2])],
        initializer=[
            from_array(np.eye(2, dtype=np.float32), "linear.weight"),
            from_array(np.array([1, 2], np.int64), "shape"),
            helper.make_tensor("listed", kind.FLOAT, [3], [1.0, 2.0, 3.0]),
            helper.make_tensor("half", kind.BFLOAT16, [2], [1.0, -2.0]),
        ],
    )
    return helper.make_model(graph)


def test_onnx_gives_initializers_and_constants_of_every_branch(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(onnx_model(if_branches=True).SerializeToString())
    found = open_file(tmp_path / "a.onnx")
    assert set(found) == {
        *("linear.weight", "shape", "listed", "half", "basis", "axes", "eps", "then_weight", "other_weight")
    }
    np.testing.assert_array_equal(found.read("basis"), np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(found.read("listed"), [1, 2, 3])
    np.testing.assert_array_equal(found.read("then_weight"), np.full((2, 2), 2))
    np.testing.assert_array_equal(found.read("axes"), [0, 1])
    assert found.read("half").dtype == np.float32 and found.read("half").tolist() == [1.0, -2.0]
    assert found.read("eps").shape == () and found.read("eps") == np.float32(1e-5)
    assert {name for name in found if found.tensors[name].auxiliary} == {"shape", "axes", "eps"}


def test_a_name_that_branches_share_gets_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(onnx_model(if_branches=True, same_names=True).SerializeToString())
    found = OnnxFile(tmp_path / "a.onnx")
    assert {name for name in found if name.endswith("weight")} == {
        *("linear.weight", "If#4.then_branch/weight", "If#4.else_branch/weight")
    }
    assert found.read("If#4.then_branch/weight")[0, 0] == 2 and found.read("If#4.else_branch/weight")[0, 0] == 3


def test_onnx_agrees_with_the_runtime_that_executes_the_file(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    weight = RNG.standard_normal((4, 3)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weight)),
            onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2, 4])],
        [onnx.helper.make_tensor_value_info("y", 1, [2, 3])],
    )
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    session = runtime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ open_file(tmp_path / "a.onnx").read("w"), rtol=1e-5)


def test_onnx_data_beside_the_file_is_read_and_outside_of_its_folder_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "a.onnx"
    onnx.save_model(
        onnx_model(), str(path), save_as_external_data=True, location="a.data", size_threshold=0, convert_attribute=True
    )
    np.testing.assert_array_equal(open_file(path).read("linear.weight"), np.eye(2))
    (tmp_path / "a.data").write_bytes((path.parent / "a.data").read_bytes())
    path.write_bytes(path.read_bytes().replace(b"\x0a\x08location\x12\x06a.data", b"\x0a\x08location\x12\x06../a.d"))
    (tmp_path / "a.d").write_bytes((tmp_path / "a.data").read_bytes())
    with pytest.raises(WeightsError, match=r"linear\.weight"):
        open_file(path).read("linear.weight")


def test_onnx_cut_short_or_empty_is_refused(tmp_path: Path) -> None:
    whole = onnx_model(if_branches=True).SerializeToString()
    for size in [0, 1, 10, len(whole) // 2, len(whole) - 9]:
        (tmp_path / "cut.onnx").write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.onnx"):
            open_file(tmp_path / "cut.onnx")


def test_without_onnx_installed_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    (tmp_path / "a.onnx").write_bytes(b"x")
    with pytest.raises(WeightsError, match="needs the package onnx") as caught:
        open_file(tmp_path / "a.onnx")
    assert caught.value.hint == "pip install 'wpk[zoo]'"


# --- torch


class _Global:
    """Pickles as a reference to MODULE.NAME, called with what is given: what a real, or hostile, file holds."""

    def __init__(self, module: str, name: str, *arguments: object) -> None:
        self.module, self.name, self.arguments = module, name, arguments


class _Storage:
    def __init__(self, kind: str, key: str, values: int) -> None:
        self.kind, self.key, self.values = kind, key, values


_PurePickler: Any = pickle._Pickler  # type: ignore[attr-defined, unused-ignore]  # the one whose save() can be overridden


class _Pickler(_PurePickler):  # type: ignore[misc]
    def persistent_id(self, value: object) -> object:
        if isinstance(value, _Storage):
            return ("storage", _Global("torch", value.kind), value.key, "cpu", value.values)
        return None

    def save(self, value: object, save_persistent_id: bool = True) -> None:
        if isinstance(value, _Global):
            self.write(b"c" + f"{value.module}\n{value.name}\n".encode())
            if value.arguments:
                super().save(value.arguments)
                self.write(b"R")
            return
        super().save(value, save_persistent_id)


def pack(path: Path, content: object, storages: dict[str, bytes], **extra: bytes) -> None:
    import io

    stream = io.BytesIO()
    _Pickler(stream, 2).dump(content)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", extra.get("byteorder", b"little"))
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)


def tensor(
    key: str, values: int, shape: object, stride: object, offset: object = 0, kind: str = "FloatStorage"
) -> _Global:
    storage = _Storage(kind, key, values)
    return _Global("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, stride, False, OrderedDict())


def save_torch(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    records = {
        name: tensor(str(index), value.size, value.shape, tuple(step // value.itemsize for step in value.strides))
        for index, (name, value) in enumerate(tensors.items())
    }
    pack(path, records, {str(index): value.tobytes() for index, value in enumerate(tensors.values())})


def test_torch_reads_what_torch_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    wanted = {name: value for name, value in TENSORS.items() if name != "quantised"}
    state = OrderedDict((name, torch.tensor(value)) for name, value in wanted.items())
    torch.save(state, tmp_path / "a.pt")
    same(open_file(tmp_path / "a.pt"), wanted)


def test_torch_views_and_bfloat16_are_as_torch_sees_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state: dict[str, Any] = {
        "model": {"t": base.T, "part": base[1:3, 2:5], "expanded": base[0, :1].expand(3)},
        "step": 7,
        "note": "x",
    }
    torch.save({**state, "list": [base.to(torch.bfloat16)]}, tmp_path / "a.pth")
    found = open_file(tmp_path / "a.pth")
    assert set(found) == {"model.t", "model.part", "model.expanded", "list.0"}
    for name in ("t", "part", "expanded"):
        np.testing.assert_array_equal(found.read(f"model.{name}"), state["model"][name].numpy())
    assert found.tensors["list.0"].dtype == "bfloat16"
    np.testing.assert_array_equal(found.read("list.0"), base.numpy())


def test_a_module_of_batch_norm_and_lstm_is_read_like_torch_loads_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 5), torch.nn.BatchNorm1d(3), torch.nn.LSTM(3, 4, 2))
    torch.save(module.state_dict(), tmp_path / "a.pt")
    same(open_file(tmp_path / "a.pt"), {name: value.numpy() for name, value in module.state_dict().items()})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("nt", "system")),
        *(("torch", "load"), ("torch.nn.modules.linear", "Linear"), ("torch._utils", "_rebuild_parameter")),
        *(("collections", "Counter"), ("subprocess", "Popen"), ("torch", "FloatStorage.__init__")),
    ],
)
def test_any_other_global_is_refused_by_name_and_not_run(tmp_path: Path, module: str, name: str) -> None:
    mark = tmp_path / "ran"
    pack(tmp_path / "a.pt", {"w": _Global(module, name, f"touch {mark}")}, {})
    with pytest.raises(WeightsError, match=f"wants the global {module}.{name}") as caught:
        TorchFile(tmp_path / "a.pt")
    assert caught.value.found == f"{module}.{name}" and caught.value.hint
    assert not mark.exists()


def test_a_real_attack_by_reduce_does_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"w": Attack()}))
    with pytest.raises(WeightsError, match="system"):
        open_file(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Attack()))
    assert (tmp_path / "ran").exists()  # the attack is a real one


@pytest.mark.parametrize(
    "hostile",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n}(X\x01\x00\x00\x00xK\x01ub.",  # BUILD: set an attribute on the function
        b"ctorch\nFloatStorage\n}(X\x01\x00\x00\x00xK\x01ub.",  # ... on a storage class
        b"ctorch\nFloatStorage\n)R.",  # call a storage class
        b"(ctorch\nFloatStorage\no.",
        b"ccollections\nOrderedDict\n)\x81.",  # NEWOBJ: a harmless, empty one
        b"ccollections\nOrderedDict\nX\x03\x00\x00\x00abcQ.",  # a persistent id that is none
        b"]r\xff\xff\xff\x7f.",  # a memo index that could take gigabytes
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of 2^63 bytes
        b"\x82\x01.",  # the extension registry
        b"",
        b"\x80\x09garbage",
    ],
)
def test_hostile_pickles_end_in_a_weights_error(tmp_path: Path, hostile: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", hostile)
    with pytest.raises(WeightsError, match=r"a\.pt"):
        open_file(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "record",
    [
        tensor("0", 4, (5,), (1,)),  # beyond the storage
        tensor("0", 4, (4,), (1,), offset=1),
        tensor("0", 4, (2, 2), (4, 1)),
        tensor("0", 4, (2,), (-1,)),
        tensor("0", 4, (2,), (1,), offset=-1),
        tensor("0", 4, (2, 2), (1,)),
        tensor("0", 4, ("2",), (1,)),
        tensor("0", 4, [2], [1]),
        tensor("1", 4, (2,), (1,)),  # no such storage
        tensor("../data.pkl", 4, (2,), (1,)),
        tensor("0", 4, (2**40,), (0,)),  # one value as terabytes
    ],
)
def test_tensor_records_that_lie_are_refused(tmp_path: Path, record: _Global) -> None:
    pack(tmp_path / "a.pt", {"w": record}, {"0": bytes(16)})
    with pytest.raises(WeightsError, match=r"a\.pt"):
        open_file(tmp_path / "a.pt").read("w")


def test_torch_files_of_other_kinds_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C))
    with pytest.raises(WeightsError, match="no torch zip checkpoint") as caught:
        open_file(tmp_path / "old.pt")
    assert caught.value.hint and "torch.save" in caught.value.hint
    pack(tmp_path / "big.pt", {"w": tensor("0", 1, (1,), (1,))}, {"0": bytes(4)}, byteorder=b"big")
    with pytest.raises(WeightsError, match="big-endian"):
        open_file(tmp_path / "big.pt")
    pack(tmp_path / "none.pt", {"step": 3}, {})
    with pytest.raises(WeightsError, match="no tensors"):
        open_file(tmp_path / "none.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(WeightsError, match="no torch checkpoint"):
        open_file(tmp_path / "zip.pt")


def test_every_truncation_of_a_torch_file_is_refused(tmp_path: Path) -> None:
    save_torch(tmp_path / "a.pt", {"w": np.ones((2, 3), np.float32)})
    whole = (tmp_path / "a.pt").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"cut\.pt"):
            open_file(tmp_path / "cut.pt")


# --- folders


def shards(folder: Path, stem: str = "model", *, index: bool = True) -> None:
    names = [f"{stem}-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for part, name in enumerate(names):
        save_raw(folder / name, {f"layer.{part}": ("F32", np.full(2, part, np.float32))})
    if index:
        listed = {"metadata": {}, "weight_map": {f"layer.{part}": name for part, name in enumerate(names)}}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("index", [True, False])
def test_the_shards_of_one_checkpoint_are_one_file(tmp_path: Path, index: bool) -> None:
    shards(tmp_path, index=index)
    (tmp_path / "config.json").write_text("{}")
    found = open_path(tmp_path)
    assert list(found) == ["layer.0", "layer.1"]
    assert found.read("layer.1").tolist() == [1, 1]


def test_several_files_are_told_apart_by_their_stems(tmp_path: Path) -> None:
    shards(tmp_path)
    save_raw(tmp_path / "codec.safetensors", {"layer.0": ("F32", np.ones(1, np.float32))})
    assert set(open_folder(tmp_path)) == {"model:layer.0", "model:layer.1", "codec:layer.0"}


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="lacks shards") as caught:
        open_path(tmp_path)
    assert caught.value.found == "no model-00002-of-00002.safetensors"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="index"):
        open_path(tmp_path)


def test_an_index_cannot_point_outside(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(WeightsError, match="outside"):
        open_path(tmp_path)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path, says in [
        (tmp_path / "absent.onnx", "does not exist"),
        (tmp_path / "notes.txt", "no known weights format"),
        (tmp_path, "holds no weights"),
    ]:
        with pytest.raises(WeightsError, match=says) as caught:
            open_path(path)
        assert caught.value.wanted
    save_raw(tmp_path / "a.safetensors", {"w": ("F32", np.ones(1, np.float32))})
    save_torch(tmp_path / "a.pt", {"v": np.ones(1, np.float32)})
    with pytest.raises(WeightsError, match="two weights files called a"):
        open_path(tmp_path)


def test_an_unknown_tensor_and_a_name_held_twice_are_named(tmp_path: Path) -> None:
    save_raw(tmp_path / "a.safetensors", {"layer.weight": ("F32", np.ones(1, np.float32))})
    found = open_file(tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=r"'layers\.weight'") as caught:
        found.read("layers.weight")
    assert "layer.weight" in str(caught.value.found)
    with pytest.raises(WeightsError, match="two files hold a tensor"):
        MergedSet([(None, found), (None, found)])


def test_bfloat16_conversion_keeps_signs_infinities_and_subnormals() -> None:
    bits = np.array([0x8000, 0x7F80, 0xFF80, 0x0001, 0x3F80], np.uint16)
    assert bfloat16_to_float32(bits).view(np.uint32).tolist() == [int(b) << 16 for b in bits]
