"""DeviceCopies on the simulated device, between an engine's own writes: 0 wrong bytes, and each
event that is not waited for is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from kvstore.kernels.device import COPIES_MAX, DeviceCopies
from kvstore.kernels.reference import Bytes, checksum
from kvstore.kernels.slab import MappedSlab
from kvstore.kernels.strategy import BlockMoves
from kvstore.ports import CopyEnd, CopyWay
from kvstore.wire.layout import Slab
from tests.amounts import amount
from tests.kit.copy_parties import (
    BLOCKS,
    HEADER,
    SLOTS,
    DeviceParty,
    MoveParty,
    StagedCudaParty,
    StagedParty,
    noise,
)
from tests.kit.simulated_device import SimulatedDevice
from tests.steps import CountedMachine

BLOCK, SLOT = st.integers(0, BLOCKS - 1), st.integers(0, SLOTS - 1)


class Order(NamedTuple):
    way: CopyWay
    block: int
    slot: int
    data: bytes
    """What it moves."""


class CopyMachine(CountedMachine):
    """Truth: what each block holds once all is done that the engine has launched, and each slot
    once the copies that were ordered are."""

    party_class: ClassVar[type[DeviceParty]] = DeviceParty

    @initialize(seed=st.integers(0, 10_000))
    def begin(self, seed: int) -> None:
        self.party = self.party_class(
            (48, 48, 24), block_major=bool(seed % 2), values="", seed=seed
        )
        size = self.party.block_bytes
        self.party.order(CopyWay.STORE, 0, 0)  # pins the slots: the one thing done by a thread
        self.party.ended(1)
        self.blocks, self.slots = [bytes(size)] * BLOCKS, [bytes(size)] * SLOTS
        self.under_way: dict[int, Order] = {}
        self.seen: list[tuple[bytes, bytes]] = []
        """What the engine read, and what it should have."""
        self.values = 0
        self.prepare()

    def prepare(self) -> None:
        """What else a machine needs."""

    def new_value(self) -> bytes:
        self.values += 1
        return noise(self.party.block_bytes, self.values)

    def blocks_of(self, *ways: CopyWay) -> set[int]:
        return {order.block for order in self.under_way.values() if order.way in ways}

    def slots_of(self, *ways: CopyWay) -> set[int]:
        return {order.slot for order in self.under_way.values() if order.way in ways}

    # ── the engine ───────────────────────────────────────────────────────────────────────────────

    @rule(block=BLOCK)
    def compute(self, block: int) -> None:
        if block in self.blocks_of(*CopyWay):
            return  # what a fence, and a request that waits for its load, forbid
        self.blocks[block] = data = self.new_value()
        self.party.write(block, data)

    @rule(block=BLOCK)
    def attend(self, block: int) -> None:
        if block in self.blocks_of(CopyWay.LOAD, CopyWay.CLEAR):
            return
        due, seen, party = self.blocks[block], self.seen, self.party

        def read(memory: Bytes) -> None:
            seen.append((party.block_of(memory, block), due))

        party.device.launch(read)

    @rule(block=BLOCK)
    def reuse_after_a_fence(self, block: int) -> None:
        while block in self.blocks_of(*CopyWay):
            self.take_ends()
        self.compute(block)

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    @property
    def has_room(self) -> bool:
        return len(self.under_way) < COPIES_MAX

    def order(self, way: CopyWay, block: int, slot: int, data: bytes, **more: int) -> None:
        number = self.party.order(way, block, slot, after=self.party.copies.mark(), **more)
        self.under_way[number] = Order(way, block, slot, data)

    @precondition(lambda self: self.has_room)
    @rule(block=BLOCK, slot=SLOT)
    def store(self, block: int, slot: int) -> None:
        writers = self.blocks_of(CopyWay.LOAD, CopyWay.CLEAR)
        if block not in writers and slot not in self.slots_of(CopyWay.STORE, CopyWay.LOAD):
            self.order(CopyWay.STORE, block, slot, self.blocks[block])

    @precondition(lambda self: self.has_room)
    @rule(block=BLOCK, slot=SLOT)
    def load(self, block: int, slot: int) -> None:
        if block not in self.blocks_of(*CopyWay) and slot not in self.slots_of(CopyWay.STORE):
            self.order(CopyWay.LOAD, block, slot, self.slots[slot])

    @precondition(lambda self: self.has_room)
    @rule(block=BLOCK)
    def clear(self, block: int) -> None:
        if block not in self.blocks_of(*CopyWay):
            self.order(CopyWay.CLEAR, block, -1, bytes(self.party.block_bytes))

    @rule()
    def take_ends(self) -> None:
        for end in self.party.copies.ended():
            self.ended(self.under_way.pop(end.number), end)

    def ended(self, order: Order, end: CopyEnd) -> None:
        assert not end.reason
        if order.way is CopyWay.STORE:
            assert self.party.slot(order.slot).tobytes() == order.data
            self.slots[order.slot] = order.data
        else:
            self.blocks[order.block] = order.data
        if order.way is not CopyWay.CLEAR:
            assert end.checksum == checksum(HEADER, order.data)

    @rule(turns=st.integers(1, 8))
    def pass_time(self, turns: int) -> None:
        for _ in range(turns):
            self.party.device.turn()

    def teardown(self) -> None:
        if not hasattr(self, "party"):
            return
        for _ in range(10_000):
            if not self.under_way:
                break
            self.take_ends()
        assert not self.under_way, "some never end"
        for block in range(BLOCKS):
            self.attend(block)
        self.party.close()
        assert all(found == due for found, due in self.seen)
        super().teardown()


RUNS = settings(max_examples=amount(120, nightly=5000), stateful_step_count=40, deadline=None)
TestCopies = CopyMachine.TestCase
TestCopies.settings = RUNS


class MoveMachine(CopyMachine):
    """Pieces are moved by kernels."""

    party_class = MoveParty


class StagedMachine(CopyMachine):
    """Blocks go through staging memory."""

    party_class = StagedParty


class SlabMachine(StagedMachine):
    """Blocks come from a slab, too, and their checksums are those of the pages."""

    def prepare(self) -> None:
        size, self.node = self.party.block_bytes, SimulatedDevice(1, 4096)
        self.held = [noise(size, 1000 + at) for at in range(SLOTS)]
        whole = np.frombuffer(b"".join(self.held), np.uint8)
        slab = self.node.allocate(whole.size)
        self.node.pin(whole.ctypes.data, whole.size)
        ends = (slab, whole.ctypes.data, whole.size)
        self.node.copy(
            self.node.stream(is_urgent=False), *(np.array([end], np.uint64) for end in ends)
        )
        self.node.finish()
        found = Slab("simulated", whole.size, self.node.share(slab))
        assert self.party.copies.map_slab(found) == ""

    @precondition(lambda self: self.has_room)
    @rule(block=BLOCK, at=SLOT)
    def load_from_the_slab(self, block: int, at: int) -> None:
        if block not in self.blocks_of(*CopyWay):
            begin = at * self.party.block_bytes
            self.order(CopyWay.LOAD, block, at, self.held[at], slab_begin=begin)


class CudaMachine(CopyMachine):
    """The same through the calls of CUDA."""

    party_class = StagedCudaParty


TestMoves = MoveMachine.TestCase
TestMoves.settings = RUNS
TestStagedCopies = StagedMachine.TestCase
TestStagedCopies.settings = RUNS
TestSlabCopies = SlabMachine.TestCase
TestSlabCopies.settings = RUNS
TestCudaCopies = CudaMachine.TestCase
TestCudaCopies.settings = RUNS


# ── what it finds ────────────────────────────────────────────────────────────────────────────────

Replace = Callable[[type, str, Any], None]


def _stream_does_not_wait(replace: Replace, number: int) -> None:
    wait = SimulatedDevice.wait

    def forgets(device: SimulatedDevice, stream: int, event: int) -> None:
        if stream != number:
            wait(device, stream, event)

    replace(SimulatedDevice, "wait", forgets)


def stores_do_not_wait(replace: Replace) -> None:
    _stream_does_not_wait(replace, 1)


def loads_do_not_wait(replace: Replace) -> None:
    _stream_does_not_wait(replace, 2)


def an_older_mark_is_waited_for(replace: Replace) -> None:
    wait_for = DeviceCopies._wait_for

    def waits(copies: DeviceCopies, mark: int, stream: int) -> None:
        wait_for(copies, mark - 1, stream)

    replace(DeviceCopies, "_wait_for", waits)


def a_copy_ends_when_it_is_begun(replace: Replace) -> None:
    replace(DeviceCopies, "_is_over", lambda copies, flight: True)


def marks_are_of_another_stream(replace: Replace) -> None:
    record = SimulatedDevice.record

    def records(device: SimulatedDevice, event: int, stream: int | None) -> None:
        record(device, event, 1 if stream is None else stream)

    replace(SimulatedDevice, "record", records)


def a_store_is_hashed_when_it_is_begun(replace: Replace) -> None:
    begin, arrived = DeviceCopies._begin, DeviceCopies._arrived
    early: dict[int, bytes] = {}

    def begins(copies: DeviceCopies, batch: list[Any]) -> None:
        begin(copies, batch)
        for copy in (flight.copy for flight in batch if flight.copy.way is CopyWay.STORE):
            early[copy.number] = checksum(HEADER, copies._slot(copy).tobytes())

    def arrives(copies: DeviceCopies, flight: Any, stream: int) -> None:
        arrived(copies, flight, stream)
        if flight.copy.way is CopyWay.STORE:
            flight.hashing = lambda: early[flight.copy.number]

    replace(DeviceCopies, "_begin", begins)
    replace(DeviceCopies, "_arrived", arrives)


def streams_share_staging_memory(replace: Replace) -> None:
    begin = BlockMoves.__init__

    def begins(moves: BlockMoves, *arguments: Any, **more: Any) -> None:
        begin(moves, *arguments, **more)
        for stream in moves._staging:
            moves._staging[stream] = max(moves._staging.values())

    replace(BlockMoves, "__init__", begins)
    replace(BlockMoves, "close", lambda moves: None)
    replace(SimulatedDevice, "allocation_count", 1)


def blocks_share_staging_memory(replace: Replace) -> None:
    staged = BlockMoves._staged

    def of_the_first(moves: BlockMoves, stream: int, count: int) -> Any:
        return np.repeat(staged(moves, stream, 1), count)

    replace(BlockMoves, "_staged", of_the_first)


def only_the_first_mark_of_a_batch_is_waited_for(replace: Replace) -> None:
    begin = DeviceCopies._begin

    def begins(copies: DeviceCopies, batch: list[Any]) -> None:
        for flight in batch:
            flight.copy = flight.copy._replace(after=batch[0].copy.after)
        begin(copies, batch)

    replace(DeviceCopies, "_begin", begins)


def a_block_is_scattered_by_another_stream(replace: Replace) -> None:
    move = SimulatedDevice.move

    def moves(device: SimulatedDevice, stream: int, *pieces: Any) -> None:
        move(device, 3 - stream, *pieces)

    replace(SimulatedDevice, "move", moves)


def a_copy_ends_before_its_kernel(replace: Replace) -> None:
    """Its event is recorded between the two steps."""
    load, move, record = BlockMoves.load, SimulatedDevice.move, SimulatedDevice.record
    late: list[Any] = []

    def loads(moves: BlockMoves, *arguments: Any) -> None:
        replace(SimulatedDevice, "move", lambda device, *given: late.append(given))
        load(moves, *arguments)
        replace(SimulatedDevice, "move", move)

    def records(device: SimulatedDevice, event: int, stream: int | None) -> None:
        record(device, event, stream)
        while late:
            move(device, *late.pop())

    replace(BlockMoves, "load", loads)
    replace(SimulatedDevice, "record", records)


def a_block_is_hashed_by_another_stream(replace: Replace) -> None:
    """It does not wait for the block."""
    digest = SimulatedDevice.digest

    def digests(device: SimulatedDevice, stream: int, *given: Any, **more: int) -> None:
        digest(device, 3 - stream, *given, **more)

    replace(SimulatedDevice, "digest", digests)


def the_slab_is_hashed_before_the_block_is_loaded(replace: Replace) -> None:
    load, total = MappedSlab.load, MappedSlab.sum
    late: list[Any] = []
    replace(MappedSlab, "load", lambda slab, *order: late.append(order))

    def sums(slab: MappedSlab, *order: Any) -> None:
        total(slab, *order)
        load(slab, *late.pop())

    replace(MappedSlab, "sum", sums)


def digests_are_looked_at_before_they_are_there(replace: Replace) -> None:
    """The end of a load is marked before its digests are on their way."""
    total, record = MappedSlab.sum, SimulatedDevice.record
    late: list[Any] = []
    replace(MappedSlab, "sum", lambda *order: late.append(order))

    def records(device: SimulatedDevice, event: int, stream: int | None) -> None:
        record(device, event, stream)
        while late:
            total(*late.pop())

    replace(SimulatedDevice, "record", records)


def blocks_share_their_digests(replace: Replace) -> None:
    """One place of pinned memory for all loads under way."""
    total, root = MappedSlab.sum, MappedSlab.root
    first: list[Bytes] = []

    def sums(slab: MappedSlab, stream: int, group: int, pages: Any, into: int) -> None:
        total(slab, stream, group, pages, first[0].ctypes.data if first else into)

    begin = DeviceCopies.__init__

    def begins(copies: DeviceCopies, *arguments: Any, **more: Any) -> None:
        begin(copies, *arguments, **more)
        first[:] = [copies._staging[0]]

    replace(DeviceCopies, "__init__", begins)
    replace(MappedSlab, "sum", sums)
    replace(MappedSlab, "root", lambda slab, copy, memory: root(slab, copy, first[0]))


SLAB = [
    loads_do_not_wait,
    a_copy_ends_when_it_is_begun,
    a_block_is_hashed_by_another_stream,
    the_slab_is_hashed_before_the_block_is_loaded,
    digests_are_looked_at_before_they_are_there,
    blocks_share_their_digests,
]
STAGED = [
    blocks_share_staging_memory,
    only_the_first_mark_of_a_batch_is_waited_for,
    streams_share_staging_memory,
    a_block_is_scattered_by_another_stream,
    a_copy_ends_before_its_kernel,
]
PLANTED = [
    stores_do_not_wait,
    loads_do_not_wait,
    an_older_mark_is_waited_for,
    a_copy_ends_when_it_is_begun,
    marks_are_of_another_stream,
    a_store_is_hashed_when_it_is_begun,
]


@pytest.mark.parametrize(
    ("plant", "machine"),
    [
        *((plant, CopyMachine) for plant in PLANTED),
        *((plant, StagedMachine) for plant in STAGED),
        *((plant, SlabMachine) for plant in SLAB),
    ],
)
def test_each_planted_fault_is_found(
    plant: Callable[[Replace], None],
    machine: type[CopyMachine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch.setattr)
    monkeypatch.setattr(CopyMachine, "is_counted", False)
    quickly = settings(
        max_examples=1000,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quickly)
