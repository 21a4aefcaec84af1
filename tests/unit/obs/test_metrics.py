"""The table of metrics keeps its own rules."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from kvstore.obs.metrics import METRICS, Metric, copied, families


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_end_in_their_unit(metric: Metric) -> None:
    assert re.fullmatch(r"kvstore_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    units = [unit for unit in ("bytes", "seconds") if unit in metric.name.split("_")]
    assert not units or metric.name.removesuffix("_total").endswith(units[0])
    assert metric.help.endswith(".")


def test_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_an_unlisted_metric_cannot_be_made() -> None:
    with pytest.raises(KeyError):
        list(families({"unlisted": 0}))


def test_samples_carry_their_labels() -> None:
    (made,) = families({"ready_bytes": {"dram": 5}})
    assert [(s.name, s.labels, s.value) for s in made.samples] == [
        ("kvstore_ready_bytes", {"tier": "dram"}, 5)
    ]


def test_buckets_are_cumulative() -> None:
    (made,) = families({"step_seconds": {(): ({0.1: 1, 0.2: 3, math.inf: 6}, 1.5)}})
    values = [(s.name.removeprefix("kvstore_step_seconds"), s.value) for s in made.samples]
    assert values == [("_bucket", 1), ("_bucket", 3), ("_bucket", 6), ("_count", 6), ("_sum", 1.5)]


def test_values_for_another_thread_stay_as_they_were() -> None:
    counts = Counter({"ok": 1})
    kept = copied({"router_requests_total": counts, "router_held": 2})
    counts["failed"] += 1
    assert kept == {"router_requests_total": {"ok": 1}, "router_held": 2}
