"""The matmul engine: right against float64, one FMA chain an output, the same bits in every slot of every batch."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit

from wpk.ops import simd
from wpk.ops.memory import view_f32, view_i32

UNTOUCHED = np.float32(-12345.0)

sigmoid64 = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
ACTIVATION_MEANING = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x * sigmoid64(x),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": sigmoid64,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(0, x),
}


@njit(nogil=True)
def call(x, x2, n_rows, k1, k2, w, stride, lo, hi, n, bias, residual, has_residual, y, activation):
    simd.matmul_rows(x, x2, n_rows, k1, k2, w, stride, lo, hi, n, bias, residual, has_residual, y, activation)


@njit
def copy_through_views(source, target, n):
    a, b = view_f32(source, n), view_i32(target, n)
    for i in range(n):
        b[i] = np.int32(a[i])


def addresses(a):
    """Byte address of each row of a 2-D array."""
    return a.ctypes.data + np.arange(a.shape[0], dtype=np.int64) * a.strides[0]


def matmul(x, w, *, x2=None, bias=None, residual=None, activation="none", splits=None, y=None):
    """x [R, K1], x2 [R, K2] or None, w [K1 + K2, N] -> y [R, N]; splits: panel boundaries of separate calls."""
    packed = simd.pack_panels(w)
    rows, n = x.shape[0], w.shape[1]
    if y is None:
        y = np.full((rows, n), UNTOUCHED)
    bounds = [0, *(splits or []), packed.shape[0]]
    for lo, hi in pairwise(bounds):
        call(
            addresses(x), addresses(x if x2 is None else x2), rows, x.shape[1], 0 if x2 is None else x2.shape[1],
            packed.ctypes.data, packed.strides[0], lo, hi, n, 0 if bias is None else bias.ctypes.data,
            addresses(y if residual is None else residual), residual is not None, addresses(y),
            simd.ACTIVATIONS[activation],
        )  # fmt: skip
    return y


def fma32(a, b, c):
    """a * b + c rounded once: the float64 sum is made odd where it was inexact, so that rounding it again is right."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even, np.nextafter(total, toward), total).astype(np.float32)


def chain(x, w):
    """The defining order: one chain over k from +0 for each output."""
    acc = np.zeros((x.shape[0], w.shape[1]), np.float32)
    for k in range(x.shape[1]):
        a, b = np.broadcast_arrays(x[:, k, None], w[None, k, :])
        acc = fma32(a, b, acc) if simd.TILES.fused else (acc + a * b).astype(np.float32)
    return acc


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def same_bits(a, b):
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.int32), np.ascontiguousarray(b).view(np.int32))


SIZES = dict(
    rows=st.integers(1, 40), k1=st.integers(1, 70), k2=st.sampled_from([0, 0, 1, 3, 4, 17]), n=st.integers(1, 150)
)


@settings(max_examples=120, deadline=None)
@given(
    **SIZES, activation=st.sampled_from(list(simd.ACTIVATIONS)), bias=st.booleans(), residual=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_agrees_with_float64(rows, k1, k2, n, activation, bias, residual, seed):
    rng = np.random.default_rng(seed)
    x, x2, w = normal(rng, rows, k1), normal(rng, rows, k2) if k2 else None, normal(rng, k1 + k2, n)
    b, res = normal(rng, n) if bias else None, normal(rng, rows, n) if residual else None
    got = matmul(x, w, x2=x2, bias=b, residual=res, activation=activation)
    both = x if x2 is None else np.concatenate([x, x2], 1)
    inner = both.astype(np.float64) @ w.astype(np.float64) + (0 if b is None else b)
    wanted = ACTIVATION_MEANING[activation](inner) + (0 if res is None else res)
    scale = np.abs(both).astype(np.float64) @ np.abs(w) + 4
    slope = 1 + 2 * np.abs(inner) if activation == "relu2" else 1.2
    assert (np.abs(got - wanted) <= 2**-24 * (k1 + k2 + 8) * scale * slope).all()


@settings(max_examples=60, deadline=None)
@given(**SIZES, seed=st.integers(0, 2**32 - 1))
def test_every_output_is_one_chain_over_k(rows, k1, k2, n, seed):
    rng = np.random.default_rng(seed)
    x, x2, w = normal(rng, rows, k1), normal(rng, rows, k2) if k2 else None, normal(rng, k1 + k2, n)
    same_bits(matmul(x, w, x2=x2), chain(x if x2 is None else np.concatenate([x, x2], 1), w))


@pytest.mark.parametrize("activation", ["none", "silu", "tanh"])
@pytest.mark.parametrize("k1,k2,n", [(37, 0, 150), (16, 9, 64), (1, 0, 17), (1100, 0, 100)])
def test_bits_do_not_depend_on_the_batch(activation, k1, k2, n):
    """k 1100 is beyond _DEEP, where the groups are narrower."""
    rng = np.random.default_rng(5)
    x, x2, w = normal(rng, 40, k1), normal(rng, 40, k2) if k2 else None, normal(rng, k1 + k2, n)
    bias, residual = normal(rng, n), normal(rng, 40, n)
    part = lambda a, s: None if a is None else a[s]  # noqa: E731
    run = lambda s, **more: matmul(  # noqa: E731
        x[s], w, x2=part(x2, s), bias=bias, residual=residual[s], activation=activation, **more
    )
    alone = np.concatenate([run(slice(r, r + 1)) for r in range(40)])
    for rows in range(1, 41):
        same_bits(run(slice(0, rows)), alone[:rows])
        same_bits(run(slice(40 - rows, 40)), alone[40 - rows :])
    order = rng.permutation(40)
    same_bits(run(order), alone[order])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
def test_bits_do_not_depend_on_how_panels_are_split(rows):
    rng = np.random.default_rng(6)
    x, w, bias = normal(rng, rows, 33), normal(rng, 33, 150), normal(rng, 150)
    whole = matmul(x, w, bias=bias, activation="gelu")
    for splits in ([1], [3], [9], [2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]):
        same_bits(matmul(x, w, bias=bias, activation="gelu", splits=splits), whole)


def test_columns_beyond_n_and_panels_outside_the_range_are_not_stored():
    rng = np.random.default_rng(7)
    x, w = normal(rng, 9, 12), normal(rng, 12, 37)
    packed = simd.pack_panels(w)
    y = np.full((9, 64), UNTOUCHED)
    empty = np.zeros(1, np.int64)
    call(
        addresses(x), empty, 9, 12, 0, packed.ctypes.data, packed.strides[0], 1, 3, 37, 0, empty, False, addresses(y), 0
    )  # fmt: skip
    same_bits(y[:, 16:37], chain(x, w)[:, 16:])
    assert (y[:, :16] == UNTOUCHED).all() and (y[:, 37:] == UNTOUCHED).all()


def test_overlapping_rows_are_a_convolution():
    """kernel 5, stride 2, 3 channels: row t starts at frame 2 t of one buffer."""
    rng = np.random.default_rng(8)
    frames, w = normal(rng, 41, 3), normal(rng, 15, 24)
    windows = np.lib.stride_tricks.as_strided(frames, (19, 15), (2 * 3 * 4, 4))
    same_bits(matmul(windows, w), chain(windows, w))


def test_leading_k_can_be_skipped():
    rng = np.random.default_rng(9)
    x, w = normal(rng, 7, 20), normal(rng, 29, 40)
    packed, y, empty = simd.pack_panels(w), np.zeros((7, 40), np.float32), np.zeros(1, np.int64)
    start = packed.ctypes.data + 9 * simd.PANEL * 4
    call(addresses(x), empty, 7, 20, 0, start, packed.strides[0], 0, 3, 40, 0, empty, False, addresses(y), 0)
    same_bits(y, chain(x, w[9:]))


def test_the_residual_may_be_y_itself():
    rng = np.random.default_rng(10)
    x, w, residual = normal(rng, 11, 20), normal(rng, 20, 70), normal(rng, 11, 70)
    y = residual.copy()
    same_bits(matmul(x, w, residual=y, y=y, activation="silu"), matmul(x, w, residual=residual, activation="silu"))


def test_no_rows_and_no_panels_are_nothing():
    empty = np.zeros(0, np.int64)
    call(empty, empty, 0, 4, 0, 0, 256, 0, 4, 64, 0, empty, False, empty, 0)
    call(empty, empty, 3, 4, 0, 0, 256, 2, 2, 64, 0, empty, False, empty, 0)


def test_nan_stays_in_its_row():
    rng = np.random.default_rng(11)
    x, w = normal(rng, 12, 9), normal(rng, 9, 33)
    clean = matmul(x, w)
    x[4, 3] = np.nan
    got = matmul(x, w)
    assert np.isnan(got[4]).all()
    same_bits(np.delete(got, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize("k,n", [(1, 1), (3, 16), (5, 17), (2, 40)])
def test_pack_panels_is_zero_padded_and_aligned(k, n):
    w = normal(np.random.default_rng(12), k, n)
    packed = simd.pack_panels(w)
    assert packed.shape == (-(-n // 16), k, 16) and packed.dtype == np.float32
    assert packed.ctypes.data % 64 == 0 and packed.flags.c_contiguous
    flat = packed.transpose(1, 0, 2).reshape(k, -1)
    np.testing.assert_array_equal(flat[:, :n], w)
    assert not flat[:, n:].any()


def test_views_reach_memory_by_address():
    source, target = np.arange(9, dtype=np.float32), np.zeros(9, np.int32)
    copy_through_views(source.ctypes.data, target.ctypes.data, 9)
    np.testing.assert_array_equal(target, np.arange(9))


TARGETS = [
    ("avx512", "x86_64-unknown-linux-gnu", "skylake-avx512"),
    ("avx2", "x86_64-unknown-linux-gnu", "znver3"),
    ("neon", "aarch64-unknown-linux-gnu", "neoverse-n1"),
    ("sse", "x86_64-unknown-linux-gnu", "x86-64"),
    ("plain", "x86_64-unknown-linux-gnu", "x86-64"),
]


@pytest.mark.parametrize("name,triple,cpu", TARGETS)
def test_each_table_compiles_for_its_host_without_calls_or_spilled_accumulators(name, triple, cpu):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this llvmlite does not compile for {triple}")
    machine = target.create_target_machine(cpu=cpu, opt=3)
    table = next(table for row, _, table in simd.TILE_TABLE if row == name)
    assert table.shapes[-1][0] == 1 and all(table.group % panels == 0 for _, panels in table.shapes)
    assert list(table.shapes) == sorted(table.shapes, key=lambda shape: -shape[0])
    for rows, panels in table.shapes:
        module = ir.Module()
        module.triple, module.data_layout = triple, str(machine.target_data)
        simd._tile_function(module, table, rows, panels).linkage = "external"
        compiled = llvm.parse_assembly(str(module))
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(compiled, builder)
        text = machine.emit_assembly(compiled)
        assert "call" not in text and "\tbl\t" not in text
        assert not re.findall(r".*%[xyz]mm.*\(%rsp\).*|.*\(%rsp\).*%[xyz]mm.*|.*\bq\d+.*\[sp.*", text)


def _python(code, tmp_path, **environment):
    path = os.pathsep.join(str(Path(p)) for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    ).stdout  # fmt: skip


def test_a_host_without_fma_keeps_the_same_promises(tmp_path):
    """numba told to compile for plain x86-64: 4 lanes, a multiply and an add."""
    if not simd.cpu_target.target_context.codegen().magic_tuple()[0].startswith("x86_64"):
        pytest.skip("x86-64 only")
    code = f"""
import importlib.util, numpy as np
spec = importlib.util.spec_from_file_location("t", {str(Path(__file__))!r})
t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)
rng = np.random.default_rng(1)
x, w = t.normal(rng, 23, 37), t.normal(rng, 37, 90)
y = t.matmul(x, w)
t.same_bits(y, t.chain(x, w))
for rows in range(1, 23):
    t.same_bits(t.matmul(x[:rows], w), y[:rows])
print(t.simd.HOST)
"""
    assert _python(code, tmp_path, NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="+sse2").strip() == "sse"


KERNEL = """
import numpy as np
from numba import cfunc, types
from wpk.ops import simd
from wpk.ops.memory import view_f32, view_i32

@cfunc(types.void(*[types.int64] * 8), cache=True)
def kernel(rows, n_rows, k, w, panels, n, y_row, activation):
    x_rows, y_rows = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    for r in range(n_rows):
        x_rows[r], y_rows[r] = rows + r * k * 4, y_row + r * n * 4
    simd.matmul_rows(x_rows, x_rows, n_rows, k, 0, w, k * 64, 0, panels, n, 0, x_rows, False, y_rows, activation)
"""

RUN_KERNEL = """
import numpy as np, kernel_module
from wpk.ops import simd
from wpk.ops.memory import view_f32, view_i32
rng = np.random.default_rng(3)
x, w = rng.normal(size=(13, 21)).astype(np.float32), rng.normal(size=(21, 50)).astype(np.float32)
packed, y = simd.pack_panels(w), np.zeros((13, 50), np.float32)
f = kernel_module.kernel
f.ctypes(x.ctypes.data, 13, 21, packed.ctypes.data, 4, 50, y.ctypes.data, simd.ACTIVATIONS["tanh"])
print(f.cache_hits, np.abs(y - np.tanh(x.astype(float) @ w)).max() < 1e-5, y.tobytes().hex())
"""


def test_a_cfunc_that_calls_the_engine_is_cached_on_disk(tmp_path):
    (tmp_path / "kernel_module.py").write_text(KERNEL)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN_KERNEL}"
    cache = str(tmp_path / "cache")
    first = _python(code, tmp_path, NUMBA_CACHE_DIR=cache).split()
    second = _python(code, tmp_path, NUMBA_CACHE_DIR=cache).split()
    assert first[:2] == ["0", "True"] and second[:2] == ["1", "True"]
    assert first[2] == second[2]
