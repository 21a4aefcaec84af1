"""Copies between slots and a cache in the memory of a device, on streams of their own.

    engine's stream  ──forward──┬─mark─────────────────forward──▶     (the engine's thread)
    store streams               └─wait──pages hashed──pages→slots──event
    load streams                    └─wait──slots→pages──pages hashed──event

A mark is an event on the engine's stream: a copy waits for it on its own stream, never a thread.
Its end is an event too, and is looked for. So nothing of the engine's that was launched before a
copy was ordered can write what it reads, or read what it writes; what is launched after its end
cannot either. In between the caller forbids it (fences). A mark that has passed is waited for no
more: an end that a host saw comes before all that is launched afterwards.

Each direction has two streams, which take batches in turn: while one hashes, the other has the bus.
A device copies to and from pinned memory only. Chunks of the slots' memory are pinned when a copy
first needs them, by a thread: a store waits for that, up to a second, a load goes through staging
memory. Without kernels the host hashes slots after the copy, which another process of the same
trust domain can write meanwhile.

Does not cover: one device's calls (`cuda.py`), the way of a block's pieces (`moves.py`),
generations, which copies and when (`client.core`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.kernels.host import BOUNDS, NOT_COMPARABLE, error_of
from kvstore.kernels.moves import BlockMoves
from kvstore.kernels.pinning import PinnedChunks
from kvstore.kernels.port import Bytes, Device, DeviceCache, DeviceError
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.record import checksum_of, piece_count, root_of
from kvstore.wire.space import Slab

# ── ranges ────────────────────────────────────────────────────────────────────────────────────────
# Ranges of NVIDIA's tools (Nsight Systems), in the domain `kvstore`: one for each batch of copies.
#
# A range lasts from the launch until the end is reported, hashing included. Without a tool that
# listens one costs 0.2 us; without the package `nvtx` there are none.

try:
    import nvtx as _nvtx
except ImportError:
    _nvtx = None
DOMAIN: Final = "kvstore"
Range = Callable[[], object]
"""A function that ends a range."""


def begin_range(name: str) -> Range:
    """Begin a range with this name. Returns the function that ends it."""
    if _nvtx is None:
        return lambda: None
    nvtx, begun = _nvtx, _nvtx.start_range(message=name, domain=DOMAIN)
    return lambda: nvtx.end_range(begun)


# ── flights ───────────────────────────────────────────────────────────────────────────────────────
# Copies under way on a device: batches of a stream, the streams of a direction, and the host's
# memory that copies hold meanwhile.
#
# Does not cover: giving them to the device and taking their ends (`device.py`).

STAGED_MAX: Final = 2
"""Blocks of staging memory, for comparisons and for loads from memory that is not pinned yet."""


class PinnedPart(NamedTuple):
    """A part of a rank's own pinned memory."""

    address: int
    data: Bytes


class CopyFlight:
    """A copy under way."""

    def __init__(self, copy: BlockCopy, ordered_ns: int) -> None:
        self.copy, self.ordered_ns = copy, ordered_ns
        self.staging: PinnedPart | None = None
        """Memory that takes the place of the slot; None: the slot is used."""
        self.digests: PinnedPart | None = None
        """Memory in which the device leaves the digests of the pages; None: it makes none."""

    @property
    def is_hashed(self) -> bool:
        copy = self.copy
        return copy.way is CopyWay.STORE or (copy.way is CopyWay.LOAD and copy.is_verified)


class FlightBatch:
    """Copies of one kind (`kind_of`), given to a stream in one go; they end with one event."""

    def __init__(self, flights: list[CopyFlight], begun_ns: int) -> None:
        self.flights = flights
        self.after = flights[0].copy.after
        """Mark that it waits for; 0: none, or one that has passed."""
        self.begun_ns = begun_ns
        """When it was given, or last seen waiting for its mark: the engine's forward before that is
        no time of a copy."""
        self.end_range: Range = begin_range(flights[0].copy.way.value)
        self.event = -1
        self.reason = ""
        """Why it failed."""


def kind_of(flight: CopyFlight) -> tuple[CopyWay, int, bool, bool, int]:
    """Properties of a copy; copies that are alike in them are given to the device in one go."""
    copy = flight.copy
    return copy.way, copy.group, copy.slab_begin >= 0, copy.is_verified, copy.after


class CopyDirection:
    """The streams of one direction, which take batches in turn."""

    def __init__(self, streams: Sequence[int]) -> None:
        self.batches: dict[int, deque[FlightBatch]] = {stream: deque() for stream in streams}
        self.served_ns = 0
        """End of the time that has been charged to batches of this direction."""


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
        """Parts that no copy holds."""


# ── device ────────────────────────────────────────────────────────────────────────────────────────

PIN_NS_MAX: Final = 1_000_000_000
"""How long a store waits for its slot to be pinned. Nobody else can end that wait: the pages of a
node that died while it grew never arrive."""
NO_MARK: Final = -1
"""Mark that `mark` returns if the engine's stream could not be marked: copies behind it fail."""
NOT_PINNED_IN_TIME: Final = "the memory of its slot was not pinned in time"
PIECE_BY_PIECE: Final = (
    "kvstore: blocks are copied piece by piece and hashed by the host, which is slower: %s"
)
HAS_FAILED: Final = "a copy of the device failed: "

_log = logging.getLogger("vllm.kvstore.kernels")


class DeviceCopies:
    """See the module, and the port for the methods."""

    def __init__(
        self,
        device: Device,
        caches: Sequence[DeviceCache],
        *,
        by_pieces: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`caches`: by KV cache group. `by_pieces`: without kernels, for measurements and tests.
        `clock_ns`: for how long copies are served.

        Raises:
            DeviceError: the device has no streams or no pinned memory for this process.
        """
        self._device = device
        self._caches, self._clock_ns = caches, clock_ns
        self.gpu = device.name
        try:
            self._begin_with(by_pieces=by_pieces)
        except DeviceError:
            device.close()
            raise
        self._ordered: list[CopyFlight] = []
        """Copies to be given to the device by the next `ended`, or that wait for memory."""
        self._events: deque[int] = deque()
        """Events that are free for use."""
        self._ends: list[CopyEnd] = []
        self._memory = np.empty(0, np.uint8)
        self._pins = PinnedChunks(device, self._memory, lambda: 0)
        self._marking = threading.Lock()
        self._marks: dict[int, int] = {}
        """Marks not known to be passed, in order, and their events."""
        self._last_mark = 0
        self._slab_address = 0
        """Address of the node's slab on this device; 0: none is mapped."""
        self._closed = False

    def _begin_with(self, *, by_pieces: bool) -> None:
        """Make streams, rooms and pinned memory."""
        device, caches = self._device, self._caches
        stores, loads = (
            CopyDirection([device.stream(is_urgent=is_urgent) for _ in range(2)])
            for is_urgent in (False, True)
        )
        self._both = stores, loads
        streams = [*stores.batches, *loads.batches]
        self.moves = BlockMoves(device, streams, caches, by_pieces=by_pieces)
        if self.moves.trouble:
            _log.warning(PIECE_BY_PIECE, self.moves.trouble)
        most = min(self.moves.batch_max(group) for group in range(len(caches)))
        self.copies_max = 4 * most
        """A batch for each of the four streams."""
        self._own = OwnMemory(max(cache.block_bytes for cache in caches), self.copies_max)
        try:
            device.pin(self._own.address, self._own.size)
        except DeviceError:
            self.moves.close()
            raise

    @property
    def trouble(self) -> str:
        return self._pins.trouble

    @property
    def pinned_bytes(self) -> int:
        return self._pins.size_bytes

    def block_bytes(self, group: int) -> int:
        return self._caches[group].block_bytes

    def attach(self, memory: Bytes, ready_bytes: Callable[[], int]) -> None:
        assert not self._is_busy, "the memory changes while a copy is under way"
        self._pins.close()
        self._memory = memory
        self.moves.slots_begin = int(memory.ctypes.data)
        self._pins = PinnedChunks(self._device, memory, ready_bytes)

    def pin_ahead(self, end: int) -> None:
        self._pins.pin_ahead(end)

    def map_slab(self, slab: Slab | None) -> str:
        assert not self._is_busy, "the slab changes while a copy is under way"
        address, self._slab_address = self._slab_address, 0
        try:
            if address:
                self._device.leave(address)
            if slab is not None:
                self._slab_address = self._device.open(slab.handle)
        except DeviceError as error:
            return str(error)
        return ""

    # ── marks ────────────────────────────────────────────────────────────────────────────────────

    def mark(self) -> int:
        with self._marking:
            if self._closed:
                return 0
            try:
                self._forget_passed()
                event = self._take_event()
                self._device.record(event, None)
            except DeviceError as error:
                _log.warning("kvstore: %s", error)
                return NO_MARK
            self._last_mark += 1
            self._marks[self._last_mark] = event
            return self._last_mark

    def _wait_for(self, mark: int, stream: int) -> None:
        """Work given to the stream from now on comes after the mark."""
        if mark == NO_MARK:
            raise DeviceError("the engine's stream could not be marked")
        with self._marking:
            self._forget_passed()
            # Of this mark alone: a later one is of a forward that the copy has nothing to do with.
            if mark in self._marks:
                self._device.wait(stream, self._marks[mark])

    def _has_passed(self, mark: int) -> bool:
        with self._marking:
            self._forget_passed()
            return mark not in self._marks

    def _forget_passed(self) -> None:
        """Forget the marks that have passed, whose events are free again."""
        for mark, event in list(self._marks.items()):
            if not self._device.has_happened(event):
                return
            self._events.append(event)
            del self._marks[mark]

    def _take_event(self) -> int:
        try:
            return self._events.popleft()
        except IndexError:
            return self._device.event()

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_busy(self) -> bool:
        return bool(self._ordered) or any(
            any(direction.batches.values()) for direction in self._both
        )

    def begin(self, copy: BlockCopy) -> None:
        if copy.way is CopyWay.COMPARE and not self._caches[copy.group].values:
            self._ends.append(CopyEnd(copy.number, reason=NOT_COMPARABLE))
            return
        self._ordered.append(CopyFlight(copy, self._clock_ns()))

    def _give(self) -> None:
        """Give what was ordered to the streams: like copies of blocks in one go, whatever came
        between them, since no copy that may be under way depends on another one."""
        ordered, self._ordered = self._ordered, []
        alike: dict[tuple[object, ...], list[CopyFlight]] = {}
        for flight in ordered:
            if self._is_ready(flight):
                alike.setdefault(kind_of(flight), []).append(flight)
        for flights in alike.values():
            most = self.moves.batch_max(flights[0].copy.group)
            for at in range(0, len(flights), most):
                self._begin(flights[at : at + most])

    def _is_ready(self, flight: CopyFlight) -> bool:
        """Whether the device can do this copy now; takes the memory that it needs. If not, the copy
        is ordered again, or has ended with a reason."""
        copy = flight.copy
        if copy.way is CopyWay.STORE and not self._is_pinned(copy):
            is_late = self._clock_ns() - flight.ordered_ns > PIN_NS_MAX
            reason = self._pins.trouble_of(copy.begin, copy.begin + self.block_bytes(copy.group))
            if reason or is_late:
                self._ends.append(CopyEnd(copy.number, reason=reason or NOT_PINNED_IN_TIME))
            else:
                self._ordered.append(flight)
            return False
        if self._is_staged(flight):
            if not self._own.staging:
                self._ordered.append(flight)
                return False
            flight.staging = self._own.staging.pop()
            if copy.way is CopyWay.LOAD and copy.slab_begin < 0:
                self._source(flight)[:] = self._slot(copy)
        if flight.is_hashed and self.moves.is_staged:
            flight.digests = self._own.digests.pop()
        return True

    def _is_pinned(self, copy: BlockCopy) -> bool:
        assert self._memory.size, "no memory of slots"
        return self._pins.has(copy.begin, copy.begin + self.block_bytes(copy.group))

    def _is_staged(self, flight: CopyFlight) -> bool:
        """Whether staging memory takes the place of the slot."""
        copy = flight.copy
        if copy.way is CopyWay.LOAD and copy.slab_begin < 0:
            return not self._is_pinned(copy)
        is_read_back = copy.slab_begin >= 0 and copy.is_verified and not self.moves.is_staged
        return copy.way is CopyWay.COMPARE or is_read_back

    def _begin(self, flights: list[CopyFlight]) -> None:
        """Give like copies to a stream."""
        batch, first = FlightBatch(flights, self._clock_ns()), flights[0].copy
        stores, loads = self._both
        direction = loads if first.way in (CopyWay.LOAD, CopyWay.CLEAR) else stores
        # The one with fewer batches under way.
        stream = min(direction.batches, key=lambda each: len(direction.batches[each]))
        try:
            if first.after:
                self._wait_for(first.after, stream)
            # Before the launch: once it writes into staging memory, its end must be seen.
            batch.event = self._take_event()
            self._launch(flights, stream)
        except DeviceError as error:
            batch.reason = f"{HAS_FAILED}{error}"
        try:
            # After an error, too: what was given before it may still write.
            if batch.event >= 0:
                self._device.record(batch.event, stream)
                direction.batches[stream].append(batch)
                return
        except DeviceError as error:
            batch.reason = batch.reason or f"{HAS_FAILED}{error}"
            self._events.append(batch.event)
        self._close(batch, 0)

    def _slot(self, copy: BlockCopy) -> Bytes:
        return self._memory[copy.begin : copy.begin + self.block_bytes(copy.group)]

    def _source(self, flight: CopyFlight) -> Bytes:
        """The host's end of a copy: the slot, or the staging memory in its place."""
        if flight.staging is None:
            return self._slot(flight.copy)
        return flight.staging.data[: self.block_bytes(flight.copy.group)]

    def _launch(self, flights: list[CopyFlight], stream: int) -> None:
        first, group, moves = flights[0].copy, flights[0].copy.group, self.moves
        cache = self._caches[group]
        pages = cache.places([flight.copy.block_id for flight in flights])
        found = (flight.digests for flight in flights)
        digests = np.array([place.address for place in found if place is not None], np.uint64)
        if first.way is CopyWay.CLEAR:
            self._device.clear(stream, pages.ravel(), np.tile(cache.sizes, len(flights)))
            return
        if first.slab_begin >= 0:
            assert self._slab_address, "a load from a slab that is not mapped"
            begins = np.array([flight.copy.slab_begin for flight in flights], np.uint64)
            places = np.uint64(self._slab_address) + begins
            moves.load_within(stream, group, pages, places, digests)
            if flights[0].staging is None:
                return
        # Bytes of a slab that the device cannot hash are read back.
        is_load = first.way is CopyWay.LOAD and first.slab_begin < 0
        ends = (
            flight.staging.address if flight.staging else moves.slots_begin + flight.copy.begin
            for flight in flights
        )
        slots = np.fromiter(ends, np.uint64, len(flights))
        (moves.load if is_load else moves.store)(stream, group, pages, slots, digests)

    # ── their ends ───────────────────────────────────────────────────────────────────────────────

    def ended(self) -> list[CopyEnd]:
        self._give()
        for direction in self._both:
            for batches in direction.batches.values():
                while batches and self._take_batch(batches, direction):
                    pass
        ends, self._ends = self._ends, []
        return ends

    def _take_batch(self, batches: deque[FlightBatch], direction: CopyDirection) -> bool:
        """Report the first batch, if it has ended. Returns whether it had."""
        batch = batches[0]
        try:
            if not self._device.has_happened(batch.event):
                if batch.after and not self._has_passed(batch.after):
                    batch.begun_ns = self._clock_ns()
                else:
                    batch.after = 0
                return False
            self._events.append(batch.event)
        except DeviceError as error:
            batch.reason = batch.reason or f"{HAS_FAILED}{error}"
        batches.popleft()
        now_ns = self._clock_ns()
        served_ns = now_ns - max(batch.begun_ns, direction.served_ns)
        direction.served_ns = now_ns
        self._close(batch, served_ns // len(batch.flights))
        return True

    def _close(self, batch: FlightBatch, duration_ns: int) -> None:
        """Report the ends of its copies, and give back what they held."""
        for flight in batch.flights:
            copy = flight.copy
            if batch.reason:
                self._ends.append(CopyEnd(copy.number, reason=batch.reason))
            elif copy.way is CopyWay.COMPARE:
                error = self._error(flight)
                is_other = error > BOUNDS[self._caches[copy.group].values]
                self._ends.append(CopyEnd(copy.number, b"", error, is_other, duration_ns))
            else:
                checksum = self._checksum(flight)
                self._ends.append(CopyEnd(copy.number, checksum, duration_ns=duration_ns))
            if flight.staging is not None:
                self._own.staging.append(flight.staging)
            if flight.digests is not None:
                self._own.digests.append(flight.digests)
        batch.end_range()

    def _checksum(self, flight: CopyFlight) -> bytes:
        header = flight.copy.header
        if flight.digests is not None:
            count = piece_count(self.block_bytes(flight.copy.group))
            return root_of(header, flight.digests.data[: CHECKSUM_BYTES * count].data)
        return checksum_of(header, [self._source(flight).data]) if flight.is_hashed else b""

    def _error(self, flight: CopyFlight) -> float:
        cache, slot = self._caches[flight.copy.group], self._slot(flight.copy)
        computed, parts = self._source(flight), cache.compared.values()
        return error_of(
            [computed[part] for part in parts], [slot[part] for part in parts], values=cache.values
        )

    def close(self) -> None:
        with self._marking:  # the engine's thread takes marks until its end
            if self._closed:
                return
            self._closed = True
            self._events.clear()
            self._marks.clear()
        if self._is_busy:
            return  # the memory that a device still writes goes with the process
        self._pins.close()
        with contextlib.suppress(DeviceError):
            self.moves.close()
            self.map_slab(None)
            self._device.unpin(self._own.address)
            self._device.close()
