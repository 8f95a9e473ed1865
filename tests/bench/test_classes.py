"""A beat by operator: the trace's times add up to the beat, and stand beside the floor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wpk.bench.classes import by_class, times_by_class
from wpk.bench.floor import beat_floor
from wpk.ops.payload import PAYLOAD
from wpk.scheduler.program import TASK

MODEL = {"capacity": 4, "target": "h200"}


def program(*tasks: tuple[int, int, int], waves: int) -> Any:
    """tasks: (opcode, wave, block), of the operators add and linear, the latter in two versions."""
    payloads = np.zeros(len(tasks), PAYLOAD)
    payloads["opcode"] = [opcode for opcode, _, _ in tasks]
    rows = np.zeros(len(tasks), TASK)
    for index, (_, wave, block) in enumerate(tasks):
        rows[index]["payload"], rows[index]["wave"], rows[index]["block"] = index, wave, block
    return SimpleNamespace(tasks=rows, payloads=payloads, operators=("add@1", "linear@1", "linear@2"), waves=waves)


def moments(*waves: list[tuple[float, float]]) -> np.ndarray:
    """For each wave, for each block: started and done, in ms."""
    made = np.zeros((len(waves), len(waves[0]), 4), np.int64)
    made[:, :, [0, 3]] = 1e6 * np.array(waves) + 1e9
    return made


def test_the_wait_at_a_barrier_belongs_to_the_wave_before_it() -> None:
    made = program((0, 0, 0), (0, 0, 1), (1, 1, 0), (2, 2, 1), waves=3)
    found = moments([(0, 1), (0, 2)], [(2.5, 4), (2.6, 2.7)], [(4.5, 4.6), (4.5, 6)])
    assert times_by_class(made, found) == pytest.approx({"add": 2.5, "linear": 2.0 + 1.5})


def test_operators_of_one_wave_share_it_as_they_keep_blocks_busy() -> None:
    apart = program((0, 0, 0), (1, 0, 1), waves=1)
    assert times_by_class(apart, moments([(0, 1), (0, 3)])) == pytest.approx({"add": 0.75, "linear": 2.25})
    together = program((0, 0, 0), (1, 0, 0), (1, 0, 0), waves=1)
    assert times_by_class(together, moments([(0, 3)])) == pytest.approx({"add": 1.0, "linear": 2.0})
    mixed = program((0, 0, 0), (1, 0, 0), (1, 0, 1), waves=1)
    assert times_by_class(mixed, moments([(0, 2), (0, 2)])) == pytest.approx({"add": 0.5, "linear": 1.5})


def test_a_beat_that_did_not_run_through_has_no_times() -> None:
    made = program((0, 0, 0), (0, 1, 0), waves=2)
    assert times_by_class(made, np.zeros((2, 1, 4), np.int64)) == {}
    assert times_by_class(made, moments([(5, 6)], [(1, 2)])) == {}


def test_floors_add_up_and_the_gap_is_what_was_measured_beyond_them() -> None:
    plain = by_class("nemotron-h-tiny", **MODEL, history=20)
    whole = beat_floor("nemotron-h-tiny", **MODEL, context=20)
    assert sum(row["floor_ms"] for row in plain) == pytest.approx(whole.per_operation_ms)
    assert [row["floor_ms"] for row in plain] == sorted((row["floor_ms"] for row in plain), reverse=True)
    assert all("measured_ms" not in row for row in plain)
    least = plain[-1]["operator"]
    traced = by_class("nemotron-h-tiny", **MODEL, history=20, measured=[{least: 2.0}, {least: 9.0}, {least: 3.0}])
    assert traced[0]["operator"] == least and traced[0]["measured_ms"] == 3.0
    assert traced[0]["gap_ms"] == 3.0 - plain[-1]["floor_ms"]
    assert all(row["measured_ms"] == 0 for row in traced[1:])
