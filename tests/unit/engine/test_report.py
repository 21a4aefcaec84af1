"""Reports for inspect, of a node with two engines, leases and a rank that is away."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.engine.events import Exited, FileKnown
from kvstore.engine.why import report
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.messages import Pinned
from kvstore.wire.record import Scope
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import BLOCK_BYTES
from tests.unit.engine.harness import HALVES, SMALL, WHOLE, Node, Peer, checksum, key, keys


@pytest.fixture
def node() -> Node:
    return Node(slots=32)


def test_an_empty_node(node: Node) -> None:
    assert node.engine.nodes() == [report.NodeReport("0000000000000007", 0, 0, 0, 0, 0, 0, 0)]
    dram, file = node.engine.tiers()
    assert (dram.tier, dram.capacity_bytes, dram.ready_bytes, dram.used_bytes) == (
        "dram",
        32 * SLOT_BYTES_MIN,
        32 * SLOT_BYTES_MIN,
        0,
    )
    assert (file.tier, file.blocks) == ("file", 0)
    for rows in (
        node.engine.spaces(),
        node.engine.blocks(),
        node.engine.leases(),
        node.engine.jobs(),
    ):
        assert rows == []


def test_nodes_and_tiers_count_what_is_there(node: Node) -> None:
    one, two = Peer(node, "a"), Peer(node, "b", shards=HALVES)
    one.seal(1, 2)
    two.seal(1, rank=0)
    one.lease(1, 1, 2)
    two.node.end(two.ranks[1])
    assert node.engine.nodes() == [report.NodeReport("0000000000000007", 4, 2, 1, 1, 3, 0, 0)]
    dram = node.engine.tiers()[0]
    assert (dram.blocks, dram.slots_sealed, dram.slots_leased) == (3, 3, 2)
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
    node.hear(one.scheduler, Pinned(1))
    assert node.hangups[one.scheduler] == "Pinned from a scheduler"


def test_spaces_name_tenant_label_and_size(node: Node) -> None:
    peer = Peer(node, "a")
    Peer(node, "b", tenant="u")
    peer.seal(1, 2)
    space_id = fingerprint(SMALL, weights_epoch="")
    sums = checksum(2) + checksum(3)
    node.step(
        FileKnown(
            Scope("t", space_id, WHOLE, BLOCK_BYTES),
            keys(2, 3),
            np.array([1, 2], "<u8").tobytes(),
            sums,
        )
    )
    hello = peer.scheduler_hello(label="tiny-model")
    peer.scheduler = node.connect(hello)
    peer.be_quiet()
    name = space_id.hex()
    assert node.engine.spaces() == [
        report.SpaceReport(name, "t", "tiny-model", "", 2, 2, 2 * SLOT_BYTES_MIN, 1, ""),
        report.SpaceReport(name, "u", "b", "", 0, 0, 0, 1, ""),
    ]
    assert node.engine.space_ids() == [space_id]


def test_a_model_whose_engine_is_gone_keeps_its_name(node: Node) -> None:
    peer = Peer(node, "llama")
    peer.seal(1)
    node.end(peer.scheduler, *peer.ranks)
    node.step(*(Exited(ConnectionId(c)) for c in (peer.scheduler, *peer.ranks)))
    (row,) = node.engine.spaces()
    assert (row.label, row.blocks_dram, row.engines) == ("llama", 1, 0)


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
        "key": key(1)[:4].hex(),
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
    assert [row.key for row in node.engine.blocks(space=begin)] == [key(3)[:4].hex()]
    assert node.engine.blocks(space="zz") == []


def test_rows_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROWS_MAX", 2)
    peer = Peer(node)
    peer.seal(1, 2, 3)
    for lease in range(3):
        peer.lease(lease, 1)
    assert len(node.engine.blocks()) == 2
    assert len(node.engine.leases()) == 2


def test_leases_belong_to_engines(node: Node) -> None:
    peer = Peer(node, "eng", shards=HALVES)
    peer.store(1, 2)
    peer.lease(4, 1, 2)
    node.now_ns += 2_000_000
    node.tick(1)
    assert node.engine.leases() == [report.LeaseReport("eng", peer.session, 4, 2, 3, 9_997)]


def test_jobs_are_ranks_that_may_write(node: Node) -> None:
    peer = Peer(node, "eng", shards=HALVES)
    each = len(peer.unused(0))
    node.end(peer.ranks[1])
    assert node.engine.jobs() == [
        report.JobReport("eng", 0, peer.ranks[0], True, each, 0),
        report.JobReport("eng", 1, peer.ranks[1], False, 0, each),
    ]


class Column(np.ndarray[Any, np.dtype[Any]]):
    """Counts how often something is computed of it, or of what was taken out of it."""

    looks = 0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        Column.looks += 1
        plain = (np.asarray(i) if isinstance(i, Column) else i for i in inputs)
        found = getattr(ufunc, method)(*plain, **options)
        return found.view(Column) if found.dtype != bool else found


def looks(spaces: int) -> tuple[int, int]:
    """At whole columns: of `spaces` and of `jobs`, on a node with so many engines."""
    node = Node(slots=64, credit_share=0.05, credit_blocks_max=1)
    for number in range(spaces):
        Peer(node, f"e{number}", epoch=str(number)).seal(number)
    state = node.state
    table, residency = state.residency.table, state.residency
    columns: list[tuple[Any, str]] = [
        (table, "scopes"),
        (residency._dram, "places"),
        (state.slots, "writer"),
    ]
    for owner, name in columns:
        column: NDArray[Any] = getattr(owner, name)
        setattr(owner, name, column.view(Column))
    counts = []
    for ask in (node.engine.spaces, node.engine.jobs):
        Column.looks = 0
        rows: list[Any] = ask()
        assert len(rows) == spaces
        counts.append(Column.looks)
    return counts[0], counts[1]


def test_no_column_is_looked_through_for_each_space_or_rank() -> None:
    few = looks(2)
    assert few == looks(12)
    assert few[0] >= 1
    assert few[1] == 0, "slots of a rank are listed"
