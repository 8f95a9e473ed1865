"""Speech synthesis a frame at a time: EAR-TTS (NVIDIA NeMo), a Gemma-3-style decoder over text and audio codes.

`ear_tts_layers` has the decoder's layers, `ear_tts_mixture` how a frame's codes are drawn from its hidden state.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import f32, i32
from wpk.zoo.component import Built, Component, Count, Size, after_step, component, reshape
from wpk.zoo.components.ear_tts_layers import Backbone, rms_norm
from wpk.zoo.components.ear_tts_mixture import Mixture, masked_codes
from wpk.zoo.tensors import Tensors

_Eps = Annotated[float, Field(gt=0.0, le=1.0)]
_NotNegative = Annotated[float, Field(ge=0.0, le=1e3)]
_AtLeastOne = Annotated[float, Field(ge=1.0, le=1e9)]

CHARACTERS = 257  # bytes, and the one that fills entries up
KINDS_OF_SPECIALS = 3  # none, beginning, end
SOFTCAP = 50.0  # of the scores of the encoder of characters
ENCODER_THETA = 10000.0


@component("ear_tts")
class EarTts(Component):
    """One frame of speech: a text token i32[], and optionally a seed i32[2] -> `codes` i32[codebooks] of a codec.

    The codes of the frame before come in again (at first, none). Where the token is `eos_id`, those of silence
    (parameter codec_silence_tokens) take their place. Their books' rows are added up, embed_code makes them a vector of
    hidden_size; a gate mixes it with the token's vector, in two rows: c with the text, u with `null_emb` instead
    (classifier-free guidance, Ho & Salimans 2022). Both rows go through the decoder, each with keys and values of its
    own; `hidden` f32[2, hidden_size] is what it gives. The codes are drawn from it in a few passes (see `Mixture`).

    The seed is read in a session's first step and kept; without that input it is `seed`. Random numbers depend on seed,
    step and `random_stream` alone.

    subwords: where the vectors of tokens come from. `table`: parameter embed_subword.table [vocab_size, hidden_size].
    `characters`: the table is made from the published embed_subword.* when weights are loaded, in float64 and in pieces
    (`character_table`): at full size 4e13 operations or so, at every load and for a voice once more, each an hour or
    two on two cores. The
    spelling is the tokenizer's and not in the checkpoint: parameter embed_subword.characters i32[vocab_size,
    max_characters], ids 0..255 and 256 behind an entry's end, which the weights source has to bring beside it. Made-up
    weights (`synthetic`) are below 1 and spell all tokens alike.

    A voice is a prefill of this component, by the kind `ear_tts_voice`; without one the caches start empty.

    All of it is f32 whatever the model's policy; under tf32 products may be TF32. Parameters as published; unused are
    audio_prompt_projection_W and the two pad_tensor of embed_subword, without a voice bos_emb, and with a table all of
    embed_subword. State a session: for each layer a step, caches f32[2 heads, head_dim] of keys and of values; codes
    and seed.
    """

    ARITY: ClassVar[tuple[int, int]] = (1, 2)

    # --- as in config.json ----------------------------------------------------------------------------------------
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    head_dim: Size
    intermediate_size: Size
    query_pre_attn_scalar: _AtLeastOne = 256.0
    sliding_window: Size = 7500
    sliding_window_pattern: Size = 6  # every so many layers, one has full attention
    rope_theta: _AtLeastOne = 1e6  # of those
    rope_local_base_freq: _AtLeastOne = 1e4  # of the others
    rms_norm_eps: _Eps = 1e-6
    # --- codes and their mixture ----------------------------------------------------------------------------------
    latent_size: Size
    codebooks: Size
    codebook_size: Size
    mixture_components: Size
    mixture_rank: Size
    mixture_layers: Size = 3
    min_log_scale: float = -4.0
    # --- sampling -------------------------------------------------------------------------------------------------
    guidance_scale: _NotNegative = 0.2
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    noise_scale: _NotNegative = 0.001
    gumbel: bool = True  # draw the mixture's component; else take the most probable one
    num_iter: Size = 8
    exponent: Annotated[float, Field(gt=0.0, le=100.0)] = 3.0
    seed: tuple[int, int] = (0, 0)
    random_stream: Annotated[int, Field(strict=True, ge=0, lt=1 << 30)] = 0
    # --- text -----------------------------------------------------------------------------------------------------
    eos_id: Count
    subwords: Literal["table", "characters"] = "table"
    max_characters: Size | None = None

    @model_validator(mode="after")
    def _fits_the_operators(self) -> EarTts:
        if self.head_dim % 2:
            raise ValueError(f"wanted an even head_dim, found {self.head_dim}")
        if (self.subwords == "characters") != (self.max_characters is not None):
            raise ValueError("wanted max_characters with subwords: characters alone, found otherwise")
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"wanted eos_id below vocab_size {self.vocab_size}, found {self.eos_id}")
        if any(not -(1 << 31) <= word < 1 << 31 for word in self.seed):
            raise ValueError(f"wanted two i32 as seed, found {list(self.seed)}")
        return self

    def outputs(self) -> tuple[str, ...]:
        return ("codes", "hidden")

    @property
    def passes(self) -> tuple[int, ...]:
        """Codes that each pass fixes; iterations of the schedule that fix none are left out."""
        left = masked_codes(self.codebooks, self.num_iter, self.exponent)
        return tuple(now - after for now, after in pairwise(left) if now > after)

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        self._check(g, inputs)
        books, embed_code = self._books(tensors)
        with g.scope("inputs"):
            sums = g.op("embedding_sum", self._codes_before(g, inputs[0], tensors), books)
            text = g.op("embedding", inputs[0], self._table(g, tensors))
            rows = self._rows(g, g.op("linear", sums, embed_code), text, tensors)
        hidden = self._backbone().build(g, rows, tensors)
        mixture = Mixture(
            self.passes, self.mixture_components, self.mixture_rank, self.mixture_layers, self.intermediate_size,
            self.rms_norm_eps, self.guidance_scale, self.top_p, self.noise_scale, self.gumbel, self.min_log_scale,
            2 * self.random_stream,
        )  # fmt: skip
        codes = mixture.build(g, hidden, self._seed(g, inputs), books, embed_code, tensors)
        g.update(self.state("codes"), codes)
        return {"codes": codes, "hidden": hidden}

    def _books(self, tensors: Tensors) -> tuple[Value, Value]:
        """The codebooks, and the matrix that makes a vector of hidden_size of the sum of their rows."""
        books = tensors.get("rvq_embs", f32(self.codebooks, self.codebook_size, self.latent_size))
        return books, tensors.get("embed_code.weight", f32(self.hidden_size, self.latent_size))

    def _backbone(self) -> Backbone:
        thetas = tuple(
            self.rope_local_base_freq if (i + 1) % self.sliding_window_pattern else self.rope_theta
            for i in range(self.num_hidden_layers)
        )
        return Backbone(
            self.name, self.num_hidden_layers, self.num_attention_heads, self.head_dim, self.intermediate_size,
            self.rms_norm_eps, self.query_pre_attn_scalar**-0.5, thetas,
        )  # fmt: skip

    def _check(self, g: GraphBuilder, inputs: tuple[Value, ...]) -> None:
        for what, value, wanted in zip(("token", "seed"), inputs, (i32(), i32(2)), strict=False):
            if value.type != wanted:
                raise GraphError(f"the {what} of speech synthesis", wanted=wanted, found=value.type)
        positions = g.context + g.behind.get(self.name, 0)
        if positions > self.sliding_window:
            raise GraphError(
                "attention that forgets is not built", wanted=f"at most {self.sliding_window} positions",
                found=positions, hint="Ask for a smaller context.",
            )  # fmt: skip

    def _seed(self, g: GraphBuilder, inputs: tuple[Value, ...]) -> Value:
        """i32[2]: what the first step was given."""
        if len(inputs) < 2:
            return g.op("constant", shape=(2,), values=self.seed, dtype="i32")  # type: ignore[no-any-return]
        kept = g.register(self.state("seed"), i32(2))
        seed = after_step(g, 1, kept, inputs[1])
        g.update(self.state("seed"), seed)
        return seed

    # --- what goes into the decoder ---------------------------------------------------------------------------------
    def _rows(self, g: GraphBuilder, audio: Value, text: Value, tensors: Tensors) -> Value:
        """f32[2, hidden_size]: sigmoid(residual_scale) (gate * audio + (1 - gate) * text), normalised.

        audio, text: vectors of hidden_size; the second row has null_emb for a text.
        """
        width, fusion = f32(self.hidden_size), "gated_fusion_audio_text"
        square = f32(self.hidden_size, self.hidden_size)
        audio_proj, audio_bias, text_proj, text_bias = (
            tensors.get(f"{fusion}.{name}", type)
            for side in ("audio", "text")
            for name, type in ((f"{side}_proj.weight", square), (f"{side}_proj.bias", width))
        )
        gate = g.op("sigmoid", tensors.get(f"{fusion}.gate", width))
        scale = g.op("sigmoid", tensors.get(f"{fusion}.residual_scale", f32()))
        of_audio, of_text = (g.op("mul", x, scale) for x in (gate, g.op("affine", gate, scale=-1.0, offset=1.0)))
        per_book = g.op("affine", audio_proj, scale=1.0 / self.codebooks)
        audio = g.op("mul", g.op("linear", audio, per_book, audio_bias), of_audio)
        text = g.op("linear", text, text_proj, text_bias)
        nothing = g.op("linear", tensors.get("null_emb", width), text_proj, text_bias)  # of weights alone: at load
        c, u = (g.op("add", audio, g.op("mul", side, of_text)) for side in (text, nothing))
        rows = g.op("concat", *(reshape(g, x, (1, self.hidden_size)) for x in (c, u)), axis=0)
        return rms_norm(g, rows, tensors, f"{fusion}.final_norm", self.rms_norm_eps)

    def _codes_before(self, g: GraphBuilder, token: Value, tensors: Tensors) -> Value:
        """i32[codebooks]: those of the step before, or of silence; codebook_size stands for none."""
        shape = (self.codebooks,)
        none = g.op("full", shape=shape, value=self.codebook_size, dtype="i32")
        before = g.register(self.state("codes"), i32(*shape), initial=none)
        silence = tensors.get("codec_silence_tokens", i32(*shape))
        ends = g.op("equal", token, g.op("full", shape=(), value=self.eos_id, dtype="i32"))
        return g.op("select", ends, silence, before)  # type: ignore[no-any-return]

    def _table(self, g: GraphBuilder, tensors: Tensors) -> Value:
        """f32[vocab_size, hidden_size]: the vectors of tokens."""
        table = "embed_subword.table"
        if self.max_characters is None:
            return tensors.get(table, f32(self.vocab_size, self.hidden_size))
        d, inner, f = self.hidden_size, self.num_attention_heads * self.head_dim, self.intermediate_size
        layer, width = "embed_subword.backbone.encoder.layers.0", f32(d)
        shapes = {
            **{f"{layer}.self_attn.{p}_proj.weight": f32(inner, d) for p in "qkv"},
            f"{layer}.self_attn.o_proj.weight": f32(d, inner),
            **{
                f"{layer}.{place}_{part}_layernorm.weight": width
                for part in ("self_attn", "feedforward") for place in ("pre", "post")
            },
            **{f"{layer}.mlp.{p}_proj.weight": f32(f, d) for p in ("gate", "up")},
            f"{layer}.mlp.down_proj.weight": f32(d, f),
            "embed_subword.backbone.encoder.norm.weight": width,
            "embed_subword.proj_embedding.weight": f32(d, d),
        }  # fmt: skip
        with g.scope(table):
            return g.op(  # type: ignore[no-any-return]
                "character_table",
                tensors.get("embed_subword.characters", i32(self.vocab_size, self.max_characters)),
                tensors.get("embed_subword.embed_tokens.weight", f32(CHARACTERS, d)),
                *(tensors.get(name, type) for name, type in shapes.items()), *self._kinds(g, tensors),
                heads=self.num_attention_heads, scale=self.query_pre_attn_scalar**-0.5, softcap=SOFTCAP,
                theta=ENCODER_THETA, eps=self.rms_norm_eps,
            )  # fmt: skip

    def _kinds(self, g: GraphBuilder, tensors: Tensors) -> tuple[Value, Value]:
        """What kind each token is, by whether it goes on a word and which special one it is; the kinds' vectors."""
        d, of_words, of_specials = self.hidden_size, "embed_subword.subword_flag_emb", "embed_subword.bos_eos_emb"
        goes_on = tensors.get(f"{of_words}.is_continuation", i32(self.vocab_size + 1))  # one more, for no token
        goes_on = g.op("slice", goes_on, axis=0, start=0, stop=self.vocab_size)
        special = tensors.get(f"{of_specials}.special_flags", i32(self.vocab_size))
        times = g.op("full", shape=(), value=KINDS_OF_SPECIALS, dtype="i32")
        kinds = g.op("add", g.op("mul", goes_on, times), special)
        words = tensors.get(f"{of_words}.cont_emb.weight", f32(2, d))
        specials = tensors.get(f"{of_specials}.special_emb.weight", f32(KINDS_OF_SPECIALS, d))
        halves = [
            g.op("add", specials, reshape(g, g.op("slice", words, axis=0, start=i, stop=i + 1), (d,))) for i in (0, 1)
        ]
        return kinds, g.op("concat", *halves, axis=0)


@component("ear_tts_voice")
class EarTtsVoice(EarTts):
    """One position of a voice: what `ear_tts` has behind it when a session joins. For prefills of that component.

    Inputs: latent f32[hidden_size], the voice's audio at this position (published as audio_prompt_latents.VOICE);
    token i32[], the text there, or below 0 for none; begins i32[], 1 at the last position, where speech is to begin:
    there the codes of silence and bos_emb stand for the latent. Nothing is drawn. Output: hidden f32[2, hidden_size].

    Where there is no text, what is left of a token's vector is that it goes on no word and is no special one: the first
    rows of cont_emb and special_emb, or zeros with `subwords: table`.
    """

    ARITY: ClassVar[tuple[int, int]] = (3, 3)

    def outputs(self) -> tuple[str, ...]:
        return ("hidden",)

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        latent, token, begins = inputs
        width, zero = f32(self.hidden_size), g.op("full", shape=(), value=0, dtype="i32")
        for what, value, wanted in (("latent", latent, width), ("token", token, i32()), ("begins", begins, i32())):
            if value.type != wanted:
                raise GraphError(f"the {what} of a voice", wanted=wanted, found=value.type)
        with g.scope("inputs"):
            books, embed_code = self._books(tensors)
            silence = tensors.get("codec_silence_tokens", i32(self.codebooks))
            first = g.op("linear", g.op("embedding_sum", silence, books), embed_code)
            first = g.op("add", first, tensors.get("bos_emb", width))
            audio = g.op("select", g.op("greater", begins, zero), first, latent)
            spoken = g.op("embedding", token, self._table(g, tensors))
            text = g.op("select", g.op("less", token, zero), self._no_text(g, tensors), spoken)
            rows = self._rows(g, audio, text, tensors)
        return {"hidden": self._backbone().build(g, rows, tensors)}

    def _no_text(self, g: GraphBuilder, tensors: Tensors) -> Value:
        if self.subwords == "table":
            return g.op("full", shape=(self.hidden_size,), value=0.0)  # type: ignore[no-any-return]
        _, rows = self._kinds(g, tensors)
        return reshape(g, g.op("slice", rows, axis=0, start=0, stop=1), (self.hidden_size,))
