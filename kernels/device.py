"""Copies between slots and a cache in the memory of a device, on streams of their own.

    engine's stream  ──forward──┬─mark─────────────forward──▶        (the engine's thread)
    store stream                └──wait──block→slot──event           pages → slot, then hashed
    load stream                    └wait──slot→block──event          hashed while it moves
                                                                     (by threads: `hashes.py`)

A mark is an event on the engine's stream: a copy waits for it on its own stream, never a thread.
Its end is an event too, and is looked for. So nothing of the engine's that was launched before a
copy was ordered can write what it reads, or read what it writes; what is launched after its end
cannot either. In between the caller forbids it (fences).

A device copies to and from pinned memory only. Chunks of the slots' memory are pinned when a copy
first needs them, by a thread: a store waits for that, up to a second, a load goes through staging
memory. The checksum of a store is that of the slot after the copy: between the two no other process
has a grant for it.

Does not cover: one device's calls (`cuda.py`), the way of a block's pieces (`strategy.py`),
generations, which copies and when (`client.core`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, Protocol

import numpy as np

from kvstore.kernels.caches import Addresses, DeviceCache
from kvstore.kernels.compare import BOUNDS, error_of
from kvstore.kernels.hashes import Hashes, Hashing, hashes_for_this_process
from kvstore.kernels.host import NOT_COMPARABLE
from kvstore.kernels.pinning import PinnedChunks
from kvstore.kernels.ranges import Range, begin_range
from kvstore.kernels.reference import Bytes
from kvstore.kernels.shared import SharedMemory
from kvstore.kernels.slab import MappedSlab
from kvstore.kernels.strategy import BlockMoves, Thresholds
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.layout import Slab

COPIES_MAX: Final = 8
"""Under way at once: enough to keep both directions busy while one block of each is hashed."""
BATCH_MAX: Final = COPIES_MAX // 2
"""Copies of one call at most: while one half is under way, the other is hashed and reported."""
PIN_NS_MAX: Final = 1_000_000_000
"""How long a store waits for its slot to be pinned. Nobody else can end that wait: the pages of a
node that died while it grew never arrive."""
NOT_PINNED_IN_TIME: Final = "the memory of its slot was not pinned in time"
PIECE_BY_PIECE: Final = "kvstore: blocks of small pieces are copied piece by piece: %s"
HAS_FAILED: Final = "a copy of the device failed: "

_log = logging.getLogger("vllm.kvstore.kernels")


class DeviceError(Exception):
    """A call of the device failed."""


class Device(SharedMemory, Protocol):
    """A device with streams, which run what they are given in order, and events on them.

    Copies are within its memory, or between that and pinned memory of the host. Any thread may
    call; no call about streams waits. Handles are numbers of the device's choice.

    Every method raises DeviceError.
    """

    def move_trouble(self) -> str:
        """Why `move` cannot be called; empty: it can. The first call may take seconds."""
        ...

    def move(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """As `copy`, by a kernel: pieces in any order; both sides may be the device's memory."""
        ...

    def digest_trouble(self) -> str:
        """As `move_trouble`, for `digest`."""
        ...

    def digest(self, stream: int, address: int, size: int, *, sums: int, found: int) -> None:
        """Leave the digest of each piece (`wire.checksum`) of a payload at `found`, in order; all
        of it memory of the device's, the payload at a multiple of 16. `sums`: scratch of
        `launches.sums_bytes`."""
        ...

    def stream(self, *, is_urgent: bool) -> int:
        """A new stream; of two with work the urgent one goes first."""
        ...

    def event(self) -> int:
        """A new event, which has happened."""
        ...

    def record(self, event: int, stream: int | None) -> None:
        """The event happens when all that the stream was given so far is done. None: that of the
        calling thread's engine."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Work given to the stream from now on begins after the event, as last recorded."""
        ...

    def has_happened(self, event: int) -> bool:
        """Whether the event has happened since it was last recorded."""
        ...

    def copy(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Copy pieces: `sizes[i]` bytes from `sources[i]` to `targets[i]`. The arrays may change
        afterwards."""
        ...

    def clear(self, stream: int, targets: Addresses, sizes: Addresses) -> None:
        """Fill pieces of the device's memory with zeros."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Keep memory of the host in place, for copies."""
        ...

    def unpin(self, address: int) -> None:
        """Undo a `pin`; no copy touches that memory."""
        ...


class _Flight:
    """A copy under way."""

    __slots__ = (
        *("begun_ns", "copy", "duration_ns", "end_range", "event", "hashing", "ordered_ns"),
        *("reason", "staging"),
    )

    def __init__(self, copy: BlockCopy) -> None:
        self.copy = copy
        self.event = -1
        self.ordered_ns = time.perf_counter_ns()
        self.begun_ns = 0
        self.end_range: Range | None = None
        self.staging: Bytes | None = None
        """In place of the slot."""
        self.hashing: Hashing | None = None
        """Its checksum, once it is being hashed."""
        self.duration_ns = 0
        self.reason = ""
        """Why it failed."""


def _kind(flight: _Flight) -> tuple[CopyWay, int, bool, bool]:
    """Copies that are alike in this are given to the device in one go."""
    copy = flight.copy
    return copy.way, copy.group, copy.slab_begin >= 0, copy.is_verified


class DeviceCopies:
    """See the module, and the port for the methods."""

    copies_max = COPIES_MAX

    def __init__(
        self,
        device: Device,
        caches: Sequence[DeviceCache],
        *,
        thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
        hashes: Hashes | None = None,
    ) -> None:
        """`caches`: by KV cache group. `hashes`: as the cores suggest, if left out.

        Raises:
            DeviceError: the device has no streams or no pinned memory for this process.
        """
        self._device = device
        self._caches = caches
        self.gpu = device.name
        # What one stream does is done in order: a block is cleared after its load.
        stores, loads = device.stream(is_urgent=False), device.stream(is_urgent=True)
        self._streams = {
            CopyWay.STORE: stores,
            CopyWay.COMPARE: stores,
            CopyWay.LOAD: loads,
            CopyWay.CLEAR: loads,
        }
        self._flights: dict[int, deque[_Flight]] = {stores: deque(), loads: deque()}
        self._served_ns = dict.fromkeys(self._flights, 0)
        """Until when each stream has been accounted for."""
        self._ordered: list[_Flight] = []
        """Copies to be given to the device by the next `ended`."""
        self._unpinned: list[_Flight] = []
        """Stores that wait for their slot to be pinned."""
        self._events: deque[int] = deque()
        """Free ones."""
        self._ends: list[CopyEnd] = []
        self._memory: Bytes | None = None
        self._pins: PinnedChunks | None = None
        self._marking = threading.Lock()
        self._marks: deque[tuple[int, int]] = deque()
        """Marks not known to be passed, in order, with their events."""
        self._last_mark = 0
        size = max(CHECKSUM_BYTES, *(cache.block_bytes for cache in caches))
        self._staging = np.zeros((COPIES_MAX, size), np.uint8)
        device.pin(int(self._staging.ctypes.data), self._staging.nbytes)
        self._free_staging = list(self._staging)
        self._hashes = hashes_for_this_process() if hashes is None else hashes
        self._hashed: list[_Flight] = []
        """Copies that ended and whose blocks are being hashed."""
        try:
            sizes = [cache.sizes for cache in caches]
            self.moves = BlockMoves(device, self._flights, sizes, thresholds, batch_max=BATCH_MAX)
        except DeviceError:
            device.unpin(int(self._staging.ctypes.data))
            raise
        if self.moves.trouble:
            _log.warning(PIECE_BY_PIECE, self.moves.trouble)
        self._slab = MappedSlab(device, self.moves, caches)
        self._closed = False

    @property
    def trouble(self) -> str:
        return self._pins.trouble if self._pins is not None else ""

    @property
    def pinned_bytes(self) -> int:
        return self._pins.size_bytes if self._pins is not None else 0

    def block_bytes(self, group: int) -> int:
        return self._caches[group].block_bytes

    def attach(self, memory: Bytes, ready_bytes: Callable[[], int]) -> None:
        assert not self._is_busy, "the memory changes while a copy is under way"
        if self._pins is not None:
            self._pins.close()
        self._memory = memory
        self._pins = PinnedChunks(self._pin, self._device.unpin, memory, ready_bytes)

    def _pin(self, address: int, size_bytes: int) -> str:
        """Why memory cannot be pinned; empty: it is."""
        try:
            self._device.pin(address, size_bytes)
        except DeviceError as error:
            return str(error)
        return ""

    def map_slab(self, slab: Slab | None) -> str:
        assert not self._is_busy, "the slab changes while a copy is under way"
        try:
            self._slab.map(slab)
        except DeviceError as error:
            return str(error)
        return ""

    # ── marks ────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> int:
        with self._marking:
            self._forget_passed()
            event = self._take_event()
            self._device.record(event, None)
            self._last_mark += 1
            self._marks.append((self._last_mark, event))
            return self._last_mark

    def _wait_for(self, mark: int, stream: int) -> None:
        """Work given to the stream from now on comes after the mark."""
        with self._marking:
            self._forget_passed()
            for number, event in self._marks:
                if number >= mark:
                    self._device.wait(stream, event)
                    return

    def _forget_passed(self) -> None:
        """Their events are free again."""
        while self._marks and self._device.has_happened(self._marks[0][1]):
            self._events.append(self._marks.popleft()[1])

    def _take_event(self) -> int:
        try:
            return self._events.popleft()
        except IndexError:
            return self._device.event()

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_busy(self) -> bool:
        return bool(self._ordered or self._unpinned or self._hashed or any(self._flights.values()))

    def begin(self, copy: BlockCopy) -> None:
        if copy.way is CopyWay.COMPARE and not self._caches[copy.group].values:
            self._ends.append(CopyEnd(copy.number, reason=NOT_COMPARABLE))
            return
        self._ordered.append(_Flight(copy))

    def _give(self) -> None:
        """Give what was ordered to the streams, in order: like copies of blocks in one go."""
        ordered, self._ordered = self._ordered, []
        ready: list[_Flight] = []
        for flight in ordered:
            is_reachable = flight.copy.way is CopyWay.CLEAR or self._is_reachable(flight)
            (ready if is_reachable else self._unpinned).append(flight)
        for _, alike in groupby(ready, key=_kind):
            flights = list(alike)
            for at in range(0, len(flights), BATCH_MAX):
                self._begin(flights[at : at + BATCH_MAX])

    def _begin(self, batch: list[_Flight]) -> None:
        """Give like copies to their stream. They end together."""
        first, begun_ns = batch[0].copy, time.perf_counter_ns()
        stream, events = self._streams[first.way], list[int]()
        for flight in batch:
            flight.begun_ns, flight.end_range = begun_ns, begin_range(first.way.value)
        try:
            after = max(flight.copy.after for flight in batch)
            if after:
                self._wait_for(after, stream)
            # Before the launch: once it writes into staging memory, its end must be seen.
            events.append(self._take_event())
            self._launch(batch, stream)
            self._device.record(events[0], stream)
        except DeviceError as error:
            self._events.extend(events)
            for flight in batch:
                self._failed(flight, error)
            return
        for flight in batch:
            flight.event = events[0]
            if first.way is CopyWay.LOAD and first.is_verified and first.slab_begin < 0:
                # While bytes move: the slot has no writer, or its generation says so afterwards.
                flight.hashing = self._hashes.begin(flight.copy.header, self._source(flight))
        self._flights[stream].extend(batch)

    def _is_reachable(self, flight: _Flight) -> bool:
        """Whether the device can copy now. A load or comparison takes staging memory if need be."""
        copy = flight.copy
        assert self._pins is not None, "no memory of slots"
        if copy.way is CopyWay.COMPARE:
            flight.staging = self._free_staging.pop()
            return True
        if copy.slab_begin >= 0:
            flight.staging = self._free_staging.pop() if copy.is_verified else None
            return True
        is_pinned = self._pins.has(copy.begin, copy.begin + self.block_bytes(copy.group))
        if is_pinned or copy.way is CopyWay.STORE:
            return is_pinned
        flight.staging = self._free_staging.pop()
        flight.staging[: self.block_bytes(copy.group)] = self._slot(copy)
        return True

    def _slot(self, copy: BlockCopy) -> Bytes:
        assert self._memory is not None
        return self._memory[copy.begin : copy.begin + self.block_bytes(copy.group)]

    def _source(self, flight: _Flight) -> Bytes:
        """The host's end of a copy."""
        if flight.staging is None:
            return self._slot(flight.copy)
        return flight.staging[: self.block_bytes(flight.copy.group)]

    def _launch(self, batch: list[_Flight], stream: int) -> None:
        first, group = batch[0].copy, batch[0].copy.group
        cache = self._caches[group]
        blocks = np.array([cache.places(flight.copy.block_id) for flight in batch], np.uint64)
        if first.way is CopyWay.CLEAR:
            self._device.clear(stream, blocks.ravel(), np.tile(cache.sizes, len(batch)))
            return
        if first.slab_begin >= 0:
            begins = np.array([flight.copy.slab_begin for flight in batch], np.uint64)
            self._slab.load(stream, group, blocks, begins)
            if not first.is_verified:
                return
            if self._slab.makes_sums:
                for pages, flight in zip(blocks, batch, strict=True):
                    assert flight.staging is not None
                    self._slab.sum(stream, group, pages, int(flight.staging.ctypes.data))
                return
        # Bytes from the slab are read back: the host hashes bytes of its own only.
        is_load = first.way is CopyWay.LOAD and first.slab_begin < 0
        move = self.moves.load if is_load else self.moves.store
        slots = [int(self._source(flight).ctypes.data) for flight in batch]
        move(stream, group, blocks, np.array(slots, np.uint64), cache.offsets)

    # ── their ends ───────────────────────────────────────────────────────────────────────────────

    def ended(self) -> list[CopyEnd]:
        unpinned, self._unpinned = self._unpinned, []
        again: list[_Flight] = []
        for flight in unpinned:
            is_late = time.perf_counter_ns() - flight.ordered_ns > PIN_NS_MAX
            if self.trouble or is_late:
                reason = self.trouble or NOT_PINNED_IN_TIME
                self._ends.append(CopyEnd(flight.copy.number, reason=reason))
            else:
                again.append(flight)
        self._ordered = again + self._ordered
        self._give()
        for stream, flights in self._flights.items():
            while flights and self._is_over(flights[0]):
                self._batch_arrived(flights, stream)
        self._hashed = [flight for flight in self._hashed if not self._is_closed(flight)]
        ends, self._ends = self._ends, []
        return ends

    def _is_over(self, flight: _Flight) -> bool:
        try:
            return self._device.has_happened(flight.event)
        except DeviceError:
            return True  # `_batch_arrived` asks again, and reports it

    def _batch_arrived(self, flights: deque[_Flight], stream: int) -> None:
        """All copies that end with the event of the first one."""
        event, error = flights[0].event, None
        try:
            self._device.has_happened(event)
        except DeviceError as found:
            error = found
        else:
            self._events.append(event)
        while flights and flights[0].event == event:
            flight = flights.popleft()
            if error is None:
                self._arrived(flight, stream)
            else:
                self._failed(flight, error)

    def _arrived(self, flight: _Flight, stream: int) -> None:
        """The bytes are there; now the rest is done with the host's end of the copy."""
        copy = flight.copy
        now_ns = time.perf_counter_ns()
        flight.duration_ns = now_ns - max(flight.begun_ns, self._served_ns[stream])
        self._served_ns[stream] = now_ns
        is_from_slab = copy.slab_begin >= 0 and copy.is_verified
        if is_from_slab and self._slab.makes_sums:
            assert flight.staging is not None
            checksum = self._slab.root(copy, flight.staging)
            flight.hashing = lambda: checksum
        elif copy.way is CopyWay.STORE or is_from_slab:
            flight.hashing = self._hashes.begin(copy.header, self._source(flight))
        self._hashed.append(flight)

    def _is_closed(self, flight: _Flight) -> bool:
        """Report the end of a copy, unless its block is still being hashed."""
        copy, checksum = flight.copy, b""
        if flight.hashing is not None:
            found = flight.hashing()
            if found is None:
                return False
            checksum = found
        end = CopyEnd(copy.number, checksum=checksum, duration_ns=flight.duration_ns)
        if flight.reason:
            end = CopyEnd(copy.number, reason=flight.reason)
        elif copy.way is CopyWay.COMPARE:
            error_found = self._error(flight)
            bound = BOUNDS[self._caches[copy.group].values]
            end = end._replace(error=error_found, diverged=error_found > bound)
        self._give_back(flight)
        if flight.end_range is not None:
            flight.end_range()
        self._ends.append(end)
        return True

    def _error(self, flight: _Flight) -> float:
        cache, slot = self._caches[flight.copy.group], self._slot(flight.copy)
        computed = self._source(flight)
        return error_of(
            [computed[begin:end] for begin, end in cache.compared],
            [slot[begin:end] for begin, end in cache.compared],
            values=cache.values,
        )

    def _failed(self, flight: _Flight, error: DeviceError) -> None:
        """Its end is reported once no thread reads its bytes any more."""
        flight.reason = f"{HAS_FAILED}{error}"
        self._hashed.append(flight)

    def _give_back(self, flight: _Flight) -> None:
        if flight.staging is not None:
            self._free_staging.append(flight.staging)
            flight.staging = None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hashes.close()
        if self._pins is not None and not self._is_busy:
            self._pins.close()
        if not self._is_busy:
            self.moves.close()
            self.map_slab(None)
            self._device.unpin(int(self._staging.ctypes.data))
