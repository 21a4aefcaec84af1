"""The content of this node's own directory when the tier was opened: newest segment first.

`survey` runs before anything else and is quick: names, sizes, and the number that the next segment
gets. `recover` runs beside the first reads and writes.

A segment that cannot be read is asked again after a while, in its turn: older ones may hold blocks
that it says were cleared. When that does not help and the store's own page can be read, it is that
file that is bad, and it is put aside. When that cannot be read either it is the disk, and recovery
waits for it: nothing is moved or deleted because a cable was loose.

Does not cover: segments of other nodes (`shared.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from kvstore.tier_events import FileKnown
from kvstore.tiers.file.segments.catalog import Catalog, Segment
from kvstore.tiers.file.segments.directory import Directory, segment_name
from kvstore.tiers.file.segments.disk import Disk
from kvstore.tiers.file.segments.recovery import SegmentFile, read_head, record_sets
from kvstore.types import PAGE_BYTES
from kvstore.units import format_size
from kvstore.wire.record import Void
from kvstore.wire.segment import SEGMENT_BYTES_LIMIT, SegmentHead

PAUSES_S: Final = (0.1, 0.4, 1.5)
"""Pauses between attempts to read one segment."""
DISK_PAUSE_S: Final = 5.0
"""Pause between attempts while nothing at all can be read."""

_Announce = Callable[[FileKnown], bool]
_log = logging.getLogger(__name__)


class Restart:
    """Finds the segments that the directory held before, and their blocks. One thread uses it."""

    def __init__(
        self, directory: Directory, catalog: Catalog, disk: Disk, *, segment_bytes: int
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._disk = disk
        self._aside_max = catalog.capacity_bytes // 16
        self._sizes = directory.segments(keep_bytes=self._aside_max)
        self._catalog.aside_bytes = directory.aside_bytes()
        self.newest_is_closed = False
        self.next_number = self._survey()
        self._shrink(catalog.capacity_bytes - 2 * segment_bytes)
        self.voids: list[Void] = []

    def _survey(self) -> int:
        """One more than the newest segment that is really ours; what claims more is put aside."""
        for number in sorted(self._sizes, reverse=True):
            try:
                if (head := self._head_of(number)) is not None:
                    with self._directory.opened(segment_name(number)) as (fd, size):
                        footer = SegmentFile(self._disk, fd, head, size).footer()
                    self.newest_is_closed = footer is not None
                    return number + 1
            except OSError:
                # Ours by its name, until it can be read: a gap in the numbers hurts nobody.
                return number + 1
        return 1

    def _shrink(self, bytes_max: int) -> None:
        """Delete the oldest until the rest fits a capacity that may have become smaller."""
        self._catalog.expect(self._sizes)
        removed_bytes = 0
        for number in sorted(self._sizes):
            if self._catalog.taken_bytes <= bytes_max:
                break
            removed_bytes += self._sizes[number]
            self._directory.remove(segment_name(number))
            self._forget(number)
        if removed_bytes:
            _log.warning(
                "%s held more than --file allows now: its oldest blocks are deleted, %s",
                self._directory.path,
                format_size(removed_bytes),
            )
        if self._catalog.aside_bytes:
            _log.warning(
                "%s of damaged files in %s count against --file: delete them once looked at",
                format_size(self._catalog.aside_bytes),
                self._directory.path / "quarantine",
            )

    def recover(self, announce: _Announce, leaving: Callable[[float], bool]) -> bool:
        """Announce the content of every segment. False: stopped.

        Args:
            announce: takes the events; False: stop.
            leaving: waits the given seconds; True: stop.
        """
        return all(
            self._recover_patiently(number, announce, leaving)
            for number in sorted(self._sizes, reverse=True)
        )

    def _recover_patiently(
        self, number: int, announce: _Announce, leaving: Callable[[float], bool]
    ) -> bool:
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                return self._recover_one(number, announce)
            except OSError as error:
                reason = error
            pause_s = next(pauses_s, None)
            if pause_s is None:
                if self._directory.is_readable():
                    _log.warning(
                        "%s cannot be read, though the disk can be: %s",
                        self._directory.path / segment_name(number),
                        reason.strerror,
                    )
                    self._aside(number, f"unreadable {reason.errno}")
                    return True
                _log.warning(
                    "%s cannot be read at present: %s; it is tried again every %.0f s, and what it"
                    " holds is not known until then",
                    self._directory.path,
                    reason.strerror,
                    DISK_PAUSE_S,
                )
                pause_s = DISK_PAUSE_S
            if leaving(pause_s):
                return False

    def _recover_one(self, number: int, announce: _Announce) -> bool:
        head = self._head_of(number)
        if head is None:
            return True
        name = segment_name(number)
        with self._directory.opened(name) as (fd, size):
            table = SegmentFile(self._disk, fd, head, size).contents().table
        if not len(table.pages) and not table.voids:
            self._directory.remove(name)
            self._forget(number)
            return True
        self._catalog.add(Segment(number, head, name, self._directory.fd, size))
        if not all(map(announce, record_sets(table, number, own_number=number, voids=self.voids))):
            return False
        self.voids += [void for void in table.voids if void not in self.voids]
        return True

    def _head_of(self, number: int) -> SegmentHead | None:
        """The header, if the file is a segment of this store under its own name; else it is put
        aside (or deleted, when it is no more than a torn beginning).

        Raises:
            OSError: it cannot be read now.
        """
        name = segment_name(number)
        try:
            with self._directory.opened(name) as (fd, size):
                head = read_head(self._disk, fd) if size >= PAGE_BYTES else None
        except FileNotFoundError:
            self._forget(number)
            return None
        if head is None and size <= PAGE_BYTES:
            self._directory.remove(name)
            self._forget(number)
            return None
        if size > SEGMENT_BYTES_LIMIT:
            self._aside(number, "too long")  # its size could not be had before
            return None
        if head is None:
            self._aside(number, "damaged")
            return None
        if head.store_id != self._directory.store_id or head.number != number:
            self._aside(number, "foreign")
            return None
        return head

    def _aside(self, number: int, reason: str) -> None:
        self._directory.put_aside(segment_name(number), reason, keep_bytes=self._aside_max)
        self._catalog.aside_bytes = self._directory.aside_bytes()
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._sizes.pop(number, None)
        self._catalog.drop_expected(number)
