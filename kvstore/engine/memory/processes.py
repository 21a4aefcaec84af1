"""Limit of writable dram of each process: half of the rest that others leave (ADR 4).

A lease runs out; a granted slot comes back only by a message or the end of its writer. And names of
engines and tenants come from engines, while the kernel identifies a process: one with many names
has one part. Slots count while they are granted or in quarantine.

Does not cover: other pins of an account (`pins`), processes that fork.
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
        """Writable bytes, by group."""


class Processes:
    """Processes of one node: attached ones, and living ones that ended the socket."""

    def __init__(self, *, groups: int) -> None:
        self.held = [0] * groups
        """Writable bytes of all engines, by group."""
        self._groups = groups
        self._processes: dict[int, _Process] = {}
        self._of: dict[int, int] = {}
        """Connection → its process."""

    def join(self, connection: int, process: int, weights: Weights) -> None:
        """Add a connection of a process, with its writable bytes."""
        self._of[connection] = process
        self._processes.setdefault(process, _Process(self._groups)).writers += 1
        self.count(connection, weights, 1)

    def of(self, connection: int) -> int:
        """The process of a connection."""
        return self._of[connection]

    def leave(self, connection: int) -> None:
        """Remove a connection without writable bytes."""
        number = self._of.pop(connection, None)
        if number is not None:
            process = self._processes[number]
            process.writers -= 1
            if not process.writers:
                del self._processes[number]

    def count(self, connection: int, weights: Weights, sign: int) -> None:
        """Add writable bytes, or remove them with -1."""
        process = self._processes[self._of[connection]]
        for group, size_bytes in weights:
            process.held[group] += sign * size_bytes
            self.held[group] += sign * size_bytes

    def blocks(self, columns: list[tuple[int, int]], group: int, share_bytes: int) -> int:
        """Number of further blocks to grant, each as (connection, bytes) of its columns."""
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
        """Process → its connections and writable bytes: for `check`."""
        connections: dict[int, list[int]] = {number: [] for number in self._processes}
        for connection, number in self._of.items():
            connections[number].append(connection)
        return {
            number: (connections[number], process.held)
            for number, process in self._processes.items()
        }
