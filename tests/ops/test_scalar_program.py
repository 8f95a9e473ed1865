"""Straight-line integer programs: each instruction, tables of any content, and rules that become programs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import NewestVersions, application, check
from tests.scheduler.test_check_payloads import Case
from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder
from wpk.ir.types import i32
from wpk.kernel.plan import scratch_bytes
from wpk.ops.evaluate import Reference
from wpk.ops.operator import LIBRARY
from wpk.ops.rules import logical_not, maximum, minimum, record, where
from wpk.ops.scalar_program import INSTRUCTIONS, OPCODES, execute

FEW = settings(max_examples=12, deadline=None)
LOW, HIGH = -(2**31), 2**31 - 1
WORDS = np.array([0, 1, -1, 2, 5, -7, 100, HIGH, LOW], np.int32)


# --- the operator -------------------------------------------------------------------------------------------------
@FEW
@given(
    st.integers(1, 40), st.lists(st.sampled_from([(), (1,), (3,), (2, 2)]), min_size=1, max_size=5), st.integers(0, 9),
    st.integers(1, 4), st.sampled_from([1, 3, 7]), st.integers(0, 99),
)  # fmt: skip
def test_any_table_is_safe_and_means_the_same_everywhere(count, shapes, spare, outputs, slots, seed):
    types = [i32(*shape) for shape in shapes]
    registers = max(sum(t.size for t in types), outputs) + spare
    app = application("scalar_program", i32(count, 5), *types, registers=registers, outputs=outputs)
    rng = np.random.default_rng(seed)
    code = rng.integers(0, registers, (count, 5))
    code[:, 0] = rng.integers(0, len(INSTRUCTIONS), count)
    wrong = rng.random((count, 5)) < 0.1  # opcodes and registers that there are not
    code[wrong] = rng.choice(WORDS, wrong.sum())
    check(app, [code.astype(np.int32), *(rng.choice(WORDS, (slots, *shape)) for shape in shapes)], slots)


HAND = [  # a and b are in registers 0 and 1
    ("mov", 7, 9, 7), ("add", 3, 4, 7), ("add", HIGH, 1, LOW), ("sub", 3, 4, -1), ("sub", LOW, 1, HIGH),
    ("mul", -3, 4, -12), ("mul", 65536, 65536, 0), ("mul", HIGH, 2, -2), ("floor_divide", 7, 2, 3),
    ("floor_divide", -7, 2, -4), ("floor_divide", 7, -2, -4), ("floor_divide", 7, 0, 0),
    ("floor_divide", LOW, -1, LOW), ("minimum", -3, 4, -3), ("maximum", -3, 4, 4), ("less", 3, 4, 1),
    ("less", 4, 4, 0), ("less_equal", 4, 4, 1), ("less_equal", 5, 4, 0), ("equal", 4, 4, 1), ("equal", 4, 5, 0),
    ("not_equal", 4, 4, 0), ("not_equal", 4, 5, 1), ("and", 6, 3, 2), ("or", 6, 3, 7), ("not", 0, 9, 1),
    ("not", 5, 9, 0), ("select", 1, 9, 9), ("select", 0, 9, -5), ("select", -1, 9, 9),
]  # fmt: skip


def test_each_instruction():
    """One program that does them all, a result each; c is -5, a constant."""
    inputs = [v for _, a, b, _ in HAND for v in (a, b)]
    c = len(inputs)
    code = [[OPCODES["const"], c, -5, 0, 0]]
    code += [[OPCODES[name], c + 1 + i, 2 * i, 2 * i + 1, c] for i, (name, *_) in enumerate(HAND)]
    registers = c + 1 + len(HAND)
    app = application("scalar_program", i32(len(code), 5), i32(c), registers=registers, outputs=1 + len(HAND))
    (y,) = check(app, [np.array(code, np.int32), np.array([inputs], np.int32)], slots=1)
    assert y[0].tolist() == [-5, *(wanted for *_, wanted in HAND)]
    assert {name for name, *_ in HAND} | {"const"} == set(OPCODES)
    assert execute(code, inputs, registers)[-len(HAND) :] == [wanted for *_, wanted in HAND]


def test_registers_and_opcodes_beyond_take_the_nearest():
    code = [[-9, -4, 11, 0, 0], [99, 99, 0, 1, 2]]  # const into the first; select into the last
    app = application("scalar_program", i32(2, 5), i32(2), registers=3, outputs=3)
    (y,) = check(app, [np.array(code, np.int32), np.array([[5, 6]], np.int32)], slots=1)
    assert y[0].tolist() == [11, 6, 6]


def test_what_does_not_fit_is_refused():
    for types, attrs, said in (
        ([i32(2, 4), i32()], {"registers": 3, "outputs": 1}, r"5 = 5 in \[n 5\]"),
        ([i32(2, 5)], {"registers": 3, "outputs": 1}, "inputs; wanted 1 to 5; found 0"),
        ([i32(2, 5), *[i32()] * 6], {"registers": 9, "outputs": 1}, "inputs; wanted 1 to 5; found 6"),
        ([i32(2, 5), i32(4)], {"registers": 3, "outputs": 1}, "4 to 1024 registers; found 1, 3"),
        ([i32(2, 5), i32(4)], {"registers": 4, "outputs": 5}, "5 to 1024 registers; found 5, 4"),
        ([i32(2, 5), i32(4)], {"registers": 1025, "outputs": 1}, "found 1, 1025"),
        ([i32(2, 5), i32(4)], {"registers": 4, "outputs": 0}, "outputs >= 1"),
    ):
        with pytest.raises(GraphError, match=said):
            application("scalar_program", *types, **attrs)


def test_payloads_that_would_leave_the_registers_are_refused():
    sound = (3, 9, 2, 4, 1, 1, 1, 1)
    wrong = [
        {1: 7}, {1: 1025}, {0: 0}, {2: 0}, {2: 10}, {3: -4}, {3: 0}, {7: 0}, {8: 1},
        {5: 0},  # an input that is there without a size
        {4: 1 << 30, 5: 1 << 30, 6: 1 << 30, 7: 1 << 30},
    ]  # fmt: skip

    def legal(changes, present=(True,) * 7):
        words = [*sound, 0]
        for index, word in changes.items():
            words[index] = word
        return LIBRARY.get("scalar_program").legal(words, len(present), present)

    assert legal({}) is None
    assert legal({7: 0}, (*[True] * 5, False, True)) is None
    assert [legal(changes) is None for changes in wrong] == [False] * len(wrong)
    assert legal({5: 0}, (*[True] * 3, False, *[True] * 3)), "a gap between inputs"


def test_a_thread_of_a_gpu_gets_scratch_for_the_registers():
    types = {0: "i32", 1: "i32", 6: "i32"}
    program = Case("scalar_program", (3, 100, 2, 4, 0, 0, 0, 0), "wi----o", 1, types).program()
    assert scratch_bytes(program, 256) == 448  # 4 bytes a register, in lines of 64


# --- rules --------------------------------------------------------------------------------------------------------
def _everything(s, a, b):
    """Uses all that a rule may use; `first` and `second` change places."""
    s.first, s.second = s.second, s.first + a
    s.third = where(a < b, s.third - 1, 2 * s.third) // 3
    either = (a <= b) | (a == 7)
    both = (a > b) & (b != 3)
    return {
        "least": minimum(a, 3) + maximum(b, s.first), "either": either, "both": both, "a": a, "same": a,
        "not": logical_not(either), "from": 100 - a, "floor": 1000 // maximum(a, 1), "five": 5, "ge": a >= b,
    }  # fmt: skip


def test_a_rule_gives_the_same_as_a_program():
    program = record(_everything, ("first", "second", "third"), ("a", "b"))
    g = GraphBuilder("rule", NewestVersions())
    state = g.register("state", program.type, program.initial(g, third=5))
    outputs, following = program.apply(g, state, g.input("a", i32()), g.input("b", i32()))
    g.update("state", following)
    for name, value in outputs.items():
        g.output(name, value)
    reference, plain = Reference(g.build(), {}), SimpleNamespace(first=0, second=0, third=5)
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (int(v) for v in rng.integers(-9, 10, 2))
        found = {name: int(v) for name, v in reference.step({"a": np.array(a), "b": np.array(b)}).items()}
        assert found == {name: int(v) for name, v in _everything(plain, a, b).items()}
        assert reference.state["state"].tolist() == list(vars(plain).values())


def test_equal_steps_are_one_and_unused_ones_none():
    def rule(s, a):
        s.count = where(a == 1, s.count + 1, s.count)
        unused = a * 17 - 3
        return {"first": a == 1, "again": a == 1} if unused is not None else {}

    program = record(rule, ("count",), ("a",))
    names = [INSTRUCTIONS[row[0]][0] for row in program.code]
    assert sorted(names) == ["add", "const", "equal", "mov", "select"]
    assert program.registers == 2 + 1 + 1 + 3  # inputs, the constant, the sum, results


def test_what_is_no_rule_is_refused():
    def branches(s, a):
        return {"y": 1 if a else 2}

    def adds(s, a):
        s.other = a
        return {"y": a}

    kept = []

    def leaks(s, a):
        kept.append(a)
        return {"y": kept[0] + a}

    record(leaks, (), ("a",))
    for rule, state, said in (
        (branches, (), r"cannot branch .* wanted where\(condition, a, b\)"),
        (adds, ("one",), "a rule's state; wanted just one; found one, other"),
        (lambda s, a: {"y": a * 0.5}, (), "wanted an integer; found 0.5"),
        (lambda s, a: {"y": a + 2**31}, (), "wanted an i32; found 2147483648"),
        (leaks, (), "wanted one of this rule"),
        (lambda s, a: {}, (), "a rule's results; wanted at least one"),
    ):
        with pytest.raises(GraphError, match=said):
            record(rule, state, ("a",))
