"""When a node process that ended is started again, with what, and when it is given up. Pure.

It is started at once, with all that was kept. Two in a row that did not come to serve: perhaps
what was kept is what kills them, so the next one begins without it. Deaths that come soon after
each other are waited for longer and longer, and after DEATHS_MAX of them the whole node ends, for
its pod or unit to be started again.

One that says why it cannot start (a port or a directory that cannot be had just now) is no such
death: memory that an earlier process served from is not what it lacks, and nothing is gained by
ending the node. It is tried again, with what was kept, until it can.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Final, NamedTuple

from kvstore.units import NS_PER_S

SOON_NS: Final = 30 * NS_PER_S
"""A process that served for longer did not die of its start."""
DEATHS_MAX: Final = 8
"""In a row, each soon after its start."""
WARM_ATTEMPTS_MAX: Final = 2
"""In a row, that did not come to serve."""
REFUSAL_PAUSES_NS: Final = tuple(NS_PER_S * seconds for seconds in (1, 2, 5, 10, 30))
"""After a process that said why it cannot start."""
PAUSES_NS: Final = (0, 0, NS_PER_S // 10, NS_PER_S // 2, NS_PER_S, 2 * NS_PER_S, 5 * NS_PER_S)


class Again(NamedTuple):
    """Start another process."""

    pause_ns: int
    keep: bool
    """With the memory of the last one."""


class GiveUp(NamedTuple):
    """No process will come to serve for long."""

    deaths: int


class Restarts:
    """Of one node."""

    def __init__(self) -> None:
        self._soon = 0
        self._unready = 0
        self._refusals = 0
        self.count = 0
        """Processes that were started in place of one that ended."""

    def refused(self) -> Again:
        """A process said why it cannot start; what was kept is not the reason."""
        pause_ns = REFUSAL_PAUSES_NS[min(self._refusals, len(REFUSAL_PAUSES_NS) - 1)]
        self._refusals += 1
        self.count += 1
        return Again(pause_ns, keep=True)

    def ended(self, *, served_ns: int) -> Again | GiveUp:
        """A process ended unasked, after it served for so long; 0: it never came to serve."""
        self._refusals = 0
        self._unready = 0 if served_ns else self._unready + 1
        self._soon = 1 if served_ns > SOON_NS else self._soon + 1
        if self._soon > DEATHS_MAX:
            return GiveUp(DEATHS_MAX)
        self.count += 1
        pause_ns = PAUSES_NS[min(self._soon, len(PAUSES_NS)) - 1]
        return Again(pause_ns, keep=self._unready < WARM_ATTEMPTS_MAX)


def told(status: int) -> str:
    """How a process ended: its exit status, negative for a signal, as an operator reads it."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
