"""The static checks: valid programs pass, every check has a defect that turns it red, no broken program passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.scheduler.fuzz import KINDS, Draft, mutate
from wpk.ir.errors import ProgramError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32
from wpk.ops import LIBRARY
from wpk.ops.payload import ABSENT, ARENA_SHIFT, OPERANDS, PAYLOAD, Arena
from wpk.ops.requirements import Selection
from wpk.scheduler.check import CHECKS, check_program, verify_program
from wpk.scheduler.compile import compile_graph
from wpk.scheduler.program import ARENA_OF, DTYPES, NONE, PORT, TASK, USE, VALUE, Direction, Program, Role
from wpk.scheduler.target import find_target

MUTANTS = 2000


# --- programs made by hand ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Hand:
    """A phase as a table row: payload operands by value name (None: absent) and the wave it runs in."""

    op: str
    wave: int
    operands: tuple[str | None, ...]
    parameters: tuple[int, ...]
    parts: int = 1


def assemble(
    values: Mapping[str, tuple[Role, str, int]], phases: Sequence[Hand], *, slots: int, blocks: int, steps: int = 1
) -> Program:
    """Lay out values (name -> role, dtype, bytes) one after the other, and cut phases over the blocks."""
    names = list(values)
    table = np.zeros(len(names), VALUE)
    ends, slab = dict.fromkeys(Arena, 0), sum(-(-s // 64) * 64 for r, _, s in values.values() if r is Role.STATE)
    for row, (role, dtype, size) in zip(table, values.values(), strict=True):
        arena, room = ARENA_OF[role], -(-size // 64) * 64
        row["arena"], row["role"], row["dtype"] = arena, role, [d.value for d in DTYPES].index(dtype)
        row["first"] = row["last"] = NONE
        row["offset"], row["size"] = ends[arena], size
        row["stride"] = {Role.WEIGHT: 0, Role.STATE: slab}.get(role, room)
        ends[arena] += room if role in (Role.WEIGHT, Role.STATE) else room * slots
    ends[Arena.STATE] *= slots
    opcodes = sorted({p.op for p in phases})
    payloads, uses, tasks = np.zeros(len(phases), PAYLOAD), np.zeros((len(phases), OPERANDS), USE), []
    payloads["reference"], uses["value"] = ABSENT, NONE
    for i, phase in enumerate(phases):
        payloads["opcode"][i], payloads["operands"][i] = opcodes.index(phase.op), len(phase.operands)
        payloads["parts"][i] = phase.parts
        payloads["parameter"][i, : len(phase.parameters)] = phase.parameters
        extents = LIBRARY.get(phase.op).extents(phase.parameters, len(phase.operands))
        for j, name in enumerate(phase.operands):
            if name is None:
                continue
            row = table[names.index(name)]
            payloads["reference"][i, j] = (int(row["arena"]) << ARENA_SHIFT) | int(row["offset"])
            payloads["stride"][i, j] = row["stride"]
            uses[i, j] = (names.index(name), 0, extents[j])
        cuts = min(blocks, max(phase.parts, slots))
        for k in range(cuts):
            part = _cut(phase.parts, k, cuts) if phase.parts > 1 else (0, 1)
            slot = (0, slots) if phase.parts > 1 else _cut(slots, k, cuts)
            if part[0] < part[1] and slot[0] < slot[1]:
                tasks.append((i, phase.wave, k, *slot, *part, 0))
    ins_outs = [n for n in names if values[n][0] in (Role.INPUT, Role.OUTPUT)]
    ports = np.zeros(len(ins_outs), PORT)
    for row, name in zip(ports, ins_outs, strict=True):
        row["value"], row["step"] = names.index(name), int(name.rpartition("@")[2])
        row["direction"] = Direction.INPUT if values[name][0] is Role.INPUT else Direction.OUTPUT
    program = Program(
        slots=slots, blocks=blocks, waves=1 + max(p.wave for p in phases), steps=steps,
        arenas=tuple(ends[a] for a in Arena),  # type: ignore[arg-type]
        payloads=payloads, tasks=np.array(sorted(tasks, key=lambda t: (t[1], t[2], t[0])), TASK), values=table,
        uses=uses, ports=ports, operators=tuple(f"{o}@1" for o in opcodes), value_names=tuple(names),
        port_names=tuple(n.rpartition("@")[0] for n in ins_outs),
        labels=tuple(f"{p.op}.{i}" for i, p in enumerate(phases)),
    )  # fmt: skip
    draft = Draft(program)
    draft.relive()
    return Program.from_bytes(draft.bytes())


def _cut(size: int, k: int, pieces: int) -> tuple[int, int]:
    return size * k // pieces, size * (k + 1) // pieces


def recurrent(slots: int = 3, blocks: int = 2) -> Program:
    """h' = tanh(W x + b + h), y = h' + W x: a matrix product over parts, a state overwritten, a count in place."""
    values = {
        "weight": (Role.WEIGHT, "f32", 4 * 38 * 8 * 16), "bias": (Role.WEIGHT, "f32", 2400),
        "h": (Role.STATE, "f32", 2400), "position": (Role.STATE, "i32", 4),
        "x@0": (Role.INPUT, "f32", 32), "y@0": (Role.OUTPUT, "f32", 2400), "count@0": (Role.OUTPUT, "f32", 4),
        "product": (Role.TEMPORARY, "f32", 2400), "sum": (Role.TEMPORARY, "f32", 2400),
    }  # fmt: skip
    phases = [
        Hand("matmul", 0, ("x@0", "weight", "bias", None, None, "product"), (1, 8, 8, 0, 8, 0, 600, 0, 1), 38),
        Hand("cast", 0, ("position", "count@0"), (1, 2, 0)),
        Hand("add", 1, ("product", "h", "sum"), (600, 600, 600), 3),
        Hand("increment", 1, ("position", "position"), (1, 1)),
        Hand("tanh", 2, ("sum", "h"), (600,), 3),
        Hand("add", 3, ("h", "product", "y@0"), (600, 600, 600), 3),
    ]
    return assemble(values, phases, slots=slots, blocks=blocks)


def appended(slots: int = 2, blocks: int = 2) -> Program:
    """Two steps a beat: a row into a cache, then the square of the whole cache out."""
    values: dict[str, tuple[Role, str, int]] = {"cache": (Role.STATE, "f32", 256), "position": (Role.STATE, "i32", 4)}
    for step in (0, 1):
        values |= {f"row@{step}": (Role.INPUT, "f32", 64), f"y@{step}": (Role.OUTPUT, "f32", 256)}
    values["next"] = (Role.TEMPORARY, "i32", 4)
    phases = [
        Hand("cache_append", 0, ("cache", "row@0", "position", "cache"), (4, 16)),
        Hand("mul", 1, ("cache", "cache", "y@0"), (64, 64, 64)),
        Hand("increment", 0, ("position", "next"), (1, 1)),
        Hand("cache_append", 2, ("cache", "row@1", "next", "cache"), (4, 16)),
        Hand("mul", 3, ("cache", "cache", "y@1"), (64, 64, 64)),
        Hand("increment", 1, ("next", "position"), (1, 1)),
    ]
    return assemble(values, phases, slots=slots, blocks=blocks, steps=2)


def chain(slots: int = 3, blocks: int = 2) -> Program:
    """y = neg(neg(neg(neg(x)))): the third result where the first was."""
    names = ("x@0", "a", "b", "c", "y@0")
    roles = (Role.INPUT, Role.TEMPORARY, Role.TEMPORARY, Role.TEMPORARY, Role.OUTPUT)
    values = {name: (role, "f32", 64) for name, role in zip(names, roles, strict=True)}
    phases = [Hand("neg", w, (names[w], names[w + 1]), (16,)) for w in range(4)]
    draft = Draft(assemble(values, phases, slots=slots, blocks=blocks))
    draft.values["offset"][3] = draft.values["offset"][1]
    draft.follow(3)
    return Program.from_bytes(draft.bytes())


def handmade() -> list[Program]:
    sizes = ((1, 1), (1, 4), (3, 2), (5, 8))
    return [make(slots, blocks) for slots, blocks in sizes for make in (recurrent, appended, chain)]


def failed(data: bytes | Program) -> dict[str, str]:
    """Name -> detail of the checks that found a failure of their own."""
    found = check_program(data)
    assert [c.name for c in found] == ["decoding", *(row.name for row in CHECKS)]
    return {c.name: c.detail for c in found if not c.ok and not c.detail.startswith("not examined")}


def value(program: Program, name: str) -> int:
    return program.value_names.index(name)


# --- valid programs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", handmade(), ids=lambda p: f"{p.labels[0]}-{p.slots}x{p.blocks}")
def test_a_valid_program_passes_every_check(program: Program) -> None:
    assert failed(program) == {}
    verify_program(program.to_bytes())


def test_storage_may_be_reused_once_its_value_is_dead() -> None:
    draft = Draft(chain())
    a, c = (draft.values["offset"][value(draft.program, name)] for name in ("a", "c"))
    assert a == c and failed(draft.bytes()) == {}
    draft.values["offset"][3] = draft.values["offset"][2]  # c where b is still read
    draft.follow(3)
    assert set(failed(draft.bytes())) == {"aliasing"}


def test_values_may_be_written_by_several_phases_and_read_in_part() -> None:
    values = {
        "x@0": (Role.INPUT, "f32", 64), "y@0": (Role.OUTPUT, "f32", 64), "both": (Role.TEMPORARY, "f32", 128),
    }  # fmt: skip
    phases = [
        Hand("neg", 0, ("x@0", "both"), (16,)), Hand("abs", 0, ("x@0", "both"), (16,)),
        Hand("neg", 1, ("both", "y@0"), (16,)),
    ]  # fmt: skip
    draft = Draft(assemble(values, phases, slots=2, blocks=2))
    assert {"definition", "hazards"} <= set(failed(draft.bytes()))  # both halves at byte 0, the other never written
    draft.point(1, 1, 2, 64)
    draft.point(2, 0, 2, 32)
    draft.relive()
    assert failed(draft.bytes()) == {}


# --- a planted defect a check -------------------------------------------------------------------------------------
def decoding(d: Draft) -> bytes:
    data = bytearray(d.bytes())
    data[8] ^= 1  # the format
    return bytes(data)


def structure(d: Draft) -> None:
    d.tasks["payload"][0] = 99


def tiling(d: Draft) -> None:
    d.tasks["part_hi"][0] -= 1


def operators(d: Draft) -> None:
    d.payloads["operands"][0] = 2


def parts(d: Draft) -> None:
    d.payloads["parts"][0] += 1  # a panel that the weight does not have
    d.tasks["part_hi"][d.tasks["part_hi"] == 38] += 1


def references(d: Draft) -> None:
    d.payloads["reference"][2, 0] += np.uint64(4)


def bounds(d: Draft) -> None:
    d.values["offset"][value(d.program, "y@0")] = d.program.arenas[Arena.IO] - 2432
    d.follow(value(d.program, "y@0"))


def isolation(d: Draft) -> None:
    d.values["stride"][value(d.program, "sum")] = 64
    d.follow(value(d.program, "sum"))


def aliasing(d: Draft) -> None:
    d.values["offset"][value(d.program, "sum")] = d.values["offset"][value(d.program, "product")] + 64
    d.follow(value(d.program, "sum"))


def lifetimes(d: Draft) -> None:
    d.values["last"][value(d.program, "product")] -= 1


def definition(d: Draft) -> None:
    d.schedule(0, 1)  # product is written in the wave that reads it
    d.schedule(1, 0)
    d.settle()


def order(d: Draft) -> None:
    d.schedule(1, 2)  # position is read after its increment
    d.settle()


def hazards(d: Draft) -> None:
    d.schedule(4, 1)  # h is overwritten in the wave that reads it
    d.settle()


def state(d: Draft) -> None:
    d.point(5, 2, value(d.program, "h"), 0)  # h is overwritten once more
    d.relive()


def ports(d: Draft) -> None:
    d.ports["value"][1], d.ports["value"][2] = d.ports["value"][2], d.ports["value"][1]


DEFECTS: tuple[Callable[[Draft], Any], ...] = (
    decoding, structure, tiling, operators, parts, references, bounds, isolation, aliasing, lifetimes, definition,
    order, hazards, state, ports,
)  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_a_planted_defect_turns_its_check_red(defect: Callable[[Draft], Any]) -> None:
    draft = Draft(recurrent())
    data = defect(draft) or draft.bytes()
    assert defect.__name__ in failed(data), failed(data)
    with pytest.raises(ProgramError, match=defect.__name__):
        verify_program(data)


def test_every_check_has_a_planted_defect() -> None:
    assert [f.__name__ for f in DEFECTS] == ["decoding", *(row.name for row in CHECKS)]


def test_a_failure_names_wave_phase_operand_slot_and_bytes() -> None:
    draft = Draft(recurrent())
    hazards(draft)
    detail = failed(draft.bytes())["hazards"]
    for part in ("wave 1", "phase 4 'tanh.4' (tanh@1)", "operand 1", "slot 0", "bytes 0:2400 of state"):
        assert part in detail


def test_an_append_more_than_the_steps_is_refused() -> None:
    draft = Draft(appended())
    draft.point(3, 0, value(draft.program, "cache"), 0)
    third = Draft(draft.program)
    third.payloads, third.uses = np.r_[third.payloads, third.payloads[3:4]], np.r_[third.uses, third.uses[3:4]]
    again = third.tasks[third.tasks["payload"] == 3].copy()
    again["payload"], again["wave"] = len(third.payloads) - 1, third.program.waves
    third.tasks, third.changed["labels"] = np.r_[third.tasks, again], (*third.program.labels, "again")
    third.settle()
    assert set(failed(third.bytes())) == {"state"}


def test_in_place_takes_the_operators_leave() -> None:
    """`tanh` may overwrite what it reads; a matrix product may not."""
    values = {
        "w": (Role.WEIGHT, "f32", 1024), "x@0": (Role.INPUT, "f32", 64), "y@0": (Role.OUTPUT, "f32", 64),
        "h": (Role.STATE, "f32", 64),
    }  # fmt: skip
    out = Hand("add", 0, ("x@0", "h", "y@0"), (16, 16, 16))
    good = [out, Hand("tanh", 1, ("h", "h"), (16,))]
    bad = [out, Hand("matmul", 1, ("h", "w", None, None, None, "h"), (1, 16, 16, 0, 16, 0, 16, 0, 0))]
    assert failed(assemble({k: v for k, v in values.items() if k != "w"}, good, slots=2, blocks=2)) == {}
    assert set(failed(assemble(values, bad, slots=2, blocks=2))) == {"hazards"}


# --- garbage ------------------------------------------------------------------------------------------------------
def test_garbage_fails_checks_and_never_raises() -> None:
    rng = np.random.default_rng(0)
    for program in handmade():
        data = program.to_bytes()
        for _ in range(60):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), int(rng.integers(1, 8))):
                broken[at] = rng.integers(256)
            assert len(check_program(bytes(broken))) == 1 + len(CHECKS)
    for data in (b"", b"WPKPROG1", bytes(128), rng.bytes(5000)):
        assert "decoding" in failed(data)


# --- programs of the compiler -------------------------------------------------------------------------------------
def convolution(g: GraphBuilder) -> None:
    """A causal convolution over a ring and the new frames, a residual product over it, a skip into the output."""
    x = g.input("x", f32(4, 3))
    ring = g.ring("history", 2, f32(3))
    frames = g.op("conv1d", g.op("concat", ring, x, axis=0), g.weight("w", f32(40, 3, 3)), g.weight("b", f32(40)))
    hidden = g.op("relu", frames)
    g.update("history", x)
    mixed = g.op("linear", hidden, g.weight("w2", f32(40, 40)), g.weight("b2", f32(40)))
    g.output("y", g.op("add", mixed, hidden))
    g.output("last", g.op("slice", hidden, axis=0, start=3, stop=4))


def recurrence(g: GraphBuilder) -> None:
    """Two stacked LSTM cells and a greedy choice that is remembered."""
    x = g.input("x", f32(12))
    for layer in range(2):
        h, c = g.register(f"h{layer}", f32(20)), g.register(f"c{layer}", f32(20))
        k = x.type.shape[0]
        weights = [g.weight(f"{n}{layer}", f32(80, s)) for n, s in (("ih", k), ("hh", 20))]
        biases = [g.weight(f"{n}{layer}", f32(80)) for n in ("bi", "bh")]
        x, cell = g.op("lstm", x, h, c, *weights, *biases)
        g.update(f"h{layer}", x)
        g.update(f"c{layer}", cell)
    logits = g.op("linear", x, g.weight("out", f32(33, 20)))
    token = g.op("argmax", logits)
    g.register("token", token.type)
    g.update("token", token)
    g.output("x", logits)
    g.output("token", token)


def transformer(g: GraphBuilder) -> None:
    """Attention over caches with the residual folded in, a norm, a gated feed-forward, and the position."""
    x = g.input("x", f32(16))
    position = g.position()
    y = g.op("layer_norm", x, g.weight("n", f32(16)), g.weight("nb", f32(16)))
    q, k, v = (
        g.op("reshape", g.op("linear", y, g.weight(n, f32(16, 16))), shape=(2, 8)) for n in ("wq", "wk", "wv")
    )  # fmt: skip
    for name in ("keys", "values"):
        g.cache(name, f32(2, 8))
    keys, values = g.append("keys", k), g.append("values", v)
    seen = g.op("reshape", g.op("attention", q, keys, values, position, scale=0.35), shape=(16,))
    x = g.op("add", g.op("linear", seen, g.weight("wo", f32(16, 16))), x)
    gate = g.op("silu", g.op("linear", x, g.weight("w1", f32(300, 16))))
    up = g.op("mul", gate, g.op("linear", x, g.weight("w3", f32(300, 16))))
    g.output("y", g.op("add", g.op("linear", up, g.weight("w4", f32(16, 300))), x))


def exchange(g: GraphBuilder) -> None:
    """Two registers that trade contents, a count, a masked loop, and views of one value."""
    x = g.input("x", f32(700))
    a, b = g.register("a", f32(700)), g.register("b", f32(700))
    g.update("a", b)
    g.update("b", g.op("add", a, x))
    head, tail = g.op("slice", x, axis=0, start=0, stop=20), g.op("slice", x, axis=0, start=20, stop=40)
    count = g.op("cast", g.position(), dtype="f32")

    def body(i: int, carried: tuple[Value, ...]) -> tuple[list[Value], Value]:
        (value,) = carried
        following = g.op("add", value, g.op("tanh", tail))
        return [following], g.op("less", g.op("slice", following, axis=0, start=i, stop=i + 1), count)

    def scalar(i: int, carried: tuple[Value, ...]) -> tuple[list[Value], Value]:
        following, proceed = body(i, carried)
        return following, g.op("reshape", proceed, shape=())

    (looped,) = g.loop(3, [head], scalar)
    g.output("looped", looped)
    g.output("total", g.op("sub", g.op("mul", a, b), x))


GRAPHS = (convolution, recurrence, transformer, exchange)
BLOCKS = ((1, 1), (3, 6), (5, 13))  # capacity, blocks


@cache
def compiled(build: Callable[[GraphBuilder], None], steps: int, capacity: int, blocks: int) -> Program:
    g = GraphBuilder(build.__name__, Selection(), context=5)
    build(g)
    target = find_target("cpu").model_copy(update={"blocks": blocks, "least_task_s": 1e-12})
    return compile_graph(g.build(), Selection(), target, capacity=capacity, steps=steps).program


def programs() -> list[Program]:
    return [compiled(b, steps, *size) for b in GRAPHS for steps in (1, 3) for size in BLOCKS]


@pytest.mark.parametrize("build", GRAPHS, ids=lambda b: b.__name__)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_the_compiler_emits_passes(build: Callable[[GraphBuilder], None], steps: int) -> None:
    for capacity, blocks in (*BLOCKS, (64, 132)):
        program = compiled(build, steps, capacity, blocks)
        assert failed(program) == {}
        assert len(set(program.tasks["block"].tolist())) > 1 or blocks == 1


# --- mutants ------------------------------------------------------------------------------------------------------
def accepted(programs: Sequence[Program], count: int) -> tuple[list[str], set[str]]:
    """Mutants that pass, and the kinds that were made."""
    passed, kinds = [], set()
    for number in range(count):
        mutant = mutate(programs[number % len(programs)], number // len(programs))
        kinds.add(mutant.kind)
        if all(c.ok for c in check_program(mutant.data)):
            passed.append(f"{mutant.kind} {mutant.number} of program {number % len(programs)}")
    return passed, kinds


def test_no_mutant_of_a_handmade_program_is_accepted() -> None:
    passed, kinds = accepted(handmade(), 720)
    assert not passed
    assert kinds == set(KINDS)


def test_no_mutant_of_a_compiled_program_is_accepted() -> None:
    passed, kinds = accepted(programs(), MUTANTS)
    assert not passed
    assert kinds == set(KINDS)


def test_mutants_are_reproducible_and_differ_from_their_program() -> None:
    program = recurrent()
    for number in range(len(KINDS)):
        assert mutate(program, number) == mutate(program, number)
        assert mutate(program, number).data != program.to_bytes()
