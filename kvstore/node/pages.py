"""The pages of a node, and the values of all its metrics: the state of the loop, asked on the loop.

The page for people shows rows of `inspect` and `explain`, and counters of /metrics.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvstore.engine.engine import Engine
from kvstore.engine.why.curve import BOUNDS_S, Ages
from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import SPACE_DIGITS
from kvstore.engine.why.ledger import Ledger
from kvstore.engine.why.report import NO_BUDGET, TierReport
from kvstore.errors import NodeBusy
from kvstore.net.http import Page, PageMaker, metrics_page, text_page
from kvstore.net.site import REQUESTS_SHOWN, make_site, picked
from kvstore.node.driver import Driver
from kvstore.node.files import FileEnd
from kvstore.obs import reasons
from kvstore.obs.metrics import STEPS, Buckets, Values, copied, with_absent
from kvstore.peers.changes import EventCounters
from kvstore.supervisor.handover import LoadedCode
from kvstore.types import Incarnation, SpaceId, Tier as TierName
from kvstore.units import MS_PER_S, NS_PER_S

REQUESTS_AT_ONCE: Final = 10
"""Rows of the page's list in one question to the loop: 20 ms where each has 256 ranges."""
HEALTH_TIMEOUT_S: Final = 0.25
METRICS_TIMEOUT_S: Final = 1.0
OFF_LABELS: Final = {"file": TierName.FILE, "all": None}
SLOT_STATES: Final = ("sealed", "granted", "quarantined", "leased")
NOT_WRITTEN: Final = {
    "file_blocks_not_admitted": "admission",
    "file_blocks_over_budget": "budget",
    "file_writes_dropped": "disk",
}
"""Counter → reason, of blocks that are not written to disk."""
STORED: Final = "stored_bytes"
"""Counter that has labels, and so is in the ledger, too."""
BREAKER_LEVELS: Final = {"closed": 0.0, "half-open": 0.5, "open": 1.0}
FLOWS: Final = (
    *("stored_bytes", "leased_bytes", "evictions", "file_blocks_written", "file_blocks_read"),
    *("fetched_blocks", "served_bytes", "pushed_bytes", "push_blocks_landed"),
)
"""Counters whose rates the page shows."""
LISTED: Final = (
    *("number", "label", "tenant", "engine_id", "ended_ms_ago", "prompt_tokens", "local_tokens"),
    *("loaded_tokens", "file_tokens", "peer_tokens", "lookup_us", "promotion_us", "load_us"),
)
"""Fields of a request in the page's list."""


@dataclass(eq=False)
class NodeCollector:
    """The metrics of one node, read between two steps so that they belong together."""

    driver: Driver
    incarnation: Incarnation
    code: LoadedCode
    away_ns: int = 0
    """Time from the end of the process before until this one served."""

    def collect(self) -> Values:
        """All metrics of the node; those of parts that it lacks are named, without a value.

        Raises NodeBusy when the loop does not answer.
        """
        found = self.driver.query(
            lambda engine: copied(self._values_of_process(engine) | _values_of_engine(engine)),
            timeout_s=METRICS_TIMEOUT_S,
        )
        member, traces = self.driver.executor.member, self.driver.executor.traces
        found |= member.metrics() if member is not None else {}
        if traces is not None:
            found["traced_requests_total"] = traces.counts
        return with_absent(found) | (member.index_metrics() if member is not None else {})

    @property
    def refused(self) -> str:
        """Reason of the last recent refusal of a process."""
        return self.driver.executor.attach.counters.refused.trouble(time.monotonic_ns())

    def _values_of_process(self, engine: Engine) -> Values:
        hbm = {tier.tier: tier.capacity_bytes for tier in engine.tiers()[2:]}
        loop, parts = self.driver.counters, self.driver.executor
        door, tier = parts.attach.counters, parts.tier
        events = parts.publisher.counters if parts.publisher else EventCounters()
        return {
            "info": {(self.code.version, f"{self.incarnation:016x}"): 1},
            "restart_gap_seconds": self.away_ns / NS_PER_S,
            "ready_bytes": {"dram": tier.ready_bytes, **hbm},
            "capacity_bytes": {"dram": tier.capacity_bytes, **hbm},
            "connections": parts.attach.socket_count,
            "connections_accepted_total": door.accepted,
            "connections_refused_total": door.refused,
            "connections_ended_total": door.ended,
            "datagrams_total": {"received": door.datagrams_received, "sent": door.datagrams_sent},
            "step_seconds": {(): loop.steps.buckets(STEPS)},
            "loop_failures_total": loop.failures,
            "heartbeat_gap_seconds": loop.beat_gap_ns_max / NS_PER_S,
            "queries_total": loop.queries,
            **{f"event_{name}_total": count for name, count in vars(events).items()},
        }


def _values_of_engine(engine: Engine) -> Values:
    (node,), tiers, counters = engine.nodes(), engine.tiers(), engine.counters
    dram, file, *_ = tiers
    quotas = [row for row in engine.quotas() if row.quota]
    has_budget = file.budget_left_bytes != NO_BUDGET
    return {
        "blocks": {tier.tier: tier.blocks for tier in tiers},
        "used_bytes": {tier.tier: tier.used_bytes for tier in tiers},
        "pinned_bytes": {dram.tier: dram.pinned_bytes},
        "slots": {each: getattr(dram, f"slots_{each}") for each in SLOT_STATES},
        "file_budget_left_bytes": file.budget_left_bytes if has_budget else {},
        **_values_of_integrity(tiers[:2], engine.spaces_off()),
        "shadow_error_max": engine.switches.worst_error,
        "quota_promised_bytes": {row.quota: row.promised_bytes for row in quotas},
        "quota_used_bytes": {row.quota: row.used_bytes for row in quotas},
        "restarts_total": node.restarts,
        "sessions": node.sessions,
        "engines_unserved": len(engine.unserved()),
        "leases": node.leases,
        "landing_bytes": engine.grants.landing_bytes(),
        "pushes": engine.push_counts(),
        **_values_of_ledger(engine.ledger),
        "eviction_age_seconds": {
            tier.name.lower(): _age_buckets(ages) for tier, ages in engine.ages.items()
        },
        "expected_hit_ratio": {
            r.capacity: r.hit_ratio for r in engine.curve() if r.hit_ratio is not None
        },
        "file_blocks_not_written_total": {
            why: getattr(counters, name) for name, why in NOT_WRITTEN.items()
        },
        **{
            f"{name}_total": getattr(counters, name)
            for name in counters.__struct_fields__
            if name not in (*NOT_WRITTEN, STORED)
        },
    }


def _values_of_ledger(ledger: Ledger) -> Values:
    found: Values = {"blocks_hit_total": ledger.hits, "blocks_missed_total": ledger.misses}
    for field in ("prompt_tokens", "loaded_tokens", STORED):
        found[f"{field}_total"] = {k: getattr(its, field) for k, its in ledger.accounts.items()}
    for kind in ("saved", "spent", "lost"):
        its_ns = {k: getattr(its, f"{kind}_ns") for k, its in ledger.savings.items()}
        found[f"{kind}_seconds_total"] = {k: ns / NS_PER_S for k, ns in its_ns.items() if ns}
    return found


def _age_buckets(ages: Ages) -> Buckets:
    upto = zip((*BOUNDS_S, math.inf), itertools.accumulate(ages.counts), strict=True)
    return dict(upto), ages.total_ns / NS_PER_S


def _values_of_integrity(
    tiers: Sequence[TierReport], spaces_off: Sequence[tuple[str, SpaceId, TierName | None]]
) -> Values:
    off = {name: sum(tier is kind for *_, tier in spaces_off) for name, kind in OFF_LABELS.items()}
    ages = {tier.tier: tier.scrub_age_ms / MS_PER_S for tier in tiers}
    file = tiers[1]
    return {
        **{
            f"{name}_total": {tier.tier: getattr(tier, name) for tier in tiers}
            for name in ("scrubbed_blocks", "scrubbed_bytes", "scrub_bad")
        },
        "scrub_age_seconds": {tier: age_s for tier, age_s in ages.items() if age_s >= 0},
        "spaces_off": off,
        "breaker_open": {
            ("file", way): BREAKER_LEVELS[getattr(file, way)] for way in ("reads", "writes")
        },
    }


def _trouble(engine: Engine, files: FileEnd | None, refused: str) -> str:
    """Trouble to report on /healthz; empty while all is well."""
    found = [files.trouble] if files is not None and files.trouble else []
    if unserved := engine.unserved():
        more = f" (and {len(unserved) - 1} more)" if len(unserved) > 1 else ""
        found.append(f"engine {unserved[0].engine}{more} is not served: {unserved[0].reason}")
    elif refused:
        found.append(refused)
    if unpinned := engine.unpinned():
        found.append(unpinned)
    off = engine.spaces_off()
    if off:
        tenant, space, tier = off[0]
        digits = space.hex()[:SPACE_DIGITS]
        where = tier.title if tier is not None else "all tiers"
        more = f" (and {len(off) - 1} more)" if len(off) > 1 else ""
        found.append(
            f"space {digits} of tenant {tenant}{more} is switched off in {where}: a shadow"
            f" check found different values; 'kvstore clear --space {digits}' switches it on again"
        )
    return "; ".join(found)


def _state(driver: Driver) -> dict[str, Any]:
    """Sections of the page. Raises NodeBusy."""
    state = driver.query(_sections, timeout_s=METRICS_TIMEOUT_S)
    state["requests"] = [
        picked(row, LISTED)
        | {"outcome": reasons.word(row.outcome), "text": reasons.of_request(row)}
        for row in _latest(driver)
    ]
    if (member := driver.executor.member) is not None:
        state |= {"name": member.node, "transfers": member.transfers()}
    return state


def _sections(engine: Engine) -> dict[str, Any]:
    (node,), ledger, ages = engine.nodes(), engine.ledger, engine.ages
    facts = {"engines": node.sessions, "leases": node.leases, "restarts": node.restarts}
    mean_s = {
        k.name.lower(): a.total_ns / NS_PER_S / max(1, sum(a.counts)) for k, a in ages.items()
    }
    state = {"role": "node", "facts": facts, "tiers": engine.tiers(), "evicted_age_s": mean_s}
    state |= {"hits": dict(ledger.hits), "misses": dict(ledger.misses), "curve": engine.curve()}
    asked = {"blocks_hit": sum(ledger.hits.values()), "blocks_missed": sum(ledger.misses.values())}
    state |= {"savings": engine.savings(), "flows": asked | picked(engine.counters, FLOWS)}
    return state | {"unserved": engine.unserved()}


def _latest(driver: Driver) -> list[RequestReport]:
    """The requests that the page lists, some at a time: the loop serves engines in between."""
    rows = list[RequestReport]()
    while len(rows) < REQUESTS_SHOWN:
        ask = partial(_some, below=rows[-1].number if rows else math.inf)
        found = driver.query(ask, timeout_s=METRICS_TIMEOUT_S)
        rows += found
        if len(found) < REQUESTS_AT_ONCE:
            break
    return rows


def _some(engine: Engine, *, below: float) -> list[RequestReport]:
    return engine.explain.requests("", limit=REQUESTS_AT_ONCE, below=below)


def _story(driver: Driver, number: int) -> dict[str, Any] | None:
    """A request as `kvstore explain --json` prints it. Raises NodeBusy."""
    request, ranges = driver.query(
        lambda engine: engine.explain.request(number), timeout_s=METRICS_TIMEOUT_S
    )
    return reasons.story_as_dict(request, ranges) if request is not None else None


def make_pages(collector: NodeCollector) -> dict[str, PageMaker]:
    """The pages of a node by path. A node whose disk or events are in trouble serves from memory:
    it is healthy, and says what it lacks."""
    driver, its = collector.driver, collector.driver.executor
    door = its.attach.door

    def health() -> Page:
        try:
            troubles = [
                driver.query(
                    lambda engine: _trouble(engine, its.files, collector.refused),
                    timeout_s=HEALTH_TIMEOUT_S,
                ),
                its.publisher.trouble if its.publisher else "",
                its.member.trouble if its.member else "",
                collector.code.trouble(),
            ]
        except NodeBusy as error:
            return text_page(503, str(error))
        if not door.is_in_place:
            return text_page(503, f"{door.path} is no longer this node's socket: restart it")
        trouble = ", and ".join(filter(None, troubles))
        return text_page(200, f"ok, but {trouble}" if trouble else "ok")

    site = make_site(health, partial(_state, driver), partial(_story, driver))
    return {"/metrics": metrics_page(collector.collect), "/healthz": health, **site}
