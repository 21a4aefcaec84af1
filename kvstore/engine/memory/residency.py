"""Tiers of each block: one row per (scope, key), one column per tier.

A scope is (tenant, space, shard), interned. A row lives as long as some tier holds its block.
Copies in hbm are a column beside that of dram, by slot: no block is in hbm alone.

            dram                          file
    ABSENT ──put──▶ HELD ──drop──▶ ABSENT       (each tier by itself, one table for all)

Every change of a block's place is here, and what follows from the places of several blocks: the
longest run in dram, and blocks that other nodes can fetch. Does not cover: slots (`slots`), the
table (`table`), evictions (`policies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.config import EngineConfig
from kvstore.engine.memory.journal import Address, Journal, ScopeAddress
from kvstore.engine.memory.policies import NONE, Words
from kvstore.engine.memory.table import FEW_SCOPES, NO_ROWS, BlockTable, Keys, Rows, tallied
from kvstore.engine.why.reasons import FROM_DRAM, Origins, Reason, Tombstones, restamp
from kvstore.types import KEY_BYTES, SLOT_BYTES_MIN, Shard, SpaceId, Tier
from kvstore.wire.feed import BlocksChanged, Removed, Stored
from kvstore.wire.messages import ASKS_PER_LOOKUP_MAX, KEYS_PER_DATAGRAM_MAX

SCOPE_COUNT_MAX = 4096
SCAN_ROWS = 262_144
"""Number of rows scanned in one numpy operation: about 1 ms."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one scope that a tier gained (`stored`) or lost."""

    tier: Tier
    stored: bool
    scope: ScopeAddress
    keys: bytes


class Column(msgspec.Struct, eq=False):
    """Places of blocks in one tier, by row; 0: the tier does not hold the block.

    The array has one place more than there are rows: row -1, "no such block", reads as held
    nowhere.
    """

    tier: Tier
    places: NDArray[Any]
    count: int = 0
    """Number of blocks that the tier holds."""

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        held: NDArray[np.bool_] = self.places[rows] != 0
        return held


class Residency:
    """Rows of blocks and what each tier holds of them.

    If the configuration wants changes or offers, the gains and losses of each tier are kept, in
    order, until they are taken. The journal gets changes of dram at once.
    """

    def __init__(self, config: EngineConfig, journal: Journal, tombstones: Tombstones) -> None:
        word_count, block_count_max = len(journal.stamps), config.block_count_max
        hbm_word_count = config.hbm.size_bytes // SLOT_BYTES_MIN if config.hbm is not None else 0
        assert block_count_max >= word_count, "a row for every slot"
        tell_changes = config.tell_changes or config.tell_offers
        self._changes: list[Change] | None = [] if tell_changes else None
        self._journal = journal
        self.table = BlockTable(row_count_max=block_count_max, seed=config.seed)
        """Rows of blocks that a tier holds; new ones must be put into a tier before any other
        call."""
        self._dram = Column(Tier.DRAM, np.zeros(block_count_max + 1, np.int64))
        """Slot word of each row's block in dram, counted from 1."""
        self._file = Column(Tier.FILE, np.zeros(block_count_max + 1, np.uint64))
        self.file: NDArray[np.uint64] = self._file.places
        """Location of each row's block on disk, 0 for none (also of row -1)."""
        self._columns = {column.tier: column for column in (self._dram, self._file)}
        self.checksum = np.zeros((block_count_max, 2), dtype=np.uint64)
        self.row_of_word = np.full(word_count, -1, dtype=np.int32)
        self.unverified = np.zeros(word_count, dtype=bool)
        """Whether each slot's block was taken over from another process and not compared with its
        checksum since."""
        self.origin: Origins = np.zeros(word_count, dtype=np.int64)
        """Where each slot's block was when it was asked for, until its first lease."""
        self.hbm_of_word = np.full(word_count if hbm_word_count else 0, -1, dtype=np.int32)
        """Slot of hbm with the copy of each slot of dram; -1: none. Empty without hbm."""
        self.word_of_hbm = np.full(hbm_word_count, -1, dtype=np.int32)
        self._tombstones = tombstones
        self._scope_of: dict[int, ScopeAddress] = {}
        self._shards: dict[tuple[str, SpaceId], dict[Shard, int]] = {}
        self._next_scope = 1
        self._forget_from = SCOPE_COUNT_MAX
        """Number of scopes at which unused ones are searched for again."""

    # ── scopes ───────────────────────────────────────────────────────────────────────────────────

    def scope(self, tenant: str, space: SpaceId, shard: Shard) -> int:
        """The number of a scope, made when new."""
        number = self.shards(tenant, space).get(shard)
        if number is None:
            number = self._next_scope
            self._next_scope += 1
            self._scope_of[number] = (tenant, space, shard)
            self._shards.setdefault((tenant, space), {})[shard] = number
        return number

    def scopes(self) -> dict[ScopeAddress, int]:
        """Number of each known scope."""
        return {address: number for number, address in self._scope_of.items()}

    def scopes_of(self, tenant: str | None, space: bytes | None) -> set[int]:
        """Scopes of this tenant and space; None: of any."""
        return {
            number
            for number, (its_tenant, its_space, _) in self._scope_of.items()
            if tenant in (None, its_tenant) and space in (None, its_space)
        }

    def shards(self, tenant: str, space: SpaceId) -> dict[Shard, int]:
        """Scope numbers of a space, by shard; not to be changed."""
        return self._shards.get((tenant, space), {})

    def address(self, scope: int) -> ScopeAddress:
        return self._scope_of[scope]

    def forget_unused_scopes(self, *, keep: set[int]) -> None:
        """Forget scopes that have no block and are not in `keep`, once there are many.

        Scans every row, so the next scan waits until a quarter more scopes exist than were left.
        """
        if len(self._scope_of) < self._forget_from:
            return
        used = np.zeros(self._next_scope, dtype=bool)
        used[self.table.used_scopes] = True
        used[list(keep)] = True
        for number, (tenant, space, shard) in list(self._scope_of.items()):
            if not used[number]:
                del self._scope_of[number]
                del self._shards[tenant, space][shard]
                if not self._shards[tenant, space]:
                    del self._shards[tenant, space]
                self._journal.forget_scope(number)
        self._forget_from = max(SCOPE_COUNT_MAX, len(self._scope_of) * 5 // 4)

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────

    def words(self, rows: Rows) -> NDArray[np.int64]:
        """Slot words of rows, -1 where there is none (also for row -1)."""
        words: NDArray[np.int64] = self._dram.places[rows] - 1
        return words

    def put_dram(self, rows: Rows, words: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        """Record that these rows' blocks are sealed in these slots, with these checksums [n][2]."""
        self._hold(rows, words, checksums)
        scopes = self.table.scopes[rows]
        for scope, _ in tallied(scopes):
            its = scopes == scope
            block = self.table.keys[rows[its]], checksums[its]
            self._journal.publish(words[its], scope, self._scope_of[scope], *block)

    def adopt_dram(
        self, rows: Rows, words: NDArray[np.int64], checksums: NDArray[np.uint64]
    ) -> None:
        """Record blocks in dram that an earlier process stored and that the journal names
        already."""
        self._hold(rows, words, checksums)
        self.unverified[words] = True

    def _hold(self, rows: Rows, words: NDArray[np.int64], checksums: NDArray[np.uint64]) -> None:
        assert not self._dram.has(rows).any(), "a block is put into dram twice"
        assert bool((self.row_of_word[words] == -1).all()), "a slot is given two blocks"
        # The same key computed twice may differ in its last bits: the copy on disk is another one.
        differs = self._file.has(rows) & (self.checksum[rows] != checksums).any(axis=1)
        self._take_out(self._file, rows[differs])
        self._put(self._dram, rows, words + 1)
        self.row_of_word[words] = rows
        assert bool((self.words(rows) == words).all()), "a block is given two slots"
        self.checksum[rows] = checksums

    def drop_dram(self, words: NDArray[np.int64], stamp: int = 0) -> int:
        """Record that these slots hold their blocks no more; `stamp` has the reason for tombstones.
        Returns how many blocks on disk were forgotten because rows are scarce."""
        rows = self.row_of_word[words].astype(np.int64)
        assert bool((rows >= 0).all()), "a slot without a block is emptied"
        self._journal.retract(words)
        self._take_out(self._dram, rows)
        self.row_of_word[words] = -1
        self.unverified[words], self.origin[words] = False, FROM_DRAM
        self._forget_absent(rows, stamp)
        # Every slot keeps a row for its next block: where rows are scarce, disk gives way to dram.
        short = -self.spare_rows
        if short <= 0:
            return 0
        gone = rows[self._file.has(rows)][:short]
        self.drop_file(gone, restamp(stamp, Reason.CROWDED_OUT))
        return len(gone)

    def put_hbm(self, words: NDArray[np.int64], copies: NDArray[np.int64]) -> None:
        """Record that blocks in `words` of dram have copies in slots `copies` of hbm."""
        assert bool((self.row_of_word[words] >= 0).all()), "a copy of no block"
        assert bool((self.hbm_of_word[words] < 0).all()), "a block is copied twice"
        self.hbm_of_word[words], self.word_of_hbm[copies] = copies, words

    def drop_hbm(self, copies: NDArray[np.int64]) -> None:
        """These slots of hbm hold no copies any more."""
        words = self.word_of_hbm[copies]
        assert bool((words >= 0).all()), "a slot without a copy is emptied"
        self.hbm_of_word[words] = self.word_of_hbm[copies] = -1

    @property
    def spare_rows(self) -> int:
        """Number of rows that blocks on disk may still take; each slot of dram keeps one in
        reserve."""
        return self.table.free_count - (len(self.row_of_word) - self._dram.count)

    def put_file(self, rows: Rows, locations: NDArray[np.uint64]) -> None:
        """The disk tier holds these rows' blocks at these places, none of them 0."""
        assert bool((locations != 0).all()), "0 means: in no file"
        self._put(self._file, rows, locations)

    def drop_file(self, rows: Rows, stamp: int = 0) -> None:
        """The disk tier holds these rows' blocks no more; `stamp` has the reason."""
        self._take_out(self._file, rows[self._file.has(rows)])
        self._forget_absent(rows, stamp)

    def _put(self, column: Column, rows: Rows, places: NDArray[Any]) -> None:
        new = rows[~column.has(rows)]
        self._tell(column.tier, new, stored=True)
        column.count += len(new)
        column.places[rows] = places

    def _take_out(self, column: Column, rows: Rows) -> None:
        """Record that a tier lost the blocks of these rows."""
        self._tell(column.tier, rows, stored=False)
        column.count -= len(rows)
        column.places[rows] = 0

    def _forget_absent(self, rows: Rows, stamp: int) -> None:
        absent = rows
        for column in self._columns.values():
            absent = absent[~column.has(absent)]
        if stamp and len(absent):
            self._tombstones.write(self.table.scopes[absent], self.table.keys[absent], stamp)
        self.table.delete(absent)

    def is_in(self, tier: Tier, scope: int, keys: Keys) -> NDArray[np.bool_]:
        """Mask of keys whose block of this scope a tier holds."""
        return self._columns[tier].has(self.table.find(scope, keys))

    # ── changes ──────────────────────────────────────────────────────────────────────────────────

    def _tell(self, tier: Tier, rows: Rows, *, stored: bool) -> None:
        """Note gained or lost blocks as changes; lost ones before their rows are forgotten, because
        keys and scopes are read from these."""
        if self._changes is not None and len(rows):
            self._changes += self._by_scope(tier, rows, stored=stored)

    def _by_scope(self, tier: Tier, rows: Rows, *, stored: bool) -> list[Change]:
        scopes, keys = self.table.scopes[rows], self.table.keys
        return [
            Change(tier, stored, self._scope_of[scope], keys[rows[scopes == scope]].tobytes())
            for scope, _ in tallied(scopes)
        ]

    def take_changes(self) -> list[Change]:
        """Gains and losses since the last call, in order."""
        if not self._changes:
            return []
        taken, self._changes = self._changes, []
        return taken

    def held(self, begin: int, count: int) -> tuple[list[Change], int]:
        """All blocks in rows `begin` to `begin + count`, as changes that store them, and the row
        behind them; -1 after the last."""
        used, end = self.table.used_scopes, begin + count
        rows = np.flatnonzero(used[begin:end]) + begin
        changes = [
            change
            for column in self._columns.values()
            for change in self._by_scope(column.tier, rows[column.has(rows)], stored=True)
        ]
        return changes, end if end < len(used) else -1

    # ── counts ───────────────────────────────────────────────────────────────────────────────────

    def count(self, tier: Tier) -> int:
        """Blocks that a tier holds."""
        column = self._columns.get(tier)
        return column.count if column is not None else 0

    def rows_in(self, scopes: set[int], count_max: int, *, begin: int = 0) -> Rows:
        """Rows of these scopes, at most `count_max`, from row `begin` on and then from the first
        row.

        A caller that takes slices passes the end of the slice before as `begin`: rows of other
        scopes are then scanned once, not for each slice.
        """
        missing = min(count_max, sum(self.table.count_of[scope] for scope in scopes))
        wanted = np.zeros(self._next_scope, dtype=bool)
        wanted[sorted(scopes)] = True
        used, found = self.table.used_scopes, [NO_ROWS]
        for window in _windows(begin, len(used)):
            if not missing:
                break
            found.append(np.flatnonzero(wanted[used[window]])[:missing] + window.start)
            missing -= len(found[-1])
        assert not missing, "rows of scopes are miscounted"
        return np.concatenate(found)


def _windows(begin: int, end: int) -> Iterator[slice]:
    """Slices of SCAN_ROWS that cover each row below `end` once, from `begin` on and then from 0."""
    for first, last in ((begin, end), (0, begin)):
        for start in range(first, last, SCAN_ROWS):
            yield slice(start, min(start + SCAN_ROWS, last))


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────
# The longest run of a chain that is in dram, which a lease can pin. Keys come in chain order; a
# block counts when every shard of it is there.

LOOKED_UP_MAX = ASKS_PER_LOOKUP_MAX * KEYS_PER_DATAGRAM_MAX
"""Blocks, times shards, that one message is answered about: as many as a lookup can lease with all
its asks. A message has room for so many keys and shards that a look at each would take 0.1 s."""


class Run(msgspec.Struct, frozen=True):
    """Leading keys of a chain that are in dram in every shard; there are `count`, and the arrays
    may be longer."""

    count: int
    rows_by_shard: list[Rows]
    words_by_shard: list[Words]

    def cut(self, count: int) -> Run:
        """This run, shortened to its first `count` keys."""
        return self if count == self.count else msgspec.structs.replace(self, count=count)

    def words(self) -> Words:
        """Slot words, [n][S], flat."""
        return _interleave(self.words_by_shard, self.count) if self.count else NONE

    def checksums(self, residency: Residency, *, asked: bool) -> bytes:
        """Checksums of 16 bytes, [n][S]. Unless `asked`, those of blocks that need no verification
        are 0, and the result is empty if no block needs it."""
        if not self.count:
            return b""
        unverified = residency.unverified[self.words()]
        if not asked and not unverified.any():
            return b""
        sums = self.every_checksum(residency)
        if not asked:
            sums[~unverified] = 0
        return sums.astype("<u8").tobytes()

    def every_checksum(self, residency: Residency) -> NDArray[np.uint64]:
        """Checksums of all blocks, [n][S] of two words."""
        rows = _interleave(self.rows_by_shard, self.count)
        sums: NDArray[np.uint64] = residency.checksum[rows]
        return sums

    def repeats(self) -> bool:
        """Whether a key occurs twice; then its slot would, too."""
        return has_repeats(self.rows())

    def rows(self) -> Rows:
        """Rows of the first shard, which identify the keys in the others, too."""
        return self.rows_by_shard[0][: self.count] if self.count else NO_ROWS


def has_repeats(rows: Rows) -> bool:
    """Whether a row occurs twice. Rows of a chain mostly ascend; the costlier check is made only if
    they do not."""
    ascending = np.count_nonzero(rows[1:] > rows[:-1]) >= len(rows) - 1
    return not ascending and len(np.unique(rows)) != len(rows)


def leading_run(residency: Residency, scopes: Sequence[int], keys: Keys) -> Run:
    """The longest run of leading keys that is in dram in all of `scopes`."""
    rows_by_shard, words_by_shard, count = [], [], len(keys)
    if len(scopes) > FEW_SCOPES:
        return run_of(residency, residency.table.find_all(scopes, keys))
    for scope in scopes:
        rows = residency.table.find(scope, keys[:count])
        words = residency.words(rows)
        if len(words) and words.min() < 0:
            count = int((words < 0).argmax())
        rows_by_shard.append(rows)
        words_by_shard.append(words)
    return Run(count if scopes else 0, rows_by_shard, words_by_shard)


def run_of(residency: Residency, rows: Rows) -> Run:
    """The longest run of leading keys that is in dram, for keys whose rows [S][n] are known."""
    words = residency.words(rows)
    return Run(leading(words >= 0), list(rows), list(words))


def leading(flags: NDArray[np.bool_]) -> int:
    """Number of leading columns of flags [S][n] that are set in every shard."""
    every: NDArray[np.bool_] = np.logical_and.reduce(flags, axis=0)
    return len(every) if bool(every.all()) else int(np.argmin(every))


def _interleave(columns: list[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Flat array [count][S] of the first `count` values of S columns."""
    if len(columns) == 1:
        return columns[0][:count]
    return np.stack([column[:count] for column in columns], axis=1).reshape(-1)


# ── covers ────────────────────────────────────────────────────────────────────────────────────────
# Sets of shards that make whole blocks: every layer and head exactly once.
#
#     shards of a space            covers
#     0-16 × 0-8                   one rank
#     0-16 × 0-4, 0-16 × 4-8       two tensor-parallel ranks
#     0-8 × 0-8,  8-16 × 0-8       two stages of a pipeline
#
# Blocks of one space may be held by engines of several parallel sizes: each is a cover of its own.

COVERS_MAX: Final = 16
"""Most parallel sizes of one space on one node; blocks of further ones are not served."""
WORK_MAX: Final = 1 << 20
"""Edges and shards looked at in one search, less than a tenth of a second. Engines choose the
shards, and could make the search long."""
Geometry = tuple[int, int]
"""Number of layers and of KV heads."""


@lru_cache(maxsize=4096)
def covers(shards: frozenset[Shard], geometry: Geometry) -> tuple[tuple[Shard, ...], ...]:
    """All sets of these shards that tile layers × heads, each in the order of first layers and
    heads."""
    layer_count, head_count = geometry
    inside = [
        s for s in shards if s.layer_begin < s.layer_end <= layer_count and s.head_end <= head_count
    ]
    # From one edge of shards to the next all heads are alike, however many.
    edges = sorted({0, head_count, *(edge for s in inside for edge in (s.head_begin, s.head_end))})
    place = {head: number for number, head in enumerate(edges)}
    found: list[tuple[Shard, ...]] = []
    at_corner: dict[tuple[int, int], list[Shard]] = {}
    for shard in sorted(inside, reverse=True):
        at_corner.setdefault((shard.layer_begin, place[shard.head_begin]), []).append(shard)
    # By edge: the first layer that is not covered. Where it is lowest the next shard begins.
    waiting: list[tuple[tuple[int, ...], tuple[Shard, ...]]] = [((0,) * (len(edges) - 1), ())]
    work = WORK_MAX
    while waiting and work > 0 and len(found) < COVERS_MAX:
        edge, chosen = waiting.pop()
        work -= len(edges) + len(chosen)
        layer = min(edge)
        if layer == layer_count:
            found.append(chosen)
            continue
        for shard in at_corner.get((layer, edge.index(layer)), ()):
            begin, end = place[shard.head_begin], place[shard.head_end]
            work -= len(edges)
            if set(edge[begin:end]) == {layer}:
                placed = (*edge[:begin], *[shard.layer_end] * (end - begin), *edge[end:])
                waiting.append((placed, (*chosen, shard)))
    return tuple(found)


# ── offers ────────────────────────────────────────────────────────────────────────────────────────
# Blocks that peers can fetch from this node: a tier holds them in all their shards.
#
#     Change (tier, shard, keys) ─▶ which of the keys are whole now ─▶ Stored, Removed
#
# An engine of several ranks stores a block in shards, and the shards come and go one by one. A
# shard alone is of no use to a peer that may be sharded in another way, so a key is offered while
# some of the shards that a tier holds of it make a whole block (`covers`). Rules:
#
# 1. There is no state but the tables: each change is judged by the tables when the step ends, so
#    the last update about a key is the truth, whatever the earlier ones were.
# 2. To offer twice, and to take back a key that was never offered, is no error.
# 3. Before an engine has reported how many layers and heads a space has, to this process or an
#    earlier one (`journal`), none of its blocks are offered.
#
# Does not cover: publishing them (`kvstore.peers.feed`).


class Offers:
    """Judges changes of one node's residency."""

    def __init__(
        self, residency: Residency, geometry: Callable[[Address], Geometry | None]
    ) -> None:
        self._residency = residency
        self._geometry = geometry

    def offers_of(self, changes: Iterable[Change]) -> list[BlocksChanged]:
        """Offers and withdrawals that follow from the changes of a step that has ended, in
        order."""
        return [offer for change in changes for offer in self._judge(change)]

    def held(self, held: Iterable[Change]) -> list[Stored]:
        """Offers of the whole blocks in a slice of the tables (`Residency.held`). A key is judged
        once, with the shard that begins at layer 0 and head 0: every whole block has one."""
        offers = (
            offer
            for change in held
            if (change.scope[2].layer_begin, change.scope[2].head_begin) == (0, 0)
            for offer in self._judge(change)
        )
        return [offer for offer in offers if isinstance(offer, Stored)]

    def any_held(self, address: Address) -> bool:
        """Whether a tier holds anything of a space."""
        count_of = self._residency.table.count_of
        return any(scope in count_of for scope in self._residency.shards(*address).values())

    def _judge(self, change: Change) -> Iterator[BlocksChanged]:
        tenant, space, shard = change.scope
        geometry = self._geometry((tenant, space))
        if geometry is not None and change.stored and covers(frozenset((shard,)), geometry):
            yield Stored(tenant, space, change.tier, change.keys)
            return
        if geometry is None or not self._residency.shards(tenant, space):
            # Or the step that took the last block of the space forgot its scopes.
            whole = np.zeros(len(change.keys) // KEY_BYTES, dtype=bool)
        else:
            whole = self._whole(change, geometry)
        keys = np.frombuffer(change.keys, dtype=f"V{KEY_BYTES}")
        for made, which in ((Stored, whole), (Removed, ~whole)):
            if which.any():
                yield made(tenant, space, change.tier, keys[which].tobytes())

    def _whole(self, change: Change, geometry: Geometry) -> NDArray[np.bool_]:
        """Flags of the keys of a change: the shards that the tier holds of the key have a cover."""
        tenant, space, _ = change.scope
        keys = np.frombuffer(change.keys, dtype=np.uint64).reshape(-1, KEY_BYTES // 8)
        shards = self._residency.shards(tenant, space)
        there = np.stack(
            [self._residency.is_in(change.tier, scope, keys) for scope in shards.values()], axis=1
        )
        place = {shard: number for number, shard in enumerate(shards)}
        whole = np.zeros(len(there), dtype=bool)
        for cover in covers(frozenset(shards), geometry):  # as whoever serves them: one search
            whole |= there[:, [place[shard] for shard in cover]].all(axis=1)
        return whole
