"""The profile store: the same inputs give the same bytes, an entry is whole or absent, no changed byte is believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scheduler.fuzz import mutate
from tests.zoo.specs import SMALL
from wpk import registry
from wpk.ir.errors import ProfileError, WpkError
from wpk.registry import ProfileStore, profile, storage
from wpk.registry.settings import Settings, child_environment
from wpk.registry.storage import sha256_bytes
from wpk.scheduler.program import Program
from wpk.zoo.spec import ModelSpec

ROOT = Path(__file__).parents[2]
FILES = ["manifest.json", "program.bin", "load.ir", "SHA256SUMS"]
SPEC = ModelSpec.from_yaml(SMALL)


@pytest.fixture(scope="module")
def pristine(shared: Settings) -> Path:
    """A built profile that no test touches."""
    return registry.build(SPEC, capacity=3, target="cpu", where=shared).path


@pytest.fixture
def entry(pristine: Path, where: Settings) -> Path:
    """A copy of it in a store of its own."""
    return Path(shutil.copytree(pristine, where.profiles / pristine.name))


@pytest.fixture
def store(where: Settings) -> ProfileStore:
    return ProfileStore(where)


def python(home: Path, code: str, **environment: str) -> subprocess.Popen[str]:
    """A process that runs code with the small spec in SPEC; $WPK_HOME is `home`."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    start = """
        import json, os, pathlib, time
        from tests.zoo.specs import SMALL
        from wpk import registry
        from wpk.zoo.spec import ModelSpec
        SPEC = ModelSpec.from_yaml(SMALL)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)],
        cwd=ROOT, env=child_environment({"PYTHONPATH": paths, "WPK_HOME": str(home), **environment}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def flip(path: Path, position: int, bits: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def rewrite(entry: Path, **changes: Any) -> None:
    """Another manifest with sums that fit: what another version of WPK might have written."""
    data = json.loads((entry / "manifest.json").read_text()) | changes
    text = json.dumps(data).encode()
    (entry / "manifest.json").write_bytes(text)
    hashes = (sha256_bytes(text), data.get("program_sha256"), data.get("load_sha256"))
    lines = [f"{h}  {name}\n" for h, name in zip(hashes, ("manifest.json", "program.bin", "load.ir"), strict=True)]
    (entry / "SHA256SUMS").write_text("".join(lines))


def refused(store: ProfileStore, entry: Path) -> ProfileError:
    """The error of `read`; `verify` must find something too, whatever the bytes are."""
    with pytest.raises(ProfileError, match=entry.name) as caught:
        store.read(entry.name)
    assert not all(check.ok for check in store.verify(entry.name))
    error = caught.value
    assert error.wanted and error.found and error.hint
    return error


# --- builds -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["SPEC", "'dtln'"])
def test_two_processes_build_the_same_bytes(model: str, tmp_path: Path) -> None:
    code = f"""
        built = registry.build({model}, capacity=7, target="h200", machine_code=False)
        print(json.dumps([built.manifest.id, built.manifest.program_sha256, str(built.path)]))
    """
    runs = [python(tmp_path / seed, code, PYTHONHASHSEED=seed) for seed in ("1", "2")]
    (one, one_sha, one_path), (two, two_sha, two_path) = map(result, runs)
    assert (one, one_sha) == (two, two_sha)
    for name in ("program.bin", "load.ir"):
        assert Path(one_path, name).read_bytes() == Path(two_path, name).read_bytes()
    assert sha256_bytes(Path(one_path, "program.bin").read_bytes()) == one_sha


def test_processes_that_build_one_profile_at_once_give_one_entry_and_no_error(tmp_path: Path) -> None:
    code = """
        while not os.path.exists(os.environ["START"]):
            time.sleep(0.001)
        built = registry.build(SPEC, capacity=5, target="h200", machine_code=False)
        print(json.dumps([built.manifest.id, built.manifest.program_sha256, built.cached]))
    """
    runs = [python(tmp_path, code, START=str(tmp_path / "go")) for _ in range(3)]
    (tmp_path / "go").touch()
    made = [result(run) for run in runs]
    assert len({(id, sha) for id, sha, _ in made}) == 1
    assert sorted(cached for _, _, cached in made) == [False, True, True]
    assert visible(tmp_path / "cache" / "profiles") == [made[0][0]]


@pytest.mark.parametrize("name", ["program.bin", "SHA256SUMS"])
def test_a_build_killed_half_way_leaves_no_entry(name: str, tmp_path: Path) -> None:
    code = f"""
        write_bytes = pathlib.Path.write_bytes
        def slow(path, data):
            if path.name != {name!r}:
                return write_bytes(path, data)
            write_bytes(path, data[: len(data) // 2])
            print("half-way", flush=True)
            time.sleep(300)
        pathlib.Path.write_bytes = slow
        registry.build(SPEC, capacity=3, target="h200", machine_code=False)
    """
    process = python(tmp_path, code)
    assert process.stdout and process.stdout.readline() == "half-way\n"
    store = ProfileStore(Settings(home=tmp_path, cache=tmp_path / "cache"))
    assert store.prune() == () and len(visible(store.folder)) == 1  # its writer lives
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert store.list() == []
    (left,) = visible(store.folder)
    assert store.prune() == (left,)
    assert visible(store.folder) == []
    built = registry.build(
        SPEC, capacity=3, target="h200", machine_code=False, where=Settings(home=tmp_path, cache=tmp_path / "cache")
    )
    assert not built.cached and all(check.ok for check in store.verify(built.manifest.id))


def test_a_build_sweeps_what_a_killed_one_left(entry: Path, where: Settings) -> None:
    left = entry.with_name(f".wpk-tmp.{entry.name}.00000000")
    left.mkdir()
    registry.build(SPEC, capacity=3, target="cpu", force=True, where=where)
    assert visible(entry.parent) == [entry.name]


def test_a_build_that_fails_leaves_nothing(where: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WpkError, match="is full") as caught:
        registry.build(SPEC, capacity=3, target="h200", machine_code=False, where=where)
    assert caught.value.hint
    assert visible(where.profiles) == []


# --- an intact profile --------------------------------------------------------------------------------------------
def test_what_was_written_is_read_and_verified(entry: Path, store: ProfileStore) -> None:
    found = store.read(entry.name)
    assert found.program.to_bytes() == (entry / "program.bin").read_bytes()
    assert str(found.load) == (entry / "load.ir").read_text()
    assert found.manifest.id == entry.name and found.manifest.capacity == found.program.slots == 3
    assert found.manifest.operators and found.manifest.arenas == found.program.arena_bytes()
    checks = store.verify(entry.name)
    assert all(check.ok for check in checks)
    names = [check.name for check in checks]
    assert {"manifest", "compatible", "sha256 program.bin", "sha256 load.ir", "isolation", "load graph"} <= set(names)
    assert len(names) == len(set(names))


def test_an_entry_is_four_files_whose_sums_any_tool_can_check(entry: Path) -> None:
    assert visible(entry) == sorted(FILES)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=entry, check=True)


# --- changed bytes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found_by_verify_and_refused_by_read(name: str, entry: Path, store: ProfileStore) -> None:
    path = entry / name
    intact = path.read_bytes()
    rng = np.random.default_rng(0)
    sample = {0, 1, len(intact) // 2, len(intact) - 1, *rng.integers(0, len(intact), 12).tolist()}
    for position in sorted(sample):
        flip(path, position, int(rng.integers(1, 256)))
        refused(store, entry)
        path.write_bytes(intact)
    assert store.read(entry.name)


@pytest.mark.parametrize("name", ["manifest.json", "SHA256SUMS"])
def test_no_byte_of_what_describes_a_profile_can_change_unnoticed(name: str, entry: Path, store: ProfileStore) -> None:
    intact = (entry / name).read_bytes()
    for position in range(0, len(intact), 5):
        flip(entry / name, position, 1 << (position // 5 % 8))
        found = store.get(entry.name)
        assert found and found.manifest is None and found.broken
        (entry / name).write_bytes(intact)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_refused_by_load_until_the_profile_is_built_again(
    name: str, entry: Path, where: Settings
) -> None:
    flip(entry / name, (entry / name).stat().st_size // 2)
    damaged = (entry / name).read_bytes()
    with pytest.raises(ProfileError, match=entry.name) as caught:
        registry.load(SPEC, capacity=3, target="cpu", where=where)
    assert name in str(caught.value) and caught.value.wanted and caught.value.found
    assert "--force" in (caught.value.hint or "")
    assert (entry / name).read_bytes() == damaged
    registry.build(SPEC, capacity=3, target="cpu", force=True, where=where)
    registry.load(SPEC, capacity=3, target="cpu", where=where).close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut short", "longer", "empty"])
def test_a_file_of_another_length_is_refused(name: str, change: str, entry: Path, store: ProfileStore) -> None:
    data = (entry / name).read_bytes()
    (entry / name).write_bytes({"cut short": data[:-1], "longer": data + b"\n", "empty": b""}[change])
    refused(store, entry)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, entry: Path, store: ProfileStore, where: Settings) -> None:
    (entry / name).unlink()
    assert f"no {name}" in str(refused(store, entry).found)
    with pytest.raises(ProfileError, match=f"no {name}"):
        registry.load(SPEC, capacity=3, target="cpu", where=where)


def test_a_program_with_hashes_that_fit_must_still_pass_the_static_checks(entry: Path, store: ProfileStore) -> None:
    program = Program.from_bytes((entry / "program.bin").read_bytes())
    for number in range(12):
        broken = mutate(program, number).data
        (entry / "program.bin").write_bytes(broken)
        rewrite(entry, program_sha256=sha256_bytes(broken))
        failed = [check.name for check in store.verify(entry.name) if not check.ok]
        assert failed and "manifest" not in failed and "sha256 program.bin" not in failed


def test_a_load_graph_that_does_not_parse_is_found(entry: Path, store: ProfileStore) -> None:
    for text in (b"graph nonsense", b"\xff\xfe"):
        (entry / "load.ir").write_bytes(text)
        rewrite(entry, load_sha256=sha256_bytes(text))
        assert [check.name for check in store.verify(entry.name) if not check.ok] == ["load graph"]


# --- other versions -----------------------------------------------------------------------------------------------
def operators(entry: Path, **changes: Any) -> list[dict[str, Any]]:
    first, *rest = json.loads((entry / "manifest.json").read_text())["operators"]
    return [first | changes, *rest]


@pytest.mark.parametrize(
    ("field", "changes", "wanted", "found"),
    [
        ("schema_version", {"schema_version": 2, "new_field": 1}, "1", "2"),
        ("schema_version", {"schema_version": "1"}, "1", "1"),
        ("program_format", {"program_format": 9}, "1", "9"),
        ("manifest.json: capacity", {"capacity": "many"}, "integer", "many"),
        ("manifest.json: colour", {"colour": "red"}, "not permitted", "red"),
        ("names another profile", {"id": "other-cap1-ctx1-cpu-00000000"}, "small-cap3", "other-cap1"),
    ],
)
def test_a_manifest_of_another_version_is_refused_by_field(
    field: str, changes: dict[str, Any], wanted: str, found: str, entry: Path, store: ProfileStore
) -> None:
    rewrite(entry, **changes)
    error = refused(store, entry)
    assert field in error.message and wanted in str(error.wanted) and found in str(error.found)
    assert store.prune() == (entry.name,)


@pytest.mark.parametrize("change", [{"capacity": 64}, {"steps_per_beat": 9}, {"waves": 1}, {"arenas": {}}])
def test_a_manifest_that_is_not_the_program_s_is_refused(
    change: dict[str, Any], entry: Path, store: ProfileStore
) -> None:  # fmt: skip
    rewrite(entry, **change)
    (field,) = change
    assert f"{field} of the manifest is not the program's" in str(refused(store, entry))
    failed = [c for c in store.verify(entry.name) if not c.ok]
    assert [c.name for c in failed] == ["manifest says what the program is"]


@pytest.mark.parametrize("text", [b"[]", b"3", b"{", b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_none_is_refused(text: bytes, entry: Path, store: ProfileStore) -> None:
    (entry / "manifest.json").write_bytes(text)
    (entry / "SHA256SUMS").write_text(f"{sha256_bytes(text)}  manifest.json\n")
    assert "schema_version" in refused(store, entry).message


def test_a_changed_operator_is_named_with_both_digests(entry: Path, store: ProfileStore) -> None:
    first = operators(entry)[0]
    rewrite(entry, operators=operators(entry, digest="0" * 64))
    error = refused(store, entry)
    assert f"operator {first['name']}@1 has changed" in error.message
    assert (error.wanted, error.found) == ("0" * 16, first["digest"][:16])


def test_an_operator_version_that_is_not_here_is_named(entry: Path, store: ProfileStore) -> None:
    name = operators(entry)[0]["name"]
    rewrite(entry, operators=operators(entry, version=99))
    error = refused(store, entry)
    assert f"operator {name}@99" in error.message
    assert (error.wanted, error.found) == (f"{name}@99", f"{name}@1")
    rewrite(entry, operators=operators(entry, name="no_such_thing"))
    assert "operator no_such_thing@99" in refused(store, entry).message


def test_compatibility_is_answered_before_the_program_is_read(entry: Path, store: ProfileStore) -> None:
    rewrite(entry, program_format=9)
    (entry / "program.bin").write_bytes(b"")
    assert "program_format" in refused(store, entry).message


def test_an_incompatible_profile_is_listed_and_pruned(entry: Path, store: ProfileStore) -> None:
    rewrite(entry, program_format=9)
    (found,) = store.list()
    assert found.manifest is not None and found.broken is None
    assert store.prune() == (entry.name,) and store.list() == []


# --- the folder ---------------------------------------------------------------------------------------------------
def test_an_empty_store_is_empty(store: ProfileStore) -> None:
    assert store.list() == [] and store.prune() == () and store.get("x") is None
    with pytest.raises(ProfileError, match="no profile 'x'"):
        store.read("x")


def test_broken_entries_are_shown_and_hide_nobody(entry: Path, store: ProfileStore) -> None:
    (entry.parent / "aaa").mkdir()
    (entry.parent / "zzz").mkdir()
    (entry.parent / "zzz" / "manifest.json").write_text("{")
    (entry.parent / "a-file").write_text("not mine")
    found = {e.id: e.broken for e in store.list()}
    assert list(found) == ["aaa", entry.name, "zzz"]
    assert found[entry.name] is None
    assert "no manifest.json" in str(found["aaa"]) and "files are missing" in str(found["zzz"])
    assert all("\n" not in str(text) for text in found.values())
    assert store.prune() == ("aaa", "zzz")
    assert visible(entry.parent) == ["a-file", entry.name]


def test_a_foreign_file_inside_an_entry_is_found_by_verify(entry: Path, store: ProfileStore) -> None:
    (entry / "note.txt").write_text("mine")
    (check,) = (check for check in store.verify(entry.name) if not check.ok)
    assert check.name == "files" and "note.txt" in check.detail


def test_a_prefix_must_name_one_profile(pristine: Path, entry: Path, store: ProfileStore, where: Settings) -> None:
    other = registry.build(SPEC, capacity=31, target="h200", machine_code=False, where=where).manifest.id
    with pytest.raises(ProfileError, match="'small-cap3' names several profiles") as caught:
        store.find("small-cap3")
    assert entry.name in str(caught.value.found) and other in str(caught.value.found)
    assert store.find("small-cap31").id == other
    assert store.find(entry.name[:-1]).id == entry.name
    for prefix in ("", "cap3", "small-cap3-ctx1-cpu-zzz"):
        with pytest.raises(ProfileError, match="no profile"):
            store.find(prefix)


def test_a_whole_id_wins_over_longer_ones(entry: Path, store: ProfileStore) -> None:
    shutil.copytree(entry, entry.with_name(entry.name + "0"))
    assert store.find(entry.name).id == entry.name
    assert store.read(entry.name).manifest.id == entry.name


@pytest.mark.parametrize("state", ["intact", "broken"])
def test_remove_deletes_one_entry(state: str, entry: Path, store: ProfileStore) -> None:
    if state == "broken":
        (entry / "manifest.json").unlink()
    assert store.remove(entry.name[:-2]) == entry.name
    assert visible(entry.parent) == []
    with pytest.raises(ProfileError, match="no profile"):
        store.remove(entry.name)


def test_a_removal_killed_half_way_leaves_no_entry(
    entry: Path, store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(final: Path) -> list[str]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_sweep_key", killed)
        with pytest.raises(KeyboardInterrupt):
            store.remove(entry.name)
    assert store.list() == []
    assert len(store.prune()) == 1 and visible(entry.parent) == []


# --- planted defects ----------------------------------------------------------------------------------------------
def test_a_store_that_did_not_hash_would_be_noticed(
    entry: Path, store: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = store.read(entry.name).manifest
    flip(entry / "program.bin", 200)
    load = (entry / "load.ir").read_bytes()
    hashes = {load: wanted.load_sha256}
    monkeypatch.setattr(profile, "sha256_bytes", lambda data: hashes.get(data, wanted.program_sha256))
    monkeypatch.setattr(profile, "_read_manifest", lambda path: wanted)
    with pytest.raises(pytest.fail.Exception):
        refused(store, entry)
