"""Broken programs: a valid one, damaged in one of many ways, each of which a checker must refuse.

`mutate(program, number)` is reproducible by number. A kind that the program has no place for gives way to the next.
Every kind breaks the program for certain: an edit that may leave a legal program (a phase moved within its slack, an
attribute that only changes the arithmetic, a shorter read that may be meant) is not made. Most kinds repair what a
naive checker would trip over (sort order, wave numbers, lifetimes, the payloads of a moved value), so that only the
damage itself is left to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wpk.ops.operator import LIBRARY, Operator
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK
from wpk.scheduler.program import DTYPES, HEADER, NONE, Program, Role

Rng = np.random.Generator
SECTIONS = ("payloads", "tasks", "values", "uses", "ports")


@dataclass(frozen=True)
class Mutant:
    """A broken program and how it came about."""

    kind: str
    number: int
    data: bytes


def mutate(program: Program, number: int) -> Mutant:
    """The broken program of this number; `number % len(KINDS)` is the kind that is tried first."""
    rng, original, names = np.random.default_rng(number), program.to_bytes(), list(KINDS)
    for k in range(len(names)):
        kind = names[(number + k) % len(names)]
        draft = Draft(program)
        data = KINDS[kind](draft, rng)
        if data is None:
            continue
        made = data if isinstance(data, bytes) else draft.bytes()
        if made != original:
            return Mutant(kind, number, made)
    raise AssertionError("a program without a place for any mutation")


class Draft:
    """A program with tables that can be written to."""

    def __init__(self, program: Program) -> None:
        for name in SECTIONS:
            setattr(self, name, getattr(program, name).copy())
        self.program = program
        self.payloads: Any
        self.tasks: Any
        self.values: Any
        self.uses: Any
        self.ports: Any
        self.changed: dict[str, Any] = {}
        named = (o.rpartition("@") for o in program.operators)
        self.classes = [LIBRARY.get(name, int(version)) for name, _, version in named]

    def bytes(self) -> bytes:
        return replace(self.program, **{n: getattr(self, n) for n in SECTIONS}, **self.changed).to_bytes()

    # --- reading ------------------------------------------------------------------------------------------------
    def cls(self, payload: int) -> type[Operator]:
        return self.classes[self.payloads["opcode"][payload]]

    def extents(self, payload: int) -> tuple[int, ...]:
        record = self.payloads[payload]
        return self.cls(payload).extents(tuple(record["parameter"].tolist()), int(record["operands"]))

    def writes(self, payload: int) -> tuple[int, ...]:
        return self.cls(payload).writes(int(self.payloads["operands"][payload]))

    def wave(self, payload: int) -> int:
        return int(self.tasks["wave"][self.tasks["payload"] == payload][0])

    def role(self, value: int) -> int:
        return int(self.values["role"][value])

    def operands(self, *, weights: bool = True) -> list[tuple[int, int]]:
        """(payload, operand) of all that are there."""
        found = [(int(p), int(j)) for p, j in np.argwhere(self.uses["value"] != NONE)]
        return found if weights else [(p, j) for p, j in found if self.role(self.uses["value"][p, j]) != Role.WEIGHT]

    def accesses(self) -> Iterator[tuple[int, int, int, int, int, bool]]:
        """payload, operand, value, first byte, end, whether it writes."""
        for p, uses in enumerate(self.uses.tolist()):
            extents, writes = self.extents(p), self.writes(p)
            for j, (v, start, *_) in enumerate(uses):
                if v != NONE:
                    yield p, j, v, start, start + extents[j], j in writes

    def conflicts(self, *, state: bool) -> list[tuple[int, int]]:
        """Phases p < q that touch the same bytes, one writing; of states alone, or of all others."""
        rows, found = list(self.accesses()), set()
        rows = [r for r in rows if (self.role(r[2]) == Role.STATE) == state]
        for p, _, v, lo, hi, writes in rows:
            for q, _, w, a, b, rewrites in rows:
                if p < q and v == w and lo < b and a < hi and (writes or rewrites):
                    found.add((p, q))
        return sorted(found)

    def live_together(self, a: int, b: int) -> bool:
        x, y = self.values[a], self.values[b]
        if x["arena"] != y["arena"]:
            return False
        if x["role"] != Role.TEMPORARY or y["role"] != Role.TEMPORARY:
            return True
        return bool(x["first"] <= y["last"] and y["first"] <= x["last"])

    # --- repairing ----------------------------------------------------------------------------------------------
    def sort(self) -> None:
        """Tasks in order, waves without gaps."""
        kept, self.tasks["wave"] = np.unique(self.tasks["wave"], return_inverse=True)
        self.changed["waves"] = len(kept)
        t = self.tasks
        self.tasks = t[np.lexsort((t["part_lo"], t["slot_lo"], t["payload"], t["block"], t["wave"]))]

    def relive(self) -> None:
        """Lifetimes as the uses have them."""
        first, last = [NONE] * len(self.values), [-1] * len(self.values)
        waves = dict(zip(self.tasks["payload"].tolist(), self.tasks["wave"].tolist(), strict=True))
        for p, _, v, _, _, writes in self.accesses():
            last[v] = max(last[v], waves[p])
            first[v] = min(first[v], waves[p]) if writes else first[v]
        for v in range(len(self.values)):
            if self.role(v) in (Role.TEMPORARY, Role.OUTPUT):
                self.values["first"][v] = first[v]
            if self.role(v) == Role.TEMPORARY and last[v] >= 0:
                self.values["last"][v] = last[v]

    def point(self, payload: int, operand: int, value: int, start: int) -> None:
        """Let an operand be `value` from `start` on, in the payload and in `uses`."""
        home = self.values[value]
        self.uses["value"][payload, operand], self.uses["start"][payload, operand] = value, start
        packed = (int(home["arena"]) << ARENA_SHIFT) | (int(home["offset"]) + start)
        self.payloads["reference"][payload, operand] = packed
        self.payloads["stride"][payload, operand] = int(home["stride"]) & 0xFFFFFFFF

    def follow(self, value: int) -> None:
        """Point every use of a value to where it lies now."""
        for p, j in np.argwhere(self.uses["value"] == value):
            self.point(p, j, value, int(self.uses["start"][p, j]))

    def schedule(self, payload: int, wave: int) -> None:
        self.tasks["wave"][self.tasks["payload"] == payload] = wave

    def settle(self) -> bool:
        self.relive()
        self.sort()
        self.relive()
        return True


Kind = Callable[[Draft, Rng], Any]  # None: no place for it here; bytes: the mutant itself; True: it is in the draft
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__] = function
    return function


def pick(rng: Rng, choices: Any) -> Any:
    choices = list(choices)
    return choices[int(rng.integers(len(choices)))] if choices else None


# --- the schedule -------------------------------------------------------------------------------------------------
def _swap(d: Draft, rng: Rng, state: bool) -> bool | None:
    pair = pick(rng, d.conflicts(state=state))
    if pair is None:
        return None
    waves = [d.wave(p) for p in pair]
    for payload, wave in zip(pair, reversed(waves), strict=True):
        d.schedule(payload, wave)
    return d.settle()


@kind
def phases_swapped(d: Draft, rng: Rng) -> bool | None:
    """Producer and consumer change places."""
    return _swap(d, rng, state=False)


@kind
def state_phases_swapped(d: Draft, rng: Rng) -> bool | None:
    """Who overwrites a state and who reads what it held change places."""
    return _swap(d, rng, state=True)


@kind
def phase_hastened(d: Draft, rng: Rng) -> bool | None:
    """A phase runs in the wave of one that it must wait for."""
    pair = pick(rng, d.conflicts(state=False) + d.conflicts(state=True))
    if pair is None:
        return None
    d.schedule(pair[1], d.wave(pair[0]))
    return d.settle()


@kind
def barrier_missing(d: Draft, rng: Rng) -> bool | None:
    """Two waves become one."""
    borders = [w for p, q in d.conflicts(state=False) if d.wave(q) == (w := d.wave(p)) + 1]
    border = pick(rng, sorted(set(borders)))
    if border is None:
        return None
    d.tasks["wave"][d.tasks["wave"] > border] -= 1
    return d.settle()


@kind
def phase_repeated(d: Draft, rng: Rng) -> bool:
    """A phase runs once more, in a wave of its own at the end."""
    states = [p for p, _, v, _, _, writes in d.accesses() if writes and d.role(v) == Role.STATE]
    p = pick(rng, states or range(len(d.payloads)))
    again = d.tasks[d.tasks["payload"] == p].copy()
    again["payload"], again["wave"] = len(d.payloads), d.program.waves
    d.payloads, d.uses = np.r_[d.payloads, d.payloads[p : p + 1]], np.r_[d.uses, d.uses[p : p + 1]]
    d.tasks = np.r_[d.tasks, again]
    d.changed["labels"] = (*d.program.labels, d.program.labels[p])
    return d.settle()


@kind
def payloads_exchanged(d: Draft, rng: Rng) -> bool | None:
    """Two dependent payloads change places in the table; tasks stay, so each runs at the other's time."""
    pairs = []
    made: dict[int, set[int]] = {}
    read: dict[int, set[int]] = {}
    for a, _, v, _, _, w in d.accesses():
        (made if w else read).setdefault(a, set()).add(v)
    for p, q in d.conflicts(state=False):
        if made[p] & read.get(q, set()) and d.payloads["parts"][p] == d.payloads["parts"][q]:
            pairs.append((p, q))
    pair = pick(rng, pairs)
    if pair is None:
        return None
    p, q = pair
    d.payloads[[p, q]], d.uses[[p, q]] = d.payloads[[q, p]], d.uses[[q, p]]
    return d.settle()


# --- tasks --------------------------------------------------------------------------------------------------------
@kind
def task_dropped(d: Draft, rng: Rng) -> bool:
    d.tasks = np.delete(d.tasks, int(rng.integers(len(d.tasks))))
    d.sort()
    return True


@kind
def task_duplicated(d: Draft, rng: Rng) -> bool:
    d.tasks = np.r_[d.tasks, d.tasks[(i := int(rng.integers(len(d.tasks)))) : i + 1]]
    d.tasks["block"][-1] = rng.integers(d.program.blocks)
    d.sort()
    return True


@kind
def task_grown(d: Draft, rng: Rng) -> bool:
    row, what = d.tasks[int(rng.integers(len(d.tasks)))], pick(rng, ("slot", "part"))
    if row[f"{what}_lo"] > 0 and rng.integers(2):
        row[f"{what}_lo"] -= 1
    else:
        row[f"{what}_hi"] += 1
    return True


@kind
def task_shrunk(d: Draft, rng: Rng) -> bool:
    row, what = d.tasks[int(rng.integers(len(d.tasks)))], pick(rng, ("slot", "part"))
    if rng.integers(2):
        row[f"{what}_lo"] += 1
    else:
        row[f"{what}_hi"] -= 1
    return True


@kind
def task_traded(d: Draft, rng: Rng) -> bool | None:
    """One task takes a slot or part from its neighbour on one side and leaves one out on the other."""
    rows = [r for r in d.tasks for w in ("slot", "part") if r[f"{w}_hi"] - r[f"{w}_lo"] > 0]
    row, what = pick(rng, rows), pick(rng, ("slot", "part"))
    row[f"{what}_lo"] += 1
    row[f"{what}_hi"] += 1
    return True


@kind
def task_strayed(d: Draft, rng: Rng) -> bool | None:
    """One of a phase's tasks runs in another wave."""
    payloads, counts = np.unique(d.tasks["payload"], return_counts=True)
    p = pick(rng, payloads[counts > 1])
    wave = None if p is None else pick(rng, [w for w in range(d.program.waves) if w != d.wave(p)])
    if wave is None:
        return None
    d.tasks["wave"][pick(rng, np.flatnonzero(d.tasks["payload"] == p))] = wave
    d.sort()
    return True


@kind
def task_of_no_block(d: Draft, rng: Rng) -> bool:
    d.tasks["block"][int(rng.integers(len(d.tasks)))] = d.program.blocks + rng.integers(3)
    d.sort()
    return True


@kind
def tasks_unsorted(d: Draft, rng: Rng) -> bool | None:
    keys = d.tasks["wave"].astype(np.int64) << 32 | d.tasks["block"]
    i = pick(rng, np.flatnonzero(np.diff(keys) > 0))
    if i is None:
        return None
    d.tasks[[i, i + 1]] = d.tasks[[i + 1, i]]
    return True


@kind
def parts_changed(d: Draft, rng: Rng) -> bool:
    """A phase claims one part more or fewer than its work has; its tasks agree."""
    p = int(rng.integers(len(d.payloads)))
    mine, parts = d.tasks["payload"] == p, int(d.payloads["parts"][p])
    last = mine & (d.tasks["part_hi"] == parts)
    fewer = bool((d.tasks["part_lo"][last] < parts - 1).all()) and bool(rng.integers(2))
    d.tasks["part_hi"][last] = d.payloads["parts"][p] = parts + (-1 if fewer else 1)
    return True


# --- operands -----------------------------------------------------------------------------------------------------
@kind
def operand_shifted(d: Draft, rng: Rng) -> bool:
    """The payload points elsewhere than `uses` says."""
    p, j = pick(rng, d.operands())
    shift = int(pick(rng, (4, 64, -4, -64, 4096)))
    here = int(d.payloads["reference"][p, j]) & OFFSET_MASK
    d.payloads["reference"][p, j] += np.uint64(abs(shift) if here + shift < 0 or shift > 0 else 0)
    d.payloads["reference"][p, j] -= np.uint64(0 if here + shift < 0 or shift > 0 else -shift)
    return True


@kind
def operand_slid(d: Draft, rng: Rng) -> bool | None:
    """An operand starts later, in `uses` too: what it writes leaves a hole, what it reads runs past the end."""
    places = [(p, j, v, lo, hi) for p, j, v, lo, hi, _ in d.accesses() if hi == d.values["size"][v]]
    found = pick(rng, places)
    if found is None:
        return None
    p, j, v, lo, _ = found
    d.point(p, j, v, lo + int(pick(rng, (4, 16, 64))))
    return True


@kind
def operand_of_next_slot(d: Draft, rng: Rng) -> bool | None:
    """A task reads or writes what belongs to the next session, in `uses` too."""
    found = pick(rng, d.operands(weights=False))
    if found is None or d.program.slots == 1:
        return None
    p, j = found
    v = int(d.uses["value"][p, j])
    d.point(p, j, v, int(d.uses["start"][p, j]) + int(d.values["stride"][v]))
    return True


@kind
def operand_absent(d: Draft, rng: Rng) -> bool:
    """What an operator cannot do without is left out, in `uses` too."""
    places = []
    for p in range(len(d.payloads)):
        required = sum(not (o.optional or o.variadic) for o in d.cls(p).operands)
        places += [(p, j) for j in (*range(required), *d.writes(p))]
    p, j = pick(rng, places)
    d.payloads["reference"][p, j], d.payloads["stride"][p, j] = ABSENT, 0
    d.uses[p, j] = 0
    d.uses["value"][p, j] = NONE
    return True


@kind
def operand_half_absent(d: Draft, rng: Rng) -> bool:
    """An operand is in one of payload and `uses` only."""
    p, j = pick(rng, d.operands())
    if rng.integers(2):
        d.payloads["reference"][p, j] = ABSENT
    else:
        d.uses["value"][p, j] = NONE
    return True


@kind
def operand_unborn(d: Draft, rng: Rng) -> bool | None:
    """A phase reads a value that is written in its own wave or later."""
    places = []
    for p, j, v, lo, hi, writes in d.accesses():
        if writes or d.role(v) == Role.WEIGHT:
            continue
        for w in range(len(d.values)):
            row = d.values[w]
            later = d.role(w) in (Role.TEMPORARY, Role.OUTPUT) and row["first"] >= d.wave(p)
            if w != v and later and row["size"] >= hi - lo and row["dtype"] == d.values["dtype"][v]:
                places.append((p, j, w))
    found = pick(rng, places)
    if found is None:
        return None
    d.point(*found, 0)
    d.relive()
    return True


@kind
def operand_dead(d: Draft, rng: Rng) -> bool | None:
    """`uses` names a value that had the same bytes at another time."""
    places = []
    for p, j, v, _, hi, _ in d.accesses():
        for w in range(len(d.values)):
            a, b = d.values[v], d.values[w]
            same = all(a[n] == b[n] for n in ("arena", "offset", "stride", "dtype")) and d.role(v) == Role.TEMPORARY
            if w != v and same and hi <= b["size"]:
                places.append((p, j, w))
    found = pick(rng, places)
    if found is None:
        return None
    p, j, w = found
    d.uses["value"][p, j] = w
    d.relive()
    return True


@kind
def use_of_nothing(d: Draft, rng: Rng) -> bool:
    p, j = pick(rng, d.operands())
    d.uses["value"][p, j] = len(d.values) + rng.integers(5)
    return True


@kind
def result_on_leaf(d: Draft, rng: Rng) -> bool | None:
    """A phase writes to a weight or an input."""
    places = []
    for p, j, v, lo, hi, writes in d.accesses():
        leaves = [w for w in range(len(d.values)) if d.role(w) in (Role.WEIGHT, Role.INPUT)]
        if writes:
            places += [(p, j, w) for w in leaves if w != v and d.values["size"][w] >= hi - lo]
    found = pick(rng, places)
    if found is None:
        return None
    d.point(*found, 0)
    d.relive()
    return True


@kind
def result_unaliased(d: Draft, rng: Rng) -> bool | None:
    """A row goes into storage other than the cache that the operator says it is part of."""
    places = []
    for p, j, v, lo, hi, writes in d.accesses():
        if writes and d.cls(p).alias:
            others = [w for w in range(len(d.values)) if d.role(w) > Role.INPUT]
            places += [(p, j, w) for w in others if w != v and d.values["size"][w] >= hi - lo]
    found = pick(rng, places)
    if found is None:
        return None
    d.point(*found, 0)
    d.relive()
    return True


@kind
def payload_stride(d: Draft, rng: Rng) -> bool | None:
    """Slots are elsewhere than the value has them."""
    found = pick(rng, d.operands(weights=False))
    if found is None or d.program.slots == 1:
        return None
    stride = int(d.payloads["stride"][found])
    d.payloads["stride"][found] = pick(rng, (0, stride // 2, max(0, stride - 4), stride + 64, 2 * stride))
    return True


@kind
def payload_arena(d: Draft, rng: Rng) -> bool:
    found = pick(rng, d.operands())
    old = int(d.payloads["reference"][found])
    arena = pick(rng, [a for a in (0, 1, 2, 3, 4, 0x7F) if a != old >> ARENA_SHIFT])
    d.payloads["reference"][found] = (old & OFFSET_MASK) | (arena << ARENA_SHIFT)
    return True


@kind
def shape_parameter(d: Draft, rng: Rng) -> bool | None:
    """A size is off. Only where that shows in what is written or in a weight, or runs past an operand's end."""
    places = [(p, k, e) for p in range(len(d.payloads)) for k in range(9) for e in (1, -1, 16, -16, 1 << 20)]
    for i in rng.permutation(len(places))[:40]:
        p, k, edit = places[i]
        before, old = d.extents(p), int(d.payloads["parameter"][p, k])
        if not -(1 << 31) <= old + edit < 1 << 31:
            continue
        d.payloads["parameter"][p, k] = old + edit
        try:
            after = d.extents(p)
        except Exception:
            return True
        for j in range(int(d.payloads["operands"][p])):
            v = int(d.uses["value"][p, j])
            if v == NONE or after[j] == before[j]:
                continue
            single = d.role(v) == Role.WEIGHT or (j in d.writes(p) and not d.cls(p).alias)
            size, start = int(d.values["size"][v]), int(d.uses["start"][p, j])
            if single or start + after[j] > size or after[j] <= 0 or after[j] != int(d.uses["size"][p, j]):
                return True
        d.payloads["parameter"][p, k] = old
    return None


WORD_EDITS = (1, -1, 5, -5, 16, 1 << 20, -(1 << 20), 1 << 30)


def words_off(old: int) -> list[int]:
    """Other values of a parameter's word: near ones, huge and negative ones, zero, the bits of NaN and infinity."""
    found = {*(old + e for e in WORD_EDITS), -old, 2 * old, 0, 99, -3, 0x7FC00000, 0x7F800000, -(1 << 31)} - {old}
    return sorted(w for w in found if -(1 << 31) <= w < 1 << 31)


@kind
def parameter_word(d: Draft, rng: Rng) -> bool | None:
    """Any word of any payload is off, used or not; but for another meaning that the operator allows."""
    for _ in range(40):
        p, k = int(rng.integers(len(d.payloads))), int(rng.integers(9))
        new = pick(rng, words_off(int(d.payloads["parameter"][p, k])))
        if new not in d.cls(p).semantic_parameters.get(k, ()):
            d.payloads["parameter"][p, k] = new
            return True
    return None


@kind
def opcode_wrong(d: Draft, rng: Rng) -> bool:
    """An opcode without an operator, or of one that would touch other bytes."""
    p = int(rng.integers(len(d.payloads)))
    before, old = d.extents(p), int(d.payloads["opcode"][p])
    for other in rng.permutation(len(d.program.operators)).tolist():
        d.payloads["opcode"][p] = other
        try:
            written = d.writes(p)
            if other != old and [d.extents(p)[j] for j in written] != [before[j] for j in written]:
                return True
        except Exception:
            return True
    d.payloads["opcode"][p] = len(d.program.operators) + rng.integers(3)
    return True


@kind
def operand_count(d: Draft, rng: Rng) -> bool:
    p = int(rng.integers(len(d.payloads)))
    d.payloads["operands"][p] = int(d.payloads["operands"][p]) + int(pick(rng, (-1, 1, 7)))
    return True


# --- values -------------------------------------------------------------------------------------------------------
@kind
def values_overlapped(d: Draft, rng: Rng) -> bool | None:
    """A value is moved onto one that is live at the same time; payloads follow."""
    n = range(len(d.values))
    pair = pick(rng, [(a, b) for a in n for b in n if a != b and d.live_together(a, b)])
    if pair is None:
        return None
    a, b = pair
    d.values["offset"][a] = int(d.values["offset"][b]) + 64 * int(rng.integers(-(-int(d.values["size"][b]) // 64)))
    d.follow(a)
    return True


@kind
def storage_reused_early(d: Draft, rng: Rng) -> bool | None:
    """A temporary is declared dead before its last use, and another takes its place."""
    n = [v for v in range(len(d.values)) if d.role(v) == Role.TEMPORARY]
    pairs = [
        (a, b) for a in n for b in n
        if a != b and d.values["first"][a] < d.values["first"][b] <= d.values["last"][a]
        and d.values["stride"][b] <= d.values["stride"][a]
    ]  # fmt: skip
    pair = pick(rng, pairs)
    if pair is None:
        return None
    a, b = pair
    d.values["last"][a] = d.values["first"][b] - 1
    d.values["offset"][b] = d.values["offset"][a]
    d.follow(b)
    return True


@kind
def value_outside(d: Draft, rng: Rng) -> bool:
    """The last slot leaves its arena, or a state its slab; payloads follow."""
    v = int(rng.integers(len(d.values)))
    row = d.values[v]
    row["offset"] = d.program.arenas[row["arena"]] - (d.program.slots - 1) * int(row["stride"])
    d.follow(v)
    return True


@kind
def value_askew(d: Draft, rng: Rng) -> bool:
    """A value does not start on a cache line; payloads follow."""
    v = int(rng.integers(len(d.values)))
    d.values["offset"][v] += np.uint64(pick(rng, (4, 8, 32)))
    d.follow(v)
    return True


@kind
def slots_overlapped(d: Draft, rng: Rng) -> bool | None:
    """A value's slots are less than its size apart; payloads follow."""
    v = pick(rng, [v for v in range(len(d.values)) if d.role(v) != Role.WEIGHT])
    if v is None or d.program.slots == 1:
        return None
    d.values["stride"][v] = 64 * int(rng.integers(-(-int(d.values["size"][v]) // 64)))
    d.follow(v)
    return True


@kind
def value_arena(d: Draft, rng: Rng) -> bool:
    """A value is in an arena of another role; payloads follow."""
    v = int(rng.integers(len(d.values)))
    d.values["arena"][v] = pick(rng, [a for a in (0, 1, 2, 3, 4) if a != d.values["arena"][v]])
    d.follow(v)
    return True


@kind
def value_role(d: Draft, rng: Rng) -> bool:
    v = int(rng.integers(len(d.values)))
    d.values["role"][v] = pick(rng, [r for r in range(6) if r != d.role(v)])
    return True


@kind
def value_dtype(d: Draft, rng: Rng) -> bool:
    """A value that some phase touches has another dtype."""
    v = pick(rng, sorted({v for _, _, v, _, _, _ in d.accesses()}))
    d.values["dtype"][v] = pick(rng, [i for i in range(len(DTYPES)) if i != d.values["dtype"][v]])
    return True


@kind
def value_size(d: Draft, rng: Rng) -> bool | None:
    """A value is larger than what its phases write, or smaller than what they touch."""
    v = pick(rng, [v for v in range(len(d.values)) if d.role(v) not in (Role.STATE, Role.INPUT)])
    if v is None:
        return None
    size = int(d.values["size"][v])
    d.values["size"][v] = size + 4 if size <= 4 or rng.integers(2) else size - 4
    return True


@kind
def lifetime_wrong(d: Draft, rng: Rng) -> bool:
    """A lifetime starts later or ends sooner than the uses do."""
    v, end = int(rng.integers(len(d.values))), pick(rng, ("first", "last"))
    old = int(d.values[end][v])
    later = end == "first" or old == 0
    d.values[end][v] = rng.integers(d.program.waves) if old == NONE else old + (1 if later else -1)
    return True


# --- ports, sizes, header and strings -----------------------------------------------------------------------------
@kind
def port_redirected(d: Draft, rng: Rng) -> bool | None:
    i = int(rng.integers(len(d.ports)))
    d.ports["value"][i] = pick(rng, [v for v in range(len(d.values) + 1) if v != d.ports["value"][i]])
    return True


@kind
def ports_exchanged(d: Draft, rng: Rng) -> bool | None:
    n = range(len(d.ports))
    pairs = [(a, b) for a in n for b in n if a < b and d.ports["direction"][a] == d.ports["direction"][b]]
    pair = pick(rng, pairs)
    if pair is None:
        return None
    a, b = pair
    d.ports["value"][[a, b]] = d.ports["value"][[b, a]]
    return True


@kind
def port_dropped(d: Draft, rng: Rng) -> bool:
    i = int(rng.integers(len(d.ports)))
    d.ports = np.delete(d.ports, i)
    d.changed["port_names"] = tuple(n for k, n in enumerate(d.program.port_names) if k != i)
    return True


@kind
def arena_shrunk(d: Draft, rng: Rng) -> bool | None:
    """An arena ends before its last value does."""
    arena = pick(rng, [a for a in range(4) if d.program.arenas[a]])
    rows = d.values[d.values["arena"] == arena]
    ends = rows["offset"] + (d.program.slots - 1) * rows["stride"] + rows["size"]
    most = max((int(e) for e in ends), default=0)
    sizes = list(d.program.arenas)
    sizes[arena] = pick(rng, (64 * ((most - 1) // 64), 0))
    d.changed["arenas"] = tuple(sizes)
    return True


@kind
def slots_changed(d: Draft, rng: Rng) -> bool:
    d.changed["slots"] = d.program.slots + int(pick(rng, (1, -1, 1000)))
    return True


@kind
def slots_raised_everywhere(d: Draft, rng: Rng) -> bool:
    """One session more than the arenas have room for; the tasks agree."""
    d.tasks["slot_hi"][d.tasks["slot_hi"] == d.program.slots] += 1
    d.changed["slots"] = d.program.slots + 1
    return True


@kind
def header_changed(d: Draft, rng: Rng) -> bytes:
    """One field of the header is off."""
    data = bytearray(d.program.to_bytes())
    counts = ("payloads", "tasks", "values", "ports", "strings")
    name = pick(rng, ("magic", "format", "waves", "reserved", *counts, "padding"))
    at = HEADER.fields[name][1]  # type: ignore[index]
    data[at] ^= int(pick(rng, (1, 2, 128)))
    return bytes(data)


@kind
def steps_changed(d: Draft, rng: Rng) -> bool:
    d.changed["steps"] = d.program.steps + int(pick(rng, (1, -1)))
    return True


@kind
def truncated(d: Draft, rng: Rng) -> bytes:
    data = d.program.to_bytes()
    return data[: int(rng.integers(len(data)))] if rng.integers(2) else data + bytes(int(rng.integers(1, 200)))


@kind
def operator_unknown(d: Draft, rng: Rng) -> bool:
    names = list(d.program.operators)
    i = int(rng.integers(len(names)))
    names[i] = pick(rng, (names[i].replace("@", "_nothing@"), names[i] + "000", names[i].partition("@")[0], ""))
    d.changed["operators"] = tuple(names)
    return True


@kind
def strings_cut(d: Draft, rng: Rng) -> bool:
    name = pick(rng, ("labels", "value_names", "port_names", "operators"))
    d.changed[name] = getattr(d.program, name)[:-1]
    return True
