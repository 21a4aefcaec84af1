"""A node's part in a cluster, on one loop: feeds, a replica of the index inside it, and
(`Peering`) its exchange of blocks with peers.

    node's loop     Executor ─carry_out(command)─▶ call_soon_threadsafe ─▶ handler     asyncio loop
                    Attach ◀─read()─ Mailbox ◀────────────── put(event) ─┘

Neither loop waits for the other (`Exchange`).

Covers: putting the parts together, their addresses, their state for an operator. Does not cover:
any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.arena import Arena
from kvstore.client.index import IndexClient, IndexUnavailable
from kvstore.client.tls import Tls
from kvstore.config.cluster import PLAIN, PLAIN_NOTE, ClusterConfig, IndexConfig, TransportConfig
from kvstore.config.defaults import DEFAULT_ENTRIES
from kvstore.config.node import NodeConfig
from kvstore.config.values import HostPort, joined
from kvstore.engine import events
from kvstore.errors import ConfigError
from kvstore.indexer.replica import Replica
from kvstore.installation import lacking
from kvstore.mailbox import Mailbox
from kvstore.net.aio import LoopThread
from kvstore.net.server import (
    INSECURE_NOTE,
    certificate_ends,
    listen,
    make_server,
    warn_of_its_end,
)
from kvstore.obs.metrics import TRANSFERS, Values
from kvstore.peers.feed import Feeder, Slice
from kvstore.peers.fetcher import KINDS as FETCH_KINDS, Fetcher, transfer_worker_name
from kvstore.peers.peer_session import KEEPALIVE_MS, PINGS, BlockServer, PeerContext
from kvstore.peers.preparer import Preparer, drain_node
from kvstore.peers.pushes import KINDS as PUSH_KINDS, SLOW_S, SLOW_TCP_S, PushCarrier, Stages
from kvstore.peers.transfer_worker import TransferWorker
from kvstore.ports import Clock
from kvstore.proto.rows import MemberReport, TransferReport, member_report
from kvstore.transport.backends import BACKENDS
from kvstore.types import Incarnation
from kvstore.units import NS_PER_US
from kvstore.wire.feed import Hello
from kvstore.wire.load import EngineEntry, Load
from kvstore.wire.peers import MESSAGE_BYTES_MAX, PeerHello, PrepareRequest
from kvstore.wire.transfer_worker import Begin

if TYPE_CHECKING:
    from kvstore.peers.engine_memory import EngineMemory


READ_EVENTS_MAX: Final = 64
"""Most events read at a time: engines are served in between."""
START_TIMEOUT_S: Final = 10.0
STREAMS_PER_CONNECTION_MAX: Final = 4
"""A peer needs one, and another while the one before ends; calls of a router take turns."""
WHOLE: Final = {"fetch", "push", "push_token", "write"}
"""Kinds of transfers with buckets in /metrics; the others are parts of them."""

_log = logging.getLogger(__name__)


class Exchange(Mailbox[events.PeerEvent]):
    """Both directions between the two loops: events for the engine as a mailbox, and commands that
    `handle` is called with on the asyncio loop, once for each, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[events.PeerCommand], None]
    ) -> None:
        super().__init__()
        self._loop, self._handle = loop, handle

    def read(self, _mask: int) -> Iterator[events.Event]:
        """Return events that were put, a part of them at a time. The node's loop calls it."""
        return itertools.islice(self.take(), READ_EVENTS_MAX)

    def carry_out(self, command: events.PeerCommand) -> None:
        """Pass a command of the node's loop to `handle` on the asyncio loop."""
        with contextlib.suppress(RuntimeError):  # the asyncio loop has ended, and the node ends
            self._loop.call_soon_threadsafe(self._handle, command)


class Peering:
    """The node's exchange of blocks with other nodes. Listens from construction; serves and fetches
    from `start` until `close`."""

    def __init__(
        self,
        config: NodeConfig,
        cluster: ClusterConfig,
        transport: TransportConfig,
        incarnation: Incarnation,
        *,
        arena: Arena,
        clock: Clock,
        loop: LoopThread,
    ) -> None:
        """Listen for peers, on `loop`.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._loop = loop
        begin = Begin(
            transport.name,
            transfer_worker_name(cluster.node),
            arena.arena_bytes,
            _options(config, transport),
            paced=transport.is_paced,
            landing_begin=arena.arena_bytes - config.landing_bytes,
            landing_bytes=config.landing_bytes,
        )
        self.transfer_worker = TransferWorker(arena.arena_fd, arena.hold_fd, begin, clock)
        self.exchange, self.transport = Exchange(loop.loop, self._handle), transport.name
        slow_s = SLOW_TCP_S if BACKENDS[self.transport].capabilities.is_secure else SLOW_S
        self._context = PeerContext(
            self.exchange.put,
            PeerHello(cluster.node, incarnation),
            self.transfer_worker,
            arena.array,
            clock,
            cluster.tls.channel_credentials() if cluster.tls else None,
            Stages((*FETCH_KINDS, *PUSH_KINDS), clock, slow_s=slow_s),
        )
        self._note = PLAIN_NOTE.format(transport.name) if transport.is_plain else ""
        if transport.is_plain:
            _log.warning(PLAIN, transport.name)
        assert config.peer_listen is not None
        listening = self._listen(config.peer_listen, cluster.tls)
        self.address = loop.call(listening, timeout_s=START_TIMEOUT_S)
        """Where peers reach this node."""

    async def _listen(self, at: HostPort, tls: Tls | None) -> str:
        context = self._context
        self.fetcher = Fetcher(context)
        self.block_server = BlockServer(context, self.fetcher.address_of)
        self.carrier = PushCarrier(context, self.fetcher, self.block_server.sessions)
        self.preparer = Preparer(context)
        self.transfer_worker.changed = self._transfer_worker_changed
        self._server = make_server(
            # Sessions are quiet for long, and peers look after them: by default a server hangs up
            # on who asks more often than every five minutes.
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            *PINGS,
            message_bytes_max=MESSAGE_BYTES_MAX,
            calls_max=STREAMS_PER_CONNECTION_MAX,
        )
        handlers = self.block_server.handler(), self.preparer.handler()
        self._server.add_generic_rpc_handlers(handlers)
        return joined(at.host, listen(self._server, joined(*at), tls, "--peer-listen"))

    def _transfer_worker_changed(self) -> None:
        self.block_server.transfer_worker_changed()
        self.carrier.transfer_worker_changed()

    async def drain(self, runs: Sequence[PrepareRequest], *, timeout_s: float) -> None:
        """Hand blocks to the other nodes."""
        addresses = await self.fetcher.find_addresses()
        await drain_node(runs, addresses, self._context.credentials, timeout_s)

    def start(self, index: IndexClient) -> None:
        """Begin to serve and fetch. `index` is queried for locations; the caller closes it."""
        self.fetcher.index = index
        self._loop.call(self._start(), timeout_s=START_TIMEOUT_S)

    async def _start(self) -> None:
        self.transfer_worker.start()
        self.fetcher.start()
        await self._server.start()

    def close(self) -> None:
        """End all sessions and the transfer worker. No byte is written for any fetch after this."""
        try:
            self._loop.call(self._close(), timeout_s=START_TIMEOUT_S)
        except TimeoutError:
            _log.warning("peers were not hung up on in time; the end of this process does it")
        self.exchange.close()

    async def _close(self) -> None:
        self.transfer_worker.close()
        self.carrier.close()
        await self.fetcher.close()
        await self._server.stop(0)

    def _handle(self, command: events.PeerCommand) -> None:
        match command:
            case events.Locate() | events.Fetch():
                self.fetcher.carry_out(command)
            case events.AnswerPeer(peer, answer):
                self.block_server.answer(peer, answer)
            case events.BlocksPrepared():
                self.preparer.prepared(command)
            case _:
                self.carrier.carry_out(command)

    def transfers(self) -> list[TransferReport]:
        """Durations of fetches and pushes, and of their steps, a row for each kind that has
        occurred."""
        return [
            TransferReport(
                *(kind, self.transport, its.count, its.size_bytes, its.bytes_per_s),
                *(its.percentile_ns(part) // NS_PER_US for part in (50, 95, 99)),
            )
            for kind, its in self._context.stages.timings.items()
            if its.count
        ]

    def load_of_fetches(self) -> dict[str, int]:
        """Fields of the node's load that are about its fetches."""
        fetches = self._context.stages.timings["fetch"]
        return {
            "fetched_bytes": fetches.size_bytes,
            "fetch_p50_us": fetches.percentile_ns(50) // NS_PER_US,
            "fetch_p99_us": fetches.percentile_ns(99) // NS_PER_US,
        }

    def metrics(self) -> Values:
        """Metrics of fetches, pushes and the transfer worker."""
        fetcher, timings = self.fetcher, self._context.stages.timings
        return {
            "fetch_damaged_total": fetcher.damaged,
            "fetch_not_kept_total": fetcher.not_kept,
            "fetched_bytes_total": timings["fetch"].size_bytes,
            "prepares_refused_total": self.preparer.refused_count,
            "transfer_worker_restarts_total": self.transfer_worker.restarts,
            "transfer_worker_refused_total": self.transfer_worker.refused,
            "transfer_seconds": {
                (kind, self.transport): its.buckets(TRANSFERS if kind in WHOLE else range(0))
                for kind, its in timings.items()
            },
        }

    @property
    def trouble(self) -> str:
        """Trouble to report on /healthz; empty while all is well."""
        troubles = self._note, self.transfer_worker.trouble, self._context.stages.trouble
        return "; ".join(filter(None, troubles))


def _options(config: NodeConfig, transport: TransportConfig) -> dict[str, str]:
    """Options of the transport's back end: those configured, and addresses and certificates where
    it needs them."""
    options = dict(transport.options)
    if not BACKENDS[transport.name].capabilities.is_secure:
        return options
    assert config.peer_listen is not None
    options["listen"] = joined(config.peer_listen.host, transport.port)
    if not (config.ca and config.cert and config.key):
        return options | {"insecure": "yes"}
    return options | {"ca": config.ca, "certificate": config.cert, "key": config.key}


class ClusterMember:
    """All that a node does in a cluster, from construction until `close`."""

    def __init__(
        self,
        config: NodeConfig,
        cluster: ClusterConfig,
        incarnation: Incarnation,
        *,
        arena: Arena,
        clock: Clock,
        loop: LoopThread,
    ) -> None:
        """Listen, for peers and as a replica, as far as that is wanted, on `loop`.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        self._tls = tls = cluster.tls
        if tls is None:
            _log.warning(
                "--insecure: node %s publishes to %s what it holds without TLS; for labs only",
                cluster.node,
                ", ".join(config.index) or "itself",
            )
        warn_of_its_end(tls, renewal="'kvstore upgrade' has it read")
        with contextlib.ExitStack() as stack:
            self._replica: Replica | None = None
            if (index := _own_index(config, tls)) is not None:
                self._replica = Replica(index, loop)
                stack.callback(self._replica.close)
            self.peering: Peering | None = None
            if cluster.transport is not None:
                its = config, cluster, cluster.transport, incarnation
                self.peering = Peering(*its, arena=arena, clock=clock, loop=loop)
                stack.callback(self.peering.close)
            replicas = (*self._own_replica(), *config.index)
            self.tells = ",".join(replicas)
            """Addresses of the replicas that this node publishes to, its own first, joined by
            commas."""
            self._client = IndexClient(replicas, tls=tls, insecure=tls is None)
            stack.callback(self._client.close)
            self.node = cluster.node
            """Name of the node in the cluster."""
            self.index = self._replica.address if self._replica else ""
            """Address of the replica inside this node; empty when there is none."""
            self.index_port = self._replica.port if self._replica else 0
            address = self.peering.address if self.peering else ""
            self.reached = f"{address}/{self.peering.transport}" if self.peering else ""
            """Peer address and name of the transport, HOST:PORT/TRANSPORT; empty without peers."""
            self.peer_port = int(address.rpartition(":")[2] or 0)
            hello = Hello(cluster.node, incarnation, 0, 0, address)
            credentials = tls.channel_credentials() if tls else None
            self.feeder = Feeder(loop, hello, replicas, credentials)
            stack.callback(self.feeder.close)
            self.memory = _open_memory(cluster, clock, self.feeder)
            if self.memory is not None:
                stack.callback(self.memory.close)
            self._stack = stack.pop_all()

    def _own_replica(self) -> Iterable[str]:
        """Address at which this node reaches its own replica; none: it has none."""
        if self._replica is None:
            return ()
        host = ipaddress.ip_address(self._replica.host)
        if not host.is_unspecified:
            return (self._replica.address,)
        return (f"{'[::1]' if host.version == 6 else '127.0.0.1'}:{self._replica.port}",)

    def start(
        self,
        ask: Callable[[int], Slice],
        load: Callable[[], Load],
        engines: Callable[[], tuple[EngineEntry, ...]],
    ) -> None:
        """Begin to publish, serve and fetch. `ask` is `Engine.offered`, `load` and `engines` the
        engine's methods of these names; all are called in the node's loop."""
        if self.peering is not None:
            self.peering.start(self._client)
        if self.memory is not None:
            self.memory.start()
            ask = self.memory.behind(ask)
        self.feeder.start(ask, lambda: self.with_peers(load()), engines)

    def close(self) -> None:
        """End all connections and stop."""
        self._stack.close()

    @property
    def trouble(self) -> str:
        """Trouble to report on /healthz; empty while all is well."""
        notes = (
            INSECURE_NOTE if self._tls is None else "",
            self.feeder.trouble,
            self.peering.trouble if self.peering is not None else "",
            self.memory.trouble if self.memory is not None else "",
        )
        return "; ".join(filter(None, notes))

    def members(self) -> list[MemberReport]:
        """Reports of the cluster's nodes, from the first replica that answers; takes a second at
        most. One row with the error if none answers."""
        try:
            known = self._client.nodes(engines=True)
        except IndexUnavailable as error:
            return [MemberReport(self.node, str(error), "", "", None)]
        return [member_report(member, known.trust) for member in known.nodes]

    def with_peers(self, load: Load) -> Load:
        """The node's load, completed with that of feeds and peers."""
        its = {"replicas": len(self.feeder.links), "replicas_reached": self.feeder.connected_count}
        its |= self.peering.load_of_fetches() if self.peering is not None else {}
        return msgspec.structs.replace(load, **its)

    def transfers(self) -> list[TransferReport]:
        """Durations of transfers between this node and others, a row per kind; empty without
        peers."""
        return self.peering.transfers() if self.peering is not None else []

    def metrics(self) -> Values:
        """Metrics of feeds, peers and engines' memory; not those of the replica."""
        found = self.peering.metrics() if self.peering is not None else {}
        counts = {f"feed_{name}": n for name, n in vars(self.feeder.counters).items()}
        if self.memory is not None:
            found["engine_blocks"] = self.memory.block_count
            counted = vars(self.memory.counters)
            counts |= {f"engine_events_{name}": count for name, count in counted.items()}
        found |= certificate_ends(self._tls) | {"feeds": self.feeder.connected_count}
        return found | {f"{name}_total": n for name, n in counts.items()}

    def index_metrics(self) -> Values:
        """Metrics of the replica; none when there is none, or it does not answer."""
        if self._replica is None:
            return {}
        try:
            return self._replica.metrics()
        except TimeoutError:
            return {}


def _own_index(config: NodeConfig, tls: Tls | None) -> IndexConfig | None:
    if config.index_listen is None:
        return None
    return IndexConfig(
        listen=config.index_listen,
        entries=config.index_entries or DEFAULT_ENTRIES,
        option="--index-listen",
        plain=True,
        tls=tls,
    )


def _open_memory(cluster: ClusterConfig, clock: Clock, feeder: Feeder) -> EngineMemory | None:
    try:
        # Only here: a node by itself needs no ZeroMQ.
        from kvstore.peers.engine_memory import EngineMemory
    except ImportError:
        if cluster.engines:
            raise ConfigError(lacking("--engine-events", "pyzmq", "events")) from None
        _log.info("%s", lacking("reading KV events of engines", "pyzmq", "events"))
        return None
    return EngineMemory(cluster.engines, clock=clock, tell=feeder.log.append)
