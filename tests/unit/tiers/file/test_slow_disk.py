"""Stores before loads: what a disk that is a thousand times slower, or stuck, costs, and what not.

Once in virtual time, with a disk that serves reads and writes beside each other, and once with real
threads and a write that hangs.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvstore.breaker import Breaker, BreakerState
from kvstore.tier_events import (
    FileLate,
    FileRead,
    FileWritten,
    ReadFile,
    Resumed,
    Suspended,
    WriteFile,
)
from kvstore.tiers.file import parts as outbox_module, tier as tier_module
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.disk import Disk
from kvstore.tiers.file.parts import Health
from kvstore.tiers.file.tier import FileTier
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from tests.kit.set_clock import SetClock
from tests.sim.world.threads import Threads
from tests.unit.tiers.file.conftest import Start
from tests.unit.tiers.file.kit import (
    BLOCK_BYTES,
    PATIENCE_S,
    SCOPE,
    SEGMENT_BYTES,
    FaultyDisk,
    checksum,
    key,
    payload,
    u64,
)

SLOTS = 64
IO_ERROR = OSError(errno.EIO, "Input/output error")
NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


class SlowDisk(Disk):
    """Each call takes its virtual time: 100 µs and half a nanosecond a byte, times `factor`."""

    def __init__(self, threads: Threads, clock: SetClock) -> None:
        self.factor = 1
        self.due: list[int] = []
        self._threads = threads
        self._clock = clock

    def _take(self, size_bytes: int) -> None:
        due_ns = self._clock.ns + self.factor * (100_000 + size_bytes // 2)
        self.due.append(due_ns)
        self._threads.park(lambda: self._clock.ns >= due_ns)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._take(sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._take(sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)


class VirtualTier:
    """The real tier, its threads taking turns, in time that passes when nobody can go on."""

    def __init__(self, directory: Path) -> None:
        self.clock = SetClock()
        self.threads = Threads(random.Random(1), self.clock.now_ns, self._pass_time)
        self.disk = SlowDisk(self.threads, self.clock)
        self.config = FileConfig(
            directory,
            capacity_bytes=64 * MIB,
            segment_bytes=8 * SEGMENT_BYTES,
            queued_bytes_max=16 * BLOCK_BYTES,
            direct=False,
        )
        self.arena = np.zeros(SLOTS * BLOCK_BYTES, np.uint8)
        with (
            mock.patch.object(tier_module, "threading", self.threads),
            mock.patch.object(outbox_module, "threading", self.threads),
        ):
            self.tier = FileTier(self.config, self.arena, self.clock, disk=self.disk)
        self.threads.start()

    def run_until(self, end_ns: int) -> list[object]:
        """Everybody goes on until then; what the tier said."""
        said: list[object] = []
        while True:
            while self.threads.run_one():
                pass
            while events := list(self.tier.take_events()):
                said += events
            waits = [due_ns for due_ns in self.disk.due if due_ns > self.clock.ns]
            self.clock.ns = min([*waits, end_ns, self.clock.ns + 10 * NS_PER_MS])
            if self.clock.ns >= end_ns:
                return said

    def _pass_time(self) -> None:
        self.clock.ns += 10 * NS_PER_MS

    def close(self) -> None:
        self.disk.factor = 0
        self.tier.close()

    def slots(self, first: int, count: int) -> np.ndarray:
        pages = BLOCK_BYTES // PAGE_BYTES
        return np.arange(first, first + count, dtype=np.uint32) * np.uint32(pages)

    def write(self, job: int, numbers: Sequence[int]) -> bool:
        """From the first slots, which hold what they are said to."""
        names, sums = b"".join(map(key, numbers)), b""
        for index, number in enumerate(numbers):
            data = payload(number)
            self.arena[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] = np.frombuffer(
                data, np.uint8
            )
            sums += checksum(SCOPE, key(number), data)
        return self.tier.submit(WriteFile(job, SCOPE, names, self.slots(0, len(numbers)), sums))

    def read(self, job: int, number: int, place: int) -> bool:
        places, slots = np.array([place], np.uint64).tobytes(), self.slots(40 + job % 20, 1)
        return self.tier.submit(ReadFile(job, SCOPE, key(number), slots, b"", places))


@pytest.fixture
def virtual(tmp_path: Path) -> Iterator[VirtualTier]:
    made = VirtualTier(tmp_path / "store")
    yield made
    made.close()


def test_a_disk_a_thousand_times_slower_drops_stores_while_loads_go_through(
    virtual: VirtualTier,
) -> None:
    assert virtual.write(1, [1, 2, 3, 4])
    said = virtual.run_until(virtual.clock.ns + NS_PER_S)
    (written,) = [e for e in said if isinstance(e, FileWritten)]
    places = u64(written.locations)
    assert all(places)

    virtual.disk.factor = 1000
    begin_ns, job, loads, stores, refused = virtual.clock.ns, 10, [], 0, 0
    said = []
    for turn in range(1500):  # half a minute; a store every 20 ms, a load every 200
        if turn % 10 == 0:
            job += 1
            assert virtual.read(job, 1 + turn % 4, places[turn % 4]), "no load is refused"
            loads.append(job)
        job += 1
        stores += 1
        refused += not virtual.write(job, [1, 2, 3, 4])
        said += virtual.run_until(begin_ns + (turn + 1) * 20 * NS_PER_MS)
    said += virtual.run_until(virtual.clock.ns + 3 * NS_PER_S)
    read = {e.job: e.good for e in said if isinstance(e, FileRead)}
    assert [read[job] for job in loads] == [b"\1"] * len(loads)
    assert not any(isinstance(e, FileLate) and e.job in loads for e in said)
    assert refused > stores // 2, "the queue of stores is full"
    ended = [e for e in said if isinstance(e, FileWritten)]
    assert len(ended) == stores - refused, "each that was taken ends"
    assert any(all(u64(e.locations)) for e in ended), "some are written all the same"
    assert virtual.tier.breakers[0] is BreakerState.CLOSED

    virtual.disk.factor = 1
    virtual.run_until(virtual.clock.ns + 60 * NS_PER_S)
    assert virtual.write(9999, [1, 2, 3, 4])
    said = virtual.run_until(virtual.clock.ns + NS_PER_S)
    assert any(isinstance(e, FileWritten) and e.job == 9999 and all(u64(e.locations)) for e in said)


def test_a_stuck_write_with_a_full_queue_costs_stores_only(start: Start, disk: FaultyDisk) -> None:
    driver = start(queued_bytes_max=8 * BLOCK_BYTES, failures_max=1)
    driver.write([1, 2, 3])
    disk.hang.add("pwritev")
    assert driver.start_write([1, 2, 3])
    assert disk.hanging.acquire(timeout=PATIENCE_S)
    assert driver.start_write([1, 2, 3])
    assert not driver.start_write([1, 2, 3]), "the queue is full: the store is dropped, at once"
    assert driver.read([1, 2, 3]) == [True, True, True]
    driver.clock.advance_ms(10_001)
    driver.tier.expire()
    assert driver.wait(Suspended).writes_only
    assert [state.value for state in driver.tier.breakers] == ["closed", "open"]
    assert not driver.start_write([1]), "not even a small one"
    assert driver.read([1, 2, 3]) == [True, True, True]
    disk.go_on()
    driver.wait(FileWritten, lambda e: any(u64(e.locations)))
    driver.clock.advance_ms(1_001)
    assert 0 not in driver.write([4])
    assert driver.wait(Resumed).writes_only
    assert [state.value for state in driver.tier.breakers] == ["closed", "closed"]


# ── breakers ─────────────────────────────────────────────────────────────────────────────────────


def state(breaker: Breaker) -> str:
    return breaker.state.value


def test_one_probe_is_out_at_a_time() -> None:
    breaker = Breaker(failures_max=1, cooldown_ms=10, patience_ms=100)
    assert state(breaker) == "closed"
    breaker.failed(0)
    assert state(breaker) == "open"
    now = 10 * NS_PER_MS
    assert breaker.may_allow(now)
    assert state(breaker) == "open", "asking takes nothing"
    assert breaker.allows(now)
    assert state(breaker) == "half-open"
    assert not breaker.allows(now + 99 * NS_PER_MS), "the probe hangs longer than the cool-down"
    assert breaker.allows(now + 100 * NS_PER_MS), "it said nothing, and never will"
    breaker.failed(now + 101 * NS_PER_MS)
    assert state(breaker) == "open"
    assert not breaker.allows(now + 120 * NS_PER_MS), "the cool-down doubled"
    assert breaker.allows(now + 121 * NS_PER_MS)
    assert breaker.succeeded()
    assert state(breaker) == "closed"


@pytest.fixture
def health(tmp_path: Path) -> Health:
    return Health(FileConfig(tmp_path, capacity_bytes=8 * MIB, failures_max=2))


def test_writes_that_fail_leave_reads_alone(health: Health) -> None:
    assert health.failed_writing(0, IO_ERROR) == []
    (told,) = health.failed_writing(0, None)
    assert isinstance(told, Suspended)
    assert told.writes_only
    assert health.is_well
    assert health.allows_read(0)
    assert not health.allows_write(0)
    assert health.read() == [], "a read proves nothing of writes"
    assert health.states == (BreakerState.CLOSED, BreakerState.OPEN)
    assert health.allows_write(1_000 * NS_PER_MS)
    assert health.wrote() == [Resumed(writes_only=True)]


def test_reads_that_fail_stop_both_until_either_works(health: Health) -> None:
    for _ in range(2):
        told = health.failed_reading(0, IO_ERROR)
    assert [e.writes_only for e in told if isinstance(e, Suspended)] == [False]
    assert health.states == (BreakerState.OPEN, BreakerState.OPEN)
    probe_ns = 1_000 * NS_PER_MS
    assert health.allows_write(probe_ns), "a write may be the probe"
    assert not health.allows_read(probe_ns), "one at a time"
    health.failed_writing(probe_ns, IO_ERROR)
    assert not health.allows_read(probe_ns + 1_999 * NS_PER_MS), "it failed: twice as long"
    assert health.allows_read(probe_ns + 2_000 * NS_PER_MS)
    assert health.read() == [Resumed(writes_only=False)]


def test_a_write_that_one_breaker_refuses_is_no_probe_of_another(health: Health) -> None:
    health.failed_writing(0, NO_ROOM)
    for _ in range(2):
        health.failed_reading(500 * NS_PER_MS, IO_ERROR)
    assert not health.allows_write(1_200 * NS_PER_MS), "room may be tried, reads not yet"
    assert health.allows_write(1_500 * NS_PER_MS)
    assert health.wrote() == [Resumed(writes_only=True), Resumed(writes_only=False)]
