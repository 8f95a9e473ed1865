"""FastConformer and its front end, step by step on the CPU kernel, against `transformers` on the whole recording.

Weights are random and reach both sides under their published names. With `start: padding` an encoder that streams is
the one that has the whole recording, frame by frame. `start: columns` differs in frame 1, and by that frame's keys,
values and convolved row in later ones; it is compared with the other encoder's own parts in that schedule.
"""

from __future__ import annotations

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
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, state_bytes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
STEPS, MELS, CONTEXT = 20, 16, 6  # steps: more than what attention and convolutions look back
SMALL = {
    "layers": 2, "d_model": 64, "heads": 4, "left_context": CONTEXT, "subsampling_conv_channels": 12, "projection": 40,
}  # fmt: skip
PREFIX = "perception."
TOLERANCE = 1e-4  # of the greatest number of a frame


def encoder(*, mels: int = MELS, projection: int | None = 40, **changes: Any) -> ModelSpec:
    part = SMALL | {"kind": "fastconformer", "projection": projection} | changes
    outputs = {"encoded": part["d_model"]} | ({"projected": projection} if projection else {})
    return _spec([part], {"columns": f"f32[8,{mels}]"}, outputs)


def perception(**changes: Any) -> ModelSpec:
    parts = [{"kind": "log_mel", "n_mels": MELS}, SMALL | {"kind": "fastconformer"} | changes]
    return _spec(parts, {"audio": "f32[1280]"}, {"encoded": 64, "projected": 40})


def _spec(parts: list[dict[str, Any]], inputs: dict[str, str], outputs: dict[str, int], **changes: Any) -> ModelSpec:
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
    return ModelSpec.from_data(data | changes)


def played(cohort: Cohort, port: str, given: Array) -> dict[str, Array]:
    """Every output of one session over the steps."""
    session = cohort.join()
    made = [cohort.beat({session: {port: x}})[session] for x in given]
    cohort.leave(session)
    return {name: np.stack([step[name] for step in made]) for name in made[0]}


def columns() -> Array:
    """[steps, 8, mels], columns 8 n - 7 to 8 n of a stream; zeros before it, as `log_mel` gives them."""
    made = np.random.default_rng(0).standard_normal((STEPS, 8, MELS)).astype(np.float32) * 2 - 4
    made[0, :7] = 0
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

    def __init__(self, folder: Path) -> None:
        self.torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        from safetensors.numpy import save_file

        config = transformers.NemotronAsrStreamingEncoderConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, attention_bias=False,
            convolution_bias=False, conv_kernel_size=9, subsampling_conv_channels=12, num_mel_bins=MELS,
            scale_input=False, sliding_window=CONTEXT + 1, default_num_lookahead_tokens=0,
        )  # fmt: skip
        self.model = transformers.NemotronAsrStreamingEncoder(config).eval()
        rng = np.random.default_rng(1)
        self.tensors = {name: _random(rng, name, type.shape) for name, type in expected_tensors(encoder()).items()}
        save_file(self.tensors, folder / "model.safetensors")
        given = {_renamed(name): self.torch.from_numpy(tensor) for name, tensor in self.tensors.items()}
        self.projection = [given.pop("proj.weight").numpy(), given.pop("proj.bias").numpy()]
        self.model.load_state_dict(given, strict=True)

    def whole(self, given: Array) -> Array:
        """[frames, d] of a recording at once: causal padding, and the attention's window as a mask."""
        stream = self.torch.from_numpy(given.reshape(-1, MELS)[7:])
        with self.torch.no_grad():
            return np.asarray(self.model(stream[None], num_lookahead_tokens=0).last_hidden_state[0])

    def in_steps(self, given: Array) -> Array:
        """[frames, d]: 1 column, then 17 of which 9 are old, zeros where there are none, and the last of 3 frames."""
        torch, model = self.torch, self.model
        stream = torch.from_numpy(np.concatenate([np.zeros((9, MELS), np.float32), given.reshape(-1, MELS)]))
        with torch.no_grad():
            rows = [model.subsampling(stream[None, 16:17])]  # stream[j + 16] is column j
            rows += [model.subsampling(stream[None, 8 * n : 8 * n + 17])[:, 2:] for n in range(1, len(given))]
            parts, frames, caches = model.subsampling, [], {}
            for row in rows:
                model.subsampling = _Given(torch, row)
                made = model(row, num_lookahead_tokens=0, use_cache=True, **caches)
                caches = {"cache": made.cache, "padding_cache": made.padding_cache}
                frames.append(np.asarray(made.last_hidden_state[0, 0]))
            model.subsampling = parts
        return np.stack(frames)


def _Given(torch: Any, row: Any) -> Any:  # noqa: N802
    """A module in the place of the subsampling that gives this."""

    class Given(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any, **named: Any) -> Any:
            return row.clone()

    return Given()


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
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Original, Path]:
    folder = tmp_path_factory.mktemp("original")
    return Original(folder), folder


def errors(found: Array, wanted: Array) -> Array:
    """The greatest error of each frame, of its greatest number."""
    return np.abs(found - wanted).max(axis=1) / np.abs(wanted).max(axis=1)


@pytest.mark.oracle
@pytest.mark.parametrize("start", ["padding", "columns"])
def test_every_frame_is_that_of_transformers(start: str, original: tuple[Original, Path], shared: Settings) -> None:
    theirs, folder = original
    given = columns()
    wanted, other = theirs.whole(given), theirs.in_steps(given)
    wanted, other = (wanted, other) if start == "padding" else (other, wanted)
    with registry.load(
        encoder(start=start), capacity=1, target="cpu", threads=1, weights=folder, where=shared
    ) as cohort:
        found = played(cohort, "columns", given)
    assert errors(found["encoded"], wanted).max() < TOLERANCE
    assert errors(found["encoded"], other)[0] < TOLERANCE < errors(found["encoded"], other)[1]
    weight, bias = theirs.projection
    assert errors(found["projected"], wanted @ weight.T + bias).max() < TOLERANCE
