"""The one real clock, at the edge of the pure core."""

from __future__ import annotations

import time


class MonotonicClock:
    """A `Clock` on CLOCK_MONOTONIC, on which the heartbeat word counts too."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
