"""How much of dram each process may write to: half of what others leave it (ADR 27).

A lease runs out; a slot that was granted comes back only when its writer says so or has ended. And
an engine and its tenant are what an engine calls itself, a process is what the kernel says: one
that comes under many names has one part. Slots count while they are granted or in quarantine.

Does not cover: what an account pins besides (`pins`), what a process that forks can do.
"""

from __future__ import annotations

from typing import Final

Weights = list[tuple[int, int]]
"""(group, bytes)."""

PROCESS_PART: Final = (1, 2)


class _Process:
    __slots__ = ("held", "writers")

    def __init__(self, groups: int) -> None:
        self.writers = 0
        """Connections."""
        self.held = [0] * groups
        """Bytes that it may write, by group."""


class Processes:
    """Of one node; those that are attached, and those that ended the socket and live."""

    def __init__(self, *, groups: int) -> None:
        self.held = [0] * groups
        """Bytes that engines may write, by group."""
        self._groups = groups
        self._processes: dict[int, _Process] = {}
        self._of: dict[int, int] = {}
        """Connection → its process."""

    def join(self, connection: int, process: int, weights: Weights) -> None:
        """Of that process, and may write so much already."""
        self._of[connection] = process
        self._processes.setdefault(process, _Process(self._groups)).writers += 1
        self.count(connection, weights, 1)

    def leave(self, connection: int) -> None:
        """It may write nothing any more."""
        number = self._of.pop(connection, None)
        if number is not None:
            process = self._processes[number]
            process.writers -= 1
            if not process.writers:
                del self._processes[number]

    def count(self, connection: int, weights: Weights, sign: int) -> None:
        """It may write so much more, or with -1 so much less."""
        process = self._processes[self._of[connection]]
        for group, size_bytes in weights:
            process.held[group] += sign * size_bytes
            self.held[group] += sign * size_bytes

    def blocks(self, columns: list[tuple[int, int]], group: int, share_bytes: int) -> int:
        """How many more may be granted, each as (connection, bytes) of its columns."""
        sizes: dict[int, int] = {}
        for connection, size_bytes in columns:
            process = self._of[connection]
            sizes[process] = sizes.get(process, 0) + size_bytes
        return min(
            self._room(process, group, share_bytes, size_bytes) // size_bytes
            for process, size_bytes in sizes.items()
        )

    def _room(self, process: int, group: int, share_bytes: int, block_bytes: int) -> int:
        held = self._processes[process].held[group]
        limit = (share_bytes - (self.held[group] - held)) * PROCESS_PART[0] // PROCESS_PART[1]
        # What is left of a block is one, and nobody is kept from a first one.
        return max(0 if held else block_bytes, limit - held + block_bytes - 1, 0)

    def by_process(self) -> dict[int, tuple[list[int], list[int]]]:
        """Process → its connections, and what it may write: for `check`."""
        connections: dict[int, list[int]] = {number: [] for number in self._processes}
        for connection, number in self._of.items():
            connections[number].append(connection)
        return {
            number: (connections[number], process.held)
            for number, process in self._processes.items()
        }
