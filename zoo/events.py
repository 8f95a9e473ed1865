"""What is read out of a whole recording's outputs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from wpk.zoo.component import Count, Name
from wpk.zoo.part import Part, Seconds

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class SegmentEvents(Part):
    """Stretches where a probability is high (voice activity).

    port: of the probability, one value a step. A segment opens at the first of `onset_steps` consecutive steps with
    probability >= onset and closes at the first of `offset_steps` with probability < offset. Then, in seconds:
    silences shorter than min_silence_s are closed, segments shorter than min_speech_s dropped, both ends moved out by
    pad_s.
    """

    kind: Literal["segments"] = "segments"
    port: Name
    onset: Probability = 0.5
    offset: Probability = 0.35
    onset_steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    offset_steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    min_speech_s: Seconds = 0.0
    min_silence_s: Seconds = 0.0
    pad_s: Seconds = 0.0


class PeakEvents(Part):
    """Moments where a probability peaks (beats, onsets).

    port: of the probabilities. labels: those of its entries whose sum is the activation, and which name the peak: the
    largest one. A peak is a local maximum >= threshold; of two closer than min_distance_s the higher stays. Step n
    stands for the moment n * step + offset_s. Steps before start_step mean nothing yet.
    """

    kind: Literal["peaks"] = "peaks"
    port: Name
    labels: Annotated[tuple[Name, ...], Field(min_length=1)]
    threshold: Probability = 0.5
    min_distance_s: Seconds = 0.0
    offset_s: Annotated[float, Field(ge=-3600.0, le=3600.0)] = 0.0
    start_step: Count = 0


Events = Annotated[SegmentEvents | PeakEvents, Field(discriminator="kind")]
