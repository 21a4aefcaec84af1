"""Two ranks that hold the same shard: one column, one writer, and both are waited for."""

from __future__ import annotations

import pytest

from kvstore.client.core.plan import RankReport
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain
from tests.unit.client.test_stores import begin, step


@pytest.fixture
def node() -> AnsweredCore:
    return AnsweredCore(rank_count=2)


def under_load(node: AnsweredCore, request: str) -> int:
    """A request whose load of 3 blocks runs; returns its lease."""
    keys = chain(request, 3)
    node.keys |= set(keys)
    node.look_up(request, keys)
    assert node.match(request) == 3 * BLOCK_TOKENS
    job = node.load(request, [10, 11, 12], 3)
    assert len(job.slots) == 3 * 4, "one column, whatever the number of ranks"
    return job.lease


@pytest.mark.parametrize("loaded", [(3, 3), (1, 3), (3, 1), (0, 0)])
def test_a_load_ends_with_its_last_rank_and_fails_if_it_fails_on_one(
    node: AnsweredCore, loaded: tuple[int, int]
) -> None:
    node.attach()
    lease = under_load(node, "r")
    for rank in (1, 0):
        assert node.core.lookups.leases_open == 1
        node.exchange()
        assert node.of(m.LeaseRelease) == []
        failed = tuple(range(10 + loaded[rank], 13))
        node.ended("r", lease, loaded[rank], rank=rank, failed_block_ids=failed)
    assert node.core.lookups.leases_open == 0
    node.exchange()
    assert node.of(m.LeaseRelease) == [m.LeaseRelease(leases=[lease])]
    fails = min(loaded) < 3
    assert (node.match("r") == "load failed") is fails
    assert node.core.stats.take().get("load_failures", 0) == fails
    story = node.core.finished("r")
    assert story is not None
    assert story.loaded_tokens == min(loaded) * BLOCK_TOKENS


def test_a_stored_block_is_fenced_until_the_rank_that_does_not_write_said_so_too(
    node: AnsweredCore,
) -> None:
    keys = node.holding(2, 0, credits=10)
    begin(node, "r", keys)
    job = step(node, "r", computed=2 * BLOCK_TOKENS, table=[7, 8])
    assert job is not None
    for rank in (1, 0):
        assert node.core.plan((8, 9), node.now_ns).fence_blocks == (8,)
        done = RankReport(rank=rank, store_jobs_done=(job.job,))
        node.core.reported(done, node.now_ns)
    assert node.core.plan((8, 9), node.now_ns).fence_blocks == ()
