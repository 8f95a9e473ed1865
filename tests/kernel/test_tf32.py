"""Products of frames by tensor cores as TF32: the GPU kernel against the CPU kernel, which executes the same program.

Run where there is an H200 (or an H100 of 132 multiprocessors): pytest -m gpu tests/kernel/test_tf32.py -s
One graph holds all kinds of products, so that two machine codes serve all: one for at most 64 slots, one for more.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernel.gpu import join, ports
from wpk.ir.graph import Graph, GraphBuilder, Value
from wpk.ir.types import f32
from wpk.kernel.arenas import HostArenas
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cubin import build_cubin
from wpk.kernel.cuda import CudaKernel
from wpk.kernel.layout import shape_of
from wpk.kernel.plan import require_sizes, stream_table, task_table, tensor_maps
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.ops.tf32 import BIAS, RESIDUAL
from wpk.ops.tiles import tile_sessions
from wpk.registry.formats import TensorInfo, TensorSet
from wpk.registry.loading import fill_arenas
from wpk.registry.settings import settings
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import Direction
from wpk.scheduler.target import TARGETS

Array = npt.NDArray[Any]
Rows = dict[str, Array]  # by product: [frames, n]
CLOSE = 1e-5  # largest difference of a number, of the norm of its row: sums of another order
BEATS = 3


@dataclass(frozen=True)
class Product:
    """W [n, k] in shares times windows of x, which a step may let overlap."""

    n: int
    k: int
    frames: int
    step: int
    shares: int = 1
    activation: str = "none"
    bias: bool = False
    residual: bool = False
    rows: int = 0  # of a tile, where they are not all that the kernel has


# One frame, some, a tile's rows but for one or one more, many tiles; k of less than a chunk, one, a part of another
# one, many; a share of 8 rows, of one or both halves of a tile of the weight, shares of different sizes.
PRODUCTS = {
    "smallest": Product(8, 4, 1, 4),
    "one frame": Product(176, 1152, 1, 1152, bias=True, activation="silu"),
    "shares": Product(1152, 1152, 1, 1152, 13, bias=True),
    "two frames": Product(88, 32, 2, 32, residual=True),
    "seven frames": Product(184, 36, 7, 36, 2, bias=True, residual=True, activation="relu"),
    "sixty-three": Product(176, 400, 63, 160, bias=True, activation="gelu"),
    "sixty-four": Product(88, 36, 64, 4, bias=True, activation="relu2"),
    "sixty-five": Product(1152, 400, 65, 80, 7, residual=True),
    "one hundred and twenty-nine": Product(8, 400, 129, 12, residual=True, bias=True, activation="sigmoid"),
    "many frames": Product(176, 400, 441, 160, 2, bias=True, residual=True),
    "many frames of few": Product(8, 4, 441, 4, activation="tanh"),
    "deep": Product(184, 1152, 7, 64, 3, residual=True),
    "half a tile": Product(264, 400, 2, 400, 2, rows=64),
}
CHAINED = "chained"  # windows of three rows of what two other products made
WIDTH = 88
SIZE = max((p.frames - 1) * p.step + p.k for p in PRODUCTS.values())
SLOTS = (1, 5, 56, 64, 65, 112)
SMOOTH = {name for name, p in PRODUCTS.items() if p.activation in ("silu", "gelu", "sigmoid", "tanh")}


# --- programs and numbers -------------------------------------------------------------------------------------------
def product(g: GraphBuilder, name: str, x: Value, p: Product, rows: int, residual: Value | None = None) -> Value:
    """The operator with its weights, under their names."""
    tiles = g.op("pack_tf32_tiles", g.weight(f"{name}.weight", f32(p.n, p.k)), shares=p.shares)
    extra = [g.weight(f"{name}.bias", f32(p.n))] if p.bias else []
    extra += [residual] if residual is not None else []
    roles = (BIAS if p.bias else 0) | (RESIDUAL if residual is not None else 0)
    return g.op(
        "tf32_matmul", x, tiles, *extra, n=p.n, k=p.k, shares=p.shares, frames=p.frames, step=p.step,
        rows=p.rows or rows, activation=p.activation, roles=roles,
    )  # fmt: skip


def graph(slots: int) -> Graph:
    g = GraphBuilder("products", Selection())
    x, rows = g.input("x", f32(SIZE)), tile_sessions(slots)
    for name, p in PRODUCTS.items():
        residual = None
        if p.residual:  # what other blocks wrote in the wave before
            residual = product(g, f"{name}.residual", x, Product(p.n, 36, p.frames, 4, p.shares), rows)
            g.output(f"residual of {name}", residual)
        g.output(name, product(g, name, x, p, rows, residual))
    h = product(g, "chained.first", x, Product(WIDTH, 36, 70, 32), rows)
    h = product(g, "chained.second", h, Product(WIDTH, WIDTH, 70, WIDTH, bias=True), rows, h)
    g.output(CHAINED, product(g, "chained.third", h, Product(176, 3 * WIDTH, 68, WIDTH, 2), rows))
    return g.build()


@functools.cache
def compiled(slots: int) -> Compiled:
    return compile_graph(graph(slots), Selection(), TARGETS["h200"], capacity=slots)


class Weights(TensorSet):
    """Of whole numbers, so that every sum is exact, or normal ones as large as keep what they give about as large."""

    def __init__(self, made: Compiled, whole: bool) -> None:
        self.tensors = {port.name: TensorInfo(port.value.type.shape, "float32") for port in made.load.weights}
        self._whole = whole

    def _load(self, name: str) -> Array:
        rng, shape = np.random.default_rng(list(name.encode())), self.tensors[name].shape
        if self._whole:
            return rng.integers(-1, 2, shape).astype(np.float32)
        return (rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) > 1 else 1)).astype(np.float32)


@functools.cache
def filled(slots: int, whole: bool) -> tuple[HostArenas, Array]:
    made = compiled(slots)
    return fill_arenas(made.program, made.load, Weights(made, whole))


def given(session: int, beat: int, whole: bool) -> Array:
    rng = np.random.default_rng([session, beat])
    return (rng.integers(-3, 4, SIZE) if whole else rng.standard_normal(SIZE)).astype(np.float32)


def played(kind: type[Any], slots: int, who: dict[int, int], whole: bool) -> list[dict[int, Rows]]:
    """Outputs of every beat by slot. who: slot -> session; other slots are vacant, and what lies there is no number."""
    made, (weights, image) = compiled(slots), filled(slots, whole)
    arenas = HostArenas(made.program)
    for arena in Arena:
        arenas.write(arena, 0, weights[arena][: made.program.arenas[arena]])
    options = {"cubin": build_cubin(made.program.operators, settings().kernels, slots)} if kind is CudaKernel else {}
    kernel = kind(made.program, arenas, image.copy(), cache=settings().kernels, **options)
    try:
        join(kernel, *who)
        found = []
        for beat in range(BEATS):
            ((view,),) = ports(kernel, Direction.INPUT).values()
            view[:] = np.nan
            for slot, session in who.items():
                view[slot] = given(session, beat, whole)
            kernel.beat()
            outputs = ports(kernel, Direction.OUTPUT)
            found.append({slot: {name: v[slot].copy() for name, (v,) in outputs.items()} for slot in who})
        return found
    finally:
        kernel.close()


def occupied(slots: int) -> dict[int, int]:
    """Most slots; which are vacant is different in every tile of sessions."""
    return {s: 100 + s for s in range(slots) if s % 7 != 3}


def apart(found: Array, wanted: Array, n: int) -> float:
    """The largest difference of a number, of the norm of its row."""
    found, wanted = found.reshape(-1, n).astype(np.float64), wanted.reshape(-1, n).astype(np.float64)
    norms = np.linalg.norm(wanted, axis=1, keepdims=True)
    return float((np.abs(found - wanted) / np.maximum(norms, 1e-30)).max())


def bits(run: list[dict[int, Rows]]) -> list[dict[int, dict[str, bytes]]]:
    return [{s: {n: v.tobytes() for n, v in rows.items()} for s, rows in beat.items()} for beat in run]


# --- what the CPU kernel gives ----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS)
def test_whole_numbers_come_out_exact_and_a_second_run_gives_the_same_bits(slots: int) -> None:
    who = occupied(slots)
    found, again, wanted = (played(kind, slots, who, True) for kind in (CudaKernel, CudaKernel, CpuKernel))
    assert bits(found) == bits(again)
    for beat, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        wrong: dict[str, list[int]] = {}
        for slot in who:
            for name, values in theirs[slot].items():
                if name not in SMOOTH and not np.array_equal(ours[slot][name], values):
                    wrong.setdefault(name, []).append(slot)
        assert not wrong, f"beat {beat}: {wrong}\n" + "\n".join(where(name, ours, theirs, wrong) for name in wrong)


def where(name: str, ours: dict[int, Rows], theirs: dict[int, Rows], wrong: dict[str, list[int]]) -> str:
    """Which frames and rows of the weight of the first slot are wrong."""
    slot = wrong[name][0]
    n = 176 if name == CHAINED else PRODUCTS[name.removeprefix("residual of ")].n
    frames, rows = np.nonzero((ours[slot][name] != theirs[slot][name]).reshape(-1, n))
    return f"{name}, slot {slot}: {len(rows)} numbers, frames {np.unique(frames)}, rows {np.unique(rows)}"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS)
def test_sums_are_those_of_the_cpu_kernel_but_for_their_order(slots: int) -> None:
    who = occupied(slots)
    found, again, wanted = (played(kind, slots, who, False) for kind in (CudaKernel, CudaKernel, CpuKernel))
    assert bits(found) == bits(again)
    worst = {
        name: max(
            apart(ours[slot][name], theirs[slot][name], p.n)
            for ours, theirs in zip(found, wanted, strict=True)
            for slot in who
        )
        for name, p in PRODUCTS.items()
    }
    print(f"\n{slots} slots: {max(worst.values()):.2g} of the norm of a row ({max(worst, key=lambda n: worst[n])})")
    assert not {name: d for name, d in worst.items() if not d < CLOSE}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("slots", "slot"), [(56, 37), (64, 63), (112, 71)])
def test_a_session_has_the_same_bits_alone_in_slot_0_and_among_others(slots: int, slot: int) -> None:
    company = {s: 100 + s for s in range(slots) if s % 5 != 2 and s != slot}
    alone, among = (played(CudaKernel, slots, who, False) for who in ({0: 7}, {**company, slot: 7}))
    for ours, theirs in zip(alone, among, strict=True):
        assert {n: v.tobytes() for n, v in ours[0].items()} == {n: v.tobytes() for n, v in theirs[slot].items()}


# --- how fast ---------------------------------------------------------------------------------------------------------
# Two products in turn, each of what the other made, as often as so: layers of few frames, and of many.
PAIRS = {
    "two frames": (Product(4608, 1152, 2, 1152, 32), Product(1152, 4608, 2, 4608, 48, residual=True), 40),
    "eighteen frames": (Product(6144, 1536, 18, 1536, 41), Product(1536, 6144, 18, 6144, 13, residual=True), 10),
    "many frames": (Product(1536, 384, 441, 384, 9), Product(384, 1536, 441, 1536, 3, residual=True), 10),
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slots", [56, 112])
@pytest.mark.parametrize("name", PAIRS)
def test_products_of_many_sessions_run_on_tensor_cores(name: str, slots: int) -> None:
    first, second, times = PAIRS[name]
    g = GraphBuilder(name, Selection())
    x = g.input("x", f32(first.frames, first.k))
    for turn in range(times):
        h = product(g, f"first{turn}", x, first, tile_sessions(slots))
        x = product(g, f"second{turn}", h, second, tile_sessions(slots), x)
    g.output("y", g.op("slice", x, axis=0, start=0, stop=1))
    made = compile_graph(g.build(), Selection(), TARGETS["h200"], capacity=slots)
    arenas, image = fill_arenas(made.program, made.load, Weights(made, False))
    kernel = CudaKernel(made.program, arenas, image, cache=settings().kernels)
    try:
        join(kernel, *range(slots))
        seconds = sorted(kernel.beat() for _ in range(12))[6] / 1e9
    finally:
        kernel.close()
    flops = sum(2 * p.n * p.k * p.frames for p in (first, second)) * times * slots
    print(
        f"\n{name}, {slots} slots: {seconds / times / 2 * 1e6:.1f} us a product, {flops / seconds / 1e12:.1f} TFLOP/s"
    )
    assert flops / seconds > 20e12  # a thread a result does a tenth of that


# --- without a GPU: the programs are what they are to test ------------------------------------------------------------
def test_every_program_has_one_operator_table_and_sizes_that_a_gpu_takes() -> None:
    assert {compiled(slots).program.operators for slots in SLOTS} == {("tf32_matmul@1",)}
    for slots in SLOTS:
        program = compiled(slots).program
        shape = shape_of(program.operators, slots)
        require_sizes(program, shape)
        streams, _ = stream_table(program, task_table(program), shape, (0, 0, 0, 0), 0)
        assert len(tensor_maps(program, shape)) == len(program.payloads) and len(streams) >= len(program.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_the_cpu_kernel_gives_what_the_products_mean(whole: bool) -> None:
    slots, who = 5, {1: 7, 4: 9}
    weights = Weights(compiled(slots), whole)
    for beat, rows in enumerate(played(CpuKernel, slots, who, whole)):
        for slot, session in who.items():
            x = given(session, beat, whole)
            for name, p in PRODUCTS.items():
                if p.activation == "none":
                    windows = np.lib.stride_tricks.sliding_window_view(x, p.k)[:: p.step][: p.frames]
                    wanted = windows.astype(np.float64) @ weights.read(f"{name}.weight").T
                    wanted += weights.read(f"{name}.bias") if p.bias else 0.0
                    wanted += rows[slot][f"residual of {name}"].reshape(wanted.shape) if p.residual else 0.0
                    assert apart(rows[slot][name], wanted, p.n) < (1e-7 if whole else 2e-3), name
