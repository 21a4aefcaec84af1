"""The span of a routed request, `kvstore.route`, made from its receipt.

    client's traceparent, or a new trace ─▶ begin ─▶ onward: engines get this span as their parent
    receipt of the decision, when it is answered ─▶ ended ─▶ `Traces`

vLLM passes the header on, so that its own span and those of nodes are below this one. A broken
header counts as none. Does not cover: requests of the picker and of Route, which others send, and
those about stored responses; they keep their headers.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from multidict import CIMultiDictProxy
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter

from kvstore.obs.traces import Traces, new_span_id
from kvstore.routing.receipts import Receipt
from kvstore.types import Latest
from kvstore.wire.requests import TRACEPARENT, TraceParent

BEGUN_MAX: Final = 16_384
"""Most requests that are remembered, more than connections of clients; the oldest leave."""
TRACESTATE: Final = "tracestate"


class BegunRoute(NamedTuple):
    """A request under way, or one whose receipt is still to come."""

    parent: TraceParent
    """The client's span, or a new trace without one."""
    span_id: int
    begin_ns: int
    """Unix time of the request's arrival, in ns."""


class RouteTraces(Traces[tuple[BegunRoute, Receipt]]):
    """Spans of one router."""

    service = "kvstore-router"

    def __init__(self, exporter: SpanExporter | str, instance: str, sample_percent: int) -> None:
        super().__init__(exporter, instance, sample_percent)
        self._begun = Latest[str, BegunRoute](BEGUN_MAX)

    def begin(self, request_id: str, headers: CIMultiDictProxy[str], begin_ns: int) -> None:
        """Note that a request came at `begin_ns`, and its parent from the `traceparent` header."""
        parent = self.parent(",".join(headers.getall(TRACEPARENT, ())))
        self._begun[request_id] = BegunRoute(parent, new_span_id(), begin_ns)

    def onward(self, request_id: str, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Headers for an engine, with the request's own span in place of the client's."""
        begun = self._begun.get(request_id)
        if begun is None:
            return pairs
        # What other tracers wrote belongs to the client's trace.
        ours = {TRACEPARENT} if begun.parent.span_id else {TRACEPARENT, TRACESTATE}
        own = begun.parent._replace(span_id=begun.span_id)
        return [*(p for p in pairs if p[0].lower() not in ours), (TRACEPARENT, own.header)]

    def ended(self, receipt: Receipt) -> None:
        """Queue the span of a request whose receipt is complete, if it is sampled."""
        begun = self._begun.pop(receipt.request_id, None)
        if begun is not None and begun.parent.is_sampled:
            self.put((begun, receipt))

    def make(self, ended: tuple[BegunRoute, Receipt]) -> list[ReadableSpan]:
        begun, receipt = ended
        outcome = receipt.outcome
        counted = None if receipt.prompt_is_estimated else receipt.prompt_tokens
        attributes = {
            "gen_ai.request.id": receipt.request_id,
            "gen_ai.request.model": receipt.model,
            "gen_ai.usage.input_tokens": counted,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gen_ai.usage.output_tokens": outcome.output_tokens,
            "kvstore.outcome": outcome.rejected or outcome.end,
            "kvstore.attempts": outcome.attempts,
            "kvstore.pool": receipt.pool,
            "kvstore.predicted_ttft_s": receipt.predicted_s,
            "kvstore.prefill_worker": receipt.prefill_worker,
            "kvstore.tenant": receipt.tenant,
            "kvstore.ttft_s": outcome.ttft_s,
            "kvstore.worker": receipt.chosen,
        }
        known = {name: value for name, value in attributes.items() if value not in (None, "")}
        end_ns = outcome.ended_ns + time.time_ns() - time.monotonic_ns()
        times = begun.begin_ns, max(begun.begin_ns, end_ns)
        return [self.span("kvstore.route", begun.parent, begun.span_id, times, known)]
