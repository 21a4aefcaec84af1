"""The loop of a node: one thread that reads sockets, steps the engine and carries out commands.

    epoll ─▶ Attach.read ─▶ events ─▶ Engine.step ─▶ commands ─▶ Executor ─▶ tier, sockets
      ▲                                                              │
      └── wake-up: queries of other threads            events ◀──────┘

Covers: whose turn it is, heartbeat, ticks, queries from other threads, the order of commands that
safety asks for (generations before every send), and the broad excepts of the node. Does not cover:
what anything means (`kvstore.engine`), sockets (`kvstore.node.attach`). Everything that touches
engine, executor or sockets runs in this loop; other threads come in through `query` and `clear`
only.

One connection's datagrams are one step, so a failure in them is that connection's alone: it is
logged once per place, counted, and the connection is hung up. Steps are cut by time: the engine
takes events from the socket until STEP_NS are spent, and sources of one kind (`turns`) are served
for KIND_NS; what is left waits in its socket for the next round, which begins with those that took
least. The heart beats between any two events, so it is as late as the costliest one takes.

Failures of a command come back as events for the next step, never as a call into the engine.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore.arena import Arena
from kvstore.engine import events as core
from kvstore.engine.engine import CLEAR_ROWS_MAX, Engine
from kvstore.engine.events import Command, Event
from kvstore.engine.why.findings import SPACE_DIGITS
from kvstore.errors import KVStoreError, NodeBusy
from kvstore.mailbox import Mailbox
from kvstore.node.attach import Attach, Sent
from kvstore.node.files import FileEnd
from kvstore.node.turns import ThreadPriority, TurnKind, TurnSource
from kvstore.obs.metrics import Timings
from kvstore.ports import Clock, Memory
from kvstore.tier_events import Promote, RaiseGenerations, Shown
from kvstore.types import ConnectionId, Tier
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire.feed import Removed, Stored
from kvstore.wire.messages import encode

if TYPE_CHECKING:
    from kvstore.node.publish import Publisher
    from kvstore.node.traces import NodeTraces
    from kvstore.peers.member import ClusterMember, Exchange
    from kvstore.tiers.hbm import HbmTier


BEAT_NS: Final = 20 * NS_PER_MS
"""Engines call a heartbeat older than 250 ms dead; the protocol asks for one every 50 ms."""
TICK_NS: Final = 100 * NS_PER_MS
STEP_NS: Final = 2 * NS_PER_MS
"""No further event is taken into a step of this age."""
KIND_NS: Final = 4 * NS_PER_MS
"""Time in a round after which no further source of the same kind is served."""
SPIN_NS: Final = 50_000
"""Time after a datagram for which the loop looks for the next one before it sleeps: a hint is
followed by a lookup, and waking up costs a lookup a quarter of its time."""
QUERY_COUNT_MAX: Final = 64
RECOVERIES_MAX: Final = 4
"""Failures one after the other, each in the work that the one before left. Then the node ends: its
commitments are no longer known."""
GAP_NS, GAPS = 5 * NS_PER_S, 12
"""The largest gap between two heartbeats is kept for each of the last GAPS intervals of GAP_NS: for
a minute."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class StepFailed(KVStoreError):
    """The loop could not carry out an order, logged why, and goes on."""


class NotDurable(KVStoreError):
    """Blocks were forgotten, but a restart of the node may bring those on disk back."""


class DriverCounters:
    """Counters of the loop since the start; read by /metrics through `Driver.query`."""

    def __init__(self) -> None:
        self.steps = Timings()
        self.failures = 0
        self.queries = 0
        self._gaps: deque[tuple[int, int]] = deque(maxlen=GAPS)

    def beat(self, gap_ns: int, now_ns: int) -> None:
        """Count a heartbeat at `now_ns`, `gap_ns` after the one before."""
        if not self._gaps or now_ns - self._gaps[-1][0] >= GAP_NS:
            self._gaps.append((now_ns, 0))
        begin_ns, most_ns = self._gaps[-1]
        self._gaps[-1] = begin_ns, max(most_ns, gap_ns)

    @property
    def beat_gap_ns_max(self) -> int:
        """Longest gap between two heartbeats of the last minute."""
        return max((gap_ns for _, gap_ns in self._gaps), default=0)


class _Query(NamedTuple):
    """A call that another thread wants done on the loop."""

    future: concurrent.futures.Future[object]
    call: Callable[[], object]
    steps: bool
    """Whether it steps the engine: a failure is then the node's, else only the caller's."""


class Driver:
    """Runs one node until `stop`."""

    def __init__(self, engine: Engine, executor: Executor, clock: Clock) -> None:
        """`executor` has the sockets and tiers that the loop serves."""
        attach, files, hbm = executor.attach, executor.files, executor.hbm
        self.counters = DriverCounters()
        self.executor = executor
        self._engine, self._clock = engine, clock
        self._tier, self._attach, self._files = executor.tier, attach, files
        self._beat_ns = 0
        self._tick_ns = 0
        self._spin_until_ns = 0
        self._slept_ns = 0
        self._poisoned = False
        self._failed_places: set[str] = set()
        self._queries = Mailbox[_Query](QUERY_COUNT_MAX)
        attach.watch(self._queries.fileno(), TurnSource(TurnKind.WAKE, None, self._answer))
        if files is not None:
            attach.watch(files.tier.fileno(), TurnSource(TurnKind.FILES, None, files.read))
        if hbm is not None:
            source = TurnSource(TurnKind.FILES, None, lambda _: hbm.take_events())
            attach.watch(hbm.fileno(), source)
        if (peers := executor.exchange) is not None:
            attach.watch(peers.fileno(), TurnSource(TurnKind.FILES, None, peers.read))

    # ── from any thread ──────────────────────────────────────────────────────────────────────────

    def stop(self) -> None:
        """End `run` soon. Safe in a signal handler."""
        self._queries.end()

    @property
    def has_ended(self) -> bool:
        """Whether `stop` was called."""
        return self._queries.has_ended

    def query(self, ask: Callable[[Engine], _T], *, timeout_s: float) -> _T:
        """Run `ask` on the loop, between two steps, and return its answer.

        Raises:
            NodeBusy: no answer within `timeout_s`, or QUERY_COUNT_MAX queries wait already.
        """
        return self._on_loop(lambda: ask(self._engine), timeout_s)

    def tell(self, event: Event, *, timeout_s: float) -> None:
        """Let the engine take an event that another thread brings.

        Raises:
            NodeBusy: it was not taken within `timeout_s`, or it is not known whether it was.
            StepFailed: the step failed.
        """
        try:
            self._on_loop(lambda: self._step([event]), timeout_s, steps=True)
        except NodeBusy:
            raise
        except Exception as error:
            raise StepFailed("the node failed at an event") from error

    def clear(self, *, space: bytes | None, tenant: str | None, timeout_s: float) -> int:
        """Forget blocks: of a space, a tenant, both, or all. Returns how many.

        A slice at a time, so that the loop serves engines in between; what they store meanwhile
        may be forgotten too.

        Raises:
            NodeBusy: a slice was not done within `timeout_s`. Asking again goes on from there.
            NotDurable: all is forgotten, but the disk did not take note of it within `timeout_s`.
        """
        cleared_blocks = 0
        while True:
            count = self._on_loop(
                lambda: self._step([core.Clear(space=space, tenant=tenant)]), timeout_s, steps=True
            )
            cleared_blocks += count
            if count < CLEAR_ROWS_MAX:
                break
        if self._files is not None and not self._files.tier.wait_for_voids(timeout_s):
            raise NotDurable(
                f"{cleared_blocks} blocks are forgotten, but the disk of {self._files.tier.path} is"
                " full, failing or slow and did not record it: a restart of the node would bring"
                " back what is on it; mend that and clear again, or stop the node and empty the"
                " directory"
            )
        return cleared_blocks

    def _on_loop(self, call: Callable[[], _T], timeout_s: float, *, steps: bool = False) -> _T:
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        if not self._queries.put(_Query(future, call, steps)):
            raise NodeBusy("the node is busy: ask again later")
        try:
            return future.result(timeout_s)  # type: ignore[return-value]
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise NodeBusy(f"the node did not answer within {timeout_s} s") from None

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────

    def begin(self, adopt: core.Adopt | None) -> None:
        """Step the engine before `run`: memory is ready, and what an earlier process left goes on.
        The engine gets the time by this, which queries may need before any other event."""
        ready = core.Ready(self._tier.ready_bytes)
        self._step([ready] if adopt is None else [ready, adopt])

    def run(self, place: ThreadPriority | None = None) -> None:
        """Serve until `stop`. `place`: priority of the calling thread.

        Raises:
            Poisoned: the tier and the engine disagree; no engine may trust this node any more.
        """
        self._beat_ns = self._clock.now_ns()
        self._tier.beat(self._beat_ns)
        while not self._queries.has_ended:
            now_ns = self._beat_if_due()
            if now_ns - self._tick_ns >= TICK_NS or self._engine.is_behind:
                self._tick(now_ns)
                if place is not None:
                    place.look(now_ns, self._slept_ns)
            wait_ns = self._beat_ns + BEAT_NS - now_ns
            if now_ns < self._spin_until_ns or self._engine.is_behind:
                wait_ns = 0
            self._round(self._sleep(wait_ns))
        for query in self._queries.take():
            query.future.cancel()
        if self._files is not None:
            self._files.remember(self._engine.learned(), self._engine.spent_bytes())
        if self._poisoned:
            raise Poisoned("generations could not be published")

    def _sleep(self, wait_ns: int) -> Sequence[tuple[int, int]]:
        """Wait until something is ready, at most `wait_ns`. Returns it as `Attach.ready` does."""
        if wait_ns <= 0:
            return self._attach.ready(0)
        begin_ns = self._clock.now_ns()
        ready = self._attach.ready(wait_ns / NS_PER_S)
        self._slept_ns += self._clock.now_ns() - begin_ns
        return ready

    def _round(self, ready: Sequence[tuple[int, int]]) -> None:
        """Serve what is ready, in order, as far as there is time for each kind."""
        turn = until_ns = -1
        for fd, mask in ready:
            source = self._attach.source(fd)
            now_ns = self._beat_if_due()
            if self._poisoned or source is None:
                continue
            if source.turn != turn:
                turn, until_ns = source.turn, now_ns + KIND_NS
            elif now_ns >= until_ns:
                continue
            self._serve(source, mask)
            end_ns = self._beat_if_due()
            self._attach.charge(fd, source.party, end_ns - now_ns)
            self._spin_until_ns = end_ns + SPIN_NS

    def _serve(self, source: TurnSource, mask: int) -> None:
        """Read one descriptor and act on it: one of the three places that catch everything."""
        try:
            events = iter(source.read(mask))
            first = next(events, None)
            if first is not None:
                self._step(self._as_time_allows(first, events))
        except Exception as error:
            self._recover(error, source.connection)

    def _as_time_allows(self, event: Event | None, events: Iterator[Event]) -> Iterator[Event]:
        """Events for one step. Events not taken from `events` are not lost."""
        end_ns = self._clock.now_ns() + STEP_NS
        while event is not None:
            yield event
            event = next(events, None) if self._beat_if_due() < end_ns else None

    def _tick(self, now_ns: int) -> None:
        """Step the engine with events that time alone causes: another place that catches
        everything."""
        self._tick_ns = now_ns
        try:
            self._attach.expire(now_ns)
            files = self._files
            its = (files.tier.taken_bytes, files.tier.breakers) if files else ()
            self._step([core.Ready(self._tier.ready_bytes), core.Tick(*its)])
            if files is not None:
                files.look_after(self._engine, now_ns)
        except Exception as error:
            self._recover(error, None)

    def _step(self, events: Iterable[Event]) -> int:
        """Step until nothing follows. Returns how many blocks were cleared."""
        cleared_blocks = 0
        while events:
            begin_ns = self._clock.now_ns()
            events, blocks = self.executor.carry_out(self._engine.step(events, begin_ns))
            self.counters.steps.add(self._clock.now_ns() - begin_ns)
            cleared_blocks += blocks
        return cleared_blocks

    def _beat_if_due(self) -> int:
        now_ns = self._clock.now_ns()
        gap_ns = now_ns - self._beat_ns
        if gap_ns >= BEAT_NS:
            self.counters.beat(gap_ns, now_ns)
            self._beat_ns = now_ns
            self._tier.beat(now_ns)
        return now_ns

    def _answer(self, _mask: int) -> list[Event]:
        """Answer other threads' queries: the third place that catches everything."""
        for future, call, steps in self._queries.take():
            if not future.set_running_or_notify_cancel():
                continue
            self.counters.queries += 1
            try:
                future.set_result(call())
            except Exception as error:
                try:
                    if steps:
                        self._recover(error, None)
                finally:
                    future.set_exception(error)
            self._beat_if_due()
            if self._poisoned:
                break
        return []

    def _recover(self, error: Exception, owner: ConnectionId | None) -> None:
        """Go on after an error in a step: carry out the commands that it left, and hang up on
        `owner`. A bug costs one connection, not the node, and never a wrong byte."""
        for _ in range(RECOVERIES_MAX):
            self._failed(error)
            if isinstance(error, Poisoned):
                self._poisoned = True
                self.stop()
                return
            try:
                # A step that failed keeps its commands. Without those that raised generations, a
                # reader could take the bytes of a slot that was reused for the ones it asked for;
                # of a read that is refused now, the engine keeps the slots until it hears of it.
                events, _ = self.executor.carry_out(self._engine.salvage())
                if owner is not None:
                    self._attach.hang_up(owner, "failure")
                    events.insert(0, core.Ended(owner))
                    owner = None
                self._step(events)
            except Exception as again:
                error = again
            else:
                return
        raise error

    def _failed(self, error: Exception) -> None:
        self.counters.failures += 1
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "?"
        if place not in self._failed_places and len(self._failed_places) < 100:
            self._failed_places.add(place)
            _log.error("a bug in the node, its connection is closed", exc_info=error)


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


class Poisoned(Exception):
    """Slots may be reused without their readers noticing: the node must stop at once."""


@dataclass(eq=False, kw_only=True)
class Executor:
    """Commands to effects, by the parts of a node; None: it lacks this one. One thread."""

    arena: Arena
    tier: Memory
    attach: Attach
    files: FileEnd | None = None
    publisher: Publisher | None = None
    member: ClusterMember | None = None
    hbm: HbmTier | None = None
    traces: NodeTraces | None = None

    @property
    def exchange(self) -> Exchange | None:
        """Exchange of blocks with other nodes."""
        return self.member.peering.exchange if self.member and self.member.peering else None

    def carry_out(self, commands: Sequence[Command]) -> tuple[list[Event], int]:
        """Carry out all commands. Returns the events that follow, such as failures, for the
        engine's next step, and how many blocks were cleared. Never raises for a peer that is slow
        or gone.

        Raises:
            Poisoned: the tier refused to raise a generation.
        """
        # Before anything else can tell somebody about these slots: see ADR 3, generation page.
        try:
            for command in commands:
                match command:
                    case RaiseGenerations(slots, generations, tier):
                        held = self.tier if tier is Tier.DRAM else _part(self.hbm, command)
                        held.raise_generations(slots, generations)
                    case Shown(slots, targets):
                        _part(self.hbm, command).show(slots, targets)
        except AssertionError as error:
            raise Poisoned("generations could not be published") from error
        events: list[Event] = []
        cleared_blocks = 0
        for command in commands:
            match command:
                case RaiseGenerations() | Shown():
                    pass
                case core.Send(connection=number, message=message):
                    self._send(number, encode(message), (), events)
                case core.Admit(connection=number, welcome=welcome, with_arena=with_arena):
                    descriptors = [self.arena.arena_fd] if with_arena else []
                    descriptors.append(self.arena.generation_fd)
                    if welcome.hbm is not None and self.hbm is not None:
                        descriptors.append(self.hbm.page_fd)
                    self._send(number, encode(welcome), descriptors, events)
                case core.Hangup(connection=number, reason=reason):
                    _log.info("connection %d closed: %s", number, reason)
                    self.attach.hang_up(number, "engine")
                case core.Release(connection=number):
                    self.attach.release(number)
                case core.Cleared(blocks=blocks):
                    cleared_blocks += blocks
                case core.SwitchedOff():
                    _tell_what_is_off(command)
                case core.Changed():
                    _part(self.publisher, command).log.append(command)
                case Stored() | Removed() | core.OffersUntold():
                    _part(self.member, command).feeder.log.append(command)
                case core.StoryTold():
                    _part(self.traces, command).put(command)
                case Promote():
                    _part(self.hbm, command).submit(command)
                case core.Follow() | core.Unfollow():
                    _part(_part(self.member, command).memory, command).carry_out(command)
                case _ if isinstance(command, core.PeerCommand):
                    _part(self.exchange, command).carry_out(command)
                case _:
                    events += _part(self.files, command).carry_out(command)
        return events, cleared_blocks

    def _send(
        self, number: ConnectionId, datagram: bytes, descriptors: Sequence[int], events: list[Event]
    ) -> None:
        if self.attach.send(number, datagram, descriptors) is Sent.OVERFLOW:
            _log.warning("connection %d does not read: closed", number)
            self.attach.hang_up(number, "overflow")
            events.append(core.Ended(number))


def _part(part: _T | None, command: Command) -> _T:
    """The part of this node that a command is for."""
    assert part is not None, f"{type(command).__name__}, without the part that it is for"
    return part


def _tell_what_is_off(off: core.SwitchedOff) -> None:
    digits = off.space.hex()[:SPACE_DIGITS]
    _log.error(
        "space %s of tenant %s is switched off in %s: %s computed %d of its blocks again, and %d"
        " hold other values (error %.2f); look at its engines' models and settings, then"
        " 'kvstore clear --space %s' switches it on again",
        digits,
        off.tenant,
        off.tier.title if off.tier is not None else "all tiers",
        off.engine,
        off.blocks,
        off.diverged,
        off.error_ppm / 1e6,
        digits,
    )
