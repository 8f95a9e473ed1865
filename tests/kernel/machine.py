"""A small model compiled and loaded without the store: what the tests of the kernel drive."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.zoo.specs import small
from wpk.kernel.control import set_bit
from wpk.kernel.cpu import CpuKernel
from wpk.ops.evaluate import Reference
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry.formats import TensorSet
from wpk.registry.loading import fill_arenas
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import Direction, Program
from wpk.scheduler.target import TARGETS, Target
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[np.float32]

# Cuts every phase into as many shares as it has parts and slots for: more tasks than any real target makes.
FINE = TARGETS["cpu"].model_copy(update={"name": "fine", "least_task_s": 1e-15})


def model(**changes: Any) -> ModelSpec:
    """A model with every kind of state, of odd sizes: recurrent layers, a ring, a window of samples."""
    components = [
        {"kind": "audio_window", "history": 48},
        {"kind": "spectrum", "window": "hann_periodic"},
        {"kind": "magnitude"},
        {"kind": "log", "floor": 1e-5},
        {"kind": "layer_norm"},
        {"kind": "dense", "units": 37, "activation": "silu"},
        {"kind": "separable_blocks", "dilations": [1, 2], "taps": 3},
        {"kind": "gru", "units": 19},
        {"kind": "lstm", "units": 21},
        {"kind": "dense", "name": "head", "units": 3, "activation": "sigmoid"},
    ]
    outputs = {
        "speech": {"type": "f32[3]", "kind": "probability", "from": "head"},
        "hidden": {"type": "f32[21]", "kind": "features", "from": "lstm"},
    }
    ports = {"inputs": {"audio": {"type": "f32[80]", "kind": "audio", "sample_rate": 8000}}, "outputs": outputs}
    return ModelSpec.from_data(small(components=components, ports=ports) | changes)


def tensors(spec: ModelSpec) -> TensorSet:
    expected = {name: type.shape for name, type in expected_tensors(spec).items()}
    return WeightsStore(settings()).open(spec.weights, expected)


@functools.cache
def _compiled(text: str, capacity: int, target: str, steps: int) -> Compiled:
    spec = ModelSpec.model_validate_json(text)
    return compile_graph(
        build_graph(spec), Selection(spec.operators), Target.model_validate_json(target), capacity=capacity, steps=steps
    )


def compiled(spec: ModelSpec, capacity: int, target: Target = FINE, steps: int = 1) -> Compiled:
    return _compiled(spec.model_dump_json(by_alias=True), capacity, target.model_dump_json(), steps)


def reference(spec: ModelSpec) -> Reference:
    graph, weights = build_graph(spec), tensors(spec)
    return Reference(graph, {port.name: weights.read(port.name) for port in graph.weights})


class Machine:
    """A kernel with its ports by name. Sessions are slots here."""

    def __init__(self, spec: ModelSpec, capacity: int, target: Target = FINE, steps: int = 1, **options: Any) -> None:
        made = compiled(spec, capacity, target, steps)
        self.program = made.program
        arenas, image = fill_arenas(made.program, made.load, tensors(spec))
        self.kernel = CpuKernel(made.program, arenas, image, cache=settings().kernels, **options)
        self.inputs = self._ports(Direction.INPUT)
        self.outputs = self._ports(Direction.OUTPUT)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kernel.close()

    def join(self, *slots: int) -> None:
        for slot in slots:
            self.kernel.reset(slot)
            set_bit(self.kernel.control.active, slot, True)

    def leave(self, *slots: int) -> None:
        for slot in slots:
            set_bit(self.kernel.control.active, slot, False)

    def beat(self, given: Mapping[int, Array]) -> dict[int, dict[str, Array]]:
        """One beat; inputs by slot, of the one input port, [steps * size]; outputs by slot and port."""
        ((_, views),) = self.inputs.items()
        for slot, values in given.items():
            for view, row in zip(views, values.reshape(len(views), -1), strict=True):
                view[slot] = row
        self.kernel.beat()
        return {
            slot: {name: np.concatenate([v[slot] for v in views]) for name, views in self.outputs.items()}
            for slot in given
        }

    def state(self, slot: int) -> bytes:
        slab = self.program.arenas[Arena.STATE] // self.program.slots
        return self.kernel.arenas[Arena.STATE][slot * slab : (slot + 1) * slab].tobytes()

    def _ports(self, direction: Direction) -> dict[str, list[Array]]:
        return {name: [self._view(i) for i in indices] for name, indices in self.program.named_ports(direction).items()}

    def _view(self, index: int) -> Array:
        value = self.program.values[index]
        offset, stride, size = (int(value[key]) for key in ("offset", "stride", "size"))
        rows = self.kernel.arenas[Arena.IO][offset : offset + stride * self.program.slots].reshape(-1, stride)
        return rows[:, :size].view(np.float32)


def waves_of(program: Program) -> int:
    """Waves in which more than one block has work."""
    tasks = program.tasks
    return sum(len(set(tasks["block"][tasks["wave"] == w].tolist())) > 1 for w in range(program.waves))
