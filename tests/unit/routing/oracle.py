"""What a shell knows, beside a core: which requests arrived, which command each got, what its
workers said.

It raises AssertionError as soon as the core breaks a rule:

1. Each request gets one final word, and nothing after it; without a word it waits in the room.
2. No worker is over its bounds, none that is gone or draining gets a request, and none that is down
   or lacks something while one with a milder flaw is there, be it that this one has no room.
3. A subset is kept to; a worker that failed is not tried again for the same request, but for one
   that was silent; of two attempts in a race no word comes from the one that is over. Requests that
   too many workers refused, or failed at, end.
4. Low classes are not routed past an urgent one that waits in the same pool; a class that is more
   urgent than the default is for tenants that it names.
5. Preparations go to workers that are there, are bounded, and are for keys of their request.
6. Each change of a worker's word is said once, and it is what probes and the policy say. Requests
   are given up at silent workers only, and only if another one answers.
7. An unstreamed request leaves its queue when its first token is predicted or nobody waits, not
   before.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

import msgspec

from kvstore.routing.core import SLOW_NS, RouterCore
from kvstore.routing.decide import replay
from kvstore.routing.events import (
    AbandonWorker,
    Failure,
    Lack,
    LegFailed,
    Prepare,
    PrepareReason,
    Raced,
    RaceOver,
    Rejected,
    Routed,
    RouteEvent,
)
from kvstore.routing.legs import REFUSALS_MAX, SUSPECTS_MAX
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.rows import StateChange
from kvstore.routing.values import ProbeResult, RouteRequest, WorkerRole, WorkerSpec, WorkerWord
from tests.kit.routing_check import check
from tests.unit.routing.fleets import S, fault

QUEUE_MAX: Final = 3
RUNNING_MAX: Final = 5
HELD_MAX: Final = 6
OPEN_MAX: Final = 5
_SUSPECT: Final = (Failure.ERROR, Failure.BROKEN)
_DOWN: Final = (ProbeResult.REFUSED, ProbeResult.UNWELL, ProbeResult.SILENT)


class Known:
    """What a worker's own words were."""

    def __init__(self) -> None:
        self.probe: ProbeResult | None = None
        """The last that was not late."""
        self.without_media = False
        self.said: StateChange | None = None

    @property
    def is_down(self) -> bool:
        return self.probe in _DOWN


class Tried:
    """What became of the attempts of a request."""

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.failed: set[str] = set()
        self.slow: set[str] = set()
        self.refusals = self.suspects = 0
        self.due_ns = 0.0
        """When the first token of an unstreamed one is predicted."""
        self.may_begin = False
        """Its engine said that nobody waits."""
        self.sent_ns = 0


class Oracle:
    """See the module."""

    policy: RoutingPolicy
    core: RouterCore

    def __init__(self) -> None:
        self.now_ns = 1
        self.specs: dict[str, WorkerSpec] = {}
        self.known: dict[str, Known] = {}
        self.every: dict[str, RouteRequest] = {}
        self.requests: dict[str, RouteRequest] = {}
        """Those that may still get a command."""
        self.waiting: set[str] = set()
        self.sent: dict[str, Routed] = {}
        self.raced: dict[str, str] = {}
        """Second worker of those in a race."""
        self.race_count = Counter[str]()
        self.begun: set[str] = set()
        self.prefilled: set[str] = set()
        self.tried: dict[str, Tried] = {}
        self.final = Counter[str]()
        self.prepares: list[Prepare] = []
        """Without an answer."""
        self.prepared = Counter[PrepareReason]()
        self.given_up: list[str] = []
        """Workers whose requests are to be ended."""
        self.closing = ""
        """Request that ends in this step, and may have expired."""
        self.silent = ""
        """Worker of a probe that found silence, in this step."""
        self.seen = Counter[str]()
        """How often what is rare has happened."""

    def step(self, event: RouteEvent) -> None:
        self.take(self.core.step(event, self.now_ns))

    def take(self, commands: list[Any]) -> None:
        for command in commands:
            match command:
                case Prepare():
                    self._prepare(command)
                case StateChange():
                    self._changed(command)
                case AbandonWorker():
                    self._give_up(command)
                case Rejected(request_id) if request_id == self.closing:
                    assert command.reason == "rejected-ttl-expired", "it is over"
                case _:
                    name = command.request_id
                    assert name in self.requests, "a command after the final word, or for nobody"
                    self._word(name, command)
        self.waiting = self.requests.keys() - self.sent.keys()
        check(self.core)
        self._bounds()
        self._words()

    def _word(self, name: str, command: Routed | Raced | Rejected) -> None:
        match command:
            case Routed():
                self._routed(command)
            case Raced():
                self._raced(command)
            case Rejected():
                self.seen[command.reason] += 1
                self.over(name)

    def _prepare(self, command: Prepare) -> None:
        assert command.worker in self.specs, "prepared at nobody"
        if command.reason is not PrepareReason.PINNED:
            its = self.every[command.request_id]
            assert command.keys
            assert command.keys in its.keys
            assert not its.parts
        self.prepared[command.reason] += 1
        self.prepares.append(command)
        assert len(self.prepares) <= OPEN_MAX

    # Workers

    def _changed(self, command: StateChange) -> None:
        known = self.known[command.worker]
        assert command != known.said, "said twice"
        known.said = command
        self.seen[command.word.value] += 1

    def _words(self) -> None:
        """What was said last is so."""
        for name, known in self.known.items():
            state = self.core.fleet.workers[self.core.fleet.row_of[name]]
            word = WorkerWord.NEW if known.said is None else known.said.word
            assert word is state.word, "a change was not said"
            is_draining = name in self.policy.draining
            assert (word is WorkerWord.DRAINING) == is_draining
            assert is_draining or (word is WorkerWord.DOWN) == known.is_down

    def _give_up(self, command: AbandonWorker) -> None:
        assert command.worker == self.silent, "a slow engine is not a broken one"
        is_prefiller = self.specs[self.silent].role is WorkerRole.PREFILL
        others = self.specs.keys() - {self.silent, *self.policy.draining}
        assert any(
            self._answers(other)
            for other in others
            if is_prefiller or self.specs[other].role is not WorkerRole.PREFILL
        ), "there is no other"
        self.given_up.append(command.worker)

    def _answers(self, worker: str) -> bool:
        known = self.known[worker]
        is_reached = known.said is not None and known.said.word is not WorkerWord.NEW
        return is_reached and not known.is_down

    def may_take(self, name: str, worker: str) -> bool:
        """Whether nothing but flaws and load keeps a request from a worker."""
        subset, tried = self.requests[name].subset, self.tried[name]
        is_out = worker in self.policy.draining or worker in tried.failed
        return not is_out and (subset is None or worker in subset)

    def flaw(self, name: str, worker: str) -> int:
        """Twice the worst, and one more if it is down besides; 0: none that is known here. Breakers
        are known to the core alone.
        """
        its, spec, known = self.requests[name], self.specs[worker], self.known[worker]
        if its.prompt_tokens + (its.output_tokens_max or 0) > spec.context_of("m"):
            return 6 + known.is_down
        if its.media and known.without_media:
            return 4 + known.is_down
        return 2 * known.is_down

    def _role(self, worker: str) -> WorkerRole:
        return self.core.fleet.workers[self.core.fleet.row_of[worker]].role

    def _is_mildest(self, name: str, chosen: str) -> None:
        flaw = self.flaw(name, chosen)
        self.seen[f"flaw {flaw}"] += 1
        its_breaker = self.core.fleet.workers[self.core.fleet.row_of[chosen]].breaker
        if not flaw or its_breaker.is_open:
            return
        for other in self.specs.keys() - {chosen}:
            if not self.may_take(name, other):
                continue
            if self._role(other) is not WorkerRole.PREFILL:
                assert self.flaw(name, other) >= flaw, "there is a better one, or was soon"
            elif self.specs[other].role is WorkerRole.ANY:
                state = self.core.fleet.workers[self.core.fleet.row_of[other]]
                is_well = not self.flaw(name, other) and not state.breaker.is_open
                assert not is_well, "it is a prefiller by plan only"

    # Requests

    def _routed(self, command: Routed) -> None:
        name = command.request_id
        assert name not in self.sent, "routed twice without a failure between"
        its, tried = self.requests[name], self.tried[name]
        self._goes_back(tried, {command.worker, command.prefill_worker})
        for worker in filter(None, (command.worker, command.prefill_worker)):
            assert worker in self.specs, "routed to nobody"
            assert worker not in self.policy.draining
            assert worker not in tried.failed, "tried again where it failed"
            assert its.subset is None or worker in its.subset
        self._is_mildest(name, command.worker)
        if command.prefill_worker is not None:
            assert self._role(command.prefill_worker) is WorkerRole.PREFILL
            assert not self.flaw(name, command.prefill_worker), "the decoder may compute"
        if self._role(command.worker) is WorkerRole.PREFILL:
            assert self.specs[command.worker].role is WorkerRole.ANY
            assert command.prefill_worker is None
        self._in_order(command)
        self._is_explained(command)
        self.waiting.discard(name)
        self.sent[name] = command
        receipt = command.draft.receipt()
        tried.due_ns = self.now_ns + (receipt.predicted_s - receipt.held_s) * S
        tried.sent_ns, tried.may_begin = self.now_ns, False

    def _goes_back(self, tried: Tried, workers: set[str | None]) -> None:
        """To those that were silent a request may go back, where nobody was left at some time."""
        if again := tried.slow & workers:
            assert self.now_ns - tried.arrived_ns < SLOW_NS
            tried.failed -= again
            tried.slow -= again
            self.seen["back to a silent one"] += 1

    def _in_order(self, command: Routed) -> None:
        its, service = self.requests[command.request_id], command.draft.plain.service
        classes = self.policy.classes
        rank = classes[service].rank
        is_urgent = rank < classes[self.policy.default_class].rank
        assert not is_urgent or its.tenant in classes[service].tenants
        if command.attempt > 1 or command.prefill_worker is not None:
            return
        has_lanes = any(spec.role is not WorkerRole.BOTH for spec in self.specs.values())
        for other in (self.waiting - {command.request_id}) & self.core.open.keys():
            held = self.core.open[other]
            is_plain = held.request.subset is None and not has_lanes
            its_rank = classes[held.service].rank
            assert its_rank >= rank or not is_plain, "routed past a more urgent one"

    def _is_explained(self, command: Routed) -> None:
        receipt = command.draft.receipt()
        if (
            len(receipt.workers) < len(self.specs)
            or self._role(command.worker) is WorkerRole.PREFILL
        ):
            return
        if replay(receipt, self.policy).chosen != command.worker:
            # A class with bounds takes an idle worker before one with a backlog.
            place = receipt.workers.index(command.worker)
            load = [receipt.features[each][place] for each in ("queued", "streams", "queue_s")]
            assert load == [0, 0, 0]
            self.seen["idle"] += 1

    def _raced(self, command: Raced) -> None:
        name, worker = command.request_id, command.worker
        self.race_count[name] += 1
        assert self.race_count[name] == 1, "raced twice"
        assert name in self.sent.keys() - self.begun
        first, its = self.sent[name], self.requests[name]
        assert first.may_race
        assert first.prefill_worker is None
        assert not its.has_side_effects
        assert worker != first.worker
        self._goes_back(self.tried[name], {worker})
        assert self.may_take(name, worker)
        assert not self.flaw(name, worker), "a race is for a worker that is clearly free"
        assert self.specs[worker].role is not WorkerRole.PREFILL
        self.raced[name] = worker

    def race_over(self, name: str, loser: str, failure: Failure | None) -> None:
        winner = self.raced.pop(name)
        if loser == self.sent[name].worker:
            self.sent[name] = msgspec.structs.replace(self.sent[name], worker=winner)
        if failure is not None:
            self.failed_at(name, loser, failure)
        self.step(RaceOver(name, loser, fault(failure)))

    def failed_at(
        self, name: str, worker: str, failure: Failure, *, is_decode: bool = True
    ) -> None:
        tried = self.tried[name]
        tried.failed.add(worker)
        if failure is Failure.SILENT:
            tried.slow.add(worker)
        tried.refusals += failure is Failure.REFUSED
        tried.suspects += failure in _SUSPECT and is_decode

    def leg_failed(self, worker: str, event: LegFailed) -> None:
        """Which request was at the worker; then what must follow."""
        name, its = event.request_id, self.requests[event.request_id]
        failure, lack = event.fault.failure, event.fault.lack
        if not event.has_streamed:
            is_decode = event.leg == "decode" and not event.is_claim
            self.failed_at(name, worker, failure, is_decode=is_decode)
        if lack is Lack.CONTEXT and not (event.is_claim or event.has_streamed):
            most = self.specs[worker].context_of("m")
            alike = {w for w, its in self.specs.items() if its.context_of("m") <= most < math.inf}
            self.tried[name].failed |= alike
        if lack is Lack.MEDIA and not event.is_claim and worker in self.known:
            self.known[worker].without_media = True
        del self.sent[name]
        self.prefilled.discard(name)
        tried, is_decode = self.tried[name], event.leg == "decode"
        self.step(event)
        is_over = event.has_streamed
        if failure is Failure.REFUSED and is_decode:
            is_over |= tried.refusals >= REFUSALS_MAX and not its.is_bound_to_one
        if failure in _SUSPECT and is_decode:
            is_over |= tried.suspects >= SUSPECTS_MAX
        assert name not in self.requests or not is_over, "it has failed often enough"

    def over(self, name: str) -> None:
        self.final[name] += 1
        assert self.final[name] == 1
        del self.requests[name]
        self.waiting.discard(name)
        self.sent.pop(name, None)
        self.raced.pop(name, None)
        self.begun.discard(name)
        self.prefilled.discard(name)

    # Bounds

    def _has_begun(self, name: str) -> bool:
        """At its worker, as the core has to see it."""
        if name in self.begun or self.requests[name].is_streamed:
            return name in self.begun
        placement = self.core.open[name].placement
        assert placement is not None
        flight = placement.legs[0]
        if flight not in self.core.fleet.flights:  # its worker has left
            return False
        tried = self.tried[name]
        if name not in self.race_count:
            is_due = tried.due_ns - 1000 <= self.now_ns or tried.may_begin
            assert is_due or not flight.has_begun, "nobody has seen it begin"
            is_over = tried.due_ns + 1000 < self.now_ns or tried.may_begin
            assert flight.has_begun or not is_over, "it counts as queued for ever"
        return flight.has_begun

    def _bounds(self) -> None:
        queued, running = Counter[str](), Counter[str]()
        for name, command in self.sent.items():
            running[command.worker] += 1
            queued[command.worker] += not self._has_begun(name)
            if command.prefill_worker and name not in self.begun | self.prefilled:
                running[command.prefill_worker] += 1
                queued[command.prefill_worker] += 1
        for name, worker in self.raced.items():
            running[worker] += 1
            queued[worker] += self.requests[name].is_streamed
        for counts in (queued, running):
            for gone in counts.keys() - self.specs.keys():
                del counts[gone]
        assert max(queued.values(), default=0) <= QUEUE_MAX
        assert max(running.values(), default=0) <= RUNNING_MAX
        assert len(self.core.room.entries) <= HELD_MAX
        assert self.waiting == self.core.room.entries.keys()
        assert self.requests.keys() == self.core.open.keys()
