"""Checks of the program's own shape: tables and ranges, tasks as a tiling of phases, ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ops.payload import OPERANDS
from wpk.scheduler.check.facts import LIMIT, Facts
from wpk.scheduler.program import ALIGN, DTYPES, TASK, Direction, Role

MOST_WAVES = 1 << 22


def structure(facts: Facts) -> Iterator[str]:
    """Every index and range is inside its table."""
    p = facts.program
    tasks, values, ports = p.tasks, p.values, p.ports
    for what, names, table in (
        ("labels", p.labels, p.payloads), ("value names", p.value_names, values), ("port names", p.port_names, ports),
    ):  # fmt: skip
        if len(names) != len(table):
            yield f"{len(names)} {what} for {len(table)} entries"
    named = list(zip(values["role"].tolist(), p.value_names, strict=False))
    if len(set(named)) != len(named) or len(set(p.operators)) != len(p.operators):
        yield "the name of an operator, or of a value among those of its role, occurs twice"
    for what, number, most in (
        ("slots", p.slots, 1 << 16), ("blocks", p.blocks, 1 << 20), ("steps", p.steps, 1 << 20),
        ("waves", p.waves, MOST_WAVES),
    ):  # fmt: skip
        if not 1 <= number <= most:
            yield f"{number} {what}"
    if sum(p.arenas) > LIMIT or any(a % ALIGN for a in p.arenas):
        yield f"arenas of {p.arenas} bytes: wanted multiples of {ALIGN}, together at most {LIMIT}"
    for name in ("offset", "size", "stride"):
        for i in np.flatnonzero(values[name] > LIMIT):
            yield f"{facts.value(i)}: {name} {values[name][i]}"
    for i in np.flatnonzero((values["size"] == 0) | (values["role"] >= len(Role)) | (values["dtype"] >= len(DTYPES))):
        yield f"{facts.value(i)}: size {values['size'][i]}, role {values['role'][i]}, dtype {values['dtype'][i]}"
    if len(p.payloads) == 0 or (p.payloads["opcode"] >= len(p.operators)).any():
        yield f"opcodes {sorted(set(p.payloads['opcode'].tolist()))} in a table of {len(p.operators)} operators"
    elif len(np.unique(p.payloads["opcode"])) != len(p.operators):
        yield "an operator of the table is used by no payload"
    for i in np.flatnonzero((p.payloads["operands"] > OPERANDS) | (p.payloads["parts"] == 0)):
        yield f"payload {i}: {p.payloads['operands'][i]} operands, {p.payloads['parts'][i]} parts"
    for i in np.flatnonzero(tasks["payload"] >= len(p.payloads)):
        yield f"task {i} is of payload {tasks['payload'][i]} of {len(p.payloads)}"
        return
    parts = p.payloads["parts"][tasks["payload"]] if len(tasks) else np.zeros(0, np.uint32)
    bad = (tasks["slot_lo"] >= tasks["slot_hi"]) | (tasks["slot_hi"] > p.slots)
    bad |= (tasks["part_lo"] >= tasks["part_hi"]) | (tasks["part_hi"] > parts)
    bad |= (tasks["block"] >= p.blocks) | (tasks["wave"] >= p.waves) | (tasks["reserved"] != 0)
    for i in np.flatnonzero(bad):
        yield f"task {i} is out of range: {dict(zip(TASK.names or (), tasks[i].tolist(), strict=True))}"
    key = tasks["wave"].astype(np.int64) * (1 << 32) + tasks["block"]
    for i in np.flatnonzero(np.diff(key) < 0):
        yield f"task {i + 1} is not in the order of (wave, block)"
    empty = np.setdiff1d(np.arange(min(p.waves, len(tasks) + 1)), tasks["wave"])
    if len(empty) or p.waves > len(tasks):
        yield f"wave {empty[0] if len(empty) else p.waves - 1} has no task"
    if any(len(np.flatnonzero(values[n])) for n in ("reserved", "pad", "spare")) or ports["reserved"].any():
        yield "a reserved field of a value or port is set"


def tiling(facts: Facts) -> Iterator[str]:
    """The tasks of a payload cover its rectangle of slots x parts exactly once, in one wave.

    Grids (ranges of slots each cut into ranges of parts, or the other way round) are seen at once for all payloads;
    what is none is looked at band by band.
    """
    p = facts.program
    tasks = p.tasks.astype([(n, "<i8") for n in TASK.names or ()])
    for i in np.setdiff1d(np.arange(len(p.payloads)), tasks["payload"]):
        yield f"payload {i} {p.labels[i]!r} has no task"
    for i in np.flatnonzero(facts.waves[tasks["payload"]] != tasks["wave"]):
        yield f"{facts.phase(tasks['payload'][i])} also has a task in wave {tasks['wave'][i]}"
    parts = p.payloads["parts"].astype(np.int64)
    slots = np.full(len(parts), p.slots, np.int64)
    bad = ~(_tiled(tasks, ("slot", slots), ("part", parts)) | _tiled(tasks, ("part", parts), ("slot", slots)))
    for i in np.flatnonzero(bad):
        if _covers(facts.bands(int(i)), p.slots, int(parts[i])):
            continue
        rows = tasks[tasks["payload"] == i]
        shown = ", ".join(f"{r['slot_lo']}:{r['slot_hi']} x {r['part_lo']}:{r['part_hi']}" for r in rows[:4])
        yield f"{facts.phase(i)}: tasks {shown} do not cover {p.slots} slots x {parts[i]} parts once"


def _covers(bands: Sequence[tuple[int, int, Sequence[tuple[int, int]]]], slots: int, parts: int) -> bool:
    """Whether the bands follow each other over all slots, and the ranges of each over all parts."""
    if not bands or bands[0][0] != 0 or bands[-1][1] != slots:
        return False
    for _, _, ranges in bands:
        ends = [0, *(hi for _, hi in ranges)]
        if [lo for lo, _ in ranges] != ends[:-1] or ends[-1] != parts:
            return False
    return True


def _tiled(
    tasks: NDArray[Any], outer: tuple[str, NDArray[np.int64]], inner: tuple[str, NDArray[np.int64]]
) -> NDArray[np.bool_]:
    """Per payload: whether its tasks are ranges of `outer` one after the other, each cut into ranges of `inner`."""
    (a, a_size), (b, b_size) = outer, inner
    good = np.zeros(len(a_size), bool)
    if not len(tasks):
        return good
    t = tasks[np.lexsort((tasks[f"{b}_lo"], tasks[f"{a}_hi"], tasks[f"{a}_lo"], tasks["payload"]))]
    new = np.r_[True, t["payload"][1:] != t["payload"][:-1]]
    group = new | np.r_[True, (t[f"{a}_lo"][1:] != t[f"{a}_lo"][:-1]) | (t[f"{a}_hi"][1:] != t[f"{a}_hi"][:-1])]
    ends, final = np.r_[group[1:], True], np.r_[new[1:], True]
    before_a, before_b = np.r_[0, t[f"{a}_hi"][:-1]], np.r_[0, t[f"{b}_hi"][:-1]]
    ok = t[f"{b}_lo"] == np.where(group, 0, before_b)
    ok &= ~ends | (t[f"{b}_hi"] == b_size[t["payload"]])
    ok &= ~group | (t[f"{a}_lo"] == np.where(new, 0, before_a))
    ok &= ~final | (t[f"{a}_hi"] == a_size[t["payload"]])
    good[t["payload"]] = True
    good[t["payload"][~ok]] = False
    return good


def ports(facts: Facts) -> Iterator[str]:
    """Every input and output value is one port's, and every port has one value a step."""
    p = facts.program
    held: dict[int, int] = {}
    steps: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, row in zip(p.port_names, p.ports, strict=True):
        value, direction, step = int(row["value"]), int(row["direction"]), int(row["step"])
        if value >= len(p.values) or direction not in tuple(Direction) or step >= p.steps:
            yield f"port {name!r}: value {value}, direction {direction}, step {step} of {p.steps}"
            continue
        role = Role.INPUT if direction == Direction.INPUT else Role.OUTPUT
        if p.values["role"][value] != role:
            yield f"port {name!r}: {facts.value(value)} is no {role.name.lower()}"
        if p.value_names[value] != f"{name}@{step}":
            yield f"port {name!r} of step {step} is {facts.value(value)}"
        held[value] = held.get(value, 0) + 1
        steps.setdefault((name, direction), []).append((step, value))
    for i in np.flatnonzero(np.isin(p.values["role"], (Role.INPUT, Role.OUTPUT))):
        if held.get(int(i), 0) != 1:
            yield f"{facts.value(int(i))} has {held.get(int(i), 0)} ports"
    for (name, _), found in steps.items():
        if sorted(s for s, _ in found) != list(range(p.steps)):
            yield f"port {name!r} has the steps {sorted(s for s, _ in found)} of {p.steps}"
        if len({(int(p.values["size"][v]), int(p.values["dtype"][v])) for _, v in found}) > 1:
            yield f"port {name!r} changes its type from step to step"
