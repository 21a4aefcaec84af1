"""The parts of bench-peers that run no engine: damage, verdict, memory, rounds, command lines, and
the figures of hits, also those of a slow disk and of groups."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.progress import Progress

from bench import disk
from bench.hits import Hit
from bench.peers import timing
from bench.peers.sides import Name, Side
from bench.scenarios.single import HIT_TOKENS
from kvstore.demo.engine import Completion, HitCounts

SILENT = Progress(disable=True)


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def test_one_bit_is_flipped_in_every_stretch_of_every_file(tmp_path: Path) -> None:
    sizes = {"a": 2500, "below/b": 1000, "small": 999}
    before = {}
    for name, size in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        before[name] = os.urandom(size)
        path.write_bytes(before[name])
    assert disk.flip_bits(tmp_path, every_bytes=1000, seed=3) == 2 + 1
    for name, old in before.items():
        new = (tmp_path / name).read_bytes()
        assert len(new) == len(old)
        wrong = [(a ^ b).bit_count() for a, b in zip(old, new, strict=True)]
        stretches = [sum(wrong[start : start + 1000]) for start in range(0, len(old), 1000)]
        assert stretches == [1] * (len(old) // 1000) + [0] * (len(old) % 1000 > 0)


# ── hits ─────────────────────────────────────────────────────────────────────────────────────────


def hit(ms: float, found: int = 100, *, is_rested: bool = True) -> Hit:
    return Hit(ms=ms, found_tokens=found, own_hit_ms=10.0, is_rested=is_rested)


def compared(ours: Sequence[Hit], theirs: Sequence[Hit]) -> dict[str, Any]:
    requests = [
        timing.Request(0, number, {"kvstore": one, "LMCache": other})
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    computed: dict[Name, list[float]] = {"kvstore": [500.0], "LMCache": [600.0]}
    return timing.compared(requests, computed, stored_tokens=100)


def test_a_request_that_found_nothing_counts_and_stays_with_its_pair() -> None:
    found = compared(
        [hit(20.0), hit(700.0, 0), hit(30.0), hit(40.0)],
        [hit(40.0), hit(50.0), hit(60.0, 50), hit(80.0)],
    )
    ours, over = found["kvstore"], found["kvstore_over_lmcache"]
    assert (ours["requests"], ours["complete"]) == (4, 3)
    assert ours["hit_ms"]["p50"] == 35.0
    assert ours["complete_hit_ms"]["p50"] == 30.0
    assert ours["found_over_stored_tokens"] == 0.75
    assert found["LMCache"]["found_over_stored_tokens"] == 0.875
    assert over["ratio"] == 35.0 / 55.0
    assert over["ratio_of_means"] == 790.0 / 230.0
    whole = over["complete_on_both"]
    assert (whole["pairs"], whole["medians_ms"]) == (2, (30.0, 60.0))
    low, high = over["interval_95"]
    assert low <= over["ratio"] <= high
    row = {"ms": 700, "found_tokens": 0, "own_hit_ms": 10, "is_rested": True}
    assert found["samples"][1]["kvstore"] == row


def test_a_side_without_any_complete_hit_has_figures() -> None:
    found = compared([hit(700.0, 0), hit(800.0, 0)], [hit(50.0), hit(60.0)])
    assert found["kvstore"]["complete_hit_ms"] is None
    assert found["kvstore_over_lmcache"]["complete_on_both"] is None
    assert found["kvstore_over_lmcache"]["ratio"] == 750.0 / 55.0
    json.dumps(found)


class FakeSide:
    """Of whose engine every request finds what `found` says next."""

    def __init__(self, name: Name, found: Sequence[int], order: list[str]) -> None:
        self.name = name
        self.engine = self
        self.order = order
        self._found = list(found)
        self._hits = 0
        self._fresh = False

    def forget(self) -> None:
        self._fresh = True

    def hits(self) -> HitCounts:
        return HitCounts(0, self._hits, 0)

    def complete(self, prompt: Sequence[int], *, max_tokens: int) -> Completion:
        if self._fresh:
            self.order.append(self.name)
            self._hits += self._found.pop(0)
        self._fresh = False
        return Completion(tokens=(1,), prompt_tokens=1, cached_tokens=0, ttft_s=1, duration_s=1)

    def rest(self, blocks: int) -> None:
        self.order.append(f"{self.name} rests at {blocks}")

    def empty_dram(self) -> None:
        pass


def test_every_request_of_every_round_is_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.hits.rest_until_idle", lambda: True)  # other tests keep it busy
    order: list[str] = []
    sides = [
        FakeSide("kvstore", [HIT_TOKENS, 0, 128, HIT_TOKENS], order),
        FakeSide("LMCache", [HIT_TOKENS] * 4, order),
    ]
    found = timing.measure_file(cast("list[Side]", sides), [(1,), (2,)], 2, SILENT)
    assert order[2:] == [
        *("kvstore", "LMCache", "LMCache", "kvstore", "LMCache", "kvstore", "kvstore", "LMCache"),
    ]
    assert [(row["round"], row["prompt"]) for row in found["samples"]] == [
        *((0, 0), (0, 1), (1, 0), (1, 1)),
    ]
    tokens = [row["kvstore"]["found_tokens"] for row in found["samples"]]
    assert tokens == [HIT_TOKENS, 0, 128, HIT_TOKENS]
    assert found["kvstore"]["complete"] == 2
    sides = [FakeSide(name, [HIT_TOKENS] * 6, order) for name in ("kvstore", "LMCache")]
    again = timing.measure_dram(cast("list[Side]", sides), [(1,)], SILENT)
    assert len(again["samples"]) == timing.HITS_PER_PROMPT
