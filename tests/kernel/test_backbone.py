"""The voice model's backbone at full size on a GPU: against `transformers`, step by step, and against itself.

Run where there is an H200: pytest -m gpu tests/kernel/test_backbone.py -s. 60 GB of the GPU's memory are used: the
other implementation runs in float32 on the same bf16 matrices, made there by the rule of `registry.weights.synthetic`.
What is left is the rounding of activations to bf16 in front of each product, and of keys, values and the convolution's
window. Without a GPU the same comparison runs on a small hybrid and the CPU kernel.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import inspect
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.kernel.gpu import join, leave, ports
from tests.kernel.hybrids import Array, Weights, fill_history, keep_states, operator_table
from tests.kernel.hybrids import Run as States
from tests.zoo.test_nemotron_h import Shape, spec
from wpk.ir.types import DType
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cubin import build_cubin
from wpk.kernel.driver import find_device
from wpk.ops import LIBRARY
from wpk.ops.payload import Arena
from wpk.ops.requirements import Selection
from wpk.registry.load import start_on_gpu
from wpk.registry.loading import fill_arenas
from wpk.registry.models import find_model
from wpk.registry.settings import settings
from wpk.scheduler.compile import Compiled, compile_graph
from wpk.scheduler.program import Direction, Program
from wpk.scheduler.target import TARGETS
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.components.nemotron_h import NemotronH
from wpk.zoo.sources import SyntheticSource
from wpk.zoo.spec import ModelSpec

VOICE = "nemotron-h-voice-9b"
CLASSES = ("NemotronHConfig", "NemotronHForCausalLM")
CACHES = ("cache", "past_key_values", "cache_params")  # what versions of `transformers` call it, newest first
STEPS, SLOTS, LIVE = 8, 4, (0, 1, 3)
LOGITS = 0.03  # of the logits' standard deviation, root mean square of a step's difference over 56 blocks; the mean
LARGEST = 4.0  # of that, in any one step: now and then a norm divides by little
STATES = 0.05  # the same of a layer's state
PIECE = 1 << 26  # numbers that are made at a time


# --- the other implementation -----------------------------------------------------------------------------------------
def torch_and_transformers() -> tuple[Any, Any]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    lacking = [name for name in CLASSES if not hasattr(transformers, name)]
    if lacking or importlib.util.find_spec("transformers.models.nemotron_h") is None:
        wanted = f"models.nemotron_h with {' and '.join(lacking or CLASSES)}"
        pytest.skip(f"wanted transformers that has {wanted}; found {transformers.__version__}")
    return torch, transformers


def cache_of(given: Any, what: str) -> Any:
    """What a step gives back for the next one."""
    found = next((made for name in CACHES if (made := getattr(given, name, None)) is not None), None)
    if found is None:
        pytest.skip(f"{what} has none of {', '.join(CACHES)}: another interface than this test knows")
    return found


def ssm_of(cache: Any, layer: int) -> Any:
    """A Mamba-2 layer's state, [sessions, heads, values, 128]."""
    if hasattr(cache, "get_recurrent_state"):
        return cache.get_recurrent_state(layer)
    if hasattr(cache, "ssm_states"):
        return cache.ssm_states[layer]
    states = cache.layers[layer].recurrent_states
    return states if hasattr(states, "shape") else states[0]


def kv_of(cache: Any, layer: int) -> tuple[Any, Any]:
    """Keys and values of an attention layer, each [sessions, groups, steps, width]."""
    if hasattr(cache, "key_cache"):
        return cache.key_cache[layer], cache.value_cache[layer]
    return cache.layers[layer].keys, cache.layers[layer].values


def _signed(value: int) -> int:
    """The i64 of the same bits."""
    return value - (1 << 64) if value >> 63 else value


def synthetic(torch: Any, recipe: tuple[int, float, float], start: int, count: int, device: str) -> Any:
    """Numbers of a synthetic tensor by torch's 64-bit integers: `wpk.registry.weights.synthetic.synthetic_values`."""
    key, offset, scale = recipe
    z = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    z = z * _signed(0x9E3779B97F4A7C15) + _signed(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    whole = ((z >> 40) & ((1 << 24) - 1)) - (1 << 23)
    return offset + scale * (whole.to(torch.float32) * 2.0**-23)


def fill_tensor(torch: Any, target: Any, weights: Weights, name: str, matrix: bool) -> None:
    """A parameter's values, in place; matrices are rounded to bf16 as when they are loaded."""
    if not matrix:
        target.copy_(torch.from_numpy(np.array(weights.read(name))).reshape(target.shape))
        return
    flat, recipe = target.view(-1), weights.recipe(name)
    for start in range(0, flat.numel(), PIECE):
        count = min(PIECE, flat.numel() - start)
        flat[start : start + count] = synthetic(torch, recipe, start, count, target.device.type).bfloat16()


@dataclass
class Wanted:
    """logits: by head, [steps, sessions, vocabulary]; rough: with bf16 throughout. states: by layer and kind."""

    logits: dict[str, Array] = field(default_factory=dict)
    rough: dict[str, Array] = field(default_factory=dict)
    states: dict[str, Array] = field(default_factory=dict)


def embeddings(size: int, steps: int, sessions: int) -> Array:
    """[steps, sessions, size]: what is given."""
    return np.random.default_rng(11).standard_normal((steps, sessions, size)).astype(np.float32)


def component_of(model: ModelSpec) -> NemotronH:
    (part,) = model.components
    assert isinstance(part, NemotronH)
    return part


def empty_net(torch: Any, transformers: Any, model: ModelSpec) -> Any:
    """The other implementation without memory, but for one embedding: what is given is embedded already."""
    part = component_of(model)
    names = ("vocab_size", "hidden_size", "intermediate_size", "mamba_num_heads", "mamba_head_dim", "n_groups",
             "num_attention_heads", "num_key_value_heads", "head_dim", "ssm_state_size", "conv_kernel",
             "layer_norm_epsilon")  # fmt: skip
    config = transformers.NemotronHConfig(
        hybrid_override_pattern=part.layers, num_hidden_layers=len(part.layers), mlp_hidden_act="relu2", chunk_size=16,
        time_step_min=1e-9,  # its chunked form clips time steps from below, the published models do not
        **{name: getattr(part, name) for name in names},
    )  # fmt: skip
    with torch.device("meta"):
        net = transformers.NemotronHForCausalLM(config).eval()
    net.model.embeddings = torch.nn.Embedding(1, config.hidden_size)
    return net


def parameter_of(name: str) -> str:
    """Its name of a tensor that a spec expects."""
    return name.removeprefix("stt_model.").replace("llm.", "model.").replace("backbone.", "model.")


def original(model: ModelSpec, weights: Weights, given: Array, device: str) -> Wanted:
    """Every step of all sessions by `transformers`, in float32 and then in bf16, and the states after the last."""
    torch, transformers = torch_and_transformers()
    torch.set_float32_matmul_precision("highest")
    part, net = component_of(model), empty_net(torch, transformers, model)
    net.to_empty(device=device)
    made, wanted = {}, expected_tensors(model)
    with torch.no_grad():
        for name, type in wanted.items():
            ours = parameter_of(name)
            head = ours.removesuffix(".weight")
            if head in part.heads:
                made[head] = torch.empty(type.shape, dtype=torch.float32, device=device)
                fill_tensor(torch, made[head], weights, name, matrix=True)
            else:
                fill_tensor(torch, net.get_parameter(ours), weights, name, matrix=type.dtype is DType.BF16)
        net.lm_head = torch.nn.Identity()  # the heads are ours to multiply by: there may be several
        found = Wanted()
        found.logits, cache = _steps(torch, net, made, given, device)
        for layer, kind in enumerate(part.layers):
            name = f"backbone.layers.{layer}"
            if kind == "M":
                found.states[f"{name}.ssm"] = ssm_of(cache, layer).float().cpu().numpy()
            elif kind == "*":
                both = torch.stack(kv_of(cache, layer), dim=1).permute(0, 3, 1, 2, 4)
                found.states[f"{name}.kv"] = both.float().cpu().numpy()  # [sessions, steps, 2, groups, width]
        net.to(torch.bfloat16)
        for name, type in wanted.items():  # only matrices are bf16 in a checkpoint of this family
            ours = parameter_of(name)
            if ours.endswith(("A_log", "dt_bias", ".D")):
                fill = torch.empty(type.shape, dtype=torch.float32, device=device)
                fill_tensor(torch, fill, weights, name, matrix=False)
                net.get_parameter(ours).data = fill
        found.rough, _ = _steps(torch, net, {h: w.bfloat16() for h, w in made.items()}, given, device)
    return found


def _steps(torch: Any, net: Any, heads: dict[str, Any], given: Array, device: str) -> tuple[dict[str, Array], Any]:
    dtype, cache, rows = net.model.embeddings.weight.dtype, None, {head: list[Array]() for head in heads}
    argument = next((n for n in CACHES if n in inspect.signature(type(net).forward).parameters), CACHES[1])
    for x in given:
        embedded = torch.tensor(x, device=device)[:, None].to(dtype)
        made = net(inputs_embeds=embedded, use_cache=True, **{argument: cache})
        cache = cache_of(made, type(made).__name__)
        hidden = made.logits[:, -1].to(dtype)  # an Identity's: the normalised last x
        for head, weight in heads.items():
            rows[head].append((hidden @ weight.T).float().cpu().numpy())
    return {head: np.stack(r) for head, r in rows.items()}, cache


# --- ours -------------------------------------------------------------------------------------------------------------
def with_logits(model: ModelSpec) -> ModelSpec:
    """The same model that gives its logits as well."""
    data = model.to_data()
    part = data["components"][0]
    part["logits"] = True
    kind = {"type": f"f32[{part['vocab_size']}]", "kind": "logit"}
    outputs = {head: {"type": "i32[]", "kind": "tokens", "from": f"nemotron_h.{head}"} for head in part["heads"]}
    more = {f"{head}_logits": {**kind, "from": f"nemotron_h.{head}_logits"} for head in part["heads"]}
    data["ports"]["outputs"] = outputs | more
    return ModelSpec.from_data(data)


def compiled(model: ModelSpec, slots: int, context: int) -> tuple[Program, Compiled]:
    graph, library = build_graph(model, context=context), Selection(model.operators, LIBRARY)
    made = compile_graph(graph, library, TARGETS["h200"], capacity=slots, steps=1)
    return made.program.with_operators(operator_table()), made


def weights_of(model: ModelSpec) -> Weights:
    return Weights({name: t.shape for name, t in expected_tensors(model).items()}, SyntheticSource(synthetic=1))


def played(kernel: Any, given: Array) -> tuple[dict[str, Array], States]:
    """Every output of the sessions in LIVE, [steps, sessions, ...], and their states after the last step."""
    join(kernel, *LIVE)
    rows: dict[str, list[Array]] = {}
    ((view,),) = ports(kernel, Direction.INPUT).values()
    for x in given:
        view[:] = 1e30  # of the slot that is vacant
        view[list(LIVE)] = x
        kernel.beat()
        for port, (made,) in ports(kernel, Direction.OUTPUT).items():
            rows.setdefault(port, []).append(made[list(LIVE)].copy())
    states = States()
    keep_states(states, kernel, LIVE)
    return {port: np.stack(r) for port, r in rows.items()}, states


def rms(array: Array, axis: int | None = None) -> Any:
    return np.sqrt((array.astype(np.float64) ** 2).mean(axis=axis))


def compare(model: ModelSpec, wanted: Wanted, found: dict[str, Array], states: States, slack: float) -> None:
    """slack: of what is allowed; below 1 for fewer blocks."""
    part = component_of(model)
    for head in part.heads:
        logits, ours, tokens = wanted.logits[head], found[f"{head}_logits"], found[head][..., 0]
        spread = logits.std(axis=-1)
        error, rough = (rms(x - logits, axis=-1) / spread for x in (ours, wanted.rough[head]))
        print(f"\n{head}: error {error.mean():.2e}, at most {error.max():.2e} of the logits' spread; bf16 throughout "
              f"{rough.mean():.2e}, {rough.max():.2e}")  # fmt: skip
        assert error.mean() < slack * LOGITS and error.max() < LARGEST * slack * LOGITS
        assert error.mean() < rough.mean()  # there the residual stream is rounded too
        assert (tokens == ours.argmax(axis=-1)).all()  # of our own logits exactly
        best = np.sort(logits, axis=-1)
        clear = best[..., -1] - best[..., -2] > 2 * np.abs(ours - logits).max(axis=-1)
        equal = tokens == logits.argmax(axis=-1)
        print(f"{head}: {equal.sum()} of {equal.size} tokens equal, {clear.sum()} must be; "
              f"{np.unique(tokens).size} different ones")  # fmt: skip
        assert equal[clear].all() and clear.sum() >= equal.size // 4
        assert np.unique(logits.argmax(axis=-1)).size > 3
    for name, numbers in wanted.states.items():
        for session, slot in enumerate(LIVE):
            (own,) = (v for n, v in states.states[slot].items() if n.endswith(name))
            theirs = numbers[session]
            own = own[: theirs.size].reshape(theirs.shape)
            apart = float(rms(own - theirs) / rms(theirs))
            assert apart < slack * STATES, (name, slot, apart)
    last = [n for n in wanted.states if n.endswith(".ssm")][-1]
    print(f"{len(wanted.states)} states of each session within {slack * STATES:.2%}; the last Mamba-2 layer is {last}")


# --- tests ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def freed() -> Iterator[None]:
    """Memory of the GPU that torch keeps is given back before and after."""
    yield
    _free()


def _free() -> None:
    gc.collect()
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.slow
def test_the_full_size_gives_the_logits_tokens_and_states_of_transformers(freed: None) -> None:
    torch, _ = torch_and_transformers()
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    model = with_logits(find_model(VOICE))
    weights = weights_of(model)
    given = embeddings(4480, STEPS, len(LIVE))
    before = time.monotonic()
    wanted = original(model, weights, given, "cuda")
    _free()  # a resident kernel leaves torch no room to run beside it
    print(f"\ntransformers: {time.monotonic() - before:.1f} s")
    program, made = compiled(model, SLOTS, context=64)
    cubin = build_cubin(operator_table(), settings().kernels, SLOTS)
    kernel = start_on_gpu(program, made.load, weights, find_device(), settings().kernels, cubin=cubin)
    try:
        found, states = played(kernel, given)
    finally:
        kernel.close()
    compare(model, wanted, found, states, slack=1.0)


def _beats_of_56(beats: int) -> tuple[str, str]:
    """Digests of all outputs of so many beats of 56 sessions with 1,200 steps behind them, and of all state."""
    slots, rows, start = 56, 1500, 1200
    model = find_model(VOICE)
    program, made = compiled(model, slots, context=rows)
    cubin = build_cubin(operator_table(), settings().kernels, slots)

    def prepare(program: Program, image: Array) -> None:
        fill_history(program, image, rows, start)

    kernel = start_on_gpu(
        program, made.load, weights_of(model), find_device(), settings().kernels, prepare, cubin=cubin
    )
    outputs, rng, times = hashlib.sha256(), np.random.default_rng(3), []
    try:
        ((view,),) = ports(kernel, Direction.INPUT).values()
        live = set(range(slots))
        join(kernel, *live)
        for beat in range(beats):
            if beat == 9:  # some leave and come back, so that sessions are at different positions
                leave(kernel, 3, 30, 55)
                live -= {3, 30, 55}
            if beat == 12:
                join(kernel, 3, 55)
                live |= {3, 55}
            view[:] = rng.standard_normal(view.shape)
            times.append(kernel.beat())
            for _, (made_here,) in sorted(ports(kernel, Direction.OUTPUT).items()):
                outputs.update(made_here[sorted(live)].tobytes())
        memory = kernel.read(Arena.STATE).reshape(slots, -1)
        digests = ThreadPoolExecutor(8).map(lambda s: hashlib.sha256(memory[s].data).hexdigest(), sorted(live))
        return outputs.hexdigest(), hashlib.sha256("".join(digests).encode()).hexdigest()
    finally:
        kernel.close()
        print(f"\nbeats of {slots} sessions: median {np.median(times) / 1e6:.3f} ms, at most {max(times) / 1e6:.3f} ms")


@pytest.mark.gpu
@pytest.mark.slow
def test_two_full_size_runs_are_equal_bit_by_bit(freed: None) -> None:
    _free()
    first, second = _beats_of_56(24), _beats_of_56(24)
    print(f"outputs {first[0][:16]}, state {first[1][:16]}")
    assert first == second


# --- the same comparison without a GPU ------------------------------------------------------------------------------
SMALL = Shape("M-*M-M", 320, (16, 40, 2), 640, (4, 2, 64), 520, embedded=True)


@pytest.mark.oracle
@pytest.mark.slow
def test_the_comparison_holds_for_a_small_hybrid_on_the_cpu() -> None:
    model = spec(SMALL, heads=("lm_head", "other_head"))
    weights, given = weights_of(model), embeddings(SMALL.hidden_size, STEPS, len(LIVE))
    wanted = original(model, weights, given, "cpu")
    program, made = compiled(model, SLOTS, context=64)
    arenas, image = fill_arenas(program, made.load, weights)
    kernel = CpuKernel(program, arenas, image, cache=settings().kernels)
    try:
        found, states = played(kernel, given)
    finally:
        kernel.close()
    compare(model, wanted, found, states, slack=0.5)
    wrong = {port: np.roll(rows, 1, axis=1) for port, rows in found.items()}  # each session has another's
    with pytest.raises(AssertionError):
        compare(model, wanted, wrong, states, slack=0.5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["backbone.layers.0.mixer.in_proj.weight", "lm_head.weight"])
def test_torch_makes_the_numbers_of_the_rule(name: str) -> None:
    torch, _ = torch_and_transformers()
    weights = weights_of(spec(SMALL))
    wanted = np.asarray(weights.read(name)).reshape(-1)
    made = synthetic(torch, weights.recipe(name), 100, wanted.size - 100, "cpu").numpy()
    np.testing.assert_array_equal(made, wanted[100:])
    target = torch.empty(weights.tensors[name].shape)
    fill_tensor(torch, target, weights, name, matrix=True)
    assert (target == torch.from_numpy(wanted.reshape(target.shape)).bfloat16()).all()


@pytest.mark.oracle
def test_every_tensor_of_the_voice_model_has_its_place_in_the_other_implementation() -> None:
    model = find_model(VOICE)
    net = empty_net(*torch_and_transformers(), model)
    theirs = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    ours = {parameter_of(name): type.shape for name, type in expected_tensors(model).items()}
    assert ours.pop("function_head.weight") == ours["lm_head.weight"]
    assert {name: shape for name, shape in theirs.items() if name != "model.embeddings.weight"} == ours


def test_the_voice_model_with_logits_gives_both() -> None:
    model = with_logits(find_model(VOICE))
    assert list(model.ports.outputs) == ["lm_head", "function_head", "lm_head_logits", "function_head_logits"]
    program, _ = compiled(model, SLOTS, context=64)
    assert program.operators == operator_table() and program.slots == SLOTS
