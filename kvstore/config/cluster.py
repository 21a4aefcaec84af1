"""The configuration of everything beyond one machine: index, feed, certificates.

Covers: replicas, and the part of a node's settings that is about the cluster. Does not cover: the
rest of a node (`node`), rules for files of certificates (`kvstore.client.tls`).

Ways to be wrong, each a ConfigError that says how to mend it: an address that is none; some of the
three files but not all; neither files nor --insecure; a certificate without the name of this
component; a name that cannot be one.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.client.index import address_parts
from kvstore.client.tls import Tls, TlsFiles, is_name, load
from kvstore.config.addresses import HttpConfig, address_of
from kvstore.config.defaults import DEFAULT_ENTRIES, DEFAULT_LISTEN
from kvstore.config.engine_sources import EngineSource, parse_sources
from kvstore.config.settings import NodeSettings, TlsSettings
from kvstore.config.transports import TransportConfig, parse_transport
from kvstore.errors import ConfigError
from kvstore.stores.address import StoreConfig

INDEX_COUNT_MAX: Final = 16


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Address of a replica of the index, and its limits."""

    host: str
    port: int
    """0: the kernel chooses; the ready line has the port."""
    entry_count_max: int
    """Pairs of a block and a location."""
    option: str
    """The flag that chose the address, for sentences about it."""
    store: StoreConfig | None = None
    """Store that several replicas share; None: each has a memory of its own."""
    is_plain: bool = True
    """Begin at once; otherwise the replica first compiles its loops, which takes many seconds."""


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The whole configuration of `kvstore index`, checked."""

    replica: ReplicaConfig
    tls: Tls | None
    """None: --insecure."""
    http: HttpConfig | None
    log_level: str


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Address for other nodes, and the transport of blocks."""

    host: str
    port: int
    """0: the kernel chooses; the index gets the port."""
    transport: TransportConfig
    landing_bytes: int = 0
    """End of the arena that prefill nodes write to, whole slabs; 0: none do."""
    is_fetched_always: bool = False
    """Whether blocks are fetched even if computing is quicker."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Publication, peers and certificates of a node."""

    node: str
    indexes: tuple[str, ...]
    """HOST:PORT of replicas to feed; the one inside this node not included."""
    replica: ReplicaConfig | None
    """Inside this node."""
    engines: tuple[EngineSource, ...]
    """Sources of KV events besides attached engines."""
    peers: PeerConfig | None
    """None: this node neither serves nor fetches blocks, it only publishes their locations."""
    tls: Tls | None
    files: TlsFiles | None
    """Source of `tls`."""


def resolve_cluster(settings: NodeSettings) -> ClusterConfig | None:
    """A node's part in a cluster; None when it has none. Raises ConfigError."""
    given = settings.index or []
    indexes = [given] if isinstance(given, str) else given
    if not indexes and settings.index_listen is None:
        return None
    loaded = resolve_tls(settings, what="the index")
    certified = loaded.name_as("node") if loaded else ""
    if loaded is not None and not certified:
        raise ConfigError(
            f"--cert {settings.cert} names no node: make one with 'kvstore certs DIR --node NAME'"
        )
    name = settings.node_name or certified or platform.node().lower()
    if loaded is not None and name != certified:
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
        replica = resolve_replica(settings.index_listen, entries, option="--index-listen")
        if loaded is not None and not loaded.name_as("index"):
            raise ConfigError(
                f"--cert {settings.cert} is of a node only, and --index-listen makes it an index,"
                " too: make one with 'kvstore certs DIR --node NAME --with-index'"
            )
    return ClusterConfig(
        node=name,
        indexes=_indexes(indexes),
        replica=replica,
        engines=parse_sources(settings.engine_events or (), insecure=settings.insecure),
        peers=_peers(settings, has_tls=loaded is not None),
        tls=loaded,
        files=loaded and _files(settings),
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
    return load(files)


def _files(settings: TlsSettings) -> TlsFiles | None:
    """All three, or none."""
    if not (settings.ca and settings.cert and settings.key):
        return None
    return TlsFiles(ca=Path(settings.ca), cert=Path(settings.cert), key=Path(settings.key))


def resolve_replica(listen: str, entries: int, *, option: str) -> ReplicaConfig:
    """Raises ConfigError."""
    found = address_of(listen)
    if found is None:
        raise ConfigError(
            f"{option} {listen!r} must be an IP address and a port, such as {DEFAULT_LISTEN}"
        )
    return ReplicaConfig(host=str(found[0]), port=found[1], entry_count_max=entries, option=option)


def _indexes(texts: Sequence[str]) -> tuple[str, ...]:
    if len(texts) > INDEX_COUNT_MAX or len(set(texts)) != len(texts):
        raise ConfigError(f"index names up to {INDEX_COUNT_MAX} replicas, each once")
    for text in texts:
        address_parts(text)
    return tuple(texts)


def _peers(settings: NodeSettings, *, has_tls: bool) -> PeerConfig | None:
    listen, transport = settings.peer_listen, settings.transport
    if listen is None:
        return None
    found = address_of(listen)
    if found is None or found[0].is_unspecified:
        raise ConfigError(
            f"peer-listen {listen!r} must be the IP address and port where other nodes reach this"
            " one, such as 10.0.0.7:9480"
        )
    chosen = parse_transport(transport, has_tls=has_tls)
    if chosen.port and chosen.port == found[1]:
        raise ConfigError(f"transport {transport!r} uses the port of peer-listen: choose another")
    return PeerConfig(
        host=str(found[0]),
        port=found[1],
        transport=chosen,
        is_fetched_always=settings.fetch == "always",
    )


def is_installed(module: str) -> bool:
    """Can it be imported, by its top name, without doing so?"""
    return importlib.util.find_spec(module) is not None
