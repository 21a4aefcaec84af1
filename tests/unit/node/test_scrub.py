"""The scrub of dram: hashes what the engine lists, outside of the loop, and says what it found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Self, cast

import numpy as np
import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.events import Event
from kvstore.engine.trust import Sealed, SealedBlock
from kvstore.errors import NodeBusy
from kvstore.node import scrub as scrub_module
from kvstore.node.driver import Driver
from kvstore.node.files import PassLog
from kvstore.node.scrub import DramScrub
from kvstore.tier_events import Scrubbed
from kvstore.tiers.file.config import ScrubRate
from kvstore.types import PAGES_PER_GENERATION, SLOT_BYTES_MIN, Shard, SlotId, Tier
from kvstore.wire.record import Scope
from tests.kit.memory_tier import MemoryTier
from tests.kit.reference import checksum

FAST = ScrubRate(1 << 40, daily=False)
SCOPE = Scope("t", b"s" * 32, Shard(0, 1, 0, 1), 5000)
COUNT = 4


class ScrubbedNode:
    """A tier with COUNT blocks, and a driver that answers with two at a time."""

    def __init__(self) -> None:
        self.tier = MemoryTier(capacity_bytes=COUNT * SLOT_BYTES_MIN)
        self.told: list[Scrubbed] = []
        self.is_busy = False
        self.on_query: Callable[[], None] = lambda: None
        self.checksums = []
        for number in range(COUNT):
            self.payload(number)[:] = bytes([number + 1]) * SCOPE.block_bytes
            self.checksums.append(self.checksum(number))

    def slot(self, number: int) -> SlotId:
        return SlotId(number * PAGES_PER_GENERATION)

    def payload(self, number: int) -> memoryview:
        return self.tier.view(self.slot(number), SCOPE.block_bytes)

    def key(self, number: int) -> bytes:
        return bytes([number]) * 32

    def checksum(self, number: int) -> bytes:
        return checksum(SCOPE.prefix() + self.key(number), bytes(self.payload(number)))

    @property
    def scrubs(self) -> Self:
        return self

    def sealed(self, first_word: int) -> Sealed:
        blocks = [
            SealedBlock(SCOPE, self.slot(n), 1, self.key(n), self.checksums[n])
            for n in range(first_word, first_word + 2)
        ]
        return Sealed(blocks, next_word=(first_word + 2) % COUNT)

    def query(self, ask: Callable[[Engine], Any], *, timeout_s: float) -> Any:
        if self.is_busy:
            raise NodeBusy("busy")
        answer = ask(cast("Engine", self))
        self.on_query()
        return answer

    def tell(self, event: Event, *, timeout_s: float) -> None:
        assert isinstance(event, Scrubbed)
        self.told.append(event)


@pytest.fixture
def node() -> ScrubbedNode:
    return ScrubbedNode()


@pytest.fixture
def scrub(node: ScrubbedNode) -> DramScrub:
    return DramScrub(cast("Driver", node), node.tier, FAST)


def run_pass(scrub: DramScrub) -> None:
    word = scrub.look(0)
    while word:
        word = scrub.look(word)


def found(node: ScrubbedNode) -> list[int]:
    return [slot for event in node.told for slot in np.frombuffer(event.slots, "<u4").tolist()]


@pytest.mark.parametrize("at", [0, SCOPE.block_bytes - 1])
def test_a_flipped_bit_is_found(
    node: ScrubbedNode, scrub: DramScrub, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    node.payload(2)[at] ^= 1
    run_pass(scrub)
    assert found(node) == [node.slot(2)]
    (line,) = [m for m in caplog.messages if "dropped 1" in m]
    assert "(first: 02020202)" in line, "of a key no more than 8 digits"
    assert node.key(2).hex() not in caplog.text


def test_an_intact_block_of_another_key_is_found(node: ScrubbedNode, scrub: DramScrub) -> None:
    node.checksums[3] = node.checksums[2]
    run_pass(scrub)
    assert found(node) == [node.slot(3)]


def test_a_slot_that_is_reused_meanwhile_is_not_reported(
    node: ScrubbedNode, scrub: DramScrub
) -> None:
    def reuse() -> None:
        node.tier.raise_generations([node.slot(0)], [2])
        node.payload(0)[:] = bytes(SCOPE.block_bytes)

    node.on_query = reuse
    run_pass(scrub)
    assert found(node) == []


def test_it_reads_no_faster_than_told(node: ScrubbedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    scrub = DramScrub(cast("Driver", node), node.tier, ScrubRate(SCOPE.block_bytes, daily=False))
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return False

    monkeypatch.setattr(scrub._leaving, "wait", wait)
    run_pass(scrub)
    assert sum(waited) == COUNT, "a second for each block"


def test_where_there_is_nothing_to_read_it_rests_and_says_nothing(
    node: ScrubbedNode, scrub: DramScrub, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(scrub._leaving, "wait", waited.append)
    monkeypatch.setattr(node, "sealed", lambda first_word: Sealed([], (first_word + 1) % 3))
    run_pass(scrub)
    assert waited == [scrub_module.IDLE_PAUSE_S] * 3
    assert [event.pass_ended for event in node.told] == [True]


def test_it_goes_on_by_itself_and_ends_when_told(
    node: ScrubbedNode, scrub: DramScrub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_module, "PASS_PAUSE_S", 0.001)
    monkeypatch.setattr(scrub_module, "BUSY_PAUSE_S", 0.001)
    node.is_busy = True
    passes = iter(range(10))
    node.on_query = lambda: None if next(passes, None) is not None else scrub._leaving.set()
    scrub.start()
    node.is_busy = False
    scrub._thread.join(20)
    assert not scrub._thread.is_alive()
    scrub.close()
    assert len(node.told) >= 9


def test_passes_that_find_nothing_are_told_once_an_hour(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    log = PassLog("dram")
    scrubbed = Scrubbed(Tier.DRAM, 5, 500)
    ended = Scrubbed(Tier.DRAM, 5, 500, pass_ended=True)
    for _ in range(3):
        log.add(ended, 0, b"")
    assert [m for m in caplog.messages if "no damage" in m] == caplog.messages
    assert len(caplog.messages) == 1
    caplog.clear()
    log.add(scrubbed, 2, b"\xab" * 32)
    log.add(ended, 1, b"\xcd" * 32)
    first, last = caplog.messages
    assert "abababab" in first
    assert "over 10 blocks" in last
    assert "dropped 3 (first: abababab)" in last
