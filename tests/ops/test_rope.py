"""Rotary position embedding against its meaning; models' tests compare it with other implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import f32, i32
from wpk.ops.operator import LIBRARY, make

FEW = settings(max_examples=10, deadline=None)
POSITIONS = [0, 1, 36, 7999, -5]


@FEW
@given(
    st.sampled_from([(1, 2), (5, 24), (2, 3, 72), (1, 24)]), st.sampled_from([1e4, 1e6, 1.0]),
    st.sampled_from([0, 37, -3]), st.integers(0, 99),
)  # fmt: skip
def test_rope(shape, theta, offset, seed):
    app = application("rope", f32(*shape), i32(), theta=theta, offset=offset)
    inputs = random_inputs(app, 3, seed)
    inputs[1] = np.random.default_rng(seed).choice(np.array(POSITIONS, np.int32), 3)
    check(app, inputs, 3, rtol=2e-6, atol=2e-6)  # sine and cosine are good to 2e-7, numbers are about 1 to 4


def test_any_position_is_safe():
    app = application("rope", f32(2, 8), i32(), offset=2**31 - 1)
    inputs = random_inputs(app, 2)
    inputs[1] = np.array([2**31 - 1, -(2**31)], np.int32)
    check(app, inputs, 2, rtol=1e-5, atol=1e-5)


def test_types():
    with pytest.raises(GraphError, match="wanted an even number; found 7"):
        application("rope", f32(2, 7), i32())
    with pytest.raises(GraphError, match=r"theta; wanted >= 1; found 0\.5"):
        application("rope", f32(2, 8), i32(), theta=0.5)
    cls = LIBRARY.get("rope")
    assert cls.legal((4, 7, 0, 0, 0, 0, 0, 0, 0), 3, (True,) * 3)


def test_it_is_a_turn_of_complex_numbers_and_products_depend_on_the_distance_alone():
    rng, op = np.random.default_rng(0), make(LIBRARY.get("rope"), {"theta": 100.0})
    q, k = rng.standard_normal((2, 3, 8))
    turned = (q[:, :4] + 1j * q[:, 4:]) * np.exp(5j * 100.0 ** -np.array([0, 0.25, 0.5, 0.75]))
    np.testing.assert_allclose(op.meaning(q, 5), np.concatenate([turned.real, turned.imag], -1), atol=1e-12)
    near, far = ((op.meaning(q, n) * op.meaning(k, n - 4)).sum(-1) for n in (4, 7004))
    np.testing.assert_allclose(near, far, atol=1e-9)
