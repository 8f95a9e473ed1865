"""One WPK_HOME for a test run: what the user has fetched is used, what tests make goes with the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from wpk.registry.settings import Settings, settings


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary $WPK_HOME with fresh profiles. Fetched weights and recordings are those of the user's own.

    Kernels are compiled once a run, by whichever test, worker or child process comes first; where $WPK_HOME was set,
    they are kept there for the next run (they are addressed by the digest of the sources).
    """
    base, user = tmp_path_factory.getbasetemp(), settings()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "wpk-home"
    links = {folder / "weights": user.weights, folder / "cache" / "samples": user.samples}
    if os.environ.get("WPK_HOME"):
        links[folder / "cache" / "kernels"] = user.kernels
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        except OSError:  # another worker was first, or the user's store cannot be written: then this run has its own
            continue
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WPK_HOME", str(folder))
        yield folder


@dataclass(frozen=True)
class _Where(Settings):
    compiled: Path = Path()

    @property
    def kernels(self) -> Path:
        return self.compiled


@pytest.fixture
def where(home: Path, tmp_path: Path) -> Settings:
    """An empty store for one test, with the run's compiled kernels."""
    return _Where(home=tmp_path, cache=tmp_path / "cache", compiled=home / "cache" / "kernels")


@pytest.fixture(scope="module")
def shared(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The same for all tests of a file: profiles that one has built are there for the next."""
    folder = tmp_path_factory.mktemp("store")
    return _Where(home=folder, cache=folder / "cache", compiled=home / "cache" / "kernels")


@pytest.fixture
def child_home(home: Path, tmp_path: Path) -> Path:
    """The same as a folder that child processes get as $WPK_HOME."""
    kernels = home / "cache" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)
    return tmp_path
