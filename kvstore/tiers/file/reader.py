"""Runs of neighbouring records into slots, each block verified before it counts.

    one preadv   │page of block 0│slot 0 …│page of block 1│slot 1 …│

A block is good when the page before it is the record that was asked for, at the place where it was
found, and the checksum over address and bytes is the one that the storing rank made. Verification
runs on the reading thread and without the GIL.

A read is split into runs, which threads take one by one, and ends when every run has ended or was
taken back before it began; its deadline takes back the runs that have not begun. Records kept from
a reclaimed segment are read by the same code into memory of the writer's own.

Does not cover: threads and deadlines (`tier.py`), moves of records (`writer.py`).
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstore.tier_events import ReadFile
from kvstore.tiers.file.catalog import Catalog
from kvstore.tiers.file.contents import SegmentFile
from kvstore.tiers.file.disk import Pages, forget_cached, read_all
from kvstore.types import PAGE_BYTES
from kvstore.wire.record import BlockPage, Scope, checksum_of, payload_pages, record_pages
from kvstore.wire.segment import PAGE_SHIFT

RUN_BYTES_MAX: Final = 4 << 20
RUN_RECORDS_MAX: Final = 128
PAGE_MASK: Final = (1 << PAGE_SHIFT) - 1


Look = Callable[[int, memoryview], None] | None
"""Copies bytes of the memory with slots from a place on, without a fault where others share it;
None: nobody does."""


class ReadVerdict(enum.Enum):
    """Outcome of reading one block."""

    GOOD = 1
    DAMAGED = 2
    """Read, but not what was stored there; or the medium has a hole in it."""
    UNREAD = 3
    """Not read: the segment is not there, or the call failed."""


class RecordRun(NamedTuple):
    """Records of one read that lie side by side in segment `number`: their indexes in its order."""

    number: int
    indexes: list[int]


class RunResult(msgspec.Struct):
    """A verdict per block, and the medium's failure if there was one."""

    verdicts: list[ReadVerdict]
    error: OSError | None = None


def run_max(scope: Scope) -> int:
    """Most records that are read at once."""
    return max(1, min(RUN_RECORDS_MAX, RUN_BYTES_MAX // (record_pages(scope) * PAGE_BYTES)))


def split(order: ReadFile) -> list[RecordRun]:
    """Runs of neighbours, in the order in which they lie on disk."""
    count_max, locations = run_max(order.scope), np.frombuffer(order.locations, np.uint64)
    runs: list[RecordRun] = []
    expected = -1
    for index in np.argsort(locations, kind="stable").tolist():
        location = int(locations[index])
        if location != expected or len(runs[-1].indexes) == count_max:
            runs.append(RecordRun(location >> PAGE_SHIFT, []))
        runs[-1].indexes.append(index)
        expected = location + record_pages(order.scope)
    return runs


class Reader:
    """Reads for one thread. `memory` is where slots lie: u8, page aligned, writable."""

    def __init__(
        self, catalog: Catalog, memory: memoryview, *, direct: bool, look: Look = None
    ) -> None:
        self._look = look
        self._copy = memoryview(b"")
        self._catalog = catalog
        self._memory = memory
        self._direct = direct
        self._headers = Pages(RUN_RECORDS_MAX * PAGE_BYTES)

    def read(self, number: int, order: ReadFile, indexes: Sequence[int]) -> RunResult:
        """Read blocks of an order whose records lie one behind the other in a segment, and verify
        each."""
        failure: OSError | None = None
        try:
            if (segment := self._catalog.get(number)) is not None:
                with self._catalog.reading(segment) as file:
                    return self._read(file, order, indexes)
        except OSError as error:
            failure = None if isinstance(error, FileNotFoundError) else error
        return RunResult([ReadVerdict.UNREAD] * len(indexes), failure)

    def _read(self, file: SegmentFile, order: ReadFile, indexes: Sequence[int]) -> RunResult:
        first_page = int(np.frombuffer(order.locations, np.uint64)[indexes[0]]) & PAGE_MASK
        try:
            done = self._fill(file, order, indexes, first_page)
        except OSError as error:
            if len(indexes) == 1:
                # EFAULT: the slot's page was given back, and there is no other. The disk is well.
                is_ours = error.errno == errno.EFAULT
                return RunResult([ReadVerdict.UNREAD if is_ours else ReadVerdict.DAMAGED], error)
            result = RunResult([], error)  # one bad sector does not cost its neighbours
            for index in indexes:
                result.verdicts += self._read(file, order, [index]).verdicts
            return result
        pages, verdicts = record_pages(order.scope), []
        for row, index in enumerate(indexes):
            whole = (row + 1) * pages * PAGE_BYTES <= done
            good = whole and self._is_good(file, order, index, row, first_page + row * pages)
            verdicts.append(ReadVerdict.GOOD if good else ReadVerdict.DAMAGED)
        return RunResult(verdicts)

    def _fill(
        self, file: SegmentFile, order: ReadFile, indexes: Sequence[int], first_page: int
    ) -> int:
        length = payload_pages(order.scope.block_bytes) * PAGE_BYTES
        buffers = []
        for row, index in enumerate(indexes):
            begin = int(order.slots[index]) * PAGE_BYTES
            buffers += [self._headers.page(row), self._memory[begin : begin + length]]
        offset = first_page * PAGE_BYTES
        done = read_all(file.disk, file.fd, buffers, offset)
        if not self._direct:
            forget_cached(file.fd, offset, done)
        return done

    def _is_good(self, file: SegmentFile, order: ReadFile, index: int, row: int, page: int) -> bool:
        found = file.parsed(self._headers.page(row), page)
        scope, key = order.scope, order.key(index)
        if not isinstance(found, BlockPage) or found.key != key or found.scope != scope:
            return False
        payload = self._payload(int(order.slots[index]) * PAGE_BYTES, scope.block_bytes)
        expected = order.checksum(index) or found.checksum
        return checksum_of(scope.prefix() + key, [payload]) == expected

    def _payload(self, begin: int, length: int) -> memoryview:
        if self._look is None:
            return self._memory[begin : begin + length]
        if len(self._copy) < length:
            self._copy = memoryview(bytearray(length))
        self._look(begin, self._copy[:length])
        return self._copy[:length]
