"""Held requests: classes of service, tenants, displacement, time to live.

    add ─▶ (class, tenant) queue ─▶ heads in order ─▶ take         expired, displaced

Order: class rank; then the tenant that was served least, by uncached tokens over its share; then
priority, then arrival. A tenant that comes back after a pause starts level with the least served
active one, so that a pause saves up nothing (virtual token counters).
Bounded: `queue_max` of each class, `held_max` in all; a full room displaces the newest request of
the lowest class for one of a higher class.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final

from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.requests import OpenRequest
from kvstore.routing.split import PrefillLanes
from kvstore.units import NS_PER_S

_RATE_SAMPLES: Final = 64
_RETRY_S_MAX: Final = 60
TENANTS_MAX: Final = 4096
"""Tenants whose tokens are remembered; the one that was routed longest ago is forgotten."""
_SLACK: Final = 1000
"""A heap is swept when more than half of its entries, and more than this, are gone."""


_Lane = tuple[str, int, str]


class WaitingRoom:
    """See the module."""

    def __init__(self, policy: RoutingPolicy, prefills: Mapping[str, PrefillLanes]) -> None:
        """`prefills`: lanes of each pool, which decide on the turn of requests that are there."""
        self.policy, self._prefills = policy, prefills
        self.entries: dict[str, OpenRequest] = {}
        self._lanes: dict[_Lane, list[tuple[int, int, str]]] = {}
        """(pool, rank, tenant) → heap of (priority, number, request)."""
        self._expiry: list[tuple[int, str]] = []
        self._served: dict[str, float] = {}
        """Tenant → uncached tokens over its share."""
        self._by_class = Counter[str]()
        self._by_pool = Counter[str]()
        self._taken_ns: deque[int] = deque(maxlen=_RATE_SAMPLES)

    def __len__(self) -> int:
        return len(self.entries)

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
        if entry.laned_ns is None:
            lane = self._lane(entry)
            if lane not in self._lanes:
                self._level(entry.request.tenant)
            heap = self._lanes.setdefault(lane, [])
            heapq.heappush(heap, (entry.request.priority, entry.number, entry.request_id))
        self.entries[entry.request_id] = entry
        if len(self._expiry) > 2 * len(self.entries) + _SLACK:
            every = self.entries.values()
            self._expiry = [(e.expires_ns, e.request_id) for e in every if e.expires_ns is not None]
            heapq.heapify(self._expiry)
        elif entry.expires_ns is not None:
            heapq.heappush(self._expiry, (entry.expires_ns, entry.request_id))
        self._by_class[entry.service] += 1
        self._by_pool[entry.pool] += 1
        return displaced

    def remove(self, entry: OpenRequest) -> None:
        """Take a request out (routed, rejected or aborted); no error if it is not here."""
        if entry.laned_ns is not None:
            self._prefills[entry.pool].remove(entry)
        if self.entries.pop(entry.request_id, None) is not None:
            self._by_class[entry.service] -= 1
            self._by_pool[entry.pool] -= 1
            self.trim(entry)

    def trim(self, entry: OpenRequest) -> None:
        """Drop the heads of an entry's lane that are not queued in it any more; an empty
        lane goes.
        """
        lane = self._lane(entry)
        heap = self._lanes.get(lane, [])
        while heap and not self._is_queued(heap[0][2]):
            heapq.heappop(heap)
        if not heap:
            self._lanes.pop(lane, None)

    def _is_queued(self, request_id: str) -> bool:
        return request_id in self.entries and self.entries[request_id].laned_ns is None

    def taken(self, tenant: str, uncached: float, now_ns: int, *, was_held: bool) -> None:
        """A request was routed: charge its tenant."""
        served = self._served.pop(tenant, 0.0)
        self._served[tenant] = served + uncached / self.policy.tenants.get(tenant, 1.0)
        if len(self._served) > TENANTS_MAX:
            del self._served[next(iter(self._served))]
        if was_held:
            self._taken_ns.append(now_ns)

    def heads(self, pool: str, now_ns: int) -> Iterator[tuple[int, OpenRequest]]:
        """(class rank, first request) of each tenant, in the order in which they are due, behind
        those that are due in the prefill lanes, with rank -1.
        """
        if pool in self._prefills:
            yield from ((-1, entry) for entry in self._prefills[pool].order(now_ns))
        due = sorted(
            (rank, self._served.get(tenant, 0.0), tenant)
            for its_pool, rank, tenant in self._lanes
            if its_pool == pool
        )
        for rank, _, tenant in due:
            if heap := self._lanes.get((pool, rank, tenant)):
                yield rank, self.entries[heap[0][2]]

    def pools(self) -> list[str]:
        """Pools with held requests."""
        return [pool for pool, count in self._by_pool.items() if count]

    def ahead(self, pool: str, rank: int) -> int:
        """Held requests of a pool with this rank or a more urgent one."""
        classes = self.policy.classes
        return sum(
            1 for e in self.entries.values() if e.pool == pool and classes[e.service].rank <= rank
        )

    def has_before(self, pool: str, rank: int) -> bool:
        """Whether a new request of this rank has to queue up."""
        return any(p == pool and its <= rank for p, its, _ in self._lanes)

    def expired(self, now_ns: int) -> list[OpenRequest]:
        """Remove the requests whose time to live is over, and return them."""
        over = []
        while self._expiry and self._expiry[0][0] <= now_ns:
            if (entry := self.entries.get(heapq.heappop(self._expiry)[1])) is not None:
                self.remove(entry)
                over.append(entry)
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

    def _lane(self, entry: OpenRequest) -> _Lane:
        return (entry.pool, self._rank(entry), entry.request.tenant)

    def _rank(self, entry: OpenRequest) -> int:
        return self.policy.classes[entry.service].rank

    def _lowest(self) -> OpenRequest:
        return max(
            self.entries.values(), key=lambda e: (self._rank(e), e.request.priority, e.number)
        )

    def _level(self, tenant: str) -> None:
        active = {name for _, _, name in self._lanes}
        if tenant not in active:
            least = min((self._served.get(name, 0.0) for name in active), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
