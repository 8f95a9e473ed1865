"""Models resolved, profiles built, stored, verified and loaded.

from wpk import registry
with registry.load("my-model", capacity=8) as cohort:
    session = cohort.join()
    outputs = cohort.beat({session: {"audio": frame}})
"""

from wpk.ir.errors import (
    AudioError,
    CapacityError,
    CompileError,
    DownloadError,
    GraphError,
    IrSyntaxError,
    KernelError,
    OfflineError,
    OperatorError,
    ProfileError,
    ProgramError,
    SessionError,
    SpecError,
    StoreError,
    TargetError,
    UnknownModelError,
    UntrustedSourceError,
    UsageError,
    WeightsError,
    WpkError,
)
from wpk.registry.build import Built, build
from wpk.registry.cohort import Cohort, Session, Stats
from wpk.registry.load import load
from wpk.registry.models import catalog, find_model
from wpk.registry.profile import Manifest, ProfileStore

__all__ = [
    "AudioError", "Built", "CapacityError", "Cohort", "CompileError", "DownloadError", "GraphError", "IrSyntaxError",
    "KernelError", "Manifest", "OfflineError", "OperatorError", "ProfileError", "ProfileStore", "ProgramError",
    "Session", "SessionError", "SpecError", "Stats", "StoreError", "TargetError", "UnknownModelError",
    "UntrustedSourceError", "UsageError", "WeightsError", "WpkError", "build", "catalog", "find_model", "load",
]  # fmt: skip
