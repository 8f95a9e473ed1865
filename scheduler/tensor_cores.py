"""Products of f32 that may be TF32 go to a target's tensor cores: `matmul` with products "tf32" becomes `tf32_matmul`.

A product whose sizes do not suit stays as it is and multiplies in f32: rows of the weight in eights, windows that lie
in x as a whole, a multiple of 16 bytes apart and beginning at one. For a product of one frame rows of zeros are added
to the weight. Of a product with a second operand two are made, the one adding to what the other gives.

How many shares a weight's rows have is decided here, for the sessions and blocks of the target: a block takes a share
times a tile of x at a time, for which it reads both.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from wpk.ir.graph import Attribute, Graph, Library, Node, Value
from wpk.ops import linear, tf32
from wpk.ops.legal import first_broken
from wpk.ops.tf32 import ALIGNED, frame_tiles, product_rules, unit_slots
from wpk.ops.tiles import GROUP, TILE_SLOTS, least_shares, tile_sessions
from wpk.scheduler.rewrite import Rewriter, prune
from wpk.scheduler.target import Target
from wpk.scheduler.views import operator_of, view_start

ALIGNMENT = 4 * ALIGNED  # bytes of what a GPU's copy engine can address


def use_tensor_cores(graph: Graph, library: Library, target: Target, capacity: int | None = None) -> Graph:
    """The beat of a target that has tensor cores, with products on them.

    capacity: sessions, for which weights are cut; None: as many as fill half a tile.
    """
    if not any(_may_be_tf32(node) for node in graph.nodes):
        return graph
    return _Products(graph, library, target, capacity or TILE_SLOTS // 2).run()


def why_not(node: Node, producers: dict[int, Node]) -> str | None:
    """What a `matmul` wants to run on tensor cores; None where it can."""
    product = _product(node)
    sizes = (
        [(product.k, product.x)] if product.second is None else [(product.k, product.x), (product.k2, product.second)]
    )
    for k, x in sizes:
        start = max(0, -product.pad)
        step = product.step if product.frames > 1 else ALIGNED
        wanted = first_broken(
            ("weights that are packed here", product.packing(producers) is not None),
            ("no zeros before x", product.pad <= 0),
            *product_rules(
                product.n + product.missing,
                k,
                least_shares(product.n + product.missing),
                product.frames,
                step,
                x.type.size - start,
            ),
            ("x at a multiple of 16 bytes", (_start(x, producers) + 4 * start) % ALIGNMENT == 0),
            ("no activation with a second operand", product.second is None or product.activation == "none"),
        )
        if wanted is not None:
            return wanted
    return None


def shares_of(n: int, frames: int, slots: int, rows: int, blocks: float) -> int:
    """In how many shares the rows of a weight are cut, so that the busiest of so many blocks has the least to do.

    A block reads, for every share times tile of x, the share's rows of the weight and the tile's of x, `rows`: that is
    what takes its time. Of equal ones the fewest shares.
    """
    tiles: int = frame_tiles(frames, rows) * -(-slots // unit_slots(frames, rows))
    groups = n // GROUP

    def busiest(shares: int) -> int:
        units = max(1, math.ceil(shares * tiles / blocks))
        return units * (GROUP * -(-groups // shares) + rows)

    return min(range(least_shares(n), groups + 1), key=lambda shares: (busiest(shares), shares))


# --- what a node is -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Product:
    """A `matmul` by its attributes and operands."""

    node: Node
    x: Value
    weight: Value
    bias: Value | None
    second: Value | None
    residual: Value | None
    n: int
    k: int
    k2: int
    frames: int
    step: int
    pad: int
    activation: str

    @property
    def missing(self) -> int:
        """Rows of the weight to be added: where there is one frame, the result is at the start of a longer one."""
        return -self.n % GROUP if self.frames == 1 and self.residual is None else 0

    def packing(self, producers: dict[int, Node]) -> Node | None:
        """The node that packs its weight."""
        made_by = producers.get(self.weight.id)
        return made_by if made_by is not None and made_by.op == "pack_panels" else None


def _product(node: Node) -> _Product:
    given = {**node.attributes}
    numbers = {name: int(given[name]) for name in ("n", "k", "frames", "step", "pad")}  # type: ignore[arg-type]
    roles, rest = int(given["roles"]), list(node.inputs[2:])  # type: ignore[arg-type]
    bits = (linear.BIAS, linear.SECOND, linear.RESIDUAL)
    bias, second, residual = (rest.pop(0) if roles & bit else None for bit in bits)
    k2 = node.inputs[1].type.shape[1] - numbers["k"]
    return _Product(
        node, node.inputs[0], node.inputs[1], bias, second, residual, k2=k2, activation=str(given["activation"]),
        **numbers,
    )  # fmt: skip


def _may_be_tf32(node: Node) -> bool:
    return node.op == "matmul" and not node.weight and node.attributes["products"] == "tf32"


def _start(value: Value, producers: dict[int, Node]) -> int:
    """Bytes from a place that is aligned, in every slot, to a value: where it is a view, into what it shows.

    Storages are aligned, and so are the parts of joined ones (`joins.PART_ALIGN`).
    """
    start = 0
    while (node := producers.get(value.id)) is not None:
        offset, shared = view_start(node), operator_of(node).alias.get(node.outputs.index(value))
        if offset is None and shared is None:
            break
        start, value = start + (offset or 0), node.inputs[shared or 0]
    return start


# --- the graph ----------------------------------------------------------------------------------------------------
class _Products(Rewriter):
    def __init__(self, graph: Graph, library: Library, target: Target, slots: int) -> None:
        super().__init__(graph, library)
        self.leaves()
        self._target, self._slots = target, slots
        self._producers = graph.producers()

    def run(self) -> Graph:
        chosen = {
            node: _product(node)
            for node in self.graph.nodes
            if _may_be_tf32(node) and why_not(node, self._producers) is None
        }
        # Products that read the same run side by side and have the blocks together.
        rows = Counter[tuple[int, int]]()
        for product in chosen.values():
            rows[product.x.id, product.k] += product.n
        for node in self.graph.nodes:
            if node in chosen:
                product = chosen[node]
                self._replace(product, product.n / rows[product.x.id, product.k])
            elif not node.weight:
                self.copy(node)
        return prune(self.finish(), self.g.library)

    def _replace(self, product: _Product, part: float) -> None:
        """part: of the target's blocks that the product has."""
        with self.g.labelled(product.node.label):
            packing = product.packing(self._producers)
            assert packing is not None
            weight = self._padded(self.values[packing.inputs[0].id], product)
            bias = None if product.bias is None else self._padded(self.values[product.bias.id], product)
            residual = None if product.residual is None else self.values[product.residual.id]
            added = {"bias": bias, "residual": residual}
            if product.second is not None:
                beside = self._once("slice", weight, axis=1, start=product.k, stop=product.k + product.k2)
                weight = self._once("slice", weight, axis=1, start=0, stop=product.k)
                made = self._multiply(product, self.values[product.second.id], beside, part, "none", **added)
                added = {"bias": None, "residual": made}
            x = self.values[product.x.id]
            if product.pad < 0:
                flat = self.g.op("reshape", x, shape=(x.type.size,))
                x = self.g.op("slice", flat, axis=0, start=-product.pad, stop=x.type.size)
            made = self._multiply(product, x, weight, part, product.activation, **added)
            if product.missing:
                made = self.g.op("slice", made, axis=1, start=0, stop=product.n)
            self.values[product.node.outputs[0].id] = made

    def _multiply(
        self, product: _Product, x: Value, weight: Value, part: float, activation: str, bias: Value | None,
        residual: Value | None,
    ) -> Value:  # fmt: skip
        n, k = weight.type.shape
        rows, frames = tile_sessions(self._slots), product.frames
        shares = shares_of(n, frames, self._slots, rows, max(1.0, part * self._target.blocks))
        extra = [v for v in (bias, residual) if v is not None]
        roles = (tf32.BIAS if bias is not None else 0) | (tf32.RESIDUAL if residual is not None else 0)
        attrs: dict[str, Attribute] = {
            "n": n, "k": k, "shares": shares, "frames": frames, "rows": rows, "activation": activation, "roles": roles,
            "step": product.step if frames > 1 else -(-k // ALIGNED) * ALIGNED,
        }  # fmt: skip
        return self.g.op("tf32_matmul", x, self._once("pack_tf32_tiles", weight, shares=shares), *extra, **attrs)  # type: ignore[no-any-return]

    def _once(self, op: str, weight: Value, **attrs: Attribute) -> Value:
        """What is made of a weight, once for all steps."""
        key = (op, weight, *sorted(attrs.items()))
        if key not in self._made:
            self._made[key] = (self.g.op(op, weight, **attrs),)
        return self._made[key][0]

    def _padded(self, weight: Value, product: _Product) -> Value:
        """A weight or bias with the rows that are missing."""
        if not product.missing:
            return weight
        return self._once("pad", weight, before=0, after=product.missing, mode="zeros")
