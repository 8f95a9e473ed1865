"""What the compiler's tests share: a builder, random graphs, and three ways to run a graph beat by beat.

`Meant` runs a graph by its float64 meaning. `Machine` runs phases on arenas of float64, wave by wave and, inside a
wave, in the reverse of the program's order, so that what is not a dependence shows. `Executed` runs the program's
bytes on the CPU kernel. All three take and give the same arrays, so that any one can be compared with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from wpk.ir.graph import Graph, GraphBuilder, Node, Value
from wpk.ir.types import DType, Type, bf16, f32
from wpk.kernel.control import set_bit
from wpk.kernel.cpu import CpuKernel
from wpk.ops.evaluate import Reference, evaluate
from wpk.ops.operator import Array
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.ops.tiles import least_shares
from wpk.registry.loading import fill_arenas
from wpk.registry.ports import port_views
from wpk.registry.settings import settings
from wpk.scheduler.compile import Compiled, compile_graph, lower_beat
from wpk.scheduler.fuse import fuse
from wpk.scheduler.memory import Layout, plan
from wpk.scheduler.phases import Lowered, Ref
from wpk.scheduler.program import Direction, Role
from wpk.scheduler.rewrite import expand
from wpk.scheduler.target import find_target
from wpk.scheduler.waves import assign_waves

SELECTION = Selection()
VECTOR, MATRIX, WIDE = f32(6), f32(2, 6), f32(20)
CONTEXT = 4
Weights = dict[str, Array]
Inputs = Mapping[str, Array]  # port -> [steps, slots, ...]
Outputs = dict[str, Array]


def builder(name: str = "g", context: int = CONTEXT) -> GraphBuilder:
    return GraphBuilder(name, SELECTION, context)


def weights_of(graph: Graph, seed: int = 0) -> Weights:
    """Random weights, small, so that what feeds back does not grow, and with so few bits that their sums are exact."""
    rng = np.random.default_rng(seed)
    return {p.name: rng.integers(-16, 17, p.value.type.shape) / 64 for p in graph.weights}


# --- random graphs ------------------------------------------------------------------------------------------------
class Pool:
    """The values that a random graph has so far, by type."""

    def __init__(self, draw: DrawFn, g: GraphBuilder) -> None:
        self.draw, self.g = draw, g
        self.values: dict[Type, list[Value]] = {}

    def add(self, *values: Value) -> None:
        for value in values:
            self.values.setdefault(value.type, []).append(value)

    def pick(self, *types: Type) -> Value:
        """A session value of one of these types; recent ones are as likely as all older ones together."""
        known = [v for t in types for v in self.values.get(t, []) if not v.weight]
        return known[-1] if self.draw(st.booleans()) else self.draw(st.sampled_from(known))

    def weight(self, *shape: int) -> Value:
        """One of a few weights of that shape, or one that is computed from two of them."""
        name = "w" + "x".join(map(str, shape))
        which = self.draw(st.integers(0, 2))
        first = self.g.weight(f"{name}.0", f32(*shape))
        if which < 2:
            return first if which == 0 else self.g.weight(f"{name}.1", f32(*shape))
        return self.g.op("add", first, self.g.weight(f"{name}.1", f32(*shape)))  # type: ignore[no-any-return]

    def op(self, op: str, *inputs: Value, **attrs: Any) -> Any:
        return self.g.op(op, *inputs, **attrs)


def _unary(p: Pool) -> None:
    p.add(p.op(p.draw(st.sampled_from(("tanh", "relu"))), p.pick(VECTOR, MATRIX, WIDE)))


def _binary(p: Pool) -> None:
    a = p.pick(VECTOR, MATRIX, WIDE)
    b = p.pick(a.type) if p.draw(st.integers(0, 3)) else p.weight(*a.type.shape)
    p.add(p.op(p.draw(st.sampled_from(("add", "sub"))), a, b))


def _broadcast(p: Pool) -> None:
    operands = [p.pick(MATRIX), p.pick(VECTOR)]
    p.add(p.op("add", *(operands if p.draw(st.booleans()) else operands[::-1])))


def _product(p: Pool) -> None:
    """A linear layer, alone or with what may be fused into it."""
    x = p.pick(VECTOR, MATRIX, WIDE)
    n = p.draw(st.sampled_from((6, 20))) if x.type != MATRIX else 6
    bias = [p.weight(n)] if p.draw(st.booleans()) else []
    y = p.op("linear", x, p.weight(n, x.type.shape[-1]), *bias)
    if p.draw(st.booleans()):
        y = p.op("relu", y)
    if p.draw(st.booleans()):
        y = p.op("add", *((y, p.pick(y.type)) if p.draw(st.booleans()) else (p.pick(y.type), y)))
    p.add(y)


def _views(p: Pool) -> None:
    """Rows of a matrix, and a vector out of the middle of both."""
    matrix = p.pick(MATRIX)
    row = p.draw(st.integers(0, 1))
    p.add(p.op("reshape", p.op("slice", matrix, axis=0, start=row, stop=row + 1), shape=(6,)))
    p.add(p.op("slice", p.op("reshape", matrix, shape=(12,)), axis=0, start=3, stop=9))


def _turned(p: Pool) -> None:
    """A matrix with the halves of its rows exchanged."""
    matrix = p.pick(MATRIX)
    left, right = (p.op("slice", matrix, axis=1, start=i, stop=i + 3) for i in (0, 3))
    p.add(p.op("concat", right, left, axis=1))


def _stack(p: Pool) -> None:
    p.add(p.op("concat", *(p.op("reshape", p.pick(VECTOR), shape=(1, 6)) for _ in range(2)), axis=0))


def _recurrent(p: Pool) -> None:
    p.add(*p.op("lstm", p.pick(VECTOR), p.pick(VECTOR), p.pick(VECTOR), p.weight(24, 6), p.weight(24, 6), p.weight(24)))


def _select(p: Pool) -> None:
    """One value for the first steps, another one after them."""
    a = p.pick(VECTOR, MATRIX)
    limit = p.op("constant", shape=(), values=(p.draw(st.integers(0, 6)),), dtype="i32")
    p.add(p.op("select", p.op("less", p.g.position(), limit), a, p.pick(a.type)))


ROWS: tuple[Callable[[Pool], None], ...] = (
    _unary, _binary, _broadcast, _product, _views, _turned, _stack, _recurrent, _select,
)  # fmt: skip


@st.composite
def graphs(draw: DrawFn, most_nodes: int = 8) -> Graph:
    """A small graph with states of every kind whose updates and outputs may be any value, old states included."""
    g = builder("random")
    p = Pool(draw, g)
    p.add(g.input("x", VECTOR), g.input("m", MATRIX), g.input("wide", WIDE))
    registers = draw(st.lists(st.sampled_from((VECTOR, MATRIX, WIDE)), max_size=3))
    for i, type in enumerate(registers):
        p.add(g.register(f"r{i}", type, p.weight(*type.shape) if draw(st.booleans()) else None))
    ring = None
    if draw(st.booleans()):
        ring = g.ring("ring", draw(st.integers(1, 3)), VECTOR)
        p.add(ring)
        if ring.type != MATRIX:
            p.add(p.op("reshape", p.op("slice", ring, axis=0, start=0, stop=1), shape=(6,)))
    for _ in range(draw(st.integers(0, most_nodes))):
        draw(st.sampled_from(ROWS))(p)
    if draw(st.booleans()):
        _cached(p)
    for i, type in enumerate(registers):
        g.update(f"r{i}", p.pick(type))
    if ring is not None:
        g.update("ring", p.pick(MATRIX) if draw(st.booleans()) else p.op("reshape", p.pick(VECTOR), shape=(1, 6)))
    for i in range(draw(st.integers(1, 4))):
        g.output(f"y{i}", p.pick(VECTOR, MATRIX, WIDE))
    return g.build()


def _cached(p: Pool) -> None:
    """Attention over a cache before or after, or before and after, a row comes in."""
    cache, row = p.g.cache("cache", f32(1, 6)), p.op("reshape", p.pick(VECTOR), shape=(1, 6))
    when = p.draw(st.integers(1, 3))
    for moment in (1, 2):
        if when & moment:
            query = p.op("reshape", p.pick(VECTOR), shape=(1, 6))
            seen = p.op("attention", query, cache, cache, p.g.position(), scale=0.5)
            p.add(p.op("reshape", seen, shape=(6,)))
        if moment == 1:
            cache = p.g.append("cache", row)


# --- what tests of passes ask of a graph ---------------------------------------------------------------------------
def session_ops(graph: Graph) -> list[str]:
    """Operators of a step in order, weight-level ones left out."""
    return [n.op for n in graph.nodes if not n.weight]


def only(graph: Graph, op: str) -> Node:
    (node,) = [n for n in graph.nodes if n.op == op]
    return node


def fused(build: Callable[[GraphBuilder], object], tolerance: float = 1e-9) -> Graph:
    """What fusing makes of a graph, which must mean what it meant, up to where it is rounded to bf16."""
    g = builder()
    build(g)
    graph = g.build()
    made = fuse(expand(graph, SELECTION), SELECTION)
    weights = weights_of(graph)
    agree(graph, Meant(made, weights), Meant(graph, weights), beats=3, tolerance=tolerance)
    return made


def dense(g: GraphBuilder, x: Value, n: int = 6, **attrs: str) -> Value:
    return g.op("linear", x, g.weight("w", f32(n, x.type.shape[-1])), **attrs)  # type: ignore[no-any-return]


def tiled(g: GraphBuilder, x: Value, n: int, name: str = "w", *, cast: bool = True, **attrs: Any) -> Value:
    """A product with the bf16 weight `name` [n, k] in tiles; cast: x is rounded first."""
    k, shares = x.type.size, least_shares(n)
    x = g.op("cast", x, dtype="bf16") if cast else x
    tiles = g.op("pack_tiles", g.weight(name, bf16(n, k)), shares=shares)
    return g.op("tiled_matmul", x, tiles, n=n, k=k, shares=shares, **attrs)  # type: ignore[no-any-return]


# --- running ------------------------------------------------------------------------------------------------------
class Runs(Protocol):
    def beat(self, inputs: Inputs) -> Outputs: ...


class Meant:
    """A graph of one step by its meaning, for `slots` sessions; or of a beat whose ports are `name@step`."""

    def __init__(
        self, graph: Graph, weights: Weights, slots: int = 1, steps: int = 1, *, unrolled: bool = False
    ) -> None:  # fmt: skip
        self.graph, self.steps, self.unrolled = graph, steps, unrolled
        self.sessions = [Reference(graph, weights) for _ in range(slots)]

    def beat(self, inputs: Inputs) -> Outputs:
        found: dict[str, list[list[Array]]] = {}
        for slot, session in enumerate(self.sessions):
            for step in range(self.steps):
                if self.unrolled:
                    if step == 0:
                        given = {f"{n}@{i}": rows[i, slot] for n, rows in inputs.items() for i in range(self.steps)}
                        whole = session.step(given)
                    made = {n.rpartition("@")[0]: v for n, v in whole.items() if n.endswith(f"@{step}")}
                else:
                    made = session.step({n: rows[step, slot] for n, rows in inputs.items()})
                for name, array in made.items():
                    found.setdefault(name, [[] for _ in range(self.steps)])[step].append(array.reshape(-1))
        return {name: np.array(rows, np.float64) for name, rows in found.items()}


class Machine:
    """Phases on arenas of float64 words, in which a byte offset is four times an index."""

    def __init__(self, lowered: Lowered, waves: Sequence[int], layout: Layout, weights: Weights, slots: int) -> None:
        self.lowered, self.layout, self.slots = lowered, layout, slots
        self.order = sorted(range(len(waves)), key=lambda i: (waves[i], -i))
        self.arenas = [np.full(size // 4, np.nan) for size in layout.arenas]
        self.arenas[Arena.STATE][:] = 0.0
        load = lowered.load
        made = evaluate(load.nodes, {p.value.id: weights[p.name] for p in load.weights})
        names = {s.name: s.index for s in lowered.storages if s.role is Role.STATE}
        for port in load.outputs:
            kind, _, name = port.name.partition(":")
            ref = Ref(int(name) if kind == "value" else names[name])
            for slot in range(1 if kind == "value" else slots):
                self._words(ref, slot, port.value.type.size)[:] = made[port.value.id].reshape(-1)

    def beat(self, inputs: Inputs) -> Outputs:
        for name, ref in self.lowered.inputs:
            base, _, step = name.rpartition("@")
            for slot in range(self.slots):
                row = inputs[base][int(step), slot].reshape(-1)
                self._words(ref, slot, row.size)[:] = row
        for index in self.order:
            for slot in range(self.slots):
                self._run(index, slot)
        found: dict[str, list[Array]] = {}
        for name, ref in self.lowered.outputs:
            size = self.lowered.storages[ref.storage].type.size
            rows = np.array([self._words(ref, slot, size) for slot in range(self.slots)])
            found.setdefault(name.rpartition("@")[0], []).append(rows)
        return {name: np.array(rows) for name, rows in found.items()}

    def _run(self, index: int, slot: int) -> None:
        phase = self.lowered.phases[index]
        pairs = zip(phase.inputs, phase.types, strict=True)
        result = phase.operator.meaning(*(self._read(r, t, slot) for r, t in pairs))
        results = result if isinstance(result, tuple) else (result,)
        for ref, array in zip(phase.outputs, results, strict=True):
            self._words(ref, slot, array.size)[:] = array.reshape(-1)

    def _read(self, ref: Ref, type: Type, slot: int) -> Array:
        words = self._words(ref, slot, type.size)
        assert not np.isnan(words).any(), "bytes that nobody has written"
        number: Any = {DType.I32: np.int64, DType.BOOL: np.bool_}.get(type.dtype, np.float64)
        return words.astype(number).reshape(type.shape)

    def _words(self, ref: Ref, slot: int, size: int) -> Array:
        home = self.layout.placed[ref.storage]
        start = (home.offset + ref.start + slot * home.stride) // 4
        return self.arenas[home.arena][start : start + size]


class Tensors:
    """Weights as `fill_arenas` reads them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def read(self, name: str) -> Array:
        return self.weights[name]


class Executed:
    """A compiled graph on the CPU kernel with all slots taken."""

    def __init__(self, compiled: Compiled, weights: Weights) -> None:
        program = compiled.program
        arenas, image = fill_arenas(program, compiled.load, Tensors(weights))  # type: ignore[arg-type]
        self.kernel = CpuKernel(program, arenas, image, threads=2, cache=settings().kernels)
        self.inputs = port_views(program, arenas[Arena.IO], Direction.INPUT)
        self.outputs = port_views(program, arenas[Arena.IO], Direction.OUTPUT)
        for slot in range(program.slots):
            self.kernel.reset(slot)
            set_bit(self.kernel.control.active, slot, True)

    def beat(self, inputs: Inputs) -> Outputs:
        for name, views in self.inputs.items():
            for step, view in enumerate(views):
                view[:] = inputs[name][step].reshape(view.shape)
        self.kernel.beat()
        return {name: np.array([v.copy() for v in views], np.float64) for name, views in self.outputs.items()}


def lowered_beat(graph: Graph, steps: int = 1, target: str = "cpu") -> Lowered:
    """The phases of a beat, after every pass over the graph."""
    return lower_beat(graph, SELECTION, find_target(target), steps)


def machine(graph: Graph, weights: Weights, slots: int = 1, steps: int = 1) -> Machine:
    lowered = lowered_beat(graph, steps)
    waves = assign_waves(lowered.phases)
    return Machine(lowered, waves, plan(lowered, waves, slots), weights, slots)


def compiled(graph: Graph, *, capacity: int = 1, steps: int = 1, target: str = "cpu") -> Compiled:
    return compile_graph(graph, SELECTION, find_target(target), capacity=capacity, steps=steps)


def executed(graph: Graph, weights: Weights, slots: int = 1, steps: int = 1, target: str = "cpu") -> Executed:
    return Executed(compiled(graph, capacity=slots, steps=steps, target=target), weights)


def agree(
    graph: Graph, found: Runs, wanted: Runs, *, slots: int = 1, steps: int = 1, beats: int = 6, tolerance: float = 1e-9
) -> None:  # fmt: skip
    """Both give the same outputs for the same random inputs, beat after beat."""
    rng = np.random.default_rng(1)
    for beat in range(beats):
        inputs = {p.name: _random(rng, p.value.type, (steps, slots)) for p in graph.inputs}
        a, b = found.beat(inputs), wanted.beat(inputs)
        assert set(a) == set(b) == {p.name for p in graph.outputs}
        for name in a:
            scale = max(1.0, float(np.abs(b[name]).max()))
            error = np.abs(a[name] - b[name]).max()
            assert error <= tolerance * scale, (beat, name, error, a[name], b[name])


def _random(rng: np.random.Generator, type: Type, lead: tuple[int, ...]) -> Array:
    if not type.dtype.is_float:
        return rng.integers(0, 2, (*lead, *type.shape))
    return rng.uniform(-1, 1, (*lead, *type.shape)).astype(np.float32).astype(np.float64)


def told(lowered: Lowered) -> list[str]:
    """Phases as a person reads them, `add x@0 h -> h`; temporaries are t0, t1, ...; `+n` bytes into a storage."""
    names: dict[int, str] = {}
    for storage in lowered.storages:
        temporaries = sum(n.startswith("t") and n[1:].isdigit() for n in names.values())
        names[storage.index] = f"t{temporaries}" if storage.role is Role.TEMPORARY else storage.name

    def ref(r: Ref) -> str:
        return names[r.storage] + (f"+{r.start}" if r.start else "")

    return [
        f"{p.operator.name} {' '.join(map(ref, p.inputs))} -> {' '.join(map(ref, p.outputs))}" for p in lowered.phases
    ]  # fmt: skip
