"""A loaded profile with its sessions: join, beat, leave."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import CapacityError, KernelError, SessionError, TargetError, UsageError
from wpk.kernel.control import set_bit
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cuda import CudaKernel
from wpk.ops.payload import Arena
from wpk.registry.ports import Views, port_views
from wpk.registry.profile import Manifest
from wpk.scheduler.program import Direction, Program
from wpk.zoo.spec import ModelSpec

Array = NDArray[Any]
KEPT_DURATIONS = 100_000  # beats that p50 and p99 look back on


class Session:
    """One live conversation in a slot of a cohort. Equal only to itself; invalid after `leave`.

    seed: what its random numbers follow from, where the model draws any.
    """

    __slots__ = ("__weakref__", "_cohort", "seed", "slot")

    def __init__(self, cohort: Cohort, slot: int, seed: int) -> None:
        self.slot, self._cohort, self.seed = slot, cohort, seed

    def __repr__(self) -> str:
        return f"<Session in slot {self.slot}>"


@dataclass(frozen=True)
class Stats:
    """Beats so far and their kernel time in ms; late: longer than the model's period."""

    beats: int
    late: int
    p50: float
    p99: float
    max: float


class Cohort:
    """All sessions of one loaded profile. Methods may be called from any thread; beats run one at a time."""

    def __init__(self, spec: ModelSpec, profile: Manifest, kernel: CpuKernel | CudaKernel) -> None:
        self.spec, self.profile, self._kernel = spec, profile, kernel
        program = kernel.program
        inputs = port_views(program, kernel.arenas[Arena.IO], Direction.INPUT)
        self._seeds = {n: views for n, views in inputs.items() if spec.ports.inputs[n].kind == "seed"}
        self._inputs = {n: views for n, views in inputs.items() if n not in self._seeds}
        self._outputs = port_views(program, kernel.arenas[Arena.IO], Direction.OUTPUT)
        self._sessions: dict[int, Session] = {}
        self._lock = threading.RLock()
        self._durations: deque[float] = deque(maxlen=KEPT_DURATIONS)
        self._beats = self._late = 0
        self._max = 0.0
        self.last_ms = 0.0  # kernel time of the latest beat
        self._closed = False

    # --- sessions -----------------------------------------------------------------------------------------------
    @property
    def capacity(self) -> int:
        return self.profile.capacity

    @property
    def free(self) -> int:
        return self.capacity - len(self._sessions)

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def join(self, *, seed: int = 0) -> Session:
        """A session in the lowest free slot, in the model's initial state; `CapacityError` when there is none.

        seed: of its random numbers, 0 to 2^64 - 1. With the same seed and inputs a session gives the same outputs, in
        whatever slot and company; models that draw no random numbers pass it over.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
            raise UsageError("the seed of a session", wanted="an int from 0 to 2^64 - 1", found=repr(seed))
        words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
        with self._lock:
            self._require_open()
            for slot in range(self.capacity):
                if slot not in self._sessions:
                    self._kernel.reset(slot)
                    for view in (view for views in self._seeds.values() for view in views):
                        view[slot] = words
                    set_bit(self._kernel.control.active, slot, True)
                    self._sessions[slot] = Session(self, slot, seed)
                    return self._sessions[slot]
        raise CapacityError(
            f"all {self.capacity} slots are taken", capacity=self.capacity, wanted="a free slot",
            found=f"{self.capacity} sessions", hint="Let a session leave, or load a larger capacity.",
        )  # fmt: skip

    def leave(self, session: Session) -> None:
        """End a session; its slot is free at once."""
        with self._lock:
            self._require(session)
            set_bit(self._kernel.control.active, session.slot, False)
            del self._sessions[session.slot]

    # --- beats --------------------------------------------------------------------------------------------------
    def beat(self, inputs: Mapping[Session, Mapping[str, Array]] | None = None) -> dict[Session, dict[str, Array]]:
        """Advance every session by one beat.

        inputs: for each session, the array of every input port that is no seed: float32 of the port's shape, steps of
        the beat one after the other (audio: samples per beat). A session that is not named gets silence (zeros).
        Returns for every session every output port's array. Bad input is refused before anything moves.
        """
        with self._lock:
            self._require_open()
            sessions, blocks = self._checked({} if inputs is None else inputs)
            for name, views in self._inputs.items():
                for step, view in enumerate(views):
                    view[:] = 0
                    if sessions:
                        view[[s.slot for s in sessions]] = blocks[name][:, step]
            duration = self.last_ms = self._kernel.beat() / 1e6
            self._beats += 1
            self._late += duration > self.profile.period_ms
            self._max = max(self._max, duration)
            self._durations.append(duration)
            return self._collect()

    @property
    def stats(self) -> Stats:
        with self._lock:
            p50, p99 = np.percentile(self._durations, [50, 99]) if self._durations else (0.0, 0.0)
            return Stats(self._beats, self._late, float(p50), float(p99), self._max)

    # --- looking in ---------------------------------------------------------------------------------------------
    @property
    def last_span(self) -> tuple[int, int]:
        """When the kernel began and ended the latest beat: ns of the host's monotonic clock."""
        return self._kernel.control["start_ns"], self._kernel.control["end_ns"]

    @property
    def program(self) -> Program:
        """What the kernel runs."""
        return self._kernel.program

    def trace(self) -> NDArray[np.int64]:
        """When each block did what in the last beat with a session: [waves, blocks, moments], ns of the GPU's clock.

        The moments are those of `wpk.kernel.layout`; `wpk.runtime.trace` draws them. Only for a cohort that was
        loaded with trace=True.
        """
        with self._lock:
            self._require_open()
            if isinstance(self._kernel, CpuKernel):
                raise TargetError("only GPU kernels record traces", wanted="a GPU target", found=self.profile.target)
            found = self._kernel.trace()
        if not len(found):
            raise UsageError(
                "this cohort records no trace", wanted="load(..., trace=True)", found="trace=False",
                hint="Load it again with trace=True.",
            )  # fmt: skip
        return found

    # --- end ----------------------------------------------------------------------------------------------------
    def poison(self) -> None:
        """Stop the kernel, in mid-beat if need be; later beats raise `KernelError`."""
        self._kernel.poison()

    def close(self) -> None:
        """End all sessions and the kernel's threads; idempotent."""
        with self._lock:
            self._closed = True
            self._sessions.clear()
            self._kernel.close()

    def __enter__(self) -> Cohort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------------------------
    def _checked(self, inputs: Mapping[Session, Mapping[str, Array]]) -> tuple[list[Session], dict[str, Array]]:
        """The sessions, and for each port their input as one array [sessions, steps, values]."""
        if not isinstance(inputs, Mapping):
            raise SessionError("a beat's inputs", wanted="{session: {port: array}}", found=type(inputs).__name__)
        for session, ports in inputs.items():
            self._require(session)
            if not isinstance(ports, Mapping) or ports.keys() != self._inputs.keys():
                found = ", ".join(map(str, ports)) if isinstance(ports, Mapping) else type(ports).__name__
                raise SessionError(f"{session}: input ports", wanted=", ".join(self._inputs), found=found or "none")
        blocks: dict[str, Array] = {}
        if not inputs:
            return [], blocks
        for name, views in self._inputs.items():
            rows = [ports[name] for ports in inputs.values()]
            block = _stacked(rows, views)
            if block is None:
                whose, row = next(p for p in zip(inputs, rows, strict=True) if _stacked([p[1]], views) is None)
                raise _misfit(whose, name, views, row)
            blocks[name] = block
        return list(inputs), blocks

    def _collect(self) -> dict[Session, dict[str, Array]]:
        found: dict[Session, dict[str, Array]] = {session: {} for session in self._sessions.values()}
        for name, views in self._outputs.items():
            block = views[0].copy() if len(views) == 1 else np.concatenate(views, axis=1)
            for slot, session in self._sessions.items():
                found[session][name] = block[slot]
        return found

    def _require(self, session: Session) -> None:
        known = self._sessions.get(session.slot) if isinstance(session, Session) else None
        if known is None or known is not session:
            raise SessionError(
                f"{session!r} is not in this cohort", wanted="a session that has joined and not left",
                found="another cohort's, or one that has left",
            )  # fmt: skip

    def _require_open(self) -> None:
        if self._closed:
            raise KernelError("this cohort is closed", wanted="an open cohort", found="closed")


def _stacked(rows: Sequence[Array], views: Views) -> Array | None:
    """Inputs as finite numbers of the port's dtype [rows, steps, values]; None where one is not that."""
    count, kinds = len(views) * views.size, views.kinds
    try:
        arrays = [np.asarray(row) for row in rows]
    except ValueError:  # a ragged list
        return None
    if any(a.size != count or a.dtype.kind not in kinds for a in arrays):
        return None
    given = np.concatenate(arrays, axis=None)
    with np.errstate(over="ignore", invalid="ignore"):
        block = given.astype(views.dtype, copy=False)
    sound = np.isfinite(block) if block.dtype.kind == "f" else block == given
    return block.reshape(len(rows), len(views), views.size) if sound.all() else None


def _misfit(whose: Session, name: str, views: Views, given: object) -> SessionError:
    count = len(views) * views.size
    try:
        array = np.asarray(given)
        outside = array.size == count and array.dtype.kind in views.kinds
        found = "NaN, infinity or numbers beyond its range" if outside else f"{array.dtype} of shape {array.shape}"
    except ValueError:
        found = "a ragged list"
    return SessionError(
        f"{whose}: input {name!r} does not fit", wanted=f"{count} finite {views.dtype} values", found=found,
        hint="Pad the last frame of a recording with zeros.",
    )  # fmt: skip
