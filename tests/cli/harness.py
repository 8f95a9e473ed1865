"""What the command line's tests have in common: what a command said, models to add, and what a folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEC = """\
name: tiny
version: 3
task: vad
description: One layer, for tests.
licence: {code: MIT, weights: CC0-1.0}
weights: {synthetic: 7}
clock: {sample_rate: 16000, samples_per_step: 160}
ports:
  inputs: {audio: {type: "f32[160]", kind: audio, sample_rate: 16000}}
  outputs: {speech: {type: "f32[1]", kind: probability, from: head}}
components:
  - {kind: dense, name: head, units: 1, activation: sigmoid}
events: {kind: segments, port: speech, onset: 0.5, offset: 0.4}
"""
ECHO = (
    SPEC.replace("name: tiny", "name: echo")
    .replace("task: vad", "task: denoise")
    .replace("{kind: dense, name: head, units: 1, activation: sigmoid}", "{kind: dense, name: head, units: 160}")
    .replace(
        'speech: {type: "f32[1]", kind: probability, from: head}',
        'audio: {type: "f32[160]", kind: audio, sample_rate: 16000, from: head, latency_samples: 40}',
    )
    .replace("events: {kind: segments, port: speech, onset: 0.5, offset: 0.4}\n", "")
)


@dataclass(frozen=True)
class Said:
    """What a command said: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout, which must be one JSON object and nothing else."""
        assert self.out.endswith("}\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error object, after a look at how stderr tells the same."""
        error = self.json["error"]
        assert list(self.json) == ["error"]
        assert set(error) == {"type", "message", "wanted", "found", "hint"}
        assert self.err.startswith("error: ")
        assert "Traceback" not in self.err
        return error


Wpk = Callable[..., Said]
Wav = Callable[..., Path]


def files(folder: Path) -> list[str]:
    """Everything in a folder but locks and machine code, as relative paths."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.name.endswith(".lock") and "kernels" not in path.relative_to(folder).parts and not path.is_dir()
    )
