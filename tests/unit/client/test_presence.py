"""Blocks that count as stored because the node knows them: what loads and restarts change."""

from __future__ import annotations

from kvstore.client.core.hits import Presence
from kvstore.wire import messages as m
from tests.unit.client.conftest import split
from tests.unit.client.test_pushes import PushNode
from tests.unit.client.test_tails import KEYS, PROMPT_TOKENS, arrive, step


def test_a_node_that_lost_everything_is_given_the_blocks_of_running_requests() -> None:
    node = PushNode()
    node.keys = set(KEYS)
    arrive(node, None)
    node.core.attachment.disconnected(node.now_ns, "crash")
    node.wait(60_000)
    node.keys = set()
    assert node.core.attachment.wants_connection(node.now_ns)
    node.core.attachment.connected(node.now_ns)
    node.session += 1
    welcome = m.Welcome(
        protocol=1, incarnation=8, now_ns=node.now_ns, arena_bytes=1 << 20, generation_bytes=8192
    )
    node.give(welcome)
    node.give(m.SessionOpen(node.session, node.shard_counts, node=node.name))
    node.grant(8)
    stored = step(node, PROMPT_TOKENS)
    assert stored is not None
    assert split(stored.keys) == KEYS


def test_leased_blocks_are_there_and_none_between_is_absent() -> None:
    present = Presence()
    present.mark_present(0, range(4))
    assert present.get(0) is None, "an answer to no question"
    present.update_from_answer(0, 0, b"\x00")
    present.mark_present(0, range(2, 20))
    present.mark_present(0, range(5, 5))
    mask = present.get(0)
    assert mask is not None
    assert mask.tolist() == [False] * 2 + [True] * 6
    present.mark_absent(0, 6)
    assert mask.tolist() == [False] * 2 + [True] * 4 + [False] * 2
