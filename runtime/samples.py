"""Recorded speech to try things with, fetched once and kept in the cache.

The recordings are public-domain LibriVox readings (Jane Austen, Sense and Sensibility, chapter 1), 16 kHz mono,
that the source package pocketsphinx 5.1.1 carries as test data. Nothing of that package is built or run.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wpk.ir.errors import DownloadError, OfflineError
from wpk.registry.settings import Settings
from wpk.registry.storage import publish_folder, sha256_file
from wpk.registry.weights.pypi import pip_download

_PACKAGE, _VERSION = "pocketsphinx", "5.1.1"
_FOLDER = f"{_PACKAGE}-{_VERSION}/test/data/librivox"


@dataclass(frozen=True)
class Sample:
    """One recording. words: what is said, lower case without punctuation, as the package transcribes it."""

    file: str
    sha256: str
    words: str


SAMPLES: tuple[Sample, ...] = (
    Sample(
        "sense_and_sensibility_01_austen_64kb-0870.wav",
        "b0557cf95c974d930577e58e46b7f068c432a6e3afcc286563d88922b2a5315c",
        "and mister john dashwood had then leisure to consider how much there might be prudently in his power to do "
        "for them",
    ),
    Sample(
        "sense_and_sensibility_01_austen_64kb-0880.wav",
        "fbec491ef00ee734a67f0ee318e98c51c157b479e1629ff4f4426861ecac0414",
        "he was not an ill disposed young man",
    ),
    Sample(
        "sense_and_sensibility_01_austen_64kb-0890.wav",
        "5793ffbdee55fb8bfd284943a6866864c832d9d4accf2661cabd39915c84ee10",
        "unless to be rather cold hearted and rather selfish is to be ill disposed",
    ),
    Sample(
        "sense_and_sensibility_01_austen_64kb-0920.wav",
        "40882414ef4cc51f3ff7a63bad0c8c87e7f595ffeb8209fbf756c8ebc5c28a59",
        "had he married a more a amiable woman he might have been made still more respectable than he was",
    ),
    Sample(
        "sense_and_sensibility_01_austen_64kb-0930.wav",
        "954adbf0b56ac8a148cbe77b39ca18d76b5f2a1e1f405565bd786ce3e68a68b7",
        "he might even have been made amiable himself",
    ),
)

# pip asks a source package's build backend for metadata even to download it, and for this package that means
# fetching a build system first. It gets this stand-in instead: same module name, first on the path, does nothing
# but name the package. So no code of the package runs and nothing else is fetched.
_BACKEND_PACKAGE = "scikit_build_core"
_BACKEND = f'''\
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "{_PACKAGE}-{_VERSION}.dist-info"
    os.mkdir(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as out:
        out.write("Metadata-Version: 2.1\\nName: {_PACKAGE}\\nVersion: {_VERSION}\\n")
    return name

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("this package is downloaded for its recordings only, never built")
'''


def sample_recordings(
    settings: Settings, *, pip: Sequence[str] | None = None, pip_options: Sequence[str] = ()
) -> list[Path]:
    """The recordings of SAMPLES, in that order, fetched on the first call (34 MB, of which 0.8 MB is kept).

    pip, pip_options: as for WeightsStore. Raises OfflineError where they are not cached and fetching is forbidden,
    DownloadError where it fails or brings other bytes than pinned, StoreError for an unusable cache.
    """
    folder = settings.samples / f"{_PACKAGE}-{_VERSION}"
    paths = [folder / sample.file for sample in SAMPLES]

    def intact(folder: Path) -> bool:
        files = [(folder / sample.file, sample.sha256) for sample in SAMPLES]
        return all(path.is_file() and sha256_file(path) == pin for path, pin in files)

    def fetch(temporary: Path) -> None:
        backend = temporary / "backend" / _BACKEND_PACKAGE
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build.py").write_text(_BACKEND, encoding="utf-8")
        downloads = temporary / "download"
        downloads.mkdir()
        archive = pip_download(
            f"{_PACKAGE}=={_VERSION}",
            downloads,
            settings,
            options=("--no-binary", _PACKAGE, "--no-build-isolation", *pip_options),
            pip=pip,
            environ={"PYTHONPATH": str(backend.parent)},
        )
        _extract(archive, temporary)
        shutil.rmtree(backend.parent)
        shutil.rmtree(downloads)

    if settings.offline and not intact(folder):
        raise OfflineError(
            "the sample recordings are not here, and fetching is switched off",
            wanted=f"{len(SAMPLES)} recordings in {folder}",
            found="no complete copy",
            hint="unset WPK_OFFLINE and HF_HUB_OFFLINE once, or give recordings of your own",
        )
    publish_folder(folder, fetch, valid=intact)
    return paths


def _extract(archive: Path, folder: Path) -> None:
    """The recordings out of the source package, by exact name; DownloadError where one is absent or different."""
    pending = {f"{_FOLDER}/{sample.file}": sample for sample in SAMPLES}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                sample = pending.pop(member.name, None)
                stream = tar.extractfile(member) if sample else None
                if sample is None or stream is None:
                    continue
                target = folder / sample.file
                with stream, open(target, "wb") as out:
                    shutil.copyfileobj(stream, out)
                found = sha256_file(target)
                if found != sample.sha256:
                    raise DownloadError(
                        f"{sample.file} of {archive.name} is not the pinned recording",
                        wanted=f"sha256 {sample.sha256}",
                        found=f"sha256 {found}",
                    )
                if not pending:
                    break  # the rest of the package need not be unpacked
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk; publish_folder names it
        raise DownloadError(f"{archive.name} is no whole source package", found=str(error), hint="try again") from error
    if pending:
        raise DownloadError(f"{archive.name} lacks recordings", wanted=", ".join(pending), found="nothing")
