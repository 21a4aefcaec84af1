"""Copies between slots and a cache in the host's own memory: each has ended when `begin` returns.

The reference of `kvstore.ports.CopyEngine`. Bytes are moved by `pack.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.kernels.compare import BOUNDS
from kvstore.kernels.pack import PagedCache
from kvstore.kernels.reference import Bytes
from kvstore.ports import BlockCopy, CopyEnd, CopyWay
from kvstore.wire.layout import Slab

NOT_COMPARABLE = "values of this type cannot be compared"


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
