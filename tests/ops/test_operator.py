"""Declaring operators: what is refused and how, versions, digests, and a harness that sees planted defects."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.ops.harness import application, check, execute
from wpk.ir.errors import GraphError, OperatorError
from wpk.ir.graph import GraphBuilder
from wpk.ir.types import f32, i32
from wpk.ops import LIBRARY, Operator, attr, operand, operator
from wpk.ops.elementwise import Unary, unary_body
from wpk.ops.legal import common, first_broken
from wpk.ops.memory import view_f32
from wpk.ops.operator import Body, Extent, OperatorLibrary, Resolved, attributes, make
from wpk.ops.payload import OPERANDS, address, parameter
from wpk.ops.scalars import scalar

ALL = [pytest.param(cls, id=f"{cls.name}@{cls.version}") for cls in LIBRARY]


@pytest.fixture
def scratch_library(monkeypatch):
    """Declarations of one test only."""
    monkeypatch.setattr(LIBRARY, "_operators", dict(LIBRARY._operators))
    monkeypatch.setattr(LIBRARY, "_bodies", {k: list(v) for k, v in LIBRARY._bodies.items()})


# --- the library --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", ALL)
def test_every_operator_is_documented_and_fits_a_payload(cls):
    assert inspect.getdoc(cls) not in (None, inspect.getdoc(Operator)), "a stranger needs shapes and the formula"
    assert cls.meaning is not Operator.meaning
    body = LIBRARY.body(cls.name, cls.version, "cpu")
    if body is not None:
        assert len(cls.operands) + cls.result_count <= OPERANDS
        names = list(inspect.signature(body.function).parameters)
        assert names == ["record", "arenas", "slot_lo", "slot_hi", "part_lo", "part_hi", "scratch"]
        assert cls.parameters is not Operator.parameters and cls.extents is not Operator.extents
        assert cls.legal.__func__ is not Operator.legal.__func__, "which payloads may the body be given?"
        assert cls.expand is Operator.expand, "executed or expanded, not both"


def test_unknown_names_and_versions():
    with pytest.raises(OperatorError, match=r"no operator 'relx'.* Close names: .*relu"):
        LIBRARY.get("relx")
    with pytest.raises(OperatorError, match=r"no version 9; wanted relu@9; found relu@1\. Rebuild the profile"):
        LIBRARY.get("relu", 9)


def test_one_name_and_version_is_declared_once(scratch_library):
    with pytest.raises(OperatorError, match="relu@1 is declared twice"):

        @operator("relu", version=1)
        class Again(Operator):
            """Again."""


def test_versions_live_side_by_side(scratch_library):
    first = LIBRARY.digest("relu", 1)

    @operator("relu", version=2)
    class Relu2(Unary):
        """max(x, 0), another way."""

        x = operand("...")

        def meaning(self, x):
            return np.maximum(x, 0)

    assert LIBRARY.versions("relu") == [1, 2]
    assert LIBRARY.get("relu") is Relu2 and LIBRARY.get("relu", 1) is not Relu2
    assert LIBRARY.digest("relu", 1) == first != LIBRARY.digest("relu", 2)
    old = GraphBuilder("old", _Pinned(1))
    y = old.op("relu", old.input("x", f32(3)))
    old.output("y", y)
    assert old.build().nodes[0].version == 1


class _Pinned:
    def __init__(self, version):
        self.version = version

    def resolve(self, name):
        return Resolved(LIBRARY.get(name, self.version))


def test_a_library_of_its_own_is_empty():
    assert list(OperatorLibrary()) == []


# --- attributes and operands --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name,attrs,wanted",
    [
        ("clamp", {"lo": 0.0, "hi": 1.0, "high": 2}, "attributes unknown: high; wanted lo, hi; found lo, hi, high"),
        ("clamp", {"lo": 0.0}, "attributes missing: hi; wanted lo, hi; found lo"),
        ("relu", {"slope": 1.0}, "attributes unknown: slope; wanted no attributes; found slope"),
        ("clamp", {"lo": "low", "hi": 1.0}, "attribute 'lo'; wanted float; found 'low'"),
        ("increment", {"by": 1.5}, "attribute 'by'; wanted int; found 1.5"),
        ("increment", {"by": True}, "attribute 'by'; wanted int; found True"),
        ("cast", {"dtype": 3}, "attribute 'dtype'; wanted str; found 3"),
    ],
)
def test_attributes_are_checked_by_name(name, attrs, wanted):
    with pytest.raises(GraphError, match=wanted):
        make(LIBRARY.get(name), attrs)


def test_defaults_are_filled_in_and_integers_become_floats():
    op = make(LIBRARY.get("affine"), {"scale": 2})
    assert attributes(op) == {"scale": 2.0, "offset": 0.0} and isinstance(op.scale, float)
    assert make(LIBRARY.get("reshape"), {"shape": [3, 4]}).shape == (3, 4)


@pytest.mark.parametrize(
    "name,types,wanted",
    [
        ("add", [f32(3)], "wrong number of operands; wanted 2; found 1"),
        ("layer_norm", [f32(3)] * 4, "wrong number of operands; wanted 2 to 3; found 4"),
        ("relu", [i32(3)], r"operand 'x' has the wrong dtype; wanted f32; found i32\[3\]"),
        ("max_pool1d", [f32(3)], r"operand 'x' has the wrong rank; wanted \[t c\]; found f32\[3\]"),
    ],
)
def test_operands_are_checked_by_name(name, types, wanted):
    with pytest.raises(GraphError, match=wanted):
        application(name, *types, **({"window": 1} if name == "max_pool1d" else {}))


def test_weights_and_session_values_are_told_apart():
    g = GraphBuilder("model", _Pinned(1))
    x, w = g.input("x", f32(4)), g.input("w", f32(5, 4))
    wanted = r"model: encoder\.0: linear: operand 'weight'; wanted a weight; found a session value"
    with g.scope("encoder.0"), pytest.raises(GraphError, match=wanted):
        g.op("linear", x, w)


# --- digests ------------------------------------------------------------------------------------------------------
PRINT_DIGESTS = """
import json
from wpk.ops import LIBRARY
print(json.dumps({f"{c.name}@{c.version}": LIBRARY.digest(c.name, c.version) for c in LIBRARY}))
"""


def test_digests_are_the_same_in_every_process_and_differ_between_operators():
    here = {f"{c.name}@{c.version}": LIBRARY.digest(c.name, c.version) for c in LIBRARY}
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", PRINT_DIGESTS], env=environment, capture_output=True, text=True, check=True
        )
        assert json.loads(out.stdout) == here
    assert len(set(here.values())) == len(here)


def _declare(function, meaning, version):
    @operator("test_generated", version=version)
    class Generated(Unary):
        """Generated."""

        x = operand("...")

        def meaning(self, x):
            return meaning(x)

    LIBRARY.add_body(Generated, Body(unary_body(function), frozenset({"cpu"})))
    return LIBRARY.digest("test_generated", version).encode()


SLOPE = 2.0


@scalar
def _double(x):
    return x + x


@scalar
def _triple(x):
    return x + x + x


@scalar
def _steep(x):
    return x * SLOPE


def test_a_digest_covers_what_a_generated_operator_is_made_of(scratch_library, monkeypatch):
    """The scalar function, the meaning and the constants behind them; a version's name too."""

    def digest(function, meaning):
        LIBRARY._operators.pop(("test_generated", 1), None)
        LIBRARY._bodies.pop(("test_generated", 1), None)
        return _declare(function, meaning, 1)

    base = digest(_double, np.exp)
    assert digest(_double, np.exp) == base
    assert digest(_triple, np.exp) != base
    assert digest(_double, np.log) != base
    steep = digest(_steep, np.exp)
    monkeypatch.setitem(_steep.__globals__, "SLOPE", 3.0)
    assert digest(_steep, np.exp) != steep


# --- the harness sees defects -------------------------------------------------------------------------------------
def _planted(write, extents=None, parts=True):
    """An operator y = 2 x whose body is `write(x address, y address, n, part_lo, part_hi, slot_lo, slot_hi)`."""

    @operator("test_planted", version=1)
    class Planted(Operator):
        """Planted."""

        x = operand("n")
        factor: float = attr(2.0)

        def results(self, dims):
            return (dims.like("x"),)

        def meaning(self, x):
            return x * self.factor

        def parts(self, *types):
            return types[0].size if parts else 1

        def parameters(self, *types):
            return (types[0].size,)

        @classmethod
        def extents(cls, parameters, operands):
            return extents or (4 * parameters[0],) * 2

        @classmethod
        def legal(cls, parameters, operands, present):
            return first_broken(*common(cls, parameters, present, words=1))

        @classmethod
        def part_writes(cls, parameters, operand, lo, hi):
            return Extent(4 * lo, 4 * (hi - lo))

    def body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
        n = parameter(record, 0)
        for slot in range(slot_lo, slot_hi):
            x = view_f32(address(record, arenas, 0, slot), n + 16)
            y = view_f32(address(record, arenas, 1, slot), n + 16)
            write(x, y, n, part_lo, part_hi, slot_hi - slot_lo)

    LIBRARY.add_body(Planted, Body(body, frozenset({"cpu"})))
    return application("test_planted", f32(6))


@scalar
def _sound(x, y, n, lo, hi, slots):
    for i in range(lo, hi):
        y[i] = x[i] + x[i]


@scalar
def _beyond(x, y, n, lo, hi, slots):
    for i in range(lo, hi + 1):
        y[i] = x[min(i, n - 1)] + x[min(i, n - 1)]


@scalar
def _another_part(x, y, n, lo, hi, slots):
    for i in range(n):
        y[i] = x[i] + x[i]


@scalar
def _short(x, y, n, lo, hi, slots):
    for i in range(lo, min(hi, n - 1)):
        y[i] = x[i] + x[i]


@scalar
def _company(x, y, n, lo, hi, slots):
    for i in range(lo, hi):
        y[i] = x[i] + x[i] if slots == 3 else x[i] * np.float32(2.0000002)


@scalar
def _input(x, y, n, lo, hi, slots):
    for i in range(lo, hi):
        y[i] = x[i] + x[i]
        x[i] = y[i]


@scalar
def _wrong(x, y, n, lo, hi, slots):
    for i in range(lo, hi):
        y[i] = x[i]


def test_the_harness_passes_a_sound_body(scratch_library):
    check(_planted(_sound), slots=3)


@pytest.mark.parametrize(
    "write,extents,wanted",
    [
        (_beyond, None, "write other bytes than part_writes"),
        (_another_part, None, "write other bytes than part_writes"),
        (_short, None, "write other bytes than part_writes"),
        (_company, None, "differs for split"),
        (_input, None, "write other bytes than part_writes"),
        (_wrong, None, "Not equal to tolerance"),
        (_sound, (24, 20), "extent of operand 1, wanted 24, found 20"),
        (_sound, (28, 24), "extent of operand 0, wanted 24, found 28"),
    ],
)
def test_the_harness_catches(scratch_library, write, extents, wanted):
    with pytest.raises(AssertionError, match=wanted):
        check(_planted(write, extents), slots=3)


def test_reading_beyond_an_operand_shows(scratch_library):
    @scalar
    def beyond(x, y, n, lo, hi, slots):
        for i in range(lo, hi):
            y[i] = x[i] + x[i + 1]

    (y,) = execute(_planted(beyond), [np.ones((2, 6), np.float32)], 2)
    assert np.isnan(y[:, -1]).all(), "canaries are NaN, so what is read there poisons the result"
