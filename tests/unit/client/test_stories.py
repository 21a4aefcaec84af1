"""What the scheduler's core tells of a request at its end, and of those the node did not see."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.core.scheduler import STORIES_KEPT_MAX
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as m
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain


class Disk(AnsweredCore):
    """Says that the first `from_file` of what it leases came from disk, and `coming` will."""

    from_file = 0
    from_peer = 0
    coming = 0

    def lease_reply(self, ask: m.LeaseAsk) -> m.LeaseReply:
        return msgspec.structs.replace(
            super().lease_reply(ask),
            from_file=self.from_file,
            from_peer=self.from_peer,
            promoting=self.coming,
            promoting_ms=1,
        )


def loaded(node: AnsweredCore, request: str, blocks: int, local: int = 0) -> int:
    """A load of so many blocks that took 5 ms; its lease."""
    lease = node.load(request, list(range(local + blocks)), blocks).lease
    node.ended(request, lease, blocks, duration_ns=5 * NS_PER_MS)
    return lease


def finish(node: AnsweredCore, request: str) -> m.Story:
    """Its story, which is also on its way to the node."""
    node.sent.clear()
    story = node.core.finished(request)
    node.exchange()
    assert story is not None
    assert node.of(m.Story) == [story]
    return story


@pytest.mark.parametrize("pace_ns", [0, 300_000])
def test_a_hit_with_the_time_of_every_step(pace_ns: int) -> None:
    node, keys = Disk(), chain("a", 5)
    node.keys = set(keys[:4])
    node.from_file = 2
    node.attach()
    if pace_ns:
        node.core.costs.compute.told(pace_ns)
    node.arrive("r", keys)
    node.wait(7)
    node.match("r", local=1)
    node.wait(2)
    node.exchange()
    node.wait(1)
    assert node.match("r", local=1) == 3 * BLOCK_TOKENS
    node.wait(50)
    assert node.match("r", local=1) == 3 * BLOCK_TOKENS, "no room for it until now"
    lease = loaded(node, "r", 3, local=1)
    story = finish(node, "r")
    assert (story.request, story.prompt_tokens) == ("r", 5 * BLOCK_TOKENS + 3)
    assert (story.local_tokens, story.loaded_tokens) == (BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    assert (story.file_tokens, story.outcome) == (2 * BLOCK_TOKENS, "")
    assert (story.session, story.leases, story.first_block) == (1, [lease], 1)
    assert story.queued_ns == 7 * NS_PER_MS
    assert story.lookup_ns == 2 * NS_PER_MS
    assert (story.promotion_ns, story.load_ns) == (0, 5 * NS_PER_MS)
    assert (story.admitted_ns, story.total_ns) == (60 * NS_PER_MS, 60 * NS_PER_MS)
    assert story.queued_ns + story.lookup_ns + story.load_ns <= story.total_ns
    counts = node.core.stats.take()
    assert story.saved_ns == counts["saved_prefill_ns"] == 3 * BLOCK_TOKENS * pace_ns, "no guess"
    assert counts["waited_ns"] == 7 * NS_PER_MS


def test_what_comes_while_it_waits_is_from_disk_too() -> None:
    node, keys = Disk(prefill_ns_per_token=1_000_000), chain("a", 3)
    node.keys = set(keys[:1])
    node.coming = 2
    node.attach()
    node.look_up("r", keys)
    node.wait(4)
    slots, generations = bytes(2 * 4), bytes(2 * 8)
    (asked,) = node.of(m.LeaseAsk)
    more = m.LeaseMore(asked.lease, slots, generations, checksums=b"x" * 32, from_file=2)
    node.give(more)
    assert node.match("r") == 3 * BLOCK_TOKENS
    node.wait(50)
    assert node.match("r") == 3 * BLOCK_TOKENS, "the engine had no room until now"
    loaded(node, "r", 3)
    story = finish(node, "r")
    assert (story.file_tokens, story.promotion_ns) == (2 * BLOCK_TOKENS, 4 * NS_PER_MS)


def test_reasons_of_misses(node: AnsweredCore) -> None:
    node.attach()
    keys = chain("a", 3)
    node.arrive("never asked", keys)
    assert finish(node, "never asked") == m.Story(
        request="never asked", prompt_tokens=3 * BLOCK_TOKENS + 3, outcome="not asked"
    )
    node.arrive("late", keys)
    node.match("late")
    node.core.take_outbox()
    node.wait(21)
    assert node.match("late") == "deadline"
    story = finish(node, "late")
    assert (story.outcome, story.lookup_ns) == ("deadline", 21 * NS_PER_MS)
    node.arrive("short", keys[:1])
    node.match("short", local=1)
    assert finish(node, "short").outcome == "no full block"
    bypassed = m.Story(request="lora", prompt_tokens=9, outcome="adapter")
    node.core.tell(bypassed, node.now_ns)
    assert node.core.take_outbox() == [bypassed]


def test_stories_of_the_time_without_a_node_are_told_when_it_is_back(
    node: AnsweredCore,
) -> None:
    keys = chain("a", 3)
    for i in range(STORIES_KEPT_MAX + 6):
        node.arrive(f"r{i}", keys)
        assert node.match(f"r{i}") == "node unreachable"
        node.core.finished(f"r{i}")
    assert node.core.take_outbox() == []
    node.wait(500)
    node.attach()
    node.exchange()
    told = node.of(m.Story)
    assert [story.request for story in told] == [f"r{i + 6}" for i in range(STORIES_KEPT_MAX)]
    assert {(story.outcome, story.age_ns) for story in told} == {
        ("node unreachable", 500 * NS_PER_MS)
    }
    node.sent.clear()
    node.exchange()
    assert node.of(m.Story) == [], "once"


def test_any_id_of_a_request_can_travel(node: AnsweredCore) -> None:
    node.attach()
    for name in ("x" * 1000, "ß" * 200, "bad \udc80 id", ""):
        node.arrive(name, chain("a", 1))
        story = finish(node, name)
        assert m.decode_from_engine(m.encode(story)) == story
        assert len(story.request.encode()) <= m.REQUEST_BYTES_MAX
