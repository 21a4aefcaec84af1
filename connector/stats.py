"""Counters in vllm's own metrics and log line.

Both sides of the connector fill a `KVStoreStats`; vllm adds them up, ships them to the frontend and
asks it for a line of text and for Prometheus values. Data is a flat dict of integers, with names as
in `client.core.plan.SchedulerStats`.

Savings are two counters and not one: a load may cost more than it saves, and a counter that falls
looks like a restart of the process to `rate()`.
"""

from __future__ import annotations

import itertools
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
    "saved_prefill_seconds": (
        "Estimated time to compute the tokens that were loaded, by this engine's measured pace."
    ),
    "waited_seconds": "Time for which requests waited for lookups, blocks and copies.",
    "load_blocks": "Blocks whose load from kvstore was planned.",
    "load_bytes": "Bytes copied from kvstore into the engine's cache.",
    "load_failures": "Loads that failed and were recomputed.",
    "load_seconds": "Time spent on copying loads, by all ranks together.",
    "hits": "Lookups that found blocks to load.",
    "hit_tokens{tier}": (
        "Tokens found by lookups: in dram, read from disk (file) or fetched from another node"
        " (peer) for the request."
    ),
    "misses{reason}": (
        "Lookups that found no block to load, by the outcome that `kvstore explain` gives."
    ),
    "breaker_openings": "Times the circuit breaker opened after several failures in a row.",
    "shadow_blocks": "Blocks recomputed by shadow checks.",
    "shadow_blocks_diverged": "Recomputed blocks that differed; the space is switched off.",
    "promotions_given_up": "Waits for disk or other nodes that were ended: computing is quicker.",
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
    "store_blocks_without_credit": "Blocks not stored because the node had granted no free slot.",
    "store_bytes": "Bytes copied into kvstore.",
    "store_seconds": "Time spent on copying stores, by all ranks together.",
    "fence_seconds": "Time for which engines waited for stores to leave blocks that they need.",
    "connector_errors": "Exceptions caught by the connector; each turns the cache off.",
}

_KNOWN: dict[str, list[tuple[str, ...]]] = {
    "": [()],
    "tier": [("dram",), ("file",), ("peer",)],
    "reason": [],
}
"""Values of each label that are known before anything is counted."""


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
            "misses": sum(n for name, n in data.items() if name.startswith("misses:")),
            "hit tokens": sum(n for name, n in data.items() if name.startswith("hit_tokens:")),
            "from disk": data.get("hit_tokens:file", 0),
            "from peers": data.get("hit_tokens:peer", 0),
            "saved s": round(data.get("saved_prefill_ns", 0) / 1e9, 2),
            "waited s": round(data.get("waited_ns", 0) / 1e9, 2),
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
        self._counters: dict[str, Any] = {}
        for title, text in _METRICS.items():
            name, _, label = title.removesuffix("}").partition("{")
            self._counters[name] = counter = metric_types[Counter](
                name=f"vllm:kvstore_{name}",
                documentation=text,
                labelnames=[*labelnames, *filter(None, [label])],
            )
            for values, its in itertools.product(per_engine_labelvalues.values(), _KNOWN[label]):
                counter.labels(*values, *its)  # 0 from the start

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition(":")
            name, scale = (name[:-3] + "_seconds", 1e-9) if name.endswith("_ns") else (name, 1)
            counter = self._counters.get(name)
            if counter is not None and amount > 0:
                counter.labels(*values, *filter(None, [label])).inc(amount * scale)
