"""Small hybrids of Mamba-2, attention and feed-forward layers on either kernel, from the same program bytes.

All of them have one operator table, so that two machine codes serve them all: one for at most 64 slots, one for more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernel.gpu import join, leave, ports
from tests.zoo.test_nemotron_h import Shape, spec
from wpk.kernel.arenas import HostArenas
from wpk.kernel.cubin import Cubin, build_cubin
from wpk.ops import LIBRARY
from wpk.ops.payload import ABSENT, Arena
from wpk.ops.requirements import Selection
from wpk.registry.loading import fill_arenas
from wpk.registry.settings import settings
from wpk.registry.weights.synthetic import SyntheticSet
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import DTYPES, NONE, Direction, Program, Role
from wpk.scheduler.target import TARGETS
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.sources import SyntheticSource

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
INPUT = "x"  # the one input port of these models

# The two kernels sum up in different orders, and the GPU weighs values by probabilities in bf16: now and then one of
# them rounds a number to the next bf16. A rounding is 2^-9 of a number; both limits leave room for a few in a row.
TOLERANCE = 2.0**-7  # root mean square of what differs, of the root mean square of what is wanted
LARGEST = 2.0**-5  # of one number and the root mean square: the most that a single number may differ
# Where layers enlarge roundings (a state is a product of two numbers that are rounded; a norm may divide by little),
# the limits are twice what the CPU kernel's numbers differ by when all that is normalised is shaken by a rounding.
SHAKEN = 2.0**-10  # of a number: a rounding to bf16 is at most 2^-9 of it, and 2^-9.8 in the root mean square
ROOM = 2.0
Spread = tuple[float, float]  # of `measures`
NO_SPREAD: Spread = (0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """A model, its slots, and where sessions start. rows: of the caches. start: position of a new session.

    steps: of a beat. linear: one head's time steps are so long that softplus is the identity.
    """

    shape: Shape
    slots: int
    logits: bool = True
    heads: tuple[str, ...] = ("lm_head",)
    rows: int = 40
    start: int = 0
    steps: int = 1
    linear: bool = False


# Hidden sizes that fill no chunk of 64, shares of uneven groups of rows, one to eight key heads, both widths of heads
# that the GPU takes, parts of 32, 40 and 16 rows of a state, caches that are nearly full and run over their end.
CASES = {
    "all kinds of layers": Case(Shape("M-*M-", 256, (8, 32, 2), 512, (4, 2, 64), 512), 8),
    "one slot": Case(Shape("M*-", 264, (16, 64, 4), 328, (8, 1, 64), 1000), 1, rows=70, start=45),
    "seven slots": Case(Shape("*M*-", 200, (16, 64, 4), 328, (8, 1, 64), 264), 7, rows=21, start=3),
    "from embeddings": Case(
        Shape("MM*", 328, (8, 80, 1), 128, (8, 8, 128), 1016, embedded=True), 64, rows=130, start=100
    ),
    "no logits": Case(
        Shape("M-*M-", 448, (24, 80, 8), 904, (16, 2, 128), 2008), 56, logits=False, heads=("lm_head", "other_head"),
        rows=90, start=60,
    ),
    "sixty-five slots": Case(Shape("*-M", 320, (8, 64, 2), 648, (2, 1, 128), 520), 65, rows=40, start=20),
    "ninety-six slots": Case(Shape("M-*M-", 256, (8, 32, 2), 512, (4, 2, 64), 512), 96, rows=64, start=48),
    "three steps a beat": Case(
        Shape("M*-", 264, (16, 64, 4), 328, (8, 1, 64), 1000), 7, rows=70, start=5, steps=3, linear=True
    ),
    "Mamba-2 alone": Case(Shape("MMM", 264, (40, 80, 8), 128, (8, 8, 128), 512), 112, logits=False),
    "feed-forward alone": Case(Shape("--", 136, (8, 32, 2), 1416, (8, 8, 128), 4104), 128, logits=False),
    "attention alone": Case(Shape("**", 72, (8, 32, 2), 128, (8, 8, 64), 264, embedded=True), 65, rows=24, start=9),
    "more slots than a tile": Case(
        Shape("M*-", 392, (8, 80, 2), 456, (32, 8, 64), 1504, embedded=True), 130, rows=33, start=13
    ),
}  # fmt: skip


# --- programs and weights -------------------------------------------------------------------------------------------
class Weights(SyntheticSet):
    """Synthetic, but for decays from slow to fast and time steps from short to long, so that all of a state matters.

    Time steps are below 1 or so, as those of trained models: with long ones a head's state is x B of one step alone,
    y is x (B C), and where B C is nearly 0 a rounding turns all that its group contributes. Embeddings are as large
    as what layers add to them. linear: as in `Case`. shaken: factors of norms are `SHAKEN` of themselves off.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], source: SyntheticSource, linear: bool = False, shaken: bool = False
    ) -> None:
        super().__init__(shapes, source)
        self._linear, self._shaken = linear, shaken

    def recipe(self, name: str) -> tuple[int, float, float]:
        key, offset, scale = super().recipe(name)
        return key, offset, float(np.float32(3.0**0.5)) if "embeddings" in name else scale

    def _load(self, name: str) -> Array:
        count = self.tensors[name].shape[0]
        if name.endswith("A_log"):
            return np.linspace(-1.5, 1.0, count, dtype=np.float32)
        if name.endswith("dt_bias"):
            last = 21.0 if self._linear else 0.0  # softplus is linear beyond 20
            return np.append(np.linspace(-5.0, 0.0, count - 1), last).astype(np.float32)
        if name.endswith("conv1d.bias"):  # the rule's are near 1, and inputs would matter little
            return (super()._load(name) - np.float32(1.0)) * np.float32(32.0)
        if self._shaken and len(self.tensors[name].shape) == 1 and "norm" in name:
            signs = np.random.default_rng(list(name.encode())).choice([-1.0, 1.0], count)
            return (super()._load(name) * (1.0 + SHAKEN * signs)).astype(np.float32)
        return super()._load(name)


@functools.cache
def _compiled(case: Case) -> Compiled:
    model = spec(case.shape, logits=case.logits, heads=case.heads)
    graph, library = build_graph(model, context=case.rows), Selection(model.operators, LIBRARY)
    return compile_graph(graph, library, TARGETS["h200"], capacity=case.slots, steps=case.steps)


@functools.cache
def operator_table() -> tuple[str, ...]:
    """Every operator of any of the cases."""
    both = [dataclasses.replace(case, logits=logits) for case in CASES.values() for logits in (True, False)]
    return tuple(sorted({name for case in both for name in _compiled(case).program.operators}))


@functools.cache
def program_of(case: Case) -> Program:
    return _compiled(case).program.with_operators(operator_table())


def cubin_of(case: Case) -> Cubin:
    return build_cubin(operator_table(), settings().kernels, case.slots)


@functools.cache
def _filled(case: Case, shaken: bool) -> tuple[list[Array], Array]:
    """Arenas with weights, and an image with a history: a position, rows of the caches before it, states."""
    made, program = _compiled(case), program_of(case)
    model = spec(case.shape, logits=case.logits, heads=case.heads)
    shapes = {name: t.shape for name, t in expected_tensors(model).items()}
    weights = Weights(shapes, SyntheticSource(synthetic=3), case.linear, shaken)
    arenas, image = fill_arenas(made.program, made.load, weights)
    fill_history(program, image, case.rows, case.start)
    return list(arenas), image


def fill_history(program: Program, image: Array, rows: int, start: int) -> None:
    """Into the image of a slot's state: position `start`, the caches' rows before it of `rows`, windows and states."""
    rng = np.random.default_rng(5)
    for index in states_of(program):
        value, name = program.values[index], program.value_names[index]
        offset, size, dtype = int(value["offset"]), int(value["size"]), DTYPES[value["dtype"]].numpy
        place = image[offset : offset + size].view(dtype)
        if dtype == np.int32:
            place[:] = start
        elif dtype == np.uint16:
            count = place.size if not name.endswith(".kv") else place.size // rows * start
            place[:count] = rng.standard_normal(count, dtype=np.float32).view(np.uint32) >> 16
        else:
            place[:] = rng.standard_normal(place.size, dtype=np.float32) * 0.3


def start(
    kind: type[Any], case: Case, program: Program | None = None, *, shaken: bool = False, **options: Any
) -> Any:  # fmt: skip
    """A kernel of that kind with the case's program, or with a program cut from it."""
    program = program or program_of(case)
    given, image = _filled(case, shaken)
    arenas = HostArenas(program)
    for arena in Arena:
        arenas.write(arena, 0, given[arena][: program.arenas[arena]])
    if kind.__name__ == "CudaKernel":
        options = {"cubin": cubin_of(case), **options}
    return kind(program, arenas, image.copy(), cache=settings().kernels, **options)


def cut(program: Program, waves: int) -> Program:
    """The first waves of a program: its tasks and payloads, and the same values in the same places."""
    tasks = program.tasks[program.tasks["wave"] < waves].copy()
    kept = np.unique(tasks["payload"])
    tasks["payload"] = np.searchsorted(kept, tasks["payload"])
    return dataclasses.replace(
        program, waves=waves, tasks=tasks, payloads=program.payloads[kept].copy(), uses=program.uses[kept].copy(),
        labels=tuple(program.labels[i] for i in kept),
    )  # fmt: skip


# --- sessions -------------------------------------------------------------------------------------------------------
def given(shape: Shape, who: int, beat: int) -> Array:
    """What a session is given in a beat."""
    rng = np.random.default_rng([who, beat])
    if shape.embedded:
        return rng.standard_normal(shape.hidden_size).astype(np.float32)
    return np.array([rng.integers(shape.vocab_size)], np.int32)


def garbage(shape: Shape, slot: int) -> Array:
    """What nobody means: for slots without a session, and for neighbours that must do no harm."""
    if shape.embedded:
        return np.full(shape.hidden_size, [np.nan, np.inf, -3e38, 1e30][slot % 4], np.float32)
    return np.array([[-1, shape.vocab_size, 2**31 - 1, -(2**31)][slot % 4]], np.int32)


def comings(slots: int, beats: int) -> list[tuple[list[int], list[int]]]:
    """For each beat who leaves and who joins, as slots; vacant slots at all times where there are several slots."""
    rng, live = np.random.default_rng(slots), set[int]()
    made: list[tuple[list[int], list[int]]] = []
    for beat in range(beats):
        gone, come = list[int](), list[int]()
        if beat == 4 or (beat == 13 and len(live) > 2):
            gone = sorted(rng.choice(sorted(live), -(-len(live) // 3), replace=False).tolist())
        live -= set(gone)
        if beat in (0, 2, 6, 15):
            vacant = sorted(set(range(slots)) - live)
            come = sorted(rng.choice(vacant, -(-len(vacant) // 2), replace=False).tolist())
        live |= set(come)
        made.append((gone, come))
    return made


@dataclass
class Run:
    """outputs: by beat, slot and port. states: by slot and value, numbers. bits: of the same states, by slot."""

    outputs: list[dict[int, Outputs]] = field(default_factory=list)
    states: dict[int, Outputs] = field(default_factory=dict)
    bits: dict[int, bytes] = field(default_factory=dict)


def step(kernel: Any, shape: Shape, beat: int, who: Mapping[int, int]) -> dict[int, Outputs]:
    """One beat; outputs by slot and port, [steps, values].

    who: slot -> session, below 0 one that is given garbage. Slots without one are given it as well.
    """
    ((name, views),) = ports(kernel, Direction.INPUT).items()
    assert name == INPUT
    for number, view in enumerate(views):
        for slot in range(kernel.program.slots):
            at, session = beat * len(views) + number, who.get(slot, -1)
            view[slot] = given(shape, session, at) if session >= 0 else garbage(shape, slot + at)
    kernel.beat()
    made = ports(kernel, Direction.OUTPUT)
    return {slot: {port: np.stack([v[slot] for v in vs]) for port, vs in made.items()} for slot in who}


def history(kernel: Any, case: Case, beats: int = 20) -> Run:
    """Sessions that come and go; at the end the states of those that are there."""
    run, who = Run(), dict[int, int]()
    for beat, (gone, come) in enumerate(comings(case.slots, beats)):
        for slot in gone:
            del who[slot]
        leave(kernel, *gone)
        join(kernel, *come)
        who |= {slot: 1000 * beat + slot for slot in come}
        run.outputs.append(step(kernel, case.shape, beat, who))
    keep_states(run, kernel, who)
    return run


def keep_states(run: Run, kernel: Any, slots: Any) -> None:
    memory, program = memory_of(kernel, Arena.STATE), kernel.program
    for slot in slots:
        run.states[slot] = {program.value_names[i]: numbers(program, memory, i, slot) for i in states_of(program)}
        run.bits[slot] = b"".join(raw(program, memory, i, slot).tobytes() for i in states_of(program))


def states_of(program: Program) -> list[int]:
    return [i for i, value in enumerate(program.values) if Role(int(value["role"])) is Role.STATE]


# --- values of a program --------------------------------------------------------------------------------------------
def memory_of(kernel: Any, arena: Arena) -> Array:
    """An arena as the kernel sees it: on a GPU, what is on the device."""
    size = kernel.program.arenas[arena]
    made = kernel.read(arena) if hasattr(kernel, "read") else kernel.arenas[arena]
    return np.array(made[:size])


def raw(program: Program, memory: Array, index: int, slot: int) -> Array:
    """The bytes of a slot's value."""
    value = program.values[index]
    at = int(value["offset"]) + slot * pitch(program, index)
    return memory[at : at + int(value["size"])]


def pitch(program: Program, index: int) -> int:
    """Bytes from slot to slot."""
    if Role(int(program.values[index]["role"])) is Role.STATE:
        return program.arenas[Arena.STATE] // program.slots
    return int(program.values[index]["stride"])


def numbers(program: Program, memory: Array, index: int, slot: int) -> Array:
    """A slot's value as numbers: f32, or integers."""
    found = raw(program, memory, index, slot).view(DTYPES[program.values[index]["dtype"]].numpy)
    return (found.astype(np.uint32) << 16).view(np.float32) if found.dtype == np.uint16 else found.copy()


def live_values(program: Program, wave: int) -> list[int]:
    """Values other than weights that mean something after a wave."""
    found = []
    for i, value in enumerate(program.values):
        first, last = int(value["first"]), int(value["last"])
        there = first == NONE or first <= wave
        if there and last >= wave and Role(int(value["role"])) is not Role.WEIGHT:
            found.append(i)
    return found


def writers(program: Program) -> dict[int, tuple[str, Array]]:
    """Value -> operator and parameters of the payload whose last operand it is: its result."""
    found: dict[int, tuple[str, Array]] = {}
    for record, use in zip(program.payloads, program.uses, strict=True):
        name, _, version = program.operators[int(record["opcode"])].partition("@")
        operands = int(record["operands"])
        for place in LIBRARY.get(name, int(version)).writes(operands):
            if int(record["reference"][place]) != ABSENT:
                found[int(use["value"][place])] = name, record["parameter"]
    return found


# --- comparing ------------------------------------------------------------------------------------------------------
def measures(found: Array, wanted: Array) -> Spread:
    """How far numbers are apart as a whole, and the one that is farthest, 1 being the limit of each.

    Integers: 0 or infinity.
    """
    wrong = float("inf"), float("inf")
    if wanted.dtype.kind in "iub":
        return NO_SPREAD if np.array_equal(found, wanted) else wrong
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    if not np.isfinite(found).all():
        return wrong if np.isfinite(wanted).all() else measures(np.nan_to_num(found), np.nan_to_num(wanted))
    size = float(np.sqrt((wanted**2).mean()))
    if size == 0.0:
        return wrong if found.any() else NO_SPREAD
    error = np.abs(found - wanted)
    whole = float(np.sqrt((error**2).mean())) / size / TOLERANCE
    return whole, float((error / (np.abs(wanted) + size)).max()) / LARGEST


def difference(found: Array, wanted: Array, spread: Spread = NO_SPREAD) -> float:
    """How far numbers are apart, 1 being the limit. spread: by how much a rounding everywhere changes them."""
    return max(m / max(1.0, ROOM * s) for m, s in zip(measures(found, wanted), spread, strict=True))


def widest(spreads: Iterable[Spread]) -> Spread:
    """The largest of each measure."""
    whole, largest = NO_SPREAD
    for spread in spreads:
        whole, largest = max(whole, spread[0]), max(largest, spread[1])
    return whole, largest


def clear_tokens(logits: Array, slack: float) -> bool:
    """Is the greatest logit greater than any other by more than that?"""
    best = np.sort(logits)
    return bool(best[-1] - best[-2] > slack)
