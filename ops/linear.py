"""Matrix products: `linear`, `conv1d`, and the `matmul` that executes them (and DFTs and gates) over packed weights.

One body serves them all because a convolution over time-major [frames, channels] reads, for each output frame, one
contiguous window of its input: it is a matrix product whose rows overlap in memory.

`products` says how a target with tensor cores may multiply f32: "f32", or "tf32", where it may take the factors as
TF32 (`wpk.ops.tf32`). Sums are f32, and other targets multiply in f32 whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import FLOATS, DType, Type, f32
from wpk.ops import tiles
from wpk.ops.legal import ANY_I32, POSITIVE, common, first_broken
from wpk.ops.memory import view_i64
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, parameter, present
from wpk.ops.scalars import ACTIVATION_MEANING
from wpk.ops.simd import ACTIVATIONS, PANEL, matmul_rows, pack_panels
from wpk.ops.tiles import GROUP, least_shares

BIAS, SECOND, RESIDUAL = 1, 2, 4  # bits of `matmul`'s roles
PRODUCTS = ("f32", "tf32")


@operator("linear", version=1)
class Linear(Operator):
    """y = act(x W^T + b) over the last axis. x [..., k], weight [n, k] f32 or bf16, bias [n] f32; y [..., n] f32.

    One x and a bf16 weight of a multiple of 8 rows make a product over tiles, before which x is rounded to bf16. Any
    other bf16 weight is widened when it is loaded.
    """

    x = operand("... k", dtypes=FLOATS, weight=False)
    weight = operand("n k", dtypes=FLOATS, weight=True)
    bias = operand("n", weight=True, optional=True)
    activation: str = attr("none")
    products: str = attr("f32")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_activation(self.name, self.activation)
        check_products(self.name, self.products)
        return (f32(*dims.like("x").shape[:-1], dims["n"]),)

    def meaning(self, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        return ACTIVATION_MEANING[self.activation](x @ weight.T + bias)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return _product_cost(y.size, types[1].shape[1], types)

    def expand(self, g: GraphBuilder, x: Value, weight: Value, *bias: Value) -> Value:
        n, k = weight.type.shape
        roles = BIAS if bias else 0
        frames = x.type.size // k
        if weight.type.dtype is DType.BF16 and frames == 1 and n % GROUP == 0:
            shares = least_shares(n)
            y = g.op(
                "tiled_matmul", _shaped(g, _cast(g, x, DType.BF16), (k,)), g.op("pack_tiles", weight, shares=shares),
                *bias, n=n, k=k, shares=shares, activation=self.activation, roles=tiles.BIAS if bias else 0,
            )  # fmt: skip
            return _shaped(g, y, (*x.type.shape[:-1], n))
        y = g.op(
            "matmul", _cast(g, x, DType.F32), g.op("pack_panels", _cast(g, weight, DType.F32)), *bias,
            n=n, k=k, frames=frames, step=k, pad=0, activation=self.activation, roles=roles, products=self.products,
        )  # fmt: skip
        return g.op("reshape", y, shape=(*x.type.shape[:-1], n))


@operator("conv1d", version=1)
class Conv1d(Operator):
    """Cross-correlation over time, y[t] = act(sum_i W[:, :, i] x[t*stride + i*dilation - pad_left] + b).

    x [t, c] f32, zeros outside; weight [n, c, taps] (PyTorch order), bias [n]; y [frames, n] with
    frames = (t + pad_left + pad_right - reach) // stride + 1, reach = (taps - 1) * dilation + 1.
    History of a stream is concatenated in front by the caller (`concat` of a ring and the new frames).
    """

    x = operand("t c", weight=False)
    weight = operand("n c i", weight=True)
    bias = operand("n", weight=True, optional=True)
    stride: int = attr(1)
    pad_left: int = attr(0)
    pad_right: int = attr(0)
    dilation: int = attr(1)
    activation: str = attr("none")
    products: str = attr("f32")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_activation(self.name, self.activation)
        check_products(self.name, self.products)
        if self.stride < 1 or self.dilation < 1 or self.pad_left < 0 or self.pad_right < 0:
            wanted = "stride >= 1, dilation >= 1, padding >= 0"
            raise GraphError("conv1d: stride, dilation and padding", wanted=wanted, found=self)
        if self._frames(dims["t"], dims["i"]) < 1:
            wanted = f">= {(dims['i'] - 1) * self.dilation + 1} frames with the padding"
            raise GraphError("conv1d: fewer frames than taps", wanted=wanted, found=dims.like("x"))
        return (f32(self._frames(dims["t"], dims["i"]), dims["n"]),)

    def _frames(self, frames: int, taps: int) -> int:
        return (frames + self.pad_left + self.pad_right - (taps - 1) * self.dilation - 1) // self.stride + 1

    def meaning(self, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
        padded = np.pad(x, ((self.pad_left, self.pad_right), (0, 0)))
        reach = (weight.shape[2] - 1) * self.dilation + 1
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=0)[:: self.stride, :, :: self.dilation]
        return ACTIVATION_MEANING[self.activation](np.einsum("tci,nci->tn", windows, weight) + bias)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return _product_cost(y.size, types[1].size // types[1].shape[0], types)

    def expand(self, g: GraphBuilder, x: Value, weight: Value, *bias: Value) -> Value:
        n, c, taps = weight.type.shape
        frames = self._frames(x.type.shape[0], taps)
        if self.dilation > 1 and taps > 1:
            return self._expand_dilated(g, x, weight, bias, frames)
        by_time = g.op("reshape", g.op("transpose", weight, axes=(0, 2, 1)), shape=(n, taps * c))
        return g.op(
            "matmul", x, g.op("pack_panels", by_time), *bias,
            n=n, k=taps * c, frames=frames, step=self.stride * c, pad=self.pad_left * c,
            activation=self.activation, roles=BIAS if bias else 0, products=self.products,
        )  # fmt: skip

    def _expand_dilated(
        self, g: GraphBuilder, x: Value, weight: Value, bias: tuple[Value, ...], frames: int
    ) -> Value:  # fmt: skip
        """A tap at a time, each adding to the sum of those before: a dilated window is not one run of memory."""
        n, c, taps = weight.type.shape
        total: tuple[Value, ...] = ()
        for tap in range(taps):
            rows = g.op("reshape", g.op("slice", weight, axis=2, start=tap, stop=tap + 1), shape=(n, c))
            once = bias if tap == 0 else ()
            roles = (BIAS if once else 0) | (RESIDUAL if total else 0)
            pad = (self.pad_left - tap * self.dilation) * c
            y = g.op(
                "matmul", x, g.op("pack_panels", rows), *once, *total,
                n=n, k=c, frames=frames, step=self.stride * c, pad=pad, roles=roles, products=self.products,
            )  # fmt: skip
            total = (y,)
        return total[0] if self.activation == "none" else g.op(self.activation, total[0])


@operator("pack_panels", version=1)
class PackPanels(Operator):
    """A weight [n, k] in the order in which `matmul` reads it: [ceil(n/16), k, 16], zero-padded columns."""

    layout_only = True
    weight = operand("n k", weight=True)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        return (f32(-(-dims["n"] // PANEL), dims["k"], PANEL),)

    def meaning(self, weight: Array) -> Array:
        return pack_panels(np.ascontiguousarray(weight.T))


@operator("matmul", version=1)
class Matmul(Operator):
    """Rows of overlapping windows times packed weights, with the epilogue in the same pass.

    y[t] = act(x[t*step - pad : ... + k] W[:k] + x2 W[k:] + bias) + residual; x is flat and zero outside itself.
    x [...] f32, weight [panels, k + k2, 16] packed; then, as `roles` says, bias [n], x2 [k2] (frames = 1), and
    residual [frames, n]. y [frames, n]. Sums run over k in one order, whatever the batch: a session's bits do not
    depend on its company.
    """

    x = operand("...", weight=False)
    weight = operand("p k 16", weight=True)
    extra = operand("...", variadic=True)
    n: int = attr()
    k: int = attr()
    frames: int = attr()
    step: int = attr()
    pad: int = attr()
    activation: str = attr("none")
    roles: int = attr(0)
    products: str = attr("f32")
    semantic_parameters: ClassVar = {2: POSITIVE, 3: ANY_I32, 7: range(len(ACTIVATIONS))}  # windows are clipped to x

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_activation(self.name, self.activation)
        check_products(self.name, self.products)
        if self.roles & SECOND and (self.frames != 1 or self.pad or dims.like("x").size != self.k):
            raise GraphError("matmul: a second operand goes with one whole window", wanted=f"x of {self.k}", found=self)
        return (f32(self.frames, self.n),)

    def meaning(self, x: Array, weight: Array, *extra: Array) -> Array:
        given = dict(zip(self._extras(), extra, strict=True))
        dense = weight.transpose(1, 0, 2).reshape(weight.shape[1], -1)[:, : self.n]
        flat = x.reshape(-1)
        y = np.zeros((self.frames, self.n))
        for t in range(self.frames):
            start = t * self.step - self.pad
            lo, hi = max(0, start), min(flat.size, start + self.k)
            if hi > lo:
                y[t] = flat[lo:hi] @ dense[lo - start : hi - start]
        if "x2" in given:
            y = y + given["x2"].reshape(1, -1) @ dense[self.k :]
        y = ACTIVATION_MEANING[self.activation](y + given.get("bias", 0.0))
        return y + given["residual"].reshape(y.shape) if "residual" in given else y

    def cost(self, *types: Type) -> Cost:
        x, weight, *extra = types
        given = dict(zip(self._extras(), extra, strict=True))
        read = [x, *(t for name, t in given.items() if name != "bias")]
        results = self.frames * self.n
        return Cost(
            {"f32": 2 * results * weight.shape[1]},
            weight_bytes=weight.bytes + (given["bias"].bytes if "bias" in given else 0),
            activation_bytes=sum(t.bytes for t in read) + 4 * results,
        )

    def parts(self, *types: Type) -> int:
        return -(-self.n // PANEL)

    def places(self, count: int) -> tuple[int, ...]:
        place = {"bias": 2, "x2": 3, "residual": 4}
        return (0, 1, *(place[e] for e in self._extras()), 5)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        k2 = types[1].shape[1] - self.k
        code = ACTIVATIONS[self.activation]
        return (self.frames, self.k, self.step, self.pad, types[0].size, k2, self.n, code, self.roles)

    def _extras(self) -> list[str]:
        bits = ((BIAS, "bias"), (SECOND, "x2"), (RESIDUAL, "residual"))
        return [name for bit, name in bits if self.roles & bit]

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        frames, k, _, _, size, k2, n, _, roles = parameters
        panels = -(-n // PANEL)
        bias, second, residual = (size if roles & bit else 0 for bit, size in ((BIAS, n), (SECOND, k2), (RESIDUAL, n)))
        return (4 * size, 4 * panels * (k + k2) * PANEL, 4 * bias, 4 * second, 4 * frames * residual, 4 * frames * n)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        frames, k, _, pad, size, k2, n, _, roles = parameters
        there = [bit for bit, place in ((BIAS, 2), (SECOND, 3), (RESIDUAL, 4)) if place < operands and present[place]]
        whole = (frames, pad, size) == (1, 0, k)
        return first_broken(
            *common(cls, parameters, present, words=9, operands=6, optional=(2, 3, 4)),
            ("size and n >= 1", min(size, n) >= 1),
            ("the operands that the roles name", roles == sum(there)),
            ("k2 >= 1 with a second operand, else 0", k2 >= 1 if SECOND in there else k2 == 0),
            ("one whole window with a second operand", whole or SECOND not in there),
        )

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        frames, n = parameters[0], parameters[6]
        return Extent.columns(n, PANEL, lo, hi, rows=frames)


@body(Matmul)
def matmul_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    frames, k, step, pad = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    size, k2, n = parameter(record, 4), parameter(record, 5), parameter(record, 6)
    activation = parameter(record, 7)
    has_second, has_residual = present(record, 3), present(record, 4)
    bias = address(record, arenas, 2, 0) if present(record, 2) else 0
    weight = address(record, arenas, 1, 0)
    panel_bytes = (k + k2) * 64
    # Row addresses: a quarter of the scratch for each of x, x2, residual and y.
    room = 1024
    x_rows, x2_rows = view_i64(scratch, room), view_i64(scratch + 8 * room, room)
    residual_rows, y_rows = view_i64(scratch + 16 * room, room), view_i64(scratch + 24 * room, room)
    count = 0
    skip_open = 0
    k_open = 0
    for t in range(frames):
        start = t * step - pad
        lo = max(0, start)
        skip = lo - start
        length = max(0, min(size, start + k) - lo)
        for slot in range(slot_lo, slot_hi):
            # Rows of one call share their window; a full table or a window cut by an edge ends the call.
            if count == room or (count > 0 and (skip != skip_open or length != k_open)):
                matmul_rows(
                    x_rows, x2_rows, count, k_open, k2, weight + skip_open * 64, panel_bytes, part_lo, part_hi, n,
                    bias, residual_rows, has_residual, y_rows, activation,
                )  # fmt: skip
                count = 0
            skip_open, k_open = skip, length
            x_rows[count] = address(record, arenas, 0, slot) + 4 * lo
            y_rows[count] = address(record, arenas, 5, slot) + 4 * t * n
            if has_second:
                x2_rows[count] = address(record, arenas, 3, slot)
            if has_residual:
                residual_rows[count] = address(record, arenas, 4, slot) + 4 * t * n
            count += 1
    matmul_rows(
        x_rows, x2_rows, count, k_open, k2, weight + skip_open * 64, panel_bytes, part_lo, part_hi, n,
        bias, residual_rows, has_residual, y_rows, activation,
    )  # fmt: skip


def _check_activation(name: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise GraphError(f"{name}: activation", wanted=" | ".join(ACTIVATIONS), found=activation)


def check_products(name: str, products: str) -> None:
    """Raise where this is no precision of products."""
    if products not in PRODUCTS:
        raise GraphError(f"{name}: products", wanted=" | ".join(PRODUCTS), found=products)


def _cast(g: GraphBuilder, x: Value, dtype: DType) -> Value:
    return x if x.type.dtype is dtype else g.op("cast", x, dtype=dtype.value)


def _shaped(g: GraphBuilder, x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.type.shape == shape else g.op("reshape", x, shape=shape)


def _product_cost(results: int, k: int, types: Sequence[Type]) -> Cost:
    """Cost of x, weight and perhaps a bias."""
    weights = sum(t.bytes for t in types[1:3])
    return Cost(
        {types[1].dtype.value: 2 * results * k}, weight_bytes=weights, activation_bytes=types[0].bytes + 4 * results
    )
