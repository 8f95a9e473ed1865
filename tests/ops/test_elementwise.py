"""Element-wise operators: every body against its meaning, meanings against PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, compiled, random_inputs, stored, value
from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16, boolean, f32, i32
from wpk.ops.elementwise import BINARY, UNARY, broadcast
from wpk.ops.operator import LIBRARY, make
from wpk.ops.scalars import ACTIVATION_MEANING
from wpk.ops.simd import ACTIVATIONS

FEW = settings(max_examples=12, deadline=None)
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, -1e-45, 1.2e-38, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4]
HUGE = [3e38, -3e38, math.inf, -math.inf, math.nan]
BOUNDED = {"sin", "cos"}  # accurate for |x| < 1e4 only

sizes = st.sampled_from([1, 2, 3, 7, 16, 31, 129])
shapes = st.lists(sizes, max_size=3).map(tuple).filter(lambda s: math.prod(s) < 3000)
slot_counts = st.sampled_from([1, 3, 7])


@pytest.mark.parametrize("name", [row[0] for row in UNARY])
def test_unary_bodies_mean_what_they_say(name):
    @FEW
    @given(shapes, slot_counts, st.sampled_from([1e-3, 1.0, 30.0]), st.integers(0, 999))
    def holds(shape, slots, scale, seed):
        check(application(name, f32(*shape)), slots=slots, scale=scale, seed=seed, rtol=1e-6, atol=1e-6)

    holds()


@pytest.mark.parametrize("name", [row[0] for row in UNARY])
def test_unary_edge_values(name):
    x = np.array([EDGES if name in BOUNDED else EDGES + HUGE], np.float32)
    check(application(name, f32(x.shape[1])), [x], slots=1, rtol=1e-6, atol=1e-6)


def pairs(shape):
    """Shapes that broadcast with `shape` by suffix."""
    tails = [shape[i:] for i in range(len(shape) + 1)]
    return st.sampled_from([*tails, (1,) * len(shape), (1, *shape)])


two_shapes = shapes.flatmap(lambda s: st.tuples(st.just(s), pairs(s))).flatmap(
    lambda pair: st.sampled_from([pair, pair[::-1]])
)
KINDS = [(row[0], kind) for row in BINARY for kind in sorted(row[3])]


@pytest.mark.parametrize("name,kind", KINDS, ids=lambda v: getattr(v, "value", v))
def test_binary_bodies_mean_what_they_say(name, kind):
    @FEW
    @given(two_shapes, slot_counts, st.integers(0, 999), st.booleans())
    def holds(two, slots, seed, second_is_weight):
        app = application(name, *(Type(kind, s) for s in two), weights=[False, second_is_weight])
        inputs = random_inputs(app, slots, seed)
        if kind is not DType.F32 or "equal" in name:
            inputs = [(a % 3).astype(a.dtype) for a in inputs]  # collisions matter
        check(app, inputs, slots)

    holds()


@pytest.mark.parametrize("name", [row[0] for row in BINARY if DType.F32 in row[3]])
def test_binary_edge_values(name):
    edges = np.array(EDGES + HUGE, np.float32)
    a, b = (m.ravel()[None].astype(np.float32) for m in np.meshgrid(edges, edges))
    check(application(name, f32(a.size), f32(a.size)), [a, b], slots=1, rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "minimum", "maximum", "less", "equal"])
def test_integers_wrap_and_compare_at_their_limits(name):
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 65537], np.int32)
    a, b = (m.ravel()[None].astype(np.int32) for m in np.meshgrid(edges, edges))
    check(application(name, i32(a.size), i32(a.size)), [a, b], slots=1)


@FEW
@given(shapes, slot_counts, st.integers(0, 999))
def test_operators_with_attributes(shape, slots, seed):
    for name, attrs in (("clamp", {"lo": -0.5, "hi": 1}), ("affine", {"scale": -3.0, "offset": 0.1})):
        check(application(name, f32(*shape), **attrs), slots=slots, seed=seed)
    check(application("leaky_relu", f32(*shape), slope=0.2), slots=slots, seed=seed)
    check(application("increment", i32(*shape), by=-3), slots=slots, seed=seed)
    check(application("logical_not", boolean(*shape)), slots=slots, seed=seed)


def test_clamp_keeps_nan_and_refuses_crossed_bounds():
    x = np.array([EDGES + HUGE], np.float32)
    check(application("clamp", f32(x.size), lo=-2.0, hi=3.0), [x], slots=1)
    with pytest.raises(GraphError, match=r"wanted lo <= hi; found 2\.0, 1\.0"):
        application("clamp", f32(3), lo=2.0, hi=1.0)


@FEW
@given(shapes, slot_counts, st.sampled_from([1, 2, 71, 2**31 - 1]), st.integers(0, 99))
def test_remainder(shape, slots, by, seed):
    check(application("remainder", i32(*shape), by=by), slots=slots, seed=seed)


def test_remainder_of_the_ends_of_the_numbers():
    x = np.array([[-(2**31), -8, -7, -1, 0, 6, 7, 2**31 - 1]], np.int32)
    (y,) = check(application("remainder", i32(8), by=7), [x], slots=1)
    assert y.tolist() == [[5, 6, 0, 6, 0, 6, 0, 1]]
    with pytest.raises(GraphError, match="remainder: by; wanted 1 to"):
        application("remainder", i32(), by=0)


def test_increment_wraps():
    app = application("increment", i32(), by=2)
    (y,) = check(app, [np.array([2**31 - 1], np.int32)], slots=1)
    assert y[0] == -(2**31) + 1


@FEW
@given(shapes, slot_counts, st.booleans(), st.sampled_from([DType.F32, DType.I32, DType.BOOL]), st.integers(0, 999))
def test_select(shape, slots, one_flag, kind, seed):
    app = application("select", boolean(*(() if one_flag else shape)), Type(kind, shape), Type(kind, shape))
    check(app, slots=slots, seed=seed)


def test_select_does_not_let_an_unchosen_nan_through():
    a, b = np.full((1, 4), np.nan, np.float32), np.ones((1, 4), np.float32)
    (y,) = check(application("select", boolean(), f32(4), f32(4)), [np.zeros(1, np.int32), a, b], slots=1)
    assert (y == 1).all()


@pytest.mark.parametrize("source", DType)
@pytest.mark.parametrize("target", DType)
@pytest.mark.parametrize("shape", [(), (1,), (7, 31), (513,)])
def test_cast(source, target, shape):
    for scale in (1.0, 1e3, 1e12):
        check(application("cast", Type(source, shape), dtype=target.value), slots=3, scale=scale, rtol=0, atol=0)


def test_cast_edges():
    x = np.array([EDGES + HUGE + [2147483647.0, -2147483648.0, 2147483520.0, 1.999, -1.999, 0.3]], np.float32)
    for target in ("bf16", "i32", "bool", "f32"):
        check(application("cast", f32(x.size), dtype=target), [x], slots=1, rtol=0, atol=0)


def test_float_to_integer_goes_toward_zero_and_saturates():
    x = np.array([[1.999, -1.999, math.nan, math.inf, -math.inf, 3e9, -3e9]], np.float32)
    (y,) = check(application("cast", f32(7), dtype="i32"), [x], slots=1)
    assert y[0].tolist() == [1, -1, 0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31)]


def test_cast_to_bf16_rounds_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(0).integers(0, 2**32, (1, 20000), dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    x = np.where(np.isnan(x), np.float32(1), x)
    (y,) = check(application("cast", f32(x.size), dtype="bf16"), [x], slots=1, rtol=0, atol=0)
    np.testing.assert_array_equal(y, x.astype(ml_dtypes.bfloat16).view(np.uint16))


# --- types --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "a,b,wanted",
    [
        ((4, 3), (3,), (4, 3)), ((3,), (4, 3), (4, 3)), ((), (4, 3), (4, 3)), ((1, 3), (4, 3), (4, 3)),
        ((1,), (4, 3), (4, 3)), ((1, 3), (3,), (1, 3)), ((), (), ()), ((1, 1), (), (1, 1)),
    ],
)  # fmt: skip
def test_suffixes_broadcast(a, b, wanted):
    assert broadcast("add", f32(*a), f32(*b)) == wanted


@pytest.mark.parametrize("a,b", [((4, 3), (4,)), ((4, 1), (4, 3)), ((4, 3), (4, 1)), ((2, 3), (3, 2)), ((5,), (4,))])
def test_other_broadcasts_are_refused(a, b):
    with pytest.raises(GraphError, match="add: operands do not broadcast; wanted equal shapes"):
        application("add", f32(*a), f32(*b))


def test_operands_of_two_dtypes_are_refused():
    with pytest.raises(GraphError, match=r"wanted b f32; found i32\[3\]"):
        application("add", f32(3), i32(3))
    with pytest.raises(GraphError, match=r"operand 'a' has the wrong dtype; wanted f32; found i32\[3\]"):
        application("div", i32(3), i32(3))
    with pytest.raises(GraphError, match=r"wanted f32\[3\]; found f32\[4\]"):
        application("select", boolean(), f32(3), f32(4))
    with pytest.raises(GraphError, match=r"wanted bool\[\] or bool\[3\]; found bool\[1\]"):
        application("select", boolean(1), f32(3), f32(3))


def test_comparisons_make_flags():
    assert application("less", f32(4, 3), f32(3)).results == (boolean(4, 3),)
    assert application("logical_and", boolean(3), boolean()).results == (boolean(3),)


# --- oracles ------------------------------------------------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.parametrize("name", [row[0] for row in UNARY if row[0] != "relu2"])
def test_unary_meanings_agree_with_torch(name):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    other = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "softplus": functional.softplus,
    }
    x = np.linspace(-15, 15, 1001)
    with np.errstate(all="ignore"):
        found = make(LIBRARY.get(name), {}).meaning(x)
    wanted = other.get(name, getattr(torch, name, None))(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=3e-9 if name == "softplus" else 1e-14)


@pytest.mark.oracle
def test_leaky_relu_agrees_with_torch():
    torch = pytest.importorskip("torch")
    x = np.linspace(-3, 3, 101)
    wanted = torch.nn.functional.leaky_relu(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(make(LIBRARY.get("leaky_relu"), {}).meaning(x), wanted)


def test_activations_are_the_unary_operators():
    assert set(ACTIVATION_MEANING) == set(ACTIVATIONS)
    x = np.linspace(-5, 5, 101)
    for name in set(ACTIVATIONS) - {"none"}:
        np.testing.assert_array_equal(ACTIVATION_MEANING[name](x), make(LIBRARY.get(name), {}).meaning(x))


def test_epilogue_and_operator_give_the_same_bits():
    """So that fusing an activation into a product changes nothing."""
    weight = np.eye(16, dtype=np.float32)
    x = np.random.default_rng(0).standard_normal((1, 5, 16)).astype(np.float32)
    for name in set(ACTIVATIONS) - {"none"}:
        app = application("linear", f32(5, 16), f32(16, 16), activation=name)
        (fused,) = check(app, [x, weight], slots=1, rtol=1e-5)
        (alone,) = check(application(name, f32(5, 16)), [x], slots=1, rtol=1e-5)
        np.testing.assert_array_equal(fused, alone)


def test_stored_and_value_are_inverse():
    cases = ((f32(3), [1.5, -2, 0]), (i32(3), [5, -6, 7]), (boolean(3), [1, 0, 1]), (bf16(2), [7, 900]))
    for t, bits in cases:
        array = np.array(bits, t.dtype.numpy)
        np.testing.assert_array_equal(stored(value(array, t), t), array)
    assert compiled(LIBRARY.get("neg")) is compiled(LIBRARY.get("neg"))
