"""A beat's moments as a trace: an event for each block's work in a wave, none of an earlier beat."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wpk.ir.errors import StoreError
from wpk.ops.payload import PAYLOAD
from wpk.runtime.trace import trace_events, write_trace
from wpk.scheduler.program import TASK

OPERATORS = ("add@1", "tiled_matmul@1")


def program(*tasks: tuple[int, int, int], parts: int = 1) -> Any:
    """tasks: (payload, wave, block). Payload 0 adds, 1 multiplies, 2 adds."""
    payloads = np.zeros(3, PAYLOAD)
    payloads["opcode"] = [0, 1, 0]
    rows = np.zeros(len(tasks), TASK)
    for row, (payload, wave, block) in zip(rows, tasks, strict=True):
        row["payload"], row["wave"], row["block"], row["part_hi"] = payload, wave, block, parts
    return SimpleNamespace(tasks=rows, payloads=payloads, operators=OPERATORS, labels=("sum", "layer.up", "gate"))


def moments(*waves: list[tuple[int, int, int, int]]) -> np.ndarray:
    """For each wave, for each block: started, streaming, streamed out, done."""
    return np.array(waves, np.int64)


def complete(events: list[dict[str, Any]]) -> list[tuple[str, int, float, float]]:
    """(name, block, start, duration) in microseconds."""
    return [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]


def test_a_wave_of_a_block_is_an_event_with_its_operators() -> None:
    made = program((0, 0, 0), (2, 0, 0), (0, 0, 1), (2, 1, 1))
    found = moments([(5000, 0, 0, 7000), (5500, 0, 0, 6000)], [(8000, 0, 0, 8010), (8000, 0, 0, 9500)])
    events = trace_events(made, found, "a model", process=4)
    assert complete(events) == [
        ("sum, gate", 0, 0.0, 2.0),  # and nothing in wave 1, where block 0 has no task
        ("sum", 1, 0.5, 0.5),
        ("gate", 1, 3.0, 1.5),
    ]
    assert {e["pid"] for e in events} == {4}
    assert events[0]["args"] == {"name": "a model"}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["block 0", "block 1"]
    first = next(e for e in events if e["ph"] == "X")
    assert first["args"] == {"wave": 0, "operators": ["add@1"], "labels": ["sum", "gate"], "tasks": 2}


def test_a_streamed_wave_has_its_stages_inside() -> None:
    events = trace_events(program((1, 0, 0)), moments([(1000, 1400, 3000, 3500)]), "m")
    assert complete(events) == [
        ("layer.up", 0, 0.0, 2.5),
        ("wait for first bytes", 0, 0.0, 0.4),
        ("stream", 0, 0.4, 1.6),
        ("epilogue", 0, 2.0, 0.5),
    ]


def test_the_moments_of_several_parts_are_those_of_the_last() -> None:
    events = trace_events(program((1, 0, 0), parts=3), moments([(1000, 1400, 3000, 3500)]), "m")
    assert complete(events)[1][0] == "2 parts before, wait for bytes"


@pytest.mark.parametrize("old", [(1000, 400, 900, 2000), (1000, 400, 1500, 2000), (1000, 1200, 900, 2000)])
def test_a_moment_older_than_its_wave_is_of_another_beat(old: tuple[int, int, int, int]) -> None:
    assert complete(trace_events(program((1, 0, 0)), moments([old]), "m")) == [("layer.up", 0, 0.0, 1.0)]


def test_waves_that_this_beat_did_not_reach_are_left_out() -> None:
    made = program((0, 0, 0), (0, 1, 0), (0, 2, 0))
    in_the_midst = moments([(9000, 0, 0, 9100)], [(9200, 0, 0, 8000)], [(8100, 0, 0, 8200)])
    assert complete(trace_events(made, in_the_midst, "m")) == [("sum", 0, 0.0, 0.1)]


@pytest.mark.parametrize("none", [moments([(0, 0, 0, 0)]), np.zeros((0, 1, 4), np.int64)])
def test_before_the_first_beat_there_is_nothing(none: np.ndarray) -> None:
    assert complete(trace_events(program((0, 0, 0)), none, "m")) == []


def test_many_labels_are_cut_short_in_the_name_alone() -> None:
    made = program(*[(0, 0, 0)] * 5)
    made.labels, made.tasks["payload"] = tuple("abcde"), range(5)
    made.payloads = np.zeros(5, PAYLOAD)
    event = next(e for e in trace_events(made, moments([(10, 0, 0, 20)]), "m") if e["ph"] == "X")
    assert event["name"] == "a, b, c and 2 more"
    assert event["args"]["labels"] == list("abcde")


def test_the_file_is_one_json_object(tmp_path: Path) -> None:
    events = trace_events(program((0, 0, 0)), moments([(1000, 0, 0, 2500)]), "m")
    for _ in range(2):
        write_trace(tmp_path / "new" / "t.json", events)
    assert json.loads((tmp_path / "new" / "t.json").read_text()) == {"traceEvents": events, "displayTimeUnit": "ns"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        write_trace(tmp_path, [])
