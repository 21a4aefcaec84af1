"""Receipts of requests that the core rejects, and dry runs of them."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvstore.routing.core import RouterCore
from kvstore.routing.events import RouteTick
from kvstore.routing.policy import PolicyName, parse
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import RouteRequest
from tests.unit.routing.fleets import (
    S,
    arrive,
    core_of,
    explain,
    fail,
    rejected,
    request,
    routed,
    spec,
    turn,
)

CLASSES = {"inline": {"rank": 0, "ttft_s": 1.0, "tenants": ["*"]}, "interactive": {"rank": 1}}
SLOW = parse({"costs": {"prefill_tokens_per_s": 1000}, "classes": CLASSES, "draining": ["w1"]})
"""16,000 tokens take 20 s, far more than an inline request may."""


def only_receipt(core: RouterCore) -> Receipt:
    [receipt] = [draft.receipt() for draft in core.take_drafts()]
    assert msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt) == receipt
    return receipt


def too_long(name: str) -> RouteRequest:
    return request(name, 16_000, service="inline")


def test_an_objective_that_cannot_be_met_leaves_a_receipt_with_both_times() -> None:
    core = core_of(spec(0), spec(1), policy=SLOW)
    answer = rejected(arrive(core, too_long("r")))
    receipt = only_receipt(core)
    assert (receipt.request_id, receipt.chosen, receipt.role) == ("r", "", "")
    assert (receipt.outcome.rejected, receipt.outcome.attempts) == ("rejected-objective", 0)
    assert receipt.predicted_s == answer.predicted_s == pytest.approx(20, rel=0.1)
    assert receipt.objective_s == answer.objective_s == SLOW.classes["inline"].ttft_s
    assert (receipt.workers, receipt.filtered) == (("w0", "w1"), {"w1": "draining"})
    assert receipt.scores[0] > 15, "what it would have cost"


def test_workers_that_are_left_out_are_in_the_receipt_with_the_reason() -> None:
    policy = parse({"draining": ["w1"]})
    core = core_of(spec(0, models=("other",)), spec(1), spec(2), policy=policy)
    assert rejected(arrive(core, request("r", subset=("w0", "w1")))).status == 503
    receipt = only_receipt(core)
    assert receipt.outcome.rejected == "rejected-no-endpoints"
    assert receipt.filtered == {"w0": "model", "w1": "draining", "w2": "subset"}


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_pool_without_workers_leaves_a_receipt_too(policy: str) -> None:
    core = core_of(policy=parse({"policy": policy, "models": {"m": {}}}))
    assert rejected(arrive(core, request("r"))).status == 503
    receipt = only_receipt(core)
    assert (receipt.workers, receipt.pool) == ((), "m")
    assert receipt.outcome.rejected == "rejected-no-endpoints"


def test_requests_that_waited_in_vain_leave_a_receipt_with_the_time() -> None:
    limits = {"queue_max": 1, "running_max": 1}
    classes = {"short": {"rank": 2, "ttl_s": 2}, "interactive": {"rank": 1}}
    core = core_of(spec(0), policy=parse({"limits": limits, "classes": classes}))
    routed(arrive(core, request("first")))
    assert arrive(core, request("r", service="short")) is None
    [over] = turn(core, RouteTick(), 4 * S)
    assert rejected(over).reason == "rejected-ttl-expired"
    receipt = only_receipt(core)
    assert (receipt.outcome.rejected, receipt.held_s) == ("rejected-ttl-expired", 3.0)
    assert receipt.filtered == {"w0": "queue"}


@pytest.mark.parametrize(
    "more", [{"limits": {"held_max": 1}}, {"classes": {"interactive": {"rank": 1, "queue_max": 1}}}]
)
def test_a_full_queue_rejects_and_a_dry_run_says_so(more: dict[str, dict[str, object]]) -> None:
    limits = {"queue_max": 1, "running_max": 1, **more.get("limits", {})}
    core = core_of(spec(0), policy=parse({**more, "limits": limits}))
    routed(arrive(core, request("first")))
    with pytest.raises(LookupError, match="wait"):
        explain(core, request("x"), None, S)
    assert arrive(core, request("held")) is None
    assert explain(core, request("x"), None, S).outcome.rejected == "rejected-saturated"
    assert rejected(arrive(core, request("r"))).reason == "rejected-saturated"
    assert only_receipt(core).outcome.rejected == "rejected-saturated"


def test_a_request_that_every_attempt_failed_has_one_receipt_with_its_last_worker() -> None:
    core = core_of(spec(0))
    routed(arrive(core, request("r")))
    turn(core, fail("r"))
    receipt = only_receipt(core)
    assert (receipt.chosen, receipt.outcome.rejected) == ("w0", "rejected-attempts")
    assert receipt.outcome.attempts == 1
