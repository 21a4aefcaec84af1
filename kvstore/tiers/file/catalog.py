"""Which segments there are, what they take of the capacity, and their open descriptors.

Covers this node's segments and, in shared mode, those of others, which have numbers of their own
here (from 2^31 on) and take nothing of the capacity. Thread safe: one short lock, no I/O under it.
Closing is I/O: with the last descriptor of a file that was deleted its extents are freed.

    capacity ≥ closed segments + open segment (counted whole) + quarantine + hidden + FIXED_BYTES

Does not cover: what is in a segment (`contents.py`), which one goes (`tier.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.tiers.file.contents import SegmentFile
from kvstore.tiers.file.disk import Disk, close_at_last, open_regular, read_flags
from kvstore.types import PAGE_BYTES
from kvstore.wire.segment import Gathered, SegmentHead

FOREIGN_BASE: Final = 1 << 31
"""Numbers from here on are segments of other nodes."""
FIXED_BYTES: Final = 36 * PAGE_BYTES
"""Room taken by identity, lock, probe, and the node's note, old and new."""
_OPEN_MAX: Final = 256


@dataclass(slots=True, eq=False)
class Segment:
    """One file. `head` is what its page 0 says; `dir_fd` and `name` say where it is."""

    number: int
    head: SegmentHead
    name: str
    dir_fd: int
    taken_bytes: int
    found: Gathered | None = None
    """Its records so far, while it is appended to."""

    @property
    def is_foreign(self) -> bool:
        return self.number >= FOREIGN_BASE


class _Descriptor:
    """A descriptor that is closed with the last reference to it: a reader's, or the catalog's while
    it is kept for later readers. A removed one stays in a local until the lock is released, since
    closing is I/O."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        close_at_last(self.fd)


class Catalog:
    """All segments by number."""

    def __init__(self, disk: Disk, *, capacity_bytes: int, direct: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self._disk = disk
        self._flags = read_flags(direct=direct)
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._unread: dict[int, int] = {}
        self._open: OrderedDict[int, _Descriptor] = OrderedDict()
        self._own_bytes = 0
        self.aside_bytes = 0
        self.hidden_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """All that counts against the capacity."""
        with self._lock:
            own = self._own_bytes + sum(self._unread.values())
        return own + self.aside_bytes + self.hidden_bytes + FIXED_BYTES

    def expect(self, sizes: dict[int, int]) -> None:
        """Count files that recovery has not looked at yet."""
        with self._lock:
            self._unread = sizes

    @property
    def expected(self) -> dict[int, int]:
        """Number → bytes of the files that recovery has not looked at yet."""
        with self._lock:
            return dict(self._unread)

    def drop_expected(self, number: int) -> None:
        """Stop counting a file that recovery looked at, and that is gone."""
        with self._lock:
            self._unread.pop(number, None)

    def add(self, segment: Segment) -> None:
        with self._lock:
            self._unread.pop(segment.number, None)
            self._segments[segment.number] = segment
            self._own_bytes += 0 if segment.is_foreign else segment.taken_bytes

    def get(self, number: int) -> Segment | None:
        with self._lock:
            return self._segments.get(number)

    def closed(self, number: int, size_bytes: int) -> None:
        """Mark a segment as not appended to any more, with its final size."""
        with self._lock:
            segment = self._segments[number]
            segment.found = None
            self._own_bytes += size_bytes - segment.taken_bytes
            segment.taken_bytes = size_bytes

    def remove(self, number: int) -> None:
        """Forget a segment; its descriptor is closed when its last reader is done."""
        with self._lock:
            segment = self._segments.pop(number, None)
            if segment is not None and not segment.is_foreign:
                self._own_bytes -= segment.taken_bytes
            _left = self._open.pop(number, None)

    def first_number(self) -> int:
        """Least number of an own segment, 0 if there is none."""
        with self._lock:
            own = [n for n in self._segments if n < FOREIGN_BASE]
            return min([*own, *self._unread], default=0)

    def own(self) -> list[Segment]:
        """This node's segments, oldest first."""
        with self._lock:
            return [s for _, s in sorted(self._segments.items()) if not s.is_foreign]

    @contextlib.contextmanager
    def reading(self, segment: Segment) -> Iterator[SegmentFile]:
        """The segment's file, open as long as the block runs.

        Raises:
            OSError: the file is gone, or is no regular file any more.
        """
        number = segment.number
        with self._lock:
            opened = self._open.get(number)
        if opened is None:
            fd, _ = open_regular(self._disk, segment.name, self._flags, segment.dir_fd)
            opened = _Descriptor(fd)
        with self._lock:
            if self._segments.get(number) is segment:  # else it left meanwhile
                self._open.setdefault(number, opened)
                self._open.move_to_end(number)
        try:
            yield SegmentFile(self._disk, opened.fd, segment.head, segment.taken_bytes)
        finally:
            with self._lock:
                too_many = len(self._open) > _OPEN_MAX
                _longest_unused = self._open.popitem(last=False) if too_many else None

    def close(self) -> None:
        """Close the descriptors that nobody reads from; the last readers close the others."""
        with self._lock:
            _kept, self._open = self._open, OrderedDict()
