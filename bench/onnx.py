"""A baseline that runs a model's published ONNX files in onnxruntime, as the zoo describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import UsageError, WeightsError
from wpk.zoo.baselines import Baseline, Feed, Network, Size

Array = NDArray[Any]


class OnnxBaseline:
    """All networks of a baseline for `sessions` sessions, on `threads` threads. files: alias -> file.

    Noise is drawn once; states are carried from run to run, as the original's user must.
    """

    def __init__(self, baseline: Baseline, files: Mapping[str, Path], *, sessions: int, threads: int) -> None:
        runtime = _onnxruntime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        rng = np.random.default_rng(0)
        batch, copies = (sessions, 1) if baseline.batched else (1, sessions)
        self._networks = []
        for network in baseline.networks:
            if network.file not in files:
                raise WeightsError(
                    f"the baseline's file {network.file!r} is not in its source", wanted=network.file,
                    found=", ".join(files) or "no files",
                )  # fmt: skip
            session = runtime.InferenceSession(
                str(files[network.file]), sess_options=options, providers=["CPUExecutionProvider"]
            )
            feeds = [{name: _value(f, batch, rng) for name, f in network.inputs.items()} for _ in range(copies)]
            self._networks.append((session, *_carried(network, session), feeds))

    def advance(self, steps: int) -> None:
        """Advance every session by that many steps."""
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        for session, outputs, states, feeds in self._networks:
            for feed in feeds:
                found = session.run(outputs, feed)
                for name, index in states:
                    feed[name] = found[index]


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            "this baseline needs the package onnxruntime", wanted="onnxruntime", found="not installed",
            hint="pip install 'wpk[bench]', or leave --baseline out",
        ) from error  # fmt: skip
    return onnxruntime


def _carried(network: Network, session: Any) -> tuple[list[str], list[tuple[str, int]]]:
    """All outputs' names, and for each state input the index of the output that replaces it."""
    outputs = [output.name for output in session.get_outputs()]
    wanted = {name: feed.next for name, feed in network.inputs.items() if feed.next is not None}
    absent = sorted(set(wanted.values()) - set(outputs))
    if absent:
        raise WeightsError(f"{network.file} lacks outputs", wanted=", ".join(absent), found=", ".join(outputs))
    return outputs, [(name, outputs.index(output)) for name, output in wanted.items()]


def _value(feed: Feed, batch: int, rng: np.random.Generator) -> Array:
    def shape(sizes: tuple[Size, ...]) -> tuple[int, ...]:
        return tuple(batch if size == "batch" else size for size in sizes)

    if feed.random is not None:
        return (0.1 * rng.standard_normal(shape(feed.random))).astype(feed.dtype)
    if feed.state is not None:
        return np.zeros(shape(feed.state), feed.dtype)
    return np.array(feed.constant, feed.dtype)
