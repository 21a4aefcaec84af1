"""The node's engine: events in, commands out. Decides everything, touches nothing.

Covers: taking events in order, the messages that each role may send, clearing. Does not cover:
attaching (`sessions`), credits and seals (`stores`), leases (`lookups`), events of the disk tier
(`files`), time (an argument), sockets and memory (`kvstore.node`, `kvstore.tiers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from kvstore import tier_events
from kvstore.engine import events
from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.journal import Journal
from kvstore.engine.moves.arrivals import Arrivals
from kvstore.engine.moves.fetches import Fetches
from kvstore.engine.moves.files import Files
from kvstore.engine.moves.grants import Grants
from kvstore.engine.moves.hbm import HbmCopies
from kvstore.engine.moves.intake import Intake
from kvstore.engine.moves.pushes import Pushes, Transfers
from kvstore.engine.moves.servings import Servings
from kvstore.engine.moves.stores import Stores
from kvstore.engine.moves.writes import Writes
from kvstore.engine.sessions.awaited import Awaited
from kvstore.engine.sessions.lookups import Lookups
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.sessions.sessions import Sessions
from kvstore.engine.state import State, adopt
from kvstore.engine.trust import Scrubs, Switches
from kvstore.engine.why.explain import Explain
from kvstore.engine.why.reasons import Reason
from kvstore.engine.why.report import Snapshots, TierReport
from kvstore.errors import ProtocolError
from kvstore.types import Tier
from kvstore.wire import messages
from kvstore.wire.feed import Stored
from kvstore.wire.load import Learned, within_bounds
from kvstore.wire.peers import GiveBack, Pushed, PushGrant, PushOver, PushRevoke, ServeAsk

__all__ = ["Engine", "EngineConfig"]

CLEAR_ROWS_MAX = 32_768
"""Most rows that one Clear empties, about 10 ms; the caller sends Clear again until fewer are
reported."""
HELD_ROWS_MAX = 16_384
"""Rows of one slice of `held`."""


class Engine(Snapshots):
    """The engine of one node. One thread; only `step` changes its state.

    Each step also writes the state to `journal`, so that another process can go on with it.
    """

    def __init__(self, config: EngineConfig, journal: Journal | None = None) -> None:
        state = State(config, journal)
        super().__init__(state)
        self.config, self.counters = config, state.counters
        self._sessions = Sessions(state)
        self._arrivals = Arrivals(state)
        writes = Writes(state)
        intake = Intake(state, self._arrivals, writes)
        self.files = Files(state, intake, self._arrivals, writes)
        self._stores = Stores(state, intake)
        self._fetches = Fetches(state, intake, self._arrivals)
        self._servings = Servings(state, self.files, self._arrivals)
        self._transfers = Transfers(state)
        beside = state, self.files, self._arrivals, self._transfers
        self._awaited = Awaited(*beside)
        self.grants = Grants(state, intake, self._awaited)
        self._pushes = Pushes(*beside, self._servings)
        self._hbm = HbmCopies(state, state.hbm) if state.hbm is not None else None
        sources = self.files, self._fetches, self._awaited
        self._arrivals.sources = sources
        self._lookups = Lookups(state, *sources, self._arrivals, self._hbm)
        self.switches = Switches(state, self.files)
        self.scrubs = Scrubs(state)
        self.explain = Explain(state)
        """Findings about recent requests: why they hit or missed."""
        self._handlers = self._handlers_of_events()
        """Method for each type of event, and of message in PeerAsked."""
        self._receivers: dict[type, Callable[[Connection, Any], None]] = {
            messages.LeaseAsk: self._lookups.lease,
            messages.Hint: self._lookups.hint,
            messages.Story: self.explain.tell,
            messages.Seal: self._stores.seal,
            messages.Drop: self._stores.drop,
            messages.Distrust: self._stores.distrust,
            messages.Verified: self._stores.verified,
        }
        """Method for each type of message of engines that one part of the engine handles alone."""
        self._clear_from = 0
        """Table row after the last one that a Clear emptied: the next slice begins there."""

    def _handlers_of_events(self) -> dict[type, Callable[[Any], None]]:
        handlers: dict[type, Callable[[Any], None]] = {
            events.Received: self._received,
            events.Ended: lambda event: self._sessions.ended(event.connection),
            events.Exited: lambda event: self._sessions.exited(event.connection),
            events.Ready: self._ready,
            events.Tick: self._tick,
            events.Adopt: partial(adopt, self._state),
            events.Clear: self._cleared,
            tier_events.Scrubbed: self.scrubs.take,
            events.Located: self._fetches.located,
            events.Fetched: self._fetches.fetched,
            events.PrepareBlocks: self._lookups.prepare,
            ServeAsk: self._servings.serve,
            GiveBack: self._servings.returned,
            PushGrant: self._pushes.asked,
            PushRevoke: self._pushes.revoked,
            events.PeerGone: self._peer_gone,
            events.LandingUp: self.grants.transfer_worker_changed,
            Pushed: self.grants.pushed,
            PushOver: self.grants.grant_ended,
            events.Landed: self.grants.landed,
            events.Written: self._pushes.written,
            tier_events.FileKnown: self.files.known,
            tier_events.FileMoved: self.files.moved,
            tier_events.FileGone: self.files.gone,
            tier_events.FileWritten: self.files.written,
            tier_events.FileRead: self.files.read,
            tier_events.FileLate: self.files.late,
            tier_events.FileReclaim: self.files.reclaim,
        }
        if self._hbm is not None:
            handlers[tier_events.Promoted] = self._hbm.promoted
        return handlers

    @property
    def is_behind(self) -> bool:
        """Whether another step is due at once, though no event came: work was left for it."""
        parts = self.files, self._awaited, self._pushes
        return self._arrivals.has_news or any(part.is_behind for part in parts)

    def step(self, events: Iterable[events.Event], now_ns: int) -> list[events.Command]:
        """Take events in order at time `now_ns`; returns commands, in order. The next event is
        drawn from `events` when the one before is done: the caller can end an iterator when time is
        up."""
        state = self._state
        state.now_ns = now_ns
        state.commands = []
        state.hung_up.clear()
        for event in events:
            state.next_event()
            self._take(event)
            state.publish_generations()
        self._arrivals.advance()  # once a step, for all that happened in it
        self.files.advance()
        self._stores.grant_all()
        return self.salvage()

    def _take(self, event: events.Event) -> None:
        its = event.its if isinstance(event, events.PeerAsked) else event
        self._handlers[type(its)](event)

    def _ready(self, event: events.Ready) -> None:
        self._state.slots.ready(event.ready_bytes)
        self._state.credits_due = True

    def _tick(self, event: events.Tick) -> None:
        state = self._state
        state.tick = event
        expired = state.leases.expire(state.now_ns)
        state.counters.leases_expired += len(expired)
        state.slots.retry_starved()
        state.credits_due = True
        state.trail.tick(state)
        state.ages[Tier.DRAM].mark(state.slots.next_stamp, state.now_ns)
        state.ages[Tier.FILE].mark(self.files.next_location, state.now_ns)
        state.curve.tick(state.now_ns)
        self._servings.tick(expired)
        self._pushes.tick()
        self._awaited.tick()
        self.grants.tick()
        self._empty_what_is_off()

    def _cleared(self, event: events.Clear) -> None:
        space, tenant = event.space, event.tenant
        count = self._clear(space, tenant, Reason.CLEARED)
        if count < CLEAR_ROWS_MAX:
            self.files.void(tenant, space)
            self.switches.clear(tenant, space)
        self._state.publish_generations()
        self._state.say(events.Cleared(count))

    def _peer_gone(self, event: events.PeerGone) -> None:
        self._pushes.gone(event)
        self._servings.gone(event)

    def _received(self, event: events.Received) -> None:
        id, message = event.connection, event.message
        connection = self._state.connections.get(id)
        if connection is None and id in self._state.hung_up:
            return
        if isinstance(message, messages.HelloScheduler | messages.HelloRank):
            if connection is None:
                self._sessions.hello(id, message, event.process)
            else:
                self._sessions.hang_up(connection, "a second Hello on one connection")
        elif connection is None:
            self._state.counters.protocol_refusals += 1
            self._state.say(events.Hangup(id, "the first datagram must be a Hello"))
            self._state.say(events.Release(id))
        elif connection.ended:
            pass  # queued before the end; its session is over
        else:
            try:
                self._dispatch(connection, message)
            except ProtocolError as objection:
                self._sessions.hang_up(connection, str(objection))

    def _dispatch(self, connection: Connection, message: messages.EngineMessage) -> None:
        """Handle a message of an attached process. Raises ProtocolError."""
        if (connection.role == "rank") != isinstance(message, messages.RankMessage):
            raise ProtocolError(f"{type(message).__name__} from a {connection.role}")
        state, session = self._state, connection.owner.open_session
        match message:
            case messages.Compared():
                self.switches.take(connection, message)
                self._empty_what_is_off()
            case messages.LeaseRenew(leases=leases):
                state.leases.renew(session, leases, state.now_ns)
            case messages.LeaseRelease(leases=leases):
                state.credits_due |= state.slots.any_starved
                state.leases.release(session, leases)
            case messages.Measured():
                if session:
                    state.paces.told(*connection.owner.groups[0].asker.address, message)
            case messages.Unserved(reason=reason):
                connection.owner.unserved = reason
            case messages.PushExpect():
                self._awaited.expect(connection, message)
                self.grants.give_room()
            case messages.PushCancel(transfer=transfer):
                self._awaited.cancel(connection, transfer)
            case messages.PushOpen():
                self._transfers.open(connection, message)
                self._prefill_named(connection, message.transfer)
            case messages.PushClose():
                self._transfers.close(connection, message)
                self._prefill_named(connection, message.transfer)
            case messages.Quiet(session=session):
                self._sessions.quiet(connection, session)
            case messages.Pinned(size_bytes=pinned, trouble=trouble):
                connection.pinned_bytes, connection.trouble = pinned, trouble
            case _:
                self._receivers[type(message)](connection, message)

    def _prefill_named(self, connection: Connection, transfer: str) -> None:
        """A PushOpen or PushClose came: wake pushes and expectations of this transfer, which wait
        for such a message and not for a timer."""
        for side in (self._pushes, self._awaited):
            side.prefill_changed(connection.owner.key[0], transfer)

    # ── all blocks ───────────────────────────────────────────────────────────────────────────────

    def _empty_what_is_off(self) -> None:
        """Clear one slice of a space that a shadow check switched off, if any is left to clear."""
        address = self.switches.to_empty()
        if address is not None:
            tenant, space = address
            if self._clear(space, tenant, Reason.DIVERGED) < CLEAR_ROWS_MAX:
                self.switches.emptied(address)
            self._state.publish_generations()

    def _clear(self, space: bytes | None, tenant: str | None, why: Reason) -> int:
        """Forget up to CLEAR_ROWS_MAX blocks of a space and tenant (None: of any) in every tier;
        returns how many. Granted slots stay granted; readers see generations change."""
        residency = self._state.residency
        scopes = residency.scopes_of(tenant, space)
        rows = residency.rows_in(scopes, CLEAR_ROWS_MAX, begin=self._clear_from)
        if len(rows):
            self._clear_from = int(rows[-1]) + 1
        in_file = rows[residency.file[rows] != 0]
        words = residency.words(rows)
        stamp = self._state.stamp(why)
        residency.drop_file(in_file, stamp)
        self._state.empty(words[words >= 0], stamp)
        self._fetches.void(tenant, space)
        self.grants.void(tenant, space)
        return len(rows)

    def salvage(self) -> list[events.Command]:
        """Commands that were decided and not returned yet, raised generations included. If `step`
        raised, a slot could be reused unnoticed by its readers without these."""
        self._state.publish_generations()
        self._state.tell_changes()
        commands, self._state.commands = self._state.commands, []
        return commands

    def learned(self) -> Learned:
        """Measured paces of disk and spaces, to be kept for the next start."""
        disk = self.files.pace.measured_ns_per_mib or self.config.learned.disk_ns_per_mib
        return within_bounds(Learned(disk, self._state.paces.all()))

    def spent_bytes(self) -> int:
        """Used part of the day's budget of disk writes; 0 without one."""
        return self.files.writes.spent_bytes()

    # ── looking in ───────────────────────────────────────────────────────────────────────────────

    def tiers(self) -> list[TierReport]:
        """One row per tier."""
        return self.tier_rows(self.files.writes.budget_left_bytes(), self.scrubs.tiers)

    def held(self, begin_row: int) -> tuple[list[events.Changed], int]:
        """Blocks that the tiers hold, one slice per call: from `begin_row` on. Returns the slice
        and the row of the next one, -1 after the last. `Changed` reports changes between two
        slices."""
        held, next_row = self._state.residency.held(begin_row, HELD_ROWS_MAX)
        return list(self._state.in_words(held)), next_row

    def offered(self, begin_row: int) -> tuple[list[Stored], int]:
        """Blocks that peers can fetch, in slices as in `held`: the slice and the next row, -1 after
        the last. `BlocksChanged` reports changes between two slices."""
        held, next_row = self._state.residency.held(begin_row, HELD_ROWS_MAX)
        return self._state.offers.held(held), next_row

    def push_counts(self) -> dict[tuple[str], int]:
        """Number of pushes under way, by (side,) of this node in them: decode or prefill."""
        return {("decode",): len(self._awaited), ("prefill",): len(self._pushes)}
