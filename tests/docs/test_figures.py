"""Every ratio of every benchmark record is what the record's own medians, sums or samples say. What
the report makes of them: tests/docs/test_report.py."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import msgspec
import pytest

from bench.hits import Hit, figures
from bench.peers import timing
from bench.peers.sides import Name
from bench.scenarios import groups, slow_disk, surface
from tests.docs.ratios import (
    RULES,
    WITHOUT_SAMPLES,
    agrees,
    at,
    expected,
    numbers,
    ratios,
)
from tests.style.tree import ROOT

RECORDS = sorted(path.stem for path in (ROOT / "bench" / "results").glob("*.json"))


@functools.cache
def read(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text("utf-8"))


def wrong(name: str, record: Any) -> list[str]:
    """What is wrong with its ratios."""
    found = []
    for path, printed in ratios(record):
        place = "/".join((name, *path))
        exact = expected(name, record, path)
        if exact is None:
            if not any(re.fullmatch(pattern, place) for pattern in WITHOUT_SAMPLES):
                found.append(f"{place}: no rule says what it is made from")
        elif not agrees(printed, exact):
            found.append(f"{place}: {printed}, and its record says {exact:.4g}")
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_every_ratio_is_that_of_its_record(name: str) -> None:
    assert wrong(name, read(name)) == []


def test_ratios_are_found_and_rules_used() -> None:
    places = ["/".join((name, *path)) for name in RECORDS for path, _ in ratios(read(name))]
    assert len(places) > 250
    used = {p for p, _ in RULES if any(re.fullmatch(p, place) for place in places)}
    assert len(used) > 40
    assert {place.split("/")[0] for place in places} >= {
        *("cluster", "demo", "files", "groups", "peers", "pd", "single", "slow_disk"),
    }


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("peers", "files/kvstore_over_lmcache", {"ratio": 99.5}),
        ("files", "", {"hit_over_own_hit": 99.5}),
        ("single", "hits", {"recompute_over_dram_hit": 99.5}),
        ("pd", "hand_over/figures/hand_over_over_nixl_connector", {"value": 99.5}),
        ("single", "hits", {"wait_over_hit": 1.0}),  # no rule
    ],
)
def test_a_ratio_that_is_wrong_or_without_rule_is_seen(
    name: str, path: str, value: dict[str, float]
) -> None:
    record = json.loads(json.dumps(read(name)))
    (at(record, path) if path else record).update(value)
    (told,) = wrong(name, record)
    assert told.startswith("/".join(filter(None, (name, path, *value))))


def test_what_the_benchmarks_write_has_rules() -> None:
    asked = [slow_disk.Asked(ms, 128) for ms in (10.0, 30.0, 20.0)]
    paces = [slow_disk.pace_figures(0, asked, asked), slow_disk.pace_figures(2, asked[:2], asked)]
    slow = {"paces": paces, **slow_disk.run_figures(paces)}
    disk = {tier: {"ms": 1.0, "found_tokens": 5} for tier in ("disk", "dram")}
    grouped = {"shapes": {"gemma3": {"disk": groups.disk_figures([{"tokens": 7, **disk}])}}}
    hits = [
        Hit(ms=ms, found_tokens=int(ms), own_hit_ms=3.0, is_rested=ms > 5)
        for ms in (10.0, 5.0, 11.0)
    ]
    sides: tuple[Name, Name] = ("kvstore", "LMCache")
    requests = [timing.Request(0, at, dict.fromkeys(sides, hits[at])) for at in range(3)]
    part = timing.compared(requests, {side: [1.0] for side in sides}, stored_tokens=10)
    rows = [msgspec.to_builtins(one) for one in hits]
    filed = {**figures(hits, stored_tokens=10), "stored_tokens": 10, "samples": rows}
    records: dict[str, tuple[Any, int]] = {
        "slow_disk": (slow, 2 * len(paces) + 2),
        "groups": (grouped, 2),
        "peers": ({"serving": {"dram": part}, "files": part}, 2 * (2 * 3 + 3)),
        "files": (filed, 3),
    }
    bursts = [surface.Burst([ms, 2 * ms], 128, 1.0, is_rested=True) for ms in (5.0, 9.0, 1.0)]
    cells = [surface.figures(bursts[:2], bursts[1:], hit_rate=0.5)]
    without = [msgspec.to_builtins(one) for one in bursts[1:]]
    records["surface"] = ({"rows": [{"cells": cells, "without_samples": without}]}, 1)
    for name, (record, count) in records.items():
        assert len(list(ratios(record))) == count
        assert wrong(name, record) == []
    for name, record in (("peers", {"serving": {"dram": part}}), ("files", filed)):
        assert miscounted(name, record) == []
    filed["not_rested"] = 2
    assert miscounted("files", filed) == ["files/not_rested: 2, and its samples say 1"]


def miscounted(name: str, record: Any) -> list[str]:
    """Counts of requests that were sent before the machine was idle, other than in their samples.
    Records of before there was such a count have none."""
    found = []
    for path, counted in numbers(record, ()):
        if path[-1] == "not_rested":
            *above, side = ("", *path[:-1])
            part = at(record, "/".join(above[1:])) if above[1:] else record
            if isinstance(part, list):  # of cells, with samples each
                rows = part[int(side)]["samples"]
            else:
                rows = [row[side] if side else row for row in part["samples"]]
            said = sum(not row["is_rested"] for row in rows)
            if counted != said:
                found.append(f"{'/'.join((name, *path))}: {counted}, and its samples say {said}")
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_requests_sent_before_the_machine_was_idle_are_those_of_the_record(name: str) -> None:
    assert miscounted(name, read(name)) == []
