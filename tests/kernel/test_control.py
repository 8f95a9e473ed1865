"""The control page: the same bytes for every kernel, whatever language it is written in."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from wpk.kernel import control
from wpk.kernel.control import CONTROL, ControlPage, Poison, aligned_bytes, get_bit, set_bit

LAYOUT = {
    "input_epoch": (0, "<u8"),
    "output_epoch": (8, "<u8"),
    "start_ns": (16, "<u8"),
    "end_ns": (24, "<u8"),
    "poison": (32, "<u4"),
    "slots": (36, "<u4"),
    "mask_words": (40, "<u4"),
    "stalled": (44, "<u4"),
    "steps": (48, "<u8"),
    "reserved": (56, "<u8"),
}


def memory(page: ControlPage) -> bytes:
    """The page as another reader sees it: from its address on."""
    size = CONTROL.itemsize + page.active.nbytes + page.reset.nbytes
    held = page._memory
    assert page.address == held.ctypes.data
    return held[:size].tobytes()


def test_the_record_is_64_bytes_laid_out_as_documented() -> None:
    assert CONTROL.itemsize == 64
    assert {name: (offset, dtype.str) for name, (dtype, offset, *_) in CONTROL.fields.items()} == LAYOUT
    assert (control.INPUT_EPOCH, control.OUTPUT_EPOCH, control.START_NS, control.END_NS) == (0, 8, 16, 24)
    assert (control.POISON, control.STALLED) == (32, 44)


def test_the_documentation_names_every_field_at_its_byte() -> None:
    table = [line.replace("byte", "").split() for line in (control.__doc__ or "").splitlines()]
    said = {words[2]: (int(words[0]), words[1]) for words in table if len(words) > 2 and words[0].isdigit()}
    assert said == {name: (offset, f"u{8 * int(dtype[2])}") for name, (offset, dtype) in LAYOUT.items()}


def test_what_is_written_by_name_is_found_at_the_byte() -> None:
    page = ControlPage(70)
    for number, name in enumerate(LAYOUT, start=1):
        page[name] = number
    assert struct.unpack("<4Q4I2Q", memory(page)[:64]) == tuple(range(1, 11))
    assert [page[name] for name in LAYOUT] == list(range(1, 11))


def test_a_fresh_page_runs_nobody() -> None:
    page = ControlPage(65)
    assert struct.unpack("<4Q4I2Q", memory(page)[:64]) == (0, 0, 0, 0, 0, 65, 2, 0, 0, 0)
    assert not any(memory(page)[64:])
    assert page["poison"] == Poison.NONE


@pytest.mark.parametrize(("slots", "words"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (65536, 1024)])
def test_masks_have_a_bit_for_every_slot_and_follow_the_record(slots: int, words: int) -> None:
    page = ControlPage(slots)
    assert page["mask_words"] == words == len(page.active) == len(page.reset)
    set_bit(page.active, slots - 1, True)
    set_bit(page.reset, 0, True)
    found = memory(page)[64:]
    assert len(found) == 16 * words
    assert found[(slots - 1) // 8] == 1 << ((slots - 1) % 8)
    assert found[8 * words] == 1
    assert sum(byte.bit_count() for byte in found) == 2


def test_a_bit_is_set_and_cleared_without_its_neighbours() -> None:
    mask, wanted = np.zeros(3, np.uint64), set()
    rng = np.random.default_rng(0)
    for _ in range(500):
        slot, on = int(rng.integers(192)), bool(rng.integers(2))
        set_bit(mask, slot, on)
        (wanted.add if on else wanted.discard)(slot)
        assert {s for s in range(192) if get_bit(mask, s)} == wanted


def test_epochs_and_masks_start_on_cache_lines() -> None:
    for size in (1, 64, 100, 5000):
        for alignment in (64, 4096):
            made = aligned_bytes(size, alignment)
            assert made.ctypes.data % alignment == 0 and made.nbytes == size and not made.any()
    assert aligned_bytes(0).nbytes == 1
    assert ControlPage(3).address % 4096 == 0


def test_poison_values_are_fixed() -> None:
    assert {p.name: int(p) for p in Poison} == {"NONE": 0, "STOP": 1, "HOST": 2, "STALLED": 3}
