"""The journal: state of the arena for the next node process, in memory that outlives this one.

    header │ slabs │ groups │ writers │ stamps │ rows │ scopes │ spaces (each from a page's start)

Per slot: its writer, its quota's group, a stamp of its last use, and a row of eight words for its
block: key, checksum, scope, and a check word over all of them. Groups and stamps are the engine's
own columns (`slots`), kept here instead of elsewhere, so they cost nothing. A row is written when a
block is put into dram and taken back when it leaves.

Memory fails, a bit at a time. Writers and slabs are coded, so that up to three flipped bits in a
word are seen: a slot with an unreadable writer is never granted, nor is a slab with an unreadable
size. Groups and stamps out of their bounds mean: none. Neither can make a block wrong.

A process may die between any two stores to memory. So, for each slot, in this order:
1. a writer is named before the grant is sent, and un-named only when it is quiet or gone;
2. a row is taken back before its slot can be granted or read into;
3. a row counts only if its check word is right and its slot has no writer.
So a half-done change is a miss or a quarantined slot, never a wrong block or a second writer.
One aligned word is written whole or not at all; a row need not be.

Bytes, per slot: 64 for a row and 8 for the writer; 8 for the stamp and 1 for the group are the
engine's anyway. Does not cover: use of a found journal (`state.adopt`), the memory itself
(`kvstore.arena`), payloads, which their first reader verifies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.engine.memory.policies import NONE, Words
from kvstore.engine.memory.table import Keys
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard, SpaceId
from kvstore.wire.space import Space

# ── spaces ────────────────────────────────────────────────────────────────────────────────────────
# Descriptions of spaces by engines.
#
#     entry of one page │ digest │ length │ msgpack: tenant, space, label, shards, Space │ zero │
#
# With them the next process offers, serves, scrubs and explains the kept blocks, before an engine
# has attached again. An entry with a wrong digest, torn or damaged, is none: then that space waits
# for an engine. When room runs out, the latest spaces are kept.

PAGE_WORDS: Final = PAGE_BYTES // 8
SPACE_COUNT_MAX: Final = 64
_HEAD_BYTES: Final = 16
Address = tuple[str, SpaceId]


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """A space as its latest session described it."""

    tenant: str
    space_id: bytes
    label: str
    shards: tuple[tuple[int, int, int, int], ...]
    """Layers and heads (begin and end of each) of the shard in each column."""
    space: Space

    @property
    def address(self) -> Address:
        return self.tenant, SpaceId(self.space_id)


class SpaceTable:
    """The table of spaces, in the journal's memory, [SPACE_COUNT_MAX * PAGE_WORDS] u64."""

    def __init__(self, memory: NDArray[np.uint64]) -> None:
        self._entries = memory.reshape(SPACE_COUNT_MAX, PAGE_WORDS)
        self._rows: dict[Address, int] = {}
        """Row of the entry of each space, least recently used first."""

    def remember(self, address: Address, label: str, shards: list[Shard], space: Space) -> None:
        """Write or refresh the entry of a space. A space too large for one page is left out; when
        the table is full, the least recently used space gives way."""
        fields = tuple(msgspec.structs.astuple(shard) for shard in shards)
        body = msgspec.msgpack.encode(Remembered(*address, label, fields, space))
        if len(body) > PAGE_BYTES - _HEAD_BYTES:  # of very many ranks: an engine will say it again
            return
        row = self._rows.pop(address, None)
        if row is None:
            row = self._free_row()
        self._rows[address] = row
        text = len(body).to_bytes(8, "little") + body
        words = np.frombuffer((_digest(text, row) + text).ljust(PAGE_BYTES, b"\0"), "<u8")
        if (self._entries[row] != words).any():
            self._entries[row] = words

    def _free_row(self) -> int:
        if len(self._rows) == SPACE_COUNT_MAX:
            return self._rows.pop(next(iter(self._rows)))
        return next(row for row in range(SPACE_COUNT_MAX) if row not in self._rows.values())

    def found(self) -> tuple[Remembered, ...]:
        """Valid entries that an earlier process wrote."""
        found: dict[Address, Remembered] = {}
        for row in range(SPACE_COUNT_MAX):
            entry = _remembered(row, self._entries[row].tobytes())
            if entry is not None and entry.address not in found:
                found[entry.address] = entry
                self._rows[entry.address] = row
        return tuple(found.values())


def _digest(text: bytes, row: int = 0) -> bytes:
    return hashlib.blake2b(text, digest_size=8, salt=row.to_bytes(8, "little")).digest()


def _remembered(row: int, data: bytes) -> Remembered | None:
    """The space in an entry's page; None if the entry is invalid."""
    end = _HEAD_BYTES + int.from_bytes(data[8:_HEAD_BYTES], "little")
    if end > PAGE_BYTES or _digest(data[8:end], row) != data[:8]:
        return None
    return msgspec.msgpack.decode(data[_HEAD_BYTES:end], type=Remembered)


# ── journal ───────────────────────────────────────────────────────────────────────────────────────

LAYOUT_VERSION: Final = 5
"""Layout of all state for the next process. Raise it with any change of meaning: code of another
version starts with empty memory."""
_MAGIC: Final = int.from_bytes(b"KVSJRN01", "little")
_MAGIC_AT, _VERSION_AT, _ARENA_AT, _SLAB_AT, _GROUPS_AT, _READY_AT = range(6)

_ROW_WORDS: Final = 8
_SCOPE_AT, _CHECK_AT = 6, 7
_CHUNK_ROWS: Final = 1 << 13
"""Number of rows examined together, so that they stay in the CPU's cache."""
_ODD: Final = np.array(
    [
        0x9E3779B97F4A7C15,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
    ],
    dtype=np.uint64,
)
_PLACE_ODD: Final = np.uint64(0x589965CC75374CC3)
_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)

_CODE: Final = 65_497
"""Coded words are multiples of this number: up to three flipped bits never turn one multiple into
another."""
_BIAS: Final = 16
"""Added to a number before it is coded: writers that are no connections have negative numbers,
greater than minus this."""
STAMP_MAX: Final = 1 << 56
DOUBT_SHARE: Final = 4
"""A journal with more than one part in this many unreadable is not kept."""

SCOPE_COUNT_MAX: Final = 4096
"""Most scopes in a journal. Blocks of further ones are not journalled: they are computed again
after a restart."""
_SCOPE_WORDS: Final = 48
_INDEX_BITS: Final = 12

Rows = NDArray[np.uint64]
ScopeAddress = tuple[str, SpaceId, Shard]


class JournalUnusable(Exception):
    """This journal cannot be taken over; the text gives the reason. Neither the journal nor its
    arena may be used: a process may still write there."""


class JournalContents(msgspec.Struct, frozen=True):
    """Content of a journal, verified."""

    words: Words
    """Slots with a block, ascending."""
    scopes: NDArray[np.uint64]
    """Scope of each of `words`, by the journal's numbers: keys of `addresses`."""
    addresses: dict[int, ScopeAddress]
    held: Words
    """Slots with a writer."""
    writers: NDArray[np.int64]
    """Writer of each slot in `held`."""
    doubtful: Words
    """Slots with an unreadable writer: never to be used again."""
    slot_bytes: NDArray[np.int64]
    """Slot size of each slab; 0: in no pool; UNREADABLE: not to be used again."""
    spaces: tuple[Remembered, ...]
    """Spaces that engines described."""


UNREADABLE: Final = -1
"""Value of `slot_bytes` for a slab whose size in the journal is damaged."""


class Journal:
    """The journal of one arena, in `memory` of `size_bytes` bytes."""

    def __init__(self, memory: NDArray[np.uint64], *, arena_bytes: int, slab_bytes: int) -> None:
        self._arena_bytes, self._slab_bytes = arena_bytes, slab_bytes
        word_count, slab_count = arena_bytes // SLOT_BYTES_MIN, arena_bytes // slab_bytes
        assert memory.dtype == np.uint64
        assert len(memory) * 8 == self.size_bytes(arena_bytes, slab_bytes)
        parts = iter(np.split(memory, np.cumsum(_part_words(word_count, slab_count))[:-1]))
        self._header = next(parts)
        self._slabs = next(parts)[:slab_count]
        self.groups = next(parts).view(np.uint8)[:word_count]
        self._writers = next(parts)[:word_count]
        self.stamps = next(parts)[:word_count].view(np.int64)
        """Stamp of the last use, by word; greater is later."""
        self._rows = next(parts)[: word_count * _ROW_WORDS].reshape(-1, _ROW_WORDS)
        self._entries = next(parts)[: SCOPE_COUNT_MAX * _SCOPE_WORDS].reshape(-1, _SCOPE_WORDS)
        self.spaces = SpaceTable(next(parts))
        self._ids: dict[int, int] = {}
        """The journal's number of each scope, by the residency's number."""
        self._indexes = list(range(SCOPE_COUNT_MAX - 1, -1, -1))
        self._next_serial = 1

    @staticmethod
    def size_bytes(arena_bytes: int, slab_bytes: int) -> int:
        """Bytes of memory for the journal of an arena."""
        return 8 * sum(_part_words(arena_bytes // SLOT_BYTES_MIN, arena_bytes // slab_bytes))

    @classmethod
    def fresh(
        cls,
        *,
        arena_bytes: int,
        slab_bytes: int,
        quotas: Sequence[tuple[str, int]] = (),
        memory: NDArray[np.uint64] | None = None,
    ) -> Journal:
        """An empty journal in `memory`, which must be all zero; without it, in private memory."""
        if memory is None:
            memory = np.zeros(cls.size_bytes(arena_bytes, slab_bytes) // 8, np.uint64)
        journal = cls(memory, arena_bytes=arena_bytes, slab_bytes=slab_bytes)
        journal._header[:_READY_AT] = journal._head(quotas)
        return journal

    def _head(self, quotas: Sequence[tuple[str, int]]) -> list[int]:
        text = "\0".join(name for name, _ in quotas)
        names = int.from_bytes(_digest(text.encode()), "little")
        return [_MAGIC, LAYOUT_VERSION, self._arena_bytes, self._slab_bytes, names]

    @property
    def ready_bytes(self) -> int:
        """Bytes from the arena's start that are backed by pages, as of the last `set_ready`."""
        ready_bytes = min(int(self._header[_READY_AT]), self._arena_bytes)
        return ready_bytes - ready_bytes % PAGE_BYTES

    def set_ready(self, ready_bytes: int) -> None:
        """Record how many bytes of the arena are backed by pages. Any one thread may call this."""
        self._header[_READY_AT] = ready_bytes

    # ── while serving ────────────────────────────────────────────────────────────────────────────

    def cut(self, slab: int, slot_bytes: int) -> None:
        """Record that a slab is cut into slots of this size; 0: it is in no pool."""
        self._slabs[slab] = _coded(slot_bytes)

    def name_writer(self, words: Words, writer: int) -> None:
        """Name the writer of these slots; 0: none."""
        self._writers[words] = _coded(writer)

    def publish(
        self, words: Words, scope: int, address: ScopeAddress, keys: Keys, checksums: Rows
    ) -> None:
        """Write the rows of these slots: each holds a block of one scope, with its key and
        checksum. Nothing is written when the table of scopes is full."""
        id = self._ids.get(scope) or self._add_scope(scope, address)
        if not id:
            return
        rows = np.empty((len(words), _ROW_WORDS), np.uint64)
        rows[:, :4] = keys
        rows[:, 4:6] = checksums
        rows[:, _SCOPE_AT] = id
        rows[:, _CHECK_AT] = _checks(words, rows)
        self._rows[words] = rows

    def retract(self, words: Words) -> None:
        """Make the rows of these slots void, because their blocks leave dram."""
        self._rows[words, _CHECK_AT] = 0

    def forget_scope(self, scope: int) -> None:
        """Make all rows of this scope void with one store, because no block is in it or all of them
        are void. Blocks published in it later get another number of the scope."""
        id = self._ids.pop(scope, 0)
        if id:
            self._entries[_index(id), 0] = 0
            self._indexes.append(_index(id))

    def _add_scope(self, scope: int, address: ScopeAddress) -> int:
        """Enter a scope and return the journal's number for it; 0 if the table of scopes is
        full."""
        if not self._indexes:
            return 0
        index = self._indexes.pop()
        id = self._next_serial << _INDEX_BITS | index
        self._next_serial += 1
        self._entries[index] = _entry(id, address)
        self._ids[scope] = id
        return id

    # ── at a start ───────────────────────────────────────────────────────────────────────────────

    def examine(self, *, quotas: Sequence[tuple[str, int]], writers: set[int]) -> JournalContents:
        """Verify and return the state that another process left. `quotas`: those of this process;
        `writers`: numbers of all possible writers. Changes only dispensable parts: groups are
        forgotten when the quotas have changed, and so are impossible groups and stamps.

        Raises:
            JournalUnusable: the layout is another one, or the content is impossible.
        """
        expected = self._head(quotas)
        if self._header[:_GROUPS_AT].tolist() != expected[:_GROUPS_AT]:
            raise JournalUnusable("it was kept by another version, or for another --dram or --slab")
        if int(self._header[_GROUPS_AT]) != expected[_GROUPS_AT]:
            self.groups[:] = 0
            self._header[_GROUPS_AT] = expected[_GROUPS_AT]
        self.groups[self.groups > len(quotas)] = 0
        self.stamps[(self.stamps < 0) | (self.stamps > STAMP_MAX)] = 0
        slot_bytes, unreadable = _decoded(self._slabs)
        starts = self._slot_starts(slot_bytes)
        slot_bytes[unreadable] = UNREADABLE
        named, doubtful = _decoded(self._writers)
        lost = self.words_of(unreadable)
        held = np.flatnonzero((named > 0) & ~lost)
        if not starts[held].all():
            raise JournalUnusable("it names a writer of what is no slot")
        unknown = set(np.unique(named[held]).tolist()) - writers
        if unknown:
            raise JournalUnusable(f"it names {len(unknown)} unknown writers")
        if int((lost | doubtful).sum()) * DOUBT_SHARE > len(lost):
            raise JournalUnusable("much of it is damaged: look at this machine's memory")
        addresses = self._addresses()
        ids = np.zeros(SCOPE_COUNT_MAX, np.uint64)
        ids[[_index(id) for id in addresses]] = list(addresses)
        words, scopes, heads = self._good_rows(starts & (named == 0) & ~doubtful, ids)
        first = _first_of_each(scopes, heads, self._rows, words)
        return JournalContents(
            words=words[first],
            scopes=scopes[first],
            addresses=addresses,
            held=held,
            writers=named[held],
            doubtful=np.flatnonzero(doubtful & starts),
            slot_bytes=slot_bytes,
            spaces=self.spaces.found(),
        )

    def blocks(self, words: Words) -> tuple[Keys, Rows]:
        """Keys and checksums in the rows of these slots."""
        rows = self._rows[words]
        return rows[:, :4], rows[:, 4:6]

    def settle(self, found: JournalContents, scopes: dict[int, int]) -> None:
        """Take over the rows in `found` and make all others void. `scopes`: the residency's number
        of each scope that counts, by the journal's."""
        void = np.ones(len(self._rows), dtype=bool)
        void[found.words] = False
        self._rows[void, _CHECK_AT] = 0
        unnamed = ~self.words_of(found.slot_bytes == UNREADABLE)
        unnamed[found.held] = unnamed[found.doubtful] = False
        self._writers[unnamed] = 0
        self._ids = {number: id for id, number in scopes.items()}
        self._next_serial = 1 + max((id >> _INDEX_BITS for id in found.addresses), default=0)
        used = {_index(id) for id in scopes}
        self._indexes = [index for index in self._indexes if index not in used]

    def words_of(self, slabs: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask over all words of the arena: those in slabs flagged in `slabs`."""
        mask = np.zeros(len(self._writers), dtype=bool)
        whole = np.repeat(slabs, self._slab_bytes // SLOT_BYTES_MIN)
        mask[: len(whole)] = whole
        return mask

    def _slot_starts(self, slot_bytes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask over all words of the arena: those in which a slot begins. `slot_bytes`: size by
        slab. Raises JournalUnusable for an impossible size."""
        starts = np.zeros(len(self._writers), dtype=bool)
        pages_per_slab = self._slab_bytes // PAGE_BYTES
        for size in np.unique(slot_bytes[slot_bytes != 0]).tolist():
            if size % PAGE_BYTES or not SLOT_BYTES_MIN <= size <= self._slab_bytes:
                raise JournalUnusable("it has slots of a size that does not exist")
            slabs = np.flatnonzero(slot_bytes == size)
            pages = np.arange(self._slab_bytes // size) * (size // PAGE_BYTES)
            starts[(slabs[:, None] * pages_per_slab + pages) * PAGE_BYTES // SLOT_BYTES_MIN] = True
        return starts

    def _good_rows(
        self, may_be: NDArray[np.bool_], ids: NDArray[np.uint64]
    ) -> tuple[Words, NDArray[np.uint64], NDArray[np.uint64]]:
        """Words with a valid row of a known scope: words, ascending, their scopes, and the first
        words of their keys. `ids`: the known scopes, by index."""
        found, scopes, heads = [], [], []
        for begin in range(0, len(self._rows), _CHUNK_ROWS):
            rows = np.asarray(self._rows[begin : begin + _CHUNK_ROWS])
            words = np.arange(begin, begin + len(rows))
            good = may_be[begin : begin + _CHUNK_ROWS] & (rows[:, _CHECK_AT] != 0)
            if not good.any():
                continue
            good &= rows[:, _CHECK_AT] == _checks(words, rows)
            its = rows[:, _SCOPE_AT]
            good &= (its != 0) & (ids[its & np.uint64(SCOPE_COUNT_MAX - 1)] == its)
            found.append(words[good])
            scopes.append(its[good])
            heads.append(rows[good, 0])
        if not found:
            return NONE, np.empty(0, np.uint64), np.empty(0, np.uint64)
        return np.concatenate(found), np.concatenate(scopes), np.concatenate(heads)

    def _addresses(self) -> dict[int, ScopeAddress]:
        found = {}
        for index in np.flatnonzero(self._entries[:, 0]).tolist():
            address = _address(self._entries[index], index)
            if address is not None:
                found[int(self._entries[index, 1])] = address
        return found


def _part_words(word_count: int, slab_count: int) -> list[int]:
    """Size in words of each part of the journal, rounded up to whole pages."""
    parts = [
        PAGE_WORDS,
        slab_count,
        -(-word_count // 8),
        word_count,
        word_count,
        word_count * _ROW_WORDS,
        SCOPE_COUNT_MAX * _SCOPE_WORDS,
        SPACE_COUNT_MAX * PAGE_WORDS,
    ]
    return [-(-part // PAGE_WORDS) * PAGE_WORDS for part in parts]


def _coded(number: int) -> int:
    """Coded word for `number`, which is greater than -_BIAS; 0 is coded as 0."""
    assert number > -_BIAS
    return (number + _BIAS) * _CODE if number else 0


def _decoded(column: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of coded words, and a mask of invalid ones (their number is 0)."""
    words = np.array(column, dtype=np.uint64)
    wrong = words % np.uint64(_CODE) != 0
    numbers = (words // np.uint64(_CODE)).astype(np.int64) - _BIAS
    numbers[wrong | (words == 0)] = 0
    return numbers, wrong


def _checks(words: Words, rows: Rows) -> NDArray[np.uint64]:
    """Check word of each row, never 0. Damage, a mix of two rows, or a row at another word's place
    is detected except with probability 2^-63."""
    mixed = rows[:, :_CHECK_AT] * _ODD
    mixed ^= mixed >> _HALF
    sums: NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64)
    sums += (words.astype(np.uint64) + _ONE) * _PLACE_ODD
    sums ^= sums >> _HALF
    sums *= _ODD[0]
    return sums | _ONE


def _first_of_each(
    scopes: NDArray[np.uint64], heads: NDArray[np.uint64], rows: Rows, words: Words
) -> NDArray[np.bool_]:
    """One bool per word: False for a block that an earlier word holds too. Duplicates come from a
    bug only, and must not get into a table."""
    first = np.ones(len(words), dtype=bool)
    ordered = np.sort(heads ^ scopes)
    if not (ordered[1:] == ordered[:-1]).any():
        return first
    seen: set[tuple[int, bytes]] = set()
    for at, (scope, word) in enumerate(zip(scopes.tolist(), words.tolist(), strict=True)):
        block = scope, rows[word, :4].tobytes()
        first[at] = block not in seen
        seen.add(block)
    return first


# ── scopes ───────────────────────────────────────────────────────────────────────────────────────


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    id: int
    tenant: str
    space: bytes
    shard: tuple[int, int, int, int]


def _index(id: int) -> int:
    return id & (SCOPE_COUNT_MAX - 1)


def _entry(id: int, address: ScopeAddress) -> NDArray[np.uint64]:
    """Words of a scope's entry: [digest, id, length, msgpack]. They suffice for the longest name of
    a tenant."""
    tenant, space, shard = address
    body = msgspec.msgpack.encode(_Entry(id, tenant, space, msgspec.structs.astuple(shard)))
    text = id.to_bytes(8, "little") + len(body).to_bytes(8, "little") + body
    return np.frombuffer((_digest(text) + text).ljust(8 * _SCOPE_WORDS, b"\0"), "<u8")


def _address(words: NDArray[np.uint64], index: int) -> ScopeAddress | None:
    """The scope in an entry; None if the entry is torn or damaged."""
    data = words.tobytes()
    length = int(words[2])
    if length > len(data) - 24 or _digest(data[8 : 24 + length]) != data[:8]:
        return None
    entry = msgspec.msgpack.decode(data[24 : 24 + length], type=_Entry)
    if entry.id != int(words[1]) or _index(entry.id) != index:
        return None
    return entry.tenant, SpaceId(entry.space), Shard(*entry.shard)
