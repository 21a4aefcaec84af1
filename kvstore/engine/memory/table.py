"""Open-addressing table from (scope, key) to row, in flat arrays, batches in and out.

A row is the number of a block; other modules keep their columns by it. Linear probing at a load of
at most a quarter. Deleting leaves no tombstone: entries behind the cell move up to their first
probed place, so that probes are as short after years of eviction as in a new table.

The start of a probe follows from all words of a key, each with a secret: engines may send any keys,
and keys that all began at one cell would hold the node up for minutes.

Cost per row: key 32, scope 4, cell number 4, cells 16 bytes. Callers insert absent, distinct keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.types import KEY_BYTES, Counts

Rows = NDArray[np.int64]
Keys = NDArray[np.uint64]
"""Shape [n, 4]: 32-byte keys as words."""

_EMPTY = 0
_KEY_WORDS = 4
_ALL_FOUR = 0x01010101
_FEW = 24
"""Up to this many keys are found faster one by one."""
FEW_SCOPES = 8
"""Up to this many scopes are searched faster one by one: the blocks of a chain lie together."""
NO_ROWS: Rows = np.empty(0, dtype=np.int64)


def tallied(values: NDArray[np.integer[Any]]) -> list[tuple[int, int]]:
    """Distinct values in ascending order, each with its number. Mostly all are the same, and
    np.unique takes 50 µs to find that out."""
    if not len(values):
        return []
    if (values == values[0]).all():
        return [(int(values[0]), len(values))]
    named, counts = np.unique(values, return_counts=True)
    return list(zip(named.tolist(), counts.tolist(), strict=True))


def each(keys: Keys) -> Iterator[bytes]:
    """Keys one after the other."""
    raw = keys.tobytes()
    return (raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))


class BlockTable:
    """Rows 0 … row_count_max-1. Scope 0 is reserved for free rows."""

    def __init__(self, *, row_count_max: int, seed: int = 0) -> None:
        """`seed`: a secret random number, so that nobody can choose keys that collide."""
        cell_bits = max(4, (4 * row_count_max - 1).bit_length())
        cell_count = 1 << cell_bits
        self._mask = cell_count - 1
        self._shift = 64 - cell_bits
        digest = hashlib.sha512(b"kvstore table %d" % seed).digest()
        secrets = np.frombuffer(digest, dtype=np.uint64)[: _KEY_WORDS + 1] | np.uint64(1)
        self._secrets, self._scope_secret = secrets[:_KEY_WORDS], int(secrets[_KEY_WORDS])
        self._secret_words: tuple[int, ...] = tuple(self._secrets.tolist())
        self._cells = np.zeros(cell_count, dtype=np.int32)
        self._cell_of = np.zeros(row_count_max, dtype=np.int32)
        self.keys = np.zeros((row_count_max, 4), dtype=np.uint64)
        self.scopes = np.zeros(row_count_max, dtype=np.uint32)
        self._free = np.zeros(row_count_max, dtype=np.int32)
        self._free_count = 0
        self._fresh = 0
        """Rows from here on are unused."""
        self.row_count_max = row_count_max
        self.count_of = Counts[int]()
        """Number of rows of each scope that has any."""
        # Single cells are read through views: a tenth of the cost of indexing an array.
        self._cell_view = self._cells.data
        self._scope_view = self.scopes.data
        self._word_view = self.keys.reshape(-1).data

    def __len__(self) -> int:
        return self._fresh - self._free_count

    @property
    def free_count(self) -> int:
        """Rows that `insert` can still take."""
        return self.row_count_max - len(self)

    def find(self, scope: int, keys: Keys) -> Rows:
        """Row of each key, -1 for none; shape [n]."""
        n = len(keys)
        if n == 0:
            return NO_ROWS
        key = keys[0].tolist()
        first = self._find_one(scope, key, self._home_of(scope, key))
        if n == 1:
            return np.array([first], dtype=np.int64)
        if first >= 0:
            # Blocks of a chain are mostly inserted together, in order: one comparison does.
            end = first + n
            if (
                end <= self.row_count_max
                and self.keys[first:end].tobytes() == keys.tobytes()
                and np.count_nonzero(self.scopes[first:end] == scope) == n
            ):
                return np.arange(first, end, dtype=np.int64)
        return self._probe(np.full(n, scope, dtype=np.uint32), keys)

    def find_all(self, scopes: Sequence[int], keys: Keys) -> Rows:
        """Rows of keys in each scope, [S][n], -1 for none. Many scopes are probed together: one
        call for each would cost more than the search."""
        if len(scopes) <= FEW_SCOPES:
            found = [self.find(scope, keys) for scope in scopes]
            return np.stack(found) if found else np.empty((0, len(keys)), dtype=np.int64)
        wanted = np.repeat(np.array(scopes, dtype=np.uint32), len(keys))
        every = np.tile(keys, (len(scopes), 1))
        return self._probe(wanted, every).reshape(len(scopes), len(keys))

    def _find_one(self, scope: int, key: list[int], cell: int) -> int:
        """Row of one key, given as four words and the start of its probe; -1 for none."""
        cells, scopes, words = self._cell_view, self._scope_view, self._word_view
        while (content := cells[cell]) != _EMPTY:
            row = content - 1
            if scopes[row] == scope:
                at = 4 * row
                if words[at] == key[0] and words[at : at + 4].tolist() == key:
                    return int(row)
            cell = (cell + 1) & self._mask
        return -1

    def _homes(self, mixed: np.uint64 | NDArray[np.uint64], keys: Keys) -> NDArray[np.int64]:
        """First cell of each key's probe: the highest bits of the sum of all words, each times its
        secret."""
        homes: Keys = keys @ self._secrets
        homes += mixed
        homes >>= np.uint64(self._shift)
        return homes.view(np.int64)

    def _home_of(self, scope: int, key: list[int]) -> int:
        """Start of the probe of one key, given as four words."""
        (a, b, c, d), (w, x, y, z) = key, self._secret_words
        mixed = a * w + b * x + c * y + d * z + scope * self._scope_secret
        return mixed >> self._shift & self._mask

    def _probe(self, scopes: NDArray[np.uint32], keys: Keys) -> Rows:
        """Rows of keys, each looked for in its own scope; -1 for none."""
        found = np.full(len(keys), -1, dtype=np.int64)
        pending = np.arange(len(keys))
        homes = cells = self._homes(scopes * np.uint64(self._scope_secret), keys)
        wanted, within = keys, scopes
        while len(pending) > _FEW:
            content = self._cells.take(cells)
            rows = np.maximum(content, 1) - 1
            # Four equal words are four bytes 1: one comparison instead of a reduction.
            same = (self.keys.take(rows, axis=0) == wanted).view(np.uint32)[:, 0] == _ALL_FOUR
            same &= (self.scopes.take(rows) == within) & (content > 0)
            found[pending[same]] = rows[same]
            going_on = np.flatnonzero(~same & (content != _EMPTY))
            pending, wanted, within = pending[going_on], wanted[going_on], within[going_on]
            cells = (cells[going_on] + 1) & self._mask
        for at in pending.tolist():
            found[at] = self._find_one(int(scopes[at]), keys[at].tolist(), int(homes[at]))
        return found

    def insert(self, scope: int, keys: Keys) -> Rows:
        """New rows for absent, distinct keys; the caller checked `free_count`."""
        n = len(keys)
        if n == 0:
            return NO_ROWS
        assert scope > 0, "scope 0 marks free rows"
        assert n <= self.free_count, "the table is full"
        rows = self._take_rows(n)
        self.keys[rows] = keys
        self.scopes[rows] = scope
        self.count_of[scope] += n
        self._place(rows)
        return rows

    def _place(self, rows: Rows) -> None:
        """Give each of these rows, with keys and scopes set, the first free cell of its probe."""
        mixed = self.scopes[rows] * np.uint64(self._scope_secret)
        cells = self._homes(mixed, self.keys.take(rows, axis=0))
        while len(rows):
            usable = self._cells[cells] == _EMPTY
            wanted, mine = cells[usable], rows[usable]
            # Two of the batch may want one cell: one of them gets it.
            self._cells[wanted] = mine + 1
            won = self._cells[wanted] == mine + 1
            self._cell_of[mine[won]] = wanted[won]
            rest = ~usable
            rest[usable] = ~won
            rows = rows[rest]
            cells = (cells[rest] + 1) & self._mask

    def _take_rows(self, n: int) -> Rows:
        fresh = min(n, self.row_count_max - self._fresh)
        rows = np.arange(self._fresh, self._fresh + fresh, dtype=np.int64)
        self._fresh += fresh
        if fresh < n:
            again = n - fresh
            begin = self._free_count - again
            # Rows that were freed together lie together, in ascending order.
            rows = np.concatenate([rows, self._free[begin : self._free_count].astype(np.int64)])
            self._free_count = begin
        return rows

    def delete(self, rows: Rows) -> None:
        """Forget these rows, which must be in use and distinct."""
        if len(rows) == 0:
            return
        for scope, count in tallied(self.scopes[rows]):
            assert scope, "a row is deleted twice"
            self.count_of.drop(scope, count)
        cells = self._cell_of[rows].astype(np.int64)
        self._cells[cells] = _EMPTY
        self.scopes[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = np.sort(rows)
        self._free_count += len(rows)
        self._close_gaps(cells)

    def _close_gaps(self, emptied: NDArray[np.int64]) -> None:
        """Place entries anew that lie between these emptied cells and the next empty ones."""
        behind = []
        cells = (emptied + 1) & self._mask
        while len(cells := cells[self._cells[cells] != _EMPTY]):
            behind.append(cells)
            cells = (cells + 1) & self._mask
        if behind:
            cells = np.concatenate(behind)
            rows = self._cells[cells].astype(np.int64) - 1
            self._cells[cells] = _EMPTY
            self._place(rows)

    @property
    def used_scopes(self) -> NDArray[np.uint32]:
        """Scope of each row ever used, 0 for a free one. A view."""
        return self.scopes[: self._fresh]

    def used_rows(self) -> Rows:
        """All rows in use, ascending."""
        return np.flatnonzero(self.used_scopes)
