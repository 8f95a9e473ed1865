"""From the names of a checkpoint to the parameters of components: renaming, and storage that is laid out otherwise.

    tensors:
      head.weight: model.speech_head.weight                       # the same shape, another name
      head.weight: {tensor: val_145, shape: [64, 1], axes: [1, 0]}
      gru.b_ih: {tensor: val_127, shape: [1, 384], rows: [[64, 128], [0, 64], [128, 192]]}
      blocks.*.norm.weight: model.blocks.*.norm.weight            # what `*` matches is put in, in order

A parameter that is not named here is stored under its own path, COMPONENT.PARAMETER.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import DType, Type

Policy = Literal["f32", "tf32", "bf16"]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=500)]
_Size = Annotated[int, Field(strict=True, ge=1)]
_Index = Annotated[int, Field(strict=True, ge=0)]


class TensorRef(BaseModel):
    """A tensor of the checkpoint and how a parameter is taken from it. Axes of size 1 do not count.

    shape: as stored, where it is not the parameter's. axes: the stored axes in the parameter's order (without those
    of size 1). rows: [start, stop) ranges of the leading axis after that, put together in this order: a slice, or
    blocks in another order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: _Name
    shape: tuple[_Size, ...] | None = None
    axes: tuple[_Index, ...] = ()
    rows: tuple[tuple[_Index, _Size], ...] = ()

    @model_validator(mode="after")
    def _agrees(self) -> TensorRef:
        if self.axes and sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"wanted axes in some order, each once, found {list(self.axes)}")
        if self.rows and self.shape is None:
            raise ValueError("rows are of a stored shape: wanted the key 'shape', found none")
        for start, stop in self.rows:
            if start >= stop:
                raise ValueError(f"wanted rows as [start, stop] with start < stop, found {[start, stop]}")
        return self

    def stored(self, wanted: Type) -> Type:
        """The type that the checkpoint holds, for a parameter of the type `wanted`."""
        if self.shape is not None:
            return Type(wanted.dtype, self.shape)
        if not self.axes:
            return wanted
        if len(self.axes) != len(wanted.shape):
            axes = f"{len(wanted.shape)} axes"
            raise GraphError("axes of a tensor without a shape", wanted=axes, found=list(self.axes))
        return Type(wanted.dtype, tuple(wanted.shape[self.axes.index(axis)] for axis in range(len(self.axes))))

    def place(self, g: GraphBuilder, wanted: Type) -> Value:
        """The parameter as a weight of the graph."""
        value = g.weight(self.tensor, self.stored(wanted))
        if value.type == wanted and not self.axes and not self.rows:
            return value
        value = _reshape(g, value, _counting(value.type))
        if self.axes:
            if len(self.axes) != len(value.type.shape):
                found = f"{list(self.axes)} for {value.type}"
                raise GraphError("axes of a stored tensor", wanted=f"{len(value.type.shape)} axes", found=found)
            value = g.op("transpose", value, axes=self.axes)
        if self.rows:
            parts = [g.op("slice", value, axis=0, start=start, stop=stop) for start, stop in self.rows]
            value = parts[0] if len(parts) == 1 else g.op("concat", *parts, axis=0)
        if _counting(value.type) != _counting(wanted):
            raise GraphError(f"tensor {self.tensor!r} does not make the parameter", wanted=wanted, found=value.type)
        return _reshape(g, value, wanted.shape)


def _form(entry: object) -> str:
    return "name" if isinstance(entry, str) else "reference"


TensorEntry = Annotated[
    Annotated[_Name, Tag("name")] | Annotated[TensorRef, Tag("reference")],
    Discriminator(_form),
]
"""What a parameter may be mapped to: a name alone, or a reference."""


class TensorMap:
    """The mapping of a spec; remembers which of its entries were used."""

    def __init__(self, entries: Mapping[str, str | TensorRef]) -> None:
        self._exact = {path: entry for path, entry in entries.items() if "*" not in path}
        self._patterns = [(path, _pattern(path), entry) for path, entry in entries.items() if "*" in path]
        self._used: set[str] = set()
        self.parameters: list[str] = []  # every path asked for

    def find(self, path: str) -> TensorRef:
        """The tensor that holds the parameter of that path: an exact entry, else the first pattern that matches."""
        self.parameters.append(path)
        if path in self._exact:
            self._used.add(path)
            return _ref(self._exact[path])
        for text, pattern, entry in self._patterns:
            match = pattern.fullmatch(path)
            if match:
                self._used.add(text)
                ref, parts = _ref(entry), list(match.groups())
                name = re.sub(r"\*", lambda _, parts=parts: parts.pop(0) if parts else "*", ref.tensor)  # type: ignore[misc]
                return ref.model_copy(update={"tensor": name})
        return TensorRef(tensor=path)

    @property
    def unused(self) -> list[str]:
        """Entries that no parameter has asked for."""
        return [path for path in (*self._exact, *(text for text, _, _ in self._patterns)) if path not in self._used]


class Tensors:
    """The parameters of one component, by their names inside it. policy: the precision of the component."""

    def __init__(self, g: GraphBuilder, component: str, mapping: TensorMap, policy: Policy = "f32") -> None:
        self._g, self._component, self._mapping, self.policy = g, component, mapping, policy

    def get(self, parameter: str, type: Type) -> Value:
        """The weight of that name and type, such as ("0.weight", f32(64, 43)). Raises GraphError."""
        with self._g.scope(parameter):
            ref = self._mapping.find(f"{self._component}.{parameter}")
            try:
                return ref.place(self._g, type)
            except GraphError as error:
                if self._g.label in error.message:
                    raise
                where = f"{self._g.name}: {self._g.label}"
                raise GraphError(f"{where}: {error.message}", wanted=error.wanted, found=error.found) from None

    def matrix(self, parameter: str, *shape: int) -> Value:
        """A weight stored as the policy says: bf16, or else f32."""
        return self.get(parameter, Type(DType.BF16 if self.policy == "bf16" else DType.F32, shape))


def _ref(entry: str | TensorRef) -> TensorRef:
    return TensorRef(tensor=entry) if isinstance(entry, str) else entry


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, path.split("*"))))


def _counting(type: Type) -> tuple[int, ...]:
    return tuple(size for size in type.shape if size != 1)


def _reshape(g: GraphBuilder, value: Value, shape: tuple[int, ...]) -> Value:
    if value.type.shape == shape or math.prod(shape) != value.type.size:
        return value
    return g.op("reshape", value, shape=shape)  # type: ignore[no-any-return]
