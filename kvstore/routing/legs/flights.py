"""Legs of requests at their workers: counts, and what the approximate tree remembers.

    Placement ─▶ sent: the decode leg, a prefill leg ─▶ began, prefilled ─▶ ended
              └▶ raced: the same request at a second worker ─▶ race_over: one of the two is left

Rule: each leg is a flight of the fleet, and leaves it exactly once. Does not cover: whether and
where (`placing`, `races`), faults (`blame`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.routing.learning import smoothed_ratio
from kvstore.routing.placing import Placer
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.routing.values import WorkerRole
from kvstore.routing.workers.fleet import Fleet
from kvstore.routing.workers.rows import FleetColumn, Flight
from kvstore.units import NS_PER_S

_PREFILL: Final = "\0prefill"
_RACE: Final = "\0race"


class Legs:
    """See the module."""

    def __init__(self, fleet: Fleet, placer: Placer) -> None:
        self._fleet, self._placer = fleet, placer

    def sent(self, opened: OpenRequest, placed: Placement, now_ns: int) -> WorkerRole:
        """An attempt begins. Returns the role of the worker that computes the prompt."""
        opened.flight = opened.request_id
        self._fly(opened, opened.flight, _decode_leg(opened, placed, now_ns))
        if placed.prefill_worker:
            its = placed.prefill_worker, placed.work_s, opened.request.prompt_tokens
            self._fly(opened, opened.flight + _PREFILL, Flight(*its, now_ns, placed.uncached))
        computes = placed.prefill_worker or placed.worker
        return self._fleet.workers[self._fleet.row_of[computes]].role

    def _fly(self, opened: OpenRequest, name: str, flight: Flight) -> None:
        self._fleet.sent(name, flight)
        tree, step = self._placer.tree, opened.request.key_step
        for keys in opened.request.chains:
            tree.insert(keys, flight.worker, flight.sent_ns, step=step)

    def raced(self, opened: OpenRequest, placed: Placement, now_ns: int) -> None:
        """A second attempt begins beside the first."""
        assert opened.race is None, "at most one race at a time"
        opened.race = placed
        opened.outcome.raced_s = (now_ns - opened.routed_ns) / NS_PER_S
        self._fly(opened, opened.request_id + _RACE, _decode_leg(opened, placed, now_ns))

    def race_over(self, opened: OpenRequest, loser: str, now_ns: int) -> None:
        """One of two attempts has ended; the other is from now on the request's only one."""
        first, second = opened.placement, opened.race
        assert first is not None
        assert second is not None
        name, outcome = opened.request_id, opened.outcome
        if loser == first.worker:
            left, gone, over = second, first, opened.flight
            opened.flight = name + _RACE
            opened.routed_ns += int((outcome.raced_s or 0.0) * NS_PER_S)
            opened.placement = msgspec.structs.replace(second, draft=first.draft)
        else:
            left, gone, over = first, second, name + _RACE
        self._fleet.ended(over, now_ns)
        self._placer.withdraw(opened.request, gone)
        opened.race = None
        outcome.race_winner, outcome.race_loser = left.worker, gone.worker

    def began(self, opened: OpenRequest, now_ns: int) -> None:
        """The first token came: the prefill leg is over, and the decode leg streams."""
        self.prefilled(opened, now_ns)
        self._fleet.began(opened.flight, now_ns)

    def prefilled(self, opened: OpenRequest, now_ns: int) -> None:
        """The prefill leg is over."""
        self._fleet.ended(opened.request_id + _PREFILL, now_ns)

    def learn_hits(self, opened: OpenRequest, served_by: str) -> None:
        """A request is over: learn how the cached tokens that its worker reported compare with
        those predicted.
        """
        placed = opened.placement
        row = None if placed is None else self._fleet.row_of.get(placed.worker)
        cached = opened.outcome.cached_tokens
        if placed is None or row is None or cached is None or placed.prefill_worker:
            return
        if served_by in ("", placed.worker):
            near, far = placed.offered  # before any ratio, or it would settle at its own root
            ratios = self._fleet.columns[FleetColumn.HIT_RATIO : FleetColumn.FETCH_RATIO + 1, row]
            ratios[0] = smoothed_ratio(ratios[0], near, cached)
            ratios[1] = smoothed_ratio(ratios[1], far, cached - near)

    def ended(self, opened: OpenRequest, now_ns: int) -> None:
        """End all legs of a request."""
        for flight in self._flights(opened):
            self._fleet.ended(flight, now_ns)
        if opened.race is not None:
            self._placer.withdraw(opened.request, opened.race)
            opened.race = None

    def has_flights(self, opened: OpenRequest) -> bool:
        """Whether a leg of the request is at a worker."""
        return not self._fleet.flights.keys().isdisjoint(self._flights(opened))

    @staticmethod
    def _flights(opened: OpenRequest) -> tuple[str, ...]:
        name = opened.request_id
        return (name, name + _PREFILL, name + _RACE)

    def check(self, requests: Mapping[str, OpenRequest]) -> None:
        """Raises AssertionError if a flight belongs to no request."""
        flights = {name.partition("\0")[0] for name in self._fleet.flights}
        assert flights <= requests.keys()
        for opened in requests.values():
            flight = opened.request_id + _RACE
            is_racing = opened.race is not None or opened.flight == flight
            assert is_racing or flight not in self._fleet.flights


def _decode_leg(opened: OpenRequest, placed: Placement, now_ns: int) -> Flight:
    """Flight of the decode leg. After a remote prefill it has no work before its first token."""
    begins_ns = None
    if not opened.request.is_streamed:
        begins_ns = now_ns + int(placed.predicted_s * NS_PER_S)
    is_remote = bool(placed.prefill_worker)
    work_s, uncached = (0.0, 0.0) if is_remote else (placed.work_s, placed.uncached)
    return Flight(placed.worker, work_s, placed.need_tokens, now_ns, uncached, begins_ns)
