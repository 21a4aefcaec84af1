"""Reports for inspect, of a node with two engines, leases and a rank that is away."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.engine.events import Clear
from kvstore.engine.why import report
from kvstore.engine.why.report import hottest_runs
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import Pinned
from kvstore.wire.peers import PrepareRequest
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import known
from tests.unit.engine.harness import (
    HALVES,
    SMALL,
    Node,
    Peer,
    attached,
    keys,
    short,
    space,
)


@pytest.fixture
def node() -> Node:
    return Node(slots=32)


def test_nodes_and_tiers_count_what_is_there(node: Node) -> None:
    one, two = Peer(node, "a"), Peer(node, "b", shards=HALVES)
    one.seal(1, 2)
    two.seal(1, rank=0)
    one.lease(1, 1, 2)
    two.node.end(two.ranks[1])
    assert node.engine.nodes() == [report.NodeReport("0000000000000007", 4, 2, 1, 1, 3, 0, 0)]
    dram = node.engine.tiers()[0]
    assert (dram.blocks, dram.slots_sealed, dram.slots_leased) == (3, 3, 2)
    assert dram.ready_bytes == dram.capacity_bytes == 32 * SLOT_BYTES_MIN
    assert dram.used_bytes == 3 * SLOT_BYTES_MIN
    assert dram.slots_granted == len(one.unused()) + len(two.unused(0))
    assert dram.slots_quarantined == len(two.unused(1))


def test_pinned_memory_is_that_of_attached_ranks(node: Node) -> None:
    one, two = Peer(node, "a"), Peer(node, "b", shards=HALVES)
    assert (node.engine.tiers()[0].pinned_bytes, node.engine.unpinned()) == (0, "")
    node.hear(one.ranks[0], Pinned(64 << 20))
    node.hear(two.ranks[0], Pinned(128 << 20, "memlock"))
    node.hear(two.ranks[1], Pinned(0, "memlock"))
    assert node.engine.tiers()[0].pinned_bytes == 128 << 20
    assert node.engine.unpinned() == "engine b (b) (and 1 more ranks): memlock"
    node.hear(two.ranks[1], Pinned(0))
    assert node.engine.unpinned() == "engine b (b): memlock"
    node.end(two.ranks[0])
    assert (node.engine.tiers()[0].pinned_bytes, node.engine.unpinned()) == (64 << 20, "")


def test_spaces_name_tenant_label_and_size(node: Node) -> None:
    peer = Peer(node, "a")
    Peer(node, "b", tenant="u")
    peer.seal(1, 2)
    space_id = fingerprint(SMALL, weights_epoch="")
    node.step(known(2, 3))
    hello = peer.scheduler_hello(label="tiny-model")
    peer.scheduler = node.connect(hello)
    peer.be_quiet()
    name = space_id.hex()
    assert node.engine.spaces() == [
        report.SpaceReport(name, "t", "tiny-model", "", 2, 2, 2 * SLOT_BYTES_MIN, 1, ""),
        report.SpaceReport(name, "u", "b", "", 0, 0, 0, 1, ""),
    ]
    assert node.engine.space_ids() == [space_id]


def test_quotas_say_what_is_promised_and_used() -> None:
    promised = 12 * SLOT_BYTES_MIN
    node = Node(slots=32, quotas=(("llama", promised), ("team", SLOT_BYTES_MIN)))
    llama, other = Peer(node, "llama"), Peer(node, "other")
    llama.seal(1, 2)
    other.seal(3)
    served = {peer: len(peer.unused()) for peer in (llama, other)}
    assert node.engine.quotas() == [
        report.QuotaReport("llama", promised, (2 + served[llama]) * SLOT_BYTES_MIN),
        report.QuotaReport("team", SLOT_BYTES_MIN, 0),
        report.QuotaReport("", 19 * SLOT_BYTES_MIN, (1 + served[other]) * SLOT_BYTES_MIN),
    ]
    assert Node().engine.quotas() == []


def test_blocks_say_where_they_are_and_show_eight_digits_of_the_key(node: Node) -> None:
    peer = Peer(node, shards=HALVES)
    [(slot, generation)] = peer.seal(1, rank=1)
    [row] = node.engine.blocks()
    assert msgspec.structs.asdict(row) == {
        "key": short(1),
        "space": fingerprint(SMALL, weights_epoch="").hex(),
        "tenant": "t",
        "shard": "layers 0-3 heads 1-2",
        "tiers": "dram",
        "slot": slot,
        "generation": generation,
        "leases": 0,
    }


def test_blocks_are_bounded_and_chosen_by_space(node: Node) -> None:
    one, two = Peer(node, "a"), Peer(node, "b", epoch="w2")
    one.seal(1, 2)
    two.seal(3)
    assert len(node.engine.blocks(limit=2)) == 2
    begin = fingerprint(SMALL, weights_epoch="w2").hex()
    assert [row.key for row in node.engine.blocks(space=begin)] == [short(3)]
    assert node.engine.blocks(space="zz") == []


def test_jobs_are_ranks_that_may_write(node: Node) -> None:
    peer = Peer(node, "eng", shards=HALVES)
    each = len(peer.unused(0))
    node.end(peer.ranks[1])
    assert node.engine.jobs() == [
        report.JobReport("eng", 0, peer.ranks[0], True, each, 0),
        report.JobReport("eng", 1, peer.ranks[1], False, 0, each),
    ]


# ── what a node that leaves hands over: used last, front of a prefix first ────────────────────────


SLOTS = 32


def found(node: Node, share: float) -> list[PrepareRequest]:
    return hottest_runs(node.engine.used_slots(), share, node.engine.named)


def runs(node: Node, share: float) -> list[bytes]:
    return [run.keys for run in found(node, share)]


def test_what_was_used_last_comes_first_and_a_prefix_before_what_continues_it() -> None:
    node, peer = attached(Node(slots=SLOTS))
    peer.store(1, 2, 3, 4, 5)
    peer.lease(1, 4, 5)
    peer.lease(2, 1, 2, 3)
    assert runs(node, 1.0) == [keys(1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("share", "count"), [(1 / SLOTS, 1), (4.5 / SLOTS, 4), (0.0, 0)])
def test_a_share_of_the_arena_is_not_exceeded(share: float, count: int) -> None:
    node, peer = attached(Node(slots=SLOTS))
    peer.store(1, 2, 3, 4, 5, 6)
    peer.lease(1, 1, 2, 3, 4, 5, 6)
    assert runs(node, share) == ([keys(*range(1, count + 1))] if count else [])


def test_spaces_have_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RUN_KEYS", 2)
    node, peer = attached(Node(slots=SLOTS))
    other = Peer(node, "f", space=space("other"))
    peer.store(1, 2, 3)
    other.store(7, 8)
    peer.lease(1, 1, 2)
    other.lease(1, 7, 8)
    peer.lease(2, 3)
    first, second, third = found(node, 1.0)
    assert [first.keys, second.keys, third.keys] == [keys(3, 1), keys(2), keys(7, 8)]
    assert first.space == second.space != third.space


def test_a_block_in_shards_of_two_ranks_is_named_once_and_slots_that_are_granted_are_not() -> None:
    node, peer = attached(Node(slots=SLOTS), shards=HALVES)
    assert runs(node, 1.0) == []
    peer.store(1, 2)
    peer.lease(1, 1, 2)
    assert runs(node, 1.0) == [keys(1, 2)]


def test_a_block_that_leaves_between_two_questions_is_left_out() -> None:
    node, peer = attached(Node(slots=SLOTS))
    peer.store(1, 2)
    used = node.engine.used_slots()
    node.step(Clear(None, None))
    assert hottest_runs(used, 1.0, node.engine.named) == []


def test_blocks_are_named_outside_the_loop_of_the_node_as_they_were_when_it_was_asked() -> None:
    node, peer = attached(Node(slots=SLOTS))
    peer.store(1, 2, 3)
    named = node.engine.named(node.engine.used_slots().words)
    assert next(named)[1] in keys(1, 2, 3), "none is made before it is taken"
    node.step(Clear(None, None))
    assert len(list(named)) == 2
