"""The one sink: everything that `wpk` says goes through here, and so does every error that ends it.

stdout carries the result: text for people (tables on a terminal, aligned columns elsewhere), exactly one JSON object
with `--json`, or bare names with `-q`. stderr carries errors, notes, and on a terminal progress.

A command describes its result once, as fields for programs, names for `-q` and blocks for people:

    Output(json, quiet).result({"models": rows}, names=[...], blocks=[Table(("name", "task"), [...])])
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from wpk.ir.errors import CapacityError, StoreError, UsageError, WpkError
from wpk.ir.progress import Progress, silent

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]
QuietFlag = Annotated[bool, typer.Option("-q", "--quiet", help="Ids or names only.")]


class InternalError(WpkError):
    """Something that WPK did not foresee: a defect, or a machine in a state that nobody thought of."""


class InterruptedRun(WpkError):
    """The user ended the command."""


class StreamError(Exception):
    """A standard stream that is closed or cannot be written. reason: None where its reader has just left."""

    def __init__(self, reason: str | None) -> None:
        super().__init__(reason)
        self.reason = reason


# --- blocks: what people read --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """Rows under column names; cells are shown as text, None as a dash. Numbers are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    empty: str = ""  # said instead of a table without rows


@dataclass(frozen=True)
class Fields:
    """Label and value, one a line."""

    pairs: Mapping[str, object]
    title: str = ""


Block = Table | Fields | str


@dataclass(frozen=True)
class Output:
    """How this command speaks: json and quiet are its two flags."""

    json: bool = False
    quiet: bool = False

    def result(self, fields: Mapping[str, Any], *, names: Sequence[str] = (), blocks: Sequence[Block] = ()) -> None:
        """The command's result, in the form that was asked for; called once."""
        if self.json:
            write(sys.stdout, to_json(fields) + "\n")
        elif self.quiet:
            write(sys.stdout, "".join(f"{name}\n" for name in names))
        else:
            _show(sys.stdout, blocks)

    def verdict(self, ok: bool) -> None:
        """End the command with exit code 1 where a check did not pass."""
        if not ok:
            raise typer.Exit(FAILED)

    def note(self, text: str) -> None:
        """Something worth knowing beside the result, on stderr."""
        if not self.quiet:
            _say(f"note: {text}\n")

    def step(self, text: str) -> None:
        """What is being done now, once, on stderr where that is a terminal: for work that drawing would disturb."""
        if not self.quiet and _terminal(sys.stderr):
            _say(f"{text}\n")

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A report function that draws on stderr where that is a terminal, and does nothing elsewhere."""
        if self.quiet or not _terminal(sys.stderr):
            yield silent
            return
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)

            def report(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total or None)

            yield report


# --- errors -----------------------------------------------------------------------------------------------------
def exit_code(error: WpkError) -> int:
    """2 for what could never be right, whatever the machine and its files; 1 for the rest; 130 for an interrupt."""
    if isinstance(error, InterruptedRun):
        return INTERRUPTED
    if isinstance(error, UsageError) or (isinstance(error, CapacityError) and error.capacity < 1):
        return WRONG_USE
    return FAILED


def error_text(error: WpkError) -> str:
    """Cause, wanted, found, mend; each on lines of its own."""
    lines = [f"error: {error.message.rstrip()}"]
    for label, value in (("wanted", error.wanted), ("found", error.found), ("mend", error.hint)):
        if value is not None:
            lines.append(f"  {label:<6}  " + value.rstrip().replace("\n", f"\n{'':10}"))
    return "\n".join(lines) + "\n"


def guard(command: Callable[[], object], *, json: bool) -> int:
    """Run a command line; whatever ends it is reported, and its exit code returned. Nothing is raised."""
    try:
        code = command()
        if code == INTERRUPTED:  # typer has turned the interrupt into this
            raise KeyboardInterrupt
        write(sys.stdout, "")
        return code if isinstance(code, int) else DONE
    except StreamError as closed:
        return _reader_left(closed.reason)
    except (Exception, KeyboardInterrupt) as raised:
        if isinstance(raised, OSError) and raised.errno == errno.EPIPE:
            return _reader_left(None)
        cause = raised
    if type(cause).__name__ == "NoArgsIsHelpError":  # typer's; the help that it carries has been printed
        return WRONG_USE
    error = translated(cause)
    if not isinstance(error, UsageError) and debugging():
        _say("".join(traceback.format_exception(cause)))
    _say(error_text(error))
    try:
        write(sys.stdout, to_json({"error": error.as_dict()}) + "\n" if json else "")
    except StreamError:
        _discard(sys.stdout)
        return exit_code(error) if not json else FAILED
    return exit_code(error)


def translated(error: BaseException) -> WpkError:
    """Any exception as one of ours: typer's own usage errors, interrupts, and the unexpected."""
    if isinstance(error, WpkError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRun("interrupted", hint="what was finished before is kept")
    message = getattr(error, "format_message", None)
    if callable(message):  # the parser's; its class is private to typer
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "wpk")
        usage = context.get_usage().removeprefix("Usage: ") if context is not None else None
        text = str(message()).strip().rstrip(".")
        return UsageError(text[:1].lower() + text[1:], wanted=usage, hint=f"`{path} --help` says more")
    if isinstance(error, MemoryError):
        return InternalError(
            "memory ran out", found=str(error) or None, hint="lower --cap, or run it where there is more memory"
        )
    if isinstance(error, OSError) and (disk := _disk_error(error)) is not None:
        return disk
    return InternalError(
        "something went wrong that WPK did not foresee",
        found=f"{type(error).__name__}: {error}",
        hint="run it again with WPK_DEBUG=1, and report what it prints",
    )


_DISK_HINTS = {
    errno.EACCES: "check the permissions of it and of the folders above it",
    errno.EPERM: "check the permissions of it and of the folders above it",
    errno.ENOENT: "check the path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file where a folder is needed",
    errno.ENOSPC: "make room on the disk, or set $WPK_HOME to another one",
    errno.EDQUOT: "make room in your quota, or set $WPK_HOME to another disk",
    errno.EFBIG: "the limit of a file's size is reached (`ulimit -f`, or the file system)",
    errno.EROFS: "its disk is read-only; choose another place",
    errno.ELOOP: "symbolic links lead in a circle; name the file itself",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EIO: "the disk fails; check it, and copy the file again",
}


def _disk_error(error: OSError) -> StoreError | None:
    """What the operating system says of a file or disk; None for other errors, such as the network's."""
    if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
        return None
    hint = _DISK_HINTS.get(error.errno)
    if error.filename is None and hint is None:
        return None
    named = [
        os.fsdecode(p) if isinstance(p, bytes) else str(p) for p in (error.filename, error.filename2) if p is not None
    ]
    reason = error.strerror or str(error)
    return StoreError(
        f"{' -> '.join(named) or 'a file'} cannot be used",
        wanted="a file or folder that can be read and written",
        found=f"{type(error).__name__}: {reason}",
        hint=hint or "check that it exists and may be read and written",
    )


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    try:
        from wpk.registry.settings import settings

        return settings().debug
    except Exception:  # an installation too broken to be asked
        return False


def _reader_left(reason: str | None) -> int:
    """The result did not arrive. A reader that left (`| head`) has had enough; anything else is said."""
    _discard(sys.stdout)
    if reason is not None:
        hint = "check where stdout leads, and the room there"
        _say(error_text(StoreError("stdout cannot be written", wanted="an open stream", found=reason, hint=hint)))
    return FAILED


def _discard(stream: TextIO | None) -> None:
    # Python flushes its streams once more as it ends; without a reader that would complain.
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())  # type: ignore[union-attr]
        finally:
            os.close(null)


def _say(text: str) -> None:
    """Text on stderr, as far as that can be written: it must not stand in the way of the result."""
    try:
        write(sys.stderr, text)
    except StreamError:
        _discard(sys.stderr)


def _terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


# --- text ---------------------------------------------------------------------------------------------------------
def write(stream: TextIO | None, text: str) -> None:
    """Write text whatever the stream's encoding; what it cannot show is escaped. Raises StreamError."""
    if stream is None:  # Python found it closed
        raise StreamError("it is closed")
    encoding = stream.encoding or "utf-8"
    shown = text.encode(encoding, "backslashreplace").decode(encoding)
    with _writing():
        stream.write(shown)
        stream.flush()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StreamError(None if error.errno == errno.EPIPE else error.strerror or str(error)) from error
    except ValueError as error:
        raise StreamError(str(error)) from error


def to_json(value: Mapping[str, Any]) -> str:
    """One JSON object, ASCII, without NaN: numbers that are not finite become null."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    """Plain data of dicts, sequences, NumPy values, pydantic models, enums and paths."""
    if value is None or (isinstance(value, str | bool | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Path):
        return str(value)
    for method in ("tolist", "isoformat"):  # NumPy arrays and scalars; dates
        if hasattr(value, method):
            return _plain(getattr(value, method)())
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump(mode="json"))
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def size(count: int | float) -> str:
    """Bytes as a person reads them."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show(stream: TextIO | None, blocks: Sequence[Block]) -> None:
    terminal = _terminal(stream)
    for index, block in enumerate(blocks):
        titled = not isinstance(block, str) and block.title
        if index and titled:
            write(stream, "\n")
        if isinstance(block, str):
            write(stream, block.rstrip("\n") + "\n")
        elif isinstance(block, Fields):
            width = max((len(label) for label in block.pairs), default=0)
            lines = [f"{label:<{width}}  {_cell(value)}".rstrip() for label, value in block.pairs.items()]
            write(stream, "\n".join([*([block.title] if titled else []), *lines]) + "\n")
        elif not block.rows:
            write(stream, (block.empty or f"no {block.title or 'rows'}") + "\n")
        elif terminal and stream is not None:
            _rich_table(stream, block)
        else:
            write(stream, _plain_table(block))


def _numeric(rows: Sequence[Sequence[object]], column: int) -> bool:
    return all(isinstance(row[column], int | float) or row[column] is None for row in rows)


def _plain_table(table: Table) -> str:
    cells = [list(table.columns), *([_cell(value) for value in row] for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    right = [_numeric(table.rows, i) for i in range(len(table.columns))]
    lines = [
        "  ".join(text.rjust(width) if to_right else text.ljust(width) for text, width, to_right in zip(
            row, widths, right, strict=True)).rstrip()
        for row in cells
    ]  # fmt: skip
    return "\n".join([*([table.title] if table.title else []), *lines]) + "\n"


def _rich_table(stream: TextIO, table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(title=Text(table.title) if table.title else None, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if _numeric(table.rows, i) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(_cell(value)) for value in row))
    with _writing():
        Console(file=stream).print(drawn)


def refuse(message: str, *, wanted: object = None, found: object = None, hint: str | None = None) -> NoReturn:
    """Wrong use of the command line."""
    raise UsageError(message, wanted=wanted, found=found, hint=hint)
