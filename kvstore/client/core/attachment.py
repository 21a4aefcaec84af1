"""The connections to the node in time: of every process (`Dial`), and of the scheduler.

    Dial         DOWN ──connected──▶ GREETED ──welcomed──▶ WELCOMED
    Attachment   DOWN ──connected──▶ GREETED ──Welcome──▶ WAITING ──SessionOpen──▶ OPEN
                   ▲                                         ▲──── SessionClosed ────┘
                   └── disconnected, refused, no heartbeat for long: from every state, with back-off

The scheduler and every rank have a `Dial`: when to connect, and when to hang up. Times are the
process's monotonic nanoseconds; heartbeats are stamps of the node's clock, and the offset between
the two clocks is estimated. The scheduler's `Attachment` adds its session and its credits: it is
OPEN while it has a session, and WAITING for the ranks while it is welcome without one.

Rules. 1: `session` changes here alone. 2: credits exist only while OPEN and die with the session.
3: every change worth knowing leaves one notice, never one per request.

A heartbeat older than its limit turns the cache off; the next beat turns it on again. Leases and
credits stay meanwhile: the memory is there, and generations show which slots are void. The
connection ends only after GONE_TIMES that silence, since forming a session again takes long.
Pure: the caller owns the socket (`kvstore.client.link`) and reads the heartbeat word. Does not
cover: sessions of ranks (`rank`).
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from typing import Final

import msgspec

from kvstore.client.core.plan import SchedulerConfig, SchedulerStats
from kvstore.units import NS_PER_MS, NS_PER_S
from kvstore.wire import messages as wire

RETRY_NS_MIN: Final = 50 * NS_PER_MS
RETRY_NS_MAX: Final = 1000 * NS_PER_MS
REFUSED_RETRY_NS: Final = 10 * NS_PER_S
GREETING_NS_MAX: Final = 10 * NS_PER_S
"""Longest wait for a Welcome: another node may serve the path by then."""
GONE_TIMES: Final = 8
"""Silence for this many times the heartbeat's limit ends the connection."""


class DialState(enum.Enum):
    """Progress of a connection."""

    DOWN = "down"
    GREETED = "greeted"
    WELCOMED = "welcomed"


class Dial:
    """One connection: when to connect, when its node is silent, when to hang up."""

    def __init__(self, heartbeat_timeout_ms: int) -> None:
        self.state = DialState.DOWN
        self.since_ns = 0
        """Start of the state."""
        self.silent_since_ns = 0
        """Discovery of a heartbeat older than its limit; 0: the node beats."""
        self._limit_ns = heartbeat_timeout_ms * NS_PER_MS
        self._retry_at_ns = 0
        self._retry_ns = RETRY_NS_MIN
        self._clock_offset_ns = 0
        self._last_beat_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether the caller is to connect."""
        return self.state is DialState.DOWN and now_ns >= self._retry_at_ns

    def connected(self, now_ns: int) -> None:
        """The socket is connected and the Hello is on its way."""
        assert self.state is DialState.DOWN, self.state
        self._enter(DialState.GREETED, now_ns)

    def welcomed(self, now_ns: int, node_now_ns: int) -> None:
        """The node answered, when its clock showed `node_now_ns`."""
        assert self.state is DialState.GREETED, self.state
        self._clock_offset_ns = now_ns - node_now_ns
        self._enter(DialState.WELCOMED, now_ns)

    def served(self) -> None:
        """The node serves this process: the next back-off is a short one again."""
        self._retry_ns = RETRY_NS_MIN

    def ended(self, now_ns: int, *, is_refused: bool = False) -> None:
        """The socket ended, or could not be connected. `is_refused`: the node sent Refused."""
        self.restart(now_ns)
        self._retry_at_ns += REFUSED_RETRY_NS if is_refused else self._retry_ns
        if not is_refused:
            self._retry_ns = min(self._retry_ns * 2, RETRY_NS_MAX)

    def restart(self, now_ns: int) -> None:
        """Connect anew at once."""
        self._enter(DialState.DOWN, now_ns)
        self._retry_at_ns = now_ns

    def check_heartbeat(self, now_ns: int, heartbeat_ns: int) -> str:
        """Reason to hang up now, or nothing. `heartbeat_ns`: the node's last beat, 0 if unknown."""
        match self.state:
            case DialState.GREETED if now_ns - self.since_ns > GREETING_NS_MAX:
                return "the node does not answer"
            case DialState.WELCOMED if heartbeat_ns:
                age_ns = self._age_ns(now_ns, heartbeat_ns)
                if age_ns > GONE_TIMES * self._limit_ns:
                    return "the node's heartbeat stopped"
        return ""

    def _age_ns(self, now_ns: int, heartbeat_ns: int) -> int:
        # Clocks differ between time namespaces. Every look bounds the offset from above (it is
        # offset + age); the smallest bound seen is the offset to within one beat. A Welcome that
        # lay unread for seconds alone would make the node look that much younger.
        self._clock_offset_ns = min(self._clock_offset_ns, now_ns - heartbeat_ns)
        if self.silent_since_ns and heartbeat_ns != self._last_beat_ns:
            # A new beat, whatever the clocks say: if they drifted apart, this is the offset.
            self._clock_offset_ns = now_ns - heartbeat_ns
        self._last_beat_ns = heartbeat_ns
        age_ns = now_ns - heartbeat_ns - self._clock_offset_ns
        if age_ns <= self._limit_ns:
            self.silent_since_ns = 0
        elif not self.silent_since_ns:
            self.silent_since_ns = now_ns
        return age_ns

    def _enter(self, state: DialState, now_ns: int) -> None:
        self.state, self.since_ns, self.silent_since_ns = state, now_ns, 0


_SILENCE_NOTICES_MS = 10_000
"""Shortest time between two notices about a node that comes and goes."""
CREDITS_MAX = 16_384
"""Far more than a node grants one engine; further credits are ignored."""


Credit = tuple[bytes, bytes]
"""Slots and generations of one block, u32 and u64 for each shard."""


class Attachment:
    """The scheduler's connection, with its session and credits. Times are the engine's monotonic
    nanoseconds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config, self.stats = config, SchedulerStats()
        """Shared with the other parts of the core."""
        self.dial = Dial(config.heartbeat_timeout_ms)
        self.session = 0
        self.shard_counts: tuple[int, ...] = (1,)
        """Distinct shards of a block, by KV cache group."""
        self.incarnation = 0
        self.node = ""
        """Name of the node, if it serves pushes."""
        self.weights_epoch = ""
        self.unserved = ""
        """Why no session can open, as reported by the ranks."""
        self.credits: defaultdict[int, deque[Credit]] = defaultdict(deque)
        """Credits that are left, by KV cache group."""
        self.outbox: list[wire.Message] = []
        self.notices: list[str] = []
        self._away_noticed = False
        self._silence_noticed_ns: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the node can be asked."""
        return self.session != 0 and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Whether the last heartbeat is older than its limit."""
        return self.dial.silent_since_ns > 0

    def is_coming(self, now_ns: int, within_ns: int) -> bool:
        """Whether the node's silence, or its handshake, began less than `within_ns` ago, so that it
        may answer at any moment."""
        if self.dial.state is DialState.DOWN:
            return False
        begin_ns = self.dial.silent_since_ns if self.session else self.dial.since_ns
        return now_ns - begin_ns < within_ns

    def connect_failed(self, now_ns: int, reason: str) -> None:
        """The socket is absent or refuses. One notice, then silence until something changes."""
        self.dial.ended(now_ns)
        self._notice_away(reason)

    def hello(self) -> wire.HelloScheduler:
        """The first message on a new socket."""
        return msgspec.structs.replace(self.config.hello, weights_epoch=self.weights_epoch)

    def disconnected(self, now_ns: int, reason: str) -> None:
        """The socket ended, or the caller closed it on request. Safe to call when down."""
        if self.dial.state is DialState.DOWN:
            return
        self._end_session()
        self.outbox.clear()
        self.dial.ended(now_ns)
        self._notice_away(reason)

    def restart(self, weights_epoch: str, now_ns: int) -> None:
        """Attach again at once, to the space of this epoch. The caller closes the socket."""
        self.weights_epoch = weights_epoch
        self._end_session()
        self.outbox.clear()
        self.dial.restart(now_ns)
        self.notices.append("the engine's cache was reset: continuing in a new space")

    def cannot_be_served(self, reason: str) -> None:
        """The ranks will not attach. The node gets the reason on this connection and on later ones,
        so that its operator sees it."""
        self.unserved = reason[: wire.UNSERVED_LENGTH_MAX]
        self.notices.append(f"the cache is off: {reason}")
        self._tell_unserved()

    def _tell_unserved(self) -> None:
        if self.unserved and self.dial.state is DialState.WELCOMED:
            self.outbox.append(wire.Unserved(self.unserved))

    def received(self, message: wire.Message, now_ns: int) -> str | None:
        """Take an attachment message. Returns a reason when the caller must close the socket."""
        match message:
            case wire.Welcome():
                if self.dial.state is not DialState.GREETED:
                    return "the node welcomed twice"
                self.incarnation = message.incarnation
                self.dial.welcomed(now_ns, message.now_ns)
                self._tell_unserved()
            case wire.SessionOpen() if self.dial.state is DialState.WELCOMED:
                self._end_session()
                self.session = message.session
                self.shard_counts, self.node = message.shard_counts, message.node
                self.dial.since_ns = now_ns
                self.dial.served()
                self._away_noticed = False
                self.notices.append(f"attached to the node, session {message.session}: cache on")
            case wire.SessionClosed():
                if message.session == self.session:
                    self._end_session()
                    self.dial.since_ns = now_ns
                    self._notice_away(message.reason)
            case wire.Grant():
                if message.session == self.session:
                    self._add_credits(message)
            case wire.Refused():
                self._notice_away(f"refused: {message.reason}")
                self._end_session()
                self.dial.ended(now_ns, is_refused=True)
                return "refused"
            case _:
                pass
        return None

    def check_heartbeat(self, now_ns: int, heartbeat_ns: int) -> str:
        """Take note of the node's last beat, 0 if unknown. Returns a reason when the caller must
        close the socket, or nothing."""
        before_ns = self.dial.silent_since_ns
        reason = self.dial.check_heartbeat(now_ns, heartbeat_ns)
        if self.session:
            if self.is_silent and not before_ns:
                last_ns = self._silence_noticed_ns
                if last_ns is None or now_ns - last_ns >= _SILENCE_NOTICES_MS * NS_PER_MS:
                    self._silence_noticed_ns = now_ns
                    self.notices.append(
                        "cache off, requests are computed: the node's heartbeat stopped"
                        f" (logged once in {_SILENCE_NOTICES_MS // 1000} s)"
                    )
            if before_ns and not self.is_silent and before_ns == self._silence_noticed_ns:
                self.notices.append("the node's heartbeat is back: cache on")
        return reason

    def _add_credits(self, grant: wire.Grant) -> None:
        counts = self.shard_counts
        if grant.group >= len(counts) or len(grant.slots) % (4 * counts[grant.group]):
            return  # a grant we cannot read is no grant; the node still counts it as ours
        shards, credits = counts[grant.group], self.credits[grant.group]
        count = min(len(grant.slots) // (4 * shards), CREDITS_MAX - len(credits))
        for at in range(0, count * shards, shards):
            end = at + shards
            credits.append((grant.slots[4 * at : 4 * end], grant.generations[8 * at : 8 * end]))

    def _end_session(self) -> None:
        self.session = 0
        self.credits.clear()

    def _notice_away(self, reason: str) -> None:
        if not self._away_noticed:
            self._away_noticed = True
            self.notices.append(f"cache off, requests are computed: {reason}")
