"""What `kvstore explain` tells of other nodes: which one a block came from, or why from none."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.engine.events import Candidate, Fetched, Located
from kvstore.engine.moves import fetches
from kvstore.engine.moves.fetches import UNANSWERED_MAX
from kvstore.engine.why import findings
from kvstore.engine.why.reasons import Reason
from kvstore.obs.reasons import of_request, word
from kvstore.types import SLOT_BYTES_MIN
from kvstore.wire.messages import LeaseRelease, Measured
from tests.unit.engine.harness import Peer, attached
from tests.unit.engine.peers import PeerNode
from tests.unit.engine.test_explain import ranges, texts, told

Row = tuple[int, int, str, Reason, str, Reason]
"""First block, blocks, tier, reason, node, what became of asking."""


def end(node: PeerNode, peer: Peer, *, blocks: int, loaded: int = 0, **more: Any) -> list[Row]:
    """The request ends; what is told of it."""
    told(node, peer, blocks=blocks, loaded=loaded, **more)
    rows = ranges(node)
    return [(r.first_block, r.blocks, r.tier, r.reason, r.node, r.sought) for r in rows]


def text(node: PeerNode, at: int = -1) -> str:
    return texts(node)[at]


def test_what_came_says_from_whom_and_how_long_it_took() -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1, 2, 3, 4)
    node.locate(("far", 3))
    node.now_ns += 31_500_000
    node.arrive()
    rows = end(node, peer, blocks=4, loaded=3)
    assert rows == [
        (0, 3, "peer", Reason.NONE, "far", Reason.FETCHED),
        (3, 1, "", Reason.NEVER_STORED, "", Reason.NOBODY_HAS_IT),
    ]
    assert text(node, 0) == "loaded, after it was fetched from node far: 3 blocks in 31.5 ms"
    assert "no other node is known to hold it; node far has 3 before it" in text(node)


def test_an_index_that_does_not_answer_is_named() -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1)
    assert end(node, peer, blocks=1) == [(0, 1, "", Reason.NEVER_STORED, "", Reason.NO_ANSWER_YET)]
    node.locate(is_known=False)
    assert end(node, peer, blocks=1) == [
        (0, 1, "", Reason.NEVER_STORED, "", Reason.INDEX_UNREACHABLE)
    ]
    for number in range(UNANSWERED_MAX - 1):
        peer.hint(10 + number)
        node.locate(is_known=False)
    peer.lease(2, 5)
    assert not node.locates, "it is left alone"
    rows = end(node, peer, blocks=1, leases=[2])
    assert rows == [(0, 1, "", Reason.NEVER_STORED, "", Reason.INDEX_UNREACHABLE)]
    assert "the index is unreachable" in text(node)


def test_too_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "LOCATES_MAX", 1)
    node, peer = attached(PeerNode())
    peer.hint(9)
    peer.lease(1, 1)
    assert end(node, peer, blocks=1) == [
        (0, 1, "", Reason.NEVER_STORED, "", Reason.TOO_MANY_QUESTIONS)
    ]


def test_computing_is_cheaper_and_both_numbers_are_told() -> None:
    node, peer = attached(PeerNode())
    size = peer.rank_hello(0).groups[0].block_bytes
    node.hear(peer.scheduler, Measured(compute_ns_per_token=size // 16, load_ns_per_token=1))
    peer.lease(1, 1, 2, 3)
    node.locate(("far", 2), ("further", 3))
    assert not node.fetches
    assert end(node, peer, blocks=3) == [
        (0, 3, "", Reason.FETCH_COST, "further", Reason.FETCH_COST)
    ]
    each = f"{3 * size / 1e6:.1f} ms"
    assert text(node) == (
        f"node further holds 3 blocks: fetching was estimated at {each}, computing at {each};"
        " a fetch must take at most half of that"
    )
    assert fetches.GAIN == 2, "half"
    (row,) = node.engine.explain.requests("", limit=1)
    assert word(row.outcome) == "cost gate (peer)"
    assert of_request(row) == text(node)


def test_a_node_that_failed_is_left_alone_and_so_it_is_told() -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1)
    node.locate(("far", 1))
    fetch = node.fetches.pop()
    node.step(Fetched(fetch.job, b"\0", peer_failed=True, trouble="it hung up\x1b"))
    assert end(node, peer, blocks=1) == [
        (0, 1, "", Reason.FETCH_FAILED, "far", Reason.FETCH_FAILED)
    ]
    assert text(node).endswith("failed after 0.0 ms: 0 of 1 came; it hung up?")
    peer.lease(2, 2)
    node.locate(("far", 1))
    rows = end(node, peer, blocks=1, leases=[2])
    assert rows == [(0, 1, "", Reason.NODE_AVOIDED, "far", Reason.NODE_AVOIDED)]
    assert "not fetched after 1 failures in a row" in text(node)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"not_served": 2}, "2 were not served"),
        ({"not_kept": 2}, "2 did not stay until they were read"),
        ({"damaged": 2}, "2 failed their checksums"),
    ],
)
def test_what_was_fetched_and_is_not_good_says_why(fields: dict[str, int], said: str) -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1, 2, 3)
    node.locate(("far", 3))
    (fetch,) = node.fetches
    sums = bytes(16 * 3)
    node.step(Fetched(fetch.job, b"\1\0\0", sums, **fields))  # type: ignore[arg-type]
    assert end(node, peer, blocks=3, loaded=1) == [
        (0, 1, "peer", Reason.NONE, "far", Reason.FETCH_FAILED),
        (1, 2, "", Reason.FETCH_FAILED, "far", Reason.FETCH_FAILED),
    ]
    assert f"node far failed after 0.0 ms: 1 of 3 came; {said}" in text(node)
    peer.lease(2, 2)
    node.locate()
    rows = end(node, peer, blocks=1, leases=[2])
    assert rows == [(0, 1, "", Reason.NEVER_STORED, "", Reason.NOBODY_HAS_IT)]


def test_no_room_for_all_and_then_for_nothing() -> None:
    node, peer = attached(PeerNode(slots=32))
    peer.lease(1, *range(1, 21))
    node.locate(("far", 20))
    assert sum(len(fetch.slots) for fetch in node.fetches) == 8, "a quarter of the arena"
    peer.lease(2, *range(30, 40))
    node.locate(("far", 10))
    rows = end(node, peer, blocks=10, leases=[2])
    assert rows == [(0, 10, "", Reason.NO_ROOM, "far", Reason.NO_ROOM)]
    while node.fetches:
        node.arrive()
    rows = end(node, peer, blocks=20, loaded=8)
    assert rows == [
        (0, 8, "peer", Reason.NONE, "far", Reason.FETCHED),
        (8, 12, "", Reason.NEVER_STORED, "far", Reason.FETCHED),
    ]
    assert text(node).endswith("; there was room for 8 of 20")


def test_the_first_of_several_fetches_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "FETCH_BYTES", 2 * SLOT_BYTES_MIN)
    node, peer = attached(PeerNode())
    peer.lease(1, 1, 2, 3, 4)
    node.locate(("far", 4))
    node.arrive()
    assert end(node, peer, blocks=4, loaded=2, promotion_ns=1) == [
        (0, 2, "peer", Reason.NONE, "far", Reason.ON_ITS_WAY),
        (2, 2, "", Reason.TOO_LATE, "far", Reason.ON_ITS_WAY),
    ]
    node.arrive()
    assert end(node, peer, blocks=4, loaded=4) == [
        (0, 4, "peer", Reason.NONE, "far", Reason.FETCHED)
    ]


def test_who_did_not_wait_was_not_too_late_but_quicker() -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1, 2)
    node.locate(("far", 2))
    node.hear(peer.scheduler, LeaseRelease(leases=[1]))
    node.arrive()
    assert end(node, peer, blocks=2) == [(0, 2, "", Reason.WAIT_COST, "far", Reason.FETCHED)]
    assert text(node, 0).startswith("fetched; computing it was estimated to be faster than waiting")
    assert "2 of 2 blocks came from node far in" in text(node, 0)


def test_who_waits_in_the_middle_of_what_is_on_its_way_is_told_its_own_part() -> None:
    node, peer = attached(PeerNode())
    peer.lease(1, 1, 2, 3, 4)
    node.locate(("far", 3))
    peer.lease(2, 3, 4, 5)
    assert end(node, peer, blocks=3, leases=[2], promotion_ns=1) == [
        (0, 1, "", Reason.TOO_LATE, "far", Reason.ON_ITS_WAY),
        (1, 1, "", Reason.NEVER_STORED, "", Reason.NOBODY_HAS_IT),
        (2, 1, "", Reason.NEVER_STORED, "", Reason.NONE),
    ]
    assert "before the wait ended" in text(node, 0)
    node.arrive()


def test_a_search_that_is_not_remembered_leaves_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "SEARCHES_MAX", 1)
    node, peer = attached(PeerNode())
    peer.lease(1, 1)
    node.locate(("far", 1))
    node.arrive()
    peer.hint(9)
    node.step(Located(node.locates.pop().locate, (Candidate("x", 0),)))
    assert end(node, peer, blocks=1, loaded=1) == [(0, 1, "peer", Reason.NONE, "", Reason.NONE)]
