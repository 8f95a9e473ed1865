"""Products of f32 on tensor cores, which take TF32: f32 with 10 bits of mantissa. Weights in tiles, sums in f32.

The weights' tiles are those of `wpk.ops.tiles`, but for a chunk's depth: 128 bytes of a row are 32 f32, a piece of 16
bytes is 4 of them. They are rounded to TF32 (to nearest, ties away from zero) when they are packed; of x the low bits
are dropped, as tensor cores do (PTX ISA, "mma", .tf32).

A GPU's tile of x has `rows` rows: whole sessions, `rows // frames` of them, where their frames fit, else a piece of one
session's frames. A part is a share of the weight's rows for one of the pieces into which frames are cut:

    part p = share * frame_tiles + tile        frame_tiles = ceil(frames / rows)
    frames of a tile                           [frames tile // frame_tiles, frames (tile + 1) // frame_tiles)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numba.extending import register_jitable

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32
from wpk.ops.legal import DTypes, common, first_broken
from wpk.ops.math32 import INT, F
from wpk.ops.memory import view_f32, view_i32, view_i64
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, parameter, present
from wpk.ops.scalars import ACTIVATION_MEANING, scalar
from wpk.ops.simd import ACTIVATIONS, activate_in_place, matmul_rows
from wpk.ops.tiles import check_tiles, chunks_of, packed_tiles, part_rows, parts_rows, tile_rules, unpacked_tiles

DEPTH = 32  # k of a chunk: 128 bytes of a row
ALIGNED = 4  # f32 of 16 bytes: how far rows of x are apart is a multiple
ROWS = (64, 128)  # of x, that a GPU's tile may have
BIAS, RESIDUAL = 1, 2  # bits of `tf32_matmul`'s roles


# --- the numbers --------------------------------------------------------------------------------------------------
@scalar
def rounded_tf32(x):
    """The nearest TF32, ties away from zero; not for NaN."""
    return math32.from_bits(INT(INT(math32.bits_of(x) + INT(0x1000)) & INT(-0x2000)))


@scalar
def cut_tf32(x):
    """x without the bits that TF32 has not."""
    return math32.from_bits(INT(math32.bits_of(x) & INT(-0x2000)))


def rounded_to_tf32(array: Array) -> Array:
    """`rounded_tf32` of an array: float32. NaN stays NaN."""
    values = np.asarray(array, np.float32)
    with np.errstate(over="ignore"):  # only NaN wraps, and is replaced
        bits = (values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), values, bits.view(np.float32))


def cut_to_tf32(array: Array) -> Array:
    """`cut_tf32` of an array: float32."""
    return (np.asarray(array, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# --- weights ------------------------------------------------------------------------------------------------------
@operator("pack_tf32_tiles", version=1)
class PackTf32Tiles(Operator):
    """A weight [n, k] f32 rounded to TF32, in the order of its tiles: [n * ceil(k / 32) * 32], zeros beyond k.

    n a multiple of 8; shares: of the rows, none of more than 176.
    """

    weight = operand("n k", weight=True)
    shares: int = attr(1)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_tiles(self.name, dims["n"], dims["k"], self.shares, depth=DEPTH)
        return (f32(tile_bytes(dims["n"], dims["k"]) // 4),)

    def meaning(self, weight: Array) -> Array:
        return packed_tiles(rounded_to_tf32(weight), self.shares, depth=DEPTH)

    def cost(self, *types: Type) -> Cost:
        return Cost({})


def tile_bytes(n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]."""
    return 4 * n * chunks_of(k, DEPTH) * DEPTH


# --- the product --------------------------------------------------------------------------------------------------
@register_jitable(error_model="numpy")
def frame_tiles(frames, rows):
    """Pieces into which a session's frames are cut for tiles of so many rows."""
    return (frames + rows - 1) // rows


def unit_slots(frames: int, rows: int) -> int:
    """Sessions of which a tile of so many rows takes all frames; 1 where it has not even room for one."""
    return max(1, rows // frames)


def product_rules(n: int, k: int, shares: int, frames: int, step: int, size: int) -> tuple[tuple[str, bool], ...]:
    """What a product wants to run as `tf32_matmul`, each with its name."""
    return (
        *tile_rules(n, k, shares, 0, DEPTH),
        ("frames and step >= 1", min(frames, step) >= 1),
        (f"a step in multiples of {ALIGNED}", step % ALIGNED == 0),
        ("whole windows of x", (frames - 1) * step + k <= size),
    )


@operator("tf32_matmul", version=1)
class Tf32Matmul(Operator):
    """y[t] = act(W x[t*step : t*step + k] + bias) + residual[t], W [n, k] packed by `pack_tf32_tiles`.

    x f32, flat; then as `roles` says: bias f32 [n], residual f32 [frames, n]. y [frames, n] f32. W and x are taken as
    TF32; sums in f32, in an order that neither the batch nor the shares change. rows: of x in a GPU's tile.

    Payload: operands x, tiles, bias, residual, y; parameters n, k, shares, frames, step, numbers of x, activation,
    rows, roles. On a GPU x must be at a multiple of 16 bytes in every slot: whoever applies this sees to it.
    """

    x = operand("...", weight=False)
    tiles = operand("t", weight=True)
    extra = operand("...", variadic=True, optional=True)
    n: int = attr()
    k: int = attr()
    shares: int = attr(1)
    frames: int = attr(1)
    step: int = attr(ALIGNED)
    rows: int = attr(ROWS[0])
    activation: str = attr("none")
    roles: int = attr(0)
    semantic_parameters: ClassVar = {6: range(len(ACTIVATIONS)), 7: ROWS}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        size = dims.like("x").size
        wanted = first_broken(*product_rules(self.n, self.k, self.shares, self.frames, self.step, size))
        if wanted is not None:
            raise GraphError(f"{self.name}: what it cannot take", wanted=wanted, found=f"x of {size}, {self}")
        if self.rows not in ROWS:
            raise GraphError(f"{self.name}: rows", wanted=" | ".join(map(str, ROWS)), found=self.rows)
        if self.activation not in ACTIVATIONS:
            raise GraphError(f"{self.name}: activation", wanted=" | ".join(ACTIVATIONS), found=self.activation)
        tiles = f32(tile_bytes(self.n, self.k) // 4)
        if dims.like("tiles") != tiles:
            raise GraphError(f"{self.name}: operand 'tiles'", wanted=tiles, found=dims.like("tiles"))
        extra = [t for name, t in dims.types.items() if name.startswith("extra")]
        if self.roles & ~(BIAS | RESIDUAL) or len(extra) != len(self._extras()):
            raise GraphError(f"{self.name}: operands", wanted=f"those of roles {self.roles}", found=len(extra))
        sizes = {"bias": self.n, "residual": self.frames * self.n}
        for name, found in zip(self._extras(), extra, strict=True):
            if found.size != sizes[name]:
                raise GraphError(f"{self.name}: {name}", wanted=f"{sizes[name]} numbers", found=found)
        return (f32(self.frames, self.n),)

    def meaning(self, x: Array, tiles: Array, *extra: Array) -> Array:
        given = dict(zip(self._extras(), extra, strict=True))
        weight = cut_to_tf32(unpacked_tiles(tiles, self.n, self.k, self.shares, depth=DEPTH)).astype(np.float64)
        flat = cut_to_tf32(x.reshape(-1)).astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(flat, self.k)[:: self.step][: self.frames]
        y = ACTIVATION_MEANING[self.activation](windows @ weight.T + given.get("bias", np.zeros(1)).reshape(-1))
        return y + given["residual"].reshape(y.shape) if "residual" in given else y

    def cost(self, *types: Type) -> Cost:
        given = dict(zip(self._extras(), types[2:], strict=True))
        read = (types[0], *(t for name, t in given.items() if name == "residual"))
        return Cost(
            {"tf32": 2 * self.frames * self.n * self.k},
            weight_bytes=4 * self.n * self.k + (given["bias"].bytes if "bias" in given else 0),
            activation_bytes=sum(t.bytes for t in read) + 4 * self.frames * self.n,
        )

    def parts(self, *types: Type) -> int:
        return self.shares * frame_tiles(self.frames, self.rows)

    def slot_grain(self) -> int:
        return unit_slots(self.frames, self.rows)

    def places(self, count: int) -> tuple[int, ...]:
        place = {"bias": 2, "residual": 3}
        return (0, 1, *(place[e] for e in self._extras()), 4)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        code = ACTIVATIONS[self.activation]
        return (self.n, self.k, self.shares, self.frames, self.step, types[0].size, code, self.rows, self.roles)

    def _extras(self) -> list[str]:
        return [name for bit, name in ((BIAS, "bias"), (RESIDUAL, "residual")) if self.roles & bit]

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, k, _, frames, _, size = parameters[:6]
        return (4 * size, tile_bytes(n, k), 4 * n, 4 * frames * n, 4 * frames * n)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        n, k, shares, frames, step, size, _, _, roles = parameters
        there = [bit for bit, place in ((BIAS, 2), (RESIDUAL, 3)) if place < operands and present[place]]
        return first_broken(
            *common(cls, parameters, present, words=9, sizes=6, operands=5, optional=(2, 3)),
            *product_rules(n, k, shares, frames, step, size),
            ("the operands that the roles name", roles == sum(there)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32,) * 5

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Sequence[Extent]:
        n, _, shares, frames, *_, rows = parameters[:8]
        ways, found = frame_tiles(frames, rows), []
        while lo < hi:  # up to the end of a share, or whole shares
            whole = lo % ways == 0 and hi - lo >= ways
            end = hi - hi % ways if whole else min(hi, lo - lo % ways + ways)
            first, last = parts_rows(n, shares, ways, lo, end)
            begin, stop = (0, frames) if whole else (frames * t // ways for t in (lo % ways, lo % ways + end - lo))
            found.append(Extent(4 * (begin * n + first), 4 * (last - first), stop - begin, 4 * n))
            lo = end
        return found


# --- on a CPU -----------------------------------------------------------------------------------------------------
# A block of rows of x times a block of columns, so much of k at a time, all in a body's scratch: the weights as the
# panels that `matmul_rows` takes, x without the bits that are dropped, and the sums.
_X_ROWS, _COLUMNS, _RUN = 64, 32, 128
_X = 4 * _COLUMNS * _RUN
_SUMS = _X + 4 * _X_ROWS * _RUN
_X_AT = _SUMS + 4 * _X_ROWS * _COLUMNS
_SUMS_AT = _X_AT + 8 * _X_ROWS
assert _SUMS_AT + 8 * _X_ROWS <= 64 * 1024 and _RUN % DEPTH == 0


@body(Tf32Matmul)
def tf32_matmul_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, k, shares, frames = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    step, activation, ways = parameter(record, 4), parameter(record, 6), frame_tiles(frames, parameter(record, 7))
    tiles, chunks = address(record, arenas, 1, 0), (k + 31) // 32
    bias = address(record, arenas, 2, 0) if present(record, 2) else 0
    has_residual = present(record, 3)
    x_at, sums_at = view_i64(scratch + _X_AT, _X_ROWS), view_i64(scratch + _SUMS_AT, _X_ROWS)
    for r in range(_X_ROWS):
        x_at[r], sums_at[r] = scratch + _X + 4 * _RUN * r, scratch + _SUMS + 4 * _COLUMNS * r
    for part in range(part_lo, part_hi):
        lo, hi = part_rows(n, shares, ways, part)
        first, last = frames * (part % ways) // ways, frames * (part % ways + 1) // ways
        own, source = last - first, tiles + 1024 * (lo // 8 * chunks)
        count = own * (slot_hi - slot_lo)
        for base in range(0, count, _X_ROWS):
            x_rows = min(_X_ROWS, count - base)
            for column in range(0, hi - lo, _COLUMNS):
                columns = min(_COLUMNS, hi - lo - column)
                for at in range(0, k, _RUN):
                    depth = min(_RUN, k - at)
                    _panels(scratch, source, hi - lo, column, columns, at, depth)
                    for r in range(x_rows):
                        slot, t = slot_lo + (base + r) // own, first + (base + r) % own
                        _copied(x_at[r], address(record, arenas, 0, slot) + 4 * (t * step + at), depth)
                    matmul_rows(
                        x_at, x_at, x_rows, depth, 0, scratch, depth * 64, 0, (columns + 15) // 16, columns, 0,
                        sums_at, at > 0, sums_at, 0,
                    )  # fmt: skip
                for r in range(x_rows):
                    slot, t = slot_lo + (base + r) // own, first + (base + r) % own
                    place = 4 * (t * n + lo + column)
                    if bias != 0:
                        _add(sums_at[r], bias + 4 * (lo + column), columns)
                    activate_in_place(sums_at[r], columns, activation)
                    if has_residual:
                        _add(sums_at[r], address(record, arenas, 3, slot) + place, columns)
                    y, values = (
                        view_f32(address(record, arenas, 4, slot) + place, columns),
                        view_f32(sums_at[r], columns),
                    )
                    for j in range(columns):
                        y[j] = values[j]


@scalar
def _panels(out, tiles, rows, column, columns, at, depth):
    """[2][depth][16] of the weights of `columns` rows from a share's row `column` on, k from `at` on; else zeros."""
    panels = view_f32(out, depth * 32)
    for i in range(depth * 32):
        panels[i] = F(0.0)
    for j in range(columns):
        row, place = column + j, j // 16 * depth * 16 + j % 16
        for i in range(depth):
            chunk, piece = (at + i) // 32, (at + i) % 32 // 4
            start = tiles + 128 * (rows * chunk + row) + 16 * (piece ^ (row & 7))
            panels[place + 16 * i] = cut_tf32(view_f32(start, 4)[i % 4])


@scalar
def _copied(out, x, count):
    """`count` f32 as TF32."""
    values, given = view_i32(out, count), view_i32(x, count)
    for i in range(count):
        values[i] = INT(given[i] & INT(-0x2000))


@scalar
def _add(sums, more, count):
    """sums += more, `count` f32 each."""
    total, given = view_f32(sums, count), view_f32(more, count)
    for i in range(count):
        total[i] += given[i]
