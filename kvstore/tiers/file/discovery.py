"""Segments that are found: this node's own when the tier is opened, and those of other nodes.

This node's directory is read newest segment first. The survey runs before anything else and is
quick: names, sizes, and the number that the next segment gets. `recover` runs beside the first
reads and writes. A segment that cannot be read is asked again after a while, in its turn: older
ones may hold blocks that it says were cleared. When that does not help and the store's own page can
be read, it is that file that is bad, and it is put aside. When that cannot be read either it is the
disk, and recovery waits for it: nothing is moved or deleted because a cable was loose.

Shared mode gives each node a directory of its own below one parent. This one reads the others' and
never writes there: segments are announced, and forgotten when they go. A segment that its owner
still appends to is read record by record, from where the last look ended; one without a footer
after the owner's death just stays so.

A deleted segment is renamed out of sight first and stays readable for a grace period, so that a
read just planned succeeds; where even that fails, the read is a miss, and the checksum decides on
every byte in any case. A void of another node is not obeyed: `clear` has to be sent to each node.

A name says nothing about what is under it: a node that is given an empty directory begins again
with the same names. A directory is known by its inode, a segment by its size, the time of its last
write and then its head.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvstore.tier_events import FileGone
from kvstore.tiers.file.catalog import FOREIGN_BASE, Segment
from kvstore.tiers.file.contents import SegmentFile, opened_segment, record_sets
from kvstore.tiers.file.directory import segment_name, segment_number
from kvstore.tiers.file.disk import close_at_last, read_flags
from kvstore.tiers.file.parts import Leaving, Parts
from kvstore.types import PAGE_BYTES
from kvstore.units import format_size
from kvstore.wire.record import Void
from kvstore.wire.segment import SEGMENT_BYTES_LIMIT, SegmentHead

PAUSES_S: Final = (0.1, 0.4, 1.5)
"""Pauses between attempts to read one segment."""
DISK_PAUSE_S: Final = 5.0
"""Pause between attempts while nothing at all can be read."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


# ── this node ─────────────────────────────────────────────────────────────────────────────────────


class Restart:
    """Finds the segments that the directory held before, and their blocks. One thread uses it."""

    def __init__(self, parts: Parts) -> None:
        config, self._outbox, self._leaving = parts.config, parts.outbox, parts.leaving
        self._disk, self._directory, self._catalog = parts.disk, parts.directory, parts.catalog
        self._flags = read_flags(direct=parts.directory.direct)
        self._aside_max = config.capacity_bytes // 16
        self._catalog.expect(self._directory.segments(keep_bytes=self._aside_max))
        self._catalog.aside_bytes = self._directory.aside_bytes()
        self.newest_is_closed = False
        self.next_number = self._survey()
        self._shrink(config.capacity_bytes - 2 * config.segment_size)
        self.voids: list[Void] = []

    def _survey(self) -> int:
        """One more than the newest segment that is really ours; what claims more is put aside."""
        for number in sorted(self._catalog.expected, reverse=True):
            try:
                is_closed = self._read(number, lambda file: file.footer() is not None)
            except OSError:
                # Ours by its name, until it can be read: a gap in the numbers hurts nobody.
                return number + 1
            if is_closed is not None:
                self.newest_is_closed = is_closed
                return number + 1
        return 1

    def _shrink(self, bytes_max: int) -> None:
        """Delete the oldest until the rest fits a capacity that may have become smaller."""
        sizes, removed_bytes = self._catalog.expected, 0
        for number in sorted(sizes):
            if self._catalog.taken_bytes <= bytes_max:
                break
            removed_bytes += sizes[number]
            self._delete(number)
        if removed_bytes:
            _log.warning(
                "%s held more than --file allows now: its oldest blocks are deleted, %s %s",
                self._directory.path,
                format_size(removed_bytes),
                f"of {format_size(sum(sizes.values()))}"
                if self._catalog.expected
                else "and nothing is left",
            )
        if self._catalog.aside_bytes:
            _log.warning(
                "%s of files moved aside to %s count against --file: delete them once looked at",
                format_size(self._catalog.aside_bytes),
                self._directory.path / "quarantine",
            )

    def recover(self) -> None:
        """Announce the content of every segment. Raises Leaving."""
        for number in sorted(self._catalog.expected, reverse=True):
            self._recover_patiently(number)

    def _recover_patiently(self, number: int) -> None:
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                return self._recover_one(number)
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
                    break
                _log.warning(
                    "%s cannot be read at present: %s; it is tried again every %.0f s, and what it"
                    " holds is not known until then",
                    self._directory.path,
                    reason.strerror,
                    DISK_PAUSE_S,
                )
                pause_s = DISK_PAUSE_S
            if self._leaving.wait(pause_s):
                raise Leaving

    def _recover_one(self, number: int) -> None:
        read = self._read(number, lambda file: (file.head, file.size_bytes, file.contents().table))
        if read is None:
            return
        head, size, table = read
        if not len(table.rows) and not table.voids:
            self._delete(number)
            return
        self._catalog.add(Segment(number, head, segment_name(number), self._directory.fd, size))
        for known in record_sets(table, number, number, voids=self.voids):
            self._outbox.known(known, own=True)
        self.voids += [void for void in table.voids if void not in self.voids]

    def _read(self, number: int, read: Callable[[SegmentFile], _T]) -> _T | None:
        """Result of `read` for a segment of this store under its own name. None: the file is none,
        and is put aside, or deleted when it is no more than a torn beginning.

        Raises:
            OSError: it cannot be read now.
        """
        name = segment_name(number)
        try:
            with opened_segment(self._disk, name, self._flags, self._directory.fd) as (file, size):
                if file is None and size <= PAGE_BYTES:
                    self._delete(number)
                elif size > SEGMENT_BYTES_LIMIT:
                    self._aside(number, "too long")  # its size could not be had before
                elif file is None:
                    self._aside(number, "damaged")
                elif file.head.store_id != self._directory.store_id or file.head.number != number:
                    self._aside(number, "foreign")
                else:
                    return read(file)
        except FileNotFoundError:
            self._catalog.drop_expected(number)
        return None

    def _aside(self, number: int, reason: str) -> None:
        self._directory.put_aside(segment_name(number), reason, keep_bytes=self._aside_max)
        self._catalog.aside_bytes = self._directory.aside_bytes()
        self._catalog.drop_expected(number)

    def _delete(self, number: int) -> None:
        self._directory.remove(segment_name(number))
        self._catalog.drop_expected(number)


# ── other nodes ───────────────────────────────────────────────────────────────────────────────────

_AT_CWD: Final = -100
"""AT_FDCWD of openat(2): the path is not relative to a directory's descriptor."""


@dataclass(slots=True)
class _Seen:
    """A foreign segment: how far it was read, and what it looked like then."""

    segment: Segment
    end_page: int = 1
    size_and_time: tuple[int, int] = (0, 0)
    announced: list[FileGone] = field(default_factory=list)
    """Events that take its blocks back when it vanishes."""


@dataclass(slots=True)
class _OtherNode:
    fd: int
    segments: dict[str, _Seen] = field(default_factory=dict)


class Peers:
    """Segments of the other nodes of a shared parent. One thread calls it."""

    def __init__(self, parts: Parts) -> None:
        self._config, self._disk = parts.config, parts.disk
        self._catalog, self._outbox = parts.catalog, parts.outbox
        self._parent = parts.config.directory
        self._flags = read_flags(direct=parts.directory.direct)
        self._peers: dict[str, _OtherNode] = {}
        self._next_number = FOREIGN_BASE

    def look(self) -> None:
        """Look once at all other nodes' segments: announce new blocks, and those that vanished.
        Raises Leaving."""
        try:
            names = sorted(os.listdir(self._parent))
        except OSError:
            return
        for name in list(self._peers):
            if not self._is_same(name):
                self._leave(name)
        for name in names:
            if name != self._config.node and name not in self._peers:
                self._meet(name)
        for peer in self._peers.values():
            self._look_at(peer)

    def close(self) -> None:
        """Close the directories of the others."""
        for peer in self._peers.values():
            os.close(peer.fd)
        self._peers.clear()

    def _meet(self, name: str) -> None:
        path, flags = os.fspath(self._parent / name), os.O_RDONLY | os.O_DIRECTORY
        with contextlib.suppress(OSError):  # no directory, or none that may be read
            self._peers[name] = _OtherNode(self._disk.open(path, flags, _AT_CWD))

    def _is_same(self, name: str) -> bool:
        """Whether the directory that was opened is still the one of this name."""
        try:
            its = os.stat(self._parent / name, follow_symlinks=False)
            return os.path.samestat(os.fstat(self._peers[name].fd), its)
        except FileNotFoundError:
            return False
        except OSError as error:
            # Of others nothing was learned: it may be as good as ever the next time.
            return error.errno != errno.ESTALE

    def _leave(self, name: str) -> None:
        peer = self._peers.pop(name)
        for segment in list(peer.segments):
            self._forget(peer, segment)
        close_at_last(peer.fd)

    def _look_at(self, peer: _OtherNode) -> None:
        try:
            present = {name for name in os.listdir(peer.fd) if segment_number(name) is not None}
        except OSError:
            return
        for name in sorted(set(peer.segments) - present):
            self._forget(peer, name)
        for name in sorted(present, reverse=True):
            with contextlib.suppress(OSError):  # gone meanwhile, or not readable yet
                self._read(peer, name)

    def _forget(self, peer: _OtherNode, name: str) -> None:
        seen = peer.segments.pop(name)
        self._catalog.remove(seen.segment.number)
        self._outbox.put(*seen.announced)

    def _read(self, peer: _OtherNode, name: str) -> None:
        seen = peer.segments.get(name)
        if seen is None and self._is_full:
            return  # not even opened: there may be many, and each look comes by
        info = os.stat(name, dir_fd=peer.fd, follow_symlinks=False)
        size_and_time = (info.st_size, info.st_mtime_ns)
        if seen is not None and seen.size_and_time == size_and_time:
            return
        if not stat.S_ISREG(info.st_mode) or info.st_size > SEGMENT_BYTES_LIMIT:
            return
        with opened_segment(self._disk, name, self._flags, peer.fd) as (file, _):
            if file is None or file.head.number != segment_number(name):
                return
            if seen is not None and seen.segment.head != file.head:
                self._forget(peer, name)
                seen = None
            seen = seen or self._begin(peer, name, file.head)
            self._announce_new(seen, file)
            seen.size_and_time = size_and_time

    @property
    def _is_full(self) -> bool:
        count = sum(len(each.segments) for each in self._peers.values())
        return count >= self._config.foreign_segments_max

    def _begin(self, peer: _OtherNode, name: str, head: SegmentHead) -> _Seen:
        segment = Segment(self._next_number, head, name, peer.fd, 0)
        self._next_number += 1
        self._catalog.add(segment)
        peer.segments[name] = _Seen(segment)
        return peer.segments[name]

    def _announce_new(self, seen: _Seen, file: SegmentFile) -> None:
        first, numbers = seen.end_page, (seen.segment.number, file.head.number)
        found = file.contents(first_page=first, search=False)
        for known in record_sets(found.table, *numbers, voids=(), first_page=first):
            self._outbox.known(known, own=False)
            seen.announced.append(FileGone(known.scope, known.keys, known.locations))
        seen.end_page = found.end_page
