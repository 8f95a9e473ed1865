"""`wpk run`: recordings through live sessions of a cohort, one each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from wpk.cli.output import Block, Fields, JsonFlag, Output, QuietFlag, Table, refuse
from wpk.cli.profile import Context, Model, Target

if TYPE_CHECKING:
    from wpk.ir.progress import Progress
    from wpk.runtime.audio import AudioInfo
    from wpk.runtime.play import Recording
    from wpk.zoo.spec import ModelSpec

Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="The last beat by block and wave, for Perfetto (GPU).")
]
Exclusive = Annotated[
    bool, typer.Option("--exclusive", help="Refuse a GPU that other processes use; else they are noted.")
]


class RunCommand(TyperCommand):
    """Lets one `--wav` take several files: after MODEL, `--wav a b c` means `--wav a --wav b --wav c`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, "--wav"))


def spread(args: Sequence[str], option: str) -> list[str]:
    """Repeat the option before each further word that follows its value; only where the first word is no option."""
    if not args or args[0].startswith("-"):
        return list(args)
    found: list[str] = []
    for index, word in enumerate(args):
        follows = found[-2:-1] == [option] and index >= 2
        found += [option, word] if follows and not word.startswith("-") else [word]
    return found


def run(
    model: Model,
    wav: Annotated[
        list[Path] | None, typer.Option("--wav", metavar="FILE...", help="Recordings; each gets a session.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Recorded speech to try things with, fetched once.")] = False,
    cap: Annotated[
        int | None, typer.Option("--cap", metavar="N", help="Sessions at once; as many as recordings by default.")
    ] = None,
    context: Context = None,
    target: Target = "auto",
    realtime: Annotated[bool, typer.Option("--realtime", help="Pace the beats by the model's clock.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where audio goes; the present folder by default.")
    ] = Path(),
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="PATH", help="A file or folder instead of the model's source.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, max=(1 << 64) - 1, help="Of each session's random numbers.")
    ] = 0,
    trace: Trace = None,
    exclusive: Exclusive = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Feed recordings through live sessions, one each, and say what the model made of them."""
    from wpk.registry import find_model, load
    from wpk.runtime.outputs import session_outputs
    from wpk.runtime.play import audio_input, check_capacity, check_context, play
    from wpk.runtime.trace import trace_events, write_trace

    if not wav and not sample:
        refuse("there is nothing to run on", wanted="--wav FILE or --sample", found="neither")
    sink = Output(json, quiet)
    spec = find_model(model)
    audio_input(spec)
    with sink.progress() as report:
        recordings, infos = _read(wav or [], sample, spec.clock.sample_rate, report)
        capacity = len(recordings) if cap is None else cap
        check_capacity(capacity, len(recordings))
        check_context(spec, spec.context if context is None else context, recordings)
        if weights is None:
            fetch(spec, report)
        report(f"loading {model}", 0, 0)
        with load(
            model, capacity=capacity, context=context, target=target, weights=weights, trace=trace is not None,
            exclusive=exclusive, notice=sink.note,
        ) as cohort:  # fmt: skip
            playback = play(
                cohort, recordings, realtime=realtime, seed=seed,
                progress=lambda beat, beats: report(f"beat {beat} of {beats}", beat, beats),
            )  # fmt: skip
            profile = cohort.profile
            events = [] if trace is None else trace_events(cohort.program, cohort.trace(), model)
    outputs = session_outputs(spec, playback.played, out)
    if trace is not None:
        write_trace(trace, events)
    sessions = [
        {
            "input": played.recording.name,
            "seconds": len(played.recording.samples) / spec.clock.sample_rate,
            "steps": played.steps,
            "converted": list(info.converted),
            "outputs": found,
        }
        for played, info, found in zip(playback.played, infos, outputs, strict=True)
    ]
    fields: dict[str, Any] = {
        "model": model,
        "profile": profile.id,
        "capacity": capacity,
        "realtime": realtime,
        "period_ms": profile.period_ms,
        "beats": playback.beats,
        "late": playback.late,
        "beat_ms": playback.beat_ms,
        "sessions": sessions,
    }
    if trace is not None:
        fields["trace"] = trace
    sink.result(fields, names=[profile.id], blocks=_blocks(fields))


def fetch(spec: ModelSpec, report: Progress) -> None:
    """Pull a model's weights if they are not here, with progress."""
    from wpk.registry.settings import settings
    from wpk.registry.weights import WeightsStore

    store = WeightsStore(settings())
    if not store.present(spec.weights):
        store.pull(spec.weights, report)


def _read(
    wav: Sequence[Path], sample: bool, sample_rate: int, report: Progress
) -> tuple[list[Recording], list[AudioInfo]]:
    """The recordings at the model's rate, and what the files were; those of --sample come last."""
    from wpk.registry.settings import settings
    from wpk.runtime.audio import load_audio
    from wpk.runtime.play import Recording
    from wpk.runtime.samples import sample_recordings

    paths = list(wav)
    if sample:
        report("fetching sample recordings", 0, 0)
        paths += sample_recordings(settings())
    report("reading recordings", 0, 0)
    loaded = [load_audio(path, sample_rate) for path in paths]
    recordings = [Recording(str(path), samples) for path, (samples, _) in zip(paths, loaded, strict=True)]
    return recordings, [info for _, info in loaded]


def _blocks(fields: dict[str, Any]) -> list[Block]:
    from wpk.runtime.outputs import summary

    times = fields["beat_ms"]
    rows = [(Path(s["input"]).name, f"{s['seconds']:.2f} s", summary(s["outputs"])) for s in fields["sessions"]]
    notes = [f"{Path(s['input']).name}: {step}" for s in fields["sessions"] for step in s["converted"]]
    return [
        Table(("recording", "length", "result"), rows),
        *notes,
        Fields(
            {
                "profile": fields["profile"],
                "beats": f"{fields['beats']} of {fields['period_ms']:g} ms, {fields['late']} late",
                "beat": f"p50 {times['p50']:.3f}  p99 {times['p99']:.3f}  max {times['max']:.3f} ms",
            }
            | ({"trace": f"{fields['trace']}; open it in https://ui.perfetto.dev"} if "trace" in fields else {})
        ),
    ]
