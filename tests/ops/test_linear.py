"""Matrix products: `linear` and `conv1d` through their expansion, `matmul` in all its roles; PyTorch as oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, execute, expansion, random_inputs, stored, value
from wpk.ir.errors import GraphError
from wpk.ir.types import bf16, f32
from wpk.ops.linear import BIAS, RESIDUAL, SECOND
from wpk.ops.operator import LIBRARY, make
from wpk.ops.simd import ACTIVATIONS, PANEL

FEW = settings(max_examples=15, deadline=None)
widths = st.sampled_from([1, 3, 15, 16, 17, 40, 65])
slot_counts = st.sampled_from([1, 3, 7])
activations = st.sampled_from(sorted(ACTIVATIONS))
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@FEW
@given(st.sampled_from([(), (1,), (5,), (2, 3)]), widths, widths, st.booleans(), activations, slot_counts)
def test_linear(lead, k, n, with_bias, activation, slots):
    app = application("linear", f32(*lead, k), f32(n, k), *[f32(n)] * with_bias, activation=activation)
    check(app, slots=slots, **CLOSE)


@FEW
@given(
    st.integers(1, 12), st.sampled_from([1, 3, 16]), widths, st.integers(1, 5), st.integers(1, 3),
    st.integers(0, 4), st.integers(0, 4), st.integers(1, 3), st.booleans(), slot_counts,
)  # fmt: skip
def test_conv1d(t, c, n, taps, stride, left, right, dilation, with_bias, slots):
    if t + left + right >= (taps - 1) * dilation + 1:
        attrs = {"stride": stride, "pad_left": left, "pad_right": right, "dilation": dilation, "activation": "tanh"}
        check(application("conv1d", f32(t, c), f32(n, c, taps), *[f32(n)] * with_bias, **attrs), slots=slots, **CLOSE)


def matmul(frames, k, n, roles, *, step=None, pad=0, size=None, k2=5, activation="none", weight_seed=0):
    """An application of `matmul` with packed weights of that shape, and a maker of its inputs."""
    k2 = k2 if roles & SECOND else 0
    step = k if step is None else step
    size = frames * step if size is None else size
    packed = f32(-(-n // PANEL), k + k2, PANEL)
    types, weights = [f32(size), packed], [False, True]
    extras = ((BIAS, f32(n), True), (SECOND, f32(k2 or 1), False), (RESIDUAL, f32(frames, n), False))
    for bit, extra, is_weight in extras:
        if roles & bit:
            types.append(extra)
            weights.append(is_weight)
    attrs = {"n": n, "k": k, "frames": frames, "step": step, "pad": pad, "activation": activation, "roles": roles}
    app = application("matmul", *types, weights=weights, **attrs)

    def inputs(slots, seed=0):
        made = random_inputs(app, slots, seed)
        dense = np.random.default_rng(weight_seed).standard_normal((n, k + k2))
        made[1] = make(LIBRARY.get("pack_panels"), {}).meaning(dense).astype(np.float32)
        return made

    return app, inputs


@pytest.mark.parametrize("roles", range(8))
@pytest.mark.parametrize("frames,k,n", [(1, 7, 5), (1, 33, 48), (1, 1, 17)])
def test_matmul_in_all_its_roles(frames, k, n, roles):
    app, inputs = matmul(frames, k, n, roles, activation="silu")
    for slots in (1, 3, 7):
        check(app, inputs(slots), slots, **CLOSE)


@pytest.mark.parametrize("roles", [0, BIAS, RESIDUAL, BIAS | RESIDUAL])
def test_matmul_over_overlapping_and_cut_windows(roles):
    app, inputs = matmul(9, 12, 20, roles, step=4, pad=10, size=30)
    check(app, inputs(3), 3, **CLOSE)


def test_matmul_of_more_rows_than_one_call_takes():
    app, inputs = matmul(400, 3, 5, BIAS | RESIDUAL)
    check(app, inputs(3), 3, **CLOSE)


@FEW
@given(st.integers(1, 70), widths, st.integers(0, 7), st.integers(0, 99))
def test_a_sessions_bits_do_not_depend_on_its_company(k, n, roles, seed):
    app, inputs = matmul(1, k, n, roles)
    arrays = inputs(7, seed)
    (together,) = execute(app, arrays, 7)
    for slot in range(7):
        alone = [a if weight else a[slot : slot + 1] for a, weight in zip(arrays, app.weights, strict=True)]
        np.testing.assert_array_equal(execute(app, alone, 1)[0][0], together[slot])


def test_expansions_pack_the_weight_once_per_load():
    ops = [n.op for n in expansion(application("linear", f32(3, 4), f32(5, 4))).nodes]
    assert ops == ["pack_panels", "matmul", "reshape"]
    graph = expansion(application("conv1d", f32(9, 4), f32(5, 4, 3)))
    assert [n.op for n in graph.nodes if not n.weight] == ["matmul"]


@FEW
@given(
    st.sampled_from([(), (1,), (3,)]), st.sampled_from([1, 40, 65, 130]), st.sampled_from([8, 5, 184, 24]),
    st.booleans(), st.sampled_from([f32, bf16]), st.sampled_from(["none", "silu"]), slot_counts,
)  # fmt: skip
def test_linear_with_a_bf16_weight(lead, k, n, with_bias, made, activation, slots):
    app = application("linear", made(*lead, k), bf16(n, k), *[f32(n)] * with_bias, activation=activation)
    tiled = lead != (3,) and n != 5
    inputs = random_inputs(app, slots)
    if tiled:  # what the tiled product is given: numbers that bf16 holds
        inputs[0] = stored(value(stored(inputs[0], bf16()), bf16()), app.inputs[0]) if made is f32 else inputs[0]
    check(app, inputs, slots, **CLOSE)
    names = {node.op for node in expansion(app).nodes}
    assert names >= ({"tiled_matmul", "pack_tiles"} if tiled else {"matmul", "pack_panels", "cast"})
    assert ("cast" in names) == (made is f32 or not tiled)


def test_a_tiled_linear_rounds_x_and_has_as_few_shares_as_it_may():
    graph = expansion(application("linear", f32(1, 70), bf16(352, 70), f32(352), activation="relu2"))
    assert [n.op for n in graph.nodes] == ["cast", "reshape", "pack_tiles", "tiled_matmul", "reshape"]
    packing, product = graph.nodes[2], graph.nodes[3]
    assert packing.attributes["shares"] == product.attributes["shares"] == 2
    assert (product.attributes["activation"], product.attributes["out"], product.attributes["splits"]) == (
        "relu2",
        "f32",
        0,
    )
    assert application("linear", f32(70), bf16(352, 70)).op.cost(f32(70), bf16(352, 70)).flops == {"bf16": 2 * 352 * 70}


@pytest.mark.parametrize(
    "name,types,attrs,wanted",
    [
        ("linear", [f32(4), f32(5, 3)], {}, r"'weight' does not fit; wanted k = 4 in \[n k\]; found f32\[5,3\]"),
        ("linear", [f32(4), f32(5, 4), f32(4)], {}, r"operand 'bias' does not fit; wanted n = 5 in \[n\]"),
        ("linear", [f32(4), f32(5, 4)], {"activation": "swish"}, r"activation; wanted none \| relu.*; found swish"),
        ("conv1d", [f32(2, 4), f32(5, 4, 3)], {}, r"fewer frames than taps; wanted >= 3 frames.*; found f32\[2,4\]"),
        ("conv1d", [f32(9, 4), f32(5, 4, 3)], {"stride": 0}, "stride, dilation and padding; wanted stride >= 1"),
    ],
)
def test_errors_say_what_was_wanted_and_found(name, types, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        application(name, *types, **attrs)


# --- oracle -------------------------------------------------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("stride,left,right,taps", [(1, 0, 0, 3), (2, 3, 0, 4), (3, 2, 2, 5), (1, 1, 1, 1)])
def test_conv1d_agrees_with_torch(stride, left, right, taps, dilation):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((11, 6)), rng.standard_normal((20, 6, taps)), rng.standard_normal(20)
    padded = torch.nn.functional.pad(torch.from_numpy(x.T[None].copy()), (left, right))
    wanted = torch.nn.functional.conv1d(padded, torch.from_numpy(weight), torch.from_numpy(bias), stride, 0, dilation)
    wanted = wanted[0].numpy().T
    attrs = {"stride": stride, "pad_left": left, "pad_right": right, "dilation": dilation}
    meaning = make(LIBRARY.get("conv1d"), attrs).meaning(x, weight, bias)
    np.testing.assert_allclose(meaning, wanted, rtol=1e-12, atol=1e-12)
    app = application("conv1d", f32(11, 6), f32(20, 6, taps), f32(20), **attrs)
    (found,) = check(app, [x[None].astype(np.float32), weight.astype(np.float32), bias.astype(np.float32)], 1, **CLOSE)
    np.testing.assert_allclose(found[0], wanted, **CLOSE)


@pytest.mark.oracle
def test_linear_agrees_with_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((3, 7)), rng.standard_normal((5, 7)), rng.standard_normal(5)
    wanted = torch.nn.functional.linear(*(torch.from_numpy(a) for a in (x, weight, bias))).numpy()
    np.testing.assert_allclose(make(LIBRARY.get("linear"), {}).meaning(x, weight, bias), wanted, rtol=1e-12)
