"""The scheduler's thread: a backlog is spread over steps, a full socket costs nobody the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvstore.client.core.costs import Costs
from kvstore.client.core.request import LookupStage
from kvstore.connector import scheduler_side
from kvstore.connector.config import ConnectorConfig
from kvstore.connector.groups import EngineGroups
from kvstore.connector.prompts import adapter_keys
from kvstore.connector.scheduler_side import SchedulerSide
from kvstore.wire import messages as m
from kvstore.wire.requests import ADAPTER_QUESTION, adapter_digest
from tests.kit.cores import core_config
from tests.kit.one_group import OneGroup

BLOCK_TOKENS = 16


MakeSide = Callable[..., SchedulerSide]


class FullSocket:
    """A link whose socket takes `room` datagrams, then none until told."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[m.Message] = []
        self.inbox: list[m.Message] = [
            m.Welcome(
                protocol=1, incarnation=1, now_ns=1, arena_bytes=1 << 20, generation_bytes=8192
            ),
            m.SessionOpen(session=1, shard_counts=(1,)),
        ]
        self.generations = None
        self.closed = False

    def send(self, message: m.Message) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent.append(message)
        return True

    def receive(self) -> list[m.Message]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def fileno(self) -> int:
        return 5000  # more than select can take

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_ns=10**9)
    monkeypatch.setattr(scheduler_side, "time", SimpleNamespace(monotonic_ns=lambda: clock.now_ns))
    return clock


@pytest.fixture
def make_side(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> MakeSide:
    def make(link: FullSocket, groups: EngineGroups | None = None, **changes: Any) -> SchedulerSide:
        monkeypatch.setattr(
            "kvstore.connector.scheduler_side.Link.connect", lambda path, hello: link
        )
        its: dict[str, Any] = {"engine_id": "e", "nonce": "n", "process": "p", "tenant": "t"}
        its |= {"rank_count": 1, "block_tokens": BLOCK_TOKENS, **changes}
        config = ConnectorConfig(socket="/nowhere")
        return SchedulerSide(config, core_config(**its), groups or OneGroup(BLOCK_TOKENS))

    return make


def request(number: int, blocks: int) -> Any:
    keys = [hashlib.sha256(f"{number}/{i}".encode()).digest() for i in range(blocks)]
    return SimpleNamespace(
        request_id=f"r{number}",
        block_hashes=keys,
        num_prompt_tokens=blocks * BLOCK_TOKENS,
        num_tokens=blocks * BLOCK_TOKENS,
        num_computed_tokens=0,
        lora_request=None,
        mm_features=[],
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        trace_headers=None,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )


def output(
    *new: Any, cached: Any = None, scheduled: dict[str, int] | None = None, state: Any = None
) -> Any:
    nothing = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        num_scheduled_tokens=scheduled or {},
        kv_connector_block_state=state,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or nothing,
        kv_cache_block_copies=None,
        preempted_req_ids=None,
    )


def step(side: SchedulerSide) -> None:
    side.build_plan(output())


def test_a_backlog_is_asked_about_over_several_steps(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=10**6)
    side = make_side(link)
    backlog = [request(number, 256) for number in range(200)]
    for one in backlog:
        side.on_new_request(one)
    asked = []
    for _ in range(20):
        before = sum(isinstance(s, m.LeaseAsk) for s in link.sent)
        for one in backlog:
            side.get_num_new_matched_tokens(one, 0)
        asked.append(sum(isinstance(s, m.LeaseAsk) for s in link.sent) - before)
        step(side)
    assert max(asked) == 16  # 4,096 keys
    assert sum(asked) == 200


def test_a_full_socket_is_waited_for_and_only_then_given_up(
    make_side: MakeSide, clock: SimpleNamespace
) -> None:
    link = FullSocket(room=1)
    side = make_side(link)
    long = request(1, 5000)  # a hint and three questions
    side.on_new_request(long)
    assert side.get_num_new_matched_tokens(long, 0) == (None, False)
    late = request(2, 64)
    side.on_new_request(late)
    assert side._core.requests["r2"].hinted_session == 0, "a hint would wait in the backlog"
    assert side.get_num_new_matched_tokens(late, 0) == (None, False)
    assert len(link.sent) == 1
    clock.now_ns += 200_000_000
    step(side)
    assert not link.closed
    link.room = 1
    step(side)  # it moves: the wait begins anew
    clock.now_ns += 200_000_000
    step(side)
    assert not link.closed
    clock.now_ns += 100_000_000
    step(side)
    assert link.closed


@pytest.mark.parametrize(
    "other", ["none", "computes", "is in flight", "has ended", "self", "lockstep"]
)
def test_steps_of_others_do_not_wait_for_blocks_from_disk(
    make_side: MakeSide,
    monkeypatch: pytest.MonkeyPatch,
    other: str,
) -> None:
    link = FullSocket(room=100)
    side, one, another = make_side(link), request(1, 8), request(2, 1)
    side._in_lockstep = other == "lockstep"  # engines that step together wait for one another
    watched: list[LookupStage] = []
    left_ns: list[int] = []

    def watch(watch_ns: int) -> None:
        watched.append(side._core.requests["r1"].stage)
        left_ns.append(watch_ns)
        side._watched_ns += watch_ns

    monkeypatch.setattr(side, "_watch", watch)
    monkeypatch.setattr(Costs, "saving_ns", lambda *_: 1e12)

    def step_of_another() -> None:
        name = one.request_id if other == "self" else another.request_id  # it was preempted
        side.build_plan(output(scheduled={} if other in ("none", "lockstep") else {name: 1}))
        if other == "is in flight":  # the engine schedules while a step runs
            side.build_plan(output())
        if other == "has ended":  # the engine is idle since
            side.request_finished(another)

    step_of_another()
    side.on_new_request(one)
    assert side.get_num_new_matched_tokens(one, 0) == (None, False)
    assert watched == [LookupStage.ASKED], "an answer that is due at once is watched for"
    (ask,) = (message for message in link.sent if isinstance(message, m.LeaseAsk))
    link.inbox.append(m.LeaseReply(ask.lease, 10_000, b"", b"", promoting=8, promoting_ms=1))
    step_of_another()
    assert side.get_num_new_matched_tokens(one, 0) == (None, False)
    if other in ("computes", "is in flight", "lockstep"):
        assert watched == [LookupStage.ASKED]
        assert left_ns == [scheduler_side._SPIN_NS_PER_STEP]
    else:
        assert watched == [LookupStage.ASKED, LookupStage.PROMOTING]
        assert left_ns == [scheduler_side._SPIN_NS_IDLE] * 2


def grant(credits: int) -> m.Grant:
    return m.Grant(session=1, slots=bytes(4 * credits), generations=bytes(8 * credits))


def store(side: SchedulerSide, one: Any, blocks: list[int]) -> None:
    """A step in which the forward completes all blocks of the request; their copy then runs."""
    plan = side.build_plan(
        output(
            scheduled={one.request_id: len(blocks) * BLOCK_TOKENS},
            state=SimpleNamespace(get_block_ids=lambda _: (blocks,), boundary_state_offloads={}),
        )
    )
    assert [job.block_ids for job in plan.stores] == [tuple(blocks)]


def test_blocks_that_a_step_only_reads_are_not_fenced(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=100)
    link.inbox.append(grant(4))
    side, one = make_side(link), request(1, 4)
    side.on_new_request(one)
    store(side, one, [4, 5, 6, 7])
    computed = 3 * BLOCK_TOKENS
    new = SimpleNamespace(block_ids=([4, 5, 6, 7],), num_computed_tokens=computed)
    assert side.build_plan(output(new)).fence_blocks == (7,)
    cached = SimpleNamespace(
        req_ids=["resumed", "running", "idle"],
        new_block_ids=[([4, 5, 6, 9],), ([7],), None],
        num_computed_tokens=[computed] * 3,
        resumed_req_ids={"resumed"},
    )
    assert side.build_plan(output(cached=cached)).fence_blocks == (7,)
    cached.num_computed_tokens[0] = computed - 1  # the engine computes its last token again
    assert side.build_plan(output(cached=cached)).fence_blocks == (6, 7)


def test_a_promise_that_cannot_be_planned_becomes_a_load_that_fails(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FullSocket(room=100)
    link.inbox.append(grant(2))
    side = make_side(link)
    one, stored = request(1, 8), request(2, 2)
    side.on_new_request(one)
    side.on_new_request(stored)
    store(side, stored, [7, 8])
    monkeypatch.setattr(side._core, "allocated", mock.Mock(side_effect=KeyError("bug")))
    side.get_num_new_matched_tokens(one, BLOCK_TOKENS)  # the first block is its own, and valid
    blocks: Any = SimpleNamespace(get_block_ids=lambda: ([4, 5, 6],))
    with pytest.raises(KeyError):
        side.update_state_after_alloc(one, blocks, 2 * BLOCK_TOKENS)
    plan = side.rescue_plan()
    assert plan.fence_blocks == (7, 8), "no later step will fence them"
    (load,) = plan.loads
    assert (load.request, load.block_ids) == ("r1", (5, 6))
    assert side.rescue_plan().loads == ()


def test_a_plan_that_cannot_be_told_of_is_not_lost(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FullSocket(room=100)
    side, one = make_side(link), request(1, 2)
    link.inbox.append(grant(2))
    side.on_new_request(one)
    flush = side._flush

    def fail_after_planning(now_ns: int) -> None:
        flush(now_ns)
        if side._unreturned is not None:
            raise KeyError("bug")

    monkeypatch.setattr(side, "_flush", fail_after_planning)
    with pytest.raises(KeyError):
        store(side, one, [4, 5])
    (job,) = side.rescue_plan().stores
    assert job.block_ids == (4, 5)
    assert side.rescue_plan().stores == ()


@pytest.mark.parametrize(("free", "emptied"), [(99, True), (98, False), (None, False)])
def test_a_reset_tells_whether_the_engine_still_holds_blocks(
    make_side: MakeSide,
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    emptied: bool,
) -> None:
    side = make_side(FullSocket(room=100))
    if free is not None:
        pool: Any = SimpleNamespace(num_gpu_blocks=100, get_num_free_blocks=lambda: free)
        side.bind_block_pool(pool)
    told = []
    monkeypatch.setattr(
        side._core, "new_weights", lambda epoch, now_ns, *, emptied: told.append(emptied)
    )
    assert side.reset("w1") is emptied
    assert told == [emptied]


def test_what_was_not_sent_before_a_reset_is_not_sent_after_it(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=1)
    side = make_side(link)
    long = request(1, 5000)  # a hint and three questions
    side.on_new_request(long)
    side.get_num_new_matched_tokens(long, 0)
    link.room = 100
    side.reset("w1")
    assert not any(isinstance(s, m.LeaseAsk) for s in link.sent)


def stories(link: FullSocket) -> list[tuple[str, str]]:
    return [(s.request, s.outcome) for s in link.sent if isinstance(s, m.Story)]


class Looks:
    """What a look at a request's adapter finds, in place of its files."""

    def __init__(self, side: SchedulerSide, found: bytes | str | None) -> None:
        self.found = found
        side._adapters.look = lambda adapter, now_ns: self.found  # type: ignore[method-assign]


def adapted(number: int) -> Any:
    """A request with an adapter."""
    one = request(number, 8)
    one.lora_request = object()
    return one


def hinted(link: FullSocket) -> list[bytes]:
    return [s.keys for s in link.sent if isinstance(s, m.Hint)]


def test_a_request_waits_for_the_digest_of_its_adapter(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=100)
    side, one = make_side(link), adapted(1)
    looks = Looks(side, None)
    side.on_new_request(one)
    assert side.get_num_new_matched_tokens(one, 0) == (None, False)
    assert link.sent == []
    looks.found = b"d" * 32
    assert side.get_num_new_matched_tokens(one, 0) == (None, False)
    keys = b"".join(adapter_keys(one, b"d" * 32))
    assert hinted(link) == [keys]
    assert [s.keys for s in link.sent if isinstance(s, m.LeaseAsk)] == [keys]
    side.request_finished(one)
    assert not side._core.requests
    assert not side._requests
    assert not side._unread


@pytest.mark.parametrize("found", [b"d" * 32, "its files changed", None])
def test_a_router_is_told_the_digest_of_an_adapter_or_why_not(
    make_side: MakeSide, found: bytes | str | None
) -> None:
    side, one, plain = make_side(FullSocket(room=100)), adapted(1), request(2, 8)
    Looks(side, found)
    for each in (one, plain):
        each.kv_transfer_params = ADAPTER_QUESTION
        side.on_new_request(each)
    assert side.request_finished(plain) is None, "it has no adapter"
    answer = adapter_digest(side.request_finished(one))
    reason = "its files changed" if found else "its files are being read"
    assert answer == (found if isinstance(found, bytes) else reason)
    again = adapted(3)
    again.kv_transfer_params = {"kvstore": {"adapter": "yes"}}
    side.on_new_request(again)
    assert side.request_finished(again) is None, "parameters come from anybody"


def test_a_request_whose_adapter_takes_too_long_is_computed(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=100)
    side = make_side(link)
    looks = Looks(side, None)
    late, gone = adapted(1), adapted(2)
    for one in (late, gone):
        side.on_new_request(one)
    side.request_finished(gone)
    assert stories(link) == [("r2", "adapter")]
    assert side.get_num_new_matched_tokens(late, 0) == (None, False)
    looks.found = "slow"
    assert side.get_num_new_matched_tokens(late, 0) == (0, False)
    side.request_finished(late)
    assert stories(link) == [("r2", "adapter"), ("r1", "adapter")]
    assert not side._unread


def test_nothing_is_stored_or_loaded_once_an_adapters_files_changed(
    make_side: MakeSide,
) -> None:
    side, one = make_side(FullSocket(room=100)), adapted(1)
    looks = Looks(side, b"d" * 32)
    side.on_new_request(one)
    assert not isinstance(side._keys(one), str)
    looks.found = "changed"
    assert side.get_num_new_matched_tokens(one, 0) == (0, False)
    one.num_computed_tokens = 0
    state = SimpleNamespace(get_block_ids=lambda name: pytest.fail("its blocks are looked at"))
    side.build_plan(output(scheduled={"r1": 8 * BLOCK_TOKENS}, state=state))


def test_the_first_token_is_there_once_the_step_that_computed_it_is_over(
    make_side: MakeSide, clock: SimpleNamespace
) -> None:
    link = FullSocket(room=100)
    side, one = make_side(link), request(1, 1)
    side.on_new_request(one)
    state = SimpleNamespace(get_block_ids=lambda name: None, boundary_state_offloads={})
    side.build_plan(output(scheduled={"r1": BLOCK_TOKENS}, state=state))
    clock.now_ns += 70 * 10**6
    one.num_computed_tokens, one.num_tokens = BLOCK_TOKENS, BLOCK_TOKENS + 1
    side.build_plan(output(scheduled={"r1": 1}, state=state))
    clock.now_ns += 10**9
    side.request_finished(one)
    (story,) = (each for each in link.sent if isinstance(each, m.Story))
    assert story.first_token_ns == 70 * 10**6


def test_a_story_is_not_added_to_a_backlog(
    make_side: MakeSide,
) -> None:
    link = FullSocket(room=2)  # their hints
    side = make_side(link)
    long, short = request(1, 5000), request(2, 8)
    side.on_new_request(short)
    side.on_new_request(long)
    side.get_num_new_matched_tokens(long, 0)
    side.request_finished(short)
    link.room = 100
    step(side)
    assert stories(link) == []
    assert any(isinstance(s, m.LeaseAsk) for s in link.sent), "questions are not lost"


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_story_names_the_trace_of_its_request(make_side: MakeSide, is_left_out: bool) -> None:
    link = FullSocket(room=100)
    side, one, other = make_side(link), request(1, 8), request(2, 8)
    header = f"00-{'a' * 32}-{'b' * 16}-01"
    one.trace_headers = {"traceparent": header, "tracestate": "v=1"}
    other.trace_headers = {"traceparent": header + "?" * 9999}
    for each in (one, other):
        if is_left_out:
            each.mm_features = [SimpleNamespace(identifier="named by its client")]
        side.on_new_request(each)
        side.request_finished(each)
    told = [message for message in link.sent if isinstance(message, m.Story)]
    assert [story.traceparent for story in told] == [header, ""]
    assert {story.outcome for story in told} == {"image uuid" if is_left_out else "not asked"}
