"""Every PTX instruction that we write: what numba-cuda and LLVM make of it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cubin import assemble, compile_ptx, find_ptxas
from wpk.kernel.ptx import INSTRUCTIONS, Effect, Instruction

SIGNATURE = types.void(types.int64, types.int32, types.float32)
ARGUMENT = {"l": "l", "r": "r", "f": "f"}
KEEP = {"l": "ptx.store_relaxed_gpu(l, {})", "r": "ptx.store_relaxed_sys_32(l, {})"}


def ptx_of(source: str) -> list[str]:
    """The instructions of a kernel `kernel(l: i64, r: i32, f: f32)` with this body, one a line."""
    space: dict[str, Any] = {"ptx": ptx}
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    exec(f"def kernel(l, r, f):\n{lines}\n", space)
    text = compile_ptx(space["kernel"], SIGNATURE, "probe")
    body = text[text.index("{", text.index(".entry")) :]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]


def calls(row: Instruction) -> str:
    return f"ptx.{row.name}({', '.join(ARGUMENT[c] for c in row.operands)})"


def use(row: Instruction) -> str:
    """Python that calls an instruction in a way that LLVM can't drop."""
    if row.results == "f":
        return f"x = {calls(row)}\nif x > f:\n    ptx.store_relaxed_gpu(l, 1)"
    return KEEP[row.results].format(calls(row)) if row.results else calls(row)


def pattern(row: Instruction) -> str:
    """The template with any register for its operands."""
    return re.sub(r"\\\$\d+", r"%[a-z]+\\d+", re.escape(row.template.rstrip(";"))).replace(r"\ ", r"\s+")


@pytest.mark.parametrize("row", INSTRUCTIONS, ids=lambda row: row.name)
def test_the_instruction_is_emitted_as_written(row: Instruction) -> None:
    found = [line for line in ptx_of(use(row)) if re.search(pattern(row), line)]
    assert found, row.template


@pytest.mark.parametrize("row", INSTRUCTIONS, ids=lambda row: row.name)
def test_an_unused_call_is_dropped_only_where_it_has_no_effect(row: Instruction) -> None:
    kept = any(re.search(pattern(row), line) for line in ptx_of(calls(row)))
    assert kept == (row.effect is not Effect.PURE)


@pytest.mark.skipif(find_ptxas() is None, reason="ptxas is not installed")
def test_ptxas_takes_all_of_them(tmp_path: Path) -> None:
    space: dict[str, Any] = {"ptx": ptx}
    lines = "\n".join("    " + line for row in INSTRUCTIONS for line in use(row).splitlines())
    exec(f"def kernel(l, r, f):\n{lines}\n", space)
    assemble(compile_ptx(space["kernel"], SIGNATURE, "probe"), tmp_path / "all.cubin")
    assert (tmp_path / "all.cubin").stat().st_size > 0


def test_a_placed_read_stays_in_its_loop() -> None:
    lines = ptx_of("for i in range(l):\n    ptx.store_relaxed_sys_32(l + 4 * i, ptx.thread_index())")
    labels = [i for i, line in enumerate(lines) if line.startswith("$L")]
    assert min(labels) < next(i for i, line in enumerate(lines) if "%tid.x" in line)


def test_a_constant_is_loaded_once_for_a_loop() -> None:
    lines = ptx_of("for i in range(r):\n    ptx.store_relaxed_gpu(l + 8 + 8 * i, ptx.load_constant(l))")
    loads, stores = (sum(line.startswith(op) for line in lines) for op in ("ld.global.nc.u64", "st.relaxed.gpu"))
    assert 1 <= loads < stores  # the loop is unrolled; each copy of it has the load in front


def test_nothing_moves_across_what_orders_memory() -> None:
    lines = ptx_of(
        "ptx.store_relaxed_gpu(l, 1)\nptx.barrier()\nptx.add_release_gpu(l + 128, 1)\n"
        "v = ptx.load_acquire_gpu(l + 128)\nw = ptx.load_relaxed_gpu(l)\nptx.store_release_sys(l + 256, v + w)"
    )
    wanted = ["st.relaxed.gpu", "bar.sync", "red.release.gpu", "ld.acquire.gpu", "ld.relaxed.gpu", "st.release.sys"]
    order = [next(i for i, line in enumerate(lines) if line.startswith(op)) for op in wanted]
    assert order == sorted(order)


def test_products_are_fused_only_where_the_code_says_so() -> None:
    lines = ptx_of("x = f * f + f\nif x > f:\n    ptx.store_relaxed_gpu(l, 1)")
    assert any(line.startswith("mul.rn.f32") for line in lines) and any(line.startswith("add.rn.f32") for line in lines)
    assert not any("fma" in line for line in lines)


def test_integers_are_signed_and_documented() -> None:
    for row in INSTRUCTIONS:
        assert set(row.results + row.operands) <= set("rlf") and len(row.results) <= 1
        assert row.template in (ptx.BY_NAME[row.name].__doc__ or "")
