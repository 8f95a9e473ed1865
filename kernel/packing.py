"""Weights on their way into a GPU's arenas: streamed in pieces, or made there, and put in tile order by a kernel.

A tensor of a checkpoint is copied in pieces into pinned memory, from there into scratch on the device, where the
kernel rounds each number to bf16 (nearest even, as `wpk.ops.evaluate.bf16_bits`) or to TF32 (as
`wpk.ops.tf32.rounded_tf32`) and stores it where `wpk.kernel.tile_order` says. Synthetic weights are computed where they
are stored. Two pieces are under way at a time, so that neither a file nor an arena is ever in host memory as a whole.

`pack` is target-neutral: numba-cuda makes the kernel `wpk_pack` of it (on any machine, kept as `wpk.kernel.cubin`
keeps the resident kernel), and tests compile it for the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from wpk.kernel.control import aligned_bytes
from wpk.kernel.cubin import Cubin, build_cubin_of, compile_ptx, key_of, require_numba_cuda, without_device
from wpk.kernel.driver import Gpu
from wpk.kernel.layout import THREADS
from wpk.kernel.tile_order import tile_offset
from wpk.ops import math32
from wpk.ops.math32 import INT, F
from wpk.ops.memory import view_f32, view_i32, view_u16
from wpk.ops.scalars import bf16_bits, bf16_value
from wpk.ops.tf32 import rounded_tf32

ENTRY = "wpk_pack"
PARAMETERS = (
    "source",  # address of the numbers to pack; unused for synthetic ones
    "kind",  # of the source: one of the four below
    "start",  # index of the first in its tensor, which synthetic numbers depend on
    "count",
    "first",  # index of the first in the target, in row-major order
    "target",  # address
    "stored",  # as what: one of STORED
    "n",  # rows, and
    "k",  # columns of the target
    "shares",  # of `tile_order`; 0: the target is row-major
    "splits",
    "key",  # of synthetic numbers, and the bits of two f32
    "offset",
    "scale",
    "flag",  # address of an i32 that becomes 1 where a number is not finite
)
F32, BF16, F16, SYNTHETIC = range(4)
STORED = {"f32": 0, "bf16": 1, "tf32": 2}  # tf32: f32 that have no more bits than that
WIDTH = {"f32": 4, "bf16": 2, "tf32": 4}  # bytes of a number
KINDS = {np.dtype(np.float32): F32, np.dtype(np.uint16): BF16, np.dtype(np.float16): F16}  # uint16: bf16's bits

STAGING_BYTES = 32 << 20  # of each of two pieces
COPIERS = 4  # threads that copy a piece out of a mapped file: page faults, not bandwidth, limit one
BLOCKS_PER_SM = 8
_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


# --- the kernel ---------------------------------------------------------------------------------------------------
@register_jitable
def synthetic_value(key, offset, scale, index):
    """Number `index` of a synthetic tensor, float32: the bits of `wpk.registry.weights.synthetic`."""
    z = _U(key) + _U(index + 1) * _GOLDEN
    z = (z ^ (z >> _U(30))) * _MIX_1
    z = (z ^ (z >> _U(27))) * _MIX_2
    z = z ^ (z >> _U(31))
    whole = np.int64(z >> _U(40)) - 8388608
    return F(offset + F(scale * F(F(whole) * F(2.0**-23))))


@register_jitable
def half_value(bits):
    """IEEE half precision by its bits, as float32."""
    word = np.int64(bits)
    sign, exponent, mantissa = INT((word & 0x8000) << 16), (word >> 10) & 31, word & 1023
    if exponent == 0:
        tiny = math32.bits_of(F(F(mantissa) * F(2.0**-24)))
        return math32.from_bits(INT(tiny | sign))
    biased = 255 if exponent == 31 else exponent + 112
    return math32.from_bits(INT(sign | INT(biased << 23) | INT(mantissa << 13)))


@register_jitable
def pack(
    lo, step, source, kind, start, count, first, target, stored, n, k, shares, splits, key, offset, scale, flag
):  # fmt: skip
    """Numbers lo, lo + step, ... of `count`."""
    for i in range(lo, count, step):
        if kind == 3:
            value = synthetic_value(key, math32.from_bits(INT(offset)), math32.from_bits(INT(scale)), start + i)
        elif kind == 2:
            value = half_value(view_u16(source + 2 * i, 1)[0])
        elif kind == 1:
            value = bf16_value(view_u16(source + 2 * i, 1)[0])
        else:
            value = view_f32(source + 4 * i, 1)[0]
        if (math32.bits_of(value) & INT(0x7F800000)) == INT(0x7F800000):
            view_i32(flag, 1)[0] = INT(1)
        at = first + i
        width = 2 if stored == 1 else 4
        place = at * width
        if shares > 0:
            place = tile_offset(n, k, shares, splits, at // k, at % k, width)
        if stored == 1:
            view_u16(target + place, 1)[0] = bf16_bits(value)
        elif stored == 2:
            view_f32(target + place, 1)[0] = rounded_tf32(value)
        else:
            view_f32(target + place, 1)[0] = value


def packing_ptx() -> str:
    """PTX of `pack` as a kernel whose threads take every so-manieth number."""
    require_numba_cuda()
    with without_device():
        from numba.cuda import types

        from wpk.kernel import ptx
        from wpk.kernel.cuda_library import translate

        arguments = ", ".join(PARAMETERS)
        source = [
            f"def {ENTRY}({arguments}):",
            "    block, blocks = np.int64(ptx.block_index()), np.int64(ptx.block_count())",
            "    threads = np.int64(ptx.thread_count())",
            f"    pack(block * threads + np.int64(ptx.thread_index()), blocks * threads, {arguments})",
        ]
        space: dict[str, Any] = {"np": np, "ptx": ptx, "pack": translate(pack)}
        exec("\n".join(source), space)
        return compile_ptx(space[ENTRY], types.void(*[types.int64] * len(PARAMETERS)), ENTRY)


def build_packing(folder: Path | None) -> Cubin:
    """The machine code of `pack`, from the cache or built now; folder as for `build_cubin`."""
    return build_cubin_of(key_of(("ptx", "cuda_library", "tile_order", "packing")), packing_ptx, folder, entry=ENTRY)


# --- the host's part ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Synthetic:
    """What numbers of a synthetic tensor are made of."""

    key: int
    offset: float
    scale: float


@dataclass(frozen=True)
class Target:
    """A weight on the device: its address, as what its numbers are stored (a key of STORED), [n, k], in tiles or
    (shares 0) row-major."""

    address: int
    stored: str
    n: int
    k: int
    shares: int = 0
    splits: int = 1


class Packer:
    """Packs tensors into device memory, one after the other, while the next is read; `close` waits for the last.

    marks: how many tensors can be told apart in `broken`.
    """

    def __init__(self, gpu: Gpu, cubin: Cubin, marks: int, staging_bytes: int = STAGING_BYTES) -> None:
        self.gpu, self._size, self._marks = gpu, staging_bytes, marks
        self._blocks = BLOCKS_PER_SM * gpu.device.multiprocessors
        self._module = gpu.module(cubin.image)
        self._function = gpu.function(self._module, ENTRY)
        self._flags = gpu.allocate(4 * marks)
        self._staging = [aligned_bytes(staging_bytes) for _ in range(2)]
        for memory in self._staging:
            gpu.map(memory.ctypes.data, memory.nbytes)
        self._scratch = [gpu.allocate(staging_bytes) for _ in range(2)]
        self._events: list[Any] = [None, None]  # when a piece's staging memory may be written again
        self._copiers = ThreadPoolExecutor(COPIERS, "wpk-weights")
        self._turn = 0

    def pack(
        self, source: NDArray[Any] | Synthetic, start: int, count: int, first: int, target: Target, mark: int
    ) -> None:
        """Numbers [start, start + count) of a tensor to where the target has its numbers from `first` on.

        source: the whole tensor; uint16 is bf16's bits, and what is neither float16 nor that is taken as float32.
        """
        if isinstance(source, Synthetic):
            self._start(0, SYNTHETIC, start, count, first, target, mark, source)
            return
        flat = source.reshape(-1)
        dtype = flat.dtype if flat.dtype in KINDS else np.dtype(np.float32)
        piece = self._size // dtype.itemsize
        for at in range(start, start + count, piece):
            numbers = min(piece, start + count - at)
            slot, self._turn = self._turn, 1 - self._turn
            if self._events[slot] is not None:
                self.gpu.await_mark(self._events[slot])
            staging = self._staging[slot][: numbers * dtype.itemsize]
            self._copy(flat[at : at + numbers], staging.view(dtype))
            self.gpu.send(self._scratch[slot], staging)
            self._start(self._scratch[slot], KINDS[dtype], at, numbers, first + at - start, target, mark)
            self._events[slot] = self.gpu.mark()

    def broken(self) -> list[int]:
        """The marks of tensors in which a number was not finite, of all that was packed so far."""
        self.gpu.settle()
        return [int(i) for i in np.flatnonzero(self.gpu.read(self._flags, 4 * self._marks).view(np.int32))]

    def close(self) -> None:
        """Wait for the last piece, and give back what packing needed."""
        self.gpu.settle()
        self._copiers.shutdown()
        for event in self._events:
            if event is not None:
                self.gpu.await_mark(event)
        for memory in self._staging:
            self.gpu.unmap(memory.ctypes.data)
        for address in (*self._scratch, self._flags):
            self.gpu.free(address)
        self.gpu.drop(self._module)

    def _copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        cuts = [len(source) * i // COPIERS for i in range(COPIERS + 1)]
        list(self._copiers.map(partial(_copy_range, source, target), cuts[:-1], cuts[1:]))

    def _start(
        self, source: int, kind: int, start: int, count: int, first: int, target: Target, mark: int,
        made: Synthetic | None = None,
    ) -> None:  # fmt: skip
        made = made or Synthetic(0, 0.0, 0.0)
        offset, scale = (int(bits) for bits in np.array([made.offset, made.scale], np.float32).view(np.int32))
        key = made.key - (1 << 64) if made.key >> 63 else made.key
        values = {
            "source": source, "kind": kind, "start": start, "count": count, "first": first, "target": target.address,
            "stored": STORED[target.stored], "n": target.n, "k": target.k,
            "shares": target.shares, "splits": target.splits,
            "key": key, "offset": offset, "scale": scale, "flag": self._flags + 4 * mark,
        }  # fmt: skip
        blocks = max(1, min(self._blocks, -(-count // THREADS)))
        self.gpu.start(self._function, blocks, THREADS, tuple(values[name] for name in PARAMETERS))


def _copy_range(source: NDArray[Any], target: NDArray[Any], lo: int, hi: int) -> None:
    with np.errstate(over="ignore"):  # beyond f32 becomes infinity, which the kernel marks
        np.copyto(target[lo:hi], source[lo:hi], casting="unsafe")
