"""Numbers of a node, of its engines and of a router: what they do now, and what they have learned.

**Load** is a node's activity, sent with its heartbeats and shown by the page of an index. Counts
start with the node process, so that each reader computes rates over any interval; `at_ms` is the
time to divide by. No names, keys or tenants are in the numbers. **EngineEntry** is an engine that
the node serves, sent to routers when that changes.

**RouterLoads** goes between routers of the same engines, one msgpack-encoded struct each, in gRPC:

    router that counts ── an empty message ─▶ router
    router that counts ◀──── RouterLoads … ── router     at first, on changes, and each second

Only kvstore says these, and only one version of it: another one's service has another name. Ways to
be broken, each a ProtocolError: not msgpack; field of another type or out of bounds.

**Learned** has a node's and its engines' measurements, in a form for its disk:

    page-padded JSON   {"magic": "kvstore learned", "version": 1, "checksum": hex, "learned": {…}}

The checksum is xxh3-128 of the bytes of `learned`. Only guesses to start from: a wrong one costs
time and never a byte, and the first measurements replace it. The used part of a day's budget of
disk writes is kept with the wall clock's time, because only that goes on while no node runs. The
clock may be wrong by any amount: set back, it refills nothing; set forward, a day's budget is full,
as if nothing had been kept. Leases and deadlines never see it.

Ways to be broken: longer than LEARNED_BYTES_MAX; not JSON; another magic or version; a checksum
that differs; a field of another type. Each means: nothing was learned. A number out of bounds is
moved to the nearest bound, here and on its way in from an engine.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
import xxhash
from msgspec import Meta

from kvstore.types import PAGE_BYTES
from kvstore.wire.bounds import I64, U32, U64, Label, Name, Small, WholeSpace
from kvstore.wire.messages import decoded

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


# ── loads of routers ──────────────────────────────────────────────────────────────────────────────

LOADS: Final = "kvstore.router.v2.Loads"
"""Service of routers for routers: `Loads`, a stream of answers."""
Url = Annotated[str, Meta(max_length=1024)]


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Requests at one engine, which goes by its address: routers may give it names of their own."""

    address: Url
    rank: U32
    """Data-parallel rank of the engine."""
    prefill_tokens: U64
    """Uncached prompt tokens of requests before their first token."""
    streams: U32
    """Requests after their first token."""


class RouterLoads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one router at all engines; replaces its earlier messages."""

    router: Name
    """Name that the router drew at its start."""
    loads: Annotated[tuple[EngineLoad, ...], Meta(max_length=1 << 16)]


_decoder = msgspec.msgpack.Decoder(RouterLoads)


def encode_loads(loads: RouterLoads) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(loads)


def decode_loads(data: bytes) -> RouterLoads:
    """The message in these bytes. Raises ProtocolError."""
    return decoded(_decoder, data, "loads")


# ── what a node has learned ───────────────────────────────────────────────────────────────────────

LEARNED_BYTES_MAX: Final = 16 * PAGE_BYTES
SPACES_MAX: Final = 32
_MAGIC: Final = "kvstore learned"
_VERSION: Final = 1
_DAY_S: Final = 86_400

COMPUTE_NS_MIN, COMPUTE_NS_MAX = 1_000, 100_000_000
"""Bounds per computed token: a million tokens a second, and ten."""
LOAD_NS_MIN, LOAD_NS_MAX = 1, 100_000_000
"""Bounds per token copied from dram."""
DISK_NS_PER_MIB_MIN, DISK_NS_PER_MIB_MAX = 10_000, 10**12
"""Bounds per MiB read from disk: 100 GB/s, and 1 kB/s."""

Hex = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class SpacePace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements that engines of one tenant and space reported; 0: none."""

    tenant: Name
    space: Hex
    compute_ns_per_token: I64 = 0
    load_ns_per_token: I64 = 0

    def within_bounds(self) -> SpacePace:
        """The same with both numbers moved into their bounds."""
        compute_ns = clamp(self.compute_ns_per_token, COMPUTE_NS_MIN, COMPUTE_NS_MAX)
        load_ns = clamp(self.load_ns_per_token, LOAD_NS_MIN, LOAD_NS_MAX)
        return SpacePace(self.tenant, self.space, compute_ns, load_ns)


class Spent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Used part of the budget of disk writes, and the time of this reading."""

    size_bytes: I64 = 0
    at_s: I64 = 0
    """Time of the wall clock."""


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements of a node; 0 and empty: none yet."""

    disk_ns_per_mib: I64 = 0
    spaces: Annotated[tuple[SpacePace, ...], msgspec.Meta(max_length=LEARNED_BYTES_MAX)] = ()
    spent: Spent = Spent()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    magic: Name
    version: Small
    checksum: Name
    learned: msgspec.Raw


class NotLearned(ValueError):
    """The bytes are damaged or of another version."""


def clamp(value: int, low: int, high: int) -> int:
    """The nearest value within the bounds; 0, nothing was measured, stays 0."""
    return min(max(value, low), high) if value else 0


def within_bounds(learned: Learned) -> Learned:
    """The measurements with every number moved into its bounds, and of the first SPACES_MAX spaces
    only."""
    disk_ns = clamp(learned.disk_ns_per_mib, DISK_NS_PER_MIB_MIN, DISK_NS_PER_MIB_MAX)
    spaces = tuple(pace.within_bounds() for pace in learned.spaces[:SPACES_MAX])
    return Learned(disk_ns, spaces, learned.spent)


def still_spent(spent: Spent, *, day_bytes: int, now_s: int) -> int:
    """How much of a day's budget is used up now: what was then, less what came in since."""
    passed_s = min(max(0, now_s - spent.at_s), _DAY_S)
    return max(0, min(spent.size_bytes, day_bytes) - day_bytes * passed_s // _DAY_S)


def encode_learned(learned: Learned) -> bytes:
    """The bytes to keep, in whole pages."""
    body = msgspec.json.encode(learned)
    kept = _Kept(_MAGIC, _VERSION, xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body))
    text = msgspec.json.encode(kept) + b"\n"
    padded = text + b" " * (-len(text) % PAGE_BYTES)
    assert len(padded) <= LEARNED_BYTES_MAX, len(padded)
    return padded


def decode_learned(text: bytes) -> Learned:
    """Decode stored measurements.

    Raises:
        NotLearned: the text was damaged, or made by another version.
    """
    try:
        kept = msgspec.json.decode(text, type=_Kept)
        body = bytes(kept.learned)
        if kept.magic != _MAGIC or xxhash.xxh3_128_hexdigest(body) != kept.checksum:
            raise NotLearned("it is damaged")
        if kept.version != _VERSION:
            raise NotLearned(f"it is of version {kept.version}, where {_VERSION} is read")
        return within_bounds(msgspec.json.decode(body, type=Learned))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NotLearned("it is damaged") from None
