"""The breaker: after repeated failures the cache is off for a while, then probed.

Pure: time is an argument. Covers when lookups are allowed; does not cover what counts as a failure
(`lookups.py`) nor the connection itself (`attachment.py`).
"""

from __future__ import annotations

from kvstore.units import NS_PER_MS


class Breaker:
    """Closed → (failures_max failures in a row) → open for a cooldown → one probe → closed or open.

    Every reopening doubles the cooldown up to 32 times the first. While open, `allows` costs one
    comparison.
    """

    def __init__(self, *, failures_max: int, cooldown_ms: int) -> None:
        self._failures_max = failures_max
        self._cooldown_ns = cooldown_ms * NS_PER_MS
        self._failures = 0
        self._openings = 0
        self._probe_due_ns = 0
        self._probe_is_out = False

    @property
    def is_open(self) -> bool:
        """True between the failure that opened it and the next success."""
        return self._failures >= self._failures_max

    def may_allow(self, now_ns: int) -> bool:
        """What `allows` would answer; takes no probe."""
        return not self.is_open or now_ns >= self._probe_due_ns

    def allows(self, now_ns: int) -> bool:
        """Whether a lookup may be tried now. While half-open this grants one probe a cooldown."""
        if not self.is_open:
            return True
        if now_ns < self._probe_due_ns:
            return False
        self._probe_due_ns = now_ns + self._cooldown_ns
        self._probe_is_out = True
        return True

    def failed(self, now_ns: int) -> bool:
        """Count a failure. True when this one opened the breaker.

        While it is open only the probe counts: one hiccup fails everything that was under way at
        once, and that is one reason to wait, not many.
        """
        if self.is_open:
            if self._probe_is_out:
                self._probe_is_out = False
                self._openings += 1
                self._probe_due_ns = now_ns + (self._cooldown_ns << min(self._openings, 5))
            return False
        self._failures += 1
        if self.is_open:
            self._probe_due_ns = now_ns + self._cooldown_ns
        return self.is_open

    def unused(self) -> None:
        """The probe came to nothing that could fail or succeed: the next may be tried at once."""
        if self._probe_is_out:
            self._probe_is_out = False
            self._probe_due_ns = 0

    def succeeded(self) -> None:
        """Close, forget all failures."""
        self._failures = 0
        self._openings = 0
        self._probe_is_out = False
