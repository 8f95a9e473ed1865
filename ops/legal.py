"""What `Operator.legal` is written with: conditions on a payload's words, each with the name of what it wants.

    @classmethod
    def legal(cls, parameters, operands, present):
        t, c, window, stride = parameters[:4]
        return first_broken(*common(cls, parameters, present, words=4), ("window <= frames", window <= t))

A body trusts its payload: whatever these conditions let through must be safe to execute, for any values of operands.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from wpk.ir.types import DType
from wpk.ops.payload import decode_float

if TYPE_CHECKING:
    from wpk.ops.operator import Operator

Rule = tuple[str, bool]
DTypes = tuple[DType | None, ...]


class Domain(Protocol):
    """The values of a word that is no size, offset or code of a layout: each but means another computation."""

    def __contains__(self, word: int, /) -> bool: ...


class Floats:
    """f32 words whose value is in [low, high]; NaN is in none."""

    def __init__(self, low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> None:
        self.low, self.high, self.finite = low, high, finite

    def __contains__(self, word: int, /) -> bool:
        value = decode_float(word)
        return self.low <= value <= self.high and (not self.finite or math.isfinite(value))


FINITE = Floats()
NOT_NEGATIVE = Floats(0.0)
NUMBERS = Floats(finite=False)
ANY_I32 = range(-(1 << 31), 1 << 31)
POSITIVE = range(1, 1 << 31)


def first_broken(*rules: Rule) -> str | None:
    """What the first condition that does not hold wants, or None."""
    return next((wanted for wanted, holds in rules if not holds), None)


def common(
    cls: type[Operator],
    parameters: Sequence[int],
    present: Sequence[bool],
    *,
    words: int,
    sizes: int | None = None,
    operands: int | None = None,
    optional: Collection[int] | None = None,
) -> Iterator[Rule]:
    """What all operators want: words from `words` on are 0, the first `sizes` (by default, all that are not in
    `semantic_parameters`) at least 1; as many operands as are declared, all there but the optional ones."""
    if operands is None:
        operands = len(cls.operands) + cls.result_count
    if optional is None:
        optional = [j for j, operand in enumerate(cls.operands) if operand.optional]
    sizes = min((*cls.semantic_parameters, words)) if sizes is None else sizes
    yield f"{operands} operands", len(present) == operands
    for j, there in enumerate(present):
        yield f"operand {j} to be there", there or j in optional
    for i, word in enumerate(parameters):
        if i >= words:
            yield f"parameter {i}, which is not used, to be 0", word == 0
        elif i in cls.semantic_parameters:
            yield f"parameter {i} within what it may be, not {word}", word in cls.semantic_parameters[i]
        elif i < sizes:
            yield f"parameter {i} >= 1, not {word}", word >= 1


def is_permutation(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether these strides (0 for a size of 1) reach every element of a dense array once."""
    reached = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True)):
        if size < 1 or stride != (0 if size == 1 else reached):
            return False
        reached *= size
    return True


def moved(given: Sequence[DType | None], operands: Collection[int]) -> DTypes:
    """The dtypes of a move of words: those operands and the result have the dtype of the first of them."""
    one = given[min(operands)]
    return (*(one if j in operands else dtype for j, dtype in enumerate(given[:-1])), one)
