"""Bugs of copies in hbm, planted one at a time: see `planted`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.engine.memory.policies import Words
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.moves.hbm import HbmCopies
from kvstore.engine.state import State
from kvstore.tier_events import Promoted
from tests.kit.planted import Patch, instead_of


@instead_of(State, "empty")
def copies_outlive_their_blocks(_: Any, self: State, words: Words, stamp: int) -> None:
    """A slot of dram that is reused keeps the place of the copy of what it held."""
    if len(words):
        self.residency.drop_dram(words, stamp)
        self.free(words)


@instead_of(HbmCopies, "promoted")
def copy_of_a_slot_that_is_sealed_again(promoted: Any, self: HbmCopies, event: Promoted) -> None:
    """A copy is shown while a block is in its slot of dram, whichever it is."""
    job, slots = self._jobs.get(event.job), self._state.slots
    assert job is not None
    is_sealed = slots.state[job.sources] == SlotState.SEALED
    is_sealed &= self._state.residency.hbm_of_word[job.sources] < 0
    job.generations[is_sealed] = slots.generation[job.sources[is_sealed]]
    promoted(self, event)


@instead_of(State, "empty")
def first_slot_of_dram_taken_for_none(empty: Any, self: State, words: Words, stamp: int) -> None:
    """The block in it leaves, and its copy stays shown."""
    if self.hbm is not None and 0 in words:
        self.residency.hbm_of_word[0] = -1
    empty(self, words, stamp)


@instead_of(State, "drop_copies")
def first_slot_of_hbm_taken_for_none(drop_copies: Any, self: State, words: Words) -> None:
    """Its copy stays when its block leaves."""
    drop_copies(self, words[words > 0])


ON_GPUS: Sequence[Patch] = (
    copies_outlive_their_blocks,
    copy_of_a_slot_that_is_sealed_again,
    first_slot_of_dram_taken_for_none,
    first_slot_of_hbm_taken_for_none,
)
"""Where nodes have memory of a GPU."""
