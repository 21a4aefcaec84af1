"""Expectations of prefill nodes: requests that wait, their news and limits, whose turn it is to get
room, the room that was granted for their blocks, and keys by scopes.

Rules. 1: an event looks at expectations that it names, that are due, or whose turn it is, and never
at all of them. 2: a process may expect so much, whatever its engines are called.

Does not cover: what becomes of them (`grants`), room itself (`landing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.agenda import Agenda, Groups
from kvstore.engine.memory.table import Keys, each
from kvstore.engine.moves.landing import Extents
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.witness import PushTimes
from kvstore.types import PAGE_BYTES
from kvstore.units import NS_PER_S
from kvstore.wire.messages import PushExpect

EXPECTS_MAX: Final = 4096
"""Expectations of one process: of 1,024 waiting requests with four KV cache groups."""
KEYS_MAX: Final = 1 << 18
"""Keys that one process expects, 40 MiB: 1,024 prompts of 4,096 tokens in blocks of 16."""
ALL_EXPECTS_MAX: Final = 8 * EXPECTS_MAX
ALL_KEYS_MAX: Final = 4 * KEYS_MAX
STALLED_NS: Final = 10 * NS_PER_S
STALLED_GAPS: Final = 3
"""A transfer without news for so long, and for as many times the longest wait between two news, is
not waited for: its prefill engine or node hangs. News are its blocks, and words that its engine
stores blocks of other requests: it has a queue. While they come, only the deadline counts."""
ASLEEP_NS: Final = NS_PER_S
"""Time between two ticks, which come ten times a second, from which on this node was suspended: it
could not hear of blocks."""


Name = tuple[int | str, ...]
Lane = tuple[int, str, int]
"""Process, prefill node, size of an extent."""


class PushNews(msgspec.Struct, gc=False):
    """News of a transfer, which its parts share, or blocks of any transfer of an engine."""

    last_ns: int
    """Time of the last ones; at first, when they were expected."""
    is_first: bool = True
    gap_ns: int = 0
    """Longest wait for news after the first ones."""

    def hear(self, now_ns: int) -> None:
        """News came."""
        if not self.is_first:
            self.gap_ns = max(self.gap_ns, now_ns - self.last_ns)
        self.is_first, self.last_ns = False, now_ns

    @property
    def stalled_ns(self) -> int:
        """Time from which on there were none for too long."""
        return self.last_ns + max(STALLED_NS, STALLED_GAPS * self.gap_ns)


class Expectation(msgspec.Struct, eq=False, gc=False):
    """A PushExpect that has not ended. Nothing in it refers to it: a crowd of them does not slow
    down the garbage collector."""

    number: int
    connection: Connection
    process: int
    session: int
    message: PushExpect
    asker: Asker
    missing: Keys
    """Keys that no tier held."""
    times: PushTimes
    until_ns: int
    news: PushNews
    """News of the transfer."""
    engine_news: PushNews
    """News of the engine."""
    has_come: NDArray[np.bool_]
    """Flags of those that were sealed since."""
    is_here: bool
    """Its prefill is on this node."""
    is_called: bool = True
    """Its blocks may be here by now, or come no more: those of a prefill on this node."""
    granted: int = 0
    """Leading ones of these that were granted room."""
    reason: str | None = None
    """Why it has ended; None: it has not."""

    @property
    def stalled_ns(self) -> int:
        """Time from which on there was no news for too long. Requests that wait without room hear
        of other blocks of their engine, too: these make room."""
        own_ns = self.news.stalled_ns
        return max(own_ns, self.engine_news.stalled_ns) if self.has_no_room else own_ns

    @property
    def has_no_room(self) -> bool:
        """Whether it waits for its first part of the landing slab."""
        return not self.granted and not self.is_here

    def stalled_by(self, *, is_up: bool) -> str:
        """The reason of one that is stalled; `is_up`: there is a transfer worker."""
        if not self.has_no_room:
            return "nothing was heard of its prefill for too long"
        if not is_up:
            return "there was no transfer worker for too long"
        return "it got no landing memory for too long: too many transfers, or a small --landing"

    @property
    def engine(self) -> tuple[int, int]:
        """Its engine, in one session."""
        return self.connection.id, self.session

    @property
    def transfer(self) -> tuple[int, str, str]:
        """Its transfer: another engine, or a request to another node, may use the same name."""
        return self.connection.id, self.message.node, self.message.transfer

    @property
    def names(self) -> tuple[Name, ...]:
        """Names that call it: its transfer, in PushCancel, by a prefill engine on this node."""
        transfer = self.message.transfer
        here = ((self.asker.tenant, transfer),) if self.is_here else ()
        return self.transfer, (self.connection.id, transfer), *here

    @property
    def pages(self) -> int:
        """Size of an extent: the shards of a block, one behind the other."""
        return -(-sum(self.asker.block_bytes) // PAGE_BYTES)

    @property
    def lane(self) -> Lane:
        """Expectations of one lane get room in order; lanes take turns."""
        return self.process, self.message.node, self.pages


class Expectations:
    """All that have not ended, by what calls them; and how much processes expect."""

    def __init__(self) -> None:
        self.engines = Groups[tuple[int, int], Expectation]()
        self.named = Groups[Name, Expectation]()
        self.agenda = Agenda[Expectation]()
        self.queue = Groups[Lane, Expectation]()
        """Expectations that wait for room."""
        self._counts: Counter[int] = Counter()
        """By process; those that have ended count until they are settled."""
        self._keys: Counter[int] = Counter()

    def too_many(self, process: int, count: int) -> str:
        """Why this process cannot expect so many keys more; empty: it can."""
        if self._counts[process] >= EXPECTS_MAX or self._counts.total() >= ALL_EXPECTS_MAX:
            return "too many transfers are expected"
        if self._keys[process] + count > KEYS_MAX or self._keys.total() + count > ALL_KEYS_MAX:
            return "too many blocks are expected"
        return ""

    def add(self, its: Expectation) -> None:
        """One more; its transfer and its engine may have news."""
        part, other = self.named.first(its.transfer), self.engines.first(its.engine)
        if part is not None:
            part.news.last_ns = max(part.news.last_ns, its.news.last_ns)
            its.news = part.news
        if other is not None:
            its.engine_news = other.engine_news
        self._count(its, 1)
        self.engines.add(its.engine, its)
        for name in its.names:
            self.named.add(name, its)

    def get_room(self, its: Expectation, count: int, now_ns: int) -> None:
        """Count blocks that were granted room: from now on the transfer's own news count."""
        if not its.granted:
            its.times.granted_ns = now_ns
            its.news.last_ns = max(its.news.last_ns, its.engine_news.last_ns)
        its.granted += count
        self.agenda.put(its, min(its.until_ns, its.stalled_ns))
        if its.granted == len(its.missing):
            self.queue.remove(its.lane, its)

    def end(self, its: Expectation) -> None:
        """Forget the names and turns of one that has ended."""
        self.engines.remove(its.engine, its)
        for name in its.names:
            self.named.remove(name, its)
        self.agenda.drop(its)
        self.queue.remove(its.lane, its)

    def settle(self, its: Expectation) -> None:
        """Let the process of one that has ended expect others."""
        self._count(its, -1)

    def _count(self, its: Expectation, sign: int) -> None:
        self._counts[its.process] += sign
        self._keys[its.process] += sign * len(its.missing)
        if not self._counts[its.process]:
            del self._counts[its.process], self._keys[its.process]

    def __iter__(self) -> Iterator[Expectation]:
        return (its for engine in list(self.engines) for its in self.engines.of(engine))

    def __len__(self) -> int:
        return len(self.engines)


class GrantedRoom(msgspec.Struct, eq=False):
    """Extents for some blocks of an expectation."""

    number: int
    expect: Expectation
    first: int
    """Place of its first key among those that are missing."""
    keys: Keys
    extents: Extents
    pages: int
    has_landed: NDArray[np.bool_]
    copying: int = 0
    """Blocks that are being copied out."""

    @property
    def node(self) -> str:
        """The peer that may write."""
        return self.expect.message.node


class ExpectedKeys:
    """By all the scopes together that a key is wanted in."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[bytes]] = {}

    def add(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """One more expectation wants these."""
        if len(keys):
            self._counts.setdefault(scopes, Counter()).update(each(keys))

    def remove(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """One expectation does not want these any more."""
        its = self._counts.get(scopes, Counter())
        for key in each(keys):
            its[key] -= 1
            if not its[key]:
                del its[key]
        if not its:
            self._counts.pop(scopes, None)

    def flags(self, scopes: Sequence[int], keys: Keys) -> NDArray[np.bool_]:
        """Flags of the keys that are expected, [S][n]."""
        flags = np.zeros((len(scopes), len(keys)), dtype=bool)
        for these, its in self._counts.items():
            if not frozenset(these).isdisjoint(scopes):
                found = (key in its for key in each(keys))
                flags[np.isin(scopes, these)] |= np.fromiter(found, dtype=bool, count=len(keys))
        return flags

    def __bool__(self) -> bool:
        return bool(self._counts)
