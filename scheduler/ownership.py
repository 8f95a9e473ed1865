"""Which block owns which rows: the pass that cuts the weights of products, and caches, for a target.

A product's weights are packed as `shares` of their rows times `splits` of their columns, a part for a block. Where its
rows must be final (there is an epilogue), only rows are shared out. Where partial sums may be given, the matrix is cut
both ways so that all parts are nearly alike.

The rows of a cache are read in ranges, whose partial sums are merged: as many as make the parts of all sessions a whole
number a block, or nearly so.
"""

from __future__ import annotations

from wpk.ir.graph import Graph, Library, Node
from wpk.ops.tiles import GROUP, MOST_ROWS, chunks_of
from wpk.scheduler.rewrite import Rewriter, prune
from wpk.scheduler.target import Target

MOST_SPLITS = 8  # partial sums that whoever adds them reads
MOST_RANGES = 16  # of a session's cache
FEW_RANGES = 8  # more are taken only where they gain more than
WORTH_MORE = 0.03
LEAST_ROWS = 64  # of a cache's range


def own_rows(graph: Graph, library: Library, target: Target, capacity: int | None = None) -> Graph:
    """Give every tiled product, and the packing of its weights, the shares and splits that suit the target.

    capacity: sessions for which attention is cut too, on targets that gain by it.
    """
    rewriter = Rewriter(graph, library)
    rewriter.leaves()
    producers = graph.producers()
    for node in graph.nodes:
        if node.weight:
            continue
        packing = _packing(node, producers)
        if capacity is not None and target.kind == "cuda" and _is_merged(node, graph):
            rewriter.copy(node, splits=ranges(node.inputs[1].type.shape[0], capacity, target))
            continue
        if packing is None:
            rewriter.copy(node)
            continue
        n, k = packing.inputs[0].type.shape
        given = int(node.attributes.get("splits", 0))  # type: ignore[arg-type]
        shares, splits = cut(n, k, target, partial=given > 0 and _may_split(node, graph))
        if given == 0 or not _may_split(node, graph):
            splits = given
        rewriter.copy(packing, shares=shares, splits=splits)
        rewriter.copy(node, shares=shares, **({"splits": splits} if given else {}))
    return prune(rewriter.finish(), library)


def cut(n: int, k: int, target: Target, *, partial: bool) -> tuple[int, int]:
    """(shares of the rows, splits of the columns) of a matrix [n, k].

    partial: whether sums over a part of the columns may be given. Then the work of the busiest block is made least,
    and of equal ones the one with fewer partial sums is taken.
    """
    groups, chunks, blocks = n // GROUP, chunks_of(k), target.blocks
    splittable = partial and target.kind == "cuda"  # a CPU's threads share memory: they gain nothing by adding up
    choices = [
        (_shares(groups, blocks // q), q)
        for q in range(1, min(MOST_SPLITS, chunks) + 1 if splittable else 2)
        if blocks % q == 0
    ]
    return min(choices, key=lambda c: (_busiest(groups, chunks, blocks, *c), c[1]))


def ranges(rows: int, slots: int, target: Target) -> int:
    """In how many ranges the rows of each session's cache are read: the fewest of those that leave blocks least idle.

    Idle is what the busiest block, which has a whole number of ranges, has more than the mean.
    """
    most = max(1, min(MOST_RANGES, rows // LEAST_ROWS))
    busiest = {p: -(-slots * p // target.blocks) / (slots * p / target.blocks) for p in range(1, most + 1)}
    few, any_number = (min(range(1, n + 1), key=lambda p: (busiest[p], p)) for n in (min(most, FEW_RANGES), most))
    return any_number if busiest[few] > (1 + WORTH_MORE) * busiest[any_number] else few


def _shares(groups: int, blocks: int) -> int:
    """The smallest multiple of `blocks` whose shares fit into a tile, but no share without rows."""
    return min(groups, blocks * -(-groups * GROUP // (blocks * MOST_ROWS)))


def _busiest(groups: int, chunks: int, blocks: int, shares: int, splits: int) -> int:
    """Tiles (groups x chunks) that the busiest block computes."""
    parts = -(-shares * splits // blocks)
    return parts * -(-groups // shares) * -(-chunks // splits)


def _packing(node: Node, producers: dict[int, Node]) -> Node | None:
    """The node that packs a tiled product's weights; None where the node is no such product."""
    if "shares" not in node.attributes or len(node.inputs) < 2:
        return None
    made_by = producers.get(node.inputs[1].id)
    return made_by if made_by is not None and made_by.op == "pack_tiles" else None


def _is_merged(node: Node, graph: Graph) -> bool:
    """Whether this is attention in ranges that only `attention_merge` reads, which takes any number of them."""
    if node.op != "attention_parts":
        return False
    (parts,) = node.outputs
    shown = {p.value.id for p in graph.outputs} | {s.update.id for s in graph.states if s.update}
    reading = [n for n in graph.nodes if any(v.id == parts.id for v in n.inputs)]
    return parts.id not in shown and all(n.op == "attention_merge" for n in reading)


def _may_split(product: Node, graph: Graph) -> bool:
    """Whether only operators that add up any number of partial sums read the product."""
    (sums,) = product.outputs
    shown = {p.value.id for p in graph.outputs} | {s.update.id for s in graph.states if s.update}
    reading = [n for n in graph.nodes if any(v.id == sums.id for v in n.inputs)]
    return sums.id not in shown and all(n.op == "rms_norm_terms" and n.inputs[2].id == sums.id for n in reading)
