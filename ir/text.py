"""The printed form of a graph, and its parser; each is the other's inverse.

graph "vad" {
  input %0: f32[512] "audio"
  weight %1: f32[128,512] "encoder.weight"
  register %2: f32[64] "context"
  %3: f32[1,128] = linear@1(%0, %1) {activation="relu"} # encoder
  output %3 "speech"
  update %3 "context"
}
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator

from wpk.ir.errors import GraphError, IrSyntaxError
from wpk.ir.graph import Attribute, Graph, Node, Port, State, StateKind, Value
from wpk.ir.types import Type, parse_type


def print_graph(graph: Graph) -> str:
    """The text of a graph; equal graphs print equally."""
    return "\n".join([f"graph {json.dumps(graph.name)} {{", *(f"  {line}" for line in _lines(graph)), "}"]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    for word, ports in (("input", graph.inputs), ("weight", graph.weights)):
        for port in ports:
            yield f"{word} {port.value}: {port.value.type} {json.dumps(port.name)}"
    for state in graph.states:
        yield f"{state.kind.value} {state.value}: {state.value.type} {json.dumps(state.name)}"
    for node in graph.nodes:
        results = ", ".join(f"{v}: {v.type}" for v in node.outputs)
        attrs = ", ".join(f"{k}={_attribute(v)}" for k, v in node.attrs)
        text = f"{results} = {node.op}@{node.version}({', '.join(map(str, node.inputs))})"
        yield text + (f" {{{attrs}}}" if attrs else "") + (f" # {node.label}" if node.label else "")
    for port in graph.outputs:
        yield f"output {port.value} {json.dumps(port.name)}"
    for state in graph.states:
        if state.initial is not None:
            yield f"initial {state.initial} {json.dumps(state.name)}"
        if state.update is not None:
            yield f"update {state.update} {json.dumps(state.name)}"


def _attribute(value: Attribute) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_attribute, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and math.isnan(value):
        return "float('nan')"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # the literals that read as infinity
    return json.dumps(value) if isinstance(value, str) else repr(value)


_LEAF = re.compile(r"(input|weight|register|ring|cache) %(\d+): (\S+) (\".*\")$")
_END = re.compile(r"(output|update|initial) %(\d+) (\".*\")$")
_NODE = re.compile(r"(?P<results>%.*?) = (?P<op>\w+)@(?P<version>\d+)\((?P<inputs>[^)]*)\)(?P<rest>.*)$")


class _Parser:
    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self.inputs: list[Port] = []
        self.weights: list[Port] = []
        self.states: dict[str, tuple[StateKind, Value]] = {}
        self.ends: dict[str, dict[str, Value]] = {"update": {}, "initial": {}}
        self.nodes: list[Node] = []
        self.outputs: list[Port] = []

    def define(self, number: str, type: Type, weight: bool = False) -> Value:
        if int(number) in self.values:
            raise ValueError(f"%{number} is defined twice")
        self.values[int(number)] = Value(int(number), type, weight)
        return self.values[int(number)]

    def use(self, number: str) -> Value:
        if int(number) not in self.values:
            raise ValueError(f"%{number} is used before it is defined")
        return self.values[int(number)]

    def line(self, text: str) -> None:
        if leaf := _LEAF.match(text):
            word, number, type, name = leaf.groups()
            value = self.define(number, parse_type(type), word == "weight")
            if word in ("input", "weight"):
                (self.inputs if word == "input" else self.weights).append(Port(json.loads(name), value))
            else:
                self.states[json.loads(name)] = (StateKind(word), value)
        elif end := _END.match(text):
            word, number, name = end.groups()
            if word == "output":
                self.outputs.append(Port(json.loads(name), self.use(number)))
            else:
                self.ends[word][json.loads(name)] = self.use(number)
        elif node := _NODE.match(text):
            self.node(node)
        else:
            raise ValueError("neither a leaf, a node, an output nor an update")

    def node(self, match: re.Match[str]) -> None:
        inputs = tuple(self.use(n) for n in re.findall(r"%(\d+)", match["inputs"]))
        rest, label = match["rest"].strip(), ""
        attrs: dict[str, Attribute] = {}
        if rest.startswith("{"):
            attrs, rest = _parse_attributes(rest)
        if rest.startswith("# "):
            label = rest[2:]
        elif rest:
            raise ValueError(f"{rest!r} after a node")
        results = re.findall(r"%(\d+): ([a-z0-9]+\[[\d,]*\])", match["results"])
        if not results:
            raise ValueError("a node without results")
        weight = all(v.weight for v in inputs)
        outputs = tuple(self.define(number, parse_type(type), weight) for number, type in results)
        self.nodes.append(Node(match["op"], int(match["version"]), inputs, tuple(attrs.items()), outputs, label))

    def graph(self, name: str) -> Graph:
        for word, ends in self.ends.items():
            if unknown := sorted(set(ends) - set(self.states)):
                raise ValueError(f"{word} of undeclared state {unknown[0]!r}")
        states = tuple(
            State(n, kind, value, self.ends["update"].get(n), self.ends["initial"].get(n))
            for n, (kind, value) in self.states.items()
        )
        return Graph(name, tuple(self.inputs), tuple(self.weights), states, tuple(self.nodes), tuple(self.outputs))


def parse_graph(text: str) -> Graph:
    """A graph from its text; `IrSyntaxError` names the line. Types are not inferred again: see `wpk.ir.check`."""
    parser, name, closed = _Parser(), None, False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line:
            continue
        try:
            if name is None:
                match = re.match(r"graph (\".*\") \{$", line)
                if match is None:
                    raise ValueError('a graph starts with `graph "NAME" {`')
                name = str(json.loads(match[1]))
            elif closed:
                raise ValueError("text after the closing brace")
            elif line == "}":
                closed = True
            else:
                parser.line(line)
        except (ValueError, SyntaxError, GraphError) as error:
            raise IrSyntaxError(f"line {number} of a graph: {error}", wanted="a line of IR", found=line[:120]) from None
    if name is None or not closed:
        raise IrSyntaxError("a graph's text is cut short", wanted="a closing brace", found="end of text")
    try:
        return parser.graph(name)
    except ValueError as error:
        raise IrSyntaxError(f"graph {name!r}: {error}", wanted="a declared state", found=name) from None


def _parse_attributes(text: str) -> tuple[dict[str, Attribute], str]:
    """`{k=v, ...}` at the start of the text, and what follows it."""
    depth, quoted, escaped, at = 0, False, False, 0
    pieces: list[str] = [""]
    for at, char in enumerate(text):
        quoted ^= char == '"' and not escaped
        escaped = quoted and char == "\\" and not escaped
        if not quoted:
            depth += (char in "{(") - (char in "})")
            if depth == 0:
                break
            if char == "," and depth == 1:
                pieces.append("")
                continue
        if at:
            pieces[-1] += char
    attrs: dict[str, Attribute] = {}
    for piece in pieces:
        key, equals, value = piece.strip().partition("=")
        if not equals:
            raise ValueError(f"{piece!r} is no attribute")
        if value == "float('nan')":
            attrs[key] = math.nan
        else:
            attrs[key] = json.loads(value) if value.startswith('"') else ast.literal_eval(value)
    return attrs, text[at + 1 :].strip()
