"""The floor against numbers worked out by hand, and below what the cost model predicts."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import CONTEXT, SELECTION, builder, compiled, graphs, lowered_beat
from wpk.ir.graph import Graph, GraphBuilder
from wpk.ir.text import print_graph
from wpk.ir.types import f32, i32
from wpk.ops.requirements import Selection
from wpk.registry import find_model
from wpk.scheduler import cost
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.target import TARGETS, find_target
from wpk.zoo.build import build_graph
from wpk.zoo.catalog import Catalog

# Round numbers: 1 GFLOP/s, 1 MB/s and a barrier of 1 ms.
SLOW = find_target("cpu").model_copy(
    update={
        "name": "slow", "blocks": 4, "bandwidth": 1e6, "flops": dict.fromkeys(("f32", "tf32", "bf16"), 1e9),
        "barrier_s": 1e-3, "least_task_s": 1e-6,
    }
)  # fmt: skip


def slow(g: GraphBuilder, capacity: int, steps: int = 1) -> Compiled:
    return compile_graph(g.build(), SELECTION, SLOW, capacity=capacity, steps=steps)


def test_the_floor_of_one_linear_layer() -> None:
    g = builder()
    g.output("y", g.op("linear", g.input("x", f32(100)), g.weight("w", f32(160, 100)), g.weight("b", f32(160))))
    found = slow(g, 10).floor
    weights = 4 * (10 * 100 * 16 + 160)  # ten panels of sixteen rows, and the bias
    assert found.flops == {"bf16": 0, "tf32": 0, "f32": 2 * 160 * 100 * 10}
    assert found.bytes == {"weights": weights, "state": 0, "total": weights}
    assert (found.compute_ms, found.barriers_ms) == pytest.approx((0.32, 1.0))
    assert found.bandwidth_ms == found.floor_ms == pytest.approx(weights / 1e6 * 1e3)


def test_products_in_tf32_count_at_their_rate_on_a_gpu() -> None:
    target = find_target("h200")
    found = {}
    for products in ("f32", "tf32"):
        g = builder()
        with g.products(products):
            g.output("y", g.op("linear", g.input("x", f32(2, 1024)), g.weight("w", f32(1024, 1024))))
        found[products] = compile_graph(g.build(), SELECTION, target, capacity=56).floor
    flops = 56 * 2 * 2 * 1024 * 1024
    assert found["tf32"].flops == {"bf16": 0, "tf32": flops, "f32": 0}
    assert found["f32"].flops == {"bf16": 0, "tf32": 0, "f32": flops}
    assert found["tf32"].compute_ms == pytest.approx(1e3 * flops / target.flops["tf32"])
    assert found["tf32"].bytes == found["f32"].bytes


def test_state_is_read_once_and_written_once_however_many_steps_a_beat_has() -> None:
    g = builder()
    h = g.op("add", g.register("h", f32(250)), g.input("x", f32(250)))
    g.update("h", h)
    g.output("y", g.op("tanh", h))
    for steps in (1, 3):
        found = slow(g, 8, steps).floor
        assert found.bytes == {"weights": 0, "state": 8 * 2 * 1000, "total": 16_000}
        assert found.bandwidth_ms == pytest.approx(16.0)
        assert found.flops["f32"] == steps * 8 * 250 * 2
        assert found.barriers_ms == pytest.approx(1.0 + steps)


def test_a_state_that_is_only_read_is_not_written() -> None:
    g = builder()
    r = g.register("r", f32(250), g.weight("w", f32(250)))
    g.update("r", r)
    g.output("y", g.op("add", r, g.input("x", f32(250))))
    assert slow(g, 1).floor.bytes["state"] == 1000


def test_of_a_state_only_what_is_read_counts() -> None:
    g = builder()
    r = g.register("r", f32(10, 250))
    g.update("r", r)
    g.output("y", g.op("tanh", g.op("slice", r, axis=0, start=2, stop=3)))
    assert slow(g, 1).floor.bytes["state"] == 1000


def test_of_a_cache_all_rows_are_read_and_one_is_written() -> None:
    g = builder()
    x = g.input("x", f32(1, 250))
    g.cache("c", f32(1, 250))
    cache = g.append("c", x)
    g.output("y", g.op("attention", x, cache, cache, g.position(), scale=1.0))
    position = 2 * 4
    assert slow(g, 1).floor.bytes["state"] == CONTEXT * 1000 + 1000 + position
    assert slow(g, 1, steps=3).floor.bytes["state"] == CONTEXT * 1000 + 3 * 1000 + position


def test_of_a_table_only_the_rows_that_are_looked_up_count() -> None:
    g = builder()
    table = g.weight("t", f32(1000, 250))
    g.output("y", g.op("embedding", g.input("i", i32()), table))
    assert slow(g, 3).floor.bytes == {"weights": 3 * 1000, "state": 0, "total": 3000}
    assert slow(g, 5000).floor.bytes["weights"] == 1000 * 1000  # never more than all of it


def test_weights_that_the_chip_cannot_hold_are_read_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_of(steps: int) -> int:
        g = builder()
        x = g.op("add", g.register("last", f32(32)), g.input("x", f32(32)))
        for name in "abc":
            x = g.op("linear", x, g.weight(name, f32(32, 32)))
        g.update("last", x)
        g.output("y", x)
        return slow(g, 2, steps).floor.bytes["weights"]

    assert bytes_of(1) == bytes_of(2) == 3 * 4096
    monkeypatch.setattr(cost, "ON_CHIP_BYTES", 2 * 4096)
    assert bytes_of(1) == 3 * 4096
    assert bytes_of(2) == 6 * 4096


def test_a_cache_that_the_chip_cannot_hold_is_read_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    g = builder()
    x = g.input("x", f32(1, 250))
    g.cache("c", f32(1, 250))
    cache = g.append("c", x)
    g.output("y", g.op("attention", x, cache, cache, g.position(), scale=1.0))
    monkeypatch.setattr(cost, "ON_CHIP_BYTES", 900)
    found = slow(g, 8, steps=3).floor.bytes["state"]
    assert found // 1000 == 8 * (3 * CONTEXT + 3)  # and some bytes of the position


def test_the_sum_over_operations_takes_the_greater_of_arithmetic_and_traffic_of_each() -> None:
    machine = SLOW.model_copy(update={"flops": dict.fromkeys(("f32", "tf32", "bf16"), 1e6)})
    g = builder()
    x = g.input("x", f32(1, 16))
    y = g.op("linear", x, g.weight("w", f32(16, 16)))  # 512 FLOPs a session, 1,024 bytes a cohort
    g.output("y", g.op("softmax", y))
    for slots, product in ((1, 1.024), (16, 8.192)):
        found = compile_graph(g.build(), SELECTION, machine, capacity=slots).floor
        softmax = found.flops["f32"] / 1e3 - slots * 0.512
        assert softmax > 0
        assert found.bandwidth_ms == pytest.approx(1.024)
        assert found.per_operation_ms == pytest.approx(product + softmax)
        assert found.chain_ms == pytest.approx(product + softmax)  # the one depends on the other


def test_the_path_is_the_longest_chain_where_that_is_longer_than_its_barriers() -> None:
    g = builder()
    short, long = (g.input(name, f32(160)) for name in ("short", "long"))
    for i in range(2):
        long = g.op("linear", long, g.weight(f"l{i}", f32(160, 160)))
    g.output("l", long)
    g.output("s", g.op("linear", short, g.weight("s", f32(160, 160))))
    found = slow(g, 1).floor
    matrix = 4 * 160 * 160 / 1e3
    assert found.barriers_ms == pytest.approx(2.0)
    assert found.path_ms == found.chain_ms == pytest.approx(2 * matrix)
    assert found.floor_ms == found.bandwidth_ms == pytest.approx(3 * matrix) == found.per_operation_ms


def test_each_operator_has_its_share_of_the_sum() -> None:
    g = builder()
    h = g.op("add", g.register("h", f32(160)), g.input("x", f32(160)))
    g.update("h", h)
    for i in range(2):
        h = g.op("linear", h, g.weight(f"w{i}", f32(160, 160)))
    g.output("y", h)
    lowered = lowered_beat(g.build())
    product, add = cost.shares(lowered.phases, lowered.storages, 3, SLOW)
    assert (product.operator, product.phases, product.ms) == ("matmul", 2, pytest.approx(2 * 102.4))
    assert product.bytes == {"weights": 2 * 102_400, "state": 0, "total": 204_800}
    assert product.flops["f32"] == 3 * 2 * 2 * 160 * 160
    assert (add.operator, add.bytes["state"], add.ms) == ("add", 3 * 2 * 640, pytest.approx(3.84))


def test_activations_through_memory_are_told_beside_the_floor() -> None:
    g = builder()
    g.output("y", g.op("tanh", g.op("relu", g.input("x", f32(1000)))))
    found = slow(g, 3).floor
    assert found.activation_bytes == 3 * 2 * 2 * 4000  # read and written by either, for three sessions
    assert found.bytes["total"] == 0 and found.bandwidth_ms == 0
    assert found.unfused_ms == pytest.approx(1e3 * found.activation_bytes / SLOW.bandwidth)


def test_the_path_is_a_barrier_a_wave() -> None:
    g = builder()
    y = g.input("x", f32(4))
    for _ in range(7):
        y = g.op("tanh", y)
    g.output("y", y)
    found = slow(g, 1)
    assert found.program.waves == 7 and found.floor.path_ms == found.floor.floor_ms == pytest.approx(7.0)


# The whole conversation takes half a minute: tests/zoo/test_voicechat.py compiles it once; its small one is here.
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in Catalog.builtin() if name != "voicechat"])
def test_no_model_is_predicted_to_be_faster_than_its_floor(name: str, target: str) -> None:
    spec = find_model(name)
    library, machine = Selection(spec.operators), find_target(target)
    graph = build_graph(spec, context=spec.context)
    last = 0.0
    for capacity in (1, 16, 256) if spec.clock.steps_per_beat == 1 else (16,):  # several steps take their time
        made = compile_graph(graph, library, machine, capacity=capacity, steps=spec.clock.steps_per_beat)
        assert last <= made.floor.floor_ms <= made.predicted_ms
        last = made.floor.floor_ms


@settings(max_examples=25, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from((1, 3, 500)), st.integers(1, 2), st.sampled_from(sorted(TARGETS)))
def test_no_graph_is_predicted_to_be_faster_than_its_floor(graph: Graph, slots: int, steps: int, target: str) -> None:
    note(print_graph(graph))
    made = compiled(graph, capacity=slots, steps=steps, target=target)
    assert made.floor.floor_ms <= made.predicted_ms


def touching(g: GraphBuilder) -> None:
    h = g.op("add", g.register("h", f32(250)), g.input("x", f32(250)))
    g.update("h", h)
    g.output("y", g.op("tanh", h))


def test_a_phase_that_reaches_into_state_waits_for_every_session() -> None:
    g = builder()
    touching(g)
    graph = g.build()
    far = SLOW.model_copy(update={"state_touch_s": 0.5})
    add, tanh = lowered_beat(graph).phases
    assert (add.touches_state, tanh.touches_state) == (True, True)  # tanh reads the state that add made in place
    for slots in (1, 7):
        near = cost.phase_seconds(add, slots, SLOW)
        assert cost.phase_seconds(add, slots, far) == pytest.approx(near + 0.5 * slots)
    floors = [compile_graph(graph, SELECTION, machine, capacity=7).floor for machine in (SLOW, far)]
    assert floors[0] == floors[1]


def test_what_reaches_into_state_is_spread_over_the_blocks() -> None:
    g = builder()
    touching(g)
    far = SLOW.model_copy(update={"state_touch_s": 0.5})
    tasks = compile_graph(g.build(), SELECTION, far, capacity=8).program.tasks
    assert [len(tasks[tasks["payload"] == phase]) for phase in (0, 1)] == [4, 4]
