"""Every metric of kvstore, in one table: name, kind, unit, labels, help.

Nothing exports a number that is not listed here, and the documentation is made from the same rows.
Covers names and families of the node. Does not cover: where the values come from
(`kvstore.node.pages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metric(NamedTuple):
    """One row. The name ends in the unit, counters in ``_total`` as well."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str


METRICS: Final = (
    Metric("kvstore_ready_bytes", "gauge", "bytes", ("tier",), "Bytes with allocated pages."),
    Metric(
        "kvstore_used_bytes",
        "gauge",
        "bytes",
        ("tier",),
        "Bytes in use: slots with a block; on disk whole segments, the open one at its full size.",
    ),
    Metric("kvstore_capacity_bytes", "gauge", "bytes", ("tier",), "Capacity of the tier."),
    Metric("kvstore_connections", "gauge", "", (), "Open sockets of engines."),
    Metric("kvstore_connections_accepted_total", "counter", "", (), "Sockets accepted."),
    Metric(
        "kvstore_connections_refused_total",
        "counter",
        "",
        ("reason",),
        "Sockets refused: uid not allowed, node full, bad hello, no hello in time.",
    ),
    Metric(
        "kvstore_connections_ended_total",
        "counter",
        "",
        ("reason",),
        "Attached sockets that ended: closed by the peer, protocol error, outbox overflow, process"
        " exited, closed by the engine core, failure of the node.",
    ),
    Metric(
        "kvstore_datagrams_total", "counter", "", ("direction",), "Datagrams received and sent."
    ),
    Metric(
        "kvstore_step_seconds",
        "histogram",
        "seconds",
        (),
        "Time from a batch of events to its last executed command.",
    ),
    Metric(
        "kvstore_loop_failures_total",
        "counter",
        "",
        (),
        "Caught exceptions of the loop: bugs.",
    ),
    Metric(
        "kvstore_heartbeat_gap_seconds",
        "gauge",
        "seconds",
        (),
        "Longest gap between two heartbeats since the start; at 0.25 engines stop caching.",
    ),
    Metric("kvstore_queries_total", "counter", "", (), "Queries by inspect, explain and /metrics."),
    *(
        Metric(f"kvstore_event_{name}_total", "counter", "", (), text)
        for name, text in (
            ("batches", "Batches of KV events published (--events)."),
            ("keys_lost", "Block changes not published because the publisher fell behind."),
            ("replays", "Replays and snapshots of KV events requested."),
            ("requests_refused", "Malformed requests to the replay socket."),
        )
    ),
    Metric("kvstore_info", "gauge", "", ("version", "incarnation"), "Always 1."),
    Metric(
        "kvstore_restarts_total",
        "counter",
        "",
        (),
        "Earlier processes of this node (crashes, upgrades); other counters restart with each.",
    ),
    Metric(
        "kvstore_away_seconds",
        "gauge",
        "seconds",
        (),
        "Gap from the end of the previous process until this one served; 0: first process.",
    ),
    Metric("kvstore_blocks", "gauge", "", ("tier",), "Block shards in the tier."),
    Metric(
        "kvstore_slots",
        "gauge",
        "",
        ("state",),
        "Slots by state: sealed (with a block), leased (being read), granted (may be written),"
        " quarantined (the writer may still write).",
    ),
    Metric(
        "kvstore_file_budget_left_bytes",
        "gauge",
        "bytes",
        (),
        "Write budget left of --file-writes-per-day; absent without it.",
    ),
    *(
        Metric(f"kvstore_{name}_total", "counter", unit, ("tier",), text)
        for name, unit, text in (
            ("scrubbed_blocks", "", "Blocks verified by the background scrub."),
            ("scrubbed_bytes", "bytes", "Bytes verified by the background scrub."),
            ("scrub_bad", "", "Blocks that failed verification by the scrub and were dropped."),
        )
    ),
    Metric(
        "kvstore_scrub_age_seconds",
        "gauge",
        "seconds",
        ("tier",),
        "Age of the last complete scrub of the tier; absent before the first.",
    ),
    Metric(
        "kvstore_shadow_error_max",
        "gauge",
        "",
        (),
        "Largest relative error between a cached block and its recomputation by a shadow check.",
    ),
    Metric(
        "kvstore_spaces_off",
        "gauge",
        "",
        ("tier",),
        "Models switched off by a shadow check: in the disk tier (file), or in all tiers.",
    ),
    Metric(
        "kvstore_breaker_open",
        "gauge",
        "",
        ("tier", "direction"),
        "Circuit breaker of disk reads or writes: 0 closed, 1 open, 0.5 during a probe.",
    ),
    *(
        Metric(f"kvstore_quota_{name}_bytes", "gauge", "bytes", ("quota",), text)
        for name, text in (
            ("promised", "Dram guaranteed by --quota, by model or tenant."),
            ("used", "Dram used by a model or tenant; may exceed its guarantee."),
        )
    ),
    *(
        Metric(f"kvstore_{name}_total", "counter", unit, (), text)
        for name, unit, text in (
            ("fetch_damaged", "", "Fetched blocks that failed verification and were dropped."),
            ("fetch_not_kept", "", "Blocks that the serving node evicted during the fetch."),
            ("fetched_bytes", "bytes", "Bytes fetched from other nodes."),
            ("leased_bytes", "bytes", "Bytes leased to engines for loading."),
            ("lent_bytes", "bytes", "Bytes served to other nodes."),
            ("stored_bytes", "bytes", "Bytes stored by engines."),
            ("mover_restarts", "", "Restarts of the transfer worker."),
            ("mover_refused", "", "Reads by other nodes refused: connections used up."),
        )
    ),
    Metric(
        "kvstore_transfer_seconds",
        "histogram",
        "seconds",
        ("kind", "backend"),
        "Duration of fetches from other nodes: request (ask), transfer (move), checksum (verify),"
        " all of it (fetch).",
    ),
    Metric(
        "kvstore_engine_blocks",
        "gauge",
        "",
        (),
        "Blocks in the engines' own prefix caches, from their KV events.",
    ),
    *(
        Metric(f"kvstore_engine_events_{name}_total", "counter", "", (), text)
        for name, text in (
            ("batches", "Batches of KV events received from engines."),
            ("replays", "Replays requested from engines."),
            ("voids", "Times the blocks of an engine were dropped: gone, or a gap."),
            ("refused", "Malformed batches of KV events."),
        )
    ),
    Metric(
        "kvstore_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time at which the certificate in use expires (of the node, or of a separate index);"
        " absent without TLS.",
    ),
    Metric("kvstore_feeds", "gauge", "", (), "Index replicas connected and receiving updates."),
    *(
        Metric(f"kvstore_feed_{name}_total", "counter", "", (), text)
        for name, text in (
            ("deltas", "Updates sent, to all replicas together."),
            ("snapshots", "Snapshots sent to replicas."),
            ("keys_lost", "Key changes not sent as updates; a snapshot carried them."),
            ("streams", "Streams to replicas opened."),
        )
    ),
    Metric("kvstore_sessions", "gauge", "", (), "Engines whose ranks are all attached."),
    Metric(
        "kvstore_engines_unserved",
        "gauge",
        "",
        (),
        "Engines that are not served: cache on a GPU, refused, or ranks missing. 'kvstore inspect"
        " nodes' shows the reason.",
    ),
    Metric("kvstore_leases", "gauge", "", (), "Runs of blocks being read by engines."),
    *(
        Metric(f"kvstore_{name}_total", "counter", "", (), text)
        for name, text in (
            ("blocks_distrusted", "Blocks dropped because the checksum of a reader failed."),
            ("blocks_kept", "Block shards kept from the previous process of this node."),
            ("blocks_verified", "Kept blocks verified by their first reader."),
            ("blocks_granted", "Credits granted to engines: blocks they may store."),
            ("blocks_hit", "Blocks found and leased."),
            ("blocks_missed", "Blocks looked up and not found."),
            ("evictions", "Slots evicted."),
            ("file_blocks_crowded", "Blocks on disk dropped because the node's table was full."),
            ("file_blocks_damaged", "Blocks on disk that failed verification."),
            ("file_blocks_not_admitted", "Blocks not written: no second request yet."),
            ("file_blocks_over_budget", "Blocks not written or kept: write budget used up."),
            ("file_blocks_read", "Blocks read from disk and verified."),
            ("file_blocks_unread", "Blocks requested from disk and not delivered."),
            ("file_blocks_written", "Blocks written to disk."),
            ("file_reads_late", "Disk reads that ended after their deadline."),
            ("file_writes_dropped", "Blocks not written to disk: disk busy, full or failing."),
            ("fetch_blocks_lost", "Blocks requested from other nodes and not delivered."),
            ("fetched_blocks", "Blocks fetched from other nodes and verified."),
            ("loan_blocks_changed", "Blocks that changed while they were served."),
            ("loaned_blocks", "Blocks served to other nodes."),
            ("loans_expired", "Pins for other nodes that expired unreleased."),
            ("locates", "Location queries to the index."),
            ("grants_refused", "Credits refused because every slot is leased or granted."),
            ("lease_asks", "Lookups by engines."),
            ("leases_expired", "Leases that expired unreleased."),
            ("pins_refused", "Blocks present, but pin limit of the requester reached."),
            ("protocol_refusals", "Engines refused or disconnected for a protocol error."),
            ("sessions_opened", "Sessions of engines opened."),
            ("shadow_blocks", "Blocks recomputed by shadow checks."),
            ("shadow_blocks_diverged", "Recomputed blocks that differed from the cached ones."),
            ("slots_quarantined", "Slots quarantined: socket of a living writer closed."),
            ("stale_slots", "Slots in messages of engines that no longer belonged to the sender."),
            ("stores_dropped", "Credits returned unused, and stores without a free slot."),
            ("stores_joined", "Stores of blocks that existed already."),
            ("stores_sealed", "Block shards stored."),
        )
    ),
)
INDEX_METRICS: Final = (
    Metric("kvstore_index_info", "gauge", "", ("version",), "Always 1; only of a separate index."),
    Metric("kvstore_index_entries", "gauge", "", (), "Block locations in the index."),
    Metric("kvstore_index_blocks", "gauge", "", (), "Distinct blocks in the index."),
    Metric("kvstore_index_memory_bytes", "gauge", "bytes", (), "Memory of the tables."),
    Metric(
        "kvstore_index_nodes",
        "gauge",
        "",
        ("trust",),
        "Nodes by trust: 'exact' (in sync), catching-up, stale, out (unreachable).",
    ),
    Metric("kvstore_index_feeds", "gauge", "", (), "Open streams of nodes."),
    Metric("kvstore_index_store_up", "gauge", "", (), "1 while --store answers."),
    Metric("kvstore_index_watchers", "gauge", "", (), "Open Watch calls."),
    *(
        Metric(f"kvstore_index_{name}_total", "counter", "", (), text)
        for name, text in (
            ("evictions", "Locations evicted because the index was full."),
            ("matches", "Match queries answered."),
            ("store_failures", "Failures of the shared store (--store)."),
            ("words", "Messages of nodes: updates, heartbeats, parts of snapshots."),
            ("keys_told", "Keys in those messages."),
            ("snapshots_asked", "Snapshots requested from nodes."),
            ("words_refused", "Malformed messages of nodes."),
            ("feeds_refused", "Streams refused: certificate of another node, or none."),
            ("watchers_dropped", "Watch calls closed because the caller did not read."),
            ("calls_refused", "Calls refused because the caller had too many open."),
        )
    ),
)
"""Of a replica of the index, by itself or inside a node."""
BY_NAME: Final = {metric.name: metric for metric in (*METRICS, *INDEX_METRICS)}

Sample = tuple[Sequence[str], float]


def family(name: str, samples: Iterable[Sample]) -> Family:
    """The family of a listed counter or gauge with its (label values, value) samples."""
    metric = BY_NAME[name]
    made: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        made = CounterMetricFamily(name, metric.help, labels=metric.labels)
    else:
        assert metric.kind == "gauge", f"{name} is a {metric.kind}"
        made = GaugeMetricFamily(name, metric.help, labels=metric.labels)
    for labels, value in samples:
        made.add_metric(labels, value)
    return made


def absent(found: Iterable[Family]) -> list[Family]:
    """The node's families that are not among these, without a value."""
    names = {each.name for each in found}
    return [
        histograms(metric.name, bounds=(), rows=())
        if metric.kind == "histogram"
        else family(metric.name, ())
        for metric in METRICS
        if metric.name.removesuffix("_total") not in names  # as prometheus_client names counters
    ]


def histogram(
    name: str, *, bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """The family of a listed histogram without labels; `counts` has one more than `bounds`."""
    return histograms(name, bounds=bounds, rows=[((), counts, total)])


def histograms(
    name: str,
    *,
    bounds: Sequence[float],
    rows: Iterable[tuple[Sequence[str], Sequence[int], float]],
) -> HistogramMetricFamily:
    """The family of a listed histogram with its (label values, counts, total) rows."""
    metric = BY_NAME[name]
    assert metric.kind == "histogram", f"{name} is a {metric.kind}"
    made = HistogramMetricFamily(name, metric.help, labels=metric.labels)
    for labels, counts, total in rows:
        assert len(counts) == len(bounds) + 1
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(repr, bounds), "+Inf"), counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        made.add_metric(labels, buckets, total)
    return made
