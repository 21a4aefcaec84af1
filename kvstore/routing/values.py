"""Requests, prefixes and workers, as the shell describes them to the core.

Covers: values without behaviour. Prompt text and token ids never come here: lengths and keys do.
"""

from __future__ import annotations

import enum

import msgspec


class WorkerRole(enum.StrEnum):
    """Legs of a request that a worker serves."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"
    ANY = "any"
    """As the planner says: `prefill` or `both`."""


class PrefixTrust(enum.StrEnum):
    """Trust in prefix lengths, by their source. `PolicyCosts.trust` says what each is worth."""

    EXACT = "exact"
    CATCHING_UP = "catching-up"
    STALE = "stale"
    APPROXIMATE = "approximate"
    """From `tree`: the index has no answer, or the engine publishes none."""
    NONE = "none"
    """No source at all: routed by load."""


class WorkerHealth(enum.StrEnum):
    """State of a worker by probes."""

    UP = "up"
    DRAINING = "draining"
    """Finishes its requests and gets no new ones."""
    DOWN = "down"


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, after rendering."""

    request_id: str
    """Unique among the requests under way."""
    model: str
    """As the client wrote it: name, alias or adapter."""
    prompt_tokens: int
    """Estimated (bytes / 4) where there is no rendering."""
    keys: bytes = b""
    """32 bytes each, of the full blocks, in chain order; empty: no prefix routing by keys."""
    block_tokens: int = 16
    """Tokens of the block of a key."""
    output_tokens_max: int = 256
    """Bound of the client; the need of memory is estimated from it."""
    tenant: str = ""
    service: str = ""
    """Class of service; empty: the policy's default."""
    session: str = ""
    """Conversation: stays on its side of an A/B split (`stays`); the key of policy `session`."""
    priority: int = 0
    """Within the class of service, higher is first."""
    subset: tuple[str, ...] | None = None
    """Workers (or addresses) that may be chosen; None: all. An Envoy subset hint."""
    ttft_s: float | None = None
    """Objective of this request, in place of that of its class."""
    has_side_effects: bool = True
    """Racing two workers needs False."""
    pin_s: float = 0.0
    """The client wants its prompt's blocks kept for so long; 0: no; below: no number of seconds."""
    ends_session: bool = False
    """The client says that no request of the session follows."""
    must_be_local: bool = False
    """No remote prefill: the engine or the request does not allow it."""
    load_only: dict[str, str] = {}
    """Worker → why its prefixes are not known for this request."""


class PrefixMatch(msgspec.Struct, frozen=True):
    """Leading blocks of the keys in a holder's tier or a faster one, as an index match says it.

    With an engine: the memory of that engine (hbm). Without one: the tiers of a node, which its own
    engines load and other nodes fetch.
    """

    node: str
    engine: str = ""
    rank: int = 0
    hbm_blocks: int = 0
    dram_blocks: int = 0
    file_blocks: int = 0
    trust: PrefixTrust = PrefixTrust.EXACT


class PrefixAnswer(msgspec.Struct, frozen=True):
    """Answer of the index about the keys of a request. None in place of it: no answer in time."""

    trust: PrefixTrust
    matches: tuple[PrefixMatch, ...] = ()
    epoch: int = 0
    """Version of the index, for the receipt."""
    peers: frozenset[str] | None = None
    """Nodes that fetch blocks from each other; None: all."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: one engine with one HTTP address, data-parallel ranks each by itself."""

    worker: str
    """Unique name, in receipts and metrics."""
    address: str
    """Host and port, or a URL."""
    pool: str
    models: tuple[str, ...] = ()
    """Base models that it serves; empty: any."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it serves."""
    adapters_max: int = 0
    """Adapters that have room at once; 0: loads none by itself."""
    role: WorkerRole = WorkerRole.BOTH
    node: str = ""
    """Name of the kvstore node beside it; empty: none."""
    engine: str = ""
    """Name of the engine in the index; empty: not followed."""
    rank: int = 0
    memory_tokens: int = 0
    """Tokens that its KV cache holds; 0: not known, never filtered by memory."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0: the policy's."""
    load_bytes_per_s: float = 0.0
    """From dram of its node; 0: the policy's."""


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """Scraped numbers of a worker. None: the engine does not say."""

    waiting: int | None = None
    running: int | None = None
    memory_used: float | None = None
    """Share of the KV cache in use, 0 to 1."""
    adapters: tuple[str, ...] | None = None


class SharedLoad(msgspec.Struct, frozen=True):
    """Requests that another router has at a worker, as routers exchange them."""

    worker: str
    prefill_tokens: int = 0
    """Uncached, before their first token."""
    streams: int = 0
    """After it."""
