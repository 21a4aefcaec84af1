"""Local or remote prefill: the golden table, learning, and the lanes."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvstore.routing.models import ModelSide
from kvstore.routing.policy import PolicySplit, RoutingPolicy
from kvstore.routing.requests import OpenRequest
from kvstore.routing.split import (
    LEARNED_LEAST,
    PrefillSplit,
    SplitReason,
    may_take,
)
from kvstore.routing.waiting import WaitingRoom
from tests.kit.routing_check import check_room
from tests.unit.routing.fleets import S, request

LONG, BUSY, SHORT = SplitReason.LONG, SplitReason.BUSY_DECODE, SplitReason.SHORT
QUEUE = SplitReason.PREFILL_QUEUE
GOLDEN = [
    # uncached, streams, prefill queue
    (0, 0, 0, SHORT),
    (63, 100, 0, SHORT),
    (64, 7, 0, SHORT),
    (64, 8, 0, BUSY),
    (64, 8, 9, BUSY),
    (64, 8, 10, QUEUE),
    (255, 0, 0, SHORT),
    (255, 8, 0, BUSY),
    (256, 0, 0, LONG),
    (256, 0, 9, LONG),
    (256, 0, 9.99, LONG),
    (256, 0, 10, QUEUE),
    (100_000, 0, 10, QUEUE),
    (100_000, 200, 0, LONG),
]


@pytest.mark.parametrize(("uncached", "streams", "queue", "expected"), GOLDEN)
def test_the_golden_table(
    uncached: float, streams: float, queue: float, expected: SplitReason
) -> None:
    split = PrefillSplit(PolicySplit())
    assert split.where(uncached=uncached, streams=streams, prefill_queue=queue) is expected
    assert expected.is_remote == (expected in (LONG, BUSY))


def test_thresholds_follow_what_paid_and_stay_in_bounds() -> None:
    split = PrefillSplit(PolicySplit())
    for _ in range(200):
        split.learn(uncached=300, remote_s=2.0, local_s=1.0)
    assert split.uncached_min > 256
    assert split.where(uncached=300, streams=0, prefill_queue=0) is SHORT
    for _ in range(1000):
        split.learn(uncached=split.uncached_min, remote_s=0.1, local_s=1.0)
    assert split.uncached_min == LEARNED_LEAST
    frozen = PrefillSplit(PolicySplit(is_learned=False))
    frozen.learn(uncached=300, remote_s=2.0, local_s=1.0)
    assert frozen.uncached_min == 256


def test_a_long_prompt_says_nothing_about_the_threshold() -> None:
    split = PrefillSplit(PolicySplit())
    split.learn(uncached=100_000, remote_s=2.0, local_s=1.0)
    assert split.uncached_min == 256


def empty_room() -> WaitingRoom:
    return WaitingRoom(RoutingPolicy(), defaultdict(dict))


def put(
    room: WaitingRoom,
    name: str,
    uncached: float,
    at_s: float = 0.0,
    number: int = 0,
    priority: int = 0,
) -> OpenRequest:
    its = request(name, 16, priority=priority)
    opened = OpenRequest(its, ModelSide("p", "m", "m"), "inline", 0, number, uncached=uncached)
    opened.wait_for_prefiller(int(at_s * S))
    assert room.add(opened) is None
    check_room(room)
    return opened


def order(room: WaitingRoom, at_s: float) -> list[str]:
    """First request of each lane, in the order in which they are due."""
    return [entry.request_id for _, entry in room.heads("p", int(at_s * S))]


def test_short_prompts_go_first_and_long_ones_age() -> None:
    room = empty_room()
    put(room, "long", 30_000, 0.0, 1)
    short = put(room, "short", 500, 0.5, 2)
    assert order(room, 1) == ["short", "long"]
    put(room, "late", 500, 4.0, 3)
    assert order(room, 4) == ["short", "long"]
    room.remove(short)  # three buckets up in four seconds: before one that comes now
    assert order(room, 4) == ["long", "late"]


def test_within_a_lane_the_lower_priority_is_first_then_arrival() -> None:
    room = empty_room()
    for number, priority in enumerate((0, 5, -5, 0)):
        put(room, f"r{number}", 400, number=number, priority=priority)
    found = []
    while room.entries:
        found += order(room, 0)
        room.remove(room.entries[found[-1]])
    assert found == ["r2", "r0", "r3", "r1"]


def test_no_stream_of_short_prompts_starves_a_long_one() -> None:
    room = empty_room()
    put(room, "long", 100_000, 0.0, 0)
    for number in range(1, 200):
        now_s = number * 0.1
        put(room, f"s{number}", 100, now_s, number)
        first = order(room, now_s)[0]
        if first == "long":
            assert 3.0 < now_s < 6.0
            return
        room.remove(room.entries[first])
    raise AssertionError("the long prompt starved")


def test_aborted_prefills_leave_nothing_behind() -> None:
    room = empty_room()
    put(room, "first", 400, number=0)
    for number in range(1, 2000):
        room.remove(put(room, f"r{number}", 400, number=number))
        assert sum(map(len, room._queues.values())) == 1
    assert order(room, 0) == ["first"]


def test_a_prefill_may_come_back_to_its_lane() -> None:
    """After a failure, say: it has the same priority and number as before."""
    room = empty_room()
    first, second = (put(room, name, 400, number=number) for number, name in enumerate("ab"))
    room.remove(second)
    assert second.laned_ns is None
    second.wait_for_prefiller(S)
    room.add(second)
    room.remove(first)
    assert order(room, 1) == ["b"]
    room.remove(second)
    check_room(room)
    assert order(room, 1) == []


def test_a_request_that_is_held_may_wait_for_a_prefiller_from_then_on() -> None:
    room = empty_room()
    held = put(room, "held", 400)
    room.remove(held)
    room.add(held)
    assert [rank for rank, _ in room.heads("p", 0)] == [0]
    room.lane(held, S)
    check_room(room)
    assert [rank for rank, _ in room.heads("p", S)] == [-1]
    assert not room.has_before("p", 0), "others do not queue up behind it"


def test_a_lane_is_no_tenant_that_waits() -> None:
    room = empty_room()
    room.taken("a", 1000.0, S, was_held=False)
    put(room, "laned", 400)
    for number, tenant in enumerate("ab"):
        its = request(f"of-{tenant}", 16, tenant=tenant)
        room.add(OpenRequest(its, ModelSide("p", "m", "m"), "inline", 0, number))
    assert room._served["b"] == 1000.0, "b begins level with a"


def test_one_prefiller_is_kept_from_long_prompts() -> None:
    idle = {"a": (0, 0.0), "b": (0, 0.0)}
    assert may_take(30_000, idle) == {"a", "b"}
    assert may_take(30_000, {"a": (1, 30_000.0), "b": (0, 0.0)}) == {"a"}
    assert may_take(100, {"a": (1, 30_000.0), "b": (0, 0.0)}) == {"a", "b"}
    assert may_take(30_000, {"a": (4, 30_000.0), "b": (0, 0.0)}) == set()
    assert may_take(30_000, {"a": (1, 30_000.0)}) == {"a"}
