"""Heartbeat, back-off, refusal: when the cache is off, and that it is said once."""

from __future__ import annotations

from kvstore.client.core.attachment import CREDITS_MAX, DialState
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as m
from tests.unit.client.conftest import AnsweredCore


def lost(node: AnsweredCore, heartbeat_ns: int) -> bool:
    """Whether the cache is off."""
    node.core.attachment.check_heartbeat(node.now_ns, heartbeat_ns)
    attachment = node.core.attachment
    assert attachment.is_open == (attachment.session != 0 and not attachment.is_silent)
    return attachment.is_silent


def test_with_the_next_beat_the_cache_is_on_again_and_nothing_was_given_up(
    node: AnsweredCore,
) -> None:
    node.attach(credits=3)
    node.core.take_notices()
    attachment, session = node.core.attachment, node.core.attachment.session
    beat = node.now_ns
    assert not lost(node, beat)
    node.wait(8 * 250)
    assert not attachment.check_heartbeat(node.now_ns, beat)
    assert not attachment.is_open
    (notice,) = node.core.take_notices()
    assert "heartbeat stopped" in notice
    assert not lost(node, node.now_ns)
    assert (attachment.session, len(attachment.credits[0])) == (session, 3)
    (notice,) = node.core.take_notices()
    assert "back" in notice
    beat = node.now_ns
    node.wait(8 * 250 + 1)
    assert attachment.check_heartbeat(node.now_ns, beat), "one that stays silent is left"


def test_a_node_that_comes_and_goes_is_told_of_rarely(node: AnsweredCore) -> None:
    node.attach()
    node.core.take_notices()
    for _ in range(60):
        beat = node.now_ns
        assert not lost(node, beat)
        node.wait(300)
        assert lost(node, beat)
    # 18 s: twice that it is away, and twice that it is back.
    assert len(node.core.take_notices()) <= 4


def test_an_absent_socket_is_noticed_once_and_retried_with_back_off(node: AnsweredCore) -> None:
    attachment = node.core.attachment
    tries = 0
    for _ in range(1000):
        if attachment.dial.is_due(node.now_ns):
            tries += 1
            attachment.connect_failed(node.now_ns, "no such file")
        node.wait(10)
    assert 10 <= tries <= 20
    assert len(node.core.take_notices()) == 1
    node.wait(1000)
    node.attach()
    assert len(node.core.take_notices()) == 1
    attachment.disconnected(node.now_ns, "gone")
    assert attachment.dial.state is DialState.DOWN
    assert len(node.core.take_notices()) == 1


def test_a_refusal_closes_and_waits_long(node: AnsweredCore) -> None:
    node.core.attachment.dial.connected(node.now_ns)
    assert node.give(m.Refused(reason="other version", permanent=True)) is not None
    node.wait(9000)
    assert not node.core.attachment.dial.is_due(node.now_ns)
    node.wait(2000)
    assert node.core.attachment.dial.is_due(node.now_ns)
    (notice,) = node.core.take_notices()
    assert "other version" in notice


def test_a_node_that_grants_without_end_is_not_believed(node: AnsweredCore) -> None:
    node.attach()
    for _ in range(CREDITS_MAX // 1000 + 2):
        node.grant(1000)
    assert len(node.core.attachment.credits[0]) == CREDITS_MAX


def test_credits_are_those_of_their_group_and_end_with_the_session_or_the_connection(
    node: AnsweredCore,
) -> None:
    credits = node.core.attachment.credits
    node.attach(credits=3)
    node.give(m.Grant(session=99, slots=bytes(4), generations=bytes(8)))
    assert len(credits[0]) == 3, "those of another session are not taken"
    node.give(m.SessionOpen(session=2, shard_counts=(1, 2)))
    assert not credits[0]
    for group in (0, 1, 2):
        node.give(m.Grant(session=2, slots=bytes(8), generations=bytes(16), group=group))
    assert {group: len(its) for group, its in credits.items()} == {0: 2, 1: 1}
    node.core.attachment.disconnected(node.now_ns, "gone")
    assert not any(credits.values())
    assert node.core.take_outbox() == []


def test_another_epoch_is_said_in_the_next_hello(node: AnsweredCore) -> None:
    node.attach()
    node.core.new_weights("abc", node.now_ns, emptied=True)
    assert node.core.attachment.hello().weights_epoch == "abc"
    node.wait(NS_PER_MS)
    assert node.core.attachment.dial.state is DialState.DOWN


WELCOME = m.Welcome(protocol=1, incarnation=7, now_ns=1, arena_bytes=1 << 20, generation_bytes=8192)


def test_why_no_session_opens_is_told_on_every_connection(node: AnsweredCore) -> None:
    attachment = node.core.attachment
    attachment.cannot_be_served("x" * 999)
    for _ in range(2):
        attachment.dial.connected(node.now_ns)
        assert node.core.take_outbox() == []
        node.give(WELCOME)
        assert node.core.take_outbox() == [m.Unserved("x" * m.UNSERVED_LENGTH_MAX)]
        attachment.disconnected(node.now_ns, "the node ended")
    attachment.dial.connected(node.now_ns)
    node.give(WELCOME)
    node.core.take_outbox()
    attachment.cannot_be_served("another reason")
    assert node.core.take_outbox() == [m.Unserved("another reason")]
