"""The system calls used with care: parts of pages, probing O_DIRECT, records behind broken ones;
and whether a record is what was stored there, page and payload, in pieces of any size."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.tiers.file.contents import (
    SegmentFile,
    is_intact,
)
from kvstore.tiers.file.disk import Disk, Pages, open_regular, works_direct, write_all
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import BlockPage, record_pages, write_block_page
from kvstore.wire.segment import parse_segment_page, place_of
from tests.unit.tiers.file.kit import BLOCK_BYTES, Driver, FaultyDisk, failing, key

RECORD_PAGES = 17
"""Of the kit's blocks, with the page in front."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("call", "error", "works"),
    [
        ("pwritev", failing(errno.EINVAL), False),
        ("pwritev", failing(errno.EOPNOTSUPP), False),
        ("open", failing(errno.EINVAL, first=2), False),
        ("pwritev", failing(errno.ENOSPC), True),
        ("open", failing(errno.ENOSPC, first=2), False),
    ],
    ids=["no write", "not supported", "no open", "full while writing", "full while opening"],
)
def test_going_round_the_page_cache_is_probed(
    folder: int, tmp_path: Path, call: str, error: Callable[[int], OSError | None], *, works: bool
) -> None:
    disk = FaultyDisk()
    disk.fail[call] = error
    assert works_direct(disk, "probe", folder) is works
    assert list(tmp_path.iterdir()) == []


def test_a_medium_that_fails_the_probe_cannot_be_used(folder: int, tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.fail["pwritev"] = failing(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        works_direct(disk, "probe", folder)
    assert list(tmp_path.iterdir()) == []


class ShortDisk(Disk):
    """Writes no more than so many bytes at a time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(fd, b"".join(buffers)[: self.length], offset)


@pytest.mark.parametrize("length", [0, 100, PAGE_BYTES + 1])
def test_a_part_of_a_page_is_no_room(tmp_path: Path, length: int) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="a part of a page"):
        write_all(ShortDisk(length), file.fileno(), [memoryview(bytes(3 * PAGE_BYTES))], 0)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_whole_pages_are_gone_on_from(tmp_path: Path, pages: int) -> None:
    buffers = [memoryview(os.urandom(PAGE_BYTES)) for _ in range(5)]
    with (tmp_path / "file").open("wb") as file:
        write_all(ShortDisk(pages * PAGE_BYTES), file.fileno(), buffers, 0)
    assert (tmp_path / "file").read_bytes() == b"".join(buffers)


def test_records_behind_a_broken_one_are_found_only_when_looked_for(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "store").recovered()
    driver.write([0, 1, 2])
    path = next((tmp_path / "store").glob("seg-*.kv"))
    data = bytearray(path.read_bytes())
    driver.close()

    def found(broken: int, *, search: bool) -> tuple[list[bytes], int]:
        image = bytearray(data)
        image[(1 + broken * RECORD_PAGES) * PAGE_BYTES] ^= 1
        path.write_bytes(image)
        with path.open("rb") as file:
            head = parse_segment_page(bytes(image[:PAGE_BYTES]))
            assert head is not None
            opened = SegmentFile(Disk(), file.fileno(), head, len(image))
            contents = opened.scan(search=search)
        return [row.tobytes() for row in contents.table.rows["key"]], contents.skipped_pages

    assert found(1, search=True) == ([key(0), key(2)], RECORD_PAGES)
    assert found(1, search=False) == ([key(0)], 0)
    assert found(2, search=True) == ([key(0), key(1)], 0), "nothing lies behind: a torn end"


# ── whether a record is what was stored ──────────────────────────────────────────────────────────


DISK = Disk()


class Stored:
    """A closed segment with two blocks in it."""

    def __init__(self, directory: Path) -> None:
        driver = Driver(directory).recovered()
        driver.write([1, 2])
        driver.close()
        (self.path,) = directory.glob("seg-*.kv")
        dir_fd = os.open(directory, os.O_RDONLY)
        self.fd, size = open_regular(DISK, self.path.name, os.O_RDWR, dir_fd)
        os.close(dir_fd)
        head = parse_segment_page(os.pread(self.fd, PAGE_BYTES, 0))
        assert head is not None
        self.file = SegmentFile(DISK, self.fd, head, size)
        table = self.file.scan().table
        pages = table.rows["page"].tolist()
        self.records = [(page, table.block(row)) for row, page in enumerate(pages)]

    def is_intact(self, record: tuple[int, BlockPage], piece_bytes: int = 1 << 20) -> bool:
        return is_intact(self.file, *record, Pages(piece_bytes).view)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    made = Stored(tmp_path / "store")
    yield made
    os.close(made.fd)


@pytest.mark.parametrize("piece_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, BLOCK_BYTES, 1 << 20])
@pytest.mark.parametrize("at", [None, 0, 4000, PAGE_BYTES, PAGE_BYTES + BLOCK_BYTES - 1])
def test_every_byte_counts_whatever_the_piece(
    stored: Stored, piece_bytes: int, at: int | None
) -> None:
    first, second = stored.records
    if at is not None:
        where = first[0] * PAGE_BYTES + at
        (byte,) = os.pread(stored.fd, 1, where)
        os.pwrite(stored.fd, bytes([byte ^ 1]), where)
    assert stored.is_intact(first, piece_bytes) == (at is None)
    assert stored.is_intact(second, piece_bytes)


def test_each_piece_is_announced_before_it_is_read(stored: Stored) -> None:
    first, _ = stored.records
    size = record_pages(first[1].scope) * PAGE_BYTES
    turns: list[int] = []
    assert is_intact(stored.file, *first, Pages(size - PAGE_BYTES).view, turns.append)
    assert turns == [size - PAGE_BYTES, PAGE_BYTES]


def test_a_page_that_tells_of_another_block_is_no_page_of_this_one(stored: Stored) -> None:
    """Its own checksum and the payload's are right."""
    first, second = stored.records
    where, block = first
    page = bytearray(PAGE_BYTES)
    write_block_page(
        memoryview(page),
        prefix=block.scope.prefix(),
        key=key(9),
        checksum=block.checksum,
        segment_id=stored.file.head.segment_id,
        place=place_of(stored.file.head.number, where),
    )
    os.pwrite(stored.fd, page, where * PAGE_BYTES)
    assert not stored.is_intact(first)
    assert stored.is_intact(second)


def test_a_record_that_ends_outside_the_file_is_none(stored: Stored) -> None:
    _, second = stored.records
    page, block = second
    os.truncate(stored.path, (page + record_pages(block.scope) - 1) * PAGE_BYTES)
    assert not stored.is_intact(second)
