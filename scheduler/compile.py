"""The compiler: one step's graph in, a checked program out. Each pass is in a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wpk.ir.check import check_graph
from wpk.ir.errors import CapacityError
from wpk.ir.graph import Graph, Library
from wpk.scheduler.check import verify_program
from wpk.scheduler.cost import Floor, floor
from wpk.scheduler.emit import emit
from wpk.scheduler.fuse import fuse
from wpk.scheduler.memory import plan
from wpk.scheduler.merge import merge
from wpk.scheduler.ownership import own_rows
from wpk.scheduler.phases import Lowered, lower
from wpk.scheduler.place import place, predicted_seconds
from wpk.scheduler.program import Program
from wpk.scheduler.rewrite import expand, unroll
from wpk.scheduler.target import Target
from wpk.scheduler.tensor_cores import use_tensor_cores
from wpk.scheduler.waves import assign_waves, use_slack

MAX_CAPACITY = 1 << 16


@dataclass(frozen=True)
class Compiled:
    """A program, the graph that makes its weights at load, and what the cost model says of it."""

    program: Program
    load: Graph
    floor: Floor
    predicted_ms: float


Show = Callable[[str, object], None]


def _quiet(name: str, result: object) -> None:
    """Nobody looks at the passes."""


def lower_beat(
    graph: Graph,
    library: Library,
    target: Target,
    steps: int = 1,
    show: Show = _quiet,
    capacity: int | None = None,
) -> Lowered:
    """The passes before waves: one step's graph to the phases of a beat.

    capacity: sessions, by which attention and products are cut for the target's blocks, and which count where steps are
    merged; None leaves attention as it expands, and merges what one session would. It does not decide which weights
    there are.
    """
    check_graph(graph, library)
    expanded = expand(graph, library)
    show("expand", expanded)
    fused = fuse(expanded, library)
    show("fuse", fused)
    owned = own_rows(fused, library, target, capacity)
    show("own_rows", owned)
    beat = unroll(owned, library, steps)
    show("unroll", beat)
    if steps > 1:
        beat = merge(beat, library, target, capacity)
        show("merge", beat)
    if target.kind == "cuda":
        beat = use_tensor_cores(beat, library, target, capacity)
        show("tensor_cores", beat)
    lowered = lower(beat)
    show("lower", lowered)
    return lowered


def compile_graph(
    graph: Graph,
    library: Library,
    target: Target,
    *,
    capacity: int,
    steps: int = 1,
    show: Show = _quiet,
) -> Compiled:
    """Compile one step's graph for `capacity` sessions and `steps` steps a beat.

    show(pass name, result) is called after each pass. The emitted bytes are checked; a program that fails is an
    error of the compiler and is not returned.
    """
    if not 1 <= capacity <= MAX_CAPACITY:
        raise CapacityError(
            f"capacity {capacity} cannot be had", capacity=capacity, wanted=f"1 to {MAX_CAPACITY}", found=capacity
        )
    lowered = lower_beat(graph, library, target, steps, show, capacity)
    waves = use_slack(lowered, assign_waves(lowered.phases), capacity, target)
    show("waves", waves)
    layout = plan(lowered, waves, capacity)
    show("memory", layout)
    tasks = place(lowered, waves, capacity, target)
    show("place", tasks)
    program = emit(lowered, layout, tasks, capacity, target.blocks, steps)
    show("emit", program)
    verify_program(program.to_bytes())
    least = floor(lowered.phases, lowered.storages, capacity, program.waves, target)
    return Compiled(program, lowered.load, least, 1e3 * predicted_seconds(lowered, tasks, capacity, target))
