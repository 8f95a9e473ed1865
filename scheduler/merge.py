"""Merging: the steps of a beat read the weights of an operator once, where none needs what an earlier one made with it.

`unroll` copies a step's nodes, but weights are made once; so nodes of one operator with the same attributes, label and
weights are copies of each other. Copies of an operator that works row by row (`ROWS`), no path leading from one to
another, become one node over the rows of all, and its result is cut apart again by views. Every row is computed as it
was: the outputs are the same bits.

Rows must lie at equal distances in one value. Where they are what earlier merged nodes gave, are windows of one value
(`windows`), or may be written side by side (`joins`), that costs nothing; else they are copied, if the bytes of weights
that are saved are worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wpk.ir.graph import Attribute, Graph, Library, Node, Value
from wpk.ir.types import DType
from wpk.ops.elementwise import Binary, Unary
from wpk.ops.linear import RESIDUAL, SECOND
from wpk.scheduler.contraction import Contraction
from wpk.scheduler.joins import PART_ALIGN, Joins
from wpk.scheduler.phases import homes
from wpk.scheduler.rewrite import Rewriter, prune
from wpk.scheduler.target import Target
from wpk.scheduler.views import dependences, operator_of, view_start
from wpk.scheduler.windows import concatenated, join_windows


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand that has rows: the shape of one, and how many numbers one copy's are from the next one's.

    apart: None where any distance will do.
    """

    shape: tuple[int, ...]
    apart: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rows:
    """How a node takes rows: of its result, `count`; by position the operands that have them. Others are weights."""

    count: int
    operands: dict[int, Operand]

    def attributes(self, node: Node, copies: int, apart: int) -> dict[str, Attribute]:
        """What changes where a node takes the rows of so many copies, that far apart in its first operand."""
        if node.op == "matmul":
            return {"frames": copies * self.count, "step": apart // self.count}
        if node.op == "depthwise_window":
            return {"stride": apart // self.count // self.operands[0].size}
        return {}


def _of_matmul(node: Node) -> Rows | None:
    """Whole windows of x."""
    count, k, step, pad, roles = (int(node.attributes[n]) for n in ("frames", "k", "step", "pad", "roles"))  # type: ignore[arg-type]
    size = node.inputs[0].type.size
    if roles & SECOND or pad > 0 or (count - 1) * step - pad + k > size:
        return None
    operands = {0: Operand(node.inputs[0].type.shape[-1:], count * step if count > 1 else None)}
    if roles & RESIDUAL:
        n = int(node.attributes["n"])  # type: ignore[arg-type]
        operands[len(node.inputs) - 1] = Operand((n,), count * n)
    return Rows(count, operands)


def _of_norm(node: Node) -> Rows | None:
    """Each row has statistics of its own."""
    x = node.inputs[0].type
    return Rows(x.size // x.shape[-1], {0: Operand(x.shape[-1:], x.size)})


def _of_depthwise_window(node: Node) -> Rows | None:
    """Windows that end with what they read: rows behind the last filter would make frames more than there are."""
    count, channels = node.outputs[0].type.shape
    stride, dilation = (int(node.attributes[name]) for name in ("stride", "dilation"))  # type: ignore[arg-type]
    frames, taps = node.inputs[0].type.shape[0], node.inputs[1].type.shape[0]
    if frames != (count - 1) * stride + (taps - 1) * dilation + 1:
        return None
    return Rows(count, {0: Operand((channels,), count * stride * channels if count > 1 else None)})


def _of_elementwise(node: Node) -> Rows | None:
    """A row is all of the result; a weight may be broadcast to it, another session value not."""
    (y,), given = node.outputs, {i: v for i, v in enumerate(node.inputs) if not v.weight}
    if any(value.type.shape != y.type.shape for value in given.values()):
        return None
    return Rows(1, {i: Operand(y.type.shape, y.type.size) for i in given})


ROWS: dict[tuple[str, int], Callable[[Node], Rows | None]] = {
    ("matmul", 1): _of_matmul,
    ("depthwise_window", 1): _of_depthwise_window,
    ("layer_norm", 1): _of_norm,
    ("rms_norm", 1): _of_norm,
    ("group_norm", 1): _of_norm,
}


def merge(graph: Graph, library: Library, target: Target, capacity: int | None = None) -> Graph:
    """The beat with the windows of its rings joined, and the copies merged that gain by it.

    capacity: sessions whose rows may have to be copied, against weights that are read once; None counts one.
    """
    graph = join_windows(graph, library)
    plan = _Plan(graph, target, capacity or 1)
    return _Merging(graph, library, plan).run() if plan.merged else graph


def rows_of(node: Node) -> Rows | None:
    """How the node takes rows; None where it does not, or not from weights and f32 values alone."""
    form = ROWS.get((node.op, node.version), _of_elementwise if _is_elementwise(node) else None)
    rows = None if form is None or node.weight else form(node)
    if rows is None:
        return None
    fit = all(value.weight != (i in rows.operands) for i, value in enumerate(node.inputs))
    taken = [*(node.inputs[i] for i in rows.operands), *node.outputs]
    return rows if fit and all(v.type.dtype is DType.F32 for v in taken) else None


def _is_elementwise(node: Node) -> bool:
    return isinstance(operator_of(node), Unary | Binary)


# --- what is merged -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Place:
    """`start` bytes into a value, or into the result of merged nodes, by the position of their first."""

    of: tuple[str, int]
    start: int


class _Plan:
    """Which nodes become one, and in which order the nodes then come."""

    def __init__(self, graph: Graph, target: Target, slots: int) -> None:
        self._target, self._slots = target, slots
        self.nodes = [node for node in graph.nodes if not node.weight]
        self._homes = homes(graph)
        self._joins = Joins(graph, self._homes)
        self._position = {v.id: i for i, node in enumerate(self.nodes) for v in node.outputs}
        self._starts = [view_start(node) for node in self.nodes]
        phases = [int(start is None) for start in self._starts]
        self._contraction = Contraction(dependences(graph, self.nodes), phases)
        self.merged: dict[int, tuple[int, ...]] = {}  # position of the first -> positions of all
        self._member: dict[int, tuple[int, int]] = {}  # position -> (position of the first, which one of them)
        self._claimed: dict[int, tuple[int, ...]] = {}  # value that is to be a part -> all that it is joined with
        self.shown: dict[int, Place] = {}  # what is concatenated of neighbours and so lies there already
        copies = self._copies()
        for light in (False, True):  # what is element by element merges only where nothing heavier is in its way
            for some in (some for some in copies if _is_elementwise(self.nodes[some[0]]) == light):
                while sets := self._apart(some):  # what is merged may bring a path between those that are left
                    self._judge(sets[0])
                    some = [i for others in sets[1:] for i in others]

    def order(self) -> Iterator[tuple[int, ...]]:
        return self._contraction.order()

    def _copies(self) -> list[list[int]]:
        """Positions of the copies of each node that takes rows, in the order of the first ones."""
        found: dict[object, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if rows_of(node) is not None:
                operands = tuple(v.id if v.weight else v.type for v in node.inputs)
                key = (node.op, node.version, repr(node.attrs), node.label, operands)
                found.setdefault(key, []).append(i)
        return [copies for copies in found.values() if len(copies) > 1]

    def _apart(self, copies: Sequence[int]) -> list[list[int]]:
        """The copies in sets of which no path leads from one to another; each goes into the first set that it can."""
        sets: list[list[int]] = []
        for i in copies:
            for some in sets:
                if all(self._contraction.apart(i, other) for other in some):
                    some.append(i)
                    break
            else:
                sets.append([i])
        return [some for some in sets if len(some) > 1]

    def _judge(self, some: Sequence[int]) -> None:
        """Merge these copies where that costs no more time than it saves."""
        nodes = [self.nodes[i] for i in some]
        rows = rows_of(nodes[0])
        assert rows is not None
        copied, claims = 0, []
        for i, operand in rows.operands.items():
            values = [node.inputs[i] for node in nodes]
            if self.run(values, operand) is not None:
                continue
            if operand.apart not in (None, values[0].type.size):
                return  # windows that overlap, but not in one value
            parts = self._parts(values)
            claims.append(parts or ())
            copied += 0 if parts else sum(v.type.bytes for v in values)
        results = tuple(node.outputs[0].id for node in nodes)
        copied += nodes[0].outputs[0].type.bytes * sum(self._has_home(v, results) for v in results)
        weights = operator_of(nodes[0]).cost(*(v.type for v in nodes[0].inputs)).weight_bytes
        saved = (len(some) - 1) * weights / self._target.bandwidth
        barriers = self._contraction.longer(some) + (copied > 0)
        if 2 * self._slots * copied / self._target.bandwidth + barriers * self._target.barrier_s > saved:
            return
        self._contraction.join(some)
        self.merged[some[0]] = tuple(some)
        self._member |= {i: (some[0], which) for which, i in enumerate(some)}
        for parts in claims:
            self._claimed |= dict.fromkeys(parts, parts)

    def _has_home(self, value: int, beside: tuple[int, ...]) -> bool:
        """Whether a value has a home, in which it will not be where it is written beside these."""
        return value in self._homes or value in self._joins.parts or self._claimed.get(value, beside) != beside

    def _parts(self, values: Sequence[Value]) -> tuple[int, ...] | None:
        """Ids of the values that may be written side by side to stand for these; None where a copy is needed."""
        sources = [self._joins.source(value) for value in values]
        ids = tuple(source.id for source in sources if source is not None)
        if len(set(ids)) < len(values) or values[0].type.bytes % PART_ALIGN:
            return None
        if any(self._position[i] in self._member for i in ids):
            return None
        return ids if all(self._claimed.get(i, ids) == ids for i in ids) else None

    def place(self, value: Value) -> Place:
        """Where a value lies: in what it is a view of and, where that is merged, in the merged result."""
        start = 0
        while (i := self._position.get(value.id)) is not None and (offset := self._starts[i]) is not None:
            start, value = start + offset, self.nodes[i].inputs[0]
        if value.id in self.shown:
            seen = self.shown[value.id]
            return Place(seen.of, seen.start + start)
        if i is None or i not in self._member:
            return Place(("value", value.id), start)
        first, which = self._member[i]
        return Place(("merged", first), start + which * value.type.bytes)

    def run(self, values: Sequence[Value], operand: Operand) -> tuple[Place, int] | None:
        """Where the first of these values lies and how many bytes apart they are, if the operand can have them so."""
        places = [self.place(value) for value in values]
        first, apart = places[0], places[1].start - places[0].start
        even = all(p == Place(first.of, first.start + i * apart) for i, p in enumerate(places))
        fits = apart > 0 and apart % (4 * operand.size) == 0 and operand.apart in (None, apart // 4)
        return (first, apart) if even and fits else None


# --- the merged graph ---------------------------------------------------------------------------------------------
class _Merging(Rewriter):
    """The graph that a plan makes of another."""

    def __init__(self, graph: Graph, library: Library, plan: _Plan) -> None:
        super().__init__(graph, library)
        self.leaves()
        self._plan = plan
        self._results: dict[tuple[str, int], Value] = {}
        self._joined: dict[tuple[int, ...], Value] = {}

    def run(self) -> Graph:
        for members in self._plan.order():
            node = self._plan.nodes[members[0]]
            if len(members) > 1:
                self._merge([self._plan.nodes[i] for i in members], members[0])
            elif node.op != "concat" or not self._shorter(node):
                self.copy(node)
        return prune(self.finish(), self.g.library)

    def _merge(self, nodes: Sequence[Node], name: int) -> None:
        first, rows = nodes[0], rows_of(nodes[0])
        assert rows is not None
        with self.g.labelled(first.label):
            inputs, apart = [], 0
            for i, value in enumerate(first.inputs):
                if i in rows.operands:
                    made, distance = self._rows([n.inputs[i] for n in nodes], rows.operands[i])
                    apart = distance if i == 0 else apart
                else:
                    made = self.values[value.id]
                inputs.append(made)
            operator = self.g.library.resolve(first.op, first.version)
            attrs = first.attributes | rows.attributes(first, len(nodes), apart)
            self._results["merged", name] = result = self.g.apply(operator, inputs, attrs)
            wide = self._shaped(result, (len(nodes) * rows.count, result.type.size // (len(nodes) * rows.count)))
            for which, node in enumerate(nodes):
                part = self.g.op("slice", wide, axis=0, start=which * rows.count, stop=(which + 1) * rows.count)
                self.values[node.outputs[0].id] = self._shaped(part, node.outputs[0].type.shape)

    def _rows(self, values: Sequence[Value], operand: Operand) -> tuple[Value, int]:
        """The rows of all these values in one, and how many numbers they are apart in it."""
        run = self._plan.run(values, operand)
        if run is not None:
            apart = run[1] // 4
            rows = self._piece(run[0], (len(values) - 1) * apart + values[0].type.size)
        else:
            apart = values[0].type.size
            parts = [self.values[value.id] for value in values]
            key = tuple(part.id for part in parts)
            if key not in self._joined:
                self._joined[key] = concatenated(self.g, [self._shaped(p, (p.type.size,)) for p in parts])
            rows = self._joined[key]
        return self._shaped(rows, (rows.type.size // operand.size, *operand.shape)), apart

    def _piece(self, place: Place, size: int) -> Value:
        """So many numbers from a place on."""
        whole = self._results[place.of] if place.of in self._results else self.values[place.of[1]]
        if size == whole.type.size:
            return whole
        first, flat = place.start // 4, self._shaped(whole, (whole.type.size,))
        return self.g.op("slice", flat, axis=0, start=first, stop=first + size)  # type: ignore[no-any-return]

    def _shorter(self, node: Node) -> bool:
        """Concatenate fewer values, where some of them lie one after the other in a merged result."""
        (whole,) = node.outputs
        if math.prod(whole.type.shape[: int(node.attributes["axis"]) % len(whole.type.shape)]) != 1:  # type: ignore[arg-type]
            return False
        runs: list[tuple[Value, Place, int]] = []  # the first value of each, where it lies, bytes
        for value in node.inputs:
            place = self._plan.place(value)
            if runs and place.of[0] == "merged" and place == Place(runs[-1][1].of, runs[-1][1].start + runs[-1][2]):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + value.type.bytes)
            else:
                runs.append((value, place, value.type.bytes))
        if len(runs) == len(node.inputs):
            return False
        if len(runs) == 1:
            self._plan.shown[whole.id] = runs[0][1]
        with self.g.labelled(node.label):
            pieces = [
                self.values[value.id] if size == value.type.bytes else self._piece(place, size // 4)
                for value, place, size in runs
            ]
            made = concatenated(self.g, [self._shaped(piece, (piece.type.size,)) for piece in pieces])
            self.values[whole.id] = self._shaped(made, whole.type.shape)
        return True

    def _shaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        return value if value.type.shape == shape else self.g.op("reshape", value, shape=shape)
