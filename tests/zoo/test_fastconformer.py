"""FastConformer, step by step on the CPU kernel, against `transformers` on the whole recording.

Weights are random and reach both sides under their published names. With `start: padding` an encoder that streams is
the one that has the whole recording, frame by frame. `start: columns` differs in frame 1, and by that frame's keys,
values and convolved row in later ones; it is compared with the other encoder's own parts in that schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from wpk import registry
from wpk.ir.errors import SpecError
from wpk.ir.graph import StateKind
from wpk.ir.types import DType
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, state_bytes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
STEPS, MELS, CONTEXT = 20, 16, 6  # steps: more than what attention and convolutions look back
SMALL = {
    "layers": 2, "d_model": 64, "heads": 4, "left_context": CONTEXT, "subsampling_conv_channels": 12, "projection": 40,
}  # fmt: skip
PREFIX = "stt_model.perception."
TOLERANCE = 1e-4  # of the greatest number of a frame


def encoder(columns: int = 8, **changes: Any) -> ModelSpec:
    part = SMALL | {"kind": "fastconformer"} | changes
    return _spec([part], {"columns": f"f32[{columns},{MELS}]"}, {"encoded": 64, "projected": 40})


def perception(**changes: Any) -> ModelSpec:
    parts = [{"kind": "log_mel", "n_mels": MELS}, SMALL | {"kind": "fastconformer"} | changes]
    return _spec(parts, {"audio": "f32[1280]"}, {"encoded": 64, "projected": 40})


def _spec(parts: list[dict[str, Any]], inputs: dict[str, str], outputs: dict[str, int]) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "encoder", "version": 1, "task": "asr", "description": "a small encoder",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 1},
        "clock": {"sample_rate": 16000, "samples_per_step": 1280},
        "ports": {
            "inputs": {name: {"type": type, "kind": "features"} for name, type in inputs.items()},
            "outputs": {
                name: {"type": f"f32[{size}]", "kind": "features", "from": f"fastconformer.{name}"}
                for name, size in outputs.items()
            },
        },
        "components": parts, "tensors": {"fastconformer.*": f"{PREFIX}*"},
    }  # fmt: skip
    if parts[0]["kind"] == "log_mel":
        data["tensors"]["log_mel.*"] = f"{PREFIX}preprocessor.featurizer.*"
    return ModelSpec.from_data(data)


def played(cohort: Cohort, port: str, given: Array) -> dict[str, Array]:
    """Every output of one session over the steps."""
    session = cohort.join()
    made = [cohort.beat({session: {port: x}})[session] for x in given]
    cohort.leave(session)
    return {name: np.stack([step[name] for step in made]) for name in made[0]}


def columns(factor: int) -> Array:
    """[steps, factor, mels], step n up to column factor n of a stream; zeros before it, as `log_mel` gives them."""
    made = np.random.default_rng(0).standard_normal((STEPS, factor, MELS)).astype(np.float32) * 2 - 4
    made[0, :-1] = 0
    return made


# --- against transformers -----------------------------------------------------------------------------------------
NAMES = {  # published -> the other implementation's
    "encoder.pre_encode.conv.0.": "subsampling.conv_in.", "encoder.pre_encode.out.": "subsampling.linear.",
    "encoder.pre_encode.conv.2.": "subsampling.layers.0.depthwise_conv.",
    "encoder.pre_encode.conv.3.": "subsampling.layers.0.pointwise_conv.",
    "encoder.pre_encode.conv.5.": "subsampling.layers.1.depthwise_conv.",
    "encoder.pre_encode.conv.6.": "subsampling.layers.1.pointwise_conv.",
    "self_attn.linear_q.": "self_attn.q_proj.", "self_attn.linear_k.": "self_attn.k_proj.",
    "self_attn.linear_v.": "self_attn.v_proj.", "self_attn.linear_out.": "self_attn.o_proj.",
    "self_attn.linear_pos.": "self_attn.relative_k_proj.", "self_attn.pos_bias_": "self_attn.bias_",
    "conv.batch_norm.": "conv.norm.", "encoder.layers.": "layers.",
}  # fmt: skip


class Original:
    """An encoder of `transformers` with random weights, which are in a folder under their published names."""

    def __init__(self, factor: int, folder: Path) -> None:
        self.factor = factor
        self.torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        from safetensors.numpy import save_file

        config = transformers.NemotronAsrStreamingEncoderConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, attention_bias=False,
            convolution_bias=False, conv_kernel_size=9, subsampling_factor=factor, subsampling_conv_channels=12,
            num_mel_bins=MELS, scale_input=False, sliding_window=CONTEXT + 1, default_num_lookahead_tokens=0,
        )  # fmt: skip
        self.model = transformers.NemotronAsrStreamingEncoder(config).eval()
        rng, expected = np.random.default_rng(1), expected_tensors(encoder(factor, subsampling_factor=factor))
        tensors = {name: _random(rng, name, type.shape) for name, type in expected.items()}
        save_file(tensors, folder / "model.safetensors")
        given = {_renamed(name): self.torch.from_numpy(tensor) for name, tensor in tensors.items()}
        self.projection = [given.pop("proj.weight").numpy(), given.pop("proj.bias").numpy()]
        self.model.load_state_dict(given, strict=True)

    def whole(self, given: Array) -> Array:
        """[frames, d] of a recording at once: causal padding, and the attention's window as a mask."""
        return self._encoded(given, None)

    def in_steps(self, given: Array) -> Array:
        """[frames, d]: one column, then s new ones behind s + 1 old ones, zeros where there are none; the last of the
        3 rows that they make. s is the factor."""
        torch, made, s = self.torch, self.model.subsampling, self.factor
        before = np.zeros((s + 1, MELS), np.float32)
        stream = torch.from_numpy(np.concatenate([before, given.reshape(-1, MELS)]))  # [2 s + j] is column j
        with torch.no_grad():
            rows = [made(stream[None, 2 * s : 2 * s + 1])]
            rows += [made(stream[None, s * n : s * n + 2 * s + 1])[:, 2:] for n in range(1, len(given))]
        return self._encoded(given, torch.cat(rows, dim=1))

    def _encoded(self, given: Array, subsampled: Any) -> Array:
        """What the layers make of these rows, or of those that its own subsampling makes."""
        stream = self.torch.from_numpy(given.reshape(-1, MELS)[self.factor - 1 :])
        hook = self.model.subsampling.register_forward_hook(lambda *_: subsampled)  # None: its own
        with self.torch.no_grad():
            made = self.model(stream[None], num_lookahead_tokens=0).last_hidden_state[0].numpy()
        hook.remove()
        return np.asarray(made)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Values under which every part matters: biases and norms that are felt, products of about the size of x."""
    spread = 0.3 if len(shape) == 1 or "pos_bias" in name else math.prod(shape[1:]) ** -0.5
    offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
    return (rng.standard_normal(shape) * spread + offset).astype(np.float32)


def _renamed(name: str) -> str:
    name = name.removeprefix(PREFIX)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Original, Path]]:
    @functools.cache
    def of(factor: int) -> tuple[Original, Path]:
        folder = tmp_path_factory.mktemp("original")
        return Original(factor, folder), folder

    return of


def errors(found: Array, wanted: Array) -> Array:
    """The greatest error of each frame, of its greatest number."""
    return np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize(("factor", "start"), [(8, "padding"), (8, "columns"), (4, "columns")])
def test_every_frame_is_that_of_transformers(factor: int, start: str, original: Any, shared: Settings) -> None:
    theirs, folder = original(factor)
    given = columns(factor)
    wanted, other = theirs.whole(given), theirs.in_steps(given)
    wanted, other = (wanted, other) if start == "padding" else (other, wanted)
    spec = encoder(factor, subsampling_factor=factor, start=start)
    with registry.load(spec, capacity=1, target="cpu", threads=1, weights=folder, where=shared) as cohort:
        found = played(cohort, "columns", given)
    assert errors(found["encoded"], wanted).max() < TOLERANCE
    # With three stages each start is its own: the other one has another frame 1.
    assert errors(found["encoded"], other)[0] < TOLERANCE
    assert (errors(found["encoded"], other)[1] > TOLERANCE) == (factor == 8)
    weight, bias = theirs.projection
    assert errors(found["projected"], wanted @ weight.T + bias).max() < TOLERANCE


# --- between slots ------------------------------------------------------------------------------------------------
def _bits(outputs: dict[str, Array]) -> bytes:
    return b"".join(outputs[port].tobytes() for port in sorted(outputs))


def test_a_session_gets_the_same_bits_in_any_slot_and_company(shared: Settings) -> None:
    rng = np.random.default_rng(2)
    audio = rng.standard_normal((STEPS, 1280)).astype(np.float32)
    with registry.load(perception(), capacity=1, target="cpu", threads=1, where=shared) as cohort:
        heard = []
        for _ in range(2):  # the second time in a slot that was used
            session = cohort.join()
            heard.append([_bits(cohort.beat({session: {"audio": x}})[session]) for x in audio])
            cohort.leave(session)
    alone, again = heard
    assert alone == again
    assert len(set(alone)) == STEPS
    with registry.load(perception(), capacity=7, target="cpu", threads=2, where=shared) as cohort:
        others = [cohort.join() for _ in range(4)]
        for _ in range(5):  # who is older than the session
            cohort.beat({other: {"audio": rng.standard_normal(1280).astype(np.float32)} for other in others})
        session = cohort.join()
        assert session.slot == 4
        others += [cohort.join() for _ in range(2)]
        for step, x in enumerate(audio):
            if step == 9:  # whoever joins and leaves, too
                cohort.leave(others.pop(0))
                others.append(cohort.join())
            noise = rng.standard_normal(1280) * 10.0 ** rng.integers(-30, 38)  # beyond what squares are finite for
            inputs = {other: {"audio": np.clip(noise, -3e38, 3e38).astype(np.float32)} for other in others}
            assert _bits(cohort.beat(inputs | {session: {"audio": x}})[session]) == alone[step], step


# --- as data ------------------------------------------------------------------------------------------------------
def full() -> ModelSpec:
    """The perception of the published voice model."""
    part = {"kind": "fastconformer", "layers": 24, "d_model": 1024, "heads": 8, "projection": 4480}
    return _spec([{"kind": "log_mel"}, part], {"audio": "f32[1280]"}, {"encoded": 1024, "projected": 4480})


def published() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the perception of nvidia/NVIDIA-NemotronLabs-VoiceChat-11B."""
    d, ff, channels, outer = 1024, 4096, 256, PREFIX
    pre = f"{outer}encoder.pre_encode."
    found: dict[str, tuple[int, ...]] = {
        f"{outer}preprocessor.featurizer.window": (400,), f"{outer}preprocessor.featurizer.fb": (1, 128, 257),
        f"{outer}proj.weight": (4480, d), f"{outer}proj.bias": (4480,),
        f"{pre}out.weight": (d, 4352), f"{pre}out.bias": (d,),
    }  # fmt: skip
    for index, shape in {0: (1, 3, 3), 2: (1, 3, 3), 3: (channels, 1, 1), 5: (1, 3, 3), 6: (channels, 1, 1)}.items():
        found |= {f"{pre}conv.{index}.weight": (channels, *shape), f"{pre}conv.{index}.bias": (channels,)}
    for i in range(24):
        layer = f"{outer}encoder.layers.{i}."
        norms = (
            "norm_feed_forward1",
            "norm_self_att",
            "norm_conv",
            "norm_feed_forward2",
            "norm_out",
            "conv.batch_norm",
        )
        found |= {f"{layer}{norm}.{leaf}": (d,) for norm in norms for leaf in ("weight", "bias")}
        for k in (1, 2):
            found |= {
                f"{layer}feed_forward{k}.linear1.weight": (ff, d),
                f"{layer}feed_forward{k}.linear2.weight": (d, ff),
            }
        found |= {f"{layer}self_attn.linear_{name}.weight": (d, d) for name in ("q", "k", "v", "out", "pos")}
        found |= {f"{layer}self_attn.pos_bias_{name}": (8, 128) for name in "uv"}
        found |= {
            f"{layer}conv.pointwise_conv1.weight": (2 * d, d, 1), f"{layer}conv.depthwise_conv.weight": (d, 1, 9),
            f"{layer}conv.pointwise_conv2.weight": (d, d, 1),
        }  # fmt: skip
    return found


def test_the_full_size_has_the_published_tensors() -> None:
    expected = {name: type.shape for name, type in expected_tensors(full()).items()}
    assert expected == published()
    assert len(expected) == 640
    assert sum(math.prod(shape) for shape in expected.values()) == 613_767_056


def test_matrices_of_bf16_change_no_more_than_their_rounding(shared: Settings) -> None:
    rounded = ModelSpec.from_data(encoder().to_data() | {"precision": {"policy": "bf16"}})
    types = expected_tensors(rounded)
    narrow = {name.removeprefix(PREFIX) for name, type in types.items() if type.dtype is DType.BF16}
    assert narrow == {"proj.weight"} | {
        f"encoder.layers.{i}.{leaf}.weight"
        for i in range(2)
        for leaf in (
            *(f"feed_forward{n}.linear{m}" for n in (1, 2) for m in (1, 2)), "conv.pointwise_conv1",
            "conv.pointwise_conv2", *(f"self_attn.linear_{letter}" for letter in ("q", "k", "v", "out")),
        )
    }  # fmt: skip
    given, found = columns(8), []
    for spec in (encoder(), rounded):
        with registry.load(spec, capacity=1, target="cpu", threads=1, where=shared) as cohort:
            found.append(played(cohort, "columns", given)["projected"])
    spread = np.sqrt(np.mean((found[1] - found[0]) ** 2) / np.mean(found[0] ** 2))
    assert 2**-12 < spread < 2**-6  # two layers of sums of products, each rounded to 8 bits


def test_state_is_a_ring_of_projected_rows_and_what_convolutions_look_back_on() -> None:
    graph = build_graph(full())
    kept = {s.name: (s.kind, str(s.value.type)) for s in graph.states}
    layer = "fastconformer.encoder.layers.23"
    assert kept[f"{layer}.kv"] == (StateKind.REGISTER, "f32[71,2,8,128]")
    assert kept[f"{layer}.conv"] == (StateKind.RING, "f32[8,1024]")
    assert kept["fastconformer.columns"] == (StateKind.RING, "f32[7,128]")
    assert kept["log_mel.samples"] == (StateKind.RING, "f32[1321]")  # 7 hops, half a window, one for pre-emphasis
    numbers = 24 * (71 * 2 * 1024 + 8 * 1024) + 7 * 128 + 1321 + 1
    assert state_bytes(graph) == {"fixed": 4 * numbers, "per_step": 0}


def test_only_the_rows_of_the_newest_frame_are_made() -> None:
    made = [str(n.outputs[0].type) for n in build_graph(full()).nodes if n.op == "conv2d"]
    assert made == ["f32[7,65,256]", "f32[3,33,256]", "f32[1,17,256]"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads": 3}, "d_model that is a multiple of heads, found 64 and 3"),
        ({"subsampling_factor": 6}, "subsampling_factor"),
        ({"subsampling_factor": 4}, r"wanted f32[4,features]"),
        ({"start": "reflect"}, "start"),
        ({"left_context": -1}, "left_context"),
    ],
)
def test_dimensions_that_cannot_be_built_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_graph(encoder(**change))
    assert said in str(refused.value)
