"""LSTM and GRU, one step: any gate order is brought to one at load; what remains is a product and a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import Type, f32
from wpk.ops import math32
from wpk.ops.legal import common, first_broken
from wpk.ops.linear import BIAS, SECOND, check_products
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import operand_f32, parameter
from wpk.ops.scalars import ACTIVATION_MEANING

LSTM_GATES = "ifgo"  # the order of the cells; letters as PyTorch's, also c for g (ONNX) and h for n (ONNX)
GRU_GATES = "rzn"
CELL_BLOCK = 64  # values of the state a part

_sigmoid, _tanh = ACTIVATION_MEANING["sigmoid"], ACTIVATION_MEANING["tanh"]


@operator("lstm", version=1)
class Lstm(Operator):
    """One LSTM step, Hochreiter & Schmidhuber 1997 with forget gate: (h, c) after x.

    x [k], h [n], c [n] f32, w_ih [4n, k], w_hh [4n, n], b_ih [4n], b_hh [4n] (none, both, or one that is the sum of
    both) -> (h [n], c [n]). i, f, o = sigmoid, g = tanh of W_ih x + b_ih + W_hh h + b_hh;
    c' = f c + i g; h' = o tanh(c'). gates: the order of the blocks of n rows: "ifgo" (PyTorch, Keras), "iofc" (ONNX),
    c being another name of g.
    products: as for `linear`.
    """

    x = operand("k", weight=False)
    h = operand("n", weight=False)
    c = operand("n", weight=False)
    w_ih = operand("m k", weight=True)
    w_hh = operand("m n", weight=True)
    b_ih = operand("m", weight=True, optional=True)
    b_hh = operand("m", weight=True, optional=True)
    gates: str = attr(LSTM_GATES)
    products: str = attr("f32")
    result_count: ClassVar[int] = 2

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_gates("lstm", self.gates, "c", "g", LSTM_GATES, dims)
        check_products("lstm", self.products)
        return (f32(dims["n"]), f32(dims["n"]))

    def meaning(self, x: Array, h: Array, c: Array, w_ih: Array, w_hh: Array, *biases: Array) -> tuple[Array, Array]:
        blocks = np.split(w_ih @ x + w_hh @ h + sum(biases), 4)
        gate = dict(zip(self.gates.replace("c", "g"), blocks, strict=True))
        c = _sigmoid(gate["f"]) * c + _sigmoid(gate["i"]) * _tanh(gate["g"])
        return _sigmoid(gate["o"]) * _tanh(c), c

    def cost(self, *types: Type) -> Cost:
        return _recurrent_cost(types, 3, 2)

    def expand(self, g: GraphBuilder, x: Value, h: Value, c: Value, w_ih: Value, w_hh: Value, *biases: Value) -> Value:
        size = h.type.size
        order = _order(self.gates.replace("c", "g"), LSTM_GATES)
        weight = _reorder(g, g.op("concat", w_ih, w_hh, axis=1), order, size)
        bias = [_reorder(g, _sum(g, biases), order, size)] if biases else []
        return g.op("lstm_cell", _gates(g, x, weight, bias, h, products=self.products), c)


class Cell(Operator):
    """Base: element-wise over the units of the state that comes last; parts are blocks of units."""

    def parts(self, *types: Type) -> int:
        return -(-types[-1].size // CELL_BLOCK)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (types[-1].size,)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=1))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent.columns(parameters[0], CELL_BLOCK, lo, hi)


@operator("lstm_cell", version=1)
class LstmCell(Cell):
    """gates [4n] in blocks i, f, g, o (before their functions), c [n] f32 -> (h [n], c [n]). May run in place of c."""

    gates = operand("m", weight=False)
    c = operand("n", weight=False)
    result_count: ClassVar[int] = 2
    inplace: ClassVar[Mapping[int, int]] = {1: 1}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["m"] != 4 * dims["n"]:
            raise GraphError("lstm_cell: gates", wanted=f32(4 * dims["n"]), found=dims.like("gates"))
        return (f32(dims["n"]), f32(dims["n"]))

    def meaning(self, gates: Array, c: Array) -> tuple[Array, Array]:
        i, f, g, o = np.split(gates, 4)
        c = _sigmoid(f) * c + _sigmoid(i) * _tanh(g)
        return _sigmoid(o) * _tanh(c), c

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 9 * types[1].size}, activation_bytes=7 * types[1].bytes)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n = parameters[0]
        return (16 * n, 4 * n, 4 * n, 4 * n)


@body(LstmCell)
def lstm_cell_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n = parameter(record, 0)
    cell = view_f32(scratch, CELL_BLOCK)  # c through scratch: in place, a direct loop would not vectorise
    for slot in range(slot_lo, slot_hi):
        gates, c = operand_f32(record, arenas, 0, slot, 4 * n), operand_f32(record, arenas, 1, slot, n)
        h, following = operand_f32(record, arenas, 2, slot, n), operand_f32(record, arenas, 3, slot, n)
        for first in range(part_lo * CELL_BLOCK, min(part_hi * CELL_BLOCK, n), CELL_BLOCK):
            count = min(CELL_BLOCK, n - first)
            gate_i, gate_f = gates[first : first + count], gates[n + first : n + first + count]
            gate_g, gate_o = gates[2 * n + first : 2 * n + first + count], gates[3 * n + first : 3 * n + first + count]
            old = c[first : first + count]
            for j in range(count):
                new = math32.sigmoid(gate_f[j]) * old[j] + math32.sigmoid(gate_i[j]) * math32.tanh(gate_g[j])
                cell[j] = new
            out, kept = h[first : first + count], following[first : first + count]
            for j in range(count):
                out[j] = math32.sigmoid(gate_o[j]) * math32.tanh(cell[j])
            for j in range(count):
                kept[j] = cell[j]


@operator("gru", version=1)
class Gru(Operator):
    """One GRU step, Cho et al. 2014: h after x.

    x [k], h [n] f32, w_ih [3n, k], w_hh [3n, n], b_ih [3n], b_hh [3n] (both or neither) -> h [n]. With
    a = W_ih x + b_ih and u = W_hh h + b_hh in blocks: r = sigmoid(a_r + u_r), z = sigmoid(a_z + u_z);
    n = tanh(a_n + r u_n) when linear_before_reset (PyTorch always; ONNX where its attribute is 1), else
    n = tanh(a_n + W_hn (r h) + b_hn) (ONNX's default); h' = (1 - z) n + z h.
    gates: the order of the blocks of n rows: "rzn" (PyTorch), "zrh" (ONNX), h being another name of n.
    products: as for `linear`.
    """

    x = operand("k", weight=False)
    h = operand("n", weight=False)
    w_ih = operand("m k", weight=True)
    w_hh = operand("m n", weight=True)
    b_ih = operand("m", weight=True, optional=True)
    b_hh = operand("m", weight=True, optional=True)
    gates: str = attr(GRU_GATES)
    linear_before_reset: bool = attr(True)
    products: str = attr("f32")

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_gates("gru", self.gates, "h", "n", GRU_GATES, dims)
        check_products("gru", self.products)
        if "b_ih" in dims.types and "b_hh" not in dims.types:
            raise GraphError("gru: biases", wanted="b_ih and b_hh, or neither", found="b_ih alone")
        return (f32(dims["n"]),)

    def meaning(self, x: Array, h: Array, w_ih: Array, w_hh: Array, *biases: Array) -> Array:
        size = h.size
        at = {gate: slice(i * size, (i + 1) * size) for i, gate in enumerate(self.gates.replace("h", "n"))}
        b_ih, b_hh = biases or (np.zeros(3 * size), np.zeros(3 * size))
        a, u = w_ih @ x + b_ih, w_hh @ h + b_hh
        r, z = _sigmoid(a[at["r"]] + u[at["r"]]), _sigmoid(a[at["z"]] + u[at["z"]])
        recurrent = r * u[at["n"]] if self.linear_before_reset else w_hh[at["n"]] @ (r * h) + b_hh[at["n"]]
        return np.asarray((1.0 - z) * _tanh(a[at["n"]] + recurrent) + z * h)

    def cost(self, *types: Type) -> Cost:
        return _recurrent_cost(types, 2, 1)

    def expand(self, g: GraphBuilder, x: Value, h: Value, w_ih: Value, w_hh: Value, *biases: Value) -> Value:
        size = h.type.size
        order = _order(self.gates.replace("h", "n"), GRU_GATES)
        if self.linear_before_reset:
            w_x, w_h, *b = (_reorder(g, v, order, size) for v in (w_ih, w_hh, *biases))
            a, u = (_gates(g, v, w, b, products=self.products) for v, w, b in ((x, w_x, b[:1]), (h, w_h, b[1:])))
            return g.op("gru_cell", a, u, h)
        weight = _reorder(g, g.op("concat", w_ih, w_hh, axis=1), order, size)
        bias = [_reorder(g, _sum(g, biases), order, size)] if biases else []
        rz_weight, *rz_bias = (_rows(g, v, 0, 2 * size) for v in (weight, *bias))
        n_weight, *n_bias = (_rows(g, v, 2 * size, 3 * size) for v in (weight, *bias))
        rz = _gates(g, x, rz_weight, rz_bias, h, "sigmoid", self.products)
        r, z = _rows(g, rz, 0, size), _rows(g, rz, size, 2 * size)
        new = _gates(g, x, n_weight, n_bias, g.op("mul", r, h), "tanh", self.products)
        return g.op("add", new, g.op("mul", z, g.op("sub", h, new)))


@operator("gru_cell", version=1)
class GruCell(Cell):
    """a [3n] = W_ih x + b_ih and u [3n] = W_hh h + b_hh in blocks r, z, n, and h [n] f32 -> h [n].

    The reset comes after the product: r, z = sigmoid(a + u); h' = n + z (h - n) with n = tanh(a_n + r u_n).
    May run in place of h.
    """

    a = operand("m", weight=False)
    u = operand("m", weight=False)
    h = operand("n", weight=False)
    inplace: ClassVar[Mapping[int, int]] = {0: 2}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims["m"] != 3 * dims["n"]:
            raise GraphError("gru_cell: gates", wanted=f32(3 * dims["n"]), found=dims.like("a"))
        return (f32(dims["n"]),)

    def meaning(self, a: Array, u: Array, h: Array) -> Array:
        (a_r, a_z, a_n), (u_r, u_z, u_n) = np.split(a, 3), np.split(u, 3)
        z = _sigmoid(a_z + u_z)
        return np.asarray((1.0 - z) * _tanh(a_n + _sigmoid(a_r + u_r) * u_n) + z * h)

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": 10 * types[2].size}, activation_bytes=8 * types[2].bytes)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        n = parameters[0]
        return (12 * n, 12 * n, 4 * n, 4 * n)


@body(GruCell)
def gru_cell_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    n = parameter(record, 0)
    reset, new = view_f32(scratch, CELL_BLOCK), view_f32(scratch + 4 * CELL_BLOCK, CELL_BLOCK)
    for slot in range(slot_lo, slot_hi):
        a, u = operand_f32(record, arenas, 0, slot, 3 * n), operand_f32(record, arenas, 1, slot, 3 * n)
        h, following = operand_f32(record, arenas, 2, slot, n), operand_f32(record, arenas, 3, slot, n)
        for first in range(part_lo * CELL_BLOCK, min(part_hi * CELL_BLOCK, n), CELL_BLOCK):
            count = min(CELL_BLOCK, n - first)
            a_r, u_r = a[first : first + count], u[first : first + count]
            a_z, u_z = a[n + first : n + first + count], u[n + first : n + first + count]
            a_n, u_n = a[2 * n + first : 2 * n + first + count], u[2 * n + first : 2 * n + first + count]
            old, out = h[first : first + count], following[first : first + count]
            for j in range(count):
                reset[j] = math32.sigmoid(a_r[j] + u_r[j])
            for j in range(count):
                value = math32.tanh(a_n[j] + reset[j] * u_n[j])
                new[j] = value + math32.sigmoid(a_z[j] + u_z[j]) * (old[j] - value)
            for j in range(count):
                out[j] = new[j]


def _check_gates(name: str, gates: str, alias: str, letter: str, wanted: str, dims: Dims) -> None:
    if sorted(gates.replace(alias, letter)) != sorted(wanted):
        raise GraphError(f"{name}: gates", wanted=f"an order of {wanted} ({alias} for {letter})", found=gates)
    if dims["m"] != len(wanted) * dims["n"]:
        raise GraphError(f"{name}: rows of the weights", wanted=len(wanted) * dims["n"], found=dims["m"])


def _order(gates: str, wanted: str) -> tuple[int, ...]:
    """Where each gate of `wanted` stands in `gates`."""
    return tuple(gates.index(gate) for gate in wanted)


def _reorder(g: GraphBuilder, value: Value, order: Sequence[int], size: int) -> Value:
    """Blocks of `size` rows of a weight in that order."""
    if list(order) == sorted(order):
        return value
    return g.op("concat", *(_rows(g, value, i * size, (i + 1) * size) for i in order), axis=0)


def _rows(g: GraphBuilder, value: Value, start: int, stop: int) -> Value:
    return g.op("slice", value, axis=0, start=start, stop=stop)


def _sum(g: GraphBuilder, biases: Sequence[Value]) -> Value:
    return g.op("add", *biases) if len(biases) == 2 else biases[0]


def _gates(
    g: GraphBuilder, x: Value, weight: Value, bias: Sequence[Value], h: Value | None = None, activation: str = "none",
    products: str = "f32",
) -> Value:  # fmt: skip
    """act(weight concat(x, h) + bias) as one `matmul`, a vector."""
    n = weight.type.shape[0]
    seconds = () if h is None else (h,)
    roles = (BIAS if bias else 0) | (SECOND if seconds else 0)
    k = x.type.size
    y = g.op(
        "matmul", x, g.op("pack_panels", weight), *bias, *seconds,
        n=n, k=k, frames=1, step=k, pad=0, activation=activation, roles=roles, products=products,
    )  # fmt: skip
    return g.op("reshape", y, shape=(n,))


def _recurrent_cost(types: Sequence[Type], first_weight: int, states: int) -> Cost:
    w_ih, w_hh = types[first_weight : first_weight + 2]
    size = types[1].bytes
    return Cost(
        {"f32": 2 * (w_ih.size + w_hh.size) + 10 * types[1].size},
        weight_bytes=sum(t.bytes for t in types[first_weight:]),
        activation_bytes=types[0].bytes + 2 * states * size,
    )
