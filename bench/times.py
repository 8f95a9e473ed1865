"""What a list of durations comes to: the figures that every record of a measurement has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}


def figures(durations_ms: Sequence[float]) -> dict[str, Any]:
    """p50, p99, p99.9 and max of durations in ms, and which of them (from 0) was the max; at least one is needed."""
    times = np.asarray(durations_ms, np.float64)
    found = np.percentile(times, list(PERCENTILES.values()))
    shown: dict[str, Any] = {name: float(value) for name, value in zip(PERCENTILES, found, strict=True)}
    return shown | {"max": float(times.max()), "max_beat": int(times.argmax())}
