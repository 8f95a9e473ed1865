"""A checkpoint's tensors compared with those that a spec expects, all differences at once."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypedDict

from wpk.ir.errors import WeightsError
from wpk.registry.formats.tensors import Shape, TensorSet


class Group(TypedDict):
    """Tensors whose names begin alike: how many, their numbers, and how many of them the model leaves unused."""

    name: str
    tensors: int
    values: int
    unused: int


class Misshapen(TypedDict):
    name: str
    wanted: list[int]
    found: list[int]


@dataclass(frozen=True)
class Inventory:
    """A spec's tensors beside a file's, complete.

    expected, found: numbers of tensors (auxiliary, unused and ignored ones are not counted as found). values: numbers
    in all expected tensors, the parameters. groups: expected and unused ones. ok: nothing missing, extra or misshapen.
    """

    expected: int
    found: int
    missing: list[str]
    extra: list[str]
    misshapen: list[Misshapen]
    values: int
    groups: list[Group] = field(default_factory=list)
    _shapes: Mapping[str, Shape] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return not (self.missing or self.extra or self.misshapen)

    def as_dict(self) -> dict[str, Any]:
        """The fields of `wpk zoo check --json`."""
        return {
            "ok": self.ok,
            "expected": self.expected,
            "found": self.found,
            "missing": self.missing,
            "extra": self.extra,
            "misshapen": self.misshapen,
            "values": self.values,
            "groups": self.groups,
        }

    def lines(self) -> list[str]:
        """Each difference as a person reads it."""
        return [
            *(f"missing {name}: wanted {list(self._shapes[name])}, found nothing" for name in self.missing),
            *(f"extra {name}: wanted nothing, found {list(self._shapes[name])}" for name in self.extra),
            *(f"misshapen {one['name']}: wanted {one['wanted']}, found {one['found']}" for one in self.misshapen),
        ]

    def require(self, what: str, *, extra: bool = True) -> None:
        """Raise WeightsError that lists every difference; extra=False lets tensors that nobody asked for pass."""
        if self.missing or self.misshapen or (extra and self.extra):
            counts = f"{len(self.missing)} missing, {len(self.extra)} extra, {len(self.misshapen)} misshapen"
            raise WeightsError(
                f"the weights of {what} don't fit its spec:\n  " + "\n  ".join(self.lines()) + "\n",
                wanted=f"{self.expected} tensors",
                found=f"{self.found} tensors ({counts})",
                hint="compare the spec's tensor names with `wpk zoo check`",
            )


def check_inventory(
    expected: Mapping[str, Shape],
    found: TensorSet,
    ignore: Sequence[str] = (),
    unused: Mapping[str, Shape] = MappingProxyType({}),
) -> Inventory:
    """Compare names and shapes; nothing is loaded, everything is listed, in the order of the spec or the file.

    unused: tensors that the spec leaves unused on purpose; they may be lacking, but not be misshapen. ignore: globs of
    others; they are not extra. Auxiliary tensors of a file (TensorInfo.auxiliary) never are.
    """
    shapes, spare = ({n: tuple(int(s) for s in shape) for n, shape in some.items()} for some in (expected, unused))
    relevant = {
        name: info.shape
        for name, info in found.tensors.items()
        if name in shapes
        or not (name in spare or info.auxiliary or any(fnmatch.fnmatchcase(name, glob) for glob in ignore))
    }
    held = {**relevant, **{name: found.tensors[name].shape for name in spare if name in found.tensors}}
    misshapen: list[Misshapen] = [
        {"name": name, "wanted": list(shape), "found": list(held[name])}
        for name, shape in {**spare, **shapes}.items()
        if name in held and held[name] != shape
    ]
    return Inventory(
        expected=len(shapes),
        found=len(relevant),
        missing=[name for name in shapes if name not in relevant],
        extra=[name for name in relevant if name not in shapes],
        misshapen=misshapen,
        values=sum(math.prod(shape) for shape in shapes.values()),
        groups=_groups(shapes, spare),
        _shapes={**relevant, **spare, **shapes},
    )


def _groups(expected: Mapping[str, Shape], unused: Mapping[str, Shape]) -> list[Group]:
    """By the first two parts of the name, in the order in which they come."""
    found: dict[str, Group] = {}
    for shapes, spare in ((expected, 0), (unused, 1)):
        for name, shape in shapes.items():
            head = ".".join(name.split(".")[:2])
            group = found.setdefault(head, {"name": head, "tensors": 0, "values": 0, "unused": 0})
            group["tensors"] += 1
            group["values"] += math.prod(shape)
            group["unused"] += spare
    return list(found.values())
