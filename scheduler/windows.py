"""Windows: what the steps of a beat see of a ring become pieces of one value.

A causal operator reads the rows of earlier steps and its own, `concat(ring, rows)`, and the next step does so with the
ring that has shifted. Where no step's rows depend on what an earlier step made of its window, all of it is

    all = concat(ring, rows of step 0, rows of step 1, ...)

of which every window, and the ring after every step, is a slice: a view. One copy then stands for a concatenation and
a shift a step, and operators over windows can be merged (`merge`), as they lie in one value at equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpk.ir.graph import Graph, GraphBuilder, Library, Node, Value
from wpk.ops.shape import CONCAT_LIMIT
from wpk.scheduler.contraction import Contraction
from wpk.scheduler.rewrite import Rewriter, prune
from wpk.scheduler.views import dependences, view_start


@dataclass(frozen=True)
class _Run:
    """Shifts of one ring, a step after the other, and the windows before each: positions of their nodes."""

    shifts: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]

    @property
    def members(self) -> tuple[int, ...]:
        return (*self.shifts, *(i for some in self.windows for i in some))


def join_windows(graph: Graph, library: Library) -> Graph:
    """The beat with the windows of each ring in one value, as far as the order of what is computed allows."""
    plan = _Plan(graph)
    return _Joining(graph, library, plan).run() if plan.runs else graph


class _Plan:
    """Which shifts and windows become one node, and in which order the nodes then come."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [node for node in graph.nodes if not node.weight]
        self._position = {v.id: i for i, node in enumerate(self.nodes) for v in node.outputs}
        before = dependences(graph, self.nodes)
        self.contraction = Contraction(before, [int(view_start(node) is None) for node in self.nodes])
        self.runs: dict[int, _Run] = {}  # by the position of the first shift
        for chain in self._chains():
            while chain:
                chain = chain[self._join(chain) :]

    def _chains(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        """For each ring its shifts in order, each with the windows of the rows that come and the ring before them."""
        windows: dict[tuple[int, int], list[int]] = {}
        following = {}
        for i, node in enumerate(self.nodes):
            if node.op == "concat" and len(node.inputs) == 2 and node.attributes["axis"] == 0:
                windows.setdefault((node.inputs[0].id, node.inputs[1].id), []).append(i)
            if node.op == "ring_shift":
                following[node.inputs[0].id] = i
        chains = []
        shifted = {self.nodes[i].outputs[0].id for i in following.values()}
        for ring in (ring for ring in following if ring not in shifted):
            chain, value = [], ring
            while value in following:
                node = self.nodes[following[value]]
                chain.append((following[value], tuple(windows.get((value, node.inputs[1].id), ()))))
                value = node.outputs[0].id
            chains.append(chain)
        return chains

    def _join(self, chain: Sequence[tuple[int, tuple[int, ...]]]) -> int:
        """Join as many of the first shifts of a chain as may be; how many have been dealt with."""
        taken: list[tuple[int, tuple[int, ...]]] = []
        for shift, windows in chain:
            members = [i for s, w in taken for i in (s, *w)]
            comes = self._position.get(self.nodes[shift].inputs[1].id)
            if not windows or (comes is not None and any(self.contraction.leads(i, comes) for i in members)):
                break
            if taken and self.contraction.longer([*members, shift, *windows]):
                break
            taken.append((shift, windows))
        if len(taken) > 1:
            run = _Run(tuple(s for s, _ in taken), tuple(w for _, w in taken))
            self.contraction.join(run.members)
            self.runs[run.shifts[0]] = run
        return max(1, len(taken))


class _Joining(Rewriter):
    """The graph that a plan makes of another."""

    def __init__(self, graph: Graph, library: Library, plan: _Plan) -> None:
        super().__init__(graph, library)
        self.leaves()
        self._plan = plan

    def run(self) -> Graph:
        for members in self._plan.contraction.order():
            if len(members) == 1:
                self.copy(self._plan.nodes[members[0]])
            else:
                self._join(self._plan.runs[members[0]])
        return prune(self.finish(), self.g.library)

    def _join(self, run: _Run) -> None:
        nodes = self._plan.nodes
        first = nodes[run.shifts[0]]
        rows = first.inputs[0].type.shape[0]
        with self.g.labelled(nodes[run.windows[0][0]].label):
            coming = [self.values[nodes[shift].inputs[1].id] for shift in run.shifts]
            few = len(coming) < CONCAT_LIMIT
            coming = coming if few else [concatenated(self.g, coming)]
            whole = concatenated(self.g, [self.values[first.inputs[0].id], *coming])
            end = 0
            for shift, windows in zip(run.shifts, run.windows, strict=True):
                start, end = end, end + nodes[shift].inputs[1].type.shape[0]
                for i in windows:
                    self._slice(nodes[i], whole, start, end + rows)
                self._slice(nodes[shift], whole, end, end + rows)

    def _slice(self, node: Node, whole: Value, start: int, stop: int) -> None:
        self.values[node.outputs[0].id] = self.g.op("slice", whole, axis=0, start=start, stop=stop)


def concatenated(g: GraphBuilder, parts: Sequence[Value]) -> Value:
    """Values one after the other along the leading axis, however many."""
    while len(parts) > 1:
        groups = [parts[i : i + CONCAT_LIMIT] for i in range(0, len(parts), CONCAT_LIMIT)]
        parts = [some[0] if len(some) == 1 else g.op("concat", *some, axis=0) for some in groups]
    return parts[0]
