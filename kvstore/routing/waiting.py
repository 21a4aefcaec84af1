"""Held requests: classes of service, tenants, displacement, time to live.

    add ─▶ (class, tenant) queue ─▶ heads in order ─▶ take         expired, displaced
       └─▶ lane ─▶ the same: a remote prefill waits for a prefiller, among prompts of its length

Order: lanes, by the rules of `split`; then class rank; then the tenant that was served least, by
uncached tokens over its share; then priority, then arrival. A tenant that comes back after a pause
starts level with the least served active one, so that a pause saves up nothing (virtual token
counters).
Bounded: `queue_max` of each class, `held_max` in all; a full room displaces the newest request of
the lowest class for one of a higher class.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final

from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.requests import OpenRequest
from kvstore.routing.split import AGING_S, bucket
from kvstore.types import Latest
from kvstore.units import NS_PER_S

_RATE_SAMPLES: Final = 64
_RETRY_S_MAX: Final = 60
TENANTS_MAX: Final = 4096
"""Tenants whose tokens are remembered; the one that came or was routed longest ago is
forgotten.
"""
_LANED: Final = -1
"""In the place of a rank: the queue is a lane of the remote prefills of one bucket."""
_Queue = tuple[str, int, str]
"""(pool, class rank, tenant), or (pool, _LANED, bucket)."""


class WaitingRoom:
    """See the module."""

    def __init__(self, policy: RoutingPolicy, laned: Mapping[str, dict[str, OpenRequest]]) -> None:
        """`laned`: pool → requests in its lanes, by id; kept up to date here."""
        self.policy, self._laned = policy, laned
        self.entries: dict[str, OpenRequest] = {}
        self._queues: dict[_Queue, list[tuple[int, int, str]]] = {}
        """(priority, number, request) of each request, sorted; no queue is empty."""
        self._expiry: list[tuple[int, str]] = []
        """(end of its time to live, request), sorted."""
        self._served = Latest[str, float](TENANTS_MAX)
        """Tenant → uncached tokens over its share."""
        self._by_class = Counter[str]()
        self._taken_ns: deque[int] = deque(maxlen=_RATE_SAMPLES)

    def is_full(self, service: str) -> bool:
        """Whether a request of the class has no room, nor one that it would displace."""
        its = self.policy.classes[service]
        is_over = its.queue_max is not None and self._by_class[service] >= its.queue_max
        return is_over or (
            len(self.entries) >= self.policy.limits.held_max
            and self._rank(self._lowest()) <= its.rank
        )

    def add(self, entry: OpenRequest) -> OpenRequest | None:
        """Hold a request. Returns the one that is displaced, which may be the request itself."""
        displaced = None
        if len(self.entries) >= self.policy.limits.held_max:
            displaced = self._lowest()
            if self._rank(displaced) <= self._rank(entry):
                return entry
            self.remove(displaced)
        self._queue(entry)
        self.entries[entry.request_id] = entry
        if entry.expires_ns is not None:
            insort(self._expiry, (entry.expires_ns, entry.request_id))
        self._by_class[entry.service] += 1
        return displaced

    def remove(self, entry: OpenRequest) -> None:
        """Take a request out (routed, rejected or aborted); no error if it is not here."""
        if self.entries.pop(entry.request_id, None) is not None:
            self._by_class[entry.service] -= 1
            self._unqueue(entry)
            if entry.expires_ns is not None:
                _drop(self._expiry, (entry.expires_ns, entry.request_id))
        if entry.laned_ns is not None:
            self._laned[entry.pool].pop(entry.request_id, None)
            entry.laned_ns = None

    def lane(self, entry: OpenRequest, now_ns: int) -> None:
        """A request that is held waits in a lane of its length from now on."""
        self._unqueue(entry)
        entry.wait_for_prefiller(now_ns)
        self._queue(entry)

    def _queue(self, entry: OpenRequest) -> None:
        name, place = _queue_of(entry, self._rank(entry)), _place(entry)
        if entry.laned_ns is not None:
            self._laned[entry.pool][entry.request_id] = entry
        elif name not in self._queues:
            self._level(entry.request.tenant)
        insort(self._queues.setdefault(name, []), place)

    def _unqueue(self, entry: OpenRequest) -> None:
        name = _queue_of(entry, self._rank(entry))
        _drop(self._queues[name], _place(entry))
        if not self._queues[name]:
            del self._queues[name]

    def taken(self, tenant: str, uncached: float, now_ns: int, *, was_held: bool) -> None:
        """A request was routed: charge its tenant."""
        served = self._served.get(tenant, 0.0)
        self._served[tenant] = served + uncached / self.policy.tenants.get(tenant, 1.0)
        if was_held:
            self._taken_ns.append(now_ns)

    def heads(self, pool: str, now_ns: int) -> Iterator[tuple[int, OpenRequest]]:
        """(class rank, first request) of each tenant, in the order in which they are due, behind
        the first of each lane, by bucket less aging, then by arrival, with rank -1.
        """
        due = []
        for (its_pool, rank, name), queue in self._queues.items():
            if its_pool == pool:
                entry = self.entries[queue[0][2]]
                turn, since_ns = self._served.get(name, 0.0), entry.laned_ns or 0
                if rank == _LANED:
                    turn = int(name) - int((now_ns - since_ns) / NS_PER_S / AGING_S)
                due.append(((rank, turn, since_ns, name), entry))
        yield from ((key[0], entry) for key, entry in sorted(due, key=itemgetter(0)))

    def pools(self) -> list[str]:
        """Pools with held requests."""
        return list(dict.fromkeys(pool for pool, _, _ in self._queues))

    def ahead(self, pool: str, rank: int) -> int:
        """Held requests of a pool with this rank or a more urgent one."""
        classes = self.policy.classes
        return sum(
            1 for e in self.entries.values() if e.pool == pool and classes[e.service].rank <= rank
        )

    def has_before(self, pool: str, rank: int) -> bool:
        """Whether a new request of this rank has to queue up."""
        return any(p == pool and _LANED < its <= rank for p, its, _ in self._queues)

    def expired(self, now_ns: int) -> list[OpenRequest]:
        """Remove the requests whose time to live is over, and return them."""
        over = []
        while self._expiry and self._expiry[0][0] <= now_ns:
            over.append(self.entries[self._expiry[0][1]])
            self.remove(over[-1])
        return over

    def wait_s(self, ahead: int, now_ns: int) -> float:
        """Expected seconds in the room behind `ahead` requests, at the rate at which held ones were
        routed lately; 0 if that is not known."""
        if len(self._taken_ns) < 2:
            return 0.0
        span_s = max(1e-3, (now_ns - self._taken_ns[0]) / NS_PER_S)
        return ahead / (len(self._taken_ns) / span_s)

    def retry_after_s(self, ahead: int, excess_s: float, now_ns: int) -> float:
        """Whole seconds, 1 to 60, after which the request would fit: from the drain rate, or the
        time by which it exceeds its objective.
        """
        return float(
            min(_RETRY_S_MAX, max(1, math.ceil(max(self.wait_s(ahead, now_ns), excess_s))))
        )

    def _rank(self, entry: OpenRequest) -> int:
        return self.policy.classes[entry.service].rank

    def _lowest(self) -> OpenRequest:
        return max(
            self.entries.values(), key=lambda e: (self._rank(e), e.request.priority, e.number)
        )

    def _level(self, tenant: str) -> None:
        active = {name for _, rank, name in self._queues if rank != _LANED}
        if tenant not in active:
            least = min((self._served.get(name, 0.0) for name in active), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)


def _queue_of(entry: OpenRequest, rank: int) -> _Queue:
    if entry.laned_ns is not None:
        return entry.pool, _LANED, str(bucket(entry.uncached))
    return entry.pool, rank, entry.request.tenant


def _place(entry: OpenRequest) -> tuple[int, int, str]:
    its = entry.request
    is_alike = entry.laned_ns is not None and its.tenant  # no tenant goes before another
    return 0 if is_alike else its.priority, entry.number, its.request_id


def _drop(found: list[Any], its: Any) -> None:
    """Take one out of a sorted list."""
    del found[bisect_left(found, its)]
