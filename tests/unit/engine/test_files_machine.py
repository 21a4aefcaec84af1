"""Any order of stores, lookups and what a disk may do: nobody is ever served another block's bytes.

The oracle is an arena outside the engine: what was sealed or read into each slot, by generation. A
lease, whether it came at once or grew, must name slots that hold the blocks it was asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    initialize,
    invariant,
    rule,
)

from kvstore.engine.events import Clear
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.writes import Writes
from kvstore.tier_events import FileKnown, FileRead, FileReclaim, FileWritten, ReadFile
from kvstore.wire.messages import LeaseMore, LeaseRelease, LeaseReply
from tests.amounts import amount
from tests.kit.moves_check import pinned_words
from tests.kit.planted import Patch, instead_of
from tests.steps import CountedMachine, verify_machine
from tests.unit.engine.disk import RECORD_BYTES, SCOPE, DiskNode, gone, known, moved, slow_disk
from tests.unit.engine.harness import Peer, key, keys, pairs

BLOCKS = 8
numbers = st.integers(0, BLOCKS - 1)
KEY_OF = {key(number): number for number in range(BLOCKS)}


class DiskMachine(CountedMachine):
    """One engine on a node of 16 slots, with a disk that the rules drive."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.node = self.make_node(
            slots=16, slab_slots=4, credit_share=0.25, block_count_max=24, **self.config
        )
        self.peer = Peer(self.node)
        self.arena: dict[tuple[int, int], int] = {}
        """What each slot holds, by generation."""
        self.disk: dict[int, int] = {}
        """What each location holds."""
        self.place = 1
        self.written = 0
        """Records by this node, kept ones included."""
        self.lease = 0
        self.leased: dict[int, list[int]] = {}
        """Blocks that each open lease still waits for, in order."""
        self.heard = 0
        self.promised: dict[int, int] = {}
        """Blocks that each lease was told to be on their way, when it heard of them last."""

    def make_node(self, **config: Any) -> DiskNode:
        """What the rules drive."""
        return DiskNode(**config)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    @rule(number=numbers)
    def stores(self, number: int) -> None:
        if unused := self.peer.unused():
            self.arena[unused[0]] = number
            self.peer.seal(number)
            self.listen()

    @rule(first=numbers, count=st.integers(1, 6))
    def looks_up(self, first: int, count: int) -> None:
        wanted = list(range(first, min(first + count, BLOCKS)))
        self.lease += 1
        self.leased[self.lease] = wanted
        self.peer.lease(self.lease, *wanted)
        self.listen()

    @rule(first=numbers, count=st.integers(1, 6))
    def hints(self, first: int, count: int) -> None:
        self.peer.hint(*range(first, min(first + count, BLOCKS)))

    @rule()
    def lets_go(self) -> None:
        if self.leased:
            lease = min(self.leased)
            del self.leased[lease]
            self.node.hear(self.peer.scheduler, LeaseRelease([lease]))

    @rule()
    def clears(self) -> None:
        self.node.step(Clear(None, None))

    @rule(ms=st.sampled_from([1, 600, 11_000]))
    def time_passes(self, ms: int) -> None:
        self.node.tick(ms)
        if ms > self.node.config.lease_ttl_ms:
            self.leased.clear()
        self.listen()

    # ── the disk ─────────────────────────────────────────────────────────────────────────────────

    @rule(works=st.booleans(), pick=st.integers(0, 9))
    def a_write_ends(self, pick: int, *, works: bool) -> None:
        if not self.node.writes:
            return
        write = self.node.writes.pop(pick % len(self.node.writes))
        written = []
        for at in range(0, len(write.keys), 32):
            written.append(self.place if works else 0)
            if works:
                self.disk[self.place] = KEY_OF[write.keys[at : at + 32]]
                self.place += 1
                self.written += 1
        self.node.step(FileWritten(write.job, np.array(written, "<u8").tobytes()))
        self.listen()

    @rule(good=st.booleans(), pick=st.integers(0, 9))
    def a_read_ends(self, pick: int, *, good: bool) -> None:
        if self.node.reads:
            read = self.node.reads[pick % len(self.node.reads)]
            self.node.answer(read, self.bytes_arrive(read, good=good))
            self.listen()

    @rule(pick=st.integers(0, 9))
    def a_read_is_late(self, pick: int) -> None:
        if self.node.reads:
            self.node.be_late(self.node.reads[pick % len(self.node.reads)])
            self.listen()

    @initialize()
    def a_disk_with_records(self) -> None:
        self.records_are_found(0, BLOCKS)

    @rule(first=numbers, count=st.integers(1, BLOCKS))
    def records_are_found(self, first: int, count: int) -> None:
        found = range(first, min(first + count, BLOCKS))
        self.disk.update(zip(range(self.place, self.place + len(found)), found, strict=True))
        self.node.step(known(*found, at=self.place))
        self.place += len(found)
        self.listen()

    @rule(number=numbers)
    def a_record_is_lost(self, number: int) -> None:
        self.node.step(gone(number))

    @rule(first=st.integers(1, 60))
    def a_segment_is_reclaimed(self, first: int) -> None:
        """Records whose locations follow each other; what is kept moves."""
        held = [at for at in range(first, first + 8) if at in self.disk]
        names = [self.disk[at] for at in held]
        if len(set(names)) < len(names) or not held:
            return
        part = FileKnown(SCOPE, keys(*names), np.array(held, "<u8").tobytes(), b"")
        self.node.step(FileReclaim(1, (part,)))
        kept = np.frombuffer(self.node.reclaimed.pop().keep, "<u8").tolist()
        self.written += len(kept)
        for at in held:
            number = self.disk.pop(at)
            if at in kept:
                self.disk[self.place] = number
                self.node.step(moved(number, old=at, new=self.place))
                self.place += 1
        self.listen()

    def bytes_arrive(self, read: ReadFile, *, good: bool) -> list[bool]:
        """What is on disk at the places asked for; the tier finds out whether it is the block."""
        verified = []
        generations = self.node.state.slots.generation
        for at, slot in enumerate(read.slots.tolist()):
            location = int(np.frombuffer(read.locations, "<u8")[at])
            wanted = KEY_OF[read.keys[32 * at : 32 * at + 32]]
            found = self.disk.get(location) if good else None
            verified.append(found == wanted)
            if found is not None:
                self.arena[slot, int(generations[slot // 16])] = found
        return verified

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def listen(self) -> None:
        """Every block of every lease, in order, is the one that was asked for."""
        sent = self.node.sent[self.peer.scheduler]
        for message in sent[self.heard :]:
            if isinstance(message, LeaseReply | LeaseMore) and message.lease in self.leased:
                wanted = self.leased[message.lease]
                for place in pairs(message):
                    assert wanted, "another block's bytes, behind the last"
                    assert self.arena.get(place) == wanted.pop(0), "another block's bytes"
                assert message.promoting <= len(wanted)
            if isinstance(message, LeaseReply | LeaseMore):
                self.promised[message.lease] = message.promoting
        self.heard = len(sent)

    @invariant()
    def consistent(self) -> None:
        held = (self.node.state.slots.writer == -1).sum()
        assert held == sum(len(read.keys) // 32 for read in self.node.reads)

    def teardown(self) -> None:
        """The disk answers everything, all leases go: nothing is held any more."""
        while self.node.reads:
            self.a_read_ends(0, good=True)
        self.node.write_all()
        self.listen()
        assert not any(self.promised[lease] for lease in self.leased), "a wait that does not end"
        while self.leased:
            self.lets_go()
        files = self.node.engine.files
        assert not self.node.engine._arrivals._watches
        assert files._reads.moving_bytes == files.writes._jobs.moving_bytes == 0
        assert not files.writes._jobs.at.any()
        assert not files._reads.at.any()
        assert not self.node.state.slots.leases.any()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk reads one block at a time: all others queue for it."""
    slow_disk(monkeypatch)


@pytest.mark.usefixtures("each_policy")
def test_any_order_of_stores_lookups_and_disk_keeps_the_promises() -> None:
    verify_machine(DiskMachine, examples=amount(25, nightly=150))


@pytest.mark.usefixtures("crowded")
def test_whoever_queues_for_the_disk_is_told_when_it_ends() -> None:
    verify_machine(DiskMachine, examples=amount(100, nightly=250))


class ThriftyMachine(DiskMachine):
    """The same with a budget of five blocks, the last of which go to what was seen before."""

    config: ClassVar[dict[str, Any]] = {"file_day_bytes": 5 * RECORD_BYTES}

    @initialize()
    def a_disk_with_records(self) -> None:
        """None: what is on disk is not written."""

    def time_passes(self, ms: int) -> None:
        """It does not: budget would come back."""

    @invariant()
    def paid(self) -> None:
        writes = self.node.engine.files.writes
        under_way = sum(len(write.keys) // 32 for write in self.node.writes)
        left = writes.budget_left_bytes()
        assert left is not None
        assert left + (under_way + self.written) * RECORD_BYTES == 5 * RECORD_BYTES


def test_whatever_is_written_is_paid_for() -> None:
    verify_machine(ThriftyMachine, examples=amount(30, nightly=100))


@instead_of(Files, "read")
def every_read_is_trusted(read: Any, self: Files, event: FileRead) -> None:
    read(self, FileRead(event.job, b"\x01" * len(event.good)))


@instead_of(Writes, "offer")
def the_pin_is_forgotten(offer: Any, self: Writes, *arguments: object, **names: object) -> None:
    before = pinned_words(self)
    offer(self, *arguments, **names)
    new = pinned_words(self)[len(before) :]
    self._state.slots.leases[new] -= 1


@pytest.mark.parametrize("broken", [every_read_is_trusted, the_pin_is_forgotten])
def test_a_broken_file_side_is_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        verify_machine(DiskMachine, examples=400, broken_seed=0)
