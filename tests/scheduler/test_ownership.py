"""Who owns which rows of a product: the cuts of real matrices, and what the pass does to a graph."""

from __future__ import annotations

import pytest

from tests.scheduler.graphs import SELECTION, Meant, agree, builder, only, tiled, weights_of
from wpk.ir.check import check_graph
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.types import bf16, f32, i32
from wpk.ops.tiles import GROUP, MOST_ROWS, chunks_of
from wpk.scheduler.fuse import fuse
from wpk.scheduler.ownership import LEAST_ROWS, MOST_RANGES, MOST_SPLITS, cut, own_rows, ranges
from wpk.scheduler.rewrite import expand
from wpk.scheduler.target import Target, find_target

H200, CPU = find_target("h200"), find_target("cpu")


# --- cuts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "k", "final", "partial"),
    [
        # groups of 8 rows over 132 blocks; partial sums where rows alone come out uneven
        (4480, 10240, (132, 1), (33, 4)),  # 560 groups: 4.24 a block; 16.97 by 40 of 160 chunks
        (4480, 15680, (132, 1), (33, 4)),  # 245 chunks
        (22656, 4480, (132, 1), (132, 1)),  # 2832 groups: 21.45 a block, 22 fit
        (131072, 4480, (792, 1), (792, 1)),  # six shares a block
        (64, 4096, (8, 1), (8, 6)),  # fewer groups than blocks; 8 does not divide 132
        (1056, 64, (132, 1), (132, 1)),
    ],
)
def test_the_cuts_of_real_matrices(n: int, k: int, final: tuple[int, int], partial: tuple[int, int]) -> None:
    assert cut(n, k, H200, partial=False) == final
    found = cut(n, k, H200, partial=True)
    assert busiest(n, k, H200, found) <= busiest(n, k, H200, partial)
    assert found == partial


def busiest(n: int, k: int, target: Target, found: tuple[int, int]) -> int:
    """Tiles of the busiest block, counted part by part."""
    shares, splits = found
    groups, chunks = n // GROUP, chunks_of(k)
    work = [0] * target.blocks
    for part in range(shares * splits):
        r, q = divmod(part, splits)
        rows = groups * (r + 1) // shares - groups * r // shares
        work[part * target.blocks // max(target.blocks, shares * splits)] += rows * (
            chunks * (q + 1) // splits - chunks * q // splits
        )
    return max(work)


@pytest.mark.parametrize("target", [CPU, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("partial", [False, True])
def test_every_cut_can_be_packed(target: Target, partial: bool) -> None:
    for groups in (*range(1, 200), 560, 1960, 2832, 16384):
        for k in (1, 64, 65, 640, 15680):
            shares, splits = cut(GROUP * groups, k, target, partial=partial)
            assert 1 <= shares <= groups and -(-groups // shares) * GROUP <= MOST_ROWS
            assert 1 <= splits <= (min(MOST_SPLITS, chunks_of(k)) if partial and target is H200 else 1)
            assert splits == 1 or target.blocks % splits == 0


def test_a_cpu_never_splits_columns() -> None:
    assert cut(4480, 10240, CPU, partial=True) == cut(4480, 10240, CPU, partial=False) == (32, 1)


# --- ranges of caches ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "slots", "wanted"),
    [
        (1500, 56, 7),  # 392 of 396 that three a block would be; six: 336 of 396
        (8192, 64, 2),  # 128 of 132
        (8192, 132, 1),
        (8192, 33, 4),
        (8192, 40, 13),  # 520 of 528; of at most eight, three: 120 of 132
        (256, 56, 2),  # 112 of 132, as four: the fewer
        (100, 1, 1),
        (1500, 1, 16),
    ],
)
def test_ranges_come_out_even(rows: int, slots: int, wanted: int) -> None:
    assert ranges(rows, slots, H200) == wanted


@pytest.mark.parametrize("rows", [1, 63, 64, 640, 5000])
def test_ranges_are_not_too_short(rows: int) -> None:
    for slots in range(1, 300):
        found = ranges(rows, slots, H200)
        assert 1 <= found <= MOST_RANGES and (found == 1 or rows >= found * LEAST_ROWS)


# --- the pass -----------------------------------------------------------------------------------------------------
def block(g: GraphBuilder) -> None:
    x: Value = g.input("x", f32(128))
    h = g.op("relu2", tiled(g, g.op("rms_norm", x, g.weight("norm", f32(128))), 512, "up"))
    x = g.op("add", x, tiled(g, h, 128, "down"))
    g.output("y", tiled(g, g.op("rms_norm", x, g.weight("norm_f", f32(128))), 64, "head"))


def graph() -> Graph:
    g = builder()
    block(g)
    return fuse(expand(g.build(), SELECTION), SELECTION)


def cuts(made: Graph) -> dict[str, list[object]]:
    """Weight -> shares and splits of its packing, then of the product."""
    names = {p.value.id: p.name for p in made.weights}
    packed = {n.outputs[0].id: n for n in made.nodes if n.op == "pack_tiles"}
    found: dict[str, list[object]] = {}
    for node in made.nodes:
        if node.op == "tiled_matmul":
            packing = packed[node.inputs[1].id]
            both = (packing, node)
            found[names[packing.inputs[0].id]] = [a.attributes[k] for a in both for k in ("shares", "splits")]
    return found


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (H200, {"up": [64, 0, 64, 0], "down": [16, 4, 16, 4], "head": [8, 0, 8, 0]}),
        (CPU, {"up": [8, 0, 8, 0], "down": [8, 1, 8, 1], "head": [8, 0, 8, 0]}),
    ],
    ids=["h200", "cpu"],
)
def test_products_and_their_weights_are_cut_alike(target: Target, wanted: dict[str, list[object]]) -> None:
    made = own_rows(graph(), SELECTION, target)
    check_graph(made, SELECTION)
    assert cuts(made) == wanted
    assert sum(n.op == "pack_tiles" for n in made.nodes) == 3


@pytest.mark.parametrize("target", [H200, CPU], ids=lambda t: t.name)
def test_cuts_change_no_meaning(target: Target) -> None:
    whole = graph()
    weights = weights_of(whole)
    agree(whole, Meant(own_rows(whole, SELECTION, target), weights), Meant(whole, weights), beats=3)


def test_partial_sums_that_something_else_reads_keep_their_number() -> None:
    g = builder()
    g.output("sums", tiled(g, g.input("x", f32(256)), 64, splits=2))
    made = own_rows(g.build(), SELECTION, H200)
    assert only(made, "tiled_matmul").outputs[0].type == f32(2, 64)
    assert cuts(made) == {"w": [8, 2, 8, 2]}


def test_one_weight_in_two_cuts_is_packed_twice() -> None:
    g = builder()
    x: Value = g.input("x", f32(128))
    g.output("y", tiled(g, x, 128, "w"))
    x = g.op("add", x, tiled(g, x, 128, "w"))
    g.output("z", tiled(g, g.op("rms_norm", x, g.weight("norm", f32(128))), 64, "head"))
    made = own_rows(fuse(g.build(), SELECTION), SELECTION, H200)
    check_graph(made, SELECTION)
    assert sorted(n.attributes["splits"] for n in made.nodes if n.op == "pack_tiles") == [0, 0, 2]


def test_other_graphs_are_left_as_they_are() -> None:
    g = builder()
    g.output("y", g.op("linear", g.input("x", f32(6)), g.weight("w", f32(6, 6))))
    expanded = expand(g.build(), SELECTION)
    assert str(own_rows(expanded, SELECTION, H200)) == str(expanded)


def attention(*, shown: bool) -> Graph:
    g = builder()
    q, cache = g.input("q", bf16(64)), g.input("cache", bf16(256, 2, 2, 16))
    parts = g.op("attention_parts", q, cache, g.input("position", i32()), heads=4, splits=3)
    g.output("y", g.op("attention_merge", parts))
    if shown:
        g.output("parts", parts)
    return g.build()


def test_attention_is_cut_for_the_capacity_of_a_gpu() -> None:
    whole = attention(shown=False)
    for target, capacity, wanted in ((H200, 33, 4), (H200, 132, 1), (H200, None, 3), (CPU, 33, 3)):
        made = own_rows(whole, SELECTION, target, capacity)
        check_graph(made, SELECTION)
        assert only(made, "attention_parts").outputs[0].type == f32(wanted, 4, 18)
        agree(whole, Meant(made, {}), Meant(whole, {}), beats=3)


def test_attention_whose_parts_are_shown_keeps_them() -> None:
    made = own_rows(attention(shown=True), SELECTION, H200, 33)
    assert only(made, "attention_parts").outputs[0].type == f32(3, 4, 18)
