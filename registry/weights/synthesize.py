"""A checkpoint of made-up weights: every tensor that a spec expects, in one safetensors file.

With it a model whose weights are not at hand can be loaded, timed and checked on the same path as the real one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from wpk.ir.errors import StoreError, UsageError
from wpk.ir.progress import Progress, silent
from wpk.ir.types import DType
from wpk.ops.evaluate import stored
from wpk.registry.formats.safetensors import safetensors_header
from wpk.registry.formats.tensors import TensorInfo
from wpk.registry.storage import replace_file, store_errors
from wpk.registry.weights.synthetic import SyntheticSet
from wpk.zoo.build import expected_tensors
from wpk.zoo.sources import SyntheticSource
from wpk.zoo.spec import ModelSpec

SUFFIX = ".safetensors"
_NAMES = {DType.F32: "float32", DType.BF16: "bfloat16", DType.I32: "int32", DType.BOOL: "bool"}


@dataclass(frozen=True)
class Synthesized:
    """What was written: its path and size, and how many tensors and numbers are in it; the seed they come from."""

    file: Path
    tensors: int
    values: int
    bytes: int
    seed: int


def synthetic_source(spec: ModelSpec, seed: int | None = None) -> SyntheticSource:
    """The seed and gain of the spec's own synthetic weights; seed 0 and gain 1 where it has others."""
    own = spec.weights if isinstance(spec.weights, SyntheticSource) else SyntheticSource(synthetic=0)
    return own if seed is None else own.model_copy(update={"synthetic": seed})


def synthesize(
    spec: ModelSpec, path: Path, *, seed: int | None = None, replace: bool = False, progress: Progress = silent
) -> Synthesized:
    """Write a checkpoint for a spec: every tensor that it expects or names as unused, values as of a synthetic source.

    The model does the same with this file, bit for bit, as with that source. Numbers are made as they are written,
    a piece at a time; the file appears whole or not at all. seed: None takes the spec's own (`synthetic_source`).
    replace: an existing file may be replaced.

    Raises UsageError for a name that no reader would take for safetensors, StoreError where the file exists, does not
    fit on its disk or cannot be written, SpecError where the spec cannot be built.
    """
    if path.suffix.lower() != SUFFIX:
        raise UsageError(f"a checkpoint is a {SUFFIX} file", wanted=f"a name that ends in {SUFFIX}", found=path.name)
    expected, source = expected_tensors(spec) | spec.unused, synthetic_source(spec, seed)
    tensors = {name: TensorInfo(type.shape, _NAMES[type.dtype]) for name, type in expected.items()}
    made = SyntheticSet({name: info.shape for name, info in tensors.items()}, source)
    header, order = safetensors_header(tensors)
    size = len(header) + sum(info.size * _width(expected[name].dtype) for name, info in tensors.items())
    _require_place(path, size, replace)

    def write(stream: BinaryIO) -> None:
        stream.write(header)
        done = len(header)
        for name in order:
            progress(f"making {name}", done, size)
            for piece in made.pieces(name):
                done += stream.write(_stored(piece, expected[name].dtype).data)

    replace_file(path, write)
    return Synthesized(path, len(tensors), sum(info.size for info in tensors.values()), size, source.seed)


def _width(dtype: DType) -> int:
    """Bytes of a number in the file: as in an arena, but one of a flag."""
    return 1 if dtype is DType.BOOL else dtype.bytes


def _stored(piece: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[Any]:
    bits = stored(piece, dtype)
    return bits.astype(np.bool_) if dtype is DType.BOOL else bits


def _require_place(path: Path, size: int, replace: bool) -> None:
    """Refuse before the work begins what could not be finished."""
    if path.is_dir() or (path.exists() and not replace):
        found = "a folder" if path.is_dir() else f"a file of {path.stat().st_size} bytes"
        hint = "name another file" if path.is_dir() else "name another file, or replace it with --force"
        raise StoreError(f"{path} exists", wanted="a file that is not there yet", found=found, hint=hint)
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    if size > free:
        raise StoreError(
            f"the disk of {path} is too full", wanted=f"{size} bytes", found=f"{free} bytes free",
            hint="free some space, or name a file on another disk",
        )  # fmt: skip
