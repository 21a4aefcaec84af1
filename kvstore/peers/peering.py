"""A node among others: serving, fetching, and the transfer worker between them, on one loop.

Covers: putting these together, their addresses, their state for an operator. Does not cover: any of
them (`block_server`, `fetcher`, `transfer_worker`), the index (`member`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Final

import grpc
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.client.index import IndexClient
from kvstore.config.cluster import ClusterConfig, PeerConfig
from kvstore.config.transports import PLAIN, PLAIN_NOTE
from kvstore.config.values import joined
from kvstore.engine.events import (
    AnswerPeer,
    AskPush,
    BlocksPrepared,
    Fetch,
    Land,
    Locate,
    PeerCommand,
    Pushed,
    PushOver,
    RecycleTransferWorker,
    RevokePush,
    Staged,
    WritePush,
)
from kvstore.net import calls
from kvstore.net.aio import LoopThread
from kvstore.net.tls import listen
from kvstore.obs.metrics import Family, family, histogram
from kvstore.obs.timings import TRANSFERS, Timings
from kvstore.peers.block_server import BlockServer
from kvstore.peers.drain import drain_node
from kvstore.peers.exchange import Exchange
from kvstore.peers.fetcher import Fetcher
from kvstore.peers.lander import Lander
from kvstore.peers.peer_session import KEEPALIVE_MS, PINGS
from kvstore.peers.preparer import Preparer
from kvstore.peers.pusher import Pusher
from kvstore.peers.stages import SLOW_S, SLOW_TCP_S
from kvstore.peers.transfer_worker import TransferWorker
from kvstore.ports import Clock
from kvstore.proto.rows import TransferReport
from kvstore.transport.backends import BACKENDS
from kvstore.units import NS_PER_US
from kvstore.wire.identity import Identity
from kvstore.wire.load import Load
from kvstore.wire.peers import MESSAGE_BYTES_MAX, PeerHello, PrepareRequest
from kvstore.wire.transfer_worker import Begin

START_TIMEOUT_S: Final = 10.0
STREAMS_PER_CONNECTION_MAX: Final = 4
"""A peer needs one, and another while the one before ends; calls of a router take turns."""

WHOLE: Final = {"fetch", "push", "push_token", "write"}
"""Kinds of transfers with buckets in /metrics; the others are parts of them."""

_log = logging.getLogger(__name__)


class Peering:
    """The node's exchange of blocks with other nodes. Listens from construction; serves and fetches
    from `start` until `close`."""

    def __init__(
        self,
        cluster: ClusterConfig,
        peers: PeerConfig,
        loop: LoopThread,
        *,
        who: PeerHello,
        arena_fd: int,
        hold_fd: int,
        arena_bytes: int,
        memory: NDArray[np.uint8],
        clock: Clock,
    ) -> None:
        """`memory`: this node's arena.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._loop, self._tls = loop, cluster.tls
        transport = peers.transport
        begin = Begin(
            transport.name,
            str(Identity("node", cluster.node)),
            arena_bytes,
            _options(cluster, peers),
            paced=transport.is_paced,
            landing_begin=arena_bytes - peers.landing_bytes,
            landing_bytes=peers.landing_bytes,
        )
        self.transfer_worker = TransferWorker(arena_fd, hold_fd, begin, clock)
        self._who, self._memory = who, memory
        self.transport, self._clock = transport.name, clock
        self._note = PLAIN_NOTE.format(transport.name) if transport.is_plain else ""
        if transport.is_plain:
            _log.warning(PLAIN, transport.name)
        self.address = loop.call(self._listen(peers), timeout_s=START_TIMEOUT_S)
        """Where peers reach this node."""

    async def _listen(self, peers: PeerConfig) -> str:
        self.exchange = Exchange(self._loop.loop, self._handle)
        self.fetcher = Fetcher(
            self.exchange.post,
            who=self._who,
            transfer_worker=self.transfer_worker,
            memory=self._memory,
            clock=self._clock,
            credentials=self._tls.channel_credentials() if self._tls else None,
        )
        self.block_server = BlockServer(
            self.exchange.post,
            who=self._who,
            descriptor=lambda: self.transfer_worker.descriptor,
            demands_certificates=self._tls is not None,
        )
        slow_s = SLOW_TCP_S if BACKENDS[self.transport].capabilities.is_secure else SLOW_S
        self.pusher = self.block_server.pusher = Pusher(
            self.exchange.post,
            transfer_worker=self.transfer_worker,
            address_of=self.fetcher.address_of,
            answer=self.block_server.answer,
            clock=self._clock,
            slow_s=slow_s,
        )
        self.lander = Lander(
            self.exchange.post,
            fetcher=self.fetcher,
            transfer_worker=self.transfer_worker,
            memory=self._memory,
            clock=self._clock,
            draw_epoch=lambda: secrets.randbelow(2**63 - 1) + 1,
            slow_s=slow_s,
        )
        self.preparer = Preparer(
            self.exchange.post,
            now_ns=self._clock.now_ns,
            demands_certificates=self._tls is not None,
        )
        self.transfer_worker.changed = self._transfer_worker_changed
        self._server = _server()
        handlers = self.block_server.handler(), self.preparer.handler()
        self._server.add_generic_rpc_handlers(handlers)
        address = joined(peers.host, peers.port)
        return joined(peers.host, listen(self._server, address, self._tls, "--peer-listen"))

    def _transfer_worker_changed(self) -> None:
        self.block_server.transfer_worker_changed()
        self.lander.transfer_worker_changed()

    async def drain(self, runs: Sequence[PrepareRequest], *, timeout_s: float) -> None:
        """Hand blocks to the other nodes."""
        addresses = await self.fetcher.find_addresses()
        credentials = self._tls.channel_credentials() if self._tls else None
        await drain_node(runs, addresses, credentials, timeout_s)

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
        self.lander.close()
        self.pusher.close()
        await self.fetcher.close()
        await self._server.stop(0)

    def _handle(self, command: PeerCommand) -> None:
        match command:
            case Locate():
                self.fetcher.locate(command)
            case Fetch():
                self.fetcher.fetch(command)
            case AnswerPeer(peer, Pushed() | PushOver() as word):
                self.pusher.say(peer, word)
            case AnswerPeer(peer, answer):
                self.block_server.answer(peer, answer)
            case BlocksPrepared():
                self.preparer.prepared(command)
            case AskPush() | RevokePush() | Land() | RecycleTransferWorker() | Staged():
                self.lander.carry_out(command)
            case WritePush():
                self.pusher.write(command)

    @property
    def _timings(self) -> dict[str, Timings]:
        return self.fetcher.timings | self.lander.stages.timings | self.pusher.stages.timings

    def transfers(self) -> list[TransferReport]:
        """Durations of fetches and pushes, and of their steps, a row for each kind that has
        occurred."""
        return [
            TransferReport(
                kind=kind,
                backend=self.transport,
                count=timings.count,
                size_bytes=timings.size_bytes,
                bytes_per_s=timings.bytes_per_s,
                p50_us=timings.percentile_ns(50) // NS_PER_US,
                p95_us=timings.percentile_ns(95) // NS_PER_US,
                p99_us=timings.percentile_ns(99) // NS_PER_US,
            )
            for kind, timings in self._timings.items()
            if timings.count
        ]

    def with_fetches(self, load: Load) -> Load:
        """The node's load, completed with that of its fetches."""
        fetches = self.fetcher.timings["fetch"]
        return msgspec.structs.replace(
            load,
            fetched_bytes=self.fetcher.counters.fetched_bytes,
            fetch_p50_us=fetches.percentile_ns(50) // NS_PER_US,
            fetch_p99_us=fetches.percentile_ns(99) // NS_PER_US,
        )

    def families(self) -> list[Family]:
        """Metrics of fetches, pushes and the transfer worker."""
        counters, timings = self.fetcher.counters, self._timings
        return [
            family("kvstore_fetch_damaged_total", [((), counters.damaged)]),
            family("kvstore_fetch_not_kept_total", [((), counters.not_kept)]),
            family("kvstore_fetched_bytes_total", [((), counters.fetched_bytes)]),
            family("kvstore_prepares_refused_total", [((), self.preparer.refused_count)]),
            family("kvstore_transfer_worker_restarts_total", [((), self.transfer_worker.restarts)]),
            family("kvstore_transfer_worker_refused_total", [((), self.transfer_worker.refused)]),
            histogram(
                "kvstore_transfer_seconds",
                [
                    its.row((kind, self.transport), TRANSFERS if kind in WHOLE else range(0))
                    for kind, its in timings.items()
                ],
            ),
        ]

    @property
    def trouble(self) -> str:
        """Trouble to report on /healthz; empty while all is well."""
        stages = self.lander.stages.trouble, self.pusher.stages.trouble
        return "; ".join(filter(None, (self._note, self.transfer_worker.trouble, *stages)))


def _server() -> grpc.aio.Server:
    return grpc.aio.server(
        options=[
            *calls.limits(),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
            # Sessions are quiet for long, and peers look after them: by default a server hangs up
            # on who asks more often than every five minutes.
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            *PINGS,
        ]
    )


def _options(cluster: ClusterConfig, peers: PeerConfig) -> dict[str, str]:
    """Options of the transport's back end: those configured, and addresses and certificates where
    it needs them."""
    options = dict(peers.transport.options)
    if not BACKENDS[peers.transport.name].capabilities.is_secure:
        return options
    options["listen"] = joined(peers.host, peers.transport.port)
    if cluster.files is None:
        return options | {"insecure": "yes"}
    files = cluster.files
    return options | {
        "ca": str(files.ca),
        "certificate": str(files.cert),
        "key": str(files.key),
    }
