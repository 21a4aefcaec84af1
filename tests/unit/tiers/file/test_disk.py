"""The system calls used with care: parts of pages, probing O_DIRECT, records behind broken ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.tiers.file.contents import SegmentFile
from kvstore.tiers.file.disk import Disk, works_direct, write_all
from kvstore.types import PAGE_BYTES
from kvstore.wire.segment import parse_segment_page
from tests.unit.tiers.file.kit import Driver, FaultyDisk, key

RECORD_PAGES = 17
"""Of the kit's blocks, with the page in front."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def failing(code: int, *, calls: int = 1) -> Callable[[int], OSError | None]:
    """Fails the call of this number and all later ones."""
    seen = iter(range(1, 1_000))
    return lambda _: OSError(code, "no") if next(seen) >= calls else None


@pytest.mark.parametrize(
    ("call", "error", "works"),
    [
        ("pwritev", failing(errno.EINVAL), False),
        ("pwritev", failing(errno.EOPNOTSUPP), False),
        ("open", failing(errno.EINVAL, calls=2), False),
        ("pwritev", failing(errno.ENOSPC), True),
        ("open", failing(errno.ENOSPC, calls=2), False),
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
    with pytest.raises(OSError, match="no"):
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
