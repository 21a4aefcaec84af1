"""Spans of any story: whatever an engine says of its times, they lie within the request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore.engine.events import StoryTold
from kvstore.engine.why.explain import RequestReport
from kvstore.engine.why.findings import RangeReport
from kvstore.engine.why.reasons import PushReport, Reason, Search
from kvstore.node.traces import EVENTS_MAX, NodeTraces
from kvstore.units import NS_PER_MS, NS_PER_US
from kvstore.wire.messages import Story

SECRET = "a prompt's text"
HEADER = f"00-{'a' * 32}-{'b' * 16}-01"
TIMES = st.integers(0, 2**50)


@pytest.fixture(scope="module")
def traces() -> Iterator[NodeTraces]:
    traces = NodeTraces(InMemorySpanExporter(), "n1", 100)
    yield traces
    traces.close()


def report(story: Story, *pushes: PushReport, **more: Any) -> RequestReport:
    its: dict[str, Any] = {
        **dict.fromkeys((f.name for f in msgspec.structs.fields(RequestReport)[:20]), 0),
        "request": story.request,
        "engine_id": "e",
        "label": "m",
        "tenant": "t",
        "space": "",
        "block_tokens": 16,
        "outcome": Reason.NONE,
        "detail": "",
        "pushes": pushes,
    }
    return RequestReport(**its | more)


def search(ended_ns: int, *, begun_ms: int, took_ms: int) -> Search:
    """One whose fetch began so long before the end of the request."""
    begun_ns = ended_ns - begun_ms * NS_PER_MS
    found = Search(1, 4, Reason.FETCHED, node="b", fetched=3, begun_ns=begun_ns)
    found.ended_ns = begun_ns + took_ms * NS_PER_MS
    return found


@given(st.data())
def test_spans_lie_within_their_request(traces: NodeTraces, data: st.DataObject) -> None:
    names = ("queued", "lookup", "promotion", "load", "admitted", "total")
    times: Any = {f"{name}_ns": data.draw(TIMES) for name in names}
    story = Story("r", traceparent=HEADER, loaded_tokens=data.draw(TIMES), **times)
    ended_ns = time.monotonic_ns() - data.draw(st.integers(0, 2**40))
    found = search(
        ended_ns, begun_ms=data.draw(st.integers(-9, 10**6)), took_ms=data.draw(st.integers(0, 99))
    )
    push = PushReport(
        side="decode", node="b", blocks=4, pushed=2, reason="", ended_us=data.draw(TIMES)
    )
    rows = [RangeReport(n, 1, "peer", node="b", search=found) for n in range(data.draw(TIMES) % 99)]
    told = StoryTold(report(story, push), tuple(rows), story, ended_ns, 64)
    request, *steps = traces.make(told)
    assert request.end_time - request.start_time == story.total_ns
    assert request.parent.span_id == 0xBBBBBBBBBBBBBBBB
    assert len(request.events) == min(len(rows), EVENTS_MAX)
    for step in steps:
        assert request.start_time <= step.start_time <= step.end_time <= request.end_time
        assert step.parent.span_id == request.context.span_id
        assert step.context.trace_id == request.context.trace_id == int("a" * 32, 16)
    assert len({span.context.span_id for span in (request, *steps)}) == 1 + len(steps)


def test_steps_are_where_the_engine_was_at_the_time(traces: NodeTraces) -> None:
    times: Any = {"queued_ns": 10, "lookup_ns": 2, "promotion_ns": 3, "admitted_ns": 20}
    tokens: Any = {"local_tokens": 16, "loaded_tokens": 96, "file_tokens": 32, "peer_tokens": 16}
    story = Story("r", load_ns=5, total_ns=40 * NS_PER_MS, **times, **tokens)
    ended_ns = time.monotonic_ns()
    found = search(ended_ns, begun_ms=30, took_ms=7)
    rows = (
        RangeReport(0, 1, "engine"),
        RangeReport(1, 1, "peer", node="b", search=found),
        RangeReport(2, 1, "peer", node="b", search=found),
        RangeReport(3, 1, "", Reason.EVICTED_FOR_STORES, name=SECRET),
    )
    push = PushReport(side="decode", node="p", blocks=4, pushed=2, reason="", ended_us=9)
    other = PushReport(side="prefill", node="d", blocks=4, pushed=2, reason="")
    row = report(story, push, other, outcome=Reason.EVICTED_FOR_STORES, detail=SECRET)
    request, *steps = traces.make(StoryTold(row, rows, story, ended_ns, 64))
    begin = request.start_time
    assert abs(request.end_time - time.time_ns()) < 60 * 1000 * NS_PER_MS
    assert [
        (s.name.removeprefix("kvstore."), s.start_time - begin, s.end_time - begin) for s in steps
    ] == [
        ("push", 0, 9 * NS_PER_US),
        ("fetch", 10 * NS_PER_MS, 17 * NS_PER_MS),
        ("lookup", 10, 12),
        ("promotion", 12, 15),
        ("load", 20, 25),
    ]
    moved = {s.name.removeprefix("kvstore."): dict(s.attributes) for s in steps}
    assert moved["push"] == {"kvstore.tier": "peer", "kvstore.peer": "p", "kvstore.blocks": 2}
    assert moved["fetch"] == {"kvstore.tier": "peer", "kvstore.peer": "b", "kvstore.blocks": 3}
    assert moved["promotion"] == {
        "kvstore.tier": "file,peer",
        "kvstore.blocks": 3,
        "kvstore.bytes": 3 * 64,
    }
    assert moved["load"] == {
        "kvstore.tier": "dram,file,peer",
        "kvstore.blocks": 6,
        "kvstore.bytes": 6 * 64,
    }
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 16 + 96
    assert request.attributes["kvstore.miss.reason"] == "evicted"
    assert [dict(event.attributes).get("kvstore.miss.reason") for event in request.events] == [
        *(None, None, None),
        "evicted",
    ]
    said = [dict(e.attributes) for e in request.events] + [dict(s.attributes) for s in steps]
    assert SECRET not in f"{said}{dict(request.attributes)}"


def test_a_caller_that_does_not_record_leaves_nothing(traces: NodeTraces) -> None:
    story = Story("r", traceparent=HEADER[:-1] + "0")
    assert traces.make(StoryTold(report(story), (), story, 1, 0)) == []
    broken = Story("r", traceparent="00-x")
    (root,) = traces.make(StoryTold(report(broken), (), broken, 1, 0))
    assert root.parent is None
