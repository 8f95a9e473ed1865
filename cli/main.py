"""`wpk`: the command line. Each command group has a file of its own; all of them speak through `cli.output`.

Commands import what they need when they run, so that `wpk --help` does not wait for a compiler.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from wpk.cli import bench, density, doctor, floor, ops, profile, report, run, zoo
from wpk.cli.output import guard, write


class Root(TyperGroup):
    """The top of the command line: reports whatever ends a command, and exits with its code."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        options = words[: words.index("--")] if "--" in words else words
        extra |= {"prog_name": "wpk", "standalone_mode": False}
        sys.exit(guard(lambda: super(Root, self).main(words, **extra), json="--json" in options))


app = typer.Typer(
    name="wpk",
    cls=Root,
    help="A compiler and engine for continuous inference: models that advance on a clock.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(zoo.app, name="zoo")
app.add_typer(ops.app, name="ops")
app.add_typer(profile.app, name="profile")
app.command("run", cls=run.RunCommand)(run.run)
app.command("floor")(floor.floor)
bench.app.command("density")(density.density)
bench.app.command("report")(report.report)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


def version() -> str:
    """The installed version; "unknown" where the package runs from a folder that was never installed."""
    try:
        return importlib.metadata.version("wpk")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _show_version(wanted: bool) -> None:
    if wanted:
        write(sys.stdout, f"wpk {version()}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A compiler and engine for continuous inference: models that advance on a clock."""


def main() -> None:
    """The entry point `wpk`."""
    app()


if __name__ == "__main__":
    main()
