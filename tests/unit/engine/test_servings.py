"""What a node serves to others, and what it says of it afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.engine.events import PeerGone
from kvstore.engine.moves.servings import WAIT_NS, WAITING_MAX
from kvstore.engine.state import Off
from kvstore.wire.peers import ServeAnswer
from tests.unit.engine.disk import SPACE, known
from tests.unit.engine.harness import HALVES, WHOLE, Peer, attached, checksum
from tests.unit.engine.peers import PeerNode, serve


def stored(*numbers: int, slots: int = 32) -> tuple[PeerNode, Peer]:
    node, peer = attached(PeerNode(slots=slots))
    peer.store(*numbers)
    return node, peer


def test_the_leading_run_is_served_with_what_proves_it() -> None:
    node, peer = stored(1, 2, 4)
    served = node.serve(1, 1, 2, 3, 4)
    assert served.shards == (WHOLE,)
    assert served.block_bytes == (peer.rank_hello(0).groups[0].block_bytes,)
    assert served.checksums == checksum(1) + checksum(2)
    assert len(np.frombuffer(served.slots, "<u4")) == 2
    assert node.give_back(1) == [True, True]
    assert node.engine.counters.served_blocks == 2
    assert node.engine.counters.served_bytes == 2 * served.block_bytes[0]


def test_nothing_is_served_of_what_is_not_there_or_anothers() -> None:
    node, _ = stored(1)
    assert node.serve(1, 9).slots == b""
    assert node.serve(2, 1, tenant="u").slots == b""
    assert node.serve(4, 1, 1).slots == b"", "a key is named twice"
    node.state.off["t", SPACE] = Off(None)
    assert node.serve(3, 1).slots == b""
    assert node.give_back(3) == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [1, 3])
def test_a_block_of_which_one_shard_was_cleared_meanwhile_did_not_stay(
    number: int, rank: int
) -> None:
    node, peer = attached(PeerNode(), shards=HALVES)
    peer.store(1, 2, 3)
    served = node.serve(1, 1, 2, 3)
    slot = int(np.frombuffer(served.slots, "<u4")[2 * (number - 1) + rank])
    (word,), _ = node.state.slots.words_of(np.array([slot], np.uint32))
    peer.distrust((slot, int(node.state.slots.generation[word])), rank=rank)
    assert node.give_back(1) == [each != number for each in (1, 2, 3)]
    assert node.engine.counters.served_blocks_changed == 1
    assert not node.engine.leases()


def test_servings_of_one_number_are_those_of_two_nodes() -> None:
    node, _ = stored(1, 2)
    node.serve(1, 1)
    node.serve(1, 1, 2, peer=2)
    assert node.give_back(1, peer=3) == [], "it was served nothing"
    assert node.give_back(1, peer=2) == [True, True]
    assert [row.blocks for row in node.engine.leases()] == [1]
    node.step(PeerGone(2))
    assert node.give_back(1) == [True]
    assert not node.engine.leases()


def test_a_serving_ends_with_its_time_and_says_so() -> None:
    node, _ = stored(1)
    node.serve(1, 1)
    (row,) = node.engine.leases()
    assert (row.engine_id, row.session, row.blocks) == ("(another node)", 0, 1)
    node.tick(node.config.lease_ttl_ms)
    assert not node.engine.leases()
    assert node.give_back(1) == [], "too late: nothing is vouched for"
    assert node.engine.counters.servings_expired == 1


def test_servings_of_a_peer_are_bounded() -> None:
    node = PeerNode(lease_count_max=2)
    Peer(node).store(1)
    assert [bool(node.serve(serving, 1).slots) for serving in range(1, 5)] == [
        True,
        True,
        False,
        False,
    ]
    assert node.serve(1, 1, peer=2).slots, "another's share is its own"


def asked(node: PeerNode, serving: int, *numbers: int, peer: int = 1) -> list[ServeAnswer]:
    """Another node asks; the answers so far to this serving."""
    node.step(serve(peer, serving, *numbers))
    return answers(node, serving)


def answers(node: PeerNode, serving: int) -> list[ServeAnswer]:
    return [served for served in node.served if served.serving == serving]


def test_what_is_on_disk_is_promoted_and_then_served() -> None:
    node, _ = stored(1)
    node.step(known(2, 3))
    assert asked(node, 1, 1, 2, 3, 4) == []
    assert sum(len(read.keys) // 32 for read in node.reads) == 2
    node.read_all()
    (served,) = answers(node, 1)
    assert served.checksums == checksum(1) + checksum(2) + checksum(3)
    assert node.give_back(1) == [True] * 3


def test_a_disk_that_is_slow_is_not_waited_for() -> None:
    node, _ = stored(1)
    node.step(known(2))
    assert asked(node, 1, 1, 2) == []
    node.tick(WAIT_NS / 1e6 / 2)
    assert answers(node, 1) == []
    node.tick(WAIT_NS / 1e6 / 2)
    (served,) = answers(node, 1)
    assert served.checksums == checksum(1)
    node.read_all()
    assert node.give_back(1) == [True]


def test_a_peer_that_is_gone_is_not_answered() -> None:
    node, _ = stored(1)
    node.step(known(2))
    asked(node, 1, 1, 2)
    node.step(PeerGone(1))
    node.read_all()
    assert answers(node, 1) == []
    assert not node.engine.leases()


def test_what_is_switched_off_while_it_is_read_is_not_served() -> None:
    node, _ = stored(1)
    node.step(known(2))
    asked(node, 1, 1, 2)
    node.state.off["t", SPACE] = Off(None)
    node.read_all()
    (served,) = answers(node, 1)
    assert served.slots == b""


def test_servings_that_wait_are_bounded() -> None:
    node, _ = stored()
    node.step(known(1))
    for serving in range(1, WAITING_MAX + 2):
        assert asked(node, serving, 1) == [] or serving > WAITING_MAX
    (refused,) = node.served
    assert (refused.serving, refused.slots) == (WAITING_MAX + 1, b"")
    assert asked(node, 1, 1, peer=2) == [], "another's share is its own"
