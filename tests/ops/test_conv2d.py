"""Convolution over two axes: its body and its expansion against the meaning, the meaning against torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import Application, application, check, check_refused, random_inputs, stored
from wpk.ir.errors import GraphError
from wpk.ir.types import Type, f32, i32
from wpk.ops.operator import Array

SEEDS = st.integers(0, 99)
PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def convolution(
    size: tuple[int, int, int],
    n: int,
    taps: tuple[int, int],
    name: str = "conv2d",
    bias: bool = True,
    start: bool = False,
    groups: int = 1,
    **attrs: tuple[int, int] | str,
) -> Application:
    inner = size[2] // groups
    weight = (n, inner, *taps) if name == "conv2d" else (*taps, inner, n)
    operands = [f32(*size), f32(*weight), *([f32(n)] if bias else []), *([i32()] if start else [])]
    return application(name, *operands, groups=groups, **attrs)


def inputs(app: Application, slots: int, seed: int) -> list[Array]:
    """Rows to start from: none, some, all, and those that no stream has."""
    made = random_inputs(app, slots, seed)
    if len(made) == 4:
        rows = app.inputs[0].shape[0]
        chosen = np.array([0, rows // 2, rows - 1, rows, -1, 2**31 - 1, -(2**31)])
        made[3] = stored(np.random.default_rng(seed).permutation(chosen)[:slots], i32())
    return made


@settings(max_examples=20, deadline=None)
@given(
    st.tuples(st.integers(1, 7), st.integers(1, 9)),
    st.sampled_from([(1, 1, 1), (1, 1, 70), (2, 1, 5), (3, 2, 1), (70, 1, 1)]),  # groups, read and made in each
    st.tuples(st.integers(1, 4), st.integers(1, 3)), st.tuples(st.integers(1, 3), st.integers(1, 3)), PAIRS, PAIRS,
    st.sampled_from(["none", "relu", "silu"]), st.booleans(), st.sampled_from([1, 3]), SEEDS,
)  # fmt: skip
def test_conv2d_window(
    size: tuple[int, int],
    channels: tuple[int, int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    before: tuple[int, int],
    after: tuple[int, int],
    activation: str,
    start: bool,
    slots: int,
    seed: int,
) -> None:
    groups, inner, made = channels
    size = (max(size[0], taps[0]), max(size[1], taps[1]))
    app = convolution(
        (*size, groups * inner), groups * made, taps, "conv2d_window", start=start, groups=groups, stride=stride,
        pad_before=before, pad_after=after, activation=activation,
    )  # fmt: skip
    check(app, inputs(app, slots, seed), slots, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_conv2d_is_the_window_of_its_weight_by_tap(groups: int, bias: bool) -> None:
    check(convolution((5, 7, 6), 12, (3, 2), bias=bias, groups=groups, stride=(2, 1), pad_after=(0, 1)), rtol=1e-5)
    app = convolution((5, 7, 6), 6, (3, 3), start=True, groups=groups)
    check(app, inputs(app, 3, 0), 3, rtol=1e-5, atol=1e-5)


def test_rows_before_the_start_are_padding_whatever_they_hold() -> None:
    app = convolution((4, 3, 1), 2, (3, 3), start=True, pad_before=(2, 1), pad_after=(1, 1))
    x, weight, bias, _ = inputs(app, 2, 0)
    x[:, :2] = np.nan
    (found,) = check(app, [x, weight, bias, np.array([2, 2], np.int32)], 2, rtol=1e-5)
    whole = convolution((2, 3, 1), 2, (3, 3), pad_before=(4, 1), pad_after=(1, 1))
    (wanted,) = check(whole, [x[:, 2:], weight, bias], 2, rtol=1e-5)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_conv2d_is_that_of_torch(groups: int) -> None:
    torch = pytest.importorskip("torch")
    app = convolution((9, 11, 4), 8, (3, 2), groups=groups, stride=(2, 3), pad_before=(2, 1), pad_after=(1, 0))
    x, w, b = (a.astype(np.float64) for a in random_inputs(app, 1))
    padded = torch.nn.functional.pad(torch.from_numpy(x[0].transpose(2, 0, 1).copy()[None]), (1, 0, 2, 1))
    theirs = torch.nn.functional.conv2d(padded, torch.from_numpy(w), torch.from_numpy(b), (2, 3), groups=groups)
    np.testing.assert_allclose(app.op.meaning(x[0], w, b), theirs[0].numpy().transpose(1, 2, 0), atol=1e-12)


@pytest.mark.parametrize(
    ("weight", "attrs", "said"),
    [
        (f32(6, 4, 3, 3), {"groups": 4}, "groups that divide 4 and 6 channels"),
        (f32(6, 3, 3, 3), {}, "weights of 4 / groups"),
        (f32(6, 4, 6, 3), {}, "1 to 32767 results along each axis"),
        (f32(6, 4, 3, 3), {"stride": (0, 1)}, "strides >= 1"),
        (f32(6, 4, 3, 3), {"stride": (1, 128)}, "at most 127"),
        (f32(6, 4, 3, 3), {"pad_before": (1, -1)}, "padding >= 0"),
        (f32(6, 4, 3, 3), {"pad_after": (1,)}, "two numbers each"),
        (f32(6, 4, 3, 3), {"activation": "swish"}, "silu"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(weight: Type, attrs: dict[str, object], said: str) -> None:
    application("conv2d", f32(5, 5, 4), f32(6, 4, 3, 3))
    with pytest.raises(GraphError, match=said):
        application("conv2d", f32(5, 5, 4), weight, **attrs)


def test_payloads_that_are_none_are_refused() -> None:
    taps, made, steps = 3 | 3 << 16, 3 | 4 << 16, 2 | 2 << 8 | 2 << 16 | 2 << 24
    check_refused(
        "conv2d_window",
        (7, 8, 4, 6, 2, taps, made, steps, 1),
        [
            (7, 8, 4, 6, 3, taps, made, steps, 1),
            (7, 8, 6, 4, 3, taps, made, steps, 1),
            (7, 8, 4, 6, 2, 3, made, steps, 1),
            (7, 8, 4, 6, 2, taps, 4 << 16, steps, 1),
            (7, 8, 4, 6, 2, taps, made, steps & ~0xFF, 1),
            (7, 8, 4, 6, 2, taps, made, steps | 128 << 16, 1),
            (7, 8, 4, 6, 2, taps, made, steps, 99),
        ],
    )
