"""Settings: what the environment says, read anew each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from wpk.registry.settings import Settings, settings


def test_wpk_home_holds_data_and_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WPK_HOME", str(tmp_path))
    now = settings()
    assert now.home == tmp_path
    assert now.cache == tmp_path / "cache"
    assert now.weights == tmp_path / "weights"
    for place in (now.profiles, now.kernels, now.samples):
        assert place.parent == now.cache


@pytest.mark.parametrize("unset", [None, "", "  "])
def test_without_wpk_home_the_platform_decides(monkeypatch: pytest.MonkeyPatch, unset: str | None) -> None:
    if unset is None:
        monkeypatch.delenv("WPK_HOME", raising=False)
    else:
        monkeypatch.setenv("WPK_HOME", unset)
    now = settings()
    assert now.home.is_absolute() and now.cache.is_absolute()
    assert now.home.name == "wpk" or "wpk" in now.home.parts
    assert now.home != now.cache


def test_a_relative_home_does_not_move_with_the_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WPK_HOME", "store")
    assert settings().home == tmp_path / "store"


def test_each_call_reads_again_and_creates_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("WPK_HOME", str(tmp_path / name))
        assert settings().home.name == name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["WPK_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize(
    ("value", "offline"), [("1", True), ("true", True), ("YES", True), ("0", False), ("", False), ("no", False)]
)
def test_either_variable_forbids_fetching(variable: str, value: str, offline: bool) -> None:
    assert settings({variable: value}).offline is offline


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    now = Settings(home=tmp_path, cache=tmp_path)
    with pytest.raises(AttributeError):
        now.offline = True  # type: ignore[misc]
