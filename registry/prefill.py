"""Steps that a model's components have behind them when a session joins: a prompt, a voice.

They run once, when a profile is loaded, on the kernel that is to serve it, as a program of one slot. What they leave
in the states of its components goes into the initial image, which joining copies into a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import CompileError, WeightsError
from wpk.ir.graph import Graph
from wpk.kernel.control import ControlPage, set_bit
from wpk.ops import LIBRARY
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry.formats import TensorSet
from wpk.registry.ports import port_views
from wpk.scheduler.compile import compile_graph
from wpk.scheduler.program import Direction, Program, Role
from wpk.scheduler.target import Target
from wpk.zoo.build import build_prefill
from wpk.zoo.prefill import PrefillInput
from wpk.zoo.spec import ModelSpec

Bytes = NDArray[np.uint8]


class Kernel(Protocol):
    """What runs a program: `wpk.kernel.cpu.CpuKernel` or `wpk.kernel.cuda.CudaKernel`."""

    @property
    def program(self) -> Program: ...
    @property
    def control(self) -> ControlPage: ...
    @property
    def arenas(self) -> Any: ...
    def reset(self, slot: int) -> None: ...
    def beat(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class PrefillProgram:
    """One prefill of a model, compiled for one slot."""

    name: str
    program: Program
    load: Graph


def prefill_programs(
    spec: ModelSpec, context: int, target: Target, operators: Sequence[str]
) -> Iterator[PrefillProgram]:
    """Every prefill of a model, for the context and target of its profile.

    operators: the profile's. A prefill that has no others gets their opcodes, so that one kernel's code runs both.
    """
    library = Selection(spec.operators, LIBRARY)
    for name in spec.prefill:
        graph = build_prefill(spec, name, context=context)
        made = compile_graph(graph, library, target, capacity=1)
        shared = set(made.program.operators) <= set(operators)
        program = made.program.with_operators(operators) if shared else made.program
        yield PrefillProgram(name, program, made.load)


def run_prefills(
    spec: ModelSpec, context: int, target: Target, operators: Sequence[str], tensors: TensorSet,
    start: Callable[[Program, Graph], Kernel],
) -> dict[str, Bytes]:  # fmt: skip
    """State -> its bytes in one slot, after the prefill of its component. start: a kernel for a program."""
    found: dict[str, Bytes] = {}
    for one in prefill_programs(spec, context, target, operators):
        prefill = spec.prefill[one.name]
        rows = {name: _rows(given, prefill.steps, tensors) for name, given in prefill.inputs.items()}
        kernel = start(one.program, one.load)
        try:
            left = _left_behind(kernel, rows, prefill.steps)
            own = {part.name for part in spec.components}
            found |= {name: data for name, data in left.items() if name.partition(".")[0] in own}
        finally:
            kernel.close()
    return found


def put_states(program: Program, image: Bytes, states: dict[str, Bytes]) -> None:
    """Write states into the initial image of a program's slot, by their names."""
    sizes = {name: (int(v["offset"]), int(v["size"])) for name, v in _states(program)}
    for name, data in states.items():
        offset, size = sizes.get(name, (0, 0))
        if size != data.size:
            raise CompileError(f"state {name!r} is another one in the prefill", wanted=size, found=data.size)
        image[offset : offset + size] = data


def _left_behind(kernel: Kernel, rows: dict[str, NDArray[Any]], steps: int) -> dict[str, Bytes]:
    """Run the steps in slot 0; its states after them."""
    inputs = port_views(kernel.program, kernel.arenas[Arena.IO], Direction.INPUT)
    kernel.reset(0)
    set_bit(kernel.control.active, 0, True)
    for step in range(steps):
        for name, (view,) in inputs.items():
            view[0] = rows[name][step]
        kernel.beat()
    memory = kernel.arenas[Arena.STATE]
    places = {name: (int(v["offset"]), int(v["size"])) for name, v in _states(kernel.program)}
    return {name: np.array(memory[offset : offset + size]) for name, (offset, size) in places.items()}


def _states(program: Program) -> Iterator[tuple[str, Any]]:
    for name, value in zip(program.value_names, program.values, strict=True):
        if value["role"] == Role.STATE:
            yield name, value


def _rows(given: PrefillInput, steps: int, tensors: TensorSet) -> NDArray[Any]:
    """An input's rows, [steps, values of a row]."""
    if not given.tensor:
        return np.array(given.values).reshape(steps, -1).astype(given.type.dtype.numpy)
    values = np.asarray(tensors.read(given.tensor))
    rows = values.reshape(steps, -1).astype(given.type.dtype.numpy)
    sound = np.isfinite(rows).all() if given.type.dtype.is_float else (rows == values.reshape(steps, -1)).all()
    if not sound:
        raise WeightsError(
            f"tensor {given.tensor!r} does not hold {given.type.dtype.value}", wanted="finite numbers of that type",
            found="NaN, infinity, fractions or more than it holds", hint="The file is damaged, or of another model.",
        )  # fmt: skip
    return rows
