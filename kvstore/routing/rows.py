"""Rows of the fleet: numbers, flights, health and state of each worker, and the workers of a pool.

Covers: values. Does not cover: what changes them (`fleet`).
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.breaker import Breaker, BreakerState
from kvstore.routing.values import ProbeResult, WorkerRole, WorkerSpec, WorkerWord
from kvstore.types import Latest
from kvstore.units import NS_PER_S

# ── health ────────────────────────────────────────────────────────────────────────────────────────
# Probes of a worker, its answers, its circuit breaker.
#
#     probe ─▶ `probed` ─▶ answering, late, down        answers and faults ─▶ `Fleet`: the breaker
#                         └──────────── `word` ─▶ pages, logs ────┘
#
# | word      | shown by                                          | requests                       |
# |-----------|---------------------------------------------------|--------------------------------|
# | up        | a probe that was answered                         | yes                            |
# | late      | no answer to a probe, and no byte of a response,  | yes, the lateness is a cost    |
# |           | for longer than usual                             |                                |
# | open      | FAULTS_MAX faults in a row                        | one after a cool-down; more    |
# |           |                                                   | where no worker is up          |
# | draining  | the policy                                        | no                             |
# |           | discovery: it terminates                          | where no worker is up or open  |
# | down      | a refused connection, an unwell engine, silence   | where there is none of these   |
#
# Rule 1: a time-out is no fault. An engine whose probes are answered is slow, not broken.
# Rule 2: only the policy excludes a worker for good: what is left is tried (`LAST_RESORTS`).
# Rule 3: the first answered probe of a worker that was down ends the cool-down of its breaker.

FAULTS_MAX: Final = 3
COOLDOWN_MS: Final = 1000
REST_NS: Final = NS_PER_S // 4
"""Time for which a worker gets no request after it said that it is full."""

# ── rows ──────────────────────────────────────────────────────────────────────────────────────────

Floats = npt.NDArray[np.float64]
STALE_S: Final = 2.0
"""Scraped numbers older than this decay to the pool's mean, by half each STALE_S."""
YOUNG_S: Final = 0.5
"""Time in which a stream ceases to be young: by then it has some dozens of tokens, over which a
pause spreads.
"""
MODELS_MAX: Final = 1000


class FleetColumn(enum.IntEnum):
    """Numbers of a row. Times stand together (`AGES`)."""

    QUEUED = 0
    """Own requests before their first token."""
    STREAMS = 1
    """Own requests after their first token."""
    WORK_S = 2
    """Seconds of prefill of all queued own requests."""
    HEAD_S = 3
    """Seconds of prefill of the first in the queue, which is computed now."""
    HEAD_NS = 4
    """When the first in the queue came to be first, in ns."""
    YOUNG_NS = 5
    """When `YOUNG` had its value, in ns."""
    SENT_NS = 6
    """When a request was last sent, in ns; `NEVER_NS`: none was."""
    SCRAPED_NS = 7
    """When numbers were last scraped, in ns; less than 0: never."""
    YOUNG = 8
    """Streams whose first token was lately; decays with time constant `YOUNG_S`."""
    NEED_TOKENS = 9
    """Tokens of KV cache that own requests need beyond the engine's last report of use."""
    OTHER_QUEUED = 10
    """Requests of others by scraping: queued; OTHER_STREAMS: running."""
    OTHER_STREAMS = 11
    USED = 12
    """Share of the KV cache in use, by its last report; 0: it gives none."""
    SHARED_TOKENS = 13
    """Load of other routers, as they report it: uncached tokens; SHARED_STREAMS: streams."""
    SHARED_STREAMS = 14
    MEMORY_TOKENS = 15
    """Tokens that the KV cache holds, as described; 0: not known."""
    HIT_RATIO = 16
    """Cached tokens observed over predicted, smoothed; 1 at the start."""
    FETCH_RATIO = 17
    """Cached tokens observed over predicted, of those that only another node had; smoothed."""
    WAITING = 18
    """Requests in the engine's own queue: by its last report, less own ones that began or ended."""
    LATE_S = 19
    """Seconds by which its last probe was late."""


NEVER_NS: Final = -1e15
AGES: Final = slice(FleetColumn.HEAD_NS, FleetColumn.SCRAPED_NS)


class Term(enum.IntEnum):
    """Terms of a cost; those up to OTHERS add up to the TTFT and have a learned weight."""

    BASE = 0
    QUEUE = 1
    LOAD = 2
    COMPUTE = 3
    INTERFERENCE = 4
    LINK = 5
    OTHERS = 6


LEARNED: Final = Term.OTHERS
WEIGHTS: Final = slice(len(FleetColumn), len(FleetColumn) + LEARNED)
"""Learned weights of the terms, behind the other columns; 1 at the start."""


class Flight(msgspec.Struct, eq=False):
    """A leg of a request at a worker, and the load that it brings there."""

    worker: str
    work_s: float
    tokens: int
    sent_ns: int
    uncached: float = 0.0
    """Uncached tokens that the worker computes before the first one."""
    begins_ns: int | None = None
    """Predicted time of the first token, if the response comes whole and hides it; None:
    streamed.
    """
    has_begun: bool = False


class StateChange(NamedTuple):
    """A worker has another state for operators, or another reason for it."""

    worker: str
    word: WorkerWord
    why: str


class WorkerState:
    """State of a worker that is no number; its health is part of it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.role = begin_as(spec.role)
        """Role in effect; for a flexible worker, the planner's choice."""
        self.adapters = frozenset(spec.adapters)
        self.without_media = set[str]()
        """Models that take no images, audio or video there, by the engine's own word."""
        self.queue: dict[Flight, None] = {}
        """Flights before their first token, in the order in which they were sent."""
        self.request_count = self.failure_count = 0
        """Attempts that were sent there, and that failed there."""
        self.left_ns = deque[int](maxlen=1024)
        """When own requests ended, in ns, since the last page of metrics was asked for."""
        self.reported_ns = -1
        """When the engine last reported its use of memory, in ns."""
        self.said = StateChange(spec.worker, WorkerWord.NEW, "")
        self.breaker = Breaker(failures_max=FAULTS_MAX, cooldown_ms=COOLDOWN_MS)
        self.is_down = False
        self.is_silent = False
        """The worker is down because it is silent."""
        self.is_draining = False
        """Gets no new requests, by the policy."""
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

    @property
    def is_fine(self) -> bool:
        """Whether nothing speaks against sending requests there."""
        return self.is_up and not (self.late_s or self.rests_until_ns or self.breaker.is_open)

    @property
    def is_up(self) -> bool:
        """Whether it is neither down nor draining nor terminating."""
        return not (self.is_down or self.is_draining or self.spec.is_terminating)

    @property
    def word(self) -> WorkerWord:
        """Its state for operators, the worst first."""
        if self.is_draining:
            return WorkerWord.DRAINING
        if self.is_down:
            return WorkerWord.DOWN
        if self.spec.is_terminating:
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
        if self.spec.is_terminating:
            return "its pod terminates"
        return self.fault if self.breaker.is_open else ""


def may_replace(other: WorkerSpec, spec: WorkerSpec) -> bool:
    """Whether a worker may serve what was sent to another one."""
    is_prefiller = other.role is WorkerRole.PREFILL
    if other.pool != spec.pool or (is_prefiller and spec.role is not WorkerRole.PREFILL):
        return False
    return not (other.models and spec.models and {*other.models}.isdisjoint(spec.models))


def begin_as(role: WorkerRole) -> WorkerRole:
    """Role of a worker until the planner gives it another one."""
    return WorkerRole.BOTH if role is WorkerRole.ANY else role


class CrewFit(NamedTuple):
    """Whether the workers of a crew serve a model, and their context lengths for it."""

    all_serve: bool
    least_tokens: float
    """Shortest context of the workers, in tokens, prompt and output together; infinite:
    not known.
    """
    most_tokens: float
    """Longest context of the workers, as `least_tokens`."""


class Crew:
    """Workers of a pool that serve one leg, in the order of their rows."""

    def __init__(self, rows: list[int], workers: list[WorkerState]) -> None:
        self.rows = np.array(rows, dtype=np.intp)
        self.states = [workers[row] for row in rows]
        self.names = [state.spec.worker for state in self.states]
        self.place_of = {name: place for place, name in enumerate(self.names)}
        self.place_of_engine: dict[tuple[str, str, int], int] = {}
        """By node, engine and rank."""
        self.places_of_node: dict[str, list[int]] = {}
        for place, spec in enumerate(state.spec for state in self.states):
            if spec.engine:
                self.place_of_engine[spec.node, spec.engine, spec.rank] = place
            if spec.node:
                self.places_of_node.setdefault(spec.node, []).append(place)
        self.has_strangers = not all(state.spec.is_followed for state in self.states)
        """Whether the index does not follow some of them."""
        self._fits = Latest[str, CrewFit](MODELS_MAX)
        self.base: Floats | None = None
        """Features that are the same for all requests (`features.load_columns`); None: not made
        yet.
        """
        self.room: Floats = np.zeros(0)
        """Tokens of each worker's KV cache; infinite: not known."""

    def fit(self, model: str) -> CrewFit:
        """Fit of a model, by the workers' descriptions."""
        found = self._fits.get(model)
        if found is None:
            specs = [state.spec for state in self.states]
            known = [spec.context_of(model) for spec in specs]
            all_serve = all(not spec.models or model in spec.models for spec in specs)
            least, most = min(known, default=math.inf), max(known, default=math.inf)
            found = CrewFit(all_serve, least, most)
            self._fits[model] = found
        return found
