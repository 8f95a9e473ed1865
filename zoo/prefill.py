"""Steps that components have behind them when a session joins, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, model_validator

from wpk.zoo.component import Component, Name, Size, installed_kinds, parse_component
from wpk.zoo.part import Part, TypeField, require_values


def _component(data: Any, info: ValidationInfo) -> Component:
    return parse_component(data, (info.context or {}).get("kinds") or installed_kinds())


MOST_STEPS = 1 << 16  # of a prefill: all of them run whenever the model is loaded
AnyComponent = Annotated[SerializeAsAny[Component], BeforeValidator(_component)]
"""A component of any kind that is known where the spec is read."""


class PrefillInput(Part):
    """What components are fed in a prefill, a row a step: written out, or the rows of a tensor of the checkpoint.

    type: of a row. values: all rows' numbers, one after the other. tensor: its name; shape: its shape, where that is
    not [steps, *row].
    """

    type: TypeField
    values: tuple[float, ...] = ()
    tensor: str = ""
    shape: tuple[Size, ...] = ()

    @model_validator(mode="after")
    def _one_source(self) -> PrefillInput:
        if bool(self.values) == bool(self.tensor):
            raise ValueError("wanted either 'values' or 'tensor'")
        require_values(self.type, self.values)
        if self.shape and not self.tensor:
            raise ValueError("wanted 'shape' with a tensor alone")
        if len(self.values) % self.type.size:
            raise ValueError(f"wanted values for whole rows of {self.type}, found {len(self.values)}")
        return self


class Prefill(Part):
    """Steps that components of the model have behind them when a session joins: a prompt, a voice.

    They run once, when a profile is loaded, through `components`; what these keep is then the initial state of the
    model's components of the same names. An entry of `components` is written like one of the model's, or
    {use: NAME, ...}: the model's component of that name with other fields, its `kind` too. steps: how many.
    """

    steps: Annotated[int, Field(strict=True, ge=1, le=MOST_STEPS)]
    inputs: Annotated[dict[Name, PrefillInput], Field(min_length=1)]
    components: Annotated[tuple[AnyComponent, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _rows_are_steps(self) -> Prefill:
        for name, given in self.inputs.items():
            rows = (math.prod(given.shape) if given.shape else len(given.values)) // given.type.size
            if (given.values or given.shape) and rows != self.steps:
                raise ValueError(f"wanted {self.steps} rows of the input {name!r}, found {rows}")
        return self


def written_out(prefill: Any, own: Mapping[Any, Any]) -> Any:
    """Plain data of a prefill with every {use: NAME, ...} replaced. own: the model's components by name."""
    if not isinstance(prefill, dict) or not isinstance(prefill.get("components"), list | tuple):
        return prefill
    parts = []
    for part in prefill["components"]:
        if own and isinstance(part, dict) and "use" in part:
            name = part["use"]
            if not isinstance(name, str) or name not in own:
                raise ValueError(f"wanted `use` of one of {', '.join(own)} in a prefill, found {name!r}")
            given = {k: v for k, v in part.items() if k != "use"}
            part = {k: v for k, v in own[name].items() if k != "input"} | {"name": name} | given
        parts.append(part)
    return prefill | {"components": parts}
