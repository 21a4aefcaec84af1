"""What engines tell of themselves is kept by space, within bounds, and told to the next engine."""

from __future__ import annotations

import pytest

from kvstore.engine.moves.jobs import READS, Paces, ReadPace
from kvstore.types import SpaceId
from kvstore.units import MIB
from kvstore.wire.load import (
    COMPUTE_NS_MAX,
    COMPUTE_NS_MIN,
    LOAD_NS_MAX,
    SPACES_MAX,
    Learned,
)
from kvstore.wire.messages import Measured, SessionOpen
from tests.unit.engine.disk import DiskNode, known
from tests.unit.engine.harness import Node, Peer, attached, space

SECOND = 10**9


def opened(node: Node, peer: Peer) -> tuple[int, int]:
    """What its session began with."""
    message = node.last(peer.scheduler, SessionOpen)
    return message.compute_ns_per_token, message.load_ns_per_token


def test_the_next_engine_of_a_space_begins_with_what_the_last_one_measured() -> None:
    node = Node()
    first = Peer(node, "a")
    assert opened(node, first) == (0, 0)
    node.hear(first.scheduler, Measured(50_000, 900))
    assert opened(node, Peer(node, "b")) == (50_000, 900)
    assert opened(node, Peer(node, "c", space=space("other"))) == (0, 0)
    assert opened(node, Peer(node, "d", tenant="u")) == (0, 0), "nothing crosses tenants"
    node.hear(first.scheduler, Measured(60_000, 0))
    assert opened(node, Peer(node, "e")) == (60_000, 900), "0 says nothing"


def test_what_was_learned_outlives_the_node() -> None:
    node, peer = attached(DiskNode())
    node.step(known(1))
    node.hear(peer.scheduler, Measured(50_000, 900))
    peer.lease(1, 1)
    node.now_ns += SECOND
    node.read_all()
    learned = node.engine.learned()
    again = DiskNode(learned=learned)
    assert opened(again, Peer(again)) == (50_000, 900)
    again.step(known(1))
    assert Peer(again, "b").lease(1, 1).promoting_ms >= 1000, "the first decision is no guess"
    assert again.engine.learned().disk_ns_per_mib == learned.disk_ns_per_mib > 0


def test_a_rank_may_not_tell_and_without_a_session_nothing_is_kept() -> None:
    node, peer = attached(Node())
    node.hear(peer.ranks[0], Measured(50_000, 900))
    assert node.hangups[peer.ranks[0]] == "Measured from a rank"
    node.hear(peer.scheduler, Measured(50_000, 900))
    assert node.engine.learned().spaces == ()


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (Measured(1, 2**62), (COMPUTE_NS_MIN, LOAD_NS_MAX)),
        (Measured(2**62, 0), (COMPUTE_NS_MAX, 0)),
    ],
)
def test_absurd_words_are_moved_into_bounds(told: Measured, kept: tuple[int, int]) -> None:
    paces = Paces(Learned())
    paces.told("t", SpaceId(bytes(32)), told)
    (pace,) = paces.all()
    assert (pace.compute_ns_per_token, pace.load_ns_per_token) == kept


def test_of_many_spaces_those_that_told_last_are_kept() -> None:
    paces = Paces(Learned())
    ids = [SpaceId(number.to_bytes(32)) for number in range(SPACES_MAX + 1)]
    for id in ids[:SPACES_MAX]:
        paces.told("t", id, Measured(50_000, 900))
    paces.told("t", ids[0], Measured(70_000, 900))
    paces.told("t", ids[SPACES_MAX], Measured(50_000, 900))
    kept = [pace.space for pace in paces.all()]
    assert kept[:2] == [ids[SPACES_MAX].hex(), ids[0].hex()]
    assert ids[1].hex() not in kept
    assert len(kept) == SPACES_MAX
    assert Paces(Learned(spaces=paces.all())).all() == paces.all()


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────


def read(pace: ReadPace, job: int, mib: int, ms: int) -> None:
    pace.begun(job, mib * MIB, 0)
    pace.ended(job, ms * 10**6, counts=True)


def test_the_slowest_of_the_last_reads_counts() -> None:
    pace = ReadPace()
    read(pace, 1, 10, 10)
    read(pace, 2, 10, 1000)
    for job in range(3, 2 + READS):
        read(pace, job, 10, 10)
        assert pace.ns_per_byte(0) == pytest.approx(1e8 / MIB)
    read(pace, 9, 10, 10)
    assert pace.ns_per_byte(0) == pytest.approx(1e6 / MIB)
    assert pace.measured_ns_per_mib == 10**6


def test_a_read_behind_others_is_not_taken_for_slow() -> None:
    pace = ReadPace()
    for job in range(4):
        pace.begun(job, 10 * MIB, 0)
    for job in range(4):
        pace.ended(job, (job + 1) * 10**7, counts=True)
    assert pace.ns_per_byte(0) == pytest.approx(1e6 / MIB)
    pace.begun(9, 50 * MIB, 0)
    pace.begun(10, 50 * MIB, 0)
    assert pace.estimate_ms(0, 0) == 101


def test_a_shorter_read_is_not_taken_to_be_quicker_in_proportion() -> None:
    pace = ReadPace()
    read(pace, 1, 100, 1000)
    pace.begun(2, MIB, 0)
    assert pace.estimate_ms(0, 0) == 101
    pace.begun(3, 399 * MIB, 0)
    assert pace.estimate_ms(0, 0) == 4001


def test_a_short_read_is_mostly_latency() -> None:
    pace = ReadPace()
    pace.begun(1, 4096, 0)
    pace.ended(1, 10**6, counts=True)
    assert pace.ns_per_byte(0) == pytest.approx(4e6 / MIB)
    pace.begun(2, 4096, 0)
    assert pace.estimate_ms(0, 0) == 2


def test_a_read_that_was_refused_says_nothing_of_the_disk() -> None:
    pace = ReadPace(10**6)
    pace.begun(1, MIB, 0)
    pace.ended(1, 10, counts=False)
    assert (pace.ns_per_byte(0), pace.measured_ns_per_mib) == (10**6 / MIB, 0)


def test_a_read_under_way_counts_with_the_time_it_has_taken() -> None:
    pace = ReadPace(10**6)
    pace.begun(1, 10 * MIB, 0)
    assert pace.estimate_ms(0, 0) == 11
    assert pace.estimate_ms(0, 5 * 10**6) == 11
    assert pace.estimate_ms(0, 24 * 10**6) == 39, "14 ms late: it may take as long again"
    assert pace.ns_per_byte(55 * 10**6) == pytest.approx(1e7 / MIB)


def test_a_late_read_says_nothing_until_it_ends() -> None:
    pace = ReadPace(10**6)
    pace.begun(1, 10 * MIB, 0)
    assert pace.estimate_ms(0, 10**9) > 1000
    pace.late(1)
    pace.begun(2, 10 * MIB, 10**9)
    assert (pace.estimate_ms(0, 10**9), pace.begun_bytes) == (11, 10 * MIB)
    pace.ended(1, 2 * 10**9, counts=True)
    assert (pace.measured_ns_per_mib, pace.begun_bytes) == (2 * 10**8, 10 * MIB)


def test_a_read_that_nobody_waited_for_counts_if_it_was_quicker() -> None:
    pace = ReadPace()
    for job, ms, expected in (1, 20, 20), (2, 40, 20), (3, 10, 20), (4, 15, 20), (5, 5, 20):
        pace.begun(job, MIB, 0)
        pace.ended(job, ms * 10**6, counts=True, was_awaited=False)
        assert pace.measured_ns_per_mib == expected * 10**6
    pace.begun(6, MIB, 0)
    pace.ended(6, 10**6, counts=True, was_awaited=False)
    assert pace.measured_ns_per_mib == 15 * 10**6, "the first one is forgotten"


def test_what_is_asked_for_later_does_not_delay_a_read() -> None:
    pace = ReadPace(1_000_000)  # a millisecond for a MiB
    for job in (1, 2, 3):
        pace.begun(job, 100 * MIB, 0)
    assert [pace.estimate_ms(job, 0) for job in (1, 2, 3, 0)] == [101, 201, 301, 301]
    pace.ended(1, 10**8, counts=True)
    assert pace.estimate_ms(2, 10**8) == 101


def test_the_slowest_read_is_forgotten_first() -> None:
    pace = ReadPace()
    for job, ms in enumerate((10, 40, 20), 1):
        pace.begun(job, 10 * MIB, 0)
        pace.ended(job, ms * 10**6, counts=True)
    found = []
    while pace.measured_ns_per_mib:
        found.append(pace.measured_ns_per_mib)
        pace.forget_slowest()
    assert found == [4 * 10**6, 2 * 10**6, 10**6]
