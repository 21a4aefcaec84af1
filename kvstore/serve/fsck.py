"""`kvstore fsck DIR`: reads every byte of a file tier's directory and says what is wrong with it.

    report = fsck(Path("/var/lib/kvstore"))
    print(report.text())
    sys.exit(report.status)          # 0 clean, 1 damage found, 2 not a store

Without `quarantine` nothing is written, and a node may be running: what it appends meanwhile counts
as torn, and what looks wrong where it appends is looked at again before it is called so. With it
the directory's lock is needed: the good records of a damaged segment are appended to a new one,
then the damaged one is moved to `quarantine/`.

A torn end is no damage: a process or machine stopped while it was writing, and the records before
it are whole. Records are verified by the code of the background scrub (`tiers.file.verify`).
Of a shared parent, `stores_in` names the directories of its nodes, each a store of its own.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.file.catalog import Catalog
from kvstore.tiers.file.config import SEGMENT_BYTES_MAX
from kvstore.tiers.file.directory import (
    Directory,
    InUse,
    parts_of,
    segment_name,
    segment_number,
)
from kvstore.tiers.file.disk import Disk, Pages, PosixDisk, open_regular, read_bytes
from kvstore.tiers.file.recovery import read_footer, read_head, scan
from kvstore.tiers.file.verify import Record, is_intact, records
from kvstore.tiers.file.writer import Batch, Payloads, Writer
from kvstore.types import PAGE_BYTES
from kvstore.units import MIB, format_size
from kvstore.wire.record import Void
from kvstore.wire.segment import SegmentHead, Table, parse_store_page

_PIECE_BYTES = 4 * MIB
_LOOKS_MAX, _LOOK_PAUSE_S = 5, 0.2
"""At a segment that a node appends to: a run of records takes a moment to be whole."""
_QUARANTINE_BYTES_MAX = 1 << 62
"""Here a person asked for it: nothing is deleted for want of room."""


@dataclass
class Report:
    """What was found. `problems` counts by reason; `lines` has one per file with a problem."""

    directory: Path
    is_store: bool = True
    segments: int = 0
    records: int = 0
    record_bytes: int = 0
    file_bytes: int = 0
    torn: int = 0
    aside_bytes: int = 0
    node_runs: bool = False
    problems: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    moved: int = 0
    """Segments moved to quarantine."""

    @property
    def status(self) -> int:
        """Exit status: 0 clean, 1 damage found, 2 not a store."""
        if not self.is_store:
            return 2
        return 1 if self.problems else 0

    def text(self) -> str:
        """The report for a person."""
        if not self.is_store:
            return "; ".join(self.lines) or f"{self.directory} is not a store of kvstore"
        found = ", ".join(f"{count} {reason}" for reason, count in sorted(self.problems.items()))
        summary = (
            f"{self.segments} segments, {self.records} records, "
            f"{format_size(self.record_bytes)} of blocks in {format_size(self.file_bytes)}; "
            f"{self.torn} with a torn end; {found or 'no damage'}"
        )
        return "\n".join([*self.lines, summary, *self._advice()])

    def _advice(self) -> list[str]:
        """What an operator should know of that, a sentence each."""
        said = []
        if self.torn and self.node_runs:
            said.append("a torn end is no damage: a node is running and still writes there")
        elif self.torn:
            said.append("a torn end is no damage: a node ended while it was writing")
        if self.moved:
            said.append(f"{self.moved} segments moved to quarantine")
        elif self.problems:
            stop = "stop the node, then " if self.node_runs else ""
            said.append(
                f"to keep what is good and move the rest aside: {stop}"
                f"kvstore fsck {self.directory} --quarantine"
            )
        if self.aside_bytes:
            said.append(
                f"{format_size(self.aside_bytes)} in {self.directory / 'quarantine'} count against "
                "--file: delete them once looked at"
            )
        return said

    def blame(self, name: str, reason: str, count: int = 1) -> None:
        """One file has something wrong."""
        self.problems[reason] += count
        self.lines.append(f"{name}: {count} {reason}" if count > 1 else f"{name}: {reason}")


def stores_in(directory: Path) -> list[Path]:
    """The directory itself, or if several nodes share it, that of each."""
    return parts_of(directory) or [directory]


def reports_as_json(reports: Sequence[Report]) -> str:
    """One object: a list with a row for each directory."""
    rows = [
        {
            "directory": str(report.directory),
            "status": report.status,
            "segments": report.segments,
            "records": report.records,
            "record_bytes": report.record_bytes,
            "file_bytes": report.file_bytes,
            "torn": report.torn,
            "problems": dict(report.problems),
            "files": report.lines,
            "moved": report.moved,
            "quarantine_bytes": report.aside_bytes,
            "node_runs": report.node_runs,
        }
        for report in reports
    ]
    return msgspec.json.format(msgspec.json.encode({"directories": rows})).decode()


@dataclass
class _Checked:
    """One segment that can be read. `bad` are rows of the table."""

    number: int
    size: int
    head: SegmentHead
    table: Table
    bad: list[int]
    skipped_pages: int


def fsck(directory: Path, *, quarantine: bool = False, disk: Disk | None = None) -> Report:
    """Check a directory.

    Args:
        directory: of one node.
        quarantine: move damaged segments aside, after saving their good records.
        disk: the system calls; tests give their own.

    Raises:
        ConfigError: `quarantine`, but a node holds the lock or the directory cannot be written.
    """
    posix = disk or PosixDisk()
    report = Report(directory)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        report.is_store = False
        report.lines.append(f"{directory} cannot be read: {error.strerror}")
        return report
    try:
        store_id = _store_id(posix, fd)
        if store_id is None:
            report.is_store = False
            if parts := parts_of(directory):
                names = ", ".join(str(part) for part in parts)
                report.lines.append(f"{directory} is shared by several nodes: name one of {names}")
            return report
        locked = _lock(directory, posix) if quarantine else None
        report.node_runs = locked is None and _is_in_use(fd)
        try:
            _check_all(report, posix, fd, store_id, locked)
        finally:
            if locked is not None:
                locked.close()
    finally:
        os.close(fd)
    report.aside_bytes = _aside_bytes(directory)
    return report


def _lock(directory: Path, disk: Disk) -> Directory:
    try:
        return Directory(directory, disk, direct=False)
    except InUse:
        raise ConfigError(
            f"{directory} is in use by a node: stop it before --quarantine, or look without it"
        ) from None


def _is_in_use(dir_fd: int) -> bool:
    """Whether a node holds the lock."""
    try:
        fd = os.open("lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _aside_bytes(directory: Path) -> int:
    try:
        return sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory / "quarantine"))
    except OSError:
        return 0


def _store_id(disk: Disk, dir_fd: int) -> bytes | None:
    try:
        fd, _ = open_regular(disk, "store", os.O_RDONLY, dir_fd)
    except OSError:
        return None
    try:
        return parse_store_page(read_bytes(disk, fd, PAGE_BYTES, 0))
    except OSError:
        return None
    finally:
        os.close(fd)


def _check_all(
    report: Report, disk: Disk, dir_fd: int, store_id: bytes, locked: Directory | None
) -> None:
    numbers = sorted(filter(None, map(segment_number, os.listdir(dir_fd))))
    damaged: list[_Checked] = []
    voids: list[Void] = []
    for number in numbers:
        name = segment_name(number)
        try:
            fd, size = open_regular(disk, name, os.O_RDONLY, dir_fd)
        except FileNotFoundError:
            continue  # a running node reclaimed it
        except OSError as error:
            report.blame(name, f"unreadable ({error.strerror})")
            continue
        try:
            checked = _check(report, disk, fd, size, number, store_id)
        except OSError as error:
            report.blame(name, f"unreadable ({error.strerror})")
            continue
        finally:
            os.close(fd)
        voids += checked.table.voids if checked is not None else ()
        if checked is not None and (checked.bad or checked.skipped_pages):
            damaged.append(checked)
        elif checked is None and locked is not None:
            locked.put_aside(name, "fsck", keep_bytes=_QUARANTINE_BYTES_MAX)
            report.moved += 1
    if locked is not None and damaged:
        _move_aside(report, disk, locked, damaged, voids, numbers)


def _check(
    report: Report, disk: Disk, fd: int, size: int, number: int, store_id: bytes
) -> _Checked | None:
    """Check one file. None: it is not a segment of this store."""
    name = segment_name(number)
    head = read_head(disk, fd)
    if head is None or head.store_id != store_id or head.number != number:
        report.blame(name, "damaged header" if head is None else "foreign segment")
        return None
    report.segments += 1
    report.file_bytes += size
    table, skipped = read_footer(disk, fd, size, head), 0
    if table is not None:
        bad = _bad_rows(disk, fd, head, table)
    else:
        report.torn += 1
        table, skipped, bad = _check_open(disk, fd, size, head)
        for _ in range(_LOOKS_MAX if report.node_runs else 0):
            if not (bad or skipped):
                break
            threading.Event().wait(_LOOK_PAUSE_S)
            table, skipped, bad = _check_open(disk, fd, size, head)
    report.records += len(table.pages) - len(bad)
    lengths = np.array([scope.block_bytes for scope in table.scopes], np.int64)
    if len(table.pages):
        good = np.delete(table.scope_of, bad)
        report.record_bytes += int(lengths[good].sum())
    if bad:
        report.blame(name, "damaged records", len(bad))
    if skipped:
        report.blame(name, "pages between records that are none", skipped)
    return _Checked(number, size, head, table, bad, skipped)


def _check_open(disk: Disk, fd: int, size: int, head: SegmentHead) -> tuple[Table, int, list[int]]:
    """A segment without a footer: what it holds, pages that are no record, bad rows."""
    found = scan(disk, fd, size, head)
    table = found.table()
    return table, found.skipped_pages, _bad_rows(disk, fd, head, table)


def _bad_rows(disk: Disk, fd: int, head: SegmentHead, table: Table) -> list[int]:
    buffer = Pages(_PIECE_BYTES)
    return [
        row
        for row, record in enumerate(records(table))
        if not _is_readable(disk, fd, head, record, buffer)
    ]


def _is_readable(disk: Disk, fd: int, head: SegmentHead, record: Record, buffer: Pages) -> bool:
    """One bad sector is one bad record."""
    try:
        return is_intact(disk, fd, head, record, buffer)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def _move_aside(
    report: Report,
    disk: Disk,
    locked: Directory,
    damaged: list[_Checked],
    voids: list[Void],
    numbers: list[int],
) -> None:
    """Save what is good of damaged segments at the end of the log, then put them aside.

    What a void covers is not saved: at the end of the log it would be newer than the void. The
    voids are repeated there too, since theirs may be among the segments that go.
    """
    catalog = Catalog(disk, capacity_bytes=_QUARANTINE_BYTES_MAX, direct=False)
    catalog.expect(dict.fromkeys(numbers, 0))
    number = max(numbers) + 1
    writer = Writer(locked, catalog, disk, segment_bytes=SEGMENT_BYTES_MAX, number=number)
    writer.carry(voids)
    for checked in damaged:
        name = segment_name(checked.number)
        fd, _ = open_regular(disk, name, os.O_RDONLY, locked.fd)
        try:
            error = _save(disk, fd, checked, writer, voids)
        finally:
            os.close(fd)
        error = error or writer.close_segment().error
        if error is not None:
            raise ConfigError(
                f"{locked.path}: {error.strerror} while saving records of {name}: "
                "make room, then run fsck again; that segment stays"
            )
        locked.put_aside(name, "fsck", keep_bytes=_QUARANTINE_BYTES_MAX)
        report.moved += 1


def _save(
    disk: Disk, fd: int, checked: _Checked, writer: Writer, voids: list[Void]
) -> OSError | None:
    """Append the good records of a segment; the failure, if there was one."""
    table, bad = checked.table, set(checked.bad)
    alive = table.living(checked.number, voids)
    for row, record in enumerate(records(table)):
        if row in bad or not alive[row]:
            continue
        whole = Pages(record.size_bytes)
        if not _is_readable(disk, fd, checked.head, record, whole):
            continue
        payloads = Payloads(whole.view, np.ones(1, np.uint32))
        batch = Batch(record.scope, record.key, record.checksum, payloads)
        outcome = writer.append(batch)
        if outcome.error is not None:
            return outcome.error
    return None
