"""Requests of an engine with several KV cache groups: full attention, and windows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.client.core.lookups import HINT_NS_MAX, ROUNDS_MAX
from kvstore.client.core.plan import (
    CompareResult,
    HitPlan,
    LoadJob,
    Mask,
    Outcome,
    RankReport,
    StoreJob,
)
from kvstore.client.core.request import Presence, block_keys
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain, named, split

WINDOW_BLOCKS = 2
"""Blocks before its end that a hit needs of the second group."""
NAMES = ("all of it", "the window")
TABLES = (list(range(100, 130)), list(range(200, 230)))


class WindowRules:
    """A window beside full attention, of blocks of one size."""

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        run = int(np.argmin([*present[0], False]))
        bound = end = min(run, tokens_max // BLOCK_TOKENS)
        while not present[1][max(0, end - WINDOW_BLOCKS) : end].all():
            end -= 1
        first = max(0, end - WINDOW_BLOCKS)
        return HitPlan(end * BLOCK_TOKENS, (0, first), int(end < bound))

    def are_needed(self, group: int, first_block: int, end_block: int) -> Any:
        return None


@pytest.fixture
def node() -> AnsweredCore:
    return make()


def make(shard_counts: tuple[int, int] = (1, 1), **changes: Any) -> AnsweredCore:
    changes = {"group_tokens": (BLOCK_TOKENS, BLOCK_TOKENS), "group_names": NAMES} | changes
    node = AnsweredCore(rules=WindowRules(), **changes)
    node.shard_counts = shard_counts
    node.attach(credits=50)
    return node


def begin(node: AnsweredCore, keys: list[bytes]) -> None:
    node.core.new_request("r", keys, prompt_tokens=len(keys) * BLOCK_TOKENS, now_ns=node.now_ns)
    node.exchange()


def begun(node: AnsweredCore, *windows: int) -> list[bytes]:
    """A prompt of six blocks, all of them in the first group and these in the second."""
    keys = chain("a", 6)
    node.keys = held(keys, *windows)
    begin(node, keys)
    return keys


def match(node: AnsweredCore, local: int = 0, most: int = 100) -> Outcome:
    """The answer, after so many exchanges as it takes."""
    for _ in range(2 + ROUNDS_MAX):
        outcome = node.core.match(
            "r",
            local_tokens=local * BLOCK_TOKENS,
            tokens_max=most * BLOCK_TOKENS,
            now_ns=node.now_ns,
        )
        if outcome is not None:
            return outcome
        node.exchange()
    return None


def load(node: AnsweredCore, tokens: int) -> tuple[LoadJob, ...]:
    node.core.allocated("r", tables=TABLES, external_tokens=tokens, now_ns=node.now_ns)
    return node.core.plan((), node.now_ns).loads


def asked(node: AnsweredCore, group: int) -> list[list[bytes]]:
    return [split(a.keys) for a in node.of(m.LeaseAsk) if a.group == group]


def held(keys: list[bytes], *windows: int) -> set[bytes]:
    """All blocks of the first group and these of the second."""
    return {*keys, *(named(keys[at], 1) for at in windows)}


@pytest.mark.parametrize(
    ("windows", "blocks"),
    [
        (tuple(range(6)), 6),
        ((0, 1, 2, 3), 4),
        ((0, 1, 3, 5), 2),
        ((1, 2, 4), 3),
        ((0,), 1),
        ((), 0),
        ((5,), 0),
    ],
)
def test_a_hit_ends_where_every_group_can_serve_it(
    node: AnsweredCore, windows: tuple[int, ...], blocks: int
) -> None:
    begun(node, *windows)
    expected = blocks * BLOCK_TOKENS if blocks else "group not stored"
    assert match(node) == expected
    story = node.core.finished("r")
    assert story is not None
    cut = ("group not stored", "the window") if blocks < 6 else ("", "")
    assert (story.outcome, story.detail) == cut
    node.exchange()
    assert node.core.lookups.leases_open == 0


def test_what_the_engine_has_itself_is_not_asked_for(node: AnsweredCore) -> None:
    keys = begun(node, 4)
    assert match(node, local=4) == BLOCK_TOKENS
    assert asked(node, 0) == [keys[4:]]
    assert asked(node, 1) == [[keys[4]]]
    first, second = load(node, BLOCK_TOKENS)
    assert (first.block_ids, second.block_ids) == ((104,), (204,))


def test_answers_that_promise_too_much_end_after_some_rounds(node: AnsweredCore) -> None:
    keys = chain("a", 20)
    node.keys = {*keys}
    begin(node, keys)
    node.now_ns += HINT_NS_MAX + 1
    node.core.match("r", local_tokens=0, tokens_max=10**6, now_ns=node.now_ns)
    for message in node.core.take_outbox():
        if isinstance(message, m.Hint):
            bits = b"\xff" * 3
            node.give(m.HintReply(message.request, bits, message.group, message.first_block))
        elif isinstance(message, m.LeaseAsk):
            node.give(node.lease_reply(message))
    assert match(node) == "group not stored"
    assert len(asked(node, 1)) == ROUNDS_MAX
    node.exchange()
    assert node.core.lookups.leases_open == 0


def test_an_answer_behind_a_gap_is_none() -> None:
    present = Presence()
    present.update_from_answer(1, 8, b"\xff")
    assert present.get(1) is None, "it has no beginning"
    present.update_from_answer(1, 0, b"\x01")
    present.update_from_answer(1, 8, b"\x02")
    for far in (17, 1 << 40, (1 << 64) - 1):
        present.update_from_answer(1, far, b"\xff")
    assert np.flatnonzero(present.resized(1, 40)).tolist() == [0, 9]
    present.update_from_answer(1, 8, b"\x00")
    assert np.flatnonzero(present.resized(1, 40)).tolist() == [0]


def test_a_window_on_disk_is_waited_for_as_a_whole(node: AnsweredCore) -> None:
    node = make(prefill_ns_per_token=10_000_000)
    begun(node, *range(6))
    node.core.match("r", local_tokens=0, tokens_max=10**6, now_ns=node.now_ns)
    node.exchange()
    node.core.match("r", local_tokens=0, tokens_max=10**6, now_ns=node.now_ns)
    (ask,) = [a for a in node.core.take_outbox() if isinstance(a, m.LeaseAsk)]
    nothing = m.LeaseReply(
        lease=ask.lease, ttl_ms=900, slots=b"", generations=b"", promoting=2, promoting_ms=5
    )
    node.give(nothing)
    assert match(node) is None
    slots = np.arange(0, 32, 16, dtype="<u4").tobytes()
    node.give(
        m.LeaseMore(ask.lease, slots, np.ones(2, "<u8").tobytes(), checksums=b"x" * 32, from_file=2)
    )
    assert match(node) == 6 * BLOCK_TOKENS
    assert [len(job.block_ids) for job in load(node, 6 * BLOCK_TOKENS)] == [6, 2]


def test_a_request_ends_when_all_its_loads_have_and_fails_whole(node: AnsweredCore) -> None:
    begun(node, *range(6))
    match(node)
    first, second = load(node, 6 * BLOCK_TOKENS)
    assert node.core.settled_tokens("r", computed_tokens=10**6, known_tokens=10**6) == 0
    node.ended("r", first.lease, 6)
    assert node.core.settled_tokens("r", computed_tokens=10**6, known_tokens=10**6) == 0
    assert node.core.lookups.leases_open == 2
    node.ended("r", second.lease, 1, failed_block_ids=(205,), reason="damaged")
    assert node.core.lookups.leases_open == 0
    story = node.core.finished("r")
    assert story is not None
    assert (story.loaded_tokens, story.outcome) == (0, "load failed")


def test_each_group_stores_with_credits_of_its_own(node: AnsweredCore) -> None:
    keys = chain("a", 6)
    node.keys = {keys[0], named(keys[1], 1)}
    begin(node, keys)
    match(node)
    node.core.allocated("r", tables=(), external_tokens=0, now_ns=node.now_ns)
    assert node.core.requests["r"].due_tokens == BLOCK_TOKENS
    settled = node.core.settled_tokens("r", computed_tokens=4 * BLOCK_TOKENS, known_tokens=10**6)
    # The engine has let go of the first block of the window.
    tables = (TABLES[0], [0, *TABLES[1][1:]])
    node.core.fill("r", tables=tables, settled_tokens=settled)
    assert node.core.requests["r"].due_tokens == 5 * BLOCK_TOKENS
    first, second = node.core.plan((), node.now_ns).stores
    assert (first.group, first.block_ids) == (0, (101, 102, 103))
    assert (second.group, second.block_ids) == (1, (202, 203))
    assert second.keys == b"".join(keys[2:4])
    assert node.core.plan([202, 101, 7], node.now_ns).fence_blocks == (101, 202)


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (1, 2)])
def test_a_shadow_check_compares_what_a_hit_takes_of_every_group(shards: tuple[int, int]) -> None:
    node = make(shadow_every=1, shard_counts=shards)
    keys = begun(node, *range(6))
    assert match(node) == "shadow check"
    node.core.allocated("r", tables=(), external_tokens=0, now_ns=node.now_ns)
    jobs: list[StoreJob] = []
    for blocks in (4, 6):
        settled = node.core.settled_tokens(
            "r", computed_tokens=blocks * BLOCK_TOKENS, known_tokens=10**6
        )
        # The engine keeps no more of the window than it reaches.
        gone = blocks - WINDOW_BLOCKS + 1
        tables = (TABLES[0], [0] * gone + TABLES[1][gone:])
        node.core.fill("r", tables=tables, settled_tokens=settled)
        jobs += node.core.plan((), node.now_ns).stores
    assert all(job.compare for job in jobs)
    assert [(job.group, job.block_ids) for job in jobs] == [
        (0, (100, 101, 102, 103)),
        (0, (104, 105)),
        (1, (205,)),
    ]
    assert jobs[2].keys == keys[5]
    for job in jobs:
        wanted = len(job.block_ids) * shards[job.group]
        assert len(m.slots_array(job.slots)) == wanted
        assert len(job.checksums) == 16 * wanted
    for job, diverged in zip(jobs, ((), (), (0,)), strict=True):
        assert node.core.lookups.leases_open == 2
        done = CompareResult(job.job, len(job.block_ids), diverged, 1.0)
        report = RankReport(rank=0, store_jobs_done=(job.job,), compared=(done,))
        node.core.reported(report, node.now_ns)
    assert node.core.lookups.leases_open == 0
    told = [each for each in node.exchange() if isinstance(each, m.Compared)]
    leases = [ask.lease for ask in node.of(m.LeaseAsk)]
    assert [each.lease for each in told] == [leases[0], leases[0], leases[1]]
    assert m.slots_array(told[2].diverged).tolist() == [1], "counted from the start of the lease"


def test_long_prompts_are_asked_about_in_pieces() -> None:
    node = make(lookup_deadline_ms=1000)
    count = m.KEYS_PER_DATAGRAM_MAX + 300
    keys = chain("a", count)
    node.keys = {*keys, *(named(key, 1) for key in keys)}
    begin(node, keys)
    assert match(node, most=count) == count * BLOCK_TOKENS
    hints = [h for h in node.of(m.Hint) if h.group == 1]
    assert [h.first_block for h in hints] == [0, 0, m.KEYS_PER_DATAGRAM_MAX]


def test_keys_of_longer_blocks_are_every_nth() -> None:
    keys = chain("a", 7)
    blocks = block_keys(keys, 3)
    assert (len(blocks), list(blocks), blocks[-1]) == (2, [keys[2], keys[5]], keys[5])
    assert blocks[1:] == [keys[5]]
    with pytest.raises(IndexError):
        blocks[2]


@pytest.mark.parametrize("verify_every", [0, 1])
def test_blocks_that_come_between_two_questions_are_not_taken_for_others(verify_every: int) -> None:
    """Two pieces of a lease: the first while the engine plans with what it has, the second while it
    asks for the window of that. The second follows the first, not the blocks of the reply."""
    node, keys = make(verify_every=verify_every), chain("a", 8)
    places = {named(key, group): block for group in (0, 1) for block, key in enumerate(keys)}
    leases: dict[int, int] = {}

    def slots(blocks: Sequence[int]) -> tuple[bytes, bytes]:
        words = np.array([16 * block for block in blocks], "<u4")
        return words.tobytes(), np.full(len(blocks), 5, "<u8").tobytes()

    def answer(held: tuple[set[int], set[int]], *, promoting: int = 0) -> None:
        for word in node.core.take_outbox():
            if isinstance(word, m.Hint):
                known = np.packbits(np.ones(len(word.keys) // 32, bool), bitorder="little")
                node.give(m.HintReply(word.request, known.tobytes(), word.group, word.first_block))
            elif isinstance(word, m.LeaseAsk):
                wanted = [places[named(key, word.group)] for key in split(word.keys)]
                run = int(np.argmin([*(block in held[word.group] for block in wanted), False]))
                leases[word.group] = word.lease
                its, generations = slots(wanted[:run])
                late = 0 if word.group else promoting
                sums = b"x" * 16 * run if word.with_checksums else b""
                node.give(m.LeaseReply(word.lease, 900, its, generations, sums, late, 10**6))

    def more(blocks: Sequence[int], *, left: int) -> None:
        its, generations = slots(blocks)
        sums = b"x" * 16 * len(blocks) if verify_every else b""
        node.give(m.LeaseMore(leases[0], its, generations, sums, promoting=left))

    def ask() -> Outcome:
        tokens = 8 * BLOCK_TOKENS
        return node.core.match("r", local_tokens=0, tokens_max=tokens, now_ns=node.now_ns)

    node.core.new_request("r", keys, prompt_tokens=8 * BLOCK_TOKENS + 3, now_ns=node.now_ns)
    answer((set(), set()))
    assert ask() is None
    answer(({0, 1, 2, 3}, set()), promoting=4)
    more([4, 5], left=2)
    assert ask() is None
    more([6, 7], left=0)
    while (found := ask()) is None:
        answer((set(range(8)), {4, 5}))
    if isinstance(found, int):
        tokens, tables = found, TABLES
        node.core.allocated("r", tables=tables, external_tokens=tokens, now_ns=node.now_ns)
        for job in node.core.plan((), node.now_ns).loads:
            wanted = [keys.index(key) for key in split(job.keys)]
            assert [slot // 16 for slot in np.frombuffer(job.slots, "<u4").tolist()] == wanted
