"""What is asked of other nodes, what comes, and who waits for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvstore.engine.events import Locate, Received, Tick
from kvstore.engine.moves import fetches as fetches_module
from kvstore.engine.moves.arrivals import LOOKS_PER_STEP
from kvstore.engine.moves.fetches import (
    ABSENT_NS,
    AVOID_FIRST_NS,
    AVOID_MOST_NS,
    COMING_BYTES,
    COMING_BYTES_PER_ENGINE,
    UNANSWERED_MAX,
    _PeerPace,
)
from kvstore.engine.moves.jobs import SMALL_READ_BYTES, ReadPace
from kvstore.types import SLOT_BYTES_MIN, ConnectionId
from kvstore.wire.messages import (
    KEYS_PER_DATAGRAM_MAX,
    Hint,
    LeaseMore,
    Measured,
)
from kvstore.wire.record import Scope
from tests.kit.moves_check import check_fetches
from tests.unit.engine.disk import SPACE
from tests.unit.engine.harness import HALVES, WHOLE, Peer, attached, keys, pairs, short
from tests.unit.engine.peers import PeerNode


def seek(node: PeerNode, peer: Peer, *numbers: int, at: str) -> None:
    """An engine names blocks, and the index a node that holds all of them."""
    peer.hint(*numbers)
    node.locate((at, len(numbers)))


def told_of(node: PeerNode, peer: Peer) -> list[LeaseMore]:
    return [each for each in node.sent[peer.scheduler] if isinstance(each, LeaseMore)]


def test_what_another_node_holds_is_fetched_while_the_request_waits() -> None:
    node, peer = attached(PeerNode())
    reply = peer.lease(1, 1, 2, 3)
    assert (reply.slots, reply.promoting, reply.promoting_ms >= 2) == (b"", 3, True)
    (question,) = node.locates
    assert (question.tenant, question.space, question.keys) == ("t", SPACE, keys(1, 2, 3))
    node.locate(("far", 2))
    (fetch,) = node.fetches
    assert (fetch.node, fetch.keys) == ("far", keys(1, 2))
    block_bytes = peer.rank_hello(0).groups[0].block_bytes
    assert fetch.targets == (Scope("t", SPACE, WHOLE, block_bytes),)
    node.arrive()
    told, counters = peer.more, node.engine.counters
    assert [slot for slot, _ in pairs(told)] == fetch.slots.tolist()
    assert (told.promoting, told.from_peer, told.from_file) == (0, 2, 0)
    assert (counters.fetched_blocks, counters.fetch_blocks_lost) == (2, 0)
    node.write_all()
    assert node.blocks() == {short(1): "dram+file", short(2): "dram+file"}, "kept like a store"


def test_the_same_is_not_asked_twice_at_a_time_nor_at_once_again() -> None:
    node, peer = attached(PeerNode())
    peer.hint(1, 2, 3)
    assert peer.lease(1, 1, 2, 3).promoting == 3
    assert len(node.locates) == 1
    node.locate()
    assert peer.lease(2, 1, 2, 3).promoting == 0
    assert not node.locates
    node.tick(ABSENT_NS / 10**6)
    assert peer.lease(3, 1, 2, 3).promoting == 3


def test_an_index_that_is_away_is_left_alone_for_a_while_and_longer_each_time() -> None:
    node, peer = attached(PeerNode())
    for number in range(UNANSWERED_MAX):
        peer.hint(number)
        node.locate(is_known=False)
    for failures in range(3):
        assert peer.lease(failures + 1, 100 + failures).promoting == 0
        assert not node.locates
        node.tick((AVOID_FIRST_NS << failures) / 10**6)
        peer.hint(200 + failures)
        node.locate(is_known=False)
    node.tick(AVOID_MOST_NS / 10**6)
    peer.hint(300)
    node.locate()
    for number in range(1, UNANSWERED_MAX):
        peer.hint(300 + number)
        node.locate(is_known=False)
    peer.hint(400)
    assert len(node.locates) == 1, "it answers again: what was before does not count"


def test_a_step_looks_at_some_who_wait_and_the_next_ones_at_the_others() -> None:
    node, peer = attached(PeerNode(lease_count_max=4 * LOOKS_PER_STEP))
    leases = range(1, 2 * LOOKS_PER_STEP + 2)
    for lease in leases:
        peer.lease(lease, 1)
    node.locate(("far", 1))
    while node.engine.is_behind:  # of where it is, which is news too
        node.step(Tick())
    node.sent[peer.scheduler].clear()
    node.arrive()
    told = []
    while node.engine.is_behind:
        told.append(len(told_of(node, peer)))
        node.step(Tick())
    told.append(len(told_of(node, peer)))
    assert told == [LOOKS_PER_STEP, 2 * LOOKS_PER_STEP, 2 * LOOKS_PER_STEP + 1]
    assert {each.lease for each in told_of(node, peer)} == set(leases)


def test_the_longest_run_is_fetched_and_of_equals_the_quicker_peer() -> None:
    node, peer = attached(PeerNode())
    peer.hint(1, 2, 3)
    node.locate(("a", 1), ("b", 3), ("c", 2))
    assert node.fetches[0].node == "b"
    node.now_ns += 10**10
    node.arrive()
    peer.hint(11, 12)
    node.locate(("b", 2), ("c", 2))
    assert node.fetches[0].node == "c", "b took ten seconds"


def test_what_a_fetch_shows_of_a_peer_counts_though_others_took_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetches_module, "PEERS_MAX", 2)
    node, peer = attached(PeerNode())
    for number, name in enumerate(("slow", "b", "c"), start=1):
        seek(node, peer, number, at=name)
    assert node.engine._fetches._peers.keys() == {"b", "c"}
    node.now_ns += 10**10
    node.arrive()
    peer.hint(11)
    node.locate(("slow", 1), ("new", 1))
    assert node.fetches[-1].node == "new"


def test_a_peer_that_was_slow_is_tried_again_by_and_by() -> None:
    """It was slow when many asked at once: not asked any more, it would be taken for slow for
    ever."""
    node, peer = attached(PeerNode())
    node.hear(peer.scheduler, Measured(compute_ns_per_token=1_000_000, load_ns_per_token=10))
    for number in (1, 2):
        seek(node, peer, number, at="slow")
    node.now_ns += 10**11
    node.arrive()
    node.arrive()
    asked = 0
    for seconds in range(60):
        seek(node, peer, 100 + seconds, at="slow")
        if node.fetches:
            asked += 1
            node.now_ns += 10**11
            node.arrive()
        node.tick(1000)
    assert 2 <= asked <= 5, "about one fetch in as many seconds as a sample is remembered"


def test_one_slow_fetch_among_quick_ones_stops_no_others_and_one_that_hung_does() -> None:
    node, peer = attached(PeerNode())
    size = peer.rank_hello(0).groups[0].block_bytes
    node.hear(peer.scheduler, Measured(compute_ns_per_token=size, load_ns_per_token=1))
    pays_ns = 8 * SMALL_READ_BYTES  # for a fetch of a block of 16 tokens
    numbers = itertools.count(1)

    def is_fetched(took_ns: int) -> bool:
        seek(node, peer, next(numbers), at="far")
        was_fetched = bool(node.fetches)
        if was_fetched:
            node.now_ns += took_ns
            node.arrive()
        return was_fetched

    quick, slow, hung = pays_ns // 4, pays_ns * 2, pays_ns * 100
    taken = [quick, quick, quick, slow, quick, quick, quick, slow, quick, hung, quick]
    assert [is_fetched(each) for each in taken] == [True] * 10 + [False]


def test_the_estimate_is_that_of_the_own_blocks_and_of_those_asked_for_before() -> None:
    node, peer = attached(PeerNode())
    node.engine._fetches._peers["far"] = _PeerPace(ReadPace(10**9))
    first, second = range(1, 4), range(11, 14)
    begun = [peer.lease(number, *its).promoting_ms for number, its in ((1, first), (2, second))]
    assert begun[0] < begun[1]
    assert peer.lease(3, *first).promoting_ms == begun[0], "the second comes after it"
    node.locate(("far", 3))
    node.locate(("far", 3))
    again = [peer.lease(4, *first), peer.lease(5, *second)]
    assert [reply.promoting_from for reply in again] == ["far", "far"]
    assert again[0].promoting_ms < again[1].promoting_ms


def test_whoever_wants_it_fetches_what_is_computed_as_quickly_too() -> None:
    node, peer = attached(PeerNode(fetches_always=True))
    node.hear(peer.scheduler, Measured(compute_ns_per_token=1, load_ns_per_token=1))
    peer.hint(1, 2)
    node.locate(("short", 1), ("long", 2))
    assert [(fetch.node, fetch.keys) for fetch in node.fetches] == [("long", keys(1, 2))]


def test_a_peer_that_fails_is_left_alone_for_a_while_and_longer_each_time() -> None:
    node, peer = attached(PeerNode())
    for failures in range(3):
        seek(node, peer, 100 + failures, at="bad")
        node.arrive([False], peer_failed=True)
        seek(node, peer, 200 + failures, at="bad")
        assert not node.fetches
        node.tick((AVOID_FIRST_NS << failures) / 10**6)
    seek(node, peer, 300, at="bad")
    node.arrive()
    seek(node, peer, 301, at="bad")
    assert node.fetches, "it is well again"


def test_what_ends_with_one_session_is_one_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "FETCH_BYTES", SLOT_BYTES_MIN)
    node, peer = attached(PeerNode())
    peer.hint(*range(1, 7))
    node.locate(("far", 6))
    assert len(node.fetches) == 6
    for _ in range(6):
        node.arrive([False], peer_failed=True)
    node.tick(AVOID_FIRST_NS / 10**6)
    seek(node, peer, 50, at="far")
    assert node.fetches, "a moment's trouble is over after a second"


def test_questions_that_an_index_leaves_at_one_time_are_one_silence() -> None:
    node, peer = attached(PeerNode())
    for number in range(3 * UNANSWERED_MAX):
        peer.hint(number)
    for _ in range(3 * UNANSWERED_MAX):
        node.locate(is_known=False)
    node.tick(AVOID_FIRST_NS / 10**6)
    peer.hint(50)
    assert len(node.locates) == 1


@pytest.mark.parametrize("limit", ["LOCATES_MAX", "COMING_BYTES_MAX", "COMING_BYTES_PER_ENGINE"])
def test_questions_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(fetches_module, limit, 2 * (1 if limit == "LOCATES_MAX" else COMING_BYTES))
    node, peer = attached(PeerNode())
    for number in range(5):
        peer.hint(number)
    assert len(node.locates) == 2


def test_what_an_engine_asks_for_takes_a_bounded_share_whatever_its_shards() -> None:
    """475 MiB, before: 256 hints of 2,048 keys with 8 shards."""
    node = PeerNode()
    peer = Peer(node, shards=HALVES)
    per_engine = COMING_BYTES_PER_ENGINE // COMING_BYTES
    full = np.arange(KEYS_PER_DATAGRAM_MAX * 4, dtype="<u8").reshape(-1, 4)
    for number in range(per_engine // KEYS_PER_DATAGRAM_MAX + 5):
        hinted = (full + np.uint64(number << 32)).tobytes()
        commands = node.engine.step(
            [Received(ConnectionId(peer.scheduler), Hint(request=number, keys=hinted))],
            node.now_ns,
        )
        asked = any(isinstance(command, Locate) for command in commands)
        assert asked == ((number + 1) * KEYS_PER_DATAGRAM_MAX <= per_engine)
    fetches = node.engine._fetches
    assert sum(map(len, fetches._coming.values())) <= per_engine, "one entry a key, not a shard"
    check_fetches(fetches)
    commands = node.hear(Peer(node, "other", shards=HALVES).scheduler, Hint(1, keys(77)))
    assert any(isinstance(command, Locate) for command in commands), "another has its own share"
