"""Reading tensors out of weight files, without running anything that they contain.

A `TensorSet` knows every tensor's name, shape and dtype at once and reads values on demand. Three formats:

- safetensors: the header is JSON, the data is mapped into memory;
- ONNX: initializers and the tensors held by Constant nodes, in every subgraph;
- torch zip checkpoints (.pt, .pth, .bin): a pickle of tensor records, read by an unpickler that knows just the
  handful of names that such records need.

Whatever is truncated, corrupt or not understood raises WeightsError that names the file.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import zipfile
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wpk.ir.errors import WeightsError

if TYPE_CHECKING:
    import onnx

Array = npt.NDArray[Any]

_DAMAGED = "the file is damaged or incomplete: fetch it again"
_MAX_HEADER = 256 << 20  # bytes of JSON or pickle; the largest published models stay far below
_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class TensorInfo:
    """shape: dimensions as stored. dtype: NumPy's name, or "bfloat16", "float8_e4m3fn", ... where it has none.

    auxiliary: not a weight but a number that the file's own graph needs (axes, shapes, scalars of an ONNX file);
    readable, but no inventory misses an owner for it.
    """

    shape: tuple[int, ...]
    dtype: str
    auxiliary: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class TensorSet(ABC):
    """Named tensors of one weights source. `tensors` is in the file's order."""

    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> Array:
        """The values, shaped as `tensors[name]` says; bfloat16 comes as float32 (exactly), the rest as stored.

        The array may be a read-only view of the file. Raises WeightsError for an unknown name or damaged data.
        """
        raw = self.read_raw(name)
        dtype = self.tensors[name].dtype
        if dtype == "bfloat16":
            return bfloat16_to_float32(raw)
        if dtype not in _NUMPY_NAMES:
            raise WeightsError(f"tensor {name} has dtype {dtype}", wanted="float64 to float16, bfloat16 or integers")
        return raw

    def read_raw(self, name: str) -> Array:
        """Like read, but dtypes that NumPy lacks come as their bit patterns: bfloat16 as uint16, 8-bit as uint8."""
        if name not in self.tensors:
            near = [other for other in self.tensors if name.rpartition(".")[2] in other][:3]
            like = ", ".join(near or list(self)[:3])
            raise WeightsError(f"no tensor {name!r}", wanted=name, found=f"{len(self.tensors)} tensors, like {like}")
        return self._load(name)

    @abstractmethod
    def _load(self, name: str) -> Array: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


class MergedSet(TensorSet):
    """Several sets as one. alias None keeps a set's names; an alias puts `ALIAS:` before them."""

    def __init__(self, parts: Sequence[tuple[str | None, TensorSet]]) -> None:
        self._owner: dict[str, tuple[TensorSet, str]] = {}
        tensors: dict[str, TensorInfo] = {}
        for alias, part in parts:
            for name, info in part.tensors.items():
                known = name if alias is None else f"{alias}:{name}"
                if known in tensors:
                    raise WeightsError(
                        f"two files hold a tensor {known}",
                        hint="name the files in the spec (`files` or `aliases`), each with its own alias",
                    )
                tensors[known] = info
                self._owner[known] = (part, name)
        self.tensors = tensors

    def _load(self, name: str) -> Array:
        part, inner = self._owner[name]
        return part.read_raw(inner)


# --- dtypes -----------------------------------------------------------------------------------------------------

# safetensors name -> (our name, dtype of the stored bits)
_SAFETENSORS_DTYPES: dict[str, tuple[str, str]] = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3fn", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "F8_E8M0": ("float8_e8m0fnu", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}

# torch storage class -> the same
_TORCH_STORAGES: dict[str, tuple[str, str]] = {
    "DoubleStorage": ("float64", "<f8"),
    "FloatStorage": ("float32", "<f4"),
    "HalfStorage": ("float16", "<f2"),
    "BFloat16Storage": ("bfloat16", "<u2"),
    "LongStorage": ("int64", "<i8"),
    "IntStorage": ("int32", "<i4"),
    "ShortStorage": ("int16", "<i2"),
    "CharStorage": ("int8", "i1"),
    "ByteStorage": ("uint8", "u1"),
    "BoolStorage": ("bool", "?"),
}

_NUMPY_NAMES = frozenset(
    {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"}
)


def bfloat16_to_float32(bits: Array) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (uint16) as float32: bfloat16 is float32's upper half, so this is exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)


# --- safetensors --------------------------------------------------------------------------------------------------


def parse_safetensors_header(header: bytes, name: str) -> dict[str, tuple[TensorInfo, int, int]]:
    """The JSON header: tensor -> (info, first byte, last byte + 1), offsets counted from the end of the header.

    `name` is for messages. Raises WeightsError for anything but well-formed entries whose byte range fits the shape.
    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} has no readable safetensors header", found=str(error), hint=_DAMAGED) from error
    if not isinstance(entries, dict):
        raise WeightsError(f"{name} has no readable safetensors header", wanted="a JSON object", hint=_DAMAGED)
    found: dict[str, tuple[TensorInfo, int, int]] = {}
    for tensor, entry in entries.items():
        if tensor == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(value) is int and value >= 0 for value in (*shape, start, end))
        except (TypeError, KeyError, ValueError):
            whole = False
        if not whole:
            raise WeightsError(
                f"{name}: tensor {tensor} is described wrongly",
                wanted="dtype, shape, data_offsets",
                found=str(entry)[:200],
                hint=_DAMAGED,
            )
        if dtype not in _SAFETENSORS_DTYPES:
            raise WeightsError(f"{name}: tensor {tensor}", wanted=" | ".join(_SAFETENSORS_DTYPES), found=dtype)
        named, bits = _SAFETENSORS_DTYPES[dtype]
        wanted = math.prod(shape) * np.dtype(bits).itemsize
        if end - start != wanted:
            raise WeightsError(
                f"{name}: tensor {tensor} {dtype} {list(shape)}",
                wanted=f"{wanted} bytes",
                found=f"{end - start} bytes",
                hint=_DAMAGED,
            )
        found[tensor] = (TensorInfo(shape, named), start, end)
    return found


class SafetensorsFile(TensorSet):
    """One .safetensors file. Opening reads the header alone; reading gives views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _readable(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            lead = stream.read(8)
            length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise WeightsError(
                    f"{path} is no whole safetensors file",
                    wanted=f"a header of {length} bytes" if length >= 0 else "at least 8 bytes",
                    found=f"{size} bytes in all",
                    hint=_DAMAGED,
                )
            self._entries = parse_safetensors_header(stream.read(length), str(path))
        self._start = 8 + length
        wanted = self._start + max((end for _, _, end in self._entries.values()), default=0)
        if size < wanted:
            raise WeightsError(f"{path} is cut short", wanted=f"{wanted} bytes", found=f"{size} bytes", hint=_DAMAGED)
        self.tensors = {tensor: info for tensor, (info, _, _) in self._entries.items()}
        self._data: Array | None = None

    def _load(self, name: str) -> Array:
        info, start, end = self._entries[name]
        bits = next(bits for named, bits in _SAFETENSORS_DTYPES.values() if named == info.dtype)
        if start == end:  # an empty file tail cannot be mapped
            return np.empty(info.shape, bits)
        if self._data is None:
            try:
                self._data = np.memmap(self._path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise WeightsError(f"{self._path} cannot be mapped", found=str(error)) from error
        data = self._data[self._start + start : self._start + end]
        if data.size != end - start:
            raise WeightsError(f"{self._path} changed while it was open", hint=_DAMAGED)
        if (self._start + start) % np.dtype(bits).itemsize:  # rare: files not written by the reference library
            data = data.copy()
        return data.view(bits).reshape(info.shape).view(np.ndarray)


# --- ONNX ---------------------------------------------------------------------------------------------------------


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise WeightsError(
            "reading ONNX files needs the package onnx",
            wanted="onnx",
            found="not installed",
            hint="pip install 'wpk[zoo]'",
        ) from error
    return onnx


class OnnxFile(TensorSet):
    """The tensors of an ONNX model: initializers, and Constant nodes by the name of their output.

    A name that occurs once in the file is used as it is. Where subgraphs (of If, Loop, Scan, functions) repeat a
    name, each of theirs gets its path, "NODE.BRANCH/name"; a node without a name is called OPTYPE#INDEX.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._onnx = _import_onnx()
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

        with _readable(path):
            pass
        try:
            model = self._onnx.load(str(path), load_external_data=False)
        except (DecodeError, ValueError, OSError) as error:
            raise WeightsError(f"{path} is no whole ONNX file", found=_first_line(error), hint=_DAMAGED) from error
        if not model.HasField("graph") or not model.graph.node:
            raise WeightsError(f"{path} holds no ONNX graph", wanted="a graph with nodes", found="none", hint=_DAMAGED)
        found = [*self._walk(model.graph.node, model.graph.initializer, "")]
        for function in model.functions:
            found += self._walk(function.node, (), f"{function.domain}.{function.name}/")
        times = Counter(name for _, name, _ in found)
        self._protos: dict[str, onnx.TensorProto] = {}
        for place, name, proto in found:
            unique = name if times[name] == 1 else place + name
            if unique in self._protos:
                raise WeightsError(f"{path} defines the tensor {unique} twice", hint=_DAMAGED)
            self._protos[unique] = proto
        self.tensors = {name: self._info(name, proto) for name, proto in self._protos.items()}

    def _walk(self, nodes: Any, initializers: Any, place: str) -> Iterator[tuple[str, str, onnx.TensorProto]]:
        for proto in initializers:
            yield place, proto.name, proto
        for index, node in enumerate(nodes):
            label = node.name or f"{node.op_type}#{index}"
            for attribute in node.attribute:
                if node.op_type == "Constant":
                    proto = self._constant(attribute)
                    if proto is not None:
                        yield place, node.output[0], proto
                for branch, graph in enumerate([attribute.g] if attribute.HasField("g") else attribute.graphs):
                    name = attribute.name if attribute.HasField("g") else f"{attribute.name}{branch}"
                    yield from self._walk(graph.node, graph.initializer, f"{place}{label}.{name}/")

    def _constant(self, attribute: Any) -> Any:
        """The value of a Constant node as a TensorProto; None where it holds no numbers (strings, sparse)."""
        from onnx import numpy_helper

        if attribute.name == "value":
            return attribute.t
        if attribute.name in ("value_float", "value_floats"):
            values = attribute.f if attribute.name == "value_float" else list(attribute.floats)
            return numpy_helper.from_array(np.asarray(values, np.float32))
        if attribute.name in ("value_int", "value_ints"):
            whole = attribute.i if attribute.name == "value_int" else list(attribute.ints)
            return numpy_helper.from_array(np.asarray(whole, np.int64))
        return None

    def _info(self, name: str, proto: Any) -> TensorInfo:
        shape = tuple(proto.dims)
        types = self._onnx.TensorProto.DataType
        official = str(types.Name(proto.data_type)) if proto.data_type in types.values() else "unknown"
        dtype = _ONNX_DTYPES.get(official, official.lower())
        if official in _ONNX_DTYPES and proto.HasField("raw_data"):
            wanted = math.prod(shape) * np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
            if len(proto.raw_data) != wanted:
                raise WeightsError(
                    f"{self._path}: tensor {name} {dtype} {list(shape)}",
                    wanted=f"{wanted} bytes",
                    found=f"{len(proto.raw_data)} bytes",
                    hint=_DAMAGED,
                )
        # Weights are fractions or quantised bytes, with at least one axis; the graph's arithmetic is the rest.
        return TensorInfo(shape, dtype, auxiliary=not shape or dtype in ("int64", "int32", "bool", "string"))

    def _load(self, name: str) -> Array:
        from onnx import numpy_helper

        try:
            values = np.asarray(numpy_helper.to_array(self._protos[name], str(self._path.parent)))
        except Exception as error:  # onnx's helpers raise whatever the bytes drive them into
            raise WeightsError(f"{self._path}: tensor {name} cannot be read", found=_first_line(error)) from error
        if values.shape != self.tensors[name].shape:
            raise WeightsError(
                f"{self._path}: tensor {name}", wanted=self.tensors[name].shape, found=values.shape, hint=_DAMAGED
            )
        return values.view(np.uint16) if self.tensors[name].dtype == "bfloat16" else values


_ONNX_DTYPES = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT64": "uint64",
    "UINT32": "uint32",
    "UINT16": "uint16",
    "UINT8": "uint8",
    "BOOL": "bool",
}


# --- torch --------------------------------------------------------------------------------------------------------


class TorchFile(TensorSet):
    """A torch zip checkpoint: nested mappings and lists of tensors, flattened with dots.

    Its pickle may name OrderedDict, torch._utils._rebuild_tensor_v2 and the typed storages. Any other name is
    refused before it is looked up, so nothing that the file holds ever runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _readable(path) as stream:
            if not zipfile.is_zipfile(stream):
                raise WeightsError(
                    f"{path} is no torch zip checkpoint",
                    wanted="the zip format of torch 1.6 and later, whole",
                    found=f"{path.stat().st_size} bytes of something else",
                    hint="if it is an old checkpoint, load it and torch.save its state_dict again; else fetch it again",
                )
        try:
            with zipfile.ZipFile(path) as archive:
                records = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
                if len(records) != 1 or records[0].file_size > _MAX_HEADER:
                    raise WeightsError(f"{path} is no torch checkpoint", wanted="one data.pkl", found=len(records))
                self._root = records[0].filename.removesuffix("data.pkl")
                self._sizes = {info.filename: info.file_size for info in archive.infolist()}
                order = self._root + "byteorder"
                if order in self._sizes and archive.read(order).strip() != b"little":
                    raise WeightsError(f"{path} is big-endian", wanted="little-endian")
                with archive.open(records[0]) as stream:
                    content = _RestrictedUnpickler(stream, str(path)).load()
        except WeightsError:
            raise
        except Exception as error:  # a hostile or damaged pickle can raise anything, MemoryError and zlib's included
            raise WeightsError(f"{path} cannot be read", found=_first_line(error), hint=_DAMAGED) from error
        self._records = dict(_flatten(content, "", 0))
        if not self._records:
            raise WeightsError(f"{path} holds no tensors", wanted="a state dict", found=type(content).__name__)
        for name, record in self._records.items():
            self._check(name, record)
        self.tensors = {name: TensorInfo(record.shape, record.dtype) for name, record in self._records.items()}

    def _check(self, name: str, record: _TorchTensor) -> None:
        last = record.offset + sum((n - 1) * step for n, step in zip(record.shape, record.strides, strict=True))
        values = 0 if 0 in record.shape else last + 1
        found = self._sizes.get(f"{self._root}data/{record.key}")
        if found is None or values * np.dtype(record.bits).itemsize > found:
            raise WeightsError(
                f"{self._path}: tensor {name} lies outside its storage",
                wanted=f"{values * np.dtype(record.bits).itemsize} bytes",
                found="no storage" if found is None else f"{found} bytes",
                hint=_DAMAGED,
            )

    def _load(self, name: str) -> Array:
        record = self._records[name]
        try:
            with zipfile.ZipFile(self._path) as archive:
                storage = np.frombuffer(archive.read(f"{self._root}data/{record.key}"), np.uint8)
            item = np.dtype(record.bits).itemsize
            values = storage[: storage.size // item * item].view(record.bits)[record.offset :]
            strides = tuple(step * item for step in record.strides)
            return np.lib.stride_tricks.as_strided(values, record.shape, strides, writeable=False).copy()
        except Exception as error:  # a bad checksum, a shape beyond memory, a file exchanged under us
            raise WeightsError(f"{self._path}: tensor {name}", found=_first_line(error), hint=_DAMAGED) from error


@dataclass(frozen=True)
class _TorchTensor:
    key: str  # of the storage within the archive
    dtype: str
    bits: str
    offset: int  # in values
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in values


class _Storage(tuple[str, str]):
    """(dtype, bits) of a storage class; a pickle can neither call it nor set anything on it."""

    __slots__ = ()


class _Rebuild:
    """torch._utils._rebuild_tensor_v2, as a record of its arguments instead of a tensor.

    An object without attributes rather than a function: a pickle's BUILD could set attributes on a function.
    """

    __slots__ = ()

    def __call__(self, storage: object, offset: object, size: object, stride: object, *_: object) -> _TorchTensor:
        whole = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride)
        if (
            not (isinstance(storage, tuple) and len(storage) == 2 and isinstance(storage[1], _Storage))
            or not whole
            or not all(type(value) is int and value >= 0 for value in (offset, *size, *stride))  # type: ignore[misc]
        ):
            raise pickle.UnpicklingError("a tensor record is malformed")
        key, (dtype, bits) = storage
        return _TorchTensor(key, dtype, bits, offset, size, stride)  # type: ignore[arg-type]


class _RestrictedUnpickler(pickle._Unpickler):
    """The interpreter's unpickler in Python rather than C: its memo is a dict, so that a hostile memo index of 2^31
    costs nothing; in C it would touch that many slots."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        super().__init__(stream)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _TORCH_STORAGES:
            return _Storage(_TORCH_STORAGES[name])
        raise WeightsError(
            f"{self._name} wants the global {module}.{name}, which is never run",
            wanted="OrderedDict, tensors and storages alone",
            found=f"{module}.{name}",
            hint="save the model's state_dict() instead of the whole model, or convert it to safetensors",
        )

    def persistent_load(self, pid: Any) -> tuple[str, _Storage]:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _Storage)):
            raise pickle.UnpicklingError("an unknown persistent id")
        return str(pid[2]), pid[1]


def _flatten(value: object, prefix: str, depth: int) -> Iterator[tuple[str, _TorchTensor]]:
    if isinstance(value, _TorchTensor):
        yield prefix or "value", value
        return
    if depth > 32:  # also what ends a mapping that holds itself
        raise WeightsError("a checkpoint nests mappings more than 32 deep")
    pairs: Sequence[tuple[object, object]] = ()
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    for key, inner in pairs:
        yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key), depth + 1)


# --- opening ------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], TensorSet]] = {
    ".safetensors": SafetensorsFile,
    ".onnx": OnnxFile,
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".bin": TorchFile,
}
"""Suffix -> reader of one file."""


def open_file(path: Path) -> TensorSet:
    """One weights file, read as its suffix says. Raises WeightsError."""
    reader = READERS.get(path.suffix.lower())
    if reader is None and path.exists():
        raise WeightsError(
            f"{path} is of no known weights format", wanted=" | ".join(READERS), found=path.suffix or "no suffix"
        )
    if reader is None:
        raise WeightsError(f"{path} does not exist", wanted="a weights file or folder", found="nothing")
    return reader(path)


def open_files(files: Sequence[tuple[str, Path]]) -> TensorSet:
    """Files with their aliases: one alone gives its own names, several give `ALIAS:tensor`."""
    if len(files) == 1:
        return open_file(files[0][1])
    return MergedSet([(alias, open_file(path)) for alias, path in files])


def open_folder(folder: Path, files: Sequence[Path] | None = None) -> TensorSet:
    """The weights in a folder (or those of its files that are given), shards of one checkpoint taken as one file.

    Shards are what a `*.safetensors.index.json` lists, or files called STEM-00001-of-00009; a listed shard that is
    absent raises WeightsError. Otherwise as open_files, the alias being the file's name without its suffix.
    """
    if files is None:
        _require_folder(folder)
        files = sorted(path for path in folder.iterdir() if path.is_file())
    indexes = [path for path in files if path.name.endswith(_INDEX_SUFFIX)]
    weights = [path for path in files if path.suffix.lower() in READERS]
    groups: dict[str, list[Path]] = {}
    for index in indexes:
        groups[index.name.removesuffix(_INDEX_SUFFIX)] = _shards(index)
    listed = {path for shards in groups.values() for path in shards}
    for path in weights:
        if path not in listed:
            shard = _SHARD.match(path.stem)
            alias = shard["stem"] if shard else path.stem
            if alias in groups and not (shard and _SHARD.match(groups[alias][0].stem)):
                raise WeightsError(
                    f"{folder} holds two weights files called {alias}",
                    wanted="one file to read",
                    found=f"{groups[alias][0].name}, {path.name}",
                    hint="name the one to read",
                )
            groups.setdefault(alias, []).append(path)
    if not groups:
        raise WeightsError(f"{folder} holds no weights", wanted=" | ".join(READERS), found=f"{len(files)} other files")
    one = len(groups) == 1
    return MergedSet([(None if one else alias, open_file(path)) for alias, group in groups.items() for path in group])


def _shards(index: Path) -> list[Path]:
    with _readable(index) as stream:
        try:
            names = sorted(set(json.loads(stream.read())["weight_map"].values()))
            inside = all(isinstance(name, str) and name and "/" not in name and "\\" not in name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is no index of shards", found=_first_line(error), hint=_DAMAGED) from error
    if not inside:
        raise WeightsError(f"{index} names files outside its folder", wanted="plain file names")
    shards = [index.parent / name for name in names]
    absent = [path.name for path in shards if not path.is_file()]
    if absent:
        raise WeightsError(
            f"{index.parent} lacks shards of {index.name}",
            wanted=f"{len(shards)} files",
            found=f"no {', '.join(absent)}",
            hint=_DAMAGED,
        )
    return shards


def open_path(path: Path) -> TensorSet:
    """A file or a folder of weights. Raises WeightsError."""
    return open_folder(path) if path.is_dir() else open_file(path)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder", wanted="a folder of weights")


def _readable(path: Path) -> IO[bytes]:
    if not path.exists():
        raise WeightsError(f"{path} does not exist", wanted="a weights file", found="nothing")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a device"
        raise WeightsError(f"{path} is no file", wanted="a weights file", found=kind)
    try:
        return open(path, "rb")
    except OSError as error:
        raise WeightsError(f"{path} cannot be read", found=error.strerror) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
