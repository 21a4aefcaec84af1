"""What a node that leaves hands over: the blocks used last, front of a prefix first."""

from __future__ import annotations

import pytest

from kvstore.engine.events import Clear
from kvstore.engine.why import report
from kvstore.engine.why.report import hottest_runs
from kvstore.wire.peers import PrepareRequest
from tests.unit.engine.harness import HALVES, Node, Peer, attached, keys, space

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
