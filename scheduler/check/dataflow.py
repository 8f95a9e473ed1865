"""Checks of when bytes are touched: written before they are read, in the payload table's order, by one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ops.payload import Arena
from wpk.scheduler.check.facts import ACCESS, ALIAS, LIMIT, Facts
from wpk.scheduler.program import NONE, Role

BEFORE = (Role.WEIGHT, Role.STATE, Role.INPUT)  # there before the beat
MOST_INTERVALS = 1 << 21  # that `hazards` sorts at once


def lifetimes(facts: Facts) -> Iterator[str]:
    """`first` is the wave of the first write, `last` that of the last use; NONE beyond the beat."""
    for i, row in enumerate(facts.program.values):
        role, rows = Role(int(row["role"])), facts.by_value.get(i)
        if rows is None and role in (Role.WEIGHT, Role.TEMPORARY):
            yield f"{facts.value(i)} is used by no phase"
            continue
        written = rows["wave"][rows["write"]] if rows is not None else np.zeros(0, np.int64)
        first = NONE if role in BEFORE or not len(written) else int(written.min())
        last = int(rows["wave"].max()) if rows is not None and role is Role.TEMPORARY else NONE
        if (row["first"], row["last"]) != (first, last):
            yield (
                f"{facts.value(i)} of role {role.name.lower()} is live in waves {_span(row['first'], row['last'])}, "
                f"its uses say {_span(first, last)}"
            )


def _span(first: int, last: int) -> str:
    return f"{'-' if first == NONE else first}..{'-' if last == NONE else last}"


def definition(facts: Facts) -> Iterator[str]:
    """Temporaries and outputs: written whole and once, read only what earlier waves wrote."""
    roles, sizes = facts.program.values["role"].tolist(), facts.program.values["size"].tolist()
    for i, (role, size) in enumerate(zip(roles, sizes, strict=True)):
        if role in BEFORE:
            continue
        rows = facts.by_value.get(i, np.zeros(0, ACCESS))
        columns = (rows[n].tolist() for n in ("wave", "write", "start", "length", "shared", "payload"))
        written: list[tuple[int, int]] = []  # by earlier waves; sorted, disjoint
        fresh: list[tuple[int, int]] = []  # by this wave
        now = -1
        for wave, write, lo, length, shared, payload in sorted(zip(*columns, strict=True)):
            if wave != now:
                written, fresh, now = _merged([*written, *fresh]), [], wave
            hole = _hole(written, lo, lo + length)
            if not write and hole is not None:
                yield f"{facts.phase(payload)} reads {facts.value(i)} bytes {hole}:{lo + length} before they are there"
            if write:
                fresh.append((lo, lo + length))
                if not shared and any(a < lo + length and lo < b for a, b in written):
                    yield f"{facts.phase(payload)} writes {facts.value(i)} a second time, not in place"
        hole = _hole(_merged([*written, *fresh]), 0, size)
        if hole is not None:
            yield f"{facts.value(i)}: bytes {hole}:{size} are never written"


def _merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(intervals):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _hole(merged: Sequence[tuple[int, int]], lo: int, hi: int) -> int | None:
    """The first byte of [lo, hi) that is in none of the intervals."""
    for a, b in merged:
        if a <= lo < b:
            return None if hi <= b else b
    return lo


def order(facts: Facts) -> Iterator[str]:
    """The waves keep the order of the payload table wherever two phases touch the same bytes and one writes."""
    for i, rows in facts.by_value.items():
        lo, hi = rows["start"], rows["start"] + rows["length"]
        for k in np.flatnonzero(rows["write"]):
            meet = (lo < hi[k]) & (lo[k] < hi) & (rows["payload"] != rows["payload"][k])
            sooner, later = rows["payload"] < rows["payload"][k], rows["payload"] > rows["payload"][k]
            wrong = meet & ((sooner & (rows["wave"] >= rows["wave"][k])) | (later & (rows["wave"] <= rows["wave"][k])))
            for other in np.flatnonzero(wrong):
                a, b = sorted((int(rows["payload"][k]), int(rows["payload"][other])))
                yield f"{facts.phase(b)} does not wait for {facts.phase(a)}: both touch {facts.value(i)}"


def hazards(facts: Facts) -> Iterator[str]:
    """Inside a wave no byte is written by one phase or slot and touched by another.

    Every slot's bytes of every operand, as the payloads have them, sorted on one axis of (wave, arena, byte). An
    operand that a result may overwrite in place is not counted: a part touches the same elements of both.
    """
    p, rows = facts.program, facts.accesses
    rows = rows[(rows["arena"] != Arena.WEIGHTS) & ~((rows["shared"] > 0) & ~rows["write"])]
    for row in facts.accesses[facts.accesses["write"] & (facts.accesses["arena"] == Arena.WEIGHTS)]:
        yield f"{facts.phase(row['payload'])} writes to the weights"
    if not len(rows):
        return
    rows = rows[np.argsort(rows["wave"], kind="stable")]
    chunk = np.arange(len(rows)) * p.slots // MOST_INTERVALS
    starts = np.flatnonzero(np.diff(rows["wave"], prepend=-1))  # chunks are cut between waves
    cuts = starts[np.flatnonzero(np.diff(chunk[starts]) > 0) + 1]
    for some in np.split(rows, cuts):
        yield from _meetings(facts, some)


def _meetings(facts: Facts, rows: NDArray[Any]) -> Iterator[str]:
    """Accesses of one wave that share a byte, one of them writing."""
    p = facts.program
    base = np.cumsum([0, *p.arenas])[rows["arena"]] + rows["offset"] + rows["wave"] * (LIMIT << 1)
    lo = (base[:, None] + rows["stride"][:, None] * np.arange(p.slots)).reshape(-1)
    row_of = np.repeat(np.arange(len(rows)), p.slots)
    rank = np.argsort(lo, kind="stable")
    lo, row_of = lo[rank], row_of[rank]
    hi, write = lo + rows["length"][row_of], rows["write"][row_of]
    touched = np.maximum.accumulate(hi)[:-1]
    written = np.maximum.accumulate(np.where(write, hi, -1))[:-1]
    clash = (written > lo[1:]) | (write[1:] & (touched > lo[1:]))
    for k in np.flatnonzero(clash) + 1:
        near = slice(max(0, k - 4096), k)
        other = np.flatnonzero((hi[near] > lo[k]) & (write[near] | write[k]))
        culprit = rows[row_of[near][other[0]]] if len(other) else rows[row_of[k]]
        a, slot, arena = rows[row_of[k]], int(rank[k] % p.slots), Arena(int(rows[row_of[k]]["arena"])).name.lower()
        at = a["offset"] + slot * a["stride"]
        yield (
            f"{facts.phase(a['payload'])} operand {a['operand']} slot {slot} and {facts.phase(culprit['payload'])} "
            f"operand {culprit['operand']} meet in bytes {at}:{at + a['length']} of {arena}"
        )


def state(facts: Facts) -> Iterator[str]:
    """A state is overwritten whole and once a beat, or updated in place by its operator at most once a step."""
    p = facts.program
    for i in np.flatnonzero(p.values["role"] == Role.STATE):
        rows = facts.by_value.get(int(i))
        writes = rows[rows["write"]] if rows is not None else np.zeros(0, ACCESS)
        if not len(writes):
            continue
        spans = sorted(zip(writes["start"].tolist(), (writes["start"] + writes["length"]).tolist(), strict=True))
        hole = _hole(_merged(spans), 0, int(p.values["size"][i]))
        if hole is not None:
            yield f"{facts.value(int(i))}: bytes {hole}:{p.values['size'][i]} keep the last beat's content"
        appended = writes["shared"] == ALIAS
        if appended.any() and (not appended.all() or len(writes) > p.steps):
            yield f"{facts.value(int(i))} is written {len(writes)} times in a beat of {p.steps} steps"
        if not appended.any() and any(a[1] > b[0] for a, b in pairwise(spans)):
            yield f"{facts.value(int(i))} is overwritten twice, last by {facts.phase(writes['payload'][-1])}"
