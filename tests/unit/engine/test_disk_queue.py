"""The queue for the disk as engines and nodes see it: who is before whom; and whatever becomes of a
block, a lease or a read meanwhile, each wait ends, and nothing of it is left."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.engine.events import AnswerPeer, Clear, Received
from kvstore.engine.moves import files as files_module
from kvstore.engine.moves.files import READS_COUNTED, ReadQueue
from kvstore.engine.moves.jobs import ReadPace
from kvstore.tier_events import FileRead
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.units import MIB
from kvstore.wire.messages import Hint, LeaseMore, LeaseRelease
from kvstore.wire.peers import ServeAnswer
from tests.unit.engine.disk import DiskNode, gone, known, slow_disk
from tests.unit.engine.harness import Peer, attached, keys, pairs
from tests.unit.engine.peers import serve


def on_disk(blocks: int, *, slots: int) -> tuple[DiskNode, Peer]:
    """A node that has blocks 1 to `blocks` on disk alone, and an engine."""
    node, peer = attached(DiskNode(slots=slots))
    node.step(known(*range(1, blocks + 1)))
    return node, peer


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> tuple[DiskNode, Peer]:
    """A node whose disk reads one block at a time, that of lease 1."""
    slow_disk(monkeypatch)
    node, peer = on_disk(30, slots=32)
    peer.lease(1, 1)
    return node, peer


def news(node: DiskNode, peer: Peer, lease: int) -> list[tuple[int, int]]:
    """(blocks, those still on their way) of each LeaseMore, once nothing is read any more."""
    while node.reads or node.engine.is_behind:
        if node.reads:
            node.answer(node.reads[0])
        node.step()
    assert not node.engine._arrivals._watches
    assert not len(node.engine.files._queue)
    sent = [each for each in node.sent[peer.scheduler] if isinstance(each, LeaseMore)]
    return [(len(pairs(each)), each.promoting) for each in sent if each.lease == lease]


def test_the_shortest_rest_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt blocks the disk for nobody, and those that come together do not wait for each
    other to the end."""
    slow_disk(monkeypatch, ahead_slots=2)
    node, peer = on_disk(30, slots=64)
    assert peer.lease(1, *range(1, 21)).promoting == 20
    assert len(node.reads) == 2
    assert peer.lease(2, 21, 22, 23).promoting == 3
    assert peer.lease(3, 24, 25, 26).promoting == 3
    assert peer.hint(30) == [True], "which nobody waits for"
    order = []
    while node.reads:
        assert len(node.reads) <= 2
        order.append(node.reads[0].keys)
        node.answer(node.reads[0])
    assert b"".join(order) == keys(1, 2, *range(21, 27), *range(3, 21))


def test_what_nobody_waits_for_takes_half_of_the_room_and_none_of_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_disk(monkeypatch, ahead_slots=4)
    node, peer = on_disk(30, slots=64)
    assert all(peer.hint(*range(1, 9)))
    assert len(node.reads) == 2
    node.read_all()
    peer.lease(1, *range(9, 21))
    assert len(node.reads) == 4
    ended = [FileRead(read.job, b"\1") for read in node.reads]
    node.reads.clear()
    hint = Hint(request=2, keys=keys(30))
    node.step(*ended, Received(ConnectionId(peer.scheduler), hint))
    assert [read.keys for read in node.reads] == [keys(number) for number in range(13, 17)]


def test_what_others_queued_before_counts_in_the_estimate_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files_module, "READ_BYTES", 1)
    node, peer = on_disk(30, slots=64)
    node.engine.files.pace = ReadPace(8 * 10**9)  # half a second a block
    block_ms = SLOT_BYTES_MIN / MIB * 8000
    all_ms = [peer.lease(number, *range(1, 21)).promoting_ms for number in (1, 2)]
    assert all_ms == [pytest.approx(20 * block_ms, rel=0.01)] * 2, "the same blocks"
    assert peer.lease(3, 21, 22).promoting_ms < 0.5 * all_ms[0], "it is shorter"
    longest_ms = peer.lease(4, *range(1, 21), 23).promoting_ms
    assert longest_ms == pytest.approx(23 * block_ms, rel=0.01)


def test_what_dram_has_no_room_for_is_not_waited_for() -> None:
    node, peer = on_disk(12, slots=8)
    peer.lease(1, *range(1, 7))
    peer.lease(2, *range(7, 13))
    while node.reads:
        node.answer(node.reads[0])
    sent = [each for each in node.sent[peer.scheduler] if isinstance(each, LeaseMore)]
    came = {
        lease: sum(len(pairs(each)) for each in sent if each.lease == lease) for lease in (1, 2)
    }
    assert came[1] == 6 > came[2]
    assert sent[-1].promoting == 0, "the rest does not come, and nobody waits for it"


def test_what_is_given_up_takes_no_room_in_the_queue(crowded: tuple[DiskNode, Peer]) -> None:
    node, peer = crowded
    for lease in range(2, 200):
        peer.lease(lease, *range(2, 20))
        node.hear(peer.scheduler, LeaseRelease([lease]))
    queue = node.engine.files._queue
    assert len(queue) == len(queue._order) == 0
    assert peer.hint(30) == [True]
    node.answer(node.reads[0])
    peer.hint(30)
    assert node.reads[0].keys == keys(30), "what nobody waits for has its turn again"


def test_reads_that_change_again_and_again_leave_no_places_behind() -> None:
    """As when leases grow."""
    node, _ = attached(DiskNode())
    (owner,) = node.state.owners.values()
    queue = ReadQueue(64)
    for number in range(3 * READS_COUNTED):
        rows = [number % 64, (number + 1) % 64]
        names = np.array([row.to_bytes(32, "little") for row in rows], dtype="V32")
        queue.enter((1, number % 50), owner.groups[0].asker, names, np.array([rows]))
    assert len(queue._order) == len(queue) == 50


def test_blocks_that_are_gone_are_passed_over_in_more_than_one_step(
    crowded: tuple[DiskNode, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is queued was cleared: one step does not look at all of it."""
    monkeypatch.setattr(files_module, "BEGUN_PER_STEP", 4)
    node, peer = crowded
    for lease in range(2, 20):
        peer.lease(lease, *range(2, 20))
    node.step(Clear(None, None))
    node.answer(node.reads[0])
    assert len(node.engine.files._queue) == 18 - 4
    assert node.engine.is_behind
    assert news(node, peer, 19) == [(0, 0)]


def test_a_long_queued_read_that_is_gone_is_passed_over_at_once(
    crowded: tuple[DiskNode, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "BEGUN_PER_STEP", 4)
    node, peer = crowded
    peer.lease(2, *range(2, 30))
    node.step(gone(*range(2, 29), at=2))
    node.answer(node.reads[0])
    assert node.reads[0].keys == keys(29)


def served(node: DiskNode, *numbers: int) -> list[int]:
    """Blocks of each answer to another node that asks for these."""
    commands = node.step(serve(5, 1, *numbers))
    while node.reads:
        read = node.reads.pop(0)
        commands += node.step(FileRead(read.job, b"\1" * (len(read.keys) // 32)))
    assert not len(node.engine.files._queue)
    answers = [each.its for each in commands if isinstance(each, AnswerPeer)]
    return [len(each.slots) // 4 for each in answers if isinstance(each, ServeAnswer)]


def test_what_is_read_for_a_serving_does_not_take_the_room_of_its_start(
    crowded: tuple[DiskNode, Peer],
) -> None:
    del crowded  # only for its slow disk
    node, peer = attached(DiskNode(slots=16))
    peer.store(1)
    for number in range(100, 111):
        node.write_nothing()
        peer.store(number)
    node.write_nothing()
    node.step(known(*range(2, 8)))
    assert served(node, *range(1, 8)) == [3], "as many as another node may pin"


def test_a_serving_that_dram_has_no_room_for_leaves_nothing_queued() -> None:
    node, peer = attached(DiskNode(slots=8))
    peer.store(1)
    node.write_nothing()
    node.step(known(*range(2, 12)))
    peer.lease(1, *range(2, 12))
    while node.reads:
        node.answer(node.reads[0])
    node.step(known(20, at=50))
    (blocks,) = served(node, 1, 20)
    assert blocks <= 1
