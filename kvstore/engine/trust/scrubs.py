"""Background scrubs as the engine sees them: blocks of dram to verify, and results.

    sealed(first word) ──▶ Sealed ──hashed outside──▶ Scrubbed ──▶ bad copies dropped, counts

The list is a snapshot: a slot with another block meanwhile has another generation, which voids its
hash. Does not cover: hashing (`kvstore.node.scrub`), the disk tier, which finds its records by
itself (`kvstore.tiers.file.scrub`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from kvstore.engine.events import Scrubbed
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.state import State
from kvstore.engine.why.reasons import Reason
from kvstore.types import Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.layout import shard_bytes
from kvstore.wire.messages import generations_array, slots_array
from kvstore.wire.record import Scope

WORDS_PER_LOOK: Final = 65_536
"""Slots of the table examined in one call of `sealed`: a tenth of a millisecond."""
BLOCKS_PER_LOOK: Final = 256
NO_PASS: Final = -1
"""Age of the last complete pass when none has ended yet."""


class Sealed(msgspec.Struct, frozen=True):
    """Some blocks in dram. `slots` u32, `generations` u64, `keys` u8 [n, 32], `checksums` u8
    [n, 16], `scope_of` indexes `scopes`; [n] each."""

    scopes: tuple[Scope, ...]
    scope_of: Any
    slots: Any
    generations: Any
    keys: Any
    checksums: Any
    next_word: int
    """Word to pass to the next call; 0: the end of the arena was reached."""


class TierScrub(msgspec.Struct):
    """Results of scrubbing one tier, since the start of the node."""

    blocks: int = 0
    size_bytes: int = 0
    bad: int = 0
    pass_ended_ns: int = 0
    """When the last complete pass ended; 0: none has."""

    def age_ms(self, now_ns: int) -> int:
        """Time in ms since the last complete pass ended, or NO_PASS."""
        return (now_ns - self.pass_ended_ns) // NS_PER_MS if self.pass_ended_ns else NO_PASS


class Scrubs:
    """Blocks of dram for the scrub to verify, and the results of scrubbing dram and disk."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.tiers = {Tier.DRAM: TierScrub(), Tier.FILE: TierScrub()}

    def sealed(self, first_word: int) -> Sealed:
        """The next blocks from a word on, at most BLOCKS_PER_LOOK. Blocks of a space that no engine
        has named since the start are left out: their length is unknown."""
        slots, residency = self._state.slots, self._state.residency
        end = min(first_word + WORDS_PER_LOOK, len(slots.state))
        words = np.flatnonzero(slots.state[first_word:end] == SlotState.SEALED) + first_word
        if len(words) > BLOCKS_PER_LOOK:
            end = int(words[BLOCKS_PER_LOOK])
            words = words[:BLOCKS_PER_LOOK]
        rows = residency.row_of_word[words].astype(np.int64)
        numbers, scope_of = np.unique(residency.table.scopes[rows], return_inverse=True)
        scopes = [self._scope(number) for number in numbers.tolist()]
        known = np.array([scope is not None for scope in scopes], dtype=bool)[scope_of]
        place = np.cumsum([scope is not None for scope in scopes]) - 1
        words, rows, scope_of = words[known], rows[known], place[scope_of[known]]
        return Sealed(
            scopes=tuple(scope for scope in scopes if scope is not None),
            scope_of=scope_of,
            slots=slots.slots_of(words),
            generations=slots.generation[words],
            keys=residency.table.keys[rows].view(np.uint8),
            checksums=residency.checksum[rows].view(np.uint8),
            next_word=end if end < len(slots.state) else 0,
        )

    def _scope(self, number: int) -> Scope | None:
        tenant, space, shard = self._state.residency.address(number)
        known = self._state.known.get((tenant, space))
        if known is None:
            return None
        return Scope(tenant, space, shard, shard_bytes(known.space, shard))

    def take(self, event: Scrubbed) -> None:
        """Count the results of a scrub, and drop bad blocks: the next request reads them from disk,
        or computes them."""
        state, scrub = self._state, self.tiers[event.tier]
        scrub.blocks += event.blocks
        scrub.size_bytes += event.size_bytes
        scrub.bad += bool(event.bad_key)
        if event.pass_ended:
            scrub.pass_ended_ns = state.now_ns
        if event.slots:
            words, known = state.slots.words_of(slots_array(event.slots))
            bad = (
                known
                & (state.slots.state[words] == SlotState.SEALED)
                & (state.slots.generation[words] == generations_array(event.generations))
            )
            words = np.unique(words[bad])
            scrub.bad += len(words)
            state.empty(words, state.stamp(Reason.FAILED_SCRUB))
