"""The copy thread against a scripted node, over a real socket and real shared memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.client.core import attachment
from kvstore.client.core.plan import LoadJob, RankReport, StepPlan, StoreJob
from kvstore.client.core.rank import RankCore
from kvstore.connector import copier
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.copier import Copier, Handoff
from kvstore.kernels.host import PagedCache
from kvstore.kernels.port import Bytes
from kvstore.ports import BlockCopy, CopyEngine
from kvstore.types import PAGE_BYTES, Shard
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    Distrust,
    Drop,
    Pinned,
    Quiesce,
    Quiet,
    Refused,
    Seal,
)
from kvstore.wire.record import Scope, header
from kvstore.wire.space import fingerprint
from tests.kit.copy_parties import BOTH_KINDS, device_copies, host_copies
from tests.kit.hello import group_of, rank_hello
from tests.kit.reference import checksum
from tests.kit.scripted_node import ARENA_BYTES, WAIT_S, ScriptedNode, node_at
from tests.kit.simulated_device import SimulatedDevice, simulated_copies
from tests.unit.client import rank_kit

LAYERS, BLOCKS, PAGE = 4, 8, 32 << 10
BLOCK = LAYERS * PAGE
SLOT_PAGES = BLOCK // PAGE_BYTES
SPACE = msgspec.structs.replace(rank_kit.SPACE, layer_count=LAYERS, head_bytes=(PAGE // 2,))
CONFIG = rank_hello(group_of(SPACE, Shard(0, LAYERS, 0, 2)))
PREFIX = Scope(
    tenant="t",
    space=fingerprint(SPACE, weights_epoch=""),
    shard=CONFIG.groups[0].shard,
    block_bytes=BLOCK,
).prefix()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Rank:
    """A copy thread with a cache, of random bytes unless another is given."""

    def __init__(
        self,
        path: Path,
        make: Callable[[list[Bytes]], CopyEngine] = host_copies,
        memory: Bytes | None = None,
        heartbeat_timeout_ms: int = 250,
    ) -> None:
        if memory is None:
            memory = np.random.default_rng(1).integers(0, 256, (LAYERS, BLOCKS, PAGE), np.uint8)
        self.memory = memory
        self.copies = copies = make(list(memory))
        self.handoff = Handoff(RankCore(CONFIG, copies_max=copies.copies_max))
        config = ConnectorConfig(str(path), heartbeat_timeout_ms=heartbeat_timeout_ms)
        self.copier = Copier(self.handoff, copies, config)
        self.copier.start()

    def block(self, index: int) -> bytes:
        return self.memory[:, index].tobytes()

    def load(
        self,
        blocks: tuple[int, ...],
        slots: list[int],
        *,
        session: int,
        generation: int = 1,
        checksums: bytes = b"",
    ) -> None:
        job = LoadJob(
            request="r",
            lease=1,
            session=session,
            block_ids=blocks,
            keys=b"".join(key(block) for block in blocks),
            slots=np.array(slots, "<u4").tobytes(),
            generations=np.full(len(slots), generation, "<u8").tobytes(),
            checksums=checksums,
        )
        self.handoff.submit(StepPlan(loads=(job,)), self.copies.mark())

    def store(
        self,
        blocks: tuple[int, ...],
        slots: list[int],
        *,
        session: int,
        generation: int = 1,
        **changes: Any,
    ) -> None:
        job = StoreJob(
            job=1,
            session=session,
            block_ids=blocks,
            keys=changes.pop("keys", b"".join(key(block) for block in blocks)),
            slots=np.array(slots, "<u4").tobytes(),
            generations=np.full(len(slots), generation, "<u8").tobytes(),
            **changes,
        )
        self.handoff.submit(StepPlan(stores=(job,)), self.copies.mark())

    def loaded(self) -> RankReport:
        """Wait for the end of a load."""
        self.handoff.wait_for_load(WAIT_S)
        with self.handoff.core() as core:
            report = core.take_report()
        assert report.loads, "no load ended"
        return report

    def stop(self) -> None:
        self.handoff.stop()
        assert self.copier.join(WAIT_S)
        self.handoff.wake.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.sock"


@pytest.fixture(params=BOTH_KINDS, ids=["host", "device"])
def rank(path: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(path, request.param)
    yield rank
    rank.stop()


ON_HOST = pytest.mark.parametrize("rank", BOTH_KINDS[:1], ids=["host"], indirect=True)
"""Where the node is left, refused or waited for, which copies are made does not matter."""


def slot_bytes(node: ScriptedNode, slot: int) -> bytes:
    return node.arena.array[slot * PAGE_BYTES : slot * PAGE_BYTES + BLOCK].tobytes()


def test_what_is_stored_is_sealed_with_its_checksum(node: ScriptedNode, rank: Rank) -> None:
    hello = node.open_session(5)
    assert (hello.rank, hello.process, hello.groups) == (0, "p", CONFIG.groups)
    rank.store((3, 6), [0, 2 * SLOT_PAGES], session=5)
    seal = node.receive(Seal)
    assert seal.session == 5
    assert seal.keys == key(3) + key(6)
    assert slot_bytes(node, 0) == rank.block(3)
    assert slot_bytes(node, 2 * SLOT_PAGES) == rank.block(6)
    sums = [checksum(header(PREFIX, key(b)), rank.block(b)) for b in (3, 6)]  # type: ignore[arg-type]
    assert seal.checksums == b"".join(sums)


@pytest.mark.parametrize("flip", [0, BLOCK - 1])
def test_a_flipped_byte_fails_a_checked_load(node: ScriptedNode, rank: Rank, flip: int) -> None:
    node.open_session(5)
    rank.store((3,), [SLOT_PAGES], session=5)
    sums = node.receive(Seal).checksums
    node.arena.array[SLOT_PAGES * PAGE_BYTES + flip] ^= 1
    rank.load((3,), [SLOT_PAGES], session=5, checksums=sums)
    (result,) = rank.loaded().loads
    assert result.failed_block_ids == (3,)
    assert rank.block(3) == bytes(BLOCK), "what it holds is read behind the last token of others"
    distrust = node.receive(Distrust)
    assert distrust.slots == SLOT_PAGES.to_bytes(4, "little")


def test_another_blocks_bytes_fail_a_checked_load(node: ScriptedNode, rank: Rank) -> None:
    """Bytes intact, but stored under another key: the header is part of the checksum."""
    node.open_session(5)
    rank.store((3,), [SLOT_PAGES], session=5)
    sums = node.receive(Seal).checksums
    rank.load((4,), [SLOT_PAGES], session=5, checksums=sums)
    assert rank.loaded().loads[0].failed_block_ids == (4,)


def test_a_slot_of_another_generation_is_not_used(node: ScriptedNode, rank: Rank) -> None:
    node.open_session(5)
    before = rank.block(3)
    rank.load((3,), [SLOT_PAGES], session=5, generation=2)
    assert rank.loaded().loads[0].failed_block_ids == (3,)
    assert rank.block(3) == before
    rank.store((3,), [0], session=5, generation=2)
    assert node.receive(Drop).slots == bytes(4)
    assert slot_bytes(node, 0) == bytes(BLOCK), "written with a credit that is void"


@pytest.mark.parametrize("store", [True, False])
def test_a_generation_raised_during_a_copy_voids_it(
    node: ScriptedNode, rank: Rank, store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.open_session(5)
    begin = rank.copies.begin

    def begin_and_raise(copy: BlockCopy) -> None:
        begin(copy)
        node.arena.raise_generations([0], [2])

    monkeypatch.setattr(rank.copies, "begin", begin_and_raise)
    if store:
        rank.store((3,), [0], session=5)
        node.receive(Drop)
    else:
        node.arena.array[:BLOCK] = 0xFF
        rank.load((3,), [0], session=5)
        assert rank.loaded().loads[0].failed_block_ids == (3,)
        assert rank.block(3) == bytes(BLOCK)


@pytest.mark.parametrize("slot", [(4 << 20) // PAGE_BYTES - 1, 2**32 - 1])
def test_a_slot_outside_the_arena_fails_the_load(node: ScriptedNode, rank: Rank, slot: int) -> None:
    node.open_session(5)
    rank.load((3,), [slot], session=5)
    assert rank.loaded().loads[0].failed_block_ids == (3,)


def test_loads_go_on_in_the_mapping_of_a_dead_node(path: Path, rank: Rank) -> None:
    with node_at(path) as node:
        node.open_session(5)
        rank.store((2,), [0], session=5)
        node.receive(Seal)
    stored = rank.block(2)
    rank.memory[:, 2] = 0
    rank.load((2,), [0], session=5)
    assert rank.loaded().loads[0].loaded_blocks == 1
    assert rank.block(2) == stored


@ON_HOST
def test_a_node_that_talks_nonsense_is_left_and_tried_again(node: ScriptedNode, rank: Rank) -> None:
    node.open_session(5)
    node.peer.send(b"\xc1")
    assert node.is_hung_up()
    node.open_session(6)
    node.welcome()  # twice
    assert node.is_hung_up()


@ON_HOST
def test_refused_is_said_once_and_asked_again_late(
    node: ScriptedNode,
    rank: Rank,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attachment, "REFUSED_RETRY_NS", 300_000_000)
    with caplog.at_level(logging.INFO, "vllm.kvstore.rank"):
        times = []
        for _ in range(3):
            node.accept()
            times.append(time.monotonic())
            node.send(Refused("another model", permanent=True))
            assert node.is_hung_up()
    assert min(np.diff(times)) > 0.29
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "another model" in line] == [
        "kvstore: detached: the node refuses this engine: another model"
    ]


def test_a_bug_in_a_copy_ends_the_thread_but_no_load_hangs(
    node: ScriptedNode, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    monkeypatch.setattr(copier, "DRAIN_S_MAX", 2 * WAIT_S)  # there is nothing to wait for
    rank = Rank(path)
    node.open_session(5)
    rank.load((BLOCKS,), [0], session=5)  # a block that the cache does not have
    assert rank.loaded().loads[0].failed_block_ids == (BLOCKS,)
    rank.load((2,), [0], session=5)
    assert rank.loaded().loads[0].failed_block_ids == (2,)
    rank.stop()
    assert seen == [AssertionError]


def test_memory_that_cannot_be_pinned_is_said_once_with_the_way_to_mend_it(
    node: ScriptedNode, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = SimulatedDevice(seed=1)
    rank = Rank(path, lambda layers: simulated_copies([PagedCache(layers)], on=device))
    device.pin_failures.append("cudaErrorMemoryAllocation")
    node.open_session(5)
    rank.store((0,), [0], session=5)
    told = node.receive(Pinned)
    assert (told.size_bytes, "raise the memlock limit" in told.trouble) == (0, True)
    rank.store((1,), [SLOT_PAGES], session=5)
    node.receive(Drop)
    rank.load((3,), [0], session=5)
    assert rank.loaded().loads[0].loaded_blocks == 1
    rank.stop()
    said = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
    assert len(said) == 1
    assert "(ulimit -l unlimited) and start it again (cudaErrorMemoryAllocation)" in said[0]


def test_a_node_hears_of_pinned_memory_anew_in_each_connection(
    node: ScriptedNode, path: Path
) -> None:
    rank = Rank(path, device_copies)
    for session in (5, 6):
        node.open_session(session)
        rank.store((0,), [0], session=session)
        assert node.receive(Pinned) == Pinned(ARENA_BYTES)
        node.hang_up()
    rank.stop()


def test_the_arena_is_mapped_ahead_of_use(node: ScriptedNode, rank: Rank) -> None:
    node.open_session(5)
    rank.load((2,), [0], session=5)
    rank.loaded()
    for session in (6, 7):  # between the two answers lies a turn with nothing to copy
        node.send(Quiesce(session))
        node.receive(Quiet)
    assert rank.copier._populated == ARENA_BYTES


def test_memory_that_arrives_later_is_mapped_ahead_too(node: ScriptedNode, path: Path) -> None:
    ready = [1 << 20, ARENA_BYTES]
    node.arena.set_ready(ready[0])
    rank = Rank(path)
    node.open_session(5)
    for number, size_bytes in enumerate(ready):
        node.arena.set_ready(size_bytes)
        for session in (6 + 2 * number, 7 + 2 * number):
            node.send(Quiesce(session))
            node.receive(Quiet)
        assert rank.copier._populated == size_bytes
    rank.stop()


def test_a_node_may_be_silent_for_as_long_as_the_configuration_says() -> None:
    handoff = Handoff(RankCore(CONFIG))
    copies = host_copies(list(np.zeros((LAYERS, BLOCKS, PAGE), np.uint8)))
    made = Copier(handoff, copies, ConnectorConfig(heartbeat_timeout_ms=300))
    assert made._dial._limit_ns == 300 * NS_PER_MS
    handoff.wake.close()
