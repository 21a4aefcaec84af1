"""Workers that send requests away without having failed."""

from __future__ import annotations

import pytest

from kvstore.routing.events import Ending, Failure, FirstToken, Leg, LegFailed, RequestEnded
from kvstore.routing.fleet import BUSY_NS
from kvstore.routing.policy import parse
from tests.unit.routing.fleets import S, arrive, core_of, request, routed, spec


def test_a_worker_that_is_full_by_its_own_word_is_left_alone_for_a_moment() -> None:
    core = core_of(spec(0), spec(1))
    first = routed(arrive(core, request("r")))
    other = routed(core.step(LegFailed("r", Leg.DECODE, Failure.BUSY, False), S)[0])
    assert other.worker != first.worker
    core.step(RequestEnded("r", Ending.DONE), S)
    for n in range(8):
        again = routed(arrive(core, request(f"s{n}"), now_ns=S + BUSY_NS - 1))
        assert again.worker == other.worker
        core.step(FirstToken(f"s{n}"), S + BUSY_NS - 1)
    late = routed(arrive(core, request("t"), now_ns=S + BUSY_NS))
    assert late.worker == first.worker, "it has nothing to do"
    core.step(FirstToken("t"), S + BUSY_NS)
    assert not core.fleet.doubtful


@pytest.mark.parametrize("failure", [Failure.BUSY, Failure.REFUSED])
def test_what_is_no_fault_of_a_worker_opens_no_breaker(failure: Failure) -> None:
    core = core_of(spec(0), policy=parse({"limits": {"attempts_max": 1, "retry_burst": 1}}))
    for n in range(10):
        routed(arrive(core, request(f"r{n}"), now_ns=n * S))
        core.step(LegFailed(f"r{n}", Leg.DECODE, failure, False), n * S)
    assert not core.fleet.workers[0].breaker.is_open
    assert core._retries_left == 1
