"""The parts of bench-peers that run no engine: damage, verdict, memory, rounds, command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from rich.progress import Progress

from bench import disk
from bench.peers import lmcache, rounds, timing
from bench.peers.damage import judge
from bench.peers.memory import memory_of, open_memfds, status
from kvstore.demo.engine import Completion, VllmServer
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


def test_other_seeds_flip_other_bits(tmp_path: Path) -> None:
    seen = set()
    for seed in range(3):
        (tmp_path / "a").write_bytes(bytes(5000))
        disk.flip_bits(tmp_path, every_bytes=1000, seed=seed)
        seen.add((tmp_path / "a").read_bytes())
    assert len(seen) == 3


def test_a_dropped_page_cache_changes_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"kept")
    disk.drop_page_cache(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"kept"


# ── verdict ──────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_answer_is_not_a_wrong_one() -> None:
    verdict = judge([(1,), (2,), (3,), (4,)], [(1,), (9,), None, (4,)], 0.5)
    assert (verdict.answers, verdict.wrong, verdict.failed, verdict.hit_rate) == (4, 1, 1, 0.5)


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    found = timing.ratio([1.0, 2.0, 30.0], [4.0, 4.0, 5.0])
    low, high = found["interval_95"]
    assert found["ratio"] == 0.5
    assert low <= 0.5 <= high


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


def test_sizes_of_a_process() -> None:
    assert status("Name:\tcat\nRssAnon:\t  12 kB\nThreads:\t1\n") == {"RssAnon": 12 << 10}


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


def test_shared_memory_is_counted_as_far_as_it_is_allocated() -> None:
    fd = os.memfd_create("bench-test")
    try:
        os.ftruncate(fd, 1 << 20)
        twice = os.dup(fd)
        os.pwrite(fd, bytes(8192), 0)
        found = [path for path in open_memfds(os.getpid()) if path.stat().st_size == 1 << 20]
        assert len(found) == 1
        memory = memory_of(os.getpid(), shared=found)
        assert memory.shared == 8192
        assert memory.private > 0
        os.close(twice)
    finally:
        os.close(fd)


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


def test_the_working_set_counts_what_is_shared_once() -> None:
    fake = FakeEngine("x", [])
    rounds.measure_rounds(cast("dict[str, VllmServer]", {"x": fake}), PLAN, encode, SILENT)
    last = fake.prompts[-PLAN.users :]
    beginnings = {prompt[:end] for prompt in last for end in range(1, len(prompt) + 1)}
    answers = PLAN.users * PLAN.answer_tokens
    assert rounds.working_set_tokens(PLAN, encode) == len(beginnings) + answers
    assert rounds.own_cache_blocks(5 * 128 * 9 + 1) == 9


def test_bins_of_the_hit_rate() -> None:
    def turn(cached: int, ms: float) -> rounds.Served:
        return rounds.Served(
            round=0, prompt_tokens=100, cached_tokens=cached, ttft_s=ms / 1000, duration_s=1,
            answer=(),
        )  # fmt: skip

    rows = rounds.by_hit_rate([turn(0, 5), turn(19, 7), turn(20, 1), turn(100, 2)], (0, 0.2, 1))
    assert [(row["from"], row["turns"]) for row in rows] == [(0, 2), (0.2, 2)]
    assert np.allclose([row["ttft_ms_p50"] for row in rows], [6, 1.5])
    assert [row["hit_rate"] for row in rows] == pytest.approx([0.095, 0.6])


# ── command lines ────────────────────────────────────────────────────────────────────────────────


def test_the_engine_runs_in_the_other_environment_with_the_other_connector() -> None:
    config = lmcache.LMCacheEngineConfig(
        model=Path("m"), python=Path("/x/bin/python"), port=7, kv_blocks=3
    )
    command = config.command()
    assert command[:2] == ["/x/bin/python", "-m"]
    assert command.count("--kv-transfer-config") == 1
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["lmcache.mp.port"] == 7
    assert "--num-gpu-blocks-override" in command


def test_the_server_stores_files_only_where_it_is_told_to() -> None:
    def command(files: Path | None) -> list[str]:
        return lmcache.server_command(Path("/x/python"), (7, 8), memory_gib=2, files=files)

    assert "--l2-adapter" not in command(None)
    told = command(Path("/files"))
    assert json.loads(told[told.index("--l2-adapter") + 1])["base_path"] == "/files"
    assert told[:2] == ["/x/lmcache", "server"]
