"""Models by name: the built-in zoo and what the user has added."""

from __future__ import annotations

from wpk.registry.settings import Settings, settings
from wpk.zoo.catalog import Catalog
from wpk.zoo.spec import ModelSpec


def catalog(where: Settings | None = None) -> Catalog:
    """The zoo with this user's additions."""
    return Catalog((where or settings()).specs)


def find_model(name: str, where: Settings | None = None) -> ModelSpec:
    """The spec of that name; `UnknownModelError` suggests close ones."""
    return catalog(where).get(name)
