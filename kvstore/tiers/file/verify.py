"""Whether a record on disk is what was stored there: the one answer for scrub, fsck, and a sync
that failed.

Read piece by piece, so that whoever else wants the disk waits for one piece at most, and a block of
any size is verified in little memory. Does not cover: reading for use (`reader.py`, which verifies
by the same checksums), what becomes of a bad record.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvstore.tiers.file.segments.disk import Pages, read_all
from kvstore.tiers.file.segments.recovery import SegmentFile
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import BlockPage, Scope, checksum_of, record_pages
from kvstore.wire.segment import Table


class Record(msgspec.Struct, frozen=True):
    """Where a block lies in its segment, and what should be there."""

    scope: Scope
    page: int
    key: bytes
    checksum: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of its header's page and its payload."""
        return record_pages(self.scope) * PAGE_BYTES


def record_at(table: Table, row: int) -> Record:
    """A row of a segment's table."""
    return Record(
        table.scopes[int(table.scope_of[row])],
        int(table.pages[row]),
        table.keys[row].tobytes(),
        table.checksums[row].tobytes(),
    )


def is_bad_sector(error: OSError) -> bool:
    """True: the record is bad, and the next one can be read. Raises the error otherwise."""
    if error.errno != errno.EIO:
        raise error
    return True


def walk(
    file: SegmentFile,
    table: Table,
    buffer: Pages,
    *,
    rows: Iterable[int] | None = None,
    before_read: Callable[[int], None] = lambda _: None,
    failed: Callable[[OSError], bool] = is_bad_sector,
) -> Iterator[tuple[Record, bool]]:
    """Records in the order in which they lie, each with whether it is intact (`is_intact`).

    Args:
        file, buffer, before_read: as of `is_intact`.
        table: what the segment holds.
        rows: of the table; None: all.
        failed: called when the medium failed; whether the record is bad, else it is left out.
    """
    for row in range(len(table.pages)) if rows is None else rows:
        record = record_at(table, row)
        try:
            good = is_intact(file, record, buffer, before_read)
        except OSError as error:
            if not failed(error):
                continue
            good = False
        yield record, good


def is_intact(
    file: SegmentFile,
    record: Record,
    buffer: Pages,
    before_read: Callable[[int], None] = lambda _: None,
) -> bool:
    """Whether the record is there, every byte of it.

    Args:
        file: its segment.
        record: what should be there.
        buffer: for a piece, at least a page; a record that fits it is in there afterwards.
        before_read: called with the size of each piece before it is read.

    Raises:
        OSError: the medium failed.
    """
    pieces = _read(file, record, buffer, before_read)
    first = next(pieces, memoryview(b""))
    page = file.parsed(first[:PAGE_BYTES], record.page)
    if page != BlockPage(record.scope, record.key, record.checksum):
        return False
    payload = itertools.chain([first[PAGE_BYTES:]], pieces)
    return checksum_of(record.scope.prefix() + record.key, payload) == record.checksum


def _read(
    file: SegmentFile, record: Record, buffer: Pages, before_read: Callable[[int], None]
) -> Iterator[memoryview]:
    """Header and payload of a record, piece by piece, in `buffer`; ends early with its file."""
    end = PAGE_BYTES + record.scope.block_bytes
    for begin in range(0, record.size_bytes, len(buffer.view)):
        piece = buffer.view[: min(len(buffer.view), record.size_bytes - begin)]
        before_read(len(piece))
        if read_all(file.disk, file.fd, [piece], record.page * PAGE_BYTES + begin) != len(piece):
            return
        yield piece[: end - begin]
