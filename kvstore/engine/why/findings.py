"""Findings: results of lookups, block by block, kept when a lease is asked for, examined later;
and of queries to other nodes about their blocks.

    LeaseAsk ──▶ Finding (blocks held then) ──Tick──▶ ranges (why the rest was not held)

Answering comes first: a lease costs no more than keeping the parts of its answer. Why the rest
missed is looked up at the next ticks, a bounded number of keys each, and a block that leaves the
tables meanwhile leaves a tombstone with a later time. Then the keys are dropped.

Rule: a finding describes the tables at the time of the lookup, not of its examination.
Does not cover: keeping findings (`trail`), requests (`explain`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.events import Candidate, Fetched
from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.owners import OwnerKey
from kvstore.engine.why.reasons import (
    NAME_SHIFT,
    SEARCH_SHIFT,
    TIME_SHIFT,
    Origin,
    Origins,
    Reason,
    tiers_of,
    unpack,
)
from kvstore.types import SpaceId
from kvstore.units import NS_PER_MS
from kvstore.wire.space import fingerprint

if TYPE_CHECKING:
    from kvstore.engine.state import State


# ── searches ──────────────────────────────────────────────────────────────────────────────────────
# Searches of other nodes for blocks: one record for each query to the index.
#
#     asked ─▶ no node, too dear, avoided, no room ─── or on its way ─▶ fetched, or failed
#
# Lookups that wait for the same blocks share the record, and so do those that would have asked
# again. The newest SEARCHES_MAX are kept, with counts, times and the names of nodes, no keys. Does
# not cover: decisions (`moves.fetches`), the blocks of a lookup that a search is about
# (`findings`).

SEARCHES_MAX: Final = 4096


class Search(msgspec.Struct):
    """One query to the index, and the results of its fetches."""

    number: int
    asked: int
    """Number of blocks in the query."""
    sought: Reason
    node: str = ""
    """Node that was chosen; if none was, the one that was too slow or in back-off."""
    known: int = 0
    """Leading blocks that the node has, by the index."""
    wanted: int = 0
    """Number of blocks for whose fetch there was room."""
    missing: int = 0
    """Known blocks that were not here when the index answered."""
    fetched: int = 0
    not_served: int = 0
    not_kept: int = 0
    damaged: int = 0
    is_void: bool = False
    """Cleared or switched off here while the blocks were on their way."""
    trouble: str = ""
    """Last failure, as the shell reported it."""
    failures: int = 0
    """Failures of the node in a row, when it was avoided."""
    fetch_ns: int = 0
    """Estimated time to fetch, as against `compute_ns` to compute, if computing was as quick."""
    compute_ns: int = 0
    begun_ns: int = 0
    ended_ns: int = 0
    under_way: int = 0
    """Number of fetches under way."""

    @property
    def is_late(self) -> bool:
        """Whether the fetched blocks come, or came, after the request had stopped waiting."""
        return self.sought is Reason.ON_ITS_WAY or (
            self.sought is Reason.FETCHED and self.wanted == self.missing
        )


class Searches:
    """Searches by the number of their query, and by the number of each fetch that followed from
    it."""

    def __init__(self) -> None:
        self._by_number: OrderedDict[int, tuple[Search, Sequence[int]]] = OrderedDict()
        """(search, place in the question of each key of this question or fetch)."""

    def get(self, number: int, at: int = 0) -> tuple[Search | None, int]:
        """The search with this number of a query or fetch, and the place in the query of key number
        `at`; (None, 0) if the search is not kept any more."""
        search, places = self._by_number.get(number, (None, ()))
        return search, int(places[at]) if search is not None else 0

    def _keep(self, number: int, search: Search, places: Sequence[int]) -> None:
        self._by_number[number] = search, places
        if len(self._by_number) > SEARCHES_MAX:
            self._by_number.popitem(last=False)

    def asked(self, question: int, blocks: int, why: Reason) -> None:
        """Record a query about this many blocks. `why`: NO_ANSWER_YET, or the reason why the index
        was not asked."""
        self._keep(question, Search(question, blocks, why), range(blocks))

    def judged(
        self, question: int, why: Reason, candidate: Candidate | None = None, *figures: float
    ) -> None:
        """Record the result of a query, or of one candidate in its answer. Among several nodes the
        one that was chosen last counts, else the one that was too slow for most blocks, else the
        first that was in back-off.

        Args:
            question: number of the query.
            why: the result.
            candidate: the node; None: the result concerns all of them.
            figures: failures of the node in a row; or estimated times in ns for fetching and for
                computing a block; or blocks to be fetched, without a candidate.
        """
        search, _ = self.get(question)
        if search is None:
            return
        if candidate is None:
            search.sought, search.missing = why, int(sum(figures))
            return
        known = min(candidate.blocks, search.asked)
        if why is Reason.NODE_AVOIDED and search.sought is not Reason.NOBODY_HAS_IT:
            return
        if why is Reason.FETCH_COST:
            if search.sought is Reason.HERE_BY_NOW or (search.fetch_ns and search.known >= known):
                return
            search.fetch_ns, search.compute_ns = (int(cost * known) for cost in figures)
        search.sought, search.node = why, candidate.node
        search.known, search.failures = known, int(figures[0]) if figures else 0

    def fetching(self, question: int, job: int, places: Sequence[int], now_ns: int) -> None:
        """A fetch began, of the blocks at these places of a question."""
        search, _ = self.get(question)
        if search is not None:
            search.sought, search.begun_ns = Reason.ON_ITS_WAY, search.begun_ns or now_ns
            search.wanted += len(places)
            search.under_way += 1
            self._keep(job, search, places)

    def fetched(self, event: Fetched, good: int, *, is_void: bool, now_ns: int) -> None:
        """A fetch ended with `good` good blocks. `is_void`: they were cleared or switched off
        meanwhile."""
        search, places = self._by_number.get(event.job, (None, ()))
        if search is None:
            return  # it is not kept any more
        self._by_number[event.job] = search, [int(places[0])]
        search.fetched += good
        search.not_served += event.not_served
        search.not_kept += event.not_kept
        search.damaged += event.damaged
        search.trouble = event.trouble or search.trouble
        search.is_void |= is_void
        search.under_way -= 1
        search.ended_ns = now_ns
        if not search.under_way:
            is_whole = search.fetched == search.wanted
            search.sought = Reason.FETCHED if is_whole else Reason.FETCH_FAILED


# ── findings ──────────────────────────────────────────────────────────────────────────────────────

RANGES_MAX: Final = 32
"""Most ranges of one lookup; the last one takes all further blocks."""
SPACE_DIGITS: Final = 16
"""Hex digits of a space, in rows for people."""
OTHER_SCOPES_MAX: Final = 256
"""Scopes that are searched for a block that is not in its own space."""

Flags = NDArray[np.bool_]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)
TIERS: Final = {Origin.DRAM: "dram", Origin.FILE: "file", Origin.PEER: "peer"}
_TIER_OF: Final = dict.fromkeys((Reason.BEHIND_A_GAP, Reason.PINNED_SHARE_USED_UP), "dram") | (
    dict.fromkeys((Reason.BEHIND_A_GAP_ON_DISK, Reason.NOT_READ, Reason.PROMOTION_DEADLINE), "file")
)
"""Tier of a block that was held and not leased, by the reason."""
ABSENT: Final = (Reason.NEVER_STORED, Reason.FORGOTTEN)
"""Reasons which mean: the block was not here, and the node has no record of it."""
_NOT_FETCHED: Final = (Reason.FETCH_COST, Reason.NODE_AVOIDED, Reason.NO_ROOM, Reason.FETCH_FAILED)
"""Reasons why a block that another node has did not come from there."""


class RangeReport(msgspec.Struct, frozen=True):
    """Neighbouring blocks with the same result."""

    first_block: int
    blocks: int
    tier: str = ""
    """Source of the blocks, or their place if they were not loaded: engine, dram, file, peer."""
    reason: Reason = Reason.NONE
    """Why the blocks were not loaded; none when they were."""
    node: str = ""
    """Other node that the blocks came from, or could have come from."""
    sought: Reason = Reason.NONE
    """Result of asking other nodes; none: they were not asked."""
    name: str = ""
    """Engine that room was made for, or space that holds the blocks."""
    left_ms: tuple[int, int] = (0, 0)
    """Shortest and longest time in ms from the departure of one of the blocks until the lookup."""
    search: Search | None = None
    """The query to other nodes, in full; None: there was none."""


class Finding(msgspec.Struct):
    """Result of one LeaseAsk with at least one key."""

    owner: OwnerKey
    address: tuple[str, SpaceId]
    """Tenant and space."""
    scopes: tuple[int, ...]
    """Scopes of the shards of the engine that asked."""
    asked_ns: int
    held: int = 0
    """Number of blocks leased at once."""
    arrived: int = 0
    """Number of blocks leased later, on arrival."""
    promoting: int | None = 0
    """Number of blocks behind the leased ones that were on their way; the next one ended the
    lookup. None: there was no lookup."""
    pieces: list[tuple[int, Origins]] = []
    """(place of the first block, origins) of each piece of leased blocks that were not all in
    dram."""
    searched: Search | None = None
    """Query to other nodes about the blocks that were not held, made now or earlier; None: none."""
    search_begin: int = 0
    """Place of the query's first block among those that were not held."""
    refused: tuple[int, int] = (0, 0)
    """(first, count) of the blocks, among those not held, that were in dram and could not be
    pinned."""
    keys: Keys | None = None
    """Keys of the blocks that were not leased at once, in chain order; None once they were
    examined."""
    present: Flags = NO_FLAGS
    """Flags of the blocks not leased at once, by the first shard: held in some tier. `in_dram`:
    held in dram."""
    in_dram: Flags = NO_FLAGS
    rest: list[RangeReport] = []
    """Ranges of the blocks that were not leased at once, once examined."""

    def take(self, origins: Origins | None) -> None:
        """Add the origins of blocks that are leased now; None: all were in dram."""
        if origins is not None:
            self.pieces.append((self.held + self.arrived, origins))

    def leased(self) -> Origins:
        """Origin, for this lookup, of each leased block."""
        origins = np.full(self.held + self.arrived, Origin.DRAM, dtype=np.int64)
        for begin, some in self.pieces:
            origins[begin : begin + len(some)] = some
        return origins

    def ranges(self, searches: Searches, begin: int) -> list[RangeReport]:
        """Ranges of leased blocks, then of the others, numbered from `begin`, the lookup's first
        block in the prompt. The finding must have been examined."""
        origins, found = self.leased(), []
        tiers = tiers_of(origins)
        for at, end in _runs(origins):
            search, _ = searches.get(int(origins[at]) >> SEARCH_SHIFT)
            row = RangeReport(begin + at, end - at, TIERS[Origin(int(tiers[at]))])
            found.append(_told_of(row, search, at=0))
        search, first = self.searched, self.search_begin
        places = (first, first + search.known, first + search.asked) if search is not None else ()
        for row in self.rest:
            for piece in cut(row, self.arrived, *places, moved=begin + self.held):
                at = piece.first_block - begin - self.held
                if at >= self.arrived:
                    is_asked = search is not None and first <= at < first + search.asked
                    found.append(_told_of(piece, search if is_asked else None, at=at - first))
        return found


def cut(row: RangeReport, *places: int, moved: int = 0) -> list[RangeReport]:
    """Pieces of the row, which begin at its start and at those of `places` inside it. `moved` is
    added to the number of each first block."""
    begin, end = row.first_block, row.first_block + row.blocks
    inside = [place for place in places if begin < place < end]
    if not inside:  # as of most rows
        return [msgspec.structs.replace(row, first_block=begin + moved)] if moved else [row]
    return [
        msgspec.structs.replace(row, first_block=at + moved, blocks=stop - at)
        for at, stop in itertools.pairwise(sorted({begin, *inside, end}))
    ]


def _told_of(row: RangeReport, search: Search | None, *, at: int) -> RangeReport:
    """The row with the results of a query to other nodes; `at`: place of the row's first block in
    that query."""
    if search is None:
        return row
    reason, is_its = row.reason, row.reason is Reason.NONE or at < search.known
    if is_its and not row.tier and search.is_late:
        reason = Reason.TOO_LATE
    elif is_its and reason in ABSENT and search.sought in _NOT_FETCHED:
        reason = search.sought
    return msgspec.structs.replace(
        row,
        reason=reason,
        node=search.node if is_its else "",
        sought=search.sought if is_its or not search.known else Reason.NOBODY_HAS_IT,
        search=msgspec.structs.replace(search),
    )


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def examine(state: State, finding: Finding, keys: Keys) -> list[RangeReport]:
    """Ranges of the blocks with these keys, which follow those leased at once: where each block
    was, or why it was in no tier."""
    scopes, present, in_dram = finding.scopes, finding.present, finding.in_dram
    promoting = finding.promoting
    codes = np.where(in_dram, Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK).astype(np.int64)
    stamps = np.zeros(len(keys), dtype=np.uint64)
    in_others = state.residency.find_all(scopes[1:], keys) >= 0
    codes[present & ~np.logical_and.reduce(in_others, axis=0)] = Reason.NOT_ALL_SHARDS
    absent = np.flatnonzero(~present)
    if len(absent):
        codes[absent], stamps[absent] = _absent(state, scopes[0], keys[absent], finding.asked_ns)
        some = np.logical_or.reduce(in_others, axis=0)
        codes[~present & some & (codes == Reason.NEVER_STORED)] = Reason.NOT_ALL_SHARDS
    if promoting is not None:
        end = int(absent[0]) if len(absent) else len(keys)
        if promoting < end and in_dram[promoting]:
            codes[promoting] = Reason.NOT_ALL_SHARDS  # what else could have ended it?
        unread = codes[promoting:end]
        unread[unread == Reason.BEHIND_A_GAP_ON_DISK] = Reason.NOT_READ
        # What is in no tier here may come from another node; why it is not here is the story.
        codes[:promoting][present[:promoting] & ~in_dram[:promoting]] = Reason.PROMOTION_DEADLINE
    begin, count = finding.refused
    codes[begin : begin + count] = Reason.PINNED_SHARE_USED_UP
    return _ranges(state, codes, stamps, finding.asked_ns)


def _absent(
    state: State, scope: int, keys: Keys, asked_ns: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    tombstones = state.trail.tombstones
    stamps = tombstones.find(scope, keys)
    nothing = Reason.FORGOTTEN if tombstones.has_overwritten else Reason.NEVER_STORED
    codes = np.full(len(keys), int(nothing), dtype=np.int64)
    # What left after it was asked for came after it was asked for.
    left = (stamps != 0) & (stamps >> np.uint64(TIME_SHIFT) <= np.uint64(asked_ns // NS_PER_MS))
    codes[(stamps != 0) & ~left] = Reason.FORGOTTEN
    codes[left] = (stamps[left] & np.uint64((1 << TIME_SHIFT) - 1)).astype(np.int64)
    stamps[~left] = 0
    unknown = np.flatnonzero(stamps == 0)
    if len(unknown):
        there, code = _elsewhere(state, scope, keys[unknown])
        codes[unknown[there]] = code
    return codes, stamps


def _elsewhere(state: State, scope: int, keys: Keys) -> tuple[Flags, int]:
    """Flags of the keys that another space of the same tenant holds, and a packed code of the
    reason and that space's name. The first key decides: a chain that another model has begins
    there."""
    residency = state.residency
    scopes = residency.scopes()
    own = next((address for address, number in scopes.items() if number == scope), None)
    others = [
        (number, space)
        for (tenant, space, _), number in scopes.items()
        if own is not None and tenant == own[0] and space != own[1]
    ]
    others = others[:OTHER_SCOPES_MAX]
    there = np.flatnonzero(residency.find_all([n for n, _ in others], keys[:1]) >= 0)
    if own is None or not len(there):
        return np.zeros(len(keys), dtype=bool), 0
    number, space = others[int(there[0])]
    why = Reason.RESET if _was_reset(state, own[:2], space) else Reason.OTHER_SPACE
    name = state.names.number(space.hex()[:SPACE_DIGITS])
    return residency.find(number, keys) >= 0, why | name << NAME_SHIFT


def _was_reset(state: State, own: tuple[str, SpaceId], space: SpaceId) -> bool:
    """Whether only a reset of the engine's cache separates its space from this other one."""
    known, other = state.known.get(own), state.known.get((own[0], space))
    if known is None or other is None or known.space != other.space:
        return False
    return own[1] != fingerprint(known.space, weights_epoch="")


def _ranges(
    state: State, codes: NDArray[np.int64], stamps: NDArray[np.uint64], until_ns: int
) -> list[RangeReport]:
    """One range for each run of blocks with the same code; `until_ns`: time of the lookup."""
    found: list[RangeReport] = []
    for begin, end in _runs(codes):
        if len(found) == RANGES_MAX - 1 and end < len(codes):
            found.append(RangeReport(begin, len(codes) - begin, "", Reason.TOO_MIXED))
            break
        about, its = unpack(int(codes[begin])), stamps[begin:end]
        left_ms = (0, 0)
        if about.why <= Reason.DIVERGED:
            ms = [until_ns // NS_PER_MS - unpack(int(n)).at_ms for n in (its.max(), its.min())]
            left_ms = (max(0, ms[0]), max(0, ms[1]))
        tier, name = _TIER_OF.get(about.why, ""), state.names.text(about.name)
        found.append(RangeReport(begin, end - begin, tier, about.why, name=name, left_ms=left_ms))
    return found


def _runs(codes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(begin, end) of each run of equal neighbours."""
    if len(codes) == 0:
        return []
    begins = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(codes)], strict=True))
