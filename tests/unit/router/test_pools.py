"""Models of the policy that no worker serves."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.config.router import WorkerAddress
from kvstore.router.engines.workers import Worker, faults
from kvstore.routing.policy import parse
from kvstore.routing.values import WorkerRole


def worker(pool: str, *models: str, role: str = "both") -> Worker:
    return Worker(
        WorkerAddress(name="w", url="http://h", pool=pool, models=models, role=WorkerRole(role))
    )


def found(rule: dict[str, Any], *workers: Worker, **limits: Any) -> list[str]:
    policy = parse({"models": {"chat": rule}, "limits": limits})
    return [each.partition(":")[0] for each in faults(policy, workers)]


STABLE = {"pools": [{"pool": "stable", "served": "m"}]}
EMPTY = "pool stable of model chat has no worker"


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ([], EMPTY),
        ([worker("default", "m")], EMPTY),
        ([worker("stable", "m", role="prefill")], EMPTY),
        ([worker("stable", "o", "n")], "workers of pool stable serve n, o, not m"),
        (
            [worker("stable", *"ba"), worker("stable", "c")],
            "workers of pool stable serve a, b, c, not m",
        ),
        ([worker("stable", "n"), worker("stable", "m")], ""),
        ([worker("stable")], ""),  # not known yet
    ],
)
def test_a_pool_is_judged_by_its_workers(workers: list[Worker], says: str) -> None:
    assert found(STABLE, *workers) == [says]


def test_a_pool_that_scales_from_zero_may_be_empty_but_not_wrong() -> None:
    holds = {"holds_without_workers": True}
    assert found(STABLE, **holds) == [""]
    assert found(STABLE, worker("stable", "n"), **holds) == [
        "workers of pool stable serve n, not m"
    ]


def test_a_pool_without_sessions_is_not_judged() -> None:
    pools = [{"pool": "old", "weight": 0}, {"pool": "new"}]
    assert found({"pools": pools}, worker("new", "chat")) == [""]


def test_a_model_without_pools_is_sought_in_all() -> None:
    assert found({}, worker("a", "m"), worker("b", "n")) == ["workers serve m, n, not chat"]
    assert found({}, worker("a", "m"), worker("b", "chat")) == [""]
    assert found({}) == [""], "no worker is said elsewhere"
