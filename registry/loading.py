"""From a profile and its weights to arenas: the load graph evaluated, results in the places the program names.

Numbers of type bf16 are their bits (uint16) all the way: operators that only move numbers move these, and nothing of
that type is ever as large as float64. On a GPU, matrices that are nothing but numbers of the checkpoint in another
order are not evaluated: `Packer` streams them, or makes synthetic ones, where they belong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import WeightsError
from wpk.ir.graph import Graph, Node, Port, Value
from wpk.ir.types import DType
from wpk.kernel.arenas import DeviceArenas, HostArenas
from wpk.kernel.packing import Packer, Synthetic, Target
from wpk.ops.evaluate import bf16_bits, evaluate, stored
from wpk.ops.operator import LIBRARY, Array
from wpk.ops.payload import Arena
from wpk.registry.formats import TensorSet
from wpk.registry.formats.tensors import bfloat16_to_float32
from wpk.registry.weights.synthetic import SyntheticSet
from wpk.scheduler.program import Program, Role

Bytes = NDArray[np.uint8]
LEAST_STREAMED = 1 << 16  # numbers; smaller weights are evaluated
PIECE = 1 << 20  # numbers that are looked at or converted at a time


def fill_arenas(program: Program, load: Graph, tensors: TensorSet) -> tuple[HostArenas, Bytes]:
    """Arenas in host memory with weights in place, and the initial image of one slot's state."""
    arenas = HostArenas(program)
    return arenas, fill(program, load, tensors, arenas)


def fill(
    program: Program, load: Graph, tensors: TensorSet, arenas: HostArenas | DeviceArenas,
    packer: Callable[[int], Packer] | None = None,
) -> Bytes:  # fmt: skip
    """Put weights into zeroed arenas; returns the initial image of one slot's state.

    packer: makes what streams weights to a GPU, for that many tensors; without one, all is evaluated here. Tensors are
    read when they are needed and dropped after their last use.
    """
    image = np.zeros(program.arenas[Arena.STATE] // program.slots, np.uint8)
    roles = [Role(int(v["role"])) for v in program.values]
    weights = {f"value:{i}": i for i, role in enumerate(roles) if role is Role.WEIGHT}
    states = {f"initial:{program.value_names[i]}": i for i, role in enumerate(roles) if role is Role.STATE}
    ports = [port for port in load.outputs if port.name in weights or port.name in states]
    _require_all(program, weights, ports)
    if packer is not None and isinstance(arenas, DeviceArenas):
        streams = {p.name: s for p in ports if p.name in weights if (s := _stream(load, p.value)) is not None}
        if streams:
            base = arenas.addresses[Arena.WEIGHTS]
            places = {name: base + int(program.values[weights[name]]["offset"]) for name in streams}
            _pack(load, tensors, streams, places, packer)
            ports = [port for port in ports if port.name not in streams]
    for port, array in _made(load, tensors, ports):
        bits = array if port.value.type.dtype is DType.BF16 else stored(array, port.value.type.dtype)
        data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        index = weights.get(port.name, states.get(port.name, -1))
        offset = int(program.values[index]["offset"])
        if port.name in weights:
            arenas.write(Arena.WEIGHTS, offset, data)
        else:
            image[offset : offset + data.size] = data
    return image


def _require_all(program: Program, weights: Mapping[str, int], ports: list[Port]) -> None:
    lacking = weights.keys() - {port.name for port in ports}
    if lacking:
        names = ", ".join(sorted(program.value_names[weights[n]] for n in lacking))
        raise WeightsError(f"the load graph does not make {names}", wanted=", ".join(sorted(lacking)), found="nothing")


# --- evaluated ----------------------------------------------------------------------------------------------------
def _made(load: Graph, tensors: TensorSet, ports: list[Port]) -> Iterator[tuple[Port, Array]]:
    """These outputs of the load graph, each as soon as it is there."""
    leaves = {port.value.id: port for port in load.weights}
    outputs: dict[int, list[Port]] = {}
    for port in ports:
        outputs.setdefault(port.value.id, []).append(port)
    nodes = _needed(load, set(outputs))
    uses = Counter(v.id for node in nodes for v in node.inputs)
    values: dict[int, Array] = {}
    for node in nodes:
        for value in node.inputs:
            if value.id not in values:
                values[value.id] = _read(tensors, leaves[value.id])
        _evaluate(node, values)
        for value in node.outputs:
            for port in outputs.get(value.id, ()):
                yield port, values[value.id]
        uses.subtract(v.id for v in node.inputs)
        for value in (*node.inputs, *node.outputs):
            if uses[value.id] == 0:
                values.pop(value.id, None)
    for id, wanted in outputs.items():
        if id in leaves:
            array = _read(tensors, leaves[id])
            yield from ((port, array) for port in wanted)


def _needed(load: Graph, wanted: set[int]) -> list[Node]:
    """The nodes that these values depend on, in order."""
    found: list[Node] = []
    for node in reversed(load.nodes):
        if any(v.id in wanted for v in node.outputs):
            found.append(node)
            wanted |= {v.id for v in node.inputs}
    return found[::-1]


def _evaluate(node: Node, values: dict[int, Array]) -> None:
    """Add a node's results: bits where they are bf16, else as `evaluate` makes them."""
    if node.op == "cast" and {node.inputs[0].type.dtype, node.outputs[0].type.dtype} == {DType.F32, DType.BF16}:
        array = values[node.inputs[0].id]  # without a detour over float64
        to_bits = node.outputs[0].type.dtype is DType.BF16
        values[node.outputs[0].id] = _bits(array) if to_bits else bfloat16_to_float32(array)
        return
    own, moves = {v.id: values[v.id] for v in node.inputs}, LIBRARY.get(node.op, node.version).layout_only
    if not moves:
        own |= {v.id: bfloat16_to_float32(own[v.id]) for v in node.inputs if v.type.dtype is DType.BF16}
    evaluate([node], own)
    for value in node.outputs:
        array = own[value.id]
        if value.type.dtype is DType.BF16:
            array = array.astype(np.uint16, copy=False) if moves else _bits(array)
        values[value.id] = array


def _read(tensors: TensorSet, port: Port) -> Array:
    """A tensor as the graph declares it: bits where it is bf16. Refused where it is misshapen or not finite."""
    array, is_bits = _source(tensors, port)
    _require_finite(port.name, array, is_bits)
    if port.value.type.dtype is DType.BF16:
        return array if is_bits else _bits(array)
    if is_bits:
        return bfloat16_to_float32(array)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _source(tensors: TensorSet, port: Port) -> tuple[Array, bool]:
    """A tensor as it is stored, and whether it is the bits of bf16."""
    is_bits = isinstance(tensors, TensorSet) and port.name in tensors and tensors.tensors[port.name].dtype == "bfloat16"
    array, shape = tensors.read_raw(port.name) if is_bits else tensors.read(port.name), port.value.type.shape
    if array.shape != shape:
        raise WeightsError(f"tensor {port.name!r} has the wrong shape", wanted=shape, found=array.shape)
    return array, is_bits


def _bits(array: Array) -> NDArray[np.uint16]:
    """`bf16_bits` of any array with little memory beside it."""
    flat, made = np.ascontiguousarray(array).reshape(-1), np.empty(array.size, np.uint16)
    for start in range(0, flat.size, PIECE):
        made[start : start + PIECE] = bf16_bits(flat[start : start + PIECE])
    return made.reshape(array.shape)


def _require_finite(name: str, array: Array, is_bits: bool) -> None:
    if is_bits:
        sound = all((piece & 0x7F80 != 0x7F80).all() for piece in _pieces(array))
    else:
        with np.errstate(over="ignore"):
            floats = array.dtype.kind == "f"
            sound = not floats or all(np.isfinite(p.astype(np.float32, copy=False)).all() for p in _pieces(array))
    if not sound:
        raise _not_finite(name)


def _pieces(array: Array) -> Iterator[Array]:
    """All numbers, some at a time, in the order in which they are in memory."""
    flat = array.ravel(order="K")
    return (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))


def _not_finite(name: str) -> WeightsError:
    return WeightsError(
        f"tensor {name!r} is not finite", wanted="numbers that float32 holds", found="NaN, infinity or more",
        hint="The file is damaged, or the training that made it went astray.",
    )  # fmt: skip


# --- streamed -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """Consecutive numbers of a checkpoint's tensor, [start, start + count), or of zeros where there is no tensor."""

    port: Port | None
    start: int
    count: int


@dataclass(frozen=True)
class Stream:
    """A weight that is numbers of the checkpoint, in row-major order of [n, k], to be stored row-major or in tiles."""

    runs: tuple[Run, ...]
    stored: str  # as `wpk.kernel.packing.STORED` calls it
    n: int
    k: int
    shares: int = 0
    splits: int = 1


def _stream(load: Graph, value: Value) -> Stream | None:
    """How a value can be streamed; None where it is small or takes more than moving numbers."""
    if value.type.size < LEAST_STREAMED or value.type.dtype not in (DType.BF16, DType.F32):
        return None
    producers, leaves = load.producers(), {port.value.id: port for port in load.weights}
    node = producers.get(value.id)
    bf16 = value.type.dtype is DType.BF16
    if node is not None and node.op in ("pack_tiles", "pack_tf32_tiles"):
        matrix, given = node.inputs[0], node.attributes
        runs = _runs(producers, leaves, matrix, bf16)
        n, k = matrix.type.shape
        shares, splits = (max(1, _whole(given.get(name, 1))) for name in ("shares", "splits"))
        return None if runs is None else Stream(runs, "bf16" if bf16 else "tf32", n, k, shares, splits)
    runs = _runs(producers, leaves, value, bf16)
    return None if runs is None else Stream(runs, value.type.dtype.value, 1, value.type.size)


def _runs(
    producers: Mapping[int, Node], leaves: Mapping[int, Port], value: Value, bf16: bool
) -> tuple[Run, ...] | None:  # fmt: skip
    """A value's numbers, in row-major order, as runs of tensors; None where it is anything else.

    bf16: they are rounded in the end, so that rounding on the way changes nothing.
    """
    if value.id in leaves:
        if value.type.dtype is not DType.F32 and not bf16:
            return None  # stored as f32, but rounded before
        return (Run(leaves[value.id], 0, value.type.size),)
    node = producers[value.id]
    if node.op not in _MOVES:
        return None
    given, first = node.attributes, node.inputs[0]
    parts = [runs for v in node.inputs if (runs := _runs(producers, leaves, v, bf16)) is not None]
    if len(parts) < len(node.inputs):
        return None
    rank, whole = len(first.type.shape), tuple(run for runs in parts for run in runs)
    row = first.type.size // first.type.shape[0] if rank and first.type.shape[0] else 1
    match node.op:
        case "reshape":
            return whole
        case "concat" if _whole(given["axis"]) in (0, -rank):
            return whole
        case "slice" if _whole(given["axis"]) in (0, -rank):
            return _cut(whole, row * _whole(given["start"]), row * _whole(given["stop"]))
        case "pad" if given["mode"] == "zeros":
            before, after = (Run(None, 0, row * _whole(given[name])) for name in ("before", "after"))
            return (before, *whole, after)
        case "cast" if bf16 and value.type.dtype is DType.BF16 and first.type.dtype is DType.F32:
            return whole
    return None


_MOVES = frozenset({"reshape", "concat", "slice", "pad", "cast"})


def _whole(value: Any) -> int:
    """An attribute that its operator declares as an int."""
    return int(value)


def _cut(runs: tuple[Run, ...], lo: int, hi: int) -> tuple[Run, ...]:
    """The numbers [lo, hi) of runs that follow each other."""
    found, at = [], 0
    for run in runs:
        first, last = max(lo - at, 0), min(hi - at, run.count)
        if first < last:
            found.append(Run(run.port, run.start + first, last - first))
        at += run.count
    return tuple(found)


def _pack(
    load: Graph, tensors: TensorSet, streams: Mapping[str, Stream], places: Mapping[str, int],
    packer: Callable[[int], Packer],
) -> None:  # fmt: skip
    """Stream values to their addresses; `WeightsError` names a tensor that is not finite."""
    names = sorted({run.port.name for stream in streams.values() for run in stream.runs if run.port is not None})
    marks = {name: mark for mark, name in enumerate(names)}
    work = packer(len(marks))
    try:
        for name, stream in streams.items():
            target = Target(places[name], stream.stored, stream.n, stream.k, stream.shares, stream.splits)
            at = 0
            for run in stream.runs:
                if run.port is not None:
                    source = _streamed_source(tensors, run.port)
                    work.pack(source, run.start, run.count, at, target, marks[run.port.name])
                at += run.count  # the arena is zeroed: zeros are there
        broken = work.broken()
    finally:
        work.close()
    if broken:
        raise _not_finite(names[broken[0]])


def _streamed_source(tensors: TensorSet, port: Port) -> Array | Synthetic:
    """What `Packer.pack` takes for a tensor."""
    if isinstance(tensors, SyntheticSet) and tensors.tensors[port.name].shape == port.value.type.shape:
        return Synthetic(*tensors.recipe(port.name))
    array, is_bits = _source(tensors, port)
    return array.astype(np.float32) if array.dtype == np.uint16 and not is_bits else array
