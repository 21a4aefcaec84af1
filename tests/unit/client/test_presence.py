"""Blocks that count as stored because the node knows them: what loads and restarts change."""

from __future__ import annotations

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
    node.attach(credits=8, incarnation=8)
    stored = step(node, PROMPT_TOKENS)
    assert stored is not None
    assert split(stored.keys) == KEYS
