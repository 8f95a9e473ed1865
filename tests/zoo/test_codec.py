"""A codec's decoder, frame by frame: against torch over whole clips, between slots, and as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from tests.zoo.specs import chain, run
from wpk import registry
from wpk.ir.errors import SpecError
from wpk.registry import Cohort
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, expected_tensors, parameter_count, state_bytes
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[Any]
PREFIX = "tts_model.audio_codec."
TOLERANCE = 1e-5  # of the greatest sample


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder."""

    codebooks: int
    codebook_size: int
    latent: int
    channels: tuple[int, ...]
    rates: tuple[int, ...]
    blocks: int = 3
    taps: int = 7
    n_fft: int = 16
    hop: int = 4
    limit: float = 100.0
    frames: int = 12  # of codes in a clip

    @property
    def samples(self) -> int:
        return int(np.prod(self.rates)) * self.hop

    @property
    def head(self) -> str:
        return f"{PREFIX}decoder.layers.{len(self.rates) * (self.blocks + 1)}.weight"


SHAPES = {
    "small": Shape(5, 24, 16, (24, 16, 8), (3, 2, 2), frames=14),
    "published rates": Shape(3, 8, 8, (12, 8, 4), (9, 7, 7), blocks=1, frames=3),
    "other sizes": Shape(1, 9, 10, (9, 7), (2, 3), blocks=2, taps=3, n_fft=12, hop=2, limit=0.5),
}
PUBLISHED = Shape(31, 1024, 512, (1536, 768, 384), (9, 7, 7))


def spec(shape: Shape, steps_per_beat: int = 1, silence_codes: list[int] | None = None) -> ModelSpec:
    silence = {} if silence_codes is None else {"silence_codes": silence_codes}
    return ModelSpec.from_data({
        "name": "decoder", "version": 1, "task": "voice", "description": "codes to samples",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 3},
        "clock": {"sample_rate": 22050, "samples_per_step": shape.samples, "steps_per_beat": steps_per_beat},
        "ports": {
            "inputs": {"codes": {"type": f"i32[{shape.codebooks}]", "kind": "tokens"}},
            "outputs": {"audio": {
                "type": f"f32[{shape.samples}]", "kind": "audio", "sample_rate": 22050, "from": "istft_head",
                "latency_samples": shape.n_fft // 2,
            }},
        },
        "components": [
            {
                "kind": "rvq_embedding", "codebooks": shape.codebooks, "codebook_size": shape.codebook_size,
                "codebook_dim": shape.latent, **silence,
            },
            {
                "kind": "convnext_upsampler", "channels": shape.channels, "rates": shape.rates,
                "blocks": shape.blocks, "taps": shape.taps,
            },
            {"kind": "istft_head", "n_fft": shape.n_fft, "hop": shape.hop, "limit": shape.limit},
        ],
        "tensors": {
            "rvq_embedding.*": f"{PREFIX}prvq.mus_list.*", "convnext_upsampler.*": f"{PREFIX}decoder.*",
            "istft_head.weight": shape.head,
        },
        "ignored_tensors": [f"{PREFIX}encoder.*", f"{PREFIX}prvq._variance_list.*"],
    })  # fmt: skip


def random_weights(shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Under the published names and in the published shapes, so that every part matters."""
    rng = np.random.default_rng(seed)
    books = {
        f"{PREFIX}prvq.mus_list.{b}": (shape.codebook_size, shape.latent) for b in range(shape.codebooks)
    }  # fmt: skip
    weights = {name: rng.standard_normal(size) / np.sqrt(shape.codebooks) for name, size in books.items()}
    layer, before = 0, shape.latent
    for c, rate in zip(shape.channels, shape.rates, strict=True):
        weights[f"{PREFIX}decoder.layers.{layer}.weight"] = rng.standard_normal((before, c, rate)) / np.sqrt(before)
        for block in range(layer + 1, layer + 1 + shape.blocks):
            at = f"{PREFIX}decoder.layers.{block}."
            weights |= {
                f"{at}dwconv.weight": rng.standard_normal((c, 1, shape.taps)) / np.sqrt(shape.taps),
                f"{at}dwconv.bias": 0.3 * rng.standard_normal(c),
                f"{at}norm.weight": 1.0 + 0.3 * rng.standard_normal(c),
                f"{at}norm.bias": 0.3 * rng.standard_normal(c),
                f"{at}pwconv1.weight": rng.standard_normal((4 * c, c, 1)) / np.sqrt(c),
                f"{at}pwconv1.bias": 0.3 * rng.standard_normal(4 * c),
                f"{at}pwconv2.weight": rng.standard_normal((c, 4 * c, 1)) / np.sqrt(4 * c),
                f"{at}pwconv2.bias": 0.3 * rng.standard_normal(c),
            }
        layer, before = layer + 1 + shape.blocks, c
    weights[shape.head] = 0.5 * rng.standard_normal((shape.n_fft + 2, before, 1)) / np.sqrt(before)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def random_codes(shape: Shape, seed: int = 1) -> Array:
    size = (shape.frames, shape.codebooks)
    return np.random.default_rng(seed).integers(0, shape.codebook_size, size, dtype=np.int32)


def stored(weights: dict[str, Array], folder: Path) -> Path:
    save_file(weights, folder / "model.safetensors")
    return folder


def played(cohort: Cohort, codes: Array) -> Array:
    """The audio of one session over these beats, a row a beat."""
    session = cohort.join()
    rows = [cohort.beat({session: {"codes": row}})[session]["audio"].reshape(-1) for row in codes]
    cohort.leave(session)
    return np.stack(rows)


def decode(
    shape: Shape, weights: dict[str, Array], codes: Array, where: Settings, folder: Path, **options: Any
) -> Array:  # fmt: skip
    model, path = spec(shape, **options), stored(weights, folder)
    with registry.load(model, capacity=1, target="cpu", threads=1, weights=path, where=where) as cohort:
        return played(cohort, codes)


# --- against torch ------------------------------------------------------------------------------------------------
def log_magnitudes_and_phases(shape: Shape, weights: dict[str, Array], codes: Array) -> tuple[Any, Any]:
    """Of a whole clip by torch's own layers, float64, [bins, columns] each."""
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    given = {name.removeprefix(PREFIX): torch.from_numpy(a).double() for name, a in weights.items()}
    index = torch.from_numpy(codes).long()
    rows = [f.embedding(index[:, b], given[f"prvq.mus_list.{b}"]) for b in range(shape.codebooks)]
    x = torch.stack(rows).sum(0).T[None]
    layer = 0
    for c, rate in zip(shape.channels, shape.rates, strict=True):
        x = f.conv_transpose1d(x, given[f"decoder.layers.{layer}.weight"], stride=rate)
        for block in range(layer + 1, layer + 1 + shape.blocks):
            at = f"decoder.layers.{block}"
            part = {name.removeprefix(f"{at}."): t for name, t in given.items() if name.startswith(f"{at}.")}
            past = f.pad(x, (shape.taps - 1, 0))
            y = f.conv1d(past, part["dwconv.weight"], part["dwconv.bias"], groups=c).transpose(1, 2)
            y = f.layer_norm(y, (c,), part["norm.weight"], part["norm.bias"], 1e-6).transpose(1, 2)
            y = f.gelu(f.conv1d(y, part["pwconv1.weight"], part["pwconv1.bias"]))
            x = x + f.conv1d(y, part["pwconv2.weight"], part["pwconv2.bias"])
        layer += 1 + shape.blocks
    m, phase = f.conv1d(x, given[f"decoder.layers.{layer}.weight"])[0].chunk(2)
    return m, phase


def spectra(shape: Shape, m: Any, phase: Any) -> Any:
    """[bins, columns], complex; the first and the last bin real."""
    torch = pytest.importorskip("torch")
    magnitude = shape.limit * torch.exp(-torch.nn.functional.softplus(np.log(shape.limit) - m))
    made = torch.polar(magnitude, phase)
    made[0], made[-1] = made[0].real.clone(), made[-1].real.clone()
    return made


def synthesised(shape: Shape, made: Any) -> tuple[Array, float]:
    """The clip as a stream gives it, zero spectra before it; and which share of the frames' values was clamped."""
    torch = pytest.importorskip("torch")
    f, n, hop = torch.nn.functional, shape.n_fft, shape.hop
    window = torch.hann_window(n, dtype=torch.float64)[:, None]
    made = torch.cat([torch.zeros(n // 2 + 1, n // hop, dtype=made.dtype), made], 1)
    frames = torch.fft.irfft(made, n, dim=0)
    clamped = torch.minimum(torch.maximum(frames, -window), window)
    length = (frames.shape[1] - 1) * hop + n

    def overlapped(columns: Any) -> Any:
        return f.fold(columns[None], (1, length), (1, n), stride=(1, hop)).reshape(-1)

    whole = overlapped(clamped * window) / overlapped((window**2).expand(-1, frames.shape[1]))
    margin = (n - hop) // 2 + n // 2
    return whole[margin : length - margin].numpy(), float((clamped != frames)[1:].double().mean())


@pytest.mark.oracle
@pytest.mark.parametrize("name", SHAPES)
def test_frame_by_frame_it_is_the_whole_clip_of_torch(name: str, shared: Settings, tmp_path: Path) -> None:
    shape = SHAPES[name]
    weights, codes = random_weights(shape), random_codes(shape)
    wanted, clamped = synthesised(shape, spectra(shape, *log_magnitudes_and_phases(shape, weights, codes)))
    found = decode(shape, weights, codes, shared, tmp_path)
    assert found.shape == (shape.frames, shape.samples)
    assert 0.03 < clamped < 0.7  # some values are, most are not
    assert wanted.std() > 0.02
    np.testing.assert_allclose(found.reshape(-1), wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def _hushed(shape: Shape, weights: dict[str, Array]) -> dict[str, Array]:
    """The same with log-magnitudes lowered by 20, through a channel that the last block makes about 40."""
    bias = f"{PREFIX}decoder.layers.{len(shape.rates) * (shape.blocks + 1) - 1}.pwconv2.bias"
    lift, head = weights[bias].copy(), weights[shape.head].copy()
    lift[0] += 40.0
    head[: shape.n_fft // 2 + 1, 0] = -0.5
    return weights | {bias: lift, shape.head: head}


@pytest.mark.oracle
def test_where_nothing_is_clamped_it_is_istft_of_torch_some_samples_late(shared: Settings, tmp_path: Path) -> None:
    """torch.istft cannot clamp, so with quiet spectra; its centring leaves out the first half of a window."""
    torch = pytest.importorskip("torch")
    shape = SHAPES["small"]
    weights, codes = _hushed(shape, random_weights(shape)), random_codes(shape)
    made = spectra(shape, *log_magnitudes_and_phases(shape, weights, codes))
    assert synthesised(shape, made)[1] == 0.0
    theirs = torch.istft(made, 16, 4, window=torch.hann_window(16, dtype=torch.float64), center=True).numpy()
    found = decode(shape, weights, codes, shared, tmp_path).reshape(-1)
    late = found[8 + 2 :]  # half a window of centring, half a hop of lag: n_fft / 2 behind "same" padding's margin of 6
    first = 16 - 4 - 8  # of theirs that lies under as many frames as every sample of a stream
    wanted = theirs[first : late.size]
    np.testing.assert_allclose(late[first:], wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


# --- steps and slots ----------------------------------------------------------------------------------------------
def test_a_beat_of_two_frames_gives_what_its_frames_give(shared: Settings) -> None:
    shape = SHAPES["small"]
    codes = random_codes(shape)
    with registry.load(spec(shape), capacity=1, target="cpu", threads=1, where=shared) as cohort:
        wanted = played(cohort, codes)
    pairs = codes.reshape(-1, 2, shape.codebooks)
    with registry.load(spec(shape, steps_per_beat=2), capacity=1, target="cpu", threads=1, where=shared) as cohort:
        np.testing.assert_array_equal(played(cohort, pairs).reshape(wanted.shape), wanted)


def test_a_session_gets_the_same_bits_in_any_slot_and_company(shared: Settings) -> None:
    shape, rng = SHAPES["small"], np.random.default_rng(2)
    codes = random_codes(shape)
    with registry.load(spec(shape), capacity=1, target="cpu", threads=1, where=shared) as cohort:
        alone = played(cohort, codes)
        np.testing.assert_array_equal(played(cohort, codes), alone)  # anew in a slot that was used
    assert len({row.tobytes() for row in alone}) == shape.frames
    with registry.load(spec(shape), capacity=7, target="cpu", threads=2, where=shared) as cohort:
        others = [cohort.join() for _ in range(4)]
        session = cohort.join()
        assert session.slot == 4
        others += [cohort.join() for _ in range(2)]
        for step, row in enumerate(codes):
            if step == 6:
                cohort.leave(others.pop(0))
                others.append(cohort.join())
            noise = {other: {"codes": rng.integers(-(2**31), 2**31, row.size).astype(np.int32)} for other in others}
            made = cohort.beat(noise | {session: {"codes": row}})
            np.testing.assert_array_equal(made[session]["audio"].reshape(-1), alone[step])


def test_silence_decodes_to_silence(shared: Settings, tmp_path: Path) -> None:
    """Rows of zeros through layers without biases: magnitudes of one and no phase, a pulse where the window is 0."""
    shape = SHAPES["small"]
    weights = random_weights(shape)
    weights = {name: np.zeros_like(a) if name.endswith("bias") else a for name, a in weights.items()}
    for b in range(shape.codebooks):
        weights[f"{PREFIX}prvq.mus_list.{b}"][3] = 0.0
    codes = random_codes(shape)
    codes[:8] = 3
    found = decode(shape, weights, codes, shared, tmp_path)
    assert np.abs(found[:8]).max() < 1e-6
    assert np.abs(found[8:]).max() > 0.1


# --- codes --------------------------------------------------------------------------------------------------------
def test_codes_outside_the_codebook_mean_its_edges_or_silence() -> None:
    part = {"kind": "rvq_embedding", "codebooks": 3, "codebook_size": 4, "codebook_dim": 2}
    books = np.random.default_rng(0).standard_normal((3, 4, 2))
    weights = {f"rvq_embedding.{b}": book for b, book in enumerate(books)}
    codes = np.array([-7, 4, 2**31 - 1])
    (found,) = run(chain([part], {"codes": "i32[3]"}, "f32[2]"), codes, weights=weights)
    np.testing.assert_allclose(found, books[0, 0] + books[1, 3] + books[2, 3])
    (found,) = run(chain([{**part, "silence_codes": [3, 1, 0]}], {"codes": "i32[3]"}, "f32[2]"), codes, weights=weights)
    np.testing.assert_allclose(found, books[0, 0] + books[1, 1] + books[2, 0])


# --- as data ------------------------------------------------------------------------------------------------------
def test_the_published_decoder_has_its_names_shapes_and_sizes() -> None:
    model = spec(PUBLISHED)
    shapes = {name: type.shape for name, type in expected_tensors(model).items()}
    decoder = {name: shape for name, shape in shapes.items() if name.startswith(f"{PREFIX}decoder.layers.")}
    books = {name: shape for name, shape in shapes.items() if name.startswith(f"{PREFIX}prvq.mus_list.")}
    assert len(decoder) == 76 and len(books) == 31 and len(shapes) == 107
    assert sum(int(np.prod(shape)) for shape in decoder.values()) == 91_845_504
    assert parameter_count(model) == 91_845_504 + 31 * 1024 * 512
    assert books == {f"{PREFIX}prvq.mus_list.{b}": (1024, 512) for b in range(31)}
    layer = {name.removeprefix(f"{PREFIX}decoder.layers."): shape for name, shape in decoder.items()}
    assert {name: shape for name, shape in layer.items() if name.count(".") == 1} == {
        "0.weight": (512, 1536, 9), "4.weight": (1536, 768, 7), "8.weight": (768, 384, 7), "12.weight": (18, 384, 1),
    }  # fmt: skip
    assert {name: shape for name, shape in layer.items() if name.startswith("6.")} == {
        "6.dwconv.weight": (768, 1, 7), "6.dwconv.bias": (768,), "6.norm.weight": (768,), "6.norm.bias": (768,),
        "6.pwconv1.weight": (3072, 768, 1), "6.pwconv1.bias": (3072,),
        "6.pwconv2.weight": (768, 3072, 1), "6.pwconv2.bias": (768,),
    }  # fmt: skip


def test_the_published_decoder_keeps_what_was_published_of_its_state() -> None:
    graph = build_graph(spec(PUBLISHED))
    assert state_bytes(graph) == {"fixed": 4 * (48_384 + 4 * 16), "per_step": 0}
    assert [str(port.value.type) for port in graph.outputs] == ["f32[1764]"]


@pytest.mark.parametrize(
    ("part", "input", "said"),
    [
        ({"kind": "rvq_embedding", "codebooks": 2, "codebook_size": 4, "codebook_dim": 3}, "i32[3]", "i32[2]"),
        (
            {"kind": "rvq_embedding", "codebooks": 2, "codebook_size": 4, "codebook_dim": 3, "silence_codes": [1]},
            "i32[2]",
            "2 silence_codes below 4",
        ),
        (
            {"kind": "rvq_embedding", "codebooks": 1, "codebook_size": 4, "codebook_dim": 3, "silence_codes": [4]},
            "i32[1]",
            "1 silence_codes below 4",
        ),
        ({"kind": "convnext_upsampler", "channels": [4], "rates": [2, 2], "blocks": 1}, "f32[3]", "rates: wanted 1"),
        ({"kind": "convnext_upsampler", "channels": [4], "rates": [2], "blocks": 1}, "f32[2,3,4]", "cannot read this"),
        ({"kind": "istft_head", "n_fft": 16, "hop": 5}, "f32[3]", "even hop"),
        ({"kind": "istft_head", "n_fft": 4, "hop": 4}, "f32[3]", "even hop"),
        ({"kind": "istft_head", "n_fft": 9, "hop": 3}, "f32[3]", "even hop"),
        ({"kind": "istft_head", "n_fft": 16, "hop": 4, "limit": 0.0}, "f32[3]", "limit"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(part: dict[str, Any], input: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        build_graph(chain([part], {"x": input}, "f32[1]"))
    assert said in str(refused.value)
