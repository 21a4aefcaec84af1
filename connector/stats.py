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
    "hits": "Lookups that found something to load.",
    "hit_tokens": "Tokens of those hits.",
    "hit_tokens_dram": "Of them, tokens that were in the node's memory.",
    "hit_tokens_peer": "Of them, tokens that came from another node for the request.",
    "hit_tokens_file": "Of them, tokens that came from the node's disk for the request.",
    "misses": "Lookups that found nothing to load.",
    "misses_node_away": "Misses because the node was not attached.",
    "misses_deadline": "Misses because the node did not answer in time.",
    "misses_breaker_open": "Misses because lookups or loads had just failed several times.",
    "misses_shadow_check": "Hits that were computed, to compare with what the cache holds.",
    "breaker_openings": "Times that several failures in a row turned the cache off for a moment.",
    "shadow_blocks": "Blocks computed and compared.",
    "shadow_blocks_diverged": "Of them, blocks that hold other values: the space is switched off.",
    "promotions_given_up": "Times blocks on their way from disk were not waited for any longer.",
    "store_blocks_submitted": "Blocks handed to the ranks for storing.",
    "store_blocks_sealed": "Blocks stored; those of several ranks count once a shard.",
    "store_blocks_dropped": "Blocks whose store was abandoned, counted likewise.",
    "store_blocks_without_credit": "Times a filled block had no free slot to go to.",
    "store_bytes": "Bytes copied into kvstore.",
    "store_ns": "Nanoseconds spent on copying stores.",
    "connector_errors": "Errors caught at the connector's edge; the cache is off after one.",
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
        """What the periodic log line shows."""
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
