"""Which blocks are stored, with which credits, and which engine blocks are fenced."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kvstore.client.core.plan import RankReport, StoreJob
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain


def step(
    node: AnsweredCore,
    request: str,
    *,
    computed: int,
    known: int | None = None,
    table: list[int] | None = None,
    new: tuple[int, ...] = (),
) -> StoreJob | None:
    """One engine step of one request that has `computed` tokens after it."""
    settled = node.core.settled_tokens(
        request,
        computed_tokens=computed,
        known_tokens=computed if known is None else known,
    )
    if settled:
        node.core.fill(request, tables=(table or list(range(100, 200)),), settled_tokens=settled)
    jobs = node.core.plan(new, node.now_ns).stores
    return jobs[0] if jobs else None


def stored(node: AnsweredCore, request: str, **changes: Any) -> StoreJob:
    """The job of a step that stores."""
    job = step(node, request, **changes)
    assert job is not None
    return job


def begin(node: AnsweredCore, request: str, keys: list[bytes], local: int = 0) -> None:
    node.core.new_request(request, keys, prompt_tokens=len(keys) * BLOCK_TOKENS, now_ns=node.now_ns)
    node.exchange()
    node.core.match(request, local_tokens=local * BLOCK_TOKENS, now_ns=node.now_ns)
    node.exchange()
    node.core.match(request, local_tokens=local * BLOCK_TOKENS, now_ns=node.now_ns)
    node.core.allocated(request, tables=([],), external_tokens=0, now_ns=node.now_ns)


def test_blocks_are_stored_in_the_step_that_completes_them(node: AnsweredCore) -> None:
    keys = node.holding(5, 0, credits=10)
    begin(node, "r", keys)
    first = stored(node, "r", computed=3 * BLOCK_TOKENS - 1)
    assert first.keys == b"".join(keys[:2])
    assert first.block_ids == (100, 101)
    assert step(node, "r", computed=3 * BLOCK_TOKENS - 1) is None
    second = stored(node, "r", computed=5 * BLOCK_TOKENS)
    assert second.block_ids == (102, 103, 104)
    node.core.reported(
        RankReport(rank=0, blocks_sealed=4, blocks_dropped=1, store_bytes=9, store_ns=7),
        node.now_ns,
    )
    node.core.reported(RankReport(rank=0, fence_ns=3), node.now_ns)
    counts = node.core.stats.take()
    assert counts["fence_ns"] == 3
    names = ("blocks_submitted", "blocks_sealed", "blocks_dropped", "bytes", "ns")
    assert [counts[f"store_{name}"] for name in names] == [5, 4, 1, 9, 7]


@pytest.mark.parametrize("store", ["all", "prompt"])
def test_a_block_waits_for_the_tokens_that_its_drafts_depend_on(store: str) -> None:
    node = AnsweredCore(lookahead_tokens=2, store=store)
    keys = node.holding(2, 0, credits=10)
    begin(node, "r", keys)
    assert step(node, "r", computed=BLOCK_TOKENS + 1) is None
    # Drafts are no known tokens.
    assert step(node, "r", computed=BLOCK_TOKENS + 5, known=BLOCK_TOKENS + 1) is None
    job = stored(node, "r", computed=BLOCK_TOKENS + 2)
    assert job.block_ids == (100,)
    assert step(node, "r", computed=2 * BLOCK_TOKENS) is None
    job = stored(node, "r", computed=2 * BLOCK_TOKENS + 2)
    assert job.block_ids == (101,)


def test_without_credits_the_chains_start_is_stored_first_and_the_rest_later(
    node: AnsweredCore,
) -> None:
    keys = node.holding(5, 0, credits=2)
    begin(node, "r", keys)
    job = stored(node, "r", computed=5 * BLOCK_TOKENS)
    assert job.keys == b"".join(keys[:2])
    assert step(node, "r", computed=5 * BLOCK_TOKENS + 1) is None
    assert node.core.stats.take()["store_blocks_without_credit"] == 3
    node.grant(4, first_slot=320)
    rest = stored(node, "r", computed=5 * BLOCK_TOKENS + 2)
    assert rest.keys == b"".join(keys[2:])
    assert m.slots_array(rest.slots).tolist() == [320, 336, 352]


def test_equal_prompts_are_stored_once(node: AnsweredCore) -> None:
    keys = node.holding(3, 0, credits=10)
    begin(node, "r1", keys)
    begin(node, "r2", keys)
    assert step(node, "r1", computed=3 * BLOCK_TOKENS) is not None
    assert step(node, "r2", computed=3 * BLOCK_TOKENS) is None


def test_nothing_is_stored_when_asked_so() -> None:
    node = AnsweredCore(store="none")
    keys = node.holding(4, 0, credits=10)
    begin(node, "r", keys)
    assert step(node, "r", computed=4 * BLOCK_TOKENS) is None
    assert node.core.settled_tokens("r", computed_tokens=512, known_tokens=512) == 0


def test_load_targets_are_fenced_too(node: AnsweredCore) -> None:
    keys, other = chain("a", 2), chain("b", 2)
    node.keys = set(other)
    node.attach(credits=10)
    begin(node, "r", keys)
    step(node, "r", computed=2 * BLOCK_TOKENS, table=[7, 8])
    node.core.finished("r")
    node.look_up("s", other)
    node.match("s")
    node.allocate("s", [8, 3, 4], 2)
    assert node.core.plan((), node.now_ns).fence_blocks == (8,)


def test_loads_outlast_a_plan_that_fails(
    node: AnsweredCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look_up("r", node.holding(2))
    node.match("r")
    node.allocate("r", [8, 3, 4], 2)
    monkeypatch.setattr(node.core.stores, "take_jobs", mock.Mock(side_effect=ValueError("bug")))
    with pytest.raises(ValueError, match="bug"):
        node.core.plan((), node.now_ns)
    assert [load.request for load in node.core.rescue_plan().loads] == ["r"]
    assert node.core.rescue_plan().loads == ()


def test_an_idle_engine_steps_for_copies_only_for_a_bounded_time(node: AnsweredCore) -> None:
    keys = node.holding(2, 0, credits=10)
    begin(node, "r", keys)
    step(node, "r", computed=2 * BLOCK_TOKENS)
    assert node.core.stores.running(node.now_ns)
    node.wait(1001)
    assert not node.core.stores.running(node.now_ns)


def test_a_restarted_node_is_told_everything_again(node: AnsweredCore) -> None:
    keys = node.holding(2, 0, credits=10)
    begin(node, "r1", keys)
    step(node, "r1", computed=2 * BLOCK_TOKENS)
    node.core.attachment.disconnected(node.now_ns, "gone")
    node.wait(2000)
    node.attach(credits=5, incarnation=8)
    node.core.new_request("r2", keys, prompt_tokens=256, now_ns=node.now_ns)
    job = stored(node, "r2", computed=2 * BLOCK_TOKENS)
    assert job.session == node.session


def reattach(node: AnsweredCore, *, emptied: bool) -> None:
    """The engine's cache was reset; the node opens a session in the new space."""
    node.core.new_weights("w1", node.now_ns, emptied=emptied)
    node.attach(credits=10)


def test_what_an_engine_holds_over_a_reset_is_not_stored(node: AnsweredCore) -> None:
    running, reader, fresh = chain("a", 3), chain("b", 3), chain("c", 3)
    node.attach(credits=10)
    begin(node, "running", running)
    step(node, "running", computed=BLOCK_TOKENS)
    reattach(node, emptied=False)
    assert step(node, "running", computed=3 * BLOCK_TOKENS) is None
    begin(node, "reader", reader, local=2)
    assert step(node, "reader", computed=3 * BLOCK_TOKENS) is None
    begin(node, "fresh", fresh)
    job = stored(node, "fresh", computed=3 * BLOCK_TOKENS)
    assert len(job.block_ids) == 3
