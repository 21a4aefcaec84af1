"""The decision core as a whole: events in, commands out.

    core = RouterCore(policy, seed=…)
    for command in core.step(Arrived(request), now_ns): …

The shell calls `step` on one thread. A decision counts as sent: the shell sends it or says
`LegFailed`. After `LegFailed` of one leg the other leg is void, too: the next `Routed` starts both.
An error while one request is placed rejects that request: the step's commands for others are kept.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from kvstore.routing import events as its
from kvstore.routing.ahead import Ahead, Stays
from kvstore.routing.events import Ending, Rejected, RejectReason, RouteCommand, Routed
from kvstore.routing.fleet import Fleet
from kvstore.routing.learning import OutputLengths, learn_weights
from kvstore.routing.legs import Blame, Legs, Races, may_retry
from kvstore.routing.models import ModelMap, ModelUnknown
from kvstore.routing.placing import Placer
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.pressure import Gauges
from kvstore.routing.receipts import RECEIPTS_MAX, Receipt, ReceiptDraft
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.routing.role_planner import Planner
from kvstore.routing.rows import WEIGHTS
from kvstore.routing.tree import ApproximateTree
from kvstore.routing.values import ProbeResult, RouteRequest, WorkerRole
from kvstore.routing.waiting import WaitingRoom
from kvstore.units import NS_PER_S
from kvstore.wire.load import EngineLoad


class NewRequests:
    """Requests that arrive: model and pool, class of service, session, expected length of answer.
    Does not cover: workers (`placing`), what becomes of the request (`RouterCore`).
    """

    def __init__(self, fleet: Fleet, stays: Stays, lengths: OutputLengths) -> None:
        self._fleet, self._stays, self._lengths = fleet, stays, lengths
        self._models: ModelMap
        self._made_by = -1, fleet.policy
        self.count = 0
        """Requests so far: the number of the last one."""

    @property
    def models(self) -> ModelMap:
        """Names of models by the current policy and workers. Made when a request asks for it: a
        thousand workers may join or leave in one turn.
        """
        made_by = self._fleet.version, self._fleet.policy
        if made_by != self._made_by:
            specs = (state.spec for state in self._fleet.workers)
            self._models, self._made_by = ModelMap(self._fleet.policy, specs), made_by
        return self._models

    def opened(self, request: RouteRequest, now_ns: int) -> OpenRequest | Rejected:
        """The request with its model, pool, class and expected output, ready to be placed; Rejected
        if no model has its name.
        """
        stay = self._stays.find(request, now_ns)
        try:
            side = self.models.resolve(
                request.model,
                session=request.session,
                request_id=request.request_id,
                stays_in=stay.pool if stay is not None else "",
            )
        except ModelUnknown as unknown:
            named = RejectReason.MODEL_UNKNOWN
            reason = named if request.model else RejectReason.MODEL_MISSING
            return Rejected(request.request_id, reason.status, reason, None, unknown.known)
        self.count += 1
        service = self.service_of(request)
        opened = OpenRequest(request, side, service, now_ns, number=self.count)
        if stay is not None and stay.pool == side.pool:
            opened.stays_at = stay.worker
        most = request.output_tokens_max
        opened.output_tokens_expected = self._lengths.expected(side.body_model, most)
        return opened

    def service_of(self, request: RouteRequest) -> str:
        """Class of service of a request: the one that it names, or the default if there is no such
        class, or if it is more urgent than the default and not open to the tenant.
        """
        policy = self._fleet.policy
        classes, default = policy.classes, policy.default_class
        named = classes.get(request.service)
        if named is None:
            return default
        is_allowed = named.rank >= classes[default].rank or {request.tenant, "*"} & {*named.tenants}
        return request.service if is_allowed else default


_HEADS_MAX: Final = 4
"""Most held requests of a pool that are tried until one can be placed."""
PREFILLS_MAX: Final = 3
"""Attempts of one request with a remote prefill; afterwards its decoder computes the prompt."""
RETRY_SHARE, RETRY_BURST = 0.2, 256.0
"""Budget of attempts after a worker's own fault (`Failure.STATUS`): each request that arrives adds
RETRY_SHARE, up to RETRY_BURST.
"""
SLOW_NS: Final = 120 * NS_PER_S
"""Time after its arrival for which a request may go back to workers that were silent, if no other
worker is left.
"""


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
        self.placer = Placer(self.fleet, self.tree, seed)
        self.legs = Legs(self.fleet, self.placer)
        self.blame = Blame(self.fleet)
        self.races = Races(self.fleet)
        self.planner = Planner(self.fleet, self.placer)
        self.room = WaitingRoom(policy, self.placer.laned)
        self.ahead = Ahead(self.fleet)
        self.stays = Stays(self.fleet)
        self.arrivals = NewRequests(self.fleet, self.stays, self.placer.lengths)
        self.open: dict[str, OpenRequest] = {}
        self._receipts = deque[ReceiptDraft](maxlen=RECEIPTS_MAX)
        self._retries_left = RETRY_BURST
        self.gauges = Gauges(self.fleet)
        self._handlers: dict[type, Callable[[Any, int], Sequence[RouteCommand] | None]] = {
            its.Joined: lambda event, _: self.fleet.join(event.spec),
            its.WorkerLeft: self._worker_left,
            its.Probed: self._probed,
            its.Scraped: self.fleet.scraped,
            its.Shared: self.fleet.shared,
            its.Arrived: self._arrived,
            its.PrepareAnswered: self._prepared,
            its.RouteTick: lambda _, now_ns: self.ahead.due(now_ns),
        }
        self._under_way: dict[
            type, Callable[[OpenRequest, Any, int], Sequence[RouteCommand] | None]
        ] = {
            its.PrefillDone: self._prefill_done,
            its.FirstToken: self._first_token,
            its.Late: self._late,
            its.RaceOver: self._race_over,
            its.LegFailed: self._leg_failed,
            its.RequestEnded: self._request_ended,
        }

    def step(self, event: its.RouteEvent, now_ns: int) -> list[RouteCommand]:
        """Apply an event. Returns commands about its request and others, in order."""
        if now_ns >= self.planner.due_ns:
            self.planner.plan(now_ns)
        self.fleet.pass_time(now_ns)
        commands = self._expire(now_ns) if self.room.entries else []
        if not isinstance(event, its.RequestEvent):
            commands += self._handlers[type(event)](event, now_ns) or ()
        elif (opened := self.open.get(event.request_id)) is not None:
            commands += self._under_way[type(event)](opened, event, now_ns) or ()
        if self.room.entries and not isinstance(event, its.Arrived):
            commands += self._pump(now_ns)
        commands += self.fleet.take_changes()
        return commands

    def adopt(self, policy: RoutingPolicy, now_ns: int) -> list[RouteCommand]:
        """Use another policy from now on, also for held requests. Returns the commands
        that follow.
        """
        self.policy = policy
        self.fleet.adopt(policy)
        self.placer.adopt(policy)
        self.tree.blocks_max = policy.tree_blocks_max
        for opened in self.open.values():  # its class may be gone
            opened.service = self.arrivals.service_of(opened.request)
        held = self.room.entries.values()
        self.room = WaitingRoom(policy, self.placer.laned)
        commands = [command for opened in held for command in self._put(opened, now_ns)]
        return commands + self._pump(now_ns) + self.fleet.take_changes()

    # Workers

    def _worker_left(self, event: its.WorkerLeft, _now_ns: int) -> None:
        self.fleet.leave(event.worker)
        self.tree.forget(event.worker)

    def _probed(self, event: its.Probed, _now_ns: int) -> list[RouteCommand]:
        self.fleet.probed(event)
        # Once in each limit of silence: a request may have gone back there since.
        is_silent = event.result is ProbeResult.SILENT
        is_left = is_silent and self.fleet.silent_with_others(event.worker)
        return [its.AbandonWorker(event.worker)] if is_left else []

    # Requests

    def _arrived(self, event: its.Arrived, now_ns: int) -> list[RouteCommand]:
        request = event.request
        assert request.request_id not in self.open, "request ids are unique among those under way"
        opened = self.arrivals.opened(request, now_ns)
        if isinstance(opened, Rejected):
            return [opened]
        self.open[request.request_id] = opened
        self._retries_left = min(RETRY_BURST, self._retries_left + RETRY_SHARE)
        self.races.arrived()
        commands = self._attempt(opened, now_ns)
        return commands + self.ahead.arrived(opened, now_ns)

    def _attempt(self, opened: OpenRequest, now_ns: int) -> list[RouteCommand]:
        """Route, hold or reject a request that is not held; an exception in it rejects
        the request.
        """
        try:
            return self._try(opened, now_ns)
        except Exception:
            return [self._fault(opened, now_ns)]

    def _try(self, opened: OpenRequest, now_ns: int) -> list[RouteCommand]:
        self.placer.sample_utilisation(opened)
        found = self._admit(opened, now_ns)
        if isinstance(found, Placement):
            return [self._send(opened, found, now_ns)]
        if isinstance(found, its.Blocked):
            return self._hold(opened, found, now_ns)
        return [self._reject(opened, found.reason, now_ns, predicted_s=found.predicted_s)]

    def _admit(self, opened: OpenRequest, now_ns: int) -> Placement | its.Blocked | its.Unplaced:
        """Decide about a request that is not held, without sending or holding it: its placement,
        Blocked if it is to be held, Unplaced if it is to be rejected.
        """
        service, pool = self.policy.classes[opened.service], opened.pool
        placed: Placement | its.Blocked = its.Blocked.LOAD
        ahead = 0
        if opened.attempt == 0 and self.room.has_before(pool, service.rank):
            ahead = self.room.ahead(pool, service.rank)
        else:
            placed = self.placer.place(opened, now_ns)
            is_young = now_ns - opened.arrived_ns < SLOW_NS
            if isinstance(placed, its.Blocked) and opened.slow and is_young:
                opened.failed -= opened.slow  # waiting there again is better than an error
                opened.slow.clear()
                placed = self.placer.place(opened, now_ns)
        if placed is its.Blocked.NO_WORKERS and not self._may_wait_for_workers(pool):
            return its.Unplaced(_nobody(opened))
        objective_s, predicted_s = self.placer.objective_s(opened), self.room.wait_s(ahead, now_ns)
        if isinstance(placed, Placement):
            predicted_s = placed.predicted_s
        if objective_s and predicted_s > objective_s and not opened.attempt:
            return its.Unplaced(RejectReason.OBJECTIVE, predicted_s)
        if isinstance(placed, its.Blocked) and self.room.is_full(opened.service):
            return its.Unplaced(RejectReason.SATURATED)
        return placed

    def _may_wait_for_workers(self, pool: str) -> bool:
        has_workers = self.fleet.crew(pool, prefill=False).names or self.fleet.flexible(pool).names
        return self.policy.limits.holds_without_workers and not has_workers

    def _hold(self, opened: OpenRequest, why: its.Blocked, now_ns: int) -> list[RouteCommand]:
        ttl_s = self.policy.classes[opened.service].ttl_s
        opened.expires_ns = None if ttl_s is None else opened.arrived_ns + int(ttl_s * NS_PER_S)
        if opened.likely_worker is None and self.ahead.may_help(opened):
            self.placer.judge(opened, now_ns)
        if why is its.Blocked.LANES:
            opened.wait_for_prefiller(now_ns)
        opened.is_held = opened.was_held = True
        return [*self._put(opened, now_ns), *self.ahead.waits(opened)]

    def _put(self, opened: OpenRequest, now_ns: int) -> list[RouteCommand]:
        """Put a request into the room. Returns the rejection of the one that it displaces."""
        evicted = self.room.add(opened)
        return [] if evicted is None else [self._reject(evicted, RejectReason.DISPLACED, now_ns)]

    def _send(self, opened: OpenRequest, placed: Placement, now_ns: int) -> Routed:
        request = opened.request
        self.room.remove(opened)
        self.room.taken(request.tenant, placed.uncached, now_ns, was_held=opened.is_held)
        opened.is_held = False
        opened.attempt += 1
        opened.routed_ns, opened.placement = now_ns, placed
        self.legs.sent(opened, placed, now_ns)
        role = self.fleet.workers[self.fleet.row_of[placed.prefill_worker or placed.worker]].role
        self.gauges.add(opened.pool, role, placed.work_s, now_ns)
        is_remote = bool(placed.prefill_worker)
        self.planner.prefill_sent(opened.pool, placed.work_s, is_remote=is_remote)
        self.placer.sent(opened, placed, now_ns)
        home = self.stays.home(opened.stays_at, placed.worker, opened.failed)
        self.stays.keep(request, opened.pool, home, now_ns)
        assert placed.draft is not None
        return Routed(
            request_id=request.request_id,
            worker=placed.worker,
            model=opened.side.body_model,
            prefill_worker=placed.prefill_worker or None,
            fallbacks=placed.draft.plain.fallbacks,
            attempt=opened.attempt,
            late_after_s=self.races.late_after_s(opened, placed),
            may_race=self.races.may_race(opened, placed),
            draft=placed.draft,
            hints=self.ahead.hints(opened, placed.worker, now_ns),
        )

    def _reject(
        self, opened: OpenRequest, reason: RejectReason, now_ns: int, *, predicted_s: float = 0.0
    ) -> Rejected:
        name, objective_s = opened.request_id, self.placer.objective_s(opened)
        rank = self.policy.classes[opened.service].rank
        retry_s = None
        if reason.status in (429, 503):
            ahead, excess_s = self.room.ahead(opened.pool, rank), predicted_s - objective_s
            retry_s = self.room.retry_after_s(ahead, excess_s, now_ns)
        if opened.placement is None and reason is not RejectReason.FAULT:  # it would fail again
            self._receipts.append(
                self.placer.rejection(opened, its.Unplaced(reason, predicted_s), now_ns)
            )
        self._close(opened, Ending.FAILED, now_ns, rejected=reason)
        return Rejected(name, reason.status, reason, retry_s, (), predicted_s, objective_s)

    def _fault(self, opened: OpenRequest, now_ns: int) -> Rejected:
        """Reject a request because placing it raised; the command has the traceback."""
        rejected = self._reject(opened, RejectReason.FAULT, now_ns)
        return msgspec.structs.replace(rejected, fault=traceback.format_exc())

    def _close(self, opened: OpenRequest, end: Ending, now_ns: int, *, rejected: str = "") -> None:
        """Take a request that is over out of every table, and keep the draft of its receipt."""
        del self.open[opened.request_id]
        self.blame.unserved(opened, now_ns)
        self.room.remove(opened)
        self.legs.ended(opened, now_ns)
        outcome = opened.outcome
        outcome.attempts, outcome.end, outcome.rejected = opened.attempt, end.value, rejected
        outcome.ended_ns = now_ns
        if opened.placement is not None and opened.placement.draft is not None:
            self._receipts.append(opened.placement.draft.ended(outcome))

    def _prefill_done(self, opened: OpenRequest, event: its.PrefillDone, now_ns: int) -> None:
        if opened.placement is not None:
            self.blame.prefilled(opened, event, now_ns)
            self.legs.prefilled(opened.placement, now_ns)

    def _first_token(self, opened: OpenRequest, event: its.FirstToken, now_ns: int) -> None:
        placed = opened.placement
        if placed is None or opened.has_begun:
            return
        opened.has_begun = True
        opened.outcome.ttft_s = (now_ns - opened.arrived_ns) / NS_PER_S
        self.legs.began(opened, placed, now_ns)
        why = "the gateway went elsewhere"
        self.blame.served(opened, event.served_by, why, now_ns, is_whole=False)
        achieved_s = (now_ns - opened.routed_ns) / NS_PER_S
        row = self.fleet.row_of.get(placed.prefill_worker or placed.worker)
        if row is not None and not self.policy.learning.is_frozen:
            learn_weights(self.fleet.columns[WEIGHTS, row], placed.raw, achieved_s)
        if placed.prefill_worker:
            split = self.placer.split_of(opened.pool)
            split.learn(uncached=placed.uncached, remote_s=achieved_s, local_s=placed.local_s)
        self.races.learn(opened, placed, achieved_s)
        self.planner.first_token(opened.pool, opened.arrived_ns, now_ns)

    def _late(self, opened: OpenRequest, event: its.Late, now_ns: int) -> list[RouteCommand]:
        placed = self.races.second(opened, self.placer, now_ns)
        if placed is None:
            return []
        self.legs.raced(opened, placed, now_ns)
        return [its.Raced(event.request_id, placed.worker)]

    def _race_over(self, opened: OpenRequest, event: its.RaceOver, now_ns: int) -> None:
        if opened.race is not None:
            if event.fault is not None:
                failed = its.LegFailed(event.request_id, its.Leg.DECODE, event.fault)
                self.blame.failed(opened, event.worker, failed, now_ns)
            else:
                self.fleet.record_no_fault(event.worker, now_ns)
            self.legs.race_over(opened, event.worker, now_ns)

    def _leg_failed(
        self, opened: OpenRequest, event: its.LegFailed, now_ns: int
    ) -> list[RouteCommand]:
        placed = opened.placement
        if placed is None or opened.is_held:
            return []
        worker = placed.prefill_worker if event.leg is its.Leg.PREFILL else placed.worker
        failure = event.fault.failure
        opened.was_sent |= failure is not its.Failure.CONNECT
        self.blame.failed(opened, worker, event, now_ns)
        self.placer.withdraw(opened.request, placed)
        self.legs.ended(opened, now_ns)
        has_budget = self._retries_left >= 1
        self._retries_left -= failure is its.Failure.STATUS and has_budget
        if event.leg is its.Leg.PREFILL:
            # No request depends on a prefiller: its decoder computes, with attempts of its own.
            opened.is_local |= not has_budget or opened.attempt >= PREFILLS_MAX
            is_over = False
        else:
            is_over = not may_retry(opened, failure, has_budget=has_budget)
        if event.has_streamed or opened.has_begun or is_over:
            return [self._reject(opened, RejectReason.ATTEMPTS, now_ns)]
        return self._attempt(opened, now_ns)

    def _request_ended(self, opened: OpenRequest, event: its.RequestEnded, now_ns: int) -> None:
        outcome = opened.outcome
        outcome.cached_tokens, outcome.output_tokens = event.cached_tokens, event.output_tokens
        try:
            self.blame.ended(opened, event, now_ns)
            self.legs.learn_hits(opened, event.served_by)
            if event.end is Ending.DONE and event.output_tokens:
                self.placer.lengths.learn(opened.side.body_model, event.output_tokens)
            self.stays.touch(opened.request, now_ns)
            if opened.request.ends_session and event.end is Ending.DONE:
                self.stays.end(opened.request)
                self.ahead.pins.end_session(opened.request)
            if outcome.ttft_s is not None:
                began_ns = opened.arrived_ns + int(outcome.ttft_s * NS_PER_S)
                self.planner.ended(opened.pool, began_ns, now_ns, event.output_tokens)
        finally:
            self._close(opened, event.end, now_ns)

    def _prepared(self, event: its.PrepareAnswered, now_ns: int) -> None:
        request_id, answer = self.ahead.prepared(event, now_ns)
        if (opened := self.open.get(request_id)) is not None:
            opened.outcome.prepared += (answer,)

    # Held requests

    def _expire(self, now_ns: int) -> list[RouteCommand]:
        return [
            self._reject(opened, RejectReason.EXPIRED, now_ns)
            for opened in self.room.expired(now_ns)
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
        for rank, opened in list(islice(self.room.heads(pool, now_ns), _HEADS_MAX)):
            if blocked_rank is not None and rank > blocked_rank >= 0:
                return None  # a less urgent class does not pass one that waits for room
            try:
                placed = self.placer.place(opened, now_ns)
                if isinstance(placed, Placement):
                    return self._send(opened, placed, now_ns)
            except Exception:
                return self._fault(opened, now_ns)
            if placed is its.Blocked.NO_WORKERS and not self._may_wait_for_workers(pool):
                return self._reject(opened, _nobody(opened), now_ns)  # waiting blocks all behind it
            if placed is not its.Blocked.LANES:
                blocked_rank = rank
            elif rank >= 0:
                self.room.lane(opened, now_ns)
        return None

    # Readings

    def explain(self, request: RouteRequest, now_ns: int) -> Receipt:
        """Dry run: the receipt of the decision that `Arrived` would get now. Changes nothing.

        Raises:
            LookupError: it would wait, or no model has its name. Its argument is the reason as a
                text, or the `Rejected` that the request would get.
        """
        number = self.arrivals.count
        opened = self.arrivals.opened(request, now_ns)
        self.arrivals.count = number
        if isinstance(opened, Rejected):
            raise LookupError(opened)  # noqa: TRY004
        found = self._admit(opened, now_ns)
        if isinstance(found, its.Unplaced):
            return self.placer.rejection(opened, found, now_ns).receipt()
        if isinstance(found, Placement) and found.draft is not None:
            return found.draft.receipt()
        raise LookupError("it would wait for room")

    def take_drafts(self) -> list[ReceiptDraft]:
        """Drafts of requests that ended since the last call; beyond RECEIPTS_MAX the oldest are
        dropped.
        """
        drafts = list(self._receipts)
        self._receipts.clear()
        return drafts

    def loads(self) -> tuple[EngineLoad, ...]:
        """Requests in flight, for other routers."""
        return self.fleet.loads()

    def desired_replicas(self, pool: str, role: WorkerRole, now_ns: int) -> int:
        """Number of workers of a role that a pool needs."""
        held = sum(entry.pool == pool for entry in self.room.entries.values())
        return self.gauges.desired_replicas(pool, role, held, now_ns)


def _nobody(opened: OpenRequest) -> RejectReason:
    """Reason of a rejection because no worker may take the request, now or later: ATTEMPTS if one
    got it already, else NO_ENDPOINTS.
    """
    return RejectReason.ATTEMPTS if opened.was_sent else RejectReason.NO_ENDPOINTS
