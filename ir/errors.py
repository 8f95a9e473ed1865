"""The one family of errors that WPK raises on purpose.

Every error names the thing, says what was wanted and what was found, and how to mend it. The command line
prints the same four parts; `--json` carries them as fields.
"""

from __future__ import annotations

from typing import Any


class WpkError(Exception):
    """Base of all typed errors.

    message: one sentence that names the thing. wanted / found: what was expected and what is there.
    hint: what the user can do.
    """

    def __init__(self, message: str, *, wanted: Any = None, found: Any = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.wanted = None if wanted is None else str(wanted)
        self.found = None if found is None else str(found)
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        if self.wanted is not None:
            parts.append(f"wanted {self.wanted}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        text = "; ".join(parts)
        return f"{text}. {self.hint}" if self.hint else text

    def as_dict(self) -> dict[str, str | None]:
        """The fields of the command line's `{"error": {...}}`."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "wanted": self.wanted,
            "found": self.found,
            "hint": self.hint,
        }


class GraphError(WpkError):
    """A graph breaks a rule of the IR: wrong dtype or shape, a cycle, an undefined value."""


class IrSyntaxError(WpkError):
    """A printed graph that does not parse."""


class OperatorError(WpkError):
    """An operator is unknown, lacks the wanted version, or was given operands that it does not take."""


class CompileError(WpkError):
    """The compiler cannot turn this graph into a profile for this target and capacity."""


class ProgramError(WpkError):
    """The bytes of a program are malformed or fail the static checks."""


class SpecError(WpkError):
    """A model spec is malformed, names an unknown component or contradicts itself."""


class UnknownModelError(WpkError):
    """No model of this name is known."""


class UntrustedSourceError(WpkError):
    """A spec brings Python that may not run without the user's word."""


class WeightsError(WpkError):
    """Weights are absent, or their tensors are missing, extra or misshapen."""


class DownloadError(WpkError):
    """A file could not be fetched, or what came is not what was pinned."""


class OfflineError(DownloadError):
    """A fetch is needed but fetching is switched off."""


class StoreError(WpkError):
    """A folder of the store cannot be read or written."""


class ProfileError(WpkError):
    """A profile is absent, corrupt or not compatible with this installation."""


class CapacityError(WpkError):
    """No free slot, or a capacity that cannot be had."""

    def __init__(self, message: str, *, capacity: int, **parts: Any) -> None:
        super().__init__(message, **parts)
        self.capacity = capacity


class SessionError(WpkError):
    """A session that is not in this cohort, or input that its ports do not take."""


class KernelError(WpkError):
    """The kernel stalled, was poisoned or cannot be started."""


class TargetError(WpkError):
    """An unknown target, or one that this machine cannot run."""


class AudioError(WpkError):
    """An audio file that cannot be read or converted."""


class UsageError(WpkError):
    """The command line was used wrongly."""
