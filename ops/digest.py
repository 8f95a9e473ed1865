"""Digests of operators: the source text of all that decides what one computes.

An operator's class, its bodies, and whatever of this package they refer to or close over (the scalar function of an
element-wise operator, say) count by their source; constants by their `repr`; foreign functions by their name, their
version being the environment's. The helper modules that every body may inline count whole.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "wpk.ops"
DECLARATION = "wpk.ops.operator"
HELPERS = ("math32", "memory", "payload", "simd", "vector")


def source_digest(name: str, classes: Iterable[type], functions: Iterable[Callable[..., Any]]) -> str:
    """SHA-256 over the sources of these classes and functions and of what they refer to."""
    classes = list(classes)
    text = {"name": name, "helpers": _helpers()}
    own = (PACKAGE, *(cls.__module__ for cls in classes))
    for thing in (*classes, *functions):
        _collect(thing, text, own)
    return hashlib.sha256("\0".join(f"{k}\0{text[k]}" for k in sorted(text)).encode()).hexdigest()


def _collect(thing: Any, text: dict[str, str], own: tuple[str, ...], path: str = "") -> None:
    """Add a class or function of the modules `own`, and all that it refers to, by where it is found."""
    module, name = thing.__module__ or "", thing.__qualname__
    key = f"{path}{module}.{name}"
    if key in text:
        return
    if not module.startswith(own) or module in (DECLARATION, *(f"{PACKAGE}.{h}" for h in HELPERS)):
        text[key] = "declaration" if module == DECLARATION else "foreign"
        return
    text[key] = _source(thing)
    if isinstance(thing, type):
        for member in vars(thing).values():
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member) and member.__code__.co_filename == inspect.getsourcefile(thing):
                _collect(member, text, own, path)
        return
    inner = f"{key}/" if thing.__closure__ else path  # what is closed over differs between copies of one source
    for cell_name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
        if cell_name != "__class__":
            _collect_value(cell_name, cell.cell_contents, text, own, inner)
    for global_name in sorted(_global_names(thing.__code__)):
        if global_name in thing.__globals__:
            _collect_value(f"{module}.{global_name}", thing.__globals__[global_name], text, own, path)


def _collect_value(name: str, found: Any, text: dict[str, str], own: tuple[str, ...], path: str) -> None:
    found = getattr(found, "py_func", found)  # what a numba dispatcher compiles
    if isinstance(found, type) or inspect.isfunction(found):
        _collect(found, text, own, path)
        text[f"{path}{name} is"] = f"{found.__module__}.{found.__qualname__}"
    elif isinstance(found, int | float | str | np.number | np.ufunc):
        text[f"{path}{name}"] = repr(found)
    elif isinstance(found, dict | list | tuple | frozenset):
        ordered = sorted(found, key=repr) if isinstance(found, frozenset) else found
        members = found if isinstance(found, dict) else dict(enumerate(ordered))
        for key in members:
            _collect_value(f"{name}[{key!r}]", members[key], text, own, path)


def _global_names(code: Any) -> set[str]:
    """Names that a code object may look up, those of its lambdas and comprehensions included."""
    inner = (c for c in code.co_consts if inspect.iscode(c))
    return set(code.co_names).union(*(_global_names(c) for c in inner))


def _source(thing: Any) -> str:
    if isinstance(thing, type):
        file = inspect.getsourcefile(thing)
        segments = _segments(file) if file else {}
    else:
        code = thing.__code__
        if code.co_name == "<lambda>":
            return Path(code.co_filename).read_text(encoding="utf-8").splitlines()[code.co_firstlineno - 1]
        segments = _segments(code.co_filename)
    # A class made at run time (a table's row) has no text of its own: its methods and what they close over count.
    return segments.get(thing.__qualname__, "made at run time")


@functools.cache
def _segments(file: str) -> dict[str, str]:
    """Qualified name -> source of every class and function of a file, in one parse (`inspect` makes one a call)."""
    text = Path(file).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef):
                visit(child, prefix)
                continue
            name = prefix + child.name
            first = min((child.lineno, *(d.lineno for d in child.decorator_list)))
            found[name] = found.get(name, "") + "".join(lines[first - 1 : child.end_lineno])
            visit(child, f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>.")

    visit(ast.parse(text), "")
    return found


@functools.cache
def _helpers() -> str:
    folder = Path(__file__).parent
    return "\0".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in HELPERS)
