"""What is told of a lookup against what was seen at that moment, under any order of events.

Always true:
1. bounds hold (`kit.engine_check`), and ranges cover the prompt, each block once;
2. a block is told as held exactly when `inspect` showed it held at the question;
3. a block that was never stored is not told to have left, and one that left is not told as never
   stored while no tombstone was overwritten.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvstore.engine.events import Clear, StoryTold
from kvstore.engine.why import explain, findings
from kvstore.engine.why.reasons import Reason
from kvstore.wire.messages import LeaseRelease, Story
from tests.kit.parts_check import check_trail
from tests.steps import CountedMachine, verify_machine
from tests.unit.engine.disk import SPACE, DiskNode, known
from tests.unit.engine.harness import TOKENS, Peer, key, short

numbers = st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True)
LEFT = {reason for reason in Reason if Reason.NONE < reason <= Reason.DIVERGED}
ABSENT = LEFT | {Reason.NEVER_STORED, Reason.FORGOTTEN, Reason.OTHER_SPACE}
NOT_KNOWN = {Reason.UNEXAMINED, Reason.TOO_MIXED, Reason.NOT_REMEMBERED}
STORIES, FINDINGS, PENDING = 5, 4, 20


class Machine(CountedMachine):
    """See the module."""

    @initialize(slots=st.sampled_from([8, 16]))
    def start(self, slots: int) -> None:
        self.node = DiskNode(slots=slots, block_count_max=24, tell_stories=True)
        self.peer = Peer(self.node)
        self.asked: dict[int, tuple[list[int], dict[int, str], set[int]]] = {}
        self.ever: set[int] = set()
        self.next_lease = 1
        self.next_place = 1
        self.missed = 0

    @rule(some=numbers)
    def store(self, some: list[int]) -> None:
        for number in some[: len(self.peer.unused())]:
            self.peer.seal(number)
            self.ever.add(number)

    @rule(some=numbers)
    def disk_knows(self, some: list[int]) -> None:
        self.node.step(known(*some, at=self.next_place))
        self.next_place += len(some)
        self.ever.update(some)

    @rule(some=numbers, released=st.booleans())
    def ask(self, some: list[int], released: bool) -> None:
        tiers = {n: self.node.blocks().get(short(n), "") for n in some}
        lease = self.next_lease
        self.next_lease += 1
        self.asked[lease] = (some, tiers, set(self.ever))
        self.peer.lease(lease, *some)
        if released:
            self.node.hear(self.peer.scheduler, LeaseRelease(leases=[lease]))

    @rule(good=st.booleans())
    def disk_answers(self, good: bool) -> None:
        if self.node.reads:
            read = self.node.reads[0]
            self.node.answer(read, [good] * (len(read.keys) // 32))
        if good:
            self.node.write_all()
        else:
            self.node.write_nothing()

    @rule(ms=st.integers(1, 200))
    def time_passes(self, ms: int) -> None:
        self.node.tick(ms=ms)

    @rule()
    def clear(self) -> None:
        self.node.tick(ms=1)
        self.node.step(Clear(None, None))
        self.node.tick(ms=1)

    @rule(pick=st.integers(0, 30))
    def tell(self, pick: int) -> None:
        if not self.asked:
            return
        lease = list(self.asked)[pick % len(self.asked)]
        some, tiers, ever = self.asked.pop(lease)
        story = Story(
            request=f"r{lease}",
            prompt_tokens=len(some) * TOKENS,
            outcome="not stored",
            session=self.peer.session,
            leases=[lease],
        )
        commands = self.node.hear(self.peer.scheduler, story)
        self.missed += len(some)
        ledger = self.node.engine.ledger
        assert (sum(ledger.misses.values()), sum(ledger.hits.values())) == (self.missed, 0)
        (row,) = self.node.engine.explain.requests(f"r{lease}", limit=1)
        ranges = self.node.engine.explain.request(row.number)[1]
        (for_traces,) = (command for command in commands if isinstance(command, StoryTold))
        assert (for_traces.row, [*for_traces.ranges], for_traces.story) == (row, ranges, story)
        assert sum(r.blocks for r in ranges) == len(some)
        assert [r.first_block for r in ranges] == [
            sum(r.blocks for r in ranges[:i]) for i in range(len(ranges))
        ]
        overwritten = self.node.state.trail.tombstones.has_overwritten
        for told in ranges:
            for number in some[told.first_block : told.first_block + told.blocks]:
                if told.reason in NOT_KNOWN:
                    continue
                assert bool(tiers[number]) == (told.reason not in ABSENT), (number, told, tiers)
                if told.tier == "file" and told.reason:
                    assert tiers[number] == "file"
                if told.reason in LEFT:
                    assert number in ever
                if told.reason is Reason.NEVER_STORED:
                    assert overwritten or number not in ever

    def teardown(self) -> None:
        if hasattr(self, "node"):
            check_trail(self.node.state.trail)
            assert len(self.node.engine.explain.requests("", limit=100)) <= STORIES
            assert self.node.engine.explain.prefix("t", SPACE, key(1))


def test_what_is_told_is_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "STORIES_MAX", STORIES)
    monkeypatch.setattr(findings, "FINDINGS_MAX", FINDINGS)
    monkeypatch.setattr(findings, "PENDING_KEYS_MAX", PENDING)
    monkeypatch.setattr(findings, "RANGES_MAX", 4)
    verify_machine(Machine, examples=50, steps=30)
