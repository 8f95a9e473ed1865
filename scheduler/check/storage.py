"""Checks of where the values lie: inside their arenas, apart from other slots and from what lives beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from wpk.ops.payload import Arena
from wpk.scheduler.check.facts import Facts
from wpk.scheduler.program import ALIGN, ARENA_OF, DTYPES, NONE, Role


def bounds(facts: Facts) -> Iterator[str]:
    """Values are inside their arenas and on cache lines; state is inside the slab of its session."""
    p = facts.program
    state = p.values["stride"][p.values["role"] == Role.STATE]
    if len(np.unique(state)) > 1:
        yield f"states have different strides: {sorted(set(state.tolist()))}; wanted one slab a session"
    for i, row in enumerate(p.values):
        arena, role = int(row["arena"]), Role(int(row["role"]))
        offset, size, stride = int(row["offset"]), int(row["size"]), int(row["stride"])
        if arena != ARENA_OF[role]:
            yield f"{facts.value(i)}: a {role.name.lower()} in arena {arena}, wanted {ARENA_OF[role].name.lower()}"
            continue
        if offset % ALIGN or stride % ALIGN or size % DTYPES[row["dtype"]].bytes:
            yield f"{facts.value(i)}: offset {offset}, stride {stride}, size {size} are not aligned"
        if offset + (p.slots - 1) * stride + size > p.arenas[arena]:
            yield (
                f"{facts.value(i)}: slot {p.slots - 1} ends at byte {offset + (p.slots - 1) * stride + size} "
                f"of {p.arenas[arena]} in {ARENA_OF[role].name.lower()}"
            )
        if role is Role.STATE and offset + size > stride:
            yield f"{facts.value(i)}: bytes {offset}:{offset + size} leave the session's slab of {stride}"


def isolation(facts: Facts) -> Iterator[str]:
    """A slot's bytes of a value are no other slot's, and a task of a slot stays within them."""
    values, slots = facts.program.values, facts.program.slots
    weight = values["role"] == Role.WEIGHT
    for i in np.flatnonzero(weight & (values["stride"] != 0)):
        yield f"{facts.value(i)}: a weight has stride {values['stride'][i]}"
    for i in np.flatnonzero(~weight & (values["stride"] < values["size"])):
        yield f"{facts.value(i)}: slots are {values['stride'][i]} bytes apart and {values['size'][i]} long"
    rows = facts.accesses
    at = np.minimum(rows["value"], len(values) - 1)
    offset, size = values["offset"].astype(np.int64)[at], values["size"].astype(np.int64)[at]
    bad = (rows["offset"] < offset) | (rows["offset"] + rows["length"] > offset + size)
    bad |= (rows["stride"] != values["stride"].astype(np.int64)[at]) | (rows["arena"] != values["arena"][at])
    bad |= ~weight[at] & (rows["stride"] < rows["length"]) & (slots > 1)
    for row in rows[bad]:
        lo, slot = row["offset"], slots - 1
        yield (
            f"{facts.phase(row['payload'])}: operand {row['operand']}: slot {slot} touches bytes "
            f"{lo + slot * row['stride']}:{lo + slot * row['stride'] + row['length']} outside of its own"
        )


def aliasing(facts: Facts) -> Iterator[str]:
    """No two values that are live in one wave have a byte in common.

    An arena is laid out session by session (one stride, which all values of a session fit into) or value by value
    (each value's slots in one stretch of its own); either way one sweep over one axis of bytes decides.
    """
    p = facts.program
    for arena in Arena:
        index = np.flatnonzero(p.values["arena"] == arena)
        rows = p.values[index]
        lo, hi = rows["offset"].astype(np.int64), (rows["offset"] + rows["size"]).astype(np.int64)
        stride = rows["stride"].astype(np.int64)
        if len(rows) and not (len(np.unique(stride)) == 1 and (hi <= stride).all()):
            hi = hi + (p.slots - 1) * stride
        temporary = rows["role"] == Role.TEMPORARY
        first = np.where(temporary, rows["first"], 0).astype(np.int64)
        last = np.where(temporary, rows["last"], NONE).astype(np.int64)
        for a, b, at in _overlaps(lo, hi, first, last):
            yield (
                f"{facts.value(index[a])} and {facts.value(index[b])} are both live in wave {first[b]} "
                f"at byte {at} of {arena.name.lower()}"
            )


def _overlaps(
    lo: NDArray[np.int64], hi: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """(earlier, later, byte) of ranges that overlap in bytes and in waves."""
    edges = np.unique(np.r_[lo, hi])
    until, owner = np.full(len(edges), -1, np.int64), np.zeros(len(edges), np.int64)
    left, right = np.searchsorted(edges, lo), np.searchsorted(edges, hi)
    for i in np.argsort(first, kind="stable"):
        cells = slice(left[i], right[i])
        taken = np.flatnonzero(until[cells] >= first[i])
        if len(taken):
            yield int(owner[cells][taken[0]]), int(i), int(edges[cells][taken[0]])
        until[cells], owner[cells] = last[i], i
