"""What a model is made of: a component is validated data that turns itself into IR.

    @component("dense")
    class Dense(Component):
        units: Size
        activation: str = "none"

        def build(self, g, inputs, tensors):
            (x,) = inputs
            weight = tensors.get("weight", f32(self.units, x.type.shape[-1]))
            return g.op("linear", x, weight, activation=self.activation)

One file in `zoo/components/` per family. Installed packages add kinds through the entry-point group
`wpk.components`: an entry names a component class, or a module of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from wpk.ir.errors import GraphError, SpecError
from wpk.ir.graph import GraphBuilder, Value
from wpk.zoo.problems import Problem, close_hint, problem_error
from wpk.zoo.tensors import Policy, Tensors

ENTRY_POINTS = "wpk.components"
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=64)]
Reference = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*(\.[a-z0-9][a-z0-9_]*)?$", max_length=130)]
Size = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
Count = Annotated[int, Field(strict=True, ge=0, le=1 << 24)]
ActivationName = Literal["none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "softplus"]
Built = Value | dict[str, Value]


class Component(BaseModel):
    """Base of all kinds. Subclasses add their dimensions as fields and say what they build.

    kind: which class. name: unique in a spec; the kind where it is not given. input: what it reads, "PORT",
    "COMPONENT" (its first output) or "COMPONENT.OUTPUT"; one or several; the component before where it is not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    KIND: ClassVar[str] = ""
    ARITY: ClassVar[tuple[int, int]] = (1, 1)  # least and most inputs
    POLICIES: ClassVar[tuple[Policy, ...]] = ("f32", "tf32", "bf16")  # precisions of a model that it can be part of

    kind: str = ""
    name: Name = ""
    input: Reference | tuple[Reference, ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {"kind": cls.KIND, "name": data.get("kind", cls.KIND), **data}

    @field_validator("kind")
    @classmethod
    def _own_kind(cls, kind: str) -> str:
        if kind != cls.KIND:
            raise ValueError(f"wanted kind {cls.KIND!r}, found {kind!r}")
        return kind

    @property
    def references(self) -> tuple[str, ...] | None:
        """What it reads, or None for the component before."""
        return (self.input,) if isinstance(self.input, str) else self.input

    def outputs(self) -> tuple[str, ...]:
        """Names of what it gives, the first being what COMPONENT alone means."""
        return ("out",)

    @abstractmethod
    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        """Add this component to a graph: one value, or one for each name of `outputs()`. Raises GraphError."""

    def state(self, name: str) -> str:
        """The graph-wide name of a state of this component."""
        return f"{self.name}.{name}"


C = TypeVar("C", bound=type[Component])


def component(kind: str) -> Callable[[C], C]:
    """Class decorator: the name by which specs ask for this class."""

    def declare(cls: C) -> C:
        cls.KIND = kind
        return cls

    return declare


def kinds_in(thing: object, where: str) -> dict[str, type[Component]]:
    """The component classes of a module (those that it defines), or the one that `thing` is."""
    if isinstance(thing, type) and issubclass(thing, Component) and thing.KIND:
        return {thing.KIND: thing}
    if not isinstance(thing, ModuleType):
        raise SpecError(f"{where} brings no component", wanted="a component class or a module of them", found=thing)
    found: dict[str, type[Component]] = {}
    for value in vars(thing).values():
        own = isinstance(value, type) and issubclass(value, Component) and value.__module__.startswith(thing.__name__)
        if own and value.KIND:
            add_kinds(found, {value.KIND: value}, where)
    return found


def add_kinds(known: dict[str, type[Component]], more: Mapping[str, type[Component]], where: str) -> None:
    """Add kinds; a name that another class has already is refused."""
    for kind, cls in more.items():
        if known.setdefault(kind, cls) is not cls:
            first, second = (f"{c.__module__}.{c.__qualname__}" for c in (known[kind], cls))
            raise SpecError(f"{where}: component kind {kind!r} exists already", wanted=f"only {first}", found=second)


@functools.cache
def installed_kinds() -> Mapping[str, type[Component]]:
    """Every kind that WPK and the installed packages bring. A package that fails to load is passed over here."""
    known: dict[str, type[Component]] = {}
    from wpk.zoo import components

    for module in pkgutil.iter_modules(components.__path__, f"{components.__name__}."):
        add_kinds(known, kinds_in(importlib.import_module(module.name), module.name), module.name)
    for _, found in _entries():
        if not isinstance(found, Exception):
            known |= {kind: cls for kind, cls in found.items() if kind not in known}
    return MappingProxyType(known)


def failed_entries() -> dict[str, Exception]:
    """Entry points that could not be loaded, each with its error."""
    return {name: found for name, found in _entries() if isinstance(found, Exception)}


@functools.cache
def _entries() -> list[tuple[str, dict[str, type[Component]] | Exception]]:
    return list(_load_entries())


def _load_entries() -> Iterator[tuple[str, dict[str, type[Component]] | Exception]]:
    for entry in entry_points(group=ENTRY_POINTS):
        where = f"{entry.name} = {entry.value}"
        yield where, _load_entry(entry, where)


def _load_entry(entry: EntryPoint, where: str) -> dict[str, type[Component]] | Exception:
    """Its kinds, or its error: whatever somebody else's package does wrong must not stop the others."""
    try:
        with redirect_stdout(sys.stderr):  # stdout is the command's result
            return kinds_in(entry.load(), where)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        return error
    except BaseException as error:  # sys.exit and the like
        found = f"{type(error).__name__}: {error}"
        return SpecError(f"{where} fails when it is imported", wanted="component classes", found=found)


def parse_component(data: Any, kinds: Mapping[str, type[Component]]) -> Component:
    """A component from plain data, for use inside pydantic validators."""
    if isinstance(data, Component):
        return data
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        found = repr(data)[:80]
        raise problem_error(Problem((), "a component without a kind", "a mapping with the key 'kind'", found))
    if data["kind"] not in kinds:
        raise unknown_kind(data["kind"], kinds)
    if inspect.isabstract(kinds[data["kind"]]):
        raise problem_error(Problem(("kind",), f"kind {data['kind']!r} cannot be built", "a method `build`", "none"))
    return kinds[data["kind"]].model_validate(data)


def unknown_kind(kind: str, kinds: Mapping[str, type[Component]]) -> Exception:
    broken = "".join(f" The package entry {name} failed to load: {error}." for name, error in failed_entries().items())
    hint = f"{close_hint(kind, kinds) or ''}{broken}".strip() or None
    return problem_error(Problem(("kind",), f"unknown component kind {kind!r}", ", ".join(sorted(kinds)), kind, hint))


# --- what kinds share ---------------------------------------------------------------------------------------------
def expect_rank(what: str, value: Value, *ranks: int) -> None:
    """Refuse a value whose number of axes is another."""
    if len(value.type.shape) not in ranks:
        names = {0: "a scalar", 1: "a vector", 2: "a sequence [frames, channels]"}
        wanted = " or ".join(names.get(rank, f"{rank} axes") for rank in ranks)
        raise GraphError(f"{what} cannot read this", wanted=wanted, found=value.type)


def as_rows(g: GraphBuilder, value: Value) -> Value:
    """A vector [c] as one frame [1, c]; a sequence as it is."""
    return value if len(value.type.shape) == 2 else reshape(g, value, (1, *value.type.shape))


def reshape(g: GraphBuilder, value: Value, shape: tuple[int, ...]) -> Value:
    """The same values in another shape; nothing is added where it has that shape."""
    return value if value.type.shape == shape else g.op("reshape", value, shape=shape)


def after_step(g: GraphBuilder, start_step: int, new: Value, old: Value) -> Value:
    """`new` from the session's step `start_step` on, `old` before it: state that start-up frames must not touch."""
    if start_step == 0:
        return new
    started = g.op("greater_equal", g.position(), g.op("full", shape=(), value=start_step, dtype="i32"))
    return g.op("select", started, new, old)  # type: ignore[no-any-return]


def concat(g: GraphBuilder, values: list[Value], axis: int) -> Value:
    """Any number of values along an axis; the operator takes six at a time."""
    while len(values) > 1:
        groups = [values[i : i + 6] for i in range(0, len(values), 6)]
        values = [group[0] if len(group) == 1 else g.op("concat", *group, axis=axis) for group in groups]
    return values[0]
