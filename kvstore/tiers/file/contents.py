"""Contents of a segment, by its footer or record by record, and whether a record is still intact.

Only pages that describe are read for contents; a payload is verified when somebody wants it.
Broken, torn and foreign files end as a reason, never as an exception (but for OSError of the medium
itself).

`walk` and `is_intact` are the one answer for scrub, fsck, and a sync that failed. Records are read
piece by piece, so that whoever else wants the disk waits for one piece at most, and a block of any
size is verified in little memory.

Does not cover: what becomes of the answers (`discovery.py`, `scrub.py`, `kvstore.cli.fsck`),
reading for use (`reader.py`, which verifies by the same checksums).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.tier_events import FileKnown
from kvstore.tiers.file.disk import Disk, opened, read_all, read_bytes
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import (
    PAGE_MAGIC,
    BlockPage,
    Void,
    checksum_of,
    parse_page,
    record_pages,
)
from kvstore.wire.segment import (
    PAGE_SHIFT,
    Gathered,
    SegmentHead,
    Table,
    parse_footer,
    parse_segment_page,
    parse_trailer,
    place_of,
)

BATCH_KEYS: Final = 8_192
"""Keys of one event at most, so that no step of the engine is long."""
_SEARCH_PAGES: Final = 256


class Contents(NamedTuple):
    """Content of a segment, and how it was found."""

    table: Table
    end_page: int
    """Page behind the last record."""
    is_closed: bool = True
    skipped_pages: int = 0
    """Pages between records that are none."""


class SegmentFile(NamedTuple):
    """A segment that is open for reading. All methods raise OSError: the medium failed."""

    disk: Disk
    fd: int
    head: SegmentHead
    """Content of page 0."""
    size_bytes: int
    """Length of the file."""

    def contents(self, *, first_page: int = 1, search: bool = True) -> Contents:
        """The content: by the footer, if there is one that can be trusted, else record by record as
        `scan` finds them.
        """
        table = self.footer()
        if table is not None:
            return Contents(table, self.size_bytes // PAGE_BYTES)
        return self.scan(first_page=first_page, search=search)

    def footer(self) -> Table | None:
        """The table of a closed segment, None if it has none that can be trusted."""
        size = self.size_bytes
        if size % PAGE_BYTES or size < 3 * PAGE_BYTES:
            return None
        trailer = read_bytes(self.disk, self.fd, PAGE_BYTES, size - PAGE_BYTES)
        place = parse_trailer(trailer, self.head, file_bytes=size)
        if place is None:
            return None
        body = read_bytes(self.disk, self.fd, place.table_bytes, place.first_page * PAGE_BYTES)
        return parse_footer(body, place, self.head)

    def scan(self, *, first_page: int = 1, search: bool = True) -> Contents:
        """Read records one behind the other.

        Args:
            first_page: where a record is expected.
            search: look for the next record behind a broken one; else stop there.
        """
        found, skipped = Gathered(end_page=first_page), 0
        page, end = first_page, self.size_bytes // PAGE_BYTES
        while page < end:
            raw = read_bytes(self.disk, self.fd, PAGE_BYTES, page * PAGE_BYTES)
            record = self.parsed(raw, page)
            if isinstance(record, Void):
                found.voids.append(record)
                page += 1
            elif record is not None and page + record_pages(record.scope) <= end:
                found.add(page, record.scope, record.key, record.checksum)
                page += record_pages(record.scope)
            elif search:
                after = self._next_record(page + 1, end)
                skipped += after - page if after < end else 0
                page = after
                continue
            else:
                break
            found.end_page = page
        return Contents(found.table(), found.end_page, is_closed=False, skipped_pages=skipped)

    def parsed(self, raw: bytes | memoryview, page: int) -> BlockPage | Void | None:
        """Content of a page of this segment; None: none, or that of another place."""
        place = place_of(self.head.number, page)
        return parse_page(raw, segment_id=self.head.segment_id, place=place)

    def _next_record(self, page: int, end: int) -> int:
        """First page from `page` on that is a record of this place; `end` if there is none."""
        while page < end:
            length = min(_SEARCH_PAGES, end - page) * PAGE_BYTES
            chunk = read_bytes(self.disk, self.fd, length, page * PAGE_BYTES)
            for at in range(len(chunk) // PAGE_BYTES):
                raw = chunk[at * PAGE_BYTES : (at + 1) * PAGE_BYTES]
                if raw[:4] == PAGE_MAGIC and self.parsed(raw, page + at):
                    return page + at
            page += _SEARCH_PAGES
        return end


@contextlib.contextmanager
def opened_segment(
    disk: Disk, name: str, flags: int, dir_fd: int
) -> Iterator[tuple[SegmentFile | None, int]]:
    """A file with the name of a segment, and its size, open as long as the block runs; None: its
    page 0 is none. Raises OSError."""
    with opened(disk, name, flags, dir_fd) as (fd, size):
        page = read_bytes(disk, fd, PAGE_BYTES, 0) if size >= PAGE_BYTES else b""
        head = parse_segment_page(page)
        yield SegmentFile(disk, fd, head, size) if head is not None else None, size


def record_sets(
    table: Table, number: int, own_number: int, *, voids: Sequence[Void], first_page: int = 0
) -> Iterator[FileKnown]:
    """The living records, per scope, at most BATCH_KEYS at a time.

    Args:
        table: what the segment holds.
        number: of the segment, as locations name it.
        own_number: of the segment in its own directory, which places of voids refer to.
        voids: of newer segments.
        first_page: records before this page are left out.
    """
    alive = table.living(own_number, voids) & (table.rows["page"] >= first_page)
    for index, scope in enumerate(table.scopes):
        chosen = np.flatnonzero(alive & (table.rows["scope"] == index))
        for begin in range(0, len(chosen), BATCH_KEYS):
            rows = table.rows[chosen[begin : begin + BATCH_KEYS]]
            places = rows["page"].astype(np.uint64) | np.uint64(number << PAGE_SHIFT)
            keys, checksums = rows["key"].tobytes(), rows["checksum"].tobytes()
            yield FileKnown(scope, keys, places.tobytes(), checksums)


# ── intact ────────────────────────────────────────────────────────────────────────────────────────


def walk(
    file: SegmentFile,
    table: Table,
    buffer: memoryview,
    *,
    rows: Iterable[int] | None = None,
    before_read: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[int, BlockPage, bool, OSError | None]]:
    """Records in the order in which they lie: page and block of each, whether it is intact
    (`is_intact`), and the error if the medium failed.

    Args:
        file, buffer, before_read: as of `is_intact`.
        table: what the segment holds.
        rows: of the table; None: all.
    """
    for row in range(len(table.rows)) if rows is None else rows:
        page, block = int(table.rows["page"][row]), table.block(row)
        try:
            yield page, block, is_intact(file, page, block, buffer, before_read), None
        except OSError as error:
            yield page, block, False, error


def is_intact(
    file: SegmentFile,
    page: int,
    block: BlockPage,
    buffer: memoryview,
    before_read: Callable[[int], None] = lambda _: None,
) -> bool:
    """Whether the record of a block is there, every byte of it.

    Args:
        file: its segment.
        page: where it should be.
        block: what its page should say.
        buffer: for a piece, whole pages.
        before_read: called with the size of each piece before it is read.

    Raises:
        OSError: the medium failed.
    """
    end = PAGE_BYTES + block.scope.block_bytes
    size = record_pages(block.scope) * PAGE_BYTES

    def read() -> Iterator[memoryview]:
        """Header and payload, piece by piece, in `buffer`; ends early with its file."""
        for begin in range(0, size, len(buffer)):
            piece = buffer[: min(len(buffer), size - begin)]
            before_read(len(piece))
            if read_all(file.disk, file.fd, [piece], page * PAGE_BYTES + begin) != len(piece):
                return
            yield piece[: end - begin]

    pieces = read()
    first = next(pieces, memoryview(b""))
    if file.parsed(first[:PAGE_BYTES], page) != block:
        return False
    payload = itertools.chain([first[PAGE_BYTES:]], pieces)
    return checksum_of(block.scope.prefix() + block.key, payload) == block.checksum
