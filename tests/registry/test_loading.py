"""Weights reach the arenas as the program wants them, or are refused by name."""

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.kernel import gpu
from tests.kernel.host_gpu import HostGpu, device_arenas, packer
from tests.zoo.specs import small
from wpk.ir.errors import CapacityError, ProgramError, WeightsError
from wpk.ir.graph import Graph, GraphBuilder, Port, Value
from wpk.ir.types import bf16, f32
from wpk.kernel.arenas import DeviceArenas, HostArenas
from wpk.kernel.cuda import CudaKernel
from wpk.kernel.driver import Gpu, find_device
from wpk.kernel.packing import SYNTHETIC, Packer, build_packing
from wpk.ops import LIBRARY
from wpk.ops.evaluate import bf16_bits
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry import loading
from wpk.registry.formats import SafetensorsFile, TensorInfo, TensorSet
from wpk.registry.formats.tensors import bfloat16_to_float32
from wpk.registry.load import open_weights, start_on_gpu
from wpk.registry.loading import fill, fill_arenas
from wpk.registry.models import catalog, find_model
from wpk.registry.settings import settings
from wpk.registry.weights.synthetic import SyntheticSet
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import DTYPES, NONE, VALUE, Program, Role
from wpk.scheduler.target import find_target
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.sources import SyntheticSource
from wpk.zoo.spec import ModelSpec

SPEC = ModelSpec.from_data(small())


class Tensors(TensorSet):
    """Ones, and one tensor as given."""

    def __init__(self, changes: dict[str, np.ndarray]) -> None:
        self.changes = changes
        self.tensors = {n: TensorInfo(t.shape, "float32") for n, t in expected_tensors(SPEC).items()}

    def _load(self, name: str) -> np.ndarray:
        return self.changes.get(name, np.ones(self.tensors[name].shape, np.float32))


def compiled() -> Compiled:
    library = Selection(SPEC.operators, LIBRARY)
    return compile_graph(build_graph(SPEC), library, find_target("cpu"), capacity=2)


NAME = next(iter(expected_tensors(SPEC)))
SHAPE = expected_tensors(SPEC)[NAME].shape


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_weights_that_are_not_finite_are_refused_by_name(value: float) -> None:
    made = compiled()
    array = np.ones(SHAPE)
    array.reshape(-1)[-1] = value
    with pytest.raises(WeightsError, match=f"tensor '{NAME}' is not finite"):
        fill_arenas(made.program, made.load, Tensors({NAME: array}))


def test_weights_of_another_shape_are_refused_by_name() -> None:
    made = compiled()
    with pytest.raises(WeightsError, match=f"tensor '{NAME}' has the wrong shape"):
        fill_arenas(made.program, made.load, Tensors({NAME: np.ones((*SHAPE, 1), np.float32)}))


def test_arenas_have_the_sizes_that_the_program_names() -> None:
    made = compiled()
    arenas, image = fill_arenas(made.program, made.load, Tensors({}))
    assert [len(a) for a in arenas] == [max(1, n) for n in made.program.arenas]
    assert len(image) == made.program.arenas[1] // 2


def test_weights_that_the_graph_does_not_make_are_named() -> None:
    made = compiled()
    load = dataclasses.replace(made.load, outputs=made.load.outputs[1:])
    with pytest.raises(WeightsError, match="the load graph does not make"):
        fill_arenas(made.program, load, Tensors({}))


# --- weights in bf16, on the host and on a device -------------------------------------------------------------------
Make = Callable[[GraphBuilder], Value]


class Given(TensorSet):
    """Tensors of any dtype; bfloat16 by its bits."""

    def __init__(self, arrays: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
        self.arrays, self.loaded = arrays, list[str]()
        self.tensors = {n: TensorInfo(a.shape, (dtypes or {}).get(n, str(a.dtype))) for n, a in arrays.items()}

    def _load(self, name: str) -> np.ndarray:
        self.loaded.append(name)
        return self.arrays[name]


def load_of(*makes: Make) -> tuple[Program, Graph]:
    """A program that is nothing but these weights, and its load graph."""
    g = GraphBuilder("weights", Selection({}, LIBRARY))
    g.output("y", g.input("x", f32(1)))
    made = [make(g) for make in makes]
    ports = tuple(Port(f"value:{i}", value) for i, value in enumerate(made))
    load = dataclasses.replace(g.build(), inputs=(), outputs=ports)
    values, end = np.zeros(len(made), VALUE), 128  # weights that begin in mid-arena
    for row, value in zip(values, made, strict=True):
        row["arena"], row["role"], row["dtype"] = Arena.WEIGHTS, Role.WEIGHT, DTYPES.index(value.type.dtype)
        row["first"], row["last"], row["offset"], row["size"] = NONE, NONE, end, value.type.bytes
        end += -(-value.type.bytes // 64) * 64
    empty = np.zeros(0)
    arenas = (end, 128, 64, 64)
    names = tuple(f"weight {i}" for i in range(len(made)))
    return Program(2, 1, 0, 1, arenas, empty, empty, values, empty, empty, (), names, (), ()), load


def matrices(**shapes: tuple[int, int]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Random tensors, of the dtype that the name's first letters say."""
    kinds = {"b": "bfloat16", "f": "float32", "h": "float16", "d": "float64"}
    arrays, dtypes = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values, dtypes[name] = np.random.default_rng(seed).standard_normal(shape), kinds[name[0]]
        arrays[name] = bf16_bits(values) if name[0] == "b" else values.astype(dtypes[name])
    return arrays, dtypes


def rounded(g: GraphBuilder, name: str, *shape: int) -> Value:
    return g.op("cast", g.weight(name, f32(*shape)), dtype="bf16")  # type: ignore[no-any-return]


def pack(g: GraphBuilder, value: Value, shares: int = 3, splits: int = 2) -> Value:
    return g.op("pack_tiles", value, shares=shares, splits=splits)  # type: ignore[no-any-return]


def pack_tf32(g: GraphBuilder, value: Value, shares: int = 3) -> Value:
    return g.op("pack_tf32_tiles", value, shares=shares)  # type: ignore[no-any-return]


STREAMED: dict[str, Make] = {
    "a matrix": lambda g: pack(g, g.weight("b", bf16(40, 130))),
    "a matrix stored as f32": lambda g: pack(g, g.weight("f", bf16(40, 130))),
    "a matrix stored as f16": lambda g: pack(g, g.weight("h", bf16(40, 130))),
    "a matrix stored as f64": lambda g: pack(g, g.weight("d", bf16(40, 130))),
    "a matrix rounded by the graph": lambda g: pack(g, rounded(g, "f5", 40, 130)),
    "matrices below each other": lambda g: pack(
        g, g.op("concat", g.weight("b", bf16(40, 130)), g.weight("f2", bf16(24, 130)), axis=0)
    ),
    "the last axis counted from the back": lambda g: pack(
        g, g.op("concat", g.weight("b", bf16(40, 130)), g.weight("f2", bf16(24, 130)), axis=-2)
    ),
    "some rows": lambda g: pack(g, g.op("slice", g.weight("b", bf16(40, 130)), axis=0, start=3, stop=27)),
    "rows out of two": lambda g: pack(
        g,
        g.op(
            "slice", g.op("concat", g.weight("b", bf16(40, 130)), g.weight("f2", bf16(24, 130)), axis=0),
            axis=0, start=32, stop=56,
        ),
    ),
    "rows and zeros": lambda g: pack(
        g, g.op("cast", g.op("pad", g.weight("f7", f32(21, 130)), before=1, after=2), dtype="bf16")
    ),
    "a matrix of another shape": lambda g: pack(g, g.op("reshape", g.weight("b", bf16(40, 130)), shape=(80, 65))),
    "a matrix of f32 as TF32": lambda g: pack_tf32(g, g.weight("f5", f32(40, 130))),
    "a matrix of f16 as TF32": lambda g: pack_tf32(g, g.weight("h2", f32(40, 130))),
    "a matrix of f64 as TF32": lambda g: pack_tf32(g, g.weight("d2", f32(40, 130))),
    "a matrix of bf16 as TF32": lambda g: pack_tf32(g, g.weight("b2", f32(40, 130))),
    "rows and zeros as TF32": lambda g: pack_tf32(g, g.op("pad", g.weight("f7", f32(21, 130)), before=0, after=3), 1),
    "a table": lambda g: g.weight("b", bf16(40, 130)),
    "a table in f32": lambda g: g.weight("f5", f32(40, 130)),
    "tables below each other": lambda g: g.op("concat", rounded(g, "f5", 40, 130), rounded(g, "f6", 24, 130), axis=0),
}  # fmt: skip
EVALUATED: dict[str, Make] = {
    "a table stored as bf16, used as f32": lambda g: g.op("cast", g.weight("b", bf16(40, 130)), dtype="f32"),
    "a transposed matrix": lambda g: pack(
        g, g.op("cast", g.op("transpose", g.weight("f3", f32(64, 40)), axes=(1, 0)), dtype="bf16"), 3, 1
    ),
    "half of the columns as TF32": lambda g: pack_tf32(
        g, g.op("slice", g.weight("f5", f32(40, 130)), axis=1, start=65, stop=130)
    ),
    "a matrix rounded to bf16 and packed as TF32": lambda g: pack_tf32(
        g, g.op("cast", rounded(g, "f5", 40, 130), dtype="f32")
    ),
    "a sum": lambda g: pack(
        g, g.op("cast", g.op("add", g.weight("f5", f32(40, 130)), g.weight("d2", f32(40, 130))), dtype="bf16")
    ),
    "a transposed table": lambda g: g.op("transpose", g.weight("f3", f32(64, 40)), axes=(1, 0)),
}  # fmt: skip
SHAPES = {
    **dict.fromkeys(("b", "f", "h", "d", "f5", "d2", "b2", "h2"), (40, 130)), **dict.fromkeys(("f2", "f6"), (24, 130)),
    "f7": (21, 130), "f3": (64, 40),
}  # fmt: skip


@pytest.fixture
def everything_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST_STREAMED", 1)


def on_device(program: Program, load: Graph, tensors: TensorSet) -> tuple[np.ndarray, HostGpu]:
    """The arena of weights in the memory of a stand-in for a GPU."""
    device = HostGpu()
    arenas = device_arenas(program, device)
    fill(program, load, tensors, arenas, lambda marks: packer(device, marks))
    return arenas[Arena.WEIGHTS], device


@pytest.mark.parametrize("what", [*STREAMED, *EVALUATED])
def test_a_device_s_arena_has_the_host_s_bytes(what: str, everything_streamed: None) -> None:
    program, load = load_of(STREAMED.get(what) or EVALUATED[what])
    tensors = Given(*matrices(**SHAPES))
    wanted, _ = fill_arenas(program, load, tensors)
    found, device = on_device(program, load, tensors)
    np.testing.assert_array_equal(found, wanted[Arena.WEIGHTS][: program.arenas[Arena.WEIGHTS]])
    assert bool(device.launches) == (what in STREAMED)
    assert wanted[Arena.WEIGHTS][128:].any()


def test_many_weights_of_one_model_meet_in_one_arena(everything_streamed: None) -> None:
    program, load = load_of(*STREAMED.values(), *EVALUATED.values())
    tensors = Given(*matrices(**SHAPES))
    wanted, _ = fill_arenas(program, load, tensors)
    found, _ = on_device(program, load, tensors)
    np.testing.assert_array_equal(found, wanted[Arena.WEIGHTS])


def test_synthetic_weights_are_made_on_the_device(everything_streamed: None) -> None:
    makes = [m for what, m in STREAMED.items()]
    program, load = load_of(*makes)
    tensors = SyntheticSet(SHAPES, SyntheticSource(synthetic=5))
    wanted, _ = fill_arenas(program, load, tensors)
    found, device = on_device(program, load, tensors)
    np.testing.assert_array_equal(found, wanted[Arena.WEIGHTS])
    assert {launch["kind"] for launch in device.launches} == {SYNTHETIC}


def test_small_weights_are_not_streamed() -> None:
    program, load = load_of(*STREAMED.values())
    _, device = on_device(program, load, Given(*matrices(**SHAPES)))
    assert not device.launches and not device.modules


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("name", ["b", "f", "h", "d"])
def test_bf16_weights_that_are_not_finite_are_refused_by_name(
    name: str, device: bool, everything_streamed: None
) -> None:
    program, load = load_of(*(STREAMED[w] for w in STREAMED if w.startswith("a matrix")))
    arrays, dtypes = matrices(**SHAPES)
    arrays[name][7, 5] = 0x7F80 if name == "b" else np.inf
    with pytest.raises(WeightsError, match=f"tensor '{name}' is not finite"):
        on_device(program, load, Given(arrays, dtypes)) if device else fill_arenas(program, load, Given(arrays, dtypes))


@pytest.mark.parametrize("device", [False, True])
def test_bf16_weights_of_another_shape_are_refused_by_name(device: bool, everything_streamed: None) -> None:
    program, load = load_of(STREAMED["a matrix"])
    for tensors in (Given(*matrices(b=(40, 131))), SyntheticSet({"b": (40, 131)}, SyntheticSource(synthetic=1))):
        with pytest.raises(WeightsError, match="tensor 'b' has the wrong shape"):
            on_device(program, load, tensors) if device else fill_arenas(program, load, tensors)


def test_bits_of_bf16_are_never_wide() -> None:
    """A matrix of bf16 takes its own bytes, those of its tiles and little more; float64 would be four times as much."""
    n, k = 2048, 4096
    program, load = load_of(lambda g: pack(g, g.weight("b", bf16(n, k)), 12, 1))
    tensors = Given({"b": np.ones((n, k), np.uint16)}, {"b": "bfloat16"})
    arenas = HostArenas(program)
    tracemalloc.start()
    fill(program, load, tensors, arenas)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3.5 * 2 * n * k


def test_safetensors_are_streamed_from_the_file(tmp_path: Path, everything_streamed: None) -> None:
    arrays, _ = matrices(f=(40, 130), h=(40, 130))
    save_file(arrays, tmp_path / "a.safetensors")
    program, load = load_of(STREAMED["a matrix stored as f32"], STREAMED["a matrix stored as f16"])
    found, device = on_device(program, load, SafetensorsFile(tmp_path / "a.safetensors"))
    wanted, _ = fill_arenas(program, load, Given(arrays))
    np.testing.assert_array_equal(found, wanted[Arena.WEIGHTS])
    assert device.launches


def test_a_cast_keeps_every_bit_of_bf16() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[(every & 0x7F80) != 0x7F80].reshape(-1, 16)
    program, load = load_of(
        lambda g: g.weight("b", bf16(*every.shape)),
        lambda g: g.op("cast", g.op("cast", g.weight("b", bf16(*every.shape)), dtype="f32"), dtype="bf16"),
        lambda g: g.op("cast", g.weight("b", bf16(*every.shape)), dtype="f32"),
    )
    arenas, _ = fill_arenas(program, load, Given({"b": every}, {"b": "bfloat16"}))
    memory = [arenas[Arena.WEIGHTS][int(v["offset"]) :][: int(v["size"])] for v in program.values]
    np.testing.assert_array_equal(memory[0].view(np.uint16).reshape(every.shape), every)
    np.testing.assert_array_equal(memory[1], memory[0])
    np.testing.assert_array_equal(memory[2].view(np.float32).reshape(every.shape), bfloat16_to_float32(every))


@pytest.mark.parametrize("name", sorted(catalog().builtin()))
def test_every_model_s_weights_are_the_same_on_a_device(name: str, everything_streamed: None) -> None:
    spec = find_model(name)
    shapes = {n: t.shape for n, t in expected_tensors(spec).items()}
    if sum(int(np.prod(shape)) for shape in shapes.values()) > 10_000_000:
        pytest.skip("too large for this test")
    library, steps = Selection(spec.operators, LIBRARY), spec.clock.steps_per_beat
    made = compile_graph(build_graph(spec), library, find_target("h200"), capacity=2, steps=steps)
    tensors = SyntheticSet(shapes, SyntheticSource(synthetic=3))
    wanted, image = fill_arenas(made.program, made.load, tensors)
    arenas = device_arenas(made.program)
    found = fill(made.program, made.load, tensors, arenas, lambda marks: packer(arenas.gpu, marks, 1 << 16))
    np.testing.assert_array_equal(found, image)
    np.testing.assert_array_equal(arenas[Arena.WEIGHTS], wanted[Arena.WEIGHTS][: made.program.arenas[Arena.WEIGHTS]])


# --- where arenas live --------------------------------------------------------------------------------------------
def test_a_device_that_is_too_small_is_refused_in_gigabytes() -> None:
    program, _ = load_of(STREAMED["a matrix"])
    with pytest.raises(CapacityError, match="2 sessions do not fit into memory") as caught:
        device_arenas(program, HostGpu(free_bytes=200_000_000))
    assert "GB" in str(caught.value.wanted) and "0.2 of 1099.5 GB free" in str(caught.value.found)
    assert caught.value.hint and caught.value.capacity == 2


def test_only_inputs_and_outputs_of_a_device_are_in_host_memory() -> None:
    program, _ = load_of(STREAMED["a matrix"])
    arenas = device_arenas(program)
    assert arenas[Arena.IO] is arenas.io and len(arenas.io) == program.arenas[Arena.IO]
    arenas.write(Arena.STATE, 3, np.arange(5, dtype=np.uint8))
    assert arenas[Arena.STATE].tobytes() == bytes([0, 0, 0, 0, 1, 2, 3, 4]) + bytes(120)
    arenas.close()
    assert arenas.gpu.closed


def test_arenas_of_the_host_can_be_moved_to_a_device() -> None:
    program, load = load_of(STREAMED["a matrix"])
    host, _ = fill_arenas(program, load, Given(*matrices(**SHAPES)))
    moved = DeviceArenas.holding(program, HostGpu(), host)
    assert moved.io is host[Arena.IO]
    np.testing.assert_array_equal(moved[Arena.WEIGHTS], host[Arena.WEIGHTS])
    with pytest.raises(ProgramError, match="arenas do not fit"):
        DeviceArenas.holding(program, HostGpu(), [a[:-1] for a in host])


@pytest.mark.gpu
@pytest.mark.parametrize("synthetic", [False, True])
def test_a_gpu_s_arena_has_the_host_s_bytes(synthetic: bool, everything_streamed: None) -> None:
    program, load = load_of(*STREAMED.values(), *EVALUATED.values())
    tensors = SyntheticSet(SHAPES, SyntheticSource(synthetic=5)) if synthetic else Given(*matrices(**SHAPES))
    wanted, _ = fill_arenas(program, load, tensors)
    device = Gpu(find_device())
    try:
        arenas, cubin = DeviceArenas(program, device), build_packing(settings().kernels)
        fill(program, load, tensors, arenas, lambda marks: Packer(device, cubin, marks, 4096))
        np.testing.assert_array_equal(arenas[Arena.WEIGHTS], wanted[Arena.WEIGHTS])
    finally:
        device.close()


@pytest.mark.gpu
def test_a_model_loaded_into_a_gpu_s_memory_gives_the_same_bits(everything_streamed: None) -> None:
    made, tensors = gpu.compiled("small"), open_weights(gpu.spec_of("small"), None, settings())
    kernel = start_on_gpu(made.program, made.load, tensors, find_device(), settings().kernels)
    try:
        assert isinstance(kernel.arenas, DeviceArenas)
        found, state = gpu.history(kernel)
    finally:
        kernel.close()
    other = gpu.load(CudaKernel, "small")
    try:
        wanted, state_wanted = gpu.history(other)
    finally:
        other.close()
    assert state == state_wanted
    for ours, theirs in zip(found, wanted, strict=True):
        for slot, outputs in theirs.items():
            assert {p: v.tobytes() for p, v in ours[slot].items()} == {p: v.tobytes() for p, v in outputs.items()}


@pytest.mark.gpu
def test_a_program_of_more_than_the_gpu_s_memory_is_refused() -> None:
    program, load = load_of(STREAMED["a matrix"])
    large = dataclasses.replace(program, arenas=(1 << 42, 128, 64, 64))
    with pytest.raises(CapacityError, match="do not fit into memory"):
        start_on_gpu(large, load, Given(*matrices(**SHAPES)), find_device(), settings().kernels)
