"""Sessions that start in mid-conversation: a beat costs more the longer its history is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import UsageError
from wpk.ir.graph import POSITION
from wpk.scheduler.program import Program, Role


def start_at(program: Program, image: NDArray[Any], position: int) -> None:
    """Let sessions start with `position` steps behind them, beside those of a prefill, in one slot's initial image.

    What those steps would have left in other state is not there: caches hold zeros and recurrences their initial
    values. So a beat moves the bytes that it would move then, and its outputs mean nothing. UsageError where the
    program counts no steps.
    """
    roles = program.values["role"]
    named = (i for i, name in enumerate(program.value_names) if name.rpartition(".")[2] == POSITION)
    found = [i for i in named if roles[i] == Role.STATE]
    if not found:
        raise UsageError(
            "this model's beat does not depend on how long a session has lasted", wanted="a state 'position'",
            found="none", hint="Leave --at out.",
        )  # fmt: skip
    for index in found:
        offset = int(program.values[index]["offset"])
        place = image[offset : offset + 4]
        place[:] = np.frombuffer(np.int32(place.view(np.int32)[0] + position).tobytes(), np.uint8)
