"""From a profile and its weights to arenas: the load graph evaluated, results in the places the program names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import CapacityError, WeightsError
from wpk.ir.graph import Graph, Port
from wpk.kernel.control import aligned_bytes
from wpk.ops.evaluate import evaluate, stored
from wpk.ops.operator import Array
from wpk.ops.payload import Arena
from wpk.registry.formats import TensorSet
from wpk.scheduler.program import Program, Role

Bytes = NDArray[np.uint8]


def fill_arenas(program: Program, load: Graph, tensors: TensorSet) -> tuple[list[Bytes], Bytes]:
    """The arenas with weights in place, and the initial image of one slot's state.

    Tensors are read when they are needed and dropped after their last use, so that the arena and a few tensors are
    all that memory must hold.
    """
    try:
        arenas = [aligned_bytes(program.arenas[arena]) for arena in Arena]
    except MemoryError:
        raise CapacityError(
            f"{program.slots} sessions do not fit into memory", capacity=program.slots,
            wanted=f"{sum(program.arenas) / 1e9:.1f} GB", found="an allocation that failed", hint="Lower --cap.",
        ) from None  # fmt: skip
    image = np.zeros(program.arenas[Arena.STATE] // program.slots, np.uint8)
    roles = [Role(int(v["role"])) for v in program.values]
    places = {f"value:{i}": (arenas[Arena.WEIGHTS], i) for i, role in enumerate(roles) if role is Role.WEIGHT}
    wanted = set(places)
    states = ((i, program.value_names[i]) for i, role in enumerate(roles) if role is Role.STATE)
    places |= {f"initial:{name}": (image, i) for i, name in states}
    for port, array in _made(load, tensors):
        if port.name in places:
            memory, index = places[port.name]
            data = stored(array, port.value.type.dtype).reshape(-1).view(np.uint8)
            offset = int(program.values[index]["offset"])
            memory[offset : offset + data.size] = data
            wanted.discard(port.name)
    if wanted:
        names = ", ".join(sorted(program.value_names[places[n][1]] for n in wanted))
        raise WeightsError(f"the load graph does not make {names}", wanted=", ".join(sorted(wanted)), found="nothing")
    return arenas, image


def _made(load: Graph, tensors: TensorSet) -> Iterator[tuple[Port, Array]]:
    """Every output of the load graph, as soon as it is there."""
    leaves = {port.value.id: port for port in load.weights}
    outputs: dict[int, list[Port]] = {}
    for port in load.outputs:
        outputs.setdefault(port.value.id, []).append(port)
    uses = Counter(v.id for node in load.nodes for v in node.inputs)
    values: dict[int, Array] = {}
    for node in load.nodes:
        for value in node.inputs:
            if value.id not in values:
                values[value.id] = _read(tensors, leaves[value.id])
        evaluate([node], values)
        for value in node.outputs:
            for port in outputs.get(value.id, ()):
                yield port, values[value.id]
        uses.subtract(v.id for v in node.inputs)
        for value in (*node.inputs, *node.outputs):
            if uses[value.id] == 0:
                values.pop(value.id, None)
    for id, ports in outputs.items():
        if id in leaves:
            array = _read(tensors, leaves[id])
            yield from ((port, array) for port in ports)


def _read(tensors: TensorSet, port: Port) -> Array:
    array, shape = tensors.read(port.name), port.value.type.shape
    if array.shape != shape:
        raise WeightsError(f"tensor {port.name!r} has the wrong shape", wanted=shape, found=array.shape)
    with np.errstate(over="ignore"):
        sound = array.dtype.kind != "f" or np.isfinite(array.astype(np.float32, copy=False)).all()
    if not sound:
        raise WeightsError(
            f"tensor {port.name!r} is not finite", wanted="numbers that float32 holds", found="NaN, infinity or more",
            hint="The file is damaged, or the training that made it went astray.",
        )  # fmt: skip
    return array
