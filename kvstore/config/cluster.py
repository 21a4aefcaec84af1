"""The configuration of what reaches beyond one machine: index, feed, certificates.

Covers: settings of `kvstore index`, and the part of a node's that is about the cluster. Does not
cover: the rest of a node (`config`), what files of certificates must be (`kvstore.client.tls`).

Ways to be wrong, each a ConfigError that says how to mend it: an address that is none; some of the
three files but not all; neither files nor --insecure; a certificate that does not name what this
component is; a name that cannot be one; a limit that is no number.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvstore.client.index import address_parts
from kvstore.client.tls import Tls, TlsFiles, is_name, load
from kvstore.config.addresses import HttpConfig, address_of
from kvstore.config.defaults import DEFAULT_ENTRIES, DEFAULT_LISTEN, FETCH_WHEN
from kvstore.config.engine_sources import EngineSource, parse_sources
from kvstore.config.transports import TransportConfig, parse_transport
from kvstore.errors import ConfigError
from kvstore.index.holdings import ENTRY_COUNT_MAX
from kvstore.stores.address import StoreConfig

ENTRIES_MIN: Final = 1 << 16
_THOUSANDS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
INDEX_COUNT_MAX: Final = 16


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """Where a replica of the index listens, and how much it may hold."""

    host: str
    port: int
    """0: the kernel chooses; the ready line tells."""
    entry_count_max: int
    """Pairs of a block and a holder."""
    option: str
    """The flag that chose the address, for sentences about it."""
    store: StoreConfig | None = None
    """What several replicas share; None: each has a memory of its own."""
    is_plain: bool = True
    """Begin at once; otherwise its loops are compiled first, which takes many seconds."""


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Everything `kvstore index` needs to know, checked."""

    replica: ReplicaConfig
    tls: Tls | None
    """None: --insecure."""
    http: HttpConfig | None
    log_level: str


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Where other nodes reach this one, and by what blocks move."""

    host: str
    port: int
    """0: the kernel chooses; the index is told."""
    transport: TransportConfig
    is_fetched_always: bool = False
    """Whether blocks are fetched that are quicker to compute, too."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What a node tells to whom."""

    node: str
    indexes: tuple[str, ...]
    """HOST:PORT of replicas to feed; the one inside this node not included."""
    replica: ReplicaConfig | None
    """Inside this node."""
    engines: tuple[EngineSource, ...]
    """Whose KV events are read beside those of attached engines."""
    peers: PeerConfig | None
    """None: this node lends and borrows nothing, and only tells what it holds."""
    tls: Tls | None
    files: TlsFiles | None
    """What `tls` was read from."""


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The four settings that every component has."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    insecure: bool = False

    def files(self) -> TlsFiles | None:
        """All three, or none."""
        if self.ca is None or self.cert is None or self.key is None:
            return None
        return TlsFiles(ca=Path(self.ca), cert=Path(self.cert), key=Path(self.key))


def resolve_cluster(
    *,
    indexes: Sequence[str],
    engine_events: Sequence[str],
    index_listen: str | None,
    index_entries: int | str | None,
    peer_listen: str | None,
    transport: str | None,
    fetch: str | None,
    node_name: str | None,
    tls: TlsSettings,
) -> ClusterConfig | None:
    """A node's part in a cluster; None when it has none. Raises ConfigError."""
    if not indexes and index_listen is None:
        _refuse_lonely(engine_events, index_entries, peer_listen, transport, fetch, tls)
        return None
    loaded = resolve_tls(tls, what="the index")
    certified = loaded.name_as("node") if loaded else ""
    if loaded is not None and not certified:
        raise ConfigError(
            f"--cert {tls.cert} names no node: make one with 'kvstore certs DIR --node NAME'"
        )
    name = node_name or certified or platform.node().lower()
    if loaded is not None and name != certified:
        raise ConfigError(
            f"node-name is {name!r}, but --cert {tls.cert} is of node {certified!r}: leave"
            " node-name out, or give the certificate of this node"
        )
    if not is_name(name):
        raise ConfigError(
            f"node-name {name!r} cannot be a name in a cluster: use lower-case letters, digits, '-'"
            " and '.'"
        )
    replica = None
    if index_listen is not None:
        replica = resolve_replica(index_listen, index_entries, option="--index-listen")
        if loaded is not None and not loaded.name_as("index"):
            raise ConfigError(
                f"--cert {tls.cert} is of a node only, and --index-listen makes it an index, too:"
                " make one with 'kvstore certs DIR --node NAME --with-index'"
            )
    elif index_entries is not None:
        raise ConfigError("index-entries is about --index-listen: add that, or leave it out")
    return ClusterConfig(
        node=name,
        indexes=_indexes(indexes),
        replica=replica,
        engines=parse_sources(engine_events, insecure=tls.insecure),
        peers=_peers(peer_listen, transport, fetch, has_tls=loaded is not None),
        tls=loaded,
        files=tls.files() if loaded else None,
    )


def _refuse_lonely(
    engine_events: Sequence[str],
    entries: object,
    peer_listen: object,
    transport: object,
    fetch: object,
    tls: TlsSettings,
) -> None:
    given = {
        "engine-events": engine_events or None,
        "index-entries": entries,
        "peer-listen": peer_listen,
        "transport": transport,
        "fetch": fetch,
        "ca": tls.ca,
        "cert": tls.cert,
        "key": tls.key,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} is about a cluster: add --index or --index-listen, or leave it out"
            )


def resolve_tls(settings: TlsSettings, *, what: str) -> Tls | None:
    """The certificate of a component; None with --insecure and no files. Raises ConfigError."""
    if settings.insecure and not any((settings.ca, settings.cert, settings.key)):
        return None
    files = settings.files()
    if files is None:
        raise ConfigError(
            f"{what} needs TLS: give --ca, --cert and --key ('kvstore certs' makes some for a lab),"
            " or --insecure: no encryption and no authentication, for labs"
        )
    return load(files)


def resolve_replica(listen: str, entries: int | str | None, *, option: str) -> ReplicaConfig:
    """Raises ConfigError."""
    found = address_of(listen)
    if found is None:
        raise ConfigError(
            f"{option} {listen!r} must be an IP address and a port, such as {DEFAULT_LISTEN}"
        )
    count = DEFAULT_ENTRIES if entries is None else _count(str(entries))
    if not ENTRIES_MIN <= count <= ENTRY_COUNT_MAX:
        raise ConfigError(
            f"entries {entries!r} must be a number from {ENTRIES_MIN} to {ENTRY_COUNT_MAX}, such as"
            f" {DEFAULT_ENTRIES} or 10M"
        )
    return ReplicaConfig(host=str(found[0]), port=found[1], entry_count_max=count, option=option)


def _count(text: str) -> int:
    """Of 10000000, 10_000_000 or 10M; 0: it is none."""
    found = re.fullmatch(r"(\d[\d_]*)([kKMG]?)", text, re.ASCII)
    return int(found[1].replace("_", "")) * _THOUSANDS[found[2].upper()] if found else 0


def _indexes(texts: Sequence[str]) -> tuple[str, ...]:
    if len(texts) > INDEX_COUNT_MAX or len(set(texts)) != len(texts):
        raise ConfigError(f"index names up to {INDEX_COUNT_MAX} replicas, each once")
    for text in texts:
        address_parts(text)
    return tuple(texts)


def _peers(
    listen: str | None, transport: str | None, fetch: str | None, *, has_tls: bool
) -> PeerConfig | None:
    if listen is None:
        for name, value in (("transport", transport), ("fetch", fetch)):
            if value is not None:
                raise ConfigError(f"{name} is about --peer-listen: add that, or leave it out")
        return None
    found = address_of(listen)
    if found is None or found[0].is_unspecified:
        raise ConfigError(
            f"peer-listen {listen!r} must be the IP address and port where other nodes reach this"
            " one, such as 10.0.0.7:9480"
        )
    chosen = parse_transport(transport, has_tls=has_tls)
    if chosen.port and chosen.port == found[1]:
        raise ConfigError(
            f"transport {transport!r} is at the port of peer-listen: they are two; choose another"
        )
    when = fetch or FETCH_WHEN[0]
    if when not in FETCH_WHEN:
        raise ConfigError(f"fetch {when!r} must be one of {', '.join(FETCH_WHEN)}")
    return PeerConfig(
        host=str(found[0]), port=found[1], transport=chosen, is_fetched_always=when == "always"
    )


def is_installed(module: str) -> bool:
    """Can it be imported, by its top name, without doing so?"""
    return importlib.util.find_spec(module) is not None
