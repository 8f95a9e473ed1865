"""The frames of a signal put together again: the inverse of cutting it, for many frames at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.types import Type, f32
from wpk.ops.legal import common, first_broken
from wpk.ops.math32 import F
from wpk.ops.memory import view_f32
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import address, operand_f32, parameter

BLOCK = 256  # samples of a part


@operator("overlap_add_frames", version=1)
class OverlapAddFrames(Operator):
    """Frames of a signal, `hop` samples apart, added where they overlap: y[s] = sum_j x[j, s + trim - j hop].

    x [t, n] f32, 1 <= hop <= n; y [(t - 1) hop + n - 2 trim]: `trim` samples are left out on either side. Sums run
    from the oldest frame to the newest. A stream's history is concatenated in front by the caller; where trim is
    n - hop or more, every sample has all the frames that may ever cover it.
    """

    x = operand("t n", weight=False)
    hop: int = attr()
    trim: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if not 1 <= self.hop <= dims["n"]:
            raise GraphError("overlap_add_frames: hop", wanted=f"1 to {dims['n']}", found=self.hop)
        whole = _samples(dims["t"], dims["n"], self.hop, 0)
        if not 0 <= 2 * self.trim < whole:
            raise GraphError("overlap_add_frames: trim", wanted=f"0 to {(whole - 1) // 2}", found=self.trim)
        return (f32(whole - 2 * self.trim),)

    def meaning(self, x: Array) -> Array:
        t, n = x.shape
        whole = np.zeros(_samples(t, n, self.hop, 0))
        for j, frame in enumerate(x):
            whole[j * self.hop : j * self.hop + n] += frame
        return whole[self.trim : whole.size - self.trim]

    def cost(self, *types: Type) -> Cost:
        return Cost({"f32": types[0].size}, activation_bytes=types[0].bytes + self.infer(types)[0].bytes)

    def parts(self, *types: Type) -> int:
        return -(-self.infer(types)[0].size // BLOCK)

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        return (*types[0].shape, self.hop, self.trim)

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        t, n, hop, trim = parameters[:4]
        return (4 * t * n, 4 * _samples(t, n, hop, trim))

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        t, n, hop, trim = parameters[:4]
        return first_broken(
            *common(cls, parameters, present, words=4, sizes=3),
            ("hop <= n", hop <= n),
            ("trim >= 0 that leaves a sample", trim >= 0 and _samples(t, n, hop, trim) >= 1),
        )

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent.columns(_samples(*parameters[:4]), BLOCK, lo, hi)


@body(OverlapAddFrames)
def overlap_add_frames_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    t, n, hop, trim = parameter(record, 0), parameter(record, 1), parameter(record, 2), parameter(record, 3)
    lo = part_lo * BLOCK
    count = min(part_hi * BLOCK, (t - 1) * hop + n - 2 * trim) - lo
    begin = lo + trim  # of these samples in the sum of all frames
    first = max(0, begin - n + hop) // hop  # the first frame that reaches beyond `begin`, and the last before its end
    last = min(t - 1, (begin + count - 1) // hop)
    for slot in range(slot_lo, slot_hi):
        x = operand_f32(record, arenas, 0, slot, t * n)
        y = view_f32(address(record, arenas, 1, slot) + 4 * lo, count)
        for i in range(count):
            y[i] = F(0.0)
        for j in range(first, last + 1):
            start = max(0, j * hop - begin)
            source = j * (n - hop) + begin  # of sample 0 in x, if the frame reached there
            for i in range(start, min(count, j * hop + n - begin)):
                y[i] += x[source + i]


def _samples(t: int, n: int, hop: int, trim: int) -> int:
    return (t - 1) * hop + n - 2 * trim
