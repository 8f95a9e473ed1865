"""Graph-to-graph passes: expand, prune, unroll. Each takes an immutable graph and returns another."""

from __future__ import annotations

from wpk.ir.errors import CompileError
from wpk.ir.graph import Graph, GraphBuilder, Library, Node, StateKind, Value
from wpk.scheduler.views import operator_of


class Rewriter:
    """Copies a graph into a new builder, node by node; `values` maps the old ids to the new values.

    Weight nodes come first (initial images need them) and equal ones are made once.
    """

    def __init__(self, graph: Graph, library: Library) -> None:
        self.graph, self.g = graph, GraphBuilder(graph.name, library)
        self.values: dict[int, Value] = {}
        self._made: dict[tuple[object, ...], tuple[Value, ...]] = {}
        for port in graph.weights:
            self.values[port.value.id] = self.g.weight(port.name, port.value.type)
        for node in graph.nodes:
            if node.weight:
                self.copy(node)

    def copy(self, node: Node, **changes: object) -> tuple[Value, ...]:
        """The same application on the mapped inputs."""
        inputs = tuple(self.values[v.id] for v in node.inputs)
        attrs = {**node.attributes, **changes}
        key = (node.op, node.version, inputs, repr(sorted(attrs.items())))  # 0.0 is not -0.0, nor 1 True
        if not (node.weight and key in self._made):
            with self.g.labelled(node.label):
                operator = self.g.library.resolve(node.op, node.version)
                made = self.g.apply(operator, inputs, attrs)  # type: ignore[arg-type]
            self._made[key] = made if isinstance(made, tuple) else (made,)
        for old, new in zip(node.outputs, self._made[key], strict=True):
            self.values[old.id] = new
        return self._made[key]

    def leaves(self) -> None:
        """Inputs and states under their own names."""
        for port in self.graph.inputs:
            self.values[port.value.id] = self.g.input(port.name, port.value.type)
        for state in self.graph.states:
            initial = None if state.initial is None else self.values[state.initial.id]
            self.values[state.value.id] = self.g.state(state.name, state.kind, state.value.type, initial)

    def finish(self) -> Graph:
        """Updates and outputs under their own names."""
        for state in self.graph.states:
            assert state.update is not None
            self.g.replace(state.name, self.values[state.update.id])
        for port in self.graph.outputs:
            self.g.output(port.name, self.values[port.value.id])
        return self.g.build()


def expand(graph: Graph, library: Library) -> Graph:
    """Replace composite operators until every session node has a body of its own or is a view."""
    while True:
        rewriter, changed = Rewriter(graph, library), False
        rewriter.leaves()
        for node in graph.nodes:
            if node.weight:
                continue
            with rewriter.g.labelled(node.label):
                result = operator_of(node).expand(rewriter.g, *(rewriter.values[v.id] for v in node.inputs))
            if result is None:
                rewriter.copy(node)
                continue
            changed = True
            results = result if isinstance(result, tuple) else (result,)
            for old, new in zip(node.outputs, results, strict=True):
                if old.type != new.type:
                    raise CompileError(f"{node.op}@{node.version} expands to another type", wanted=old.type, found=new)
                rewriter.values[old.id] = new
        graph = prune(rewriter.finish(), library)
        if not changed:
            return graph


def prune(graph: Graph, library: Library) -> Graph:
    """Drop nodes that no output, state update or initial image needs. Leaves stay: they are the interface."""
    needed = {p.value.id for p in graph.outputs}
    needed |= {s.update.id for s in graph.states if s.update} | {s.initial.id for s in graph.states if s.initial}
    for node in reversed(graph.nodes):
        if any(v.id in needed for v in node.outputs):
            needed |= {v.id for v in node.inputs}
    kept = tuple(n for n in graph.nodes if any(v.id in needed for v in n.outputs))
    return Graph(graph.name, graph.inputs, graph.weights, graph.states, kept, graph.outputs)


def unroll(graph: Graph, library: Library, steps: int) -> Graph:
    """The graph of one beat: `steps` copies, each reading the state that the one before it left.

    Ports get the step's number (`audio@0`); every state becomes a value that is explicitly replaced.
    """
    rewriter = Rewriter(graph, library)
    g, values = rewriter.g, rewriter.values
    for state in graph.states:
        kind = StateKind.CACHE if state.kind is StateKind.CACHE else StateKind.REGISTER
        initial = None if state.initial is None else values[state.initial.id]
        values[state.value.id] = g.state(state.name, kind, state.value.type, initial)
    outputs: list[tuple[str, Value]] = []
    for step in range(steps):
        for port in graph.inputs:
            values[port.value.id] = g.input(f"{port.name}@{step}", port.value.type)
        for node in graph.nodes:
            if not node.weight:
                rewriter.copy(node)
        outputs += [(f"{port.name}@{step}", values[port.value.id]) for port in graph.outputs]
        following = {}
        for state in graph.states:
            assert state.update is not None
            updated = values[state.update.id]
            if state.kind is StateKind.RING:
                with g.labelled(state.name):
                    updated = g.op("ring_shift", values[state.value.id], updated)
            following[state.value.id] = updated
        values.update(following)
    for state in graph.states:
        g.replace(state.name, values[state.value.id])
    for name, value in outputs:
        g.output(name, value)
    return prune(g.build(), library)
