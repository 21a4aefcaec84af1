"""Spaces switched off, because an engine computed other values than the cached ones of a key.

    Compared ──nothing diverged──▶ counted
             ──diverging blocks all came from disk for this lookup──▶ the space is off on disk
             ──otherwise──▶ the space is off in all tiers
    off ──emptied, a slice a tick──▶ holds nothing; stays off until an operator clears the space

No checksum finds bytes that are intact under a wrong key. One block is enough: a finding is no
noise (`kvstore.kernels.compare`), and the cause of one wrong block may affect others. Until a space
has been emptied no lease is given on it, whichever tier is off: blocks from disk are in dram, too.

A process may end before it has emptied a space, so lasting effects come first, in the step that
switches off: the journal forgets the space, and it is void on disk.

Rules. 1: a finding of an engine counts for the tenant and the space of its own open session, and
for a lookup of this session, never for another tenant. 2: a space that is off has no leases, stores
or reads. 3: bounded; when the list is full, the oldest of the same tenant goes.

Does not cover: comparison, and choice of hits (`kvstore.client.core.shadow`).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from kvstore.engine.events import SwitchedOff
from kvstore.engine.moves.files import Files
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.state import Off, State
from kvstore.engine.witness import Origin, tiers_of
from kvstore.types import SpaceId, Tier
from kvstore.wire.messages import Compared, slots_array

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
        origins = tiers_of(finding.leased())
        blocks = blocks[blocks < len(origins)]
        self.worst_error = max(self.worst_error, message.error_ppm / PPM)
        state.counters.shadow_blocks += min(message.blocks, len(origins))
        state.counters.shadow_blocks_diverged += len(blocks)
        if not len(blocks):
            return
        tier = Tier.FILE if bool((origins[blocks] == Origin.FILE).all()) else None
        self._switch_off(finding.address, tier, owner.title, message, diverged=len(blocks))

    def _switch_off(
        self,
        address: tuple[str, SpaceId],
        tier: Tier | None,
        engine: str,
        message: Compared,
        *,
        diverged: int,
    ) -> None:
        state, old = self._state, self._state.off.get(address)
        if old is not None and (old.tier is None or old.tier is tier):
            return
        self._make_room(address[0])
        state.off[address] = Off(tier)
        state.credits_due = True
        tenant, space = address
        state.residency.let_end_with_the_process(state.residency.scopes_of(tenant, space))
        self._files.void(tenant, space)
        state.say(
            SwitchedOff(
                tenant=tenant,
                space=space,
                tier=tier,
                engine=engine,
                blocks=message.blocks,
                diverged=diverged,
                error_ppm=message.error_ppm,
            )
        )

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
        off = self._state.off[address]
        self._state.off[address] = msgspec.structs.replace(off, is_empty=True)
        self._state.credits_due = True

    def clear(self, tenant: str | None, space: bytes | None) -> None:
        """Switch spaces of this tenant and space (None: of any) on again, because an operator
        cleared them."""
        off = self._state.off
        for address in list(off):
            if tenant in (None, address[0]) and space in (None, address[1]):
                del off[address]
        self._state.credits_due = True
