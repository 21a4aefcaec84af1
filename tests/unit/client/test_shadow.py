"""Hits that are computed all the same: which, what is compared, what the node hears, the ends."""

from __future__ import annotations

from typing import Any

from kvstore.client.core.plan import CompareResult, RankReport, StoreJob
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain

SHADOW = "shadow check"


def lookup(node: AnsweredCore, request: str, keys: list[bytes], *, local: int = 0) -> object:
    """Ask until there is an answer."""
    node.arrive(request, keys)
    node.exchange()
    assert node.match(request, local) is None
    node.exchange()
    return node.match(request, local)


def shadowed(
    count: int = 4, *, held: int | None = None, local: int = 0, **changes: Any
) -> tuple[AnsweredCore, list[bytes]]:
    """Request r is a hit that is computed; it has been admitted."""
    node = AnsweredCore(shadow_every=1, **changes)
    keys = chain("a", count)
    node.keys = set(keys[:held])
    node.attach()
    assert lookup(node, "r", keys, local=local) == SHADOW
    node.allocate("r", list(range(100, 100 + count)), 0)
    return node, keys


def compute(
    node: AnsweredCore, keys: list[bytes], blocks: int, *, new: tuple[int, ...] = ()
) -> list[StoreJob]:
    """A step after which so many blocks are complete; the jobs that compare."""
    tokens = blocks * BLOCK_TOKENS
    settled = node.core.settled_tokens("r", computed_tokens=tokens, known_tokens=tokens)
    if settled:
        table = list(range(100, 100 + len(keys)))
        node.core.fill("r", tables=(table,), settled_tokens=settled)
    return [job for job in node.core.plan(new, node.now_ns).stores if job.compare]


def done(
    node: AnsweredCore,
    job: StoreJob,
    *diverged: int,
    rank: int = 0,
    compared: int | None = None,
    worst: float = 0.001,
) -> None:
    count = len(job.block_ids) if compared is None else compared
    result = CompareResult(job.job, count, diverged, worst)
    report = RankReport(rank=rank, store_jobs_done=(job.job,), compared=(result,))
    node.core.reported(report, node.now_ns)


def verdicts(node: AnsweredCore) -> list[tuple[int, list[int], int]]:
    return [
        (s.blocks, m.slots_array(s.diverged).tolist(), s.error_ppm)
        for s in node.exchange()
        if isinstance(s, m.Compared)
    ]


def test_what_is_computed_from_blocks_of_older_weights_is_not_compared() -> None:
    node, keys = AnsweredCore(shadow_every=1), chain("a", 4)
    node.core.new_weights("w1", node.now_ns, emptied=False)
    node.keys = set(keys)
    node.attach()
    assert lookup(node, "r", keys, local=1) == SHADOW
    node.allocate("r", list(range(100, 104)), 0)
    assert compute(node, keys, 4) == []
    assert any(isinstance(message, m.LeaseRelease) for message in node.exchange())


# ── which ────────────────────────────────────────────────────────────────────────────────────────


def test_every_nth_hit_is_computed_whatever_misses_come_between() -> None:
    node = AnsweredCore(shadow_every=3)
    node.attach()
    answers = []
    for i in range(9):
        keys, unknown = chain(f"k{i}", 3), chain(f"u{i}", 3)
        assert lookup(node, f"u{i}", unknown) == "not stored"
        node.keys |= set(keys)
        answers.append(lookup(node, f"r{i}", keys))
        loaded = 3 if isinstance(answers[-1], int) else 0
        node.allocate(f"r{i}", [1, 2, 3], loaded)
        node.core.plan((), node.now_ns)
    hit = 3 * BLOCK_TOKENS
    assert answers == [hit, hit, SHADOW] * 3


# ── the verdict ──────────────────────────────────────────────────────────────────────────────────


def test_the_node_hears_what_was_compared_and_gets_its_lease_back() -> None:
    node, keys = shadowed()
    (first,) = compute(node, keys, 2)
    (second,) = compute(node, keys, 4)
    done(node, first)
    assert verdicts(node) == [(2, [], 1000)]
    assert node.core.lookups.leases_open == 1
    done(node, second, 1, worst=1.5)
    assert verdicts(node) == [(2, [3], 1_500_000)], "counted from the start of the lease"
    assert node.core.lookups.leases_open == 0
    assert any(isinstance(s, m.LeaseRelease) for s in node.sent)
    counts = node.core.stats.take()
    assert (counts["shadow_blocks"], counts["shadow_blocks_diverged"]) == (4, 1)


def test_blocks_behind_those_of_the_engine_are_compared_with_their_own() -> None:
    node, keys = shadowed(local=1)
    (job,) = compute(node, keys, 3)
    assert (job.block_ids, job.keys) == ((101, 102), b"".join(keys[1:3]))


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_ends_early_gives_its_lease_back() -> None:
    for blocks in (0, 2, 4):
        node, keys = shadowed()
        jobs = compute(node, keys, blocks)
        node.core.finished("r")
        assert node.core.lookups.leases_open == 0
        for job in jobs:
            done(node, job)
        assert len(verdicts(node)) == (1 if blocks else 0), "what was compared still counts"
        assert node.core.lookups.leases_open == 0


def test_after_a_new_session_nothing_of_the_old_one_is_compared() -> None:
    node, keys = shadowed()
    (job,) = compute(node, keys, 2)
    node.reopen()
    node.exchange()
    assert compute(node, keys, 4) == []
    done(node, job, 1)
    assert verdicts(node) == []
    assert node.core.lookups.leases_open == 0
