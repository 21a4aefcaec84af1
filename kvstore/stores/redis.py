"""The index in a Redis or Valkey that several replicas share (ADR 10).

    update of a node ─▶ Feed, Places (accepted? which changes?) ─▶ one script a step
    prompt ─▶ one script ─▶ slots and lengths, with the trust of their nodes by the polls

A node has a stream to each replica, and one is heard: that of the replica which wrote its record
last. The others wait until the record no longer changes. A record has a version that each step
names and replaces, so the next step detects a replica that was replaced, or a store that went back
in time, and the node gets a request for a snapshot.

The store may be unreachable, hang, or forget at any time; records without sense count as
unreachable. After the first failure only the poll uses it, ten times a second and within a
deadline, until it answers; updates that come meanwhile are a gap, which the feed detects. Another
epoch voids all state of the replica.

Covers: queries and steps, and their order. Does not cover: connections (`connection`), scripts,
trust (`records`), acceptance of updates (`kvstore.index.feed`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from typing import Any, Final, cast

import msgspec

from kvstore.errors import ProtocolError
from kvstore.index.feed import (
    Body,
    ConnectRefused,
    Event,
    Feed,
    FeedClosed,
    Holder,
    Places,
    Scope,
    Slots,
    Trust,
    Verdict,
)
from kvstore.index.holdings import SLOT_COUNT_MAX, Statistics
from kvstore.index.index import Answer, Match, Member
from kvstore.stores import scripts
from kvstore.stores.address import StoreConfig
from kvstore.stores.connection import DEADLINES, FAILURES, REFUSALS, Deadlines, StoreConnection
from kvstore.stores.records import (
    KeptSlots,
    Record,
    View,
    decode,
    encode,
    polled,
    scope_of,
    slot_name,
)
from kvstore.types import KEY_BYTES, SpaceId, Tier
from kvstore.wire.feed import Delta, FeedBeat, Hello, Registry, SnapshotPart
from kvstore.wire.load import EngineEntry

# ── batch ─────────────────────────────────────────────────────────────────────────────────────────
# Changes of one event, as orders to a shared store (pure): the `PlaceSlots` of a node.
#
# Covers: orders, and their division into scripts. Does not cover: the scripts (`scripts`).

SCRIPT_KEYS_MAX: Final = 1024
"""Most keys of one script, which blocks the whole store: about a millisecond."""

Order = tuple[str, bytes, bytes, bytes]
"""Arguments of one change in the script WRITE: name, slot, tiers or state, scope and keys or
record."""


class StoreBatch:
    """Changes of one event of a node (as `PlaceSlots`), collected until they are taken. `ids`:
    unused slot numbers."""

    def __init__(self, ids: deque[int]) -> None:
        self._ids = ids
        self._orders: list[tuple[int, Order]] = []

    def scope(self, tenant: str, space: SpaceId) -> Scope:
        return scope_of(tenant, space)

    def open(self, holder: Holder, scope: Scope, *, is_hidden: bool) -> int:
        slot = self._ids.popleft()
        self._add(0, "open", slot, b"H" if is_hidden else b"S", encode(holder))
        return slot

    def show(self, slot: int) -> None:
        self._add(0, "show", slot)

    def void(self, slot: int) -> None:
        self._add(0, "void", slot)

    def stored(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        self._say("store", slot, scope, tier, keys)

    def removed(self, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        self._say("remove", slot, scope, tier, keys)

    def take(self) -> list[list[Order]]:
        """The collected orders, divided among scripts, in order; at least one script, maybe
        empty."""
        scripts: list[list[Order]] = [[]]
        count = 0
        for keys, order in self._orders:
            if count and count + keys > SCRIPT_KEYS_MAX:
                scripts.append([])
                count = 0
            scripts[-1].append(order)
            count += max(1, keys)
        self._orders = []
        return scripts

    def _say(self, name: str, slot: int, scope: Scope, tier: Tier, keys: bytes) -> None:
        step = SCRIPT_KEYS_MAX * KEY_BYTES
        for at in range(0, len(keys), step):
            piece = keys[at : at + step]
            mask = b"%d" % (1 << tier)
            self._add(len(piece) // KEY_BYTES, name, slot, mask, cast("bytes", scope) + piece)

    def _add(self, keys: int, name: str, slot: int, what: bytes = b"", blob: bytes = b"") -> None:
        self._orders.append((keys, (name, slot_name(slot), what, blob)))


# ── redis ─────────────────────────────────────────────────────────────────────────────────────────

IDS_AT_ONCE: Final = 256
SWEEPS_AT_ONCE: Final = 4
"""Pieces of a pass over the rows in one tick."""
_BYTES_OF_EPOCH: Final = 16

_log = logging.getLogger(__name__)


class _Link:
    """The newest stream of a node to this replica."""

    def __init__(self, hello: Hello, ids: deque[int]) -> None:
        self.hello = hello
        self.is_open = False
        self.engines: tuple[EngineEntry, ...] = ()
        """Engines of the node. Not in the store: every replica gets them from the node itself."""
        self.feed: Feed | None = None
        """State of the node, if this replica writes its record; None: another replica does, or none
        can."""
        self.batch = StoreBatch(ids)
        """Changes by `feed` that are to be written."""
        self.version = self.kept = b""
        """Version of the record, and the node's places as they are encoded there."""
        self.lock = asyncio.Lock()


class RedisStore(StoreConnection):
    """A shared store as one replica uses it, over its connection. Begins with the first `tick`."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        entry_count_max: int,
        slot_count_max: int = SLOT_COUNT_MAX,
        node_count_max: int = 4096,
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        super().__init__(config, deadlines)
        self._limits = (b"%d" % entry_count_max, b"%d" % slot_count_max)
        self._node_count_max = node_count_max
        self._me = secrets.token_hex(8).encode()
        self._steps = 0
        self._view = View(0)
        self._links: dict[str, _Link] = {}
        self._ids: deque[int] = deque()
        self._epoch = b""
        self._run = ""
        self._sizes = Statistics(0, 0, 0, 0)
        self._void_count = 0
        """Slots to be swept, as of the last poll."""

    def statistics(self) -> Statistics:
        return self._sizes

    def members(self, now_ms: int) -> list[Member]:
        found = self._view.members(now_ms)
        return [msgspec.structs.replace(each, engines=self._engines(each)) for each in found]

    def _engines(self, member: Member) -> tuple[EngineEntry, ...]:
        link = self._links.get(member.node)
        is_its = link is not None and link.hello.incarnation == member.incarnation
        return link.engines if link is not None and is_its else ()

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    async def match(self, tenant: str, space: SpaceId, keys: bytes, now_ms: int) -> Answer:
        if len(keys) % KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes are no keys of {KEY_BYTES} bytes each")
        found: Any = b""
        if keys and not self.is_away:
            try:
                its = self._epoch, scope_of(tenant, space), keys
                found = await self.read(scripts.MATCH, *its)
            except FAILURES as error:
                self.lose(error)
        if self.is_away or found == scripts.OTHER_EPOCH:
            return Answer(Trust.STALE, [])
        trust = max(self._view.trust(now_ms), Trust.CATCHING_UP if self.trouble else Trust.EXACT)
        matches = (self._match(slot, lengths) for slot, lengths in scripts.matched(found))
        if found.startswith(b"1"):  # blocks of the scope were lost
            trust = max(trust, Trust.CATCHING_UP)
        return Answer(trust, [each for each in matches if each is not None])

    def _match(self, slot: bytes, lengths: tuple[int, int, int]) -> Match | None:
        try:
            holder = decode(Holder, slot[2:])
        except ProtocolError:
            return None
        # A node that came since the last poll is not in the view yet: its updates count.
        trust = self._view.trusts.get(holder.node, Trust.CATCHING_UP)
        if trust is None:
            return None
        if slot[1:2] == b"1":
            trust = max(trust, Trust.CATCHING_UP)
        return Match(holder, *lengths, trust)

    # ── words ────────────────────────────────────────────────────────────────────────────────────

    async def hear(self, event: Event, now_ms: int) -> Verdict:
        link = self._links.get(event.node)
        if link is None:
            if not isinstance(event, Hello) or not self._has_room(event.node):
                return Verdict.CLOSE
            link = self._links[event.node] = _Link(event, self._ids)
        async with link.lock:
            match event:
                case Hello():
                    return await self._hello(link, event, now_ms)
                case ConnectRefused():
                    return await self._gone(link, now_ms)
            hello = link.hello
            if (event.incarnation, event.stream) != (hello.incarnation, hello.stream):
                return Verdict.CLOSE
            if isinstance(event, FeedClosed):
                link.is_open = False
            elif not link.is_open:
                return Verdict.CLOSE
            if isinstance(event, Registry):
                link.engines = event.engines
                return Verdict.GO_ON
            return await self._word(link, event, now_ms)

    def _has_room(self, node: str) -> bool:
        known = self._view.nodes.keys() | self._links.keys()
        return node in known or len(known) < self._node_count_max

    async def _hello(self, link: _Link, hello: Hello, now_ms: int) -> Verdict:
        is_same = hello.incarnation == link.hello.incarnation
        if hello is not link.hello and is_same and hello.stream <= link.hello.stream:
            return Verdict.CLOSE
        verdict = Verdict.GO_ON
        if self.is_away:
            link.feed = None
        elif link.feed is not None:
            verdict = await self._say(link, link.feed, hello, now_ms)
        if link.feed is None:
            verdict = await self._claim(link, hello, now_ms)
        if verdict is not Verdict.CLOSE:
            link.engines = link.engines if is_same else ()
            link.hello, link.is_open = hello, True
        return verdict

    async def _word(
        self, link: _Link, word: Delta | FeedBeat | SnapshotPart | FeedClosed, now_ms: int
    ) -> Verdict:
        if self.is_away:
            if not link.is_open:
                link.feed = None
            return Verdict.GO_ON  # and so a gap
        if link.feed is not None:
            return await self._say(link, link.feed, word, now_ms)
        if isinstance(word, FeedClosed):
            return Verdict.GO_ON
        hello = msgspec.structs.replace(link.hello, sequence=word.sequence)
        return await self._claim(link, hello, now_ms)

    async def _gone(self, link: _Link, now_ms: int) -> Verdict:
        if link.feed is not None and not self.is_away:
            try:
                await self._write(scripts.GONE, link.hello.node, link.version)
            except FAILURES as error:
                self.lose(error)
            self._view.gone(link.hello.node, link.version, now_ms)
        return Verdict.GO_ON

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    async def _claim(self, link: _Link, hello: Hello, now_ms: int) -> Verdict:
        """Write this node's record from now on, unless another replica does."""
        row = self._view.nodes.get(hello.node)
        if row is not None and self._step(row.version) < 0:
            is_same = row.body.incarnation == hello.incarnation
            if is_same and row.is_live(now_ms):
                return Verdict.GO_ON
        if self.is_away:
            return Verdict.GO_ON
        try:
            feed = link.feed = await self._taken_over(link)
        except (*FAILURES, ProtocolError) as error:
            self.lose(error)
            return Verdict.GO_ON
        verdict = await self._say(link, feed, hello, now_ms)
        if verdict is Verdict.CLOSE:
            link.feed = None
        return verdict

    async def _taken_over(self, link: _Link) -> Feed:
        """State of a node from its record in the store, for this replica to go on with. Raises
        FAILURES, ProtocolError."""
        node = link.hello.node
        version, body, kept = await self._record(node)
        link.batch = StoreBatch(self._ids)  # without the orders of a claim that came to nothing
        places = Places(node, link.batch)
        link.version, link.kept = version or b"", b""
        if kept is not None:
            found = decode(KeptSlots, kept)
            coming = None if found.coming is None else _slots(found.coming)
            places.resume(_slots(found.slots), coming)
        if version is None or body is None:
            return Feed(places)
        row = self._view.nodes.get(node)
        heard_ms = row.heard_ms if row is not None and row.body.is_open else None
        return Feed.of_another(places, decode(Body, body), heard_ms=heard_ms)

    async def _record(self, node: str) -> list[bytes | None]:
        """Version, body and places of a node's record; None for missing ones. Raises FAILURES."""
        found: list[bytes | None] = await self.ask("HMGET", f"n:{node}", "v", "body", "places")
        return found

    async def _say(self, link: _Link, feed: Feed, event: Event, now_ms: int) -> Verdict:
        """Apply one event of a node whose record this replica writes, and write the result. If the
        store refuses it, this replica gives the record up."""
        try:
            await self._reserve(event)
            verdict = feed.hear(event, now_ms)
            if verdict is Verdict.CLOSE:
                return verdict
            is_taken, refused = await self._flush(link, feed)
            if refused and not feed.body.is_short:
                feed.places.is_short = feed.body.is_short = True
                is_taken, _ = await self._flush(link, feed)
        except FAILURES as error:
            is_taken = False
            self.refuse("words", self.lose(error))
        if not is_taken:
            link.feed = None
            return Verdict.GO_ON  # the next update makes up for it
        self.refuse("words", "")
        self._view.changed(event.node, link.version, msgspec.structs.replace(feed.body), now_ms)
        return verdict

    async def _reserve(self, event: Event) -> None:
        """Reserve slot numbers for an event: two for each change, at most. Raises FAILURES."""
        match event:
            case Delta(changes=told) | SnapshotPart(stored=told):
                count = 2 * len(told)
            case _:
                return
        while len(self._ids) < count:
            wanted = max(count, IDS_AT_ONCE)
            epoch = self._epoch
            last = int(await self.ask("INCRBY", "ids", wanted))
            if epoch == self._epoch:
                self._ids.extend(range(last - wanted + 1, last + 1))

    async def _flush(self, link: _Link, feed: Feed) -> tuple[bool, int]:
        """Write the collected changes of a node in one go. Returns whether the store accepted them,
        and the number of slots that found no room. Raises FAILURES."""
        kept, version, calls = encode(_kept(feed.places)), link.version, []
        its = encode(feed.body), kept if kept != link.kept else b"", *self._limits
        for orders in link.batch.take():
            self._steps += 1
            before, version = version, b"%s.%d" % (self._me, self._steps)
            flat = [each for order in orders for each in order]
            calls.append((self._epoch, link.hello.node, before, version, *its, *flat))
        replies = await self.write_all(scripts.WRITE, calls)
        if min(replies) < 0:
            return False, 0
        link.version, link.kept = version, kept
        return True, sum(replies)

    # ── regular work ─────────────────────────────────────────────────────────────────────────────

    async def tick(self, now_ms: int) -> None:
        try:
            await self._poll(now_ms)
            refusal = await self._tidy(now_ms)
            self.is_back()
        except (*FAILURES, ProtocolError) as error:
            refusal = self.lose(error)
        self.refuse("ticks", refusal)

    async def _tidy(self, now_ms: int) -> str:
        """Sweep void slots, and forget nodes that were silent too long. Returns the reason if the
        store answers, but accepts no writes. Raises FAILURES, ProtocolError."""
        try:
            for _ in range(SWEEPS_AT_ONCE if self._void_count else 0):
                if await self._write(scripts.SWEEP, self._run) <= 0:
                    break
            for node in self._view.lost(now_ms):
                await self._forget(node)
        except REFUSALS as error:
            return self.lose(error)
        return ""

    async def _poll(self, now_ms: int) -> None:
        proposed = secrets.token_hex(_BYTES_OF_EPOCH).encode()
        answer, run, memory_bytes = await self.poll(proposed)
        epoch, void_count, sizes, records = polled(answer)
        if self._run and run != self._run and epoch == self._epoch:
            # After a restart the store may have the state of some time ago.
            await self._write(scripts.RENEW, proposed)
            epoch = proposed
        self._run = run
        if epoch != self._epoch:
            self._epoch = epoch
            self._view = View(now_ms)
            self._ids.clear()
            for link in self._links.values():
                link.feed = None
        self._view.polled({n: self._newest(n, *each) for n, each in records.items()}, now_ms)
        self._void_count = void_count
        self._sizes = msgspec.structs.replace(sizes, memory_bytes=memory_bytes)
        for name in [n for n, li in self._links.items() if not li.is_open and n not in records]:
            if not self._links[name].lock.locked():
                del self._links[name]

    def _newest(self, node: str, version: bytes, body: Body, gone: bytes) -> Record:
        """A polled record, or this replica's own newer write of it."""
        row = self._view.nodes.get(node)
        if row is not None and self._step(row.version) > self._step(version) >= 0:
            return row.version, row.body, gone
        return version, body, gone

    def _step(self, version: bytes) -> int:
        """Number of the step that made this version; -1: of another replica."""
        whose, _, step = version.partition(b".")
        return int(step) if whose == self._me else -1

    async def _forget(self, node: str) -> None:
        version, _, kept = await self._record(node)
        row = self._view.nodes.get(node)
        if row is None or version != row.version:
            return
        places = decode(KeptSlots, kept) if kept is not None else KeptSlots([], None)
        slots = [slot_name(each[3]) for each in (*places.slots, *(places.coming or ()))]
        await self._write(scripts.FORGET, node, version, *slots)
        self._links.pop(node, None)
        _log.info("node %s is forgotten", node)

    async def _write(self, script: scripts.Script, *arguments: bytes | str) -> int:
        (answer,) = await self.write_all(script, [(self._epoch, *arguments)])
        return answer


def _slots(rows: list[tuple[str, int, bytes, int]]) -> Slots:
    slots: Slots = {}
    for engine, rank, scope, slot in rows:
        slots.setdefault((engine, rank), {})[scope] = slot
    return slots


def _kept(places: Places) -> KeptSlots:
    def rows(slots: Slots) -> list[Any]:
        return [(*name, *its) for name, by_scope in slots.items() for its in by_scope.items()]

    return KeptSlots(rows(places.slots), None if places.coming is None else rows(places.coming))
