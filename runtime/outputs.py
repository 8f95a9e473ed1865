"""What a model's outputs mean for a whole recording, by task.

    vad      {"speech": [probability per step], "segments": [[start_s, end_s], ...]}
    denoise  {"wav": "path", "latency_s": seconds}
    beat     {"beats": [s, ...], "downbeats": [s, ...], "activations": [[probability per label], ...]}
    asr      {"text": "...", "partials": [[t_s, "..."], ...]}
    voice    {"wav": "path", "latency_s": seconds}, and for every port of tokens its text, such as "text", "user_text"

A partial text is what a step has made longer, at the step's end. Thresholds and distances are data of the spec
(`events`). Times are seconds from the start of the recording. A task without a rule here gives every output port's
values, a list per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wpk.ir.errors import SpecError
from wpk.runtime.audio import write_wav
from wpk.runtime.play import Played
from wpk.zoo.events import PeakEvents, SegmentEvents
from wpk.zoo.ports import Vocabulary
from wpk.zoo.spec import ModelSpec

Array = NDArray[Any]
Outputs = dict[str, Any]


def session_outputs(spec: ModelSpec, played: Sequence[Played], folder: Path) -> list[Outputs]:
    """What each session's outputs mean, in the order of `played`; audio goes to files in `folder`.

    An audio file is called RECORDING.MODEL.wav, with a number where two recordings have one name or a recording has
    that name itself: what was given is not overwritten. Results of an earlier run are.
    """
    taken = {Path(one.recording.name).resolve() for one in played}
    stems = distinct(
        [f"{Path(one.recording.name).stem}.{spec.name}" for one in played],
        lambda stem: (folder / f"{stem}.wav").resolve() in taken,
    )
    rule = TASKS[spec.task] if spec.task in TASKS and _is_whole(spec) else _raw
    return [rule(spec, one, folder / f"{stem}.wav") for one, stem in zip(played, stems, strict=True)]


def distinct(names: Sequence[str], taken: Callable[[str], bool] = lambda name: False) -> list[str]:
    """The names, with -2, -3, ... behind those that were there before, or are taken."""
    found: list[str] = []
    for name in names:
        candidate, number = name, 2
        while candidate in found or taken(candidate):
            candidate, number = f"{name}-{number}", number + 1
        found.append(candidate)
    return found


def summary(outputs: Outputs) -> str:
    """One line about a session's outputs, for people."""
    if "segments" in outputs:
        spoken = sum(end - start for start, end in outputs["segments"])
        where = ", ".join(f"{start:.2f}-{end:.2f}" for start, end in outputs["segments"])
        return f"{spoken:.2f} s of speech: {where}" if where else "no speech"
    texts = [f"{name}: {value!r}" for name, value in outputs.items() if isinstance(value, str) and name != "wav"]
    if "wav" in outputs:
        wav = f"{outputs['wav']}, {1e3 * outputs['latency_s']:.0f} ms behind the input"
        return ", ".join([*texts, wav])
    if texts:
        return ", ".join(texts)
    lists = {name: value for name, value in outputs.items() if name not in ("activations", "speech")}
    return ", ".join(f"{len(value)} {name}" for name, value in lists.items())


# --- tasks --------------------------------------------------------------------------------------------------------
def _speech(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    events = spec.events
    if not isinstance(events, SegmentEvents):
        raise _no_rule(spec, "segments")
    speech = played.outputs[events.port].ravel()
    step_s = spec.clock.samples_per_step / spec.clock.sample_rate
    length = len(played.recording.samples) / spec.clock.sample_rate
    return {"speech": speech.tolist(), "segments": [list(s) for s in speech_segments(speech, events, step_s, length)]}


def _audio(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    """The stream as it comes: not shifted by its latency, so that much longer than the recording; of whole steps, in
    float.
    """
    ports = {name: port for name, port in spec.ports.outputs.items() if port.kind == "audio"}
    if len(ports) != 1:
        raise _no_rule(spec, "one audio output")
    ((name, port),) = ports.items()
    assert port.sample_rate is not None
    write_wav(path, played.outputs[name].ravel(), port.sample_rate, subtype="FLOAT")
    return {"wav": str(path), "latency_s": port.latency_samples / spec.clock.sample_rate}


def _beats(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    """Under the first label in the plural every peak, under the others those that they name."""
    events = spec.events
    if not isinstance(events, PeakEvents):
        raise _no_rule(spec, "peaks")
    rows, step_s = played.outputs[events.port], spec.clock.samples_per_step / spec.clock.sample_rate
    columns = [spec.ports.outputs[events.port].labels.index(label) for label in events.labels]
    chosen = rows[:, columns]
    least_gap = int(np.ceil(events.min_distance_s / step_s - 1e-9))
    peaks = pick_peaks(chosen.sum(axis=1), events.threshold, least_gap, events.start_step)
    named = [(_seconds(max(0.0, n * step_s + events.offset_s)), int(np.argmax(chosen[n]))) for n in peaks]
    found: Outputs = {
        f"{label}s": [time for time, which in named if index in (0, which)] for index, label in enumerate(events.labels)
    }
    return found | {"activations": rows.tolist()}


def _recognised(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    texts = list(spelled(spec))
    if len(texts) != 1:
        raise _no_rule(spec, "one output of tokens with a vocabulary")
    vocabulary, rows = spelled(spec)[texts[0]], played.outputs[texts[0]]
    step_s = spec.clock.samples_per_step / spec.clock.sample_rate
    heard, partials = "", list[list[Any]]()
    for step, row in enumerate(rows.tolist()):
        if more := vocabulary.spell(row):
            heard += more
            partials.append([_seconds((step + 1) * step_s), vocabulary.text(heard)])
    return {"text": vocabulary.text(heard), "partials": partials}


def _conversation(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    rows = {name: played.outputs[name].ravel().tolist() for name in spelled(spec)}
    texts = {name: vocabulary.text(vocabulary.spell(rows[name])) for name, vocabulary in spelled(spec).items()}
    return texts | _audio(spec, played, path)


def spelled(spec: ModelSpec) -> dict[str, Vocabulary]:
    """The output ports whose tokens spell something."""
    return {name: port.vocabulary for name, port in spec.ports.outputs.items() if port.vocabulary is not None}


def _raw(spec: ModelSpec, played: Played, path: Path) -> Outputs:
    return {name: rows.tolist() for name, rows in played.outputs.items()}


TASKS: dict[str, Callable[[ModelSpec, Played, Path], Outputs]] = {
    "vad": _speech, "denoise": _audio, "beat": _beats, "asr": _recognised, "voice": _conversation,
}  # fmt: skip


def _is_whole(spec: ModelSpec) -> bool:
    """Whether the model gives what its task is about: an encoder or a backbone alone may be a model too."""
    needed = {"asr": spelled(spec), "voice": [p for p in spec.ports.outputs.values() if p.kind == "audio"]}
    return bool(needed.get(spec.task, True))


def _no_rule(spec: ModelSpec, wanted: str) -> SpecError:
    found = spec.events.kind if spec.events else "no events"
    return SpecError(
        f"{spec.name}: a model of task {spec.task!r} says what its outputs mean", wanted=wanted, found=found
    )


# --- events -------------------------------------------------------------------------------------------------------
def speech_segments(speech: Array, events: SegmentEvents, step_s: float, length_s: float) -> list[tuple[float, float]]:
    """Stretches of speech in seconds, inside [0, length_s]. speech [steps]: a probability a step of `step_s`."""
    found = [
        (_seconds(start * step_s), _seconds(min(end * step_s, length_s)))
        for start, end in hysteresis(speech, events.onset, events.offset, events.onset_steps, events.offset_steps)
    ]
    found = _joined(found, events.min_silence_s)
    found = [(start, end) for start, end in found if end - start >= events.min_speech_s and end > start]
    pad = events.pad_s
    padded = [(_seconds(max(0.0, start - pad)), _seconds(min(length_s, end + pad))) for start, end in found]
    return _joined(padded, 0.0)


def hysteresis(
    values: Array, onset: float, offset: float, onset_steps: int, offset_steps: int
) -> list[tuple[int, int]]:
    """Half-open step ranges. One opens at the first of `onset_steps` consecutive steps at `onset` or above, and closes
    at the first of `offset_steps` below `offset`; what is open at the end closes there.
    """
    found: list[tuple[int, int]] = []
    start, run = -1, 0
    for step, value in enumerate(values):
        run = run + 1 if (value >= onset if start < 0 else value < offset) else 0
        if start < 0 and run >= onset_steps:
            start, run = step - run + 1, 0
        elif start >= 0 and run >= offset_steps:
            found.append((start, step - run + 1))
            start, run = -1, 0
    return [*found, (start, len(values))] if start >= 0 else found


def pick_peaks(activation: Array, threshold: float, least_gap: int, start_step: int = 0) -> list[int]:
    """Steps that stand out, in order. activation [steps].

    Candidates are local maxima at `threshold` or above, from `start_step` on; of a plateau its first step, and the
    ends count as falling. The highest is taken first (of equal ones the earlier), and rules out those less than
    `least_gap` steps away; then the next. Needs the whole recording, so it is no live beat tracker.
    """
    values = np.asarray(activation, np.float64)[start_step:]
    if not len(values):
        return []
    starts = np.flatnonzero(np.diff(values, prepend=np.nan) != 0)  # of runs of equal values
    runs = np.concatenate(([-np.inf], values[starts], [-np.inf]))
    candidates = starts[(runs[1:-1] > runs[:-2]) & (runs[1:-1] > runs[2:]) & (runs[1:-1] >= threshold)]
    taken: list[int] = []
    for step in sorted(candidates.tolist(), key=lambda n: (-values[n], n)):
        if all(abs(step - other) >= least_gap for other in taken):
            taken.append(step)
    return [start_step + step for step in sorted(taken)]


def _seconds(value: float) -> float:
    """To the microsecond, so that times that should meet do."""
    return round(value, 6)


def _joined(segments: Sequence[tuple[float, float]], least_gap: float) -> list[tuple[float, float]]:
    """Segments in order, with those merged that overlap or are closer than `least_gap` seconds."""
    found: list[tuple[float, float]] = []
    for start, end in segments:
        if found and (start - found[-1][1] < least_gap or start <= found[-1][1]):
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
