"""Blocks that count as stored because the node knows them: what loads and restarts change."""

from __future__ import annotations

from kvstore.client.core.hits import Hit, Presence
from kvstore.client.core.plan import LoadResult, RankReport
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, chain, split
from tests.unit.client.test_pushes import PushNode
from tests.unit.client.test_tails import KEYS, PROMPT_TOKENS, arrive, step


def test_own_blocks_behind_the_hint_are_not_stored_again_because_others_were_loaded() -> None:
    node = PushNode()
    node.grant(600, first_slot=16 * 100)
    keys, own, count = chain("long", 2200), 2190, 2200  # a hint names 2,048
    node.keys = set(keys)
    tokens = count * BLOCK_TOKENS + 5
    node.core.new_request("r", keys, prompt_tokens=tokens, now_ns=node.now_ns)
    node.exchange()
    hit = (count - own) * BLOCK_TOKENS
    assert node.ask("r", own * BLOCK_TOKENS) == Hit(hit)
    table = list(range(1, 2300))
    node.core.allocated("r", tables=(table,), external_tokens=hit, now_ns=node.now_ns)
    (job,) = node.core.plan((), node.now_ns).loads
    result = LoadResult("r", job.lease, len(job.block_ids), (), 1, 1)
    node.core.reported(RankReport(0, node.session, loads=(result,)), node.now_ns)
    settled = node.core.settled_tokens("r", computed_tokens=tokens, known_tokens=tokens)
    if settled:
        node.core.fill("r", tables=(table,), settled_tokens=settled)
    assert not node.core.plan((), node.now_ns).stores


def test_a_node_that_lost_everything_is_given_the_blocks_of_running_requests() -> None:
    node = PushNode()
    node.keys = set(KEYS)
    arrive(node, None)
    node.core.attachment.disconnected(node.now_ns, "crash")
    node.wait(60_000)
    node.keys = set()
    assert node.core.attachment.wants_connection(node.now_ns)
    node.core.attachment.connected(node.now_ns)
    node.session += 1
    welcome = m.Welcome(
        protocol=1, incarnation=8, now_ns=node.now_ns, arena_bytes=1 << 20, generation_bytes=8192
    )
    node.give(welcome)
    node.give(m.SessionOpen(node.session, node.shard_counts, node=node.name))
    node.grant(8)
    stored = step(node, PROMPT_TOKENS)
    assert stored is not None
    assert split(stored.keys) == KEYS


def test_leased_blocks_are_there_and_none_between_is_absent() -> None:
    present = Presence()
    present.mark_present(0, range(4))
    assert present.get(0) is None, "an answer to no question"
    present.update_from_answer(0, 0, b"\x00")
    present.mark_present(0, range(2, 20))
    present.mark_present(0, range(5, 5))
    mask = present.get(0)
    assert mask is not None
    assert mask.tolist() == [False] * 2 + [True] * 6
    present.mark_absent(0, 6)
    assert mask.tolist() == [False] * 2 + [True] * 4 + [False] * 2
