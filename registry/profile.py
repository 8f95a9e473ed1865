"""The profile store: compiled programs on disk, found by id, checked before they are believed.

A profile is a folder `ID/` with

    manifest.json   who it is and what it needs; read first, compatibility is answered from it alone
    program.bin     the program (`wpk.scheduler.program`)
    load.ir         the graph that makes the weights and initial images at load, as IR text
    SHA256SUMS      the hashes of these three (`sha256sum -c SHA256SUMS`): no byte can change unnoticed

It is written to a temporary folder, hashed and renamed, under a lock per id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from wpk.ir.errors import OperatorError, ProfileError, ProgramError, TargetError, WpkError
from wpk.ir.graph import Graph
from wpk.ir.text import parse_graph
from wpk.ops import LIBRARY
from wpk.registry.settings import Settings, settings
from wpk.registry.storage import publish_folder, sha256_bytes, store_errors, sweep_temporaries, withdraw_folder
from wpk.scheduler.check import Check, check_program
from wpk.scheduler.cost import Floor
from wpk.scheduler.program import FORMAT, Program
from wpk.scheduler.target import find_target

MANIFEST, PROGRAM, LOAD, SUMS = "manifest.json", "program.bin", "load.ir", "SHA256SUMS"
FILES = frozenset({MANIFEST, PROGRAM, LOAD, SUMS})
SCHEMA = 1


class OperatorUse(BaseModel):
    """An operator that a program was built with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    version: int
    digest: str


class Manifest(BaseModel):
    """What is known of a profile without reading its program. Times in ms or s as named, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA
    id: str
    model: str
    model_version: int
    spec_sha256: str
    capacity: int
    context: int
    target: str
    steps_per_beat: int
    period_ms: float
    compiler: str
    program_format: int = FORMAT
    operators: tuple[OperatorUse, ...]
    program_sha256: str
    load_sha256: str
    arenas: dict[str, int]
    phases: int
    waves: int
    floor_ms: float
    predicted_ms: float
    floor: Floor


@dataclass(frozen=True)
class Entry:
    """One folder of the store: a manifest, or the error that says what is wrong with it."""

    id: str
    path: Path
    manifest: Manifest | None
    error: ProfileError | None = None

    @property
    def broken(self) -> str | None:
        """What is wrong, in one line; None for a profile that can be read."""
        if self.error is None:
            return None
        found = f": wanted {self.error.wanted}, found {self.error.found}" if self.error.wanted else ""
        return self.error.message.removeprefix(f"profile {self.id}: ") + found


@dataclass(frozen=True)
class Profile:
    """A profile read whole and found intact."""

    manifest: Manifest
    program: Program
    load: Graph
    path: Path


class ProfileStore:
    """The profiles of one cache folder."""

    def __init__(self, where: Settings | None = None) -> None:
        self.folder = (where or settings()).profiles

    def list(self) -> list[Entry]:
        """Every entry, broken ones included, by id."""
        if not self.folder.is_dir():
            return []
        with store_errors(self.folder):
            names = sorted(p.name for p in self.folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        return [self._entry(self.folder / name) for name in names]

    def get(self, id: str) -> Entry | None:
        """The entry of exactly that id, broken or not; None where there is none."""
        path = self.folder / id
        return self._entry(path) if path.is_dir() else None

    def find(self, prefix: str) -> Entry:
        """The one entry whose id starts so."""
        found = [e for e in self.list() if e.id.startswith(prefix)] if prefix else []
        exact = [e for e in found if e.id == prefix]
        if len(exact) == 1 or len(found) == 1:
            return (exact or found)[0]
        if found:
            raise ProfileError(f"{prefix!r} names several profiles", wanted="one", found=", ".join(e.id for e in found))
        raise ProfileError(
            f"no profile {prefix!r}", wanted="an id or an unambiguous prefix",
            found=f"{len(self.list())} profiles", hint="`wpk profile list` shows them; `wpk profile build` makes one.",
        )  # fmt: skip

    def write(self, manifest: Manifest, program: bytes, load: str, *, replace: bool = False) -> Path:
        """Publish a profile; one entry, however many processes write it at once."""
        final = self.folder / manifest.id

        def writer(folder: Path) -> None:
            described = (manifest.model_dump_json(indent=2) + "\n").encode()
            (folder / PROGRAM).write_bytes(program)
            (folder / LOAD).write_bytes(load.encode())
            (folder / MANIFEST).write_bytes(described)
            (folder / SUMS).write_bytes(_sums(described, manifest))

        publish_folder(final, writer, valid=lambda p: self._entry(p).error is None, replace=replace)
        return final

    def read(self, prefix: str) -> Profile:
        """Read, check the hashes and the compatibility, decode. `ProfileError` says field, wanted and found."""
        entry = self.find(prefix)
        if entry.error is not None:
            raise entry.error
        assert entry.manifest is not None
        for problem in incompatibilities(entry.manifest):
            raise problem
        data, load = self._bytes(entry.path / PROGRAM), self._bytes(entry.path / LOAD)
        for name, bytes_, wanted in (
            (PROGRAM, data, entry.manifest.program_sha256), (LOAD, load, entry.manifest.load_sha256),
        ):  # fmt: skip
            if sha256_bytes(bytes_) != wanted:
                raise ProfileError(
                    f"profile {entry.id}: {name} is not what was built",
                    wanted=f"sha256 {wanted[:16]}", found=f"sha256 {sha256_bytes(bytes_)[:16]}",
                    hint=_mend(entry.manifest),
                )  # fmt: skip
        program = Program.from_bytes(data)
        for field, said, found in contradictions(entry.manifest, program):
            raise ProfileError(
                f"profile {entry.id}: {field} of the manifest is not the program's", wanted=said, found=found,
                hint=_mend(entry.manifest),
            )  # fmt: skip
        return Profile(entry.manifest, program, parse_graph(load.decode()), entry.path)

    def verify(self, prefix: str) -> tuple[Check, ...]:
        """Re-hash, check compatibility, and run the static checks on the bytes."""
        return tuple(self._verify(self.find(prefix)))

    def remove(self, prefix: str) -> str:
        """Delete one profile; its id."""
        entry = self.find(prefix)
        withdraw_folder(entry.path)
        return entry.id

    def prune(self) -> tuple[str, ...]:
        """Delete broken and incompatible profiles and what killed builds left; the names removed."""
        removed = sweep_temporaries(self.folder) if self.folder.is_dir() else []
        for entry in self.list():
            if entry.manifest is None or list(incompatibilities(entry.manifest)):
                removed.append(self.remove(entry.id))
        return tuple(removed)

    def _verify(self, entry: Entry) -> Iterator[Check]:
        yield Check("manifest", entry.manifest is not None, entry.broken or "readable, and what was built")
        if entry.manifest is None:
            return
        with store_errors(entry.path):
            foreign = sorted(p.name for p in entry.path.iterdir() if p.name not in FILES)
        yield Check("files", not foreign, f"foreign: {', '.join(foreign)}" if foreign else "no foreign ones")
        problems = list(incompatibilities(entry.manifest))
        yield Check("compatible", not problems, str(problems[0]) if problems else "operators and formats match")
        for name, wanted in ((PROGRAM, entry.manifest.program_sha256), (LOAD, entry.manifest.load_sha256)):
            try:
                found = sha256_bytes(self._bytes(entry.path / name))
            except WpkError as error:
                yield Check(f"sha256 {name}", False, str(error))
                return
            yield Check(f"sha256 {name}", found == wanted, f"wanted {wanted[:16]}, found {found[:16]}")
        data = self._bytes(entry.path / PROGRAM)
        yield from check_program(data)
        try:
            broken = list(contradictions(entry.manifest, Program.from_bytes(data)))
            detail = "; ".join(f"{field}: manifest {said}, program {found}" for field, said, found in broken)
            yield Check("manifest says what the program is", not broken, detail or "sizes and operators agree")
        except ProgramError as error:
            yield Check("manifest says what the program is", False, str(error))
        try:
            parse_graph(self._bytes(entry.path / LOAD).decode())
            yield Check("load graph", True, "parses")
        except (WpkError, UnicodeDecodeError) as error:
            yield Check("load graph", False, str(error))

    def _entry(self, path: Path) -> Entry:
        try:
            return Entry(path.name, path, _read_manifest(path))
        except ProfileError as error:
            return Entry(path.name, path, None, error)

    def _bytes(self, path: Path) -> bytes:
        with store_errors(path):
            return path.read_bytes()


def _read_manifest(path: Path) -> Manifest:
    """The manifest of a profile's folder, proven to be what was built; `ProfileError` says what is wrong."""

    def broken(what: str, wanted: object, found: object) -> ProfileError:
        hint = f"Remove it with `wpk profile rm {path.name}` and build it again, or build it with --force."
        return ProfileError(f"profile {path.name}: {what}", wanted=wanted, found=found, hint=hint)

    try:
        absent = sorted(name for name in FILES if not (path / name).is_file())
        if absent:
            raise broken("files are missing", ", ".join(sorted(FILES)), f"no {', no '.join(absent)}")
        data, sums = (path / MANIFEST).read_bytes(), (path / SUMS).read_bytes()
    except OSError as error:
        raise broken("it cannot be read", "readable files", error) from None
    if not sums.startswith(_sum_line(MANIFEST, sha256_bytes(data))):
        said = sums[:16].decode("ascii", "replace")
        raise broken(f"{MANIFEST} and {SUMS} do not agree", f"sha256 {said}", f"sha256 {sha256_bytes(data)[:16]}")
    schema = _schema(data)
    if schema != SCHEMA:  # before the fields, which another schema may have changed
        raise broken("schema_version", SCHEMA, schema)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise broken(f"{MANIFEST}: {place}", first["msg"], first.get("input")) from None
    if sums != _sums(data, manifest):
        raise broken(f"{SUMS} is not what was built", f"the hashes that {MANIFEST} has", "others")
    if manifest.id != path.name:
        raise broken("the manifest names another profile", path.name, manifest.id)
    return manifest


def _schema(data: bytes) -> object:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    return found.get("schema_version", "none") if isinstance(found, dict) else type(found).__name__


def _sum_line(name: str, digest: str) -> bytes:
    return f"{digest}  {name}\n".encode()


def _sums(data: bytes, manifest: Manifest) -> bytes:
    pairs = ((MANIFEST, sha256_bytes(data)), (PROGRAM, manifest.program_sha256), (LOAD, manifest.load_sha256))
    return b"".join(_sum_line(name, digest) for name, digest in pairs)


def _mend(manifest: Manifest) -> str:
    m = manifest
    return (
        f"Build it again: `wpk profile build {m.model} --cap {m.capacity} --context {m.context} --target {m.target} "
        "--force`."
    )


def contradictions(manifest: Manifest, program: Program) -> Iterator[tuple[str, object, object]]:
    """(field, what the manifest says, what the program is) wherever the two differ."""
    named = tuple(f"{use.name}@{use.version}" for use in manifest.operators)
    for field, said, found in (
        ("capacity", manifest.capacity, program.slots),
        ("steps_per_beat", manifest.steps_per_beat, program.steps),
        ("arenas", manifest.arenas, program.arena_bytes()),
        ("phases", manifest.phases, len(program.payloads)),
        ("waves", manifest.waves, program.waves),
        ("operators", named, program.operators),
    ):
        if said != found:
            yield field, said, found


def incompatibilities(manifest: Manifest) -> Iterator[ProfileError]:
    """Why this installation cannot run a profile, from its manifest alone."""
    hint = _mend(manifest)
    if manifest.program_format != FORMAT:
        yield ProfileError(
            f"profile {manifest.id}: program_format", wanted=FORMAT, found=manifest.program_format, hint=hint
        )
    for use in manifest.operators:
        field = f"profile {manifest.id}: operator {use.name}@{use.version}"
        try:
            digest = LIBRARY.digest(use.name, use.version, find_target(manifest.target).kind)
        except (OperatorError, TargetError) as error:
            yield ProfileError(field, wanted=error.wanted, found=error.found, hint=hint)
            continue
        if digest != use.digest:
            yield ProfileError(f"{field} has changed", wanted=use.digest[:16], found=digest[:16], hint=hint)
