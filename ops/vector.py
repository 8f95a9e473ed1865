"""Small vector routines on addresses that LLVM's loop vectoriser cannot be led to: a dot product and a moving copy."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from wpk.ops.memory import view_f32, view_i32

LANES = 16  # of a dot product, on every host: its bits do not depend on the width of a register
CHUNK = 4096  # words copied through scratch at a time

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)


@intrinsic
def _dot_whole(typingctx: Any, a: Any, b: Any, size: Any) -> Any:
    """Sum of a[i] * b[i] over `size` float32 at two byte addresses, `size` a multiple of LANES, in LANES chains.

    The chains are added as a tree: halves of the vector onto each other. Multiply, then add: no fused operation.
    """

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second, count = args
        before, test = builder.block, builder.append_basic_block("dot_test")
        body, done = builder.append_basic_block("dot_body"), builder.append_basic_block("dot_done")
        builder.branch(test)
        builder.position_at_end(test)
        index, total = builder.phi(_I64), builder.phi(_VECTOR)
        builder.cbranch(builder.icmp_signed("<", index, count), body, done)
        builder.position_at_end(body)
        offset = builder.shl(index, _I64(2))
        x, y = (
            builder.load(builder.inttoptr(builder.add(base, offset), ir.PointerType()), align=4, typ=_VECTOR)
            for base in (first, second)
        )
        following, advanced = builder.fadd(total, builder.fmul(x, y)), builder.add(index, _I64(LANES))
        builder.branch(test)
        for phi, start, step in ((index, _I64(0), advanced), (total, ir.Constant(_VECTOR, [0.0] * LANES), following)):
            phi.add_incoming(start, before)
            phi.add_incoming(step, body)
        builder.position_at_end(done)
        folded: Any = total
        width = LANES // 2
        while width:
            kind = ir.VectorType(_I32, width)
            low, high = (ir.Constant(kind, list(range(lo, lo + width))) for lo in (0, width))
            halves = (builder.shuffle_vector(folded, folded, mask) for mask in (low, high))
            folded = builder.fadd(*halves)
            width //= 2
        return builder.extract_element(folded, _I32(0))

    return types.float32(types.int64, types.int64, types.int64), lower


@njit
def dot(a, b, size):
    """Sum of products of float32 at two byte addresses; what is left beyond a multiple of 16 is added in order."""
    whole = size // LANES * LANES
    total = _dot_whole(a, b, whole)
    rest_a, rest_b = view_f32(a + 4 * whole, size - whole), view_f32(b + 4 * whole, size - whole)
    for i in range(size - whole):
        total += rest_a[i] * rest_b[i]
    return total


@njit
def move(target, source, words, scratch):
    """Copy words to a lower or equal address (they may overlap), or to memory apart, through 16 KiB of scratch."""
    for first in range(0, words, CHUNK):
        count = min(CHUNK, words - first)
        values, out = view_i32(source + 4 * first, count), view_i32(target + 4 * first, count)
        buffer = view_i32(scratch, count)
        for i in range(count):
            buffer[i] = values[i]
        for i in range(count):
            out[i] = buffer[i]
