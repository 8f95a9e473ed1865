"""Speech synthesis a frame at a time: against `transformers` and a program in float64, between slots, and as data.

Both programs read one file under the published names, and both are given the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.zoo.ear_tts_original import (
    EOS,
    FULL,
    PREFIX,
    SEED,
    SMALL,
    SPELLED,
    STEPS,
    TOKENS,
    VOCAB,
    VOICE,
    Array,
    Original,
    published,
    spec,
    voiced,
)  # fmt: skip
from wpk import registry
from wpk.ir.errors import SpecError
from wpk.ir.graph import StateKind
from wpk.ops.evaluate import Reference
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.components.ear_tts_mixture import masked_codes
from wpk.zoo.spec import ModelSpec


def played(cohort: Cohort, tokens: Array = TOKENS, seed: Array = SEED) -> dict[str, Array]:
    """Every output of one session over the steps. The seed of later steps is not looked at."""
    session = cohort.join()
    given = [{"token": token, "seed": seed if n == 0 else seed + n} for n, token in enumerate(tokens)]
    steps = [cohort.beat({session: inputs})[session] for inputs in given]
    cohort.leave(session)
    return {port: np.stack([s[port] for s in steps]) for port in steps[0]}


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
def test_a_voice_is_behind_every_session(tensors: Any, shared: Settings) -> None:
    """By the kind "ear_tts_voice"."""
    wanted, without = Original(tensors[0], voice=True), Original(tensors[0])
    with registry.load(voiced(), capacity=2, target="cpu", threads=1, weights=tensors[1], where=shared) as two:
        two.join()  # slot 1 and, later, a slot that is used again
        found, again = played(two), played(two)
    assert near(found["hidden"].reshape(wanted.hidden.shape), wanted.hidden) < 1e-4
    assert near(without.hidden, wanted.hidden) > 0.1
    np.testing.assert_array_equal(found["codes"].reshape(STEPS, 31), wanted.codes)
    assert all((found[port] == again[port]).all() for port in found)


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
    assert part.kind == "ear_tts"
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
    assert sum(type.size for type in found.values()) - floats == 262_145
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
    assert state_bytes(graph) == {"fixed": 4 * (31 + 2 + 2), "per_step": 516_096}


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
        build_graph(spec(), context=7501)
    assert build_graph(spec(), context=7500)
    with pytest.raises(SpecError, match=f"found {7500 + VOICE}"):
        build_graph(voiced(), context=7500)
    data = spec().to_data()
    data["ports"]["inputs"]["seed"]["type"] = "i32[3]"
    with pytest.raises(SpecError, match=r"the seed of speech synthesis; wanted i32\[2\]"):
        build_graph(ModelSpec.from_data(data))
