"""A clock that stands still until a test moves it."""

from __future__ import annotations

from kvstore.units import NS_PER_MS, NS_PER_S


class SetClock:
    def __init__(self, ns: int = NS_PER_S) -> None:
        self.ns = ns

    def now_ns(self) -> int:
        return self.ns

    def advance_ms(self, ms: int) -> None:
        self.ns += ms * NS_PER_MS
