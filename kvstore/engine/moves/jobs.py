"""Jobs: transfers under way, and how much may be in motion.

Rules. 1: a job's slots are its own until the transfer has truly ended, however late. 2: a job ends
once. 3: jobs of one kind move `bytes_max` at most together; one block always may.

Does not cover: the choice of blocks to move (`files`, `writes`, `fetches`), how long a transfer
takes (`pace`).
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, ValuesView
from typing import Generic, Protocol, TypeVar

from kvstore.types import MOVING_SHARE


def pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of `count` blocks, one per job, in order, each of at most `size` blocks and at least
    one."""
    size = max(1, size)
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


class Moving(Protocol):
    """A job as `Jobs` sees it."""

    @property
    def size_bytes(self) -> int:
        """Size of the slots that the transfer reads or writes."""


J = TypeVar("J", bound=Moving)


class Jobs(Generic[J]):
    """Running jobs of one kind, by number. `numbers` is shared by jobs of all kinds."""

    def __init__(self, numbers: Iterator[int], *, arena_bytes: int) -> None:
        self._numbers = numbers
        self._jobs: dict[int, J] = {}
        self.bytes_max = arena_bytes // MOVING_SHARE
        self.moving_bytes = 0

    def room(self, block_bytes: int, *, bytes_max: int | None = None) -> int:
        """Number of further blocks that may be in motion, at least one while no job runs.
        `bytes_max`: a lower limit for this call."""
        limit = self.bytes_max if bytes_max is None else min(bytes_max, self.bytes_max)
        return max(0 if self._jobs else 1, (limit - self.moving_bytes) // block_bytes)

    def begin(self, job: J) -> int:
        """Add a job; returns its number."""
        number = next(self._numbers)
        self._jobs[number] = job
        self.moving_bytes += job.size_bytes
        return number

    def end(self, number: int) -> J:
        """Remove a job whose transfer has truly ended."""
        job = self._jobs.pop(number, None)
        assert job is not None, f"job {number} ended twice"
        self.moving_bytes -= job.size_bytes
        return job

    def get(self, number: int) -> J | None:
        """The job with this number; None: the job has ended."""
        return self._jobs.get(number)

    def items(self) -> ItemsView[int, J]:
        """Number and job of each."""
        return self._jobs.items()

    def values(self) -> ValuesView[J]:
        """All jobs."""
        return self._jobs.values()
