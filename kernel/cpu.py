"""The CPU kernel: executes a program's bytes beat after beat on persistent threads.

The work of a beat is a list of *items*, one a (wave, block) pair, in the order of the waves. Threads take items by a
ticket; an item starts when every item of the earlier waves is done, which is the barrier between waves. Tickets and
done counts only grow, over all beats, so nothing is reset between beats and a late thread finds its work gone rather
than stale. A thread that sleeps when a beat starts delays nobody: the caller's thread takes the items itself.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from wpk.ir.errors import KernelError, ProgramError, UsageError
from wpk.kernel.atomics import (
    add_release,
    call_body,
    compare_exchange,
    load_acquire,
    monotonic_ns,
    sleep_us,
    store_release,
)
from wpk.kernel.bodies import compile_kernel
from wpk.kernel.control import END_NS, POISON, STALLED, START_NS, ControlPage, Poison, aligned_bytes
from wpk.ops.memory import view_i32, view_i64
from wpk.ops.payload import PAYLOAD, Arena
from wpk.scheduler.program import TASK, Program

SCRATCH_BYTES = 64 * 1024
LARGEST_GAP = 8  # vacant slots that are computed rather than end a run
SPINS = 4000  # polls before a waiting thread sleeps: about 10 us
JOIN_S = 5.0  # how long the end waits for threads that are inside a body
TASK_BYTES, PAYLOAD_BYTES = TASK.itemsize, PAYLOAD.itemsize

# The context of a running program: one i64 each, the same for every thread.
CONTEXT = (
    "control", "payloads", "tasks", "items", "arenas", "functions", "progress", "runs", "item_count", "budget_ns",
)  # fmt: skip
_CONTROL, _PAYLOADS, _TASKS, _ITEMS, _ARENAS, _FUNCTIONS, _PROGRESS, _RUNS, _COUNT, _BUDGET = range(len(CONTEXT))
# Progress words, each on a cache line of its own.
TICKET, DONE = 0, 64
# Item: first task, end task, items in earlier waves, wave.
ITEM_WORDS = 4


@njit(nogil=True, inline="never")
def _run_items(context, epoch, scratch):
    """Take items of this epoch until none is left; 0, or the poison that ended it."""
    control, progress = context[_CONTROL], context[_PROGRESS]
    count, arenas = context[_COUNT], context[_ARENAS]
    base = (epoch - 1) * count
    runs = view_i64(context[_RUNS], 1)
    while True:
        ticket = load_acquire(progress + TICKET)
        if ticket >= base + count:
            return 0
        if not compare_exchange(progress + TICKET, ticket, ticket + 1):
            continue
        item = view_i64(context[_ITEMS] + (ticket - base) * ITEM_WORDS * 8, ITEM_WORDS)
        poison = _wait(context, base + item[2], item[3])
        if poison != 0:
            return poison
        for index in range(item[0], item[1]):
            task = view_i32(context[_TASKS] + index * TASK_BYTES, 8)
            record = context[_PAYLOADS] + task[0] * PAYLOAD_BYTES
            opcode = np.int64(view_i32(record, 1)[0] & 0xFFFF)
            function = view_i64(context[_FUNCTIONS] + 8 * opcode, 1)[0]
            # Slots without a session are skipped: runs of occupied slots, as pairs.
            spans = view_i64(context[_RUNS] + 8, 2 * runs[0])
            for run in range(runs[0]):
                lo = max(np.int64(task[3]), spans[2 * run])
                hi = min(np.int64(task[4]), spans[2 * run + 1])
                if lo < hi:
                    call_body(function, record, arenas, lo, hi, np.int64(task[5]), np.int64(task[6]), scratch)
        add_release(progress + DONE, 1)
        if view_i32(control + POISON, 1)[0] != 0:
            return np.int64(view_i32(control + POISON, 1)[0])


@njit(nogil=True, inline="never")
def _wait(context, needed, wave):
    """Wait until `needed` items are done; bounded by the budget. 0, or the poison that ended it."""
    done, control = context[_PROGRESS] + DONE, context[_CONTROL]
    spins, started = 0, np.int64(0)
    while load_acquire(done) < needed:
        spins += 1
        if spins <= SPINS and spins % 1024 != 0:
            continue
        poison = view_i32(control + POISON, 1)[0]
        if poison != 0:
            return np.int64(poison)
        now = monotonic_ns()
        if started == 0:
            started = now
        elif now - started > context[_BUDGET]:
            view_i32(control + STALLED, 1)[0] = wave + 1
            view_i32(control + POISON, 1)[0] = 3
            return np.int64(3)
        if spins > SPINS:
            sleep_us(20)
    return 0


def _beat(context, epoch, scratch):
    """One beat, on the caller's thread with the help of the others; 0, or the poison that ended it."""
    control = context[_CONTROL]
    view_i64(control + START_NS, 1)[0] = monotonic_ns()
    store_release(control, epoch)
    poison = _run_items(context, epoch, scratch)
    if poison == 0:
        count = context[_COUNT]
        last = view_i64(context[_ITEMS] + (count - 1) * ITEM_WORDS * 8, ITEM_WORDS)
        poison = _wait(context, epoch * count, last[3])
    if poison == 0:
        view_i64(control + END_NS, 1)[0] = monotonic_ns()
        store_release(control + 8, epoch)
    return poison


def _skip(context, epoch):
    """A beat without sessions: epochs move on and there is nothing to take."""
    control, progress = context[_CONTROL], context[_PROGRESS]
    store_release(progress + DONE, epoch * context[_COUNT])
    store_release(progress + TICKET, epoch * context[_COUNT])
    now = monotonic_ns()
    view_i64(control + START_NS, 1)[0] = now
    view_i64(control + END_NS, 1)[0] = now
    store_release(control, epoch)
    store_release(control + 8, epoch)
    return np.int64(0)


def _helper(context, scratch, patience_us):
    """A persistent thread: wait for the next input epoch, help with it, until poisoned."""
    control = context[_CONTROL]
    seen, idle = np.int64(0), 0  # the first epoch is 1: a thread that starts late still helps with it
    while True:
        epoch = load_acquire(control)
        if epoch == seen:
            if view_i32(control + POISON, 1)[0] != 0:
                return
            idle += 1
            if idle > SPINS:
                # Nobody waits for a helper, so one that is long idle may sleep longer: up to a millisecond.
                sleep_us(min(patience_us + idle - SPINS, 1000))
            continue
        seen, idle = epoch, 0
        if _run_items(context, epoch, scratch) != 0:
            return


_WORDS = types.Array(types.int64, 1, "C")
LOOPS: dict[Callable[..., Any], Any] = {
    _beat: types.int64(_WORDS, types.int64, types.int64),
    _helper: types.void(_WORDS, types.int64, types.int64),
    _skip: types.int64(_WORDS, types.int64),
}


class CpuKernel:
    """A program resident in host memory.

    arenas: one byte array each, in the order of `wpk.ops.payload.Arena`, of the sizes that the program names. image:
    the initial bytes of one slot's state. threads: caller included; None takes the processors that this process may
    use. budget_s: the longest that a beat may wait for one wave before it is poisoned.
    """

    def __init__(
        self,
        program: Program,
        arenas: list[NDArray[np.uint8]],
        image: NDArray[np.uint8],
        *,
        threads: int | None = None,
        cache: Path | None = None,
        budget_s: float = 10.0,
    ) -> None:
        wanted = [program.arenas[a] for a in Arena]
        if any(len(memory) < size for memory, size in zip(arenas, wanted, strict=True)):
            raise ProgramError("arenas do not fit the program", wanted=wanted, found=[len(a) for a in arenas])
        if threads is not None and threads < 1:
            raise UsageError("a number of threads", wanted="at least 1", found=threads)
        self.program, self.arenas, self.image = program, arenas, image
        self.control = ControlPage(program.slots)
        self.threads = max(1, min(threads or available_cpus(), program.blocks))
        self._epoch = 0
        self._lock = threading.Lock()
        self._keep: list[Any] = []
        functions, (self._run_beat, helper, self._run_nothing) = compile_kernel(program.operators, LOOPS, cache)
        self._context = self._build_context(functions, budget_s)
        self._scratch = [aligned_bytes(SCRATCH_BYTES) for _ in range(self.threads)]
        # Compiled threads touch memory that the interpreter would free: each holds on to it until it ends, and they
        # end before this object, or with the process.
        keep = (self.control, self._keep, self._scratch, self.arenas, self._progress, self._runs)
        helpers = [
            threading.Thread(
                target=_run_helper, args=(helper, self._context, s.ctypes.data, keep), name=f"wpk-kernel-{i + 1}",
                daemon=True,
            )
            for i, s in enumerate(self._scratch[1:])
        ]  # fmt: skip
        self._end = weakref.finalize(self, _stop_threads, self.control, helpers)
        for thread in helpers:
            thread.start()

    # --- between beats ------------------------------------------------------------------------------------------
    def reset(self, slot: int) -> None:
        """Put the initial image into a slot."""
        slab = self.program.arenas[Arena.STATE] // self.program.slots
        self.arenas[Arena.STATE][slot * slab : (slot + 1) * slab] = self.image

    def beat(self) -> int:
        """Run one beat on the present inputs and active slots; its duration in ns.

        Raises `KernelError` once the kernel has been poisoned or a wait ran out.
        """
        with self._lock:
            if self.control["poison"]:
                raise self._stopped()
            self._set_runs()
            self._epoch += 1
            if self._runs[0]:
                if self._run_beat(self._context, self._epoch, self._scratch[0].ctypes.data):
                    raise self._stopped()
            else:
                self._run_nothing(self._context, self._epoch)
            self.control["steps"] = self.control["steps"] + self.program.steps
            return self.control["end_ns"] - self.control["start_ns"]

    def poison(self, reason: Poison = Poison.HOST) -> None:
        """Stop at the next wait; from any thread."""
        if not self.control["poison"]:
            self.control["poison"] = reason

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._end()

    # --- helpers ------------------------------------------------------------------------------------------------
    def _set_runs(self) -> None:
        """Runs of slots to compute, as pairs [start, end): those that are occupied, and short gaps between them.

        What a vacant slot computes harms nobody and is gone when somebody joins it; but each run reads the weights
        again and leaves tiles half empty, so that a cohort with many gaps would be slower than a full one.
        """
        occupied = np.unpackbits(self.control.active.view(np.uint8), bitorder="little")
        starts, ends = np.flatnonzero(np.diff(occupied, prepend=0, append=0)).reshape(-1, 2).T
        wide = np.flatnonzero(starts[1:] - ends[:-1] > LARGEST_GAP)
        runs = np.stack([starts[np.append(0, wide + 1)], ends[np.append(wide, -1)]], axis=1) if len(starts) else starts
        self._runs[0] = len(runs)
        self._runs[1 : 1 + runs.size] = runs.reshape(-1)

    def _stopped(self) -> KernelError:
        reason, stalled = self.control["poison"], self.control["stalled"]
        if stalled:
            wave = stalled - 1
            labels = sorted({self.program.labels[t["payload"]] for t in self.program.tasks if t["wave"] == wave})
            return KernelError(
                f"the kernel stalled before wave {wave} ({', '.join(labels)})",
                wanted="every block within its budget", found="a wait that ran out",
                hint="Load the profile again; lower the capacity if the machine is too slow.",
            )  # fmt: skip
        names = {poison.value: poison.name for poison in Poison}
        found = f"poison {names.get(reason, reason)}"
        return KernelError(
            "the kernel is stopped", wanted="a running kernel", found=found, hint="Load the profile again."
        )

    def _build_context(self, functions: list[int], budget_s: float) -> NDArray[np.int64]:
        program = self.program
        items = build_items(program)
        table = np.array([a.ctypes.data for a in self.arenas], np.int64)
        addresses = np.array(functions, np.int64)
        self._progress = aligned_bytes(128)
        self._runs = np.zeros(2 + 2 * program.slots, np.int64)
        payloads, tasks = np.ascontiguousarray(program.payloads), np.ascontiguousarray(program.tasks)
        self._keep = [items, table, addresses, payloads, tasks]
        values = (
            self.control.address, payloads.ctypes.data, tasks.ctypes.data, items.ctypes.data, table.ctypes.data,
            addresses.ctypes.data, self._progress.ctypes.data, self._runs.ctypes.data, len(items),
            int(budget_s * 1e9),
        )  # fmt: skip
        return np.array(values, np.int64)


def build_items(program: Program) -> NDArray[np.int64]:
    """The (wave, block) pairs that have work: first task, end task, items in earlier waves, wave."""
    tasks = program.tasks
    items: list[tuple[int, int, int, int]] = []
    earlier, wave = 0, -1
    for i, task in enumerate(tasks):
        if i and task["wave"] == tasks[i - 1]["wave"] and task["block"] == tasks[i - 1]["block"]:
            items[-1] = (items[-1][0], i + 1, *items[-1][2:])
            continue
        if task["wave"] != wave:
            wave, earlier = int(task["wave"]), len(items)
        items.append((i, i + 1, earlier, wave))
    return np.array(items, np.int64).reshape(-1, ITEM_WORDS)


def _run_helper(helper: Callable[..., None], context: NDArray[np.int64], scratch: int, keep: object) -> None:
    """The body of a thread; its frame keeps the memory that `helper` touches."""
    helper(context, scratch, 50)


def _stop_threads(control: ControlPage, helpers: list[threading.Thread]) -> None:
    if not control["poison"]:
        control["poison"] = Poison.STOP
    deadline = time.monotonic() + JOIN_S
    for helper in helpers:
        helper.join(timeout=max(0.0, deadline - time.monotonic()))


def available_cpus() -> int:
    """Processors that this process may run on."""
    counter: Callable[[], int | None] = getattr(os, "process_cpu_count", os.cpu_count)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else counter() or 1
