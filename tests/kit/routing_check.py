"""Everything that must be true of a router's decision core between two steps. For tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.routing.ahead import HEAT_MAX, PINS_MAX, STAYS_MAX, Ahead, PromptPins, Stays
from kvstore.routing.core import RouterCore
from kvstore.routing.fleet import Fleet
from kvstore.routing.learning import LEAST, MOST
from kvstore.routing.requests import OpenRequest
from kvstore.routing.rows import WEIGHTS, FleetColumn, Flight
from kvstore.routing.tree import _ALL, _YOUNG, ApproximateTree
from kvstore.routing.waiting import TENANTS_MAX, WaitingRoom, _place, _queue_of
from kvstore.types import KEY_BYTES
from kvstore.wire.messages import KEYS_PER_DATAGRAM_MAX as KEYS_MAX


def check(core: RouterCore) -> None:
    """Invariants between two steps. Raises AssertionError if one is broken."""
    check_fleet(core.fleet)
    check_tree(core.tree)
    check_room(core.room)
    _check_ahead(core.ahead)
    _check_stays(core.stays)
    for name, opened in core.open.items():
        assert opened.is_held == (name in core.room.entries)
        is_sent = not core.fleet.flights.keys().isdisjoint(legs_of(opened))
        assert not (opened.is_held and is_sent)
    assert core.room.entries.keys() <= core.open.keys()
    _check_legs(core.fleet, core.open)


def check_fleet(fleet: Fleet) -> None:
    """Counts equal the flights, weights are in bounds. Raises AssertionError if not."""
    assert fleet.row_of == {w.spec.worker: row for row, w in enumerate(fleet.workers)}
    for row, state in enumerate(fleet.workers):
        name, column = state.spec.worker, fleet.columns[:, row]
        here = [f for f in fleet.flights if f.worker == name]
        queued = [f for f in here if not f.has_begun]
        assert list(state.queue) == queued
        assert column[FleetColumn.QUEUED] == len(queued)
        assert column[FleetColumn.STREAMS] == len(here) - len(queued)
        late = [f.tokens for f in here if f.sent_ns >= state.reported_ns]
        assert column[FleetColumn.NEED_TOKENS] == sum(late)
        assert abs(column[FleetColumn.WORK_S] - sum(f.work_s for f in queued)) < 1e-6
        assert LEAST <= column[WEIGHTS].min() <= column[WEIGHTS].max() <= MOST
    assert all(flight.worker in fleet.row_of for flight in fleet.flights)


def check_tree(tree: ApproximateTree) -> None:
    """Raises AssertionError if an invariant is broken."""
    assert len(tree._blocks) <= tree.blocks_max
    assert tree._bit_of == {worker: bit for bit, worker in tree._worker_of.items()}
    known = sum(1 << bit for bit in tree._worker_of)
    for entry in tree._blocks.values():
        tree._clean(entry)
        assert not entry[_ALL] & ~known
        assert not entry[_YOUNG] & ~entry[_ALL]


def check_room(room: WaitingRoom) -> None:
    """Raises AssertionError if an invariant is broken."""
    every = room.entries.values()
    assert len(every) <= room.policy.limits.held_max
    places = sorted((_queue_of(e, room._rank(e)), _place(e)) for e in every)
    assert places == [(name, each) for name in sorted(room._queues) for each in room._queues[name]]
    assert all(room._queues.values())
    laned = {(pool, name) for pool, lanes in room._laned.items() for name in lanes}
    assert laned == {(e.pool, e.request_id) for e in every if e.laned_ns is not None}
    expiry = [(e.expires_ns, e.request_id) for e in every if e.expires_ns is not None]
    assert room._expiry == sorted(expiry)
    assert len(room._served) <= TENANTS_MAX
    assert +room._by_class == Counter(e.service for e in room.entries.values())
    assert {*room.pools()} == {e.pool for e in every}


def legs_of(opened: OpenRequest) -> list[Flight]:
    """Flights of a request, of both attempts of a race."""
    placements = [each for each in (opened.placement, opened.race) if each is not None]
    return [flight for placed in placements for flight in placed.legs]


def _check_legs(fleet: Fleet, requests: Mapping[str, OpenRequest]) -> None:
    """Raises AssertionError if a flight belongs to no request."""
    legs = [flight for opened in requests.values() for flight in legs_of(opened)]
    assert fleet.flights.keys() <= set(legs)
    assert len(legs) == len(set(legs))


def _check_ahead(ahead: Ahead) -> None:
    """Raises AssertionError if a bound is broken."""
    assert len(ahead._heat) <= HEAT_MAX
    assert len(ahead._open) <= ahead._fleet.policy.ahead.open_max
    assert len(ahead._copies) <= ahead._fleet.policy.ahead.copies_max
    _check_pins(ahead.pins)


def _check_pins(pins: PromptPins) -> None:
    """Raises AssertionError if a bound is broken."""
    assert len(pins) <= PINS_MAX
    assert all(len(pin.keys) <= KEYS_MAX * KEY_BYTES for pin in pins.values())


def _check_stays(stays: Stays) -> None:
    """Raises AssertionError if a bound is broken."""
    assert len(stays) <= STAYS_MAX
