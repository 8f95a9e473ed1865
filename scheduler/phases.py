"""From a beat's graph to phases: storages, views, where state lives, and which weights are made at load.

A storage is one range of memory a slot has (or, for weights, the cohort has). A `Ref` is a place in a storage: a
view (`reshape`, a contiguous `slice`) is a ref, not a phase. So is what is joined of values that were written side by
side (`joins`): the only storages that several phases write, each its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wpk.ir.errors import CompileError
from wpk.ir.graph import Graph, Node, Port, Value
from wpk.ir.types import Type
from wpk.ops.operator import LIBRARY, Operator, make
from wpk.ops.payload import PARAMETERS
from wpk.scheduler.joins import Joins
from wpk.scheduler.program import Role
from wpk.scheduler.views import operator_of, overwritten_values, view_start, viewed


@dataclass(frozen=True, slots=True)
class Storage:
    """A range of memory with a meaning."""

    index: int
    name: str
    role: Role
    type: Type


@dataclass(frozen=True, slots=True)
class Ref:
    """`start` bytes into a storage."""

    storage: int
    start: int = 0


@dataclass(frozen=True)
class Phase:
    """One operator for every session of the cohort; `after` are phases that must be in earlier waves."""

    index: int
    operator: Operator
    types: tuple[Type, ...]  # of the inputs
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    label: str
    after: frozenset[int] = frozenset()
    touches_state: bool = False  # reaches into each session's state for some words instead of streaming it

    @property
    def places(self) -> tuple[tuple[int, Ref, int], ...]:
        """(payload operand index, ref, bytes) for inputs, then results."""
        sizes = [t.bytes for t in (*self.types, *self.operator.infer(self.types))]
        return tuple(zip(self.operator.places(len(self.inputs)), (*self.inputs, *self.outputs), sizes, strict=True))

    @property
    def parts(self) -> int:
        return self.operator.parts(*self.types)

    @property
    def parameters(self) -> tuple[int | float, ...]:
        found = self.operator.parameters(*self.types)
        if len(found) > PARAMETERS:
            raise CompileError(f"{self.operator.name} needs too many parameters", wanted=PARAMETERS, found=len(found))
        return found


@dataclass(frozen=True)
class Lowered:
    """Phases in program order, with their storages, ports and the graph that makes the weights at load."""

    phases: tuple[Phase, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[tuple[str, Ref], ...]
    outputs: tuple[tuple[str, Ref], ...]
    load: Graph


@dataclass
class _Lowering:
    graph: Graph
    storages: list[Storage] = field(default_factory=list)
    refs: dict[int, Ref] = field(default_factory=dict)
    bound_by: dict[int, int | None] = field(default_factory=dict)  # value -> the last writer of its storage then
    outputs: dict[str, Ref] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    writers: dict[int, int] = field(default_factory=dict)  # storage -> phase that wrote it last
    readers: dict[int, list[int]] = field(default_factory=dict)  # storage -> phases that read its present content
    joined: dict[int, Ref] = field(default_factory=dict)  # result of a join -> where it lies
    pieces: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # of its storage: first, end, writer

    def storage(self, name: str, role: Role, type: Type) -> Ref:
        self.storages.append(Storage(len(self.storages), name, role, type))
        return Ref(len(self.storages) - 1)

    def bind(self, value: Value, ref: Ref) -> None:
        """From now on the value is what lies there; outputs of the model that show it are made at once."""
        self.refs[value.id], self.bound_by[value.id] = ref, self.writers.get(ref.storage)
        for port in self.graph.outputs:
            if port.value.id == value.id:
                self.outputs[port.name] = _output(self, port)

    def read(self, value: Value, reader: str) -> Ref:
        """Where a value lies; `CompileError` where it has been overwritten in place since."""
        if value.id not in self.refs and value.weight:
            names = {p.value.id: p.name for p in self.graph.weights}
            self.refs[value.id] = self.storage(names.get(value.id, str(value)), Role.WEIGHT, value.type)
        ref = self.refs[value.id]
        writer = self.writers.get(ref.storage)
        if writer is not None and writer != self.bound_by[value.id]:
            raise CompileError(
                f"{reader}: reads {value} after it was overwritten in place",
                wanted="a read before that", found=self.phases[writer].label,
                hint="Read a cache before a row is appended to it, or as what `append` returns.",
            )  # fmt: skip
        return ref

    def phase(self, operator: Operator, inputs: tuple[Value, ...], refs: tuple[Ref, ...], outputs: tuple[Ref, ...],
              label: str) -> Phase:  # fmt: skip
        index, types = len(self.phases), tuple(v.type for v in inputs)
        after = {self.writers[r.storage] for r in refs if r.storage in self.writers}
        for ref, type in zip(refs, types, strict=True):
            end = ref.start + type.bytes
            after |= {i for lo, hi, i in self.pieces.get(ref.storage, ()) if lo < end and ref.start < hi}
        for ref, type in zip(outputs, operator.infer(types), strict=True):
            if ref.storage in self.pieces:
                self.pieces[ref.storage].append((ref.start, ref.start + type.bytes, index))
        for ref in outputs:
            # Overwriting: after whoever wrote it and all who read what it held.
            after |= {self.writers[ref.storage]} if ref.storage in self.writers else set()
            after |= set(self.readers.get(ref.storage, []))
        for ref in refs:
            self.readers.setdefault(ref.storage, []).append(index)
        for ref in outputs:
            if ref.storage not in self.pieces:
                self.writers[ref.storage] = index
            self.readers[ref.storage] = []
        of_state = any(self.storages[ref.storage].role is Role.STATE for ref in (*refs, *outputs))
        touches = of_state and not _streams_state(operator, types)
        made = Phase(index, operator, types, refs, outputs, label, frozenset(after), touches)
        self.phases.append(made)
        return made


def _streams_state(operator: Operator, types: tuple[Type, ...]) -> bool:
    """Whether an operator moves all of its state operands: a recurrence or attention, not a row written to a cache."""
    held = sum(types[i].bytes for i in operator.state_operands)
    return held > 0 and operator.cost(*types).state_bytes >= held


def lower(graph: Graph) -> Lowered:
    """Assign storages and turn nodes into phases."""
    low = _Lowering(graph)
    for port in graph.inputs:
        low.bind(port.value, low.storage(port.name, Role.INPUT, port.value.type))
    for state in graph.states:
        low.bind(state.value, low.storage(state.name, Role.STATE, state.value.type))
    found = homes(graph)
    joins = Joins(graph, found)
    for node in graph.nodes:
        if not node.weight:
            _lower_node(low, node, found, joins)
    _commit_states(low)
    inputs = tuple((port.name, low.refs[port.value.id]) for port in graph.inputs)
    outputs = tuple((port.name, low.outputs[port.name]) for port in graph.outputs)
    return Lowered(tuple(low.phases), tuple(low.storages), inputs, outputs, _load_graph(low))


def homes(graph: Graph) -> dict[int, tuple[str, str]]:
    """Value id -> the output port or state that it may be written into directly."""
    producers, overwritten = graph.producers(), overwritten_values(graph)
    found: dict[int, tuple[str, str]] = {}
    wanted = [(port.value, ("output", port.name)) for port in graph.outputs]
    wanted += [(state.update, ("state", state.name)) for state in graph.states if state.update is not None]
    for value, home in wanted:
        source = viewed(value, producers)
        computed = source.id in producers and not source.weight and source.id not in overwritten
        if computed and source.type.bytes == value.type.bytes:
            found.setdefault(source.id, home)
    return found


def _lower_node(low: _Lowering, node: Node, homes: Mapping[int, tuple[str, str]], joins: Joins) -> None:
    operator, label = operator_of(node), node.label or node.op
    refs = tuple(low.read(v, label) for v in node.inputs)
    start = view_start(node)
    if start is not None:
        low.bind(node.outputs[0], replace(refs[0], start=refs[0].start + start))
        return
    if node.outputs[0].id in joins.results:
        low.bind(node.outputs[0], _joined(low, node.outputs[0], homes, joins))
        return
    outputs = []
    for position, value in enumerate(node.outputs):
        if position in operator.alias:
            outputs.append(refs[operator.alias[position]])
            role = low.storages[outputs[-1].storage].role
            if role not in (Role.STATE, Role.TEMPORARY):
                raise CompileError(f"{label}: overwrites its operand", wanted="a state", found=role.name.lower())
        elif value.id in joins.parts:
            part = joins.parts[value.id]
            whole = _joined(low, part.whole, homes, joins)
            outputs.append(replace(whole, start=whole.start + part.start))
        else:
            outputs.append(_home(low, operator, position, node, value, refs, homes))
    low.phase(operator, node.inputs, refs, tuple(outputs), label)
    for value, ref in zip(node.outputs, outputs, strict=True):
        low.bind(value, ref)


def _joined(low: _Lowering, whole: Value, homes: Mapping[int, tuple[str, str]], joins: Joins) -> Ref:
    """Where a joined result lies: in its output port, in a part of another one, or in a temporary."""
    if whole.id in joins.parts:
        outer = joins.parts[whole.id]
        ref = _joined(low, outer.whole, homes, joins)
        return replace(ref, start=ref.start + outer.start)
    if whole.id not in low.joined:
        kind, name = homes.get(whole.id, ("", ""))
        role = Role.OUTPUT if kind == "output" else Role.TEMPORARY
        low.joined[whole.id] = low.storage(name or f"joined.{whole.id}", role, whole.type)
        low.pieces[low.joined[whole.id].storage] = []
    return low.joined[whole.id]


def _home(
    low: _Lowering, operator: Operator, position: int, node: Node, value: Value, refs: tuple[Ref, ...],
    homes: Mapping[int, tuple[str, str]],
) -> Ref:  # fmt: skip
    """Where a result is written: its output port, its state in place, or a temporary."""
    kind, name = homes.get(value.id, ("", ""))
    if kind == "output":
        return low.storage(name, Role.OUTPUT, value.type)
    if kind == "state":
        state = next(s for s in low.graph.states if s.name == name)
        home = low.refs[state.value.id]
        # In place when nobody reads the old state after this node, and this node itself at most element by element.
        own = [i for i, r in enumerate(refs) if r.storage == home.storage]
        fits = [refs[i] == home and node.inputs[i].type.bytes == value.type.bytes for i in own]
        elementwise = not own or own == [operator.inplace.get(position)]
        if elementwise and all(fits) and not _reads_later(low.graph, node, state.value):
            return home
    return low.storage(f"{node.label or node.op}.{value.id}", Role.TEMPORARY, value.type)


def _reads_later(graph: Graph, node: Node, state: Value) -> bool:
    """Whether the state's old content is read after this node, directly or through a view."""
    same, seen = {state.id}, False
    shown = {p.value.id for p in graph.outputs}
    for other in graph.nodes:
        if other.inputs and other.inputs[0].id in same and view_start(other) is not None:
            same.add(other.outputs[0].id)
            if seen and other.outputs[0].id in shown:
                return True
        elif seen and any(v.id in same for v in other.inputs):
            return True
        seen = seen or other is node
    return any(s.update is not None and s.update.id in same for s in graph.states)


def _copy(low: _Lowering, source: Ref, type: Type, target: Ref, label: str) -> None:
    low.phase(make(LIBRARY.get("copy"), {}), (Value(-1, type),), (source,), (target,), label)


def _commit_states(low: _Lowering) -> None:
    """Copy every update that is not yet in its state's storage; all copies read before any state is overwritten."""
    pending: list[tuple[str, Type, Ref, Ref]] = []
    for state in low.graph.states:
        assert state.update is not None
        home, update = low.refs[state.value.id], low.read(state.update, f"{state.name}.commit")
        if update != home:
            pending.append((state.name, state.value.type, update, home))
    overwritten = {home.storage for _, _, _, home in pending}
    for i, (name, type, update, home) in enumerate(pending):
        if update.storage in overwritten:
            # Another state's content, which its own commit will overwrite: take it aside first.
            aside = low.storage(f"{name}.aside", Role.TEMPORARY, type)
            _copy(low, update, type, aside, f"{name}.aside")
            pending[i] = (name, type, aside, home)
    for name, type, update, home in pending:
        _copy(low, update, type, home, f"{name}.commit")


def _output(low: _Lowering, port: Port) -> Ref:
    """The storage of an output port; a copy where its value lies elsewhere."""
    ref = low.refs[port.value.id]
    if low.storages[ref.storage].role is Role.OUTPUT and low.storages[ref.storage].name == port.name:
        return ref
    target = low.storage(port.name, Role.OUTPUT, port.value.type)
    _copy(low, ref, port.value.type, target, f"{port.name}.output")
    return target


def _load_graph(low: _Lowering) -> Graph:
    """Weight nodes that phases or initial images need; outputs `value:STORAGE` and `initial:STATE`."""
    wanted = [
        Port(f"value:{low.refs[v].storage}", value)
        for v, value in _weight_values(low.graph).items()
        if v in low.refs and low.storages[low.refs[v].storage].role is Role.WEIGHT
    ]
    wanted += [Port(f"initial:{s.name}", s.initial) for s in low.graph.states if s.initial is not None]
    needed = {p.value.id for p in wanted}
    nodes = []
    for node in reversed(low.graph.nodes):
        if node.weight and any(v.id in needed for v in node.outputs):
            needed |= {v.id for v in node.inputs}
            nodes.append(node)
    weights = tuple(p for p in low.graph.weights if p.value.id in needed)
    return Graph(f"{low.graph.name}.load", weights=weights, nodes=tuple(reversed(nodes)), outputs=tuple(wanted))


def _weight_values(graph: Graph) -> dict[int, Value]:
    found = {p.value.id: p.value for p in graph.weights}
    found |= {v.id: v for n in graph.nodes if n.weight for v in n.outputs}
    return found
