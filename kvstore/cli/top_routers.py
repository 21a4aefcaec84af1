"""`kvstore top --router`: pages of routers made into figures. Covers sources and arithmetic.

    /healthz ─┐
    /metrics ─┴▶ RouterPage per router ─▶ RouterTally (the page before) ─▶ RouterFigures

All routers are asked at once, each for ANSWER_S at most: one that is silent, or is no router, has
one sentence instead of figures, and delays the others no longer. Does not cover: the layout
(`top_routers_view`), nodes (`top`).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import ssl
import time
from collections.abc import Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvstore.cli.top import SILENT, UP
from kvstore.config.defaults import DEFAULT_ROUTER_METRICS
from kvstore.errors import AttachError, ConfigError

ANSWER_S: Final = 2.0
PAGE_BYTES_MAX: Final = 8 << 20
ROUTERS_MAX: Final = 64
"""Routers are asked by as many threads."""
UNREADY, DRAINING = "unready", "draining"
SERVING: Final = frozenset({"up", "late", "load-only", "half-open"})
"""States of workers that take requests."""
REJECTED: Final = ("rejected-", "evicted-")
"""Beginnings of outcomes that are reasons of a rejection."""
REMOTE: Final = frozenset({"long", "busy-decode"})
"""Reasons of a split that are remote prefills."""
NO_URL: Final = f"this is no URL, such as http://{DEFAULT_ROUTER_METRICS}"
NO_INDEX: Final = "no-index"
LATE: Final = "no answer in time"
NO_ROUTER: Final = "its /metrics are not those of a router: give the URL of --metrics"

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(Name without `kvstore_router_`, labels) → value."""


class RouterPage(NamedTuple):
    """Both pages of a router at one moment."""

    at_s: float
    state: str
    notes: str
    """Complaints of /healthz."""
    series: Series


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
        try:
            self._context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            why = "no PEM" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"--router-ca {ca} cannot be used: {why}") from None
        self._threads = ThreadPoolExecutor(max(1, len(self.urls)), thread_name_prefix="top-router")
        self._asked: dict[str, Future[RouterPage | str]] = {}
        """URL → its call, until it has ended: a name server may be slower than we wait."""

    def sample(self) -> dict[str, RouterPage | str]:
        """URL of each router → its pages, or why there are none."""
        for url in self.urls:
            if url not in self._asked:
                self._asked[url] = self._threads.submit(self._read, url)
        wait(self._asked.values(), timeout=ANSWER_S)
        ended = {url: self._asked.pop(url) for url in self.urls if self._asked[url].done()}
        return {url: ended[url].result() if url in ended else LATE for url in self.urls}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, url: str) -> RouterPage | str:
        try:
            return self._page(url)
        except (AttachError, OSError, http.client.HTTPException, ValueError) as error:
            return why_silent(error)

    def _page(self, url: str) -> RouterPage:
        """Raises AttachError, OSError, HTTPException, ValueError."""
        until_s = time.monotonic() + ANSWER_S
        status, metrics = self._get(url, "/metrics", until_s)
        if status != http.client.OK:
            raise AttachError(f"it answers {status} to /metrics: give the URL of --metrics")
        at_s, series = time.monotonic(), series_of(metrics)
        if not any(kind == "info" for kind, _ in series):
            raise AttachError(NO_ROUTER)
        status, text = self._get(url, "/healthz", until_s)
        is_up, notes = status == http.client.OK, text.strip()
        state = UP if is_up else DRAINING if notes.startswith("it drains") else UNREADY
        if is_up:
            notes = notes.removeprefix("ok").removeprefix(", but ").removeprefix("; ")
        return RouterPage(at_s, state, notes, series)

    def _get(self, url: str, path: str, until_s: float) -> tuple[int, str]:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise AttachError(NO_URL) from None
        if parts.scheme not in ("http", "https") or not host:
            raise AttachError(NO_URL)
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, port, timeout=ANSWER_S, context=self._context
            )
        with contextlib.closing(connection):
            connection.request("GET", parts.path.rstrip("/").removesuffix("/metrics") + path)
            answer = connection.getresponse()
            content = bytearray()
            while piece := answer.read1(1 << 16):
                content += piece
                if time.monotonic() > until_s:
                    raise TimeoutError
                if len(content) > PAGE_BYTES_MAX:
                    raise AttachError("its page is too large to be that of a router")
            return answer.status, content.decode("utf-8", "replace")


class RouterTally:
    """Two samples of each router, and what happened between them."""

    def __init__(self) -> None:
        self._last: dict[str, RouterPage] = {}

    @property
    def has_answers(self) -> bool:
        """Whether a router answered last time."""
        return bool(self._last)

    def take(self, sample: dict[str, RouterPage | str]) -> list[RouterFigures]:
        """Figures of all of them."""
        made = {}
        found = []
        for url, page in sample.items():
            if isinstance(page, str):
                found.append(RouterFigures(name_of(url), SILENT, page))
            else:
                found.append(_figures(name_of(url), page, self._last.get(url)))
                made[url] = page
        self._last = made
        return found


def _figures(name: str, page: RouterPage, before: RouterPage | None) -> RouterFigures:
    now, states = page.series, ("workers", "state")
    full, label = max(
        ((value, dict(labels)) for (kind, labels), value in now.items() if kind == "saturation"),
        key=lambda found: found[0],
        default=(None, dict[str, str]()),
    )
    load_only, is_used = _sum(now, *states, ("load-only",)), _sum(now, "index_used")
    parity = "index-lost" if not is_used else f"{load_only:.0f} load-only" if load_only else "equal"
    figures = RouterFigures(
        name,
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
    if before is None or page.at_s <= before.at_s:
        return figures
    grown = {  # a series that began anew, with its router or worker, has not
        key: max(0.0, value - before.series.get(key, 0.0)) for key, value in now.items()
    }
    return _with_rates(figures, grown, page.at_s - before.at_s)


def _with_rates(figures: RouterFigures, grown: Series, seconds: float) -> RouterFigures:
    requests = ("requests_total", "outcome")
    outcomes = {dict(labels).get("outcome", "") for kind, labels in grown if kind == requests[0]}
    rejections = [each for each in outcomes if each.startswith(REJECTED)]
    prompts = _sum(grown, "worker_prompt_tokens_total")
    means = {
        kind: _sum(grown, "ttft_seconds_sum", "kind", (kind,)) / count
        for kind in ("predicted", "achieved")
        if (count := _sum(grown, "ttft_seconds_count", "kind", (kind,)))
    }

    def percent(name: str) -> float | None:
        return min(100.0, 100 * _sum(grown, name) / prompts) if prompts else None

    return msgspec.structs.replace(
        figures,
        requests_per_s=_sum(grown, *requests) / seconds,
        rejected_per_s=_sum(grown, *requests, rejections) / seconds,
        remote_prefills_per_s=_sum(grown, "splits_total", "reason", REMOTE) / seconds,
        ttft_predicted_s=means.get("predicted"),
        ttft_s=means.get("achieved"),
        hit_predicted_percent=None
        if figures.parity == NO_INDEX
        else percent("worker_predicted_tokens_total"),
        hit_percent=percent("worker_cached_tokens_total"),
    )


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


def why_silent(error: BaseException) -> str:
    """One sentence."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message.rstrip(".")
        return f"its certificate is refused ({why}): give its CA with --router-ca"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS: use http://, as --metrics of a router does"
    if isinstance(error, TimeoutError):
        return LATE
    if isinstance(error, socket.gaierror):
        return "its host has no address"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: is it running, with --metrics at this address?"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    if isinstance(error, (UnicodeError, http.client.InvalidURL)):
        return NO_URL
    return str(error) if isinstance(error, AttachError) else NO_ROUTER
