"""What the parts of a spec share: frozen models that refuse what they do not know, and types of fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, StringConstraints

from wpk.ir.errors import GraphError
from wpk.ir.types import Type, parse_type

Text = Annotated[str, StringConstraints(min_length=1, max_length=4000)]
Seconds = Annotated[float, Field(ge=0.0, le=3600.0)]


def _parse_type(value: Any) -> Type:
    if isinstance(value, Type):
        return value
    try:
        return parse_type(value)
    except (GraphError, AttributeError):
        raise ValueError("wanted a type such as f32[512]: f32, bf16, i32 or bool with sizes of at least 1") from None


TypeField = Annotated[Type, PlainValidator(_parse_type), PlainSerializer(str, return_type=str)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


def require_values(type: Type, values: Iterable[float]) -> None:
    """Refuse numbers that a value of that type does not hold: fractions, or what is beyond 32 bits, for integers."""
    if type.dtype.is_float:
        return
    for value in values:
        if value != int(value) or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"wanted whole numbers of 32 bits for {type}, found {value}")
