"""Messages of one node to one replica of the index: trust in them, and their orders about blocks.

    Hello ─▶ EXACT ⇄ ASKED ─▶ FILLING ─▶ EXACT       `Feed`: words in, verdicts out
    word ─▶ open, store, remove, show, void          `Places`: which slot stands for which place

A feed is an ordered stream that the node dials. Each `Delta` has the next sequence number, and a
`FeedBeat` repeats the last. A message that does not fit (a number left out, another count at
Hello) is a gap, and the node is asked for a snapshot. A `SnapshotPart` has the offers of the node
**when the part is written**, and the number of the last delta before it: deltas may stand between
parts.

Pure; time is an argument, in milliseconds of a clock that does not go back. Does not cover: forms
of messages (`wire.feed`), the keeper of the blocks (`holdings`, `kvstore.stores`).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta

from kvstore.types import Incarnation, Latest, SpaceId, Tier
from kvstore.wire import feed as wire
from kvstore.wire.load import EngineEntry, Load

# ── rivals ────────────────────────────────────────────────────────────────────────────────────────
# Nodes that are two processes: one certificate, or one --node-name, on two machines.
#
# A restarted node replaces its past, which is dead and never speaks again. So a process that says
# Hello after it was replaced, and again after that was refused, lives beside the one that replaced
# it. Only the second time counts: one Hello of a dead process may come late.
#
# Pure. Covers: which names. Does not cover: which of the two is heard (`feed`), notices
# (`kvstore.indexer.service`).

RIVAL_MS: Final = 15_000
"""A refused process counts as gone after this long without another Hello: processes dial every 2
s."""
NAMES_MAX: Final = 1024


class Rivals:
    """Nodes of one replica whose name two live processes use; at most NAMES_MAX, the latest."""

    def __init__(self) -> None:
        self._refused = Latest[str, tuple[Incarnation, int]](NAMES_MAX)
        """By node: the refused incarnation, and the time of its last Hello."""
        self._rivals = Latest[str, tuple[int, str]](NAMES_MAX)
        """Nodes with a second live process: time of its last Hello, and its host."""

    def refused(self, node: str, incarnation: Incarnation, host: str, now_ms: int) -> bool:
        """A Hello was refused because another incarnation of this node is connected. Returns
        whether both processes are alive."""
        last = self._refused.get(node)
        self._refused[node] = (incarnation, now_ms)
        if last is None or last[0] != incarnation or now_ms - last[1] > RIVAL_MS:
            return False
        self._rivals[node] = (now_ms, host)
        return True

    def of(self, node: str, now_ms: int) -> str | None:
        """Address of the node's second process; None: there is none."""
        found = self._rivals.get(node)
        return None if found is None or now_ms - found[0] > RIVAL_MS else found[1]

    def names(self, now_ms: int) -> list[str]:
        """Names of nodes that are two processes now."""
        return sorted(node for node in list(self._rivals) if self.of(node, now_ms) is not None)


# ── feed ──────────────────────────────────────────────────────────────────────────────────────────

BEAT_MS: Final = 1000
"""Interval at which a node without news repeats its last sequence number."""
STALE_MS: Final = 2000
"""A node that is silent for this long is stale."""
OUT_MS: Final = 3000
"""A node that is silent for this long is left out of answers."""
FORGET_MS: Final = 60_000
"""The blocks of a node that is silent for this long are forgotten; to come back the node must send
a snapshot."""
ASK_AGAIN_MS: Final = 3000
"""A snapshot without a part for this long is requested again."""
_REPLACED_MAX: Final = 8
"""Number of replaced incarnations that are remembered, so that a late Hello of one is refused while
the incarnation that replaced it is connected."""


class Trust(enum.IntEnum):
    """How current the view of a node, or an answer, is; a greater value is less current."""

    EXACT = 0
    """In sync: all updates up to the node's last sequence number are applied."""
    CATCHING_UP = 1
    """Listed blocks were there when published; the node may have more blocks."""
    STALE = 2
    """The node is silent or its stream broke: it may be gone."""

    @property
    def word(self) -> str:
        """Name in messages: exact, catching-up, stale."""
        return self.name.lower().replace("_", "-")


class FeedClosed(wire.OfStream, frozen=True, tag="Closed"):
    """The stream ended or broke."""


class ConnectRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """A connection to the node's address was refused: the node is left out of answers until its
    next message."""

    node: str


Event = wire.Hello | wire.Word | FeedClosed | ConnectRefused


class Verdict(enum.Enum):
    """The replica's next step for the stream after an event."""

    GO_ON = "go on"
    ASK = "ask"
    """Ask the node for a snapshot."""
    CLOSE = "close"
    """Close the stream, because it is not, or no longer, the node's. Nothing of the event was
    applied."""


class Body(msgspec.Struct, array_like=True):
    """State of a node by its feed, without its blocks: what a record of it in a shared store has
    (`kvstore.stores`)."""

    incarnation: Annotated[Incarnation, Meta(ge=0)]
    """Incarnation of the present stream."""
    replaced: tuple[Incarnation, ...]
    """Replaced incarnations, whose Hello is refused while the present one is connected."""
    address: str
    sequence: Annotated[int, Meta(ge=0)]
    is_open: bool
    """Whether the stream has not ended."""
    is_exact: bool
    """Whether all updates are applied: no snapshot is missing."""
    is_short: bool
    """Whether some of the node's blocks found no room."""
    load_numbers: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """Fields of its last `Load`, in order; empty: none yet from this incarnation."""

    @property
    def load(self) -> Load | None:
        """Last load that the present incarnation published; None: none yet."""
        if not self.load_numbers:
            return None
        return Load(**dict(zip(Load.__struct_fields__, self.load_numbers, strict=False)))


class KnownNode:
    """State of a node, and when it was last heard of."""

    def __init__(self, body: Body, heard_ms: int) -> None:
        self.body, self.heard_ms, self.load = body, heard_ms, body.load
        self.is_refused = False
        """Whether its address refused a connection, and nothing was heard since."""
        self.engines: tuple[EngineEntry, ...] = ()
        """Engines last published by the present incarnation."""

    def trust(self, now_ms: int) -> Trust | None:
        """Trust in the node at this time; None: it is left out of answers."""
        if self.is_refused or now_ms - self.heard_ms >= OUT_MS:
            return None
        if not self.is_live(now_ms):
            return Trust.STALE
        is_exact = self.body.is_exact and not self.body.is_short
        return Trust.EXACT if is_exact else Trust.CATCHING_UP

    def is_live(self, now_ms: int) -> bool:
        """Whether its stream is open, and not silent for long."""
        return self.body.is_open and now_ms - self.heard_ms < STALE_MS

    def until_ms(self, now_ms: int) -> int:
        """Earliest time at which silence may change `trust` or `is_lost`."""
        ages = (STALE_MS, OUT_MS, FORGET_MS)
        return min((t for age in ages if (t := self.heard_ms + age) > now_ms), default=now_ms + 1)

    def is_lost(self, now_ms: int) -> bool:
        """Whether the node is silent for so long that its blocks are to be forgotten."""
        return now_ms - self.heard_ms >= FORGET_MS


class Feed(KnownNode):
    """Feed of one node, made for its first Hello, which must then be passed to `hear` like any
    event."""

    def __init__(self, places: Places, body: Body | None = None, heard_ms: int = 0) -> None:
        """`places`: of the node's blocks, which accepted messages are applied to. `body`: None: of
        a node of which nothing was heard."""
        if body is None:
            body = Body(Incarnation(0), (), "", 0, is_open=False, is_exact=True, is_short=False)
        super().__init__(body, heard_ms)
        self.places = places
        self._stream = 0
        self._awaited_ms = 0
        """When a snapshot was asked for, or its last part came."""
        self._parts = 0
        """Parts of the snapshot that is coming so far; 0: none is, or it has not begun."""

    @classmethod
    def of_another(cls, places: Places, body: Body, *, heard_ms: int | None) -> Feed:
        """Feed of a node whose stream another replica had, until `heard_ms` (None: its stream has
        ended). Sequence numbers were those of another stream: only a snapshot or a new incarnation
        makes it in sync."""
        body.is_open, body.is_exact = heard_ms is not None, False
        feed = cls(places, body, heard_ms or 0)
        feed._stream = -1
        return feed

    def hear(self, event: Event, now_ms: int) -> Verdict:
        """Apply an event of this node. Returns what to do with the stream."""
        verdict = self._apply(event, now_ms)
        self.body.is_short = self.places.is_short
        return verdict

    def _apply(self, event: Event, now_ms: int) -> Verdict:
        match event:
            case wire.Hello():
                return self._hello(event, now_ms)
            case ConnectRefused():
                self.is_refused = True
                return Verdict.GO_ON
        if (event.incarnation, event.stream) != (self.body.incarnation, self._stream):
            return Verdict.CLOSE
        if isinstance(event, FeedClosed):
            self.body.is_open = False
            return Verdict.GO_ON
        if not self.body.is_open:
            return Verdict.CLOSE
        self._spoke(now_ms)
        match event:
            case wire.Delta():
                return self._delta(event, now_ms)
            case wire.FeedBeat():
                if event.load is not None:
                    self.load = event.load
                    self.body.load_numbers = msgspec.structs.astuple(event.load)
                return self._beat(event.sequence, now_ms)
            case wire.SnapshotPart():
                return self._part(event, now_ms)
            case wire.Registry(engines=engines):
                self.engines = engines
                return Verdict.GO_ON

    def _spoke(self, now_ms: int) -> None:
        self.heard_ms = max(now_ms, self.heard_ms)
        self.is_refused = False

    def _hello(self, hello: wire.Hello, now_ms: int) -> Verdict:
        body = self.body
        is_new = hello.incarnation != body.incarnation
        if not is_new and hello.stream <= self._stream:
            return Verdict.CLOSE
        if hello.incarnation in body.replaced:
            if self.is_live(now_ms):
                return Verdict.CLOSE
            # What replaced it was a dead one's Hello, which came late: this one lives.
            body.replaced = tuple(each for each in body.replaced if each != hello.incarnation)
        if is_new and body.incarnation:
            body.replaced = (*body.replaced, body.incarnation)[-_REPLACED_MAX:]
        body.incarnation, self._stream, body.is_open = hello.incarnation, hello.stream, True
        body.address = hello.address
        self._spoke(now_ms)
        if is_new:
            body.is_exact, body.sequence, body.load_numbers, self._parts = True, 0, (), 0
            self.load, self.engines = None, ()
            self.places.forget()
        if body.is_exact and hello.sequence == body.sequence:
            return Verdict.GO_ON
        body.sequence = hello.sequence
        return self._ask(now_ms)

    def _ask(self, now_ms: int) -> Verdict:
        """Drop the snapshot under way, if there is one, and ask for another."""
        self.body.is_exact, self._parts, self._awaited_ms = False, 0, now_ms
        self.places.abandon()
        return Verdict.ASK

    @property
    def _is_asked(self) -> bool:
        """Whether a snapshot was asked for that has not begun."""
        return not self.body.is_exact and not self._parts

    def _delta(self, delta: wire.Delta, now_ms: int) -> Verdict:
        body = self.body
        if delta.sequence <= body.sequence:
            return Verdict.GO_ON  # heard before
        is_next = delta.sequence == body.sequence + 1
        body.sequence = delta.sequence
        verdict = Verdict.GO_ON if is_next or self._is_asked else self._ask(now_ms)
        for change in delta.changes:
            self.places.change(change)
        return verdict

    def _beat(self, sequence: int, now_ms: int) -> Verdict:
        body = self.body
        lacks_delta = sequence > body.sequence and not self._is_asked
        is_late = not body.is_exact and now_ms - self._awaited_ms >= ASK_AGAIN_MS
        if not lacks_delta and not is_late:
            return Verdict.GO_ON
        body.sequence = max(sequence, body.sequence)
        return self._ask(now_ms)

    def _part(self, part: wire.SnapshotPart, now_ms: int) -> Verdict:
        body = self.body
        if part.number == 0:
            fits = part.sequence >= body.sequence
        elif not 0 < self._parts <= part.number:
            return Verdict.GO_ON  # of a snapshot that was given up, or heard before
        else:
            fits = part.number == self._parts and part.sequence == body.sequence
        if not fits:
            return self._ask(now_ms)
        body.sequence, body.is_exact = part.sequence, part.is_last
        self._parts = 0 if part.is_last else part.number + 1
        self._awaited_ms = now_ms
        self.places.fill(part)
        return Verdict.GO_ON


# ── places ────────────────────────────────────────────────────────────────────────────────────────
# The messages as orders to the keeper of the node's blocks: `holdings`, or `kvstore.stores`.
#
# A **slot** is one holder in one (tenant, space). If a node that has slots sends a snapshot, hidden
# slots are filled beside them; at its end these are shown, and the older ones are void. Deltas that
# come meanwhile are applied to both. A node has PLACES_MAX of either at most: no node takes the
# slots of others.

PLACES_MAX: Final = 1024
"""Places of one node, and as many again while a snapshot of it comes."""


class Holder(msgspec.Struct, frozen=True):
    """Holder of blocks: an engine's own memory (tier hbm), or with an empty `engine` the node's
    tiers."""

    node: str
    engine: str = ""
    rank: int = 0


Scope = Hashable
"""Name that the keeper of the blocks uses for a (tenant, space)."""
Slots = dict[tuple[str, int], dict[Scope, int]]
"""Slots of each (engine, rank), by scope."""


class PlaceSlots(Protocol):
    """Keeper of blocks."""

    def scope(self, tenant: str, space: SpaceId) -> Scope:
        """Name that this keeper uses for a (tenant, space)."""

    def open(self, holder: Holder, scope: Scope, *, is_hidden: bool) -> int | None:
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
    """Slots of one node, and of the snapshot under way."""

    def __init__(self, node: str, kept: PlaceSlots) -> None:
        self._node, self._kept = node, kept
        self.slots: Slots = {}
        self.coming: Slots | None = None
        """Slots of a snapshot that is being received while older ones answer; None: there is
        none."""
        self.is_short = False
        """Whether some of the node's blocks found no room."""

    def resume(self, slots: Slots, coming: Slots | None) -> None:
        """Go on with slots that another replica opened. A snapshot that came in part is dropped,
        and earlier blocks stay."""
        self.slots, self.coming = slots, coming
        self.abandon()

    def fill(self, part: wire.SnapshotPart) -> None:
        """Take a part of a snapshot. After the last one, blocks neither in it nor published
        meanwhile are void."""
        if part.number == 0:
            self.abandon()
            self.is_short = False
            self.coming = {} if self.slots else None
        for stored in part.stored:
            self._store(stored, self.slots if self.coming is None else self.coming)
        if part.is_last and self.coming is not None:
            self._void(*self.slots.values())
            for its in self.coming.values():
                for slot in its.values():
                    self._kept.show(slot)
            self.slots, self.coming = self.coming, None

    def forget(self) -> None:
        """Drop all blocks of the node."""
        self.abandon()
        self._void(*self.slots.values())
        self.slots, self.is_short = {}, False

    def abandon(self) -> None:
        """Drop the snapshot under way."""
        if self.coming is not None:
            self._void(*self.coming.values())
            self.coming = None

    def change(self, change: wire.Change) -> None:
        """Take a change, into the snapshot under way too."""
        both = [self.slots] if self.coming is None else [self.slots, self.coming]
        match change:
            case wire.Stored():
                for slots in both:
                    self._store(change, slots)
            case wire.Removed(engine=engine, rank=rank):
                scope = self._kept.scope(change.tenant, change.space)
                for slots in both:
                    slot = slots.get((engine, rank), {}).get(scope)
                    if slot is not None:
                        self._kept.removed(slot, scope, change.tier, change.keys)
            case wire.Left(engine, rank):
                for slots in both:
                    self._void(slots.pop((engine, rank), {}))

    def _store(self, stored: wire.Stored, slots: Slots) -> None:
        scope, owner = self._kept.scope(stored.tenant, stored.space), (stored.engine, stored.rank)
        slot = slots.get(owner, {}).get(scope)
        if slot is None and sum(map(len, slots.values())) < PLACES_MAX:
            holder, is_hidden = Holder(self._node, *owner), slots is self.coming
            slot = self._kept.open(holder, scope, is_hidden=is_hidden)
        if slot is None:
            self.is_short = True
            return
        slots.setdefault(owner, {})[scope] = slot
        self._kept.stored(slot, scope, stored.tier, stored.keys)

    def _void(self, *gone: dict[Scope, int]) -> None:
        for its in gone:
            for slot in its.values():
                self._kept.void(slot)
