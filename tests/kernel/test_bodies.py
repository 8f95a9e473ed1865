"""Compiled bodies are kept on disk; a damaged cache is made anew, not a riddle."""

from pathlib import Path

import pytest

from wpk.kernel import bodies


@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_a_damaged_cache_is_made_anew(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_compiled", {})
    bodies.compile_kernel(["increment@1"], {}, tmp_path)
    kept = list(tmp_path.glob("cpu/*/*/*.nb?"))
    assert kept
    for file in kept:
        file.write_bytes(damage)
    monkeypatch.setattr(bodies, "_compiled", {})
    (address,), _ = bodies.compile_kernel(["increment@1"], {}, tmp_path)
    assert address
    assert all(file.stat().st_size > len(damage) for file in tmp_path.glob("cpu/*/*/*.nb?"))
