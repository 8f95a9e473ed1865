"""Weights: what a pull leaves is what was pinned; what an inventory says is complete."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from wpk.ir.errors import DownloadError, OfflineError, StoreError, WeightsError, WpkError
from wpk.registry import weights
from wpk.registry.settings import Settings
from wpk.registry.weights import WeightsStore, check_inventory
from wpk.registry.weights.pypi import pip_download
from wpk.registry.weights.synthetic import SyntheticSet, synthetic_affine, synthetic_key, synthetic_values
from wpk.zoo.sources import HfSource, PathSource, PypiSource, SyntheticSource, parse_source

save_file = pytest.importorskip("safetensors.numpy").save_file


@pytest.fixture
def here(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "home", tmp_path / "home" / "cache")


def offline(settings: Settings) -> Settings:
    return Settings(settings.home, settings.cache, offline=True)


# --- a tiny wheel, served by pip itself from a folder


@pytest.fixture
def links(tmp_path: Path) -> Path:
    """A folder with tiny-model 1.0, whose files are a.safetensors and deep/b.safetensors."""
    folder = tmp_path / "links"
    folder.mkdir()
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "b.safetensors")
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "a.safetensors", "tiny/a.safetensors")
        wheel.write(tmp_path / "b.safetensors", "tiny/deep/b.safetensors")
        wheel.writestr("tiny/__init__.py", "raise SystemExit('imported')")
        requires = "Requires-Python: <3\nRequires-Dist: no-such-package-anywhere\n"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n{requires}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def tiny(folder: Path, *paths: str, **wrong: str) -> PypiSource:
    files = [
        {"path": path, "sha256": hashlib.sha256((folder.parent / Path(path).name).read_bytes()).hexdigest()} | wrong
        for path in paths or ("tiny/a.safetensors",)
    ]
    return PypiSource.model_validate({"pypi": "tiny-model", "version": "1.0", "files": files})


def store(settings: Settings, links: Path) -> WeightsStore:
    return WeightsStore(settings, pip_options=("--no-index", "--find-links", str(links)))


def no_pip(settings: Settings) -> WeightsStore:
    """A store that fails the test's way if it starts pip at all."""
    return WeightsStore(settings, pip=("/no/such/pip",))


def test_pulled_files_are_those_pinned_and_stay(here: Settings, links: Path) -> None:
    source = tiny(links)
    assert not store(here, links).present(source)
    told: list[str] = []
    files = store(here, links).pull(source, lambda what, done, total: told.append(what))
    data = (links.parent / "a.safetensors").read_bytes()
    assert files == [{"name": "tiny/a.safetensors", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}]
    assert told[0] == "fetching pypi:tiny-model==1.0" and "checking tiny/a.safetensors" in told
    assert store(here, links).present(source)
    assert no_pip(offline(here)).pull(source) == files  # no fetch: also offline, also without pip
    assert no_pip(here).open(source).read("w").tolist() == np.ones((2, 3)).tolist()
    kept = sorted(path.name for path in here.weights.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    assert kept == ["a.safetensors", "files.json"]  # neither the wheel nor the package's code


def test_several_files_are_told_apart_by_alias(here: Settings, links: Path) -> None:
    source = tiny(links, "tiny/a.safetensors", "tiny/deep/b.safetensors")
    store(here, links).pull(source)
    assert set(store(here, links).open(source)) == {"a:w", "b:w"}
    named = PypiSource(
        pypi="tiny-model",
        version="1.0",
        files=tuple(file.model_copy(update={"alias": alias}) for file, alias in zip(source.files, "xy", strict=True)),
    )
    assert no_pip(here).open(named).read("y:w").shape == (4,)  # an alias is no other selection


def test_two_selections_of_one_wheel_do_not_meet(here: Settings, links: Path) -> None:
    first, second = tiny(links), tiny(links, "tiny/deep/b.safetensors")
    store(here, links).pull(first)
    assert not store(here, links).present(second)
    store(here, links).pull(second)
    assert no_pip(here).open(first).read("w").shape == (2, 3)


def test_other_bytes_than_pinned_are_refused_by_name_and_not_kept(here: Settings, links: Path) -> None:
    source = tiny(links, sha256="0" * 64)
    with pytest.raises(
        DownloadError, match=r"tiny/a\.safetensors of pypi:tiny-model==1\.0 is not the pinned"
    ) as caught:
        store(here, links).pull(source)
    assert caught.value.wanted == "sha256 " + "0" * 64
    assert caught.value.found and caught.value.found.startswith("sha256 ") and caught.value.hint
    assert not store(here, links).present(source)
    assert [path for path in here.weights.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_a_file_that_the_wheel_lacks_is_named_beside_what_it_has(here: Settings, links: Path) -> None:
    source = PypiSource.model_validate(
        {"pypi": "tiny-model", "version": "1.0", "files": [{"path": "tiny/c.safetensors", "sha256": "0" * 64}]}
    )
    with pytest.raises(DownloadError, match=r"has no file tiny/c\.safetensors") as caught:
        store(here, links).pull(source)
    assert "tiny/deep/b.safetensors" in str(caught.value.found)


def test_damage_is_seen_by_size_and_by_hash(here: Settings, links: Path) -> None:
    source = tiny(links)
    store(here, links).pull(source)
    (kept,) = here.weights.rglob("a.safetensors")
    whole = kept.read_bytes()

    kept.write_bytes(whole[:-1])
    assert not no_pip(here).present(source)
    with pytest.raises(WeightsError, match="damaged") as caught:
        no_pip(here).open(source)
    assert f"{len(whole)} bytes" in str(caught.value.wanted) and f"{len(whole) - 1} bytes" in str(caught.value.found)

    kept.write_bytes(whole[:-1] + b"\xff")
    with pytest.raises(WeightsError, match=r"damaged.*wanted sha256"):
        no_pip(here).open(source)
    with pytest.raises(OfflineError):
        no_pip(offline(here)).pull(source)
    store(here, links).pull(source)  # mended
    assert kept.read_bytes() == whole


def test_offline_is_refused_before_pip_starts(here: Settings, links: Path, tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="tiny-model") as caught:
        no_pip(offline(here)).pull(tiny(links))
    assert caught.value.hint and not here.home.exists()
    with pytest.raises(OfflineError):
        pip_download("tiny-model==1.0", tmp_path, offline(here), pip=("/no/such/pip",))


def test_absent_weights_name_the_command_that_fetches_them(here: Settings, links: Path) -> None:
    with pytest.raises(WeightsError, match="are not here") as caught:
        no_pip(here).open(tiny(links))
    assert caught.value.hint and "wpk zoo pull" in caught.value.hint


@pytest.mark.parametrize("pip", [("/no/such/pip",), (sys.executable, "-m", "no_such_pip"), None])
def test_without_pip_the_mend_is_named(here: Settings, links: Path, pip: tuple[str, ...] | None) -> None:
    if pip is None:
        pip = (sys.executable, "-I", "-S", "-m", "pip")  # -S: no site-packages, as in a virtual environment of uv
    elif len(pip) > 1:
        pip = (sys.executable, "-c", "raise SystemExit('python: No module named pip')")
    with pytest.raises(DownloadError, match="needs pip") as caught:
        WeightsStore(here, pip=pip).pull(tiny(links))
    assert caught.value.hint and "ensurepip" in caught.value.hint


def test_what_pip_says_is_passed_on_without_credentials(here: Settings, links: Path) -> None:
    with pytest.raises(DownloadError, match=r"pip could not fetch other==1") as caught:
        store(here, links).pull(
            parse_source({"pypi": "other", "version": "1", "files": [{"path": "x", "sha256": "0" * 64}]})
        )
    assert "No matching distribution found for other==1" in str(caught.value.found)
    pip = (sys.executable, "-c", "raise SystemExit('ERROR: 403 for https://user:secret@index.invalid/simple')")
    with pytest.raises(DownloadError) as caught:
        WeightsStore(here, pip=pip).pull(tiny(links))
    assert "secret" not in str(caught.value) and "index.invalid" in str(caught.value)


def test_a_pip_that_hangs_is_ended_with_its_children(here: Settings, tmp_path: Path) -> None:
    child = f"import time; time.sleep(5); open({str(tmp_path / 'alive')!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    with pytest.raises(DownloadError, match="took too long"):
        pip_download("x==1", tmp_path, here, pip=(sys.executable, "-c", parent), timeout=1)
    assert time.monotonic() - start < 4.5
    time.sleep(5)
    assert not (tmp_path / "alive").exists()


def test_two_processes_that_pull_at_once_fetch_once(here: Settings, links: Path) -> None:
    code = """
        import json, sys
        from pathlib import Path
        from wpk.registry.settings import Settings
        from wpk.registry.weights import WeightsStore
        from wpk.zoo.sources import parse_source
        home, links, source = sys.argv[1:]
        store = WeightsStore(Settings(Path(home), Path(home)), pip_options=("--no-index", "--find-links", links))
        told = []
        files = store.pull(parse_source(json.loads(source)), lambda what, done, total: told.append(what))
        print(json.dumps([files, "fetching pypi:tiny-model==1.0" in told]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(here.home), str(links), tiny(links).model_dump_json()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert said[0][0] == said[1][0] != []
    assert sorted(fetched for _, fetched in said) == [False, True]


def test_a_home_that_is_a_file_is_a_store_error(here: Settings, links: Path) -> None:
    here.home.write_text("in the way")
    with pytest.raises(StoreError) as caught:
        store(here, links).pull(tiny(links))
    assert "$WPK_HOME" in str(caught.value.hint)


@pytest.mark.network
def test_a_real_package_is_fetched_through_the_users_pip(here: Settings) -> None:
    pytest.importorskip("onnx")
    pin = "9a88e34bf3118d60"  # the rest of the hash is what is learned below
    path = "flashvad/_models/flashvad-stream.onnx"
    guess = PypiSource.model_validate(
        {"pypi": "flashvad", "version": "0.1.0a1", "files": [{"path": path, "sha256": "0" * 64}]}
    )
    with pytest.raises(DownloadError, match="is not the pinned file") as caught:
        WeightsStore(here).pull(guess)
    found = str(caught.value.found).removeprefix("sha256 ")
    assert found.startswith(pin)
    source = PypiSource.model_validate(
        {"pypi": "flashvad", "version": "0.1.0a1", "files": [{"path": path, "sha256": found}]}
    )
    WeightsStore(here).pull(source)
    opened = WeightsStore(here).open(source)
    assert opened.tensors["model.input_norm.weight"].shape == (43,)


# --- a model hub on this machine


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as snapshot_download uses."""

    files: ClassVar[dict[str, bytes]] = {}
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked: ClassVar[list[str]] = []
    gated = False

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        if self.gated:
            self._answer(403, b"{}", X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        elif path.startswith("/api/models/org/model/tree/"):
            listing = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                    "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1},
                }
                for name, data in self.files.items()
            ]
            self._answer(200, json.dumps(listing).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/model"):
            info = {"id": "org/model", "sha": self.commit, "siblings": [{"rfilename": name} for name in self.files]}
            self._answer(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith(f"/org/model/resolve/{self.commit}/") and path.rpartition("/")[2] in self.files:
            data = self.files[path.rpartition("/")[2]]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self._answer(200, data, ETag=etag, X_Repo_Commit=self.commit, Accept_Ranges="bytes")
        else:
            self._answer(404, b"{}", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[_Hub]]:
    for part in (1, 2):
        save_file({f"layer.{part}": np.full(3, part, np.float32)}, tmp_path / f"{part}.safetensors")
    names = {f"layer.{part}": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}

    class Hub(_Hub):
        asked: ClassVar[list[str]] = []
        files: ClassVar[dict[str, bytes]] = {
            "config.json": b"{}",
            "pytorch_model.bin": b"not wanted",
            "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
            **{name: (tmp_path / f"{part}.safetensors").read_bytes() for part, name in enumerate(names.values(), 1)},
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Hub.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield Hub
    server.shutdown()
    thread.join()


def hub_pull(hub: Any, settings: Settings, source: HfSource, **environ: str) -> Any:
    """pull in a process of its own, since huggingface_hub reads its address when it is imported."""
    code = """
        import json, sys, time
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(min(seconds, 0.05))  # huggingface_hub tries again for half a minute
        from pathlib import Path
        from wpk.ir.errors import WpkError
        from wpk.registry.settings import Settings
        from wpk.registry.weights import WeightsStore
        from wpk.zoo.sources import parse_source
        home, offline, source = sys.argv[1:]
        told = []
        try:
            store = WeightsStore(Settings(Path(home), Path(home) / "cache", offline == "1"))
            files = store.pull(parse_source(json.loads(source)), lambda *step: told.append(step))
            print(json.dumps({"files": files, "told": told}))
        except WpkError as error:
            print(json.dumps(error.as_dict()))
    """
    arguments = [str(settings.home), "1" if settings.offline else "0", source.model_dump_json()]
    env = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(settings.home / "hf-home"),
        "HF_HUB_DISABLE_XET": "1",
        **environ,
    }
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr and "B/s" not in done.stderr  # no bar that we did not draw
    return json.loads(done.stdout)


def test_a_repository_gives_its_shards_verified(hub: Any, here: Settings) -> None:
    source = HfSource(hf="org/model", revision=hub.commit)
    assert not WeightsStore(here).present(source)
    said = hub_pull(hub, here, source)
    assert {file["name"]: file["sha256"] for file in said["files"]} == {
        name: hashlib.sha256(data).hexdigest()
        for name, data in hub.files.items()
        if name.startswith("model") and not name.endswith(".bin")
    }
    assert any(what.startswith("fetching") for what, _, _ in said["told"])
    assert not any("pytorch_model" in line for line in hub.asked)
    opened = WeightsStore(here).open(source)
    assert list(opened) == ["layer.1", "layer.2"] and opened.read("layer.2").tolist() == [2, 2, 2]
    assert here.weights in next(here.weights.rglob("*.safetensors")).parents

    hub.asked.clear()
    assert hub_pull(hub, offline(here), source)["files"] == said["files"]  # offline: from the cache, nothing asked
    assert hub.asked == []

    shard = next(path for path in here.weights.rglob("*00001*.safetensors")).resolve()
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + b"\xff")
    damaged = hub_pull(hub, here, source)
    assert damaged["type"] == "DownloadError" and "model-00001-of-00002.safetensors" in damaged["message"]
    shard.write_bytes(data[:-1])
    with pytest.raises(WeightsError, match="damaged"):
        WeightsStore(here).open(source)
    shard.unlink()
    assert not WeightsStore(here).present(source)


def test_a_tag_is_resolved_and_one_file_can_be_named(hub: Any, here: Settings) -> None:
    name = "model-00001-of-00002.safetensors"
    source = HfSource(hf="org/model", revision="v1", files=(name,), aliases={"part": name})
    assert [file["name"] for file in hub_pull(hub, here, source)["files"]] == [name]
    assert list(WeightsStore(here).open(source)) == ["layer.1"]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"gated": True}, "DownloadError", "accept the model's terms"),
        ({"files": {}}, "DownloadError", "has no file *.safetensors"),
        ({"address": "http://127.0.0.1:9"}, "DownloadError", "check the network"),
    ],
)
def test_what_a_hub_refuses_is_a_download_error_with_a_mend(
    hub: Any, here: Settings, change: dict[str, Any], kind: str, says: str
) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    error = hub_pull(hub, here, HfSource(hf="org/model", revision=hub.commit))
    assert error["type"] == kind and says in f"{error['message']} {error['hint']}"


def test_an_absent_repository_is_named(hub: Any, here: Settings) -> None:
    error = hub_pull(hub, here, HfSource(hf="org/other", revision="main"))
    assert error["type"] == "DownloadError" and "org/other" in error["message"] and "check the name" in error["hint"]


def test_offline_never_asks_the_hub(hub: Any, here: Settings) -> None:
    error = hub_pull(hub, offline(here), HfSource(hf="org/model", revision=hub.commit))
    assert error["type"] == "OfflineError" and hub.asked == []


def test_offline_finds_what_other_tools_have_fetched(hub: Any, here: Settings) -> None:
    source = HfSource(hf="org/model", revision=hub.commit)
    code = (
        "import huggingface_hub as h; "
        f"h.snapshot_download('org/model', revision='{hub.commit}', allow_patterns=['model*'])"
    )
    env = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(here.home / "hf-home"), "HF_HUB_DISABLE_XET": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=120)
    assert len(hub_pull(hub, offline(here), source)["files"]) == 3
    assert list(WeightsStore(here).open(source)) == ["layer.1", "layer.2"]


# --- paths


def test_a_path_is_a_file_or_a_folder(here: Settings, tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("x", "y"):
        save_file({"w": np.ones(2, np.float32)}, folder / f"{name}.safetensors")
    store = WeightsStore(offline(here))
    one, many = PathSource(path=str(tmp_path / "a.safetensors")), PathSource(path=str(folder))
    aliased = PathSource(path=str(folder), aliases={"p": "x.safetensors", "q": "y.safetensors"})
    assert [list(store.open(source)) for source in (one, many, aliased)] == [["w"], ["x:w", "y:w"], ["p:w", "q:w"]]
    assert [file["name"] for file in store.pull(many)] == ["x.safetensors", "y.safetensors"]
    assert store.pull(one)[0]["sha256"] == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    assert store.present(one) and store.present(aliased)


def test_an_absent_path_is_named(here: Settings, tmp_path: Path) -> None:
    source = PathSource(path=str(tmp_path / "nothing"))
    assert not WeightsStore(here).present(source)
    for act in (WeightsStore(here).pull, WeightsStore(here).open):
        with pytest.raises(WeightsError, match="nothing does not exist"):
            act(source)


# --- synthetic


def plain_value(name: str, seed: int, shape: tuple[int, ...], index: int, gain: float = 1.0) -> np.float32:
    """The documented formula in Python integers: what a GPU body will be held to."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & mask
    z = mix((mix(digest ^ mix(seed)) + (index + 1) * 0x9E3779B97F4A7C15) & mask)
    v = np.float32(((z >> 40) - 2**23) * 2.0**-23)
    if len(shape) < 2:
        return np.float32(1) + v / np.float32(64)
    fan_in = int(np.prod(shape[1:]))
    return np.float32(np.sqrt(3 / fan_in) * gain) * v


def test_splitmix64_is_the_published_one() -> None:
    # The reference generator seeded with 1234567 gives these first outputs; our counter i is its step i + 1.
    key, outputs = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    values = synthetic_values(key, 0.0, 1.0, 0, 4)
    assert values.tolist() == [((output >> 40) - 2**23) * 2.0**-23 for output in outputs]


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (9,), (), (1, 1), (700, 500)])
def test_synthetic_values_follow_the_documented_formula(shape: tuple[int, ...]) -> None:
    source = SyntheticSource(synthetic=11, gain=0.5)
    values = SyntheticSet({"block.0.weight": shape}, source).read("block.0.weight")
    assert values.dtype == np.float32 and values.shape == shape
    flat = values.reshape(-1)
    for index in {0, flat.size // 2, flat.size - 1, min(flat.size - 1, 1 << 18)}:
        assert flat[index] == plain_value("block.0.weight", 11, shape, index, 0.5)


def test_the_same_name_and_seed_give_the_same_bytes_and_others_do_not(here: Settings) -> None:
    shapes = {"a": (64, 64), "b": (64, 64)}
    store = WeightsStore(here)
    first = store.open(SyntheticSource(synthetic=1), shapes)
    again = store.open(SyntheticSource(synthetic=1), dict(reversed(shapes.items())))
    other = store.open(SyntheticSource(synthetic=2), shapes)
    for name in shapes:
        np.testing.assert_array_equal(first.read(name), again.read(name))
        assert np.abs(first.read(name) - other.read(name)).mean() > 0.01
    assert abs(np.corrcoef(first.read("a").ravel(), first.read("b").ravel())[0, 1]) < 0.05
    # Bytes of an earlier release: a change here would change every synthetic model silently.
    assert hashlib.sha256(first.read("a").tobytes()).hexdigest() == SYNTHETIC_SHA256


SYNTHETIC_SHA256 = "a01205fdce8b102dac8fd9305070ad61ca866703401656c88ac75e11ce71992d"


def test_any_part_can_be_made_alone() -> None:
    key, (offset, scale) = synthetic_key("w", 3), synthetic_affine((100, 10))
    whole = synthetic_values(key, offset, scale, 0, 1000)
    np.testing.assert_array_equal(whole[333:777], synthetic_values(key, offset, scale, 333, 444))


def test_synthetic_matrices_keep_the_variance_and_vectors_are_near_one() -> None:
    made = SyntheticSet({"matrix": (512, 1024), "conv": (128, 64, 3), "norm": (4096,)}, SyntheticSource(synthetic=5))
    x = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    assert 0.85 < (made.read("matrix") @ x).std() / x.std() < 1.15
    assert abs(made.read("conv").std() * np.sqrt(64 * 3) - 1) < 0.02
    assert abs(made.read("norm") - 1).max() <= 1 / 64 and made.read("norm").std() > 0.005


def test_activations_stay_sane_through_many_layers() -> None:
    shapes = {f"{layer}.{part}": shape for layer in range(40) for part, shape in {"w": (256, 256), "n": (256,)}.items()}
    made = SyntheticSet(shapes, SyntheticSource(synthetic=9))
    x = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    for layer in range(40):
        x = x / np.sqrt((x**2).mean()) * made.read(f"{layer}.n")
        x = made.read(f"{layer}.w") @ x
    assert 0.2 < x.std() < 5


def test_a_synthetic_source_needs_no_fetch_but_shapes(here: Settings) -> None:
    store, source = WeightsStore(offline(here)), SyntheticSource(synthetic=0)
    assert store.present(source) and store.pull(source) == []
    with pytest.raises(WeightsError, match="wanted the expected names"):
        store.open(source)


# --- inventory


def held(**shapes: tuple[int, ...]) -> SyntheticSet:
    return SyntheticSet(shapes, SyntheticSource(synthetic=0))


def test_a_fitting_inventory_is_ok_and_counts_values() -> None:
    found = check_inventory({"a": (2, 3), "b": (4,)}, held(a=(2, 3), b=(4,)))
    assert found.ok
    assert found.as_dict() == {
        **{"ok": True, "expected": 2, "found": 2, "missing": [], "extra": [], "misshapen": [], "values": 10},
        "groups": [{"name": n, "tensors": 1, "values": v, "unused": 0} for n, v in (("a", 6), ("b", 4))],
    }
    found.require("model")


def test_every_difference_is_listed_at_once() -> None:
    found = check_inventory({"a": (2, 3), "b": (4,), "c": (5,), "d": (6, 1)}, held(a=(3, 2), d=(6, 1), x=(1,), y=(2,)))
    assert not found.ok
    assert found.missing == ["b", "c"] and found.extra == ["x", "y"]
    assert found.misshapen == [{"name": "a", "wanted": [2, 3], "found": [3, 2]}]
    with pytest.raises(WeightsError) as caught:
        found.require("some-model")
    text = str(caught.value)
    for line in (
        "missing b: wanted [4]",
        "extra x: wanted nothing, found [1]",
        "misshapen a: wanted [2, 3], found [3, 2]",
    ):
        assert line in text
    assert "some-model" in text and "2 missing, 2 extra, 1 misshapen" in text


def test_what_a_spec_ignores_on_purpose_is_not_extra() -> None:
    found = check_inventory({"a": (1,)}, held(**{"a": (1,), "other.w": (2,), "b": (1,)}), ignore=("other.*",))
    assert found.extra == ["b"] and found.found == 2
    found.require("model", extra=False)
    check_inventory({"other.w": (2,)}, held(**{"other.w": (2,)}), ignore=("other.*",)).require("model")


def test_tensors_that_are_known_and_unused_may_lack_but_must_fit() -> None:
    unused = {"other.w": (2,), "other.v": (3,)}
    found = check_inventory({"a.b.c": (4,)}, held(**{"a.b.c": (4,), "other.w": (2,)}), unused=unused)
    assert found.ok and (found.expected, found.found, found.values) == (1, 1, 4)
    assert found.groups == [
        {"name": "a.b", "tensors": 1, "values": 4, "unused": 0},
        {"name": "other.w", "tensors": 1, "values": 2, "unused": 1},
        {"name": "other.v", "tensors": 1, "values": 3, "unused": 1},
    ]
    wrong = check_inventory({"a.b.c": (4,)}, held(**{"a.b.c": (4,), "other.w": (9,)}), unused=unused)
    assert wrong.misshapen == [{"name": "other.w", "wanted": [2], "found": [9]}] and not wrong.ok


def test_numbers_of_an_onnx_graph_are_not_extra_but_can_be_asked_for(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from wpk.registry.formats import open_file

    arrays = {"w": np.ones((2, 2), np.float32), "axes": np.array([0]), "eps": np.array(1e-5, np.float32)}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [onnx.helper.make_tensor_value_info("y", 1, [2, 2])],
        initializer=[onnx.numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    (tmp_path / "a.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert check_inventory({"w": (2, 2)}, open_file(tmp_path / "a.onnx")).ok
    assert check_inventory({"w": (2, 2), "axes": (1,)}, open_file(tmp_path / "a.onnx")).found == 2


# --- sources as data


@pytest.mark.parametrize(
    "plain",
    [
        {"hf": "org/name", "revision": "a" * 40},
        {
            "hf": "org/name",
            "revision": "v1.0",
            "files": ["a/*.safetensors"],
            "aliases": {"codec": "a/codec.safetensors"},
        },
        {"pypi": "silero-vad", "version": "6.2.3", "files": [{"path": "a/b.onnx", "sha256": "0" * 64, "alias": "x"}]},
        {"path": "~/models/mine"},
        {"synthetic": 7},
    ],
)
def test_a_source_round_trips_and_shows_its_kind_by_one_key(plain: dict[str, Any]) -> None:
    source = parse_source(plain)
    assert source.kind == next(iter(plain))
    assert source.model_dump(mode="json", exclude_defaults=True) == plain
    assert parse_source(json.loads(source.model_dump_json())) == source
    assert parse_source(source) is source
    with pytest.raises(ValidationError):
        source.kind = "x"  # type: ignore[misc, assignment]


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [],
        None,
        {"hf": "org/name"},  # unpinned
        {"hf": "org/name", "revision": "a", "path": "b"},  # two kinds
        {"hf": "name", "revision": "a"},
        {"hf": "org/name", "revision": "-a"},
        {"hf": "org/name", "revision": "a", "files": ["../x"]},
        {"hf": "org/name", "revision": "a", "unknown": 1},
        {"pypi": "--index-url=x", "version": "1", "files": [{"path": "a", "sha256": "0" * 64}]},
        {"pypi": "a", "version": ">=1", "files": [{"path": "a", "sha256": "0" * 64}]},
        {"pypi": "a", "version": "1", "files": []},
        {"pypi": "a", "version": "1", "files": [{"path": "/a", "sha256": "0" * 64}]},
        {"pypi": "a", "version": "1", "files": [{"path": "a/../../b", "sha256": "0" * 64}]},
        {"pypi": "a", "version": "1", "files": [{"path": "a", "sha256": "0" * 16}]},
        {"pypi": "a", "version": "1", "files": [{"path": "a"}]},
        {
            "pypi": "a",
            "version": "1",
            "files": [{"path": f"{x}/m.onnx", "sha256": "0" * 64} for x in "ab"],
        },  # one alias
        {"path": ""},
        {"synthetic": -1},
        {"synthetic": 1, "gain": float("nan")},
        {"synthetic": 1, "scale": "other"},
    ],
)
def test_malformed_sources_are_refused(plain: object) -> None:
    with pytest.raises(ValidationError):
        parse_source(plain)


def test_every_error_here_is_typed() -> None:
    assert issubclass(OfflineError, DownloadError) and issubclass(DownloadError, WpkError)
    parts = (weights.files, weights.hf, weights.inventory, weights.pypi, weights.synthetic)
    for module in (weights, *parts):
        assert {name for name in dir(module) if name.endswith("Error")} <= {
            *("DownloadError", "OfflineError", "StoreError", "WeightsError")
        }
