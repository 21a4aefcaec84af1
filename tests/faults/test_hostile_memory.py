"""Engines that write whatever they like to the memory they share: no decision of the node depends
on it, and it reaches nothing of others.

Covers: images of the whole arena against a twin whose arena nobody touches; scribbling
from another thread while the file tier writes from the same slots and reads beside them. What
engines cannot write at all, the generation page, is in `tests/unit/test_arena.py`.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.arena import MAGIC, Arena
from kvstore.engine.events import Event, Received, Send, Tick
from kvstore.tier_events import FileRead, FileWritten, RaiseGenerations, ReadFile, WriteFile
from kvstore.tiers.dram import DramTier
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, ConnectionId, Incarnation
from kvstore.wire.messages import Hint, LeaseAsk, LeaseRelease, encode
from kvstore.wire.record import Scope
from kvstore.wire.segment import SegmentHead, segment_page
from tests.amounts import amount, covered
from tests.faults.mutate import no_growth
from tests.kit.engine_check import check_engine
from tests.kit.memory_tier import until_populated
from tests.unit.engine.harness import Node, Peer, keys
from tests.unit.tiers.file.kit import BLOCK_BYTES, SCOPE, Driver, checksum, key, payload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IMAGES = amount(16_000, nightly=100_000)
PARTS = 4
SLOTS = 4
ARENA_BYTES = SLOTS * SLOT_BYTES_MIN


# ── every image of the arena ─────────────────────────────────────────────────────────────────────


class Twin:
    """A node's engine and memory, and what it decided, in bytes that can be compared."""

    def __init__(self) -> None:
        self.node = Node(slots=SLOTS, credit_share=0.25)
        self.peer = Peer(self.node)
        self.arena = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(7))
        self.tier = DramTier(self.arena)
        self.tier.start()
        until_populated(self.tier)
        self.used = 0
        for number in range(3):
            self.peer.store(number)
        self._raise_all()

    def _raise_all(self) -> None:
        slots = np.array(list(self.node.raised), np.uint32)
        values = np.array(list(self.node.raised.values()), np.uint64)
        self.tier.raise_generations(slots.tolist(), values.tolist())

    def decide(self, event: Event) -> list[bytes]:
        """One step, as the loop and the executor do it."""
        self.node.now_ns += 1_000_000
        said = []
        for command in self.node.engine.step([event], self.node.now_ns):
            match command:
                case RaiseGenerations(slots=slots, generations=generations):
                    self.tier.raise_generations(slots.tolist(), generations.tolist())
                    said.append(slots.tobytes() + generations.tobytes())
                case Send(connection=connection, message=message):
                    said.append(bytes([connection]) + encode(message))
                case _:
                    said.append(repr(command).encode())
        return said


def scribbles(arena: NDArray[np.uint8], source: random.Random) -> Iterator[int]:
    """Fill the whole arena anew each time: noise, and things that look like the node's own."""
    noise = [np.frombuffer(source.randbytes(ARENA_BYTES), np.uint8) for _ in range(16)]
    head = segment_page(SegmentHead(bytes(16), bytes(16), 1))
    words = np.array([MAGIC, 1, 7, 1 << 62, ARENA_BYTES] * 512, np.uint64).tobytes()[:PAGE_BYTES]
    pages = [np.frombuffer(page, np.uint8) for page in (head, words, b"\xff" * PAGE_BYTES)]
    for number in itertools.count():
        arena[:] = noise[number % len(noise)]
        at = source.randrange(ARENA_BYTES // PAGE_BYTES) * PAGE_BYTES
        arena[at : at + PAGE_BYTES] = pages[number % 3]
        arena[at : at + 8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        yield number


@pytest.mark.parametrize("part", range(PARTS))
def test_no_image_of_the_arena_changes_a_decision(part: int) -> None:
    source = random.Random(part)
    hostile, twin = Twin(), Twin()
    scribble = scribbles(hostile.arena.array, source)
    stored = itertools.count(3)
    leases = itertools.count(1)
    try:
        with no_growth():
            for image in range(IMAGES // PARTS):
                assert next(scribble) == image
                event = choose(hostile, source, stored, leases)
                assert hostile.decide(event) == twin.decide(event)
                if image % 500 == 0:
                    check_engine(hostile.node.engine)
                    assert (hostile.arena._generations == twin.arena._generations).all()
                    assert hostile.arena._header[:3].tolist() == [MAGIC, 1, 7]
                    untouched = twin.arena.array
                    assert not untouched.any(), "somebody wrote to the twin's"
        assert next(stored) > IMAGES // PARTS // 50, "nothing was stored"
        covered("images of hostile memory", IMAGES // PARTS)
    finally:
        hostile.tier.close()
        twin.tier.close()


def choose(
    twin: Twin, source: random.Random, stored: Iterator[int], leases: Iterator[int]
) -> Event:
    """What an engine does next: most of the time it asks."""
    peer, scheduler = twin.peer, ConnectionId(twin.peer.scheduler)
    match source.randrange(8):
        case 0:
            places = peer_credits(twin)
            if places:
                return peer.sealed(next(stored), places=places[:1])
            return Tick()
        case 1:
            return Tick()
        case 2 | 3:
            return Received(scheduler, LeaseRelease(list(range(next(leases) - 20, next(leases)))))
        case 4:
            return Received(scheduler, Hint(1, keys(*source.sample(range(2_000), 3))))
        case _:
            return Received(scheduler, LeaseAsk(next(leases), keys(*source.sample(range(40), 3))))


def peer_credits(twin: Twin) -> list[tuple[int, int]]:
    """Slots that the rank may write now, asked of the engine: its grants are not kept here."""
    slots = twin.node.engine._state.slots
    words = slots.of_writer(ConnectionId(twin.peer.ranks[0]))
    where = slots.slots_of(words).tolist()
    return list(zip(where, slots.generation[words].tolist(), strict=True))


# ── while the node is at work ────────────────────────────────────────────────────────────────────

SCRIBBLES = amount(20_000, nightly=100_000)
ROUNDS = amount(15, nightly=60)
HOSTILE = Scope("hostile", SCOPE.space, SCOPE.shard, BLOCK_BYTES)
PAGES = BLOCK_BYTES // PAGE_BYTES


class Scribbler:
    """Writes to slots 0 to 7 all the time."""

    def __init__(self, arena: NDArray[np.uint8]) -> None:
        self.count = 0
        self._arena = arena[: 8 * BLOCK_BYTES]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        source = np.random.default_rng(1)
        while not self._is_over.is_set():
            for at in source.integers(0, len(self._arena), 64).tolist():
                self._arena[at] ^= 0x55
                self.count += 1

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_scribbling_while_the_file_tier_works_harms_only_the_scribbler(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.on_reclaim = lambda event: driver.reclaim(event.segment, [])
    scribbler = Scribbler(driver.arena)
    numbers = itertools.count()
    jobs = itertools.count(1)
    missed = 0
    try:
        rounds = 0
        while rounds < ROUNDS or scribbler.count < SCRIBBLES:
            rounds += 1
            mine = [next(numbers) for _ in range(4)]
            put(driver, mine, first_slot=32)
            put(driver, mine, first_slot=0)
            places = {
                scope: stored(driver, next(jobs), scope, mine, first_slot)
                for scope, first_slot in ((SCOPE, 32), (HOSTILE, 0))
            }
            good = fetched(driver, next(jobs), SCOPE, mine, places[SCOPE], first_slot=40)
            assert good == [True] * 4, "somebody else's block was lost"
            good = fetched(driver, next(jobs), HOSTILE, mine, places[HOSTILE], first_slot=16)
            missed += good.count(False)
            assert driver.slot(32).tobytes() == payload(mine[0]), "it reached a slot of another"
            driver.seen.clear()
    finally:
        scribbler.stop()
        driver.close()
    assert missed, "no block was ever hit: the test tests nothing"


def put(driver: Driver, numbers: list[int], *, first_slot: int) -> None:
    for slot, number in enumerate(numbers, start=first_slot):
        driver.slot(slot)[:] = np.frombuffer(payload(number), np.uint8)


def stored(driver: Driver, job: int, scope: Scope, numbers: list[int], first: int) -> bytes:
    """Write through, with the checksums of what was meant; the locations."""
    slots = np.arange(first, first + len(numbers), dtype=np.uint32) * PAGES
    sums = b"".join(checksum(scope, key(n), payload(n)) for n in numbers)
    assert driver.tier.submit(WriteFile(job, scope, b"".join(map(key, numbers)), slots, sums))
    return driver.wait(FileWritten, lambda event: event.job == job).locations


def fetched(
    driver: Driver, job: int, scope: Scope, numbers: list[int], places: bytes, *, first_slot: int
) -> list[bool]:
    """Read back beside the scribbler; whatever is called good is compared."""
    slots = np.arange(first_slot, first_slot + len(numbers), dtype=np.uint32) * PAGES
    names = b"".join(map(key, numbers))
    assert driver.tier.submit(ReadFile(job, scope, names, slots, b"", places))
    good = [bool(b) for b in driver.wait(FileRead, lambda event: event.job == job).good]
    for slot, number, is_good in zip(itertools.count(first_slot), numbers, good, strict=False):
        assert not is_good or driver.slot(slot).tobytes() == payload(number), "a wrong byte"
    return good
