"""Specs for tests: a small one to start from, and any components between an input and an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wpk.ir.graph import Graph
from wpk.ops.evaluate import Reference
from wpk.zoo.build import build_graph
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[np.float64]

SMALL = """\
name: small
version: 1
task: vad
description: a VAD of two layers
licence: {code: MIT, weights: MIT}
weights: {synthetic: 7}
clock: {sample_rate: 8000, samples_per_step: 80}
ports:
  inputs:
    audio: {type: "f32[80]", kind: audio, sample_rate: 8000}
  outputs:
    speech: {type: "f32[1]", kind: probability, from: head}
components:
  - {kind: audio_window, history: 48}
  - {kind: spectrum, window: hann_periodic}
  - {kind: magnitude}
  - {kind: log, floor: 1e-5}
  - {kind: lstm, units: 12}
  - {kind: dense, name: head, units: 1, activation: sigmoid}
"""


def small(**changes: Any) -> dict[str, Any]:
    """The small spec as plain data, with some top-level keys replaced."""
    return ModelSpec.from_yaml(SMALL).to_data() | changes


def chain(components: list[dict[str, Any]], inputs: dict[str, str], output: str, **changes: Any) -> ModelSpec:
    """A spec of these components; inputs: name -> type; the output is what the last component gives."""
    last = components[-1]
    return ModelSpec.from_data(
        small(
            ports={
                "inputs": {name: {"type": type, "kind": "features"} for name, type in inputs.items()},
                "outputs": {"y": {"type": output, "kind": "features", "from": last.get("name", last["kind"])}},
            },
            components=components,
        )
        | changes
    )


def random_weights(graph: Graph, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {port.name: rng.standard_normal(port.value.type.shape) for port in graph.weights}


def run(spec: ModelSpec, *steps: Array | dict[str, Array], weights: dict[str, Array] | None = None) -> list[Array]:
    """The float64 meaning of output `y`, or of the only one, for each step's input."""
    graph = build_graph(spec)
    reference = Reference(graph, random_weights(graph) if weights is None else weights)
    names = list(spec.ports.inputs)
    made = [reference.step(step if isinstance(step, dict) else {names[0]: step}) for step in steps]
    return [next(iter(outputs.values())) for outputs in made]
