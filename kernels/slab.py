"""Loads from the node's slab on the same GPU, and checksums of what arrived, made there.

    slab ─▶ pages ─gather─▶ staging ─3 kernels─▶ digests ─▶ 16 bytes a piece over the bus ─▶ root

Bytes to hash are read from the engine's pages after the copy, by the same stream: so the checksum
is that of the bytes that the request will read, whichever step lost some of them. Staging memory
has room for the sums and digests of one block, since a stream does one thing after the other.
Without kernels, or without that room, blocks are read back over the bus and hashed by the host.

Does not cover: when a block may be loaded (`device.py`), which (`tiers.hbm`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.kernels.caches import DeviceCache
from kvstore.kernels.launches import sums_bytes
from kvstore.kernels.reference import Bytes
from kvstore.kernels.strategy import BlockMoves
from kvstore.ports import BlockCopy
from kvstore.types import CHECKSUM_BYTES
from kvstore.wire.checksum import piece_count, root_of
from kvstore.wire.layout import Slab

if TYPE_CHECKING:
    from kvstore.kernels.device import Device

ALIGNMENT: Final = 256
"""Each part of the memory for checksums begins at a multiple; kernels ask for 16."""
_NO_ROOM: Final = "the device has no memory left for their checksums"
_log = logging.getLogger("vllm.kvstore.kernels")


class MappedSlab:
    """See the module. Calls about streams wait for nothing, the others may. All raise
    DeviceError."""

    def __init__(self, device: Device, moves: BlockMoves, caches: Sequence[DeviceCache]) -> None:
        self._device, self._moves, self._caches = device, moves, caches
        self._address = 0
        """Address of the slab; 0: none is mapped."""
        self._staging = 0
        """Address of the memory for checksums; 0: there is none."""
        size = max(cache.block_bytes for cache in caches)
        self._sums_at = _aligned(size)
        self._digests_at = self._sums_at + _aligned(sums_bytes(1, size))
        self._room_bytes = self._digests_at + _aligned(CHECKSUM_BYTES * piece_count(size))
        self._said = ""
        """Why blocks are read back, as last logged."""

    def map(self, slab: Slab | None) -> None:
        """Use this slab, or none, from now on. Nothing is under way."""
        if self._address:
            address, self._address = self._address, 0
            self._device.leave(address)
        if self._staging:
            staging, self._staging = self._staging, 0
            self._device.free(staging)
        if slab is not None:
            self._address = self._device.open(slab.handle)
            trouble = self._device.digest_trouble()
            if not trouble:
                self._staging = self._device.allocate(self._room_bytes)
            self._say("" if self._staging else trouble or _NO_ROOM)

    def _say(self, trouble: str) -> None:
        """One log line a reason, not one an attachment."""
        if trouble and trouble != self._said:
            _log.warning("kvstore: blocks from hbm are read back to be verified: %s", trouble)
        self._said = trouble

    @property
    def makes_sums(self) -> bool:
        """Whether `sum` may be called. Stays as it is while a slab is mapped."""
        return self._staging != 0

    def load(self, stream: int, group: int, block: int, begin: int) -> None:
        """Copy a block from its place in the slab into its pages."""
        assert self._address, "a load from a slab that is not mapped"
        cache = self._caches[group]
        pages, ends = cache.places(block), np.uint64(self._address + begin) + cache.offsets
        self._moves.within(stream, group, pages, ends)

    def sum(self, stream: int, group: int, block: int, into: int) -> None:
        """Leave the digests of a block's pieces, as its pages hold them, in pinned memory."""
        cache, staging = self._caches[group], self._staging
        self._moves.within(stream, group, np.uint64(staging) + cache.offsets, cache.places(block))
        size, found = cache.block_bytes, staging + self._digests_at
        self._device.digest(stream, staging, size, sums=staging + self._sums_at, found=found)
        ends = (into, found, CHECKSUM_BYTES * piece_count(size))
        self._device.copy(stream, *(np.array([end], np.uint64) for end in ends))

    def root(self, copy: BlockCopy, memory: Bytes) -> bytes:
        """The checksum of a block, of the digests that are in that memory now."""
        count = piece_count(self._caches[copy.group].block_bytes)
        return root_of(copy.header, memory[: CHECKSUM_BYTES * count].data)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
