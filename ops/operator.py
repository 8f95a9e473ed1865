"""How an operator is declared: once, in one class, with everything that the rest of WPK asks of it.

    @operator("layer_norm", version=1)
    class LayerNorm(Operator):
        x = operand("... d")
        weight = operand("d", weight=True)
        eps: float = attr(1e-5)

        def results(self, dims): return (dims.like("x"),)
        def meaning(self, x, weight): ...                # NumPy, float64, one session
        def cost(self, x, weight): ...

An operator is either *expanded* into simpler ones (`expand`), or executed by a *body* per target. A body works on
the 128-byte payload; the operator says how it is filled (`parameters`, `parts`) and, from those parameters alone,
which are safe (`legal`) and which bytes a body touches (`extents`, `part_writes`): static checks need only bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

from numpy.typing import NDArray

from wpk.ir.errors import GraphError, OperatorError
from wpk.ir.graph import Attribute, GraphBuilder
from wpk.ir.types import DType, Type
from wpk.ops.digest import source_digest
from wpk.ops.legal import Domain, DTypes
from wpk.ops.payload import OPERANDS, PARAMETERS

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """One input: a shape pattern (`"... t c"`; equal letters are equal sizes), dtypes, and whether it is a weight."""

    pattern: str
    dtypes: frozenset[DType]
    weight: bool | None  # True: must be a weight; False: must be a session value; None: either
    optional: bool
    variadic: bool
    name: str = ""


def operand(
    pattern: str,
    *,
    dtypes: frozenset[DType] | DType = DType.F32,
    weight: bool | None = None,
    optional: bool = False,
    variadic: bool = False,
) -> Any:
    """Declare an input. `optional` and `variadic` ones come last."""
    dtypes = frozenset({dtypes}) if isinstance(dtypes, DType) else dtypes
    return Operand(pattern, dtypes, weight, optional, variadic)


def attr(default: Any = dataclasses.MISSING) -> Any:
    """Declare an attribute: a number, string, flag or tuple of numbers, with an optional default."""
    return dataclasses.field(default=default) if default is not dataclasses.MISSING else dataclasses.field()


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one session's application, weights counted once per cohort.

    flops by precision of the products ("f32", "tf32", "bf16"); bytes by kind. gathered: of a table among the weights,
    those that the session itself looks up.
    """

    flops: Mapping[str, int]
    weight_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one session's operand that a task touches: `rows` runs of `length`, `pitch` bytes apart."""

    offset: int
    length: int
    rows: int = 1
    pitch: int = 0

    @classmethod
    def columns(cls, n: int, block: int, lo: int, hi: int, *, rows: int = 1, width: int = 4) -> Extent:
        """What parts [lo, hi) of `block` columns each are of [rows, n]; width: bytes of an element."""
        first, last = lo * block, min(hi * block, n)
        return cls(width * first, width * (last - first), rows, width * n)

    @property
    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.pitch + self.length


class Dims:
    """The sizes that matching the operand patterns has bound."""

    def __init__(self, types: Mapping[str, Type], bound: Mapping[str, int]) -> None:
        self.types, self.bound = types, bound

    def __getitem__(self, letter: str) -> int:
        return self.bound[letter]

    def like(self, name: str) -> Type:
        """The type of the operand of that name."""
        return self.types[name]


class Operator:
    """Base of all operators; instances hold the attributes of one application."""

    name: ClassVar[str]
    version: ClassVar[int]
    operands: ClassVar[tuple[Operand, ...]] = ()
    result_count: ClassVar[int] = 1
    layout_only: ClassVar[bool] = False  # moves values and computes none: weights keep their dtype through it
    state_operands: ClassVar[tuple[int, ...]] = ()  # read (and written) in place: caches, recurrent state
    alias: ClassVar[Mapping[int, int]] = {}  # result -> operand whose storage it must share
    inplace: ClassVar[Mapping[int, int]] = {}  # result -> operand whose storage it may share, element by element
    fused: ClassVar[str | None] = None  # where this is the epilogue of a tiled product: the operator that is both
    task_slots: ClassVar[int] = 1 << 16  # most slots that a task may cover: what a GPU's tile of a product holds
    semantic_parameters: ClassVar[Mapping[int, Domain]] = {}  # words that change no byte touched, and what they may be

    # --- meaning ------------------------------------------------------------------------------------------------
    def results(self, dims: Dims) -> tuple[Type, ...]:
        """Result types from the bound sizes; raise `GraphError` for what the patterns cannot say."""
        raise NotImplementedError(self.name)

    def meaning(self, *inputs: Any, **named: Any) -> Any:
        """One session's result in NumPy, float64 for floats; the reference that bodies are checked against."""
        raise NotImplementedError(self.name)

    def cost(self, *types: Type) -> Cost:
        """Work of one session; by default element-wise: one FLOP a result element."""
        out = self.infer(types)
        return Cost({"f32": sum(t.size for t in out)}, activation_bytes=sum(t.bytes for t in (*types, *out)))

    # --- lowering -----------------------------------------------------------------------------------------------
    def expand(self, g: GraphBuilder, *inputs: Any, **named: Any) -> Any:
        """Simpler operators that mean the same, or None where a body executes this one."""
        return None

    def view(self, *types: Type) -> int | None:
        """Byte offset of the result in operand 0 where it is but another reading of the same bytes, else None."""
        return None

    # --- execution ----------------------------------------------------------------------------------------------
    def parts(self, *types: Type) -> int:
        """Pieces of one session's work that may run on different blocks."""
        return 1

    def slot_grain(self) -> int | None:
        """Sessions that a part takes in one piece of work whose time does not depend on how many there are, up to so
        many; None where each session's work is its own."""
        return None

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        """Up to nine numbers for the payload, in the order in which the body and `extents` read them."""
        raise NotImplementedError(self.name)

    def places(self, count: int) -> tuple[int, ...]:
        """Payload operand index of each of `count` inputs, then of each result; results come last."""
        return tuple(range(count + self.result_count))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        """Bytes of each operand (inputs, then results) that a body touches, from the parameters alone.

        `operands` is the payload's count; entries of absent operands are ignored.
        """
        raise NotImplementedError(cls.name)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        """What a payload wants that a body could not execute safely, or None (see `wpk.ops.legal`).

        Every operator with a body says so, of all nine words (floats as their bits) and of which of the `operands`
        are there: bodies trust their payload, and `extents` shows only what it uses.
        """
        raise NotImplementedError(f"{cls.name}: an operator with a body declares which payloads are legal")

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        """The dtype that each payload operand must have where they have `given`: by default, results f32."""
        return (*given[: len(given) - cls.result_count], *[DType.F32] * cls.result_count)

    @classmethod
    def part_writes(
        cls, parameters: Sequence[int], operand: int, lo: int, hi: int
    ) -> Extent | Sequence[Extent] | None:  # fmt: skip
        """Bytes of a result that parts [lo, hi) write, in one or several pieces, or no piece where they write none;
        None where a part writes the whole result."""
        return None

    @classmethod
    def writes(cls, operands: int) -> tuple[int, ...]:
        """Payload operand indices that are written: the results, which come last."""
        return tuple(range(operands - cls.result_count, operands))

    # --- derived ------------------------------------------------------------------------------------------------
    def infer(self, types: Sequence[Type], attrs: Mapping[str, Attribute] | None = None) -> tuple[Type, ...]:
        """Result types, or a `GraphError` that names the operand."""
        return self.results(self.match(types))

    def match(self, types: Sequence[Type]) -> Dims:
        """Bind the operand patterns to types."""
        bound: dict[str, int] = {}
        named: dict[str, Type] = {}
        declared = self.operands_for(len(types))
        for op, found in zip(declared, types, strict=True):
            if found.dtype not in op.dtypes:
                wanted = "|".join(sorted(d.value for d in op.dtypes))
                raise GraphError(f"{self.name}: operand {op.name!r} has the wrong dtype", wanted=wanted, found=found)
            _bind(self.name, op, found, bound)
            named[op.name] = found
        return Dims(named, bound)

    @classmethod
    def operands_for(cls, count: int) -> tuple[Operand, ...]:
        """The declared operands of an application to `count` inputs."""
        least = sum(not (o.optional or o.variadic) for o in cls.operands)
        variadic = next((o for o in cls.operands if o.variadic), None)
        if count < least or (variadic is None and count > len(cls.operands)):
            wanted = f"{least} to {len(cls.operands)}" if least < len(cls.operands) else least
            raise GraphError(f"{cls.name}: wrong number of operands", wanted=wanted, found=count)
        if variadic is None:
            return cls.operands[:count]
        fixed = tuple(o for o in cls.operands if not o.variadic)
        many = (dataclasses.replace(variadic, name=f"{variadic.name}{i}") for i in range(count - len(fixed)))
        return (*fixed, *many)


T = TypeVar("T", bound=Operator)
_CHECKED: dict[Any, Any] = {int: int, float: (int, float), bool: bool, str: str}


@dataclass_transform(field_specifiers=(attr,), frozen_default=True)
def operator(name: str, *, version: int) -> Callable[[type[T]], type[T]]:
    """Class decorator: collect operands and attributes, freeze, and enter the library."""

    def declare(cls: type[T]) -> type[T]:
        found = [(k, v) for k, v in vars(cls).items() if isinstance(v, Operand)]
        cls.operands = tuple(dataclasses.replace(v, name=k) for k, v in found)
        for k, _ in found:
            delattr(cls, k)
        cls.name, cls.version = name, version
        made = dataclass(frozen=True)(cls)
        LIBRARY.add(made)
        return made

    return declare


@dataclass(frozen=True)
class Body:
    """A target's implementation: a Python function to be compiled by that target's kernel.

    CPU signature: (record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch) -> None, all i64; addresses are
    bytes; `scratch` is 64 KiB of memory private to the thread.
    """

    function: Callable[..., None]
    targets: frozenset[str]


class OperatorLibrary:
    """All operators, every version side by side."""

    def __init__(self) -> None:
        self._operators: dict[tuple[str, int], type[Operator]] = {}
        self._bodies: dict[tuple[str, int], list[Body]] = {}

    def add(self, cls: type[Operator]) -> None:
        key = (cls.name, cls.version)
        if key in self._operators:
            raise OperatorError(f"operator {cls.name}@{cls.version} is declared twice", wanted="one", found=cls)
        self._operators[key] = cls

    def add_body(self, cls: type[Operator], body: Body) -> None:
        self._bodies.setdefault((cls.name, cls.version), []).append(body)

    def __iter__(self) -> typing.Iterator[type[Operator]]:
        return iter(self._operators[k] for k in sorted(self._operators))

    def versions(self, name: str) -> list[int]:
        return sorted(v for n, v in self._operators if n == name)

    def get(self, name: str, version: int | None = None) -> type[Operator]:
        """The operator of that version, the newest where none is named."""
        versions = self.versions(name)
        if not versions:
            close = sorted({n for n, _ in self._operators if n[:3] == name[:3]})
            hint = f"Close names: {', '.join(close)}." if close else "`wpk ops list` shows all."
            raise OperatorError(f"no operator {name!r}", wanted="an operator of the library", found=name, hint=hint)
        version = versions[-1] if version is None else version
        if version not in versions:
            raise OperatorError(
                f"operator {name!r} has no version {version}",
                wanted=f"{name}@{version}",
                found=", ".join(f"{name}@{v}" for v in versions),
                hint="Rebuild the profile, or install the wpk that it was built with.",
            )
        return self._operators[name, version]

    def body(self, name: str, version: int, target: str) -> Body | None:
        """The body for a kind of target ("cpu", "cuda"), or None."""
        for body in self._bodies.get((name, version), []):
            if target in body.targets:
                return body
        return None

    def targets(self, name: str, version: int) -> list[str]:
        return sorted({t for b in self._bodies.get((name, version), []) for t in b.targets})

    def digest(self, name: str, version: int, target: str | None = None) -> str:
        """SHA-256 of all that decides what an operator computes: its class, its bodies and what they refer to.

        target: "cpu" leaves out bodies of other kinds of target; a GPU may run a CPU's body, so it counts there too.
        """
        cls = self.get(name, version)
        bodies = self._bodies.get((name, version), [])
        counted = [b.function for b in bodies if target != "cpu" or "cpu" in b.targets]
        return source_digest(f"{name}@{version}", cls.__mro__[: cls.__mro__.index(Operator)], counted)


LIBRARY = OperatorLibrary()


def body(
    cls: type[Operator], *, targets: Sequence[str] = ("cpu",)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as an operator's body for those kinds of target."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        LIBRARY.add_body(cls, Body(function, frozenset(targets)))
        return function

    return register


@dataclass(frozen=True)
class Resolved:
    """An operator version as a `GraphBuilder` sees it."""

    cls: type[Operator]

    @property
    def name(self) -> str:
        return self.cls.name

    @property
    def version(self) -> int:
        return self.cls.version

    @property
    def attributes(self) -> Collection[str]:
        return _attribute_names(self.cls)  # type: ignore[arg-type, unused-ignore]  # mypy: a class is no Hashable

    def complete(self, attrs: Mapping[str, Attribute]) -> dict[str, Attribute]:
        """Attributes with defaults filled in and types checked."""
        return attributes(make(self.cls, attrs))

    def infer(self, types: Sequence[Type], attrs: Mapping[str, Attribute]) -> tuple[Type, ...]:
        return make(self.cls, attrs).infer(types)

    def check_weights(self, weights: Sequence[bool]) -> None:
        for op, is_weight in zip(self.cls.operands_for(len(weights)), weights, strict=True):
            if op.weight is not None and op.weight != is_weight and not all(weights):
                raise GraphError(
                    f"{self.name}: operand {op.name!r}",
                    wanted="a weight" if op.weight else "a session value",
                    found="a weight" if is_weight else "a session value",
                )


@functools.cache
def _attribute_types(cls: type[Operator]) -> dict[str, Any]:
    """Evaluated annotations, once a class: they cost more than all the rest of `make`."""
    return typing.get_type_hints(cls)


@functools.cache
def _attribute_names(cls: type[Operator]) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]


def make(cls: type[Operator], attrs: Mapping[str, Attribute]) -> Operator:
    """An instance with these attributes; unknown, missing and mistyped ones are refused by name."""
    hints = _attribute_types(cls)  # type: ignore[arg-type, unused-ignore]  # mypy: a class is no Hashable
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(attrs) - set(fields))
    missing = sorted(n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in attrs)
    if unknown or missing:
        raise GraphError(
            f"{cls.name}: attributes {'unknown' if unknown else 'missing'}: {', '.join(unknown or missing)}",
            wanted=", ".join(fields) or "no attributes",
            found=", ".join(attrs) or "none",
        )
    clean: dict[str, Any] = {}
    for key, value in attrs.items():
        hint = hints[key]
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if hint in _CHECKED and (not isinstance(value, _CHECKED[hint]) or (hint is int and isinstance(value, bool))):
            raise GraphError(f"{cls.name}: attribute {key!r}", wanted=hint.__name__, found=repr(value))
        clean[key] = tuple(value) if isinstance(value, list | tuple) else value
    return cls(**clean)


def attributes(op: Operator) -> dict[str, Attribute]:
    """The attributes of an instance."""
    return {f.name: getattr(op, f.name) for f in dataclasses.fields(op)}  # type: ignore[arg-type]


def _bind(name: str, op: Operand, found: Type, bound: dict[str, int]) -> None:
    letters = op.pattern.split()
    open_ended = bool(letters) and letters[0] == "..."
    letters = letters[1:] if open_ended else letters
    shape = found.shape[len(found.shape) - len(letters) :] if open_ended else found.shape
    if len(shape) != len(letters):
        raise GraphError(f"{name}: operand {op.name!r} has the wrong rank", wanted=f"[{op.pattern}]", found=found)
    for letter, size in zip(letters, shape, strict=True):
        wanted = int(letter) if letter.isdigit() else bound.setdefault(letter, size)
        if wanted != size:
            raise GraphError(
                f"{name}: operand {op.name!r} does not fit",
                wanted=f"{letter} = {wanted} in [{op.pattern}]",
                found=found,
            )


assert OPERANDS == 7 and PARAMETERS == 9  # `places`, `extents` and the bodies are written for these
__all__ = [
    "LIBRARY", "Array", "Body", "Cost", "Dims", "Extent", "Operand", "Operator", "OperatorLibrary", "Resolved",
    "attr", "attributes", "body", "make", "operand", "operator",
]  # fmt: skip
