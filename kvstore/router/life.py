"""Life of a routed request: from its arrival at the core to its one end, for all front ends.

    enter ─▶ Routed, Rejected        failed ─▶ Routed elsewhere, Rejected        first, end ─▶ core

The proxy sends the request itself; behind Envoy and for callers of Route somebody else does. All
say the same words, and the core judges them by one rule (`kvstore.routing.legs`).
"""

from __future__ import annotations

from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.workers import Worker, Workers
from kvstore.routing.events import (
    Arrived,
    Ending,
    FirstToken,
    LegFailed,
    Rejected,
    RejectReason,
    RequestEnded,
    Routed,
)


class RoutedLife:
    """One request. `routed`: the last decision, while the core waits for its result; None: it does
    not.
    """

    def __init__(self, dispatcher: Dispatcher, workers: Workers) -> None:
        self._dispatcher, self._workers = dispatcher, workers
        self.routed: Routed | None = None

    async def enter(self, asked: Arrived) -> Routed | Rejected:
        """The request arrives. Returns the decision of the core."""
        decision = await self._dispatcher.ask(asked)
        reason = decision.reason if isinstance(decision, Rejected) else None
        if reason is RejectReason.MODEL_UNKNOWN and not self._dispatcher.core.policy.models:
            await self._workers.read_again()  # an adapter may have been loaded just now
            decision = await self._dispatcher.ask(asked)
        return self._decided(decision)

    async def failed(self, failed: LegFailed) -> Routed | Rejected:
        """A leg of the request failed. Returns the next decision."""
        self.routed = None
        return self._decided(await self._dispatcher.ask(failed))

    def _decided(self, decision: Routed | Rejected) -> Routed | Rejected:
        self.routed = decision if isinstance(decision, Routed) else None
        return decision

    @property
    def worker(self) -> Worker | None:
        """Worker of the last decision; None: none was chosen, or it has left the pool since."""
        return None if self.routed is None else self._workers.get(self.routed.worker)

    def first(self, served_by: str = "") -> None:
        """The first byte of a streamed response came, from another worker if a gateway chose it."""
        if self.routed is not None:
            self._dispatcher.note(FirstToken(self.routed.request_id, served_by))

    def end(
        self,
        ending: Ending,
        *,
        cached_tokens: int | None = None,
        output_tokens: int = 0,
        served_by: str = "",
        why: str = "",
    ) -> None:
        """The request is over; no error if it is already."""
        routed, worker = self.routed, self.worker
        if routed is None:
            return
        self.routed = None
        if worker is not None:
            worker.has_served = True
        self._dispatcher.note(
            RequestEnded(
                routed.request_id,
                ending,
                cached_tokens,
                output_tokens,
                served_by=served_by,
                why=why,
            )
        )
