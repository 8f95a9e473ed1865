"""Overlap-add of many frames at once: against its meaning, torch's fold, and itself in pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, check_refused
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.ops.overlap import BLOCK


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 999), st.sampled_from([1, 3, 7]))
@example(445, 16, 3 + 14 * 16, 1)  # frames of 16 samples, 4 apart, over several parts
def test_overlap_add_frames(t: int, n: int, seed: int, slots: int) -> None:
    hop = seed % n + 1
    trim = seed // n % (((t - 1) * hop + n + 1) // 2)
    app = application("overlap_add_frames", f32(t, n), hop=hop, trim=trim)
    assert app.results == (f32((t - 1) * hop + n - 2 * trim),)
    check(app, slots=slots, seed=seed, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("t", "n", "hop"), [(445, 16, 4), (9, 20, 7), (5, 6, 6), (300, 2, 1)])
def test_it_is_fold_of_torch(t: int, n: int, hop: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(n).standard_normal((1, t, n)).astype(np.float32)
    (y,) = check(application("overlap_add_frames", f32(t, n), hop=hop), [x], slots=1, atol=1e-5)
    columns = torch.from_numpy(x.transpose(0, 2, 1).copy())
    theirs = torch.nn.functional.fold(columns, (1, (t - 1) * hop + n), (1, n), stride=(1, hop))
    np.testing.assert_allclose(y[0], theirs.numpy().reshape(-1), rtol=1e-6, atol=1e-6)


def test_a_stream_in_pieces_is_the_whole_bit_for_bit() -> None:
    """Steps of 3 frames, each with the 4 before it in front: none of its samples waits for a frame to come."""
    n, hop, step = 16, 4, 3
    frames = np.random.default_rng(0).standard_normal((1, 4 + 5 * step, n)).astype(np.float32)
    frames[:, :4] = 0.0
    (whole,) = check(application("overlap_add_frames", f32(4 + 5 * step, n), hop=hop, trim=n - hop // 2), [frames], 1)
    app = application("overlap_add_frames", f32(4 + step, n), hop=hop, trim=n - hop // 2)
    pieces = [check(app, [frames[:, step * i : step * i + 4 + step]], 1)[0][0] for i in range(5)]
    assert all(piece.size == step * hop for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), whole[0])
    assert whole[0].size == 5 * step * hop > BLOCK // 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: application("overlap_add_frames", f32(3, 8), hop=0), "hop"),
        (lambda: application("overlap_add_frames", f32(3, 8), hop=9), "hop"),
        (lambda: application("overlap_add_frames", f32(3, 8), hop=4, trim=8), "trim; wanted 0 to 7"),
        (lambda: application("overlap_add_frames", f32(3, 8), hop=4, trim=-1), "trim"),
        (lambda: application("overlap_add_frames", f32(8), hop=4), "rank"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        wrong()


def test_payloads_that_reach_outside_are_refused() -> None:
    wrong = [(3, 8, 9, 0), (3, 8, 0, 0), (0, 8, 4, 0), (3, 0, 4, 0), (3, 8, 4, -1), (3, 8, 4, 8), (3, 8, -4, 0)]
    check_refused("overlap_add_frames", (3, 8, 4, 7), wrong)
