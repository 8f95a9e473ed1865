"""Streamed operators on a GPU: small hybrids against the CPU kernel, which executes the same program bytes.

Run where there is an H200 (or an H100 of 132 multiprocessors): pytest -m gpu tests/kernel/test_streamed.py -s
Tests without the mark show on any machine that what is compared here would be found if it differed.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from tests.kernel.gpu import join
from tests.kernel.hybrids import (
    CASES,
    NO_SPREAD,
    ROOM,
    Array,
    Case,
    Run,
    Spread,
    clear_tokens,
    comings,
    cut,
    difference,
    history,
    keep_states,
    live_values,
    measures,
    memory_of,
    numbers,
    program_of,
    start,
    step,
    widest,
    writers,
)
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cuda import CudaKernel
from wpk.ops.payload import Arena
from wpk.scheduler.program import Program, Role

SLACK = 0.06  # of the logits' standard deviation: a smaller margin may turn by rounding


@functools.cache
def wanted(case: Case) -> Run:
    """What the CPU kernel gives."""
    kernel = start(CpuKernel, case)
    try:
        return history(kernel, case)
    finally:
        kernel.close()


@functools.cache
def shaken(case: Case) -> Run:
    """What the CPU kernel gives with a rounding everywhere: how much a difference of that size is enlarged."""
    kernel = start(CpuKernel, case, shaken=True)
    try:
        return history(kernel, case)
    finally:
        kernel.close()


def played(case: Case) -> Run:
    kernel = start(CudaKernel, case)
    try:
        return history(kernel, case)
    finally:
        kernel.close()


def tokens_and_logits(run: Run, head: str) -> list[tuple[int, Array | None]]:
    """Each step's and slot's token, and logits where the model gives them."""
    return [
        (int(token[0]), outputs[f"{head}_logits"][step] if f"{head}_logits" in outputs else None)
        for beat in run.outputs
        for _, outputs in sorted(beat.items())
        for step, token in enumerate(outputs[head])
    ]


# --- what the CPU kernel gives ----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_states_are_those_of_the_cpu_kernel_and_the_same_in_two_runs(name: str) -> None:
    case = CASES[name]
    found, again = played(case), played(case)
    # Two runs: the same bits.
    for ours, repeated in zip(found.outputs, again.outputs, strict=True):
        assert {s: {p: v.tobytes() for p, v in o.items()} for s, o in ours.items()} == {
            s: {p: v.tobytes() for p, v in o.items()} for s, o in repeated.items()
        }
    assert found.bits == again.bits
    compare(name, found)


def compare(name: str, found: Run) -> None:
    """States, tokens and logits of a case with those of the CPU kernel."""
    case = CASES[name]
    reference, moved = wanted(case), shaken(case)
    # States of all that are there; a vacant slot's is nobody's, and products may write it.
    assert found.states.keys() == reference.states.keys()
    spread = {
        value: widest(measures(moved.states[slot][value], reference.states[slot][value]) for slot in reference.states)
        for value in next(iter(reference.states.values()))
    }
    states = {
        (value, slot): difference(found.states[slot][value], numbers_wanted, spread[value])
        for slot, values in reference.states.items()
        for value, numbers_wanted in values.items()
    }
    if states:
        worst = max(states, key=lambda key: states[key])
        print(f"\n{name}: {len(found.states)} sessions, state {states[worst]:.3f} of what is allowed ({worst[0]})")
    bad = [key for key, apart in states.items() if apart > 1]
    assert not bad, (sorted({value for value, _ in bad}), sorted({slot for _, slot in bad}))
    # Tokens, and logits where there are some: those of a twin that gives them elsewhere.
    with_logits = case if case.logits else dataclasses.replace(case, logits=True)
    for head in case.heads:
        runs = (reference, wanted(with_logits), shaken(with_logits), found)
        rows = list(zip(*[tokens_and_logits(run, head) for run in runs], strict=True))
        # Of each step its own spread: those of a session whose numbers cancel are much larger than the others'.
        clear, agreed, apart = 0, 0, list[float]()
        for (token, _), (same, logits), (_, moved_logits), (ours, own) in rows:
            assert logits is not None and moved_logits is not None and token == same == int(logits.argmax())
            enlarged = measures(moved_logits, logits)
            if own is not None:
                apart.append(difference(own, logits, enlarged))
                assert ours == int(own.argmax())
            if clear_tokens(logits, SLACK * max(1.0, ROOM * enlarged[0]) * float(logits.std())):
                clear += 1
                assert ours == token
            agreed += ours == token
        worst_logits = max(apart, default=0.0)
        assert worst_logits <= 1
        print(f"{name}, {head}: logits {worst_logits:.3f} of what is allowed; {agreed} of {len(rows)} tokens equal, "
              f"{clear} of them must be")  # fmt: skip
        assert clear >= 0.5 * len(rows)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slot"),
    [("no logits", 37), ("from embeddings", 63), ("ninety-six slots", 71), ("more slots than a tile", 129)],
)
def test_a_session_has_the_same_bits_alone_in_slot_0_and_among_others(name: str, slot: int) -> None:
    case = CASES[name]
    made = []
    for own, company in ((0, {}), (slot, {s: -1 if s % 5 == 2 else 100 + s for s in range(case.slots) if s % 7 != 3})):
        kernel = start(CudaKernel, case)
        try:
            who = {**company, own: 7}
            join(kernel, *who)
            rows = []
            for beat in range(12):
                if beat == 5:  # somebody comes anew meanwhile
                    join(kernel, *[s for s in company if s % 7 == 1 and s != own])
                rows.append({p: v.tobytes() for p, v in step(kernel, case.shape, beat, who)[own].items()})
            run = Run()
            keep_states(run, kernel, [own])
            made.append((rows, run.bits[own]))
        finally:
            kernel.close()
    assert made[0] == made[1]


# --- phase by phase ---------------------------------------------------------------------------------------------------
PHASES = (
    "all kinds of layers",
    "seven slots",
    "no logits",
    "three steps a beat",
    "sixty-five slots",
    "more slots than a tile",
)


def occupied(slots: int) -> list[int]:
    return [s for s in range(slots) if s % 6 != 4]


def after_wave(
    kind: type[CpuKernel] | type[CudaKernel], case: Case, waves: int, *, shaken: bool = False
) -> dict[Arena, Array]:  # fmt: skip
    """Every arena after one beat of the first waves of a program."""
    kernel = start(kind, case, cut(program_of(case), waves), shaken=shaken)
    try:
        slots = occupied(case.slots)
        join(kernel, *slots)
        step(kernel, case.shape, 0, {s: 10 + s for s in slots})
        return {arena: memory_of(kernel, arena) for arena in Arena}
    finally:
        kernel.close()


def compared(
    program: Program, wave: int, ours: dict[Arena, Array], theirs: dict[Arena, Array],
    shaken: dict[Arena, Array] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Every value that means something after a wave: how far apart it is in any slot.

    shaken: with a rounding everywhere, which says by how much more may differ than the limits say.
    """
    made, slots = writers(program), occupied(program.slots)
    found = {}
    for index in live_values(program, wave):
        arena = Arena(int(program.values[index]["arena"]))
        name, parameters = made.get(index, ("", np.zeros(9, np.int32)))
        own, same = ([numbers(program, memory[arena], index, s) for s in slots] for memory in (ours, theirs))
        spread = NO_SPREAD
        if shaken is not None and same[0].dtype.kind == "f" and name not in OF_THEIR_OWN:
            spread = widest(
                measures(numbers(program, shaken[arena], index, s), w) for s, w in zip(slots, same, strict=True)
            )
        apart = [_apart(name, parameters, f, w, spread) for f, w in zip(own, same, strict=True)]
        found[f"{program.value_names[index]} ({name})"] = max(apart)
    return found


OF_THEIR_OWN = ("attention_parts", "argmax_projection", "argmax", "argmax_merge")  # compared by rules of their own


def _apart(name: str, parameters: Array, found: Array, wanted: Array, spread: Spread) -> float:
    if name == "attention_parts":
        heads, width, splits = (int(parameters[i]) for i in (0, 2, 4))
        rows, same = (x.reshape(splits * heads, width + 2).copy() for x in (found, wanted))
        unused = same[:, -1] == 0
        if (rows[unused, width] > -1e29).any():
            return float("inf")
        rows[unused, width] = same[unused, width] = 0.0  # of no rows the largest score is any very low number
        return max(difference(rows[:, i], same[:, i]) for i in (slice(0, width), slice(width, None)))
    if name == "argmax_projection":
        ours, theirs = (x.reshape(-1, 2) for x in (found, wanted))
        # Which row it is may turn where two are nearly equal, so of many shares a few.
        turned = (ours[:, 1].view(np.int32) != theirs[:, 1].view(np.int32)).mean()
        return max(difference(ours[:, 0].copy(), theirs[:, 0].copy()), float(turned) / 0.1)
    if name in ("argmax", "argmax_merge"):
        return 0.0  # a token may turn; the test of whole beats knows by which margin it must not
    return difference(found, wanted, spread)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PHASES)
def test_after_every_wave_every_arena_is_that_of_the_cpu_kernel(name: str) -> None:
    case = CASES[name]
    program = program_of(case)
    worst: tuple[float, int, str] = (0.0, 0, "")
    for wave in range(program.waves):
        ours, theirs = (after_wave(kind, case, wave + 1) for kind in (CudaKernel, CpuKernel))
        assert (ours[Arena.WEIGHTS] == theirs[Arena.WEIGHTS]).all()
        apart = compared(program, wave, ours, theirs, after_wave(CpuKernel, case, wave + 1, shaken=True))
        bad = {value: round(d, 3) for value, d in apart.items() if not d <= 1}
        labels = sorted({program.labels[t["payload"]] for t in program.tasks if t["wave"] == wave})
        assert not bad, f"wave {wave} ({', '.join(labels)}): {bad}"
        worst = max(worst, *((d, wave, value) for value, d in apart.items()))
    print(f"\n{name}: {program.waves} waves, at most {worst[0]:.3f} of what is allowed (wave {worst[1]}, {worst[2]})")


# --- without a GPU: is a difference found? ----------------------------------------------------------------------------
SMALLEST = CASES["all kinds of layers"]


def test_every_case_has_one_operator_table_with_all_that_is_streamed() -> None:
    from wpk.kernel.blockwise.bodies import BODIES
    from wpk.kernel.layout import STREAMED, shape_of

    tables = {program_of(case).operators for case in CASES.values()}
    assert len(tables) == 1
    (table,) = tables
    # Products of frames are no part of a backbone: test_tf32.py.
    assert {*STREAMED, *BODIES} - {"tf32_matmul"} <= {name.partition("@")[0] for name in table}
    assert {shape_of(table, case.slots).sessions for case in CASES.values()} == {64, 128}
    assert {case.slots for case in CASES.values()} >= {1, 7, 8, 56, 64, 65, 96, 112, 128, 130}


@pytest.mark.parametrize("slots", [1, 2, 7, 130])
def test_sessions_come_and_go_and_slots_stay_vacant(slots: int) -> None:
    live, vacant, longest = dict[int, int](), 0, 0
    for beat, (gone, come) in enumerate(comings(slots, 20)):
        assert set(gone) <= live.keys() and not live.keys() - set(gone) & set(come)
        live = {s: b for s, b in live.items() if s not in gone} | dict.fromkeys(come, beat)
        vacant += len(live) < slots
        longest = max([longest, *(beat - joined + 1 for joined in live.values())])
    assert longest >= 12 and vacant > 1


def test_all_waves_of_a_program_are_the_program() -> None:
    program = program_of(SMALLEST)
    assert cut(program, program.waves).to_bytes() == program.to_bytes()
    first = cut(program, 1)
    assert 0 < len(first.payloads) < len(program.payloads) and set(first.tasks["wave"]) == {0}
    names = {first.operators[p["opcode"]] for p in first.payloads}
    assert "embedding@1" in names and "mamba2_step@1" not in names


@pytest.mark.slow
def test_a_wrong_number_in_any_arena_is_found() -> None:
    program = program_of(SMALLEST)
    wave = program.waves - 1
    wanted = after_wave(CpuKernel, SMALLEST, wave + 1)
    assert max(compared(program, wave, wanted, wanted).values()) == 0
    live = live_values(program, wave)
    assert {Arena(int(program.values[i]["arena"])) for i in live} >= {Arena.STATE, Arena.IO}
    slab = program.arenas[Arena.STATE] // program.slots
    for index in live:
        if Role(int(program.values[index]["role"])) is not Role.STATE:
            continue
        broken = {arena: memory.copy() for arena, memory in wanted.items()}
        at = 5 * slab + int(program.values[index]["offset"])
        broken[Arena.STATE][at : at + 4].view(np.uint16)[:] = 0x4040  # 3: one or two numbers of one slot
        assert sum(d > 1 for d in compared(program, wave, broken, wanted).values()) == 1


def test_limits_are_of_a_number_and_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal(10_000).astype(np.float32)
    rounded = wanted * (1 + rng.uniform(-(2.0**-9), 2.0**-9, wanted.size)).astype(np.float32)
    assert 0 < difference(rounded, wanted) < 1
    assert difference(wanted * np.float32(1.01), wanted) > 1
    one = wanted.copy()
    one[17] += 0.2
    assert difference(one, wanted) > 1
    whole, largest = measures(one, wanted)
    assert difference(one, wanted, (0.0, largest)) < 1 < difference(one, wanted, (100.0, 0.0)) and whole < 1
    assert difference(np.full(3, np.nan, np.float32), wanted[:3]) > 1
    assert difference(np.array([1, 2]), np.array([1, 3])) > 1
