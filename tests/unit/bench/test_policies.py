"""The replay behind `make bench-policies`: what counts as a hit, and that the bound is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.scenarios import policies, s3fifo
from bench.scenarios.policies import optimum
from bench.scenarios.replay import Disk, Hits, replay
from bench.scenarios.workloads import GENERATED, Request, Workload, recorded
from kvstore.engine.memory.policies import POLICIES
from kvstore.types import AdmissionMode


def workload(*chains: str) -> Workload:
    """One letter a block."""
    return Workload("w", tuple(Request(tuple(map(ord, c)), 10 * len(c) + 5) for c in chains))


def served(work: Workload, *, slots: int, disk: Disk | None = None) -> Hits:
    return replay(work, policy="lru", slots=slots, block_tokens=10, disk=disk)


def test_a_hit_is_the_leading_run_in_blocks_and_tokens() -> None:
    many = served(workload("abcd", *["x"] * 20, "abycd", "abcd"), slots=512)
    assert (many.blocks, many.blocks_hit) == (33, 19 + 2 + 4)
    assert (many.tokens, many.tokens_hit) == (10 * 33 + 5 * 23, 10 * 25)
    assert many.evictions == 0


def test_a_cache_that_is_too_small_forgets_and_a_disk_does_not() -> None:
    fillers = [chr(1000 + 8 * i) + chr(1001 + 8 * i) for i in range(200)]
    work = workload("abcd", *fillers, "abcd")
    small = served(work, slots=64)
    assert small.blocks_hit == 0
    assert small.evictions > 0
    assert served(work, slots=2048).blocks_hit == 4
    disk = Disk(AdmissionMode.ALL, capacity=2000)
    assert served(work, slots=64, disk=disk).blocks_hit == 4
    assert disk.written == work.block_count
    little = Disk(AdmissionMode.ALL, capacity=100)
    assert served(work, slots=64, disk=little).blocks_hit == 0
    careful = Disk(AdmissionMode.SECOND_SIGHT, capacity=2000)
    assert served(work, slots=64, disk=careful).blocks_hit == 0
    assert careful.written == 4, "what came a second time"


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_no_policy_beats_the_optimum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "s3fifo", POLICIES["lru"])  # taken back after the test
    s3fifo.register()
    work = GENERATED[name](1, 80)
    assert work == GENERATED[name](1, 80)
    assert work != GENERATED[name](2, 80)
    slots = work.block_count // 10
    # The engine's slabs and credits leave it a little more than asked for.
    bound = optimum(work, slots=slots + 128)
    everything = optimum(work, slots=work.block_count)
    for policy in policies.POLICIES:
        got = replay(work, policy=policy, slots=slots, block_tokens=512)
        assert got.blocks == bound.blocks
        assert got.blocks_hit <= bound.blocks_hit <= everything.blocks_hit
        assert got.evictions > 0


def test_a_log_is_read_and_a_last_block_that_is_not_full_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"input_length": 1030, "hash_ids": [1, 2, 3]}, {"input_length": 512, "hash_ids": [1]}]
    log.write_text("\n".join(map(json.dumps, lines)))
    assert recorded(log).requests == (Request((1, 2), 1030), Request((1,), 512))
