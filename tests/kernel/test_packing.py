"""Weights packed by the kernel for GPUs: the bits that NumPy makes, of every kind of source, in every order."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.host_gpu import HostGpu, pack_on_host, packer
from wpk.ir.errors import KernelError
from wpk.kernel import cubin
from wpk.kernel.cubin import can_build
from wpk.kernel.driver import Gpu, find_device
from wpk.kernel.packing import STORED, WIDTH, Packer, Synthetic, Target, build_packing
from wpk.kernel.tile_order import tile_offset, tiled_bytes
from wpk.ops.evaluate import bf16_bits
from wpk.ops.operator import LIBRARY, make
from wpk.ops.tf32 import rounded_to_tf32
from wpk.registry.formats.tensors import bfloat16_to_float32
from wpk.registry.settings import settings as wpk_settings
from wpk.registry.weights.synthetic import synthetic_affine, synthetic_key, synthetic_values

FEW = settings(max_examples=25, deadline=None)
# n, k, shares, splits: one share and many, groups that do not divide, chunks that do not, one group in all
CUTS = [
    (8, 64, 1, 1),
    (8, 7, 1, 1),
    (176, 100, 1, 1),
    (80, 130, 3, 1),
    (360, 200, 7, 3),
    (64, 448, 8, 7),
    (24, 321, 2, 2),
]


def tiles_by_walking(matrix: np.ndarray, shares: int, splits: int, depth: int = 64) -> np.ndarray:
    """A matrix in tile order, written down as the order is told: part by part, chunk by chunk, row by row."""
    n, k = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, -k % depth)))
    groups, chunks, made = n // 8, padded.shape[1] // depth, []
    for share in range(shares):
        rows = padded[8 * (groups * share // shares) : 8 * (groups * (share + 1) // shares)]
        for split in range(splits):
            for chunk in range(chunks * split // splits, chunks * (split + 1) // splits):
                for own, row in enumerate(rows[:, depth * chunk : depth * chunk + depth]):
                    pieces = row.reshape(8, depth // 8)
                    made.append(pieces[[piece ^ (own & 7) for piece in range(8)]].reshape(-1))
    return np.concatenate(made)


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A tensor as a file has it, and its numbers as float32."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        bits = bf16_bits(values)
        return bits, bfloat16_to_float32(bits)
    stored = values.astype(dtype)
    return stored, stored.astype(np.float32)


def packed(gpu: HostGpu, source, n, k, *, stored="bf16", shares=0, splits=1, staging=4096) -> np.ndarray:
    """A whole tensor packed into memory of its own; its numbers as stored."""
    size = tiled_bytes(n, k, WIDTH[stored]) if shares else n * k * WIDTH[stored]
    address = gpu.allocate(size)
    work = packer(gpu, 1, staging)
    work.pack(source, 0, n * k, 0, Target(address, stored, n, k, shares, splits), 0)
    assert work.broken() == []
    work.close()
    return gpu.read(address, size).view(np.uint16 if stored == "bf16" else np.float32)


# --- where numbers go -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n,k,shares,splits", CUTS)
def test_an_element_lies_where_the_order_is_told(n: int, k: int, shares: int, splits: int) -> None:
    matrix = np.arange(1, n * k + 1).reshape(n, k)
    wanted = tiles_by_walking(matrix, shares, splits)
    at = np.array([[tile_offset(n, k, shares, splits, r, c) for c in range(k)] for r in range(n)])
    assert wanted.size * 2 == tiled_bytes(n, k) and (at % 2 == 0).all()
    np.testing.assert_array_equal(wanted[at // 2], matrix)


@FEW
@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 40), st.integers(1, 9))
def test_no_two_elements_meet(groups: int, k: int, shares: int, splits: int) -> None:
    n, shares, splits = 8 * groups, min(shares, groups), min(splits, -(-k // 64))
    at = {tile_offset(n, k, shares, splits, r, c) for r in range(n) for c in range(0, k, 5)}
    assert len(at) == n * len(range(0, k, 5)) and min(at) >= 0 and max(at) < tiled_bytes(n, k)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
@pytest.mark.parametrize("n,k,shares,splits", CUTS)
def test_tiles_are_those_of_the_matrix(n: int, k: int, shares: int, splits: int, dtype: str) -> None:
    source, values = numbers((n, k), dtype)
    found = packed(HostGpu(), source, n, k, shares=shares, splits=splits)
    np.testing.assert_array_equal(found, tiles_by_walking(bf16_bits(values), shares, splits))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
@pytest.mark.parametrize("n,k,shares", sorted({(n, k, shares) for n, k, shares, _ in CUTS}))
def test_tiles_of_f32_are_those_of_the_matrix_in_tf32(n: int, k: int, shares: int, dtype: str) -> None:
    source, values = numbers((n, k), dtype)
    found = packed(HostGpu(), source, n, k, stored="tf32", shares=shares)
    np.testing.assert_array_equal(found, tiles_by_walking(rounded_to_tf32(values), shares, 1, 32))
    wanted = make(LIBRARY.get("pack_tf32_tiles"), {"shares": shares}).meaning(values)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def as_stored(values: np.ndarray, stored: str) -> np.ndarray:
    return {"f32": np.asarray, "bf16": bf16_bits, "tf32": rounded_to_tf32}[stored](values)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_a_table_keeps_its_order(dtype: str, stored: str) -> None:
    source, values = numbers((33, 77), dtype)
    found = packed(HostGpu(), source, 33, 77, stored=stored)
    np.testing.assert_array_equal(found, as_stored(values, stored).reshape(-1))


@pytest.mark.parametrize("staging", [64, 4096, 1 << 20])
def test_pieces_of_any_size_give_the_same(staging: int) -> None:
    source, values = numbers((40, 70), "float32")
    gpu = HostGpu()
    found = packed(gpu, source, 40, 70, shares=2, splits=2, staging=staging)
    np.testing.assert_array_equal(found, tiles_by_walking(bf16_bits(values), 2, 2))
    assert len(gpu.launches) == -(-source.nbytes // staging)


def test_rows_of_several_tensors_make_one_matrix() -> None:
    (a, a_values), (b, b_values) = numbers((16, 70), "float32", 1), numbers((24, 70), "bfloat16", 2)
    gpu = HostGpu()
    target = Target(gpu.allocate(tiled_bytes(32, 70)), "bf16", 32, 70, 3, 1)
    work = packer(gpu, 2)
    work.pack(a, 0, 16 * 70, 0, target, 0)
    work.pack(b, 8 * 70, 16 * 70, 16 * 70, target, 1)  # without its first 8 rows
    work.close()
    wanted = tiles_by_walking(bf16_bits(np.concatenate([a_values, b_values[8:]])), 3, 1)
    np.testing.assert_array_equal(gpu.read(target.address, tiled_bytes(32, 70)).view(np.uint16), wanted)


# --- what numbers become ------------------------------------------------------------------------------------------
def test_every_half_and_every_bf16_is_converted_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for source, values in ((every.view(np.float16), every.view(np.float16)), (every, bfloat16_to_float32(every))):
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(values.astype(np.float32))
        found = packed(HostGpu(), source[finite], 1, int(finite.sum()), stored="f32")
        np.testing.assert_array_equal(found.view(np.uint32), values[finite].astype(np.float32).view(np.uint32))


def test_rounding_to_tf32_is_to_nearest_and_away_from_zero() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFFE000) | 0x1000  # halfway
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    found = packed(HostGpu(), values, 1, values.size, stored="tf32", staging=1 << 20)
    np.testing.assert_array_equal(found.view(np.uint32), rounded_to_tf32(values).view(np.uint32))
    assert not (found.view(np.uint32) & 0x1FFF).any()
    exact = values.astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 10)
    np.testing.assert_array_equal(found, np.sign(exact) * np.floor(np.abs(exact) / step + 0.5) * step)


def test_rounding_is_to_nearest_even() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[::2] = (bits[::2] & 0xFFFF0000) | 0x8000  # halfway
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(packed(HostGpu(), values, 1, values.size, staging=1 << 20), bf16_bits(values))


@pytest.mark.parametrize("shape", [(24, 70), (700,)])
@pytest.mark.parametrize("seed", [0, 7])
def test_synthetic_numbers_are_those_of_the_weights_source(shape: tuple[int, ...], seed: int) -> None:
    key, count = synthetic_key("layer.0.weight", seed), int(np.prod(shape))
    offset, scale = synthetic_affine(shape, 1.5)
    wanted = synthetic_values(key, offset, scale, 0, count)
    found = packed(HostGpu(), Synthetic(key, offset, scale), 1, count, stored="f32")
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    if len(shape) == 2:
        found = packed(HostGpu(), Synthetic(key, offset, scale), *shape, shares=2, splits=2)
        np.testing.assert_array_equal(found, tiles_by_walking(bf16_bits(wanted).reshape(shape), 2, 2))


def test_synthetic_numbers_can_start_anywhere() -> None:
    key = (1 << 64) - 12345
    wanted = synthetic_values(key, 0.0, 0.5, 1000, 300)
    gpu = HostGpu()
    target = Target(gpu.allocate(1200), "f32", 1, 300)
    work = packer(gpu, 1)
    work.pack(Synthetic(key, 0.0, 0.5), 1000, 300, 0, target, 0)
    work.close()
    np.testing.assert_array_equal(gpu.read(target.address, 1200).view(np.float32), wanted)


# --- the host's part ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_tensors_that_are_not_finite_are_told_apart(dtype: str, value: float) -> None:
    if value == 1e300 and dtype != "float64":
        pytest.skip("no such number")
    gpu = HostGpu()
    work = packer(gpu, 3)
    target = Target(gpu.allocate(4 * 5000), "f32", 1, 5000)
    for mark in range(3):
        source, _ = numbers((5000,), dtype)
        if mark == 1:
            source[4321] = bf16_bits(np.array([value]))[0] if dtype == "bfloat16" else value
        work.pack(source, 0, 5000, 0, target, mark)
    assert work.broken() == [1]
    work.close()


def test_nothing_is_left_behind() -> None:
    gpu = HostGpu()
    work = packer(gpu, 5)
    address = gpu.allocate(20_000)
    work.pack(np.ones(10_000, np.float32), 0, 10_000, 0, Target(address, "bf16", 1, 10_000), 4)
    work.close()
    assert list(gpu.kept) == [address] and not gpu.mapped and not gpu.modules


def test_the_index_of_a_number_may_exceed_32_bits() -> None:
    gpu, first = HostGpu(), 3 << 31
    address = gpu.allocate(64)
    pack_on_host(
        0, 1, 0, 3, first, 4, first, address - 2 * first, 1, 1, 1 << 40, 0, 1, 99,
        0, int(np.float32(1).view(np.int32)), gpu.allocate(4),
    )  # fmt: skip
    wanted = bf16_bits(synthetic_values(99, 0.0, 1.0, first, 4))
    np.testing.assert_array_equal(gpu.read(address, 8).view(np.uint16), wanted)


# --- for the GPU --------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not can_build(), reason="numba-cuda or ptxas is not installed")
def test_the_kernel_is_built_without_a_gpu_and_fuses_nothing() -> None:
    from wpk.kernel.packing import ENTRY, packing_ptx

    made = build_packing(wpk_settings().kernels)
    assert made.image[:4] == b"\x7fELF" and made.spill_bytes == 0 and made.stack_bytes == 0
    text = packing_ptx()
    assert f".visible .entry {ENTRY}(" in text and "fma" not in text


@pytest.mark.skipif(not can_build(), reason="numba-cuda or ptxas is not installed")
def test_a_machine_without_compilers_takes_what_another_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_packing(tmp_path)
    monkeypatch.setattr(cubin, "can_build", lambda: False)
    monkeypatch.setattr(cubin, "ptxas_version", lambda: "none")
    found = build_packing(tmp_path)
    assert found.cached and found.path == made.path
    monkeypatch.setattr(cubin, "require_numba_cuda", lambda: None)
    monkeypatch.setattr(cubin, "find_ptxas", lambda: None)
    made.path.write_bytes(b"damaged")
    with pytest.raises(KernelError, match="ptxas is not installed"):
        build_packing(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["bf16", "tf32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "synthetic"])
@pytest.mark.parametrize("n,k,shares,splits", [*CUTS, (13424, 4480, 132, 1), (4480, 15680, 26, 5), (0, 0, 0, 0)])
def test_a_gpu_packs_the_same_bits(n: int, k: int, shares: int, splits: int, dtype: str, stored: str) -> None:
    n, k = (n, k) if n else (3001, 1003)  # a table, row-major
    splits = 1 if stored == "tf32" else splits
    gpu = Gpu(find_device())
    try:
        if dtype == "synthetic":
            key, (offset, scale) = synthetic_key("a", 3), synthetic_affine((n, k))
            source, values = Synthetic(key, offset, scale), synthetic_values(key, offset, scale, 0, n * k).reshape(n, k)
        else:
            source, values = numbers((n, k), dtype)
        size = tiled_bytes(n, k, WIDTH[stored]) if shares else WIDTH[stored] * n * k
        address, began = gpu.allocate(size), time.perf_counter()
        work = Packer(gpu, build_packing(wpk_settings().kernels), 1)
        ready = time.perf_counter()
        work.pack(source, 0, n * k, 0, Target(address, stored, n, k, shares, max(splits, 1)), 0)
        assert work.broken() == []
        print(f"{dtype} [{n}, {k}]: {ready - began:.3f} s, then {time.perf_counter() - ready:.4f} s")
        work.close()
        bits = as_stored(values, stored)
        depth = 128 // WIDTH[stored]
        wanted = tiles_by_walking(bits, shares, splits, depth) if shares else bits.reshape(-1)
        np.testing.assert_array_equal(gpu.read(address, size).view(bits.dtype), wanted)
    finally:
        gpu.close()


@pytest.mark.gpu
def test_a_gpu_makes_ten_billion_synthetic_weights_in_seconds() -> None:
    gpu = Gpu(find_device())
    try:
        n, k = 131072, 4480
        address = gpu.allocate(2 * n * k)
        work = Packer(gpu, build_packing(wpk_settings().kernels), 1)
        began = time.perf_counter()
        for turn in range(17):
            work.pack(Synthetic(turn, 0.0, 1.0), 0, n * k, 0, Target(address, "bf16", n, k, 1024, 1), 0)
        assert work.broken() == []
        seconds = time.perf_counter() - began
        print(f"{17 * n * k / seconds / 1e9:.1f} billion weights a second")
        work.close()
        assert seconds < 20
    finally:
        gpu.close()
