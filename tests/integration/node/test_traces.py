"""Traces of a real node, as a collector that speaks OTLP gets them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.process import NodeProcess, RouterProcess
from kvstore.testing.raw_engine import BLOCK_BYTES, BLOCK_TOKENS, RawEngine, make_keys
from kvstore.units import NS_PER_MS
from kvstore.wire.messages import Story
from tests.integration.node.conftest import eventually
from tests.kit.collector import Collector, check_tree, collecting
from tests.kit.command import kvstore
from tests.kit.gauges import samples

pytestmark = pytest.mark.slow

KEYS = make_keys(5, seed="traced")
STORED = 3
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def told(engine: RawEngine, request: str, **changes: Any) -> None:
    """A request that was looked up, loaded what is there, and has ended."""
    reply = engine.lease(KEYS)
    fields: dict[str, Any] = {
        "request": request,
        "prompt_tokens": len(KEYS) * BLOCK_TOKENS,
        "loaded_tokens": STORED * BLOCK_TOKENS,
        "session": engine.session,
        "leases": [reply.lease],
        "queued_ns": 3 * NS_PER_MS,
        "lookup_ns": 2 * NS_PER_MS,
        "admitted_ns": 6 * NS_PER_MS,
        "load_ns": 12 * NS_PER_MS,
        "total_ns": 90 * NS_PER_MS,
    }
    assert engine.scheduler.send(Story(**(fields | changes)))
    engine.release(reply)


def counted(node: NodeProcess) -> dict[str, float]:
    """The metric, by result."""
    name = 'kvstore_traced_requests_total{result="'
    found = samples(node).items()
    return {key[len(name) : -2]: value for key, value in found if key.startswith(name)}


def test_a_request_is_a_trace_below_its_caller(tmp_path: Path, collector: Collector) -> None:
    with (
        NodeProcess.start(tmp_path, flags=["--trace", collector.url]) as node,
        RawEngine(node.socket, engine_id="one", model="llama", tenant="team-a") as engine,
    ):
        engine.open()
        engine.store(KEYS[:STORED])
        engine.release(engine.lease_stored(KEYS[:STORED]))
        told(engine, "cmpl-left-out", traceparent=UNSAMPLED)
        told(engine, "cmpl-broken", traceparent=SAMPLED.replace("0", "g"))
        told(engine, "cmpl-4f1a-0-1f2e3d4c", traceparent=SAMPLED)
        collector.await_that(lambda: len(collector.named("kvstore.request")) == 2)
        rows = kvstore("explain", "4f1a", "--json", "--socket", str(node.socket)).stdout
        (row,) = json.loads(rows)["requests"]
        assert eventually(lambda: counted(node) == {"exported": 2, "dropped": 0})
    assert {span.service for span in collector.spans} == {"kvstore-node"}
    broken, request = collector.named("kvstore.request")
    assert (broken.attributes["gen_ai.request.id"], broken.parent_id) == ("cmpl-broken", "")
    assert broken.trace_id != TRACE
    assert (request.trace_id, request.parent_id) == (TRACE, CALLER)
    assert request.end_ns - request.begin_ns == 90 * NS_PER_MS
    assert abs(request.end_ns - time.time_ns()) < 60 * 1000 * NS_PER_MS
    assert request.attributes == {
        "gen_ai.request.id": "cmpl-4f1a-0-1f2e3d4c",
        "gen_ai.request.model": "llama",
        "gen_ai.usage.input_tokens": len(KEYS) * BLOCK_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": STORED * BLOCK_TOKENS,
        "kvstore.engine": "one",
        "kvstore.tenant": "team-a",
    }
    said = [
        (e["kvstore.blocks"], e.get("kvstore.tier", ""), e.get("kvstore.miss.reason", ""))
        for _, e in request.events
    ]
    assert said == [(r["blocks"], r["tier"], r["reason"]) for r in row["ranges"]]
    assert said == [(3, "dram", ""), (2, "", "never stored")]
    below = [span for span in collector.spans if span.parent_id == request.span_id]
    places = {s.name: (s.begin_ns - request.begin_ns, s.end_ns - request.begin_ns) for s in below}
    assert places == {
        "kvstore.lookup": (3 * NS_PER_MS, 5 * NS_PER_MS),
        "kvstore.load": (6 * NS_PER_MS, 18 * NS_PER_MS),
    }
    (load,) = collector.named("kvstore.load")[1:]
    assert load.attributes == {
        "kvstore.tier": "dram",
        "kvstore.blocks": STORED,
        "kvstore.bytes": STORED * BLOCK_BYTES,
    }
    check_tree(collector.spans)


def test_a_collector_that_is_away_costs_traces_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens: refused
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with (
            NodeProcess.start(tmp_path, flags=["--trace", url]) as node,
            RawEngine(node.socket, engine_id="one") as engine,
        ):
            engine.open()
            for number in range(20):
                told(engine, f"r{number}")  # each a lookup, which the node answers in time
            assert eventually(lambda: counted(node)["dropped"] == 20, timeout_s=30)
            assert counted(node) == {"exported": 0, "dropped": 20}
            assert "the collector takes no spans" in node.log
            told(engine, "last")
            begin_s = time.monotonic()
            assert node.stop() == 0
            assert time.monotonic() - begin_s < 3
        assert node.log.count("--trace") == 1, "an outage is one line"


def test_a_collector_that_never_answers_does_not_hold_up_the_end(
    tmp_path: Path, collector: Collector
) -> None:
    collector.goes_on.clear()
    with (
        NodeProcess.start(tmp_path, flags=["--trace", collector.url]) as node,
        RawEngine(node.socket, engine_id="one") as engine,
    ):
        engine.open()
        told(engine, "r")
        collector.await_that(lambda: collector.calls == 1)
        for number in range(20):
            told(engine, f"r{number}")
        begin_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - begin_s < 3
    assert collector.spans == []


@pytest.mark.parametrize("is_on", [False, True])
def test_off_is_not_imported(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    flags = ["--trace", collector.url] if is_on else []
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on stderr
    with NodeProcess.start(tmp_path, flags=flags) as node:
        node.stop()
    worker = ["--worker", "a=http://127.0.0.1:1"]
    with RouterProcess.start(tmp_path, [*worker, *flags]) as router:
        router.stop()
    for process in (node, router):
        assert "kvstore.net" in process.log
        assert ("opentelemetry" in process.log) is is_on
        assert ("kvstore.obs.traces" in process.log) is is_on
