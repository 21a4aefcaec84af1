"""What `make soak` makes of what it counted; the run itself is tests/faults at length."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bench import record
from bench.scenarios import soak

SAMPLE = {
    "minute": 0.0,
    "rss_mib": 50.0,
    "descriptors": 30.0,
    "pins": 0.0,
    "slots_granted": 8.0,
    "slots_quarantined": 0.0,
    "blocks_dram": 1.0,
    "blocks_file": 1.0,
}


def samples(rss_mib: list[float]) -> list[dict[str, float]]:
    return [{**SAMPLE, "minute": float(n), "rss_mib": rss} for n, rss in enumerate(rss_mib)]


def result(**changes: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "name": "soak",
        "asked_minutes": 3.0,
        "environment": {"date": "2026-01-02", "commit": "c" * 40, "cpu": "a CPU", "cores": 2},
        "minutes": 3.0,
        "stopped_early": False,
        "seeds": 1200,
        "lives": {"60": 1000, "250": 200},
        "events": 700_000,
        "faults": {"node killed": 3},
        "kills": 7,
        "kills_by_point": {"storing rank": 7},
        "baseline_slowest_s": 0.5,
        "inputs": 1000,
        "round_trips": {"verified_blocks": 5000},
        "verified_bytes": 3 << 30,
        "violations": 0,
        "violations_told": {},
        "samples": samples([1.0] * 20),
        **changes,
    }


def test_growth_leaves_the_warm_up_out() -> None:
    assert record.growth(samples([1.0] * 3 + [50.0] * 17))["rss_mib"] == 24.5
    assert record.growth(samples([1.0] * 2 + [50.0] * 18))["rss_mib"] == 0.0
    assert record.growth(samples([50.0] * 18 + [53.0] * 2))["rss_mib"] == 3.0
    assert record.growth(samples([5.0]))["rss_mib"] == 0.0


def test_no_seed_is_no_proof() -> None:
    assert "**none was seen, but no seed was finished**" in soak.page(result(seeds=0))
    assert "**2**" in soak.page(result(seeds=0, violations=2))


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "long"])
def test_no_time_is_no_soak(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        soak.main([f"--minutes={minutes}"])
    assert stopped.value.code == 2
    assert f"'{minutes}' is not a time of more than 0 minutes" in capsys.readouterr().err


def test_the_world_is_counted_and_its_violations_told() -> None:
    world = soak.World(1 + soak.WORLD_SEEDS)
    told = {
        "seeds": 200,
        "events": 9000,
        "lives": {"60": 200},
        "faults": {"full": 2},
        "violations": ["seed 7"],
    }
    world.take("noise\n" + json.dumps(told), "", 0)
    assert (world.seeds, world.events, world.faults) == (200, 9000, Counter(full=2))
    assert world.lives == {60: 200}
    assert world.violations == []
    world.take(json.dumps(told), "", 1)
    world.take("", "it broke", 3)
    assert world.violations[0].startswith("['seed 7']; again: python -m tests.sim.world")
    assert "ended with 3" in world.violations[1]
