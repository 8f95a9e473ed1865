"""Arenas: an offset for every storage, temporaries sharing bytes when they are never live together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wpk.ops.payload import Arena
from wpk.scheduler.phases import Lowered, Phase
from wpk.scheduler.program import ALIGN, ARENA_OF, NONE, Role


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a storage lies: bytes; `first` and `last` are waves, NONE beyond the beat."""

    arena: Arena
    offset: int
    stride: int
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """Placement of every storage and the size of every arena, in the order of `Arena`."""

    placed: tuple[Placed, ...]
    arenas: tuple[int, int, int, int]


def align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def lifetimes(phases: Sequence[Phase], waves: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(first write, last use) of each storage in waves; NONE where it is never written or used."""
    first, last = [NONE] * count, [NONE] * count
    for phase, wave in zip(phases, waves, strict=True):
        for ref in phase.outputs:
            first[ref.storage] = min(first[ref.storage], wave)
        for ref in (*phase.inputs, *phase.outputs):
            last[ref.storage] = wave if last[ref.storage] == NONE else max(last[ref.storage], wave)
    return list(zip(first, last, strict=True))


def plan(lowered: Lowered, waves: Sequence[int], slots: int) -> Layout:
    """Weights dense; state slot by slot in slabs (a session is one contiguous image); the rest value by value."""
    life = lifetimes(lowered.phases, waves, len(lowered.storages))
    placed: dict[int, Placed] = {}
    ends = {arena: 0 for arena in Arena}
    state = [s for s in lowered.storages if s.role is Role.STATE]
    slab = sum(align(s.type.bytes) for s in state)
    # Small states first: those of all layers then share a few pages of a slab, which a GPU's address cache can hold.
    for storage in sorted(lowered.storages, key=lambda s: s.type.bytes if s.role is Role.STATE else 0):
        arena, size = ARENA_OF[storage.role], align(storage.type.bytes)
        if storage.role is Role.TEMPORARY:
            continue
        stride = {Role.WEIGHT: 0, Role.STATE: slab}.get(storage.role, size)
        written = life[storage.index][0] if storage.role is Role.OUTPUT else NONE
        placed[storage.index] = Placed(arena, ends[arena], stride, written, NONE)
        ends[arena] += size if storage.role in (Role.WEIGHT, Role.STATE) else size * slots
    ends[Arena.STATE] = slab * slots
    temporaries = [s for s in lowered.storages if s.role is Role.TEMPORARY and life[s.index][0] != NONE]
    blocks: list[tuple[int, int, int, int]] = []  # first, last, offset, end
    # Big ones first: small ones fit into the gaps between them.
    for storage in sorted(temporaries, key=lambda s: (-s.type.bytes, s.index)):
        (first, last), size = life[storage.index], align(storage.type.bytes)
        offset = _gap([b for b in blocks if b[0] <= last and first <= b[1]], size * slots)
        blocks.append((first, last, offset, offset + size * slots))
        placed[storage.index] = Placed(Arena.ACTIVATIONS, offset, size, first, last)
        ends[Arena.ACTIVATIONS] = max(ends[Arena.ACTIVATIONS], offset + size * slots)
    used = tuple(placed.get(s.index, Placed(ARENA_OF[s.role], 0, 0, NONE, NONE)) for s in lowered.storages)
    return Layout(used, tuple(ends[a] for a in Arena))  # type: ignore[arg-type]


def _gap(busy: Sequence[tuple[int, int, int, int]], size: int) -> int:
    """The lowest offset at which `size` bytes miss all busy ranges."""
    at = 0
    for _, _, start, end in sorted(busy, key=lambda b: b[2]):
        if start - at >= size:
            break
        at = max(at, end)
    return at
