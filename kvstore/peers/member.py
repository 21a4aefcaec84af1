"""A node's part in a cluster, on one loop: feeds, a replica of the index inside it, its peers.

Covers: putting them together, their state for an operator. Does not cover: either.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from kvstore.arena import Arena
from kvstore.client.index import IndexClient, IndexUnavailable
from kvstore.config.cluster import ClusterConfig
from kvstore.errors import ConfigError
from kvstore.indexer.replica import Replica
from kvstore.installation import lacking
from kvstore.net.aio import LoopThread
from kvstore.net.tls import INSECURE_NOTE, certificate_ends, warn_of_its_end
from kvstore.obs.metrics import Family, family
from kvstore.peers.feed import Feeder, Slice
from kvstore.peers.peering import Peering
from kvstore.ports import Clock, Memory
from kvstore.proto.rows import MemberReport, MemoryReport, TransferReport, member_report
from kvstore.types import Incarnation, SpaceId
from kvstore.wire.load import EngineEntry, Load
from kvstore.wire.peers import PeerHello

if TYPE_CHECKING:
    from kvstore.peers.engine_memory import EngineMemory

_log = logging.getLogger(__name__)


class ClusterMember:
    """All that a node does in a cluster, from construction until `close`."""

    def __init__(
        self,
        config: ClusterConfig,
        incarnation: Incarnation,
        *,
        arena: Arena,
        tier: Memory,
        clock: Clock,
        loop: LoopThread,
    ) -> None:
        """Listen, for peers and as a replica, as far as that is wanted, on `loop`.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        self._tls = config.tls
        _warn(config)
        with contextlib.ExitStack() as stack:
            self._replica: Replica | None = None
            if config.replica is not None:
                self._replica = Replica(config.replica, config.tls, loop)
                stack.callback(self._replica.close)
            self.peering: Peering | None = None
            if config.peers is not None:
                self.peering = Peering(
                    config,
                    config.peers,
                    loop,
                    who=PeerHello(config.node, incarnation),
                    arena_fd=arena.arena_fd,
                    hold_fd=arena.hold_fd,
                    arena_bytes=tier.capacity_bytes,
                    memory=arena.array,
                    clock=clock,
                )
                stack.callback(self.peering.close)
            replicas = (*self._own_replica(), *config.indexes)
            self.tells = ",".join(replicas)
            """Addresses of the replicas that this node publishes to, its own first, joined by
            commas."""
            self._client = IndexClient(replicas, tls=config.tls, insecure=config.tls is None)
            stack.callback(self._client.close)
            self.node = config.node
            """Name of the node in the cluster."""
            self.feeder = Feeder(
                loop,
                node=config.node,
                incarnation=incarnation,
                address=self.peering.address if self.peering else "",
                replicas=replicas,
                credentials=config.tls.channel_credentials() if config.tls else None,
            )
            stack.callback(self.feeder.close)
            self.memory = _open_memory(config, clock, self.feeder)
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
    def index(self) -> str:
        """Address of the replica; empty when there is none."""
        return self._replica.address if self._replica is not None else ""

    @property
    def reached(self) -> str:
        """Peer address and name of the transport, HOST:PORT/TRANSPORT; empty without peers."""
        return f"{self.peering.address}/{self.peering.transport}" if self.peering else ""

    @property
    def index_port(self) -> int:
        """Port of the replica inside this node; 0 when there is none."""
        return self._replica.port if self._replica is not None else 0

    @property
    def peer_port(self) -> int:
        """Port for peers; 0 when this node has none."""
        return int(self.peering.address.rpartition(":")[2]) if self.peering is not None else 0

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
        load = msgspec.structs.replace(
            load,
            replicas=len(self.feeder.links),
            replicas_reached=self.feeder.connected_count,
        )
        return load if self.peering is None else self.peering.with_fetches(load)

    def transfers(self) -> list[TransferReport]:
        """Durations of transfers between this node and others, a row per kind; empty without
        peers."""
        return self.peering.transfers() if self.peering is not None else []

    def memories(self, tenant: str, space: SpaceId | None, keys: bytes) -> list[MemoryReport]:
        """Reports of blocks in engines' own memory: of all engines, or for the keys of one prompt
        in a space."""
        if self.memory is None:
            return []
        return self.memory.reports(tenant=tenant, space=space, keys=keys)

    def families(self) -> list[Family]:
        """Metrics of feeds, peers and engines' memory; not those of the replica."""
        found = self.peering.families() if self.peering is not None else []
        counts = {f"feed_{name}": n for name, n in vars(self.feeder.counters).items()}
        if self.memory is not None:
            found.append(family("kvstore_engine_blocks", [((), self.memory.block_count)]))
            events = vars(self.memory.counters)
            counts |= {f"engine_events_{name}": count for name, count in events.items()}
        return [
            *found,
            certificate_ends(self._tls),
            family("kvstore_feeds", [((), self.feeder.connected_count)]),
            *(family(f"kvstore_{name}_total", [((), n)]) for name, n in counts.items()),
        ]

    def index_families(self) -> list[Family]:
        """Metrics of the replica; none when there is none, or it does not answer."""
        if self._replica is None:
            return []
        try:
            return self._replica.families()
        except TimeoutError:
            return []


def _warn(config: ClusterConfig) -> None:
    if config.tls is None:
        _log.warning(
            "--insecure: node %s publishes to %s what it holds without TLS; for labs only",
            config.node,
            ", ".join(config.indexes) or "itself",
        )
    warn_of_its_end(config.tls, renewal="'kvstore upgrade' has it read")


def _open_memory(config: ClusterConfig, clock: Clock, feeder: Feeder) -> EngineMemory | None:
    try:
        # Only here: a node by itself needs no ZeroMQ.
        from kvstore.peers.engine_memory import EngineMemory
    except ImportError:
        if config.engines:
            raise ConfigError(lacking("--engine-events", "pyzmq", "events")) from None
        _log.info("%s", lacking("reading KV events of engines", "pyzmq", "events"))
        return None
    return EngineMemory(config.engines, clock=clock, tell=feeder.log.append)
