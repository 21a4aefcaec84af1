"""The decision core for tests of the shell: workers in turn, and all that is said is kept.

It checks that the shell keeps to the rules of `kvstore.routing.events`: known requests only, one
end for each, no word after it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    Arrived,
    Blocked,
    FirstToken,
    LegFailed,
    Raced,
    RequestEnded,
    RouteCommand,
    Routed,
    RouteEvent,
    RouteTick,
    Unplaced,
)
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.receipts import Receipt
from kvstore.routing.requests import OpenRequest, Placement
from kvstore.wire.load import EngineLoad

RECEIPT = Receipt(
    number=0,
    seed=0,
    at_ns=0,
    request_id="",
    tenant="",
    service="",
    pool="",
    model="",
    policy="",
    policy_hash="",
    index_trust="",
    index_epoch=0,
    prompt_tokens=0,
    output_tokens=0,
    session_hash=0,
    chosen="",
)


class TurnsCore(RouterCore):
    """See the module. `ended`: request → how; `holds`: requests stay held until it is False."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        super().__init__(policy or RoutingPolicy(policy="round-robin"), seed=1)
        self.events: list[RouteEvent] = []
        self.ended: dict[str, RequestEnded] = {}
        self.attempts = Counter[str]()
        self.holds = False
        self.flying: tuple[EngineLoad, ...] = ()
        """What it says to other routers."""
        self.only = ""
        """The only worker that gets requests; empty: all."""

    @property
    def health(self) -> dict[str, str]:
        """Word of each worker."""
        return {state.spec.worker: state.word.value for state in self.fleet.workers}

    @property
    def under_way(self) -> dict[str, OpenRequest]:
        return self.open

    def step(self, event: RouteEvent, now_ns: int) -> list[RouteCommand]:
        if not isinstance(event, RouteTick):
            self.events.append(event)
        match event:
            case Arrived(request) if self.only:
                bound = msgspec.structs.replace(request, subset=(self.only,))
                event = Arrived(bound)
            case LegFailed(request_id) | FirstToken(request_id):
                assert request_id in self.open
            case RequestEnded(request_id):
                assert request_id in self.open
                assert request_id not in self.ended
                self.ended[request_id] = event
        commands = super().step(event, now_ns)
        for command in commands:
            if isinstance(command, Routed | Raced):
                self.attempts[command.worker] += 1
        return commands

    def _admit(self, opened: OpenRequest, now_ns: int) -> Placement | Blocked | Unplaced:
        return Blocked.LOAD if self.holds else super()._admit(opened, now_ns)

    def _pump(self, now_ns: int) -> list[RouteCommand]:
        return [] if self.holds else super()._pump(now_ns)

    def loads(self) -> tuple[EngineLoad, ...]:
        return self.flying or super().loads()
