"""A table of embeddings from spelling: entry by entry, some at a time, and with little beside it.

Models' tests compare the encoder with other implementations.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.ops.harness import application
from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder
from wpk.ir.types import f32, i32
from wpk.ops import LIBRARY, characters
from wpk.ops.operator import make
from wpk.ops.requirements import Selection

D, W, F, N = 6, 8, 10, 12  # widths of vectors, heads and feed-forward; ids
PAD = N - 1
SHAPES = [(N, D), *[(W, D)] * 3, (D, W), *[(D,)] * 4, (F, D), (F, D), (D, F), (D,), (D, D)]
ATTRS = {"heads": 2, "scale": 0.5}


def table(ids, kinds=None, seed=0):
    rng = np.random.default_rng(seed)
    weights = [rng.standard_normal(shape) for shape in SHAPES]
    kinds = np.zeros(len(ids), int) if kinds is None else np.array(kinds)
    vectors = rng.standard_normal((3, D))
    made = make(LIBRARY.get("character_table"), ATTRS).meaning(np.array(ids), *weights, kinds, vectors)
    return np.asarray(made)


IDS = np.array([[1, 2, 3, 4], [5, PAD, PAD, PAD], [1, 2, PAD, PAD], [PAD] * 4, [2, 1, PAD, PAD], [1, 2, PAD, 7]])


def test_entries_do_not_see_each_other_nor_what_is_behind_their_end():
    made = table(IDS)
    for i, row in enumerate(IDS):
        np.testing.assert_allclose(table(row[None])[0], made[i], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(made[2], made[5])
    np.testing.assert_array_equal(table(IDS[:, :2])[1], made[1])
    assert np.abs(made[2] - made[4]).max() > 0.01, "the order of characters counts"


def test_kinds_add_a_vector_and_ids_are_clipped():
    plain, kinds = table(IDS), table(IDS, [0, 1, 2, 1, -4, 99])
    vectors = np.random.default_rng(0)
    for shape in SHAPES:
        vectors.standard_normal(shape)
    offsets = vectors.standard_normal((3, D))
    np.testing.assert_allclose(kinds - plain, offsets[[0, 1, 2, 1, 0, 2]] - offsets[0], atol=1e-6)
    np.testing.assert_array_equal(table([[1, 2, 99, -1]]), table([[1, 2, PAD, PAD]]))
    np.testing.assert_array_equal(table([[-5, 2]]), table([[0, 2]]))
    np.testing.assert_allclose(plain[3], offsets[0], atol=1e-6, err_msg="of no characters: nothing but the kind")


def test_it_is_made_in_pieces(monkeypatch):
    """The same whatever the pieces; an entry more takes its rows, its ids and where it stands, not its activations."""
    ids = np.random.default_rng(1).integers(0, PAD, (40, 3))
    whole = table(ids)
    monkeypatch.setattr(characters, "AT_ONCE", 7)
    np.testing.assert_allclose(table(ids), whole, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(characters, "AT_ONCE", 256)
    peaks = []
    for count in (1000, 5000):
        many = np.random.default_rng(1).integers(0, PAD, (count, 4))
        tracemalloc.start()
        table(many)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    row, spelling, activations = 4 * D, 4 * 8, 4 * 8 * (4 * W + 3 * F)
    assert peaks[1] - peaks[0] < 4000 * (2 * row + 4 * spelling) < 4000 * activations / 4


def test_it_is_of_weights_alone():
    given = [i32(5, 4), *(f32(*shape) for shape in SHAPES), i32(5), f32(3, D)]
    assert application("character_table", *given, **ATTRS).results == (f32(5, D),)
    with pytest.raises(GraphError, match="wanted that divide the rows of `query` into even parts; found 3 of 8 rows"):
        application("character_table", *given, **{**ATTRS, "heads": 3})
    g = GraphBuilder("model", Selection({}, LIBRARY))
    values = [g.input("ids", given[0]), *(g.weight(f"w{i}", t) for i, t in enumerate(given[1:]))]
    with pytest.raises(GraphError, match="operand 'characters'; wanted a weight"):
        g.op("character_table", *values, **ATTRS)
