"""The producer of a block, as it walks the tables of whole programs: every item in its place, no wait without end."""

from __future__ import annotations

import pytest

from tests.kernel.hybrids import CASES, program_of
from wpk.kernel.cubin import can_build
from wpk.kernel.layout import shape_of

if not can_build():
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

from tests.kernel.streams import Machine, Stuck

LIVE = {
    "all": lambda slots: range(slots),
    "some": lambda slots: range(0, slots, 3),
    "the last": lambda slots: [slots - 1],
}


def machine(name: str, live: str = "all", block: int = 0, seed: int = 0) -> Machine:
    program = program_of(CASES[name])
    return Machine(
        program, shape_of(program.operators, program.slots), block, seed, frozenset(LIVE[live](program.slots))
    )


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("name", CASES)
def test_all_items_of_two_beats_come_to_their_places(name: str, live: str) -> None:
    for block in (0, 77, 131):
        for seed in range(2):
            made = machine(name, live, block, seed)
            made.run(2)
            assert made.items == 2 * sum(made.items_of(entry) for entry in made.own)


def test_a_stage_that_is_never_given_back_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine("feed-forward alone")
    monkeypatch.setattr("tests.kernel.streams.WARPS", 7)  # of the consumers, one does not come
    with pytest.raises(Stuck):
        made.run(2)


def test_a_producer_that_waits_hears_that_the_kernel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = machine("feed-forward alone")
    monkeypatch.setattr("tests.kernel.streams.WARPS", 7)
    made.stopped = True  # by a block whose wait is bounded
    made.run(2)
    assert made.ended == 1  # and nothing was written over what nobody had used
