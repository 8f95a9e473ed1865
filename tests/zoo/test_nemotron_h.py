"""Hybrids of Mamba-2 and attention: against `transformers`, between slots, and as data.

The other implementation runs in float32 on the same bf16 matrices, so that what is left is the rounding of activations
to bf16 in front of each product, and of keys, values and the convolution's window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk import registry
from wpk.ir.errors import SpecError
from wpk.ir.graph import Graph, StateKind
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
STEPS = 16
TOLERANCE = 0.02  # of the logits' standard deviation, root mean square over a step


@dataclass(frozen=True)
class Shape:
    """Dimensions of a small model; the letters say what it is there for."""

    layers: str
    hidden_size: int
    mamba: tuple[int, int, int]  # heads, values of one, groups
    intermediate_size: int
    attention: tuple[int, int, int]  # query heads, key heads, values of one
    vocab_size: int
    embedded: bool = False  # what is given is an embedding, not a token

    @property
    def dimensions(self) -> dict[str, Any]:
        names = ("mamba_num_heads", "mamba_head_dim", "n_groups")
        others = ("num_attention_heads", "num_key_value_heads", "head_dim")
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            **dict(zip(names, self.mamba, strict=True)),
            **dict(zip(others, self.attention, strict=True)),
        }


SHAPES = {
    "all kinds of layers": Shape("M-*-M", 256, (8, 32, 2), 512, (4, 2, 64), 512),
    "sizes that fill no chunk": Shape("*M*-", 200, (16, 16, 4), 328, (3, 1, 32), 264),
    "from embeddings": Shape("MM*", 128, (8, 40, 1), 128, (1, 1, 16), 128, embedded=True),
    "attention alone": Shape("**-", 192, (8, 8, 1), 192, (4, 4, 48), 200),
}


def spec(shape: Shape, *, logits: bool = True, heads: tuple[str, ...] = ("lm_head",), **changes: Any) -> ModelSpec:
    given, what = (f"f32[{shape.hidden_size}]", "features") if shape.embedded else ("i32[]", "tokens")
    outputs: dict[str, Any] = {h: {"type": "i32[]", "kind": "tokens", "from": f"nemotron_h.{h}"} for h in heads}
    if logits:
        kind = {"type": f"f32[{shape.vocab_size}]", "kind": "logit"}
        outputs |= {f"{h}_logits": {**kind, "from": f"nemotron_h.{h}_logits"} for h in heads}
    part = {"kind": "nemotron_h", "layers": shape.layers, **shape.dimensions, "heads": heads, "logits": logits}
    data: dict[str, Any] = {
        "name": "hybrid", "version": 1, "task": "text", "description": "a small hybrid model",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 1},
        "clock": {"sample_rate": 25, "samples_per_step": 1}, "context": 40,
        "ports": {"inputs": {"x": {"type": given, "kind": what}}, "outputs": outputs},
        "components": [{**part, **changes}], "precision": {"policy": "bf16"}, "tensors": {"nemotron_h.*": "*"},
        "ignored_tensors": ["backbone.embeddings.weight"] if shape.embedded else [],
    }  # fmt: skip
    return ModelSpec.from_data(data)


# --- against transformers -----------------------------------------------------------------------------------------
class Original:
    """A model of `transformers` with random weights, in a folder under its published names, and what it gives."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        config = transformers.NemotronHConfig(
            hybrid_override_pattern=shape.layers, num_hidden_layers=len(shape.layers), **shape.dimensions,
            ssm_state_size=128, conv_kernel=4, layer_norm_epsilon=1e-5, mlp_hidden_act="relu2", chunk_size=16,
            time_step_min=1e-9,  # its chunked form clips time steps from below, the published models do not
        )  # fmt: skip
        torch.manual_seed(0)
        self.torch, self.model = torch, transformers.NemotronHForCausalLM(config).eval()
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.copy_(self._random(name, tensor).bfloat16())
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.to(torch.float32)
        self.given = self._given(shape)
        self.logits = self._logits(shape)

    def _random(self, name: str, tensor: Any) -> Any:
        """Values under which every part matters: decays from slow to fast, time steps from none to many."""
        torch, leaf = self.torch, name.rpartition("mixer.")[2]
        if leaf == "A_log":
            return torch.linspace(0.0, 2.7, len(tensor))
        if leaf == "dt_bias":  # beyond 20, where softplus is linear, in one head
            return torch.cat([torch.linspace(-6.0, 2.0, len(tensor) - 1), torch.tensor([33.5])])
        if tensor.ndim == 1:
            return torch.randn(tensor.shape) * 0.2 + (0.0 if name.endswith("bias") else 1.0)
        spread = 0.5 if name.endswith("conv1d.weight") else tensor.shape[-1] ** -0.5
        return torch.randn(tensor.shape) * (1.0 if "embeddings" in name else spread)

    def _given(self, shape: Shape) -> list[Array]:
        rng = np.random.default_rng(1)
        if shape.embedded:
            return list(rng.standard_normal((STEPS, shape.hidden_size)).astype(np.float32))
        return list(rng.integers(0, shape.vocab_size, STEPS, dtype=np.int32))

    def _logits(self, shape: Shape) -> Array:
        """[steps, vocabulary], a step at a time."""
        torch, cache, rows = self.torch, None, []
        with torch.no_grad():
            for x in self.given:
                key, value = ("inputs_embeds", torch.tensor(x)[None, None]) if shape.embedded else (
                    "input_ids", torch.tensor([[int(x)]])
                )  # fmt: skip
                made = self.model(**{key: value}, cache=cache, use_cache=True)
                cache = made.cache
                rows.append(made.logits[0, -1].numpy())
        return np.stack(rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Original, Path]]:
    made: dict[str, tuple[Original, Path]] = {}

    def of(name: str) -> tuple[Original, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("original")
            made[name] = Original(SHAPES[name], folder), folder
        return made[name]

    return of


def played(cohort: Cohort, given: list[Array]) -> dict[str, Array]:
    """Every output of one session over the steps."""
    session = cohort.join()
    steps = [cohort.beat({session: {"x": x}})[session] for x in given]
    cohort.leave(session)
    return {port: np.stack([s[port].reshape(-1) for s in steps]) for port in steps[0]}


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_tokens_are_those_of_transformers(name: str, original: Any, shared: Settings) -> None:
    shape, (wanted, folder) = SHAPES[name], original(name)
    with registry.load(spec(shape), capacity=1, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        found = played(cohort, wanted.given)
    error = found["lm_head_logits"] - wanted.logits
    relative = np.sqrt((error**2).mean(axis=1)) / wanted.logits.std(axis=1)
    assert relative.max() < TOLERANCE, relative
    best = np.sort(wanted.logits, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * np.abs(error).max(axis=1)  # no error of that size turns it
    assert clear.sum() >= STEPS // 2
    assert (found["lm_head"][clear, 0] == wanted.logits.argmax(axis=1)[clear]).all()
    assert np.unique(wanted.logits.argmax(axis=1)).size > 3
    # Without logits the greatest is found while the product runs: the same tokens, whatever the margin.
    alone = spec(shape, logits=False)
    with registry.load(alone, capacity=1, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        assert (played(cohort, wanted.given)["lm_head"] == found["lm_head"]).all()


@pytest.mark.oracle
@pytest.mark.parametrize("name", SHAPES)
def test_the_published_names_and_shapes_are_expected(name: str, original: Any) -> None:
    _, folder = original(name)
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "np") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    expected = {key: type.shape for key, type in expected_tensors(spec(SHAPES[name])).items()}
    unused = {"backbone.embeddings.weight"} if SHAPES[name].embedded else set()
    assert expected == {key: shape for key, shape in stored.items() if key not in unused}


# --- between slots ------------------------------------------------------------------------------------------------
def _bits(outputs: dict[str, Array]) -> bytes:
    return b"".join(outputs[port].tobytes() for port in sorted(outputs))


def _garbage(shape: Shape, rng: np.random.Generator) -> Array:
    """What no caller means: tokens outside the table; numbers whose squares overflow, so that NaN follows."""
    if not shape.embedded:
        return np.array(rng.choice([-1, 0, shape.vocab_size, 2**31 - 1, -(2**31)]), np.int32)
    row = rng.standard_normal(shape.hidden_size) * 10.0 ** rng.integers(-30, 38)
    return np.clip(row, -3e38, 3e38).astype(np.float32)


@pytest.mark.parametrize("name", ["all kinds of layers", "from embeddings"])
@pytest.mark.parametrize("logits", [True, False])
def test_a_session_gets_the_same_bits_in_any_slot_and_company(name: str, logits: bool, shared: Settings) -> None:
    shape, rng = SHAPES[name], np.random.default_rng(2)
    model = spec(shape, logits=logits, heads=("lm_head", "other_head"))
    given = [
        rng.standard_normal(shape.hidden_size).astype(np.float32) if shape.embedded
        else np.array(rng.integers(shape.vocab_size), np.int32)
        for _ in range(12)
    ]  # fmt: skip
    with registry.load(model, capacity=1, target="cpu", threads=1, where=shared) as cohort:
        session = cohort.join()
        alone = [_bits(cohort.beat({session: {"x": x}})[session]) for x in given]
    assert len(set(alone)) > 3
    with registry.load(model, capacity=8, target="cpu", threads=2, where=shared) as cohort:
        others = [cohort.join() for _ in range(5)]
        session = cohort.join()
        assert session.slot == 5
        others += [cohort.join() for _ in range(2)]
        for step, x in enumerate(given):
            if step == 6:  # whoever joins and leaves, too
                cohort.leave(others.pop(0))
                others.append(cohort.join())
            inputs = {other: {"x": _garbage(shape, rng)} for other in others} | {session: {"x": x}}
            assert _bits(cohort.beat(inputs)[session]) == alone[step], step


def test_a_session_starts_anew_in_a_slot_that_was_used(shared: Settings) -> None:
    shape = SHAPES["all kinds of layers"]
    given = [np.array(t, np.int32) for t in (3, 1, 4, 1, 5)]
    with registry.load(spec(shape), capacity=2, target="cpu", threads=1, where=shared) as cohort:
        first, second = played(cohort, given), played(cohort, given)
    assert all((first[port] == second[port]).all() for port in first)


def test_a_beat_of_several_steps_gives_what_its_steps_give(shared: Settings) -> None:
    shape = SHAPES["all kinds of layers"]
    tokens = np.array([3, 1, 4, 1, 5, 9], np.int32)
    one = spec(shape)
    data = one.to_data()
    data["clock"]["steps_per_beat"] = 3
    with registry.load(one, capacity=1, target="cpu", threads=1, where=shared) as cohort:
        wanted = played(cohort, list(tokens))
    with registry.load(ModelSpec.from_data(data), capacity=1, target="cpu", threads=1, where=shared) as cohort:
        found = played(cohort, [tokens[:3], tokens[3:]])
    for port in wanted:
        np.testing.assert_array_equal(found[port].reshape(wanted[port].shape), wanted[port])


# --- as data ------------------------------------------------------------------------------------------------------
def graph(shape: Shape = SHAPES["all kinds of layers"], **changes: Any) -> Graph:
    return build_graph(spec(shape, **changes), context=7)


def test_state_is_that_of_the_layers() -> None:
    kinds = {s.name.removeprefix("nemotron_h.backbone.layers."): (s.kind, str(s.value.type)) for s in graph().states}
    assert kinds == {
        "0.conv": (StateKind.REGISTER, "bf16[3,768]"), "0.ssm": (StateKind.REGISTER, "f32[8,32,128]"),
        "2.kv": (StateKind.CACHE, "bf16[7,2,2,64]"), "nemotron_h.position": (StateKind.REGISTER, "i32[]"),
        "4.conv": (StateKind.REGISTER, "bf16[3,768]"), "4.ssm": (StateKind.REGISTER, "f32[8,32,128]"),
    }  # fmt: skip


def test_matrices_are_bf16_and_the_rest_f32() -> None:
    types = {p.name: p.value.type for p in graph().weights}
    assert {name for name, t in types.items() if t.dtype.value == "bf16"} == {
        name for name, t in types.items() if len(t.shape) == 2
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conv_kernel": 3}, "conv_kernel 4, found 3"),
        ({"ssm_state_size": 64}, "ssm_state_size 128, found 64"),
        ({"mamba_num_heads": 12}, "mamba_num_heads a multiple of 8, found 12"),
        ({"vocab_size": 513}, "vocab_size a multiple of 8"),
        ({"head_dim": 24}, "head_dim a multiple of 16"),
        ({"n_groups": 3}, "n_groups that divides mamba_num_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads that divides num_attention_heads"),
        ({"layers": "M-E"}, "layers"),
        ({"layers": ""}, "layers"),
    ],
)
def test_dimensions_that_cannot_be_built_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(SHAPES["all kinds of layers"], **change)
    assert said in str(refused.value)


def test_float32_is_refused_until_there_is_a_product_for_it() -> None:
    data = spec(SHAPES["all kinds of layers"]).to_data()
    del data["precision"]
    with pytest.raises(SpecError, match=r"precision.policy.*has no f32 arithmetic yet.*bf16"):
        ModelSpec.from_data(data)


def test_an_input_of_another_type_is_refused() -> None:
    data = spec(SHAPES["all kinds of layers"]).to_data()
    data["ports"]["inputs"]["x"]["type"] = "f32[8]"
    with pytest.raises(SpecError, match=r"f32\[256\] or i32\[\]"):
        build_graph(ModelSpec.from_data(data))


def test_the_voice_backbone_has_the_published_sizes() -> None:
    model = registry.find_model("nemotron-h-voice-9b")
    assert parameter_count(model) == 7_713_822_208 + 2 * 587_202_560
    sizes = state_bytes(build_graph(model))
    assert sizes == {"fixed": 27 * (128 * 80 * 128 * 4 + 12288 * 3 * 2) + 4, "per_step": 4 * 2 * 8 * 128 * 2}
    names = expected_tensors(model)
    assert len(names) == 339 + 2
    assert names["stt_model.llm.layers.14.mixer.q_proj.weight"].shape == (5120, 4480)
    assert names["stt_model.function_head.weight"].shape == (131072, 4480)


def test_the_language_model_has_the_published_number_of_parameters() -> None:
    model = registry.find_model("nemotron-nano-9b-v2")
    assert parameter_count(model) == 8_888_227_328
    names = expected_tensors(model)
    assert names["backbone.embeddings.weight"].shape == names["lm_head.weight"].shape == (131072, 4480)
    assert names["backbone.layers.0.mixer.in_proj.weight"].shape == (22656, 4480)
