"""The ring that products, states and caches divide as they like: nothing is overwritten before it was used.

The device functions are plain Python underneath; here a producer and a consumer run them in turn.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from wpk.kernel.cubin import can_build
from wpk.kernel.layout import BARRIERS, Shape

if not can_build():
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

from wpk.kernel.streamed import ring


@pytest.fixture(autouse=True)
def whole_quotients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one instruction of the GPU that is used here."""
    monkeypatch.setattr(ring, "ptx", SimpleNamespace(quotient=lambda a, b: np.int32(int(a) // int(b))))


SIZES = (5, 14, 22, 24, 29, 32, 36)  # of a stage, in units


class Producer:
    """What `make_producer` keeps in a cursor, and what it does when an entry is opened and an item issued."""

    def __init__(self) -> None:
        self.item = self.run = self.offset = self.old_place = self.old_run = 0
        self.size = self.count = self.old_size = self.old_count = 1

    def open(self, size: int, count: int) -> None:
        if size != self.size:
            self.old_size, self.old_count, self.old_run = self.size, self.count, self.run
            self.old_place = self.offset // self.size
            self.run, self.size, self.count = self.item, size, count
            self.offset = int(ring.start_of_run.py_func(self.offset, size, count))

    def blocking(self) -> int:
        return int(
            ring.latest_blocking.py_func(
                self.item, self.run, self.offset, self.size, self.count, self.old_run, self.old_size, self.old_count,
                self.old_place,
            )
        )  # fmt: skip

    def issue(self) -> None:
        self.item += 1
        self.offset = (self.offset + self.size) % (self.size * self.count)


@pytest.mark.parametrize("sessions", [64, 128])
@pytest.mark.parametrize("seed", range(40))
def test_an_item_waits_for_all_that_lies_where_it_is_written_and_for_its_barriers(sessions: int, seed: int) -> None:
    rng, producer = random.Random(seed), Producer()
    place = ring.NO_ITEMS  # the consumers'
    held: list[tuple[int, int, int]] = []  # items that nobody has used yet: number, first and end unit
    for _ in range(60):
        size = rng.choice(SIZES)
        count = Shape(sessions).stages(1024 * size).count
        producer.open(size, count)
        if size != place >> 48:
            start = int(ring.start_of_run.py_func(place >> 32 & 0xFFFF, size, count))
            place = place & 0xFFFFFFFF | start << 32 | size << 48
        for _ in range(rng.choice((0, 1, 3, 40))):
            last = producer.blocking()
            assert producer.item - BARRIERS <= last < producer.item
            held = [item for item in held if item[0] > last]  # no more than it waits for has been used
            first, end = producer.offset, producer.offset + size
            assert all(end <= lo or hi <= first for _, lo, hi in held)
            assert (place & 0xFFFFFFFF, place >> 32 & 0xFFFF) == (producer.item, first)
            held.append((producer.item, first, end))
            producer.issue()
            following = (first + size) % (size * count)
            place = place >> 48 << 48 | following << 32 | (place + 1) & 0xFFFFFFFF


def test_a_run_begins_behind_the_one_before() -> None:
    start = ring.start_of_run.py_func
    assert [int(start(offset, 10, 4)) for offset in (0, 1, 10, 29, 30, 31, 45)] == [0, 10, 10, 30, 30, 0, 0]


def test_the_numbers_of_items_may_wrap() -> None:
    last = (1 << 31) - 1
    place = int(ring.left_at.py_func(7 << 48 | 5 << 32 | last, -1, 0, -ring.RING))
    assert (place >> 48, place >> 32 & 0xFFFF, place & 0xFFFFFFFF) == (7, 0, (1 << 32) - 1)
