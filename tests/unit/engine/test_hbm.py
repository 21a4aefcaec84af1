"""Copies in hbm: which are made, for whom, and when they leave."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.engine.events import Admit, Received
from kvstore.engine.memory.policies import Lru
from kvstore.engine.moves import hbm
from kvstore.engine.moves.hbm import WINDOW_NS
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import HelloRank, HelloScheduler, LeaseRelease, Welcome
from tests.unit.engine.harness import HALVES, Peer, attached
from tests.unit.engine.slab import GPU, SlabNode


def leased(peer: Peer, lease: int, *numbers: int) -> None:
    """Look up, load and give back."""
    assert len(peer.lease(lease, *numbers).slots) == 4 * len(numbers) * len(peer.columns)
    peer.node.hear(peer.scheduler, LeaseRelease([lease]))


@pytest.fixture
def node() -> SlabNode:
    return SlabNode(hbm_slots=32)


@pytest.fixture
def peer(node: SlabNode) -> Peer:
    peer = Peer(node, gpu=GPU)
    peer.store(1, 2, 3)
    return peer


def test_a_block_that_is_leased_again_is_copied_and_shown(node: SlabNode, peer: Peer) -> None:
    leased(peer, 1, 1, 2, 3)
    assert not node.copying, "used once"
    leased(peer, 2, 1, 2)
    (order,) = node.copying
    row_of = {row.key: row.slot for row in node.engine.blocks()}
    named = [order.keys[:4].hex(), order.keys[32:36].hex()]
    assert order.slots.tolist() == [row_of[each] for each in named]
    assert not node.pages, "nobody reads what is not there yet"
    leased(peer, 3, 1, 2)
    assert len(node.copying) == 1, "it is on its way"
    node.end()
    assert node.pages == dict(zip(order.slots.tolist(), order.targets.tolist(), strict=True))
    leased(peer, 4, 1, 2)
    assert (node.copying, node.engine.counters.hbm_blocks_leased) == ([], 2)


def test_a_block_that_is_leased_again_too_late_is_not(node: SlabNode, peer: Peer) -> None:
    leased(peer, 1, 1)
    node.tick(WINDOW_NS / NS_PER_MS + 1)
    leased(peer, 2, 1)
    assert not node.copying
    node.tick(WINDOW_NS / NS_PER_MS)
    leased(peer, 3, 1)
    assert len(node.copying) == 1


def test_slots_of_hbm_are_a_slab_of_their_own_whatever_dram_is_divided_into() -> None:
    node = SlabNode(
        hbm_slots=8,
        slots=64,
        landing_bytes=16 * SLOT_BYTES_MIN,
        quotas=(("a", 32 * SLOT_BYTES_MIN),),
        policy="reuse",
        first_generation=9,
    )
    (*_, row), hbm_slots = node.engine.tiers(), node.state.hbm
    assert (row.tier, row.capacity_bytes, row.policy) == ("hbm", 8 * SLOT_BYTES_MIN, "lru")
    assert hbm_slots is not None
    assert not hbm_slots.quotas.any
    assert hbm_slots.generation.tolist() == [1] * 8
    assert isinstance(hbm_slots.pool(SLOT_BYTES_MIN).policy, Lru)


def welcome(node: SlabNode, number: int, hello: HelloRank | HelloScheduler) -> Welcome:
    commands = node.step(Received(ConnectionId(number), hello))
    return next(each.welcome for each in commands if isinstance(each, Admit))


def test_ranks_elsewhere_get_neither_slab_nor_copies(node: SlabNode, peer: Peer) -> None:
    other = Peer(node, "f", gpu="0000:02:00.0")
    for lease in range(1, 4):
        leased(other, lease, 1, 2, 3)
    assert not node.copying
    assert welcome(node, 900, peer.rank_hello(0)).hbm == node.config.hbm
    assert welcome(node, 901, other.rank_hello(0)).hbm is None
    assert welcome(node, 902, peer.scheduler_hello()).hbm is None
    assert welcome(node, 903, peer.rank_hello(0, gpu="")).hbm is None


def test_of_several_shards_those_of_the_gpu_are_copied(node: SlabNode) -> None:
    """Tensor parallel: each rank has a GPU of its own, and the slab lies on one."""

    class Two(Peer):
        def rank_hello(self, rank: int, /, **changes: Any) -> HelloRank:
            return super().rank_hello(rank, gpu=GPU if rank else "0000:02:00.0", **changes)

    peer = Two(node, shards=HALVES)
    peer.store(1)
    leased(peer, 1, 1)
    leased(peer, 2, 1)
    (order,) = node.copying
    assert order.scope.shard == HALVES[1]


def test_the_longest_unused_copy_gives_way(node: SlabNode) -> None:
    node, peer = attached(SlabNode(hbm_slots=4), gpu=GPU)
    slots = {}
    for number in range(5):
        slots[number] = peer.seal(number)[0][0]
    for number in range(4):
        leased(peer, 10 + number, number)
        leased(peer, 20 + number, number)
        node.end()
    leased(peer, 30, 0)
    assert set(node.pages) == {slots[n] for n in range(4)}
    leased(peer, 31, 4)
    leased(peer, 32, 4)
    assert set(node.pages) == {slots[n] for n in (0, 2, 3)}, "its place is taken back first"
    node.end()
    assert set(node.pages) == {slots[n] for n in (0, 2, 3, 4)}
    assert node.engine.counters.hbm_blocks_demoted == 1


def test_a_device_that_fails_ends_it_all(node: SlabNode, peer: Peer) -> None:
    leased(peer, 1, 1, 2)
    leased(peer, 2, 1)
    node.end()
    leased(peer, 3, 1, 2)
    node.end(trouble="it fell off the bus")
    assert (node.pages, node.copies) == ({}, 0)
    leased(peer, 4, 1, 2)
    assert not node.copying


def test_what_is_in_motion_is_bounded(
    node: SlabNode, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hbm, "MOVING_BYTES_MAX", 2 * SLOT_BYTES_MIN)
    monkeypatch.setattr(hbm, "JOB_BYTES_MAX", SLOT_BYTES_MIN)
    leased(peer, 1, 1, 2, 3)
    leased(peer, 2, 1, 2, 3)
    assert [len(order.slots) for order in node.copying] == [1, 1]
    row_of = {row.slot: row.key for row in node.engine.blocks()}
    named = [(row_of[int(order.slots[0])], order.keys[:4].hex()) for order in node.copying]
    assert all(there == told for there, told in named), "each job names its own blocks"
    node.end()
    leased(peer, 3, 1, 2, 3)
    assert len(node.copying) == 2
