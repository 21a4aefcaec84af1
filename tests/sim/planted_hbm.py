"""Bugs of copies in hbm, planted one at a time: see `planted`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.moves.hbm import HbmCopies
from kvstore.engine.state import State
from kvstore.tier_events import Promoted
from tests.sim.planted import Planted


def copies_outlive_their_blocks() -> contextlib.AbstractContextManager[Any]:
    """A slot of dram that is reused keeps the place of the copy of what it held."""

    def broken(self: State, words: Words, stamp: int) -> None:
        if len(words):
            self.residency.drop_dram(words, stamp)
            self.free(words)

    return mock.patch.object(State, "empty", broken)


def copy_of_a_slot_that_is_sealed_again() -> contextlib.AbstractContextManager[Any]:
    """A copy is shown while a block is in its slot of dram, whichever it is."""
    promoted = HbmCopies.promoted

    def broken(self: HbmCopies, event: Promoted) -> None:
        job, slots = self._jobs.get(event.job), self._state.slots
        assert job is not None
        is_sealed = slots.state[job.sources] == SlotState.SEALED
        is_sealed &= self._state.residency.hbm_of_word[job.sources] < 0
        job.generations[is_sealed] = slots.generation[job.sources[is_sealed]]
        promoted(self, event)

    return mock.patch.object(HbmCopies, "promoted", broken)


def first_slot_of_dram_taken_for_none() -> contextlib.AbstractContextManager[Any]:
    """The block in it leaves, and its copy stays shown."""
    empty = State.empty

    def broken(self: State, words: Words, stamp: int) -> None:
        if self.hbm is not None and 0 in words:
            self.residency.hbm_of_word[0] = -1
        empty(self, words, stamp)

    return mock.patch.object(State, "empty", broken)


def first_slot_of_hbm_taken_for_none() -> contextlib.AbstractContextManager[Any]:
    """Its copy stays when its block leaves."""
    drop_copies = State.drop_copies

    def broken(self: State, words: Words) -> None:
        drop_copies(self, words[words > 0])

    return mock.patch.object(State, "drop_copies", broken)


ON_GPUS: Sequence[Planted] = (
    copies_outlive_their_blocks,
    copy_of_a_slot_that_is_sealed_again,
    first_slot_of_dram_taken_for_none,
    first_slot_of_hbm_taken_for_none,
)
"""Where nodes have memory of a GPU."""
