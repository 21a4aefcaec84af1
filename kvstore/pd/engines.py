"""The engines of one kind, in turn; those that failed are left out for a while.

Pure: time is an argument. A failure is a connection that breaks, a status of 500 and above, or
silence beyond the deadline. With every engine left out, the next one in turn is tried all the same:
only a request finds out that it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvstore.breaker import Breaker

FAILURES_MAX: Final = 2
COOLDOWN_MS: Final = 1000


class PooledEngine:
    """One engine, by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.breaker = Breaker(failures_max=FAILURES_MAX, cooldown_ms=COOLDOWN_MS)
        self.source: dict[str, Any] | None = None
        """Parameters common to its requests, from its last answer."""
        self.is_mute = False
        """Its last answer had none at all."""


class Rotation:
    """Engines in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.engines = [PooledEngine(url) for url in urls]
        self._next = 0

    def pick(self, now_ns: int, *, not_these: Sequence[PooledEngine] = ()) -> PooledEngine | None:
        """The next one; None: no engine is left."""
        size = len(self.engines)
        turn = [self.engines[(self._next + i) % size] for i in range(size)]
        left = [engine for engine in turn if engine not in not_these]
        chosen = next((engine for engine in left if engine.breaker.may_allow(now_ns)), None)
        chosen = chosen or next(iter(left), None)
        if chosen is not None:
            chosen.breaker.allows(now_ns)
            self._next = (self.engines.index(chosen) + 1) % size
        return chosen

    def pick_healthy(self, now_ns: int) -> PooledEngine | None:
        """As `pick`, but no engine that is left out."""
        if not any(engine.breaker.may_allow(now_ns) for engine in self.engines):
            return None
        return self.pick(now_ns)
