"""Remote prefills: where, in what order, and what happens when a leg fails."""

from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    FirstToken,
    Leg,
    PrefillDone,
    RouteTick,
)
from kvstore.routing.models import ModelSide
from kvstore.routing.policy import PolicySplit, RoutingPolicy, parse
from kvstore.routing.requests import OpenRequest
from kvstore.routing.split import (
    LEARNED_LEAST,
    PrefillSplit,
    SplitReason,
    may_take,
)
from kvstore.routing.values import WorkerRole
from kvstore.routing.waiting import WaitingRoom
from kvstore.wire.load import EngineLoad
from tests.kit.routing_check import check_room
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    core_of,
    fail,
    hbm,
    prefiller,
    rejected,
    request,
    routed,
    spec,
    turn,
)


def pd(prefillers: int = 2) -> RouterCore:
    """Two workers that decode, and prefillers."""
    return core_of(
        *(spec(n, role=WorkerRole.DECODE) for n in range(2)),
        *(prefiller(10 + n) for n in range(prefillers)),
    )


def test_a_remote_prefill_is_told_where_it_is_computed() -> None:
    core = pd()
    sent = routed(arrive(core, request("r", 1600)))
    assert sent.prefill_worker is not None
    told = {load.address: load for load in core.loads()}
    assert told[sent.prefill_worker].prefill_tokens == 1600
    assert told[sent.worker] == EngineLoad(sent.worker, 0, 0, 0)
    core.step(FirstToken("r"), S)
    assert core.loads() == (EngineLoad(sent.worker, 0, 0, 1),)


def test_a_long_prompt_is_prefilled_elsewhere_and_a_short_one_is_not() -> None:
    core = pd()
    long, short = routed(arrive(core, request("l"))), routed(arrive(core, request("s", 100)))
    assert long.prefill_worker in ("w10", "w11")
    assert long.worker in ("w0", "w1")
    assert (long.draft.plain.split_reason, short.draft.plain.split_reason) == (
        "long",
        "short",
    )
    assert short.prefill_worker is None
    cached = routed(arrive(core, request("c", 4096), answer(hbm(0, 250), hbm(1, 250))))
    assert cached.draft.plain.split_reason == "short"
    local = routed(arrive(core, request("x", must_be_local=True)))
    assert (local.prefill_worker, local.draft.plain.split_reason) == (None, "off")


def test_a_prefiller_on_the_same_node_is_nearer() -> None:
    core = core_of(
        spec(0, role=WorkerRole.DECODE, node="a"), prefiller(10, node="b"), prefiller(11, node="a")
    )
    for n in range(4):
        assert (
            routed(arrive(core, request(f"r{n}", 32_000), now_ns=(n + 1) * 20 * S)).prefill_worker
            == "w11"
        )
        core.step(FirstToken(f"r{n}"), (n + 1) * 20 * S + MS)


@pytest.mark.parametrize(("retries", "attempts"), [(0.0, 2), (100.0, 4)])
def test_no_request_depends_on_prefillers_however_many_fail(retries: float, attempts: int) -> None:
    core = pd(prefillers=8)
    sent = routed(arrive(core, request("r")))
    core._retries_left = retries
    while sent.prefill_worker:
        sent = routed(turn(core, fail("r", leg=Leg.PREFILL))[0])
    assert sent.attempt == attempts
    assert sent.draft.plain.split_reason == "fell-back"
    [last] = turn(core, fail("r"))
    if retries:
        assert routed(last).attempt == attempts + 1, "decoders have attempts of their own"
    else:
        assert rejected(last).status == 502


def test_a_failed_leg_leaves_no_prefix_behind() -> None:
    """Else the next attempt finds at the decoder what nobody has computed."""
    core = core_of(spec(0, role=WorkerRole.DECODE), prefiller(10), prefiller(11))
    before = routed(arrive(core, request("a", 512, prefix="x")))
    core.step(FirstToken("a"), MS)
    asked = request("r", 1200, prefix="x")
    first = routed(core.step(Arrived(asked), 2 * MS)[0])
    assert first.prefill_worker == before.prefill_worker
    again = routed(core.step(fail("r", leg=Leg.PREFILL), 3 * MS)[0])
    assert again.prefill_worker not in (None, first.prefill_worker)
    assert again.draft.plain.split_reason == "long"
    hits = core.tree.match(asked.keys, 3 * MS, step=8, young_only=True)
    # Of blocks that were computed before, those that the verdict trusted stay.
    assert hits[first.prefill_worker or ""] == 24


def test_remote_prefills_wait_in_lanes_and_short_ones_pass() -> None:
    core = pd(prefillers=1)
    sent = [routed(arrive(core, request(f"r{n}", 20_000))) for n in range(4)]
    assert all(each.prefill_worker == "w10" for each in sent)
    assert arrive(core, request("long", 20_000)) is None
    assert arrive(core, request("short", 400)) is None
    # A local one is not behind those that wait for a prefiller.
    assert routed(arrive(core, request("tiny", 100))).prefill_worker is None
    order = []
    for n in range(2):
        order += [c.request_id for c in turn(core, PrefillDone(f"r{n}"), 2 * S)]
    assert order == ["short", "long"]


@pytest.mark.parametrize(("tenant", "order"), [("", ["b", "a"]), ("t", ["a", "b"])])
def test_no_tenant_goes_before_another_by_its_own_word(tenant: str, order: list[str]) -> None:
    core = pd(prefillers=1)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 20_000)))
    for name, priority in (("a", 0), ("b", -5)):
        assert arrive(core, request(name, 20_000, tenant=tenant, priority=priority)) is None
    found = []
    for n in range(2):
        found += [c.request_id for c in turn(core, PrefillDone(f"r{n}"), 2 * S)]
    assert found == order


def test_a_prefill_that_waits_is_not_ahead_of_itself() -> None:
    """Four are at the prefiller; a fifth ahead, and it would be computed where it is decoded."""
    core = pd(prefillers=1)
    core.adopt(parse({"split": {"queue_max": 5}}), S)
    for n in range(4):
        routed(arrive(core, request(f"r{n}", 20_000)))
    assert arrive(core, request("waits", 20_000)) is None
    assert turn(core, RouteTick(), 2 * S) == [], "it goes on waiting, and is not computed elsewhere"
    [sent] = turn(core, PrefillDone("r0"), 2 * S)
    assert (routed(sent).request_id, routed(sent).prefill_worker) == ("waits", "w10")


# ── local or remote: the golden table, learning, and the lanes ───────────────────────────────────


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


def test_a_threshold_of_a_reloaded_policy_is_in_effect_at_once() -> None:
    core = pd()
    assert routed(arrive(core, request("before", 1600))).prefill_worker is not None
    same = msgspec.structs.replace(core.policy, draining=("w1",))
    core.placer.split_of("p").uncached_min = 300.0
    core.adopt(same, S)
    assert core.placer.split_of("p").uncached_min == 300.0, "what was learned stays"
    core.adopt(parse({"split": {"uncached_min": 4000}}), S)
    assert routed(arrive(core, request("after", 1700), now_ns=S)).prefill_worker is None
