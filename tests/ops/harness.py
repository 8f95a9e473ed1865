"""What every operator test shares: one application fabricated in arenas, executed in every way, compared with meaning.

    app = application("layer_norm", f32(5, 24), f32(24), eps=1e-5)
    check(app, slots=3)                                   # random inputs
    check(app, inputs=[x, w], slots=3, rtol=1e-5)         # x [slots, 5, 24], w [24]: stored dtypes

`check` is the whole contract of an operator: the bits are the same for every split over slots and parts, canaries
around every operand stay intact, inputs stay as they were, `extents` and `part_writes` say what is really touched,
sharing storage in place changes nothing, and the values are those of `meaning`. An operator without a body is
expanded and its graph evaluated node by node: weight-only nodes and views by meaning, all others by their bodies.

Arrays come in two forms. *Stored*: the bits as in an arena (f32, int32, uint16 for bf16), a session operand with a
leading slot axis. *Value*: what `meaning` takes and gives (float64, int64, bool), one session.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numba import cfunc

from wpk import ops  # noqa: F401  (fills LIBRARY)
from wpk.ir.graph import Graph, GraphBuilder, Node, Value
from wpk.ir.types import DType, Type
from wpk.kernel.bodies import ERROR_MODEL, SIGNATURE
from wpk.ops.operator import LIBRARY, Array, Extent, Operator, Resolved, make
from wpk.ops.payload import ABSENT, PAYLOAD, Arena, Reference, encode_parameter

SCRATCH = 65536
GUARD = 192  # canary bytes before, between and after the slots of an operand
FILLS = (0xFF, 0xA5)  # as f32: NaN and -2.9e-16; as i32: -1 and a large negative number
Call = tuple[int, int, int, int]  # slot_lo, slot_hi, part_lo, part_hi


# --- applications and arrays --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Application:
    """An operator with its attributes and operand types; `weights` says which operands have no session axis."""

    op: Operator
    inputs: tuple[Type, ...]
    weights: tuple[bool, ...]
    results: tuple[Type, ...]

    @property
    def cls(self) -> type[Operator]:
        return type(self.op)


class NewestVersions:
    """The library as a builder wants it."""

    def resolve(self, name: str) -> Resolved:
        return Resolved(LIBRARY.get(name))


def application(name: str, *inputs: Type, weights: Sequence[bool] | None = None, **attrs: Any) -> Application:
    """`weights` defaults to the operands that are declared to be weights."""
    cls = LIBRARY.get(name)
    op = make(cls, attrs)
    results = op.infer(inputs)
    if weights is None:
        weights = [declared.weight is True for declared in cls.operands_for(len(inputs))]
    return Application(op, inputs, tuple(weights), results)


def stored(value: Any, type: Type) -> Array:
    """A value in the bits of its storage type; integers wrap, floats round to nearest even."""
    array = np.asarray(value)
    if type.dtype is DType.F32:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)
    if type.dtype is DType.BF16:
        import ml_dtypes

        return array.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    if type.dtype is DType.BOOL:
        return array.astype(bool).astype(np.int32)
    return array.astype(np.int64).astype(np.int32)


def value(bits: Array, type: Type) -> Array:
    """Stored bits as `meaning` takes them."""
    if type.dtype is DType.F32:
        return bits.astype(np.float64)
    if type.dtype is DType.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(bool) if type.dtype is DType.BOOL else bits.astype(np.int64)


def random_inputs(app: Application, slots: int, seed: int = 0, scale: float = 1.0) -> list[Array]:
    """Stored operands: normal floats times `scale`, integers in [-100, 100], coin-toss flags."""
    rng = np.random.default_rng(seed)
    arrays = []
    for t, weight in zip(app.inputs, app.weights, strict=True):
        shape = t.shape if weight else (slots, *t.shape)
        if t.dtype.is_float:
            arrays.append(stored(rng.standard_normal(shape) * scale, t))
        else:
            low, high = (0, 2) if t.dtype is DType.BOOL else (-100, 101)
            arrays.append(stored(rng.integers(low, high, shape), t))
    return arrays


def meaning(app: Application, inputs: Sequence[Array], slots: int) -> list[Array]:
    """The values of each result, [slots, *shape], by the operator's meaning."""
    rows: list[list[Array]] = [[] for _ in app.results]
    for slot in range(slots):
        taken = [
            value(array if weight else array[slot], t)
            for array, t, weight in zip(inputs, app.inputs, app.weights, strict=True)
        ]
        with np.errstate(all="ignore"):
            made = app.op.meaning(*taken)
        for row, array, t in zip(rows, made if isinstance(made, tuple) else (made,), app.results, strict=True):
            assert np.shape(array) == t.shape, f"meaning of {app.op}: wanted {t}, found shape {np.shape(array)}"
            row.append(np.asarray(array))
    return [np.stack(row) for row in rows]


# --- one phase in memory ------------------------------------------------------------------------------------------
@functools.cache
def compiled(cls: type[Operator]) -> Callable[..., None]:
    """The CPU body of an operator, compiled once per process."""
    body = LIBRARY.body(cls.name, cls.version, "cpu")
    assert body is not None, f"{cls.name} has no CPU body"
    function = cfunc(SIGNATURE, nopython=True, nogil=True, error_model=ERROR_MODEL)(body.function)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(function.address)
    call.keep = function  # type: ignore[attr-defined]
    return call


@dataclass
class Phase:
    """One application with its arenas and payload. `operands` are payload indices: inputs, then results."""

    app: Application
    slots: int
    arenas: list[Array]  # bytes
    before: list[Array]  # the same before anything ran
    table: Array
    record: Array
    references: dict[int, Reference]
    places: tuple[int, ...]
    scratch: Array

    def run(self, calls: Sequence[Call]) -> None:
        function = compiled(self.app.cls)
        for call in calls:
            function(self.record.ctypes.data, self.table.ctypes.data, *call, self.scratch.ctypes.data)
        assert (self.scratch[SCRATCH:] == 0x5A).all(), f"{self.app.op}: wrote beyond the scratch"

    def result(self, index: int) -> Array:
        """Stored bits of a result, [slots, *shape]."""
        place, t = self.places[len(self.app.inputs) + index], self.app.results[index]
        reference = self.references[place]
        arena = self.arenas[reference.arena]
        rows = [arena[start : start + t.bytes] for start in self._starts(place)]
        return np.stack(rows).view(t.dtype.numpy).reshape(self.slots, *t.shape)

    def touched(self) -> list[Array]:
        """Per arena: which bytes differ from before."""
        return [now != then for now, then in zip(self.arenas, self.before, strict=True)]

    def _starts(self, place: int) -> list[int]:
        reference = self.references[place]
        return [reference.offset + slot * reference.stride for slot in range(self.slots)]

    def written_mask(self, extents: dict[int, list[tuple[int, int]]]) -> list[Array]:
        """Per arena: the bytes that these (offset, length) runs of each slot's operands cover."""
        masks = [np.zeros(len(a), bool) for a in self.arenas]
        for place, runs in extents.items():
            for start in self._starts(place):
                for offset, length in runs:
                    masks[self.references[place].arena][start + offset : start + offset + length] = True
        return masks


def places_of(app: Application) -> tuple[int, ...]:
    """Payload operand index of each input, then of each result."""
    given = app.op.places(len(app.inputs))
    assert len(given) == len(app.inputs) + len(app.results) and max(given) < 7, f"{app.op}: places {given}"
    return given


def fabricate(
    app: Application, inputs: Sequence[Array], slots: int, fill: int = FILLS[0], shared: dict[int, int] | None = None
) -> Phase:
    """Arenas full of canaries with the operands laid into them, and the payload. `shared`: result -> input."""
    share = {**app.cls.alias, **(shared or {})}
    places = places_of(app)
    count = max(places) + 1
    assert app.cls.writes(count) == places[len(app.inputs) :], f"{app.op}: the results are not the last operands"
    sizes = [GUARD] * len(Arena)
    references: dict[int, Reference] = {}
    for index, (t, place) in enumerate(zip((*app.inputs, *app.results), places, strict=True)):
        result = index - len(app.inputs)
        if result in share and result >= 0:
            references[place] = references[places[share[result]]]
            continue
        weight = result < 0 and app.weights[index]
        arena = Arena.WEIGHTS if weight else _arena(app, index)
        stride = 0 if weight else -(-t.bytes // 4) * 4 + 4 * (5 + index)
        references[place] = Reference(arena, sizes[arena], stride)
        end = sizes[arena] + (t.bytes if weight else (slots - 1) * stride + t.bytes)
        sizes[arena] = -(-(end + GUARD) // 64) * 64
    arenas = [_aligned(size, fill) for size in sizes]
    for array, t, weight, place in zip(inputs, app.inputs, app.weights, places, strict=False):
        wanted = t.shape if weight else (slots, *t.shape)
        found = f"{array.dtype}{array.shape}"
        assert array.dtype == t.dtype.numpy and array.shape == wanted, f"wanted {t} as {wanted}, found {found}"
        reference = references[place]
        for slot, row in enumerate([array] if weight else array):
            start = reference.offset + slot * reference.stride
            arenas[reference.arena][start : start + t.bytes] = np.frombuffer(row.tobytes(), np.uint8)
    record = np.zeros(1, PAYLOAD)
    parameters = app.op.parameters(*app.inputs)
    assert len(parameters) <= 9, f"{app.op}: {len(parameters)} parameters"
    record["opcode"], record["operands"], record["parts"] = 1, count, app.op.parts(*app.inputs)
    record["reference"] = ABSENT
    for place, reference in references.items():
        record["reference"][0, place], record["stride"][0, place] = reference.packed, reference.stride
    record["parameter"][0, : len(parameters)] = [encode_parameter(p) for p in parameters]
    scratch = _aligned(SCRATCH + 256, 0x5A)
    table = np.array([a.ctypes.data for a in arenas], np.int64)
    return Phase(app, slots, arenas, [a.copy() for a in arenas], table, record, references, places, scratch)


def _arena(app: Application, index: int) -> Arena:
    if index in app.cls.state_operands:
        return Arena.STATE
    return Arena.ACTIVATIONS if index >= len(app.inputs) or index % 2 == 0 else Arena.IO


def _aligned(size: int, fill: int) -> Array:
    raw = np.full(size + 64, fill, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


# --- splits -------------------------------------------------------------------------------------------------------
def splits(slots: int, parts: int, seed: int = 0) -> Iterator[list[Call]]:
    """Ways to cut the work: all at once, slot by slot, part by part (backwards), and uneven blocks of both."""
    yield [(0, slots, 0, parts)]
    yield [(s, s + 1, 0, parts) for s in range(slots)]
    rng = np.random.default_rng(seed)
    if parts > 1:
        cuts = range(parts + 1) if parts <= 24 else _cuts(rng, parts, 6)
        yield [(0, slots, lo, hi) for lo, hi in reversed(list(pairwise(cuts)))]
    by_slot, by_part = _cuts(rng, slots, 3), _cuts(rng, parts, 3)
    yield [(s, s_end, p, p_end) for p, p_end in pairwise(by_part) for s, s_end in pairwise(by_slot)]


def _cuts(rng: np.random.Generator, count: int, pieces: int) -> list[int]:
    return sorted({0, count, *(int(c) for c in rng.integers(0, count + 1, pieces - 1))})


# --- execution and checks -----------------------------------------------------------------------------------------
def execute(app: Application, inputs: Sequence[Array], slots: int, calls: Sequence[Call] | None = None) -> list[Array]:
    """Stored results of one body, [slots, *shape] each, for one split (all at once by default)."""
    phase = fabricate(app, inputs, slots)
    phase.run(calls or [(0, slots, 0, app.op.parts(*app.inputs))])
    return [phase.result(i) for i in range(len(app.results))]


def check_body(app: Application, inputs: Sequence[Array], slots: int) -> list[Array]:
    """All that must hold of a body apart from its values; its stored results."""
    parts = app.op.parts(*app.inputs)
    wanted = execute(app, inputs, slots)
    _check_extents(app, inputs, slots)
    sharings: list[dict[int, int]] = [{}]
    for result, source in app.cls.inplace.items():
        if not app.weights[source] and app.inputs[source].bytes == app.results[result].bytes:
            sharings.append({result: source})
    for number, calls in enumerate(splits(slots, parts)):
        for shared in sharings:
            phase = fabricate(app, inputs, slots, FILLS[number % 2], shared)
            phase.run(calls)
            written = phase.written_mask(_whole_results(phase))
            for arena, touched, mask in zip(Arena, phase.touched(), written, strict=True):
                outside = np.flatnonzero(touched & ~mask)
                assert not outside.size, f"{app.op}: wrote {outside[:4]} of {arena.name}, outside its results"
            for index, array in enumerate(wanted):
                same = phase.result(index).view(np.uint8) == array.view(np.uint8) if array.ndim else True
                assert np.all(same), f"{app.op}: result {index} differs for split {calls[:3]}, shared {shared}"
    return wanted


def _whole_results(phase: Phase) -> dict[int, list[tuple[int, int]]]:
    places = phase.places[len(phase.app.inputs) :]
    return {place: [(0, t.bytes)] for place, t in zip(places, phase.app.results, strict=True)}


def _check_extents(app: Application, inputs: Sequence[Array], slots: int) -> None:
    """`extents` are the operands' bytes, and the bytes that parts write are those that `part_writes` names."""
    phase = fabricate(app, inputs, slots)
    parameters = [int(p) for p in phase.record["parameter"][0]]
    count, parts = int(phase.record["operands"][0]), int(phase.record["parts"][0])
    _check_legal(app, phase, parameters, count)
    extents = app.cls.extents(parameters, count)
    assert len(extents) >= count, f"{app.op}: {len(extents)} extents for {count} operands"
    for place, t in zip(phase.places, (*app.inputs, *app.results), strict=True):
        found = extents[place]
        assert found == t.bytes, f"{app.op}: extent of operand {place}, wanted {t.bytes}, found {found}"
    cut = sorted({0, 1, parts // 2, parts})
    for lo, hi in pairwise(cut):
        touched: list[Array] = []
        for fill in FILLS:
            phase = fabricate(app, inputs, slots, fill)
            phase.run([(0, slots, lo, hi)])
            touched = [a | b for a, b in zip(touched, phase.touched(), strict=True)] if touched else phase.touched()
        runs: dict[int, list[tuple[int, int]]] = {}
        for index, place in enumerate(phase.places[len(app.inputs) :]):
            extent = app.cls.part_writes(parameters, place, lo, hi)
            whole = [(0, app.results[index].bytes)]
            assert extent is not None or parts == 1 or hi - lo == parts or place in app.cls.alias
            pieces = (extent,) if isinstance(extent, Extent) else extent
            runs[place] = whole if pieces is None else [
                (piece.offset + row * piece.pitch, piece.length) for piece in pieces for row in range(piece.rows)
            ]  # fmt: skip
        for arena, found, mask in zip(Arena, touched, phase.written_mask(runs), strict=True):
            wrong = found & ~mask if app.cls.alias else found != mask
            assert not wrong.any(), f"{app.op}: parts {lo}:{hi} write other bytes than part_writes in {arena.name}"


def _check_legal(app: Application, phase: Phase, parameters: list[int], count: int) -> None:
    """The payload is legal and its dtypes are those declared; a word or operand that is not of it makes it illegal."""
    present = tuple(place in phase.places for place in range(count))
    wanted = app.cls.legal(parameters, count, present)
    assert wanted is None, f"{app.op}: parameters {parameters} are not legal, wanted {wanted}"
    types = dict(zip(phase.places, (*app.inputs, *app.results), strict=True))
    dtypes = tuple(types[place].dtype if place in types else None for place in range(count))
    declared = app.cls.operand_dtypes(parameters, dtypes)
    found = tuple(d if there else None for d, there in zip(declared, present, strict=True))
    assert found == dtypes, f"{app.op}: dtypes {dtypes}, declared {declared}"
    for place in range(count):
        if place in phase.places:
            without = tuple(there and other != place for other, there in enumerate(present))
            optional = place < len(app.cls.operands) and app.cls.operands[place].optional
            assert optional or app.cls.legal(parameters, count, without), f"{app.op}: legal without operand {place}"
    assert app.cls.legal(parameters, count - 1, present[:-1]), f"{app.op}: legal with an operand less"
    for index in range(len(app.op.parameters(*app.inputs)), 9):
        wrong = [*parameters[:index], 1, *parameters[index + 1 :]]
        assert app.cls.legal(wrong, count, present), f"{app.op}: legal with parameter {index}, which is not used, set"


def check(
    app: Application,
    inputs: Sequence[Array] | None = None,
    slots: int = 3,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    seed: int = 0,
    scale: float = 1.0,
) -> list[Array]:
    """The whole contract of an operator for these inputs; its stored results."""
    inputs = random_inputs(app, slots, seed, scale) if inputs is None else inputs
    wanted = meaning(app, inputs, slots)
    has_body = LIBRARY.body(app.cls.name, app.cls.version, "cpu") is not None
    found = check_body(app, inputs, slots) if has_body else evaluate_application(app, inputs, slots)
    compare(app, found, wanted, rtol, atol)
    return found


def compare(app: Application, found: Sequence[Array], wanted: Sequence[Array], rtol: float, atol: float) -> None:
    """Stored results against values: floats within the tolerance (NaN and infinities alike), the rest exactly."""
    for index, (bits, reference, t) in enumerate(zip(found, wanted, app.results, strict=True)):
        message = f"{app.op}: result {index}"
        if t.dtype.is_float:
            with np.errstate(over="ignore"):
                reference = np.where(np.abs(reference) > np.finfo(np.float32).max, np.float32(reference), reference)
            np.testing.assert_allclose(value(bits, t), reference, rtol=rtol, atol=atol, err_msg=message)
        else:
            np.testing.assert_array_equal(bits, stored(reference, t), err_msg=message)


# --- graphs -------------------------------------------------------------------------------------------------------
def expansion(app: Application) -> Graph:
    """The graph of an operator's `expand`, its operands as inputs or weights `x0`, `x1`, ..., its results `y0`, ..."""
    g = GraphBuilder(app.cls.name, NewestVersions())
    operands = [
        g.weight(f"x{i}", t) if weight else g.input(f"x{i}", t)
        for i, (t, weight) in enumerate(zip(app.inputs, app.weights, strict=True))
    ]
    made = app.op.expand(g, *operands)
    assert made is not None, f"{app.cls.name} has neither a body nor an expansion"
    made = made if isinstance(made, tuple) else (made,)
    found = tuple(v.type for v in made)
    assert found == app.results, f"expansion of {app.op}: wanted {app.results}, found {found}"
    for i, result in enumerate(made):
        g.output(f"y{i}", result)
    return g.build()


def evaluate_application(app: Application, inputs: Sequence[Array], slots: int) -> list[Array]:
    """Stored results of an application by its body, or by the bodies of what it expands into."""
    if LIBRARY.body(app.cls.name, app.cls.version, "cpu") is not None:
        return check_body(app, inputs, slots)
    if _is_view(app):
        return [stored(m, t) for m, t in zip(meaning(app, inputs, slots), app.results, strict=True)]
    graph = expansion(app)
    arrays = {f"x{i}": a for i, a in enumerate(inputs)}
    made = evaluate(graph, arrays, slots)
    return [made[f"y{i}"] for i in range(len(app.results))]


def evaluate(graph: Graph, arrays: dict[str, Array], slots: int) -> dict[str, Array]:
    """Stored outputs of a graph without state, node by node; `arrays` are stored inputs and weights by port name."""
    env: dict[int, Array] = {}  # weights as values (float64), all else stored
    for port in graph.inputs:
        env[port.value.id] = arrays[port.name]
    for port in graph.weights:
        env[port.value.id] = value(arrays[port.name], port.value.type)
    for node in graph.nodes:
        for result, array in zip(node.outputs, _evaluate_node(node, env, slots), strict=True):
            env[result.id] = array
    return {port.name: env[port.value.id] for port in graph.outputs}


def _evaluate_node(node: Node, env: dict[int, Array], slots: int) -> list[Array]:
    op = make(LIBRARY.get(node.op, node.version), node.attributes)
    if node.weight:
        made = op.meaning(*(env[v.id] for v in node.inputs))
        return [np.asarray(a) for a in (made if isinstance(made, tuple) else (made,))]
    types, weights = tuple(v.type for v in node.inputs), tuple(v.weight for v in node.inputs)
    app = Application(op, types, weights, tuple(v.type for v in node.outputs))
    return evaluate_application(app, [_stored_operand(v, env) for v in node.inputs], slots)


def _stored_operand(v: Value, env: dict[int, Array]) -> Array:
    return stored(env[v.id], v.type).reshape(v.type.shape) if v.weight else env[v.id]


def _is_view(app: Application) -> bool:
    return app.op.view(*app.inputs) is not None


def check_refused(name: str, sound: Sequence[int], wrong: Sequence[Sequence[int]]) -> None:
    """With every operand there, these parameters are legal, and each of the wrong ones is not."""
    cls = LIBRARY.get(name)
    operands = len(cls.operands) + cls.result_count

    def legal(words: Sequence[int]) -> str | None:
        return cls.legal((*words, *[0] * (9 - len(words))), operands, [True] * operands)

    assert legal(sound) is None
    for words in wrong:
        assert legal(words) is not None, words
