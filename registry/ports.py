"""Ports of a program as arrays over the arena of inputs and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.scheduler.program import DTYPES, Direction, Program

Array = NDArray[Any]


class Views(list[Array]):
    """One port: an array [slots, size] for each step of the beat."""

    size: int  # values of one step
    dtype: np.dtype[Any]

    @property
    def kinds(self) -> str:
        """NumPy's kinds of numbers that may be given: whole ones where the port's are."""
        return "biu" if self.dtype.kind == "i" else "f"


def port_views(program: Program, memory: Array, direction: Direction) -> dict[str, Views]:
    """Port name -> its arrays. memory: the arena of inputs and outputs, bytes."""
    found: dict[str, Views] = {}
    for name, indices in program.named_ports(direction).items():
        views = Views()
        for index in indices:
            value = program.values[index]
            dtype = DTYPES[value["dtype"]].numpy
            start, stride, size = int(value["offset"]), int(value["stride"]), int(value["size"])
            rows = memory[start : start + stride * program.slots].reshape(program.slots, stride)
            views.append(rows[:, :size].view(dtype))
        views.size, views.dtype = size // dtype.itemsize, dtype
        found[name] = views
    return found
