"""Weights made up from tensor names and a seed: the same bits on every machine, CPU or GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wpk.registry.formats.tensors import Shape, TensorInfo, TensorSet
from wpk.zoo.sources import SyntheticSource

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
PIECE = 1 << 18  # values made at a time


def _mix(z: int) -> int:
    """splitmix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def synthetic_key(name: str, seed: int) -> int:
    """The 64-bit key of one tensor: mix(fnv1a64(name in UTF-8) XOR mix(seed))."""
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    return _mix(digest ^ _mix(seed))


def synthetic_affine(shape: Shape, gain: float = 1.0) -> tuple[float, float]:
    """(offset, scale) of a synthetic tensor, by its shape alone; both are exact in float32.

    Two axes or more, [out, in, ...]: offset 0, scale sqrt(3 / fan_in) * gain with fan_in = in * ..., which is
    uniform noise of standard deviation gain / sqrt(fan_in). One axis or none (norm weights, biases): 1 + v / 64, so
    that norms pass what they get; a power of two keeps that one rounding, fused or not.
    """
    if len(shape) < 2:
        return 1.0, 1.0 / 64.0
    fan_in = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    return 0.0, float(np.float32(np.sqrt(3.0 / fan_in) * gain))


def synthetic_values(key: int, offset: float, scale: float, start: int, count: int) -> npt.NDArray[np.float32]:
    """Values start .. start+count of a synthetic tensor in row-major order, as float32.

    Value i, whatever computes it, in 64-bit unsigned and float32 arithmetic:

        z = mix(key + (i + 1) * 0x9E3779B97F4A7C15)         splitmix64 at counter i
        v = float32(int32(z >> 40) - 2^23) * 2^-23          uniform in [-1, 1), exact
        w = offset + scale * v                              one rounding: offset is 0, or scale a power of two

    so CPU and GPU give the same bits.
    """
    with np.errstate(over="ignore"):
        z = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        z *= np.uint64(_GOLDEN)
        z += np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
    whole = (z >> np.uint64(40)).astype(np.int32) - np.int32(1 << 23)
    return np.float32(offset) + np.float32(scale) * (whole.astype(np.float32) * np.float32(2.0**-23))


class SyntheticSet(TensorSet):
    """Made-up weights of the wanted names and shapes, float32, the same on every machine."""

    def __init__(self, shapes: Mapping[str, Shape], source: SyntheticSource) -> None:
        self._source = source
        self.tensors = {name: TensorInfo(tuple(shape), "float32") for name, shape in shapes.items()}

    def recipe(self, name: str) -> tuple[int, float, float]:
        """Key, offset and scale of a tensor: with them its numbers can be made wherever they are needed."""
        return (synthetic_key(name, self._source.seed), *synthetic_affine(self.tensors[name].shape, self._source.gain))

    def pieces(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
        """The values in row-major order, some at a time: they fit the caches, and little memory is needed."""
        size, (key, offset, scale) = self.tensors[name].size, self.recipe(name)
        for start in range(0, size, PIECE):
            yield synthetic_values(key, offset, scale, start, min(PIECE, size - start))

    def _load(self, name: str) -> npt.NDArray[Any]:
        info = self.tensors[name]
        values = np.empty(info.size, np.float32)
        for i, piece in enumerate(self.pieces(name)):
            values[i * PIECE : i * PIECE + piece.size] = piece
        return values.reshape(info.shape)
