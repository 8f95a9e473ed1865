"""Random numbers by counter: each is a function of seed, stream, step and element, and of nothing else.

Philox4x32-10 (Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). Key: the session's
seed. Counter: block of four elements, step, stream, 0. So a session draws the same numbers in any slot and company,
and several blocks or parts draw theirs without talking to each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import DType, Type, f32
from wpk.ops import math32
from wpk.ops.legal import common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_i32, parameter
from wpk.ops.scalars import scalar

NUMBERS_OF_A_PART = 256
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key between rounds
ROUNDS = 10
STREAMS = range(1 << 31)


def philox64(counter: Array, key: Array) -> Array:
    """Philox4x32-10 of counters [n, 4] under a key [2], words held as uint64: [n, 4]."""
    c, k = np.asarray(counter, np.uint64), np.asarray(key, np.uint64)
    word, half = np.uint64(WORD), np.uint64(32)
    for _ in range(ROUNDS):
        p, q = np.uint64(MULTIPLIERS[0]) * c[:, 0], np.uint64(MULTIPLIERS[1]) * c[:, 2]
        c = np.stack([(q >> half) ^ c[:, 1] ^ k[0], q & word, (p >> half) ^ c[:, 3] ^ k[1], p & word], axis=1)
        k = (k + np.array(WEYL, np.uint64)) & word
    return c


@scalar
def philox(c0, c1, c2, k0, k1):
    """Four words, each as an int64 in [0, 2^32), of the counter (c0, c1, c2, 0). Products wrap to 64 bits; the mask
    after the shift makes that their upper word."""
    c3 = np.int64(0)
    for _ in range(ROUNDS):
        p, q = c0 * np.int64(MULTIPLIERS[0]), c2 * np.int64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            ((q >> 32) & WORD) ^ c1 ^ k0,
            q & WORD,
            ((p >> 32) & WORD) ^ c3 ^ k1,
            p & WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


@scalar
def unit(word):
    """The upper 24 bits as a fraction in [0, 1), exactly."""
    return F(word >> 8) * F(2.0**-24)


class Random(Operator):
    """Base. Parameters: numbers, stream. Element e is word e mod 4 of block e // 4."""

    shape: tuple[int, ...]
    stream: int
    semantic_parameters: ClassVar = {1: STREAMS}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if not isinstance(self.shape, tuple):
            raise GraphError(f"{self.name}: shape", wanted="a tuple of sizes", found=self.shape)
        if self.stream not in STREAMS:
            raise GraphError(f"{self.name}: stream", wanted="0 <= stream < 2^31", found=self.stream)
        return (f32(*self.shape),)

    def words(self, seed: Array, position: Array) -> Array:
        """The words of all blocks, [blocks, 4] in [0, 2^32)."""
        blocks = -(-math.prod(self.shape) // 4)
        counter = np.zeros((blocks, 4), np.uint64)
        counter[:, 0] = np.arange(blocks)
        counter[:, 1], counter[:, 2] = int(position) & WORD, self.stream
        return philox64(counter, np.asarray(seed, np.int64) & WORD)

    def shaped(self, numbers: Array) -> Array:
        """The first numbers of [blocks, 4], as many as are wanted."""
        return numbers.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({"f32": 10 * y.size}, activation_bytes=y.bytes)

    def parts(self, *types: Type) -> int:
        return -(-math.prod(self.shape) // NUMBERS_OF_A_PART)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (math.prod(self.shape), self.stream)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        return (8, 4, 4 * parameters[0])

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=2))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent.columns(parameters[0], NUMBERS_OF_A_PART, lo, hi)


@operator("random_uniform", version=1)
class RandomUniform(Random):
    """Numbers of [0, 1), multiples of 2^-24: `shape` f32. seed i32[2], position i32 scalar: the session's step.

    Applications of one model are told apart by `stream`. Philox4x32-10, Salmon et al. 2011.
    """

    seed = operand("2", dtypes=DType.I32)
    position = operand("", dtypes=DType.I32)
    shape: tuple[int, ...] = attr()
    stream: int = attr(0)

    def meaning(self, seed: Array, position: Array) -> Array:
        return self.shaped((self.words(seed, position) >> np.uint64(8)) * 2.0**-24)


@scalar
def key_of(record, arenas, slot):
    """A session's two words of seed, and its step, without signs."""
    seed, step = operand_i32(record, arenas, 0, slot, 2), operand_i32(record, arenas, 1, slot, 1)
    return np.int64(seed[0]) & WORD, np.int64(seed[1]) & WORD, np.int64(step[0]) & WORD


@body(RandomUniform)
def random_uniform_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    stream, start = parameter(record, 1), part_lo * NUMBERS_OF_A_PART
    count = min(part_hi * NUMBERS_OF_A_PART, parameter(record, 0)) - start
    for slot in range(slot_lo, slot_hi):
        k0, k1, step = key_of(record, arenas, slot)
        y = view_f32(address(record, arenas, 2, slot) + 4 * start, count)
        for first in range(0, count, 4):
            w0, w1, w2, w3 = philox((start + first) // 4, step, stream, k0, k1)
            y[first] = unit(w0)
            if first + 1 < count:
                y[first + 1] = unit(w1)
            if first + 2 < count:
                y[first + 2] = unit(w2)
            if first + 3 < count:
                y[first + 3] = unit(w3)


@operator("random_normal", version=1)
class RandomNormal(Random):
    """Standard normal numbers: `shape` f32. Box & Muller 1958 on pairs of words; operands as of `random_uniform`.

    Of words (a, b): r = sqrt(-2 ln((a + 1) 2^-24)), numbers r cos(2 pi b 2^-24) and r sin(...), a and b being the upper
    24 bits.
    """

    seed = operand("2", dtypes=DType.I32)
    position = operand("", dtypes=DType.I32)
    shape: tuple[int, ...] = attr()
    stream: int = attr(0)

    def meaning(self, seed: Array, position: Array) -> Array:
        fractions = (self.words(seed, position) >> np.uint64(8)) * 2.0**-24
        radius = np.sqrt(-2.0 * np.log(fractions[:, 0::2] + 2.0**-24))
        angle = 2.0 * np.pi * fractions[:, 1::2]
        return self.shaped(np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2).reshape(-1, 4))


@scalar
def radius_of(word):
    return F(math.sqrt(F(-2.0) * math32.log(unit(word) + F(2.0**-24))))


@scalar
def angle_of(word):
    """Half a turn off, so that it is exact to a float32 near 0; the signs of sine and cosine make up for it."""
    return (unit(word) - F(0.5)) * F(6.283185307179586)


@body(RandomNormal)
def random_normal_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    stream, start = parameter(record, 1), part_lo * NUMBERS_OF_A_PART
    count = min(part_hi * NUMBERS_OF_A_PART, parameter(record, 0)) - start
    for slot in range(slot_lo, slot_hi):
        k0, k1, step = key_of(record, arenas, slot)
        y = view_f32(address(record, arenas, 2, slot) + 4 * start, count)
        for first in range(0, count, 4):
            w0, w1, w2, w3 = philox((start + first) // 4, step, stream, k0, k1)
            radius, angle = radius_of(w0), angle_of(w1)
            y[first] = -radius * math32.cos(angle)
            if first + 1 < count:
                y[first + 1] = -radius * math32.sin(angle)
            radius, angle = radius_of(w2), angle_of(w3)
            if first + 2 < count:
                y[first + 2] = -radius * math32.cos(angle)
            if first + 3 < count:
                y[first + 3] = -radius * math32.sin(angle)
