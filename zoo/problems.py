"""What is wrong with a spec, as a person reads it: every problem with its path, what was wanted, found, and a mend."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from wpk.ir.errors import SpecError

Location = tuple[int | str, ...]
_OURS = "wpk_problem"


@dataclass(frozen=True)
class Problem:
    """One fault. location: keys and list indices from the spec's top, `("components", 2, "units")`."""

    location: Location
    message: str
    wanted: str | None = None
    found: str | None = None
    hint: str | None = None

    @property
    def path(self) -> str:
        text = ""
        for part in self.location:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text

    def error(self, *places: str) -> SpecError:
        """The problem as an error of its own, its message behind `places` and its path."""
        text = ": ".join(part for part in (*places, self.path, self.message) if part)
        return SpecError(text, wanted=self.wanted, found=self.found, hint=self.hint)

    def __str__(self) -> str:
        return str(self.error())


def spec_error(what: str, problems: Sequence[Problem]) -> SpecError:
    """One problem in the error's own four parts; several as a list in its message."""
    if len(problems) == 1:
        return problems[0].error(what)
    listed = "".join(f"\n  {problem}" for problem in problems)
    return SpecError(f"{what} has {len(problems)} problems:{listed}\n")


def raise_problems(title: str, problems: Sequence[Problem]) -> None:
    """From inside a pydantic validator: raise them all, each at its own place."""
    if problems:
        raise ValidationError.from_exception_data(title, [_line(problem) for problem in problems])


def close_hint(name: str, known: Iterable[str]) -> str | None:
    """ "Did you mean ...?" where something known is close to `name`."""
    near = difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else None


def problems_of(
    error: ValidationError, root: type[BaseModel], kinds: Mapping[str, type[BaseModel]], data: Any
) -> list[Problem]:
    """A pydantic error of a spec, translated. kinds: the component classes to choose from. data: what was validated."""
    walk = _Walk(root, kinds, data)
    details = error.errors(include_url=False)
    deeper = [one["loc"] for one in details]
    return [
        _translate(one, walk)
        for one in details
        # a sequence is also "too short" when its entries are wrong
        if one["type"] != "too_short"
        or not any(loc[: len(one["loc"])] == one["loc"] for loc in deeper if loc != one["loc"])
    ]


def _line(problem: Problem) -> InitErrorDetails:
    context = {
        "message": problem.message, "wanted": problem.wanted, "found": problem.found, "hint": problem.hint,
    }  # fmt: skip
    return InitErrorDetails(type=PydanticCustomError(_OURS, "{message}", context), loc=problem.location, input=None)


def _translate(details: Mapping[str, Any], walk: _Walk) -> Problem:
    location, models = walk(details["loc"])
    kind, value, context = details["type"], details.get("input"), details.get("ctx", {})
    if kind == _OURS:
        return Problem(location, context["message"], context["wanted"], context["found"], context["hint"])
    if kind == "extra_forbidden":
        known = sorted({name for model in models for name in _fields(model)})
        hint = close_hint(str(location[-1]), known)
        return Problem(location, f"unknown key {location[-1]!r}", wanted=f"one of {', '.join(known)}", hint=hint)
    if kind == "missing":
        return Problem(location, f"the key {location[-1]!r} is missing")
    if kind == "string_pattern_mismatch":
        return Problem(location, "a text that does not fit", f"the pattern {context['pattern']}", _short(value))
    message = str(details["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be "):
        hint = "Put it in quotes." if kind == "string_type" and isinstance(value, int | float) else None
        return Problem(location, "a value that does not fit", message[len("Input should be ") :], _short(value), hint)
    return Problem(location, message, found=None if "found" in message else _short(value))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


@dataclass(frozen=True)
class _Walk:
    """From pydantic's locations to ours: without the tags it puts in for unions, and with the models at their ends."""

    root: type[BaseModel]
    kinds: Mapping[str, type[BaseModel]]
    data: Any

    def __call__(self, loc: Location) -> tuple[Location, list[type[BaseModel]]]:
        """The location in the spec, and the models of which its last part is, or should have been, a key."""
        models, owners, found = [self.root], [self.root], list[int | str]()
        for index, part in enumerate(loc):
            last = index == len(loc) - 1
            named = [(model, field) for model in models for field in [_field(model, part)] if field is not None]
            if loc[0] == "weights" and index == 1 and named and not last:  # a source's key is also its tag
                models = [model for model, _ in named]
            elif isinstance(part, int):
                found.append(part)
                models = self._component(part) if found == ["components", part] else models
            elif named or last or _is_mapping_key(loc, index):
                found.append(part)
                owners = models
                models = [m for _, field in named for m in _models_in(field.annotation)] if named else models
        return tuple(found), owners

    def _component(self, index: int) -> list[type[BaseModel]]:
        try:
            return [self.kinds[self.data["components"][index]["kind"]]]
        except (KeyError, TypeError, IndexError):
            return []


def _field(model: type[BaseModel], key: int | str) -> FieldInfo | None:
    return next((f for name, f in model.model_fields.items() if key in (name, f.alias)), None)


def _is_mapping_key(loc: Location, index: int) -> bool:
    """Whether the part is a key of a mapping in a spec: the name of a port, a tensor, an operator, a feedback."""
    return (loc[0] in ("tensors", "unused_tensors", "operators", "feedback", "prefill") and index == 1) or (
        loc[0] in ("ports", "precision") and index == 2
    )


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models inside a type annotation."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for argument in typing.get_args(annotation) for model in _models_in(argument)]


def problem_error(problem: Problem) -> ValidationError:
    """One problem as what a pydantic validator may raise; its location is relative to what is validated."""
    return ValidationError.from_exception_data("component", [_line(problem)])
