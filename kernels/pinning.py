"""Chunks of the memory of slots that are pinned for a device, by a thread, when a copy needs them.

Does not cover: what a copy does meanwhile (`device.py`), the call (`cuda.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.kernels.reference import Bytes

CHUNK_BYTES: Final = 64 << 20
"""Pinned in one go: some 20 ms."""
NOT_PINNED: Final = (
    "memory cannot be pinned, so blocks are loaded and not stored: raise the memlock limit of the "
    "engine's process (ulimit -l unlimited) and start it again ({})"
)


class PinnedChunks:
    """Chunks of the memory of slots that are pinned, or about to be, by a thread."""

    def __init__(
        self,
        pin: Callable[[int, int], str],
        unpin: Callable[[int], None],
        memory: Bytes,
        ready_bytes: Callable[[], int],
    ) -> None:
        """
        Args:
            pin: given an address and a size, pins memory; returns why not, or nothing.
            unpin: given an address, undoes it.
            memory: of the slots.
            ready_bytes: how much of it has pages.
        """
        self._pin, self._unpin = pin, unpin
        self._memory = memory
        self._ready_bytes = ready_bytes
        self._address = int(memory.ctypes.data)
        self._pinned: set[int] = set()
        self._wanted: deque[int] = deque()
        self._asked: set[int] = set()
        self._wake = threading.Condition()
        self._closed = False
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-pin", daemon=True)
        self._thread.start()

    @property
    def size_bytes(self) -> int:
        """Bytes that are pinned."""
        return min(len(self._pinned) * CHUNK_BYTES, self._memory.size)

    def has(self, begin: int, end: int) -> bool:
        """Whether these bytes are pinned. If not, they soon are, or there is `trouble`."""
        chunks = range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        missing = [chunk for chunk in chunks if chunk not in self._pinned]
        new = [chunk for chunk in missing if chunk not in self._asked]
        if new:
            with self._wake:
                self._asked.update(new)
                self._wanted.extend(new)
                self._wake.notify()
        return not missing

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._wanted or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                chunk = self._wanted.popleft()
            begin = chunk * CHUNK_BYTES
            end = min(begin + CHUNK_BYTES, self._memory.size)
            if self._ready_bytes() < end:
                # Its pages have not all arrived. They do within seconds of a node's start.
                with self._wake:
                    self._wanted.append(chunk)
                    self._wake.wait(0.05)
                continue
            if reason := self._pin(self._address + begin, end - begin):
                self.trouble = self.trouble or NOT_PINNED.format(reason)
            else:
                self._pinned.add(chunk)

    def close(self) -> None:
        """Give all back; no copy is under way."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for chunk in self._pinned:
            self._unpin(self._address + chunk * CHUNK_BYTES)
        self._pinned = set()
