"""Loads of the routers that serve the same engines: each counts what the others have in flight.

    core.loads ─▶ loads ─▶ wire.load ─▶ the other routers
    --peer-router ─▶ its addresses ─▶ a stream from each ─▶ Shared ─▶ core

Without it a router sees the requests of others in engines' metrics only, half a second late, and
two routers send a burst to the same engine. Loads go by an engine's URL, since each router may give
it a name of its own. A stream that breaks or is silent takes its loads with it. A name in DNS may
lead back to this router: that stream is left.

Covers: streams in both directions. Does not cover: what follows from loads (`kvstore.routing`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

import grpc

from kvstore.client.index import aio_channel, channel_options, reason_of
from kvstore.client.tls import Tls, address_parts
from kvstore.config.values import joined
from kvstore.errors import ProtocolError
from kvstore.net.aio import resolved
from kvstore.obs.logs import Troubles
from kvstore.router.dispatch import Dispatcher
from kvstore.routing.events import Shared
from kvstore.wire.load import LOADS, RouterLoads, decode_loads, encode_loads

REPORT_S: Final = 0.05
BEAT_S: Final = 1.0
SILENCE_S: Final = 3.0
RETRY_S: Final = 3.0
PEERS_MAX: Final = 64
"""Most routers that are followed, and most that follow this one."""
_NO_LOADS: Final = "it is no router, or one of another version of kvstore"

_log = logging.getLogger(__name__)


class LoadExchange:
    """Exchange of loads with other routers; `once` is repeated by its owner, on whose loop all of
    it runs.
    """

    pause_s: Final = 1.0

    def __init__(
        self, places: Sequence[str], tls: Tls | None, *, name: str, dispatcher: Dispatcher
    ) -> None:
        """
        Args:
            places: HOST:PORT; a host may have several addresses.
            tls: its routers have certificates with the same client name.
            name: of this router, drawn at its start.
        """
        self._places, self._name = [address_parts(place) for place in places], name
        self._dispatcher = dispatcher
        self._credentials = tls.channel_credentials() if tls is not None and places else None
        self._options = channel_options(f"{tls.name_as('client')}.client.kvstore" if tls else "")
        self._known: dict[tuple[str, int], frozenset[str]] = {}
        """(host, port) of each place → the addresses that it resolves to."""
        self._own = set[str]()
        """Addresses that lead back to this router."""
        self._follows: dict[str, asyncio.Task[None]] = {}
        self.routers: dict[str, str] = {}
        """Address → name of the router that is followed there, whose loads are known."""
        self.troubles = Troubles(_log, "loads of the router at %s are not counted: %s")
        """Routers whose loads are not known, by address, and places without an address."""
        self._report = RouterLoads(name, ())
        self._made_s = 0.0
        self.listener_count = 0
        """Number of `loads` streams that are open."""
        self._is_closed = False

    # ── to the others ────────────────────────────────────────────────────────────────────────────

    def handler(self) -> grpc.GenericRpcHandler:
        """gRPC handler by which other routers ask for this router's loads."""
        method = grpc.unary_stream_rpc_method_handler(self.loads, bytes, encode_loads)
        return grpc.method_handlers_generic_handler(LOADS, {"Loads": method})

    async def loads(
        self, _: bytes, context: grpc.aio.ServicerContext[bytes, RouterLoads]
    ) -> AsyncIterator[RouterLoads]:
        """Report to one other router all that this one has in flight: at once, at each change, and
        each BEAT_S; until either side hangs up, or `close`.
        """
        if self.listener_count >= PEERS_MAX:  # each costs a part of the loop
            text = f"{PEERS_MAX} others ask for the loads of this router already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        last, last_s = None, 0.0
        self.listener_count += 1
        try:
            while not self._is_closed:
                loads, now_s = self._loads(), time.monotonic()
                if loads != last or now_s - last_s >= BEAT_S:
                    last, last_s = loads, now_s
                    yield loads
                await asyncio.sleep(REPORT_S)
        finally:
            self.listener_count -= 1

    def _loads(self) -> RouterLoads:
        """Current report, made at most once in REPORT_S, for all streams together."""
        now_s = time.monotonic()
        if now_s - self._made_s >= REPORT_S:
            self._made_s = now_s
            self._report = RouterLoads(self._name, self._dispatcher.core.loads())
        return self._report

    # ── from the others ──────────────────────────────────────────────────────────────────────────

    async def once(self) -> None:
        """Resolve all places, follow new addresses, and leave those that are gone."""
        await asyncio.gather(*map(self._resolve, self._places))
        if self._is_closed:
            return
        found = sorted(set().union(*self._known.values()) - self._own)[:PEERS_MAX]
        for address in self._follows.keys() - found:
            self._follows.pop(address).cancel()
            self.troubles.note(address, "")
        for address in found:
            if address not in self._follows or self._follows[address].done():
                self._follows[address] = asyncio.create_task(self._follow(address))

    async def _resolve(self, place: tuple[str, int]) -> None:
        """Resolve a place; one without an answer keeps its addresses."""
        try:
            self._known[place] = frozenset(await resolved(*place))
        except OSError as error:
            self.troubles.note(joined(*place), str(error))
        else:
            if joined(*place) not in self._follows:  # `_follow` says more of it
                self.troubles.note(joined(*place), "")

    async def _follow(self, address: str) -> None:
        """Follow the router at an address until the stream ends, and pause; then `once` begins it
        again.
        """
        why = "it has ended"
        async with aio_channel(address, self._credentials, self._options) as channel:
            call = channel.unary_stream(f"/{LOADS}/Loads", bytes, bytes)(b"")
            try:
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        data = await call.read()
                    if not isinstance(data, bytes):  # the end
                        break
                    if not self._heard(address, decode_loads(data)):
                        return
            except TimeoutError:
                why = "it is silent"
            except (ProtocolError, grpc.aio.AioRpcError) as error:
                why = reason_of(error, unimplemented=_NO_LOADS)
            finally:
                call.cancel()
                router = self.routers.pop(address, "")
                if router:
                    self._dispatcher.note(Shared(router, ()))
        self.troubles.note(address, why)
        await asyncio.sleep(RETRY_S)  # or loads of one that is stuck would count nearly always

    def _heard(self, address: str, report: RouterLoads) -> bool:
        """Take a report from an address. Returns whether to go on: not if it is this router itself,
        or one that is followed elsewhere.
        """
        if report.router == self._name:
            self._own.add(address)
            return False
        elsewhere = (name for place, name in self.routers.items() if place != address)
        if report.router in elsewhere:
            return False
        if self.routers.get(address) != report.router:
            self.routers[address] = report.router
            _log.info("loads of the router at %s are counted", address)
        self.troubles.note(address, "")
        self._dispatcher.note(Shared(report.router, report.loads))
        return True

    async def close(self) -> None:
        """Follow no router any more, and end the reports to others."""
        self._is_closed = True
        for task in self._follows.values():
            task.cancel()
        await asyncio.gather(*self._follows.values(), return_exceptions=True)
