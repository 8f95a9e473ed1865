"""`wpk zoo`: the models, their specs and their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpk.cli.output import Block, Fields, JsonFlag, Output, QuietFlag, Table, refuse, size

if TYPE_CHECKING:
    from wpk.registry.weights.inventory import Group
    from wpk.zoo.catalog import Entry

MOST_GROUPS = 40  # of an inventory that a person reads

app = typer.Typer(help="The models.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A model of the zoo.")]
MOST_LINES = 40  # differences that are listed for people; --json has them all


@app.command("list")
def list_models(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Every known model; added ones that are broken are shown as broken."""
    from wpk.registry import catalog

    rows = [_row(entry) for entry in catalog().list()]
    shown = [
        (r["name"], r["version"] and str(r["version"]), r["task"], r["licence"], r["step_ms"], r["parameters"],
         f"{r['weights']['source']}{'' if r['weights']['present'] else ' (not here)'}" if r["weights"] else r["broken"])
        for r in rows
    ]  # fmt: skip
    columns = ("name", "version", "task", "licence", "step ms", "parameters", "weights")
    Output(json, quiet).result({"models": rows}, names=[row["name"] for row in rows], blocks=[Table(columns, shown)])


@app.command("show")
def show_model(name: Name, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """A spec, resolved: ports, operators, tensors, sizes of parameters and state."""
    from wpk.ops import LIBRARY
    from wpk.registry import find_model
    from wpk.zoo.build import build_graph, state_bytes

    spec = find_model(name)
    graph = build_graph(spec)
    tensors: list[dict[str, Any]] = [
        {"name": port.name, "dtype": port.value.type.dtype.value, "shape": list(port.value.type.shape)}
        for port in graph.weights
    ]
    used = sorted({(node.op, node.version) for node in graph.nodes})
    operators: list[dict[str, Any]] = [{"name": op, "version": v, "digest": LIBRARY.digest(op, v)} for op, v in used]
    ports = [_port(side, n, p) for side in ("inputs", "outputs") for n, p in getattr(spec.ports, side).items()]
    parameters, state = sum(port.value.type.size for port in graph.weights), state_bytes(graph)
    fields: dict[str, Any] = {
        "spec": spec.model_dump(mode="json", by_alias=True),
        "operators": operators,
        "tensors": tensors,
        "parameters": parameters,
        "state_bytes_per_session": state,
        "ports": {side: {p["name"]: p for p in ports if p["side"] == side} for side in ("inputs", "outputs")},
    }
    clock = spec.clock
    blocks: list[Block] = [
        Fields(
            {
                "name": f"{spec.name} {spec.version}",
                "task": spec.task,
                "description": " ".join(spec.description.split()),
                "licence": spec.licence,
                "reference": spec.reference,
                "weights": spec.weights,
                "clock": f"{clock.step_ms:g} ms a step, {clock.steps_per_beat} a beat, {clock.sample_rate} Hz",
                "parameters": parameters,
                "state": f"{size(state['fixed'])} a session, and {size(state['per_step'])} a step of context",
            }
        ),
        Table(
            ("port", "side", "type", "kind", "latency"),
            [(p["name"], p["side"][:-1], p["type"], p["kind"], p.get("latency_samples") or None) for p in ports],
            title="ports",
        ),
        Table(
            ("component", "kind", "reads"),
            [(c.name, c.kind, ", ".join(c.references or ()) or None) for c in spec.components],
            title="components",
        ),
        Table(
            ("operator", "version", "digest"),
            [(o["name"], str(o["version"]), o["digest"][:12]) for o in operators],
            title="operators",
        ),
        Table(
            ("tensor", "type"), [(port.name, str(port.value.type)) for port in graph.weights],
            title="tensors", empty="no tensors",
        ),
    ]  # fmt: skip
    Output(json, quiet).result(fields, names=[spec.name], blocks=blocks)


@app.command("add")
def add_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A spec file, or a folder with spec.yaml.")],
    name: Annotated[str | None, typer.Option("--name", metavar="N", help="What to call it here.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Python that comes with the spec may run.")] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Add a model by its spec."""
    from wpk.registry import catalog

    scheme = source.partition(":")[0]
    if scheme in ("hf", "http", "https") and not Path(source).exists():
        refuse(
            f"specs cannot be added from {scheme}: sources yet", wanted="a spec file (.yaml, .yml, .json) or a folder",
            found=source, hint="write a spec that names the repository as its weights source, and add that file",
        )  # fmt: skip
    added = catalog().add(Path(source), name=name, trust=trust)
    out = Output(json, quiet)
    for warning in added.warnings:
        out.note(warning)
    out.result(
        {"name": added.name, "version": added.version, "path": added.path, "warnings": list(added.warnings)},
        names=[added.name],
        blocks=[f"added {added.name} {added.version}"],
    )


@app.command("pull")
def pull_weights(name: Name, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Fetch a model's weights and check every file's hash."""
    from wpk.registry import find_model
    from wpk.registry.settings import settings
    from wpk.registry.weights import WeightsStore

    out = Output(json, quiet)
    spec = find_model(name)
    with out.progress() as report:
        files = WeightsStore(settings()).pull(spec.weights, report)
    out.result(
        {"name": spec.name, "source": str(spec.weights), "files": files},
        names=[file["name"] for file in files],
        blocks=[
            Table(
                ("file", "size", "sha256"),
                [(file["name"], size(file["bytes"]), file["sha256"]) for file in files],
                empty=f"{spec.weights} needs no files",
            )
        ],
    )


@app.command("check")
def check_weights(
    name: Name,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="PATH", help="A file or folder instead of the model's source.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compare the tensors of a model's weights with its spec: missing, extra, misshapen."""
    from wpk.registry import find_model
    from wpk.registry.settings import settings
    from wpk.registry.weights import WeightsStore
    from wpk.zoo.sources import PathSource

    out = Output(json, quiet)
    spec = find_model(name)
    source = spec.weights if weights is None else PathSource(path=str(weights))
    store = WeightsStore(settings())
    with out.progress() as report:
        if not store.present(source):
            store.pull(source, report)
    _, inventory = store.open_model(spec, source)
    verdict = f"{inventory.found} tensors fit the spec, {inventory.values:,} values"
    if not inventory.ok:
        counts = f"{len(inventory.missing)} missing, {len(inventory.extra)} extra, {len(inventory.misshapen)} misshapen"
        verdict = f"{inventory.expected} tensors wanted, {inventory.found} found: {counts}"
    out.result(
        {"name": spec.name, "source": str(source)} | inventory.as_dict(),
        names=[spec.name] if inventory.ok else [*inventory.missing, *inventory.extra, *_misshapen(inventory.misshapen)],
        blocks=[*_first(inventory.lines()), *_groups(inventory.groups), verdict],
    )
    out.verdict(inventory.ok)


def _groups(groups: Sequence[Group]) -> list[Block]:
    """The checkpoint's inventory, where it has several parts."""
    if len(groups) < 2 or len(groups) > MOST_GROUPS:
        return []
    rows = [(g["name"], g["tensors"], f"{g['values']:,}", g["unused"] or None) for g in groups]
    total = ("all", sum(g["tensors"] for g in groups), f"{sum(g['values'] for g in groups):,}",
             sum(g["unused"] for g in groups) or None)  # fmt: skip
    return [Table(("tensors of", "tensors", "values", "unused"), [*rows, total])]


@app.command("synthesize")
def synthesize_weights(
    name: Name,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The .safetensors file to write.")],
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="The model's own, or 0.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a checkpoint of made-up weights: every tensor that a model expects, from a seed."""
    from wpk.registry import find_model
    from wpk.registry.weights.synthesize import synthesize

    output = Output(json, quiet)
    spec = find_model(name)
    with output.progress() as report:
        made = synthesize(spec, out, seed=seed, replace=force, progress=report)
    fields = {"file": str(made.file), "tensors": made.tensors, "values": made.values, "bytes": made.bytes}
    output.result(
        {"name": spec.name, "seed": made.seed} | fields,
        names=[str(made.file)],
        blocks=[f"{made.file}: {made.tensors} tensors, {made.values:,} values, {size(made.bytes)}, seed {made.seed}"],
    )


@app.command("rm")
def remove_model(name: Name, json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Remove an added model; its weights and profiles stay."""
    from wpk.registry import catalog

    path = catalog().remove(name)
    Output(json, quiet).result({"removed": name, "path": path}, names=[name], blocks=[f"removed {name}: {path}"])


def _row(entry: Entry) -> dict[str, Any]:
    """One model of the list; a broken one has its name and what is wrong with it."""
    from wpk.ir.errors import WpkError
    from wpk.registry.settings import settings
    from wpk.registry.weights import WeightsStore
    from wpk.zoo.build import parameter_count

    spec, broken, parameters = entry.spec, entry.broken, None
    if spec is not None:
        try:
            parameters = parameter_count(spec)
        except WpkError as error:
            broken = error
    return {
        "name": entry.name,
        "version": spec and spec.version,
        "task": spec and spec.task,
        "licence": spec and str(spec.licence),
        "step_ms": spec and spec.clock.step_ms,
        "parameters": parameters,
        "weights": spec and {
            "source": str(spec.weights), "present": WeightsStore(settings()).present(spec.weights)
        },
        "origin": entry.origin,
        "broken": None if broken is None else str(broken),
    }  # fmt: skip


def _port(side: str, name: str, port: Any) -> dict[str, Any]:
    data: dict[str, Any] = port.model_dump(mode="json", by_alias=True)
    return {"name": name, "side": side} | data


def _misshapen(entries: Iterable[Any]) -> list[str]:
    return [entry["name"] for entry in entries]


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"... and {more} more; --json lists all"]
