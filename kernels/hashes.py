"""Checksums of blocks while others are copied: by threads, or at once.

A core hashes some 14 GiB/s, a PCIe 5 link moves 50: on a machine with cores to spare several blocks
are hashed side by side, without the GIL, and the copy thread waits for none of them. One block is
hashed by one thread: enough blocks are under way to keep all of them busy. Handing a block over
takes the GIL twice, so with few cores blocks are hashed at once: 60 against 120 us for one of
640 KiB on two busy cores. `bench/micro/gpu_copies.py` measures both on a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from kvstore.kernels.reference import Bytes
from kvstore.wire.checksum import checksum_of

THREADS_MAX: Final = 4
SPARE_CORES_MIN: Final = 8
Hashing = Callable[[], bytes | None]
"""The checksum of a block that is being hashed; None: not yet."""


class Hashes(Protocol):
    """Makes checksums of blocks."""

    def begin(self, header: bytes, block: Bytes) -> Hashing:
        """Hash a block, whose bytes stay until the checksum is there."""
        ...

    def close(self) -> None:
        """End, after what was begun. Idempotent."""
        ...


class HashesAtOnce:
    """The reference: `begin` returns when the block is hashed."""

    def begin(self, header: bytes, block: Bytes) -> Hashing:
        checksum = checksum_of(header, [block.data])
        return lambda: checksum

    def close(self) -> None:
        """Nothing is left to end."""


class HashThreads:
    """By THREADS_MAX threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kvstore-hash")

    def begin(self, header: bytes, block: Bytes) -> Hashing:
        future: Future[bytes] = self._pool.submit(checksum_of, header, [block.data])
        return lambda: future.result() if future.done() else None

    def close(self) -> None:
        self._pool.shutdown()


def hashes_for_this_process() -> Hashes:
    """Threads where there are cores for them."""
    has_cores = len(os.sched_getaffinity(0)) >= SPARE_CORES_MIN
    return HashThreads() if has_cores else HashesAtOnce()
