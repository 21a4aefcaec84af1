"""Health of one worker: its probes, its answers, its circuit breaker.

    probe ─▶ `probed` ─▶ answering, late, down        answers and faults ─▶ `succeeded`, `failed`
                        └──────────── `word` ─▶ pages, logs ────┘

| word      | shown by                                          | requests                       |
|-----------|---------------------------------------------------|--------------------------------|
| up        | a probe that was answered                         | yes                            |
| late      | no answer to a probe, and no byte of a response,  | yes, the lateness is a cost    |
|           | for longer than usual                             |                                |
| open      | FAULTS_MAX faults in a row                        | one after a cool-down; more    |
|           |                                                   | where no worker is up          |
| draining  | the policy                                        | no                             |
|           | discovery: it terminates                          | where no worker is up or open  |
| down      | a refused connection, an unwell engine, silence   | where there is none of these   |

Rule 1: a time-out is no fault. An engine whose probes are answered is slow, not broken.
Rule 2: only the policy excludes a worker for good: what is left is tried (`filters.LAST_RESORTS`).
Rule 3: the first answered probe of a worker that was down ends the cool-down of its breaker.
"""

from __future__ import annotations

from typing import Final

from kvstore.breaker import Breaker, BreakerState
from kvstore.routing.values import ProbeResult, WorkerWord
from kvstore.units import NS_PER_S

FAULTS_MAX: Final = 3
COOLDOWN_MS: Final = 1000
REST_NS: Final = NS_PER_S // 4
"""Time for which a worker gets no request after it said that it is full."""


class WorkerHealth:
    """See the module."""

    def __init__(self) -> None:
        self.breaker = Breaker(failures_max=FAULTS_MAX, cooldown_ms=COOLDOWN_MS)
        self.is_down = False
        self.is_silent = False
        """The worker is down because it is silent."""
        self.is_draining = self.is_terminating = False
        """Gets no new requests: draining by the policy, terminating by discovery."""
        self.was_reached = False
        """Its engine has answered a probe or a request."""
        self.late_s = 0.0
        """Seconds by which the last probe was late; 0: it was in time."""
        self.rests_until_ns = 0
        """Time until which it gets no request since it said that it is full; 0: it got one since
        then.
        """
        self.succeeded_ns = -1
        """Time of its last answer to a whole request."""
        self.suspected_ns = -1
        """Time of the last failure there that the request may have caused."""
        self.probe_trouble = self.fault = ""
        """Why it is down, and the last fault that counted; empty: none."""

    def probed(self, result: ProbeResult, why: str, late_s: float) -> None:
        """Take in the result of a probe, or that it is late by `late_s` seconds."""
        if result in (ProbeResult.ANSWERED, ProbeResult.LATE):
            self.late_s = late_s
        if result is ProbeResult.LATE:
            return
        was_down, self.is_down = self.is_down, result is not ProbeResult.ANSWERED
        self.is_silent = result is ProbeResult.SILENT
        self.probe_trouble = why
        if not self.is_down:
            self.was_reached = True
            if was_down:
                self.breaker.end_cooldown()

    def failed(self, why: str, now_ns: int) -> None:
        """Count a fault that is the worker's own."""
        self.fault = why
        self.breaker.failed(now_ns)

    def mark_full(self, now_ns: int) -> None:
        """The worker said that it is full: it gets no request for REST_NS."""
        self.breaker.return_probe()
        self.rests_until_ns = now_ns + REST_NS

    def begun(self) -> None:
        """A streamed answer has begun, and may still break off. The breaker closes, and the next
        failure opens it again, for longer."""
        self.was_reached = True
        self.breaker.begun()

    def succeeded(self, now_ns: int) -> None:
        """The worker answered a whole request, be it that the request is wrong."""
        self.was_reached, self.succeeded_ns, self.fault = True, now_ns, ""
        self.breaker.succeeded()

    @property
    def is_fine(self) -> bool:
        """Whether nothing speaks against sending requests there."""
        return self.is_up and not (self.late_s or self.rests_until_ns or self.breaker.is_open)

    @property
    def is_up(self) -> bool:
        """Whether it is neither down nor draining nor terminating."""
        return not (self.is_down or self.is_draining or self.is_terminating)

    @property
    def word(self) -> WorkerWord:
        """Its state for operators, the worst first."""
        if self.is_draining:
            return WorkerWord.DRAINING
        if self.is_down:
            return WorkerWord.DOWN
        if self.is_terminating:
            return WorkerWord.DRAINING
        if self.breaker.is_open:
            is_trying = self.breaker.state is BreakerState.HALF_OPEN
            return WorkerWord.HALF_OPEN if is_trying else WorkerWord.OPEN
        if not self.was_reached:
            return WorkerWord.NEW
        return WorkerWord.LATE if self.late_s else WorkerWord.UP

    @property
    def why(self) -> str:
        """The reason for its word; empty: none is needed."""
        if self.is_down:
            return self.probe_trouble
        if self.is_terminating:
            return "its pod terminates"
        return self.fault if self.breaker.is_open else ""
