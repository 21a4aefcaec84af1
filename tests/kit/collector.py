"""An OpenTelemetry collector for tests: OpenTelemetry's own OTLP service, which keeps what it gets.

It shares no code with the product: spans are read from the messages of the standard.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as pb,
    trace_service_pb2_grpc as service,
)

WAIT_S = 30.0


class Received(NamedTuple):
    """A span as it came. Ids are hex; times are Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


class Collector(service.TraceServiceServicer):
    """`url` for --trace; `spans` in the order of their arrival."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Received] = []
        self._news = threading.Condition()
        self.goes_on = threading.Event()
        """While it is not set no call is answered."""
        self.goes_on.set()
        self.calls = 0
        self.metadata: dict[str, str] = {}

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The call of the standard."""
        with self._news:
            self.calls += 1
            self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
            self._news.notify_all()
        self.goes_on.wait(WAIT_S)
        found = [
            _received(span, resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._news:
            self.spans += found
            self._news.notify_all()
        return pb.ExportTraceServiceResponse()

    def await_that(self, is_so: Callable[[], bool]) -> None:
        """Raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(is_so, WAIT_S):
                raise TimeoutError(f"the collector got {self.spans}")

    def named(self, name: str) -> list[Received]:
        """All spans of this name so far."""
        return [span for span in self.spans if span.name == name]


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _received(span: Any, resource: Any) -> Received:
    return Received(
        _values(resource.resource.attributes)["service.name"],
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port that the kernel chooses."""
    collector = Collector()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        service.add_TraceServiceServicer_to_server(collector, server)
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            collector.goes_on.set()
            server.stop(0).wait()


def check_tree(spans: list[Received]) -> None:
    """Every span lies within its parent of the same service, and steps do not overlap. A fetch runs
    beside them, as it may begin with a hint."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.begin_ns <= span.end_ns <= time.time_ns(), span
        above = by_id.get(span.parent_id)
        if above is not None and above.service == span.service:
            assert above.begin_ns <= span.begin_ns, (span, above)
            assert span.end_ns <= above.end_ns, (span, above)
        steps = sorted(
            (each.begin_ns, each.end_ns)
            for each in spans
            if (each.parent_id, each.service) == (span.span_id, span.service)
            and each.name != "kvstore.fetch"
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(steps)), steps
        assert sum(b - a for a, b in steps) <= span.end_ns - span.begin_ns
