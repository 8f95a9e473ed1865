"""The floor of a whole model, against the sum that is made by hand from its published dimensions."""

from __future__ import annotations

import pytest

from wpk.bench.floor import beat_floor
from wpk.ir.errors import CapacityError


def test_the_floor_of_a_9b_hybrid_at_56_sessions_and_1500_steps() -> None:
    """facts: 15.428 GB of blocks and 2.349 GB of heads; 27 Mamba-2 states, and 16 KiB a step of keys and values."""
    found = beat_floor("nemotron-h-voice-9b", capacity=56, context=1500, target="h200")
    recurrent = 27 * (4 * 128 * 80 * 128 + 2 * 3 * 12288)  # f32 state, and three columns of the convolution in bf16
    caches = 4 * 2 * 2 * 8 * 128
    assert found.bytes["weights"] == pytest.approx(17.777e9, rel=0.001)
    assert found.bytes["state"] == pytest.approx(56 * (2 * recurrent + (1500 + 1) * caches), rel=0.001)
    assert found.floor_ms == found.bandwidth_ms == pytest.approx(7.35, rel=0.01)
    assert found.bandwidth_ms <= found.per_operation_ms <= 1.01 * found.bandwidth_ms
    assert 0 < found.chain_ms <= found.per_operation_ms
    assert found.flops["bf16"] >= 56 * 2 * 17.77e9 / 2
    assert found.compute_ms < 2


def test_a_beat_of_two_steps_reads_a_large_models_weights_twice() -> None:
    one, two = (
        beat_floor("nemotron-h-voice-9b", capacity=1, context=10, target="h200", steps=steps).bytes for steps in (1, 2)
    )
    assert two["weights"] == pytest.approx(2 * one["weights"], rel=0.01)
    assert two["state"] == pytest.approx(2 * one["state"], rel=0.01)


def test_capacities_that_cannot_be_had() -> None:
    for capacity in (0, 1 << 20):
        with pytest.raises(CapacityError):
            beat_floor("nemotron-h-voice-9b", capacity=capacity, target="h200")
