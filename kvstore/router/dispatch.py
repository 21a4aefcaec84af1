"""The decision core on an asyncio loop: events in, one answer for each request that waits.

    await ask(Arrived)   ─▶ core.step ─▶ Routed, Rejected; held ─▶ later, by a tick or an event
    await ask(LegFailed) ─▶ Routed elsewhere, or Rejected
    late(…)             ─▶ Raced, or nothing, at once
    note(…)             all other events; what they release is delivered to the requests that wait
    StateChange, AbandonWorker ─▶ `workers`      Prepare ─▶ its handler
    RoutedLife          ask, note, for one request from its arrival to its end

Rules: all calls on one loop; a request that was `Routed` gets exactly one `RequestEnded`; a request
whose client left while it was held is ended here. Does not cover: decisions (`kvstore.routing`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from kvstore.router.engines.workers import Worker, Workers
from kvstore.routing.core import RouterCore
from kvstore.routing.events import (
    AbandonWorker,
    Arrived,
    Ending,
    Fault,
    FirstToken,
    Late,
    Leg,
    LegFailed,
    PrefillDone,
    Raced,
    Rejected,
    RequestEnded,
    RouteCommand,
    Routed,
    RouteEvent,
    RouteTick,
)
from kvstore.routing.policy import RoutingPolicy
from kvstore.routing.rows import StateChange
from kvstore.routing.values import RouteRequest

TICK_S: Final = 0.01
"""Pause between two ticks while requests are held."""
IDLE_TICK_S: Final = 0.25
_log = logging.getLogger(__name__)


class Dispatcher:
    """See the module."""

    def __init__(self, core: RouterCore, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock`: nanoseconds, the time of all events."""
        self.core, self.clock = core, clock
        self.workers = Workers(self.note)
        self.handlers: dict[type, Callable[[Any], None]] = {
            StateChange: self.workers.changed,
            AbandonWorker: self.workers.give_up,
        }
        """Handlers by type of the commands that answer no request of a caller."""
        self.held: dict[str, asyncio.Future[Routed | Rejected]] = {}
        """Requests that wait for a decision, by id."""

    def note(self, event: RouteEvent) -> None:
        """Apply an event whose answers, if any, are for requests other than the caller's."""
        self._deliver(self.core.step(event, self.clock()), "")

    def adopt(self, policy: RoutingPolicy) -> None:
        """Use another policy from now on."""
        self._deliver(self.core.adopt(policy, self.clock()), "")

    def late(self, request_id: str) -> Raced | None:
        """A request has no first byte yet. Returns the second worker for it; None: it goes on
        alone.
        """
        commands = self.core.step(Late(request_id), self.clock())
        self._deliver(commands, "")
        return next((command for command in commands if isinstance(command, Raced)), None)

    async def ask(self, event: Arrived | LegFailed) -> Routed | Rejected:
        """Apply an event. Returns the next decision about its request, waiting while that
        is held.
        """
        its = event.request if isinstance(event, Arrived) else event
        request_id = its.request_id
        found = self._deliver(self.core.step(event, self.clock()), request_id)
        if found is not None:
            return found
        asked: asyncio.Future[Routed | Rejected] = asyncio.get_running_loop().create_future()
        self.held[request_id] = asked
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.cancelled() or isinstance(asked.result(), Routed):
                self.note(RequestEnded(request_id, Ending.ABORTED))
            raise
        finally:
            del self.held[request_id]

    def _deliver(
        self, commands: Iterable[RouteCommand], request_id: str
    ) -> Routed | Rejected | None:
        """Wake the requests that commands answer, and run handlers. Returns the answer to
        `request_id`, whose own task is running; None: there is none yet.
        """
        found = None
        for command in commands:
            if not isinstance(command, Routed | Rejected):
                if (handler := self.handlers.get(type(command))) is not None:
                    handler(command)
                continue
            if isinstance(command, Rejected) and command.fault:
                _log.error(
                    "rejected %s, this router's fault: %s", command.request_id, command.fault
                )
            if command.request_id == request_id:
                found = command
                continue
            asked = self.held.get(command.request_id)
            if asked is not None and not asked.done():
                asked.set_result(command)
        return found

    async def tick(self) -> None:
        """One tick of the core and the pause after it; the caller repeats it."""
        self.note(RouteTick())
        await asyncio.sleep(TICK_S if self.held else IDLE_TICK_S)


class RoutedLife(msgspec.Struct):
    """One request, from its arrival at the core to its one end, for all front ends.

        enter ─▶ Routed, Rejected     failed ─▶ Routed elsewhere, Rejected
        first, prefilled, end ─▶ core

    The proxy sends the request itself; behind Envoy and for callers of Route somebody else does.
    All say the same words, and the core judges them by one rule (`kvstore.routing.legs`).
    """

    dispatcher: Dispatcher
    routed: Routed | None = None
    """The last decision, while the core waits for its result; None: it does not."""

    async def enter(self, request: RouteRequest) -> Routed | Rejected:
        """The request arrives. Returns the decision of the core."""
        core, model = self.dispatcher.core, request.model
        models = core.arrivals.models
        if not core.policy.models and models.is_new(model):
            # An adapter may have been loaded just now. An engine that takes any name would answer
            # in its place, with another model.
            await self.dispatcher.workers.read_again(model, is_taken=bool(models.any_pools))
        return self._decided(await self.dispatcher.ask(Arrived(request)))

    async def failed(
        self, leg: Leg, fault: Fault, *, has_streamed: bool = False, is_claim: bool = False
    ) -> Routed | Rejected:
        """A leg of the request failed, as `LegFailed`. Returns the next decision."""
        assert self.routed is not None
        failed = LegFailed(self.routed.request_id, leg, fault, has_streamed, is_claim)
        self.routed = None
        return self._decided(await self.dispatcher.ask(failed))

    def _decided(self, decision: Routed | Rejected) -> Routed | Rejected:
        self.routed = decision if isinstance(decision, Routed) else None
        return decision

    @property
    def worker(self) -> Worker | None:
        """Worker of the last decision; None: none was chosen, or it has left the pool since."""
        routed = self.routed
        return None if routed is None else self.dispatcher.workers.get(routed.worker)

    def first(self, served_by: str = "") -> None:
        """The first byte of a streamed response came, from another worker if a gateway chose it."""
        if self.routed is not None:
            self.dispatcher.note(FirstToken(self.routed.request_id, served_by))

    def prefilled(self, fault: Fault | None) -> None:
        """The remote prefill is over, as `PrefillDone`."""
        if self.routed is not None:
            self.dispatcher.note(PrefillDone(self.routed.request_id, fault))

    def end(
        self, end: Ending, cached: int | None = None, made: int = 0, *, by: str = "", why: str = ""
    ) -> None:
        """The request is over, as `RequestEnded`; no error if it is already."""
        worker, routed = self.worker, self.routed
        if routed is not None:
            self.routed = None
            if worker is not None:
                worker.has_served = True
            self.dispatcher.note(RequestEnded(routed.request_id, end, cached, made, by, why))
