"""What every format gives: named tensors whose shapes and dtypes are known at once, and values read on demand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from wpk.ir.errors import WeightsError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_NUMPY_NAMES = frozenset(
    {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"}
)


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


def bfloat16_to_float32(bits: Array) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (uint16) as float32: bfloat16 is float32's upper half, so this is exact."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)
