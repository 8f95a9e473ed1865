"""A block's producer in plain Python: the code of `wpk.kernel.streamed.producer` on a program's own tables.

What the GPU does is replaced: barriers of shared memory count, copies complete at once and leave a mark where they
write. The block's consumers are a list of what they take in turn; they move on, a few steps at random, whenever the
producer looks at a barrier. So every wait of the producer is executed, and one that never ends is found.
"""

from __future__ import annotations

import random
import types as python
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from wpk.kernel import layout
from wpk.kernel.layout import (
    BARRIERS,
    CACHE_KIND,
    CACHE_ROWS,
    EMPTY,
    ENDED,
    FULL,
    RING,
    S_AT,
    S_CHUNKS,
    S_KIND,
    S_PART_HI,
    S_PART_LO,
    S_RECORD,
    S_SLOT_HI,
    S_SLOT_LO,
    S_WAVE,
    S_WINDOWS,
    STATE_KIND,
    STREAM_BYTES,
    WAITING,
    WARPS,
    Shape,
)
from wpk.kernel.plan import stream_table, task_table
from wpk.kernel.streamed import producer, ring
from wpk.scheduler.program import Program

STREAMS, ORDERS, STARTS, ACTIVE = 1 << 40, 2 << 40, 3 << 40, 4 << 40  # addresses of what the producer reads
PATIENCE = 20_000  # looks without any progress: a wait that never ends


class Stuck(AssertionError):
    """The producer waits for what will not come."""


@dataclass
class Barrier:
    """An mbarrier: `due` arrivals a phase, and bytes that have not come yet."""

    due: int
    phase: int = 0
    arrived: int = 0
    bytes: int = 0

    def settle(self) -> None:
        if self.arrived == self.due and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def over(self, parity: int) -> bool:
        return self.phase & 1 != parity


@dataclass
class Machine:
    """One block's shared memory, its consumers, and what stands for the GPU's instructions."""

    program: Program
    shape: Shape
    block: int
    seed: int
    live: frozenset[int]
    rows: int = 40  # of each session's cache
    items: int = 0  # that the consumers have used
    wave: int = -1  # that is open
    target: int = 0
    waiting: int = 0  # what WAITING holds
    idle: int = 0
    stopped: bool = False  # by another block
    ended: int = 0  # the word that this block's threads look at
    written: dict[int, tuple[int, int]] = field(default_factory=dict)  # item -> first and end byte in the ring

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.tasks = task_table(self.program)
        self.table, self.starts = stream_table(self.program, self.tasks, self.shape, [1 << 32] * 5, 1 << 50)
        self.own = self.table[self.starts[self.block] : self.starts[self.block + 1]]
        self.barriers = {FULL + 8 * i: Barrier(1) for i in range(BARRIERS)}
        self.barriers |= {EMPTY + 8 * i: Barrier(WARPS) for i in range(BARRIERS)}
        self.place = ring.NO_ITEMS
        self.consumers: Iterator[None] = iter(())
        self.done = True

    # --- the consumers ----------------------------------------------------------------------------------------------
    def items_of(self, entry: Any) -> int:
        """Stages of an entry with the sessions that are live."""
        live = [s for s in range(entry[S_SLOT_LO], entry[S_SLOT_HI]) if s in self.live]
        kind, parts = entry[S_KIND] & 0xFF, entry[S_PART_HI] - entry[S_PART_LO]
        if kind == STATE_KIND:
            return len(live) * int(parts)
        if kind == CACHE_KIND:
            ranges = [self.range_of(part) for part in range(entry[S_PART_LO], entry[S_PART_HI])]
            return len(live) * sum(end - first for first, end in ranges)
        return int(entry[S_CHUNKS] - entry[S_AT] + entry[S_WINDOWS])

    def range_of(self, part: int) -> tuple[int, int]:
        """Groups of rows that a part reads of any session's cache."""
        groups, splits = -(-self.rows // CACHE_ROWS), 3
        return groups * part // splits, groups * (part + 1) // splits

    def consume(self) -> Iterator[None]:
        """Every item of the open wave, then the arrival at its barrier."""
        for entry in self.own[self.own[:, S_WAVE] == self.wave]:
            size, count = int(entry[S_KIND]) >> 26, int(entry[S_KIND]) >> 8 & 0xFF
            if size != self.place >> 48:
                start = -(-(self.place >> 32 & 0xFFFF) // size) * size
                start = start if start + size <= count * size else 0
                self.place = self.place & 0xFFFFFFFF | start << 32 | size << 48
            for _ in range(self.items_of(entry)):
                item, offset = self.items, self.place >> 32 & 0xFFFF
                full = self.barriers[FULL + 8 * (item % BARRIERS)]
                while not full.over(item // BARRIERS & 1):
                    yield
                first = self.written.pop(item)[0]
                assert first == 1024 * offset, f"item {item} lies at {first}, not at {1024 * offset}"
                empty = self.barriers[EMPTY + 8 * (item % BARRIERS)]
                for _ in range(WARPS):
                    empty.arrived += 1
                    if self.rng.random() < 0.1:
                        yield
                empty.settle()
                self.items += 1
                following = (offset + size) % (size * count)
                self.place = self.place >> 48 << 48 | following << 32 | (self.items & 0xFFFFFFFF)
                yield
        for _ in range(self.rng.randrange(4)):
            yield  # the epilogue
        self.waiting = self.target

    def look(self) -> None:
        """The producer looks at a barrier: meanwhile the consumers go on."""
        before = self.items, self.waiting
        for _ in range(self.rng.randrange(3)):
            if next(self.consumers, self) is self:
                self.done = True
        self.idle = 0 if (self.items, self.waiting) != before else self.idle + 1
        if self.idle > PATIENCE:
            raise Stuck(f"wave {self.wave}, {self.items} items used, {len(self.written)} written")

    # --- instructions -----------------------------------------------------------------------------------------------
    def expect(self, barrier: int, size: int) -> None:
        found = self.barriers[int(barrier)]
        assert found.arrived == 0 and found.bytes == 0, "announced twice"
        found.arrived, found.bytes = 1, int(size)
        self.idle = 0

    def copied(self, place: int, size: int, barrier: int) -> None:
        item = self.announced(int(barrier))
        first, end = int(place) - RING, int(place) - RING + int(size)
        assert first >= 0 and end <= self.shape.ring_bytes
        lo, hi = self.written.get(item, (first, end))
        self.written[item] = min(lo, first), max(hi, end)
        for other, (start, stop) in self.written.items():
            assert other == item or end <= start or stop <= first, f"item {item} overwrites item {other}"
        found = self.barriers[int(barrier)]
        found.bytes -= int(size)
        assert found.bytes >= 0
        found.settle()

    def announced(self, barrier: int) -> int:
        """The item that a barrier of the kind `full` announces: of its next BARRIERS items the one with this place."""
        which = (barrier - FULL) // 8
        return self.items + (which - self.items) % BARRIERS

    def end(self, address: int, value: int) -> None:
        assert address == ENDED
        self.ended = int(value)

    def over(self, barrier: int, parity: int) -> int:
        self.look()
        return int(self.barriers[int(barrier)].over(int(parity)))

    # --- a beat -----------------------------------------------------------------------------------------------------
    def run(self, beats: int) -> None:
        code = self.code()
        cursors = [0] * producer.BOTH
        code["start_kernel"](cursors)
        ran = 0
        for _ in range(beats):
            code["start_beat"](0, cursors, self.block)
            for wave in range(self.program.waves):
                self.wave, self.target = wave, self.target + 1
                self.consumers, self.done = self.consume(), False
                code["stream_wave"](0, cursors, wave, 0, 0, self.target, ran)
                if self.ended:
                    return
                while not self.done:  # the bounded wait for all blocks
                    self.look()
                ran += 1
        assert not self.written or self.program.waves == 0, "written ahead of the last wave"

    def code(self) -> dict[str, Any]:
        """The producer's functions with the GPU's replaced."""
        row = STREAM_BYTES

        def load_constant(address: int) -> int:
            entry, at = divmod(int(address) - STREAMS, row)
            return int(self.table[entry, at // 8])

        def fetch(*_: object) -> None:
            """The orders of the next wave: not looked at here."""

        entry_of = {int(e[S_RECORD]): e for e in self.own}

        def late(place: int, barrier: int) -> None:
            self.copied(place, self.barriers[int(barrier)].bytes, barrier)

        instructions = SimpleNamespace(
            load_constant=load_constant,
            prefetch_line=lambda address: None,
            quotient=lambda a, b: np.int32(int(a) // int(b)),
            load_order=lambda address: 0,
            load_relaxed_gpu=self.mask,
            shared_load_32=lambda address: np.int32(self.waiting if int(address) == WAITING else self.ended),
            shared_store_32=self.end,
            mbarrier_try=self.over,
            mbarrier_test=self.over,
            mbarrier_expect=self.expect,
            bulk_load=lambda place, source, size, barrier: self.copied(place, size, barrier),
            bulk_load_hinted=lambda place, source, size, barrier, policy: self.copied(place, size, barrier),
            tensor_load_2=lambda place, where, column, session, barrier: late(place, barrier),
            tensor_load_3=lambda place, where, a, b, c, barrier: self.box(place, barrier, where),
            tensor_load_4=lambda place, where, a, b, c, d, barrier: late(place, barrier),
        )
        words = {layout.STREAMS: STREAMS, layout.ORDERS: ORDERS, layout.STREAM_STARTS: STARTS, layout.ACTIVE: ACTIVE}
        words[layout.SYNC] = 0

        def parameter(record: int, index: int) -> int:
            order = (int(record) - ORDERS) // layout.ORDER_BYTES
            value = self.program.payloads[int(self.tasks["payload"][order])]["parameter"][int(index)]
            kind = int(entry_of[order][S_KIND]) & 0xFF
            return 64 if kind == CACHE_KIND and index == 2 else int(value)  # one box a stage is enough here

        replaced: dict[str, Any] = {
            "ptx": instructions,
            "word": lambda context, index: words.get(index, self.program.waves),
            "constant_32": lambda address: int(self.starts[(int(address) - STARTS) // 4]),
            "parameter": parameter,
            "address": lambda record, arenas, operand, slot: 0,
            "stride": lambda record, operand: 0,
            "is_live": lambda live, slot: int(slot) in self.live,
            "cache_range": lambda record, slot, part: (*self.range_of(int(part)), self.rows),
        }
        space: dict[str, Any] = {}
        for module in (ring, producer):
            own = dict(vars(module))
            for name, value in own.items():
                if hasattr(value, "py_func"):
                    own[name] = python.FunctionType(value.py_func.__code__, space, name, value.py_func.__defaults__)
            space |= {name: value for name, value in own.items() if name not in space or hasattr(value, "__code__")}
            space |= replaced
        made = producer.make_stream_wave(fetch).py_func
        cells = tuple(python.CellType(fetch) for _ in made.__code__.co_freevars)
        space["stream_wave"] = python.FunctionType(made.__code__, space, "stream_wave", None, cells)
        return space

    def box(self, place: int, barrier: int, where: int) -> None:
        """Frames of `tf32_matmul`, which have a map, or rows of a convolution, whose taps follow."""
        found = self.barriers[int(barrier)]
        if where:
            self.copied(place, found.bytes, barrier)
        else:
            taps = found.bytes % layout.WINDOW_BYTES
            while taps % 5 or (found.bytes - taps) % layout.WINDOW_BYTES:
                taps += layout.WINDOW_BYTES
            self.copied(place, found.bytes - taps, barrier)

    def mask(self, address: int) -> Any:
        """A word of the live sessions; or the counter that all blocks see."""
        if address == layout.COUNTER:
            return layout.STOPPED if self.stopped else self.target
        word = (int(address) - ACTIVE) // 8
        return np.uint64(sum(1 << s % 64 for s in self.live if s // 64 == word)).astype(np.int64)
