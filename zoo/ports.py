"""What a model takes and gives per step, how often a step is, and what goes back from one step to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from wpk.ir.types import i32
from wpk.zoo.component import Count, Name, Reference, Size
from wpk.zoo.part import Part, TypeField, require_values

SEED = i32(2)


class Clock(Part):
    """What drives the model: samples of the main input per step, at `sample_rate` hertz; steps served by one beat."""

    sample_rate: Size
    samples_per_step: Size
    steps_per_beat: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1

    @property
    def step_ms(self) -> float:
        return 1000.0 * self.samples_per_step / self.sample_rate


class InputPort(Part):
    """What a session is given every step. sample_rate in hertz, for audio.

    A seed, i32[2], is not given with a step: it is the session's own, said when it joins, and keys its random numbers.
    """

    type: TypeField
    kind: Literal["audio", "features", "tokens", "seed"]
    sample_rate: Size | None = None


class Vocabulary(Part):
    """What tokens spell. pieces: of the tokens 0, 1, ...; in them "\u2581" is a space (SentencePiece).

    silent: tokens that spell nothing, such as padding or a blank; so do those without a piece.
    """

    pieces: Annotated[tuple[Annotated[str, StringConstraints(max_length=200)], ...], Field(min_length=1)]
    silent: tuple[Count, ...] = ()

    def spell(self, tokens: Iterable[int]) -> str:
        """The tokens' pieces one after the other."""
        return "".join(self.pieces[t] for t in tokens if 0 <= t < len(self.pieces) and t not in self.silent)

    def text(self, spelled: str) -> str:
        """What pieces say, without spaces at the ends."""
        return spelled.replace("\u2581", " ").strip()


class OutputPort(Part):
    """What a session gives every step.

    from: COMPONENT or COMPONENT.OUTPUT. labels: names of a vector's entries. sample_rate in hertz, for audio.
    latency_samples: how far, in samples of the clock, it lies behind the input of its step. vocabulary: what its
    tokens spell.
    """

    type: TypeField
    kind: Literal["probability", "logit", "audio", "features", "tokens"]
    source: Reference = Field(alias="from")
    labels: tuple[Name, ...] = ()
    sample_rate: Size | None = None
    latency_samples: Count = 0
    vocabulary: Vocabulary | None = None


class Ports(Part):
    inputs: Annotated[dict[Name, InputPort], Field(min_length=1)]
    outputs: Annotated[dict[Name, OutputPort], Field(min_length=1)]


class Feedback(Part):
    """What a component gave one step before, under a name that components may read like an input port.

    from: COMPONENT or COMPONENT.OUTPUT. initial: every value in a session's first step.
    """

    type: TypeField
    source: Reference = Field(alias="from")
    initial: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0

    @model_validator(mode="after")
    def _fits_its_type(self) -> Feedback:
        require_values(self.type, (self.initial,))
        return self
