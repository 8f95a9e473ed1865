"""Block-wide bodies of the GPU against the CPU kernel: an operator each, at small, odd and full sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from tests.kernel.one_operator import Case, apart, beat, case, compiled, results, start
from wpk.ir.types import DType, Type, f32, i32
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cubin import can_build
from wpk.kernel.layout import STAMPS
from wpk.ops.linear import BIAS, RESIDUAL, SECOND

Results = dict[int, list[np.ndarray]]  # of each slot
TOLERANCE = 2e-5  # of the root mean square of a result: sums of another order, exponentials of another rounding

OTHER_BITS = {"attention", "relative_attention", "residual_quantise", "selected_linear"}  # than the CPU kernel's
WITH_WORKSPACE = {"attention", "layer_norm", "matmul", "relative_attention", "residual_quantise", "top_p"}


def attention(
    heads: int, groups: int, width: int, rows: int, slots: int = 5, position: int = 3, out: int | None = None
) -> Case:  # fmt: skip
    cache = f32(rows, groups, width), f32(rows, groups, out or width)
    return case(
        "attention", ("input", f32(heads, width)), *[("state", t) for t in cache], ("input", i32()),
        slots=slots, highest=position, scale=width**-0.5,
    )  # fmt: skip


def relative(rows: int, heads: int, width: int, slots: int = 5, least: int = 0, highest: int = 3) -> Case:
    return case(
        "relative_attention", ("input", f32(2, heads, width)), ("state", f32(rows, 2, heads, width)),
        ("weight", f32(rows, heads, width)), ("input", i32()), slots=slots, least=least, highest=highest,
        scale=width**-0.5,
    )  # fmt: skip


def matmul(
    size: int, k: int, frames: int, n: int, step: int = 0, pad: int = 0, second: int = 0, bias: bool = False,
    residual: bool = False, activation: str = "none", slots: int = 3,
) -> Case:  # fmt: skip
    panels, roles = -(-n // 16), bias * BIAS | bool(second) * SECOND | residual * RESIDUAL
    extra = [("weight", f32(n))] * bias
    extra += [("input", f32(second))] if second else []
    extra += [("input", f32(frames, n))] * residual
    return case(
        "matmul", ("input", f32(size)), ("weight", f32(panels, k + second, 16)), *extra, slots=slots, n=n, k=k,
        frames=frames, step=step or k, pad=pad, activation=activation, roles=roles,
    )  # fmt: skip


def layer_norm(rows: int, width: int, slots: int = 5, bias: bool = True) -> Case:
    weights = [("weight", f32(width))] * (1 + bias)
    return case("layer_norm", ("input", f32(rows, width)), *weights, slots=slots)


def rms_norm(rows: int, width: int, slots: int = 5, offset: float = 1.0) -> Case:
    return case("rms_norm", ("input", f32(rows, width)), ("weight", f32(width)), slots=slots, offset=offset)


def ring(rows: int, new: int, width: int, slots: int = 3) -> Case:
    return case("ring_shift", ("state", f32(rows, width)), ("input", f32(new, width)), slots=slots, carried=True)


def depthwise(rows: int, columns: int, taps: int, slots: int = 3, **attrs: Any) -> Case:
    weights = [("weight", t) for t in (f32(taps, columns), f32(columns))]
    return case("depthwise_window", ("input", f32(rows, columns)), *weights, slots=slots, **attrs)


def conv2d(
    rows: int, columns: int, channels: int, made: int, taps: tuple[int, int], groups: int, slots: int = 3, **attrs: Any
) -> Case:  # fmt: skip
    operands = f32(*taps, channels // groups, made), f32(made)
    return case(
        "conv2d_window", ("input", f32(rows, columns, channels)), *[("weight", t) for t in operands], ("input", i32()),
        groups=groups, slots=slots, **attrs,
    )  # fmt: skip


def quantise(books: int, rows: int, width: int, count: int, first: int, slots: int = 3) -> Case:
    operands = f32(books, rows, width), f32(books, rows)
    weights = [("weight", t) for t in operands]
    return case("residual_quantise", ("input", f32(width)), *weights, count=count, first=first, slots=slots)


CASES: dict[str, Case] = {
    "speech": attention(32, 32, 72, 129, 7, position=140),
    "a head of one piece": attention(3, 3, 4, 50, position=49),
    "heads of two widths": attention(6, 3, 64, 33, position=32, out=96),
    "grouped heads": attention(12, 2, 80, 70, position=69),
    "wide heads": attention(2, 2, 128, 41, 9, position=40),
    "one head a warp": attention(2, 1, 384, 20, position=19),
    "heads wider than a warp takes": attention(2, 1, 420, 12, position=11),
    "a width that is no multiple of four": attention(4, 2, 30, 47, position=46),
    "first row": attention(8, 8, 72, 40, position=0),
    "recognition": relative(71, 8, 128, highest=60),
    "a stream that has gone on": relative(9, 3, 20, highest=70, slots=7),
    "a stream that begins": relative(9, 2, 64, least=-3, highest=2),
    "many narrow heads": relative(12, 40, 4, highest=30, slots=2),
    "heads of an odd width back in a stream": relative(12, 2, 9, highest=30, slots=2),
    "rows of two blocks": layer_norm(1, 1024),
    "many short rows": layer_norm(63, 72, 6),
    "more rows than a tile": layer_norm(41, 384, 3),
    "rows of an odd width": layer_norm(3, 1531, 3, bias=False),
    "rows of one": layer_norm(5, 1, 3),
    "rows of many blocks": rms_norm(2, 4484, 3),
    "rows wider than a tile": layer_norm(2, 10001, 2),
    "rows with weights of their own": case(
        "layer_norm", ("input", f32(3, 72)), ("input", f32(72)), ("input", f32(72)), slots=5
    ),
    "rows of three blocks": rms_norm(2, 1152, 7, offset=0.0),
    "short rows": rms_norm(32, 72, 7),
    "rows of three": rms_norm(7, 3, 2),
    "a row appended": case(
        "cache_append",
        ("state", f32(9, 8, 20)),
        ("input", f32(8, 20)),
        ("input", i32()),
        least=-1,
        highest=9,
        slots=9,
        carried=True,
    ),
    "a row of an odd width appended": case(
        "cache_append",
        ("state", f32(5, 3001)),
        ("input", f32(3001)),
        ("input", i32()),
        highest=4,
        slots=3,
        carried=True,
    ),
    "a ring of columns": ring(8, 1, 1024),
    "a ring that moves by three": ring(11, 3, 70),
    "a ring of words": ring(1321, 280, 1),
    "a ring of narrow rows": ring(100, 1, 7),
    "a ring that is replaced": ring(6, 21, 72),
    "columns": depthwise(15, 130, 7, activation="silu"),
    "columns of many frames": depthwise(30, 70, 9),
    "columns of long filters": depthwise(30, 40, 13),
    "columns with strides": depthwise(23, 64, 3, stride=2, dilation=3),
    "channels made of one": conv2d(15, 20, 1, 48, (3, 3), 1, stride=(2, 2), pad_before=(1, 1), activation="relu"),
    "channels of their own": conv2d(7, 9, 36, 36, (3, 3), 36, stride=(2, 2), pad_before=(2, 1), pad_after=(1, 1)),
    "channels in groups": conv2d(5, 6, 8, 12, (2, 3), 4),
    "the greatest": case("argmax", ("input", f32(3, 1025)), slots=3),
    "the greatest of few": case("argmax", ("input", f32(20, 7)), slots=3),
    "a chosen matrix": case(
        "selected_linear",
        ("input", f32(1152)),
        ("weight", f32(9, 64, 1152)),
        ("input", i32()),
        least=-1,
        highest=12,
        slots=3,
    ),
    "a chosen matrix of short rows": case(
        "selected_linear", ("input", f32(64)), ("weight", f32(5, 77, 64)), ("input", i32()), highest=4
    ),
    "a chosen matrix of odd rows": case(
        "selected_linear", ("input", f32(13)), ("weight", f32(5, 21, 13)), ("input", i32()), highest=4
    ),
    "nearest rows": quantise(5, 150, 512, count=3, first=1),
    "nearest short rows": quantise(3, 37, 20, count=3, first=0),
    "nearest odd rows": quantise(3, 5, 7, count=2, first=1),
    "the likeliest": case("top_p", ("input", f32(1024)), p=0.9, slots=3),
    "the likeliest of two rows": case("top_p", ("input", f32(2, 300)), p=0.3, slots=2),
    "the one that is likeliest": case("top_p", ("input", f32(77)), p=1e-6, slots=2),
    "a product of windows": matmul(150, 400, 5, 33, step=16, bias=True, activation="silu", slots=3),
    "a product of padded windows": matmul(60, 21, 14, 130, step=5, pad=7, bias=True, slots=3),
    "a product of two operands": matmul(70, 70, 1, 48, second=45, bias=True, residual=True, slots=7),
    "a product for one number": matmul(1152, 1152, 1, 1, slots=3),
    "a product of many rows": matmul(200 * 20, 20, 200, 9, bias=True, activation="sigmoid", slots=2),
    "a product of single numbers": matmul(5, 1, 5, 3, slots=2),
    "sums": case("add", ("input", f32(3, 700)), ("input", f32(700)), slots=7),
    "sums of integers": case("add", ("input", i32(5)), ("input", i32()), slots=7),
    "products": case("mul", ("input", f32(9216)), ("input", f32(9216)), slots=3),
    "greater": case("greater_equal", ("input", f32(300)), ("input", f32())),
    "both": case("equal", ("input", i32(300)), ("input", i32(300))),
    "scaled": case("affine", ("input", f32(2, 1999)), scale=0.25, offset=-3.0, slots=3),
    "waves": case("sin", ("input", f32(1300))),
    "one more": case("increment", ("input", i32(3)), slots=9),
    "rounded": case("cast", ("input", f32(1024)), dtype="bf16", slots=7),
    "cut": case("cast", ("input", f32(100)), dtype="i32"),
    "one of two rows": case("select", ("input", Type(DType.BOOL)), ("input", f32(640)), ("input", f32(640)), highest=1),
    "one of two numbers": case(
        "select", ("input", Type(DType.BOOL, (640,))), ("input", f32(640)), ("input", f32(640)), highest=1
    ),
    "turned heads": case("rope", ("input", f32(5, 72)), ("input", i32()), highest=3000, slots=7, theta=10000.0),
    "magnitudes": case("magnitude", ("input", f32(8, 2, 33)), slots=3),
    "rows of two joined": case("concat", ("input", f32(3, 600)), ("input", f32(3, 41)), axis=1),
    "two joined": case("concat", ("input", f32(5001)), ("input", f32(1024)), ("input", f32(3)), axis=0, slots=3),
    "turned axes": case("transpose", ("input", f32(3, 5, 2, 7)), axes=(2, 0, 3, 1), slots=3),
    "padded": case("pad", ("input", f32(3, 5)), slots=3, before=2, after=1, mode="reflect"),
    "rows of a table": case("embedding", ("input", i32(3)), ("weight", f32(50, 72)), least=-2, highest=60),
    "sums of rows": case("embedding_sum", ("input", i32(3)), ("weight", f32(5, 20, 72)), least=-2, highest=21, first=1),
    "overlapping frames": case("overlap_add_frames", ("input", f32(45, 16)), hop=4, trim=6),
    "uniform numbers": case("random_uniform", ("input", i32(2)), ("input", i32()), highest=1 << 30, shape=(515,)),
    "normal numbers": case("random_normal", ("input", i32(2)), ("input", i32()), highest=1 << 30, shape=(777,)),
}
# Phases of a conversation, of 56 sessions.
FULL: dict[str, Case] = {
    "speech": attention(32, 32, 72, 1537, 56, position=1536),
    "recognition": relative(71, 8, 128, 56, highest=500),
    "frames of a codec": layer_norm(441, 384, 56),
    "norm of recognition": layer_norm(1, 1024, 56),
    "norm of speech": rms_norm(2, 1152, 56),
    "norm of heads": rms_norm(32, 72, 56),
    "row of speech": case("cache_append", ("state", f32(1537, 2304)), ("input", f32(2304)), ("input", i32()),
                          highest=1536, slots=56, carried=True),
    "turned heads": case("rope", ("input", f32(32, 72)), ("input", i32()), highest=3000, slots=56, theta=10000.0),
    "books": quantise(31, 1024, 512, count=22, first=9, slots=56),
    "sums of books": case("embedding_sum", ("input", i32(31)), ("weight", f32(31, 1024, 512)), highest=1023, slots=56),
    "mixture, wide": case("selected_linear", ("input", f32(1152)), ("weight", f32(1024, 64, 1152)), ("input", i32()),
                          highest=1023, slots=56),
    "mixture, deep": case("selected_linear", ("input", f32(64)), ("weight", f32(1024, 512, 64)), ("input", i32()),
                          highest=1023, slots=56),
    "mixture, chosen": case("top_p", ("input", f32(1024)), p=0.95, slots=56),
    "mixture, greatest": case("argmax", ("input", f32(1, 1024)), slots=56),
    "gates": matmul(640, 640, 1, 2560, second=640, bias=True, slots=56),
    "joint": matmul(640, 640, 1, 1025, bias=True, slots=56),
    "spectrum": matmul(1520, 400, 8, 514, step=160, slots=56),
    "phases of a codec": matmul(338688, 384, 882, 9, slots=56),
    "first subsampling": conv2d(15, 128, 1, 256, (3, 3), 1, stride=(2, 2), pad_before=(1, 2), slots=56),
    "second subsampling": conv2d(7, 65, 256, 256, (3, 3), 256, stride=(2, 2), pad_before=(1, 1), slots=56),
    "columns of recognition": depthwise(9, 1024, 9, slots=56),
    "columns of a codec": depthwise(447, 384, 7, slots=56),
    "columns of a short codec": depthwise(15, 1536, 7, slots=56),
    "ring of recognition": ring(8, 1, 1024, 56),
    "ring of samples": ring(1321, 1280, 1, 56),
    "joined frames": case("concat", ("input", f32(2304)), ("input", f32(169344)), axis=0, slots=56),
    "products of speech": case("mul", ("input", f32(9216)), ("input", f32(9216)), slots=56),
    "sums of speech": case("add", ("input", f32(2, 1152)), ("input", f32(2, 1152)), slots=56),
    "rounded": case("cast", ("input", f32(1024)), dtype="bf16", slots=56),
    "waves of a codec": case("sin", ("input", f32(7938)), slots=56),
}  # fmt: skip
STREAMING = ("attention_parts@1", "tiled_matmul@1")  # makes room for a ring beside a body's workspace


@functools.cache
def table(streaming: bool = False) -> tuple[str, ...]:
    """Operators of all cases: one machine code for all."""
    names = {name for one in (*CASES.values(), *FULL.values()) for name in compiled(one).program.operators}
    return tuple(sorted(names | set(STREAMING if streaming else ())))


def sessions(slots: int) -> dict[int, int]:
    """Slot -> session, some slots vacant."""
    return {slot: 11 + slot for slot in range(slots) if slots == 1 or slot % 4 != 2}


def compared(kind: type[Any], one: Case, beats: int = 1, streaming: bool = False) -> list[Results]:
    """Results of that kernel, which are those of the CPU's."""
    who = sessions(one.slots)
    wanted, found = (results(each, one, who, beats, table(streaming)) for each in (CpuKernel, kind))
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        for slot in who:
            for result, (y, same) in enumerate(zip(ours[slot], theirs[slot], strict=True)):
                worst = max(worst, apart(y, same))
                assert one.operator in OTHER_BITS or y.tobytes() == same.tobytes(), (slot, result, worst)
                assert worst <= TOLERANCE, (slot, result, worst)
    print(f"\n{one.operator} {[str(t) for t in one.types]}: at most {worst:.1e} apart")
    return found


def of_both(one: Case) -> None:
    """The GPU kernel's results are the CPU kernel's, twice the same bits, in any slot and company, however cut."""
    from wpk.kernel.cuda import CudaKernel

    who = sessions(one.slots)
    found = compared(CudaKernel, one, beats=2)
    assert bits(results(CudaKernel, one, who, 2, table())) == bits(found)
    fine = results(CudaKernel, dataclasses.replace(one, fine=True), who, 2, table())
    assert bits(fine) == bits(found)
    last = max(who)
    for slot in (0, one.slots - 1):
        alone = results(CudaKernel, one, {slot: who[last]}, 2, table())
        assert [r[slot][0].tobytes() for r in alone] == [r[last][0].tobytes() for r in found]


def bits(rows: list[Results]) -> list[bytes]:
    return [y.tobytes() for row in rows for slot in sorted(row) for y in row[slot]]


def work(name: str) -> int:
    """About how many numbers a case's body reads."""
    return CASES[name].slots * sum(t.size for t in CASES[name].types)


# Hundreds of Python threads that wait for each other take seconds a case: here the least case of each operator.
OPERATORS = sorted({one.operator for one in CASES.values()})
EMULATED = [min((name for name in CASES if CASES[name].operator == op), key=work) for op in OPERATORS]


@pytest.mark.skipif(not can_build(), reason="numba-cuda is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATED)
def test_threads_in_python_give_what_the_cpu_gives(name: str) -> None:
    from tests.kernel.emulator import EmulatedKernel

    compared(EmulatedKernel, CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_body_gives_what_the_cpu_gives(name: str) -> None:
    of_both(CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].operator in WITH_WORKSPACE])
def test_a_body_works_beside_operators_that_stream(name: str) -> None:
    from wpk.kernel.cuda import CudaKernel

    compared(CudaKernel, CASES[name], streaming=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_body_gives_what_the_cpu_gives_at_full_size(name: str) -> None:
    of_both(FULL[name])


@pytest.mark.parametrize("name", CASES)
def test_cases_are_one_phase_of_their_operator(name: str) -> None:
    one = CASES[name]
    for each in (one, dataclasses.replace(one, fine=True)):
        program = compiled(each).program
        assert f"{one.operator}@1" in program.operators
    who = sessions(one.slots)
    rows = results(CpuKernel, one, who)
    assert not any(np.isnan(y).any() for slot in who for y in rows[0][slot])


def microseconds(one: Case, beats: int = 12) -> float:
    """Of the wave that has the operator, from the first block's start to the last one's end: the median of beats."""
    from wpk.kernel.cuda import CudaKernel

    who = {slot: slot for slot in range(one.slots)}
    kernel = start(CudaKernel, one, who, table(), trace=True)
    try:
        program = kernel.program
        code = program.operators.index(f"{one.operator}@1")
        wave = next(int(t["wave"]) for t in program.tasks if program.payloads[t["payload"]]["opcode"] == code)
        times = []
        for number in range(beats):
            beat(kernel, one, who, number)
            marks = kernel.trace()[wave].reshape(-1, STAMPS)
            times.append((marks[:, STAMPS - 1].max() - marks[:, 0].min()) / 1e3)
        return float(np.median(times))
    finally:
        kernel.close()


@pytest.mark.gpu
@pytest.mark.slow
def test_attention_runs_at_the_speed_of_memory() -> None:
    # A position beyond the cache in every session: all of its rows are read.
    one = dataclasses.replace(FULL["speech"], least=1 << 20, highest=1 << 20)
    size = sum(t.bytes for t in one.types[1:3]) * one.slots
    us = microseconds(one)
    print(f"\nattention of {one.slots} sessions: {us:.1f} us, {size / us / 1e6:.2f} TB/s")
    assert size / us / 1e6 > 2.5


@pytest.mark.gpu
@pytest.mark.slow
def test_how_long_a_body_takes_at_full_size() -> None:
    print()
    for name, one in FULL.items():
        print(f"{name:>28}: {microseconds(one, 6):8.1f} us   {one.operator} {' '.join(str(t) for t in one.types)}")


@pytest.mark.skipif(not can_build(), reason="numba-cuda or ptxas is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_all_bodies_fit_one_kernel(streaming: bool) -> None:
    from wpk.kernel.cubin import build_cubin
    from wpk.registry.settings import settings

    made = build_cubin(table(streaming), settings().kernels)
    print(f"{made.registers} registers, {made.spill_bytes} bytes spilled, {len(made.image)} bytes, {made.build_s} s")
    assert made.registers <= 168
