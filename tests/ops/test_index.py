"""Rows by index, inside and outside their range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16, f32, i32
from wpk.ops.operator import LIBRARY, make

FEW = settings(max_examples=25, deadline=None)
slot_counts = st.sampled_from([1, 3, 7])
INDICES = [0, 1, -1, 5, 2**31 - 1, -(2**31)]


@FEW
@given(
    st.integers(1, 9), st.sampled_from([(), (1,), (7,), (3, 5)]), st.integers(1, 8),
    st.sampled_from([DType.F32, DType.I32, DType.BOOL]), st.booleans(), slot_counts, st.integers(0, 99),
)  # fmt: skip
def test_gather(rows, inner, count, kind, table_is_weight, slots, seed):
    app = application("gather", Type(kind, (rows, *inner)), i32(count), weights=[table_is_weight, False])
    inputs = random_inputs(app, slots, seed)
    inputs[1] = np.random.default_rng(seed).choice(np.array([*INDICES, *range(rows)], np.int32), (slots, count))
    check(app, inputs, slots, rtol=0, atol=0)


@FEW
@given(
    st.integers(1, 9), st.sampled_from([1, 7, 64, 65, 200]), st.sampled_from([(), (1,), (5,)]),
    st.sampled_from([DType.F32, DType.BF16]), slot_counts, st.integers(0, 99),
)  # fmt: skip
def test_embedding(rows, d, shape, kind, slots, seed):
    app = application("embedding", i32(*shape), Type(kind, (rows, d)))
    inputs = random_inputs(app, slots, seed)
    inputs[0] = np.random.default_rng(seed).choice(np.array([*INDICES, *range(rows)], np.int32), (slots, *shape))
    check(app, inputs, slots, rtol=0, atol=0)


def test_an_index_outside_takes_the_nearest_row():
    app = application("embedding", i32(3), f32(2, 1))
    (y,) = check(app, [np.array([[-7, 1, 99]], np.int32), np.array([[10], [20]], np.float32)], slots=1)
    assert y[0, :, 0].tolist() == [10, 20, 20]


def test_types():
    assert application("gather", i32(5, 2), i32(4)).results == (i32(4, 2),)
    assert application("embedding", i32(), f32(5, 3)).results == (f32(3),)
    assert application("embedding", i32(2), bf16(5, 3)).results == (f32(2, 3),), "rows are widened"
    with pytest.raises(GraphError, match=r"wanted \[\] or \[t\]; found i32\[2,2\]"):
        application("embedding", i32(2, 2), f32(5, 3))
    with pytest.raises(GraphError, match="operand 'index' has the wrong dtype; wanted i32"):
        application("embedding", f32(), f32(5, 3))
    with pytest.raises(GraphError, match=r"wanted \[r, ...\]; found f32\[\]"):
        application("gather", f32(), i32(3))


def test_an_embedding_wants_a_table_of_floats():
    cls, present = LIBRARY.get("embedding"), (True,) * 3
    assert cls.legal((5, 3, 2, 1, 0, 0, 0, 0, 0), 3, present) is None
    for words in ((5, 3, 2, 2), (5, 3, 2, -1), (0, 3, 2, 1), (5, 0, 2, 0), (5, 3, 0, 0)):
        assert cls.legal((*words, 0, 0, 0, 0, 0), 3, present), words


@pytest.mark.oracle
def test_embedding_agrees_with_torch():
    torch = pytest.importorskip("torch")
    table, index = np.random.default_rng(0).standard_normal((6, 4)), np.array([5, 0, 3, 3])
    wanted = torch.nn.functional.embedding(torch.from_numpy(index), torch.from_numpy(table)).numpy()
    np.testing.assert_array_equal(make(LIBRARY.get("embedding"), {}).meaning(index, table), wanted)
    np.testing.assert_array_equal(make(LIBRARY.get("gather"), {}).meaning(table, index), wanted)
