"""What a phase costs on a target, and the floor of a beat: the least time that physics allows.

    floor = max(compute, bandwidth, path)

compute: FLOPs over the dense rate of their precision, summed. bandwidth: bytes of weights and state that cross the
memory's pins, over its rate; activations are left out, since they can stay on the chip. Weights count once for the
cohort, state for each session: once read and once written, of a cache the rows that are read and the row that is
written, of a gathered table the rows alone. What a later step of the beat touches again is on the chip still, unless
more than `ON_CHIP_BYTES` of other weights and state passed in between: a large model reads in every step the weights of
what is not merged into one product of all steps (`merge`).

path: what no schedule can avoid, the longer of two. One is the longest chain of phases that depend on each other, each
taking max(compute, traffic) on the whole machine. The other is a grid barrier a wave. They are not added up: the next
phase's weights may be fetched while a barrier opens.

Beside the floor stands the finer sum over all phases of max(compute, traffic): the floor of an engine that runs one
phase after the other; and the time of all traffic if every activation, too, went through memory and back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from wpk.ir.types import DType
from wpk.scheduler.phases import Phase, Storage
from wpk.scheduler.program import Role
from wpk.scheduler.target import Target

ON_CHIP_BYTES = 128 << 20  # more than the caches, shared memories and registers of any target hold together
Span = tuple[int, int]


class Floor(BaseModel):
    """Times in ms, traffic in bytes a beat, FLOPs a beat by precision.

    chain_ms and barriers_ms: the two parts of the path. per_operation_ms: the sum over phases. unfused_ms: all bytes,
    those of activations (activation_bytes) included, over the memory's rate.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compute_ms: float
    bandwidth_ms: float
    path_ms: float
    floor_ms: float
    chain_ms: float = 0.0
    barriers_ms: float = 0.0
    per_operation_ms: float = 0.0
    unfused_ms: float = 0.0
    activation_bytes: int = 0
    bytes: dict[str, int]
    flops: dict[str, int]


class Share(BaseModel):
    """What all phases of one operator have in the floor: the sum of their max(compute, traffic), bytes and FLOPs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str
    phases: int
    ms: float
    bytes: dict[str, int]
    flops: dict[str, int]


def phase_seconds(phase: Phase, slots: int, target: Target) -> float:
    """Time of one phase on one block that has the whole machine's share of a single block.

    A phase that touches a few words of state waits for each session's in turn, which no bandwidth shortens.
    """
    cost = phase.operator.cost(*phase.types)
    traffic = cost.weight_bytes + slots * (cost.state_bytes + cost.activation_bytes + cost.gathered_bytes)
    touches = slots * target.state_touch_s if phase.touches_state else 0.0
    return max(_compute_seconds(phase, slots, target), traffic / target.bandwidth) * target.blocks + touches


def is_compute_bound(phase: Phase, slots: int, target: Target) -> bool:
    """Whether a phase computes for longer than its weights take to be read."""
    return _compute_seconds(phase, slots, target) > phase.operator.cost(*phase.types).weight_bytes / target.bandwidth


def floor(phases: Sequence[Phase], storages: Sequence[Storage], slots: int, waves: int, target: Target) -> Floor:
    """The floor of one beat of this program's operations on that target."""
    moved = traffic(phases, storages, slots)
    seconds = _seconds(phases, moved, slots, target)
    flops, bytes_moved = _flops(phases, slots), _bytes(moved)
    compute = sum(n / target.flops[precision] for precision, n in flops.items())
    bandwidth = bytes_moved["total"] / target.bandwidth
    handed = slots * sum(phase.operator.cost(*phase.types).activation_bytes for phase in phases)
    chain, barriers = _longest_chain(phases, seconds), waves * target.barrier_s
    path = max(chain, barriers)
    return Floor(
        compute_ms=compute * 1e3, bandwidth_ms=bandwidth * 1e3, path_ms=path * 1e3,
        floor_ms=max(compute, bandwidth, path) * 1e3,
        chain_ms=chain * 1e3, barriers_ms=barriers * 1e3, per_operation_ms=sum(seconds) * 1e3,
        unfused_ms=1e3 * (bytes_moved["total"] + handed) / target.bandwidth,
        activation_bytes=handed, bytes=bytes_moved, flops=flops,
    )  # fmt: skip


def shares(phases: Sequence[Phase], storages: Sequence[Storage], slots: int, target: Target) -> list[Share]:
    """The floor's finer sum by operator, the longest first."""
    moved = traffic(phases, storages, slots)
    seconds = _seconds(phases, moved, slots, target)
    members: dict[str, list[int]] = {}
    for index, phase in enumerate(phases):
        members.setdefault(phase.operator.name, []).append(index)
    found = [
        Share(
            operator=name, phases=len(own), ms=1e3 * sum(seconds[i] for i in own),
            bytes=_bytes([moved[i] for i in own]), flops=_flops([phases[i] for i in own], slots),
        )
        for name, own in members.items()
    ]  # fmt: skip
    return sorted(found, key=lambda share: (-share.ms, share.operator))


def traffic(phases: Sequence[Phase], storages: Sequence[Storage], slots: int) -> list[Counter[Role]]:
    """For each phase, in the program's order, the bytes of weights and of state that it moves."""
    chip = _Chip(ON_CHIP_BYTES)
    found = []
    for phase in phases:
        cost = phase.operator.cost(*phase.types)
        roles = {ref.storage: storages[ref.storage].role for ref in (*phase.inputs, *phase.outputs)}
        # A state that a result shares with an operand (a cache, a recurrence): the operator says what it touches.
        shared = {
            phase.inputs[i].storage: phase.types[i].bytes
            for i in phase.operator.alias.values()
            if roles[phase.inputs[i].storage] is Role.STATE
        }
        whole = cost.state_bytes >= 2 * sum(shared.values())
        moved: Counter[Role] = Counter()
        if shared and not whole:
            moved[Role.STATE] += slots * cost.state_bytes
        results = phase.operator.infer(phase.types)
        looks_up = cost.weight_bytes == 0 and any(t.dtype is DType.I32 for t in phase.types)
        for ref, type in zip(phase.inputs, phase.types, strict=True):
            span = (ref.start, ref.start + type.bytes)
            if roles[ref.storage] is Role.WEIGHT:
                rows = slots * (cost.gathered_bytes or type.dtype.bytes * sum(t.size for t in results))
                if looks_up and rows < type.bytes:
                    moved[Role.WEIGHT] += rows
                else:
                    moved[Role.WEIGHT] += chip.read(ref.storage, span, 1)
            elif roles[ref.storage] is Role.STATE and (whole or ref.storage not in shared):
                moved[Role.STATE] += chip.read(ref.storage, span, slots)
        for ref, type in zip(phase.outputs, results, strict=True):
            if roles[ref.storage] is Role.STATE and (whole or ref.storage not in shared):
                moved[Role.STATE] += chip.write(ref.storage, (ref.start, ref.start + type.bytes), slots)
        chip.settle()
        found.append(moved)
    return found


class _Chip:
    """Which bytes of weights and state a chip of limited size still holds: what was touched last stays."""

    def __init__(self, size: int) -> None:
        self._size, self._held = size, 0
        self._present: dict[int, list[Span]] = {}  # storage -> spans of one session, the latest storage last
        self._dirty: dict[int, list[Span]] = {}
        self._copies: dict[int, int] = {}  # storage -> sessions

    def read(self, storage: int, span: Span, copies: int) -> int:
        """Bytes that a read of a span fetches, for so many sessions."""
        spans = self._present.pop(storage, [])
        missing = copies * _missing(spans, span)
        self._present[storage], self._copies[storage] = _joined(spans, span), copies
        self._held += missing
        return missing

    def write(self, storage: int, span: Span, copies: int) -> int:
        """Bytes that will be written back because of a write of a span."""
        dirty = self._dirty.get(storage, [])
        new = copies * _missing(dirty, span)
        self.read(storage, span, copies)
        self._dirty[storage] = _joined(dirty, span)
        return new

    def settle(self) -> None:
        """After a phase: forget what was touched longest ago until the rest fits."""
        while self._held > self._size:
            oldest = next(iter(self._present))
            self._held -= self._copies[oldest] * sum(hi - lo for lo, hi in self._present.pop(oldest))
            self._dirty.pop(oldest, None)


def _missing(spans: Sequence[Span], span: Span) -> int:
    """Bytes of a span that these, which do not overlap, leave uncovered."""
    lo, hi = span
    return hi - lo - sum(max(0, min(hi, b) - max(lo, a)) for a, b in spans)


def _joined(spans: Sequence[Span], span: Span) -> list[Span]:
    """Spans that do not overlap and cover the same bytes as these and one more."""
    lo, hi = span
    apart = [(a, b) for a, b in spans if b < lo or a > hi]
    touching = [s for s in spans if s not in apart]
    return [*apart, (min([lo, *(a for a, _ in touching)]), max([hi, *(b for _, b in touching)]))]


def _seconds(
    phases: Sequence[Phase], moved: Sequence[Counter[Role]], slots: int, target: Target
) -> list[float]:  # fmt: skip
    """max(compute, traffic) of each phase on the whole machine."""
    return [
        max(_compute_seconds(phase, slots, target), each.total() / target.bandwidth)
        for phase, each in zip(phases, moved, strict=True)
    ]


def _bytes(moved: Sequence[Counter[Role]]) -> dict[str, int]:
    weights, state = (sum(each[role] for each in moved) for role in (Role.WEIGHT, Role.STATE))
    return {"weights": weights, "state": state, "total": weights + state}


def _flops(phases: Sequence[Phase], slots: int) -> dict[str, int]:
    costs = [phase.operator.cost(*phase.types).flops for phase in phases]
    return {p: slots * sum(flops.get(p, 0) for flops in costs) for p in ("bf16", "tf32", "f32")}


def _compute_seconds(phase: Phase, slots: int, target: Target) -> float:
    flops: Mapping[str, int] = phase.operator.cost(*phase.types).flops
    return sum(slots * n / target.flops[precision] for precision, n in flops.items())


def _longest_chain(phases: Sequence[Phase], seconds: Sequence[float]) -> float:
    """The longest sum of seconds along phases that must follow each other."""
    ends: list[float] = []
    for phase, own in zip(phases, seconds, strict=True):
        ends.append(own + max((ends[i] for i in phase.after), default=0.0))
    return max(ends, default=0.0)
