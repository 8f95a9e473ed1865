"""What a list of durations comes to: the figures that every record of a measurement has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}


def figures(durations_ms: Sequence[float] | NDArray[np.float64]) -> dict[str, Any]:
    """Percentiles and max of durations in ms, which of them (from 0) was the max, and jitter: p99 - p50.

    At least one is needed.
    """
    times = np.asarray(durations_ms, np.float64)
    found = np.percentile(times, list(PERCENTILES.values()))
    shown: dict[str, Any] = {name: float(value) for name, value in zip(PERCENTILES, found, strict=True)}
    longest = {"max": float(times.max()), "max_beat": int(times.argmax())}
    return shown | longest | {"jitter": shown["p99"] - shown["p50"]}
