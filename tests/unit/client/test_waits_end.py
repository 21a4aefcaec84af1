"""No request is told to ask again for ever: whatever a node says, the engine computes at last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.client.core.attachment import DialState
from kvstore.wire import messages as m
from tests.unit.client.conftest import AnsweredCore, chain

STEP_MS = 5
LONGEST_MS = 250 + 2000 + 250 + 250
"""A heartbeat's limit, a promotion, and the time for an answer, once more for the last question."""


def welcome(node: AnsweredCore) -> None:
    hello = m.Welcome(
        protocol=1, incarnation=7, now_ns=node.now_ns, arena_bytes=1 << 20, generation_bytes=8192
    )
    say(node, hello)


def say(node: AnsweredCore, message: m.Message) -> None:
    """As the connector takes a message: a reason to close the socket closes it."""
    attachment = node.core.attachment
    if attachment.dial.is_due(node.now_ns):
        attachment.dial.connected(node.now_ns)
    if attachment.dial.state is DialState.DOWN:
        return  # there is no socket that it could come by
    reason = node.give(message)
    if reason is not None:
        attachment.disconnected(node.now_ns, reason)


def open_or_close(node: AnsweredCore) -> None:
    """A session that ends in the step after it began, before any answer."""
    if node.core.attachment.session:
        say(node, m.SessionClosed(session=node.session, reason="a rank left"))
    else:
        open_another(node)


def open_another(node: AnsweredCore) -> None:
    node.session += 1
    say(node, m.SessionOpen(session=node.session, shard_counts=(1,)))


@pytest.mark.parametrize("lie", [welcome, open_or_close, open_another])
def test_a_lying_node_holds_nobody(lie: Callable[[AnsweredCore], None]) -> None:
    node = AnsweredCore()
    keys = chain("a", 400)  # so many that their answer is waited for longest
    node.core.attachment.dial.connected(node.now_ns)
    welcome(node)
    node.arrive("r", keys)
    begin_ns, outcome = node.now_ns, node.match("r")
    assert outcome is None
    while outcome is None and node.now_ns - begin_ns < 60 * 10**9:
        node.wait(STEP_MS)
        lie(node)
        outcome = node.match("r")
    assert outcome in ("deadline", "node unreachable")
    assert node.now_ns - begin_ns <= (LONGEST_MS + STEP_MS) * 10**6
    assert node.core.lookups.leases_open == 0


def test_a_second_welcome_is_no_welcome(node: AnsweredCore) -> None:
    node.attach(credits=1)
    again = m.Welcome(
        protocol=1, incarnation=8, now_ns=1, arena_bytes=1 << 20, generation_bytes=8192
    )
    assert node.give(again) == "the node welcomed twice"
    assert node.core.attachment.incarnation == 7
