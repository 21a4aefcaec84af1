"""Configuration of the disk tier, one frozen tree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.types import PAGE_BYTES
from kvstore.units import KIB, MIB, format_size

# ── scrub ─────────────────────────────────────────────────────────────────────────────────────────
# Rate of a background scrub: arithmetic only, the same for every tier.
#
# Does not cover: reads and verification (`kvstore.tiers.file.scrub`, `kvstore.node.scrub`).

AUTO_BYTES_PER_S_MAX: Final = 32 * MIB
"""Highest rate of a daily scrub: one per cent of an NVMe disk's bandwidth, a third of a per cent of
one core's hashing."""
AUTO_BYTES_PER_S_MIN: Final = MIB
"""Lowest rate of a daily scrub: a small tier is read more often than once a day, which is cheap,
and damage is found sooner."""
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


# ── config ────────────────────────────────────────────────────────────────────────────────────────

SEGMENT_BYTES_MAX = 128 * MIB
SEGMENT_BYTES_MIN = 256 * KIB
SEGMENTS_MIN = 8
"""A small capacity is cut into this many segments, so that reclaiming one costs little."""
CAPACITY_BYTES_MIN = SEGMENTS_MIN * SEGMENT_BYTES_MIN
NODE_CHARACTERS_MAX = 128
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class FileConfig:
    """Place and limits of the tier.

    Raises:
        ConfigError: a value that cannot work.
    """

    directory: Path
    """Own directory; in shared mode the parent, in which each node has one of its name."""
    capacity_bytes: int
    """All that this node's files take, headers, footers and the open segment included."""
    shared: bool = False
    node: str = ""
    """Name of this node's directory in shared mode; unique among the nodes that share."""
    segment_bytes: int = 0
    """Size of a segment; 0: 128 MiB, less for a small capacity."""
    direct: bool = True
    """Try to go round the page cache (O_DIRECT)."""
    reader_count: int = 2
    """Threads that read and verify."""
    read_deadline_ms: int = 2_000
    write_deadline_ms: int = 10_000
    close_deadline_ms: int = 10_000
    """Longest wait of an orderly end for queued writes and a hung disk."""
    queued_bytes_max: int = 256 * MIB
    """Slots pinned by writes that wait or run; the same again for reads."""
    queued_jobs_max: int = 1_024
    """Jobs that wait or run, of each kind."""
    failures_max: int = 3
    cooldown_ms: int = 1_000
    """First cool-down of the breaker; doubles with each failed probe up to 32 times."""
    poll_interval_ms: int = 3_000
    """Shared mode: how often other nodes' segments are looked for."""
    grace_ms: int = 10_000
    """Shared mode: time for which a deleted segment stays readable, for nodes that have just found
    it."""
    foreign_segments_max: int = 65_536
    scrub: ScrubRate | None = None
    """How fast records are read and verified in the background; None: not at all."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError(
                f"the disk tier needs at least {format_size(CAPACITY_BYTES_MIN)}, "
                f"not {format_size(self.capacity_bytes)}: choose a larger SIZE of --file"
            )
        if self.shared and len(self.node) > NODE_CHARACTERS_MAX:
            raise ConfigError(
                f"the node name that begins with {self.node[:32]!r} has {len(self.node)}"
                f" characters, more than the {NODE_CHARACTERS_MAX} of a shared disk tier: choose"
                " a shorter --node-name"
            )
        if self.shared and not _NODE.fullmatch(self.node):
            raise ConfigError(
                "a shared disk tier needs a node name of letters, digits, '.', '_' and '-', "
                f"not {self.node!r}: set one that no other node has"
            )

    @property
    def home(self) -> Path:
        """The only directory in which this node writes or deletes."""
        return self.directory / self.node if self.shared else self.directory

    @property
    def segment_size(self) -> int:
        """`segment_bytes`, or what fits the capacity; whole pages."""
        size = self.segment_bytes or min(SEGMENT_BYTES_MAX, self.capacity_bytes // SEGMENTS_MIN)
        return max(size // PAGE_BYTES, 4) * PAGE_BYTES
