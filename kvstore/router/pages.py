"""/metrics, /healthz, /livez and the page of a router.

`/healthz` is `ok`, or `ok, but …` with each model that nobody serves, each worker that is down or
load-only and why, a refused policy file, and the roles that the planner gave; 503 while no worker
takes requests or none serves any model of the policy, or it drains: readiness. `/livez` is 200 as
long as the loop runs: liveness. Values are read on the router's loop, for all waiting clients at
once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvstore import __version__
from kvstore.net.aio import call_on
from kvstore.net.http import Page, PageMaker, metrics_page, text_page
from kvstore.net.server import INSECURE_NOTE, certificate_ends
from kvstore.net.site import ROWS_MAX, make_site, picked
from kvstore.obs.metrics import TTFTS, Values, copied
from kvstore.router.engines.workers import Worker
from kvstore.router.front.paths import ALIVE
from kvstore.routing.core import RouterCore
from kvstore.routing.fleet import Fleet
from kvstore.routing.receipts import ReceiptDraft
from kvstore.routing.split import SplitReason
from kvstore.routing.values import WorkerRole
from kvstore.units import NS_PER_MS

if TYPE_CHECKING:
    from kvstore.router.process import Router

_T = TypeVar("_T")

PAGE_TIMEOUT_S: Final = 1.0
_OF_WORKERS: Final = ("cached_tokens", "predicted_tokens", "prompt_tokens")
_REJECTED: Final = ("rejected-", "evicted-")
"""Beginnings of outcomes that are reasons of a rejection."""
NAMED_MAX: Final = 3
_PLAIN_REASONS: Final = {"new": "never reached yet", "draining": "in the policy file"}
"""State → its reason where the core gives none."""
_WORST_FIRST: Final = ("down", "open", "half-open", "draining", "late", "load-only", "new")
STATES: Final = ("up", *reversed(_WORST_FIRST))
_DECIDED: Final = (
    *("number", "model", "tenant", "chosen", "prompt_tokens", "prompt_is_estimated", "held_s"),
    "predicted_s",
)
"""Fields of a receipt that the page's list shows."""
_FOLLOWED: Final = ("ttft_s", "cached_tokens", "end", "rejected")


def _on(loop: asyncio.AbstractEventLoop, read: Callable[[], _T]) -> _T:
    async def reading() -> _T:
        return read()

    return call_on(loop, reading(), timeout_s=PAGE_TIMEOUT_S)


def _metrics(router: Router) -> Values:
    proxy, workers, door = router.proxy, list(router.workers), router.door
    certificates = filter(None, (router.config.tls, router.config.front))
    states, fleet = Counter(worker.state for worker in workers), router.core.fleet
    known = {w.name: state for w in workers if (state := fleet.state(w.name)) is not None}
    found: Values = {
        "router_info": {__version__: 1},
        "router_policy_refused": bool(router.refused_policy),
        **certificate_ends(min(certificates, key=lambda tls: tls.ends_s, default=None)),
        "router_requests_total": proxy.counts,
        "router_retries_total": proxy.retried_count,
        "router_splits_total": proxy.splits,
        "router_prefills_total": proxy.prefills,
        "router_races_total": proxy.races,
        "router_in_flight": proxy.in_flight,
        "router_held": len(router.dispatcher.held),
        "router_ttft_seconds": {kind: its.buckets(TTFTS) for kind, its in router.ttfts.items()},
        "router_connections": door.connection_count,
        "router_connections_refused_total": door.refused_count,
        "router_workers": {name: states[name] for name in STATES},
        "router_worker_requests_total": {name: its.request_count for name, its in known.items()},
        "router_worker_failures_total": {name: its.failure_count for name, its in known.items()},
        "router_worker_in_flight": {name: fleet.in_flight(name) for name in known},
    }
    for field in _OF_WORKERS:
        found[f"router_worker_{field}_total"] = {w.name: getattr(w, field) for w in workers}
    found["router_picks_total"] = router.picker.counts
    if router.config.index:
        found["router_rendered_total"] = router.rendering.counts
        found["router_index_matches_total"] = router.index.match_count
        found["router_index_late_total"] = router.index.late_count
        found["router_index_used"] = int(not (router.index.trouble or router.index.lost))
    found["router_traced_requests_total"] = router.traces.counts if router.traces else {}
    found["router_peers"] = len(router.exchange.routers)
    if router.config.index:
        found["router_prepares_total"] = router.ahead.counts
        found["router_prepared_blocks_total"] = router.ahead.blocks
    pools = sorted({worker.address.pool for worker in workers})
    return {
        **found,
        "router_pins": len(router.core.ahead.pins),
        "router_sessions": len(router.core.stays),
        **_pressure(router.core, pools, router.dispatcher.clock()),
        "router_receipts_total": router.receipts.written_count,
        "router_receipts_failed_total": router.receipts.failed_count,
    }


def _pressure(core: RouterCore, pools: Sequence[str], now_ns: int) -> Values:
    full = {pool: core.gauges.saturation(pool, now_ns) for pool in pools}
    changes, splits = core.planner.changes.items(), core.placer.splits.items()
    roles = itertools.product(pools, (WorkerRole.PREFILL, WorkerRole.DECODE))
    return {
        "router_saturation": {(pool, its.cause.value): its.value for pool, its in full.items()},
        "router_worker_role": {(s.spec.worker, s.role.value): 1 for s in core.fleet.workers},
        "router_role_changes_total": {(pool, role.value): n for (pool, role), n in changes},
        "router_prefill_waiting": {k: len(laned) for k, laned in core.placer.laned.items()},
        "router_prefill_threshold_tokens": {pool: split.uncached_min for pool, split in splits},
        "router_desired_replicas": {
            (pool, role.value): core.desired_replicas(pool, role, now_ns) for pool, role in roles
        },
    }


def health_of(router: Router) -> Page:
    """Page of /healthz. Call it on the loop."""
    workers = list(router.workers)
    notes = [*filter(None, [router.refused_policy]), *router.pools.notes]
    states = [(worker, worker.state) for worker in workers]
    notes += [
        f"worker {w.name} is {state}" + _because(_why(w))
        for state in _WORST_FIRST
        for w, its in states
        if its == state
    ]
    if unknown := set(router.core.policy.draining) - {worker.name for worker in workers}:
        notes.append(f"draining in the policy file names no worker: {', '.join(sorted(unknown))}")
    notes += _of_workers("load of {} is not known", workers, lambda worker: worker.unread)
    unlisted = "models of {} are not known, so requests for any model go there"
    notes += _of_workers(unlisted, workers, lambda worker: worker.unlisted)
    unindexed = "text prompts are not tokenized by {}, so the index is not used for them"
    notes += _of_workers(unindexed, workers, lambda worker: worker.unrendered)
    notes += _adapters(workers)
    own = [router.door.trouble, router.engines.trouble, str(router.discovery.troubles)]
    own += [router.index.trouble or router.index.lost, str(router.exchange.troubles)]
    notes += filter(None, [*own, router.ahead.trouble])
    notes += router.rendering.unused()
    if router.config.insecure:
        notes.append(INSECURE_NOTE)
    if router.proxy.is_draining:
        notes.insert(0, "it drains, to end")
    elif not router.workers.take_requests:
        is_new = {worker.state for worker in workers} == {"new"}
        notes.insert(0, f"no worker {'has answered yet' if is_new else 'takes requests'}")
    roles = router.core.fleet.planned_roles()
    planned = "; planned roles: " * bool(roles)
    planned += ", ".join(f"{worker} {role.value}" for worker, role in roles.items())
    if not router.proxy.is_ready:
        return text_page(503, ", and ".join(notes))
    return text_page(200, ", but ".join(["ok", *filter(None, [", and ".join(notes)])]) + planned)


def _of_workers(
    sentence: str, workers: Iterable[Worker], reason: Callable[[Worker], str]
) -> Iterator[str]:
    """A sentence for each reason, with the workers that have it."""
    found: dict[str, list[str]] = {}
    for worker in workers:
        if reason(worker) and worker.state != "down":
            found.setdefault(reason(worker), []).append(worker.name)
    for why, names in found.items():
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        yield sentence.format(", ".join(names[:NAMED_MAX]) + more) + _because(why)


def _adapters(workers: Iterable[Worker]) -> Iterator[str]:
    """LoRA adapters of requests whose keys are not used."""
    for worker in workers:
        for name, each in worker.adapters.items():
            why = each.parity or each.other
            if each.is_wanted and why and worker.has_parity:
                yield f"adapter {name} of worker {worker.name} is load-only ({why})"


def _why(worker: Worker) -> str:
    """Reason for a worker's state; empty: none is needed."""
    if worker.state == "load-only":
        return worker.parity
    return worker.why or _PLAIN_REASONS.get(worker.state, "")


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _state(router: Router) -> dict[str, Any]:
    """Sections of the page as JSON values. Call it on the loop."""
    core, workers, now_ns = router.core, list(router.workers), router.dispatcher.clock()
    sums = {f"{field}_total": sum(getattr(w, field) for w in workers) for field in _OF_WORKERS}
    p50_ms = {
        name: its.percentile_ns(50) / NS_PER_MS if its.count else None
        for name, its in router.ttfts.items()
    }
    facts = {"in flight": router.proxy.in_flight, "held": len(router.dispatcher.held)}
    facts["other routers"] = len(router.exchange.routers)
    rejected = sum(n for k, n in router.proxy.counts.items() if k.startswith(_REJECTED))
    remote = sum(router.proxy.splits[reason] for reason in SplitReason if reason.is_remote)
    state: dict[str, Any] = {"role": "router", "facts": facts}
    state["prediction"] = {**sums, "ttft_p50_ms": p50_ms}
    state["flows"] = {"requests": router.proxy.counts.total(), "rejected": rejected}
    state["flows"] |= {"remote_prefills": remote, **sums}
    pools = sorted({worker.address.pool for worker in workers})[:ROWS_MAX]
    full = [(pool, core.gauges.saturation(pool, now_ns)) for pool in pools]
    state["pools"] = [{"pool": p, "saturation": s.value, "cause": s.cause.value} for p, s in full]
    worst = heapq.nsmallest(ROWS_MAX, workers, key=lambda w: (-STATES.index(w.state), w.name))
    state["workers"] = [_worker(worker, core.fleet) for worker in worst]
    state["decisions"] = [_decision(draft, now_ns) for draft in reversed(router.decided)]
    return {**state, "totals": {"workers": len(workers)}}


def _worker(worker: Worker, fleet: Fleet) -> dict[str, Any]:
    its = picked(worker, ("name", "state", *_OF_WORKERS))
    its |= picked(worker.address, ("pool", "role"))
    its |= picked(fleet.state(worker.name), ("request_count", "failure_count"))
    return {**its, "in_flight": fleet.in_flight(worker.name), "why": _why(worker)}


def _decision(draft: ReceiptDraft, now_ns: int) -> dict[str, Any]:
    plain, cached = draft.plain, dict(zip(draft.workers, draft.cached.tolist(), strict=True))
    its = picked(plain, _DECIDED) | picked(plain.outcome, _FOLLOWED)
    ms_ago = max(0, now_ns - plain.at_ns) // NS_PER_MS
    return {**its, "expected_tokens": cached.get(plain.chosen, 0.0), "ms_ago": ms_ago}


def _story(router: Router, number: int) -> dict[str, Any] | None:
    """A decision with the workers that it chose among, as JSON values; None: it is not kept. Call
    it on the loop.
    """
    found = next((each for each in router.decided if each.plain.number == number), None)
    if found is None:
        return None
    plain = found.plain
    columns = zip(found.workers, found.scores.tolist(), found.cached.tolist(), strict=True)
    rows = [(plain.filtered.get(name, ""), score, name, its) for name, score, its in columns]
    names = ("filtered", "score", "worker", "cached")
    ranked = [dict(zip(names, row, strict=True)) for row in sorted(rows)[:ROWS_MAX]]
    plain = msgspec.structs.replace(plain, filtered={}, load_only={})
    return msgspec.structs.asdict(plain) | {"candidates": ranked}


def make_router_pages(router: Router, loop: asyncio.AbstractEventLoop) -> dict[str, PageMaker]:
    """Path → function that makes the page, for all pages of a router."""

    def page(read: Callable[[], Page]) -> Page:
        try:
            return _on(loop, read)
        except TimeoutError:
            return text_page(503, "the router did not answer in time")

    healthz, alive = partial(health_of, router), partial(text_page, 200, "ok")
    health, state = partial(page, healthz), partial(_on, loop, partial(_state, router))
    site = make_site(health, state, lambda number: _on(loop, partial(_story, router, number)))
    values = partial(_on, loop, lambda: copied(_metrics(router)))
    metrics = metrics_page(values, busy="the router is busy: ask again later")
    return {"/metrics": metrics, "/healthz": health, ALIVE: partial(page, alive), **site}
