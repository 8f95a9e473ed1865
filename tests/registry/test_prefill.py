"""Sessions that start with steps behind them: they go on as one does that was given these steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from tests.zoo.specs import small
from tests.zoo.test_nemotron_h import SHAPES
from tests.zoo.test_nemotron_h import spec as hybrid
from wpk import registry
from wpk.bench.history import start_at
from wpk.ir.errors import SpecError, WeightsError
from wpk.registry.load import open_weights
from wpk.registry.settings import Settings
from wpk.registry.weights.synthesize import synthesize
from wpk.scheduler.program import Program
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
PROMPT = (5, 9, 2, 300, 7)
FED = (1, 2, 40, 400)


def gru(**changes: Any) -> ModelSpec:
    ports = {
        "inputs": {"x": {"type": "f32[3]", "kind": "features"}},
        "outputs": {"y": {"type": "f32[4]", "kind": "features", "from": "gru"}},
    }
    parts = [{"kind": "dense", "units": 3}, {"kind": "gru", "units": 4}]
    return ModelSpec.from_data(small(task="text", ports=ports, components=parts) | changes)


def outputs(spec: ModelSpec, steps: list[Array], where: Settings, port: str, capacity: int = 2) -> list[Array]:
    """What the last session of a full cohort gives; the others are silent."""
    with registry.load(spec, capacity=capacity, target="cpu", threads=1, where=where) as cohort:
        *_, session = (cohort.join() for _ in range(capacity))
        (name,) = spec.ports.inputs
        return [cohort.beat({session: {name: step}})[session][port] for step in steps]


def test_a_prompt_is_as_if_the_session_had_been_given_it(shared: Settings) -> None:
    plain = hybrid(SHAPES["all kinds of layers"])
    data = plain.to_data()
    prompted = ModelSpec.from_data(
        data
        | {
            "prefill": {
                "prompt": {
                    "steps": len(PROMPT),
                    "inputs": {"token": {"type": "i32[]", "values": PROMPT}},
                    "components": [{"use": "nemotron_h"}],
                }
            }
        }
    )
    tokens = [np.array([token], np.int32) for token in (*PROMPT, *FED)]
    whole = outputs(plain, tokens, shared, "lm_head_logits")[len(PROMPT) :]
    after = outputs(prompted, tokens[len(PROMPT) :], shared, "lm_head_logits")
    assert [a.tobytes() for a in after] == [b.tobytes() for b in whole]
    unprompted = outputs(plain, tokens[len(PROMPT) :], shared, "lm_head_logits")
    assert after[0].tobytes() != unprompted[0].tobytes()


def test_caches_have_room_for_the_prompt_beside_the_context() -> None:
    data = hybrid(SHAPES["attention alone"]).to_data()
    prefill = {
        "steps": 3, "inputs": {"token": {"type": "i32[]", "values": [1, 2, 3]}}, "components": [{"use": "nemotron_h"}],
    }  # fmt: skip
    spec = ModelSpec.from_data(data | {"prefill": {"prompt": prefill}})
    rows = {s.name: s.value.type.shape[0] for s in build_graph(spec, context=40).states if s.name.endswith(".kv")}
    assert set(rows.values()) == {43}


def test_rows_may_come_from_the_checkpoint_and_through_other_components(shared: Settings) -> None:
    prefill = {
        "steps": 2,
        "inputs": {"row": {"type": "f32[5]", "tensor": "voice", "shape": [1, 10]}},
        "components": [{"kind": "dense", "name": "voice_in", "units": 3}, {"use": "gru"}],
    }
    spec = gru(prefill={"voice": prefill})
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec
    tensors = expected_tensors(spec)
    assert str(tensors["voice"]) == "f32[1,10]" and str(tensors["voice_in.weight"]) == "f32[3,5]"
    weights = open_weights(spec, None, shared)
    rows = weights.read("voice").reshape(2, 5) @ weights.read("voice_in.weight").T + weights.read("voice_in.bias")
    x = np.zeros(3, np.float32)
    started = outputs(spec, [x], shared, "y")[0]
    # The same rows through the model's own first component: its inverse is applied to them before.
    matrix, bias = weights.read("dense.weight").astype(np.float64), weights.read("dense.bias").astype(np.float64)
    fed = [np.linalg.solve(matrix, row - bias).astype(np.float32) for row in rows]
    assert np.allclose(outputs(gru(), [*fed, x], shared, "y")[-1], started, atol=1e-5)
    assert not np.allclose(outputs(gru(), [x], shared, "y")[0], started, atol=1e-3)


def voice(**changes: Any) -> dict[str, Any]:
    return {
        "steps": 2, "inputs": {"row": {"type": "f32[3]", "values": [0.0] * 6}}, "components": [{"use": "gru"}],
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("prefill", "says"),
    [
        ({"a": voice(steps=3)}, "wanted 3 rows of the input 'row', found 2"),
        ({"a": voice(inputs={"row": {"type": "f32[3]"}})}, "wanted either 'values' or 'tensor'"),
        ({"a": voice(inputs={"row": {"type": "f32[3]", "values": [0.0] * 7}})}, "wanted values for whole rows"),
        ({"a": voice(components=[{"use": "gur"}])}, "wanted `use` of one of dense, gru in a prefill, found 'gur'"),
        ({"a": voice(components=[{"use": ["gru"]}])}, "found ['gru']"),
        ({"a": voice(components=[{"kind": "softmax", "name": ["x"]}])}, "name"),
        ({"a": voice(steps=1 << 17)}, "steps"),
        ({"a": voice(components=[{"kind": "softmax"}])}, "no component of the model among them"),
        ({"a": voice(components=[{"use": "gru", "input": "nothing"}])}, "nothing is called 'nothing'"),
        ({"a": voice(), "b": voice()}, "'gru' has a start already"),
        (
            {"a": voice(inputs={"row": {"type": "i32[3]", "values": [0.5] * 6}})},
            "wanted whole numbers of 32 bits for i32[3], found 0.5",
        ),
    ],
)
def test_what_cannot_be_a_start_is_refused(prefill: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        gru(prefill=prefill)
    assert says in str(refused.value) and "prefill" in str(refused.value)


def test_what_has_not_begun_is_not_counted() -> None:
    parts = [{"kind": "dense", "units": 3}, {"kind": "gru", "units": 4, "start_step": 1}]
    with pytest.raises(SpecError, match=r"prefill\.a\.components: a component counts the steps of the session"):
        expected_tensors(gru(components=parts, prefill={"a": voice()}))


def test_states_of_other_components_are_left_behind(shared: Settings) -> None:
    """A helper with a state of its own, which the model has not."""
    parts = [{"kind": "gru", "name": "helper", "units": 3}, {"use": "gru"}]
    spec = gru(prefill={"a": voice(components=parts)})
    x = np.ones(3, np.float32)
    assert not np.allclose(outputs(spec, [x], shared, "y")[0], outputs(gru(), [x], shared, "y")[0])


def test_a_measurement_in_mid_history_starts_behind_the_prompt(shared: Settings) -> None:
    data = hybrid(SHAPES["attention alone"]).to_data()
    prefill = {
        "steps": 3, "inputs": {"token": {"type": "i32[]", "values": [1, 2, 3]}}, "components": [{"use": "nemotron_h"}],
    }  # fmt: skip
    spec, found = ModelSpec.from_data(data | {"prefill": {"prompt": prefill}}), []

    def look(program: Program, image: npt.NDArray[np.uint8]) -> None:
        start_at(program, image, 20)
        offset = int(program.values[program.value_names.index("nemotron_h.position")]["offset"])
        found.append(int(image[offset : offset + 4].view(np.int32)[0]))

    registry.load(spec, capacity=1, target="cpu", threads=1, where=shared, prepare=look).close()
    assert found == [23]


def test_components_that_are_none_are_refused_beside_a_prefill() -> None:
    with pytest.raises(SpecError, match="components"):
        gru(components=None, prefill={"a": voice()})


def test_a_tensor_of_a_prefill_is_looked_at(shared: Settings, tmp_path: Path) -> None:
    latent = {"row": {"type": "f32[3]", "tensor": "voice"}}
    spec = gru(prefill={"a": voice(inputs=latent)})
    synthesize(spec, tmp_path / "w.safetensors")
    tensors = load_file(tmp_path / "w.safetensors")
    tensors["voice"][1, 2] = np.nan
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="'voice' does not hold f32"):
        registry.load(spec, capacity=1, target="cpu", weights=tmp_path / "w.safetensors", where=shared)


def test_a_tensor_of_two_types_or_also_unused_is_refused() -> None:
    wide = gru(prefill={"a": voice(components=[{"kind": "dense", "units": 3}, {"use": "gru", "units": 5}])})
    with pytest.raises(SpecError, match="is read as two types"):
        expected_tensors(wide)
    with pytest.raises(SpecError, match=r"unused_tensors: the model reads dense\.weight"):
        expected_tensors(gru(unused_tensors={"dense.weight": "f32[3,3]"}))
