"""Copies under way on a device: batches of a stream, the streams of a direction, and the host's
memory that copies hold meanwhile.

Does not cover: giving them to the device and taking their ends (`device.py`).
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.kernels.ranges import Range, begin_range
from kvstore.kernels.reference import Bytes
from kvstore.ports import BlockCopy, CopyWay
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.checksum import piece_count

STAGED_MAX: Final = 2
"""Blocks of staging memory, for comparisons and for loads from memory that is not pinned yet."""


class PinnedPart(NamedTuple):
    """A part of a rank's own pinned memory."""

    address: int
    data: Bytes


class CopyFlight:
    """A copy under way."""

    __slots__ = ("copy", "digests", "ordered_ns", "staging")

    def __init__(self, copy: BlockCopy, ordered_ns: int) -> None:
        self.copy, self.ordered_ns = copy, ordered_ns
        self.staging: PinnedPart | None = None
        """In place of the slot."""
        self.digests: PinnedPart | None = None
        """Where the device leaves those of the pages."""

    @property
    def is_hashed(self) -> bool:
        copy = self.copy
        return copy.way is CopyWay.STORE or (copy.way is CopyWay.LOAD and copy.is_verified)


class FlightBatch:
    """Like copies, which were given to a stream in one go and end with one event."""

    __slots__ = ("after", "begun_ns", "end_range", "event", "flights", "reason")

    def __init__(self, flights: list[CopyFlight], begun_ns: int) -> None:
        self.flights = flights
        self.after = flights[0].copy.after
        """Mark that it waits for; 0: none, or one that has passed."""
        self.begun_ns = begun_ns
        """When it was last seen waiting: the engine's forward is no time of a copy."""
        self.end_range: Range = begin_range(flights[0].copy.way.value)
        self.event = -1
        self.reason = ""
        """Why it failed."""


def kind_of(flight: CopyFlight) -> tuple[CopyWay, int, bool, bool, int]:
    """Copies that are alike in this are given to the device in one go."""
    copy = flight.copy
    return copy.way, copy.group, copy.slab_begin >= 0, copy.is_verified, copy.after


class CopyDirection:
    """The streams of one direction, which take batches in turn."""

    def __init__(self, streams: Sequence[int]) -> None:
        self.batches: dict[int, deque[FlightBatch]] = {stream: deque() for stream in streams}
        self.served_ns = 0
        """Until when its time has been accounted for."""

    def next_stream(self) -> int:
        """The one with less to do."""
        return min(self.batches, key=lambda stream: len(self.batches[stream]))


class OwnMemory:
    """The host's memory of a rank, pinned in one piece: staging blocks, and places of digests."""

    def __init__(self, block_bytes: int, copies_max: int) -> None:
        digest_bytes = CHECKSUM_BYTES * piece_count(block_bytes)
        sizes = [block_bytes] * STAGED_MAX + [digest_bytes] * copies_max
        # Whole pages, none of which is pinned twice.
        memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
        self.address, self.size = int(memory.ctypes.data), memory.nbytes
        parts = np.split(memory, np.cumsum(sizes)[:-1])
        places = [PinnedPart(int(part.ctypes.data), part) for part in parts]
        self.staging, self.digests = places[:STAGED_MAX], places[STAGED_MAX:]
        """Free ones."""
