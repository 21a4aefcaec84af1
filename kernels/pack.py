"""Copies of whole blocks between an engine's paged cache and slots, on one CPU core.

    layer 0   │page 0│page 1│page 2│ …          slot of block 1
    layer 1   │page 0│page 1│page 2│ …   ⇄      │page 1 of layer 0│page 1 of layer 1│ … │
    …

Pages of different layers may differ in size. The checksum is made piece by piece, while the piece
is still in the core's own cache: over uncached memory it would cost as much as the copy. Its input
is the engine's side of the copy, which no other process can write, so a concurrent change of the
slot does not matter. Layers at equal distances, as in vLLM, are copied together; any other strides,
orders, paddings and allocations work too.

Measured (bench/micro/pack_speed.py, share of plain memcpy): pieces of 128 KiB 0.82, 256 KiB 0.83,
512 KiB 0.78, whole blocks of 2 MiB 0.69; libc's memcpy through ctypes is no faster than numpy's
copy, torch's strided `copy_` is slower. Copy and checksum run without the GIL. Larger pieces would
take it less often, which matters only beside a thread that is busy with pure Python, unlike a
forward pass.

Does not cover: other devices, other shards than the engine's own, generations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.kernels.compare import error_of
from kvstore.kernels.reference import Bytes
from kvstore.wire.record import checksum_of

COPY_BYTES = 256 << 10
"""Bytes copied and hashed in one go: fits the second-level cache of any server core, with room."""

_Piece = tuple[NDArray[np.uint8], int, int]
"""View [block_count, pages, bytes] of the cache, and its begin and end in a slot."""


class PagedCache:
    """A rank's KV cache as bytes: blocks of one page a layer.

    Not synchronised: callers copy a block in one thread at a time, without another writer.
    """

    def __init__(
        self, layers: Sequence[Bytes], *, uncompared: Collection[int] = (), values: str = ""
    ) -> None:
        """Args:
        layers: per layer, in model order, [block_count, page_bytes] u8, writable; bytes of a page
            are contiguous, everything else is free.
        uncompared: places of the layers that `error` leaves out.
        values: type of the numbers, a key of `compare.BOUNDS`; empty: `error` is not asked for.

        Raises:
            ValueError: layers that are no such thing, or differ in their number of blocks.
        """
        if len({layer.shape[0] for layer in layers if layer.ndim == 2}) != 1:
            raise ValueError("layers of a cache must be arrays [block_count, page_bytes]")
        for layer in layers:
            if layer.ndim != 2 or layer.dtype != np.uint8 or not layer.flags.writeable:
                raise ValueError("pages of a cache must be writable bytes")
            if layer.strides[1] != 1:
                raise ValueError("pages of a cache must be contiguous")
        self.values, self.uncompared = values, frozenset(uncompared)
        self.block_count = len(layers[0])
        self.layers = tuple(layers)  # keeps every allocation alive: a run may span several
        ends = np.cumsum([layer.shape[1] for layer in layers]).tolist()
        self.block_bytes = int(ends[-1])
        self._compared = [
            (layer, end - layer.shape[1], end)
            for place, (layer, end) in enumerate(zip(layers, ends, strict=True))
            if place not in uncompared
        ]
        self._runs = _runs(layers)
        self._pieces = [piece for run in self._runs for piece in _cut(run)]

    def store(self, block: int, slot: Bytes, header: bytes) -> bytes:
        """Copy a block into a slot.

        Args:
            block: its index in the cache.
            slot: contiguous, at least [block_bytes] u8; bytes beyond are left alone.
            header: bytes before the payload that the checksum covers.

        Returns: the 16 bytes of the checksum.
        """
        self._check(block, slot)
        return checksum_of(header, self._copied(block, slot, is_store=True))

    def load(self, slot: Bytes, block: int) -> None:
        """Copy a slot into a block; arguments as of `store`."""
        self._check(block, slot)
        for pages, begin, end in self._runs:
            np.copyto(pages[block], slot[begin:end].reshape(pages.shape[1:]))

    def load_checked(self, slot: Bytes, block: int, header: bytes) -> bytes:
        """`load`, and return the checksum of the bytes now in the block. The caller compares: on a
        difference they are of no use."""
        self._check(block, slot)
        return checksum_of(header, self._copied(block, slot, is_store=False))

    def clear(self, block: int) -> None:
        """Fill a block with zeros: attention multiplies masked values by 0, and NaN stays NaN."""
        assert 0 <= block < self.block_count, f"block {block} of {self.block_count}"
        for layer in self.layers:
            layer[block] = 0

    def error(self, block: int, slot: Bytes) -> float:
        """Distance of a block from the slot's (`compare.error_of`); copies nothing."""
        self._check(block, slot)
        computed = [layer[block] for layer, _, _ in self._compared]
        cached = [slot[begin:end] for _, begin, end in self._compared]
        return error_of(computed, cached, values=self.values)

    def _copied(self, block: int, slot: Bytes, *, is_store: bool) -> Iterator[memoryview]:
        """Copy a block piece by piece. Yields the bytes of its pages in the cache, in order, each
        once its piece is copied."""
        for pages, begin, end in self._pieces:
            own = pages[block]
            held = slot[begin:end].reshape(own.shape)
            target, source = (held, own) if is_store else (own, held)
            np.copyto(target, source)
            for page in own:
                yield page.data

    def _check(self, block: int, slot: Bytes) -> None:
        assert 0 <= block < self.block_count, f"block {block} of {self.block_count}"
        assert slot.size >= self.block_bytes, f"a slot of {slot.size} bytes"
        assert slot.strides == (1,), "a slot is contiguous"


def _runs(layers: Sequence[Bytes]) -> list[_Piece]:
    """Layers of one size joined as long as they lie at equal distances, in order."""
    runs: list[_Piece] = []
    first = begin = 0
    while first < len(layers):
        count, distance = 1, 0
        for here, after in zip(layers[first:], layers[first + 1 :], strict=False):
            step = _address(after) - _address(here)
            is_alike = after.shape == here.shape and after.strides == here.strides
            if not is_alike or (count > 1 and step != distance):
                break
            count, distance = count + 1, step
        (block_count, page_bytes), (block_stride, _) = layers[first].shape, layers[first].strides
        pages = as_strided(
            layers[first],
            shape=(block_count, count, page_bytes),
            strides=(block_stride, distance, 1),
        )
        runs.append((pages, begin, begin := begin + count * page_bytes))
        first += count
    return runs


def _cut(run: _Piece) -> list[_Piece]:
    """A run in pieces of at most COPY_BYTES: some whole pages, or a part of one."""
    pages, begin, _ = run
    _, count, page_bytes = pages.shape
    if page_bytes <= COPY_BYTES:
        step = COPY_BYTES // page_bytes
        parts = [pages[:, at : at + step] for at in range(0, count, step)]
    else:
        parts = [
            pages[:, page : page + 1, at : at + COPY_BYTES]
            for page in range(count)
            for at in range(0, page_bytes, COPY_BYTES)
        ]
    pieces = []
    for part in parts:
        end = begin + part.shape[1] * part.shape[2]
        pieces.append((part, begin, end))
        begin = end
    return pieces


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
