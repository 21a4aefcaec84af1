"""Messages of one node about its blocks, as orders to their keeper (pure).

    Heard, event ─▶ open, store, remove, show, void

A **slot** is one holder in one (tenant, space). If a node that has slots sends a snapshot, hidden
slots are filled beside them; at its end these are shown, and the older ones are void. Deltas that
come meanwhile are applied to both. A node has PLACES_MAX of either at most: no node takes the slots
of others.

Covers: which slot stands for which place. Does not cover: trust (`feed`), the keeper of the blocks
(`holdings`, `kvstore.stores`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Protocol

from kvstore.index.feed import Event, Heard
from kvstore.types import SpaceId, Tier
from kvstore.wire.feed import Change, Delta, Left, Removed, SnapshotPart, Stored

PLACES_MAX: Final = 1024
"""Places of one node, and as many again while a snapshot of it comes."""

Scope = Hashable
"""Name that the keeper of the blocks uses for a (tenant, space)."""
Place = tuple[str, int, Scope]
"""Engine, rank, scope."""


class PlaceSlots(Protocol):
    """Keeper of the blocks of one node."""

    def scope(self, tenant: str, space: SpaceId) -> Scope:
        """Name that this keeper uses for a (tenant, space)."""

    def open(self, place: Place, *, is_hidden: bool) -> int | None:
        """A new, empty slot; hidden: in no answer until `show`. None: there is no room for one."""

    def show(self, slot: int) -> None:
        """Include a hidden slot in answers from now on."""

    def void(self, slot: int) -> None:
        """Forget all that this slot holds, and the slot."""

    def stored(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        """Record that the slot holds these blocks in this tier. `keys`: 32 bytes each."""

    def removed(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        """Record that the slot does not hold these blocks in this tier any more; no error if it did
        not."""


class Places:
    """Slots of one node, by place, and of the snapshot under way."""

    def __init__(self, kept: PlaceSlots) -> None:
        self._kept = kept
        self.slots: dict[Place, int] = {}
        self.coming: dict[Place, int] | None = None
        """Slots of a snapshot that is being received while older ones answer; None: there is
        none."""
        self._scopes: dict[tuple[str, int], set[Scope]] = {}
        """Scopes of each (engine, rank), maybe too many, so that none are searched for when the
        engine leaves."""
        self.is_short = False
        """Whether some of the node's blocks found no room."""

    def resume(self, slots: dict[Place, int], coming: dict[Place, int] | None) -> None:
        """Go on with slots that another replica opened. A snapshot that came in part is dropped,
        and earlier blocks stay."""
        self.slots, self.coming = slots, coming
        self.abandon()
        self._know(slots)

    def take(self, heard: Heard, event: Event) -> None:
        """Apply an event as `Feed.hear` decided about it."""
        if heard.forget:
            self.forget()
        if heard.abandon:
            self.abandon()
        if heard.begin:
            self.is_short = False
            self.coming = {} if self.slots else None
        if heard.apply and isinstance(event, Delta):
            for change in event.changes:
                self._change(change)
        if heard.apply and isinstance(event, SnapshotPart):
            for stored in event.stored:
                self._store(stored, self.slots if self.coming is None else self.coming)
        if heard.complete:
            self._complete()

    def forget(self) -> None:
        """Drop all blocks of the node."""
        self.abandon()
        self._void(self.slots, list(self.slots))
        self._scopes.clear()
        self.is_short = False

    def abandon(self) -> None:
        """Drop the snapshot under way."""
        if self.coming is not None:
            self._void(self.coming, list(self.coming))
            self.coming = None

    def _complete(self) -> None:
        if self.coming is None:
            return
        self._void(self.slots, list(self.slots))
        for slot in self.coming.values():
            self._kept.show(slot)
        self.slots, self.coming = self.coming, None
        self._scopes.clear()
        self._know(self.slots)

    def _know(self, places: Iterable[Place]) -> None:
        for engine, rank, scope in places:
            self._scopes.setdefault((engine, rank), set()).add(scope)

    def _change(self, change: Change) -> None:
        both = [self.slots] if self.coming is None else [self.slots, self.coming]
        match change:
            case Stored():
                for slots in both:
                    self._store(change, slots)
            case Removed():
                scope = self._kept.scope(change.tenant, change.space)
                for slots in both:
                    slot = slots.get((change.engine, change.rank, scope))
                    if slot is not None:
                        self._kept.removed(slot, scope, change.tier, change.keys)
            case Left(engine, rank):
                scopes = self._scopes.pop((engine, rank), ())
                for slots in both:
                    self._void(slots, [p for s in scopes if (p := (engine, rank, s)) in slots])

    def _store(self, stored: Stored, slots: dict[Place, int]) -> None:
        scope = self._kept.scope(stored.tenant, stored.space)
        place = (stored.engine, stored.rank, scope)
        slot = slots.get(place)
        if slot is None and len(slots) < PLACES_MAX:
            slot = self._kept.open(place, is_hidden=slots is self.coming)
        if slot is None:
            self.is_short = True
            return
        if place not in slots:
            slots[place] = slot
            self._know([place])
        self._kept.stored(slot, scope, stored.tier, stored.keys)

    def _void(self, slots: dict[Place, int], places: Iterable[Place]) -> None:
        for place in places:
            self._kept.void(slots.pop(place))
