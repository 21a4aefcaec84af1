"""One row of numbers for each worker: own counts, scraped values, loads of other routers.

    Joined ─▶ row        sent ─▶ queued ─▶ began (first token) ─▶ streaming ─▶ ended        scraped

Rule 1: own counts are the truth about own requests, at once. Scraped values say what others have
there: scraped minus own at that moment. Older than `stale_s`, they decay to the mean of the pool.
Rule 2: each flight is counted at one worker once, and its counts leave with it.
Does not cover: which worker is chosen (`decide`), prefixes (`features`).
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.breaker import Breaker
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.values import LoadSample, SharedLoad, WorkerHealth, WorkerRole, WorkerSpec
from kvstore.units import NS_PER_S

Floats = npt.NDArray[np.float64]
YOUNG_S: Final = 0.5
"""A stream has some dozens of tokens by then, over which a pause spreads."""
_ROWS_MIN: Final = 16
_MODELS_MAX: Final = 1000


class FleetColumn(enum.IntEnum):
    """Numbers of a row. Times stand together (`AGES`)."""

    QUEUED = 0
    """Own requests before their first token."""
    STREAMS = 1
    """Own requests after it."""
    WORK_S = 2
    """Prefill of those that are queued, in seconds."""
    HEAD_S = 3
    """The first in the queue alone: the one that is computed now."""
    HEAD_NS = 4
    """Since then."""
    YOUNG_NS = 5
    """When `YOUNG` was so."""
    SENT_NS = 6
    """`NEVER_NS`: nothing was."""
    SCRAPED_NS = 7
    """Less than 0: never."""
    YOUNG = 8
    """Streams whose first token was lately: decays with `YOUNG_S`."""
    HELD_TOKENS = 9
    """KV cache that own requests fill in the end."""
    OTHER_QUEUED = 10
    """By scraping: requests of others."""
    OTHER_STREAMS = 11
    OTHER_MEMORY = 12
    """Share of the KV cache."""
    SHARED_TOKENS = 13
    """By exchange: requests of other routers."""
    SHARED_STREAMS = 14
    MEMORY_TOKENS = 15
    """As described, with the next two: 0: not known."""
    TOKENS_PER_S = 16
    LOAD_BYTES_PER_S = 17
    HIT_RATIO = 18
    """Cached tokens observed over predicted, smoothed; 1 at the start."""
    FETCH_RATIO = 19
    """The same, of tokens that only another node had."""


NEVER_NS: Final = -1e15
BUSY_NS: Final = NS_PER_S // 4
"""A worker that is full by its own word gets no request for so long."""
AGES: Final = slice(FleetColumn.HEAD_NS, FleetColumn.SCRAPED_NS)


class Flight(msgspec.Struct):
    """A request at a worker."""

    worker: str
    work_s: float
    tokens: int
    uncached: float = 0.0
    """Tokens that it computes before its first one."""
    has_begun: bool = False


class WorkerState:
    """State of a worker that is no number."""

    def __init__(self, spec: WorkerSpec, policy: RoutingPolicy) -> None:
        self.spec = spec
        self.role = _begin_as(spec.role)
        """In effect; of a flexible worker, the planner's."""
        self.health = WorkerHealth.UP
        self.is_red = False
        self.adapters = frozenset(spec.adapters)
        self.queue: dict[str, float] = {}
        """Flights before their first token → seconds, in the order in which they were sent."""
        limits = policy.limits
        self.breaker = Breaker(failures_max=limits.failures_max, cooldown_ms=limits.cooldown_ms)
        self.busy_until_ns = 0
        """Full, by its own word; 0: it got a request since then."""


def _begin_as(role: WorkerRole) -> WorkerRole:
    return WorkerRole.BOTH if role is WorkerRole.ANY else role


class Crew:
    """Workers of a pool that serve one leg, in the order of their rows."""

    def __init__(self, rows: list[int], states: list[WorkerState]) -> None:
        self.rows = np.array(rows, dtype=np.intp)
        self.states = states
        self.names = [state.spec.worker for state in states]
        self.place_of = {name: place for place, name in enumerate(self.names)}
        self._serve: dict[str, bool] = {}
        self.base: Floats | None = None
        """Features that are the same for all requests (`features.load_columns`), …"""
        self.room: Floats = np.zeros(0)
        """… and tokens of each KV cache; not known: infinite."""

    def all_serve(self, model: str) -> bool:
        """Whether each serves a model."""
        found = self._serve.get(model)
        if found is None:
            specs = [state.spec for state in self.states]
            found = all(not spec.models or model in spec.models for spec in specs)
            if len(self._serve) >= _MODELS_MAX:
                self._serve.clear()
            self._serve[model] = found
        return found


class Fleet:
    """All workers."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.workers: list[WorkerState] = []
        self.row_of: dict[str, int] = {}
        self.columns: Floats = np.zeros((len(FleetColumn), _ROWS_MIN))
        self.flights: dict[str, Flight] = {}
        """By flight id."""
        self._shared: dict[str, tuple[SharedLoad, ...]] = {}
        self._crews: dict[tuple[str, bool], Crew] = {}
        """By pool, and whether it is for remote prefills."""
        self.doubtful: set[str] = set()
        """Workers that are not up, whose keys differ, or that failed since they last answered."""
        self.version = 0
        """Counts joins and departures: what depends on rows is made anew."""

    def join(self, spec: WorkerSpec) -> None:
        """A new worker, or another description of one."""
        row = self.row_of.get(spec.worker)
        if row is not None:
            state = self.workers[row]
            if not state.spec.role is spec.role is WorkerRole.ANY:
                state.role = _begin_as(spec.role)
            state.spec, state.adapters = spec, frozenset(spec.adapters)
        else:
            row = self.row_of[spec.worker] = len(self.workers)
            self.workers.append(WorkerState(spec, self.policy))
            if row == self.columns.shape[1]:
                self.columns = np.hstack([self.columns, np.zeros_like(self.columns)])
            self.columns[:, row] = 0
            self.columns[FleetColumn.SCRAPED_NS, row] = -1
            self.columns[FleetColumn.SENT_NS, row] = NEVER_NS
            self.columns[FleetColumn.HIT_RATIO : FleetColumn.FETCH_RATIO + 1, row] = 1
        self.columns[FleetColumn.MEMORY_TOKENS : FleetColumn.HIT_RATIO, row] = (
            spec.memory_tokens,
            spec.prefill_tokens_per_s,
            spec.load_bytes_per_s,
        )
        self._changed()

    def assign(self, worker: str, role: WorkerRole) -> None:
        """Another role for a flexible worker, from the next decision on."""
        state = self.workers[self.row_of[worker]]
        assert state.spec.role is WorkerRole.ANY, "an operator fixed it"
        state.role = role
        self._changed()

    def leave(self, worker: str) -> list[str]:
        """Forget a worker; flights that were there."""
        row = self.row_of.pop(worker, None)
        if row is None:
            return []
        self.doubtful.discard(worker)
        lost = [name for name, flight in self.flights.items() if flight.worker == worker]
        for name in lost:
            self.ended(name, 0)
        last = len(self.workers) - 1
        if row != last:
            self.workers[row] = self.workers[last]
            self.columns[:, row] = self.columns[:, last]
            self.row_of[self.workers[row].spec.worker] = row
        self.workers.pop()
        self._changed()
        return lost

    def _changed(self) -> None:
        self._crews.clear()
        self.version += 1
        self._share()

    def judged(self, worker: str, health: WorkerHealth, *, is_red: bool) -> None:
        """By probes, and by a comparison of keys; ignored for a worker that is not there."""
        if (row := self.row_of.get(worker)) is not None:
            state = self.workers[row]
            state.health, state.is_red = health, is_red
            self._doubt(state)

    def failed(self, worker: str, now_ns: int) -> None:
        """A worker failed; no error if it has left."""
        if (row := self.row_of.get(worker)) is not None:
            self.workers[row].breaker.failed(now_ns)
            self.doubtful.add(worker)

    def spared(self, worker: str, now_ns: int, *, is_busy: bool) -> None:
        """A worker refused a request, which is no failure; no error if it has left."""
        if (row := self.row_of.get(worker)) is not None:
            self.workers[row].breaker.unused()
            if is_busy:
                self.workers[row].busy_until_ns = now_ns + BUSY_NS
                self.doubtful.add(worker)

    def succeeded(self, worker: str) -> None:
        """A worker answered; no error if it has left."""
        if (row := self.row_of.get(worker)) is not None:
            self.workers[row].breaker.succeeded()
            if self.doubtful:
                self._doubt(self.workers[row])

    def _doubt(self, state: WorkerState) -> None:
        is_fine = state.health is WorkerHealth.UP and not state.is_red
        if is_fine and not state.breaker.is_open and not state.busy_until_ns:
            self.doubtful.discard(state.spec.worker)
        else:
            self.doubtful.add(state.spec.worker)

    def rows(self, pool: str, *, prefill: bool) -> npt.NDArray[np.intp]:
        """Rows of a pool that serve remote prefills, or all the rest of a request."""
        return self.crew(pool, prefill=prefill).rows

    def crew(self, pool: str, *, prefill: bool) -> Crew:
        """As `rows`, with the workers."""
        found = self._crews.get((pool, prefill))
        if found is None:
            role = WorkerRole.PREFILL if prefill else WorkerRole.DECODE
            rows = [
                row
                for row, state in enumerate(self.workers)
                if state.spec.pool == pool
                and (state.role is role or (not prefill and state.role is WorkerRole.BOTH))
            ]
            found = self._crews[pool, prefill] = Crew(rows, [self.workers[row] for row in rows])
        return found

    def planned_roles(self) -> dict[str, WorkerRole]:
        """Roles in effect of workers that may change them."""
        flexible = [s for s in self.workers if s.spec.role is WorkerRole.ANY]
        return {state.spec.worker: state.role for state in flexible}

    def flexible(self, pool: str) -> Crew:
        """Prefillers that an operator did not fix."""
        every = self.rows(pool, prefill=True).tolist()
        rows = [row for row in every if self.workers[row].spec.role is WorkerRole.ANY]
        return Crew(rows, [self.workers[row] for row in rows])

    def sent(
        self,
        flight: str,
        worker: str,
        *,
        work_s: float,
        tokens: int,
        now_ns: int,
        uncached: float = 0.0,
    ) -> None:
        """A request is on its way to a worker."""
        assert flight not in self.flights
        row = self.row_of[worker]
        queue = self.workers[row].queue
        self.workers[row].busy_until_ns = 0
        column = self.columns[:, row]
        if not queue:
            column[FleetColumn.HEAD_S] = work_s
            column[FleetColumn.HEAD_NS] = now_ns
        queue[flight] = work_s
        self.flights[flight] = Flight(worker, work_s, tokens, uncached)
        column[FleetColumn.QUEUED] += 1
        column[FleetColumn.WORK_S] += work_s
        column[FleetColumn.HELD_TOKENS] += tokens
        column[FleetColumn.SENT_NS] = now_ns

    def began(self, flight_id: str, now_ns: int) -> None:
        """First token: its prefill is done."""
        flight = self.flights.get(flight_id)
        if flight is None or flight.has_begun:
            return
        flight.has_begun = True
        row = self.row_of[flight.worker]
        self._leave_queue(row, flight_id, now_ns)
        column = self.columns[:, row]
        column[FleetColumn.STREAMS] += 1
        age_s = (now_ns - column[FleetColumn.YOUNG_NS]) / NS_PER_S
        column[FleetColumn.YOUNG] = 1 + column[FleetColumn.YOUNG] * np.exp(-age_s / YOUNG_S)
        column[FleetColumn.YOUNG_NS] = now_ns

    def ended(self, flight_id: str, now_ns: int) -> None:
        """The request is not at the worker any more; no error if it never was."""
        flight = self.flights.pop(flight_id, None)
        row = None if flight is None else self.row_of.get(flight.worker)
        if flight is None or row is None:
            return
        if flight.has_begun:
            self.columns[FleetColumn.STREAMS, row] -= 1
        else:
            self._leave_queue(row, flight_id, now_ns)
        self.columns[FleetColumn.HELD_TOKENS, row] -= flight.tokens

    def _leave_queue(self, row: int, flight_id: str, now_ns: int) -> None:
        queue, column = self.workers[row].queue, self.columns[:, row]
        work_s = queue.pop(flight_id)
        column[FleetColumn.QUEUED] -= 1
        column[FleetColumn.WORK_S] = column[FleetColumn.WORK_S] - work_s if queue else 0.0
        column[FleetColumn.HEAD_S] = next(iter(queue.values()), 0.0)
        column[FleetColumn.HEAD_NS] = now_ns

    def scraped(self, worker: str, sample: LoadSample, now_ns: int) -> None:
        """Numbers of the engine's metrics; ignored for a worker that is not there."""
        row = self.row_of.get(worker)
        if row is None:
            return
        state, column = self.workers[row], self.columns[:, row]
        if sample.adapters is not None:
            state.adapters = frozenset(sample.adapters)
        waiting, running = sample.waiting, sample.running
        if waiting is None or running is None:
            return  # not said is not 0: what was known grows old
        own_queued, own_streams = column[FleetColumn.QUEUED], column[FleetColumn.STREAMS]
        foreign = max(0.0, waiting + running - own_queued - own_streams)
        column[FleetColumn.OTHER_QUEUED] = min(foreign, waiting)
        column[FleetColumn.OTHER_STREAMS] = foreign - column[FleetColumn.OTHER_QUEUED]
        if sample.memory_used is not None:
            own = column[FleetColumn.HELD_TOKENS] / max(1, state.spec.memory_tokens)
            column[FleetColumn.OTHER_MEMORY] = max(0.0, sample.memory_used - own)
        column[FleetColumn.SCRAPED_NS] = now_ns

    def loads(self) -> tuple[SharedLoad, ...]:
        """Own flights, by worker."""
        sums: dict[str, tuple[float, int]] = {}
        for flight in self.flights.values():
            tokens, streams = sums.get(flight.worker, (0.0, 0))
            if flight.has_begun:
                sums[flight.worker] = tokens, streams + 1
            else:
                sums[flight.worker] = tokens + flight.uncached, streams
        return tuple(SharedLoad(name, round(t), streams) for name, (t, streams) in sums.items())

    def shared(self, router: str, loads: tuple[SharedLoad, ...]) -> None:
        """All that another router has in flight; none: it has nothing, or is gone."""
        self._shared.pop(router, None)
        if loads:
            self._shared[router] = loads
        self._share()

    def _share(self) -> None:
        both = self.columns[FleetColumn.SHARED_TOKENS : FleetColumn.SHARED_STREAMS + 1]
        both[:] = 0
        for loads in self._shared.values():
            for load in loads:
                if (row := self.row_of.get(load.worker)) is not None:
                    both[:, row] += (load.prefill_tokens, load.streams)

    def decayed(self, part: Floats, now_ns: int) -> Floats:
        """Scraped columns (3 × rows) of a part of `columns`: fresh ones as they are, old ones on
        their way to the mean of the fresh, by half each `stale_s`; never scraped: the mean."""
        values = part[FleetColumn.OTHER_QUEUED : FleetColumn.OTHER_MEMORY + 1]
        stamps, stale_s = part[FleetColumn.SCRAPED_NS], self.policy.limits.stale_s
        oldest = np.minimum.reduce(stamps, initial=now_ns)
        is_fresh = oldest >= 0 and now_ns - oldest <= stale_s * NS_PER_S
        if is_fresh or np.maximum.reduce(stamps, initial=-1) < 0:  # the latter: never scraped
            return values
        age_s = (now_ns - stamps) / NS_PER_S
        is_old = (age_s > stale_s) | (stamps < 0)
        fresh = values[:, ~is_old]
        mean = fresh.mean(axis=1, keepdims=True) if fresh.size else np.zeros((3, 1))
        share = np.where(stamps < 0, 0.0, 0.5 ** (np.maximum(0.0, age_s - stale_s) / stale_s))
        return np.asarray(values * share + mean * (1 - share))

    def check(self) -> None:
        """Counts equal the flights. Raises AssertionError if not."""
        assert self.row_of == {w.spec.worker: row for row, w in enumerate(self.workers)}
        for row, state in enumerate(self.workers):
            name, column = state.spec.worker, self.columns[:, row]
            here = {k: f for k, f in self.flights.items() if f.worker == name}
            queued = {k: f.work_s for k, f in here.items() if not f.has_begun}
            assert state.queue == queued
            assert column[FleetColumn.QUEUED] == len(queued)
            assert column[FleetColumn.STREAMS] == len(here) - len(queued)
            assert column[FleetColumn.HELD_TOKENS] == sum(f.tokens for f in here.values())
            assert abs(column[FleetColumn.WORK_S] - sum(queued.values())) < 1e-6
        assert all(flight.worker in self.row_of for flight in self.flights.values())
