"""One directory of segments: its identity, its lock, the names in it, and what is moved aside.

    store              identity, one page    lock         held by the one process that may write
    learned            the node's own note: what it wants to know at its next start
    seg-0000002a.kv    segment 0x2a          dead-….kv    deleted, but readable for a while
    quarantine/        what is not what it should be, kept for a person to look at, bounded

Names are relative to an open descriptor of the directory, and nothing outside is ever touched.
Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.tiers.file.config import FileConfig
from kvstore.tiers.file.contents import opened_segment
from kvstore.tiers.file.disk import (
    FULL,
    Disk,
    beginning_of,
    open_regular,
    opened,
    read_bytes,
    sizes_in,
    works_direct,
    write_all,
)
from kvstore.types import PAGE_BYTES
from kvstore.wire.segment import (
    ID_BYTES,
    SEGMENT_BYTES_LIMIT,
    parse_store_page,
    store_page,
)

_SEGMENT: Final = re.compile(r"seg-([0-9a-f]{8})\.kv")
_STORE, _STORE_NEW, _LOCK, _PROBE, _ASIDE = "store", "store.new", "lock", "probe", "quarantine"
_NOTE, _NOTE_NEW = "learned", "learned.new"
_OURS: Final = {_STORE, _STORE_NEW, _LOCK, _PROBE, _ASIDE, _NOTE, _NOTE_NEW, "lost+found"}
_GIVE_ANOTHER: Final = "give --file a directory that this user may write to"
NOTE_BYTES_MAX: Final = 16 * PAGE_BYTES
NUMBER_MAX: Final = (1 << 31) - 1
_NO_FILE: Final = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV)
"""Errors of opening a link, directory, FIFO, device or socket."""

_log = logging.getLogger(__name__)


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"seg-{number:08x}.kv"


def segment_number(name: str) -> int | None:
    """Number in a file name, None for other names."""
    match = _SEGMENT.fullmatch(name)
    number = int(match[1], 16) if match else 0
    return number if 0 < number <= NUMBER_MAX else None


class InUse(ConfigError):
    """Another process holds the lock."""


def segments_identity(disk: Disk, dir_fd: int) -> bytes | None:
    """The store that all segments in a directory say they are of; None: there are none that can be
    read, or they disagree."""
    found: set[bytes] = set()
    for name in filter(segment_number, os.listdir(dir_fd)):
        with (
            contextlib.suppress(OSError),
            opened_segment(disk, name, os.O_RDONLY, dir_fd) as (file, _),
        ):
            found.update([file.head.store_id] if file is not None else ())
    return found.pop() if len(found) == 1 else None


def parts_of(directory: Path) -> list[Path]:
    """The stores of single nodes in a shared directory, if it is one."""
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if (path / _STORE).is_file())
    return []


def refuse_strangers(disk: Disk, dir_fd: int, path: Path) -> None:
    """Refuse a directory with files that are not kvstore's.

    Raises:
        ConfigError: it has some, and is no store.
    """
    names = set(os.listdir(dir_fd))
    if not names - _OURS or _STORE in names or _STORE_NEW in names:
        return
    # Segments that agree whose they are make it ours: then the page is written anew.
    others = {name for name in names - _OURS if segment_number(name) is None}
    if any(not n.startswith("dead-") for n in others) or not segments_identity(disk, dir_fd):
        raise ConfigError(
            f"{path} holds other files and is no store of kvstore: give --file an empty directory"
        )


def refuse_other_mode(directory: Path, *, shared: bool) -> None:
    """Refuse a directory of the other mode: it belongs to one node or is shared, never both. One
    that contains a store may be shared, or only the parent of what --file should have named.

    Raises:
        ConfigError: it was made for the other.
    """
    if shared and (directory / _STORE).is_file():
        raise ConfigError(
            f"{directory} is the store of a single node: leave ',shared' out of --file, "
            "or give it another directory"
        )
    if not shared and (parts := parts_of(directory)):
        raise ConfigError(
            f"{directory} contains the store {parts[0].name}: give --file an empty directory,"
            " or add ',shared' if several nodes share this one"
        )


def cannot_be_read(path: Path, error: OSError) -> ConfigError:
    """Error for an operator whose disk fails at a start."""
    mend = "see the kernel's log: repair the disk, or give --file another directory"
    if isinstance(error, PermissionError):
        mend = _GIVE_ANOTHER
    return ConfigError(f"the disk tier cannot read {path}: {error.strerror}; {mend}")


def open_directory(config: FileConfig, disk: Disk, lock_fd: int) -> Directory:
    """Open the node's own directory, and make it if need be.

    Args:
        config, disk: where and how.
        lock_fd: as `Directory` has it.

    Raises:
        ConfigError: it cannot be used; the text says why and what to do.
    """
    try:
        refuse_other_mode(config.directory, shared=config.shared)
    except OSError as error:
        raise cannot_be_read(config.directory, error) from error
    try:
        if config.shared:
            with contextlib.suppress(OSError):  # the node's own cannot be made either, and says why
                config.directory.mkdir(mode=0o700, exist_ok=True)
        return Directory(config.home, disk, direct=config.direct, lock_fd=lock_fd)
    except InUse:
        if not config.shared:
            raise
        raise InUse(
            f"{config.home} is in use by another node of that name: give each node that shares"
            f" {config.directory} a --node-name of its own"
        ) from None


class Directory:
    """A directory that this process holds the lock of."""

    def __init__(self, path: Path, disk: Disk, *, direct: bool, lock_fd: int = -1) -> None:
        """Make or take over the directory.

        Args:
            path, disk, direct: where and how.
            lock_fd: the lock, if an earlier process of this node left it; a copy of it is kept.

        Raises:
            ConfigError: it cannot be used; the text says why and what to do.
        """
        self.path = path
        self._disk = disk
        self.lock_fd = os.dup(lock_fd) if lock_fd >= 0 else -1
        self._fds = [self.lock_fd] if lock_fd >= 0 else []
        try:
            self._take(direct=direct)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the disk tier cannot use {path}: {error.strerror}; {_GIVE_ANOTHER}"
            ) from error
        except ConfigError:
            self.close()
            raise

    def _take(self, *, direct: bool) -> None:
        # Not its parents: of a disk that is not mounted they would be made on another one.
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fds.append(self.fd)
        refuse_strangers(self._disk, self.fd, self.path)
        if not self._is_lock(self.lock_fd):
            self.lock_fd, _ = open_regular(self._disk, _LOCK, os.O_RDWR | os.O_CREAT, self.fd)
            self._fds.append(self.lock_fd)
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"{self.path} is in use by another node: give each node a --file of its own"
            ) from None
        self.direct = works_direct(self._disk, _PROBE, self.fd) and direct
        self.store_id = self._identity()
        self._make_aside()
        for name in os.listdir(self.fd):
            with contextlib.suppress(OSError):  # what cannot be looked at goes another time
                info = self._stat(name) if name.startswith("dead-") else None
                if info is not None and stat.S_ISREG(info.st_mode):
                    self.remove(name)

    @property
    def is_whole(self) -> bool:
        """False: the directory, or what is in it, was removed."""
        return self._is_lock(self.lock_fd)

    def make_again(self) -> None:
        """Take the place of a directory that is not whole, with its lock and identity.

        Raises:
            OSError: that fails, or would be on another file system: the disk is not mounted. Its
                text says so, and it has no errno.
        """
        try:
            place = self.path if self.path.exists() else self.path.parent
            if place.stat().st_dev != os.fstat(self.fd).st_dev:
                raise ConfigError(f"{place} is on another file system now: mount the disk")
            made = Directory(self.path, self._disk, direct=self.direct)
        except (OSError, ConfigError) as error:
            raise OSError(f"it was removed and cannot be made again: {error}") from error
        self._fds += made._fds
        self.fd, self.lock_fd, self.store_id = made.fd, made.lock_fd, made.store_id
        _log.warning("%s was removed, with its blocks, and is made again", self.path)

    def _make_aside(self) -> None:
        """Make the quarantine. A full disk can do without until the next start: files that should
        go there stay where they are."""
        if (info := self._stat(_ASIDE)) is not None and stat.S_ISDIR(info.st_mode):
            return
        if info is not None:
            os.unlink(_ASIDE, dir_fd=self.fd)
        try:
            os.mkdir(_ASIDE, 0o700, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in FULL:
                raise

    def _is_lock(self, fd: int) -> bool:
        """Whether `fd` is the lock file that lies here now."""
        there = self._stat(_LOCK) if fd >= 0 else None
        return there is not None and os.path.samestat(os.fstat(fd), there)

    def _identity(self) -> bytes:
        """The store id that is there, or a new one."""
        try:
            fd, _ = open_regular(self._disk, _STORE, os.O_RDONLY, self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_NO_FILE):
                raise  # it may be as good as ever the next time
            is_there = error.errno != errno.ENOENT
            return self._new_identity("no regular file" if is_there else "", keep_bytes=0)
        try:
            page = read_bytes(self._disk, fd, PAGE_BYTES, 0)
        finally:
            os.close(fd)
        if (store_id := parse_store_page(page)) is not None:
            return store_id
        if page[:4] == b"KVSD" and page[4:6] != store_page(bytes(ID_BYTES))[4:6]:
            raise ConfigError(
                f"{self.path} was made by another version of kvstore: "
                "give --file an empty directory, or empty this one"
            )
        return self._new_identity("damaged", keep_bytes=PAGE_BYTES)

    def _new_identity(self, reason: str, *, keep_bytes: int) -> bytes:
        """Write a store id, and return it: that of the segments, if they agree, or a new one. With
        a `reason` the old page is put aside, but only once the new one is durable: without any,
        this directory would look like a stranger's for ever."""
        found = segments_identity(self._disk, self.fd)
        if found is not None:
            _log.warning(
                "%s is %s, and is rewritten: the segments beside it identify the store",
                self.path / _STORE,
                reason or "missing",
            )
        store_id = found or secrets.token_bytes(ID_BYTES)
        self._write(_STORE_NEW, store_page(store_id))
        if reason:
            self.put_aside(_STORE, reason, keep_bytes=keep_bytes)
        os.rename(_STORE_NEW, _STORE, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self._disk.fsync(self.fd)
        return store_id

    def _write(self, name: str, pages: bytes) -> None:
        """Write a small file anew, synced. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with opened(self._disk, name, flags, self.fd) as (fd, _):
            write_all(self._disk, fd, [memoryview(pages)], 0)
            self._disk.fsync(fd)

    def note(self) -> bytes:
        """The last note of `keep_note`; empty if there is none or it cannot be read."""
        return beginning_of(self._disk, _NOTE, self.fd, bytes_max=NOTE_BYTES_MAX)

    def keep_note(self, note: bytes) -> None:
        """Keep these bytes, whole pages, until the next ones: all of them or the old ones."""
        assert len(note) <= NOTE_BYTES_MAX
        try:
            self._write(_NOTE_NEW, note)
            os.rename(_NOTE_NEW, _NOTE, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            _log.info("updating %s failed: %s", self.path / _NOTE, error.strerror)

    def segments(self, *, keep_bytes: int) -> dict[int, int]:
        """Number → bytes of the regular files with a segment's name; the others are put aside.

        One that cannot be looked at now counts as empty: who opens it learns what it is.

        Raises:
            OSError: the names cannot be read.
        """
        found = {}
        for name in os.listdir(self.fd):
            if (number := segment_number(name)) is None:
                continue
            try:
                if (info := self._stat(name)) is None:
                    continue
            except OSError:
                found[number] = 0
                continue
            if not stat.S_ISREG(info.st_mode):
                self.put_aside(name, "no regular file", keep_bytes=keep_bytes)
            elif info.st_size > SEGMENT_BYTES_LIMIT:
                self.put_aside(name, "too long", keep_bytes=keep_bytes)
            else:
                found[number] = info.st_size
        return found

    def is_readable(self) -> bool:
        """Whether the page that says whose this store is can be read from the disk now."""
        page = beginning_of(self._disk, _STORE, self.fd, direct=self.direct)
        return len(page) == PAGE_BYTES

    def put_aside(self, name: str, reason: str, *, keep_bytes: int) -> None:
        """Move a file that is not what it should be to quarantine, or delete it if that is full.

        Args:
            name: of an entry of this directory; one that vanished is no error.
            reason: for the log, and part of the new name.
            keep_bytes: how much quarantine may hold.
        """
        _log.warning("%s is moved aside: %s", self.path / name, reason)
        try:
            info = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            taken = info.st_blocks * 512 if stat.S_ISREG(info.st_mode) else 0
            if taken and self.aside_bytes() + taken > keep_bytes:
                os.unlink(name, dir_fd=self.fd)
            else:
                target = f"{_ASIDE}/{name}.{reason.replace(' ', '-')}.{secrets.token_hex(4)}"
                os.rename(name, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            _log.warning("%s stays where it is: %s", self.path / name, error.strerror)

    def aside_bytes(self) -> int:
        """Bytes on the disk in quarantine."""
        return sum(sizes_in(self.path / _ASIDE))

    def remove(self, name: str) -> None:
        """Delete a file; one that vanished is no error."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s cannot be deleted: %s", self.path / name, error.strerror)

    def hide(self, name: str) -> str:
        """Rename out of sight; who has it open can go on reading. Returns the new name."""
        hidden = f"dead-{secrets.token_hex(8)}.kv"
        try:
            os.rename(name, hidden, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            _log.warning("%s cannot be renamed: %s", self.path / name, error.strerror)
        return hidden

    def close(self) -> None:
        """Give the lock back. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def _stat(self, name: str) -> os.stat_result | None:
        """Look at an entry, itself if it is a link; None: there is none. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return None
