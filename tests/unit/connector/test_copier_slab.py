"""The copy thread and a node's slab on its GPU: loads come from there, or from dram as ever.

The bytes in dram and in the slab differ, so that it is seen from where a block came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.client.core.costs import SourcePace
from kvstore.connector import copier
from kvstore.kernels.host import PagedCache
from kvstore.kernels.port import Bytes
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier
from kvstore.types import PAGE_BYTES, PAGES_PER_GENERATION, SLOT_BYTES_MIN, Incarnation
from kvstore.wire.messages import Seal
from kvstore.wire.record import checksum_of, header
from tests.integration.node.conftest import eventually
from tests.kit.copy_parties import noise
from tests.kit.scripted_node import ARENA_BYTES, WAIT_S, ScriptedNode, node_at
from tests.kit.simulated_device import SimulatedDevice, simulated_copies
from tests.kit.slab import ended, order_of
from tests.unit.connector.test_copier import BLOCK, PREFIX, SLOT_PAGES, Rank, key

P = PAGES_PER_GENERATION
IN_DRAM, IN_SLAB = noise(BLOCK, 1), noise(BLOCK, 2)
SLOT, TARGET = SLOT_PAGES, 3 * P


@pytest.fixture
def device() -> SimulatedDevice:
    """As the rank sees it."""
    return SimulatedDevice(5)


def slab_of(node: ScriptedNode, incarnation: int = 7) -> HbmTier:
    dram = DramTier(node.arena, ready_bytes=ARENA_BYTES)
    capacity_bytes = 8 * SLOT_BYTES_MIN
    own = SimulatedDevice(6, PAGE_BYTES)
    return HbmTier(own, dram, capacity_bytes=capacity_bytes, incarnation=Incarnation(incarnation))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ScriptedNode]:
    with node_at(tmp_path / "node.sock") as node:
        node.hbm = slab_of(node)
        put(node, IN_SLAB)
        node.hbm.submit(order_of([(SLOT, TARGET, IN_SLAB)]))
        assert ended(node.hbm).good == b"\1"
        node.hbm.show([SLOT], [TARGET])
        put(node, IN_DRAM)
        yield node
        node.hbm.close()


class QuickHbm(SourcePace):
    """Hbm has shown that it is quicker."""

    def takes_hbm(self) -> bool:
        return True


@pytest.fixture
def rank(tmp_path: Path, device: SimulatedDevice) -> Iterator[Rank]:
    def make(layers: list[Bytes]) -> object:
        return simulated_copies([PagedCache(layers)], on=device)

    rank = Rank(tmp_path / "node.sock", make)  # type: ignore[arg-type]
    rank.copier._pace = QuickHbm()
    yield rank
    rank.stop()
    assert (device.allocation_count, device.pinned_bytes) == (0, 0), "memory of the GPU is kept"


def put(node: ScriptedNode, data: bytes) -> None:
    node.arena.array[SLOT * PAGE_BYTES :][:BLOCK] = np.frombuffer(data, np.uint8)


def sum_of(data: bytes) -> bytes:
    return checksum_of(header(PREFIX, key(3)), [data])  # type: ignore[arg-type]


def load(rank: Rank, checksums: bytes = b"") -> bytes:
    """What a load of block 3 brings; empty: it failed."""
    rank.load((3,), [SLOT], session=5, checksums=checksums)
    (result,) = rank.loaded().loads
    return rank.block(3) if result.loaded_blocks else b""


def take_back(node: ScriptedNode) -> None:
    assert node.hbm is not None
    node.hbm.raise_generations([TARGET], [2])


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_block_with_a_copy_is_loaded_from_the_slab(
    node: ScriptedNode, rank: Rank, *, is_verified: bool
) -> None:
    node.open_session(5)
    for _ in range(20):
        rank.memory[:, 3] = 0
        assert load(rank, sum_of(IN_SLAB) if is_verified else b"") == IN_SLAB


def test_verified_loads_prefer_dram_until_hbm_was_seen_to_be_quicker(
    node: ScriptedNode, rank: Rank
) -> None:
    """One that is not verified costs hbm no hashing."""
    rank.copier._pace = SourcePace()
    node.open_session(5)
    for _ in range(20):
        assert load(rank, sum_of(IN_DRAM)) == IN_DRAM
    assert load(rank) == IN_SLAB


def test_a_block_without_a_copy_comes_from_dram(node: ScriptedNode, rank: Rank) -> None:
    node.open_session(5)
    take_back(node)
    assert load(rank, sum_of(IN_DRAM)) == IN_DRAM


@pytest.mark.parametrize("is_verified", [True, False])
def test_a_copy_that_gives_way_meanwhile_is_loaded_from_dram(
    node: ScriptedNode, rank: Rank, monkeypatch: pytest.MonkeyPatch, *, is_verified: bool
) -> None:
    """Shown again at the same place, with another block: the word is another one all the same."""
    node.open_session(5)
    begin, slab_loads = rank.copies.begin, []

    def begin_and_take_back(copy: BlockCopy) -> None:
        slab_loads.append(copy.slab_begin >= 0)
        begin(copy)
        if slab_loads == [True]:
            take_back(node)
            assert node.hbm is not None
            node.hbm.show([SLOT], [TARGET])

    monkeypatch.setattr(rank.copies, "begin", begin_and_take_back)
    assert load(rank, sum_of(IN_DRAM) if is_verified else b"") == IN_DRAM
    assert slab_loads == [True, False]


def test_a_block_that_leaves_dram_meanwhile_is_not_loaded_at_all(
    node: ScriptedNode, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.open_session(5)
    begin, ways = rank.copies.begin, []

    def begin_and_lose(copy: BlockCopy) -> None:
        begin(copy)
        ways.append(copy.way)
        if copy.way is CopyWay.LOAD:
            node.arena.raise_generations([SLOT], [2])
            take_back(node)

    monkeypatch.setattr(rank.copies, "begin", begin_and_lose)
    assert load(rank) == b""
    assert rank.block(3) == bytes(BLOCK)
    assert ways == [CopyWay.LOAD, CopyWay.CLEAR]


def test_other_bytes_in_the_slab_end_its_use(
    node: ScriptedNode, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    node.open_session(5)
    assert load(rank, sum_of(IN_DRAM)) == IN_DRAM, "those in the slab have another checksum"
    assert "a copy in hbm holds other bytes" in caplog.text
    assert load(rank) == IN_DRAM


def test_a_slab_that_cannot_be_mapped_is_not_used(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "open", lambda _: SimulatedDevice(1).open(b"/proc/0/fd/0"))
    node.open_session(5)
    assert load(rank, sum_of(IN_DRAM)) == IN_DRAM


def test_a_load_under_way_when_the_node_ends_is_made_from_dram(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has brought: the memory that it reads is nobody's now."""
    node.open_session(5)
    begin, begun = rank.copies.begin, threading.Event()

    def begin_and_wait(copy: BlockCopy) -> None:
        monkeypatch.setattr(device, "turn", lambda: False)
        begin(copy)
        begun.set()

    monkeypatch.setattr(rank.copies, "begin", begin_and_wait)
    rank.load((3,), [SLOT], session=5)
    assert begun.wait(WAIT_S)
    node.hang_up()
    assert eventually(lambda: rank.copier._link.closed)
    monkeypatch.undo()
    (result,) = rank.loaded().loads
    assert (result.loaded_blocks, rank.block(3)) == (1, IN_DRAM)


def test_memory_of_a_node_that_is_gone_is_let_go(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice
) -> None:
    """Dram outlives its node, the slab does not: nothing comes from there any more."""
    node.open_session(5)
    assert load(rank) == IN_SLAB
    assert device.allocation_count == 5, "the slab, and a room for each stream"
    node.hang_up()
    assert eventually(lambda: device.allocation_count == 4)
    assert load(rank) == IN_DRAM


def test_the_slab_of_the_next_node_process_is_another_one(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice
) -> None:
    node.open_session(5)
    assert load(rank) == IN_SLAB
    first, node.hbm = node.hbm, slab_of(node)
    node.open_session(5)
    assert load(rank) == IN_DRAM, "cold"
    assert device.allocation_count == 5, "the slab, and a room for each stream"
    assert first is not None
    first.close()


def test_the_last_memory_is_unpinned_without_the_lock_of_the_engines_thread(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it may take seconds, in which the engine would stand still."""
    node.open_session(5)
    rank.store((3,), [SLOT], session=5)
    node.receive(Seal)
    unpin, held = device.unpin, list[bool]()

    def seen(address: int) -> None:
        is_free = rank.handoff._lock.acquire(blocking=False)
        if is_free:
            rank.handoff._lock.release()
        held.append(not is_free)
        unpin(address)

    monkeypatch.setattr(device, "unpin", seen)
    node.open_session(6)
    assert held == [False]


def test_a_load_behind_a_long_forward_is_not_reported_before_it_has_ended(
    node: ScriptedNode, rank: Rank, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache was turned off, the engine lives on: a block that is reported is used for others,
    and the copy would write to it."""
    node.open_session(5)
    turn, ended, now_ns = device.turn, rank.copies.ended, time.monotonic_ns
    begin, begun, looks = rank.copies.begin, threading.Event(), [0]

    def begin_it(copy: BlockCopy) -> None:
        monkeypatch.setattr(device, "turn", lambda: False)
        begin(copy)
        begun.set()

    def look() -> list[CopyEnd]:
        """Each takes 5 s once the copy thread is to end."""
        looks[0] += rank.handoff.stopping
        if looks[0] == 4:
            monkeypatch.setattr(device, "turn", turn)
        return ended()

    monkeypatch.setattr(rank.copies, "begin", begin_it)
    monkeypatch.setattr(rank.copies, "ended", look)
    rank.load((3,), [SLOT], session=5)
    assert begun.wait(WAIT_S)
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns() + 5_000_000_000 * looks[0])
    monkeypatch.setattr(copier, "time", clock)
    rank.handoff.stop()
    assert rank.copier.join(WAIT_S)
    with rank.handoff.core() as core:
        (result,) = core.take_report().loads
    assert (result.loaded_blocks, rank.block(3)) == (1, IN_SLAB)
