"""Every model that is known here: the built-in specs and those that the user has added.

    <added>/NAME/spec.yaml      the spec, as it was given where nothing had to change
    <added>/NAME/*.py           Python that came with it; components.py is imported if the user trusts it
    <added>/NAME/added.json     {"source": ..., "trusted": ...}

A folder appears whole or not at all. Beside it lie, while needed,

    .NAME.lock                  the lock of the name; the operating system frees it when its holder dies
    .wpk-part.NAME.RANDOM       a folder being written or removed under that lock

so a part whose lock is free is a dead process's, and is swept.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from wpk.ir.errors import SpecError, StoreError, UnknownModelError, UntrustedSourceError, WpkError
from wpk.zoo import models
from wpk.zoo.build import expected_tensors
from wpk.zoo.component import Component, add_kinds, installed_kinds, kinds_in
from wpk.zoo.problems import close_hint
from wpk.zoo.sources import PathSource
from wpk.zoo.spec import ModelSpec, Slug
from wpk.zoo.text import MAX_BYTES, parse_yaml

_SLUG: TypeAdapter[str] = TypeAdapter(Slug)
SPEC, RECORD, CODE = "spec.yaml", "added.json", "components.py"
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_PART = ".wpk-part."  # no model's name starts with a dot
LOCK_TIMEOUT_S = 60.0  # a model is a few small files


@dataclass(frozen=True)
class Entry:
    """A known model. path: of its spec. broken: why its spec cannot be used, else None and `spec` is there."""

    name: str
    origin: Literal["builtin", "added"]
    path: Path
    spec: ModelSpec | None = None
    broken: WpkError | None = None


@dataclass(frozen=True)
class Added:
    """What `add` has done. path: the folder of the added model."""

    name: str
    version: int
    path: Path
    warnings: tuple[str, ...] = ()


class Catalog:
    """The zoo with one user's additions in the folder `added`, which may not exist yet."""

    def __init__(self, added: Path) -> None:
        self.added = added

    # --- reading --------------------------------------------------------------------------------------------------
    @staticmethod
    def builtin() -> dict[str, Path]:
        """Name -> spec file of the models that come with WPK."""
        folder = Path(str(importlib.resources.files(models)))
        return {path.stem: path for path in sorted(folder.glob("*.yaml"))}

    def list(self) -> Sequence[Entry]:
        """Every model, the built-in ones first. Broken ones are listed as broken and hide no other."""
        self._sweep()
        found = [self._entry(name, "builtin", path) for name, path in self.builtin().items()]
        return found + [self._entry(folder.name, "added", folder / SPEC) for folder in self._added_folders()]

    def names(self) -> Sequence[str]:
        return [*self.builtin(), *(folder.name for folder in self._added_folders())]

    def get(self, name: str) -> ModelSpec:
        """The spec of that name. Raises UnknownModelError with close names, or what is wrong with the spec."""
        builtin = self.builtin()
        if name in builtin:
            return load_spec(builtin[name])
        folder = next((folder for folder in self._added_folders() if folder.name == name), None)
        if folder is None:
            known = self.names()
            hint = close_hint(name, known) or "`wpk zoo list` shows all; `wpk zoo add` adds one."
            raise UnknownModelError(f"no model {name!r}", wanted=", ".join(known), found=name, hint=hint)
        return self._load(folder)

    # --- changing -------------------------------------------------------------------------------------------------
    def add(self, source: Path, name: str | None = None, trust: bool = False) -> Added:
        """Add a spec: a YAML or JSON file, or a folder with spec.yaml and perhaps components.py.

        name: what it is called here, the spec's own name by default. trust: Python in the folder may be imported,
        now and later. The spec is checked as far as that goes without weights; nothing is kept if it fails. Raises
        SpecError, OperatorError, UntrustedSourceError where it needs Python that may not run, StoreError.
        """
        source = Path(os.path.abspath(Path(source).expanduser()))
        path = _spec_file(source)
        code = sorted(path.parent.glob("*.py")) if path != source else []
        files = {p.name: _read_bytes(p, "Python") for p in code}
        spec, warnings = load_spec(path, trust=trust, folder=path != source), []
        text = _read(path)
        changed = _renamed(spec, name, path)
        if isinstance(changed.weights, PathSource) and not Path(changed.weights.path).expanduser().is_absolute():
            weights = changed.weights.model_copy(update={"path": str(path.parent / changed.weights.path)})
            changed = changed.model_copy(update={"weights": weights})
            warnings.append(f"weights are read from {weights.path}")
        if code and not trust:
            warnings.append(
                f"Python beside the spec is not imported without --trust: {', '.join(p.name for p in code)}"
            )
        if changed.name in self.builtin() or self.added.joinpath(changed.name).exists():
            own = changed.name not in self.builtin()
            hint = f"`wpk zoo rm {changed.name}` first, or choose another name." if own else "Choose another name."
            raise SpecError(
                f"a model {changed.name!r} is there already", wanted="a new name", found=changed.name, hint=hint
            )
        expected_tensors(changed)  # builds all of it
        same = changed == spec and path.suffix != ".json"
        files[SPEC] = (text if same else changed.to_yaml()).encode()
        files[RECORD] = (json.dumps({"source": str(source), "trusted": trust}, indent=1) + "\n").encode()
        folder = self._write(changed.name, files)
        return Added(changed.name, changed.version, folder, tuple(warnings))

    def remove(self, name: str) -> Path:
        """Forget an added model, broken or not; the path that is gone. Raises UnknownModelError, StoreError."""
        folder = next((folder for folder in self._added_folders() if folder.name == name), None)
        if folder is None:
            added = ", ".join(f.name for f in self._added_folders()) or "no added models"
            hint = "Built-in models cannot be removed." if name in self.builtin() else None
            raise UnknownModelError(f"{name!r} is no added model", wanted=added, found=name, hint=hint)
        with self._locked(name):
            try:
                os.rename(folder, self._part(name))  # in one step: no reader sees half a model
            except OSError as error:
                raise _disk_error(folder, error) from error
        return folder

    # --- helpers --------------------------------------------------------------------------------------------------
    def _added_folders(self) -> Sequence[Path]:
        try:
            return sorted(p for p in self.added.iterdir() if p.is_dir() and not p.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _disk_error(self.added, error) from error

    def _entry(self, name: str, origin: Literal["builtin", "added"], path: Path) -> Entry:
        try:
            return Entry(name, origin, path, load_spec(path) if origin == "builtin" else self._load(path.parent))
        except WpkError as error:
            return Entry(name, origin, path, broken=error)

    def _load(self, folder: Path) -> ModelSpec:
        spec = load_spec(folder / SPEC, trust=self._trusted(folder))
        if spec.name != folder.name:
            hint = f"Give the spec in {folder} its folder's name."
            raise SpecError(
                f"{folder / SPEC} is another model", wanted=f"name: {folder.name}", found=spec.name, hint=hint
            )
        return spec

    @staticmethod
    def _trusted(folder: Path) -> bool:
        try:
            record = json.loads(_read_bytes(folder / RECORD, "a record"))
        except (WpkError, ValueError, RecursionError):
            return False
        return isinstance(record, dict) and record.get("trusted") is True

    def _write(self, name: str, files: Mapping[str, bytes]) -> Path:
        """The folder of a model, whole or not at all."""
        folder, part = self.added / name, self._part(name)
        with self._locked(name):
            try:
                part.mkdir()
                for file, data in files.items():
                    (part / file).write_bytes(data)
                os.rename(part, folder)
            except OSError as error:
                if folder.exists():
                    raise SpecError(
                        f"a model {name!r} was added at the same time", wanted="a new name", found=name
                    ) from error
                raise _disk_error(self.added, error) from error
        return folder

    # --- parts ----------------------------------------------------------------------------------------------------
    def _part(self, name: str) -> Path:
        return self.added / f"{_PART}{name}.{secrets.token_hex(4)}"

    @contextmanager
    def _locked(self, name: str, timeout: float | None = None) -> Iterator[None]:
        """Hold a name against every other process, with none of its parts there before or after."""
        timeout = LOCK_TIMEOUT_S if timeout is None else timeout
        try:
            self.added.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.added / f".{name}.lock", timeout=timeout)
            lock.acquire()
        except Timeout as error:
            wanted, hint = f"its lock within {timeout:g} s", "wait for the other process, or stop it"
            raise StoreError(
                f"the model {name!r} is in use by another process", wanted=wanted, found="still held", hint=hint
            ) from error
        except OSError as error:
            raise _disk_error(self.added, error) from error
        try:
            self._remove_parts(name)
            yield
        finally:
            self._remove_parts(name)
            lock.release()

    def _sweep(self) -> None:
        """Remove what killed processes left, as far as that may be done now."""
        for name in {_part_name(part) for part in self._parts()}:
            with suppress(StoreError), self._locked(name, timeout=0):
                pass

    def _remove_parts(self, name: str) -> None:
        for part in self._parts():
            if _part_name(part) == name:
                shutil.rmtree(part, ignore_errors=True)

    def _parts(self) -> Sequence[Path]:
        try:
            return [p for p in self.added.iterdir() if p.name.startswith(_PART) and _part_name(p)]
        except OSError:
            return []


def _part_name(part: Path) -> str:
    """The name of the model that a part is of."""
    return part.name.removeprefix(_PART).rpartition(".")[0]


def load_spec(path: Path, *, trust: bool = False, folder: bool = True) -> ModelSpec:
    """The spec of a file. folder: components.py beside it belongs to it, and is imported if trusted and needed."""
    kinds: Mapping[str, type[Component]] = installed_kinds()
    data = parse_yaml(_read(path), str(path))
    code = path.parent / CODE
    needed = sorted(_kinds_of(data) - set(kinds))
    if folder and needed and code.is_file():
        if not trust:
            raise UntrustedSourceError(
                f"{path} needs Python that came with it",
                wanted="your word that it may run",
                found=f"{CODE} for the kinds {', '.join(needed)}",
                hint=f"Read {code}, then add the model with --trust.",
            )
        kinds = _import_kinds(code, kinds)
    return ModelSpec.from_data(data, str(path), kinds)


def _kinds_of(data: Any) -> set[str]:
    components = data.get("components") if isinstance(data, dict) else None
    parts = components if isinstance(components, list) else []
    return {part["kind"] for part in parts if isinstance(part, dict) and isinstance(part.get("kind"), str)}


def _import_kinds(code: Path, installed: Mapping[str, type[Component]]) -> Mapping[str, type[Component]]:
    """The installed kinds and those of a file, which may import its neighbours (`from .helper import ...`)."""
    name = f"wpk_added_{secrets.token_hex(8)}"  # a name of its own: two models may bring the same kinds
    spec = importlib.util.spec_from_file_location(name, code, submodule_search_locations=[str(code.parent)])
    if spec is None or spec.loader is None:
        raise SpecError(f"{code} cannot be imported", wanted="Python", found="something else")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):  # stdout is the command's result
            spec.loader.exec_module(module)
        kinds = dict(installed)
        add_kinds(kinds, kinds_in(module, str(code)), str(code))
        return kinds
    except (WpkError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit and the like too
        found = f"{type(error).__name__}: {error}"
        raise SpecError(f"{code} fails when it is imported", wanted="component classes", found=found) from error


def _spec_file(source: Path) -> Path:
    """The file of the spec: in the folder that the source is, or the source itself."""
    try:
        return _find_spec(source)
    except OSError as error:  # a name too long, a folder that may not be read
        raise _read_error(source, "a spec file or a folder with spec.yaml", error) from error


def _find_spec(source: Path) -> Path:
    if source.is_dir():
        path = source / SPEC
        if not path.is_file():
            found = ", ".join(sorted(p.name for p in source.iterdir())[:8]) or "an empty folder"
            raise SpecError(f"{source} holds no spec", wanted=SPEC, found=found)
        return path
    if not source.exists():
        raise SpecError(f"{source} does not exist", wanted="a spec file or a folder with spec.yaml", found="nothing")
    if source.suffix.lower() not in _SUFFIXES:
        raise SpecError(
            f"{source} is no spec file", wanted=" | ".join(sorted(_SUFFIXES)), found=source.suffix or "no suffix"
        )
    return source


def _read(path: Path) -> str:
    try:
        text = _read_bytes(path, "a spec").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is no text", wanted="UTF-8", found=str(error)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(path: Path, what: str) -> bytes:
    """A regular file that is not too long; nothing else is opened, for a pipe would wait and a device never end."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
            hint = "replace it by a regular file, or remove it"
            raise SpecError(f"{path} is no regular file", wanted=f"{what} in a regular file", found=found, hint=hint)
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        found = "a link to nothing" if path.is_symlink() else "nothing"
        raise SpecError(f"{path} does not exist", wanted=what, found=found) from None
    except OSError as error:
        raise _read_error(path, what, error) from error
    if len(data) > MAX_BYTES:
        raise SpecError(f"{path} is too long for {what}", wanted=f"at most {MAX_BYTES} bytes", found="more")
    return data


def _renamed(spec: ModelSpec, name: str | None, path: Path) -> ModelSpec:
    if name is None or name == spec.name:
        return spec
    try:
        _SLUG.validate_python(name)
    except ValueError:
        wanted = "lower-case letters, digits, '.', '_' and '-'"
        raise SpecError(f"{name!r} cannot be a model's name", wanted=wanted, found=name) from None
    return spec.model_copy(update={"name": name})


def _read_error(path: Path, what: str, error: OSError) -> StoreError:
    hint = "check the path, and the permissions of it and of the folders above it"
    return StoreError(f"{path} cannot be read", wanted=what, found=error.strerror or str(error), hint=hint)


def _disk_error(place: Path, error: OSError) -> StoreError:
    hint = "check its permissions and the room on its disk, or set $WPK_HOME to another folder"
    return StoreError(f"{place} cannot be used", wanted="a folder to read and write", found=str(error), hint=hint)
