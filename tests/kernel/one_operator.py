"""Programs of one operator on either kernel: what the tests of GPU bodies drive."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernel.gpu import ports
from wpk.ir.graph import GraphBuilder
from wpk.ir.types import DType, Type
from wpk.kernel.arenas import HostArenas
from wpk.kernel.control import set_bit
from wpk.kernel.cubin import build_cubin
from wpk.ops import LIBRARY
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry.formats.tensors import TensorInfo, TensorSet
from wpk.registry.loading import fill
from wpk.registry.settings import settings
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import Direction, Role
from wpk.scheduler.target import TARGETS

Array = npt.NDArray[Any]
UNTOUCHED = 123.0  # what outputs hold before a beat

# The target as it is, and one that cuts every phase into as many tasks as there are blocks.
TARGET = TARGETS["h200"]
FINE = TARGET.model_copy(update={"name": "fine", "least_task_s": 1e-15})


@dataclass(frozen=True)
class Case:
    """One operator. kinds: of each operand, "input", "weight" or "state". attrs: pairs. least, highest: of integers.

    carried: the first operand is a state that the result replaces; else states stay as they are.
    """

    operator: str
    types: tuple[Type, ...]
    kinds: tuple[str, ...]
    slots: int
    attrs: tuple[tuple[str, Any], ...] = ()
    highest: int = 3
    least: int = 0
    fine: bool = False
    carried: bool = False


def case(
    operator: str, *operands: tuple[str, Type], slots: int = 5, least: int = 0, highest: int = 3,
    carried: bool = False, **attrs: Any,
) -> Case:  # fmt: skip
    """operands: (kind, type)."""
    kinds, types = zip(*operands, strict=True)
    return Case(operator, types, kinds, slots, tuple(sorted(attrs.items())), highest, least, carried=carried)


class Numbers(TensorSet):
    """Given tensors."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self.tensors = {name: TensorInfo(a.shape, str(a.dtype)) for name, a in arrays.items()}

    def _load(self, name: str) -> Array:
        return self.arrays[name]


@functools.cache
def compiled(one: Case) -> Compiled:
    library = Selection({}, LIBRARY)
    g = GraphBuilder(one.operator, library)
    operands = []
    for i, (kind, type) in enumerate(zip(one.kinds, one.types, strict=True)):
        name = f"x{i}"
        operands.append({"input": g.input, "weight": g.weight, "state": g.register}[kind](name, type))
        if kind == "state" and not (one.carried and i == 0):
            g.update(name, operands[-1])
    made = g.op(one.operator, *operands, **dict(one.attrs))
    if one.carried:
        g.update("x0", made)
    else:
        for i, result in enumerate(made if isinstance(made, tuple) else (made,)):
            g.output(f"y{i}", result)
    return compile_graph(g.build(), library, FINE if one.fine else TARGET, capacity=one.slots)


def numbers(one: Case, operand: int, key: Sequence[int]) -> Array:
    """Numbers for an operand by a key: normal, or integers between the case's."""
    type = one.types[operand]
    rng = np.random.default_rng(list(key))
    if type.dtype is DType.F32:
        return rng.standard_normal(type.shape, dtype=np.float32)
    return rng.integers(one.least, one.highest + 1, type.shape).astype(np.int32)


def start(
    kernel: type[Any], one: Case, who: Mapping[int, int], table: Sequence[str] = (), **options: Any
) -> Any:  # fmt: skip
    """A kernel with sessions `who` (slot -> session) whose states are in place.

    table: operators of the machine code, so that many cases share one; a GPU's kernel is built for the case's own
    where there is none.
    """
    made = compiled(one)
    program = made.program
    weights = {f"x{i}": numbers(one, i, (7, i)) for i, kind in enumerate(one.kinds) if kind == "weight"}
    arenas = HostArenas(program)
    image = fill(program, made.load, Numbers(weights), arenas)
    slab = program.arenas[Arena.STATE] // program.slots
    for index, value in enumerate(program.values):
        if Role(int(value["role"])) is Role.STATE:
            operand = int(program.value_names[index][1:])
            for slot, session in who.items():
                data = numbers(one, operand, (session, operand)).reshape(-1).view(np.uint8)
                arenas.write(Arena.STATE, int(value["offset"]) + slot * slab, data)
    if kernel.__name__ == "CudaKernel":
        program = program.with_operators(table) if table else program
        options["cubin"] = build_cubin(program.operators, settings().kernels, program.slots)
    running = kernel(program, list(arenas), image, cache=settings().kernels, **options)
    for slot in who:
        set_bit(running.control.active, slot, True)
    return running


def beat(kernel: Any, one: Case, who: Mapping[int, int], number: int = 0) -> dict[int, list[Array]]:
    """One beat: the outputs of each slot. Slots without a session are given NaN; a GPU leaves them alone."""
    for name, views in ports(kernel, Direction.INPUT).items():
        operand = int(name[1:])
        for slot in range(one.slots):
            session = who.get(slot)
            if session is None:
                views[0][slot] = np.nan if views[0].dtype == np.float32 else -1
            else:
                views[0][slot] = numbers(one, operand, (session, operand, number)).reshape(-1)
    outputs = {name: views[0] for name, views in sorted(ports(kernel, Direction.OUTPUT).items())}
    for view in outputs.values():
        view[:] = UNTOUCHED
    kernel.beat()
    for slot in set(range(one.slots)) - set(who) if hasattr(kernel, "read") else ():
        assert all((view[slot] == UNTOUCHED).all() for view in outputs.values())
    found = {slot: [view[slot].copy() for view in outputs.values()] for slot in who}
    if one.carried:
        memory = kernel.read(Arena.STATE) if hasattr(kernel, "read") else kernel.arenas[Arena.STATE]
        rows = memory[: kernel.program.arenas[Arena.STATE]].reshape(one.slots, -1)
        for slot in who:
            found[slot].append(rows[slot].copy())
    return found


def results(
    kind: type[Any], one: Case, who: Mapping[int, int], beats: int = 1, table: Sequence[str] = ()
) -> list[dict[int, list[Array]]]:  # fmt: skip
    kernel = start(kind, one, who, table)
    try:
        return [beat(kernel, one, who, number) for number in range(beats)]
    finally:
        kernel.close()


def apart(found: Array, wanted: Array) -> float:
    """The largest difference of two rows of numbers, of the root mean square of the second.

    Infinite where integers or rows with an infinity differ at all.
    """
    if wanted.dtype.kind != "f" or np.isinf(wanted).any():
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    size = float(np.sqrt((wanted.astype(np.float64) ** 2).mean())) or 1.0
    error = np.abs(found.astype(np.float64) - wanted)
    return float("inf") if np.isnan(error).any() else float(error.max()) / size
