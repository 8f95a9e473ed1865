"""Attention over the last rows of a stream by how far back they are, against meaning and Transformer-XL in torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import Application, application, check, check_refused, execute, random_inputs, stored
from wpk.ir.errors import GraphError
from wpk.ir.types import f32, i32
from wpk.ops.operator import LIBRARY, Array, make

SEEDS = st.integers(0, 99)


def attention(rows: int, heads: int, width: int, scale: float = 0.25) -> Application:
    return application(
        "relative_attention", f32(2, heads, width), f32(rows, 2, heads, width), f32(rows, heads, width), i32(),
        scale=scale,
    )  # fmt: skip


def inputs(app: Application, slots: int, seed: int) -> list[Array]:
    """Sessions at the start, about to wrap, just wrapped, far on, and before it all."""
    rows = app.inputs[1].shape[0]
    chosen = np.array([0, rows // 2, rows - 1, rows, 5 * rows + 1, -1, 2**31 - 1, -(2**31)])
    made = random_inputs(app, slots, seed)
    made[3] = stored(np.random.default_rng(seed).permutation(chosen)[:slots], i32())
    return made


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 31, 32, 33, 71]), st.integers(1, 4), st.sampled_from([1, 7, 16, 65]),
    st.sampled_from([0.25, -1.0, 0.0]), st.sampled_from([1, 3]), SEEDS,
)  # fmt: skip
def test_relative_attention(rows: int, heads: int, width: int, scale: float, slots: int, seed: int) -> None:
    app = attention(rows, heads, width, scale)
    check(app, inputs(app, slots, seed), slots, rtol=2e-5, atol=2e-5)


def test_rows_that_are_not_filled_yet_are_not_read() -> None:
    app = attention(5, 2, 8)
    query, rows, distances, _ = inputs(app, 1, 0)
    wanted = execute(app, [query, rows, distances, np.array([2], np.int32)], 1)
    rows[:, 3:] = np.nan
    np.testing.assert_array_equal(execute(app, [query, rows, distances, np.array([2], np.int32)], 1), wanted)


def test_scores_beyond_all_numbers_are_the_matter_of_their_session_alone() -> None:
    """Every score of session 0 is minus infinity: there is nothing to divide by, and session 1 comes after it."""
    app = attention(3, 1, 4)
    query, rows, distances, position = inputs(app, 2, 0)
    position[:] = 7
    wanted = execute(app, [query[1:], rows[1:], distances, position[1:]], 1)[0][0]
    query[0, 0], query[0, 1], rows[0] = 3e38, 0, -3e38
    found = execute(app, [query, rows, distances, position], 2)[0]
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1], wanted)


def test_where_the_rows_of_a_stream_lie_does_not_matter() -> None:
    """Eleven rows into room for four, one a step, as a stream keeps them."""
    app, rng = attention(4, 2, 8), np.random.default_rng(0)
    stream, query = rng.standard_normal((11, 2, 2, 8)), rng.standard_normal((2, 2, 8))
    distances, rows = rng.standard_normal((4, 2, 8)), np.zeros((4, 2, 2, 8))
    for n, row in enumerate(stream):
        rows[n % 4] = row
        found = app.op.meaning(query, rows, distances, np.array(n))
        seen = stream[max(0, n - 3) : n + 1]
        again = app.op.meaning(query, np.resize(seen, rows.shape), distances, np.array(len(seen) - 1))
        np.testing.assert_allclose(found, again, atol=1e-14)


@pytest.mark.oracle
def test_relative_attention_is_that_of_transformer_xl() -> None:
    """Scores (a) to (d) of Dai et al. 2019, section 3.3, through the shifted matrix of appendix B."""
    torch = pytest.importorskip("torch")
    rows, heads, width = 6, 3, 8
    app, rng = attention(rows, heads, width, scale=width**-0.5), np.random.default_rng(1)
    q, k, v = (torch.from_numpy(rng.standard_normal((rows, heads, width))) for _ in range(3))
    r = torch.from_numpy(rng.standard_normal((rows, heads, width)))  # of the distances 0, 1, ...
    u, w = (torch.from_numpy(rng.standard_normal((heads, width))) for _ in range(2))
    content = torch.einsum("ihd,jhd->hij", q + u, k)
    position = torch.einsum("ihd,jhd->hij", q + w, r.flip(0))
    padded = torch.nn.functional.pad(position, (1, 0)).view(heads, rows + 1, rows)[:, 1:].reshape(heads, rows, rows)
    masked = (content + padded) * width**-0.5 + torch.full((rows, rows), -torch.inf).triu(1)
    wanted = torch.einsum("hij,jhd->ihd", masked.softmax(-1), v)
    kept = np.stack([k.numpy(), v.numpy()], axis=1)
    for n in range(rows):
        query = torch.stack([q[n] + u, q[n] + w]).numpy()
        found = app.op.meaning(query, kept, r.numpy(), np.array(n))
        np.testing.assert_allclose(found, wanted[n].numpy(), atol=1e-12)


def test_sinusoids() -> None:
    table = make(LIBRARY.get("sinusoids"), {"rows": 3, "width": 4, "base": 100.0}).meaning()
    np.testing.assert_allclose(table, [[np.sin(p), np.cos(p), np.sin(p / 10), np.cos(p / 10)] for p in range(3)])
    with pytest.raises(GraphError, match="an even width"):
        application("sinusoids", rows=3, width=5)


def test_payloads_that_are_none_are_refused() -> None:
    scale = 0x3E800000
    check_refused("relative_attention", (5, 2, 8, scale), [(0, 2, 8, scale), (5, -1, 8, scale), (5, 2, 8, 0x7FC00000)])
