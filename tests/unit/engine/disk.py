"""A disk for a node under test: keeps the engine's file commands until a test answers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from kvstore.engine.moves import files as files_module
from kvstore.engine.moves.jobs import ReadPace
from kvstore.tier_events import (
    FileGone,
    FileKnown,
    FileLate,
    FileMoved,
    FileRead,
    FileReclaim,
    FileWritten,
    ReadFile,
    ReclaimFile,
    VoidFile,
    WriteFile,
)
from kvstore.types import PAGE_BYTES, SLOT_BYTES_MIN, Shard, SpaceId
from kvstore.wire.record import Scope
from kvstore.wire.space import fingerprint, shard_bytes
from tests.unit.engine.harness import SMALL, WHOLE, Node, checksum, keys

SPACE = fingerprint(SMALL, weights_epoch="")
BLOCK_BYTES = shard_bytes(SMALL, WHOLE)
RECORD_BYTES = PAGE_BYTES + BLOCK_BYTES
SCOPE = Scope("t", SPACE, WHOLE, BLOCK_BYTES)


def slow_disk(patch: pytest.MonkeyPatch, *, read_slots: int = 1, ahead_slots: int = 1) -> None:
    """A read is of so many of the smallest slots, and so many are asked for at a time."""
    patch.setattr(files_module, "READ_BYTES", read_slots * SLOT_BYTES_MIN)
    patch.setattr(files_module, "READ_AHEAD_NS", ahead_slots * SLOT_BYTES_MIN)
    patch.setattr(ReadPace, "ns_per_byte", lambda *_: 1.0)


def places(first: int, count: int) -> bytes:
    """Distinct locations."""
    return np.arange(first, first + count, dtype="<u8").tobytes()


def known(*numbers: int, tenant: str = "t", space: SpaceId = SPACE, at: int = 1) -> FileKnown:
    """The disk holds these blocks, at `at` and after."""
    sums = b"".join(checksum(number) for number in numbers)
    scope = Scope(tenant, space, WHOLE, BLOCK_BYTES)
    return FileKnown(scope, keys(*numbers), places(at, len(numbers)), sums)


def gone(*numbers: int, tenant: str = "t", shard: Shard = WHOLE, at: int = 0) -> FileGone:
    """The disk holds them no more: at `at` and after, or wherever they were."""
    scope = Scope(tenant, SPACE, shard, BLOCK_BYTES)
    return FileGone(scope, keys(*numbers), places(at, len(numbers)) if at else b"")


def moved(number: int, *, old: int, new: int) -> FileMoved:
    """A reclaimed segment kept this block."""
    return FileMoved(SCOPE, keys(number), places(old, 1), places(new, 1))


class DiskNode(Node):
    """A node with a file tier that does nothing by itself."""

    kept: ClassVar[dict[type[Any], str]] = {
        WriteFile: "writes",
        ReadFile: "reads",
        VoidFile: "voids",
        ReclaimFile: "reclaimed",
    }
    writes: list[WriteFile]
    reads: list[ReadFile]
    voids: list[VoidFile]
    reclaimed: list[ReclaimFile]

    def __init__(self, *, slots: int = 32, **config: Any) -> None:
        self._next_place = 1000
        super().__init__(slots=slots, file_bytes=1 << 30, **config)

    def write_all(self) -> None:
        """Every write succeeds."""
        for write in self.writes:
            count = len(write.keys) // 32
            self.step(FileWritten(write.job, places(self._next_place, count)))
            self._next_place += count
        self.writes = []

    def write_nothing(self) -> None:
        """No write succeeds."""
        for write in self.writes:
            self.step(FileWritten(write.job, bytes(len(write.keys) // 32 * 8)))
        self.writes = []

    def answer(self, read: ReadFile, good: Sequence[bool] | None = None) -> None:
        """A read ends; without `good` all is well."""
        count = len(read.keys) // 32
        self.reads.remove(read)
        self.step(FileRead(read.job, bytes(good if good is not None else [True] * count)))

    def read_all(self) -> None:
        """Every read succeeds."""
        for read in list(self.reads):
            self.answer(read)

    def reclaim(self, *numbers: int, segment: int = 4, at: int = 1) -> bytes:
        """What is kept of a segment with these blocks, the first of which lies at `at`."""
        part = FileKnown(SCOPE, keys(*numbers), places(at, len(numbers)), b"")
        self.step(FileReclaim(segment, (part,)))
        assert self.reclaimed[-1].segment == segment
        return self.reclaimed[-1].keep

    def be_late(self, read: ReadFile) -> None:
        """A read takes too long."""
        self.step(FileLate(read.job))
