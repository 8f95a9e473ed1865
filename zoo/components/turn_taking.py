"""Who speaks next in a full-duplex conversation, decided from speech recognition and the agent's own text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from wpk.ir.errors import GraphError
from wpk.ir.graph import GraphBuilder, Value
from wpk.ir.types import i32
from wpk.ops.rules import Integer, Program, logical_not, minimum, record, where
from wpk.zoo.component import Built, Component, Count, Size, component
from wpk.zoo.tensors import Tensors

_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Seconds = Annotated[float, Field(ge=0.0, le=3600.0)]

ONE = 1 << 30  # a density of 1 in fixed point: an i32 holds it, and steps are 1e-9
FALLBACK, END_OF_UTTERANCE, BARGE_IN = 1, 2, 3  # which rule has put a token
_NOT_BUILT = (
    "force_eos_after_frames",
    "post_eos_fallback_frames",
    "max_agent_response_sec",
    "rnnt_self_play_suppression",
)
STATE = (
    "agent_speaking", "speech_confirmed",
    "first_turn",  # until the agent's first BOS
    "user_first_turn",  # until the first end of an utterance
    "blank_count", "nonblank_consec",  # frames in a row
    "nonblank_total",  # since it was cleared
    "density",  # of speech, a moving average; in units of 1 / ONE
    "since_bos", "since_eos",  # steps since that token was in the text; no more than the window + 1
    "frames",  # of the session, no more than first_turn_fallback_frames
)  # fmt: skip


@component("turn_taking")
class TurnTaking(Component):
    """The agent's text token of a frame, or BOS or EOS in its place: (text i32[], is_blank i32[]) -> text i32[].

    is_blank is the recogniser's first decision for the frame. The user's speech is *confirmed* after enough frames
    that were not blank: asr_min_speech_frames_first_turn until the first utterance has ended, asr_min_speech_frames
    later, but density_low_min_speech where the agent has spoken already and the density of speech is above 0 and below
    density_speech_threshold. The window is the last force_turn_taking_threshold tokens that were given out.

    - The agent speaks from a BOS and is silent from an EOS, in the window or now; an EOS wins. A BOS now, and every
      frame with an EOS in the window, clear what was heard of the user.
    - nonblank_reset_after_silence blanks without confirmed speech clear the count of frames, too.
    - First turn: from frame first_turn_fallback_frames on (counted from 0), confirmed speech makes a BOS.
    - End of utterance: rnnt_eou_frames blanks in a row (asr_eou_first_turn in the user's first turn) after confirmed
      speech make a BOS, if the agent is silent and no BOS is in the window.
    - Barge-in: rnnt_bou_frames frames of speech in a row while the agent speaks make an EOS, if none is in the window.

    The first of the last three that applies is the last that is looked at. With force_turn_taking false, none is.
    Density: a tenth of the way to 1 (speech) or 0 (blank) a frame, unless the agent was speaking; in fixed point, 30
    bits, off by less than 1e-8, and like a float never back at 0 once there was speech.

    Other outputs, i32[]: agent_speaking, speech_confirmed (after this frame), forced (0, or which rule put the token:
    1 first turn, 2 end of utterance, 3 barge-in). State a session: i32[11].

    Not part of this, and refused where a field would turn it on: force_eos_after_frames, post_eos_fallback_frames,
    max_agent_response_sec, rnnt_self_play_suppression. The cap of text tokens (tts_text_token_ratio_cap,
    tts_text_token_min) counts frames that only max_agent_response_sec counts: it does nothing; nor does pad_id then.
    """

    ARITY: ClassVar[tuple[int, int]] = (2, 2)

    bos_id: Count = 1
    eos_id: Count = 2
    pad_id: Count = 12
    force_turn_taking: bool = True
    force_turn_taking_threshold: Size = 40
    rnnt_eou_frames: Size = 40
    asr_eou_first_turn: Size = 40
    rnnt_bou_frames: Size = 40
    asr_min_speech_frames: Size = 3
    asr_min_speech_frames_first_turn: Size = 2
    density_speech_threshold: _Share = 0.15
    density_low_min_speech: Size = 6
    nonblank_reset_after_silence: Size = 10
    first_turn_fallback_frames: Count = 50
    force_eos_after_frames: Count = 0
    post_eos_fallback_frames: Count = 0
    max_agent_response_sec: _Seconds = 0.0
    tts_text_token_ratio_cap: Count = 16
    tts_text_token_min: Count = 5
    rnnt_self_play_suppression: bool = False

    @model_validator(mode="after")
    def _is_built(self) -> TurnTaking:
        for field in _NOT_BUILT:
            if getattr(self, field):
                raise ValueError(f"wanted {field} off, as there is no such rule here, found {getattr(self, field)}")
        if len({self.bos_id, self.eos_id, self.pad_id}) < 3:
            raise ValueError(f"wanted three tokens, found {self.bos_id}, {self.eos_id}, {self.pad_id}")
        return self

    def outputs(self) -> tuple[str, ...]:
        return ("text", "agent_speaking", "speech_confirmed", "forced")

    def build(self, g: GraphBuilder, inputs: tuple[Value, ...], tensors: Tensors) -> Built:
        for name, value in zip(("text", "is_blank"), inputs, strict=True):
            if value.type != i32():
                raise GraphError(f"turn_taking: {name}", wanted=i32(), found=value.type)
        program, name = self.program(), self.state("counters")
        state = g.register(name, program.type, program.initial(g, **self.initial()))
        outputs, following = program.apply(g, state, *inputs)
        assert following is not None
        g.update(name, following)
        return dict(outputs)

    def program(self) -> Program:
        """The rule as a program."""
        return record(self.rule, STATE, ("text", "is_blank"))

    def initial(self) -> dict[str, int]:
        """What of the state is not 0 when a session begins."""
        never = self.force_turn_taking_threshold + 1
        return {"first_turn": 1, "user_first_turn": 1, "since_bos": never, "since_eos": never}

    def rule(self, s: SimpleNamespace, text: Integer, is_blank: Integer) -> dict[str, Integer]:
        """One frame, on integers or on symbols of a program; `s` holds STATE and is changed."""
        self._count(s, is_blank)
        least, enough = self._thresholds(s)
        bos_before = s.since_bos <= self.force_turn_taking_threshold
        eos_before = s.since_eos <= self.force_turn_taking_threshold
        bos, eos = bos_before | (text == self.bos_id), eos_before | (text == self.eos_id)
        self._follow(s, text == self.bos_id, bos, eos)
        self._confirm(s, least)
        forced: Integer = 0
        if self.force_turn_taking:
            fallback = s.first_turn & (s.frames >= self.first_turn_fallback_frames) & s.speech_confirmed
            fallback = fallback & logical_not(bos_before)
            utterance = (s.blank_count >= enough) & s.speech_confirmed & logical_not(s.agent_speaking | fallback)
            answer = utterance & logical_not(bos)
            barge_in = (s.nonblank_consec >= self.rnnt_bou_frames) & s.agent_speaking & logical_not(eos)
            barge_in = barge_in & logical_not(fallback | utterance)
            self._act(s, answer, barge_in)
            text = where(fallback | answer, self.bos_id, where(barge_in, self.eos_id, text))
            forced = fallback * FALLBACK + answer * END_OF_UTTERANCE + barge_in * BARGE_IN
        self._remember(s, text)
        return {
            "text": text, "agent_speaking": s.agent_speaking, "speech_confirmed": s.speech_confirmed, "forced": forced,
        }  # fmt: skip

    # --- its parts ------------------------------------------------------------------------------------------------
    def _count(self, s: SimpleNamespace, is_blank: Integer) -> None:
        speech = is_blank == 0
        s.blank_count = where(speech, 0, s.blank_count + 1)
        s.nonblank_consec = where(speech, s.nonblank_consec + 1, 0)
        s.nonblank_total = s.nonblank_total + where(speech, 1, 0)
        moved = where(speech, s.density + (ONE - s.density) // 10, s.density - s.density // 10)
        s.density = where(s.agent_speaking, s.density, moved)

    def _thresholds(self, s: SimpleNamespace) -> tuple[Integer, Integer]:
        """Frames that confirm speech, and blanks that end an utterance."""
        sparse = (s.density > 0) & (s.density < round(self.density_speech_threshold * ONE)) & logical_not(s.first_turn)
        least = where(s.user_first_turn, self.asr_min_speech_frames_first_turn, self.asr_min_speech_frames)
        enough = where(s.user_first_turn, self.asr_eou_first_turn, self.rnnt_eou_frames)
        return where(sparse, self.density_low_min_speech, least), enough

    def _follow(self, s: SimpleNamespace, bos_now: Integer, bos: Integer, eos: Integer) -> None:
        """What the agent's own tokens say."""
        s.agent_speaking = where(eos, 0, where(bos, 1, s.agent_speaking))
        s.first_turn = where(bos, 0, s.first_turn)
        s.speech_confirmed = where(bos_now | eos, 0, s.speech_confirmed)
        s.nonblank_total = where(bos_now | eos, 0, s.nonblank_total)

    def _confirm(self, s: SimpleNamespace, least: Integer) -> None:
        silent = logical_not(s.agent_speaking)
        idle = (s.blank_count >= self.nonblank_reset_after_silence) & silent & logical_not(s.speech_confirmed)
        s.nonblank_total = where(idle, 0, s.nonblank_total)
        heard = silent & ((s.nonblank_consec >= least) | (s.nonblank_total >= least))
        s.speech_confirmed = where(heard, 1, s.speech_confirmed)

    def _act(self, s: SimpleNamespace, answer: Integer, barge_in: Integer) -> None:
        """What follows from the end of an utterance, and from a barge-in."""
        s.agent_speaking = where(answer, 1, where(barge_in, 0, s.agent_speaking))
        s.speech_confirmed = where(answer, 0, s.speech_confirmed)
        s.first_turn, s.user_first_turn = where(answer, 0, s.first_turn), where(answer, 0, s.user_first_turn)
        s.nonblank_total = where(answer | barge_in, 0, s.nonblank_total)
        s.nonblank_consec = where(barge_in, 0, s.nonblank_consec)

    def _remember(self, s: SimpleNamespace, made: Integer) -> None:
        beyond = self.force_turn_taking_threshold + 1
        s.since_bos = where(made == self.bos_id, 1, minimum(s.since_bos + 1, beyond))
        s.since_eos = where(made == self.eos_id, 1, minimum(s.since_eos + 1, beyond))
        s.frames = minimum(s.frames + 1, self.first_turn_fallback_frames)
