"""The GPU kernel: a program resident on one GPU, beat after beat, with the host out of the loop.

`CudaKernel` has the surface of `wpk.kernel.cpu.CpuKernel`. It takes arenas in device memory or puts them there, maps
the control record and the arena of inputs and outputs, and launches `wpk.kernel.resident` once; after that it only
writes the input epoch and waits for the output epoch. Nothing is allocated, created or loaded once the kernel is
resident.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from wpk.ir.errors import KernelError, TargetError
from wpk.kernel import layout
from wpk.kernel.arenas import DeviceArenas
from wpk.kernel.atomics import load_acquire, monotonic_ns, sleep_us, store_release
from wpk.kernel.bodies import compile_kernel
from wpk.kernel.control import OUTPUT_EPOCH, POISON, ControlPage, Poison, aligned_bytes, set_bit
from wpk.kernel.cubin import CAPABILITY, ENTRY, Cubin, build_cubin
from wpk.kernel.driver import Device, Gpu, find_device
from wpk.kernel.layout import BLOCK_THREADS, MAP_BYTES, SCRATCH_WORDS, THREADS, shape_of
from wpk.kernel.plan import (
    agenda_table,
    order_table,
    require_sizes,
    scratch_bytes,
    stream_table,
    task_table,
    tensor_maps,
    transfers,
)
from wpk.ops.memory import view_i32
from wpk.ops.payload import Arena
from wpk.scheduler.program import Direction, Program

Bytes = NDArray[np.uint8]
PULSE_US = 20_000  # between two heartbeats
HEARTBEAT_S = 0.8  # without one for so long the kernel ends
PATIENCE_NS = 50_000_000  # of the wait for an answer between two looks at the driver
SPIN_NS = 300_000  # polled without pause; then with short sleeps
END_S = 5.0  # how long `close` waits for the kernel
ANSWERED, STOPPED, NOT_YET = 0, 1, 2
LOOK_AHEAD = bytes(2 * layout.STREAM_BYTES)  # behind tables of which the producer prefetches the rows to come


def _exchange(control, epoch, patience_ns):
    """Publish an input epoch that is new and wait for the same output epoch: ANSWERED, STOPPED or NOT_YET."""
    if load_acquire(control) != epoch:
        store_release(control, epoch)
    started = monotonic_ns()
    spins = 0
    while load_acquire(control + OUTPUT_EPOCH) != epoch:
        spins += 1
        if spins % 64 == 0:
            if view_i32(control + POISON, 1)[0] != 0:
                return STOPPED
            waited = monotonic_ns() - started
            if waited > patience_ns:
                return NOT_YET
            if waited > SPIN_NS:
                sleep_us(20)
    return ANSWERED


def _pulse(watch, end, period_us):
    """Keep the heartbeat moving until `end` is set; runs without the interpreter lock, so Python can't stop it."""
    beats = 0
    while load_acquire(end) == 0:
        beats += 1
        store_release(watch, beats)
        sleep_us(period_us)


LOOPS = {
    _exchange: types.int64(types.int64, types.int64, types.int64),
    _pulse: types.void(types.int64, types.int64, types.int64),
}


class CudaKernel:
    """A program resident on a GPU.

    arenas: on the device already, and the kernel's from here on, or as for `CpuKernel`, to be copied there; the arena
    of inputs and outputs is in host memory and is exchanged with the device's copy within the beat. image: as for
    `CpuKernel`. cache: folder for machine code. budget_s: the longest that a block may wait for the others before the
    kernel stops itself. heartbeat_s: how long the kernel outlives its host. cubin: machine code for the program's
    operators that was built elsewhere; None takes it from the cache or builds it.
    """

    def __init__(
        self,
        program: Program,
        arenas: Sequence[Bytes] | DeviceArenas,
        image: Bytes,
        *,
        cache: Path | None = None,
        budget_s: float = 2.0,
        heartbeat_s: float = HEARTBEAT_S,
        ordinal: int = 0,
        cubin: Cubin | None = None,
        trace: bool = False,
    ) -> None:
        device = arenas.gpu.device if isinstance(arenas, DeviceArenas) else find_device(ordinal)
        require_fit(device, program)
        require_sizes(program, shape_of(program.operators, program.slots))
        self.program, self.arenas, self.image, self.device = program, arenas, image, device
        self.cubin = cubin or build_cubin(program.operators, cache, program.slots)
        _, (self._exchange, pulse) = compile_kernel((), LOOPS, cache)
        self.control = ControlPage(program.slots)
        self._watch, self._pulse_end = aligned_bytes(layout.WATCH_BYTES), aligned_bytes(64)
        self._epoch, self._ahead = 0, 0  # _ahead: host's monotonic clock less the GPU's
        self._budget_s, self._traced = budget_s, trace
        self._lock = threading.Lock()
        gpu = self._gpu = arenas.gpu if isinstance(arenas, DeviceArenas) else Gpu(device)
        try:
            placed = arenas if isinstance(arenas, DeviceArenas) else DeviceArenas.holding(program, gpu, arenas)
            self._shape = shape_of(program.operators, program.slots)
            function = gpu.load(self.cubin.image, ENTRY, BLOCK_THREADS, self._shape.shared_bytes)
            self._context = self._place(placed, budget_s, heartbeat_s)
            address = gpu.place(self._context.view(np.uint8))
            keep = (self.control, self._watch, self._pulse_end, placed.io)
            thread = threading.Thread(
                target=_run_pulse, args=(pulse, self._watch, self._pulse_end, keep), name="wpk-heartbeat", daemon=True
            )
            self._end = weakref.finalize(self, _stop, gpu, self.control, self._pulse_end, thread, keep)
            thread.start()
            gpu.launch(function, program.blocks, BLOCK_THREADS, self._shape.shared_bytes, address)
        except BaseException:
            self.close() if hasattr(self, "_end") else gpu.close()
            raise

    # --- between beats ------------------------------------------------------------------------------------------
    def reset(self, slot: int) -> None:
        """Put the initial image into a slot, at the start of the next beat."""
        with self._lock:
            set_bit(self.control.reset, slot, True)

    def beat(self) -> int:
        """Run one beat on the present inputs and active slots; its duration in ns, by the GPU's clock.

        Raises `KernelError` once the kernel has been poisoned, a wait ran out, or it broke off.
        """
        with self._lock:
            if self.control["poison"]:
                raise self._stopped()
            self._epoch += 1
            published = time.monotonic_ns()
            limit = published + int((self._budget_s + 1.0) * 1e9)
            while (state := self._exchange(self.control.address, self._epoch, PATIENCE_NS)) != ANSWERED:
                if state == STOPPED or self.control["poison"]:
                    self._gpu.wait_end(END_S)
                    raise self._stopped()
                if self._gpu.ended() or time.monotonic_ns() > limit:
                    raise self._silent()
            answered = time.monotonic_ns()
            self.control.reset[:] = 0
            self.control["steps"] = self.control["steps"] + self.program.steps
            return self._stamp(published, answered)

    def poison(self, reason: Poison = Poison.HOST) -> None:
        """Stop at the next wait; from any thread."""
        if not self.control["poison"]:
            self.control["poison"] = reason

    def close(self) -> None:
        """End the kernel and give back what it held; idempotent."""
        self._end()

    # --- looking in ---------------------------------------------------------------------------------------------
    def read(self, arena: Arena) -> Bytes:
        """A copy of an arena as it is on the device; between beats."""
        address = int(self._addresses[arena])
        return self._gpu.read(address, self.program.arenas[arena])

    def trace(self) -> NDArray[np.int64]:
        """[waves, blocks, STAMPS]: the moments of each wave of the last beat, ns of the GPU's clock (`kernel.layout`).

        Empty where the kernel was not asked to record them.
        """
        waves, blocks = self.program.waves if self._trace else 0, self.program.blocks
        size = 8 * layout.STAMPS * waves * blocks
        return self._gpu.read(self._trace, size).view(np.int64).reshape(waves, blocks, layout.STAMPS)

    def late_block(self) -> tuple[int, int]:
        """The block that is furthest behind, and how many barriers it has reached: the watchdog's view."""
        sync = self._gpu.read(int(self._context[layout.SYNC]), layout.sync_bytes(self.program.blocks))
        arrived = sync[layout.ARRIVED :].view("<i8")
        block = int(arrived.argmin())
        return block, int(arrived[block]) // self.program.blocks

    # --- helpers ------------------------------------------------------------------------------------------------
    def _place(self, arenas: DeviceArenas, budget_s: float, heartbeat_s: float) -> NDArray[np.int64]:
        """Everything that the kernel uses, in device memory or mapped; the context's words."""
        program, gpu = self.program, self._gpu
        host_io, addresses = arenas.io, arenas.addresses
        self._addresses = np.array(addresses, np.int64)
        inputs, outputs = (transfers(program, direction) for direction in (Direction.INPUT, Direction.OUTPUT))
        words = len(self.control.active)
        tasks = task_table(program)
        encoded = np.zeros((2 * max(len(program.payloads), 1), MAP_BYTES), np.uint8)
        for item in tensor_maps(program, self._shape):
            base = addresses[item.arena] + item.offset
            place = 2 * item.payload + item.which
            encoded[place] = gpu.encode_map(base, item.dtype, item.sizes, item.strides, item.box, item.swizzled)
        maps = gpu.place(encoded.tobytes())
        orders = order_table(program, tasks, self._shape, addresses, maps)
        streams, stream_starts = stream_table(program, tasks, self._shape, addresses, maps)
        scratch = scratch_bytes(program, 4 * SCRATCH_WORDS)
        self._trace = gpu.allocate(8 * layout.STAMPS * program.waves * program.blocks) if self._traced else 0
        values = {
            "control_page": gpu.map(self.control.address, 64 + 16 * words),
            "watch": gpu.map(self._watch.ctypes.data, layout.WATCH_BYTES),
            "sync": gpu.allocate(layout.sync_bytes(program.blocks)),
            "orders": gpu.place(orders.tobytes()),
            "agenda": gpu.place(agenda_table(program, tasks, addresses[Arena.WEIGHTS]).tobytes() + LOOK_AHEAD),
            "state": addresses[Arena.STATE],
            "io": addresses[Arena.IO],
            "host_io": gpu.map(host_io.ctypes.data, host_io.nbytes),
            "image": gpu.place(self.image),
            "active": gpu.allocate(8 * words),
            "reset": gpu.allocate(8 * words),
            "inputs": gpu.place(inputs.tobytes()),
            "outputs": gpu.place(outputs.tobytes()),
            "scratch": gpu.allocate(program.blocks * THREADS * scratch),
            "scratch_bytes": scratch,
            "input_count": len(inputs),
            "output_count": len(outputs),
            "slots": program.slots,
            "mask_words": words,
            "slab": program.arenas[Arena.STATE] // program.slots,
            "waves": program.waves,
            "budget_ns": int(budget_s * 1e9),
            "heartbeat_ns": int(heartbeat_s * 1e9),
            "streams": gpu.place(streams.tobytes() + LOOK_AHEAD),
            "stream_starts": gpu.place(stream_starts.tobytes()),
            "trace": self._trace,
        }
        return np.array([values[name] for name in layout.CONTEXT], np.int64)

    def _stamp(self, published: int, answered: int) -> int:
        """Bring the GPU's time stamps onto the host's monotonic clock; the beat's duration in ns.

        The GPU's clock runs at its own rate from its own origin: the distance between the clocks is corrected, beat
        by beat, as little as makes the beat lie between its publication and its answer.
        """
        start, end = self.control["start_ns"], self.control["end_ns"]
        self._ahead = min(max(self._ahead, published - start), answered - end)
        self.control["start_ns"], self.control["end_ns"] = start + self._ahead, end + self._ahead
        return end - start

    def _stopped(self) -> KernelError:
        reason, stalled, watch = self.control["poison"], self.control["stalled"], self._watch.view("<u4")
        if stalled:
            return self._stalled(stalled - 1, int(watch[layout.LATE_BLOCK // 4]) - 1)
        if watch[layout.LOST // 4]:
            return KernelError(
                "the kernel ended because its host did not stir", wanted="a heartbeat",
                found="none for too long", hint="Was the process suspended? Load the profile again.",
            )  # fmt: skip
        names = {poison.value: poison.name for poison in Poison}
        return KernelError(
            "the kernel is stopped", wanted="a running kernel", found=f"poison {names.get(reason, reason)}",
            hint="Load the profile again.",
        )  # fmt: skip

    def _stalled(self, wave: int, block: int) -> KernelError:
        program = self.program
        labels = sorted({program.labels[t["payload"]] for t in program.tasks if t["wave"] == wave})
        return KernelError(
            f"the kernel stalled in wave {wave} ({', '.join(labels)})", wanted="every block within its budget",
            found=f"block {block} did not arrive", hint="Load the profile again.",
        )  # fmt: skip

    def _silent(self) -> KernelError:
        """The kernel gives no answer and did not poison itself: say where it stands."""
        self.poison(Poison.STALLED)
        if self._gpu.ended():
            return KernelError(
                "the kernel ended in mid-beat", wanted="an answer", found="none", hint="Load the profile again."
            )
        block, barriers = self.late_block()
        return KernelError(
            "the kernel does not answer", wanted=f"an answer within {self._budget_s + 1:g} s",
            found=f"block {block} at barrier {barriers}", hint="End this process and load the profile again.",
        )  # fmt: skip


def require_fit(device: Device, program: Program) -> None:
    """Refuse a program that was made for another kind of GPU: `TargetError`."""
    if device.capability != CAPABILITY or device.multiprocessors != program.blocks:
        raise TargetError(
            f"GPU {device.ordinal} ({device.name}) cannot run this profile",
            wanted=f"compute capability {CAPABILITY} and {program.blocks} multiprocessors",
            found=f"{device.capability} and {device.multiprocessors}",
            hint="Build the profile for this GPU's target, or load it with target='cpu'.",
        )


# --- the end ------------------------------------------------------------------------------------------------------
def _run_pulse(pulse: Any, watch: Bytes, end: Bytes, keep: Sequence[object]) -> None:
    """The body of the heartbeat's thread; its frame keeps the memory that it touches."""
    pulse(watch.ctypes.data + layout.HEARTBEAT, end.ctypes.data, PULSE_US)


def _stop(gpu: Gpu, control: ControlPage, end: Bytes, thread: threading.Thread, keep: Sequence[object]) -> None:
    if not control["poison"]:
        control["poison"] = Poison.STOP
    if gpu.wait_end(END_S):
        gpu.close()
    end[0] = 1
    if thread.is_alive():
        thread.join(timeout=1.0)
