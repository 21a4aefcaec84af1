"""`kvstore top --router`: pages of routers made into figures. Covers sources and arithmetic.

    /healthz ─┐
    /metrics ─┴▶ RouterPage per router ─▶ Tally (the page before) ─▶ RouterFigures

All routers are asked at once, each for ANSWER_S at most: one that is silent, or is no router, has
one sentence instead of figures, and delays the others no longer. Does not cover: the layout
(`top_view`), nodes (`top`).
"""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvstore.cli.pages import LATE, Site, tls_context
from kvstore.cli.top import SILENT, UP
from kvstore.config.defaults import DEFAULT_ROUTER_METRICS
from kvstore.errors import AttachError, ConfigError

ANSWER_S: Final = 2.0
ROUTERS_MAX: Final = 64
"""Routers are asked by as many threads."""
UNREADY, DRAINING = "unready", "draining"
SERVING: Final = frozenset({"up", "late", "load-only", "half-open"})
"""States of workers that take requests."""
REJECTED: Final = ("rejected-", "evicted-")
"""Beginnings of outcomes that are reasons of a rejection."""
REMOTE: Final = frozenset({"long", "busy-decode"})
"""Reasons of a split that are remote prefills."""
_CA: Final = "give its CA with --router-ca"
NO_INDEX: Final = "no-index"
NO_ROUTER: Final = "its /metrics are not those of a router: give the URL of --metrics"

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(Name without `kvstore_router_`, labels) → value."""


class RouterPage(NamedTuple):
    """Both pages of a router at one moment."""

    at_s: float
    state: str
    notes: str
    """Complaints of /healthz, or why there are no pages."""
    series: Series | None = None
    """None: there are no pages."""


class RouterFigures(msgspec.Struct, frozen=True):
    """Figures of a router on the screen. None: not known, or not yet."""

    router: str
    state: str
    """up, draining, unready (takes no requests), silent (no answer, or no router)."""
    trouble: str = ""
    """Reason for missing figures, or the complaints of /healthz, the worst first."""
    requests_per_s: float | None = None
    """Requests that ended between two samples; rates, times and shares cover the same time."""
    rejected_per_s: float | None = None
    in_flight: int | None = None
    held: int | None = None
    ttft_predicted_s: float | None = None
    """Mean of the requests that got their first token."""
    ttft_s: float | None = None
    hit_predicted_percent: float | None = None
    """Share of prompt tokens, of answers in which the engine reported the cached ones."""
    hit_percent: float | None = None
    workers: int | None = None
    workers_serving: int | None = None
    parity: str = ""
    """no-index, index-lost, N load-only, equal."""
    saturation: float | None = None
    """Saturation of the fullest pool."""
    saturation_cause: str = ""
    saturation_pool: str = ""
    remote_prefills_per_s: float | None = None
    other_routers: int | None = None


class RouterPages:
    """The routers at these URLs. Close it."""

    def __init__(self, urls: Sequence[str], ca: Path | None) -> None:
        """`ca`: of https:// pages; None: the CAs of the system. Raises ConfigError."""
        self.urls = list(dict.fromkeys(urls))
        if len(self.urls) > ROUTERS_MAX:
            raise ConfigError(f"--router was given {len(self.urls)} times: {ROUTERS_MAX} at most")
        self._context = tls_context({"--router-ca": ca})
        self._threads = ThreadPoolExecutor(max(1, len(self.urls)), thread_name_prefix="top-router")
        self._asked: dict[str, Future[RouterPage]] = {}
        """URL → its call, until it has ended: a name server may be slower than we wait."""

    def sample(self) -> dict[str, RouterPage]:
        """URL of each router → its pages."""
        for url in self.urls:
            if url not in self._asked:
                self._asked[url] = self._threads.submit(self._read, url)
        wait(self._asked.values(), timeout=ANSWER_S)
        ended = {url: self._asked.pop(url) for url in self.urls if self._asked[url].done()}
        late = RouterPage(0.0, SILENT, LATE)
        return {url: ended[url].result() if url in ended else late for url in self.urls}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, url: str) -> RouterPage:
        site = Site(url, self._context, DEFAULT_ROUTER_METRICS, "--metrics", _CA, _CA)
        try:
            status, metrics = site.ask("/metrics", timeout_s=ANSWER_S)
            if status != http.client.OK:
                raise AttachError(f"it answers {status} to /metrics: give the URL of --metrics")
            at_s, series = time.monotonic(), series_of(metrics.decode("utf-8", "replace"))
            if not any(kind == "info" for kind, _ in series):
                raise AttachError(NO_ROUTER)
            status, healthz = site.ask("/healthz", timeout_s=ANSWER_S)
        except AttachError as error:
            return RouterPage(0.0, SILENT, str(error))
        is_up, notes = status == http.client.OK, healthz.decode("utf-8", "replace").strip()
        state = UP if is_up else DRAINING if notes.startswith("it drains") else UNREADY
        if is_up:
            notes = notes.removeprefix("ok").removeprefix(", but ").removeprefix("; ")
        return RouterPage(at_s, state, notes, series)


def router_figures(
    url: str, page: RouterPage, before: tuple[RouterPage, RouterFigures] | None
) -> RouterFigures:
    """Figures of a router, with rates if there is a page before this one."""
    if page.series is None:
        return RouterFigures(name_of(url), page.state, page.notes)
    now, states = page.series, ("workers", "state")
    full, label = max(
        ((value, dict(labels)) for (kind, labels), value in now.items() if kind == "saturation"),
        key=lambda found: found[0],
        default=(None, dict[str, str]()),
    )
    load_only, is_used = _sum(now, *states, ("load-only",)), _sum(now, "index_used")
    parity = "index-lost" if not is_used else f"{load_only:.0f} load-only" if load_only else "equal"
    figures = RouterFigures(
        name_of(url),
        page.state,
        page.notes,
        in_flight=round(_sum(now, "in_flight")),
        held=round(_sum(now, "held")),
        workers=round(_sum(now, *states)),
        workers_serving=round(_sum(now, *states, SERVING)),
        parity=parity if any(kind == "index_used" for kind, _ in now) else NO_INDEX,
        saturation=full,
        saturation_cause=label.get("cause", ""),
        saturation_pool=label.get("pool", ""),
        other_routers=round(_sum(now, "peers")),
    )
    earlier = before[0] if before is not None else page
    if earlier.series is None or page.at_s <= earlier.at_s:
        return figures
    grown = {  # a series that began anew, with its router or worker, has not
        key: max(0.0, value - earlier.series.get(key, 0.0)) for key, value in now.items()
    }
    return _with_rates(figures, grown, page.at_s - earlier.at_s)


def _with_rates(figures: RouterFigures, grown: Series, seconds: float) -> RouterFigures:
    requests, ttft = ("requests_total", "outcome"), ("ttft_seconds_sum", "ttft_seconds_count")
    outcomes = {dict(labels).get("outcome", "") for kind, labels in grown if kind == requests[0]}
    rejections = [each for each in outcomes if each.startswith(REJECTED)]
    predicted = _percent(grown, "worker_predicted_tokens_total")
    return msgspec.structs.replace(
        figures,
        requests_per_s=_sum(grown, *requests) / seconds,
        rejected_per_s=_sum(grown, *requests, rejections) / seconds,
        remote_prefills_per_s=_sum(grown, "splits_total", "reason", REMOTE) / seconds,
        ttft_predicted_s=_ratio(grown, *ttft, "kind", ("predicted",)),
        ttft_s=_ratio(grown, *ttft, "kind", ("achieved",)),
        hit_predicted_percent=predicted if figures.parity != NO_INDEX else None,
        hit_percent=_percent(grown, "worker_cached_tokens_total"),
    )


def _percent(grown: Series, name: str) -> float | None:
    """Share of the prompt tokens."""
    share = _ratio(grown, name, "worker_prompt_tokens_total")
    return None if share is None else min(100.0, 100 * share)


def _ratio(series: Series, above: str, below: str, *which: Any) -> float | None:
    """None: there is nothing below. `which`: as for `_sum`."""
    whole = _sum(series, below, *which)
    return _sum(series, above, *which) / whole if whole else None


def _sum(series: Series, name: str, label: str = "", among: Container[str] | None = None) -> float:
    """Sum of the series of a metric, of all or of those whose label is among these."""
    return sum(
        value
        for (kind, labels), value in series.items()
        if kind == name and (among is None or dict(labels).get(label, "") in among)
    )


def series_of(text: str) -> Series:
    """Metrics of a router, without buckets. Raises AttachError: no page of metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Series = {}
    try:
        for family in text_string_to_metric_families(text):
            for each in family.samples:
                name = each.name.removeprefix("kvstore_router_")
                if name != each.name and "le" not in each.labels and math.isfinite(each.value):
                    found[name, frozenset(each.labels.items())] = each.value
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AttachError(NO_ROUTER) from None
    return found


def name_of(url: str) -> str:
    """HOST:PORT of a URL, without a password that may be in it; or the whole text."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2] or url
