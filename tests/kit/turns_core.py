"""A decision core for tests of the shell: workers in turn, each once, then 502.

It checks that the shell keeps to the rules of `kvstore.routing.events`: known requests only, one
end for each, no word after it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvstore.routing.events import (
    Arrived,
    Joined,
    Judged,
    LegFailed,
    Rejected,
    RejectReason,
    RequestEnded,
    RequestHeld,
    RouteCommand,
    Routed,
    RouteEvent,
    RouteTick,
    WorkerLeft,
)
from kvstore.routing.features import FeatureColumn
from kvstore.routing.models import ModelMap
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.receipts import Receipt, ReceiptDraft
from kvstore.routing.values import PrefixAnswer, RouteRequest, SharedLoad, WorkerHealth

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
DRAFT = ReceiptDraft(
    plain=RECEIPT,
    workers=[],
    columns=np.zeros((len(FeatureColumn), 0)),
    terms={},
    scores=np.zeros(0),
    weights=np.zeros((0, 0)),
    cached=np.zeros(0),
)


class TurnsCore:
    """See the module. `ended`: request → how; `holds`: requests stay held until it is False."""

    def __init__(self, *, deadline_s: float = 30.0) -> None:
        self.policy = RoutingPolicy()
        self.health: dict[str, WorkerHealth] = {}
        self.events: list[RouteEvent] = []
        self.ended: dict[str, RequestEnded] = {}
        self.attempts = Counter[str]()
        self.under_way: dict[str, tuple[RouteRequest, list[str]]] = {}
        self.holds = False
        self.fallbacks = False
        self.flying: tuple[SharedLoad, ...] = ()
        """What it says to other routers."""
        self.only = ""
        """The only worker that gets requests; empty: all."""
        self._held: dict[str, None] = {}
        self._turn = 0
        self._deadline_s = deadline_s

    def step(self, event: RouteEvent, now_ns: int) -> list[RouteCommand]:
        if not isinstance(event, RouteTick):
            self.events.append(event)
        match event:
            case Joined(spec):
                self.health.setdefault(spec.worker, WorkerHealth.UP)
            case Judged(worker, health):
                self.health[worker] = health
            case WorkerLeft(worker):
                del self.health[worker]
            case Arrived(request):
                assert request.request_id not in self.under_way
                self.under_way[request.request_id] = (request, [])
                if self.holds:
                    self._held[request.request_id] = None
                    return [RequestHeld(request.request_id, 0, 1.0, None)]
                return [self._route(request.request_id)]
            case LegFailed(request_id):
                if event.has_streamed:
                    return [self._reject(request_id)]
                return [self._route(request_id)]
            case RequestEnded(request_id):
                self._held.pop(request_id, None)
                del self.under_way[request_id]
                assert request_id not in self.ended
                self.ended[request_id] = event
            case RouteTick() if not self.holds:
                held, self._held = self._held, {}
                return [self._route(request_id) for request_id in held]
        return []

    def _route(self, request_id: str) -> RouteCommand:
        request, tried = self.under_way[request_id]
        names = [
            name
            for name, health in self.health.items()
            if health is WorkerHealth.UP and name not in tried and self.only in ("", name)
        ]
        if not names:
            return self._reject(request_id)
        self._turn += 1
        name = sorted(names)[self._turn % len(names)]
        tried.append(name)
        self.attempts[name] += 1
        return Routed(
            request_id=request_id,
            worker=name,
            model=request.model,
            prefill_worker=None,
            fallbacks=tuple(n for n in sorted(self.health) if n != name) * self.fallbacks,
            attempt=len(tried),
            priority=0,
            deadline_s=self._deadline_s,
            race_after_s=None,
            draft=DRAFT,
        )

    def _reject(self, request_id: str) -> RouteCommand:
        _, tried = self.under_way.pop(request_id)
        reason = RejectReason.ATTEMPTS if tried else RejectReason.NO_ENDPOINTS
        return Rejected(request_id, 502 if tried else 503, reason, None, ())

    def adopt(self, policy: RoutingPolicy, now_ns: int) -> list[RouteCommand]:
        self.policy = policy
        return []

    @property
    def models(self) -> ModelMap:
        return ModelMap(self.policy)

    def explain(self, request: RouteRequest, prefix: PrefixAnswer | None, now_ns: int) -> Any:
        return {"request": request.request_id, "prompt_tokens": request.prompt_tokens}

    def take_drafts(self) -> list[Any]:
        return []

    def loads(self) -> tuple[SharedLoad, ...]:
        return self.flying
