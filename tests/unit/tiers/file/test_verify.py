"""Whether a record on disk is what was stored there: page and payload, in pieces of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.file.contents import (
    SegmentFile,
    is_intact,
)
from kvstore.tiers.file.disk import Disk, Pages, open_regular
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import BlockPage, record_pages, write_block_page
from kvstore.wire.segment import parse_segment_page, place_of
from tests.unit.tiers.file.kit import BLOCK_BYTES, Driver, key

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
