"""Random numbers by counter: the published words, their distribution, and that they depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.harness import application, check, execute
from wpk.ir.errors import GraphError
from wpk.ir.types import i32
from wpk.ops.philox import philox, philox64

# Random123's kat_vectors: counter, key, words of philox4x32 with 10 rounds.
PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]  # fmt: skip
SEEDS = np.array([[0, 0], [7, -1], [-(2**31), 2**31 - 1]], np.int32)
STEPS = np.array([0, 3, -(2**31)], np.int32)


def drawn(name, shape, seeds=SEEDS, steps=STEPS, **attrs):
    app = application(name, i32(2), i32(), shape=shape, **attrs)
    return check(app, [seeds, steps], len(seeds), rtol=2e-6, atol=1e-6)[0]


@pytest.mark.parametrize("counter,key,words", PUBLISHED)
def test_the_words_are_those_published(counter, key, words):
    assert philox64(np.array([counter]), np.array(key))[0].tolist() == words


def test_the_scalar_form_is_the_same():
    """What bodies call, with Python's integers (the mask makes up for their not wrapping)."""
    for c0, c1, c2, k0, k1 in ([0] * 5, [1, 2, 3, 4, 5], [2**20, 2**32 - 1, 2**31 - 1, 2**32 - 1, 9]):
        with np.errstate(over="ignore"):
            found = [int(w) for w in philox(*map(np.int64, (c0, c1, c2, k0, k1)))]
        assert found == philox64(np.array([[c0, c1, c2, 0]]), np.array([k0, k1]))[0].tolist()


@pytest.mark.parametrize("name", ["random_uniform", "random_normal"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (600,)])
def test_bodies_mean_what_they_say(name, shape):
    drawn(name, shape, stream=5)


def test_the_first_number_is_made_of_the_published_word():
    app = application("random_uniform", i32(2), i32(), shape=(4,))
    (y,) = execute(app, [np.zeros((1, 2), np.int32), np.zeros(1, np.int32)], 1)
    assert y[0].tolist() == [(word >> 8) / 2**24 for word in PUBLISHED[0][2]]


def test_a_shorter_draw_is_the_start_of_a_longer_one_and_seeds_steps_and_streams_differ():
    long = drawn("random_uniform", (300,))
    np.testing.assert_array_equal(drawn("random_uniform", (37,)), long[:, :37])
    seeds = np.array([[1, 2], [2, 1], [1, 2], [1, 2]], np.int32)
    steps = np.array([0, 0, 0, 1], np.int32)
    a, b, c, d = drawn("random_uniform", (64,), seeds, steps)
    np.testing.assert_array_equal(a, c)
    other = drawn("random_uniform", (64,), seeds, steps, stream=1)[0]
    rows = [set(row.tolist()) for row in (a, b, d, other)]
    assert all(not rows[i] & rows[j] for i in range(4) for j in range(i))


def test_distributions():
    """64,000 numbers: moments within five standard errors."""
    steps = np.arange(64, dtype=np.int32)
    seeds = np.tile(np.array([5, 6], np.int32), (64, 1))
    uniform = execute(application("random_uniform", i32(2), i32(), shape=(1000,)), [seeds, steps], 64)[0]
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.mean() - 1 / 2) < 5 * 0.2887 / 253 and abs(uniform.var() - 1 / 12) < 5 * 0.0745 / 253
    normal = execute(application("random_normal", i32(2), i32(), shape=(1000,)), [seeds, steps], 64)[0]
    assert abs(normal.mean()) < 5 / 253 and abs(normal.var() - 1) < 5 * 1.414 / 253
    assert abs((normal**4).mean() - 3) < 5 * 9.8 / 253
    assert abs((normal[:, :-1] * normal[:, 1:]).mean()) < 5 / 253


def test_types():
    with pytest.raises(GraphError, match="stream; wanted 0 <= stream"):
        application("random_normal", i32(2), i32(), shape=(3,), stream=-1)
    with pytest.raises(GraphError, match="operand 'seed' does not fit"):
        application("random_uniform", i32(3), i32(), shape=(3,))
