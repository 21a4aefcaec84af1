"""What a request is answered, what is leased, and that every lease is given back once."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.client.core.loads import joined_checksums
from kvstore.client.core.plan import LoadResult, RankReport
from kvstore.client.core.scheduler import PENDING, Hit, Miss
from kvstore.wire import messages as m
from tests.kit.cores import is_serving
from tests.unit.client.conftest import BLOCK_TOKENS, ScriptedNode, chain


def ask(node: ScriptedNode, request: str, local: int = 0) -> object:
    return node.core.match(request, local_tokens=local * BLOCK_TOKENS, now_ns=node.now_ns)


def arrive(node: ScriptedNode, request: str, keys: list[bytes]) -> None:
    node.core.new_request(
        request, keys, prompt_tokens=len(keys) * BLOCK_TOKENS + 3, now_ns=node.now_ns
    )


def load(node: ScriptedNode, request: str, blocks: list[int], n: int) -> None:
    node.core.allocated(
        request,
        tables=(blocks,),
        external_tokens=n * BLOCK_TOKENS,
        now_ns=node.now_ns,
    )


def ended(node: ScriptedNode, request: str, lease: int, *, failed: tuple[int, ...] = ()) -> None:
    result = LoadResult(
        request=request,
        lease=lease,
        loaded_blocks=0 if failed else 3,
        failed_block_ids=failed,
        bytes_moved=1,
        duration_ns=1,
    )
    node.core.reported(RankReport(rank=0, session=1, loads=(result,)), node.now_ns)


def test_without_a_node_every_answer_is_zero_and_nothing_waits(node: ScriptedNode) -> None:
    keys = chain("a", 4)
    arrive(node, "r", keys)
    assert ask(node, "r") == Miss("node unreachable")
    assert node.core.take_outbox() == []


def test_a_held_prefix_is_a_hit_and_the_answer_repeats(node: ScriptedNode) -> None:
    keys = chain("a", 5)
    node.keys = set(keys[:3])
    node.attach()
    arrive(node, "r", keys)
    assert ask(node, "r") is PENDING
    assert node.core.requests["r"].awaits_answer
    node.exchange()
    assert not node.core.requests["r"].awaits_answer
    for _ in range(3):
        assert ask(node, "r") == Hit(3 * BLOCK_TOKENS)
    assert len(node.of(m.LeaseAsk)) == 1
    assert node.core.lookups.leases_open == 1


def test_a_second_answer_to_one_question_changes_nothing(node: ScriptedNode) -> None:
    keys = chain("a", 5)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    (question,) = (each for each in node.exchange() if isinstance(each, m.LeaseAsk))
    node.keys = set(keys[:1])
    node.give(node.lease_reply(question))
    assert ask(node, "r") == Hit(5 * BLOCK_TOKENS)
    load(node, "r", [1, 2, 3, 4, 5], 5)
    (job,) = node.core.plan((), node.now_ns).loads
    assert len(job.block_ids) == 5


def test_only_blocks_beyond_the_engines_own_hit_are_asked_for_and_loaded(
    node: ScriptedNode,
) -> None:
    keys = chain("a", 5)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r", local=2)
    node.exchange()
    assert ask(node, "r", local=2) == Hit(3 * BLOCK_TOKENS)
    (lease,) = node.of(m.LeaseAsk)
    assert isinstance(lease, m.LeaseAsk)
    assert lease.keys == b"".join(keys[2:])
    load(node, "r", [10, 11, 12, 13, 14, 15], 3)
    (job,) = node.core.plan((), node.now_ns).loads
    assert job.block_ids == (12, 13, 14)
    assert job.keys == b"".join(keys[2:])


def test_with_drafts_a_hit_leaves_its_last_block_out() -> None:
    node = ScriptedNode(lookahead_tokens=1)
    keys = chain("a", 5)
    node.keys = set(keys[:4])
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    assert ask(node, "r") == Hit(3 * BLOCK_TOKENS)
    load(node, "r", [10, 11, 12, 13, 14], 3)
    (job,) = node.core.plan((), node.now_ns).loads
    assert (job.block_ids, job.keys) == ((10, 11, 12), b"".join(keys[:3]))
    # The engine's own hit left the block before out; this one has nothing more.
    arrive(node, "s", keys)
    ask(node, "s", local=3)
    node.exchange()
    assert ask(node, "s", local=3) == Miss("not stored")


def test_the_engines_own_hit_may_grow_between_two_questions(node: ScriptedNode) -> None:
    keys = chain("a", 6)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    assert ask(node, "r", local=2) == Hit(4 * BLOCK_TOKENS)
    load(node, "r", list(range(6)), 4)
    (job,) = node.core.plan((), node.now_ns).loads
    # The lease began at block 0: the job must skip the two slots the engine needs no more.
    assert m.slots_array(job.slots).tolist() == [32, 48, 64, 80]
    assert job.keys == b"".join(keys[2:])


def test_a_shrunken_own_hit_asks_again(node: ScriptedNode) -> None:
    keys = chain("a", 6)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r", local=3)
    node.exchange()
    assert ask(node, "r", local=1) is PENDING
    node.exchange()
    assert ask(node, "r", local=1) == Hit(5 * BLOCK_TOKENS)
    assert node.core.lookups.leases_open == 1


def test_after_the_deadline_the_answer_is_zero_for_good_and_the_late_lease_goes_back(
    node: ScriptedNode,
) -> None:
    keys = chain("a", 4)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    sent = node.core.take_outbox()
    node.wait(20 - 1e-6)
    assert ask(node, "r") is PENDING
    node.wait(1e-6)
    assert ask(node, "r") == Miss("deadline")
    (late,) = [s for s in sent if isinstance(s, m.LeaseAsk)]
    released = node.core.take_outbox()
    assert released == [m.LeaseRelease(leases=[late.lease])]
    node.give(node.lease_reply(late))
    assert node.core.take_outbox() == [m.LeaseRelease(leases=[late.lease])]
    assert node.core.lookups.leases_open == 0
    assert ask(node, "r") == Miss("deadline")


def test_three_deadlines_open_the_breaker_and_a_probe_closes_it(node: ScriptedNode) -> None:
    node.attach()
    for i in range(3):
        keys = chain(f"late{i}", 3)
        arrive(node, f"r{i}", keys)
        ask(node, f"r{i}")
        node.wait(25)
        assert ask(node, f"r{i}") == Miss("deadline")
    node.core.take_outbox()
    keys = chain("b", 3)
    node.keys = set(keys)
    arrive(node, "x", keys)
    assert ask(node, "x") == Miss("breaker open")
    node.wait(1100)
    assert ask(node, "x") is PENDING
    node.exchange()
    assert ask(node, "x") == Hit(3 * BLOCK_TOKENS)
    assert is_serving(node.core)


def test_tiny_hits_are_computed_and_their_lease_goes_back() -> None:
    node = ScriptedNode(min_load_tokens=2 * BLOCK_TOKENS)
    keys = chain("a", 4)
    node.keys = set(keys[:1])
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    assert ask(node, "r") == Miss("cost gate")
    assert node.core.lookups.leases_open == 0
    assert any(isinstance(s, m.LeaseRelease) for s in node.exchange())
    node.keys = set(keys[:2])
    arrive(node, "s", keys)
    ask(node, "s")
    node.exchange()
    assert ask(node, "s") == Hit(2 * BLOCK_TOKENS), "just long enough"


def test_a_prompt_shorter_than_a_block_asks_nothing(node: ScriptedNode) -> None:
    node.attach()
    arrive(node, "r", [])
    assert ask(node, "r") == Miss("no full block")
    assert node.core.take_outbox() == []


def test_lookups_that_end_without_a_load_give_the_lease_back(node: ScriptedNode) -> None:
    keys = chain("a", 4)
    node.keys = set(keys)
    node.attach()
    for i, way in enumerate(("computed", "aborted")):
        arrive(node, f"r{i}", keys)
        ask(node, f"r{i}")
        node.exchange()
        if way == "computed":
            load(node, f"r{i}", [], 0)
        else:
            node.core.finished(f"r{i}")
        assert node.core.lookups.leases_open == 0
        assert sum(isinstance(s, m.LeaseRelease) for s in node.exchange()) == 1


def test_an_aborted_load_keeps_its_lease_until_the_rank_reports(node: ScriptedNode) -> None:
    keys = chain("a", 3)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    load(node, "r", [1, 2, 3], 3)
    (job,) = node.core.plan((), node.now_ns).loads
    node.core.finished("r")
    assert node.core.lookups.leases_open == 1
    ended(node, "r", job.lease)
    assert node.core.lookups.leases_open == 0


def test_a_failed_load_answers_zero_for_ever(node: ScriptedNode) -> None:
    keys = chain("a", 3)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    load(node, "r", [1, 2, 3], 3)
    (job,) = node.core.plan((), node.now_ns).loads
    ended(node, "r", job.lease, failed=(1, 2, 3))
    for _ in range(2):
        assert ask(node, "r") == Miss("load failed")
    assert node.core.lookups.leases_open == 0


def test_after_failed_loads_questions_that_find_nothing_do_not_use_up_the_trial(
    node: ScriptedNode,
) -> None:
    node.attach()
    for number in range(3):
        keys = chain(f"bad{number}", 3)
        node.keys = set(keys)
        arrive(node, f"r{number}", keys)
        ask(node, f"r{number}")
        node.exchange()
        load(node, f"r{number}", [1, 2, 3], 3)
        (job,) = node.core.plan((), node.now_ns).loads
        ended(node, f"r{number}", job.lease, failed=(1, 2, 3))
    node.wait(1100)
    for number in range(3):
        keys = chain(f"nothing{number}", 3)
        arrive(node, f"n{number}", keys)
        assert ask(node, f"n{number}") is PENDING
        keys = chain(f"meanwhile{number}", 3)
        arrive(node, f"m{number}", keys)
        assert ask(node, f"m{number}") == Miss("breaker open"), "one at a time"
        node.exchange()
        assert ask(node, f"n{number}") == Miss("not stored")
    keys = chain("good", 3)
    node.keys = set(keys)
    arrive(node, "g", keys)
    ask(node, "g")
    node.exchange()
    load(node, "g", [1, 2, 3], 3)
    (job,) = node.core.plan((), node.now_ns).loads
    ended(node, "g", job.lease)
    assert is_serving(node.core)


@pytest.mark.parametrize("sent", [b"", bytes(48), bytes(32) + b"x" * 16])
def test_what_should_be_verified_and_cannot_be_is_computed(sent: bytes) -> None:
    node = ScriptedNode(verify_every=1)
    node.attach()
    keys = chain("a", 3)
    node.keys = set(keys)
    arrive(node, "r", keys)
    ask(node, "r")
    (question,) = (s for s in node.core.take_outbox() if isinstance(s, m.LeaseAsk))
    assert question.with_checksums
    node.give(msgspec.structs.replace(node.lease_reply(question), checksums=sent))
    assert ask(node, "r") == Miss("load failed")
    assert node.core.take_outbox() == [m.LeaseRelease(leases=[question.lease])]
    assert node.core.lookups.leases_open == 0


def test_the_node_is_told_at_once_what_will_be_asked_for(node: ScriptedNode) -> None:
    keys = chain("a", 3)
    node.attach()
    node.core.take_outbox()
    arrive(node, "r", keys)
    (hint,) = node.core.take_outbox()
    assert isinstance(hint, m.Hint)
    assert hint.keys == b"".join(keys)


def test_a_request_that_waits_for_longer_than_leases_are_renewed_asks_again(
    node: ScriptedNode,
) -> None:
    keys = chain("a", 5)
    node.keys = set(keys[:3])
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    hit = ask(node, "r")
    assert isinstance(hit, Hit)
    node.core.take_outbox()
    node.wait((m.LEASE_LIVES_MAX - 1) * 900)
    assert ask(node, "r") == hit
    node.wait(1)
    assert ask(node, "r") is PENDING
    asked = [type(message) for message in node.core.take_outbox()]
    assert asked == [m.LeaseRelease, m.LeaseAsk]


def test_leases_are_renewed_while_the_request_waits(node: ScriptedNode) -> None:
    keys = chain("a", 3)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
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


def test_many_leases_are_renewed_in_as_many_datagrams_as_it_takes(node: ScriptedNode) -> None:
    (key,) = node.keys = chain("a", 1)  # type: ignore[assignment]
    node.attach()
    for i in range(m.LEASES_PER_DATAGRAM_MAX + 1):
        arrive(node, f"r{i}", [key])
        ask(node, f"r{i}")
    node.exchange()
    node.wait(301)
    node.core.plan((), node.now_ns)
    renewals = [s for s in node.core.take_outbox() if isinstance(s, m.LeaseRenew)]
    assert [len(renewal.leases) for renewal in renewals] == [m.LEASES_PER_DATAGRAM_MAX, 1]
    assert (
        len({lease for renewal in renewals for lease in renewal.leases})
        == node.core.lookups.leases_open
    )


def test_long_prompts_take_several_leases_that_act_as_one(node: ScriptedNode) -> None:
    keys = chain("a", 5000)
    node.attach()
    for held, expected in ((5000, 5000), (3000, 3000), (2048, 2048), (100, 100)):
        node.keys = set(keys[:held])
        name = f"r{held}"
        arrive(node, name, keys)
        ask(node, name)
        node.exchange()
        assert ask(node, name) == Hit(expected * BLOCK_TOKENS)
        load(node, name, list(range(5000)), expected)
        (job,) = node.core.plan((), node.now_ns).loads
        assert len(m.slots_array(job.slots)) == expected
        ended(node, name, job.lease)
        node.core.finished(name)
        assert node.core.lookups.leases_open == 0


def test_a_new_session_voids_what_was_leased(node: ScriptedNode) -> None:
    keys = chain("a", 3)
    node.keys = set(keys)
    node.attach(credits=2)
    arrive(node, "r", keys)
    ask(node, "r")
    node.exchange()
    node.give(m.SessionClosed(session=1, reason="a rank left"))
    assert not node.core.attachment.credits[0]
    node.wait(100)
    assert ask(node, "r") == Miss("node unreachable")
    node.session = 2
    node.give(m.SessionOpen(session=2, shard_counts=(1,)))
    assert ask(node, "r") is PENDING
    node.exchange()
    assert ask(node, "r") == Hit(3 * BLOCK_TOKENS)


def test_every_nth_load_is_verified() -> None:
    node = ScriptedNode(verify_every=3)
    node.attach()
    for i in range(6):
        keys = chain(f"k{i}", 3)
        node.keys = set(keys)
        arrive(node, f"r{i}", keys)
        ask(node, f"r{i}")
        node.exchange()
        ask(node, f"r{i}")
        load(node, f"r{i}", [1, 2, 3], 3)
        (job,) = node.core.plan((), node.now_ns).loads
        assert len(job.checksums) == (48 if i % 3 == 2 else 0)


def test_what_the_node_wants_verified_is_whatever_came_with_it() -> None:
    """Checksums that nobody asked for, with some of several answers only."""

    def reply(count: int, checksums: bytes) -> m.LeaseMore:
        return m.LeaseMore(lease=1, slots=bytes(4 * count), generations=b"", checksums=checksums)

    none, some = reply(2, b""), reply(1, b"x" * 16)
    assert joined_checksums([none, none]) == b""
    assert joined_checksums([none, some, none]) == bytes(32) + b"x" * 16 + bytes(32)


@pytest.mark.parametrize("lie", [b"", b"\0" * 400])
def test_a_node_that_leases_nothing_or_too_much_harms_nobody(
    node: ScriptedNode, lie: bytes
) -> None:
    keys = chain("a", 3)
    node.attach()
    arrive(node, "r", keys)
    ask(node, "r")
    (asked,) = [s for s in node.core.take_outbox() if isinstance(s, m.LeaseAsk)]
    sums = b"x" * 4 * len(lie)
    node.give(m.LeaseReply(asked.lease, 1000, slots=lie, generations=lie + lie, checksums=sums))
    outcome = ask(node, "r")
    assert outcome in (Miss("not stored"), Hit(3 * BLOCK_TOKENS))


def test_every_start_of_a_request_is_counted_once_however_often_it_is_asked() -> None:
    node = ScriptedNode()
    keys = chain("a", 3)
    node.keys = set(keys)
    node.attach()
    arrive(node, "r", keys)
    for _ in range(2):  # admitted, preempted, admitted again
        ask(node, "r")
        node.exchange()
        for _ in range(4):
            ask(node, "r")
        load(node, "r", [1, 2, 3], 3)
        (job,) = node.core.plan((), node.now_ns).loads
        ended(node, "r", job.lease)
        load(node, "r", [1, 2, 3], 0)
    counts = node.core.stats.take()
    assert counts["hits"] == 2
    assert counts["hit_tokens:dram"] == 2 * 3 * BLOCK_TOKENS
    assert (counts["load_blocks"], counts["load_bytes"], counts["load_ns"]) == (6, 2, 2)
    assert not any(name.startswith("misses") for name in counts)
    arrive(node, "s", chain("b", 3))
    ask(node, "s")
    node.exchange()
    for _ in range(3):
        assert ask(node, "s") == Miss("not stored")
        node.exchange()
        ask(node, "s")
        node.exchange()
    ask(node, "s")
    load(node, "s", [], 0)
    assert node.core.stats.take()["misses:not stored"] == 1
    assert node.core.stats.take() == {}, "what was taken is not counted again"


@pytest.mark.parametrize(
    ("local_blocks", "is_away", "outcome"),
    [(8, False, "not stored"), (0, True, "node unreachable")],
)
def test_after_a_preemption_the_story_is_that_of_the_last_admission(
    local_blocks: int, outcome: str, *, is_away: bool
) -> None:
    node, keys = ScriptedNode(), chain("a", 16)
    node.keys = set(keys[:8])
    node.attach()
    arrive(node, "r", keys)
    assert ask(node, "r", 4) is PENDING
    node.exchange()
    assert ask(node, "r", 4) == Hit(4 * BLOCK_TOKENS)
    load(node, "r", list(range(1, 17)), 4)
    asked = node.of(m.LeaseAsk)[-1]
    assert isinstance(asked, m.LeaseAsk)
    lease = asked.lease
    done = LoadResult(
        "r", lease, loaded_blocks=4, failed_block_ids=(), bytes_moved=1, duration_ns=1
    )
    node.core.reported(RankReport(rank=0, session=1, loads=(done,)), node.now_ns)
    if is_away:
        node.core.attachment.disconnected(node.now_ns, "gone")
    while (found := ask(node, "r", local_blocks)) is PENDING:
        node.exchange()
    assert found == Miss(outcome)
    node.core.allocated("r", tables=(range(1, 17),), external_tokens=0, now_ns=node.now_ns)
    story = node.core.finished("r", now_ns=node.now_ns)
    assert story is not None
    assert (story.loaded_tokens, story.file_tokens, story.outcome) == (0, 0, outcome)
    assert (story.first_block, bool(story.leases)) == (local_blocks, not is_away)
