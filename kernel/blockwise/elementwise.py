"""The element-wise family: what a body computes of an element, with the loads of four elements a thread under way.

One thread's body would wait for each element's operands in turn. The function is the CPU body's own, found in its
closure, so that the bits are the same; it is compiled once, in a loop over what was loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wpk.kernel import ptx
from wpk.kernel.cuda_library import (
    _value,
    _view_f32,
    _view_i32,
    address,
    device,
    is_live,
    parameter,
    parameter_f32,
    threads_body,
)
from wpk.kernel.layout import THREADS, Shape
from wpk.ops import elementwise, math32, memory, scalars, words

i32, i64, f32 = np.int32, np.int64, np.float32
AT_ONCE = 4  # elements of a thread
CHUNK = elementwise.CHUNK  # of a part
F32, BF16 = words.CAST_CODES["f32"], words.CAST_CODES["bf16"]
bf16_bits, choose = _value(scalars.bf16_bits), _value(math32.select)


@device
def elements(record, part_lo, part_hi):
    """(first element of a task's slots, how many of each)."""
    start = i32(i32(part_lo) * i32(CHUNK))
    return start, i32(min(i64(part_hi) * CHUNK, parameter(record, 0)) - i64(start))


@device
def element_of(unit, units, start, count):
    """(slot from the task's first one, element) of a unit, or of the last one beyond the end."""
    own = min(unit, i32(units - i32(1)))
    slot = ptx.quotient(own, count)
    return i64(slot), i64(i32(start + i32(own - slot * count)))


@device
def load_word(record, operand, slot, element, size, whole):
    """Of an operand of `size` elements that repeats itself over `whole`."""
    at = element
    if size != whole:
        at = i64(i32(i32(element) - ptx.quotient(i32(element), i32(size)) * i32(size)))
    return ptx.load_l2_32(address(record, 0, operand, slot) + 4 * at)


@device
def load_pair(record, slot, element, size_a, size_b, whole):
    return load_word(record, 0, slot, element, size_a, whole), load_word(record, 1, slot, element, size_b, whole)


@device
def picked(k, a, b, c, d):
    """The k-th of four."""
    low, high = (b if k == 1 else a), (d if k == 3 else c)
    return high if k > 1 else low


def _make_unary(function: Any, kind: str) -> Any:
    """kind: of the parameters that the function takes: none, "floats" two of them, "word" one."""
    of_floats, of_word = kind == "floats", kind == "word"

    @device
    def apply(word, record):
        if of_word:
            return function(word, parameter(record, 1))
        x = ptx.float_of_bits(word)
        if of_floats:
            return function(x, parameter_f32(record, 1), parameter_f32(record, 2))
        return function(x)

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        start, count = elements(record, part_lo, part_hi)
        units = i32(i32(slot_hi - slot_lo) * count)
        first = i32(ptx.thread_index())
        while first < units:
            slot, at = element_of(first, units, start, count)
            a = ptx.load_l2_32(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(THREADS)), units, start, count)
            b = ptx.load_l2_32(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(2 * THREADS)), units, start, count)
            c = ptx.load_l2_32(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(3 * THREADS)), units, start, count)
            d = ptx.load_l2_32(address(record, 0, 0, slot_lo + slot) + 4 * at)
            for k in range(ptx.renewed_32(i32(AT_ONCE))):
                unit = i32(first + i32(i32(k) * i32(THREADS)))
                if unit < units:
                    slot, at = element_of(unit, units, start, count)
                    if is_live(live, slot_lo + slot):
                        place = address(record, 0, 1, slot_lo + slot) + 4 * at
                        word = picked(k, a, b, c, d)
                        if of_word:
                            _view_i32(place, 1)[0] = apply(word, record)
                        else:
                            _view_f32(place, 1)[0] = apply(word, record)
            first = i32(first + i32(AT_ONCE * THREADS))

    return body


def _make_binary(function: Any, integers: bool, floats: bool, whole: bool) -> Any:
    """integers, floats: kinds of operands that there may be, by parameter 3 where both. whole: results are i32."""

    @device
    def combine(place, a, b, record):
        if integers and (not floats or parameter(record, 3) != 0):
            _view_i32(place, 1)[0] = function(a, b)
        elif floats:
            if whole:
                _view_i32(place, 1)[0] = function(ptx.float_of_bits(a), ptx.float_of_bits(b))
            else:
                _view_f32(place, 1)[0] = function(ptx.float_of_bits(a), ptx.float_of_bits(b))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        n, size_a, size_b = parameter(record, 0), parameter(record, 1), parameter(record, 2)
        start, count = elements(record, part_lo, part_hi)
        units = i32(i32(slot_hi - slot_lo) * count)
        first = i32(ptx.thread_index())
        while first < units:
            slot, at = element_of(first, units, start, count)
            a0, b0 = load_pair(record, slot_lo + slot, at, size_a, size_b, n)
            slot, at = element_of(i32(first + i32(THREADS)), units, start, count)
            a1, b1 = load_pair(record, slot_lo + slot, at, size_a, size_b, n)
            slot, at = element_of(i32(first + i32(2 * THREADS)), units, start, count)
            a2, b2 = load_pair(record, slot_lo + slot, at, size_a, size_b, n)
            slot, at = element_of(i32(first + i32(3 * THREADS)), units, start, count)
            a3, b3 = load_pair(record, slot_lo + slot, at, size_a, size_b, n)
            for k in range(ptx.renewed_32(i32(AT_ONCE))):
                unit = i32(first + i32(i32(k) * i32(THREADS)))
                if unit < units:
                    slot, at = element_of(unit, units, start, count)
                    if is_live(live, slot_lo + slot):
                        place = address(record, 0, 2, slot_lo + slot) + 4 * at
                        combine(place, picked(k, a0, a1, a2, a3), picked(k, b0, b1, b2, b3), record)
            first = i32(first + i32(AT_ONCE * THREADS))

    return body


def elementwise_body(function: Callable[..., None]) -> Any:
    """The block's body for a CPU body that one of the family's makers made; None for any other."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    given = dict(zip(function.__code__.co_freevars, cells, strict=True))
    name, made_in = function.__name__, function.__module__
    if made_in == elementwise.__name__ and name == "unary_body":
        return _make_unary(_value(given["function"]), "")
    if made_in == elementwise.__name__ and name == "unary_body_with_attributes":
        return _make_unary(_value(given["function"]), "floats")
    if made_in == words.__name__ and name == "unary_word_body":
        return _make_unary(_value(given["function"]), "word")
    if made_in == elementwise.__name__ and name == "binary_body":
        floats = given["operands"] is memory.view_f32
        return _make_binary(_value(given["function"]), not floats, floats, given["result"] is memory.view_i32)
    if made_in == elementwise.__name__ and name == "binary_body_of_words":
        return _make_binary(_value(given["function"]), True, True, given["result"] is memory.view_i32)
    return None


def make_select(shape: Shape) -> Any:
    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        n, conditions = parameter(record, 0), parameter(record, 1)
        start, count = elements(record, part_lo, part_hi)
        units = i32(i32(slot_hi - slot_lo) * count)
        unit = i32(ptx.thread_index())
        while unit < units:
            slot, at = element_of(unit, units, start, count)
            condition = load_word(record, 0, slot_lo + slot, at, conditions, n)
            a = ptx.load_l2_32(address(record, 0, 1, slot_lo + slot) + 4 * at)
            b = ptx.load_l2_32(address(record, 0, 2, slot_lo + slot) + 4 * at)
            if is_live(live, slot_lo + slot):
                ptx.store_32(address(record, 0, 3, slot_lo + slot) + 4 * at, choose(condition != i32(0), a, b))
            unit = i32(unit + i32(THREADS))

    return body


def make_cast(shape: Shape) -> Any:
    by_threads = threads_body("cast", 1)

    @device
    def to_bf16(record, slot_lo, slot_hi, part_lo, part_hi, live):
        start, count = elements(record, part_lo, part_hi)
        units = i32(i32(slot_hi - slot_lo) * count)
        first = i32(ptx.thread_index())
        while first < units:
            slot, at = element_of(first, units, start, count)
            a = ptx.load_l2(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(THREADS)), units, start, count)
            b = ptx.load_l2(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(2 * THREADS)), units, start, count)
            c = ptx.load_l2(address(record, 0, 0, slot_lo + slot) + 4 * at)
            slot, at = element_of(i32(first + i32(3 * THREADS)), units, start, count)
            d = ptx.load_l2(address(record, 0, 0, slot_lo + slot) + 4 * at)
            for k in range(AT_ONCE):
                unit = i32(first + i32(k * THREADS))
                if unit < units:
                    slot, at = element_of(unit, units, start, count)
                    if is_live(live, slot_lo + slot):
                        rounded = bf16_bits(picked(k, a, b, c, d))
                        ptx.store_u16(address(record, 0, 1, slot_lo + slot) + 2 * at, i32(rounded))
            first = i32(first + i32(AT_ONCE * THREADS))

    @device
    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch):
        if parameter(record, 1) == F32 and parameter(record, 2) == BF16:
            to_bf16(record, slot_lo, slot_hi, part_lo, part_hi, live)
        else:
            by_threads(record, arenas, slot_lo, slot_hi, part_lo, part_hi, live, scratch)

    return body
