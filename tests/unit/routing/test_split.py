"""Local or remote prefill: the golden table, learning, and the lanes."""

from __future__ import annotations

import pytest

from kvstore.routing.models import ModelSide
from kvstore.routing.policy import PolicySplit
from kvstore.routing.requests import OpenRequest
from kvstore.routing.split import (
    LEARNED_LEAST,
    PrefillLanes,
    PrefillSplit,
    SplitReason,
)
from tests.kit.routing_check import check_lanes
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


def put(
    lanes: PrefillLanes,
    name: str,
    uncached: float,
    at_s: float = 0.0,
    number: int = 0,
    priority: int = 0,
) -> OpenRequest:
    its = request(name, 16, priority=priority)
    opened = OpenRequest(its, ModelSide("p", "m", "m"), "inline", 0, number, uncached=uncached)
    lanes.add(opened, int(at_s * S))
    return opened


def test_short_prompts_go_first_and_long_ones_age() -> None:
    lanes = PrefillLanes()
    put(lanes, "long", 30_000, 0.0, 1)
    short = put(lanes, "short", 500, 0.5, 2)
    assert [e.request_id for e in lanes.order(1 * S)] == ["short", "long"]
    put(lanes, "late", 500, 4.0, 3)
    assert [e.request_id for e in lanes.order(4 * S)] == ["short", "long"]
    lanes.remove(short)  # three buckets up in four seconds: before one that comes now
    assert [e.request_id for e in lanes.order(4 * S)] == ["long", "late"]


def test_within_a_lane_the_lower_priority_is_first_then_arrival() -> None:
    lanes = PrefillLanes()
    for number, priority in enumerate((0, 5, -5, 0)):
        put(lanes, f"r{number}", 400, number=number, priority=priority)
    order = []
    while len(lanes):
        [first] = lanes.order(0)
        order.append(first.request_id)
        lanes.remove(first)
    assert order == ["r2", "r0", "r3", "r1"]


def test_no_stream_of_short_prompts_starves_a_long_one() -> None:
    lanes = PrefillLanes()
    put(lanes, "long", 100_000, 0.0, 0)
    for number in range(1, 200):
        now_s = number * 0.1
        put(lanes, f"s{number}", 100, now_s, number)
        first = lanes.order(int(now_s * S))[0]
        if first.request_id == "long":
            assert 3.0 < now_s < 6.0
            return
        lanes.remove(first)
    raise AssertionError("the long prompt starved")


def test_aborted_prefills_leave_nothing_behind() -> None:
    lanes = PrefillLanes()
    put(lanes, "first", 400, number=0)
    for number in range(1, 2000):
        lanes.remove(put(lanes, f"r{number}", 400, number=number))
        check_lanes(lanes)
    assert sum(map(len, lanes._lanes)) < 200
    assert [e.request_id for e in lanes.order(0)] == ["first"]


def test_a_prefill_may_come_back_to_its_lane() -> None:
    """After a failure, say: it has the same priority and number as what is left of it there."""
    lanes = PrefillLanes()
    first, second = (put(lanes, name, 400, number=number) for number, name in enumerate("ab"))
    lanes.remove(second)
    lanes.add(second, S)
    lanes.remove(first)
    assert [e.request_id for e in lanes.order(S)] == ["b"]
    lanes.remove(second)
    lanes.add(second, 2 * S)
    assert [e.request_id for e in lanes.order(2 * S)] == ["b"]
    check_lanes(lanes)


def test_one_prefiller_is_kept_from_long_prompts() -> None:
    lanes = PrefillLanes()
    idle = {"a": (0, 0.0), "b": (0, 0.0)}
    assert lanes.may_take(30_000, idle) == {"a", "b"}
    assert lanes.may_take(30_000, {"a": (1, 30_000.0), "b": (0, 0.0)}) == {"a"}
    assert lanes.may_take(100, {"a": (1, 30_000.0), "b": (0, 0.0)}) == {"a", "b"}
    assert lanes.may_take(30_000, {"a": (4, 30_000.0), "b": (0, 0.0)}) == set()
    assert lanes.may_take(30_000, {"a": (1, 30_000.0)}) == {"a"}
