"""Copies of whole blocks between slots and a cache in the host's own memory, on one CPU core.

    layer 0   │page 0│page 1│page 2│ …          slot of block 1
    layer 1   │page 0│page 1│page 2│ …   ⇄      │page 1 of layer 0│page 1 of layer 1│ … │
    …

`HostCopies` is the reference of `kvstore.ports.CopyEngine`: a copy has ended when `begin` returns.

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

**Comparing** a block with a slot looks at numbers, not bytes: the same tokens computed twice do not
give the same bytes, since batches of another composition add in another order. Another model, or
other tokens, give entirely different numbers. `error_of`, which devices use as well, is the
distance of two blocks over the norm of the larger, the maximum over layers: 0 for equal blocks,
about 1.4 for unrelated ones.

    error = max over layers of   ‖ computed - cached ‖ / max(‖ computed ‖, ‖ cached ‖)

Both sides have the layout of one space, so they are compared element by element, in whatever order
a page is packed. A value that is finite on one side only makes the error infinite.

Does not cover: other devices, other shards than the engine's own, generations; when comparing,
whether the bytes of the slot are those that were stored (checksums).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvstore.kernels.port import Bytes, DeviceCache, LayerPages
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.wire.record import checksum_of
from kvstore.wire.space import Slab

BOUNDS: Final = {"float32": 1e-2, "float16": 0.2, "bfloat16": 0.2}
"""Up to this error a block is taken for the same, by the type of its values. See ADR 7."""
NOT_COMPARABLE = "values of this type cannot be compared"
COPY_BYTES = 256 << 10
"""Bytes copied and hashed in one go: fits the second-level cache of any server core, with room."""

_Piece = tuple[NDArray[np.uint8], int, int]
"""View [block_count, pages, bytes] of the cache, and its begin and end in a slot."""


class PagedCache(DeviceCache):
    """A rank's KV cache in the host's own memory, as arrays of bytes.

    Not synchronised: callers copy a block in one thread at a time, without another writer.
    """

    def __init__(
        self, layers: Sequence[Bytes], *, uncompared: Collection[int] = (), values: str = ""
    ) -> None:
        """Args:
        layers: per layer, in model order, [block_count, page_bytes] u8, writable; bytes of a page
            are contiguous, everything else is free.
        uncompared, values: as of `DeviceCache`.

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
        pages = [LayerPages(_address(each), each.strides[0], each.shape[1]) for each in layers]
        super().__init__(pages, len(layers[0]), uncompared=uncompared, values=values)
        self.layers = tuple(layers)  # keeps every allocation alive: a run may span several
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
        """Distance of a block from the slot's (`error_of`); copies nothing."""
        self._check(block, slot)
        computed = [self.layers[place][block] for place in self.compared]
        cached = [slot[part] for part in self.compared.values()]
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


class HostCopies:
    """See the module, and the port for the methods."""

    copies_max = 1
    trouble = gpu = ""
    pinned_bytes = 0

    def __init__(self, caches: Sequence[PagedCache]) -> None:
        """`caches`: by KV cache group."""
        self._caches = caches
        self._memory: Bytes | None = None
        self._ends: list[CopyEnd] = []

    def block_bytes(self, group: int) -> int:
        return self._caches[group].block_bytes

    def attach(self, memory: Bytes, ready_bytes: Callable[[], int]) -> None:
        self._memory = memory

    def pin_ahead(self, end: int) -> None:
        """Does nothing: a CPU copies memory that is not pinned."""

    def map_slab(self, slab: Slab | None) -> str:
        return "the cache is on no GPU" if slab is not None else ""

    def mark(self) -> int:
        return 0

    def begin(self, copy: BlockCopy) -> None:
        begin_ns = time.perf_counter_ns()
        try:
            end = self._moved(copy)
        except BaseException:
            if copy.way is CopyWay.LOAD:
                self._caches[copy.group].clear(copy.block_id)
            raise
        self._ends.append(end._replace(duration_ns=time.perf_counter_ns() - begin_ns))

    def _moved(self, copy: BlockCopy) -> CopyEnd:
        assert self._memory is not None, "no memory of slots"
        cache, end = self._caches[copy.group], CopyEnd(copy.number)
        slot = self._memory[copy.begin : copy.begin + cache.block_bytes]
        match copy.way:
            case CopyWay.STORE:
                end = end._replace(checksum=cache.store(copy.block_id, slot, copy.header))
            case CopyWay.LOAD if copy.is_verified:
                end = end._replace(checksum=cache.load_checked(slot, copy.block_id, copy.header))
            case CopyWay.LOAD:
                cache.load(slot, copy.block_id)
            case CopyWay.CLEAR:
                cache.clear(copy.block_id)
            case CopyWay.COMPARE if cache.values:
                error = cache.error(copy.block_id, slot)
                end = end._replace(error=error, diverged=error > BOUNDS[cache.values])
            case CopyWay.COMPARE:
                end = end._replace(reason=NOT_COMPARABLE)
        return end

    def ended(self) -> list[CopyEnd]:
        ends, self._ends = self._ends, []
        return ends

    def close(self) -> None:
        self._memory = None


# ── comparing ─────────────────────────────────────────────────────────────────────────────────────

_Floats = NDArray[np.float32]


def _of_bfloat16(page: Bytes) -> _Floats:
    """Values of a page of bfloat16, each of which is the upper half of a float32."""
    return (page.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


_READERS: Final[dict[str, Callable[[Bytes], _Floats]]] = {
    "float32": lambda page: page.view(np.float32),
    "float16": lambda page: page.view(np.float16).astype(np.float32),
    "bfloat16": _of_bfloat16,
}


def error_of(computed: list[Bytes], cached: list[Bytes], *, values: str) -> float:
    """The error of a block, which is that of its worst layer.

    Args:
        computed: per layer, the page in the engine's cache, contiguous [page_bytes] u8.
        cached: per layer, the same part of the slot.
        values: type of the numbers in them, a key of BOUNDS.
    """
    read = _READERS[values]
    pairs = zip(computed, cached, strict=True)
    return max(_error(read(one), read(other)) for one, other in pairs)


def _error(one: _Floats, other: _Floats) -> float:
    """The error of one layer; infinite if a value is finite in one of the two only."""
    numbers = np.isfinite(one)
    if not np.array_equal(numbers, np.isfinite(other)):
        return math.inf
    if not numbers.all():
        one, other = one[numbers], other[numbers]
    # Scaled, so that no square overflows.
    scale = max(_largest(one), _largest(other))
    if scale == 0.0:
        return 0.0
    one, other = one / np.float32(scale), other / np.float32(scale)
    largest = max(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(one - other) / largest)


def _largest(values: _Floats) -> float:
    return float(np.abs(values).max(initial=0.0))
