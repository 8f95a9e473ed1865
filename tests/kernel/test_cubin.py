"""The resident kernel built without a GPU: for every model of the zoo, with its registers, and its cache."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import multiprocessing
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from wpk.kernel.cubin import ARCH, CAPABILITY, ENTRY, Cubin, build_cubin, can_build, cubin_key, read_report
from wpk.kernel.layout import (
    BLOCK_THREADS,
    CONTEXT,
    LINE,
    PRODUCTS,
    SHARED_LIMIT,
    STOPPED,
    STREAMED,
    THREADS,
    Shape,
    shape_of,
    sync_bytes,
)
from wpk.kernel.plan import require_sizes
from wpk.ops import LIBRARY
from wpk.ops.operator import Operator
from wpk.ops.requirements import Selection
from wpk.registry.models import catalog, find_model
from wpk.registry.settings import settings
from wpk.scheduler.compile import compile_graph
from wpk.scheduler.program import Program
from wpk.scheduler.target import TARGETS
from wpk.zoo.build import build_graph

needs_compiler = pytest.mark.skipif(not can_build(), reason="numba-cuda or ptxas is not installed")
# The whole conversation takes half a minute to compile, and has the operators of its small one.
MODELS = sorted(name for name in catalog().builtin() if name != "voicechat")
SMALL = ("add@1", "matmul@1")
STREAMING = ("mamba2_step@1", "tiled_matmul@1")
PRODUCTS_OF_ALL_KINDS = tuple(f"{name}@1" for name in PRODUCTS)


@dataclass(frozen=True)
class Limits:
    """Of a thread: registers, bytes spilled (stores and loads), bytes of stack."""

    registers: int
    spilled: int
    stack: int


# 65,536 registers are 224 for each of a block's 288 threads; a spill is a defect.
PLAIN = Limits(224, 0, 0)
# What streams holds sums of matrix products in registers, twice as many a thread with 128 sessions. What spills there
# is known and to be brought down: these limits are there so that it does not grow unseen, and are to go down with it.
STREAMS = {64: Limits(168, 400, 128), 128: Limits(168, 1700, 448)}
PRODUCTS_ALONE = {64: Limits(168, 300, 96), 128: Limits(168, 1300, 400)}
# The whole conversation has three times as many operators; what they spill is outside of what streams.
CONVERSATION = {128: Limits(168, 3400, 512)}
MOST_SECONDS = 90.0  # alone on the machine
BESIDE_OTHERS = 3.0  # tests run side by side


@functools.cache
def program(model: str, slots: int = 8) -> Program:
    spec = find_model(model)
    library = Selection(spec.operators, LIBRARY)
    steps = spec.clock.steps_per_beat
    return compile_graph(build_graph(spec), library, TARGETS["h200"], capacity=slots, steps=steps).program


@functools.cache
def cubin(operators: tuple[str, ...], slots: int = 8) -> Cubin:
    return build_cubin(operators, settings().kernels, slots)


def streams(model: str) -> bool:
    return find_model(model).precision.policy == "bf16"


def kernels() -> list[tuple[str, int]]:
    """Models and slots of which each needs a kernel: for what streams, more than 64 slots need another.

    A kernel that streams takes up to a minute: the backbones' operators are all in the small one's, and what of the
    conversation depends on the slots is theirs.
    """
    small = {model: set(program(model).operators) for model in ("nemotron-h-tiny", "voicechat-tiny")}
    others = [model for model in MODELS if streams(model) and model not in small]
    assert all(set(program(model).operators) <= small["nemotron-h-tiny"] for model in others)
    plain = [(model, 8) for model in MODELS if not streams(model)]
    return [*plain, ("nemotron-h-tiny", 8), ("nemotron-h-tiny", 112), ("voicechat-tiny", 112)]


# --- every model --------------------------------------------------------------------------------------------------
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("model", "slots"), kernels())
def test_the_kernel_of_a_model_is_built_within_its_limits(model: str, slots: int) -> None:
    operators = program(model, slots).operators
    shape = shape_of(operators, slots)
    assert bool(shape.sessions) == streams(model)
    table = CONVERSATION if model == "voicechat-tiny" else STREAMS
    made, limits = cubin(operators, slots), table.get(shape.sessions, PLAIN)
    print(f"{model} of {slots}: {made.registers} registers, {made.spill_bytes} bytes spilled, {made.stack_bytes} of "
          f"stack, {len(made.image)} bytes, {made.build_s} s, ring of {shape.ring_bytes} bytes")  # fmt: skip
    assert made.image[:4] == b"\x7fELF"
    assert 0 < made.registers <= limits.registers
    assert made.spill_bytes <= limits.spilled and made.stack_bytes <= limits.stack
    assert made.build_s < BESIDE_OTHERS * MOST_SECONDS
    note = json.loads(made.path.with_suffix(".json").read_text())
    assert (note["operators"], note["sessions"]) == (list(operators), shape.sessions)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("slots", [8, 112])
def test_a_kernel_of_all_products_is_built_within_the_limits_of_what_streams(slots: int) -> None:
    sessions = shape_of(PRODUCTS_OF_ALL_KINDS, slots).sessions
    made, limits = cubin(PRODUCTS_OF_ALL_KINDS, slots), PRODUCTS_ALONE[sessions]
    print(f"{slots}: {made.registers} registers, {made.spill_bytes} bytes spilled, {made.stack_bytes} of stack, "
          f"{len(made.image)} bytes, {made.build_s} s")  # fmt: skip
    assert made.registers <= limits.registers
    assert made.spill_bytes <= limits.spilled and made.stack_bytes <= limits.stack


@pytest.mark.parametrize("slots", [8, 112])
@pytest.mark.parametrize("model", MODELS)
def test_the_sizes_of_a_model_are_those_that_a_gpu_takes(model: str, slots: int) -> None:
    made = program(model, slots)
    require_sizes(made, shape_of(made.operators, slots))


@needs_compiler
@pytest.mark.slow
def test_every_other_operator_has_a_body_for_the_gpu_that_compiles() -> None:
    from numba.cuda import types

    from wpk.kernel.cubin import without_device
    from wpk.kernel.cuda_library import block_body

    built = {name for model, slots in kernels() for name in program(model, slots).operators}
    with without_device():
        for operator in executed():
            # What is streamed has no body of its own (`wpk.kernel.streamed`); what is in a kernel is built above.
            if operator.name not in STREAMED and f"{operator.name}@{operator.version}" not in built:
                block_body(f"{operator.name}@{operator.version}").compile_device((types.int64,) * 8)


def test_what_is_streamed_is_executed() -> None:
    assert set(STREAMED) <= {operator.name for operator in executed()}


@needs_compiler
def test_threads_take_single_elements_where_a_part_is_a_chunk_of_them() -> None:
    from wpk.kernel.cuda_library import _GRAINS, _grain

    found = {}
    for operator in executed():
        body = LIBRARY.body(operator.name, operator.version, "cpu")
        assert body is not None
        found[operator.name] = _grain(body.function)
    assert {found[n] for n in ("add", "sigmoid", "clamp", "select", "cast", "copy")} == {256}
    assert {found[n] for n in ("lstm_cell", "gru_cell", "ring_shift", "depthwise_window")} == {64}
    assert {found[n] for n in ("attention", "layer_norm", "softmax", "overlap_add", "matmul", "magnitude")} == {1}
    assert all(hasattr(sys.modules[module], name) for module, (name, _) in _GRAINS.items())


def executed() -> list[type[Operator]]:
    """Operators that a kernel executes: those with a body for the CPU."""
    found = [operator for operator in LIBRARY if LIBRARY.body(operator.name, operator.version, "cpu")]
    assert len(found) > 50
    return found


# --- what is generated --------------------------------------------------------------------------------------------
@needs_compiler
def test_the_ptx_is_for_the_target_and_fuses_only_the_products_of_matmul() -> None:
    from wpk.kernel.cubin import kernel_ptx

    text = kernel_ptx(("add@1", "affine@1", "magnitude@1", "sigmoid@1"), Shape(0))
    assert re.search(rf"^\.target {ARCH}$", text, re.M)
    assert f".visible .entry {ENTRY}(" in text and f".maxntid {BLOCK_THREADS}, 1, 1" in text
    assert "fma" not in text and not re.search(r"\b(mul|add|sub)\.f32", text)  # without .rn, ptxas might fuse
    assert not re.search(r"\b(approx|ftz)\b", text)
    assert "fma.rn.f32" in kernel_ptx(SMALL, Shape(0))
    # Nothing of what streams is in a kernel that streams nothing.
    assert not re.search(r"wgmma|cp\.async\.bulk\.tensor|mma\.sync", text)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("sessions", [64, 128])
def test_a_kernel_that_streams_has_its_matrix_instructions_and_copies(sessions: int) -> None:
    from wpk.kernel.cubin import kernel_ptx

    text = kernel_ptx((*STREAMING, "tf32_matmul@1"), Shape(sessions))
    # The two warpgroups share 176 rows of a weight, or with more than 64 sessions these.
    columns = {64: 88, 128: 176}[sessions]
    for step in ("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"):
        found = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+){re.escape(step)}", text)
        assert found == [str(columns)] * 4  # one loop over a stage: the kernel must fit the instruction cache
    assert "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier" in text
    assert "fence.proxy.async" in text
    assert f".maxntid {BLOCK_THREADS}, 1, 1" in text
    assert f"bar.sync 1, {THREADS}" in text


@needs_compiler
def test_the_dispatch_is_generated_from_the_operator_table() -> None:
    from numba import cuda

    from wpk.kernel.cubin import compile_ptx, without_device
    from wpk.kernel.cuda_library import switch

    with without_device():
        cases = {
            code: cuda.jit(device=True)(eval(f"lambda address: ptx.store_relaxed_gpu(address, {100 + code})", space()))
            for code in (0, 1, 5)
        }
        choose = switch("choose", cases, "address")

        def kernel(code: int, address: int) -> None:
            choose(code, address)

        from numba.cuda import types

        text = compile_ptx(kernel, types.void(types.int64, types.int64), "probe")
    assert {int(n) for n in re.findall(r"mov\.u64\s+%rd\d+, (\d+);", text)} >= {100, 101, 105}
    assert len(re.findall("st.relaxed.gpu", text)) == 3


def space() -> dict[str, object]:
    from wpk.kernel import ptx

    return {"ptx": ptx}


@needs_compiler
@pytest.mark.parametrize(
    ("read", "place"),
    [
        ("_parameter(record, 0)", "+92]"),
        ("_parameter(record, 8)", "+124]"),
        ("_stride(record, 0)", "+64]"),
        ("_stride(record, 6)", "+88]"),
        ("_present(record, 0)", "+8]"),
        ("_present(record, 6)", "+56]"),
    ],
)
def test_the_gpu_reads_a_payload_s_fields_where_the_record_has_them(read: str, place: str) -> None:
    from numba.cuda import types

    from wpk.kernel import cuda_library, ptx
    from wpk.kernel.cubin import compile_ptx
    from wpk.ops.payload import PAYLOAD

    field, index = {"_par": "parameter", "_str": "stride", "_pre": "reference"}[read[:4]], int(read[-2])
    dtype, offset, *_ = PAYLOAD.fields[field]  # type: ignore[index]
    assert f"+{offset + index * dtype.base.itemsize}]" == place
    names = {**vars(cuda_library), "ptx": ptx}
    exec(f"def kernel(record, target):\n    ptx.store_relaxed_gpu(target, {read})", names)
    text = compile_ptx(names["kernel"], types.void(types.int64, types.int64), "probe")
    (load,) = re.findall(r"ld\.u(\d+) \S+ \[(%rd\d+)\];", text)
    width, register = load
    assert int(width) == 8 * dtype.base.itemsize
    assert f"add.s64 \t{register}, %rd" in text and text.split(f"add.s64 \t{register}, ")[1].split(";")[0].endswith(
        f", {place[1:-1]}"
    )


@needs_compiler
def test_the_gpu_reads_control_and_context_where_the_host_writes_them() -> None:
    from wpk.kernel import control, exchange, resident
    from wpk.kernel.streamed import producer

    fields = control.CONTROL.fields
    assert fields is not None
    for name in ("input_epoch", "output_epoch", "start_ns", "end_ns", "poison", "stalled"):
        assert getattr(control, name.upper()) == fields[name][1]
    assert exchange.MASKS == control.CONTROL.itemsize == 64
    assert resident.POISON_STALLED == control.Poison.STALLED
    source = "".join(inspect.getsource(module) for module in (resident, exchange, producer))
    assert all(re.search(rf"\b{name.upper()}\b", source) for name in CONTEXT)  # nothing is handed over for nothing


def test_shared_words_are_on_cache_lines_of_their_own() -> None:
    from wpk.kernel import layout

    assert [getattr(layout, name.upper()) for name in CONTEXT] == list(range(len(CONTEXT)))
    words = sorted({layout.COUNTER, layout.WORK, layout.ARRIVED})
    assert all(b - a >= LINE for a, b in itertools.pairwise(words))
    assert layout.LATE_BLOCK - layout.HEARTBEAT >= LINE and layout.WATCH_BYTES >= layout.LOST + 4
    assert sync_bytes(132) >= layout.ARRIVED + 8 * 132
    assert BLOCK_THREADS == THREADS + 32  # the producer's warp
    assert np.int64(STOPPED) > 132 * 10**12  # barriers of years


# --- shared memory ------------------------------------------------------------------------------------------------
def test_an_order_is_a_payload_and_what_a_task_needs_beside_it() -> None:
    from wpk.kernel import layout
    from wpk.ops.payload import OPERANDS, PAYLOAD

    assert PAYLOAD.itemsize == layout.ORDER_ADDRESSES
    assert layout.ORDER_MAP == layout.ORDER_ADDRESSES + 8 * OPERANDS
    slots = (layout.ORDER_SLOT_LO, layout.ORDER_SLOT_HI, layout.ORDER_PART_LO, layout.ORDER_PART_HI)
    assert slots == tuple(layout.ORDER_MAP + 8 + 4 * i for i in range(4))
    assert slots[-1] + 4 <= layout.ORDER_BYTES and layout.ORDER_BYTES % 16 == 0  # a bulk copy's unit


def test_a_shape_is_chosen_by_what_is_streamed_and_by_the_slots() -> None:
    assert [shape_of(SMALL, slots) for slots in (1, 64, 65, 512)] == [Shape(0)] * 4
    assert [shape_of(STREAMING, slots).sessions for slots in (1, 64, 65, 128, 130)] == [64, 64, 128, 128, 128]
    for name in STREAMED:
        assert shape_of((f"{name}@1", "add@1"), 8) == Shape(64)


@pytest.mark.parametrize("sessions", [0, 64, 128])
def test_shared_memory_is_divided_without_overlap(sessions: int) -> None:
    from wpk.kernel import layout

    shape = Shape(sessions)
    assert shape.shared_bytes <= SHARED_LIMIT
    assert 2 * shape.shared_bytes > SHARED_LIMIT + 1024  # so that a multiprocessor never has two blocks
    ends = [
        (layout.FULL, 8 * layout.BARRIERS), (layout.EMPTY, 8 * layout.BARRIERS), (layout.OPENED, 8),
        (layout.ENDED, 4), (layout.SEEN, 8), (layout.COUNTS, 8), (layout.FIRSTS, 8), (layout.FETCHED, 16),
        (layout.WAITING, 4), (layout.STAMP, 8), (layout.REDUCTION, 512), (layout.FACTORS, 4 * 128),
        (layout.BUFFER, 2 * layout.KEPT_ORDERS * layout.ORDER_BYTES), (layout.RING, shape.ring_bytes),
    ]  # fmt: skip
    for (start, size), (after, _) in itertools.pairwise(sorted(ends)):
        assert start + size <= after
    assert layout.BUFFER % 16 == 0 and layout.RING % 1024 == 0 and shape.ring_bytes % layout.STAGE_UNIT == 0
    if sessions:
        widest = layout.TILE_ROWS * layout.CHUNK_BYTES + sessions * layout.CHUNK_BYTES
        assert shape.stages(widest).count >= 4
        # A tile's rows are read as if there were 176, and 64 or 128 sessions: past its end is memory of the block.
        assert shape.staging_bytes >= widest
        assert 1024 + shape.staging + shape.staging_bytes + layout.OWN_BYTES <= SHARED_LIMIT
        assert shape.staging_bytes >= 4 * sessions * (layout.TILE_ROWS if sessions == 64 else layout.TILE_ROWS // 2)


def test_what_the_operators_allow_fits_a_stage() -> None:
    from wpk.kernel import layout
    from wpk.kernel.layout import CACHE_ROWS, STATE_ROW
    from wpk.ops.tiles import DEPTH, MOST_ROWS, TILE_SLOTS

    assert (MOST_ROWS, 2 * DEPTH) == (layout.TILE_ROWS, layout.CHUNK_BYTES)
    assert TILE_SLOTS == 128  # sessions of a task: one tile of the larger shape
    state = 40 * STATE_ROW + 2 * 512 + 16 + 4 * 40  # a part of a state, B, C, the terms, x
    cache = 2 * 8 * 128 * 2 * CACHE_ROWS  # keys and values of 8 heads of 128
    assert all(Shape(sessions).stages(size).count >= 4 for sessions in (64, 128) for size in (state, cache))


# --- the cache ----------------------------------------------------------------------------------------------------
@needs_compiler
def test_a_kernel_is_built_once_and_found_again(tmp_path: Path) -> None:
    first = build_cubin(SMALL, tmp_path)
    again = build_cubin(SMALL, tmp_path)
    assert (first.cached, again.cached) == (False, True)
    assert again.image == first.image and again.key == first.key == cubin_key(SMALL, Shape(0))
    assert (again.registers, again.spill_bytes, again.stack_bytes) == (first.registers, 0, 0)
    note = json.loads(first.path.with_suffix(".json").read_text())
    assert note["operators"] == list(SMALL)
    assert sorted(p.suffix for p in first.path.parent.iterdir()) == [".cubin", ".json", ".lock"]


@needs_compiler
@pytest.mark.parametrize("damage", ["cubin", "json", "gone"])
def test_a_damaged_entry_is_built_anew(tmp_path: Path, damage: str) -> None:
    first = build_cubin(SMALL, tmp_path)
    image = first.image
    if damage == "gone":
        first.path.unlink()
    else:
        first.path.with_suffix(f".{damage}").write_bytes(b"{}")
    assert build_cubin(SMALL, tmp_path).cached is False
    assert len(build_cubin(SMALL, tmp_path).image) == len(image)


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert build_cubin(SMALL, blocked / "kernels").image[:4] == b"\x7fELF"
    assert build_cubin(SMALL, None).image[:4] == b"\x7fELF"


def test_the_key_covers_operators_and_their_order() -> None:
    none = Shape(0)
    assert cubin_key(SMALL, none) == cubin_key(SMALL, none)
    assert len({cubin_key(o, none) for o in (SMALL, SMALL[::-1], ("add@1",), ("sub@1", "matmul@1"))}) == 4


def test_the_key_covers_the_shape_and_nothing_else_of_the_slots() -> None:
    keys = [cubin_key(STREAMING, shape_of(STREAMING, slots)) for slots in (1, 64, 65, 128)]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert len({cubin_key(SMALL, shape_of(SMALL, slots)) for slots in (1, 64, 65, 128)}) == 1


@needs_compiler
@pytest.mark.slow
def test_two_processes_build_a_kernel_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(build_cubin, [(SMALL, tmp_path)] * 2)
    assert sorted(c.cached for c in found) == [False, True]
    assert found[0].image == found[1].image


def test_the_report_of_ptxas_is_read() -> None:
    text = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n"
        "    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size\n"
    )
    assert read_report(text) == (168, 16, 32)
    assert CAPABILITY == (9, 0)
