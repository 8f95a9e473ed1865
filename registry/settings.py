"""Where things live and whether fetching is allowed. The one place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Settings:
    """One reading of the environment; nothing here touches the disk.

    home: data worth keeping: weights, added specs. cache: what can be made again: profiles, compiled kernels,
    sample recordings. Both are absolute and may not exist yet. offline: no fetch may start. debug: the command line
    shows the traceback of what ends it.
    """

    home: Path
    cache: Path
    offline: bool = False
    debug: bool = False

    @property
    def weights(self) -> Path:
        return self.home / "weights"

    @property
    def specs(self) -> Path:
        """Specs added by `wpk zoo add`."""
        return self.home / "zoo"

    @property
    def profiles(self) -> Path:
        return self.cache / "profiles"

    @property
    def kernels(self) -> Path:
        """Compiled kernels, addressed by content."""
        return self.cache / "kernels"

    @property
    def samples(self) -> Path:
        return self.cache / "samples"


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment now (nothing is remembered between calls).

    `$WPK_HOME` holds everything when it is set and not empty, else the platform's data and cache folders do.
    `WPK_OFFLINE` or `HF_HUB_OFFLINE` set to 1, true, yes or on forbids every fetch. `WPK_DEBUG` likewise asks for
    tracebacks.
    """
    env = os.environ if environ is None else environ

    def on(name: str) -> bool:
        return env.get(name, "").strip().lower() in _TRUE

    offline, debug = on("WPK_OFFLINE") or on("HF_HUB_OFFLINE"), on("WPK_DEBUG")
    chosen = env.get("WPK_HOME", "").strip()
    if chosen:
        # Absolute now, so that a later chdir does not move the store.
        home = Path(os.path.abspath(os.path.expanduser(chosen)))
        return Settings(home=home, cache=home / "cache", offline=offline, debug=debug)
    return Settings(
        home=Path(platformdirs.user_data_dir("wpk", appauthor=False)),
        cache=Path(platformdirs.user_cache_dir("wpk", appauthor=False)),
        offline=offline,
        debug=debug,
    )


def child_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with some variables added: what a program that we start gets."""
    return {**os.environ, **(added or {})}
