"""Processes refused at the attach socket: counts, and the last sentence for /healthz.

A process that is refused before it has introduced itself is known by nothing but that sentence. All
engines ask again after 10 s, so a refusal that nobody repeats is over; one for want of room is over
when there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstore.units import NS_PER_S

TOLD_NS: Final = 30 * NS_PER_S
SILENT: Final = "late"
"""The kind that is no engine: it connected and said nothing."""


class RefusalCounts(dict[str, int]):
    """Refusals since the start, by kind."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(dict.fromkeys(kinds, 0))
        self._last: tuple[str, int, Callable[[], bool]] | None = None

    def add(
        self, kind: str, reason: str, now_ns: int, holds: Callable[[], bool] = lambda: True
    ) -> None:
        """Count one; `holds`: whether the reason is still true."""
        self[kind] += 1
        if kind != SILENT:
            self._last = (reason, now_ns, holds)

    def trouble(self, now_ns: int) -> str:
        """The last refusal of what may be an engine; empty when it is long ago."""
        if self._last is None or now_ns - self._last[1] > TOLD_NS or not self._last[2]():
            return ""
        return f"a process that wants to attach is refused: {self._last[0]}"
