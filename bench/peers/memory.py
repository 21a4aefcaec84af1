"""What a cache occupies: the memory of its processes, and the shared memory that holds blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from kvstore.units import KIB


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a process and all its descendants."""

    private: int
    """Anonymous memory: the heap. Neither shared memory nor what is mapped from files."""
    mapped: int
    """Resident pages of mapped files: programs and libraries."""
    shared: int
    """Allocated pages of the shared memory that holds blocks, counted once, mapped or not."""


def memory_of(pid: int, *, shared: Iterable[Path]) -> Memory:
    """Of `pid`, its descendants, and these files of shared memory."""
    family = [psutil.Process(pid)]
    family += family[0].children(recursive=True)
    private = mapped = 0
    for process in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = status(Path(f"/proc/{process.pid}/status").read_text())
            private += fields.get("RssAnon", 0)  # a process that has ended has none
            mapped += fields.get("RssFile", 0)
    return Memory(
        private=private,
        mapped=mapped,
        shared=sum(path.stat().st_blocks * 512 for path in shared),
    )


def status(text: str) -> dict[str, int]:
    """The lines of /proc/PID/status that are sizes, in bytes."""
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[name] = int(value.removesuffix(" kB")) * KIB
    return sizes


def open_memfds(pid: int) -> list[Path]:
    """The memfds that a process holds, each once, as paths under /proc."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith("/memfd:"):
                found[link.stat().st_ino] = link
    return list(found.values())
