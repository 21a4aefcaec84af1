"""Transfers of an engine: words to its node, waits of decode requests, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.client.core.plan import HitPlan, Mask, RankReport
from kvstore.client.core.stores import WORK_NS_MAX
from kvstore.units import NS_PER_MS
from kvstore.wire import messages as m
from kvstore.wire.messages import PushCancel, PushClose, PushEnd, PushExpect, PushOpen
from kvstore.wire.requests import DecodePart, PrefillPart
from tests.unit.client.conftest import BLOCK_TOKENS, AnsweredCore, chain, split
from tests.unit.client.test_windows import WindowRules

DEADLINE_MS = 5000
WORDS = (PushOpen, PushClose, PushExpect, PushCancel)


class PushNode(AnsweredCore):
    """A node that serves pushes."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"push_deadline_ms": DEADLINE_MS, **changes})
        self.name = "n1"
        self.attach(credits=64)
        self.core.take_outbox()

    def request(self, name: str, keys: list[bytes], part: PrefillPart | DecodePart | None) -> None:
        self.core.new_request(
            name,
            keys,
            prompt_tokens=len(keys) * BLOCK_TOKENS + 1,
            now_ns=self.now_ns,
            transfer=part,
        )

    def prefill(
        self, name: str = "p", transfer: str = "t", keys: list[bytes] | None = None
    ) -> None:
        self.request(name, keys or chain("x", 4), PrefillPart(transfer, transfer))

    def decode(
        self,
        name: str = "d",
        transfer: str = "t",
        keys: list[bytes] | None = None,
        node: str = "n2",
    ) -> None:
        self.request(name, keys or chain("x", 4), DecodePart(transfer, node))

    def ask(self, name: str = "d", local: int = 0) -> object:
        outcome = self.core.match(name, local_tokens=local, now_ns=self.now_ns)
        self.exchange()
        if outcome is None:
            outcome = self.core.match(name, local_tokens=local, now_ns=self.now_ns)
            self.exchange()
        return outcome

    def admit(self, name: str = "d") -> None:
        """It is computed."""
        self.core.allocated(name, tables=((),), external_tokens=0, now_ns=self.now_ns)

    def words(self) -> list[m.Message]:
        """About pushes, since the last call."""
        self.exchange()
        found: list[m.Message] = [message for message in self.sent if isinstance(message, WORDS)]
        self.sent.clear()
        return found

    def store(self, name: str, keys: list[bytes]) -> int:
        """Fill all blocks of a request; the number of the job."""
        table = (list(range(1, len(keys) + 1)),)
        self.core.fill(name, tables=table, settled_tokens=len(keys) * BLOCK_TOKENS)
        (job,) = self.core.plan((), self.now_ns).stores
        return job.job

    def stored(self, job: int) -> None:
        """The only rank has reported it."""
        self.core.reported(RankReport(0, store_jobs_done=(job,)), self.now_ns)


@pytest.fixture
def node() -> PushNode:
    return PushNode()


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


def test_a_transfer_is_open_until_the_stores_of_its_request_have_ended(node: PushNode) -> None:
    node.prefill()
    assert node.words() == [PushOpen("t")]
    job = node.store("p", chain("x", 4))
    answer = node.core.pushes.answer("p", 513)
    assert answer is not None
    assert answer["kvstore"] == {"transfer": "t", "node": "n1"}
    node.core.finished("p")
    assert node.words() == []
    node.stored(job)
    assert node.words() == [PushClose("t")]


def test_stores_of_later_requests_do_not_keep_it_open(node: PushNode) -> None:
    node.prefill()
    node.core.finished("p")
    assert node.words() == [PushOpen("t"), PushClose("t")]
    node.prefill("p1", "t1")
    job = node.store("p1", chain("x", 4))
    node.core.finished("p1")
    node.prefill("p2", "t2", chain("y", 4))
    node.store("p2", chain("y", 4))
    node.stored(job)
    assert node.words() == [PushOpen("t1"), PushOpen("t2"), PushClose("t1")]


def test_a_rank_that_reports_no_more_does_not_keep_a_transfer_open(node: PushNode) -> None:
    node.prefill()
    node.store("p", chain("x", 4))
    node.core.finished("p")
    node.wait(WORK_NS_MAX // NS_PER_MS + 1)
    node.core.plan((), node.now_ns)
    assert node.words()[-1] == PushClose("t")


def test_a_preemption_is_said_and_that_it_goes_on(node: PushNode) -> None:
    node.prefill()
    node.core.pushes.preempted("p")
    node.core.pushes.preempted("p")
    assert node.words() == [PushOpen("t"), PushClose("t", "preempted")]
    assert isinstance(node.ask("p"), str)
    assert node.words() == [PushOpen("t")]
    node.core.pushes.preempted("p")
    node.core.finished("p", "aborted")  # it was closed already
    assert node.words() == [PushClose("t", "preempted")]


def test_transfers_are_opened_again_in_another_session(node: PushNode) -> None:
    node.prefill("p1", "t1")
    node.prefill("p2", "t2")
    node.core.pushes.preempted("p2")
    node.words()
    node.core.attachment.disconnected(node.now_ns, "gone")
    assert node.core.pushes.answer("p1", 1) is None
    node.wait(60_000)
    node.attach()
    assert node.words() == [PushOpen("t1")]


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


def test_what_has_come_is_loaded_and_the_reason_for_the_rest_is_in_its_story(
    node: PushNode,
) -> None:
    node.decode()
    node.exchange()
    node.keys = set(chain("x", 2))
    node.give(PushEnd("t", blocks=2, reason="aborted"))
    assert node.ask() == 2 * BLOCK_TOKENS
    story = node.core.finished("d")
    assert story is not None
    assert story.detail == "push: aborted"
    assert node.core.stats.take()["pushes_short"] == 1


def test_a_story_names_the_transfer_and_the_time_of_the_first_token(node: PushNode) -> None:
    node.decode()
    node.wait(3)
    node.ask()
    prompt_tokens = 4 * BLOCK_TOKENS + 1
    for ms, known in ((4, prompt_tokens), (5, prompt_tokens + 1), (6, prompt_tokens + 2)):
        node.wait(ms)
        node.core.begin_step(node.now_ns)  # in vLLM's order: what is known, then the plan
        node.core.settled_tokens("d", computed_tokens=known, known_tokens=known)
        node.core.plan((), node.now_ns)
    story = node.core.finished("d")
    assert story is not None
    assert (story.transfer, story.first_token_ns) == ("t", 12 * NS_PER_MS)


def test_after_its_deadline_it_takes_what_is_there_and_cancels_the_rest(node: PushNode) -> None:
    node.decode()
    node.words()
    node.wait(DEADLINE_MS)
    assert isinstance(node.ask(), str)
    node.admit()
    assert node.words() == [PushCancel("t")]
    assert node.core.stats.take()["pushes_given_up"] == 1


def test_an_idle_engine_looks_for_the_end_of_a_long_wait_less_and_less_often(
    node: PushNode,
) -> None:
    """Each look is a step; one that takes too long makes requests late that arrive meanwhile."""
    node.decode()

    def watch_ms() -> float:
        return node.core.pushes.watch_ns("d", node.now_ns) / NS_PER_MS

    looks = [watch_ms()]
    for _ in range(5):
        node.wait(80)
        looks.append(watch_ms())
    assert looks == [0, 5, 10, 15, 16, 16]
    node.give(PushEnd("t", blocks=4))
    assert watch_ms() == 0
    assert node.core.pushes.watch_ns("unknown", node.now_ns) == 0


@pytest.mark.parametrize("end", ["silence", "gone", "another session"])
def test_a_node_that_is_gone_ends_the_wait_at_once(node: PushNode, end: str) -> None:
    node.decode()
    node.words()
    assert node.ask() is None
    if end == "silence":
        node.core.attachment.check_heartbeat(node.now_ns, node.now_ns - 300_000_000)
    else:
        node.core.attachment.disconnected(node.now_ns, "gone")
    if end == "another session":
        node.wait(60_000)
        node.attach()
    node.wait(300)
    assert isinstance(node.ask(), str)
    node.admit()
    assert node.words() == []  # another session's node expects nothing


def test_a_request_of_another_session_does_not_prolong_a_wait_of_the_last(node: PushNode) -> None:
    node.decode("d1")
    node.core.attachment.disconnected(node.now_ns, "gone")
    node.wait(60_000)
    node.attach()
    node.now_ns -= 60_000 * NS_PER_MS - 1  # as if at once
    node.decode("d2", "t2", chain("y", 4))
    assert isinstance(node.ask("d1"), str)
    assert node.ask("d2") is None


def test_answers_to_one_prompt_expect_it_once_and_the_last_cancels(node: PushNode) -> None:
    node.decode("d1")
    node.decode("d2")
    node.decode("d3", keys=chain("y", 2))
    assert [type(word) for word in node.words()] == [PushExpect, PushExpect]
    node.core.finished("d1", "aborted")
    node.core.finished("d3", "aborted")
    assert node.words() == []
    assert node.ask("d2") is None
    node.keys = set(chain("x", 4))
    node.give(PushEnd("t", blocks=4))
    assert node.ask("d2") == 4 * BLOCK_TOKENS
    assert node.words() == []


def test_long_prompts_and_groups_are_expected_in_several_words() -> None:
    node = PushNode(push_deadline_ms=100)
    keys = chain("long", 3000)
    node.decode(keys=keys)
    first, second = node.words()
    assert isinstance(first, PushExpect)
    assert isinstance(second, PushExpect)
    assert (second.first_block, len(split(first.keys) + split(second.keys))) == (2048, 3000)
    node.give(PushEnd("t", first_block=0))
    assert node.ask() is None
    assert node.of(m.LeaseAsk) == []


class StateRules(WindowRules):
    """Recurrent layers in place of the window: a hit needs the state at its end. Prefill engines
    may store that one only, whatever `are_needed` says."""

    def longest(self, present: Sequence[Mask], *, tokens_max: int) -> HitPlan:
        end = min(len(present[0]), tokens_max // BLOCK_TOKENS)
        assert all(mask.all() for mask in present)
        return HitPlan(end * BLOCK_TOKENS, (0, max(0, end - 1)))


@pytest.mark.parametrize(("rules", "second"), [(StateRules(), [6]), (WindowRules(), [5, 6])])
def test_the_blocks_that_the_longest_hit_needs_are_expected(
    rules: WindowRules, second: list[int]
) -> None:
    sizes = {"group_tokens": (BLOCK_TOKENS, BLOCK_TOKENS), "group_names": ("all", "others")}
    node = PushNode(rules=rules, **sizes)
    keys = chain("x", 7)
    node.decode(keys=keys)
    whole, others = (word for word in node.words() if isinstance(word, PushExpect))
    assert (whole.group, whole.first_block, split(whole.keys)) == (0, 0, keys)
    assert (others.group, others.first_block) == (1, second[0])
    assert split(others.keys) == [keys[at] for at in second]


def test_a_request_that_names_no_node_is_left_to_the_index(node: PushNode) -> None:
    node.decode(node="")
    assert node.words() == []
    assert isinstance(node.ask(), str)


# ── all together ─────────────────────────────────────────────────────────────────────────────────


class TransfersMachine(RuleBasedStateMachine):
    """Requests of both kinds share three transfers; the node hears each word once, and no request
    waits for ever."""

    @initialize()
    def begin(self) -> None:
        self.node = PushNode()
        self.open: set[str] = set()
        """As the node has heard it."""
        self.expected: dict[str, int] = {}
        self.prefilling: dict[str, str] = {}
        self.paused: set[str] = set()
        self.decoding: dict[str, str] = {}
        self.count = 0

    transfers = st.sampled_from(["t1", "t2", "t3"])

    @rule(transfer=transfers)
    def prefill(self, transfer: str) -> None:
        self.count += 1
        self.prefilling[f"p{self.count}"] = transfer
        self.node.prefill(f"p{self.count}", transfer)

    @rule(transfer=transfers, prompt=st.integers(0, 1))
    def decode(self, transfer: str, prompt: int) -> None:
        self.count += 1
        self.decoding[f"d{self.count}"] = transfer
        self.node.decode(f"d{self.count}", transfer, chain(f"prompt {prompt}", 4))

    @rule(data=st.data(), reason=st.sampled_from(["", "aborted"]))
    def finish(self, data: st.DataObject, reason: str) -> None:
        if requests := sorted(self.prefilling.keys() | self.decoding.keys()):
            name = data.draw(st.sampled_from(requests))
            self.prefilling.pop(name, None)
            self.decoding.pop(name, None)
            self.paused.discard(name)
            self.node.core.finished(name, reason)

    @rule(data=st.data())
    def preempt_or_resume(self, data: st.DataObject) -> None:
        if requests := sorted(self.prefilling):
            name = data.draw(st.sampled_from(requests))
            if name in self.paused:
                self.paused.discard(name)
                self.node.core.pushes.resumed(self.node.core.requests[name])
            else:
                self.paused.add(name)
                self.node.core.pushes.preempted(name)

    @rule(transfer=transfers)
    def end(self, transfer: str) -> None:
        if self.expected.get(transfer):
            self.expected[transfer] -= 1
            self.node.give(PushEnd(transfer))

    @rule()
    def restart(self) -> None:
        self.node.core.attachment.disconnected(self.node.now_ns, "gone")
        self.node.core.pushes.look()
        self.open, self.expected = set(), {}
        self.node.wait(60_000)
        self.node.attach()

    @invariant()
    def node_knows_what_goes_on(self) -> None:
        for word in self.node.words():
            match word:
                case PushOpen(transfer=name):
                    assert name not in self.open, "opened twice"
                    self.open.add(name)
                case PushClose(transfer=name):
                    assert name in self.open, "closed, but not open"
                    self.open.discard(name)
                case PushExpect(transfer=name):
                    self.expected[name] = self.expected.get(name, 0) + 1
                case PushCancel(transfer=name):
                    self.expected[name] = 0
                case _:
                    raise AssertionError(word)
        active = {own for name, own in self.prefilling.items() if name not in self.paused}
        assert self.open == active
        # Nobody waits without an expectation.
        waiting = {w.transfer_id for w in self.node.core.pushes._waiting.values()}
        assert waiting <= {name for name, count in self.expected.items() if count}
        assert all(w.expected for w in self.node.core.pushes._waiting.values())


TestTransfersMachine = TransfersMachine.TestCase
TestTransfersMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
