"""A block of GPU threads in plain Python: block-wide bodies (`wpk.kernel.blockwise`) run on a program's bytes.

Slow, and blind to what only a GPU does (what it costs, what is seen of other blocks' writes), but every index, every
shuffle and every barrier is executed, by as many threads as a block has. Device functions are copied with the globals
that mean the GPU replaced; what a body calls in `wpk.kernel.ptx` has a row here.
"""

from __future__ import annotations

import ctypes
import math
import threading
import types as python
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from wpk.kernel import cuda_library, ptx
from wpk.kernel.control import ControlPage
from wpk.kernel.layout import ORDER_ADDRESSES, ORDER_BYTES, SHARED_LIMIT, THREADS, Shape
from wpk.ops import memory
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OFFSET_MASK, Arena
from wpk.scheduler.program import Program

i32, i64, f32 = np.int32, np.int64, np.float32
SCRATCH = 16384  # bytes of a thread
PATIENCE_S = 60.0  # of a barrier: longer means that a thread does not come


def _number(address: int, kind: Any) -> Any:
    return np.frombuffer((ctypes.c_char * np.dtype(kind).itemsize).from_address(int(address)), kind)


def _bits(x: Any, kind: Any) -> Any:
    return np.asarray(x).reshape(1).view(kind)[0]


class Block:
    """What the threads of a block share."""

    def __init__(self, threads: int = THREADS) -> None:
        self.threads, self.own = threads, threading.local()
        self.shared = np.zeros(SHARED_LIMIT, np.uint8)
        self.all = threading.Barrier(threads, timeout=PATIENCE_S)
        self.warps = [threading.Barrier(32, timeout=PATIENCE_S) for _ in range(threads // 32)]
        self.lanes: list[list[Any]] = [[None] * 32 for _ in range(threads // 32)]
        self.named: dict[tuple[int, int], threading.Barrier] = {}
        self.lock = threading.Lock()
        self.failed: list[BaseException] = []

    # --- ptx --------------------------------------------------------------------------------------------------------
    def thread_index(self) -> Any:
        return i32(self.own.thread)

    def barrier(self) -> None:
        self.all.wait()

    def barrier_named(self, number: Any, count: Any) -> None:
        with self.lock:
            key = int(number), int(count)
            self.named.setdefault(key, threading.Barrier(int(count), timeout=PATIENCE_S))
        self.named[key].wait()

    def warp_barrier(self) -> None:
        self.warps[self.own.thread // 32].wait()

    def _exchanged(self, x: Any, lane: int) -> Any:
        warp = self.own.thread // 32
        self.lanes[warp][self.own.thread % 32] = x
        self.warps[warp].wait()
        found = self.lanes[warp][lane]
        self.warps[warp].wait()
        return found

    def shuffle(self, x: Any, lane: Any) -> Any:
        assert type(x) is f32
        return self._exchanged(x, int(lane) & 31)

    def shuffle_32(self, x: Any, lane: Any) -> Any:
        assert type(x) is i32
        return self._exchanged(x, int(lane) & 31)

    def shuffle_xor(self, x: Any, o: Any) -> Any:
        assert type(x) is f32
        return self._exchanged(x, self.own.thread % 32 ^ int(o))

    def shuffle_xor_32(self, x: Any, o: Any) -> Any:
        assert type(x) is i32
        return self._exchanged(x, self.own.thread % 32 ^ int(o))

    def _lanes(self, x: Any) -> list[int]:
        assert type(x) is i32
        warp = self.own.thread // 32
        self.lanes[warp][self.own.thread % 32] = x
        self.warps[warp].wait()
        found = [int(v) for v in self.lanes[warp]]
        self.warps[warp].wait()
        return found

    def warp_add(self, x: Any) -> Any:
        return i32(sum(self._lanes(x)))

    def warp_min(self, x: Any) -> Any:
        return i32(min(self._lanes(x)))

    def warp_max(self, x: Any) -> Any:
        return i32(max(self._lanes(x)))

    def shared_load(self, at: Any) -> Any:
        return self.shared[int(at) : int(at) + 4].view(f32)[0]

    def shared_load_32(self, at: Any) -> Any:
        return self.shared[int(at) : int(at) + 4].view(i32)[0]

    def shared_load_64(self, at: Any) -> Any:
        return self.shared[int(at) : int(at) + 8].view(i64)[0]

    def shared_store_64(self, at: Any, x: Any) -> None:
        assert at % 8 == 0
        self.shared[int(at) : int(at) + 8].view(i64)[:] = x

    def shared_load_4(self, at: Any) -> Any:
        assert at % 16 == 0
        return tuple(self.shared[int(at) : int(at) + 16].view(f32))

    def shared_store(self, at: Any, *x: Any) -> None:
        assert at % (4 * len(x)) == 0 and all(type(v) is f32 for v in x)
        self.shared[int(at) : int(at) + 4 * len(x)].view(f32)[:] = x

    shared_store_2 = shared_store_4 = shared_store

    def shared_store_32(self, at: Any, x: Any) -> None:
        assert type(x) is i32
        self.shared[int(at) : int(at) + 4].view(i32)[:] = x

    def load_l2(self, at: Any) -> Any:
        return _number(at, f32)[0]

    load_constant_f32 = load_order_f32 = load_l2

    def load_l2_32(self, at: Any) -> Any:
        return _number(at, i32)[0]

    load_constant_32 = load_order_32 = load_l2_32

    def load_order(self, at: Any) -> Any:
        return _number(at, i64)[0]

    load_constant = load_order

    def load_l2_4(self, at: Any) -> Any:
        assert at % 16 == 0
        return tuple(_number(at + 4 * i, f32)[0] for i in range(4))

    load_constant_4 = load_l2_4

    def load_l2_4_once(self, at: Any, policy: Any) -> Any:
        return self.load_l2_4(at)

    def store_1(self, at: Any, *x: Any) -> None:
        assert at % (4 * len(x)) == 0 and all(type(v) is f32 for v in x)
        for i, value in enumerate(x):
            _number(at + 4 * i, f32)[0] = value

    store_4 = store_1

    def store_32(self, at: Any, x: Any) -> None:
        assert type(x) is i32
        _number(at, i32)[0] = x

    def store_u16(self, at: Any, x: Any) -> None:
        assert type(x) is i32
        _number(at, np.uint16)[0] = int(x) & 0xFFFF

    def evict_first(self) -> Any:
        return i64(0)

    def renewed(self, x: Any) -> Any:
        return i64(x)

    def renewed_32(self, x: Any) -> Any:
        return i32(x)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return f32(np.float64(a) * np.float64(b) + np.float64(c))

    def quotient(self, a: Any, b: Any) -> Any:
        assert type(a) is i32 and type(b) is i32
        return i32(int(int(a) / int(b)))

    def advanced(self, a: Any, b: Any, at: Any) -> Any:
        assert type(a) is i32 and type(b) is i32
        return i64(int(a) * int(b) + int(at))

    def maximum(self, a: Any, b: Any) -> Any:
        return f32(np.fmax(a, b))

    def exp2(self, x: Any) -> Any:
        return f32(2.0 ** float(x)) if x > -150 else f32(0.0)

    def log2(self, x: Any) -> Any:
        return f32(math.log2(x))

    def reciprocal(self, x: Any) -> Any:
        return f32(1.0) / f32(x)

    def inverse_root(self, x: Any) -> Any:
        return f32(1.0 / math.sqrt(float(x)))

    def float_of_bits(self, x: Any) -> Any:
        return _bits(i32(x), f32)

    def bits_of_float(self, x: Any) -> Any:
        return _bits(f32(x), i32)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ptx.{name} has no row in {__name__}")


class Emulator:
    """Runs bodies as one block."""

    def __init__(self) -> None:
        self.block = Block()
        self._made: dict[Any, Any] = {}
        self._own: dict[Any, Any] = {
            ptx: self.block,
            cuda_library.shared_base: lambda: i32(0),
            cuda_library._view_f32: lambda at, n: self._view(at, n, f32),
            cuda_library._view_i32: lambda at, n: self._view(at, n, i32),
            cuda_library._view_i64: lambda at, n: self._view(at, n, i64),
            cuda_library._OVERRIDES[memory.view_u16]: lambda at, n: self._view(at, n, np.uint16),
            cuda_library._bits_of: self.block.bits_of_float,
            cuda_library._from_bits: self.block.float_of_bits,
            cuda_library._select: lambda condition, a, b: a if condition else b,
            ptx.fma: self.block.fma,
        }

    def _view(self, at: Any, n: Any, kind: Any) -> Any:
        size = max(int(n), 0) * np.dtype(kind).itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(int(at)), kind)

    def translate(self, function: Any) -> Callable[..., Any]:
        """A device function, or what one is made of, as a plain function."""
        source = getattr(function, "py_func", function)
        if source not in self._made:
            space = {name: self._value(v) for name, v in source.__globals__.items() if name in source.__code__.co_names}
            space["__builtins__"] = __builtins__
            cells = tuple(python.CellType(self._value(c.cell_contents)) for c in source.__closure__ or ())
            self._made[source] = python.FunctionType(
                source.__code__, space, source.__name__, source.__defaults__, cells
            )
        return self._made[source]

    def _value(self, value: Any) -> Any:
        try:
            if value in self._own:
                return self._own[value]
        except TypeError:
            return value
        if getattr(value, "__name__", "") == "numba.cuda":
            local = SimpleNamespace(array=lambda size, kind: np.zeros(size, str(kind)))
            return SimpleNamespace(local=local)
        if isinstance(value, python.ModuleType) and value.__name__.startswith("wpk."):
            return SimpleNamespace(**{n: self._value(v) for n, v in vars(value).items() if not n.startswith("__")})
        source = getattr(value, "py_func", value)
        if isinstance(source, python.FunctionType) and (source.__module__ or "wpk.").startswith("wpk."):
            return self.translate(value)
        for name, known in ptx.BY_NAME.items():
            if value is known:
                return getattr(self.block, name)
        return value

    def run(self, body: Any, *arguments: int) -> None:
        """A body with these arguments, by all threads of the block; the last is its scratch memory."""
        function = self.translate(body)
        errors: list[BaseException] = []

        def thread(index: int) -> None:
            self.block.own.thread = index
            try:
                with np.errstate(all="ignore"):
                    function(*[i64(a) for a in arguments[:-1]], i64(arguments[-1] + index * SCRATCH))
            except BaseException as error:
                errors.append(error)
                self.block.all.abort()
                for barrier in (*self.block.warps, *self.block.named.values()):
                    barrier.abort()

        threads = [threading.Thread(target=thread, args=(i,)) for i in range(self.block.threads)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]


class EmulatedKernel:
    """Has of `CudaKernel` what tests of single operators need: one task after the other, each by a whole block."""

    def __init__(self, program: Program, arenas: list[npt.NDArray[np.uint8]], image: Any, **options: Any) -> None:
        self.program, self.arenas, self.control = program, arenas, ControlPage(program.slots)
        self._bodies = {code: cuda_library.block_body(name, Shape(0)) for code, name in enumerate(program.operators)}
        self._emulator = Emulator()
        self._scratch = np.zeros(THREADS * SCRATCH, np.uint8)

    def read(self, arena: Arena) -> npt.NDArray[np.uint8]:
        return self.arenas[arena].copy()

    def close(self) -> None:
        """Nothing is held."""

    def beat(self) -> int:
        bases = [a.ctypes.data for a in self.arenas]
        for task in sorted(self.program.tasks, key=lambda t: int(t["wave"])):
            payload = self.program.payloads[task["payload"]]
            order = np.zeros(ORDER_BYTES, np.uint8)
            order[:128] = np.frombuffer(payload.tobytes(), np.uint8)
            for operand in range(7):
                reference = int(payload["reference"][operand])
                if reference != ABSENT:
                    place = bases[reference >> ARENA_SHIFT] + (reference & OFFSET_MASK)
                    order[ORDER_ADDRESSES + 8 * operand :][:8].view(i64)[0] = place
            rectangle = [int(task[key]) for key in ("slot_lo", "slot_hi", "part_lo", "part_hi")]
            live, scratch = self.control.active.ctypes.data, self._scratch.ctypes.data
            self._emulator.run(self._bodies[int(payload["opcode"])], order.ctypes.data, 0, *rectangle, live, scratch)
        return 0
