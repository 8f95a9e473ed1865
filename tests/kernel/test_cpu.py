"""The CPU kernel: what it computes, that threads and targets change no bit of it, and how it ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import cfunc

from tests.kernel.machine import Array, Machine, compiled, model, reference, waves_of
from wpk.ir.errors import KernelError, ProgramError
from wpk.kernel import cpu
from wpk.kernel.atomics import load_acquire, sleep_us, store_release
from wpk.kernel.bodies import SIGNATURE
from wpk.kernel.control import Poison
from wpk.kernel.cpu import LARGEST_GAP, CpuKernel, build_items
from wpk.ops.payload import Arena
from wpk.registry.settings import child_environment
from wpk.scheduler.target import TARGETS

ROOT = Path(__file__).parents[2]
SPEC = model()
SLOTS = 5


def sound(beats: int, seed: int = 0, size: int = 80) -> Array:
    """[beats, size] samples: noise between silences."""
    rng = np.random.default_rng(seed)
    loud = np.repeat(rng.integers(0, 2, -(-beats // 4)), 4)[:beats, None]
    return (rng.standard_normal((beats, size)) * loud).astype(np.float32)


def history(machine: Machine, beats: int = 12) -> tuple[list[bytes], bytes]:
    """Outputs and final state, as bytes, of three sessions that come and go."""
    machine.join(0, 3)
    made = []
    for beat, frame in enumerate(sound(beats)):
        if beat == 4:
            machine.join(4)
        if beat == 8:
            machine.leave(0)
        slots = [s for s, live in ((0, beat < 8), (3, True), (4, beat >= 4)) if live]
        outputs = machine.beat({slot: frame * (1 + slot) for slot in slots})
        made += [outputs[slot][port].tobytes() for slot in slots for port in sorted(outputs[slot])]
    return made, b"".join(machine.state(slot) for slot in (0, 3, 4))


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("wpk-kernel")]


def wait_until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    before = len(helpers())
    yield
    gc.collect()
    assert len(helpers()) == before


# --- what it computes ---------------------------------------------------------------------------------------------
def test_every_session_gets_the_meaning_of_the_graph_from_its_own_start() -> None:
    with Machine(SPEC, SLOTS, threads=2) as machine:
        references = {}
        for beat, frame in enumerate(sound(24)):
            if beat in (0, 3, 9):
                slot = {0: 2, 3: 0, 9: 4}[beat]
                machine.join(slot)
                references[slot] = reference(SPEC)
            inputs = {slot: np.roll(frame, slot) * (1 + slot) for slot in references}
            outputs = machine.beat(inputs)
            for slot, meaning in references.items():
                for port, wanted in meaning.step({"audio": inputs[slot]}).items():
                    np.testing.assert_allclose(outputs[slot][port], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("slot", [0, 63, 64, 69])
def test_slots_beyond_the_first_word_of_the_mask_run_too(slot: int) -> None:
    with Machine(SPEC, 70, TARGETS["cpu"], threads=2) as machine:
        machine.join(slot, 31)
        meaning = reference(SPEC)
        for frame in sound(4):
            outputs = machine.beat({slot: frame, 31: -frame})
            np.testing.assert_allclose(outputs[slot]["speech"], meaning.step({"audio": frame})["speech"], atol=2e-5)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_beat_of_several_steps_is_those_steps_one_after_the_other(steps: int) -> None:
    frames = sound(6)
    with Machine(SPEC, 2, threads=2) as single, Machine(SPEC, 2, threads=2, steps=steps) as many:
        single.join(1)
        many.join(1)
        for start in range(0, 6, steps):
            wanted = [single.beat({1: frame})[1] for frame in frames[start : start + steps]]
            (found,) = many.beat({1: frames[start : start + steps].reshape(-1)}).values()
            for port, values in found.items():
                assert values.tobytes() == b"".join(one[port].tobytes() for one in wanted)
        assert many.kernel.control["steps"] == single.kernel.control["steps"] == 6


def test_vacant_slots_are_computed_only_where_they_close_a_short_gap() -> None:
    slots = LARGEST_GAP + 10
    with Machine(SPEC, slots, threads=1) as machine:
        machine.join(1, 3, 4, 6, LARGEST_GAP + 8)
        machine.beat({})
        count = machine.kernel._runs[0]
        assert machine.kernel._runs[1 : 1 + 2 * count].tolist() == [1, 7, LARGEST_GAP + 8, LARGEST_GAP + 9]


def test_garbage_in_a_vacant_slot_between_sessions_is_not_seen() -> None:
    frames = sound(3)
    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(1)
        alone = [machine.beat({1: frame})[1] for frame in frames]
    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(1, 3)
        slab = machine.program.arenas[Arena.STATE] // SLOTS
        machine.kernel.arenas[Arena.STATE][2 * slab : 3 * slab] = 0xFF  # NaN
        for frame, wanted in zip(frames, alone, strict=True):
            found = machine.beat({1: frame, 3: frame})
            for port, values in wanted.items():
                assert found[1][port].tobytes() == found[3][port].tobytes() == values.tobytes()


def test_a_slot_outside_the_occupied_ones_is_not_touched() -> None:
    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(1, 3)
        idle = [0, 4]
        for slot in idle:
            slab = machine.program.arenas[Arena.STATE] // SLOTS
            machine.kernel.arenas[Arena.STATE][slot * slab : (slot + 1) * slab] = 0xAB
            for views in machine.outputs.values():
                views[0][slot] = 123.0
        for frame in sound(3):
            machine.beat({1: frame, 3: frame})
        for slot in idle:
            assert set(machine.state(slot)) == {0xAB}
            assert all((views[0][slot] == 123.0).all() for views in machine.outputs.values())


# --- the same bits ------------------------------------------------------------------------------------------------
def test_work_is_cut_finely_enough_to_test_threads() -> None:
    program = compiled(SPEC, SLOTS).program
    assert waves_of(program) > 10 and program.blocks == 8


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_change_no_bit(threads: int) -> None:
    with Machine(SPEC, SLOTS, threads=1) as one, Machine(SPEC, SLOTS, threads=threads) as several:
        assert (one.kernel.threads, several.kernel.threads) == (1, threads)
        assert history(one) == history(several)


@pytest.mark.parametrize("name", ["cpu", "h200", "h100-sxm"])
def test_a_program_for_any_target_gives_the_same_bits(name: str) -> None:
    """Sums run over k in one order whatever the cut; only shares differ between targets."""
    fine = TARGETS[name].model_copy(update={"least_task_s": 1e-15})
    with Machine(SPEC, SLOTS, threads=2) as wanted:
        expected = history(wanted)
    for target in (TARGETS[name], fine):
        with Machine(SPEC, SLOTS, target, threads=2) as machine:
            assert machine.program.blocks == TARGETS[name].blocks
            assert history(machine) == expected
    assert len(compiled(SPEC, SLOTS, fine).program.tasks) > len(compiled(SPEC, SLOTS, TARGETS[name]).program.tasks)


def test_capacity_and_slot_change_no_bit() -> None:
    frames, made = sound(8), set()
    for capacity, slot in ((1, 0), (5, 0), (5, 4), (70, 67)):
        with Machine(SPEC, capacity, TARGETS["cpu"], threads=2) as machine:
            machine.join(slot)
            made.add(b"".join(machine.beat({slot: frame})[slot]["hidden"].tobytes() for frame in frames))
    assert len(made) == 1


def test_threads_are_never_more_than_blocks() -> None:
    with Machine(SPEC, SLOTS, threads=100) as machine:
        assert machine.kernel.threads == machine.program.blocks
    with Machine(SPEC, SLOTS) as machine:
        assert machine.kernel.threads == min(cpu.available_cpus(), machine.program.blocks)


def test_items_wait_for_all_of_the_earlier_waves() -> None:
    program = compiled(SPEC, SLOTS).program
    items = build_items(program)
    assert items[0][0] == 0 and items[-1][1] == len(program.tasks)
    assert (items[1:, 0] == items[:-1, 1]).all()
    for first, end, earlier, wave in items.tolist():
        assert {(t["wave"], t["block"]) for t in program.tasks[first:end]} == {(wave, program.tasks["block"][first])}
        assert earlier == (items[:, 3] < wave).sum()


# --- the control record -------------------------------------------------------------------------------------------
def test_each_beat_moves_the_epochs_and_is_timed() -> None:
    with Machine(SPEC, SLOTS, threads=2, steps=2) as machine:
        machine.join(2)
        control = machine.kernel.control
        for beat in (1, 2, 3):
            before = time.monotonic_ns()
            duration = machine.kernel.beat()
            after = time.monotonic_ns()
            assert control["input_epoch"] == control["output_epoch"] == beat
            assert before <= control["start_ns"] <= control["end_ns"] <= after
            assert duration == control["end_ns"] - control["start_ns"] > 0
            assert control["steps"] == 2 * beat
            assert not control["poison"] and not control["stalled"]


def test_beats_without_sessions_pass_and_leave_the_kernel_usable() -> None:
    with Machine(SPEC, SLOTS, threads=3) as machine, Machine(SPEC, SLOTS, threads=1) as fresh:
        control = machine.kernel.control
        for beat in range(1, 21):
            if beat == 10:
                machine.join(1)
            assert (machine.kernel.beat() > 0) == (beat == 10)
            assert control["input_epoch"] == control["output_epoch"] == control["steps"] == beat
            machine.leave(1)
        assert history(machine) == history(fresh)


def test_beats_from_several_threads_run_one_at_a_time() -> None:
    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(0)
        workers = [threading.Thread(target=lambda: [machine.kernel.beat() for _ in range(50)]) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert machine.kernel.control["output_epoch"] == machine.kernel.control["steps"] == 200


def test_arenas_that_are_too_small_are_refused() -> None:
    with Machine(SPEC, SLOTS, threads=1) as machine:
        arenas = [a[: len(a) - 1] if i == Arena.STATE else a for i, a in enumerate(machine.kernel.arenas)]
        with pytest.raises(ProgramError, match="arenas do not fit"):
            CpuKernel(machine.program, arenas, machine.kernel.image)


# --- poison and bounded waits -------------------------------------------------------------------------------------
PASS, STUCK, AFTER = 0, 1, 2  # word 0 of a thread's scratch: how the fake body behaves on it


@cfunc(SIGNATURE)
def fake_body(record, arenas, slot_lo, slot_hi, part_lo, part_hi, scratch):  # type: ignore[no-untyped-def]
    """STUCK: say so in word 1 and stay until told otherwise. AFTER: give the thread of word 2 time to get stuck."""
    role = load_acquire(scratch)
    if role == 1:
        store_release(scratch + 8, 1)
        while load_acquire(scratch) == 1:
            sleep_us(50)
    if role == 2:
        for _ in range(200):
            if load_acquire(load_acquire(scratch + 16) + 8) == 0:
                sleep_us(50)


def faked(machine: Machine, *roles: int) -> list[Array]:
    """Every body replaced by the fake one; the words of each thread."""
    kernel = machine.kernel
    kernel._keep[2][:] = fake_body.address
    words = [scratch[:24].view(np.int64) for scratch in kernel._scratch]
    for word, role in zip(words, roles, strict=True):
        word[:] = (role, 0, kernel._scratch[-1].ctypes.data)
    return words


def in_a_beat(machine: Machine) -> tuple[threading.Thread, list[KernelError]]:
    """A beat on a thread of its own, and where its error will be."""
    errors: list[KernelError] = []

    def run() -> None:
        try:
            machine.kernel.beat()
        except KernelError as error:
            errors.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    return worker, errors


@pytest.mark.parametrize("threads", [1, 3])
def test_a_kernel_poisoned_between_beats_refuses_the_next_ones(threads: int) -> None:
    with Machine(SPEC, SLOTS, threads=threads) as machine:
        machine.join(1)
        machine.beat({1: sound(1)[0]})
        state = machine.state(1)
        machine.kernel.poison()
        for _ in range(3):
            with pytest.raises(KernelError, match="stopped; wanted a running kernel; found poison HOST"):
                machine.kernel.beat()
        assert machine.state(1) == state and machine.kernel.control["output_epoch"] == 1
        wait_until(lambda: not helpers())


@pytest.mark.parametrize("threads", [1, 2])
def test_poison_from_another_thread_ends_a_beat_in_the_middle(threads: int) -> None:
    with Machine(SPEC, SLOTS, threads=threads) as machine:
        machine.join(*range(SLOTS))
        words = faked(machine, *[STUCK] * threads)
        worker, errors = in_a_beat(machine)
        wait_until(lambda: all(word[1] for word in words[:1]))
        machine.kernel.poison()
        for word in words:
            word[0] = PASS
        worker.join(20)
        assert not worker.is_alive()
        assert "poison HOST" in str(errors[0])
        assert (machine.kernel.control["input_epoch"], machine.kernel.control["output_epoch"]) == (1, 0)
        with pytest.raises(KernelError, match="poison HOST"):
            machine.kernel.beat()


def test_a_thread_helps_with_the_first_beat_already() -> None:
    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(*range(SLOTS))
        words = faked(machine, AFTER, STUCK)
        worker, errors = in_a_beat(machine)
        wait_until(lambda: words[1][1])
        words[1][0] = PASS
        worker.join(20)
        assert not errors and machine.kernel.control["output_epoch"] == 1


def test_poison_ends_a_wait_for_a_thread_that_is_stuck() -> None:
    with Machine(SPEC, SLOTS, threads=2, budget_s=60.0) as machine:
        machine.join(*range(SLOTS))
        words = faked(machine, AFTER, STUCK)
        worker, errors = in_a_beat(machine)
        wait_until(lambda: words[1][1])
        started = time.monotonic()
        machine.kernel.poison()
        worker.join(20)
        assert time.monotonic() - started < 10
        assert "poison HOST" in str(errors[0])
        words[1][0] = PASS


def test_a_body_that_never_ends_is_waited_for_within_the_budget_and_its_wave_named() -> None:
    with Machine(SPEC, SLOTS, threads=2, budget_s=0.3) as machine:
        machine.join(*range(SLOTS))
        words = faked(machine, AFTER, STUCK)
        started = time.monotonic()
        with pytest.raises(KernelError, match="stalled before wave") as caught:
            machine.kernel.beat()
        assert 0.3 < time.monotonic() - started < 15
        control = machine.kernel.control
        wave = control["stalled"] - 1
        assert control["poison"] == Poison.STALLED and f"wave {wave} (" in str(caught.value)
        labels = {machine.program.labels[t["payload"]] for t in machine.program.tasks if t["wave"] == wave}
        assert all(label in str(caught.value) for label in labels) and caught.value.hint
        with pytest.raises(KernelError, match=f"stalled before wave {wave} "):
            machine.kernel.beat()
        words[1][0] = PASS


@pytest.mark.parametrize("threads", [1, 2])
def test_work_that_is_never_reported_done_stalls_at_the_next_wave(threads: int) -> None:
    with Machine(SPEC, SLOTS, threads=threads, budget_s=0.2) as machine:
        machine.join(1)
        machine.beat({1: sound(1)[0]})
        machine.kernel._progress.view(np.int64)[cpu.DONE // 8] -= 1
        with pytest.raises(KernelError, match="stalled before wave 0"):
            machine.kernel.beat()
        assert machine.kernel.control["output_epoch"] == 1


def test_a_stalled_last_wave_is_named_too() -> None:
    with Machine(SPEC, SLOTS, threads=1, budget_s=0.2) as machine:
        machine.join(1)
        items = machine.kernel._keep[0]
        items[:, 2] = -1  # nobody waits for an earlier wave: the end of the beat is the first to miss an item
        machine.kernel._progress.view(np.int64)[cpu.DONE // 8] -= 1
        with pytest.raises(KernelError, match=f"stalled before wave {machine.program.waves - 1} "):
            machine.kernel.beat()


def test_an_unknown_poison_stops_the_kernel_like_any_other() -> None:
    with Machine(SPEC, SLOTS, threads=1) as machine:
        machine.kernel.control["poison"] = 77
        with pytest.raises(KernelError, match="poison 77"):
            machine.kernel.beat()


def test_the_first_poison_stays() -> None:
    with Machine(SPEC, SLOTS, threads=1) as machine:
        machine.kernel.poison(Poison.STALLED)
        machine.kernel.poison()
        machine.kernel.close()
        assert machine.kernel.control["poison"] == Poison.STALLED


# --- the end ------------------------------------------------------------------------------------------------------
def test_close_ends_the_threads_and_may_be_repeated() -> None:
    before = threading.active_count()
    machine = Machine(SPEC, SLOTS, threads=4)
    assert threading.active_count() == before + 3
    machine.join(0)
    machine.kernel.beat()
    for _ in range(3):
        machine.kernel.close()
        assert threading.active_count() == before
    with pytest.raises(KernelError, match="poison STOP"):
        machine.kernel.beat()


def test_a_forgotten_kernel_ends_its_threads() -> None:
    before = threading.active_count()
    machine = Machine(SPEC, SLOTS, threads=3)
    machine.join(0)
    machine.kernel.beat()
    del machine
    gc.collect()
    assert threading.active_count() == before


def test_closing_while_a_body_is_stuck_returns_and_frees_nothing_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "JOIN_S", 0.1)
    machine = Machine(SPEC, SLOTS, threads=2, budget_s=0.1)
    machine.join(*range(SLOTS))
    words = faked(machine, AFTER, STUCK)
    with pytest.raises(KernelError, match="stalled"):
        machine.kernel.beat()
    machine.kernel.close()
    stuck = helpers()
    assert len(stuck) == 1
    word = words[1]
    del machine, words
    gc.collect()
    word[0] = PASS  # it goes on in memory that is still its own, sees the poison, and ends
    stuck[0].join(20)
    assert not stuck[0].is_alive()


CHILD = """
    import sys
    import numpy as np
    from tests.kernel.machine import Machine, model
    from wpk.kernel import cpu

    machine = Machine(model(), 5, threads=3)
    machine.join(0, 1, 2, 3, 4)
    for _ in range(3):
        machine.beat({slot: np.ones(80, np.float32) for slot in range(5)})
    print("alive", flush=True)
"""
ENDS = {
    "falls off the end": (0, ""),
    "exits in a beat loop": (3, "machine.kernel.beat(); sys.exit(3)"),
    "raises": (1, "raise ValueError('mine')"),
    "is stuck": (
        0,
        """
        from tests.kernel.test_cpu import AFTER, STUCK, faked
        cpu.JOIN_S = 0.2
        faked(machine, AFTER, STUCK, STUCK)
        machine.kernel._context[9] = 10**8
        try:
            machine.kernel.beat()
        except Exception as error:
            print(error)
        """,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_does_not_close_its_kernel_ends_cleanly(how: str, home: Path) -> None:
    status, last = ENDS[how]
    code = textwrap.dedent(CHILD) + textwrap.dedent(last)
    environment = child_environment({"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONFAULTHANDLER": "1"})
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith("alive")
    assert ("stalled" in done.stdout) == (how == "is stuck")
    assert ("ValueError: mine" in done.stderr) if how == "raises" else not done.stderr


def test_a_thousand_beats_keep_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with Machine(SPEC, SLOTS, threads=2) as machine:
        machine.join(0, 1)
        frame = sound(1)[0]

        def beats(count: int) -> None:
            for i in range(count):
                machine.leave(1)
                machine.join(1)
                machine.beat({0: frame, 1: frame * i})

        beats(100)
        gc.collect()
        tracemalloc.start()
        try:
            beats(100)
            before, whole = tracemalloc.get_traced_memory()[0], resident()
            beats(1000)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - before < 50_000
            assert resident() - whole < 4 << 20
        finally:
            tracemalloc.stop()


def test_poisoning_one_kernel_leaves_the_others_running() -> None:
    with Machine(SPEC, SLOTS, threads=2) as one, Machine(SPEC, SLOTS, threads=2) as other:
        one.join(0)
        other.join(0)
        one.kernel.poison()
        other.beat({0: sound(1)[0]})
        assert not other.kernel.control["poison"]
