"""Expectations of prefill nodes: requests that wait for pushed blocks, their news and limits, whose
turn it is to get room, the room that was granted for their blocks, and keys by scopes.

Rules. 1: an event looks at expectations that it names, that are due, or whose turn it is, and never
at all of them. 2: limits hold per process, whatever its engines are called.

Does not cover: what becomes of expectations (`grants`), the room itself (`landing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
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
"""A transfer is given up after STALLED_NS without news, or after this many times its longest gap
between two news if that is longer: its prefill engine or node hangs. News are blocks of the
transfer, and messages that its engine stores blocks of other requests: it has a queue. While news
come, only the deadline counts."""
ASLEEP_NS: Final = NS_PER_S
"""If two ticks, which come ten times a second, are further apart than this, the node was suspended
and could not receive news: gaps are counted anew."""


Name = tuple[int | str, ...]
Lane = tuple[int, str, int]
"""(process, prefill node, size of an extent in pages): expectations of one lane get room in
order."""


class PushNews(msgspec.Struct, gc=False):
    """Times of news of one transfer, shared by its expectations, or of one engine (blocks of any of
    its transfers)."""

    last_ns: int
    """Time of the last news; at first, the time of the PushExpect."""
    is_first: bool = True
    gap_ns: int = 0
    """Longest gap between two news, after the first ones."""

    def hear(self, now_ns: int) -> None:
        """Record that news came at this time."""
        if not self.is_first:
            self.gap_ns = max(self.gap_ns, now_ns - self.last_ns)
        self.is_first, self.last_ns = False, now_ns

    @property
    def stalled_ns(self) -> int:
        """Time at which the gap since the last news will be too long."""
        return self.last_ns + max(STALLED_NS, STALLED_GAPS * self.gap_ns)


class Expectation(msgspec.Struct, eq=False, gc=False):
    """A PushExpect that has not ended. Nothing in it refers back to it: many of them do not slow
    down the garbage collector."""

    number: int
    connection: Connection
    process: int
    session: int
    message: PushExpect
    asker: Asker
    missing: Keys
    """Keys that no tier held when the PushExpect came."""
    times: PushTimes
    until_ns: int
    news: PushNews
    """News of the transfer."""
    engine_news: PushNews
    """News of the engine."""
    has_come: NDArray[np.bool_]
    """Flags of the `missing` keys: their blocks were sealed since."""
    is_here: bool
    """Whether its prefill engine is on this node."""
    is_called: bool = True
    """Whether to search dram for its blocks at the next look, for a prefill on this node: some may
    be there, or none will come any more."""
    granted: int = 0
    """Number of leading `missing` keys that were granted room."""
    reason: str | None = None
    """Why the expectation has ended; None: it has not."""

    @property
    def stalled_ns(self) -> int:
        """Time at which the gap without news will be too long. For a request that waits without
        room, news of other blocks of its engine count, too: these make room."""
        own_ns = self.news.stalled_ns
        return max(own_ns, self.engine_news.stalled_ns) if self.has_no_room else own_ns

    @property
    def has_no_room(self) -> bool:
        """Whether it waits for its first part of the landing slab."""
        return not self.granted and not self.is_here

    def stalled_by(self, *, is_up: bool) -> str:
        """Reason to report for an expectation that is stalled. `is_up`: whether a transfer worker
        runs."""
        if not self.has_no_room:
            return "nothing was heard of its prefill for too long"
        if not is_up:
            return "there was no transfer worker for too long"
        return "it got no landing memory for too long: too many transfers, or a small --landing"

    @property
    def engine(self) -> tuple[int, int]:
        """Its decode engine: (connection, session)."""
        return self.connection.id, self.session

    @property
    def transfer(self) -> tuple[int, str, str]:
        """Its transfer: (connection, prefill node, name). Another engine, or a request to another
        node, may use the same name."""
        return self.connection.id, self.message.node, self.message.transfer

    @property
    def names(self) -> tuple[Name, ...]:
        """Names under which it is found: its transfer; (connection, name), as in PushCancel; and,
        if the prefill is on this node, (tenant, name)."""
        transfer = self.message.transfer
        here = ((self.asker.tenant, transfer),) if self.is_here else ()
        return self.transfer, (self.connection.id, transfer), *here

    @property
    def pages(self) -> int:
        """Size of an extent in pages: the shards of a block, one behind the other."""
        return -(-sum(self.asker.block_bytes) // PAGE_BYTES)

    @property
    def lane(self) -> Lane:
        """Its lane: expectations of one lane get room in order, and lanes take turns."""
        return self.process, self.message.node, self.pages


class Expectations:
    """All expectations that have not ended, by engine, by name and by time, and the number of each
    process."""

    def __init__(self) -> None:
        self.engines = Groups[tuple[int, int], Expectation]()
        self.named = Groups[Name, Expectation]()
        self.agenda = Agenda[Expectation]()
        self.queue = Groups[Lane, Expectation]()
        """Expectations that wait for room, by lane."""
        self._counts: Counter[int] = Counter()
        """Number of expectations by process; ended ones count until `settle`."""
        self._keys: Counter[int] = Counter()

    def too_many(self, process: int, count: int) -> str:
        """Why this process may not expect `count` more keys; empty: it may."""
        if self._counts[process] >= EXPECTS_MAX or self._counts.total() >= ALL_EXPECTS_MAX:
            return "too many transfers are expected"
        if self._keys[process] + count > KEYS_MAX or self._keys.total() + count > ALL_KEYS_MAX:
            return "too many blocks are expected"
        return ""

    def add(self, its: Expectation) -> None:
        """Add an expectation, which shares the news of its transfer and of its engine with earlier
        ones."""
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
        """Record that the next `count` blocks were granted room. From the first grant on, only news
        of the transfer itself count."""
        if not its.granted:
            its.times.granted_ns = now_ns
            its.news.last_ns = max(its.news.last_ns, its.engine_news.last_ns)
        its.granted += count
        self.agenda.put(its, min(its.until_ns, its.stalled_ns))
        if its.granted == len(its.missing):
            self.queue.remove(its.lane, its)

    def end(self, its: Expectation) -> None:
        """Remove an expectation that has ended from all names, the agenda and the queue."""
        self.engines.remove(its.engine, its)
        for name in its.names:
            self.named.remove(name, its)
        self.agenda.drop(its)
        self.queue.remove(its.lane, its)

    def settle(self, its: Expectation) -> None:
        """Remove an expectation that has ended from the counts of its process."""
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
    """Place of its first key among the expectation's `missing` keys."""
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


def flags_of(
    groups: Mapping[tuple[int, ...], Collection[bytes]], scopes: Sequence[int], keys: Keys
) -> NDArray[np.bool_]:
    """Flags [S][n] of the keys that are in `groups`, of keys by the scopes (all shards) in which
    they are wanted."""
    flags = np.zeros((len(scopes), len(keys)), dtype=bool)
    for these, its in groups.items():
        if not frozenset(these).isdisjoint(scopes):
            found = (key in its for key in each(keys))
            flags[np.isin(scopes, these)] |= np.fromiter(found, dtype=bool, count=len(keys))
    return flags


class ExpectedKeys:
    """Expected keys, counted by expectation, grouped by the scopes (all shards) in which they are
    wanted."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[bytes]] = {}

    def add(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """Count one more expectation that wants these keys in these scopes."""
        if len(keys):
            self._counts.setdefault(scopes, Counter()).update(each(keys))

    def remove(self, scopes: tuple[int, ...], keys: Keys) -> None:
        """Count one expectation less that wants these keys in these scopes."""
        its = self._counts.get(scopes, Counter())
        for key in each(keys):
            its[key] -= 1
            if not its[key]:
                del its[key]
        if not its:
            self._counts.pop(scopes, None)

    def flags(self, scopes: Sequence[int], keys: Keys) -> NDArray[np.bool_]:
        """Flags of the keys that are expected, [S][n]."""
        return flags_of(self._counts, scopes, keys)

    def __bool__(self) -> bool:
        return bool(self._counts)
