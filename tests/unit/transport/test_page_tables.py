"""What a transfer worker maps ahead of use: all that is there, and nothing that is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.arena import Arena, map_arena
from kvstore.transport import transfer_worker
from kvstore.transport.transfer_worker import PART_BYTES, PageTables
from kvstore.types import PAGE_BYTES, Incarnation

ARENA_BYTES = 4 * PART_BYTES


class Mapped:
    """An arena as a transfer worker has it."""

    def __init__(self) -> None:
        self.arena = Arena(arena_bytes=ARENA_BYTES, incarnation=Incarnation(1))
        if self.arena.huge_pages:
            pytest.skip("on huge pages there is nothing to fill")
        fd = self.arena.arena_fd
        self.writable = map_arena(fd, size_bytes=ARENA_BYTES, writable=True)
        self.readable = map_arena(fd, size_bytes=ARENA_BYTES, writable=False)
        self.tables = PageTables(fd, self.writable, self.readable)

    def fill(self) -> int:
        """All that there is; returns in how many parts."""
        parts = 0
        while self.tables.fill():
            parts += 1
        return parts

    def close(self) -> None:
        self.arena.close()


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    made = Mapped()
    yield made
    made.close()


def resident_bytes(array: NDArray[np.uint8]) -> int:
    """Of this process's pages, how much of that mapping is in its tables."""
    with open("/proc/self/smaps", encoding="ascii") as lines:
        is_it = False
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                is_it = int(line.split("-", 1)[0], 16) == array.ctypes.data
            elif is_it and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    raise AssertionError("it is not mapped")


def taken_bytes(mapped: Mapped) -> int:
    return os.fstat(mapped.arena.arena_fd).st_blocks * 512


def test_what_is_there_is_mapped_both_ways_in_parts_from_where_it_was(mapped: Mapped) -> None:
    mapped.arena.populate(0, PAGE_BYTES)
    assert mapped.fill() == 1
    mapped.arena.populate(PAGE_BYTES, ARENA_BYTES)
    assert mapped.fill() == 4
    assert resident_bytes(mapped.writable) == ARENA_BYTES
    assert resident_bytes(mapped.readable) == ARENA_BYTES


def test_what_is_not_there_is_left_to_the_node(mapped: Mapped) -> None:
    assert mapped.fill() == 0
    mapped.arena.populate(0, PART_BYTES + PAGE_BYTES)
    assert mapped.fill() == 2
    assert mapped.tables.filled_bytes == taken_bytes(mapped) == PART_BYTES + PAGE_BYTES
    assert resident_bytes(mapped.writable) == PART_BYTES + PAGE_BYTES


@pytest.mark.parametrize(
    ("call", "code"), [("fill_page_tables", errno.ENOMEM), ("present_bytes", errno.EINVAL)]
)
def test_what_the_kernel_refuses_is_left_to_faults(
    mapped: Mapped, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    mapped.arena.populate(0, ARENA_BYTES)
    monkeypatch.setattr(f"{transfer_worker.__name__}.{call}", refuse)
    assert mapped.fill() == 1
    assert resident_bytes(mapped.writable) == 0
