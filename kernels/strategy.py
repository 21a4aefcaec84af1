"""Ways of a block between the pages of a device's cache and its slot, chosen by size.

    COPY     page ─▶ slot, page ─▶ slot, …     one batch of the copy engines, an entry a piece
    MOVE     pages ─▶ slot                     one kernel, straight to or from pinned memory
    STAGED   pages ─▶ staging ─▶ slot          a kernel within the device, one large copy

A copy engine pays for each entry, a kernel keeps multiprocessors of the engine busy for as long as
PCIe takes. Staging does both at their best, at the price of a second step and of memory on the
device: one block for each stream. On one stream a step begins when the one before has ended, so a
staging block is free again for the next block without anybody looking.

Where kernels cannot be had (no compiler, no machine code for this device), COPY is right for all
sizes, and slower. Does not cover: when a block may be copied (`device.py`), grids (`launches.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvstore.kernels.caches import Addresses
    from kvstore.kernels.device import Device


class Strategy(enum.Enum):
    """See the module."""

    COPY = "copy"
    MOVE = "move"
    STAGED = "staged"


class Thresholds(NamedTuple):
    """Sizes at which the ways change places. **Assumed**, from others' measurements, until
    `bench/micro/gpu_kernels.py` has run on a device."""

    copy_piece_bytes: int = 64 << 10
    """From this mean size of a piece on, copy engines reach their rate by themselves."""
    staged_block_bytes: int = 256 << 10
    """From this size of a block on, the second step costs less than the time of multiprocessors
    that it saves."""

    @classmethod
    def that_choose(cls, strategy: Strategy) -> Thresholds:
        """For blocks of several pieces, of any size: measurements and tests."""
        if strategy is Strategy.COPY:
            return cls(copy_piece_bytes=0)
        no_size = 1 << 62
        return cls(no_size, 0 if strategy is Strategy.STAGED else no_size)

    def chosen(self, sizes: Addresses) -> Strategy:
        """The way of blocks whose pieces have these sizes."""
        block_bytes = int(sizes.sum())
        if len(sizes) == 1 or block_bytes >= self.copy_piece_bytes * len(sizes):
            return Strategy.COPY
        is_large = block_bytes >= self.staged_block_bytes
        return Strategy.STAGED if is_large else Strategy.MOVE


class BlockMoves:
    """Gives a device's streams what moves a block, in the way that suits its pieces."""

    def __init__(
        self,
        device: Device,
        streams: Collection[int],
        sizes: Sequence[Addresses],
        thresholds: Thresholds,
    ) -> None:
        """
        Args:
            streams: those that blocks are moved on.
            sizes: of the pieces of a block, by KV cache group.
        """
        self._device = device
        self._sizes = sizes
        self._block_bytes = [each.sum(keepdims=True) for each in sizes]
        self._ways = [thresholds.chosen(each) for each in sizes]
        self.trouble = ""
        """Why blocks are copied piece by piece although another way suits them; empty: they are
        not."""
        self._staging = dict.fromkeys(streams, 0)
        """Address of a stream's staging memory; 0: it has none."""
        if any(way is not Strategy.COPY for way in self._ways):
            self.trouble = device.move_trouble()
        staged = [
            int(size[0])
            for way, size in zip(self._ways, self._block_bytes, strict=True)
            if way is Strategy.STAGED
        ]
        if staged and not self.trouble:
            for stream in streams:
                self._staging[stream] = device.allocate(max(staged))

    def way(self, stream: int, group: int) -> Strategy:
        """The way of the group's blocks on this stream."""
        way = self._ways[group]
        if way is Strategy.COPY or self.trouble:
            return Strategy.COPY
        has_staging = self._staging[stream] != 0
        return way if has_staging else Strategy.MOVE

    def store(
        self, stream: int, group: int, pages: Addresses, slot: int, offsets: Addresses
    ) -> None:
        """From pages, one an entry, into the memory of a slot.

        Args:
            slot: its address, pinned.
            offsets: of the pieces in the slot, which they fill.
        """
        way, sizes = self.way(stream, group), self._sizes[group]
        if way is not Strategy.STAGED:
            self._pieces(way, stream, np.uint64(slot) + offsets, pages, sizes)
            return
        staging = self._staging[stream]
        self._device.move(stream, np.uint64(staging) + offsets, pages, sizes)
        self._whole(stream, group, slot, staging)

    def load(
        self, stream: int, group: int, pages: Addresses, slot: int, offsets: Addresses
    ) -> None:
        """The other way round; arguments as of `store`."""
        way, sizes = self.way(stream, group), self._sizes[group]
        if way is not Strategy.STAGED:
            self._pieces(way, stream, pages, np.uint64(slot) + offsets, sizes)
            return
        staging = self._staging[stream]
        self._whole(stream, group, staging, slot)
        self._device.move(stream, pages, np.uint64(staging) + offsets, sizes)

    def within(self, stream: int, group: int, targets: Addresses, sources: Addresses) -> None:
        """Pieces of a block within the device's memory. A kernel is as quick as the memory there:
        nothing is staged."""
        way = self.way(stream, group)
        way = Strategy.MOVE if way is Strategy.STAGED else way
        self._pieces(way, stream, targets, sources, self._sizes[group])

    def _pieces(
        self, way: Strategy, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses
    ) -> None:
        verb = self._device.move if way is Strategy.MOVE else self._device.copy
        verb(stream, targets, sources, sizes)

    def _whole(self, stream: int, group: int, target: int, source: int) -> None:
        """One copy of a block."""
        ends = np.array([target], np.uint64), np.array([source], np.uint64)
        self._device.copy(stream, *ends, self._block_bytes[group])

    def close(self) -> None:
        """Give staging memory back; nothing is under way."""
        for stream, staging in self._staging.items():
            if staging:
                self._device.free(staging)
                self._staging[stream] = 0
