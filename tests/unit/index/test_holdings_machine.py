"""The flat memory against dictionaries, under any order of calls, as it stands and compiled.

Always true:
1. `check_holdings`;
2. an answer has the slots of the model with the same lengths, except of slots that lost something
   because the index was full: those may go less far or be missing, never further;
3. when all slots are void and swept, nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import Phase, strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from kvstore.index import loops
from kvstore.index.feed import Holder
from kvstore.index.holdings import Holdings
from kvstore.index.loops import LOST, ROW, SCOPE, SLOT, WORDS, Ints
from kvstore.installation import is_installed
from kvstore.types import Tier
from tests.kit.index_check import check_holdings, void_slots
from tests.kit.planted import Patch, instead_of
from tests.steps import CountedMachine
from tests.unit.index.model import Model
from tests.unit.index.words import SPACE, keys

SLOTS = 30
QUICK = hypothesis.settings(
    max_examples=100, phases=[Phase.generate], deadline=None, report_multiple_bugs=False
)
tenants = st.sampled_from(["t", "u"])
picks = st.integers(0, 63)
tiers = st.sampled_from(list(Tier))
chains = st.one_of(
    st.builds(
        lambda begin, n: keys(*range(begin, begin + n)), st.integers(0, 9), st.integers(0, 9)
    ),
    st.lists(st.integers(0, 15), max_size=6).map(lambda numbers: keys(*numbers)),
)


class Machine(CountedMachine):
    """See the module."""

    is_native = False

    @initialize(room=st.sampled_from([SLOTS + 1, 60, 500]), seed=st.integers(0, 5))
    def start(self, room: int, seed: int) -> None:
        self.flat = Holdings(
            entry_count_max=room, slot_count_max=SLOTS, seed=seed, is_native=self.is_native
        )
        self.model = Model()

    def slot(self, pick: int) -> int | None:
        slots = list(self.model.scopes)
        return slots[pick % len(slots)] if slots else None

    @rule(tenant=tenants, count=st.sampled_from([1, 1, 14]), is_hidden=st.booleans())
    def open(self, tenant: str, count: int, is_hidden: bool) -> None:
        for _ in range(count):
            slot = self.flat.open(Holder("n"), (tenant, SPACE), is_hidden=is_hidden)
            assert (slot is None) == (len(self.model.scopes) == SLOTS)
            if slot is not None:
                self.model.open(slot, tenant, SPACE, is_hidden=is_hidden)

    @rule(pick=picks)
    def show(self, pick: int) -> None:
        hidden = sorted(self.model.hidden)
        if hidden:
            slot = hidden[pick % len(hidden)]
            self.flat.show(slot)
            self.model.hidden.remove(slot)

    @rule(pick=picks)
    def void(self, pick: int) -> None:
        if (slot := self.slot(pick)) is not None:
            self.flat.void(slot)
            self.model.void(slot)

    @rule(pick=picks, tier=tiers, chain=chains)
    def stored(self, pick: int, tier: Tier, chain: bytes) -> None:
        if (slot := self.slot(pick)) is not None:
            self.flat.stored(slot, self.model.scopes[slot], tier, chain)
            self.model.stored(slot, tier, chain)

    @rule(tier=tiers, chain=chains)
    def stored_by_all(self, tier: Tier, chain: bytes) -> None:
        for slot in list(self.model.scopes):
            self.flat.stored(slot, self.model.scopes[slot], tier, chain)
            self.model.stored(slot, tier, chain)

    @rule(pick=picks, tier=tiers, chain=chains)
    def removed(self, pick: int, tier: Tier, chain: bytes) -> None:
        if (slot := self.slot(pick)) is not None:
            self.flat.removed(slot, self.model.scopes[slot], tier, chain)
            self.model.removed(slot, tier, chain)

    @rule(tenant=tenants, chain=chains)
    def match(self, tenant: str, chain: bytes) -> None:
        answer = {s: (h, d, f) for s, h, d, f, _ in self.flat.match(tenant, SPACE, chain)}
        truth = self.model.match(tenant, SPACE, chain)
        assert answer.keys() <= truth.keys()
        for slot, lengths in truth.items():
            told = answer.get(slot, (0, 0, 0))
            if self.flat.arrays["slots"][slot * SLOT + LOST]:
                assert all(a <= b for a, b in zip(told, lengths, strict=True))
            else:
                assert told == lengths

    @rule(count=st.integers(1, 20))
    def sweep(self, count: int) -> None:
        self.flat.sweep(count)

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "flat"):
            check_holdings(self.flat)
            sizes = self.flat.statistics()
            if sizes.evicted_count == 0 and not void_slots(self.flat):
                assert sizes.entry_count == self.model.entry_count()

    def teardown(self) -> None:
        if hasattr(self, "flat"):
            for slot in self.model.scopes:
                self.flat.void(slot)
            while void_slots(self.flat):
                self.flat.sweep(7)
            check_holdings(self.flat)
            sizes = self.flat.statistics()
            assert sizes.entry_count == sizes.block_count == 0
            assert not self.flat.scopes


class NativeMachine(Machine):
    """The same, compiled."""

    is_native = True


TestPlain = Machine.TestCase


TestCompiled = pytest.mark.skipif(not is_installed("numba"), reason="numba is not installed")(
    NativeMachine.TestCase
)


@instead_of(loops, "is_at")
def half_a_key_is_enough(
    _: Any, flat: Ints, row: int, keys: Sequence[int], at: int, scope: int
) -> bool:
    """Blocks are told apart by the first half of their keys."""
    base = row * ROW
    half = all(flat[base + i] == keys[at * WORDS + i] for i in range(WORDS // 2))
    return half and flat[base + SCOPE] == scope


@instead_of(loops, "is_at")
def tenants_share(_: Any, flat: Ints, row: int, keys: Sequence[int], at: int, scope: int) -> bool:
    """Blocks are told apart by their keys alone."""
    base = row * ROW
    same = all(flat[base + i] == keys[at * WORDS + i] for i in range(WORDS))
    return same and flat[base + SCOPE] != 0


def void_slots_answer(patch: pytest.MonkeyPatch) -> None:
    """A void slot is in answers until it is swept."""
    patch.setattr(Holdings, "void", lambda self, slot: self._void.append(slot))


def slots_come_back_early(patch: pytest.MonkeyPatch) -> None:
    """A slot is free before all rows were swept."""
    sweep = loops.sweep

    def broken(*arguments: Any) -> bool:
        sweep(*arguments)
        return True

    patch.setattr(loops, "sweep", broken)


def all_is_in_hbm(patch: pytest.MonkeyPatch) -> None:
    """Tiers do not matter."""
    patch.setattr(loops, "fastest", lambda member: 0)


@pytest.mark.parametrize(
    "break_it",
    [
        half_a_key_is_enough,
        tenants_share,
        void_slots_answer,
        slots_come_back_early,
        all_is_in_hbm,
    ],
)
def test_what_is_broken_is_seen(break_it: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    broken = type("Broken", (Machine,), {"is_counted": False})
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_state_machine_as_test(broken, settings=QUICK)
