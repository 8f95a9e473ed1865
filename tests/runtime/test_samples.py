"""Sample recordings: fetched once, pinned, never built."""

from __future__ import annotations

import io
import sys
import tarfile
import time
from pathlib import Path

import pytest

from wpk.ir.errors import DownloadError, OfflineError
from wpk.registry.settings import Settings
from wpk.registry.storage import sha256_file
from wpk.runtime.audio import load_audio
from wpk.runtime.samples import SAMPLES, sample_recordings

_NAME = "pocketsphinx-5.1.1"


def source_package(folder: Path, files: dict[str, bytes]) -> None:
    """A source package that pip accepts, with a build backend that would leave a mark if it were ever run."""
    pyproject = b'[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n'
    content = {
        "pyproject.toml": pyproject,
        "setup.py": f"open({str(folder / 'ran')!r}, 'w')".encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: pocketsphinx\nVersion: 5.1.1\n",
        **files,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{_NAME}.tar.gz", "w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(f"{_NAME}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def local(tmp_path: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(tmp_path / "links"))


def test_offline_says_so_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(OfflineError, match="sample recordings") as caught:
        sample_recordings(Settings(tmp_path, tmp_path / "cache", offline=True), pip=("/no/such/program",))
    assert caught.value.hint
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [({}, "lacks recordings"), ({f"test/data/librivox/{SAMPLES[0].file}": b"other"}, "not the pinned")],
)
def test_other_bytes_than_pinned_are_refused_and_nothing_runs(
    tmp_path: Path, data: dict[str, bytes], says: str
) -> None:
    source_package(tmp_path / "links", data)
    settings = Settings(tmp_path, tmp_path / "cache")
    with pytest.raises(DownloadError, match=says) as caught:
        sample_recordings(settings, pip_options=local(tmp_path))
    assert SAMPLES[0].file in str(caught.value)
    assert not (settings.samples / _NAME).exists()
    assert not (tmp_path / "links" / "ran").exists()


def test_a_package_that_pip_cannot_find_is_a_download_error(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    with pytest.raises(DownloadError, match=r"pip could not fetch pocketsphinx==5\.1\.1") as caught:
        sample_recordings(Settings(tmp_path, tmp_path / "cache"), pip_options=local(tmp_path))
    assert "No matching distribution" in str(caught.value.found)


def test_without_pip_the_mend_is_named(tmp_path: Path) -> None:
    pip = (sys.executable, "-c", "raise SystemExit('/usr/bin/python: No module named pip')")
    with pytest.raises(DownloadError, match="needs pip") as caught:
        sample_recordings(Settings(tmp_path, tmp_path / "cache"), pip=pip)
    assert caught.value.hint and "ensurepip" in caught.value.hint


@pytest.mark.network
def test_the_real_recordings_come_once_and_are_speech(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path / "cache")
    paths = sample_recordings(settings)
    assert [path.name for path in paths] == [sample.file for sample in SAMPLES]
    assert [sha256_file(path) for path in paths] == [sample.sha256 for sample in SAMPLES]
    assert {path.name for path in paths[0].parent.iterdir()} == {sample.file for sample in SAMPLES}
    for path in paths:
        audio, info = load_audio(path, 16_000)
        assert info.converted == () and 2 < info.seconds < 10
        assert 0.01 < float((audio**2).mean() ** 0.5) < 0.5

    start = time.monotonic()
    offline = Settings(tmp_path, tmp_path / "cache", offline=True)
    assert sample_recordings(offline) == paths  # cached: no fetch, also offline
    assert time.monotonic() - start < 1

    paths[0].write_bytes(b"damaged")
    with pytest.raises(OfflineError):
        sample_recordings(offline)
    assert sha256_file(sample_recordings(settings)[0]) == SAMPLES[0].sha256  # mended
