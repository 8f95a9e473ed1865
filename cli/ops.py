"""`wpk ops`: the operator library."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wpk.cli.output import Block, Fields, JsonFlag, Output, QuietFlag, Table, refuse

if TYPE_CHECKING:
    from wpk.ops import Operator

app = typer.Typer(help="The operator library.", no_args_is_help=True)


@app.command("list")
def list_operators(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Every operator, each version."""
    from wpk.ops import LIBRARY

    rows = [_row(cls.name, cls.version) for cls in LIBRARY]
    Output(json, quiet).result(
        {"operators": rows},
        names=[f"{row['name']}@{row['version']}" for row in rows],
        blocks=[
            Table(
                ("operator", "version", "digest", "targets"),
                [(r["name"], str(r["version"]), r["digest"][:12], ", ".join(r["targets"]) or "expanded") for r in rows],
            )
        ],
    )


@app.command("show")
def show_operator(
    name: Annotated[str, typer.Argument(metavar="NAME[@V]", help="An operator; the newest version if none is named.")],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """One operator: its meaning, operands and attributes; all its versions if none is named."""
    import inspect

    from wpk.ops import LIBRARY

    plain, at, number = name.partition("@")
    if at and not number.isdecimal():
        refuse(f"{name!r} names no operator version", wanted="NAME or NAME@VERSION, such as linear@1", found=name)
    LIBRARY.get(plain, int(number) if at else None)  # refuses what is not there
    versions = [int(number)] if at else LIBRARY.versions(plain)
    rows: list[dict[str, Any]] = []
    blocks: list[Block] = []
    for version in versions:
        cls = LIBRARY.get(plain, version)
        row = _row(plain, version) | _declared(cls) | {"doc": inspect.getdoc(cls) or ""}
        rows.append(row)
        blocks.append(
            Fields(
                {
                    "digest": row["digest"],
                    "targets": ", ".join(row["targets"]) or "none: expanded into simpler operators",
                    "attributes": ", ".join(f"{k}={v}" for k, v in row["attributes"].items()) or None,
                },
                title=f"{plain}@{version}",
            )
        )
        blocks.append(row["doc"])
        blocks.append(
            Table(
                ("operand", "shape", "dtypes", "takes"),
                [(o["name"], o["shape"], "|".join(o["dtypes"]), o["takes"]) for o in row["operands"]],
                empty="no operands",
            )
        )
    names = [f"{plain}@{version}" for version in versions]
    Output(json, quiet).result({"operators": rows}, names=names, blocks=blocks)


def _row(name: str, version: int) -> dict[str, Any]:
    from wpk.ops import LIBRARY

    return {
        "name": name,
        "version": version,
        "digest": LIBRARY.digest(name, version),
        "targets": LIBRARY.targets(name, version),
    }


def _declared(cls: type[Operator]) -> dict[str, Any]:
    """What an operator's class declares: operands with their shape patterns, attributes with their defaults."""
    takes = {True: "weight", False: "session", None: "either"}
    suffix = {(True, False): "?", (False, True): "*"}
    return {
        "operands": [
            {
                "name": o.name + suffix.get((o.optional, o.variadic), ""),
                "shape": f"[{o.pattern}]",
                "dtypes": sorted(dtype.value for dtype in o.dtypes),
                "takes": takes[o.weight],
            }
            for o in cls.operands
        ],
        "attributes": {
            f.name: None if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        },
    }
