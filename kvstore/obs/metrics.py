"""Every metric of kvstore, in one table: name with unit, labels, help. And counts of durations.

Nothing exports a number that is not listed here, and the documentation is made from the same rows.
Covers: names and families; durations by time, two buckets to an octave, and percentiles out of
them. Does not cover: sources of the values (such as `kvstore.node.pages`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvstore.units import NS_PER_S

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One row. The name ends in the unit, counters in ``_total`` as well."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _rows(table: dict[str, str]) -> tuple[Metric, ...]:
    """From names without `kvstore_`, with their labels, to help."""
    rows = []
    for text, about in table.items():
        name, _, labels = text.removesuffix("}").partition("{")
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        if name in _HISTOGRAMS:
            kind = "histogram"
        rows.append(Metric(f"kvstore_{name}", kind, tuple(filter(None, labels.split(","))), about))
    return tuple(rows)


_HISTOGRAMS: Final = frozenset(
    {"step_seconds", "transfer_seconds", "eviction_age_seconds", "router_ttft_seconds"}
)
METRICS: Final = _rows(
    {
        "ready_bytes{tier}": "Bytes with allocated pages.",
        "pinned_bytes{tier}": "Pinned host memory of the rank that pinned most.",
        "used_bytes{tier}": "Bytes in use: slots with a block; on disk whole segments, the open one"
        " at its full size.",
        "capacity_bytes{tier}": "Capacity of the tier.",
        "connections": "Open sockets of engines.",
        "connections_accepted_total": "Sockets accepted.",
        "connections_refused_total{reason}": "Sockets refused: uid not allowed, node full, bad"
        " hello, no hello in time.",
        "connections_ended_total{reason}": "Attached sockets that ended: closed by the peer,"
        " protocol error, outbox overflow, process exited, closed by the engine core, failure of"
        " the node.",
        "datagrams_total{direction}": "Datagrams received and sent.",
        "step_seconds": "Time from a batch of events to its last executed command.",
        "loop_failures_total": "Caught exceptions of the loop: bugs.",
        "heartbeat_gap_seconds": "Longest gap between two heartbeats of the last minute; at 0.25"
        " engines stop caching.",
        "queries_total": "Queries by inspect, explain and /metrics.",
        "event_batches_total": "Batches of KV events published (--events).",
        "event_keys_lost_total": "Block changes not published because the publisher fell behind.",
        "event_replays_total": "Replays and snapshots of KV events requested.",
        "event_requests_refused_total": "Malformed requests to the replay socket.",
        "info{version,incarnation}": "Always 1.",
        "restarts_total": "Earlier processes of this node (crashes, upgrades); other counters"
        " restart with each.",
        "restart_gap_seconds": "Gap from the end of the previous process until this one served; 0:"
        " first process.",
        "blocks{tier}": "Block shards in the tier.",
        "slots{state}": "Slots by state: sealed (with a block), leased (being read), granted (may"
        " be written), quarantined (the writer may still write).",
        "file_budget_left_bytes": "Write budget left of --file-writes-per-day; absent without it.",
        "scrubbed_blocks_total{tier}": "Blocks verified by the background scrub.",
        "scrubbed_bytes_total{tier}": "Bytes verified by the background scrub.",
        "scrub_bad_total{tier}": "Blocks that failed verification by the scrub and were dropped.",
        "scrub_age_seconds{tier}": "Age of the last complete scrub of the tier; absent before the"
        " first.",
        "shadow_error_max": "Largest relative error between a cached block and its recomputation by"
        " a shadow check.",
        "spaces_off{tier}": "Models switched off by a shadow check: in the disk tier (file), or in"
        " all tiers.",
        "breaker_open{tier,direction}": "Circuit breaker of disk reads or writes: 0 closed, 1 open,"
        " 0.5 during a probe.",
        "quota_promised_bytes{quota}": "Dram guaranteed by --quota, by model or tenant.",
        "quota_used_bytes{quota}": "Dram used by a model or tenant; may exceed its guarantee.",
        "fetch_damaged_total": "Fetched blocks that failed verification and were dropped.",
        "fetch_not_kept_total": "Blocks that the serving node evicted during the fetch.",
        "fetched_bytes_total": "Bytes fetched from other nodes.",
        "leased_bytes_total": "Bytes leased to engines for loading.",
        "served_bytes_total": "Bytes served to other nodes.",
        "prepares_refused_total": "Requests of routers to prepare blocks, refused at once.",
        "transfer_worker_restarts_total": "Restarts of the transfer worker.",
        "transfer_worker_refused_total": "Reads by other nodes refused: connections used up.",
        "transfer_seconds{kind,backend}": "Duration of fetches from other nodes: request (ask),"
        " transfer (move), checksum (verify), all of it (fetch); of pushes to this node: until the"
        " prefill node has the grant (push_grant), its first block (push_first), its last (push);"
        " copying out (land_copy), checksum (land_verify), from the word that blocks are there"
        " until they are sealed (push_seal), from the end of the push to the first token of its"
        " request (push_token); of writes to other nodes (write). Buckets: fetch, push, push_token"
        " and write; 'kvstore inspect transfers' has percentiles of all.",
        "landing_bytes{state}": "Landing slab (--landing) by state: free, granted (a prefill node"
        " may write), limbo (until the transfer worker is restarted).",
        "pushes{side}": "Pushes under way: requests that wait for blocks (decode), grants of other"
        " nodes (prefill).",
        "push_blocks_landed_total": "Blocks pushed here, verified and stored.",
        "push_blocks_damaged_total": "Blocks pushed here that failed verification.",
        "push_words_dropped_total": "Reports of other nodes about pushes that were not under way.",
        "pushed_blocks_total": "Blocks pushed to other nodes.",
        "pushed_bytes_total": "Bytes pushed to other nodes.",
        "pushes_cut_short_total": "Pushes that ended before all of their blocks had come.",
        "engine_blocks": "Blocks in the engines' own prefix caches, from their KV events.",
        "engine_events_batches_total": "Batches of KV events received from engines.",
        "engine_events_replays_total": "Replays requested from engines.",
        "engine_events_voids_total": "Times the blocks of an engine were dropped: gone, or a gap.",
        "engine_events_refused_total": "Malformed batches of KV events.",
        "certificate_expires_timestamp_seconds": "Unix time at which the certificate in use expires"
        " (of the node, or of a separate index); absent without TLS.",
        "feeds": "Index replicas connected and receiving updates; 0: none is reached.",
        "feed_deltas_total": "Updates sent, to all replicas together.",
        "feed_snapshots_total": "Snapshots sent to replicas.",
        "feed_keys_lost_total": "Key changes not sent as updates; a snapshot carried them.",
        "feed_streams_total": "Streams to replicas opened.",
        "sessions": "Engines whose ranks are all attached.",
        "engines_unserved": "Engines that are not served: cache not served, refused, or ranks"
        " missing. 'kvstore inspect nodes' shows the reason.",
        "leases": "Runs of blocks being read by engines.",
        "blocks_distrusted_total": "Blocks dropped because the checksum of a reader failed.",
        "blocks_kept_total": "Block shards kept from the previous process of this node.",
        "blocks_verified_total": "Kept blocks verified by their first reader.",
        "blocks_granted_total": "Credits granted to engines: blocks they may store.",
        "hbm_blocks_demoted_total": "Copies in GPU memory (--hbm) that gave way to others.",
        "hbm_blocks_dropped_total": "Copies not used: the block left memory, or was damaged.",
        "hbm_blocks_leased_total": "Blocks found and leased that have a copy in GPU memory.",
        "hbm_blocks_promoted_total": "Blocks copied into GPU memory and verified there.",
        "blocks_hit_total{tier}": "Blocks loaded by requests that have ended, by source: dram, file"
        " (disk), peer.",
        "blocks_missed_total{reason}": "Full blocks of the prompts of these requests that were"
        " neither loaded nor in the engine's own cache, by class of the reasons of 'kvstore"
        " explain'.",
        "prompt_tokens_total{model,tenant}": "Prompt tokens of requests that have ended. The first"
        " 32 models and tenants have names, all others are 'other'.",
        "loaded_tokens_total{model,tenant}": "Prompt tokens of these that were loaded.",
        "stored_bytes_total{model,tenant}": "Bytes stored by engines.",
        "saved_seconds_total{model,tenant,tier}": "Estimated time to compute the loaded tokens, by"
        " the engines' measured pace. Models and tenants with and without a tier have 38 names in"
        " all; later ones are 'other'.",
        "spent_seconds_total{model,tenant,tier}": "Time for which these requests waited for"
        " lookups, blocks and copies; tier 'none': nothing was loaded for it.",
        "lost_seconds_total{model,tenant,tier}": "Part of kvstore_spent_seconds_total that exceeds"
        " what its request saved; of the tier that cost it most.",
        "expected_hit_ratio{capacity}": "Share of looked-up prompt tokens that dram of another"
        " capacity would serve, in that of this node: 0.5x, 1x, 2x, 4x, 8x; of the last 12 to 24"
        " hours. Absent until there were enough lookups; 'kvstore inspect curve' explains it.",
        "evictions_total": "Slots evicted.",
        "eviction_age_seconds{tier}": "Time since the last use of blocks that were evicted from"
        " dram; on disk (file) since blocks were written that a reclaimed segment did not keep."
        " Shorter than the time until prompts come back: the tier is too small.",
        "file_blocks_crowded_total": "Blocks on disk dropped because the node's table was full.",
        "file_blocks_damaged_total": "Blocks on disk that failed verification.",
        "file_blocks_not_written_total{reason}": "Blocks not written to disk: no second request yet"
        " (admission), write budget used up, also blocks not kept (budget), disk busy, full or"
        " failing (disk).",
        "file_blocks_read_total": "Blocks read from disk and verified.",
        "file_blocks_unread_total": "Blocks requested from disk and not delivered.",
        "file_blocks_written_total": "Blocks written to disk.",
        "file_reads_late_total": "Disk reads that ended after their deadline.",
        "fetch_blocks_lost_total": "Blocks requested from other nodes and not delivered.",
        "fetched_blocks_total": "Blocks fetched from other nodes and verified.",
        "served_blocks_changed_total": "Blocks that changed while they were served.",
        "served_blocks_total": "Blocks served to other nodes.",
        "servings_expired_total": "Pins for other nodes that expired unreleased.",
        "locates_total": "Location queries to the index.",
        "grants_refused_total": "Credits refused because every slot is leased or granted.",
        "lease_asks_total": "Lookups by engines.",
        "leases_expired_total": "Leases that expired unreleased.",
        "pins_refused_total": "Blocks present, but pin limit of the requester reached.",
        "prepares_total": "Requests of routers to bring blocks to dram ahead of time.",
        "prepared_blocks_total": "Blocks that were read from disk or sought elsewhere for routers.",
        "protocol_refusals_total": "Engines refused or disconnected for a protocol error.",
        "sessions_opened_total": "Sessions of engines opened.",
        "shadow_blocks_total": "Blocks recomputed by shadow checks.",
        "shadow_blocks_diverged_total": "Recomputed blocks that differed from the cached ones.",
        "traced_requests_total{result}": "Requests exported as traces (--trace), or dropped: the"
        " collector is slow or fails.",
        "slots_quarantined_total": "Slots quarantined: socket of a living writer closed.",
        "stale_slots_total": "Slots in messages of engines that no longer belonged to the sender.",
        "stores_dropped_total": "Credits returned unused, and stores without a free slot.",
        "stores_joined_total": "Stores of blocks that existed already.",
        "stores_sealed_total": "Block shards stored.",
    }
)
INDEX_METRICS: Final = _rows(
    {
        "index_info{version}": "Always 1; only of a separate index.",
        "index_entries": "Block locations in the index.",
        "index_blocks": "Distinct blocks in the index.",
        "index_memory_bytes": "Memory of the tables.",
        "index_nodes{trust}": "Nodes by trust: 'exact' (in sync), catching-up, stale, out"
        " (unreachable).",
        "index_feeds": "Open streams of nodes.",
        "index_store_up": "1 while --store answers.",
        "index_watchers": "Open Watch calls.",
        "index_evictions_total": "Locations evicted because the index was full.",
        "index_matches_total": "Match queries answered.",
        "index_store_failures_total": "Failures of the shared store (--store).",
        "index_words_total": "Messages of nodes: updates, heartbeats, parts of snapshots.",
        "index_keys_told_total": "Keys in those messages.",
        "index_snapshots_asked_total": "Snapshots requested from nodes.",
        "index_words_refused_total": "Malformed messages of nodes.",
        "index_feeds_refused_total": "Streams refused: certificate of another node, or none.",
        "index_watchers_dropped_total": "Watch calls closed because the caller did not read.",
        "index_calls_refused_total": "Calls refused because the caller had too many open.",
    }
)
"""Metrics of a replica of the index, by itself or inside a node."""
ROUTER_METRICS: Final = _rows(
    {
        "router_info{version}": "Always 1.",
        "router_policy_refused": "1: the policy file was refused at its last reload.",
        "router_requests_total{outcome}": "Requests ended: done, refused (4xx, or a body that is"
        " invalid), aborted by the client, broken (off by the engine), failed (its last answer), or"
        " the reason of a rejection.",
        "router_retries_total": "Attempts that failed before the first byte.",
        "router_splits_total{reason}": "Attempts by where the prompt is computed and why: remote"
        " (long, busy-decode) or by the engine that decodes (short, prefill-queue, fell-back, off,"
        " no-prefillers).",
        "router_prefills_total{result}": "Legs at prefillers: done, failed, refused (4xx), useless"
        " (an answer without parameters), aborted.",
        "router_worker_role{worker,role}": "1: the role in effect (prefill, decode, both); with"
        " role=any, that of the planner.",
        "router_role_changes_total{pool,role}": "Workers that the planner gave this role.",
        "router_races_total{result}": "Requests sent to a second worker (begun), and ends of one of"
        " the two attempts: slower, failed.",
        "router_prefill_waiting{pool}": "Remote prefills that wait for a prefiller.",
        "router_prefill_threshold_tokens{pool}": "Uncached tokens from which a prefill is remote.",
        "router_in_flight": "Requests under way.",
        "router_held": "Requests that wait for a decision.",
        "router_ttft_seconds{kind}": "Time to the first token of streamed answers, from the arrival"
        " of the request: predicted when its worker was chosen, and achieved, of the same"
        " requests.",
        "router_peers": "Other routers whose requests in flight are counted.",
        "router_prepares_total{reason,result}": "Requests to nodes to bring blocks to dram ahead of"
        " time: begun, there (all in dram), nothing (not found), refused, failed.",
        "router_prepared_blocks_total{reason,source}": "Blocks that nodes began to bring, from disk"
        " (file) or another node.",
        "router_pins": "Pins of clients in effect.",
        "router_sessions": "Sessions whose pool and worker are remembered.",
        "router_connections": "Open connections of clients.",
        "router_connections_refused_total": "Idle connections closed to make room for new ones.",
        "router_workers{state}": "Workers by state: new (never reached), up, late (a probe is),"
        " load-only (keys differ), half-open or open (circuit breaker), draining, down (refused,"
        " unhealthy or silent).",
        "router_worker_requests_total{worker}": "Attempts at the worker.",
        "router_worker_failures_total{worker}": "Failed attempts at the worker, whatever the cause;"
        " a refusal (4xx, 501) is none.",
        "router_worker_in_flight{worker}": "Attempts under way at the worker.",
        "router_worker_cached_tokens_total{worker}": "Prompt tokens cached, as the engine reports.",
        "router_worker_prompt_tokens_total{worker}": "All prompt tokens of the same requests.",
        "router_worker_predicted_tokens_total{worker}": "Prompt tokens that the index led to expect"
        " cached, of the same requests.",
        "router_picks_total{outcome}": "Requests of the endpoint picker ended, as above; elsewhere:"
        " served by a fall-back.",
        "router_rendered_total{source}": "Prompts by the source of their tokens: ids in the"
        " request, local tokenizer, engine, none in time.",
        "router_index_matches_total": "Match queries to the index.",
        "router_index_late_total": "Match queries without an answer in time.",
        "router_index_used": "0 while the index is not reached or fails, and is left out.",
        "router_saturation{pool,cause}": "Saturation of a pool, 0 to 1, for autoscalers: the mean"
        " of its workers.",
        "router_desired_replicas{pool,role}": "Workers that the load of a pool needs.",
        "router_traced_requests_total{result}": "Requests exported as traces (--trace), or dropped:"
        " the collector is slow or fails.",
        "router_receipts_total": "Receipts written.",
        "router_receipts_failed_total": "Receipts that could not be written.",
    }
)
"""Metrics of a router."""
BY_NAME: Final = {metric.name: metric for metric in (*METRICS, *INDEX_METRICS, *ROUTER_METRICS)}

Buckets = tuple[Mapping[float, int], float]
"""(count up to each bound of which the last is infinite, total) of a histogram."""
Values = dict[str, float | Mapping[Any, float] | Mapping[Any, Buckets]]
"""Values of listed metrics, by name without `kvstore_`: the one value of a metric without labels,
else values by label, or by a tuple of several labels."""


def families(values: Values) -> Iterator[Family]:
    """The families of these metrics, for prometheus_client."""
    for name, its in values.items():
        metric = BY_NAME[f"kvstore_{name}"]
        made: Family = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
        add: Any = made.add_metric
        for label, value in (its if isinstance(its, Mapping) else {(): its}).items():
            labels = label if isinstance(label, tuple) else (label,)
            if isinstance(value, tuple):
                upto = value[0].items()
                counts = [("+Inf" if math.isinf(b) else repr(b), float(n)) for b, n in upto]
                add(labels, counts, value[1])
            else:
                add(labels, value)
        yield made


def copied(values: Values) -> Values:
    """These values for another thread, unchanged while their counters go on."""
    kept: Any = {k: {**its} if isinstance(its, Mapping) else its for k, its in values.items()}
    return cast("Values", kept)


def with_absent(found: Values) -> Values:
    """These values of a node, and its metrics that are not among them, without a value."""
    names = (metric.name.removeprefix("kvstore_") for metric in METRICS)
    return found | {name: {} for name in names if name not in found}


# ── durations ─────────────────────────────────────────────────────────────────────────────────────
# Bounded memory and no locks: one thread adds. A percentile is at most 41 % above the true one,
# which is the width of a bucket. /metrics has wider ones, `TRANSFERS` and `TTFTS`: series cost an
# operator more than counts cost us.

BUCKETS: Final = 56
"""Number of upper bounds, from 1 µs on, among them 1 s; the last is 181 s, whose bucket counts
longer durations, too.
"""
BOUNDS_NS: Final = tuple(round(NS_PER_S * 2 ** (n / 2 - 20)) for n in range(BUCKETS))
STEPS: Final = range(0, 46, 4)
"""Buckets of /metrics for steps of a node: 1 µs, and each factor of four above it, to 4 s."""
TRANSFERS: Final = range(14, BUCKETS - 1, 4)
"""Buckets in /metrics for transfers: 122 µs to 128 s."""
TTFTS: Final = range(28, BUCKETS - 1, 2)
"""Buckets in /metrics for times to the first token: 16 ms, and each factor of two above it, to 128
s.
"""


class Timings:
    """Counts of durations of one kind, and bytes moved in them."""

    __slots__ = ("count", "counts", "size_bytes", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.count = 0
        self.total_ns = 0
        self.size_bytes = 0

    def add(self, took_ns: int, size_bytes: int = 0) -> None:
        """Count one duration, and the bytes moved in it."""
        self.counts[min(bisect.bisect_left(BOUNDS_NS, took_ns), BUCKETS - 1)] += 1
        self.count += 1
        self.total_ns += took_ns
        self.size_bytes += size_bytes

    def percentile_ns(self, percent: float) -> int:
        """Duration below which `percent` of all lie, rounded up to a bucket's bound; 0: nothing was
        added.
        """
        wanted, seen = math.ceil(self.count * percent / 100), 0
        for bound, count in zip(BOUNDS_NS, self.counts, strict=True):
            seen += count
            if seen >= wanted > 0:
                return bound
        return 0

    def buckets(self, of: range) -> Buckets:
        """(upper bound in seconds → durations up to it, sum in seconds) for /metrics, with these
        buckets and one of all.
        """
        found = {BOUNDS_NS[n] / NS_PER_S: sum(self.counts[: n + 1]) for n in of}
        return found | {math.inf: self.count}, self.total_ns / NS_PER_S

    @property
    def bytes_per_s(self) -> int:
        """Rate over all durations; 0: nothing was added."""
        return int(self.size_bytes * NS_PER_S / self.total_ns) if self.total_ns else 0
