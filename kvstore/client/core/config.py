"""Configuration of the scheduler's core: one frozen value; the connector builds it."""

from __future__ import annotations

from typing import Literal

import msgspec

Store = Literal["all", "prompt", "none"]
"""Which blocks an engine stores: all, also those that fill during decoding; those of prompts; or
none, and it only loads."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and names of one engine's scheduler side."""

    engine_id: str
    nonce: str
    """Differs between two starts of the same engine id."""
    process: str
    tenant: str
    rank_count: int
    block_tokens: int
    """Tokens of a block of the first KV cache group, the one with full attention."""
    group_tokens: tuple[int, ...] = ()
    """Tokens of a block of each KV cache group; empty: there is one group."""
    group_names: tuple[str, ...] = ("full attention",)
    """Names of the KV cache groups, for people."""
    key_tokens: int = 0
    """Tokens between two keys of a request, where blocks are longer; 0: `block_tokens`."""
    lookahead_tokens: int = 0
    """Tokens past a block on which its last entries depend, with drafts that read the model's
    hidden states: a block is stored when they are known, and a hit leaves its last block out."""
    label: str = ""
    data_rank: int = 0
    """Data-parallel rank of the engine."""
    events: str = ""
    """Endpoint at which the node reads the engine's KV events; empty: none."""
    events_replay: str = ""
    address: str = ""
    """URL of the engine's HTTP server, for routers; empty: not listed."""
    role: str = ""
    """`prefill`, `decode` or `both`, for routers."""
    lookup_deadline_ms: int = 20
    """Time from the first question for a request until it is answered 0; longer where computing
    takes long (`kvstore.client.core.costs`)."""
    heartbeat_timeout_ms: int = 250
    push_deadline_ms: int = 60_000
    """Longest wait for blocks that a prefill node sends."""
    prefill_ns_per_token: int = 10_000
    """Cost of computing a token, until a step was measured or the node has a value: a quick
    engine's, so that no request waits for blocks that this one may compute in less time."""
    min_load_tokens: int = 128
    """Cost gate: shorter hits are computed, since two engine steps and a lookup cost more."""
    store: Store = "all"
    verify_every: int = 1
    """Every n-th load is checked against its checksums: 1 all, 0 none."""
    shadow_every: int = 0
    """Every n-th hit is computed all the same, and compared; 0: none."""
    breaker_failures_max: int = 3
    breaker_cooldown_ms: int = 1000
    recent_keys_max: int = 65_536
    """Keys remembered as stored, so that equal prompts are stored once."""
    push_work_ms_max: int = 1000
    """Longest time that running copies keep an otherwise idle engine stepping."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens of a block, by KV cache group."""
        return self.group_tokens or (self.block_tokens,)

    def keys_per_block(self, group: int) -> int:
        """Keys of a request for each block of a group."""
        return self.block_sizes[group] // (self.key_tokens or self.block_tokens)
