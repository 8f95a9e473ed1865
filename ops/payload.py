"""The 128-byte payload: everything that a phase's body is told, the same bytes on every target.

    byte  0  u16  opcode: index into the program's operator table
          2  u16  operands: how many of the seven references are used
          4  u32  parts: independent pieces of one session's work, split over blocks
          8  u64  reference[7]: arena in the upper 8 bits, byte offset of slot 0 in the lower 56
         64  u32  stride[7]: bytes from one slot to the next; 0 for weights
         92  i32  parameter[9]: shapes and attributes; a float is stored by its bits

An operand that is absent has the reference `ABSENT`. Bodies read the record through the accessors at the end of
this file, which compile for the CPU; a GPU target brings accessors of the same names.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numba.extending import register_jitable

from wpk.ops.memory import view_f32, view_i32, view_i64

OPERANDS = 7
PARAMETERS = 9
PAYLOAD = np.dtype(
    [
        ("opcode", "<u2"),
        ("operands", "<u2"),
        ("parts", "<u4"),
        ("reference", "<u8", OPERANDS),
        ("stride", "<u4", OPERANDS),
        ("parameter", "<i4", PARAMETERS),
    ]
)
assert PAYLOAD.itemsize == 128
ARENA_SHIFT = 56
OFFSET_MASK = (1 << ARENA_SHIFT) - 1
ABSENT = 0xFF << ARENA_SHIFT


class Arena(IntEnum):
    """The fixed memory regions of a loaded profile, in the order of the arena table."""

    WEIGHTS = 0
    STATE = 1
    ACTIVATIONS = 2
    IO = 3


@dataclass(frozen=True, slots=True)
class Reference:
    """Where slot 0's operand lies and how far the next slot's is; bytes."""

    arena: Arena
    offset: int
    stride: int

    @property
    def packed(self) -> int:
        return (int(self.arena) << ARENA_SHIFT) | self.offset


def encode_parameter(value: int | float) -> int:
    """An i32, or the bits of an f32 as i32."""
    if isinstance(value, float):
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return int(value)


def decode_float(bits: int) -> float:
    """The f32 whose bits a parameter holds."""
    return float(struct.unpack("<f", struct.pack("<i", int(bits)))[0])


# --- what bodies call; `record` and `arenas` are addresses --------------------------------------------------------
@register_jitable(forceinline=True)
def present(record: int, operand: int) -> bool:
    return (view_i64(record + 8 + 8 * operand, 1)[0] >> 56) != -1


@register_jitable(forceinline=True)
def stride(record: int, operand: int) -> int:
    return view_i32(record + 64 + 4 * operand, 1)[0] & 0xFFFFFFFF


@register_jitable(forceinline=True)
def address(record: int, arenas: int, operand: int, slot: int) -> int:
    """Address of a slot's operand."""
    packed = view_i64(record + 8 + 8 * operand, 1)[0]
    base = view_i64(arenas + 8 * (packed >> 56), 1)[0]
    return base + (packed & 0x00FFFFFFFFFFFFFF) + slot * stride(record, operand)


@register_jitable(forceinline=True)
def parameter(record, index):
    return np.int64(view_i32(record + 92 + 4 * index, 1)[0])


@register_jitable(forceinline=True)
def parameter_f32(record: int, index: int) -> float:
    return view_f32(record + 92 + 4 * index, 1)[0]


@register_jitable(forceinline=True)
def operand_f32(record: int, arenas: int, operand: int, slot: int, size: int):
    """A slot's operand as a 1-D float32 array of `size` elements."""
    return view_f32(address(record, arenas, operand, slot), size)


@register_jitable(forceinline=True)
def operand_i32(record: int, arenas: int, operand: int, slot: int, size: int):
    """A slot's operand as a 1-D int32 array of `size` elements."""
    return view_i32(address(record, arenas, operand, slot), size)
