"""The whole conversation: what goes from part to part, whatever the beat, the slot and the company."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk import registry
from wpk.ir.types import Type, parse_type
from wpk.kernel.layout import shape_of
from wpk.kernel.plan import require_sizes
from wpk.ops.requirements import Selection
from wpk.registry import Cohort
from wpk.registry.formats import open_path
from wpk.registry.load import open_weights
from wpk.registry.models import find_model
from wpk.registry.settings import Settings
from wpk.registry.weights import check_inventory
from wpk.registry.weights.synthesize import synthesize
from wpk.scheduler.compile import compile_graph
from wpk.scheduler.target import find_target
from wpk.zoo.build import build_graph, expected_tensors
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
STEPS, PAD = 10, 12
INNER = {  # what else a test looks at: port -> type, where it is made
    "encoded": ("f32[64]", "fastconformer.encoded"),
    "projected": ("f32[128]", "fastconformer.projected"),
    "fused": ("f32[128]", "fusion"),
    "agent": ("i32[]", "nemotron_h.lm_head"),
    "is_blank": ("i32[]", "rnnt_greedy.is_blank"),
    "codes": ("i32[8]", "ear_tts.codes"),
}


@functools.cache
def opened(steps_per_beat: int = 2) -> ModelSpec:
    """The small model with its inner values as outputs."""
    data = find_model("voicechat-tiny").to_data()
    ports = {name: {"type": type, "kind": "features", "from": source} for name, (type, source) in INNER.items()}
    data["ports"]["outputs"] |= ports
    data["clock"]["steps_per_beat"] = steps_per_beat
    return ModelSpec.from_data(data | {"context": 40})


@pytest.fixture(scope="module")
def two(shared: Settings) -> Any:
    with registry.load(opened(), capacity=3, target="cpu", where=shared) as cohort:
        yield cohort


@functools.cache
def audio(seed: int = 0) -> Array:
    """[steps, samples]: noise that swells and dies away."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal(STEPS * 1280) * np.sin(np.linspace(0, 9, STEPS * 1280)) * 0.3
    return samples.reshape(STEPS, 1280).astype(np.float32)


def played(cohort: Cohort, given: Array, *, seed: int = 0, behind: int = 0) -> dict[str, Array]:
    """Every output of one session, [steps, ...]; behind: noisy sessions that join before it and stay."""
    others = [cohort.join(seed=99 + i) for i in range(behind)]
    session, per_beat = cohort.join(seed=seed), cohort.spec.clock.steps_per_beat
    noise = np.random.default_rng(7).standard_normal((len(given), 1280)).astype(np.float32)
    found = []
    for first in range(0, len(given), per_beat):
        inputs = {other: {"audio": noise[first : first + per_beat]} for other in others}
        inputs[session] = {"audio": given[first : first + per_beat]}
        outputs = cohort.beat(inputs)[session]
        found.append({name: rows.reshape(per_beat, -1) for name, rows in outputs.items()})
    for one in (*others, session):
        cohort.leave(one)
    return {name: np.concatenate([beat[name] for beat in found]) for name in found[0]}


def bits(outputs: dict[str, Array]) -> dict[str, bytes]:
    return {name: rows.tobytes() for name, rows in outputs.items()}


# --- what goes from part to part ----------------------------------------------------------------------------------
def test_the_backbone_reads_what_was_said_and_called_one_step_before(two: Cohort, shared: Settings) -> None:
    found = played(two, audio())
    table = open_weights(opened(), None, shared).read("stt_model.embed_tokens.weight")
    rounded = (table.view(np.uint32) + 0x7FFF + ((table.view(np.uint32) >> 16) & 1) >> 16 << 16).view(np.float32)
    said, called = (np.concatenate([[PAD], found[port].ravel()[:-1]]) for port in ("text", "function"))
    wanted = found["projected"] + rounded[said] + 2 * rounded[called]
    np.testing.assert_allclose(found["fused"], wanted, rtol=1e-6, atol=1e-6)
    assert len(set(said.tolist())) > 1 and len(set(called.tolist())) > 1
    assert not np.allclose(found["fused"], found["projected"] + rounded[said] + rounded[called], atol=1e-3)


def test_what_is_heard_depends_on_the_audio_and_what_is_spoken_on_the_text(two: Cohort) -> None:
    found, other = played(two, audio()), played(two, audio(1))
    for name in ("encoded", "fused"):
        assert found[name].tobytes() != other[name].tobytes(), name
    same = (found["text"] == other["text"]).all()
    assert (found["codes"].tobytes() == other["codes"].tobytes()) == same
    assert np.isfinite(found["speech"]).all() and 1e-4 < np.abs(found["speech"]).max() < 2.0
    assert found["speech"].shape == (STEPS, 1764) and found["user_text"].shape == (STEPS, 10)
    assert set(found["is_blank"].ravel().tolist()) <= {0, 1}


# --- the same, whatever else there is -------------------------------------------------------------------------------
def test_two_steps_in_one_beat_are_two_beats_of_one(two: Cohort, shared: Settings) -> None:
    with registry.load(opened(1), capacity=1, target="cpu", where=shared) as one:
        assert bits(played(one, audio(), seed=5)) == bits(played(two, audio(), seed=5))


def test_a_seed_gives_the_same_audio_in_any_slot_and_company(two: Cohort) -> None:
    alone = bits(played(two, audio(), seed=5))
    assert bits(played(two, audio(), seed=5, behind=2)) == alone
    other = bits(played(two, audio(), seed=6))
    assert {name for name in alone if alone[name] != other[name]} >= {"codes", "speech"}
    assert all(alone[name] == other[name] for name in ("encoded", "text", "user_text"))  # nothing random in them


# --- the full size --------------------------------------------------------------------------------------------------
PUBLISHED = {  # group -> tensors and values of the published checkpoint that the model reads
    "stt_model.llm": (339, 7_713_822_208), "stt_model.embed_tokens": (1, 587_202_560),
    "stt_model.lm_head": (1, 587_202_560), "stt_model.function_head": (1, 587_202_560),
    "stt_model.perception": (640, 613_767_056), "stt_model.rnnt_decoder": (9, 7_219_840),
    "stt_model.rnnt_joint": (6, 1_723_265), "tts_model.codec_silence_tokens": (1, 31),
}  # fmt: skip


def test_the_full_size_expects_the_published_tensors() -> None:
    spec = find_model("voicechat")
    expected = expected_tensors(spec)
    groups, values = Counter[str](), Counter[str]()
    for name, type in expected.items():
        group = ".".join(name.split(".")[:2])
        groups[group] += 1
        values[group] += type.size
    assert {group: (groups[group], values[group]) for group in PUBLISHED} == PUBLISHED
    # Spellings come from the tokenizer, not from the checkpoint; the rest is all of it, read or named as unused.
    spellings = expected.pop("tts_model.tts_model.embed_subword.characters")
    assert spellings.shape == (131_072, 64) and not expected.keys() & spec.unused.keys()
    published = expected | spec.unused
    assert len(published) == 1_629 + 3
    # The published count of integers leaves two scalars out.
    assert sum(type.size for type in published.values()) == 11_095_328_626 + 3 + 31 + 37 * 1152 + 2
    codec = [type for name, type in published.items() if name.startswith("tts_model.audio_codec.")]
    assert (len(codec), sum(type.size for type in codec)) == (214, 199_943_967)


NARROW: dict[str, dict[str, Any]] = {  # component -> dimensions; the layers are as many as at full size
    "log_mel": {"n_mels": 32},
    "fastconformer": {"d_model": 16, "heads": 2, "subsampling_conv_channels": 4, "projection": 64},
    "rnnt_greedy": {"vocab_size": 16, "units": 8, "joint_units": 8},
    "fusion": {"entries": 32, "units": 64},
    "prompt_rows": {"entries": 32, "units": 64},
    "nemotron_h": {
        "vocab_size": 32, "hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    },
    "ear_tts": {
        "vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 32,
        "latent_size": 8, "codebook_size": 8, "mixture_components": 8, "mixture_rank": 4, "max_characters": 4,
    },
    "rvq_embedding": {"codebook_size": 8, "codebook_dim": 8},
    "convnext_upsampler": {"channels": [16, 8, 4]},
}  # fmt: skip


def narrow() -> ModelSpec:
    """The full model with few numbers in each tensor."""
    data = find_model("voicechat").to_data()
    parts = [*data["components"], *(part for one in data["prefill"].values() for part in one["components"])]
    for part in parts:
        part |= NARROW.get(part.get("name", part["kind"]), {})
    latent = data["prefill"]["voice"]["inputs"]["latent"]
    latent |= {"type": "f32[16]", "shape": [1, 37, 16]}
    unused = {name: parse_type(type) for name, type in data["unused_tensors"].items()}
    data["unused_tensors"] = {n: str(Type(t.dtype, tuple(min(d, 4) for d in t.shape))) for n, t in unused.items()}
    return ModelSpec.from_data(data)


def test_a_checkpoint_with_every_published_name_can_be_made_small(tmp_path: Path) -> None:
    spec, full = narrow(), find_model("voicechat")
    made = synthesize(spec, tmp_path / "model.safetensors")
    assert made.bytes < 8_000_000
    found = open_path(made.file)
    assert set(found.tensors) == {*expected_tensors(full), *full.unused}
    shapes, spare = ({n: t.shape for n, t in some.items()} for some in (expected_tensors(spec), spec.unused))
    assert check_inventory(shapes, found, unused=spare).ok


def test_the_full_size_compiles_for_a_gpu_within_what_is_published_of_it() -> None:
    """Capacity 56 and 1,500 steps, without a GPU. Weights and state are known: about 24.3 GB, and 0.97 GB a session."""
    spec, target = find_model("voicechat"), find_target("h200")
    graph = build_graph(spec, context=1500)
    made = compile_graph(graph, Selection(spec.operators), target, capacity=56, steps=spec.clock.steps_per_beat)
    weights, state, activations, _ = made.program.arenas
    assert weights == pytest.approx(24.3e9, rel=0.01) and state == pytest.approx(56 * 0.970e9, rel=0.03)
    assert activations < 1e9 and weights + state + activations < 80e9
    assert made.floor.bytes["weights"] == pytest.approx(45.4e9, rel=0.02)  # a beat: two steps, the codec once
    assert made.floor.bandwidth_ms == pytest.approx(35.7, rel=0.03)
    assert made.floor.floor_ms == made.floor.bandwidth_ms < made.predicted_ms < 160
    assert made.floor.flops["tf32"] == pytest.approx(1.11e12, rel=0.02)  # speech, codec, recognition, subsampling
    assert made.floor.flops["f32"] < 0.1e12 and made.floor.compute_ms < 6
    small = find_model("voicechat-tiny")
    tiny = compile_graph(build_graph(small), Selection(small.operators), target, capacity=8, steps=2)
    assert set(made.program.operators) == set(tiny.program.operators)
    require_sizes(made.program, shape_of(made.program.operators, 56))
