"""What became of asking other nodes for blocks: one record a question to the index, for `explain`.

    Locate ─▶ asking ─▶ nobody, too dear, avoided, no room ─── or on its way ─▶ fetched, or failed

Whoever asks for what is on its way shares the record, and so do those that would have asked again.
The newest SEARCHES_MAX are kept; it holds counts, times and the names of nodes, no keys. Does not
cover: what is decided (`fetches`), which blocks of a lookup it is about (`findings`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Final, NamedTuple

import msgspec

from kvstore.engine.events import Fetched
from kvstore.units import NS_PER_MS

SEARCHES_MAX: Final = 4096
NUMBER_MAX: Final = (1 << 32) - 1
"""They are kept beside slots, in 32 bits; then they begin again."""


class Sought(enum.Enum):
    """How far a search came. The words are told to scripts and stay."""

    ASKING = "no answer yet"
    INDEX_AWAY = "index away"
    BUSY = "too many questions"
    NOBODY = "nobody has it"
    HERE = "here by now"
    COST = "cost gate"
    AVOIDED = "node avoided"
    NO_ROOM = "no room"
    COMING = "on its way"
    FETCHED = "fetched"
    FAILED = "fetch failed"


class Search(msgspec.Struct):
    """One question, and what followed from it."""

    number: int
    """0: it was not asked at all."""
    asked: int
    """Blocks."""
    sought: Sought = Sought.ASKING
    node: str = ""
    """That was chosen, or would have been."""
    known: int = 0
    """Leading blocks that it has, by the index."""
    wanted: int = 0
    """To be fetched: there was room for so many."""
    missing: int = 0
    """Of the known ones, those that were not here by then."""
    fetched: int = 0
    not_lent: int = 0
    not_kept: int = 0
    damaged: int = 0
    trouble: str = ""
    """The last one, in words."""
    failures: int = 0
    """Of the node, in a row, when it was avoided."""
    fetch_ns: int = 0
    """Estimates of both ways, when computing was as quick."""
    compute_ns: int = 0
    begun_ns: int = 0
    ended_ns: int = 0
    under_way: int = 0
    """Fetches."""

    def begin(self, blocks: int, now_ns: int) -> None:
        """A fetch of so many of its blocks was asked for."""
        self.sought, self.begun_ns = Sought.COMING, self.begun_ns or now_ns
        self.wanted += blocks
        self.under_way += 1

    def end(self, event: Fetched, good: int, now_ns: int) -> None:
        """One of its fetches has ended, with so many good blocks."""
        self.fetched += good
        self.not_lent += event.not_lent
        self.not_kept += event.not_kept
        self.damaged += event.damaged
        self.trouble = event.trouble or self.trouble
        self.under_way -= 1
        self.ended_ns = now_ns
        if not self.under_way:
            self.sought = Sought.FETCHED if self.fetched == self.wanted else Sought.FAILED

    @property
    def is_late(self) -> bool:
        """Whether what was to be fetched comes, or came, after the request had stopped waiting."""
        return self.sought is Sought.COMING or (
            self.sought is Sought.FETCHED and self.wanted == self.missing
        )

    def of_what_came(self) -> str:
        """The way of blocks that are here."""
        took = f"{_ms(self.ended_ns - self.begun_ns)}"
        more = f" of {self.wanted}" if self.fetched < self.wanted else ""
        return f"from node {self.node}: {self.fetched}{more} blocks in {took}"

    def of_what_did_not(self, place: int) -> str:
        """Why the block at this place of the question is not here."""
        if self.known and place >= self.known:
            return f"no other node is known to hold it; node {self.node} has {self.known} before it"
        match self.sought:
            case Sought.COST:
                return (
                    f"node {self.node} holds it: fetching {self.known} blocks was estimated at "
                    f"{_ms(self.fetch_ns)}, computing them at {_ms(self.compute_ns)}"
                )
            case Sought.AVOIDED:
                times = "time" if self.failures == 1 else "times"
                return (
                    f"node {self.node} holds it, and was left alone after it failed {self.failures}"
                    f" {times} in a row"
                )
            case Sought.COMING | Sought.FETCHED | Sought.FAILED if self.wanted < self.missing:
                room = f"there was room for {self.wanted} of {self.missing}"
                return f"{self._of_fetches()}; {room}"
            case Sought.COMING | Sought.FETCHED | Sought.FAILED:
                return self._of_fetches()
            case _:
                return _WORDS[self.sought].format(node=self.node)

    def _of_fetches(self) -> str:
        came = f"{self.fetched} of {self.wanted} blocks came from node {self.node}"
        if self.sought is Sought.COMING:
            return f"{came} so far: the others took longer than waiting for them pays"
        took = _ms(self.ended_ns - self.begun_ns)
        if self.is_late:
            return f"{came} in {took}, which is longer than was waited for"
        counts = {
            "were not lent": self.not_lent,
            "did not stay until they were read": self.not_kept,
            "failed their checksums": self.damaged,
        }
        why = [f"{count} {what}" for what, count in counts.items() if count]
        return f"{came} in {took}" + "".join(
            f"; {each}" for each in (*why, *filter(None, [self.trouble]))
        )


class Wanted(NamedTuple):
    """What a lookup may wait for, and what it shares."""

    coming: int = 0
    """Leading blocks that are on their way, or may be."""
    search: Search | None = None
    """None: other nodes are not asked."""
    place: int = 0
    """Of the lookup's first block among those that were asked about."""


class Searches:
    """By number."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, Search] = OrderedDict()
        self._last = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def begin(self, asked: int) -> Search:
        """Another question."""
        self._last = self._last % NUMBER_MAX + 1
        search = self._by_number[self._last] = Search(self._last, asked)
        if len(self._by_number) > SEARCHES_MAX:
            self._by_number.popitem(last=False)
        return search

    def get(self, number: int) -> Search | None:
        """None: it is not remembered any more."""
        return self._by_number.get(number)


_WORDS: Final = {
    Sought.ASKING: "the index had not answered yet which other node holds it",
    Sought.INDEX_AWAY: "which other node holds it is not known: the index does not answer",
    Sought.BUSY: "other nodes were not asked: too many questions were under way",
    Sought.NOBODY: "no other node is known to hold it",
    Sought.HERE: "what node {node} holds was here by then",
    Sought.NO_ROOM: "node {node} holds it, and dram had no room for what comes from there",
}


def _ms(ns: int) -> str:
    return f"{ns / NS_PER_MS:.1f} ms"
