"""Whether a record on disk is what was stored there: page and payload, in pieces of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers.file.contents import (
    Record,
    SegmentFile,
    is_intact,
    record_at,
)
from kvstore.tiers.file.disk import Disk, Pages, open_regular
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import write_block_page
from kvstore.wire.segment import parse_segment_page, place_of
from tests.unit.tiers.file.kit import BLOCK_BYTES, Driver, key, payload

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
        self.records = [record_at(table, row) for row in range(len(table.pages))]

    def is_intact(self, record: Record, piece_bytes: int = 1 << 20) -> bool:
        return is_intact(self.file, record, Pages(piece_bytes).view)


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
        where = first.page * PAGE_BYTES + at
        (byte,) = os.pread(stored.fd, 1, where)
        os.pwrite(stored.fd, bytes([byte ^ 1]), where)
    assert stored.is_intact(first, piece_bytes) == (at is None)
    assert stored.is_intact(second, piece_bytes)


def test_a_record_that_fits_the_buffer_is_in_there_afterwards(stored: Stored) -> None:
    first, _ = stored.records
    buffer = Pages(first.size_bytes).view
    turns: list[int] = []
    assert is_intact(stored.file, first, buffer, turns.append)
    assert bytes(buffer[PAGE_BYTES:]) == payload(1)
    assert turns == [first.size_bytes]


def test_a_page_that_tells_of_another_block_is_no_page_of_this_one(stored: Stored) -> None:
    """Its own checksum and the payload's are right."""
    first, second = stored.records
    page = bytearray(PAGE_BYTES)
    write_block_page(
        memoryview(page),
        prefix=first.scope.prefix(),
        key=key(9),
        checksum=first.checksum,
        segment_id=stored.file.head.segment_id,
        place=place_of(stored.file.head.number, first.page),
    )
    os.pwrite(stored.fd, page, first.page * PAGE_BYTES)
    assert not stored.is_intact(first)
    assert stored.is_intact(second)


def test_a_record_that_ends_outside_the_file_is_none(stored: Stored) -> None:
    _, second = stored.records
    os.truncate(stored.path, second.page * PAGE_BYTES + second.size_bytes - PAGE_BYTES)
    assert not stored.is_intact(second)
