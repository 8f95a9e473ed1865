"""A graph's text parses back to the same graph; broken text is refused by line."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wpk.ir.check import RULES, check_graph
from wpk.ir.errors import GraphError, IrSyntaxError
from wpk.ir.graph import Graph, GraphBuilder, Node, Port, Value
from wpk.ir.text import parse_graph, print_graph
from wpk.ir.types import f32
from wpk.ops import LIBRARY
from wpk.ops.requirements import Selection

LIB = Selection({}, LIBRARY)
GOLDEN = """\
graph "vad \\"1\\"" {
  input %0: f32[1,8] "audio"
  weight %1: f32[4,8] "encoder, {0}.weight"
  weight %4: f32[4] "h0"
  register %5: f32[1,4] "h"
  register %7: i32[] "position"
  %2: f32[1,4] = linear@1(%0, %1) {activation="relu"} # encoder
  %3: f32[1,4] = affine@1(%2) {offset=-1e-07, scale=0.5}
  %6: f32[1,4] = reshape@1(%4) {shape=(1, 4)}
  %8: i32[] = increment@1(%7) {by=1}
  %9: f32[1,4] = add@1(%3, %5)
  output %9 "speech"
  initial %6 "h"
  update %9 "h"
  update %8 "position"
}
"""


def test_the_printed_form_is_stable_and_parses_back():
    graph = parse_graph(GOLDEN)
    assert print_graph(graph) == GOLDEN
    assert parse_graph(print_graph(graph)) == graph
    check_graph(graph, LIB)


def test_a_built_graph_round_trips():
    g = GraphBuilder("toy", LIB, context=4)
    x = g.input("x", f32(2, 3))
    with g.scope("block"):
        y = g.op("clamp", x, lo=-float("inf"), hi=3.5)
    g.append("cache", g.op("reshape", g.op("slice", y, axis=0, start=1, stop=2), shape=(3,))) if g.cache(
        "cache", f32(3)
    ) else None
    g.ring("ring", 4, f32(3))
    g.update("ring", y)
    g.output("y", y)
    graph = g.build()
    assert parse_graph(str(graph)) == graph
    check_graph(graph, LIB)


@given(st.text(), st.floats(), st.integers(), st.lists(st.floats(allow_nan=False)))
def test_attributes_of_every_kind_round_trip(text, real, whole, reals):
    attrs = (("a", text), ("b", real), ("c", whole), ("d", tuple(reals)))
    node = Node("full", 1, (), attrs, (Value(0, f32(2), True),), "here")
    graph = Graph("g", nodes=(node,), outputs=(Port("y", node.outputs[0]),))
    (found,) = parse_graph(print_graph(graph)).nodes
    assert repr(found.attrs) == repr(attrs)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph", "grph", "line 1"),
        ("%2: f32[1,4] =", "%0: f32[1,4] =", "defined twice"),
        ("linear@1(%0, %1)", "linear@1(%0, %99)", "before it is defined"),
        ("f32[4,8]", "f64[4,8]", "line 3"),
        ('update %8 "position"\n}', 'update %8 "position"', "cut short"),
        ('{activation="relu"}', "{activation=import}", "line 7"),
        ('{activation="relu"}', "{activation}", "no attribute"),
        ('update %8 "position"', 'update %8 "elsewhere"', "elsewhere"),
        ('output %9 "speech"', "output %9", "line"),
        ("\n}\n", "\n}\nmore\n", "after the closing brace"),
    ],
)
def test_broken_text_is_refused_by_line(old, new, message):
    assert old in GOLDEN
    with pytest.raises(IrSyntaxError, match=message):
        parse_graph(GOLDEN.replace(old, new))


def breach(graph: Graph) -> str:
    with pytest.raises(GraphError) as caught:
        check_graph(graph, LIB)
    return str(caught.value)


def test_every_rule_of_the_ir_can_be_broken_and_is_found():
    graph = parse_graph(GOLDEN)
    twice = dataclasses.replace(graph, nodes=(*graph.nodes, graph.nodes[0]))
    cycle = dataclasses.replace(graph, nodes=(graph.nodes[-1], *graph.nodes[:-1]))
    names = dataclasses.replace(graph, outputs=(*graph.outputs, Port("speech", graph.outputs[0].value)))
    wrong = graph.nodes[0]
    wrong_type = dataclasses.replace(wrong, outputs=(dataclasses.replace(wrong.outputs[0], type=f32(1, 5)),))
    types = dataclasses.replace(graph, nodes=(wrong_type, *graph.nodes[1:]))
    states = dataclasses.replace(graph, states=(dataclasses.replace(graph.states[0], update=None), graph.states[1]))
    found = [breach(g) for g in (twice, cycle, names, types, states)]
    for name, text in zip(RULES, found, strict=True):
        assert f"rule: {name}" in text
    assert "depends on itself or on a later node" in found[1]
