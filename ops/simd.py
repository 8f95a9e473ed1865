"""The CPU matmul engine: linear, conv1d, DFT and the gates of LSTM/GRU all run on `matmul_rows`.

    y[r, n] = act(sum_k x_row(r)[k] * W[k, n] + sum_k x2_row(r)[k] * W[K1 + k, n] + bias[n]) + residual_row(r)[n]

Weights are float32 panels of 16 columns, [ceil(N / 16)][K1 + K2][16], zero padded (`pack_panels`). Rows of x, x2,
residual and y are byte addresses of contiguous float32, so overlapping conv windows, state rings and gathered
streams need no copy.

Slot invariance: every y[r, n] is one chain of fused multiply-adds over k, ascending, from +0, in one vector lane.
A tile shape decides only which rows and panels share registers, never the order of a chain; so the bits of a row
do not depend on the batch, on the row's place in it, or on how panels are split over threads. Hosts without fused
multiply-add do a multiply and an add instead, everywhere (llvm.fma would call libm there).

Reading order: TILE_TABLE (what the host gets), _tile_function (the inner loop in LLVM IR), matmul_rows (the loop nest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from wpk.ops import math32
from wpk.ops.memory import view_f32

PANEL = 16  # columns of a weight panel
ALIGNMENT = 64  # bytes; a panel's row of 16 floats is one cache line when the weights start on one

# --- Tile shapes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileTable:
    """Tile shapes for one kind of host.

    lanes: floats of a vector register. fused: the host has a fused multiply-add.
    shapes: (rows, panels), most rows first, ending with one row. A tile keeps rows * panels * 16 / lanes vector
    accumulators: enough to hide the latency of an FMA (8 on AVX2 and AVX-512: 4 cycles, 2 ports), few enough to
    leave registers for the weights and the broadcast x (the tests look for spills). `panels` divides the largest.
    """

    lanes: int
    fused: bool
    shapes: tuple[tuple[int, int], ...]

    @property
    def group(self) -> int:
        """Panels that share one pass over the rows: the widest tile."""
        return max(panels for _, panels in self.shapes)


# Name, LLVM features that the host must have, table. The first row that fits is used.
TILE_TABLE: tuple[tuple[str, frozenset[str], TileTable], ...] = (
    ("avx512", frozenset({"avx512f"}), TileTable(16, True, ((8, 2), (6, 2), (4, 4), (3, 4), (2, 4), (1, 4)))),
    ("avx2", frozenset({"avx2", "fma"}), TileTable(8, True, ((6, 1), (5, 1), (4, 1), (3, 2), (2, 2), (1, 4)))),
    ("neon", frozenset({"neon"}), TileTable(4, True, ((4, 1), (3, 1), (2, 2), (1, 2)))),
    ("sse", frozenset({"sse2"}), TileTable(4, False, ((2, 1), (1, 2)))),
    ("plain", frozenset(), TileTable(4, False, ((2, 1), (1, 1)))),
)


def host_features() -> frozenset[str]:
    """LLVM features that numba compiles for here, as numba sees them (its CPU_NAME and ENABLE_AVX settings count)."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    on = {item[1:] for item in features.split(",") if item.startswith("+")}
    if triple.startswith(("x86_64", "amd64")):
        on.add("sse2")
    if triple.startswith(("aarch64", "arm64")):
        on.add("neon")
    return frozenset(on)


def _host_table() -> tuple[str, TileTable]:
    features = host_features()
    return next((name, table) for name, wanted, table in TILE_TABLE if wanted <= features)


HOST, TILES = _host_table()

_MAX_ROWS, _MAIN_PANELS = TILES.shapes[0]
_GROUP = TILES.group
_LARGEST = tuple(max(s for s in TILES.shapes if s[0] <= rows) if rows else (0, 0) for rows in range(_MAX_ROWS + 1))
_TILE_ROWS = np.array([rows for rows, _ in _LARGEST])  # by rows left: rows of the tile to run next
_TILE_PANELS = np.array([panels for _, panels in _LARGEST])
_SCRATCH = _MAX_ROWS * _GROUP * PANEL
# Above this depth a group of panels outgrows half a typical L2 (512 KiB); the largest tile's panels are a group then.
_DEEP = 256 * 1024 // (_GROUP * PANEL * 4)
_UNROLL = 4

# --- The inner tile, in LLVM IR -------------------------------------------------------------------------------------

_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_POINTER = ir.PointerType()
# (out, out_stride, bias, x_rows, x2_rows, k1, k2, w, panel_stride, panels_live); addresses and strides in bytes.
_TILE_TYPE = ir.FunctionType(ir.VoidType(), [_I64] * 10)


def _tile_function(module: ir.Module, table: TileTable, rows: int, panels: int) -> ir.Function:
    """The function that computes `rows` x `panels` * 16 outputs into scratch; one copy a module.

    for each of the two segments (x, k1), (x2, k2):   accumulators and weight pointers pass through as phis
        for k in segment, unrolled by 4, then the rest:
            acc[r][p] = fma(broadcast(x_row[r][k]), w[p][k], acc[r][p])
    out[r][p * 16 ...] = acc[r][p] + bias[p * 16 ...]

    Panels at or beyond `panels_live` read the last live panel again, and their results are not used.
    """
    name = f"wpk_tile_{rows}x{panels}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, _TILE_TYPE, name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    out, out_stride, bias, x_rows, x2_rows, k1, k2, w, panel_stride, live = function.args
    lanes = table.lanes
    vector = ir.VectorType(_F32, lanes)
    per_panel = PANEL // lanes
    vectors = panels * per_panel
    vector_bytes = lanes * 4

    blocks = {
        n: function.append_basic_block(n) for n in ("entry", "segment", "four", "fours", "one", "ones", "next", "exit")
    }
    b = ir.IRBuilder(blocks["entry"])
    const = lambda value: ir.Constant(_I64, value)  # noqa: E731

    def load(kind: ir.Type, address: ir.Value, offset: int = 0, align: int = 4) -> ir.Value:
        pointer = b.gep(address, [const(offset)], source_etype=ir.IntType(8)) if offset else address
        return b.load(pointer, align=align, typ=kind)

    def advance(pointer: ir.Value, step: ir.Value) -> ir.Value:
        return b.gep(pointer, [step], source_etype=ir.IntType(8))

    def broadcast(address: ir.Value, offset: int) -> ir.Value:
        lane_0 = ir.Constant(ir.IntType(32), 0)
        first = b.insert_element(ir.Constant(vector, ir.Undefined), load(_F32, address, offset), lane_0)
        all_lane_0 = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), all_lane_0)

    def phis(kind: ir.Type, count: int) -> list[ir.Instruction]:
        return [b.phi(kind) for _ in range(count)]

    def join(targets: list[ir.Instruction], values: list[ir.Value], block: str) -> None:
        for phi, value in zip(targets, values, strict=True):
            phi.add_incoming(value, blocks[block])

    fma_type = ir.FunctionType(vector, [vector] * 3)
    fma = cgutils.get_or_insert_function(module, fma_type, f"llvm.fma.v{lanes}f32")

    def multiply_add(x: ir.Value, y: ir.Value, acc: ir.Value) -> ir.Value:
        return b.call(fma, [x, y, acc]) if table.fused else b.fadd(acc, b.fmul(x, y))

    def steps(x: list[ir.Value], wp: list[ir.Value], acc: list[ir.Value], k: ir.Value, count: int) -> list[ir.Value]:
        """`count` values of k: the order within a chain is the order of k."""
        acc = list(acc)
        k_bytes = b.shl(k, const(2))
        at = [advance(pointer, k_bytes) for pointer in x]
        for u in range(count):
            weights = [(pointer, u * PANEL * 4 + v * vector_bytes) for pointer in wp for v in range(per_panel)]
            if rows < vectors:  # hold the broadcast rows, let the weights pass
                held = [broadcast(pointer, u * 4) for pointer in at]
                for v, place in enumerate(weights):
                    weight = load(vector, *place)
                    for r in range(rows):
                        acc[r * vectors + v] = multiply_add(held[r], weight, acc[r * vectors + v])
            else:  # hold the weights, let the rows pass
                held = [load(vector, *place) for place in weights]
                for r, pointer in enumerate(at):
                    x_all = broadcast(pointer, u * 4)
                    for v in range(vectors):
                        acc[r * vectors + v] = multiply_add(x_all, held[v], acc[r * vectors + v])
        return acc

    # entry: where each panel starts
    last = b.sub(live, const(1))
    starts = []
    for p in range(panels):
        index = b.select(b.icmp_signed("<", const(p), last), const(p), last)
        starts.append(b.inttoptr(b.add(w, b.mul(index, panel_stride)), _POINTER))
    b.branch(blocks["segment"])

    # segment: x first, then x2
    b.position_at_end(blocks["segment"])
    is_second, row_table, depth = b.phi(ir.IntType(1)), b.phi(_I64), b.phi(_I64)
    w_seg, acc_seg = phis(_POINTER, panels), phis(vector, rows * vectors)
    zero = ir.Constant(vector, [0.0] * lanes)
    bit = ir.IntType(1)
    join([is_second, row_table, depth], [bit(0), x_rows, k1], "entry")
    join(w_seg, starts, "entry")
    join(acc_seg, [zero] * (rows * vectors), "entry")
    addresses = b.inttoptr(row_table, _POINTER)
    x = [b.inttoptr(load(_I64, addresses, r * 8, align=8), _POINTER) for r in range(rows)]
    fours_end = b.and_(depth, const(-_UNROLL))
    b.branch(blocks["four"])

    def k_loop(test: str, body: str, after: str, before: str, first_k, end, wp, acc, count):
        b.position_at_end(blocks[test])
        k, w_loop, acc_loop = b.phi(_I64), phis(_POINTER, panels), phis(vector, rows * vectors)
        join([k, *w_loop, *acc_loop], [first_k, *wp, *acc], before)
        b.cbranch(b.icmp_signed("<", k, end), blocks[body], blocks[after])
        b.position_at_end(blocks[body])
        acc_after = steps(x, w_loop, acc_loop, k, count)
        w_after = [advance(pointer, const(count * PANEL * 4)) for pointer in w_loop]
        join([k, *w_loop, *acc_loop], [b.add(k, const(count)), *w_after, *acc_after], body)
        b.branch(blocks[test])
        return w_loop, acc_loop

    w_four, acc_four = k_loop("four", "fours", "one", "segment", const(0), fours_end, w_seg, acc_seg, _UNROLL)
    w_one, acc_one = k_loop("one", "ones", "next", "four", fours_end, depth, w_four, acc_four, 1)

    b.position_at_end(blocks["next"])
    more = b.and_(b.not_(is_second), b.icmp_signed(">", k2, const(0)))
    join([is_second, row_table, depth], [bit(1), x2_rows, k2], "next")
    join(w_seg, w_one, "next")
    join(acc_seg, acc_one, "next")
    b.cbranch(more, blocks["segment"], blocks["exit"])

    b.position_at_end(blocks["exit"])
    bias_pointer = b.inttoptr(bias, _POINTER)
    row_pointer = b.inttoptr(out, _POINTER)
    for r in range(rows):
        for v in range(vectors):
            value = b.fadd(acc_one[r * vectors + v], load(vector, bias_pointer, v * vector_bytes))
            b.store(value, advance(row_pointer, const(v * vector_bytes)), align=4)
        row_pointer = advance(row_pointer, out_stride)
    b.ret_void()
    return function


@intrinsic
def _run_tile(
    typingctx: Any, rows: Any, out: Any, out_stride: Any, bias: Any, x_rows: Any, x2_rows: Any, k1: Any, k2: Any,
    w: Any, panel_stride: Any, live: Any,
) -> Any:  # fmt: skip
    """Calls the tile of `rows` rows (one of TILES.shapes): a switch over the table."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        after = builder.append_basic_block("tile_done")
        impossible = builder.append_basic_block("tile_impossible")
        switch = builder.switch(args[0], impossible)
        for tile_rows, panels in TILES.shapes:
            block = builder.append_basic_block(f"tile_{tile_rows}")
            switch.add_case(_I64(tile_rows), block)
            builder.position_at_end(block)
            builder.call(_tile_function(builder.module, TILES, tile_rows, panels), args[1:])
            builder.branch(after)
        builder.position_at_end(impossible)
        builder.unreachable()
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), lower


@intrinsic
def _scratch(typingctx: Any) -> Any:
    """Address of this call frame's tile scratch: _SCRATCH results, then one group of bias."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.ArrayType(_F32, _SCRATCH + _GROUP * PANEL)
        slot = cgutils.alloca_once(builder, kind, name="tile_scratch")
        slot.align = ALIGNMENT
        return builder.ptrtoint(slot, _I64)

    return types.int64(), lower


# --- Activations ----------------------------------------------------------------------------------------------------


# Name, function. The position is the code that matmul_rows takes; "none" is 0.
_ACTIVATION_FUNCTIONS = (
    ("none", None),
    ("relu", math32.relu),
    ("relu2", math32.relu2),
    ("silu", math32.silu),
    ("gelu", math32.gelu),
    ("gelu_tanh", math32.gelu_tanh),
    ("sigmoid", math32.sigmoid),
    ("tanh", math32.tanh),
    ("softplus", math32.softplus),
)
ACTIVATIONS: dict[str, int] = {name: code for code, (name, _) in enumerate(_ACTIVATION_FUNCTIONS)}


def _in_place(function: Any) -> Any:
    def apply(address, n):
        values = view_f32(address, n)
        for i in range(n):
            values[i] = function(values[i])

    return apply


@intrinsic
def activate_in_place(typingctx: Any, address: Any, n: Any, activation: Any) -> Any:
    """n float32 at an address through an activation: a switch over the table, one vectorised loop for each code."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        after = builder.append_basic_block("activated")
        switch = builder.switch(args[2], after)
        for code, (name, function) in enumerate(_ACTIVATION_FUNCTIONS):
            if function is None:
                continue
            block = builder.append_basic_block(f"activate_{name}")
            switch.add_case(_I64(code), block)
            builder.position_at_end(block)
            loop_signature = types.none(types.int64, types.int64)
            context.compile_internal(builder, _in_place(function), loop_signature, args[:2])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


# --- The loop nest --------------------------------------------------------------------------------------------------


def _matmul_rows(
    x_rows, x2_rows, n_rows, k1, k2, w, panel_stride, panel_lo, panel_hi, n, bias, residual_rows, has_residual, y_rows,
    activation,
):  # fmt: skip
    scratch = _scratch()
    group_bias_at = scratch + _SCRATCH * 4
    group_bias = view_f32(group_bias_at, _GROUP * PANEL)
    # A group of panels meets all rows before the next group is read, and x streams past it.
    group_panels = _MAIN_PANELS if k1 + k2 > _DEEP and n_rows >= _MAX_ROWS else _GROUP
    for group in range(panel_lo, panel_hi, group_panels):
        live = min(group_panels, panel_hi - group)
        column = group * PANEL
        columns = min(live * PANEL, n - column)
        biased = columns if bias != 0 else 0
        given = view_f32(bias + column * 4, biased)
        for j in range(biased):
            group_bias[j] = given[j]
        for j in range(biased, _GROUP * PANEL):
            group_bias[j] = np.float32(0.0)
        row = 0
        while row < n_rows:
            shape = min(n_rows - row, _MAX_ROWS)
            rows, panels = _TILE_ROWS[shape], _TILE_PANELS[shape]
            tiles = (live + panels - 1) // panels
            width = tiles * panels * PANEL
            for tile in range(tiles):
                panel = tile * panels
                _run_tile(
                    rows, scratch + panel * PANEL * 4, width * 4, group_bias_at + panel * PANEL * 4,
                    x_rows.ctypes.data + row * 8, x2_rows.ctypes.data + row * 8, k1, k2,
                    w + (group + panel) * panel_stride, panel_stride, min(panels, live - panel),
                )  # fmt: skip
            activate_in_place(scratch, rows * width, activation)
            for r in range(rows):
                values = view_f32(scratch + r * width * 4, columns)
                if has_residual:
                    residual = view_f32(residual_rows[row + r] + column * 4, columns)
                    for j in range(columns):
                        values[j] += residual[j]
                y = view_f32(y_rows[row + r] + column * 4, columns)
                for j in range(columns):
                    y[j] = values[j]
            row += rows


_ADDRESSES = types.Array(types.int64, 1, "C")
_I = types.int64
_MATMUL_SIGNATURE = types.void(
    _ADDRESSES, _ADDRESSES, _I, _I, _I, _I, _I, _I, _I, _I, _I, _ADDRESSES, types.boolean, _ADDRESSES, _I
)  # fmt: skip


@intrinsic
def matmul_rows(
    typingctx, x_rows, x2_rows, n_rows, k1, k2, w, panel_stride, panel_lo, panel_hi, n, bias, residual_rows,
    has_residual, y_rows, activation,
):  # fmt: skip
    """Rows [0, n_rows) by the columns of panels [panel_lo, panel_hi) of the formula at the head of this file.

    x_rows, x2_rows, residual_rows, y_rows: int64[::1] byte addresses, n_rows of them; x2_rows is not used when
    k2 == 0, residual_rows not when has_residual is False (pass any int64 array). k1, k2: depth of the two segments.
    w: byte address of panel 0, k 0 (advance it by 64 bytes for each leading k to skip). panel_stride: bytes from a
    panel to the next, (K1 + K2) * 64 as packed. n: columns; those at or beyond n are never stored. bias: byte address
    of n float32, or 0. activation: a code of ACTIVATIONS; the residual is added after it.

    y may be the residual itself, address for address; it must not overlap x or x2. For nopython code, a cached @cfunc
    included: no allocation, no GIL, no Python state. An intrinsic and not an @njit function because its signature is
    fixed (an @njit callee is compiled again for every constant that a caller writes) and needs no Python wrapper.
    """

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.compile_internal(builder, _matmul_rows, signature, args)
        return context.get_dummy_value()

    return _MATMUL_SIGNATURE, lower


def pack_panels(weight_kn: np.ndarray) -> np.ndarray:
    """float32 [K, N] -> float32 [ceil(N / 16), K, 16], zero padded, on a 64-byte boundary."""
    weight_kn = np.asarray(weight_kn, np.float32)
    depth, columns = weight_kn.shape
    panels = -(-columns // PANEL)
    size = panels * depth * PANEL
    raw = np.zeros(size * 4 + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    packed = raw[start : start + size * 4].view(np.float32).reshape(panels, depth, PANEL)
    for p in range(panels):
        block = weight_kn[:, p * PANEL : (p + 1) * PANEL]
        packed[p, :, : block.shape[1]] = block
    return packed
