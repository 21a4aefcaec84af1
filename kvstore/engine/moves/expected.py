"""Expectations of prefill nodes: requests that wait, room that was granted for their blocks, and
keys by scopes, with how many requests want each.

Does not cover: what becomes of them (`grants`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policy.port import Words
from kvstore.engine.memory.table import Keys, each
from kvstore.engine.moves.landing import Extents
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection
from kvstore.engine.witness import PushTimes
from kvstore.units import NS_PER_S
from kvstore.wire.pushes import PushExpect

EXPECTS_MAX: Final = 256
"""Expectations of one engine."""
KEYS_MAX: Final = 1 << 17
"""Keys that one engine expects, 20 MiB: 16 prompts of 128k tokens in blocks of 16."""
ALL_KEYS_MAX: Final = 4 * KEYS_MAX
STALLED_NS: Final = 10 * NS_PER_S
STALLED_GAPS: Final = 3
"""A transfer without news for so long, and for as many times the longest wait between two news, is
not waited for: its prefill engine or node hangs. News are its blocks, and words that its engine
stores blocks of other requests: it has a queue. While they come, only the deadline counts."""
ASLEEP_NS: Final = NS_PER_S
"""Time between two ticks, which come ten times a second, from which on this node was suspended: it
could not hear of blocks."""


class Expectation(msgspec.Struct):
    """A PushExpect that has not ended."""

    connection: Connection
    session: int
    message: PushExpect
    asker: Asker
    missing: Keys
    """Keys that no tier held."""
    times: PushTimes
    until_ns: int
    news_ns: int
    """When news of its transfer came, the last time; at first, when it was expected."""
    has_come: NDArray[np.bool_]
    """Flags of those that were sealed since."""
    is_here: bool
    """Its prefill is on this node."""
    looked_ns: int = 0
    """When its keys were looked for, the last time: those of a prefill on this node."""
    granted: int = 0
    """Leading ones of these that were granted room."""
    reason: str | None = None
    """Why it has ended; None: it has not."""
    has_heard: bool = False
    gap_ns: int = 0
    """Longest wait for news after the first ones."""

    def hear(self, now_ns: int) -> None:
        """News of its transfer came."""
        if self.has_heard:
            self.gap_ns = max(self.gap_ns, now_ns - self.news_ns)
        self.has_heard, self.news_ns = True, now_ns

    def is_stalled(self, now_ns: int) -> bool:
        """Whether there was no news for too long."""
        return now_ns >= self.news_ns + max(STALLED_NS, STALLED_GAPS * self.gap_ns)

    def may_hear(self, now_ns: int, pause_ns: int) -> bool:
        """Whether a message without blocks is news; of too many, each would cost a look at all."""
        return self.reason is None and now_ns >= self.news_ns + pause_ns

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
    def transfer(self) -> tuple[int, str, str]:
        """Its transfer: another engine, or a request to another node, may use the same name."""
        return self.connection.id, self.message.node, self.message.transfer


class GrantedRoom(msgspec.Struct):
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
    revoked_ns: int = 0
    """0: it was not."""

    @property
    def node(self) -> str:
        """The peer that may write."""
        return self.expect.message.node


class LandingCopy(msgspec.Struct):
    """Blocks that are copied into these slots, one column per shard."""

    granted: GrantedRoom
    places: slice
    columns: list[Words]
    size_bytes: int
    since_ns: int
    is_void: bool = False

    @property
    def words(self) -> Words:
        """Slots of all columns."""
        return np.concatenate(self.columns)


def too_many(expects: Sequence[Expectation], connection: Connection, count: int) -> str:
    """Why this engine cannot expect so many keys more; empty: it can."""
    own = [len(its.missing) for its in expects if its.connection is connection]
    if len(own) >= EXPECTS_MAX:
        return "too many transfers are expected"
    of_all = sum(len(its.missing) for its in expects)
    if sum(own) + count > KEYS_MAX or of_all + count > ALL_KEYS_MAX:
        return "too many blocks are expected"
    return ""


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
            among = np.isin(scopes, these)
            if among.any():
                found = (key in its for key in each(keys))
                flags[among] |= np.fromiter(found, dtype=bool, count=len(keys))
        return flags

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpectedKeys) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]
