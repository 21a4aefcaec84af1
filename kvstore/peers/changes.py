"""Changes of residency on their way out of the node: a bounded, numbered log, and its readers.

    node's loop, engine_memory ─append─▶ ChangeLog ─new─▶ ChangeReader: KV events, or one of a feed

A row stays until every reader is past it, or until the log is full: then the oldest rows leave. A
reader that had not had them uses up a sequence number before it goes on, so that the other side
sees a gap and requests a snapshot.

KV events and feeds have a log each, because no row is for both: KV events are about shards, feeds
about whole blocks, and a flood of the one must not push the other out.

Covers: the log; changes joined where they are alike, and split to fit a message. Does not cover:
batches, streams and their numbers (`feed`, `node.publish`), forms (`wire.feed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from kvstore.engine.events import Changed, OffersUntold
from kvstore.types import KEY_BYTES
from kvstore.wire.feed import Change, Left, Removed, Stored

LOG_BYTES_MAX: Final = 32 << 20
"""Size of one log: 131,072 rows of one key, or a million keys in full rows."""
ROW_BYTES: Final = 224
"""Bytes of a row besides its keys; names are shared with the engine's tables."""
ROW_KEYS_MAX: Final = 1024
LEAVE_ROWS_MAX: Final = 64
"""Most rows that every reader has had and that leave in one append, so that none takes long."""
DELTA_KEYS_MAX: Final = 4096
"""A message gets rows until it has this many keys: a replica applies it within a millisecond or
two."""
_CHANGE_BYTES: Final = 72
"""Bytes of a change besides its keys and names: a space, numbers, lengths."""

Row = Changed | Change | OffersUntold
_KEYED: Final = (Changed, Stored, Removed)

_RowT = TypeVar("_RowT", bound=Row)


class FeedCounters:
    """Updates published since the start, to all replicas together."""

    def __init__(self) -> None:
        self.deltas = 0
        self.snapshots = 0
        self.keys_lost = 0
        self.streams = 0


class EventCounters:
    """Counters of published events since the start; each is written by one thread."""

    def __init__(self) -> None:
        self.batches = 0
        self.keys_lost = 0
        self.replays = 0
        self.requests_refused = 0


class ChangeLog(Generic[_RowT]):
    """The log. Any thread appends; each reader belongs to one thread."""

    def __init__(self) -> None:
        self.rows: dict[int, _RowT] = {}
        self.first = self.end = 0
        """Numbers of the oldest row (`first`) and of the next one (`end`)."""
        self.keys = self.gone_keys = 0
        """Number of keys in all rows ever appended; `gone_keys`: in rows that left."""
        self.lock = threading.Lock()
        """Held by threads that append; a reader takes it only after a loss."""
        self._readers: list[ChangeReader[_RowT]] = []

    def reader(self, wake: Callable[[], object]) -> ChangeReader[_RowT]:
        """A new reader, which begins with the next row. `wake` is called by threads that append."""
        self._readers.append(ChangeReader(self, wake))
        return self._readers[-1]

    def append(self, change: _RowT) -> None:
        """Append a change, in several rows if it has many keys, and wake readers. Never blocks for
        long: others append between the rows."""
        if (count := key_count(change)) > ROW_KEYS_MAX:
            for row in pieces(change, ROW_KEYS_MAX):
                self.append(row)
            return
        with self.lock:
            self.rows[self.end] = change
            self.end += 1
            self.keys += count
            places = [reader.number for reader in self._readers]
            needed = min([self.end, self.first + LEAVE_ROWS_MAX, *places])
            while self.first < needed or self.size_bytes > LOG_BYTES_MAX:
                self.first += 1  # before the row leaves: a reader that misses it looks here
                self.gone_keys += key_count(self.rows.pop(self.first - 1))
        for reader in self._readers:
            if reader.is_armed:
                reader.is_armed = False
                reader.wake()

    @property
    def size_bytes(self) -> int:
        """Memory of the rows in the log."""
        return ROW_BYTES * (self.end - self.first) + KEY_BYTES * (self.keys - self.gone_keys)


class ChangeReader(Generic[_RowT]):
    """One reader's position in a log."""

    def __init__(self, log: ChangeLog[_RowT], wake: Callable[[], object]) -> None:
        self.number = log.end
        self.wake = wake
        self.is_armed = False
        """Whether the next append calls `wake`."""
        self._log = log
        self._keys = log.keys

    @property
    def waiting_keys(self) -> int:
        """Keys of the log that this reader has not had."""
        return self._log.keys - self._keys

    def take_lost(self) -> int:
        """Number of keys that left the log before this reader had them; the reader goes on with the
        oldest row. From here on the next append wakes the reader."""
        self.is_armed = True
        log = self._log
        if self.number >= log.first:
            return 0
        with log.lock:
            lost = log.gone_keys - self._keys
            self._keys, self.number = log.gone_keys, log.first
        return lost

    def new(self) -> Iterator[_RowT]:
        """Rows that this reader has not had, up to the present end of the log, or to a row that has
        left."""
        end = self._log.end
        while self.number < end and (row := self._log.rows.get(self.number)) is not None:
            self.number += 1
            self._keys += key_count(row)
            yield row


def key_count(row: Row) -> int:
    """Keys of a row; one without keys counts as one."""
    return len(row.keys) // KEY_BYTES if isinstance(row, _KEYED) else 1


def head_bytes(told: Change) -> int:
    """Most bytes of a change in a message, without its keys."""
    names = [told.engine] if isinstance(told, Left) else [told.engine, told.tenant]
    return _CHANGE_BYTES + sum(len(name.encode()) for name in names)


def is_like(one: Change, other: Change) -> bool:
    """Whether they are changes that differ in their keys only."""
    if isinstance(one, Left) or isinstance(other, Left):
        return False
    return msgspec.structs.replace(one, keys=other.keys) == other


def joined(told: Change, keys: Sequence[bytes]) -> Change:
    """The change with all of these keys, in place of several alike: engines store block by
    block."""
    if len(keys) <= 1 or isinstance(told, Left):
        return told
    return msgspec.structs.replace(told, keys=b"".join(keys))


def pieces(row: _RowT, count: int) -> Iterator[_RowT]:
    """The row, split into rows of at most `count` keys each."""
    if key_count(row) <= count or not isinstance(row, _KEYED):
        yield row
        return
    step = count * KEY_BYTES
    for at in range(0, len(row.keys), step):
        yield msgspec.structs.replace(row, keys=row.keys[at : at + step])
