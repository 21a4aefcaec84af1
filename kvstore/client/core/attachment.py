"""The scheduler's connection to the node: attached or not, session, credits, heartbeat.

    DOWN ──connected──▶ GREETED ──Welcome──▶ WAITING ──SessionOpen──▶ OPEN
      ▲                                         ▲──── SessionClosed ────┘
      └── disconnected, refused, no heartbeat for long: from every state, with back-off

Rules. 1: only this class changes the state. 2: credits exist only while OPEN and die with the
session. 3: every change worth knowing leaves one notice, never one per request.

A heartbeat older than its limit turns the cache off; the next beat turns it on again. Leases and
credits stay meanwhile: the memory is there, and generations show which slots are void. The
connection ends only after `dial.GONE_TIMES` that silence, since forming a session again takes long.
Pure: the caller owns the socket and reads the heartbeat word.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque

import numpy as np

from kvstore.client.core.config import SchedulerConfig
from kvstore.client.core.dial import Dial, DialState
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import (
    PROTOCOL_VERSION,
    UNSERVED_LENGTH_MAX,
    Grant,
    HelloScheduler,
    Message,
    Refused,
    SessionClosed,
    SessionOpen,
    Unserved,
    Welcome,
    generations_array,
    slots_array,
)

_SILENCE_NOTICES_MS = 10_000
"""Shortest time between two notices about a node that comes and goes."""
CREDITS_MAX = 16_384
"""Far more than a node grants one engine; further credits are ignored."""


class AttachState(enum.Enum):
    """State of the connection."""

    DOWN = "down"
    GREETED = "greeted"
    WAITING = "waiting for the ranks"
    OPEN = "open"


Credit = tuple[tuple[int, ...], tuple[int, ...]]
"""Slots and generations of one block, one per shard."""


class Attachment:
    """See the module. Times are the engine's monotonic nanoseconds."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._dial = Dial(config.heartbeat_timeout_ms)
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
        self.outbox: list[Message] = []
        self.notices: list[str] = []
        self._away_noticed = False
        self._silence_noticed_ns: int | None = None

    @property
    def state(self) -> AttachState:
        if self._dial.state is not DialState.WELCOMED:
            return AttachState(self._dial.state.value)
        return AttachState.OPEN if self.session else AttachState.WAITING

    @property
    def is_open(self) -> bool:
        """Whether the node can be asked."""
        return self.state is AttachState.OPEN and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Whether the last heartbeat is older than its limit."""
        return self._dial.silent_since_ns > 0

    def is_coming(self, now_ns: int, within_ns: int) -> bool:
        """Whether the node's silence, or its handshake, began less than `within_ns` ago, so that it
        may answer at any moment."""
        match self.state:
            case AttachState.DOWN:
                return False
            case AttachState.OPEN:
                return now_ns - self._dial.silent_since_ns < within_ns
            case _:
                return now_ns - self._dial.since_ns < within_ns

    def wants_connection(self, now_ns: int) -> bool:
        return self._dial.is_due(now_ns)

    def connect_failed(self, now_ns: int, reason: str) -> None:
        """The socket is absent or refuses. One notice, then silence until something changes."""
        self._dial.ended(now_ns)
        self._notice_away(reason)

    def hello(self) -> HelloScheduler:
        """The first message on a new socket."""
        return HelloScheduler(
            protocol=PROTOCOL_VERSION,
            engine_id=self._config.engine_id,
            nonce=self._config.nonce,
            tenant=self._config.tenant,
            rank_count=self._config.rank_count,
            process=self._config.process,
            weights_epoch=self.weights_epoch,
            label=self._config.label,
            data_rank=self._config.data_rank,
            events=self._config.events,
            events_replay=self._config.events_replay,
            address=self._config.address,
            role=self._config.role,
        )

    def connected(self, now_ns: int) -> None:
        """The socket is connected and the hello is on its way."""
        self._dial.connected(now_ns)

    def disconnected(self, now_ns: int, reason: str) -> None:
        """The socket ended, or the caller closed it on request. Safe to call when down."""
        if self.state is AttachState.DOWN:
            return
        self._end_session()
        self.outbox.clear()
        self._dial.ended(now_ns)
        self._notice_away(reason)

    def restart(self, weights_epoch: str, now_ns: int) -> None:
        """Attach again at once, to the space of this epoch. The caller closes the socket."""
        self.weights_epoch = weights_epoch
        self._end_session()
        self.outbox.clear()
        self._dial.restart(now_ns)
        self.notices.append("the engine's cache was reset: continuing in a new space")

    def cannot_be_served(self, reason: str) -> None:
        """The ranks will not attach. The node gets the reason on this connection and on later ones,
        so that its operator sees it."""
        self.unserved = reason[:UNSERVED_LENGTH_MAX]
        self.notices.append(f"the cache is off: {reason}")
        self._tell_unserved()

    def _tell_unserved(self) -> None:
        if self.unserved and self.state in (AttachState.WAITING, AttachState.OPEN):
            self.outbox.append(Unserved(self.unserved))

    def received(self, message: Message, now_ns: int) -> str | None:
        """Take an attachment message. Returns a reason when the caller must close the socket."""
        match message:
            case Welcome():
                if self.state is not AttachState.GREETED:
                    return "the node welcomed twice"
                self.incarnation = message.incarnation
                self._dial.welcomed(now_ns, message.now_ns)
                self._tell_unserved()
            case SessionOpen() if self._dial.state is DialState.WELCOMED:
                self._end_session()
                self.session = message.session
                self.shard_counts, self.node = message.shard_counts, message.node
                self._dial.since_ns = now_ns
                self._dial.served()
                self._away_noticed = False
                self.notices.append(f"attached to the node, session {message.session}: cache on")
            case SessionClosed():
                if message.session == self.session:
                    self._end_session()
                    self._dial.since_ns = now_ns
                    self._notice_away(message.reason)
            case Grant():
                if message.session == self.session:
                    self._add_credits(message)
            case Refused():
                self._notice_away(f"refused: {message.reason}")
                self._end_session()
                self._dial.refused(now_ns)
                return "refused"
            case _:
                pass
        return None

    def check_heartbeat(self, now_ns: int, heartbeat_ns: int) -> str:
        """Take note of the node's last beat, 0 if unknown. Returns a reason when the caller must
        close the socket, or nothing."""
        before_ns = self._dial.silent_since_ns
        reason = self._dial.check_heartbeat(now_ns, heartbeat_ns)
        if self.state is AttachState.OPEN:
            if self.is_silent and not before_ns:
                self._notice_silence(now_ns)
            if before_ns and not self.is_silent and before_ns == self._silence_noticed_ns:
                self.notices.append("the node's heartbeat is back: cache on")
        return reason

    def _notice_silence(self, now_ns: int) -> None:
        last_ns = self._silence_noticed_ns
        if last_ns is None or now_ns - last_ns >= _SILENCE_NOTICES_MS * NS_PER_MS:
            self._silence_noticed_ns = now_ns
            self.notices.append(
                "cache off, requests are computed: the node's heartbeat stopped"
                f" (logged once in {_SILENCE_NOTICES_MS // 1000} s)"
            )

    def _add_credits(self, grant: Grant) -> None:
        slots, counts = slots_array(grant.slots), self.shard_counts
        if grant.group >= len(counts) or len(slots) % counts[grant.group]:
            return  # a grant we cannot read is no grant; the node still counts it as ours
        shards, credits = counts[grant.group], self.credits[grant.group]
        rows = slots.reshape(-1, shards).tolist()
        generations = generations_array(grant.generations).reshape(-1, shards).tolist()
        room = max(0, CREDITS_MAX - len(credits))
        pairs = zip(rows[:room], generations[:room], strict=True)
        credits.extend((tuple(s), tuple(g)) for s, g in pairs)

    def _end_session(self) -> None:
        self.session = 0
        self.credits.clear()

    def _notice_away(self, reason: str) -> None:
        if not self._away_noticed:
            self._away_noticed = True
            self.notices.append(f"cache off, requests are computed: {reason}")


def credit_arrays(credits: list[Credit]) -> tuple[bytes, bytes]:
    """[n][S] slots and generations of credits, as they travel."""
    slots = np.array([slots for slots, _ in credits], dtype="<u4")
    generations = np.array([generations for _, generations in credits], dtype="<u8")
    return slots.tobytes(), generations.tobytes()
