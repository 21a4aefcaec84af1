"""Pushes between two engines: what is granted, written, sealed and told, and what is never."""

from __future__ import annotations

import pytest

from kvstore.engine.events import Clear, WritePush
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.moves.grants import LIMBO_NS, REVOKED_NS
from kvstore.engine.moves.pushes import LOOK_NS, SEALS_NS
from kvstore.engine.sessions.awaited import STALLED_GAPS, STALLED_NS
from kvstore.tier_events import FileRead, FileWritten, ReadFile, WriteFile
from kvstore.types import ConnectionId
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import PUSHED, LeaseRelease, PushEnd, PushExpect
from kvstore.wire.peers import Pushed, PushOver
from kvstore.wire.space import fingerprint
from tests.unit.engine.disk import known, places
from tests.unit.engine.harness import WHOLE, Hellos, Peer, keys, pairs, space
from tests.unit.engine.pushing import PushPair, opened


def test_blocks_follow_while_the_prefill_goes_on_and_the_lease_grows() -> None:
    pair = opened()
    pair.expect(1, 2, 3)
    reply = pair.decode.lease(1, 1, 2, 3)
    assert (reply.promoting, reply.promoting_from) == (3, PUSHED), "no account of a disk is charged"
    pair.store(1, 2)
    pair.pump()
    assert (
        len(pairs(pair.decode.more)),
        pair.decode.more.promoting,
        pair.decode.more.from_peer,
    ) == (2, 1, 2)
    assert not pair.ends
    pair.store(3)
    pair.close()
    pair.pump()
    assert (len(pairs(pair.decode.more)), pair.decode.more.promoting) == (1, 0)
    (end,) = pair.ends
    assert (end.transfer, end.blocks, end.reason) == ("r", 3, "")
    pair.at_rest()


def test_groups_keep_apart() -> None:
    """Keys of a group are those of its space, also where groups have blocks of one size."""
    second = space("second", layer_bytes=16 << 10)
    pair = PushPair()
    more = [(second, (WHOLE,))]
    pair.prefill = Peer(pair.p, "p", more=more)
    pair.decode = Peer(pair.d, "d", more=more)
    pair.open()
    pair.prefill.seal(1, group=1)
    pair.sort()
    pair.d.hear(pair.decode.scheduler, PushExpect("r", "p", keys(1), 5000, group=1))
    pair.sort()
    pair.pump_until_it_lands()
    assert pair.lands[0].targets[0].space == fingerprint(second, weights_epoch="")
    pair.pump()
    assert [(end.group, end.blocks, end.reason) for end in pair.ends] == [(1, 1, "")]
    pair.at_rest()


# ── words ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reason", ["aborted", "preempted"])
def test_the_end_of_a_prefill_is_told_at_once(reason: str) -> None:
    pair = opened()
    pair.store(1)
    pair.expect(1, 2)
    pair.decode.lease(1, 1, 2)
    pair.pump()
    pair.close(reason=reason)
    pair.pump()
    assert [(end.blocks, end.reason) for end in pair.ends] == [(1, reason)]
    assert pair.decode.more.promoting == 0
    pair.at_rest()


def test_seals_may_follow_the_end_for_a_moment() -> None:
    pair = opened()
    pair.expect(1, 2)
    pair.close()
    pair.store(1)
    pair.pump()
    assert not pair.ends
    pair.pump(after_ms=SEALS_NS / NS_PER_MS)
    assert [end.blocks for end in pair.ends] == [1]
    assert "not all of its blocks" in pair.ends[0].reason
    pair.at_rest()


def test_another_space_is_told_at_once_and_nothing_moves() -> None:
    pair = PushPair()
    other = Peer(pair.d, "other", space=space("another", layer_bytes=16 << 10))
    pair.open()
    pair.decode = other
    pair.expect(1)
    pair.pump()
    assert "another space" in pair.ends[0].reason
    assert not pair.landing
    pair.at_rest()


def test_a_transfer_for_another_node_is_refused() -> None:
    pair = PushPair()
    pair.open(node="elsewhere")
    pair.store(1)
    pair.expect(1)
    pair.pump()
    assert pair.ends[0].reason == "its decode node is elsewhere"
    assert not pair.landing


def test_a_cancelled_request_takes_its_grants_back() -> None:
    pair = opened()
    pair.store(1)
    pair.expect(1, 2)
    pair.hear_p()
    (job,) = pair.flights
    pair.cancel()
    assert pair.ends[0].reason == "it was cancelled"
    slab = pair.d.engine.grants._slab
    assert slab.free_pages < slab.page_count, "it is written to"
    pair.hear_p()
    assert not pair.to_d, "the last word comes after the last write"
    pair.write(job)
    pair.pump()
    pair.at_rest()
    assert not pair.lands
    assert not pair.recycled


def test_the_end_of_the_engine_ends_what_it_expects() -> None:
    pair = opened()
    pair.expect(1, 2)
    pair.d.end(pair.decode.scheduler)
    pair.tick()
    assert not pair.d.engine._awaited
    pair.pump()
    pair.at_rest()


def test_a_prefill_engine_that_is_gone_is_told() -> None:
    pair = opened()
    pair.expect(1)
    pair.pump()
    pair.p.end(pair.prefill.scheduler)
    pair.pump(after_ms=LOOK_NS / NS_PER_MS)
    assert "is gone" in pair.ends[0].reason


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    pair = opened()
    pair.expect(1, ms=100)
    pair.decode.lease(1, 1)
    pair.tick(100)
    assert "deadline" in pair.ends[0].reason
    assert pair.decode.more.promoting == 0
    pair.pump()
    pair.at_rest()


def test_a_push_that_stalls_is_not_waited_for_and_one_that_goes_on_is() -> None:
    """Blocks of one part of the prompt are news for the other parts, too. From an engine that has
    computed a chunk for long, the next one is waited for longer."""
    pair = opened()
    pair.expect(1, 2, ms=600_000)
    pair.expect(3, ms=600_000, first_block=2)
    almost_ms = STALLED_NS / NS_PER_MS - 1
    for number in (1, 2):
        pair.pass_time(almost_ms)
        pair.store(number)
        pair.pump()
    assert [(end.first_block, end.reason) for end in pair.ends] == [(0, "")]
    pair.pass_time(STALLED_GAPS * almost_ms - 1)
    assert len(pair.ends) == 1
    pair.tick(1)
    assert pair.ends[1].reason == "nothing was heard of its prefill for too long"
    pair.pump()
    pair.at_rest()


def test_eviction_on_the_prefill_node_is_told() -> None:
    pair = opened()
    pair.store(1, 2)
    pair.expect(1, 2)
    pair.hear_p()
    pair.p.step(Clear(None, None))
    (job,) = pair.flights
    pair.write(job)
    pair.pump()
    assert "evicted" in pair.ends[0].reason
    assert not pair.lands
    pair.at_rest()


def test_what_is_pushed_is_not_evicted_for_what_is_read_from_disk() -> None:
    """The first block of the grant is the oldest in dram, the next one is on disk, dram is full."""
    pair = PushPair(slots=8, file_bytes=1 << 30)
    pair.store(1)
    (write,) = [each for each in pair.p.said if isinstance(each, WriteFile)]
    pair.p.step(FileWritten(write.job, places(1, 1)))
    pair.store(10, 11, 12, 13, 14)
    pair.p.step(known(2, at=9))
    pair.open()
    pair.expect(1, 2)
    pair.hear_p()
    assert any(isinstance(each, ReadFile) for each in pair.p.said), "the second one is read"
    (command,) = [each for each in pair.p.said if isinstance(each, WritePush)]
    words, _ = pair.p.state.slots.words_of(command.slots)
    assert pair.p.state.slots.state[words].tolist() == [SlotState.SEALED]


def test_a_read_that_fails_is_repeated_at_the_next_look_only() -> None:
    pair = PushPair(file_bytes=1 << 30)
    pair.p.step(known(1, at=9))
    pair.prefill.store(10)  # the space is known
    pair.open()
    pair.expect(1)
    pair.hear_p()

    def reads() -> list[ReadFile]:
        return [each for each in pair.p.said if isinstance(each, ReadFile)]

    assert len(reads()) == 1
    pair.p.step(FileRead(reads()[-1].job, b"\0"))
    assert len(reads()) == 1, "no time has passed"
    pair.tick(LOOK_NS / NS_PER_MS)
    assert len(reads()) == 2


def test_on_one_node_nothing_is_moved() -> None:
    pair = PushPair()
    pair.prefill_here()
    pair.open()
    pair.expect(1, 2, node="d")
    assert pair.decode.lease(1, 1, 2).promoting == 2
    pair.store(1)
    assert len(pairs(pair.decode.more)) == 1
    pair.store(2)
    assert (len(pairs(pair.decode.more)), pair.decode.more.promoting) == (1, 0)
    pair.tick()
    assert [(end.blocks, end.reason) for end in pair.ends] == [(2, "")]
    assert not pair.to_p


def test_an_engine_without_a_session_ends_no_wait_of_another() -> None:
    pair = PushPair()
    pair.prefill_here()
    stranger = pair.d.connect(Hellos("stranger").scheduler_hello(), 0)
    pair.open()
    pair.expect(1, node="d")
    pair.tick()
    pair.d.hear(stranger, LeaseRelease(list(range(1000))))
    pair.store(1)
    pair.tick()
    assert [(end.blocks, end.reason) for end in pair.ends] == [(1, "")]


# ── landing memory ───────────────────────────────────────────────────────────────────────────────


def test_extents_of_a_failed_write_come_back_with_another_transfer_worker_only() -> None:
    pair = opened()
    pair.store(1)
    pair.expect(1)
    pair.hear_p()
    pair.write(next(iter(pair.flights)), trouble="the peer is gone")
    pair.pump()
    assert pair.ends[0].reason == "the peer is gone"
    slab = pair.d.engine.grants._slab
    assert slab.free_pages < slab.page_count
    pair.tick(LIMBO_NS / NS_PER_MS - 1)
    assert not pair.recycled
    assert slab.free_pages < slab.page_count
    pair.tick(1)
    assert len(pair.recycled) == 1
    pair.at_rest()


def test_a_lost_session_leaves_limbo_and_its_requests_go_on() -> None:
    pair = opened()
    pair.store(1)
    pair.expect(1, 2)
    pair.hear_p()
    pair.lose_session()
    assert pair.ends[0].reason == "node p has hung up"
    pair.write(next(iter(pair.flights)))
    pair.tick(LIMBO_NS / NS_PER_MS)
    assert pair.recycled
    pair.at_rest()


def test_a_peer_that_does_not_answer_a_revocation_may_write_for_ever() -> None:
    pair = opened()
    pair.expect(1)
    pair.cancel()
    pair.to_p.clear()
    pair.tick(REVOKED_NS / NS_PER_MS)
    assert not pair.recycled
    pair.tick(LIMBO_NS / NS_PER_MS)
    assert pair.recycled


def test_words_of_another_epoch_are_dropped() -> None:
    pair = opened()
    pair.store(1)
    pair.expect(1)
    (grant,) = pair.extents
    pair.hear_p()
    pair.write(next(iter(pair.flights)))
    word = pair.to_d[0]
    assert isinstance(word, Pushed)
    pair.restart_transfer_worker()
    assert ["transfer worker" in end.reason for end in pair.ends] == [True]
    pair.pump()
    assert not pair.lands
    assert pair.d.engine.counters.push_words_dropped == 1
    pair.d.step(PushOver(grant, word.epoch, "", is_quiet=True))
    pair.at_rest()


def test_damaged_bytes_are_not_sealed() -> None:
    pair = opened()
    pair.store(1, 2)
    pair.expect(1, 2)
    pair.hear_p()
    pair.write(next(iter(pair.flights)))
    pair.landing[next(reversed(pair.landing))] = (99, "t")
    pair.pump()
    assert "damaged" in pair.ends[0].reason
    assert len(pairs(pair.decode.lease(1, 1, 2))) == 1
    assert pair.d.engine.counters.push_blocks_damaged == 1
    pair.at_rest()


def test_a_node_without_landing_memory_says_so() -> None:
    pair = PushPair()
    pair.p.hear(pair.prefill.scheduler, PushExpect("r", "d", keys(1), 100))
    assert "--landing" in pair.p.last(pair.prefill.scheduler, PushEnd).reason


def test_a_key_named_twice_ends_the_connection() -> None:
    pair = PushPair()
    pair.expect(1, 1)
    assert "names a key twice" in pair.d.hangups[ConnectionId(pair.decode.scheduler)]
