"""The catalogue: built-in and added models, Python that may or may not run, folders that are broken or in the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.zoo.specs import SMALL, small
from wpk.ir.errors import OperatorError, SpecError, StoreError, UnknownModelError, UntrustedSourceError
from wpk.zoo import catalog as catalog_module
from wpk.zoo import component as component_module
from wpk.zoo.build import build_graph
from wpk.zoo.catalog import Catalog
from wpk.zoo.spec import ModelSpec

CODE = '''\
"""A kind of one's own."""
from wpk.zoo.component import Component, component
from .gain import GAIN

open({mark!r}, "w").close()


@component("my_gain")
class MyGain(Component):
    """Louder."""

    def build(self, g, inputs, tensors):
        return g.op("affine", inputs[0], scale=GAIN)
'''


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "home" / "zoo")


def written(folder: Path, text: str = SMALL, name: str = "spec.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def with_code(folder: Path, needed: bool = True) -> Path:
    """A folder whose spec uses a kind that its components.py brings; running that leaves the file `ran`."""
    kind = {"kind": "my_gain"} if needed else {"kind": "affine", "scale": 2.0}
    data = small()
    data["components"].insert(1, kind)
    written(folder, json.dumps(data))
    written(folder, CODE.format(mark=str(folder.parent / "ran")), "components.py")
    written(folder, "GAIN = 3.0\n", "gain.py")
    return folder


def left_over(catalog: Catalog) -> list[str]:
    """Everything in the folder but locks, which stay for the next who wants the name."""
    entries = catalog.added.iterdir() if catalog.added.exists() else ()
    return sorted(p.name for p in entries if not p.name.endswith(".lock"))


# --- reading ------------------------------------------------------------------------------------------------------
def test_the_built_in_models_are_there_without_any_folder(catalog: Catalog) -> None:
    assert {"beatnet", "dtln", "flashvad", "silero-vad"} <= set(catalog.builtin())
    assert all(e.origin == "builtin" and e.spec is not None and e.broken is None for e in catalog.list())
    assert not catalog.added.exists()


def test_an_unknown_model_is_refused_with_close_names(catalog: Catalog) -> None:
    with pytest.raises(UnknownModelError, match="Did you mean 'silero-vad'") as caught:
        catalog.get("silero_vad")
    assert "dtln" in str(caught.value.wanted)
    for name in ("", "..", "../silero-vad", "/etc", "Silero-VAD "):
        with pytest.raises(UnknownModelError):
            catalog.get(name)


# --- adding -------------------------------------------------------------------------------------------------------
def test_a_spec_file_is_added_as_it_is(catalog: Catalog, tmp_path: Path) -> None:
    text = "# mine\n" + SMALL
    added = catalog.add(written(tmp_path / "x", text, "anything.yml"))
    assert (added.name, added.version, added.warnings) == ("small", 1, ())
    assert (added.path / "spec.yaml").read_text() == text
    assert catalog.get("small") == ModelSpec.from_yaml(text)
    assert [e.name for e in catalog.list() if e.origin == "added"] == ["small"]
    assert left_over(catalog) == ["small"]


def test_json_and_folders_and_other_names_are_taken(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add(written(tmp_path / "x", ModelSpec.from_yaml(SMALL).to_json(), "a.json"), name="one")
    catalog.add(written(tmp_path / "y").parent, name="two")
    assert [catalog.get(name).name for name in ("one", "two")] == ["one", "two"]
    assert catalog.get("one").components == catalog.get("two").components
    assert set(left_over(catalog)) == {"one", "two"}


def test_a_relative_path_of_weights_is_that_beside_the_spec(catalog: Catalog, tmp_path: Path) -> None:
    data = small(weights={"path": "weights.safetensors"})
    added = catalog.add(written(tmp_path / "x", json.dumps(data)).parent)
    assert (
        catalog.get("small").weights
        == ModelSpec.from_data(small(weights={"path": str(tmp_path / "x" / "weights.safetensors")})).weights
    )
    assert added.warnings == (f"weights are read from {tmp_path / 'x' / 'weights.safetensors'}",)


def test_a_name_that_is_taken_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    source = written(tmp_path / "x")
    catalog.add(source)
    with pytest.raises(SpecError, match=r"'small' is there already.*wpk zoo rm small"):
        catalog.add(source)
    with pytest.raises(SpecError, match=r"'dtln' is there already.*Choose another name"):
        catalog.add(source, name="dtln")
    with pytest.raises(SpecError, match="cannot be a model's name"):
        catalog.add(source, name="../up")
    assert left_over(catalog) == ["small"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"versoin": 1}, SpecError, "unknown key 'versoin'"),
        ({"operators": {"linear": ">=7"}}, OperatorError, "linear >=7"),
        ({"tensors": {"nothing": "w"}}, SpecError, "tensors.nothing"),
        ({"ports": {"inputs": {"audio": {"type": "f32[80]", "kind": "audio", "sample_rate": 8000}},
                    "outputs": {"y": {"type": "f32[3]", "kind": "logit", "from": "head"}}}}, SpecError, "another type"),
        ({"components": [{"kind": "my_gain"}]}, SpecError, "unknown component kind 'my_gain'"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_be_built_is_not_kept(
    catalog: Catalog, tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        catalog.add(written(tmp_path / "x", json.dumps(small() | changes)))
    assert says in str(caught.value)
    assert left_over(catalog) == []


def test_what_is_no_spec_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    huge = tmp_path / "h.yaml"
    huge.write_text("#" * (1 << 21))
    for source, says in (
        (tmp_path / "absent.yaml", "does not exist"),
        (tmp_path / "empty", "holds no spec"),
        (written(tmp_path / "z", SMALL, "model.onnx"), "is no spec file"),
        (binary, "is no text"),
        (huge, "is too long"),
    ):
        with pytest.raises(SpecError, match=says):
            catalog.add(source)
    assert left_over(catalog) == []


# --- Python that comes along --------------------------------------------------------------------------------------
def test_python_that_is_needed_runs_only_with_trust(catalog: Catalog, tmp_path: Path) -> None:
    source = with_code(tmp_path / "x")
    with pytest.raises(UntrustedSourceError) as caught:
        catalog.add(source)
    assert "my_gain" in str(caught.value) and "--trust" in str(caught.value)
    assert not (tmp_path / "ran").exists() and left_over(catalog) == []

    added = catalog.add(source, trust=True)
    assert added.warnings == () and (tmp_path / "ran").exists()
    assert (added.path / "gain.py").is_file()
    spec = catalog.get("small")
    assert "affine" in {node.op for node in build_graph(spec).nodes}
    assert Catalog(catalog.added).get("small").to_yaml() == spec.to_yaml()


def test_python_that_is_not_needed_never_runs(catalog: Catalog, tmp_path: Path) -> None:
    added = catalog.add(with_code(tmp_path / "x", needed=False))
    assert "components.py" in added.warnings[0] and "--trust" in added.warnings[0]
    catalog.get("small")
    assert not (tmp_path / "ran").exists()


def test_python_beside_a_single_file_is_none_of_its_business(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="unknown component kind 'my_gain'"):
        catalog.add(with_code(tmp_path / "x") / "spec.yaml", trust=True)
    assert not (tmp_path / "ran").exists()


def test_trust_is_what_the_user_gave_when_adding(catalog: Catalog, tmp_path: Path) -> None:
    """A spec that is changed later to need Python does not get to run it."""
    added = catalog.add(with_code(tmp_path / "x", needed=False))
    (added.path / "spec.yaml").write_text((with_code(tmp_path / "y") / "spec.yaml").read_text())
    with pytest.raises(UntrustedSourceError):
        catalog.get("small")
    for record in ("", "[]", '{"trusted": "yes"}', '{"trusted": 1}'):
        (added.path / "added.json").write_text(record)
        with pytest.raises(UntrustedSourceError):
            catalog.get("small")
    assert not (tmp_path / "ran").exists()


def test_two_models_may_bring_the_same_kind(catalog: Catalog, tmp_path: Path) -> None:
    for name, gain in (("one", "3.0"), ("two", "4.0")):
        folder = with_code(tmp_path / name)
        (folder / "gain.py").write_text(f"GAIN = {gain}\n")
        catalog.add(folder, name=name, trust=True)

    def scale(name: str) -> object:
        return next(n for n in build_graph(catalog.get(name)).nodes if n.op == "affine").attributes["scale"]

    assert (scale("one"), scale("two")) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("x = (", "SyntaxError"),
        ("import sys\n", "unknown component kind 'my_gain'"),
        (
            "from wpk.zoo.component import Component, component\n"
            "@component('my_gain')\nclass G(Component):\n    pass\n",
            "kind 'my_gain' cannot be built; wanted a method `build`",
        ),
        (
            "from wpk.zoo.component import Component, component\n@component('dense')\nclass D(Component):\n    pass\n",
            "component kind 'dense' exists already",
        ),
    ],
)
def test_python_that_fails_is_named(catalog: Catalog, tmp_path: Path, code: str, says: str) -> None:
    folder = with_code(tmp_path / "x")
    (folder / "components.py").write_text(code)
    with pytest.raises(SpecError, match=r"components\.py|spec\.yaml") as caught:
        catalog.add(folder, trust=True)
    assert says in str(caught.value)
    assert left_over(catalog) == []


# --- what is broken -----------------------------------------------------------------------------------------------
def test_a_broken_model_is_listed_as_broken_and_hides_no_other(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add(written(tmp_path / "x"), name="fine")
    for name, text in (("torn", "name: ["), ("other", SMALL.replace("kind: lstm", "kind: lstn")), ("moved", SMALL)):
        written(catalog.added / name, text)
    (catalog.added / "hollow").mkdir()
    (catalog.added / "stray.txt").write_text("")
    (catalog.added / ".wpk-part.new.1234").mkdir()
    entries = {e.name: e for e in catalog.list() if e.origin == "added"}
    assert sorted(entries) == ["fine", "hollow", "moved", "other", "torn"]
    assert entries["fine"].spec is not None and entries["fine"].broken is None
    for name, says in (
        ("torn", "no YAML"),
        ("other", "'lstm'"),
        ("hollow", "does not exist"),
        ("moved", "name: moved"),
    ):
        assert entries[name].spec is None and says in str(entries[name].broken)
        with pytest.raises(SpecError):
            catalog.get(name)
    assert catalog.get("fine").name == "fine" and catalog.get("silero-vad")


def test_an_added_folder_can_not_stand_for_a_built_in_model(catalog: Catalog) -> None:
    written(catalog.added / "dtln", SMALL)
    assert catalog.get("dtln").task == "denoise"


# --- removing -----------------------------------------------------------------------------------------------------
def test_an_added_model_is_removed_broken_or_not(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add(written(tmp_path / "x"))
    (catalog.added / "hollow").mkdir()
    for name in ("small", "hollow"):
        assert catalog.remove(name) == catalog.added / name
    assert left_over(catalog) == []
    with pytest.raises(UnknownModelError):
        catalog.get("small")
    catalog.add(written(tmp_path / "x"))


def test_what_was_not_added_is_not_removed(catalog: Catalog) -> None:
    with pytest.raises(UnknownModelError, match="Built-in models cannot be removed"):
        catalog.remove("dtln")
    for name in ("nothing", "..", "."):
        with pytest.raises(UnknownModelError):
            catalog.remove(name)


# --- killed processes ---------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from pathlib import Path
from wpk.zoo.catalog import Catalog
os.rename = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
Catalog(Path(sys.argv[1])).add(Path(sys.argv[2]))
"""


def parts(catalog: Catalog) -> list[str]:
    return [name for name in left_over(catalog) if name.startswith(".wpk-part.")]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="processes end otherwise there")
@pytest.mark.parametrize("sweep", ["add", "remove", "list"])
def test_what_a_killed_process_left_is_swept(catalog: Catalog, tmp_path: Path, sweep: str) -> None:
    source = written(tmp_path / "x")
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", KILLED, str(catalog.added), str(source)]
    assert subprocess.run(command, env=environ, timeout=60).returncode == -signal.SIGKILL
    (left,) = parts(catalog)
    assert left.startswith(".wpk-part.small.") and (catalog.added / left / "spec.yaml").exists()
    if sweep == "list":
        assert "small" not in [entry.name for entry in catalog.list()]
    else:
        catalog.add(source)
    if sweep == "remove":
        (catalog.added / ".wpk-part.small.1234").mkdir()
        catalog.remove("small")
    assert parts(catalog) == []


def test_a_part_whose_writer_lives_is_left_alone(catalog: Catalog) -> None:
    part = catalog.added / ".wpk-part.small.1234"
    part.mkdir(parents=True)
    with FileLock(catalog.added / ".small.lock"):
        catalog.list()
        assert part.exists()
    catalog.list()
    assert not part.exists()


def test_a_name_that_is_held_too_long_is_a_store_error(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "LOCK_TIMEOUT_S", 0.1)
    catalog.added.mkdir(parents=True)
    with FileLock(catalog.added / ".small.lock"), pytest.raises(StoreError, match="in use by another process"):
        catalog.add(written(tmp_path / "x"))
    assert left_over(catalog) == []


# --- disks --------------------------------------------------------------------------------------------------------
def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    source = written(tmp_path / "x")
    with pytest.raises(StoreError, match="cannot be used"):
        Catalog(tmp_path / "file" / "zoo").add(source)


def test_a_disk_that_fills_up_leaves_nothing(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "x")
    whole = Path.write_bytes

    def write(self: Path, data: bytes) -> int:
        if self.name == "added.json":
            raise OSError(28, "No space left on device")
        return whole(self, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(StoreError, match="No space left"):
        catalog.add(source)
    assert left_over(catalog) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_a_store_error(catalog: Catalog, tmp_path: Path) -> None:
    source = written(tmp_path / "x")
    catalog.added.mkdir(parents=True)
    catalog.added.chmod(0o555)
    with pytest.raises(StoreError):
        catalog.add(source)
    catalog.added.chmod(0o755)


# --- kinds of installed packages ----------------------------------------------------------------------------------
@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[EntryPoint]]:
    """Entry points as if packages had been installed."""
    written(tmp_path, CODE.format(mark=str(tmp_path / "ran")).replace("from .gain import GAIN", "GAIN = 5.0"),
            "outside_kinds.py")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        EntryPoint("good", "outside_kinds:MyGain", component_module.ENTRY_POINTS),
        EntryPoint("bad", "no_such_module", component_module.ENTRY_POINTS),
    ]
    monkeypatch.setattr(component_module, "entry_points", lambda group: entries)
    for cached in (component_module.installed_kinds, component_module._entries):
        cached.cache_clear()
    yield entries
    monkeypatch.undo()
    for cached in (component_module.installed_kinds, component_module._entries):
        cached.cache_clear()


def test_installed_packages_bring_kinds(packages: list[EntryPoint]) -> None:
    data = small()
    data["components"].insert(1, {"kind": "my_gain"})
    assert build_graph(ModelSpec.from_data(data))
    assert "dense" in component_module.installed_kinds()


def test_a_package_that_fails_stops_no_other_and_is_named_where_its_kind_is_missed(packages: list[EntryPoint]) -> None:
    data = small()
    data["components"].insert(1, {"kind": "their_kind"})
    with pytest.raises(SpecError, match=r"unknown component kind 'their_kind'.*bad.*no_such_module"):
        ModelSpec.from_data(data)


# --- what is no plain file, and Python that misbehaves ------------------------------------------------------------
def test_a_spec_that_yaml_stumbles_over_is_listed_as_broken(catalog: Catalog) -> None:
    written(catalog.added / "odd", "name: !!bool abc\n")
    (entry,) = (e for e in catalog.list() if e.name == "odd")
    assert isinstance(entry.broken, SpecError) and entry.spec is None


def test_a_pipe_or_device_is_refused_at_once(catalog: Catalog, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.yaml"):
        with pytest.raises(SpecError, match="is no regular file"):
            catalog.add(tmp_path / name)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "long"])
def test_python_beside_a_spec_must_be_plain_files(catalog: Catalog, tmp_path: Path, kind: str) -> None:
    odd = with_code(tmp_path / "mine") / "x.py"
    if kind == "folder":
        odd.mkdir()
    elif kind == "pipe":
        os.mkfifo(odd)
    elif kind == "link":
        odd.symlink_to(tmp_path / "nothing")
    else:
        odd.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(SpecError, match=r"x\.py"):
        catalog.add(tmp_path / "mine", trust=True)
    assert not (tmp_path / "ran").exists() and left_over(catalog) == []


@pytest.mark.parametrize("line", ["import sys; sys.exit(0)", "raise BaseException('no')", "1 / 0"])
def test_python_that_ends_the_process_is_refused_by_name(catalog: Catalog, tmp_path: Path, line: str) -> None:
    (with_code(tmp_path / "mine") / "components.py").write_text(line + "\n")
    with pytest.raises(SpecError, match=r"components\.py fails when it is imported"):
        catalog.add(tmp_path / "mine", trust=True)


def test_an_interrupt_of_imported_python_passes(catalog: Catalog, tmp_path: Path) -> None:
    (with_code(tmp_path / "mine") / "components.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        catalog.add(tmp_path / "mine", trust=True)


def test_what_imported_python_prints_stays_off_stdout(
    catalog: Catalog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = with_code(tmp_path / "mine") / "components.py"
    code.write_text(code.read_text() + "\nprint('hello')\n")
    catalog.add(tmp_path / "mine", trust=True)
    out = capsys.readouterr()
    assert out.out == "" and "hello" in out.err
