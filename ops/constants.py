"""Weight-level constants: operators without operands, evaluated once when a profile is loaded."""

from __future__ import annotations

import math

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type
from wpk.ops.operator import Array, Cost, Dims, Operator, attr, operator

_NUMPY = {"f32": np.float64, "i32": np.int64, "bool": np.bool_}


class Constant(Operator):
    """Base: the dtype's check and the shape's."""

    shape: tuple[int, ...]
    dtype: str

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.dtype not in _NUMPY:
            raise GraphError(f"{self.name}: dtype", wanted=" | ".join(_NUMPY), found=self.dtype)
        if not isinstance(self.shape, tuple):
            raise GraphError(f"{self.name}: shape", wanted="a tuple of sizes", found=self.shape)
        return (Type(DType(self.dtype), self.shape),)

    def cost(self, *types: Type) -> Cost:
        return Cost({})


@operator("constant", version=1)
class Values(Constant):
    """`values` in C order as `shape`; dtype f32, i32 or bool."""

    shape: tuple[int, ...] = attr()
    values: tuple[float, ...] = attr()
    dtype: str = attr("f32")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        (made,) = super().results(dims)
        if not isinstance(self.values, tuple) or len(self.values) != math.prod(self.shape):
            found = len(self.values) if isinstance(self.values, tuple) else self.values
            raise GraphError("constant: values", wanted=f"{made.size} for {made}", found=found)
        return (made,)

    def meaning(self) -> Array:
        return np.array(self.values, _NUMPY[self.dtype]).reshape(self.shape)


@operator("full", version=1)
class Full(Constant):
    """`value` everywhere in `shape`; dtype f32, i32 or bool."""

    shape: tuple[int, ...] = attr()
    value: float = attr()
    dtype: str = attr("f32")

    def meaning(self) -> Array:
        return np.full(self.shape, self.value, _NUMPY[self.dtype])
