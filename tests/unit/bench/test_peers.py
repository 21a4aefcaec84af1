"""The parts of bench-peers that run no engine: damage, verdict, memory, rounds, command lines, and
the figures of hits, also those of a slow disk and of groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from rich.progress import Progress

from bench import disk
from bench.hits import IDLE_TIMEOUT_S, Hit, rest_until_idle
from bench.peers import rounds, timing
from bench.peers.damage import judge
from bench.peers.memory import memory_of
from bench.peers.sides import Name, Side
from bench.scenarios import groups, slow_disk
from bench.scenarios.single import HIT_TOKENS
from kvstore.demo.engine import Completion, HitCounts, VllmServer
from kvstore.demo.workload import ConversationPlan
from kvstore.units import MIB

PLAN = ConversationPlan(
    seed=1,
    users=3,
    rounds=2,
    system_words=10,
    document_words=5,
    question_words=4,
    answer_tokens=2,
)
SILENT = Progress(disable=True)


def encode(text: str) -> list[int]:
    return list(text.encode())


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


# ── verdict ──────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_answer_is_not_a_wrong_one() -> None:
    verdict = judge([(1,), (2,), (3,), (4,)], [(1,), (9,), None, (4,)], 0.5)
    assert (verdict.answers, verdict.wrong, verdict.failed, verdict.hit_rate) == (4, 1, 1, 0.5)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


CHILD = """
import mmap, sys
heap, shared = bytearray(b"x" * {size}), mmap.mmap(-1, {size})
shared.write(b"x" * {size})
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_heap_of_descendants_is_private_memory_and_what_they_share_is_not() -> None:
    size = 64 * MIB
    command = [sys.executable, "-S", "-E", "-c", CHILD.format(size=size)]
    before = memory_of(os.getpid(), shared=[]).private
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        own, family = (memory_of(pid, shared=[]) for pid in (child.pid, os.getpid()))
        assert child.stdin is not None
        child.stdin.close()
    # An interpreter has some MiB of its own; what is shared would be as much again.
    assert size <= own.private < size + size // 2
    assert own.mapped < size // 2
    assert family.private >= before // 2 + size, "descendants count"


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


class FakeEngine:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls
        self.prompts: list[tuple[int, ...]] = []

    def forget(self) -> None:
        self.calls.append(f"{self.name} forgets")

    def complete(self, prompt: Sequence[int], *, max_tokens: int) -> Completion:
        self.calls.append(self.name)
        self.prompts.append(tuple(prompt))
        return Completion(
            tokens=(7,) * max_tokens,
            prompt_tokens=len(prompt),
            cached_tokens=10,
            ttft_s=0.5,
            duration_s=2.0,
        )


def test_each_turn_goes_to_all_engines_and_the_first_to_go_rotates() -> None:
    calls: list[str] = []
    fakes = {name: FakeEngine(name, calls) for name in ("alone", "one", "two")}
    served = rounds.measure_rounds(cast("dict[str, VllmServer]", fakes), PLAN, encode, SILENT)
    assert calls[:3] == ["alone forgets", "one forgets", "two forgets"]
    assert calls[3:9] == ["alone", "one", "two", "one", "two", "alone"]
    assert fakes["alone"].prompts == fakes["one"].prompts == fakes["two"].prompts
    assert len(fakes["alone"].prompts) == PLAN.users * PLAN.rounds
    row = rounds.report(served)["two"]
    assert row["requests_per_s"] == 0.5
    assert row["answers_as_first"] == row["answers"] == 6


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


def test_a_request_sent_before_the_machine_was_idle_is_counted() -> None:
    found = compared([hit(20.0), hit(30.0, is_rested=False)], [hit(40.0), hit(50.0)])
    assert [found[side]["not_rested"] for side in ("kvstore", "LMCache")] == [1, 0]
    assert [row["kvstore"]["is_rested"] for row in found["samples"]] == [True, False]


class Machine:
    """Its processors work for so many hundredths of a second between two looks, in this order, and
    go on as in the last one."""

    def __init__(self, *work: int) -> None:
        self._work = [*work]
        self.now_s, self.busy = 100.0, 0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.busy += self._work.pop(0) if len(self._work) > 1 else self._work[0]

    def rest(self) -> bool:
        """Whether it came to rest."""
        return rest_until_idle(
            busy_ticks=lambda: self.busy, clock=lambda: self.now_s, wait=self.wait
        )


def test_it_is_said_whether_the_machine_came_to_rest() -> None:
    calm, busy, at_last = Machine(0), Machine(2), Machine(*[9] * 60, 1)
    assert calm.rest()
    assert at_last.rest()
    assert not busy.rest()
    assert (calm.now_s, at_last.now_s) < (101.0, 100.0 + IDLE_TIMEOUT_S)
    assert busy.now_s == pytest.approx(100.0 + IDLE_TIMEOUT_S, abs=0.1)


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


# ── a slow disk, groups ──────────────────────────────────────────────────────────────────────────


def asked(*times_ms: float, tokens: int = 0) -> list[slow_disk.Asked]:
    return [slow_disk.Asked(ms, tokens) for ms in times_ms]


def test_a_slow_disk_is_summed_over_the_run_and_its_worst_request_is_named() -> None:
    paces = [
        slow_disk.pace_figures(0, asked(10, 20, 30, tokens=3200), asked(100, 100, 100)),
        slow_disk.pace_figures(20, asked(190, 110, 110, tokens=128), asked(100, 100, 100)),
    ]
    assert paces[1]["sum_slowed_over_sum_computed"] == 410 / 300
    assert paces[1]["median_slowed_over_median_computed"] == 1.1
    run = slow_disk.run_figures(paces)
    assert run["sum_slowed_over_sum_computed"] == 470 / 600
    worst = run["worst_request"]
    assert (worst["disk_mb_per_s"], worst["number"], worst["ms"]) == (20, 0, 190)
    assert (worst["slowed_over_median_computed"], worst["from_node_tokens"]) == (1.9, 128)


def test_tokens_found_after_a_restart_are_over_all_prompts() -> None:
    samples = [
        {"tokens": tokens, "disk": {"found_tokens": disk}, "dram": {"found_tokens": dram}}
        for tokens, disk, dram in ((100, 0, 0), (300, 128, 256), (400, 384, 384))
    ]
    found = groups.disk_figures(samples)
    assert found["disk_tokens_over_prompt_tokens"] == 512 / 800
    assert found["dram_tokens_over_prompt_tokens"] == 640 / 800
