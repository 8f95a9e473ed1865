"""Which version of each operator a model is built with: requirements such as `linear: ">=1,<2"` against a library."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from wpk.ir.errors import OperatorError
from wpk.ops.operator import LIBRARY, OperatorLibrary, Resolved


class Selection:
    """A library as one model sees it: the newest version of each operator that its requirements allow.

    requirements: operator name -> PEP 440 specifier over the integer versions; operators that are not named may
    have any version. Implements `ir.graph.Library`. Raises OperatorError at once for a requirement that no version
    meets, all of them listed.
    """

    def __init__(self, requirements: Mapping[str, str] | None = None, library: OperatorLibrary = LIBRARY) -> None:
        self._library = library
        self._chosen: dict[str, int] = {}
        unmet = []
        for name, text in sorted((requirements or {}).items()):
            wanted, versions = SpecifierSet(text), library.versions(name)
            fitting = [version for version in versions if wanted.contains(Version(str(version)), prereleases=True)]
            if fitting:
                self._chosen[name] = fitting[-1]
            else:
                unmet.append((f"{name} {text}", ", ".join(f"{name}@{v}" for v in versions) or f"no operator {name!r}"))
        if unmet:
            raise OperatorError(
                "operators that a model needs are not in this library",
                wanted=", ".join(wanted for wanted, _ in unmet),
                found=", ".join(found for _, found in unmet),
                hint="`wpk ops list` shows what there is; install the wpk that the model was written for.",
            )

    def resolve(self, name: str, version: int | None = None) -> Resolved:
        """The operator of that name; the chosen version where none is named. Raises OperatorError without one."""
        return Resolved(self._library.get(name, self._chosen.get(name) if version is None else version))
