"""Restarts of a node process: with memory or without, after which pause, and when to give up. Pure.

A process that ended is replaced at once, with its memory. After two in a row that never served the
next one begins without memory, which may be the cause. Deaths that come soon after each other have
growing pauses between them, and after DEATHS_MAX of them the whole node ends, for its pod or unit
to be started again.

A refused start (a port or a directory that is taken just now) is no such death: memory that served
before is not its cause, and an end of the node would gain nothing. The start is repeated, with the
memory, until it succeeds.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Final, NamedTuple

from kvstore.units import NS_PER_S

SOON_NS: Final = 30 * NS_PER_S
"""A process that served for longer did not die of its start."""
DEATHS_MAX: Final = 8
"""Deaths in a row, each soon after its start."""
WARM_ATTEMPTS_MAX: Final = 2
"""Processes in a row that never served, after which the next one begins without memory."""
REFUSAL_PAUSES_NS: Final = tuple(NS_PER_S * seconds for seconds in (1, 2, 5, 10, 30))
"""Pauses after refused starts."""
PAUSES_NS: Final = (0, 0, NS_PER_S // 10, NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S)


class Again(NamedTuple):
    """Start another process."""

    pause_ns: int
    keep: bool
    """Whether it gets the memory of the previous process."""


class GiveUp(NamedTuple):
    """No process serves for long."""

    deaths: int


class Restarts:
    """Restarts of one node."""

    def __init__(self) -> None:
        self._soon = 0
        self._unready = 0
        self._refusals = 0
        self.count = 0
        """Processes started in place of another."""

    def refused(self) -> Again:
        """A process refused to start; its memory is not the reason."""
        pause_ns = REFUSAL_PAUSES_NS[min(self._refusals, len(REFUSAL_PAUSES_NS) - 1)]
        self._refusals += 1
        self.count += 1
        return Again(pause_ns, keep=True)

    def ended(self, *, served_ns: int) -> Again | GiveUp:
        """A process ended unasked after `served_ns` of service; 0: never served."""
        self._refusals = 0
        self._unready = 0 if served_ns else self._unready + 1
        self._soon = 1 if served_ns > SOON_NS else self._soon + 1
        if self._soon > DEATHS_MAX:
            return GiveUp(DEATHS_MAX)
        self.count += 1
        pause_ns = PAUSES_NS[min(self._soon, len(PAUSES_NS)) - 1]
        return Again(pause_ns, keep=self._unready < WARM_ATTEMPTS_MAX)


def told(status: int) -> str:
    """An exit status, negative for a signal, as an operator reads it."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
