"""Which blocks go to disk: not those that nobody asked for twice, and not more than it endures.

    blocks ──▶ DiskAdmission ──▶ WriteBudget ──▶ write
               seen twice?       bytes a day

Flash wears out by writing, and most blocks of most workloads are never asked for again: writing
those costs endurance and room and gains nothing. Loads are no business of this module: reading is
never refused.

Callers ask once per request and block: for the blocks that are sealed now, and for those that a
hint names, that dram holds and no file does. So a block that is used while it is in dram is
written then, and one that comes back after it went is written when it is sealed again. Blocks of a
chain are seen together, so they are admitted together; what was written without what comes before
it would be of no use.

Does not cover: queues of the file tier (`kvstore.tiers`), which block leaves it.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from kvstore.engine.policy.port import Mask, Prints
from kvstore.engine.policy.recent import RecentKeys

NS_PER_DAY: Final = 86_400 * 10**9
TIGHT_SHARE: Final = 0.25
"""With less than this of the burst left, only what was seen before is written."""


class AdmissionMode(enum.Enum):
    """Which blocks go to disk when the budget is not tight."""

    ALL = "all"
    SECOND_SIGHT = "second-sight"


class DiskAdmission:
    """Remembers which keys it was asked about, in two bytes each, and forgets the oldest.

    With room for n keys: a key that was never seen is admitted as if it had been with probability
    at most 0.00012, and one seen m keys ago is taken for new with probability 0.001 at m = n / 4,
    0.05 at n / 2, 0.55 at n (`recent`): a store that comes later, never a wrong byte.

    Args:
        mode: what is admitted while the budget is not tight.
        key_count: keys that it remembers about; a few times what dram holds is plenty.
        seed: of the hashes; random per node, so that nobody can choose what collides.
    """

    def __init__(self, mode: AdmissionMode, *, key_count: int, seed: int) -> None:
        self._mode = mode
        self._seen = RecentKeys(key_count=key_count, seed=seed)

    @property
    def nbytes(self) -> int:
        """Memory of the keys seen."""
        return self._seen.nbytes

    def seen(self, prints: Prints) -> Mask:
        """Which of these were asked about lately; changes nothing."""
        return self._seen.may_contain(prints)

    def admit(self, prints: Prints, *, is_tight: bool = False) -> Mask:
        """Which of these go to disk. Each counts as seen from now on, whatever the mode: what
        it learned is there when the budget gets tight."""
        seen = self._seen.may_contain(prints)
        self._seen.add(prints)
        if self._mode is AdmissionMode.ALL and not is_tight:
            return np.ones(len(prints), dtype=bool)
        return seen


class WriteBudget:
    """A bucket of bytes that fills at so many a day, up to a burst. Starts full.

    Never more is written than `burst_bytes` and what came in since; when it is empty, nothing is.
    Loads do not ask. Integers all through: nothing drifts, however often it is asked.

    Args:
        bytes_per_day: what the disk is to endure, for example 1 TiB.
        now_ns: of the same clock as all later ones.
        burst_bytes: most that can be saved up; by default a day's worth.
    """

    def __init__(self, bytes_per_day: int, *, now_ns: int, burst_bytes: int | None = None) -> None:
        assert bytes_per_day > 0, "no budget is no WriteBudget"
        self._bytes_per_day = bytes_per_day
        self.burst_bytes = bytes_per_day if burst_bytes is None else burst_bytes
        # In bytes times nanoseconds of a day, so that one nanosecond's part is a whole number.
        self._full = self.burst_bytes * NS_PER_DAY
        self._level = self._full
        self._at_ns = now_ns

    def left_bytes(self, now_ns: int) -> int:
        """What may be written now."""
        self._fill(now_ns)
        return self._level // NS_PER_DAY

    def is_tight(self, now_ns: int) -> bool:
        """Little is left: only what was seen before should go to disk."""
        return self.left_bytes(now_ns) < TIGHT_SHARE * self.burst_bytes

    def allow(self, wanted_bytes: int, now_ns: int, *, unit_bytes: int = 1) -> int:
        """How much of this may be written, in whole units (blocks); it counts as written."""
        allowed = min(wanted_bytes, self.left_bytes(now_ns)) // unit_bytes * unit_bytes
        self._level -= allowed * NS_PER_DAY
        return allowed

    def give_back(self, unwritten_bytes: int) -> None:
        """What was allowed and then not written after all."""
        self._level = min(self._full, self._level + unwritten_bytes * NS_PER_DAY)

    def _fill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)
        self._at_ns = max(now_ns, self._at_ns)
        self._level = min(self._full, self._level + passed_ns * self._bytes_per_day)
