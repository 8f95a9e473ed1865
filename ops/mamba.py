"""One step of Mamba-2 (Dao & Gu 2024, "Transformers are SSMs"): what follows the input projection, and the recurrence.

The projection makes rows z | xBC | dt. `mamba2_split` turns them into what the recurrence reads: the gate silu(z), the
causal depthwise convolution of xBC over the last four steps, and step size and decay of each head. `mamba2_projection`
is the same with the product in front of it, the rows never leaving the core that made them; both run one function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from numba.extending import register_jitable

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32, scalars
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.legal import NOT_NEGATIVE, DTypes, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, parameter, parameter_f32
from wpk.ops.scalars import silu64
from wpk.ops.tiles import (
    TILE_SLOTS,
    check_product,
    inverse_rms,
    part_rows,
    parts_rows,
    product64,
    product_cost,
    scale_rows,
    squares_of,
    tile_bytes,
    tile_rows,
    tile_rules,
)
from wpk.ops.vector import dot

TAPS = 4  # of the convolution: the ring's three rows and the new one
BLOCK = 8  # rows of the projection that a part of `mamba2_split` has
STATE = 128  # columns of a row of the recurrent state
LINEAR = 20.0  # from here on softplus is the identity, as in PyTorch
PART_ROWS = (40, 32, 24, 16, 8)  # of the state, largest first: what a part may have


# --- sizes --------------------------------------------------------------------------------------------------------
def split_sizes(name: str, n: int, ring: Type, constants: Type) -> tuple[int, int, int]:
    """Rows of z, xBC and dt (DI, CC, NH) of a projection of n rows; `GraphError` where the operands contradict it."""
    channels = ring.shape[1]
    heads, left = divmod(constants.size - (TAPS + 1) * channels, 3)
    inner = n - channels - heads
    sizes = (inner, channels, heads)
    if left or min(sizes) < 1 or any(size % BLOCK for size in sizes):
        raise GraphError(
            f"{name}: rows of z | xBC | dt", wanted=f"three multiples of {BLOCK} that add up to {n}",
            found=f"{inner} | {channels} | {heads}, as ring {ring} and constants {constants} say",
        )  # fmt: skip
    return sizes


def mixed_size(inner: int, channels: int, heads: int) -> int:
    """Values that the recurrence reads: gate, convolution, and four a head."""
    return inner + channels + 4 * heads


def _mixed_place(row: int, inner: int, channels: int) -> int:
    """Where what a row of the projection becomes starts in `mixed`: a row each, but four for a row of dt."""
    return row + 3 * max(0, row - inner - channels)


def split_writes(sizes: Sequence[int], ring: bool, lo: int, hi: int) -> Extent | tuple[()]:
    """Bytes of `mixed`, or of the ring, that rows [lo, hi) of the projection write; few touch the ring."""
    inner, channels, _ = sizes
    if not ring:
        first, last = (_mixed_place(row, inner, channels) for row in (lo, hi))
        return Extent(4 * first, 4 * (last - first))
    first, last = max(0, lo - inner), min(channels, hi - inner)
    return Extent(2 * first, 2 * (last - first), TAPS - 1, 2 * channels) if first < last else ()


# --- meaning ------------------------------------------------------------------------------------------------------
def split64(p: Array, ring: Array, constants: Array) -> tuple[Array, Array]:
    """The meaning of `mamba2_split`: (mixed, the ring after the step)."""
    channels = ring.shape[1]
    heads = (constants.size - (TAPS + 1) * channels) // 3
    inner = p.size - channels - heads
    ends = np.cumsum([TAPS * channels, channels, heads, heads])
    taps, offset, dt_bias, a, skip = np.split(constants, ends)
    z, xbc, dt = np.split(p, [inner, inner + channels])
    window = np.concatenate([ring, rounded_to_bf16(xbc)[None]])
    dt = dt + dt_bias
    dt = np.where(dt > LINEAR, dt, np.logaddexp(0.0, dt))
    by_head = np.stack([dt, np.exp(dt * a), skip, np.zeros(heads)], axis=1)
    convolved = offset + (taps.reshape(TAPS, channels) * window).sum(0)
    return np.concatenate([silu64(z), silu64(convolved), by_head.reshape(-1)]), window[1:]


# --- what the bodies share ----------------------------------------------------------------------------------------
@register_jitable
def split_rows(p, lo, hi, inner, channels, heads, ring, constants, mixed):
    """What rows [lo, hi) of a projection become. Byte addresses: p of row lo, f32; ring, constants, mixed whole.

    The ring is shifted in place, each of its columns by the one row that belongs to it.
    """
    rows, out = view_f32(p, hi - lo), view_f32(mixed, inner + channels + 4 * heads)
    for i in range(lo, min(hi, inner)):
        out[i] = math32.silu(rows[i - lo])
    first, last = max(lo - inner, 0), min(hi - inner, channels)
    count = max(last - first, 0)
    oldest, middle = view_u16(ring + 2 * first, count), view_u16(ring + 2 * (channels + first), count)
    newest = view_u16(ring + 2 * (2 * channels + first), count)
    tap_0, tap_1 = view_f32(constants + 4 * first, count), view_f32(constants + 4 * (channels + first), count)
    tap_2 = view_f32(constants + 4 * (2 * channels + first), count)
    tap_3 = view_f32(constants + 4 * (3 * channels + first), count)
    offset = view_f32(constants + 4 * (4 * channels + first), count)
    for i in range(count):
        a, b, c = oldest[i], middle[i], newest[i]
        new = scalars.bf16_bits(rows[inner + first - lo + i])
        total = offset[i] + tap_0[i] * scalars.bf16_value(a)
        total += tap_1[i] * scalars.bf16_value(b)
        total += tap_2[i] * scalars.bf16_value(c)
        total += tap_3[i] * scalars.bf16_value(new)
        oldest[i], middle[i], newest[i] = b, c, new
        out[inner + first + i] = math32.silu(total)
    convolved = inner + channels
    by_head = view_f32(constants + 4 * 5 * channels, 3 * heads)
    for i in range(max(lo, convolved), hi):
        head = i - convolved
        raw = rows[i - lo] + by_head[head]
        dt = math32.select(raw > F(20.0), raw, math32.softplus(raw))
        out[convolved + 4 * head] = dt
        out[convolved + 4 * head + 1] = math32.exp(dt * by_head[heads + head])
        out[convolved + 4 * head + 2] = by_head[2 * heads + head]
        out[convolved + 4 * head + 3] = F(0.0)


# --- after the projection -----------------------------------------------------------------------------------------
@operator("mamba2_split", version=1)
class Mamba2Split(Operator):
    """What the recurrence reads, out of the input projection: (mixed f32[DI + CC + 4 NH], the ring after the step).

    p f32[DI + CC + NH], rows z | xBC | dt, each of the three a multiple of 8. ring bf16[3, CC]: xBC of the last three
    steps, oldest first. constants f32[5 CC + 3 NH]: taps [4, CC] | bias of the convolution [CC] | dt_bias [NH] |
    A [NH] (negative) | D [NH].

    mixed[:DI] = silu(z). mixed[DI : DI + CC] = silu(bias + sum_j taps[j] window[j]), the window being the ring and
    then xBC rounded to bf16. mixed[DI + CC + 4 h :] = dt, exp(dt A_h), D_h, 0 with dt = softplus(p + dt_bias_h), which
    is linear above 20. The ring takes xBC as its newest row, in place.
    """

    p = operand("n", weight=False)
    ring = operand("3 c", dtypes=DType.BF16, weight=False)
    constants = operand("m", weight=True)
    result_count: ClassVar[int] = 2
    fused: ClassVar[str | None] = "mamba2_projection"
    state_operands: ClassVar[tuple[int, ...]] = (1,)
    alias: ClassVar[Mapping[int, int]] = {1: 1}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        sizes = split_sizes(self.name, dims["n"], dims.like("ring"), dims.like("constants"))
        return (f32(mixed_size(*sizes)), dims.like("ring"))

    def meaning(self, p: Array, ring: Array, constants: Array) -> tuple[Array, Array]:
        return split64(p, ring, constants)

    def cost(self, *types: Type) -> Cost:
        p, ring, constants = types
        mixed, _ = self.infer(types)
        return Cost(
            {"f32": split_flops(p.size, ring)}, weight_bytes=constants.bytes, state_bytes=2 * ring.bytes,
            activation_bytes=p.bytes + mixed.bytes,
        )  # fmt: skip

    def parts(self, *types: Type) -> int:
        return types[0].size // BLOCK

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return split_sizes(self.name, types[0].size, *types[1:])

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        inner, channels, heads = parameters[:3]
        ring = 2 * (TAPS - 1) * channels
        constants = 4 * ((TAPS + 1) * channels + 3 * heads)
        return (4 * (inner + channels + heads), ring, constants, 4 * mixed_size(inner, channels, heads), ring)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=3), blocks_of_rows(parameters[:3]))

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.F32, DType.BF16, DType.F32, DType.F32, DType.BF16)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | tuple[()]:
        return split_writes(parameters[:3], operand == 4, BLOCK * lo, BLOCK * hi)


@body(Mamba2Split)
def mamba2_split_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    inner, channels, heads = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    lo, hi = part_lo * BLOCK, part_hi * BLOCK
    constants = address(record, arenas, 2, 0)
    for slot in range(slot_lo, slot_hi):
        p, mixed = address(record, arenas, 0, slot), address(record, arenas, 3, slot)
        ring = address(record, arenas, 4, slot)
        split_rows(p + 4 * lo, lo, hi, inner, channels, heads, ring, constants, mixed)


@operator("mamba2_projection", version=1)
class Mamba2Projection(Operator):
    """`mamba2_split` of a product with tiles: (mixed f32[DI + CC + 4 NH], the ring after the step, in place).

    x [k] bf16, tiles bf16 of W [n, k] by `pack_tiles` with the same shares, squares f32 [ceil(k / 128)], of which
    p = W x / sqrt(sum(squares) / k + eps); constants and ring as those of `mamba2_split`, n = DI + CC + NH.
    """

    x = operand("k", dtypes=DType.BF16, weight=False)
    tiles = operand("t", dtypes=DType.BF16, weight=True)
    squares = operand("s", weight=False)
    constants = operand("m", weight=True)
    ring = operand("3 c", dtypes=DType.BF16, weight=False)
    n: int = attr()
    k: int = attr()
    shares: int = attr(1)
    eps: float = attr(0.0)
    semantic_parameters: ClassVar = {7: NOT_NEGATIVE}
    task_slots: ClassVar[int] = TILE_SLOTS
    result_count: ClassVar[int] = 2
    state_operands: ClassVar[tuple[int, ...]] = (4,)
    alias: ClassVar[Mapping[int, int]] = {1: 4}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_product(self.name, dims, self.n, self.k, self.shares, self.eps)
        sizes = split_sizes(self.name, self.n, dims.like("ring"), dims.like("constants"))
        return (f32(mixed_size(*sizes)), dims.like("ring"))

    def meaning(
        self, x: Array, tiles: Array, squares: Array, constants: Array, ring: Array
    ) -> tuple[Array, Array]:  # fmt: skip
        p = product64(x, tiles, squares, self.n, self.k, self.shares, self.eps)
        return split64(p, ring, constants)

    def cost(self, *types: Type) -> Cost:
        x, _, squares, constants, ring = types
        mixed, _ = self.infer(types)
        product = product_cost(self.n, self.k, (x, squares), (mixed,), constants.bytes)
        flops = {**product.flops, "f32": split_flops(self.n, ring)}
        return dataclasses.replace(product, flops=flops, state_bytes=2 * ring.bytes)

    def parts(self, *types: Type) -> int:
        return self.shares

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        sizes = split_sizes(self.name, self.n, types[4], types[3])
        return (self.n, self.k, self.shares, *sizes, squares_of(self.k), float(self.eps))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, k, _, inner, channels, heads, squares = parameters[:7]
        ring = 2 * (TAPS - 1) * channels
        constants = 4 * ((TAPS + 1) * channels + 3 * heads)
        mixed = 4 * mixed_size(inner, channels, heads)
        return (2 * k, tile_bytes(n, k), 4 * squares, constants, ring, mixed, ring)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        n, k, shares, inner, channels, heads, squares = parameters[:7]
        return first_broken(
            *common(cls, parameters, present, words=8),
            *tile_rules(n, k, shares, 0),
            blocks_of_rows((inner, channels, heads)),
            ("n rows of z, xBC and dt", n == inner + channels + heads),
            ("the sums of squares of k elements", squares == squares_of(k)),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.BF16, DType.BF16, DType.F32, DType.F32, DType.BF16, DType.F32, DType.BF16)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | tuple[()]:
        n, _, shares = parameters[:3]
        first, last = parts_rows(n, shares, 0, lo, hi)
        return split_writes(parameters[3:6], operand == 6, first, last)


@body(Mamba2Projection)
def mamba2_projection_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, k, shares = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    inner, channels, heads = parameter(record, 3), parameter(record, 4), parameter(record, 5)
    squares, eps = parameter(record, 6), parameter_f32(record, 7)
    tiles, constants = address(record, arenas, 1, 0), address(record, arenas, 3, 0)
    for part in range(part_lo, part_hi):
        lo, hi = part_rows(n, shares, 0, part)
        for slot in range(slot_lo, slot_hi):
            tile_rows(tiles, n, k, shares, 0, part, address(record, arenas, 0, slot), scratch)
            scale_rows(scratch, hi - lo, inverse_rms(address(record, arenas, 2, slot), squares, k, eps))
            mixed, ring = address(record, arenas, 5, slot), address(record, arenas, 6, slot)
            split_rows(scratch, lo, hi, inner, channels, heads, ring, constants, mixed)


def split_flops(n: int, ring: Type) -> int:
    """Arithmetic after the projection: one operation a row and two a tap, transcendentals not counted."""
    return n + 2 * TAPS * ring.shape[1]


def blocks_of_rows(sizes: Sequence[int]) -> tuple[str, bool]:
    """The rule that z, xBC and dt are whole blocks of rows."""
    return f"rows of z, xBC and dt that are multiples of {BLOCK}", all(size % BLOCK == 0 for size in sizes)


# --- the recurrence -----------------------------------------------------------------------------------------------
@operator("mamba2_step", version=1)
class Mamba2Step(Operator):
    """The state's advance and its output: (y f32[DI], the state after the step, in place).

    mixed f32[DI + CC + 4 NH] is that of `mamba2_split`, CC = DI + 2 Gm 128 for Gm groups: the convolution's rows are
    x [NH, P] | B [Gm, 128] | C [Gm, 128]. state f32[NH, P, 128], DI = NH P. Head h is of group h // (NH / Gm).

    S[h, p, n] = decay_h S[h, p, n] + (dt_h x[h, p]) B[g, n];  y[h, p] = sum_n S[h, p, n] C[g, n] + D_h x[h, p].
    """

    mixed = operand("m", weight=False)
    state = operand("h p n", weight=False)
    result_count: ClassVar[int] = 2
    state_operands: ClassVar[tuple[int, ...]] = (1,)
    alias: ClassVar[Mapping[int, int]] = {1: 1}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        heads, rows, columns = dims.like("state").shape
        if columns != STATE:
            raise GraphError("mamba2_step: columns of the state", wanted=STATE, found=columns)
        if rows % 8:
            raise GraphError("mamba2_step: rows of a head", wanted="a multiple of 8", found=rows)
        groups, left = divmod(dims["m"] - 4 * heads - 2 * heads * rows, 2 * STATE)
        if left or groups < 1 or heads % groups:
            wanted = f"{2 * heads * rows + 4 * heads} + 256 groups, groups that divide {heads} heads"
            raise GraphError("mamba2_step: size of mixed", wanted=wanted, found=dims["m"])
        return (f32(heads * rows), dims.like("state"))

    def meaning(self, mixed: Array, state: Array) -> tuple[Array, Array]:
        heads, rows, _ = state.shape
        inner = heads * rows
        groups = (mixed.size - 4 * heads - 2 * inner) // (2 * STATE)
        _, x, b, c, by_head = np.split(mixed, np.cumsum([inner, inner, STATE * groups, STATE * groups]))
        x = x.reshape(heads, rows)
        b, c = (np.repeat(v.reshape(groups, STATE), heads // groups, axis=0) for v in (b, c))
        dt, decay, skip, _ = by_head.reshape(heads, 4).T[:, :, None]
        following = decay[:, :, None] * state + (dt * x)[:, :, None] * b[:, None]
        return (np.einsum("hpn,hn->hp", following, c) + skip * x).reshape(-1), following

    def cost(self, *types: Type) -> Cost:
        mixed, state = types
        # The gate in front of `mixed` is not read here; y is as long.
        return Cost({"f32": 5 * state.size}, state_bytes=2 * state.bytes, activation_bytes=mixed.bytes)

    def parts(self, *types: Type) -> int:
        heads, _, _, rows = self.parameters(*types)
        return int(heads * types[1].shape[1] // rows)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        heads, rows, _ = types[1].shape
        groups = (types[0].size - 4 * heads - 2 * heads * rows) // (2 * STATE)
        return (heads, rows, groups, next(r for r in PART_ROWS if rows % r == 0))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        heads, rows, groups = parameters[:3]
        inner, state = heads * rows, 4 * heads * rows * STATE
        return (4 * mixed_size(inner, inner + 2 * STATE * groups, heads), state, 4 * inner, state)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        heads, rows, groups, part = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=4),
            (f"rows of a part in {PART_ROWS}", part in PART_ROWS),
            ("rows of a part to divide those of a head", rows % max(part, 1) == 0),
            ("groups to divide the heads", heads % max(groups, 1) == 0),
        )

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        row = 4 if operand == 2 else 4 * STATE
        return Extent(row * parameters[3] * lo, row * parameters[3] * (hi - lo))


@body(Mamba2Step)
def mamba2_step_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    heads, head_rows, groups = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    rows = parameter(record, 3)
    inner, per_group = heads * head_rows, heads // groups
    for slot in range(slot_lo, slot_hi):
        mixed, state = address(record, arenas, 0, slot), address(record, arenas, 3, slot)
        x, y = view_f32(mixed + 4 * inner, inner), operand_f32(record, arenas, 2, slot, inner)
        keys = mixed + 8 * inner
        queries = keys + 4 * STATE * groups
        by_head = view_f32(queries + 4 * STATE * groups, 4 * heads)
        for i in range(part_lo * rows, part_hi * rows):
            head = i // head_rows
            group = head // per_group
            dt, decay, skip = by_head[4 * head], by_head[4 * head + 1], by_head[4 * head + 2]
            place = state + 4 * STATE * i
            row, b = view_f32(place, STATE), view_f32(keys + 4 * STATE * group, STATE)
            step = dt * x[i]
            for n in range(STATE):
                row[n] = decay * row[n] + step * b[n]
            y[i] = dot(place, queries + 4 * STATE * group, STATE) + skip * x[i]
