"""From a profile and its weights to arenas: the load graph evaluated, results in the places the program names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import WeightsError
from wpk.ir.graph import Graph, Port
from wpk.kernel.control import aligned_bytes
from wpk.ops.evaluate import evaluate, stored
from wpk.ops.operator import Array
from wpk.ops.payload import Arena
from wpk.registry.formats import TensorSet
from wpk.scheduler.program import Program, Role

Bytes = NDArray[np.uint8]


def fill_arenas(program: Program, load: Graph, tensors: TensorSet) -> tuple[list[Bytes], Bytes]:
    """The arenas with weights in place, and the initial image of one slot's state."""
    arenas = [aligned_bytes(program.arenas[arena]) for arena in Arena]
    made = {port.name: (port.value.type, array) for port, array in _evaluate(load, tensors)}
    for index, value in enumerate(program.values):
        if value["role"] == Role.WEIGHT:
            name = f"value:{index}"
            if name not in made:
                raise WeightsError(f"{program.value_names[index]} is not made by the load graph", wanted=name)
            type, array = made[name]
            _put(arenas[Arena.WEIGHTS], int(value["offset"]), stored(array, type.dtype))
    image = np.zeros(program.arenas[Arena.STATE] // program.slots, np.uint8)
    for index, value in enumerate(program.values):
        initial = made.get(f"initial:{program.value_names[index]}")
        if value["role"] == Role.STATE and initial is not None:
            _put(image, int(value["offset"]), stored(initial[1], initial[0].dtype))
    return arenas, image


def _put(memory: Bytes, offset: int, array: Array) -> None:
    data = np.frombuffer(array.tobytes(), np.uint8)
    memory[offset : offset + data.size] = data


def _evaluate(load: Graph, tensors: TensorSet) -> list[tuple[Port, Array]]:
    leaves: Mapping[int, Array] = {p.value.id: _read(tensors, p.name, p.value.type.shape) for p in load.weights}
    values = evaluate(load.nodes, dict(leaves))
    return [(port, values[port.value.id]) for port in load.outputs]


def _read(tensors: TensorSet, name: str, shape: tuple[int, ...]) -> Array:
    array = tensors.read(name)
    if array.shape != shape:
        raise WeightsError(f"tensor {name!r} has the wrong shape", wanted=shape, found=array.shape)
    return np.asarray(array, np.float64)
