"""The router's process: one loop for clients, engines and decisions; pages on threads of their own.

    kvstore router ─▶ run_router ─▶ asyncio (uvloop where it is installed)
                                     ├─ door ─▶ proxy ─▶ attempts
                                     ├─ probes, discovery, ticks of the core, receipts
                                     └─ pages: /metrics, /healthz, made here and sent by threads

SIGHUP reads the policy file again: a wrong one is refused and the old one stays. SIGTERM drains:
/health says 503 while new connections are still accepted, for `--drain-delay`; then idle ones are
closed, and requests in flight have `--drain-timeout`. A second one ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import ssl
import time
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvstore import __version__
from kvstore.config.router import RouterConfig, load_policy
from kvstore.config.values import joined
from kvstore.errors import ConfigError
from kvstore.installation import is_installed
from kvstore.net.aio import Tasks, persist
from kvstore.net.http import HttpServer
from kvstore.net.server import HealthyServer, connections_max, warn_of_its_end
from kvstore.net.site import REQUESTS_SHOWN
from kvstore.obs import logs
from kvstore.obs.metrics import Timings
from kvstore.router.ahead import Preparations
from kvstore.router.dispatch import Dispatcher
from kvstore.router.engines.calls import EngineHttp
from kvstore.router.engines.discovery import Discovery, Slices, in_cluster
from kvstore.router.engines.probes import Probes
from kvstore.router.engines.workers import PoolWatch
from kvstore.router.exchange import LoadExchange
from kvstore.router.front.door import FrontDoor, OpenDoor, open_door, server_context
from kvstore.router.front.intake import Bodies, RequestIntake, load_tenants
from kvstore.router.front.legs import beside
from kvstore.router.front.proxy import Origins, Proxy
from kvstore.router.keys.index_calls import RETRY_S, IndexCalls, Spaces
from kvstore.router.keys.parity import Parity
from kvstore.router.keys.prefixes import Prefixes
from kvstore.router.keys.process import KeyProcess
from kvstore.router.keys.rendering import Rendering
from kvstore.router.pages import make_router_pages
from kvstore.router.picker import Picker
from kvstore.router.receipt_log import ReceiptFile
from kvstore.router.rpc import RouteService, serve_picker, serve_route
from kvstore.routing.core import RouterCore
from kvstore.routing.events import Prepare
from kvstore.routing.learning import TokenEstimates
from kvstore.routing.policy import policy_hash
from kvstore.routing.receipts import ReceiptDraft
from kvstore.units import NS_PER_S
from kvstore.wording import cannot_listen

if TYPE_CHECKING:
    from kvstore.router.traces import RouteTraces

READINESS_S: Final = 0.1

_log = logging.getLogger(__name__)


class Router:
    """Parts of one router, on the running loop: `start`, and `close` in any case."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`core` None: one by the policy file. `clock`: ns, for its events. Raises ConfigError."""
        self.config = config
        tenants = load_tenants(config.api_keys) if config.api_keys else None
        self.core = core or RouterCore(load_policy(config.policy), seed=secrets.randbits(62))
        self.dispatcher = Dispatcher(self.core, clock=clock)
        self.workers = self.dispatcher.workers
        self.discovery = Discovery(config, self.workers)
        self.pools = PoolWatch(lambda: self.core.policy, self.workers)
        self.refused_policy = ""
        """Why the last reload changed nothing; empty: it did, or there was none."""
        self.engines = EngineHttp(_worker_context(config), config.worker_key)
        receipts, receipt_bytes = config.receipts
        self.receipts = ReceiptFile(receipts, bytes_max=receipt_bytes)
        self.ttfts = {"predicted": Timings(), "achieved": Timings()}
        """Predicted and achieved times to the first token, of the same requests."""
        self.decided = deque[ReceiptDraft](maxlen=REQUESTS_SHOWN)
        """Decisions of the latest requests that ended."""
        self.probes = Probes(self.engines, self.dispatcher)
        self.keys = KeyProcess(config.tokenizers)
        # Without an index nothing is compared, so no keys are made and no blocks prepared.
        self.index = IndexCalls(config.index, config.tls, timeout_s=config.index_timeout / 1000)
        self.rendering = Rendering(self.engines, self.workers, self.keys)
        spaces = Spaces(self.workers, self.index, lambda: self.core.policy)
        self.parity = Parity(self.rendering, spaces)
        self.ahead = Preparations(config.tls, spaces, answered=self.dispatcher.note)
        self.dispatcher.handlers[Prepare] = self.ahead.begin
        prefixes = Prefixes(TokenEstimates(), self.rendering, spaces)
        bodies = Bodies(bytes_max=config.body_max)
        self.intake = RequestIntake(prefixes, tenants, self.dispatcher, bodies)
        self.servers: dict[str, HealthyServer] = {}
        """gRPC servers by name, `route` and `picker`, if configured."""
        self._tasks = Tasks("a bug: work of the router has ended")
        self._open_door: OpenDoor | None = None
        self.port = 0
        self.traces: RouteTraces | None = None
        if config.trace is not None:
            # Only here: a router without --trace loads nothing of OpenTelemetry.
            from kvstore.router.traces import RouteTraces

            self.traces = RouteTraces(config.trace, joined(*config.listen), config.trace_sample)
        self._make_front(config)

    def _make_front(self, config: RouterConfig) -> None:
        self.proxy = Proxy(
            self.dispatcher,
            self.engines,
            intake=self.intake,
            origins=Origins(config.allowed_origins),
            parity=self.parity,
            probes=self.probes,
            traces=self.traces,
        )
        self.picker = Picker(self.dispatcher, self.intake)
        self.exchange = LoadExchange(
            config.peer_router, config.tls, name=self.proxy.name, dispatcher=self.dispatcher
        )
        prefixes, suspected = self.intake.prefixes, self.probes.look_now
        self._route = RouteService(self.dispatcher, prefixes, suspected=suspected)
        self.door = FrontDoor(
            self.proxy.answer,
            connections_max=connections_max(config.connections),
            memory=self.intake.bodies,
        )

    async def start(self) -> None:
        """Listen, and begin all work. Raises ConfigError."""
        config, context = self.config, None
        if config.front is not None:
            context = server_context(config.front, demands_certificates=config.api_keys is None)
        try:
            self._open_door = open_door(
                self.door, *config.listen, context=context, is_shared=config.share_port
            )
        except OSError as error:
            address = joined(*config.listen)
            raise ConfigError(cannot_listen("--listen", address, error)) from None
        self.port = self._open_door.port
        await self.begin()

    async def begin(self) -> None:
        """Begin all work but the listening socket. Raises ConfigError."""
        config = self.config
        self.workers.replace(config.workers)
        if (place := config.route_listen) is not None:
            self.servers["route"] = await serve_route(place, config.tls, self._route, self.exchange)
        if (place := config.picker_listen) is not None:
            self.servers["picker"] = await serve_picker(place, config.tls, self.picker)
        works: list[tuple[str, Callable[[], Coroutine[Any, Any, None]], float]] = [
            ("ticks of the decision core", self.dispatcher.tick, 0),
            ("probes of engines", self.probes.once, self.probes.pause_s),
            ("discovery of engines", self.discovery.once, self.discovery.pause_s),
            ("models without a worker", self.pools.once, self.pools.pause_s),
            ("readiness of gRPC", self._show_readiness, READINESS_S),
            ("receipts", self._write_receipts, self.receipts.pause_s),
            ("loads of other routers", self.exchange.once, self.exchange.pause_s),
        ]
        if config.slices is not None:
            slices = Slices(config.slices, in_cluster(), self.discovery)
            works.append(("engines of a Kubernetes service", slices.once, self.discovery.pause_s))
        if config.index:
            follow = partial(self.index.follow, lambda: self.discovery.listed(self.index.listed))
            works += [
                ("engines listed by the index", follow, RETRY_S),
                ("comparison of keys", self.parity.once, self.parity.pause_s),
            ]
        for what, work, pause_s in works:
            self._tasks.run(persist(what, work, pause_s=pause_s))

    async def drain(self, is_hurried: asyncio.Event) -> None:
        """Readiness fails; after `drain_delay` no connection is accepted; then requests in flight
        have `drain_timeout`. `is_hurried`: when set, both end at once.
        """
        self.proxy.is_draining = True
        _log.info("draining: readiness fails, %d requests are under way", self.proxy.in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_delay):
                await is_hurried.wait()
        self._leave()
        limit_s = self.config.drain_timeout
        async with beside(self.proxy.idle()) as idle, beside(is_hurried.wait()) as hurry:
            await asyncio.wait((idle, hurry), timeout=limit_s, return_when=FIRST_COMPLETED)
        if self.proxy.in_flight:
            _log.warning("%d requests are cut off at the end", self.proxy.in_flight)

    def _leave(self) -> None:
        if self._open_door is not None:
            self._open_door.close()
            self._open_door = None
        self.door.pre_shutdown()

    async def close(self) -> None:
        """End the router and all that is under way."""
        self.proxy.is_draining = True
        self._leave()
        await self.exchange.close()
        await asyncio.gather(*(server.close() for server in self.servers.values()))
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        await self.door.shutdown(0.1)
        await self._write_receipts()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        await self.probes.close()
        await self.rendering.close()
        self.engines.close()
        await self.keys.close()
        await self.ahead.close()
        await self.index.close()

    def adopt_policy(self) -> None:
        """Read the policy file again; a wrong one changes nothing."""
        try:
            policy = load_policy(self.config.policy, is_again=True)
        except ConfigError as error:
            self.refused_policy = f"the policy stays as it was: {error}"
            _log.error("%s", self.refused_policy)
            return
        self.refused_policy, self.pools.said = "", []
        self.dispatcher.adopt(policy)
        _log.info("policy %s is in effect", policy_hash(policy))

    async def _show_readiness(self) -> None:
        for server in self.servers.values():
            await server.show(is_ready=self.proxy.is_ready)

    async def _write_receipts(self) -> None:
        drafts = self.core.take_drafts()
        self.decided.extend(drafts)
        for plain in (draft.plain for draft in drafts):
            if self.traces is not None:
                self.traces.ended(plain)
            if plain.outcome.ttft_s is not None:
                self.ttfts["predicted"].add(round(plain.predicted_s * NS_PER_S))
                self.ttfts["achieved"].add(round(plain.outcome.ttft_s * NS_PER_S))
        await self.receipts.write(draft.receipt() for draft in drafts)


def _worker_context(config: RouterConfig) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=config.worker_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--worker-ca {config.worker_ca} is no CA certificate: {error}") from None


def run_router(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT. Call it in the main thread. Raises ConfigError."""
    for tls in {config.tls, config.front}:
        warn_of_its_end(tls, renewal="the router reads it at its next start")
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if is_installed("uvloop"):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(config))


async def _serve(config: RouterConfig) -> None:
    loop, asked_to_stop, is_hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (is_hurried if asked_to_stop.is_set() else asked_to_stop).set()

    router = Router(config)
    with contextlib.ExitStack() as stack:
        try:
            await router.start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            loop.add_signal_handler(signal.SIGHUP, router.adopt_policy)
            url = ""
            if config.metrics is not None:
                http = HttpServer(config.metrics, make_router_pages(router, loop))
                stack.callback(http.close)
                http.start()
                url = http.url + "/metrics"
            gc.collect()
            gc.freeze()  # what is there by now stays: full collections would only look at it
            logs.say(
                __name__,
                f"kvstore router ready: version={__version__}"
                f" listen={joined(config.listen.host, router.port)} metrics={url or 'off'}"
                f" tls={'off' if config.front is None else 'on'}"
                + "".join(f" {n}={server.port}" for n, server in router.servers.items())
                + f" policy={policy_hash(router.core.policy)}",
            )
            await asked_to_stop.wait()
            await router.drain(is_hurried)
        finally:
            await router.close()
    _log.info("stopped")
