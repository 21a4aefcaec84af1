"""A circuit breaker: repeated failures stop requests to a disk or node; a probe follows later.

    CLOSED ──failures_max failures in a row──▶ OPEN ──cool-down──▶ HALF_OPEN (one probe is out)
       ▲                                        ▲                     │ failed: cool-down doubles
       │ succeeded                              └─────────────────────┤
       └──────────────────────────────────────────────────────────────┘ succeeded

Pure: time is an argument. Does not cover: which events are failures (`tiers.file.parts`,
`client.core.lookups`).
"""

from __future__ import annotations

import enum

from kvstore.units import NS_PER_MS

_DOUBLINGS_MAX = 5


class BreakerState(enum.StrEnum):
    """State of a breaker: all requests pass, one probe is out, or none passes; in this order."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


class Breaker:
    """See the module. Each failed probe doubles the cool-down, up to 32 times the first.

    While it is closed, `allows` costs one comparison. One probe is out at a time, until it failed
    or succeeded. A probe without a result (its target had gone by then) is given up after
    `patience_ms`, which no I/O outlasts unnoticed.
    """

    def __init__(self, *, failures_max: int, cooldown_ms: int, patience_ms: int = 0) -> None:
        self._failures_max = failures_max
        self._cooldown_ns = cooldown_ms * NS_PER_MS
        self._patience_ns = patience_ms * NS_PER_MS
        self._failures = 0
        self._doublings = 0
        self._probe_due_ns = 0
        self._probe_is_out = False

    @property
    def is_open(self) -> bool:
        """True from the failure that opened it until the next success."""
        return self._failures >= self._failures_max

    @property
    def state(self) -> BreakerState:
        if not self.is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._probe_is_out else BreakerState.OPEN

    def may_allow(self, now_ns: int) -> bool:
        """As `allows`, but takes no probe."""
        return not self.is_open or now_ns >= self._probe_due_ns

    def allows(self, now_ns: int) -> bool:
        """Whether a request is allowed now; an open breaker grants one probe after a cool-down."""
        if not self.is_open:
            return True
        if now_ns < self._probe_due_ns:
            return False
        self._probe_due_ns = now_ns + max(self._cooldown_ns << self._doublings, self._patience_ns)
        self._probe_is_out = True
        return True

    def failed(self, now_ns: int) -> bool:
        """Count a failure. True when this one opened the breaker.

        While it is open only the probe counts: a hiccup fails all requests under way at once.
        """
        if self.is_open:
            if self._probe_is_out:
                self._probe_is_out = False
                self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)
                self._probe_due_ns = now_ns + (self._cooldown_ns << self._doublings)
            return False
        self._failures += 1
        if self.is_open:
            self._probe_due_ns = now_ns + (self._cooldown_ns << self._doublings)
        return self.is_open

    def return_probe(self) -> None:
        """The probe neither failed nor succeeded: the next one is allowed at once."""
        if self._probe_is_out:
            self._probe_is_out = False
            self._probe_due_ns = 0

    def end_cooldown(self) -> None:
        """Other news of the target is good: the next probe is allowed at once, and a failure of it
        costs the first cool-down."""
        self._probe_is_out = False
        self._doublings = self._probe_due_ns = 0

    def begun(self) -> None:
        """The probe goes well so far: close the breaker, but let the next failure open it again,
        for longer."""
        if self.is_open:
            self._probe_is_out = False
            self._failures = self._failures_max - 1
            self._doublings = min(self._doublings + 1, _DOUBLINGS_MAX)

    def succeeded(self) -> bool:
        """Forget all failures. True when this closed the breaker."""
        was_open = self.is_open
        self._failures = 0
        self._doublings = 0
        self._probe_is_out = False
        return was_open
