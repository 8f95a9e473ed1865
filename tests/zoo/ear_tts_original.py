"""A small speech synthesis as a spec, random tensors for it, and another program that reads them.

The other program is made of `transformers`' Gemma-3 text model (decoder, float32) and T5Gemma encoder (vectors of
tokens), and of what is written here from the published description: fusion, and the drawing of codes in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk.ops.operator import LIBRARY, make
from wpk.zoo.build import expected_tensors
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
PREFIX = "tts_model.tts_model."
STEPS, EOS, VOCAB, LONGEST = 12, 2, 20, 7
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24,
    "intermediate_size": 64, "sliding_window_pattern": 2, "latent_size": 16, "codebooks": 31, "codebook_size": 8,
    "mixture_components": 24, "mixture_rank": 4, "eos_id": EOS, "noise_scale": 0.2,
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
VOICE, LATENTS = 5, "tts_model.audio_prompt_latents.Aria"  # positions, and what is heard at them
SPOKEN = [-1, -1, -1, 12, EOS]  # the text there


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
        "ignored_tensors": [f"{PREFIX}*", "characters", LATENTS],
    }  # fmt: skip
    return ModelSpec.from_data(data)


def voiced() -> ModelSpec:
    """The same with a voice behind every session."""
    latent = {"type": f"f32[{SMALL['hidden_size']}]", "tensor": LATENTS, "shape": [1, VOICE, SMALL["hidden_size"]]}
    prefill = {
        "steps": VOICE,
        "inputs": {
            "latent": latent,
            "spoken": {"type": "i32[]", "values": SPOKEN},
            "begins": {"type": "i32[]", "values": [0] * (VOICE - 1) + [1]},
        },
        "components": [{"use": "ear_tts", "kind": "ear_tts_voice", "input": ["latent", "spoken", "begins"]}],
    }
    return ModelSpec.from_data(spec(**SPELLED).to_data() | {"prefill": {"voice": prefill}})


def published(folder: Path, seed: int = 3) -> dict[str, Array]:
    """Random tensors under the published names, in a file of that folder; values under which every part matters."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, type in expected_tensors(voiced()).items():
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
    """The other program. `codes` [steps, 31], `hidden` [steps, 2, d] and the decoder's inputs `rows` [2, steps, d].

    voice: start behind the voice's positions.
    """

    def __init__(self, tensors: dict[str, Array], *, voice: bool = False, **changes: Any) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self.torch, self.tensors = torch, tensors
        self.settings = {"guidance_scale": 0.2, "top_p": 0.95, "noise_scale": 0.2, "gumbel": True, **changes}
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
            self._run(self._voice() if voice else [])

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

    def _voice(self) -> list[Array]:
        """The decoder's inputs [2, d] at the voice's positions."""
        silence = self.weight("embed_code.weight") @ self._sum(self.tensors["tts_model.codec_silence_tokens"])
        audio = [*np.asarray(self.tensors[LATENTS][0, :-1], np.float64), silence + self.weight("bos_emb")]
        kinds = ("subword_flag_emb.cont_emb", "bos_eos_emb.special_emb")
        nothing = np.sum([self.weight(f"embed_subword.{kind}.weight")[0] for kind in kinds], axis=0)
        texts = [nothing if token < 0 else self.vectors[token] for token in SPOKEN]
        return [self._fuse(a, t) for a, t in zip(audio, texts, strict=True)]

    def _run(self, prefix: list[Array]) -> None:
        cache, before, rows, hidden, codes = None, np.full(31, 8), [], [], []
        for position, row in enumerate(prefix):
            given = self.torch.tensor(row[:, None]).float()
            place = self.torch.full((2, 1), position)
            cache = self.decoder(inputs_embeds=given, position_ids=place, cache=cache, use_cache=True).cache
        for step, token in enumerate(TOKENS):
            if token == EOS:
                before = self.tensors["tts_model.codec_silence_tokens"]
            rows.append(self._fused(token, before))
            given = self.torch.tensor(rows[-1][:, None]).float()
            place = self.torch.full((2, 1), (len(prefix) or 37) + step)
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
        return self._fuse(self.weight("embed_code.weight") @ self._sum(codes), self.vectors[token])

    def _fuse(self, audio: Array, vector: Array) -> Array:
        name = "gated_fusion_audio_text"
        gate, scale = (1 / (1 + np.exp(-self.weight(f"{name}.{n}"))) for n in ("gate", "residual_scale"))
        text = np.stack([vector, self.weight("null_emb")])
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
