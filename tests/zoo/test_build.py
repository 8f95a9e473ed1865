"""From spec to graph: types at ports, operator versions, tensors of the checkpoint, models that are data alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.zoo.specs import SMALL, chain, random_weights, run, small
from wpk.ir.errors import OperatorError, SpecError
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import Type, f32
from wpk.ops import LIBRARY
from wpk.ops.operator import Array, Dims, Operator, OperatorLibrary, operand, operator
from wpk.ops.requirements import Selection
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.spec import ModelSpec


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_data(small(**changes), "small")


# --- graphs -------------------------------------------------------------------------------------------------------
def test_a_graph_has_the_specs_ports_and_the_same_text_every_time() -> None:
    graph = build_graph(spec())
    assert [(p.name, p.value.type) for p in graph.inputs] == [("audio", f32(80))]
    assert [(p.name, p.value.type) for p in graph.outputs] == [("speech", f32(1))]
    assert [s.name for s in graph.states] == ["audio_window.history", "lstm.0.h", "lstm.0.c"]
    assert str(graph) == str(build_graph(ModelSpec.from_yaml(SMALL)))
    assert str(parse_graph(print_graph(graph))) == str(graph)


def test_nodes_are_labelled_with_their_component() -> None:
    labels = {node.op: node.label for node in build_graph(spec()).nodes}
    assert labels["lstm"] == "lstm" and labels["magnitude"] == "magnitude"


def test_sizes_come_from_the_graph() -> None:
    # 128 samples -> 65 bins; 4 * 12 gates over 65 and 12 inputs with two biases; 12 -> 1
    assert parameter_count(spec()) == 48 * (65 + 12 + 2) + 13
    assert state_bytes(build_graph(spec())) == {"fixed": 4 * (48 + 24), "per_step": 0}


@pytest.mark.parametrize("declared", ["f32[2]", "f32[1,1]", "f32[]", "i32[1]"])
def test_a_port_of_another_type_than_its_component_is_refused(declared: str) -> None:
    data = small()
    data["ports"]["outputs"]["speech"]["type"] = declared
    with pytest.raises(SpecError) as caught:
        build_graph(ModelSpec.from_data(data))
    assert "ports.outputs.speech.type: 'head' gives another type" in caught.value.message
    assert (caught.value.wanted, caught.value.found) == ("f32[1]", declared)


def test_components_that_do_not_fit_together_are_refused_with_the_place() -> None:
    data = small()
    data["components"][1]["n_fft"] = 64
    with pytest.raises(SpecError) as caught:
        build_graph(ModelSpec.from_data(data))
    assert caught.value.message.startswith("spec 'small': components[1]: spectrum: ")
    assert (caught.value.wanted, caught.value.found) == ("<= 64", "128")


# --- operator versions --------------------------------------------------------------------------------------------
def test_a_version_that_is_missing_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(OperatorError) as caught:
        build_graph(spec(operators={"linear": ">=99", "lstm": ">=1,<2", "warp": ">=1"}))
    assert caught.value.wanted == "linear >=99, warp >=1"
    assert caught.value.found == "linear@1, no operator 'warp'"
    assert caught.value.hint


def test_the_newest_version_that_is_allowed_is_taken() -> None:
    library = OperatorLibrary()
    for cls in LIBRARY:
        library.add(cls)
    for version in (2, 3):

        class Relu(Operator):
            x = operand("...")

            def results(self, dims: Dims) -> tuple[Type, ...]:
                return (dims.like("x"),)

            def meaning(self, *inputs: Array) -> Array:
                return inputs[0]

        name = f"test_only_relu_{version}"
        operator(name, version=version)(Relu)
        LIBRARY._operators.pop((name, version))  # the decorator enters it there
        Relu.name = "relu"
        library.add(Relu)
    versions = {text: Selection({"relu": text}, library).resolve("relu").version for text in (">=1", "<3", "==1")}
    assert versions == {">=1": 3, "<3": 2, "==1": 1}
    assert Selection({}, library).resolve("relu").version == 3
    model = chain([{"kind": "activation", "function": "relu"}], {"x": "f32[3]"}, "f32[3]", operators={"relu": "<3"})
    assert [node.version for node in build_graph(model, library=library).nodes] == [2]


# --- tensors ------------------------------------------------------------------------------------------------------
def test_tensors_have_their_paths_as_names_where_nothing_else_is_said() -> None:
    assert {name: str(type) for name, type in expected_tensors(spec()).items()} == {
        "lstm.0.w_ih": "f32[48,65]",
        "lstm.0.w_hh": "f32[48,12]",
        "lstm.0.b_ih": "f32[48]",
        "lstm.0.b_hh": "f32[48]",
        "head.weight": "f32[1,12]",
        "head.bias": "f32[1]",
    }


def test_tensors_are_renamed_one_by_one_or_by_pattern() -> None:
    mapped = spec(tensors={"lstm.*.w_*": "rnn.weight_*_l*", "lstm.*": "rnn.*", "head.weight": "out", "head.*": "h.*"})
    assert list(expected_tensors(mapped)) == [
        "rnn.weight_0_lih", "rnn.weight_0_lhh", "rnn.0.b_ih", "rnn.0.b_hh", "out", "h.bias",
    ]  # fmt: skip


def test_tensors_are_taken_from_another_layout() -> None:
    """[in, out], with axes of size 1, with rows in another order, and several parameters out of one tensor."""
    plain = chain([{"kind": "lstm", "units": 2}, {"kind": "dense", "units": 3}], {"x": "f32[4]"}, "f32[3]")
    w = random_weights(build_graph(plain))
    stored = chain(
        [{"kind": "lstm", "units": 2}, {"kind": "dense", "units": 3}], {"x": "f32[4]"}, "f32[3]",
        tensors={
            "lstm.0.w_ih": {"tensor": "W", "shape": [4, 1, 8], "axes": [1, 0]},
            "lstm.0.w_hh": {"tensor": "R", "shape": [1, 8, 2], "rows": [[2, 4], [0, 2], [4, 8]]},
            "lstm.0.b_ih": {"tensor": "B", "shape": [1, 16], "rows": [[0, 8]]},
            "lstm.0.b_hh": {"tensor": "B", "shape": [1, 16], "rows": [[8, 16]]},
            "dense.weight": {"tensor": "V", "axes": [1, 0]},
            "dense.bias": {"tensor": "c", "shape": [3, 1, 1]},
        },
    )  # fmt: skip
    assert {name: type.shape for name, type in expected_tensors(stored).items()} == {
        "W": (4, 1, 8), "R": (1, 8, 2), "B": (1, 16), "V": (2, 3), "c": (3, 1, 1),
    }  # fmt: skip
    held = {
        "W": w["lstm.0.w_ih"].T[:, None],
        "R": w["lstm.0.w_hh"][[2, 3, 0, 1, 4, 5, 6, 7]][None],
        "B": np.concatenate([w["lstm.0.b_ih"], w["lstm.0.b_hh"]])[None],
        "V": w["dense.weight"].T,
        "c": w["dense.bias"][:, None, None],
    }
    x = np.random.default_rng(1).standard_normal((4, 4))
    np.testing.assert_allclose(run(stored, *x, weights=held), run(plain, *x, weights=w), rtol=1e-12)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"head.weigth": "w"}, "tensors.head.weigth: no component has this parameter"),
        ({"head.weigth": "w"}, "Did you mean 'head.weight'"),
        ({"nothing.*": "w.*"}, "tensors.nothing.*: no component has this parameter"),
        ({"head.weight": {"tensor": "w", "shape": [13, 1]}}, "head.weight: tensor 'w' does not make the parameter"),
        ({"head.weight": {"tensor": "w", "shape": [12], "rows": [[6, 13]]}}, "head.weight: slice: bounds"),
        ({"lstm.0.w_ih": {"tensor": "w", "axes": [0, 2, 1]}}, "lstm.0.w_ih: axes of a tensor without a shape"),
        (
            {"lstm.0.w_ih": {"tensor": "w", "shape": [65, 48, 2], "axes": [1, 0]}},
            "lstm.0.w_ih: axes of a stored tensor",
        ),
        ({"lstm.0.w_ih": "same", "lstm.0.w_hh": "same"}, "lstm.0.w_hh: weight 'same' is declared twice"),
    ],
)
def test_a_mapping_that_fits_nothing_is_refused(tensors: Any, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_graph(spec(tensors=tensors))
    assert says in str(caught.value)


# --- models that are data alone -----------------------------------------------------------------------------------
NEW_DENOISER = """
name: my-denoiser
version: 3
task: denoise
description: a mask over 32 bands from a GRU, 24 kHz
licence: {code: Apache-2.0, weights: Apache-2.0}
weights: {synthetic: 11}
clock: {sample_rate: 24000, samples_per_step: 240, steps_per_beat: 2}
ports:
  inputs:
    microphone: {type: "f32[240]", kind: audio, sample_rate: 24000}
  outputs:
    audio: {type: "f32[240]", kind: audio, sample_rate: 24000, from: overlap_add, latency_samples: 240}
    level: {type: "f32[1]", kind: features, from: log_rms}
components:
  - {kind: audio_window, history: 240}
  - {kind: log_rms}
  - {kind: spectrum, input: audio_window, window: sqrt_hann}
  - {kind: magnitude, power: 2}
  - {kind: filterbank, bank: {kind: mel, sample_rate: 24000, bands: 32, scale: slaney}}
  - {kind: log, floor: 1e-7, base: "10"}
  - {kind: reshape, name: rows, shape: [1, 32]}
  - {kind: conv1d, channels: 48, taps: 5, causal: true, activation: gelu}
  - {kind: flatten}
  - {kind: dense, name: skip, units: 40, bias: false}
  - {kind: gru, units: 40, layers: 2, input: flatten}
  - {kind: combine, name: both, function: add, input: [gru, skip]}
  - {kind: dense, name: mask, units: 241, activation: sigmoid}
  - {kind: combine, name: masked, function: mul, input: [spectrum, mask]}
  - {kind: inverse_spectrum, n_fft: 480, window: sqrt_hann}
  - {kind: overlap_add, hop: 240}
"""


def test_a_new_denoiser_is_data_alone() -> None:
    new = ModelSpec.from_yaml(NEW_DENOISER, "my-denoiser")
    assert ModelSpec.from_yaml(new.to_yaml()) == new
    assert new.latency_samples == 240 and new.clock.step_ms == 10.0
    shapes = {name: type.shape for name, type in expected_tensors(new).items()}
    tensors = WeightsStore(settings({})).open(new.weights, shapes)
    audio = 0.1 * np.random.default_rng(0).standard_normal((20, 240))
    made = np.stack(run(new, *audio, weights={name: tensors.read(name) for name in tensors}))
    assert np.isfinite(made).all() and made[1:].std() > 1e-3
    # With a mask of ones it is the identity, one window late.
    weights = {name: np.zeros(shape) for name, shape in shapes.items()} | {"mask.bias": np.full(241, 100.0)}
    made = np.stack(run(new, *audio, weights=weights))
    np.testing.assert_allclose(made[1:], audio[:-1], atol=1e-9)


def test_the_size_of_a_model_is_a_matter_of_numbers_in_its_spec() -> None:
    data = small()
    data["components"][4] |= {"units": 33, "layers": 3}
    assert expected_tensors(ModelSpec.from_data(data))["lstm.2.w_ih"] == f32(132, 33)
