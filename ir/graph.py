"""The tensor IR: one step of one session, as a list of operator applications in single assignment.

A `Graph` is immutable. A `GraphBuilder` makes one. Values are typed per session; weights and what is computed
from weights alone have no session axis (`Value.weight`) and are evaluated when a profile is loaded. State is
declared with its type, its initial image and its update rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from wpk.ir.errors import GraphError
from wpk.ir.types import Type, boolean, i32

POSITION = "position"  # the state that counts the steps of a session, or of a component: NAME.position
Attribute = int | float | str | bool | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A node's result, an input, a weight or a state as read. `id` is unique in its graph."""

    id: int
    type: Type
    weight: bool = False

    def __str__(self) -> str:
        return f"%{self.id}"


@dataclass(frozen=True, slots=True)
class Node:
    """One application of an operator."""

    op: str
    version: int
    inputs: tuple[Value, ...]
    attrs: tuple[tuple[str, Attribute], ...]
    outputs: tuple[Value, ...]
    label: str = ""  # where it comes from: component and tensor path, for people

    @property
    def attributes(self) -> dict[str, Attribute]:
        return dict(self.attrs)

    @property
    def weight(self) -> bool:
        """True when it is computed from weights alone, hence once per load."""
        return all(v.weight for v in self.inputs)


class StateKind(StrEnum):
    """Update rules. REGISTER is overwritten; RING keeps the last n rows; CACHE is appended up to the context."""

    REGISTER = "register"
    RING = "ring"
    CACHE = "cache"


@dataclass(frozen=True, slots=True)
class State:
    """What a session keeps between steps.

    value: the state as it stands at the start of the step; rows are the leading axis of RING and CACHE, oldest
    first. update: the value that replaces it (REGISTER), the rows appended (RING), or the cache after its append
    (CACHE). initial: a weight value with the image a fresh session starts from; None is zeros.
    """

    name: str
    kind: StateKind
    value: Value
    update: Value | None = None
    initial: Value | None = None


@dataclass(frozen=True, slots=True)
class Port:
    """A named input or output of one step."""

    name: str
    value: Value


@dataclass(frozen=True)
class Graph:
    """One step of one session."""

    name: str
    inputs: tuple[Port, ...] = ()
    weights: tuple[Port, ...] = ()
    states: tuple[State, ...] = ()
    nodes: tuple[Node, ...] = ()
    outputs: tuple[Port, ...] = ()

    def producers(self) -> dict[int, Node]:
        """Value id -> the node that makes it."""
        return {v.id: node for node in self.nodes for v in node.outputs}

    def __str__(self) -> str:
        from wpk.ir.text import print_graph

        return print_graph(self)


class ResolvedOperator(Protocol):
    """What a builder needs of an operator; `wpk.ops` provides it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def attributes(self) -> Collection[str]: ...
    def infer(self, types: Sequence[Type], attrs: Mapping[str, Attribute]) -> tuple[Type, ...]: ...
    def complete(self, attrs: Mapping[str, Attribute]) -> dict[str, Attribute]: ...
    def check_weights(self, weights: Sequence[bool]) -> None: ...


class Library(Protocol):
    """Operators by name; which version a bare name means was settled by the model's requirements."""

    def resolve(self, name: str, version: int | None = None) -> ResolvedOperator: ...


@dataclass
class _StateDraft:
    kind: StateKind
    value: Value
    update: Value | None = None
    initial: Value | None = None


@dataclass
class GraphBuilder:
    """Builds a `Graph`. Every mistake is reported with the label of the place it was made in."""

    name: str
    library: Library
    context: int = 1  # rows that caches have room for,
    behind: Mapping[str, int] = field(default_factory=dict)  # and those of a component that starts with steps behind it
    _next: int = 0
    _scope: list[str] = field(default_factory=list)
    _inputs: dict[str, Value] = field(default_factory=dict)
    _weights: dict[str, Value] = field(default_factory=dict)
    _states: dict[str, _StateDraft] = field(default_factory=dict)
    _nodes: list[Node] = field(default_factory=list)
    _outputs: dict[str, Value] = field(default_factory=dict)
    _products: str | None = None
    _known: dict[int, Value] = field(default_factory=dict)

    # --- leaves -------------------------------------------------------------------------------------------------
    def input(self, name: str, type: Type) -> Value:
        return self._declare(self._inputs, name, type, "input")

    def weight(self, name: str, type: Type) -> Value:
        """A tensor of the checkpoint. Asking for one name twice gives one value."""
        if name in self._weights:
            if self._weights[name].type != type:
                raise self._error(f"weight {name!r} is declared twice", self._weights[name].type, type)
            return self._weights[name]
        return self._declare(self._weights, name, type, "weight", weight=True)

    def output(self, name: str, value: Value) -> None:
        if name in self._outputs:
            raise self._error(f"output {name!r} is declared twice", "distinct names", name)
        self._own(value)
        if value.weight:
            raise self._error(f"output {name!r} does not depend on the session", "a session value", "a weight")
        self._outputs[name] = value

    # --- state --------------------------------------------------------------------------------------------------
    def register(self, name: str, type: Type, initial: Value | None = None) -> Value:
        """A state that `update` overwrites."""
        return self.state(name, StateKind.REGISTER, type, initial)

    def ring(self, name: str, rows: int, type: Type, initial: Value | None = None) -> Value:
        """The last `rows` rows of `type`, oldest first, as [rows, *type.shape]; `update` appends rows."""
        return self.state(name, StateKind.RING, Type(type.dtype, (rows, *type.shape)), initial)

    def cache(self, name: str, type: Type, initial: Value | None = None) -> Value:
        """Rows kept from the session's start, as [context, *type.shape]; `append` writes the next one.

        The rows are more where the component, the name up to its first dot, has steps behind it at the start.
        """
        rows = self.context + self.behind.get(name.partition(".")[0], 0)
        return self.state(name, StateKind.CACHE, Type(type.dtype, (rows, *type.shape)), initial)

    def state(self, name: str, kind: StateKind, type: Type, initial: Value | None = None) -> Value:
        """Declare a state of a given whole type; components use `register`, `ring` and `cache`."""
        if name in self._states:
            raise self._error(f"state {name!r} is declared twice", "distinct names", name)
        if initial is not None:
            self._own(initial)
            if not initial.weight or initial.type != type:
                raise self._error(f"initial image of state {name!r}", f"a weight {type}", initial.type)
        self._states[name] = _StateDraft(kind, self._new(type), None, initial)
        return self._states[name].value

    def replace(self, name: str, value: Value) -> None:
        """Say what a state of any kind is after the step; for passes, which have settled the update rules."""
        draft = self._draft(name)
        self._own(value)
        if value.type != draft.value.type and draft.kind is not StateKind.RING:
            raise self._error(f"update of state {name!r}", draft.value.type, value.type)
        draft.update = value

    def update(self, name: str, value: Value) -> None:
        """Say what a register becomes, or what rows a ring takes in, at the end of the step."""
        draft = self._draft(name)
        self._own(value)
        held = draft.value.type
        if draft.kind is StateKind.REGISTER and value.type != held:
            raise self._error(f"update of register {name!r}", held, value.type)
        if draft.kind is StateKind.RING:
            row = Type(held.dtype, held.shape[1:])
            if value.type.dtype != held.dtype or value.type.shape[1:] != row.shape or not value.type.shape:
                raise self._error(f"update of ring {name!r}", f"{held.dtype.value}[n,{row}]", value.type)
        if draft.kind is StateKind.CACHE:
            raise self._error(f"cache {name!r} is updated by append", "append(name, row)", "update")
        if draft.update is not None:
            raise self._error(f"state {name!r} is updated twice in one step", "one update", "two")
        draft.update = value

    def append(self, name: str, row: Value, component: str | None = None) -> Value:
        """Append one row to a cache at the session's position, or the component's; the cache with that row in it."""
        draft = self._draft(name)
        if draft.kind is not StateKind.CACHE:
            raise self._error(f"state {name!r} is no cache", StateKind.CACHE.value, draft.kind.value)
        held = draft.value.type
        if row.type != Type(held.dtype, held.shape[1:]):
            raise self._error(f"append to cache {name!r}", Type(held.dtype, held.shape[1:]), row.type)
        if draft.update is not None:
            raise self._error(f"cache {name!r} is appended to twice in one step", "one row a step", "two")
        draft.update = self.op("cache_append", draft.value, row, self.position(component))
        return draft.update

    def position(self, component: str | None = None) -> Value:
        """Steps that this session has made since it joined, i32 scalar; 0 in the first one.

        component: count the steps of that component, which may have some behind it when a session joins.
        """
        name = POSITION if component is None else f"{component}.{POSITION}"
        if name not in self._states:
            value = self.register(name, i32())
            with self.scope(None):
                self._draft(name).update = self.op("increment", value, by=1)
        return self._states[name].value

    # --- operators ----------------------------------------------------------------------------------------------
    def op(self, op: str, *inputs: Value, **attrs: Attribute) -> Any:
        """Apply an operator by name. One `Value`, or a tuple where it has several results."""
        operator = self.library.resolve(op)
        if self._products is not None and "products" in operator.attributes:
            attrs = {"products": self._products, **attrs}
        return self.apply(operator, inputs, attrs)

    def apply(self, operator: ResolvedOperator, inputs: Sequence[Value], attrs: Mapping[str, Attribute]) -> Any:
        """Apply exactly this version of an operator: for passes, which copy what was chosen before."""
        inputs = tuple(inputs)
        try:
            complete = operator.complete(attrs)
            for value in inputs:
                self._own(value)
            operator.check_weights([v.weight for v in inputs])
            types = operator.infer([v.type for v in inputs], complete)
        except GraphError as error:
            raise self._placed(error) from None
        weight = all(v.weight for v in inputs)
        outputs = tuple(self._new(t, weight) for t in types)
        node = Node(operator.name, operator.version, inputs, tuple(sorted(complete.items())), outputs, self.label)
        self._nodes.append(node)
        return outputs[0] if len(outputs) == 1 else outputs

    def loop(
        self,
        bound: int,
        carried: Sequence[Value],
        body: Callable[[int, tuple[Value, ...]], tuple[Sequence[Value], Value]],
    ) -> tuple[Value, ...]:
        """A bounded loop, unrolled; each session is masked by its own predicate.

        body(i, carried) -> (next, proceed): `proceed` is a bool scalar; once a session's is false its carried
        values stay as they are. The values after `bound` rounds are returned.
        """
        if bound < 1:
            raise self._error("a loop needs a bound", ">= 1", bound)
        state, active = tuple(carried), None
        for i in range(bound):
            following, proceed = body(i, state)
            if proceed.type != boolean():
                raise self._error("a loop's predicate", boolean(), proceed.type)
            if len(following) != len(state):
                raise self._error("a loop's carried values", len(state), len(following))
            active = proceed if active is None else self.op("logical_and", active, proceed)
            state = tuple(self.op("select", active, new, old) for new, old in zip(following, state, strict=True))
        return state

    # --- scopes and result --------------------------------------------------------------------------------------
    def scope(self, name: str | None) -> _Scope:
        """`with builder.scope("encoder.0"):` labels what is built inside; None starts from the top."""
        return _Scope(self, [*self._scope, name] if name is not None else [])

    def labelled(self, label: str) -> _Scope:
        """Build under exactly this label: for passes, which keep the labels of what they rewrite."""
        return _Scope(self, [label] if label else [])

    @contextmanager
    def products(self, precision: str) -> Iterator[None]:
        """`with builder.products("tf32"):` is the attribute `products` of operators applied by name that have it."""
        saved, self._products = self._products, precision
        try:
            yield
        finally:
            self._products = saved

    @property
    def label(self) -> str:
        return ".".join(self._scope)

    def build(self) -> Graph:
        if not self._outputs and not self._states:
            raise self._error("a graph that does nothing", "an output or a state", "neither")
        for name, draft in self._states.items():
            if draft.update is None:
                raise self._error(f"state {name!r} is never updated", "update or append", "neither")
        return Graph(
            name=self.name,
            inputs=_ports(self._inputs),
            weights=_ports(self._weights),
            states=tuple(State(n, d.kind, d.value, d.update, d.initial) for n, d in self._states.items()),
            nodes=tuple(self._nodes),
            outputs=_ports(self._outputs),
        )

    # --- helpers ------------------------------------------------------------------------------------------------
    def _new(self, type: Type, weight: bool = False) -> Value:
        value = Value(self._next, type, weight)
        self._known[self._next] = value
        self._next += 1
        return value

    def _declare(self, table: dict[str, Value], name: str, type: Type, what: str, weight: bool = False) -> Value:
        if name in table:
            raise self._error(f"{what} {name!r} is declared twice", "distinct names", name)
        table[name] = self._new(type, weight)
        return table[name]

    def _draft(self, name: str) -> _StateDraft:
        if name not in self._states:
            raise self._error(f"no state {name!r}", sorted(self._states) or "a declared state", name)
        return self._states[name]

    def _own(self, value: Value) -> None:
        if self._known.get(value.id) is not value:
            raise self._error(f"{value} is not a value of this graph", f"a value of {self.name!r}", value)

    def _error(self, message: str, wanted: Any, found: Any) -> GraphError:
        return self._placed(GraphError(message, wanted=wanted, found=found))

    def _placed(self, error: GraphError) -> GraphError:
        where = f"{self.name}{': ' + self.label if self.label else ''}"
        return GraphError(f"{where}: {error.message}", wanted=error.wanted, found=error.found, hint=error.hint)


class _Scope:
    def __init__(self, builder: GraphBuilder, names: list[str]) -> None:
        self.builder, self.names = builder, names

    def __enter__(self) -> None:
        self.saved, self.builder._scope = self.builder._scope, self.names

    def __exit__(self, *exc: object) -> None:
        self.builder._scope = self.saved


def _ports(table: Mapping[str, Value]) -> tuple[Port, ...]:
    return tuple(Port(name, value) for name, value in table.items())
