"""The configuration of everything beyond one machine: index, feed, certificates.

Covers: replicas, and the part of a node's settings that is about the cluster. Does not cover: the
rest of a node (`node`), rules for files of certificates (`kvstore.client.certificates`).

Ways to be wrong, each a ConfigError that says how to mend it: some of the three files but not all;
neither files nor --insecure; a certificate without the name of this component; a name that cannot
be one; a store that is plain and elsewhere.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client.tls import Tls, TlsFiles
from kvstore.config.defaults import DEFAULT_ENTRIES
from kvstore.config.engine_sources import parse_sources
from kvstore.config.reading import load_settings
from kvstore.config.settings import IndexSettings, NodeSettings, TlsSettings
from kvstore.config.values import HostPort
from kvstore.errors import ConfigError
from kvstore.installation import is_installed, lacking
from kvstore.stores.address import StoreConfig, store_config
from kvstore.types import EngineSource
from kvstore.wire.identity import is_name

if TYPE_CHECKING:
    from kvstore.config.transports import TransportConfig


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Address of a replica of the index, and its limits."""

    host: str
    port: int
    """Port; 0: the kernel chooses, and the ready line has it."""
    entry_count_max: int
    """Most entries: pairs of a block and a location."""
    option: str
    """Flag that chose the address, for error messages."""
    store: StoreConfig | None = None
    """Store that several replicas share; None: each has a memory of its own."""
    is_plain: bool = True
    """Begin at once; otherwise the replica first compiles its loops, which takes many seconds."""


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The whole configuration of `kvstore index`, checked."""

    replica: ReplicaConfig
    tls: Tls | None
    """Certificates; None: --insecure."""
    http: HostPort | None
    log_level: str


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Address for other nodes, and the transport of blocks."""

    host: str
    port: int
    """Port; 0: the kernel chooses, and the index is given the port."""
    transport: TransportConfig
    landing_bytes: int = 0
    """Bytes at the end of the arena that prefill nodes write to, a multiple of the slab size; 0:
    none do.
    """
    is_fetched_always: bool = False
    """Whether blocks are fetched even if computing is quicker."""
    drain_s: int = 0
    """Seconds in which the hottest blocks are handed to other nodes when this one ends; 0: they are
    not.
    """


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Publication, peers and certificates of a node."""

    node: str
    indexes: tuple[str, ...]
    """HOST:PORT of the replicas to publish to, without the one inside this node."""
    replica: ReplicaConfig | None
    """Replica inside this node; None: there is none."""
    engines: tuple[EngineSource, ...]
    """Sources of KV events besides attached engines."""
    peers: PeerConfig | None
    """Address for other nodes, and transport; None: this node neither serves nor fetches blocks, it
    only publishes their locations.
    """
    tls: Tls | None
    files: TlsFiles | None
    """Files that `tls` was read from."""


def load_index_config(path: Path | None, flags: Mapping[str, Any]) -> IndexConfig:
    """The checked configuration of `kvstore index`. Raises ConfigError: one sentence, with how to
    mend it.
    """
    settings = load_settings(path, flags, IndexSettings)
    tls = resolve_tls(settings, what="an index")
    if tls is not None and settings.insecure:
        raise ConfigError("--insecure goes without certificates: leave out one or the other")
    if tls is not None and not tls.name_as("index"):
        raise ConfigError(
            f"--cert {settings.cert} names no index: make one with 'kvstore certs DIR --index NAME'"
        )
    replica = ReplicaConfig(
        **settings.listen._asdict(),
        entry_count_max=settings.entries,
        option="--listen",
        store=_store(settings),
        is_plain=settings.plain,
    )
    return IndexConfig(
        replica=replica, tls=tls, http=settings.metrics, log_level=settings.log_level
    )


def _store(settings: IndexSettings) -> StoreConfig | None:
    if settings.store is None:
        return None
    if not is_installed("redis"):
        raise ConfigError(lacking("--store", "redis", "redis"))
    config = store_config(
        settings.store, password_file=settings.store_password_file, ca=settings.store_ca
    )
    if not config.is_here and not settings.insecure:
        raise ConfigError(
            f"--store {config.place} is on another machine and unencrypted: use rediss://, or"
            " --insecure in a lab"
        )
    return config


def resolve_cluster(settings: NodeSettings) -> ClusterConfig | None:
    """A node's part in a cluster; None when it has none. Raises ConfigError."""
    if not settings.index and settings.index_listen is None:
        return None
    tls = resolve_tls(settings, what="the index")
    certified = tls.name_as("node") if tls else ""
    if tls is not None and not certified:
        raise ConfigError(
            f"--cert {settings.cert} names no node: make one with 'kvstore certs DIR --node NAME'"
        )
    name = settings.node_name or certified or platform.node().lower()
    if tls is not None and name != certified:
        raise ConfigError(
            f"node-name is {name!r}, but --cert {settings.cert} is of node {certified!r}: leave"
            " node-name out, or give the certificate of this node"
        )
    if not is_name(name):
        raise ConfigError(
            f"node-name {name!r} cannot be a name in a cluster: use lower-case letters, digits, '-'"
            " and '.'"
        )
    replica = None
    if settings.index_listen is not None:
        entries = settings.index_entries or DEFAULT_ENTRIES
        where = settings.index_listen._asdict()
        replica = ReplicaConfig(**where, entry_count_max=entries, option="--index-listen")
        if tls is not None and not tls.name_as("index"):
            raise ConfigError(
                f"--cert {settings.cert} is of a node only, and --index-listen makes it an index,"
                " too: make one with 'kvstore certs DIR --node NAME --with-index'"
            )
    return ClusterConfig(
        node=name,
        indexes=settings.index,
        replica=replica,
        engines=parse_sources(settings.engine_events or (), insecure=settings.insecure),
        peers=_peers(settings, has_tls=tls is not None),
        tls=tls,
        files=tls and _files(settings),
    )


def resolve_tls(settings: TlsSettings, *, what: str) -> Tls | None:
    """The certificate of a component; None with --insecure and no files. Raises ConfigError."""
    if settings.insecure and not any((settings.ca, settings.cert, settings.key)):
        return None
    files = _files(settings)
    if files is None:
        raise ConfigError(
            f"{what} needs TLS: give --ca, --cert and --key ('kvstore certs' makes some for a lab),"
            " or --insecure: no encryption and no authentication, for labs"
        )
    from kvstore.client.certificates import load  # only here: --insecure needs no cryptography

    return load(files)


def _files(settings: TlsSettings) -> TlsFiles | None:
    """Paths of CA, certificate and key; None: one is not set."""
    if not (settings.ca and settings.cert and settings.key):
        return None
    return TlsFiles(ca=Path(settings.ca), cert=Path(settings.cert), key=Path(settings.key))


def _peers(settings: NodeSettings, *, has_tls: bool) -> PeerConfig | None:
    listen, transport = settings.peer_listen, settings.transport
    if listen is None:
        return None
    from kvstore.config.transports import parse_transport  # only here: back ends need numpy

    chosen = parse_transport(transport, has_tls=has_tls)
    if chosen.port and chosen.port == listen.port:
        raise ConfigError(f"transport {transport!r} uses the port of peer-listen: choose another")
    always = settings.fetch == "always"
    return PeerConfig(
        **listen._asdict(), transport=chosen, is_fetched_always=always, drain_s=settings.drain_s
    )
