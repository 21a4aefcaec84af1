"""Attempts of a request: retries, breakers, both legs, readings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from kvstore.routing import core as core_module
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Ending,
    Failure,
    FirstToken,
    Judged,
    Leg,
    LegFailed,
    PrefillDone,
    Rejected,
    RequestEnded,
    RequestHeld,
    Routed,
    RouteTick,
    Shared,
    WorkerLeft,
)
from kvstore.routing.models import ModelMap
from kvstore.routing.policy import parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import PrefixMatch, SharedLoad, WorkerHealth, WorkerRole
from tests.unit.routing.fleets import (
    MS,
    S,
    answer,
    arrive,
    core_of,
    hbm,
    prefiller,
    rejected,
    request,
    routed,
    spec,
)


def fail(
    name: str, leg: Leg = Leg.DECODE, failure: Failure = Failure.STATUS, **more: bool
) -> LegFailed:
    return LegFailed(name, leg, failure, **more)


def test_a_failed_attempt_goes_elsewhere_and_then_gives_up() -> None:
    core = core_of(*(spec(n) for n in range(4)))
    tried = [routed(arrive(core, request("r"))).worker]
    for attempt in (2, 3):
        [again] = core.step(fail("r"), S)
        core.check()
        assert routed(again).attempt == attempt
        assert "retried" in routed(again).receipt.degraded
        tried.append(routed(again).worker)
    assert len(set(tried)) == 3
    [last] = core.step(fail("r"), S)
    assert (rejected(last).status, rejected(last).reason) == (502, "rejected-attempts")
    core.check()
    assert not core.fleet.flights


def test_an_answer_that_began_is_not_tried_again() -> None:
    core = core_of(spec(0), spec(1))
    routed(arrive(core, request("r")))
    core.step(FirstToken("r"), S)
    [last] = core.step(fail("r", failure=Failure.BROKEN, has_streamed=True), S)
    assert rejected(last).status == 502


def test_with_one_worker_of_two_always_failing_no_request_fails() -> None:
    core = core_of(spec(0), spec(1))
    ended = failures = 0
    for n in range(1000):
        now_ns = S + n * 20 * MS
        commands = core.step(Arrived(request(f"r{n}", 160)), now_ns)
        while True:
            sent = routed(commands[0])
            if sent.worker == "w1":
                break
            failures += 1
            commands = core.step(fail(sent.request_id), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns + MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE), now_ns + 2 * MS)
        ended += 1
    core.check()
    assert ended == 1000
    assert 3 <= failures <= 12  # the breaker opened; probes went on


def test_a_worker_that_was_slow_is_better_than_an_error() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    assert not first.is_last
    second = routed(core.step(fail("r", failure=Failure.TIMEOUT), S)[0])
    assert (second.worker != first.worker, second.is_last) == (True, True)
    again = routed(core.step(fail("r"), S)[0])
    core.check()
    assert (again.worker, again.attempt, again.is_last) == (first.worker, 3, True)
    assert rejected(core.step(fail("r", failure=Failure.TIMEOUT), S)[0]).status == 502


def test_the_only_worker_that_is_up_is_waited_for() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Judged("w0", WorkerHealth.DOWN), S)
    assert routed(arrive(core, request("a"))).is_last
    core.step(Judged("w0"), S)
    assert not routed(arrive(core, request("b"))).is_last


def test_prefillers_that_fail_take_no_attempts_from_decoders() -> None:
    core = pd(prefillers=2)
    routed(arrive(core, request("r")))
    for _ in range(2):
        local = routed(core.step(fail("r", Leg.PREFILL, Failure.TIMEOUT), S)[0])
    assert (local.prefill_worker, local.attempt) == (None, 3)
    other = routed(core.step(fail("r"), S)[0])
    core.check()
    assert {local.worker, other.worker} == {"w0", "w1"}


def test_answers_that_come_whole_close_a_breaker_too() -> None:
    core = core_of(spec(0), policy=parse({"limits": {"attempts_max": 1}}))
    for n in range(10):
        routed(arrive(core, request(f"r{n}")))
        rejected(core.step(fail(f"r{n}"), S)[0])
        routed(arrive(core, request(f"s{n}")))
        core.step(RequestEnded(f"s{n}", Ending.DONE), S)
    assert not core.fleet.workers[0].breaker.is_open


def test_a_4xx_never_counts_against_a_worker() -> None:
    core = core_of(spec(0))
    for n in range(50):
        routed(arrive(core, request(f"r{n}")))
        core.step(RequestEnded(f"r{n}", Ending.REFUSED), S)
    assert not core.fleet.workers[0].breaker.is_open


def test_a_breaker_opens_probes_and_closes() -> None:
    core = core_of(spec(0), policy=parse({"limits": {"attempts_max": 1}}))
    for n in range(3):
        routed(arrive(core, request(f"r{n}")))
        rejected(core.step(fail(f"r{n}"), S)[0])
    assert isinstance(arrive(core, request("a")), RequestHeld)
    [probe] = core.step(RouteTick(), 2 * S + 1)
    assert routed(probe).request_id == "a"
    assert isinstance(
        arrive(core, request("b"), now_ns=2 * S + 2), RequestHeld
    )  # one probe at a time
    commands = core.step(FirstToken("a"), 2 * S + 3)
    assert [c.request_id for c in commands] == ["b"]


def test_a_probe_that_is_answered_with_4xx_closes_the_breaker() -> None:
    core = core_of(spec(0), policy=parse({"limits": {"attempts_max": 1}}))
    for n in range(3):
        routed(arrive(core, request(f"r{n}")))
        core.step(fail(f"r{n}"), S)
    routed(arrive(core, request("a"), now_ns=3 * S))
    core.step(RequestEnded("a", Ending.REFUSED), 3 * S)
    assert not core.fleet.workers[0].breaker.is_open


def test_an_aborted_probe_makes_room_for_the_next() -> None:
    core = core_of(spec(0), policy=parse({"limits": {"attempts_max": 1}}))
    for n in range(3):
        routed(arrive(core, request(f"r{n}")))
        core.step(fail(f"r{n}"), S)
    routed(arrive(core, request("a"), now_ns=3 * S))
    core.step(RequestEnded("a", Ending.ABORTED), 3 * S)
    assert routed(arrive(core, request("b"), now_ns=3 * S + 1)).worker == "w0"


def test_retries_have_a_budget() -> None:
    core = core_of(
        spec(0),
        spec(1),
        spec(2),
        policy=parse({"limits": {"retry_burst": 2, "retry_share": 0.0, "failures_max": 100}}),
    )
    statuses = []
    for n in range(4):
        routed(arrive(core, request(f"r{n}")))
        statuses.append(type(core.step(fail(f"r{n}"), S)[0]).__name__)
    assert statuses == ["Routed", "Routed", "Rejected", "Rejected"]
    routed(arrive(core, request("c")))
    assert isinstance(core.step(fail("c", failure=Failure.CONNECT), S)[0], Routed) is False


def test_a_worker_that_left_takes_nothing_with_it() -> None:
    core = core_of(spec(0), spec(1), spec(2))
    names = {n: routed(arrive(core, request(f"r{n}"))).worker for n in range(6)}
    core.step(WorkerLeft("w0"), S)
    core.check()
    for n, worker in names.items():
        if worker == "w0":
            [again] = core.step(fail(f"r{n}", failure=Failure.BROKEN), S)
            assert routed(again).worker != "w0"
        core.step(FirstToken(f"r{n}"), S)
        core.step(RequestEnded(f"r{n}", Ending.DONE), S)
    core.check()
    assert not core.open


def test_other_routers_count() -> None:
    core = core_of(spec(0), spec(1))
    core.step(Shared("other", (SharedLoad("w0", 200_000, 30), SharedLoad("gone", 1, 1))), S)
    for n in range(5):
        assert routed(arrive(core, request(f"r{n}", 160))).worker == "w1"
    assert core.explain(request("x"), None, S).features["streams"][0] == 30
    core.step(Shared("other", ()), S)
    assert core.explain(request("x"), None, S).features["queue_s"][0] == 0


def test_what_is_in_flight_is_told_to_other_routers() -> None:
    core, other = core_of(spec(0), spec(1)), core_of(spec(0), spec(1))
    assert core.loads() == ()
    worker = routed(arrive(core, request("r", 1600))).worker
    assert core.loads() == (SharedLoad(worker, 1600, 0),)
    other.step(Shared("core", core.loads()), S)
    assert routed(arrive(other, request("x", 160))).worker != worker
    core.step(FirstToken("r"), S)
    assert core.loads() == (SharedLoad(worker, 0, 1),)
    core.step(RequestEnded("r", Ending.DONE), S)
    assert core.loads() == ()


def test_a_remote_prefill_is_told_where_it_is_computed() -> None:
    core = pd()
    sent = routed(arrive(core, request("r", 1600)))
    assert sent.prefill_worker is not None
    told = {load.worker: load for load in core.loads()}
    assert told[sent.prefill_worker].prefill_tokens == 1600
    assert told[sent.worker] == SharedLoad(sent.worker, 0, 0)
    core.step(FirstToken("r"), S)
    assert core.loads() == (SharedLoad(sent.worker, 0, 1),)


def pd(prefillers: int = 2) -> RouterCore:
    """Two workers that decode, and prefillers."""
    return core_of(
        *(spec(n, role=WorkerRole.DECODE) for n in range(2)),
        *(prefiller(10 + n) for n in range(prefillers)),
    )


def test_a_long_prompt_is_prefilled_elsewhere_and_a_short_one_is_not() -> None:
    core = pd()
    long, short = routed(arrive(core, request("l"))), routed(arrive(core, request("s", 100)))
    assert long.prefill_worker in ("w10", "w11")
    assert long.worker in ("w0", "w1")
    assert (long.receipt.split_reason, short.receipt.split_reason) == ("long", "short")
    assert short.prefill_worker is None
    cached = routed(arrive(core, request("c", 4096), answer(hbm(0, 250), hbm(1, 250))))
    assert cached.receipt.split_reason == "short"
    local = routed(arrive(core, request("x", must_be_local=True)))
    assert (local.prefill_worker, local.receipt.split_reason) == (None, "off")


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


def test_a_failing_prefiller_is_replaced_and_then_done_without() -> None:
    core = pd()
    first = routed(arrive(core, request("r")))
    [again] = core.step(fail("r", Leg.PREFILL), S)
    assert {first.prefill_worker, routed(again).prefill_worker} == {"w10", "w11"}
    [last] = core.step(fail("r", Leg.PREFILL), S)
    core.check()
    assert routed(last).prefill_worker is None
    assert routed(last).receipt.split_reason == "fell-back"
    assert "prefill-local" in routed(last).receipt.degraded


@pytest.mark.parametrize(("retries", "attempts"), [(0.0, 2), (100.0, 3)])
def test_no_request_depends_on_prefillers_however_many_fail(retries: float, attempts: int) -> None:
    core = pd(prefillers=8)
    sent = routed(arrive(core, request("r")))
    core._retries_left = retries
    while sent.prefill_worker:
        sent = routed(core.step(fail("r", Leg.PREFILL), S)[0])
        core.check()
    assert sent.attempt == attempts
    assert sent.receipt.split_reason == "fell-back"
    [last] = core.step(fail("r", Leg.DECODE), S)
    assert isinstance(last, Routed if retries else Rejected), "workers have attempts of their own"


def test_a_failed_leg_leaves_no_prefix_behind() -> None:
    """Else the next attempt finds at the decoder what nobody has computed."""
    core = core_of(spec(0, role=WorkerRole.DECODE), prefiller(10), prefiller(11))
    before = routed(arrive(core, request("a", 512, prefix="x")))
    core.step(FirstToken("a"), MS)
    asked = request("r", 1200, prefix="x")
    first = routed(core.step(Arrived(asked), 2 * MS)[0])
    assert first.prefill_worker == before.prefill_worker
    again = routed(core.step(fail("r", Leg.PREFILL), 3 * MS)[0])
    assert again.prefill_worker not in (None, first.prefill_worker)
    assert again.receipt.split_reason == "long"
    hits = core.tree.match(asked.keys, 3 * MS, block_tokens=16, young_only=True)
    # Of blocks that were computed before, those that the verdict trusted stay.
    assert hits[first.prefill_worker or ""] == 24


@pytest.mark.parametrize("leg", list(Leg))
def test_with_one_of_two_legs_always_failing_no_request_fails(leg: Leg) -> None:
    core = pd()
    bad = "w10" if leg is Leg.PREFILL else "w0"
    failures = 0
    for n in range(1000):
        now_ns = S + n * 20 * MS
        sent = routed(
            arrive(core, request(f"r{n}", 600), now_ns=now_ns)
            if n % 50 == 0
            else core.step(Arrived(request(f"r{n}", 600)), now_ns)[0]
        )
        while bad in (sent.worker, sent.prefill_worker):
            failures += 1
            sent = routed(core.step(fail(f"r{n}", leg), now_ns)[0])
        if sent.prefill_worker:
            core.step(PrefillDone(f"r{n}"), now_ns + MS)
        core.step(FirstToken(f"r{n}"), now_ns + MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE), now_ns + 2 * MS)
    core.check()
    assert 3 <= failures <= 15
    assert not core.fleet.flights


def test_remote_prefills_wait_in_lanes_and_short_ones_pass() -> None:
    core = pd(prefillers=1)
    sent = [routed(arrive(core, request(f"r{n}", 20_000))) for n in range(4)]
    assert all(each.prefill_worker == "w10" for each in sent)
    assert isinstance(arrive(core, request("long", 20_000)), RequestHeld)
    assert isinstance(arrive(core, request("short", 400)), RequestHeld)
    # A local one is not behind those that wait for a prefiller.
    assert routed(arrive(core, request("tiny", 100))).prefill_worker is None
    order = []
    for n in range(2):
        order += [c.request_id for c in core.step(PrefillDone(f"r{n}"), 2 * S)]
        core.check()
    assert order == ["short", "long"]


def test_a_full_prefill_queue_means_local() -> None:
    core = pd(prefillers=1)
    reasons = Counter[str]()
    for n in range(30):
        for command in core.step(Arrived(request(f"r{n}", 20_000)), S):
            if isinstance(command, Routed):
                reasons[command.receipt.split_reason] += 1
    core.check()
    assert reasons["long"] == 4
    assert reasons["prefill-queue"] == 30 - 10


def test_receipts_say_what_followed() -> None:
    core = core_of(spec(0))
    arrive(core, request("r"), answer(hbm(0, 100)))
    core.step(FirstToken("r"), S + 250 * MS)
    core.step(RequestEnded("r", Ending.DONE, 1600, 40), 3 * S)
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    assert receipt.outcome.ttft_s == pytest.approx(0.25)
    assert (receipt.outcome.cached_tokens, receipt.outcome.output_tokens) == (1600, 40)
    assert receipt.outcome.end == "done"
    assert receipt.predicted_s > 0.2
    assert core.take_drafts() == []


def test_a_receipt_is_bounded() -> None:
    core = core_of(*(spec(n) for n in range(20)), policy=parse({"receipt_workers_max": 5}))
    draft = routed(arrive(core, request("r"), answer(hbm(7, 100)))).draft
    arrays = [draft.columns, draft.weights, draft.scores, *draft.terms.values()]
    assert {each.shape[-1] for each in arrays} == {5}
    whole = [each if each.base is None else each.base for each in arrays]
    assert [each.nbytes for each in whole] == [each.nbytes for each in arrays], "nor is more held"
    receipt = draft.receipt()
    assert len(receipt.workers) == len(receipt.scores) == 5
    assert receipt.chosen == "w7"
    assert "w7" in receipt.workers


def test_observed_hits_lower_a_worker_that_is_believed_too_much() -> None:
    core = core_of(spec(0), spec(1))
    for n in range(60):
        now_ns = S + n * S
        arrive(core, request(f"r{n}", subset=("w0",)), answer(hbm(0, 200)), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns + 600 * MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE, 0, 1), now_ns + 700 * MS)
    receipt = core.explain(request("x"), answer(hbm(0, 200), hbm(1, 100)), 100 * S)
    assert receipt.features["hit_ratio"][0] < 0.1
    assert receipt.chosen == "w1"


def test_hits_are_learned_apart_for_what_only_another_node_has() -> None:
    core = core_of(spec(0), spec(1))
    near, far = PrefixMatch("n0", "", 0, 0, 100), PrefixMatch("n1", "", 0, 0, 200)

    def served(name: str, cached_tokens: int) -> list[float]:
        for n in range(150):
            now_ns = S + n * S
            its = request(f"{name}{n}", 6400, prefix=name, subset=("w0",))
            arrive(core, its, answer(near, far), now_ns)
            core.step(FirstToken(its.request_id), now_ns + 600 * MS)
            done = RequestEnded(its.request_id, Ending.DONE, cached_tokens, 1)
            core.step(done, now_ns + 700 * MS)
            core.tree.forget("w0")
        features = core.explain(request("x"), None, 900 * S).features
        return [round(features[ratio][0], 2) for ratio in ("hit_ratio", "fetch_ratio")]

    # Its own dram has 1,600 tokens, that of another node 1,600 more.
    assert served("a", 1600) == [1, 0]
    assert served("b", 2400) == [1, 0.5]
    assert served("c", 400) == [0.25, 0]
    core.check()


def test_explain_changes_nothing() -> None:
    core = core_of(spec(0), spec(1))
    its = request("r")
    before = core.explain(its, None, S)
    assert core.explain(its, None, S) == before
    assert not core.open
    assert not core.fleet.flights
    assert routed(arrive(core, its)).receipt == before
    core.step(Judged("w0", WorkerHealth.DOWN), S)
    core.step(Judged("w1", WorkerHealth.DOWN), S)
    refused = core.explain(request("x"), None, S)
    assert (refused.outcome.rejected, refused.chosen) == ("rejected-no-endpoints", "")
    assert (len(core.take_drafts()), len(core.open)) == (0, 1), "nor is it kept"


def test_replicas_follow_work_and_queue() -> None:
    policy = parse({"learning": {"is_frozen": True}})
    core = core_of(*(spec(n) for n in range(4)), policy=policy)
    assert core.desired_replicas("p", WorkerRole.BOTH, S) == 1
    for n in range(120):
        now_ns = S + n * 250 * MS
        core.step(Arrived(request(f"r{n}", 8000)), now_ns)
        core.step(FirstToken(f"r{n}"), now_ns + 10 * MS)
        core.step(RequestEnded(f"r{n}", Ending.DONE), now_ns + 20 * MS)
    # A second of prefill four times a second keeps four busy: five at 80 %.
    assert core.desired_replicas("p", WorkerRole.BOTH, 31 * S) in (3, 4, 5, 6)
    for n in range(60):
        core.step(Arrived(request(f"q{n}", 30_000)), 31 * S)
    assert core.gauges.saturation("p", 31 * S).value > 1
    assert core.desired_replicas("p", WorkerRole.BOTH, 31 * S) >= 5


def test_a_thousand_workers_that_join_are_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of them, the router would stand still for seconds."""
    made = Counter[str]()

    class CountedMap(ModelMap):
        def __init__(self, *given: Any) -> None:
            made["maps"] += 1
            super().__init__(*given)

    monkeypatch.setattr(core_module, "ModelMap", CountedMap)
    core = core_of(*(spec(number) for number in range(1000)))
    first = routed(arrive(core, request("r")))
    core.step(WorkerLeft(first.worker), S)
    assert routed(arrive(core, request("s"))).worker != first.worker
    assert made["maps"] == 2


def test_every_receipt_can_be_written() -> None:
    policy = parse({"split": {"uncached_min": 1, "busy_uncached_min": 1, "learned_least": 1}})
    core = core_of(prefiller(0), spec(1, role=WorkerRole.DECODE), policy=policy)
    for number in range(3):
        name = f"r{number}"
        receipt = routed(arrive(core, request(name))).draft.receipt()
        assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt
