"""`kvstore fsck DIR`: reads every byte of a disk tier's directory and reports damage.

    report = fsck(Path("/var/lib/kvstore"))
    print(report.text())
    sys.exit(report.status)          # 0 clean, 1 damage found, 2 no disk tier

Without `quarantine` nothing is written, and a node may be running: the segment it appends to counts
as not closed, and apparent damage there is read again before it is reported. `quarantine` needs the
directory's lock: the good records of a damaged segment are appended to a new one, then the damaged
one is moved to `quarantine/`.

A segment that is not closed is no damage: a process or machine stopped before it was, and the
records in it are whole. If the next segment records that this one was closed, it was cut short
later. The newest one has no next: cut short from outside, it looks as a killed node leaves it, and
the report says so. The id in a lost store file is taken from the segments, if they agree. Records
are verified by the code of the background scrub (`tiers.file.contents`). For the parent of a shared
store, `stores_in` lists the directories of its nodes, each a store of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.cli.commands import as_json
from kvstore.errors import ConfigError
from kvstore.tiers.file.catalog import Catalog, Segment
from kvstore.tiers.file.config import SEGMENT_BYTES_MAX
from kvstore.tiers.file.contents import Contents, SegmentFile, opened_segment, walk
from kvstore.tiers.file.directory import (
    Directory,
    InUse,
    parts_of,
    segment_name,
    segment_number,
    segments_identity,
)
from kvstore.tiers.file.disk import Disk, Pages, beginning_of, opened, sizes_in
from kvstore.tiers.file.writer import Writer
from kvstore.units import MIB, format_size
from kvstore.wire.segment import parse_store_page

_PIECE_BYTES = 4 * MIB
_LOOKS_MAX, _LOOK_PAUSE_S = 5, 0.2
"""Most further reads of a segment that a node appends to, and the pause between them: a run of
records takes a moment to be whole.
"""
_QUARANTINE_BYTES_MAX = 1 << 62
"""Limit of the quarantine directory. With `--quarantine` an operator asked for it, so nothing is
deleted for want of room.
"""


@dataclass
class Report:
    """Findings about one directory. `problems` counts by reason; `files` has a line per file with a
    problem.
    """

    directory: Path
    is_store: bool = True
    segments: int = 0
    records: int = 0
    record_bytes: int = 0
    file_bytes: int = 0
    torn: int = 0
    """Segments that are not closed, which is no damage: the next one does not record that they
    were.
    """
    quarantine_files: int = 0
    quarantine_bytes: int = 0
    node_runs: bool = False
    problems: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    moved: int = 0
    """Segments moved to quarantine."""

    @property
    def status(self) -> int:
        """Exit status: 0 clean, 1 damage found, 2 no disk tier."""
        if not self.is_store:
            return 2
        return 1 if self.problems else 0

    def text(self) -> str:
        """The report for a person."""
        if not self.is_store or _NOBODYS in self.problems:
            return "; ".join(self.files)
        found = ", ".join(_counted(count, what) for what, count in sorted(self.problems.items()))
        well = "no damage, except for files moved aside" if self.quarantine_files else "no damage"
        summary = (
            f"{_counted(self.segments, 'segments')}, {_counted(self.records, 'records')}, "
            f"{format_size(self.record_bytes)} of blocks in {format_size(self.file_bytes)}; "
            f"{self.torn} not closed; {found or well}"
        )
        return "\n".join([*self.files, summary, *self._advice()])

    def _advice(self) -> Iterator[str]:
        """Advice for the operator, a sentence each."""
        if self.torn and self.node_runs:
            yield (
                "a segment that is not closed is no damage: a node is running and writes to one,"
                " and one that was killed left the one it wrote to"
            )
        elif self.torn:
            yield (
                "a segment that is not closed is no damage: a node was killed, or its disk failed,"
                " while it wrote there; the records in it are whole"
            )
        if self.torn:
            yield (
                "records that somebody else cut off the end of such a segment would leave no trace"
            )
        if self.moved:
            yield f"{_counted(self.moved, 'segments')} moved to quarantine"
        if set(self.problems) == {_NO_IDENTITY}:
            yield (
                "the next start of the node repairs that, as does kvstore fsck"
                f" {self.directory} --quarantine"
            )
        elif self.problems and not self.moved:
            stop = "stop the node, then " if self.node_runs else ""
            yield (
                f"to keep what is good and move the rest aside: {stop}"
                f"kvstore fsck {self.directory} --quarantine"
            )
        if self.quarantine_files:
            yield (
                f"{_counted(self.quarantine_files, 'files')} put aside in"
                f" {self.directory / 'quarantine'}, {format_size(self.quarantine_bytes)}, count"
                " against --file: delete them once looked at"
            )

    def blame(self, name: str, reason: str, count: int = 1) -> None:
        """Count a problem of one file."""
        self.problems[reason] += count
        self.files.append(f"{name}: {_counted(count, reason)}")


_NO_IDENTITY = "damaged store files"
_NOBODYS = "directories whose segments belong to no store"
_DAMAGED = "damaged records"
_CUT_SHORT = "truncated closed segments"
_GAPS = "invalid pages between records"
_ONE = {
    "segments": "segment",
    "records": "record",
    "files": "file",
    _NO_IDENTITY: "damaged store file",
    _DAMAGED: "damaged record",
    _CUT_SHORT: "truncated closed segment",
    _GAPS: "invalid page between records",
}


def _counted(count: int, what: str) -> str:
    """Number and noun; `what` is the noun for several."""
    return f"{count} {_ONE.get(what, what) if count == 1 else what}"


def stores_in(directory: Path) -> list[Path]:
    """The directories of the nodes that share a directory; else the directory itself."""
    return parts_of(directory) or [directory]


def reports_as_json(reports: Sequence[Report]) -> str:
    """One object: a list with a row for each directory."""
    rows = [
        {**vars(report), "directory": str(report.directory), "status": report.status}
        for report in reports
    ]
    for row in rows:
        del row["is_store"]  # the status says it
    return as_json(directories=rows)


@dataclass
class _Checked:
    """One segment that can be read. `bad` are rows of the table."""

    segment: Segment
    found: Contents
    bad: list[int]
    cut_short: bool = False
    """The segment was closed, and has no footer any more."""

    @property
    def is_damaged(self) -> bool:
        return bool(self.bad or self.found.skipped_pages or self.cut_short)


def fsck(directory: Path, *, quarantine: bool = False, disk: Disk | None = None) -> Report:
    """Check a directory.

    Args:
        directory: of one node.
        quarantine: move damaged segments aside, after saving their good records.
        disk: the system calls; tests give their own.

    Raises:
        ConfigError: `quarantine`, but a node holds the lock or the directory cannot be written.
    """
    disk = disk or Disk()
    report = Report(directory)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        report.is_store = False
        report.files.append(f"{directory} cannot be read: {error.strerror}")
        return report
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        page = beginning_of(disk, "store", fd)
        store_id = parse_store_page(page) or _lost_store_id(report, disk, fd)
        if store_id is None:
            return report
        locked = None
        if quarantine:
            locked = stack.enter_context(contextlib.closing(_lock(directory, disk)))
        report.node_runs = locked is None and _is_in_use(disk, fd)
        _check_all(report, disk, fd, store_id, locked)
    sizes = sizes_in(directory / "quarantine")
    report.quarantine_files, report.quarantine_bytes = len(sizes), sum(sizes)
    return report


def _lock(directory: Path, disk: Disk) -> Directory:
    try:
        return Directory(directory, disk, direct=False)
    except InUse:
        raise ConfigError(
            f"{directory} is in use by a node: stop it before --quarantine, or look without it"
        ) from None


def _is_in_use(disk: Disk, dir_fd: int) -> bool:
    """Whether a node holds the lock of a directory."""
    with contextlib.suppress(OSError), opened(disk, "lock", os.O_RDONLY, dir_fd) as (fd, _):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held; or, as on NFS, not to be tried by a reader
            return True
    return False


def _lost_store_id(report: Report, disk: Disk, dir_fd: int) -> bytes | None:
    """The id of a store whose store file lacks it, from its segments; None: not known. Adds the
    findings to the report."""
    count = sum(segment_number(name) is not None for name in os.listdir(dir_fd))
    directory = report.directory
    how = "missing"
    with contextlib.suppress(FileNotFoundError):
        size_bytes = os.stat("store", dir_fd=dir_fd, follow_symlinks=False).st_size
        how = "damaged" if size_bytes else "empty"
    found = segments_identity(disk, dir_fd)
    its = _counted(count, "segments")
    if found is not None:
        report.problems[_NO_IDENTITY] += 1
        say = "says whose it is" if count == 1 else "say whose they are"
        report.files.append(f"store: {how}; its {its} {say}")
    elif count:
        report.problems[_NOBODYS] += 1
        report.files.append(
            f"{directory}: the store file is {how}; {its} are there, and they do not say whose they"
            " are: a node does not use them; give --file another directory, or empty this one"
        )
    else:
        report.is_store = False
        report.files.append(f"{directory} is no disk tier: give the directory of a node's --file")
    return found


def _check_all(
    report: Report, disk: Disk, dir_fd: int, store_id: bytes, locked: Directory | None
) -> None:
    numbers = sorted(filter(None, map(segment_number, os.listdir(dir_fd))))
    found: list[_Checked] = []
    for number in numbers:
        name = segment_name(number)
        try:
            with opened_segment(disk, name, os.O_RDONLY, dir_fd) as (file, _):
                checked = _check(report, dir_fd, file, number, store_id)
        except FileNotFoundError:
            continue  # a running node reclaimed it
        except OSError as error:
            report.blame(name, f"unreadable ({error.strerror})")
            continue
        if checked is not None:
            found.append(checked)
        elif locked is not None:
            locked.put_aside(name, "fsck", keep_bytes=_QUARANTINE_BYTES_MAX)
            report.moved += 1
    _blame_what_was_closed(report, found)
    if locked is not None and any(checked.is_damaged for checked in found):
        _move_aside(report, disk, locked, found, numbers)


def _blame_what_was_closed(report: Report, found: list[_Checked]) -> None:
    """Count segments without a footer: one that the next one records as closed was cut short, which
    is damage; others were never closed.
    """
    heads = [checked.segment.head for checked in found]
    once_closed = {head.number - 1 for head in heads if head.follows_closed}
    for checked in found:
        segment, is_closed = checked.segment, checked.found.is_closed
        checked.cut_short = not is_closed and segment.number in once_closed
        report.torn += not is_closed and not checked.cut_short
        if checked.cut_short:
            report.blame(segment.name, _CUT_SHORT)


def _check(
    report: Report, dir_fd: int, file: SegmentFile | None, number: int, store_id: bytes
) -> _Checked | None:
    """Check one file. None: it is not a segment of this store."""
    name = segment_name(number)
    if file is None or file.head.store_id != store_id or file.head.number != number:
        report.blame(name, "damaged header" if file is None else "foreign segment")
        return None
    report.segments += 1
    report.file_bytes += file.size_bytes
    found, bad = _read(file)
    for _ in range(_LOOKS_MAX if report.node_runs and not found.is_closed else 0):
        if not (bad or found.skipped_pages):
            break
        threading.Event().wait(_LOOK_PAUSE_S)
        found, bad = _read(file)
    table = found.table
    report.records += len(table.rows) - len(bad)
    lengths = np.array([scope.block_bytes for scope in table.scopes], np.int64)
    report.record_bytes += int(lengths[np.delete(table.rows["scope"], bad)].sum())
    if bad:
        report.blame(name, _DAMAGED, len(bad))
    if found.skipped_pages:
        report.blame(name, _GAPS, found.skipped_pages)
    return _Checked(Segment(number, file.head, name, dir_fd, file.size_bytes), found, bad)


def _read(file: SegmentFile) -> tuple[Contents, list[int]]:
    """(contents of a segment, rows of its table whose records are bad).

    Raises:
        OSError: the medium failed otherwise than at a bad sector.
    """
    found, bad = file.contents(), []
    for row, (*_, good, error) in enumerate(walk(file, found.table, Pages(_PIECE_BYTES).view)):
        if error is not None and error.errno != errno.EIO:
            raise error
        bad += [] if good else [row]
    return found, bad


def _move_aside(
    report: Report, disk: Disk, locked: Directory, found: list[_Checked], numbers: list[int]
) -> None:
    """Save the good records of damaged segments at the end of the log, then move the segments.

    Records that a void covers are not saved: at the end of the log they would be newer than the
    void. The voids are repeated there too, since theirs may be among the segments that go.
    """
    catalog = Catalog(disk, capacity_bytes=_QUARANTINE_BYTES_MAX, direct=False)
    catalog.expect(dict.fromkeys(numbers, 0))
    number = max(numbers) + 1
    writer = Writer(locked, catalog, disk, segment_bytes=SEGMENT_BYTES_MAX, number=number)
    voids = [void for checked in found for void in checked.found.table.voids]
    writer.carry(voids)
    with contextlib.closing(catalog):
        for segment in [checked.segment for checked in found if checked.is_damaged]:
            catalog.add(segment)
            parts = writer.ask(segment, voids).parts
            _, error = writer.move(parts, b"".join(part.locations for part in parts))
            error = error or writer.close_segment().error
            if error is not None:
                raise ConfigError(
                    f"{locked.path}: {error.strerror} while saving records of {segment.name}: "
                    "make room, then run fsck again; that segment stays"
                )
            locked.put_aside(segment.name, "fsck", keep_bytes=_QUARANTINE_BYTES_MAX)
            report.moved += 1
