"""The system calls of the disk tier, which tests delay and fail, used with care.

A file is opened without following links and without waiting for a FIFO's other end, and is looked
at before it is read: only a regular file is one of ours.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvstore.types import PAGE_BYTES

IOVECS_MAX: Final = 1_024
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors for want of room for bytes or files: not fatal, since what is there can be read."""
_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Disk:
    """Calls that may hang or fail: each ends with its result or OSError, or not at all. Every call
    runs without the GIL. Tests override them."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        return os.open(name, flags | _SAFE, 0o600, dir_fd=dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)


class Pages:
    """Page-aligned memory of its own, for headers and footers."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))

    def page(self, index: int) -> memoryview:
        """One page, without a copy."""
        return self.view[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]


def open_regular(disk: Disk, name: str, flags: int, dir_fd: int) -> tuple[int, int]:
    """Open a regular file; descriptor and size.

    Raises:
        OSError: it cannot be opened, or it is a directory, FIFO, device, socket or link.
    """
    fd = disk.open(name, flags, dir_fd)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except OSError:
        os.close(fd)
        raise
    return fd, info.st_size


def read_flags(*, direct: bool) -> int:
    """Flags of files that are read; `direct`: past the page cache."""
    return os.O_RDONLY | (os.O_DIRECT if direct else 0)


@contextlib.contextmanager
def opened(disk: Disk, name: str, flags: int, dir_fd: int) -> Iterator[tuple[int, int]]:
    """As `open_regular`, with the file open as long as the block runs."""
    fd, size = open_regular(disk, name, flags, dir_fd)
    try:
        yield fd, size
    finally:
        os.close(fd)


def read_all(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers as far as the file goes; the number of bytes read.

    Raises:
        OSError: the medium failed.
    """
    left, done = list(buffers), 0
    while left:
        count = disk.preadv(fd, left[:IOVECS_MAX], offset + done)
        if count <= 0:
            break
        done += count
        if count % PAGE_BYTES:
            break  # the file's torn end: O_DIRECT could not go on from here
        left = _after(left, count)
    return done


def write_all(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of the buffers.

    Raises:
        OSError: no room, or the medium failed; how much was written is not known.
    """
    left, done = list(buffers), 0
    while left:
        count = disk.pwritev(fd, left[:IOVECS_MAX], offset + done)
        if count <= 0 or count % PAGE_BYTES:
            raise OSError(errno.ENOSPC, "a part of a page was written")
        done += count
        left = _after(left, count)


def read_bytes(disk: Disk, fd: int, length: int, offset: int) -> bytes:
    """Up to `length` bytes at a page-aligned offset, by way of aligned memory (for O_DIRECT).

    Raises:
        OSError: the medium failed.
    """
    pages = Pages(max(1, -(-length // PAGE_BYTES)) * PAGE_BYTES)
    count = read_all(disk, fd, [pages.view], offset)
    return bytes(pages.view[: min(count, length)])


def beginning_of(
    disk: Disk, name: str, dir_fd: int, *, bytes_max: int = PAGE_BYTES, direct: bool = False
) -> bytes:
    """The first bytes of a small file, as many as there are; empty if it cannot be read."""
    flags = read_flags(direct=direct)
    with contextlib.suppress(OSError), opened(disk, name, flags, dir_fd) as (fd, size):
        return read_bytes(disk, fd, min(size, bytes_max), 0)
    return b""


def works_direct(disk: Disk, name: str, dir_fd: int) -> bool:
    """Whether O_DIRECT works in this directory, by writing and reading a page of a file there.

    Raises:
        OSError: not even an ordinary file can be made; the directory cannot be used.
    """
    try:
        os.close(disk.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, dir_fd))
    except OSError as error:
        if error.errno in FULL:
            return False
        raise
    pages = Pages(PAGE_BYTES)
    fd = -1
    try:
        fd = disk.open(name, os.O_RDWR | os.O_DIRECT, dir_fd)
        write_all(disk, fd, [pages.view], 0)
        return read_all(disk, fd, [pages.view], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if error.errno in FULL:
            return fd >= 0
        raise
    finally:
        if fd >= 0:
            os.close(fd)
        os.unlink(name, dir_fd=dir_fd)


def sizes_in(directory: Path) -> list[int]:
    """Bytes on the disk of each entry; as far as they can be looked at."""
    sizes: list[int] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        sizes.extend(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    return sizes


def close_at_last(fd: int) -> None:
    """Close a file and ignore errors. On a network file system a write may fail only here: the
    damaged record is found by its checksum when it is read."""
    with contextlib.suppress(OSError):
        os.close(fd)


def forget_cached(fd: int, offset: int = 0, length: int = 0) -> None:
    """Ask the page cache to drop clean pages, so that it does not hold the dram tier twice."""
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of the buffers behind their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
