"""Findings: results of lookups, block by block, kept when a lease is asked for, examined later.

    LeaseAsk ──add──▶ Finding (blocks held then) ──Tick──▶ ranges (why the rest was not held)

Answering comes first: a lease costs no more than keeping the parts of its answer. Why the rest
missed is looked up at the next ticks, a bounded number of keys each, and a block that leaves the
tables meanwhile leaves a tombstone with a later time. Then the keys are dropped.

Rules. 1: everything is bounded: FINDINGS_MAX lookups, RANGES_MAX ranges each, PENDING_KEYS_MAX
keys. 2: a finding describes the tables at the time of the lookup, not of its examination.
Does not cover: requests (`explain`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.residency import Residency
from kvstore.engine.memory.table import Keys
from kvstore.engine.sessions.askers import Asker
from kvstore.engine.sessions.owners import Connection, Owner, OwnerKey
from kvstore.engine.why.reasons import Reason
from kvstore.engine.why.searches import Search, Searches
from kvstore.engine.why.tombstones import NAME_SHIFT, TIME_SHIFT, unpack
from kvstore.engine.witness import Origin, Origins
from kvstore.units import NS_PER_MS

if TYPE_CHECKING:
    from kvstore.engine.state import State

FINDINGS_MAX: Final = 4096
RANGES_MAX: Final = 32
"""Ranges of one lookup; all blocks behind them share one range."""
PENDING_KEYS_MAX: Final = 1 << 16
LOOKS_PER_TICK: Final = 16_384
"""Looks at a key in a shard: some milliseconds of the loop."""
LOOKS_OF_ONE: Final = 256
"""Looks that a lookup is charged at least."""
SPACE_DIGITS: Final = 16
"""Hex digits of a space, in rows for people."""
OTHER_SCOPES_MAX: Final = 256
"""Scopes that are searched for a block that is not in its own space."""

Flags = NDArray[np.bool_]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)
TIERS: Final = {Origin.DRAM: "dram", Origin.FILE: "file", Origin.PEER: "peer"}
_TIER_OF: Final = {
    Reason.BEHIND_A_GAP: "dram",
    Reason.PINNED_SHARE_USED_UP: "dram",
    Reason.BEHIND_A_GAP_ON_DISK: "file",
    Reason.NOT_READ: "file",
    Reason.PROMOTION_DEADLINE: "file",
}
"""Tier of a block that was not leased."""


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
    """Time from when the last and the first of the blocks left until the lookup."""
    search: Search | None = None
    """The question to other nodes in full."""


class Brought(NamedTuple):
    """Origins of neighbouring leased blocks."""

    origins: Origins
    searches: NDArray[np.int64]
    """Number of the search that brought each block from another node, or 0."""


class Finding:
    """One LeaseAsk of at least one key."""

    def __init__(
        self,
        owner: Owner,
        asker: Asker,
        now_ns: int,
        held: int = 0,
        promoting: int = 0,
    ) -> None:
        self.owner: OwnerKey = owner.key
        self.asker = asker
        self.asked_ns = now_ns
        self.held = held
        """Number of blocks leased at once."""
        self.arrived = 0
        """Number of blocks leased later, on arrival."""
        self.promoting = promoting
        self.pieces: list[tuple[int, Brought]] = []
        """(place of the first block, origins) of pieces of which not all were in dram."""
        self.searched: Search | None = None
        """Question to other nodes, new or earlier, about the blocks that were not held."""
        self.search_begin = 0
        """Place of the search's first block among those that were not held."""
        self.refused = (0, 0)
        """(first, count) of the blocks not held that were in dram and could not be pinned."""
        self.keys: Keys | None = None
        """Keys of the blocks that were not held; None once examined."""
        self.present, self.in_dram = NO_FLAGS, NO_FLAGS
        """Flags of the blocks not held, by the first shard: in some tier, in dram."""
        self.rest: list[RangeReport] = []
        """Ranges of the blocks that were not held, once examined."""

    def close(self, rest: list[RangeReport]) -> None:
        """End the examination: keep the ranges, drop the keys."""
        self.rest, self.keys = rest, None
        self.present, self.in_dram = NO_FLAGS, NO_FLAGS

    def brought(self, begin: int, brought: Brought | None) -> None:
        """Add the origins of the leased blocks from `begin` on; None: all were in dram."""
        if brought is not None:
            self.pieces.append((begin, brought))

    def origins(self) -> Origins:
        """Origin, for this lookup, of each leased block."""
        return self._leased()[0]

    def _leased(self) -> tuple[Origins, NDArray[np.int64]]:
        """Origin and search of each leased block."""
        count = self.held + self.arrived
        origins = np.full(count, Origin.DRAM, dtype=np.uint8)
        searches = np.zeros(count, dtype=np.int64)
        for begin, some in self.pieces:
            origins[begin : begin + len(some.origins)] = some.origins
            searches[begin : begin + len(some.origins)] = some.searches
        return origins, searches

    def ranges(self, searches: Searches) -> list[RangeReport]:
        """Ranges of leased blocks, then of the others. The finding must have been examined."""
        origins, numbers = self._leased()
        found = []
        for begin, end in _runs(origins | numbers << 8):
            search, _ = searches.get(int(numbers[begin]))
            row = RangeReport(begin, end - begin, TIERS[Origin(int(origins[begin]))])
            found.append(_told_of(row, search, at=0))
        for row in self.rest:
            end = row.first_block + row.blocks
            found += self._sought(row, max(row.first_block, self.arrived), end)
        return found

    def _sought(self, row: RangeReport, begin: int, end: int) -> list[RangeReport]:
        """Blocks from `begin` to `end` of those that were not held, in pieces that share one result
        of other nodes."""
        search, first = self.searched, self.search_begin
        cuts = {begin, max(begin, end)}
        if search is not None:
            places = (first, first + search.known, first + search.asked)
            cuts |= {place for place in places if begin < place < end}
        pieces = []
        for at, stop in itertools.pairwise(sorted(cuts)):
            piece = msgspec.structs.replace(row, first_block=self.held + at, blocks=stop - at)
            is_asked = search is not None and first <= at < first + search.asked
            pieces.append(_told_of(piece, search if is_asked else None, at=at - first))
        return pieces


def _told_of(row: RangeReport, search: Search | None, *, at: int) -> RangeReport:
    """The row with the results of other nodes, for blocks from a place of the search on."""
    if search is None:
        return row
    is_served = row.reason is Reason.NONE
    is_its = is_served or at < search.known
    return msgspec.structs.replace(
        row,
        reason=Reason.TOO_LATE if is_its and not row.tier and search.is_late else row.reason,
        node=search.node if is_its else "",
        sought=search.sought if is_its or not search.known else Reason.NOBODY_HAS_IT,
        search=msgspec.structs.replace(search),
    )


class Findings:
    """The latest lookups of a node, by (session, lease)."""

    def __init__(self) -> None:
        self._by_lease: OrderedDict[tuple[int, int], Finding] = OrderedDict()
        self._pending: deque[Finding] = deque()
        self._pending_keys = 0

    def __len__(self) -> int:
        return len(self._by_lease)

    def add(self, connection: Connection, lease: int, finding: Finding) -> None:
        """Keep a finding, in place of the oldest."""
        self._by_lease[connection.owner.open_session, lease] = finding
        if len(self._by_lease) > FINDINGS_MAX:
            self._by_lease.popitem(last=False)
        if finding.keys is not None:
            count = len(finding.keys)
            if self._pending_keys + count > PENDING_KEYS_MAX:
                finding.close([RangeReport(0, count, "", Reason.UNEXAMINED)])
            else:
                self._pending_keys += count
                self._pending.append(finding)

    def latest(self, session: int, lease: int) -> Finding | None:
        """The finding of this lease; None: not kept any more."""
        return self._by_lease.get((session, lease))

    def get(self, owner: OwnerKey, session: int, lease: int) -> Finding | None:
        """The finding of this engine's lookup, if it is still kept."""
        finding = self.latest(session, lease)
        return finding if finding is not None and finding.owner == owner else None

    def tick(self, state: State) -> None:
        """Examine some of the findings that wait."""
        budget = LOOKS_PER_TICK
        while self._pending and budget > 0:
            finding = self._pending.popleft()
            if finding.keys is not None:
                budget -= max(len(finding.keys) * len(finding.asker.scopes), LOOKS_OF_ONE)
                self.examine(finding, state)

    def examine(self, finding: Finding, state: State) -> None:
        """Examine a finding now: on request, or in its turn."""
        if finding.keys is None:
            return
        self._pending_keys -= len(finding.keys)
        codes, stamps = examine(
            state,
            finding.asker.scopes,
            finding.keys,
            present=finding.present,
            in_dram=finding.in_dram,
            promoting=finding.promoting,
            asked_ns=finding.asked_ns,
        )
        begin, count = finding.refused
        codes[begin : begin + count] = Reason.PINNED_SHARE_USED_UP
        finding.close(ranges(state, codes, stamps, finding.asked_ns))

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        assert len(self._by_lease) <= FINDINGS_MAX
        waiting = [len(f.keys) for f in self._pending if f.keys is not None]
        assert sum(waiting) == self._pending_keys <= PENDING_KEYS_MAX
        for finding in self._by_lease.values():
            assert len(finding.rest) <= RANGES_MAX
            assert (finding.keys is None) or not finding.rest
            assert finding.arrived <= finding.promoting


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def examine(
    state: State,
    scopes: Sequence[int],
    keys: Keys,
    *,
    present: Flags,
    in_dram: Flags,
    promoting: int | None,
    asked_ns: int,
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Per key a code (reason and name, packed as in a stamp) and the stamp of its departure.

    Args:
        state: of the node, now.
        scopes: the shards of the engine that asked.
        keys: in chain order; before the first of them everything was held.
        present: flags of the keys that some tier held at `asked_ns`, by the first shard.
        in_dram: flags of those that were in dram.
        promoting: so many of the first ones were on their way, and the next one ended the
            lookup; None: there was no lookup.
        asked_ns: time of the lookup.
    """
    residency = state.residency
    codes = np.where(in_dram, Reason.BEHIND_A_GAP, Reason.BEHIND_A_GAP_ON_DISK).astype(np.int64)
    stamps = np.zeros(len(keys), dtype=np.uint64)
    some, every = _in_other_shards(residency, scopes[1:], keys)
    codes[present & ~every] = Reason.NOT_ALL_SHARDS
    absent = np.flatnonzero(~present)
    if len(absent):
        codes[absent], stamps[absent] = _absent(state, scopes[0], keys[absent], asked_ns)
        unexplained = ~present & some & (codes == Reason.NEVER_STORED)
        codes[unexplained] = Reason.NOT_ALL_SHARDS
    if promoting is not None:
        end = int(absent[0]) if len(absent) else len(keys)
        if promoting < end and in_dram[promoting]:
            codes[promoting] = Reason.NOT_ALL_SHARDS  # what else could have ended it?
        unread = codes[promoting:end]
        unread[unread == Reason.BEHIND_A_GAP_ON_DISK] = Reason.NOT_READ
        # What is in no tier here may come from another node; why it is not here is the story.
        codes[:promoting][present[:promoting] & ~in_dram[:promoting]] = Reason.PROMOTION_DEADLINE
    return codes, stamps


def _in_other_shards(
    residency: Residency, scopes: Sequence[int], keys: Keys
) -> tuple[Flags, Flags]:
    """Flags of the keys that some of these shards know, and of those that all of them know."""
    there = residency.find_all(scopes, keys) >= 0
    return np.logical_or.reduce(there, axis=0), np.logical_and.reduce(there, axis=0)


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
    low = (stamps & np.uint64((1 << TIME_SHIFT) - 1)).astype(np.int64)
    codes[left] = low[left]
    stamps[~left] = 0
    unknown = np.flatnonzero(stamps == 0)
    if len(unknown):
        there, name = _elsewhere(state, scope, keys[unknown])
        codes[unknown[there]] = int(Reason.OTHER_SPACE) | name << NAME_SHIFT
    return codes, stamps


def _elsewhere(state: State, scope: int, keys: Keys) -> tuple[Flags, int]:
    """Flags of the keys that another space of the same tenant holds, and that space's name. The
    first key decides: a chain that another model has begins there."""
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
    if not len(there):
        return np.zeros(len(keys), dtype=bool), 0
    number, space = others[int(there[0])]
    return residency.find(number, keys) >= 0, state.names.number(space.hex()[:SPACE_DIGITS])


def ranges(
    state: State, codes: NDArray[np.int64], stamps: NDArray[np.uint64], until_ns: int
) -> list[RangeReport]:
    """Ranges of neighbours with one code; `until_ns`: time of the lookup."""
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
        found.append(
            RangeReport(
                begin,
                end - begin,
                _TIER_OF.get(about.why, ""),
                about.why,
                name=state.names.text(about.name),
                left_ms=left_ms,
            )
        )
    return found


def _runs(codes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(begin, end) of each run of neighbours with one code."""
    if len(codes) == 0:
        return []
    begins = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(codes)], strict=True))
