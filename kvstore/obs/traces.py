"""Traces for an OpenTelemetry collector (OTLP over gRPC), made after the fact.

    a request ended ─▶ put ─▶ queue (bounded) ─▶ thread: make ─▶ spans ─▶ collector

Nothing is instrumented: what a process knows about a request that has ended becomes spans with
explicit times, on a thread of its own. `put` never waits: with a slow or dead collector the queue
fills, and later requests are dropped and counted. Only processes with --trace import this module.
Does not cover: contents of spans (`kvstore.node.traces`, `kvstore.router.traces`), the header
between services (`wire.requests`).
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from kvstore import __version__
from kvstore.wire.requests import TraceParent, parse_traceparent

QUEUE_MAX: Final = 2048
"""Most requests that wait to be exported: a few MB."""
BATCH_MAX: Final = 64
PAUSE_S: Final = 0.2
"""Pause between exports, unless a batch is full: an export costs more than its spans."""
CLOSE_S: Final = 0.2
"""Longest wait for the last export: it is part of the gap of an upgrade."""

Attributes = Mapping[str, Any]
"""Attribute → text or number."""
_OUTAGE: Final = (
    "takes no spans, and they are dropped until it does: look whether it runs, and whether the URL"
    " has its port for OTLP over gRPC, often 4317"
)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def new_span_id() -> int:
    """A random id, not 0."""
    return secrets.randbits(64) or 1


class Traces(ABC, Generic[_T]):
    """Turns ended requests into spans and exports them; `make` and `service` are a subclass's."""

    service: str

    def __init__(self, exporter: SpanExporter | str, instance: str, sample_percent: int) -> None:
        """
        Args:
            exporter: or the URL of a collector in its place, http:// or https://HOST:PORT.
            instance: name of this process.
            sample_percent: of requests without a traceparent, the share to export.
        """
        names = {"service.name": self.service, "service.instance.id": instance}
        self._resource = Resource.create(names | {"service.version": __version__})
        self._exporter = _to(exporter) if isinstance(exporter, str) else exporter
        self._sample_percent = sample_percent
        self._queue = queue.SimpleQueue[_T | None]()
        self._has_ended = threading.Event()
        self._exported = self._refused = self._failed = 0
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @abstractmethod
    def make(self, ended: _T) -> list[ReadableSpan]:
        """Spans of a request that ended; none if it is not sampled. Called on the thread of
        exports.
        """

    @property
    def counts(self) -> dict[str, int]:
        """Number of requests by result."""
        return {"exported": self._exported, "dropped": self._refused + self._failed}

    def put(self, ended: _T) -> None:
        """Queue a request that has ended, or drop it if the queue is full. Never waits. Called from
        one thread only.
        """
        if self._queue.qsize() < QUEUE_MAX:
            self._queue.put(ended)
        else:
            self._refused += 1

    def close(self) -> None:
        """Export the rest, for CLOSE_S at most."""
        self._has_ended.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def parent(self, text: str) -> TraceParent:
        """The caller's span, from its `traceparent` header; if there is none, a new trace without a
        parent span.
        """
        is_sampled = secrets.randbelow(100) < self._sample_percent
        return parse_traceparent(text) or TraceParent(secrets.randbits(128) or 1, 0, is_sampled)

    def span(
        self,
        name: str,
        parent: TraceParent,
        span_id: int,
        times_ns: tuple[int, int],
        attributes: Attributes,
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        """A finished span. `times_ns`: begin and end, Unix time."""
        own, above = (
            SpanContext(parent.trace_id, number, False, TraceFlags(TraceFlags.SAMPLED))
            for number in (span_id, parent.span_id)
        )
        return ReadableSpan(
            name,
            own,
            above if parent.span_id else None,
            self._resource,
            attributes,
            events,
            start_time=times_ns[0],
            end_time=times_ns[1],
        )

    def _run(self) -> None:
        batch = list[_T]()
        while (ended := self._queue.get()) is not None:
            batch.append(ended)
            if len(batch) == BATCH_MAX or self._queue.empty():
                self._export(batch)
                if len(batch) < BATCH_MAX:
                    self._has_ended.wait(PAUSE_S)
                batch.clear()
        self._export(batch)

    def _export(self, batch: list[_T]) -> None:
        made, is_fine = list[list[ReadableSpan]](), False
        try:
            made += (spans for each in batch if (spans := self.make(each)))
            result = made and self._exporter.export([span for spans in made for span in spans])
            is_fine = not made or result is SpanExportResult.SUCCESS
        except Exception:
            _log.exception("--trace: %d requests are left out", len(batch))
        self._exported += len(made) if is_fine else 0
        self._failed += 0 if is_fine else len(batch)
        if made and is_fine is self._is_failing:
            self._is_failing = not is_fine
            news = "takes spans again" if is_fine else _OUTAGE
            _log.warning("--trace: the collector %s", news)


def _to(url: str) -> SpanExporter:
    """Exporter to a collector's URL. Timeout, headers and certificates are OpenTelemetry's
    variables, such as OTEL_EXPORTER_OTLP_HEADERS.
    """
    # It says each failed attempt; `Traces` says each outage.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return OTLPSpanExporter(url, channel_options=(("grpc.enable_http_proxy", 0),))
