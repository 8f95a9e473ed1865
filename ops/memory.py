"""Addresses as arrays, inside compiled bodies.

Arenas are plain memory and operands are addresses, so that one payload means the same on every target. A body
turns an address into a one-dimensional array once and indexes that, which keeps LLVM's pointer analysis (and with
it vectorisation) intact; address arithmetic per element would not.

Such an array owns nothing and keeps nothing alive. LLVM knows nothing about where it points, so two of them may
overlap and reads after writes through the other one are right; a loop that reads one and writes another is vectorised
behind a run-time overlap test, and runs scalar when they do overlap.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types
from numba.extending import intrinsic, register_jitable


def _pointer(element: types.Type) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


_f32, _i32, _i64 = _pointer(types.float32), _pointer(types.int32), _pointer(types.int64)
_u8, _u16 = _pointer(types.uint8), _pointer(types.uint16)


@register_jitable(forceinline=True)
def view_f32(address, size):
    """`size` float32 at a byte address."""
    return carray(_f32(address), (size,))


@register_jitable(forceinline=True)
def view_i32(address, size):
    """`size` int32 at a byte address."""
    return carray(_i32(address), (size,))


@register_jitable(forceinline=True)
def view_i64(address, size):
    """`size` int64 at a byte address."""
    return carray(_i64(address), (size,))


@register_jitable(forceinline=True)
def view_u16(address, size):
    """`size` uint16 (the bits of bf16) at a byte address."""
    return carray(_u16(address), (size,))


@register_jitable(forceinline=True)
def view_u8(address, size):
    """`size` bytes at a byte address."""
    return carray(_u8(address), (size,))
