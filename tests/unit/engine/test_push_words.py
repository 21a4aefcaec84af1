"""Words about pushes that count for nothing, or for others: of another session, of another epoch,
and about blocks of which a shard was cleared while it was written.

Each is what a guard stands for; `test_pushes` has what pushes do when nothing of that happens.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvstore.engine.events import (
    AnswerPeer,
    Command,
    Event,
    PeerAsked,
    PeerGone,
    WritePush,
    Written,
)
from kvstore.engine.moves.grants import LIMBO_NS
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import PushCancel, PushExpect, PushOpen
from kvstore.wire.peers import Answer, Pushed, PushGrant, PushOver, PushRevoke
from tests.unit.engine.harness import Peer, keys
from tests.unit.engine.pushing import PushNode, PushPair, opened, push_grant


def asked(peer: int, *numbers: int, grant: int = 7) -> PeerAsked[PushGrant]:
    """A node asks for blocks of a transfer."""
    return PeerAsked(peer, f"d{peer}", push_grant(grant, keys(*(numbers or (1, 2)))))


def revoked(peer: int) -> PeerAsked[PushRevoke]:
    """And takes its grant back."""
    return PeerAsked(peer, f"d{peer}", PushRevoke(7))


def overs(commands: Iterable[Command]) -> list[tuple[int, str]]:
    """To whom a last word is said, and why."""
    said = [each for each in commands if isinstance(each, AnswerPeer)]
    return [(each.peer, each.its.reason) for each in said if isinstance(each.its, PushOver)]


def words(commands: Iterable[Command]) -> list[type[Answer]]:
    """Kinds of the words that are said."""
    return [type(each.its) for each in commands if isinstance(each, AnswerPeer)]


# ── one shard of several ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_block_of_which_one_shard_was_cleared_meanwhile_is_not_said_to_be_pushed(
    number: int, rank: int
) -> None:
    """Nor those behind it; the other shards of the write are as they were."""
    pair = opened(p_ranks=2)
    pair.store(1, 2, 3)
    pair.expect(1, 2, 3)
    pair.hear_p()
    (job,) = pair.flights
    pair.clear_shard(number, rank)
    pair.write(job)
    pair.pump()
    assert ["evicted" in end.reason for end in pair.ends] == [True]
    assert pair.p.engine.counters.pushed_blocks == number - 1
    assert len(pair.d.blocks()) == number - 1
    pair.at_rest()


@pytest.mark.parametrize("rank", [0, 1])
def test_another_block_in_one_of_its_slots_does_not_make_it_whole_again(rank: int) -> None:
    pair = opened(p_ranks=2)
    pair.store(1, 2)
    pair.expect(1, 2)
    pair.hear_p()
    (job,) = pair.flights
    slot, _ = pair.clear_shard(2, rank)
    for number in range(10, 30):
        pair.store(number)
    assert slot in {row.slot for row in pair.p.engine.blocks()}, "the slot came back"
    pair.write(job)
    pair.pump()
    assert len(pair.d.blocks()) == 1
    pair.at_rest()


def test_a_block_in_the_first_slot_has_come() -> None:
    """Of a prefill on the same node; and what follows it is waited for."""
    pair = PushPair()
    pair.expect(1, 2, node="d")
    assert pair.decode.lease(1, 1, 2).promoting == 2
    pair.decode.seal(1, places=[place for place in pair.decode.unused() if not place[0]])
    pair.tick()
    assert pair.decode.lease(2, 1, 2).promoting == 1
    pair.decode.seal(2)
    pair.tick()
    assert [(end.blocks, end.reason) for end in pair.ends] == [(2, "")]


# ── of others ────────────────────────────────────────────────────────────────────────────────────


def test_grants_of_one_number_are_those_of_two_nodes() -> None:
    """No word of the one ends a grant of the other."""
    node = PushNode("p")
    prefill = Peer(node)
    node.hear(prefill.scheduler, PushOpen("r"))
    for peer in (1, 2, 3):
        node.step(asked(peer))
    prefill.store(1)
    jobs = {each.peer: each.job for each in node.said if isinstance(each, WritePush)}
    assert jobs.keys() == {1, 2, 3}

    def told(*events: Event) -> list[tuple[int, str]]:
        return overs(node.step(*events))

    assert told(revoked(4)) == told(revoked(2)) == told(PeerGone(3)) == []
    assert node.engine.push_counts()[("prefill",)] == 2
    assert told(Written(jobs[2])) == [(2, "it was taken back")]
    assert told(Written(jobs[3])) == [], "nobody is there to hear it"
    assert told(Written(jobs[1])) == []
    said = [each for each in node.said if isinstance(each, AnswerPeer)]
    assert [each.peer for each in said if isinstance(each.its, Pushed)] == [2, 1]
    prefill.store(2)
    (job,) = [each.job for each in node.commands if isinstance(each, WritePush) and each.first == 1]
    assert told(Written(job)) == [(1, "")]
    assert not node.engine.leases()


def test_another_grant_of_a_number_is_refused_while_the_first_lasts() -> None:
    """And has no part in its writes."""
    node = PushNode("p")
    prefill = Peer(node)
    node.hear(prefill.scheduler, PushOpen("r"))
    node.step(asked(1, 1))
    assert overs(node.step(asked(1, 1))) == [(1, "too many grants of one node")]
    prefill.store(1)
    (job,) = [each.job for each in node.said if isinstance(each, WritePush)]
    assert words(node.step(Written(job))) == [Pushed, PushOver]


def test_nobody_cancels_what_another_engine_expects() -> None:
    pair = opened()
    pair.expect(1)
    other = Peer(pair.d, "other")
    pair.d.hear(other.scheduler, PushCancel("r"))
    assert not pair.ends
    pair.cancel()
    assert [end.reason for end in pair.ends] == ["it was cancelled"]


def test_a_last_word_of_another_epoch_gives_nothing_back() -> None:
    """Of an older one, and of one that there was not yet: epochs are drawn, not counted."""
    pair = PushPair()
    pair.restart_transfer_worker()
    pair.open()
    pair.expect(1, 2)
    (grant,) = pair.extents
    slab = pair.d.engine.grants._slab
    free = slab.free_pages
    for epoch in (pair.epochs - 1, pair.epochs + 1, 0):
        pair.d.step(PushOver(grant, epoch, "it ended", is_quiet=True))
        assert (slab.free_pages, pair.ends) == (free, []), "its peer may write there"
    pair.d.step(PushOver(grant, pair.epochs, "it ended", is_quiet=True))
    assert [end.reason for end in pair.ends] == ["it ended"]
    assert slab.free_pages == slab.page_count


def test_a_group_that_its_engine_does_not_have_is_not_expected() -> None:
    pair = PushPair()
    pair.d.hear(pair.decode.scheduler, PushExpect("r", "p", keys(1), 5000, group=1))
    assert "group" in pair.d.hangups[pair.decode.scheduler]


def test_limbo_lasts_from_its_first_extents_on() -> None:
    """However often more of it comes."""
    pair = PushPair()
    for number, transfer in ((1, "r"), (2, "s")):
        pair.open(transfer)
        pair.store(number)
        pair.expect(number, transfer=transfer)
        pair.hear_p()
        pair.write(next(iter(pair.flights)), trouble="the peer is gone")
        while pair.to_d:
            pair.hear_d()
        pair.pass_time(LIMBO_NS / NS_PER_MS / 2)
    assert len(pair.recycled) == 1
