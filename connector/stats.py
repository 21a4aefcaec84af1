"""Counters in vllm's own metrics and log line.

Both sides of the connector fill a `KVStoreStats`; vllm adds them up, ships them to the frontend and
asks it for a line of text and for Prometheus values. Data is a flat dict of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_METRICS = {
    "load_blocks": "Blocks whose load from kvstore was planned.",
    "load_bytes": "Bytes copied from kvstore into the engine's cache.",
    "load_failures": "Loads that failed and were recomputed.",
    "load_ns": "Nanoseconds spent on copying loads.",
    "hits": "Lookups that found blocks to load.",
    "hit_tokens": "Tokens found by lookups.",
    "hit_tokens_dram": "Tokens found in the dram tier of the node.",
    "hit_tokens_peer": "Tokens fetched from another node for the request.",
    "hit_tokens_file": "Tokens read from the disk tier of the node for the request.",
    "misses": "Lookups that found no block to load.",
    "misses_node_away": "Misses because no node was attached.",
    "misses_deadline": "Misses because the node did not answer in time.",
    "misses_breaker_open": "Misses because the circuit breaker was open after several failures.",
    "misses_shadow_check": "Hits that a shadow check recomputed.",
    "misses_group_not_stored": "Misses because only the blocks with full attention were there.",
    "breaker_openings": "Times the circuit breaker opened after several failures in a row.",
    "shadow_blocks": "Blocks recomputed by shadow checks.",
    "shadow_blocks_diverged": "Recomputed blocks that differed; the space is switched off.",
    "promotions_given_up": "Waits for blocks from disk ended by their deadline.",
    "store_blocks_submitted": (
        "Blocks submitted to the ranks for storing; without those sealed and dropped: the queue."
    ),
    "pushes_opened": "Requests whose blocks were offered to decode nodes.",
    "pushes_expected": "Requests that waited for blocks from a prefill node.",
    "pushes_short": "Announced blocks that did not all come from the prefill node.",
    "pushes_given_up": "Waits for blocks from a prefill node ended by their deadline.",
    "pushes_malformed": "Requests whose kv_transfer_params were broken, and ignored.",
    "store_blocks_sealed": "Block shards stored.",
    "store_blocks_dropped": "Block shards whose store was abandoned.",
    "store_blocks_without_credit": "Full blocks not stored for lack of a credit.",
    "store_bytes": "Bytes copied into kvstore.",
    "store_ns": "Nanoseconds spent on copying stores.",
    "fence_ns": "Nanoseconds for which the engine waited for stores to leave blocks that it needs.",
    "connector_errors": "Exceptions caught by the connector; each turns the cache off.",
}


@dataclass
class KVStoreStats(KVConnectorStats):
    """Sums since the last reset."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counts to these."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Values of the periodic log line."""
        data = self.data
        load_s = data.get("load_ns", 0) / 1e9
        store_s = data.get("store_ns", 0) / 1e9
        return {
            "kvstore hits": data.get("hits", 0),
            "misses": data.get("misses", 0),
            "hit tokens": data.get("hit_tokens", 0),
            "from disk": data.get("hit_tokens_file", 0),
            "from peers": data.get("hit_tokens_peer", 0),
            "load MiB": round(data.get("load_bytes", 0) / 2**20, 1),
            "load GiB/s": round(data.get("load_bytes", 0) / 2**30 / load_s, 2) if load_s else 0,
            "load failures": data.get("load_failures", 0),
            "stored blocks": data.get("store_blocks_sealed", 0),
            "store MiB": round(data.get("store_bytes", 0) / 2**20, 1),
            "store GiB/s": round(data.get("store_bytes", 0) / 2**30 / store_s, 2) if store_s else 0,
            "dropped blocks": data.get("store_blocks_dropped", 0),
        }

    def is_empty(self) -> bool:
        """True when nothing was counted."""
        return not any(self.data.values())


class KVStorePromMetrics(KVConnectorPromMetrics):
    """The same counts as Prometheus counters named vllm:kvstore_*."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in _METRICS.items():
            counter = metric_types[Counter](
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, amount in transfer_stats_data.items():
            counters = self._counters.get(name)
            if counters is not None and amount > 0:
                counters[engine_idx].inc(amount)
