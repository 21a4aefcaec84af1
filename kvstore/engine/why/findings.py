"""What each lookup found, block by block: kept when a lease is asked for, examined later.

    LeaseAsk ──add──▶ Finding (what was held then) ──Tick──▶ spans (why the rest was not)

Answering comes first: a lease costs no more than remembering what its answer was made of. Why the
rest missed is looked up at the next ticks, a bounded number of keys each, and whatever leaves the
tables meanwhile leaves a tombstone with a later time. Then the keys are dropped.

Rules. 1: everything is bounded: FINDINGS_MAX lookups, SPANS_MAX spans each, PENDING_KEYS_MAX keys.
2: what a lookup found is what was held when it was asked, not when it is examined.
Does not cover: requests (`explain`).
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.residency import Residency
from kvstore.engine.memory.table import Keys
from kvstore.engine.memory.tombstones import NAME_SHIFT, TIME_SHIFT, Why, unpack
from kvstore.engine.moves.searches import Search, Searches, Wanted
from kvstore.engine.sessions.owners import Connection, OwnerKey
from kvstore.engine.sessions.runs import Run
from kvstore.engine.state import State
from kvstore.units import NS_PER_MS

FINDINGS_MAX: Final = 4096
SPANS_MAX: Final = 32
"""Of one lookup; what lies behind is not told apart."""
PENDING_KEYS_MAX: Final = 1 << 16
LOOKS_PER_TICK: Final = 16_384
"""At a key in a shard: some milliseconds of the loop."""
LOOKS_OF_ONE: Final = 256
"""That a lookup takes at least."""
SPACE_DIGITS: Final = 16
"""Of a space, in rows for people."""
OTHER_SCOPES_MAX: Final = 256
"""Looked into for a block that is not in its own space."""
_WHY_SHIFT: Final = 8

Flags = NDArray[np.bool_]
NO_FLAGS: Flags = np.empty(0, dtype=np.bool_)


class Found(enum.IntEnum):
    """Where a block was when it was asked for, or why nowhere."""

    DRAM = 1
    FILE = 2
    """Came to dram from disk, for this lookup."""
    COMING = 3
    """On disk, and being read."""
    NOT_READ = 4
    """On disk; so much is being read that this was not begun."""
    BEHIND_DRAM = 5
    """In dram, behind a block that is not."""
    BEHIND_FILE = 6
    SOME_SHARDS = 7
    ELSEWHERE = 8
    """In another space of the tenant."""
    LEFT = 9
    NEVER = 10
    FORGOTTEN = 11
    """Not there; why is not known any more."""
    UNEXAMINED = 12
    """Not there; nobody looked why, because there were too many lookups."""
    MIXED = 13
    """Behind SPANS_MAX spans."""
    SWITCHED_OFF = 14
    """Nobody looked: the space is switched off."""
    PEER = 15
    """Came to dram from another node, for this lookup."""
    NOT_PINNED = 16
    """In dram; its engine may pin no more."""


class Origin(enum.IntEnum):
    """Where a leased block was when it was asked for."""

    DRAM = 0
    FILE = 1
    PEER = 2


_FOUND_OF_ORIGIN = np.array([Found.DRAM, Found.FILE, Found.PEER], dtype=np.int64)
Origins = NDArray[np.uint8]
"""An `Origin` per block."""


class Brought(NamedTuple):
    """Where neighbouring leased blocks came from."""

    origins: Origins
    searches: NDArray[np.uint32] | None
    """Number of the search that brought each from another node; None: none came from there."""


class Span(msgspec.Struct, frozen=True):
    """Neighbouring blocks with the same story."""

    blocks: int
    found: Found
    why: Why = Why.UNKNOWN
    name: int = 0
    """Of the engine that needed the room, or of the space."""
    first_ms: int = 0
    """Of a departure: when the first of them left."""
    last_ms: int = 0
    search: Search | None = None
    """That brought it here, or did not."""
    place: int = 0
    """Of the first of them among those that the search asked about, if it did not."""


class Finding:
    """One LeaseAsk of at least one key."""

    __slots__ = (
        "arrived",
        "asked_ns",
        "brought_pieces",
        "held",
        "in_dram",
        "keys",
        "owner",
        "present",
        "promoting",
        "refused",
        "scopes",
        "search_begin",
        "searched",
        "spans",
    )

    def __init__(
        self, connection: Connection, run: Run, keys: Keys, promoting: int, now_ns: int
    ) -> None:
        self.owner: OwnerKey = connection.owner.key
        self.scopes = connection.owner.scopes
        self.asked_ns = now_ns
        self.held = run.count
        """Leased at once."""
        self.arrived = 0
        """Leased later, as they came."""
        self.brought_pieces: list[tuple[int, Brought]] = []
        """(place of the first, where they came from) of pieces of which not all were in dram."""
        self.searched: Search | None = None
        """Other nodes were asked, or not asked again, for what was not here."""
        self.search_begin = 0
        """Where the first block that it asked about would be among those that were not held."""
        self.promoting = promoting
        self.refused = (0, 0)
        """Of what was not held: the first that was in dram and not pinned, and how many were."""
        # A copy: these may be a few of a large message, all of which would be kept.
        self.keys: Keys | None = keys.copy() if len(keys) else None
        """What was not held; None once examined."""
        self.present, self.in_dram = NO_FLAGS, NO_FLAGS
        """Of what was not held, by the first shard: in some tier, in dram."""
        if len(keys):
            # Flags: to keep the arrays would cost more than to make these.
            self.present = run.rows_by_shard[0][run.count :] >= 0
            self.in_dram = run.words_by_shard[0][run.count :] >= 0
        self.spans: list[Span] = []
        """Of what was not held."""

    @property
    def block_count(self) -> int:
        """Blocks asked for."""
        rest = len(self.keys) if self.keys is not None else sum(s.blocks for s in self.spans)
        return self.held + rest

    def was_switched_off(self) -> Finding:
        """Nothing was looked for."""
        assert self.keys is not None
        _close(self, [Span(len(self.keys), Found.SWITCHED_OFF)])
        return self

    def origins(self) -> Origins:
        """Where each of the leased blocks came from for this lookup."""
        origins = np.full(self.held + self.arrived, Origin.DRAM, dtype=np.uint8)
        for begin, some in self.brought_pieces:
            origins[begin : begin + len(some.origins)] = some.origins
        return origins

    def brought(self, begin: int, brought: Brought | None) -> None:
        """Where the leased blocks from `begin` on came from; None: all were in dram."""
        if brought is not None:
            self.brought_pieces.append((begin, brought))

    def wants(self, wanted: Wanted, *, behind: int) -> None:
        """What other nodes have to do with what is not held, but for the first so many."""
        self.searched, self.search_begin = wanted.search, behind - wanted.place

    def every_span(self, searches: Searches) -> list[Span]:
        """What was found, then what was not. It must have been examined."""
        rest, at = [], 0
        for span in self.spans:
            end = at + span.blocks
            for begin, stop in self._cut(max(at, self.arrived), end):
                rest.append(self._sought(span, begin, stop))
            at = end
        return self._found(searches) + rest

    def _found(self, searches: Searches) -> list[Span]:
        numbers = np.zeros(self.held + self.arrived, dtype=np.int64)
        for begin, some in self.brought_pieces:
            if some.searches is not None:
                numbers[begin : begin + len(some.searches)] = some.searches
        codes = _FOUND_OF_ORIGIN[self.origins()] | numbers << _WHY_SHIFT
        found = []
        for begin, end in _runs(codes):
            its = Found(int(codes[begin]) & ((1 << _WHY_SHIFT) - 1))
            found.append(Span(end - begin, its, search=searches.get(int(numbers[begin]))))
        return found

    def _cut(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The blocks that were not held from `begin` to `end`, in pieces that share one story of
        other nodes."""
        if begin >= end:
            return []
        cuts = {begin, end}
        if self.searched is not None:
            first = self.search_begin
            places = (first, first + self.searched.known, first + self.searched.asked)
            cuts |= {place for place in places if begin < place < end}
        every = sorted(cuts)
        return list(itertools.pairwise(every))

    def _sought(self, span: Span, begin: int, end: int) -> Span:
        place, search = begin - self.search_begin, self.searched
        if search is None or not 0 <= place < search.asked:
            return msgspec.structs.replace(span, blocks=end - begin)
        return msgspec.structs.replace(span, blocks=end - begin, search=search, place=place)


class Findings:
    """The latest lookups of a node, by (session, lease)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._by_lease: OrderedDict[tuple[int, int], Finding] = OrderedDict()
        self._pending: deque[Finding] = deque()
        self._pending_keys = 0

    def __len__(self) -> int:
        return len(self._by_lease)

    def add(self, session: int, lease: int, finding: Finding) -> Finding:
        """Keep it, in place of the oldest."""
        self._by_lease[session, lease] = finding
        if len(self._by_lease) > FINDINGS_MAX:
            self._by_lease.popitem(last=False)
        if finding.keys is not None:
            count = len(finding.keys)
            if self._pending_keys + count > PENDING_KEYS_MAX:
                _close(finding, [Span(count, Found.UNEXAMINED)])
            else:
                self._pending_keys += count
                self._pending.append(finding)
        return finding

    def get(self, owner: OwnerKey, session: int, lease: int) -> Finding | None:
        """That of this engine's lookup, if it is still remembered."""
        finding = self._by_lease.get((session, lease))
        return finding if finding is not None and finding.owner == owner else None

    def tick(self) -> None:
        """Examine some of what waits."""
        budget = LOOKS_PER_TICK
        while self._pending and budget > 0:
            finding = self._pending.popleft()
            if finding.keys is not None:
                budget -= max(len(finding.keys) * len(finding.scopes), LOOKS_OF_ONE)
                self.examine(finding)

    def examine(self, finding: Finding) -> None:
        """Now, because somebody asks for it, or because it is its turn."""
        if finding.keys is not None:
            self._pending_keys -= len(finding.keys)
            self._examine(finding)

    def _examine(self, finding: Finding) -> None:
        assert finding.keys is not None
        codes, stamps = examine(
            self._state,
            finding.scopes,
            finding.keys,
            present=finding.present,
            in_dram=finding.in_dram,
            promoting=finding.promoting,
            asked_ns=finding.asked_ns,
        )
        begin, count = finding.refused
        codes[begin : begin + count], stamps[begin : begin + count] = Found.NOT_PINNED, 0
        _close(finding, spans(codes, stamps))

    def check(self) -> None:
        """Raises AssertionError when a bound is broken. For tests."""
        assert len(self._by_lease) <= FINDINGS_MAX
        waiting = [len(f.keys) for f in self._pending if f.keys is not None]
        assert sum(waiting) == self._pending_keys <= PENDING_KEYS_MAX
        for finding in self._by_lease.values():
            assert len(finding.spans) <= SPANS_MAX
            assert (finding.keys is None) or not finding.spans
            assert finding.arrived <= finding.promoting


def _close(finding: Finding, spans: list[Span]) -> None:
    finding.spans = spans
    finding.keys, finding.present, finding.in_dram = None, NO_FLAGS, NO_FLAGS


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
    """Per key a code (Found, why and name packed; see `spans`) and the stamp of its departure.

    Args:
        state: of the node, now.
        scopes: the shards of the engine that asked.
        keys: in chain order; before the first of them everything was held.
        present: which of them some tier held, by the first shard, when it was asked.
        in_dram: which of those were in dram.
        promoting: so many of the first ones were on their way, and the one behind ended the
            lookup; None: it is not about a lookup.
        asked_ns: when.
    """
    residency = state.residency
    codes = np.where(in_dram, int(Found.BEHIND_DRAM), int(Found.BEHIND_FILE)).astype(np.int64)
    stamps = np.zeros(len(keys), dtype=np.uint64)
    some, every = _in_other_shards(residency, scopes[1:], keys)
    codes[present & ~every] = Found.SOME_SHARDS
    absent = np.flatnonzero(~present)
    if len(absent):
        codes[absent], stamps[absent] = _absent(state, scopes[0], keys[absent], asked_ns)
        unexplained = ~present & some & (codes == Found.NEVER)
        codes[unexplained] = Found.SOME_SHARDS
    if promoting is not None:
        end = int(absent[0]) if len(absent) else len(keys)
        if promoting < end and in_dram[promoting]:
            codes[promoting] = Found.SOME_SHARDS  # what else could have ended it?
        unread = codes[promoting:end]
        unread[unread == Found.BEHIND_FILE] = Found.NOT_READ
        # What is in no tier here may come from another node; why it is not here is the story.
        codes[:promoting][present[:promoting] & ~in_dram[:promoting]] = Found.COMING
    return codes, stamps


def _in_other_shards(
    residency: Residency, scopes: Sequence[int], keys: Keys
) -> tuple[Flags, Flags]:
    """Which keys some of these shards know, and which all of them do."""
    there = residency.find_all(scopes, keys) >= 0
    return np.logical_or.reduce(there, axis=0), np.logical_and.reduce(there, axis=0)


def _absent(
    state: State, scope: int, keys: Keys, asked_ns: int
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    tombstones = state.residency.tombstones
    stamps = tombstones.find(scope, keys)
    nothing = Found.FORGOTTEN if tombstones.has_overwritten else Found.NEVER
    codes = np.full(len(keys), int(nothing), dtype=np.int64)
    # What left after it was asked for came after it was asked for.
    left = (stamps != 0) & (stamps >> np.uint64(TIME_SHIFT) <= np.uint64(asked_ns // NS_PER_MS))
    codes[(stamps != 0) & ~left] = Found.FORGOTTEN
    low = (stamps & np.uint64((1 << TIME_SHIFT) - 1)).astype(np.int64)
    codes[left] = int(Found.LEFT) | low[left] << _WHY_SHIFT
    stamps[~left] = 0
    unknown = np.flatnonzero(stamps == 0)
    if len(unknown):
        there, name = _elsewhere(state, scope, keys[unknown])
        codes[unknown[there]] = int(Found.ELSEWHERE) | name << (_WHY_SHIFT + NAME_SHIFT)
    return codes, stamps


def _elsewhere(state: State, scope: int, keys: Keys) -> tuple[Flags, int]:
    """Which keys another space of the same tenant holds, and that space's name. Decided by the
    first key: a chain that another model has begins there."""
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


def spans(codes: NDArray[np.int64], stamps: NDArray[np.uint64]) -> list[Span]:
    """Neighbours with one code: Found, above it Why and name as in a stamp."""
    found: list[Span] = []
    for begin, end in _runs(codes):
        if len(found) == SPANS_MAX - 1 and end < len(codes):
            found.append(Span(len(codes) - begin, Found.MIXED))
            break
        code = int(codes[begin])
        about = unpack(code >> _WHY_SHIFT)
        found.append(
            Span(
                blocks=end - begin,
                found=Found(code & ((1 << _WHY_SHIFT) - 1)),
                why=about.why,
                name=about.name,
                first_ms=unpack(int(stamps[begin:end].min())).at_ms,
                last_ms=unpack(int(stamps[begin:end].max())).at_ms,
            )
        )
    return found


def _runs(codes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where neighbours with one code begin and end."""
    if len(codes) == 0:
        return []
    begins = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    return list(zip(begins, [*begins[1:], len(codes)], strict=True))
