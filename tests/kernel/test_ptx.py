"""Every PTX instruction that we write: what numba-cuda and LLVM make of it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

from numba import cuda
from numba.cuda import types

from wpk.kernel import ptx
from wpk.kernel.cubin import assemble, compile_ptx, find_ptxas
from wpk.kernel.ptx import INSTRUCTIONS, Effect, Instruction

SIGNATURE = types.void(types.int64, types.int32, types.float32)
ARGUMENT = {"l": "l", "r": "r", "f": "f"}
KEEP = {"l": "ptx.store_relaxed_gpu(l, {})", "r": "ptx.store_relaxed_sys_32(l, {})", "f": "ptx.store_1(l, {})"}


def text_of(source: str, **names: Any) -> str:
    """PTX of a kernel `kernel(l: i64, r: i32, f: f32)` with this body."""
    space: dict[str, Any] = {"ptx": ptx, "cuda": cuda, "types": types, **names}
    lines = "\n".join(f"    {line}" for line in source.splitlines())
    exec(f"def kernel(l, r, f):\n{lines}\n", space)
    return compile_ptx(space["kernel"], SIGNATURE, "probe")


def ptx_of(source: str, **names: Any) -> list[str]:
    """Its instructions, one a line."""
    text = text_of(source, **names)
    body = text[text.index("{", text.index(".entry")) :]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("//")]


def calls(row: Instruction) -> str:
    return f"ptx.{row.name}({', '.join(ARGUMENT[c] for c in row.operands)})"


def use(row: Instruction) -> str:
    """Python that calls an instruction in a way that LLVM can't drop."""
    if not row.results:
        return calls(row)
    names = [f"x{i}" for i in range(len(row.results))]
    kept = [KEEP[kind].format(name) for kind, name in zip(row.results, names, strict=True)]
    return "\n".join([f"{', '.join(names)} = {calls(row)}", *kept])


def pattern(row: Instruction) -> str:
    """The template with any register for its operands."""
    return re.sub(r"\\\$\d+", r"%[a-z]+\\d+", re.escape(row.template.rstrip(";"))).replace(r"\ ", r"\s+")


@pytest.mark.parametrize("row", INSTRUCTIONS, ids=lambda row: row.name)
def test_the_instruction_is_emitted_as_written(row: Instruction) -> None:
    found = [line for line in ptx_of(use(row)) if re.search(pattern(row), line)]
    assert found, row.template


@pytest.mark.parametrize("row", [row for row in INSTRUCTIONS if len(row.results) > 1], ids=lambda row: row.name)
def test_several_results_come_in_their_order(row: Instruction) -> None:
    lines = ptx_of(use(row))
    (written,) = (line for line in lines if re.search(pattern(row), line))
    registers = re.findall(r"%[a-z]+\d+", written)[: len(row.results)]
    assert len(set(registers)) == len(row.results)
    # Registers may be copied between the instruction and its stores.
    origin = {target: source for line in lines for target, source in re.findall(r"^mov\.\w+\s+(\S+), (\S+);", line)}
    opcode = {"f": "st.global.f32", "r": "st.relaxed.sys.global.u32", "l": "st.relaxed.gpu.global.u64"}[row.results[0]]
    stored = [m.group(1) for line in lines if (m := re.search(rf"{re.escape(opcode)} \[\S+\], (\S+);", line))]
    assert [origin.get(name, name) for name in stored] == registers


@pytest.mark.parametrize("row", INSTRUCTIONS, ids=lambda row: row.name)
def test_an_unused_call_is_dropped_only_where_it_has_no_effect(row: Instruction) -> None:
    kept = any(re.search(pattern(row), line) for line in ptx_of(calls(row)))
    assert kept == (row.effect is not Effect.PURE)


@pytest.mark.skipif(find_ptxas() is None, reason="ptxas is not installed")
def test_ptxas_takes_all_of_them(tmp_path: Path) -> None:
    assemble(text_of("\n".join(use(row) for row in INSTRUCTIONS)), tmp_path / "all.cubin")
    assert (tmp_path / "all.cubin").stat().st_size > 0


# --- what is not a row ------------------------------------------------------------------------------------------------
def test_every_kind_of_state_space_is_said_where_it_is_known() -> None:
    for row in INSTRUCTIONS:
        if row.name.startswith("shared_"):
            assert ".shared" in row.template and row.operands[0] == "r"  # 32-bit addresses
        if row.name.startswith(("load_l2", "load_constant", "load_early", "store_")):
            assert ".global" in row.template and row.operands[0] == "l"
        if "::complete_tx" in row.template:
            assert row.operands[:2] == "rl" and row.effect is Effect.MEMORY


def test_a_shared_address_is_that_of_the_array() -> None:
    lines = ptx_of(
        "memory = cuda.shared.array(0, types.uint8)\nplace = ptx.shared_address(memory)\n"
        "ptx.shared_store_32(place, r)\nptx.store_32(l, ptx.shared_load_32(place))"
    )
    text = "\n".join(lines)
    (converted,) = re.findall(r"cvta\.to\.shared\.u64 t, (%rd\d+); cvt\.u32\.u64 (%r\d+), t;", text)
    assert f"st.shared.u32 [{converted[1]}], %r" in text and re.search(
        rf"ld\.shared\.u32 %r\d+, \[{converted[1]}\]", text
    )


@pytest.mark.skipif(find_ptxas() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("columns", [8, 88, 176])
@pytest.mark.parametrize(
    ("operands", "step", "layout"), [("bf16", "k16.f32.bf16.bf16", ", 0, 0"), ("tf32", "k8.f32.tf32.tf32", "")]
)
def test_a_product_of_matrices_is_four_steps_over_128_bytes_of_a_row(
    columns: int, operands: str, step: str, layout: str, tmp_path: Path
) -> None:
    count = columns // 2
    stores = "\n".join(f"ptx.store_1(l + {4 * i}, sums[{i}])" for i in range(count))
    source = f"sums = multiply(multiply(zeros(), l, l + 7), l, l)\n{stores}"
    names = {"zeros": ptx.make_zeros(count), "multiply": ptx.make_wgmma(columns, operands)}
    whole = text_of(source, **names)
    assemble(whole, tmp_path / "product.cubin")
    text = whole[whole.index(".entry") :]
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{([^}]*)\}, a, b, p, 1, 1" + layout + ";", text)
    assert [kind for kind, _ in products] == [f"m64n{columns}{step}"] * 8
    for _, registers in products:
        assert len(set(registers.split(", "))) == count
    # A step is 32 bytes of a row, 16 columns or 8; an address in a descriptor counts 16 bytes.
    assert (
        re.findall(r"add\.s64 a, %rd\d+, (\d+); add\.s64 b, %rd\d+, (\d+);", text)
        == [(str(2 * k), str(2 * k)) for k in range(4)] * 2
    )
    order = re.findall(r"wgmma\.(fence|mma_async|commit_group|wait_group)", text)
    assert order == (["fence"] + ["mma_async"] * 4 + ["commit_group", "wait_group"]) * 2
    assert text.count("wait_group.sync.aligned 0;") == 2
    assert text.count("st.global.f32") == count


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
        assert set(row.results + row.operands) <= set("rlf")
        assert len(set(row.results)) <= 1  # several results are of one kind: numba's tuples of one type
        assert row.template in (ptx.BY_NAME[row.name].__doc__ or "")
