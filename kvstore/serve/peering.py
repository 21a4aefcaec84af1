"""A node among others: what it lends, what it borrows, and the mover between them, on one loop.

Covers: putting these together, their addresses, what an operator is told. Does not cover: any of
them (`lender`, `borrower`, `mover_host`), the index (`member`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc

from kvstore.client.index import IndexClient
from kvstore.client.tls import Identity
from kvstore.engine.events import Fetch, Lent, LoanEnded, Locate, PeerCommand
from kvstore.errors import ConfigError
from kvstore.ports import Clock
from kvstore.proto import loans
from kvstore.proto.peer_pb2_grpc import add_PeersServicer_to_server
from kvstore.serve.aio import LoopThread
from kvstore.serve.borrower import Borrower
from kvstore.serve.cluster import ClusterConfig, PeerConfig
from kvstore.serve.exchange import Exchange
from kvstore.serve.lender import Lender
from kvstore.serve.mover import Mover, MoverSettings
from kvstore.serve.mover_host import MoverHost
from kvstore.serve.peer_session import KEEPALIVE_MS
from kvstore.serve.tls import server_credentials
from kvstore.types import SlotId

START_TIMEOUT_S: Final = 10.0


class Peering:
    """Listens from construction; lends and borrows from `start` until `close`."""

    def __init__(
        self,
        cluster: ClusterConfig,
        peers: PeerConfig,
        loop: LoopThread,
        *,
        who: loans.Who,
        arena_fd: int,
        arena_bytes: int,
        view: Callable[[SlotId, int], memoryview],
        clock: Clock,
    ) -> None:
        """`view`: bytes of a slot of this node's arena (`ports.Tier.view`).

        Raises:
            ConfigError: the address cannot be listened on.
        """
        self._loop, self._tls = loop, cluster.tls
        name = str(Identity("node", cluster.node))
        settings = MoverSettings(peers.transport, name, _options(cluster, peers))
        self.mover = MoverHost(Mover(arena_fd, arena_bytes, settings, clock), clock)
        self._who, self._view = who, view
        self.address = loop.call(self._listen(peers), timeout_s=START_TIMEOUT_S)
        """Where peers reach this node."""

    async def _listen(self, peers: PeerConfig) -> str:
        self.borrower = Borrower(
            who=self._who,
            mover=self.mover,
            view=self._view,
            credentials=self._tls.channel_credentials() if self._tls else None,
        )
        self.exchange = self.borrower.exchange = Exchange(self._loop.loop, self._handle)
        self.lender = Lender(
            self.exchange,
            who=self._who,
            descriptor=lambda: self.mover.descriptor,
            demands_certificates=self._tls is not None,
        )
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", loans.MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                # Sessions are quiet for long, and peers look after them: by default a server hangs
                # up on who asks more often than every five minutes.
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ]
        )
        add_PeersServicer_to_server(self.lender, self._server)
        host = f"[{peers.host}]" if ":" in peers.host else peers.host
        address = f"{host}:{peers.port}"
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError:
            raise ConfigError(
                f"peers cannot be listened for on {address}: choose another --peer-listen"
            ) from None
        return f"{host}:{port}"

    def start(self, index: IndexClient) -> None:
        """Begin. `index` is asked where blocks are; it stays the caller's to close."""
        self.borrower.index = index
        self._loop.call(self._start(), timeout_s=START_TIMEOUT_S)

    async def _start(self) -> None:
        self.mover.start()
        self.borrower.start()
        await self._server.start()

    def close(self) -> None:
        """Hang up. No byte is written for any fetch after this."""
        self._loop.call(self._close(), timeout_s=START_TIMEOUT_S)
        self.exchange.close()

    async def _close(self) -> None:
        self.mover.close()
        await self.borrower.close()
        await self._server.stop(0)

    def _handle(self, command: PeerCommand) -> None:
        match command:
            case Locate():
                self.borrower.locate(command)
            case Fetch():
                self.borrower.fetch(command)
            case Lent():
                self.lender.lent(command)
            case LoanEnded():
                self.lender.loan_ended(command)

    @property
    def trouble(self) -> str:
        """What a healthy node lacks; empty while all is well."""
        return self.mover.trouble


def _options(cluster: ClusterConfig, peers: PeerConfig) -> dict[str, str]:
    """Of the back end."""
    if peers.transport != "tcp":
        return {}
    listen = {"listen": f"[{peers.host}]:0" if ":" in peers.host else f"{peers.host}:0"}
    if cluster.files is None:
        return {**listen, "insecure": "yes"}
    files = cluster.files
    return {
        **listen,
        "ca": str(files.ca),
        "certificate": str(files.cert),
        "key": str(files.key),
    }
