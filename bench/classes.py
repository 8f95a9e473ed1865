"""A beat by operator: what each has in the floor, and on a GPU what it took.

A trace tells when each block began and ended its part of a wave. A wave lasts until the next one begins, so the wait
at the barrier is in it. Where phases of several operators share a wave, its time is shared as the time that their
tasks keep blocks busy; tasks of one block in one wave, which no moments tell apart, count alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.bench.floor import beat_shares
from wpk.kernel.layout import DONE, STARTED
from wpk.scheduler.program import Program


def times_by_class(program: Program, moments: NDArray[np.int64]) -> dict[str, float]:
    """Operator -> ms of a traced beat; they add up to the time from the first wave's begin to the last one's end.

    moments: [waves, blocks, STAMPS], ns, as `Cohort.trace` gives them. Empty where a wave was not run.
    """
    begun = np.where(moments[:, :, STARTED] > 0, moments[:, :, STARTED], np.iinfo(np.int64).max).min(axis=1)
    spans = np.diff(begun, append=moments[-1, :, DONE].max())
    if (spans < 0).any() or moments[:, :, STARTED].max() <= 0:
        return {}
    names = [name.partition("@")[0] for name in program.operators]
    wave, block = program.tasks["wave"].astype(int), program.tasks["block"].astype(int)
    tasks = np.zeros(moments.shape[:2])
    np.add.at(tasks, (wave, block), 1)
    worked = np.maximum(moments[:, :, DONE] - moments[:, :, STARTED], 1)
    busy = np.zeros((program.waves, len(names)))
    np.add.at(
        busy, (wave, program.payloads["opcode"][program.tasks["payload"]]), (worked / np.maximum(tasks, 1))[wave, block]
    )
    shared = (busy / np.maximum(busy.sum(axis=1, keepdims=True), 1e-9) * spans[:, None]).sum(axis=0) / 1e6
    found: dict[str, float] = {}
    for name, ms in zip(names, shared.tolist(), strict=True):
        found[name] = found.get(name, 0.0) + ms
    return found


def by_class(
    model: str, *, capacity: int, history: int, target: str, measured: Sequence[Mapping[str, float]] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """For every operator its phases, bytes and floor, and where beats were traced the median of its times and the gap.

    history: rows that caches hold. The floors add up to `per_operation_ms`, not to `floor_ms`, which is lower where
    arithmetic of one phase may hide traffic of another.
    """
    rows: list[dict[str, Any]] = []
    for share in beat_shares(model, capacity=capacity, context=history, target=target):
        row = {"operator": share.operator, "phases": share.phases, "floor_ms": share.ms, "bytes": share.bytes["total"]}
        if measured:
            took = float(np.median([times.get(share.operator, 0.0) for times in measured]))
            row |= {"measured_ms": took, "gap_ms": took - share.ms}
        rows.append(row)
    return sorted(rows, key=lambda row: -row.get("measured_ms", row["floor_ms"]))
