"""Windows, transforms as products, magnitudes: against their meaning, numpy.fft and torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import application, check, expansion, meaning, random_inputs, stored
from wpk.ir.errors import GraphError
from wpk.ir.types import f32
from wpk.ops.operator import LIBRARY, Array, make
from wpk.ops.spectral import WINDOWS


def weight(name: str, *inputs: Array, **attrs: object) -> Array:
    """What a weight operator means, with its declared type checked."""
    op = make(LIBRARY.get(name), attrs)
    made = np.asarray(op.meaning(*inputs))
    assert op.infer([f32(*a.shape) for a in inputs]) == (f32(*made.shape),)
    return made


# --- windows ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("length", [1, 2, 3, 16, 401])
def test_a_window_has_its_length_and_lies_between_zero_and_one(kind: str, length: int) -> None:
    window = weight("window", kind=kind, length=length)
    assert window.shape == (length,)
    assert (window > -1e-12).all() and (window < 1 + 1e-12).all()


@pytest.mark.parametrize("kind", ["sqrt_hann", "vorbis"])
def test_synthesis_windows_add_up_to_one(kind: str) -> None:
    """Analysis times synthesis at half a frame's hop: Princen & Bradley 1986."""
    squared = weight("window", kind=kind, length=64) ** 2
    np.testing.assert_allclose(squared[:32] + squared[32:], 1.0, atol=1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize("length", [1, 2, 7, 400])
@pytest.mark.parametrize("kind", ["hann", "hamming", "blackman"])
@pytest.mark.parametrize("periodic", [False, True])
def test_windows_are_those_of_torch(kind: str, periodic: bool, length: int) -> None:
    torch = pytest.importorskip("torch")
    theirs = getattr(torch, f"{kind}_window")(length, periodic=periodic, dtype=torch.float64).numpy()
    ours = weight("window", kind=f"{kind}_periodic" if periodic else kind, length=length)
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_an_unknown_window_is_refused_with_the_known_ones() -> None:
    with pytest.raises(GraphError, match="hann"):
        application("window", kind="hahn", length=4)
    with pytest.raises(GraphError, match="length"):
        application("window", kind="hann", length=0)


# --- bases --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "length", "bins"), [(1, 1, 1), (2, 2, 2), (9, 9, 5), (16, 16, 9), (16, 11, 4), (1411, 1411, 705)]
)
def test_a_basis_transforms_as_numpy_does(n: int, length: int, bins: int) -> None:
    x = np.random.default_rng(n).standard_normal(length)
    basis = weight("dft_basis", n=n, length=length, bins=bins)
    spectrum = np.fft.rfft(x, n)[:bins]
    np.testing.assert_allclose(basis @ x, np.concatenate([spectrum.real, spectrum.imag]), atol=1e-9)


def test_a_window_is_folded_into_the_basis() -> None:
    window = weight("window", kind="hann", length=12)
    np.testing.assert_allclose(weight("dft_basis", window, n=16), weight("dft_basis", n=16, length=12) * window)
    assert weight("dft_basis", window, n=16).shape == (18, 12)


@pytest.mark.parametrize(("n", "bins"), [(1, 1), (2, 2), (9, 5), (16, 9), (16, 4), (960, 481)])
def test_an_inverse_basis_transforms_as_numpy_does(n: int, bins: int) -> None:
    x = np.random.default_rng(n).standard_normal((2, bins))
    made = weight("inverse_dft_basis", n=n, bins=bins) @ x.reshape(-1)
    np.testing.assert_allclose(made, np.fft.irfft(x[0] + 1j * x[1], n), atol=1e-10)


# --- transforms ---------------------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 70), st.integers(0, 30), st.booleans(), st.sampled_from([(), (1,), (3,), (2, 2)]), st.integers(0, 99)
)
def test_rdft(length: int, padding: int, windowed: bool, lead: tuple[int, ...], seed: int) -> None:
    n_fft = length + padding
    bins = seed % (n_fft // 2 + 1)
    operands = [f32(*lead, length), *([f32(length)] if windowed else [])]
    app = application("rdft", *operands, n_fft=n_fft, bins=bins)
    assert app.results == (f32(*lead, 2, bins or n_fft // 2 + 1),)
    check(app, slots=(1, 3, 7)[seed % 3], seed=seed, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 50), st.integers(0, 60), st.integers(0, 99))
def test_stft(length: int, padding: int, hop: int, more: int, seed: int) -> None:
    app = application("stft", f32(length + more), f32(length), hop=hop, n_fft=length + padding)
    check(app, slots=(1, 3, 7)[seed % 3], seed=seed, rtol=1e-4, atol=1e-4)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 70), st.booleans(), st.sampled_from([(), (1,), (3,)]), st.integers(0, 99))
def test_irdft(n: int, windowed: bool, lead: tuple[int, ...], seed: int) -> None:
    bins = n // 2 + 1 if seed % 2 else seed % (n // 2 + 1) + 1
    app = application("irdft", f32(*lead, 2, bins), *([f32(n)] if windowed else []), n=n)
    check(app, slots=(1, 3, 7)[seed % 3], seed=seed, rtol=1e-5, atol=1e-5)


def test_a_transform_is_one_product_with_a_constant_basis() -> None:
    graph = expansion(application("stft", f32(800), f32(400), hop=160, n_fft=512))
    assert [n.op for n in graph.nodes if not n.weight] == ["matmul", "reshape"]
    assert [n.op for n in graph.nodes if n.weight] == ["dft_basis", "pack_panels"]


def test_there_and_back() -> None:
    app = application("rdft", f32(512))
    inputs = random_inputs(app, 3)
    (spectrum,) = check(app, inputs, rtol=1e-3, atol=1e-4)
    (back,) = check(application("irdft", f32(2, 257), n=512), [spectrum], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back, inputs[0], atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(("n_fft", "hop"), [(16, 5), (400, 160), (512, 128), (1411, 441)])
def test_stft_is_that_of_torch(n_fft: int, hop: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(hop).standard_normal(n_fft + 3 * hop + 1)
    window = weight("window", kind="hann_periodic", length=n_fft)
    app = application("stft", f32(x.size), f32(n_fft), hop=hop)
    periodic = torch.hann_window(n_fft, dtype=torch.float64)
    made = torch.stft(torch.from_numpy(x), n_fft, hop, window=periodic, center=False, return_complex=True)
    theirs = made.numpy().T
    np.testing.assert_allclose(
        np.asarray(app.op.meaning(x, window)), np.stack([theirs.real, theirs.imag], 1), atol=1e-9
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: application("rdft", f32(9), n_fft=8), "longer than the transform"),
        (lambda: application("rdft", f32(8), bins=6), "bins"),
        (lambda: application("rdft", f32(8), f32(7)), "window"),
        (lambda: application("stft", f32(7), f32(8), hop=2), "fewer samples"),
        (lambda: application("stft", f32(9), f32(8), hop=0), "hop"),
        (lambda: application("irdft", f32(2, 5), n=7), "bins"),
        (lambda: application("irdft", f32(3, 5), n=8), "x"),
        (lambda: application("irdft", f32(2, 5), f32(9), n=8), "window"),
        (lambda: application("dft_basis", f32(8), n=8, length=7), "window"),
        (lambda: application("magnitude", f32(2, 5), power=3), "power"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        wrong()


# --- magnitude ----------------------------------------------------------------------------------------------------
@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 140), st.sampled_from([(), (1,), (3,), (2, 2)]), st.sampled_from([1, 2]),
    st.sampled_from([0.0, 1e-9, 2.5]), st.sampled_from([1e-3, 1.0, 1e6]), st.integers(0, 99),
)  # fmt: skip
def test_magnitude(bins: int, lead: tuple[int, ...], power: int, eps: float, scale: float, seed: int) -> None:
    app = application("magnitude", f32(*lead, 2, bins), power=power, eps=eps)
    check(app, slots=(1, 3, 7)[seed % 3], seed=seed, scale=scale, rtol=1e-6, atol=0.0)


def test_magnitude_at_the_edges() -> None:
    x = stored([[[0.0, -3.0, np.inf, np.nan], [0.0, 4.0, 1.0, 1.0]]], f32(2, 4))
    (found,) = check(application("magnitude", f32(2, 4)), [x], slots=1, atol=0.0)
    np.testing.assert_array_equal(found, [[0.0, 5.0, np.inf, np.nan]])


def test_meanings_keep_leading_axes() -> None:
    app = application("rdft", f32(2, 3, 8))
    inputs = random_inputs(app, 1)
    (whole,) = meaning(app, inputs, 1)
    np.testing.assert_allclose(whole[0, 1, 2], np.asarray(app.op.meaning(inputs[0][0, 1, 2])), atol=1e-12)
