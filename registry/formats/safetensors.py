"""The safetensors format: a JSON header, then the values, which are mapped into memory when they are read.

https://huggingface.co/docs/safetensors: 8 bytes of header length, the header, the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wpk.ir.errors import WeightsError
from wpk.registry.formats.files import DAMAGED, MAX_HEADER, readable
from wpk.registry.formats.tensors import Array, TensorInfo, TensorSet

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


def parse_safetensors_header(header: bytes, name: str) -> dict[str, tuple[TensorInfo, int, int]]:
    """The JSON header: tensor -> (info, first byte, last byte + 1), offsets counted from the end of the header.

    `name` is for messages. Raises WeightsError for anything but well-formed entries whose byte range fits the shape.
    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} has no readable safetensors header", found=str(error), hint=DAMAGED) from error
    if not isinstance(entries, dict):
        raise WeightsError(f"{name} has no readable safetensors header", wanted="a JSON object", hint=DAMAGED)
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
                hint=DAMAGED,
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
                hint=DAMAGED,
            )
        found[tensor] = (TensorInfo(shape, named), start, end)
    return found


def safetensors_header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, list[str]]:
    """What a file of these tensors begins with, header length included; and the order in which their values follow.

    Values come without gaps, the widest dtypes first, so that each tensor is aligned to its dtype.
    """
    known = {named: (ours, np.dtype(bits).itemsize) for ours, (named, bits) in _SAFETENSORS_DTYPES.items()}
    order = sorted(tensors, key=lambda name: -known[tensors[name].dtype][1])
    entries, end = {}, 0
    for name in order:
        info = tensors[name]
        dtype, width = known[info.dtype]
        start, end = end, end + info.size * width
        entries[name] = {"dtype": dtype, "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


class SafetensorsFile(TensorSet):
    """One .safetensors file. Opening reads the header alone; reading gives views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with readable(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            lead = stream.read(8)
            length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else -1
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise WeightsError(
                    f"{path} is no whole safetensors file",
                    wanted=f"a header of {length} bytes" if length >= 0 else "at least 8 bytes",
                    found=f"{size} bytes in all",
                    hint=DAMAGED,
                )
            self._entries = parse_safetensors_header(stream.read(length), str(path))
        self._start = 8 + length
        wanted = self._start + max((end for _, _, end in self._entries.values()), default=0)
        if size < wanted:
            raise WeightsError(f"{path} is cut short", wanted=f"{wanted} bytes", found=f"{size} bytes", hint=DAMAGED)
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
            raise WeightsError(f"{self._path} changed while it was open", hint=DAMAGED)
        if (self._start + start) % np.dtype(bits).itemsize:  # rare: files not written by the reference library
            data = data.copy()
        return data.view(bits).reshape(info.shape).view(np.ndarray)
