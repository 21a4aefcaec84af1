"""Verification: blocks of dram in the background, and spaces whose blocks differ from what engines
compute.

    sealed(first word) ──▶ Sealed ──hashed outside──▶ Scrubbed ──▶ bad copies dropped, counts
    Compared ──▶ the space is off, on disk or in all tiers, until an operator clears it
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstore.engine.events import SwitchedOff
from kvstore.engine.memory.slots import SlotState
from kvstore.engine.moves.files import Files
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import Off, State
from kvstore.engine.why.reasons import FROM_DISK, Reason
from kvstore.tier_events import Scrubbed
from kvstore.types import SpaceId, Tier
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Compared, generations_array, slots_array
from kvstore.wire.record import Scope
from kvstore.wire.space import shard_bytes

# ── scrubs ────────────────────────────────────────────────────────────────────────────────────────
# Background scrubs as the engine sees them: blocks of dram to verify, and results. The list of
# blocks is a snapshot: a slot with another block meanwhile has another generation, which voids its
# hash. Does not cover: hashing (`kvstore.node.scrub`), the disk tier, which finds its records by
# itself (`kvstore.tiers.file.scrub`).

WORDS_PER_LOOK: Final = 65_536
"""Slots of the table examined in one call of `sealed`: a tenth of a millisecond."""
BLOCKS_PER_LOOK: Final = 256
NO_PASS: Final = -1
"""Age of the last complete pass when none has ended yet."""


class SealedBlock(NamedTuple):
    """A block in dram."""

    scope: Scope
    slot: int
    generation: int
    key: bytes
    checksum: bytes


class Sealed(NamedTuple):
    """Some blocks in dram."""

    blocks: list[SealedBlock]
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
        rows, table = residency.row_of_word[words].astype(np.int64), residency.table
        numbers = table.scopes[rows].tolist()
        scopes = {number: self._scope(number) for number in set(numbers)}
        places = slots.slots_of(words).tolist(), slots.generation[words].tolist()
        names = table.keys[rows].view("V32").ravel(), residency.checksum[rows].view("V16").ravel()
        columns = zip(numbers, *places, *(each.tolist() for each in names), strict=True)
        blocks = [
            SealedBlock(scope, *its)
            for number, *its in columns
            if (scope := scopes[number]) is not None
        ]
        return Sealed(blocks, end if end < len(slots.state) else 0)

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
            generations = generations_array(event.generations)
            words = state.slots.sealed_still(slots_array(event.slots), generations)
            scrub.bad += len(words)
            state.empty(words, state.stamp(Reason.FAILED_SCRUB))


# ── switches ──────────────────────────────────────────────────────────────────────────────────────
# Spaces switched off, because an engine computed other values than the cached ones of a key.
#
#     Compared ──nothing diverged──▶ counted
#              ──diverging blocks all came from disk for this lookup──▶ the space is off on disk
#              ──otherwise──▶ the space is off in all tiers
#     off ──emptied, a slice a tick──▶ holds nothing; stays off until an operator clears the space
#
# No checksum finds bytes that are intact under a wrong key. One block is enough: a finding is no
# noise (`kvstore.kernels.host`), and the cause of one wrong block may affect others. Until a
# space has been emptied no lease is given on it, whichever tier is off: blocks from disk are in
# dram, too.
#
# A process may end before it has emptied a space, so lasting effects come first, in the step that
# switches off: the journal forgets the space, and it is void on disk.
#
# Rules. 1: a finding of an engine counts for the tenant and the space of its own open session, and
# for a lookup of this session, never for another tenant. 2: a space that is off has no leases,
# stores or reads. 3: bounded; when the list is full, the oldest of the same tenant goes.
#
# Does not cover: comparison, and choice of hits (`kvstore.client.core.shadow`).

OFF_MAX: Final = 1024
PPM: Final = 1_000_000


class Switches:
    """Switches spaces off and on, in `State.off`, by the findings of engines."""

    def __init__(self, state: State, files: Files) -> None:
        self._state = state
        self._files = files
        self.worst_error = 0.0
        """Largest error of all comparisons since the start."""

    def take(self, connection: Connection, message: Compared) -> None:
        """Handle the result of a shadow check: an engine has computed blocks of one of its lookups
        anew. If any differs, the space is switched off."""
        state, owner = self._state, connection.owner
        if not owner.open_session or message.session != owner.open_session:
            return
        finding = state.trail.finding(owner.key, message.session, message.lease)
        if finding is None:
            return  # so long ago that nobody knows what it was served
        blocks = np.unique(slots_array(message.diverged)).astype(np.int64)
        origins = finding.leased()
        blocks = blocks[blocks < len(origins)]
        self.worst_error = max(self.worst_error, message.error_ppm / PPM)
        state.counters.shadow_blocks += min(message.blocks, len(origins))
        state.counters.shadow_blocks_diverged += len(blocks)
        if not len(blocks):
            return
        tier = Tier.FILE if bool((origins[blocks] == FROM_DISK).all()) else None
        counts = message.blocks, len(blocks), message.error_ppm
        self._switch_off(SwitchedOff(*finding.address, tier, owner.title, *counts))

    def _switch_off(self, event: SwitchedOff) -> None:
        tenant, space = event.tenant, event.space
        state, old = self._state, self._state.off.get((tenant, space))
        if old is not None and (old.tier is None or old.tier is event.tier):
            return
        self._make_room(tenant)
        state.off[tenant, space] = Off(event.tier)
        state.credits_due = True
        for scope in state.residency.scopes_of(tenant, space):
            state.journal.forget_scope(scope)  # no later process takes its blocks over
        self._files.void(tenant, space)
        state.say(event)

    def _make_room(self, tenant: str) -> None:
        off = self._state.off
        if len(off) >= OFF_MAX:
            own = (address for address in off if address[0] == tenant)
            del off[next(own, next(iter(off)))]

    def to_empty(self) -> tuple[str, SpaceId] | None:
        """(tenant, space) of a space that is off and may still have blocks; None: there is none."""
        return next((a for a, off in self._state.off.items() if not off.is_empty), None)

    def emptied(self, address: tuple[str, SpaceId]) -> None:
        """Record that a space that is off has no blocks any more."""
        self._state.off[address].is_empty = True
        self._state.credits_due = True

    def clear(self, tenant: str | None, space: bytes | None) -> None:
        """Switch spaces of this tenant and space (None: of any) on again, because an operator
        cleared them."""
        off = self._state.off
        for address in list(off):
            if tenant in (None, address[0]) and space in (None, address[1]):
                del off[address]
        self._state.credits_due = True
