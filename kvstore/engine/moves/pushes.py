"""Blocks that this node writes to others, as they are sealed here (ADR 12).

    PushGrant ─▶ the next key is in dram ─▶ pinned ─WritePush─▶ Written ─▶ AnswerPeer: Pushed …
                    └─ all were pushed, or nothing more will come ─▶ AnswerPeer: PushOver

Rules. 1: blocks go in the order of the grant. 2: the last word of a grant comes when its last write
has ended. 3: a block counts as pushed if its generation was the same after the write. 4: all is
bounded: ASKS_MAX grants of a peer, JOBS_MAX writes of each. 5: a grant is looked at when its next
block is sealed, when its transfer is named, and each LOOK_NS, within a budget per tick.

Covers: transfers that engines here prefill, grants of other nodes, writes; when either side of a
push is looked at (`PushSides`, also of `sessions.awaited`). Does not cover: room on the other node
(`grants` there), moving bytes (`kvstore.peers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvstore.engine import events
from kvstore.engine.agenda import LOOK_COST, LOOK_COST_MAX, Agenda, Groups
from kvstore.engine.memory.residency import Run, run_of
from kvstore.engine.memory.table import Keys
from kvstore.engine.moves.arrivals import Arrivals, Name
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.servings import WRITE_LEASE, Servings
from kvstore.engine.sessions.leases import Lease
from kvstore.engine.sessions.owners import Asker, Connection
from kvstore.engine.state import State
from kvstore.engine.why.reasons import PushReport, PushTimes
from kvstore.types import CHECKSUM_BYTES, SpaceId
from kvstore.units import MIB, NS_PER_MS, NS_PER_S
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX, PushClose, PushOpen, keys_array
from kvstore.wire.peers import Pushed, PushGrant, PushOver, PushRevoke
from kvstore.wire.transfer_worker import REASON_CHARS_MAX

# ── transfers ─────────────────────────────────────────────────────────────────────────────────────
# Requests that engines of this node prefill: how long others wait for blocks that are not here.
#
#     PushOpen ─▶ open ──PushClose──▶ closed, remembered for a while
#                   └── the engine's session ends: closed, with that reason
#
# Which blocks are moved, and where to, is decided by keys.

TRANSFERS_MAX = 1024
"""Transfers of one engine; one more makes it forget another, if possible one that is closed."""
ALL_MAX = 16 * TRANSFERS_MAX
"""Transfers of all engines; one more makes the node forget a quarter: those of engines that are
gone, then those that are closed, then the oldest."""
UNKNOWN_NS = 2 * NS_PER_S
"""How long others wait for a transfer that no engine has named: both legs of a request are
dispatched together, and the prefill engine may name the transfer late."""
SEALS_NS = NS_PER_S // 4
"""How long after PushClose blocks may still come: seals come by other sockets and may be handled
later."""
EVER: int = 1 << 63


class _Prefill(msgspec.Struct):
    connection: Connection
    session: int
    addresses: frozenset[tuple[str, SpaceId]]
    """(tenant, space) of the engine's groups."""
    node: str
    closed_ns: int = 0
    """When the transfer was closed; 0: it is open."""
    reason: str = ""


class Patience(msgspec.Struct, frozen=True):
    """Time until which blocks of a transfer may still come, and the reason why none come after
    it."""

    until_ns: int
    reason: str


class Transfers:
    """Transfers that engines of this node prefill, by (tenant, name), the oldest first."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._transfers: dict[tuple[str, str], _Prefill] = {}
        self._names = Groups[int, tuple[str, str]]()
        """Names of transfers by session, in the same order."""

    def open(self, connection: Connection, message: PushOpen) -> None:
        """An engine computes blocks of this transfer."""
        owner = connection.owner
        if not owner.open_session:
            return
        addresses = frozenset(group.asker.address for group in owner.groups)
        name = (owner.groups[0].asker.tenant, message.transfer)
        session = owner.open_session
        self._forget(name)
        self._transfers[name] = _Prefill(connection, session, addresses, message.node)
        if self._names.count(session) >= TRANSFERS_MAX:
            own = self._names.of(session)
            closed = (each for each in own if self._transfers[each].closed_ns)
            self._forget(next(closed, own[0]))
        self._names.add(name, session)
        if len(self._transfers) > ALL_MAX:
            for other, _ in sorted(self._transfers.items(), key=_worth)[: ALL_MAX // 4]:
                self._forget(other)

    def _forget(self, name: tuple[str, str]) -> None:
        its = self._transfers.pop(name, None)
        if its is not None:
            self._names.remove(name, its.session)

    def close(self, connection: Connection, message: PushClose) -> None:
        """Record that the engine will seal no more blocks of this transfer."""
        if connection.owner.open_session:
            name = (connection.owner.groups[0].asker.tenant, message.transfer)
            its = self._transfers.get(name)
            if its is not None and its.connection is connection and not its.closed_ns:
                its.closed_ns, its.reason = self._state.now_ns, message.reason

    def patience(
        self, address: tuple[str, SpaceId], transfer: str, node: str, since_ns: int
    ) -> Patience:
        """How long a decode node that has waited since `since_ns` should wait for blocks of this
        transfer and (tenant, space)."""
        its = self._transfers.get((address[0], transfer))
        if its is None:
            return Patience(since_ns + UNKNOWN_NS, "no engine here prefills it")
        if address not in its.addresses:
            return Patience(
                0, "the prefill engine has another space: model, version, format or weights differ"
            )
        if its.node not in ("", node):
            return Patience(0, f"its decode node is {its.node}")
        if not its.closed_ns and its.connection.owner.open_session != its.session:
            its.closed_ns, its.reason = self._state.now_ns, "the prefill engine is gone"
        if not its.closed_ns:
            return Patience(EVER, "")
        if its.reason:
            return Patience(its.closed_ns, its.reason)
        return Patience(
            its.closed_ns + SEALS_NS,
            "not all of its blocks were stored there, or were evicted since",
        )

    def computed_ns(self, tenant: str, transfer: str) -> int:
        """When the engine of this transfer last sealed blocks, of any request: it may have a long
        queue. 0: it has sealed none, or no engine prefills the transfer."""
        its = self._transfers.get((tenant, transfer))
        return its.connection.owner.sealed_ns if its is not None else 0


def _worth(item: tuple[object, _Prefill]) -> int:
    """Sort key of a transfer: 0 for those of engines that are gone, 1 for closed ones, 2 for open
    ones."""
    its = item[1]
    if its.connection.owner.open_session != its.session:
        return 0
    return 1 if its.closed_ns else 2


# ── sides ─────────────────────────────────────────────────────────────────────────────────────────
# What waits for blocks of a transfer: grants of other nodes here, expectations in `awaited`.


class PushSide(msgspec.Struct, eq=False, kw_only=True):
    """One side of a push."""

    times: PushTimes
    until_ns: int
    """Deadline."""
    is_called: bool = True
    """Whether to search for its blocks at the next look: some may be here that no watch reports, or
    none will come any more."""
    reason: str | None = None
    """Why it has ended; empty: all its blocks came, or were written; None: it has not ended."""


_Side = TypeVar("_Side", bound=PushSide)
SideName = tuple[int | str, ...]


class PushSides(ABC, Generic[_Side]):
    """Sides of pushes, each looked at when its time has come or its transfer is named, within a
    budget from one tick to the next."""

    def __init__(
        self, state: State, files: Files, arrivals: Arrivals, transfers: Transfers
    ) -> None:
        self._state, self._files, self._arrivals = state, files, arrivals
        self._transfers = transfers
        self.named = Groups[SideName, _Side]()
        """All of them, by name; a grant that has ended until its last write has ended, too."""
        self.agenda = Agenda[_Side]()
        self.budget = LOOK_COST_MAX
        """Cost of looks that may still be spent before the next tick, in keys."""

    @property
    def is_behind(self) -> bool:
        """Whether the budget is spent, so that the next tick is due at once."""
        return self.budget <= 0

    def prefill_changed(self, tenant: str, transfer: str) -> None:
        """A PushOpen or PushClose of this transfer came: look at what waits for it. The end of its
        engine is noticed at the next regular look."""
        for its in self.named.of((tenant, transfer)):
            its.is_called = True
            self.agenda.put(its, self._state.now_ns)
        self._look_at_due()

    def tick(self) -> None:
        """Look at those that are due, with a fresh budget."""
        self.budget = LOOK_COST_MAX
        self._look_at_due()

    def _look_at_due(self) -> None:
        while self.budget > 0 and (its := self.agenda.take(self._state.now_ns)):
            self.budget -= LOOK_COST
            self._look_at(its)

    @abstractmethod
    def _look_at(self, its: _Side) -> None:
        """Go on with it or end it, or set the time of its next look."""

    def _report(
        self, tenant: str, transfer: str, times: PushTimes, *, reason: str, **its: Any
    ) -> None:
        """Count and record a push that has ended. `its`: other fields of its PushReport."""
        self._state.counters.pushes_cut_short += bool(reason)
        report = PushReport(reason=reason, **its | times.as_us(self._state.now_ns))
        self._state.trail.pushed(tenant, transfer, report)


# ── pushes ────────────────────────────────────────────────────────────────────────────────────────

WRITE_BYTES: Final = 8 * MIB
"""Size of one write: the other node verifies it while the next one moves."""
JOBS_MAX: Final = 4
"""Writes of one grant at a time."""
ASKS_MAX: Final = 64
"""Grants of one peer."""
NEWS_NS: Final = 2 * NS_PER_S
"""Shortest time between two messages that the engine computes other requests, sent while it has
stored no block of the grant yet."""
LOOK_NS: Final = NEWS_NS // 4
"""Time between two checks whether the engine computes."""


class _Ask(PushSide, eq=False):
    """A grant of another node, which waits for blocks of this one."""

    peer: int
    node: str
    its: PushGrant
    address: tuple[str, SpaceId]
    keys: Keys
    said_ns: int
    """When the last message about this grant was sent to the other node."""
    next: int = 0
    """Number of blocks that were written, or are being written."""
    pushed: int = 0
    """Blocks that were reported to the other node."""
    jobs: int = 0
    """Writes under way."""
    is_quiet: bool = True
    """Whether nothing may still be written for the grant: no write failed."""
    read_first: int = -1
    read_ns: int = 0
    """When the disk was last asked for blocks of this grant, from number `read_first` on."""

    def try_read(self, first: int, now_ns: int) -> bool:
        """Note that the disk is asked for blocks from number `first` on. Returns False if that was
        done less than LOOK_NS ago: a read that fails would be repeated at once."""
        if first == self.read_first and now_ns < self.read_ns + LOOK_NS:
            return False
        self.read_first, self.read_ns = first, now_ns
        return True

    @property
    def name(self) -> Name:
        """Name of its watch in `arrivals`, different from those of servings."""
        return -self.peer, WRITE_LEASE + self.its.grant

    @property
    def names(self) -> tuple[SideName, ...]:
        """Its (peer, grant), its peer and its (tenant, transfer), by which it is found."""
        transfer = self.address[0], self.its.transfer
        return (self.peer, self.its.grant), (self.peer,), transfer


class _PushWrite(msgspec.Struct, frozen=True):
    ask: _Ask
    first: int
    asker: Asker
    lease: Lease
    checksums: bytes


class Pushes(PushSides[_Ask]):
    """All grants of other nodes, by (peer, grant)."""

    def __init__(
        self, state: State, files: Files, arrivals: Arrivals, transfers: Transfers, its: Servings
    ) -> None:
        """`its`: what finds the shards to write."""
        super().__init__(state, files, arrivals, transfers)
        self._servings = its
        self._writes: dict[int, _PushWrite] = {}

    def asked(self, event: events.PeerAsked[PushGrant]) -> None:
        """A decode node grants extents: write the blocks that are here, and wait for the rest."""
        state, its, name = self._state, event.its, (event.peer, event.its.grant)
        if name in self.named or self.named.count((event.peer,)) >= ASKS_MAX:
            over = PushOver(its.grant, its.epoch, "too many grants of one node", is_quiet=True)
            state.say(events.AnswerPeer(event.peer, over))
            return
        keys = keys_array(its.keys)[:KEYS_PER_DATAGRAM_MAX].copy()
        ask = _Ask(
            *(event.peer, event.node, its, (its.tenant, its.space), keys, state.now_ns),
            times=PushTimes(state.now_ns),
            until_ns=state.now_ns + its.deadline_ms * NS_PER_MS,
        )
        self.named.add(ask, *ask.names)
        self._look_at(ask)

    def _go_on(self, ask: _Ask) -> None:
        """Write the blocks of a grant that are here, and watch for the next one."""
        self._arrivals.look(ask.name, lambda: self._look(ask))

    def _look(self, ask: _Ask) -> Keys:
        """Begin to write the leading blocks of the rest that are in dram, and to read more from
        disk. Returns the keys that are still waited for."""
        nothing = ask.keys[:0]
        rest = ask.keys[ask.next :]
        if ask.reason is not None or not len(rest):
            return nothing  # all of it is on its way: nothing is waited for
        self.budget -= len(rest)
        found = self._servings.best(ask.address, rest)
        why = self._impatience(ask, is_here=found is not None)
        if found is not None and why is None:
            asker, rows = found
            run = run_of(self._state.residency, rows)
            if run.repeats():
                why = "a grant that names a key twice"
            else:
                ask.is_called = run.count < rows.shape[1]
                self._write(ask, asker, run)
                # Only now: what is read from disk may take the room of what is not pinned.
                first = len(ask.keys) - len(rest) + run.count
                if run.count < rows.shape[1] and ask.try_read(first, self._state.now_ns):
                    its = rest[run.count : rows.shape[1]]
                    self._files.promote(asker, its, held=run.rows(), name=ask.name)
        if why is not None:
            self._end(ask, why)
            self._settle(ask)
            return nothing
        return ask.keys[ask.next :]

    def _impatience(self, ask: _Ask, *, is_here: bool) -> str | None:
        """Why the grant waits no longer; None: it waits. `is_here`: its next block is on this
        node."""
        now_ns = self._state.now_ns
        if now_ns >= ask.until_ns:
            return "its deadline has passed"
        if self._state.is_off(*ask.address):
            return "its space is switched off"
        patience = self._patience(ask)
        # A block that is here is written, whatever became of its transfer.
        waits = now_ns < patience.until_ns or (is_here and patience.until_ns)
        return None if waits else patience.reason

    def _patience(self, ask: _Ask) -> Patience:
        its = ask.address, ask.its.transfer, ask.node, ask.times.since_ns
        return self._transfers.patience(*its)

    def _write(self, ask: _Ask, asker: Asker, run: Run) -> None:
        state, shards = self._state, len(asker.shards)
        account = state.slots.pins.join_node(ask.peer)
        per_write = max(1, WRITE_BYTES // sum(asker.block_bytes))
        words, sums, at = run.words(), run.every_checksum(state.residency) if run.count else None, 0
        while at < run.count and ask.jobs < JOBS_MAX:
            piece = words[at * shards : min(at + per_write, run.count) * shards]
            count = state.leases.fitting(-ask.peer, account, piece, shards)
            job = next(state.numbers)
            if not count or not state.leases.may_add(-ask.peer, WRITE_LEASE + job):
                state.counters.pins_refused += 1
                ask.is_called = True
                return
            assert sums is not None
            piece = piece[: count * shards]
            name = -ask.peer, WRITE_LEASE + job
            lease = state.leases.add(*name, piece, state.now_ns, account, shards)
            checksums = sums[at * shards : (at + count) * shards].astype("<u8").tobytes()
            self._writes[job] = _PushWrite(ask, ask.next, asker, lease, checksums)
            blocks = ask.next, asker.block_bytes, state.slots.slots_of(piece)
            state.say(events.WritePush(job, ask.peer, ask.node, ask.its, *blocks))
            ask.next += count
            ask.jobs += 1
            at += count

    def written(self, event: events.Written) -> None:
        """A write has ended: report to the other node which blocks are there, and go on."""
        state, write = self._state, self._writes.pop(event.job)
        ask = write.ask
        ask.jobs -= 1
        whole = write.lease.intact(state.slots)
        state.leases.release(-ask.peer, [WRITE_LEASE + event.job])
        state.credits_due |= state.slots.any_starved
        count = len(whole) if whole.all() else int(whole.argmin())
        if event.trouble:
            ask.is_quiet = False
            self._end(ask, event.trouble)
        else:
            if count and self._has(ask):
                self._say_pushed(ask, write, count)
            if count < len(whole):
                self._end(ask, "a block was evicted while it was pushed")
        if ask.reason is None:
            self._go_on(ask)
        self._settle(ask)

    def _say_pushed(self, ask: _Ask, write: _PushWrite, count: int) -> None:
        counters, asker = self._state.counters, write.asker
        shards, block_bytes = asker.shards, asker.block_bytes
        counters.pushed_blocks += count
        ask.pushed += count
        ask.times.moved(self._state.now_ns)
        counters.pushed_bytes += count * sum(block_bytes)
        checksums = write.checksums[: count * len(shards) * CHECKSUM_BYTES]
        self._say(ask, write.first, shards=shards, block_bytes=block_bytes, checksums=checksums)

    def _say_news(self, ask: _Ask) -> None:
        """Send a message without blocks if the engine computes other requests, so that the other
        node does not take a long queue for an engine that hangs. At most once per NEWS_NS."""
        computed_ns = self._transfers.computed_ns(ask.address[0], ask.its.transfer)
        is_time = self._state.now_ns >= ask.said_ns + NEWS_NS
        if ask.reason is None and is_time and computed_ns > ask.said_ns:
            self._say(ask, ask.next)

    def _say(self, ask: _Ask, first: int, **blocks: Any) -> None:
        """Send Pushed. `blocks`: its fields about the blocks that are there."""
        ask.said_ns = self._state.now_ns
        word = Pushed(grant=ask.its.grant, epoch=ask.its.epoch, first=first, **blocks)
        self._state.say(events.AnswerPeer(ask.peer, word))

    def revoked(self, event: events.PeerAsked[PushRevoke]) -> None:
        """The other node takes its grant back."""
        ask = self.named.first((event.peer, event.its.grant))
        if ask is not None:
            self._end(ask, "it was taken back")
            self._settle(ask)

    def gone(self, event: events.PeerGone) -> None:
        """The session with a peer has ended, and with it the peer's grants; writes under way end by
        themselves."""
        for ask in self.named.of((event.peer,)):
            self._end(ask, "the session has ended")
            self.named.remove(ask, *ask.names)

    def _look_at(self, ask: _Ask) -> None:
        now_ns = self._state.now_ns
        until_ns = min(ask.until_ns, self._patience(ask).until_ns)
        if ask.is_called or now_ns >= until_ns or self._state.is_off(*ask.address):
            ask.is_called = False
            self._go_on(ask)
        self._say_news(ask)
        self._settle(ask)
        if ask.reason is None:
            look_ns = now_ns + LOOK_NS
            self.agenda.put(ask, min(until_ns, look_ns) if until_ns > now_ns else look_ns)

    def _end(self, ask: _Ask, reason: str) -> None:
        if ask.reason is None:
            ask.reason = reason
            self._arrivals.unwatch(ask.name)
            self.agenda.drop(ask)

    def _has(self, ask: _Ask) -> bool:
        """Whether the grant is still known here: its peer may give another one the same number."""
        return self.named.first(ask.names[0]) is ask

    def _settle(self, ask: _Ask) -> None:
        """Close a grant that has ended and has no write under way: send PushOver and report it. A
        grant whose blocks are all written ends here."""
        if ask.reason is None and ask.next == len(ask.keys) and not ask.jobs:
            self._end(ask, "")
        if ask.reason is None or ask.jobs or not self._has(ask):
            return
        self.named.remove(ask, *ask.names)
        reason = ask.reason[:REASON_CHARS_MAX]
        over = PushOver(ask.its.grant, ask.its.epoch, reason, ask.is_quiet)
        self._state.say(events.AnswerPeer(ask.peer, over))
        self._report(
            *(ask.address[0], ask.its.transfer, ask.times),
            side="prefill",
            node=ask.node,
            blocks=len(ask.keys),
            pushed=ask.pushed,
            reason=ask.reason,
        )

    def __len__(self) -> int:
        return sum(self.named.count(name) for name in self.named if len(name) == 1)  # by peer
