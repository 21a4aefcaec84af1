"""A node process that is killed in the middle of any step, and what goes on with its journal.

The machine of `test_machine`, whose promises hold over the death: nobody is granted what another
may still write to, and what is published are the bytes of its key. Besides, for every store of the
last step: an engine that goes on from there is in order and publishes nothing that was overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvstore.engine.engine import Engine
from kvstore.engine.memory.journal import Journal
from kvstore.types import PAGE_BYTES
from kvstore.wire.space import shard_bytes, slot_bytes
from tests.amounts import amount
from tests.kit.planted import Patch, instead_of
from tests.steps import verify_machine
from tests.unit.engine.harness import Node, keys
from tests.unit.engine.machine_owner import Content, Owner, Place
from tests.unit.engine.mortal import Died, MortalNode
from tests.unit.engine.test_machine import Machine, numbers, picks, ranks, whos

CUTS_MAX = 24
"""Of a step with more stores, so many are tried."""


class MortalMachine(Machine):
    """See the module."""

    def make_node(self, **config: Any) -> Node:
        self.pages: dict[int, tuple[int, Content] | None] = {}
        """What is really in each page: the slot's begin and its block; None: anything."""
        return MortalNode(**config)

    @property
    def mortal(self) -> MortalNode:
        return cast("MortalNode", self.node)

    def granted(self, owner: Owner, places: list[Place]) -> None:
        super().granted(owner, places)
        for i, place in enumerate(places):
            rank = owner.writers[i % len(owner.writers)]
            self.pages.update(dict.fromkeys(owner.pages(rank, place)))

    def seal(
        self, owner: Owner, rank: int, blocks: list[int], places: list[Place], session: int
    ) -> None:
        for block, place in zip(blocks, places, strict=True):
            if place in self.writable.get(owner.ranks[rank], {}):
                content = owner.content(rank, block)
                self.pages.update(dict.fromkeys(owner.pages(rank, place), (place[0], content)))
        super().seal(owner, rank, blocks, places, session)

    @rule()
    def clears(self) -> None:
        super().clears()
        self.pages.clear()  # what was forgotten stays so

    @rule(who=whos, pick=picks)
    def distrusts(self, who: int, pick: int) -> None:
        before = set(self.excused)
        super().distrusts(who, pick)
        for slot, _ in self.excused - before:
            self.pages[slot] = None

    @rule(
        who=whos,
        rank=ranks,
        what=st.sampled_from(
            ["tick", "stores", "stores", "drops", "leases", "clears", "distrusts", "disturbs"]
        ),
        number=numbers,
        pick=picks,
        share=st.floats(0, 1),
    )
    def the_process_dies(
        self, who: int, rank: int, what: str, number: int, pick: int, share: float
    ) -> None:
        """In the step that one of these leads to, if it leads to any."""
        self.mortal.is_dying = True
        there = set(self.writable)
        count = 1 + pick % 6
        change = ("new scheduler", "same rank", "new rank", "quiet", "no rank", "dead")[pick % 6]
        steps: dict[str, Callable[[], None]] = {
            "tick": lambda: self.time_passes(1),
            "stores": lambda: self.stores(who, number, count),
            "drops": lambda: self.drops(who, rank, count),
            "leases": lambda: self.leases(who, pick, count),
            "clears": self.clears,
            "distrusts": lambda: self.distrusts(who, pick),
            "disturbs": lambda: self.disturbs(who, rank, change),
        }
        try:
            steps[what]()
            self.time_passes(0)
        except Died:
            self.mortal.is_dying = False
            # A Hello or an end that nobody heard: the process writes no more, and ends once.
            self.writable |= {connection: {} for connection in there - set(self.writable)}
        node = self.mortal
        count = len(node.stores)
        for cut in {*np.linspace(0, count, min(count + 1, CUTS_MAX), dtype=int).tolist()}:
            self.check_published(node.reborn(node.image(cut)))
        for owner in self.owners:
            self.session_over(owner)
            owner.scheduler, owner.heard = 0, 0
            owner.ranks = [0] * len(owner.ranks)
        self.excused.clear()
        node.restart(node.image(round(share * count)))
        for place, content in self.check_published(node.engine).items():
            self.bytes[place] = content

    def check_published(self, engine: Engine) -> dict[Place, Content]:
        """What an engine tells of: all of it is there. Returns it."""
        found = {}
        for row in engine.blocks():
            held = self.pages.get(row.slot)
            assert held is not None, f"{row} is published, and anything may be there"
            begin, content = held
            assert begin == row.slot, f"{row} is published inside another slot"
            assert row.key == keys(content[2])[:4].hex(), f"{row} is published, it was {content}"
            owner = next(o for o in self.owners if o.model == content[0])
            size = slot_bytes(shard_bytes(owner.hellos.space, content[1]))
            pages = range(begin, begin + size // PAGE_BYTES)
            assert all(self.pages[page] == held for page in pages), f"{row} is overwritten"
            found[row.slot, row.generation] = content
        return found


def test_whenever_the_process_dies_another_goes_on() -> None:
    verify_machine(MortalMachine, examples=amount(40, nightly=250), steps=40)


# ── the machine can see ──────────────────────────────────────────────────────────────────────────


@instead_of(Journal, "examine")
def forgets_writers(real: Any, self: Journal, *, quotas: Any, writers: set[int]) -> Any:
    """What somebody may write to is free after a restart."""
    self._writers[:] = 0
    return real(self, quotas=quotas, writers=writers)


def keeps_rows_of_what_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "retract", lambda self, words: None)


def names_no_writer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "name_writer", lambda self, words, writer: None)


@pytest.mark.parametrize(
    "broken",
    [forgets_writers, keeps_rows_of_what_left, names_no_writer],
    ids=lambda patch: patch.__name__,
)
def test_a_broken_journal_is_noticed(broken: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    monkeypatch.setattr("tests.kit.engine_check.check_engine", lambda _: None)
    with pytest.raises(AssertionError, match=r"granted w|published|leased|went und|another st"):
        verify_machine(MortalMachine, examples=300, steps=50, broken_seed=0)
