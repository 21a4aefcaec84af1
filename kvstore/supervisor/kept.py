"""Descriptors that a supervisor keeps for the next node process: memory, pidfds of ranks, places
(`control.PLACES`).

Covers: holding, letting go, and making a generation page void. Does not cover: when (`supervisor`).
"""

from __future__ import annotations

import logging
import mmap
import os
from typing import Final

from kvstore.supervisor.control import PLACES
from kvstore.types import PAGE_BYTES

_HEARTBEAT: Final = slice(24, 32)
_log = logging.getLogger(__name__)


class Kept:
    """State beyond a node process: memory, pidfds and places."""

    def __init__(self) -> None:
        self.memory: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.writers: dict[int, tuple[bytes, int]] = {}
        self.layout = 0
        self._page: mmap.mmap | None = None

    def keep(self, name: str, fd: int) -> None:
        held = self.places if name in PLACES else self.memory
        old, held[name] = held.get(name), fd
        if old is not None:
            os.close(old)

    def held(self) -> dict[str, int]:
        """Memory and places by name."""
        return self.memory | self.places

    def attached(self, number: int, hello: bytes, pidfd: int) -> None:
        if self.memory:
            self.writers[number] = hello, pidfd
        else:  # no later process gets the memory that this rank writes to
            os.close(pidfd)

    def cannot_keep_a_writer(self) -> None:
        """The next process could reuse slots that this rank may write to: drop the memory."""
        if self.memory:
            _log.error(
                "too many open files, or too little memory, to remember a rank: the node goes on,"
                " but its memory ends with its process; raise 'ulimit -n'"
            )
        self.drop()

    def released(self, number: int) -> None:
        if number in self.writers:
            os.close(self.writers.pop(number)[1])

    def take_page(self, fd: int) -> None:
        """Map a generation page writable. The one before is void: no slot has generation 0."""
        if self._page is not None:
            self._page[PAGE_BYTES:] = bytes(len(self._page) - PAGE_BYTES)
            self._page.close()
        self._page = mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)

    def heartbeat(self) -> bytes:
        return self._page[_HEARTBEAT] if self._page is not None else b""

    def drop(self) -> None:
        """Close memory and writers; the old page becomes void with the next one."""
        for fd in (*self.memory.values(), *(fd for _, fd in self.writers.values())):
            os.close(fd)
        self.memory.clear()
        self.writers.clear()

    def close(self) -> None:
        """Close every descriptor."""
        self.drop()
        for fd in self.places.values():
            os.close(fd)
        self.places.clear()
