"""Segments of other nodes in the same parent directory: found, announced, forgotten when they go.

Shared mode gives each node a directory of its own below one parent. This one reads the others' and
never writes there. A segment that its owner still appends to is read record by record, from where
the last look ended; one without a footer after the owner's death just stays so.

A deleted segment is renamed out of sight first and stays readable for a grace period, so that a
read just planned succeeds; where even that fails, the read is a miss, and the checksum decides on
every byte in any case. A void of another node is not obeyed: `clear` has to be sent to each node.

A name says nothing about what is under it: a node that is given an empty directory begins again
with the same names. A directory is known by its inode, a segment by its size, the time of its last
write and then its head.

One thread calls it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.tier_events import FileGone, FileKnown
from kvstore.tiers.file.segments.catalog import FOREIGN_BASE, Catalog, Segment
from kvstore.tiers.file.segments.directory import segment_number
from kvstore.tiers.file.segments.disk import Disk, close_at_last, opened, read_flags
from kvstore.tiers.file.segments.recovery import SegmentFile, read_head, record_sets
from kvstore.types import PAGE_BYTES
from kvstore.wire.segment import SEGMENT_BYTES_LIMIT, SegmentHead

_Announce = Callable[[FileKnown], bool]
_Vanished = Callable[[list[FileGone]], None]
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
    """Segments of the other nodes of a shared parent."""

    def __init__(
        self,
        parent: Path,
        own: str,
        catalog: Catalog,
        disk: Disk,
        *,
        direct: bool,
        segments_max: int,
    ) -> None:
        self._parent = parent
        self._own = own
        self._catalog = catalog
        self._disk = disk
        self._flags = read_flags(direct=direct)
        self._segments_max = segments_max
        self._peers: dict[str, _OtherNode] = {}
        self._segment_count = 0
        """Segments of all other nodes together."""
        self._next_number = FOREIGN_BASE

    def look(self, announce: _Announce, vanished: _Vanished) -> bool:
        """Look once at all other nodes' segments: announce new blocks, and those that vanished.
        False: `announce` returned False, stop."""
        try:
            names = sorted(os.listdir(self._parent))
        except OSError:
            return True
        for name in list(self._peers):
            if not self._is_same(name):
                self._leave(name, vanished)
        for name in names:
            if name != self._own and name not in self._peers:
                self._meet(name)
        return all(self._look_at(peer, announce, vanished) for peer in self._peers.values())

    def close(self) -> None:
        """Close the directories of the others."""
        for peer in self._peers.values():
            os.close(peer.fd)
        self._peers.clear()

    def _meet(self, name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            if stat.S_ISDIR(os.stat(self._parent / name, follow_symlinks=False).st_mode):
                fd = self._disk.open(os.fspath(self._parent / name), flags, _AT_CWD)
                self._peers[name] = _OtherNode(fd)
        except OSError:
            return

    def _is_same(self, name: str) -> bool:
        """Whether the directory that was opened is still the one of this name."""
        try:
            mine = os.fstat(self._peers[name].fd)
            its = os.stat(self._parent / name, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            # Of others nothing was learned: it may be as good as ever the next time.
            return error.errno != errno.ESTALE
        return (mine.st_dev, mine.st_ino) == (its.st_dev, its.st_ino)

    def _leave(self, name: str, vanished: _Vanished) -> None:
        peer = self._peers.pop(name)
        for segment in list(peer.segments):
            self._forget(peer, segment, vanished)
        close_at_last(peer.fd)

    def _look_at(self, peer: _OtherNode, announce: _Announce, vanished: _Vanished) -> bool:
        try:
            present = {name for name in os.listdir(peer.fd) if segment_number(name) is not None}
        except OSError:
            return True
        for name in sorted(set(peer.segments) - present):
            self._forget(peer, name, vanished)
        for name in sorted(present, reverse=True):
            try:
                if not self._read(peer, name, announce, vanished):
                    return False
            except OSError:
                continue  # gone meanwhile, or not readable yet
        return True

    def _forget(self, peer: _OtherNode, name: str, vanished: _Vanished) -> None:
        seen = peer.segments.pop(name)
        self._segment_count -= 1
        self._catalog.remove(seen.segment.number)
        vanished(seen.announced)

    def _read(self, peer: _OtherNode, name: str, announce: _Announce, vanished: _Vanished) -> bool:
        seen = peer.segments.get(name)
        if seen is None and self._segment_count >= self._segments_max:
            return True  # not even opened: there may be many, and each look comes by
        info = os.stat(name, dir_fd=peer.fd, follow_symlinks=False)
        size_and_time = (info.st_size, info.st_mtime_ns)
        if seen is not None and seen.size_and_time == size_and_time:
            return True
        if not stat.S_ISREG(info.st_mode) or info.st_size > SEGMENT_BYTES_LIMIT:
            return True
        with opened(self._disk, name, self._flags, peer.fd) as (fd, size):
            head = read_head(self._disk, fd) if size >= PAGE_BYTES else None
            if head is None or head.number != segment_number(name):
                return True
            if seen is not None and seen.segment.head != head:
                self._forget(peer, name, vanished)
                seen = None
            seen = seen or self._begin(peer, name, head)
            if not self._announce_new(seen, fd, size, announce):
                return False
            seen.size_and_time = size_and_time
            return True

    def _begin(self, peer: _OtherNode, name: str, head: SegmentHead) -> _Seen:
        segment = Segment(self._next_number, head, name, peer.fd, 0)
        self._next_number += 1
        self._catalog.add(segment)
        self._segment_count += 1
        peer.segments[name] = _Seen(segment)
        return peer.segments[name]

    def _announce_new(self, seen: _Seen, fd: int, size: int, announce: _Announce) -> bool:
        head, first, number = seen.segment.head, seen.end_page, seen.segment.number
        found = SegmentFile(self._disk, fd, head, size).contents(first_page=first, search=False)
        sets = record_sets(found.table, number, own_number=head.number, voids=(), first_page=first)
        for known in sets:
            if not announce(known):
                return False
            seen.announced.append(FileGone(known.scope, known.keys, known.locations))
        seen.end_page = found.end_page
        return True
