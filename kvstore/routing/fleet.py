"""One row of numbers for each worker: own counts, scraped values, loads of other routers.

    Joined ─▶ row        sent ─▶ queued ─▶ began (first token) ─▶ streaming ─▶ ended        scraped

Rule 1: own counts are the truth about own requests, at once. Scraped values say what others have
there: scraped minus own at that moment. Older than STALE_S, they decay to the mean of the pool.
Rule 2: each flight is counted at one worker once, and its counts leave with it.
Rule 3: the use of a KV cache is what its engine says; own requests add what they need since then.
Rule 4: a flight whose response comes whole leaves the queue when its first token is predicted, or
when its engine has nobody waiting.
Does not cover: which worker is chosen (`decide`), prefixes (`features`), health (`rows`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.rows import (
    NEVER_NS,
    REST_NS,
    STALE_S,
    WEIGHTS,
    YOUNG_S,
    Crew,
    FleetColumn,
    Flight,
    Floats,
    StateChange,
    WorkerState,
    begin_as,
    may_replace,
)
from kvstore.routing.values import ProbeResult, WorkerRole, WorkerSpec
from kvstore.units import NS_PER_S
from kvstore.wire.load import EngineLoad

if TYPE_CHECKING:
    from kvstore.routing.events import Probed, Scraped, Shared

_ROWS_MIN: Final = 16


class Fleet:
    """All workers: a row of numbers and the state of each, and the flights there."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        """Policy in effect, for all parts of the core."""
        self.workers: list[WorkerState] = []
        self.row_of: dict[str, int] = {}
        self.columns: Floats = np.zeros((WEIGHTS.stop, _ROWS_MIN))
        self.flights: dict[Flight, None] = {}
        """Flights under way, in the order in which they were sent."""
        self._shared: dict[str, tuple[EngineLoad, ...]] = {}
        self._crews: dict[tuple[str, bool], Crew] = {}
        """(pool, whether for remote prefills) → workers; made anew when workers change."""
        self.doubtful: set[str] = set()
        """Workers that are not fine, whose keys differ, or that failed since they last answered."""
        self._news: dict[str, None] = {}
        """Workers whose state for operators may have changed since `take_changes`."""
        self._quiet: list[tuple[int, int, Flight]] = []
        """Heap of (predicted first token in ns, number, flight), for responses that hide the first
        token.
        """
        self._numbers = itertools.count()
        self.version = 0
        """Counts joins, departures, new descriptions and roles: the map of models is made anew."""

    def join(self, spec: WorkerSpec) -> None:
        """A new worker, or another description of one."""
        row = self.row_of.get(spec.worker)
        if row is not None:
            state = self.workers[row]
            if not state.spec.role is spec.role is WorkerRole.ANY:
                state.role = begin_as(spec.role)
            if state.spec.adapters != spec.adapters:
                state.adapters = frozenset(spec.adapters)  # until a scrape says which are loaded
            state.spec = spec
        else:
            row = self.row_of[spec.worker] = len(self.workers)
            self.workers.append(WorkerState(spec))
            if row == self.columns.shape[1]:
                self.columns = np.hstack([self.columns, np.zeros_like(self.columns)])
            self.columns[:, row] = 0
            self.columns[FleetColumn.SCRAPED_NS, row] = -1
            self.columns[FleetColumn.SENT_NS, row] = NEVER_NS
            self.columns[FleetColumn.HIT_RATIO : FleetColumn.FETCH_RATIO + 1, row] = 1
            known = self.columns[WEIGHTS, :row]  # of a new worker: the mean
            self.columns[WEIGHTS, row] = known.mean(axis=1) if row else 1
        self.columns[FleetColumn.MEMORY_TOKENS, row] = spec.memory_tokens
        self._drain(self.workers[row])
        self._changed()

    def adopt(self, policy: RoutingPolicy) -> None:
        """Use another policy from now on."""
        self.policy = policy
        for state in self.workers:
            self._drain(state)

    def _drain(self, state: WorkerState) -> None:
        state.is_draining = state.spec.worker in self.policy.draining
        self._doubt(state)

    def assign(self, worker: str, role: WorkerRole) -> None:
        """Give a flexible worker another role, from the next decision on."""
        state = self.workers[self.row_of[worker]]
        assert state.spec.role is WorkerRole.ANY, "an operator fixed it"
        state.role = role
        self._changed()

    def leave(self, worker: str) -> None:
        """Forget a worker, and end the flights that are there."""
        row = self.row_of.pop(worker, None)
        if row is None:
            return
        self.doubtful.discard(worker)
        for flight in [each for each in self.flights if each.worker == worker]:
            self.ended(flight, 0)
        last = len(self.workers) - 1
        if row != last:
            self.workers[row] = self.workers[last]
            self.columns[:, row] = self.columns[:, last]
            self.row_of[self.workers[row].spec.worker] = row
        self.workers.pop()
        self._changed()

    def _changed(self) -> None:
        self._crews.clear()
        self.version += 1
        self._share()

    # Health

    def state(self, worker: str) -> WorkerState | None:
        """State of a worker; None: it has left."""
        row = self.row_of.get(worker)
        return None if row is None else self.workers[row]

    def no_longer(self, worker: str, model: str) -> list[str]:
        """Workers whose context of a model is known to be no longer than that of this one."""
        state = self.state(worker)
        most = state.spec.context_of(model) if state is not None else 0
        return [s.spec.worker for s in self.workers if s.spec.context_of(model) <= most < math.inf]

    def probed(self, event: Probed) -> None:
        """Take in a probe's result; ignored for a worker that is not there."""
        if (row := self.row_of.get(event.worker)) is not None:
            state = self.workers[row]
            if state.is_down and event.result is ProbeResult.ANSWERED:
                state.without_media.clear()  # it may be another engine
            state.probed(event.result, event.why, event.late_s)
            self.columns[FleetColumn.LATE_S, row] = state.late_s
            self._doubt(state)

    def failed(self, worker: str, why: str, now_ns: int) -> None:
        """Count a fault that is a worker's own; no error if it has left."""
        if (state := self.state(worker)) is not None:
            state.fault = why
            state.breaker.failed(now_ns)
            self.doubtful.add(worker)
            self._news[worker] = None

    def count_failure(self, worker: str) -> None:
        """Count an attempt that failed at a worker, whoever is to blame."""
        if (state := self.state(worker)) is not None:
            state.failure_count += 1

    def failed_unproven(self, worker: str, why: str, now_ns: int) -> None:
        """A fault that may be the request's. Counted only if another worker of the pool has
        answered since this one answered, or was suspected, last: a row of such requests counts
        once.
        """
        if (state := self.state(worker)) is not None:
            others = (s for s in self.workers if s.spec.pool == state.spec.pool)
            since_ns, state.suspected_ns = max(state.succeeded_ns + 1, state.suspected_ns), now_ns
            if any(other.succeeded_ns >= since_ns for other in others):
                self.failed(worker, why, now_ns)
            else:
                state.breaker.return_probe()
                self._doubt(state)

    def record_no_fault(self, worker: str, now_ns: int, *, is_full: bool = False) -> None:
        """A worker refused a request, or the request was ended there: no fault. `is_full`: because
        the worker is full. No error if it has left.
        """
        if (state := self.state(worker)) is not None:
            state.breaker.return_probe()
            if is_full:
                state.rests_until_ns = now_ns + REST_NS
            self._doubt(state)

    def answered(self, worker: str, now_ns: int, *, is_whole: bool) -> None:
        """A worker answered a whole request (`is_whole`), or has begun to; no error if it
        has left.
        """
        if (state := self.state(worker)) is not None:
            is_news = worker in self.doubtful or not state.was_reached
            state.was_reached = True
            if is_whole:  # be it that the request is wrong
                state.succeeded_ns, state.fault = now_ns, ""
                state.breaker.succeeded()
            else:  # it may still break off: the next failure opens the breaker again, for longer
                state.breaker.begun()
            if is_news:
                self._doubt(state)

    def _doubt(self, state: WorkerState) -> None:
        self._news[state.spec.worker] = None
        if state.is_fine and not state.spec.is_red:
            self.doubtful.discard(state.spec.worker)
        else:
            self.doubtful.add(state.spec.worker)

    def take_changes(self) -> list[StateChange]:
        """New states of workers that changed since the last call."""
        if not self._news:
            return []
        news, self._news = self._news, {}
        found = []
        for worker in news:
            if (state := self.state(worker)) is not None:
                now = StateChange(worker, state.word, state.why)
                if now != state.said:
                    state.said = now
                    found.append(now)
        return found

    def silent_with_others(self, worker: str) -> bool:
        """Whether a worker is silent while one that may serve its requests answers its probes."""
        state = self.state(worker)
        if state is None or not state.is_silent:
            return False
        others = (s for s in self.workers if s is not state and may_replace(s.spec, state.spec))
        return any(other.is_up and other.was_reached for other in others)

    # Rows

    def crew(self, pool: str, *, prefill: bool) -> Crew:
        """Workers of a pool that serve remote prefills, or all the rest of a request."""
        found = self._crews.get((pool, prefill))
        if found is None:
            role = WorkerRole.PREFILL if prefill else WorkerRole.DECODE
            rows = [
                row
                for row, state in enumerate(self.workers)
                if state.spec.pool == pool
                and (state.role is role or (not prefill and state.role is WorkerRole.BOTH))
            ]
            found = self._crews[pool, prefill] = Crew(rows, self.workers)
        return found

    def planned_roles(self) -> dict[str, WorkerRole]:
        """Roles in effect of workers that may change them."""
        flexible = [s for s in self.workers if s.spec.role is WorkerRole.ANY]
        return {state.spec.worker: state.role for state in flexible}

    def flexible(self, pool: str) -> Crew:
        """Workers of a pool that are prefillers by the planner's choice, not by an operator's."""
        every = self.crew(pool, prefill=True).rows.tolist()
        return Crew([n for n in every if self.workers[n].spec.role is WorkerRole.ANY], self.workers)

    def sent(self, flight: Flight) -> None:
        """Count a flight at the worker that it is sent to."""
        assert flight not in self.flights
        worker, now_ns = flight.worker, flight.sent_ns
        row = self.row_of[worker]
        state = self.workers[row]
        if state.breaker.is_open:
            state.breaker.allows(now_ns)
            self._news[worker] = None
        state.rests_until_ns = 0
        state.request_count += 1
        column = self.columns[:, row]
        if not state.queue:
            column[FleetColumn.HEAD_S] = flight.work_s
            column[FleetColumn.HEAD_NS] = now_ns
        state.queue[flight] = self.flights[flight] = None
        if flight.begins_ns is not None:
            heapq.heappush(self._quiet, (flight.begins_ns, next(self._numbers), flight))
        column[FleetColumn.QUEUED] += 1
        column[FleetColumn.WORK_S] += flight.work_s
        column[FleetColumn.NEED_TOKENS] += flight.tokens
        column[FleetColumn.SENT_NS] = now_ns

    def pass_time(self, now_ns: int) -> None:
        """Count flights whose predicted first token is due as begun."""
        while self._quiet and self._quiet[0][0] <= now_ns:
            self.began(heapq.heappop(self._quiet)[2], now_ns)

    def began(self, flight: Flight, now_ns: int) -> None:
        """A flight got its first token: its prefill is done, and it streams; nothing if it has
        ended.
        """
        if flight not in self.flights or flight.has_begun:
            return
        flight.has_begun = True
        row = self.row_of[flight.worker]
        self._leave_queue(row, flight, now_ns)
        column = self.columns[:, row]
        column[FleetColumn.STREAMS] += 1
        age_s = (now_ns - column[FleetColumn.YOUNG_NS]) / NS_PER_S
        column[FleetColumn.YOUNG] = 1 + column[FleetColumn.YOUNG] * np.exp(-age_s / YOUNG_S)
        column[FleetColumn.YOUNG_NS] = now_ns
        column[FleetColumn.WAITING] = max(0.0, column[FleetColumn.WAITING] - 1)

    def ended(self, flight: Flight, now_ns: int) -> None:
        """A flight is not at its worker any more; no error if it was not."""
        if flight not in self.flights:
            return
        del self.flights[flight]
        row = self.row_of.get(flight.worker)
        if row is None:
            return
        if flight.has_begun:
            self.columns[FleetColumn.STREAMS, row] -= 1
        else:
            self._leave_queue(row, flight, now_ns)
        self.workers[row].left_ns.append(now_ns)
        column = self.columns[:, row]
        column[FleetColumn.WAITING] = max(0.0, column[FleetColumn.WAITING] - 1)
        if flight.sent_ns >= self.workers[row].reported_ns:
            column[FleetColumn.NEED_TOKENS] -= flight.tokens

    def _leave_queue(self, row: int, flight: Flight, now_ns: int) -> None:
        queue, column = self.workers[row].queue, self.columns[:, row]
        del queue[flight]
        column[FleetColumn.QUEUED] -= 1
        column[FleetColumn.WORK_S] = column[FleetColumn.WORK_S] - flight.work_s if queue else 0.0
        column[FleetColumn.HEAD_S] = next((each.work_s for each in queue), 0.0)
        column[FleetColumn.HEAD_NS] = now_ns

    def scraped(self, event: Scraped, now_ns: int) -> None:
        """Take in the numbers of an engine's metrics page; ignored for a worker that is not
        there.
        """
        row, sample, asked_ns = self.row_of.get(event.worker), event.sample, event.asked_ns
        if row is None:
            return
        state, column = self.workers[row], self.columns[:, row]
        if sample.adapters is not None:
            state.adapters = frozenset(sample.adapters)
        if sample.memory_used is not None:
            column[FleetColumn.USED] = sample.memory_used
            late = itertools.takewhile(
                lambda each: each.sent_ns >= asked_ns, reversed(self.flights)
            )
            column[FleetColumn.NEED_TOKENS] = sum(
                f.tokens for f in late if f.worker == event.worker
            )
            state.reported_ns = asked_ns
        waiting, running = sample.waiting, sample.running
        if waiting is None or running is None:
            return  # not said is not 0: what was known grows old
        if not waiting:
            for flight in list(state.queue):
                if flight.begins_ns is not None and flight.sent_ns < asked_ns:
                    self.began(flight, now_ns)
        # Its own queue is the truth: own requests that count as begun may still be in it.
        column[FleetColumn.WAITING] = waiting
        own_queued, own_streams = column[FleetColumn.QUEUED], column[FleetColumn.STREAMS]
        while state.left_ns and state.left_ns[0] < asked_ns:
            state.left_ns.popleft()
        others = column[FleetColumn.OTHER_QUEUED] = max(0.0, waiting - own_queued)
        # Own requests that ended since then may be in the page, too: they are not those of others.
        known = own_queued + own_streams + others + len(state.left_ns)
        column[FleetColumn.OTHER_STREAMS] = max(0.0, waiting + running - known)
        column[FleetColumn.SCRAPED_NS] = now_ns

    def in_flight(self, worker: str) -> int:
        """Own requests at a worker; 0: it has left."""
        row = self.row_of.get(worker)
        columns = (FleetColumn.QUEUED, FleetColumn.STREAMS)
        return 0 if row is None else int(self.columns[columns, row].sum())

    def loads(self) -> tuple[EngineLoad, ...]:
        """Load of own flights at each engine, for other routers."""
        streaming = self.columns[FleetColumn.STREAMS].tolist()
        rows = ((its.spec, its.queue, streaming[row]) for row, its in enumerate(self.workers))
        return tuple(
            EngineLoad(spec.url, spec.rank, round(sum(f.uncached for f in queue)), int(streams))
            for spec, queue, streams in rows
            if queue or streams
        )

    def shared(self, event: Shared, _now_ns: int) -> None:
        """Replace the loads of another router by all that it has in flight; none: it has nothing,
        or is gone.
        """
        self._shared.pop(event.router, None)
        if event.loads:
            self._shared[event.router] = event.loads
        self._share()

    def _share(self) -> None:
        both = self.columns[FleetColumn.SHARED_TOKENS : FleetColumn.SHARED_STREAMS + 1]
        both[:] = 0
        workers = self.workers if self._shared else ()  # no table of a thousand for each that joins
        rows = {(its.spec.url, its.spec.rank): row for row, its in enumerate(workers)}
        for loads in self._shared.values():
            for load in loads:
                if (row := rows.get((load.address, load.rank))) is not None:
                    both[:, row] += (load.prefill_tokens, load.streams)

    def decayed(self, part: Floats, now_ns: int) -> Floats:
        """Scraped columns (3 × rows) of a part of `columns`: fresh ones as they are, old ones on
        their way to the mean of the fresh, by half each STALE_S; never scraped: the mean."""
        values = part[FleetColumn.OTHER_QUEUED : FleetColumn.USED + 1]
        stamps = part[FleetColumn.SCRAPED_NS]
        oldest = np.minimum.reduce(stamps, initial=now_ns)
        is_fresh = oldest >= 0 and now_ns - oldest <= STALE_S * NS_PER_S
        if is_fresh or np.maximum.reduce(stamps, initial=-1) < 0:  # the latter: never scraped
            return values
        age_s = (now_ns - stamps) / NS_PER_S
        is_old = (age_s > STALE_S) | (stamps < 0)
        fresh = values[:, ~is_old]
        mean = fresh.mean(axis=1, keepdims=True) if fresh.size else np.zeros((3, 1))
        share = np.where(stamps < 0, 0.0, 0.5 ** (np.maximum(0.0, age_s - STALE_S) / STALE_S))
        return np.asarray(values * share + mean * (1 - share))
