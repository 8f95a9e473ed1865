"""Models loaded into either kernel from the same program bytes, and sessions that come and go: what GPU tests drive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.kernel.machine import model as small_model
from wpk.kernel.control import set_bit
from wpk.ops import LIBRARY
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry.load import open_weights
from wpk.registry.loading import fill_arenas
from wpk.registry.models import catalog, find_model
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import DTYPES, Direction, Program
from wpk.scheduler.target import TARGETS
from wpk.zoo.build import build_graph
from wpk.zoo.sources import SyntheticSource
from wpk.zoo.spec import ModelSpec

# Models in bf16 have tests of their own, with the tolerances of bf16: test_streamed.py.
MODELS = sorted(name for name in catalog().builtin() if find_model(name).precision.policy == "f32")
SLOTS = 8
Outputs = dict[str, np.ndarray]
Change = Callable[[Program], Program]


@functools.cache
def spec_of(name: str) -> ModelSpec:
    """The model; with made-up weights where its own are not on this machine and can't be fetched."""
    spec = small_model() if name == "small" else find_model(name)
    if not WeightsStore(settings()).present(spec.weights):
        spec = spec.model_copy(update={"weights": SyntheticSource(synthetic=1)})
    return spec


@functools.cache
def compiled(name: str, capacity: int = SLOTS) -> Compiled:
    spec = spec_of(name)
    library = Selection(spec.operators, LIBRARY)
    steps = spec.clock.steps_per_beat
    return compile_graph(build_graph(spec), library, TARGETS["h200"], capacity=capacity, steps=steps)


def load(kind: type[Any], name: str, change: Change = lambda p: p, capacity: int = SLOTS, **options: Any) -> Any:
    made = compiled(name, capacity)
    arenas, image = fill_arenas(made.program, made.load, open_weights(spec_of(name), None, settings()))
    return kind(change(made.program), arenas, image, cache=settings().kernels, **options)


def ports(kernel: Any, direction: Direction) -> dict[str, list[np.ndarray]]:
    """Arrays [slots, values] of each step of each port, in the arena that the host sees."""
    program, memory = kernel.program, kernel.arenas[Arena.IO]
    found: dict[str, list[np.ndarray]] = {}
    for name, indices in program.named_ports(direction).items():
        for index in indices:
            value = program.values[index]
            offset, stride, size = (int(value[key]) for key in ("offset", "stride", "size"))
            rows = memory[offset : offset + stride * program.slots].reshape(program.slots, stride)
            found.setdefault(name, []).append(rows[:, :size].view(DTYPES[value["dtype"]].numpy))
    return found


def join(kernel: Any, *slots: int) -> None:
    for slot in slots:
        kernel.reset(slot)
        set_bit(kernel.control.active, slot, True)


def leave(kernel: Any, *slots: int) -> None:
    for slot in slots:
        set_bit(kernel.control.active, slot, False)


def sound(beat: int, size: int, who: int) -> np.ndarray:
    """Speech-like: harmonics that come and go, and noise; of session `who`."""
    t = beat * size + np.arange(size)
    loud = 0.5 * (1 + np.sin(2 * np.pi * t / 9000 + who))
    voice = sum(np.sin(2 * np.pi * t * (110 + 17 * who) * h / 16000) / h for h in range(1, 12))
    noise = np.random.default_rng([who, beat]).standard_normal(size)
    return (0.1 * loud * voice + 0.01 * noise).astype(np.float32)


def step(kernel: Any, beat: int, who: dict[int, int]) -> dict[int, Outputs]:
    """One beat; who: slot -> session. Outputs by slot and port."""
    for views in ports(kernel, Direction.INPUT).values():
        size = views[0].shape[1]
        for number, view in enumerate(views):
            for slot, session in who.items():
                view[slot] = sound(beat * len(views) + number, size, session)
    kernel.beat()
    made = ports(kernel, Direction.OUTPUT)
    return {slot: {port: np.concatenate([v[slot] for v in vs]) for port, vs in made.items()} for slot in who}


def history(kernel: Any, beats: int = 40) -> tuple[list[dict[int, Outputs]], bytes]:
    """Sessions that come and go: outputs of every beat by slot, and the state of those that are there at the end."""
    who: dict[int, int] = {}
    made = []
    for beat in range(beats):
        if beat % 6 == 0:
            slot = (beat // 6 * 3 + 1) % SLOTS
            who[slot] = beat + 1
            join(kernel, slot)
        if beat % 13 == 12:
            gone = sorted(who)[0]
            del who[gone]
            leave(kernel, gone)
        made.append(step(kernel, beat, who))
    return made, state(kernel)[sorted(who)].tobytes()


def state(kernel: Any) -> np.ndarray:
    """The state of every slot, [slots, bytes]."""
    memory = kernel.read(Arena.STATE) if hasattr(kernel, "read") else kernel.arenas[Arena.STATE]
    return np.array(memory[: kernel.program.arenas[Arena.STATE]].reshape(kernel.program.slots, -1))
