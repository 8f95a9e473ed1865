"""Speech synthesis a frame at a time: against `transformers` and a program in float64, between slots, and as data.

The other program is made of `transformers`' Gemma-3 text model (decoder, float32) and T5Gemma encoder (vectors of
tokens), and of what is written below from the published description: fusion, and the drawing of codes in float64. Both
read one file under the published names, and both are given the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk import registry
from wpk.ir.errors import SpecError
from wpk.ir.graph import StateKind
from wpk.ops.evaluate import Reference
from wpk.ops.operator import LIBRARY, make
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.components.ear_tts_mixture import masked_codes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
PREFIX = "tts_model.tts_model."
STEPS, EOS, VOCAB, LONGEST = 12, 2, 20, 7
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24,
    "intermediate_size": 64, "sliding_window_pattern": 2, "latent_size": 16, "codebooks": 31, "codebook_size": 8,
    "mixture_components": 24, "mixture_rank": 4, "eos_id": EOS,
}  # fmt: skip
FULL = {
    "vocab_size": 131072, "hidden_size": 1152, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 72,
    "intermediate_size": 4608, "latent_size": 512, "codebooks": 31, "codebook_size": 1024, "mixture_components": 1024,
    "mixture_rank": 64, "eos_id": 2,
}  # fmt: skip
SPELLED = {"subwords": "characters", "max_characters": LONGEST}
LARGER = {  # so that logits differ, that scales fall below their least, and that scores reach their bound
    "proj_logits": 3.0, "proj_logs": 3.0, "encoder.layers.0.self_attn.q": 6.0, "encoder.layers.0.self_attn.k": 6.0,
}  # fmt: skip
TOKENS = np.array([3, 12, 7, 12, EOS, 12, 19, 0, 5, EOS, EOS, 11], np.int32)
SEED = np.array([5, -9], np.int32)


def spec(dimensions: dict[str, Any] = SMALL, **changes: Any) -> ModelSpec:
    part = {"kind": "ear_tts", **dimensions, **changes, "input": ["token", "seed"]}
    rows = f"f32[2,{dimensions['hidden_size']}]"
    mapped = {"ear_tts.embed_subword.characters": "characters"} if part.get("subwords") == "characters" else {}
    data: dict[str, Any] = {
        "name": "speech", "version": 1, "task": "voice", "description": "a small speech synthesis",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 1},
        "clock": {"sample_rate": 25, "samples_per_step": 2}, "context": 16,
        "ports": {
            "inputs": {"token": {"type": "i32[]", "kind": "tokens"}, "seed": {"type": "i32[2]", "kind": "tokens"}},
            "outputs": {
                "codes": {"type": f"i32[{dimensions['codebooks']}]", "kind": "tokens", "from": "ear_tts.codes"},
                "hidden": {"type": rows, "kind": "features", "from": "ear_tts.hidden"},
            },
        },
        "components": [part],
        "tensors": {
            "ear_tts.codec_silence_tokens": "tts_model.codec_silence_tokens", **mapped, "ear_tts.*": f"{PREFIX}*",
        },
        "ignored_tensors": [f"{PREFIX}*", "characters"],
    }  # fmt: skip
    return ModelSpec.from_data(data)


def played(cohort: Cohort, tokens: Array = TOKENS, seed: Array = SEED) -> dict[str, Array]:
    """Every output of one session over the steps. The seed of later steps is not looked at."""
    session = cohort.join()
    given = [{"token": token, "seed": seed if n == 0 else seed + n} for n, token in enumerate(tokens)]
    steps = [cohort.beat({session: inputs})[session] for inputs in given]
    cohort.leave(session)
    return {port: np.stack([s[port] for s in steps]) for port in steps[0]}


# --- another program ----------------------------------------------------------------------------------------------
def published(folder: Path, seed: int = 3) -> dict[str, Array]:
    """Random tensors under the published names, in a file of that folder; values under which every part matters."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, type in expected_tensors(spec(**SPELLED)).items():
        if type.dtype.value == "i32":
            continue
        values = rng.standard_normal(type.shape)
        if name.endswith("rvq_embs"):
            values *= 0.8 ** np.arange(31)[:, None, None]
        elif len(type.shape) > 1:
            larger = next((gain for part, gain in LARGER.items() if part in name), 1.0)
            values *= type.shape[-1] ** -0.5 * larger
        else:
            values *= 0.3
        tensors[name] = values.astype(np.float32)
    lengths = rng.integers(1, LONGEST + 1, VOCAB)
    characters = rng.integers(0, 256, (VOCAB, LONGEST))
    characters[np.arange(LONGEST) >= lengths[:, None]] = 256
    flags = rng.integers(0, 2, VOCAB + 1)
    specials = np.zeros(VOCAB, np.int64)
    specials[1], specials[EOS] = 1, 2
    tensors |= {
        "characters": characters.astype(np.int32),
        f"{PREFIX}embed_subword.subword_flag_emb.is_continuation": flags,
        f"{PREFIX}embed_subword.bos_eos_emb.special_flags": specials,
        "tts_model.codec_silence_tokens": rng.integers(0, 8, 31),
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def stripped(tensors: dict[str, Array], prefix: str) -> dict[str, Any]:
    """Tensors for `load_state_dict` of the part with that prefix."""
    import torch

    whole = PREFIX + prefix
    return {name.removeprefix(whole): torch.tensor(t) for name, t in tensors.items() if name.startswith(whole)}


class Original:
    """The other program. `codes` [steps, 31], `hidden` [steps, 2, d] and the decoder's inputs `rows` [2, steps, d]."""

    def __init__(self, tensors: dict[str, Array], **changes: Any) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self.torch, self.tensors = torch, tensors
        self.settings = {"guidance_scale": 0.2, "top_p": 0.95, "noise_scale": 0.001, "gumbel": True, **changes}
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
        shape = {name: SMALL[name] for name in names}
        config = transformers.Gemma3TextConfig(
            vocab_size=8, num_key_value_heads=2, query_pre_attn_scalar=256, sliding_window=7500, **shape,
            sliding_window_pattern=2, attn_implementation="eager",
        )  # fmt: skip
        assert config.layer_types == ["sliding_attention", "full_attention"]
        thetas = {kind: config.rope_parameters[kind]["rope_theta"] for kind in set(config.layer_types)}
        assert thetas == {"sliding_attention": 1e4, "full_attention": 1e6}
        self.decoder = transformers.Gemma3TextModel(config).eval()
        left = self.decoder.load_state_dict(stripped(tensors, "backbone."), strict=False)
        assert left.missing_keys == ["embed_tokens.weight"] and not left.unexpected_keys
        with torch.no_grad():
            self.vectors = self._vectors(transformers, shape)
            self._run()

    def weight(self, name: str) -> Array:
        return np.asarray(self.tensors[PREFIX + name], np.float64)

    def _vectors(self, transformers: Any, shape: dict[str, int]) -> Array:
        """The vectors of all tokens [vocab, d]."""
        torch, encoder_config = self.torch, {**shape, "num_hidden_layers": 1}
        from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

        module = transformers.T5GemmaModuleConfig(
            vocab_size=257, num_key_value_heads=2, query_pre_attn_scalar=256, **encoder_config,
            attn_implementation="eager", dropout_rate=0.0,
        )  # fmt: skip
        encoder = T5GemmaEncoder(module).eval().double()
        left = encoder.load_state_dict(stripped(self.tensors, "embed_subword.backbone.encoder."), strict=False)
        assert left.missing_keys == ["embed_tokens.weight"] and not left.unexpected_keys
        ids = torch.tensor(self.tensors["characters"]).long()
        mask = (ids < 256).long()
        embedded = torch.tensor(self.weight("embed_subword.embed_tokens.weight"))[ids]
        made = encoder(inputs_embeds=embedded, attention_mask=mask).last_hidden_state.numpy()
        mean = (made * mask.numpy()[..., None]).sum(1) / mask.numpy().sum(1)[:, None]
        flags = self.tensors[f"{PREFIX}embed_subword.subword_flag_emb.is_continuation"][:VOCAB]
        specials = self.tensors[f"{PREFIX}embed_subword.bos_eos_emb.special_flags"]
        return (
            mean @ self.weight("embed_subword.proj_embedding.weight").T
            + self.weight("embed_subword.subword_flag_emb.cont_emb.weight")[flags]
            + self.weight("embed_subword.bos_eos_emb.special_emb.weight")[specials]
        )

    def _run(self) -> None:
        cache, before, rows, hidden, codes = None, np.full(31, 8), [], [], []
        for step, token in enumerate(TOKENS):
            if token == EOS:
                before = self.tensors["tts_model.codec_silence_tokens"]
            rows.append(self._fused(token, before))
            given = self.torch.tensor(rows[-1][:, None]).float()
            place = self.torch.full((2, 1), 37 + step)
            made = self.decoder(inputs_embeds=given, position_ids=place, cache=cache, use_cache=True)
            cache = made.cache
            hidden.append(made.last_hidden_state[:, 0].double().numpy())
            before = self._draw(hidden[-1], step)
            codes.append(before)
        self.codes, self.hidden, self.rows = np.stack(codes), np.stack(hidden), np.stack(rows, axis=1)

    def whole(self) -> Array:
        """The decoder over all positions at once, without a cache: [steps, 2, d]."""
        given, place = self.torch.tensor(self.rows).float(), 37 + self.torch.arange(STEPS)[None].repeat(2, 1)
        with self.torch.no_grad():
            made = self.decoder(inputs_embeds=given, position_ids=place, use_cache=False)
        return np.asarray(made.last_hidden_state.numpy().transpose(1, 0, 2))

    def _norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + self.weight(f"{name}.weight")))

    def _sum(self, codes: Array) -> Array:
        """The rows of these codes, of the first books; 8 is no code."""
        rows = [self.weight("rvq_embs")[book, code] for book, code in enumerate(codes) if code < 8]
        return np.asarray(np.sum(rows, axis=0)) if rows else np.zeros(16)

    def _fused(self, token: int, codes: Array) -> Array:
        name = "gated_fusion_audio_text"
        audio = self.weight("embed_code.weight") @ self._sum(codes)
        gate, scale = (1 / (1 + np.exp(-self.weight(f"{name}.{n}"))) for n in ("gate", "residual_scale"))
        text = np.stack([self.vectors[token], self.weight("null_emb")])
        of_audio, of_text = (
            x @ self.weight(f"{name}.{n}_proj.weight").T + self.weight(f"{name}.{n}_proj.bias")
            for x, n in ((audio / 31, "audio"), (text, "text"))
        )
        return self._norm(scale * (gate * of_audio + (1 - gate) * of_text), f"{name}.final_norm")

    def _draw(self, hidden: Array, step: int) -> Array:
        """The 31 codes of a step. Greedy in books; one row after guidance."""
        s, head = self.settings, "mog_head"
        uniform, normal = (
            make(LIBRARY.get(name), {"shape": (5, n), "stream": stream}).meaning(SEED, np.int64(step))
            for name, n, stream in (("random_uniform", 24, 0), ("random_normal", 16, 1))
        )
        codes: list[int] = []
        for i, count in enumerate((1, 1, 3, 4, 22)):
            x = hidden + self.weight("embed_code.weight") @ self._sum(np.array(codes))
            for j in range(3):
                name = f"{head}.mlp_stack.{j}"
                y = self._norm(x, f"{name}.pre_norm")
                gate, up = (y @ self.weight(f"{name}.mlp.{n}_proj.weight").T for n in ("gate", "up"))
                y = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
                x = x + self._norm(y @ self.weight(f"{name}.mlp.down_proj.weight").T, f"{name}.post_norm")
            x = self._norm(x, f"{head}.mlp_stack.3")
            x = x[0] + s["guidance_scale"] * (x[0] - x[1])
            logits = self.weight(f"{head}.proj_logits.weight") @ x
            probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            ascending = np.argsort(probabilities)
            tail = ascending[np.cumsum(probabilities[ascending]) <= 1 - s["top_p"]]
            chosen = np.log(probabilities)
            chosen[tail] = -np.inf
            if s["gumbel"]:
                chosen = chosen - np.log(-np.log(uniform[i] + 1e-8) + 1e-8)
            k = int(chosen.argmax())
            level = np.exp(max(float((self.weight(f"{head}.proj_logs.weight") @ x)[0]), -4.0))
            mean = self.weight(f"{head}.low_mat")[k] @ (self.weight(f"{head}.proj_mus.weight")[4 * k : 4 * k + 4] @ x)
            z = level * mean + self.weight(f"{head}.proj_else.weight") @ x + s["noise_scale"] * level * normal[i]
            for book in self.weight("rvq_embs")[len(codes) : len(codes) + count]:
                codes.append(int(((z - book) ** 2).sum(-1).argmin()))
                z = z - book[codes[-1]]
        return np.array(codes)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Array], Path]:
    folder = tmp_path_factory.mktemp("original")
    return published(folder), folder


@pytest.fixture(scope="module")
def cohort(tensors: Any, shared: Settings) -> Any:
    """Makes cohorts of the published file on one thread; kept until the file's tests are done."""
    made: dict[Any, Cohort] = {}

    def load(folder: Path = tensors[1], **changes: Any) -> Cohort:
        key = (folder, *changes.items())
        if key not in made:
            model, capacity = spec(**{**SPELLED, **changes}), 1 if changes else 8
            made[key] = registry.load(
                model, capacity=capacity, target="cpu", threads=1, weights=folder, where=shared
            )  # fmt: skip
        return made[key]

    yield load
    for one in made.values():
        one.close()


def near(found: Array, wanted: Array) -> float:
    """Largest relative error of a row, in root mean square."""
    return float(np.max(np.sqrt(((found - wanted) ** 2).mean(-1) / (wanted**2).mean(-1))))


@pytest.mark.oracle
def test_codes_and_hidden_states_are_those_of_another_program(tensors: Any, cohort: Callable[..., Cohort]) -> None:
    wanted, found = Original(tensors[0]), played(cohort())
    assert near(found["hidden"].reshape(wanted.hidden.shape), wanted.hidden) < 1e-4
    assert near(found["hidden"].reshape(wanted.hidden.shape), wanted.whole()) < 1e-4, "a step is a re-run of its prefix"
    np.testing.assert_array_equal(found["codes"].reshape(STEPS, 31), wanted.codes)
    assert all(len(set(column)) > 2 for column in wanted.codes.T), "codes that say nothing"


@pytest.mark.oracle
def test_without_noise_nothing_is_drawn_and_without_guidance_the_row_without_text_is_ignored(
    tensors: Any, cohort: Callable[..., Cohort], tmp_path: Path
) -> None:
    from safetensors.numpy import save_file

    other = {**tensors[0], f"{PREFIX}null_emb": -tensors[0][f"{PREFIX}null_emb"]}
    save_file(other, tmp_path / "model.safetensors")
    settings = {"noise_scale": 0.0, "gumbel": False, "guidance_scale": 0.0}
    still, without_text = cohort(**settings), cohort(tmp_path, **settings)
    found, changed = played(still), played(without_text)
    np.testing.assert_array_equal(found["codes"].reshape(STEPS, 31), Original(tensors[0], **settings).codes)
    np.testing.assert_array_equal(found["codes"], played(still, seed=SEED + 1)["codes"])
    np.testing.assert_array_equal(found["codes"], changed["codes"])
    c, u = (
        np.stack([run["hidden"].reshape(STEPS, 2, SMALL["hidden_size"])[:, row] for run in (found, changed)])
        for row in (0, 1)
    )
    assert (c[0] == c[1]).all() and (u[0] != u[1]).any()


# --- random numbers, and sessions beside each other ---------------------------------------------------------------
def test_a_seed_gives_the_same_codes_in_any_slot_and_company(cohort: Callable[..., Cohort]) -> None:
    eight, rng = cohort(), np.random.default_rng(0)
    alone, other = played(eight), played(eight, seed=SEED[::-1].copy())
    assert (alone["codes"] != other["codes"]).mean() > 0.3
    assert (alone["codes"] == played(eight)["codes"]).all(), "a slot is used again"
    others = [eight.join() for _ in range(5)]
    session = eight.join()
    others.append(eight.join())
    assert session.slot == 5
    for step, token in enumerate(TOKENS):
        if step == 6:  # whoever joins and leaves, too
            eight.leave(others.pop(0))
            others.append(eight.join())
        inputs = {session: {"token": token, "seed": SEED}}
        for company in others:  # tokens that no tokenizer gives among them
            choices = np.array([-1, 0, 3, EOS, VOCAB, 2**31 - 1], np.int32)
            inputs[company] = {"token": rng.choice(choices), "seed": rng.integers(-99, 99, 2).astype(np.int32)}
        made = eight.beat(inputs)[session]
        for port in alone:
            np.testing.assert_array_equal(made[port], alone[port][step], err_msg=f"{port}, step {step}")
    for one in (session, *others):
        eight.leave(one)


def test_without_a_seed_port_the_spec_says_it(cohort: Callable[..., Cohort], tensors: Any) -> None:
    """By the graph's meaning, which the kernel agrees with on the codes."""
    data = spec(**SPELLED, seed=SEED.tolist()).to_data()
    del data["ports"]["inputs"]["seed"]
    data["components"][0]["input"] = "token"
    reference = Reference(build_graph(ModelSpec.from_data(data), context=4), tensors[0])
    found = [reference.step({"token": token})["codes"] for token in TOKENS[:4]]
    np.testing.assert_array_equal(np.stack(found), played(cohort(), TOKENS[:4])["codes"].reshape(4, 31))


# --- as data ------------------------------------------------------------------------------------------------------
def test_the_schedule_of_masks() -> None:
    left = masked_codes(31, 8, 3.0)
    assert left == [31, 31, 31, 31, 30, 29, 26, 22, 0]
    assert [a - b for a, b in pairwise(left)] == [0, 0, 0, 1, 1, 3, 4, 22]
    (part,) = spec().components
    assert part.passes == (1, 1, 3, 4, 22)  # type: ignore[attr-defined]
    (one,) = spec(num_iter=1).components
    assert one.passes == (31,)  # type: ignore[attr-defined]


def test_the_published_names_and_shapes_are_expected() -> None:
    model = spec(FULL, subwords="characters", max_characters=64)
    found = {name: type for name, type in expected_tensors(model).items() if name.startswith(PREFIX)}
    floats = sum(type.size for type in found.values() if type.dtype.is_float)
    # Of the 418: without audio_prompt_projection_W [1152, 1152], bos_emb [1152] and two pad_tensor [].
    assert len(found) == 418 - 4
    assert floats == 796_982_465 - 1152 * 1152 - 1152
    assert sum(type.size for type in found.values()) - floats == 262_145 - 0 and PREFIX + "bos_emb" not in found
    shapes = {name.removeprefix(PREFIX): type.shape for name, type in found.items()}
    assert shapes["backbone.layers.27.self_attn.q_norm.weight"] == (72,)
    assert shapes["backbone.layers.0.mlp.down_proj.weight"] == (1152, 4608)
    assert shapes["rvq_embs"] == (31, 1024, 512) and shapes["mog_head.low_mat"] == (1024, 512, 64)
    assert shapes["mog_head.proj_mus.weight"] == (65536, 1152) and shapes["mog_head.mlp_stack.3.weight"] == (1152,)
    assert shapes["embed_subword.subword_flag_emb.is_continuation"] == (131073,)
    assert shapes["gated_fusion_audio_text.residual_scale"] == ()
    assert parameter_count(spec(FULL)) == floats - 22_868_352 + 131072 * 1152 + 31


def test_state_is_that_of_the_layers() -> None:
    graph = build_graph(spec(FULL), context=1500)
    kinds = {s.name.removeprefix("ear_tts."): (s.kind, str(s.value.type)) for s in graph.states}
    assert kinds["backbone.layers.0.k"] == (StateKind.CACHE, "f32[1500,32,72]")
    assert {name: kinds[name][1] for name in ("codes", "seed", "position")} == {
        "codes": "i32[31]", "seed": "i32[2]", "position": "i32[]",
    }  # fmt: skip
    assert state_bytes(graph) == {"fixed": 4 * (31 + 2 + 1), "per_step": 516_096}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 23}, "wanted an even head_dim, found 23"),
        ({"eos_id": VOCAB}, "wanted eos_id below vocab_size 20, found 20"),
        ({"subwords": "characters"}, "wanted max_characters with subwords: characters alone"),
        ({"max_characters": 3}, "wanted max_characters with subwords: characters alone"),
        ({"seed": [2**31, 0]}, "wanted two i32 as seed"),
        ({"top_p": 0.0}, "top_p"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_dimensions_that_cannot_be_built_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(**change)
    assert said in str(refused.value)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"attention that forgets is not built; wanted at most 7500 positions"):
        build_graph(spec(), context=7464)
    assert build_graph(spec(), context=7463)
    data = spec().to_data()
    data["ports"]["inputs"]["seed"]["type"] = "i32[3]"
    with pytest.raises(SpecError, match=r"the seed of speech synthesis; wanted i32\[2\]"):
        build_graph(ModelSpec.from_data(data))
