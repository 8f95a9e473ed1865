"""The emitted bytes: what they say, that they say it the same way every time, and that they are read back exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.scheduler.graphs import builder, compiled, graphs
from wpk.ir.errors import CompileError, ProgramError
from wpk.ir.graph import Graph
from wpk.ir.text import print_graph
from wpk.ir.types import f32
from wpk.ops.payload import ABSENT, OPERANDS
from wpk.scheduler.explain import operands, phase_rows
from wpk.scheduler.program import NONE, Direction, Program
from wpk.scheduler.target import TARGETS

ROOT = Path(__file__).parents[2]


def small() -> Graph:
    """A recurrent layer with a residual, and a history of two inputs."""
    g = builder("small")
    x, h = g.input("x", f32(6)), g.register("h", f32(6), g.weight("h0", f32(6)))
    with g.scope("cell"):
        new = g.op("tanh", g.op("linear", x, g.weight("w", f32(6, 6)), g.weight("b", f32(6))))
        new = g.op("add", new, h)
    g.update("h", new)
    with g.scope("past"):
        past = g.ring("past", 2, f32(6))
        g.output("y", g.op("add", past, new))
        g.update("past", g.op("reshape", x, shape=(1, 6)))
    return g.build()


def dump(program: Program) -> str:
    """The program as text: a paragraph a phase, a line an operand."""
    lines = [f"{program.slots} slots, {program.waves} waves, {program.arena_bytes()}"]
    for row in phase_rows(program, None):
        head = f"wave {row['wave']}: {row['op']}@{row['version']} {row['label']}"
        lines.append(f"{head}, {row['parts']} part(s) on {row['blocks']} block(s)")
        for o in operands(program, row["index"]):
            live = "..".join("" if wave is None else str(wave) for wave in o["live"])
            where = f"{o['arena']}+{o['offset']} by {o['stride']}"
            lines.append(f"  {o['operand']}: {o['role']} {o['value']} at {where}, live {live}")
    return "\n".join(lines)


GOLDEN = """\
3 slots, 3 waves, {'weights': 448, 'state': 384, 'activations': 192, 'io': 384}
wave 0: matmul@1 cell, 1 part(s) on 1 block(s)
  0: input x@0 at io+0 by 64, live ..
  1: weight %3 at weights+0 by 0, live ..
  2: weight b at weights+384 by 0, live ..
  4: state h at state+0 by 128, live ..
  5: temporary cell.7 at activations+0 by 64, live 0..1
wave 1: add@1 past, 1 part(s) on 1 block(s)
  0: state past at state+64 by 128, live ..
  1: temporary cell.7 at activations+0 by 64, live 0..1
  2: output y@0 at io+192 by 64, live 1..
wave 2: ring_shift@1 past, 1 part(s) on 1 block(s)
  0: state past at state+64 by 128, live ..
  1: input x@0 at io+0 by 64, live ..
  2: state past at state+64 by 128, live ..
wave 1: copy@1 h.commit, 1 part(s) on 1 block(s)
  0: temporary cell.7 at activations+0 by 64, live 0..1
  1: state h at state+0 by 128, live ..
"""


def test_the_program_of_a_small_graph() -> None:
    assert dump(compiled(small(), capacity=3).program) == GOLDEN.rstrip("\n")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(graphs(), st.sampled_from((1, 3)), st.integers(1, 2), st.sampled_from(sorted(TARGETS)))
def test_bytes_are_read_back_as_they_were_written(graph: Graph, slots: int, steps: int, target: str) -> None:
    note(print_graph(graph))
    program = compiled(graph, capacity=slots, steps=steps, target=target).program
    data = program.to_bytes()
    again = Program.from_bytes(data)
    assert again.to_bytes() == data and again.sha256 == program.sha256
    assert {len(v) for v in again.named_ports(Direction.INPUT).values()} == {steps}
    assert sorted(again.named_ports(Direction.OUTPUT)) == sorted(p.name for p in graph.outputs)
    used = again.uses["value"] != NONE
    assert (used == (again.payloads["reference"] != ABSENT)).all() and again.uses.shape[1] == OPERANDS


def test_ports_are_found_by_name_and_step() -> None:
    program = compiled(small(), capacity=2, steps=12).program
    assert [program.value_names[v] for v in program.named_ports(Direction.OUTPUT)["y"]] == [f"y@{i}" for i in range(12)]
    assert program.named_ports(Direction.INPUT).keys() == {"x"}


def test_floats_and_integers_travel_in_parameters() -> None:
    g = builder()
    g.output("y", g.op("affine", g.input("x", f32(6)), scale=-0.5, offset=3.0))
    parameters = compiled(g.build()).program.payloads["parameter"][0]
    assert parameters[0] == 6 and parameters[1:3].view(np.float32).tolist() == [-0.5, 3.0]


def test_a_stride_that_a_payload_cannot_hold_is_refused() -> None:
    g = builder()
    g.output("y", g.op("tanh", g.input("x", f32(1 << 30))))
    with pytest.raises(CompileError, match=r"tanh: a slot's stride; wanted < 4 GiB; found 4294967296 bytes"):
        compiled(g.build())


def test_a_cut_program_is_refused() -> None:
    data = compiled(small()).program.to_bytes()
    for broken in (data[:100], data[:-1], data + b"\0", b"x" + data[1:]):
        with pytest.raises(ProgramError):
            Program.from_bytes(broken)


def test_the_same_graph_gives_the_same_bytes_in_every_process() -> None:
    script = """
from tests.scheduler.graphs import compiled
from tests.scheduler.test_emit import small
from wpk.ir.text import print_graph
import hashlib
made = [compiled(small(), capacity=3, steps=2, target=t) for t in ("cpu", "h200")]
print(*(m.program.sha256 for m in made), hashlib.sha256(print_graph(made[0].load).encode()).hexdigest())
"""
    found = set()
    for seed in ("0", "2026"):
        env = dict(os.environ, PYTHONHASHSEED=seed)
        found.add(subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=env, text=True))
    assert len(found) == 1
    assert compiled(small(), capacity=3, steps=2).program.sha256 in found.pop()
