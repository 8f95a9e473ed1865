"""Each kind of component: what it computes over several steps, against NumPy over the whole stream or torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.zoo.specs import chain, random_weights, run
from wpk.ir.errors import SpecError
from wpk.ir.types import bf16
from wpk.zoo.build import build_graph, expected_tensors, state_bytes
from wpk.zoo.component import installed_kinds
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[np.float64]
RNG = np.random.default_rng(5)
STEPS = 6


def stream(*shape: int, steps: int = STEPS) -> list[Array]:
    return list(np.random.default_rng(3).standard_normal((steps, *shape)))


def one(part: dict[str, Any], input: str, output: str, **changes: Any) -> ModelSpec:
    return chain([part], {"x": input}, output, **changes)


def same(found: list[Array], wanted: Any) -> None:
    np.testing.assert_allclose(np.stack(found), np.stack(list(wanted)), rtol=1e-9, atol=1e-12)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


# --- framing ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("history", [0, 1, 5, 13])
def test_audio_window_holds_what_came_before(history: int) -> None:
    x = stream(5)
    spec = one({"kind": "audio_window", "history": history}, "f32[5]", f"f32[{history + 5}]")
    whole = np.concatenate([np.zeros(history), *x])
    same(run(spec, *x), [whole[5 * n : 5 * n + history + 5] for n in range(STEPS)])


def test_audio_window_may_lag() -> None:
    x = stream(5)
    spec = one({"kind": "audio_window", "history": 9, "length": 6}, "f32[5]", "f32[6]")
    whole = np.concatenate([np.zeros(9), *x])
    same(run(spec, *x), [whole[5 * n : 5 * n + 6] for n in range(STEPS)])


@pytest.mark.parametrize(("pad", "numpy"), [("zeros", "constant"), ("reflect", "reflect"), ("edge", "edge")])
def test_audio_window_pads_inside_the_step(pad: str, numpy: Any) -> None:
    x = stream(5)
    spec = one({"kind": "audio_window", "pad": pad, "pad_left": 2, "pad_right": 4}, "f32[5]", "f32[11]")
    same(run(spec, *x), [np.pad(v, (2, 4), mode=numpy) for v in x])


def test_delay_and_frame_window() -> None:
    x = stream(3, 2)
    same(run(one({"kind": "delay", "steps": 2}, "f32[3,2]", "f32[3,2]"), *x), [0 * x[0], 0 * x[0], *x[:-2]])
    whole = np.concatenate([np.zeros((4, 2)), *x])
    same(
        run(one({"kind": "frame_window", "frames": 7}, "f32[3,2]", "f32[7,2]"), *x),
        [whole[3 * n : 3 * n + 7] for n in range(STEPS)],
    )
    same(
        run(one({"kind": "frame_window", "frames": 1}, "f32[4]", "f32[1,4]"), *stream(4)), [v[None] for v in stream(4)]
    )
    same(run(one({"kind": "pad", "left": 1, "right": 2}, "f32[3,2]", "f32[6,2]"), *x),
         [np.pad(v, ((1, 2), (0, 0))) for v in x])  # fmt: skip


# --- spectra ------------------------------------------------------------------------------------------------------
def blocks(spectrum: npt.NDArray[np.complex128]) -> Array:
    return np.stack([spectrum.real, spectrum.imag], axis=-2)


def test_spectrum_of_one_frame_or_of_many() -> None:
    x = stream(12)
    same(run(one({"kind": "spectrum"}, "f32[12]", "f32[2,7]"), *x), [blocks(np.fft.rfft(v)) for v in x])
    spec = one({"kind": "spectrum", "n_fft": 16, "window": "hann", "bins": 4}, "f32[12]", "f32[2,4]")
    same(run(spec, *x), [blocks(np.fft.rfft(v * np.hanning(12), 16)[:4]) for v in x])
    spec = one({"kind": "spectrum", "hop": 4, "length": 8, "n_fft": 10}, "f32[12]", "f32[2,2,6]")
    same(run(spec, *x), [blocks(np.fft.rfft([v[:8], v[4:]], 10)) for v in x])


def test_analysis_and_synthesis_give_the_signal_back() -> None:
    """sqrt-Hann twice at half overlap adds up to one: the classic denoiser frame without the denoiser."""
    x = stream(8)
    parts: list[dict[str, Any]] = [
        {"kind": "audio_window", "history": 8},
        {"kind": "spectrum", "window": "sqrt_hann"},
        {"kind": "inverse_spectrum", "n_fft": 16, "window": "sqrt_hann"},
        {"kind": "overlap_add", "hop": 8},
    ]
    found = np.concatenate(run(chain(parts, {"x": "f32[8]"}, "f32[8]"), *x))
    np.testing.assert_allclose(found[8:], np.concatenate(x)[:-8], atol=1e-12)


@pytest.mark.parametrize("power", [1, 2])
def test_magnitude(power: int) -> None:
    x = stream(3, 2, 5)
    spec = one({"kind": "magnitude", "power": power, "eps": 0.5}, "f32[3,2,5]", "f32[3,5]")
    same(run(spec, *x), [(v[:, 0] ** 2 + v[:, 1] ** 2 + 0.5) ** (power / 2) for v in x])


def test_filter_banks() -> None:
    x = stream(9)
    learned = one({"kind": "filterbank", "bank": {"kind": "learned", "bands": 4}}, "f32[9]", "f32[4]")
    bank = RNG.standard_normal((4, 9))
    same(run(learned, *x, weights={"filterbank.weight": bank}), [bank @ v for v in x])
    mel = {"kind": "mel", "sample_rate": 8000, "bands": 2}
    (found,) = run(one({"kind": "filterbank", "bank": mel}, "f32[9]", "f32[2]"), np.ones(9))
    assert (found > 0).all()
    octaves = {"kind": "logarithmic", "sample_rate": 8000, "bands_per_octave": 3, "f_min": 100.0, "f_max": 4000.0}
    graph = build_graph(one({"kind": "filterbank", "bank": octaves}, "f32[65]", "f32[13]"))
    assert not graph.weights


# --- features -----------------------------------------------------------------------------------------------------
def test_logarithms() -> None:
    x = [np.abs(v) for v in stream(2, 3)]
    same(run(one({"kind": "log"}, "f32[2,3]", "f32[2,3]"), *x), np.log(x))
    spec = one({"kind": "log", "base": "10", "offset": 1.0, "floor": 1.5, "scale": 10.0}, "f32[2,3]", "f32[2,3]")
    same(run(spec, *x), 10 * np.log10(np.maximum(np.stack(x) + 1, 1.5)))


def test_features_of_a_frame() -> None:
    x = [*stream(9), np.zeros(9)]
    same(run(one({"kind": "center"}, "f32[9]", "f32[9]"), *x), [v - v.mean() for v in x])
    same(
        run(one({"kind": "log_rms", "floor": 1e-4}, "f32[9]", "f32[1]"), *x),
        [[np.log(np.sqrt(max(np.mean(v**2), float(np.float32(1e-4)))))] for v in x],
    )
    same(
        run(one({"kind": "zero_crossing_rate"}, "f32[9]", "f32[1]"), *x),
        [[np.mean(np.sign(v[1:]) * np.sign(v[:-1]) < 0)] for v in x],
    )
    power = [v**2 for v in x[:-1]]
    same(
        run(one({"kind": "spectral_flatness"}, "f32[9]", "f32[1]"), *power),
        [[np.log(np.exp(np.log(v).mean()) / v.mean())] for v in power],
    )
    (silent,) = run(one({"kind": "spectral_flatness"}, "f32[9]", "f32[1]"), np.zeros(9))
    np.testing.assert_allclose(silent, 0, atol=1e-9)


def test_difference_to_the_step_before() -> None:
    x = stream(4)
    same(run(one({"kind": "difference"}, "f32[4]", "f32[4]"), *x), np.diff(np.stack([0 * x[0], *x]), axis=0))
    rise = one({"kind": "difference", "rectify": True, "initial": 1e30, "start_step": 2}, "f32[4]", "f32[4]")
    zero = 0 * x[0]
    same(run(rise, *x), [zero, zero, zero, *np.maximum(np.diff(x[2:], axis=0), 0)])


# --- dense and norms ----------------------------------------------------------------------------------------------
def test_dense_and_norms() -> None:
    x = stream(3, 4)
    spec = one({"kind": "dense", "units": 2, "activation": "sigmoid"}, "f32[3,4]", "f32[3,2]")
    w = random_weights(build_graph(spec))
    same(run(spec, *x, weights=w), [sigmoid(v @ w["dense.weight"].T + w["dense.bias"]) for v in x])
    bare = one({"kind": "dense", "units": 2, "bias": False}, "f32[3,4]", "f32[3,2]")
    same(run(bare, *x, weights=w), [v @ w["dense.weight"].T for v in x])

    spec = one({"kind": "layer_norm", "eps": 0.1}, "f32[3,4]", "f32[3,4]")
    w = random_weights(build_graph(spec))
    centred = [v - v.mean(-1, keepdims=True) for v in x]
    normal = [v / np.sqrt((v**2).mean(-1, keepdims=True) + 0.1) for v in centred]
    same(run(spec, *x, weights=w), [v * w["layer_norm.weight"] + w["layer_norm.bias"] for v in normal])
    spec = one({"kind": "rms_norm", "eps": 0.1, "offset": 1.0}, "f32[3,4]", "f32[3,4]")
    w = random_weights(build_graph(spec))
    same(run(spec, *x, weights=w),
         [v / np.sqrt((v**2).mean(-1, keepdims=True) + 0.1) * (1 + w["rms_norm.weight"]) for v in x])  # fmt: skip
    spec = one({"kind": "group_norm", "groups": 4, "eps": 0.1}, "f32[3,4]", "f32[3,4]")
    same(
        run(spec, *x, weights={"group_norm.weight": np.ones(4), "group_norm.bias": np.full(4, 2.0)}), np.full_like(x, 2)
    )


def test_embedding() -> None:
    spec = chain([{"kind": "embedding", "entries": 5, "units": 3}], {"x": "i32[2]"}, "f32[2,3]")
    table = RNG.standard_normal((5, 3))
    same(run(spec, np.array([4, 0]), weights={"embedding.weight": table}), [table[[4, 0]]])


def token_fusion(second: str = "i32[]", **changes: Any) -> ModelSpec:
    part = {"kind": "token_fusion", "entries": 5, "units": 3, "scales": [1.0, 2.0], "input": ["x", "a", "b"]}
    inputs = {"x": "f32[3]", "a": "i32[]", "b": second}
    return chain([part | changes], inputs, "f32[3]", precision={"policy": "bf16"})


def test_embeddings_of_tokens_are_added_to_features() -> None:
    table, x = RNG.standard_normal((5, 3)), RNG.standard_normal(3)
    given = {"x": x, "a": np.array(4), "b": np.array(1)}
    same(run(token_fusion(), given, weights={"token_fusion.weight": table}), [x + table[4] + 2 * table[1]])
    assert expected_tensors(token_fusion()) == {"token_fusion.weight": bf16(5, 3)}


def test_every_token_of_a_sum_of_embeddings_has_a_scale() -> None:
    with pytest.raises(SpecError, match="wanted features and 1 tokens as `input`, found 3 inputs"):
        token_fusion(scales=[1.0])
    with pytest.raises(SpecError, match="token_fusion: a token"):
        build_graph(token_fusion("f32[3]"))


# --- convolutions -------------------------------------------------------------------------------------------------
def correlate(x: Array, weight: Array, stride: int = 1) -> Array:
    """x [t, c], weight [n, c, taps] -> [frames, n], no padding."""
    taps = weight.shape[2]
    frames = range(0, len(x) - taps + 1, stride)
    return np.stack([np.einsum("ic,nci->n", x[t : t + taps], weight) for t in frames])


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (4, 2), (2, 2), (1, 1)])
def test_a_causal_convolution_has_no_seams(taps: int, stride: int) -> None:
    x = stream(4, 3)
    part = {"kind": "conv1d", "channels": 2, "taps": taps, "stride": stride, "causal": True, "bias": False}
    spec = one(part, "f32[4,3]", f"f32[{4 // stride},2]")
    w = random_weights(build_graph(spec))
    whole = correlate(np.concatenate([np.zeros((taps - stride, 3)), *x]), w["conv1d.weight"], stride)
    np.testing.assert_allclose(np.concatenate(run(spec, *x, weights=w)), whole, rtol=1e-9)


def test_convolutions_inside_the_step() -> None:
    x = stream(7)
    spec = one({"kind": "conv1d", "channels": 2, "taps": 3, "stride": 2, "activation": "relu"}, "f32[7]", "f32[3,2]")
    w = random_weights(build_graph(spec))
    same(run(spec, *x, weights=w),
         [np.maximum(correlate(v[:, None], w["conv1d.weight"], 2) + w["conv1d.bias"], 0) for v in x])  # fmt: skip

    part = {"kind": "conv_stack", "channels": [3, 2], "taps": 3, "strides": [1, 2], "padding": 1, "activation": "relu"}
    spec = one(part, "f32[4,2]", "f32[2,2]")
    w = random_weights(build_graph(spec))
    y = stream(4, 2)
    for layer, stride in ((0, 1), (1, 2)):
        weight, bias = w[f"conv_stack.{layer}.weight"], w[f"conv_stack.{layer}.bias"]
        y = [np.maximum(correlate(np.pad(v, ((1, 1), (0, 0))), weight, stride) + bias, 0) for v in y]
    same(run(spec, *stream(4, 2), weights=w), y)


@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_depthwise_and_separable_blocks(shape: tuple[int, ...]) -> None:
    x = stream(*shape)
    type = f"f32[{','.join(map(str, shape))}]"
    rows = np.concatenate([v.reshape(-1, 5) for v in x])
    spec = one({"kind": "depthwise_conv1d", "taps": 3, "dilation": 2}, type, type)
    w = random_weights(build_graph(spec))

    def depthwise(rows: Array, weight: Array, dilation: int) -> Array:
        padded = np.concatenate([np.zeros((2 * dilation, 5)), rows])
        return np.asarray(np.sum([padded[i * dilation :][: len(rows)] * weight[:, i] for i in range(3)], axis=0))

    wanted = depthwise(rows, w["depthwise_conv1d.weight"], 2) + w["depthwise_conv1d.bias"]
    same(run(spec, *x, weights=w), wanted.reshape(STEPS, *shape))

    spec = one({"kind": "separable_blocks", "dilations": [1, 3], "taps": 3, "depthwise_bias": True}, type, type)
    w = {name.removeprefix("separable_blocks."): array for name, array in random_weights(build_graph(spec)).items()}
    y = rows
    for block, dilation in ((0, 1), (1, 3)):
        z = depthwise(y, w[f"{block}.depthwise.weight"], dilation) + w[f"{block}.depthwise.bias"]
        z = z @ w[f"{block}.pointwise.weight"].T + w[f"{block}.pointwise.bias"]
        z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
        z = z * w[f"{block}.norm.weight"] + w[f"{block}.norm.bias"]
        y = y + z * sigmoid(z)
    same(run(spec, *x, weights={f"separable_blocks.{k}": v for k, v in w.items()}), y.reshape(STEPS, *shape))


def test_max_pool() -> None:
    x = stream(7)
    same(run(one({"kind": "max_pool1d", "window": 2}, "f32[7]", "f32[3,1]"), *x),
         [v[:6].reshape(3, 2).max(1)[:, None] for v in x])  # fmt: skip
    spec = one({"kind": "max_pool1d", "window": 3, "stride": 1}, "f32[7]", "f32[5,1]")
    same(run(spec, *x), [np.lib.stride_tricks.sliding_window_view(v, 3).max(1)[:, None] for v in x])


# --- recurrent ----------------------------------------------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_layers_are_torchs(kind: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](4, 5, num_layers=2).double()
    type, out = (f"f32[{','.join(map(str, (*shape[:-1], n)))}]" for n in (4, 5))
    spec = one({"kind": kind, "units": 5, "layers": 2}, type, out)
    names = {"weight_ih": "w_ih", "weight_hh": "w_hh", "bias_ih": "b_ih", "bias_hh": "b_hh"}
    weights = {}
    for name, value in layer.named_parameters():
        stem, _, number = name.rpartition("_l")
        weights[f"{kind}.{number}.{names[stem]}"] = value.detach().numpy()
    x = stream(*shape)
    wanted, _ = layer(torch.from_numpy(np.concatenate([v.reshape(-1, 4) for v in x])))
    same(run(spec, *x, weights=weights), wanted.detach().numpy().reshape(STEPS, *shape[:-1], 5))


@pytest.mark.parametrize(("kind", "blocks"), [("lstm", 4), ("gru", 3)])
def test_steps_before_the_start_leave_no_trace(kind: str, blocks: int) -> None:
    x = stream(3)
    late = one({"kind": kind, "units": 2, "start_step": 2}, "f32[3]", "f32[2]")
    plain = one({"kind": kind, "units": 2}, "f32[3]", "f32[2]")
    same(run(late, *x)[2:], run(plain, *x[2:]))
    same(run(late, *x)[:1], run(plain, *x[:1]))
    assert expected_tensors(late)[f"{kind}.0.w_ih"].shape == (2 * blocks, 3)


def test_forms_of_biases_and_gates() -> None:
    x = stream(3)
    both = one({"kind": "lstm", "units": 2}, "f32[3]", "f32[2]")
    w = random_weights(build_graph(both))
    summed = w | {"lstm.0.bias": w["lstm.0.b_ih"] + w["lstm.0.b_hh"]}
    wanted = run(both, *x, weights=w)
    same(run(one({"kind": "lstm", "units": 2, "bias": "one"}, "f32[3]", "f32[2]"), *x, weights=summed), wanted)
    i, f, g, o = (np.arange(2) + 2 * n for n in range(4))
    onnx = {name: array[np.concatenate([i, o, f, g])] for name, array in w.items()}
    same(run(one({"kind": "lstm", "units": 2, "gates": "iofc"}, "f32[3]", "f32[2]"), *x, weights=onnx), wanted)
    with pytest.raises(SpecError, match=r"components\[0\]: lstm: lstm: gates"):
        build_graph(one({"kind": "lstm", "units": 2, "gates": "iffo"}, "f32[3]", "f32[2]"))


# --- glue ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "output", "wanted"),
    [
        ({"kind": "activation", "function": "tanh"}, "f32[2,3]", np.tanh),
        ({"kind": "affine", "scale": 2.0, "offset": 1.0}, "f32[2,3]", lambda v: 2 * v + 1),
        ({"kind": "clamp", "lo": -0.5, "hi": 0.5}, "f32[2,3]", lambda v: np.clip(v, -0.5, 0.5)),
        ({"kind": "softmax"}, "f32[2,3]", lambda v: np.exp(v) / np.exp(v).sum(-1, keepdims=True)),
        ({"kind": "softmax", "log": True}, "f32[2,3]", lambda v: v - np.log(np.exp(v).sum(-1, keepdims=True))),
        ({"kind": "reduce", "function": "max"}, "f32[2]", lambda v: v.max(-1)),
        ({"kind": "reshape", "shape": [3, 2]}, "f32[3,2]", lambda v: v.reshape(3, 2)),
        ({"kind": "transpose", "axes": [1, 0]}, "f32[3,2]", lambda v: v.T),
        ({"kind": "flatten"}, "f32[6]", lambda v: v.reshape(6)),
        ({"kind": "flatten", "order": "channels"}, "f32[6]", lambda v: v.T.reshape(6)),
        ({"kind": "slice", "start": 1, "stop": 3}, "f32[2,2]", lambda v: v[:, 1:]),
        ({"kind": "slice", "start": 1, "stop": 2, "axis": 0}, "f32[1,3]", lambda v: v[1:]),
        ({"kind": "split", "sizes": [1, 2]}, "f32[2,1]", lambda v: v[:, :1]),
    ],
)  # fmt: skip
def test_glue(part: dict[str, Any], output: str, wanted: Any) -> None:
    x = stream(2, 3)
    same(run(one(part, "f32[2,3]", output), *x), [wanted(v) for v in x])


def test_several_inputs() -> None:
    a, b = stream(2, 3), stream(3)
    parts: list[dict[str, Any]] = [{"kind": "combine", "function": "mul", "input": ["a", "b", "b"]}]
    spec = chain(parts, {"a": "f32[2,3]", "b": "f32[3]"}, "f32[2,3]")
    same(run(spec, *({"a": u, "b": v} for u, v in zip(a, b, strict=True))),
         [u * v * v for u, v in zip(a, b, strict=True)])  # fmt: skip
    parts = [{"kind": "split", "sizes": [1, 2], "input": "a"},
             {"kind": "concat", "axis": 0, "input": ["split.1", "split.0", *["b"] * 12]}]  # fmt: skip
    spec = chain(parts, {"a": "f32[3]", "b": "f32[3]"}, "f32[39]")
    same(run(spec, {"a": b[0], "b": b[1]}), [np.concatenate([b[0][1:], b[0][:1], *[b[1]] * 12])])


# --- refusals -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "input", "says"),
    [
        ({"kind": "audio_window", "history": 3}, "f32[2,3]", "audio_window cannot read this; wanted a vector"),
        ({"kind": "frame_window", "frames": 2}, "f32[3,2]", "frame_window is shorter than a step"),
        ({"kind": "spectrum", "n_fft": 8}, "f32[9]", "a frame longer than the transform"),
        ({"kind": "spectrum", "hop": 2}, "f32[9]", "needs its frames' length"),
        ({"kind": "spectrum", "window": "han"}, "f32[9]", "window: kind"),
        ({"kind": "magnitude"}, "f32[9]", "magnitude"),
        (
            {"kind": "conv1d", "channels": 2, "taps": 3, "stride": 2, "causal": True},
            "f32[5,2]",
            "a multiple of 2 frames",
        ),
        ({"kind": "conv1d", "channels": 2, "taps": 9}, "f32[5,2]", "fewer frames than taps"),
        ({"kind": "lstm", "units": 2}, "f32[2,2,2]", "lstm cannot read this"),
        ({"kind": "split", "sizes": [1, 1]}, "f32[3]", "split: sizes"),
        ({"kind": "reshape", "shape": [2, 2]}, "f32[3]", "reshape: shape"),
        ({"kind": "flatten", "order": "channels"}, "f32[3]", "flatten by channels"),
        ({"kind": "overlap_add", "hop": 4}, "f32[3]", "overlap_add: hop"),
        ({"kind": "embedding", "entries": 2, "units": 2}, "f32[3]", "wrong dtype"),
        ({"kind": "dense", "units": 2}, "i32[3]", "wrong dtype"),
        ({"kind": "group_norm", "groups": 2}, "f32[3]", "group_norm: groups"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(part: dict[str, Any], input: str, says: str) -> None:
    with pytest.raises(SpecError, match=r"spec 'small': components\[0\]: ") as caught:
        build_graph(one(part, input, "f32[1]"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"kind": "pad"}, "left or right above 0"),
        ({"kind": "slice", "start": 2, "stop": 2}, "start < stop"),
        ({"kind": "conv_stack", "channels": [1, 2], "taps": 1, "strides": [1]}, "strides: wanted 2"),
        ({"kind": "conv1d", "channels": 1, "taps": 1, "causal": True, "pad_left": 1}, "causal: wanted no padding"),
        ({"kind": "combine", "function": "add"}, "number of inputs of 'combine'; wanted 2 to 64; found 1"),
        ({"kind": "magnitude", "power": 3}, "power"),
    ],
)
def test_dimensions_that_contradict_each_other_are_refused(part: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        one(part, "f32[3]", "f32[3]")
    assert says in str(caught.value)


def test_stateless_kinds_have_no_state() -> None:
    assert state_bytes(build_graph(one({"kind": "dense", "units": 2}, "f32[3]", "f32[2]"))) == {
        "fixed": 0,
        "per_step": 0,
    }


def test_every_built_in_kind_is_tested_here_or_in_a_file_of_its_own() -> None:
    here = Path(__file__)
    own = [kind for kind, cls in installed_kinds().items() if cls.__module__.startswith("wpk.")]
    modules = {kind: installed_kinds()[kind].__module__.rpartition(".")[2] for kind in own}
    files = {kind: path if (path := here.with_name(f"test_{modules[kind]}.py")).exists() else here for kind in own}
    assert [kind for kind in own if f'"{kind}"' not in files[kind].read_text()] == []
