"""The house: imports point down, packages are complete, models are named in the zoo alone."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What each folder may import, beside itself.
BELOW = {
    "ir": set(),
    "ops": {"ir"},
    "scheduler": {"ops", "ir"},
    "kernel": {"scheduler", "ops", "ir"},
    "zoo": {"ops", "ir"},
    "registry": {"kernel", "scheduler", "zoo", "ops", "ir"},
    "runtime": {"registry", "kernel", "scheduler", "zoo", "ops", "ir"},
    "bench": {"runtime", "registry", "kernel", "scheduler", "zoo", "ops", "ir"},
    "cli": {"bench", "runtime", "registry", "kernel", "scheduler", "zoo", "ops", "ir"},
}
SOURCES = sorted(p for folder in BELOW for p in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    folder = path.relative_to(ROOT).parts[0]
    used = {name.split(".")[1] for name in imported(path) if name.startswith("wpk.")}
    assert used - {folder} <= BELOW[folder]


def test_numba_cuda_is_imported_in_kernel_and_ops_alone():
    for path in SOURCES:
        if any(name == "numba.cuda" or name.startswith("numba.cuda.") for name in imported(path)):
            assert path.relative_to(ROOT).parts[0] in ("kernel", "ops")


def test_every_package_is_installed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent for p in SOURCES}
    assert listed >= {"wpk." + ".".join(f.relative_to(ROOT).parts) for f in folders}
    assert not (ROOT / "__init__.py").exists()


def test_no_model_is_named_outside_the_zoo():
    names = [p.stem.split("-")[0] for p in (ROOT / "zoo" / "models").glob("*.yaml")]
    pattern = re.compile(rf"\b({'|'.join(names)})", re.IGNORECASE)
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] != "zoo":
            assert not pattern.search(path.read_text()), path  # nor in an example of a docstring
    assert names


def test_one_place_reads_the_environment():
    for path in SOURCES:
        if path != ROOT / "registry" / "settings.py":
            assert "os.environ" not in path.read_text(), path
