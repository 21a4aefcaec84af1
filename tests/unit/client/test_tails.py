"""Tails of prompts: what a prefill engine stores, what a decode engine loads, and exceptions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.core.plan import LoadJob, StoreJob
from kvstore.connector.prompts import tail_key
from kvstore.wire import messages as m
from kvstore.wire.messages import PushEnd, PushExpect
from kvstore.wire.requests import DecodePart, PrefillPart
from tests.unit.client.conftest import BLOCK_TOKENS, chain, split
from tests.unit.client.test_pushes import PushNode
from tests.unit.client.test_windows import WindowRules

KEYS = chain("x", 3)
TAIL = hashlib.sha256(b"the tail").digest()
PROMPT_TOKENS = 3 * BLOCK_TOKENS + 83
TABLE = list(range(100, 108))


def prefill_part() -> PrefillPart:
    return PrefillPart("t", "t")


def decode_part() -> DecodePart:
    return DecodePart("t", "n2")


def arrive(
    node: PushNode, part: PrefillPart | DecodePart | None, *, name: str = "r", tail: bytes = TAIL
) -> None:
    node.core.new_request(
        name, KEYS, prompt_tokens=PROMPT_TOKENS, now_ns=node.now_ns, transfer=part, tail=tail
    )
    node.exchange()


def step(
    node: PushNode, computed: int, known: int = PROMPT_TOKENS, *, keys: Sequence[bytes] = KEYS
) -> StoreJob | None:
    """A step up to so many tokens, as the connector makes it; what is stored or compared."""
    node.core.requests["r"].keys = keys
    if computed >= node.core.requests["r"].due_tokens:
        settled = node.core.settled_tokens("r", computed_tokens=computed, known_tokens=known)
        if settled:
            node.core.fill("r", tables=(TABLE,), settled_tokens=settled)
    jobs = node.core.plan((), node.now_ns).stores
    return jobs[-1] if jobs else None  # those that compare come last


def stored(node: PushNode, computed: int, known: int = PROMPT_TOKENS, **changes: Any) -> StoreJob:
    """The job of a step that has one."""
    job = step(node, computed, known, **changes)
    assert job is not None
    return job


def all_comes(node: PushNode) -> None:
    """A decode request, and then all of its prompt."""
    arrive(node, decode_part())
    node.keys = {*KEYS, TAIL}
    node.give(PushEnd("t", blocks=4))


def asked(node: PushNode, *, local: int = 0, keys: Sequence[bytes] = KEYS) -> object:
    node.core.requests["r"].keys = keys
    return node.ask("r", local * BLOCK_TOKENS)


def loaded(node: PushNode, tokens: int, *, local: int = 0) -> LoadJob:
    node.core.allocated("r", tables=(TABLE,), external_tokens=tokens, now_ns=node.now_ns)
    (job,) = node.core.plan((), node.now_ns).loads
    return job


def ended(node: PushNode, job: LoadJob, *, rank: int = 0, failed: tuple[int, ...] = ()) -> None:
    blocks = len(job.block_ids) - len(failed)
    node.ended("r", job.lease, blocks, rank=rank, failed_block_ids=failed)


@pytest.fixture
def node() -> PushNode:
    return PushNode()


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def test_a_prefill_stores_the_tail_with_the_step_that_completes_the_prompt(node: PushNode) -> None:
    arrive(node, prefill_part())
    job = stored(node, PROMPT_TOKENS - 1)
    assert job.keys == b"".join(KEYS)
    assert node.core.requests["r"].due_tokens == PROMPT_TOKENS
    job = stored(node, PROMPT_TOKENS)
    assert (job.keys, job.block_ids) == (TAIL, (103,))


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def test_a_tail_behind_a_gap_is_not_loaded(node: PushNode) -> None:
    arrive(node, decode_part())
    node.keys = {KEYS[0], TAIL}
    node.give(PushEnd("t", blocks=2, reason="evicted"))
    assert asked(node) == BLOCK_TOKENS


def test_behind_the_engines_own_blocks_the_tail_alone_is_loaded() -> None:
    node = PushNode(min_load_tokens=16)
    all_comes(node)
    assert asked(node, local=3) == 83
    job = loaded(node, 83)
    assert (job.keys, job.block_ids) == (TAIL, (103,))


def test_its_answer_is_stored_under_the_keys_of_whole_blocks(node: PushNode) -> None:
    all_comes(node)
    asked(node)
    job = loaded(node, PROMPT_TOKENS)
    ended(node, job)
    whole = chain("x", 4)
    answer = stored(node, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS + 1, keys=whole)
    assert (answer.keys, answer.block_ids) == (whole[3], (103,))


def test_a_request_that_was_preempted_looks_up_the_whole_block_of_its_answer(
    node: PushNode,
) -> None:
    arrive(node, decode_part())
    node.give(PushEnd("t", reason="aborted"))
    whole = chain("x", 4)
    node.keys = {*whole, TAIL}
    assert asked(node, keys=whole) == 4 * BLOCK_TOKENS


# ── none ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("why", ["drafts", "groups", "no transfer"])
def test_without_a_transfer_or_with_drafts_or_groups_there_is_no_tail(why: str) -> None:
    changes: dict[str, Any] = {}
    if why == "drafts":
        changes = {"lookahead_tokens": 1}
    elif why == "groups":
        sizes = {"group_tokens": (BLOCK_TOKENS, BLOCK_TOKENS), "group_names": ("all", "others")}
        changes = {"rules": WindowRules(), **sizes}
    node = PushNode(**changes)
    arrive(node, None if why == "no transfer" else decode_part())
    words = [word for word in node.sent if isinstance(word, PushExpect | m.Hint)]
    assert words
    assert all(TAIL not in split(word.keys) for word in words)


def request(**changes: Any) -> Any:
    tokens = changes.pop("tokens", list(range(40)))
    own = {
        "num_prompt_tokens": len(tokens),
        "prompt_token_ids": tokens,
        "mm_features": [],
        "prompt_embeds": None,
        "max_tokens": 1,
    }
    return SimpleNamespace(**own | changes)


def key(part: PrefillPart | DecodePart | None = None, *, keys: int = 2, **changes: Any) -> bytes:
    return tail_key(request(**changes), chain("x", keys), part or decode_part(), 16)


def test_prefill_and_decode_name_a_tail_alike_and_others_otherwise() -> None:
    assert key() == key(prefill_part()) == key(max_tokens=100)
    assert len(key()) == 32
    others = [
        key(tokens=list(range(41))),
        key(tokens=[*range(39), 7]),
        tail_key(request(), chain("another prefix", 2), decode_part(), 16),
    ]
    assert len({key(), *others}) == 4


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        (None, {"tokens": list(range(32))}),
        (None, {"tokens": list(range(15))}),
        (None, {"tokens": list(range(33))}),
        (None, {"keys": 1}),
        (None, {"mm_features": [object()]}),
        (None, {"prompt_embeds": object()}),
        (None, {"prompt_token_ids": None}),
        (prefill_part(), {"max_tokens": 2}),
    ],
)
def test_some_prompts_have_no_tail(part: PrefillPart | None, changes: dict[str, Any]) -> None:
    assert key(part, **changes) == b""


def test_nobody_waits_for_nor_asks_for_a_tail_that_is_not_worth_a_load(node: PushNode) -> None:
    arrive(node, decode_part())
    assert asked(node, local=3) == "cost gate"
    assert not node.of(m.LeaseAsk)


def test_a_shadow_check_leaves_the_tail_out_after_a_preemption() -> None:
    node = PushNode(shadow_every=1, min_load_tokens=16, store="none")
    all_comes(node)
    assert asked(node, local=3) == "shadow check"
    node.admit("r")
    assert step(node, 4 * BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS - 1) is None
    # The token that completes its block is sampled, and the request preempted before it runs.
    whole = chain("x", 4)
    assert isinstance(asked(node, local=3, keys=whole), str)
    node.admit("r")
    assert step(node, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, keys=whole) is None
    assert node.core.lookups.leases_open == 0


def test_two_ranks_of_which_one_cannot_load_the_tail() -> None:
    node = PushNode(rank_count=2)
    all_comes(node)
    assert asked(node) == PROMPT_TOKENS
    job = loaded(node, PROMPT_TOKENS)
    ended(node, job)
    its = {"computed_tokens": PROMPT_TOKENS, "known_tokens": PROMPT_TOKENS}
    assert node.core.settled_tokens("r", **its) == 0
    ended(node, job, rank=1, failed=(103,))
    assert node.core.lookups.leases_open == 0
    assert isinstance(asked(node, local=3), str)
    whole = chain("x", 4)
    answer = stored(node, 4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, keys=whole)
    assert split(answer.keys)[-1] == whole[3]


@pytest.mark.parametrize("rest", [0, 1, 2, BLOCK_TOKENS - 1])
def test_tails_of_all_lengths(rest: int) -> None:
    node = PushNode(min_load_tokens=1)
    prompt = 3 * BLOCK_TOKENS + rest
    tail = tail_key(request(tokens=list(range(prompt))), KEYS, decode_part(), BLOCK_TOKENS)
    assert bool(tail) == (rest > 1)
    node.core.new_request(
        "r", KEYS, prompt_tokens=prompt, now_ns=node.now_ns, transfer=decode_part(), tail=tail
    )
    node.exchange()
    node.keys = {*KEYS, tail}
    node.give(PushEnd("t", blocks=4))
    assert asked(node) == (prompt if tail else 3 * BLOCK_TOKENS)


# ── a node that lost everything ──────────────────────────────────────────────────────────────────


def test_a_node_that_lost_everything_is_given_the_blocks_of_running_requests() -> None:
    node = PushNode()
    node.keys = set(KEYS)
    arrive(node, None)
    node.core.attachment.disconnected(node.now_ns, "crash")
    node.wait(60_000)
    node.keys = set()
    node.attach(credits=8, incarnation=8)
    assert split(stored(node, PROMPT_TOKENS).keys) == KEYS
