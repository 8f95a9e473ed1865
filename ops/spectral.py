"""Short-time spectra: windows, Fourier bases, `rdft`, `stft`, `irdft` and `magnitude`.

A real transform is a matrix product with a constant basis, so it runs on `matmul`: the window is folded into the
basis when the profile is loaded, and the frames of an STFT are overlapping rows of one signal. A spectrum is
[..., 2, bins]: all real parts, then all imaginary parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import Type, f32
from wpk.ops.legal import NOT_NEGATIVE, common, first_broken
from wpk.ops.operator import Array, Cost, Dims, Extent, Operator, attr, body, operand, operator
from wpk.ops.payload import operand_f32, parameter, parameter_f32


def _periodic(window: Callable[[int], Array]) -> Callable[[int], Array]:
    """The first n points of the symmetric window of n + 1: what spectral analysis wants."""
    return lambda n: window(n + 1)[:n]


def _vorbis(n: int) -> Array:
    return np.sin(np.pi / 2 * np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2)


_hann, _hamming, _blackman = (_periodic(w) for w in (np.hanning, np.hamming, np.blackman))
WINDOWS: dict[str, Callable[[int], Array]] = {
    "ones": np.ones,
    "hann": np.hanning,
    "hann_periodic": _hann,
    "sqrt_hann": lambda n: np.sqrt(_hann(n)),
    "sqrt_hann_symmetric": lambda n: np.sqrt(np.hanning(n)),
    "hamming": np.hamming,
    "hamming_periodic": _hamming,
    "blackman": np.blackman,
    "blackman_periodic": _blackman,
    "povey": lambda n: np.hanning(n) ** 0.85,
    "vorbis": _vorbis,
}


@operator("window", version=1)
class Window(Operator):
    """A window of `length` samples, a weight.

    kind: ones, hann, hamming, blackman (symmetric, as numpy's), the same with `_periodic` (as torch's default);
    sqrt_hann (periodic: analysis and synthesis of an overlap-add), sqrt_hann_symmetric; povey (Kaldi: hann^0.85);
    vorbis (sin(pi/2 sin^2(pi (t + 1/2) / n)), Vorbis I 4.3.1, DeepFilterNet).
    """

    kind: str = attr()
    length: int = attr()

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.kind not in WINDOWS:
            raise GraphError("window: kind", wanted=" | ".join(WINDOWS), found=self.kind)
        return (f32(_positive("window", "length", self.length)),)

    def meaning(self) -> Array:
        return np.ones(1) if self.length == 1 else np.asarray(WINDOWS[self.kind](self.length), np.float64)


@operator("dft_basis", version=1)
class DftBasis(Operator):
    """Rows of the real DFT, a weight: row k is w[t] cos(2 pi k t / n), row bins + k is -w[t] sin(2 pi k t / n).

    window [l] (ones where absent, with l = `length`, or n where that is 0), l <= n: a shorter frame is zero-padded at
    its end. bins: 0 is n // 2 + 1. Result [2 bins, l].
    """

    window = operand("l", weight=True, optional=True)
    n: int = attr()
    length: int = attr(0)
    bins: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        length = dims.bound.get("l") or self.length or self.n
        if self.length not in (0, length):
            raise GraphError("dft_basis: length of the window", wanted=self.length, found=length)
        return (f32(2 * _check_transform("dft_basis", self.n, length, self.bins), length),)

    def meaning(self, *window: Array) -> Array:
        length = window[0].size if window else self.length or self.n
        angle = _angles(self.n, self.bins or self.n // 2 + 1, length)
        return np.concatenate([np.cos(angle), -np.sin(angle)]) * (window[0] if window else 1.0)


@operator("inverse_dft_basis", version=1)
class InverseDftBasis(Operator):
    """The matrix of the inverse real DFT, a weight [n, 2 bins] for spectra [2, bins]; bins beyond are zero.

    x[t] = w[t] / n * sum_k m[k] (re[k] cos(2 pi k t / n) - im[k] sin(2 pi k t / n)), m = 1 for k = 0 and k = n / 2,
    else 2. window [n], optional: the synthesis window.
    """

    window = operand("n", weight=True, optional=True)
    n: int = attr()
    bins: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if dims.bound.get("n", self.n) != self.n:
            raise GraphError("inverse_dft_basis: length of the window", wanted=self.n, found=dims["n"])
        return (f32(self.n, 2 * _check_transform("inverse_dft_basis", self.n, self.n, self.bins)),)

    def meaning(self, *window: Array) -> Array:
        bins = self.bins or self.n // 2 + 1
        k = np.arange(bins)
        fold = np.where((k == 0) | (2 * k == self.n), 1.0, 2.0)[:, None] / self.n
        angle = _angles(self.n, bins, self.n)
        basis = np.concatenate([fold * np.cos(angle), -fold * np.sin(angle)]).T
        return basis * window[0][:, None] if window else basis


@operator("rdft", version=1)
class Rdft(Operator):
    """The real DFT of every frame: x [..., l] f32, window [l] -> [..., 2, bins], numpy.fft.rfft's sign and scale.

    n_fft: 0 is l, else frames are zero-padded at their end to n_fft. bins: 0 is n_fft // 2 + 1, else the first bins.
    """

    x = operand("... l", weight=False)
    window = operand("l", weight=True, optional=True)
    n_fft: int = attr(0)
    bins: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        bins = _check_transform("rdft", self.n_fft or dims["l"], dims["l"], self.bins)
        return (f32(*dims.like("x").shape[:-1], 2, bins),)

    def meaning(self, x: Array, window: Array | float = 1.0) -> Array:
        spectrum = np.fft.rfft(np.asarray(x, np.float64) * window, self.n_fft or x.shape[-1], axis=-1)
        return _blocks(spectrum, self.bins)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return _transform_cost(y, 2 * y.shape[-1], types[0].shape[-1], types[0])

    def expand(self, g: GraphBuilder, x: Value, *window: Value) -> Value:
        length = x.type.shape[-1]
        return _analyse(g, x, window, self.n_fft or length, length, self.bins, length, x.type.shape[:-1])


@operator("stft", version=1)
class Stft(Operator):
    """Spectra of the frames of a signal: x [samples] f32, window [l] -> [frames, 2, bins].

    Frame t is x[t hop : t hop + l] (no padding; frames = (samples - l) // hop + 1), windowed, zero-padded at its end to
    n_fft. This is torch.stft with center=False and a window of n_fft; history is concatenated in front by the caller.
    """

    x = operand("s", weight=False)
    window = operand("l", weight=True)
    hop: int = attr()
    n_fft: int = attr(0)
    bins: int = attr(0)

    def results(self, dims: Dims) -> tuple[Type, ...]:
        bins = _check_transform("stft", self.n_fft or dims["l"], dims["l"], self.bins)
        _positive("stft", "hop", self.hop)
        if dims["s"] < dims["l"]:
            raise GraphError("stft: fewer samples than one frame", wanted=f">= {dims['l']}", found=dims["s"])
        return (f32((dims["s"] - dims["l"]) // self.hop + 1, 2, bins),)

    def meaning(self, x: Array, window: Array) -> Array:
        frames = np.lib.stride_tricks.sliding_window_view(np.asarray(x, np.float64), window.size)[:: self.hop]
        return _blocks(np.fft.rfft(frames * window, self.n_fft or window.size, axis=-1), self.bins)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return _transform_cost(y, 2 * y.shape[-1], types[1].size, types[0])

    def expand(self, g: GraphBuilder, x: Value, window: Value) -> Value:
        length = window.type.size
        frames = ((x.type.size - length) // self.hop + 1,)
        return _analyse(g, x, (window,), self.n_fft or length, length, self.bins, self.hop, frames)


@operator("irdft", version=1)
class Irdft(Operator):
    """The inverse of `rdft`: x [..., 2, bins] f32 -> [..., n], numpy.fft.irfft; times window [n] where given.

    Bins that are not there are zero; the imaginary parts of bin 0 and of bin n / 2 are ignored.
    """

    x = operand("... 2 b", weight=False)
    window = operand("n", weight=True, optional=True)
    n: int = attr()

    def results(self, dims: Dims) -> tuple[Type, ...]:
        _check_transform("irdft", self.n, self.n, dims["b"])
        if dims.bound.get("n", self.n) != self.n:
            raise GraphError("irdft: length of the window", wanted=self.n, found=dims["n"])
        return (f32(*dims.like("x").shape[:-2], self.n),)

    def meaning(self, x: Array, window: Array | float = 1.0) -> Array:
        return np.asarray(np.fft.irfft(x[..., 0, :] + 1j * x[..., 1, :], self.n, axis=-1) * window)

    def cost(self, *types: Type) -> Cost:
        return _transform_cost(self.infer(types)[0], self.n, 2 * types[0].shape[-1], types[0])

    def expand(self, g: GraphBuilder, x: Value, *window: Value) -> Value:
        bins = x.type.shape[-1]
        basis = g.op("inverse_dft_basis", *window, n=self.n, bins=bins)
        return _product(g, x, basis, self.n, 2 * bins, 2 * bins, (*x.type.shape[:-2], self.n))


@operator("magnitude", version=1)
class Magnitude(Operator):
    """(re^2 + im^2 + eps)^(power / 2) of spectra x [..., 2, b] f32 -> [..., b]; power 1 or 2."""

    x = operand("... 2 b")
    power: int = attr(1)
    eps: float = attr(0.0)
    semantic_parameters: ClassVar = {2: range(1, 3), 3: NOT_NEGATIVE}

    def results(self, dims: Dims) -> tuple[Type, ...]:
        if self.power not in (1, 2) or not self.eps >= 0.0:
            raise GraphError("magnitude: power and eps", wanted="power 1 or 2, eps >= 0", found=self)
        return (f32(*dims.like("x").shape[:-2], dims["b"]),)

    def meaning(self, x: Array) -> Array:
        power = x[..., 0, :] ** 2 + x[..., 1, :] ** 2 + self.eps
        return np.asarray(np.sqrt(power) if self.power == 1 else power)

    def cost(self, *types: Type) -> Cost:
        (y,) = self.infer(types)
        return Cost({"f32": (5 if self.power == 1 else 4) * y.size}, activation_bytes=types[0].bytes + y.bytes)

    def parts(self, *types: Type) -> int:
        return types[0].size // (2 * types[0].shape[-1])

    def parameters(self, *types: Type) -> tuple[int | float, ...]:
        bins = types[0].shape[-1]
        return (types[0].size // (2 * bins), bins, self.power, float(self.eps))

    @classmethod
    def extents(cls, parameters: Sequence[int], operands: int) -> tuple[int, ...]:
        frames, bins = parameters[:2]
        return (8 * frames * bins, 4 * frames * bins)

    @classmethod
    def legal(cls, parameters: Sequence[int], operands: int, present: Sequence[bool]) -> str | None:
        return first_broken(*common(cls, parameters, present, words=4))

    @classmethod
    def part_writes(cls, parameters: Sequence[int], operand: int, lo: int, hi: int) -> Extent | None:
        return Extent(4 * lo * parameters[1], 4 * (hi - lo) * parameters[1])


@body(Magnitude)
def magnitude_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):
    frames, bins, power = parameter(record, 0), parameter(record, 1), parameter(record, 2)
    eps = parameter_f32(record, 3)
    for slot in range(slot_lo, slot_hi):
        x = operand_f32(record, arenas, 0, slot, 2 * frames * bins)
        y = operand_f32(record, arenas, 1, slot, frames * bins)
        for frame in range(part_lo, part_hi):
            re = x[2 * frame * bins : (2 * frame + 1) * bins]
            im = x[(2 * frame + 1) * bins : (2 * frame + 2) * bins]
            out = y[frame * bins : (frame + 1) * bins]
            if power == 1:
                for k in range(bins):
                    out[k] = math.sqrt(re[k] * re[k] + im[k] * im[k] + eps)
            else:
                for k in range(bins):
                    out[k] = re[k] * re[k] + im[k] * im[k] + eps


def _analyse(
    g: GraphBuilder,
    x: Value,
    window: tuple[Value, ...],
    n: int,
    length: int,
    bins: int,
    hop: int,
    lead: tuple[int, ...],
) -> Value:
    basis = g.op("dft_basis", *window, n=n, length=length, bins=bins)
    found = basis.type.shape[0]
    return _product(g, x, basis, found, length, hop, (*lead, 2, found // 2))


def _product(g: GraphBuilder, x: Value, basis: Value, n: int, k: int, step: int, shape: tuple[int, ...]) -> Value:
    """`matmul` of the windows of x, `step` apart, with a basis [n, k]."""
    frames = math.prod(shape) // n
    packed = g.op("pack_panels", basis)
    y = g.op("matmul", x, packed, n=n, k=k, frames=frames, step=step, pad=0, activation="none", roles=0)
    return g.op("reshape", y, shape=shape)


def _angles(n: int, bins: int, length: int) -> Array:
    """2 pi k t / n with k t reduced modulo n first, [bins, length]."""
    return 2.0 * np.pi * (np.outer(np.arange(bins), np.arange(length)) % n) / n


def _blocks(spectrum: Array, bins: int) -> Array:
    spectrum = spectrum[..., : bins or None]
    return np.stack([spectrum.real, spectrum.imag], axis=-2)


def _positive(name: str, what: str, value: int) -> int:
    if value < 1:
        raise GraphError(f"{name}: {what}", wanted=">= 1", found=value)
    return value


def _check_transform(name: str, n: int, length: int, bins: int) -> int:
    """The number of bins of a transform of n points over frames of `length`."""
    _positive(name, "points of the transform", n)
    if length > n:
        raise GraphError(f"{name}: a frame longer than the transform", wanted=f"<= {n}", found=length)
    if not 0 <= bins <= n // 2 + 1:
        raise GraphError(f"{name}: bins", wanted=f"1 to {n // 2 + 1}, or 0 for all", found=bins)
    return bins or n // 2 + 1


def _transform_cost(y: Type, columns: int, depth: int, x: Type) -> Cost:
    """A product with a basis [columns, depth]."""
    return Cost({"f32": 2 * y.size * depth}, weight_bytes=4 * columns * depth, activation_bytes=x.bytes + y.bytes)
