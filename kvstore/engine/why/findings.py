"""Findings: results of lookups, block by block, kept when a lease is asked for, examined later;
and the trail that keeps them, beside what moves and tables report.

    LeaseAsk ──▶ Finding (blocks held then) ──Tick──▶ ranges (why the rest was not held)

Answering comes first: a lease costs no more than keeping the parts of its answer. Why the rest
missed is looked up at the next ticks, a bounded number of keys each, and a block that leaves the
tables meanwhile leaves a tombstone with a later time. Then the keys are dropped.

Rule: a finding describes the tables at the time of the lookup, not of its examination.
Does not cover: the values that are reported (`reasons`), requests (`explain`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.owners import Connection, OwnerKey
from kvstore.engine.why.reasons import (
    FROM_DISK,
    FROM_DRAM,
    NAME_SHIFT,
    TIME_SHIFT,
    Origins,
    PushReport,
    Reason,
    Search,
    Tombstones,
)
from kvstore.types import Latest, SpaceId
from kvstore.units import NS_PER_MS
from kvstore.wire.space import fingerprint

if TYPE_CHECKING:
    from kvstore.engine.memory.residency import Run
    from kvstore.engine.state import State

RANGES_MAX: Final = 32
"""Most ranges of one lookup; the last one takes all further blocks."""
SPACE_DIGITS: Final = 16
"""Hex digits of a space, in rows for people."""
OTHER_SCOPES_MAX: Final = 256
"""Scopes that are searched for a block that is not in its own space."""

Flags = NDArray[np.bool_]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)
TIERS: Final = ("dram", "file", "peer")
_HERE: Final = {FROM_DRAM: "dram", FROM_DISK: "file"}
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

    def leave(self, run: Run, keys: Keys) -> None:
        """Keep the keys behind the leased `run` until they are examined, and which are held."""
        if len(keys):
            # Copies: they may be a few of a large message, all of which would be kept.
            self.keys = keys.copy()
            # Flags: to keep the arrays would cost more than to make these.
            self.present = run.rows_by_shard[0][run.count :] >= 0
            self.in_dram = run.words_by_shard[0][run.count :] >= 0

    def leased(self) -> Origins:
        """Origin, for this lookup, of each leased block."""
        origins = np.full(self.held + self.arrived, FROM_DRAM, dtype=np.int64)
        for begin, some in self.pieces:
            origins[begin : begin + len(some)] = some
        return origins

    def ranges(self, searches: Mapping[int, Search], begin: int) -> list[RangeReport]:
        """Ranges of leased blocks, then of the others, numbered from `begin`, the lookup's first
        block in the prompt. The finding must have been examined."""
        origins, found = self.leased(), []
        for at, end in _runs(origins):
            origin = int(origins[at])
            row = RangeReport(begin + at, end - at, _HERE.get(origin, "peer"))
            found.append(_told_of(row, searches.get(origin), at=0))
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
    in_others = state.residency.table.find_all(scopes[1:], keys) >= 0
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
    there = np.flatnonzero(residency.table.find_all([n for n, _ in others], keys[:1]) >= 0)
    if own is None or not len(there):
        return np.zeros(len(keys), dtype=bool), 0
    number, space = others[int(there[0])]
    why = Reason.RESET if _was_reset(state, own[:2], space) else Reason.OTHER_SPACE
    name = state.names.number(space.hex()[:SPACE_DIGITS])
    return residency.table.find(number, keys) >= 0, why | name << NAME_SHIFT


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
        name, number = divmod(int(codes[begin]), 1 << NAME_SHIFT)
        why, its = Reason(number), stamps[begin:end]
        left_ms = (0, 0)
        if why <= Reason.DIVERGED:
            ms = [until_ns // NS_PER_MS - (int(n) >> TIME_SHIFT) for n in (its.max(), its.min())]
            left_ms = (max(0, ms[0]), max(0, ms[1]))
        its_name, tier = state.names.text(name), _TIER_OF.get(why, "")
        found.append(RangeReport(begin, end - begin, tier, why, name=its_name, left_ms=left_ms))
    return found


def _runs(codes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(begin, end) of each run of equal neighbours."""
    if len(codes) == 0:
        return []
    begins = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(codes)], strict=True))


# ── trail ─────────────────────────────────────────────────────────────────────────────────────────
# What moves, lookups and tables report, in a bounded history.
#
#     left ─▶ tombstones     looked up, grew ─▶ findings     asked, judged, fetched ─▶ searches
#     pushes: asked ─▶ granted ─▶ first byte ─▶ last byte ─▶ verified and sealed ─▶ pushed
#
# Rules. 1: no move depends on what it reports. 2: all is bounded:
# FINDINGS_MAX lookups, PENDING_KEYS_MAX keys that wait to be examined, SEARCHES_MAX searches,
# TRANSFERS_MAX transfers of PARTS_MAX pushes, with counts, times and names of nodes only.

SEARCHES_MAX: Final = 4096
FINDINGS_MAX: Final = 4096
PENDING_KEYS_MAX: Final = 1 << 16
LOOKS_PER_TICK: Final = 16_384
"""Looks at a key in a shard: some milliseconds of the loop."""
LOOKS_OF_ONE: Final = 256
"""Looks that a lookup is charged at least."""
TRANSFERS_MAX: Final = 1024
PARTS_MAX: Final = 64
"""Pushes of one transfer: a group of a long prompt has several."""


class Trail:
    """The trail of one node."""

    def __init__(self, *, block_count_max: int) -> None:
        self.tombstones = Tombstones(block_count_max=block_count_max)
        self.searches = Latest[int, Search](SEARCHES_MAX)
        self._findings = Latest[tuple[int, int], Finding](FINDINGS_MAX)
        """The latest lookups, by (session, lease)."""
        self._pending: deque[Finding] = deque()
        self._pending_keys = 0
        self._pushes = Latest[tuple[str, str], list[PushReport]](TRANSFERS_MAX)
        """Pushes that have ended, by (tenant, transfer)."""

    # ── reports ──────────────────────────────────────────────────────────────────────────────────

    def looked_up(self, connection: Connection, lease: int, finding: Finding) -> None:
        """A LeaseAsk was answered: keep its finding; the oldest one gives way. Keys that were not
        leased are queued to be examined."""
        self._findings[connection.owner.open_session, lease] = finding
        if finding.keys is not None:
            count = len(finding.keys)
            if self._pending_keys + count > PENDING_KEYS_MAX:
                _close(finding, [RangeReport(0, count, "", Reason.UNEXAMINED)])
            else:
                self._pending_keys += count
                self._pending.append(finding)

    def grew(
        self, session: int, lease: int, run: Run, origins: Origins | None, refused: int
    ) -> None:
        """A lease grew by the blocks of `run`, which had been on their way; `refused` further ones
        could not be pinned."""
        finding = self._findings.get((session, lease))
        if finding is not None:
            finding.take(origins)
            finding.arrived += run.count
            finding.refused = (finding.arrived, refused)

    def pushed(self, tenant: str, transfer: str, report: PushReport) -> None:
        """A push of a transfer has ended."""
        told = self._pushes.setdefault((tenant, transfer), [])
        if len(told) < PARTS_MAX:
            told.append(report)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────

    def finding(self, owner: OwnerKey, session: int, lease: int) -> Finding | None:
        """The finding of this engine's lookup, if it is still kept."""
        finding = self._findings.get((session, lease))
        return finding if finding is not None and finding.owner == owner else None

    def pushes(self, tenant: str, transfer: str) -> tuple[PushReport, ...]:
        """Ended pushes of this transfer that are still remembered."""
        return tuple(self._pushes.get((tenant, transfer), ()))

    def tick(self, state: State) -> None:
        """Examine some of the findings that wait."""
        budget = LOOKS_PER_TICK
        while self._pending and budget > 0:
            finding = self._pending.popleft()
            if finding.keys is not None:
                budget -= max(len(finding.keys) * len(finding.scopes), LOOKS_OF_ONE)
                self.examine(finding, state)

    def examine(self, finding: Finding, state: State) -> None:
        """Examine a finding now, unless that was done: on request, or in its turn."""
        if finding.keys is not None:
            self._pending_keys -= len(finding.keys)
            _close(finding, examine(state, finding, finding.keys))


def _close(finding: Finding, rest: list[RangeReport]) -> None:
    """Store the ranges of an examined finding and drop its keys."""
    finding.rest, finding.keys = rest, None
    finding.present = finding.in_dram = NO_FLAGS
