"""A home of its own for each test, small models of synthetic weights, and recordings in every shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from tests.cli.harness import ECHO, SPEC, Said, Wav, Wpk
from wpk.cli.main import app


@pytest.fixture
def store(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A $WPK_HOME for this test with nothing but the run's machine code; and the present folder is the test's."""
    kernels, folder = home / "cache" / "kernels", tmp_path / "home"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir(parents=True)
    (folder / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("WPK_HOME", str(folder))
    for name in ("WPK_OFFLINE", "HF_HUB_OFFLINE", "WPK_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def wpk(store: Path) -> Wpk:
    """Run a command line in this process."""

    def run(*words: object) -> Said:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert isinstance(result.exception, SystemExit | None), result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def tiny(wpk: Wpk, tmp_path: Path) -> str:
    """The name of a voice activity model that has just been added."""
    return _added(wpk, tmp_path, SPEC)


@pytest.fixture
def echo(wpk: Wpk, tmp_path: Path) -> str:
    """The name of a model with audio out that has just been added."""
    return _added(wpk, tmp_path, ECHO)


def _added(wpk: Wpk, folder: Path, text: str) -> str:
    (folder / "spec.yaml").write_text(text)
    said = wpk("zoo", "add", folder / "spec.yaml", "-q")
    assert said.code == 0, said.err
    return said.out.strip()


@pytest.fixture
def wav(tmp_path: Path) -> Wav:
    """Write a recording of noise: name, seconds, and what soundfile takes."""

    def write(name: str, seconds: float = 0.1, rate: int = 16000, channels: int = 1, subtype: str = "PCM_16") -> Path:
        rng = np.random.default_rng(len(name))
        audio = np.clip(0.2 * rng.standard_normal((round(seconds * rate), channels)), -1, 1)
        soundfile.write(tmp_path / name, audio, rate, subtype=subtype)
        return tmp_path / name

    return write
