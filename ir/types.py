"""Types of the tensor IR: what one session holds. The compiler adds the cohort axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from wpk.ir.errors import GraphError


class DType(StrEnum):
    """Storage type of a value. bf16 is stored as its upper 16 bits."""

    F32 = "f32"
    BF16 = "bf16"
    I32 = "i32"
    BOOL = "bool"

    @property
    def bytes(self) -> int:
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        return self in FLOATS

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of the stored bits (bf16 is held as uint16)."""
        return _NUMPY[self]


_BYTES = {DType.F32: 4, DType.BF16: 2, DType.I32: 4, DType.BOOL: 4}
_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(np.uint16),
    DType.I32: np.dtype(np.int32),
    DType.BOOL: np.dtype(np.int32),  # one word a flag: a slot's flags are written by many lanes at once
}
FLOATS = frozenset({DType.F32, DType.BF16})
INTEGERS = frozenset({DType.I32, DType.BOOL})
ANY = FLOATS | INTEGERS


@dataclass(frozen=True, slots=True)
class Type:
    """dtype and shape of one session's value; `()` is a scalar."""

    dtype: DType
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(d < 1 for d in self.shape):
            raise GraphError("a dimension must be at least 1", wanted=">= 1", found=self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that one session's value occupies."""
        return self.size * self.dtype.bytes

    def __str__(self) -> str:
        return f"{self.dtype.value}[{','.join(map(str, self.shape))}]"


def f32(*shape: int) -> Type:
    return Type(DType.F32, shape)


def bf16(*shape: int) -> Type:
    return Type(DType.BF16, shape)


def i32(*shape: int) -> Type:
    return Type(DType.I32, shape)


def boolean(*shape: int) -> Type:
    return Type(DType.BOOL, shape)


def parse_type(text: str) -> Type:
    """The inverse of `str(type)`: `f32[4,129]`."""
    head, bracket, tail = text.strip().partition("[")
    try:
        if not bracket or not tail.endswith("]"):
            raise ValueError(text)
        dims = tail[:-1]
        return Type(DType(head), tuple(int(d) for d in dims.split(",")) if dims else ())
    except ValueError:
        raise GraphError(
            f"{text!r} is not a type", wanted="DTYPE[d0,d1,...] with f32, bf16, i32 or bool", found=text
        ) from None
