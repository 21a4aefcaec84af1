"""Ways of a block between the pages of a device's cache and its slot, chosen by size.

    COPY     page ─▶ slot, page ─▶ slot, …     one batch of the copy engines, an entry a piece
    MOVE     pages ─▶ slot                     one kernel, straight to or from pinned memory
    STAGED   pages ─▶ staging ─▶ slot          a kernel within the device, one large copy

A copy engine pays for each entry, a kernel keeps multiprocessors of the engine busy for as long as
PCIe takes. Staging does both at their best, at the price of a second step and of memory on the
device: a batch of blocks for each stream. On one stream a step begins when the one before has
ended, so staging blocks are free again for the next batch without anybody looking. A batch of
blocks takes as many calls as one block.

Where kernels cannot be had (no compiler, no machine code for this device), COPY is right for all
sizes, and slower. Does not cover: when a block may be copied (`device.py`), grids (`launches.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvstore.kernels.caches import Addresses
    from kvstore.kernels.device import Device


STAGED_ALIGNMENT: Final = 256
"""Blocks in staging memory begin at a multiple."""


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
        *,
        batch_max: int = 1,
    ) -> None:
        """
        Args:
            streams: those that blocks are moved on.
            sizes: of the pieces of a block, by KV cache group.
            batch_max: blocks of one call at most.
        """
        self.batch_max = batch_max
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
        self._staging_bytes = np.uint64(-(-max(staged, default=0) // STAGED_ALIGNMENT))
        self._staging_bytes *= np.uint64(STAGED_ALIGNMENT)
        if staged and not self.trouble:
            for stream in streams:
                self._staging[stream] = device.allocate(batch_max * int(self._staging_bytes))

    def way(self, stream: int, group: int) -> Strategy:
        """The way of the group's blocks on this stream."""
        way = self._ways[group]
        if way is Strategy.COPY or self.trouble:
            return Strategy.COPY
        has_staging = self._staging[stream] != 0
        return way if has_staging else Strategy.MOVE

    def store(
        self, stream: int, group: int, pages: Addresses, slots: Addresses, offsets: Addresses
    ) -> None:
        """Blocks, at most `batch_max`, go from pages into the memory of slots.

        Args:
            pages: [block][piece].
            slots: their addresses, pinned.
            offsets: of the pieces in a slot, which they fill.
        """
        way, ends = self.way(stream, group), slots[:, None] + offsets
        if way is not Strategy.STAGED:
            self._pieces(way, stream, group, ends, pages)
            return
        staging = self._staged(stream, len(slots))
        self._pieces(Strategy.MOVE, stream, group, staging[:, None] + offsets, pages)
        self._whole(stream, group, slots, staging)

    def load(
        self, stream: int, group: int, pages: Addresses, slots: Addresses, offsets: Addresses
    ) -> None:
        """The other way round; arguments as of `store`."""
        way, ends = self.way(stream, group), slots[:, None] + offsets
        if way is not Strategy.STAGED:
            self._pieces(way, stream, group, pages, ends)
            return
        staging = self._staged(stream, len(slots))
        self._whole(stream, group, staging, slots)
        self._pieces(Strategy.MOVE, stream, group, pages, staging[:, None] + offsets)

    def within(self, stream: int, group: int, targets: Addresses, sources: Addresses) -> None:
        """Pieces of blocks [block][piece] within the device's memory. A kernel is as quick as the
        memory there: nothing is staged."""
        way = self.way(stream, group)
        way = Strategy.MOVE if way is Strategy.STAGED else way
        self._pieces(way, stream, group, targets, sources)

    def _pieces(
        self, way: Strategy, stream: int, group: int, targets: Addresses, sources: Addresses
    ) -> None:
        verb = self._device.move if way is Strategy.MOVE else self._device.copy
        sizes = np.tile(self._sizes[group], len(targets))
        verb(stream, targets.ravel(), sources.ravel(), sizes)

    def _staged(self, stream: int, count: int) -> Addresses:
        """Places of so many blocks in the stream's staging memory."""
        assert count <= self.batch_max, f"{count} blocks in one go"
        first = np.uint64(self._staging[stream])
        return first + self._staging_bytes * np.arange(count, dtype=np.uint64)

    def _whole(self, stream: int, group: int, targets: Addresses, sources: Addresses) -> None:
        """One copy of each block."""
        sizes = np.repeat(self._block_bytes[group], len(targets))
        self._device.copy(stream, targets, sources, sizes)

    def close(self) -> None:
        """Give staging memory back; nothing is under way."""
        for stream, staging in self._staging.items():
            if staging:
                self._device.free(staging)
                self._staging[stream] = 0
