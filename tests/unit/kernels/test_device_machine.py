"""DeviceCopies on the simulated device, between an engine's own writes: 0 wrong bytes, and each
event that is not waited for is found."""

from __future__ import annotations

from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from kvstore.kernels.device import DeviceCopies, kind_of
from kvstore.kernels.moves import BlockMoves
from kvstore.ports import CopyEnd, CopyWay
from kvstore.wire.space import Slab
from tests.amounts import amount
from tests.kit.copy_parties import (
    BLOCKS,
    HEADER,
    SLOTS,
    DeviceParty,
    StagedCudaParty,
    StagedParty,
    noise,
)
from tests.kit.planted import Patch, instead_of
from tests.kit.reference import checksum
from tests.kit.simulated_device import SimulatedDevice
from tests.steps import CountedMachine

COPIES_MAX = 8
OTHER = {1: 2, 2: 1, 3: 4, 4: 3}
"""Streams of the same direction."""
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
        self.mark = 0
        """The last one, while the engine has launched nothing since: a step has one."""
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
        self.mark = 0

    @rule(block=BLOCK)
    def attend(self, block: int) -> None:
        if block in self.blocks_of(CopyWay.LOAD, CopyWay.CLEAR):
            return
        due, seen, party = self.blocks[block], self.seen, self.party
        party.device.launch(lambda memory: seen.append((party.block_of(memory, block), due)))
        self.mark = 0

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
        self.mark = self.mark or self.party.copies.mark()
        number = self.party.order(way, block, slot, after=self.mark, **more)
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


class StagedMachine(CopyMachine):
    """Blocks go through staging memory: it finds the faults of that soonest. All that it does is
    in the runs of the next one."""

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


TestSlabCopies = SlabMachine.TestCase
TestSlabCopies.settings = RUNS
TestCudaCopies = CudaMachine.TestCase
TestCudaCopies.settings = RUNS


# ── what it finds ────────────────────────────────────────────────────────────────────────────────


def _not_waiting(*numbers: int) -> Patch:
    @instead_of(SimulatedDevice, "wait")
    def broken(wait: Any, device: SimulatedDevice, stream: int, event: int) -> None:
        if stream not in numbers:
            wait(device, stream, event)

    return broken


stores_do_not_wait, loads_do_not_wait = _not_waiting(1, 2), _not_waiting(3, 4)


@instead_of(DeviceCopies, "_wait_for")
def an_older_mark_is_waited_for(
    wait_for: Any, copies: DeviceCopies, mark: int, stream: int
) -> None:
    wait_for(copies, mark - 1, stream)


def a_copy_ends_when_it_is_begun(patch: pytest.MonkeyPatch) -> None:
    take, has_happened = DeviceCopies._take_batch, SimulatedDevice.has_happened

    def takes(copies: DeviceCopies, *given: Any) -> bool:
        patch.setattr(SimulatedDevice, "has_happened", lambda *_: True)
        try:
            return take(copies, *given)
        finally:
            patch.setattr(SimulatedDevice, "has_happened", has_happened)

    patch.setattr(DeviceCopies, "_take_batch", takes)


@instead_of(SimulatedDevice, "record")
def marks_are_of_another_stream(
    record: Any, device: SimulatedDevice, event: int, stream: int | None
) -> None:
    record(device, event, 1 if stream is None else stream)


def a_store_is_hashed_when_it_is_begun(patch: pytest.MonkeyPatch) -> None:
    begin, close = DeviceCopies._begin, DeviceCopies._checksum
    early: dict[int, bytes] = {}

    def begins(copies: DeviceCopies, batch: list[Any]) -> None:
        begin(copies, batch)
        for copy in (flight.copy for flight in batch if flight.copy.way is CopyWay.STORE):
            early[copy.number] = checksum(HEADER, copies._slot(copy).tobytes())

    def found(copies: DeviceCopies, flight: Any) -> bytes:
        return early.pop(flight.copy.number, None) or close(copies, flight)

    patch.setattr(DeviceCopies, "_begin", begins)
    patch.setattr(DeviceCopies, "_checksum", found)


def streams_share_a_room(patch: pytest.MonkeyPatch) -> None:
    begin = BlockMoves.__init__

    def begins(moves: BlockMoves, *arguments: Any, **more: Any) -> None:
        begin(moves, *arguments, **more)
        for stream in moves._rooms:
            moves._rooms[stream] = max(moves._rooms.values())

    patch.setattr(BlockMoves, "__init__", begins)
    patch.setattr(BlockMoves, "close", lambda moves: None)
    patch.setattr(SimulatedDevice, "allocation_count", 1)


@instead_of(BlockMoves, "_payloads")
def blocks_share_a_room(
    payloads: Any, moves: BlockMoves, stream: int, group: int, count: int
) -> Any:
    return np.repeat(payloads(moves, stream, group, 1), count)


def only_the_first_mark_of_a_batch_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    begin = DeviceCopies._begin
    waiting: list[Any] = []

    def gives(copies: DeviceCopies) -> None:
        give(copies)
        for _, alike in groupby(waiting, key=lambda flight: kind_of(flight)[:-1]):
            begin(copies, list(alike))
        waiting.clear()

    give = DeviceCopies._give
    patch.setattr(DeviceCopies, "_begin", lambda copies, flights: waiting.extend(flights))
    patch.setattr(DeviceCopies, "_give", gives)


@instead_of(SimulatedDevice, "move")
def a_block_is_moved_by_another_stream(
    move: Any, device: SimulatedDevice, stream: int, *pieces: Any
) -> None:
    move(device, OTHER[stream], *pieces)


def a_copy_ends_before_its_kernel(patch: pytest.MonkeyPatch) -> None:
    """Its event is recorded between the two steps."""
    load, move, record = BlockMoves.load, SimulatedDevice.move, SimulatedDevice.record
    late: list[Any] = []

    def loads(moves: BlockMoves, *arguments: Any) -> None:
        patch.setattr(SimulatedDevice, "move", lambda device, *given: late.append(given))
        load(moves, *arguments)
        patch.setattr(SimulatedDevice, "move", move)

    def records(device: SimulatedDevice, event: int, stream: int | None) -> None:
        record(device, event, stream)
        while late:
            move(device, *late.pop())

    patch.setattr(BlockMoves, "load", loads)
    patch.setattr(SimulatedDevice, "record", records)


@instead_of(SimulatedDevice, "digest")
def a_block_is_hashed_by_another_stream(
    digest: Any, device: SimulatedDevice, stream: int, *given: Any, **more: Any
) -> None:
    """It does not wait for the block."""
    digest(device, OTHER[stream], *given, **more)


def pages_are_hashed_before_the_block_is_there(patch: pytest.MonkeyPatch) -> None:
    load, total = BlockMoves.load_within, BlockMoves.hash
    none = np.array([], np.uint64)

    def loads(moves: BlockMoves, stream: int, group: int, *given: Any) -> None:
        pages, places, digests = given
        total(moves, stream, group, pages, digests)
        load(moves, stream, group, pages, places, none)

    patch.setattr(BlockMoves, "load_within", loads)


def digests_are_looked_at_before_they_are_there(patch: pytest.MonkeyPatch) -> None:
    """The end of a load is marked before its digests are on their way."""
    total, record = BlockMoves.hash, SimulatedDevice.record
    late: list[Any] = []
    patch.setattr(BlockMoves, "hash", lambda *order: late.append(order))

    def records(device: SimulatedDevice, event: int, stream: int | None) -> None:
        record(device, event, stream)
        while late:
            total(*late.pop())

    patch.setattr(SimulatedDevice, "record", records)


@instead_of(DeviceCopies, "__init__")
def blocks_share_their_digests(
    begin: Any, copies: DeviceCopies, *arguments: Any, **more: Any
) -> None:
    """One place of pinned memory for all that are under way."""
    begin(copies, *arguments, **more)
    places = copies._own.digests
    places[:] = places[:1] * len(places)


SLAB = [
    loads_do_not_wait,
    a_copy_ends_when_it_is_begun,
    a_block_is_hashed_by_another_stream,
    pages_are_hashed_before_the_block_is_there,
    digests_are_looked_at_before_they_are_there,
    blocks_share_their_digests,
]
STAGED = [
    blocks_share_a_room,
    only_the_first_mark_of_a_batch_is_waited_for,
    streams_share_a_room,
    a_block_is_moved_by_another_stream,
    a_block_is_hashed_by_another_stream,
    digests_are_looked_at_before_they_are_there,
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
    plant: Patch,
    machine: type[CopyMachine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
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
