"""The dram tier: the node's arena, shared with the engines that attach.

Covers pre-faulting: a background thread takes the pages chunk by chunk, so that the node's cgroup
is charged and no engine ever waits for (or dies of) a page fault; capacity grows as they arrive.
When the kernel runs out, the tier stays as large as it got. Afterwards the thread checks that the
pages still exist: an engine can give them back. Blocks in lost pages are 0 then, which their
checksums reveal; other pages are taken for them, if the machine has some.

Does not cover: making and sealing the memory (`kvstore.arena`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator

from kvstore.arena import Arena
from kvstore.types import PAGE_BYTES, SlotId
from kvstore.units import MIB, format_size

CHUNK_BYTES = 16 * MIB
"""Bytes pre-faulted at a time: about 40 ms of ordinary pages, so a stop is never late."""

LOOK_S = 2.0
"""Pause between two checks of the pages."""

_log = logging.getLogger(__name__)


class DramTier:
    """A `Memory` over an `Arena`, which it owns.

    Args:
        arena: the memory.
        ready_bytes: taken by an earlier process.
        on_ready: called by the thread with the new size, before any other use of it.
        room_bytes: free memory of the machine, a limit for pages taken again.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        ready_bytes: int = 0,
        on_ready: Callable[[int], None] = lambda _: None,
        room_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        self.arena, self.capacity_bytes = arena, arena.arena_bytes
        self.raise_generations, self.generation = arena.raise_generations, arena.generation
        self.beat = arena.beat
        self.ready_bytes = ready_bytes
        self._on_ready = on_ready
        self._room_bytes = room_bytes
        self.losses = 0
        """Number of checks that found pages lost."""
        arena.set_ready(ready_bytes)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._populate, name="prefault", daemon=True)

    def start(self) -> None:
        """Begin to take the pages. Once."""
        self._thread.start()

    def read(self, slot: SlotId, into: memoryview) -> None:
        begin = slot * PAGE_BYTES
        assert 0 <= begin <= begin + len(into) <= self.ready_bytes, "outside what is ready"
        self.arena.read(begin, into)

    def close(self) -> None:
        """Stop pre-faulting, then close the memory. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.arena.close()

    def _populate(self) -> None:
        try:
            for begin, end in self._chunks(self.ready_bytes, self.capacity_bytes):
                self.arena.populate(begin, end)
                self._on_ready(end)
                self.arena.set_ready(end)
                self.ready_bytes = end
        except OSError as error:
            _log.warning(
                "dram stays at %s of %s: the kernel has no more memory for it (%s)",
                format_size(self.ready_bytes),
                format_size(self.capacity_bytes),
                error.strerror,
            )
        while not self._stop.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Check that all pages still exist, and take others for lost ones if there is room."""
        lost_bytes = self.ready_bytes - self.arena.taken_bytes
        if lost_bytes <= 0:
            return
        self.losses += 1
        if not self.losses & (self.losses - 1):  # a hostile engine does not fill the log
            _log.error(
                "an attached engine gave %s of the arena back to the kernel (fallocate or"
                " MADV_REMOVE; seen %d times): blocks in it are lost, and found by their checksums",
                *(format_size(lost_bytes), self.losses),
            )
        if self._room_bytes() < lost_bytes:
            return
        with contextlib.suppress(OSError):  # no memory: whoever reads blocks finds zeros
            for begin, end in self._chunks(0, self.ready_bytes):
                self.arena.populate(begin, end)

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of pieces of these bytes to be taken at a time, until `close`."""
        for at in range(begin, end, CHUNK_BYTES):
            if self._stop.is_set():
                return
            yield at, min(at + CHUNK_BYTES, end)
