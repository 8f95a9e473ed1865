"""`wpk doctor`: each finding with a mend; exit code 1 where something needed does not work."""

from __future__ import annotations

import importlib.metadata
import tomllib
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.cli.harness import Wpk
from wpk.cli import doctor
from wpk.kernel import cubin, neighbours
from wpk.kernel.neighbours import Neighbours, Process

ROOT = Path(__file__).parents[2]


def check(wpk: Wpk, name: str) -> Any:
    return next(c for c in wpk("doctor", "--json").json["checks"] if c["name"] == name)


def test_a_machine_that_runs_these_tests_is_well(wpk: Wpk) -> None:
    said = wpk("doctor", "--json")
    assert said.code == 0
    assert said.json["ok"] is True
    names = [c["name"] for c in said.json["checks"]]
    for name in ("python", "numpy", "numba compiles", "cpu", "cpu features", "data folder", "cache folder", "fetching"):
        assert name in names
    for found in said.json["checks"]:
        assert found["ok"] or found["mend"]
    assert "python" in wpk("doctor").out


def test_no_gpu_is_no_failure_but_says_how_to_get_one(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = check(wpk, "gpu")
    assert (found["ok"], found["needed"]) == (False, False)
    assert "H200" in found["mend"]


def test_a_missing_package_that_is_needed_fails(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = doctor.Package("no-such-package", "no_such_module", "testing")
    monkeypatch.setattr(doctor, "PACKAGES", (absent,))
    monkeypatch.setattr(doctor, "requirements", lambda: {"no-such-package": doctor.Wanted(SpecifierSet())})
    said = wpk("doctor", "--json")
    assert said.code == 1
    assert said.json["ok"] is False
    assert check(wpk, "no-such-package")["mend"] == "pip install wpk"
    assert "no-such-package" in wpk("doctor", "-q").out.split()


def test_a_version_outside_the_wanted_ones_fails(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: {"numpy": doctor.Wanted(SpecifierSet("<1"))})
    found = check(wpk, "numpy")
    assert found["ok"] is False
    assert found["mend"] == "pip install 'numpy<1'"


def test_a_missing_package_of_an_extra_is_no_failure(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = doctor.Package("numba-cuda", "no_such_module", "testing")
    monkeypatch.setattr(doctor, "PACKAGES", (absent,))
    found = check(wpk, "numba-cuda")
    assert (found["ok"], found["needed"]) == (False, False)
    assert found["mend"] == "pip install 'wpk[cu12]' or pip install 'wpk[cu13]'"


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed(monkeypatch: pytest.MonkeyPatch, lines: list[str] | None, extras: list[str]) -> None:
    """As if pip had installed WPK with these requirements; None: as if it had not."""

    def metadata(name: str) -> Message:
        assert name == "wpk"
        if lines is None:
            raise importlib.metadata.PackageNotFoundError(name)
        message = Message()
        for extra in extras:
            message["Provides-Extra"] = extra
        return message

    monkeypatch.setattr(doctor.importlib.metadata, "metadata", metadata)
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: metadata(name) and lines)


@pytest.mark.parametrize("in_folder", [True, False])
def test_requirements_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch, in_folder: bool) -> None:
    optional = project()["optional-dependencies"]
    lines = [*project()["dependencies"], *(f'{line}; extra == "{e}"' for e in optional for line in optional[e])]
    installed(monkeypatch, None if in_folder else lines, list(optional))
    found = doctor.requirements()
    core = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]}
    assert {name for name, wanted in found.items() if not wanted.extras} == core
    assert core <= {canonicalize_name(p.distribution) for p in doctor.PACKAGES}
    assert {canonicalize_name(p.distribution) for p in doctor.PACKAGES} <= set(found)
    assert found["numba"].versions == SpecifierSet(">=0.68")
    assert found["numba-cuda"].extras == ("cu12", "cu13") and found["onnxruntime"].extras == ("bench",)
    assert "torch" not in found and "pytest" not in found


def test_requirements_of_other_systems_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ["pip; os_name == 'x'", "wheel; extra == 'zoo' and os_name == 'x'"]
    installed(monkeypatch, ["numpy>=2", "numpy<3; extra == 'zoo'", "onnx; extra == 'zoo'", *elsewhere], ["zoo"])
    assert doctor.requirements() == {
        "numpy": doctor.Wanted(SpecifierSet(">=2,<3")), "onnx": doctor.Wanted(SpecifierSet(), ("zoo",))
    }  # fmt: skip


def test_without_any_word_of_requirements_nothing_is_called_needed(
    wpk: Wpk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, None, [])
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "cli" / "doctor.py"))
    monkeypatch.setattr(doctor, "PACKAGES", (*doctor.PACKAGES, doctor.Package("none", "no_such_module", "testing")))
    assert doctor.requirements() == {}
    assert check(wpk, "numpy")["ok"] is True and check(wpk, "numba compiles")["ok"] is True
    assert (check(wpk, "none")["ok"], check(wpk, "none")["needed"]) == (False, False)


def test_a_folder_that_cannot_be_written_fails(wpk: Wpk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WPK_HOME", str(tmp_path / "file"))
    said = wpk("doctor", "--json")
    assert said.code == 1
    assert "WPK_HOME" in check(wpk, "data folder")["mend"]


def test_the_doctor_leaves_nothing_behind(wpk: Wpk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WPK_HOME", str(tmp_path / "fresh" / "home"))
    assert wpk("doctor").code == 0
    assert not (tmp_path / "fresh").exists()


def test_offline_is_said(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WPK_OFFLINE", "1")
    assert check(wpk, "fetching")["ok"] is False
    assert wpk("doctor").code == 0


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, *found: Neighbours) -> None:
    """As if the driver showed so many GPUs, and these neighbours on them."""
    rows = [f"{index}, NVIDIA H200, 580.1, 143771 MiB, 143000 MiB, Disabled" for index in range(count)]
    monkeypatch.setattr(neighbours, "nvidia_smi", lambda *options: rows)
    monkeypatch.setattr(neighbours, "find_neighbours", lambda gpu: found[int(gpu)])


def test_a_gpu_is_described_with_who_else_uses_it(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, Neighbours((Process(4242, "python", 1000 << 20),)))
    said = wpk("doctor", "--json")
    assert said.code == 0
    by_name = {c["name"]: c for c in said.json["checks"]}
    assert by_name["gpu 0"]["detail"] == "NVIDIA H200, 143771 MiB of which 143000 MiB free, driver 580.1"
    assert by_name["gpu is free"]["ok"] is False
    assert "4242" in by_name["gpu is free"]["detail"]


def test_every_gpu_is_looked_at(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 3, Neighbours(), Neighbours(unseen=8 << 30), Neighbours(unknown="no permission"))
    by_name = {c["name"]: c for c in wpk("doctor", "--json").json["checks"]}
    assert by_name["gpu 0 is free"]["ok"] is True
    assert by_name["gpu 1 is free"]["detail"].startswith("8.0 GiB held by no process in sight")
    assert by_name["gpu 2 is free"]["detail"] == "not known: no permission"
    assert "nvidia-ml-py" in by_name["gpu 2 is free"]["mend"]


def test_what_builds_gpu_kernels_and_where_they_are_kept(
    wpk: Wpk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WPK_HOME", str(tmp_path / "own"))
    assert check(wpk, "gpu kernels")["detail"].endswith("no kernels yet")
    (tmp_path / "own" / "cache" / "kernels" / "cuda").mkdir(parents=True)
    for name in ("a.cubin", "b.cubin", "b.json"):
        (tmp_path / "own" / "cache" / "kernels" / "cuda" / name).write_bytes(bytes(1024))
    assert check(wpk, "gpu kernels")["detail"].endswith("2 kernels, 2.0 KiB")
    monkeypatch.setattr(cubin, "find_ptxas", lambda: "/cuda/bin/ptxas")
    monkeypatch.setattr(cubin, "ptxas_version", lambda: "tools, release 13.0, V13.0.88\nBuild x")
    assert check(wpk, "ptxas")["detail"] == "13.0 in /cuda/bin/ptxas"
    monkeypatch.setattr(cubin, "find_ptxas", lambda: None)
    found = check(wpk, "ptxas")
    assert (found["ok"], found["needed"]) == (False, False) and "pip install" in found["mend"]


def test_a_check_that_breaks_is_a_finding(wpk: Wpk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        """Broken."""
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(doctor, "PROBES", (broken,))
    said = wpk("doctor", "--json")
    assert said.code == 1
    assert said.json["checks"][0]["name"] == "Broken"
