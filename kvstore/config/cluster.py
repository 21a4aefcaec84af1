"""The configuration of everything beyond one machine: index, feed, certificates, transport, sources
of KV events.

    --transport tcp,port=9481            the port of block transfer; a random one otherwise
    --transport nixl,plugin=LIBFABRIC    a plugin of NIXL's, which gets plugin.NAME=VALUE
    --transport NAME,pace=on             a window per peer that gives way to other flows
                                         (`transport.reads`)

The default is tcp where there are certificates, since only tcp encrypts and authenticates; with
--insecure NIXL where that is installed.

Covers: replicas, and the part of a node's settings that is about the cluster; --engine-events, and
the endpoints in the Hello of an engine. Does not cover: the rest of a node (`node`), rules for
files of certificates (`kvstore.client.certificates`), the back ends (`transport`).

Ways to be wrong, each a ConfigError that says how to mend it: some of the three files but not all;
neither files nor --insecure; a certificate without the name of this component; a name that cannot
be one; a store that is plain and elsewhere. In --engine-events: no NAME=ENDPOINT; an unknown or
empty setting behind it; no space, or one that is not 64 hex digits; a rank that is no number; an
endpoint that is none, or beyond this machine without --insecure; an engine and rank twice; too
many.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.client.tls import PORT_MAX, Tls, TlsFiles
from kvstore.config.defaults import DEFAULT_TENANT
from kvstore.config.reading import load_settings
from kvstore.config.settings import IndexSettings, NodeSettings, TlsSettings
from kvstore.config.values import address_of, joined
from kvstore.errors import ConfigError
from kvstore.installation import is_installed, lacking
from kvstore.stores.address import StoreConfig, store_config
from kvstore.types import KEY_BYTES, EngineSource, SpaceId
from kvstore.wire.identity import is_name


class IndexConfig(IndexSettings):
    """The whole configuration of a replica, of `kvstore index` or inside a node, checked."""

    tls: Tls | None
    """Certificates; None: --insecure."""
    shared: StoreConfig | None = None
    """Store that several replicas share; None: each has a memory of its own."""
    option: str = "--listen"
    """Flag that chose the address, for error messages."""


@dataclass(frozen=True, kw_only=True)
class TransportConfig:
    """A back end, checked as far as possible without opening it."""

    name: str
    """One of `transport.backends`."""
    port: int = 0
    """Port of block transfer over tcp; 0: the kernel chooses."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the back end, by its own names."""
    is_paced: bool = False
    takes_writes: bool = False
    """Whether peers can push blocks with it."""
    is_plain: bool = False
    """No encryption and no authentication, while all other connections have both."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Name, certificates and transport of a node in its cluster."""

    node: str
    """Name of the node."""
    engines: tuple[EngineSource, ...]
    """Sources of KV events besides attached engines."""
    transport: TransportConfig | None
    """Transport of blocks; None: this node neither serves nor fetches blocks, it only publishes
    their locations.
    """
    tls: Tls | None


def load_index_config(path: Path | None, flags: Mapping[str, Any]) -> IndexConfig:
    """The checked configuration of `kvstore index`. Raises ConfigError: one sentence, with how to
    mend it.
    """
    settings = load_settings(path, flags, IndexConfig)
    settings.tls = tls = resolve_tls(settings, what="an index")
    if tls is not None and settings.insecure:
        raise ConfigError("--insecure goes without certificates: leave out one or the other")
    if tls is not None and not tls.name_as("index"):
        raise ConfigError(
            f"--cert {settings.cert} names no index: make one with 'kvstore certs DIR --index NAME'"
        )
    settings.shared = _store(settings)
    return settings


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
    if settings.index_listen is not None and tls is not None and not tls.name_as("index"):
        raise ConfigError(
            f"--cert {settings.cert} is of a node only, and --index-listen makes it an index, too:"
            " make one with 'kvstore certs DIR --node NAME --with-index'"
        )
    return ClusterConfig(
        node=name,
        engines=parse_sources(settings.engine_events or (), insecure=settings.insecure),
        transport=_transport(settings, has_tls=tls is not None),
        tls=tls,
    )


def resolve_tls(settings: TlsSettings, *, what: str) -> Tls | None:
    """The certificate of a component; None with --insecure and no files. Raises ConfigError."""
    if settings.insecure and not any((settings.ca, settings.cert, settings.key)):
        return None
    if not (settings.ca and settings.cert and settings.key):
        raise ConfigError(
            f"{what} needs TLS: give --ca, --cert and --key ('kvstore certs' makes some for a lab),"
            " or --insecure: no encryption and no authentication, for labs"
        )
    from kvstore.client.certificates import load  # only here: --insecure needs no cryptography

    ca, cert, key = map(Path, (settings.ca, settings.cert, settings.key))
    return load(TlsFiles(ca=ca, cert=cert, key=key))


def _transport(settings: NodeSettings, *, has_tls: bool) -> TransportConfig | None:
    if (listen := settings.peer_listen) is None:
        return None
    chosen = parse_transport(settings.transport, has_tls=has_tls)
    if chosen.port and chosen.port == listen.port:
        raise ConfigError(
            f"transport {settings.transport!r} uses the port of peer-listen: choose another"
        )
    return chosen


# ── transports ────────────────────────────────────────────────────────────────────────────────────

PLAIN: Final = (
    "--transport %s: blocks are transferred without encryption and authentication: every host"
    " that reaches the ports of the transfer worker can read them; for trusted networks only;"
    " tcp uses the certificates"
)
PLAIN_NOTE: Final = "blocks move unencrypted (--transport {})"
_SWITCH: Final = {"on": True, "off": False}


def parse_transport(text: str | None, *, has_tls: bool) -> TransportConfig:
    """The back end that --transport names; None: the default. Raises ConfigError."""
    from kvstore.transport.backends import BACKENDS, refuse_absent  # only here: they need numpy

    if not text:
        has_nixl = any(map(is_installed, BACKENDS["nixl"].capabilities.modules))
        text = "nixl" if has_nixl and not has_tls else "tcp"
    name, *parts = text.split(",")
    if name not in BACKENDS:
        raise ConfigError(f"transport {name!r} must be one of {', '.join(BACKENDS)}")
    can = BACKENDS[name].capabilities
    forms = {**can.options, "pace": "on|off"}
    options: dict[str, str] = {}
    for part in parts:
        key, is_there, value = part.partition("=")
        if not is_there or not value or not _is_known(forms, key) or key in options:
            raise ConfigError(
                f"transport {text!r} cannot have {part!r}: write"
                f" {', '.join(map('='.join, forms.items()))}, each once"
            )
        options[key] = value
    pace = options.pop("pace", "off")
    if pace not in _SWITCH:
        raise ConfigError(f"transport {text!r}: pace is on or off, not {pace!r}")
    port = options.pop("port", "0")
    if not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise ConfigError(f"transport {text!r}: port is a number up to {PORT_MAX}, not {port!r}")
    refuse_absent(name)
    return TransportConfig(
        name=name,
        port=int(port),
        options=options,
        is_paced=_SWITCH[pace],
        takes_writes=can.takes_writes,
        is_plain=has_tls and not can.is_secure,
    )


def _is_known(forms: Mapping[str, str], key: str) -> bool:
    prefix, dot, rest = key.partition(".")
    return bool(rest) and f"{prefix}{dot}OPTION" in forms if dot else key in forms


# ── sources of KV events ──────────────────────────────────────────────────────────────────────────

ENGINE_COUNT_MAX: Final = 64
RANK_MAX: Final = 65535
NAME_BYTES_MAX: Final = 255
IPC_PATH_BYTES_MAX: Final = 107
DEFAULT_SEED: Final = "vllm-none-hash"
"""Hash seed of an engine without PYTHONHASHSEED."""
EXAMPLE: Final = "gpu0=ipc:///run/kvstore/gpu0.kv,space=3f9a…"
_SETTINGS: Final = ("replay", "space", "tenant", "rank", "seed")


def parse_sources(texts: Sequence[str], *, insecure: bool) -> tuple[EngineSource, ...]:
    """Sources of KV events in --engine-events. Raises ConfigError."""
    sources = tuple(_source(text, insecure=insecure) for text in texts)
    if len(sources) > ENGINE_COUNT_MAX:
        raise ConfigError(f"engine-events names {ENGINE_COUNT_MAX} engines at most")
    if len({(source.engine, source.rank) for source in sources}) != len(sources):
        raise ConfigError(
            "engine-events names an engine twice: give each another NAME, or its data-parallel"
            " ranks rank=0, rank=1 and so on"
        )
    return sources


def check_endpoint(text: str, *, insecure: bool) -> str:
    """An endpoint as ZeroMQ connects to it. Raises ConfigError."""
    kind, _, place = text.partition("://")
    if kind == "ipc" and place.startswith("/") and len(os.fsencode(place)) <= IPC_PATH_BYTES_MAX:
        return text
    found = address_of(place) if kind == "tcp" else None
    if found is None or not found.port or found.is_unspecified:
        raise ConfigError(
            f"KV events of an engine cannot be read at {text!r}: it must be ipc:///PATH or"
            " tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557"
        )
    if not found.is_loopback and not insecure:
        raise ConfigError(
            f"KV events at {found.host} come from another machine without TLS or authentication:"
            " use ipc:// or 127.0.0.1, or add --insecure if intended"
        )
    return f"tcp://{joined(*found)}"


def _source(text: str, *, insecure: bool) -> EngineSource:
    first, *others = text.split(",")
    name, _, endpoint = first.partition("=")
    if not name or not endpoint or len(name.encode()) > NAME_BYTES_MAX:
        raise ConfigError(
            f"engine-events {text!r} must be NAME=ENDPOINT,space=HEX, such as {EXAMPLE}"
        )
    settings: dict[str, str] = {}
    for other in others:
        setting, _, value = other.partition("=")
        if setting not in _SETTINGS or not value or setting in settings:
            raise ConfigError(
                f"engine-events {text!r}: {other!r} must be one of {'=…, '.join(_SETTINGS)}=…, each"
                " once"
            )
        settings[setting] = value
    replay = settings.get("replay", "")
    return EngineSource(
        engine=name,
        rank=_rank(settings.get("rank", "0")),
        endpoint=check_endpoint(endpoint, insecure=insecure),
        replay_endpoint=check_endpoint(replay, insecure=insecure) if replay else "",
        tenant=settings.get("tenant", DEFAULT_TENANT),
        space=_space(settings.get("space", ""), text),
        hash_seed=settings.get("seed", DEFAULT_SEED),
    )


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > RANK_MAX:
        raise ConfigError(f"engine-events: rank {text!r} must be a data-parallel rank, such as 0")
    return int(text)


def _space(text: str, whole: str) -> SpaceId:
    try:
        space = bytes.fromhex(text)
    except ValueError:
        space = b""
    if len(space) != KEY_BYTES:
        raise ConfigError(
            f"engine-events {whole!r}: give it space=HEX, {2 * KEY_BYTES} hex digits by which the"
            " index is asked about this model, the same on all nodes"
        )
    return SpaceId(space)
