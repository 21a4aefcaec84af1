"""What a request is answered, what is leased, and that every lease is given back once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.client.core.request import LookupPart
from kvstore.wire import messages as m
from tests.kit.cores import is_serving
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain


def ended(node: AnsweredCore, request: str, lease: int, *, failed: tuple[int, ...] = ()) -> None:
    node.ended(request, lease, 0 if failed else 3, failed_block_ids=failed)


def test_a_held_prefix_is_a_hit_and_the_answer_repeats(node: AnsweredCore) -> None:
    keys = node.holding(5, 3)
    node.arrive("r", keys)
    assert node.match("r") is None
    assert node.core.requests["r"].awaits_answer
    node.exchange()
    assert not node.core.requests["r"].awaits_answer
    for _ in range(3):
        assert node.match("r") == 3 * BLOCK_TOKENS
    assert len(node.of(m.LeaseAsk)) == 1
    assert node.core.lookups.leases_open == 1


def test_with_drafts_a_hit_leaves_its_last_block_out() -> None:
    node = AnsweredCore(lookahead_tokens=1)
    keys = node.holding(5, 4)
    node.look_up("r", keys)
    assert node.match("r") == 3 * BLOCK_TOKENS
    job = node.load("r", [10, 11, 12, 13, 14], 3)
    assert (job.block_ids, job.keys) == ((10, 11, 12), b"".join(keys[:3]))
    # The engine's own hit left the block before out; this one has nothing more.
    node.look_up("s", keys, local=3)
    assert node.match("s", local=3) == "not stored"


def test_the_engines_own_hit_may_grow_between_two_questions(node: AnsweredCore) -> None:
    keys = node.holding(6)
    node.look_up("r", keys)
    assert node.match("r", local=2) == 4 * BLOCK_TOKENS
    job = node.load("r", list(range(6)), 4)
    # The lease began at block 0: the job must skip the two slots the engine needs no more.
    assert m.slots_array(job.slots).tolist() == [32, 48, 64, 80]
    assert job.keys == b"".join(keys[2:])


def test_after_the_deadline_the_answer_is_zero_for_good_and_the_late_lease_goes_back(
    node: AnsweredCore,
) -> None:
    keys = node.holding(4)
    node.arrive("r", keys)
    node.match("r")
    sent = node.core.take_outbox()
    node.wait(20 - 1e-6)
    assert node.match("r") is None
    node.wait(1e-6)
    assert node.match("r") == "deadline"
    (late,) = [s for s in sent if isinstance(s, m.LeaseAsk)]
    released = node.core.take_outbox()
    assert released == [m.LeaseRelease(leases=[late.lease])]
    node.give(node.lease_reply(late))
    assert node.core.take_outbox() == [m.LeaseRelease(leases=[late.lease])]
    assert node.core.lookups.leases_open == 0
    assert node.match("r") == "deadline"


def test_three_deadlines_open_the_breaker_and_a_probe_closes_it(node: AnsweredCore) -> None:
    node.attach()
    for i in range(3):
        node.arrive(f"r{i}", chain(f"late{i}", 3))
        node.match(f"r{i}")
        node.wait(25)
        assert node.match(f"r{i}") == "deadline"
    node.core.take_outbox()
    node.arrive("x", node.hold(chain("b", 3)))
    assert node.match("x") == "breaker open"
    node.wait(1100)
    assert node.match("x") is None
    node.exchange()
    assert node.match("x") == 3 * BLOCK_TOKENS
    assert is_serving(node.core)


def test_lookups_that_end_without_a_load_give_the_lease_back(node: AnsweredCore) -> None:
    keys = node.holding(4)
    for i, way in enumerate(("computed", "aborted")):
        node.look_up(f"r{i}", keys)
        if way == "computed":
            node.allocate(f"r{i}", [], 0)
        else:
            node.core.finished(f"r{i}")
        assert node.core.lookups.leases_open == 0
        assert sum(isinstance(s, m.LeaseRelease) for s in node.exchange()) == 1


def test_an_aborted_load_keeps_its_lease_until_the_rank_reports(node: AnsweredCore) -> None:
    keys = node.holding(3)
    node.look_up("r", keys)
    job = node.load("r", [1, 2, 3], 3)
    node.core.finished("r")
    assert node.core.lookups.leases_open == 1
    ended(node, "r", job.lease)
    assert node.core.lookups.leases_open == 0


def test_three_failed_loads_open_the_breaker_and_questions_in_vain_use_up_no_trial(
    node: AnsweredCore,
) -> None:
    """A node that answers well but serves what cannot be had is left alone."""
    node.attach()
    for number in range(3):
        assert is_serving(node.core)
        node.look_up(f"r{number}", node.hold(chain(f"bad{number}", 3)))
        assert node.match(f"r{number}") == 3 * BLOCK_TOKENS
        job = node.load(f"r{number}", [1, 2, 3], 3)
        ended(node, f"r{number}", job.lease, failed=(1, 2, 3))
        node.look_up(f"s{number}", node.hold(chain(f"answered{number}", 3)))
        assert node.match(f"s{number}") == (3 * BLOCK_TOKENS if number < 2 else "breaker open")
        node.core.finished(f"s{number}")
    assert not is_serving(node.core)
    assert node.core.stats.take()["breaker_openings"] == 1
    node.wait(1100)
    for number in range(3):
        node.arrive(f"n{number}", chain(f"nothing{number}", 3))
        assert node.match(f"n{number}") is None
        node.arrive(f"m{number}", chain(f"meanwhile{number}", 3))
        assert node.match(f"m{number}") == "breaker open", "one at a time"
        node.exchange()
        assert node.match(f"n{number}") == "not stored"
    node.look_up("g", node.hold(chain("good", 3)))
    job = node.load("g", [1, 2, 3], 3)
    ended(node, "g", job.lease)
    assert is_serving(node.core)


@pytest.mark.parametrize("sent", [b"", bytes(48), bytes(32) + b"x" * 16])
def test_what_should_be_verified_and_cannot_be_is_computed(sent: bytes) -> None:
    node = AnsweredCore(verify_every=1)
    node.arrive("r", node.holding(3))
    node.match("r")
    (question,) = (s for s in node.core.take_outbox() if isinstance(s, m.LeaseAsk))
    assert question.with_checksums
    node.give(msgspec.structs.replace(node.lease_reply(question), checksums=sent))
    assert node.match("r") == "load failed"
    assert node.core.take_outbox() == [m.LeaseRelease(leases=[question.lease])]
    assert node.core.lookups.leases_open == 0


def test_a_request_that_waits_for_longer_than_leases_are_renewed_asks_again(
    node: AnsweredCore,
) -> None:
    keys = node.holding(5, 3)
    node.look_up("r", keys)
    hit = node.match("r")
    assert isinstance(hit, int)
    node.core.take_outbox()
    node.wait((m.LEASE_LIVES_MAX - 1) * 900)
    assert node.match("r") == hit
    node.wait(1)
    assert node.match("r") is None
    asked = [type(message) for message in node.core.take_outbox()]
    assert asked == [m.LeaseRelease, m.LeaseAsk]


def test_leases_are_renewed_while_the_request_waits(node: AnsweredCore) -> None:
    keys = node.holding(3)
    node.look_up("r", keys)
    for _ in range(5):
        node.wait(299)
        node.core.plan((), node.now_ns)
        assert node.core.take_outbox() == []
        node.wait(1)
        node.core.plan((), node.now_ns)
        (renewal,) = node.core.take_outbox()
        assert isinstance(renewal, m.LeaseRenew)
        assert len(renewal.leases) == 1
        node.core.plan((), node.now_ns)
        assert node.core.take_outbox() == []


def test_many_leases_are_renewed_in_as_many_datagrams_as_it_takes(node: AnsweredCore) -> None:
    (key,) = node.keys = chain("a", 1)  # type: ignore[assignment]
    node.attach()
    for i in range(m.LEASES_PER_DATAGRAM_MAX + 1):
        node.look_up(f"r{i}", [key])
    node.wait(301)
    node.core.plan((), node.now_ns)
    renewals = [s for s in node.core.take_outbox() if isinstance(s, m.LeaseRenew)]
    assert [len(renewal.leases) for renewal in renewals] == [m.LEASES_PER_DATAGRAM_MAX, 1]
    assert (
        len({lease for renewal in renewals for lease in renewal.leases})
        == node.core.lookups.leases_open
    )


def test_long_prompts_take_several_leases_that_act_as_one(node: AnsweredCore) -> None:
    keys = node.holding(5000, 0)
    for held, expected in ((5000, 5000), (3000, 3000), (2048, 2048), (100, 100)):
        node.keys = set(keys[:held])
        name = f"r{held}"
        node.look_up(name, keys)
        assert node.match(name) == expected * BLOCK_TOKENS
        job = node.load(name, list(range(5000)), expected)
        assert len(m.slots_array(job.slots)) == expected
        ended(node, name, job.lease)
        node.core.finished(name)
        assert node.core.lookups.leases_open == 0


def test_a_new_session_voids_what_was_leased(node: AnsweredCore) -> None:
    keys = node.holding(3, credits=2)
    node.look_up("r", keys)
    node.give(m.SessionClosed(session=1, reason="a rank left"))
    assert not node.core.attachment.credits[0]
    node.wait(100)
    assert node.match("r") == "node unreachable"
    node.open_session()
    assert node.match("r") is None
    node.exchange()
    assert node.match("r") == 3 * BLOCK_TOKENS


def test_every_nth_load_is_verified() -> None:
    node = AnsweredCore(verify_every=3)
    node.attach()
    for i in range(6):
        node.look_up(f"r{i}", node.hold(chain(f"k{i}", 3)))
        node.match(f"r{i}")
        job = node.load(f"r{i}", [1, 2, 3], 3)
        assert len(job.checksums) == (48 if i % 3 == 2 else 0)


def test_what_the_node_wants_verified_is_whatever_came_with_it() -> None:
    """Checksums that nobody asked for, with some of several answers only."""

    def reply(count: int, checksums: bytes) -> m.LeaseMore:
        return m.LeaseMore(lease=1, slots=bytes(4 * count), generations=b"", checksums=checksums)

    none, some = reply(2, b""), reply(1, b"x" * 16)
    nobody: Any = None
    part = LookupPart(nobody, lease=1, group=0, first=0, count=5, shards=1)
    for message in (none, some, none):
        part.take(message)
    assert part.checksums == bytes(32) + b"x" * 16 + bytes(32)
    assert not part.is_verifiable


@pytest.mark.parametrize("lie", [b"", b"\0" * 400])
def test_a_node_that_leases_nothing_or_too_much_harms_nobody(
    node: AnsweredCore, lie: bytes
) -> None:
    keys = node.holding(3, 0)
    node.arrive("r", keys)
    node.match("r")
    (asked,) = [s for s in node.core.take_outbox() if isinstance(s, m.LeaseAsk)]
    sums = b"x" * 4 * len(lie)
    node.give(m.LeaseReply(asked.lease, 1000, slots=lie, generations=lie + lie, checksums=sums))
    outcome = node.match("r")
    assert outcome in ("not stored", 3 * BLOCK_TOKENS)


def test_every_start_of_a_request_is_counted_once_however_often_it_is_asked() -> None:
    node = AnsweredCore()
    keys = node.holding(3)
    node.arrive("r", keys)
    for _ in range(2):  # admitted, preempted, admitted again
        node.match("r")
        node.exchange()
        for _ in range(4):
            node.match("r")
        job = node.load("r", [1, 2, 3], 3)
        ended(node, "r", job.lease)
        node.allocate("r", [1, 2, 3], 0)
    counts = node.core.stats.take()
    assert counts["hits"] == 2
    assert counts["hit_tokens:dram"] == 2 * 3 * BLOCK_TOKENS
    assert (counts["load_blocks"], counts["load_bytes"], counts["load_ns"]) == (6, 2, 2)
    assert not any(name.startswith("misses") for name in counts)
    node.look_up("s", chain("b", 3))
    for _ in range(3):
        assert node.match("s") == "not stored"
        node.exchange()
        node.match("s")
        node.exchange()
    node.match("s")
    node.allocate("s", [], 0)
    assert node.core.stats.take()["misses:not stored"] == 1
    assert node.core.stats.take() == {}, "what was taken is not counted again"


@pytest.mark.parametrize(
    ("local_blocks", "is_away", "outcome"),
    [(8, False, "not stored"), (0, True, "node unreachable")],
)
def test_after_a_preemption_the_story_is_that_of_the_last_admission(
    local_blocks: int, outcome: str, *, is_away: bool
) -> None:
    node, keys = AnsweredCore(), chain("a", 16)
    node.keys = set(keys[:8])
    node.attach()
    node.arrive("r", keys)
    assert node.match("r", 4) is None
    node.exchange()
    assert node.match("r", 4) == 4 * BLOCK_TOKENS
    node.allocate("r", list(range(1, 17)), 4)
    node.ended("r", node.of(m.LeaseAsk)[-1].lease, 4)
    if is_away:
        node.core.attachment.disconnected(node.now_ns, "gone")
    while (found := node.match("r", local_blocks)) is None:
        node.exchange()
    assert found == outcome
    node.core.allocated("r", tables=(range(1, 17),), external_tokens=0, now_ns=node.now_ns)
    story = node.core.finished("r", now_ns=node.now_ns)
    assert story is not None
    assert (story.loaded_tokens, story.file_tokens, story.outcome) == (0, 0, outcome)
    assert (story.first_block, bool(story.leases)) == (local_blocks, not is_away)
