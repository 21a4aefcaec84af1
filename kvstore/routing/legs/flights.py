"""Legs of requests at their workers: counts, breakers, and what the approximate tree remembers.

    Placement ─▶ sent: the decode leg, a prefill leg ─▶ began, prefilled ─▶ ended
              └▶ raced: the same request at a second worker ─▶ race_over: one of the two is left

Rule: each leg is a flight of the fleet, and leaves it exactly once. Does not cover: whether and
where (`placing`, `races`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.routing.events import Ending, Failure
from kvstore.routing.fleet import Fleet
from kvstore.routing.learning import learn_hits
from kvstore.routing.placing import OpenRequest, Placement, Placer
from kvstore.routing.values import WorkerRole
from kvstore.units import NS_PER_S

_PREFILL: Final = "\0prefill"
_RACE: Final = "\0race"
COUNTLESS: Final = (Failure.BUSY, Failure.REFUSED)
"""Not counted against a worker."""


class Legs:
    """See the module."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet, self._placer = fleet, placer

    def sent(self, opened: OpenRequest, placed: Placement, now_ns: int) -> WorkerRole:
        """An attempt begins. Returns the role of the worker that computes the prompt."""
        opened.flight = opened.request.request_id
        if placed.prefill_worker:
            # The decode leg has no work before its first token.
            self._fly(opened, opened.flight, placed.worker, None, placed.need_tokens, now_ns)
            name = opened.flight + _PREFILL
            tokens = opened.request.prompt_tokens
            self._fly(opened, name, placed.prefill_worker, placed, tokens, now_ns)
        else:
            self._fly(opened, opened.flight, placed.worker, placed, placed.need_tokens, now_ns)
        computes = placed.prefill_worker or placed.worker
        return self._fleet.workers[self._fleet.row_of[computes]].role

    def _fly(
        self,
        opened: OpenRequest,
        flight: str,
        worker: str,
        work: Placement | None,
        tokens: int,
        now_ns: int,
    ) -> None:
        """`work`: the placement whose prompt is computed here; None: it is computed elsewhere."""
        fleet, request = self._fleet, opened.request
        fleet.workers[fleet.row_of[worker]].breaker.allows(now_ns)
        work_s, uncached = (0.0, 0.0) if work is None else (work.work_s, work.uncached)
        fleet.sent(flight, worker, work_s=work_s, tokens=tokens, now_ns=now_ns, uncached=uncached)
        tree, block_tokens = self._placer.tree, request.block_tokens
        tree.insert(request.keys, worker, now_ns, block_tokens=block_tokens)

    def raced(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """A second attempt begins beside the first."""
        assert opened.race is None, "at most one race at a time"
        opened.race = placed
        opened.raced = ((now_ns - opened.routed_ns) / NS_PER_S, "", "")
        name = opened.request.request_id + _RACE
        self._fly(opened, name, placed.worker, placed, placed.need_tokens, now_ns)

    def race_over(
        self, opened: OpenRequest, loser: str, failure: Failure | None, now_ns: int
    ) -> None:
        """One of two attempts has ended; the other is from now on the request's only one."""
        first, second = opened.placement, opened.race
        assert first is not None
        assert second is not None
        if failure is not None:
            self.failed(opened, loser, failure, now_ns)
        elif (row := self._fleet.row_of.get(loser)) is not None:
            self._fleet.workers[row].breaker.unused()
        name, raced_s = opened.request.request_id, opened.raced[0]
        if loser == first.worker:
            left, gone, over = second, first, opened.flight
            opened.flight = name + _RACE
            opened.routed_ns += int((raced_s or 0.0) * NS_PER_S)
            opened.placement = msgspec.structs.replace(second, draft=first.draft)
        else:
            left, gone, over = first, second, name + _RACE
        self._fleet.ended(over, now_ns)
        self._placer.withdraw(opened.request, gone)
        opened.race = None
        opened.raced = (raced_s, left.worker, gone.worker)

    def began(self, opened: OpenRequest, now_ns: int) -> None:
        """First token: the prompt is computed, wherever that was."""
        self.prefilled(opened, now_ns)
        self._fleet.began(opened.flight, now_ns)

    def prefilled(self, opened: OpenRequest, now_ns: int) -> None:
        """The prefill leg is over."""
        self._fleet.ended(opened.request.request_id + _PREFILL, now_ns)

    def answered(self, opened: OpenRequest, end: Ending) -> None:
        """Learn from the end of a request: hits of its worker, and its breaker."""
        fleet, placed = self._fleet, opened.placement
        row = None if placed is None else fleet.row_of.get(placed.worker)
        if placed is None or row is None:
            return
        if end in (Ending.DONE, Ending.REFUSED):
            fleet.succeeded(placed.worker)  # it answered: a 4xx is the client's
        elif end is Ending.ABORTED and not opened.has_begun:
            fleet.workers[row].breaker.unused()
        if opened.cached_tokens is not None and not placed.prefill_worker:
            learn_hits(fleet.columns[:, row], placed.offered, opened.cached_tokens)

    def ended(self, opened: OpenRequest, now_ns: int) -> None:
        """All legs are over."""
        for flight in self._flights(opened):
            self._fleet.ended(flight, now_ns)
        if opened.race is not None:
            self._placer.withdraw(opened.request, opened.race)
            opened.race = None

    def failed(self, opened: OpenRequest, worker: str, failure: Failure, now_ns: int) -> None:
        """A worker failed, and the request is not tried there again."""
        if failure in COUNTLESS:
            self._fleet.spared(worker, now_ns, is_busy=failure is Failure.BUSY)
        else:
            self._fleet.failed(worker, now_ns)
        opened.failed.add(worker)
        if failure is Failure.TIMEOUT:
            opened.slow.add(worker)

    def has_flights(self, opened: OpenRequest) -> bool:
        """Whether it is at a worker."""
        return not self._fleet.flights.keys().isdisjoint(self._flights(opened))

    @staticmethod
    def _flights(opened: OpenRequest) -> tuple[str, ...]:
        name = opened.request.request_id
        return (name, name + _PREFILL, name + _RACE)

    def check(self, requests: Mapping[str, OpenRequest]) -> None:
        """Raises AssertionError if a flight belongs to no request."""
        flights = {name.partition("\0")[0] for name in self._fleet.flights}
        assert flights <= requests.keys()
        for opened in requests.values():
            flight = opened.request.request_id + _RACE
            is_racing = opened.race is not None or opened.flight == flight
            assert is_racing or flight not in self._fleet.flights
