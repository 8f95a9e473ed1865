"""What a phase costs on a target, and the floor of a beat: the least time that physics allows.

floor = max(compute, bandwidth, path). compute: FLOPs over the dense rate of their precision, summed. bandwidth:
weights once for the cohort, state once read and once written per session (a cache: all rows read, the new ones
written), over the memory rate. path: the waves' barriers, which no schedule of this program can avoid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from wpk.scheduler.phases import Phase, Storage
from wpk.scheduler.program import Role
from wpk.scheduler.target import Target


class Floor(BaseModel):
    """Times in ms, traffic in bytes a beat, FLOPs a beat by precision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute_ms: float
    bandwidth_ms: float
    path_ms: float
    floor_ms: float
    bytes: dict[str, int]
    flops: dict[str, int]


def phase_seconds(phase: Phase, slots: int, target: Target) -> float:
    """Time of one phase on one block that has the whole machine's share of a single block."""
    cost = phase.operator.cost(*phase.types)
    compute = sum(slots * n / target.flops[precision] for precision, n in cost.flops.items())
    traffic = cost.weight_bytes + slots * (cost.state_bytes + cost.activation_bytes)
    return max(compute, traffic / target.bandwidth) * target.blocks


def floor(phases: Sequence[Phase], storages: Sequence[Storage], slots: int, waves: int, target: Target) -> Floor:
    """The floor of one beat of this program's operations on that target."""
    flops: Counter[str] = Counter()
    for phase in phases:
        for precision, count in phase.operator.cost(*phase.types).flops.items():
            flops[precision] += slots * count
    weights = sum(s.type.bytes for s in storages if s.role is Role.WEIGHT)
    state = slots * _state_traffic(phases, storages)
    compute = sum(n / target.flops[precision] for precision, n in flops.items())
    bandwidth = (weights + state) / target.bandwidth
    path = waves * target.barrier_s
    return Floor(
        compute_ms=compute * 1e3, bandwidth_ms=bandwidth * 1e3, path_ms=path * 1e3,
        floor_ms=max(compute, bandwidth, path) * 1e3,
        bytes={"weights": weights, "state": state, "total": weights + state},
        flops={p: flops.get(p, 0) for p in ("bf16", "tf32", "f32")},
    )  # fmt: skip


def _state_traffic(phases: Sequence[Phase], storages: Sequence[Storage]) -> int:
    """Bytes of state that one session's beat reads and writes, each state at most once each way.

    Of a state that an operator shares with its result (a cache), that operator touches only what it says.
    """
    state = {s.index for s in storages if s.role is Role.STATE}
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    rows = 0
    for phase in phases:
        shared = {phase.inputs[operand].storage for operand in phase.operator.alias.values()} & state
        rows += phase.operator.cost(*phase.types).state_bytes if shared else 0
        results = zip(phase.outputs, phase.operator.infer(phase.types), strict=True)
        for touched, operands in ((read, zip(phase.inputs, phase.types, strict=True)), (written, results)):
            for ref, type in operands:
                if ref.storage in state - shared:
                    touched[ref.storage] = max(touched.get(ref.storage, 0), type.bytes)
    return rows + sum(read.values()) + sum(written.values())
