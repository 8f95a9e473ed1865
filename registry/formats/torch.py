"""Torch zip checkpoints (.pt, .pth, .bin): a pickle of tensor records beside one file a storage.

The pickle is read by an unpickler that knows just the handful of names that such records need.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from wpk.ir.errors import WeightsError
from wpk.registry.formats.files import DAMAGED, MAX_HEADER, first_line, readable
from wpk.registry.formats.tensors import Array, TensorInfo, TensorSet

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


class TorchFile(TensorSet):
    """A torch zip checkpoint: nested mappings and lists of tensors, flattened with dots.

    Its pickle may name OrderedDict, torch._utils._rebuild_tensor_v2 and the typed storages. Any other name is
    refused before it is looked up, so nothing that the file holds ever runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with readable(path) as stream:
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
                if len(records) != 1 or records[0].file_size > MAX_HEADER:
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
            raise WeightsError(f"{path} cannot be read", found=first_line(error), hint=DAMAGED) from error
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
                hint=DAMAGED,
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
            raise WeightsError(f"{self._path}: tensor {name}", found=first_line(error), hint=DAMAGED) from error


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
