"""Activity of a node in numbers, sent with its heartbeats and shown by the page of an
index; and the engines that it serves, sent to routers when that changes.

Counts start with the node process, so that each reader computes rates over any interval; `at_ms` is
the time to divide by. No names, keys or tenants are in the numbers.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvstore.wire.bounds import U32, U64, Label, Name, Small, WholeSpace

_LABEL: Final = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One node, at one moment."""

    at_ms: U64 = 0
    """Time of the node's own clock, which never goes back while the node lives."""
    dram_bytes: U64 = 0
    dram_used_bytes: U64 = 0
    file_bytes: U64 = 0
    file_used_bytes: U64 = 0
    blocks_hit: U64 = 0
    """Blocks found by lookups since the node process began; from there count all fields down to
    `fetch_p99_us`."""
    blocks_missed: U64 = 0
    stored_bytes: U64 = 0
    leased_bytes: U64 = 0
    """Bytes leased to engines, which load them."""
    fetched_bytes: U64 = 0
    """Bytes fetched from other nodes."""
    served_bytes: U64 = 0
    """Bytes served to other nodes."""
    fetch_p50_us: U64 = 0
    """Median of all fetches."""
    fetch_p99_us: U64 = 0
    leases: U64 = 0
    """Leases at this moment, as are the fields down to `replicas_reached`."""
    engines: U64 = 0
    slots_quarantined: U64 = 0
    replicas: U64 = 0
    """Replicas of the index that the node publishes to."""
    replicas_reached: U64 = 0
    saved_ms: U64 = 0
    """Estimated time to compute all loaded tokens, since it began."""
    waited_ms: U64 = 0
    """Time that requests waited for them, and in vain, since it began."""


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An engine that a node serves. Empty, or None: not known."""

    engine: Name
    tenant: Name
    space: WholeSpace
    model: Label = ""
    rank: Small = 0
    """Data-parallel rank of the engine."""
    role: Label = ""
    address: Label = ""
    """URL of the engine's HTTP server (`is_base_url`)."""
    queue: U32 | None = None
    """Requests that wait in the engine."""


def is_base_url(text: str) -> bool:
    """Whether a text is a scheme, http or https, a host and perhaps a port, and nothing more.
    The host is one that all parsers read alike and a resolver takes without an error."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
        is_host = _HOST.fullmatch(host) is not None and "[" not in parts.netloc
        is_host |= ":" in host and "%" not in host and bool(IPv6Address(host))
    except ValueError:
        return False
    is_bare = text.rstrip("/") == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and is_host and port != 0 and is_bare
