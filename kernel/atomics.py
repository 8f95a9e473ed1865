"""What the CPU kernel needs below Python: ordered memory accesses, a clock, sleep, and calls through an address."""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I64, _I32, _PTR = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The i64 at an address; later accesses stay after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an i64; earlier accesses stay before it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def add_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an i64 and return what was there; earlier accesses stay before it, later ones after."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace `expected` by `value`; True when it was there."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def call_body(
    typingctx: Any, function: Any, record: Any, arenas: Any, s0: Any, s1: Any, p0: Any, p1: Any, scratch: Any
) -> Any:
    """Call a compiled body (`wpk.ops.operator.Body`) by its address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 7)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic
def monotonic_ns(typingctx: Any) -> Any:
    """The monotonic clock in ns, as `time.monotonic_ns` reads it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I32, _PTR])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        builder.call(function, [ir.Constant(_I32, CLOCK_MONOTONIC), builder.bitcast(spec, _PTR)])
        pair = builder.load(spec)
        seconds, rest = builder.extract_value(pair, 0), builder.extract_value(pair, 1)
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 10**9)), rest)

    return types.int64(), codegen


@intrinsic
def sleep_us(typingctx: Any, microseconds: Any) -> Any:
    """Give the processor up for about that long."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32]), "usleep")
        builder.call(function, [builder.trunc(args[0], _I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
