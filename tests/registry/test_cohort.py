"""A cohort: sessions join, beat and leave, and no session can tell who else is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernel.machine import model, reference
from tests.zoo.specs import small
from wpk import registry
from wpk.ir.errors import CapacityError, KernelError, SessionError, UsageError
from wpk.kernel.cpu import CpuKernel
from wpk.ops.payload import Arena
from wpk.registry import Cohort, Session
from wpk.registry.settings import Settings
from wpk.scheduler.program import NONE, Role
from wpk.zoo.spec import ModelSpec

Array = npt.NDArray[np.float32]
SPEC = model()
TWO_STEPS = model(clock={"sample_rate": 8000, "samples_per_step": 80, "steps_per_beat": 2})
Load = Callable[..., Cohort]


@pytest.fixture
def load(shared: Settings) -> Iterator[Load]:
    made: list[Cohort] = []

    def one(spec: ModelSpec = SPEC, capacity: int = 4, **options: Any) -> Cohort:
        made.append(registry.load(spec, capacity=capacity, target="cpu", where=shared, **options))
        return made[-1]

    yield one
    for cohort in made:
        cohort.close()


def frames(beats: int, seed: int = 0, size: int = 80) -> Array:
    return np.random.default_rng(seed).standard_normal((beats, size)).astype(np.float32)


def alone(load: Load, audio: Array) -> list[bytes]:
    """What a session that is alone in slot 0 of a cohort of one gets."""
    cohort = load(capacity=1)
    session = cohort.join()
    return [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio]


def bits(outputs: dict[str, Array]) -> bytes:
    return b"".join(outputs[port].tobytes() for port in sorted(outputs))


def memory(cohort: Cohort) -> list[bytes]:
    """All that a beat could move."""
    kernel = cohort._kernel
    return [kernel.arenas[arena].tobytes() for arena in Arena] + [kernel.control.record.tobytes()]


# --- sessions -----------------------------------------------------------------------------------------------------
def test_sessions_take_the_lowest_free_slot(load: Load) -> None:
    cohort = load(capacity=3)
    assert (cohort.capacity, cohort.free, cohort.sessions) == (3, 3, ())
    a, b, c = (cohort.join() for _ in range(3))
    assert [s.slot for s in (a, b, c)] == [0, 1, 2] and cohort.free == 0
    cohort.leave(b)
    assert cohort.free == 1 and cohort.sessions == (a, c)
    d = cohort.join()
    assert d.slot == 1 and d is not b and d != b and cohort.sessions == (a, c, d)


def test_a_full_cohort_says_its_capacity(load: Load) -> None:
    cohort = load(capacity=2)
    sessions = [cohort.join() for _ in range(2)]
    for _ in range(2):
        with pytest.raises(CapacityError, match="all 2 slots are taken") as caught:
            cohort.join()
        assert caught.value.capacity == 2 and caught.value.hint
    assert cohort.sessions == tuple(sessions)
    cohort.leave(sessions[0])
    assert cohort.join().slot == 0


@pytest.mark.parametrize("who", ["one that left", "one that left, its slot taken", "another cohort's", "nobody"])
def test_only_sessions_of_this_cohort_are_served(who: str, load: Load) -> None:
    cohort, other = load(capacity=2), load(capacity=2)
    stranger: Any = other.join()
    if who.startswith("one that left"):
        stranger = cohort.join()
        cohort.leave(stranger)
    present = cohort.join() if "taken" in who or "another" in who else None
    if who == "nobody":
        stranger = "session 0"
    before = memory(cohort)
    with pytest.raises(SessionError, match="is not in this cohort"):
        cohort.beat({stranger: {"audio": frames(1)[0]}})
    with pytest.raises(SessionError, match="is not in this cohort"):
        cohort.leave(stranger)
    assert memory(cohort) == before and cohort.stats.beats == 0
    assert cohort.sessions == ((present,) if present else ())


# --- outputs ------------------------------------------------------------------------------------------------------
def test_outputs_are_the_meaning_of_the_model_by_port(load: Load) -> None:
    cohort = load()
    session, meaning = cohort.join(), reference(SPEC)
    for frame in frames(6):
        outputs = cohort.beat({session: {"audio": frame}})
        assert list(outputs) == [session] and set(outputs[session]) == {"speech", "hidden"}
        for port, wanted in meaning.step({"audio": frame}).items():
            assert outputs[session][port].dtype == np.float32 and outputs[session][port].shape == wanted.shape
            np.testing.assert_allclose(outputs[session][port], wanted, rtol=0, atol=2e-5)


def test_outputs_belong_to_the_caller(load: Load) -> None:
    cohort = load()
    session = cohort.join()
    audio = frames(2)
    first = cohort.beat({session: {"audio": audio[0]}})[session]
    kept = bits(first)
    second = cohort.beat({session: {"audio": audio[1]}})[session]
    assert bits(first) == kept != bits(second)
    first["speech"][:] = 7.0
    assert bits(second) == bits(second)


def test_a_session_without_input_gets_silence(load: Load) -> None:
    audio = frames(6)
    audio[[1, 2, 4]] = 0.0
    wanted = alone(load, audio)
    cohort = load()
    session, other = cohort.join(), cohort.join()
    for beat, frame in enumerate(audio):
        named = {} if beat in (1, 2, 4) else {session: {"audio": frame}}
        noise = {other: {"audio": frames(1, 99)[0]}} if beat != 2 else {}
        outputs = cohort.beat(named | noise)
        assert set(outputs) == {session, other} and bits(outputs[session]) == wanted[beat]


@pytest.mark.parametrize("inputs", [None, {}])
def test_a_beat_may_have_no_input_and_no_session(inputs: Any, load: Load) -> None:
    cohort = load()
    assert cohort.beat(inputs) == {}
    session = cohort.join()
    assert list(cohort.beat(inputs)) == [session]
    assert cohort.stats.beats == 2


@pytest.mark.parametrize(
    "given",
    [
        lambda x: x.astype(np.float64),
        lambda x: x.tolist(),
        lambda x: x.reshape(2, 40),
        lambda x: np.repeat(x, 2)[::2],
        lambda x: np.asfortranarray(x),
        lambda x: np.lib.stride_tricks.as_strided(x, writeable=False),
    ],
)
def test_input_may_be_anything_that_holds_these_numbers(given: Callable[[Array], Any], load: Load) -> None:
    audio = frames(1)
    cohort = load()
    session = cohort.join()
    assert bits(cohort.beat({session: {"audio": given(audio[0])}})[session]) == alone(load, audio)[0]


def test_each_session_may_give_its_own_kind_of_array(load: Load) -> None:
    cohort = load()
    sessions = [cohort.join() for _ in range(3)]
    frame = np.arange(80, dtype=np.float32)
    given = [frame, frame.reshape(4, 20), frame.astype(np.float64).tolist()]
    outputs = cohort.beat({s: {"audio": g} for s, g in zip(sessions, given, strict=True)})
    assert len({bits(o) for o in outputs.values()}) == 1


def test_pcm_is_not_taken_for_audio_in_minus_one_to_one(load: Load) -> None:
    cohort = load()
    with pytest.raises(SessionError, match="int16"):
        cohort.beat({cohort.join(): {"audio": np.arange(80, dtype=np.int16)}})


def test_a_beat_takes_a_mapping_and_none_is_no_session(load: Load) -> None:
    cohort = load()
    cohort.join()
    for inputs in ([1], 3, "ab"):
        with pytest.raises(SessionError, match="a beat's inputs"):
            cohort.beat(inputs)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="not in this cohort"):
        cohort.leave(None)  # type: ignore[arg-type]


# --- bad input ----------------------------------------------------------------------------------------------------
FRAME = np.ones(80, np.float32)
BAD: dict[str, tuple[Any, str]] = {
    "no ports": ({}, "wanted audio; found none"),
    "another port": ({"sound": FRAME}, "wanted audio; found sound"),
    "one port too many": ({"audio": FRAME, "video": FRAME}, "found audio, video"),
    "an output port": ({"speech": FRAME}, "found speech"),
    "an array instead of ports": (FRAME, "wanted audio; found ndarray"),
    "nothing instead of ports": (None, "wanted audio; found NoneType"),
    "too short": ({"audio": FRAME[:79]}, "wanted 80 finite float32 values; found float32 of shape (79,)"),
    "too long": ({"audio": np.ones(81, np.float32)}, "of shape (81,)"),
    "two frames": ({"audio": np.ones((2, 80), np.float32)}, "of shape (2, 80)"),
    "empty": ({"audio": FRAME[:0]}, "of shape (0,)"),
    "a number": ({"audio": 1.0}, "found float64 of shape ()"),
    "a ragged list": ({"audio": [[1.0], [1.0, 2.0]]}, "found a ragged list"),
    "nothing": ({"audio": None}, "found object of shape ()"),
    "text": ({"audio": "a" * 80}, "found <U80 of shape ()"),
    "texts": ({"audio": ["a"] * 80}, "found <U1 of shape (80,)"),
    "bytes": ({"audio": b"\0" * 320}, "found |S"),
    "complex": ({"audio": FRAME * 1j}, "found complex64"),
    "flags": ({"audio": FRAME > 0}, "found bool"),
    "objects": ({"audio": FRAME.astype(object)}, "found object"),
    "NaN": ({"audio": np.where(np.arange(80) == 79, np.nan, FRAME)}, "found NaN, infinity or numbers beyond its range"),
    "infinite": ({"audio": FRAME * np.float32(-np.inf)}, "found NaN, infinity or numbers beyond its range"),
    "beyond float32": ({"audio": np.full(80, 1e300)}, "found NaN, infinity or numbers beyond its range"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_anything_moves(what: str, load: Load) -> None:
    given, says = BAD[what]
    audio = frames(3)
    wanted = alone(load, audio)
    cohort = load()
    good, bad = cohort.join(), cohort.join()
    cohort.beat({good: {"audio": audio[0]}, bad: {"audio": audio[0]}})
    before, stats = memory(cohort), cohort.stats
    for order in ((good, bad), (bad, good)):
        inputs = {good: {"audio": audio[1]}, bad: given}
        with pytest.raises(SessionError) as caught:
            cohort.beat({session: inputs[session] for session in order})
        assert says in str(caught.value) and "slot 1" in str(caught.value)
    assert memory(cohort) == before and cohort.stats == stats
    for beat in (1, 2):
        outputs = cohort.beat({s: {"audio": audio[beat]} for s in (good, bad)})
        assert bits(outputs[good]) == bits(outputs[bad]) == wanted[beat]


def test_a_port_of_whole_numbers_takes_no_others(load: Load) -> None:
    spec = ModelSpec.from_data(
        small(
            ports={
                "inputs": {"token": {"type": "i32[2]", "kind": "tokens"}},
                "outputs": {"y": {"type": "f32[2,4]", "kind": "features", "from": "embedding"}},
            },
            components=[{"kind": "embedding", "entries": 10, "units": 4}],
        )
    )
    cohort = load(spec, capacity=1)
    session = cohort.join()
    rows = cohort.beat({session: {"token": [3, 7]}})[session]["y"].reshape(2, 4)
    again = cohort.beat({session: {"token": np.array([7, 3], np.int64)}})[session]["y"].reshape(2, 4)
    assert (again == rows[::-1]).all() and (rows[0] != rows[1]).any()
    for bad, says in (([3.0, 7.0], "does not fit"), ([2**32 + 3, 7], "beyond"), ([np.nan, 1], "does not fit")):
        with pytest.raises(SessionError, match=says):
            cohort.beat({session: {"token": bad}})


# --- slot invariance ----------------------------------------------------------------------------------------------
def in_company(cohort: Cohort, slot: int, audio: Array) -> list[bytes]:
    """What a session in that slot gets while others join and leave around it, with garbage as their input."""
    others = [cohort.join() for _ in range(slot)]
    session = cohort.join()
    assert session.slot == slot
    rng, made = np.random.default_rng(5), []
    for frame in audio:
        for _ in range(int(rng.integers(0, 12))):
            if others and rng.random() < 0.5:
                cohort.leave(others.pop(int(rng.integers(len(others)))))
            elif cohort.free:
                others.append(cohort.join())
        garbage = (rng.standard_normal(80) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
        inputs = {other: {"audio": garbage} for other in others if rng.random() < 0.7}
        outputs = cohort.beat({session: {"audio": frame}} | inputs)
        assert set(outputs) == {session, *others}
        made.append(bits(outputs[session]))
    return made


@pytest.mark.parametrize(("slot", "capacity"), [(37, 64), (0, 64), (63, 64), (2, 7)])
def test_a_session_gets_the_same_bits_wherever_it_sits_and_whoever_comes_and_goes(
    slot: int, capacity: int, load: Load
) -> None:
    audio = frames(40)
    assert in_company(load(capacity=capacity), slot, audio) == alone(load, audio)


def test_a_state_shared_with_a_neighbour_would_be_noticed(load: Load) -> None:
    """Every operand whose slots are given one place: none of these programs keeps sessions apart."""
    audio = frames(10)
    wanted = alone(load, audio)
    program = load()._kernel.program
    uses, values = program.uses, program.values
    state = np.argwhere((uses["value"] != NONE) & (values["role"][uses["value"] % len(values)] == Role.STATE))
    assert len(state) > 5
    for payload, operand in state[:: len(state) // 4]:
        cohort = load()
        broken = cohort._kernel.program.payloads.copy()
        broken["stride"][payload, operand] = 0
        cohort._kernel._context[1] = broken.ctypes.data
        assert in_company(cohort, 2, audio) != wanted
        cohort.close()


def test_all_sessions_of_a_full_cohort_get_the_same_bits(load: Load) -> None:
    audio = frames(5)
    wanted = alone(load, audio)
    cohort = load(capacity=64)
    sessions = [cohort.join() for _ in range(64)]
    for beat, frame in enumerate(audio):
        assert {bits(o) for o in cohort.beat({s: {"audio": frame} for s in sessions}).values()} == {wanted[beat]}


def rejoined(cohort: Cohort, audio: Array, wanted: list[bytes]) -> bool:
    """Whether a session in a slot that another has used, and spoilt, starts like the first one."""
    before = cohort.join()
    for frame in frames(3, 7):
        cohort.beat({before: {"audio": 1e6 * frame}})
    cohort.leave(before)
    cohort.beat()
    session = cohort.join()
    assert session.slot == before.slot
    return [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio] == wanted


def test_a_slot_that_is_used_again_starts_from_the_initial_image(load: Load) -> None:
    audio = frames(4)
    wanted = alone(load, audio)
    cohort = load(capacity=3)
    cohort.join()
    assert rejoined(cohort, audio, wanted)


def test_a_session_that_joins_in_the_place_of_one_that_leaves_between_two_beats(load: Load) -> None:
    audio = frames(4)
    wanted = alone(load, audio)
    cohort = load(capacity=1)
    for _ in range(3):
        session = cohort.join()
        assert [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio] == wanted
        cohort.leave(session)


def test_a_join_that_did_not_reset_would_be_noticed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    audio = frames(4)
    wanted = alone(load, audio)
    cohort = load(capacity=3)
    monkeypatch.setattr(CpuKernel, "reset", lambda self, slot: None)
    assert not rejoined(cohort, audio, wanted)


# --- beats of several steps ---------------------------------------------------------------------------------------
def test_a_beat_of_two_steps_equals_two_beats_of_one(load: Load) -> None:
    audio = frames(8)
    wanted = alone(load, audio)
    cohort = load(TWO_STEPS, capacity=3)
    assert cohort.profile.steps_per_beat == 2 and cohort.profile.period_ms == 20.0
    cohort.join()
    session = cohort.join()
    for beat in range(4):
        outputs = cohort.beat({session: {"audio": audio[2 * beat : 2 * beat + 2].reshape(-1)}})[session]
        assert outputs["speech"].shape == (6,) and outputs["hidden"].shape == (42,)
        for step in range(2):
            one = {"speech": outputs["speech"][3 * step :][:3], "hidden": outputs["hidden"][21 * step :][:21]}
            assert bits(one) == wanted[2 * beat + step]
    with pytest.raises(SessionError, match="wanted 160 finite float32 values"):
        cohort.beat({session: {"audio": audio[0]}})


# --- threads ------------------------------------------------------------------------------------------------------
def test_sessions_may_live_on_threads_of_their_own(load: Load) -> None:
    """Joins, leaves and statistics from many threads while one beats: nobody's bits change, nothing is lost."""
    audio = frames(30)
    wanted = alone(load, audio)
    cohort = load(capacity=8)
    session = cohort.join()
    stop, errors = threading.Event(), []

    def come_and_go() -> None:
        try:
            while not stop.is_set():
                mine = cohort.join()
                assert cohort.free >= 0 and cohort.stats.beats >= 0
                cohort.leave(mine)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=come_and_go) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        found = [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert not errors and found == wanted
    assert cohort.free == 7 and cohort.stats.beats == 30


def test_beats_from_several_threads_run_one_after_the_other(load: Load) -> None:
    cohort = load(capacity=4)
    sessions = [cohort.join() for _ in range(4)]
    made: list[list[bytes]] = [[] for _ in sessions]

    def beats(index: int) -> None:
        for _ in range(10):
            made[index].append(bits(cohort.beat()[sessions[index]]))

    workers = [threading.Thread(target=beats, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    silence = alone(load, np.zeros((40, 80), np.float32))
    assert sorted(b for one in made for b in one) == sorted(silence)
    assert cohort.stats.beats == 40


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads: int, load: Load) -> None:
    audio = frames(5)
    cohort = load(capacity=7, threads=threads)
    session = cohort.join()
    wanted = alone(load, audio)
    assert [bits(cohort.beat({session: {"audio": frame}})[session]) for frame in audio] == wanted


# --- statistics and the end ---------------------------------------------------------------------------------------
def test_statistics_count_beats_and_late_ones(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = load(capacity=1)
    assert (cohort.stats.beats, cohort.stats.late, cohort.stats.max) == (0, 0, 0.0)
    durations = iter([1e6, 3e6, 10e6, 10.1e6, 25e6])
    monkeypatch.setattr(CpuKernel, "beat", lambda self: int(next(durations)))
    for _ in range(5):
        cohort.beat()
    stats = cohort.stats
    assert (stats.beats, stats.late, stats.p50, stats.max) == (5, 2, 10.0, 25.0)
    assert 10.1 < stats.p99 < 25.0


def test_a_cohort_closes_with_its_block_and_may_be_closed_again(load: Load) -> None:
    before = threading.active_count()
    with load(capacity=2, threads=2) as cohort:
        session = cohort.join()
        cohort.beat({session: {"audio": FRAME}})
    assert threading.active_count() == before
    cohort.close()
    assert cohort.sessions == ()
    for use in (cohort.join, cohort.beat, lambda: cohort.leave(session)):
        with pytest.raises((KernelError, SessionError), match=r"closed|not in this cohort"):
            use()
    assert cohort.stats.beats == 1


def test_an_error_inside_the_block_closes_it_and_goes_on(load: Load) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"), load(capacity=2, threads=2):
        raise ValueError("mine")
    assert threading.active_count() == before


def test_poison_ends_the_beats_of_a_cohort(load: Load) -> None:
    cohort = load(capacity=2)
    session = cohort.join()
    cohort.beat({session: {"audio": FRAME}})
    cohort.poison()
    for _ in range(2):
        with pytest.raises(KernelError, match="poison HOST"):
            cohort.beat({session: {"audio": FRAME}})
    assert cohort.stats.beats == 1


SEEDED = small(
    task="text",
    clock={"sample_rate": 8000, "samples_per_step": 80, "steps_per_beat": 2},
    ports={
        "inputs": {"x": {"type": "i32[]", "kind": "tokens"}, "seed": {"type": "i32[2]", "kind": "seed"}},
        "outputs": {
            "row": {"type": "f32[2]", "kind": "features", "from": "rows"},
            "words": {"type": "f32[2,2]", "kind": "features", "from": "words"},
        },
    },
    components=[
        {"kind": "embedding", "name": "rows", "entries": 9, "units": 2, "input": "x"},
        {"kind": "embedding", "name": "words", "entries": 9, "units": 2, "input": "seed"},
    ],
    tensors={"rows.weight": "table", "words.weight": "table"},
)


def test_a_session_keeps_the_seed_that_it_joined_with(load: Load) -> None:
    cohort = load(ModelSpec.from_data(SEEDED), capacity=2)
    first, second = cohort.join(seed=3 << 32 | 5), cohort.join(seed=7)
    assert (first.seed, second.seed) == (3 << 32 | 5, 7)

    def rows(indices: list[int]) -> list[bytes]:
        outputs = cohort.beat({second: {"x": np.array(indices)}})
        words = outputs[second]["words"].reshape(2, 2, 2), outputs[first]["words"].reshape(2, 2, 2)
        assert all((step == found[0]).all() for found in words for step in found)  # in every step of a beat
        assert (words[0][0, 0] == outputs[second]["row"][:2]).all()  # low word first
        return [words[1][0, 0].tobytes(), words[1][0, 1].tobytes(), outputs[second]["row"][:2].tobytes()]

    low, high, _ = rows([7, 0])
    assert rows([7, 5])[:2] == [low, high]  # a silent session's too
    cohort.leave(second)
    second = cohort.join(seed=5)
    assert rows([5, 0])[2] == low
    cohort.leave(second)
    second = cohort.join(seed=3)
    assert rows([3, 0])[2] == high


@pytest.mark.parametrize("seed", [-1, 1 << 64, 0.5, True, "7"])
def test_what_is_no_seed_is_refused_and_takes_no_slot(load: Load, seed: Any) -> None:
    cohort = load()
    with pytest.raises(UsageError, match="the seed of a session"):
        cohort.join(seed=seed)
    assert cohort.free == 4


def test_a_seed_is_not_given_with_a_beat(load: Load) -> None:
    cohort = load(ModelSpec.from_data(SEEDED), capacity=1)
    session = cohort.join()
    with pytest.raises(SessionError, match="input ports") as refused:
        cohort.beat({session: {"x": np.array([1, 2]), "seed": np.array([1, 2])}})
    assert refused.value.wanted == "x"


def test_a_session_is_named_by_its_slot(load: Load) -> None:
    session = load().join()
    assert isinstance(session, Session) and repr(session) == "<Session in slot 0>"
    assert len({session, session}) == 1
