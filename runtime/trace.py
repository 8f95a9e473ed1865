"""What a GPU's blocks did in a beat, as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

A process is a model, a thread a block. A block's work in a wave is an event; the gap behind it is the wait at the grid
barrier. Where a product was streamed, events inside it tell the wait for bytes from the stream and the epilogue.
The format is Google's "Trace Event Format" as a JSON object; times are microseconds from the beat's first moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.kernel.layout import DONE, PRODUCTS, STARTED, STREAMED_OUT, STREAMING
from wpk.registry.storage import store_errors
from wpk.scheduler.program import Program

Event = dict[str, Any]
NAMED = 3  # labels in an event's name; all are in its args


def trace_events(program: Program, moments: NDArray[np.int64], model: str, process: int = 1) -> list[Event]:
    """The events of one model's beat.

    moments: [waves, blocks, STAMPS], ns, as `wpk.kernel.cuda.CudaKernel.trace` gives them. One that is older than the
    start of its wave, and a wave that is older than the one before it, are of an earlier beat and left out.
    """
    events: list[Event] = [_named("process_name", model, process)]
    tasks = _tasks(program)
    waves, blocks = moments.shape[:2]
    begun = moments[:, :, STARTED]
    fresh = (begun > 0) & (begun == np.maximum.accumulate(begun, axis=0))
    if not fresh.any():
        return events
    origin = int(begun[fresh].min())
    for block in range(blocks):
        events.append(_named("thread_name", f"block {block}", process, block))
        for wave in range(waves):
            done = tasks.get((wave, block))
            if done and fresh[wave, block]:
                stamps = [int(ns) - origin for ns in moments[wave, block]]
                events += _wave_events(program, done, wave, stamps, {"pid": process, "tid": block})
    return events


def write_trace(path: Path, events: Sequence[Event]) -> None:
    """The events as a file that trace viewers open; an older file there is replaced."""
    text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ns"}, separators=(",", ":"))
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def _tasks(program: Program) -> dict[tuple[int, int], list[Any]]:
    """(wave, block) -> its tasks."""
    found: dict[tuple[int, int], list[Any]] = {}
    for task in program.tasks:
        found.setdefault((int(task["wave"]), int(task["block"])), []).append(task)
    return found


def _wave_events(
    program: Program, tasks: Sequence[Any], wave: int, stamps: Sequence[int], where: Event
) -> Iterator[Event]:  # fmt: skip
    """stamps: ns from the origin; those of an earlier beat lie before the wave's start."""
    start, end = stamps[STARTED], stamps[DONE]
    if end < start:  # the kernel ended in it
        return
    labels = list(dict.fromkeys(program.labels[task["payload"]] for task in tasks))
    operators = [program.operators[program.payloads["opcode"][task["payload"]]] for task in tasks]
    name = ", ".join(labels[:NAMED]) + (f" and {len(labels) - NAMED} more" if len(labels) > NAMED else "")
    arguments = {"wave": wave, "operators": list(dict.fromkeys(operators)), "labels": labels, "tasks": len(tasks)}
    yield _complete(name, start, end, where, arguments)
    first, last = stamps[STREAMING], stamps[STREAMED_OUT]
    if start <= first <= last <= end:
        # Every part of a product overwrites the moments of the part before it.
        parts = sum(
            int(task["part_hi"] - task["part_lo"])
            for task, operator in zip(tasks, operators, strict=True)
            if operator.partition("@")[0] in PRODUCTS
        )
        before = "wait for first bytes" if parts <= 1 else f"{parts - 1} parts before, wait for bytes"
        for name, begin, finish in ((before, start, first), ("stream", first, last), ("epilogue", last, end)):
            yield _complete(name, begin, finish, where, {"wave": wave})


def _complete(name: str, start: int, end: int, where: Event, arguments: Event) -> Event:
    return {"name": name, "ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3, **where, "args": arguments}


def _named(what: str, name: str, process: int, thread: int = 0) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
