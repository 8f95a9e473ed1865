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

from wpk.kernel.layout import THREADS

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
        # --- time
        ("global_timer", "mov.u64 $0, %globaltimer;", "l", "", _MEMORY, "the GPU's clock in ns"),
        ("clock", "mov.u64 $0, %clock64;", "l", "", _MEMORY, "cycles of this multiprocessor"),
        # --- within a block
        ("block_barrier", "bar.sync 0;", "", "", _MEMORY, "all threads of the block meet, the producer's warp too"),
        (
            "barrier", f"bar.sync 1, {THREADS};", "", "", _MEMORY,
            "all consumer threads of the block meet; their writes are seen after it",
        ),
        ("barrier_named", "bar.sync $0, $1;", "", "rr", _MEMORY, "so many threads meet at the barrier of that number"),
        (
            "barrier_or",
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            f"bar.red.or.pred q, 1, {THREADS}, p; selp.s32 $0, 1, 0, q; }}",
            "r", "r", _MEMORY, "`barrier` that tells every thread whether any brought a number other than 0",
        ),
        ("shuffle_xor", "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "f", "fr", _PLACED, "of the lane that differs so"),
        ("shuffle_xor_32", "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "r", "rr", _PLACED, "the same of an i32"),
        ("shuffle", "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "f", "fr", _PLACED, "of the lane of that index"),
        ("warp_add", "redux.sync.add.s32 $0, $1, -1;", "r", "r", _PLACED, "sum over the lanes of a warp, of i32"),
        ("warp_min", "redux.sync.min.s32 $0, $1, -1;", "r", "r", _PLACED, "the least of the lanes', of i32"),
        ("warp_max", "redux.sync.max.s32 $0, $1, -1;", "r", "r", _PLACED, "the greatest of the lanes', of i32"),
        ("warp_barrier", "bar.warp.sync -1;", "", "", _MEMORY, "the lanes of a warp meet"),
        # --- between blocks (scope gpu), and between GPU and host (scope sys)
        ("load_acquire_gpu", "ld.acquire.gpu.global.u64 $0, [$1];", "l", "l", _MEMORY,
         "later accesses of this block see what was written before the matching release"),
        ("load_acquire_sys", "ld.acquire.sys.global.u64 $0, [$1];", "l", "l", _MEMORY, "the same, of a host's release"),
        ("store_release_sys", "st.release.sys.global.u64 [$0], $1;", "", "ll", _MEMORY, "earlier writes first"),
        ("add_release_gpu", "red.release.gpu.global.add.u64 [$0], $1;", "", "ll", _MEMORY, "add; earlier writes first"),
        ("or_release_gpu", "red.release.gpu.global.or.b64 [$0], $1;", "", "ll", _MEMORY, "set bits; the same order"),
        ("load_relaxed_gpu", "ld.relaxed.gpu.global.u64 $0, [$1];", "l", "l", _MEMORY, "whole, present, unordered"),
        ("store_relaxed_gpu", "st.relaxed.gpu.global.u64 [$0], $1;", "", "ll", _MEMORY, "whole, unordered"),
        ("load_relaxed_sys", "ld.relaxed.sys.global.u64 $0, [$1];", "l", "l", _MEMORY, "the same of host memory"),
        ("load_relaxed_sys_32", "ld.relaxed.sys.global.u32 $0, [$1];", "r", "l", _MEMORY, "the same, 32 bits"),
        ("store_relaxed_sys", "st.relaxed.sys.global.u64 [$0], $1;", "", "ll", _MEMORY, "to host memory, unordered"),
        ("store_relaxed_sys_32", "st.relaxed.sys.global.u32 [$0], $1;", "", "lr", _MEMORY, "the same, 32 bits"),
        ("fence_sys", "fence.acq_rel.sys;", "", "", _MEMORY, "orders this thread's accesses for the host"),
        # --- data
        ("load_constant", "ld.global.nc.u64 $0, [$1];", "l", "l", _PURE, "an i64 that nothing writes meanwhile"),
        ("load_constant_32", "ld.global.nc.u32 $0, [$1];", "r", "l", _PURE, "an i32 that nothing writes meanwhile"),
        ("load_order", "ld.u64 $0, [$1];", "l", "l", _PURE, "an i64 of an order, in shared or global memory"),
        ("load_order_32", "ld.u32 $0, [$1];", "r", "l", _PURE, "an i32 of an order"),
        ("load_order_f32", "ld.f32 $0, [$1];", "f", "l", _PURE, "an f32 of an order"),
        ("renewed", "mov.b64 $0, $1;", "l", "l", _PLACED, "an address of which LLVM knows nothing: for new content"),
        ("renewed_32", "mov.b32 $0, $1;", "r", "r", _PLACED, "a number of which LLVM knows nothing: a loop stays one"),
        (
            "generic_of_shared", "{ .reg .u64 t; cvt.u64.u32 t, $1; cvta.shared.u64 $0, t; }", "l", "r", _PURE,
            "the generic address of a shared one",
        ),
        ("load_constant_f32", "ld.global.nc.f32 $0, [$1];", "f", "l", _PURE, "an f32 that nothing writes meanwhile"),
        (
            "copy_16",
            "{ .reg .b64 a, b; ld.relaxed.sys.global.v2.u64 {a, b}, [$1]; st.relaxed.sys.global.v2.u64 [$0], {a, b}; }",
            "", "ll", _MEMORY, "16 bytes from the second address to the first, either of them in host memory",
        ),
        # --- global memory, wide; .cg: from L2, where other blocks' writes are
        ("load_l2", "ld.global.cg.f32 $0, [$1];", "f", "l", _MEMORY, "an f32 that another block wrote"),
        ("load_l2_4", "ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "l", _MEMORY, "four of them"),
        (
            "load_l2_4_once", "ld.global.cg.L2::cache_hint.v4.f32 {$0, $1, $2, $3}, [$4], $5;", "ffff", "ll", _MEMORY,
            "four of them with a cache policy",
        ),
        ("load_l2_32", "ld.global.cg.u32 $0, [$1];", "r", "l", _MEMORY, "an i32 that another block wrote"),
        ("load_constant_4", "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "l", _PLACED, "four never written"),
        ("store_1", "st.global.f32 [$0], $1;", "", "lf", _MEMORY, "an f32"),
        ("store_4", "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "", "lffff", _MEMORY, "four f32"),
        ("store_32", "st.global.u32 [$0], $1;", "", "lr", _MEMORY, "an i32"),
        ("store_2x32", "st.global.v2.u32 [$0], {$1, $2};", "", "lrr", _MEMORY, "two i32"),
        ("store_u16", "{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.u16 [$0], t; }", "", "lr", _MEMORY, "16 bits"),
        (
            "store_4_kept", "st.global.L2::cache_hint.v4.f32 [$0], {$1, $2, $3, $4}, $5;", "", "lffffl", _MEMORY,
            "four f32 with a cache policy",
        ),
        (
            "store_4x32_kept", "st.global.L2::cache_hint.v4.u32 [$0], {$1, $2, $3, $4}, $5;", "", "lrrrrl", _MEMORY,
            "four i32 with a cache policy",
        ),
        (
            "evict_first", "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "l", "", _PLACED,
            "the cache policy of what is read once",
        ),
        (
            "evict_last", "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "l", "", _PLACED,
            "the cache policy of what is read again soon",
        ),
        ("prefetch_line", "prefetch.global.L2 [$0];", "", "l", _MEMORY, "the line of an address into L2"),
        ("prefetch_l2", "cp.async.bulk.prefetch.L2.global [$0], $1;", "", "lr", _MEMORY, "bytes into L2; 16-aligned"),
        # --- shared memory, by its 32-bit address
        ("shared_load", "ld.shared.f32 $0, [$1];", "f", "r", _MEMORY, "an f32"),
        ("shared_load_4", "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "ffff", "r", _MEMORY, "four f32"),
        ("shared_load_4x32", "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", "rrrr", "r", _MEMORY, "four i32"),
        ("shared_load_32", "ld.shared.u32 $0, [$1];", "r", "r", _MEMORY, "an i32"),
        ("shared_load_64", "ld.shared.u64 $0, [$1];", "l", "r", _MEMORY, "an i64"),
        ("shared_store_64", "st.shared.u64 [$0], $1;", "", "rl", _MEMORY, "an i64"),
        ("shared_store", "st.shared.f32 [$0], $1;", "", "rf", _MEMORY, "an f32"),
        ("shared_store_2", "st.shared.v2.f32 [$0], {$1, $2};", "", "rff", _MEMORY, "two f32"),
        ("shared_store_4", "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "", "rffff", _MEMORY, "four f32"),
        ("shared_store_32", "st.shared.u32 [$0], $1;", "", "rr", _MEMORY, "an i32"),
        # --- asynchronous copies and the barriers in shared memory that count their bytes
        ("mbarrier_init", "mbarrier.init.shared.b64 [$0], $1;", "", "rr", _MEMORY, "a barrier of so many arrivals"),
        (
            "mbarrier_expect", "mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", "", "rr", _MEMORY,
            "arrive, and make the phase wait for so many bytes",
        ),
        ("mbarrier_arrive", "mbarrier.arrive.shared.b64 _, [$0];", "", "r", _MEMORY, "arrive; earlier accesses first"),
        (
            "mbarrier_try",
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
            "r", "rr", _MEMORY, "whether the phase of that parity is over, after a short wait",
        ),
        (
            "mbarrier_test",
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
            "r", "rr", _MEMORY, "the same without a wait",
        ),
        (
            "bulk_load",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
            "", "rlrr", _MEMORY, "so many bytes of global into shared memory, counted by an mbarrier; all 16-aligned",
        ),
        (
            "bulk_load_hinted",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[$0], [$1], $2, [$3], $4;",
            "", "rlrrl", _MEMORY, "the same with a cache policy",
        ),
        (
            "tensor_load_2",
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3}], [$4];",
            "", "rlrrr", _MEMORY, "the box of a tensor map at those coordinates; zeros outside the tensor",
        ),
        (
            "tensor_load_3",
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3, $4}], [$5];",
            "", "rlrrrr", _MEMORY, "the same in three dimensions",
        ),
        (
            "tensor_load_4",
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$2, $3, $4, $5}], [$6];",
            "", "rlrrrrr", _MEMORY, "the same in four dimensions",
        ),
        (
            "fence_async", "fence.proxy.async;", "", "", _MEMORY,
            "orders this thread's accesses with those of the copy engine",
        ),
        # --- matrices
        (
            "matrix_load_4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "rrrr", "r", _MEMORY,
            "four 8 x 8 tiles of 16-bit values, a row of 16 bytes a lane",
        ),
        (
            "matrix_load_4_transposed", "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
            "rrrr", "r", _MEMORY, "the same, transposed",
        ),
        (
            "multiply_16x8x16",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
            "{$10, $11, $12, $13};",
            "ffff", "rrrrrrffff", _PLACED, "D[16, 8] = A[16, 16] B[16, 8] + C, bf16 into f32",
        ),
        (
            "multiply_16x8x8",
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
            "ffff", "rrrffff", _PLACED, "D[16, 8] = A[16, 8] B[8, 8] + C, bf16 into f32",
        ),
        # --- arithmetic
        ("fma", "fma.rn.f32 $0, $1, $2, $3;", "f", "fff", _PURE, "a * b + c, rounded once"),
        ("quotient", "div.s32 $0, $1, $2;", "r", "rr", _PURE, "cut towards 0; numba would divide i64"),
        ("advanced", "mad.wide.s32 $0, $1, $2, $3;", "l", "rrl", _PURE, "the third, an address, and a product of two"),
        ("maximum", "max.f32 $0, $1, $2;", "f", "ff", _PURE, "the larger; of a number and NaN the number"),
        ("exp2", "ex2.approx.ftz.f32 $0, $1;", "f", "f", _PURE, "2^x, error below 2 units of the last place"),
        ("log2", "lg2.approx.f32 $0, $1;", "f", "f", _PURE, "log2 x"),
        ("reciprocal", "rcp.approx.f32 $0, $1;", "f", "f", _PURE, "1 / x, error of 1 unit of the last place"),
        ("inverse_root", "rsqrt.approx.f32 $0, $1;", "f", "f", _PURE, "1 / sqrt x, error below 3 units"),
        ("pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", "r", "ff", _PURE, "two f32 as bf16, the first in the low half"),
        ("low_bf16", "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }", "f", "r", _PURE, "the low half as f32"),
        ("high_bf16", "{ .reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t; }", "f", "r", _PURE, "the high half"),
        ("float_of_bits", "mov.b32 $0, $1;", "f", "r", _PURE, "the f32 of those bits"),
        ("bits_of_float", "mov.b32 $0, $1;", "r", "f", _PURE, "the bits of an f32"),
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
        pack = cgutils.pack_array if len(set(row.results)) == 1 else cgutils.pack_struct
        return pack(builder, [builder.extract_value(value, i) for i in range(len(kinds))])

    names = [f"a{i}" for i in range(len(row.operands))]
    parameters = ", ".join(["typingctx", *names])  # numba wants the exact number of parameters
    space: dict[str, Any] = {"made": (signature, codegen)}
    exec(f"def {row.name}({parameters}):\n    return made", space)
    function = space[row.name]
    function.__doc__ = f"{row.what}. PTX: {row.template}"
    return intrinsic(function)


BY_NAME: dict[str, Any] = {row.name: _define(row) for row in INSTRUCTIONS}


# --- what a table row can't say --------------------------------------------------------------------------------------
@intrinsic
def shared_address(typingctx: Any, array: Any) -> Any:
    """The 32-bit address in shared memory of an array's first element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        generic = builder.ptrtoint(data, ir.IntType(64))
        template = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        asm = ir.InlineAsm(ir.FunctionType(ir.IntType(32), [ir.IntType(64)]), template, "=r,l", side_effect=False)
        return builder.call(asm, [generic])

    return types.int32(array), codegen


# What a `wgmma` is called by its operands' type, and whether operands may lie transposed. A step is 32 bytes of a row.
_WGMMA = {"bf16": ("k16.f32.bf16.bf16", ", 0, 0"), "tf32": ("k8.f32.tf32.tf32", "")}


def make_wgmma(columns: int, operands: str = "bf16") -> Any:
    """The intrinsic (accumulators, a, b) -> accumulators: D[64, columns] += A[64, c] B[columns, c]^T by a warpgroup.

    operands: "bf16", c = 64, or "tf32", c = 32: f32 whose lower 13 bits are not looked at. accumulators: a tuple of
    columns / 2 f32. a, b: shared-memory descriptors of operands in 128-byte swizzle. The four instructions are issued,
    committed and waited for in one piece of assembly, so that the compiler never sees an accumulator in flight.
    Architecture sm_90a.
    """
    kind, transposed = _WGMMA[operands]
    count = columns // 2
    held = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 0, 0; wgmma.fence.sync.aligned;"]
    for k in range(4):
        lines += [
            f"add.s64 a, ${2 * count}, {2 * k}; add.s64 b, ${2 * count + 1}, {2 * k};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}{kind} {held}, a, b, p, 1, 1{transposed};",
        ]
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    template = " ".join(lines)
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + ["l", "l", "~{memory}"])
    numbers = types.UniTuple(types.float32, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[0], count)
        kind = ir.LiteralStructType([ir.FloatType()] * count)
        function = ir.FunctionType(kind, [ir.FloatType()] * count + [ir.IntType(64)] * 2)
        asm = ir.InlineAsm(function, template, constraints, side_effect=True)
        made = builder.call(asm, [*values, args[1], args[2]], attrs=("convergent",))
        return cgutils.pack_array(builder, [builder.extract_value(made, i) for i in range(count)])

    @intrinsic
    def wgmma(typingctx: Any, accumulators: Any, a: Any, b: Any) -> Any:
        return numbers(numbers, types.int64, types.int64), codegen

    return wgmma


def make_zeros(count: int) -> Any:
    """The intrinsic () -> a tuple of `count` f32 zeros."""
    numbers = types.UniTuple(types.float32, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [ir.Constant(ir.FloatType(), 0.0)] * count)

    @intrinsic
    def zeros(typingctx: Any) -> Any:
        return numbers(), codegen

    return zeros


def __getattr__(name: str) -> Any:
    try:
        return BY_NAME[name]
    except KeyError:
        raise AttributeError(name) from None
