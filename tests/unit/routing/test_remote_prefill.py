"""Remote prefills: where, in what order, and what happens when a leg fails."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Failure,
    FirstToken,
    Leg,
    PrefillDone,
    Routed,
    RouteTick,
)
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole
from kvstore.wire.load import EngineLoad
from tests.kit.routing_check import check
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


@pytest.mark.parametrize("failure", list(Failure))
def test_prefillers_that_fail_take_no_attempts_from_decoders(failure: Failure) -> None:
    core = pd(prefillers=2)
    routed(arrive(core, request("r")))
    for _ in range(2):
        local = routed(turn(core, fail("r", failure, Leg.PREFILL))[0])
    assert (local.prefill_worker, local.attempt) == (None, 3)
    other = routed(turn(core, fail("r"))[0])
    assert {local.worker, other.worker} == {"w0", "w1"}


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


def test_a_full_prefill_queue_means_local() -> None:
    core = pd(prefillers=1)
    reasons = Counter[str]()
    for n in range(30):
        for command in core.step(Arrived(request(f"r{n}", 20_000)), S):
            if isinstance(command, Routed):
                reasons[command.draft.plain.split_reason] += 1
    check(core)
    assert reasons["long"] == 4
    assert reasons["prefill-queue"] == 30 - 10


def test_a_threshold_of_a_reloaded_policy_is_in_effect_at_once() -> None:
    core = pd()
    assert routed(arrive(core, request("before", 1600))).prefill_worker is not None
    same = msgspec.structs.replace(core.policy, draining=("w1",))
    core.placer.split_of("p").uncached_min = 300.0
    core.adopt(same, S)
    assert core.placer.split_of("p").uncached_min == 300.0, "what was learned stays"
    core.adopt(parse({"split": {"uncached_min": 4000}}), S)
    assert routed(arrive(core, request("after", 1700), now_ns=S)).prefill_worker is None
