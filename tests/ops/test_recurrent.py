"""LSTM and GRU steps: against their meaning, torch.nn, and onnxruntime with ONNX's own gate orders."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, expansion, random_inputs
from wpk.ir.errors import GraphError
from wpk.ir.types import Type, f32
from wpk.ops.operator import Array

SLOTS = st.sampled_from([1, 3, 7])
SEEDS = st.integers(0, 99)
SIZES = st.sampled_from([1, 2, 5, 16, 33, 64, 70, 130])
LSTM_ORDERS = ["".join(p) for p in permutations("ifgo")] + ["iofc", "ifco"]
GRU_ORDERS = ["".join(p) for p in permutations("rzn")] + ["zrh", "rzh"]


def lstm(k: int, n: int, biases: int = 2, **attrs: object) -> tuple[Type, ...]:
    return (f32(k), f32(n), f32(n), f32(4 * n, k), f32(4 * n, n), *[f32(4 * n)] * biases)


def gru(k: int, n: int, biased: bool = True) -> tuple[Type, ...]:
    return (f32(k), f32(n), f32(3 * n, k), f32(3 * n, n), *([f32(3 * n)] * 2 if biased else []))


# --- cells --------------------------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(SIZES, SLOTS, st.sampled_from([1e-3, 1.0, 30.0]), SEEDS)
def test_lstm_cell(n: int, slots: int, scale: float, seed: int) -> None:
    check(application("lstm_cell", f32(4 * n), f32(n)), slots=slots, seed=seed, scale=scale)


@settings(max_examples=12, deadline=None)
@given(SIZES, SLOTS, st.sampled_from([1e-3, 1.0, 30.0]), SEEDS)
def test_gru_cell(n: int, slots: int, scale: float, seed: int) -> None:
    check(
        application("gru_cell", f32(3 * n), f32(3 * n), f32(n)),
        slots=slots,
        seed=seed,
        scale=scale,
        atol=1e-6 + 4e-7 * scale,
    )


def test_cells_saturate_without_overflow() -> None:
    gates = np.array([[1e30, -1e30, 3e38, -3e38, 1e4, -1e4, 200.0, -200.0]], np.float32)
    check(application("lstm_cell", f32(8), f32(2)), [gates, np.array([[0.5, -2.0]], np.float32)], slots=1)
    check(
        application("gru_cell", f32(6), f32(6), f32(2)),
        [gates[:, :6], gates[:, :6] * 0, np.ones((1, 2), np.float32)],
        slots=1,
    )


# --- whole steps --------------------------------------------------------------------------------------------------
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), SIZES, st.integers(0, 2), st.sampled_from(LSTM_ORDERS), SLOTS, SEEDS)
def test_lstm(k: int, n: int, biases: int, gates: str, slots: int, seed: int) -> None:
    check(
        application("lstm", *lstm(k, n, biases), gates=gates), slots=slots, seed=seed, scale=0.5, rtol=1e-5, atol=1e-5
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), SIZES, st.booleans(), st.sampled_from(GRU_ORDERS), st.booleans(), SLOTS, SEEDS)
def test_gru(k: int, n: int, biased: bool, gates: str, before: bool, slots: int, seed: int) -> None:
    app = application("gru", *gru(k, n, biased), gates=gates, linear_before_reset=before)
    check(app, slots=slots, seed=seed, scale=0.5, rtol=1e-5, atol=1e-5)


def test_an_lstm_is_one_product_and_a_cell() -> None:
    graph = expansion(application("lstm", *lstm(8, 4), gates="iofc"))
    assert [n.op for n in graph.nodes if not n.weight] == ["matmul", "reshape", "lstm_cell"]
    graph = expansion(application("lstm", *lstm(8, 4)))
    assert [n.op for n in graph.nodes if n.weight] == ["concat", "add", "pack_panels"]  # nothing to reorder


def test_a_gru_is_two_products_and_a_cell() -> None:
    graph = expansion(application("gru", *gru(8, 4)))
    assert [n.op for n in graph.nodes if not n.weight] == ["matmul", "reshape", "matmul", "reshape", "gru_cell"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: application("lstm", *lstm(3, 2), gates="ifoo"), "gates"),
        (lambda: application("lstm", f32(3), f32(2), f32(2), f32(6, 3), f32(6, 2)), "rows"),
        (lambda: application("lstm", f32(3), f32(2), f32(3), f32(8, 3), f32(8, 2)), "'c'"),
        (lambda: application("gru", *gru(3, 2), gates="rz"), "gates"),
        (lambda: application("gru", *gru(3, 2)[:5]), "biases"),
        (lambda: application("gru", f32(3), f32(2), f32(8, 3), f32(8, 2)), "rows"),
        (lambda: application("lstm_cell", f32(6), f32(2)), "gates"),
        (lambda: application("gru_cell", f32(8), f32(8), f32(2)), "gates"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        wrong()


# --- oracles ------------------------------------------------------------------------------------------------------
def weights(gates: int, k: int, n: int, seed: int) -> tuple[Array, ...]:
    """w_ih, w_hh, b_ih, b_hh, scaled so that a state does not swing from end to end in a step."""
    rng = np.random.default_rng(seed)
    shapes = ((gates * n, k), (gates * n, n), (gates * n,), (gates * n,))
    return tuple((rng.standard_normal(shape) / np.sqrt(n)).astype(np.float32) for shape in shapes)


@pytest.mark.oracle
@pytest.mark.parametrize(("k", "n"), [(1, 1), (5, 3), (20, 33), (150, 150)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_steps_are_those_of_torch(kind: str, k: int, n: int) -> None:
    """Six steps from zero state, bodies in float32 against torch in float64, at two slots."""
    torch = pytest.importorskip("torch")
    w = weights(4 if kind == "LSTM" else 3, k, n, k)
    module = getattr(torch.nn, kind)(k, n, dtype=torch.float64)
    module.load_state_dict(
        {
            f"{p}_l0": torch.from_numpy(a.astype(np.float64))
            for p, a in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), w, strict=True)
        }
    )
    x = np.random.default_rng(n).standard_normal((6, 2, k)).astype(np.float32)
    theirs = module(torch.from_numpy(x.astype(np.float64)))[0].detach().numpy()
    app = application("lstm", *lstm(k, n)) if kind == "LSTM" else application("gru", *gru(k, n))
    state = [np.zeros((2, n), np.float32)] * (2 if kind == "LSTM" else 1)
    for t in range(6):
        state = check(app, [x[t], *state, *w], slots=2, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[0], theirs[t], atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "before"), [("LSTM", 0), ("GRU", 0), ("GRU", 1)])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (5, 3), (20, 33)])
def test_steps_are_those_of_onnxruntime(kind: str, before: int, k: int, n: int) -> None:
    """ONNX's own gate orders, iofc and zrh, and both places of the reset."""
    w = weights(4 if kind == "LSTM" else 3, k, n, k)
    x = np.random.default_rng(n).standard_normal((6, 2, k)).astype(np.float32)
    theirs = onnx_run(kind, before, x, w)
    if kind == "LSTM":
        app = application("lstm", *lstm(k, n), gates="iofc")
    else:
        app = application("gru", *gru(k, n), gates="zrh", linear_before_reset=bool(before))
    state = [np.zeros((2, n), np.float32)] * (2 if kind == "LSTM" else 1)
    for t in range(6):
        state = check(app, [x[t], *state, *w], slots=2, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state[0], theirs[t], atol=1e-5)


def onnx_run(kind: str, before: int, x: Array, w: tuple[Array, ...]) -> Array:
    """[steps, batch, n] of an ONNX LSTM or GRU node, weights as they are (W, R, Wb | Rb)."""
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, kinds = onnx.helper, onnx.TensorProto
    attrs = {"hidden_size": w[1].shape[1], **({"linear_before_reset": before} if kind == "GRU" else {})}
    tensors = {"W": w[0][None], "R": w[1][None], "B": np.concatenate(w[2:])[None]}
    graph = helper.make_graph(
        [helper.make_node(kind, ["X", *tensors], ["Y"], **attrs)],
        "step",
        [helper.make_tensor_value_info("X", kinds.FLOAT, x.shape)],
        [helper.make_tensor_value_info("Y", kinds.FLOAT, None)],
        [onnx.numpy_helper.from_array(a, name) for name, a in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"X": x})[0][:, 0])


def test_meaning_takes_the_reset_before_or_after() -> None:
    app = application("gru", *gru(3, 4))
    inputs = [a.astype(np.float64) for a in random_inputs(app, 1)]
    x, h, *w = inputs
    after = application("gru", *gru(3, 4), linear_before_reset=False)
    assert not np.allclose(app.op.meaning(x[0], h[0], *w), after.op.meaning(x[0], h[0], *w))
