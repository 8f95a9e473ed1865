"""The whole conversation on a GPU: voicechat-tiny's program, every state and output beside the CPU kernel's.

Run where there is an H200: pytest -m gpu tests/kernel/test_conversation.py -s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernel.gpu import compiled, join, load, ports, sound, state
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cubin import build_cubin
from wpk.kernel.cuda import CudaKernel
from wpk.registry.settings import settings
from wpk.scheduler.program import DTYPES, Direction, Program, Role

NAME, SLOTS, BEATS = "voicechat-tiny", 8, 8
WHO = {0: 1, 2: 5, SLOTS - 1: 9}  # slot -> session
# Roundings to bf16 that flip go through the layers after them, and what is added up differs in order: of the norm.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Beat:
    """What a beat left: by the name of a value, arrays [sessions, numbers] in the order of `who`."""

    states: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def bits(self) -> bytes:
        return b"".join(v.tobytes() for values in (self.states, self.outputs) for _, v in sorted(values.items()))


def played(kind: type[Any], who: dict[int, int], beats: int = BEATS) -> list[Beat]:
    options: dict[str, Any] = {}
    if kind is CudaKernel:
        options = {"cubin": build_cubin(compiled(NAME, SLOTS).program.operators, settings().kernels, SLOTS)}
    kernel = load(kind, NAME, capacity=SLOTS, **options)
    try:
        join(kernel, *who)
        return [_beat(kernel, number, who) for number in range(beats)]
    finally:
        kernel.close()


def _beat(kernel: Any, number: int, who: dict[int, int]) -> Beat:
    for views in ports(kernel, Direction.INPUT).values():
        for step, view in enumerate(views):
            for slot, session in who.items():
                spoken = view.dtype == np.float32
                view[slot] = sound(number * len(views) + step, view.shape[1], session) if spoken else session
    kernel.beat()
    slots = sorted(who)
    made = ports(kernel, Direction.OUTPUT)
    outputs = {f"{port}@{i}": view[slots].copy() for port, views in made.items() for i, view in enumerate(views)}
    return Beat(dict(_states(kernel.program, state(kernel)[slots])), outputs)


def _states(program: Program, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in zip(program.value_names, program.values, strict=True):
        if value["role"] == Role.STATE:
            offset, size = int(value["offset"]), int(value["size"])
            yield name, np.ascontiguousarray(rows[:, offset : offset + size]).view(DTYPES[value["dtype"]].numpy)


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative distance of a session's numbers; whole numbers are the same or not."""
    if found.dtype == np.int32:
        return 0.0 if np.array_equal(found, wanted) else np.inf
    a, b = ((x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x for x in (found, wanted))
    return float((np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-6)).max())


@pytest.mark.gpu
@pytest.mark.slow
def test_states_and_outputs_are_the_cpu_kernel_s_and_a_second_run_gives_the_same_bits() -> None:
    ours, again, theirs = played(CudaKernel, WHO), played(CudaKernel, WHO), played(CpuKernel, WHO)
    assert [beat.bits() for beat in ours] == [beat.bits() for beat in again]
    for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        far = {name: apart(mine.states[name], wanted.states[name]) for name in wanted.states}
        far |= {name: apart(mine.outputs[name], wanted.outputs[name]) for name in wanted.outputs}
        worst = sorted(far.items(), key=lambda item: -item[1])[:3]
        print(f"beat {number}: " + ", ".join(f"{name} {distance:.1e}" for name, distance in worst))
        assert worst[0][1] <= TOLERANCE, worst


@pytest.mark.gpu
@pytest.mark.slow
def test_a_session_has_the_same_bits_in_another_slot_without_company() -> None:
    among, alone = played(CudaKernel, WHO), played(CudaKernel, {5: WHO[2]})
    at = sorted(WHO).index(2)
    for mine, own in zip(among, alone, strict=True):
        for ours, theirs in ((mine.states, own.states), (mine.outputs, own.outputs)):
            assert all(ours[name][at].tobytes() == theirs[name][0].tobytes() for name in theirs)
