"""The whole: events in, commands out.

    core = RouterCore(policy, seed=…)
    for command in core.step(Arrived(request, prefix), now_ns): …

The shell calls `step` on one thread. A decision counts as sent: the shell sends it or says
`LegFailed`.
"""

from __future__ import annotations

from kvstore.routing.events import RouteCommand, RouteEvent
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.receipts import Receipt
from kvstore.routing.values import PrefixAnswer, RouteRequest


class RouterCore:
    """One router.

    Args:
        policy: replaced as a whole by `adopt`.
        seed: a random number of this process.
    """

    def __init__(self, policy: RoutingPolicy, *, seed: int) -> None:
        self.policy = policy
        self._seed = seed

    def step(self, event: RouteEvent, now_ns: int) -> list[RouteCommand]:
        """Take in an event; commands about this request and others, in order."""
        raise NotImplementedError

    def adopt(self, policy: RoutingPolicy, now_ns: int) -> list[RouteCommand]:
        """Go on under another policy; held requests are judged by it."""
        raise NotImplementedError

    def explain(self, request: RouteRequest, prefix: PrefixAnswer | None, now_ns: int) -> Receipt:
        """Dry run: the receipt of the decision that `Arrived` would get now. Changes nothing."""
        raise NotImplementedError

    def take_receipts(self) -> list[Receipt]:
        """Receipts of requests that ended since the last call; the oldest are dropped."""
        raise NotImplementedError

    def check(self) -> None:
        """Invariants between two steps. Raises AssertionError if one is broken."""
        raise NotImplementedError
