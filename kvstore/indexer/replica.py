"""A replica of the index: its socket, its pages, its process.

    kvstore index ─▶ run_index ─▶ Replica (loop thread: service, health, reflection) and pages
    kvstore node --index-listen ─▶ the same Replica, on the loop that the node's feed runs on

Covers: listening, draining, /metrics and /healthz. Does not cover: the service (`service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import threading
from typing import Any, Final

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from kvstore import __version__
from kvstore.client.index import pings
from kvstore.client.tls import Tls
from kvstore.config.cluster import IndexConfig
from kvstore.config.values import joined
from kvstore.errors import ConfigError
from kvstore.index.holdings import Holdings
from kvstore.index.index import Index
from kvstore.indexer.service import TICK_S, IndexService, now_ms
from kvstore.indexer.shares import Shares
from kvstore.installation import is_installed, lacking
from kvstore.net.aio import LoopThread, persist
from kvstore.net.http import HttpServer, Page, PageMaker, metrics_page, text_page
from kvstore.net.server import (
    DRAIN_S,
    INSECURE,
    INSECURE_NOTE,
    HealthyServer,
    certificate_ends,
    make_server,
    refuse_taken,
    warn_of_its_end,
)
from kvstore.net.site import ROWS_MAX, make_site
from kvstore.obs import logs
from kvstore.obs.metrics import Values
from kvstore.ports import IndexStore
from kvstore.proto import forms, index_pb2 as pb
from kvstore.proto.index_pb2_grpc import add_IndexServicer_to_server
from kvstore.proto.rows import member_rows
from kvstore.units import MIB
from kvstore.wire.feed import MESSAGE_BYTES_MAX

CALL_COUNT_MAX: Final = 8192
"""Most calls of a replica at a time, feeds and watchers included."""
CALLS_PER_CONNECTION_MAX: Final = 64
UNREAD_BYTES_MAX: Final = (64 << 10) - 1
START_TIMEOUT_S: Final = 10.0
PAGE_TIMEOUT_S: Final = 1.0
PING_MS: Final = 10_000
"""A connection without traffic for this long gets a ping …"""
PING_TIMEOUT_MS: Final = 5_000
"""… and is closed when no answer comes for this long."""
PING_LEAST_MS: Final = 1_000
"""Shortest interval of a client's pings; a client that pings more often is disconnected."""
TRUSTS: Final = ("exact", "catching-up", "stale", "out")
SERVICES: Final = (
    pb.DESCRIPTOR.services_by_name["Index"].full_name,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
)
_OPTIONS: Final = (
    ("grpc.max_send_message_length", forms.REPLY_BYTES_MAX),
    # Limit of unread bytes per call.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", UNREAD_BYTES_MAX),
    ("grpc.max_metadata_size", 8 << 10),
    *pings(PING_MS, PING_TIMEOUT_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", PING_LEAST_MS),
)

_log = logging.getLogger(__name__)


class Replica:
    """A replica of the index, which listens from construction until `close`."""

    def __init__(self, config: IndexConfig, loop: LoopThread) -> None:
        """Listen on the configured address.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._loop = loop
        refuse_taken(config.option, *config.listen)  # before the loops are compiled
        self._store = _store_of(config, loop)
        self._service = IndexService(self._store, demands_names=config.tls is not None)
        self.insecure = config.tls is None
        self.host = config.listen.host
        try:
            self._server = loop.call(self._listen(config), timeout_s=START_TIMEOUT_S)
        except ConfigError:
            self._service.close()
            raise
        self.port = self._server.port
        self.address = joined(self.host, self.port)
        """HOST:PORT of the listening socket."""
        if self.insecure:
            _log.warning(INSECURE, self.address)

    @property
    def note(self) -> str:
        """Warnings about a replica that serves, for its operator; empty: none."""
        notes = (INSECURE_NOTE if self.insecure else "", self._store.trouble, self._service.trouble)
        return ", and ".join(filter(None, notes))

    async def _listen(self, config: IndexConfig) -> HealthyServer:
        server = make_server(
            *_OPTIONS,
            message_bytes_max=MESSAGE_BYTES_MAX,
            calls_max=CALLS_PER_CONNECTION_MAX,
            interceptors=[Shares(self._service.counters)],
            maximum_concurrent_rpcs=CALL_COUNT_MAX,
        )
        add_IndexServicer_to_server(self._service, server)
        server.add_generic_rpc_handlers(self._service.feed_handlers())
        reflection.enable_server_reflection(SERVICES, server)
        its = HealthyServer(server, "", SERVICES[0])
        await its.begun(config.option, config.listen, config.tls, is_ready=True)
        ticking = persist("regular work of the index", self._service.tick, pause_s=TICK_S)
        self._tick = asyncio.get_running_loop().create_task(ticking)
        return its

    def close(self) -> None:
        """Report as not serving, let calls end for a moment, and stop."""
        with contextlib.suppress(TimeoutError):
            self._loop.call(self._stop(), timeout_s=DRAIN_S + START_TIMEOUT_S)
        self._service.close()

    async def _stop(self) -> None:
        self._tick.cancel()
        await self._server.close()
        await self._store.close()

    # ── pages ────────────────────────────────────────────────────────────────────────────────────

    def metrics(self) -> Values:
        """Metrics of this replica. Raises TimeoutError if its loop does not answer."""
        return self._loop.call(self._metrics(), timeout_s=PAGE_TIMEOUT_S)

    async def _metrics(self) -> Values:
        service, sizes = self._service, self._store.statistics()
        trusts = [member.trust for member in self._store.members(now_ms())]
        states = [("out" if trust is None else trust.word) for trust in trusts]
        return {
            "index_entries": sizes.entry_count,
            "index_blocks": sizes.block_count,
            "index_memory_bytes": sizes.memory_bytes,
            "index_evictions_total": sizes.evicted_count,
            "index_nodes": {each: states.count(each) for each in TRUSTS},
            "index_feeds": len(service.feeds),
            "index_store_up": int(not self._store.trouble),
            "index_store_failures_total": self._store.failure_count,
            "index_watchers": service.watcher_count,
            **{f"index_{name}_total": count for name, count in vars(service.counters).items()},
        }

    def state(self) -> dict[str, Any]:
        """Sections of this replica's web page. Raises TimeoutError if its loop does not answer."""
        return self._loop.call(self._state(), timeout_s=PAGE_TIMEOUT_S)

    async def _state(self) -> dict[str, Any]:
        service, sizes, trust = self._service, self._store.statistics(), await self._service.trust()
        facts = {"feeds": len(service.feeds), "watchers": service.watcher_count}
        facts |= {"blocks": sizes.block_count, "memory, MiB": sizes.memory_bytes // MIB}
        flows = {**vars(service.counters), "evictions": sizes.evicted_count}
        members = self._store.members(now_ms())
        rows = member_rows(members, trust, ROWS_MAX)
        state = {"role": "index", "name": self.address, "facts": facts, "flows": flows}
        return {**state, "nodes": rows, "totals": {"nodes": len(members)}}


def is_compiled(config: IndexConfig) -> bool:
    """Whether this replica runs compiled loops. With a shared store it runs none."""
    return config.shared is None and not config.plain and is_installed("numba")


def _store_of(config: IndexConfig, loop: LoopThread) -> IndexStore:
    """The store for the state of the index. Raises ConfigError."""
    if config.shared is None:
        if is_compiled(config):
            _log.info("compiling the index's loops: up to a minute; --plain starts at once")
        elif not config.plain:
            _log.warning("the index is slower: %s", lacking("compiling it", "numba", "index"))
        seed = secrets.randbits(62)
        flat = Holdings(config.entries, seed=seed, is_native=is_compiled(config))
        # The clock is read behind that: an index is young for its first seconds of listening.
        return Index(flat, now_ms=now_ms())
    # Only here: its library comes with an extra.
    from kvstore.stores.redis import RedisStore

    store = RedisStore(config.shared, entry_count_max=config.entries)
    loop.call(store.verify(), timeout_s=START_TIMEOUT_S)
    return store


def make_pages(replica: Replica, tls: Tls | None) -> dict[str, PageMaker]:
    """Pages of a replica by path: /metrics, /healthz and its web pages. `tls`: as read at its
    start."""

    def values() -> Values:
        return {"index_info": {__version__: 1}} | certificate_ends(tls) | replica.metrics()

    def healthz() -> Page:
        try:
            replica.metrics()
        except TimeoutError:
            return text_page(503, "the index did not answer in time")
        return text_page(200, ", but ".join(filter(None, ["ok", replica.note])))

    site = make_site(healthz, replica.state)
    metrics = metrics_page(values, busy="the index is busy: ask again later")
    return {"/metrics": metrics, "/healthz": healthz, **site}


def run_index(config: IndexConfig) -> None:
    """Run `kvstore index` until SIGTERM, SIGINT or SIGHUP. Call it in the main thread.

    Raises:
        ConfigError: the replica cannot start with this configuration on this machine.
    """
    warn_of_its_end(config.tls, renewal="the index reads it at its next start")
    with contextlib.ExitStack() as stack:
        if config.metrics is not None:
            refuse_taken("--metrics", *config.metrics)
        loop = LoopThread("index")
        stack.callback(loop.close)
        replica = Replica(config, loop)
        stack.callback(replica.close)
        url = ""
        if config.metrics is not None:
            http = HttpServer(config.metrics, make_pages(replica, config.tls))
            stack.callback(http.close)
            http.start()
            url = http.url + "/metrics"
        asked_to_stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: asked_to_stop.set())
        logs.say(
            __name__,
            f"kvstore index ready: version={__version__} listen={replica.address}"
            f" metrics={url or 'off'}"
            f" tls={'off' if replica.insecure else 'on'}"
            f" entries={config.entries}"
            f" store={config.shared.place if config.shared else 'memory'}"
            f" compiled={'yes' if is_compiled(config) else 'no'}",
        )
        asked_to_stop.wait()
    _log.info("stopped")
