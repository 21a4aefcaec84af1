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
    Metric(
        "kvstore_ready_bytes", "gauge", "bytes", ("tier",), "Bytes of the tier whose pages exist."
    ),
    Metric(
        "kvstore_used_bytes",
        "gauge",
        "bytes",
        ("tier",),
        "Bytes of slots that hold a block; on disk: of whole segments, the open one at its full"
        " length.",
    ),
    Metric("kvstore_capacity_bytes", "gauge", "bytes", ("tier",), "Bytes the tier will have."),
    Metric("kvstore_connections", "gauge", "", (), "Sockets of engines that are open now."),
    Metric("kvstore_connections_accepted_total", "counter", "", (), "Sockets ever accepted."),
    Metric(
        "kvstore_connections_refused_total",
        "counter",
        "",
        ("reason",),
        "Newcomers turned away: uid not allowed, node full, bad hello, no hello in time.",
    ),
    Metric(
        "kvstore_connections_ended_total",
        "counter",
        "",
        ("reason",),
        "Attached sockets that ended: closed by the peer, protocol broken, outbox overflow,"
        " process exited, hung up by the engine core, failure of the node.",
    ),
    Metric(
        "kvstore_datagrams_total", "counter", "", ("direction",), "Datagrams received and sent."
    ),
    Metric(
        "kvstore_step_seconds",
        "histogram",
        "seconds",
        (),
        "Time from a batch of events to the last command carried out.",
    ),
    Metric("kvstore_loop_failures_total", "counter", "", (), "Bugs caught by the node's loop."),
    Metric(
        "kvstore_heartbeat_gap_seconds",
        "gauge",
        "seconds",
        (),
        "Longest time between two heartbeats since the start; engines give up at 0.25.",
    ),
    Metric("kvstore_queries_total", "counter", "", (), "Questions of inspect and /metrics."),
    *(
        Metric(f"kvstore_event_{name}_total", "counter", "", (), text)
        for name, text in (
            ("batches", "Batches of KV events published (--events)."),
            ("keys_lost", "Block changes that were not published: the publisher fell behind."),
            ("replays", "Replays and snapshots of KV events that were asked for."),
            ("requests_refused", "Requests to the replay socket that were none."),
        )
    ),
    Metric("kvstore_info", "gauge", "", ("version", "incarnation"), "Always 1."),
    Metric(
        "kvstore_restarts_total",
        "counter",
        "",
        (),
        "Node processes before this one: crashes, upgrades. Other counters begin with a process.",
    ),
    Metric(
        "kvstore_away_seconds",
        "gauge",
        "seconds",
        (),
        "From the end of the process before this one until this one served; 0: it is the first.",
    ),
    Metric("kvstore_blocks", "gauge", "", ("tier",), "Block shards held."),
    Metric(
        "kvstore_slots",
        "gauge",
        "",
        ("state",),
        "Slots that hold a block (sealed; leased: being read), may be written (granted), or wait"
        " for their writer to be proven quiet (quarantined).",
    ),
    Metric(
        "kvstore_file_budget_left_bytes",
        "gauge",
        "bytes",
        (),
        "What the budget lets be written to disk now; absent without --file-writes-per-day.",
    ),
    Metric(
        "kvstore_scrubbed_blocks_total",
        "counter",
        "",
        ("tier",),
        "Blocks verified by the background scrub.",
    ),
    Metric(
        "kvstore_scrubbed_bytes_total",
        "counter",
        "bytes",
        ("tier",),
        "Bytes verified by the background scrub.",
    ),
    Metric(
        "kvstore_scrub_bad_total",
        "counter",
        "",
        ("tier",),
        "Blocks that the scrub found to be something else than was stored, and dropped.",
    ),
    Metric(
        "kvstore_scrub_age_seconds",
        "gauge",
        "seconds",
        ("tier",),
        "Since the scrub had seen all of the tier; absent before that.",
    ),
    Metric(
        "kvstore_shadow_error_max",
        "gauge",
        "",
        (),
        "Largest distance of a block that was computed again from the one held, relative to its"
        " size, since the start.",
    ),
    Metric(
        "kvstore_spaces_off",
        "gauge",
        "",
        ("tier",),
        "Models switched off by a shadow check: in the disk tier, or in all.",
    ),
    Metric(
        "kvstore_breaker_open",
        "gauge",
        "",
        ("tier", "direction"),
        "Whether reads or writes are refused for a while, after failures: 0 no, 1 yes, 0.5 while"
        " one is tried.",
    ),
    *(
        Metric(f"kvstore_quota_{name}_bytes", "gauge", "bytes", ("quota",), text)
        for name, text in (
            ("promised", "What --quota promises of dram, by model or tenant."),
            ("used", "Slots of dram that its engines have; may be more than is promised."),
        )
    ),
    *(
        Metric(f"kvstore_{name}_total", "counter", unit, (), text)
        for name, unit, text in (
            ("fetch_damaged", "", "Blocks of other nodes that failed their checksum."),
            ("fetch_not_kept", "", "Blocks that other nodes did not keep until they were read."),
            ("fetched_bytes", "bytes", "Bytes read from other nodes."),
            ("leased_bytes", "bytes", "Bytes of blocks leased to engines, which load them."),
            ("lent_bytes", "bytes", "Bytes served to other nodes."),
            ("stored_bytes", "bytes", "Bytes that engines stored."),
            ("mover_restarts", "", "Restarts of the transfer worker."),
            ("mover_refused", "", "Peers refused by the transfer worker: no room."),
        )
    ),
    Metric(
        "kvstore_transfer_seconds",
        "histogram",
        "seconds",
        ("kind", "backend"),
        "Fetching from other nodes: until they answered (ask), the transfer (move), checksums"
        " (verify), all of it (fetch).",
    ),
    Metric(
        "kvstore_engine_blocks", "gauge", "", (), "Blocks that engines hold in their own memory."
    ),
    *(
        Metric(f"kvstore_engine_events_{name}_total", "counter", "", (), text)
        for name, text in (
            ("batches", "Batches of KV events that engines published."),
            ("replays", "Times an engine was asked for batches again."),
            ("voids", "Times that all an engine held was given up: it went, or a gap stayed."),
            ("refused", "Batches of engines that could not be read."),
        )
    ),
    Metric(
        "kvstore_certificate_expires_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "When the certificate that this node, or this index by itself, was started with ends, in"
        " Unix time; absent without TLS.",
    ),
    Metric("kvstore_feeds", "gauge", "", (), "Replicas of the index that are being told."),
    *(
        Metric(f"kvstore_feed_{name}_total", "counter", "", (), text)
        for name, text in (
            ("deltas", "Messages about changes, to all replicas together."),
            ("snapshots", "Times a replica was told everything."),
            ("keys_lost", "Keys that were not told as they changed: snapshots told them."),
            ("streams", "Streams to replicas that were begun."),
        )
    ),
    Metric("kvstore_sessions", "gauge", "", (), "Engines whose ranks are all attached."),
    Metric(
        "kvstore_engines_unserved",
        "gauge",
        "",
        (),
        "Engines that get nothing from this node: their cache is on a GPU, they are refused, or"
        " ranks are missing. 'kvstore inspect nodes' says why.",
    ),
    Metric("kvstore_leases", "gauge", "", (), "Runs of blocks that engines are reading."),
    *(
        Metric(f"kvstore_{name}_total", "counter", "", (), text)
        for name, text in (
            ("blocks_distrusted", "Blocks forgotten because a reader's checksum failed."),
            ("blocks_kept", "Block shards in memory taken over from the process before this one."),
            ("blocks_verified", "Blocks kept over a restart and found right by their reader."),
            ("blocks_granted", "Credits given: blocks an engine may store."),
            ("blocks_hit", "Blocks looked up and leased."),
            ("blocks_missed", "Blocks looked up and not there."),
            ("evictions", "Slots emptied to make room."),
            (
                "file_blocks_crowded",
                "Blocks on disk forgotten, or not found again: the node's table was full.",
            ),
            ("file_blocks_damaged", "Blocks on disk that were not what was stored there."),
            (
                "file_blocks_not_admitted",
                "Times a block was not written to disk because it was seen for the first time.",
            ),
            (
                "file_blocks_over_budget",
                "Times a block was not written, or not kept, because the day's budget is used up.",
            ),
            ("file_blocks_read", "Blocks promoted from disk, verified."),
            ("file_blocks_unread", "Blocks on disk that were asked for and did not come."),
            ("file_blocks_written", "Blocks written to disk."),
            ("file_reads_late", "Reads from disk that nobody could wait for."),
            ("file_writes_dropped", "Blocks not written to disk: busy, full, failing."),
            ("fetch_blocks_lost", "Blocks of other nodes that were asked for and did not come."),
            ("fetched_blocks", "Blocks brought from other nodes, verified."),
            (
                "loan_blocks_changed",
                "Blocks served to other nodes and evicted before the transfer ended.",
            ),
            ("loaned_blocks", "Blocks served to other nodes."),
            ("loans_expired", "Transfers to other nodes that never reported their end."),
            ("locates", "Questions to the index where blocks are."),
            ("grants_refused", "Times no credit could be given: everything is leased or granted."),
            ("lease_asks", "Lookups."),
            ("leases_expired", "Leases that ran out unreleased."),
            ("pins_refused", "Blocks present and not leased or served: the pin share is used up."),
            ("protocol_refusals", "Peers refused or hung up on by the engine core."),
            ("sessions_opened", "Sessions opened."),
            ("shadow_blocks", "Blocks that engines computed again to compare with what was held."),
            ("shadow_blocks_diverged", "Of those, blocks that held other values."),
            ("slots_quarantined", "Slots whose writer hung up while its process lived."),
            ("stale_slots", "Slots in seals and drops that were no longer the sender's."),
            ("stores_dropped", "Credits given back unused, or stores without room."),
            ("stores_joined", "Stores of blocks that were there already."),
            ("stores_sealed", "Block shards stored."),
        )
    ),
)
INDEX_METRICS: Final = (
    Metric("kvstore_index_info", "gauge", "", ("version",), "1, of a replica by itself."),
    Metric("kvstore_index_entries", "gauge", "", (), "Blocks in the index, by holder."),
    Metric("kvstore_index_blocks", "gauge", "", (), "Distinct blocks in the index."),
    Metric("kvstore_index_memory_bytes", "gauge", "bytes", (), "What the tables of it take."),
    Metric("kvstore_index_nodes", "gauge", "", ("trust",), "Nodes, by trust."),
    Metric("kvstore_index_feeds", "gauge", "", (), "Streams of nodes that are open."),
    Metric("kvstore_index_store_up", "gauge", "", (), "1 while where it is kept answers."),
    Metric("kvstore_index_watchers", "gauge", "", (), "Callers that watch."),
    *(
        Metric(f"kvstore_index_{name}_total", "counter", "", (), text)
        for name, text in (
            ("evictions", "Blocks that left because the index was full."),
            ("matches", "Prompts looked up."),
            ("store_failures", "Times where it is kept went away."),
            ("words", "Deltas, beats and parts of snapshots that nodes said."),
            ("keys_told", "Keys that were in them."),
            ("snapshots_asked", "Times a node was asked for all it holds."),
            ("words_refused", "Words of nodes that were malformed."),
            ("feeds_refused", "Streams whose certificate is of another node, or none."),
            ("watchers_dropped", "Callers that did not read what they watch."),
            ("calls_refused", "Calls whose caller had as many open as it may."),
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
