"""Sessions that are remembered: the pool and the worker of a conversation's last request.

    Routed ─▶ `keep` ─▶ pool, worker, when ─▶ next request: the same side, the same worker

A session stays for `session_ttl_s` after its last request, where it can: while a pool has a weight
above 0 in its rule, its sessions stay when weights change; policy `session` prefers the worker,
also when others join or leave. Policy `cost` chooses by cost, which the prefix is part of.
STAYS_MAX sessions, the longest unused leave; a name of any length takes 16 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

import msgspec
import xxhash

from kvstore.routing.values import RouteRequest
from kvstore.routing.workers.fleet import Fleet
from kvstore.units import NS_PER_S

STAYS_MAX: Final = 65_536


class Stay(msgspec.Struct):
    """Pool and worker of a session's last request."""

    pool: str
    worker: str
    at_ns: int


class Stays:
    """See the module."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stays: OrderedDict[bytes, Stay] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stays)

    def find(self, request: RouteRequest, now_ns: int) -> Stay | None:
        """None: it has none, or was silent for too long."""
        stay = self._stays.get(session_name(request))
        ttl_ns = self._fleet.policy.session_ttl_s * NS_PER_S
        return stay if stay is not None and now_ns - stay.at_ns < ttl_ns else None

    def keep(self, request: RouteRequest, pool: str, worker: str, now_ns: int) -> None:
        """A request of a session goes to a worker, or ended there."""
        name = session_name(request)
        if not name:
            return
        self._stays[name] = Stay(pool, worker, now_ns)
        self._stays.move_to_end(name)
        if len(self._stays) > STAYS_MAX:
            self._stays.popitem(last=False)

    def home(self, before: str, chosen: str, failed: Collection[str]) -> str:
        """Worker that a session stays at, of the one before and the one chosen now: the former,
        where policies go by it and it only was too busy."""
        row = self._fleet.row_of.get(before)
        if row is None or before in failed or self._fleet.policy.policy != "session":
            return chosen
        return before if self._fleet.workers[row].health.is_up else chosen

    def touch(self, request: RouteRequest, now_ns: int) -> None:
        """A request of a session ended."""
        stay = self.find(request, now_ns)
        if stay is not None:
            self.keep(request, stay.pool, stay.worker, now_ns)

    def end(self, request: RouteRequest) -> None:
        """The session is over, says its client."""
        self._stays.pop(session_name(request), None)

    def check(self) -> None:
        """Raises AssertionError if a bound is broken."""
        assert len(self._stays) <= STAYS_MAX


def session_name(request: RouteRequest) -> bytes:
    """Name of a request's session among those of all tenants and models; empty: it has none."""
    if not request.session:
        return b""
    text = f"{request.tenant}\0{request.model}\0{request.session}"
    return xxhash.xxh3_128_digest(text.encode(errors="replace"))
