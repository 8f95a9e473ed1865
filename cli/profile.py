"""`wpk profile`: build, list, show, verify, explain and remove profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpk.cli.output import Fields, JsonFlag, Output, QuietFlag, Table, size

if TYPE_CHECKING:
    from wpk.registry import Manifest
    from wpk.registry.profile import Entry

app = typer.Typer(help="Compiled profiles.", no_args_is_help=True)

Cap = Annotated[int, typer.Option("--cap", metavar="N", help="Sessions that run at once.")]
Context = Annotated[
    int | None, typer.Option("--context", metavar="T", help="Steps of history; the model's by default.")
]
Target = Annotated[str, typer.Option("--target", help="cpu, h200, h100-sxm, or auto for what this machine has.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="A profile id, or an unambiguous prefix.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A model of the zoo.")]


@app.command("build")
def build_profile(
    model: Model,
    cap: Cap,
    context: Context = None,
    target: Target = "auto",
    force: Annotated[bool, typer.Option("--force", help="Build it even if it is there.")] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compile a model for a capacity, and keep the profile."""
    from wpk.registry import build

    out = Output(json, quiet)
    with out.progress() as report:
        report(f"compiling {model}", 0, 0)
        built = build(
            model, capacity=cap, context=context, target=target, force=force,
            show=lambda name, _: report(f"{model}: {name}", 0, 0),
        )  # fmt: skip
    if built.note is not None:
        out.note(built.note)
    fields = _summary(built.manifest) | {
        "cached": built.cached,
        "build_s": built.build_s,
        "program_sha256": built.manifest.program_sha256,
        "path": built.path,
    }
    how = "found" if built.cached else "built"
    text = f"{how} {built.manifest.id} in {built.build_s:.2f} s"
    out.result(fields, names=[built.manifest.id], blocks=[text, _fields(built.manifest)])


@app.command("list")
def list_profiles(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Every profile of the store, broken ones included."""
    from wpk.registry import ProfileStore

    rows = [_row(entry) for entry in ProfileStore().list()]
    table = Table(
        ("id", "model", "capacity", "target", "phases", "waves", "memory", "state"),
        [
            (r["id"], r.get("model"), r.get("capacity"), r.get("target"), r.get("phases"), r.get("waves"),
             size(sum(r["arenas"].values())) if "arenas" in r else None, r["broken"] or "ok")
            for r in rows
        ],
        empty="no profiles yet: `wpk profile build MODEL --cap N` makes one",
    )  # fmt: skip
    Output(json, quiet).result({"profiles": rows}, names=[row["id"] for row in rows], blocks=[table])


@app.command("show")
def show_profile(profile: Id, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """What a profile says of itself."""
    from wpk.registry import ProfileStore

    entry = ProfileStore().find(profile)
    row = _row(entry)
    if entry.manifest is None:
        blocks: list[Any] = [Fields({"id": entry.id, "path": entry.path, "broken": entry.broken})]
    else:
        row = entry.manifest.model_dump(mode="json") | row
        operators = [(use.name, str(use.version), use.digest[:12]) for use in entry.manifest.operators]
        blocks = [
            Fields({"id": entry.id, "path": str(entry.path)}),
            _fields(entry.manifest),
            Table(("operator", "version", "digest"), operators, title="operators"),
        ]
    Output(json, quiet).result(row, names=[entry.id], blocks=blocks)


@app.command("rm")
def remove_profile(profile: Id, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Delete one profile."""
    from wpk.registry import ProfileStore

    removed = ProfileStore().remove(profile)
    Output(json, quiet).result({"removed": [removed]}, names=[removed], blocks=[f"removed {removed}"])


@app.command("prune")
def prune_profiles(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Delete profiles that are broken or no longer run here, and what killed builds left."""
    from wpk.registry import ProfileStore

    removed = ProfileStore().prune()
    text = "\n".join(f"removed {name}" for name in removed) or "nothing to remove"
    Output(json, quiet).result({"removed": removed}, names=removed, blocks=[text])


@app.command("verify")
def verify_profile(profile: Id, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Hash a profile again and run the static checks on its bytes."""
    from wpk.registry import ProfileStore

    store = ProfileStore()
    entry = store.find(profile)
    checks = store.verify(entry.id)
    ok = all(check.ok for check in checks)
    out = Output(json, quiet)
    out.result(
        {
            "id": entry.id,
            "ok": ok,
            "checks": [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks],
        },
        names=[entry.id] if ok else [],
        blocks=[
            Table(("check", "ok", "detail"), [(check.name, check.ok, check.detail) for check in checks]),
            f"{entry.id} is intact" if ok else f"{entry.id} must not be used: build it again",
        ],
    )
    out.verdict(ok)


@app.command("explain")
def explain_profile(
    profile: Id,
    phase: Annotated[int | None, typer.Option("--phase", metavar="K", help="One phase alone, with its tasks.")] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Phases, waves and arenas of a profile, as decoded from its program."""
    from wpk.cli.explain import explain

    explain(Output(json, quiet), profile, phase)


def _summary(manifest: Manifest) -> dict[str, Any]:
    """The fields that build, list and show have in common."""
    names = ("id", "model", "capacity", "context", "target", "phases", "waves", "floor_ms", "predicted_ms", "arenas")
    return {name: getattr(manifest, name) for name in names}


def _row(entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {"id": entry.id, "path": entry.path, "broken": entry.broken}
    return row if entry.manifest is None else _summary(entry.manifest) | row


def _fields(manifest: Manifest) -> Fields:
    arenas = ", ".join(f"{name} {size(count)}" for name, count in manifest.arenas.items())
    return Fields(
        {
            "model": f"{manifest.model} {manifest.model_version}",
            "capacity": manifest.capacity,
            "context": manifest.context,
            "target": manifest.target,
            "period": f"{manifest.period_ms:g} ms",
            "phases": f"{manifest.phases} in {manifest.waves} waves",
            "arenas": arenas,
            "floor": f"{manifest.floor_ms:.4g} ms",
            "predicted": f"{manifest.predicted_ms:.4g} ms",
            "program": manifest.program_sha256[:16],
        }
    )
