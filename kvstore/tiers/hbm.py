"""The hbm tier: a slab of a GPU's memory that belongs to the node, shared with ranks on that GPU.

    Promote ─▶ thread: dram ─▶ staging ─▶ slab ─▶ staging, hashed ─▶ Promoted ─▶ `show`
                                 batches, on a stream of low priority

Blocks in it are copies of blocks in dram, found by their slots there, in a page of places
(`kvstore.wire.space`): so the slab is new with each process of the node, and nothing is lost with
it. A copy is shown after its bytes were read back and are those that were stored.

Staging memory is the tier's own: pages of dram may be given back to the kernel by an engine, which
a device that has them pinned would not survive. A device that fails or hangs takes all places with
it. Does not cover: which blocks (`kvstore.engine.moves.hbm`), reading (`kernels.device`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore import arena
from kvstore.errors import ConfigError
from kvstore.kernels.cuda import CudaDevice
from kvstore.kernels.port import Device, DeviceError
from kvstore.mailbox import Mailbox
from kvstore.ports import Memory
from kvstore.tier_events import Promote, Promoted
from kvstore.types import (
    PAGE_BYTES,
    PAGES_PER_GENERATION,
    SLOT_BYTES_MIN,
    Incarnation,
    SlotId,
)
from kvstore.units import MIB, format_size
from kvstore.wire.record import checksum_of
from kvstore.wire.space import Slab, place_words

STAGING_BYTES: Final = 4 * MIB
"""Size of staging memory at first; it grows to twice a batch."""
BATCH_MAX: Final = 8
BATCH_BYTES: Final = 16 * MIB
"""Blocks that are promoted in one go, unless one is larger: each costs two turns of the device."""
LOOK_S: Final = 0.000_1
ROOM_LOOK_S: Final = 0.1
DEVICE_S_MAX: Final = 10.0
"""Longest wait for the end of copies: one that takes longer will not end."""
NO_ROOM: Final = "it has no room for that: choose a smaller --hbm or --gpu-memory-utilization"
_ADVICE: Final = {
    "cudaErrorInsufficientDriver": "no NVIDIA driver for CUDA 13 is found: install one, or start"
    " the container with the NVIDIA runtime",
    "cudaErrorNoDevice": "no GPU is visible: start the container with the NVIDIA runtime",
    "cudaErrorInvalidDevice": "there is no such GPU: choose another with --hbm SIZE,gpu=N",
}
"""Ways to mend an error, by the name of CUDA's error, which itself names none."""

_log = logging.getLogger(__name__)


class HbmTier:
    """Copies of blocks of dram in device memory. All but `slab` and `page_fd` is the loop's."""

    def __init__(
        self,
        device: Device,
        dram: Memory,
        *,
        capacity_bytes: int,
        incarnation: Incarnation,
        room_s_max: float = 0.0,
    ) -> None:
        """`room_s_max`: how long to wait for the memory.

        Raises:
            DeviceError: the device has no such memory.
        """
        assert capacity_bytes % SLOT_BYTES_MIN == 0, capacity_bytes
        self._device = device
        self._dram = dram
        self.capacity_bytes = capacity_bytes
        self._pause = threading.Event()
        """Never set, only waited for between looks at the device, which signals nothing by
        itself."""
        self._stream, self._event = device.stream(is_urgent=False), device.event()
        self._staging = np.empty(0, np.uint8)
        self._address = 0
        try:
            self._address = self._allocate(room_s_max)
            self.slab = Slab(device.name, capacity_bytes, device.share(self._address))
            self._stage(STAGING_BYTES)
            # Bytes of whoever had this memory before are nobody's business.
            device.clear(self._stream, *np.array([[self._address], [capacity_bytes]], np.uint64))
            self._finish()
        except DeviceError:
            self._free()
            raise
        self.page_bytes = arena.generation_page_bytes(dram.capacity_bytes)
        self.page_fd, words = arena.make_page(self.page_bytes, incarnation, "kvstore-places")
        self._places = words[PAGE_BYTES // 8 :]
        count = capacity_bytes // SLOT_BYTES_MIN
        self._generations = np.ones(count, np.uint64)
        self._shown_at = np.full(count, -1, np.int64)
        """Number of the word, in the page of places, that shows each slot; -1: none does."""
        self.trouble = ""
        """Why the device is no longer used; empty: it is."""
        self._orders: queue.SimpleQueue[Promote | None] = queue.SimpleQueue()
        self._events = Mailbox[Promoted]()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hbm", daemon=True)
        self._thread.start()

    # ── places ───────────────────────────────────────────────────────────────────────────────────

    def raise_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Take back the places of these slots; later copies in them have these generations."""
        words, values = self._words(slots), np.asarray(generations, np.uint64)
        assert words.shape == values.shape, "one generation per slot"
        assert (values >= self._generations[words]).all(), "a generation never goes back"
        shown_at = self._shown_at[words]
        self._places[shown_at[shown_at >= 0]] = 0
        self._shown_at[words] = -1
        self._generations[words] = values

    def show(self, dram_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Publish that `slots` hold copies of the blocks in `dram_slots`, until their generations
        are raised."""
        words, at = self._words(slots), np.asarray(dram_slots, np.int64) // PAGES_PER_GENERATION
        assert (self._shown_at[words] < 0).all(), "a slot is shown twice"
        assert (self._places[at] == 0).all(), "a block has two copies"
        self._shown_at[words] = at
        self._places[at] = place_words(np.asarray(slots, np.uint32), self._generations[words])
        if self.trouble:  # set before all places are taken back, and looked at after this
            self._places[at] = 0

    def _words(self, slots: Sequence[int]) -> NDArray[np.int64]:
        words = np.asarray(slots, np.int64) // PAGES_PER_GENERATION
        assert not words.size or int(words.max()) < len(self._generations), "outside the tier"
        return words

    def close(self) -> None:
        """Give the memory back. Promotions under way end first. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._places[:] = 0
        self._orders.put(None)
        self._thread.join()
        if not self.trouble:  # of a device that hangs the process's end does it
            self._free()
        self._places = np.empty(0, np.uint64)
        os.close(self.page_fd)
        self._events.close()

    # ── moves ────────────────────────────────────────────────────────────────────────────────────

    def submit(self, order: Promote) -> None:
        """Copy blocks of dram here. Each order gives one Promoted."""
        self._orders.put(order)

    def fileno(self) -> int:
        """Readable while `take_events` has something."""
        return self._events.fileno()

    def take_events(self) -> Iterator[Promoted]:
        """Ends of orders. Each is taken when it is asked for; those that are not stay."""
        return self._events.take()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            most = max(1, min(BATCH_MAX, BATCH_BYTES // order.scope.block_bytes))
            begins = range(0, len(order.slots), most)
            good = b"".join(bytes(self._promoted(order, at, at + most)) for at in begins)
            self._events.put(Promoted(order.job, good, self.trouble))

    def _promoted(self, order: Promote, begin: int, end: int) -> Iterator[bool]:
        """Copy blocks [begin, end) of an order here. Yields for each whether it is here, byte by
        byte."""
        prefix, size = order.scope.prefix(), order.scope.block_bytes
        sources, targets = order.slots[begin:end].tolist(), order.targets[begin:end]
        found = None if self._closed else self._promote(sources, targets, size)
        for n in range(len(sources)):
            wanted, header = order.checksum(begin + n), prefix + order.key(begin + n)
            yield found is not None and wanted == checksum_of(
                header, [found[n * size : (n + 1) * size]]
            )

    def _promote(
        self, sources: Sequence[int], targets: NDArray[np.uint32], size: int
    ) -> memoryview | None:
        """Copy blocks of `size` bytes from slots of dram into slots of the slab, which nobody reads
        yet. Returns their bytes, read back from the slab; None: the device failed."""
        whole = len(sources) * size
        if self.trouble:
            return None
        try:
            self._stage(2 * whole)
            # Not where they are read back to: what never arrived would be found there.
            for n, source in enumerate(sources):
                begin = whole + n * size
                self._dram.read(SlotId(source), self._staging.data[begin : begin + size])
            first = np.uint64(self._staging.ctypes.data)
            steps = np.uint64(size) * np.arange(len(sources), dtype=np.uint64)
            places = np.uint64(self._address) + targets.astype(np.uint64) * PAGE_BYTES
            self._copy(places, first + np.uint64(whole) + steps, size)
            self._copy(first + steps, places, size)
            self._finish()
        except DeviceError as error:
            self._fail(error)
            return None
        return self._staging.data[:whole]

    # ── the device ───────────────────────────────────────────────────────────────────────────────

    def _stage(self, size_bytes: int) -> None:
        """Make staging memory at least `size_bytes` large."""
        if len(self._staging) < size_bytes:
            if len(self._staging):
                before, self._staging = self._staging, np.empty(0, np.uint8)
                self._device.unpin(int(before.ctypes.data))
            # Whole pages, none of which is pinned twice.
            staging = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
            self._device.pin(int(staging.ctypes.data), size_bytes)
            self._staging = staging

    def _allocate(self, room_s_max: float) -> int:
        """Address of the slab. After a crash engines hold the one before for a moment."""
        end_s = time.monotonic() + room_s_max
        while not (address := self._device.allocate(self.capacity_bytes)):
            if time.monotonic() >= end_s:
                raise DeviceError(NO_ROOM)
            self._pause.wait(ROOM_LOOK_S)
        return address

    def _free(self) -> None:
        with contextlib.suppress(DeviceError):
            if len(self._staging):
                self._device.unpin(int(self._staging.ctypes.data))
            if self._address:
                self._device.free(self._address)
            self._device.close()

    def _copy(self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], size: int) -> None:
        self._device.copy(self._stream, targets, sources, np.full(len(targets), size, np.uint64))

    def _finish(self) -> None:
        """Wait for the end of all copies that were ordered. Raises DeviceError: it takes longer
        than DEVICE_S_MAX."""
        self._device.record(self._event, self._stream)
        end_s = time.monotonic() + DEVICE_S_MAX
        while not self._device.has_happened(self._event):
            if time.monotonic() > end_s:
                raise DeviceError(f"it did not end a copy within {DEVICE_S_MAX:.0f} s")
            self._pause.wait(LOOK_S)

    def _fail(self, error: DeviceError) -> None:
        if not self.trouble:
            self.trouble = str(error)
            self._places[:] = 0
            _log.error("the hbm tier is off until the node is restarted: %s", error)


@contextlib.contextmanager
def device_for_hbm(ordinal: int, capacity_bytes: int) -> Iterator[Device]:
    """A CUDA device, for a tier that the block makes.

    Raises:
        ConfigError: there is no such device, or it has no such memory.
    """
    try:
        yield CudaDevice(ordinal, engine_stream=lambda: 0)
    except DeviceError as error:
        advice = _ADVICE.get(str(error).rpartition(" ")[2])
        raise ConfigError(
            f"hbm of {format_size(capacity_bytes)} cannot be had on GPU {ordinal}:"
            f" {f'{advice} ({error})' if advice else error}; or leave --hbm out"
        ) from None
