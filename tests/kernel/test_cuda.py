"""The resident kernel on a GPU: the CPU kernel's bits, sessions that come and go, its clock, and how it ends.

Run where there is an H200 (or an H100 of 132 multiprocessors): pytest -m gpu tests/kernel/test_cuda.py -s
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from tests.kernel.gpu import MODELS, SLOTS, compiled, history, join, load, ports, sound, spec_of, state, step
from wpk.ir.errors import KernelError, ProgramError, TargetError
from wpk.kernel.atomics import load_acquire, monotonic_ns, store_release
from wpk.kernel.control import Poison
from wpk.kernel.cpu import CpuKernel
from wpk.kernel.cubin import ENTRY, build_cubin
from wpk.kernel.cuda import CudaKernel
from wpk.kernel.driver import Gpu, find_device
from wpk.kernel.layout import BLOCK_THREADS, shape_of
from wpk.kernel.plan import agenda_table, scratch_bytes, task_table, transfers
from wpk.ops.payload import Arena
from wpk.registry.load import open_weights
from wpk.registry.loading import fill_arenas
from wpk.registry.settings import child_environment, settings
from wpk.scheduler.program import Direction, Program

ROOT = Path(__file__).parents[2]


def percentiles(nanoseconds: list[int]) -> str:
    p50, p99 = np.percentile(nanoseconds, [50, 99]) / 1e3
    return f"p50 {p50:.2f} us, p99 {p99:.2f} us, max {max(nanoseconds) / 1e3:.2f} us"


# --- without a GPU ------------------------------------------------------------------------------------------------
def test_a_block_finds_its_tasks_of_every_wave() -> None:
    program = compiled("small").program
    tasks = task_table(program)
    agenda = agenda_table(program, tasks, 0)
    assert agenda.shape == (program.blocks, program.waves, 4)
    seen = 0
    for block in range(program.blocks):
        for wave in range(program.waves):
            first, count = agenda[block, wave, :2]
            found = tasks[first : first + count]
            assert (found["block"] == block).all() and (found["wave"] == wave).all()
            seen += len(found)
    assert seen == len(program.tasks)


def test_every_port_is_carried_between_host_and_device_whole() -> None:
    program = compiled("small").program
    for direction in Direction:
        rows = transfers(program, direction)
        assert len(rows) == sum(len(v) for v in program.named_ports(direction).values())
        assert (rows % 16 == 0).all() and (rows[:, 0] + rows[:, 1] * program.slots <= program.arenas[Arena.IO]).all()
    assert scratch_bytes(program, 256) % 64 == 0


def test_without_a_gpu_the_cpu_is_offered() -> None:
    try:
        find_device()
    except TargetError as error:
        assert "cpu" in (error.hint or "")
    else:
        pytest.skip("this machine has a GPU")


# --- the same bits as the CPU kernel --------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["small", *MODELS])
def test_a_model_gives_the_cpu_kernel_s_bits_twice(name: str) -> None:
    found = []
    for kind in (CpuKernel, CudaKernel, CudaKernel):
        kernel = load(kind, name)
        try:
            found.append(history(kernel))
        finally:
            kernel.close()
    (wanted, state_wanted), (made, state_made), (again, state_again) = found
    for ours, theirs, repeated in zip(made, wanted, again, strict=True):
        for slot, outputs in theirs.items():
            for port, values in outputs.items():
                np.testing.assert_array_equal(ours[slot][port], values)
                assert ours[slot][port].tobytes() == repeated[slot][port].tobytes()
    assert state_made == state_wanted == state_again


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_session_has_the_same_bits_in_any_slot_and_company(name: str) -> None:
    made = []
    for slot, company in ((0, ()), (SLOTS - 1, ()), (3, range(SLOTS))):
        kernel = load(CudaKernel, name)
        try:
            join(kernel, slot, *company)
            who = {s: 50 + s for s in company} | {slot: 7}
            made.append([step(kernel, beat, who)[slot] for beat in range(12)])
        finally:
            kernel.close()
    for other in made[1:]:
        for ours, theirs in zip(made[0], other, strict=True):
            assert {p: v.tobytes() for p, v in ours.items()} == {p: v.tobytes() for p, v in theirs.items()}


@pytest.mark.gpu
def test_a_slot_without_a_session_is_not_touched() -> None:
    kernel = load(CudaKernel, "small")
    try:
        join(kernel, 1, 3)
        for views in ports(kernel, Direction.OUTPUT).values():
            views[0][:] = 123.0
        before = state(kernel)
        for beat in range(3):
            step(kernel, beat, {1: 1, 3: 3})
        after = state(kernel)
        idle = [0, 2, 4, 5, 6, 7]
        assert (before[idle] == after[idle]).all() and (before[[1, 3]] != after[[1, 3]]).any()
        for views in ports(kernel, Direction.OUTPUT).values():
            assert (views[0][idle] == 123.0).all() and (views[0][[1, 3]] != 123.0).any()
    finally:
        kernel.close()


@pytest.mark.gpu
def test_a_cohort_drives_it_like_the_cpu_kernel() -> None:
    from wpk import registry

    spec = spec_of("silero-vad")
    size = int(np.prod(spec.ports.inputs["audio"].type.shape))
    made = []
    for target in ("cpu", "h200"):
        with registry.load(spec, capacity=3, target=target) as cohort:
            one, two = cohort.join(), cohort.join()
            rows = []
            for beat in range(20):
                if beat == 10:
                    cohort.leave(one)
                    one = cohort.join()
                inputs = {s: {"audio": sound(beat, size, who)} for s, who in ((one, 1), (two, 2))}
                outputs = cohort.beat(inputs)
                rows += [outputs[s]["speech"].copy() for s in (one, two)]
            made.append(np.array(rows))
            assert cohort.stats.beats == 20
    np.testing.assert_array_equal(*made)


# --- its clock ----------------------------------------------------------------------------------------------------
@njit(nogil=True)
def ping(control: int, epoch: int, times: np.ndarray) -> None:
    """Round trips without Python: raise the input epoch, wait for the output epoch; ns of each."""
    for i in range(times.size):
        before = monotonic_ns()
        store_release(control, epoch + i + 1)
        while load_acquire(control + 8) != epoch + i + 1:
            pass
        times[i] = monotonic_ns() - before


@pytest.mark.gpu
def test_mailbox_and_barrier_are_quick() -> None:
    waves = 4000

    def barriers_alone(program: Program) -> Program:
        return dataclasses.replace(program, waves=waves, tasks=program.tasks[:0].copy())

    kernel = load(CudaKernel, "small", barriers_alone)
    try:
        trips = []
        for _ in range(10_000):
            before = time.perf_counter_ns()
            kernel.beat()
            trips.append(time.perf_counter_ns() - before)
        bare = np.zeros(20_000, np.int64)
        ping(kernel.control.address, kernel._epoch, bare)
        kernel._epoch += bare.size
        join(kernel, 0)
        barrier = float(np.median([kernel.beat() for _ in range(30)])) / waves
        print(f"\nmailbox with two barriers: {percentiles(bare[100:].tolist())}")
        print(f"the same through beat(): {percentiles(trips[100:])}; barrier: {barrier:.0f} ns")
        assert np.median(bare) < 20_000 and barrier < 2_000
    finally:
        kernel.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_beat_is_within_the_model_s_period(name: str) -> None:
    kernel = load(CudaKernel, name)
    try:
        join(kernel, *range(SLOTS))
        who = {s: s for s in range(SLOTS)}
        times = []
        for beat in range(60):
            step(kernel, beat, who)
            published, start, end = time.monotonic_ns(), kernel.control["start_ns"], kernel.control["end_ns"]
            assert 0 < published - end < 50_000_000 and start < end
            times.append(end - start)
        print(f"\n{name}: a beat of {SLOTS} sessions {percentiles(times[5:])}; {kernel.cubin.registers} registers")
        clock = spec_of(name).clock
        assert max(times[5:]) < clock.step_ms * clock.steps_per_beat * 1e6
    finally:
        kernel.close()


# --- how it ends --------------------------------------------------------------------------------------------------
def long_beat(program: Program) -> Program:
    """A fifth of a second of barriers."""
    return dataclasses.replace(program, waves=200_000, tasks=program.tasks[:0].copy())


@pytest.mark.gpu
def test_poison_stops_it_in_mid_beat() -> None:
    kernel = load(CudaKernel, "small", long_beat)
    try:
        join(kernel, 0)
        threading.Timer(0.05, kernel.poison).start()
        before = time.monotonic()
        with pytest.raises(KernelError, match="poison HOST"):
            kernel.beat()
        assert time.monotonic() - before < 0.15
        with pytest.raises(KernelError, match="stopped"):
            kernel.beat()
    finally:
        kernel.close()


@pytest.mark.gpu
def test_a_stall_names_its_wave_and_block() -> None:
    tasks = compiled("small").program.tasks
    index = next(i for i, task in enumerate(tasks) if task["block"] > 0 and task["wave"] > 2)
    wave, block = int(tasks[index]["wave"]), int(tasks[index]["block"])

    def burden(program: Program) -> Program:
        """One task of one block thousands of times over."""
        many = np.repeat(tasks[index : index + 1], 20_000)
        return dataclasses.replace(program, tasks=np.concatenate([tasks[:index], many, tasks[index:]]))

    kernel = load(CudaKernel, "small", burden, budget_s=0.002)
    try:
        join(kernel, *range(SLOTS))
        with pytest.raises(KernelError, match=rf"stalled in wave {wave} .*block {block} did not arrive"):
            kernel.beat()
        with pytest.raises(KernelError, match="stalled"):
            kernel.beat()
    finally:
        kernel.close()


@pytest.mark.gpu
def test_it_ends_within_a_second_of_its_host() -> None:
    kernel = load(CudaKernel, "small")
    try:
        kernel.beat()
        kernel._pulse_end[0] = 1  # the heartbeat's thread ends, as with its process
        before = time.monotonic()
        assert kernel._gpu.wait_end(3.0)
        assert time.monotonic() - before < 1.0
        with pytest.raises(KernelError, match="did not stir"):
            kernel.beat()
    finally:
        kernel.close()


@pytest.mark.gpu
def test_a_killed_process_leaves_the_gpu_free() -> None:
    code = """
        import time
        from tests.kernel.test_cuda import CudaKernel, join, load, long_beat
        kernel = load(CudaKernel, "small", long_beat, budget_s=60.0)
        join(kernel, 0)
        print("resident", flush=True)
        kernel.beat()
    """
    environment = child_environment({"PYTHONPATH": ":".join([str(ROOT), *sys.path])})
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout and process.stdout.readline() == "resident\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = time.monotonic()
    kernel = load(CudaKernel, "small")
    try:
        join(kernel, 0)
        step(kernel, 0, {0: 1})
        print(f"\nanother kernel ran {time.monotonic() - before:.2f} s after the kill")
    finally:
        kernel.close()


@pytest.mark.gpu
def test_close_is_clean_and_quick_and_may_be_repeated() -> None:
    threads = threading.active_count()
    for _ in range(5):
        kernel = load(CudaKernel, "small")
        kernel.beat()
        before = time.monotonic()
        kernel.close()
        kernel.close()
        assert time.monotonic() - before < 1.0
        with pytest.raises(KernelError):
            kernel.beat()
    assert threading.active_count() <= threads + 1
    assert kernel.control["poison"] == Poison.STOP


# --- what is refused ----------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_a_program_for_another_number_of_multiprocessors_is_refused() -> None:
    with pytest.raises(TargetError, match="cannot run this profile"):
        load(CudaKernel, "small", lambda p: dataclasses.replace(p, blocks=p.blocks + 1))


@pytest.mark.gpu
def test_arenas_that_do_not_fit_are_refused() -> None:
    made = compiled("small")
    arenas, image = fill_arenas(made.program, made.load, open_weights(spec_of("small"), None, settings()))
    with pytest.raises(ProgramError, match="arenas do not fit"):
        CudaKernel(made.program, [a[:-64] for a in arenas], image, cache=settings().kernels)


@pytest.mark.gpu
def test_a_grid_that_cannot_be_resident_at_once_is_refused() -> None:
    cubin = build_cubin(compiled("small").program.operators, settings().kernels)
    gpu = Gpu(find_device())
    try:
        shared = shape_of(compiled("small").program.operators, SLOTS).shared_bytes
        function = gpu.load(cubin.image, ENTRY, BLOCK_THREADS, shared)
        with pytest.raises(KernelError, match="TOO_LARGE"):
            gpu.launch(function, gpu.device.multiprocessors + 1, BLOCK_THREADS, shared, 0)
        with pytest.raises(KernelError, match="cuFuncSetAttribute failed"):
            gpu.load(cubin.image, ENTRY, BLOCK_THREADS, 1 << 20)
    finally:
        gpu.close()
