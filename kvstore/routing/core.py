"""The whole: events in, commands out.

    core = RouterCore(policy, seed=…)
    for command in core.step(Arrived(request, prefix), now_ns): …

The shell calls `step` on one thread. A decision counts as sent: the shell sends it or says
`LegFailed`. After `LegFailed` of one leg the other leg is void, too: the next `Routed` starts both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvstore.routing import events as its
from kvstore.routing.events import Ending, Rejected, RejectReason, RequestHeld, RouteCommand, Routed
from kvstore.routing.features import load_columns
from kvstore.routing.fleet import Fleet, FleetColumn
from kvstore.routing.learning import smoothed_ratio
from kvstore.routing.models import ModelMap, ModelUnknown
from kvstore.routing.placing import Blocked, OpenRequest, Placement, Placer
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.pressure import Rung, Saturation, WorkRate, desired_replicas, saturation
from kvstore.routing.receipts import Receipt, ReceiptLog, RouteOutcome
from kvstore.routing.split import LaneEntry
from kvstore.routing.tree import ApproximateTree
from kvstore.routing.values import PrefixAnswer, RouteRequest, SharedLoad, WorkerRole
from kvstore.routing.waiting import HeldEntry, WaitingRoom
from kvstore.units import NS_PER_S

_HEADS_MAX: Final = 4
"""Heads of the waiting room that one event tries to place."""
_STATUS: Final = {
    RejectReason.MODEL_UNKNOWN: 404,
    RejectReason.NO_ENDPOINTS: 503,
    RejectReason.SATURATED: 429,
    RejectReason.OBJECTIVE: 429,
    RejectReason.EXPIRED: 503,
    RejectReason.DISPLACED: 429,
    RejectReason.ATTEMPTS: 502,
}


class RouterCore:
    """One router.

    Args:
        policy: replaced as a whole by `adopt`.
        seed: a random number of this process.
    """

    def __init__(self, policy: RoutingPolicy, *, seed: int) -> None:
        self.policy = policy
        self.fleet = Fleet(policy)
        self.tree = ApproximateTree(blocks_max=policy.tree_blocks_max)
        self.placer = Placer(policy, self.fleet, self.tree, seed)
        self.room = WaitingRoom(policy)
        self._models: ModelMap | None = None
        self.open: dict[str, OpenRequest] = {}
        self.receipts = ReceiptLog()
        self._number = 0
        self._retries_left = float(policy.limits.retry_burst)
        self._rates: dict[tuple[str, WorkerRole], WorkRate] = {}
        self._handlers: dict[type, Callable[[Any, int], list[RouteCommand]]] = {
            its.Joined: self._joined,
            its.WorkerLeft: self._worker_left,
            its.Judged: self._judged,
            its.Scraped: self._scraped,
            its.Shared: self._shared,
            its.Arrived: self._arrived,
            its.PrefillDone: self._prefill_done,
            its.FirstToken: self._first_token,
            its.LegFailed: self._leg_failed,
            its.RequestEnded: self._request_ended,
            its.RouteTick: lambda *_: [],
        }

    def step(self, event: its.RouteEvent, now_ns: int) -> list[RouteCommand]:
        """Take in an event; commands about this request and others, in order."""
        commands = self._expire(now_ns) if len(self.room) else []
        commands += self._handlers[type(event)](event, now_ns)
        if len(self.room) and not isinstance(event, its.Arrived):
            commands += self._pump(now_ns)
        return commands

    def adopt(self, policy: RoutingPolicy, now_ns: int) -> list[RouteCommand]:
        """Go on under another policy; held requests are judged by it."""
        self.policy = self.fleet.policy = self.room.policy = policy
        self.placer.adopt(policy)
        self._models = None
        held = list(self.room.entries.values())
        self.room = WaitingRoom(policy)
        for entry in held:
            opened = self.open[entry.request_id]
            opened.service = self._service(opened.request)
            is_laned = entry.request_id in self.placer.lanes.get(entry.pool, ())
            entry = msgspec.structs.replace(entry, service=opened.service)
            self.room.add(entry, is_elsewhere=is_laned)
        return self._pump(now_ns)

    # Workers

    def _joined(self, event: its.Joined, _now_ns: int) -> list[RouteCommand]:
        self.fleet.join(event.spec)
        self._models = None
        return []

    def _worker_left(self, event: its.WorkerLeft, _now_ns: int) -> list[RouteCommand]:
        self.fleet.leave(event.worker)
        self.tree.forget(event.worker)
        self.placer.weights.forget(event.worker)
        self._models = None
        return []

    @property
    def models(self) -> ModelMap:
        """Made anew when a request asks: a thousand workers may join or leave in one turn."""
        if self._models is None:
            specs = [state.spec for state in self.fleet.workers]
            served = [(model, spec.pool) for spec in specs for model in spec.models or ("",)]
            self._models = ModelMap(self.policy, served)
        return self._models

    def _judged(self, event: its.Judged, _now_ns: int) -> list[RouteCommand]:
        row = self.fleet.row_of.get(event.worker)
        if row is not None:
            state = self.fleet.workers[row]
            state.health, state.is_red = event.health, event.is_parity_red
        return []

    def _scraped(self, event: its.Scraped, now_ns: int) -> list[RouteCommand]:
        self.fleet.scraped(event.worker, event.sample, now_ns)
        return []

    def _shared(self, event: its.Shared, _now_ns: int) -> list[RouteCommand]:
        self.fleet.shared(event.router, event.loads)
        return []

    # Requests

    def _arrived(self, event: its.Arrived, now_ns: int) -> list[RouteCommand]:
        request = event.request
        assert request.request_id not in self.open, "request ids are unique among those under way"
        opened = self._opened(request, event.prefix, now_ns)
        if isinstance(opened, Rejected):
            return [opened]
        self.open[request.request_id] = opened
        limits = self.policy.limits
        self._retries_left = min(limits.retry_burst, self._retries_left + limits.retry_share)
        return self._attempt(opened, now_ns)

    def _opened(
        self, request: RouteRequest, prefix: PrefixAnswer | None, now_ns: int
    ) -> OpenRequest | Rejected:
        try:
            side = self.models.resolve(
                request.model, session=request.session, request_id=request.request_id
            )
        except ModelUnknown as unknown:
            return Rejected(
                request.request_id, 404, RejectReason.MODEL_UNKNOWN, None, unknown.known, None
            )
        self._number += 1
        return OpenRequest(
            request, prefix, side, self._service(request), now_ns, number=self._number
        )

    def _service(self, request: RouteRequest) -> str:
        known = request.service in self.policy.classes
        return request.service if known else self.policy.default_class

    def _attempt(self, opened: OpenRequest, now_ns: int) -> list[RouteCommand]:
        """Place a request that is not held: routed, held or rejected."""
        service, pool = self.policy.classes[opened.service], opened.side.pool
        objective = opened.request.ttft_s or service.ttft_s
        self.placer.see(opened)
        placed: Placement | Blocked = Blocked.LOAD
        ahead = 0
        if opened.attempt == 0 and self.room.has_before(pool, service.rank):
            ahead = self.room.ahead(pool, service.rank)
        else:
            placed = self.placer.place(opened, now_ns)
        if isinstance(placed, Placement):
            excess_s = placed.predicted_s - objective
            if objective and excess_s > 0 and not opened.attempt:
                return [self._reject(opened, RejectReason.OBJECTIVE, now_ns, excess_s=excess_s)]
            return [self._send(opened, placed, now_ns)]
        if placed is Blocked.NO_WORKERS and not self._may_wait_for_workers(opened):
            reason = RejectReason.ATTEMPTS if opened.attempt else RejectReason.NO_ENDPOINTS
            return [self._reject(opened, reason, now_ns)]
        wait_s = self.room.wait_s(ahead, now_ns)
        if objective and wait_s > objective and not opened.attempt:
            excess_s = wait_s - objective
            return [self._reject(opened, RejectReason.OBJECTIVE, now_ns, excess_s=excess_s)]
        return self._hold(opened, placed, now_ns)

    def _may_wait_for_workers(self, opened: OpenRequest) -> bool:
        has_workers = self.fleet.rows(opened.side.pool, prefill=False).size > 0
        return self.policy.limits.holds_without_workers and not has_workers

    def _hold(self, opened: OpenRequest, why: Blocked, now_ns: int) -> list[RouteCommand]:
        request, service = opened.request, self.policy.classes[opened.service]
        if self.room.is_full(opened.service):
            return [self._reject(opened, RejectReason.SATURATED, now_ns)]
        ahead = self.room.ahead(opened.side.pool, service.rank)
        entry = HeldEntry(
            request.request_id,
            opened.side.pool,
            opened.service,
            request.tenant,
            request.priority,
            opened.number,
            opened.arrived_ns,
            opened.arrived_ns + int(service.ttl_s * NS_PER_S),
        )
        displaced = self.room.add(entry, is_elsewhere=why is Blocked.LANES)
        if displaced is entry:
            return [self._reject(opened, RejectReason.SATURATED, now_ns)]
        opened.is_held = opened.was_held = True
        if why is Blocked.LANES:
            self._queue_prefill(opened, now_ns)
        commands: list[RouteCommand] = []
        if displaced is not None:
            evicted = self.open[displaced.request_id]
            commands.append(self._reject(evicted, RejectReason.DISPLACED, now_ns))
        wait_s = self.room.wait_s(ahead, now_ns)
        commands.append(RequestHeld(request.request_id, ahead, wait_s, opened.likely_worker))
        return commands

    def _queue_prefill(self, opened: OpenRequest, now_ns: int) -> None:
        """Into the lanes, by the prompt's length less what was hit at the last judgement."""
        _, lanes = self.placer.split_of(opened.side.pool)
        request = opened.request
        lanes.add(
            LaneEntry(
                request.request_id,
                opened.uncached or request.prompt_tokens,
                request.priority,
                now_ns,
                opened.number,
            )
        )

    def _send(self, opened: OpenRequest, placed: Placement, now_ns: int) -> Routed:
        request, limits = opened.request, self.policy.limits
        name = request.request_id
        self.room.remove(name)
        if opened.side.pool in self.placer.lanes:
            self.placer.lanes[opened.side.pool].remove(name)
        self.room.taken(request.tenant, placed.uncached, now_ns, was_held=opened.is_held)
        opened.is_held = False
        opened.attempt += 1
        opened.routed_ns, opened.placement = now_ns, placed
        is_remote = bool(placed.prefill_worker)
        for worker in (placed.worker, placed.prefill_worker) if is_remote else (placed.worker,):
            self.fleet.workers[self.fleet.row_of[worker]].breaker.allows(now_ns)
        self.fleet.sent(
            name,
            placed.worker,
            work_s=0.0 if is_remote else placed.work_s,
            tokens=placed.need_tokens,
            now_ns=now_ns,
            uncached=0.0 if is_remote else placed.uncached,
        )
        if is_remote:
            self.fleet.sent(
                _prefill_of(name),
                placed.prefill_worker,
                work_s=placed.work_s,
                tokens=request.prompt_tokens,
                now_ns=now_ns,
                uncached=placed.uncached,
            )
        computes = placed.prefill_worker or placed.worker
        role = self.fleet.workers[self.fleet.row_of[computes]].spec.role
        self._rate(opened.side.pool, role).add(placed.work_s, now_ns)
        self.placer.sent(placed, request)
        for worker in {computes, placed.worker}:
            self.tree.insert(request.keys, worker, now_ns, block_tokens=request.block_tokens)
        assert placed.receipt is not None
        race_s = limits.race_after_s
        can_race = race_s and not request.has_side_effects and placed.receipt.fallbacks
        return Routed(
            request_id=name,
            worker=placed.worker,
            model=opened.side.body_model,
            prefill_worker=placed.prefill_worker or None,
            fallbacks=placed.receipt.fallbacks,
            attempt=opened.attempt,
            priority=self.policy.classes[opened.service].rank * 100 - request.priority,
            deadline_s=max(limits.timeout_s_min, limits.timeout_factor * placed.predicted_s),
            race_after_s=race_s
            if can_race and Rung.NO_RACE.value not in placed.receipt.degraded
            else None,
            receipt=placed.receipt,
        )

    def _reject(
        self, opened: OpenRequest, reason: RejectReason, now_ns: int, *, excess_s: float = 0.0
    ) -> Rejected:
        request, pool = opened.request, opened.side.pool
        rank = self.policy.classes[opened.service].rank
        retry_s = None
        if _STATUS[reason] in (429, 503):
            retry_s = self.room.retry_after_s(self.room.ahead(pool, rank), excess_s, now_ns)
        self._close(opened, Ending.FAILED, now_ns)
        receipt = None if opened.placement is None else opened.placement.receipt
        return Rejected(request.request_id, _STATUS[reason], reason, retry_s, (), receipt)

    def _close(self, opened: OpenRequest, end: Ending, now_ns: int) -> None:
        """Take a request out of every table."""
        name = opened.request.request_id
        del self.open[name]
        self.room.remove(name)
        if opened.side.pool in self.placer.lanes:
            self.placer.lanes[opened.side.pool].remove(name)
        self.fleet.ended(name, now_ns)
        self.fleet.ended(_prefill_of(name), now_ns)
        if opened.placement is not None and opened.placement.receipt is not None:
            outcome = RouteOutcome(
                opened.ttft_s, opened.cached_tokens, opened.output_tokens, opened.attempt, end.value
            )
            self.receipts.keep(opened.placement.receipt, outcome)

    def _prefill_done(self, event: its.PrefillDone, now_ns: int) -> list[RouteCommand]:
        opened = self.open.get(event.request_id)
        if opened is not None and opened.placement is not None:
            self._succeeded(opened.placement.prefill_worker)
            self.fleet.ended(_prefill_of(event.request_id), now_ns)
        return []

    def _first_token(self, event: its.FirstToken, now_ns: int) -> list[RouteCommand]:
        opened = self.open.get(event.request_id)
        placed = None if opened is None else opened.placement
        if opened is None or placed is None or opened.has_begun:
            return []
        opened.has_begun = True
        opened.ttft_s = (now_ns - opened.arrived_ns) / NS_PER_S
        self.fleet.ended(_prefill_of(event.request_id), now_ns)
        self.fleet.began(event.request_id, now_ns)
        self._succeeded(placed.worker)
        achieved_s = (now_ns - opened.routed_ns) / NS_PER_S
        self.placer.weights.learn(placed.prefill_worker or placed.worker, placed.raw, achieved_s)
        if placed.prefill_worker:
            split, _ = self.placer.split_of(opened.side.pool)
            split.learn(uncached=placed.uncached, remote_s=achieved_s, local_s=placed.local_s)
        return []

    def _succeeded(self, worker: str) -> None:
        row = self.fleet.row_of.get(worker)
        if row is not None:
            self.fleet.workers[row].breaker.succeeded()

    def _leg_failed(self, event: its.LegFailed, now_ns: int) -> list[RouteCommand]:
        opened = self.open.get(event.request_id)
        placed = None if opened is None else opened.placement
        if opened is None or placed is None or opened.is_held:
            return []
        worker = placed.prefill_worker if event.leg is its.Leg.PREFILL else placed.worker
        row = self.fleet.row_of.get(worker)
        if row is not None:
            self.fleet.workers[row].breaker.failed(now_ns)
        opened.failed.add(worker)
        self.placer.withdraw(opened.request, placed)
        self.fleet.ended(event.request_id, now_ns)
        self.fleet.ended(_prefill_of(event.request_id), now_ns)
        # Nothing was sent: trying elsewhere costs nobody anything.
        self._retries_left -= event.failure is not its.Failure.CONNECT
        is_spent = opened.attempt >= self.policy.limits.attempts_max or self._retries_left < 0
        if event.leg is its.Leg.PREFILL:
            # No request depends on a prefiller: with one attempt left, its decoder computes.
            opened.is_local |= is_spent or opened.attempt + 1 >= self.policy.limits.attempts_max
            is_spent = False
        if event.has_streamed or opened.has_begun or is_spent:
            return [self._reject(opened, RejectReason.ATTEMPTS, now_ns)]
        return self._attempt(opened, now_ns)

    def _request_ended(self, event: its.RequestEnded, now_ns: int) -> list[RouteCommand]:
        opened = self.open.get(event.request_id)
        if opened is None:
            return []
        placed = opened.placement
        opened.cached_tokens, opened.output_tokens = event.cached_tokens, event.output_tokens
        row = None if placed is None else self.fleet.row_of.get(placed.worker)
        if placed is not None and row is not None:
            if event.end is Ending.REFUSED:
                self._succeeded(placed.worker)  # it answered: a 4xx is the client's
            elif event.end is Ending.ABORTED and not opened.has_begun:
                self.fleet.workers[row].breaker.unused()
            if event.cached_tokens is not None and not placed.prefill_worker:
                column = self.fleet.columns[:, row]
                column[FleetColumn.HIT_RATIO] = smoothed_ratio(
                    column[FleetColumn.HIT_RATIO], placed.hit_tokens, event.cached_tokens
                )
        self._close(opened, event.end, now_ns)
        return []

    # Held requests

    def _expire(self, now_ns: int) -> list[RouteCommand]:
        return [
            self._reject(self.open[entry.request_id], RejectReason.EXPIRED, now_ns)
            for entry in self.room.expired(now_ns)
        ]

    def _pump(self, now_ns: int) -> list[RouteCommand]:
        """Route held requests for which there is room now."""
        commands: list[RouteCommand] = []
        for pool in self.room.pools():
            while (command := self._next(pool, now_ns)) is not None:
                commands.append(command)
        return commands

    def _next(self, pool: str, now_ns: int) -> RouteCommand | None:
        blocked_rank = None
        lanes = self.placer.lanes.get(pool)
        due = [] if lanes is None else [(-1, e.request_id) for e in lanes.order(now_ns)]
        due += [(rank, entry.request_id) for rank, entry in self.room.heads(pool)]
        for rank, name in due[:_HEADS_MAX]:
            if blocked_rank is not None and rank > blocked_rank >= 0:
                return None  # a less urgent class does not pass one that waits for room
            placed = self.placer.place(self.open[name], now_ns)
            if isinstance(placed, Placement):
                return self._send(self.open[name], placed, now_ns)
            if placed is not Blocked.LANES:
                blocked_rank = rank
            elif rank >= 0:
                self.room.move(name)
                self._queue_prefill(self.open[name], now_ns)
        return None

    # Readings

    def explain(self, request: RouteRequest, prefix: PrefixAnswer | None, now_ns: int) -> Receipt:
        """Dry run: the receipt of the decision that `Arrived` would get now. Changes nothing.

        Raises:
            LookupError: no worker could take it; the message has the reason.
        """
        number = self._number
        opened = self._opened(request, prefix, now_ns)
        self._number = number
        if isinstance(opened, Rejected):
            raise LookupError(opened.reason)  # noqa: TRY004
        placed = self.placer.place(opened, now_ns)
        if isinstance(placed, Blocked) or placed.receipt is None:
            raise LookupError(placed.value if isinstance(placed, Blocked) else "no receipt")
        return placed.receipt

    def take_receipts(self) -> list[Receipt]:
        """Receipts of requests that ended since the last call; the oldest are dropped."""
        return self.receipts.take()

    def loads(self) -> tuple[SharedLoad, ...]:
        """Requests in flight, for other routers."""
        return self.fleet.loads()

    def saturation(self, pool: str, now_ns: int) -> Saturation:
        """Saturation of a pool's workers."""
        rows = self.fleet.rows(pool, prefill=False)
        return saturation(load_columns(self.fleet, rows, now_ns), self.policy.limits)

    def desired_replicas(self, pool: str, role: WorkerRole, now_ns: int) -> int:
        """`wva_desired_replicas{pool,role}`."""
        rows = self.fleet.rows(pool, prefill=role is WorkerRole.PREFILL)
        return desired_replicas(
            load_columns(self.fleet, rows, now_ns),
            self.policy.limits,
            work_rate=self._rate(pool, role).value(now_ns),
            held=sum(entry.pool == pool for entry in self.room.entries.values()),
        )

    def _rate(self, pool: str, role: WorkerRole) -> WorkRate:
        return self._rates.setdefault((pool, role), WorkRate())

    def check(self) -> None:
        """Invariants between two steps. Raises AssertionError if one is broken."""
        self.fleet.check()
        self.tree.check()
        self.room.check()
        self.placer.weights.check()
        for name, opened in self.open.items():
            is_sent = name in self.fleet.flights
            assert opened.is_held == (name in self.room.entries)
            assert not (opened.is_held and is_sent)
        assert self.room.entries.keys() <= self.open.keys()
        for lanes in self.placer.lanes.values():
            lanes.check()
        flights = {name.removesuffix(_PREFILL) for name in self.fleet.flights}
        assert flights <= self.open.keys()


_PREFILL: Final = "\0prefill"


def _prefill_of(request_id: str) -> str:
    """Flight of the remote prefill."""
    return request_id + _PREFILL
