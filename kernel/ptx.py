"""Every PTX instruction that WPK writes itself, one row a name; all else is what numba-cuda generates.

Only code for the GPU imports this file, and only when it is needed: numba-cuda is an optional dependency. Integers are
signed throughout (numba makes float64 of u64 with i64). Three kinds of effect decide what LLVM may do with a call:

    PURE     no memory and no side effect: may be moved, merged and dropped (arithmetic, loads of constant memory)
    PLACED   no memory, but stays where it is written (special registers, so that no index arithmetic that depends on
             them is hoisted out of the interpreter loop, where it would occupy registers through every body)
    MEMORY   may read or write any memory: nothing is moved across it

numba's own atomics are all relaxed; what orders memory between blocks, or with the host, is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

_LLVM = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}
_NUMBA = {"r": types.int32, "l": types.int64, "f": types.float32}


class Effect(Enum):
    PURE = 0
    PLACED = 1
    MEMORY = 2


@dataclass(frozen=True)
class Instruction:
    """A template with $0, $1, ... for results, then operands; constraint letters r i32, l i64, f f32."""

    name: str
    template: str
    results: str
    operands: str
    effect: Effect
    what: str


_PURE, _PLACED, _MEMORY = Effect.PURE, Effect.PLACED, Effect.MEMORY
# name, template, results, operands, effect, what it is
INSTRUCTIONS: tuple[Instruction, ...] = tuple(
    Instruction(*row)
    for row in (
        # --- who I am
        ("thread_index", "mov.u32 $0, %tid.x;", "r", "", _PLACED, "index of this thread in its block"),
        ("thread_count", "mov.u32 $0, %ntid.x;", "r", "", _PLACED, "threads of a block"),
        ("block_index", "mov.u32 $0, %ctaid.x;", "r", "", _PLACED, "index of this block in the grid"),
        ("block_count", "mov.u32 $0, %nctaid.x;", "r", "", _PLACED, "blocks of the grid"),
        ("sm_index", "mov.u32 $0, %smid;", "r", "", _PLACED, "the multiprocessor that runs this block"),
        # --- time
        ("global_timer", "mov.u64 $0, %globaltimer;", "l", "", _MEMORY, "the GPU's clock in ns"),
        ("clock", "mov.u64 $0, %clock64;", "l", "", _MEMORY, "cycles of this multiprocessor"),
        ("nano_sleep", "nanosleep.u32 $0;", "", "r", _MEMORY, "give the scheduler up for about that many ns"),
        # --- within a block
        ("barrier", "bar.sync 0;", "", "", _MEMORY, "all threads of the block meet; their writes are seen after it"),
        (
            "barrier_or",
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; bar.red.or.pred q, 0, p; selp.s32 $0, 1, 0, q; }",
            "r", "r", _MEMORY, "`barrier` that tells every thread whether any brought a number other than 0",
        ),
        # --- between blocks (scope gpu), and between GPU and host (scope sys)
        ("load_acquire_gpu", "ld.acquire.gpu.global.u64 $0, [$1];", "l", "l", _MEMORY,
         "later accesses of this block see what was written before the matching release"),
        ("load_acquire_sys", "ld.acquire.sys.global.u64 $0, [$1];", "l", "l", _MEMORY, "the same, of a host's release"),
        ("store_release_gpu", "st.release.gpu.global.u64 [$0], $1;", "", "ll", _MEMORY, "earlier writes come first"),
        ("store_release_sys", "st.release.sys.global.u64 [$0], $1;", "", "ll", _MEMORY, "the same, for the host"),
        ("add_release_gpu", "red.release.gpu.global.add.u64 [$0], $1;", "", "ll", _MEMORY, "add; earlier writes first"),
        ("or_release_gpu", "red.release.gpu.global.or.b64 [$0], $1;", "", "ll", _MEMORY, "set bits; the same order"),
        ("load_relaxed_gpu", "ld.relaxed.gpu.global.u64 $0, [$1];", "l", "l", _MEMORY, "whole, present, unordered"),
        ("store_relaxed_gpu", "st.relaxed.gpu.global.u64 [$0], $1;", "", "ll", _MEMORY, "whole, unordered"),
        ("load_relaxed_sys", "ld.relaxed.sys.global.u64 $0, [$1];", "l", "l", _MEMORY, "the same of host memory"),
        ("load_relaxed_sys_32", "ld.relaxed.sys.global.u32 $0, [$1];", "r", "l", _MEMORY, "the same, 32 bits"),
        ("store_relaxed_sys", "st.relaxed.sys.global.u64 [$0], $1;", "", "ll", _MEMORY, "to host memory, unordered"),
        ("store_relaxed_sys_32", "st.relaxed.sys.global.u32 [$0], $1;", "", "lr", _MEMORY, "the same, 32 bits"),
        ("fence_gpu", "fence.acq_rel.gpu;", "", "", _MEMORY, "orders this thread's accesses for other blocks"),
        ("fence_sys", "fence.acq_rel.sys;", "", "", _MEMORY, "orders this thread's accesses for the host"),
        # --- data
        ("load_constant", "ld.global.nc.u64 $0, [$1];", "l", "l", _PURE, "an i64 that nothing writes meanwhile"),
        ("load_constant_32", "ld.global.nc.u32 $0, [$1];", "r", "l", _PURE, "an i32 that nothing writes meanwhile"),
        ("load_early_32", "ld.global.nc.u32 $0, [$1];", "r", "l", _PLACED, "the same, under way from here on"),
        ("load_constant_f32", "ld.global.nc.f32 $0, [$1];", "f", "l", _PURE, "an f32 that nothing writes meanwhile"),
        (
            "copy_16",
            "{ .reg .b64 a, b; ld.relaxed.sys.global.v2.u64 {a, b}, [$1]; st.relaxed.sys.global.v2.u64 [$0], {a, b}; }",
            "", "ll", _MEMORY, "16 bytes from the second address to the first, either of them in host memory",
        ),
        # --- arithmetic
        ("fma", "fma.rn.f32 $0, $1, $2, $3;", "f", "fff", _PURE, "a * b + c, rounded once"),
    )
)  # fmt: skip


def _define(row: Instruction) -> Any:
    """The numba intrinsic of a row."""
    clobbers = ["~{memory}"] if row.effect is Effect.MEMORY else []
    constraints = ",".join([f"={c}" for c in row.results] + list(row.operands) + clobbers)
    made = [_NUMBA[c] for c in row.results]
    result = types.void if not made else made[0] if len(made) == 1 else types.Tuple(made)
    signature = result(*[_NUMBA[c] for c in row.operands])

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [_LLVM[c] for c in row.results]
        returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        function = ir.FunctionType(returned, [_LLVM[c] for c in row.operands])
        pure = row.effect is Effect.PURE
        asm = ir.InlineAsm(function, row.template, constraints, side_effect=not pure)
        value = builder.call(asm, args, attrs=() if pure else ("convergent",))  # convergent: not moved into a branch
        if not kinds:
            return context.get_dummy_value()
        if len(kinds) == 1:
            return value
        return cgutils.pack_struct(builder, [builder.extract_value(value, i) for i in range(len(kinds))])

    names = [f"a{i}" for i in range(len(row.operands))]
    parameters = ", ".join(["typingctx", *names])  # numba wants the exact number of parameters
    space: dict[str, Any] = {"made": (signature, codegen)}
    exec(f"def {row.name}({parameters}):\n    return made", space)
    function = space[row.name]
    function.__doc__ = f"{row.what}. PTX: {row.template}"
    return intrinsic(function)


BY_NAME: dict[str, Any] = {row.name: _define(row) for row in INSTRUCTIONS}


def __getattr__(name: str) -> Any:
    try:
        return BY_NAME[name]
    except KeyError:
        raise AttributeError(name) from None
