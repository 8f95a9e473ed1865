"""Products with bf16 weights, which are read once a beat for the whole cohort: weights in tiles, and what they feed.

A matrix [n, k] is cut into parts: row shares of whole groups of 8 rows, each cut again along k into splits of whole
chunks of 64. A part is one run of memory, chunk after chunk, so that a block streams what it works on; in a chunk each
row is 128 bytes whose eight 16-byte pieces are swapped by the row's number, which is how a GPU's tensor memory
accelerator lays rows out for its matrix units (CUDA C++ Programming Guide, "TMA Swizzle", CU_TENSOR_MAP_SWIZZLE_128B).

    part p = share * splits + split       row groups [G share // shares, G (share + 1) // shares), G = n / 8
                                          chunks     [C split // splits, C (split + 1) // splits), C = ceil(k / 64)
    byte of a part        1024 (g C + groups c), its first group g and chunk c and its number of groups
    byte in it            128 (rows chunk + row) + 16 (piece ^ (row & 7)) + 2 element, rows and chunks from its first

(`wpk.ops.tf32` has the same order with f32, of which a chunk has 32.)

What comes before such a product is normalised by it: RMSNorm is y / sqrt(mean x^2 + eps) on the rows of the product,
given x times the norm's weight and the sums of squares (`rms_norm_terms`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numba.extending import register_jitable

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, bf16, f32
from wpk.ops.evaluate import rounded_to_bf16
from wpk.ops.legal import NOT_NEGATIVE, DTypes, Rule, common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32, view_u16
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, parameter, parameter_f32, present
from wpk.ops.scalars import ACTIVATION_MEANING, bf16_bits, bf16_value, scalar
from wpk.ops.simd import ACTIVATIONS, activate_in_place

GROUP = 8  # rows that are never parted
DEPTH = 64  # k of a chunk: 128 bytes of a row
PIECES = 8  # of a chunk's row, of 8 elements that stay together
TILE_SLOTS = 128  # most sessions of a task: what a GPU's block holds activations for
MOST_ROWS = 176  # of a part: what a GPU's block holds sums for
SQUARES_BLOCK = 128  # elements whose squares one number sums up
BIAS, SQUARES = 1, 2  # bits of `tiled_matmul`'s roles
OUT_CODES = {"f32": 0, "bf16": 1}
TILE_SCRATCH = 48 * 1024  # bytes that `tile_rows` works in
assert 4 * (MOST_ROWS * (1 + DEPTH) + GROUP * DEPTH) <= TILE_SCRATCH


# --- the order of tiles -------------------------------------------------------------------------------------------
def least_shares(n: int) -> int:
    """The fewest shares of n rows of which none has more than `MOST_ROWS`."""
    return -(-n // MOST_ROWS)


def chunks_of(k: int, depth: int = DEPTH) -> int:
    """Chunks that k elements fill; the last one is padded with zeros. depth: of a chunk."""
    return -(-k // depth)


def tile_sessions(slots: int) -> int:
    """Rows of x, most often one a session, that a GPU's tile of a product has where so many slots are served."""
    return TILE_SLOTS // 2 if slots <= TILE_SLOTS // 2 else TILE_SLOTS


def squares_of(k: int) -> int:
    """Numbers that hold the sums of squares of k elements."""
    return -(-k // SQUARES_BLOCK)


def tile_rules(n: int, k: int, shares: int, splits: int, depth: int = DEPTH) -> tuple[Rule, ...]:
    """What a matrix wants to be packed, each with its name; splits = 0 means that k is not split."""
    sound = min(n, k, shares) >= 1
    return (
        ("n, k and shares >= 1", sound),
        (f"a multiple of {GROUP} rows", n % GROUP == 0),
        ("a group of rows for each share", sound and shares <= n // GROUP),
        (f"at most {MOST_ROWS} rows a share", sound and -(-(n // GROUP) // shares) <= MOST_ROWS // GROUP),
        (f"a chunk of {depth} elements for each split", sound and 0 <= splits <= chunks_of(k, depth)),
    )


def check_tiles(name: str, n: int, k: int, shares: int, splits: int = 0, depth: int = DEPTH) -> None:
    """Raise what `tile_rules` says against such a matrix."""
    wanted = first_broken(*tile_rules(n, k, shares, splits, depth))
    if wanted is not None:
        found = f"[{n}, {k}] in {shares} shares and {splits} splits"
        raise GraphError(f"{name}: a matrix that cannot be packed", wanted=wanted, found=found)


def _ranges(n: int, k: int, shares: int, splits: int, depth: int) -> Iterator[tuple[slice, slice, slice]]:
    """For each part its elements of the packed weight, its groups and its chunks."""
    groups, chunks, ways, at = n // GROUP, chunks_of(k, depth), max(splits, 1), 0
    for share in range(shares):
        rows = slice(groups * share // shares, groups * (share + 1) // shares)
        for split in range(ways):
            some = slice(chunks * split // ways, chunks * (split + 1) // ways)
            size = (rows.stop - rows.start) * (some.stop - some.start) * GROUP * depth
            yield slice(at, at + size), rows, some
            at += size


def _pieces(matrix: Array, depth: int) -> Array:
    """A matrix by group, row, chunk and piece; a piece is one item, so that NumPy moves it in one go."""
    n, k = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, -k % depth))) if k % depth else np.ascontiguousarray(matrix)
    return padded.view(_piece_of(matrix, depth)).reshape(n // GROUP, GROUP, chunks_of(k, depth), PIECES)


def _piece_of(array: Array, depth: int) -> np.dtype[Any]:
    return np.dtype((np.void, depth // PIECES * array.itemsize))


def _part_of(packed: Array, place: slice, chunks: slice, depth: int) -> Array:
    """A part of packed pieces by chunk, group, row and piece."""
    pieces = packed[place.start * PIECES // depth : place.stop * PIECES // depth]
    return pieces.reshape(chunks.stop - chunks.start, -1, GROUP, PIECES)


def packed_tiles(weight: Array, shares: int, splits: int = 0, depth: int = DEPTH) -> Array:
    """A matrix [n, k] in the order of its tiles, [n * ceil(k / depth) * depth], of the same dtype.

    depth: elements of a chunk's row, which are 128 bytes in an arena: 64 of bf16.
    """
    blocks = _pieces(weight, depth)
    packed = np.empty(blocks.size, blocks.dtype)
    for place, rows, chunks in _ranges(weight.shape[0], weight.shape[1], shares, splits, depth):
        part = _part_of(packed, place, chunks, depth)
        for row, piece in itertools.product(range(GROUP), range(PIECES)):
            part[:, :, row, piece ^ row] = blocks[rows, row, chunks, piece].T
    return packed.view(weight.dtype)


def unpacked_tiles(tiles: Array, n: int, k: int, shares: int, splits: int = 0, depth: int = DEPTH) -> Array:
    """The matrix [n, k] that `packed_tiles` packed."""
    packed = np.ascontiguousarray(tiles).view(_piece_of(tiles, depth))
    blocks = np.empty((n // GROUP, GROUP, chunks_of(k, depth), PIECES), packed.dtype)
    for place, rows, chunks in _ranges(n, k, shares, splits, depth):
        part = _part_of(packed, place, chunks, depth)
        for row, piece in itertools.product(range(GROUP), range(PIECES)):
            blocks[rows, row, chunks, piece] = part[:, :, row, piece ^ row].T
    return blocks.reshape(n, -1).view(tiles.dtype)[:, :k]


@operator("pack_tiles", version=1)
class PackTiles(Operator):
    """A weight [n, k] bf16 in the order of its tiles: [n * ceil(k / 64) * 64], zeros beyond k; n a multiple of 8.

    shares: of the rows, none of more than 176; splits: of k, 0 as 1. See the head of this file for the order.
    """

    layout_only = True
    weight = operand("n k", dtypes=DType.BF16, weight=True)
    shares: int = attr(1)
    splits: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_tiles(self.name, dims["n"], dims["k"], self.shares, self.splits)
        return (bf16(dims["n"] * chunks_of(dims["k"]) * DEPTH),)

    def meaning(self, weight: Array) -> Array:
        return packed_tiles(weight, self.shares, self.splits)

    def cost(self, *types: Type) -> Cost:
        return Cost({})


# --- what bodies do with a part -----------------------------------------------------------------------------------
@register_jitable(error_model="numpy")
def part_rows(n, shares, splits, part):
    """The rows [lo, hi) of a part of a matrix of n rows."""
    groups, share = n // 8, part // max(splits, 1)
    return groups * share // shares * 8, groups * (share + 1) // shares * 8


def parts_rows(n: int, shares: int, splits: int, lo: int, hi: int) -> tuple[int, int]:
    """The rows that the parts [lo, hi) have together."""
    return part_rows(n, shares, splits, lo)[0], part_rows(n, shares, splits, hi - 1)[1]


@register_jitable(error_model="numpy")
def tile_rows(tiles, n, k, shares, splits, part, x, out):
    """A part's sums over its k: the rows' products with x (bf16 [k] at an address), f32 from `out` on.

    `out` is memory of `TILE_SCRATCH` bytes, in which this works; what it leaves there are at most `MOST_ROWS` results.
    Each of 64 positions of a chunk has a sum of its own over the chunks, in order; they are added as a tree.
    """
    ways, chunks = max(splits, 1), (k + 63) // 64
    lo, hi = part_rows(n, shares, splits, part)
    rows, split = hi - lo, part % ways
    first, last = chunks * split // ways, chunks * (split + 1) // ways
    source = tiles + 1024 * (lo // 8 * chunks + rows // 8 * first)
    spread, sums = out + 4 * 176, out + 4 * (176 + 8 * 64)
    zeros = view_f32(sums, rows * 64)
    for i in range(rows * 64):
        zeros[i] = F(0.0)
    for chunk in range(first, last):
        _spread(spread, x + 128 * chunk, min(64, k - 64 * chunk))
        for row in range(rows):
            _multiply(sums + 256 * row, source + 128 * row, spread + 256 * (row & 7))
        source += 128 * rows
    results = view_f32(out, rows)
    for row in range(rows):
        results[row] = _folded(sums + 256 * row)


@scalar
def _spread(spread, x, count):
    """`count` bf16 and zeros up to 64 as f32 [8][64]: for each row number the order in which its pieces are stored."""
    given, values = view_u16(x, count), view_f32(spread, 512)
    for i in range(count):
        values[i] = bf16_value(given[i])
    for i in range(count, 64):
        values[i] = F(0.0)
    for row in range(1, 8):
        for piece in range(8):
            for i in range(8):
                values[64 * row + 8 * (piece ^ row) + i] = values[8 * piece + i]


@scalar
def _multiply(sums, weight, x):
    """sums += weight * x over 64 elements, each by itself; the weight is bf16."""
    total, factors, values = view_f32(sums, 64), view_u16(weight, 64), view_f32(x, 64)
    for i in range(64):
        total[i] += bf16_value(factors[i]) * values[i]


@scalar
def _folded(sums):
    """The sum of 64 f32: halves onto each other."""
    total, width = view_f32(sums, 64), 32
    while width > 0:
        for i in range(width):
            total[i] += total[width + i]
        width //= 2
    return total[0]


@scalar
def inverse_rms(squares, count, k, eps):
    """1 / sqrt(sum of `count` f32 at an address / k + eps), the sum taken in order."""
    given, total = view_f32(squares, count), F(0.0)
    for i in range(count):
        total += given[i]
    return F(1.0) / F(math.sqrt(total / F(k) + eps))


@scalar
def scale_rows(values, rows, factor):
    """Multiply `rows` f32 at an address."""
    y = view_f32(values, rows)
    for i in range(rows):
        y[i] *= factor


@scalar
def store_rows(out, first, values, rows, code):
    """`rows` f32 at the address `values` into elements from `first` on of f32 or, with code 1, bf16 at `out`."""
    y = view_f32(values, rows)
    if code == 1:
        rounded = view_u16(out + 2 * first, rows)
        for i in range(rows):
            rounded[i] = bf16_bits(y[i])
    else:
        same = view_f32(out + 4 * first, rows)
        for i in range(rows):
            same[i] = y[i]


# --- the product --------------------------------------------------------------------------------------------------
def inverse_rms64(squares: Array | None, k: int, eps: float) -> float:
    """What a product's rows are multiplied by: `inverse_rms` in float64, 1 without sums of squares."""
    return 1.0 if squares is None else float(1.0 / np.sqrt(squares.sum() / k + eps))


def product64(
    x: Array, tiles: Array, squares: Array | None, n: int, k: int, shares: int, eps: float
) -> Array:  # fmt: skip
    """W x [n] of tiles that no split cuts, times `inverse_rms64`, in float64."""
    return unpacked_tiles(tiles, n, k, shares) @ x * inverse_rms64(squares, k, eps)


def check_squares(name: str, found: Type, k: int) -> None:
    """Raise where these are not the sums of squares of k elements."""
    if found != f32(squares_of(k)):
        raise GraphError(f"{name}: sums of squares", wanted=f32(squares_of(k)), found=found)


def check_eps(name: str, eps: float) -> None:
    """Raise where nothing may be divided by the root of a mean square and this."""
    if not (eps >= 0.0 and math.isfinite(eps)):
        raise GraphError(f"{name}: eps", wanted=">= 0", found=eps)


def check_product(name: str, dims: Dims, n: int, k: int, shares: int, eps: float) -> None:
    """Raise where x, tiles, squares and eps are not those of a normalised product with a matrix [n, k]."""
    check_tiles(name, n, k, shares)
    check_operands(name, dims, n, k)
    check_squares(name, dims.like("squares"), k)
    check_eps(name, eps)


def product_cost(n: int, k: int, others: Sequence[Type], results: Sequence[Type], weights: int = 0) -> Cost:
    """Cost of a product with tiles: `others` are session values beside the tiles; weights: bytes beside theirs."""
    moved = sum(t.bytes for t in (*others, *results))
    return Cost({"bf16": 2 * n * k}, weight_bytes=2 * n * k + weights, activation_bytes=moved)


@operator("tiled_matmul", version=1)
class TiledMatmul(Operator):
    """y = act(s W x + bias), W [n, k] packed by `pack_tiles` with the same shares and splits; sums in f32.

    x [k] bf16, tiles bf16, then as `roles` says: bias f32 [n], squares f32 [ceil(k / 128)], of which
    s = 1 / sqrt(sum(squares) / k + eps) (without them, s = 1). y [n] of dtype `out` (f32 or bf16). With splits >= 1
    y is f32 [splits, n]: the sums of each split by itself, without bias, activation or rounding.
    """

    x = operand("k", dtypes=DType.BF16, weight=False)
    tiles = operand("t", dtypes=DType.BF16, weight=True)
    extra = operand("...", variadic=True, optional=True)
    n: int = attr()
    k: int = attr()
    shares: int = attr(1)
    splits: int = attr(0)
    activation: str = attr("none")
    out: str = attr("f32")
    eps: float = attr(0.0)
    roles: int = attr(0)
    semantic_parameters: ClassVar = {4: range(len(ACTIVATIONS)), 7: NOT_NEGATIVE}
    task_slots: ClassVar[int] = TILE_SLOTS

    def results(self, dims: Dims) -> tuple[Type, ...]:
        check_tiles(self.name, self.n, self.k, self.shares, self.splits)
        check_operands(self.name, dims, self.n, self.k)
        if self.activation not in ACTIVATIONS:
            raise GraphError("tiled_matmul: activation", wanted=" | ".join(ACTIVATIONS), found=self.activation)
        if self.out not in OUT_CODES:
            raise GraphError("tiled_matmul: out", wanted=" | ".join(OUT_CODES), found=self.out)
        extra = [t for name, t in dims.types.items() if name.startswith("extra")]
        if self.roles & ~(BIAS | SQUARES) or len(extra) != len(self._extras()):
            raise GraphError("tiled_matmul: operands", wanted=f"those of roles {self.roles}", found=len(extra))
        for name, found in zip(self._extras(), extra, strict=True):
            if name == "squares":
                check_squares(self.name, found, self.k)
            elif found != f32(self.n):
                raise GraphError("tiled_matmul: bias", wanted=f32(self.n), found=found)
        if self.splits and (self.roles & BIAS or self.activation != "none" or self.out != "f32"):
            raise GraphError("tiled_matmul: sums of splits", wanted="no bias, activation or rounding", found=self)
        check_eps(self.name, self.eps)
        return (f32(self.splits, self.n) if self.splits else Type(DType(self.out), (self.n,)),)

    def meaning(self, x: Array, tiles: Array, *extra: Array) -> Array:
        given = dict(zip(self._extras(), extra, strict=True))
        weight = unpacked_tiles(tiles, self.n, self.k, self.shares, self.splits)
        scale = inverse_rms64(given.get("squares"), self.k, self.eps)
        if self.splits:
            cuts = [DEPTH * (chunks_of(self.k) * q // self.splits) for q in range(1, self.splits)]
            pieces = zip(np.split(weight, cuts, axis=1), np.split(x, cuts), strict=True)
            return np.stack([w @ v for w, v in pieces]) * scale
        y = ACTIVATION_MEANING[self.activation](weight @ x * scale + given.get("bias", 0.0))
        return rounded_to_bf16(y) if self.out == "bf16" else y

    def cost(self, *types: Type) -> Cost:
        given = dict(zip(self._extras(), types[2:], strict=True))
        others = (types[0], *(t for name, t in given.items() if name != "bias"))
        return product_cost(self.n, self.k, others, self.infer(types), given["bias"].bytes if "bias" in given else 0)

    def parts(self, *types: Type) -> int:
        return self.shares * max(self.splits, 1)

    def places(self, count: int) -> tuple[int, ...]:
        place = {"bias": 2, "squares": 3}
        return (0, 1, *(place[e] for e in self._extras()), 4)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        squares = squares_of(self.k) if self.roles & SQUARES else 0
        codes = (ACTIVATIONS[self.activation], OUT_CODES[self.out])
        return (self.n, self.k, self.shares, self.splits, *codes, squares, self.eps)

    def _extras(self) -> list[str]:
        return [name for bit, name in ((BIAS, "bias"), (SQUARES, "squares")) if self.roles & bit]

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n, k, _, splits, _, out, squares = parameters[:7]
        result = n * max(splits, 1) * (2 if out else 4)
        return (2 * k, tile_bytes(n, k), 4 * n, 4 * squares, result)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        n, k, shares, splits, activation, out, squares = parameters[:7]
        biased, scaled = (len(present) > 2 and present[2], len(present) > 3 and present[3])
        plain = (activation, out) == (0, 0) and not biased
        return first_broken(
            *common(cls, parameters, present, words=8, sizes=3, operands=5, optional=(2, 3)),
            *tile_rules(n, k, shares, splits),
            ("a code of a dtype", out in OUT_CODES.values()),
            ("sums of squares where they are counted", squares == (squares_of(k) if scaled else 0)),
            ("no bias, activation or rounding of splits", splits == 0 or plain),
        )

    @classmethod
    def operand_dtypes(cls, parameters: Sequence[int], given: DTypes) -> DTypes:
        return (DType.BF16, DType.BF16, DType.F32, DType.F32, DType.BF16 if parameters[5] else DType.F32)

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Sequence[Extent]:
        n, _, shares, splits, _, out = parameters[:6]
        width, ways, found = 2 if out else 4, max(splits, 1), []
        while lo < hi:  # up to the end of a share, or whole shares
            end = hi - hi % ways if lo % ways == 0 and hi - lo >= ways else min(hi, lo - lo % ways + ways)
            first, last = parts_rows(n, shares, splits, lo, end)
            lines = ways if lo % ways == 0 and end - lo >= ways else end - lo
            found.append(Extent(width * (lo % ways * n + first), width * (last - first), lines, width * n))
            lo = end
        return found


def check_operands(name: str, dims: Dims, n: int, k: int) -> None:
    """Raise where x and tiles are not those of a matrix [n, k]."""
    if dims["k"] != k:
        raise GraphError(f"{name}: operand 'x' does not fit", wanted=bf16(k), found=dims.like("x"))
    if dims["t"] != tile_bytes(n, k) // 2:
        raise GraphError(f"{name}: operand 'tiles'", wanted=bf16(tile_bytes(n, k) // 2), found=dims.like("tiles"))


def tile_bytes(n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]."""
    return 2 * n * chunks_of(k) * DEPTH


@body(TiledMatmul)
def tiled_matmul_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n, k, shares, splits = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    activation, code, squares = parameter(record, 4), parameter(record, 5), parameter(record, 6)
    tiles, eps = address(record, arenas, 1, 0), parameter_f32(record, 7)
    bias = address(record, arenas, 2, 0) if present(record, 2) else 0
    for part in range(part_lo, part_hi):
        lo, hi = part_rows(n, shares, splits, part)
        rows, split = hi - lo, part % max(splits, 1)
        for slot in range(slot_lo, slot_hi):
            tile_rows(tiles, n, k, shares, splits, part, address(record, arenas, 0, slot), scratch)
            if squares > 0:
                scale_rows(scratch, rows, inverse_rms(address(record, arenas, 3, slot), squares, k, eps))
            if bias != 0:
                y, offset = view_f32(scratch, rows), view_f32(bias + 4 * lo, rows)
                for i in range(rows):
                    y[i] += offset[i]
            activate_in_place(scratch, rows, activation)
            store_rows(address(record, arenas, 4, slot), split * n + lo, scratch, rows, code)
