"""Rate of a background scrub: arithmetic only, the same for every tier.

Does not cover: reads and verification (`kvstore.tiers.file.scrub`, `kvstore.node.scrub`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.units import MIB

AUTO_BYTES_PER_S_MAX: Final = 32 * MIB
"""One per cent of an NVMe disk's bandwidth, a third of a per cent of one core's hashing."""
AUTO_BYTES_PER_S_MIN: Final = MIB
"""A small tier is read more often than once a day: cheap, and damage is found sooner."""
DAY_S: Final = 86_400.0
PASS_PAUSE_S: Final = 1.0
"""Pause between two passes, also over an empty tier."""


@dataclass(frozen=True)
class ScrubRate:
    """`bytes_per_s_max` is never exceeded; with `daily` a pass takes a day if that is slower."""

    bytes_per_s_max: int
    daily: bool

    def seconds(self, size_bytes: int, *, held_bytes: int) -> float:
        """Time for `size_bytes` of a tier that holds `held_bytes`."""
        rate = float(self.bytes_per_s_max)
        if self.daily:
            rate = min(rate, max(held_bytes / DAY_S, AUTO_BYTES_PER_S_MIN))
        return size_bytes / rate


AUTO: Final = ScrubRate(AUTO_BYTES_PER_S_MAX, daily=True)
