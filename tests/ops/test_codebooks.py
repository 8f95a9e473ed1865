"""Tables that a session's indices choose from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, check_body, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import f32, i32
from wpk.ops.operator import LIBRARY

FEW = settings(max_examples=10, deadline=None)
OUTSIDE = [-1, 2**31 - 1, -(2**31)]


@FEW
@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 6), st.sampled_from([1, 7, 64, 130]), st.integers(0, 99))
def test_embedding_sum(count, first, rows, d, seed):
    app = application("embedding_sum", i32(count), f32(6, rows, d), first=first)
    inputs = random_inputs(app, 3, seed)
    choices = np.array([*OUTSIDE, rows, *range(rows)], np.int32)
    inputs[0] = np.random.default_rng(seed).choice(choices, (3, count))
    check(app, inputs, 3)


def test_an_index_outside_adds_nothing():
    app = application("embedding_sum", i32(3), f32(3, 2, 1))
    table = np.array([[[1], [2]], [[10], [20]], [[100], [200]]], np.float32)
    (y,) = check(app, [np.array([[1, 2, 0], [-1, 2, 9]], np.int32), table], 2)
    assert y[:, 0].tolist() == [102, 0]


@FEW
@given(st.integers(1, 4), st.sampled_from([1, 15, 40]), st.sampled_from([1, 16, 37, 200]), st.integers(0, 99))
def test_selected_linear(v, n, k, seed):
    app = application("selected_linear", f32(k), f32(v, n, k), i32())
    inputs = random_inputs(app, 3, seed)
    inputs[2] = np.random.default_rng(seed).choice(np.array([*OUTSIDE, v, *range(v)], np.int32), 3)
    check(app, inputs, 3, rtol=1e-5, atol=1e-5)


def quantiser(count, first=0, books=6, rows=5, d=24):
    return application("residual_quantise", f32(d), f32(books, rows, d), f32(books, rows), count=count, first=first)


@FEW
@given(
    st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 2, 33]), st.sampled_from([1, 8, 50]), st.integers(0, 99)
)
def test_residual_quantise(count, first, rows, d, seed):
    app = quantiser(count, first, 6, rows, d)
    inputs = random_inputs(app, 3, seed)
    inputs[2] = (inputs[1] ** 2).sum(-1)
    check(app, inputs, 3, rtol=1e-5, atol=1e-5)


def test_books_that_hold_what_is_left_are_found_in_order():
    rng = np.random.default_rng(0)
    books = (rng.standard_normal((6, 5, 24)) * 10.0 ** -np.arange(6)[:, None, None]).astype(np.float32)
    wanted = rng.integers(0, 5, (4, 3))
    z = books[np.arange(1, 4), wanted].sum(1)
    app = quantiser(3, 1)
    codes, rest = check(app, [z, books, (books**2).sum(-1)], 4, rtol=1e-4, atol=1e-4)
    assert codes.tolist() == wanted.tolist() and np.abs(rest).max() < 1e-5


def test_the_first_of_equals_is_taken_and_numbers_that_are_none_do_no_harm():
    books = np.tile(np.float32([[1.0], [1.0], [2.0]]), (6, 1, 1)).reshape(6, 3, 1)
    app = quantiser(2, 0, 6, 3, 1)
    codes, rest = check(app, [np.float32([[1.0], [3.0]]), books, (books**2).sum(-1)], 2)
    assert codes.tolist() == [[0, 0], [2, 0]] and rest[:, 0].tolist() == [-1, 0]
    check_body(app, [np.float32([[np.nan], [np.inf]]), books, (books**2).sum(-1)], 2)


def test_books_that_are_not_there():
    for change in ({"first": 5, "count": 2}, {"count": 0}, {"first": -1, "count": 1}):
        with pytest.raises(GraphError, match="wanted 0 <= first, 1 <= count, first \\+ count <= 6"):
            quantiser(**{"count": 1, **change})
    with pytest.raises(GraphError, match="embedding_sum: books"):
        application("embedding_sum", i32(4), f32(3, 2, 1))
    assert LIBRARY.get("residual_quantise").legal((6, 5, 8, 2, 5, 0, 0, 0, 0), 5, (True,) * 5)
    assert LIBRARY.get("embedding_sum").legal((6, 5, 8, 2, 5, 0, 0, 0, 0), 3, (True,) * 3)
