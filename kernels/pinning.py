"""Chunks of the memory of slots that are pinned for a device, by a thread.

A chunk is pinned when a copy first needs it, or ahead of use while nothing is copied. CUDA refuses
a copy whose host side lies in two registrations, also if one begins where the other ends: `cut`.
A registration that fails is tried again, less and less often: some failures pass.

Does not cover: what a copy does meanwhile (`device.py`), the call (`cuda.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.kernels.port import Bytes, DeviceError

if TYPE_CHECKING:
    from kvstore.kernels.port import Addresses, Device

CHUNK_BYTES: Final = 64 << 20
"""Pinned in one go: some 6 ms, in which launches of the engine may wait for the driver's locks."""
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 60.0
"""Time until memory that could not be pinned is tried again: AGAIN_S at first, and this at most."""
NOT_PINNED: Final = (
    "memory cannot be pinned, so blocks are loaded and not stored: raise the memlock limit of the "
    "engine's process (ulimit -l unlimited) and start it again ({})"
)


def cut(
    targets: Addresses, sources: Addresses, sizes: Addresses, host: Addresses, begin: int
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies in pieces whose host side lies within one chunk each.

    Args:
        targets, sources, sizes: as of `port.Device.copy`.
        host: the addresses among them that are the host's.
        begin: address of the first chunk. Where `host` has nothing to do with chunks, pieces are
            cut for nothing, and copied all the same.
    """
    chunk = np.uint64(CHUNK_BYTES)
    offsets = host - np.uint64(begin)  # modulo 2**64, a multiple of a chunk
    first, last = offsets // chunk, (offsets + sizes - np.uint64(1)) // chunk
    counts = (last - first).astype(np.int64) + 1
    if (counts == 1).all():
        return targets, sources, sizes
    of = np.repeat(np.arange(len(sizes)), counts)
    part = (np.arange(len(of)) - (np.cumsum(counts) - counts)[of]).astype(np.uint64)
    begins = np.maximum((first[of] + part) * chunk, offsets[of]) - offsets[of]
    ends = np.minimum((first[of] + part + np.uint64(1)) * chunk - offsets[of], sizes[of])
    return targets[of] + begins, sources[of] + begins, ends - begins


class PinnedChunks:
    """Chunks of the memory of slots that are pinned, or about to be, by a thread."""

    def __init__(self, device: Device, memory: Bytes, ready_bytes: Callable[[], int]) -> None:
        """`memory`: of the slots; `ready_bytes`: how much of it has pages."""
        self._device, self._memory = device, memory
        self._ready_bytes = ready_bytes
        self._address = int(memory.ctypes.data)
        self._pinned: set[int] = set()
        self._wanted: deque[int] = deque()
        self._asked: set[int] = set()
        """Chunks that are pinned, or will be."""
        self._failed: dict[int, str] = {}
        """Chunks that could not be pinned, and why."""
        self._again_s, self._again_at_s = AGAIN_S, 0.0
        self._ahead = 0
        """Chunks below it were asked for."""
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
        self._thread.start()

    @property
    def size_bytes(self) -> int:
        """Bytes that are pinned."""
        return min(len(self._pinned) * CHUNK_BYTES, self._memory.size)

    @property
    def trouble(self) -> str:
        """Why some memory cannot be pinned at present."""
        return next(iter(list(self._failed.values())), "")

    def has(self, begin: int, end: int) -> bool:
        """Whether bytes [begin, end) of the memory are pinned. If not, the thread is asked to pin
        them; if it cannot, `trouble_of` says why."""
        chunks = _chunks(begin, end)
        if self._pinned.issuperset(chunks):
            return True
        self._ask([chunk for chunk in chunks if chunk not in self._asked])
        return False

    def trouble_of(self, begin: int, end: int) -> str:
        """Why these bytes could not be pinned; empty: they are, or may be soon."""
        return next(filter(None, map(self._failed.get, _chunks(begin, end))), "")

    def pin_ahead(self, end: int) -> None:
        """Ask for the next chunk below `end` that nobody needs yet, unless one is being pinned."""
        while self._end_of(self._ahead) <= end and not (self._wanted or self._failed):
            if self._ahead * CHUNK_BYTES >= self._memory.size:
                return
            chunk, self._ahead = self._ahead, self._ahead + 1
            if chunk not in self._asked:
                self._ask([chunk])
                return

    def _end_of(self, chunk: int) -> int:
        return min((chunk + 1) * CHUNK_BYTES, self._memory.size)

    def _ask(self, chunks: list[int]) -> None:
        if chunks:
            with self._wake:
                self._asked.update(chunks)
                self._wanted.extend(chunks)
                self._wake.notify()

    def _run(self) -> None:
        while (chunk := self._next()) is not None:
            begin, end = chunk * CHUNK_BYTES, self._end_of(chunk)
            if self._ready_bytes() < end:
                # Its pages have not all arrived. They do within seconds of a node's start.
                with self._wake:
                    self._wanted.append(chunk)
                    self._wake.wait(0.05)
                continue
            try:
                self._device.pin(self._address + begin, end - begin)
            except DeviceError as error:
                is_again, is_first = chunk in self._failed, not self._failed
                others = {each: why for each, why in self._failed.items() if each != chunk}
                self._failed = {**others, chunk: NOT_PINNED.format(error)}  # the last in turn
                if is_again:
                    self._again_s = min(2 * self._again_s, AGAIN_S_MAX)
                if is_again or is_first:  # another failure puts nothing off
                    self._again_at_s = time.monotonic() + self._again_s
            else:
                self._pinned.add(chunk)
                if self._failed.pop(chunk, ""):
                    self._again_s, self._again_at_s = AGAIN_S, 0.0  # the others, too

    def _next(self) -> int | None:
        """The next chunk to pin, once there is one; None: closed."""
        with self._wake:
            while not self._closed:
                left_s = self._again_at_s - time.monotonic()
                if self._failed and left_s <= 0:
                    return next(iter(self._failed))
                if self._wanted:
                    return self._wanted.popleft()
                self._wake.wait(left_s if self._failed else None)
            return None

    def close(self) -> None:
        """Give all back; no copy is under way."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for chunk in self._pinned:
            with contextlib.suppress(DeviceError):  # of one that failed: the process does it
                self._device.unpin(self._address + chunk * CHUNK_BYTES)
        self._pinned = set()


def _chunks(begin: int, end: int) -> range:
    return range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
