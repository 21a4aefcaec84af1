"""Messages of one node to one replica of the index, and trust in them: no blocks in here.

    Hello ─▶ EXACT ⇄ ASKED ─▶ FILLING ─▶ EXACT       words in, `Heard` out; `index.py` applies it

A feed is an ordered stream that the node dials. Each `Delta` has the next sequence number, and a
`FeedBeat` repeats the last. A message that does not fit (a number left out, another count at
Hello) is a gap, and the node is asked for a snapshot. A `SnapshotPart` has the offers of the node
**when the part is written**, and the number of the last delta before it: deltas may stand between
parts.

Time is an argument, in milliseconds of a clock that does not go back. Does not cover: forms of
messages (`wire.feed`).
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from kvstore.types import Incarnation
from kvstore.wire.feed import Delta, FeedBeat, Hello, OfStream, Registry, SnapshotPart, Word
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
"""A process dials every 2 s: after so much silence it is gone."""
NAMES_MAX: Final = 1024


class Rivals:
    """Twins among the nodes of one replica; at most NAMES_MAX, the latest."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[Incarnation, int, str]] = {}
        """When last, and from where, the replaced incarnation of a node said Hello."""
        self._rivals: dict[str, tuple[int, str]] = {}
        """Refused nodes for which that was not the first time."""

    def refused(self, node: str, incarnation: Incarnation, host: str, now_ms: int) -> bool:
        """Its Hello was, since another incarnation is heard. Returns whether both are alive."""
        last = self._refused.pop(node, None)
        self._refused[node] = (incarnation, now_ms, host)
        if len(self._refused) > NAMES_MAX:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            self._rivals.pop(oldest, None)
        if last is None or last[0] != incarnation or now_ms - last[1] > RIVAL_MS:
            return False
        self._rivals[node] = (now_ms, host)
        return True

    def of(self, node: str, now_ms: int) -> str | None:
        """Address of the node's rival; None: it has none."""
        found = self._rivals.get(node)
        return None if found is None or now_ms - found[0] > RIVAL_MS else found[1]

    def names(self, now_ms: int) -> list[str]:
        """Names of nodes that are two processes now."""
        return sorted(node for node in list(self._rivals) if self.of(node, now_ms) is not None)


# ── feed ──────────────────────────────────────────────────────────────────────────────────────────

BEAT_MS: Final = 1000
"""A node that has nothing to say repeats itself this often."""
STALE_MS: Final = 2000
"""Silent for so long: stale."""
OUT_MS: Final = 3000
"""Silent for so long: in no answer."""
FORGET_MS: Final = 60_000
"""Silent for so long: its blocks are forgotten, and a snapshot is needed to come back."""
ASK_AGAIN_MS: Final = 3000
"""A snapshot that does not begin or go on for so long is asked for again."""
_REPLACED_MAX: Final = 8
"""So many incarnations that were replaced are remembered, lest a late Hello brings one back while
the one that replaced it is heard."""


class Trust(enum.IntEnum):
    """Trust in an answer, in the order of doubt."""

    EXACT = 0
    """All that the node said up to its last sequence number."""
    CATCHING_UP = 1
    """Published blocks were there when published; more may be there."""
    STALE = 2
    """Silent, or its stream broke: it may be gone."""

    @property
    def word(self) -> str:
        """For people: exact, catching-up, stale."""
        return self.name.lower().replace("_", "-")


class FeedClosed(OfStream, frozen=True, tag="Closed"):
    """The stream ended or broke."""


class ConnectRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """Somebody tried to connect to the node and was refused: out until the node speaks again."""

    node: str


Event = Hello | Word | FeedClosed | ConnectRefused


class Verdict(enum.Enum):
    """The replica's next step for the stream after an event."""

    GO_ON = "go on"
    ASK = "ask"
    """Ask the node for a snapshot."""
    CLOSE = "close"
    """The stream is not, or no longer, the node's: close it. Nothing of the event was taken."""


class Heard(msgspec.Struct, frozen=True):
    """Outcome of one event: what happens to the stream, and to what the node said so far.

    In this order: `forget`, `abandon`, `begin`, the changes if `apply`, `complete`.
    """

    verdict: Verdict
    forget: bool = False
    """All that the node ever said is void."""
    abandon: bool = False
    """The snapshot that was coming is void."""
    begin: bool = False
    """A snapshot begins."""
    apply: bool = False
    complete: bool = False
    """The snapshot is whole: blocks neither in it nor published meanwhile are void."""


_CLOSE: Final = Heard(Verdict.CLOSE)
_GO_ON: Final = Heard(Verdict.GO_ON)


def trust_after(silent_ms: int, *, is_open: bool, is_exact: bool) -> Trust | None:
    """Trust in a node after so much silence. None: in no answer."""
    if silent_ms >= OUT_MS:
        return None
    if not is_open or silent_ms >= STALE_MS:
        return Trust.STALE
    return Trust.EXACT if is_exact else Trust.CATCHING_UP


def until_ms(heard_ms: int, now_ms: int) -> int:
    """Earliest time at which silence since `heard_ms` may change the trust in a node."""
    ages = (STALE_MS, OUT_MS, FORGET_MS)
    return min((t for age in ages if (t := heard_ms + age) > now_ms), default=now_ms + 1)


class _Phase(enum.Enum):
    EXACT = enum.auto()
    ASKED = enum.auto()
    FILLING = enum.auto()


class Feed:
    """One node. Made by its first Hello, which is then heard like any other."""

    def __init__(self) -> None:
        self.address = ""
        self.sequence = 0
        self.load: Load | None = None
        """Last load published by its incarnation."""
        self.engines: tuple[EngineEntry, ...] = ()
        """The same."""
        self._incarnation = Incarnation(0)
        self._replaced: deque[Incarnation] = deque(maxlen=_REPLACED_MAX)
        self._stream = 0
        self._open = False
        self._refused = False
        self._heard_ms = 0
        self._awaited_ms = 0
        """When a snapshot was asked for, or its last part came."""
        self._phase = _Phase.EXACT
        self._parts = 0
        """Parts of the present snapshot so far."""

    @classmethod
    def of_another(
        cls,
        incarnation: Incarnation,
        replaced: Iterable[Incarnation],
        *,
        heard_ms: int | None,
    ) -> Feed:
        """The feed of a node that somebody else heard so far, when last; None: no more. Numbers are
        those of another stream, so that after its Hello only a snapshot makes it exact, or a new
        incarnation."""
        feed = cls()
        feed._incarnation, feed._stream, feed._phase = incarnation, -1, _Phase.ASKED
        feed._replaced.extend(replaced)
        if heard_ms is not None:
            feed._open, feed._heard_ms = True, heard_ms
        return feed

    def hear(self, event: Event, now_ms: int) -> Heard:
        """Take in an event of this node."""
        match event:
            case Hello():
                return self._hello(event, now_ms)
            case ConnectRefused():
                self._refused = True
                return _GO_ON
        if (event.incarnation, event.stream) != (self._incarnation, self._stream):
            return _CLOSE
        if isinstance(event, FeedClosed):
            self._open = False
            return _GO_ON
        if not self._open:
            return _CLOSE
        self._spoke(now_ms)
        match event:
            case Delta():
                return self._delta(event.sequence, now_ms)
            case FeedBeat():
                self.load = event.load or self.load
                return self._beat(event.sequence, now_ms)
            case SnapshotPart():
                return self._part(event, now_ms)
            case Registry(engines=engines):
                self.engines = engines
                return _GO_ON

    @property
    def incarnation(self) -> Incarnation:
        """Incarnation of the present stream."""
        return self._incarnation

    @property
    def replaced(self) -> tuple[Incarnation, ...]:
        """Incarnations that cannot come back."""
        return tuple(self._replaced)

    @property
    def is_open(self) -> bool:
        """Its stream has not ended."""
        return self._open

    @property
    def is_exact(self) -> bool:
        """No snapshot is wanted."""
        return self._phase is _Phase.EXACT

    def trust(self, now_ms: int) -> Trust | None:
        """None: in no answer."""
        if self._refused:
            return None
        silent_ms = now_ms - self._heard_ms
        return trust_after(silent_ms, is_open=self.is_open, is_exact=self.is_exact)

    def until_ms(self, now_ms: int) -> int:
        """Silence may change `trust` or `is_lost` then, not before."""
        return until_ms(self._heard_ms, now_ms)

    def is_lost(self, now_ms: int) -> bool:
        """Silent for so long that its blocks are to be forgotten."""
        return now_ms - self._heard_ms >= FORGET_MS

    def _spoke(self, now_ms: int) -> None:
        self._heard_ms = max(now_ms, self._heard_ms)
        self._refused = False

    def _is_heard(self, now_ms: int) -> bool:
        return self._open and now_ms - self._heard_ms < STALE_MS

    def _hello(self, hello: Hello, now_ms: int) -> Heard:
        is_new = hello.incarnation != self._incarnation
        if not is_new and hello.stream <= self._stream:
            return _CLOSE
        if hello.incarnation in self._replaced:
            if self._is_heard(now_ms):
                return _CLOSE
            # What replaced it was a dead one's Hello, which came late: this one lives.
            self._replaced.remove(hello.incarnation)
        if is_new and self._incarnation:
            self._replaced.append(self._incarnation)
        self._incarnation, self._stream, self._open = hello.incarnation, hello.stream, True
        self.address = hello.address
        self._spoke(now_ms)
        if is_new:
            self._phase, self.sequence, self.load = _Phase.EXACT, 0, None
            self.engines = ()
        abandon = self._phase is _Phase.FILLING
        if abandon or self._phase is _Phase.ASKED or hello.sequence != self.sequence:
            self.sequence = hello.sequence
            return self._ask(now_ms, forget=is_new, abandon=abandon)
        return Heard(Verdict.GO_ON, forget=is_new)

    def _ask(
        self, now_ms: int, *, forget: bool = False, abandon: bool = False, apply: bool = False
    ) -> Heard:
        self._phase, self._awaited_ms = _Phase.ASKED, now_ms
        return Heard(Verdict.ASK, forget=forget, abandon=abandon, apply=apply)

    def _delta(self, sequence: int, now_ms: int) -> Heard:
        if sequence <= self.sequence:
            return _GO_ON  # heard before
        is_next = sequence == self.sequence + 1
        self.sequence = sequence
        if is_next or self._phase is _Phase.ASKED:
            return Heard(Verdict.GO_ON, apply=True)
        return self._ask(now_ms, abandon=self._phase is _Phase.FILLING, apply=True)

    def _beat(self, sequence: int, now_ms: int) -> Heard:
        lacks_delta = sequence > self.sequence and self._phase is not _Phase.ASKED
        is_late = self._phase is not _Phase.EXACT and now_ms - self._awaited_ms >= ASK_AGAIN_MS
        if not lacks_delta and not is_late:
            return _GO_ON
        self.sequence = max(sequence, self.sequence)
        return self._ask(now_ms, abandon=self._phase is _Phase.FILLING)

    def _part(self, part: SnapshotPart, now_ms: int) -> Heard:
        abandon = self._phase is _Phase.FILLING
        begin = part.number == 0
        if begin:
            fits = part.sequence >= self.sequence
        elif not abandon or part.number < self._parts:
            return _GO_ON  # of a snapshot that was given up, or heard before
        else:
            fits = part.number == self._parts and part.sequence == self.sequence
        if not fits:
            return self._ask(now_ms, abandon=abandon)
        self.sequence = part.sequence
        self._parts, self._awaited_ms = part.number + 1, now_ms
        self._phase = _Phase.EXACT if part.is_last else _Phase.FILLING
        return Heard(
            Verdict.GO_ON, abandon=abandon and begin, begin=begin, apply=True, complete=part.is_last
        )
