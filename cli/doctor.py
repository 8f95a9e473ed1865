"""`wpk doctor`: what this machine has, what is missing, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from wpk.cli.output import JsonFlag, Output, QuietFlag, Table, size

LEAST_PYTHON = (3, 11)
LEAST_FREE = 1 << 30  # bytes; weights of the small models, profiles and kernels stay far below
GPU_FIELDS = "index,name,driver_version,memory.total,memory.free,mig.mode.current"


@dataclass(frozen=True)
class Finding:
    """One check. needed: without it, WPK does not work here. mend: what to do where it is not ok."""

    name: str
    ok: bool
    detail: str
    mend: str | None = None
    needed: bool = True


@dataclass(frozen=True)
class Package:
    """distribution on PyPI, the module that it brings, and what it is for."""

    distribution: str
    module: str
    purpose: str


@dataclass(frozen=True)
class Wanted:
    """How WPK asks for a package. extras: those that install it; none where WPK itself needs it."""

    versions: SpecifierSet
    extras: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        return " or ".join(f"pip install 'wpk[{extra}]'" for extra in self.extras) or "pip install wpk"


PACKAGES = (
    Package("numpy", "numpy", "arrays"),
    Package("numba", "numba", "the CPU kernel"),
    Package("pydantic", "pydantic", "specs and manifests"),
    Package("PyYAML", "yaml", "specs"),
    Package("typer", "typer", "this command"),
    Package("rich", "rich", "tables and progress"),
    Package("filelock", "filelock", "the stores"),
    Package("platformdirs", "platformdirs", "the stores"),
    Package("packaging", "packaging", "operator versions"),
    Package("safetensors", "safetensors", "weights"),
    Package("huggingface_hub", "huggingface_hub", "weights of model repositories"),
    Package("soundfile", "soundfile", "recordings"),
    Package("soxr", "soxr", "recordings at other rates"),
    Package("onnx", "onnx", "weights in ONNX files"),
    Package("onnxruntime", "onnxruntime", "baselines of `wpk bench`"),
    Package("numba-cuda", "numba_cuda", "the GPU kernel"),
)
DEVELOPERS = ("test", "oracle")  # extras that nobody is told to install
UNSAID = Wanted(SpecifierSet())  # where nothing tells what this installation asks for


def doctor(json: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Python, packages, CPU, GPU, driver, folders and network, each with a mend. -q names what is not ok."""
    out = Output(json, quiet)
    findings: list[Finding] = []
    with out.progress() as report:
        for probe in PROBES:
            report((probe.__doc__ or "").rstrip("."), len(findings), 0)
            findings += _survived(probe)
    ok = all(finding.ok or not finding.needed for finding in findings)
    mends = [f"{finding.name}: {finding.mend}" for finding in findings if not finding.ok and finding.mend]
    verdict = "everything that is needed works here" if ok else "something that is needed does not work"
    out.result(
        {"ok": ok, "checks": [asdict(finding) for finding in findings]},
        names=[finding.name for finding in findings if not finding.ok],
        blocks=[
            Table(("check", "state", "found"), [(f.name, _state(f), f.detail) for f in findings]),
            *(["to mend:\n" + "\n".join(f"  {mend}" for mend in mends)] if mends else []),
            verdict,
        ],
    )
    out.verdict(ok)


def _state(finding: Finding) -> str:
    return "ok" if finding.ok else "FAILED" if finding.needed else "absent"


def _survived(probe: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A doctor does not die of what it finds."""
    try:
        return list(probe())
    except Exception as error:
        name = (probe.__doc__ or probe.__name__).rstrip(".")
        return [Finding(name, False, f"{type(error).__name__}: {error}", "reinstall wpk, and report this")]


# --- software -------------------------------------------------------------------------------------------------------
def python() -> Iterator[Finding]:
    """Python."""
    wanted = ".".join(map(str, LEAST_PYTHON))
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.platform(terse=True)}"
    yield Finding("python", sys.version_info >= LEAST_PYTHON, found, f"install Python {wanted} or newer")


def packages() -> Iterator[Finding]:
    """Packages."""
    asked = requirements()
    for package in PACKAGES:
        name = package.distribution
        wanted = asked.get(canonicalize_name(name), UNSAID)
        needed = wanted is not UNSAID and not wanted.extras
        if importlib.util.find_spec(package.module) is None:
            yield Finding(name, False, f"not installed; for {package.purpose}", wanted.install, needed)
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, True, "a version that does not say", None, needed)
            continue
        fits = wanted.versions.contains(version, prereleases=True)
        mend = None if fits else f"pip install '{name}{wanted.versions}'"
        yield Finding(name, fits, version if fits else f"{version}, wanted {wanted.versions}", mend, needed)


def requirements() -> dict[str, Wanted]:
    """Package -> how this installation asks for it, by the package's canonical name.

    An installed WPK says so itself; where it runs from a folder, the pyproject.toml there does, if it came along.
    """
    try:
        lines = importlib.metadata.requires("wpk") or []
        extras = importlib.metadata.metadata("wpk").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        lines, extras = _folder_requirements(Path(__file__).resolve().parents[1] / "pyproject.toml")
    found: dict[str, Wanted] = {}
    for line in map(Requirement, lines):
        chosen = [e for e in extras if line.marker is None or line.marker.evaluate({"extra": e})]
        core = line.marker is None or line.marker.evaluate({"extra": ""})
        if not core and set(chosen) <= set(DEVELOPERS):  # also where it is for other systems than this
            continue
        name = canonicalize_name(line.name)
        known = found.get(name)
        core = core or (known is not None and not known.extras)
        own = () if core else tuple(e for e in chosen if e not in DEVELOPERS)
        versions = line.specifier & known.versions if known else line.specifier
        found[name] = Wanted(versions, () if core else (*(known.extras if known else ()), *own))
    return found


def _folder_requirements(path: Path) -> tuple[list[str], list[str]]:
    """What an installed WPK's metadata would say: the lines of requirements, and the extras."""
    if not path.is_file():
        return [], []
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    lines = [f"{line}; extra == '{extra}'" for extra, listed in optional.items() for line in listed]
    return [*project["dependencies"], *lines], list(optional)


def numba_compiles() -> Iterator[Finding]:
    """Numba compiles."""
    asked = requirements()
    wanted = " ".join(f"'{name}{asked.get(name, UNSAID).versions}'" for name in ("numba", "numpy"))
    mend = f"pip install --force-reinstall {wanted}"
    try:
        import numba

        function = numba.njit("int64(int64)")(lambda x: x + 1)
        found = function(41)
    except Exception as error:  # whatever a broken installation raises
        yield Finding("numba compiles", False, f"{type(error).__name__}: {error}".splitlines()[0], mend)
        return
    yield Finding("numba compiles", found == 42, f"41 + 1 = {found}", mend)


# --- hardware -------------------------------------------------------------------------------------------------------
def cpu() -> Iterator[Finding]:
    """CPU."""
    from wpk.bench.machine import cpu_features, cpu_model
    from wpk.kernel.cpu import available_cpus

    yield Finding("cpu", True, f"{cpu_model()}, {available_cpus()} of {os.cpu_count()} processors usable")
    features = cpu_features()
    fast = [name for name in ("avx512f", "avx2", "fma", "neon") if name in features]
    yield Finding(
        "cpu features",
        bool(fast),
        ", ".join(fast) or "no wide vectors",
        "models run, but slowly; a CPU with AVX2 and FMA, or an ARM one, is several times faster",
        needed=False,
    )


def gpu() -> Iterator[Finding]:
    """GPU."""
    from wpk.kernel.neighbours import find_neighbours, nvidia_smi

    listed = nvidia_smi(f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    if isinstance(listed, str):
        mend = (
            "none is needed: models run on the CPU. For a GPU, use a machine with an NVIDIA H100 or H200 and its "
            f"driver, and {requirements().get('numba-cuda', UNSAID).install}"
        )
        yield Finding("gpu", False, listed, mend, needed=False)
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in listed]
    gpus = [row for row in rows if len(row) == len(GPU_FIELDS.split(","))]
    for index, name, driver, memory, free, mig in gpus:
        partition = ", in MIG mode" if mig == "Enabled" else ""
        detail = f"{name}, {memory} of which {free} free, driver {driver}{partition}"
        yield Finding(f"gpu {index}", True, detail, needed=False)
    for index, *_ in gpus:
        found = find_neighbours(index)
        name = "gpu is free" if len(gpus) == 1 else f"gpu {index} is free"
        unknown = "install nvidia-ml-py, or run `nvidia-smi` and look for other processes"
        mend = "a resident kernel wants the GPU for itself: stop these processes, or choose another GPU"
        alone = found.unknown is None and not found.there
        yield Finding(name, alone, str(found), mend if found.unknown is None else unknown, needed=False)


def gpu_kernels() -> Iterator[Finding]:
    """GPU kernels."""
    from wpk.kernel.cubin import find_ptxas, ptxas_version
    from wpk.registry.settings import settings

    install = requirements().get("numba-cuda", UNSAID).install
    ptxas = find_ptxas()
    release = ptxas_version().partition("release ")[2].partition(",")[0]
    detail = "not installed; for the GPU kernel" if ptxas is None else f"{release or 'unknown release'} in {ptxas}"
    yield Finding("ptxas", ptxas is not None, detail, install, needed=False)
    folder = settings().kernels / "cuda"
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")] if folder.is_dir() else []
    count = f"{len(sizes)} kernels, {size(sum(sizes))}" if sizes else "no kernels yet"
    yield Finding("gpu kernels", True, f"{folder}: {count}", needed=False)


# --- folders and network --------------------------------------------------------------------------------------------
def folders() -> Iterator[Finding]:
    """Folders."""
    from wpk.registry.settings import settings

    where = settings()
    for name, folder in (("data folder", where.home), ("cache folder", where.cache)):
        problem = writable(folder)
        free = shutil.disk_usage(_existing(folder)).free
        detail = f"{folder}, {size(free)} free" if problem is None else f"{folder}: {problem}"
        mend = "set $WPK_HOME to a folder that you can write, on a disk with room"
        yield Finding(name, problem is None and free >= LEAST_FREE, detail, mend)


def offline() -> Iterator[Finding]:
    """Network."""
    from wpk.registry.settings import settings

    off = settings().offline
    detail = "fetching is switched off" if off else "fetching is allowed"
    mend = "unset WPK_OFFLINE and HF_HUB_OFFLINE to fetch weights"
    yield Finding("fetching", not off, detail, mend, needed=False)


def writable(folder: Path) -> str | None:
    """Why a folder cannot be made and written; None where it can. Leaves nothing behind."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    try:
        with tempfile.TemporaryFile(dir=place) as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return None


def _existing(folder: Path) -> Path:
    """The folder, or the closest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    packages,
    numba_compiles,
    cpu,
    gpu,
    gpu_kernels,
    folders,
    offline,
)
