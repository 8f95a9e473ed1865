"""Reading tensors out of weight files, without running anything that they contain.

A `TensorSet` knows every tensor's name, shape and dtype at once and reads values on demand. Three formats:

- safetensors: the header is JSON, the data is mapped into memory;
- ONNX: initializers and the tensors held by Constant nodes, in every subgraph;
- torch zip checkpoints (.pt, .pth, .bin): a pickle of tensor records, read by an unpickler that knows just the
  handful of names that such records need.

Whatever is truncated, corrupt or not understood raises WeightsError that names the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from wpk.ir.errors import WeightsError
from wpk.registry.formats.files import DAMAGED, first_line, readable
from wpk.registry.formats.onnx import OnnxFile
from wpk.registry.formats.safetensors import SafetensorsFile
from wpk.registry.formats.tensors import MergedSet, TensorInfo, TensorSet
from wpk.registry.formats.torch import TorchFile

__all__ = [
    "READERS",
    "MergedSet",
    "OnnxFile",
    "SafetensorsFile",
    "TensorInfo",
    "TensorSet",
    "TorchFile",
    "open_file",
    "open_files",
    "open_folder",
    "open_path",
]

_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.+)-\d{5}-of-\d{5}$")

READERS: dict[str, Callable[[Path], TensorSet]] = {
    ".safetensors": SafetensorsFile,
    ".onnx": OnnxFile,
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".bin": TorchFile,
}
"""Suffix -> reader of one file."""


def open_file(path: Path) -> TensorSet:
    """One weights file, read as its suffix says. Raises WeightsError."""
    reader = READERS.get(path.suffix.lower())
    if reader is None and path.exists():
        raise WeightsError(
            f"{path} is of no known weights format", wanted=" | ".join(READERS), found=path.suffix or "no suffix"
        )
    if reader is None:
        raise WeightsError(f"{path} does not exist", wanted="a weights file or folder", found="nothing")
    return reader(path)


def open_files(files: Sequence[tuple[str, Path]]) -> TensorSet:
    """Files with their aliases: one alone gives its own names, several give `ALIAS:tensor`."""
    if len(files) == 1:
        return open_file(files[0][1])
    return MergedSet([(alias, open_file(path)) for alias, path in files])


def open_folder(folder: Path, files: Sequence[Path] | None = None) -> TensorSet:
    """The weights in a folder (or those of its files that are given), shards of one checkpoint taken as one file.

    Shards are what a `*.safetensors.index.json` lists, or files called STEM-00001-of-00009; a listed shard that is
    absent raises WeightsError. Otherwise as open_files, the alias being the file's name without its suffix.
    """
    if files is None:
        _require_folder(folder)
        files = sorted(path for path in folder.iterdir() if path.is_file())
    indexes = [path for path in files if path.name.endswith(_INDEX_SUFFIX)]
    weights = [path for path in files if path.suffix.lower() in READERS]
    groups: dict[str, list[Path]] = {}
    for index in indexes:
        groups[index.name.removesuffix(_INDEX_SUFFIX)] = _shards(index)
    listed = {path for shards in groups.values() for path in shards}
    for path in weights:
        if path not in listed:
            shard = _SHARD.match(path.stem)
            alias = shard["stem"] if shard else path.stem
            if alias in groups and not (shard and _SHARD.match(groups[alias][0].stem)):
                raise WeightsError(
                    f"{folder} holds two weights files called {alias}",
                    wanted="one file to read",
                    found=f"{groups[alias][0].name}, {path.name}",
                    hint="name the one to read",
                )
            groups.setdefault(alias, []).append(path)
    if not groups:
        raise WeightsError(f"{folder} holds no weights", wanted=" | ".join(READERS), found=f"{len(files)} other files")
    one = len(groups) == 1
    return MergedSet([(None if one else alias, open_file(path)) for alias, group in groups.items() for path in group])


def _shards(index: Path) -> list[Path]:
    with readable(index) as stream:
        try:
            names = sorted(set(json.loads(stream.read())["weight_map"].values()))
            inside = all(isinstance(name, str) and name and "/" not in name and "\\" not in name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is no index of shards", found=first_line(error), hint=DAMAGED) from error
    if not inside:
        raise WeightsError(f"{index} names files outside its folder", wanted="plain file names")
    shards = [index.parent / name for name in names]
    absent = [path.name for path in shards if not path.is_file()]
    if absent:
        raise WeightsError(
            f"{index.parent} lacks shards of {index.name}",
            wanted=f"{len(shards)} files",
            found=f"no {', '.join(absent)}",
            hint=DAMAGED,
        )
    return shards


def open_path(path: Path) -> TensorSet:
    """A file or a folder of weights. Raises WeightsError."""
    return open_folder(path) if path.is_dir() else open_file(path)


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise WeightsError(f"{folder} is no folder", wanted="a folder of weights")
