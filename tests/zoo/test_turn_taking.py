"""Turn taking: hand-worked conversations, and random ones against the rules written out again, on the CPU kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wpk import registry
from wpk.ir.errors import SpecError
from wpk.registry.settings import Settings
from wpk.zoo.build import build_graph, state_bytes
from wpk.zoo.components.turn_taking import STATE, TurnTaking
from wpk.zoo.spec import ModelSpec

PAD, BOS, EOS, WORD = 12, 1, 2, 4000
LETTERS = {"-": PAD, "B": BOS, "E": EOS, "w": WORD}
OUTPUTS = ("text", "agent_speaking", "speech_confirmed", "forced")
# Small enough to be read; every number another one where a rule could take the wrong one.
SMALL = {
    "force_turn_taking_threshold": 4, "rnnt_eou_frames": 3, "asr_eou_first_turn": 4, "rnnt_bou_frames": 3,
    "asr_min_speech_frames": 3, "asr_min_speech_frames_first_turn": 2, "density_speech_threshold": 0.2,
    "density_low_min_speech": 5, "nonblank_reset_after_silence": 6, "first_turn_fallback_frames": 12,
}  # fmt: skip


def spec(**fields: Any) -> ModelSpec:
    outputs = {n: {"type": "i32[]", "kind": "tokens", "from": f"turn_taking.{n}"} for n in OUTPUTS}
    inputs = {name: {"type": "i32[]", "kind": "tokens"} for name in ("text", "is_blank")}
    data: dict[str, Any] = {
        "name": "turns", "version": 1, "task": "voice", "description": "turn taking alone",
        "licence": {"code": "MIT", "weights": "MIT"}, "weights": {"synthetic": 1},
        "clock": {"sample_rate": 25, "samples_per_step": 2}, "ports": {"inputs": inputs, "outputs": outputs},
        "components": [{"kind": "turn_taking", "input": ["text", "is_blank"], **fields}],
    }  # fmt: skip
    return ModelSpec.from_data(data)


def played(model: ModelSpec, users: list[Any], texts: list[Any], where: Settings, **options: Any) -> list[list[Any]]:
    """Conversations of one length side by side: for each, the outputs of every frame."""
    with registry.load(model, capacity=len(users), target="cpu", where=where, **{"threads": 1, **options}) as cohort:
        sessions = [cohort.join() for _ in users]
        found: list[list[Any]] = [[] for _ in users]
        for speech, tokens in zip(zip(*users, strict=True), zip(*texts, strict=True), strict=True):
            inputs = {
                session: {"text": np.array(token, np.int32), "is_blank": np.array(not spoken, np.int32)}
                for session, spoken, token in zip(sessions, speech, tokens, strict=True)
            }
            made = cohort.beat(inputs)
            for session, row in zip(sessions, found, strict=True):
                row.append(tuple(int(made[session][name].item()) for name in OUTPUTS))
    return found


# --- by hand ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """A conversation, a letter a frame.

    user: s speech, . blank. text: what the backbone says: - pad, w word, B BOS, E EOS. out: what is given out. agent:
    1 where it counts as speaking. why: the rules that put a token, in order (1 first turn, 2 end of utterance, 3
    barge-in).
    """

    what: str
    user: str
    text: str
    out: str
    agent: str
    why: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


ROWS = [
    # End of an utterance. In the user's first turn two frames are speech, and four blanks end it.
    Row("an utterance ends after four blanks", "ss......", "--------", "-----B--", "00000111", (2,)),
    Row("three blanks do not end the first", "ss...s..", "--------", "--------", "00000000"),
    Row("one frame is no speech", "s.......", "--------", "--------", "00000000"),
    Row("frames of speech need not be in a row", "s.s.....", "--------", "------B-", "00000011", (2,)),
    Row("words are passed on", "ss......", "w-w-wwww", "w-w-wBww", "00000111", (2,)),
    # Later three frames are speech, and three blanks end it. The agent's EOS is in the window until frame 11.
    Row("a second utterance ends after three blanks",
        "ss..........sss....", "-------E-----------", "-----B-E---------B-", "0000011000000000011", (2, 2)),
    Row("two frames are no speech any more",
        "ss..........ss.....", "-------E-----------", "-----B-E-----------", "0000011000000000000", (2,)),
    Row("the agent answers by itself, and what was heard is forgotten",
        "ss........", "--B-E-----", "--B-E-----", "0011000000"),
    Row("a BOS of its own where the utterance ends", "ss......", "-----B--", "-----B--", "00000111"),
    # Side effect (a): while an EOS is in the window, what was heard is forgotten every frame.
    Row("a short utterance right after the agent's EOS is lost",
        "ss......sss........", "-------E-----------", "-----B-E-----------", "0000011000000000000", (2,)),
    Row("one that goes on beyond the window is not",
        "ss......sssss....", "-------E---------", "-----B-E-------B-", "00000110000000011", (2, 2)),
    Row("a BOS counts only when the EOS before it has left the window",
        ".........", "B-E-B----", "B-E-B----", "110000011"),
    Row("four tokens are the window, of either", "..........", "----EB----", "----EB----", "0000000001"),
    # The agent's own tokens.
    Row("the agent speaks from BOS to EOS", "............", "--B-ww----E-", "--B-ww----E-", "001111111100"),
    Row("an EOS alone is nothing", "......", "-E----", "-E----", "000000"),
    Row("a BOS starts the turn again", "ss........", "-----BwwE-", "-----BwwE-", "0000011100"),
    # Barge-in.
    Row("three frames stop the agent", "...sss..", "B-------", "B----E--", "11111000", (3,)),
    Row("two do not", "...ss.ss", "B-------", "B-------", "11111111"),
    Row("three in a row, words or not", ".ss.sss.", "Bwwwwwww", "BwwwwwEw", "11111100", (3,)),
    Row("the agent that was made to answer is stopped, too",
        "ss....sss.", "----------", "-----B--E-", "0000011100", (2, 3)),
    Row("the agent stops by itself in that frame", "...sss..", "B----E--", "B----E--", "11111000"),
    Row("an agent that starts while the user speaks is stopped at once",
        "...sssssssss", "B---------B-", "B----E----E-", "111110000000", (3, 3)),
    Row("a barge-in starts to count anew", "...sssssss", "B------B--", "B----E-BE-", "1111100100", (3, 3),
        {"force_turn_taking_threshold": 1}),
    # First turn: an agent that has not spoken by frame 12 is made to, also into speech.
    Row("the agent speaks first, late",
        "..........ss...", "---------------", "------------B--", "000000000000011", (1,)),
    Row("even while the user speaks, who then stops it",
        "..........sssss", "---------------", "------------BE-", "000000000000000", (1, 3)),
    Row("nobody has said anything", "................", "----------------", "----------------", "0000000000000000"),
    Row("not before that frame", "....ssssssss.", "-------------", "------------B", "0000000000000", (1,)),
    Row("not after the agent's own BOS: the utterance ends as any",
        "..........sss.....", "B-E---------------", "B-E-------------B-", "110000000000000011", (2,)),
    # Silence of six blanks forgets what was no utterance.
    Row("two frames around six blanks are nothing", "s......s....", "------------", "------------", "000000000000"),
    Row("around five they are speech", "s.....s....", "-----------", "----------B", "00000000001", (2,)),
    # Rare speech (a density above 0 and below 0.2) wants five frames once the agent has spoken.
    Row("rare speech is not enough",
        "......s...s......", "BE---------------", "BE---------------", "10000000000000000"),
    Row("what the user says while the agent speaks does not make it less rare",
        ".ss.ss.ss.....s...s.....", "B--------E--------------", "B--------E--------------", "111111111000000000000000"),
    Row("in the first turn it is", "..s...s.....", "------------", "----------B-", "000000000011", (2,)),
    Row("at a lower threshold it is", "......s...s......", "BE---------------", "BE------------B--",
        "10000000000000111", (2,), {"density_speech_threshold": 0.1}),
    # Switched off.
    Row("a token is passed on, whatever was heard", "ss....sss...", "------------", "------------", "000000000000", (),
        {"force_turn_taking": False}),
    Row("and the agent's own are followed",
        ".....sss", "-B-w----", "-B-w----", "01111111", (), {"force_turn_taking": False}),
]  # fmt: skip


@pytest.fixture(scope="module")
def by_hand(shared: Settings) -> dict[str, list[Any]]:
    """The outputs of every row; rows of one model run side by side, the shorter ones longer than they are."""
    found = {}
    for fields in {repr(row.fields): row.fields for row in ROWS}.values():
        rows = [row for row in ROWS if row.fields == fields]
        size = max(len(row.user) for row in rows)
        users = [[letter == "s" for letter in row.user.ljust(size, ".")] for row in rows]
        texts = [[LETTERS[letter] for letter in row.text.ljust(size, "-")] for row in rows]
        made = played(spec(**SMALL | fields), users, texts, shared)
        found |= {row.what: frames[: len(row.user)] for row, frames in zip(rows, made, strict=True)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_by_hand(row: Row, by_hand: dict[str, list[Any]]) -> None:
    assert len(row.user) == len(row.text) == len(row.out) == len(row.agent)
    letters = {token: letter for letter, token in LETTERS.items()}
    frames = by_hand[row.what]
    assert "".join(letters[text] for text, *_ in frames) == row.out
    assert "".join(str(agent) for _, agent, *_ in frames) == row.agent
    assert tuple(forced for *_, forced in frames if forced) == row.why


def test_the_rows_are_all_different() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS)


# --- random conversations -----------------------------------------------------------------------------------------
class Written:
    """The rules as they are described, on floats and lists."""

    def __init__(self, c: TurnTaking) -> None:
        self.c, self.given_out = c, []  # type: ignore[var-annotated]
        self.agent_speaking = self.speech_confirmed = False
        self.first_turn = self.user_first_turn = True
        self.blanks = self.in_a_row = self.total = 0
        self.density = 0.0

    def frame(self, text: int, is_blank: bool) -> tuple[int, int, int]:
        if is_blank:
            self.blanks, self.in_a_row = self.blanks + 1, 0
        else:
            self.blanks, self.in_a_row, self.total = 0, self.in_a_row + 1, self.total + 1
        if not self.agent_speaking:
            self.density = 0.1 * (not is_blank) + 0.9 * self.density
        text = self._decide(text)
        self.given_out.append(text)
        return text, int(self.agent_speaking), int(self.speech_confirmed)

    def _decide(self, text: int) -> int:
        c, t = self.c, len(self.given_out)
        window = self.given_out[-c.force_turn_taking_threshold :]
        least, enough = c.asr_min_speech_frames, c.rnnt_eou_frames
        if self.user_first_turn:
            least, enough = c.asr_min_speech_frames_first_turn, c.asr_eou_first_turn
        if 0 < self.density < c.density_speech_threshold and not self.first_turn:
            least = c.density_low_min_speech
        if BOS in window or text == BOS:
            self.agent_speaking, self.first_turn = True, False
            if text == BOS:
                self.speech_confirmed, self.total = False, 0
        if EOS in window or text == EOS:
            self.agent_speaking, self.speech_confirmed, self.total = False, False, 0
        if self.blanks >= c.nonblank_reset_after_silence and not self.speech_confirmed and not self.agent_speaking:
            self.total = 0
        if not self.agent_speaking and (self.in_a_row >= least or self.total >= least):
            self.speech_confirmed = True
        if self.first_turn and t >= c.first_turn_fallback_frames and self.speech_confirmed and BOS not in window:
            return BOS
        if self.blanks >= enough and self.speech_confirmed and not self.agent_speaking:
            if BOS not in window and text != BOS:
                text, self.agent_speaking, self.speech_confirmed, self.total = BOS, True, False, 0
                self.first_turn = self.user_first_turn = False
            return text
        if self.in_a_row >= c.rnnt_bou_frames and self.agent_speaking and EOS not in window and text != EOS:
            text, self.agent_speaking, self.in_a_row, self.total = EOS, False, 0, 0
        return text


def conversation(seed: int, frames: int) -> tuple[list[bool], list[int]]:
    """Speech in runs of every length, from lively to sparse, and tokens of the agent's own from none to many."""
    rng = np.random.default_rng(seed)
    longest, pause, own = rng.choice([3, 12, 90]), rng.choice([4, 30, 120]), rng.choice([0.0, 0.01, 0.05])
    speech: list[bool] = []
    while len(speech) < frames:
        speech += [True] * int(rng.integers(1, longest + 1)) + [False] * int(rng.integers(1, pause + 1))
    tokens = rng.choice([PAD, WORD, BOS, EOS], frames, p=[0.6 - own, 0.4 - own, own, own])
    return speech[:frames], tokens.tolist()


@pytest.mark.parametrize("fields", [{}, SMALL], ids=["as served", "small"])
def test_random_conversations_are_those_of_the_rules_as_written(fields: dict[str, Any], shared: Settings) -> None:
    component, frames, count = TurnTaking(**fields), 600, 12
    given = [conversation(seed, frames) for seed in range(count)]
    found = played(spec(**fields), [speech for speech, _ in given], [tokens for _, tokens in given], shared)
    happened: dict[int, int] = {1: 0, 2: 0, 3: 0}
    for (speech, tokens), made in zip(given, found, strict=True):
        written, plain = Written(component), SimpleNamespace(**{name: 0 for name in STATE} | component.initial())
        for t, (spoken, token) in enumerate(zip(speech, tokens, strict=True)):
            assert made[t][:3] == written.frame(token, not spoken), t
            assert made[t] == tuple(int(v) for v in component.rule(plain, token, int(not spoken)).values()), t
            if made[t][3]:
                happened[made[t][3]] += 1
    assert min(happened.values()) >= 3, happened


def test_a_session_gets_the_same_in_any_slot_and_company(shared: Settings) -> None:
    speech, tokens = conversation(1, 80)
    (alone,) = played(spec(**SMALL), [speech], [tokens], shared)
    others = [conversation(seed, 80) for seed in range(20, 27)]
    wild = [int(v) for v in np.random.default_rng(0).choice([-1, BOS, EOS, 2**31 - 1, -(2**31)], 80)]
    users, texts = [s for s, _ in others], [wild, *(t for _, t in others[1:])]
    found = played(spec(**SMALL), [*users[:5], speech, *users[5:]], [*texts[:5], tokens, *texts[5:]], shared, threads=2)
    assert found[5] == alone and len(set(alone)) > 4


# --- as data ------------------------------------------------------------------------------------------------------
def test_defaults_are_those_of_the_published_server() -> None:
    c = TurnTaking()
    assert (c.bos_id, c.eos_id, c.pad_id, c.force_turn_taking_threshold) == (1, 2, 12, 40)
    assert (c.rnnt_eou_frames, c.asr_eou_first_turn, c.rnnt_bou_frames, c.first_turn_fallback_frames) == (
        40,
        40,
        40,
        50,
    )
    assert (c.asr_min_speech_frames, c.asr_min_speech_frames_first_turn, c.nonblank_reset_after_silence) == (3, 2, 10)
    assert state_bytes(build_graph(spec())) == {"fixed": 4 * len(STATE), "per_step": 0}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"force_eos_after_frames": 3}, "wanted force_eos_after_frames off, as there is no such rule here, found 3"),
        ({"post_eos_fallback_frames": 1}, "wanted post_eos_fallback_frames off"),
        ({"max_agent_response_sec": 15}, "wanted max_agent_response_sec off"),
        ({"rnnt_self_play_suppression": True}, "wanted rnnt_self_play_suppression off"),
        ({"eos_id": 1}, "wanted three tokens, found 1, 1, 12"),
        ({"rnnt_eou_frames": 0}, "rnnt_eou_frames"),
    ],
)
def test_what_is_not_built_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(**fields)
    assert said in str(refused.value)


def test_inputs_of_another_type_are_refused() -> None:
    data = spec().to_data()
    data["ports"]["inputs"]["is_blank"]["type"] = "f32[]"
    with pytest.raises(SpecError, match=r"turn_taking: is_blank; wanted i32\[\]; found f32\[\]"):
        build_graph(ModelSpec.from_data(data))
