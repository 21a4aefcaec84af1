"""The export of traces: nobody waits for it, and what it drops is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvstore.obs import traces as module
from kvstore.obs.traces import BATCH_MAX, CLOSE_S, QUEUE_MAX, Traces, new_span_id

WAIT_S = 30.0


class FakeCollector(SpanExporter):
    """Takes spans, refuses them, or does not answer while `goes_on` is not set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_asked = threading.Event()
        self.answer: Callable[[], SpanExportResult] = lambda: SpanExportResult.SUCCESS
        self.batches: list[int] = []
        self.names: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        self.goes_on.wait(WAIT_S)
        self.batches.append(len(spans))
        self.names += [span.name for span in spans]
        return self.answer()

    def shutdown(self) -> None:
        self.goes_on.set()


class Numbered(Traces[int]):
    """A span for each number, none for 0, an error for those below."""

    service = "test"

    def make(self, ended: int) -> list[ReadableSpan]:
        parent = self.parent("")
        if ended < 0:
            raise ValueError("a bug")
        if not ended or not parent.is_sampled:
            return []
        return [self.span(str(ended), parent, new_span_id(), (1, 2), {})]


def counts(traces: Numbered) -> dict[str, int]:
    return traces.counts


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)


def test_a_collector_that_never_answers_costs_traces_only() -> None:
    collector = FakeCollector()
    collector.goes_on.clear()
    traces = Numbered(collector, "i", 100)
    traces.put(1)
    assert collector.is_asked.wait(WAIT_S)
    begin_s = time.perf_counter()
    for number in range(3 * QUEUE_MAX):
        traces.put(number + 2)
    took_s = time.perf_counter() - begin_s
    assert took_s < 1, "each takes a microsecond; the exporter would have taken half a minute"
    assert traces._queue.qsize() == QUEUE_MAX
    assert counts(traces) == {"exported": 0, "dropped": 2 * QUEUE_MAX}
    begin_s = time.perf_counter()
    traces.close()
    assert time.perf_counter() - begin_s < CLOSE_S + 1
    traces._thread.join(WAIT_S)
    assert not traces._thread.is_alive()


def test_all_that_was_put_is_exported_before_the_end() -> None:
    collector = FakeCollector()
    traces = Numbered(collector, "i", 100)
    collector.goes_on.clear()
    traces.put(1)
    assert collector.is_asked.wait(WAIT_S)
    for number in range(2, 2 * BATCH_MAX):
        traces.put(number)
    traces.put(0)
    collector.goes_on.set()
    traces.close()
    assert collector.names == [str(n) for n in range(1, 2 * BATCH_MAX)]
    assert max(collector.batches) == BATCH_MAX
    assert counts(traces) == {"exported": 2 * BATCH_MAX - 1, "dropped": 0}


def refuse() -> SpanExportResult:
    return SpanExportResult.FAILURE


def fail() -> SpanExportResult:
    raise RuntimeError("a bug of the exporter")


@pytest.mark.parametrize("answer", [refuse, fail])
def test_an_outage_is_counted_and_said_once(
    answer: Callable[[], SpanExportResult], caplog: pytest.LogCaptureFixture
) -> None:
    collector = FakeCollector()
    traces = Numbered(collector, "i", 100)

    def put(total: int) -> None:
        traces.put(1)
        until(lambda: sum(counts(traces).values()) == total)

    with caplog.at_level(logging.INFO, logger="kvstore"):
        put(1)
        collector.answer = answer
        put(2)
        put(3)
        collector.answer = lambda: SpanExportResult.SUCCESS
        put(4)
        traces.close()
    assert counts(traces) == {"exported": 2, "dropped": 2}
    said = [text.removeprefix("--trace: the collector ") for text in caplog.messages]
    assert [text for text in said if text.startswith("takes")] == [
        module._OUTAGE,
        "takes spans again",
    ]


def test_a_request_that_cannot_be_told_takes_its_batch_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = FakeCollector()
    traces = Numbered(collector, "i", 100)
    with caplog.at_level(logging.INFO, logger="kvstore"):
        traces.put(-1)
        until(lambda: counts(traces)["dropped"] == 1)
        traces.put(7)
        traces.close()
    assert collector.names == ["7"]
    assert "1 requests are left out" in caplog.text


@pytest.mark.parametrize(("percent", "least", "most"), [(0, 0, 0), (100, 300, 300), (50, 90, 210)])
def test_traces_that_begin_here_are_sampled(percent: int, least: int, most: int) -> None:
    collector = FakeCollector()
    traces = Numbered(collector, "i", percent)
    for _ in range(300):
        traces.put(1)
    traces.close()
    assert least <= len(collector.names) <= most
    header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert traces.parent(header).header == header, "the flag of the caller decides"


def test_spans_say_who_made_them() -> None:
    collector = FakeCollector()
    traces = Numbered(collector, "node-7", 100)
    span: Any = traces.span("s", traces.parent(""), 5, (1, 2), {})
    traces.close()
    named = {key: span.resource.attributes[f"service.{key}"] for key in ("name", "instance.id")}
    assert named == {"name": "test", "instance.id": "node-7"}
    assert (span.parent, span.context.span_id, span.start_time, span.end_time) == (None, 5, 1, 2)
