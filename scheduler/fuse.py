"""Folding: operators that run inside the matrix product before or after them, instead of as phases of their own.

`RULES` is the whole of it, one pass a rule, in this order. A rule looks at one node of the old graph and either makes
its results in the new one, in another way, or leaves it to be copied. A product that a rule moves behind its own place
must not read what is overwritten in between (`_Folding.product`), and whatever is looked through between two nodes is
a view of all the bytes: a view of some of them is a reader like any other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wpk.ir.errors import CompileError
from wpk.ir.graph import Attribute, Graph, Library, Node, Value
from wpk.ir.types import Type
from wpk.ops.linear import RESIDUAL
from wpk.ops.operator import LIBRARY
from wpk.ops.simd import ACTIVATIONS
from wpk.ops.tiles import BIAS, SQUARES
from wpk.scheduler.rewrite import Rewriter, prune
from wpk.scheduler.views import operator_of, overwritten_values, viewed


def fuse(graph: Graph, library: Library) -> Graph:
    """The graph after every rule of the table."""
    for _, rule in RULES:
        graph = _Folding(graph, library).run(rule)
    return graph


class _Folding(Rewriter):
    """One rule's pass, and what its graph says: who makes a value, who reads it, what is overwritten in place."""

    def __init__(self, graph: Graph, library: Library) -> None:
        super().__init__(graph, library)
        self.leaves()
        self.producers = graph.producers()
        self.readers: dict[int, list[Node]] = {}
        for node in graph.nodes:
            for value in node.inputs:
                self.readers.setdefault(value.id, []).append(node)
        self.shown = Counter(p.value.id for p in graph.outputs)
        self.shown.update(s.update.id for s in graph.states if s.update)
        self.overwritten = overwritten_values(graph)
        self.squares: dict[int, Value] = {}  # result of a norm that went into products -> its sums of squares

    def run(self, rule: Rule) -> Graph:
        for node in self.graph.nodes:
            if not node.weight and not rule(self, node):
                self.copy(node)
        return prune(self.finish(), self.g.library)

    def source(self, value: Value) -> Value:
        """What the value is a view of, as long as the view is of all its bytes."""
        while (node := self.producers.get(value.id)) is not None and _is_whole_view(node):
            value = node.inputs[0]
        return value

    def views(self, value: Value) -> list[Value]:
        """The value and every view of all its bytes."""
        found = [value]
        for node in self.readers.get(value.id, ()):
            found += self.views(node.outputs[0]) if _is_whole_view(node) else []
        return found

    def reading(self, value: Value) -> list[Node]:
        """The nodes that read a value, itself or through views of it all; once for every operand."""
        found = (node for view in self.views(value) for node in self.readers.get(view.id, ()))
        return [node for node in found if not _is_whole_view(node)]

    def is_shown(self, value: Value) -> bool:
        """Whether the value is an output or what a state becomes."""
        return any(self.shown[view.id] for view in self.views(value))

    def product(self, value: Value, *ops: str) -> Node | None:
        """The product by one of these operators that makes this value, through views, if nothing else reads it.

        It will run later than it does now, so it must not read what may be overwritten by then.
        """
        source = self.source(value)
        node = self.producers.get(source.id)
        if node is None or node.op not in ops or self.is_shown(source) or len(self.reading(source)) != 1:
            return None
        passing = any(viewed(v, self.producers).id in self.overwritten for v in node.inputs)
        return None if passing else node

    def place(self, label: str, op: str, inputs: Sequence[Value], attrs: Mapping[str, Attribute]) -> Any:
        """Apply an operator to values of the new graph; attributes that it does not have are left out."""
        chosen = self.g.library.resolve(op)
        fields = {f.name for f in dataclasses.fields(LIBRARY.get(chosen.name, chosen.version))}  # type: ignore[arg-type]
        with self.g.labelled(label):
            return self.g.apply(chosen, inputs, {k: v for k, v in attrs.items() if k in fields})

    def again(self, node: Node, inputs: Sequence[Value], attrs: Mapping[str, Attribute]) -> Value:
        """A node's operator, of just this version, on other values and with other attributes."""
        with self.g.labelled(node.label):
            return self.g.apply(self.g.library.resolve(node.op, node.version), inputs, attrs)  # type: ignore[no-any-return]

    def shaped(self, made: Value, wanted: Type, label: str) -> Value:
        """The value in the wanted shape."""
        if made.type.shape == wanted.shape:
            return made
        with self.g.labelled(label):
            return self.g.op("reshape", made, shape=wanted.shape)  # type: ignore[no-any-return]

    def give(self, old: Value, made: Value, label: str) -> None:
        """`made` takes the place of the old value, in its shape."""
        if made.type.dtype != old.type.dtype:
            raise CompileError(f"{label}: folding changes a type", wanted=old.type, found=made.type)
        self.values[old.id] = self.shaped(made, old.type, label)


Rule = Callable[[_Folding, Node], bool]


# --- the rules ----------------------------------------------------------------------------------------------------
def _activation(fold: _Folding, node: Node) -> bool:
    """act(x W^T + b): an activation without attributes, in the product that it alone reads."""
    if node.op not in ACTIVATIONS or node.attrs:
        return False
    product = fold.product(node.inputs[0], "matmul", "tiled_matmul")
    if product is None or product.attributes["activation"] != "none" or _is_closed(product):
        return False
    (made,) = fold.copy(product, activation=node.op)
    fold.give(node.outputs[0], made, node.label)
    return True


def _residual(fold: _Folding, node: Node) -> bool:
    """matmul + y, whichever side it is on."""
    for value, other in _addends(node):
        product = fold.product(value, "matmul")
        if product is None or _is_closed(product):
            continue
        inputs = [fold.values[v.id] for v in (*product.inputs, other)]
        attrs = {**product.attributes, "roles": _roles(product) | RESIDUAL}
        made = fold.again(product, inputs, attrs)
        fold.give(node.outputs[0], made, node.label)
        return True
    return False


def _norm(fold: _Folding, node: Node) -> bool:
    """rms_norm(x) W^T = (x * weight) W^T / rms(x): products read x * weight and scale their sums by the statistics.

    Where x is a sum with a product of its own, that one gives partial sums, and who makes the statistics adds them.
    """
    if node.op == "rms_norm" and _is_foldable(fold, node):
        if node.outputs[0].id not in fold.values:  # else the addition before it has made it
            _terms(fold, node, fold.values[fold.source(node.inputs[0]).id])
        return True
    if node.op == "cast" and _normed(fold, node.outputs[0]) is not None:
        fold.values[node.outputs[0].id] = fold.values[node.inputs[0].id]  # rounded already
        return True
    if node.op == "tiled_matmul" and _normed(fold, node.inputs[0]) is not None:
        fold.give(node.outputs[0], _after_norm(fold, node), node.label)
        return True
    return _sum_before_norm(fold, node)


def _sum_before_norm(fold: _Folding, node: Node) -> bool:
    norm = next((n for n in fold.reading(node.outputs[0]) if _is_foldable(fold, n)), None)
    if norm is None:
        return False
    for value, other in _addends(node):
        product = fold.product(value, "tiled_matmul")
        if product is None or not _is_plain(product):
            continue
        partials = _after_norm(fold, product, splits=1)
        fold.give(node.outputs[0], _terms(fold, norm, fold.values[other.id], partials), node.label)
        return True
    return False


def _after_norm(fold: _Folding, product: Node, **changes: Attribute) -> Value:
    """A product, which scales its sums where what it reads is the result of a norm that was folded."""
    inputs, attrs = [fold.values[v.id] for v in product.inputs], {**product.attributes, **changes}
    normed = _normed(fold, product.inputs[0])
    if normed is not None:
        inputs.append(fold.squares[normed.outputs[0].id])
        attrs |= {"roles": _roles(product) | SQUARES, "eps": normed.attributes["eps"]}
    return fold.again(product, inputs, attrs)


def _terms(fold: _Folding, norm: Node, x: Value, *partials: Value) -> Value:
    """What stands for a norm: its result is x * weight in bf16, `squares` its sums of squares. Returns x + partials."""
    flat = Type(x.type.dtype, (x.type.size,))
    operands = [fold.shaped(x, flat, norm.label), fold.values[norm.inputs[1].id], *partials]
    total, scaled, squares = fold.place(norm.label, "rms_norm_terms", operands, norm.attributes)
    result = norm.outputs[0]
    fold.values[result.id], fold.squares[result.id] = fold.shaped(scaled, result.type, norm.label), squares
    return total  # type: ignore[no-any-return]


def _narrow(fold: _Folding, node: Node) -> bool:
    """cast(f(x), bf16): who can write bf16 (attribute `out`) does, where nobody reads it but such casts."""
    if node.op == "cast" and fold.values[node.inputs[0].id].type == node.outputs[0].type:
        fold.values[node.outputs[0].id] = fold.values[node.inputs[0].id]
        return True
    if node.attributes.get("out") != "f32" or _is_partial(node) or fold.is_shown(node.outputs[0]):
        return False
    reading = fold.reading(node.outputs[0])
    if not reading or not all(_rounds(reader) for reader in reading):
        return False
    fold.copy(node, out="bf16")
    return True


def _epilogue(fold: _Folding, node: Node) -> bool:
    """An operator that is the epilogue of a product names the operator that is both (`Operator.fused`).

    Its operands and attributes are the product's x, tiles and squares, and by their names those of the epilogue.
    """
    operator = operator_of(node)
    if operator.fused is None:
        return False
    product = fold.product(node.inputs[0], "tiled_matmul")
    if product is None or not _is_plain(product) or not _roles(product) & SQUARES:
        return False
    names = [operand.name for operand in operator.operands_for(len(node.inputs))]
    given = dict(zip(names[1:], node.inputs[1:], strict=True))
    given |= dict(zip(("x", "tiles", "squares"), product.inputs, strict=True))
    chosen = fold.g.library.resolve(operator.fused)
    inputs = [fold.values[given[o.name].id] for o in LIBRARY.get(chosen.name, chosen.version).operands]
    made = fold.place(product.label, chosen.name, inputs, {**node.attributes, **product.attributes})
    for old, new in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
        fold.give(old, new, node.label)
    return True


def _argmax(fold: _Folding, node: Node) -> bool:
    """argmax(x W^T): every share of the rows gives its best one, so that no logits are written. A NaN never wins."""
    product = fold.product(node.inputs[0], "tiled_matmul") if node.op == "argmax" else None
    if product is None or not _is_plain(product) or not _roles(product) & SQUARES:
        return False
    if node.inputs[0].type.shape[-1] != product.attributes["n"]:
        return False  # of the rows of a matrix that the product was made into
    inputs = [fold.values[v.id] for v in product.inputs]
    candidates = fold.place(product.label, "argmax_projection", inputs, product.attributes)
    fold.give(node.outputs[0], fold.place(node.label, "argmax_merge", [candidates], {}), node.label)
    return True


RULES: tuple[tuple[str, Rule], ...] = (
    ("activation(product) -> product with the activation", _activation),
    ("add(x, matmul) -> matmul with a residual", _residual),
    ("tiled_matmul(cast(rms_norm(add(x, tiled_matmul)))) -> rms_norm_terms of partial sums; squares scale", _norm),
    ("cast(f(x), bf16) -> f(x, out=bf16)", _narrow),
    ("epilogue(tiled_matmul) -> the operator that is both", _epilogue),
    ("argmax(tiled_matmul) -> argmax_merge(argmax_projection)", _argmax),
)


# --- what the rules ask -------------------------------------------------------------------------------------------
def _is_whole_view(node: Node) -> bool:
    return node.op == "reshape"


def _addends(node: Node) -> tuple[tuple[Value, Value], ...]:
    """The two orders of a sum of session values of one type; none of anything else."""
    if node.op != "add" or node.inputs[0].type != node.inputs[1].type or any(v.weight for v in node.inputs):
        return ()
    a, b = node.inputs
    return ((a, b), (b, a))


def _roles(product: Node) -> int:
    return int(product.attributes["roles"])  # type: ignore[arg-type]


def _is_partial(node: Node) -> bool:
    return node.op == "tiled_matmul" and node.attributes["splits"] != 0


def _is_closed(product: Node) -> bool:
    """Whether its result is no longer what an epilogue may work on: a sum with a residual, partial sums, or bf16."""
    if product.op == "matmul":
        return bool(_roles(product) & RESIDUAL)
    return _is_partial(product) or product.attributes["out"] != "f32"


def _is_plain(product: Node) -> bool:
    """Whether a tiled product gives its sums as they are."""
    return not (_is_closed(product) or _roles(product) & BIAS) and product.attributes["activation"] == "none"


def _rounds(node: Node) -> bool:
    return node.op == "cast" and node.attributes["dtype"] == "bf16"


def _is_foldable(fold: _Folding, node: Node) -> bool:
    """Whether this is a norm of one vector that only tiled products read, in bf16, none of them scaled already."""
    if node.op != "rms_norm" or not node.inputs[1].weight:
        return False
    x, result = node.inputs[0].type, node.outputs[0]
    casts = fold.reading(result)
    if x.shape[-1] != x.size or fold.is_shown(result) or not casts or not all(_rounds(c) for c in casts):
        return False
    if any(fold.is_shown(c.outputs[0]) for c in casts):
        return False
    products = [product for c in casts for product in fold.reading(c.outputs[0])]
    return bool(products) and all(p.op == "tiled_matmul" and not _roles(p) & SQUARES for p in products)


def _normed(fold: _Folding, value: Value) -> Node | None:
    """The foldable norm of which this value is the rounded result."""
    cast = fold.producers.get(fold.source(value).id)
    if cast is None or not _rounds(cast):
        return None
    norm = fold.producers.get(fold.source(cast.inputs[0]).id)
    return norm if norm is not None and _is_foldable(fold, norm) else None
