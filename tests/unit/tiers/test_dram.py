"""Pre-faulting in the background: growth, want of memory, an early stop."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

from kvstore.arena import Arena
from kvstore.tiers import dram
from kvstore.tiers.dram import DramTier
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation, SlotId
from tests.kit.memory_tier import until_populated
from tests.unit.test_arena import punch

CAPACITY_BYTES = 8 * SLOT_BYTES_MIN


class GatedArena(Arena):
    """Lets one populate through per `gate.release()`; fails from `fail_at` on."""

    def __init__(self, *, fail_at: int = CAPACITY_BYTES) -> None:
        super().__init__(arena_bytes=CAPACITY_BYTES, incarnation=Incarnation(1))
        self.gate = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.fail_at = fail_at

    def populate(self, begin: int, end: int) -> None:
        self.arrived.release()
        assert self.gate.acquire(timeout=10)
        if begin >= self.fail_at:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        super().populate(begin, end)


def test_capacity_grows_as_pages_arrive_and_never_ahead_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = GatedArena()
    monkeypatch.setattr(dram, "CHUNK_BYTES", 2 * SLOT_BYTES_MIN)
    tier = DramTier(arena)
    assert tier.ready_bytes == 0
    tier.start()
    seen = []
    for _ in range(4):
        assert arena.arrived.acquire(timeout=10)
        seen.append((tier.ready_bytes, os.fstat(arena.arena_fd).st_blocks * 512))
        arena.gate.release()
    until_populated(tier)
    assert seen == [(n * 2 * SLOT_BYTES_MIN,) * 2 for n in range(4)]
    assert tier.ready_bytes == tier.capacity_bytes == CAPACITY_BYTES
    tier.close()


def test_want_of_memory_leaves_a_smaller_tier(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = GatedArena(fail_at=4 * SLOT_BYTES_MIN)
    monkeypatch.setattr(dram, "CHUNK_BYTES", 2 * SLOT_BYTES_MIN)
    tier = DramTier(arena)
    arena.gate.release(10)
    with caplog.at_level(logging.WARNING):
        tier.start()
        for _ in range(3):
            assert arena.arrived.acquire(timeout=10)
        tier._stop.set()
        tier._thread.join(10)
    assert tier.ready_bytes == 4 * SLOT_BYTES_MIN
    assert "dram stays at 256 KiB of 512 KiB" in caplog.text
    tier.read(SlotId(0), memoryview(bytearray(tier.ready_bytes)))
    with pytest.raises(AssertionError):
        tier.read(SlotId(0), memoryview(bytearray(tier.ready_bytes + 1)))
    tier.close()


def test_closing_stops_the_thread_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = GatedArena()
    monkeypatch.setattr(dram, "CHUNK_BYTES", SLOT_BYTES_MIN)
    tier = DramTier(arena)
    tier.start()
    assert arena.arrived.acquire(timeout=10)
    closer = threading.Thread(target=tier.close)
    closer.start()
    assert tier._stop.wait(10)
    arena.gate.release()
    closer.join(10)
    assert not tier._thread.is_alive()
    assert tier.ready_bytes == SLOT_BYTES_MIN, "one chunk was under way, none was begun"


def test_pages_that_an_engine_gave_back_are_seen_and_taken_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = Arena(arena_bytes=CAPACITY_BYTES, incarnation=Incarnation(1))
    room_bytes = [0]
    tier = DramTier(arena, room_bytes=lambda: room_bytes[0])
    tier.start()
    until_populated(tier)
    arena.array[:] = 1
    tier.look()
    assert (tier.losses, caplog.text) == (0, "")
    for losses in range(1, 6):
        punch(arena, SLOT_BYTES_MIN, 2 * SLOT_BYTES_MIN)
        room_bytes[0] = 2 * SLOT_BYTES_MIN * (losses % 2)
        tier.look()
        assert tier.losses == losses
        missing_bytes = 0 if losses % 2 else 2 * SLOT_BYTES_MIN
        assert CAPACITY_BYTES - arena.taken_bytes == missing_bytes, "what is not there is not taken"
        block = memoryview(bytearray(SLOT_BYTES_MIN))
        tier.read(SlotId(PAGES_PER_GENERATION), block)
        assert not any(block)
        tier.read(SlotId(0), block)
        assert all(block), "its neighbour is as it was"
    assert caplog.text.count("an attached engine gave 128 KiB of the arena back") == 3, "1, 2, 4"
    tier.close()
