"""Feedback: components that read what another, or they themselves, gave one step before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.zoo.specs import small
from wpk import registry
from wpk.ir.errors import SpecError
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec


def running_sum(**changes: Any) -> dict[str, Any]:
    """y = x + y of the step before."""
    return (
        small(
            task="text",
            ports={
                "inputs": {"x": {"type": "f32[3]", "kind": "features"}},
                "outputs": {"y": {"type": "f32[3]", "kind": "features", "from": "combine"}},
            },
            feedback={"before": {"type": "f32[3]", "from": "combine", "initial": 10.0}},
            components=[{"kind": "combine", "function": "add", "input": ["x", "before"]}],
        )
        | changes
    )


@pytest.mark.parametrize("steps_per_beat", [1, 2])
def test_a_component_reads_what_it_gave_one_step_before(tmp_path: Path, steps_per_beat: int) -> None:
    clock = {"sample_rate": 8000, "samples_per_step": 80, "steps_per_beat": steps_per_beat}
    spec = ModelSpec.from_data(running_sum(clock=clock))
    x = np.random.default_rng(0).integers(-9, 9, (6, 3)).astype(np.float32)
    with registry.load(spec, capacity=2, target="cpu", threads=1, where=Settings(tmp_path, tmp_path)) as cohort:
        first, found = cohort.join(), []
        for beat in range(0, 6, steps_per_beat):
            late = cohort.join() if beat == 2 else None
            outputs = cohort.beat({first: {"x": x[beat : beat + steps_per_beat]}})
            found.append(outputs[first]["y"].reshape(-1, 3))
            if late is not None:
                assert (outputs[late]["y"] == 10).all()  # silence, and its own beginning
    assert np.concatenate(found).tolist() == (10 + np.cumsum(x, axis=0)).tolist()


def test_feedback_goes_to_yaml_and_back() -> None:
    spec = ModelSpec.from_data(running_sum())
    assert ModelSpec.from_yaml(spec.to_yaml()) == spec
    assert [state.name for state in build_graph(spec).states] == ["feedback.before"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"feedback": {"before": {"type": "f32[3]", "from": "nothing"}}}, "nothing is called 'nothing'"),
        ({"feedback": {"x": {"type": "f32[3]", "from": "combine"}}}, "the name 'x' is taken"),
        ({"feedback": {"combine": {"type": "f32[3]", "from": "combine"}}}, "the name 'combine' is taken"),
        (
            {"components": [{"kind": "activation", "function": "relu", "name": "combine"}]},
            "no output depends on the feedback 'before'",
        ),
        ({"feedback": {"before": {"type": "f32[3]", "from": "combine", "initial": "ten"}}}, "feedback.before.initial"),
        (
            {"feedback": {"before": {"type": "i32[3]", "from": "combine", "initial": 12.5}}},
            "wanted whole numbers of 32 bits for i32[3], found 12.5",
        ),
    ],
)
def test_what_cannot_be_fed_back_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        ModelSpec.from_data(running_sum(**changes))
    assert says in str(refused.value)


def test_feedback_of_another_type_is_refused() -> None:
    flat = {"kind": "reduce", "function": "sum", "name": "total", "input": "combine"}
    changes = {
        "components": [*running_sum()["components"], flat],
        "feedback": {"before": {"type": "f32[3]", "from": "total"}},
        "ports": running_sum()["ports"] | {"outputs": {"y": {"type": "f32[1]", "kind": "features", "from": "total"}}},
    }
    with pytest.raises(SpecError) as refused:
        build_graph(ModelSpec.from_data(running_sum(**changes)))
    assert "'total' gives another type" in str(refused.value)
    assert (refused.value.wanted, refused.value.found) == ("f32[1]", "f32[3]")
