"""Ways of blocks between the pages of a device's cache and slots, with their checksums.

    STAGED       pages ─kernel─▶ room ─one copy a block─▶ slot      (loads: the other way round)
    BY PIECES    page ─▶ slot, page ─▶ slot, …                      an entry of a copy each

    checksum     pages ─kernel─▶ room ─3 kernels─▶ digests ─16 bytes a piece of 512 KiB─▶ host

A copy engine pays for each entry, a kernel that reaches over the bus keeps multiprocessors of the
engine busy for as long as PCIe takes: so kernels work within the device, and whole blocks cross the
bus. Checksums are made of the engine's pages, of a store before its copy, of a load behind it:
changes of the host's memory in between, such as pages that another engine gave back to the kernel
under a DMA, are found and never sealed as right. A block that is one aligned run of bytes is
hashed in place.

A room is memory of the device's for the blocks of one call, and of one stream, which does one
thing after the other; while a block of one stream is hashed, another stream copies.

Without kernels or memory for rooms, blocks go piece by piece, and the host hashes slots. Host
memory is registered in chunks, and CUDA refuses a copy whose host side lies in two registrations
(`pinning.cut`). Does not cover: when a block may be copied (`device.py`), grids (`launches.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.kernels.launches import sums_bytes
from kvstore.kernels.pinning import cut
from kvstore.kernels.port import Addresses, Device, DeviceCache
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.record import piece_count

BATCH_MAX: Final = 16
"""Blocks of one call at most. A call costs the host some ten microseconds whatever it moves."""
ROOM_BYTES: Final = 32 << 20
"""Payload of a room, unless one block is larger: at 50 GB/s 0.6 ms, long against a call's cost."""
ALIGNMENT: Final = 256
"""Parts of a room begin at multiples of this many bytes; kernels ask for 16."""
NO_ROOM: Final = "the device has no memory left for that"


class _Room(NamedTuple):
    """Offsets of the parts of a room, for the blocks of one KV cache group."""

    block_count: int
    block_bytes: int
    sums_at: int
    digests_at: int
    end: int


class BlockMoves:
    """Gives a device's streams the copies and kernels that move and hash blocks. Never waits."""

    def __init__(
        self,
        device: Device,
        streams: Collection[int],
        caches: Sequence[DeviceCache],
        *,
        by_pieces: bool = False,
    ) -> None:
        """
        Args:
            streams: those that blocks are moved on.
            caches: by KV cache group.
            by_pieces: without kernels even where there are some.

        Raises:
            DeviceError: the device failed.
        """
        self._device, self._caches = device, caches
        self.slots_begin = 0
        """Address from which slots are registered in chunks."""
        self._layouts = [_room_of(cache) for cache in caches]
        self.room_bytes = max(layout.end for layout in self._layouts)
        """Memory of the device for each stream."""
        self._rooms: dict[int, int] = {}
        """Address of a stream's room."""
        self.trouble = device.kernel_trouble() if not by_pieces else ""
        """Why blocks go piece by piece although they should not; empty: they do not."""
        self.is_staged = not by_pieces and not self.trouble
        """Whether kernels move and hash blocks."""
        try:
            for stream in streams if self.is_staged else ():
                self._rooms[stream] = device.allocate(self.room_bytes)
        except Exception:
            self.close()
            raise
        if not all(self._rooms.values()):
            self.close()
            self.trouble, self.is_staged = NO_ROOM, False

    def batch_max(self, group: int) -> int:
        """How many of a group's blocks go in one call."""
        return self._layouts[group].block_count

    def store(
        self, stream: int, group: int, pages: Addresses, slots: Addresses, digests: Addresses
    ) -> None:
        """Blocks, at most `batch_max`, go from pages into the memory of slots.

        Args:
            pages: [block][piece] addresses, as of `DeviceCache.places`.
            slots: [block] addresses in pinned memory.
            digests: [block] addresses in pinned memory, where the digests of the pages are left
                (`wire.record`); empty: none are made. Only where `is_staged`.
        """
        if digests.size:
            self.hash(stream, group, pages, digests)
        if not self.is_staged or pages.shape[1] == 1:
            self._copy_pieces(stream, group, pages, slots, is_store=True)
            return
        if not digests.size:
            self._gather(stream, group, pages)
        self._copy(stream, group, slots, self._payloads(stream, group, len(slots)), host=slots)

    def load(
        self, stream: int, group: int, pages: Addresses, slots: Addresses, digests: Addresses
    ) -> None:
        """Move blocks from the memory of slots into pages; arguments as of `store`. Digests are
        those of the pages afterwards."""
        if not self.is_staged or pages.shape[1] == 1:
            self._copy_pieces(stream, group, pages, slots, is_store=False)
        else:
            room = self._payloads(stream, group, len(slots))
            self._copy(stream, group, room, slots, host=slots)
            self._move(stream, group, pages, room[:, None] + self._caches[group].offsets)
        if digests.size:
            self.hash(stream, group, pages, digests)

    def load_within(
        self, stream: int, group: int, pages: Addresses, places: Addresses, digests: Addresses
    ) -> None:
        """As `load`, but from `places`: [block] addresses in the device's memory."""
        if self.is_staged:
            self._move(stream, group, pages, places[:, None] + self._caches[group].offsets)
        else:
            self._copy_pieces(stream, group, pages, places, is_store=False)
        if digests.size:
            self.hash(stream, group, pages, digests)

    def hash(self, stream: int, group: int, pages: Addresses, digests: Addresses) -> None:
        """Leave the digests of blocks, as their pages hold them now, in pinned memory. The room
        holds the blocks afterwards, unless they are runs of bytes already."""
        layout, room, count = self._layouts[group], self._rooms[stream], len(pages)
        if self._caches[group].is_aligned_run:
            payloads = pages.ravel()
        else:
            self._gather(stream, group, pages)
            payloads = self._payloads(stream, group, count)
        size = self._caches[group].block_bytes
        found = room + layout.digests_at
        self._device.digest(stream, payloads, size, sums=room + layout.sums_at, found=found)
        each = CHECKSUM_BYTES * piece_count(size)
        sources = np.uint64(found) + np.uint64(each) * np.arange(count, dtype=np.uint64)
        self._device.copy(stream, digests, sources, np.full(count, each, np.uint64))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _payloads(self, stream: int, group: int, count: int) -> Addresses:
        """Addresses of `count` blocks in the stream's room."""
        layout = self._layouts[group]
        assert count <= layout.block_count, f"{count} blocks in one go"
        step = np.uint64(layout.block_bytes)
        return np.uint64(self._rooms[stream]) + step * np.arange(count, dtype=np.uint64)

    def _gather(self, stream: int, group: int, pages: Addresses) -> None:
        room = self._payloads(stream, group, len(pages))
        self._move(stream, group, room[:, None] + self._caches[group].offsets, pages)

    def _move(self, stream: int, group: int, targets: Addresses, sources: Addresses) -> None:
        sizes = np.tile(self._caches[group].sizes, len(targets))
        self._device.move(stream, targets.ravel(), sources.ravel(), sizes)

    def _copy(
        self, stream: int, group: int, targets: Addresses, sources: Addresses, *, host: Addresses
    ) -> None:
        """One copy of each block; `host`: the side that is the host's."""
        sizes = np.full(len(targets), self._caches[group].block_bytes, np.uint64)
        self._device.copy(stream, *cut(targets, sources, sizes, host, self.slots_begin))

    def _copy_pieces(
        self, stream: int, group: int, pages: Addresses, slots: Addresses, *, is_store: bool
    ) -> None:
        cache = self._caches[group]
        sizes, places = np.tile(cache.sizes, len(pages)), pages.ravel()
        ends = (slots[:, None] + cache.offsets).ravel()
        targets, sources = (ends, places) if is_store else (places, ends)
        self._device.copy(stream, *cut(targets, sources, sizes, ends, self.slots_begin))

    def close(self) -> None:
        """Give rooms back; nothing is under way."""
        while self._rooms:
            _, room = self._rooms.popitem()
            if room:
                self._device.free(room)


def _room_of(cache: DeviceCache) -> _Room:
    """Places for as many blocks as one call moves, the scratch and the digests of their hashes."""
    size, block = cache.block_bytes, _aligned(cache.block_bytes)
    count = max(1, min(BATCH_MAX, ROOM_BYTES // block))
    sums_at = 0 if cache.is_aligned_run else count * block
    digests_at = sums_at + _aligned(sums_bytes(count, size))
    end = digests_at + _aligned(count * CHECKSUM_BYTES * piece_count(size))
    return _Room(count, block, sums_at, digests_at, end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
